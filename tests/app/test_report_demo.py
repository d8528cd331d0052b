"The report: one file with everything inside, escaped, and written whole or not at all."
import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from process import tree
from xtts_nb.data.audio import save_audio, synthetic_voice
from xtts_nb.config import UserError
from xtts_nb.data.corpora import Dropped, summary
from xtts_nb.app.demo import (
    AFTER, BEFORE, BETWEEN, corpus_page, counts_table, facts, heading, picture, player, plot_before_after,
    plot_losses, plot_mels, plot_spread, html_table, write_report)

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

def rows(count, unit='step_ms'):
    return [{'name': f'arm {i}', unit: 1000. / 10**i, 'ratio': 10.**i} for i in range(count)]

def labels(figure) -> list[str]: return [t.get_text() for t in figure.axes[0].texts]


@pytest.mark.parametrize('piece', [
    lambda text, path: picture(Figure(), text), lambda text, path: player(path, text),
    lambda text, path: heading(text, text),
    lambda text, path: facts({text: text}),
], ids=['picture', 'player', 'heading', 'facts'])
def test_texts_are_escaped(tmp_path, piece):
    save_audio(tmp_path / 'a.wav', synthetic_voice(0.1), 22050)
    page = Page(piece(NASTY, tmp_path / 'a.wav'))
    assert 'script' not in [tag for tag, _ in page.tags] and page.open == []
    assert NASTY in page.text or NASTY in [a.get('alt') for _, a in page.tags]
    assert '"quoted"' not in piece(NASTY, tmp_path / 'a.wav')   # inside an attribute it would end it

def test_a_page_is_one_file_with_all_in_it(tmp_path):
    save_audio(tmp_path / 'a.wav', synthetic_voice(0.1), 22050)
    pieces = [heading('Speed', 'Lead.'), picture(plot_before_after(rows(3), 'x'), 'bars'),
              player(tmp_path / 'a.wav', 'voice'),
              facts({'clips': 3})]
    path = write_report(tmp_path / 'out' / 'report.html', NASTY, pieces)
    text = path.read_text(encoding='utf-8')
    page = Page(text)
    assert page.open == [] and page.tags[0][0] == 'html' and 'utf-8' in str(page.tags)
    assert page.text.count(NASTY) == 2   # title and heading
    links = [a[k] for _, a in page.tags for k in ('src', 'href') if k in a]
    assert len(links) == 2 and all(link.startswith('data:') for link in links) and 'url(' not in text
    assert '@import' not in text
    image, sound = (base64.b64decode(link.split(',')[1], validate=True) for link in links)
    assert imread(io.BytesIO(image)).shape[0] > 50 and sound == (tmp_path / 'a.wav').read_bytes()
    # in order and unchanged
    assert [re.sub(r'\s', '', p) in re.sub(r'\s', '', text) for p in pieces] == [True] * 4

def test_a_page_appears_whole_or_not_at_all(tmp_path):
    write_report(tmp_path / 'report.html', 'old', [])
    before = tree(tmp_path)
    with pytest.raises(UnicodeEncodeError): write_report(tmp_path / 'report.html', 'new', ['\ud800'])
    assert tree(tmp_path) == before
    with pytest.raises(UserError, match='report.html'):
        write_report(tmp_path / 'report.html' / 'report.html', 'new', [])

@pytest.mark.parametrize('count', [2, 3, 5])
def test_a_bar_for_each_arm(count):
    figure = plot_before_after(rows(count), 'Title')
    bars = figure.axes[0].patches
    assert [b.get_width() for b in bars] == [10.**i for i in range(count)]
    assert [b.get_facecolor() for b in bars] == [b.get_facecolor() for b in Figure().add_subplot().barh(
        range(count), 1, color=[BEFORE, *[BETWEEN] * (count - 2), AFTER])]
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == [r['name'] for r in rows(count)]
    assert figure.axes[0].get_xscale() == 'log' and figure.axes[0].yaxis_inverted()   # the first on top
    assert figure.axes[0].get_xlim() == pytest.approx((0.6, 9 * 10.**(count - 1)))
    assert [(b.get_x(), b.get_y() + b.get_height() / 2) for b in bars] == [(0, pytest.approx(i))
        for i in range(count)]
    assert figure.get_size_inches().tolist() == pytest.approx([6.4, 0.62 + 0.36 * count])
    assert bars[0].get_height() == 0.62
    assert [a.get_visible() for a in (figure.axes[0].spines[side]
                                      for side in ('top', 'right', 'left'))] == [False, False, True]
    assert figure.axes[0].get_title('left') == 'Title'

@pytest.mark.parametrize('unit, shown', [('step_ms', '1,000 ms a step'), ('clips_per_s', '1,000 clips/s')])
def test_bars_show_their_numbers(unit, shown):
    first, second = labels(plot_before_after(rows(2, unit), 'Title'))
    assert first == f'  1.0 ×   {shown}' and '10.0 ×' in second

def test_a_slower_arm_is_drawn():
    worse = [{'name': 'a', 'step_ms': 1., 'ratio': 1.}, {'name': 'b', 'step_ms': 4., 'ratio': 0.25}]
    figure = plot_before_after(worse, 'Title')
    assert figure.axes[0].get_xlim() == pytest.approx((0.6 * 0.25, 9.))

def test_the_spread_is_drawn_as_an_error_bar():
    "As long as the spread; one that reaches below zero ends above it, since the scale has no zero."
    arms = [{'name': 'a', 'step_ms': 9., 'ratio': 1., 'spread': 0.2},
            {'name': 'b', 'step_ms': 1., 'ratio': 10., 'spread': 3.}]
    axes = plot_before_after(arms, 'Title').axes[0]
    (bars,) = axes.collections
    assert [t.get_position() for t in axes.texts] == [(pytest.approx(1.1), 0),
                                                      (25., 1)]   # the numbers are right of it
    assert axes.get_xlim() == pytest.approx((0.6 * 0.9, 9 * 25))
    assert [[x for x, _ in path] for path in bars.get_segments()] == [pytest.approx([0.9, 1.1]),
                                                                      pytest.approx([1., 25.])]

def test_losses_are_drawn_as_they_are():
    steps, curves = [10, 20, 30], {'audio codes': [3., 2., 1.], 'text': [4., 3., 3.5]}
    axes = plot_losses(steps, curves, 'Loss').axes[0]
    drawn = {l.get_label(): (list(l.get_xdata()), list(l.get_ydata())) for l in axes.lines}
    assert drawn == {name: (steps, values) for name, values in curves.items()}
    assert axes.get_ylim()[0] == 0 and [l.get_color() for l in axes.lines] == [AFTER, BEFORE]
    assert axes.yaxis.get_gridlines()[0].get_visible() and axes.get_axisbelow() is True
    assert not axes.get_legend().get_frame_on()
    assert (axes.get_xlabel(), axes.get_ylabel()) == ('updates', 'cross-entropy')
    assert axes.get_title('left') == 'Loss'

def test_font_sizes():
    arms = plot_before_after([r | {'spread': 0.1} for r in rows(2)], 'Title')
    losses = plot_losses([1, 2], {'text': [2., 1.]}, 'Loss')
    mels = plot_mels({'short': np.zeros((4, 80))}, 86.)
    sizes = [{t.get_text(): t.get_fontsize() for t in f.findobj(Text) if t.get_text() in names}
             for f, names in (
        (arms, ['Title', labels(arms)[0]]), (losses, ['Loss', 'text']), (mels, ['short']))]
    assert sizes == [{'Title': 10, labels(arms)[0]: 8}, {'Loss': 10, 'text': 8}, {'short': 8}]
    assert losses.axes[0].lines[0].get_linewidth() == 1.4 and losses.get_size_inches().tolist() == [6.4, 2.3]
    assert losses.axes[0].yaxis.get_gridlines()[0].get_linewidth() == 0.7
    (bars,) = arms.axes[0].collections
    assert bars.get_linewidth() == [1] and {cap.get_markersize() for cap in arms.axes[0].lines} == {6}
    assert plot_spread({'counts': [1], 'edges': [0, 1]}, 'a', 'b').findobj(Text)[0].get_fontsize() == 10

def test_mels_share_time_and_level():
    rng = np.random.default_rng(0)
    mels = {'short': np.full((50, 80), -3., np.float32),
            'long': rng.normal(size=(100, 80)).astype(np.float32)}
    figure = plot_mels(mels, 100.)
    assert [a.get_title(loc='left') for a in figure.axes] == ['short', 'long']
    assert {a.get_xlim() for a in figure.axes} == {(0., 1.)}
    ((bottom, top),) = {a.images[0].get_clim() for a in figure.axes}
    assert top == mels['long'].max() and bottom == pytest.approx(top - 12)
    assert figure.get_size_inches().tolist() == [9, 1.75]
    assert figure.axes[0].get_shared_y_axes().joined(*figure.axes)
    assert [tuple(a.images[0].get_extent()) for a in figure.axes] == [(0, 0.5, 0, 80), (0, 1., 0, 80)]
    assert figure.axes[0].images[0].get_array().shape == (80, 50)


# --- report of a corpus -------------------------------------------------------------------------------------

def clips(count, **values):
    "A table of measured clips."
    row = {'text': NASTY, 'speaker': NASTY, 'language': 'fa', 'peak': 1., 'clipped': 0.25, 'leading': 0.1,
           'inner': 0., 'trailing': 0., 'sound': 'same'}
    return [{'id': f'{NASTY} {i}', 'seconds': 1 + i / 7} | row | values for i in range(count)]

@pytest.mark.parametrize('report', [
    summary(clips(9), [Dropped(NASTY, f'bad: {NASTY}')]), summary(clips(1), []),
    summary([], [Dropped('a', 'bad')]),
    summary([{k: r[k] for k in ('id', 'text', 'speaker', 'language', 'seconds')} for r in clips(3)], [])],
    ids=['all kinds', 'one clip', 'no clip', 'not measured'])
def test_the_page_of_any_corpus(tmp_path, report):
    text = corpus_page(report, tmp_path / 'page.html', NASTY).read_text(encoding='utf-8')
    page = Page(text)
    assert not page.open and '<script' not in text and [t for t, _ in page.tags].count('img') == 2
    assert all(d['id'] in page.text for d in report['dropped'])
    assert ('Clipping' in page.text) == ('silence' in report)

def test_invisible_characters_are_shown(tmp_path):
    text = corpus_page(summary(clips(1, speaker='a\u202eb\n'), []),
                       tmp_path / 'page.html').read_text(encoding='utf-8')
    assert '\u202e' not in text and r'a\u202eb\n' in text

@pytest.mark.parametrize('make, most', [(lambda n: html_table(['a'], [(i,) for i in range(n)]), 200),
                                        (lambda n: counts_table({str(i): i for i in range(n)}, 'speaker'),
                                         40)])
def test_a_long_table_is_cut_and_says_so(make, most):
    assert make(most).count('<tr>') == most + 1 and 'more' not in make(most)
    text = make(most + 1234)
    assert text.count('<tr>') == most + 1 and text.endswith('</table><p>and 1,234 more, in report.json</p>')
    assert make(0) == '<p>none</p>'

def test_a_table_of_counts():
    page = Page(counts_table({' ': 1234, 'b': 1}, 'letter'))
    assert page.text == 'countletter1,234␣1b' and [t for t, _ in page.tags].count('th') == 2
    assert [a['dir'] for t, a in page.tags if t in ('th', 'td')] == ['auto'] * 6

def test_headings():
    assert heading('a<b') == '<h2 dir="auto">a&lt;b</h2>'
    assert heading('a', 'b', 3) == '<h3 dir="auto">a</h3><p>b</p>'

def test_the_text_of_a_corpus_page(tmp_path):
    spread = {'counts': [1], 'edges': [0., 1.]}
    report = {'clips': 1234, 'seconds': 5400., 'speakers': {'ann': 1200, 'bob': 34},
              'languages': {'en': 1233, 'fa': 1},
              'dropped': [{'id': 'x1', 'reason': 'too short: 0.1 s'}], 'reasons': {'too short': 1},
              'durations': spread,
              'text_lengths': spread, 'same_text': [['a', 'b']],
              'characters': {chr(0x4e00 + i): 1 for i in range(401)},
              'silence': {'leading': 0.125, 'inner': 0.25}, 'most_silent': [{'share': 0.5, 'id': 'a'}],
              'clipped': 3,
              'most_clipped': [{'share': 0.25, 'id': 'b'}]}
    text = Page(corpus_page(report, tmp_path / 'page.html').read_text(encoding='utf-8')).text
    for words in ('Corpus1,234clips1.50hours2speakersen, falanguages1dropped',
                  'Every clip that was left out, with its reason.clipsreason1too short'
                  'clipreasonx1too short: 0.1 sSilence',
                  'Of the mean clip, 12.5% leading, 25.0% inner.silentclip50.0%a',
                  'Clipping3 clips are at full scale for more than a thousandth of their length.'
                  'at full scaleclip25.0%b',
                  'Same speaker, same textclipsids2a = bSame soundnoneSpeakerscountspeaker1,200ann34bob',
                  'Languagescountlanguage1,233en1faLetterscountletter1\u4e00',
                  '1\u4f8fand 1 more, in report.json'):
        assert words in text.replace('\n', ''), words
    del report['silence']
    assert 'Clipping' not in corpus_page(report, tmp_path / 'page.html').read_text(encoding='utf-8')

def test_bars_of_a_histogram():
    figure = plot_spread({'counts': [1, 0, 3], 'edges': [0., 1., 2., 3.]}, 'title', 'seconds')
    (bars,) = figure.axes[0].patches
    assert bars.get_data().values.tolist() == [1, 0, 3] and bars.get_fill()
    axes = figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title('left')) == ('seconds', 'clips', 'title')
    assert figure.get_size_inches().tolist() == [4.4, 2.1]
