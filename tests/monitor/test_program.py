"Programs that are watched: what needs lines of files or real trainings; `Diagnose` in `fit`, and scripts."
import sys
import time
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

from watched import calls, LINE, only, OTHER, seen, watched
from xtts_nb.config import UserError
from xtts_nb.monitor import program as page
from xtts_nb.monitor.loop import stages, tf_sleep
from xtts_nb.monitor.program import Diagnose, explain, watch_script
from xtts_nb.monitor.seen import again, finding, _only_on_gpu, _Seen, steady_part
from xtts_nb.monitor.watch import Watch

def test_a_model_of_several_inputs_is_made_while_it_is_watched():
    "A layer that joins them is called with a list of symbols of Keras, or of arrays of unlike shapes."
    with Watch() as watch:
        a, b = keras.Input((3,)), keras.Input((4,))
        joined = keras.layers.Concatenate()
        model = keras.Model([a, b], joined([a, b]))
        assert joined([np.ones((2, 3)), np.ones((2, 4))]).shape == (2, 7)
    assert model.output_shape == (None, 7)
    assert [e.rows for e in watch.events if e.kind == 'layer'][-1] == 2

def asked(monkeypatch, *rules):
    "What these rules find in a program of one line, and what is noted."
    def rule(found):
        def find_it(seen):
            if isinstance(found, Exception): raise found
            return [found]
        return find_it
    monkeypatch.setattr(page, '_PROGRAM_RULES', [rule(found) for found in rules])
    return explain(watched(['own'] * 1000, calls('next', 9)))

def test_what_is_reported_of_what_the_rules_find(monkeypatch):
    names = lambda *rules: [f.cause for f in asked(monkeypatch, *rules)[0]]
    of = lambda gain, place=LINE: finding(seen(['own'] * 1000), f'{gain}', '', '', 1 - 1 / gain, place)
    # the first at a line, or one of twice its gain; 1.19 is too little
    assert names(of(1.19), of(2), of(3.9), of(4.5), of(3, OTHER)) == ['4.5', '3', '2']
    assert names(of(1.21)) == ['1.21']
    sure = page.Finding('sure', '', '', 1.5, low=1.01, high=2.)
    hidden = _only_on_gpu('hidden', '', '', 'a.py:1')   # comes last, also of the same line
    assert names(hidden, replace(sure, cause='noise', low=1.), sure) == ['sure', 'hidden']
    assert names(replace(sure, place='a.py:1'), hidden) == ['sure', 'hidden']
    found, notes = asked(monkeypatch, ValueError('odd'), sure)
    assert [f.cause for f in found] == ['sure'] and notes == [
        'find_it could not be examined: ValueError: odd',
        'time in the 0.6 s observed: Python 89%, waiting for batches 11%']

@pytest.mark.parametrize('share, cause', [(.39, None), (.41, 'waiting for batches')])
def test_a_large_part_without_a_known_cause_is_located(monkeypatch, share, cause):
    monkeypatch.setattr(page, '_PROGRAM_RULES', ())
    steps = [replace(e, start=e.start + .1 * share) for e in calls('call', 100, .1, .1 - .1 * share, OTHER)]
    found, _ = explain(watched(['input'] * 1000, calls('next', 100, .1, .1 * share) + steps))
    assert [(f.cause, f.place, round(f.gain, 1)) for f in found] == [(cause, str(LINE), 1.7)] * bool(cause)

@pytest.mark.parametrize('looks, seconds, judged', [(19, .49, False), (20, .49, True), (19, .5, True)])
def test_a_program_that_is_too_short_is_not_judged(monkeypatch, looks, seconds, judged):
    monkeypatch.setattr(page, 'steady_part', lambda watch: _Seen(watch, 0., seconds, ('call', LINE), []))
    found, notes = explain(watched(['graph'] * looks))
    assert found == [] and (page._TOO_SHORT in notes[0]) is not judged
    assert page._finding_lines(found, notes)[0] == ('Nothing to fix.' if judged else 'No diagnosis.')

SCRIPT = '''
import sys
import tensorflow as tf
@tf.function
def step(x, count): return tf.reduce_sum(tf.stack([x * i for i in range(40)])) + count
total = 0.
for i in range(int(sys.argv[1])): total = step(tf.ones(9), i)
print(float(total))
'''

def test_a_script_runs_as_it_would_and_is_explained(ran, tmp_path):
    path, before = tmp_path / 'train.py', [*sys.argv]
    path.write_text(SCRIPT)
    done = ran(f'diagnose --json {path} 25')
    assert float(done.err.splitlines()[0]) == 24 + 9 * 780 and sys.argv == before
    found = done.json['findings'][0]
    assert found['cause'] == 'retracing' and found['place'] == 'train.py:7'
    assert found['line'].startswith('for i in range(int(sys.argv[1]))')
    assert 'tf.constant(count)' in found['change'] and done.json['notes'] is not None
    refused = ran(f'diagnose --apply {path} 40')
    assert refused.code == 2 and 'only --seconds and --json act on a script' in refused.err

def test_a_loop_that_nothing_counts_is_ended(tmp_path):
    (tmp_path / 'long.py').write_text('while True: pass')
    assert watch_script(tmp_path / 'long.py', seconds=.2).events == []

def test_a_script_that_fails_is_named(tmp_path):
    (tmp_path / 'bad.py').write_text('raise ValueError("no data")')
    for name, says in (('bad.py', 'bad.py: .*ValueError: no data'), ('none.py', 'none.py: there is no')):
        with pytest.raises(UserError, match=says): watch_script(tmp_path / name)

def test_an_error_that_the_end_of_the_watch_became(tmp_path):
    "C code that calls Python may make an error of its own of the end; one that came before stays."
    script = tmp_path / 'a.py'
    script.write_text("""
import tensorflow as tf, time
for x in tf.data.Dataset.range(10**9):
    try: time.sleep(.01)
    except BaseException: raise SystemError('bad argument to internal function')
""")
    assert watch_script(script, seconds=.5).events
    script.write_text(script.read_text().replace('time.sleep(.01)', '1 / 0'))
    with pytest.raises(UserError, match='SystemError: bad argument'): watch_script(script, seconds=60.)

def test_a_training_that_fails_is_let_go():
    "Keras calls no callback then; the next `fit` is watched as if nothing had been."
    from tensorflow.python.data.ops.iterator_ops import OwnedIterator
    plain, rows, failing = OwnedIterator.__next__, np.ones((64, 3), 'float32'), True
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if failing and batch == 3: raise RuntimeError('in the middle')
    model, callback = keras.Sequential([keras.layers.Dense(1)]), Diagnose(report=None)
    model.compile('sgd', 'mse')
    train = lambda: model.fit(rows, rows[:, :1], batch_size=4, verbose=0, callbacks=[callback, Fails()])
    with pytest.raises(RuntimeError, match='in the middle'): train()
    assert OwnedIterator.__next__ is not plain
    until = time.monotonic() + 30
    while OwnedIterator.__next__ is not plain and time.monotonic() < until: time.sleep(.05)
    assert OwnedIterator.__next__ is plain and callback.findings is None
    failing = False
    train()
    assert OwnedIterator.__next__ is plain and callback.findings is not None

def test_a_validation_is_watched_apart(monkeypatch):
    """Its batches and its pipeline are not those of the training; `evaluate` alone is none.

    No rule is asked: the trials of all would take longer than the training."""
    monkeypatch.setattr(page, '_PROGRAM_RULES', [])
    rows = tf.data.Dataset.from_tensor_slices((np.ones((64, 3), 'float32'), np.ones((64, 1), 'float32')))
    model, callback = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), Diagnose(report=None)
    model.compile('sgd', 'mse')
    model.evaluate(rows.batch(8), verbose=0, callbacks=[callback])
    assert callback.watch is None
    model.fit(rows.batch(2), validation_data=rows.cache().batch(8), validation_steps=3, epochs=3, verbose=0,
              callbacks=[callback])
    tests = [e for e in callback.watch.events if e.kind == 'validation']
    assert tests and all(e.rows == 3 and e.seconds > 0 for e in tests)
    (training,), validated = callback.watch.datasets.values(), callback.watch.validated
    stages_of = lambda dataset: [s.name for s in stages(dataset)]
    assert validated.total == len(tests) and 'Cache' in stages_of(validated.last)
    assert 'Cache' not in stages_of(training.last) and not callback.watch.validating
    model.evaluate(rows.batch(8), verbose=0, callbacks=[callback])   # after the training
    assert len([e for e in callback.watch.events if e.kind == 'validation']) == len(tests)

def test_fit_is_watched_and_continues():
    def rows():
        for _ in range(240):
            time.sleep(.004)
            yield np.ones(3, 'float32'), np.ones(1, 'float32')
    kinds = tf.TensorSpec(3), tf.TensorSpec(1)
    data = tf.data.Dataset.from_generator(rows, output_signature=kinds).batch(4)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile('sgd', 'mse')
    lines = []
    diagnose = Diagnose(steps=20, seconds=4., report=lines.append)
    history = model.fit(data, epochs=1, verbose=0, callbacks=[diagnose])
    assert len(history.history['loss']) == 1 and not isinstance(model.train_function, page.FitPhases)
    first = diagnose.findings[0].cause   # on busy cores the small batches cost more
    assert first in ('Python makes the batches', 'tiny batch')
    assert lines[0].startswith(f'1. {first} at test_program.py:')

def test_a_fit_that_the_end_of_the_watch_meets():
    "Its waiting is what was measured until then; where nothing was, the fit tells nothing."
    model, whole = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), keras.Model.fit
    model.compile('sgd', 'mse')
    for at, windows in ((20, 0), (30, 1)):
        def end(batch, logs, at=at):
            if batch == at: raise KeyboardInterrupt
        with Watch() as watch, page._every_fit_watched(watch), pytest.raises(KeyboardInterrupt):
            model.fit(np.zeros((160, 2)), np.zeros((160, 1)), batch_size=4, verbose=0,
                      callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=end)])
        (fit,) = watch.fits
        assert len(watch.windows) == windows and (fit.one is not None) == bool(windows)
        assert fit.steps == at and fit.epochs == 1 and keras.Model.fit is whole

def test_a_fit_in_a_loop_is_seen_from_inside():
    "Of unknown length, so that only the fits before tell where its middle is."
    rows = tf.data.Dataset.range(800).batch(20).filter(lambda i: i[0] >= 0).map(
        lambda i: (tf_sleep(5_000, tf.ones((20, 1))), tf.ones((20, 1))))
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile('sgd', 'mse')
    with Watch() as watch, page._every_fit_watched(watch):
        for _ in range(2): model.fit(rows, verbose=0)
    assert watch.fits[0].wait_share == 0. < .1 < watch.fits[-1].wait_share

def test_a_method_keeps_its_object():
    class Trainer:
        def __init__(self): self.w = tf.Variable(2.)
        @tf.function
        def step(self, x): return x * self.w
    def train():
        trainer = Trainer()
        for i in range(5): trainer.step(tf.constant(float(i)))
    with Watch() as watch: train()
    part = steady_part(watch)
    assert again(part, part.loop[1]) is not None   # its variable is still there
    assert only(watch.early.values())[0][0] == 2. and only(watch.last.values())[2][0] == 4.
