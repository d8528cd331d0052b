"Steps beside those of other libraries: only the other library is stubbed."
import sys
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import gpt2, step
from benchmarks.gpt2 import PLAIN_ARMS, TORCH_ARMS, gpt2_speed, plain_gpt2
from xtts_nb.config import UserError

pytestmark = pytest.mark.slow


def slow_steps(threads, layers, width, heads, vocabulary, batch, tokens, mode):
    "Stands in for the steps of PyTorch: 30 ms each, the loss 7 or 0; other sizes are an error."
    import time
    if (layers, width, batch, tokens) != (1, 64, 4, 8) or threads < 0:
        raise ValueError(f'{layers} {width} {batch} {tokens}')
    while True:
        time.sleep(0.03)
        yield 7. * (mode == 'torch')

def wrong_steps(mode, **sizes):
    raise ValueError('no such mode ' + mode)
    yield

@pytest.fixture(scope='module')
def quick(small): return small.replace(model={'gpt': {'layers': 1, 'conditioning_layers': 1}})

@pytest.fixture
def one_arm(small, monkeypatch):
    "Settings of one block, and one mode of ours; `one_arm` compares it with the steps in another process."
    monkeypatch.setattr(gpt2, 'PLAIN_ARMS', {'graph': PLAIN_ARMS['graph']})
    config = small.replace(model={'gpt': {'layers': 1}})
    def compare(steps, rounds=3):
        monkeypatch.setattr(gpt2, '_torch_steps', steps)
        return gpt2_speed(config, 8, rounds=rounds, torch_python=steps and sys.executable)
    return compare

def test_a_peer_s_answer_is_one_step_whatever_its_loss(one_arm):
    rows = {row['name']: row for row in one_arm(slow_steps)}
    assert set(rows) == {'graph', *TORCH_ARMS}
    for name in TORCH_ARMS: assert rows[name]['step_ms'] >= 30, 'a loss of 7 is not taken for 7 steps'
    assert rows['graph']['step_ms'] > 0 and all(row['spread'] >= 0 for row in rows.values())
    assert [row['name'] for row in one_arm(None, 1)] == ['graph']

def test_a_peer_that_fails_is_named(one_arm):
    with pytest.raises(UserError, match=r'transformers failed \(ValueError: no such mode torch'):
        one_arm(wrong_steps)

@pytest.mark.parametrize('answer', [{'positions': 62, 'dropout': 0.}, {'positions': 59, 'dropout': 0.1}])
def test_other_work_is_not_compared(answer):
    step.check_same_work({'loss': 1., 'positions': 59, 'dropout': 0.}, 59)
    found = f'coqui-tts computed {answer["positions"]} positions with dropout {answer["dropout"]}'
    with pytest.raises(UserError, match=found):
        step.check_same_work({'loss': 1.} | answer, 59)

def test_coqui_is_asked_for_the_same_sizes(quick, monkeypatch):
    "coqui-tts adds START and STOP itself, and three more codes at the end."
    monkeypatch.setattr(step, 'step_peer', lambda python, main, **sizes: sizes)
    sizes = dict(layers=1, width=64, heads=2, vocabulary=48, batch=4, text=6, codes=5, frames=32)
    assert step.coqui_step('python', quick, 6, 8) == sizes

def test_the_blocks_of_a_plain_gpt2(quick, monkeypatch):
    "No dropout; output layers begin smaller by the root of the number of residuals, as in GPT-2; it learns."
    made, real = [], gpt2.TransformerBlock
    monkeypatch.setattr(gpt2, 'TransformerBlock', lambda *a, **k: made.append(a) or real(*a, **k))
    config = quick.replace(model={'gpt': {'layers': 2}},
                           training={'mode': 'eager', 'learning_rate': 1e-2,
                                                                   'warmup_steps': 0, 'schedule': 'constant'})
    step, ids = plain_gpt2(config, 8, 40), tf.constant(np.arange(36).reshape(4, 9), tf.int32)
    losses = [float(step(ids)) for _ in range(12)]
    assert made == [(64, 2, 0., 0.5)] * 2 and losses[-1] < losses[0] / 2

class Loss(float):
    "A number with the methods of a tensor that has gradients."
    seen = []
    def __rmul__(self, other): return Loss(float(other) * float(self))
    def __add__(self, other): return Loss(float(self) + float(other))
    def detach(self): return self
    def backward(self): self.seen.append(float(self))

class Dropout: p = 0.1

@pytest.fixture(params=['cpu', 'cuda'])
def torch(monkeypatch, request):
    "Stands in for PyTorch and records the calls."
    torch = MagicMock()
    torch.cuda.is_available.return_value = request.param == 'cuda'
    torch.nn.modules.dropout._DropoutNd = Dropout
    torch.device_used = request.param
    for name in ('TTS', 'TTS.tts', 'TTS.tts.layers', 'TTS.tts.layers.xtts', 'TTS.tts.layers.xtts.gpt',
                 'transformers'):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setitem(sys.modules, 'torch', torch)
    Loss.seen.clear()
    return torch

ADAMW = dict(lr=1e-4, betas=(0.9, 0.96), weight_decay=1e-2)

def test_a_step_of_coqui(torch):
    "Its own sizes, as released; AdamW and clipping as ours; loss 0.01 x text + codes."
    model = sys.modules['TTS.tts.layers.xtts.gpt'].GPT
    gpt, dropout = model.return_value.to.return_value.train.return_value, Dropout()
    gpt.modules.return_value, gpt.return_value = [dropout, object()], (Loss(5.), Loss(3.), None)
    steps = step._coqui_steps(2, 30, 1024, 16, 6681, batch=4, text=6, codes=5, frames=32)
    assert next(steps)['dropout'] == 0 and dropout.p == 0
    hook = gpt.gpt.register_forward_pre_hook
    assert hook.call_args.kwargs == {'with_kwargs': True}
    hook.call_args.args[0](None, (), {'inputs_embeds': np.zeros((4, 22, 64))})
    assert next(steps) == {'loss': 3., 'dropout': 0., 'positions': 22} and Loss.seen == [3.05, 3.05]
    model.assert_called_once_with(
        layers=30, model_dim=1024, heads=16, number_text_tokens=6681, max_text_tokens=402, max_mel_tokens=605,
        num_audio_tokens=1026, start_audio_token=1024, stop_audio_token=1025, use_perceiver_resampler=True)
    model.return_value.to.assert_called_once_with(torch.device_used)
    torch.optim.AdamW.assert_called_once_with(gpt.parameters(), **ADAMW)
    torch.nn.utils.clip_grad_norm_.assert_called_with(gpt.parameters(), 1.0)
    assert torch.randint.call_args_list == [call(3, 250, (4, 6)), call(0, 1024, (4, 5))]
    assert torch.full.call_args_list == [call((4,), 6), call((4,), 5 * 1024)]
    assert torch.randn.call_args_list == [call(4, 1, 80, 32)]

@pytest.mark.parametrize('mode', ['torch', 'torch_compile', 'torch_bf16'])
def test_a_step_of_transformers(torch, mode):
    "No dropout, an output layer of its own, no cache; the next token is the target."
    library, made = sys.modules['transformers'], []
    gpt = library.GPT2LMHeadModel.return_value.to.return_value
    ids = torch.randint.return_value
    torch.nn.functional.cross_entropy.return_value = Loss(2.5)
    torch.compile.side_effect = lambda f: made.append(f) or f
    steps = gpt2._torch_steps(2, 12, 768, 12, 1026, batch=4, tokens=8, mode=mode)
    assert [next(steps), next(steps)] == [2.5, 2.5] and Loss.seen == [2.5, 2.5]
    assert bool(made) == ('compile' in mode)
    library.GPT2Config.assert_called_once_with(
        vocab_size=1026, n_positions=8, n_embd=768, n_layer=12, n_head=12, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, use_cache=False, tie_word_embeddings=False)
    torch.optim.AdamW.assert_called_once_with(gpt.parameters(), **ADAMW)
    assert torch.randint.call_args.args[1:] == (1026, (4, 9))
    assert torch.randint.call_args.kwargs == {'device': torch.device_used}
    torch.autocast.assert_called_with(torch.device_used, torch.bfloat16, enabled='bf16' in mode)
    everything = slice(None)
    cut = [c.args[0] for c in ids.__getitem__.call_args_list[:2]]
    assert cut == [(everything, slice(None, -1)), (everything, slice(1, None))]
    scores = gpt.return_value.logits.float.return_value
    scores.flatten.assert_called_with(0, 1)
    torch.nn.functional.cross_entropy.assert_called_with(scores.flatten.return_value,
                                                         ids[0].flatten.return_value)

def test_the_scripts_record_what_they_measure(monkeypatch):
    "The script of the step compares the work of coqui-tts first, and hands its step over."
    kept, peers = [], []
    class Theirs:
        def __init__(self, *given): peers.append(given)
        def __enter__(self): return self
        def __exit__(self, *_): pass
        def __call__(self): return {'loss': 1., 'positions': 32 + 6 + 8 + 4, 'dropout': 0.}
    def speed(config, text, codes, rounds, others, progress):
        return [{'name': name, 'step_ms': text + codes, 'rounds': rounds} for name in others or ['xla']]
    for module in (step, gpt2):
        monkeypatch.setattr(module, 'start', lambda: None)
        monkeypatch.setattr(module, 'output', lambda given, *what: kept.append((given.record, *what)))
    monkeypatch.setattr(step, 'coqui_step', Theirs)
    monkeypatch.setattr(step, 'step_speed', speed)
    monkeypatch.setattr(gpt2, 'gpt2_speed', lambda config, tokens, rounds, python, progress: [python])
    sizes = ['--layers', '1', '--width', '64', '--heads', '1', '--rounds', '2']
    for words in (['--coqui-python', 'py', '--record'], []):
        monkeypatch.setattr(sys, 'argv', ['step.py', *sizes, '--text-tokens', '6', '--codes', '8', *words])
        step.main()
    monkeypatch.setattr(sys, 'argv', ['gpt2.py', *sizes, '--tokens', '9', '--torch-python', 'py'])
    gpt2.main()
    about = {'model': 'GPT 1 x 64, batch 4, 6 text tokens, 8 codes, no dropout'}
    row = {'step_ms': 14, 'rounds': 2}
    assert kept == [(True, 'step_speed', {'rows': [{'name': 'coqui'} | row]} | about),
                    (False, 'step_speed', {'rows': [{'name': 'xla'} | row]} | about),
                    (False, 'gpt2', {'rows': ['py'], 'model': 'GPT-2 1 x 64, batch 4, 9 tokens, no dropout'})]
    assert [given[0] for given in peers] == ['py']
