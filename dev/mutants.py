"""Mutation tests: change the library in one place at a time, and run the tests and the page of that module.

    python dev/mutants.py SEED              40 random changes in data, models, speech and train; each module
                                            gets one before any gets two
    python dev/mutants.py SEED N --jobs 4   N changes, four at a time (default: 2)
    python dev/mutants.py --again FILE      the survivors in FILE, with the tests of today
    python dev/mutants.py 1 20 --only data.cache data.audio   these modules only

A change is made in a copy of the tree, in the module and in its page. The module's quick tests run first:
`tests/**/test_<module>.py` and `test_<word>_<module>.py`, or else the two shortest test files that name it.
If they pass, the page runs. Each result is one JSON line in runs/mutants-SEED-<library>.jsonl; a run that was
stopped continues there. A change takes half a minute to two minutes, so this runs once a week and not in
`make test`. Exit code 1: fewer than 8 of 10 changes were noticed."""
import argparse
import ast
import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

from tree import ROOT, modules

SAMPLED = 'data.', 'models.', 'speech.', 'train.'   # beginnings of the names of modules

CELL = re.compile(r'# %% (?:\.\./)+(?P<notebook>nbs/\S+\.ipynb) #(?P<cell>\S+)\n')

COMPARISONS = {ast.Lt: ('<', '<='), ast.LtE: ('<=', '<'), ast.Gt: ('>', '>='), ast.GtE: ('>=', '>'),
               ast.Eq: ('==', '!='), ast.NotEq: ('!=', '=='), ast.In: ('in', 'not in'),
               ast.NotIn: ('not in', 'in'), ast.Is: ('is', 'is not'), ast.IsNot: ('is not', 'is')}
OPERATIONS = {ast.Add: ('+', '-'), ast.Sub: ('-', '+'), ast.Mult: ('*', '/'), ast.Div: ('/', '*'),
              ast.FloorDiv: ('//', '/'), ast.Mod: ('%', '*')}
CONNECTIVES = {ast.And: ('and', 'or'), ast.Or: ('or', 'and')}
NAMES = {'min': 'max', 'max': 'min', 'any': 'all', 'all': 'any'}


# ---- the changes that are possible

class Changes(ast.NodeVisitor):
    "Collects `(line, first byte, last byte, new text)` of every change in a module."
    def __init__(self, source: str):
        self.lines, self.found = [line.encode() for line in source.splitlines()], []
        self.visit(ast.parse(source))

    def between(self, left: ast.AST, right: ast.AST, old: str, new: str):
        "Replace the operator between two neighbours on one line."
        if left.end_lineno != right.lineno: return
        gap = self.lines[left.end_lineno - 1][left.end_col_offset:right.col_offset].decode()
        at = gap.find(old)
        if at < 0: return
        begin = left.end_col_offset + at
        self.found.append((left.end_lineno, begin, begin + len(old), new))

    def replace(self, node: ast.AST, new: str):
        "Replace a node that is on one line."
        if node.lineno == node.end_lineno:
            self.found.append((node.lineno, node.col_offset, node.end_col_offset, new))

    def text(self, node: ast.AST) -> str:
        return self.lines[node.lineno - 1][node.col_offset:node.end_col_offset].decode()

    def visit_Compare(self, node):
        for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators):
            self.between(left, right, *COMPARISONS[type(op)])
        self.generic_visit(node)

    def visit_BinOp(self, node):
        literals = ast.JoinedStr, ast.List, ast.Tuple
        text = any(isinstance(n, literals) or isinstance(getattr(n, 'value', 0), str)
                   for n in (node.left, node.right))
        if type(node.op) in OPERATIONS and not text:
            self.between(node.left, node.right, *OPERATIONS[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        for left, right in zip(node.values, node.values[1:]):
            self.between(left, right, *CONNECTIVES[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not | ast.USub) and node.lineno == node.end_lineno:
            self.replace(node, self.text(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, bool): self.replace(node, str(not node.value))
        elif isinstance(node.value, int): self.replace(node, str(node.value + 1))
        elif isinstance(node.value, float): self.replace(node, str(node.value * 2 or 1.0))

    def visit_Name(self, node):
        if node.id in NAMES: self.replace(node, NAMES[node.id])

    def condition(self, test: ast.AST):
        other = isinstance(test, ast.Compare | ast.BoolOp) or isinstance(getattr(test, 'op', None), ast.Not)
        if not other and test.lineno == test.end_lineno: self.replace(test, f'(not {self.text(test)})')

    def visit_If(self, node):
        self.condition(node.test)
        self.generic_visit(node)
    visit_While = visit_IfExp = visit_If

    def visit_comprehension(self, node):
        for test in node.ifs: self.condition(test)
        self.generic_visit(node)

    def visit_Call(self, node):
        if not re.search(r'(Error|Warning|fail|warn)$', ast.unparse(node.func)): self.generic_visit(node)

    def visit_arg(self, node): pass         # an annotation

    def visit_AnnAssign(self, node):
        if node.value is not None: self.visit(node.value)

    def visit_Raise(self, node): pass       # an error's text
    visit_JoinedStr = visit_Assert = visit_Raise   # a text for people


def changes(
    root: Path,    # a tree
    module: str,   # without `.py`
) -> list[dict]:
    "Every change of a module: its place, and the line before and after."
    source = modules(root)[module].read_text(encoding='utf-8')
    marks = [(source.count('\n', 0, m.end()), m['notebook'], m['cell']) for m in CELL.finditer(source)]
    lines, found = source.splitlines(), []
    for line, begin, end, new in sorted(set(Changes(source).found)):
        held = [mark for mark in marks if mark[0] < line]
        if not held: continue   # generated by nbdev
        first, notebook, cell = held[-1]
        before = lines[line - 1].encode()
        after = before[:begin] + new.encode() + before[end:]
        nth = lines[first:line - 1].count(lines[line - 1])   # of the equal lines in the cell
        found.append({'module': module, 'line': line, 'notebook': notebook, 'cell': cell, 'nth': nth,
                      'before': before.decode(), 'after': after.decode()})
    return found


def deal(
    found: dict[str, list[dict]],   # the changes of each module
    seed: int,
    n: int,                         # number of changes to draw
) -> list[dict]:
    "Each module once, in random order; then at random, in proportion to the changes left in each."
    rng = random.Random(seed)
    left = {module: rng.sample(some, len(some)) for module, some in sorted(found.items()) if some}
    dealt = [left[module].pop() for module in rng.sample(list(left), len(left))]
    rest = [change for some in left.values() for change in some]
    return [*dealt, *rng.sample(rest, len(rest))][:n]


# ---- applying one

def exchange(
    lines: list[str],   # of a cell
    change: dict,
    new: str,           # the line that takes the place of the one before
) -> list[str]:
    "The lines with one of them replaced."
    at = [i for i, line in enumerate(lines) if line == change['before']]
    if len(at) <= change['nth']:
        raise LookupError(f"{change['module']}.py no longer holds {change['before'].strip()!r}")
    return [*lines[:at[change['nth']]], new, *lines[at[change['nth']] + 1:]]


def apply(
    root: Path,   # the copy
    change: dict,
) -> dict[Path, bytes]:
    "Make a change in a module and its page; returns the files as they were."
    module, page = modules(root)[change['module']], root / change['notebook']
    kept = {f: f.read_bytes() for f in (module, page)}
    head, mark, rest = kept[module].decode().partition(f"{change['notebook']} #{change['cell']}\n")
    if not mark: raise LookupError(f"{change['module']}.py no longer holds cell {change['cell']}")
    module.write_text(head + mark + '\n'.join(exchange(rest.split('\n'), change, change['after'])),
                      encoding='utf-8')
    nb = json.loads(kept[page])
    (cell,) = (c for c in nb['cells'] if c['id'] == change['cell'])
    cell['source'] = '\n'.join(exchange(''.join(cell['source']).split('\n'), change,
                                        change['after'])).splitlines(keepends=True)
    page.write_text(json.dumps(nb), encoding='utf-8')
    return kept


def test_files(
    root: Path,
    module: str,
) -> list[str]:
    "The files with a module's quick tests."
    files = sorted((root / 'tests').rglob('test_*.py'))
    own = [f for f in files if re.fullmatch(rf'test_([a-z0-9]+_)?{module.rpartition(".")[2]}', f.stem)]
    if not own:
        named = [f for f in files if re.search(rf'\b{re.escape(module)}\b', f.read_text(encoding='utf-8'))]
        imports = re.compile(rf'xtts_nb(\.| import .*\b){re.escape(module)}\b')
        imported = [f for f in named if imports.search(f.read_text(encoding='utf-8'))]
        own = sorted(imported or named, key=lambda f: f.stat().st_size)[:2]
    return [str(f.relative_to(root)) for f in own]


class FirstFailure:
    "A pytest plugin: which test failed first."
    name = None
    def pytest_runtest_logreport(self, report):
        if report.failed and not self.name: self.name = report.nodeid
    pytest_collectreport = pytest_runtest_logreport


def child(root: Path, kind: str, targets: list[str], left_out: list[str], out: str):
    "Run tests or a page in a child process; output goes to `out`.log, the name of a failure to `out`.txt."
    os.setsid()
    log = os.open(f'{out}.log', os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2): os.dup2(log, stream)
    os.chdir(root)
    os.environ['PYTHONPATH'] = str(root)
    sys.path[:0] = [str(root), str(root / 'tests')]
    sys.modules.pop('tree', None)   # that of this repository, not of the copy
    sys.dont_write_bytecode = True
    if kind == 'tests':
        import pytest
        first = FirstFailure()
        code = pytest.main(['-x', '-q', '-p', 'no:cacheprovider', '-p', 'no:xdist', '-m',
                            'not slow and not gpu', *(f'--deselect={t}' for t in left_out), *targets],
                           plugins=[first])
        failed = '' if code in (0, 5) else first.name or f'pytest ended with {code}'
    else:
        from nbdev.test import test_nb
        os.environ['IN_TEST'] = '1'
        os.chdir(root / 'nbs')
        good, _ = test_nb(root / targets[0], skip_flags=['gpu', 'slow'], force_flags=['cpu'], basepath=root)
        failed = '' if good else targets[0]
    Path(f'{out}.txt').write_text(failed)
    os._exit(0)


def ask(
    context,              # of multiprocessing
    root: Path,           # the copy
    kind: str,            # `tests` or `page`
    targets: list[str],
    limit: float,         # seconds
    left_out: list[str] = (),   # tests
) -> str:
    "The first test that fails, or the page; `time limit` or `crash`; empty if nothing fails."
    said = root / 'runs' / kind
    said.parent.mkdir(exist_ok=True)
    said.with_suffix('.txt').unlink(missing_ok=True)
    process = context.Process(target=child, args=(root, kind, targets, left_out, str(said)))
    process.start()
    process.join(limit)
    late = process.is_alive()
    try: os.killpg(process.pid, signal.SIGKILL)   # with all processes that the tests have started
    except ProcessLookupError: pass
    process.join()
    if late: return 'time limit'
    return said.with_suffix('.txt').read_text() if said.with_suffix('.txt').exists() else 'crash'


def judge(context, root: Path, change: dict, limit: float) -> dict:
    "What notices a change: a test, the page, or nothing. What also fails without the change does not count."
    begun, result = time.monotonic(), {'noticed_by': None, 'notes': []}
    tests = test_files(root, change['module'])
    for kind, targets in (('tests', tests), ('page', [change['notebook']])):
        failed = first_due_to(context, root, change, kind, targets, limit, result['notes'])
        if failed:
            result['noticed_by'] = f'{kind}: {failed}' if failed in ('time limit', 'crash') else failed
            break
    return {**change, **result, 'tests': tests, 'seconds': round(time.monotonic() - begun, 1)}


def first_due_to(context, root: Path, change: dict, kind: str, targets: list[str], limit: float, notes: list):
    "What `ask` names with a change and not without it; empty if there is nothing."
    left_out = []
    while True:
        kept = apply(root, change)
        try: failed = ask(context, root, kind, targets, limit, left_out)
        finally:
            for f, content in kept.items(): f.write_bytes(content)
        is_test = '::' in failed
        if not failed or not ask(context, root, kind, [failed] if is_test else targets, limit): return failed
        notes.append(f'fails without it too: {failed}')
        if not is_test: return ''
        left_out.append(failed)


# ---- the run

def library_key(root: Path) -> str:
    "Eight hexadecimal digits of the library's content."
    files = sorted((root / 'xtts_nb').rglob('*.py'))
    return hashlib.sha256(b''.join(f.read_bytes() for f in files)).hexdigest()[:8]


def copied(root: Path, folder: Path) -> Path:
    "A copy of the tree without generated files."
    noise = shutil.ignore_patterns('.git', '.venv*', 'runs', 'cache', '_docs', '__pycache__',
                                   '.ipynb_checkpoints', '.*_cache')
    return Path(shutil.copytree(root, folder, ignore=noise))


def shown(result: dict) -> str:
    "Three lines about a result."
    noticed = result['noticed_by'] or ' '.join(['SURVIVED', *(f'({note})' for note in result['notes'])])
    return (f"{result['module']}:{result['line']}  {noticed}  {result['seconds']:.0f} s\n"
            f"  - {result['before'].strip()}\n  + {result['after'].strip()}")


def key(change: dict) -> tuple:
    "Names a change."
    return change['cell'], change['nth'], change['before'], change['after']


def run(wanted: list[dict], out: Path, jobs: int, limit: float, until: float) -> Iterator[dict]:
    "Test the changes that `out` does not hold yet, append the results to it, and yield all of them."
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    yield from done
    old = {key(change) for change in done}
    context = multiprocessing.get_context('forkserver')
    # their import costs more than most tests
    context.set_forkserver_preload(['tensorflow', 'pytest', 'nbdev.test'])
    with tempfile.TemporaryDirectory(prefix='mutants-') as folder, ThreadPoolExecutor(jobs) as pool:
        roots = SimpleQueue()
        for i in range(jobs): roots.put(copied(ROOT, Path(folder) / str(i)))
        def one(change: dict) -> dict | None:
            if time.monotonic() > until: return None
            root = roots.get()
            try: return judge(context, root, change, limit)
            except LookupError as error:
                return {**change, 'noticed_by': None, 'notes': [str(error)], 'seconds': 0}
            finally: roots.put(root)
        for future in as_completed([pool.submit(one, change) for change in wanted if key(change) not in old]):
            if not (result := future.result()): continue
            with out.open('a') as f: f.write(json.dumps(result) + '\n')
            yield result


def main() -> int:   # the exit code
    parser = argparse.ArgumentParser(description='Do the tests notice a wrong library?')
    parser.add_argument('seed', type=int, nargs='?', default=0)
    parser.add_argument('n', type=int, nargs='?', default=40)
    parser.add_argument('--jobs', type=int, default=2)
    parser.add_argument('--limit', type=float, default=400., help='seconds for the tests, and for the page')
    parser.add_argument('--minutes', type=float, default=1e9, help='begin no further one after this many')
    parser.add_argument('--only', nargs='+', metavar='MODULE', help='modules to change')
    parser.add_argument('--again', type=Path, help='a file of results, whose survivors are tried again')
    options = parser.parse_args()
    os.environ.update(CUDA_VISIBLE_DEVICES='-1', TF_CPP_MIN_LOG_LEVEL='2', MPLBACKEND='Agg',
                      KERAS_BACKEND='tensorflow')
    if options.again:
        wanted = [r for r in map(json.loads, options.again.read_text().splitlines()) if not r['noticed_by']]
        out = options.again.with_name(f'{options.again.stem}-again-{library_key(ROOT)}.jsonl')
    else:
        sampled = options.only or [module for module in modules() if module.startswith(SAMPLED)]
        wanted = deal({module: changes(ROOT, module) for module in sampled}, options.seed, options.n)
        name = '-'.join([str(options.seed), *(options.only or []), library_key(ROOT)])
        out = ROOT / f'runs/mutants-{name}.jsonl'
    out.parent.mkdir(exist_ok=True)
    results = []
    for result in run(wanted, out, options.jobs, options.limit, time.monotonic() + 60 * options.minutes):
        results.append(result)
        print(shown(result), flush=True)
    noticed = sum(bool(r['noticed_by']) for r in results)
    print(f'{noticed} of {len(results)} noticed; the list is in {out}')
    return int(noticed < 0.8 * len(results))


if __name__ == '__main__': sys.exit(main())
