"A recording and its text become clips, and clips are compared with their texts: what is found and refused."
import json
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from benchmarks.cuts import cut_all
from xtts_nb.app.demo_corpus import _DEMO_SENTENCES
from xtts_nb.config import UserError
from xtts_nb.data import align, cut, espeak
from xtts_nb.data.align import _measure_part, Speech
from xtts_nb.data.audio import open_audio, resample
from xtts_nb.data.corpora import Clip, read_corpus
from xtts_nb.data.cut import account, _BRIEF, _choose_clips, corpus_text, cut_corpus, _CutPiece, _LONGEST
from xtts_nb.data.espeak import VOICES

RATE, EN = 22050, _DEMO_SENTENCES['en']

@cache
def speak(text, language, voice=None):   # its name
    return espeak.speak(text, language, *([VOICES[voice]] if voice else []))

# --- a reading ----------------------------------------------------------------------------------------------

def reading(spoken, voices=('f4', 'm3'), pauses=(0.2, 0.5, 0.8), language='en', lead=0.3):
    "Speech with pauses, and where each sentence lies: samples, [(start, end)] in s."
    rng, parts, places = np.random.default_rng(0), [np.zeros(int(lead * RATE))], []
    for i, text in enumerate(spoken):
        wav = speak(text, language, voices[i % len(voices)])[0] / 2.**15
        at, loud = sum(map(len, parts)), np.flatnonzero(np.abs(wav) > 0.01)
        places.append(((at + loud[0]) / RATE, (at + loud[-1]) / RATE))
        parts += [wav, np.zeros(int(rng.choice(pauses) * RATE))]
    wav = np.concatenate(parts)
    return (wav + 1e-4 * rng.standard_normal(len(wav))).astype(np.float32), places

def write(path, wav, text=None, rate=RATE):
    "A recording, perhaps with its text of the same name."
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, wav, rate)
    if text is not None: path.with_suffix('.txt').write_text(text, encoding='utf-8')
    return path

def run(source, out, language='en', text=None, **how):
    return cut_corpus(source, text, out, language, **how)

def corpus(folder, wav, text, language='en'):
    return run(write(folder / 'book.wav', wav, text), folder / 'out', language, folder / 'book.txt')

def said(result): return ' '.join(c['text'] for c in result['clips'])

@pytest.mark.parametrize('language, voices', [('en', ('f4', 'm3')), ('de', ('f1',))])
def test_what_is_missing_on_either_side_is_left_out(tmp_path, language, voices):
    texts = _DEMO_SENTENCES[language]
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

    rows, dropped = read_corpus(tmp_path / 'out')
    assert not dropped and [r.text for r in rows] == [c['text'] for c in result['clips']]
    assert {(r.speaker, r.language) for r in rows} == {('book', language)}
    for row, clip in zip(rows, result['clips']):
        found, rate = soundfile.read(row.path)
        first, last = round(clip['start'] * RATE), round(clip['end'] * RATE)
        assert rate == RATE and np.abs(found - wav[first:last]).max() < 1e-3
        assert _BRIEF <= len(found) / RATE <= _LONGEST
        assert max(np.abs(found[:600]).max(), np.abs(found[-600:]).max()) < 0.02
    json.dumps(result)

def test_what_a_text_says_again_is_found_each_time(tmp_path):
    "As a refrain does, or people who read the same sentences in turn; one that is not read again is missing."
    spoken = [*EN[:4], *EN[3::-1], *EN[:4]]
    result = corpus(tmp_path, reading(spoken)[0], ' '.join([*spoken, EN[9], spoken[0]]))
    assert said(result) == ' '.join(spoken) and result['missing'] == [EN[9], spoken[0]]

def test_a_long_sentence_is_cut_at_its_pauses(tmp_path):
    parts = [f'{t.rstrip(".").lower()},' for t in EN[:8] if t.endswith('.')]
    wav, places = reading(parts, ('m4',), (0.5,))
    result = corpus(tmp_path, wav, ' '.join(parts))
    assert len(result['clips']) > 1 and not result['missing'] and said(result) == ' '.join(parts)
    for clip in result['clips']:
        assert clip['text'] == ' '.join(t for t, (a, b) in zip(parts, places)
                                        if clip['start'] < a and b < clip['end'])

@pytest.mark.parametrize('wav, text, language, named', [
    (lambda: np.zeros(RATE * 3), 'Hello there.', 'en', 'silent'), (lambda: [], 'Hello.', 'en', 'no sound'),
    (lambda: np.zeros(9), 'Hello.', 'English!', '"English!"'), (lambda: np.zeros(9), None, 'en', 'book.txt')])
def test_what_cannot_be_cut(tmp_path, wav, text, language, named):
    with pytest.raises(UserError) as e: corpus(tmp_path, np.float32(wav()), text, language)
    assert named in str(e.value) and not [*tmp_path.glob('out*')]

def test_other_files_are_not_touched(tmp_path):
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'mine').touch()
    with pytest.raises(UserError, match='already holds something'): corpus(tmp_path, np.zeros(9), 'Hello.')
    assert [p.name for p in (tmp_path / 'out').iterdir()] == ['mine']
    for files in ({}, {'a.wav': b'x', 'b.wav': b'x', 'a.txt': b'Hi.', 'b.txt': b'Ho.'}):
        (tmp_path / 'book').mkdir(exist_ok=True)
        for name, data in files.items(): (tmp_path / 'book' / name).write_bytes(data)
        with pytest.raises(UserError, match='book'): run(tmp_path / 'book', tmp_path / 'new')
    with pytest.raises(UserError, match='gone.wav'): run(tmp_path / 'gone.wav', tmp_path / 'new')
    assert sorted(p.name for p in tmp_path.iterdir()) == ['book', 'book.txt', 'book.wav', 'out']

# --- several recordings -------------------------------------------------------------------------------------

def chapters(folder, texts):
    "Three readings of four sentences, with their texts."
    for number, rate, part in ((1, 22050, texts[:4]), (2, 44100, texts[4:8]), (10, 22050, texts[8:])):
        wav = resample(reading(part, ('f4',), (0.4,))[0], RATE, rate)
        write(folder / f'{number}.wav', wav, ' '.join(part), rate)

@pytest.mark.parametrize('beside', [True, False])
def test_chapters(tmp_path, beside):
    texts, book = EN[:12], tmp_path / 'book'
    chapters(book, texts)
    if beside:
        (book / '3.wav').write_bytes(b'no sound')
        (book / '3.txt').write_text('Nobody can hear this.')
        (book / '4.wav').write_bytes((book / '1.wav').read_bytes())
    (tmp_path / 'all.txt').write_text(' '.join(texts))
    result = run(book, tmp_path / 'out', text=None if beside else tmp_path / 'all.txt')
    assert said(result) == ' '.join(texts)
    for clip in result['clips']:
        assert soundfile.info(tmp_path / 'out' / clip['file']).duration == pytest.approx(
            clip['end'] - clip['start'], abs=1e-3)
    assert {c.speaker for c in read_corpus(tmp_path / 'out')[0]} == {'book'}
    reasons = {d['source']: d['reason'] for d in result['dropped'] if d['end'] == 0}
    assert reasons.keys() == ({'3.wav', '4.wav'} if beside else set())
    if beside:
        assert reasons['4.wav'] == 'no text next to the recording'
        assert 'not readable as audio' in reasons['3.wav']
    for i, name in enumerate(('1.wav', '2.wav', '10.wav')):   # each second of each recording once
        clips = [c for c in result['clips'] if c['source'] == name]
        assert said({'clips': clips}) == ' '.join(texts[4 * i:4 * i + 4])
        parts = sorted((p['start'], p['end']) for p in clips + result['dropped'] if p['source'] == name)
        assert parts[0][0] == 0 and all(a[1] == pytest.approx(b[0], abs=3e-3) for a, b in pairwise(parts))
        assert parts[-1][1] == pytest.approx(soundfile.info(tmp_path / 'book' / name).duration, abs=2e-3)

def test_finished_recordings_are_kept(tmp_path, monkeypatch):
    "A run that ends early is continued; a recording that fails is named; nothing of a user's is touched."
    texts, spoken = EN[:12], []
    chapters(tmp_path / 'book', texts)
    (tmp_path / 'book' / '2.txt').write_text(' '.join(_DEMO_SENTENCES['de'][:8]))
    monkeypatch.setattr(cut, '_ALONE', 1.)
    def speak_some(text, language):
        spoken.append(text)
        if len(spoken) == 13: raise KeyboardInterrupt   # the third recording
        return espeak.speak_words(text, language)
    monkeypatch.setattr(align, 'speak_words', speak_some)
    again = lambda: run(tmp_path / 'book', tmp_path / 'out')
    (tmp_path / 'out.unfinished').mkdir()
    (tmp_path / 'out.unfinished' / 'mine').touch()
    with pytest.raises(UserError, match='not ours'): again()
    (tmp_path / 'out.unfinished' / 'mine').rename(tmp_path / 'mine')
    with pytest.raises(KeyboardInterrupt): again()
    assert not (tmp_path / 'out').exists()
    result = again()
    assert len(spoken) == 13 + 8 + 4 and not {*spoken[:4]} & {*spoken[13:]}
    assert said(result) == ' '.join(texts[:4] + texts[8:])
    assert ['2.wav'] == [d['source'] for d in result['dropped'] if 'are spoken here' in d['reason']]
    assert sorted(p.name for p in tmp_path.iterdir()) == ['book', 'mine', 'out']

def test_recordings_in_several_formats_with_odd_names_and_of_a_telephone(tmp_path):
    "One of each name is read, and its text once; a text may be in capitals, or name its language."
    texts, name, wav = EN[:8], 'あ' * 80, resample(reading(EN[:8])[0], RATE, 8000)
    for ending in ('flac', 'wav'): write(tmp_path / 'all' / f'{name}.{ending}', wav, rate=8000)
    (tmp_path / 'all' / f'{name}.mp3').write_bytes(b'no sound')
    (tmp_path / 'all' / f'{name}.en.SRT').write_text(f'1\n00:00:01,000 --> 00:00:09,000\n{" ".join(texts)}\n')
    result = run(tmp_path / 'all', tmp_path / 'out')
    assert said(result) == ' '.join(texts) and not result['missing']
    assert {d['source'] for d in result['dropped'] if d['end'] == 0} == {f'{name}.flac', f'{name}.mp3'}
    assert len(read_corpus(tmp_path / 'out')[0]) == len(result['clips'])

def test_a_recording_that_breaks_off_is_left_out(tmp_path):
    "Its clips are named as dropped, those of others are written."
    for name, seconds in (('a', 1), ('b', 9)):
        soundfile.write(tmp_path / f'{name}.wav', np.zeros(seconds * RATE), RATE)
    clips = [{'path': tmp_path / f'{name}.wav', 'start': float(start), 'end': start + 1., 'text': 'hi',
              'speaker': 's', 'language': 'en', 'source': name} for name in 'ab' for start in (4, 0)]
    (tmp_path / 'out').mkdir()
    dropped = cut._write(tmp_path / 'out', clips)
    assert [d['source'] for d in dropped] == ['a'] and [c['file'] for c in clips] == [
        'wavs/b-00001.wav', 'wavs/b-00002.wav'] and len([*(tmp_path / 'out' / 'wavs').iterdir()]) == 2

def test_chinese_without_marks(tmp_path):
    lines = ['今天早上下了一场大雨', '我带着雨伞去上班', '下午天气慢慢变好了', '妹妹打来电话说她要来']
    wav = np.concatenate([p for line in lines for p in (speak(line, 'cmn')[0], np.zeros(15000, np.int16))])
    for name, text in (('lines', '\n'.join(lines)), ('bare', ''.join(lines))):
        result = run(write(tmp_path / 'a.wav', wav, text), tmp_path / name, 'zh-cn')
        assert sum(any(line in c['text'] for c in result['clips']) for line in lines) >= 3

def test_a_sentence_over_two_recordings_is_no_clip(tmp_path):
    texts, folder = EN[:6], tmp_path / 'book'
    wav, places = reading(texts, ('f4',), (0.4,))
    at = int(sum(places[2]) / 2 * RATE)   # within the third sentence
    write(folder / '1.wav', wav[:at])
    write(folder / '2.wav', wav[at:])
    (tmp_path / 'all.txt').write_text(' '.join(texts))
    spoken = [c['text'] for c in run(folder, tmp_path / 'out', text=tmp_path / 'all.txt')['clips']]
    assert len({*spoken}) == len(spoken) and not any(texts[2] in text for text in spoken)

def test_each_folder_of_recordings_is_a_speaker(tmp_path):
    spoken = {'Anna M': EN[:3], 'Ben/old': EN[3:6], 'Ben': EN[6:9]}
    for name, texts in spoken.items():
        wav, _ = reading(texts, ('f4',) if name == 'Anna M' else ('m3',))
        write(tmp_path / 'all' / name / '1.wav', wav, ' '.join(texts))
        (tmp_path / 'all' / name / '._1.wav').write_bytes(b'hidden')
    result = run(tmp_path / 'all', tmp_path / 'out')
    rows = read_corpus(tmp_path / 'out')[0]
    found = {speaker: ' '.join(r.text for r in rows if r.speaker == speaker) for speaker in ('Anna_M', 'Ben')}
    assert found == {'Anna_M': ' '.join(spoken['Anna M']), 'Ben': ' '.join(spoken['Ben'])}
    assert {s['source'] for s in result['clips'] + result['dropped']} == {'Anna M/1.wav', 'Ben/1.wav'}
    again = cut.recut(tmp_path / 'all', tmp_path / 'out' / 'cuts.csv', tmp_path / 'same', 'en')['clips']
    assert again == [{k: v for k, v in c.items() if k != 'score'} for c in result['clips']]
    assert [r.speaker for r in read_corpus(tmp_path / 'same')[0]] == [r.speaker for r in rows]
    soundfile.write(tmp_path / 'all' / 'own.wav', np.zeros(RATE), RATE)   # then only what lies there itself
    assert [p.name for p in cut._find_recordings(tmp_path / 'all')] == ['own.wav']

# --- recordings without a text ------------------------------------------------------------------------------

class Whisper:
    "In place of the package, whose models are too large for a test; it hears `said` by the name of a file."
    said, asked = {}, []
    def __init__(self, model):
        if model == 'none': raise RuntimeError("Unable to open file 'model.bin' in model 'none'")
    def transcribe(self, audio, language, vad_filter, condition_on_previous_text):
        self.asked.append((Path(audio).name, language, vad_filter, condition_on_previous_text))
        texts = self.said[Path(audio).name]
        if texts is None: raise ValueError(f"'{language}' is not a valid language code")
        parts = (SimpleNamespace(text=f' {t} ', end=float(i)) for i, t in enumerate(texts, 1))
        return parts, SimpleNamespace(duration=float(len(texts)), language=language or 'de')

@pytest.fixture
def hear(monkeypatch):
    monkeypatch.setitem(sys.modules, 'faster_whisper', SimpleNamespace(WhisperModel=Whisper))
    monkeypatch.setattr(Whisper, 'asked', [])
    return cut._load_whisper('small')

def test_what_has_no_text_is_transcribed_and_the_transcript_is_aligned(tmp_path, monkeypatch, hear):
    "What Whisper made up is spoken nowhere; a text beside a recording is believed more."
    texts, folder = EN, tmp_path / 'all'
    for name, part in {'1': texts[:5], '2': texts[5:10], '3': texts[10:12]}.items():
        write(folder / f'{name}.wav', reading(part)[0], ' '.join(part) if name == '2' else None)
    write(folder / '4.wav', np.zeros(2 * RATE))
    (folder / '5.wav').write_bytes(b'no sound')
    made_up = 'Thank you so much for watching this video.'
    monkeypatch.setattr(Whisper, 'said', {'1.wav': [*texts[:5], made_up], '3.wav': texts[10:12], '4.wav': []})
    result = run(folder, tmp_path / 'out', hear=hear)
    assert Whisper.asked == [(f'{name}.wav', 'en', True, False) for name in '134']
    assert hear('4.wav', 'zh-cn', None)[0] == '' and Whisper.asked[-1][1] == 'zh'
    assert result['missing'] == [made_up] and said(result) == ' '.join(texts[:12])
    assert '5.wav' in {d['source'] for d in result['dropped']}
    transcript = (tmp_path / 'out' / cut._TRANSCRIPT).read_text(encoding='utf-8')
    assert transcript.split('\n\n') == [
        ' '.join([*texts[:5], made_up]), ' '.join(texts[5:10]), ' '.join(texts[10:12]), '']
    with pytest.raises(UserError, match='1.wav.*`transcribe`, a Whisper model'):
        run(folder / '1.wav', tmp_path / 'no')
    monkeypatch.setattr(Whisper, 'said', {'1.wav': None})
    with pytest.raises(UserError, match='valid language code.*1.wav'):
        run(folder / '1.wav', tmp_path / 'no', hear=hear)
    with pytest.raises(UserError, match='^none: '): cut._load_whisper('none')
    assert not (tmp_path / 'no').exists()

# --- corrected by hand --------------------------------------------------------------------------------------

def test_a_corrected_table_is_cut_again(tmp_path):
    "Also of a recording with a | in its name; a name that is not UTF-8 is refused."
    wav, _ = reading(EN[:6])
    source = write(tmp_path / 'a | b.wav', wav, ' '.join(EN[:6]))
    first, table = run(source, tmp_path / 'out'), tmp_path / 'out' / 'cuts.csv'
    lines = table.read_text().splitlines()
    assert lines[0] == 'source|start|end|text' and len(lines) == len(first['clips']) + 1
    same = cut.recut(source, table, tmp_path / 'same', 'en')
    assert same['clips'] == [{k: v for k, v in c.items() if k != 'score'} for c in first['clips']]
    assert same['dropped'] == first['dropped'] and {d['reason'] for d in same['dropped']} == {'pause'}
    for name in ('b\udcf6.wav', 'book.wav'): (tmp_path / name).hardlink_to(source)
    with pytest.raises(UserError, match='is not UTF-8'):
        run(tmp_path / 'b\udcf6.wav', tmp_path / 'no', text=source.with_suffix('.txt'))
    (tmp_path / 'new.csv').write_text(f'{lines[0]}\nbook.wav|0.5|2|One | two.\nbook.wav| 1.5 |3|Three.\n')
    result = cut.recut(tmp_path / 'book.wav', tmp_path / 'new.csv', tmp_path / 'new', 'EN')
    rows = read_corpus(tmp_path / 'new')[0]
    assert [(r.text, r.speaker, r.language) for r in rows] == [
        ('One two.', 'book', 'en'), ('Three.', 'book', 'en')]
    cutout, rate = soundfile.read(rows[1].path)
    assert np.abs(cutout - wav[int(1.5 * rate):3 * rate]).max() < 1e-3
    assert [(d['start'], d['end'], d['reason']) for d in result['dropped']] == [
        (0, .5, 'not in cuts.csv'), (3, round(len(wav) / RATE, 3), 'not in cuts.csv')]

@pytest.mark.parametrize('line, named', [
    ('book.wav|1|2', 'line 2'), ('other.wav|1|2|a', 'other.wav'), ('../book.wav|1|2|a', '../book.wav'),
    ('book.wav|one|2|a', 'one'), ('book.wav|2|2|a', 'book.wav'), ('book.wav|-1|2|a', '-1'),
    ('book.wav|1|3.1|a', '3.1'), ('book.wav|1|nan|a', 'nan'), ('book.wav|1|2|–', 'line 2'),
    ('book.wav|1|2|sch\udcf6n', 'UTF-8'), ('', 'cuts.csv'), ('bad.wav|1|2|a', 'bad.wav')])
def test_a_line_that_cannot_be_cut_is_named(tmp_path, line, named):
    write(tmp_path / 'all/book.wav', np.zeros(3 * RATE))
    (tmp_path / 'all/bad.wav').write_bytes(b'no sound')
    table = f'source|start|end|text\n{line}\n'.encode(errors='surrogateescape')
    (tmp_path / 'cuts.csv').write_bytes(table)
    with pytest.raises(UserError) as e:
        cut.recut(tmp_path / 'all', tmp_path / 'cuts.csv', tmp_path / 'out', 'en')
    assert named in str(e.value) and not (tmp_path / 'out').exists()

# --- clips and their texts ----------------------------------------------------------------------------------

def with_faults(folder, kinds, language='en', noise=0., sentences=16):
    "Clips of two voices, some with a fault: its number -> its kind."
    texts, rng = _DEMO_SENTENCES[language][:sentences], np.random.default_rng(2)
    said = [(t, v) for v in ('f4', 'm3') for t in texts]
    wavs = [speak(t, language, v)[0] / 2.**15 for t, v in said]
    (folder / 'wavs').mkdir(parents=True)
    rows = []
    for i, (text, voice) in enumerate(said):
        wav, more, kind = wavs[i], wavs[(i + 1) % len(wavs)][1500:1500 + RATE // 3], kinds.get(i)
        if kind == 'half': wav = wav[:len(wav) // 2]
        if kind == 'end': wav = np.concatenate([wav, more])
        if kind == 'pause': wav = np.concatenate([wav, np.zeros(RATE // 4), more, np.zeros(RATE // 10)])
        if kind == 'start': wav = np.concatenate([more, wav])
        if kind == 'second': wav = wav[len(wav) // 2:]
        if kind == 'text': text = texts[(i + 3) % len(texts)]
        wav = wav + noise * rng.standard_normal(len(wav))
        soundfile.write(folder / 'wavs' / f'{i}.wav', wav, RATE)
        rows.append(f'{i}|{text}|{text}|{voice}|{language}\n')
    (folder / 'metadata.csv').write_text(''.join(rows), encoding='utf-8')
    return said

FAULTS = {2: 'half', 7: 'end', 11: 'text', 16: 'second', 21: 'pause', 30: 'start'}

@pytest.mark.parametrize('language, noise', [('en', 1e-3), ('fa', 0.)])
def test_faults_of_clips_are_found(tmp_path, language, noise):
    said = with_faults(tmp_path / 'clips', FAULTS, language, noise)
    result = cut.check_corpus(tmp_path / 'clips', tmp_path / 'out', 'en')
    name = lambda stretch: int(stretch['source'].removeprefix('wavs/').removesuffix('.wav'))
    found = {name(d): d['reason'].partition(':')[0] for d in result['dropped']}
    cuts = {name(c): (c['cut'].partition(':')[0], c) for c in result['clips'] if 'cut' in c}
    assert found == {2: 'its text continues after the sound', 7: 'sound after its text',
                     11: 'another text is spoken', 16: 'its text begins before the sound',
                     30: 'sound before its text'}
    assert [*cuts] == [21] and cuts[21][0] == 'sound after its text' and result['unclear'] == 0
    whole = soundfile.info(tmp_path / 'clips' / 'wavs' / '21.wav').duration
    assert whole - 0.7 < cuts[21][1]['end'] < whole - 0.4 and cuts[21][1]['start'] == 0
    rows = read_corpus(tmp_path / 'out')[0]
    assert rows[0].path.samefile(tmp_path / 'clips' / 'wavs' / '0.wav')   # takes no room again
    assert [(r.text, r.speaker, r.language) for r in rows] == [
        (t, v, language) for i, (t, v) in enumerate(said) if i not in found]
    lost = next(d['reason'] for d in result['dropped'] if name(d) == 2)
    assert lost.split('"')[1] and said[2][0].endswith(lost.split('"')[1])

def test_a_long_recording_is_opened_once_for_all_its_parts(tmp_path, monkeypatch):
    "In any order, with one that lies beyond its end; each has the frames that it has by itself."
    path, opened, faults = write(tmp_path / 'a.mp3', reading(EN[:6])[0]), [], {}
    parts = (4.5, 6.), (0., 1.), (900., 901.), (.5, 3.2), (2., 4.)
    clips = [Clip(f'{start}', 'hi', 's', 'en', path, start, end) for start, end in parts]
    monkeypatch.setattr(cut, 'open_audio', lambda *a: opened.append(a) or open_audio(*a))
    found = cut._measured(clips, faults)
    assert len(opened) == 1 and [*found] == clips[:2] + clips[3:] and 'no sound' in faults[clips[2]]
    for clip in found:
        with open_audio(path) as file: alone = _measure_part(file, clip.start, clip.end)
        assert np.array_equal(found[clip].mel, alone.mel) and found[clip].seconds == alone.seconds

def test_texts_of_other_clips_are_refused(tmp_path):
    with_faults(tmp_path / 'clips', dict.fromkeys(range(16), 'text'), sentences=8)
    with pytest.raises(UserError, match='fit no better than those of other clips'):
        cut.check_corpus(tmp_path / 'clips', tmp_path / 'out', 'en')
    assert not (tmp_path / 'out').exists()

def test_in_strong_noise_nothing_is_judged(tmp_path):
    with_faults(tmp_path / 'clips', {2: 'half'}, noise=0.02, sentences=8)
    (tmp_path / 'clips' / 'wavs' / '5.wav').write_bytes(b'no sound')
    with open(tmp_path / 'clips' / 'metadata.csv', 'a') as table: table.write('none|a|a|f4|en\n0|a|a|f4|en\n')
    result = cut.check_corpus(tmp_path / 'clips', tmp_path / 'out', 'en')
    assert result['unclear'] == len(result['clips']) == 15
    assert [d['source'] for d in result['dropped']] == ['wavs/5.wav', 'none', '0']
    assert 'unclear  15 clips are kept unjudged' in corpus_text(result)

def test_clips_that_cannot_be_compared(tmp_path):
    "One is silent, one of another language too short, one an hour; all texts but one are the same."
    clips = tmp_path / 'clips'
    (clips / 'wavs').mkdir(parents=True)
    says = [speak(EN[0], 'en', v)[0] for v in ('f4', 'm3', 'm4')]
    wavs = [*says, np.zeros(RATE), np.zeros(100), says[0][:9000], np.zeros(70 * RATE, np.int16)]
    texts = [_DEMO_SENTENCES['en'][0]] * 5 + ['Ja.'] + ['Long.']
    for i, wav in enumerate(wavs):
        soundfile.write(clips / 'wavs' / f'{i}.wav', wav.astype(np.int16), RATE)
    (clips / 'metadata.csv').write_text(''.join(
        f'{i}|{t}|{t}|a b|{"de" if t == "Ja." else "en"}\n' for i, t in enumerate(texts)))
    result = cut.check_corpus(clips, tmp_path / 'out', 'en')
    reasons = {d['source'][5]: d['reason'] for d in result['dropped']}
    assert reasons == {'3': 'nobody speaks in it', '4': 'nobody speaks in it',
                       '5': 'less than a second of speech to compare it with', '6': '70 s long; cut it first'}
    assert len(result['clips']) == result['unclear'] == 3
    assert '3 clips are kept unjudged' in corpus_text(result)
    json.dumps(result, allow_nan=False)

# --- clips --------------------------------------------------------------------------------------------------

def pieces(*seconds, pause=0.4, inner=(), closed=()):
    "Pieces of so many seconds; after those in `closed` is no pause."
    out, at = [], 1.
    for i, s in enumerate(seconds):
        left, right = (-1 if k in closed else k + 1 for k in (i - 1, i))
        out.append(_CutPiece(left, right, at, at + s, str(i), i in inner))
        at += s + pause
    return out

@pytest.mark.parametrize('chain, clips, rest', [
    (pieces(3, 3, 3), ['0', '12'], ''), (pieces(6, 6), ['0', '1'], ''), (pieces(1, 1, 9.7), ['01', '2'], ''),
    (pieces(2.5, 2.5, 2.5, 2.5), ['0', '12', '3'], ''), (pieces(*[1] * 8), ['01', '234567'], ''),
    (pieces(7, 2.2), ['0', '1'], ''), (pieces(7, 1, 2.2), ['0', '12'], ''),
    (pieces(12), [], '0'), (pieces(1.), [], '0'), (pieces(5, 12, 5), ['0', '2'], '1'),
    (pieces(5, 5, pause=2.), ['0', '1'], ''), (pieces(4, 4, 4, 4, inner=(0, 2)), ['01', '23'], ''),
    (pieces(6, 6, closed=(0,)), [], '01'), (pieces(3, 3, closed=(0,)), ['01'], '')])
def test_clips_are_chosen(chain, clips, rest):
    chosen, left = _choose_clips(chain)
    assert [''.join(p.text for p in c) for c in chosen] == clips and ''.join(p.text for p in left) == rest

def test_clips_of_a_recording_of_short_sentences_are_short():
    "Of one sentence each; a sentence that is cut at its pauses is as long as before."
    short, longer = pieces(*[2.79] * 5, *[9] * 4), pieces(*[2.79] * 4, *[2.81] * 5)
    inner = pieces(*[1.5] * 8, inner=(0, 2, 4, 6))
    lengths = [cut._shortest_clip(chain) for chain in (short, longer, inner, inner[:1])]
    assert lengths == [cut._BRIEF, cut._SHORTEST, cut._SHORTEST, cut._SHORTEST] == [1, 2, 2, 2]
    assert [len(clip) for clip in _choose_clips(pieces(*[1.5] * 5), 1.)[0]] == [1] * 5
    assert [len(clip) for clip in _choose_clips(pieces(1.5, .5, .5, 1.5), 1.)[0]] == [1, 2, 1]
    assert [len(clip) for clip in _choose_clips(pieces(*[1.5] * 9))[0]] == [2, 5, 2]

def test_every_second_has_a_reason():
    speech = Speech(None, np.arange(7, 9, 0.04), None, None, None)
    rest = [_CutPiece(left, 2, start, end, '', False)
            for left, start, end in ((1, 4., 4.5), (-1, 9., 12.), (1, 12., 30.))]
    dropped = account([{'start': 0.5, 'end': 3.5}], rest, speech, 31.)
    assert [(d['start'], d['end'], d['reason'].split(':')[0]) for d in dropped] == [
        (0, .5, 'pause'), (3.5, 4, 'pause'), (4, 4.5, 'shorter than 2 s, and nothing next to it to join'),
        (4.5, 9, 'no sentence of the text is spoken here'), (9, 12, 'no pause next to it to cut in'),
        (12, 30, 'longer than 11 s'), (30, 31, 'pause')]

# --- recorded speech ----------------------------------------------------------------------------------------

@pytest.mark.slow
def test_recorded_speech(speech, tmp_path):
    "Clips in another order, two without text and two texts without sound, with pauses and without."
    for row in cut_all(read_corpus(speech)[0], 1, lambda *now: None):
        assert row['found'] == row['sentences'] and not row['aligned'] and not row['lost']
        # without pauses some stay together, and are longer than a clip
        assert row['whole'] >= (0.55 if row['name'] == 'no pauses' else 0.8) * row['sentences']
        assert row['cut_ms'] < 40 and row['cut_95_ms'] < 150
