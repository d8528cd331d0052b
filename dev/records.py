"""Draw again what the pages draw from the records in benchmarks/, without running the pages.

    python dev/records.py               writes it into the notebooks, as their cells would show it
    python dev/records.py renew [OPTIONS]  measures the records of the lessons first
        --part NAME     only this one, once or more: config, data, model, step, dual, diagnose, say, service
        --copy-to DIR   copies each record there as soon as it is written
        --rehearse      each part as small as it can be, on two logical CPU devices; nothing is stored

A part is a process of its own and ends after 8 minutes; what the others wrote stays. So a GPU that is lent
for half an hour takes them one by one: make records GPU=1 ARGS="--part step --part dual --copy-to DIR".

A new record that is noisy is removed again if a quiet one of the same device exists. `XTTS_NB_SPEECH=DIR`
names a corpus of recorded speech for `bench data`, instead of that of the demo; `XTTS_NB_COQUI=PYTHON` an
environment with coqui-tts, to measure it too, by the scripts in benchmarks/.

A cell that draws a record names it in `recorded(...)` or `best_record(...)`, and uses only what the page
imports or exports. tests/test_records.py compares what is stored with what the same cell draws now."""
import argparse
import ast
import base64
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_output

from tree import ROOT, notebooks

from xtts_nb.app.terminal import _WRITERS
from xtts_nb.records import recorded, _TOOLS

NAMES_A_RECORD = re.compile(r"\b(?:recorded|best_record)\('(\w+)', benchmarks\(\)\)")


def record_cells(
    nb: NotebookNode,
) -> list[NotebookNode]:
    "The cells that draw a record."
    return [c for c in nb.cells if c.cell_type == 'code' and NAMES_A_RECORD.search(c.source)]


def _statements(nb: NotebookNode) -> list[ast.stmt]:
    "All statements at the top of the code cells; cells of IPython's own syntax are left out."
    found = []
    for cell in nb.cells:
        if cell.cell_type != 'code': continue
        try: found += ast.parse(cell.source).body
        except SyntaxError: continue
    return found


def _namespace(
    nb: NotebookNode,
    tree: ast.Module,   # the cell
) -> dict:
    "The names that a cell uses, from the imports of its page and from the module that the page writes."
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names = {}
    for node in _statements(nb):
        if not isinstance(node, ast.Import | ast.ImportFrom): continue
        wanted = [a for a in node.names if (a.asname or a.name.partition('.')[0]) in used]
        if not wanted: continue
        node.names = wanted
        exec(compile(ast.Module([node], []), '<imports>', 'exec'), names)
    exported = re.search(r'#\|\s*default_exp:?\s+(\S+)', '\n'.join(c.source for c in nb.cells))
    if exported and (missing := {n for n in used - names.keys() if n not in dir(__builtins__)}):
        module = importlib.import_module(f'xtts_nb.{exported[1]}')
        names |= {n: getattr(module, n) for n in missing if hasattr(module, n)}
    return names


def draw(
    nb: NotebookNode,
    cell: NotebookNode,
):
    "The value of a cell: a `Markdown` or an `Image`."
    tree = ast.parse(cell.source)
    names = _namespace(nb, tree)
    exec(compile(ast.Module(tree.body[:-1], []), '<cell>', 'exec'), names)
    return eval(compile(ast.Expression(tree.body[-1].value), '<cell>', 'eval'), names)


def as_output(value) -> NotebookNode:
    "A cell's value as a notebook stores it."
    data = {'text/plain': repr(type(value)).replace("<class '", '<').replace("'>", ' object>')}
    if hasattr(value, '_repr_markdown_'): data |= {'text/markdown': value._repr_markdown_()}
    else: data |= {'image/png': base64.b64encode(value.data).decode()}
    return new_output('execute_result', data)


def write_records():
    "Draw every record anew and store what changed."
    for path in notebooks():
        nb = nbformat.read(path, as_version=4)
        for cell in record_cells(nb): cell.outputs = [as_output(draw(nb, cell))]
        if record_cells(nb): nbformat.write(nb, path)


PARTS = {'config': 'config', 'data': 'data', 'model': 'model', 'step': 'step_speed', 'dual': 'dual',
         'diagnose': 'causes', 'say': 'say', 'service': 'service'}   # {name of a part: its record}
LESSONS = 'config', 'data', 'model', 'step', 'dual', 'diagnose', 'say'
LIMIT = 480   # s of a part
SMALL = {'config': '--width 64 --updates 1 --rounds 2 --budget 0.1',
         'data': '--clips 8 --rounds 2 --budget 0.1',
         'model': '--batches 2 --batch-size 2 --rounds 2', 'step_speed': '--width 64 --rounds 2 --budget 0.1',
         'dual': '--steps 4 --rounds 2', 'causes': '--num-batches 8 --seconds 1',
         'say': '--rounds 2 --budget 0.1', 'service': '--waves 1'}   # options of a rehearsal
PEERS = {'data': 'loaders.py', 'step_speed': 'step.py'}   # scripts that measure other libraries too
PROGRAM = [sys.executable, '-c', 'from xtts_nb.app.cli import main; main()']


def command_of(
    page: str,       # a key of `_WRITERS` or `_TOOLS`
    corpus: str,     # for `bench data`
    small: bool = False,
) -> list[str]:      # program and arguments
    "The command that writes a record; that of `PEERS` where there is another library."
    if small: options = SMALL[page].split()
    else: options = ['--budget', '3'] * (page in ('config', 'data', 'step_speed'))   # all pages in 20 minutes
    options += ['--data', corpus] * (page == 'data')
    peer = None if small else os.environ.get('XTTS_NB_COQUI')
    options += ['--record', '--json']
    if page in _TOOLS: return [sys.executable, str(ROOT / _TOOLS[page].split()[1]), *options]
    if page not in PEERS or not peer: return [*PROGRAM, *_WRITERS[page].split(), *options]
    return [sys.executable, f'benchmarks/{PEERS[page]}', '--coqui-python', peer, *options]


def written(
    command: list[str],
    root: Path,        # where the command runs; it writes into benchmarks/ there
    environment: dict | None = None,
) -> Path:
    "The record that a command writes; raises `CalledProcessError`, or `TimeoutExpired` after `LIMIT`."
    folder = root / 'benchmarks'
    before = set(folder.glob('*.json'))
    subprocess.run(command, check=True, cwd=root, stdout=subprocess.DEVNULL, timeout=LIMIT,
                   env=os.environ | (environment or {}))
    (new,) = set(folder.glob('*.json')) - before
    return new


def measure(
    page: str,                     # a key of `_WRITERS` or `_TOOLS`
    copy_to: Path | None = None,
) -> str:                          # what became of the record
    "Run the command of a record, as `written` does."
    new = written(command_of(page, os.environ.get('XTTS_NB_SPEECH', 'runs/demo/corpus')), ROOT)
    if copy_to: shutil.copy(new, copy_to)
    one = json.loads(new.read_text(encoding='utf-8'))
    if not one['noisy']: return f'{new.name}: quiet'
    shown = next(r for r in recorded(page, new.parent) if r['device'] == one['device'])
    if shown['noisy']: return f'{new.name}: noisy, but no quiet one of this device exists'
    new.unlink()
    return f'{new.name}: noisy, removed; the quiet record of {shown["date"]} stays'


def rehearse(page: str) -> str:
    "Run the command of a record as small as it can be, in a folder that is removed again."
    from xtts_nb.data.corpora import synthetic_corpus
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / 'settings.ini', folder)
        corpus = synthetic_corpus(Path(folder) / 'corpus', clips=8, seconds=1.) if page == 'data' else ''
        cards = {'XTTS_NB_CPU_CARDS': '2', 'CUDA_VISIBLE_DEVICES': '-1'}
        new = written(command_of(page, str(corpus), small=True), Path(folder), cards)
        return f'{len(json.loads(new.read_text(encoding="utf-8"))["rows"])} rows'


def renew(
    parts: list[str],              # names; none: `LESSONS`
    copy_to: Path | None = None,
    small: bool = False,           # a rehearsal
) -> int:                          # parts that failed
    "Measure parts one after the other, and draw all pages; one that fails does not stop the others."
    if copy_to: copy_to.mkdir(parents=True, exist_ok=True)
    failed = 0
    for part in parts or (PARTS if small else LESSONS):
        begun = time.monotonic()
        try: said = rehearse(PARTS[part]) if small else measure(PARTS[part], copy_to)
        except subprocess.CalledProcessError as e: said = f'FAILED, exit code {e.returncode}'
        except subprocess.TimeoutExpired: said = f'FAILED, ended after {LIMIT} s'
        failed += said.startswith('FAILED')
        print(f'{part}: {said}, {time.monotonic() - begun:.0f} s', flush=True)
    if not small: write_records()
    return failed


def main(arguments: list[str]) -> int:
    "The exit code."
    if arguments[:1] != ['renew']: return write_records() or 0
    parser = argparse.ArgumentParser(prog='records.py renew')
    parser.add_argument('--part', action='append', choices=PARTS, default=[])
    parser.add_argument('--copy-to', type=Path)
    parser.add_argument('--rehearse', action='store_true')
    given = parser.parse_args(arguments[1:])
    return 1 if renew(given.part, given.copy_to, given.rehearse) else 0


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
