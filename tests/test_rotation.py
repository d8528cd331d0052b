"The part of the slow tests that a commit selects: all have their turn, and a lack of time is no failure."
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / 'dev'))
import rotation  # noqa: E402


def commits(n): return [hashlib.sha1(str(i).encode()).hexdigest() for i in range(n)]


def test_every_unit_is_in_one_part_and_parts_are_about_as_long():
    units, seconds = [f'u{i}' for i in range(41)], {f'u{i}': 1. + i for i in range(30)}
    parts = rotation.deal(units, seconds)
    assert Counter(sum(parts, [])) == Counter(units) and len(parts) == rotation.PARTS
    lengths = [sum(seconds.get(u, rotation.UNKNOWN) for u in part) for part in parts]
    assert max(lengths) - min(lengths) <= 30
    assert rotation.deal(units[::-1], seconds) == parts, 'the order of collection does not matter'


def test_every_part_is_chosen_within_a_few_commits_and_each_begins_elsewhere():
    chosen = Counter(map(rotation.choose, commits(400)))
    assert len(chosen) == rotation.PARTS and min(chosen.values()) > 400 / rotation.PARTS / 2
    names = list('abcdefg')
    turned = [rotation.turn(names, commit) for commit in commits(60)]
    assert {t[0] for t in turned} == {*names} and all(sorted(t) == names for t in turned)
    assert rotation.turn([], commits(1)[0]) == []


def test_the_pages_are_those_with_a_slow_cell(tmp_path):
    (tmp_path / 'nbs').mkdir()
    for name, source in (('a', '#| slow\n1'), ('b', '#| export\n#| slow\n1'), ('c', '1  # slow'),
                         ('d', '"#| slower"')):
        page = {'cells': [{'source': source.splitlines(True)}]}
        (tmp_path / f'nbs/{name}.ipynb').write_text(json.dumps(page))
    assert rotation.slow_pages(tmp_path) == ['nbs/a.ipynb', 'nbs/b.ipynb']


TESTS = '''
import pytest
@pytest.mark.slow
@pytest.mark.parametrize('i', range(3))
def test_a(i): pass
@pytest.mark.slow
def test_b(): pass
@pytest.mark.slow
def test_c(): assert {good}
def test_quick(): assert False
'''


def part(folder, commit, good=True, until='inf', workers=0) -> subprocess.CompletedProcess:
    "pytest over a file of tests, as `run_tests` starts it."
    (folder / 'test_it.py').write_text(TESTS.format(good=good))
    (folder / 'pytest.ini').write_text('[pytest]\nmarkers =\n  slow: long\n  gpu: card\n')
    env = os.environ | {'PYTHONPATH': str(ROOT / 'dev'), 'ROTATION_COMMIT': commit,
                        'ROTATION_UNTIL': str(until)}
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'rotation', '-p', 'no:cacheprovider', '-n',
               str(workers), '-m', 'slow and not gpu', '-rp']
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def passed(done) -> set:
    return {line.partition('::')[2] for line in done.stdout.splitlines() if line.startswith('PASSED ')}


def test_the_parts_together_are_all_that_is_slow(tmp_path):
    some = {rotation.choose(c): c for c in commits(30)}
    done = [part(tmp_path, some[i]) for i in range(rotation.PARTS)]
    assert [d.returncode for d in done] == [0] * rotation.PARTS, [d.stdout for d in done]
    names = sorted(n for d in done for n in passed(d))
    assert names == ['test_a[0]', 'test_a[1]', 'test_a[2]', 'test_b', 'test_c']


@pytest.mark.parametrize('until, good, code', [(1e12, False, 1), (0, False, 0)],
                         ids=['a failure', 'no time left'])
def test_a_failure_fails_and_time_that_runs_out_does_not(tmp_path, until, good, code):
    mine = next(i for i, units in enumerate(rotation.deal([f'test_it.py::test_{x}' for x in 'abc'], {}))
                if units[0][-1] == 'c')
    commit = next(c for c in commits(30) if rotation.choose(c) == mine)
    done = part(tmp_path, commit, good, until, workers=2)
    assert done.returncode == code, done.stdout
    assert ('not reached within 9 minutes' in done.stdout) == (until == 0)
    if until: assert 'test_it.py:9' in done.stdout, done.stdout
    else: assert done.stdout.count('test_it.py::test_c') == 1, done.stdout
    assert ' in ' in done.stdout.splitlines()[-1], 'the last line is pytest\'s'


@pytest.mark.slow
def test_the_list_has_pages_and_tests():
    "As the command prints it, without running any."
    done = subprocess.run([sys.executable, ROOT / 'dev/rotation.py', 'list'], capture_output=True, text=True)
    units = {line.strip() for line in done.stdout.splitlines() if line.startswith('  ')}
    assert {'nbs/50_monitoring.ipynb', 'tests/monitor/test_patients.py::test_all_patients'} <= units
    assert not {u for u in units if u.endswith(']')}


def test_a_page_that_does_not_fit_is_not_begun(monkeypatch):
    monkeypatch.setattr(subprocess, 'run', lambda *a, **k: pytest.fail('it was begun'))
    until = time.time() + rotation.UNKNOWN / 2
    assert rotation.run_page('nbs/no-such-page.ipynb', until) == ('not reached', 0.)


@pytest.mark.parametrize('code, seconds, expected',
                         [('raise SystemExit(3)', 60., 3), ('raise SystemExit(3)', None, 3),
                          ('import time; print(time.time()); time.sleep(60)', 1., 0)])
def test_tests_that_take_too_long_are_ended_and_are_no_failure(capfd, code, seconds, expected):
    begun = time.time()
    assert rotation.ended([sys.executable, '-c', code], seconds) == expected and time.time() < begun + 50
    assert ('did not finish' in capfd.readouterr().out) == (seconds == 1.)
