"The decoder, the speaker encoder, their exact interpolation, and the critics of a training."
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.parity import voice_parity
from xtts_nb.models.hifigan import (
    adversarial_loss, Conv2D, critic_loss, feature_loss, _fold_weight_norm, PeriodDiscriminator, stretch,
    unfold_weight_norm)

@pytest.mark.parametrize('scale', [4.0, 24000 / 22050, 0.8, 0.5])
@pytest.mark.parametrize('length', [1, 2, 7, 50])
def test_stretch_is_linear_at_the_given_scale(scale, length):
    x = np.random.randn(2, length, 3).astype(np.float32)
    place = np.clip((np.arange(max(1, int(length * scale))) + 0.5) / scale - 0.5, 0, length - 1)
    expected = np.stack([[np.interp(place, np.arange(length), x[b, :, d]) for d in range(3)]
                         for b in range(2)])
    assert np.allclose(stretch(tf.constant(x), scale), expected.transpose(0, 2, 1), atol=1e-5)

def test_a_convolution_of_one_point_skips_before_it_looks():
    "TensorFlow's gradient of a strided one writes beyond its memory on a CPU where rows are left over."
    layer, x = Conv2D(3, 1, 2), tf.random.normal((2, 4, 6, 5))
    layer.build(x.shape)
    assert layer.conv.strides == (1, 1)
    assert np.allclose(layer(x), tf.nn.conv2d(x, layer.conv.kernel, 2, 'VALID'), atol=1e-5)

def test_voice_and_sound_are_those_of_coqui_tts(toy, toy_xtts, toy_inputs, theirs, all_ok):
    all_ok(voice_parity(toy, toy_xtts.config, toy_inputs, theirs))

def test_a_kernel_of_nothing_has_a_direction_and_no_length():
    kernel = np.random.randn(5, 4, 3).astype(np.float32)
    kernel[..., 1] = 0
    length, direction = unfold_weight_norm(kernel)
    assert np.allclose(length[0, 0], np.sqrt((kernel**2).sum((0, 1)))) and (direction[..., 1] == 1).all()
    assert np.allclose(_fold_weight_norm(length, direction), kernel, atol=1e-6)

@pytest.mark.parametrize('samples', [300, 301, 1000])
@pytest.mark.parametrize('period', [2, 7])
def test_columns_of_a_period_do_not_mix(period, samples):
    "A changed sample changes the score of its own column only."
    critic, wav = PeriodDiscriminator(period, 2), tf.random.stateless_normal((1, samples), (0, 1))
    critic.build(None)
    changed = tf.tensor_scatter_nd_add(wav, [[0, period + 1]], [1.])
    moved = np.abs(critic(changed)[-1] - critic(wav)[-1]).max(axis=(1, 2)) > 0
    assert moved.tolist() == [i == 1 for i in range(period)]

def test_least_squares():
    "Two parts: scores of -1 and 1 for the recording, 3 and 0 for the copy; the score is no feature."
    part = lambda score, *features: [*(tf.fill((2, 3), x) for x in features), tf.fill((2, 3), score)]
    real, made = [part(-1., 1., 4.), part(1., 2.)], [part(3., 2., 1.), part(0., 2.5)]
    assert float(critic_loss(real, made)) == (1 + 1)**2 + 3**2 + 0 + 0
    assert float(adversarial_loss(made)) == (1 - 3)**2 + 1**2
    assert float(feature_loss(real, made)) == 1 + 3 + 0.5
