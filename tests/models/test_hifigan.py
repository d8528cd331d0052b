"""The decoder, the speaker encoder and their exact interpolation."""
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.data.audio import speaker_log_mel, synthetic_voice
from xtts_nb.config import SpeakerConfig, UserError, XTTSConfig
from xtts_nb.files import named_weights, save_weights
from xtts_nb.models.dvae import parameter_count
from xtts_nb.models.hifigan import (
    Conv2D, HiFiGAN, SpeakerBlock, SpeakerEncoder, batch_norm, fold_weight_norm, load_decoder,
    load_hifigan, stretch, unfold_weight_norm)
from benchmarks.parity import voice_parity


@pytest.fixture(scope='module')
def config():
    "Four stages, each of two blocks of two layers."
    blocks = {'residual_kernels': (3, 7), 'dilations': (1, 3)}
    return XTTSConfig.tiny(width=64).replace(model={'decoder': blocks})


@pytest.fixture(scope='module')
def decoder(config): return HiFiGAN(config)


def is_normalised(name): return name.startswith(('up_', 'block_')) and name.endswith('kernel')


def shapes(kind):
    "Of the released size, built in a graph that is never run."
    with tf.Graph().as_default():
        model = kind(XTTSConfig.xtts_v2())
        return parameter_count(model), {name: tuple(v.shape) for name, v in named_weights(model).items()}


def test_parameters_of_the_released_decoder():
    "The usual count has one length for each vector of a normalised kernel."
    count, names = shapes(HiFiGAN)
    lengths = [shape[-1] for name, shape in names.items() if is_normalised(name)]
    assert len(lengths) == 76
    assert count + sum(lengths) == 17_827_808


def test_parameters_of_the_released_speaker_encoder(): assert shapes(SpeakerEncoder)[0] == 8_028_492


@pytest.mark.parametrize('scale', [4.0, 24000 / 22050, 0.8, 0.5])
@pytest.mark.parametrize('length', [1, 2, 7, 50])
def test_stretch_is_linear_at_the_given_scale(scale, length):
    x = np.random.randn(2, length, 3).astype(np.float32)
    place = np.clip((np.arange(max(1, int(length * scale))) + 0.5) / scale - 0.5, 0, length - 1)
    expected = np.stack([[np.interp(place, np.arange(length), x[b, :, d]) for d in range(3)]
                         for b in range(2)])
    assert np.allclose(stretch(tf.constant(x), scale), expected.transpose(0, 2, 1), atol=1e-5)


def test_stretch_of_a_length_known_only_at_run_time():
    x = tf.random.normal((1, 23, 2))
    f = tf.function(lambda x: stretch(x, 24000 / 22050), input_signature=[tf.TensorSpec((1, None, 2))])
    assert np.allclose(f(x), stretch(x, 24000 / 22050))


@pytest.mark.parametrize('codes, samples', [(20, 22272), (1, 1024), (7, 7680)])
def test_samples_of_a_length(config, decoder, codes, samples):
    assert decoder(tf.random.normal((1, codes, 64)), tf.random.normal((1, 32))).shape == (1, samples)


def test_rows_do_not_mix(config, decoder):
    latents, voice = tf.random.normal((2, 6, 64)), tf.random.normal((2, 32))
    both = decoder(latents, voice)
    assert np.allclose(both[1], decoder(latents[1:], voice[1:])[0], atol=1e-5)


def test_the_voice_is_heard(decoder):
    latents = tf.random.normal((1, 6, 64))
    a, b = (decoder(latents, tf.random.normal((1, 32))) for _ in 'ab')
    assert np.abs(a - b).max() > 1e-4


def test_rates_that_do_not_multiply_to_the_hop(config):
    with pytest.raises(ValueError, match='expected the hop 256'):
        HiFiGAN(config.replace(model={'decoder': {'rates': (8, 8, 2, 4)}}))


@pytest.mark.parametrize('kind, near', [('bfloat16', 0.05), ('float16', 0.005)])
def test_half_precision_stays_near(config, decoder, kind, near):
    half = HiFiGAN(config, dtype=f'mixed_{kind}')
    for a, b in zip(half.weights, decoder.weights): a.assign(b)
    latents, voice = tf.random.normal((1, 6, 64)), tf.random.normal((1, 32))
    wav = half(latents, voice)
    assert wav.dtype == 'float32'
    assert 0 < np.abs(wav - decoder(latents, voice)).max() < near


def test_the_graph_gives_what_eager_gives(decoder):
    latents, voice = tf.random.normal((1, 6, 64)), tf.random.normal((1, 32))
    compiled = tf.function(decoder.__call__, jit_compile=True)
    assert np.allclose(compiled(latents, voice), decoder(latents, voice), atol=1e-5)


def test_a_voice_has_length_one_and_no_loudness(config):
    "Per-bin means over time are taken away, so a constant in the logarithm changes nothing."
    encoder, mel = SpeakerEncoder(config), tf.random.normal((2, 90, 64))
    voice = encoder(mel)
    assert np.allclose(np.linalg.norm(voice, axis=-1), 1, atol=1e-5)
    assert np.allclose(voice, encoder(mel + 3), atol=1e-3)


@pytest.mark.parametrize('frames', [17, 81, 100])
def test_any_number_of_frames(config, frames):
    assert SpeakerEncoder(config)(tf.random.normal((1, frames, 64))).shape == (1, 32)


def test_speaker_mel_is_the_textbook_one():
    wav, cfg = synthetic_voice(0.5, sample_rate=16000).astype(np.float64), SpeakerConfig()
    raised = wav - cfg.pre_emphasis * np.concatenate([wav[1:2], wav[:-1]])
    padded = np.pad(raised, 256, mode='reflect')
    window = np.pad(0.54 - 0.46 * np.cos(2 * np.pi * np.arange(400) / 400), 56)
    power = np.abs(np.fft.rfft(np.lib.stride_tricks.sliding_window_view(padded, 512)[::160] * window))**2
    edges = 700 * (10**(np.linspace(0, 2595 * np.log10(1 + 8000 / 700), 66) / 2595) - 1)
    hz = np.linspace(0, 8000, 257)
    filters = np.stack([np.interp(hz, edges[i:i + 3], [0, 1, 0]) for i in range(64)], 1)
    error = np.abs(speaker_log_mel(wav.astype(np.float32)) - np.log(power @ filters + 1e-6))
    assert np.mean(error < 1e-4) > 0.99 and error.max() < 2e-3


def stored(decoder, a, b) -> dict:
    "The decoder's weights with lengths and directions under the names `a` and `b`."
    out = {}
    for name, v in named_weights(decoder).items():
        if is_normalised(name):
            out[f'decoder/{name}{a}'] = np.linalg.norm(v, axis=(0, 1), keepdims=True)
            out[f'decoder/{name}{b}'] = v.numpy() * 5
        else: out[f'decoder/{name}'] = v.numpy()
    return out


@pytest.mark.parametrize('names', [('_original0', '_original1'), ('_g', '_v')])
def test_loading_folds_both_spellings(config, decoder, tmp_path, names):
    save_weights(tmp_path / 'x.safetensors', stored(decoder, *names))
    again = load_decoder(tmp_path / 'x.safetensors', config)
    assert all(np.allclose(a, b, atol=1e-6) for a, b in zip(decoder.weights, again.weights))


def test_loading_takes_plain_kernels(config, decoder, tmp_path):
    save_weights(tmp_path / 'x.safetensors', {f'decoder/{n}': v for n, v in named_weights(decoder).items()})
    again = load_decoder(tmp_path / 'x.safetensors', config)
    assert all(np.array_equal(a, b) for a, b in zip(decoder.weights, again.weights))


def test_a_missing_tensor_is_named(config, decoder, tmp_path):
    weights = stored(decoder, '_g', '_v')
    weights.pop('decoder/enter/bias')
    save_weights(tmp_path / 'x.safetensors', weights)
    with pytest.raises(UserError, match='decoder/enter/bias'):
        load_decoder(tmp_path / 'x.safetensors', config)
    with pytest.raises(UserError, match='speaker/enter'):
        load_hifigan(tmp_path / 'x.safetensors', config)


@pytest.mark.parametrize('end, shape, message', [
    ('_g', None, 'kernel_g" is missing'), ('_g', (1, 1, 1), r'kernel_g" has shape \(1, 1, 1\), expected'),
    ('_v', (16, 1, 1), r'kernel_v" has shape \(16, 1, 1\), expected')])
def test_half_of_a_pair_is_missing_or_of_another_size(config, decoder, tmp_path, end, shape, message):
    weights = stored(decoder, '_g', '_v')
    weights.pop(f'decoder/up_0/kernel{end}')
    if shape: weights[f'decoder/up_0/kernel{end}'] = np.ones(shape, np.float32)
    save_weights(tmp_path / 'x.safetensors', weights)
    with pytest.raises(UserError, match=message): load_decoder(tmp_path / 'x.safetensors', config)


def test_fold_of_a_transposed_kernel_runs_over_its_inputs():
    length, direction = np.arange(1., 4).reshape(1, 1, 3), np.random.randn(16, 5, 3)
    assert np.allclose(np.linalg.norm(fold_weight_norm(length, direction), axis=(0, 1)), [1, 2, 3])

def test_a_convolution_of_one_point_skips_before_it_looks():
    "TensorFlow's gradient of a strided one writes beyond its memory on a CPU where rows are left over."
    layer, x = Conv2D(3, 1, 2), tf.random.normal((2, 4, 6, 5))
    layer.build(x.shape)
    assert layer.conv.strides == (1, 1)
    assert np.allclose(layer(x), tf.nn.conv2d(x, layer.conv.kernel, 2, 'VALID'), atol=1e-5)

def test_voice_and_sound_are_those_of_coqui_tts(toy, toy_xtts, toy_inputs, theirs, all_ok):
    all_ok(voice_parity(toy, toy_xtts.config, toy_inputs, theirs))

@pytest.mark.parametrize('kernel_size, stride', [(1, 1), (1, 3), (3, 1), (3, 2), (5, 2)])
def test_a_convolution_is_padded_by_half_a_kernel(kernel_size, stride):
    layer, x = Conv2D(3, kernel_size, stride, use_bias=True), np.random.randn(1, 7, 6, 2).astype(np.float32)
    layer.build(x.shape)
    kernel, half = layer.conv.kernel.numpy(), kernel_size // 2
    padded = np.pad(x[0], ((half, half), (half, half), (0, 0)))
    expected = [[np.tensordot(padded[i:i + kernel_size, j:j + kernel_size], kernel, 3)
                 for j in range(0, 6, stride)]
                for i in range(0, 7, stride)]
    assert np.allclose(layer(x)[0], expected, atol=1e-5)

def test_a_norm_of_silence_is_divided_by_its_epsilon():
    layer = batch_norm('n')
    layer.build((None, 3))
    layer.moving_variance.assign([0., 1e-5, 1.])
    expected = np.float64([1e-5, 2e-5, 1 + 1e-5])**-0.5
    assert np.allclose(layer(tf.constant([[1., 1., 1.]])), expected, rtol=1e-4)

def test_a_bin_is_taken_from_its_mean_and_divided_by_its_deviation(config, monkeypatch):
    "Over time; a bin that hardly moves is divided by the epsilon."
    inputs, real = [], Conv2D.call
    monkeypatch.setattr(Conv2D, 'call', lambda layer, x: inputs.append(np.array(x)) or real(layer, x))
    mel = (np.random.randn(2, 90, 64) * np.geomspace(1e-4, 10, 64) + 3).astype(np.float32)
    SpeakerEncoder(config)(mel)
    expected = (mel - mean(mel)) / np.sqrt(mean((mel - mean(mel))**2) + 1e-5)
    assert np.allclose(inputs[0], expected.transpose(0, 2, 1)[..., None], atol=1e-3)

def mean(mel): return mel.mean(1, keepdims=True, dtype=np.float64)

@pytest.mark.parametrize('before, stride, skips', [(8, 1, False), (8, 2, True), (16, 1, True)])
def test_a_block_skips_by_a_convolution_where_shapes_change(before, stride, skips):
    block = SpeakerBlock(8, stride)
    block.build((None, None, None, before))
    assert (block.skip is not None) == skips
    assert block(tf.ones((1, 8, 6, before))).shape == (1, 8 // stride, 6 // stride, 8)
    assert block.squeeze.units == 1 and block.excite.units == 8

def test_a_kernel_of_nothing_has_a_direction_and_no_length():
    kernel = np.random.randn(5, 4, 3).astype(np.float32)
    kernel[..., 1] = 0
    length, direction = unfold_weight_norm(kernel)
    assert np.allclose(length[0, 0], np.sqrt((kernel**2).sum((0, 1)))) and (direction[..., 1] == 1).all()
    assert np.allclose(fold_weight_norm(length, direction), kernel, atol=1e-6)

def test_a_file_with_nothing_to_speak_with(config, decoder, tmp_path):
    encoder = SpeakerEncoder(config)
    parts = {'gpt': decoder, 'decoder': decoder, 'speaker': encoder}
    for present in (['gpt'], ['gpt', 'decoder', 'speaker']):
        path = tmp_path / f'{len(present)}.safetensors'
        save_weights(path,
                     {f'{part}/{n}': v for part in present for n, v in named_weights(parts[part]).items()})
        loaded = load_hifigan(path, config)
        assert (loaded is None) == (present == ['gpt'])
    assert all(np.array_equal(a, b) for net, original in zip(loaded, (decoder, encoder))
               for a, b in zip(net.weights, original.weights))
