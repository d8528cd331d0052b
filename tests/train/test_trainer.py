"Training: compiled once a shape, silent between log lines, the best model kept, callbacks of Keras called."
import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

from cheap import Broken, Cheap, HELD, lines_of, outcome, read_eagerly, summary
from clock import Clock
from process import tree
from xtts_nb.bench import trace_count
from xtts_nb.config import UserError
from xtts_nb.data.native import BatchPlan
from xtts_nb.files import read_tensors
from xtts_nb.models.xtts import XTTS
from xtts_nb.monitor import loop
from xtts_nb.monitor.loop import StepTimer
from xtts_nb.train import runs, trainer as trainer_page
from xtts_nb.train.begin import begin
from xtts_nb.train.runs import new_run
from xtts_nb.train.trainer import checkpoints, judge, Trainer, _WORDS

def rates(folder) -> list[float]: return [line['learning_rate'] for line in lines_of(folder)]

class Compiled(Cheap): compiled_step = Trainer.compiled_step

def streamed(prepared, config) -> Cheap:
    "A trainer without a folder, compiled, on the plan's own stream."
    return Compiled(XTTS(config, prepared.tokenizer), BatchPlan(prepared, config.data),
                    feed=lambda plan, first, last: plan.stream(first, last))

# --- the loop -------------------------------------------------------------------------------------

def test_an_extended_run_continues_from_its_rate(cheap, prepared, mini, tmp_path):
    "In one go or resumed, the same to the bit."
    config = lambda steps: mini.replace(training={'gpt': {'schedule': 'cosine', 'steps': steps,
                                                          'learning_rate': 1., 'log_every': 1}})
    one, two = tmp_path / 'one', tmp_path / 'two'
    new_run(prepared, config(10), one).fit()
    shutil.copytree(one, two)
    new_run(prepared, config(30), one).fit()
    new_run(prepared, config(30), two).fit(20)
    begin(run=two).fit()
    assert outcome(one) == outcome(two)
    found = rates(one)
    assert found[9] < .03 and found[10] < .5 and max(found[10:]) > .6 and found[29] < .03   # no jump to .7

class Timed:
    "A step that takes as many seconds as its batch says, and traces where it says so."
    def __init__(self, clock): self.clock, self.traces = clock, 0
    def experimental_get_tracing_count(self): return self.traces
    def __call__(self, batch, seconds, traces=0):
        self.clock.now += seconds
        self.traces += traces
        return seconds

def test_the_pace_by_hand(monkeypatch):
    """The first step of a shape and one that traces do not count; three more are timed alone: the device
    is waited for."""
    clock, waited = Clock(), []
    monkeypatch.setattr(loop, 'time', clock)
    monkeypatch.setattr(loop, 'wait_for', waited.append)
    step, timer = Timed(clock), StepTimer(4, {})
    with timer.phase('wait'): clock.now += 1 / 7
    for seconds in (5., 2., 3., 1., 7., 0.5): assert timer.run(step, {'x': np.zeros(3)}, seconds) == seconds
    timer.run(step, {'x': np.zeros(3)}, 9., 1)
    (known,), lap = timer.alone.values(), timer.take_interval()
    assert waited == [None, 5., 5., 2., 2., 3., 3., 1.] and known == pytest.approx([2, 3, 1])
    assert lap.left_out == pytest.approx(14) == timer.compile_seconds
    assert lap.alone == pytest.approx([2, 2, 1, 1, 1])
    assert timer.metrics(lap, clock.now) == {'clips_per_s': 1.47, 'au': 0.513, 'wait_ms': 28.571,
                                            'copy_ms': 0., 'step_ms': 2700., 'callbacks_ms': 0.}
    nothing = dict.fromkeys(('clips_per_s', 'au', 'wait_ms', 'copy_ms', 'step_ms', 'callbacks_ms'))
    assert timer.metrics(timer.take_interval(), clock.now) == nothing   # no step
    for row in ([2, 3], [2]): timer.run(step, {'x': tf.ragged.constant([[1], row])}, 1.)
    assert len(timer.alone) == 3   # the values of a ragged tensor count

def test_as_many_traces_as_shapes(prepared, mini):
    run = streamed(prepared, mini)
    result = run.fit(steps=3 * run.plan.steps_per_epoch)
    assert len(run.plan.shapes) == 2 and result['traces'] == trace_count(run.train_step) == 2
    assert run.fit(steps=5 * run.plan.steps_per_epoch)['traces'] == 2 and result['clips_per_s'] > 0

def test_nothing_is_fetched_between_two_log_lines(prepared, mini, monkeypatch, tmp_path):
    """Every way from a tensor to a number is watched; what is fetched at a log line does not grow with
    the updates before it. Without a folder nothing is written."""
    monkeypatch.chdir(tmp_path)
    run = streamed(prepared, mini.replace(training={'gpt': {'log_every': 4, 'checkpoint_every': 16}},
                                          data={'buckets': 1}))
    eager, fetched = type(tf.constant(0)), []
    owner = next(c for c in eager.__mro__ if '_numpy' in vars(c))
    real, asarray, array = owner._numpy, np.asarray, np.array
    def note(x):
        if isinstance(x, (eager, tf.Variable)): fetched.append(run.step)
        return x
    monkeypatch.setattr(owner, '_numpy', lambda self: real(note(self)))
    monkeypatch.setattr(np, 'asarray', lambda x, *a, **k: asarray(note(x), *a, **k))
    monkeypatch.setattr(np, 'array', lambda x, *a, **k: array(note(x), *a, **k))
    float(tf.constant(1.))
    np.asarray(tf.constant(1.))
    assert len(fetched) >= 2   # the watch works
    fetched.clear()
    run.fit(steps=16)
    lines = {s + (s < 16) for s in range(4, 17, 4)}   # a line is fetched while the next update runs
    timed = {0, 1, 2, 3, 4}   # before the first update, and the few that are timed alone
    assert max(lines) in fetched and set(fetched) <= timed | lines | {s - 1 for s in lines}
    assert all(fetched.count(step) <= 4 for step in lines), fetched
    assert tree(tmp_path) == {}

def test_a_log_line_is_the_mean_of_its_updates(cheap, prepared, mini, tmp_path):
    "And the summary that of the first and the last ten; progress is reported at each line."
    by_step, seen = {}, []
    for every in (1, 3):
        run = new_run(prepared, mini.replace(training={'gpt': {'log_every': every, 'checkpoint_every': 5}}),
                      tmp_path / str(every))
        result = run.fit(13, lambda done, total, line: seen.append((done, total, line['step'])))
        by_step[every] = {line['step']: line for line in lines_of(tmp_path / str(every))}
    assert list(by_step[3]) == [3, 5, 6, 9, 10, 12, 13]   # at a checkpoint and the end nothing stays pending
    assert seen[13:] == [(step, 13, step) for step in by_step[3]]
    for name in ('loss', 'text_loss', 'code_loss', 'gradient_norm'):
        for step, of in ((3, (1, 2, 3)), (5, (4, 5)), (6, (6,)), (9, (7, 8, 9))):
            assert by_step[3][step][name] == pytest.approx(np.mean([by_step[1][i][name] for i in of]),
                                                           rel=1e-4)
    losses = [line['loss'] for line in by_step[1].values()]
    assert summary(result) == {'steps': 13, 'loss_first': pytest.approx(np.mean(losses[:10]), abs=2e-5),
                               'loss_last': pytest.approx(np.mean(losses[-10:]), abs=2e-5)}

# --- validation -----------------------------------------------------------------------------------

def test_validation_is_the_mean_over_the_tokens_held_out(prepared, mini, tmp_path):
    "Over all of them, once each, at dropout 0, whatever the batches; and twice the same."
    config = mini.replace(training={'gpt': {'validate_every': 1}}, data={'batch_size': 2})
    run = new_run(prepared, config, tmp_path / 'run', HELD, feed=read_eagerly)
    seen = run.validate()
    assert run.validate() == seen == run.validated and trace_count(run.evaluate) == 1
    assert {k for k in seen if 'loss' not in k} == {'val_stop', 'val_stop_short', 'val_never'}
    clips = [b['clip'].numpy()[b['weight'].numpy() > 0]
             for b in read_eagerly(run.validation, 0, run.validation.steps_per_epoch)]
    assert sorted(prepared.clips[i]['id'] for i in np.concatenate(clips)) == sorted(HELD)
    config = config.replace(data={'batch_size': 4}, training={'gpt': dict(text_loss_weight=.5, mode='eager')})
    other = new_run(prepared, config, None, HELD, feed=read_eagerly).validate()
    # a clip keeps its reference
    assert other['val_text_loss'] == pytest.approx(seen['val_text_loss'], rel=1e-5)
    assert other['val_loss'] == pytest.approx(0.5 * other['val_text_loss'] + other['val_code_loss'], rel=1e-4)

def test_the_best_model_is_kept_and_patience_ends_a_run(given, prepared, mini, tmp_path):
    """A run that is over stays over. A worse model never replaces the best, also after a kill, when that is
    of a later update than the checkpoint; patience counts the same."""
    config = mini.replace(training={'gpt': {'steps': 20, 'validate_every': 2, 'patience': 3, 'log_every': 5,
                                            'checkpoint_every': 7}})
    run, weights = new_run(prepared, config, tmp_path / 'run', HELD), {}
    store = run.save
    def save(checkpoint, best, wait):
        if best: weights[run.step] = run.xtts.gpt.final_norm.beta.numpy()
        store(checkpoint, best, wait)
    run.save = save
    result = run.fit()
    assert result['steps'] == 16 and result['best'] == {'step': 10, 'val_loss': 1.}
    assert list(weights) == [2, 4, 10]
    assert [line['step'] for line in lines_of(tmp_path / 'run') if 'val_loss' in line] == [*range(2, 17, 2)]
    best = XTTS.load(tmp_path / 'run' / 'best').gpt.final_norm.beta.numpy()
    assert np.array_equal(best, weights[10])
    assert not np.array_equal(best, run.xtts.gpt.final_norm.beta.numpy())
    assert begin(run=tmp_path / 'run').fit()['steps'] == 16
    killed, kept = tmp_path / 'killed', tmp_path / 'killed/best/model.safetensors'
    new_run(prepared, config, killed, HELD).fit(12)
    for path in checkpoints(killed / 'checkpoints')[1:]: path.unlink()   # as if it had been killed
    before, again = kept.read_bytes(), begin(run=killed)
    assert again.step == 7 and again.best == {'step': 10, 'val_loss': 1.}
    again.fit(9)   # validated with 2
    assert kept.read_bytes() == before
    assert summary(begin(run=killed).fit()) == summary(result)

def test_a_training_ends_with_a_validation(given, prepared, mini, tmp_path):
    "Where its steps are no multiple of those between two; a part of it does not."
    config = mini.replace(training={'gpt': {'steps': 5, 'validate_every': 3, 'checkpoint_every': 2}})
    validated = lambda: [line['step'] for line in lines_of(tmp_path / 'run') if 'val_loss' in line]
    new_run(prepared, config, tmp_path / 'run', HELD).fit(4)
    assert validated() == [3]
    best = begin(run=tmp_path / 'run').fit()['best']
    assert validated() == [3, 5] and json.loads((tmp_path / 'run/best/best.json').read_text()) == best

def judged(monkeypatch, prepared, config, folder, looked: dict) -> dict:
    "The best of a run, new or resumed, whose validations are given: {step: scores}."
    monkeypatch.setattr(Cheap, 'validate', lambda self: looked[self.step])
    return new_run(prepared, config, folder, HELD).fit(max(looked))['best']

def test_a_run_is_resumed_under_another_measure(cheap, prepared, mini, tmp_path, monkeypatch):
    "And a number is better than none."
    config, nan = mini.replace(training={'gpt': {'validate_every': 2}}), float('nan')
    run, none, some = tmp_path / 'run', {'val_loss': nan}, {'val_loss': 9.}
    assert judged(monkeypatch, prepared, config, run, {2: none}) is None and not (run / 'best').exists()
    assert judged(monkeypatch, prepared, config, run, {4: some, 6: none})['step'] == 4
    other = config.replace(training={'gpt': {'steps': 12, 'eval_clips': 1, 'judge_by': 'dtw',
                                             'mode': 'eager'}})
    seen = {8: {'val_loss': 3., 'val_dtw': 2.}, 10: {'val_loss': 2., 'val_dtw': 2.5}}
    assert judged(monkeypatch, prepared, other, run, seen) == {'step': 8} | seen[8]

def chosen(by, *validations) -> tuple:
    "Which validation is kept, the number since the best, the lowest distance; of (loss, dtw, words) each."
    best, since = None, 0
    for step, seen in enumerate(validations):
        values = {f'val_{name}': value for name, value in zip(('loss', 'dtw', 'words'), seen)}
        found, restart = judge(best, values, step, by)
        best, since = found or best, 0 if restart else since + 1
    return best['step'], since, best.get('lowest')

def test_the_later_of_two_models_that_speak_alike_is_kept():
    "Within 2 % of the lowest distance there was; patience counts from that one, and a loss is no chance."
    dtw = lambda *distances: chosen('dtw', *((1., x) for x in distances))
    assert dtw(20., 10., 10.2, 10.21) == (2, 2, 10.) and dtw(10., 10.1, 9.9) == (2, 0, None)
    assert dtw(10., 11., 10.1, 9.9, 10.) == (4, 1, 9.9) and dtw(10., float('nan'), 10.) == (2, 2, 10.)
    assert chosen('loss', (10.,), (10.1,)) == (0, 1, None)

def test_a_model_that_says_no_words_is_never_the_nearest(capsys):
    "Among such models the loss decides; one that says words beats them all, and is kept where they are lost."
    kept, mute = (lambda *validations: chosen('dtw', *validations)[:2]), _WORDS - .001
    assert kept((5., 10., 0.), (4., 20., mute)) == (1, 0) and kept((4., 20., mute), (5., 10., 0.)) == (0, 1)
    assert kept((4., 10., mute), (5., 20., _WORDS), (5., 20.3, .5)) == (2, 1)
    assert not capsys.readouterr().err
    assert kept((5., 20., .5), (4., 10., 0.), (6., 19., .5)) == (2, 0)
    assert 'Update 1: the model no longer says the words' in capsys.readouterr().err
    # in a voice where even the right words hardly reach the limit, a little less is not nothing
    assert kept((3., 17., .101), (2.5, 15., .097), (2.2, 14., .094), (2., 13., .04)) == (2, 1)

@pytest.mark.parametrize('last_loss, kept', [(2., 4), (4., 2)])
def test_the_best_and_the_last_model_speak_more_clips(cheap, prepared, mini, tmp_path, monkeypatch, capsys,
                                                      last_loss, kept):
    "By one clip the first model seems to say words. By three neither does, so that the loss decides."
    class Hearing:   # how far they are depends on the weights
        def __init__(self, xtts, cache, clips, count, encoder): self.xtts, self.ids = xtts, clips[:count]
        def __call__(self, folder):
            beta = self.xtts.gpt.final_norm.beta
            return {'dtw': float(beta[0]) + len(self.ids), 'words': -.1, 'length': 1.}
    monkeypatch.setattr(runs, 'Listener', Hearing)
    config = mini.replace(training={'gpt': {'steps': 4, 'validate_every': 2, 'eval_clips': 1,
                                            'judge_by': 'dtw'}})
    looked = {2: {'val_loss': 3., 'val_dtw': 10., 'val_words': .5},
              4: {'val_loss': last_loss, 'val_dtw': 12., 'val_words': 0.}}
    best = judged(monkeypatch, prepared, config, tmp_path / 'run', looked)
    said = capsys.readouterr().err
    assert best['step'] == kept and best['compared'] == 4 and best['val_words'] < _WORDS
    assert f'the model of update {kept} is kept.' in said
    assert json.loads((tmp_path / 'run/best/best.json').read_text()) == best
    last, there = (dict(read_tensors(tmp_path / 'run' / part))['gpt/final_norm/beta'] for part in (
        'model.safetensors', 'best/model.safetensors'))
    assert np.array_equal(last, there) == (kept == 4) and best['val_dtw'] == there[0] + 3
    assert ('Compared on 3 held-out clips: distance ' + (f'{there[0] + 3:.2f}' if kept == 2 else '')) in said
    if kept == 4: return
    again = begin(run=tmp_path / 'run')   # the weights are those of the end, and nothing is compared twice
    assert np.array_equal(again.xtts.gpt.final_norm.beta, last)
    assert again.fit()['best'] == best and 'Compared' not in capsys.readouterr().err

def test_validation_and_the_saved_model_see_the_mean_weights(prepared, mini, tmp_path):
    config = mini.replace(data={'buckets': 1}, training={'gpt': {'steps': 2, 'ema': 0.9, 'validate_every': 2,
                                                         'learning_rate': 1e-2, 'mode': 'eager'}})
    run = new_run(prepared, config, tmp_path / 'run', HELD, feed=read_eagerly)
    run.fit()
    beta = lambda xtts: xtts.gpt.final_norm.beta.numpy()
    now, looked = beta(run.xtts), run.validate()
    line = lines_of(tmp_path / 'run')[-1]
    with run.as_trained(), run.as_trained():   # which may be nested
        mean = beta(run.xtts)
        assert run.validate() == looked == {k: v for k, v in line.items() if k.startswith('val')}
    assert np.array_equal(beta(run.xtts), now) and not np.array_equal(mean, now)
    for kept in ('run', 'run/best'): assert np.array_equal(beta(XTTS.load(tmp_path / kept)), mean)
    assert np.array_equal(beta(begin(run=tmp_path / 'run').xtts), now)

# --- callbacks of Keras ---------------------------------------------------------------------------

class Noting(keras.callbacks.Callback):
    "Notes every call: its name, its number and its logs."
    def __init__(self):
        super().__init__()
        self.calls, self.given = [], []

def noting(name: str):
    def note(self, first=None, logs=None):
        if name.startswith('set_'): getattr(super(Noting, self), name)(first)
        numbered = 'epoch' in name or 'batch' in name
        assert not numbered or type(first) is int   # it is formatted into names of files
        self.calls.append((name, first) if numbered else name)
        if name.startswith('on_'): self.given.append((name, dict((logs if numbered else first) or {})))
    return note

for name in ('set_params', 'set_model', *(
        f'on_{what}_{when}' for what in ('train', 'epoch', 'train_batch', 'test', 'test_batch')
        for when in ('begin', 'end'))): setattr(Noting, name, noting(name))

@pytest.fixture
def epochs(mini):
    "Four epochs of two updates, at a constant rate."
    return mini.replace(training={'gpt': {'validate_every': 2, 'mode': 'eager', 'schedule': 'constant',
                                  'warmup_steps': 0}})

def test_callbacks_are_called_as_by_keras(cheap, prepared, epochs, tmp_path):
    "With the numbers of the latest log line; those of a validation, with val_ at an epoch's end."
    ours, theirs = Noting(), Noting()
    new_run(prepared, epochs.replace(training={'gpt': {'log_every': 3}}), tmp_path / 'run',
            HELD).fit(callbacks=[ours])
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(loss='mse', run_eagerly=True)
    x, y = np.ones((4, 2)), np.ones((4, 1))
    model.fit(x, y, batch_size=2, epochs=4, verbose=0, callbacks=[theirs], validation_data=(x[:2], y[:2]))
    assert ours.calls == theirs.calls and ours.params == theirs.params | {'verbose': 0}
    lines = {line['step']: line for line in lines_of(tmp_path / 'run')}
    batches = [logs.get('step') for name, logs in ours.given if name == 'on_train_batch_end']
    assert batches == [None, None, 2, 3, 4, 4, 6, 6]   # a line is written down while the next update runs
    tests, ends = ([logs for name, logs in ours.given if name == n] for n in ('on_test_end', 'on_epoch_end'))
    assert [t['loss'] for t in tests] == [e['val_loss'] for e in ends] == [lines[s]['val_loss']
                                                                           for s in (2, 4, 6, 8)]

def test_the_callbacks_of_keras(given, prepared, epochs, tmp_path):
    "Losses 3, 2, 2.5, 2: the plateau lowers the rate; an event for each epoch."
    pytest.importorskip('tensorboard')
    run = new_run(prepared, epochs.replace(training={'gpt': {'ema': 0.9}}), tmp_path / 'run', HELD)
    begun = run.xtts.gpt.final_norm.beta.numpy()   # the step of this test moves it, and no mean
    k, path = keras.callbacks, tmp_path / 'epoch-{epoch}.weights.h5'
    run.fit(callbacks=[k.TensorBoard(tmp_path / 'logs'),
                       k.ReduceLROnPlateau('val_loss', factor=0.1, patience=1),
                       k.ModelCheckpoint(path, 'val_loss', save_best_only=True, save_weights_only=True)])
    folder, shares = tmp_path / 'run', (1, 1, 1, 0.1)
    assert rates(folder) == pytest.approx([share * epochs.training.gpt.learning_rate for share in shares])
    found = {}
    for events in sorted((tmp_path / 'logs').rglob('events*')):
        for record in tf.data.TFRecordDataset(str(events)):
            for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
                found.setdefault((events.parent.name, value.tag), []).append(
                    float(tf.make_ndarray(value.tensor)))
    assert found['train', 'epoch_loss'] == pytest.approx([line['loss'] for line in lines_of(folder)])
    assert found['train', 'epoch_learning_rate'] == pytest.approx(rates(folder), rel=1e-5)
    assert found['validation', 'epoch_loss'] == [3., 2., 2.5, 2.]
    # their weights are those of the model as it is trained
    assert sorted(p.name for p in tmp_path.glob('*.h5')) == ['epoch-1.weights.h5', 'epoch-2.weights.h5']
    assert not np.array_equal(run.xtts.gpt.final_norm.beta.numpy(), begun)
    run.xtts.gpt.load_weights(tmp_path / 'epoch-2.weights.h5')
    assert np.array_equal(run.xtts.gpt.final_norm.beta.numpy(), begun)

def test_the_scheduler_of_keras_sets_the_rate_and_a_stop_changes_nothing(given, prepared, epochs, tmp_path):
    "Also where the stop is inside an epoch, and the new rate is a share of the old one."
    halved = lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    new_run(prepared, epochs, tmp_path / 'whole', HELD).fit(callbacks=[halved()])
    assert rates(tmp_path / 'whole') == pytest.approx([epochs.training.gpt.learning_rate / 2**n
                                                       for n in (1, 2, 3, 4)])
    new_run(prepared, epochs, tmp_path / 'run', HELD).fit(3, callbacks=[halved()])
    begin(run=tmp_path / 'run').fit(callbacks=[halved()])
    stopped = {line['step']: line['learning_rate'] for line in lines_of(tmp_path / 'run')}
    assert [stopped[s] for s in (2, 4, 6, 8)] == rates(tmp_path / 'whole')

def test_an_assigned_rate_is_that_of_a_real_update(prepared, mini, tmp_path):
    "And the compiled step is not traced again for it."
    class Still(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None): self.model.optimizer.learning_rate = 0.
    class Moving(Compiled):
        "Whose gradients are ones: what they are changes nothing here, and takes long to trace."
        def custom_train_step(self, batch, number):
            weights = self.update.weights
            self.optimizer.apply([tf.ones(v.shape) for v in weights], weights)
            return {'loss': tf.reduce_sum(batch['weight'])}
    run = new_run(prepared, mini.replace(data={'buckets': 1}), tmp_path / 'run', make=Moving)
    before = [v.numpy() for v in run.update.weights]
    assert run.fit(2, callbacks=[Still()])['traces'] == 1
    assert all(np.array_equal(v.numpy(), old) for v, old in zip(run.update.weights, before))
    run.optimizer.learning_rate = 1e-2
    assert run.fit(3)['traces'] == 1 and not np.array_equal(run.update.weights[0].numpy(), before[0])
    schedule = float(run.optimizer.schedule.schedule(run.optimizer.iterations))
    run.assigned_rate = None   # the schedule again
    assert float(run.rate()) == pytest.approx(schedule) != 1e-2

def test_early_stopping_of_keras_works_and_continues_to_count(given, prepared, mini, tmp_path):
    config = mini.replace(training={'gpt': {'steps': 20, 'validate_every': 2, 'checkpoint_every': 7}})
    early = lambda: keras.callbacks.EarlyStopping('val_loss', patience=3)
    new_run(prepared, config, tmp_path / 'run', HELD).fit(14, callbacks=[early()])   # the best was at 10
    heard = Noting()
    assert begin(run=tmp_path / 'run').fit(callbacks=[early(), heard])['steps'] == 16
    assert [c for c in heard.calls if c[0] == 'on_epoch_end'] == [('on_epoch_end', 7)]

def test_a_loss_that_is_no_number_ends_the_run_if_keras_is_asked_to(prepared, mini, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, 'Trainer', type('Fourth', (Broken,), {'at': (3,)}))
    run = new_run(prepared, mini, tmp_path / 'run')
    # with the log line of the fourth
    assert run.fit(callbacks=[keras.callbacks.TerminateOnNaN()])['steps'] == 5
    assert begin(run=tmp_path / 'run').fit()['steps'] == 8

@pytest.mark.parametrize('callback, key', [
    (lambda: keras.callbacks.BackupAndRestore('backup'), 'BackupAndRestore'),
    (lambda: keras.callbacks.EarlyStopping(restore_best_weights=True), 'restore_best_weights'),
    (lambda: keras.callbacks.ModelCheckpoint('a.keras'), 'save_weights_only'),
    (lambda: keras.callbacks.ModelCheckpoint('a.weights.h5', save_weights_only=True, save_freq=3), 'freq'),
    (lambda: keras.callbacks.SwapEMAWeights(), 'ema in the section')])
def test_a_callback_that_cannot_act_is_refused(callback, key):
    with pytest.raises(UserError, match=key): trainer_page._check_callbacks([callback()])
