"Diagnosis: costs of an iteration, changed graphs, fixes, whole trainings; the rules are in `golden.json`."
import json
import weakref

import numpy as np
import pytest
import tensorflow as tf
from process import python
from watched import threads

from xtts_nb.bench import _Arm
from xtts_nb.config import UserError, setup_tf
from xtts_nb.monitor import diagnose as page
from xtts_nb.monitor.diagnose import (
    apply_fixes, Case, diagnose, Diagnosis, Finding, in_float32, measure_training, Measured, measured_gain,
    _merge_batches, _pad_to_few_shapes, predict_gain, _ranked, _repeat_if_finite)
from xtts_nb.monitor.loop import Call, _host_part, tf_sleep

setup_tf(threads=2)

def measured(**more):
    "Nothing hides behind anything: 8 s of a pipeline, then 10 s of a step."
    return Measured(**dict(loop=18., pipeline=8., step=10., compute=10., first=0., batches=20, rows=4,
                           wait=8.) | more)

def finding(cause, gain, apply=None): return Finding(cause, f'why {cause}', f'do {cause}', gain, apply=apply)
def called(function, *args, **kwargs):
    function(*args, **kwargs)
    return Call(function, args, kwargs, 0., False)

# --- costs of an iteration ---------------------------------------------------------------------------------

@pytest.mark.parametrize('more, change, expected', [
    ({}, {}, 1.), ({}, dict(pipeline=4.), 18 / 14), ({}, dict(step=5.), 18 / 13), ({}, dict(overlap=1.), 1.8),
    ({}, dict(pipeline=-3.), 1.8), ({}, dict(traced=2.), .9), (dict(compute=4., traced_alone=2.), {}, 1.),
    (dict(loop=20., traced=2.), dict(traced=0.), 20 / 18),
    (dict(loop=10.), dict(pipeline=0.), 1.),   # it is hidden already
    (dict(loop=50., pipeline=0.), dict(step=5.), 2.)])

def test_what_a_change_would_bring(more, change, expected):
    assert predict_gain(measured(**more), **change) == pytest.approx(expected)

def test_what_ends_is_repeated():
    data = tf.data.Dataset.range(3)
    assert list(_repeat_if_finite(data).take(7).as_numpy_iterator()) == [0, 1, 2, 0, 1, 2, 0]
    unknown, batches = data.filter(lambda i: i > 0), [1, 2]
    assert _repeat_if_finite(unknown) is unknown and _repeat_if_finite(batches) is batches
    there = data.apply(tf.data.experimental.prefetch_to_device('/CPU:0', 3))
    assert _host_part(_repeat_if_finite(there))[1:] == ('/CPU:0', 3)
    assert [int(i) for _, i in zip(range(4), _repeat_if_finite(there))] == [0, 1, 2, 0]

def test_batches_are_let_go():
    "Beside the four that are ready and those under way, none stays; the calls keep what describes them."
    made, alive = [], []
    class Batches:
        def __iter__(self):
            while True:
                made.append(weakref.ref(x := tf.random.normal([4, 8])))
                yield x
    step = tf.function(lambda x: tf.reduce_sum(x))
    def watched(batch):
        result = step(batch)
        alive.append(sum(ref() is not None for ref in made))
        return result
    m, resident, calls = measure_training(Batches(), watched, 24, .2)
    assert len(made) > 12 and max(alive) <= 4 + 3   # resident; in hand, the one before, one of another shape
    assert any(calls[0].args[0] is x for x in resident)   # the last step can be called again

def test_a_real_measurement_tells_the_parts_apart():
    "A step that fetches two results, on batches of two shapes, and a pipeline that runs Python."
    compiled = tf.function(lambda b: (tf.reduce_sum(b), tf.reduce_max(b)))
    rows = tf.data.Dataset.range(40).map(lambda i: tf.numpy_function(np.float32, [i], tf.float32))
    data = rows.map(lambda x: tf.ensure_shape(tf.fill([tf.cast(x, tf.int32) % 2 + 3, 4], x), [None, 4]))
    step = lambda b: [x.numpy() for x in compiled(b)]
    m, resident, calls = measure_training(data, step, batches=8, seconds=1.)
    assert (m.shapes, m.syncs, m.traces, m.rebuilt, m.compiled, m.rows, m.batches) == (2, 2, 0, 1, True, 3, 8)
    assert len(resident) == 4 and len(calls) == 1 and m.python > 0 and 0 < m.compute <= m.step

# --- what the table of rules cannot say --------------------------------------------------------------------

def test_too_many_calls_are_tried_as_fewer(monkeypatch):
    monkeypatch.setattr(page, 'cores', lambda: 3)
    data = threads(24, tf.data.Dataset.range(4).map(lambda i: i + 1, num_parallel_calls=24))
    found = page.find_oversubscription(Case(data, print, measured(), [], []))
    assert '24 calls or threads at a time on 3 cores; with 3 a batch takes' in found.evidence
    fixed, _ = found.apply(data, print)
    assert list(fixed.as_numpy_iterator()) == [1, 2, 3, 4]
    assert _host_part(fixed)[0].options().threading.private_threadpool_size == 3

def test_a_trial_ends_with_the_time_and_its_failure_is_no_finding(monkeypatch):
    c, late = (Case((), lambda b: b, measured(compiled=False), ['batch'], []) for _ in range(2))
    assert page._trial_seconds(c, lambda batch: 1 / 0, 'batch') is None and not c.unseen
    late.deadline = -1.
    assert page.find_uncompiled_step(late) is page.find_missing_xla(late) is None
    assert late.unseen == ['fixes for which no time was left (raise `seconds`)']
    def find_nothing(c): raise KeyError('first\nsecond')
    assert page._ask(find_nothing, c) is None   # the other rules are asked
    assert c.unseen == ["what find_nothing looks for: KeyError: 'first\\nsecond'"]

def test_what_a_gpu_would_wait_for_is_noted_once_for_each_function():
    step = tf.function(lambda x: tf.random.shuffle(tf.random.shuffle(x) @ x) @ x)
    c = Case((), print, measured(), [], [called(step, tf.ones((3, 3)))] * 2)
    page._note_for_a_gpu(c)
    (note,) = c.notes
    assert note.startswith('On a GPU, host operation: 2 x RandomShuffle at ') and 'test_diagnose.py:' in note

# --- changed graphs and pipelines --------------------------------------------------------------------------

@pytest.mark.parametrize('compiled', [False, True])
def test_a_step_in_float32_computes_the_same_on_copies(compiled):
    "Variables, a constant, a captured tensor, a function within, a branch, an integer beside."
    w, count = tf.Variable(tf.ones((2, 2), tf.float64)), tf.Variable(0)
    captured = tf.constant([.5, .25], tf.float64)
    inner = tf.function(lambda x: x @ w + captured)
    @tf.function(jit_compile=compiled)
    def step(x, more):
        y = tf.cond(more > 1, lambda: inner(x), lambda: x) * tf.constant([[1.5]], tf.float64)
        w.assign_add(tf.reduce_mean(y) * tf.ones((2, 2), tf.float64))
        count.assign_add(1)
        return {'y': y, 'n': more + 1}
    x, more = tf.constant([[1., 2.]], tf.float64), tf.constant(2)
    call = called(step, x, more)
    before, counted = w.numpy(), count.numpy()
    run = in_float32(call)
    first, second = run(), run()
    assert np.array_equal(w.numpy(), before) and count.numpy() == counted   # those of the program stay
    now = step(x, more)
    assert [t.dtype for t in first] == [now['n'].dtype, tf.float32] and first[0] == now['n']
    assert np.allclose(first[1], now['y']) and np.allclose(second[1], step(x, more)['y'])

def test_what_is_no_variable_is_read_as_it_is():
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(['a'], tf.constant([3])), 0)
    step = tf.function(lambda x, name: x * 2 * tf.cast(table.lookup(name), tf.float64))
    (found,) = in_float32(called(step, tf.constant([2.], tf.float64), tf.constant(['a'])))()
    assert found.dtype == tf.float32 and found == 12.

@pytest.mark.parametrize('kind', [tf.float16, tf.bfloat16])
def test_half_precision_as_float32(kind):
    w = tf.Variable(tf.ones((2, 2)))
    half = tf.function(lambda x: tf.cast(x, kind) @ tf.cast(w, kind) * tf.constant(3, kind))
    (run,) = in_float32(called(half, tf.ones((1, 2))), page.HALF)()
    assert run.dtype == tf.float32 and run.numpy().tolist() == [[6., 6.]]

@pytest.mark.parametrize('make', [lambda i: {'x': tf.fill([3, 2], i)}, lambda i: (tf.fill([3, 2], i), i)])
def test_larger_batches_hold_the_same_rows(make):
    "Fourteen rows in twos make two batches of three times as many; the last batch is dropped."
    data = tf.data.Dataset.range(14).map(make).batch(2, drop_remainder=True)
    grown, rows = ([tf.nest.flatten(b) for b in d] for d in (_merge_batches(data, 3), data))
    for have, want in zip(zip(*grown), zip(*rows[:6])):
        assert [len(x) for x in have] == [6, 6]
        np.testing.assert_array_equal(tf.concat(have, 0), tf.concat(want, 0))
    there = data.apply(tf.data.experimental.prefetch_to_device('/CPU:0', 3))
    assert _host_part(_merge_batches(there, 3))[1:] == ('/CPU:0', 3)

def test_rounded_shapes_are_few_and_nothing_is_cut():
    "The longest known batch has 20 columns: multiples of 5; a short axis and one of known length stay."
    def row(i): return {'x': tf.ensure_shape(tf.ones(tf.stack([3, i, i % 3 + 1])), [3, None, None]), 'i': i}
    ragged = tf.data.Dataset.range(1, 31).map(row)
    resident = [b for i, b in enumerate(ragged, 1) if i in (20, 3)]
    for n, b in enumerate(_pad_to_few_shapes(ragged, resident), 1):
        assert b['i'] == n and b['x'].shape == (3, -(-n // 5) * 5, n % 3 + 1)
        assert np.all(b['x'][:, :n] == 1) and np.all(b['x'][:, n:] == 0)
    there = ragged.apply(tf.data.experimental.prefetch_to_device('/CPU:0', 3))
    assert _host_part(_pad_to_few_shapes(there, resident))[1:] == ('/CPU:0', 3)
    assert _pad_to_few_shapes(iter(resident), resident) is None is _merge_batches(resident, 3)   # none

# --- fixes ----------------------------------------------------------------------------------------------

def test_earlier_findings_stay_before_nearly_equal_ones():
    found = [finding(name, gain) for name, gain in (('a', 1.5), ('b', 1.55), ('c', 3.), ('d', 1.2))]
    assert [f.cause for f in _ranked(found)] == ['c', 'a', 'b', 'd']

@pytest.mark.parametrize('now, then, gain, clear', [
    ([3., 3., 3.], [2., 2., 2.], 1.5, True), ([1.05] * 3, [1.] * 3, 1.05, False),
    ([1.06] * 3, [1.] * 3, 1.06, True),
    ([2., 4., 8.], [1., 2., 4.], 2., True),         # the machine became slower, for both
    ([2., 2., 1.], [1., 1., 1.], 2., False),        # not faster in each round
    ([9., 1., 1.], [1., 1., 1.1], 1., False)])      # one slow round before is no gain
def test_a_gain_is_clear_if_every_round_shows_it(now, then, gain, clear):
    assert measured_gain(_Arm('now', now), _Arm('then', then)) == (gain, clear)

@pytest.mark.parametrize('change_learning', [False, True])
def test_what_is_learned_is_changed_only_on_request(change_learning):
    data, apply = tf.data.Dataset.from_tensors(tf.ones((4, 8))).repeat(), lambda d, s: (d, fast)
    slow = tf.function(lambda b: tf_sleep(20_000, tf.reduce_sum(b)))
    fast = tf.function(lambda b: tf.reduce_sum(b))
    larger = Finding('tiny batch', 'why', 'more rows', 2., True, apply, 'the batch size')
    _, step, (trial,) = apply_fixes(data, slow, [larger], 8, .2, lambda line: None, change_learning)
    assert (step is fast) == trial.kept == (trial.measured_gain is not None) == change_learning
    assert trial.alters == ('' if change_learning else 'the batch size')

def test_a_fix_is_tried_on_what_earlier_ones_left():
    data = tf.data.Dataset.from_tensors(tf.ones((4, 8))).repeat()
    slow = tf.function(lambda b: tf_sleep(20_000, tf.reduce_sum(b)))
    fast = tf.function(lambda b: tf.reduce_sum(b))
    found = [finding('step', 2., lambda d, s: (d, fast)), finding('worse', 2., lambda d, s: (d, slow)),
             finding('no step', 2., lambda d, s: (d, lambda b: 1 / 0)),
             finding('no fix', 2., lambda d, s: d / s),
             finding('other', 2.)]
    _, step, trials = apply_fixes(data, slow, found, 8, .2, lambda line: None)
    assert step is fast and [t.kept for t in trials] == [True] + [False] * 4
    assert [t.error for t in trials] == ['', '', 'UserError', 'TypeError', '']

# --- whole trainings ---------------------------------------------------------------------------------------

def test_a_diagnosis_in_text_and_json():
    m = measured(loop=.018, pipeline=.008, step=.0100004, compute=.006)
    one = Diagnosis([finding('a', 2.04)], m, 'input-bound', {'input': .4}, {'input': 1.8}, 'Map', ['n'],
                    ['u'], 1.26)
    assert one.lines()[2:] == ['1. a: at most about 2.0 x as fast', '   why a.', '   Fix: do a.',
                               'Note: n', 'Not seen: u.']
    said = json.loads(json.dumps(one.to_dict()))
    assert said['measured'] == vars(m) | {'step': .01} and said['seconds'] == 1.3
    assert repr(Diagnosis([], m, 'input-bound', {}, {}, None, [], [], 1.)).endswith('\nNothing to fix.')

def test_a_finite_dataset_of_python_batches_and_a_step_that_returns_nothing():
    batches = [np.ones((4, 2), 'f')] * 30
    verdict = diagnose(batches, lambda b: None, batches=8, seconds=1.)
    assert verdict.bound and 'Python operations of the pipeline: its graph cannot be read' in verdict.unseen
    with pytest.raises(UserError): diagnose(batches, lambda b: None, batches=7)

@pytest.mark.slow
def test_data_that_never_comes_does_not_keep_the_process():
    program = ('import time, tensorflow as tf; from xtts_nb.monitor.diagnose import diagnose\n'
               'def never():\n    time.sleep(10**6); yield 1.\n'
               'data = tf.data.Dataset.from_generator(never, output_signature=tf.TensorSpec([]))\n'
               'diagnose(data, lambda b: b, timeout=1)')
    done = python(program, timeout=100)
    assert done.code == 1 and 'gave no batch within 1 s' in done.err.splitlines()[-1]
