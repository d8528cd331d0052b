"Every command and option that the library or a page tells a user to type exists."
import json
import re
from pathlib import Path

import pytest
import tree
import typer

from xtts_nb.app.cli import app

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(r'xtts-nb +([a-z][a-z-]*(?: +(?:(?!xtts-nb| -- )[^\n`\'")};:])*)?)')   # up to another command


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
        wrong = {re.match(r'--[a-z-]+', w).group() for w in words if re.match(r'--[a-z]', w)} - options
        if wrong: out.append(' '.join([*(path or words[:1]), *sorted(wrong)]))
    return out


def told(path: Path) -> str:
    "What a file of the library or a page says, outputs left out."
    if path.suffix != '.ipynb': return path.read_text(encoding='utf-8')
    return '\n'.join(''.join(cell['source']) for cell in json.loads(path.read_text(encoding='utf-8'))['cells'])


def test_an_option_that_does_not_exist_is_seen():
    known = commands()
    assert unknown('run xtts-nb profile --trace.', known) == ['profile --trace']
    assert not unknown('xtts-nb bench diagnose --record and xtts-nb train --run=x', known)


@pytest.mark.parametrize('path', [*tree.notebooks(), ROOT / 'README.md'], ids=lambda p: p.stem)
def test_options_that_are_recommended_exist(path): assert not unknown(told(path), commands())
