"""Mutation tests: what they may change, and that module and page change alike."""
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / 'dev'))
import mutants  # noqa: E402

BODY = '''"A text with 1 < 2."
def longest(a: int, b: 'x > 1' = 3) -> bool:
    "Is 1 < 2?"
    if not a: raise ValueError(f'{a + 1} is not > 2')
    return a < b and b is not None
'''
HEAD = '# %% auto #0\n__all__ = ["longest", 1]\n\n'


@pytest.fixture
def root(tmp_path) -> Path:
    "A repository of one page and one module."
    for folder in ('nbs', 'xtts_nb', 'tests'): (tmp_path / folder).mkdir()
    (tmp_path / 'xtts_nb/small.py').write_text(f'{HEAD}# %% ../nbs/00_small.ipynb #ab\n{BODY}')
    cells = [{'id': 'ab', 'cell_type': 'code', 'source': ['#| export\n', *BODY.splitlines(keepends=True)]},
             {'id': 'cd', 'cell_type': 'code', 'source': BODY.splitlines(keepends=True)}]
    (tmp_path / 'nbs/00_small.ipynb').write_text(json.dumps({'cells': cells}))
    return tmp_path


def test_only_what_acts_is_changed(root):
    after = {change['after'].strip() for change in mutants.changes(root, 'small')}
    assert after == {"def longest(a: int, b: 'x > 1' = 4) -> bool:",
                     "if a: raise ValueError(f'{a + 1} is not > 2')", 'return a <= b and b is not None',
                     'return a < b or b is not None', 'return a < b and b is None'}


def test_module_and_page_change_alike_and_are_restored(root):
    module, page = root / 'xtts_nb/small.py', root / 'nbs/00_small.ipynb'
    before = module.read_bytes(), page.read_bytes()
    for change in mutants.changes(root, 'small'):
        kept = mutants.apply(root, change)
        cells = [''.join(cell['source']) for cell in json.loads(page.read_text())['cells']]
        assert module.read_text().count(change['after']) == cells[0].count(change['after']) == 1
        assert cells[1] == BODY, 'only the exported cell changes'
        for f, content in kept.items(): f.write_bytes(content)
        assert (module.read_bytes(), page.read_bytes()) == before


def test_every_module_has_one_before_any_has_two():
    found = {name: [{'module': name, 'line': i} for i in range(n)]
             for name, n in (('a', 50), ('b', 1), ('c', 5), ('d', 0))}
    dealt = [change['module'] for change in mutants.deal(found, 1, 20)]
    assert sorted(dealt[:3]) == ['a', 'b', 'c'] and dealt.count('b') == 1 and len(dealt) == 20
    assert mutants.deal(found, 1, 20) == mutants.deal(found, 1, 20) != mutants.deal(found, 2, 20)


def test_the_tests_of_a_module(root):
    for name, text in (('test_small', ''), ('test_very_small', ''), ('test_smaller', ''),
                       ('test_a', 'import xtts_nb.other  # 1'), ('test_b', 'import xtts_nb.other'),
                       ('test_c', 'from xtts_nb import other  # the longest of the three')):
        (root / f'tests/{name}.py').write_text(text)
    assert mutants.test_files(root, 'small') == ['tests/test_small.py', 'tests/test_very_small.py']
    assert mutants.test_files(root, 'other') == ['tests/test_b.py', 'tests/test_a.py']
