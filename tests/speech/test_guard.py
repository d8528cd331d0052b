"Faults of speech: each made to happen by forced codes, found, spoken again or trimmed; clean codes pass."
import copy
import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.bench import trace_count
from xtts_nb.data.audio import synthetic_voice
from xtts_nb.models.gpt import GPT
from xtts_nb.speech import generate as synthesis
from xtts_nb.speech.generate import Speaker
from xtts_nb.speech.voices import Voice
from xtts_nb.speech.guard import (
    GuardedSpeaker, _Rate, _code_likelihoods, _code_rates, _inspect_codes, run_rates)

DEMO = json.loads((Path(__file__).parents[1] / 'stored' / 'codes.json').read_text(encoding='utf-8'))
CLIPS = [(np.array(clip['codes']), clip['tokens'], clip['text'], _Rate(*DEMO['rates'][clip['language']]))
         for clip in DEMO['clips']]
VOICE, LIMIT = synthetic_voice(1.), 256

@pytest.mark.parametrize('clip', CLIPS, ids=[clip[2] for clip in CLIPS])
def test_a_clean_clip_passes(clip):
    codes, tokens, text, rate = clip
    assert _inspect_codes(codes, tokens, text, LIMIT, rate) == \
        _inspect_codes(codes, tokens, text, LIMIT) == (len(codes), [])

SPOKEN, TOKENS, TEXT, RATE = CLIPS[0]   # 35 codes, 19 tokens
CODES = SPOKEN.tolist()
WORD = [*CODES[:9], *CODES[10:20], 0]   # spoken again with one code less and one more
MANY = (np.arange(120) * 7 % 251).tolist()

@pytest.mark.parametrize('codes, tokens, limit, kept, found', [
    ([*CODES, *[7] * 16], TOKENS, LIMIT, 37, [{'found': 'trailing repetition', 'at': 37, 'done': 'trimmed'}]),
    ([*CODES, *[7] * 15], TOKENS, LIMIT, 50, []),
    ([*CODES, *[3, 9, 4, 8] * 4], TOKENS, 51, 37,
     [{'found': 'trailing repetition', 'at': 37, 'done': 'trimmed'}]),
    (CODES, TOKENS, 35, 35, [{'found': 'no end'}]), (CODES, TOKENS, 36, 35, []),
    ([*CODES[:20], *WORD, *CODES[20:]], TOKENS, LIMIT, 55,
     [{'found': 'repeated word', 'at': 1, 'codes': 18}]),
    (CODES[:19], TOKENS, LIMIT, 19, [{'found': 'too few codes', 'codes': 19, 'expected': 20}]),
    (CODES[:20], TOKENS, LIMIT, 20, []),
    (MANY[:88], TOKENS, LIMIT, 88, [{'found': 'too many codes', 'codes': 88, 'expected': 87}]),
    (MANY[:87], TOKENS, LIMIT, 87, []), (MANY[:53], 9, LIMIT, 53, []), (MANY[:38], 8, LIMIT, 38, []),
    (MANY[:39], 8, LIMIT, 39, [{'found': 'noise after a short text', 'codes': 39, 'expected': 38}]),
    ([], TOKENS, LIMIT, 0, [{'found': 'too few codes', 'codes': 0, 'expected': 20}])])
def test_each_fault_is_named(codes, tokens, limit, kept, found):
    assert _inspect_codes(np.array(codes, np.int32), tokens, TEXT, limit, RATE) == (kept, found)

def test_rates_of_a_cache(prepared, tmp_path):
    ratio = prepared.codes_length / prepared.text_length
    low, high = np.quantile(ratio, [.01, .99])
    longest = int(prepared.text_length.max())
    assert _code_rates(prepared.folder,
                       14) == {'en': _Rate(round(.7 * low, 3), round(1.4 * high, 3), longest)}
    assert _code_rates(prepared.folder) == {}   # 14 clips are too few
    assert run_rates(tmp_path) == {}
    for cache, rates in ((prepared.folder, _code_rates(prepared.folder, 14)), (tmp_path / 'gone', {})):
        (tmp_path / 'run.json').write_text(json.dumps({'cache': str(cache)}))
        assert run_rates(tmp_path, 14) == run_rates(tmp_path / 'best', 14) == rates
    own = _code_rates(prepared.folder, 14)['en']
    (tmp_path / 'base').mkdir()
    for based, longest in (({}, None), ({'cache': str(prepared.folder)}, own.longest)):   # released; ours
        (tmp_path / 'base/run.json').write_text(json.dumps(based))
        facts = {'cache': str(prepared.folder), 'base': str(tmp_path / 'base')}
        (tmp_path / 'run.json').write_text(json.dumps(facts))
        assert run_rates(tmp_path, 14) == {'en': own._replace(longest=longest)}

def test_likelihoods_are_those_of_the_logits(xtts):
    gpt, draw = xtts.gpt, np.random.default_rng(0)
    texts, codes = [[3, 5, 4, 6, 7], [3, 5, 7], [3, 6, 6, 6]], draw.integers(0, xtts.gpt.code_start, 9)
    prompt = Speaker(xtts).listen(VOICE).prompt
    for spoken in (codes, codes[:0]):
        found = _code_likelihoods(gpt, texts, prompt, spoken, rows=2)
        for ids, likelihood in zip(texts, found, strict=True):   # each alone, position by position
            states = gpt.states(tf.constant([ids]), tf.constant([len(ids)]), tf.constant([spoken], tf.int32),
                                tf.constant([len(spoken)]), prompt[None])[1][0]
            share = tf.nn.softmax(gpt.code_head(states)).numpy()
            expected = sum(np.log(share[i, code]) for i, code in enumerate([*spoken, gpt.code_stop]))
            assert likelihood == pytest.approx(expected, rel=1e-4)
        assert len({*found.tolist()}) == 3

@pytest.fixture
def forced(monkeypatch):
    "Each attempt gives the next codes of `attempts`, for each row; returns the calls."
    def force(*attempts):
        left, calls = iter(attempts), []
        def codes(speaker, texts, languages, voices, sampling):
            rows = next(left)
            calls.append((speaker, texts, languages, voices, sampling))
            made = np.full((len(texts), 60), 99, np.int32)
            for row, spoken in zip(made, rows, strict=True): row[:len(spoken)] = spoken
            states = np.arange(len(texts))[:, None, None] + np.full((1, 60, 2), 100. * len(calls))
            return tf.constant(made), tf.constant([*map(len, rows)], tf.int32), tf.constant(states)
        monkeypatch.setattr(Speaker, '_codes', codes)
        return calls
    return force

LONG = 'aa bb cc dd ee ff gg'   # 14 tokens
GOOD, FEW, WORSE = MANY[:40], MANY[:9], [*MANY[:9], *MANY[:9]]

@pytest.fixture(scope='module')
def guarded(xtts):
    speaker = GuardedSpeaker(xtts, rates={'en': _Rate(1.5, 4.)})
    assert len(speaker._ids(LONG, 'en')) == 14 and len(speaker._ids(LONG + ' h', 'en')) == 16
    return speaker

def speak(speaker, count, text=LONG):
    texts = [text + ' hh'[:i] for i in range(count)]
    sampling = speaker.sampling._replace(seed=5)
    codes, length, states = speaker._codes(texts, ['en'] * count, [*'abc'][:count], sampling)
    return length.numpy().tolist(), states[:, 0, 0].numpy().tolist(), codes.numpy()

def faults(speaker): return [[(f['found'], f['done']) for f in row] for row in speaker.reports]

def test_a_faulty_row_is_spoken_again_in_every_row(guarded, forced):
    "With a seed for each attempt. The first better one is kept; its fault, which is trimmed, is reported."
    calls = forced([GOOD, FEW, GOOD], [FEW, [*GOOD, *[7] * 16], GOOD])
    length, states, codes = speak(guarded, 3)
    assert length == [40, 42, 40] and states == [100, 201, 102] and codes[1, :40].tolist() == GOOD
    assert faults(guarded) == [
        [], [('too few codes', 'spoken again'), ('trailing repetition', 'trimmed')], []]
    (speaker, *_, first), (again, texts, languages, voices, sampling) = calls
    assert speaker is again is guarded and first == guarded.sampling._replace(seed=5)
    assert (texts, languages, voices) == ([LONG + ' '] * 3, ['en'] * 3, ['b'] * 3)
    assert sampling.temperature == .75 and sampling.seed.tolist() == [5 + 7919 * i for i in (1, 2, 1)]

@pytest.mark.parametrize('retries', [0, 1, 2])
def test_attempts_are_bounded_and_the_best_is_kept(xtts, forced, retries):
    speaker = GuardedSpeaker(xtts, retries=retries, rates={'en': _Rate(2., 4.)}, temperature=.5)
    calls = forced([WORSE], [FEW], [FEW])
    length, states, _ = speak(speaker, 1)
    assert len(calls) == 1 + retries and all(call[0] is speaker for call in calls)
    assert [call[-1].seed for call in calls] == [5 + 7919 * i for i in range(1 + retries)]
    assert {call[-1].temperature for call in calls} == {.5}
    left = [('too few codes', 'left')]
    if retries: assert (length, states) == ([9], [200]) and faults(speaker)[0][-1:] == left
    else: assert (length, states) == ([18], [100]) and faults(speaker) == [[('repeated word', 'left'), *left]]

@pytest.fixture
def unending(xtts, small, monkeypatch):
    "A real model with the same scores at each place: the likeliest code is never STOP, a drawn one may be."
    monkeypatch.setattr(synthesis, '_ROOMS', (4, 12))
    model = copy.copy(xtts)
    model.gpt = GPT(small.replace(model={'gpt': {'num_layers': 1}}), xtts.gpt.text_start)
    model.gpt.code_head.kernel.assign(tf.zeros_like(model.gpt.code_head.kernel))
    bias = np.zeros(model.gpt.code_stop + 1, np.float32)
    bias[:3], bias[model.gpt.code_stop] = (0.2, 0.1, 0.), 1.
    bias[7] = 1.01
    model.gpt.code_head.bias.assign(bias)
    return model

def test_a_shorter_attempt_of_the_real_loop_is_kept_beside_a_longer_one(unending):
    "Nothing is lost where the attempts of the rows have room for different numbers of codes."
    voices = [Voice(tf.zeros((4, 64)), None)] * 2
    speaker = GuardedSpeaker(unending, retries=3, rates={'en': _Rate(0.7, 9.)}, top_p=1.)
    made = speaker._codes(['aa', LONG], ['en'] * 2, voices, speaker.sampling)
    codes, length, states = (x.numpy() for x in made)
    assert codes.shape == states.shape[:2] and length[0] == 2 and length[1] >= 9
    assert codes[0, :2].tolist() == [7, 7] and (codes[1, :length[1]] < unending.gpt.code_start).all()
    assert faults(speaker) == [[('trailing repetition', 'trimmed')],
                               [('trailing repetition', 'spoken again'), ('too few codes', 'spoken again')]]
    assert len(speaker.mels(['aa', LONG], ['en'] * 2, voices)) == 2
    assert [trace_count(loop) for loop in (speaker._begin, speaker._extend)] == [1, 2]   # greedy and sampled
