"What every command shares: exit codes, one sentence, one JSON object, bars on stderr, settings, records."
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
from clock import Clock
import typer

from process import PROGRAM, check_bounds, environment, main, python, started
from xtts_nb import __version__
from xtts_nb.app import terminal
from xtts_nb.config import UserError, XTTSConfig


# --- options of all, help -----------------------------------------------------------------------------------

def test_the_version(ran):
    for line in ('--version', '--version --help'): assert ran(line).out == f'{__version__}\n'
    assert ran('config create --help').out != f'{__version__}\n'

@pytest.mark.parametrize('group', ['', 'bench', 'convert', 'voices'])
def test_without_a_command_there_is_help(ran, group):
    done = ran(group)
    assert done.code == 2 and f'Usage: {" ".join(["xtts-nb", *group.split()])}' in done.out + done.err
    assert 'Missing command' not in done.out + done.err and 'See xtts-nb' not in done.err
    assert '--install-completion' not in done.out + done.err

def test_bounds(): check_bounds(('bench train --rounds', 1, 0))

def test_a_traceback_is_that_of_python(): assert not terminal.app.pretty_exceptions_enable


# --- how a command ends -------------------------------------------------------------------------------------

def press(): os.kill(os.getpid(), signal.SIGINT)

def renamed():   # as modules of TensorFlow do
    with suppress(KeyboardInterrupt): press()
    raise ImportError('initialization failed')

def lost():
    with suppress(KeyboardInterrupt): press()

def printed_by_c():
    ctypes.pythonapi.PyRun_SimpleString(b'import os, signal; os.kill(os.getpid(), signal.SIGINT)')

def ignored_by_c(): ctypes.CFUNCTYPE(None)(press)()

@pytest.mark.parametrize('setup_tf', [renamed, lost, printed_by_c, ignored_by_c])
def test_ctrl_c_that_native_code_renames_prints_or_loses_ends_a_command(monkeypatch, capfd, setup_tf):
    printed = []
    monkeypatch.setattr(sys, 'unraisablehook', printed.append)
    monkeypatch.setattr('xtts_nb.config.setup_tf', setup_tf)
    before, hook = signal.getsignal(signal.SIGINT), sys.excepthook
    if before is signal.SIG_IGN: pytest.skip('SIGINT is ignored, as in the background of a shell')
    assert main('voices', 'add', 'anna', 'a.wav', '--model', 'm', '--voices', 'v') == 130
    assert capfd.readouterr() == ('', 'xtts-nb: Stopped.\n') and signal.getsignal(signal.SIGINT) is before
    assert not printed and sys.excepthook is hook and sys.unraisablehook == printed.append
    monkeypatch.undo()
    assert main('verify', 'no cache') == 2   # the next command of a process begins anew

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
    assert main('demo') == 130 and told == [None]
    said = capfd.readouterr()
    assert said.out == '' and said.err.endswith('xtts-nb: Stopped.\n') and 'second' not in said.err

ENDS = [   # what a command does -> the exit code, what stderr says
    (0, 0, ''), (1, 1, ''), (None, 0, ''), ('text', 0, ''), (130, 130, 'xtts-nb: Stopped.\n'),
    (UserError('mend it'), 2, 'xtts-nb: mend it\n'),
    (OSError(28, 'No space left', 'out'), 2, 'xtts-nb: out: No space left; nothing was written there.\n'),
    (OSError('odd'), 2, 'xtts-nb: xtts-nb: odd; nothing was written there.\n'),
    (KeyboardInterrupt(), 130, 'xtts-nb: Stopped.\n'), (typer.Abort(), 130, 'xtts-nb: Stopped.\n')]

@pytest.mark.parametrize('end, code, err', ENDS, ids=repr)
def test_exit_codes(monkeypatch, capfd, end, code, err):
    seen = []
    def app(words, standalone_mode, prog_name):
        seen.append((words, standalone_mode, prog_name))
        if isinstance(end, BaseException): raise end
        return end
    monkeypatch.setattr(terminal, 'app', app)
    assert main('verify', 'cache') == code and capfd.readouterr() == ('', err)
    assert seen == [(['verify', 'cache'], False, 'xtts-nb')]
    if code != 2: return
    with pytest.raises(type(end)) as raised:   # with --debug
        monkeypatch.setattr(sys, 'argv', ['xtts-nb', 'verify', '--debug', 'cache'])
        terminal.main()
    assert raised.value is end and seen[-1] == seen[0] and capfd.readouterr() == ('', '')

@pytest.mark.parametrize('command, gone, code', [
    ('--help', 'stdout', 141), ('monitor --help', 'stdout', 141), ('--help', 'stderr', 0),
    ('verify CACHE', 'stdout', 141), ('verify CACHE --json', 'stdout', 141), ('verify CACHE', 'stderr', 141),
    ('config create new.yaml', 'stdout', 141), ('verify nowhere', 'stdout', 2),
    ('verify nowhere', 'stderr', 141)])
def test_output_that_nobody_reads_ends_a_command_quietly(straight, tmp_path, command, gone, code):
    "As in `xtts-nb ... | head`: no traceback, and an exit code of its own, since 1 says that a check failed."
    read, write = os.pipe()
    os.close(read)
    words = command.replace('CACHE', str(straight)).split()
    child = started(*words, cwd=tmp_path, text=True,
                    **{'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, gone: write})
    os.close(write)
    out, err = child.communicate(60)
    assert child.returncode == code, (out, err)
    assert 'Traceback' not in (err or '') and 'Broken' not in (err or '')

def test_a_broken_pipe_that_is_not_ours_is_an_error(monkeypatch, capfd):
    "A child process that has gone is no reader that lost interest."
    def app(words, standalone_mode, prog_name): raise BrokenPipeError(32, 'Broken pipe')
    monkeypatch.setattr(terminal, 'app', app)
    assert main('verify', 'cache') == 2 and 'Broken pipe' in capfd.readouterr().err

ASCII = {'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}

def test_any_text_and_name_in_a_locale_of_ascii(tmp_path):
    "Arguments, files and output: Persian in a shell whose locale knows no letter of it."
    done = python(PROGRAM, 'config', 'create', 'پوشه/نام.yaml', '--json', cwd=tmp_path, cold=True,
                  env=environment() | ASCII)
    assert done.code == 0, done.err
    assert (tmp_path / 'پوشه' / 'نام.yaml').is_file() and 'پوشه/نام.yaml' in done.out

@pytest.mark.parametrize('as_json', [True, False])
@pytest.mark.parametrize('encoding, shown', [
    ('latin-1', 'é \\u0633 \\U0001f600'), ('utf-8', 'é س 😀')])
def test_a_letter_that_stdout_cannot_hold_is_escaped(monkeypatch, encoding, shown, as_json):
    "Where a result is in a language that the terminal or the pipe does not know."
    text, stdout = 'é س 😀', io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    def app(words, standalone_mode, prog_name):
        with terminal.answer(as_json) as show: show(text, text)
    monkeypatch.setattr(terminal, 'app', app)
    monkeypatch.setattr(sys, 'stdout', stdout)
    assert main('verify', 'cache') == 0
    printed = stdout.buffer.getvalue().decode(encoding)
    assert json.loads(printed) == text if as_json else printed == f'{shown}\n'

def test_a_mistake_of_ours_is_not_hidden(monkeypatch):
    def app(words, standalone_mode, prog_name): raise ValueError('ours')
    monkeypatch.setattr(terminal, 'app', app)
    monkeypatch.setattr(sys, 'argv', ['xtts-nb'])
    with pytest.raises(ValueError, match='ours'): terminal.main()

def test_a_wrong_option(ran, monkeypatch):
    done = ran('monitor --interval 0')
    assert done.code == 2 and len(done.said) == 1 and done.err.endswith('See xtts-nb monitor --help.\n')
    assert 'interval' in done.err
    done = ran('voices list')
    assert done.code == 2 and done.err.endswith('See xtts-nb voices list --help.\n')
    monkeypatch.setattr(sys, 'argv', ['xtts-nb', 'monitor', '--interval', '0', '--debug'])
    with pytest.raises(Exception, match='greater than or equal to 0.01'): terminal.main()


# --- what a command prints ----------------------------------------------------------------------------------

@pytest.mark.parametrize('as_json, out', [(True, '{"clip": "ä"}\n{"clip": 2}\n'), (False, 'one\n\n')])
def test_only_the_answer_goes_to_stdout(capsys, as_json, out):
    with terminal.answer(as_json) as show:
        print('chatter')
        show({'clip': 'ä'}, 'one')
        show({'clip': 2})
    print('afterwards')
    assert capsys.readouterr() == (f'{out}afterwards\n', 'chatter\n')

def test_bars(monkeypatch, capsys):
    "Each stage has one; it is full when the next begins. The rate is known after two steps."
    monkeypatch.setenv('COLUMNS', '150')
    with terminal.progress() as tell:
        for done in range(4): terminal.stage(tell, 'read the clips')(done, 8)
        tell('encode', 1, 2, 'a note')
    out, err = capsys.readouterr()
    first, second = [line.split() for line in err.splitlines() if line.strip()][-2:]
    assert out == '' and first[:3] == ['read', 'the', 'clips'] and '8/8' in first
    assert any(w.endswith('/s') for w in first)
    assert second[0] == 'encode' and '1/2' in second and second[-2:] == ['a', 'note']

@pytest.mark.parametrize('columns', [80, 130])
def test_a_narrow_terminal_cuts_nothing_but_the_note(monkeypatch, capsys, columns):
    monkeypatch.setenv('COLUMNS', str(columns))
    with terminal.progress() as tell:
        for done in (0, 1, 2, 12345): tell('read the recording', done, 12345, 'loss 3.805  ' * 6)
    line = [l for l in capsys.readouterr().err.splitlines() if l.strip()][-1]
    assert line.startswith('read the recording ') and ' 12345/12345 ' in line and ' loss 3.805' in line
    assert '…' not in line and len(line.rstrip()) <= columns and ('━' in line) == (columns == 130)

@pytest.mark.parametrize('fails, shown', [(False, '1/1'), (True, '0/1')])
def test_the_bar_of_a_stage_without_parts(monkeypatch, capsys, fails, shown):
    monkeypatch.setenv('COLUMNS', '150')
    with suppress(OSError), terminal.progress() as tell:
        tell('load the model', 0, 1)
        if fails: raise OSError
    assert shown in capsys.readouterr().err.splitlines()[-1]

@pytest.mark.parametrize('terminal_there', [False, True])
def test_a_log_gets_a_line_when_a_stage_begins(monkeypatch, capsys, terminal_there):
    if terminal_there: monkeypatch.setenv('FORCE_COLOR', '1')
    monkeypatch.setattr(terminal, 'time', Clock())
    with terminal.progress() as tell:
        tell('read', 0, 2)
        terminal.time.sleep(61.6)
        tell('read', 2, 2)
        tell('encode', 0, 2)
        lines = [line for line in capsys.readouterr().err.splitlines() if ' s  ' in line]
    assert lines == ([] if terminal_there else ['    0 s  read', '   62 s  encode'])

def test_a_table_has_72_columns(monkeypatch):
    monkeypatch.setenv('TERM', 'xterm-256color')
    text = terminal.table(f'{"a" * 70} b', [{'name': 'eager', 'step_ms': 1234.5},
                                            {'name': 'graph', 'step_ms': None}])
    title, *lines = text.splitlines()
    assert title == f'{"a" * 70} b' and '\x1b' not in text and text == text.rstrip()
    assert [line.split() for line in lines if 'ra' in line or 'ea' in line] == [['eager', '1,234.5'],
        ['graph', '–']]
    assert terminal.table(f'{"a" * 70} bb', [{'name': 'x'}]).split()[:2] == ['a' * 70, 'bb']

def test_a_table_wider_than_a_terminal_cuts_no_figure_and_turns():
    rows = [{'name': name, 'clips_per_s': 1234567.8, 'step_ms': 4831.94, 'ratio': 10.5, 'spread': 0.11,
             'au': 0.97, 'mfu': 0.46, 'cv': 0.254, 'first_s': 16.61} for name in ('eager', 'graph [XLA]')]
    narrow = [{k: row[k] for k in ('name', 'clips_per_s', 'step_ms')} for row in rows]
    figures = ['1,234,567.8', '4,831.9', '10.5 ×', '± 11%', '97%', '46%', '25.4%', '16.6 s']
    text = terminal.table('[4 x] 256', rows)
    assert text.splitlines()[0] == '[4 x] 256' and max(map(len, text.splitlines())) <= 72
    assert [line.split('  ')[0].strip() for line in text.splitlines()[4:]] == [
        'clips/s', 'ms per step', 'speed', 'spread', 'AU', 'MFU', 'variation', 'first step']
    assert all(line.count(figure) == 2 for line, figure in zip(text.splitlines()[4:], figures))
    assert [line.split() for line in terminal.table('', narrow).splitlines()[-2:]] == [
        ['eager', *figures[:2]], ['graph', '[XLA]', *figures[:2]]]
    # No wider with a text that can be broken, and a text stands on the left.
    said = terminal.table('', [{'name': 'a', 'licence': 'some words ' * 9}, {'name': 'b', 'licence': 'few'}])
    assert max(map(len, said.splitlines())) <= 72 and said.endswith('b   few')


# --- devices, records, settings -----------------------------------------------------------------------------

def test_settings_of_a_file_lie_over_a_preset_or_what_was_made(tmp_path, capsys):
    made, file = XTTSConfig.tiny().replace(data={'batch_size': 3, 'buckets': 2}), tmp_path / 'file.yaml'
    (tmp_path / 'config.yaml').write_text(made.to_yaml())
    file.write_text('data: {batch_size: 5, pin_memory: true}\n')
    load = terminal.load_settings
    assert load('tiny', None) == XTTSConfig.tiny() != load('xtts_v2', None) == XTTSConfig.xtts_v2()
    assert load('xtts_v2', None, tmp_path) == made and capsys.readouterr() == ('', '')
    assert load('tiny', file) == XTTSConfig.tiny().replace(data={'batch_size': 5})
    assert load('tiny', file, tmp_path) == made.replace(data={'batch_size': 5})
    out, err = capsys.readouterr()
    assert out == '' and err.count(f'{file}: data.pin_memory does nothing here') == 2
    with pytest.raises(UserError, match='empty'): load('tiny', None, tmp_path / 'empty')


# --- what is no part of the package -------------------------------------------------------------------------

def test_a_script_is_found_in_a_checkout_alone(monkeypatch, tmp_path):
    (tmp_path / 'a/benchmarks/some').mkdir(parents=True)
    (tmp_path / 'a/benchmarks/some/thing.py').write_text('value = 7')
    monkeypatch.setattr(sys, 'path', sys.path[:])
    for name in [n for n in sys.modules if n.partition('.')[0] == 'benchmarks']:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(terminal, '__file__', str(tmp_path / 'a/xtts_nb/app/terminal.py'))
    assert terminal.from_checkout('some.thing', 'bench x').value == 7
    for name in ('benchmarks', 'benchmarks.some', 'benchmarks.some.thing'): sys.modules.pop(name, None)
    monkeypatch.setattr(terminal, '__file__', str(tmp_path / 'b/xtts_nb/app/terminal.py'))
    with pytest.raises(UserError, match='bench x: needs benchmarks/ of the repository, .* clone'):
        terminal.from_checkout('some.thing', 'bench x')
