"The names of coqui-tts' tensors, and the axes of Keras and back."
import numpy as np
import pytest

from xtts_nb.config import XTTSConfig
from xtts_nb.models.convert import name_map, to_keras, to_torch

LAYOUTS = {   # layout: shape in PyTorch, and the index in Keras of an element
    'reverse': ((2, 3, 4), lambda o, i, k: (k, i, o)), 'pointwise': ((2, 3, 1), lambda o, i, k: (i, o)),
    'conv2d': ((2, 3, 4, 5), lambda o, i, h, w: (h, w, i, o)), 'keep': ((2, 3), lambda i, j: (i, j))}


@pytest.mark.parametrize('layout', LAYOUTS)
def test_every_element_has_its_place_and_comes_back(layout):
    shape, place = LAYOUTS[layout]
    x = np.arange(np.prod(shape)).reshape(shape)
    converted = to_keras(x, layout)
    assert all(converted[place(*index)] == x[index] for index in np.ndindex(*shape))
    assert np.array_equal(to_torch(converted, layout), x) and converted.size == x.size


GPT, DECODER, SPEAKER = 'gpt.', 'hifigan_decoder.waveform_decoder.', 'hifigan_decoder.speaker_encoder.'
RELEASED = {   # file and name in coqui-tts: (name here, layout)
    'dvae.pth encoder.0.0.weight': ('dvae/encoder/halve_0/conv/kernel', 'reverse'),
    'dvae.pth encoder.1.0.weight': ('dvae/encoder/halve_1/conv/kernel', 'reverse'),
    'dvae.pth encoder.2.net.4.bias': ('dvae/encoder/residual_0/conv_2/conv/bias', 'keep'),
    'dvae.pth encoder.4.net.2.weight': ('dvae/encoder/residual_2/conv_1/conv/kernel', 'reverse'),
    'dvae.pth encoder.5.weight': ('dvae/encoder/to_code/conv/kernel', 'reverse'),
    'dvae.pth decoder.0.weight': ('dvae/decoder/from_code/conv/kernel', 'reverse'),
    'dvae.pth decoder.1.net.0.weight': ('dvae/decoder/residual_0/conv_0/conv/kernel', 'reverse'),
    'dvae.pth decoder.3.net.4.weight': ('dvae/decoder/residual_2/conv_2/conv/kernel', 'reverse'),
    'dvae.pth decoder.4.0.conv.weight': ('dvae/decoder/double_0/conv/kernel', 'reverse'),
    'dvae.pth decoder.5.0.conv.bias': ('dvae/decoder/double_1/conv/bias', 'keep'),
    'dvae.pth decoder.6.weight': ('dvae/decoder/to_mel/conv/kernel', 'reverse'),
    'dvae.pth codebook.embed': ('dvae/codebook/embed', 'keep'),
    'mel_stats.pth ': ('dvae/mel_stats', 'keep'), 'model.pth mel_stats': ('gpt/mel_stats', 'keep'),
    f'model.pth {GPT}gpt.h.29.attn.c_attn.weight': ('gpt/block_29/qkv/kernel', 'keep'),
    f'model.pth {GPT}conditioning_encoder.attn.5.qkv.weight': (
        'gpt/conditioning/block_5/qkv/kernel', 'pointwise'),
    f'model.pth {GPT}conditioning_perceiver.layers.1.1.2.weight': (
        'gpt/conditioning/perceiver/layer_1/contract/kernel', 'reverse'),
    f'model.pth {DECODER}cond_layer.weight': ('decoder/voice_0/kernel', 'pointwise'),
    f'model.pth {DECODER}conds.0.weight': ('decoder/voice_1/kernel', 'pointwise'),
    f'model.pth {DECODER}conds.3.bias': ('decoder/voice_4/bias', 'keep'),
    f'model.pth {DECODER}ups.3.weight_g': ('decoder/up_3/kernel_g', 'reverse'),
    f'model.pth {DECODER}resblocks.0.convs1.0.weight_v': ('decoder/block_0_0/far_0/kernel_v', 'reverse'),
    f'model.pth {DECODER}resblocks.4.convs2.2.bias': ('decoder/block_1_1/near_2/bias', 'keep'),
    f'model.pth {DECODER}resblocks.11.convs2.1.bias': ('decoder/block_3_2/near_1/bias', 'keep'),
    f'model.pth {SPEAKER}layer1.0.conv1.weight': ('speaker/block_0_0/conv_0/conv/kernel', 'conv2d'),
    f'model.pth {SPEAKER}layer4.2.bn2.running_var': ('speaker/block_3_2/norm_1/moving_variance', 'keep'),
    f'model.pth {SPEAKER}layer2.0.downsample.0.weight': ('speaker/block_1_0/skip/conv/kernel', 'conv2d'),
    f'model.pth {SPEAKER}layer4.0.downsample.1.running_mean': (
        'speaker/block_3_0/skip_norm/moving_mean', 'keep'),
    f'model.pth {SPEAKER}attention.3.weight': ('speaker/weigh/kernel', 'pointwise')}

ABSENT = ('dvae.pth encoder.2.0.weight', 'dvae.pth encoder.5.net.0.weight', 'dvae.pth decoder.4.net.0.weight',
          'dvae.pth decoder.6.0.conv.weight', f'model.pth {GPT}gpt.h.30.attn.c_attn.weight',
          f'model.pth {DECODER}conds.4.bias',
          f'model.pth {DECODER}resblocks.12.convs1.0.bias',
          f'model.pth {SPEAKER}layer1.0.downsample.0.weight',
          f'model.pth {SPEAKER}layer0.0.conv1.weight', f'model.pth {SPEAKER}layer4.3.conv1.weight')

def test_names_of_each_part():
    names = {' '.join(key): here for key, here in name_map(XTTSConfig.xtts_v2().model).items()}
    assert {name: names.get(name) for name in RELEASED} == RELEASED
    assert not [name for name in ABSENT if name in names]
    assert len({here for here, _ in names.values()}) == len(names), 'no two tensors share a place'
