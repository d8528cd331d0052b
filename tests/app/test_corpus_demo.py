"The demo corpus: the same bytes everywhere, whole or not at all, and pairs to hold out."
import errno
import json
import signal
import sys
import threading
import wave
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from process import python
from xtts_nb.app import demo as corpus
from xtts_nb.config import UserError
from xtts_nb.app.demo import (
    DEMO_SENTENCES, VOICES, Utterance, SynthVoice, corpus_digest, held_out_pairs, make_corpus, plan_corpus,
    short_path, speak)


def samples_of(path):
    with wave.open(str(path)) as f:
        assert (f.getnchannels(), f.getsampwidth(), f.getframerate()) == (1, 2, 22050)
        return np.frombuffer(f.readframes(f.getnframes()), '<i2')


@pytest.fixture(scope='module')
def small(tmp_path_factory):
    out = tmp_path_factory.mktemp('corpus') / 'small'
    return out, make_corpus(out, limit=2)


def test_two_fresh_processes_write_the_same_bytes(small, tmp_path):
    out, _ = small
    for name, before in [('a', ''), ('b', 'speak("Something else first.", "de", SynthVoice("f4"));')]:
        code = f'from xtts_nb.app.demo import *; {before} make_corpus({str(tmp_path / name)!r}, limit=2)'
        assert python(code).code == 0
        for file in sorted(out.rglob('*.*')):
            assert (tmp_path / name / file.relative_to(out)).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize('variant', ['', 'f4', 'f2', 'whisper'])
def test_a_clip_does_not_depend_on_the_clips_before(variant):
    first = speak('The old dog sleeps.', 'en', SynthVoice(variant))[0]
    speak('Something else.', 'de', SynthVoice('m2', 80))
    assert np.array_equal(first, speak('The old dog sleeps.', 'en', SynthVoice(variant))[0])


def test_noise_is_not_seeded_by_the_clock():
    code = ('import hashlib, time; time.sleep(1.1); from xtts_nb.app.demo import *; '
            'print(hashlib.sha256(speak("Hush.", "en", SynthVoice("whisper"))[0].tobytes()).hexdigest())')
    hashes = [python(code).out for _ in range(2)]
    assert len(hashes[0]) == 65 and hashes[0] == hashes[1]


def test_every_voice_speaks_every_sentence(small):
    out, clips = small
    rows = [line.split('|') for line in (out / 'metadata.csv').read_text(encoding='utf-8').splitlines()]
    assert [Utterance(*row) for row in rows] == clips and len(clips) == 3 * 2 * len(VOICES)
    everything = {(v, l, t) for v in VOICES for l in DEMO_SENTENCES for t in DEMO_SENTENCES[l][:2]}
    assert {(c.speaker, c.language, c.text) for c in clips} == everything
    assert sorted(p.stem for p in (out / 'wavs').iterdir()) == sorted(c.id for c in clips)


def test_clips_last_a_second_to_six_and_differ_between_voices(small):
    out, clips = small
    audio = {c: samples_of(out / 'wavs' / f'{c.id}.wav') for c in clips}
    assert all(1 <= len(x) / 22050 <= 6 for x in audio.values())
    assert all(np.abs(x.astype(int)).max() > 3000 for x in audio.values())
    assert len({x.tobytes() for x in audio.values()}) == len(clips)


def test_texts_are_distinct_and_fit_one_column():
    for texts in DEMO_SENTENCES.values():
        assert len(set(texts)) == len(texts) == 24
        assert not any(c in text for text in texts for c in '|\n"')


def test_the_same_corpus_is_reused(small):
    out, clips = small
    before = {p: p.stat().st_mtime_ns for p in out.rglob('*')}
    assert make_corpus(out, limit=2, progress=lambda *_: pytest.fail('the clips are made again')) == clips
    assert {p: p.stat().st_mtime_ns for p in out.rglob('*')} == before


def test_a_corpus_of_other_settings_is_refused(small):
    out, _ = small
    with pytest.raises(UserError, match='other settings.*remove it'): make_corpus(out, limit=1)
    with pytest.raises(UserError, match='other settings'):
        make_corpus(out, limit=2, voices=VOICES | {'m3': SynthVoice('m3')})


def test_a_changed_corpus_is_refused(tmp_path):
    out = tmp_path / 'c'
    clips = make_corpus(out, limit=1, voices={'f1': VOICES['f1']})
    (out / 'wavs' / f'{clips[0].id}.wav').unlink()
    with pytest.raises(UserError, match='changed after'):
        make_corpus(out, limit=1, voices={'f1': VOICES['f1']})


@pytest.mark.parametrize('kind', ['folder', 'file'])
def test_a_folder_that_is_no_corpus_is_not_changed(tmp_path, kind):
    (tmp_path / 'thesis.txt').write_text('mine')
    out = tmp_path if kind == 'folder' else tmp_path / 'thesis.txt'
    with pytest.raises(UserError, match='no demo corpus'): make_corpus(out, limit=1)
    assert [p.name for p in tmp_path.iterdir()] == ['thesis.txt']
    assert (tmp_path / 'thesis.txt').read_text() == 'mine'


def test_an_interrupted_corpus_leaves_nothing(tmp_path):
    def stop(done, total):
        assert total == 36
        if done == 3: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): make_corpus(tmp_path / 'c', limit=2, progress=stop)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_named_and_leaves_nothing(monkeypatch, tmp_path):
    def full(*_): raise OSError(errno.ENOSPC, 'No space left on device')
    monkeypatch.setattr(Path, 'write_bytes', full)
    with pytest.raises(UserError, match='c: the disk is full'): make_corpus(tmp_path / 'c', limit=1)
    assert not any(tmp_path.iterdir())

def test_progress_counts_every_clip(tmp_path):
    seen = []
    make_corpus(tmp_path / 'c', {'en': ['Hello there.', 'Good night.']}, {'a': SynthVoice()},
                progress=lambda *s: seen.append(s))
    assert seen == [(1, 2), (2, 2)]


@pytest.mark.parametrize('there, found', [
    (None, False), ({}, False), ({'thesis.txt': 'mine'}, 'something that is no demo corpus'),
    ({'corpus.json': '{}'}, 'something that is no demo corpus'),
    ({'corpus.json': '{"settings": 2}'}, 'a corpus of other settings'),
    ({'corpus.json': '{"settings": 1, "digest": "x"}'}, 'a corpus that was changed after it was made'),
    ({'corpus.json': '{"settings": 1, "digest": "right"}'}, True)])
def test_a_folder_that_already_holds_something(tmp_path, monkeypatch, there, found):
    monkeypatch.setattr(corpus, 'corpus_digest', lambda out: 'right')
    out = tmp_path / 'c'
    if there is not None: out.mkdir()
    for name, text in (there or {}).items(): (out / name).write_text(text)
    if isinstance(found, bool): assert corpus._already_made(out, 1) is found
    else:
        with pytest.raises(UserError, match=f'c holds {found}; remove it'): corpus._already_made(out, 1)

@pytest.fixture
def ctrl_c():
    "Heard, as in a terminal; a process in the background ignores it."
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

def test_ctrl_c_waits_until_the_library_is_unloaded(ctrl_c):
    reached = []
    with pytest.raises(KeyboardInterrupt), corpus._defer_interrupts():
        signal.raise_signal(signal.SIGINT)
        reached.append(1)
    with corpus._defer_interrupts(): reached.append(2)
    def elsewhere():
        with corpus._defer_interrupts(): reached.append(3)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert reached == [1, 2, 3] and signal.getsignal(signal.SIGINT) is signal.default_int_handler

def test_a_long_path_becomes_a_link(tmp_path):
    deep = tmp_path / ('x' * 80)
    deep.mkdir()
    name = str(deep)
    size = len(name)
    assert short_path(name, size) == name
    link = short_path(name, size - 1)
    assert link != name and Path(link).is_symlink() and Path(link).resolve() == deep.resolve()
    assert short_path('ä' * 70) == 'ä' * 70   # 140 bytes

def test_a_voice_has_its_rate():
    seconds = lambda voice: len(speak('The old dog sleeps all day.', 'en', voice)[0]) / 22050
    assert 1.2 < seconds(SynthVoice()) < 2.4
    assert 1.5 < seconds(SynthVoice(rate=120)) / seconds(SynthVoice(rate=240)) < 2.2

def test_a_missing_wheel_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, 'espeakng_loader', None)
    corpus.espeak_files.cache_clear()
    with pytest.raises(UserError, match=r'pip install "xtts_nb\[demo\]"'): speak('Hello.', 'en')


@pytest.mark.parametrize('language, voice, name',
                         [('xx', SynthVoice(), 'xx'), ('en', SynthVoice('nobody'), 'en[+]nobody')])
def test_an_unknown_voice_is_named(language, voice, name):
    with pytest.raises(UserError, match=f'no voice "{name}"'): speak('Hello.', language, voice)


def test_no_sentences_is_an_error(tmp_path):
    for bad in ({'limit': 0}, {'voices': {}}):
        with pytest.raises(UserError, match='at least one'): make_corpus(tmp_path / 'c', **bad)
    assert not list(tmp_path.iterdir())


def test_a_library_held_by_others_is_noticed(tmp_path):
    code = ('import ctypes; from xtts_nb.app.demo import *; held = ctypes.CDLL(espeak_files()[0])\n'
            f'make_corpus({str(tmp_path / "c")!r}, limit=1)')
    done = python(code)
    assert 'a process of its own' in done.err and not list(tmp_path.iterdir())


def test_data_behind_a_long_path_is_found(tmp_path, monkeypatch):
    library, data = corpus.espeak_files()
    deep = tmp_path / ('x' * 100) / ('y' * 100)
    deep.mkdir(parents=True)
    (deep / 'espeak-ng-data').symlink_to(data)
    wanted = speak('Hello.', 'en')[0]
    monkeypatch.setattr(corpus, 'espeak_files', lambda: (library, str(deep / 'espeak-ng-data')))
    with pytest.raises(UserError, match='does not find its data'): speak('Hello.', 'en')
    monkeypatch.setattr(corpus, 'espeak_files', lambda: (library, short_path(str(deep / 'espeak-ng-data'))))
    assert np.array_equal(speak('Hello.', 'en')[0], wanted)


def test_the_digest_changes_with_bytes_and_names(tmp_path):
    out = tmp_path / 'c'
    clips = make_corpus(out, limit=1, voices={'f1': VOICES['f1']})
    before, first = corpus_digest(out), out / 'wavs' / f'{clips[0].id}.wav'
    assert json.loads((out / 'corpus.json').read_text(encoding='utf-8'))['digest'] == before
    first.rename(out / 'wavs' / 'other.wav')
    renamed = corpus_digest(out)
    (out / 'wavs' / 'other.wav').write_bytes(b'')
    assert len({before, renamed, corpus_digest(out)}) == 3


@pytest.mark.parametrize('seed', range(5))
def test_held_out_pairs_are_spread_and_leave_everything_in_training(seed):
    clips = plan_corpus()
    held = held_out_pairs(clips, 16, seed)
    trained = [c for c in clips if c not in held]
    assert len(set(held)) == 16 and len({c.text for c in held}) == 16
    assert {(c.text, c.language) for c in trained} == {(c.text, c.language) for c in clips}
    assert {(c.speaker, c.language) for c in trained} == {(c.speaker, c.language) for c in clips}
    for counts in (Counter(c.language for c in held), Counter(c.speaker for c in held)):
        assert max(counts.values()) - min(counts.values()) <= 1
    assert len({c.speaker for c in held}) == len(VOICES)


def test_held_out_pairs_follow_the_seed():
    clips = plan_corpus()
    assert held_out_pairs(clips, 16, 1) == held_out_pairs(clips, 16, 1) != held_out_pairs(clips, 16, 2)


def test_too_few_clips_to_hold_out():
    clips = plan_corpus({'en': ['One.', 'Two.']}, {'a': SynthVoice(), 'b': SynthVoice('m2')})
    assert len(held_out_pairs(clips, 2)) == 2
    with pytest.raises(UserError, match='Only 2 of 4'): held_out_pairs(clips, 3)
