"The ward of programs that others reported: is each case complete, and do two of them show what they say?"
import ast
import json
import re
from collections import Counter

import pytest

from benchmarks.diagnosis.ward import cases as ward
from benchmarks.diagnosis.ward.cases import HALVES, KINDS, WARD, WAYS, Case, cases, half_of
from benchmarks.diagnosis.ward.run import chosen, measure
from xtts_nb.config import UserError

ALL = cases()
SLOW = [c for c in ALL if not c.healthy]
HEALTHY = [c for c in ALL if c.healthy]
by_name = dict(ids=lambda c: c.name)


def test_each_folder_is_a_case():
    folders = {f.name for f in WARD.iterdir() if f.is_dir() and f.name != '__pycache__'}
    assert folders == {c.name for c in ALL}


def test_both_halves_are_large_enough():
    for half in HALVES:
        found = Counter(c.healthy for c in cases(half))
        assert found[False] >= 18 and found[True] >= 6, half


def test_the_half_follows_from_the_source():
    assert half_of('a') == 'development' and half_of('b') == 'scored'   # their SHA-256 begin with c and 3
    assert sorted(c.name for half in HALVES for c in cases(half)) == [c.name for c in ALL]
    with pytest.raises(UserError, match='both: not a half'): cases('both')
    with pytest.raises(UserError, match='nobody: no such case'): chosen([ALL[0].name, 'nobody'], None)


def test_every_kind_has_a_case(): assert {c.kind for c in SLOW} == set(KINDS)


def test_every_way_to_train_has_a_case(): assert {c.way for c in SLOW} == set(WAYS)


def test_no_source_is_used_twice():
    assert not [s for s, n in Counter(c.source for c in ALL).items() if n > 1]


@pytest.mark.parametrize('case', ALL, **by_name)
def test_case_is_complete(case: Case):
    sick = case.cause, case.place, case.cure, case.way, case.kind, case.named, case.led
    well = case.why_healthy, case.looks_like
    assert case.title and case.checked and re.match(r'https://\S+$', case.source)
    assert all(well) and not any(sick) if case.healthy else all(sick) and not any(well)
    assert {f.name for f in case.folder.iterdir()} - {'__pycache__'} == \
        {'case.json', *(s.name for s in case.scripts)}


@pytest.mark.parametrize('case', SLOW, **by_name)
def test_place_is_a_line_of_the_slow_program_that_the_cure_changes(case: Case):
    slow, cured = (script.read_text(encoding='utf-8') for script in case.scripts)
    assert case.place in [line.strip() for line in slow.splitlines()]
    assert slow != cured


@pytest.mark.parametrize('case', SLOW, **by_name)
def test_expressions_compile_and_are_no_empty_words(case: Case):
    for expression in case.named + case.led:
        assert not re.search(expression, 'input-bound', re.IGNORECASE)
        assert not re.search(expression, 'Python in the step', re.IGNORECASE)


@pytest.mark.parametrize('case', ALL, **by_name)
def test_program_stands_alone(case: Case):
    for script in case.scripts:
        text = script.read_text(encoding='utf-8')
        tree = ast.parse(text)
        assert ast.get_docstring(tree) and len(text.splitlines()) <= 47
        modules = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        modules += [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        known = {'json', 'math', 'random', 'tempfile', 'time', 'pathlib', 'keras', 'numpy', 'tensorflow'}
        assert set(modules) <= known
        assert text.rstrip().splitlines()[-1].startswith('print(json.dumps({"items": ')


def test_a_finding_that_matches_names_the_cause():
    case = Case('a', 'b', 'c', 'd', named=(r'retrac',), led=(r'tf\.constant',))
    assert case.is_named_by('The function is Retraced') and not case.is_named_by('input-bound')
    assert case.is_led_to_by('pass a tf.constant') and not case.is_led_to_by('tf constant')


def test_numbers_of_the_scored_half_are_numbers():
    measured = json.loads((WARD / 'scored.json').read_text(encoding='utf-8'))
    assert set(measured) == {c.name for c in cases('scored') if not c.healthy and not c.gpu_only}
    assert min(measured.values()) >= 1.3


def test_the_table_has_the_slow_cases_of_the_development_half():
    readme = (WARD / 'README.md').read_text(encoding='utf-8')
    rows = re.findall(r'^\| \[`(\w+)`\]\(.*\| (\d[\d,.]*|GPU) \|$', readme, re.M)
    assert [name for name, _ in rows] == [c.name for c in cases('development') if not c.healthy]
    for name, ratio in rows:
        if ward.read_case(WARD / name).gpu_only: assert ratio == 'GPU'
        else: assert float(ratio.replace(',', '')) >= 1.3


@pytest.mark.slow
@pytest.mark.parametrize('name', ['tape_without_function', 'generator_of_rows'])
def test_the_cured_program_is_faster(name):
    assert measure(ward.read_case(WARD / name))['ratio'] > 1.3
