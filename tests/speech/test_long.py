"Long text: nothing lost, nothing too long, linear; spoken in order with pauses, and what cannot be spoken."
from random import Random

import numpy as np
import pytest

from xtts_nb.config import UserError
from xtts_nb.data.audio import synthetic_voice
from xtts_nb.data.sentences import sentences, separable
from xtts_nb.data.text import _LANGUAGES
from xtts_nb.speech.generate import Speaker
from xtts_nb.speech.guard import _Rate
from xtts_nb.speech.long import (
    _MAX_CHARACTERS, _TextPiece, _language_runs, speak_long, _split_text, _text_pieces)

VOICE = synthetic_voice(1.)
SCRIPTS = {'ru': 'абвгд', 'ar': 'ابتثَِ', 'fa': 'اب\u200cپچَ', 'zh-cn': '你好吗，。！', 'ja': '私はカ゛ー。、',
           'hi': 'कि्षा।ं', 'ko': '안녕가\u1100\u1161\u11a8'}
MARKS = ' ' * 20 + ',.;:!?…"\')-—\n0123456789e\u0301👍🏽🇩🇪👩\u200d🚀'
EVERY = [*_LANGUAGES, 'fa']

def texts(language, n):
    "Words, no spaces, digits, mixed scripts, marks alone, spaces, and marks that combine."
    draw, letters = Random(language), SCRIPTS.get(language, 'abcdeßñ')
    yield ''.join(draw.choices(letters * 9 + MARKS, k=n))
    yield ''.join(draw.choices(letters, k=n))
    yield ''.join(draw.choices('0123456789', k=n))
    yield ''.join(draw.choices(''.join(SCRIPTS.values()) + 'abcXYZ' + MARKS, k=n))
    for unit in ('. ', ' \n', 'a\u0301\u0300', '\ud83d\ude00'): yield unit * (n // len(unit))

def check(text, language, most):
    "Split, with `most` weighted characters to a piece."
    weigh = lambda piece: sum(4 if c.isdecimal() else 1 for c in piece.strip())
    pieces = _split_text(text, language, lambda piece: weigh(piece) <= most)
    limit = min(most, _MAX_CHARACTERS[language[:2]])
    assert ''.join(p.text for p in pieces) == text and {p.language for p in pieces} == {language}
    place = 0
    for piece in pieces:
        assert piece.text and weigh(piece.text) <= most and len(piece.text.strip()) <= limit
        assert 0 <= piece.pause <= 0.7 and (not place or separable(text, place))
        place += len(piece.text)

@pytest.mark.parametrize('language', EVERY)
def test_no_character_is_lost_and_every_piece_fits(language):
    for text in texts(language, 3000): check(text, language, 60)

DOG = 'The dog sleeps. '

@pytest.mark.parametrize('text, most, pieces', [   # sentences in each piece
    (DOG * 5, 48, [3, 2]), (DOG * 4 + '\n\n' + DOG * 2, 48, [3, 1, 2]), (DOG * 3, 16, [1, 1, 1]),
    (DOG * 20, 999, [15, 5]),                                    # 250 characters
    (DOG * 4 + 'No.', 64, [3, 2]), ('Yes.\n\n' + DOG, 99, [1, 1]), ('Yes. ' + DOG, 19, [1, 1]),
    (DOG * 3 + 'No. ' + 'Cats and dogs are asleep now, and all of them. ' + DOG, 48, [2, 2, 1, 1])])
def test_sentences_are_packed(text, most, pieces):
    "A short rest takes a sentence of the piece before it; paragraphs are not joined."
    found = _split_text(text, 'en', lambda piece: len(piece.strip()) <= most)
    assert ''.join(p.text for p in found) == text
    assert [len(sentences(p.text, 'en')) for p in found] == pieces

def test_the_pause_follows_the_punctuation():
    text = ('At Smith Jr., Bob and I are. This is the first one. This is the second… This is the third, '
            'long one; and here, yes, a very long part\n\nof what is it? "Look at that!" he said again')
    fits = lambda piece: len(piece.strip()) <= 26
    assert [(p.text.strip()[-5:], p.pause) for p in _split_text(text, 'en', fits)] == [
        (' Jr.,', .15), (' are.', .35),
        (' one.', .35), ('cond…', .5), ('hird,', .15), (' yes,', .15), (' part', .7),
        ('s it?', .35), ('hat!"', .25), ('again', 0)]

def test_each_sentence_has_its_language():
    parts = [('I like it a lot. No. Really? ', 'en'), ('Das Leben ist schön, und ich komme morgen. ', 'de'),
             ('That is all. ', 'en'), ('你好。我是学生。', 'zh-cn'), ('今日は天気がいいですね。', 'ja')]
    text = ''.join(part for part, _ in parts)
    assert _language_runs(text, ['de', 'en', 'it', 'ja', 'xx', 'zh-cn']) == parts
    assert _language_runs(text, ['fa']) == [(text, 'fa')]
    with pytest.raises(UserError, match='en, xx.*give the language'): _language_runs(text, ['en', 'xx'])

class Recorder:
    "Speaks a text as as many samples as it has characters, each the number of the batch."
    sample_rate, decoder = 100, True
    def __init__(self, xtts, reports=None):
        self.xtts, self.rates, self.batches = xtts, {}, []
        self._ids = Speaker._ids.__get__(self)
        self.speech = xtts.config.replace(speech={'speed': 2}).speech
        if reports: self.reports = reports
    def listen(self, reference): return f'heard {reference}'
    def batch(self, *given):
        self.batches.append(given)
        return [np.full(len(text), len(self.batches), np.float32) for text in given[0]]

@pytest.fixture
def recorder(xtts): return Recorder(xtts)

TEXT = 'aa bb cc dd ee ff\n\ngg hh\n\naa bb cc dd ee ff gg hh\n\nbb'

def test_pieces_are_spoken_in_order(recorder):
    done = []
    spoken = speak_long(recorder, TEXT, 'en', 'me', 7, rows=3, progress=lambda *n: done.append(n))
    assert not recorder.batches
    first = next(spoken)
    assert first.piece == _TextPiece('aa bb cc dd ee ff\n\n', 'en', .7) and first.report == []
    assert first.wav.tolist() == [1] * 19 + [0] * 35 and len(recorder.batches) == 1   # 0.7 s at speed 2
    rest = [*spoken]
    assert [s.wav.max() for s in rest] == [1, 1, 2] and len(rest[-1].wav) == 2
    assert ''.join(s.piece.text for s in [first, *rest]) == TEXT and done == [(3, 4), (4, 4)]
    texts = [p.text for p in _text_pieces(recorder, TEXT, 'en')[0]]
    *given, seeds = zip(*recorder.batches)
    assert given == [(tuple(texts[:3]), ('bb',) * 3), (('en',) * 3,) * 2, (['heard me'] * 3,) * 2]
    assert seeds[0][0] == 7 and len({*seeds[0], *seeds[1]}) == 4   # one for each piece

@pytest.mark.parametrize('language', ['en', 'auto'])
@pytest.mark.parametrize('text, words', [
    ('', 'empty'), (' \n', 'empty'), ('- * \n\n…', 'no letter'), ('ж!', 'ж'), ('```\naa\n```', 'no letter'),
    ('aa \udcff', 'UTF-8')])
def test_what_cannot_be_spoken_is_refused_at_once(recorder, text, language, words):
    with pytest.raises(UserError, match=words): speak_long(recorder, text, language, 'me')

def test_a_piece_has_room_for_its_codes(recorder):
    "With the codes that a token takes and the longest text of the training, and at least 16 tokens."
    text, recorder.max_codes = 'aa bb cc dd ee ff gg hh ' * 4, 60
    count = lambda: max(_text_pieces(recorder, text, 'en')[1])
    assert 30 < count() <= 40
    for most, longest, tokens in ((1.4 * 3, None, 20), (1.4 * 30, None, 16), (1., 22, 22), (1., 3, 16)):
        recorder.rates = {'en': _Rate(1., most, longest)}
        assert tokens / 2 < count() <= tokens

def test_a_mark_that_is_not_said_still_divides(recorder):
    "The vocabulary has no full stop; a heading and an item of a list end like a sentence."
    text = '# Aa bb\n- Cc dd ee ff.\n- gg hh\n\n**Gg** hh aa bb ccж dd 😀'
    pieces, tokens = _text_pieces(recorder, text, 'EN-us')
    assert [(p.text, p.language, p.pause) for p in pieces] == [
        ('Aa bb.\n\n', 'en', .7), ('Cc dd ee ff. Gg hh.\n\n', 'en', .7), ('Gg hh aa bb ccж dd 😀', 'en', 0.)]
    assert pieces[0].notes == ({'found': 'cannot be said "# * - . 😀"', 'done': 'left out'},
                               {'found': 'unknown letters "ж"', 'done': 'left out'})
    assert pieces[1].notes == pieces[2].notes == () and all(tokens)
