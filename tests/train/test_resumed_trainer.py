"What goes wrong while a run trains, and a run that is stopped at any moment and goes on to the bit."
import math
import os
import random
import signal
import subprocess
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from cheap import HELD, Cheap, lines_of, outcome, summary
from process import reached, started, tree, xtts_nb
from xtts_nb.files import PART, read_tensors
from xtts_nb.train import trainer as checkpoint, runs, trainer as trainer_page
from xtts_nb.train.trainer import catch_sigterm, checkpoints, snapshot, Trainer
from xtts_nb.config import UserError
from xtts_nb.data.native import BatchPlan
from xtts_nb.models.xtts import XTTS
from xtts_nb.train.runs import new_run, resume_run


# --- what goes wrong ------------------------------------------------------------------------------

class Broken(Cheap):
    "Whose losses are not finite at some updates."
    at = ()
    def custom_train_step(self, batch, number):
        bad = tf.reduce_any(tf.equal(number, tf.constant(self.at)))
        before = [tf.identity(v.value) for v in self.xtts.gpt.final_norm.variables]
        losses = super().custom_train_step(batch, number)
        for v, value in zip(self.xtts.gpt.final_norm.variables, before):
            v.assign(tf.where(bad, value, v.value))
        flag = tf.cast(bad, 'float32')
        return {k: tf.where(bad, np.nan, v) for k, v in losses.items()} | {'skipped': flag, 'bad': flag}

def test_a_broken_update_is_counted_and_its_clips_are_named(prepared, mini, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, 'Trainer', type('Some', (Broken,), {'at': (1, 4, 5)}))
    run = new_run(prepared, mini.replace(training={'max_bad_steps': 3}), tmp_path / 'run')
    result = run.fit()
    ids = {n: [prepared.clips[i]['id'] for i in run.plan.pick(tf.constant(n, tf.int64))[1].numpy()]
           for n in (1, 4, 5)}
    lines = lines_of(tmp_path / 'run')
    assert [line['skipped'] for line in lines] == [1, 0, 2, 0]
    assert lines[0]['bad'] == {'1': ids[1]} and lines[2]['bad'] == {'4': ids[4], '5': ids[5]}
    assert 'bad' not in lines[1]
    assert lines[2]['loss'] is None and math.isfinite(lines[0]['loss']) and math.isfinite(result['loss_last'])
    said = capsys.readouterr().err
    assert all(f'Update {n} was left out' in said and ids[n][0] in said for n in ids)

@pytest.mark.parametrize('log_every', [1, 3])
def test_too_many_in_a_row_stop_with_the_last_good_state(prepared, mini, tmp_path, monkeypatch, log_every):
    monkeypatch.setattr(runs, 'Trainer', type('All', (Broken,), {'at': tuple(range(2, 20))}))
    run = new_run(prepared, mini.replace(training={'max_bad_steps': 3, 'log_every': log_every, 'steps': 20}),
                  tmp_path / 'run')
    with pytest.raises(UserError,
                       match=r'\d updates in a row .* not finite, the last with the clips .*(low|high)-'):
        run.fit()
    good = new_run(prepared, mini, tmp_path / 'good')
    good.fit(steps=2)
    again = resume_run(tmp_path / 'run')
    assert np.array_equal(again.xtts.gpt.final_norm.beta.numpy(), good.xtts.gpt.final_norm.beta.numpy())
    assert again.step >= 5

def test_a_real_nan_is_skipped_by_the_real_step(prepared, mini, tmp_path):
    run = new_run(prepared, mini.replace(data={'buckets': 1},
                                         training={'max_bad_steps': 3, 'mode': 'eager'}),
                  tmp_path / 'run')
    batches = run.batches
    poison = lambda b: b | {'reference': b['reference'] * tf.constant(np.nan, tf.float16)}
    run.batches = lambda first, last: (poison(b) if i == 2 else b
                                       for i, b in enumerate(batches(first, last), first))
    run.fit(steps=4)
    assert [line['skipped'] for line in lines_of(tmp_path / 'run')] == [0, 1]
    assert int(run.optimizer.iterations) == 3

class Greedy:
    "A step that really asks for more than there is, from some update on, as long as it has too few parts."
    at, enough = 0, 2
    def custom_train_step(self, batch, number):
        if self.training.accumulation < self.enough:
            size = tf.where(number >= self.at, tf.constant(2**46, tf.int64), tf.constant(1, tf.int64))
            lack = tf.zeros(size[None])[0]   # one of them: TensorFlow tries for 10 s to find the memory
            batch = {k: v + tf.cast(lack, v.dtype) for k, v in batch.items()}
        return super().custom_train_step(batch, number)

    def _more_parts(self, error):
        assert isinstance(error, tf.errors.ResourceExhaustedError)
        self.stood = snapshot(self.state)
        super()._more_parts(error)

def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)

@pytest.mark.slow
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

def test_only_a_lack_of_memory_asks_for_more_parts(cheap, prepared, mini, tmp_path):
    run = new_run(prepared, mini, tmp_path / 'run')
    run.timer = SimpleNamespace(run=lambda step, *args: step(*args))
    def update_that_says(message):
        def step(batch, number): raise tf.errors.AbortedError(None, None, message)
        run.train_step = step
        run._update({})
    with pytest.raises(UserError, match='out of memory'): update_that_says('Status: 1, message: none left')
    with pytest.raises(tf.errors.AbortedError): update_that_says('Status: 2, message: wrong')

@pytest.mark.slow
def test_one_row_that_does_not_fit_is_an_error_with_a_remedy(prepared, mini, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, 'Trainer', type('Never', (Greedy, Cheap), {'enough': 99}))
    with pytest.raises(UserError,
                       match='out of memory with 1 rows at once; set training.gradient_checkpointing'):
        new_run(prepared, mini.replace(data={'buckets': 1}), tmp_path / 'run').fit()

@pytest.mark.parametrize('mode, at, goes_on', [({}, 'while/mul', True), ({}, 'cond/adamw/mul_7', False),
                                               ({'mode': 'eager'}, '', False),
                                               ({'mode': 'xla'}, 'adamw', False),
                                               ({'mode': 'xla'},
                                                'gradients_alone/StatefulPartitionedCall', True)])
def test_weights_that_may_be_half_written_are_not_trained_on(cheap, prepared, mini, tmp_path, mode, at,
                                                             goes_on):
    "A graph may run out of memory in the optimizer, XLA in what it writes; op by op nobody knows."
    run = new_run(prepared, mini.replace(training=mode), tmp_path / 'run')
    refused = tf.errors.ResourceExhaustedError(None, None,
                                               f'OOM when allocating tensor [[{{{{node {at}}}}}]]')
    if goes_on:
        run._more_parts(refused)
        assert run.training.accumulation == 2
    else:
        pytest.raises(UserError, run._more_parts, refused).match(
            'out of memory, perhaps while the weights were being written; set training.accumulation to 2')

@pytest.mark.parametrize('fails, written', [([4], [2, 5, 6, 8]), ([4, 5], [2])])
def test_a_full_disk(cheap, prepared, mini, tmp_path, monkeypatch, fails, written):
    "The present state is tried at once; if that fails too, the run ends, and goes on from what was written."
    real, steps = checkpoint.save_checkpoint, []
    def full(folder, step, **more):
        if step in fails: raise UserError('the disk is full')
        steps.append(step)
        return real(folder, step, **more)
    monkeypatch.setattr(trainer_page, 'save_checkpoint', full)
    config = mini.replace(training={'checkpoint_every': 2, 'keep_checkpoints': 1})
    run = new_run(prepared, config, tmp_path / 'run')
    update = run.train_step
    run.train_step = lambda *given: (time.sleep(.1), update(*given))[1]   # the writer has failed by then
    try: assert run.fit()['steps'] == 8 and len(fails) == 1
    except UserError: assert len(fails) == 2
    assert steps == written
    assert resume_run(tmp_path / 'run').step == written[-1]

def test_a_best_model_is_written_once_there_is_room(given, prepared, mini, tmp_path, monkeypatch):
    "As it was, although training went on."
    real, best, tries = XTTS.save, tmp_path / 'run' / 'best', []
    def full(self, folder, weights=None):
        if folder == best: tries.append(1)
        if folder == best and len(tries) == 3: raise UserError('the disk is full')   # of updates 2, 4 and 10
        real(self, folder, weights)
    monkeypatch.setattr(XTTS, 'save', full)
    config = mini.replace(training={'steps': 16, 'validate_every': 2, 'checkpoint_every': 7})
    run = new_run(prepared, config, tmp_path / 'run', HELD)
    update, seen = run.train_step, {}
    def step(*given):
        time.sleep(.1)   # the writer has failed by then
        seen[run.step] = run.xtts.gpt.final_norm.beta.numpy()   # before the update
        return update(*given)
    run.train_step = step
    assert run.fit()['best'] == {'step': 10, 'val_loss': 1.}
    assert np.array_equal(XTTS.load(best).gpt.final_norm.beta, seen[10])

@pytest.mark.parametrize('ema', [0., .9])
def test_without_room_for_a_copy_training_waits(cheap, prepared, mini, tmp_path, monkeypatch, ema):
    "And saves the same, where the model is the mean of the weights too."
    config = mini.replace(training={'ema': ema})
    new_run(prepared, config, tmp_path / 'copied').fit()
    monkeypatch.setattr(trainer_page, '_room_in_container', lambda: 0.)
    monkeypatch.setattr(trainer_page, 'snapshot', lambda variables: pytest.fail('a copy'))
    new_run(prepared, config, tmp_path / 'waited').fit()
    assert outcome(tmp_path / 'copied') == outcome(tmp_path / 'waited')

def test_a_step_that_xla_refuses_trains_as_a_graph(prepared, mini, tmp_path, capsys):
    class Odd(Cheap):
        def custom_train_step(self, batch, number):
            losses = super().custom_train_step(batch, number)
            return losses | {'digits': tf.cast(tf.strings.length(tf.strings.as_string(number)), 'float32')}
    config = mini.replace(training={'mode': 'xla'})
    run = Odd(XTTS(config, prepared.tokenizer), BatchPlan(prepared, config.data))
    run.fit(steps=4)
    assert run.step == 4 and capsys.readouterr().err.count('XLA CANNOT COMPILE THE STEP: AsString') == 1

def test_sigterm_waits_for_the_update():
    asked = []
    with catch_sigterm(lambda *_: asked.append(True)):
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# --- stopped and resumed --------------------------------------------------------------------------

@pytest.fixture(scope='module')
def undisturbed(prepared, tmp_path_factory):
    "Settings -> what a run leaves that nobody stops, and its summary."
    made = {}
    def of(config):
        if config not in made:
            run = tmp_path_factory.mktemp('whole') / 'run'
            made[config] = summary(new_run(prepared, config, run, make=Cheap).fit()) | outcome(run)
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
        elif where == 'log': run._log_fetched = bomb(run._log_fetched, True)
        elif where == 'checkpoint written': m.setattr(trainer_page, 'save_checkpoint',
                                                      bomb(checkpoint.save_checkpoint, True))
        elif where == 'model written': m.setattr(run.xtts, 'save', bomb(run.xtts.save, True))
        elif where == 'before a file': m.setattr(os, 'replace', bomb(os.replace, False))
        try: run.fit()
        except Killed: return True
    return False

SLOW = [pytest.param(*both, marks=pytest.mark.slow) for both in ((2, 4), (4, 3), (1, 5), (5, 1))]

@pytest.mark.parametrize('where', ['step', *(
    pytest.param(w, marks=pytest.mark.slow)
    for w in ('checkpoint written', 'before a file', 'log', 'model written'))])
@pytest.mark.parametrize('log_every, checkpoint_every', [(3, 4), *SLOW])
def test_stopped_anywhere_and_resumed(cheap, undisturbed, prepared, mini, tmp_path, monkeypatch, where,
                                      log_every, checkpoint_every):
    "Stopped over and over, each time a bit later, until it gets through: the same run in the end."
    config = mini.replace(training={'steps': 13, 'log_every': log_every,
                                    'checkpoint_every': checkpoint_every})
    whole, folder, stops = undisturbed(config), tmp_path / 'run', 0
    for count in (1, 3, 6, 10, 999):
        run = new_run(prepared, config, folder) if not stops else resume_run(folder)
        if not fit_killed(monkeypatch, run, where, count): break
        stops += 1
    assert stops
    assert summary(resume_run(folder).fit()) | outcome(folder) == whole

def test_a_line_that_was_cut_off_is_forgotten(cheap, undisturbed, prepared, mini, tmp_path):
    run = new_run(prepared, mini, tmp_path / 'run')
    run.fit(steps=4)
    with open(tmp_path / 'run' / 'metrics.jsonl', 'a') as f: f.write('{"step": 6, "loss": 0.')
    assert summary(resume_run(tmp_path / 'run').fit()) | outcome(tmp_path / 'run') == undisturbed(mini)

def test_what_a_killed_run_left_half_written_goes(cheap, prepared, mini, tmp_path):
    new_run(prepared, mini, tmp_path / 'run').fit(steps=4)
    for name in 'checkpoints/step-000000006.safetensors', 'model.safetensors':
        (tmp_path / 'run' / f'{name}.0123abcd{PART}').write_text('half')
    (tmp_path / 'run' / 'film.7.part').write_text('mine')
    resume_run(tmp_path / 'run').fit()
    assert [p for p in tree(tmp_path / 'run') if '.part' in p] == ['film.7.part']

def test_two_checkpoints_stay(cheap, prepared, mini, tmp_path):
    new_run(prepared, mini.replace(training={'checkpoint_every': 1}), tmp_path / 'run').fit()
    names = [p.name for p in checkpoints(tmp_path / 'run' / 'checkpoints')]
    assert names == ['step-000000007.safetensors', 'step-000000008.safetensors']

def test_more_steps_than_planned_go_on(cheap, prepared, mini, tmp_path):
    new_run(prepared, mini, tmp_path / 'run').fit()
    run = new_run(prepared, mini.replace(training={'steps': 12}), tmp_path / 'run')
    assert run.step == 8 and run.fit()['steps'] == 12
    assert [line['step'] for line in lines_of(tmp_path / 'run')] == [2, 4, 6, 8, 10, 12]


# --- killed, really -------------------------------------------------------------------------------

STEPS = 80

@pytest.fixture(scope='module')
def whole(prepared, mini, tmp_path_factory):
    "Mode -> settings file, and a run of them in a process of its own that nobody disturbs."
    made = {}
    def of(xla):
        if xla not in made:
            folder = tmp_path_factory.mktemp('whole')
            config = mini.replace(training={'steps': STEPS, 'log_every': 3, 'checkpoint_every': 5,
                                            'mode': 'xla' if xla else 'graph'},
                                  data={'buckets': 2 if xla else 1})
            (folder / 'run.yaml').write_text(config.to_yaml())
            done = xtts_nb('train', '--data', prepared.folder, '--config', folder / 'run.yaml', '--run',
                           folder / 'run', '--json')
            assert done.code == 0, done.err
            made[xla] = folder / 'run.yaml', summary(done.json) | outcome(folder / 'run')
        return made[xla]
    return of

def kill_behind(step, run, *arguments, jitter):
    "Train, and kill -9 a moment after `step` was logged."
    child = started('train', '--run', run, *arguments, stderr=subprocess.PIPE)
    begun = time.monotonic()
    while reached(run) < step and child.poll() is None:
        assert time.monotonic() - begun < 300, 'this update was not reached'
        time.sleep(0.002)
    time.sleep(jitter)
    child.send_signal(signal.SIGKILL)
    _, err = child.communicate()
    assert child.returncode == -signal.SIGKILL, err.decode()

def check_killed(whole, prepared, folder, seed, points, xla):
    settings, wanted = whole(xla)
    draw, run = random.Random(seed), folder / 'run'
    print('seed', seed)
    for part, point in enumerate(points):
        arguments = [] if part else ['--data', prepared.folder, '--config', settings]
        kill_behind(point if isinstance(point, int) else draw.randint(*point), run, *arguments,
                    jitter=draw.uniform(0, 0.02))
    done = xtts_nb('train', '--run', run, '--json')
    assert done.code == 0, done.err
    assert summary(done.json) | outcome(run) == wanted
    assert not [p for p in tree(run) if '.part' in p]

@pytest.mark.slow
def test_killed_and_resumed_to_the_bit(whole, prepared, tmp_path):
    "Before the first checkpoint, and at a random moment; at more of them in the slow tier."
    check_killed(whole, prepared, tmp_path, time.time_ns(), [3, (9, 50)], xla=False)

@pytest.mark.slow
def test_sigterm_saves_and_says_so(prepared, mini, tmp_path):
    "Exit code 143, and a checkpoint of the update that was running."
    config = mini.replace(data={'buckets': 1},
                          training={'steps': 100_000, 'log_every': 2, 'checkpoint_every': 100_000,
                                    'mode': 'eager'})
    (tmp_path / 'run.yaml').write_text(config.to_yaml())
    child = started('train', '--data', prepared.folder, '--config', tmp_path / 'run.yaml', '--run',
                    tmp_path / 'run', stderr=subprocess.PIPE)
    while reached(tmp_path / 'run') < 4 and child.poll() is None: time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    err = child.communicate(timeout=120)[1].decode()
    assert child.returncode == 143 and 'Traceback' not in err, err
    (saved,) = checkpoints(tmp_path / 'run' / 'checkpoints')
    assert int(saved.stem[5:]) == reached(tmp_path / 'run') >= 4 and f'--run {tmp_path / "run"}' in err

@pytest.mark.slow
def test_killed_at_many_moments(whole, prepared, tmp_path, cheap_xla):
    check_killed(whole, prepared, tmp_path, time.time_ns(), [(1, 19), (20, 39), (40, 55)], xla=True)
