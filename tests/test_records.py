"""Numbers come from records: the page of a record names its command, and a stored table shows its record."""
import json
import re
import sys
from pathlib import Path

import nbformat
import pytest

from xtts_nb import bench

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / 'dev'))
import records  # noqa: E402
import tree  # noqa: E402
import wheel  # noqa: E402

FILES = sorted((ROOT / 'benchmarks').glob('*.json'))
NOTEBOOKS = {path.stem: nbformat.read(path, as_version=4) for path in tree.notebooks()}
DRAWN = [pytest.param(nb, cell, id=f'{stem}-{cell.id}') for stem, nb in NOTEBOOKS.items()
         for cell in records.record_cells(nb)]


def page_of(file: Path) -> str:
    "The longest name of a page that the name of a record begins with."
    known = sorted(bench.WRITERS | bench._TOOLS, key=len, reverse=True)
    return next(page for page in known if file.name.startswith(f'{page}-'))

def named(nb) -> set[str]:
    "The records that a page draws."
    return {page for cell in records.record_cells(nb) for page in records.NAMES_A_RECORD.findall(cell.source)}

def test_a_page_names_the_command_of_what_it_shows():
    for stem, nb in NOTEBOOKS.items():
        text = '\n'.join(c.source for c in nb.cells if c.cell_type == 'markdown')
        commands = {bench._TOOLS.get(page) or f'xtts-nb {bench.WRITERS[page]}' for page in named(nb)}
        assert [c for c in commands if c not in text and c.replace('xtts-nb', 'make') not in text] == [], stem

@pytest.mark.parametrize('nb, cell', DRAWN)
def test_what_is_stored_is_what_the_record_says(nb, cell):
    (stored,) = cell.outputs
    now = records.draw(nb, cell)
    if hasattr(now, '_repr_markdown_'):
        assert stored.data['text/markdown'] == now._repr_markdown_(), 'run python dev/records.py'
    else: assert 'image/png' in stored.data

def test_no_page_writes_a_record():
    "A page that is run would leave a file in benchmarks/ each time; commands write records."
    cells = [(stem, c.source) for stem, nb in NOTEBOOKS.items() for c in nb.cells if c.cell_type == 'code']
    lessons = [(stem, source) for stem, source in cells if not re.match(r'(#\|.*\n)*#\|\s*export', source)]
    assert [stem for stem, source in lessons if re.search(r'\brecord\([^)]*benchmarks\(\)', source)] == []

def test_the_wheel_holds_the_records_that_pages_show():
    "And no others: what `bench` would show of this folder is the same in a folder of these alone."
    kept, pages = wheel.shown(ROOT / 'benchmarks'), {page_of(file) for file in FILES}
    key = lambda one: (one['device'], one['date'], one.get('time'))
    shown = {(page, key(one)) for page in pages for one in bench.recorded(page, ROOT / 'benchmarks')}
    assert {(page_of(f), key(json.loads(f.read_text()))) for f in FILES if f.name in kept} == shown
    for page in pages:
        best = bench.headline(page, ROOT / 'benchmarks')
        assert best is None or (page, key(best)) in shown


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.parametrize('part', ['model', 'dual'])
def test_a_part_as_it_would_run_on_a_lent_gpu(part):
    before = {*(ROOT / 'benchmarks').iterdir()}
    assert records.main(['renew', '--rehearse', '--part', part]) == 0
    assert {*(ROOT / 'benchmarks').iterdir()} == before
