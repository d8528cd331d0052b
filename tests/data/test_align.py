"A recording and its text become clips: what is found, where it is cut, what is refused."
import json
from itertools import pairwise

import numpy as np
import pytest
import soundfile

from xtts_nb.app.demo import DEMO_SENTENCES, speak, speak_words, VOICES
from xtts_nb.config import UserError
from xtts_nb.data import align
from xtts_nb.data.align import (
    account, choose_clips, corpus_text, cut_corpus, CutPiece, find_pauses, LONGEST, measure_file,
    measure_sound, read_paragraphs, SHORTEST, Speech, spoken_sentence)
from xtts_nb.data.corpora import read_corpus
from xtts_nb.speech.long import sentences

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
    ('是，不是。', 'zh-cn', '是，不是。', [0, 2]), ('سلام دنیا', 'fa', 'سلام دنیا', [0, 5])])
def test_words_keep_their_places(text, language, spoken, words):
    found = spoken_sentence(text, language)
    assert (found.text, found.spoken, found.words) == (text, spoken, words)
    assert len(found.places) == len(words) and spoken_sentence('– …', language) is None


# --- sound --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('rate', [8000, 22050, 44100])
def test_pauses(tmp_path, rate):
    "Half a second of noise, then pauses of 0.3, 0.05 and 0.5 s between such noises; also read in blocks."
    rng, quiet = np.random.default_rng(0), 1e-4
    parts = [level * rng.standard_normal(int(s * rate)) for level, s in (
        (.1, .5), (quiet, .3), (.1, .5), (quiet, .05), (.1, .5), (quiet, .5), (.1, .5))]
    wav = np.concatenate(parts).astype(np.float32)
    pauses = find_pauses(measure_sound(wav, rate))
    assert pauses == pytest.approx(np.array([[.5, .8], [1.85, 2.35]]), abs=0.025)
    soundfile.write(tmp_path / 'x.wav', np.tile(wav, 25), rate, 'FLOAT')
    whole, blocks = measure_sound(np.tile(wav, 25), rate), measure_file(tmp_path / 'x.wav')
    n = min(len(whole.mel), len(blocks.mel)) - 2
    assert blocks.seconds == pytest.approx(whole.seconds) and n > 25 * 70
    assert np.allclose(whole.mel[2:n], blocks.mel[2:n], atol=1e-3)


# --- a reading ----------------------------------------------------------------------------------------------

def reading(spoken, voices=('f4', 'm3'), pauses=(0.2, 0.5, 0.8), language='en', lead=0.3):
    "Speech with pauses, and where each sentence lies: samples, [(start, end)] in s."
    rng, parts, places = np.random.default_rng(0), [np.zeros(int(lead * RATE))], []
    for i, text in enumerate(spoken):
        wav = speak(text, language, VOICES[voices[i % len(voices)]])[0] / 2.**15
        at, loud = sum(map(len, parts)), np.flatnonzero(np.abs(wav) > 0.01)
        places.append(((at + loud[0]) / RATE, (at + loud[-1]) / RATE))
        parts += [wav, np.zeros(int(rng.choice(pauses) * RATE))]
    wav = np.concatenate(parts)
    return (wav + 1e-4 * rng.standard_normal(len(wav))).astype(np.float32), places

def corpus(folder, wav, text, language='en', out='out'):
    soundfile.write(folder / 'book.wav', wav, RATE)
    (folder / 'book.txt').write_text(text, encoding='utf-8')
    return cut_corpus(folder / 'book.wav', folder / 'book.txt', folder / out, language, speak_words,
                       sentences)

@pytest.mark.parametrize('language, voices', [('en', ('f4', 'm3')), ('de', ('f1',))])
def test_what_is_missing_on_either_side_is_left_out(tmp_path, language, voices):
    texts = DEMO_SENTENCES[language]
    unread, unwritten = texts[5], texts[9]
    spoken = [t for t in texts[:14] if t != unread]
    wav, places = reading(spoken, voices, language=language)
    result = corpus(tmp_path, wav, ' '.join(t for t in texts[:14] if t != unwritten), language)
    assert result['missing'] == [unread]
    strange = [d for d in result['dropped'] if d['reason'] == 'no sentence of the text is spoken here']
    start, end = places[spoken.index(unwritten)]
    assert len(strange) == 1 and strange[0]['start'] <= start and end <= strange[0]['end']
    parts = sorted(result['clips'] + result['dropped'], key=lambda p: p['start'])
    assert parts[0]['start'] == 0 and parts[-1]['end'] == pytest.approx(len(wav) / RATE, abs=1e-3)
    assert all(a['end'] == pytest.approx(b['start'], abs=2e-3) for a, b in pairwise(parts))
    for clip in result['clips']:
        inside = [i for i, (a, b) in enumerate(places) if a < clip['end'] and b > clip['start']]
        assert clip['text'] == ' '.join(spoken[i] for i in inside)
        assert 0.04 < places[inside[0]][0] - clip['start'] < 0.2
        assert 0.04 < clip['end'] - places[inside[-1]][1] < 0.2

def test_the_clips_are_a_corpus(tmp_path):
    texts = DEMO_SENTENCES['en'][:8]
    wav, _ = reading(texts)
    result = corpus(tmp_path, wav, ' '.join(texts))
    rows, dropped = read_corpus(tmp_path / 'out')
    assert not dropped and [r.text for r in rows] == [c['text'] for c in result['clips']]
    assert {(r.speaker, r.language) for r in rows} == {('book', 'en')}
    for row, clip in zip(rows, result['clips']):
        cut, rate = soundfile.read(row.path)
        first, last = round(clip['start'] * RATE), round(clip['end'] * RATE)
        assert rate == RATE and np.abs(cut - wav[first:last]).max() < 1e-3
        assert SHORTEST <= len(cut) / RATE <= LONGEST
        assert max(np.abs(cut[:600]).max(), np.abs(cut[-600:]).max()) < 0.02
    json.dumps(result)

def test_a_long_sentence_is_cut_at_its_pauses(tmp_path):
    parts = [f'{t.rstrip(".").lower()},' for t in DEMO_SENTENCES['en'][:8] if t.endswith('.')]
    wav, places = reading(parts, ('m4',), (0.5,))
    result = corpus(tmp_path, wav, ' '.join(parts))
    assert len(result['clips']) > 1 and not result['missing']
    assert ' '.join(c['text'] for c in result['clips']) == ' '.join(parts)
    for clip in result['clips']:
        assert clip['text'] == ' '.join(t for t, (a, b) in zip(parts, places)
                                        if clip['start'] < a and b < clip['end'])

@pytest.mark.parametrize('text, language', [(' '.join(DEMO_SENTENCES['de']), 'de'),
                                            (' '.join(DEMO_SENTENCES['fa']), 'fa'),
                                            (' '.join(DEMO_SENTENCES['en'][12:]), 'en')])
def test_another_text_is_refused(tmp_path, text, language):
    wav, _ = reading(DEMO_SENTENCES['en'][:12])
    with pytest.raises(UserError, match=r'only \d+ of \d+ sentences .* give the text of this recording'):
        corpus(tmp_path, wav, text, language)
    assert not list(tmp_path.glob('out*'))

@pytest.mark.parametrize('wav, reason', [(np.zeros(RATE * 3), 'silent'), (np.zeros(0), 'no sound')])
def test_silence_is_refused(tmp_path, wav, reason):
    with pytest.raises(UserError, match=reason): corpus(tmp_path, wav.astype(np.float32), 'Hello there.')
    assert not list(tmp_path.glob('out*'))

@pytest.mark.parametrize('there, missing', [('a.txt', 'a.wav'), ('a.wav', 'a.txt')])
def test_a_file_that_is_missing_is_named(tmp_path, there, missing):
    (tmp_path / there).write_text('The train is late.')
    with pytest.raises(UserError, match=f'{missing}: there is no such file'):
        cut_corpus(tmp_path / 'a.wav', tmp_path / 'a.txt', tmp_path / 'out', 'en', speak_words, sentences)
    assert not (tmp_path / 'out').exists()

def test_other_work_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr(align, 'measure_file', lambda *what: 1 / 0)   # before the work
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'mine').touch()
    with pytest.raises(UserError, match='already holds something'): corpus(tmp_path, np.zeros(9), 'Hello.')
    with pytest.raises(UserError, match='no language code'):
        corpus(tmp_path, np.zeros(9), 'Hello.', 'English!')


# --- clips --------------------------------------------------------------------------------------------------

def pieces(*seconds, pause=0.4, inner=(), closed=()):
    "Pieces of so many seconds; after those in `closed` is no pause."
    out, at = [], 1.
    for i, s in enumerate(seconds):
        left, right = (-1 if k in closed else k + 1 for k in (i - 1, i))
        out.append(CutPiece(left, right, at, at + s, str(i), i in inner))
        at += s + pause
    return out

@pytest.mark.parametrize('chain, clips, rest', [
    (pieces(3, 3, 3), ['012'], ''), (pieces(6, 6), ['0', '1'], ''), (pieces(1, 1, 9.7), ['01', '2'], ''),
    (pieces(12), [], '0'), (pieces(1.), [], '0'), (pieces(5, 12, 5), ['0', '2'], '1'),
    (pieces(5, 5, pause=2.), ['0', '1'], ''), (pieces(4, 4, 4, 4, inner=(0, 2)), ['01', '23'], ''),
    (pieces(6, 6, closed=(0,)), [], '01'), (pieces(3, 3, closed=(0,)), ['01'], '')])
def test_clips_are_chosen(chain, clips, rest):
    chosen, left = choose_clips(chain)
    assert [''.join(p.text for p in c) for c in chosen] == clips and ''.join(p.text for p in left) == rest

def test_every_second_has_a_reason():
    speech = Speech(None, np.arange(7, 9, 0.04), None, None, None)
    rest = [CutPiece(left, 2, start, end, '', False)
            for left, start, end in ((1, 4., 4.5), (-1, 9., 12.), (1, 12., 30.))]
    dropped = account([{'start': 0.5, 'end': 3.5}], rest, speech, 31.)
    assert [(d['start'], d['end'], d['reason'].split(':')[0]) for d in dropped] == [
        (0, .5, 'pause'), (3.5, 4, 'pause'), (4, 4.5, 'shorter than 2 s, and nothing beside it to join'),
        (4.5, 9, 'no sentence of the text is spoken here'), (9, 12, 'no pause beside it to cut in'),
        (12, 30, 'longer than 11 s'), (30, 31, 'pause')]
    lines = corpus_text({'clips': [], 'dropped': dropped, 'missing': ['a'] * 12}).splitlines()
    assert lines[0] == '0 clips, 0.0 minutes of 0.5' and lines[-1] == 'missing  and 2 more'


# --- recorded speech ----------------------------------------------------------------------------------------

def clean_edges(wav, rate):
    "Where the sound of a clip begins and ends (s): within 30 dB of its loud frames of 10 ms."
    frame = rate // 100
    sharp = np.diff(wav, prepend=wav[:1])[:len(wav) // frame * frame].reshape(-1, frame)
    level = 10 * np.log10((sharp**2).mean(1) + 1e-10)
    loud = np.flatnonzero(level > np.percentile(level, 95) - 30)
    return loud[0] / 100, (loud[-1] + 1) / 100

@pytest.mark.slow
@pytest.mark.parametrize('pauses', [(0.,), (0.2,), (0., 0.2, 0.5, 0.8), (0.8,)])
def test_recorded_speech(speech, tmp_path, pauses):
    "Clips in another order, two without text and two texts without sound."
    clips, rng = read_corpus(speech)[0], np.random.default_rng(len(pauses))
    order = rng.permutation(len(clips))
    unread, unwritten = set(order[3:5]), set(order[8:10])
    parts, rows, at = [np.zeros(4410)], [], 4410
    for i in (i for i in order if i not in unread):
        wav, rate = soundfile.read(clips[i].path)
        first, last = clean_edges(wav, rate)
        rows.append((at / rate + first, at / rate + last, clips[i].text.strip()))
        parts += [wav, np.zeros(int(rng.choice(pauses) * rate))]
        at += len(parts[-1]) + len(wav)
    soundfile.write(tmp_path / 'book.wav', np.concatenate(parts), rate)
    written = [clips[i].text for i in order if i not in unwritten]
    (tmp_path / 'book.txt').write_text('\n\n'.join(written))
    result = cut_corpus(tmp_path / 'book.wav', tmp_path / 'book.txt', tmp_path / 'out', 'en', speak_words,
                         lambda text, language: [text])
    assert sorted(result['missing']) == sorted(clips[i].text.strip() for i in unread)
    off = cut_errors(result['clips'], rows)
    assert np.median(off) < 0.04 and np.percentile(off, 95) < (0.15 if pauses[0] else 0.2)

def cut_errors(clips: list[dict], rows: list[tuple]) -> list[float]:
    "How far the cuts at edges of recordings are from 0.1 s, or half of the pause, beside their sound."
    off = []
    for clip in clips:
        inside = [i for i, (a, b, _) in enumerate(rows) if min(b, clip['end']) - max(a, clip['start']) > 0.1]
        first, last = rows[inside[0]], rows[inside[-1]]
        before = rows[inside[0] - 1][1] if inside[0] else 0.
        after = rows[inside[-1] + 1][0] if inside[-1] + 1 < len(rows) else last[1] + 1
        if clip['text'].startswith(first[2][:25]):
            off.append(abs(clip['start'] - first[0] + min(0.1, (first[0] - before) / 2)))
        if clip['text'].endswith(last[2][-25:]):
            off.append(abs(clip['end'] - last[1] - min(0.1, (after - last[1]) / 2)))
    return off
