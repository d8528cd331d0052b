"The commands that watch and measure: exit codes, one JSON object, one sentence."
import json

import pytest

from process import main, tree, xtts_nb
from xtts_nb import check, configure, switches


# --- check ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('result, code', [('PASSED', 0), ('SKIPPED', 0), ('FAILED', 1)])
def test_check_ends_with_1_where_one_failed(monkeypatch, capfd, result, code):
    rows = [{'name': 'a', 'result': 'PASSED', 'reason': 'x'}, {'name': 'b', 'result': result, 'reason': 'y'}]
    asked = []
    monkeypatch.setattr(check, 'run_checks', lambda trial, seconds, tell: asked.append(seconds) or rows)
    assert main('check', '--json', '--stress-duration', '2.5') == code and asked == [2.5]
    said = json.loads(capfd.readouterr().out)
    assert said['checks'] == rows and said[result.lower()] == 1 + (result == 'PASSED') and said['device']

@pytest.mark.slow
def test_check_as_a_user_runs_it():
    done = xtts_nb('check', '--stress-duration', '1', '--json')
    assert done.code == 0 and done.json['failed'] == 0 and [r['name'] for r in done.json['checks']] == [*check.CHECKS, 'Stress']


# --- configure -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('ok, code', [(True, 0), (None, 0), (False, 1)])
def test_configure_ends_with_1_where_something_else_was_got(monkeypatch, capfd, tmp_path, ok, code):
    rows, wishes = [{'setting': 'threads', 'asked': 2, 'got': 2, 'ok': ok, 'note': ''}], []
    monkeypatch.setattr(configure, 'verify', lambda wish: wishes.append(wish) or rows)
    given = ['--no-xla', '--no-mixed-precision', '--memory-limit', '512', '--threads', '2', '--allocator', 'cuda_malloc_async']
    assert main('configure', '--verify', *given, '--env-file', tmp_path / 'tf.env', '--json') == code
    said = json.loads(capfd.readouterr().out)
    assert wishes == [configure.Wish(2, 512, 'cuda_malloc_async', False, False)] and said['rows'] == rows
    assert 'XTTS_NB_MEMORY_LIMIT=512' in (tmp_path / 'tf.env').read_text() and said['environment']['XTTS_NB_XLA'] == 'false'

@pytest.mark.cpu
def test_configure_without_a_gpu_says_what_it_could_not_set(tmp_path):
    done = xtts_nb('configure', '--memory-limit', '512', '--threads', '1', cwd=tmp_path)
    assert done.code == 0, done.err
    assert 'no GPU is visible' in done.out and 'intra-op threads' in done.out and tree(tmp_path) == {}

@pytest.mark.parametrize('given', [['--allocator', 'malloc'], ['--memory-limit', '0'], ['--threads', 'x']], ids=str)
def test_configure_refuses(capfd, given):
    assert main('configure', *given) == 2
    out, err = capfd.readouterr()
    assert out == '' and err.splitlines()[-1].startswith('xtts-nb: ')


# --- bench switch --------------------------------------------------------------------------------------------------

def test_bench_switch_without_a_cache_makes_one(monkeypatch, capfd, tmp_path):
    seen = {}
    def measure(key, cache, config, rounds, updates, progress, say):
        seen.update(key=key, clips=len(cache), folder=cache.folder, rounds=rounds, updates=updates)
        return {'key': key, 'rows': [{'name': 'false', 'clips_per_s': 1.}], 'verdict': 'none'}
    monkeypatch.setattr(switches, 'bench_switch', measure)
    assert main('bench', 'switch', 'training.enable_xla_compilation', '--rounds', '2', '--updates', '3', '--json') == 0
    assert json.loads(capfd.readouterr().out)['verdict'] == 'none'
    folder = seen.pop('folder')
    assert seen == {'key': 'training.enable_xla_compilation', 'clips': 32, 'rounds': 2, 'updates': 3} and not folder.exists()

@pytest.mark.parametrize('key, words', [('training.enable_xla', 'training.enable_xla_compilation'),
                                        ('data.batch_size', 'is no switch'), ('data.preprocessing_mode', 'bench data')])
def test_bench_switch_refuses_what_is_no_switch(capfd, key, words):
    assert main('bench', 'switch', key) == 2
    out, err = capfd.readouterr()
    assert out == '' and len(err.splitlines()) == 1 and words in err

@pytest.mark.slow
def test_bench_switch_as_a_user_runs_it(prepared, tmp_path):
    given = ['--data', prepared.folder, '--rounds', '2', '--updates', '2', '--record', '--json']
    done = xtts_nb('bench', 'switch', 'training.enable_graph_mode', *given, cwd=tmp_path)
    assert done.code == 0, done.err
    assert [r['name'] for r in done.json['rows']] == ['false', 'true'] and done.json['configured'] is True
    assert len({r['clips'] for r in done.json['rows']}) == 1 and len(list((tmp_path / 'benchmarks').iterdir())) == 1
