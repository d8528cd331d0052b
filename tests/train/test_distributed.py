"Many devices: every clip once, the losses of one device, equal copies, and an exact resume of two workers."
import json
import os
import re
import signal
import socket
import subprocess
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
import yaml

from process import python, reached, started, xtts_nb
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.files import read_tensors
from xtts_nb.models.gpt import GPT
from xtts_nb.train import distributed as page
from xtts_nb.train.distributed import (
    _DistributedTrainer, _Replicas, _bit_sums, _cluster_resolver, _differing, distributed_train_step,
    distributed_validation_step, _one_device_reason, _this_worker)
from xtts_nb.train.runs import held_out_share, new_run
from xtts_nb.train.step import random_batch, Update
from xtts_nb.train.trainer import checkpoints

GUIDES = Path(__file__).resolve().parents[2] / 'nbs/guides'

@pytest.fixture(scope='module')
def mini(plain) -> XTTSConfig:
    "One block, one shape, nothing random."
    return plain.replace(data={'buckets': 1}, training={'gpt': {
        'steps': 6, 'learning_rate': 5e-4, 'log_every': 1, 'checkpoint_every': 3}})

@pytest.fixture(autouse=True)
def alone(monkeypatch):
    "No cluster but that of the test."
    for name in ('TF_CONFIG', 'SLURM_STEP_NUM_TASKS'): monkeypatch.delenv(name, raising=False)

def losses(run) -> list[float]:
    return [json.loads(line)['loss'] for line in (run / 'metrics.jsonl').read_text().splitlines()]

def tf_config(workers: list[str], index: int) -> str:
    return json.dumps({'cluster': {'worker': workers}, 'task': {'type': 'worker', 'index': index}})

# --- which workers, which devices -----------------------------------------------------------------

STEP = ('SLURM_JOB_ID', 'SLURM_PROCID', 'SLURM_STEP_NUM_TASKS', 'SLURM_STEP_NODELIST',
        'SLURM_STEP_TASKS_PER_NODE', 'SLURMD_NODENAME', 'SLURM_LOCALID')

@pytest.mark.parametrize('step, workers, index', [
    (('123456', '0', '5', 'gpu[01-03]', '2(x2),1', 'gpu02', '1'),
     'gpu01:23456 gpu01:23457 gpu02:23456 gpu02:23457 gpu03:23456', 3),
    (('123456', '0', '3', 'n[9-10],m', '1(x3)', 'n9', '0'), 'm:23456 n10:23456 n9:23456', 2),
    (('1', '0', '4', 'n[1-4]', '1(x4)', 'm1', '0'), 'start the tasks with srun', None),
    (('1', '0', '4', 'r[1-2]n[1-2]', '1(x4)', 'r1n1', '0'), 'SLURM: ', None)])
def test_a_job_step_of_slurm_is_read(monkeypatch, step, workers, index):
    "By node and number on it: TensorFlow sorts the nodes, and the rank of a task may be another number."
    for name, value in zip(STEP, step): monkeypatch.setenv(name, value)
    if index is None: pytest.raises(UserError, _cluster_resolver).match(workers)
    else:
        found = _cluster_resolver()
        assert found.cluster_spec().as_dict() == {'worker': workers.split()}
        assert _this_worker(found)[0] == index

@pytest.mark.parametrize('config, found', [
    ({}, (0, 1)), ({'cluster': {'worker': ['a:1']}, 'task': {'type': 'worker', 'index': 0}}, (0, 1)),
    ({'cluster': {'worker': ['a:1', 'b:2', 'c:3']}, 'task': {'type': 'worker', 'index': 2}}, (2, 3)),
    ({'cluster': {'chief': ['a:1'], 'worker': ['b:2']}, 'task': {'type': 'chief', 'index': 0}}, (0, 2)),
    ({'cluster': {'chief': ['a:1'], 'worker': ['b:2']}, 'task': {'type': 'worker', 'index': 0}}, (1, 2))])
def test_a_worker_knows_its_number(monkeypatch, config, found):
    monkeypatch.setenv('TF_CONFIG', json.dumps(config))
    assert _this_worker(_cluster_resolver()) == found

@pytest.mark.parametrize('guide', ['user_guide', 'user_guide_fa'])
def test_the_scripts_of_the_guide(guide, tmp_path, monkeypatch):
    "The Job names each worker; the batch script asks for another start until the training is done."
    cells = json.loads((GUIDES / f'{guide}.ipynb').read_text(encoding='utf-8'))['cells']
    text = '\n'.join(''.join(cell['source']) for cell in cells)
    batch, manifests = (re.search(rf'```{kind}\n(.*?)```', text, re.S)[1] for kind in ('bash', 'yaml'))
    service, job = yaml.safe_load_all(manifests)
    pod = job['spec']['template']['spec']
    assert service['metadata']['name'] == pod['subdomain'] == job['metadata']['name']
    (script,) = pod['containers'][0]['args']
    shown = script.replace('exec xtts-nb', 'printenv TF_CONFIG; true')
    for index in range(2):
        env = os.environ | {'JOB_COMPLETION_INDEX': str(index)}
        monkeypatch.setenv('TF_CONFIG', subprocess.check_output(['bash', '-c', shown], env=env, text=True))
        assert _this_worker(_cluster_resolver()) == (index, 2)
    for name, body in (('srun', '[ "$SLURM_RESTART_COUNT" = 3 ]'), ('scontrol', 'echo "$@" >>asked')):
        (tmp_path / name).write_text(f'#!/bin/bash\n{body}\n')
        (tmp_path / name).chmod(0o755)
    for count in ('0', '3', '10'):
        env = {'PATH': f'{tmp_path}:{os.environ["PATH"]}', 'SLURM_JOB_ID': '7', 'SLURM_RESTART_COUNT': count}
        subprocess.run(['bash', '-c', batch], env=env, cwd=tmp_path)
    assert (tmp_path / 'asked').read_text() == 'requeue 7\n'

def pair():
    "A strategy of two devices, both the same CPU."
    return SimpleNamespace(extended=SimpleNamespace(worker_devices=['CPU:0'] * 2), cluster_resolver=None)

def test_a_training_that_cannot_be_divided_says_why(mini, prepared):
    runtime = SimpleNamespace(manifest={'stored': []})
    lora = mini.replace(training={'gpt': {'finetune': 'lora'}})
    reasons = [_one_device_reason(*asked) for asked in (
        (mini, prepared, False), (lora, prepared, False), (mini, runtime, False), (mini, prepared, True))]
    assert not reasons[0] and all(reasons[1:]) and len({*reasons}) == 4
    with pytest.raises(UserError, match='training.gpt.finetune'):
        _Replicas(SimpleNamespace(gpt=None, training=mini.training.gpt), mini, pair())

# --- several devices, emulated by one -------------------------------------------------------------

def test_two_devices_make_the_update_of_one(mini):
    "Both devices are the same CPU; the sums are made here."
    config = mini.replace(training={'gpt': {'mode': 'eager', 'grad_accum_steps': 2}}, data={'batch_size': 8})
    def update():
        keras.utils.set_random_seed(0)
        return Update(GPT(config, 5), config.training.gpt)
    copies, whole = _Replicas(update(), config, pair()), update()
    for v, w in zip(copies.updates[1].weights, copies.updates[0].weights): v.assign(w.value)
    copies.all_reduce = lambda compute: [tf.nest.map_structure(tf.add, compute(0), compute(1))] * 2
    lengths = {'text_length': tf.range(5, 13), 'code_length': tf.range(20, 4, -2)}
    batch = random_batch(config, 12, 20) | lengths
    shared = batch | {f'whole_{name}': batch[name] for name in ('weight', 'text_length', 'code_length')}
    number, floats = tf.constant(3), lambda found: {k: float(v) for k, v in found.items()}
    validated = distributed_validation_step(copies, shared), whole.evaluate(batch)
    assert floats(validated[0]) == pytest.approx(floats(validated[1]), rel=1e-5)
    for _ in range(2):
        made = distributed_train_step(copies, shared, number), whole(batch, number)
        assert floats(made[0]) == pytest.approx(floats(made[1]), rel=1e-3)
    first, second = ([v.numpy() for v in u.weights] for u in copies.updates)
    assert all(np.array_equal(a, b) for a, b in zip(first, second))

def test_one_changed_bit_is_found():
    values = [np.array([1., -2.], np.float32), np.array(3, np.int64), np.array([1., 2.], np.float16),
              np.zeros(4, np.float32)]
    sums = lambda: _bit_sums([tf.constant(v) for v in values]).numpy()
    before, names = sums(), ['a', 'b', 'c', 'd']
    assert _differing(names, np.stack([before, sums()])) is None
    for name, value in zip(names, values):
        flat = value.reshape(-1).view(np.uint8)
        flat[-1] ^= 1
        assert _differing(names, np.stack([before, before, sums()])) == (name, 2, 1)
        flat[-1] ^= 1
    assert np.array_equal(before, sums()) and before.max() < 2**16 and before.min() >= 0

# --- what all workers decide together -------------------------------------------------------------

@pytest.mark.parametrize('run, where', [(None, 'training'), ('a/run', 'a/run')])
def test_what_one_worker_cannot_do_alone_is_refused(run, where):
    trainer = _DistributedTrainer.__new__(_DistributedTrainer)   # with nothing but what is given
    trainer.run, trainer.training = run, SimpleNamespace(grad_accum_steps=3)
    with pytest.raises(UserError,
                       match=f'^{where}: .* training.gpt.grad_accum_steps to 6'): trainer._more_parts(None)
    for given, named in (((2, None, ['c']), {}), ((), {'callbacks': ['c']})):
        pytest.raises(UserError, trainer.fit, *given, **named).match('callbacks')

def test_a_cluster_of_one_device_begins_as_a_trainer(prepared, mini):
    "Only the parts on a device are compiled by XLA; epochs count in updates; other settings are refused."
    config = mini.replace(training={'gpt': {'mode': 'xla', 'epochs': 2, 'steps': 1000}})
    make = partial(_DistributedTrainer, strategy=tf.distribute.OneDeviceStrategy('CPU:0'))
    trainer = new_run(prepared, config, None, make=make)
    assert [trainer.train_step.xla, trainer.evaluate.xla] == [False] * 2
    assert all(step.xla for step in trainer.copies.gradient_steps) and trainer.plan.to_gpu
    assert trainer.training.steps == trainer.length['steps'] == 2 * trainer.plan.steps_per_epoch
    assert (trainer.step, trainer.since_best, trainer.assigned_rate) == (0, 0, None)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(page, '_from_first', lambda copies, values: [[tf.zeros(4)]])
        with pytest.raises(UserError, match='other settings'): page._check_alike(trainer.copies, 'settings')

# --- slow: two devices of one process -------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.cpu
def test_two_devices_train_as_one_does(prepared, mini, tmp_path, two_cards, cheap_xla):
    """The command on two cards: XLA, two shapes, two parts, validation, mean weights, epochs and a schedule.

    One device does it in four parts without XLA, which compiles longer than it would compute."""
    config = mini.replace(data={'buckets': 2}, training={'gpt': {
        'epochs': 2, 'schedule': 'cosine', 'grad_accum_steps': 2, 'ema': 0.9, 'validate_every': 3,
        'mode': 'xla'}})
    (tmp_path / 'settings.yaml').write_text(config.to_yaml())
    alone = config.replace(training={'gpt': {'grad_accum_steps': 4, 'mode': 'graph'}})
    one = new_run(prepared, alone, tmp_path / 'one', held_out_share(prepared, 0.2))
    one.fit()
    done = xtts_nb('train', '--data', prepared.folder, '--config', tmp_path / 'settings.yaml', '--run',
                   tmp_path / 'two', '--val', 0.2, '--json')
    assert done.code == 0 and 'Each of 2 GPUs computes its share' in done.err, done.err
    assert done.json['steps'] == one.step == 2 * one.plan.steps_per_epoch
    files = [tmp_path / run / 'metrics.jsonl' for run in ('one', 'two')]
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    for name in ('loss', 'val_loss', 'gradient_norm'):
        a, b = ([line[name] for line in some if name in line] for some in lines)
        assert len(a) >= (2 if name == 'val_loss' else one.step)
        assert b == pytest.approx(a, rel=1e-5 if 'loss' in name else 1e-4)

DRIFT = """
import sys
from functools import partial
from xtts_nb.config import XTTSConfig, UserError
from xtts_nb.app.terminal import start
start(every=True)
from xtts_nb.data.cache import Cache
from xtts_nb.train.distributed import _DistributedTrainer, setup_gpu_strategy
from xtts_nb.train.runs import new_run
cache, settings, run = sys.argv[1:]
make = partial(_DistributedTrainer, strategy=setup_gpu_strategy())
trainer = new_run(Cache(cache), XTTSConfig.load(settings), run, make=make)
first, second = trainer.copies.updates
assert sorted({v.value.device[-1] for u in (first, second) for v in u.weights}) == ['0', '1']
assert trainer.fit(3)['steps'] == 3
assert all((v.numpy() == w.numpy()).all() for v, w in zip(first.state.values(), second.state.values()))
weight = second.weights[-1]
weight.assign(weight.value * 1.0001)
try: trainer.fit(6)
except UserError as e: print(weight.path, '|', e)
"""

@pytest.mark.slow
def test_a_copy_that_differs_ends_the_run(prepared, mini, tmp_path, two_cards):
    "The second copy is changed after update 3, so nothing is saved at 6."
    (tmp_path / 'settings.yaml').write_text(mini.to_yaml())
    done = python(DRIFT, prepared.folder, tmp_path / 'settings.yaml', tmp_path / 'run', timeout=200)
    assert done.code == 0, done.err
    name, message = done.out.split(' | ')
    assert 'at update 6 the copies of the model are no longer equal' in message
    assert 'device 1 differs from device 0' in message and (name in message or 'other variables' in message)
    assert [p.stem for p in checkpoints(tmp_path / 'run' / 'checkpoints')] == ['step-000000003']

# --- slow: two real workers -----------------------------------------------------------------------

def free_port() -> int:
    with socket.create_server(('127.0.0.1', 0)) as server: return server.getsockname()[1]

def by_tf_config():
    "The environment of each of two workers on this machine."
    workers = [f'127.0.0.1:{free_port()}' for _ in range(2)]
    return lambda index: {'TF_CONFIG': tf_config(workers, index)}

def by_slurm():
    "The same, as two tasks of a job step."
    job = str(os.getpid())
    return lambda index: dict(zip(STEP, (job, str(index), '2', 'localhost', '2', 'localhost', str(index))))

def two_workers(*arguments, settings=None, where=by_tf_config) -> list:
    "`train` as each of two workers, with the same arguments or settings of their own."
    of, kept = where(), {k: v for k, v in os.environ.items() if k != 'IN_TEST'}
    return [started('train', *arguments, *(['--config', settings[index]] if settings else []),
                    env=kept | of(index), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for index in range(2)]

def ended(children, timeout=300) -> tuple[list[int], list[tuple]]:
    "Exit codes and outputs."
    outputs = [child.communicate(timeout=timeout) for child in children]
    return [child.returncode for child in children], outputs

@pytest.mark.slow
@pytest.mark.cpu
def test_two_workers_train_as_one_device_and_resume_exactly(prepared, mini, tmp_path):
    """The same losses, nearly the same weights, and files of worker 0 alone.

    SIGTERM to one worker stops both at the same update; after kill -9 of one the other ends by itself.
    Started again, as a scheduler does, they end with the files of an undisturbed run."""
    config = mini.replace(training={'gpt': {'steps': 30, 'checkpoint_every': 7}})
    (tmp_path / 'settings.yaml').write_text(config.to_yaml())
    alone, whole, run = (tmp_path / name for name in ('alone', 'of/whole', 'run'))
    new_run(prepared, config, alone).fit()
    asked = '--data', prepared.folder, '--config', tmp_path / 'settings.yaml', '--json', '--run'
    codes, outputs = ended(two_workers(*asked, whole, where=by_slurm))
    assert codes == [0, 0], outputs
    assert losses(whole) == pytest.approx(losses(alone), rel=1e-5)
    assert json.loads(outputs[0][0])['steps'] == 30 and [p.name for p in whole.parent.iterdir()] == ['whole']
    assert sorted(p.name for p in whole.iterdir()) == sorted(p.name for p in alone.iterdir())
    ours, theirs = (dict(read_tensors(folder / 'model.safetensors')) for folder in (whole, alone))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items(): np.testing.assert_allclose(array, theirs[name], rtol=1e-3, atol=1e-5)

    saved = lambda: int(checkpoints(run / 'checkpoints')[-1].stem[5:])
    def disturbed(number: int, after: int):
        children = two_workers(*asked, run)
        while reached(run) < after and children[0].poll() is None: time.sleep(0.005)
        children[1].send_signal(number)
        return ended(children)
    codes, outputs = disturbed(signal.SIGTERM, 5)
    assert codes == [143, 143] and 'Traceback' not in ''.join(err for _, err in outputs), outputs
    assert saved() == reached(run) and 5 <= saved() < 20
    codes, outputs = disturbed(signal.SIGKILL, saved() + 3)
    assert codes == [2, -signal.SIGKILL] and saved() < 30, outputs
    assert 'Worker 0 has lost another worker' in outputs[0][1]
    codes, outputs = ended(two_workers(*asked, run))
    assert codes == [0, 0], outputs
    for name in ('model.safetensors', 'checkpoints/step-000000030.safetensors'):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name
    assert losses(run) == losses(whole)

@pytest.mark.slow
def test_workers_must_agree(prepared, mini, tmp_path):
    settings = [tmp_path / f'{index}.yaml' for index in range(2)]
    for index, path in enumerate(settings):
        path.write_text(mini.replace(training={'gpt': {'seed': index}}).to_yaml())
    asked = '--data', prepared.folder, '--run', tmp_path / 'run'
    codes, outputs = ended(two_workers(*asked, settings=settings))
    assert codes[1] == 2 and codes[0] and 'Worker 1 has other settings' in outputs[1][1], outputs
    assert not (tmp_path / 'run' / 'checkpoints').exists()
