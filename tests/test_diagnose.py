"Diagnosis: what the parts say about the whole, sick trainings and healthy ones, and data or steps that fail."
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from xtts_nb import costs, rules
from xtts_nb import diagnose as diagnosis
from xtts_nb.config import UserError, setup_tf
from xtts_nb.costs import Measured, predicted, rebuilds
from xtts_nb.diagnose import _ranked, apply_remedies, diagnose
from xtts_nb.patients import PATIENTS, summed_up, total_lines, visit, ward
from xtts_nb.phases import Call, Doors, Inside, Turn, rhythm
from xtts_nb.pipeline import doze, host_part, python_operations, stages, with_calls
from xtts_nb.rules import (SMALL, WORTH, Case, Finding, changed_arguments, device_copy, host_sync, larger, products,
                           rounded_shapes, small_files)

setup_tf(threads=2)
BY_NAME = {p.name: p for p in PATIENTS}


# The graph of a pipeline

def python_rows(n=16): return tf.data.Dataset.range(n).map(lambda i: tf.numpy_function(lambda i: i + 1, [i], tf.int64))

@pytest.mark.parametrize('end', [lambda d: d, lambda d: d.repeat().shuffle(4), lambda d: d.interleave(
    lambda i: tf.data.Dataset.from_tensors(i)), lambda d: d.apply(tf.data.experimental.prefetch_to_device('/CPU:0', 2))])
def test_python_is_found_whatever_stands_behind_it(end):
    assert python_operations(end(python_rows())) == 1 and python_operations(end(tf.data.Dataset.range(4))) == 0


def test_a_dataset_without_a_graph_is_unknown_not_clean():
    assert python_operations(iter([1])) is None


def test_python_in_a_comment_is_not_found():
    def load(i): return i + 1   # not tf.numpy_function
    assert python_operations(tf.data.Dataset.range(4).map(load)) == 0


def test_other_calls_keep_order_device_and_python():
    data = python_rows().batch(2).apply(tf.data.experimental.prefetch_to_device('/CPU:0', 3))
    changed = with_calls(data, 4)
    assert [b.numpy().tolist() for b in changed] == [b.numpy().tolist() for b in data]
    assert host_part(changed)[1:] == host_part(data)[1:] and python_operations(changed) == 1
    assert any(s.calls == 4 for s in stages(tf.data.Dataset.range(3).map(lambda i: i, num_parallel_calls=4)))


# Parts and whole

def test_parts_that_overlap_gain_nothing_from_a_buffer():
    m = Measured(loop=0.01, pipeline=0.008, step=0.01, compute=0.01, first=0., batches=20, rows=4)
    assert m.overlap == 1 and predicted(m, overlap=1.) == 1. and predicted(m, pipeline=0.) == pytest.approx(1.)


def test_a_loop_longer_than_its_parts_promises_nothing_for_the_rest():
    m = Measured(loop=0.05, pipeline=0., step=0.01, compute=0.01, first=0., batches=20, rows=4)
    assert predicted(m, pipeline=0.) == 1. and predicted(m, step=0.005) == pytest.approx(2.)


@pytest.mark.parametrize('seconds, cycle', [([], 0), ([1.], 0), ([1.] * 30, 0), ([9, 1, 1] * 10, 3), (list(range(20)), 0),
                                            ([x + 0.1 * i for i, x in enumerate([9, 1, 1] * 10)], 3)])
def test_rhythm(seconds, cycle): assert rhythm(seconds)[0] == cycle


def test_earlier_findings_stay_before_equal_ones():
    found = [Finding(name, '', '', gain) for name, gain in (('a', 1.5), ('b', 1.55), ('c', 3.), ('d', 1.2))]
    assert [f.disease for f in _ranked(found)] == ['c', 'a', 'b', 'd']


def test_findings_are_json():
    assert Finding('a', 'b', 'c', 1.234, cure=print).to_dict() == {'disease': 'a', 'evidence': 'b', 'remedy': 'c',
                                                                  'predicted_gain': 1.23}


# Doors

def test_what_a_step_does_is_noted_and_only_inside_it():
    double = tf.function(lambda x: x * 2)
    with Doors() as doors:
        double(tf.ones(2)).numpy()
        with doors.step() as inside: bool(tf.reduce_all(double(tf.ones(3)) > 0))
    assert len(inside.calls) == inside.syncs == 1 and len(inside.traced) == 1


def test_what_tensorflow_fetches_for_itself_is_no_sync_of_the_step():
    w = tf.Variable(tf.ones(3))
    with Doors() as doors, doors.step() as inside:
        with tf.GradientTape() as tape: loss = tf.reduce_mean(w**2)
        tape.gradient(loss, w)
    assert inside.syncs == 0
    with Doors() as doors, doors.step() as inside: float(loss), loss.numpy(), f'{loss:.2f}', bool(loss > 0)
    assert inside.syncs == 4


def test_doors_hang_as_before_after_a_failure():
    before = type(tf.function(lambda: 0)).__call__
    with pytest.raises(ZeroDivisionError), Doors(): raise ZeroDivisionError
    assert type(tf.function(lambda: 0)).__call__ is before


def test_the_argument_that_changed_is_named():
    f = tf.function(lambda x, rate, more: x * rate)
    for i in range(3): f(tf.ones(2), i, more={'a': tf.ones(2)})
    assert list(changed_arguments(f)) == ['rate']


def test_products_are_counted_by_type():
    w = tf.Variable(tf.ones((4, 4), tf.float64))
    f = tf.function(lambda x: tf.einsum('ij,jk->ik', x @ w @ w, w))
    x = tf.ones((2, 4), tf.float64)
    f(x)
    assert sum(products([Call(f, (x,), {}, 0., False)])[tf.float64].values()) == 3


# Cures

def test_larger_batches_hold_the_same_rows():
    data = tf.data.Dataset.range(12).map(lambda i: {'x': tf.fill([3], i)}).batch(2, drop_remainder=True)
    assert [b['x'].shape for b in larger(data, 3)] == [(6, 3)] * 2
    assert np.array_equal(np.concatenate([b['x'] for b in larger(data, 3)]), np.concatenate([b['x'] for b in data]))


def test_rounded_shapes_are_few_and_longer_ones_are_not_cut():
    ragged = tf.data.Dataset.range(40).map(lambda i: (tf.ones([2, i + 1]), i))
    resident = list(ragged.skip(19).take(1))
    shapes = [b[0].shape[1] for b in rounded_shapes(ragged, resident)]
    assert sorted(set(shapes)) == list(range(5, 41, 5)) and all(n >= i + 1 for i, n in enumerate(shapes))


# Whole trainings

@pytest.mark.parametrize('name', ['host sync per step', 'no prefetch', 'healthy pipeline'])
def test_a_patient_is_named(name):
    row = visit(BY_NAME[name], 12, 2.)
    assert row['right'], row


@pytest.mark.slow
def test_the_ward():
    total = summed_up(ward(PATIENTS))
    for kind, slow, named, within in (('emulated', 11, 10, 8), ('real', 12, 11, 9)):
        assert total[kind]['slow'] == slow and total[kind]['named'] >= named and total[kind]['predicted'] >= within, total
    assert total['left_alone'] == total['healthy'] == 3, total


def test_real_and_emulated_are_counted_apart():
    row = dict(kind='real', right=True, measured=2., true=True)
    rows = [row, row | {'right': False, 'true': False}, row | {'kind': 'emulated'}, row | {'measured': None, 'right': False}]
    total = summed_up(rows)
    assert total == {'emulated': {'slow': 1, 'named': 1, 'predicted': 1}, 'real': {'slow': 2, 'named': 1, 'predicted': 1},
                     'healthy': 1, 'left_alone': 0}
    assert total_lines(total)[1] == 'real: 1 of 2 causes named, 1 gains predicted within 30 %'


def test_no_rule_knows_what_the_emulated_trainings_are_made_of():
    for module in (rules, costs, diagnosis):
        source = Path(module.__file__).read_text()
        assert not re.search('SleepDataset|doze|emulated|patients', source), module.__name__


def test_real_work_sleeps_nowhere():
    real = [p for p in PATIENTS if p.kind == 'real']
    assert len(real) >= 6
    for patient in real:
        data, step = patient.sick()
        assert 'SleepDataset' not in {op for s in stages(data) for op in s.operations}, patient.name


# What costs nothing here

def measured(**more):
    return Measured(**dict(loop=0.01, pipeline=0.001, step=0.01, compute=0.01, first=1., batches=20, rows=4) | more)


def test_a_sync_without_a_gain_is_noted():
    case = Case(None, print, measured(syncs=3., sync=1e-5), [], [])
    assert host_sync(case) is None
    assert len(case.notes) == 1 and '3 results' in case.notes[0] and 'on a GPU each one stops the pipeline' in case.notes[0]
    costly = Case(None, print, measured(compute=0.005, syncs=3., sync=0.005), [], [])
    assert host_sync(costly).predicted_gain > WORTH and not costly.notes
    assert host_sync(Case(None, print, measured(), [], [])) is None


def test_a_copy_through_the_host_without_a_gain_is_noted():
    case = Case(None, print, measured(down=1e6, up=1e6, detour=1e-5), [], [])
    assert device_copy(case) is None and 'on a GPU each copy stops the pipeline' in case.notes[0]


def test_syncs_of_a_real_step_are_noted_in_text_and_json():
    compiled = tf.function(lambda b: (tf.reduce_sum(b), tf.reduce_mean(b), tf.reduce_max(b)))
    def step(batch): return [x.numpy() for x in compiled(batch)]
    data = tf.data.Dataset.from_tensors(tf.ones((4, 8))).repeat().prefetch(2)
    verdict = diagnose(data, step, batches=8, seconds=1.)
    assert verdict.measured.syncs == 3
    said = [f.evidence for f in verdict if f.disease == 'host sync per step'] + verdict.notes
    assert any('3 results' in s for s in said)
    if not any(f.disease == 'host sync per step' for f in verdict):
        assert any('3 results' in n for n in verdict.to_dict()['notes']) and any('3 results' in line for line in verdict.lines())


def test_compilations_are_noted_where_every_length_returns_in_the_same_order():
    "Each round sees lengths that are compiled already, so no loop gains from fewer of them."
    w = tf.ones((8, 8))
    step = tf.function(lambda b: tf.reduce_sum(b @ w), jit_compile=True, input_signature=[tf.TensorSpec([None, 8])])
    lengths = tf.data.Dataset.range(1, 51).map(lambda n: tf.ones([n, 8])).prefetch(2)
    verdict = diagnose(lengths, step, batches=8, seconds=1.)
    m = verdict.measured
    assert m.shapes >= 8 and m.rebuilt == m.shapes - 1 and m.rebuilding > 0, m
    (note,) = [n for n in verdict.notes if 'traced or compiled again' in n]
    assert f'{m.rebuilt} times' in note and ' ms each' in note
    assert note in verdict.to_dict()['notes'] and f'Note: {note}' in verdict.lines()


def test_shapes_that_are_all_new_cost_what_they_take_beyond_a_usual_call():
    turn = lambda n, call: Turn(0., 0., call, 0., Inside(), ((n,),))
    assert costs._new_shapes([turn(n, 0.2) for n in range(8)], usual=0.01) == pytest.approx(0.19)
    assert costs._new_shapes([turn(0, 0.01)] * 8, usual=0.01) == 0


def test_what_is_compiled_once_is_not_noted():
    step = tf.function(lambda b: tf.reduce_sum(b), jit_compile=True)
    verdict = diagnose(tf.data.Dataset.from_tensors(tf.ones((4, 8))).repeat().prefetch(2), step, batches=8, seconds=1.)
    assert verdict.measured.rebuilt == 0 and not any('compiled again' in n for n in verdict.notes)


def test_xla_inside_a_function_is_compiled_by_shape():
    inner = tf.function(lambda b: b * 2, jit_compile=True)
    outer = tf.function(lambda b: inner(b) + 1, input_signature=[tf.TensorSpec([None])])
    plain = tf.function(lambda b: b + 1, input_signature=[tf.TensorSpec([None])])
    for function, expected in ((outer, 1), (plain, 0)):
        with Doors() as doors, doors.step() as inside:
            for n in (2, 3, 2): function(tf.ones(n))
        assert rebuilds(inside.calls)[0] == expected


def test_small_files_are_told_from_large_ones():
    names = tf.data.Dataset.from_tensor_slices(['a', 'b']).repeat()
    data = names.map(tf.io.read_file, num_parallel_calls=2).batch(64)
    reading = next(s for s in stages(data) if 'ReadFile' in s.operations)
    m = measured(loop=0.02, pipeline=0.02, step=0.002, compute=0.002, wait=0.018, busy=1.)
    for size, disease in ((100, 'many small files'), (SMALL + 1, None)):
        found = small_files(Case(data, print, m, [np.zeros(64 * size, np.uint8)], [], [(reading, 0.019)]))
        assert (found and found.disease) == disease


def test_a_remedy_is_tried_and_what_is_to_be_done_by_hand_is_left():
    data, said = tf.data.Dataset.from_tensors(tf.ones((4, 8))).repeat(), []
    slow = tf.function(lambda b: doze(20_000, tf.reduce_sum(b)))
    fast = tf.function(lambda b: tf.reduce_sum(b))
    found = [Finding('step', '', 'a quicker one', 2., lambda d, s: (d, fast)),
             Finding('worse', '', 'slower', 2., lambda d, s: (d, slow)),
             Finding('other', '', 'write it', 2.), Finding('none', '', 'not here', 2., lambda d, s: None)]
    _, step, trials = apply_remedies(data, slow, found, 8, 0.2, said.append)
    assert step is fast and [t.kept for t in trials] == [True, False, False, False]
    assert [t.measured_gain is None for t in trials] == [False, False, True, True] and 'by hand' in said[2]


# Data and steps that fail

def from_python(source): return tf.data.Dataset.from_generator(source, output_signature=tf.TensorSpec([2], tf.float32))

def raising():
    yield np.ones(2, 'f')
    raise OSError('clip 7 is gone')

@pytest.mark.parametrize('data, says', [
    (lambda: tf.data.Dataset.range(0), 'is empty'), (lambda: from_python(raising), 'failed at batch 1: .*clip 7 is gone'),
    (lambda: [np.ones(2)] * 2, 'ended after 2 of 4 batches')])
def test_data_that_fails_is_named(data, says):
    with pytest.raises(UserError, match=says): diagnose(data(), lambda b: b)


def test_a_step_that_fails_is_named():
    with pytest.raises(UserError, match='The step failed on the first batch: ZeroDivisionError'):
        diagnose(tf.data.Dataset.range(9), lambda b: 1 / 0)


def test_a_finite_dataset_of_python_batches_and_a_step_that_returns_nothing():
    verdict = diagnose([np.ones((4, 2), 'f')] * 30, lambda b: None, batches=8, seconds=1.)
    assert verdict.bound and 'Python operations of the pipeline: its graph cannot be read' in verdict.unseen


@pytest.mark.slow
def test_data_that_never_comes_does_not_keep_the_process():
    program = ('import time, tensorflow as tf; from xtts_nb.diagnose import diagnose\n'
               'def never():\n    time.sleep(10**6); yield 1.\n'
               'diagnose(tf.data.Dataset.from_generator(never, output_signature=tf.TensorSpec([], tf.float32)), '
               'lambda b: b, patience=1)')
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and 'gave no batch within 1 s' in done.stderr.splitlines()[-1]
