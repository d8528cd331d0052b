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
from xtts_nb import checkpoint, trainer as trainer_page
from xtts_nb.cache import Cache
from xtts_nb.checkpoint import checkpoints
from xtts_nb.config import TrainingConfig, UserError
from xtts_nb.data import BatchPlan, cached_batches
from xtts_nb.dvae import DVAE
from xtts_nb.prepare import prepare
from xtts_nb.trainer import (MODES, Trainer, check_modes_agree, compile_step, learning_rate, make_optimizer, mode_line, new_run,
                             resume_run, step_before_after, step_modes, trace_count)

CLOCKS = ('clips_per_s', 'wait_share', 'seconds')   # what may differ between two runs that are the same


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
def cheap(monkeypatch): monkeypatch.setattr(trainer_page, 'Trainer', Cheap)

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

@pytest.mark.parametrize('schedule', ['constant', 'cosine'])
@pytest.mark.parametrize('steps, warmup', [(20, 0), (20, 1), (20, 5), (5, 5), (1, 0)])
def test_the_schedule_is_what_it_is_called(schedule, steps, warmup):
    training = TrainingConfig(steps=steps, warmup_steps=warmup, schedule=schedule, learning_rate=3e-4)
    rates = [float(learning_rate(training)(s)) / 3e-4 for s in range(steps + 1)]
    assert rates[warmup] == pytest.approx(1, rel=1e-5) and rates[0] <= 1 / max(1, warmup) + 1e-6
    assert np.allclose(np.diff(rates[:warmup + 1], 2), 0, atol=1e-5)   # a straight line
    shares = [(s - warmup) / max(1, steps - warmup) for s in range(warmup, steps + 1)]   # of the way behind the warm-up
    wanted = [0.02 + 0.98 * (1 + math.cos(math.pi * s)) / 2 if schedule == 'cosine' else 1 for s in shares]
    assert rates[warmup:] == pytest.approx(wanted, rel=1e-4)
    if schedule == 'cosine' and steps > warmup: assert rates[-1] == pytest.approx(0.02, rel=1e-4)

def test_weight_decay_is_for_matrices_only(xtts):
    "With gradients of zero, what moves is what decays, and by exactly rate x decay."
    keras.utils.set_random_seed(0)
    variables = [keras.Variable(tf.ones(v.shape), name=v.name, dtype='float32') for v in xtts.gpt.trainable_variables]
    names = {v.path.rsplit('/', 1)[-1] for v in xtts.gpt.trainable_variables}
    assert names == {'beta', 'bias', 'embeddings', 'gain', 'gamma', 'kernel', 'latents'}   # a new kind wants a decision
    training = TrainingConfig(learning_rate=0.1, weight_decay=0.5)
    optimizer = make_optimizer(variables, training)
    optimizer.apply([tf.zeros(v.shape) for v in variables], variables)
    for v in variables:
        decays = v.name in ('kernel', 'latents', 'gain')
        assert np.allclose(v.numpy(), 0.95 if decays else 1., atol=1e-6) and (decays or (v.numpy() == 1).all()), v.path

def test_the_optimizer_follows_the_schedule(cheap, prepared, mini, tmp_path):
    run = new_run(prepared, mini.replace(training={'schedule': 'cosine', 'steps': 8}), tmp_path / 'run')
    run.fit()
    rates = [line['learning_rate'] for line in lines_of(tmp_path / 'run')]
    assert rates == pytest.approx([float(learning_rate(run.training)(s)) for s in (2, 4, 6, 8)])


# --- the step in three modes ---------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def modes(prepared, mini):
    "Steps and batches of one shape."
    config = mini.replace(data={'buckets': 1})
    return step_modes(config, prepared.tokenizer.start), list(cached_batches(BatchPlan(prepared, config.data), 0, 3))

def test_eager_graph_and_xla_compute_the_same(modes):
    steps, batches = modes
    losses = check_modes_agree(steps, batches)
    assert list(losses) == ['eager', 'graph', 'xla'] and len(set(losses['eager'])) == 3   # it moves
    assert [trace_count(s) for s in steps.values()] == [0, 1, 1]

def test_other_losses_are_noticed(modes):
    steps, batches = modes
    wrong = lambda b, i: {'loss': steps['graph'](b, i)['loss'] * (1 + 1e-3)}
    with pytest.raises(AssertionError, match='graph computes other losses than eager'):
        check_modes_agree({'eager': steps['eager'], 'graph': wrong}, batches[:1])

def test_the_comparison_has_a_row_for_each_mode():
    step, seen = lambda batch, number: {'loss': tf.constant(1.)}, []
    steps = {'eager': step, 'xla': tf.function(step)}
    rows = step_before_after(steps, {'clip': tf.zeros(2)}, rounds=2, progress=lambda *a: seen.append(a))
    assert [r['name'] for r in rows] == ['eager', 'xla'] and rows[0]['ratio'] == 1 and all(r['step_ms'] > 0 for r in rows)
    assert [r['traces'] for r in rows] == [0, 1] and seen[-1] == (6, 6)

@pytest.mark.parametrize('flags, compiled, line', [
    ({}, True, 'with XLA'), ({'enable_xla_compilation': False}, False, 'without XLA'),
    ({'enable_graph_mode': False}, None, 'Eager'), ({'enable_graph_mode': False, 'enable_xla_compilation': False}, None, 'Eager'),
    ({'enable_eager_debug': True}, None, 'Eager'), ({'enable_eager_debug': True, 'enable_xla_compilation': False}, None, 'Eager'),
], ids=str)
def test_the_three_switches(flags, compiled, line):
    training, inside = TrainingConfig(**flags), []
    def step(x): inside.append(tf.executing_eagerly()); return x + 1
    made = compile_step(step, training)
    assert float(made(tf.constant(1.))) == 2 and inside == [compiled is None]
    assert compiled is None or made._jit_compile == compiled
    assert line in mode_line(training)

def test_every_mode_has_its_line(): assert len({mode_line(TrainingConfig(**flags)) for flags in MODES.values()}) == 3


# --- the loop ------------------------------------------------------------------------------------------------------

def test_as_many_traces_as_shapes(prepared, mini, tmp_path):
    run = new_run(prepared, mini, tmp_path / 'run')
    result = run.fit(steps=3 * run.plan.steps_per_epoch)
    assert len(run.plan.bounds) == 2 and result['traces'] == trace_count(run.train_step) == 2
    assert run.fit(steps=5 * run.plan.steps_per_epoch)['traces'] == 2
    assert result['loss_last'] < result['loss_first'] and result['clips_per_s'] > 0

@pytest.mark.slow
def test_as_many_traces_as_shapes_under_xla(prepared, mini, tmp_path):
    run = new_run(prepared, mini.replace(training={'enable_xla_compilation': True}, data={'buckets': 3}), tmp_path / 'run')
    assert run.fit(steps=3 * run.plan.steps_per_epoch)['traces'] == len(run.plan.bounds) == 3

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
    lines = set(range(every, 17, every))
    assert lines <= set(fetched) <= {0, *lines}   # 0: before the first update
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
    new_run(prepared, config, folder).fit()
    return sorted(tree(folder)) + [line['step'] for line in lines_of(folder)]

LOSSES = {'learning_rate': 2e-2, 'weight_decay': 0.9, 'beta_2': 0.5, 'gradient_clip_norm': 0.01, 'text_loss_weight': 1.,
          'precision': 'bfloat16', 'seed': 7, 'warmup_steps': 1}
FILES = {'steps': 6, 'log_every': 1, 'checkpoint_every': 3}
ELSEWHERE = {'schedule', 'enable_graph_mode', 'enable_xla_compilation', 'enable_eager_debug',   # above
             'dvae_steps', 'dvae_batch_size', 'dvae_learning_rate'}   # test_dvae.py

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
        elif where == 'log': run._log = bomb(run._log, True)
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
    try: lines = (run / 'metrics.jsonl').read_text().splitlines()
    except FileNotFoundError: return 0
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

@pytest.mark.slow
@pytest.mark.parametrize('seed', range(5))
def test_killed_at_many_moments(whole, prepared, tmp_path, seed):
    check_killed(whole, prepared, tmp_path, seed, [(1, 15), (16, 30), (31, 45), (46, 55)], xla=True)
