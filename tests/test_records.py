"""Numbers come from records: the page of a record names its command, and a stored table shows its record."""
import ast
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

FILES = sorted((ROOT / 'benchmarks').glob('*.json'))
NOTEBOOKS = {path.stem: nbformat.read(path, as_version=4) for path in tree.notebooks()}
DRAWN = [pytest.param(nb, cell, id=f'{stem}-{cell.id}') for stem, nb in NOTEBOOKS.items()
         for cell in records.record_cells(nb)]


def decorated(function: ast.FunctionDef) -> str | None:
    "The command that a function of a `cli_*` module is, as typed; None if it is none."
    for call in function.decorator_list:
        if not isinstance(call, ast.Call): continue
        group = [k for k in call.keywords if k.arg == 'group' and ast.unparse(k.value) == 'bench_app']
        return 'bench ' * len(group) + call.args[0].value

def kept() -> dict[str, str]:
    "What each command keeps: page -> command."
    found = {}
    for path in (ROOT / 'xtts_nb/app').glob('cli*.py'):
        for function in ast.parse(path.read_text(encoding='utf-8')).body:
            if not isinstance(function, ast.FunctionDef): continue
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == 'write_record':
                    found[call.args[0].value] = decorated(function)
    return found

def test_each_kind_of_record_has_its_command():
    "`WRITERS` is what the commands do; an option may follow the command."
    known = kept()
    assert known.keys() == bench.WRITERS.keys()
    assert {page: line for page, line in bench.WRITERS.items()
            if not f'{line} '.startswith(f'{known[page]} ')} == {}

def page_of(file: Path) -> str:
    "The longest name of a page that the name of a record begins with."
    return next(p for p in sorted(bench.WRITERS, key=len, reverse=True) if file.name.startswith(f"{p}-"))

@pytest.mark.parametrize('file', FILES, ids=lambda f: f.name)
def test_each_record_was_written_by_a_command(file):
    assert [p for p in bench.WRITERS
            if file.name.startswith(f'{p}-')], 'no command writes this; remove it or add the command'
    one = json.loads(file.read_text(encoding='utf-8'))
    assert {'device', 'date', 'commit', 'rows'} <= one.keys() and one['rows']
    if one['date'] <= '2026-11-21': return   # older than the rule
    assert {'cpu', 'time', 'noisy', 'noisy_rows'} <= one.keys()
    assert one['command'].startswith(f'xtts-nb {bench.WRITERS[page_of(file)]}')
    assert '--record' in one['command']
    assert one['noisy_rows'] == bench.noisy_rows(one) and one['noisy'] == bool(one['noisy_rows'])

def named(nb) -> set[str]:
    "The records that a page draws."
    return {page for cell in records.record_cells(nb) for page in records.NAMES_A_RECORD.findall(cell.source)}

@pytest.mark.parametrize('stem', [stem for stem, nb in NOTEBOOKS.items() if named(nb)])
def test_a_page_names_the_command_of_what_it_shows(stem):
    said = '\n'.join(c.source for c in NOTEBOOKS[stem].cells if c.cell_type == 'markdown')
    commands = {f'xtts-nb {bench.WRITERS[page]}' for page in named(NOTEBOOKS[stem])}
    assert [c for c in commands if c not in said and c.replace('xtts-nb', 'make') not in said] == []

@pytest.mark.parametrize('nb, cell', DRAWN)
def test_what_is_stored_is_what_the_record_says(nb, cell):
    (stored,) = cell.outputs
    now = records.draw(nb, cell)
    if hasattr(now, '_repr_markdown_'):
        assert stored.data['text/markdown'] == now._repr_markdown_(), 'run python dev/records.py'
    else: assert 'image/png' in stored.data

def test_a_changed_number_is_seen(monkeypatch, tmp_path):
    "The same cell, with a record in which one number is another."
    page = NOTEBOOKS['step_speed']
    cell = next(cell for cell in records.record_cells(page) if 'step_speed' in cell.source)
    stored = cell.outputs[0].data['text/markdown']
    for file in FILES:
        text = file.read_text(encoding='utf-8')
        (tmp_path / file.name).write_text(re.sub(r'("step_ms": )\d', r'\g<1>7', text), encoding='utf-8')
    monkeypatch.setattr(bench, 'benchmarks', lambda: tmp_path)
    assert records.draw(page, cell)._repr_markdown_() != stored

def test_no_page_writes_a_record():
    "A page that is run would leave a file in benchmarks/ each time; commands write records."
    cells = [(stem, c.source) for stem, nb in NOTEBOOKS.items() for c in nb.cells if c.cell_type == 'code']
    lessons = [(stem, source) for stem, source in cells if not re.match(r'(#\|.*\n)*#\|\s*export', source)]
    assert [stem for stem, source in lessons if re.search(r'\brecord\([^)]*benchmarks\(\)', source)] == []
