"""`xtts-nb` in this process, or in processes of its own: run to the end, interrupted at a stage, killed."""
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
import typer

from xtts_nb.app import cli

COMMAND = [sys.executable, '-c', 'from xtts_nb.app.cli import main; main()']


@dataclass
class Done:
    "How a process ended and what it printed."
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict:
        "The only line of stdout."
        (line,) = self.out.splitlines()
        return json.loads(line)

    @property
    def said(self) -> list[str]:
        "The lines on stderr that come from the command itself."
        return [line for line in self.err.splitlines() if line.startswith('xtts-nb: ')]


def environment() -> dict:
    "The environment of a user: TensorFlow's log level is not set."
    kept = {k: v for k, v in os.environ.items() if k not in ('TF_CPP_MIN_LOG_LEVEL', 'IN_TEST')}
    return kept | {'TERM': 'xterm', 'COLUMNS': '120'}


def hears_ctrl_c():
    "Runs in a child before it starts: background jobs of a shell or of CI ignore Ctrl-C by default."
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main(*arguments) -> int:
    "Run a command in this process; the exit code."
    old, sys.argv = sys.argv, ['xtts-nb', *map(str, arguments)]
    try:
        with pytest.raises(SystemExit) as end: cli.main()
        return end.value.code
    finally: sys.argv = old


def parsed(line: str) -> dict:
    "The parsed arguments of a command, without running it; raises the errors that `main` would report."
    command, words = typer.main.get_command(cli.app), line.split()
    while hasattr(command, 'commands'): command = command.commands[words.pop(0)]
    return command.make_context('xtts-nb', words).params


def check_bounds(
    *bounds: tuple,   # (a command up to an option, the last valid value, the first invalid one)
):
    "Check the limits of options: the last valid value, and the first invalid one."
    for line, inside, outside in bounds:
        parsed(f'{line} {inside}')
        with pytest.raises(Exception, match='Input should be (greater|less) than or equal'):
            parsed(f'{line} {outside}')


def xtts_nb(*arguments, cwd=None, before=None, timeout=300) -> Done:
    "Run a command to its end; `before` is called in the child."
    done = subprocess.run([*COMMAND, *map(str, arguments)], cwd=cwd, env=environment(), preexec_fn=before,
                          timeout=timeout, capture_output=True, text=True, encoding='utf-8')
    return Done(done.returncode, done.stdout, done.stderr)


def interrupted(
    *arguments,
    at: str,          # what stderr, a terminal, must have shown
    cwd=None, program=COMMAND, timeout=120,
) -> Done:
    "Run a command and press Ctrl-C as soon as it shows `at`."
    screen, end = pty.openpty()
    child = subprocess.Popen([*program, *map(str, arguments)], cwd=cwd, env=environment(),
                             stdout=subprocess.PIPE, stderr=end, preexec_fn=hears_ctrl_c)
    os.close(end)
    seen, sent, begun = b'', False, time.monotonic()
    try:
        while True:
            assert time.monotonic() - begun < timeout, f'still running; it showed {seen[-2000:]!r}'
            if select.select([screen], [], [], 0.05)[0]:
                try: more = os.read(screen, 65536)
                except OSError: break   # the child has closed the terminal
                if not more: break
                seen += more
            if not sent and at.encode() in seen:
                child.send_signal(signal.SIGINT)
                sent = True
        out = child.stdout.read().decode()
        child.wait(timeout)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        os.close(screen)
    assert sent, f'it never showed {at!r}: {seen[-2000:]!r}'
    plain = re.sub(r'(\x1b\[[0-9;?]*[a-zA-Z]|\s*[\r\n])+', '\n', seen.decode(errors='replace'))
    return Done(child.returncode, out, plain)


def tree(folder) -> dict[str, bytes]:
    "Everything below a folder, by path."
    return {p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() else b''
            for p in sorted(folder.rglob('*'))}


def reached(run) -> int:
    "The update of the last whole log line of a run; 0 where there is none yet."
    try: lines = (run / 'metrics.jsonl').read_text().splitlines(keepends=True)
    except FileNotFoundError: return 0
    if lines and not lines[-1].endswith('\n'): lines.pop()   # in the middle of being written
    return json.loads(lines[-1])['step'] if lines else 0
