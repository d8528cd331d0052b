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
from xtts_nb.speech import generate as synthesis
from xtts_nb.data.audio import synthetic_voice
from xtts_nb.config import AudioConfig, UserError
from xtts_nb.models.gpt import GPT
from xtts_nb.speech.generate import (
    Sampling, Speaker, generate, piece_seeds, _read_reference, _reference_mels, _sample_code)
from xtts_nb.speech.guard import _retry_sampling
from xtts_nb.speech.voices import Voice

TEXTS, VOICE = ['aa bb cc', 'hh', 'dd ee ff gg'], synthetic_voice(1.)

def picked(score, spoken, *settings, uniform=None):
    "A code of each row, by numbers that are spread evenly from 0 to 1."
    if uniform is None: uniform = (np.arange(len(score), dtype=np.float32) + 0.5) / len(score)
    return _sample_code(score, spoken, uniform, Sampling(*settings).tensors(len(score), 1)).numpy()

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

@pytest.mark.parametrize('uniform, code', [(0., 1), (0.4999, 1), (0.5001, 3), (1 - 2**-24, 3)])
def test_the_draw_inverts_the_distribution(uniform, code):
    "Also at its ends no code of probability 0 is drawn."
    score = np.array([[-np.inf, 0., -np.inf, 0., -np.inf]], np.float32)
    assert picked(score, np.zeros((1, 5), bool), 1., 50, 1., 1., uniform=np.float32([uniform])) == [code]

MAX = 16

@pytest.fixture(scope='module')
def inputs(xtts):
    ids = [xtts.tokenizer.encode(t, 'en') for t in TEXTS]
    width = max(map(len, ids)) + 2
    voices = [synthetic_voice(1., p) for p in (90., 150., 230.)]
    reference = np.stack(_reference_mels(xtts, voices, xtts.config.speech))
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

def test_a_limit_ends_the_loop_without_a_new_trace(endless, inputs):
    whole = speak(endless, inputs)[0]
    traces = trace_count(compiled(endless, MAX))
    for limits in ([0] * 3, [5] * 3, [MAX + 3] * 3, [0, 7, 99]):   # of each row
        codes, lengths = speak(endless, inputs, limit=tf.constant(limits))
        assert lengths.tolist() == np.minimum(limits, MAX).tolist()
        for row, all_codes, n in zip(codes, whole, lengths.tolist()):
            assert row.tolist() == [*all_codes[:n], *[endless.code_stop] * (MAX - n)]
    assert trace_count(compiled(endless, MAX)) == traces

def test_each_piece_of_a_text_has_its_own_seed():
    "Without a seed another one each time; a seed as great as the service takes has pieces and attempts too."
    pieces = lambda seed: [*islice(piece_seeds(seed), 9)]
    assert pieces(3) == pieces(3) and pieces(3)[0] == 3 and len({*pieces(3), *pieces(4)}) == 18
    assert len({*pieces(None), *pieces(None)}) == 18
    again = [_retry_sampling(Sampling(seed=seed), 2).seed for seed in pieces(2**31 - 1)]
    assert all(0 <= seed < 2**31 for seed in (*pieces(2**31 - 1), *again))

@pytest.mark.parametrize('parity, first, spoken', [(True, 'start', [2]), (False, 'other', [1, 2])])
def test_in_parity_code_1_and_start_count_as_spoken(endless, inputs, monkeypatch, parity, first, spoken):
    net = endless   # START is the likeliest by far
    monkeypatch.setattr(net, 'parity', parity)
    assert (speak(net, inputs, 2)[0][:, 0] == net.code_start).all() == (first == 'start')
    bias = np.zeros(net.code_stop + 1, np.float32)
    bias[1], bias[2] = 50., 40.   # a third of 50 is less than 40
    net.code_head.bias.assign(bias)
    assert (speak(net, inputs, 2)[0][:, :len(spoken)] == spoken).all()

def test_a_recording_is_heard_where_its_sound_begins_and_in_the_channel_that_has_it(xtts, tmp_path):
    silence, there = np.zeros(3 * 22050, np.float32), lambda name, wav: soundfile.write(
        tmp_path / name, wav, 22050, subtype='FLOAT') or _read_reference(tmp_path / name, AudioConfig(), 1.)
    late, loud = np.concatenate([silence, VOICE]), np.flatnonzero(np.abs(VOICE) > 1e-3)[0]
    for found in (there('late.wav', late), _read_reference(late, AudioConfig(), 1.)):
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
        assert len(_read_reference(tmp_path / 'long.wav', AudioConfig())) == 30 * 22050
        assert tracemalloc.get_traced_memory()[1] < 20e6   # of 106 MB as float32
    finally: tracemalloc.stop()

def heard(xtts, wavs, speech=None):
    "The voice of some recordings, as a speaker hears them."
    return Speaker(xtts, **(speech or xtts.config.speech).model_dump()).listen(wavs)

def test_the_cache_grows_while_a_text_needs_it(xtts, small, monkeypatch):
    "Same codes and states as with room for all from the start; compiled for each size that is needed."
    gpt = biased(GPT(small.replace(model={'gpt': {'num_layers': 1}}), xtts.gpt.text_start), -50.)
    model = SimpleNamespace(config=xtts.config, hifigan=None, gpt=gpt, tokenizer=xtts.tokenizer,
                            dvae=xtts.dvae)
    voices, made = [Voice(tf.random.stateless_normal((4, 64), (n, 0)), None) for n in range(2)], {}
    three = Sampling(temperature=0.9, top_p=1., seed=3)
    for rooms in ((), (9, 20)):
        monkeypatch.setattr(synthesis, '_ROOMS', rooms)
        speaker = made[rooms] = Speaker(model)
        assert speaker.rooms == (*rooms, 48)
        speaker.spoken = [x.numpy() for x in speaker._codes(['aa bb', 'cc'], ['en', 'en'], voices, three)]
    for a, b in zip(made[()].spoken, made[9, 20].spoken): assert np.allclose(a, b, atol=1e-4)
    assert (made[()].spoken[1] == 48).all()
    assert [trace_count(speaker._extend) for speaker in made.values()] == [0, 2]
    biased(gpt, 100.)   # now it stops at once
    codes, length, _ = speaker._codes(['aa bb', 'cc'], ['en', 'en'], voices, three)
    assert codes.shape == (2, 9) and not length.numpy().any()

def test_a_batch_sounds_as_each_text_alone(greedy):
    voices = [synthetic_voice(0.8, p) for p in (90., 200., 150.)]
    for wav, text, voice in zip(greedy.batch(TEXTS, ['en'] * 3, voices), TEXTS, voices, strict=True):
        alone = greedy(text, 'en', voice)
        assert wav.dtype == np.float32 and wav.shape == alone.shape and np.allclose(wav, alone, atol=1e-3)

# --- HiFi-GAN -----------------------------------------------------------------------------------------------

@pytest.fixture
def greedy(singer, monkeypatch):
    "The speaker with a decoder, while it takes the likeliest code."
    monkeypatch.setattr(singer, 'sampling', singer.sampling._replace(temperature=0.))
    return singer
