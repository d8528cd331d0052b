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

def test_a_changed_number_is_seen(monkeypatch, tmp_path):
    "The same cell, with a record in which one number is another."
    page = NOTEBOOKS['speed']
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


@pytest.fixture
def measured(monkeypatch, tmp_path):
    "`records.measure` in a folder, with a command that writes a record: (write, commands that were run)."
    folder, ran, files = tmp_path / 'benchmarks', [], iter(range(9))
    folder.mkdir()
    monkeypatch.setattr(records, 'ROOT', tmp_path)

    def write(spread, device='CPU, 2 cores'):
        rows = [{'name': 'a', 'ratio': 1., 'spread': spread}]
        one = {'device': device, 'date': f'2026-01-0{len(list(folder.iterdir())) + 1}', 'rows': rows}
        noisy = bench.noisy_rows(one)
        file = folder / f'{run.page}-{next(files)}.json'
        file.write_text(json.dumps(one | {'noisy': bool(noisy), 'noisy_rows': noisy}))
        return file.name

    def run(command, **how):
        assert command[:len(records.PROGRAM)] == records.PROGRAM
        ran.append(command[len(records.PROGRAM):])
        assert how['timeout'] == records.LIMIT and how['check']
        if isinstance(run.spread, Exception): raise run.spread
        write(run.spread)
    run.page = 'model'
    monkeypatch.setattr(records.subprocess, 'run', run)
    return folder, write, run, ran


def test_a_quiet_record_is_kept_a_noisy_one_only_where_there_is_none(measured, monkeypatch):
    folder, write, run, ran = measured
    monkeypatch.setitem(bench.WRITERS, 'model', 'bench model')
    run.spread = .5
    assert records.measure('model') == 'model-0.json: noisy, but no quiet one of this device exists'
    write(.1, 'another card')
    assert records.measure('model') == 'model-2.json: noisy, but no quiet one of this device exists'
    run.spread = .1
    assert records.measure('model') == 'model-3.json: quiet'
    run.spread = .5
    assert records.measure('model') == 'model-4.json: noisy, removed; the quiet record of 2026-01-04 stays'
    assert sorted(f.name for f in folder.iterdir()) == [f'model-{i}.json' for i in range(4)]
    assert ran == [['bench', 'model', '--record', '--json']] * 4


@pytest.mark.parametrize('page, variables, options', [
    ('config', {'SPEECH': 'clips', 'COQUI': 'py'}, ['--budget', '3']),
    ('data', {}, ['--budget', '3', '--data', 'runs/demo/corpus']),
    ('data', {'SPEECH': 'clips', 'COQUI': 'py'},
     ['--budget', '3', '--data', 'clips']),
    ('step_speed', {'SPEECH': 'clips', 'COQUI': 'py'}, ['--budget', '3']),
    ('dual', {'SPEECH': 'clips', 'COQUI': 'py'}, [])])
def test_what_a_record_is_measured_on(measured, monkeypatch, page, variables, options):
    *_, run, ran = measured
    script = {'data': 'loaders.py', 'step_speed': 'step.py'}.get(page) if 'COQUI' in variables else None
    command = ['--coqui-python', 'py'] if script else bench.WRITERS[page].split()
    if script: monkeypatch.setattr(records, 'PROGRAM', [sys.executable, f'benchmarks/{script}'])
    run.spread, run.page = .1, page
    for name in ('SPEECH', 'COQUI'): monkeypatch.delenv(f'XTTS_NB_{name}', raising=False)
    for name, value in variables.items(): monkeypatch.setenv(f'XTTS_NB_{name}', value)
    records.measure(page)
    assert ran == [[*command, *options, '--record', '--json']]


def test_the_records_of_all_lessons_are_measured_by_default(monkeypatch, capsys):
    asked, drawn = [], []
    monkeypatch.setattr(records, 'measure', lambda page, copy_to: asked.append(page) or 'quiet')
    monkeypatch.setattr(records, 'write_records', lambda: drawn.append(1))
    assert records.main(['renew']) == records.main(['renew', '--part', 'say', '--part', 'step']) == 0
    pages = [records.PARTS[part] for part in records.LESSONS]
    assert asked == [*pages, 'say', 'step_speed'] and drawn == [1, 1]
    assert 'say: quiet, 0 s' in capsys.readouterr().out
    pages = {*records.PARTS.values()}
    assert pages <= {*bench.WRITERS, 'patients'} and {*records.SMALL} == pages
    with pytest.raises(SystemExit): records.main(['renew', '--part', 'stop'])


def test_a_part_that_fails_or_takes_too_long_leaves_the_others(measured, monkeypatch, capsys, tmp_path):
    "Each record is copied as soon as it is there."
    folder, _, run, ran = measured
    monkeypatch.setattr(records, 'write_records', lambda: None)
    for run.spread, said in ((records.subprocess.CalledProcessError(2, 'x'), 'model: FAILED, exit code 2'),
                             (records.subprocess.TimeoutExpired('x', 9), 'model: FAILED, ended after 480 s')):
        assert records.main(['renew', '--part', 'model', '--copy-to', str(tmp_path / 'new/out')]) == 1
        assert said in capsys.readouterr().out
    run.spread = .1
    assert records.main(['renew', '--part', 'model', '--copy-to', str(tmp_path / 'new/out')]) == 0
    copied = [f.name for f in (tmp_path / 'new/out').iterdir()]
    assert copied == [f.name for f in folder.iterdir()] and len(ran) == 3


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
