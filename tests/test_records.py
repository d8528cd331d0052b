"""Numbers come from records: the page of a record names its command, and a stored table shows its record."""
import ast
import json
import re
import sys
from pathlib import Path

import nbformat
import pytest
import typer

from xtts_nb import bench
from xtts_nb.app import cli

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / 'dev'))
import records  # noqa: E402
import tree  # noqa: E402
import wheel  # noqa: E402

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

# commands that are scripts of the repository now, as older records name them
EARLIER = {'growth': 'xtts-nb bench growth', 'parity': 'xtts-nb parity', 'gpt2': 'xtts-nb bench gpt2',
           'patients': 'xtts-nb bench diagnose'}
# scripts that write the records of commands, with other libraries beside them
BESIDE = {page: f'python benchmarks/{script}' for page, script in records.PEERS.items()}
BESIDE['say_full'] = 'python benchmarks/speech.py'

def page_of(file: Path) -> str:
    "The longest name of a page that the name of a record begins with."
    known = sorted(bench.WRITERS | bench.TOOLS, key=len, reverse=True)
    return next(page for page in known if file.name.startswith(f'{page}-'))

@pytest.mark.parametrize('small', [False, True])
@pytest.mark.parametrize('page', [page for page in records.PARTS.values() if page in bench.WRITERS])
def test_a_part_is_a_command_that_exists(page, small):
    group, words = typer.main.get_command(cli.app), records.command_of(page, 'corpus', small)[3:]
    while hasattr(group, 'commands'): group, words = group.commands[words[0]], words[1:]
    assert group.make_context(page, list(words)).params['record']

def test_the_wheel_holds_the_records_that_pages_show():
    "And no others: those that `bench` would show of this folder are the same in a folder of these alone."
    kept, pages = wheel.shown(ROOT / 'benchmarks'), {page_of(file) for file in FILES}
    key = lambda one: (one['device'], one['date'], one.get('time'))
    shown = {page: {*map(key, bench.recorded(page, ROOT / 'benchmarks'))} for page in pages}
    assert {(page_of(file), key(json.loads(file.read_text()))) for file in FILES if file.name in kept} == {
        (page, one) for page, ones in shown.items() for one in ones}
    for page in pages:
        quiet = bench.headline(page, ROOT / 'benchmarks')
        assert quiet is None or key(quiet) in shown[page]

@pytest.mark.parametrize('file', FILES, ids=lambda f: f.name)
def test_each_record_was_written_by_a_command(file):
    assert [p for p in bench.WRITERS | bench.TOOLS
            if file.name.startswith(f'{p}-')], 'no command writes this; remove it or add the command'
    one = json.loads(file.read_text(encoding='utf-8'))
    assert {'device', 'date', 'commit', 'rows'} <= one.keys() and one['rows']
    if one['date'] <= '2026-11-21': return   # older than the rule
    assert {'cpu', 'time', 'noisy', 'noisy_rows'} <= one.keys()
    tool = bench.TOOLS.get(page_of(file))
    page = page_of(file)
    known = tool or f'xtts-nb {bench.WRITERS[page]}', EARLIER.get(page, tool), BESIDE.get(page)
    assert one['command'].startswith(tuple(filter(None, known)))
    assert tool or '--record' in one['command']
    assert one['noisy_rows'] == bench.noisy_rows(one) and one['noisy'] == bool(one['noisy_rows'])

def named(nb) -> set[str]:
    "The records that a page draws."
    return {page for cell in records.record_cells(nb) for page in records.NAMES_A_RECORD.findall(cell.source)}

@pytest.mark.parametrize('stem', [stem for stem, nb in NOTEBOOKS.items() if named(nb)])
def test_a_page_names_the_command_of_what_it_shows(stem):
    said = '\n'.join(c.source for c in NOTEBOOKS[stem].cells if c.cell_type == 'markdown')
    commands = {bench.TOOLS.get(page) or f'xtts-nb {bench.WRITERS[page]}' for page in named(NOTEBOOKS[stem])}
    assert [c for c in commands if c not in said and c.replace('xtts-nb', 'make') not in said] == []

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


def test_a_rehearsal_runs_small_on_two_cpu_devices_and_stores_nothing(monkeypatch, capsys):
    seen, pages = [], records.PARTS.values()
    def run(command, cwd, env, **_):
        assert env['XTTS_NB_CPU_CARDS'] == '2' and (cwd / 'settings.ini').is_file()
        seen.append(command[len(records.PROGRAM):] if 'bench' in command else command[1:])
        (cwd / 'benchmarks').mkdir(exist_ok=True)
        (cwd / 'benchmarks/a.json').write_text('{"rows": [1, 2]}')
    monkeypatch.setattr(records.subprocess, 'run', run)
    monkeypatch.setattr(records, 'write_records', lambda: pytest.fail('a rehearsal draws nothing'))
    assert records.main(['renew', '--rehearse']) == 0
    assert [command[:2] for command in seen if 'bench' in command] == [
        bench.WRITERS[page].split() for page in pages if page in bench.WRITERS]
    assert all(records.SMALL[page].split()[0] in command for page, command in zip(pages, seen))
    assert capsys.readouterr().out.count(': 2 rows, ') == 8


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.parametrize('part', ['model', 'dual'])
def test_a_part_as_it_would_run_on_a_lent_gpu(part):
    before = {*(ROOT / 'benchmarks').iterdir()}
    assert records.main(['renew', '--rehearse', '--part', part]) == 0
    assert {*(ROOT / 'benchmarks').iterdir()} == before
