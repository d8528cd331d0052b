"The benchmark of speaking: what an arm counts, when its first sound is there, and what coqui-tts is asked."
import sys
from contextlib import nullcontext
from statistics import median
from unittest.mock import call, MagicMock

import numpy as np
import pytest

from xtts_nb.app import speech_speed as page
from xtts_nb.app.speech_speed import say_speed
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
        def peer(python, config, ids, codes, streamed):
            seen.setdefault('asked', []).append((python, len(ids), codes, streamed))
            return nullcontext(lambda: {'codes': codes, 'first_s': 7. - streamed})
        def rows(timed, firsts, seconds):
            seen.update(firsts=firsts, seconds=seconds)
            return [arm.name for arm in timed.arms]
        for name, stand_in in {'compare': compare, 'coqui_speech': peer, '_say_rows': rows}.items():
            m.setattr(page, name, stand_in)
        m.setattr(page, 'ARM_SECONDS', 0)
        told = []
        rows, more = say_speed(config, 22, 2, 'python', lambda *done: told.append(done))
    return seen | {'rows': rows, 'told': told} | more

def test_each_arm_makes_its_codes(spoken):
    each = {'naive': 22, 'float32': 22, 'bfloat16': 22, 'int8': 22, 'batch8': 176, 'batch8_int8': 176,
            'stream': 110, 'coqui': 22, 'coqui_stream': 22}
    assert spoken['made'] == {name: [n] * 3 for name, n in each.items()} and spoken['rows'] == list(each)
    assert spoken['asked'] == [('python', 32, 22, False), ('python', 32, 22, True)]
    assert spoken['told'] == [(1, 1)]
    assert spoken['seconds'] == pytest.approx(1024 / 22050)

def test_the_codes_are_compared_with_the_first_arm(spoken):
    same = spoken['same_codes']
    assert list(same) == ['float32', 'bfloat16', 'int8', 'batch8', 'batch8_int8']
    assert same['float32'] == same['batch8'] == 1 and 0 < same['bfloat16'] <= 1
    assert 0 < same['int8'] == same['batch8_int8'] <= 1

def test_the_first_sound(spoken):
    "That of a stream comes after 8 of 110 codes, that of a batch before the others of its texts."
    firsts = spoken['firsts']
    assert {len(seconds) for seconds in firsts.values()} == {3} and min(map(min, firsts.values())) > 0
    assert firsts['coqui'] == [7.] * 3 and firsts['coqui_stream'] == [6.] * 3
    assert len(spoken['piece_ms']) == 7 and min(spoken['piece_ms']) > 0   # 8, then 16, ..., then the last 6
    assert median(firsts['stream'][1:]) < sum(spoken['piece_ms']) / 1e3

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

@pytest.fixture
def coqui(monkeypatch):
    "Stands in for coqui-tts and PyTorch."
    for name in ('torch', 'TTS', 'TTS.tts', 'TTS.tts.configs', 'TTS.tts.configs.xtts_config',
                 'TTS.tts.models', 'TTS.tts.models.xtts'): monkeypatch.setitem(sys.modules, name, MagicMock())
    return sys.modules['TTS.tts.models.xtts']

@pytest.mark.parametrize('streamed', [False, True])
def test_what_coqui_is_asked(coqui, streamed):
    model, torch = coqui.Xtts.return_value, sys.modules['torch']
    model.inference.return_value = {'gpt_latents': np.zeros((1, 22, 8))}
    model.inference_stream.return_value = [np.zeros(20 * 1114), np.zeros(2 * 1115)]
    model.gpt.mel_head.bias.data = np.zeros(1026)
    voice = object(), object()
    torch.randn.side_effect = voice
    answer = next(page._coqui_speech(2, 30, 1024, 16, 6681, [5, 6], 22, streamed))
    assert answer['codes'] == 22 and answer['first_s'] > 0
    sizes = coqui.XttsArgs.call_args.kwargs
    assert sizes['gpt_stop_audio_token'] == 1025 and sizes['decoder_input_dim'] == 1024
    names = 'layers', 'n_model_channels', 'n_heads', 'number_text_tokens'
    assert [sizes[f'gpt_{name}'] for name in names] == [30, 1024, 16, 6681]
    assert model.tokenizer.encode('text', 'en') == [5, 6] and model.gpt.max_gen_mel_tokens == 22
    assert np.flatnonzero(model.gpt.mel_head.bias.data).tolist() == [1025]
    torch.set_num_threads.assert_called_once_with(2)
    assert torch.randn.call_args_list == [call(1, 32, 1024), call(1, 512, 1)]
    asked = model.inference_stream if streamed else model.inference
    assert asked.call_args.args == ('text', 'en', *voice)

def test_coqui_gets_our_sizes(small, monkeypatch):
    monkeypatch.setattr(page, 'step_peer', lambda python, main, **sizes: (python, main, sizes))
    gpt = small.model.gpt
    assert page.coqui_speech('python', small, [1, 2], 9, True) == ('python', page._coqui_speech, dict(
        layers=gpt.layers, width=gpt.width, heads=gpt.heads, vocabulary=gpt.text_tokens, ids=[1, 2], codes=9,
        streamed=True))

def test_the_command(ran, behind, bars):
    rows, more = [{'name': 'naive', 'tokens_per_s': 3.}], {'same_codes': {'float32': 1.}, 'piece_ms': [1.]}
    measured, kept = behind('app.speech_speed.say_speed', (rows, more)), behind('app.cli_speak.write_record')
    done = ran('bench say')
    assert done.out.startswith('tiny, GPT 4 x 192, 64 codes') and not kept
    assert 'bench say: 5 rounds, or fewer in about 5 minutes' in done.err
    assert bars == [('start', {}), ('measure', 0, 1, 'compiling'), ('measure', 1, 2)]
    about = {'model': 'xtts_v2, GPT 30 x 1024, 64 codes for each text', **more}
    done = ran('bench say --preset xtts_v2 --rounds 2 --coqui-python other/python --record --json')
    assert done.json == {'rows': rows} | about
    assert kept == [{'page': 'say_full', 'rows': rows, 'notes': about}]
    assert [(c['config'].model.gpt.layers, c['codes'], c['rounds'], str(c['coqui_python']))
            for c in measured] == [(4, 64, 5, 'None'), (30, 64, 2, 'other/python')]
    done = ran('bench say --coqui-python other/python')
    assert done.code == 2 and 'compare with --preset xtts_v2' in done.err
    done = ran('bench say --preset large')
    assert done.code == 2 and 'no preset "large"' in done.err and len(measured) == 2
    assert ran('bench say --record').code == 0 and kept[1]['page'] == 'say'
