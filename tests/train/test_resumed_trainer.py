"What goes wrong while a run trains, and a run that is stopped at any moment and is resumed to the bit."
import math
import os
import random
import signal
import subprocess
import time

import numpy as np
import pytest
import tensorflow as tf

from cheap import Broken, Cheap, HELD, lines_of, outcome, summary
from process import reached, started, tree, xtts_nb
from xtts_nb.config import GPTTraining, UserError
from xtts_nb.files import PART, write_tensors
from xtts_nb.models.xtts import XTTS
from xtts_nb.train import runs, trainer as trainer_page
from xtts_nb.train.begin import begin
from xtts_nb.train.runs import new_run
from xtts_nb.train.step import compile_step, Update
from xtts_nb.train.trainer import checkpoints, _load_checkpoint, _save_checkpoint, Trainer

# --- checkpoints ----------------------------------------------------------------------------------

def state(*values) -> dict:
    "A few variables of different kinds."
    return {'a/kernel': tf.Variable(np.float32(values or [1., 2.])), 'count': tf.Variable(3, dtype=tf.int64)}

def empty() -> dict: return {k: tf.Variable(tf.zeros_like(v)) for k, v in state().items()}

def test_the_newest_few_stay_and_nothing_else_counts(tmp_path):
    strange = 'step-000000009.safetensors.123.part', 'step-9.safetensors', 'model.safetensors'
    for name in strange: (tmp_path / name).write_text('something else')
    assert checkpoints(tmp_path) == [] == checkpoints(tmp_path / 'nowhere')
    for step in (5, 9_999, 10_000, 123_456_789, 123_456_789): _save_checkpoint(tmp_path, step, state(step))
    assert [p.name for p in checkpoints(tmp_path)] == ['step-000010000.safetensors',
                                                       'step-123456789.safetensors']
    assert {*strange} < {*tree(tmp_path)}

def test_the_older_ones_stay_where_the_new_one_fails(tmp_path, monkeypatch):
    for step in (1, 2): _save_checkpoint(tmp_path, step, state())
    before = tree(tmp_path)
    def full(done, total): raise OSError(28, 'No space left on device')
    monkeypatch.setattr('xtts_nb.files.write_tensors',
                        lambda path, arrays, **more: write_tensors(path, arrays, full, **more))
    with pytest.raises(UserError, match='the disk is full'): _save_checkpoint(tmp_path, 3, state())
    assert tree(tmp_path) == before

def test_a_state_that_does_not_fit_or_is_torn_is_refused_whole(tmp_path):
    path = _save_checkpoint(tmp_path, 1, state())
    def refused(said, wanted={}):   # noqa: B006 -- only read
        found = empty() | wanted
        with pytest.raises(UserError, match=f'{path.name}.*{said}'): _load_checkpoint(path, found)
        assert found['a/kernel'].numpy().tolist() == [0., 0.]   # nothing was filled in
    refused('more', {'more': tf.Variable([1.])})
    refused('count', {'count': tf.Variable([1, 2])})
    refused('ema', {'a_average': tf.Variable([1.])})
    whole = path.read_bytes()
    for cut in (0, 5, 60, -1):
        path.write_bytes(whole[:cut])
        refused('')
    path.unlink()
    refused('')
    trainer_page.save_weights(path, state())   # no step
    with pytest.raises(UserError, match=path.name): _load_checkpoint(path, empty())

# --- what goes wrong ------------------------------------------------------------------------------

def test_a_broken_update_is_counted_and_its_clips_are_named(prepared, mini, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, 'Trainer', type('Some', (Broken,), {'at': (1, 4, 5)}))
    run = new_run(prepared, mini.replace(training={'gpt': {'max_bad_steps': 3}}), tmp_path / 'run')
    result = run.fit()
    ids = {n: [prepared.clips[i]['id'] for i in run.plan.pick(tf.constant(n, tf.int64))[1].numpy()]
           for n in (1, 4, 5)}
    lines = lines_of(tmp_path / 'run')
    assert [line['skipped'] for line in lines] == [1, 0, 2, 0] and 'bad' not in lines[1]
    assert lines[0]['bad'] == {'1': ids[1]} and lines[2]['bad'] == {'4': ids[4], '5': ids[5]}
    assert lines[2]['loss'] is None and math.isfinite(lines[0]['loss']) and math.isfinite(result['loss_last'])
    said = capsys.readouterr().err
    assert all(f'Update {n} was skipped' in said and ids[n][0] in said for n in ids)

def test_too_many_in_a_row_stop_with_the_last_good_state(prepared, mini, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, 'Trainer', type('All', (Broken,), {'at': tuple(range(2, 20))}))
    run = new_run(prepared, mini.replace(training={'gpt': {'max_bad_steps': 3, 'log_every': 3, 'steps': 20}}),
                  tmp_path / 'run')
    with pytest.raises(UserError, match='updates in a row .*(low|high)-'): run.fit()
    good = new_run(prepared, mini, tmp_path / 'good')
    good.fit(steps=2)
    again = begin(run=tmp_path / 'run')
    assert np.array_equal(again.xtts.gpt.final_norm.beta.numpy(), good.xtts.gpt.final_norm.beta.numpy())
    assert again.step >= 5

@pytest.mark.parametrize('fails, written', [([4], [2, 5, 6, 8]), ([4, 5], [2])])
def test_a_full_disk(cheap, prepared, mini, tmp_path, monkeypatch, fails, written):
    "The present state is tried at once; if that fails too, the run ends, and resumes from what was written."
    real, steps = trainer_page._save_checkpoint, []
    def full(folder, step, **more):
        if step in fails: raise UserError('the disk is full')
        steps.append(step)
        return real(folder, step, **more)
    monkeypatch.setattr(trainer_page, '_save_checkpoint', full)
    config = mini.replace(training={'gpt': {'checkpoint_every': 2, 'keep_checkpoints': 1}})
    run = new_run(prepared, config, tmp_path / 'run')
    update = run.train_step
    run.train_step = lambda *given: (run.writer.job and run.writer.job.exception(), update(*given))[1]
    try: assert run.fit()['steps'] == 8 and len(fails) == 1
    except UserError: assert len(fails) == 2
    assert steps == written
    assert begin(run=tmp_path / 'run').step == written[-1]

def test_a_best_model_is_written_once_there_is_room(given, prepared, mini, tmp_path, monkeypatch):
    "As it was, although training continued."
    real, best, tries = XTTS.save, tmp_path / 'run' / 'best', []
    def full(self, folder, weights=None):
        if folder == best: tries.append(1)
        if folder == best and len(tries) == 3: raise UserError('the disk is full')   # of updates 2, 4 and 10
        real(self, folder, weights)
    monkeypatch.setattr(XTTS, 'save', full)
    config = mini.replace(training={'gpt': {'steps': 16, 'validate_every': 2, 'checkpoint_every': 7}})
    run = new_run(prepared, config, tmp_path / 'run', HELD)
    update, seen = run.train_step, {}
    def step(*given):
        if run.writer.job: run.writer.job.exception()   # waits for it
        seen[run.step] = run.xtts.gpt.final_norm.beta.numpy()   # before the update
        return update(*given)
    run.train_step = step
    assert run.fit()['best'] == {'step': 10, 'val_loss': 1.}
    assert np.array_equal(XTTS.load(best).gpt.final_norm.beta, seen[10])

def test_without_room_for_a_copy_training_waits(cheap, prepared, mini, tmp_path, monkeypatch):
    "And saves the same: the state, and a model that is the mean of the weights."
    config = mini.replace(training={'gpt': {'ema': .9}})
    new_run(prepared, config, tmp_path / 'copied').fit()
    monkeypatch.setattr(trainer_page, '_available_memory', lambda: 0.)
    monkeypatch.setattr(trainer_page, '_snapshot', lambda variables: pytest.fail('a copy'))
    new_run(prepared, config, tmp_path / 'waited').fit()
    assert outcome(tmp_path / 'copied') == outcome(tmp_path / 'waited')

# --- out of memory --------------------------------------------------------------------------------

class Greedy(Trainer):
    "A step that really requests more than there is, as long as it has one part."
    def custom_train_step(self, batch, number):
        found = super().custom_train_step(batch, number)
        if self.training.grad_accum_steps > 1: return found
        with tf.control_dependencies([self.optimizer.iterations.value]):   # the update is written by then
            size = tf.where(number >= 0, tf.constant(2**46, tf.int64), tf.constant(1, tf.int64))
            return found | {'loss': found['loss'] + tf.zeros(size[None])[0]}

@pytest.mark.slow   # TensorFlow tries for 10 s and more to find the memory
def test_out_of_memory_at_first_begins_again_in_more_parts(prepared, mini, tmp_path, capsys):
    "From the same state to the bit, new or resumed, although the update that failed was written."
    config = mini.replace(data={'buckets': 1},
                          training={'gpt': {'steps': 4, 'checkpoint_every': 2, 'log_every': 1}})
    parts = config.replace(training={'gpt': {'grad_accum_steps': 2}})
    asked = ('run', config), ('parts', parts)
    found, wanted = (new_run(prepared, config, tmp_path / name, make=Greedy) for name, config in asked)
    for run in (found, wanted): run.fit()
    assert all(np.array_equal(a, b) for a, b in zip(found.state.values(), wanted.state.values(), strict=True))
    said = capsys.readouterr().err
    assert said.count('OUT OF MEMORY') == 1 and 'the training begins again, with 2' in said
    assert begin(run=tmp_path / 'run').training.grad_accum_steps == 2

class Hungry(Update):
    "An update of one number that requests 2^50 numbers of memory, and changes its number."
    def __init__(self): self.number, self.weights, self.hungry = tf.Variable(1.), [], True
    optimizer = type('Optimizer', (), {'variables': ()})

    def __call__(self, batch, number):
        size = (2**30 if self.hungry else 1, 2**20)
        drawn = tf.random.stateless_uniform(size, tf.stack([number, number]))
        self.number.assign_add(1. + 0 * tf.reduce_sum(tf.sort(drawn, 0)[0, :2]))
        return {'loss': self.number + 0.}

@pytest.mark.slow
def test_a_program_of_xla_without_memory_can_begin_again():
    "It gives the memory of the old values away, so a variable that it writes is lost until it is assigned."
    made, training = Hungry(), GPTTraining(mode='xla')
    with pytest.raises(tf.errors.ResourceExhaustedError): compile_step(made, training)({}, tf.constant(0))
    made.hungry = False
    made.number.assign(1.)
    assert float(compile_step(made, training)({}, tf.constant(0))['loss']) == 2

def test_only_a_lack_of_memory_begins_again(prepared, mini, monkeypatch):
    "At the first update, where there is room for a copy of the state and more than a row; else it ends."
    def said(status, room=True, parts=1, at=0):
        run = new_run(prepared, mini.replace(training={'gpt': {'grad_accum_steps': parts}}), None, make=Cheap)
        def step(batch, number):
            if run.training.grad_accum_steps > parts or int(number) < at: return {'loss': tf.constant(1.)}
            raise tf.errors.AbortedError(None, None, f'Status: {status}, ')
        monkeypatch.setattr(trainer_page, '_room_to_copy', lambda *given: room)
        monkeypatch.setattr(Cheap, 'compiled_step', lambda self: step)
        run.train_step = step
        run.fit(at + 1)
        return run.training.grad_accum_steps
    assert said(1) == 2
    with pytest.raises(tf.errors.AbortedError): said(2)
    for change, words in (({'room': False}, 'memory at update 0 .*training.gpt.grad_accum_steps to 2'),
                          ({'at': 2}, 'update 2 with 4 rows.*grad_accum_steps to 2'),
                          ({'parts': 4}, 'with 1 rows at once; .*gradient_checkpointing')):
        with pytest.raises(UserError, match=words): said(1, **change)

# --- stopped and resumed --------------------------------------------------------------------------

def undisturbed(prepared, config, folder) -> dict:
    "What a run leaves that nobody stops, and its summary."
    return summary(new_run(prepared, config, folder).fit()) | outcome(folder)

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
    target, name, after = {'step': (run, 'train_step', False), 'log': (run, '_log_fetched', True),
                           'checkpoint written': (trainer_page, '_save_checkpoint', True),
                           'model written': (run.xtts, 'save', True),
                           'before a file': (os, 'replace', False)}[where]
    with monkeypatch.context() as m:
        m.setattr(target, name, bomb(getattr(target, name), after))
        try: run.fit()
        except Killed: return True
    return False

@pytest.mark.parametrize('where, log_every, checkpoint_every', [('step', 3, 4), *(
    pytest.param(*moment, marks=pytest.mark.slow) for moment in (
        ('checkpoint written', 5, 1), ('before a file', 1, 5), ('log', 2, 4), ('model written', 4, 3)))])
def test_stopped_anywhere_and_resumed(cheap, prepared, mini, tmp_path, monkeypatch, where,
                                      log_every, checkpoint_every):
    "Stopped over and over, each time a bit later, until it gets through: the same run in the end."
    config = mini.replace(training={'gpt': {'steps': 13, 'log_every': log_every,
                                    'checkpoint_every': checkpoint_every}})
    whole, folder, stops = undisturbed(prepared, config, tmp_path / 'whole'), tmp_path / 'run', 0
    for count in (1, 3, 6, 10, 999):
        run = new_run(prepared, config, folder) if not stops else begin(run=folder)
        if not fit_killed(monkeypatch, run, where, count): break
        stops += 1
    assert stops
    assert summary(begin(run=folder).fit()) | outcome(folder) == whole

def test_what_a_killed_run_left_half_written_goes(cheap, prepared, mini, tmp_path):
    "A line that was cut off, and files; one of somebody else stays."
    run = tmp_path / 'run'
    new_run(prepared, mini, run).fit(steps=4)
    with open(run / 'metrics.jsonl', 'a') as f: f.write('{"step": 6, "bad": {"loss": 0.}')
    for name in 'checkpoints/step-000000006.safetensors', 'model.safetensors':
        (run / f'{name}.0123abcd{PART}').write_text('half')
    (run / 'film.7.part').write_text('mine')
    assert summary(begin(run=run).fit()) | outcome(run) == undisturbed(prepared, mini, tmp_path / 'whole')
    assert [p for p in tree(run) if '.part' in p] == ['film.7.part']

# --- killed, really -------------------------------------------------------------------------------

@pytest.mark.slow
def test_killed_and_resumed_to_the_bit(prepared, mini, tmp_path, kernels):
    "Under XLA, before the first checkpoint and at a random moment; programs that are kept change nothing."
    seed = time.time_ns()
    draw, run, whole = random.Random(seed), tmp_path / 'run', tmp_path / 'whole'
    print('seed', seed)
    config = mini.replace(training={'gpt': {'steps': 80, 'log_every': 3, 'checkpoint_every': 5,
                                            'mode': 'xla'}})
    (tmp_path / 'run.yaml').write_text(config.to_yaml())
    asked = '--data', prepared.folder, '--config', tmp_path / 'run.yaml'
    for step, arguments in ((3, asked), (draw.randint(9, 50), ())):
        child, begun = started('train', '--run', run, *arguments, stderr=subprocess.PIPE,
                               cwd=kernels), time.monotonic()
        while reached(run) < step and child.poll() is None:
            assert time.monotonic() - begun < 300, 'this update was not reached'
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.02))
        child.send_signal(signal.SIGKILL)
        _, err = child.communicate()
        assert child.returncode == -signal.SIGKILL, err.decode()
    killed, undisturbed = (xtts_nb('train', '--run', folder, *arguments, '--json', cwd=place)
                           for folder, arguments, place in ((run, (), kernels), (whole, asked, None)))
    assert killed.code == undisturbed.code == 0, killed.err + undisturbed.err
    assert summary(killed.json) | outcome(run) == summary(undisturbed.json) | outcome(whole)
    assert not [p for p in tree(run) if '.part' in p]

@pytest.mark.slow
def test_sigterm_saves_and_says_so(prepared, mini, tmp_path):
    "Exit code 143, and a checkpoint of the update that was running."
    config = mini.replace(data={'buckets': 1},
                          training={'gpt': {'steps': 100_000, 'log_every': 2, 'checkpoint_every': 100_000,
                                    'mode': 'eager'}})
    (tmp_path / 'run.yaml').write_text(config.to_yaml())
    child = started('train', '--data', prepared.folder, '--config', tmp_path / 'run.yaml', '--run',
                    tmp_path / 'run', stderr=subprocess.PIPE)
    while reached(tmp_path / 'run') < 4 and child.poll() is None: time.sleep(0.01)
    child.send_signal(signal.SIGTERM)
    err = child.communicate(timeout=120)[1].decode()
    assert child.returncode == 143 and 'Traceback' not in err, err
    (saved,) = checkpoints(tmp_path / 'run' / 'checkpoints')
    assert int(saved.stem[5:]) == reached(tmp_path / 'run') >= 4 and f'--run {tmp_path / "run"}' in err
