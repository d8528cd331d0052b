"The page: everything inside it, nothing from outside unescaped, whole or not at all."
import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from process import tree
from xtts_nb.audio import save_audio, synthetic_voice
from xtts_nb.config import UserError
from xtts_nb.corpora import Dropped
from xtts_nb.recordings import summary
from xtts_nb.report import (AFTER, BEFORE, BETWEEN, corpus_page, counted, facts, heading, picture, player, plot_before_after,
                            plot_losses, plot_mels, plot_spread, table, write_report)

NASTY = '<script>alert("1")</script> & "quoted" \' سلام'


class Page(HTMLParser):
    "Tags with their attributes, the text between them, and whether every tag is closed."
    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.open = [], '', []
        self.feed(text)
    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ('img', 'meta', 'br'): self.open.append(tag)
    def handle_endtag(self, tag): assert self.open.pop() == tag
    def handle_data(self, data): self.text += data

def rows(count, unit='step_ms'): return [{'name': f'arm {i}', unit: 1000. / 10**i, 'ratio': 10.**i} for i in range(count)]

def labels(figure) -> list[str]: return [t.get_text() for t in figure.axes[0].texts]


@pytest.mark.parametrize('piece', [
    lambda text, path: picture(Figure(), text), lambda text, path: player(path, text), lambda text, path: heading(text, text),
    lambda text, path: facts({text: text}),
], ids=['picture', 'player', 'heading', 'facts'])
def test_what_comes_from_outside_is_escaped(tmp_path, piece):
    save_audio(tmp_path / 'a.wav', synthetic_voice(0.1), 22050)
    page = Page(piece(NASTY, tmp_path / 'a.wav'))
    assert 'script' not in [tag for tag, _ in page.tags] and page.open == []
    assert NASTY in page.text or NASTY in [a.get('alt') for _, a in page.tags]

def test_a_page_is_one_file_with_all_in_it(tmp_path):
    save_audio(tmp_path / 'a.wav', synthetic_voice(0.1), 22050)
    pieces = [heading('Speed', 'Lead.'), picture(plot_before_after(rows(3), 'x'), 'bars'), player(tmp_path / 'a.wav', 'voice'),
              facts({'clips': 3})]
    path = write_report(tmp_path / 'out' / 'report.html', NASTY, pieces)
    text = path.read_text(encoding='utf-8')
    page = Page(text)
    assert page.open == [] and page.tags[0][0] == 'html' and 'utf-8' in str(page.tags)
    assert page.text.count(NASTY) == 2   # title and heading
    links = [a[k] for _, a in page.tags for k in ('src', 'href') if k in a]
    assert len(links) == 2 and all(link.startswith('data:') for link in links) and 'url(' not in text and '@import' not in text
    image, sound = (base64.b64decode(link.split(',')[1], validate=True) for link in links)
    assert imread(io.BytesIO(image)).shape[0] > 50 and sound == (tmp_path / 'a.wav').read_bytes()
    assert [re.sub(r'\s', '', p) in re.sub(r'\s', '', text) for p in pieces] == [True] * 4   # in order and unchanged

def test_a_page_appears_whole_or_not_at_all(tmp_path):
    write_report(tmp_path / 'report.html', 'old', [])
    before = tree(tmp_path)
    with pytest.raises(UnicodeEncodeError): write_report(tmp_path / 'report.html', 'new', ['\ud800'])
    assert tree(tmp_path) == before
    with pytest.raises(UserError, match='report.html'): write_report(tmp_path / 'report.html' / 'report.html', 'new', [])

@pytest.mark.parametrize('count', [2, 3, 5])
def test_a_bar_for_each_arm(count):
    figure = plot_before_after(rows(count), 'Title')
    bars = figure.axes[0].patches
    assert [b.get_width() for b in bars] == [10.**i for i in range(count)]
    assert [b.get_facecolor() for b in bars] == [b.get_facecolor() for b in Figure().add_subplot().barh(
        range(count), 1, color=[BEFORE, *[BETWEEN] * (count - 2), AFTER])]
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == [r['name'] for r in rows(count)]
    assert figure.axes[0].get_xscale() == 'log' and figure.axes[0].yaxis_inverted()   # the first on top
    assert figure.axes[0].get_xlim()[1] > 10.**(count - 1)

@pytest.mark.parametrize('unit, shown', [('step_ms', '1,000 ms a step'), ('clips_per_s', '1,000 clips/s')])
def test_bars_say_their_numbers(unit, shown):
    first, second = labels(plot_before_after(rows(2, unit), 'Title'))
    assert '1.0 ×' in first and shown in first and '10.0 ×' in second

def test_an_arm_that_lost_is_still_seen():
    worse = [{'name': 'a', 'step_ms': 1., 'ratio': 1.}, {'name': 'b', 'step_ms': 4., 'ratio': 0.25}]
    figure = plot_before_after(worse, 'Title')
    assert figure.axes[0].get_xlim()[0] < 0.25

def test_the_spread_is_drawn_as_an_error_bar():
    "As long as the spread; one that reaches below zero ends above it, since the scale has no zero."
    arms = [{'name': 'a', 'step_ms': 9., 'ratio': 1., 'spread': 0.2}, {'name': 'b', 'step_ms': 1., 'ratio': 10., 'spread': 3.}]
    (bars,) = plot_before_after(arms, 'Title').axes[0].collections
    assert [[x for x, _ in path] for path in bars.get_segments()] == [pytest.approx([0.9, 1.1]), pytest.approx([1., 25.])]

def test_losses_are_drawn_as_they_are():
    steps, curves = [10, 20, 30], {'audio codes': [3., 2., 1.], 'text': [4., 3., 3.5]}
    axes = plot_losses(steps, curves, 'Loss').axes[0]
    drawn = {l.get_label(): (list(l.get_xdata()), list(l.get_ydata())) for l in axes.lines}
    assert drawn == {name: (steps, values) for name, values in curves.items()}
    assert axes.get_ylim()[0] == 0 and len({l.get_color() for l in axes.lines}) == 2

def test_mels_share_time_and_level():
    rng = np.random.default_rng(0)
    mels = {'short': np.full((50, 80), -3., np.float32), 'long': rng.normal(size=(100, 80)).astype(np.float32)}
    figure = plot_mels(mels, 100.)
    assert [a.get_title(loc='left') for a in figure.axes] == ['short', 'long']
    assert {a.get_xlim() for a in figure.axes} == {(0., 1.)}
    ((_, top),) = {a.images[0].get_clim() for a in figure.axes}
    assert top == mels['long'].max()
    assert [tuple(a.images[0].get_extent()) for a in figure.axes] == [(0, 0.5, 0, 80), (0, 1., 0, 80)]
    assert figure.axes[0].images[0].get_array().shape == (80, 50)


# --- the page of a corpus ------------------------------------------------------------------------------------------

def clips(count, **values):
    "A table of measured clips."
    row = {'text': NASTY, 'speaker': NASTY, 'language': 'fa', 'peak': 1., 'clipped': 0.25, 'leading': 0.1,
           'inner': 0., 'trailing': 0., 'sound': 'same'}
    return [{'id': f'{NASTY} {i}', 'seconds': 1 + i / 7} | row | values for i in range(count)]

@pytest.mark.parametrize('report', [
    summary(clips(9), [Dropped(NASTY, f'bad: {NASTY}')]), summary(clips(1), []), summary([], [Dropped('a', 'bad')]),
    summary([{k: r[k] for k in ('id', 'text', 'speaker', 'language', 'seconds')} for r in clips(3)], [])],
    ids=['all kinds', 'one clip', 'no clip', 'not measured'])
def test_the_page_of_any_corpus(tmp_path, report):
    text = corpus_page(report, tmp_path / 'page.html', NASTY).read_text(encoding='utf-8')
    page = Page(text)
    assert not page.open and '<script' not in text and [t for t, _ in page.tags].count('img') == 2
    assert all(d['id'] in page.text for d in report['dropped'])
    assert ('Clipping' in page.text) == ('silence' in report)

def test_no_name_hides_in_a_page(tmp_path):
    text = corpus_page(summary(clips(1, speaker='a\u202eb\n'), []), tmp_path / 'page.html').read_text(encoding='utf-8')
    assert '\u202e' not in text and r'a\u202eb\n' in text

def test_a_long_table_is_cut_and_says_so():
    text = table(['a'], [(i,) for i in range(250)])
    assert text.count('<tr>') == 201 and 'and 50 more' in text
    assert 'more' not in counted({'x': 1}, 'speaker') and '␣' in counted({' ': 1}, 'letter')

def test_bars_of_a_histogram():
    figure = plot_spread({'counts': [1, 0, 3], 'edges': [0., 1., 2., 3.]}, 'title', 'seconds')
    (bars,) = figure.axes[0].patches
    assert bars.get_data().values.tolist() == [1, 0, 3] and figure.axes[0].get_xlabel() == 'seconds'
