"""Draw again what the pages draw from the records in benchmarks/, without running the pages.

    python dev/records.py               writes it into the notebooks, as their cells would show it
    python dev/records.py renew [PAGE …]  measures the records of the lessons first, or those named

A new record that is noisy is removed again if a quiet one of the same device exists. `XTTS_NB_SPEECH=DIR`
names a corpus of recorded speech for `bench data`, instead of that of the demo; `XTTS_NB_COQUI=PYTHON` an
environment with coqui-tts, to measure it too.

A cell that draws a record names it in `recorded(...)` or `headline(...)`, and uses only what the page imports
or exports. tests/test_records.py compares what is stored with what the same cell draws now."""
import ast
import base64
import importlib
import json
import os
import re
import subprocess
import sys
import time

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_output

from tree import ROOT, notebooks

NAMES_A_RECORD = re.compile(r"\b(?:recorded|headline)\('(\w+)', benchmarks\(\)\)")


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


LESSONS = 'config', 'data', 'model', 'step_speed', 'dual', 'patients', 'say'
PROGRAM = [sys.executable, '-c', 'from xtts_nb.app.cli import main; main()']


def measure(
    page: str,   # a key of `bench.WRITERS`
) -> str:        # what became of the record
    "Run the command of a record; raises `CalledProcessError` if it fails."
    bench = importlib.import_module('xtts_nb.bench')
    options = ['--budget', '3'] * (page in ('config', 'data', 'step_speed'))   # all pages in 20 minutes
    options += ['--data', os.environ.get('XTTS_NB_SPEECH', 'runs/demo/corpus')] * (page == 'data')
    if page in ('data', 'step_speed') and (peer := os.environ.get('XTTS_NB_COQUI')):
        options += ['--coqui-python', peer]
    folder = ROOT / 'benchmarks'
    before = set(folder.glob('*.json'))
    subprocess.run([*PROGRAM, *bench.WRITERS[page].split(), *options, '--record', '--json'], check=True,
                   cwd=ROOT, stdout=subprocess.DEVNULL)
    (new,) = set(folder.glob('*.json')) - before
    one = json.loads(new.read_text(encoding='utf-8'))
    if not one['noisy']: return f'{new.name}: quiet'
    shown = next(r for r in bench.recorded(page, folder) if r['device'] == one['device'])
    if shown['noisy']: return f'{new.name}: noisy, but no quiet one of this device exists'
    new.unlink()
    return f'{new.name}: noisy, removed; the quiet record of {shown["date"]} stays'


def renew(pages: list[str]):
    "Measure records one after the other, and draw all pages."
    for page in pages or LESSONS:
        begun = time.monotonic()
        print(f'{page}: {measure(page)}, {time.monotonic() - begun:.0f} s', flush=True)
    write_records()


if __name__ == '__main__': renew(sys.argv[2:]) if sys.argv[1:2] == ['renew'] else write_records()
