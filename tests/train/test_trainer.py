"Training: equal in every mode, compiled once a shape, silent between log lines."

import csv
import json
import shutil
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from cheap import HELD, Cheap, lines_of, outcome, read_eagerly, summary
from clock import Clock
from process import tree
from xtts_nb.files import open_weights, read_tensors
from xtts_nb.monitor import loop
from xtts_nb.train import runs, trainer as trainer_page
from xtts_nb.config import TrainingConfig, UserError
from xtts_nb.data.native import BatchPlan, cached_batches
from xtts_nb.models.xtts import XTTS
from xtts_nb.train.step import averaged, learning_rate, Update
from xtts_nb.bench import to_device, trace_count, wait_for
from xtts_nb.monitor.loop import StepTimer
from xtts_nb.train.runs import new_run, resume_run
from xtts_nb.train.trainer import (
    checkpoints, epochs_to_steps, Hooks, on_device, save_checkpoint, Trainer, WORDS, _mean, _numbers)


# --- the optimizer --------------------------------------------------------------------------------

def test_the_optimizer_follows_the_schedule(cheap, prepared, mini, tmp_path):
    run = new_run(prepared, mini.replace(training={'schedule': 'cosine', 'steps': 8}), tmp_path / 'run')
    run.fit()
    rates = [line['learning_rate'] for line in lines_of(tmp_path / 'run')]
    assert rates == pytest.approx([float(learning_rate(run.training)(s)) for s in (2, 4, 6, 8)])

def test_an_extended_run_continues_from_its_rate(cheap, prepared, mini, tmp_path):
    "In one go or resumed, the same to the bit; also from a checkpoint that does not tell its length."
    config = lambda steps: mini.replace(training={'schedule': 'cosine', 'steps': steps, 'learning_rate': 1.,
                                                  'log_every': 1})
    one, two, old = (tmp_path / name for name in ('one', 'two', 'old'))
    new_run(prepared, config(10), one).fit()
    shutil.copytree(one, two)
    shutil.copytree(one, old)
    saved = checkpoints(old / 'checkpoints')[-1]
    with open_weights(saved) as file: facts = json.loads(file.metadata()['facts'])
    del facts['length']
    save_checkpoint(saved.parent, variables=dict(read_tensors(saved)), **facts)
    new_run(prepared, config(60), one).fit()
    new_run(prepared, config(60), old).fit()
    new_run(prepared, config(60), two).fit(30)
    resume_run(two).fit()
    assert outcome(one) == outcome(two) == outcome(old)
    rates = [line['learning_rate'] for line in lines_of(one)]
    assert rates[9] < .03 and rates[10] < .25 and max(rates[10:]) > .8 and rates[59] < .03


# --- the loop -------------------------------------------------------------------------------------

@pytest.fixture
def clock(monkeypatch):
    "A clock that is set by hand."
    clock = Clock()
    for module in (loop, trainer_page): monkeypatch.setattr(module, 'time', clock)
    return clock

class Timed:
    "A step that takes as many seconds as its batch says, and traces where it says so."
    def __init__(self, clock): self.clock, self.traces = clock, 0
    def experimental_get_tracing_count(self): return self.traces
    def __call__(self, batch, seconds, traces=0):
        self.clock.now += seconds
        self.traces += traces
        return seconds

def test_the_pace_by_hand(clock, monkeypatch):
    """The first step of a shape and one that traces do not count; three more are timed alone: the device
    is waited for."""
    waited, step, timer = [], Timed(clock), StepTimer(4, {})
    monkeypatch.setattr(loop, 'wait_for', waited.append)
    with timer.phase('wait'): clock.now += 1 / 7
    for seconds in (5., 2., 3., 1., 7., 0.5): assert timer.run(step, {'x': np.zeros(3)}, seconds) == seconds
    timer.run(step, {'x': np.zeros(3)}, 9., 1)
    (known,), lap = timer.alone.values(), timer.take_interval()
    assert waited == [None, 5., 5., 2., 2., 3., 3., 1.] and known == pytest.approx([2, 3, 1])
    assert lap.left_out == pytest.approx(14) == timer.compile_seconds
    assert lap.alone == pytest.approx([2, 2, 1, 1, 1])
    assert (lap.counted, timer.interval.counted) == (5, 0)
    wall = 2 + 3 + 1 + 7 + 0.5 + 1 / 7
    assert timer.metrics(lap, clock.now) == {'clips_per_s': 1.47, 'au': 0.513, 'wait_ms': 28.571,
                                            'copy_ms': 0., 'step_ms': 2700.,
                                            'callbacks_ms': 0.}
    timer.run(step, {'x': np.zeros(3)}, 2.)
    # 0.5 s where a step alone takes 1: not cut
    assert timer.metrics(timer.take_interval(), clock.now - 1.5)['au'] == 2
    assert timer.rates == pytest.approx([20 / wall, 8])
    assert timer.median_rate() == round((20 / wall + 8) / 2, 2)
    nothing = dict.fromkeys(('clips_per_s', 'au', 'wait_ms', 'copy_ms', 'step_ms', 'callbacks_ms'))
    assert timer.metrics(timer.take_interval(), clock.now) == nothing   # no step
    timer.run(step, {'x': np.zeros(3)}, 0.)
    # no time
    assert timer.metrics(timer.take_interval(), clock.now) == nothing and StepTimer(4, {}).median_rate() == 0
    for row in ([2, 3], [2]): timer.run(step, {'x': tf.ragged.constant([[1], row])}, 1.)
    assert len(timer.alone) == 3   # the values of a ragged tensor count

@pytest.mark.cpu
def test_waiting_fetches_every_scalar_else_one_element(monkeypatch):
    kind, fetched = type(tf.constant(0)), []
    owner = next(c for c in kind.__mro__ if '_numpy' in vars(c))
    real = owner._numpy
    monkeypatch.setattr(owner, '_numpy', lambda self: (fetched.append(tuple(self.shape)), real(self))[1])
    def of(results):
        fetched.clear()
        wait_for(results)
        return fetched.copy()
    assert of({'a': tf.constant(1.), 'b': tf.zeros(3), 'c': tf.constant(2)}) == [(), ()]
    assert of([tf.zeros((2, 3)), tf.zeros(4)]) == [(1,)]
    assert of([None, 3, np.zeros(2), tf.Variable(1.).handle]) == []
    monkeypatch.setattr(tf.config, 'list_logical_devices', lambda kind: [SimpleNamespace(name='CPU:0')] * 2)
    assert of(None) == [(), ()]
    assert of(tf.constant(1.)) == [()]   # every card, where there is nothing to fetch

@pytest.mark.cpu
def test_what_goes_where(monkeypatch):
    batch, names = {'x': tf.constant([1., 2.])}, []
    assert to_device(batch) is batch and isinstance(on_device(None), nullcontext)   # there is no card
    with on_device('CPU:0'): assert 'CPU:0' in tf.constant(1.).device
    assert to_device(batch, 'CPU:0')['x'] is not batch['x']
    assert 'CPU:0' in to_device(batch, 'CPU:0')['x'].device
    monkeypatch.setattr(tf.config, 'list_logical_devices', lambda kind: ['a card'])
    monkeypatch.setattr(tf, 'device', lambda name: names.append(name) or nullcontext())
    to_device(batch)
    to_device(batch, 'GPU:1')
    assert names == ['GPU:0', 'GPU:1']

def test_epochs_are_updates_and_no_losses_have_no_mean():
    plan, plain = SimpleNamespace(steps_per_epoch=5), TrainingConfig(steps=7)
    assert epochs_to_steps(plain, plan) is plain
    assert epochs_to_steps(TrainingConfig(steps=7, epochs=3), plan).steps == 15
    assert _mean([]) is None and _mean([1, 0, 0]) == 0.33333

@pytest.mark.parametrize('patience, since, over', [
    (0, 0, False), (0, 9, False), (1, 0, False), (1, 1, True), (3, 2, False), (3, 3, True), (3, 4, True)])
def test_patience_is_at_an_end(patience, since, over):
    run = SimpleNamespace(training=SimpleNamespace(patience=patience), since_best=since)
    assert Trainer.over.fget(run) is over

def test_a_model_is_shown_as_trained_once():
    entered = []
    @contextmanager
    def shown():
        entered.append('in')
        yield
        entered.append('out')
    run = SimpleNamespace(shown=False, update=SimpleNamespace(as_trained=shown))
    for _ in range(2):
        with Trainer.as_trained(run), Trainer.as_trained(run): assert entered[-1] == 'in'
    assert entered == ['in', 'out'] * 2 and run.shown is False

def test_bad_updates_are_named_and_counted(capsys):
    "The batch of flags ends before the step that is given; a good update begins the count anew."
    run = SimpleNamespace(bad_in_row=0, failure=None, run=None, training=SimpleNamespace(max_bad_steps=3),
                          plan=SimpleNamespace(names=lambda n: [f'clip {n}', 'other']))
    count = lambda step, flags: Trainer._count_bad(run, step, flags)
    assert count(10, [0, 0]) == {} and not capsys.readouterr().err
    assert count(15, [0, 1, 1, 0, 1]) == {'bad': {n: [f'clip {n}', 'other'] for n in (11, 12, 14)}}
    assert run.bad_in_row == 1
    said = 'Update 11 was left out: a loss or gradient is not finite. Its clips: clip 11, other.'
    assert said in capsys.readouterr().err
    assert count(18, [1, 0, 1])['bad'].keys() == {15, 17} and run.failure is None
    count(19, [1])
    assert run.failure is None
    count(20, [1])
    assert run.failure.startswith('training: 3 updates in a row') and 'clips clip 19, other;' in run.failure

@pytest.mark.parametrize('rows, parts, more', [
    (12, 1, 2), (12, 2, 4), (12, 4, 12), (9, 1, 3), (7, 1, 7), (12, 12, None), (9, 9, None)])
def test_memory_that_is_short_divides_the_batch(rows, parts, more, mini, capsys):
    run = Cheap.__new__(Cheap)
    config = mini.replace(data={'batch_size': rows},
                          training={'accumulation': parts, 'mode': 'xla'})
    run.__dict__ |= dict(plan=SimpleNamespace(data=config.data), training=config.training, run=None, step=5,
                         alone={1: 2}, update=Update.__new__(Update), xtts=SimpleNamespace(config=config),
                         train_step=SimpleNamespace(xla=True))
    error = tf.errors.ResourceExhaustedError(None, None, 'OOM [[{{node gradients_alone/PartitionedCall}}]]')
    run.update.optimizer = run.optimizer = None
    if more:
        run._more_parts(error)
        said = f'at update 5: nothing was changed; it is made again in {more} parts instead of {parts}'
        assert said in capsys.readouterr().err
        assert {t.accumulation for t in (run.training, run.update.training,
                                         run.xtts.config.training)} == {more} and not run.alone
        run.update = 'another kind'   # that cannot be divided
    remedy = 'lower training.dvae_batch_size' if more else 'set training.gradient_checkpointing'
    said = f'training: out of memory with {rows // (more or parts)} rows at once; {remedy}'
    with pytest.raises(UserError, match=said): run._more_parts(error)
    run.run = 'a/run'
    with pytest.raises(UserError, match='^a/run: out of memory'): run._more_parts(error)

def test_what_a_trainer_is_given(prepared, mini, tmp_path):
    plan, asked = BatchPlan(prepared, mini.data), []
    xtts = XTTS(mini, prepared.tokenizer)
    update = Update(xtts.gpt, mini.training)
    run = Cheap(xtts, plan, update=update, feed=lambda *given: asked.append(given) or plan.stream(*given[1:]))
    assert run.update is update and (run.since_best, run.bad_in_row, run.step, run.run) == (0, 0, 0, None)
    assert run.fit(3)['steps'] == run.fit(3)['steps'] == 3
    assert asked == [(plan, 0, 3), (plan, 3, 3)]   # the second has nothing to do

@pytest.mark.parametrize('on', [False, True])
def test_a_run_multiplies_in_tf32_only_while_it_trains_and_if_it_is_set(prepared, mini, on):
    seen, enabled = [], tf.config.experimental.tensor_float_32_execution_enabled
    config = mini.replace(training={'tf32': on}, data={'buckets': 1})
    run = Cheap(XTTS(config, prepared.tokenizer), BatchPlan(prepared, config.data))
    run.train_step = lambda batch, number: seen.append(enabled()) or {'loss': tf.constant(1.)}
    run.fit(2)
    assert seen == [on, on] and not enabled()

def test_the_seconds_of_a_run(clock, prepared, mini):
    "Waits of 1 s, steps of 0.1264 s; a clock that stands still otherwise."
    def feed(plan, first, last):
        for batch in plan.stream(first, last):
            clock.now += 1
            yield batch
    config = mini.replace(data={'buckets': 1})
    run = Cheap(XTTS(config, prepared.tokenizer), BatchPlan(prepared, config.data), feed=feed)

    def step(batch, number):
        clock.now += 0.1264
        return {'loss': tf.constant(1.)}

    run.train_step = step
    found = run.fit(3)
    assert (found['seconds'], found['compile_seconds'], found['traces']) == (3.38, 0.13, 0)

def test_as_many_traces_as_shapes(prepared, mini):
    run = Cheap(XTTS(mini, prepared.tokenizer), BatchPlan(prepared, mini.data),
                feed=lambda plan, first, last: plan.stream(first, last))
    result = run.fit(steps=3 * run.plan.steps_per_epoch)
    assert len(run.plan.shapes) == 2 and result['traces'] == trace_count(run.train_step) == 2
    assert run.fit(steps=5 * run.plan.steps_per_epoch)['traces'] == 2 and result['clips_per_s'] > 0

@pytest.mark.slow
def test_as_many_traces_as_shapes_under_xla(prepared, mini, tmp_path):
    run = new_run(prepared, mini.replace(training={'mode': 'xla'}, data={'buckets': 3}),
                  tmp_path / 'run')
    result = run.fit(steps=3 * run.plan.steps_per_epoch)
    assert result['traces'] == len(run.plan.shapes) == 3 and result['loss_last'] < result['loss_first']

@pytest.mark.parametrize('every', [4, pytest.param(8, marks=pytest.mark.slow)])
def test_nothing_is_fetched_between_two_log_lines(prepared, mini, monkeypatch, every):
    """Every way from a tensor to a number is watched; what is fetched at a log line does not grow with
    the updates before it."""
    config = mini.replace(training={'log_every': every, 'checkpoint_every': 16}, data={'buckets': 1})
    run = Cheap(XTTS(config, prepared.tokenizer), BatchPlan(prepared, config.data),
                feed=lambda plan, first, last: plan.stream(first, last))
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
    lines = {s + (s < 16) for s in range(every, 17, every)}   # a line is fetched while the next update runs
    timed = {0, 1, 2, 3, 4}   # before the first update, and the few that are timed alone
    assert max(lines) in fetched and set(fetched) <= timed | lines | {s - 1 for s in lines}
    assert all(fetched.count(step) <= 4 for step in lines), fetched

def test_a_log_line_is_the_mean_of_its_updates(cheap, prepared, mini, tmp_path):
    by_step = {}
    for every in (1, 3):
        run = new_run(prepared, mini.replace(training={'log_every': every, 'checkpoint_every': 5}),
                      tmp_path / str(every))
        result = run.fit(steps=7)
        by_step[every] = {line['step']: line for line in lines_of(tmp_path / str(every))}
        assert summary(result) == summary(result | {'steps': 7})
    assert list(by_step[3]) == [3, 5, 6, 7]   # at a checkpoint and at the end nothing stays pending
    for name in ('loss', 'text_loss', 'code_loss', 'gradient_norm'):
        for step, of in ((3, (1, 2, 3)), (5, (4, 5)), (6, (6,)), (7, (7,))):
            assert by_step[3][step][name] == pytest.approx(np.mean([by_step[1][i][name] for i in of]),
                                                           rel=1e-4)

@pytest.mark.parametrize('steps', [1, 4, 10, 11, 25])
def test_the_summary_is_of_the_first_and_last_ten_updates(cheap, prepared, mini, tmp_path, steps):
    result = new_run(prepared, mini.replace(training={'log_every': 1, 'checkpoint_every': 7}),
                     tmp_path / 'run').fit(steps)
    losses = [line['loss'] for line in lines_of(tmp_path / 'run')]
    assert result['steps'] == len(losses) == steps
    assert result['loss_first'] == pytest.approx(np.mean(losses[:10]), abs=2e-5)
    assert result['loss_last'] == pytest.approx(np.mean(losses[-10:]), abs=2e-5)

def test_progress_is_reported_at_each_log_line(cheap, prepared, mini, tmp_path):
    seen = []
    told = lambda done, total, line: seen.append((done, total, line['step']))
    new_run(prepared, mini, tmp_path / 'run').fit(steps=5, progress=told)
    assert seen == [(2, 5, 2), (4, 5, 4), (5, 5, 5)]

def test_without_a_folder_nothing_is_written(prepared, mini, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Cheap(trainer_page.XTTS(mini, prepared.tokenizer), BatchPlan(prepared, mini.data)).fit(steps=3)
    assert tree(tmp_path) == {}


# --- every key of the training section ------------------------------------------------------------

def real_losses(prepared, config):
    "Of three updates, op by op, as they are asked for."
    keras.utils.set_random_seed(config.training.seed)
    xtts = trainer_page.XTTS(config.replace(training={'mode': 'eager'}), prepared.tokenizer)
    run = Trainer(xtts, BatchPlan(prepared, config.data))
    for i, batch in enumerate(read_eagerly(run.plan, 0, 3)):
        yield [float(v) for v in run.train_step(batch, tf.constant(i)).values()]

def files(prepared, config, folder) -> list[str]:
    "What a run leaves, by name, and the steps of its log lines."
    new_run(prepared, config, folder, ['low-0', 'high-0']).fit()
    return sorted(tree(folder)) + [line['step'] for line in lines_of(folder)]

LOSSES = {'learning_rate': 2e-2, 'weight_decay': 0.9, 'beta_2': 0.5, 'gradient_clip_norm': 0.01,
          'text_loss_weight': 1., 'precision': 'bfloat16', 'seed': 7, 'warmup_steps': 1,
          'accumulation': 2}   # parts draw masks of their own
FILES = {'steps': 6, 'log_every': 1, 'checkpoint_every': 3, 'keep_checkpoints': 1, 'validate_every': 2}
ELSEWHERE = {'schedule', 'ema', 'patience', 'max_bad_steps',   # here and in test_optimizer.py
             'finetune', 'lora_rank', 'lora_alpha',   # test_adapters.py
             'mode', 'gradient_checkpointing',   # test_step.py
             'tf32',   # above
             'dvae_steps', 'dvae_batch_size', 'dvae_learning_rate',   # test_voices.py
             'listen_clips', 'judge_by',   # speech/test_listen.py
             'epochs'}   # below

def test_no_key_of_the_training_section_is_forgotten():
    assert {*LOSSES, *FILES, *ELSEWHERE} == set(TrainingConfig.model_fields)

@pytest.fixture(scope='module')
def base(mini): return mini.replace(training={'learning_rate': 1e-2, 'warmup_steps': 0}, data={'buckets': 1})

@pytest.fixture(scope='module')
def base_losses(prepared, base): return list(real_losses(prepared, base))

@pytest.mark.parametrize('key', LOSSES)
def test_a_key_changes_the_losses(prepared, base, base_losses, key):
    changed = real_losses(prepared, base.replace(training={key: LOSSES[key]}))
    assert any(a != b for a, b in zip(changed, base_losses))   # at the first that differs it is known

def test_the_same_settings_give_the_same_losses(prepared, base, base_losses):
    assert list(real_losses(prepared, base)) == base_losses

@pytest.fixture(scope='module')
def base_files(prepared, mini, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, 'Trainer', Cheap)
        return files(prepared, mini, tmp_path_factory.mktemp('base') / 'run')

@pytest.mark.parametrize('key', FILES)
def test_a_key_changes_what_is_kept(cheap, prepared, mini, base_files, tmp_path, key):
    assert files(prepared, mini.replace(training={key: FILES[key]}), tmp_path / 'run') != base_files


# --- validation -----------------------------------------------------------------------------------

def test_validation_is_the_mean_over_the_tokens_held_out(prepared, mini, tmp_path):
    "Over all of them, once each, at dropout 0, whatever the batches; and twice the same."
    config = mini.replace(training={'validate_every': 1}, data={'batch_size': 2})
    run = new_run(prepared, config, tmp_path / 'run', HELD)
    seen = run.validate()
    assert run.validate() == seen == run.validated and trace_count(run.evaluate) == 1
    assert {k for k in seen if 'loss' not in k} == {'val_stop', 'val_stop_short', 'val_never'}
    clips = [b['clip'].numpy()[b['weight'].numpy() > 0]
             for b in cached_batches(run.held_out, 0, run.held_out.steps_per_epoch)]
    assert sorted(prepared.clips[i]['id'] for i in np.concatenate(clips)) == sorted(HELD)
    config = config.replace(data={'batch_size': 4},
                            training={'text_loss_weight': 0.5, 'mode': 'eager'})
    other = new_run(prepared, config, tmp_path / 'other', HELD).validate()
    # a clip keeps its reference
    assert other['val_text_loss'] == pytest.approx(seen['val_text_loss'], rel=1e-5)
    assert other['val_loss'] == pytest.approx(0.5 * other['val_text_loss'] + other['val_code_loss'], rel=1e-4)

def test_a_listener_is_asked_at_each_validation(cheap, prepared, mini, tmp_path):
    "With a folder of its own, where the run has one."
    run, seen = new_run(prepared, mini.replace(training={'validate_every': 2}), tmp_path / 'run', HELD), []
    assert set(run.validate()) == {'val_loss', 'val_text_loss', 'val_code_loss'}
    run.listen = lambda folder: seen.append(folder) or {'dtw': 1.23456789}
    assert run.validate()['val_dtw'] == 1.234568
    run.run = None
    run.validate()
    assert seen == [tmp_path / 'run' / 'spoken' / '000000000', None]

def test_what_is_saved_is_the_state_at_that_moment(cheap, prepared, mini, tmp_path):
    "Even if training goes on while it is written; without further words a checkpoint and the model, at once."
    run, jobs = new_run(prepared, mini, tmp_path / 'run'), []
    beta, kept = run.xtts.gpt.final_norm.beta, tmp_path / 'run' / 'checkpoints' / 'step-000000000.safetensors'
    saved = lambda: dict(read_tensors(kept))['gpt/final_norm/beta']
    writer, run.writer = run.writer, jobs.append   # a job of a list is done later
    run.save(wait=False)
    beta.assign(beta.value + 7)
    (job,) = jobs
    job()
    assert not saved().any() and not (tmp_path / 'run' / 'best').exists()
    assert {name for name, _ in read_tensors(tmp_path / 'run' / 'model.safetensors')} == set(run.xtts.weights)
    run.writer = writer
    run.save(False, False)
    assert not saved().any()   # nothing was asked for
    run.save()
    assert (saved() == 7).all() and not (tmp_path / 'run' / 'best').exists()
    run.step = 4
    run.save(False, True)
    assert (tmp_path / 'run' / 'best').is_dir() and [p.name for p in kept.parent.iterdir()] == [kept.name]

def test_the_best_model_is_kept_and_patience_ends_a_run(given, prepared, mini, tmp_path):
    config = mini.replace(training={'steps': 20, 'validate_every': 2, 'patience': 3, 'checkpoint_every': 5,
                                    'log_every': 5})
    run = new_run(prepared, config, tmp_path / 'run', HELD)
    weights = {}
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
    assert resume_run(tmp_path / 'run').fit()['steps'] == 16   # it is over

def test_a_worse_model_never_replaces_the_best(given, prepared, mini, tmp_path):
    "Also after a kill, when it is of a later update than the checkpoint; patience counts the same."
    config = mini.replace(training={'steps': 20, 'validate_every': 2, 'patience': 3, 'checkpoint_every': 7})
    run, kept = new_run(prepared, config, tmp_path / 'run', HELD), tmp_path / 'run' / 'best'
    run.fit(12)
    for path in checkpoints(tmp_path / 'run' / 'checkpoints')[1:]: path.unlink()   # as if it had been killed
    before = (kept / 'model.safetensors').read_bytes()
    again = resume_run(tmp_path / 'run')
    assert again.step == 7 and again.best == {'step': 10, 'val_loss': 1.}
    again.fit(9)   # validated with 2
    assert (kept / 'model.safetensors').read_bytes() == before
    assert resume_run(tmp_path / 'run').fit()['steps'] == 16

def test_a_training_ends_with_a_validation(given, prepared, mini, tmp_path):
    "Where its steps are no multiple of those between two; a part of it does not."
    config = mini.replace(training={'steps': 5, 'validate_every': 3, 'checkpoint_every': 2})
    validated = lambda: [line['step'] for line in lines_of(tmp_path / 'run') if 'val_loss' in line]
    run = new_run(prepared, config, tmp_path / 'run', HELD)
    run.fit(4)
    assert validated() == [3]
    best = resume_run(tmp_path / 'run').fit()['best']
    assert validated() == [3, 5] and json.loads((tmp_path / 'run/best/best.json').read_text()) == best
    config = mini.replace(training={'steps': 5, 'validate_every': 0})
    none = new_run(prepared, config, tmp_path / 'none', HELD)
    none.held_out = run.held_out   # there are some, and nobody asks for them
    none.fit()
    assert not [line for line in lines_of(tmp_path / 'none') if 'val_loss' in line]

def test_patience_survives_a_stop(given, prepared, mini, tmp_path):
    config = mini.replace(training={'steps': 20, 'validate_every': 2, 'patience': 3, 'checkpoint_every': 7})
    for stop in (7, 14, None):
        result = (resume_run if stop != 7 else lambda r: new_run(prepared, config, r, HELD))(
        tmp_path / 'run').fit(stop)
    assert (result['steps'], result['best']['step']) == (16, 10)

def judged(monkeypatch, prepared, config, folder, looked: dict) -> dict:
    "The best of a run, gone on with if it stands, whose validations are given: {step: what is seen}."
    monkeypatch.setattr(Cheap, 'validate', lambda self: looked[self.step])
    return new_run(prepared, config, folder, HELD).fit(max(looked))['best']

def test_a_run_goes_on_under_another_measure(cheap, prepared, mini, tmp_path, monkeypatch):
    config = mini.replace(training={'validate_every': 2})
    other = config.replace(training={'listen_clips': 1, 'judge_by': 'dtw', 'mode': 'eager'})
    assert judged(monkeypatch, prepared, config, tmp_path / 'run', {2: {'val_loss': 1.}})['step'] == 2
    seen = {4: {'val_loss': 3., 'val_dtw': 2.}, 6: {'val_loss': 2., 'val_dtw': 2.5}}
    assert judged(monkeypatch, prepared, other, tmp_path / 'run', seen) == {'step': 4} | seen[4]

def test_the_later_of_two_models_that_speak_alike_is_kept():
    "Within 2 % of the lowest distance there was; patience counts from that one, and a loss is no chance."
    def kept(judge, *values):
        run = SimpleNamespace(training=SimpleNamespace(judge_by=judge), best=None, since_best=0)
        for run.step, value in enumerate(values):
            before = run.best
            chosen = Trainer._note_best(run, {f'val_{judge}': value})
            assert chosen == (run.best is not before)
        return run.best['step'], run.since_best, run.best.get('lowest')
    assert kept('dtw', 20., 10., 10.2, 10.21) == (2, 2, 10.)
    assert kept('dtw', 10., 10.2, 10.4) == (1, 2, 10.)
    assert kept('dtw', 10., 10.1, 9.9) == (2, 0, None)
    assert kept('dtw', 10., 11., 10.1, 9.9, 10.) == (4, 1, 9.9)
    assert kept('loss', 10., 10.1) == (0, 1, None) and kept('dtw', 10., float('nan'), 10.) == (2, 2, 10.)

def test_a_model_that_says_no_words_is_never_the_nearest(capsys):
    "Among such models the loss decides; one that says words beats them all, and is kept where they are lost."
    def kept(*validations):
        run = SimpleNamespace(training=SimpleNamespace(judge_by='dtw'), best=None, since_best=0)
        for run.step, (loss, dtw, words) in enumerate(validations):
            before = run.best
            values = {'val_loss': loss, 'val_dtw': dtw, 'val_words': words}
            assert Trainer._note_best(run, values) == (run.best is not before)
            if run.best is not before: assert run.best.items() >= values.items()
        return run.best['step'], run.since_best
    mute = WORDS - .001
    assert kept((5., 10., 0.), (4., 20., mute)) == (1, 0) and kept((4., 20., mute), (5., 10., 0.)) == (0, 1)
    assert kept((4., 20., mute), (4., 20., mute)) == (0, 1)   # a loss is no chance
    assert kept((4., 10., mute), (5., 20., WORDS)) == (1, 0)
    assert kept((4., 10., mute), (5., 20., WORDS), (5., 20.3, .5)) == (2, 1)
    assert not capsys.readouterr().err
    assert kept((5., 20., .5), (4., 10., 0.), (6., 19., .5)) == (2, 0)
    assert capsys.readouterr().err == ('Update 1: the model no longer says the words of its held-out '
                                       'sentences; the best one so far is that of update 0.\n')
    assert kept((5., 20., .5), (4., 10., -.1)) == (0, 1)
    # in a voice where even the right words hardly reach the limit, a little less is not nothing
    assert kept((3., 17., .101), (2.5, 15., .097), (2.2, 14., .094), (2., 13., .04)) == (2, 1)

def test_a_number_is_better_than_none(cheap, prepared, mini, tmp_path, monkeypatch):
    config, nan = mini.replace(training={'validate_every': 2}), float('nan')
    assert judged(monkeypatch, prepared, config, tmp_path / 'run', {2: {'val_loss': nan}}) is None
    assert not (tmp_path / 'run' / 'best').exists()
    assert judged(monkeypatch, prepared, config, tmp_path / 'run',
                  {4: {'val_loss': 9.}, 6: {'val_loss': nan}})['step'] == 4
    run = resume_run(tmp_path / 'run')
    run.best = {'step': 2, 'val_loss': nan}   # as earlier versions kept it
    assert run._note_best({'val_loss': 9.})

def test_validation_and_the_saved_model_see_the_mean_weights(prepared, mini, tmp_path):
    config = mini.replace(data={'buckets': 1}, training={'steps': 2, 'ema': 0.9, 'validate_every': 2,
                                                         'learning_rate': 1e-2, 'mode': 'eager'})
    run = new_run(prepared, config, tmp_path / 'run', HELD)
    run.fit()
    now, looked = run.xtts.gpt.final_norm.beta.numpy(), run.validate()
    with averaged(run.optimizer, run.update.weights):
        mean = run.xtts.gpt.final_norm.beta.numpy()
        run.optimizer.use_ema = False
        line = lines_of(tmp_path / 'run')[-1]
        assert run.validate() == looked == {k: v for k, v in line.items() if k.startswith('val')}
        run.optimizer.use_ema = True
    assert run.validate() == looked and not np.array_equal(mean, now)
    for kept in (tmp_path / 'run', tmp_path / 'run' / 'best'):
        assert np.array_equal(XTTS.load(kept).gpt.final_norm.beta.numpy(), mean)
    assert np.array_equal(resume_run(tmp_path / 'run').xtts.gpt.final_norm.beta.numpy(), now)


# --- callbacks of Keras ---------------------------------------------------------------------------

METHODS = [f'on_{what}_{when}' for what in ('train', 'epoch', 'train_batch', 'test', 'test_batch')
           for when in ('begin', 'end')]

class Noting(keras.callbacks.Callback):
    "Notes every call: its name, its number and what it was given."
    def __init__(self):
        super().__init__()
        self.calls, self.given = [], []
    def set_params(self, params):
        super().set_params(params)
        self.calls.append('set_params')
    def set_model(self, model):
        super().set_model(model)
        self.calls.append('set_model')
    def note(self, name, number=None, logs=None):
        assert number is None or type(number) is int   # it is formatted into names of files
        self.calls.append(name if number is None else (name, number))
        self.given.append((name, dict(logs or {})))

for name in METHODS:
    numbered = 'epoch' in name or 'batch' in name
    setattr(Noting, name,
            (lambda n: lambda self, number, logs=None: self.note(n, number, logs))(name) if numbered else
                          (lambda n: lambda self, logs=None: self.note(n, None, logs))(name))

@pytest.fixture
def epochs(mini):
    "Four epochs of two updates, at a constant rate."
    return mini.replace(training={'validate_every': 2, 'mode': 'eager', 'schedule': 'constant',
                                  'warmup_steps': 0})

def rates(folder) -> list[float]: return [line['learning_rate'] for line in lines_of(folder)]

def test_callbacks_are_called_as_by_keras(cheap, prepared, epochs, tmp_path):
    ours, theirs = Noting(), Noting()
    new_run(prepared, epochs, tmp_path / 'run', HELD).fit(callbacks=[ours])
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(loss='mse')
    x, y = np.ones((4, 2)), np.ones((4, 1))
    model.fit(x, y, batch_size=2, epochs=4, verbose=0, callbacks=[theirs], validation_data=(x[:2], y[:2]))
    assert ours.calls == theirs.calls and ours.params == theirs.params | {'verbose': 0}

def test_an_epoch_is_so_many_updates():
    "Begun in the middle too, and with what callbacks had counted: numbers, but no flags."
    noting, optimizer = Noting(), SimpleNamespace(learning_rate=None)
    hooks = Hooks([noting], keras.Sequential(), optimizer, 2, 7)
    assert noting.params == {'verbose': 0, 'epochs': 4, 'steps': 2} and hooks.model.stop_training is False
    assert Hooks([], keras.Sequential(), optimizer, 2).all.params['epochs'] == 0
    def calls(f, *given):
        noting.calls.clear()
        f(*given)
        return noting.calls.copy()
    assert calls(hooks.train_begins, 4, [], None) == ['on_train_begin'] and optimizer.learning_rate is None
    assert calls(hooks.train_begins, 5, [{'wait': 3}], 0.5) == ['on_train_begin', ('on_epoch_begin', 2)]
    assert noting.wait == 3 and optimizer.learning_rate == 0.5
    assert calls(hooks.update_begins, 6) == [('on_epoch_begin', 3), ('on_train_batch_begin', 0)]
    assert calls(hooks.update_begins, 7) == [('on_train_batch_begin', 1)]
    hooks.logs = {'loss': 2.}
    assert calls(hooks.update_ends, 7) == [('on_train_batch_end', 1)] and noting.given[-1][1] == {'loss': 2.}
    hooks.bad = True
    hooks.update_ends(8)
    assert np.isnan(noting.given[-1][1]['loss'])
    assert calls(lambda: [*hooks.validation('ab')]) == ['on_test_begin', *(
        (f'on_test_batch_{when}', n) for n in (0, 1) for when in ('begin', 'end'))]
    noting.best, noting.flag = np.float32(1.5), True
    assert hooks.counts() == [{'wait': 3, 'best': 1.5}]
    numbers = _numbers(SimpleNamespace(a=1, b=1.5, c=np.float32(2.5), d='x', e=True, f=np.int64(3), g=None))
    assert numbers == {'a': 1, 'b': 1.5, 'c': 2.5, 'f': 3} and json.dumps(numbers)

def test_what_callbacks_are_given(cheap, prepared, epochs, tmp_path):
    "The numbers of the latest log line; those of a validation, with val_ at an epoch's end."
    heard = Noting()
    new_run(prepared, epochs.replace(training={'log_every': 3}), tmp_path / 'run',
            HELD).fit(callbacks=[heard])
    lines = {line['step']: line for line in lines_of(tmp_path / 'run')}
    batches = [logs.get('step') for name, logs in heard.given if name == 'on_train_batch_end']
    assert batches == [None, None, 2, 3, 4, 4, 6, 6]   # a line is written down while the next update runs
    tests, ends = ([logs for name, logs in heard.given if name == n] for n in ('on_test_end', 'on_epoch_end'))
    assert [t['loss'] for t in tests] == [e['val_loss'] for e in ends] == [lines[s]['val_loss']
                                                                           for s in (2, 4, 6, 8)]
    assert all(isinstance(v, float) for logs in ends for v in logs.values())

def test_the_scheduler_of_keras_sets_the_rate_and_a_stop_changes_nothing(given, prepared, epochs, tmp_path):
    "Also where the stop is inside an epoch, and the new rate is a share of the old one."
    halved = lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    new_run(prepared, epochs, tmp_path / 'whole', HELD).fit(callbacks=[halved()])
    assert rates(tmp_path / 'whole') == pytest.approx([epochs.training.learning_rate / 2**n
                                                       for n in (1, 2, 3, 4)])
    new_run(prepared, epochs, tmp_path / 'run', HELD).fit(3, callbacks=[halved()])
    new_run(prepared, epochs, tmp_path / 'run', HELD).fit(6, callbacks=[halved()])
    resume_run(tmp_path / 'run').fit(callbacks=[halved()])
    stopped = {line['step']: line['learning_rate'] for line in lines_of(tmp_path / 'run')}
    assert [stopped[s] for s in (2, 4, 6, 8)] == rates(tmp_path / 'whole')

def test_the_plateau_of_keras_lowers_the_rate(given, prepared, epochs, tmp_path):
    lower = keras.callbacks.ReduceLROnPlateau('val_loss', factor=0.1, patience=1)
    new_run(prepared, epochs, tmp_path / 'run', HELD).fit(callbacks=[lower])   # losses 3, 2, 2.5, 2
    assert rates(tmp_path / 'run') == pytest.approx([share * epochs.training.learning_rate
                                                     for share in (1, 1, 1, 0.1)])

def test_an_assigned_rate_is_that_of_a_real_update(prepared, mini, tmp_path):
    "And the compiled step is not traced again for it."
    class Still(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None): self.model.optimizer.learning_rate = 0.
    run = new_run(prepared, mini.replace(data={'buckets': 1}), tmp_path / 'run')
    before = [v.numpy() for v in run.update.weights]
    assert run.fit(2, callbacks=[Still()])['traces'] == 1
    assert all(np.array_equal(v.numpy(), old) for v, old in zip(run.update.weights, before))
    run.optimizer.learning_rate = 1e-2
    assert run.fit(3)['traces'] == 1 and not np.array_equal(run.update.weights[0].numpy(), before[0])

def test_early_stopping_of_keras_works_and_goes_on_counting(given, prepared, mini, tmp_path):
    config = mini.replace(training={'steps': 20, 'validate_every': 2, 'checkpoint_every': 7})
    early = lambda: keras.callbacks.EarlyStopping('val_loss', patience=3)
    whole = new_run(prepared, config, tmp_path / 'whole', HELD).fit(callbacks=[early()])
    new_run(prepared, config, tmp_path / 'run', HELD).fit(14, callbacks=[early()])
    heard = Noting()
    assert whole['steps'] == 16 == resume_run(tmp_path / 'run').fit(callbacks=[early(), heard])['steps']
    assert heard.calls.count(('on_epoch_end', 7)) == 1
    assert sum(c[0] == 'on_epoch_end' for c in heard.calls) == 1

def test_the_checkpoints_of_keras_hold_the_model_as_trained(given, prepared, epochs, tmp_path):
    run = new_run(prepared, epochs.replace(training={'ema': 0.9}), tmp_path / 'run', HELD)
    begun = run.xtts.gpt.final_norm.beta.numpy()   # the step of this test moves it, and no mean
    path = tmp_path / 'epoch-{epoch}.weights.h5'
    kept = keras.callbacks.ModelCheckpoint(path, 'val_loss', save_best_only=True, save_weights_only=True)
    run.fit(callbacks=[kept])   # losses 3, 2, 2.5, 2
    assert sorted(p.name for p in tmp_path.glob('*.h5')) == ['epoch-1.weights.h5', 'epoch-2.weights.h5']
    assert not np.array_equal(run.xtts.gpt.final_norm.beta.numpy(), begun)
    run.xtts.gpt.load_weights(tmp_path / 'epoch-2.weights.h5')
    assert np.array_equal(run.xtts.gpt.final_norm.beta.numpy(), begun)

def test_the_csv_of_keras_has_a_line_an_epoch(given, prepared, epochs, tmp_path):
    new_run(prepared, epochs, tmp_path / 'run',
            HELD).fit(callbacks=[keras.callbacks.CSVLogger(tmp_path / 'epochs.csv')])
    with open(tmp_path / 'epochs.csv', newline='') as file: rows = list(csv.DictReader(file))
    assert [(row['epoch'], float(row['val_loss'])) for row in rows] == [('0', 3.), ('1', 2.), ('2', 2.5),
                                                                        ('3', 2.)]
    assert [float(row['loss']) for row in rows] == [line['loss'] for line in lines_of(tmp_path / 'run')]

def test_without_validation_an_epoch_is_a_pass(cheap, prepared, mini, tmp_path):
    run, log = new_run(prepared, mini, tmp_path / 'run'), tmp_path / 'epochs.csv'
    run.fit(steps=2 * run.plan.steps_per_epoch + 1, callbacks=[keras.callbacks.CSVLogger(log)])
    lines = log.read_text().splitlines()
    assert len(lines) == 3 and 'loss' in lines[0]

def scalars(folder) -> dict:
    "{tag: its values} of the events below `folder`."
    found = {}
    for path in sorted(folder.glob('events*')):
        for record in tf.data.TFRecordDataset(str(path)):
            for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
                found.setdefault(value.tag, []).append(float(tf.make_ndarray(value.tensor)))
    return found

def test_the_tensorboard_of_keras_gets_losses_and_rates(given, prepared, epochs, tmp_path):
    pytest.importorskip('tensorboard')
    new_run(prepared, epochs, tmp_path / 'run',
            HELD).fit(callbacks=[keras.callbacks.TensorBoard(tmp_path / 'logs')])
    trained, lines = scalars(tmp_path / 'logs' / 'train'), lines_of(tmp_path / 'run')
    assert trained['epoch_loss'] == pytest.approx([line['loss'] for line in lines])
    assert trained['epoch_learning_rate'] == pytest.approx(rates(tmp_path / 'run'))
    assert scalars(tmp_path / 'logs' / 'validation')['epoch_loss'] == [3., 2., 2.5, 2.]

class Broken(Cheap):
    "Whose fourth update has no loss."
    def custom_train_step(self, batch, number):
        bad = tf.cast(number == 3, tf.float32)
        return super().custom_train_step(batch, number) | {'skipped': bad, 'bad': bad}

def test_a_loss_that_is_no_number_ends_the_run_if_keras_is_asked_to(prepared, mini, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, 'Trainer', Broken)
    new_run(prepared, mini, tmp_path / 'on').fit()
    run = new_run(prepared, mini, tmp_path / 'off')
    # with the log line of the fourth
    assert run.fit(callbacks=[keras.callbacks.TerminateOnNaN()])['steps'] == 5
    assert lines_of(tmp_path / 'on')[-1]['step'] == 8 and resume_run(tmp_path / 'off').step == 5

@pytest.mark.parametrize('callback, message', [
    (lambda: keras.callbacks.BackupAndRestore('backup'), 'BackupAndRestore: a run goes on from its own '
                                                         'checkpoints'),
    (lambda: keras.callbacks.EarlyStopping(restore_best_weights=True), 'EarlyStopping: restore_best_weights '
                                                                       '.*export --best'),
    (lambda: keras.callbacks.ModelCheckpoint('a.keras'), 'ModelCheckpoint: .*save_weights_only=True'),
    (lambda: keras.callbacks.ModelCheckpoint('a.weights.h5', save_weights_only=True, save_freq=3),
     'Checkpoint: .*save_freq'),
    (lambda: keras.callbacks.SwapEMAWeights(), 'SwapEMAWeights: training.ema')])
def test_a_callback_that_cannot_act_is_refused(cheap, prepared, mini, callback, message):
    run = Cheap(XTTS(mini, prepared.tokenizer), BatchPlan(prepared, mini.data))
    with pytest.raises(UserError, match=message): run.fit(callbacks=[callback()])
    assert run.step == 0
