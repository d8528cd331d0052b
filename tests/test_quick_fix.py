"Commands that watch and diagnose, as processes of their own."
import json
from types import SimpleNamespace

import pytest
import yaml

from process import tree, xtts_nb

TOY = {'model': {'dvae': {'hidden': 16, 'codebook_dim': 8, 'codes': 32, 'resnet_blocks': 1},
                 'gpt': {'layers': 1, 'width': 64, 'heads': 2, 'text_tokens': 48, 'max_text_tokens': 40, 'max_audio_codes': 64,
                         'prompt_latents': 4, 'conditioning_layers': 1, 'perceiver_layers': 1, 'perceiver_heads': 2,
                         'perceiver_head_dim': 16}},
       'data': {'batch_size': 4, 'reference_frames': 32, 'max_text_tokens': 40, 'buckets': 1},
       'training': {'enable_graph_mode': False}}


@pytest.fixture
def settings(tmp_path):
    (tmp_path / 'toy.yaml').write_text(yaml.safe_dump(TOY))
    return tmp_path / 'toy.yaml'


def test_the_monitor_names_its_log(tmp_path):
    done = xtts_nb('monitor', '--log', '--duration', '0.2', '--interval', '0.05', '--json', cwd=tmp_path)
    (log,) = tmp_path.iterdir()
    assert done.code == 0 and done.json['log_file'] == log.name and log.name.startswith('monitor-') and log.suffix == '.jsonl'
    assert len(log.read_text().splitlines()) == done.json['samples'] >= 2


@pytest.mark.parametrize('command', ['diagnose', 'quick-fix'])
def test_settings_that_are_not_there(command, tmp_path):
    done = xtts_nb(command, '--config', 'none.yaml', cwd=tmp_path)
    assert done.code == 2 and 'none.yaml' in done.said[-1] and 'Traceback' not in done.err and not tree(tmp_path)


@pytest.mark.parametrize('gib, ok', [(1.9, False), (2.1, True)])
def test_a_run_needs_two_gib_of_memory_and_of_disk(monkeypatch, gib, ok):
    from xtts_nb import quick_fix
    monkeypatch.setattr(quick_fix.psutil, 'virtual_memory', lambda: SimpleNamespace(available=gib * 2**30))
    monkeypatch.setattr(quick_fix.shutil, 'disk_usage', lambda path: SimpleNamespace(free=gib * 2**30))
    needs = {need.name: need for need in quick_fix.prerequisites(config='no-such.yaml')}
    assert needs['memory'].ok == needs['disk'].ok == ok and f'{gib} GiB free for runs' in needs['disk'].found
    assert needs['Python'].ok and not needs['settings'].ok and 'no-such.yaml' in needs['settings'].line()


@pytest.mark.slow
def test_diagnose_without_a_cache(settings, tmp_path):
    done = xtts_nb('diagnose', '--config', settings, '--num-batches', '8', '--seconds', '24', '--batch-size', '2', '--json',
                   cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.json['measured']['rows'] == 2 and {f['disease'] for f in done.json['findings']} >= {'step not compiled'}


@pytest.mark.slow
def test_quick_fix_writes_settings_that_are_faster_and_load(settings, tmp_path):
    done = xtts_nb('quick-fix', '--config', settings, '--num-batches', '8', '--seconds', '24', '--json', cwd=tmp_path)
    assert done.code == 0, done.err
    result = done.json
    assert 'training.enable_graph_mode: False -> True' in result['changes'] and result['verified_gain'] > 1
    assert yaml.safe_load((tmp_path / 'fixed.yaml').read_text())['training']['enable_graph_mode'] is True
    assert result['train'].endswith('--config fixed.yaml') and json.loads(done.out)
    again = xtts_nb('quick-fix', '--config', settings, '--num-batches', '8', '--seconds', '24', cwd=tmp_path)
    assert again.code == 2 and 'already exists' in again.said[-1]
