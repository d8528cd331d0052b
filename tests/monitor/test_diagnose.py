"Diagnosis: the watched loop, changed graphs and pipelines, fixes, whole trainings; causes: `golden.json`."
import json
import weakref

import numpy as np
import pytest
import tensorflow as tf
from process import python
from watched import threads

from xtts_nb.bench import _Variant
from xtts_nb.config import UserError, setup_tf
from xtts_nb.monitor import diagnose as page, input_rules
from xtts_nb.monitor.diagnose import (
    apply_fixes, diagnose, Diagnosis, Measured, measured_gain, _watched)
from xtts_nb.monitor.input_rules import _Batches, _repeat_if_finite
from xtts_nb.monitor.leave_out import Call, in_type
from xtts_nb.monitor.loop import emulated_step, _host_part, tf_sleep
from xtts_nb.monitor.program import _ranked
from xtts_nb.monitor.seen import Finding

setup_tf(threads=2)

def batches_of(**more):
    "Nothing hides behind anything: 8 s of a pipeline, then 10 s of a step."
    return _Batches(**dict(dataset=(), period=18., wait=8., step=10., first=None, fill=0., times=[], busy=0.,
                           seconds=8., stages=[]) | more)

def finding(cause, gain, apply=None): return Finding(cause, f'why {cause}', f'do {cause}', gain, apply=apply)
def called(function, *args, **kwargs):
    function(*args, **kwargs)
    return Call(function, args, kwargs)

# --- costs of an iteration ---------------------------------------------------------------------------------

@pytest.mark.parametrize('more, change, expected', [
    ({}, {}, 1.), ({}, dict(seconds=4.), 18 / 14), ({}, dict(overlap=1.), 1.8), ({}, dict(seconds=-3.), 1.8),
    (dict(period=10.), dict(seconds=0.), 1.),   # it is hidden already
    (dict(period=9., wait=0., seconds=2.), dict(seconds=0.), 1.)])
def test_what_a_faster_pipeline_would_bring(more, change, expected):
    assert batches_of(**more).gain(**change) == pytest.approx(expected)

def test_what_ends_is_repeated():
    data = tf.data.Dataset.range(3)
    assert list(_repeat_if_finite(data).take(7).as_numpy_iterator()) == [0, 1, 2, 0, 1, 2, 0]
    unknown, batches = data.filter(lambda i: i > 0), [1, 2]
    assert _repeat_if_finite(unknown) is unknown and _repeat_if_finite(batches) is batches
    there = data.apply(tf.data.experimental.prefetch_to_device('/CPU:0', 3))
    assert _host_part(_repeat_if_finite(there))[1:] == ('/CPU:0', 3)
    assert [int(i) for _, i in zip(range(4), _repeat_if_finite(there))] == [0, 1, 2, 0]

def test_batches_are_let_go():
    "Next to the four that are ready, those under way, and two that the watch keeps for trials, none stays."
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
    seen, resident, _ = _watched(Batches(), watched, 24, .2, 9., None)
    assert len(made) > 24 and max(alive) <= 4 + 3 + 2
    assert len(seen.steps) >= 20 and {e.kind for e in seen.steps} == {'next'}
    (call,) = page._compiled_calls(seen)
    assert call.function is step and call.args[0].shape == (4, 8)

def test_the_wait_for_the_device_is_its_time():
    "A step returns at once, as on a GPU; the loop waits for the one before the last, and fetches nothing."
    device = emulated_step(lambda batch: .02)
    data = tf.data.Dataset.from_tensors(tf.ones((4, 8))).repeat()
    seen, *_ = _watched(data, device, 12, .5, 9., None)
    assert seen.part('graph') > .6 and not any(e.kind == 'fetch' for e in seen.events)

def test_too_many_calls_are_tried_as_fewer(monkeypatch):
    monkeypatch.setattr(input_rules, 'cores', lambda: 3)
    data = threads(24, tf.data.Dataset.range(4).map(lambda i: i + 1, num_parallel_calls=24))
    cause, evidence, *_, apply = input_rules._too_many_calls(batches_of(dataset=data))
    assert '24 calls or threads at a time on 3 cores; with 3 a batch takes' in evidence
    fixed, _ = apply(data, print)
    assert list(fixed.as_numpy_iterator()) == [1, 2, 3, 4]
    assert _host_part(fixed)[0].options().threading.private_threadpool_size == 3

def test_a_fix_that_fails_or_brings_nothing():
    data, notes = tf.data.Dataset.from_tensors(tf.ones((4, 8))).repeat(), []
    step = tf.function(lambda b: tf.reduce_sum(b))
    slow = tf.function(lambda b: tf_sleep(20_000, tf.reduce_sum(b)))
    fails, same = finding('a', 2., lambda d, s: 1 / 0), finding('b', 2., lambda d, s: (d, slow))
    assert page._try_fix(fails, data, step, 8, .1, notes) is fails
    assert page._try_fix(same, data, step, 8, .1, notes) is None
    assert notes[0] == 'a: do a could not be tried (ZeroDivisionError).' and 'b: do b was tried' in notes[1]

def test_what_a_gpu_would_wait_for_is_noted_once_for_each_function(monkeypatch):
    step = tf.function(lambda x: tf.random.shuffle(tf.random.shuffle(x) @ x) @ x)
    monkeypatch.setattr(page, '_compiled_calls', lambda seen: [called(step, tf.ones((3, 3)))] * 2)
    (note,) = page._on_a_gpu(None)
    assert note.startswith('on a GPU, host operation: 2 x RandomShuffle at ') and 'test_diagnose.py:' in note

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
    run = in_type(call, (tf.float64,))
    first, second = run(), run()
    assert np.array_equal(w.numpy(), before) and count.numpy() == counted   # those of the program stay
    now = step(x, more)
    assert [t.dtype for t in first] == [now['n'].dtype, tf.float32] and first[0] == now['n']
    assert np.allclose(first[1], now['y']) and np.allclose(second[1], step(x, more)['y'])

def test_what_is_no_variable_is_read_as_it_is():
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(['a'], tf.constant([3])), 0)
    step = tf.function(lambda x, name: x * 2 * tf.cast(table.lookup(name), tf.float64))
    (found,) = in_type(called(step, tf.constant([2.], tf.float64), tf.constant(['a'])), (tf.float64,))()
    assert found.dtype == tf.float32 and found == 12.

@pytest.mark.parametrize('kind', [tf.float16, tf.bfloat16])
def test_half_precision_as_float32(kind):
    w = tf.Variable(tf.ones((2, 2)))
    half = tf.function(lambda x: tf.cast(x, kind) @ tf.cast(w, kind) * tf.constant(3, kind))
    (run,) = in_type(called(half, tf.ones((1, 2))), (kind,))()
    assert run.dtype == tf.float32 and run.numpy().tolist() == [[6., 6.]]
    single = called(tf.function(lambda x: x @ w), tf.ones((1, 2)))
    (run,) = in_type(single, (tf.float32,), kind)()   # and the other way
    assert run.dtype == kind and tf.cast(run, tf.float32).numpy().tolist() == [[2., 2.]]

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
    assert measured_gain(_Variant('now', now), _Variant('then', then)) == (gain, clear)

def test_a_fix_that_changes_what_is_learned_is_not_made():
    data, apply = tf.data.Dataset.from_tensors(tf.ones((4, 8))).repeat(), lambda d, s: 1 / 0
    larger = Finding('tiny batch', 'why', 'more rows', 2., True, apply, 'the batch size')
    _, step, (trial,) = apply_fixes(data, len, [larger], 8, .2, lambda line: None)
    assert step is len and not trial.kept and (trial.alters, trial.error) == ('the batch size', '')

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
    m = Measured(.018, .0181, .0100004, .008, .006, .018, .5, 4)
    assert m.at_most == {'input': 1.8, 'host': 1., 'host and compute': 2.25}
    one = Diagnosis([finding('a', 2.04)], m, 'input-bound', {'input': .4}, ['n'], 1.26)
    assert one.lines()[2:] == ['1. a: at most about 2.0 x as fast', '   why a.', '   Fix: do a.', 'Note: n']
    said = json.loads(json.dumps(one.to_dict()))
    assert said['measured'] == vars(m) | {'ready': .01} and said['seconds'] == 1.3
    assert repr(Diagnosis([], m, 'input-bound', {}, [], 1.)).endswith('\nNothing to fix.')

def test_a_finite_dataset_of_python_batches_and_a_step_that_returns_nothing():
    batches = [np.ones((4, 2), 'f')] * 30
    verdict = diagnose(batches, lambda b: None, batches=8, seconds=1.)
    with pytest.raises(UserError, match='read again'): diagnose(iter(batches), len, batches=8, seconds=1.)
    assert verdict.bound and sum(verdict.shares.values()) == pytest.approx(1, abs=.01)
    with pytest.raises(UserError): diagnose(batches, lambda b: None, batches=7)

def test_a_slow_step_is_named_at_its_line_and_its_fix_is_measured():
    "Operations that Python starts one by one; as a graph they are several times as fast."
    w = [tf.Variable(tf.ones((8, 8)) / 8) for _ in range(40)]
    def step(x):
        for v in w: x = tf.tanh(x @ v)
        return tf.reduce_mean(x)
    data = tf.data.Dataset.from_tensors(tf.ones((4, 8))).repeat().prefetch(2)
    verdict = diagnose(data, step, batches=8, seconds=4.)
    found = verdict[0]
    assert found.cause == 'step not compiled' and found.place.startswith('test_diagnose.py:')
    assert found.measured and found.low > 1 or any('not tried' in note for note in verdict.notes)   # busy

@pytest.mark.slow
def test_data_that_never_comes_does_not_keep_the_process():
    program = ('import time, tensorflow as tf; from xtts_nb.monitor.diagnose import diagnose\n'
               'def never():\n    time.sleep(10**6); yield 1.\n'
               'data = tf.data.Dataset.from_generator(never, output_signature=tf.TensorSpec([]))\n'
               'diagnose(data, lambda b: b, timeout=1)')
    done = python(program, timeout=100)
    assert done.code == 1 and 'gave no batch within 1 s' in done.err.splitlines()[-1]
