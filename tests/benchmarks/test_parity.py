"Every stage against the stored results of coqui-tts for the same small checkpoint; PyTorch is not needed."
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import coqui_toy
from make_parity_data import utterance
from xtts_nb.models import xtts as model
from benchmarks import parity
from xtts_nb.config import AudioConfig, UserError
from xtts_nb.models.xtts import XTTS
from xtts_nb.speech.generate import reference_mels


@pytest.fixture
def seen(monkeypatch) -> dict:
    "The shape of what is compared, stage by stage."
    shapes, real = {}, parity.compare_stage
    def spy(stage, ours, *rest):
        shapes[stage] = np.shape(ours)
        return real(stage, ours, *rest)
    monkeypatch.setattr(parity, 'compare_stage', spy)
    return shapes


def test_features(toy_inputs, theirs, toy_xtts, all_ok):
    rows = parity.feature_parity(toy_inputs, theirs, toy_xtts.config)
    all_ok(rows)
    assert len(rows) == 4


@pytest.mark.slow
def test_dvae(toy_inputs, theirs, toy_xtts, all_ok):
    all_ok(parity.dvae_parity(toy_xtts.dvae, toy_inputs, theirs))


@pytest.mark.slow
def test_gpt(toy_inputs, theirs, toy_xtts, all_ok, seen):
    "A STOP behind each text and four behind the codes count."
    all_ok(parity.gpt_parity(toy_xtts.gpt, toy_inputs, theirs))
    tokens = toy_xtts.config.model.gpt.text_tokens
    assert seen['text logits'] == (21 + 9 + 14 + 3, tokens)
    assert seen['code logits'] == (40 + 17 + 33 + 3 * 4, 66)


def test_latents(toy_inputs, theirs, toy_xtts, all_ok, monkeypatch):
    settings = []
    record = lambda *x: settings.append(x[2]) or reference_mels(*x)
    monkeypatch.setattr(parity, 'reference_mels', record)
    all_ok(parity.latents_parity(toy_xtts, toy_inputs, theirs))
    s = settings[0]
    assert (s.reference_seconds, s.reference_chunk_seconds) == (30, 4)   # as for coqui-tts


@pytest.mark.slow
def test_voice(toy, toy_inputs, theirs, toy_xtts, all_ok):
    rows = parity.voice_parity(toy, toy_xtts.config, toy_inputs, theirs)
    all_ok(rows)
    assert [r['stage'] for r in rows] == ['speaker embedding, clip 0', 'HiFi-GAN waveform']


@pytest.mark.slow
def test_greedy(toy_inputs, theirs, toy_xtts, all_ok):
    all_ok(parity.greedy_parity(toy_xtts.gpt, toy_inputs, theirs))


def test_greedy_decoding_makes_200_codes_of_the_first_text(toy_inputs, theirs, monkeypatch):
    "Of a reference of any length 300 frames are used."
    calls = []
    def generate(gpt, text, length, prompt, most, **options):
        calls.append((text.shape, prompt.shape, most, options))
        return tf.constant([[7, 8, 9, 9]]), None, None
    monkeypatch.setattr(parity, 'generate', generate)
    long = theirs | {'reference_mel_0': np.ones((1, 80, 400), np.float32),
                     'greedy_plain': np.array([[7, 8, 9]]),
                     'greedy_penalised': np.array([[7, 8, 8]])}
    rows = parity.greedy_parity(SimpleNamespace(conditioning=lambda mel: mel), toy_inputs, long)
    assert calls == [((1, 21), (1, 300, 80), 200, dict(temperature=0, repetition_penalty=p))
                     for p in (1., 5.)]
    assert [r['ok'] for r in rows] == [True, False]
    with pytest.raises(ZeroDivisionError):
        stop = SimpleNamespace(init=lambda mel: 1 / (mel.shape[1] - 300))
        parity.gpt_parity(SimpleNamespace(conditioning=stop), toy_inputs, long)


@pytest.mark.slow
def test_a_whole_utterance(toy_xtts, all_ok):
    "Two recordings and a sentence in, sound out."
    with np.load(Path(__file__).parents[1] / 'stored' / 'utterance.npz') as file: theirs = dict(file)
    rows = parity.utterance_parity(toy_xtts, utterance(), theirs)
    all_ok(rows)
    seconds = len(theirs['utterance_wav']) / 24000
    assert rows[-1]['note'] == f"{len(theirs['utterance_states'][0])} codes, {seconds:.2f} s"


@pytest.mark.slow
def test_habits_show_without_parity(toy, toy_inputs, theirs):
    "Without `parity`, the mask of the text's STOP and the number of STOPs give another loss."
    default = XTTS.load(toy)
    parts = model.token_losses(default.gpt, parity.gpt_batch(toy_inputs, theirs))
    ours = {name: float(parts[f'{name}_loss'] / parts[f'{name}_count']) for name in ('text', 'code')}
    assert abs(ours['code'] / theirs['code_loss'] - 1) > 1e-3
    assert int(parts['code_count']) == sum(toy_inputs['code_length'] + 1)


@pytest.mark.slow
def test_a_changed_weight_is_seen(toy_inputs, theirs, toy_xtts):
    kernel = toy_xtts.gpt.blocks[1].expand.kernel
    before = kernel.numpy()
    kernel.assign(before * 1.01)
    rows = parity.gpt_parity(toy_xtts.gpt, toy_inputs, theirs)
    kernel.assign(before)
    assert not next(r for r in rows if r['stage'] == 'code logits')['ok']


# --- comparing ---------------------------------------------------------------------------------------------

A, B, C = parity.compare_stage, parity.compare_mel, parity.compare_codes
CELLS = np.zeros(1000)

def cells(*values): return np.r_[values, CELLS[len(values):]]

@pytest.mark.parametrize('ask, ours, theirs, more, expected', [
    (A, [2., 4.], [2., 5.], (), dict(max_abs=1, max_rel=0.2, ok=False)),
    (A, [2., 4.], [2., -5.], (), dict(max_abs=9, max_rel=1.8, ok=False)),
    (A, [1.25], [1.], (0.25,), dict(max_abs=0.25, max_rel=0.25, ok=True)),
    (A, [1.], [1.25], (0.19,), dict(max_rel=0.2, ok=False)),
    (A, [1 + 9e-5], [1.], (), dict(ok=True)), (A, [1 + 11e-5], [1.], (), dict(ok=False)),
    (A, [1e-13], [0.], (), dict(max_rel=0.1, ok=False)),
    (A, np.ones(3), np.ones(4), (), dict(ok=False, max_abs=None, max_rel=None, note='shape (3,), not (4,)')),
    (B, CELLS, CELLS, (), dict(ok=True, max_abs=0, note='100.000% within 1e-4')),
    (B, CELLS + 1e-4, CELLS, (), dict(ok=True)),
    (B, CELLS, CELLS + 1.1e-4, (), dict(ok=False, note='0.000% within 1e-4')),
    (B, cells(4e-4), CELLS, (), dict(ok=True, note='99.900% within 1e-4')),
    (B, cells(4e-4, 4e-4), CELLS, (), dict(ok=False)),
    (B, cells(5e-4), CELLS, (), dict(ok=True)), (B, cells(6e-4), CELLS, (), dict(ok=False)),
    (B, CELLS, CELLS[:3], (), dict(ok=False, note='shape (1000,), not (3,)')),
    (C, [1, 2, 3, 4], [1, 2, 3, 3], (), dict(ok=False, note='75.00% of 4 the same, 3 different ones')),
    (C, [1, 2, 3, 4], [1, 2, 3, 3], (0.75,), dict(ok=True)),
    (C, [1, 2, 3, 4], [1, 2, 3, 3], (0.76,), dict(ok=False)),
    (C, [1, 2], [1, 2], (), dict(ok=True)),
    (C, [1, 2], [1], (), dict(ok=False, note='shape (2,), not (1,)'))])
def test_what_counts_as_equal(ask, ours, theirs, more, expected):
    row = ask('x', ours, theirs, *more)
    found = {k: pytest.approx(v) if isinstance(v, float) else v for k, v in row.items() if k in expected}
    assert found == expected and row['stage'] == 'x'


def test_the_rows_as_a_table():
    rows = [A('a', [1.5], [2.]), A('b', [1], [1, 2]), C('c', [3], [3])]
    assert parity.parity_markdown({'rows': rows}).splitlines() == [
        '| stage | largest difference | relative | ok | |', '|---|---|---|---|---|',
        '| a | 5.0e-01 | 2.5e-01 | no |  |',
        '| b |  |  | no | shape (1,), not (2,) |',
        '| c | 0.0e+00 | 0.0e+00 | yes | 100.00% of 1 the same, 1 different ones |']


# --- the side of coqui-tts ----------------------------------------------------------------------------------

class Tensor(np.ndarray):
    "An array with the methods of a tensor that these functions call."
    def transpose(self, a, b): return self.swapaxes(a, b)
    def detach(self): return self
    def numpy(self): return np.asarray(self)

def tensor(*shape, start=0):
    return (start + np.arange(np.prod(shape), dtype=np.float32)).reshape(shape).view(Tensor)

def same(a, b):
    "Of settings, arrays and lists of them."
    if isinstance(a, dict): return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)): return len(a) == len(b) and all(map(same, a, b))
    return np.shape(a) == np.shape(b) and bool(np.all(a == b))

@pytest.fixture
def calls(monkeypatch) -> dict:
    "Stands for coqui-tts and PyTorch; the arguments of each call by the name of what is called."
    recorded = {}
    def call(name, result=None):
        def called(*args, **settings):
            recorded.setdefault(name, []).append((args, settings))
            return result(*args) if callable(result) else result
        return called
    def module(name, **held):
        made = ModuleType(name)
        vars(made).update(held)
        monkeypatch.setitem(sys.modules, name, made)
        return made
    hooks = {}
    head = lambda name: SimpleNamespace(register_forward_hook=lambda hook: hooks.__setitem__(name, hook))
    def forward(*args):
        for name, hook in hooks.items(): hook(None, None, tensor(2, start=len(name)))
        return tensor(1), tensor(1, start=1), tensor(1, start=2)
    class GPT(SimpleNamespace):
        def __call__(self, *args, **settings): return call('gpt', forward)(*args, **settings)
    encoder = SimpleNamespace(torch_spec=call('torch_spec', lambda low: np.zeros((1, 2, 3)).view(Tensor)),
                              forward=call('speaker', tensor(1, 4)))
    class Decoder(SimpleNamespace):
        def __call__(self, *args, **settings): return call('decoder', tensor(1, 1, 9))(*args, **settings)
    settings = dict(max_ref_len=5, gpt_cond_len=6, gpt_cond_chunk_len=7, repetition_penalty=8.)
    config = SimpleNamespace(load_json=call('load_json'), **settings)
    gpt = GPT(conditioning_encoder=call('conditioning', tensor(1)),
              get_style_emb=call('style', tensor(1, 2, 3)),
              text_head=head('text'), mel_head=head('mel'), generate=call('generate', tensor(1, 5)))
    xtts = SimpleNamespace(gpt=gpt, hifigan_decoder=Decoder(speaker_encoder=encoder),
                           mel_stats=tensor(80, start=1), config=config,
                           load_checkpoint=call('load_checkpoint'), eval=call('eval'),
                           get_gpt_cond_latents=call('latents', tensor(1)),
                           get_conditioning_latents=call('listen', (tensor(1), tensor(2))),
                           inference=call('inference', {'gpt_latents': tensor(1, 2), 'wav': tensor(9)}))
    files = coqui_toy.tensors(coqui_toy.config(small=True))
    dvae = SimpleNamespace(load_state_dict=call('load_state_dict'), eval=call('eval'),
                           get_codebook_indices=call('codes', tensor(3)),
                           decode=call('decode', [tensor(1, 80, 8), None]))
    stats = tensor(80, start=2)
    module('torch', load=call('load', lambda path: files['dvae.pth'] if 'dvae' in path else stats),
           ones=np.ones, log=np.log,
           cat=np.concatenate, from_numpy=lambda x: np.asarray(x).view(Tensor), inference_mode=nullcontext)
    functional = SimpleNamespace(resample=call('resample', lambda wav, a, b: wav[:, ::2]))
    module('torchaudio', functional=functional)
    for name in ('TTS', 'TTS.tts', 'TTS.tts.layers', 'TTS.tts.layers.tortoise', 'TTS.tts.layers.xtts',
                 'TTS.tts.configs'): module(name)
    mel = lambda wav, *_: tensor(1, 80, 310)
    module('TTS.tts.layers.tortoise.arch_utils',
           TorchMelSpectrogram=call('TorchMelSpectrogram', lambda: call('code_mel', mel)))
    xtts_module = module('TTS.tts.models.xtts', wav_to_mel_cloning=call('reference_mel', mel),
                         Xtts=SimpleNamespace(init_from_config=call('init', xtts)))
    module('TTS.tts.models', xtts=xtts_module)
    module('TTS.tts.layers.xtts.dvae', DiscreteVAE=call('DiscreteVAE', lambda: dvae))
    module('TTS.tts.layers.xtts.tokenizer', VoiceBpeTokenizer=lambda path: None)
    module('TTS.tts.configs.xtts_config', XttsConfig=lambda: config)
    return recorded

@pytest.mark.slow
def test_the_calls_of_coqui(calls, toy_inputs, tmp_path):
    "The front end of our settings, the sizes of the DVAE from its tensors, the calls that our rows repeat."
    x = toy_inputs | utterance() | {'wav_1': np.ones(50, np.float32), 'sentences': np.array('[]')}
    np.savez(tmp_path / 'inputs.npz', **x)
    (names,) = parity._coqui_main('there', tmp_path / 'inputs.npz', tmp_path / 'outputs.npz')
    with np.load(tmp_path / 'outputs.npz') as file: made = dict(file)
    assert {*names} == {*made} - {'texts', 'mel_stats'} and str(made['texts']) == '[]'
    assert len(made['mel_stats']) == 80
    first = lambda name: calls[name][0][0]
    a, d, both = AudioConfig(), coqui_toy.config(small=True).model.dvae, (x['wav_0'], x['wav_1'])
    assert same([args for args, _ in calls['resample']], [(w[None], 22050, 16000) for w in both])
    assert calls['TorchMelSpectrogram'] == [((), dict(mel_norm_file=None, sampling_rate=22050))] * 2
    front = dict(mel_norms=np.ones(80), n_fft=a.reference_n_fft, hop_length=a.hop_length,
                 win_length=a.win_length, power=2,
                 normalized=False, sample_rate=a.sample_rate, f_min=0, f_max=a.f_max, n_mels=a.n_mels)
    assert same(calls['reference_mel'], [((w[None],), front) for w in both])
    assert np.allclose(made['speaker_mel_0'], np.log(1e-6))
    assert same(calls['speaker'], [((w[None, ::2],), dict(l2_norm=True)) for w in both])
    mel, stats = tensor(1, 80, 310), tensor(80, start=2)[:, None]
    assert calls['load'] == [((f'there/{name}.pth',), dict(weights_only=True))
                             for name in ('dvae', 'mel_stats')]
    assert calls['DiscreteVAE'] == [((), dict(
        channels=80, normalization=None, positional_dims=1, num_tokens=d.codes, codebook_dim=d.codebook_dim,
        hidden_dim=d.hidden,
        num_resnet_blocks=d.resnet_blocks, kernel_size=3, num_layers=2, use_transposed_convs=False))]
    assert calls['load_state_dict'][0][1] == {'strict': False}
    assert same(first('codes'), [(mel / stats)[:, :, :308]]) and same(first('decode'), [x['codes'][:1]])
    assert made['dvae_mel'].shape == (1, 80, 8)
    mel = mel / tensor(80, start=1)[:, None]
    assert same(first('conditioning'), [mel[:, :, :300]])
    assert same([args for args, _ in calls['style']], [[mel[:, :, :300]]] * 3)
    assert same(calls['latents'], [((x['wav_0'][None], 22050), dict(length=30, chunk_length=4))])
    lengths = x['text'], x['text_length'], x['codes'], x['code_length'] * 1024
    thirds = np.concatenate([mel[:, :, i:i + 103] for i in (0, 103, 206)])[:, None]
    assert same(calls['gpt'], [(lengths, dict(cond_mels=thirds))])
    losses = [float(made[k][0]) for k in ('text_loss', 'code_loss', 'text_logits', 'code_logits')]
    assert losses == [0, 1, 4, 3]
    greedy = dict(do_sample=False, num_beams=1, max_new_tokens=200, output_attentions=False)
    assert same(calls['generate'], [((tensor(1, 2, 3).transpose(1, 2), x['text'][:1]),
                                     greedy | dict(repetition_penalty=p))
                                    for p in (1., 5.)])
    assert calls['listen'] == [((['reference_0', 'reference_1'],),
                                dict(max_ref_length=5, gpt_cond_len=6, gpt_cond_chunk_len=7))]
    (args, options), = calls['inference']
    assert same(args, (x['sentence'], 'en', tensor(1), tensor(2))) and options == dict(
        do_sample=False, top_p=None, top_k=None, temperature=None, repetition_penalty=8., max_new_tokens=16)
    load = sys.modules['TTS.tts.models.xtts'].load_audio
    assert load('reference_0', 22050).shape == (1, len(x['reference_0']))
    assert calls['load_checkpoint'][0][1] == dict(checkpoint_dir='there', eval=True, strict=True)
    assert same(calls['decoder'], [((x['latents'],), dict(g=tensor(1, 4)[:, :, None]))])


@pytest.mark.parametrize('languages, chosen',
                         [(['en', 'de'], 'en'), (['fr', 'en'], 'en'), (['fr', 'de'], 'fr')])
def test_the_sentence_is_in_a_language_of_the_model(languages, chosen):
    found = parity.utterance_inputs([[1], [2]], languages)
    assert found['language'] == chosen and found['most_codes'] == 200 and found['reference_1'].tolist() == [2]


# --- all stages ---------------------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize('clips, ok', [(None, True), (['a.wav', 'b.wav'], False)])
def test_all_stages_in_turn(toy, monkeypatch, clips, ok):
    "Without clips two synthetic voices, of 9 s and 2.3 s, are compared."
    given, lines = [], []
    monkeypatch.setattr(parity, 'load_audio',
                        lambda name: np.ones(7 * 22050 if name == 'a.wav' else 9, np.float32))
    monkeypatch.setattr(parity, 'from_coqui', lambda there, out: out.symlink_to(toy))
    monkeypatch.setattr(parity, 'coqui_outputs', lambda *x: given.append(x) or {'texts': '[1]'})
    for name in ('feature', 'voice', 'dvae', 'gpt', 'latents', 'greedy', 'utterance', 'text'):
        rows = lambda *_, name=name: [{'stage': name, 'ok': ok or name != 'voice'}]
        monkeypatch.setattr(parity, f'{name}_parity', rows)
    result = parity.parity('there', 'python', clips, listen=lines.append if clips else None)
    assert [r['stage'] for r in result['rows']] == [
        'text', 'feature', 'dvae', 'gpt', 'latents', 'voice', 'greedy', 'utterance'] and result['ok'] is ok
    assert result['model'] == 'GPT of 2 layers x 64' and (lines == []) == (clips is None)
    samples = [len(given[0][2][f'wav_{i}']) for i in (0, 1)]
    assert samples == pytest.approx([7 * 22050, 9] if clips else [9 * 22050, 2.3 * 22050], abs=1)


@pytest.mark.slow
def test_a_first_clip_under_seven_seconds_is_refused(monkeypatch):
    monkeypatch.setattr(parity, 'load_audio', lambda name: np.ones(7 * 22050 - 1, np.float32))
    with pytest.raises(UserError, match='a.wav: lasts 7.0 s; give a first clip of at least 7 s'):
        parity.parity('there', 'python', ['a.wav'])
