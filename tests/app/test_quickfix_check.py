"Remedies as changes of keys: chosen, tried, written, verified; and the commands that diagnose, as processes."
import json
from types import SimpleNamespace

import pytest
import tensorflow as tf
import yaml

from process import tree, xtts_nb
from xtts_nb.app import check
from xtts_nb.config import XTTSConfig
from xtts_nb.app.check import (
    LEARNING, change_for, changed_keys, prerequisites)

TINY = XTTSConfig.tiny()

TOY = {'model': {'dvae': {'hidden': 16, 'codebook_dim': 8, 'codes': 32, 'resnet_blocks': 1},
                 'gpt': {'layers': 1, 'width': 64, 'heads': 2, 'text_tokens': 48, 'max_text_tokens': 40,
                         'max_audio_codes': 64, 'prompt_latents': 4, 'conditioning_layers': 1,
                         'perceiver_layers': 1, 'perceiver_heads': 2, 'perceiver_head_dim': 16}},
       'data': {'batch_size': 4, 'reference_frames': 32, 'max_text_tokens': 40, 'buckets': 1},
       'training': {'mode': 'eager'}}


@pytest.fixture
def settings(tmp_path):
    (tmp_path / 'toy.yaml').write_text(yaml.safe_dump(TOY))
    return tmp_path / 'toy.yaml'


def test_the_monitor_names_its_log(tmp_path):
    done = xtts_nb('monitor', '--log', '--duration', '0.2', '--interval', '0.05', '--json', cwd=tmp_path)
    (log,) = tmp_path.iterdir()
    assert done.code == 0 and done.json['log_file'] == log.name and log.name.startswith('monitor-')
    assert log.suffix == '.jsonl'
    assert len(log.read_text().splitlines()) == done.json['samples'] >= 2


@pytest.mark.parametrize('command', ['diagnose', 'quick-fix'])
def test_settings_that_are_not_there(command, tmp_path):
    done = xtts_nb(command, '--config', 'none.yaml', cwd=tmp_path)
    assert done.code == 2 and 'none.yaml' in done.said[-1] and 'Traceback' not in done.err
    assert not tree(tmp_path)


# --- what a training needs ----------------------------------------------------------------------------------

@pytest.fixture
def machine(monkeypatch, tmp_path):
    "A machine that meets all prerequisites; a test changes one."
    (tmp_path / 'settings.ini').write_text('[workspace]\nruns = not/yet\n')
    monkeypatch.chdir(tmp_path)
    here = SimpleNamespace(memory=4 * 2**30, disk=3 * 2**30, gpus=[], looked=[])
    usage = lambda path: here.looked.append(path) or SimpleNamespace(free=here.disk)
    monkeypatch.setattr(check.psutil, 'virtual_memory', lambda: SimpleNamespace(available=here.memory))
    monkeypatch.setattr(check.shutil, 'disk_usage', usage)
    monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind: [SimpleNamespace(name=name)
        for name in here.gpus])
    monkeypatch.setattr(tf.config.experimental, 'get_device_details', lambda gpu: {'device_name': 'H200'}
                        if gpu.name == 'a' else {})
    monkeypatch.setattr(check, 'sys', SimpleNamespace(version_info=(3, 11), version='3.11.0 (main)'))
    monkeypatch.setattr(check, 'cpu_name', lambda: 'a chip')
    here.needs = lambda **given: {need.name: (need.ok, need.found) for need in prerequisites(**given)}
    return here

def test_what_a_training_needs(machine, tmp_path, prepared, monkeypatch):
    enough = {'Python': (True, '3.11.0'), 'TensorFlow': (True, tf.__version__),
              'device': (True, 'no GPU, so a chip'),
              'memory': (True, '4.0 GiB available'), 'disk': (True, '3.0 GiB free for runs')}
    assert machine.needs() == enough and machine.looked == [tmp_path]   # the next existing folder
    (tmp_path / 'f.yaml').write_text('data: {batch_size: 3, buckets: 2}\n')
    assert machine.needs(config='f.yaml', data=prepared.folder) == enough | {
        'settings': (True, 'f.yaml, 2 keys changed'), 'cache': (True, f'{prepared.folder}, 14 clips')}
    machine.gpus = ['a', 'b']
    monkeypatch.setattr(check.sys, 'version_info', (3, 10))
    monkeypatch.setattr(tf, '__version__', '2.22.0')
    bad = prerequisites(config='none.yaml', data='nowhere')
    assert [(need.name, need.ok) for need in bad if not need.ok] == [(name, False) for name in (
        'Python', 'TensorFlow', 'settings', 'cache')] and bad[2].line() == 'ok   device: H200, b'
    assert bad[0].found == '3.11.0; install 3.11 to 3.13' and bad[1].found.startswith('2.22.0; pip install')
    assert 'none.yaml' in bad[-2].found and bad[-1].line().startswith('FAIL cache: nowhere')

@pytest.mark.parametrize('bytes_, ok', [(2**31, False), (2**31 + 1, True)])
def test_a_run_needs_more_than_two_gib_of_memory_and_of_disk(machine, bytes_, ok):
    machine.memory = machine.disk = bytes_
    needs = machine.needs()
    assert (needs['memory'][0], needs['disk'][0]) == (ok, ok)
    remedies = 'end other programs until more than 2.0 GiB', 'name another folder with runs = in settings.ini'
    assert [remedy in needs[name][1] for name, remedy in zip(('memory', 'disk'), remedies)] == [not ok] * 2
    assert machine.needs(needed=2**31 - 1)['disk'][0]

# --- what is changed for a finding --------------------------------------------------------------------------

SLOW = TINY.replace(data={'prefetch_buffer_size': 1, 'num_workers': 2, 'batch_size': 4,
                          'prefetch_to_gpu': False},
                    training={'mode': 'eager'})
CHANGES = [   # finding, settings before, settings after; with six cores, and a cycle of `c` batches
    ('no prefetch', {}, {'data.prefetch_buffer_size': 4}), ('no prefetch',
                                                            {'data': {'prefetch_buffer_size': 9}}, None),
    ('oscillation c=3', {}, {'data.prefetch_buffer_size': 6}),
    ('oscillation c=1', {}, {'data.prefetch_buffer_size': 4}),
    ('single-threaded map', {}, {'data.num_workers': 6}), ('oversubscription', {'data': {'num_workers': 99}},
                                                           {'data.num_workers': 6}),
    ('oversubscription', {'data': {'num_workers': 6}}, None), ('input-bound', {}, {'data.num_workers': 6}),
    ('input-bound', {'data': {'num_workers': 5}}, {'data.num_workers': 10}),
    ('copy-bound', {}, {'data.prefetch_to_gpu': True}),
    ('variable shapes', {}, {'data.pad_to_fixed_length': True}), ('tiny batch', {}, {'data.batch_size': 16}),
    ('float32 on tensor cores', {}, {'training.precision': 'bfloat16'}),
    ('no XLA', {}, {'training.mode': 'xla'}),
    ('step not compiled', {}, {'training.mode': 'auto'}),
    ('something else', {}, None)]

@pytest.mark.parametrize('name, given, changed', CHANGES)
def test_the_change_for_a_finding(monkeypatch, name, given, changed):
    from xtts_nb.app.recipes import flat
    monkeypatch.setattr(check, 'cores', lambda: 6)
    disease, _, cycle = name.partition(' c=')
    verdict = SimpleNamespace(measured=SimpleNamespace(cycle=int(cycle or 1)))
    found = change_for(SimpleNamespace(disease=disease), verdict, SLOW.replace(**given))
    assert (found and flat(found)) == changed

def test_the_keys_that_differ():
    after = TINY.replace(data={'batch_size': 99}, model={'gpt': {'layers': 3}})
    assert changed_keys(TINY, after) == [f'model.gpt.layers: {TINY.model.gpt.layers} -> 3',
                                         f'data.batch_size: {TINY.data.batch_size} -> 99']
    assert changed_keys(after, after) == []

# --- trying, writing, proving -------------------------------------------------------------------------------

def finding(name): return SimpleNamespace(disease=name, remedy=f'remedy of {name}', predicted_gain=2.)

TRIED = {'helps': {'data': {'num_workers': 7, 'buckets': 3}}, 'hardly': {'data': {'reference_frames': 48}},
         'by hand': None, 'more rows': {'data': {'batch_size': 9}},
         'too much': {'training': {'gradient_checkpointing': True}}, 'no key': {'training': {'ema': 0.5}},
         'again': {'data': {'num_workers': 3}}}

def test_the_keys_that_change_what_is_learned():
    known = {f'{section}.{key}' for section, keys in TINY.model_dump().items() for key in keys}
    assert set(LEARNING) == {'data.batch_size', 'training.precision'} <= known

# --- the commands -------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_diagnose_without_a_cache(settings, tmp_path, cheap_xla):
    done = xtts_nb('diagnose', '--config', settings, '--num-batches', '8', '--seconds', '24', '--batch-size',
                   '2', '--json', cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.json['measured']['rows'] == 2
    assert {f['disease'] for f in done.json['findings']} >= {'step not compiled'}


@pytest.mark.slow
def test_quick_fix_writes_settings_that_are_faster_and_load(settings, tmp_path, cheap_xla):
    done = xtts_nb('quick-fix', '--config', settings, '--num-batches', '8', '--seconds', '24', '--json',
                   cwd=tmp_path)
    assert done.code == 0, done.err
    result = done.json
    assert 'training.mode: eager -> auto' in result['changes'] and result['verified_gain'] > 1
    assert yaml.safe_load((tmp_path / 'fixed.yaml').read_text())['training']['mode'] == 'auto'
    assert result['train'].endswith('--config fixed.yaml') and json.loads(done.out)
