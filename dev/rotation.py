"""Run a part of the slow pages and tests, so that CI runs all within a few commits: pages first, then tests.

    python dev/rotation.py             the part that the commit selects, in 10 minutes at most
    python dev/rotation.py list        every part
    python dev/rotation.py measure     all of them; their seconds are written to dev/rotation.json

What does not fit into the time is listed and is no failure. A unit is a page with cells `#| slow`, or a test
function marked `slow` with all its cases. pytest loads this file as a plugin too."""
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tree import ROOT, notebooks

PARTS, MINUTES, WORKERS = 5, 9., 2
PAGE_SHARE = 0.4                  # of the minutes
UNKNOWN = 20.                     # seconds of a unit that was not measured yet
GRACE = 50.                       # seconds after the minutes, until what still runs is ended
SECONDS = ROOT / 'dev/rotation.json'


# ---- dealing

def measured() -> dict[str, float]:
    "Seconds of each unit that was measured."
    return json.loads(SECONDS.read_text()) if SECONDS.exists() else {}


def deal(
    units: list[str],
    seconds: dict[str, float],   # of each unit
    parts: int = PARTS,
) -> list[list[str]]:
    "Parts of about the same length: the longest unit first, each to the part that is shortest so far."
    dealt, sums = [[] for _ in range(parts)], [0.] * parts
    for unit in sorted(units, key=lambda u: (-seconds.get(u, UNKNOWN), u)):
        i = sums.index(min(sums))
        dealt[i].append(unit)
        sums[i] += seconds.get(unit, UNKNOWN)
    return dealt


def choose(
    commit: str,   # its hash
    parts: int = PARTS,
) -> int:
    "The part that a commit selects."
    return int(commit[:8], 16) % parts


def turn(
    names: list[str],
    commit: str,
) -> list[str]:
    "The names, rotated by the commit, so that the last ones of a part that is too long sometimes come first."
    start = int(commit[8:16], 16) % max(1, len(names))
    return names[start:] + names[:start]


def this_commit() -> str:
    "The hash of the checkout; zeros where git tells none."
    done = subprocess.run(['git', 'rev-parse', 'HEAD'], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or '0' * 40


# ---- pages

def slow_pages(root: Path = ROOT) -> list[str]:
    "The pages with a cell that `nbdev-test` leaves out unless `slow` is asked for."
    def slow(path: Path) -> bool:
        cells = json.loads(path.read_text(encoding='utf-8'))['cells']
        heads = (line for c in cells for line in ''.join(c['source']).split('\n') if line.startswith('#|'))
        return any(line.split()[1:] == ['slow'] for line in heads)
    return [p.relative_to(root).as_posix() for p in notebooks(root) if slow(p)]


def run_page(
    page: str,
    until: float,    # time.time() at which it is ended
) -> tuple[str, float]:
    "`passed`, `failed` or `not reached`, and the seconds it took."
    begun = time.time()
    if begun + measured().get(page, UNKNOWN) > until: return 'not reached', 0.
    program = Path(sysconfig.get_path('scripts')) / 'nbdev-test'
    try: done = subprocess.run([program, page, '--flags', 'slow cpu'], cwd=ROOT, timeout=until - begun)
    except subprocess.TimeoutExpired: return 'not reached', 0.
    return 'failed' if done.returncode else 'passed', time.time() - begun


def run_pages(
    pages: list[str],
    until: float,
) -> dict[str, tuple[str, float]]:
    "Run the pages, two at a time; prints a line for each and returns how it ended."
    with ThreadPoolExecutor(WORKERS) as pool:
        results = dict(zip(pages, pool.map(lambda page: run_page(page, until), pages)))
    for page, (how, seconds) in results.items(): print(f'{page}: {how}, {seconds:.0f} s', flush=True)
    return results


# ---- tests: the hooks of the plugin

spent, left_out = {}, []   # seconds of each unit; the tests that were not reached
cases = Counter()          # tests of each unit


def unit_of(nodeid: str) -> str:
    "A test function, without its case."
    return nodeid.partition('[')[0]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    "Keep the tests of the part."
    cases.update(unit_of(i.nodeid) for i in items)
    if 'ROTATION_COMMIT' not in os.environ: return
    commit = os.environ['ROTATION_COMMIT']
    mine = set(deal(sorted({unit_of(i.nodeid) for i in items}), measured())[choose(commit)])
    files = turn(sorted({i.nodeid.partition('::')[0] for i in items}), commit)
    config.hook.pytest_deselected(items=[i for i in items if unit_of(i.nodeid) not in mine])
    items[:] = sorted((i for i in items if unit_of(i.nodeid) in mine),
                      key=lambda i: files.index(i.nodeid.partition('::')[0]))


def pytest_runtest_setup(item):
    "Start no test that would not finish in time."
    until = float(os.environ.get('ROTATION_UNTIL', 'inf'))
    unit = unit_of(item.nodeid)
    expected = measured().get(unit, UNKNOWN) / max(1, cases[unit])
    if time.time() + expected > until: pytest.skip('not reached')


def pytest_runtest_logreport(report):
    if report.skipped and 'not reached' in str(report.longrepr): left_out.append(report.nodeid)
    spent[unit_of(report.nodeid)] = spent.get(unit_of(report.nodeid), 0.) + report.duration


def pytest_terminal_summary(terminalreporter):
    if not left_out: return
    terminalreporter.section(f'not reached within {MINUTES:.0f} minutes')
    for nodeid in left_out: terminalreporter.line(nodeid)


def pytest_sessionfinish(session):
    "Store the seconds if requested; a part without a test is no failure."
    if hasattr(session.config, 'workerinput'): return
    if os.environ.get('ROTATION_MEASURE'): keep_seconds(spent)
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED: session.exitstatus = 0


def keep_seconds(new: dict[str, float]):
    "Add to dev/rotation.json what was measured."
    kept = measured() | {unit: round(s, 1) for unit, s in new.items()}
    SECONDS.write_text(json.dumps(dict(sorted(kept.items())), indent=0) + '\n')


# ---- the command

def ended(
    command: list[str],
    seconds: float | None = None,   # after which it is killed with all that it has started
    **settings: str,                # of its environment
) -> int:
    "The exit code of a command; 0 where the time ran out."
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | settings, start_new_session=True)
    try: return process.wait(seconds)
    except subprocess.TimeoutExpired:
        print('\nThe time is over; the tests that were running did not finish.', flush=True)
        return 0
    finally:
        if process.poll() is None: os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_tests(seconds: float | None = None, **settings: str) -> int:
    "The exit code of pytest with this file as a plugin; with a limit of time the first failure ends it."
    path = os.pathsep.join([str(ROOT / 'dev'), os.environ.get('PYTHONPATH', '')]).rstrip(os.pathsep)
    command = [sys.executable, '-m', 'pytest', '-p', 'rotation', '-n', str(WORKERS), '--dist', 'loadfile',
               '-m', 'slow and not gpu', *(['-x'] if seconds else [])]
    return ended(command, seconds, PYTHONPATH=path, **settings)


def run_part(commit: str) -> int:
    "The pages and the tests of a part; the exit code. The last line is pytest's."
    begun, pages = time.time(), deal(slow_pages(), measured())[choose(commit)]
    print(f'== part {choose(commit) + 1} of {PARTS} of what is slow', flush=True)
    results = run_pages(turn(pages, commit), begun + 60 * MINUTES * PAGE_SHARE)
    if any(how == 'failed' for how, _ in results.values()): return 1
    until = begun + 60 * MINUTES
    return run_tests(until + GRACE - time.time(), ROTATION_COMMIT=commit, ROTATION_UNTIL=str(until))


def measure() -> int:
    "Run all slow pages and tests without a time limit; the exit code."
    results = run_pages(slow_pages(), float('inf'))
    keep_seconds({page: seconds for page, (how, seconds) in results.items() if how == 'passed'})
    return run_tests(ROTATION_MEASURE='1')


def slow_tests() -> list[str]:
    "The units among the tests, as pytest collects them."
    command = [sys.executable, '-m', 'pytest', '--collect-only', '-q', '-o', 'addopts=',
               '-m', 'slow and not gpu']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return sorted({unit_of(line) for line in done.stdout.splitlines() if '::' in line})


def show_parts() -> int:
    "Print every part with its seconds."
    pages, tests, seconds = slow_pages(), slow_tests(), measured()
    for i, part in enumerate(map(sum, zip(deal(pages, seconds), deal(tests, seconds)), [[]] * PARTS), 1):
        print(f'part {i} of {PARTS}, about {sum(seconds.get(u, UNKNOWN) for u in part):.0f} s of work')
        for unit in part: print(f'  {unit}')
    return 0


if __name__ == '__main__':
    actions = {(): lambda: run_part(this_commit()), ('list',): show_parts, ('measure',): measure}
    if tuple(sys.argv[1:]) not in actions: sys.exit('usage: python dev/rotation.py [list | measure]')
    sys.exit(actions[tuple(sys.argv[1:])]())
