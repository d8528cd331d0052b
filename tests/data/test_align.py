"Texts, pauses, and where sentences are spoken."
import zipfile

import numpy as np
import pytest
import soundfile

from xtts_nb.app.demo_corpus import _DEMO_SENTENCES
from xtts_nb.config import UserError
from xtts_nb.data.align import (
    align, comparable, find_pauses, _fit_words, found_sentences, _measure_file, _measure_sound,
    read_paragraphs, speak_sentences, spoken_sentence, text_sentences, _without_foreign)
from xtts_nb.data.espeak import speak, VOICES

RATE = 22050

# --- text ---------------------------------------------------------------------------------------------------

SRT = '2\n00:00:04,500 --> 00:00:05,000\nis late.\n\n1\n00:00:01,000 --> 00:00:09,000\n<i>The train</i>\n'
VTT = 'WEBVTT\n\nNOTE nobody says this\n\nintro\n00:01.000 --> 00:02.000 align:start\n- The train\nis late.\n'
ASS = ('[Events]\nFormat: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text\n'
       'Dialogue: 0,0:00:05.00,0:00:06.00,A,,0,0,0,,is {\\b1}late.\n'
       'Dialogue: 0,0:00:01.00,0:00:09.00,A,,0,0,0,,The\\Ntrain\n'
       'Dialogue: 0,0:00:01.00,0:00:09.00,A,,0,0,0,,{\\p1}m 0 0 l 9 9\n')
ROLLING = (   # (start, end) in ms, lines, as YouTube makes them by itself
    (160, 2389, ' \nhello<00:00:00.480><c> everyone</c><00:00:00.960><c> welcome</c>'),
    (2389, 2399, 'hello everyone welcome\n '),
    (2999, 4789, 'hello everyone welcome\nto<00:00:02.560><c> the</c><00:00:02.879><c> show</c>'),
    (4789, 4799, 'to the show\n '))

def vtt(*cues):
    time = lambda ms: f'00:{ms // 60_000:02d}:{ms // 1000 % 60:02d}.{ms % 1000:03d}'
    return 'WEBVTT\n\n' + ''.join(f'{time(a)} --> {time(b)}\n{text}\n\n' for a, b, text in cues)

def in_turn(*texts): return vtt(*((1000 * i, 1000 * i + 1000, text) for i, text in enumerate(texts)))

def srt(*texts):
    return ''.join(f'{i}\n00:00:{i:02d},000 --> 00:00:{i:02d},900\n{t}\n\n' for i, t in enumerate(texts, 1))

@pytest.mark.parametrize('name, content, said', [
    *((name, content.encode('utf-16'), 'The train is late.') for name, content in (
        ('a.srt', SRT), ('a.vtt', VTT), ('a.ass', ASS), ('a.SRT', SRT + '[laughs]\n♪\n'),
        ('twice.srt', SRT + '\n3\n00:00:04,500 --> 00:00:07,000\nis late.\n'),
        ('a.txt', 'The train\nis late.'))),
    ('rolling.vtt', vtt(*ROLLING), 'hello everyone welcome to the show'),
    ('grows.vtt', in_turn('we', 'we like', 'we like tea'), 'we like tea'),
    ('marked.vtt', in_turn('<b>we</b> like', 'we <b>like</b>', '<b>tea</b> too', 'tea <b>too</b>'),
     'we like tea too'),
    ('shouts.vtt', in_turn('No!', 'No!', 'No!', 'Go!\nGo!'), 'No! No! No! Go! Go!'),
    ('numbers.srt', srt('In\n1984', '42', 'in\n1990'), 'In 1984 42 in 1990'),
    ('doubled.srt', srt('Hello.', 'Bye.').replace('\n', '\r\r\n'), 'Hello. Bye.'),
    ('blank.srt', srt('Hello\n\nthere.', 'Bye.'), 'Hello there. Bye.'),
    ('tags.srt', srt('<i>un</i>believable R&amp;B', '(laughs) >> JOHN: Hi'), 'unbelievable R&B Hi'),
    ('short.vtt', 'WEBVTT\n\n00:05 --> 00:07\nFirst.\n\nNOTE no\n\nname\n00:08 --> 00:09\nNext.',
     'First. Next.'),
    ('karaoke.ass', ASS.replace('The\\N', '{\\k20}T{\\k15}he ').replace('p1', 'p4'), 'The train is late.'),
    ('label.srt', '1\n00:01,0 --> 00:02,0\nMAN 1: Come in.\nИВАН: Да.\n*sighs*\nIt is 5:30.',
     'Come in. Да. It is 5:30.'),
    ('x.lrc', '[ar:Me]\n[00:12.00]Hello.\n[00:02.0]First.', 'First. Hello.'),
    ('x.sbv', '0:00:01.000,0:00:02.000\nHello.', 'Hello.'), ('srt.txt', srt('Hello.'), 'Hello.'),
    ('x.html', '<head><title>T</title></head><p>One<a role="doc-noteref"><sup>1</sup></a> two<sup><a>2</a>'
               '</sup> 10<sup>th</sup></p><aside role="doc-footnote"><p>Note</p></aside>', 'One two 10th')])
def test_only_what_is_said_is_read(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert ' '.join(read_paragraphs(tmp_path / name)) == said

def book(path, chapters, spine, folder='OEBPS/'):
    items = ''.join(f'<item id="{n}" href="text/{n}%20a.xhtml" media-type="application/xhtml+xml"/>'
                    for n in chapters)
    refs = ''.join(f'<itemref idref="{n}"/>' for n in spine)
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as file:
        file.writestr('META-INF/container.xml', f'<rootfile full-path="{folder}a.opf"/>')
        file.writestr(f'{folder}a.opf', f'<manifest>{items}</manifest><spine>{refs}</spine>')
        for n, text in chapters.items(): file.writestr(f'{folder}text/{n} a.xhtml', text)

def test_a_book(tmp_path):
    "Chapters in the order of the spine; nothing is extracted, and names that lead out are names in the file."
    page = '<head><title>No</title></head><body><h1>{}</h1><p>The <i>tr</i>ain\nis late.</p></body>'
    for name, folder in (('a', 'OEBPS/'), ('out', '../../')):
        book(tmp_path / f'{name}.epub', {n: page.format(n) for n in ('one', 'two')}, ('two', 'one'), folder)
        assert read_paragraphs(tmp_path / f'{name}.epub') == [
            'two', 'The train is late.', 'one', 'The train is late.']
    assert sorted(p.name for p in tmp_path.iterdir()) == ['a.epub', 'out.epub']

@pytest.mark.parametrize('name, content', [
    ('a.txt', b''), ('a.txt', b'\n - \n'), ('a.txt', 'schön'.encode('latin-1')), ('x.pdf', b'%PDF'),
    ('x.lab', b'0 300 sil\n300 900 a'), ('none.epub', b'PK no'), ('bomb.epub', None)])
def test_a_file_that_holds_no_text_is_named(tmp_path, name, content):
    if content is None: book(tmp_path / name, {'one': 'a' * (2**26 + 9)}, ('one',))   # would fill the memory
    else: (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name): read_paragraphs(tmp_path / name)

@pytest.mark.parametrize('text, language, spoken, words', [
    ('On the 3rd, Dr. No – came.', 'en', 'on the third, doctor no came.', [0, 3, 7, 12, 16, 21]),
    ('是，不是。', 'zh-cn', '是，不是。', [0, 2, 3]), ('سلام دنیا', 'fa', 'سلام دنیا', [0, 5])])
def test_words_keep_their_places(text, language, spoken, words):
    found = spoken_sentence(text, language)
    assert (found.text, found.spoken, found.words) == (text, spoken, words)
    assert len(found.places) == len(words) and spoken_sentence('– …', language) is None

def test_where_there_is_no_full_stop(tmp_path):
    "Line ends divide rows, not a text that is wrapped; then commas do, and lengths."
    rows = [f'row {word} of a list that somebody reads aloud' for word in ('one', 'number 2', '3', 'no 4')]
    (tmp_path / 'rows.txt').write_text('\n'.join(rows))
    assert read_paragraphs(tmp_path / 'rows.txt') == rows
    (tmp_path / 'wrapped.txt').write_text('\n'.join(['abcd efgh ijkl mnop qrst uvwx'] * 9))
    assert len(read_paragraphs(tmp_path / 'wrapped.txt')) == 1
    divide = lambda text, language='en': text_sentences([text], language)
    parts = divide('one two, three ' * 100)
    assert max(len(s.text) for s in parts) <= 200
    assert [s.inner for s in parts] == [True] * (len(parts) - 1) + [False]
    assert all(s.text.endswith(',') for s in parts[:-1])
    assert ' '.join(s.text for s in parts).split() == ['one', 'two,', 'three'] * 100
    assert ''.join(s.text for s in divide('我带着雨伞去上班' * 40, 'zh-cn')) == '我带着雨伞去上班' * 40

# --- sound --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('rate', [8000, 44100])
def test_pauses(tmp_path, rate):
    "Half a second of noise, then pauses of 0.3, 0.05 and 0.5 s between such noises; also read in blocks."
    rng, quiet = np.random.default_rng(0), 1e-4
    parts = [level * rng.standard_normal(int(s * rate)) for level, s in (
        (.1, .5), (quiet, .3), (.1, .5), (quiet, .03), (.1, .5), (quiet, .5), (.1, .5))]
    wav = np.concatenate(parts).astype(np.float32)
    pauses = find_pauses(_measure_sound(wav, rate))
    assert pauses == pytest.approx(np.array([[.5, .8], [1.83, 2.33]]), abs=0.025)
    soundfile.write(tmp_path / 'x.wav', np.tile(wav, 25), rate, 'FLOAT')
    whole, blocks = _measure_sound(np.tile(wav, 25), rate), _measure_file(tmp_path / 'x.wav')
    n = min(len(whole.mel), len(blocks.mel)) - 2
    assert blocks.seconds == pytest.approx(whole.seconds) and n > 25 * 70
    assert np.allclose(whole.mel[2:n], blocks.mel[2:n], atol=1e-3)

# --- the path of a sentence ---------------------------------------------------------------------------------

def test_sound_that_is_not_in_the_text_is_no_part_of_a_sentence():
    "The path is led over the sentence before, or behind; it lets go of what lies beyond a pause."
    texts = [_DEMO_SENTENCES['en'][i] for i in (0, 4, 7, 9, 12)]
    pause, wavs = np.zeros(RATE // 3, np.float32), [speak(t, 'en', VOICES['m3'])[0] / 2.**15 for t in texts]
    wav = np.concatenate([p for wav in wavs for p in (wav, pause)]).astype(np.float32)
    spoken = speak_sentences(text_sentences(texts, 'en'), 'en')
    speech, model = comparable(_measure_sound(wav, RATE), spoken)
    matches = [fit.match for fit in found_sentences(align(speech, model), speech, model)]
    assert [m.sentence for m in matches] == [0, 1, 2, 3, 4]
    for m in matches[1:-1]:
        assert _without_foreign(_fit_words(m, speech, model), speech, model).match == m
        again = _without_foreign(_fit_words(m._replace(begin=m.begin - 20), speech, model), speech, model)
        assert abs(again.match.begin - m.begin) <= 2 and again.match.end == m.end
        assert len(again.path) == again.match.end - again.match.begin
        again = _without_foreign(_fit_words(m._replace(end=m.end + 20), speech, model), speech, model)
        assert abs(again.match.end - m.end) <= 2 and again.match.begin == m.begin
