"The names and layouts of coqui's tensors: each axis where Keras has it, and back."
import numpy as np
import pytest

from xtts_nb.config import XTTSConfig
from xtts_nb.names import lay_back, lay_out, map_markdown, name_map

LAYOUTS = {   # layout: shape there, and the place of the element (i, j, ...) here
    'turn': ((2, 3, 4), lambda o, i, k: (k, i, o)), 'point': ((2, 3, 1), lambda o, i, k: (i, o)),
    'picture': ((2, 3, 4, 5), lambda o, i, h, w: (h, w, i, o)), 'keep': ((2, 3), lambda i, j: (i, j))}


@pytest.mark.parametrize('layout', LAYOUTS)
def test_every_element_has_its_place_and_comes_back(layout):
    shape, place = LAYOUTS[layout]
    x = np.arange(np.prod(shape)).reshape(shape)
    there = lay_out(x, layout)
    assert all(there[place(*index)] == x[index] for index in np.ndindex(*shape))
    assert np.array_equal(lay_back(there, layout), x) and there.size == x.size


def test_names_of_each_part():
    names = name_map(XTTSConfig.xtts_v2().model)
    voice = 'hifigan_decoder.waveform_decoder.'
    speaker = 'hifigan_decoder.speaker_encoder.'
    for there, here in {
        ('dvae.pth', 'encoder.1.0.weight'): ('dvae/encoder/halve_1/conv/kernel', 'turn'),
        ('dvae.pth', 'encoder.2.net.4.bias'): ('dvae/encoder/residual_0/conv_2/conv/bias', 'keep'),
        ('dvae.pth', 'decoder.1.net.0.weight'): ('dvae/decoder/residual_0/conv_0/conv/kernel', 'turn'),
        ('dvae.pth', 'codebook.embed'): ('dvae/codebook/embed', 'keep'),
        ('model.pth', 'gpt.gpt.h.29.attn.c_attn.weight'): ('gpt/block_29/qkv/kernel', 'keep'),
        ('model.pth', f'{voice}conds.0.weight'): ('decoder/voice_1/kernel', 'point'),
        ('model.pth', f'{voice}resblocks.4.convs2.2.bias'): ('decoder/block_1_1/near_2/bias', 'keep'),
        ('model.pth', f'{speaker}layer2.0.conv1.weight'): ('speaker/block_1_0/conv_0/conv/kernel', 'picture'),
        ('model.pth', f'{speaker}layer2.0.downsample.0.weight'): ('speaker/block_1_0/skip/conv/kernel', 'picture'),
    }.items(): assert names[there] == here, there
    assert ('model.pth', 'gpt.gpt.h.30.attn.c_attn.weight') not in names
    assert len({here for here, _ in names.values()}) == len(names), 'no two tensors share a place'


def test_the_table_counts_the_layers():
    rows = {row.split(' | ')[1]: row for row in map_markdown(XTTSConfig.xtts_v2().model).splitlines()[2:]}
    assert rows['`gpt.gpt.h.{}.ln_1`'].endswith('| norm | 30 |') and rows['`gpt.text_head`'].endswith('| dense | 1 |')
