"""`xtts-nb` in this process, or in processes of its own: run to the end, interrupted at a stage, killed.

A process of its own is forked from a server that has imported TensorFlow and the library but run no op: the
import takes longer than most tests. A test of the start itself asks for a `cold` one."""
import atexit
import json
import multiprocessing
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection

import pytest
import tree as repository

from xtts_nb.app import cli

PROGRAM = 'from xtts_nb.app.cli import main; main()'
COMMAND = [sys.executable, '-c', PROGRAM]
# The same with smaller presets, demos of two pairs, and pipelines that are measured for a moment,
# without the search for the greatest rate of steps that each feeds, of 20 steps and more at every rate.
SMALL = '''
from functools import partial
from xtts_nb.app import bench_data, demo
from xtts_nb.app.cli import main
from xtts_nb.config import XTTSConfig
small = XTTSConfig.tiny(64).replace(
    model={'dvae': {'hidden': 16, 'codebook_dim': 8, 'codes': 32},
           'gpt': {'num_layers': 1, 'conditioning_layers': 1}}, data={'batch_size': 8, 'buckets': 1},
    training={'gpt': {'warmup_steps': 1, 'log_every': 4},
              'dvae': {'steps': 20, 'batch_size': 1, 'mode': 'eager'}})
XTTSConfig.tiny = XTTSConfig.xtts_v2 = classmethod(lambda cls: small)
demo.run_demo = partial(demo.run_demo, pairs=2, rounds=1)
bench_data._bench_loaders = partial(bench_data._bench_loaders, seconds=0.2)
bench_data.fed_steps = lambda *given, **named: None
main()
'''

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

# --- processes forked from one that has imported everything -------------------------------------------------

@cache
def server():
    "The context of the fork server, which starts with the first process; `prepare` takes it too."
    context = multiprocessing.get_context('forkserver')
    library = [f'xtts_nb.{name}' for name in repository.modules()]
    context.set_forkserver_preload(['pytest', 'typer', 'tensorflow', 'keras', 'matplotlib.pyplot', *library])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('TF_CPP_MIN_LOG_LEVEL', '3')   # as the start of a command sets it
        forkserver.ensure_running()
    return context

def _run(
    code: str, arguments: list[str], cwd: str, env: dict,
    streams: tuple,    # connections in place of stdin, stdout and stderr; None: /dev/null
    before,            # called first
):
    "What a forked process does: take its streams, folder and environment, and run `code` as `python -c`."
    null = os.open(os.devnull, os.O_RDWR)
    for fd, stream in enumerate(streams):
        os.dup2(stream.fileno() if stream else null, fd)
        if stream: stream.close()
    os.close(null)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, 'w', closefd=False)
    sys.stderr = open(2, 'w', buffering=1, errors='backslashreplace', closefd=False)
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv, sys.path[0:0] = ['-c', *arguments], ['']
    if before: before()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try: exec(compile(code, '<string>', 'exec'), {'__name__': '__main__'})
    finally: atexit._run_exitfuncs()   # multiprocessing ends its processes without them

class Forked:
    "`python -c code arguments` from the fork server; offers what tests use of `subprocess.Popen`."
    def __init__(self, code: str, *arguments, cwd=None, env=None, before=None, stdin=None, stdout=None,
                 stderr=None, text=False):
        self.streams, theirs = {}, []
        for name, asked in (('stdin', stdin), ('stdout', stdout), ('stderr', stderr)):
            if asked == subprocess.PIPE:
                read, write = os.pipe()
                mine, asked = (write, read) if name == 'stdin' else (read, write)
                self.streams[name] = open(mine, 'w' if name == 'stdin' else 'r', encoding='utf-8') if text \
                    else open(mine, 'wb' if name == 'stdin' else 'rb')
            elif asked == subprocess.STDOUT: asked = os.dup(theirs[1].fileno())
            elif asked is not None and asked != subprocess.DEVNULL: asked = os.dup(asked)
            theirs.append(None if asked in (None, subprocess.DEVNULL) else Connection(asked))
        env = dict(environment() if env is None else env)
        self.process = server().Process(target=_run, args=(
            code, [str(a) for a in arguments], str(cwd or os.getcwd()), env, tuple(theirs), before))
        self.process.start()
        for one in theirs:
            if one: one.close()

    stdin, stdout, stderr = (property(lambda self, name=name: self.streams.get(name))
                             for name in ('stdin', 'stdout', 'stderr'))
    pid = property(lambda self: self.process.pid)
    returncode = property(lambda self: self.process.exitcode)

    def poll(self) -> int | None: return self.process.exitcode

    def wait(self, timeout=None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None: raise subprocess.TimeoutExpired('a forked process', timeout)
        return self.process.exitcode

    def send_signal(self, number):
        if self.process.exitcode is not None: return
        with suppress(ProcessLookupError): os.kill(self.pid, number)   # it may have ended since

    def terminate(self): self.send_signal(signal.SIGTERM)

    def kill(self): self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=None) -> tuple:
        "What it writes until it ends: stdout and stderr."
        with ThreadPoolExecutor(2) as pool:
            read = [pool.submit(self.streams[name].read) if name in self.streams else None
                    for name in ('stdout', 'stderr')]
            try: self.wait(timeout)
            finally: self.kill()
            return tuple(one and one.result() for one in read)

def python(code: str, *arguments, timeout=300, cold=False, before=None, **how) -> Done:
    "Run `python -c code arguments` to its end; `before` is called in the child."
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    if cold:
        how.setdefault('env', environment())
        child = subprocess.Popen([sys.executable, '-c', code, *map(str, arguments)], encoding='utf-8',
                                 preexec_fn=before, **pipes, **how)
    else: child = Forked(code, *arguments, before=before, **pipes, **how)
    try: out, err = child.communicate(timeout=timeout)
    finally:
        child.kill()
        child.wait()
    return Done(child.returncode, out, err)

def xtts_nb(*arguments, **how) -> Done:
    "Run a command to its end, as `python` does."
    return python(PROGRAM, *arguments, **how)

def started(*arguments, cold=False, before=None, program=PROGRAM, **how):
    "A command in the background: a `Forked`, or a `Popen` that is as cold as a user's."
    if not cold: return Forked(program, *arguments, before=before, **how)
    return subprocess.Popen([*COMMAND, *map(str, arguments)], env=environment(), preexec_fn=before, **how)

def interrupted(
    *arguments,
    at: str,          # what stderr, a terminal, must have shown
    cwd=None, cold=False, timeout=120, program=PROGRAM,
) -> Done:
    "Run a command and press Ctrl-C as soon as it shows `at`."
    screen, end = pty.openpty()
    child = started(*arguments, cwd=cwd, stdout=subprocess.PIPE, stderr=end, before=hears_ctrl_c, cold=cold,
                    program=program)
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
