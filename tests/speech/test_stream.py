"Streams and continuous batches: pieces are the whole, rows do not meet, texts come and go."
import copy
import io
import struct
import threading
import time
from itertools import islice
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import soundfile
import tensorflow as tf

from xtts_nb.config import cores, DecoderConfig, UserError, XTTSConfig
from xtts_nb.data.audio import griffin_lim, pcm16, synthetic_voice, wav_header
from xtts_nb.models.gpt import GPT
from xtts_nb.models.hifigan import HiFiGAN, SpeakerEncoder, stretch
from xtts_nb.bench import trace_count
from xtts_nb.speech import stream as streaming
from xtts_nb.speech.generate import never_stop, piece_seeds, Speaker
from xtts_nb.speech.guard import Rate
from xtts_nb.speech.stream import (
    Engine, EngineClosed, receptive_frames, SoundStream, speak_file, SpeechRows, stream_text, stretched_count,
    stretched_frames, write_stream)
from xtts_nb.speech.long import speak_whole, TextPiece

close = np.testing.assert_allclose
TEXTS = ['aa bb cc', 'hh', 'dd ee ff gg', 'a', 'bb hh', 'cc cc', 'gg a']
SECONDS = 1.


@pytest.fixture(scope='module')
def voiced(xtts, small):
    "The small model with a decoder."
    keras.utils.set_random_seed(0)
    model = copy.copy(xtts)
    model.hifigan = HiFiGAN(small), SpeakerEncoder(small)
    return model

@pytest.fixture(scope='module')
def single(xtts, small):
    "The small model with one block: its loops are compiled in half of the time."
    keras.utils.set_random_seed(0)
    model = copy.copy(xtts)
    model.gpt = GPT(small.replace(model={'gpt': {'layers': 1}}), xtts.gpt.text_start)
    return model

@pytest.fixture(scope='module')
def speaker(voiced):
    "With the loop of one row that all streams of this file use."
    made = Speaker(voiced, max_seconds=SECONDS, temperature=1., top_p=1., repetition_penalty=2.)
    made.rows = SpeechRows(made)
    return made

@pytest.fixture(scope='module')
def voices(speaker): return [speaker.listen(synthetic_voice(1., pitch)) for pitch in (100., 200.)]

@pytest.fixture(scope='module')
def alone(speaker, voices):
    "Each text by the loop without streaming."
    return [speaker(text, 'en', voices[i % 2], seed=i) for i, text in enumerate(TEXTS)]

@pytest.fixture(scope='module')
def rows(engine):
    "Two rows, while no caller uses them."
    return engine.rows


def seeded(speaker, seed): return speaker.sampling._replace(seed=seed)


# --- frames -------------------------------------------------------------------------------------------------

STATES = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)

def stretched(states, scales):
    frames = states[None]
    for scale in scales: frames = stretch(frames, scale)
    return np.asarray(frames)[0]

@pytest.mark.parametrize('scales', [(), (4.,), (4., 24000 / 22050), (1 / 1.7, 4., 24000 / 22050), (2.5, 0.7)],
                         ids=str)
def test_frames_of_a_part_are_those_of_the_whole(scales):
    whole = stretched(STATES, scales)
    assert stretched_count(30, scales, True) == len(whole)
    close(stretched_frames(STATES, scales, 0, len(whole), count=30), whole, atol=1e-5)
    for count in range(1, 30):
        known = stretched_count(count, scales, False)
        assert 0 <= known <= len(whole)
        close(stretched_frames(STATES[:count], scales, 0, known), whole[:known], atol=1e-5)
        late = range(known, len(whole))
        first = max(0, int(known / np.prod(scales)) - 4)
        close(stretched_frames(STATES[first:], scales, known, len(whole), first, 30), whole[late], atol=1e-5)

def test_few_frames_wait_for_the_next_states():
    "At most those that two states span."
    scales = 4., 24000 / 22050
    for count in range(1, 200):
        assert count * np.prod(scales) - stretched_count(count, scales, False) < 2 * np.prod(scales)

@pytest.mark.parametrize('cfg', [DecoderConfig(), XTTSConfig.tiny().model.decoder], ids=['released', 'tiny'])
def test_the_receptive_field(cfg):
    "Beyond it nothing changes, and not far within it something does."
    config = XTTSConfig.tiny().replace(model={'decoder': cfg.model_dump() | {'channels': 16}})
    keras.utils.set_random_seed(0)
    decoder, reach = HiFiGAN(config), receptive_frames(cfg)
    frames = np.random.default_rng(0).normal(size=(1, 81, config.model.gpt.width)).astype(np.float32)
    changed = frames.copy()
    changed[0, 40] += 100.
    vector = tf.zeros((1, config.model.speaker.width))
    with_, without = (decoder.sound(x, vector)[0].numpy() for x in (changed, frames))
    hop = len(with_) // 81
    moved = np.flatnonzero(np.abs(with_ - without) > 0) / hop
    assert 40 - reach <= moved.min() and moved.max() < 41 + reach
    assert moved.min() < 40 - reach + 3 and moved.max() > 41 + reach - 3


# --- sound --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('sizes', [[30], [1] * 30, [8, 16, 6], [29, 1]], ids=lambda s: f'{len(s)} parts')
@pytest.mark.parametrize('speed', [1., 1.3])
def test_the_pieces_are_the_whole(speaker, voices, small, sizes, speed):
    states = np.random.default_rng(1).normal(size=(30, small.model.gpt.width)).astype(np.float32)
    stream, parts, place = SoundStream(speaker, voices[0], speed), [], 0
    for n in sizes:
        place += n
        parts.append(stream.feed(np.zeros(n), states[place - n:place], place == 30))
        assert len(stream.states) <= max(n + 16, 30 * (len(sizes) < 5))   # the rest is forgotten
    slower = states[None] if speed == 1 else stretch(states[None], 1 / speed)
    whole = speaker.xtts.hifigan[0](slower, voices[0].vector[None])[0].numpy()
    close(np.concatenate(parts)[:-240], whole[:-240], atol=1e-4)
    assert np.abs(parts[-1][-24:]).max() < 0.05 * np.abs(whole).max()   # no click where it was cut off

def test_a_stream_is_the_whole_call(speaker, voices, alone):
    for i in (0, 1, 2):
        pieces = list(speaker.stream(TEXTS[i], 'en', voices[i % 2], seed=i, first=5))
        close(np.concatenate(pieces), alone[i], atol=1e-3)
        assert len(pieces) > 1 or len(alone[i]) < 8000
    assert trace_count(speaker.rows._advance) == 1

@pytest.mark.slow
def test_a_stream_with_int8_weights_is_the_whole_call(voiced, single, voices):
    model = copy.copy(single)
    model.hifigan = voiced.hifigan
    quick = Speaker(model, temperature=0., weights='int8')
    pieces = list(quick.stream(TEXTS[0], 'en', voices[0], first=3, chunk=6))
    close(np.concatenate(pieces), quick(TEXTS[0], 'en', voices[0]), atol=1e-3)
    assert quick.rows.gpt is quick.gpt

def test_a_stream_that_is_left_frees_its_row(speaker, voices, alone):
    for _ in speaker.stream(TEXTS[0], 'en', voices[0], first=3): break
    pieces = list(speaker.stream(TEXTS[2], 'en', voices[0], seed=2))
    close(np.concatenate(pieces), alone[2], atol=1e-3)

@pytest.fixture(scope='module')
def plain(single):
    "A speaker without a decoder."
    return Speaker(single, max_seconds=SECONDS, temperature=1., speed=1.25)

def test_without_a_decoder_all_sound_comes_at_the_end(plain, voices):
    pieces = list(plain.stream('aa bb', 'en', voices[0], chunk=4))
    assert len(pieces) == 1
    close(pieces[0], plain('aa bb', 'en', voices[0]), atol=1e-3)

@pytest.mark.parametrize('codes, speed, frames',
                         [(0, 1., 4), (1, 1.25, 3), (1, 2., 2), (2, 2., 4), (1, 4., 2)])
def test_the_shortest_texts_without_a_decoder(plain, voices, codes, speed, frames):
    wav = SoundStream(plain, voices[0], speed).feed(np.full(codes, 5), np.zeros((codes + 1, 64)), True)
    mel = plain._mels(np.full((1, codes or 1), 5 if codes else plain.xtts.gpt.code_stop), [codes], speed)[0]
    if len(mel) < 2: mel = mel[[0, 0]]   # one frame has no sound
    assert len(mel) == frames and wav.shape == ((frames - 1) * 256,)
    close(wav, plain._mel_sound(mel), atol=1e-5)

def test_a_stream_refuses_what_a_call_refuses(speaker, voices):
    with pytest.raises(UserError, match='empty'): next(speaker.stream('', 'en', voices[0]))


def test_a_long_text_is_streamed_with_its_pauses(speaker, voices, monkeypatch):
    "Also after a piece with nothing to say."
    pieces = [TextPiece('aa bb', 'en', 0.1), TextPiece(' - ', 'en', 0.5), TextPiece('hh', 'en', 0.2)]
    monkeypatch.setattr(streaming, 'spoken_pieces', lambda *given: (pieces, [3, 0, 2]))
    monkeypatch.setattr(speaker, 'speech', speaker.speech.model_copy(update={'speed': 2.}))
    first, second = (list(speaker.stream(text, 'en', voices[0], seed=seed))
                     for text, seed in zip(('aa bb', 'hh'), piece_seeds(3)))
    pause = np.zeros(round(0.05 * speaker.sample_rate))
    streamed = list(stream_text(speaker, 'any', 'en', voices[0], seed=3))
    close(np.concatenate(streamed), np.concatenate([*first, pause, *second]), atol=1e-3)

def test_the_pieces_of_a_text_sound_the_same_as_a_file_and_as_a_stream(speaker, voices):
    text = 'aa bb cc.\n\naa bb cc.'
    whole, _ = speak_whole(speaker, text, 'en', voices[0], seed=3, rows=1)
    close(np.concatenate([*stream_text(speaker, text, 'en', voices[0], seed=3)]), whole, atol=1e-3)
    first, second = (speaker('aa bb cc', 'en', voices[0], seed=s) for s in islice(piece_seeds(3), 2))
    close(whole[:len(first)], first, atol=1e-3)
    close(whole[-len(second):], second, atol=1e-3)
    assert len(first) != len(second) or not np.allclose(first, second, atol=1e-2)

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
    path.write_bytes(older := wav_header(24000, 2, wide=True) + b'xx')
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

@pytest.mark.parametrize('size, kind', [(2**33, 'RF64'), (2**20, 'WAV')])
def test_a_header_tells_any_length(tmp_path, size, kind):
    with open(tmp_path / 'a.wav', 'wb') as file:
        head = wav_header(24000, size, wide=True)
        file.write(head)
        file.truncate(len(head) + size)
    info = soundfile.info(tmp_path / 'a.wav')
    assert (len(head), info.format, info.frames, info.samplerate) == (80, kind, size // 2, 24000)

def test_only_a_first_piece_that_sounds_when_it_is_whole_is_one_sentence(speaker, plain, voices, monkeypatch):
    said = []
    monkeypatch.setattr(Speaker, 'stream', lambda self, text, *_: said.append(text) or iter([]))
    for one in speaker, plain: list(stream_text(one, 'aa bb cc dd ee ff. Gg hh.', 'en', voices[0]))
    assert said == ['aa bb cc dd ee ff. Gg hh.', 'aa bb cc dd ee ff. ', 'Gg hh.']

def test_a_text_that_cannot_be_streamed_is_refused_at_once(speaker, voices):
    with pytest.raises(UserError, match='no letter'): stream_text(speaker, '...', 'en', voices[0])

def test_what_is_written():
    sounds, out = [np.array([0., 0.5], np.float32), np.array([2., -2., -0.25], np.float32)], io.BytesIO()
    assert write_stream(iter(sounds), 10, out) == 0.5
    samples, rate = soundfile.read(io.BytesIO(out.getvalue()), dtype='int16')
    assert rate == 10 and samples.tolist() == [0, 16384, 32767, -32768, -8192]
    assert out.getvalue() == wav_header(10) + pcm16(np.concatenate(sounds)) and len(wav_header(10)) == 44
    assert struct.unpack_from('<I', wav_header(10), 28) == (20,)   # bytes in a second
    raw = io.BytesIO()
    write_stream(iter(sounds), 10, raw, header=False)
    assert raw.getvalue() == pcm16(np.concatenate(sounds))

def test_a_listener_that_leaves_ends_the_stream():
    class Pipe(io.BytesIO):
        def flush(self): raise BrokenPipeError
    asked = []
    def sounds():
        for i in range(3):
            asked.append(i)
            yield np.zeros(4, np.float32)
    assert write_stream(sounds(), 4, Pipe()) == 0 and asked == [0]


# --- rows ---------------------------------------------------------------------------------------------------

def test_texts_that_come_and_go_sound_as_alone(speaker, voices, rows, alone):
    "Often enough that the ring is passed several times."
    waiting, sounds, rounds = [*range(7)] * 3, {}, 0
    order, running = list(enumerate(waiting)), {}
    while order or running:
        while order and rows.free:
            turn, i = order.pop(0)
            row = rows.admit(speaker._ids(TEXTS[i], 'en'), voices[i % 2], seeded(speaker, i))
            running[row] = sounds[turn, i] = []
        for row, (make, ended) in rows.advance().items():
            running[row].append(make())
            if ended: del running[row]
        rounds += 1
    positions = rows.state['cache'][0][0].shape[2]
    assert int(rows.state['slot']) < positions < rounds * 5
    for (_, i), parts in sounds.items(): close(np.concatenate(parts), alone[i], atol=1e-3)
    assert trace_count(rows._advance) == 1
    assert rows.free == [0, 1]

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

def test_a_limit_shortens_a_chunk(speaker, voices, rows):
    row = rows.admit(speaker._ids(TEXTS[0], 'en'), voices[0])
    before = int(rows.state['slot'])
    rows.advance(2)
    assert (int(rows.state['slot']) - before) % rows.state['cache'][0][0].shape[2] == 2
    assert rows.streams[row].made <= 2
    rows.release(row)
    assert rows.free == [0, 1] and bool(rows.state['done'][row])
    slot = int(rows.state['slot'])
    rows.advance()
    assert int(rows.state['slot']) == slot   # nobody speaks

@pytest.fixture
def endless(speaker):
    "The speaker, while its model never stops."
    bias = speaker.gpt.code_head.bias
    before = bias.numpy()
    never_stop(speaker.gpt)
    yield speaker
    bias.assign(before)

def test_a_text_that_never_ends_is_cut(endless, voices):
    "At the length of the speaker, as in a call; within a chunk, and where a chunk ends."
    whole = endless('aa bb', 'en', voices[0])
    for first in (2, endless.max_codes - endless.rows.chunk):
        pieces = list(endless.stream('aa bb', 'en', voices[0], first=first))
        close(np.concatenate(pieces), whole, atol=1e-3)
        assert int(endless.rows.state['index'][0]) == endless.max_codes


def test_two_streams_at_once_are_refused(speaker, voices, alone):
    first = speaker.stream(TEXTS[0], 'en', voices[0], first=2)
    next(first)
    second = list(speaker.stream(TEXTS[2], 'en', voices[0], seed=2))
    with pytest.raises(UserError, match='Another stream of this speaker began'): list(first)
    close(np.concatenate(second), alone[2], atol=1e-3)


# --- the engine ---------------------------------------------------------------------------------------------

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

def test_a_speed_of_its_own(engine, speaker, voices, alone):
    fast = np.concatenate(list(engine.submit(TEXTS[2], 'en', voices[0], seeded(engine.speaker, 2), speed=2.)))
    assert 0.4 < len(fast) / len(alone[2]) < 0.6

def test_what_cannot_be_said_is_refused_at_once(engine, voices):
    with pytest.raises(UserError, match='never saw'): engine.submit('Ж', 'en', voices[0])
    assert not engine.waiting

def test_codes_go_on_while_a_caller_makes_its_sound(engine, voices, alone, monkeypatch):
    "Sound is made in the threads of the callers, by as many at once as there are cores; here by one."
    assert engine._turn._value == cores()
    monkeypatch.setattr(engine, '_turn', threading.Semaphore(1))
    feed, hold, fed = SoundStream.feed, threading.Event(), []

    def held(*given):
        fed.append(threading.current_thread().name)
        assert hold.wait(30)
        return feed(*given)
    monkeypatch.setattr(SoundStream, 'feed', held)
    seeds = [seeded(engine.speaker, i) for i in range(4)]
    sounds, texts = {}, [engine.submit(TEXTS[i], 'en', voices[i % 2], seeds[i]) for i in range(4)]

    def hear(i): sounds[i] = np.concatenate(list(texts[i]))
    callers = [threading.Thread(target=hear, args=(i,), name=str(i)) for i in range(4)]
    for t in callers: t.start()
    idle(engine)   # all codes are made
    assert len(fed) == 1 and all(text.codes for text in texts)
    hold.set()
    for t in callers: t.join()
    assert {*fed} == {*'0123'}
    for i, sound in sounds.items(): close(sound, alone[i], atol=1e-3)

def test_a_text_that_cannot_begin_ends_alone(engine, voices, alone, monkeypatch):
    admit = engine.rows.admit

    def fail(ids, voice, sampling, speed):
        if sampling.seed == 99: raise MemoryError('no place')
        return admit(ids, voice, sampling, speed)
    monkeypatch.setattr(engine.rows, 'admit', fail)
    bad, good = (engine.submit(TEXTS[2], 'en', voices[0], seeded(engine.speaker, seed)) for seed in (99, 2))
    for _ in range(2):
        with pytest.raises(MemoryError): list(bad)
    close(np.concatenate(list(good)), alone[2], atol=1e-3)
    assert list(good) == []
    idle(engine)

def test_sound_that_fails_ends_one_text_only(engine, voices, alone, monkeypatch):
    feed = SoundStream.feed

    def fail(stream, *given):
        if stream.speed == 2: raise RuntimeError('out of memory')
        return feed(stream, *given)
    monkeypatch.setattr(SoundStream, 'feed', fail)
    fails, works = (engine.submit(TEXTS[2], 'en', voices[0], seeded(engine.speaker, 2), s) for s in (2., 1.))
    with pytest.raises(RuntimeError, match='out of memory'): list(fails)
    close(np.concatenate(list(works)), alone[2], atol=1e-3)

def test_a_warm_engine_traces_no_sound_anew(plain, speaker, voices):
    "Whatever the lengths and speeds of the texts."
    for xtts in (plain.xtts, speaker.xtts):
        fresh = Speaker(xtts, max_seconds=SECONDS)
        Engine.warm_up(SimpleNamespace(speaker=fresh, rows=SimpleNamespace(compile=len)), voices[0])
        functions = fresh.frames_sound, fresh._decode, griffin_lim
        traces = [trace_count(f) for f in functions]
        for n, speed in ((1, 1.), (5, 1.7), (30, 1.)):
            states = np.zeros((n, 64), np.float32)
            SoundStream(fresh, voices[0], speed).feed(np.zeros(n, np.int32), states, True)
        assert [trace_count(f) for f in functions] == traces and sum(traces[:2]) == 2

def lone(speaker) -> Engine:
    "An engine with the row of the streams, which is compiled already."
    engine = Engine(speaker, rows=1)
    speaker.rows.clear(1)
    engine.rows = speaker.rows
    return engine

def test_a_closed_engine(speaker, voices):
    engine = lone(speaker)
    pending = [engine.submit(TEXTS[0], 'en', voices[0]) for _ in range(3)]
    engine.close()
    for u in pending[1:]:
        with pytest.raises(EngineClosed, match='closed'): list(u)
    with pytest.raises(EngineClosed): engine.submit('aa', 'en', voices[0])

def test_one_row_of_eight_is_kept_for_new_texts_while_all_listeners_have_sound():
    dry = time.monotonic() + streaming.PATIENCE   # of one who runs dry now
    for dues, free, rows, count in (
            ([0, 1, 2], 2, 8, 2), ([dry + 9] * 3, 2, 8, 1), ([dry + 9] * 3, 1, 8, 0), ([0, dry + 9], 1, 8, 1),
            ([dry - 9] * 3, 2, 8, 2), ([dry + 9] * 3, 2, 4, 2), ([], 8, 8, 0), ([dry + 9] * 20, 8, 8, 7)):
        assert streaming._admissible(dues, free, rows) == count, (dues, free, rows)

def test_a_call_that_hangs_is_overdue_and_closes_all_the_same(speaker, voices, monkeypatch):
    go, advance = threading.Event(), SpeechRows.advance
    monkeypatch.setattr(SpeechRows, 'advance', lambda rows: go.wait(30) and advance(rows))
    monkeypatch.setitem(streaming.CALL_SECONDS, 'round', 0.05)
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

def test_a_failure_reaches_the_callers(speaker, voices, monkeypatch):
    def fail(*_): raise RuntimeError('out of memory')
    monkeypatch.setattr(streaming.SpeechRows, 'advance', fail)
    engine = lone(speaker)
    with pytest.raises(RuntimeError, match='out of memory'): list(engine.submit('aa', 'en', voices[0]))
    with pytest.raises(EngineClosed): engine.submit('aa', 'en', voices[0])

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

@pytest.mark.parametrize('retries, attempts', [(0, 1), (2, 1), (2, 2), (2, 3)])
def test_a_guarded_text_is_inspected_before_it_sounds(engine, speaker, voices, monkeypatch, retries,
                                                      attempts):
    "Spoken again while it has faults, in its place of the queue; the best attempt sounds, and is trimmed."
    found, submitted, submit = [], [], Engine._queue
    def inspect(codes, tokens, text, limit, rate):
        assert (tokens, text, limit) == (len(speaker._ids(TEXTS[2], 'en')), TEXTS[2], speaker.max_codes)
        assert rate == Rate(1., 2.)
        found.append(codes)
        if len(found) < attempts: return len(codes), [{'found': 'no end'}] * (3 - len(found))
        return len(codes) - 4, [{'found': 'trailing repetition', 'done': 'trimmed'}]
    def log(engine, text, language, voice, sampling, speed, due):
        submitted.append((sampling, due))
        return submit(engine, text, language, voice, sampling, speed, due)
    monkeypatch.setattr(streaming, 'inspect_codes', inspect)
    monkeypatch.setattr(Engine, '_queue', log)
    monkeypatch.setattr(speaker, 'rates', {'en': Rate(1., 2.)})
    sampling = seeded(speaker, 2)._replace(temperature=0.)
    request = engine.submit(TEXTS[2], 'en', voices[0], sampling, retries=retries)
    sounds = list(request)
    assert len(found) == attempts == len(submitted) and len(sounds) == 1 and request.started
    assert [given for given, _ in submitted] == [sampling, *(
        sampling._replace(seed=2 + 7919 * i, temperature=0.75) for i in range(1, attempts))]
    assert len({due for _, due in submitted}) == 1
    again = [{'found': 'no end', 'done': 'spoken again'}] * 2 * (attempts > 1)
    assert request.report == [*again, {'found': 'trailing repetition', 'done': 'trimmed'}]
    codes, n, states = speaker._codes([TEXTS[2]], ['en'], [voices[0]], submitted[-1][0])
    assert found[-1].tolist() == codes[0, :n[0]].numpy().tolist()
    whole = SoundStream(speaker, voices[0]).feed(found[-1], states[0, :n[0] - 3].numpy(), True)
    close(sounds[0], whole, atol=1e-3)
    assert request.codes >= sum(map(len, found)) and list(request) == []

def test_a_guarded_text_that_is_cancelled_makes_no_sound(engine, voices, monkeypatch):
    monkeypatch.setattr(streaming, 'inspect_codes', lambda codes, *_: (
        request.cancel() or (len(codes), [{'found': 'no end'}])))
    request = engine.submit(TEXTS[2], 'en', voices[0], retries=5)
    assert list(request) == [] and request.cancelled and request.request.cancelled and not request.report
    idle(engine)

@pytest.mark.parametrize('limit', [1, 5])
def test_a_limit_of_codes_for_one_text(engine, speaker, voices, limit):
    "Beside a text without one."
    short, free = (engine.submit(TEXTS[2], 'en', voices[0], seeded(speaker, 2)._replace(limit=most))
                   for most in (limit, 9999))
    made = [np.concatenate(list(request)) for request in (short, free)]
    assert short.codes == limit < free.codes <= speaker.max_codes
    whole = SoundStream(speaker, voices[0])
    sampling = seeded(speaker, 2)._replace(limit=limit)
    codes, n, states = speaker._codes([TEXTS[2]], ['en'], [voices[0]], sampling)
    assert n[0] == limit and (codes[0, limit:] == speaker.gpt.code_stop).numpy().all()
    close(made[0], whole.feed(np.zeros(limit), states[0, :limit].numpy(), True), atol=1e-3)
    with pytest.raises(UserError, match='at least 1 code, got 0'):
        engine.submit(TEXTS[2], 'en', voices[0], sampling._replace(limit=0))

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

def test_new_texts_go_before_later_pieces_and_these_as_listeners_run_dry(engine, voices, monkeypatch):
    hold, admitted, next_ = threading.Event(), [], engine._next
    def wait():
        assert hold.wait(30)
        return next_()
    admit = engine.rows.admit
    monkeypatch.setattr(engine, '_next', wait)
    monkeypatch.setattr(engine.rows, 'admit', lambda ids, voice, sampling, speed: (
        admitted.append(sampling.seed) or admit(ids, voice, sampling, speed)))
    engine.submit('aa', 'en', voices[0], seeded(engine.speaker, 0)).cancel()   # the thread comes to `wait`
    while engine.waiting: time.sleep(0.01)
    heard = {1: 5., 2: 1., 3: None, 4: -60., 5: None, 6: 3.}   # s from now; 4 has heard nothing for a minute
    texts = [engine.submit('aa', 'en', voices[0], seeded(engine.speaker, seed),
                           continues=None if left is None else time.monotonic() + left)
             for seed, left in heard.items()]
    assert not any(text.started for text in texts)
    hold.set()
    for text in texts: list(text)
    assert admitted == [4, 3, 5, 2, 6, 1] and all(text.started and text.report == () for text in texts)
    idle(engine)
