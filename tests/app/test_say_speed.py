"The benchmark of speaking: what an arm counts, and when its first sound is there."
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest

from xtts_nb.app import speed as page
from xtts_nb.app.speed import say_speed
from xtts_nb.bench import Arm, Comparison


def test_rows():
    "Two rounds of seconds per code; a code lasts 0.5 s; the first call is not counted."
    times = {'naive': .4, 'float32': .1, 'stream': .2}
    timed = Comparison([Arm(name, [s, s]) for name, s in times.items()], 'clips_per_s')
    firsts = {'naive': [9., 1., 3.], 'float32': [9., .5, .5], 'stream': [9., .01, .03]}
    rows = page._say_rows(timed, firsts, 0.5)
    assert [list(row.values()) for row in rows] == [
        ['naive', 2.5, 0.8, 2000., 1., 0.], ['float32', 10., 0.2, 500., 4., 0.],
        ['stream', 5., 0.4, 20., 2., 0.]]
    assert list(rows[0]) == ['name', 'tokens_per_s', 'rtf', 'first_sound_ms', 'ratio', 'spread']

@pytest.fixture(scope='module')
def spoken(small):
    "One warm-up and two rounds of every arm, and of a peer that stands in for coqui-tts."
    config, seen = small.replace(model={'gpt': {'layers': 1, 'conditioning_layers': 1}}), {}
    with pytest.MonkeyPatch.context() as m:
        def compare(arms, unit, rounds, progress):
            assert unit == 'clips_per_s'
            seen['made'] = {name: [run() for _ in range(rounds + 1)] for name, run in arms.items()}
            progress(1, 1)
            return Comparison([Arm(name, [1.]) for name in arms], unit)
        def others(ids, stack):
            seen['asked'] = len(ids)
            return {name: lambda streamed=streamed: {'codes': 22, 'first_s': 7. - streamed}
                    for streamed, name in enumerate(['coqui', 'coqui_stream'])}
        def rows(timed, firsts, seconds):
            seen.update(firsts=firsts, seconds=seconds)
            return [arm.name for arm in timed.arms]
        for name, stand_in in {'compare': compare, '_say_rows': rows}.items():
            m.setattr(page, name, stand_in)
        m.setattr(page, 'ARM_SECONDS', 0)
        told = []
        rows, more = say_speed(config, 22, 2, others, lambda *done: told.append(done))
    return seen | {'rows': rows, 'told': told} | more

@pytest.mark.slow
def test_each_arm_makes_its_codes(spoken):
    each = {'naive': 22, 'float32': 22, 'bfloat16': 22, 'int8': 22, 'batch8': 176, 'batch8_int8': 176,
            'stream': 110, 'coqui': 22, 'coqui_stream': 22}
    assert spoken['made'] == {name: [n] * 3 for name, n in each.items()} and spoken['rows'] == list(each)
    assert spoken['asked'] == 32
    assert spoken['told'] == [(1, 1)]
    assert spoken['seconds'] == pytest.approx(1024 / 22050)

@pytest.mark.slow
def test_the_codes_are_compared_with_the_first_arm(spoken):
    same = spoken['same_codes']
    assert list(same) == ['float32', 'bfloat16', 'int8', 'batch8', 'batch8_int8']
    assert same['float32'] == same['batch8'] == 1 and 0 < same['bfloat16'] <= 1
    assert 0 < same['int8'] == same['batch8_int8'] <= 1

@pytest.mark.slow
def test_the_first_sound(spoken):
    "That of a stream comes after 8 of 110 codes, that of a batch before the others of its texts."
    firsts = spoken['firsts']
    assert {len(seconds) for seconds in firsts.values()} == {3} and min(map(min, firsts.values())) > 0
    assert firsts['coqui'] == [7.] * 3 and firsts['coqui_stream'] == [6.] * 3
    assert len(spoken['piece_ms']) == 7 and min(spoken['piece_ms']) > 0   # 8, then 16, ..., then the last 6
    assert median(firsts['stream'][1:]) < sum(spoken['piece_ms']) / 1e3

def test_what_an_arm_counts(small, monkeypatch):
    "Without a model: the codes of all its texts, and the share that is as in the first arm."
    arm = lambda share: lambda **given: (np.arange(12).reshape(2, 6) * share, None, np.zeros((2, 6, 3)))
    monkeypatch.setattr(page, '_say_gpts', lambda config: {'float32': SimpleNamespace(
        cfg=config.model.gpt, text_start=2)})
    arms = {'naive': arm(1), 'float32': arm(1), 'bfloat16': arm(2)}
    monkeypatch.setattr(page, '_say_arms', lambda *_: arms)
    monkeypatch.setattr(page, '_streamed', lambda *_: lambda: iter([1, 2, 3]))
    monkeypatch.setattr(page, 'HiFiGAN', lambda config: None)
    monkeypatch.setattr(page, 'in_precision', lambda *_: lambda states, vector: states)
    monkeypatch.setattr(page, 'ARM_SECONDS', 0)
    made = {}
    def compare(arms, unit, rounds, progress):
        made.update({name: [run() for _ in range(rounds)] for name, run in arms.items()})
        return Comparison([Arm(name, [.5]) for name in arms], unit)
    monkeypatch.setattr(page, 'compare', compare)
    other = lambda ids, stack: {'other': lambda: {'codes': len(ids), 'first_s': 7.}}
    rows, more = say_speed(small, 6, 2, other)
    assert made == {'naive': [12] * 2, 'float32': [12] * 2, 'bfloat16': [12] * 2, 'stream': [30] * 2,
                    'other': [32] * 2}
    assert more['same_codes'] == {'float32': 1., 'bfloat16': 1 / 6} and len(more['piece_ms']) == 2
    assert rows[-1]['first_sound_ms'] == 7000. and rows[-1]['tokens_per_s'] == 2.

def test_a_short_call_is_repeated(monkeypatch):
    monkeypatch.setattr(page, 'ARM_SECONDS', 0.02)
    calls = []
    def run():
        calls.append(1)
        return 3
    assert page._repeated(run)() == 3 * len(calls) and len(calls) > 1
    monkeypatch.setattr(page, 'ARM_SECONDS', 0)
    assert page._repeated(run)() == 3

def test_a_deep_model_is_not_spoken_naively(small, monkeypatch):
    monkeypatch.setattr(page, 'whole_prefix', lambda gpt: print)
    for layers, first in ((12, 'naive'), (13, 'float32')):
        config = small.replace(model={'gpt': {'layers': layers}})
        assert next(iter(page._say_arms(config, dict.fromkeys(('float32', 'bfloat16', 'int8')), 4))) == first

def test_all_arms_get_the_same_first_text_and_weights(small):
    gpts = page._say_gpts(small)
    assert [gpt.compute_dtype for gpt in gpts.values()] == ['float32', 'bfloat16', 'float32']
    assert gpts['int8'].gpt is gpts['float32']
    variables = (gpts[name].variables for name in ('float32', 'bfloat16'))
    for a, b in zip(*variables): np.testing.assert_array_equal(a, b)
    assert all(gpt.code_head.bias.numpy()[gpt.code_stop] < -9e3 for gpt in gpts.values())
    eight = page._say_inputs(gpts['float32'], 8, 6)
    assert eight['text'].shape == (8, 6) and (eight['text_length'].numpy() == 6).all()
    assert len(np.unique(eight['text'], axis=0)) == 8
    assert eight['prompt'].shape == (8, small.model.gpt.prompt_latents, small.model.gpt.width)
    assert eight['text'].numpy().min() > gpts['float32'].text_start
