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
