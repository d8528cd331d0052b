"What coqui-tts is asked to say, and at which sizes."
import sys
from contextlib import ExitStack, nullcontext
from unittest.mock import call, MagicMock

import numpy as np
import pytest

from benchmarks import speech as page


@pytest.fixture
def coqui(monkeypatch):
    "Stands in for coqui-tts and PyTorch."
    for name in ('torch', 'TTS', 'TTS.tts', 'TTS.tts.configs', 'TTS.tts.configs.xtts_config',
                 'TTS.tts.models', 'TTS.tts.models.xtts'): monkeypatch.setitem(sys.modules, name, MagicMock())
    return sys.modules['TTS.tts.models.xtts']

@pytest.mark.parametrize('streamed, device', [(False, 'cpu'), (True, 'cuda')])
def test_what_coqui_is_asked(coqui, streamed, device):
    model, torch = coqui.Xtts.return_value, sys.modules['torch']
    torch.cuda.is_available.return_value = device == 'cuda'
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
    assert torch.randn.call_args_list == [call(1, 32, 1024, device=device), call(1, 512, 1, device=device)]
    model.to.assert_called_once_with(device)
    asked = model.inference_stream if streamed else model.inference
    assert asked.call_args.args == ('text', 'en', *voice)

def test_coqui_gets_our_sizes(small, monkeypatch):
    monkeypatch.setattr(page, 'step_peer', lambda python, main, **sizes: (python, main, sizes))
    gpt = small.model.gpt
    assert page.coqui_speech('python', small, [1, 2], 9, True) == ('python', page._coqui_speech, dict(
        layers=gpt.layers, width=gpt.width, heads=gpt.heads, vocabulary=gpt.text_tokens, ids=[1, 2], codes=9,
        streamed=True))

def test_both_ways_of_coqui(monkeypatch):
    asked = []
    def peer(python, config, ids, codes, streamed):
        asked.append((python, ids, codes, streamed))
        return nullcontext(len(asked))
    monkeypatch.setattr(page, 'coqui_speech', peer)
    with ExitStack() as stack: found = page.coqui_arms('py', None, 9, [1, 2], stack)
    assert found == {'coqui': 1, 'coqui_stream': 2}
    assert asked == [('py', [1, 2], 9, False), ('py', [1, 2], 9, True)]
