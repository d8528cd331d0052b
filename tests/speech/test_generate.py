"Speaking: the cache changes nothing, rows do not meet, seeds repeat, and what cannot be said is refused."
import tracemalloc
from functools import cache
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import tensorflow as tf

from xtts_nb.bench import trace_count
from xtts_nb.files import save_weights
from xtts_nb.speech import generate as synthesis
from xtts_nb.data.audio import save_audio, synthetic_voice
from xtts_nb.config import AudioConfig, SpeechConfig, UserError
from xtts_nb.data.text import Speakable
from xtts_nb.models.gpt import GPT, TransformerBlock, causal_mask
from xtts_nb.models.xtts import XTTS
from xtts_nb.speech.generate import (
    Sampling, Speaker, cached_block, faded, generate, int8_weights, never_stop, piece_seeds, read_reference,
    reference_mels, sample_code, whole_prefix)
from xtts_nb.speech.guard import retry_sampling
from xtts_nb.speech.voices import Voice

TEXTS, VOICE = ['aa bb cc', 'hh', 'dd ee ff gg'], synthetic_voice(1.)


# --- choosing -----------------------------------------------------------------------------------------------

def draws(score, n=400, spoken=None, temperature=1., top_k=50, top_p=1., penalty=1.):
    score = tf.constant(score, tf.float32)[None]
    spoken = tf.zeros(score.shape, bool) if spoken is None else tf.constant([spoken])
    return picked(np.tile(score, (n, 1)), np.tile(spoken, (n, 1)), temperature, top_k, top_p, penalty)

def picked(score, spoken, *settings, uniform=None):
    "A code of each row, by numbers that are spread evenly from 0 to 1."
    if uniform is None: uniform = (np.arange(len(score), dtype=np.float32) + 0.5) / len(score)
    return sample_code(score, spoken, uniform, Sampling(*settings).tensors(len(score), 1)).numpy()

def coqui_chances(score, spoken, temperature, top_k, top_p, repetition_penalty):
    "Probabilities of the codes by coqui-tts's order of transforms, which are those of Hugging Face."
    score = np.where(spoken, score * np.where(score < 0, repetition_penalty, 1 / repetition_penalty), score)
    score /= temperature
    score[score < np.sort(score)[-top_k]] = -np.inf
    chance, rising = np.exp(score) / np.exp(score).sum(), np.argsort(score)
    chance[rising[np.cumsum(chance[rising]) <= 1 - top_p]] = 0
    return chance / chance.sum()

def chi_square(count, chance):
    "The statistic; infinite if a code of probability 0 was drawn."
    if count[chance == 0].any(): return np.inf
    expected = count.sum() * chance[chance > 0]
    return ((count[chance > 0] - expected)**2 / expected).sum()

@pytest.mark.parametrize('settings, freedom, most', [   # the 0.999 quantile of these degrees of freedom
    ((0.75, 50, 0.85, 5.), 5, 20.5), ((1., 31, 1., 1.), 30, 59.7), ((1.5, 40, 0.95, 1.3), 33, 63.9)], ids=str)
def test_draws_follow_the_distribution_of_coqui_tts(settings, freedom, most):
    "With 10,000 random numbers of a row; the same test refuses probabilities slightly wrong."
    random = np.random.default_rng(2)
    score, spoken = random.normal(0, 2, 100).astype(np.float32), random.random(100) < 0.5
    uniform = np.random.default_rng(0).random(10000, np.float32)
    drawn = picked(np.tile(score, (10000, 1)), np.tile(spoken, (10000, 1)), *settings, uniform=uniform)
    count = np.bincount(drawn, minlength=100)
    chances = lambda *settings: coqui_chances(score, spoken, *settings)
    temperature, *limits, penalty = settings
    assert (chances(*settings) > 0).sum() == freedom + 1 and chi_square(count, chances(*settings)) < most
    for wrong in ((1.1 * temperature, *limits, penalty), (0.9 * temperature, *limits, penalty),
                  (temperature, *limits, penalty / 2)):
        assert chi_square(count, chances(*wrong)) > most, wrong

@pytest.mark.parametrize('limits, allowed',
                         [(dict(top_k=1), {0}), (dict(top_k=2), {0, 1}), (dict(top_k=99), {0, 1, 2, 3}),
                          (dict(top_p=0.45), {0}),
                          (dict(top_p=0.55), {0, 1}), (dict(top_p=0.9), {0, 1, 2}),
                          (dict(top_k=2, top_p=0.6), {0}),
                          (dict(top_k=3, top_p=0.55), {0, 1}),
                          (dict(temperature=1e-4), {0}), (dict(top_p=0.), {0}), (dict(top_k=0), {0})],
                         ids=str)
def test_limits_keep_the_best(limits, allowed):
    order = [2, 0, 3, 1]   # places of the scores, best first
    score = np.zeros(4)
    score[order] = np.log([0.5, 0.3, 0.15, 0.05])
    assert set(draws(score, **limits)) == {order[i] for i in allowed}

def test_at_temperature_0_the_best_is_taken(): assert set(draws([0., 3., 2.9], 20, temperature=0)) == {1}

@pytest.mark.parametrize('score, spoken, best',
                         [([2., 1.5, 1.], 0, 1), ([-1., -1.5, -2.9], 0, 1), ([2., 1.5, 1.], 2, 0),
                                                 ([2., 0.9, 0.8], 0, 0), ([-1., -2.1, -2.9], 0, 0)])
def test_what_was_spoken_becomes_less_likely(score, spoken, best):
    said = [i == spoken for i in range(3)]
    assert set(draws(score, 5, said, temperature=0, penalty=2.)) == {best}

def test_rows_with_settings_of_their_own_are_each_as_alone():
    random = np.random.default_rng(3)
    score, spoken = random.normal(0, 2, (6, 50)).astype(np.float32), random.random((6, 50)) < 0.3
    uniform = random.random(6, np.float32)
    each = [(0., 50, 1., 1.), (1., 3, 1., 1.), (2., 50, 0.3, 1.), (0., 50, 1., 9.), (5., 50, 1., 3.),
            (5., 1, 1., 2.)]
    together = picked(score, spoken, *np.transpose(each), uniform=uniform)
    alone = [picked(score[i:i + 1], spoken[i:i + 1], *each[i], uniform=uniform[i:i + 1])[0] for i in range(6)]
    assert together.tolist() == alone and together[0] == score[0].argmax() and len({*alone}) > 3

@pytest.mark.parametrize('uniform, code', [(0., 1), (0.4999, 1), (0.5001, 3), (1 - 2**-24, 3)])
def test_the_draw_inverts_the_distribution(uniform, code):
    "Also at its ends no code of probability 0 is drawn."
    score = np.array([[-np.inf, 0., -np.inf, 0., -np.inf]], np.float32)
    assert picked(score, np.zeros((1, 5), bool), 1., 50, 1., 1., uniform=np.float32([uniform])) == [code]


# --- the loop -----------------------------------------------------------------------------------------------

MAX = 16

@pytest.fixture(scope='module')
def inputs(xtts):
    ids = [xtts.tokenizer.encode(t, 'en') for t in TEXTS]
    width = max(map(len, ids)) + 2
    voices = [synthetic_voice(1., p) for p in (90., 150., 230.)]
    reference = np.stack(reference_mels(xtts, voices, xtts.config.speech))
    return (np.array([i + [0] * (width - len(i)) for i in ids], np.int32),
            np.array([len(i) for i in ids], np.int32), reference)

@cache
def compiled(gpt, max_codes, parity=False):
    "The loop; its weights and the settings are inputs, so that it is traced once for each shape."
    return tf.function(lambda text, length, reference, settings: generate(
        gpt, text, length, gpt.conditioning(reference), max_codes, **settings._asdict()))

def speak_states(gpt, inputs, max_codes=MAX, **options):
    settings = Sampling(**dict(temperature=0., repetition_penalty=3.) | options)
    run = compiled(gpt, max_codes, gpt.parity)
    return [x.numpy() for x in run(*map(tf.constant, inputs), settings.tensors(len(inputs[0]), max_codes))]

def speak(*args, **options): return speak_states(*args, **options)[:2]

@pytest.fixture(scope='module')
def net(xtts, small):
    "A copy of the model's GPT, whose bias the tests change."
    net = GPT(small, xtts.gpt.text_start)
    for a, b in zip(net.variables, xtts.gpt.variables): a.assign(b)
    return net

def biased(net, stop):
    "The GPT with its STOP made likelier (or impossible)."
    # START is never spoken
    bias = np.zeros(net.code_stop + 1, np.float32)
    bias[net.code_stop] = stop
    bias[net.code_start] = 50.
    net.code_head.bias.assign(bias)
    return net

@pytest.fixture
def endless(net): return biased(net, -50.)

@pytest.mark.parametrize('chunks', [[12], [1] * 12, [5, 1, 6]], ids=str)
def test_a_block_with_a_cache_equals_one_without(chunks):
    block, x = TransformerBlock(16, 2), tf.random.normal((2, 12, 16))
    whole, cache, place, parts = block(x, causal_mask(12, 12)), (tf.zeros((2, 2, 12, 8)),) * 2, 0, []
    for n in chunks:
        y, cache = cached_block(block, x[:, place:place + n], causal_mask(n, 12, place), cache, place)
        parts.append(y)
        place += n
    assert np.allclose(np.concatenate(parts, 1), whole, atol=1e-5)

@pytest.mark.parametrize('bias', [-50., 0.])
def test_greedy_with_cache_is_the_argmax_of_the_full_pass(net, inputs, bias):
    biased(net, bias)
    text, text_length, reference = inputs
    codes, length = speak(net, inputs, repetition_penalty=1.)
    logits = net(*map(tf.constant, (text, text_length, codes, length, reference)))[1].numpy()
    logits[..., net.code_start] = -np.inf
    for row, n in enumerate(length):
        said = [*codes[row, :n], net.code_stop][:MAX]
        best = logits[row, :len(said)]
        close = best.max(-1) - np.take_along_axis(best, np.array(said)[:, None], -1)[:, 0]
        assert (close < 1e-4).all(), row   # the argmax, or level with it in float32

def test_the_states_are_those_of_a_second_pass(net, inputs):
    "Up to and with the one that chose STOP."
    biased(net, 1.5)
    text, text_length, reference = inputs
    codes, length, states = speak_states(net, inputs, seed=[1, 2, 3], temperature=1., top_p=1.)
    again = net.states(*map(tf.constant, (text, text_length, codes, length)),
                       net.conditioning(tf.constant(reference)))[1]
    assert len(set(length)) > 1
    for row, n in enumerate(length):
        assert np.allclose(states[row, :n + 1], again[row, :min(n + 1, MAX)], atol=1e-4)

def stop_bias(endless, inputs) -> float:
    "With this bias of STOP, one row of three stops before the end."
    text, length, reference = inputs
    codes, most = speak(endless, inputs, repetition_penalty=1.)
    score = endless(*map(tf.constant, (text, length, codes, most, reference)))[1].numpy()[:, :MAX]
    gap = score[..., :endless.code_start].max(-1) - score[..., endless.code_stop] - 50
    return float(np.sort(gap.min(1))[:2].mean())

def test_the_whole_prefix_for_each_code_gives_the_same(net, endless, inputs):
    "Codes, lengths and states; compiled once for each multiple, ended when all rows have."
    naive, between = whole_prefix(net, every=6), stop_bias(endless, inputs)
    (text, length, reference), told = map(tf.constant, inputs), []
    for ends, bias, traced in (('at once', 100., 2), ('one row', between, 3), ('never', -50., 3)):
        biased(net, bias)
        told.clear()
        slow = naive(text, length, net.conditioning(reference), MAX, lambda *done: told.append(done))
        codes, lengths, states = speak_states(net, inputs, repetition_penalty=1.)
        assert np.array_equal(slow[0], codes) and np.array_equal(slow[1], lengths), ends
        assert slow[0].dtype == slow[1].dtype == codes.dtype and slow[2].shape == states.shape, ends
        for row, n in enumerate(lengths):
            assert np.allclose(slow[2][row, :n + 1], states[row, :n + 1], atol=1e-4), ends
        assert len(set(lengths)) == {'one row': 2}.get(ends, 1), ends
        assert told == [(i + 1, MAX) for i in range(1 if ends == 'at once' else MAX)], ends
        assert trace_count(naive.passed) == traced, ends   # 6, 12 and 16 codes

def test_a_limit_ends_the_loop_without_a_new_trace(endless, inputs):
    whole = speak(endless, inputs)[0]
    traces = trace_count(compiled(endless, MAX))
    for limits in ([0] * 3, [5] * 3, [MAX + 3] * 3, [0, 7, 99]):   # of each row
        codes, lengths = speak(endless, inputs, limit=tf.constant(limits))
        assert lengths.tolist() == np.minimum(limits, MAX).tolist()
        for row, all_codes, n in zip(codes, whole, lengths.tolist()):
            assert row.tolist() == [*all_codes[:n], *[endless.code_stop] * (MAX - n)]
    assert trace_count(compiled(endless, MAX)) == traces

def test_a_model_that_never_stops_keeps_its_other_scores(net, inputs):
    biased(net, 100.)
    before = net.code_head.bias.numpy()
    never_stop(net)
    changed = net.code_head.bias.numpy() != before
    assert changed.sum() == 1 and changed[net.code_stop]
    assert (speak(net, inputs)[1] == MAX).all()

def test_the_greatest_length_is_respected(endless, inputs):
    for most in (2, MAX):
        codes, length = speak(endless, inputs, most)
        assert codes.shape == (3, most) and (length == most).all() and (codes < endless.code_start).all()

def test_the_longest_that_the_model_has_places_for(endless, inputs, small):
    codes, length = speak(endless, inputs, small.model.gpt.max_audio_codes)
    assert (length == small.model.gpt.max_audio_codes).all()

def test_rows_that_stop_at_once(net, inputs):
    codes, length = speak(biased(net, 100.), inputs)
    assert not length.any() and (codes == net.code_stop).all()

def test_rows_stop_each_for_itself(net, inputs):
    "Behind a row's end there is only STOP, before it none."
    ends, _ = set(), biased(net, 1.5)
    for seed in range(6):
        codes, length = speak(net, inputs, temperature=1., top_p=1., repetition_penalty=1.,
                              seed=[seed, seed + 6, seed + 12])
        for row, n in zip(codes, length):
            assert (row[:n] < net.code_start).all() and (row[n:] == net.code_stop).all()
        ends |= {tuple(length)}
    assert any(len(set(e)) == 3 for e in ends), ends

def test_a_row_does_not_depend_on_its_neighbours(endless, inputs):
    together = speak(endless, inputs)[0]
    alone = [speak(endless, [x[i:i + 1] for x in inputs])[0][0] for i in range(3)]
    assert np.array_equal(together, alone) and len({tuple(r) for r in alone}) > 1

def test_sampling_does_not_depend_on_what_the_neighbours_say(endless, inputs):
    "Nor on the row."
    sampled = dict(temperature=1., seed=5)
    other = [x[[1, 1, 0]] for x in inputs]
    assert np.array_equal(speak(endless, inputs, **sampled)[0][0], speak(endless, other, **sampled)[0][2])

def test_the_padding_of_the_text_does_not_matter(endless, inputs):
    wide = (np.pad(inputs[0], ((0, 0), (0, 7)), constant_values=9), *inputs[1:])
    assert np.array_equal(speak(endless, inputs)[0], speak(endless, wide)[0])

def test_seeds_repeat_and_differ(endless, inputs):
    a, b, c = (speak(endless, inputs, temperature=1., seed=s)[0] for s in (1, 1, 2))
    assert np.array_equal(a, b) and not np.array_equal(a, c)

def test_each_piece_of_a_text_has_its_own_seed():
    "Without a seed another one each time; a seed as great as the service takes has pieces and attempts too."
    pieces = lambda seed: [*islice(piece_seeds(seed), 9)]
    assert pieces(3) == pieces(3) and pieces(3)[0] == 3 and len({*pieces(3), *pieces(4)}) == 18
    assert len({*pieces(None), *pieces(None)}) == 18
    again = [retry_sampling(Sampling(seed=seed), 2).seed for seed in pieces(2**31 - 1)]
    assert all(0 <= seed < 2**31 for seed in (*pieces(2**31 - 1), *again))

def test_text_and_voice_steer(endless, inputs):
    codes = speak(endless, inputs)[0]
    assert not np.array_equal(codes,
                              speak(endless, (inputs[0][::-1].copy(), inputs[1][::-1].copy(), inputs[2]))[0])
    assert not np.array_equal(codes, speak(endless, (*inputs[:2], inputs[2] + 2.))[0])

def test_xla_says_the_same(endless, inputs):
    text, length, reference = map(tf.constant, inputs)
    run = tf.function(lambda *x: generate(endless, *x, MAX, temperature=0., repetition_penalty=3.),
                      jit_compile=True)
    assert np.array_equal(run(text, length, endless.conditioning(reference))[0], speak(endless, inputs)[0])

def test_bfloat16_speaks(xtts, small, inputs):
    net = GPT(small, xtts.gpt.text_start, dtype='mixed_bfloat16')
    codes, length = speak(net, inputs)
    assert codes.dtype == np.int32 and (codes <= net.code_stop).all() and (length <= MAX).all()


# --- as coqui-tts speaks -----------------------------------------------------------------------------------

@pytest.mark.parametrize('parity, first, spoken', [(True, 'start', [2]), (False, 'other', [1, 2])])
def test_in_parity_code_1_and_start_count_as_spoken(endless, inputs, monkeypatch, parity, first, spoken):
    net = endless   # START is the likeliest by far
    monkeypatch.setattr(net, 'parity', parity)
    assert (speak(net, inputs, 2)[0][:, 0] == net.code_start).all() == (first == 'start')
    bias = np.zeros(net.code_stop + 1, np.float32)
    bias[1], bias[2] = 50., 40.   # a third of 50 is less than 40
    net.code_head.bias.assign(bias)
    assert (speak(net, inputs, 2)[0][:, :len(spoken)] == spoken).all()


# --- the speaker --------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def speaker(xtts): return Speaker(xtts, temperature=0.)

@pytest.mark.parametrize('text, language, message', [
    ('Ж?', 'en', 'never saw ж'),
    ('☺ *', 'en', 'no letter'), ('"“', 'en', 'no letter'),
    ('', 'en', 'The text is empty'),
    (' \n', 'en', 'The text is empty'),
    ('aa', 'de', 'no language "de"; it has en'),
    ('a h ' * 40, 'en', 'The text has .* tokens, the model takes 40; split it'),
    ('aa', '', 'no language ""')])
def test_unsupported_text_is_refused(speaker, text, language, message):
    with pytest.raises(UserError, match=message): speaker(text, language, VOICE)

@pytest.mark.parametrize('samples', [0, 1, 2000, 11024])
def test_a_short_reference_is_refused(speaker, samples, tmp_path):
    with pytest.raises(UserError, match='the reference: .*(too short.*0.5 s|silent)'):
        speaker('aa', 'en', VOICE[:samples])
    if not samples: return
    save_audio(tmp_path / 'r.wav', VOICE[:samples])
    with pytest.raises(UserError, match=f'{tmp_path / "r.wav"}: .*(too short|silent)'):
        speaker('aa', 'en', tmp_path / 'r.wav')

def test_half_a_second_is_enough_and_what_comes_late_is_not_heard():
    wav = np.arange(44100.)
    assert [len(read_reference(wav[:n], AudioConfig(), seconds))
            for n, seconds in ((11025, 30), (44100, 1.5))] == [11025, 33075]

@pytest.mark.parametrize('parts', [(0.3, 0.3), (0.3, 0.3, 1.), (1., 0.3)], ids=str)
def test_short_recordings_are_joined(xtts, parts):
    wavs = [VOICE[:round(22050 * s)] for s in parts]
    assert np.isfinite(heard(xtts, wavs).prompt).all()
    assert np.allclose(heard(xtts, wavs[:2]).prompt, heard(xtts, [np.concatenate(wavs[:2])]).prompt)

def test_a_recording_is_heard_where_its_sound_begins_and_in_the_channel_that_has_it(xtts, tmp_path):
    silence, there = np.zeros(3 * 22050, np.float32), lambda name, wav: soundfile.write(
        tmp_path / name, wav, 22050, subtype='FLOAT') or read_reference(tmp_path / name, AudioConfig(), 1.)
    late, loud = np.concatenate([silence, VOICE]), np.flatnonzero(np.abs(VOICE) > 1e-3)[0]
    for found in (there('late.wav', late), read_reference(late, AudioConfig(), 1.)):
        assert np.array_equal(found, VOICE[loud:loud + 22050])
    assert np.array_equal(there('phase.wav', np.stack([VOICE, -VOICE], 1)), VOICE[:22050])
    soundfile.write(tmp_path / 'word.wav', np.concatenate([silence, VOICE[:8000], silence]), 22050)
    for wav, words in ((tmp_path / 'word.wav', 'word.wav: .*too short'), (silence, 'silent')):
        with pytest.raises(UserError, match=words): heard(xtts, [wav])

def test_of_a_long_recording_only_the_beginning_is_read(tmp_path):
    with soundfile.SoundFile(tmp_path / 'long.wav', 'w', 22050, 2) as file:
        for _ in range(600): file.write(np.stack([VOICE[:22050]] * 2, 1))
    tracemalloc.start()
    try:
        assert len(read_reference(tmp_path / 'long.wav', AudioConfig())) == 30 * 22050
        assert tracemalloc.get_traced_memory()[1] < 20e6   # of 106 MB as float32
    finally: tracemalloc.stop()

@pytest.mark.parametrize('kind', ['missing', 'text', 'nan'])
def test_a_reference_that_is_no_sound_is_named(speaker, tmp_path, kind):
    if kind == 'text': (tmp_path / 'r.wav').write_text('no sound')
    if kind == 'nan':
        soundfile.write(tmp_path / 'r.wav', np.full(22050, np.nan), 22050, subtype='FLOAT')
    with pytest.raises(UserError, match='r.wav'): speaker('aa', 'en', tmp_path / 'r.wav')

@pytest.mark.parametrize('samples', [np.full(22050, np.nan, np.float32), np.zeros((22050, 2), np.float32)],
                         ids=['nan', 'stereo'])
def test_samples_that_are_no_clip_are_refused(speaker, samples):
    with pytest.raises(UserError, match='the reference'): speaker('aa', 'en', samples)

def heard(xtts, wavs, speech=None):
    "The voice of some recordings, as a speaker hears them."
    return Speaker(xtts, **(speech or xtts.config.speech).model_dump()).listen(wavs)

def crop(xtts, reference):
    "What a model trained here hears of a recording."
    return reference_mels(xtts, [read_reference(reference, xtts.config.model.audio)], xtts.config.speech)[0]

def test_a_file_and_its_samples_are_the_same_voice(xtts, tmp_path):
    soundfile.write(tmp_path / 'r.wav', VOICE, 22050, subtype='FLOAT')
    soundfile.write(tmp_path / 'r.flac', np.stack([VOICE, VOICE], 1), 22050, subtype='PCM_24')
    from_array = crop(xtts, VOICE)
    assert from_array.shape == (32, 80) and np.array_equal(crop(xtts, tmp_path / 'r.wav'), from_array)
    assert np.allclose(crop(xtts, str(tmp_path / 'r.flac')), from_array, atol=1e-2)

def test_float64_samples_are_a_voice(xtts):
    assert np.allclose(crop(xtts, VOICE.astype(np.float64)), crop(xtts, VOICE), atol=1e-4)

def test_a_short_clip_goes_round(xtts):
    (mel,) = reference_mels(xtts, [VOICE[:7400]], xtts.config.speech)
    assert len(mel) == 32 and np.array_equal(mel[29:], mel[:3]) and not np.allclose(mel[1:4], mel[:3])

def texts_of(xtts):
    "A speaker for whom a text is the number of its tokens."
    tokenizer = SimpleNamespace(speakable=lambda text, language: Speakable(text, [], []), encode=lambda text,
                                language: [5] * int(text))
    one = SimpleNamespace(xtts=SimpleNamespace(tokenizer=tokenizer, config=xtts.config), max_codes=48,
                          _generate=lambda *given: given)
    one._ids = lambda text, language: Speaker._ids(one, text, language)
    return one

def test_texts_of_two_to_the_greatest_number_of_tokens(xtts):
    for tokens in (2, 40): assert len(texts_of(xtts)._ids(str(tokens), 'en')) == tokens
    with pytest.raises(UserError, match='has 41 tokens'): texts_of(xtts)._ids('41', 'en')

@pytest.mark.parametrize('tokens, width', [((2, 9), 32), ((32,), 32), ((2, 33), 40), ((40,), 40)])
def test_texts_are_padded_to_few_widths(xtts, tokens, width):
    voices = [Voice(tf.fill((4, 64), float(n)), None) for n in tokens]
    text, length, prompt, sampling = Speaker._codes(texts_of(xtts), [*map(str, tokens)], ['en'] * len(tokens),
                                                    voices, Sampling(seed=7))
    assert text.shape == (len(tokens), width) and length.numpy().tolist() == list(tokens)
    assert sampling.seed.numpy().tolist() == [7] * len(tokens) and sampling.limit[0] == 48
    assert all((row[:n] == 5).all() and not row[n:].any() for row, n in zip(text.numpy(), tokens))
    assert prompt.shape == (len(tokens), 4, 64) and prompt[-1, 0, 0] == tokens[-1]

@pytest.mark.parametrize('seconds, parity, codes',
                         [(None, False, 48), (None, True, 45), (1., False, 22), (2., True, 44),
                          (9., False, 48)])
def test_how_long_a_clip_may_be(xtts, monkeypatch, seconds, parity, codes):
    "21.5 codes a second, the last one begun included; coqui-tts leaves three places empty."
    monkeypatch.setattr(xtts.gpt, 'parity', parity)
    speaker = Speaker(xtts, seconds, temperature=0.5, top_k=7, top_p=0.25, repetition_penalty=2.)
    assert speaker.max_codes == codes and speaker.sampling == (0.5, 7, 0.25, 2., 0, None)

def test_the_cache_grows_while_a_text_needs_it(xtts, small, monkeypatch):
    "Same codes and states as with room for all from the start; compiled for each size that is needed."
    gpt = biased(GPT(small.replace(model={'gpt': {'layers': 1}}), xtts.gpt.text_start), -50.)
    model = SimpleNamespace(config=xtts.config, hifigan=None, gpt=gpt, tokenizer=xtts.tokenizer,
                            dvae=xtts.dvae)
    voices, made = [Voice(tf.random.stateless_normal((4, 64), (n, 0)), None) for n in range(2)], {}
    three = Sampling(temperature=0.9, top_p=1., seed=3)
    for rooms in ((), (9, 20)):
        monkeypatch.setattr(synthesis, 'ROOMS', rooms)
        speaker = made[rooms] = Speaker(model)
        assert speaker.rooms == (*rooms, 48)
        speaker.spoken = [x.numpy() for x in speaker._codes(['aa bb', 'cc'], ['en', 'en'], voices, three)]
    for a, b in zip(made[()].spoken, made[9, 20].spoken): assert np.allclose(a, b, atol=1e-4)
    assert (made[()].spoken[1] == 48).all()
    assert [trace_count(speaker._extend) for speaker in made.values()] == [0, 2]
    biased(gpt, 100.)   # now it stops at once
    codes, length, _ = speaker._codes(['aa bb', 'cc'], ['en', 'en'], voices, three)
    assert codes.shape == (2, 9) and not length.numpy().any()

@pytest.mark.parametrize('speed, length', [(1, 8), (2., 4), (0.5, 16)])
def test_twice_the_speed_is_half_the_length(speed, length):
    x = tf.reshape(tf.range(16.), (1, 8, 2))
    result = Speaker._at_speed(SimpleNamespace(speech=SimpleNamespace(speed=speed)), x)
    assert result.shape == (1, length, 2) and (result is x) == (speed == 1)

def test_a_clip_of_sound(speaker, small):
    wav = speaker('aa bb', 'en', VOICE)
    assert wav.ndim == 1 and wav.dtype == np.float32 and np.isfinite(wav).all() and 0 < len(wav) <= 48 * 1024
    assert np.array_equal(wav, speaker('AA  "bb"', 'en', VOICE)) and (len(wav) + 256) % 1024 == 0

def test_many_at_once_are_each_alone(speaker):
    voices = [synthetic_voice(0.8, p) for p in (90., 200., 150.)]
    together = speaker.mels(TEXTS, ['en'] * 3, voices)
    for mel, text, voice in zip(together, TEXTS, voices):
        [alone] = speaker.mels([text], ['en'], [voice])
        assert mel.shape == alone.shape and np.allclose(mel, alone, atol=1e-3)

def test_a_batch_sounds_as_each_text_alone(speaker, greedy):
    voices = [synthetic_voice(0.8, p) for p in (90., 200., 150.)]
    for one in (speaker, greedy):
        wavs = one.batch(TEXTS, ['en'] * 3, voices)
        for wav, text, voice in zip(wavs, TEXTS, voices, strict=True):
            alone = one(text, 'en', voice)
            assert wav.shape == alone.shape and wav.dtype == np.float32
            if one.xtts.hifigan: assert np.allclose(wav, alone, atol=1e-3)

@pytest.mark.parametrize('texts, languages, references',
                         [(['aa', 'bb'], ['en'], [VOICE, VOICE]), (['aa', 'bb'], ['en', 'en'], [VOICE])])
def test_lists_of_different_lengths_are_refused(speaker, texts, languages, references):
    with pytest.raises((ValueError, UserError), match='shorter|longer|lengths'):
        speaker.mels(texts, languages, references)

def test_a_model_that_stops_at_once_still_gives_a_clip(xtts):
    mute = Speaker(xtts)
    mute._generate = lambda text, *_: (tf.fill([len(text), 48], xtts.gpt.code_stop),
                                       tf.zeros([len(text)], tf.int32), None)
    assert np.isfinite(mute('aa', 'en', VOICE)).all()
    (mel,) = mute.mels(['aa'], ['en'], [VOICE])
    assert np.allclose(mel, xtts.dvae.decode(tf.constant([[0]]))[0],
                       atol=1e-5)   # one code, the first there is
    start, stop = xtts.gpt.code_start, xtts.gpt.code_stop
    mels = mute._mels(tf.constant([[31, start, 3, stop], [5, stop, stop, stop]]), tf.constant([3, 1]))
    for mel, codes in zip(mels, ([31, 0, 3], [5])):
        assert np.allclose(mel, xtts.dvae.decode(tf.constant([codes]))[0], atol=1e-5)


# --- listening ----------------------------------------------------------------------------------------------

def in_pieces(**values): return SpeechConfig(reference_chunk_seconds=1., **values)

@pytest.mark.parametrize('seconds, limit, samples',
                         [([2.5], 30, [22050, 22050, 11025]), ([1.3, 1.1], 30, [22050, 22050, 8820]),
                          ([2.3], 30, [22050, 22050]), ([2.34], 30, [22050, 22050, 7497]),
                          ([4.], 1.5, [22050, 11025]), ([0.6], 30, [13230])], ids=str)
def test_recordings_are_heard_end_to_end_in_pieces(xtts, seconds, limit, samples):
    "A last piece under a third of a second is left out."
    wavs = [synthetic_voice(s) for s in seconds]
    mels = reference_mels(xtts, wavs, in_pieces(reference_seconds=limit))
    assert [len(m) for m in mels] == [1 + n // 256 for n in samples]
    assert np.allclose(mels[0], reference_mels(xtts, [np.concatenate(wavs)[:22050]], in_pieces())[0])

def test_the_prompt_is_the_mean_over_the_pieces(xtts):
    wav = synthetic_voice(2.)
    halves = [heard(xtts, [w], in_pieces()).prompt for w in (wav[:22050], wav[22050:])]
    assert np.allclose(heard(xtts, [wav], in_pieces()).prompt, np.mean(halves, 0), atol=1e-5)
    assert not np.allclose(*halves, atol=1e-3)

def test_a_model_trained_here_hears_a_crop_of_each_recording(xtts):
    wavs = [synthetic_voice(0.8, 90.), synthetic_voice(2., 200.)]
    alone = [heard(xtts, [w]).prompt for w in wavs]
    assert np.allclose(heard(xtts, wavs).prompt, np.mean(alone, 0), atol=1e-5)

@pytest.mark.parametrize('limit, used',
                         [(30, [0.8, 2., 1.]), (2.8, [0.8, 2.]), (3.0, [0.8, 2.]), (3.2, [0.8, 2., 0.4]),
                          (0.5, [0.5])], ids=str)
def test_without_pieces_the_recordings_are_heard_up_to_the_limit(xtts, limit, used):
    "A rest under a third of a second is left out."
    wavs = [synthetic_voice(s, pitch) for s, pitch in ((0.8, 90.), (2., 200.), (1., 140.))]
    result = reference_mels(xtts, wavs, SpeechConfig(reference_seconds=limit))
    wanted = reference_mels(xtts, [w[:round(22050 * s)] for w, s in zip(wavs, used)], SpeechConfig())
    assert len(result) == len(used) and all(np.array_equal(a, b) for a, b in zip(result, wanted))

def test_of_each_recording_only_the_beginning_is_heard(xtts):
    wav, speech = synthetic_voice(2.), in_pieces(max_reference_seconds=1)
    assert np.allclose(heard(xtts, [wav, wav], speech).prompt,
                       heard(xtts, [wav[:22050]] * 2, speech).prompt)

def test_a_voice_needs_a_recording(xtts):
    with pytest.raises(UserError, match='at least one recording'): heard(xtts, [])

def test_the_reference_is_divided_by_the_constants_of_the_gpt(xtts, small):
    "A converted model has others there than in its DVAE; one trained here has the same."
    assert np.array_equal(xtts.gpt.mel_stats, xtts.dvae.mel_stats)
    other = XTTS(small, xtts.tokenizer, xtts.dvae)
    other.gpt.mel_stats.assign(xtts.dvae.mel_stats * 2)
    assert np.allclose(crop(other, VOICE), crop(xtts, VOICE) / 2)


# --- HiFi-GAN -----------------------------------------------------------------------------------------------

@pytest.fixture
def greedy(singer, monkeypatch):
    "The speaker with a decoder, while it takes the likeliest code."
    monkeypatch.setattr(singer, 'sampling', singer.sampling._replace(temperature=0.))
    return singer

def test_a_model_says_what_it_speaks_with(speaker, singer):
    assert (speaker.vocoder, speaker.sample_rate) == ('griffin-lim', 22050)
    assert (singer.vocoder, singer.sample_rate) == ('hifigan', 24000)

def test_sound_is_made_of_the_states_up_to_stop(singer, monkeypatch):
    voice = singer.listen(VOICE)
    made = singer._codes(['aa bb'], ['en'], [voice], Sampling())
    decoder, _ = singer.xtts.hifigan
    for most in (0, 5, len(made[0][0])):   # a clip that stops at once is one state long
        cut = made[0], tf.constant([most]), made[2]
        monkeypatch.setattr(singer, '_generate', lambda *_, cut=cut: cut)
        expected = faded(decoder(made[2][:, :most + 1], voice.vector[None]), 24000)[0]
        assert np.allclose(singer('aa bb', 'en', voice), expected, atol=1e-5), most

def test_a_decoder_in_bfloat16_sounds_nearly_the_same(singer, monkeypatch):
    voice = singer.listen(VOICE)
    made = singer._codes(['aa bb'], ['en'], [voice], Sampling())
    quick = Speaker(singer.xtts, decoder_precision='bfloat16')
    monkeypatch.setattr(Speaker, '_generate', lambda *_: made)
    assert singer.decoder is singer.xtts.hifigan[0] and quick.decoder.compute_dtype == 'bfloat16'
    a, b = (one('aa bb', 'en', voice) for one in (singer, quick))
    assert a.dtype == b.dtype and a.shape == b.shape
    assert 0 < np.square(a - b).mean() < 1e-3 * np.square(a).mean()

@pytest.mark.cpu
def test_with_int8_weights_the_states_differ_a_little(singer):
    voice, quick = singer.listen(VOICE), Speaker(singer.xtts, weights='int8')
    assert singer.gpt is singer.xtts.gpt and quick.gpt.gpt is singer.gpt
    a, b = (one._codes(['aa bb'], ['en'], [voice], Sampling(temperature=0.))[2][0].numpy()
            for one in (singer, quick))
    np.testing.assert_allclose(a[0], b[0], atol=1e-4)   # from the prefix
    assert 0 < np.square(a[1] - b[1]).mean() < 1e-2 * np.square(a[1]).mean()

@pytest.mark.cpu
def test_int8_weights_are_refused_on_a_gpu(xtts):
    device = '/job:localhost/replica:0/task:0/device:GPU:1'
    head = SimpleNamespace(kernel=SimpleNamespace(value=SimpleNamespace(device=device)))
    with pytest.raises(UserError, match='int8 is made for CPUs, and the model is on .*GPU:1; leave it'):
        int8_weights(SimpleNamespace(code_head=head))
    assert int8_weights(xtts.gpt).gpt is xtts.gpt

def test_the_vector_is_the_mean_of_the_recordings(singer):
    wavs = [synthetic_voice(0.8, 90.), synthetic_voice(2., 200.)]
    alone = [singer.listen(w).vector for w in wavs]
    assert np.allclose(np.linalg.norm(alone, axis=-1), 1, atol=1e-5) and not np.allclose(*alone, atol=1e-3)
    assert np.allclose(singer.listen(wavs).vector, np.mean(alone, 0), atol=1e-5)

def test_the_vector_colours_the_sound(singer):
    voice = singer.listen(VOICE)
    assert not np.allclose(singer('aa', 'en', voice),
                           singer('aa', 'en', voice._replace(vector=-voice.vector)), atol=1e-4)

@pytest.mark.slow
@pytest.mark.parametrize('speed', [0.5, 2.])
def test_speed_changes_the_length(singer, speaker, speed):
    for one in (singer, speaker):
        usual, other = one('aa', 'en', VOICE), Speaker(one.xtts, speed=speed)('aa', 'en', VOICE)
        assert abs(len(usual) / len(other) / speed - 1) < 0.05

def test_a_speaker_keeps_the_rates_of_its_languages(xtts):
    rates = {'en': (1., 9., 300)}
    assert Speaker(xtts, rates=rates).rates == rates and Speaker(xtts).rates == {}

def test_a_wrong_setting_is_named(xtts):
    with pytest.raises(UserError, match='speech.temperature.*-1'): Speaker(xtts, temperature=-1)
    with pytest.raises(UserError, match='did you mean "temperature"'): Speaker(xtts, temprature=1)

def test_hifigan_comes_along_when_saved(singer, tmp_path):
    singer.xtts.save(tmp_path / 'm')
    again = Speaker(XTTS.load(tmp_path / 'm'))
    assert np.array_equal(again.listen(VOICE).vector, singer.listen(VOICE).vector)
    states = tf.random.normal((1, 3, 64)), singer.listen(VOICE).vector[None]
    assert again.decoder is again.xtts.hifigan[0]
    assert np.array_equal(again.decoder(*states), singer.decoder(*states))

def test_a_part_of_hifigan_that_is_missing_is_named(with_hifigan, tmp_path):
    from xtts_nb.files import open_weights
    with open_weights(with_hifigan / 'model.safetensors') as file:
        tensors = {n: file.get_tensor(n) for n in file.keys()}
    xtts = XTTS.load(with_hifigan)
    xtts.source = tmp_path
    save_weights(tmp_path / 'model.safetensors',
                 {n: x for n, x in tensors.items() if not n.startswith('speaker/')})
    with pytest.raises(UserError, match='model.safetensors: the tensor "speaker/.*is missing'): Speaker(xtts)
