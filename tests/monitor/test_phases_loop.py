"Phases of any loop: no result is fetched too early, the first step is left out, and errors name their place."
import threading
import time

from concurrent.futures import Future
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from clock import Clock

from xtts_nb.bench import wait_for
from xtts_nb.monitor import loop
from xtts_nb.train import trainer
from xtts_nb.config import UserError
from xtts_nb.monitor.loop import FitPhases, IntervalTimer, Phases, scalars, time_phases


def batches(n=40, rows=4): return [tf.fill([rows], float(i)) for i in range(n)]


class LateResult:
    "A result that arrives when it is let go."
    def __init__(self, gate): self.gate, self.shape, self.asked = gate, (), 0
    def numpy(self): self.asked += 1; assert self.gate.wait(20); return 1.
    def __float__(self): return float(self.numpy())


def test_every_batch_is_trained_on_once_and_in_order():
    seen, called = [], []
    found = time_phases(batches(20), lambda b: seen.append(float(b[0])) or b[0], steps=10, warmup=3, every=4,
                        callback=lambda n, result: called.append((n, float(result))))
    assert seen == list(range(13)) and called == [(i, float(i)) for i in range(13)]
    assert found.steps == 10 and len(found.spans) == 10 and not found.ended
    assert set(found.to_dict()) == {'first_batch', 'first_step', 'steps', 'seconds', 'clips_per_s', 'au',
                                    'cv', 'traces', 'ended', 'spent'}
    assert list(found.spent) == ['wait', 'copy', 'step', 'callbacks']
    assert found.au > 0


def test_the_loop_does_not_wait_for_an_interval():
    "Results of an interval arrive late; the steps after it run on."
    gate, results = threading.Event(), []
    intervals = IntervalTimer(every=2)
    intervals.timer.alone[((4,),)] = [0., 0., 0.]   # nothing is left to be timed alone
    for batch in batches(3):
        results.append(LateResult(gate))
        intervals.step(lambda b: {'loss': results[-1]}, batch)
    assert intervals.done == 3 and not intervals.lines and results[0].asked == 0   # the interval goes on
    gate.set()
    intervals.close()
    assert [line['step'] for line in intervals.lines] == [2] and intervals.lines[0]['loss'] == 1.


def test_the_first_step_of_a_shape_counts_nowhere():
    intervals, slept = IntervalTimer(every=100), []
    def step(batch):
        if batch.shape[0] not in slept: slept.append(batch.shape[0]); time.sleep(.3)   # as compiling would
        return tf.constant(1.)
    for n in (2, 2, 3, 3): intervals.step(step, tf.ones(n))
    interval = intervals.timer.interval
    assert interval.counted == 2 and interval.left_out >= .6 and interval.spent['step'] < .3
    intervals.close()


class AtOnce:
    "Stands for a pool of threads: what is submitted is done at once."
    def __init__(self, *how): pass
    def shutdown(self): pass
    def submit(self, work):
        done = Future()
        done.set_result(work())
        return done


@pytest.fixture
def clock(monkeypatch):
    "One clock of intervals and steps, on which results arrive at once."
    one = Clock()
    for module in (loop, trainer): monkeypatch.setattr(module, 'time', one)
    monkeypatch.setattr(loop, 'ThreadPoolExecutor', AtOnce)
    return one


@pytest.mark.parametrize('results, numbers', [
    (tf.constant(2.), {'loss': 2.}), (3., {'loss': 3.}), (None, {}), (tf.ones(2), {}),
    ({'a': np.float32(1.), 'b': 2., 'state': tf.ones(1), 'n': 3, 'name': 'x', 'c': tf.constant(4)},
     {'a': 1., 'b': 2., 'c': 4.})])
def test_the_numbers_among_results(results, numbers): assert scalars(results) == numbers


def test_an_interval_is_reported_once_its_results_arrive(clock):
    "A step takes 1/2 s, the first one 4 s; 1/4 s pass between steps. Four clips are in a batch."
    reported, took = [], iter([4., .5, .5, .5, .5])
    intervals = IntervalTimer(2, lambda line: reported.append(dict(line)))
    for number in range(5):
        work = lambda batch, number: clock.sleep(next(took)) or {'loss': float(number)}
        intervals.step(work, tf.ones((4, 2)), number)
        assert (intervals.done, len(intervals.lines)) == (number + 1, max(0, number // 2))
        clock.sleep(.25)
    intervals.end_interval({'loss': 9.})
    intervals.end_interval({'loss': 10.})   # the interval before has no line yet
    intervals.close()
    assert reported == intervals.lines
    assert [(line['step'], line['loss']) for line in reported] == [(2, 1.), (4, 3.), (5, 9.), (5, 10.)]
    assert [wall for _, wall in intervals.walls] == [.75, 1.5, 1., 0.]
    assert [each.counted for each, _ in intervals.walls] == [1, 2, 1, 0]
    assert [line['clips_per_s'] for line in reported] == [round(4 / .75, 2), round(8 / 1.5, 2), 4., None]
    alone = IntervalTimer()
    alone.step(lambda batch: clock.sleep(1.), 7)
    assert alone.timer.clips_per_step == 1   # a batch without rows


def test_phases_are_added_up_by_hand(clock):
    "A batch takes 1/4 s, one 3/4 s, a copy 1/8 s, a step 1/2 s and a callback 1/16 s. Two steps warm up."
    reported, done = [], []
    data = clock.each([.25, .25, .25, .75, .25], tf.ones((4, 2)))
    found = time_phases(
        data, lambda batch: clock.sleep(.5) or {'loss': 1.}, 3, lambda batch: clock.sleep(.125) or batch,
        lambda number, results: (clock.sleep(.0625), done.append((number, results))), 2, reported.append, 2)
    assert done == [(i, {'loss': 1.}) for i in range(5)] and [line['step'] for line in reported] == [2, 4, 5]
    assert (found.first_batch, found.first_step, found.steps, found.seconds) == (.25, .5, 3, 3.3125)
    assert found.clips_per_s == 3 * 4 / 3.3125 and found.au == 1.5 / 3.3125 and found.traces == 0
    assert not found.ended
    assert found.cv == pytest.approx(.25 / 1.1875)
    assert found.spent == pytest.approx({'wait': 1250 / 3, 'copy': 125., 'step': 500., 'callbacks': 62.5})
    assert found.spans == [(101.875, .25, .125, .5, .0625), (102.8125, .75, .125, .5, .0625),
                           (104.25, .25, .125, .5, .0625)]


def test_phases_where_every_step_compiles(clock):
    "Each batch has a shape of its own; a step that takes no time has no share of it."
    data = (clock.sleep(.5) or tf.ones(n) for n in range(1, 9))
    found = time_phases(data, lambda batch: 1., 3, warmup=1)
    assert (found.steps, found.au, found.clips_per_s, found.spent['wait']) == (0, None, 0., 1500.)
    data = clock.each([.5] * 9, tf.ones(2))
    assert time_phases(data, lambda batch: 1., 3, warmup=1).au is None


def hand_made(au=.5):
    spans = [(10. + i, .1, .2, .3, .4) for i in range(5)]
    return Phases(.5, 2.125, 3, 1.5, 1234.5, au, .256, 1, False, {'wait': 1., 'step': 2.345}, spans)

def test_phases_in_a_table_and_without_their_spans():
    assert hand_made()._repr_markdown_().splitlines() == [
        '| wait | step | AU | clips/s | variation | first step, apart |',
        '|---|---:|---:|---:|---:|---:|',
        '| 1.00 ms | 2.35 ms | 50% | 1,234 | 25.6% | 2.12 s |']
    assert '| – |' in hand_made(None)._repr_markdown_()
    assert 'spans' not in hand_made().to_dict() and 'spans' not in repr(hand_made())
    assert hand_made().to_dict()['cv'] == .256


def test_traces_are_counted():
    step = tf.function(lambda b: {'loss': tf.reduce_sum(b)})
    mixed = [tf.ones(2 + i % 2) for i in range(30)]
    assert time_phases(mixed, step, steps=10).traces == 2


def test_lines_come_with_the_results():
    reported = []
    step = lambda b: {'loss': b[0], 'state': b}
    time_phases(batches(), step, steps=20, every=5, warmup=4, report=reported.append)
    last = reported[-1]
    assert last['step'] == 24 and last['loss'] == 23. and 'state' not in last
    assert {'au', 'clips_per_s', 'wait_ms', 'copy_ms', 'step_ms', 'callbacks_ms'} <= set(last)


@pytest.mark.parametrize('steps, last', [(20, [24]), (21, [25]), (22, [25, 26])])
def test_no_line_is_empty_where_the_steps_end_with_an_interval(steps, last):
    reported = []
    found = time_phases(batches(), lambda b: b[0], steps, every=5, warmup=4, report=reported.append)
    assert [line['step'] for line in reported] == [5, 10, 15, 20, *last] and found.steps == steps
    assert all(line['clips_per_s'] for line in reported)


def test_a_dataset_that_ends_early_is_marked():
    found = time_phases(batches(12), lambda b: b[0], steps=50)
    assert found.ended and found.steps == 8


def test_too_few_steps_are_refused():
    assert time_phases(batches(), lambda b: b[0], steps=2).steps == 2
    with pytest.raises(UserError, match='1 steps are'): time_phases(batches(), lambda b: b[0], steps=1)


def raising(n, error):
    yield from batches(n)
    raise error


@pytest.mark.parametrize('dataset, step, words', [
    ([], lambda b: b, 'is empty'),
    (batches(3), lambda b: b[0], 'ended after 3 batches'),
    (batches(5), lambda b: b[0], 'ended after 5 batches'),
    (raising(0, OSError('gone')), lambda b: b[0], 'before its first batch: OSError: gone'),
    (raising(2, OSError('gone')), lambda b: b[0], 'failed at batch 2: OSError: gone'),
    (7, lambda b: b, 'before its first batch: TypeError'),
    (batches(), lambda b: 1 / 0, 'step failed at batch 0: ZeroDivisionError'),
])
def test_errors_name_their_place(dataset, step, words):
    with pytest.raises(UserError, match=words): time_phases(dataset, step, steps=4)


def test_a_dataset_that_never_yields():
    gate = threading.Event()
    def stuck():
        gate.wait(60)
        yield tf.ones(1)
    with pytest.raises(UserError, match='no batch within'): time_phases(stuck(), lambda b: b, timeout=.05)
    gate.set()


class CountedResult:
    "A result that notes that it was asked for."
    def __init__(self, asked): self.asked, self.shape = asked, ()
    def numpy(self): self.asked.append(self); return 1.


@pytest.mark.parametrize('results', [None, {}, 3., (), [None, 2]], ids=str)
def test_waiting_without_tensors_returns_at_once(results): assert wait_for(results) is None


@pytest.mark.parametrize('around', [lambda r: r, lambda r: {'loss': r}, lambda r: (tf.ones(3), r),
                                    lambda r: [r, None]])
def test_waiting_fetches_a_result_in_any_structure(around):
    asked = []
    wait_for(around(CountedResult(asked)))
    assert len(asked) == 1


def fitted(phases, **options):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([layers.Input([8]), layers.Dense(4, activation='tanh'), layers.Dropout(.2),
                              layers.Dense(1)])
    model.compile('adam', 'mse', **options)
    class Split(keras.callbacks.Callback):
        why = None
        def on_train_begin(self, logs=None): self.why = phases and phases.begin(self.model)
        def on_train_end(self, logs=None): phases and phases.end()
    x, split = np.random.default_rng(0).normal(size=(70, 8)).astype('float32'), Split()
    weights = np.linspace(0, 1, 70)
    history = model.fit(x, x[:, :1], batch_size=16, epochs=2, verbose=0, sample_weight=weights,
                        callbacks=[split])
    return history.history['loss'], split.why, model


def test_fit_learns_the_same_when_it_is_split():
    phases = FitPhases(every=2)
    (split, why, model), (whole, _, _) = fitted(phases), fitted(None)
    np.testing.assert_allclose(split, whole, rtol=1e-5)
    line = phases.intervals.lines[-1]
    assert why is None and line['step'] == 10 and 'wait_ms' in line
    assert [shape[0][0] for shape in phases.shapes[3:5]] == [16, 6]
    assert phases.batch[0].shape == (16, 8)   # the rest of an epoch says little of a step
    assert not isinstance(model.train_function, FitPhases)   # put back
    model.fit(np.ones((4, 8)), np.ones(4), verbose=0)


def test_a_fit_that_cannot_be_split_says_why():
    phases = FitPhases()
    history, why, _ = fitted(phases, steps_per_execution=2)
    assert 'several steps' in why and len(history) == 2 and not phases.intervals.lines


@pytest.mark.parametrize('change, why', [
    ({}, None), ({'steps_per_execution': 2}, 'several steps run in one call'),
    ({'replicas': 2}, 'it trains on several devices'),
    ({'backend': 'jax'}, 'the backend is jax'), ({'run_eagerly': True}, None)])
def test_which_models_are_split(monkeypatch, change, why):
    "Weights that a batch lacks are None for the step; shapes that vary are traced twice, not each time."
    if 'backend' in change: monkeypatch.setattr(keras.backend, 'backend', lambda: change['backend'])
    strategy = SimpleNamespace(num_replicas_in_sync=change.pop('replicas', 1))
    got, reported = [], []
    def train_step(batch): got.append(batch); return batch[0] * 2
    model = SimpleNamespace(**dict(
        steps_per_execution=1, distribute_strategy=strategy, run_eagerly=False, jit_compile=False,
        train_function='whole', train_step=train_step) | change)
    phases = FitPhases(1, reported.append)
    phases.end()   # nothing has begun
    assert phases.begin(model) == why
    assert (phases.model is model) == (why is None) == (model.train_function is phases)
    if why: return
    missing = tf.experimental.Optional.empty(tf.TensorSpec([], tf.float32))
    for n in range(1, 5): assert len(phases(iter([(tf.ones(n), missing)]))) == n
    assert all(weights is None for _, weights in got) and len(got) == (4 if model.run_eagerly else 2)
    phases.end()
    assert model.train_function == 'whole' and phases.model is None
    assert [line['step'] for line in reported] == [1, 2, 3, 4]
