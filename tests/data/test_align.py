"Texts, pauses, and where sentences are spoken."
import numpy as np
import pytest
import soundfile

from xtts_nb.app.demo import DEMO_SENTENCES, speak, speak_words, VOICES
from xtts_nb.config import UserError
from xtts_nb.data.align import (
    align, comparable, find_pauses, fit_words, found_sentences, measure_file, measure_sound, read_paragraphs,
    speak_sentences, spoken_sentence, text_sentences, without_foreign)


RATE = 22050


# --- text ---------------------------------------------------------------------------------------------------

SRT = '2\n00:00:04,500 --> 00:00:05,000\nis late.\n\n1\n00:00:01,000 --> 00:00:09,000\n<i>The train</i>\n'
VTT = 'WEBVTT\n\nNOTE nobody says this\n\nintro\n00:01.000 --> 00:02.000 align:start\n- The train\nis late.\n'
ASS = ('[Events]\nFormat: Layer, Start, End, Style, Name, MarginL, MarginR, MarginV, Effect, Text\n'
       'Dialogue: 0,0:00:05.00,0:00:06.00,A,,0,0,0,,is {\\b1}late.\n'
       'Dialogue: 0,0:00:01.00,0:00:09.00,A,,0,0,0,,The\\Ntrain\n'
       'Dialogue: 0,0:00:01.00,0:00:09.00,A,,0,0,0,,{\\p1}m 0 0 l 9 9\n')

@pytest.mark.parametrize('name, content', [
    ('a.srt', SRT), ('a.vtt', VTT), ('a.ass', ASS), ('a.SRT', SRT + '[laughs]\n♪\n'),
    ('twice.srt', SRT + '\n3\n00:00:04,500 --> 00:00:07,000\nis late.\n'), ('a.txt', 'The train\nis late.')])
def test_a_text_and_subtitles(tmp_path, name, content):
    (tmp_path / name).write_text(content, encoding='utf-16')
    assert read_paragraphs(tmp_path / name) == ['The train is late.']

@pytest.mark.parametrize('content, reason', [
    (b'', 'holds no text'), (b'\n - \n', 'holds no text'), ('schön'.encode('latin-1'), 'is not UTF-8')])
def test_a_text_that_is_none(tmp_path, content, reason):
    (tmp_path / 'a.txt').write_bytes(content)
    with pytest.raises(UserError, match=f'a.txt: {reason}'): read_paragraphs(tmp_path / 'a.txt')

@pytest.mark.parametrize('text, language, spoken, words', [
    ('On the 3rd, Dr. No – came.', 'en', 'on the third, doctor no came.', [0, 3, 7, 12, 16, 21]),
    ('是，不是。', 'zh-cn', '是，不是。', [0, 2, 3]), ('سلام دنیا', 'fa', 'سلام دنیا', [0, 5])])
def test_words_keep_their_places(text, language, spoken, words):
    found = spoken_sentence(text, language)
    assert (found.text, found.spoken, found.words) == (text, spoken, words)
    assert len(found.places) == len(words) and spoken_sentence('– …', language) is None

def test_a_text_without_punctuation_is_divided():
    "The search would need the square of its length."
    found = text_sentences(['one two three ' * 100, 'x' * 900], 'en', lambda text, language: [text])
    assert max(len(s.text) for s in found[:-1]) <= 400 and len(found[-1].text) == 900
    assert ' '.join(s.text for s in found[:-1]).split() == ['one', 'two', 'three'] * 100


# --- sound --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('rate', [8000, 22050, 44100])
def test_pauses(tmp_path, rate):
    "Half a second of noise, then pauses of 0.3, 0.05 and 0.5 s between such noises; also read in blocks."
    rng, quiet = np.random.default_rng(0), 1e-4
    parts = [level * rng.standard_normal(int(s * rate)) for level, s in (
        (.1, .5), (quiet, .3), (.1, .5), (quiet, .03), (.1, .5), (quiet, .5), (.1, .5))]
    wav = np.concatenate(parts).astype(np.float32)
    pauses = find_pauses(measure_sound(wav, rate))
    assert pauses == pytest.approx(np.array([[.5, .8], [1.83, 2.33]]), abs=0.025)
    soundfile.write(tmp_path / 'x.wav', np.tile(wav, 25), rate, 'FLOAT')
    whole, blocks = measure_sound(np.tile(wav, 25), rate), measure_file(tmp_path / 'x.wav')
    n = min(len(whole.mel), len(blocks.mel)) - 2
    assert blocks.seconds == pytest.approx(whole.seconds) and n > 25 * 70
    assert np.allclose(whole.mel[2:n], blocks.mel[2:n], atol=1e-3)


# --- the path of a sentence ---------------------------------------------------------------------------------

def test_sound_that_is_not_in_the_text_is_no_part_of_a_sentence():
    "The path is led over the sentence before, or behind; it lets go of what lies beyond a pause."
    texts = [DEMO_SENTENCES['en'][i] for i in (0, 4, 7, 9, 12)]
    pause, wavs = np.zeros(RATE // 3, np.float32), [speak(t, 'en', VOICES['m3'])[0] / 2.**15 for t in texts]
    wav = np.concatenate([p for wav in wavs for p in (wav, pause)]).astype(np.float32)
    spoken = speak_sentences(text_sentences(texts, 'en', lambda text, language: [text]), 'en', speak_words)
    speech, model = comparable(measure_sound(wav, RATE), spoken)
    matches = [fit.match for fit in found_sentences(align(speech, model), speech, model)]
    assert [m.sentence for m in matches] == [0, 1, 2, 3, 4]
    for m in matches[1:-1]:
        assert without_foreign(fit_words(m, speech, model), speech, model).match == m
        again = without_foreign(fit_words(m._replace(begin=m.begin - 20), speech, model), speech, model)
        assert abs(again.match.begin - m.begin) <= 2 and again.match.end == m.end
        assert len(again.path) == again.match.end - again.match.begin
        again = without_foreign(fit_words(m._replace(end=m.end + 20), speech, model), speech, model)
        assert abs(again.match.end - m.end) <= 2 and again.match.begin == m.begin
