"The live view and the terminal on recorded traces: no GPU, no front end, no waiting."
import base64
import csv
import io
import json
import re
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

from xtts_nb.monitor import live as monitoring
from xtts_nb.config import UserError
from xtts_nb.monitor.live import LiveCallback, gpu_live, monitor, plot_samples, replay_svg, summary_lines
from xtts_nb.bench import png_bytes
from xtts_nb.sampler import CPU, EmulatedDevice, GPU, Sample, Sampler, emulated_probe, replay_probe

from test_utilisation_live import TRACE, moment


class Time:
    "A clock that only sleeping moves."
    def __init__(self): self.now, self.slept = 100., []
    def clock(self): return self.now
    def sleep(self, seconds): self.now += seconds; self.slept.append(seconds)


def watched(t=None, **kwargs):
    out, t = io.StringIO(), t or Time()
    summary = monitor(console=Console(file=out, width=120), clock=t.clock, sleep=t.sleep, **kwargs)
    return summary, '\n'.join([out.getvalue(), *summary_lines(summary)]), t.now - 100


# The live view

def live(trace, **kwargs):
    lines = []
    return gpu_live(probe=replay_probe(trace), interval=.001, say=lines.append, **kwargs), lines


def test_live_in_a_plain_script():
    view, lines = live(TRACE, title='mine')
    with view as it:
        it.update(step=1)
        it.update(loss=.5)
        it.sampler._thread.join(20)
        it.update(step=2, wait_ms=3.)
    assert view.summary['values'] == {'step': '2', 'loss': '0.5', 'wait_ms': '3'}
    assert view.summary['samples'] == 5
    assert view.figure.texts[0].get_text() == 'step 2 · loss 0.5' and view.summary['drawing'] is None
    assert view.figure.axes[1].get_title('left') == 'a step of the host: 3 ms'   # and no curve of one loss
    assert view.figure.axes[-1].get_title('left') == 'mine' and len(png_bytes(view.figure)) < 30_000
    assert lines[0].startswith('GPU 0') and view.sampler._thread is None


def test_an_arm_begins_with_a_sample_of_what_was_before():
    device, lines = EmulatedDevice(), []
    with gpu_live(emulated_probe(device), interval=60., say=lines.append) as view:
        view.arm('slow')
        time.sleep(.02)
        view.arm('fast')
        device.computes(view.arms[-1][0] - 1, view.arms[-1][0] + 60)
        time.sleep(.02)
    arms = view.summary['arms']
    assert [devices['emulated GPU 0']['mean'] for devices in arms.values()] == [0, 100]
    assert list(arms) == ['slow', 'fast']
    assert [text.get_text() for text in view.figure.axes[0].texts] == ['slow: 0 %', 'fast: 100 %']
    slow, fast, rest = lines
    assert slow.startswith('slow: emulated GPU 0 0 % busy')
    assert fast.startswith('fast: emulated GPU 0 100 % busy')
    assert ' samples over ' in rest


def test_live_leaves_the_picture_when_the_block_fails():
    view, lines = live(TRACE)
    with pytest.raises(ZeroDivisionError):
        with view: raise ZeroDivisionError
    assert view.figure is not None and lines


def test_live_of_the_shortest_block_has_two_samples():
    view, _ = live(TRACE[:2])
    with view: pass
    assert view.summary['samples'] == 2


def test_live_survives_a_probe_that_breaks():
    view, lines = live([TRACE[0], OSError('gone'), OSError('gone'), *TRACE[1:3]])
    with view as it: it.sampler._thread.join(20)
    assert view.summary['gaps'] == 2 and sum('misses readings' in line for line in lines) == 1


def test_a_pushed_tensor_is_read_only_when_drawn():
    class Lazy:
        read = 0
        def __float__(self): self.read += 1; return 2.
    value, (view, _) = Lazy(), live(TRACE)
    with view as it:
        for _ in range(100): it.update(loss=value)
        assert value.read == 0
    assert value.read > 0 and view.summary['values'] == {'loss': '2'}
    assert [loss for _, loss in view.losses] == [2.]


@pytest.mark.parametrize('kind', [float, np.float32])
def test_losses_are_kept_as_they_come_and_thinned(kind):
    "Of 2001 every other one is left. The seconds are those since the view began."
    view, now = monitoring.Live(Sampler(None, clock=lambda: now[0])), [7.]
    view.started = 5.
    for i in range(2000): view.update(loss=kind(i))
    assert view.losses == [(2., float(i)) for i in range(2000)]
    now[0] = 8.
    view.update(loss=kind(2000))
    assert view.losses == [*((2., float(i)) for i in range(0, 2000, 2)), (3., 2000.)]
    view.update(step=3)
    view.update(loss='?')
    view._note_loss()   # a word is no loss
    assert len(view.losses) == 1001 and view.values == {'loss': '?', 'step': 3}


def test_cpu_fallback_is_reported_once(monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '-1')
    lines = []
    with gpu_live(say=lines.append) as it: pass
    assert sum('showing the CPU instead' in line for line in lines) == 1
    assert set(it.summary['devices']) == {'CPU'} and any(line.startswith('CPU (') for line in lines)


class FakeShell:
    "An IPython shell with events, and a kernel if asked."
    def __init__(self, kernel=None):
        self.kernel, self.registered = kernel, []
        self.events = SimpleNamespace(register=lambda name, f: self.registered.append(f),
                                      unregister=lambda name, f: self.registered.remove(f))

def test_front_end_only_with_a_kernel_and_outside_tests(monkeypatch):
    monkeypatch.setattr(monitoring, '_shell', lambda: FakeShell(kernel=object()))
    monkeypatch.delenv('IN_TEST', raising=False)
    assert monitoring.has_frontend()
    monkeypatch.setenv('IN_TEST', '1')
    assert not monitoring.has_frontend()
    monkeypatch.delenv('IN_TEST')
    monkeypatch.setattr(monitoring, '_shell', lambda: FakeShell())
    assert not monitoring.has_frontend()


@pytest.mark.parametrize('loaded', [False, True])
def test_the_shell_of_this_process(monkeypatch, loaded):
    monkeypatch.setitem(sys.modules, 'IPython', SimpleNamespace(get_ipython=lambda: 'the shell') if loaded
                        else None)
    assert monitoring._shell() == ('the shell' if loaded else None)

def test_a_frame_is_drawn_every_now_and_then(monkeypatch):
    "Its cost is the share of a core since the view began."
    view, waits, rounds = monitoring.Live(Sampler(replay_probe(TRACE)),
                                          refresh=3.), [], iter([False, False, True])
    clocks, now = iter([10., 14., 18.]), iter([1., 4.])
    view.sampler.clock, view.started = lambda: 125., 0.
    view.sampler.sample()
    view._stop = SimpleNamespace(wait=lambda seconds: waits.append(seconds) or next(rounds))
    view._frame, seen = SimpleNamespace(value=''), []
    monkeypatch.setattr(monitoring, 'live_html', lambda *given: seen.append(given) or 'a frame')
    monkeypatch.setattr(monitoring, 'time', SimpleNamespace(perf_counter=lambda: next(clocks),
                                                            thread_time=lambda: next(now)))
    view.update(step=3)
    view._draw()
    assert waits == [3.] * 3 and view._frame.value == 'a frame' and view._drawing == 0.5
    assert seen == [(TRACE[:1], {'step': 3}, 125., view.arms)] * 2 and view.arms == []

def test_in_a_kernel_the_picture_takes_the_widget_s_place(monkeypatch):
    shown, drawn = [], threading.Event()
    handle = SimpleNamespace(update=lambda *given, **named: shown.append((given, named)))
    monkeypatch.setattr(monitoring, '_shell', lambda: FakeShell(kernel=object()))
    monkeypatch.delenv('IN_TEST', raising=False)
    monkeypatch.setattr('IPython.display.display', lambda *given, **named: shown.append((given, named))
                        or handle)
    monkeypatch.setattr(monitoring, 'live_html', lambda *given: drawn.set() or '<svg>')
    view, _ = live(TRACE, refresh=.001)
    with view as it:
        assert drawn.wait(20) and it._thread.daemon
        frame = it._frame
    (opened, named), (closed, how) = shown
    assert opened == (frame,) and named == {'display_id': True} and how == {'raw': True}
    assert set(closed[0]) == {'image/png', 'text/plain'}
    assert closed[0]['text/plain'] == 'Utilisation of GPU 0 and 1: Card'
    assert not it._thread.is_alive() and frame.comm is None   # closed
    monkeypatch.setattr(monitoring, 'has_frontend', lambda: False)
    shown.clear()
    with live(TRACE)[0]: pass
    ((picture,), how), = shown
    assert how == {'raw': True} and picture['image/png'].startswith(b'\x89PNG')


ARMS = [(TRACE[0].time, 'before'), (TRACE[len(TRACE) // 2].time, 'after')]

@pytest.mark.parametrize('seconds, lasts', [(7., '10.0s'), (12., '17.1s'), (1000., '17.1s')])
def test_a_comparison_is_replayed(seconds, lasts):
    "By CSS alone: a white curtain over the curves, which a reader without motion never sees."
    plot = lambda: plot_samples(TRACE, 'Two arms', arms=ARMS, losses=[(0., 2.), (1., 1.)])
    figure = plot()
    drawn = replay_svg(figure, seconds)
    root = ElementTree.fromstring(drawn)
    (curtain,) = [g for g in root.iter('{http://www.w3.org/2000/svg}g') if g.get('class') == 'xtts-curtain']
    assert curtain.get('style') == f'animation-duration: {lasts}'
    (cover,) = curtain
    assert 'fill: #ffffff' in cover.get('style')
    xs = [float(x) for x in re.findall(r'[ML] ([\d.]+)', cover.get('d'))]
    assert max(xs) < .75 * float(root.get('viewBox').split()[2])   # the losses beside them stay in sight
    style, = re.findall(r'@keyframes.*?</style>', drawn, re.DOTALL)
    assert '{ transform: scaleX(0);' in style and 'no-preference) { .xtts-curtain { animation:' in style
    assert {'Two arms', 'time (s)'} <= {text.text for text in root.iter('{http://www.w3.org/2000/svg}text')}
    assert drawn == replay_svg(plot(), seconds) and len(drawn) < 60_000 and '<script' not in drawn
    assert not any(patch.get_gid() for ax in figure.axes for patch in ax.patches)   # the still one has none


def outputs_of(program, env=None):
    "The outputs of a cell as nbdev-test stores them."
    code = ('import json; from execnb.shell import CaptureShell; s = CaptureShell(); '
            f'out = s.run({program!r}); print("OUT" + json.dumps(out))')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.rpartition('OUT')[2])

CELL = '''
from xtts_nb.monitor.live import gpu_live
from xtts_nb.sampler import GPU, Sample, replay_probe
with gpu_live(replay_probe([Sample(float(i), (GPU(0, 'Card', 50.),)) for i in range(9)])): pass
'''

def test_stored_output_is_a_plain_picture():
    pytest.importorskip('execnb')
    out = outputs_of(CELL)
    (picture,) = [o for o in out if o['output_type'] == 'display_data']
    assert set(picture['data']) == {'image/png', 'text/plain'}
    assert len(base64.b64decode(picture['data']['image/png'])) < 30_000
    assert 'GPU 0 (Card)' in ''.join(t for o in out if o['output_type'] == 'stream' for t in o['text'])


def test_stored_output_of_arms_is_also_a_replay():
    pytest.importorskip('execnb')
    (picture,) = [o for o in outputs_of(CELL.replace('): pass', ''') as live:
    live.arm('before')
    live.arm('after')''')) if o['output_type'] == 'display_data']
    assert set(picture['data']) == {'image/png', 'image/svg+xml', 'text/plain'}
    assert ''.join(picture['data']['image/svg+xml']).startswith('<svg')
    one = CELL.replace('range(9)', 'range(1)').replace('): pass', ''') as live: live.arm('before')''')
    (picture,) = [o for o in outputs_of(one) if o['output_type'] == 'display_data']
    assert 'image/svg+xml' not in picture['data']


def test_a_kernel_replaces_the_widget_by_the_picture():
    "In a real Jupyter kernel, as `jupyter execute` runs it."
    nbclient, nbformat = pytest.importorskip('nbclient'), pytest.importorskip('nbformat')
    pytest.importorskip('ipykernel')
    wait = CELL.replace('): pass', ''', refresh=.02) as live:
    while '<svg' not in live._frame.value: time.sleep(.02)''')
    first = 'import os, time; os.environ.pop("IN_TEST", None)'
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in (first, wait)])
    nbclient.NotebookClient(nb, timeout=60, kernel_name='python3').execute()
    displays = [o for o in nb.cells[1].outputs if o.output_type == 'display_data']
    assert [set(o.data) for o in displays] == [{'image/png', 'text/plain'}]


def test_callback_shows_fit(monkeypatch):
    keras = pytest.importorskip('keras')
    lines = []
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile('sgd', 'mse')
    x = keras.ops.convert_to_numpy(keras.ops.ones((8, 2)))
    watch = LiveCallback(probe=replay_probe(TRACE), say=lines.append)
    model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=[watch])
    values = watch.live.summary['values']
    assert values.keys() == {'epoch', 'batch', 'loss'} and values['epoch'] == '2' and watch.async_safe
    assert [name for _, name in watch.live.sampler.marks] == ['epoch 1', 'epoch 2']
    assert watch.live.sampler._thread is None and watch.live.figure is not None


@pytest.fixture
def loop(monkeypatch):
    "A callback whose view and phases only note what they are told, and these notes."
    pytest.importorskip('keras')
    notes = []
    note = lambda name: lambda *given, **named: notes.append((name, *given, *named.items()))
    view = SimpleNamespace(__enter__=note('enter'), __exit__=note('exit'), update=note('update'),
                           say=note('say'),
                           sampler=SimpleNamespace(mark=note('mark')))
    class Phases:
        why = 'odd loop'
        def __init__(self, report): self.report = report
        def begin(self, model): notes.append(('begin', model)); return self.why
        def end(self): notes.append(('end',))
    monkeypatch.setattr(monitoring, 'gpu_live', lambda **named: notes.append(('live', named)) or view)
    monkeypatch.setattr('xtts_nb.monitor.loop.FitPhases', Phases)
    monkeypatch.setattr(monitoring, '_shell', lambda: None)
    return notes, Phases

def test_what_the_callback_tells(loop):
    notes, _ = loop
    watch = LiveCallback(title='t')
    watch.set_model(SimpleNamespace(compiled=True))
    watch.on_train_begin()
    opened = [('live', {'title': 't'}), ('enter',), ('begin', watch.model),
              ('say', 'The phases of this fit cannot be told apart: odd loop.')]
    assert notes == opened
    notes.clear()
    watch.on_train_batch_end(0, {'loss': 3.})
    watch.on_epoch_begin(0); watch.on_train_batch_end(4)
    watch.on_epoch_end(0, {'val_loss': 2.}); watch.on_train_batch_end(0)
    watch.on_epoch_begin(2); watch.on_train_batch_end(0); watch.on_epoch_end(2)
    watch._report({'step': 1, 'loss': 2., 'wait_ms': 3.})
    watch.on_train_end(); watch.on_train_end()
    assert notes == [
        ('update', ('epoch', 1), ('batch', 1), ('loss', 3.)), ('mark', 'epoch 1'),
        ('update', ('epoch', 1), ('batch', 5)),
        ('update', ('val_loss', 2.)), ('update', ('epoch', 2), ('batch', 1)), ('mark', 'epoch 3'),
        ('update', ('epoch', 3), ('batch', 1)), ('update',), ('update', ('wait_ms', 3.)), ('end',),
        ('exit', None, None, None)]
    notes.clear()
    watch.on_train_begin(); watch.on_train_begin()   # the first did not end
    assert notes == [*opened, ('end',), ('exit', None, None, None), *opened]

@pytest.mark.parametrize('phases, compiled, why, said', [
    (True, True, None, ['begin']), (True, False, 'x', []), (False, True, 'x', []),
    (True, True, 'x', ['begin', 'say'])])
def test_phases_are_shown_where_they_are_measurable(loop, phases, compiled, why, said):
    notes, Phases = loop
    Phases.why = why
    watch = LiveCallback(phases)
    watch.set_model(SimpleNamespace(compiled=compiled))
    watch.on_train_begin()
    assert [name for name, *_ in notes] == ['live', 'enter', *said]


def test_callback_of_a_broken_fit_is_closed_by_the_end_of_the_cell(monkeypatch):
    keras = pytest.importorskip('keras')
    shell = FakeShell()
    monkeypatch.setattr(monitoring, '_shell', lambda: shell)
    monkeypatch.setattr('IPython.display.display', lambda *args, **kwargs: None)
    class Break(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None): raise RuntimeError('out of memory')
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile('sgd', 'mse')
    x = keras.ops.convert_to_numpy(keras.ops.ones((4, 2)))
    watch = LiveCallback(probe=replay_probe(TRACE), say=lambda line: None)
    with pytest.raises(RuntimeError): model.fit(x, x[:, :1], verbose=0, callbacks=[watch, Break()])
    (end_of_cell,) = shell.registered
    end_of_cell(None)
    assert watch.live.sampler._thread is None and watch.live.figure is not None and not shell.registered


# The terminal

@pytest.mark.parametrize('duration, slept', [(3, [.5] * 6), (1.2, [.5, .5, pytest.approx(.2)]), (.5, [.5])])
def test_monitor_runs_for_its_duration(duration, slept):
    t = Time()
    summary, out, now = watched(t, duration=duration, interval=.5,
                                probe=replay_probe(moment(i) for i in range(100)))
    assert now == pytest.approx(duration) and summary['samples'] == len(slept) + 1 and t.slept == slept
    assert summary['interrupted'] is False and summary['log_file'] is None
    assert summary['devices']['GPU 0']['mean'] == 90 and summary['devices']['GPU 1']['mean'] == 0
    assert 'GPU 1 Card' in out and 'GPU 1 (Card): 0 %' in out


def test_a_slow_probe_is_asked_again_at_once_and_then_in_its_beat():
    t, costs = Time(), iter([.7, .7, .1, .1])
    def probe():
        t.now += next(costs)
        return moment(0)
    assert watched(t, interval=.5, probe=probe)[0]['samples'] == 4
    assert t.slept == pytest.approx([0., 0., .4, .4])


@pytest.mark.parametrize('duration', [0, None])
def test_without_a_duration_it_ends_with_the_trace(duration):
    summary, out, _ = watched(duration=duration, probe=replay_probe(TRACE))
    assert summary['samples'] == 5 and '4 s, Ctrl-C ends' in out


def test_names_are_no_markup_and_numbers_no_highlights():
    out, card, t = io.StringIO(), GPU(0, 'Card [b]12[/b]', 50.), Time()
    console = Console(file=out, width=120, force_terminal=True, color_system='truecolor')
    monitor(probe=replay_probe([Sample(0., (card,))] * 3), console=console, clock=t.clock, sleep=t.sleep)
    assert 'Card [b]12[/b]' in re.sub(r'\x1b\[[0-9;]*m', '', out.getvalue())
    assert all(f'{i} s, Ctrl-C ends' in out.getvalue() for i in range(3))   # a frame for each sample


@pytest.mark.parametrize('given, head', [((5.4, 20, None), '5 of 20 s ███░░░░░░░░░'),
                                         ((5, None, None), '5 s, Ctrl-C ends'),
                                         ((5, 0, 'a/b.csv'), '5 s, Ctrl-C ends · log b.csv')])
def test_how_far_it_is(given, head): assert monitoring._head(*given) == head


@pytest.mark.parametrize('share, bar', [(-1., '░' * 24), (0.5, '█' * 12 + '░' * 12), (2., '█' * 24)])
def test_a_bar_of_blocks(share, bar): assert monitoring._bar(share) == bar


def test_the_last_readings_as_blocks():
    values = np.array([0., 12.4, 12.5, 50., 87.4, 87.5, 100., np.nan])
    assert monitoring._spark(values) == '▁▁▂▅▇██ '
    assert monitoring._spark(np.arange(31.)[::-1]) == '▃' * 5 + '▂' * 12 + '▁' * 13
    assert monitoring._spark(values, 3) == '██ '


def test_the_table_in_the_terminal():
    cards = (GPU(0, 'A', 90., 2 << 30, 8 << 30, 100., 50., 1000.), GPU(1, 'B'))
    samples = [Sample(0., (*cards, GPU(2, 'gone', 50.)), CPU('C', 40., memory_used=1 << 30,
        memory_total=4 << 30))] * 40
    samples += [Sample(1., cards, samples[0].cpu)]
    out = io.StringIO()
    Console(file=out, width=160).print(monitoring._table(samples, 'a head'))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert out.getvalue().startswith('a head')
    assert lines[1] == 'device utilisation lately memory power temp. clock'.split()
    full = f'GPU 0 A {"█" * 22}░░ 90 % {"█" * 30} 2.0 / 8 GiB 100 W 50 °C 1000 MHz'.split()
    assert lines[2:] == [full, ['GPU', '1', 'B'], ['GPU', '2', 'no', 'reading'],
                         f'CPU C {"█" * 10}{"░" * 14} 40 % {"▄" * 30} 1.0 / 4 GiB'.split()]
    assert max(map(len, out.getvalue().splitlines())) < 150   # as wide as it must be


def test_monitor_ends_in_order_at_ctrl_c(tmp_path):
    log = tmp_path / 'a.jsonl'
    summary, out, _ = watched(probe=replay_probe([*TRACE[:2], KeyboardInterrupt()]), log_file=log)
    assert summary['interrupted'] is True and summary['samples'] == 2
    assert len(log.read_text().splitlines()) == 2 and '2 samples' in out


def test_monitor_jsonl(tmp_path):
    log = tmp_path / 'a.jsonl'
    broken, written = Sample(9., error='x: gönne'), []
    trace = replay_probe([*TRACE, broken])
    def probe():
        written.append(log.read_text(encoding='utf-8').count('\n') if log.exists() else 0)
        return trace()
    summary, *_ = watched(probe=probe, log_file=log)
    assert written == list(range(7)) and 'gönne' in log.read_text(encoding='utf-8')   # each line at once
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(r.pop('date').endswith('+00:00') for r in rows)
    assert rows == json.loads(json.dumps([asdict(s) for s in (*TRACE, broken)]))
    assert summary['log_file'] == str(log) and summary['gaps'] == 1


def test_monitor_csv_has_a_line_per_device(tmp_path):
    log = tmp_path / 'a.CSV'
    watched(probe=replay_probe([*TRACE, Sample(9., error='x: gone')]), log_file=log)
    rows = list(csv.DictReader(log.open()))
    assert [r['device'] for r in rows] == ['GPU 0', 'GPU 1', 'CPU'] * 5 + ['']
    assert [r['utilisation'] for r in rows[:3]] == ['90.0', '0.0', '40.0'] and rows[0]['process'] == ''
    assert ','.join(rows[0]) == (
        'date,time,device,name,utilisation,process,memory_used,memory_total,process_memory,disk_read,'
        'disk_write,power,temperature,clock,sm_active,tensor_active,memory_active,from_host,to_host,error')
    assert rows[-1]['error'] == 'x: gone' and rows[-1]['time'] == '9.0'


def test_monitor_refuses_other_endings(tmp_path):
    with pytest.raises(UserError, match=r'a\.txt.*\.jsonl or \.csv'):
        watched(probe=replay_probe(TRACE), log_file=tmp_path / 'a.txt')
    assert not list(tmp_path.iterdir())


def test_monitor_never_writes_over_a_log(tmp_path):
    log = tmp_path / 'a.csv'
    log.write_text('evidence')
    with pytest.raises(UserError, match='already exists'): watched(probe=replay_probe(TRACE), log_file=log)
    assert log.read_text() == 'evidence'


def test_monitor_names_a_log_that_cannot_be_written(tmp_path):
    (tmp_path / 'file').touch()
    for name in ('a.csv', 'a.jsonl'):
        with pytest.raises(UserError, match='nothing was written'):
            watched(probe=replay_probe(TRACE), log_file=tmp_path / 'file' / name)


@pytest.mark.parametrize('bad', [dict(duration=-.1), dict(interval=0)])
def test_monitor_refuses(bad):
    with pytest.raises(UserError, match='take'): watched(probe=replay_probe(TRACE), **bad)


def test_monitor_falls_back_in_one_line(monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '-1')
    summary, out, _ = watched(duration=2)
    assert out.count('showing the CPU instead') == 1 and set(summary['devices']) == {'CPU'}


def test_monitor_speaks_into_a_pipe():
    _, out, _ = watched(duration=20, probe=replay_probe(moment(i) for i in range(100)))
    assert re.findall(r'(\d+) of 20 s', out) == ['5', '10', '15', '20',
                                                 '20']   # the last is that of the table


def test_monitor_drops_what_the_ring_cannot_hold():
    s = Sampler(replay_probe(TRACE), capacity=2)
    for _ in TRACE: s.sample()
    assert s.summary()['dropped'] == 3 and len(summary_lines(s.summary())) == 4
