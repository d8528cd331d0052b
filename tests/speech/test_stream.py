"Streams and continuous batches: pieces are the whole, rows do not meet, texts come and go."
import copy
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import soundfile
import tensorflow as tf

from xtts_nb.config import DecoderConfig, UserError, XTTSConfig
from xtts_nb.data.audio import griffin_lim, synthetic_voice, _wav_header
from xtts_nb.models.hifigan import HiFiGAN, stretch
from xtts_nb.bench import trace_count
from xtts_nb.speech import stream as streaming
from xtts_nb.speech.generate import never_stop, Speaker
from xtts_nb.speech.guard import _Rate
from xtts_nb.speech.stream import (
    Engine, EngineClosed, _receptive_frames, _SoundStream, speak_file, SpeechRows)
from xtts_nb.speech.long import speak_whole

close = np.testing.assert_allclose
TEXTS = ['aa bb cc', 'hh', 'dd ee ff gg', 'a', 'bb hh', 'cc cc', 'gg a']

@pytest.fixture(scope='module')
def speaker(singer):
    "The compiled speaker of the session with its own sampling, and the loop of one row that all streams use."
    made = copy.copy(singer)
    made.sampling = singer.sampling._replace(temperature=1., top_p=1., repetition_penalty=2.)
    made.rates, made.rows = {'en': _Rate(most=99.)}, SpeechRows(made)   # random speech never runs away
    return made

@pytest.fixture(scope='module')
def voices(speaker): return [speaker.listen(synthetic_voice(1., pitch)) for pitch in (100., 200.)]

@pytest.fixture(scope='module')
def alone(speaker, voices):
    "Each text by the loop without streaming."
    return [speaker(text, 'en', voices[i % 2], seed=i) for i, text in enumerate(TEXTS)]

def seeded(speaker, seed): return speaker.sampling._replace(seed=seed)

@pytest.mark.parametrize('cfg', [DecoderConfig(), XTTSConfig.tiny().model.decoder], ids=['released', 'tiny'])
def test_the_receptive_field(cfg):
    "Beyond it nothing changes, and not far within it something does."
    config = XTTSConfig.tiny().replace(model={'decoder': cfg.model_dump() | {'channels': 16}})
    keras.utils.set_random_seed(0)
    decoder, reach = HiFiGAN(config), _receptive_frames(cfg)
    frames = np.random.default_rng(0).normal(size=(1, 81, config.model.gpt.hidden_dim)).astype(np.float32)
    changed = frames.copy()
    changed[0, 40] += 100.
    vector = tf.zeros((1, config.model.speaker.width))
    with_, without = (decoder.sound(x, vector)[0].numpy() for x in (changed, frames))
    hop = len(with_) // 81
    moved = np.flatnonzero(np.abs(with_ - without) > 0) / hop
    assert 40 - reach <= moved.min() and moved.max() < 41 + reach
    assert moved.min() < 40 - reach + 3 and moved.max() > 41 + reach - 3

@pytest.mark.parametrize('sizes, speed', [([30], 1.3), ([1] * 30, 1.), ([8, 16, 6], 1.3), ([29, 1], 1.)],
                         ids=lambda x: f'{len(x)} parts' if isinstance(x, list) else str(x))
def test_the_pieces_are_the_whole(speaker, voices, small, sizes, speed):
    states = np.random.default_rng(1).normal(size=(30, small.model.gpt.hidden_dim)).astype(np.float32)
    stream, parts, place = _SoundStream(speaker, voices[0], speed), [], 0
    for n in sizes:
        place += n
        parts.append(stream.feed(np.zeros(n), states[place - n:place], place == 30))
        assert len(stream.states) <= max(n + 16, 30 * (len(sizes) < 5))   # the rest is forgotten
    slower = states[None] if speed == 1 else stretch(states[None], 1 / speed)
    whole = speaker.xtts.hifigan[0](slower, voices[0].vector[None])[0].numpy()
    close(np.concatenate(parts)[:-240], whole[:-240], atol=1e-4)
    assert np.abs(parts[-1][-24:]).max() < 0.05 * np.abs(whole).max()   # no click where it was cut off

def test_a_file_is_written_as_it_is_spoken_and_continued(speaker, voices, tmp_path):
    "A killed call leaves the older file of that name; the next call speaks the rest only."
    text, path, told, spoken = 'aa bb cc.\n\nhh.\n\ndd ee ff gg.', tmp_path / 'book.wav', [], []
    def speak(kill=None, seed=3):
        def progress(done, total):
            spoken.append(total)
            if done == kill: raise KeyboardInterrupt
        return speak_file(speaker, text, 'en', voices[0], path, seed, 1, progress, told.append)
    path.write_bytes(b'mine')
    with pytest.raises(UserError, match='book.wav: is there already'): speak()
    path.write_bytes(older := _wav_header(24000, 2, wide=True) + b'xx')
    for kill, left in ((1, 1), (2, 3)):
        with pytest.raises(KeyboardInterrupt): speak(kill)
        assert path.read_bytes() == older and len([*tmp_path.iterdir()]) == left
    part, = tmp_path.glob('*.part')
    with open(part, 'ab') as file: file.write(b'half a piece')
    spoken.clear()
    seconds, report = speak()
    assert spoken == [2, 2] and 'same command' in told[0] and len(told) == 2
    whole, reports = speak_whole(speaker, text, 'en', voices[0], seed=3, rows=1)
    wav, rate = soundfile.read(path)
    close(wav, whole, atol=1e-3)
    assert seconds == len(wav) / rate and report == reports and [*tmp_path.iterdir()] == [path]
    with pytest.raises(KeyboardInterrupt): speak(2, seed=4)
    assert 2 < len([*tmp_path.iterdir()]) and soundfile.info(path).frames == len(wav)
    next(tmp_path.glob('*.pieces')).write_text('notes of mine')
    with pytest.raises(UserError, match='not written by'): speak(seed=4)

def test_the_ring_grows_before_it_is_full_and_shrinks_when_no_row_has_a_text(speaker, voices, alone):
    "One row begins with more places than the other has left; nobody loses a position."
    rows = SpeechRows(speaker, 2, chunk=5, widths=(16,), rings=(24,))
    turns, sounds = [], {i: [] for i in (0, 3, 2)}
    most = 4 + 40 + 3 + speaker.max_codes
    assert rows.rings == (24, most) and SpeechRows(speaker, rings=(31, 24, 999)).rings == (24, 31, most)
    longest = speaker.xtts.config.model.gpt.max_text_tokens
    assert SpeechRows(speaker, widths=(longest, 16, 8)).widths == (8, 16, longest)   # each once
    for together in ((0, 3), (2,)):
        running, lengths = {}, []
        turns.append(lengths)
        for i in together:
            running[rows.admit(speaker._ids(TEXTS[i], 'en'), voices[i % 2], seeded(speaker, i))] = i
            lengths.append(rows.state['cache'][0][0].shape[2])
            for row, (make, _) in rows.advance(2 if i == 0 else None).items():
                sounds[running[row]].append(make())
        while any(rows.streams):
            for row, (make, _) in rows.advance().items(): sounds[running[row]].append(make())
            lengths.append(rows.state['cache'][0][0].shape[2])
    for i, parts in sounds.items(): close(np.concatenate(parts), alone[i], atol=1e-3)
    both, later = turns
    assert both[0] == later[0] == 24 and max(both) == most and both == sorted(both)

@pytest.fixture
def endless(speaker):
    "The speaker, while its model never stops."
    bias = speaker.gpt.code_head.bias
    before = bias.numpy()
    never_stop(speaker.gpt)
    yield speaker
    bias.assign(before)

def test_a_text_that_never_ends_is_cut(endless, voices, monkeypatch):
    "At the length of the speaker, as in a call; within a chunk, and where a chunk ends; earlier by its rate."
    whole = endless('aa bb', 'en', voices[0])
    for first in (2, endless.max_codes - endless.rows.chunk):
        pieces = list(endless.stream('aa bb', 'en', voices[0], first=first))
        close(np.concatenate(pieces), whole, atol=1e-3)
        assert int(endless.rows.state['index'][0]) == endless.max_codes
    monkeypatch.setattr(endless, 'rates', {'en': _Rate(most=2.)})
    most = 2 * len(endless._ids('aa bb', 'en')) + 12
    engine = lone(endless)
    request = engine.submit('aa bb', 'en', voices[0])
    assert list(request) and request.codes == most < endless.max_codes
    engine.close()

def test_two_streams_at_once_are_refused(speaker, voices, alone):
    first = speaker.stream(TEXTS[0], 'en', voices[0], first=2)
    next(first)
    second = list(speaker.stream(TEXTS[2], 'en', voices[0], seed=2))
    with pytest.raises(UserError, match='Another stream of this speaker began'): list(first)
    close(np.concatenate(second), alone[2], atol=1e-3)

@pytest.fixture(scope='module')
def engine(speaker, voices):
    engine = Engine(speaker, rows=2, chunk=5, widths=(5,))
    engine.warm_up()
    counts = lambda rows: [trace_count(run) for run in (rows._prefix, rows._admit, rows._advance)]
    assert counts(engine.rows) == [2, 2, 1]   # 5 and 40 tokens, one ring
    yield engine
    assert counts(engine.rows) == [2, 2, 1]
    engine.close()

def idle(engine):
    end = time.monotonic() + 30
    while engine.busy or engine.waiting:
        assert time.monotonic() < end
        time.sleep(0.01)

def test_many_callers_get_their_own_sound(engine, voices, alone):
    sounds = {}

    def call(turn, i):
        request = engine.submit(TEXTS[i], 'en', voices[i % 2], seeded(engine.speaker, i))
        sounds[turn, i] = np.concatenate(list(request))
    threads = [threading.Thread(target=call, args=(turn, i)) for turn in range(2) for i in range(7)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert len(sounds) == 14
    for (_, i), sound in sounds.items(): close(sound, alone[i], atol=1e-3)
    assert trace_count(engine.rows._advance) == 1
    idle(engine)

def test_a_cancelled_text_frees_its_place(engine, voices, alone):
    given_up = [engine.submit(TEXTS[0], 'en', voices[0]) for _ in range(6)]
    for u in given_up: u.cancel()
    kept = engine.submit(TEXTS[2], 'en', voices[0], seeded(engine.speaker, 2))
    close(np.concatenate(list(kept)), alone[2], atol=1e-3)
    idle(engine)
    assert all(len(list(u)) < 9 for u in given_up)   # they end
    assert kept.codes > 0 == given_up[-1].codes      # it never had a row

def test_sound_that_fails_ends_one_text_only(engine, voices, alone, monkeypatch):
    feed = _SoundStream.feed

    def fail(stream, *given):
        if stream.speed == 2: raise RuntimeError('out of memory')
        return feed(stream, *given)
    monkeypatch.setattr(_SoundStream, 'feed', fail)
    fails, works = (engine.submit(TEXTS[2], 'en', voices[0], seeded(engine.speaker, 2), s) for s in (2., 1.))
    with pytest.raises(RuntimeError, match='out of memory'): list(fails)
    close(np.concatenate(list(works)), alone[2], atol=1e-3)

def test_a_warm_engine_traces_no_sound_again(xtts, speaker, voices):
    "Whatever the lengths and speeds of the texts."
    for model in (xtts, speaker.xtts):
        fresh = Speaker(model, max_seconds=1.)
        Engine.warm_up(SimpleNamespace(speaker=fresh, rows=SimpleNamespace(compile=len)), voices[0])
        functions = fresh.frames_sound, fresh._decode, griffin_lim
        traces = [trace_count(f) for f in functions]
        for n, speed in ((1, 1.), (5, 1.7), (30, 1.)):
            states = np.zeros((n, 64), np.float32)
            _SoundStream(fresh, voices[0], speed).feed(np.zeros(n, np.int32), states, True)
        assert [trace_count(f) for f in functions] == traces and sum(traces[:2]) == 2

def lone(speaker) -> Engine:
    "An engine with the row of the streams, which is compiled already."
    engine = Engine(speaker, rows=1)
    speaker.rows.clear(1)
    engine.rows = speaker.rows
    return engine

def test_a_call_that_hangs_is_overdue_and_closes_all_the_same(speaker, voices, monkeypatch):
    go, advance = threading.Event(), SpeechRows.advance
    monkeypatch.setattr(SpeechRows, 'advance', lambda rows: go.wait(30) and advance(rows))
    monkeypatch.setitem(streaming._CALL_SECONDS, 'round', 0.05)
    engine = lone(speaker)
    assert not engine.overdue and not engine.calls
    spoken, waits = (engine.submit('aa', 'en', voices[0]) for _ in range(2))
    until = time.monotonic() + 10
    while not engine.overdue: assert time.monotonic() < until
    engine.close()
    assert engine.calls == 1
    for text in (spoken, waits):
        with pytest.raises(EngineClosed): list(text)
    go.set()
    engine._thread.join(10)
    assert not engine.calls

def test_the_sound_that_is_due_first_is_made_first(speaker, monkeypatch):
    monkeypatch.setattr(streaming, 'cores', lambda: 1)
    engine, made = lone(speaker), []
    def make(due):
        with engine._making(due): made.append(due)
    threads = [threading.Thread(target=make, args=[due]) for due in (3., 1., 2., 1.)]
    with engine._making(9.):
        for thread in threads: thread.start()
        while len(engine._makers) < 4: time.sleep(0.002)
        engine._decode_until(2.)
    for thread in threads[1:]: thread.join(10)
    assert made == [1., 1., 2.]
    engine._decode_until(np.inf)
    threads[0].join(10)
    assert made[-1] == 3.
    engine.close()

def test_later_sound_is_due_when_its_listener_runs_dry(endless, voices):
    "And the first sound of a text takes a short chunk."
    engine, dues = lone(endless), []
    request = engine.submit('aa bb', 'en', voices[0])
    request._making = lambda due: dues.append(due) or nullcontext()
    sounds = list(request)
    seconds = sum(map(len, sounds[:-1])) / engine.sample_rate
    assert len(sounds) > 1 and dues[0] == request.due and dues[-1] > dues[0] + 0.99 * seconds
    short, chunk = map(len, request.stream.codes[:2])
    assert short == engine.rows.first < engine.rows.chunk == chunk
    engine.close()

def test_an_engine_that_failed_is_restarted(speaker, voices, alone, monkeypatch):
    "Whatever was raised; with free rows, and nothing is compiled again."
    engine = lone(speaker)
    with pytest.raises(UserError, match='has not failed'): engine.restart()
    advance = SpeechRows.advance
    def fail(rows):
        advance(rows)
        raise SystemExit('out of memory')   # not even an `Exception`
    with monkeypatch.context() as patched:
        patched.setattr(SpeechRows, 'advance', fail)
        texts = [engine.submit('aa', 'en', voices[0]) for _ in range(2)]
        for text in texts:
            with pytest.raises(SystemExit, match='out of memory'): list(text)
    with pytest.raises(EngineClosed): engine.submit('aa', 'en', voices[0])
    assert isinstance(engine.failed, SystemExit) and not engine.busy and not engine.waiting
    engine.restart()
    assert engine.failed is None and engine.rows.free == [0]
    request = engine.submit(TEXTS[2], 'en', voices[0], seeded(speaker, 2))
    close(np.concatenate(list(request)), alone[2], atol=1e-3)
    assert trace_count(engine.rows._prefix) == 1
    engine.close()
    with pytest.raises(UserError, match='has not failed'): engine.restart()

@pytest.mark.parametrize('retries, attempts', [(0, 1), (2, 3)])
def test_a_guarded_text_is_inspected_first(engine, speaker, voices, monkeypatch, retries, attempts):
    "Spoken again while it has faults; the best attempt sounds, and is trimmed."
    found = []
    def inspect(codes, tokens, text, limit, rate):
        found.append(codes)
        if len(found) < attempts: return len(codes), [{'found': 'no end'}] * (3 - len(found))
        return len(codes) - 4, [{'found': 'trailing repetition', 'done': 'trimmed'}]
    monkeypatch.setattr(streaming, '_inspect_codes', inspect)
    sampling = seeded(speaker, 2)._replace(temperature=0.)
    request = engine.submit(TEXTS[2], 'en', voices[0], sampling, retries=retries)
    sounds = list(request)
    assert len(found) == attempts and len(sounds) == 1
    again = [{'found': 'no end', 'done': 'spoken again'}] * 2 * (attempts > 1)
    assert request.report == [*again, {'found': 'trailing repetition', 'done': 'trimmed'}]
    sampling = sampling._replace(seed=2 + 7919 * (attempts - 1), temperature=0.75 if attempts > 1 else 0.)
    codes, n, states = speaker._codes([TEXTS[2]], ['en'], [voices[0]], sampling)
    assert found[-1].tolist() == codes[0, :n[0]].numpy().tolist()
    whole = _SoundStream(speaker, voices[0]).feed(found[-1], states[0, :n[0] - 3].numpy(), True)
    close(sounds[0], whole, atol=1e-3)

def test_settings_of_many_texts_share_one_loop(engine, speaker, voices):
    "Greedy and sampled beside each other, each as alone."
    settings = (0., 50), (1.5, 50), (1.5, 3)
    sampling = [seeded(speaker, 4)._replace(temperature=t, top_k=k) for t, k in settings]
    requests = [engine.submit(TEXTS[2], 'en', voices[0], each) for each in sampling]
    made = [np.concatenate(list(request)) for request in requests]
    for wav, each in zip(made, sampling):
        _, n, states = speaker._codes([TEXTS[2]], ['en'], [voices[0]], each)
        close(wav, speaker._sound(states[:, :int(n[0]) + 1], voices[0].vector[None])[0], atol=1e-3)
    assert trace_count(engine.rows._advance) == 1
    assert len({wav.tobytes() for wav in made}) == 3
