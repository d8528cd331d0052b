"The commands that watch and measure: exit codes, one JSON object, one sentence."
import json

import pytest

from process import check_bounds, main, tree, xtts_nb
from xtts_nb.app import check, check as configure
from xtts_nb.config import XTTSConfig

TINY = XTTSConfig.tiny()

def text(value): return value and str(value)


def test_bounds():
    check_bounds(('monitor --duration', 0, -1), ('monitor --interval', 0.01, 0.009),
                 ('profile --rounds', 1, 0),
                 ('diagnose --batch-size', 1, 0), ('diagnose --num-batches', 8, 7),
                 ('diagnose --seconds', 1, 0.9),
                 ('configure --threads', 1, 0), ('configure --memory-limit', 1, 0),
                 ('check --stress-duration', 0, -1), ('report --seconds', 0.1, 0))


# --- monitor ------------------------------------------------------------------------------------------------

# --- profile ------------------------------------------------------------------------------------------------

# --- diagnose and quick-fix ---------------------------------------------------------------------------------

# --- check --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('result, code', [('PASSED', 0), ('SKIPPED', 0), ('FAILED', 1)])
def test_check_ends_with_1_where_one_failed(monkeypatch, capfd, result, code):
    rows = [{'name': 'a', 'result': 'PASSED', 'reason': 'x'}, {'name': 'b', 'result': result, 'reason': 'y'}]
    asked = []
    monkeypatch.setattr(check, 'run_checks', lambda trial, seconds, tell: asked.append(seconds) or rows)
    monkeypatch.setattr(check, 'preflight_rows', lambda trial: [])
    assert main('check', '--json', '--stress-duration', '2.5') == code and asked == [2.5]
    said = json.loads(capfd.readouterr().out)
    assert said['checks'] == rows and said[result.lower()] == 1 + (result == 'PASSED') and said['device']

@pytest.mark.slow
def test_a_report_as_a_user_writes_it(tmp_path):
    done = xtts_nb('report', '--seconds', '0.1', '--out', tmp_path / 'report.md')
    assert done.code == 0 and 'paste it' in done.out, done.err
    text = (tmp_path / 'report.md').read_text()
    assert [line for line in text.splitlines() if line.startswith('## ')] == [
        '## Machine', '## The training step', '## Checks', '## Records of this machine']
    assert 'FAILED' not in text and '| tensorflow |' in text and '- compiled: ' in text

@pytest.mark.slow
def test_check_as_a_user_runs_it():
    done = xtts_nb('check', '--stress-duration', '1', '--json')
    assert done.code == 0 and done.json['failed'] == 0
    assert [r['name'] for r in done.json['checks']] == [*check.CHECKS, 'Stress']
    ahead = done.json['preflight']
    assert {row['program'] for row in ahead} == {'step', 'data', 'speech'}
    assert {row['kind'] for row in ahead} == {'float32 product', 'layout'}


# --- configure ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize('ok, code', [(True, 0), (None, 0), (False, 1)])
def test_configure_ends_with_1_where_something_else_was_got(monkeypatch, capfd, tmp_path, ok, code):
    rows, wishes = [{'setting': 'threads', 'asked': 2, 'got': 2, 'ok': ok, 'note': ''}], []
    monkeypatch.setattr(configure, 'verify_settings', lambda wish: wishes.append(wish) or rows)
    given = ['--no-xla', '--no-mixed-precision', '--memory-limit', '512', '--threads', '2', '--allocator',
             'cuda_malloc_async']
    assert main('configure', '--verify', *given, '--env-file', tmp_path / 'tf.env', '--json') == code
    said = json.loads(capfd.readouterr().out)
    assert wishes == [configure.TFSettings(2, 512, 'cuda_malloc_async', False, False)]
    assert said['rows'] == rows
    assert 'XTTS_NB_MEMORY_LIMIT=512' in (tmp_path / 'tf.env').read_text()
    assert said['environment']['XTTS_NB_XLA'] == 'false'

@pytest.mark.cpu
def test_configure_without_a_gpu_says_what_it_could_not_set(tmp_path):
    done = xtts_nb('configure', '--memory-limit', '512', '--threads', '1', cwd=tmp_path)
    assert done.code == 0, done.err
    assert 'no GPU is visible' in done.out and 'intra-op threads' in done.out and tree(tmp_path) == {}

@pytest.mark.parametrize('given', [['--allocator', 'malloc'], ['--memory-limit', '0'], ['--threads', 'x']],
                         ids=str)
def test_configure_refuses(capfd, given):
    assert main('configure', *given) == 2
    out, err = capfd.readouterr()
    assert out == '' and err.splitlines()[-1].startswith('xtts-nb: ')
