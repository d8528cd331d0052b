"Training: equal in every mode, compiled once a shape, silent between log lines, and to be stopped at any moment."
import json
import math
import os
import random
import shutil
import signal
import subprocess
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from process import COMMAND, environment, tree, xtts_nb
from xtts_nb import checkpoint, runs, trainer as trainer_page
from xtts_nb.cache import Cache
from xtts_nb.checkpoint import checkpoints, snapshot
from xtts_nb.config import TrainingConfig, UserError
from xtts_nb.data import BatchPlan, cached_batches
from xtts_nb.dvae import DVAE
from xtts_nb.model import XTTS
from xtts_nb.optimizer import averaged, learning_rate
from xtts_nb.prepare import prepare
from xtts_nb.runs import export_run, held_out_share, new_run, resume_run
from xtts_nb.step import trace_count
from xtts_nb.trainer import Trainer, terminated
from xtts_nb.weights import read_tensors

CLOCKS = 'clips_per_s', 'au', 'wait_ms', 'copy_ms', 'step_ms', 'callbacks_ms'   # what may differ between two equal runs


@pytest.fixture(scope='module')
def mini(small):
    "One block, two shapes, no XLA: a second to trace."
    return small.replace(model={'gpt': {'layers': 1, 'conditioning_layers': 1}}, data={'buckets': 2},
                         training={'steps': 8, 'warmup_steps': 2, 'log_every': 2, 'checkpoint_every': 4,
                                   'enable_xla_compilation': False})

class Cheap(Trainer):
    "A trainer whose step is one small, exactly repeatable update, to try the loop around it."
    def custom_train_step(self, batch, number):
        bias, moment = self.xtts.gpt.final_norm.beta, self.optimizer.variables[-1]
        loss = tf.reduce_mean(tf.cast(batch['clip'], tf.float32)) + tf.reduce_sum(bias.value)
        bias.assign(bias.value * 0.9 + 0.01 * loss + 0.001 * tf.cast(number, tf.float32))
        moment.assign(moment.value + loss)
        self.optimizer.iterations.assign_add(1)
        return {'loss': loss, 'text_loss': loss / 2, 'code_loss': loss / 3, 'gradient_norm': tf.square(loss)}

@pytest.fixture
def cheap(monkeypatch): monkeypatch.setattr(runs, 'Trainer', Cheap)

def lines_of(run) -> list[dict]:
    "Its metrics, without what the clock says."
    lines = (run / 'metrics.jsonl').read_text(encoding='utf-8').splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in CLOCKS} for line in lines]

def summary(result: dict) -> dict: return {k: result[k] for k in ('steps', 'loss_first', 'loss_last')}

def outcome(run) -> dict:
    "What two equal runs have in common to the last bit."
    files = [run / 'model.safetensors', *(run / 'checkpoints').iterdir()]
    return {'metrics': lines_of(run), **{p.name: p.read_bytes() for p in files}}


# --- the optimizer -------------------------------------------------------------------------------------------------

def test_the_optimizer_follows_the_schedule(cheap, prepared, mini, tmp_path):
    run = new_run(prepared, mini.replace(training={'schedule': 'cosine', 'steps': 8}), tmp_path / 'run')
    run.fit()
    rates = [line['learning_rate'] for line in lines_of(tmp_path / 'run')]
    assert rates == pytest.approx([float(learning_rate(run.training)(s)) for s in (2, 4, 6, 8)])


# --- the loop ------------------------------------------------------------------------------------------------------

def test_as_many_traces_as_shapes(prepared, mini, tmp_path):
    run = new_run(prepared, mini, tmp_path / 'run')
    result = run.fit(steps=3 * run.plan.steps_per_epoch)
    assert len(run.plan.shapes) == 2 and result['traces'] == trace_count(run.train_step) == 2
    assert run.fit(steps=5 * run.plan.steps_per_epoch)['traces'] == 2
    assert result['loss_last'] < result['loss_first'] and result['clips_per_s'] > 0

@pytest.mark.slow
def test_as_many_traces_as_shapes_under_xla(prepared, mini, tmp_path):
    run = new_run(prepared, mini.replace(training={'enable_xla_compilation': True}, data={'buckets': 3}), tmp_path / 'run')
    assert run.fit(steps=3 * run.plan.steps_per_epoch)['traces'] == len(run.plan.shapes) == 3

@pytest.mark.parametrize('every', [4, 8])
def test_nothing_is_fetched_between_two_log_lines(prepared, mini, monkeypatch, every):
    "Every way from a tensor to a number is watched; what is fetched at a log line does not grow with the updates before it."
    config = mini.replace(training={'log_every': every, 'checkpoint_every': 16}, data={'buckets': 1})
    keras.utils.set_random_seed(0)
    run = Trainer(trainer_page.XTTS(config, prepared.tokenizer), BatchPlan(prepared, config.data))
    eager, fetched = type(tf.constant(0)), []
    owner = next(c for c in eager.__mro__ if '_numpy' in vars(c))
    real, asarray, array = owner._numpy, np.asarray, np.array
    def note(x):
        if isinstance(x, (eager, tf.Variable)): fetched.append(run.step)
        return x
    monkeypatch.setattr(owner, '_numpy', lambda self: real(note(self)))
    monkeypatch.setattr(np, 'asarray', lambda x, *a, **k: asarray(note(x), *a, **k))
    monkeypatch.setattr(np, 'array', lambda x, *a, **k: array(note(x), *a, **k))
    float(tf.constant(1.)); np.asarray(tf.constant(1.))
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
        run = new_run(prepared, mini.replace(training={'log_every': every, 'checkpoint_every': 5}), tmp_path / str(every))
        result = run.fit(steps=7)
        by_step[every] = {line['step']: line for line in lines_of(tmp_path / str(every))}
        assert summary(result) == summary(result | {'steps': 7})
    assert list(by_step[3]) == [3, 5, 6, 7]   # at a checkpoint and at the end nothing stays pending
    for name in ('loss', 'text_loss', 'code_loss', 'gradient_norm'):
        for step, of in ((3, (1, 2, 3)), (5, (4, 5)), (6, (6,)), (7, (7,))):
            assert by_step[3][step][name] == pytest.approx(np.mean([by_step[1][i][name] for i in of]), rel=1e-4)

@pytest.mark.parametrize('steps', [1, 4, 10, 11, 25])
def test_the_summary_is_of_the_first_and_last_ten_updates(cheap, prepared, mini, tmp_path, steps):
    result = new_run(prepared, mini.replace(training={'log_every': 1, 'checkpoint_every': 7}), tmp_path / 'run').fit(steps)
    losses = [line['loss'] for line in lines_of(tmp_path / 'run')]
    assert result['steps'] == len(losses) == steps
    assert result['loss_first'] == pytest.approx(np.mean(losses[:10]), abs=2e-5)
    assert result['loss_last'] == pytest.approx(np.mean(losses[-10:]), abs=2e-5)

def test_progress_is_told_at_each_log_line(cheap, prepared, mini, tmp_path):
    seen = []
    told = lambda done, total, line: seen.append((done, total, line['step']))
    new_run(prepared, mini, tmp_path / 'run').fit(steps=5, progress=told)
    assert seen == [(2, 5, 2), (4, 5, 4), (5, 5, 5)]

def test_without_a_folder_nothing_is_written(prepared, mini, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Cheap(trainer_page.XTTS(mini, prepared.tokenizer), BatchPlan(prepared, mini.data)).fit(steps=3)
    assert tree(tmp_path) == {}


# --- every key of the training section -----------------------------------------------------------------------------

def real_losses(prepared, config) -> list[float]:
    "Of three updates, op by op."
    keras.utils.set_random_seed(config.training.seed)
    xtts = trainer_page.XTTS(config.replace(training={'enable_eager_debug': True}), prepared.tokenizer)
    run, losses = Trainer(xtts, BatchPlan(prepared, config.data)), []
    for i, batch in enumerate(cached_batches(run.plan, 0, 3)):
        losses.append([float(v) for v in run.train_step(batch, tf.constant(i)).values()])
    return losses

def files(prepared, config, folder) -> list[str]:
    "What a run leaves, by name, and the steps of its log lines."
    new_run(prepared, config, folder, ['low-0', 'high-0']).fit()
    return sorted(tree(folder)) + [line['step'] for line in lines_of(folder)]

LOSSES = {'learning_rate': 2e-2, 'weight_decay': 0.9, 'beta_2': 0.5, 'gradient_clip_norm': 0.01, 'text_loss_weight': 1.,
          'precision': 'bfloat16', 'seed': 7, 'warmup_steps': 1, 'accumulation': 2}   # parts draw masks of their own
FILES = {'steps': 6, 'log_every': 1, 'checkpoint_every': 3, 'keep_checkpoints': 1, 'validate_every': 2}
ELSEWHERE = {'schedule', 'ema', 'patience', 'max_bad_steps',   # here and in test_optimizer.py
             'finetune', 'lora_rank', 'lora_alpha',   # test_adapters.py
             'enable_graph_mode', 'enable_xla_compilation', 'enable_eager_debug', 'gradient_checkpointing',   # test_step.py
             'dvae_steps', 'dvae_batch_size', 'dvae_learning_rate',   # test_voices.py
             'listen_clips', 'judge_by',   # test_listening.py
             'epochs'}   # below

def test_no_key_of_the_training_section_is_forgotten():
    assert {*LOSSES, *FILES, *ELSEWHERE} == set(TrainingConfig.model_fields)

@pytest.fixture(scope='module')
def base(mini): return mini.replace(training={'learning_rate': 1e-2, 'warmup_steps': 0}, data={'buckets': 1})

@pytest.fixture(scope='module')
def base_losses(prepared, base): return real_losses(prepared, base)

@pytest.mark.parametrize('key', LOSSES)
def test_a_key_changes_the_losses(prepared, base, base_losses, key):
    assert real_losses(prepared, base.replace(training={key: LOSSES[key]})) != base_losses

def test_the_same_settings_give_the_same_losses(prepared, base, base_losses):
    assert real_losses(prepared, base) == base_losses

@pytest.mark.parametrize('key', FILES)
def test_a_key_changes_what_is_kept(cheap, prepared, mini, tmp_path, key):
    assert files(prepared, mini.replace(training={key: FILES[key]}), tmp_path / 'a') != files(prepared, mini, tmp_path / 'b')


# --- folders that do not fit ---------------------------------------------------------------------------------------

def test_a_run_of_another_cache_is_refused(cheap, prepared, corpus, mini, tmp_path):
    new_run(prepared, mini, tmp_path / 'run').fit(steps=2)
    other = DVAE(mini)
    other.mel_stats.assign(np.full(80, 4.))
    prepare(corpus, tmp_path / 'other', prepared.config, other, prepared.tokenizer)
    before = tree(tmp_path)
    with pytest.raises(UserError, match='was trained on the cache with key .* choose another folder'):
        new_run(Cache(tmp_path / 'other'), mini, tmp_path / 'run')
    assert tree(tmp_path) == before

def test_a_run_of_other_clips_is_refused(cheap, prepared, corpus, dvae, mini, tmp_path):
    "The same encoder and tokenizer, but fewer clips: their order, and so the run, would be another."
    fewer = tmp_path / 'corpus'
    shutil.copytree(corpus, fewer)
    kept = (fewer / 'metadata.csv').read_text(encoding='utf-8').splitlines()[:-2]
    (fewer / 'metadata.csv').write_text('\n'.join(kept) + '\n', encoding='utf-8')
    prepare(fewer, tmp_path / 'other', prepared.config, dvae, prepared.tokenizer)
    new_run(prepared, mini, tmp_path / 'run').fit(steps=2)
    with pytest.raises(UserError, match='choose another folder'): new_run(Cache(tmp_path / 'other'), mini, tmp_path / 'run')

@pytest.mark.parametrize('held', [[], ['low-1'], ['low-0', 'low-1']], ids=str)
def test_a_run_goes_on_with_the_clips_it_held_out(cheap, prepared, mini, tmp_path, held):
    new_run(prepared, mini, tmp_path / 'run', ['low-0']).fit(steps=2)
    with pytest.raises(UserError, match='held out'): new_run(prepared, mini, tmp_path / 'run', held)

def test_a_model_of_another_size_is_refused(cheap, prepared, mini, tmp_path):
    new_run(prepared, mini, tmp_path / 'run').fit(steps=2)
    before = tree(tmp_path)
    for size, message in (({'layers': 2}, 'belongs to another model'), ({'width': 32, 'heads': 1}, 'has shape')):
        with pytest.raises(UserError, match=message): new_run(prepared, mini.replace(model={'gpt': size}), tmp_path / 'run')
    assert tree(tmp_path) == before

@pytest.mark.parametrize('change', [{'audio': {'f_max': 7000.}}, {'dvae': {'codes': 16}}], ids=str)
def test_another_front_end_is_refused(prepared, mini, tmp_path, change):
    (part,) = change
    with pytest.raises(UserError, match=f'other settings of model.{part}; prepare it again'):
        new_run(prepared, mini.replace(model=change), tmp_path / 'run')
    assert tree(tmp_path) == {}

def test_what_is_no_run_is_left_alone(prepared, mini, tmp_path):
    (tmp_path / 'thesis').write_text('mine')
    with pytest.raises(UserError, match='not a run; choose another folder'): new_run(prepared, mini, tmp_path)
    with pytest.raises(UserError, match='holds no run; begin one with'): resume_run(tmp_path)
    assert tree(tmp_path) == {'thesis': b'mine'}

def test_an_unknown_clip_cannot_be_held_out(prepared, mini, tmp_path):
    with pytest.raises(UserError, match='has no clip nobody'): new_run(prepared, mini, tmp_path / 'run', ['low-0', 'nobody'])

def test_a_damaged_checkpoint_is_named(cheap, prepared, mini, tmp_path):
    new_run(prepared, mini, tmp_path / 'run').fit(steps=4)
    newest = checkpoints(tmp_path / 'run' / 'checkpoints')[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.raises(UserError, match=newest.name): resume_run(tmp_path / 'run')

def test_a_cache_that_is_gone_is_named(cheap, prepared, mini, tmp_path):
    shutil.copytree(prepared.folder, tmp_path / 'cache')
    new_run(Cache(tmp_path / 'cache'), mini, tmp_path / 'run').fit(steps=2)
    shutil.rmtree(tmp_path / 'cache')
    with pytest.raises(UserError, match=str(tmp_path / 'cache')): resume_run(tmp_path / 'run')


# --- clips held out ------------------------------------------------------------------------------------------------

def test_held_out_clips_are_neither_trained_on_nor_heard(cheap, prepared, mini, tmp_path):
    held = ['low-0', 'low-3', 'high-6']
    out = {i for i, c in enumerate(prepared.clips) if c['id'] in held}
    new_run(prepared, mini, tmp_path / 'run', held).fit(steps=2)
    plan = resume_run(tmp_path / 'run').plan   # also after a resume
    clips, references = set(), set()
    for step in range(10 * plan.steps_per_epoch):
        _, clip, other, _, _ = plan.pick(tf.constant(step, tf.int64))
        clips |= set(clip.numpy().tolist()); references |= set(other.numpy().tolist())
    assert len(out) == 3 and clips == references == set(range(len(prepared))) - out


@pytest.fixture(scope='module')
def second(prepared, corpus, dvae, tmp_path_factory):
    "Four clips as a cache of their own, made with the same encoder and tokenizer."
    folder = tmp_path_factory.mktemp('second')
    shutil.copytree(corpus, folder / 'corpus')
    kept = (folder / 'corpus' / 'metadata.csv').read_text(encoding='utf-8').splitlines()[:4]
    (folder / 'corpus' / 'metadata.csv').write_text('\n'.join(kept) + '\n', encoding='utf-8')
    prepare(folder / 'corpus', folder / 'cache', prepared.config, dvae, prepared.tokenizer)
    return Cache(folder / 'cache')

def test_validation_on_a_cache_of_its_own(cheap, prepared, second, mini, tmp_path):
    config = mini.replace(training={'validate_every': 2, 'steps': 2})
    run = new_run(prepared, config, tmp_path / 'run', val=second)
    assert run.held_out.cache is second and run.held_out.count.sum() == 4 and run.plan.count.sum() == len(prepared)
    run.fit()
    assert 'val_loss' in lines_of(tmp_path / 'run')[-1]
    again = resume_run(tmp_path / 'run')
    assert again.held_out.cache.folder == second.folder and again.validate() == run.validate()
    for other in ({}, {'held_out': ['low-0']}, {'val': prepared}):
        with pytest.raises(UserError, match='choose another folder'): new_run(prepared, config, tmp_path / 'run', **other)

def test_validation_on_a_cache_that_does_not_fit(prepared, second, corpus, mini, tmp_path):
    other = DVAE(mini)
    other.mel_stats.assign(np.full(80, 4.))
    prepare(corpus, tmp_path / 'other', prepared.config, other, prepared.tokenizer)
    with pytest.raises(UserError) as e: new_run(prepared, mini, tmp_path / 'run', val=Cache(tmp_path / 'other'))
    assert prepared.manifest['keys']['codes'] in str(e.value) and '--dvae' in str(e.value)   # both keys and the remedy
    with pytest.raises(UserError, match='give one of them'): new_run(prepared, mini, tmp_path / 'run', ['low-0'], val=second)
    assert not (tmp_path / 'run').exists()

def test_epochs_are_counted_in_updates(cheap, prepared, mini, tmp_path):
    run = new_run(prepared, mini.replace(training={'epochs': 3, 'schedule': 'cosine'}), tmp_path / 'run')
    updates = 3 * run.plan.steps_per_epoch
    assert run.training.steps == updates != mini.training.steps and run.fit()['steps'] == updates
    assert lines_of(tmp_path / 'run')[-1]['learning_rate'] == pytest.approx(0.02 * mini.training.learning_rate)   # its end
    assert resume_run(tmp_path / 'run').fit()['steps'] == updates

def test_a_share_of_the_sentences_is_held_out_in_every_voice(prepared):
    few, more = held_out_share(prepared, 0.01), held_out_share(prepared, 0.5)
    text = {c['id']: c['text'] for c in prepared.clips}
    sentences = {text[i] for i in more}
    assert few and set(few) < set(more) and len(sentences) == round(0.5 * len(set(text.values())))
    assert set(more) == {i for i, t in text.items() if t in sentences}
    for share in (0, 1, -0.1): pytest.raises(UserError, held_out_share, prepared, share)


# --- validation ----------------------------------------------------------------------------------------------------

HELD = ['low-0', 'low-3', 'high-6']

class Given(Cheap):
    "Whose validation losses are given."
    losses = [3., 2., 2.5, 2., 1., 4., 4., 4.]
    def validate(self): return {'val_loss': self.losses[self.step // self.training.validate_every - 1]}

@pytest.fixture
def given(monkeypatch): monkeypatch.setattr(runs, 'Trainer', Given)

def test_validation_is_the_mean_over_the_tokens_held_out(prepared, mini, tmp_path):
    "Over all of them, once each, at dropout 0, whatever the batches; and twice the same."
    config = mini.replace(training={'validate_every': 1}, data={'batch_size': 2})
    run = new_run(prepared, config, tmp_path / 'run', HELD)
    seen = run.validate()
    assert run.validate() == seen and trace_count(run.evaluate) == 1
    clips = [b['clip'].numpy()[b['weight'].numpy() > 0] for b in cached_batches(run.held_out, 0, run.held_out.steps_per_epoch)]
    assert sorted(prepared.clips[i]['id'] for i in np.concatenate(clips)) == sorted(HELD)
    config = config.replace(data={'batch_size': 4}, training={'text_loss_weight': 0.5})
    other = new_run(prepared, config, tmp_path / 'other', HELD).validate()
    assert other['val_text_loss'] == pytest.approx(seen['val_text_loss'], rel=0.05)   # with other references
    assert other['val_loss'] == pytest.approx(0.5 * other['val_text_loss'] + other['val_code_loss'], rel=1e-4)

def test_the_best_model_is_kept_and_patience_ends_a_run(given, prepared, mini, tmp_path):
    config = mini.replace(training={'steps': 20, 'validate_every': 2, 'patience': 3, 'checkpoint_every': 5, 'log_every': 5})
    run = new_run(prepared, config, tmp_path / 'run', HELD)
    weights = {}
    store = run.save
    run.save = lambda checkpoint, best, wait: (best and weights.update({run.step: run.xtts.gpt.final_norm.beta.numpy()}),
                                               store(checkpoint, best, wait))
    result = run.fit()
    assert result['steps'] == 16 and result['best'] == {'step': 10, 'val_loss': 1.} and list(weights) == [2, 4, 10]
    assert [line['step'] for line in lines_of(tmp_path / 'run') if 'val_loss' in line] == [2, 4, 6, 8, 10, 12, 14, 16]
    best = XTTS.load(tmp_path / 'run' / 'best').gpt.final_norm.beta.numpy()
    assert np.array_equal(best, weights[10]) and not np.array_equal(best, run.xtts.gpt.final_norm.beta.numpy())
    assert resume_run(tmp_path / 'run').fit()['steps'] == 16   # it is over

def test_patience_survives_a_stop(given, prepared, mini, tmp_path):
    config = mini.replace(training={'steps': 20, 'validate_every': 2, 'patience': 3, 'checkpoint_every': 7})
    for stop in (7, 14, None): result = (resume_run if stop != 7 else lambda r: new_run(prepared, config, r, HELD))(
        tmp_path / 'run').fit(stop)
    assert (result['steps'], result['best']['step']) == (16, 10)

def test_validation_and_the_saved_model_see_the_mean_weights(prepared, mini, tmp_path):
    config = mini.replace(training={'steps': 6, 'ema': 0.9, 'validate_every': 6, 'learning_rate': 1e-2})
    run = new_run(prepared, config, tmp_path / 'run', HELD)
    run.fit()
    now, looked = run.xtts.gpt.final_norm.beta.numpy(), run.validate()
    with averaged(run.optimizer, run.update.weights):
        mean = run.xtts.gpt.final_norm.beta.numpy()
        run.optimizer.use_ema = False
        assert run.validate() == looked == {k: v for k, v in lines_of(tmp_path / 'run')[-1].items() if k.startswith('val')}
        run.optimizer.use_ema = True
    assert run.validate() == looked and not np.array_equal(mean, now)
    for kept in (tmp_path / 'run', tmp_path / 'run' / 'best'):
        assert np.array_equal(XTTS.load(kept).gpt.final_norm.beta.numpy(), mean)
    assert np.array_equal(resume_run(tmp_path / 'run').xtts.gpt.final_norm.beta.numpy(), now)


# --- callbacks of Keras --------------------------------------------------------------------------------------------

class Counting(keras.callbacks.Callback):
    "Notes every call."
    def __init__(self): super().__init__(); self.calls, self.epochs = [], 0
    def on_train_begin(self, logs=None): self.calls.append('begin'); self.epochs = 0
    def on_train_batch_end(self, batch, logs=None): self.calls.append((batch, dict(logs)))
    def on_epoch_end(self, epoch, logs=None): self.calls.append(f'epoch {epoch}'); self.epochs += 1
    def on_train_end(self, logs=None): self.calls.append('end')

def test_callbacks_hear_of_updates_epochs_and_the_end(cheap, prepared, mini, tmp_path):
    heard = Counting()
    config = mini.replace(training={'validate_every': 4, 'log_every': 3})
    runs.Trainer.validate = lambda self: {'val_loss': 1.}
    try: new_run(prepared, config, tmp_path / 'run', HELD).fit(callbacks=[heard])
    finally: del runs.Trainer.validate
    assert heard.calls[0] == 'begin' and heard.calls[-1] == 'end'
    assert [c for c in heard.calls if isinstance(c, str)][1:-1] == ['epoch 0', 'epoch 1']
    updates = [c for c in heard.calls if isinstance(c, tuple)]
    assert [step for step, _ in updates] == list(range(1, 9)) and updates[0][1] == {}
    assert updates[-1][1]['step'] == 6 and isinstance(updates[-1][1]['loss'], float)   # of the latest line, on the host

def test_without_validation_an_epoch_is_a_pass(cheap, prepared, mini, tmp_path):
    run, log = new_run(prepared, mini, tmp_path / 'run'), tmp_path / 'epochs.csv'
    run.fit(steps=2 * run.plan.steps_per_epoch + 1, callbacks=[keras.callbacks.CSVLogger(log)])
    lines = log.read_text().splitlines()
    assert len(lines) == 3 and 'loss' in lines[0]

def test_early_stopping_of_keras_works_and_goes_on_counting(given, prepared, mini, tmp_path):
    config = mini.replace(training={'steps': 20, 'validate_every': 2, 'checkpoint_every': 7})
    early = lambda: keras.callbacks.EarlyStopping('val_loss', patience=3)
    whole = new_run(prepared, config, tmp_path / 'whole', HELD).fit(callbacks=[early()])
    new_run(prepared, config, tmp_path / 'run', HELD).fit(14, callbacks=[early()])
    heard = Counting()
    assert whole['steps'] == 16 == resume_run(tmp_path / 'run').fit(callbacks=[early(), heard])['steps']
    assert heard.epochs == 1


# --- what goes wrong -----------------------------------------------------------------------------------------------

class Broken(Cheap):
    "Whose losses are not finite at some updates."
    at = ()
    def custom_train_step(self, batch, number):
        bad = tf.reduce_any(tf.equal(number, tf.constant(self.at)))
        before = [tf.identity(v.value) for v in self.xtts.gpt.final_norm.variables]
        losses = super().custom_train_step(batch, number)
        for v, value in zip(self.xtts.gpt.final_norm.variables, before): v.assign(tf.where(bad, value, v.value))
        flag = tf.cast(bad, 'float32')
        return {k: tf.where(bad, np.nan, v) for k, v in losses.items()} | {'skipped': flag, 'bad': flag}

def test_a_broken_update_is_counted_and_its_clips_are_named(prepared, mini, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, 'Trainer', type('Some', (Broken,), {'at': (1, 4, 5)}))
    run = new_run(prepared, mini.replace(training={'max_bad_steps': 3}), tmp_path / 'run')
    result = run.fit()
    ids = {n: [prepared.clips[i]['id'] for i in run.plan.pick(tf.constant(n, tf.int64))[1].numpy()] for n in (1, 4, 5)}
    lines = lines_of(tmp_path / 'run')
    assert [line['skipped'] for line in lines] == [1, 0, 2, 0]
    assert lines[0]['bad'] == {'1': ids[1]} and lines[2]['bad'] == {'4': ids[4], '5': ids[5]} and 'bad' not in lines[1]
    assert lines[2]['loss'] is None and math.isfinite(lines[0]['loss']) and math.isfinite(result['loss_last'])
    said = capsys.readouterr().err
    assert all(f'Update {n} was left out' in said and ids[n][0] in said for n in ids)

@pytest.mark.parametrize('log_every', [1, 3])
def test_too_many_in_a_row_stop_with_the_last_good_state(prepared, mini, tmp_path, monkeypatch, log_every):
    monkeypatch.setattr(runs, 'Trainer', type('All', (Broken,), {'at': tuple(range(2, 20))}))
    run = new_run(prepared, mini.replace(training={'max_bad_steps': 3, 'log_every': log_every, 'steps': 20}), tmp_path / 'run')
    with pytest.raises(UserError, match=r'\d updates in a row .* not finite, the last with the clips .*(low|high)-'): run.fit()
    good = new_run(prepared, mini, tmp_path / 'good')
    good.fit(steps=2)
    again = resume_run(tmp_path / 'run')
    assert np.array_equal(again.xtts.gpt.final_norm.beta.numpy(), good.xtts.gpt.final_norm.beta.numpy()) and again.step >= 5

def test_a_real_nan_is_skipped_by_the_real_step(prepared, mini, tmp_path):
    run = new_run(prepared, mini.replace(data={'buckets': 1}, training={'max_bad_steps': 3}), tmp_path / 'run')
    batches = run.batches
    poison = lambda b: b | {'reference': b['reference'] * tf.constant(np.nan, tf.float16)}
    run.batches = lambda first, last: (poison(b) if i == 2 else b for i, b in enumerate(batches(first, last), first))
    run.fit(steps=4)
    assert [line['skipped'] for line in lines_of(tmp_path / 'run')] == [0, 1] and int(run.optimizer.iterations) == 3

class Greedy:
    "A step that really asks for more than there is, from some update on, as long as it has too few parts."
    at, enough = 0, 2
    def custom_train_step(self, batch, number):
        if self.training.accumulation < self.enough:
            size = tf.where(number >= self.at, tf.constant(2**46, tf.int64), tf.constant(1, tf.int64))
            batch = {k: v + tf.zeros(size[None], v.dtype)[0] for k, v in batch.items()}
        return super().custom_train_step(batch, number)

    def _more_parts(self, error):
        assert isinstance(error, tf.errors.ResourceExhaustedError)
        self.stood = snapshot(self.state)
        super()._more_parts(error)

def equal(a: dict, b: dict) -> bool: return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)

def test_out_of_memory_makes_the_same_update_in_more_parts(prepared, mini, tmp_path, monkeypatch, capsys):
    "Nothing has moved when it is retried; what follows is what a run in so many parts does from there."
    config = mini.replace(data={'buckets': 1}, training={'steps': 4, 'checkpoint_every': 2, 'log_every': 1})
    monkeypatch.setattr(runs, 'Trainer', type('Late', (Greedy, Trainer), {'at': 2}))
    run = new_run(prepared, config, tmp_path / 'run')
    assert run.fit()['steps'] == 4
    then, now = checkpoints(tmp_path / 'run' / 'checkpoints')
    assert equal(run.stood, dict(read_tensors(then)))   # as after update 1
    said = capsys.readouterr().err
    assert 'OUT OF MEMORY at update 2' in said and 'in 2 parts instead of 1' in said
    now.unlink()
    parts = resume_run(tmp_path / 'run')
    assert parts.step == 2 and parts.training.accumulation == 2
    parts.fit()
    assert equal(snapshot(parts.state), snapshot(run.state))

@pytest.mark.slow
def test_one_row_that_does_not_fit_is_an_error_with_a_remedy(prepared, mini, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, 'Trainer', type('Never', (Greedy, Cheap), {'enough': 99}))
    with pytest.raises(UserError, match='out of memory with 1 rows at once; set training.gradient_checkpointing'):
        new_run(prepared, mini.replace(data={'buckets': 1}), tmp_path / 'run').fit()

@pytest.mark.parametrize('mode, at, goes_on', [({}, 'while/mul', True), ({}, 'cond/adamw/mul_7', False),
                                               ({'enable_graph_mode': False}, '', False),
                                               ({'enable_xla_compilation': True}, 'adamw', True)])
def test_weights_that_may_be_half_written_are_not_trained_on(cheap, prepared, mini, tmp_path, mode, at, goes_on):
    "A graph may run out of memory in the optimizer; XLA writes when all is computed; op by op nobody knows."
    run = new_run(prepared, mini.replace(training=mode), tmp_path / 'run')
    refused = tf.errors.ResourceExhaustedError(None, None, f'OOM when allocating tensor [[{{{{node {at}}}}}]]')
    if goes_on: run._more_parts(refused); assert run.training.accumulation == 2
    else: pytest.raises(UserError, run._more_parts, refused).match('were being written; set training.accumulation to 2')

def test_a_full_disk_keeps_the_checkpoint_before(cheap, prepared, mini, tmp_path, monkeypatch):
    "The error of the thread comes up, and the run goes on from the state that was written."
    real, calls = checkpoint.save_checkpoint, []
    def full(*args, **kwargs):
        calls.append(kwargs['step'])
        if len(calls) == 2: raise UserError('the disk is full')
        return real(*args, **kwargs)
    monkeypatch.setattr(trainer_page, 'save_checkpoint', full)
    config = mini.replace(training={'checkpoint_every': 2, 'keep_checkpoints': 1})
    with pytest.raises(UserError, match='the disk is full'): new_run(prepared, config, tmp_path / 'run').fit()
    assert calls[:2] == [2, 4]
    assert resume_run(tmp_path / 'run').step == 2
    assert resume_run(tmp_path / 'run').fit()['steps'] == 8

def test_a_step_that_xla_refuses_trains_as_a_graph(prepared, mini, tmp_path, capsys):
    class Odd(Cheap):
        def custom_train_step(self, batch, number):
            losses = super().custom_train_step(batch, number)
            return losses | {'digits': tf.cast(tf.strings.length(tf.strings.as_string(number)), 'float32')}
    config = mini.replace(training={'enable_xla_compilation': True})
    run = Odd(XTTS(config, prepared.tokenizer), BatchPlan(prepared, config.data))
    run.fit(steps=4)
    assert run.step == 4 and capsys.readouterr().err.count('XLA CANNOT COMPILE THE STEP: AsString') == 1

def test_sigterm_waits_for_the_update():
    with terminated() as asked:
        assert not asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# --- the model alone -----------------------------------------------------------------------------------------------

def test_export_is_the_model_alone_and_the_best_one_where_asked(given, prepared, mini, tmp_path):
    new_run(prepared, mini.replace(training={'validate_every': 2}), tmp_path / 'run', HELD).fit()
    whole = export_run(tmp_path / 'run', tmp_path / 'whole')
    half = export_run(tmp_path / 'run', tmp_path / 'half', best=True, precision='bfloat16')
    assert half['bytes'] < 0.6 * whole['bytes'] and sorted(tree(tmp_path / 'half')) == sorted(
        ['config.yaml', 'model.safetensors', 'tokenizer.json'])
    newest, kept = XTTS.load(tmp_path / 'run').weights, XTTS.load(tmp_path / 'run' / 'best').weights
    for name, v in XTTS.load(tmp_path / 'whole').weights.items(): assert np.array_equal(v.numpy(), newest[name].numpy())
    for name, v in XTTS.load(tmp_path / 'half').weights.items():
        assert v.dtype == 'float32' and np.allclose(v.numpy(), kept[name].numpy(), rtol=4e-3, atol=1e-6), name

def test_export_refuses_what_is_not_there(cheap, prepared, mini, tmp_path):
    new_run(prepared, mini, tmp_path / 'run').fit(2)
    with pytest.raises(UserError, match='keeps no best model'): export_run(tmp_path / 'run', tmp_path / 'out', best=True)
    with pytest.raises(UserError, match='holds no model'): export_run(tmp_path / 'nowhere', tmp_path / 'out')
    with pytest.raises(UserError, match='already holds something'): export_run(tmp_path / 'run', tmp_path / 'run')


# --- stopped and resumed -------------------------------------------------------------------------------------------

@pytest.fixture
def undisturbed(cheap, prepared, mini, tmp_path):
    "Settings -> what a run leaves that nobody stops, and its summary."
    made = {}
    def of(config):
        if config not in made:
            made[config] = summary(new_run(prepared, config, tmp_path / f'whole-{len(made)}').fit())
            made[config] |= outcome(tmp_path / f'whole-{len(made) - 1}')
        return made[config]
    return of

class Killed(BaseException): "What nobody catches."

def fit_killed(monkeypatch, run, where, count):
    "Train until `where` happens for the `count`th time; True if it came to that."
    calls = []
    def bomb(real, after):
        def call(*args, **kwargs):
            calls.append(1)
            if len(calls) < count: return real(*args, **kwargs)
            if after: real(*args, **kwargs)
            raise Killed
        return call
    with monkeypatch.context() as m:
        if where == 'step': run.train_step = bomb(run.train_step, False)
        elif where == 'log': run._land = bomb(run._land, True)
        elif where == 'checkpoint written': m.setattr(trainer_page, 'save_checkpoint', bomb(checkpoint.save_checkpoint, True))
        elif where == 'model written': m.setattr(run.xtts, 'save', bomb(run.xtts.save, True))
        elif where == 'before a file': m.setattr(os, 'replace', bomb(os.replace, False))
        try: run.fit()
        except Killed: return True
    return False

@pytest.mark.parametrize('where', ['step', 'log', 'checkpoint written', 'model written', 'before a file'])
@pytest.mark.parametrize('log_every, checkpoint_every', [(3, 4), *(pytest.param(*both, marks=pytest.mark.slow)
                                                                  for both in ((2, 4), (4, 3), (1, 5), (5, 1)))])
def test_stopped_anywhere_and_resumed(undisturbed, prepared, mini, tmp_path, monkeypatch, where, log_every, checkpoint_every):
    "Stopped over and over, each time a bit later, until it gets through: the same run in the end."
    config = mini.replace(training={'steps': 13, 'log_every': log_every, 'checkpoint_every': checkpoint_every})
    whole, folder, stops = undisturbed(config), tmp_path / 'run', 0
    for count in (1, 3, 6, 10, 999):
        run = new_run(prepared, config, folder) if not stops else resume_run(folder)
        if not fit_killed(monkeypatch, run, where, count): break
        stops += 1
    assert stops
    assert summary(resume_run(folder).fit()) | outcome(folder) == whole

def test_a_line_that_was_cut_off_is_forgotten(undisturbed, prepared, mini, tmp_path):
    run = new_run(prepared, mini, tmp_path / 'run')
    run.fit(steps=4)
    with open(tmp_path / 'run' / 'metrics.jsonl', 'a') as f: f.write('{"step": 6, "loss": 0.')
    assert summary(resume_run(tmp_path / 'run').fit()) | outcome(tmp_path / 'run') == undisturbed(mini)

def test_what_a_killed_run_left_half_written_goes(cheap, prepared, mini, tmp_path):
    new_run(prepared, mini, tmp_path / 'run').fit(steps=4)
    for left in ('checkpoints/step-000000006.safetensors.123.part', 'model.safetensors.123.part'):
        (tmp_path / 'run' / left).write_text('half')
    resume_run(tmp_path / 'run').fit()
    assert not [p for p in tree(tmp_path / 'run') if '.part' in p]

def test_two_checkpoints_stay(cheap, prepared, mini, tmp_path):
    new_run(prepared, mini.replace(training={'checkpoint_every': 1}), tmp_path / 'run').fit()
    names = [p.name for p in checkpoints(tmp_path / 'run' / 'checkpoints')]
    assert names == ['step-000000007.safetensors', 'step-000000008.safetensors']

def test_more_steps_than_planned_go_on(cheap, prepared, mini, tmp_path):
    new_run(prepared, mini, tmp_path / 'run').fit()
    run = new_run(prepared, mini.replace(training={'steps': 12}), tmp_path / 'run')
    assert run.step == 8 and run.fit()['steps'] == 12
    assert [line['step'] for line in lines_of(tmp_path / 'run')] == [2, 4, 6, 8, 10, 12]


# --- killed, really ------------------------------------------------------------------------------------------------

STEPS = 80

@pytest.fixture(scope='module')
def whole(prepared, mini, tmp_path_factory):
    "Mode -> settings file, and a run of them in a process of its own that nobody disturbs."
    made = {}
    def of(xla):
        if xla not in made:
            folder = tmp_path_factory.mktemp('whole')
            config = mini.replace(training={'steps': STEPS, 'log_every': 3, 'checkpoint_every': 5, 'enable_xla_compilation': xla})
            (folder / 'run.yaml').write_text(config.to_yaml())
            done = xtts_nb('train', '--data', prepared.folder, '--config', folder / 'run.yaml', '--run', folder / 'run', '--json')
            assert done.code == 0, done.err
            made[xla] = folder / 'run.yaml', summary(done.json) | outcome(folder / 'run')
        return made[xla]
    return of

def reached(run) -> int:
    "The last whole log line."
    try: lines = (run / 'metrics.jsonl').read_text().splitlines(keepends=True)
    except FileNotFoundError: return 0
    if lines and not lines[-1].endswith('\n'): lines.pop()   # in the middle of being written
    return json.loads(lines[-1])['step'] if lines else 0

def kill_behind(step, run, *arguments, jitter):
    "Train, and kill -9 a moment after `step` was logged."
    child = subprocess.Popen([*COMMAND, 'train', '--run', run, *arguments], env=environment(), stderr=subprocess.PIPE)
    begun = time.monotonic()
    while reached(run) < step and child.poll() is None:
        assert time.monotonic() - begun < 120
        time.sleep(0.002)
    time.sleep(jitter)
    child.send_signal(signal.SIGKILL)
    _, err = child.communicate()
    assert child.returncode == -signal.SIGKILL, err.decode()

def check_killed(whole, prepared, folder, seed, points, xla):
    settings, wanted = whole(xla)
    draw, run = random.Random(seed), folder / 'run'
    for part, point in enumerate(points):
        arguments = [] if part else ['--data', prepared.folder, '--config', settings]
        kill_behind(point if isinstance(point, int) else draw.randint(*point), run, *arguments, jitter=draw.uniform(0, 0.02))
    done = xtts_nb('train', '--run', run, '--json')
    assert done.code == 0, done.err
    assert summary(done.json) | outcome(run) == wanted
    assert not [p for p in tree(run) if '.part' in p]

def test_killed_and_resumed_to_the_bit(whole, prepared, tmp_path):
    "Before the first checkpoint, and at two random moments."
    check_killed(whole, prepared, tmp_path, time.time_ns(), [3, (9, 25), (30, 50)], xla=False)

def test_sigterm_saves_and_says_so(prepared, mini, tmp_path):
    "Exit code 143, and a checkpoint of the update that was running."
    config = mini.replace(training={'steps': 100_000, 'log_every': 2, 'checkpoint_every': 100_000})
    (tmp_path / 'run.yaml').write_text(config.to_yaml())
    command = [*COMMAND, 'train', '--data', prepared.folder, '--config', tmp_path / 'run.yaml', '--run', tmp_path / 'run']
    child = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE)
    while reached(tmp_path / 'run') < 4 and child.poll() is None: time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    err = child.communicate(timeout=120)[1].decode()
    assert child.returncode == 143 and 'Traceback' not in err, err
    (saved,) = checkpoints(tmp_path / 'run' / 'checkpoints')
    assert int(saved.stem[5:]) == reached(tmp_path / 'run') >= 4 and f'--run {tmp_path / "run"}' in err

@pytest.mark.slow
@pytest.mark.parametrize('seed', range(5))
def test_killed_at_many_moments(whole, prepared, tmp_path, seed):
    check_killed(whole, prepared, tmp_path, seed, [(1, 15), (16, 30), (31, 45), (46, 55)], xla=True)
