"Pictures, the live view and the terminal on recorded traces: no GPU, no front end, no waiting."
import base64
import csv
import io
from pathlib import Path
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from xtts_nb import monitoring
from xtts_nb.config import UserError
from xtts_nb.monitoring import LiveCallback, gpu_live, monitor
from xtts_nb.sampler import CPU, GPU, Process, Sample, Sampler, replay_probe, summarise
from xtts_nb.utilisation import device_names, live_html, phases_of, plot_samples, png_bytes, summary_lines


def moment(i, gpus=2):
    cards = tuple(GPU(k, 'Card', [90., 0.][k], (k + 1) << 30, 8 << 30, 100., 50., 1000.) for k in range(gpus))
    return Sample(float(i), cards, CPU('Chip', 40., 20., 2 << 30, 4 << 30, 1 << 30))

TRACE, ON_CPU = [moment(i) for i in range(5)], [moment(i, gpus=0) for i in range(5)]


class Time:
    "A clock that only sleeping moves."
    def __init__(self): self.now = 0.
    def clock(self): return self.now
    def sleep(self, seconds): self.now += seconds


def watched(**kwargs):
    out = io.StringIO()
    t = Time()
    summary = monitor(console=Console(file=out, width=120), clock=t.clock, sleep=t.sleep, **kwargs)
    return summary, out.getvalue(), t.now


# Pictures

def labels(fig): return [line.get_label() for line in fig.axes[0].lines if not line.get_label().startswith('_')]

def test_plot_keeps_gpus_apart_and_names_the_device():
    fig = plot_samples(TRACE, marks=[(1., 'epoch 1')], note='loss 2')
    assert labels(fig) == ['CPU', 'GPU 0, mean 90 %', 'GPU 1, mean 0 %']
    ax = fig.axes[0]
    dashed = [line.get_ydata()[0] for line in ax.lines if line.get_linestyle() == '--']
    assert dashed == [90, 0] and ax.get_title('left') == 'GPU 0 and 1: Card'
    assert 'time (s)' in ax.get_xlabel() and '%' in ax.get_ylabel() and [t.get_text() for t in ax.texts] == [' epoch 1']


def test_plot_on_cpu_shows_this_process_behind():
    fig = plot_samples(ON_CPU)
    assert labels(fig) == ['this process', 'CPU, mean 40 %'] and fig.axes[0].get_title('left') == 'CPU: Chip'


@pytest.mark.parametrize('samples', [[], [Sample(0., error='gone')], [Sample(0., (GPU(0, 'MIG'),))], [moment(0)]])
def test_plot_and_frame_of_little_or_nothing(samples):
    assert png_bytes(plot_samples(samples)).startswith(b'\x89PNG')
    assert 'nan' not in live_html(samples)


def test_names():
    assert device_names([Sample(0., (GPU(0, 'A'), GPU(1, 'B')))]) == 'GPU 0: A, GPU 1: B'
    assert device_names([Sample(0., tuple(GPU(k, 'A') for k in range(4)))]) == 'GPU 0 to 3: A'
    assert device_names([]) == 'no device could be read'


def test_frame_lifts_the_pen_at_a_gap_and_escapes():
    gap = TRACE[:2] + [Sample(2., error='gone')] + TRACE[3:]
    assert live_html(TRACE).count(' M') + 1 < live_html(gap).count(' M') + 1
    assert '<b>x' not in live_html(TRACE, values={'a': '<b>x'}).replace('<div><b>', '')


def test_frame_tells_of_the_training_and_of_the_card():
    more = dict(sm_active=61., tensor_active=42., from_host=2.5e9, processes=(Process(7, '<b>', 1 << 30),))
    card = GPU(0, 'Card', 90., 1 << 30, 8 << 30, **more)
    values = dict(au=.87, loss=2.5, clips_per_s=1234.5, wait_ms=3., step_ms=9., note='x')
    frame = live_html([Sample(0., (card,))], values=values, losses=[(0, 3.), (1, 2.5)])
    for text in ('87%', '2.5', '1,234', 'wait', '3 ms', '9 ms', 'note x', 'multiprocessors 61 %', 'tensor cores 42 %',
                 'PCIe in 2.5 GB/s', '1.0 of 8 GiB', '&lt;b&gt; 1.0 GiB', '<polyline'): assert text in frame, text


@pytest.mark.parametrize('values, losses', [(dict(au=None, loss=float('nan')), [(0, float('nan'))] * 3),
                                            (dict(loss=1., wait_ms=0.), [(0, 1.), (0, 1.)]), (dict(step='7', loss='?'), ())])
def test_frame_of_odd_values(values, losses):
    assert 'points="nan' not in live_html(TRACE, values=values, losses=losses)
    assert png_bytes(plot_samples(TRACE, losses=losses, phases=phases_of(values)))


def test_picture_shows_losses_and_phases():
    fig = plot_samples(TRACE, losses=[(0., 3.), (1., 2.)], phases={'wait': 1., 'step': 9.})
    curve, bar, main = fig.axes
    assert curve.lines[0].get_ydata().tolist() == [3., 2.] and [p.get_width() for p in bar.patches] == [1., 9.]
    assert 'utilisation' in main.get_ylabel() and len(plot_samples(TRACE).axes) == 1


def test_a_device_can_be_picked_where_there_are_several():
    box, _ = monitoring._widgets(['GPU 0', 'GPU 1'])
    assert 'GPU 1</option>' in box.children[0].value and '[data-pick="1"] .dev:not(.dev-1)' in box.children[0].value
    assert 'all devices' not in monitoring._widgets(['GPU 0'])[0].children[0].value
    frame = live_html(TRACE)
    assert frame.count('class="dev dev-1"') == 1 and 'class="reading dev dev-1"' in frame   # its curve and its line


def test_frame_shows_only_the_window():
    old, new = [Sample(0., (GPU(0, 'Old', 1.),))], [Sample(100., (GPU(1, 'New', 1.),))]
    assert 'Old' not in live_html(old + new, window=60) and 'Old' in live_html(old + new, window=200)


def test_frame_keeps_the_last_minute_and_averages_what_is_older():
    path = live_html([Sample(i / 10, (GPU(0, 'Card', 50.),)) for i in range(3000)]).partition('<path d="M')[2]
    points = live_html([Sample(i / 10, (GPU(0, 'Card', 50.),)) for i in range(3000)]).count('L')
    assert path and 600 < points < 1000


def test_long_runs_stay_small():
    many = [moment(i) for i in range(20_000)]
    assert len(live_html(many, window=1e9)) < 20_000 and len(png_bytes(plot_samples(many))) < 30_000


def test_summary_lines_count_gaps():
    lines = summary_lines(summarise([*TRACE, Sample(5., (GPU(0, 'Card'),), error='GPU 0: lost')]))
    assert lines[0].startswith('GPU 0 (Card): 90 % busy') and lines[1].startswith('GPU 1 (Card): 0 %')
    assert lines[-1] == '6 samples over 5.0 s; 1 of them with readings missing.'


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
    assert view.summary['values'] == {'step': '1', 'loss': '0.5'} and view.summary['samples'] == 5
    assert view.figure.axes[0].get_title('left') == 'mine' and len(png_bytes(view.figure)) < 30_000
    assert lines[0].startswith('GPU 0') and view.sampler._thread is None


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
    assert value.read > 0 and view.summary['values'] == {'loss': '2'} and [loss for _, loss in view.losses] == [2.]


def test_losses_are_kept_as_they_come_and_thinned():
    view, _ = live(TRACE)
    with view as it:
        for i in range(3000): it.update(loss=float(i))
    values = [loss for _, loss in view.losses]
    assert values == sorted(values) and values[0] == 0. and values[-1] == 2999. and len(values) < 2001


def test_cpu_fallback_is_said_once(monkeypatch):
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


def outputs_of(program, env=None):
    "The outputs of a cell as nbdev-test stores them."
    code = ('import json; from execnb.shell import CaptureShell; s = CaptureShell(); '
            f'out = s.run({program!r}); print("OUT" + json.dumps(out))')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.rpartition('OUT')[2])

CELL = '''
from xtts_nb.monitoring import gpu_live
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

def test_monitor_runs_for_its_duration():
    summary, out, now = watched(duration=3, interval=.5, probe=replay_probe(moment(i) for i in range(100)))
    assert now == pytest.approx(3) and summary['samples'] == 7
    assert summary['interrupted'] is False and summary['log_file'] is None
    assert summary['devices']['GPU 0']['mean'] == 90 and summary['devices']['GPU 1']['mean'] == 0
    assert 'GPU 1 Card' in out and 'GPU 1 (Card): 0 %' in out


def test_monitor_ends_in_order_at_ctrl_c(tmp_path):
    log = tmp_path / 'a.jsonl'
    summary, out, _ = watched(probe=replay_probe([*TRACE[:2], KeyboardInterrupt()]), log_file=log)
    assert summary['interrupted'] is True and summary['samples'] == 2
    assert len(log.read_text().splitlines()) == 2 and '2 samples' in out


def test_monitor_jsonl(tmp_path):
    log = tmp_path / 'a.jsonl'
    broken = Sample(9., error='x: gone')
    summary, *_ = watched(probe=replay_probe([*TRACE, broken]), log_file=log)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [Sample.from_dict(r) for r in rows] == [*TRACE, broken] and all(r['date'].endswith('+00:00') for r in rows)
    assert summary['log_file'] == str(log) and summary['gaps'] == 1


def test_monitor_csv_has_a_line_per_device(tmp_path):
    log = tmp_path / 'a.CSV'
    watched(probe=replay_probe([*TRACE, Sample(9., error='x: gone')]), log_file=log)
    rows = list(csv.DictReader(log.open()))
    assert [r['device'] for r in rows] == ['GPU 0', 'GPU 1', 'CPU'] * 5 + ['']
    assert [r['utilisation'] for r in rows[:3]] == ['90.0', '0.0', '40.0'] and rows[0]['process'] == ''
    assert {'tensor_active', 'to_host', 'disk_read', 'process_memory'} < rows[0].keys()
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


def test_monitor_says_when_the_disk_is_full():
    if not Path('/dev/full').is_char_device(): pytest.skip('needs the device /dev/full')
    write = open('/dev/full', 'wb', buffering=0)
    with pytest.raises(UserError, match='a.csv.*No space left'):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr('builtins.open', lambda *args, **kwargs: write)
            watched(probe=replay_probe(TRACE), log_file='a.csv')


def test_monitor_names_a_folder_that_is_missing(tmp_path):
    with pytest.raises(UserError, match='nowhere.*cannot be written'):
        watched(probe=replay_probe(TRACE), log_file=tmp_path / 'nowhere' / 'a.csv')


@pytest.mark.parametrize('bad', [dict(duration=-1), dict(interval=0)])
def test_monitor_refuses(bad):
    with pytest.raises(UserError, match='take'): watched(probe=replay_probe(TRACE), **bad)


def test_monitor_falls_back_in_one_line(monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '-1')
    summary, out, _ = watched(duration=2)
    assert out.count('showing the CPU instead') == 1 and set(summary['devices']) == {'CPU'}


def test_monitor_speaks_into_a_pipe():
    _, out, _ = watched(duration=20, probe=replay_probe(moment(i) for i in range(100)))
    assert '5 of 20 s' in out and '10 of 20 s' in out


def test_monitor_drops_what_the_ring_cannot_hold():
    s = Sampler(replay_probe(TRACE), capacity=2)
    for _ in TRACE: s.sample()
    assert s.summary()['dropped'] == 3 and len(summary_lines(s.summary())) == 4


def test_import_is_light():
    heavy = {'tensorflow', 'keras', 'matplotlib', 'IPython', 'ipywidgets'}
    program = f'import sys, xtts_nb.monitoring; print({heavy} & set(sys.modules))'
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == 'set()'
