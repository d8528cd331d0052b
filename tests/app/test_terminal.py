"What every command shares: exit codes, Ctrl-C, output that nobody reads, any language, bars, tables."
import ctypes
import io
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
import typer

from process import PROGRAM, environment, main, python, started
from xtts_nb.app import terminal
from xtts_nb.config import UserError

# --- how a command ends -------------------------------------------------------------------------------------

def press(): os.kill(os.getpid(), signal.SIGINT)

def changed():   # as modules of TensorFlow do
    with suppress(KeyboardInterrupt): press()
    raise ImportError('initialization failed')

def lost():
    with suppress(KeyboardInterrupt): press()

def printed_by_c():
    ctypes.pythonapi.PyRun_SimpleString(b'import os, signal; os.kill(os.getpid(), signal.SIGINT)')

def ignored_by_c(): ctypes.CFUNCTYPE(None)(press)()

@pytest.mark.parametrize('setup_tf', [changed, lost, printed_by_c, ignored_by_c])
def test_ctrl_c_that_native_code_renames_prints_or_loses_ends_a_command(monkeypatch, capfd, setup_tf):
    printed = []
    monkeypatch.setattr(sys, 'unraisablehook', printed.append)
    monkeypatch.setattr('xtts_nb.config.setup_tf', lambda **_: setup_tf())
    before, hook = signal.getsignal(signal.SIGINT), sys.excepthook
    if before is signal.SIG_IGN: pytest.skip('SIGINT is ignored, as in the background of a shell')
    assert main('merge', '.', '--out', 'cache') == 130
    assert capfd.readouterr() == ('', 'xtts-nb: Stopped.\n') and signal.getsignal(signal.SIGINT) is before
    assert not printed and sys.excepthook is hook and sys.unraisablehook == printed.append
    monkeypatch.undo()
    assert main('verify', 'no cache') == 2   # the next command of a process starts as usual

def test_ctrl_c_that_native_code_loses_ends_a_command_at_its_next_report(monkeypatch, capfd):
    "And only in the main thread, where Python raises it."
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN: pytest.skip('SIGINT is ignored')
    told = []
    def app(words, standalone_mode, prog_name):
        with terminal.progress() as tell:
            tell('first', 0, 2)
            lost()
            other = threading.Thread(target=lambda: told.append(tell('first', 1, 2)))
            other.start()
            other.join()
            tell('second', 0, 1)
            told.append('never')
    monkeypatch.setattr(terminal, 'app', app)
    assert main('demo') == 130 and told == [None] and capfd.readouterr().err.endswith('xtts-nb: Stopped.\n')

ENDS = [   # what a command does -> the exit code, what stderr says
    (0, 0, ''), (1, 1, ''), (None, 0, ''), (130, 130, 'xtts-nb: Stopped.\n'),
    (UserError('fix it'), 2, 'xtts-nb: fix it\n'),
    (OSError(28, 'No space left', 'out'), 2, 'xtts-nb: out: No space left.\n'),
    (KeyboardInterrupt(), 130, 'xtts-nb: Stopped.\n'), (typer.Abort(), 130, 'xtts-nb: Stopped.\n'),
    (BrokenPipeError(32, 'Broken pipe'), 2, 'xtts-nb: xtts-nb: Broken pipe.\n'),
    (ValueError('ours'), ValueError, '')]   # a mistake of ours is not hidden

@pytest.mark.parametrize('end, code, err', ENDS, ids=repr)
def test_exit_codes(monkeypatch, capfd, end, code, err):
    def app(words, standalone_mode, prog_name):
        assert words == ['verify', 'cache']
        if isinstance(end, BaseException): raise end
        return end
    monkeypatch.setattr(terminal, 'app', app)
    if code is not ValueError: assert main('verify', 'cache') == code and capfd.readouterr() == ('', err)
    if code not in (2, ValueError): return
    with pytest.raises(type(end)):   # with --debug
        monkeypatch.setattr(sys, 'argv', ['xtts-nb', 'verify', '--debug', 'cache'])
        terminal.main()

@pytest.mark.parametrize('command, gone, code', [
    ('--help', 'stdout', 141), ('--help', 'stderr', 0), ('verify CACHE', 'stdout', 141),
    ('verify CACHE --json', 'stdout', 141), ('verify CACHE', 'stderr', 141), ('verify nowhere', 'stdout', 2)])
def test_output_that_nobody_reads_ends_a_command_quietly(straight, tmp_path, command, gone, code):
    "As in `xtts-nb ... | head`: no traceback, and an exit code of its own, since 1 says that a check failed."
    read, write = os.pipe()
    os.close(read)
    child = started(*command.replace('CACHE', str(straight)).split(), cwd=tmp_path, text=True,
                    **{'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, gone: write})
    os.close(write)
    out, err = child.communicate(60)
    assert child.returncode == code and 'Traceback' not in (err or '') and 'Broken' not in (err or ''), (out,
                                                                                                         err)

def test_any_text_and_name_in_a_locale_of_ascii(tmp_path):
    "Arguments, files and output: Persian in a shell whose locale knows no letter of it."
    done = python(PROGRAM, 'config', 'create', 'پوشه/نام.yaml', '--json', cwd=tmp_path, cold=True,
                  env=environment() | {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'})
    assert done.code == 0, done.err
    assert (tmp_path / 'پوشه/نام.yaml').is_file() and 'پوشه/نام.yaml' in done.out

@pytest.mark.parametrize('as_json', [True, False])
@pytest.mark.parametrize('encoding, shown', [('latin-1', 'é \\u0633 \\U0001f600'), ('utf-8', 'é س 😀')])
def test_a_letter_that_stdout_cannot_hold_is_escaped(monkeypatch, encoding, shown, as_json):
    text, stdout = 'é س 😀', io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    def app(words, standalone_mode, prog_name):
        with terminal.answer(as_json) as show: show(text, text)
    monkeypatch.setattr(terminal, 'app', app)
    monkeypatch.setattr(sys, 'stdout', stdout)
    assert main('verify', 'cache') == 0
    printed = stdout.buffer.getvalue().decode(encoding)
    assert json.loads(printed) == text if as_json else printed == f'{shown}\n'

# --- what a command prints ----------------------------------------------------------------------------------

def test_a_table_wider_than_a_terminal_cuts_no_figure_and_turns():
    rows = [{'name': name, 'clips_per_s': 1234567.8, 'step_ms': 4831.94, 'ratio': 10.5, 'spread': 0.11,
             'au': 0.97, 'mfu': 0.46, 'cv': 0.254, 'first_s': 16.61} for name in ('eager', 'graph [XLA]')]
    figures = ['1,234,567.8', '4,831.9', '10.5 ×', '± 11%', '97%', '46%', '25.4%', '16.6 s']
    text = terminal.table('[4 x] 256', rows)
    assert text.splitlines()[0] == '[4 x] 256' and max(map(len, text.splitlines())) <= 72
    assert all(line.count(figure) == 2 for line, figure in zip(text.splitlines()[4:], figures, strict=True))
    narrow = [{k: row[k] for k in ('name', 'clips_per_s', 'step_ms')} for row in rows]
    assert terminal.table('', narrow).splitlines()[-1].split() == ['graph', '[XLA]', *figures[:2]]
    said = terminal.table('', [{'name': 'a', 'licence': 'some words ' * 9}, {'name': 'b', 'licence': 'few'}])
    assert max(map(len, said.splitlines())) <= 72 and said.endswith('b   few')
