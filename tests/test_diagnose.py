"Diagnosis: what the parts say about the whole, sick trainings and healthy ones, and data or steps that fail."
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.config import UserError, setup_tf
from xtts_nb.costs import Measured, predicted
from xtts_nb.diagnose import _ranked, apply_remedies, diagnose
from xtts_nb.patients import PATIENTS, summed_up, visit, ward
from xtts_nb.phases import Call, Doors, rhythm
from xtts_nb.pipeline import doze, host_part, python_operations, stages, with_calls
from xtts_nb.rules import Finding, changed_arguments, larger, products, rounded_shapes

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


@pytest.mark.parametrize('seconds, cycle', [([], 0), ([1.], 0), ([1.] * 30, 0), ([9, 1, 1] * 10, 3), (list(range(20)), None)])
def test_rhythm(seconds, cycle): assert cycle is None or rhythm(seconds)[0] == cycle


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
    assert total['ill'] == 12 and total['named'] >= 11 and total['predicted'] >= 9, total
    assert total['left_alone'] == total['healthy'] == 3, total


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
