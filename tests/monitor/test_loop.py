"Phases of a step: what it calls, fetches and sends, how long an iteration takes; data and steps that fail."
import threading

import numpy as np
import pytest
import tensorflow as tf
from clock import Clock

from xtts_nb.monitor import loop as phases
from xtts_nb.config import UserError, setup_tf
from xtts_nb.monitor.loop import (
    HOOKED, TF_FUNCTION, _LARGE, Call, Iteration, StepEvents, SyncHooks, as_user_error, batch_of_each_shape,
    batch_rows, compute_seconds, covered_seconds, emulated_step, find_cycle, first_batches,
    first_step, missing_hooks, open_dataset, period, run_iterations, shapes_of, variation, with_timeout)

setup_tf(threads=2)


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(phases, 'time', Clock())
    return phases.time


# The emulated device

def test_an_emulated_device_takes_the_time_that_is_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(phases, 'tf_sleep', lambda us, value: asked.append(float(us)) or value)
    assert float(emulated_step(lambda batch: .02)({'a': tf.ones(3)})) == 3.
    sums = emulated_step(lambda batch: .5, lambda batch, *rest: batch[0] + rest[0], blocking=True)
    assert float(sums(tf.ones(3), 4.)) == 5.
    assert asked == [2e4, 5e5]


@pytest.mark.parametrize('blocking', [False, True])
def test_only_a_blocking_device_makes_the_host_wait(blocking):
    gate = threading.Event()
    if blocking: gate.set()
    wait = lambda batch: tf.numpy_function(lambda: gate.wait(5), [], tf.bool)
    step = emulated_step(lambda batch: 0., wait, blocking=blocking)
    assert isinstance(step, TF_FUNCTION) == blocking
    result = step(tf.ones(1))
    gate.set()   # the call has returned
    assert bool(result)


# Hooks

def test_the_calls_of_a_step_are_noted_with_their_time(clock):
    "A function takes half a second while it is traced, and a quarter of one for its Python."
    def body(x):
        clock.sleep(.5)
        return inner(x)
    inner, outer = tf.function(lambda x: x * 2), tf.function(body, input_signature=[tf.TensorSpec([None])])
    notes = []
    with SyncHooks() as hooks:
        inner(tf.ones(1))   # outside a step
        for n in (2, 2, 3):
            with hooks.step() as events: outer(tf.ones(n)), inner(tf.ones(n))
            notes.append([(c.function is outer, c.seconds, c.traced, c.new) for c in events.calls])
            assert [c.args[0].shape[0] for c in events.calls] == [n, n]
    first, second = zip(*notes)
    assert first == ((True, .5, True, True), (True, 0., False, False), (True, 0., False, True))
    assert [s[3] for s in second] == [True, False, True] and not any(s[0] for s in second)


def test_traced_calls_are_separated_from_the_others():
    calls = [Call(None, (), {}, 0., traced) for traced in (False, True, False)]
    assert StepEvents(calls).traced == [calls[1]]


def test_what_a_step_does_is_noted_and_only_inside_it():
    double = tf.function(lambda x: x * 2)
    with SyncHooks() as hooks:
        double(tf.ones(2)).numpy()
        with hooks.step() as events: bool(tf.reduce_all(double(tf.ones(3)) > 0))
        tf.ones(2).numpy(), tf.constant(np.ones(_LARGE, np.uint8))
    assert len(events.calls) == events.syncs == 1 and len(events.traced) == 1 and events.up == 0


def test_what_another_thread_does_is_no_part_of_the_step():
    with SyncHooks() as hooks, hooks.step() as events:
        other = threading.Thread(target=lambda: tf.ones(2).numpy())
        other.start(), other.join()
    assert events.syncs == 0


def test_what_tensorflow_fetches_for_itself_is_no_sync_of_the_step():
    w = tf.Variable(tf.ones(3))
    with SyncHooks() as hooks, hooks.step() as events:
        with tf.GradientTape() as tape: loss = tf.reduce_mean(w**2)
        tape.gradient(loss, w)
    assert events.syncs == 0
    with SyncHooks() as hooks, hooks.step() as events:
        float(loss), loss.numpy(), f'{loss:.2f}', bool(loss > 0)
    assert events.syncs == 4


def test_large_pieces_are_copies_and_small_ones_are_syncs(clock):
    "To fetch takes 1/4 s; the detour goes from the first large piece fetched to the last handed over."
    large, small = np.ones(_LARGE, np.uint8), np.ones(_LARGE - 1, np.uint8)
    with SyncHooks() as hooks:
        fetch = hooks._original['fetch']
        hooks._original['fetch'] = lambda tensor: (clock.sleep(.25), fetch(tensor))[1]
        data, scalar = [tf.constant(large), tf.constant(small)], tf.constant(1.)
        with hooks.step() as only_up: tf.constant(large), tf.constant(small), tf.constant(2.)
        with hooks.step() as only_down: data[0].numpy()
        with hooks.step() as events:
            data[1].numpy(), scalar.numpy(), data[0].numpy()
            clock.sleep(1.)
            data[0].numpy(), tf.constant(large)
            clock.sleep(2.)
            tf.constant(large)
    assert (only_up.up, only_up.down, only_up.detour, only_up.syncs) == (_LARGE, 0, 0., 0)
    assert (only_down.up, only_down.down, only_down.detour, only_down.syncs) == (0, _LARGE, 0., 0)
    assert (events.up, events.down, events.detour) == (2 * _LARGE, 2 * _LARGE, .25 + 1 + .25 + 2)
    assert (events.syncs, events.sync) == (2, .5)


def test_the_python_of_a_pipeline_is_noted(clock):
    slow = lambda i: (clock.sleep(.5), i)[1]
    rows = tf.data.Dataset.range(3).map(lambda i: tf.numpy_function(slow, [i], tf.int64))
    with SyncHooks() as hooks: assert [int(i) for i in rows] == [0, 1, 2]
    assert hooks.python == [(100., 100.5), (100.5, 101.), (101., 101.5)]


def test_functions_are_restored_after_a_failure():
    before = type(tf.function(lambda: 0)).__call__
    with pytest.raises(ZeroDivisionError), SyncHooks() as hooks, hooks.step(): raise ZeroDivisionError
    assert type(tf.function(lambda: 0)).__call__ is before and hooks.events is None


def test_functions_that_tensorflow_lacks_are_not_counted(monkeypatch):
    lacking = {'fetch': ('host syncs', 'tensorflow.python.framework.ops:NoTensor', '_numpy'),
               'convert': ('copies', 'tensorflow.python.framework.constant_op', 'no_function'),
               'run_python': ('Python', 'tensorflow.python.no_module', '__call__')}
    monkeypatch.setattr(phases, 'HOOKED', HOOKED | lacking)
    with SyncHooks() as hooks, hooks.step() as events: tf.function(lambda x: x + 1)(tf.ones(2)).numpy()
    assert len(events.calls) == 1 and events.syncs == 0
    assert [line.partition(':')[0] for line in missing_hooks()] == ['host syncs', 'copies', 'Python']
    monkeypatch.undo()
    assert missing_hooks() == []


# Iterations of a loop

def test_rows_and_shapes_of_any_structure():
    assert batch_rows({'a': np.zeros((3, 2))}) == 3 and batch_rows((tf.ones(5), 1)) == 5
    assert batch_rows(7) is None
    assert batch_rows((tf.constant(1.), np.zeros((0, 2)), np.ones((4, 0)))) == 4
    assert shapes_of({'a': tf.ones((2, 3)), 'b': 4, 'c': (np.zeros(5),)}) == ((2, 3), (5,))


def test_an_iteration_waits_for_the_step_before_the_last(clock, monkeypatch):
    "A batch comes after 1/4 s, a step takes 1/2 s, and its result is there 1/8 s after it was asked for."
    results, waited = iter('abcd'), []
    monkeypatch.setattr(phases, 'wait_for', lambda result: (waited.append(result), clock.sleep(.125)))
    batches = clock.each([.25] * 9, np.ones((3, 2)))
    some = run_iterations(batches, lambda batch: (clock.sleep(.5), next(results))[1], at_most=4, seconds=99.)
    assert waited == list('abcd')
    # the last one ends when nothing is left to do
    expected = [(0., .75), (.75, 1.5), (1.5, 2.375), (2.375, 3.5)]
    assert some == [Iteration(100 + begun, .25, .5, 100 + ended, StepEvents(), ((3, 2),))
                    for begun, ended in expected]


@pytest.mark.parametrize('seconds, at_least, there, count', [
    (0., 4, 9, 4), (0., 2, 9, 2), (1.5, 1, 9, 2), (1.6, 1, 9, 3), (99., 1, 9, 6), (99., 4, 3, 3),
    (99., 4, 0, 0)])
def test_iterations_end_with_their_time_their_number_or_the_data(clock, seconds, at_least, there, count):
    batches = clock.each([.25] * there, 1.)
    step = lambda batch: clock.sleep(.5)
    assert len(run_iterations(batches, step, at_most=6, seconds=seconds, at_least=at_least)) == count
    assert sum(1 for _ in batches) == max(0, there - count)   # no batch is fetched in vain


@pytest.mark.parametrize('n, warm, expected',
                         [(1, 2, 1.), (2, 2, 1.), (3, 2, 2.), (4, 2, 3.), (10, 2, 78 / 8), (10, 9, 57 / 5)])
def test_a_period_leaves_the_first_iterations_out(n, warm, expected):
    "Iteration i begins at i squared, and takes a second."
    assert period([Iteration(i**2, 0., 0., i**2 + 1, None, ()) for i in range(n)], warm) == expected


@pytest.mark.parametrize('seconds, expected',
                         [([1., 3.], .5), ([.25, .75], .5), ([], 0.), ([0., 0.], 0.), ([2.], 0.)])
@pytest.mark.filterwarnings('error')
def test_variation(seconds, expected): assert variation(seconds) == expected


def drifting(times): return [x + .1 * i for i, x in enumerate(times)]

@pytest.mark.parametrize('seconds, expected', [
    ([], 0), ([1.] * 30, 0), ([0.] * 10, 0), (list(range(20)), 0), ([9, 1] * 3 + [9], 0), ([9, 1] * 4, 2),
    ([9, 1, 1] * 10, 3), ([9, 1, 1] * 3, 3), ([9, 1, 1] * 3 + [9], 3), ([9, 1, 1, 1] * 2 + [9], 0),
    ([9, 1, 1, 1] * 3, 4),
    (np.random.default_rng(0).normal(10, 1, 40), 0), (drifting([9, 1, 1] * 10), 3)], ids=str)
def test_find_cycle(seconds, expected):
    cycle, correlation = find_cycle(seconds)
    assert cycle == expected and (.85 < correlation <= 1 if cycle else correlation == 0)


def test_a_cycle_in_noise_is_an_autocorrelation():
    "Against the formula: the mean product of times that far apart, over their mean square, without trend."
    times = 10 + np.random.default_rng(0).normal(0, 1, 60) + [2.5, 0, 0, 0, 0] * 12
    x, at = times - times.mean(), np.arange(60) - 29.5
    x = x - at * (at @ x) / (at @ at)
    expected = np.mean([x[i] * x[i + 5] for i in range(55)]) / np.mean(x**2)
    assert .3 < expected < .6 and find_cycle(times) == (5, round(expected, 2))


@pytest.mark.parametrize('seconds, at_most, bursts', [(0., 3, 2), (15., 3, 2), (15.5, 3, 3), (99., 4, 4)])
def test_compiled_functions_are_timed_three_in_a_row(clock, monkeypatch, seconds, at_most, bursts):
    "The first row takes 9 s, the second one 6 s."
    waited, calls = [], []
    monkeypatch.setattr(phases, 'wait_for', waited.append)
    times = iter([7., 3., 3., 3., *[1., 4., 1., 3., 3., 3.] * 3])
    def function(x, y): calls.append((x, y)); clock.sleep(next(times)); return len(calls)
    assert compute_seconds([Call(function, (1,), {'y': 2}, 0., False)], at_most, seconds) == 2.
    assert waited == [1 + 3 * i for i in range(bursts + 1)] and set(calls) == {(1, 2)}
    assert compute_seconds([]) is None


@pytest.mark.parametrize('spans, expected', [
    ([], 0.), ([(0, 2), (1, 3), (5, 6)], 4.), ([(5, 6), (0, 10), (2, 3), (4, 4.5)], 10.), ([(-3, -1)], 2.)])
def test_time_that_is_covered(spans, expected): assert covered_seconds(spans) == expected


# Data and steps that fail

@pytest.mark.parametrize('error, words', [
    (ValueError('first\nsecond'), 'work: ValueError: first'), (ValueError(''), 'work: ValueError: '),
    (OSError('{{node a/b}} gone'), 'work: OSError: gone'), (UserError('as it is'), 'as it is')])
def test_what_failed_is_named(error, words):
    with pytest.raises(UserError) as said, as_user_error('work'): raise error
    assert str(said.value) == words


def test_work_in_a_thread_is_left_alone_when_it_is_late():
    # it does not keep the process
    assert with_timeout(9., lambda: threading.current_thread().daemon, 'late') is True
    with pytest.raises(ZeroDivisionError): with_timeout(9., lambda: 1 / 0, 'late')
    gate = threading.Event()
    with pytest.raises(UserError, match='^late$'): with_timeout(.01, gate.wait, 'late')
    gate.set()


def raising(n):
    yield from range(n)
    raise OSError('clip 7 is gone')

@pytest.mark.parametrize('data, words', [
    (lambda: [], 'The dataset is empty'),
    (lambda: raising(0), 'failed before its first batch: OSError: clip 7 is gone'),
    (lambda: raising(2), 'failed at batch 2: OSError: clip 7 is gone'),
    (lambda: range(3), 'ended after 3 of 4 batches')])
def test_data_that_fails_is_named(data, words):
    with pytest.raises(UserError, match=words): first_batches(data())


def test_as_many_batches_as_asked_are_fetched():
    source, first = open_dataset(range(3, 9))
    assert first == 3 and list(source) == [4, 5, 6, 7, 8]
    for many in (1, 2, 4):
        rest = iter(range(9))
        assert first_batches(rest, many) == list(range(many))
        assert next(rest) == many
    late = threading.Event()
    def stuck(): yield 1; late.wait(9); yield 2
    with pytest.raises(UserError, match='no batch within 0.05 s after 1'): first_batches(stuck(), 2, .05)
    late.set()


@pytest.mark.parametrize('batches, seconds, at_most, lengths, left', [
    (9, 99., 9, [1, 2, 3, 4], 0), (9, 99., 2, [1, 2], 4), (3, 99., 9, [1, 2], 3), (9, 1., 9, [1, 2], 3),
    (9, .9, 9, [1, 2], 4)])
def test_one_batch_of_each_shape(clock, batches, seconds, at_most, lengths, left):
    "Half a second each; the first of each shape is kept."
    source = (clock.sleep(.5) or np.full(n, i) for i, n in enumerate([1, 2, 1, 3, 2, 4]))
    found = batch_of_each_shape(source, batches, seconds, at_most)
    assert [len(b) for b in found] == lengths and [int(b[0]) for b in found[:2]] == [0, 1]
    assert sum(1 for _ in source) == left


def test_the_first_step_returns_what_it_computed():
    assert first_step(lambda batch: batch + 1, 2) == 3
    with pytest.raises(UserError,
                       match='The step failed on the first batch: Zero'): first_step(lambda b: 1 / 0, 2)
