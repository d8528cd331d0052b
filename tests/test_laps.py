"Phases of any loop: nothing is asked too early, the first step stands apart, and what breaks is named."
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.config import UserError
from xtts_nb.laps import FitPhases, Laps, time_phases
from xtts_nb.phases import batch_rows
from xtts_nb.trainer import wait_for


def batches(n=40, rows=4): return [tf.fill([rows], float(i)) for i in range(n)]


class Late:
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
    assert set(found.to_dict()) == {'first_batch', 'first_step', 'steps', 'seconds', 'clips_per_s', 'au', 'cv', 'traces', 'ended',
                                    'spent'} and list(found.spent) == ['wait', 'copy', 'step', 'callbacks']
    assert 0 < found.au <= 1


def test_the_loop_does_not_wait_for_a_lap():
    "Results of a lap arrive late; the steps after it run on."
    gate, results = threading.Event(), []
    lap = Laps(every=2)
    lap.pace.alone[((4,),)] = [0., 0., 0.]   # nothing is left to be timed alone
    for batch in batches(3):
        results.append(Late(gate))
        lap.step(lambda b: {'loss': results[-1]}, batch)
    assert lap.done == 3 and not lap.lines and results[0].asked == 0   # nobody asked for what is no end of a lap
    gate.set()
    lap.close()
    assert [line['step'] for line in lap.lines] == [2] and lap.lines[0]['loss'] == 1.


def test_the_first_step_of_a_shape_counts_nowhere():
    lap, slept = Laps(every=100), []
    def step(batch):
        if batch.shape[0] not in slept: slept.append(batch.shape[0]); time.sleep(.3)   # as compiling would
        return tf.constant(1.)
    for n in (2, 2, 3, 3): lap.step(step, tf.ones(n))
    assert lap.pace.lap.counted == 2 and lap.pace.lap.left_out >= .6 and lap.pace.lap.spent['step'] < .3
    lap.close()


def test_traces_are_counted():
    step = tf.function(lambda b: {'loss': tf.reduce_sum(b)})
    mixed = [tf.ones(2 + i % 2) for i in range(30)]
    assert time_phases(mixed, step, steps=10).traces == 2


def test_lines_come_with_the_results():
    told = []
    time_phases(batches(), lambda b: {'loss': b[0], 'state': b}, steps=20, every=5, warmup=4, tell=told.append)
    assert [line['step'] for line in told][-1] == 24 and told[-1]['loss'] == 23. and 'state' not in told[-1]
    assert {'au', 'clips_per_s', 'wait_ms', 'copy_ms', 'step_ms', 'callbacks_ms'} <= set(told[-1])


def test_a_dataset_that_ends_early_is_said():
    found = time_phases(batches(12), lambda b: b[0], steps=50)
    assert found.ended and found.steps == 8


def raising(n, error):
    yield from batches(n)
    raise error


@pytest.mark.parametrize('dataset, step, words', [
    ([], lambda b: b, 'is empty'),
    (batches(3), lambda b: b[0], 'ended after 3 batches'),
    (raising(0, OSError('gone')), lambda b: b[0], 'before its first batch: OSError: gone'),
    (raising(2, OSError('gone')), lambda b: b[0], 'failed at batch 2: OSError: gone'),
    (7, lambda b: b, 'before its first batch: TypeError'),
    (batches(), lambda b: 1 / 0, 'step failed at batch 0: ZeroDivisionError'),
])
def test_what_breaks_is_named(dataset, step, words):
    with pytest.raises(UserError, match=words): time_phases(dataset, step, steps=4)


def test_a_dataset_that_never_yields():
    gate = threading.Event()
    def stuck():
        gate.wait(60)
        yield tf.ones(1)
    with pytest.raises(UserError, match='no batch within'): time_phases(stuck(), lambda b: b, patience=.05)
    gate.set()


def test_rows_of_any_structure():
    assert batch_rows({'a': np.zeros((3, 2))}) == 3 and batch_rows((tf.ones(5), 1)) == 5 and batch_rows(7) is None


class Asked:
    "A result that notes that it was asked for."
    def __init__(self, asked): self.asked, self.shape = asked, ()
    def numpy(self): self.asked.append(self); return 1.


@pytest.mark.parametrize('results', [None, {}, 3., (), [None, 2]], ids=str)
def test_waiting_without_tensors_returns_at_once(results): assert wait_for(results) is None


@pytest.mark.parametrize('around', [lambda r: r, lambda r: {'loss': r}, lambda r: (tf.ones(3), r), lambda r: [r, None]])
def test_waiting_asks_a_result_in_any_structure(around):
    asked = []
    wait_for(around(Asked(asked)))
    assert len(asked) == 1


def fitted(phases, **options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input([8]), keras.layers.Dense(4, activation='tanh'), keras.layers.Dropout(.2),
                              keras.layers.Dense(1)])
    model.compile('adam', 'mse', **options)
    class Apart(keras.callbacks.Callback):
        why = None
        def on_train_begin(self, logs=None): self.why = phases and phases.begin(self.model)
        def on_train_end(self, logs=None): phases and phases.end()
    x, apart = np.random.default_rng(0).normal(size=(70, 8)).astype('float32'), Apart()
    weights = np.linspace(0, 1, 70)
    history = model.fit(x, x[:, :1], batch_size=16, epochs=2, verbose=0, sample_weight=weights, callbacks=[apart]).history['loss']
    return history, apart.why, model


def test_fit_learns_the_same_when_taken_apart():
    phases = FitPhases(every=2)
    (apart, why, model), (whole, _, _) = fitted(phases), fitted(None)
    np.testing.assert_allclose(apart, whole, rtol=1e-5)
    assert why is None and phases.laps.lines[-1]['step'] == 10 and 'wait_ms' in phases.laps.lines[-1]
    assert not isinstance(model.train_function, FitPhases)   # put back
    model.fit(np.ones((4, 8)), np.ones(4), verbose=0)


def test_fit_that_cannot_be_taken_apart_says_why():
    phases = FitPhases()
    history, why, _ = fitted(phases, steps_per_execution=2)
    assert 'several steps' in why and len(history) == 2 and not phases.laps.lines
