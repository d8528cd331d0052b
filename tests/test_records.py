"""Numbers come from records: the page of a record names its command, and a stored table shows its record."""
import json
import re
from pathlib import Path

import nbformat
import pytest
import records
import tree
import wheel
from tree import ROOT

from xtts_nb import records as module
from xtts_nb.app.terminal import _WRITERS
from xtts_nb.bench import rows_markdown
from xtts_nb.config import UserError
from xtts_nb.devices import _products_in_tf32
from xtts_nb.records import best_record, record, record_markdown, recorded, _TOOLS

FILES = sorted((ROOT / 'benchmarks').glob('*.json'))
NOTEBOOKS = {path.stem: nbformat.read(path, as_version=4) for path in tree.notebooks()}
DRAWN = [pytest.param(nb, cell, id=f'{stem}-{cell.id}') for stem, nb in NOTEBOOKS.items()
         for cell in records.record_cells(nb)]

def page_of(file: Path) -> str:
    "The page that the name of a record begins with."
    return file.name.partition('-')[0]

def named(nb) -> set[str]:
    "The records that a page draws."
    return {page for cell in records.record_cells(nb) for page in records.NAMES_A_RECORD.findall(cell.source)}

def test_a_page_names_the_command_of_what_it_shows():
    for stem, nb in NOTEBOOKS.items():
        text = '\n'.join(c.source for c in nb.cells if c.cell_type == 'markdown')
        commands = {_TOOLS.get(page) or f'xtts-nb {_WRITERS[page]}' for page in named(nb)}
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
    "And no others: what pages would show of this folder is the same in a folder of these alone."
    kept, pages = wheel.shown(ROOT / 'benchmarks'), {page_of(file) for file in FILES}
    key = lambda one: (one['device'], one['date'], one.get('time'))
    shown = {(page, key(one)) for page in pages for one in recorded(page, ROOT / 'benchmarks')}
    assert {(page_of(f), key(json.loads(f.read_text()))) for f in FILES if f.name in kept} == shown
    for page in pages:
        best = best_record(page, ROOT / 'benchmarks')
        assert best is None or (page, key(best)) in shown

@pytest.mark.slow
@pytest.mark.cpu
def test_a_part_as_it_would_run_on_a_lent_gpu(cheap_xla):
    assert records.main(['renew', '--rehearse', '--part', 'model']) == 0
    assert sorted((ROOT / 'benchmarks').glob('*.json')) == FILES   # it leaves no record

ROWS = [{'name': 'a', 'step_ms': 1., 'spread': 0.1}, {'name': 'b', 'step_ms': 2., 'spread': 0.25}]
NOISY = [{'name': 'a', 'step_ms': 1., 'spread': 0.1}, {'name': 'b', 'step_ms': 9., 'spread': 0.251}]

@pytest.fixture
def cpu(monkeypatch): monkeypatch.setattr(module, 'device_name', lambda: 'CPU, 2 cores')

def commands(page, folder) -> list[str]: return [one['command'] for one in recorded(page, folder)]

def test_a_record_says_where_when_and_how(cpu, tmp_path, capsys, monkeypatch):
    path = record('step_speed', ROWS, tmp_path / 'new', 'xtts-nb bench train --record', corpus='demo')
    one = json.loads(path.read_text())
    when = f'{one["date"]}-{one["time"].replace(":", "")}'
    assert path.name == f'step_speed-cpu-2-cores-{when}.json' and list(path.parent.iterdir()) == [path]
    assert one['device'] == 'CPU, 2 cores' and one['rows'] == ROWS and one['corpus'] == 'demo'
    assert one['cpu'] == module.cpu_name() and one['command'] == 'xtts-nb bench train --record'
    assert one['noisy'] is False and one['noisy_rows'] == {} and capsys.readouterr().err == ''
    one = json.loads(record('a', ROWS, tmp_path, 'x', 'NVIDIA H200').read_text())
    assert one['device'] == 'NVIDIA H200' and 'tf32' not in one and one['cpu'] == module.cpu_name()
    monkeypatch.setattr(module, 'device_name', lambda: 'NVIDIA H200')   # which has multiplied here
    for on in (True, False):
        with _products_in_tf32(on): path = record('a', [], tmp_path, 'x')
        assert json.loads(path.read_text())['tf32'] is on

def test_a_noisy_run_says_so_and_is_no_headline_however_new(cpu, tmp_path, capsys):
    "A row without a spread counts as noisy, and so does a list of rows next to `rows`."
    record('demo', ROWS, tmp_path, 'first')
    for rows, more, said in ((NOISY, {}, 'b 25%'), ([{'name': 'once', 'spread': None}], {}, 'once unknown'),
                             (ROWS, {'data_before_after': NOISY}, 'b 25%')):
        one = json.loads(record('demo', rows, tmp_path, 'noisy', **more).read_text())
        assert one['noisy'] is True and [*one['noisy_rows']] == [said.split()[0]]
        assert said in capsys.readouterr().err
    assert best_record('demo', tmp_path)['command'] == 'first' and commands('demo', tmp_path) == ['first']
    record('demo', ROWS, tmp_path, 'last')
    assert best_record('demo', tmp_path)['command'] == 'last'

def test_a_record_is_drawn_with_its_origin(cpu, tmp_path):
    record('step_speed', NOISY, tmp_path, 'xtts-nb bench train --record')
    (one,) = recorded('step_speed', tmp_path)
    origin, table = record_markdown(one, about='a small GPT').split('\n\n')
    assert origin.startswith('a small GPT, CPU, 2 cores (') and 'b 25%' in origin
    assert table == rows_markdown(NOISY)
    with pytest.raises(UserError, match='10_data'): recorded('10_data', tmp_path)
