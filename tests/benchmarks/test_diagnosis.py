"Slow programs that the diagnosis is measured on: each is complete and as described; how answers are counted."
import ast
import itertools
import json
import re
from collections import Counter

import numpy as np
import pytest

from benchmarks.diagnosis.causes import training_totals, TRAININGS, run_trainings
from benchmarks.diagnosis.programs import score
from benchmarks.diagnosis.programs.cases import Case, cases, FOLDER, half_of, HALVES, KINDS, WAYS
from benchmarks.diagnosis.programs.score import judge, totals
from process import xtts_nb
from xtts_nb.config import setup_tf
from xtts_nb.monitor.watch import Watch

setup_tf(threads=2)
ALL = cases()
SICK = [c for c in ALL if not c.healthy]
BY_NAME = {p.name: p for p in TRAININGS}

# --- programs that others reported --------------------------------------------------------------------------

def test_the_set_is_whole():
    "A folder for each case, both halves large enough, each kind and way of training, no source twice."
    folders = {f.name for f in FOLDER.iterdir() if f.is_dir() and f.name != '__pycache__'}
    assert folders == {c.name for c in ALL}
    for half in HALVES:
        found = Counter(c.healthy for c in cases(half))
        assert found[False] >= 18 and found[True] >= 6, half
    assert half_of('a') == 'development' and half_of('b') == 'scored'   # their SHA-256 begin with c and 3
    assert {c.kind for c in SICK} == set(KINDS) and {c.way for c in SICK} == set(WAYS)
    assert not [s for s, n in Counter(c.source for c in ALL).items() if n > 1]
    measured = json.loads((FOLDER / 'scored.json').read_text(encoding='utf-8'))
    assert set(measured) == {c.name for c in cases('scored') if not c.healthy and not c.gpu_only}
    assert min(measured.values()) >= 1.3

@pytest.mark.parametrize('case', ALL, ids=lambda c: c.name)
def test_a_case_is_complete_and_its_programs_need_nothing_else(case: Case):
    ill = case.cause, case.place, case.fix, case.way, case.kind, case.named, case.led
    well = case.why_healthy, case.looks_like
    assert case.title and case.checked and re.match(r'https://\S+$', case.source)
    assert all(well) and not any(ill) if case.healthy else all(ill) and not any(well)
    texts = [script.read_text(encoding='utf-8') for script in case.scripts]
    if not case.healthy:
        assert case.place in [line.strip() for line in texts[0].splitlines()] and texts[0] != texts[1]
        for expression in case.named + case.led:
            for empty in ('input-bound', 'Python in the step'): assert not re.search(expression, empty, re.I)
    for text in texts:
        tree = ast.parse(text)
        modules = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        modules += [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        assert {*modules} <= {'json', 'math', 'random', 'tempfile', 'time', 'pathlib', 'keras', 'numpy',
                              'tensorflow'}
        assert text.rstrip().splitlines()[-1].startswith('print(json.dumps({"items": ')

# --- how answers are judged and counted ---------------------------------------------------------------------

SLOW = Case('slow', 'One', 'a', 'read', cause='c', place='p', fix='c', way='fit', kind='serial map',
            named=('no parallel', ), led=('num_parallel_calls', ))
WELL = Case('well', 'Two', 'b', 'read', why_healthy='w', looks_like='l')   # of the scored half

def finding(cause='busy', evidence='-', fix='-', change='', gain=2., measured=False):
    return dict(cause=cause, evidence=evidence, fix=fix, change=change, place='a.py:1',
                gain=gain, measured=measured)

def said(*findings, **more): return {'findings': [*findings], 'notes': [], 'seconds': 9.} | more

@pytest.mark.parametrize('findings, named, led', [
    ([finding('No Parallel calls')], 1, None), ([finding(evidence='has no parallel calls')], 1, None),
    ([finding(), finding('no parallel')], 2, None),
    ([finding(), finding(), finding('no parallel')], None, None),
    ([finding(fix='no parallel')], None, None), ([finding('num_parallel_calls')], None, None),
    ([finding(fix='num_parallel_calls=8')], None, 1),
    ([finding('no parallel'), finding(change='map(f, num_parallel_calls=8)')], 1, 2), ([], None, None)])
def test_a_cause_is_named_and_a_fix_led_to_by_the_first_two(findings, named, led):
    row = judge(SLOW, said(*findings))
    assert (row['named'], row['led'], row['half'], row['kind']) == (named, led, 'development', 'serial map')
    assert 'gain' not in row

@pytest.mark.parametrize('ratio, measured, holds', [
    (2.6, True, True), (2.61, True, False), (1.5, True, False), (2.2, False, True), (2.21, False, False),
    (1.1, False, True)])
def test_a_gain_is_that_of_the_finding_that_names_the_cause(ratio, measured, holds):
    row = judge(SLOW, said(finding(gain=50.), finding('no parallel', measured=measured)), ratio)
    assert (row['gain'], row['tried'], row['holds']) == (2., measured, holds)
    assert 'gain' not in judge(SLOW, said(finding()), ratio)

def test_each_half_is_counted_by_itself():
    right, fell = finding('no parallel'), {'error': 'fell', 'seconds': 30.}
    rows = [judge(SLOW, said(finding(), right), 2.), judge(SLOW, said(right)), judge(SLOW, fell),
            judge(WELL, said()), judge(WELL, said(finding()))]
    found = totals(rows)
    assert found['development'] == {
        'slow': 3, 'named': 2, 'named_first': 1, 'led': 0, 'healthy': 0, 'false_alarms': 0, 'tried': 0,
        'within_30_percent': 0, 'at_most': 1, 'held': 1, 'errors': 1, 'longest_seconds': 30.}
    assert found['scored'] == dict.fromkeys(found['scored'], 0) | {
        'healthy': 2, 'false_alarms': 1, 'longest_seconds': 9.}

def test_what_is_published_hides_the_scored_half():
    rows = [judge(SLOW, said(finding('no parallel')), 2.), judge(WELL, said(finding('a secret')))]
    shown = score.published(rows)
    assert shown[0]['first'] == 'no parallel' and 'secret' not in json.dumps(shown)

@pytest.mark.slow
def test_a_case_is_diagnosed_as_its_user_would():
    "By the command itself, in processes of its own."
    name = 'count_as_argument'
    done = xtts_nb('bench', 'diagnose', name, '--json')
    assert done.code == 0, done.err
    (row,) = done.json['rows']
    assert row['named'] == 1 and row['led'] == 1 and row['seconds'] > 0
    assert row['measured'] > 1.3   # the fixed program is faster
    assert row['case'] == name and done.json['development']['named'] == 1

# --- programs with a cause that was planted -----------------------------------------------------------------

def first(data, batches=1): return list(itertools.islice(data, batches))

@pytest.mark.slow
@pytest.mark.parametrize('name, batches', [
    ('slow disk', 1), ('oversubscription', 1), ('real: numpy_function', 2), ('real: no prefetch', 1),
    ('real: input-bound', 1), ('real: many small files', 2)])
def test_both_pipelines_deliver_the_same(name, batches):
    slow, fixed = (first(variant()[0], batches) for variant in (BY_NAME[name].slow, BY_NAME[name].fixed))
    np.testing.assert_allclose(slow, fixed, rtol=1e-6)
    assert len(slow) == batches

def watched(variant, times=3):
    "What the later ones of some steps did, and all results."
    data, step = variant()
    (batch,) = first(data)
    notes, results = [], []
    for _ in range(times):
        with Watch() as watch: result = step(batch)
        notes.append(watch)
        results.append(float(result))
    return notes[1:], results

@pytest.mark.slow
@pytest.mark.parametrize('name, what, before, after', [
    ('real: retracing', lambda i: sum(e.traced for e in i.events), 1, 0),
    ('real: host sync per step', lambda i: sum(e.kind == 'fetch' for e in i.events), 1, 0),
    ('real: device copy in step', lambda i: sum(e.rows for e in i.events if e.kind == 'fetch'), 2**20, 0),
    ('real: step not compiled', lambda i: len(i.functions), 0, 1),
    ('real: variable shapes', lambda i: len(i.functions), 1, 1)])
def test_a_fix_takes_the_cause_away_and_keeps_the_results(name, what, before, after):
    training = BY_NAME[name]
    slow, results = watched(training.slow)
    fixed, same = watched(training.fixed)
    assert [*map(what, slow)] == [before] * 2 and [*map(what, fixed)] == [after] * 2
    assert results == pytest.approx(same, rel=1e-3,
                                    abs=1e-2 if name == 'real: device copy in step' else 1e-12)
    if name == 'real: variable shapes':
        assert all(f._jit_compile for i in slow for f in i.functions.values())
        assert results == pytest.approx([64.] * 3)
    if name.endswith('retracing'): assert len(set(results)) == 3   # the number of the step is used

def test_trainings_are_counted():
    row = dict(kind='real', right=True, measured=2., true=True)
    rows = [row, row | {'right': False, 'true': False}, row | {'kind': 'emulated', 'true': None},
            row | {'measured': None}, row | {'measured': None, 'right': False}]
    assert training_totals(rows) == {'emulated': {'slow': 1, 'named': 1, 'predicted': 0},
                                    'real': {'slow': 2, 'named': 1, 'predicted': 1},
                                    'healthy': 2, 'left_alone': 1}

@pytest.mark.slow
@pytest.mark.alone
def test_trainings_that_compute_and_healthy_ones():
    """What helps on this machine is named, and what has no cause is left alone; the script records the gains.

    How many fixes help depends on the machine, so one of them is enough here."""
    rows = run_trainings([p for p in TRAININGS if p.kind == 'real' or p.cause is None], seconds=12.)
    slow, healthy = ([row for row in rows if (row['measured'] is None) == well] for well in (False, True))
    helped = [row for row in slow if row['measured'] > 1.3]
    assert len(slow) == 12 and helped and len(healthy) == 3, rows
    assert not [row for row in (*helped, *healthy) if not row['right']]
