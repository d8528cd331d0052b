"The commands that watch and measure: exit codes, one JSON object, one sentence."
import json
import re
import time
from contextlib import nullcontext
from pathlib import PosixPath
from types import SimpleNamespace

import pytest

from process import check_bounds, main, tree, xtts_nb
from xtts_nb.app import check, check as configure, cli
from xtts_nb.bench import device_name
from xtts_nb.config import XTTSConfig
from xtts_nb.app.check import Need
from xtts_nb.monitor.preflight import Obstacle

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

def test_monitor(ran, behind):
    summary = {'devices': {}, 'samples': 3, 'seconds': 2., 'gaps': 0, 'interrupted': False}
    asked = behind('monitor.live.monitor', summary)
    done = ran('monitor')
    assert (done.code, done.out) == (0, '3 samples over 2.0 s.\n')
    assert ran('monitor --duration 0 --interval 0.5 --log-file a.csv --log --json').json == summary
    ran('monitor --log')
    assert all(call.pop('console').stderr for call in asked)
    assert re.fullmatch(r'monitor-\d{8}-\d{6}\.jsonl', text(asked[2].pop('log_file')))
    assert [{k: text(v) for k, v in call.items()} for call in asked] == [
        {'duration': None, 'interval': '1.0', 'log_file': None},
        {'duration': 0., 'interval': '0.5', 'log_file': 'a.csv'}, {'duration': None, 'interval': '1.0'}]
    summary['interrupted'] = True
    done = ran('monitor --json')
    assert done.code == 130 and done.json == summary


# --- profile ------------------------------------------------------------------------------------------------

@pytest.fixture
def home(tmp_path, monkeypatch):
    "A working directory of its own, with a file of settings."
    (tmp_path / 'settings.ini').write_text('[workspace]\n')
    (tmp_path / 'f.yaml').write_text('data: {buckets: 2}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path

def test_profile(ran, behind, bars, home):
    made = TINY.replace(data={'buckets': 5}, training={'precision': 'bfloat16'})
    read = []
    cache = SimpleNamespace(config=made, tokenizer=SimpleNamespace(start=9), read=read.append)
    behind('data.cache.Cache', cache)
    behind('data.native.cached_batches', ['first', 'second'])
    plans, drawn = behind('data.native.BatchPlan', 'the plan'), behind('train.step.random_batch', 'made up')
    gpts, updates = behind('models.gpt.GPT', 'the GPT'), behind('train.step.Update', 'the update')
    def look(**call):
        call['tell']('forward')
        return {'step_ms': 3.}
    looked, pages = behind('train.profile.profile', look), behind('train.profile.write_page',
                                                                  lambda result, path: path)
    behind('train.profile.profile_text', 'THE STEP')
    page, config = home / 'runs' / 'profile' / 'profile.html', TINY.replace(data={'buckets': 2})
    assert ran('profile').out == f'THE STEP\nThe page: {page}\n'
    assert ran('profile --data c --out o --rounds 2 --json').json == {'step_ms': 3., 'page': 'o/profile.html'}
    assert json.loads((home / 'o' / 'profile.json').read_text()) == {'step_ms': 3.}
    ran('profile --data c --preset tiny')
    ran('profile --config f.yaml')
    ran('profile --preset xtts_v2')
    assert bars == [('start', {}), ('forward', 0, 1)] * 5
    assert [str(c['path']) for c in pages[:2]] == [str(page), 'o/profile.html']
    assert [(c['config'], c['text_start'], c['kwargs']['dtype']) for c in gpts] == [
        (TINY, 1, 'float32'), (made, 9, 'mixed_bfloat16'), (TINY, 9, 'float32'), (config, 1, 'float32'),
        (XTTSConfig.xtts_v2(), 1, 'float32')]
    assert [c['data'] for c in plans] == [made.data, TINY.data] and read == [made.data.ram_budget] * 2
    assert updates[0] == {'gpt': 'the GPT', 'training': TINY.training}
    gpt = XTTSConfig.xtts_v2().model.gpt
    half = min(gpt.max_text_tokens, XTTSConfig.xtts_v2().data.max_text_tokens) // 2, gpt.max_audio_codes // 2
    assert len(drawn) == 3 and isinstance(drawn[2]['text'], int)
    assert (drawn[2]['text'], drawn[2]['codes']) == half
    assert [(c['batch'], c['batches'], str(c['folder']), c['rounds']) for c in looked[:2]] == [
        ('made up', None, str(page.parent / 'trace'), 7), ('first', ['first', 'second'], 'o/trace', 2)]
    assert looked[1]['training'] == made.training and looked[1]['update'] == 'the update'

def test_profile_of_two_devices_and_its_trace(ran, behind, bars, home, monkeypatch):
    found = {'rows': [{'name': 'host'}], 'verdict': 'THE VERDICT', 'picture': 'dual.png'}
    asked = behind('train.profile.profile_dual', found)
    done = ran('profile --dual')
    assert done.code == 2 and done.said == [
        'xtts-nb: profile --dual: needs a runtime cache; name it with --data CACHE.'] and not asked
    lines = ran('profile --dual --data b').out.split()
    assert lines[:3] == ['Who', 'worked', 'when'] and 'host' in lines
    assert lines[-5:] == ['THE', 'VERDICT', 'The', 'picture:', 'dual.png']
    assert ran('profile --dual --data c --out a/b --json').json == found and (home / 'a' / 'b').is_dir()
    assert ran('profile --dual --data c --out a/b').code == 0
    assert [(text(c['data']), str(c['out']), c['devices'] and c['devices'].line) for c in asked[:2]] == [
        ('b', str(home / 'runs' / 'profile' / 'dual.png'), 'Two cards.'), ('c', 'a/b/dual.png', 'Two cards.')]
    assert bars == [('start', {'two': True})] * 3
    assert ran('profile --dual --preset tiny --config f.yaml --rounds 2 --tensorboard').err == (
        'xtts-nb: profile --dual: does not use --preset, --config, --rounds, --tensorboard; leave it out.\n')
    assert len(asked) == 3
    def sleep(seconds): raise KeyboardInterrupt
    behind('app.cli._profile', ({}, ''))
    shown = behind('train.profile.TensorBoard', nullcontext(SimpleNamespace(url='http://here')))
    monkeypatch.setattr(time, 'sleep', sleep)
    done = ran('profile --tensorboard')
    assert done.code == 130 and 'http://here#profile shows the trace' in done.err and len(shown) == 1


# --- diagnose and quick-fix ---------------------------------------------------------------------------------

@pytest.fixture
def cache(behind):
    "The cache that is measured on."
    cache = SimpleNamespace(folder='my/cache', config=TINY.replace(data={'buckets': 3}))
    cache.asked = behind('app.check.cache_for', nullcontext(cache))
    return cache

def test_diagnose(ran, behind, bars, home, cache):
    verdict = SimpleNamespace(to_dict=lambda: {'findings': []}, lines=lambda: ['THE VERDICT'])
    examined, trained = behind('monitor.diagnose.diagnose', verdict), behind('app.check.training',
                                                                             ('data', 'step'))
    needs = [Need('disk', True, '9 GiB')]
    needed = behind('app.check.prerequisites', lambda **call: needs)
    fixed = behind('app.check.quick_fix',
                   lambda out, **call: {'diagnosis': {'findings': [1]}, 'changes': ['data.buckets: 3 -> 4'],
                                        'verified_gain': 1.5, 'verified': True, 'train': f'TRAIN {out}'})
    assert ran('diagnose').out == 'THE VERDICT\n' and ran('diagnose --json').json == {'findings': []}
    assert not fixed and not needed and bars == [('start', {})] * 2
    done = ran('diagnose --config f.yaml --data c --batch-size 5 --num-batches 9 --seconds 16 --apply')
    assert done.out == 'data.buckets: 3 -> 4\nMeasured once more: 1.50 x.\nTRAIN None\n'
    assert done.err == 'ok   disk: 9 GiB\n'
    asked = ran('diagnose --apply --change-learning --out o.yaml --json').json
    assert asked == {'findings': [1], 'changes': ['data.buckets: 3 -> 4'], 'verified_gain': 1.5,
                     'verified': True, 'train': 'TRAIN o.yaml', 'prerequisites': [vars(n) for n in needs]}
    own = XTTSConfig().replace(data={'buckets': 2, 'batch_size': 5})
    assert [[c[n] for n in ('config', 'out', 'batches', 'seconds', 'change_learning')] for c in fixed] == [
        [own, None, 9, 16., False], [cache.config, PosixPath('o.yaml'), 50, 40., True]]
    assert [c['config'] for c in trained] == [cache.config] * 2
    assert [(c['batches'], c['seconds']) for c in examined] == [(50, 40.)] * 2
    assert [(text(c['data']), c['config']) for c in cache.asked[1:3]] == [
        (None, None), ('c', XTTSConfig().replace(data={'buckets': 2}))]
    assert 'give both' in ran('diagnose --out o.yaml').err
    needs.append(Need('cache', False, 'is gone'))
    assert ran('diagnose --apply').said == ['xtts-nb: diagnose: cache: is gone']
    assert ran('diagnose --config none.yaml').code == 2 and len(fixed) == 2

def test_quick_fix(ran, behind, bars, home, cache):
    needs = [Need('disk', True, '9 GiB'), Need('memory', True, '8 GiB')]
    needed = behind('app.check.prerequisites', lambda **call: needs)
    train, changes = 'xtts-nb train --data my/cache', ['data.buckets: 3 -> 4']
    fixed = behind('app.check.quick_fix',
                   lambda out, seconds, **call: {'diagnosis': {}, 'changes': changes, 'verified_gain': 1.234,
                                        'verified': seconds > 20,
                                        'train': f'{train} --config {out}'})
    done = ran('quick-fix')
    assert done.out == ('fixed.yaml: data.buckets: 3 -> 4\nMeasured once more: 1.23 x.\n'
                        'xtts-nb train --data CACHE --config fixed.yaml\n')
    assert done.err == 'ok   disk: 9 GiB\nok   memory: 8 GiB\n' and bars == [('start', {})]
    more = '--config f.yaml --data c --out o.yaml --batch-size 5 --num-batches 9 --seconds 16 --json'
    assert ran(f'quick-fix {more}').json == {'diagnosis': {}, 'changes': changes, 'verified_gain': 1.234,
                                             'verified': False,
                                             'train': f'{train} --config o.yaml',
                                             'prerequisites': [vars(need) for need in needs]}
    assert [(c['config'], text(c['out']), c['batches'], c['seconds']) for c in fixed[:2]] == [
        (cache.config, 'fixed.yaml', 24, 40.),
        (XTTSConfig().replace(data={'buckets': 2, 'batch_size': 5}), 'o.yaml', 9, 16.)]
    assert [{k: text(v) for k, v in call.items()} for call in needed[:2]] == [
        {'data': None, 'config': None}, {'data': 'c', 'config': 'f.yaml'}]
    unclear = ran('quick-fix --seconds 9 --change-learning').out
    assert '\nMeasured once more: 1.23 x, which is not clearly faster.\n' in unclear
    assert [c['change_learning'] for c in fixed] == [False, False, True]
    changes.clear()
    assert ran('quick-fix').out == 'Nothing was changed.\nxtts-nb train --data CACHE --config fixed.yaml\n'
    needs.append(Need('cache', False, 'is gone'))
    done = ran('quick-fix')
    assert (done.code, done.said) == (2, ['xtts-nb: quick-fix: cache: is gone']) and 'FAIL cache' in done.err
    assert len(fixed) == 4

def test_bench_diagnose(ran, behind):
    found, rows = [{'case': 'all of it'}], [{'case': 'a case'}]
    asked, kept = behind('benchmarks.diagnosis.ward.score.score_cases', found), behind('app.cli.write_record')
    shown = behind('benchmarks.diagnosis.ward.score.published', rows)
    behind('benchmarks.diagnosis.ward.score.totals', {'scored': 3})
    behind('benchmarks.diagnosis.ward.score.total_lines', ['THE', 'TOTAL'])
    words = [w for w in ran('bench diagnose').out.split() if w.isalpha()]
    assert words == 'Diagnosed programs case a case THE TOTAL'.split() and not kept
    line = 'bench diagnose one two --half scored --repeat 3 --out f.jsonl --record --json'
    assert ran(line).json == {'rows': rows, 'scored': 3}
    assert kept == [{'page': 'ward', 'rows': rows, 'notes': {'scored': 3}}]
    assert [c['rows'] for c in shown] == [found] * 2
    keys = 'names', 'half', 'repeat', 'out'
    assert [tuple(c[k] for k in keys) for c in asked] == [
        (None, None, 1, None), (['one', 'two'], 'scored', 3, PosixPath('f.jsonl'))]
    assert all(c['say'] for c in asked)


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

def test_check_in_words(ran, behind, bars, monkeypatch):
    rows, tried = [{'name': 'XLA JIT', 'result': 'SKIPPED', 'reason': 'why'}], []
    behind('app.check.StepTrial', lambda config: config)
    monkeypatch.setattr(check, 'run_checks', lambda *given: tried.append(given[:2])
                        or given[2](1, 5, 'XLA JIT') or rows)
    one = Obstacle('wait', 'If', 'cond', 'a.py:3', 2, 9, 'leave it out')
    ahead = [{'program': 'speech'} | one.to_dict()]
    looked = behind('app.check.preflight_rows', ahead)
    first, empty, head, last = ran('check').out.splitlines()
    assert (first, empty) == ('XLA JIT .................... SKIPPED why', '')
    assert head.startswith('What a GPU would find hard here')
    assert last == f'speech: {one.line}'
    assert ran('check --preset xtts_v2 --json').json == {
        'checks': rows, 'passed': 0, 'failed': 0, 'skipped': 1, 'device': device_name(), 'preflight': ahead}
    assert [c['trial'] for c in looked] == [TINY, XTTSConfig.xtts_v2()]
    assert tried == [(TINY, 0.), (XTTSConfig.xtts_v2(), 0.)]
    assert bars == [('start', {}), ('check', 1, 5, 'XLA JIT')] * 2

def test_a_report_is_printed_or_written_once(ran, behind, bars, tmp_path):
    behind('app.check.StepTrial', lambda config: config)
    parts = {'machine': {'Python': '3'}, 'before_after': [{'name': 'eager', 'clips_per_s': 4., 'ratio': 1.}],
             'run_checks': [{'name': 'a', 'result': 'PASSED', 'reason': 'x'}], 'preflight_rows': [],
             'own_records': ['r.json']}
    asked = {name: behind(f'app.check.{name}', value) for name, value in parts.items()}
    text, result = check.machine_report(*parts.values()), dict(zip(
        ('machine', 'step', 'checks', 'preflight', 'records'), parts.values()))
    assert ran('report').out == f'{text}\n'
    assert [c['seconds'] for c in asked['before_after']] == [5.] and asked['before_after'][0]['trial'] == TINY
    out = tmp_path / 'report.md'
    done = ran(f'report --out {out} --seconds 0.5 --preset xtts_v2 --json')
    assert done.json == result | {'out': str(out)} and out.read_text() == f'{text}\n'
    assert asked['before_after'][1] == {'trial': XTTSConfig.xtts_v2(), 'seconds': .5}
    done = ran(f'report --out {out}')
    assert done.code == 2 and f'{out}: exists already' in done.err and len(asked['machine']) == 2

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

def test_configure_in_words(ran, behind, tmp_path):
    rows = [{'setting': 'threads', 'asked': 2, 'got': 2, 'ok': True, 'note': ''}]
    asked, line = behind('app.check.configure', rows), f'threads  {2:>18} -> 2\n'
    assert ran('configure').out == f'{line}For a child process: xtts-nb configure --env-file FILE\n'
    file = tmp_path / 'e'
    assert ran(f'configure --env-file {file}').out == f'{line}set -a; . {file}; set +a; xtts-nb train ...\n'
    said = ran(f'configure --env-file {file} --json').json
    assert said == {'rows': rows, 'environment': configure.environment(configure.TFSettings()),
                    'env_file': str(file)}
    assert ran('configure --json').json['env_file'] is None
    assert cli._sourced('tf.env') == './tf.env'   # a shell looks up a bare name in PATH
    assert asked == [{'threads': None, 'memory_limit': None, 'allocator': 'bfc', 'xla': True,
                      'mixed_precision': True}] * 4

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
