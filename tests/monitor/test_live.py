"The live view, its pictures and the terminal on recorded traces: no GPU, no front end, no waiting."
import io
import json
import re
import time
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
from clock import Clock
from rich.console import Console

from xtts_nb.bench import png_bytes
from xtts_nb.config import UserError
from xtts_nb.monitor import live as page
from xtts_nb.monitor.live import (
    _variant_lines, gpu_live, live_html, LiveCallback, monitor, _phases_of,
    plot_samples, _summary_lines)
from xtts_nb.sampler import CPU, emulated_probe, EmulatedDevice, GPU, replay_probe, Sample, summarise_variants

def moment(i, gpus=2):
    cards = tuple(GPU(k, 'Card', [90., 0.][k], (k + 1) << 30, 8 << 30, 100., 50., 1000.) for k in range(gpus))
    return Sample(float(i), cards, CPU('Chip', 40., 20., 2 << 30, 4 << 30, 1 << 30))

TRACE, ARMS = [moment(i) for i in range(5)], [(9., 'before'), (13.5, 'after')]
BUSIER = [Sample(10. + i, (GPU(0, 'A', 10. if i < 4 else 90.),)) for i in range(8)]
def text_of(html): return ' '.join(re.sub('<[^>]*>|■', ' ', html.partition('</style>')[2]).split())

# --- pictures ----------------------------------------------------------------------------------------------

def test_a_curve_for_each_device_its_mean_and_what_stands_behind():
    "The CPU behind the GPUs, this process behind the CPU; a gap where a reading is missing."
    (ax,) = plot_samples([*TRACE, Sample(5., (GPU(0, 'Card', None), GPU(1, 'Card', None)))]).axes
    curves = {l.get_label(): l.get_ydata() for l in ax.lines if l.get_label()[0] != '_'}
    assert [*curves] == ['CPU', 'GPU 0, mean 90 %', 'GPU 1, mean 0 %']
    np.testing.assert_array_equal(curves['GPU 0, mean 90 %'], [90.] * 5 + [np.nan])
    assert [l.get_ydata()[0] for l in ax.lines if l.get_linestyle() == '--'] == [90, 0]
    (ax,) = plot_samples([moment(i, gpus=0) for i in range(5)]).axes
    assert [l.get_label() for l in ax.lines if l.get_label()[0] != '_'] == ['this process', 'CPU, mean 40 %']

def test_variants_are_shaded_and_have_their_means():
    (ax,) = plot_samples(BUSIER, variants=[*ARMS, (15.5, 'before')]).axes
    assert [t.get_text() for t in ax.texts] == ['before: 37 %', 'after: 90 %', 'before: 37 %']
    assert [(p.get_x(), p.get_width()) for p in ax.patches] == [(0, 3.5), (3.5, 2.), (5.5, 1.5)]
    assert [line.partition(',')[0] for line in _variant_lines(summarise_variants(BUSIER, ARMS))] == [
        'before: GPU 0 10 % busy', 'after: GPU 0 90 % busy']
    unread = [Sample(10., (GPU(0, 'A'),)), Sample(14., (GPU(0, 'A'),))]
    assert _variant_lines(summarise_variants(unread, ARMS)) == [] == _variant_lines({})

@pytest.mark.parametrize('samples, values, losses', [
    ([], {}, ()), ([Sample(0., error='gone')], {}, ()), ([Sample(0., (GPU(0, 'MIG'),))], {}, ()),
    ([moment(0)], {}, ()), (TRACE, dict(au=None, loss=float('nan')), [(0, float('nan'))] * 3),
    (TRACE, dict(loss=1., wait_ms=0.), [(0, 1.), (0, 1.)]), (TRACE, dict(step='7', loss='?'), ())])
def test_little_nothing_or_odd_values(samples, values, losses):
    assert png_bytes(plot_samples(samples, losses=losses, phases=_phases_of(values))).startswith(b'\x89PNG')
    assert values or 'nan' not in live_html(samples, values=values)

# --- sentences and frames ----------------------------------------------------------------------------------

def test_a_text_in_a_frame_is_escaped():
    frame = text_of(live_html(TRACE, values={'note': '<x>', 'none': None}, elapsed=125.))
    assert frame.startswith('GPU 0 and 1: Card · 02:05 note &lt;x&gt; ') and 'none' not in frame

# --- the live view -----------------------------------------------------------------------------------------

def live(trace, **kwargs):
    lines = []
    return gpu_live(probe=replay_probe(trace), interval=.001, say=lines.append, **kwargs), lines

def test_live_in_a_plain_script_reads_a_tensor_only_when_it_draws():
    class Lazy:
        read = 0
        def __float__(self): self.read += 1; return .5
    value, (view, lines) = Lazy(), live(TRACE, title='mine')
    with view as it:
        it.update(step=1)
        for _ in range(100): it.update(loss=value)
        it.sampler._thread.join(20)
        it.update(step=2, wait_ms=3.)
        assert value.read == 0
    summary = view.summary
    assert summary['values'] == {'step': '2', 'loss': '0.5', 'wait_ms': '3'} and summary['samples'] == 5
    assert view.figure.texts[0].get_text() == 'step 2 · loss 0.5' and view.losses[0][1] == .5
    assert lines[0].startswith('GPU 0') and view.sampler._thread is None

def test_live_leaves_the_picture_when_the_block_or_the_probe_fails():
    view, lines = live([TRACE[0], OSError('gone'), OSError('gone'), *TRACE[1:3]])
    with pytest.raises(ZeroDivisionError), view as it:
        it.sampler._thread.join(20)
        raise ZeroDivisionError
    assert view.figure is not None and view.summary['gaps'] == 2
    assert sum('Readings are missing' in line for line in lines) == 1

def test_an_arm_begins_with_a_sample_of_what_was_before():
    device, lines = EmulatedDevice(), []
    with gpu_live(emulated_probe(device), interval=60., say=lines.append) as view:
        view.variant('slow')
        time.sleep(.02)
        view.variant('fast')
        device.computes(view.variants[-1][0] - 1, view.variants[-1][0] + 60)
        time.sleep(.02)
    means = {name: use['emulated GPU 0']['mean'] for name, use in view.summary['variants'].items()}
    assert means == {'slow': 0, 'fast': 100}
    assert [line.partition('busy')[0] for line in lines[:2]] == ['slow: emulated GPU 0 0 % ',
                                                                 'fast: emulated GPU 0 100 % ']

def test_a_callback_shows_fit_and_is_closed_by_the_end_of_the_cell_if_it_breaks(monkeypatch):
    keras = pytest.importorskip('keras')
    registered = []   # by the events of a shell of IPython without a kernel
    events = SimpleNamespace(register=lambda name, f: registered.append(f),
                             unregister=lambda name, f: registered.remove(f))
    monkeypatch.setattr(page, '_shell', lambda: SimpleNamespace(kernel=None, events=events))
    monkeypatch.setattr('IPython.display.display', lambda *args, **kwargs: None)
    class Break(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2: raise RuntimeError('out of memory')
    model, x = keras.Sequential([keras.layers.Dense(1)]), keras.ops.ones((8, 2))
    model.compile('sgd', 'mse')
    watch = LiveCallback(probe=replay_probe(TRACE), say=lambda line: None)
    train = lambda epochs: model.fit(x, x[:, :1], batch_size=4, epochs=epochs, verbose=0,
                                     callbacks=[watch, Break()])
    train(2)
    values = watch.live.summary['values']
    assert values.keys() == {'epoch', 'batch', 'loss'} and values['epoch'] == '2' and watch.async_safe
    assert [name for _, name in watch.live.sampler.marks] == ['epoch 1', 'epoch 2'] and not registered
    with pytest.raises(RuntimeError): train(3)
    (end_of_cell,) = registered
    end_of_cell(None)
    assert watch.live.sampler._thread is None and watch.live.figure is not None and not registered

# --- the terminal ------------------------------------------------------------------------------------------

def watched(t=None, **kwargs):
    "What `monitor` returns and prints on a clock that only sleeping moves."
    out, t = io.StringIO(), t or Clock()
    summary = monitor(console=Console(file=out, width=120), clock=t.perf_counter, sleep=t.sleep, **kwargs)
    return summary, '\n'.join([out.getvalue(), *_summary_lines(summary)])

@pytest.mark.parametrize('duration, samples', [(3, 7), (1.2, 4), (.5, 2)])
def test_monitor_runs_for_its_duration(duration, samples):
    "The last interval is cut to it."
    t = Clock()
    trace = replay_probe(map(moment, range(100)))
    summary, out = watched(t, duration=duration, interval=.5, probe=trace)
    assert t.now == pytest.approx(100 + duration) and summary['samples'] == samples
    assert not summary['interrupted'] and 'GPU 1 Card' in out and 'GPU 1 (Card): 0 %' in out

def test_a_slow_probe_is_asked_again_at_once_and_then_in_its_beat():
    t, costs, asked = Clock(), iter([.7, .7, .1, .1]), []
    def probe():
        asked.append(t.now - 100)
        t.sleep(next(costs))
        return moment(0)
    assert watched(t, interval=.5, probe=probe)[0]['samples'] == 4
    assert asked == pytest.approx([0., .7, 1.4, 1.9, 2.4])

def test_a_log_of_json_lines_holds_each_sample_at_once_also_at_ctrl_c(tmp_path):
    log, written = tmp_path / 'a.jsonl', []
    samples = [*TRACE, Sample(9., error='x: gönne')]
    trace = replay_probe([*samples, KeyboardInterrupt()])
    def probe():
        written.append(log.read_text(encoding='utf-8').count('\n') if log.exists() else 0)
        return trace()
    summary, _ = watched(probe=probe, log_file=log)
    assert written == [*range(7)] and summary['interrupted'] is True and summary['gaps'] == 1
    rows = [json.loads(line) for line in log.read_text(encoding='utf-8').splitlines()]
    assert all(r.pop('date').endswith('+00:00') for r in rows)
    assert rows == json.loads(json.dumps([asdict(s) for s in samples]))

def test_monitor_refuses_what_it_cannot_write_and_keeps_an_old_log(tmp_path):
    (tmp_path / 'a.jsonl').write_text('evidence')
    for log in ('b.csv', 'a.jsonl', 'a.jsonl/b.jsonl'):
        with pytest.raises(UserError, match=log): watched(probe=replay_probe(TRACE), log_file=tmp_path / log)
    for bad in (dict(duration=-.1), dict(interval=0)):
        with pytest.raises(UserError, match='take'): watched(probe=replay_probe(TRACE), **bad)
    assert [p.read_text() for p in tmp_path.iterdir()] == ['evidence']

def test_monitor_speaks_into_a_pipe():
    _, out = watched(duration=20, probe=replay_probe(map(moment, range(100))))
    assert re.findall(r'(\d+) of 20 s', out) == ['5', '10', '15', '20', '20']   # the last: of the table
