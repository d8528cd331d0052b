"Pictures, sentences and frames of recorded traces: no GPU, no front end."
import io
import re

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from xtts_nb.monitor import live as utilisation
from xtts_nb.sampler import CPU, GPU, Process, Sample, summarise, summarise_arms
from xtts_nb.bench import COLOURS, PHASE_COLOURS, png_bytes
from xtts_nb.monitor.live import (
    ARM_SHADES, arm_lines, arm_shades, device_names, live_html, format_value, phases_of, plot_samples,
    summary_lines, values_line)


def moment(i, gpus=2):
    cards = tuple(GPU(k, 'Card', [90., 0.][k], (k + 1) << 30, 8 << 30, 100., 50., 1000.) for k in range(gpus))
    return Sample(float(i), cards, CPU('Chip', 40., 20., 2 << 30, 4 << 30, 1 << 30))

TRACE, ON_CPU = [moment(i) for i in range(5)], [moment(i, gpus=0) for i in range(5)]


# which curves, and what they are called

def test_what_stands_behind():
    "The CPU behind the GPUs, this process behind the CPU."
    only = [Sample(0., (GPU(0, 'A', 1.),))]
    for trace, shown, behind, value in ((TRACE, ['GPU 0', 'GPU 1'], 'CPU', 40.),
                                        (ON_CPU, ['CPU'], 'this process', 20.)):
        curves, (name, seconds, values) = utilisation._curves(trace)
        assert (list(curves), name, values.tolist(), seconds.tolist()) == (shown, behind, [value] * 5,
            [0., 1., 2., 3., 4.])
    assert utilisation._curves(only)[1] == () and list(utilisation._curves(only)[0]) == ['GPU 0']
    assert utilisation._curves([]) == ({}, ())

@pytest.mark.parametrize('gpus, cpu, name', [
    ('A', None, 'GPU 0: A'), ('AA', None, 'GPU 0 and 1: A'), ('AB', None, 'GPU 0: A, GPU 1: B'),
    ('AAA', None, 'GPU 0 to 2: A'),
    ('AAB', None, 'GPU 0: A, GPU 1: A, GPU 2: B'), ('AA', 'C', 'GPU 0 and 1: A'), ('', 'C', 'CPU: C'),
    ('', None, 'no device could be read')])
def test_names(gpus, cpu, name):
    assert device_names([Sample(0., tuple(GPU(k, n) for k, n in enumerate(gpus)), cpu and CPU(cpu))]) == name

def test_values_for_reading():
    class Lazy:
        def __float__(self): return 1234.56
    values = {'step': 12345, 'loss': 2.34567, 'wait_ms': 2., 'lazy': Lazy(), 'note': 'x', 'flag': True,
              'none': None}
    assert values_line(values) == 'step 12345 · loss 2.346 · lazy 1235 · note x · flag True'
    assert format_value(Lazy()) == '1235'
    assert phases_of({'wait_ms': 3, 'copy_ms': None, 'step': 7, 'step_ms': Lazy()}) == {'wait': 3.,
        'step': 1234.56}

@pytest.mark.parametrize('count, points, left, first', [
    (0, {}, 0, None), (600, {}, 600, 0.), (601, {}, 300, 0.5), (1200, {}, 600, 0.5), (1201, {}, 400, 1.),
    (7, {'points': 3}, 2, 1.)])
def test_neighbours_are_averaged(count, points, left, first):
    seconds, values = utilisation._thin(np.arange(count, dtype=float), 2. * np.arange(count), **points)
    assert len(seconds) == len(values) == left and (not left or (seconds[0], values[0]) == (first, 2 * first))

def test_a_picture_has_64_colours():
    figure = Figure(figsize=(2, 1))
    figure.add_axes((0, 0, 1, 1)).imshow(np.arange(256.)[None], aspect='auto', cmap='gray')
    image = Image.open(io.BytesIO(png_bytes(figure)))
    assert image.format == 'PNG' and image.size == (200, 100) and len(image.getcolors()) == 64


# the picture

def test_a_curve_for_each_device_and_its_mean():
    gap = [*TRACE, Sample(5., (GPU(0, 'Card', None), GPU(1, 'Card', None)))]
    figure = plot_samples(gap, note='small print')
    (ax,) = figure.axes
    assert [(l.get_label(), l.get_linewidth(), l.get_linestyle()) for l in ax.lines
            if l.get_label()[0] != '_'] == [
        ('CPU', 0.8, '-'), ('GPU 0, mean 90 %', 1.3, '-'), ('GPU 1, mean 0 %', 1.3, '-')]
    dashed = [l for l in ax.lines if l.get_linestyle() == '--']
    assert [(l.get_ydata()[0], l.get_linewidth(), l.get_alpha()) for l in dashed] == [(90, 1, 0.7),
        (0, 1, 0.7)]
    assert [to_hex(l.get_color()).upper() for l in ax.lines] == ['#999999', *np.repeat(COLOURS[:2], 2)]
    assert ax.lines[1].get_ydata()[:5].tolist() == [90.] * 5
    assert ax.lines[1].get_xdata().tolist() == [0., 1., 2., 3., 4., 5.]
    assert ax.get_gridspec().get_geometry() == (2, 1)
    assert ax.get_ylim() == (0, 103) and (ax.get_xlabel(), ax.get_ylabel()) == ('time (s)', 'utilisation (%)')
    assert ax.get_title('left') == 'GPU 0 and 1: Card' and figure.get_size_inches().tolist() == [7.2, 2.5]
    (note,) = figure.texts
    assert (note.get_text(), note.get_position(), note.get_ha()) == ('small print', (0.995, 0.015), 'right')
    legend, at = ax.get_legend(), ax.transAxes.inverted()
    assert legend._ncols == 4 and not legend.get_frame_on() and ax.get_axisbelow() is True
    assert legend.get_bbox_to_anchor().transformed(at).bounds[:2] == pytest.approx((0, 1))
    assert [ax.spines[side].get_visible() for side in ('top', 'right', 'left', 'bottom')] == [False, False,
        True, True]
    assert figure._repr_png_().startswith(b'\x89PNG') and not plot_samples(TRACE).texts

@pytest.mark.parametrize('count, shown', [(89, 89), (90, 89), (200, 89)])
def test_a_long_title_is_cut(count, shown):
    title = ('GPU 0: NVIDIA H200 NVL 141GB, ' * 7)[:count]
    figure = plot_samples(TRACE, title)
    (ax,) = figure.axes
    assert ax.get_title('left') == title[:shown - (count > 89)] + '…' * (count > 89)
    png_bytes(figure)   # lays it out
    assert ax._left_title.get_window_extent().x1 < figure.bbox.x1

def test_a_device_without_a_reading_has_no_mean():
    (ax,) = plot_samples([Sample(0., (GPU(0, 'MIG'),))]).axes
    assert [line.get_label() for line in ax.lines] == ['GPU 0'] and ax.get_title('left') == 'GPU 0: MIG'
    (ax,) = plot_samples([]).axes
    assert not ax.lines and ax.get_legend() is None and ax.get_title('left') == 'no device could be read'

ARMS = [(9., 'before'), (13.5, 'after')]
BUSIER = [Sample(10. + i, (GPU(0, 'A', 10. if i < 4 else 90.),)) for i in range(8)]

def test_arms_are_shaded_named_and_have_their_means():
    (ax,) = plot_samples(BUSIER, arms=ARMS).axes
    assert [(t.get_text(), *t.get_position()) for t in ax.texts] == [('before: 10 %', 1.75, 110),
                                                                      ('after: 90 %', 5.25, 110)]
    assert [(p.get_x(), p.get_width()) for p in ax.patches] == [(0, 3.5), (3.5, 3.5)]
    assert len({p.get_facecolor() for p in ax.patches}) == 2
    dashed = [(list(l.get_xdata()), list(l.get_ydata())) for l in ax.lines if l.get_linestyle() == '--']
    assert dashed == [([0, 3.5], [10, 10]), ([3.5, 7], [90, 90])]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ['GPU 0', 'mean']
    assert ax.get_ylim() == (0, 119)
    assert list(ax.get_yticks()) == [0, 25, 50, 75, 100]
    assert not plot_samples([], arms=ARMS).axes[0].patches

def test_a_name_that_comes_again_has_the_same_shade():
    (ax,) = plot_samples(BUSIER, arms=[*ARMS, (15.5, 'before')]).axes
    assert [t.get_text() for t in ax.texts] == ['before: 37 %', 'after: 90 %', 'before: 37 %']
    first, _, last = ax.patches
    assert first.get_facecolor() == last.get_facecolor()

def test_a_sentence_for_each_arm_and_the_factor():
    assert arm_lines(summarise_arms(BUSIER, ARMS)) == [
        'before: GPU 0 10 % busy, 95th percentile 10 %, below 5 % in 0 % of the samples, '
        'coefficient of variation 0.00.',
        'after: GPU 0 90 % busy, 95th percentile 90 %, below 5 % in 0 % of the samples, '
        'coefficient of variation 0.00.',
        'GPU 0 is 9 times as busy in "after" as in "before".']
    assert len(arm_lines(summarise_arms(BUSIER, ARMS[:1]))) == 1 and arm_lines({}) == []
    unread = [Sample(10., (GPU(0, 'A'),)), Sample(14., (GPU(0, 'A'),))]
    assert arm_lines(summarise_arms(unread, ARMS)) == []

def test_arms_are_shaded_in_the_frame():
    frame = live_html(BUSIER, arms=ARMS)
    bands = re.findall(r'<rect x="(\d+)" width="(\d+)".*?fill="(.*?)".*?<text x="(\d+)" y="9">(\w+)<', frame)
    assert bands == [('120', '270', ARM_SHADES[0], '124', 'before'),
                     ('390', '210', ARM_SHADES[1], '394', 'after')]   # in 10 s
    assert 'GPU 0 is 9 times as busy' in frame
    long = [Sample(float(i), (GPU(0, 'A', 1.),)) for i in range(200)]
    frame = live_html(long, arms=[(0., 'over'), (100., 'cut')])   # 139 to 199 s are shown
    assert re.findall(r'<rect x="(\d+)" width="(\d+)"', frame) == [('0', '600')] and '>cut<' in frame

def test_an_arm_has_one_shade_in_the_picture_and_in_the_frame():
    "Of 200 s the frame shows the last minute: the first arm is over, and the second comes again."
    names, starts = ['a', 'b', 'c', 'b', 'd', 'e'], [-1., 50., 145., 160., 170., 180.]
    samples = [Sample(float(i), (GPU(0, 'A', 50.),)) for i in range(200)]
    arms = list(zip(starts, names))
    one, two, three, four = ARM_SHADES
    assert arm_shades(arms) == {'a': one, 'b': two, 'c': three, 'd': four, 'e': one} and arm_shades([]) == {}
    drawn = [to_hex(patch.get_facecolor()) for patch in plot_samples(samples, arms=arms).axes[0].patches]
    assert drawn == [one, two, three, two, four, one]
    frame = re.findall(r'<rect .*?fill="(.*?)".*?y="9">(\w+)<', live_html(samples, arms=arms))
    assert frame == [(two, 'b'), (three, 'c'), (two, 'b'), (four, 'd'), (one, 'e')]

def test_marks_have_names_where_there_is_room():
    "In 95 s a letter takes one second: two letters and two spaces take four."
    trace = [Sample(10. + i, (GPU(0, 'A', 1.),)) for i in range(96)]
    (ax,) = plot_samples(trace, marks=[(10., 'ab'), (13.97, 'cd'), (14., 'ef'), (17.97, 'gh'),
                                       (18., 'ij')]).axes
    assert [(t.get_text(), *t.get_position()) for t in ax.texts] == [(' ab', 0., 101), (' ef', 4., 101),
        (' ij', 8., 101)]
    dotted = [l.get_xdata()[0] for l in ax.lines if l.get_linestyle() == ':']
    assert dotted == pytest.approx([0., 3.97, 4., 7.97, 8.])

def test_losses_and_phases_stand_beside():
    phases, losses = {'copy': 14., 'wait': 15., 'other': 71.}, [(0., 3.), (1., 2.)]
    figure = plot_samples(TRACE, losses=losses, phases=phases)
    curve, bar, main = figure.axes
    grid = main.get_gridspec()
    assert (grid.get_height_ratios(), grid.get_width_ratios()) == ([3, 1], [3, 1.25])
    spans = [(s.rowspan.start, s.rowspan.stop, s.colspan.start)
             for s in (a.get_subplotspec() for a in figure.axes)]
    assert spans == [(0, 1, 1), (1, 2, 1), (0, 2, 0)] and figure.get_size_inches().tolist() == [9.4, 2.5]
    assert [line.get_xydata().tolist() for line in curve.lines] == [[[0., 3.], [1., 2.]]]
    assert curve.get_title('left') == 'loss'
    assert [curve.spines[side].get_visible() for side in ('top', 'left')] == [False, True]
    assert [(p.get_x(), p.get_width(), p.get_y() + p.get_height() / 2, to_hex(p.get_facecolor()).upper())
            for p in bar.patches] == [
        (0., 14., 0., PHASE_COLOURS['copy']), (14., 15., 0., PHASE_COLOURS['wait']),
        (29., 71., 0., '#999999')]
    assert [(t.get_text(), t.get_position()) for t in bar.texts] == [('wait', (21.5, 0)),
        ('other', (64.5, 0))]
    assert bar.get_title('left') == 'a step of the host: 100 ms' and not bar.axison
    assert [len(plot_samples(TRACE, losses=l, phases=p).axes) for l, p in (
        (losses[:1], {}), (losses, {}), ((), phases), ((), {}))] == [1, 3, 3, 1]
    curve, bar, _ = plot_samples(TRACE, losses=losses[:1], phases=phases).axes
    assert not curve.lines and bar.patches
    assert plot_samples(TRACE, losses=losses).axes[1].get_title('left') == ''

def test_letters_and_lines_are_small_beside_the_curves():
    figure = plot_samples(TRACE, marks=[(0., 'mark')], note='note', losses=[(0., 3.), (1., 2.)],
                          phases={'wait': 1.})
    curve, bar, main = figure.axes
    assert {t.get_text(): t.get_fontsize() for t in figure.findobj(Text) if t.get_text()} == {
        'loss': 9, 'wait': 7, 'a step of the host: 1 ms': 8, 'GPU 0 and 1: Card': 9, ' mark': 7, 'note': 8,
        'utilisation (%)': 10, 'time (s)': 10, 'CPU': 8, 'GPU 0, mean 90 %': 8, 'GPU 1, mean 0 %': 8}
    assert [a.yaxis.get_gridlines()[0].get_linewidth() for a in (main, curve)] == [0.7, 0.7]
    widths = [line.get_linewidth() for line in (curve.lines[0], main.lines[-1])]
    assert widths == [1.1, 0.7] and main.margins()[0] == 0.01
    assert {label.get_fontsize() for label in curve.get_xticklabels()} == {7}

@pytest.mark.parametrize('samples', [[], [Sample(0., error='gone')], [Sample(0., (GPU(0, 'MIG'),))],
                                     [moment(0)]])
def test_little_or_nothing(samples):
    assert png_bytes(plot_samples(samples)).startswith(b'\x89PNG') and 'nan' not in live_html(samples)

def test_long_runs_stay_small():
    many = [Sample(i / 100, moment(i).gpus, moment(i).cpu) for i in range(6000)]
    assert len(live_html(many)) < 20_000 and len(png_bytes(plot_samples(many))) < 30_000


# the sentences

def test_a_sentence_for_each_device():
    busy = {'name': 'A', 'samples': 3, 'mean': 90.4, 'p95': 95., 'idle_share': 0.25, 'longest_idle_s': 1.25}
    devices = {'GPU 0': busy | {'memory_max': 3 * 2**29}, 'GPU 1': busy | {'memory_max': None},
               'GPU 2': {'name': 'C', 'samples': 0}}
    summary = {'devices': devices, 'gaps': 2, 'overhead': 0.0123, 'samples': 6, 'seconds': 5.}
    text = ('A): 90 % busy on average, 95th percentile 95 %, below 5 % in 25 % of the samples '
            '(at most 1.2 s on end)')
    assert summary_lines(summary) == [
        f'GPU 0 ({text}, memory up to 1.5 GiB.', f'GPU 1 ({text}.', 'GPU 2 (C): offers no utilisation.',
        '6 samples over 5.0 s; 2 of them with readings missing; taking them took 1.2 % of a core.']
    plain = {'devices': {}, 'gaps': 0, 'samples': 6, 'seconds': 5.}
    for none in ({}, {'overhead': None}): assert summary_lines(plain | none) == ['6 samples over 5.0 s.']
    assert summary_lines(summarise(TRACE))[0].startswith('GPU 0 (Card): 90 % busy')


# the frame

def test_a_path_lifts_the_pen_at_a_gap():
    "Here ten or twenty units a second, the newest at 600; a percent a unit, 100 % on top."
    values = np.array([0., np.nan, 50., 100., 25.])
    for span, path in (60., 'M560 100 M580 50 L590 0 L600 75'), (30., 'M520 100 M560 50 L580 0 L600 75'):
        assert utilisation._path(np.arange(5.), values, span) == path

@pytest.mark.parametrize('seconds, shown, first', [(4, 10, 360), (30, 30, 0), (200, 60, 10)])
def test_the_frame_is_filled_by_the_first_minute(seconds, shown, first):
    "At least ten seconds are shown, at most a minute."
    frame = live_html([Sample(float(i), (GPU(0, 'A', 1.),)) for i in range(seconds + 1)])
    assert f'>{shown} s ago<' in frame and f'd="M{first} 99 ' in frame

@pytest.mark.parametrize('trace, grey', [
    (TRACE, 1), (ON_CPU, 1), ([Sample(0., (GPU(0, 'A', 1.), GPU(1, 'A', 2.)))], 0)])
def test_each_curve_has_its_colour_over_the_grey_one(trace, grey):
    curves, behind = utilisation._curves(trace)
    lines = re.findall('fill="none" stroke="([^"]*)" stroke-width="([^"]*)"',
                       utilisation._field(curves, behind))
    assert lines == [('#999999', '0.6')] * grey + [(colour, '1.2') for colour in COLOURS[:len(curves)]]

def test_the_grid(): assert re.findall(r'd="M0 (\d+)H600".*?>(\d+) %<', utilisation._field({}, ())) == [
    ('0', '100'), ('50', '50'), ('100', '0')]

GIB = 2**30
FULL = dict(power=100., temperature=50., clock=1000., sm_active=61., tensor_active=42., from_host=2.5e9,
            to_host=1.5e9)
READINGS = [   # a device, and what is said of it
    (None, 'GPU 0 no reading'), (GPU(0, 'A'), 'GPU 0 no reading'), (GPU(0, 'A', 0.), 'GPU 0 0 %'),
    (GPU(0, 'A', 50., 2 * GIB, 8 * GIB), 'GPU 0 50 % 2.0 of 8 GiB'),
    (GPU(0, 'A', 50., **FULL),
     'GPU 0 50 % multiprocessors 61 % · tensor cores 42 % · 100 W · 50 °C · 1000 MHz · '
     'PCIe in 2.5 GB/s · out 1.5 GB/s'),
    (CPU('A', 50., 20., disk_read=3e6, disk_write=0.),
     'GPU 0 50 % this process 20 % · disk reads 3.0 MB/s · writes 0.0 MB/s'),
    (GPU(0, 'A', 1., processes=(Process(7, '<b>', GIB), Process(8), Process(9, None, 0))),
     'GPU 0 1 % &lt;b&gt; 1.0 GiB, 8, 9 0.0 GiB')]

@pytest.mark.parametrize('device, said', READINGS)
def test_a_reading(device, said):
    html = utilisation._reading('GPU 0', device, '#123456')
    assert 'color:#123456' in html
    assert ' '.join(re.sub('<[^>]*>|■', ' ', html).split()) == said
    assert ('width:25%' in html) == ('2.0 of 8' in said)

def test_the_bar_of_phases():
    assert utilisation._phase_bar({}) == utilisation._phase_bar({'wait': 0.}) == ''
    bar = utilisation._phase_bar({'wait': 1.5, 'my_own': 3.})
    assert re.findall(r'flex:([\d.]+);background:(\S+)" title="(\w+)"', bar) == [
        ('33.3', PHASE_COLOURS['wait'], 'wait'), ('66.7', '#999999', 'my_own')]
    assert [text for text in re.split('<[^>]*>', bar) if text.strip()] == ['wait ', '1.5 ms', 'my own ',
        '3 ms']

def test_the_whole_frame():
    values = {'loss': 2., 'wait_ms': 3., 'note': '<x>', 'au': 0.5}
    frame = live_html(TRACE, values=values, elapsed=125.)
    assert frame.startswith(utilisation.LIVE_STYLE)
    text = ' '.join(re.sub('<[^>]*>', ' ', frame.partition('</style>')[2]).split())
    assert text.startswith('GPU 0 and 1: Card · 02:05 loss 2 · note &lt;x&gt; · au 0.5 wait 3 ms '
                           '100 % 50 % 0 % 10 s ago now ■ GPU 0 90 % 1.0 of 8 GiB')
    assert text.endswith('1000 MHz') and frame.count('class="reading') == 2
    assert live_html([]) == '<i>waiting for the first sample</i>' and '00:00' in live_html(TRACE)

@pytest.mark.parametrize('age, seen', [(59., True), (60., False)])
def test_only_the_last_minute_is_shown(age, seen):
    two = [Sample(0., (GPU(0, 'Old', 1.),)), Sample(age, (GPU(1, 'New', 1.),))]
    assert ('Old' in live_html(two)) == seen

@pytest.mark.parametrize('values, losses', [(dict(au=None, loss=float('nan')), [(0, float('nan'))] * 3),
                                            (dict(loss=1., wait_ms=0.), [(0, 1.), (0, 1.)]),
                                            (dict(step='7', loss='?'), ())])
def test_odd_values(values, losses):
    assert 'class="reading"' in live_html(TRACE, values=values)
    assert png_bytes(plot_samples(TRACE, losses=losses, phases=phases_of(values)))
