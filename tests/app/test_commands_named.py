"Every command and option that the README or a page names exists."
import json
import re
import shlex
from pathlib import Path

import nbformat
import pytest
import tree
import typer

from xtts_nb.app.cli import app

ROOT = Path(__file__).resolve().parents[2]
# up to the next command
COMMAND = re.compile(r'xtts-nb +([a-z][a-z-]*(?: +(?:(?!xtts-nb| -- )[^\n`\'")};:])*)?)')


def commands() -> dict[tuple, set]:   # {(command,) or (group, command): its options}
    "As `xtts-nb --help` shows them."
    def below(group, path=()):
        for name, one in getattr(group, 'commands', {}).items():
            yield (*path, name), {o for p in one.params for o in (*p.opts, *p.secondary_opts)} | {'--help'}
            yield from below(one, (*path, name))
    return dict(below(typer.main.get_command(app)))


def unknown(text: str, known: dict) -> list[str]:
    "The commands and options in `text` that do not exist."
    out = []
    for words in (found.group(1).split() for found in COMMAND.finditer(text)):
        path = max((p for p in known if tuple(words[:len(p)]) == p), key=len, default=None)
        options = known.get(path, set())
        wrong = {re.match(r'--[a-z0-9-]+', w).group() for w in words if re.match(r'--[a-z]', w)} - options
        if wrong: out.append(' '.join([*(path or words[:1]), *sorted(wrong)]))
    return out


def source_of(path: Path) -> str:
    "The text of a file, or the sources of the cells of a page."
    if path.suffix != '.ipynb': return path.read_text(encoding='utf-8')
    cells = json.loads(path.read_text(encoding='utf-8'))['cells']
    return '\n'.join(''.join(cell['source']) for cell in cells)


def leaves(group, path=()):
    "Every command that can be run, with its path."
    for name, one in group.commands.items():
        if hasattr(one, 'commands'): yield from leaves(one, (*path, name))
        elif not one.hidden: yield (*path, name), one


@pytest.mark.parametrize('path, one', list(leaves(typer.main.get_command(app))), ids=str)
def test_the_help_ends_with_an_example_that_is_understood(path, one):
    words = shlex.split(one.epilog.removeprefix('Example: xtts-nb '))
    assert tuple(words[:len(path)]) == path
    made = one.make_context(path[-1], words[len(path):])
    assert made.params.keys() >= {p.name for p in one.params if p.required}


@pytest.mark.parametrize('line, said', [
    ('grow m o --language fa', 'grow: write add-language OUT --model MODEL instead.'),
    ('export r o', 'export: write convert to-model OUT --model RUN instead.'),
    ('train-voice m', 'train-voice: write train-decoder --model MODEL instead.'),
    ('say hello --run r --voice v', 'say: --run is --model now; write --model r.'),
    ('serve --run r', 'serve: --run is --model now; write --model r.'),
    ('voices add a f --run r', 'voices add: --run is --model now; write --model r.'),
    ('find batch-size --from m', 'find batch-size: --from is --model now; write --model m.'),
    ('train --data c --from m', 'train: --from is --model now; write --model m.')])
def test_an_old_name_is_answered_with_the_new_one(ran, line, said):
    done = ran(line)
    assert done.code == 2 and done.out == '' and done.err.splitlines() == [f'xtts-nb: {said}']


def test_an_unknown_option_is_found():
    known = commands()
    assert unknown('run xtts-nb profile --trace.', known) == ['profile --trace']
    assert not unknown('xtts-nb bench diagnose --record and xtts-nb train --run=x', known)


@pytest.mark.parametrize('path', [*tree.notebooks(), ROOT / 'README.md'], ids=lambda p: p.stem)
def test_named_options_exist(path): assert not unknown(source_of(path), commands())


def test_every_name_of_the_guides_of_myxtts_resolves():
    "The page raises an error for a name that does not; the table that it stores is the present one."
    page = nbformat.read(ROOT / 'nbs/guides/from_myxtts.ipynb', as_version=4)
    code, space = [cell for cell in page.cells if cell.cell_type == 'code'], {}
    for cell in code: exec(cell.source, space)
    stored = code[-1].outputs[0]['data']['text/markdown']
    assert dict(re.findall(r'^\| `(.+)` \| `?(.+?)`? \|$', stored, re.MULTILINE)) == space['table']
    for wrong in ('xtts-nb train --nothing', 'xtts-nb nothing', 'data.nothing', 'xtts_nb.data.nothing'):
        with pytest.raises((AttributeError, ImportError, KeyError, ValueError)): space['resolve'](wrong)
