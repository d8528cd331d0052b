"The critics: what they see, what they pay."
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.config import XTTSConfig
from xtts_nb.models.hifigan import (
    Critic, PeriodDiscriminator, SpectrumDiscriminator, _features, adversarial_loss, critic_loss,
    feature_loss)


def noise(*shape): return tf.constant(np.random.default_rng(0).normal(size=shape).astype(np.float32))

@pytest.mark.parametrize('samples', [300, 301, 1000])
@pytest.mark.parametrize('period', [2, 7])
def test_columns_of_a_period_do_not_mix(period, samples):
    "A changed sample changes the score of its own column only."
    critic, wav = PeriodDiscriminator(period, 2), noise(1, samples)
    critic.build(None)
    changed = tf.tensor_scatter_nd_add(wav, [[0, period + 1]], [1.])
    moved = np.abs(critic(changed)[-1] - critic(wav)[-1]).max(axis=(1, 2)) > 0
    assert moved.tolist() == [i == 1 for i in range(period)]

def test_a_spectrum_is_seen_without_its_phase():
    critic = SpectrumDiscriminator(256, 2)
    critic.build(None)
    assert np.allclose(critic(noise(2, 2048))[-1], critic(-noise(2, 2048))[-1], atol=1e-5)

def test_rows_do_not_meet():
    critic, wav = Critic(XTTSConfig.tiny().voice), noise(3, 900)
    for whole, alone in zip(critic(wav), critic(wav[1:2])):
        rows = len(whole[-1]) // 3
        assert np.allclose(whole[-1][rows:2 * rows], alone[-1], atol=1e-5)

def test_the_settings_choose_the_critics():
    voice = XTTSConfig.from_dict({'voice': {'periods': [3], 'windows': [256, 512], 'channels': 2}}).voice
    assert [part.name for part in Critic(voice).parts] == ['period_3', 'spectrum_256', 'spectrum_512']
    assert Critic(voice)(noise(1, 600))[0][0].shape[-1] == 2

KERNELS = {   # with 4 channels: the shape of each kernel, and of what it makes of 601 samples
    'period_5': [((5, 1, 4), (5, 41, 4)), ((5, 4, 16), (5, 14, 16)), ((5, 16, 64), (5, 5, 64)),
                 ((5, 64, 128), (5, 2, 128)),
                 ((5, 128, 128), (5, 2, 128)), ((3, 128, 1), (5, 2, 1))],
    'spectrum_256': [((3, 9, 1, 4), (1, 10, 129, 4)), ((3, 9, 4, 4), (1, 10, 65, 4)),
                     ((3, 9, 4, 4), (1, 10, 33, 4)),
                     ((3, 9, 4, 4), (1, 10, 17, 4)), ((3, 3, 4, 4), (1, 10, 17, 4)),
                     ((3, 3, 4, 1), (1, 10, 17, 1))]}

def test_kernels_and_what_they_make():
    critic = Critic(XTTSConfig.from_dict({'voice': {'periods': [5], 'windows': [256], 'channels': 4}}).voice)
    shapes = {part.name: [(tuple(conv.kernel.shape), tuple(x.shape))
                          for conv, x in zip([*part.stack, part.score], maps)]
             for part, maps in zip(critic.parts, critic(noise(1, 601)))}
    assert shapes == KERNELS
    assert len(named := critic.trainable_variables) == 24 and all(v.dtype == 'float32' for v in named)

def bare(**settings): return SimpleNamespace(stack=[], score=lambda x: x, **settings)

def test_what_the_first_layers_hear():
    "Columns of every third sample, filled up with zeros; magnitudes that are never quite zero."
    wav = noise(2, 601)
    (columns,) = PeriodDiscriminator.call(bare(period=3), wav)
    expected = np.pad(wav, ((0, 0), (0, 2))).reshape(2, 201, 3).transpose(0, 2, 1).reshape(6, 201, 1)
    assert np.array_equal(columns, expected)
    (magnitude,) = SpectrumDiscriminator.call(bare(n_fft=256), wav)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(256) / 256)
    frames = np.stack([np.pad(wav, ((0, 0), (0, 256)))[:, i:i + 256] * hann for i in range(0, 601, 64)], 1)
    assert np.allclose(magnitude[..., 0], np.sqrt(np.abs(np.fft.rfft(frames))**2 + 1e-6), atol=1e-4)
    assert np.allclose(SpectrumDiscriminator.call(bare(n_fft=256), tf.zeros((1, 600)))[0], 1e-3)

def test_negative_features_are_scaled_down():
    first, second, score = _features([lambda x: x, lambda x: -x], lambda x: x + 1, tf.constant([-1., 2.]))
    assert first.numpy() == pytest.approx([-0.1, 2.]) and second.numpy() == pytest.approx([0.1, -0.2])
    assert score.numpy() == pytest.approx([1.1, 0.8])

def test_least_squares():
    "Two parts: scores of -1 and 1 for the recording, 3 and 0 for the copy; the score is no feature."
    part = lambda score, *features: [*(tf.fill((2, 3), x) for x in features), tf.fill((2, 3), score)]
    real, made = [part(-1., 1., 4.), part(1., 2.)], [part(3., 2., 1.), part(0., 2.5)]
    assert float(critic_loss(real, made)) == (1 + 1)**2 + 3**2 + 0 + 0
    assert float(adversarial_loss(made)) == (1 - 3)**2 + 1**2
    assert float(feature_loss(real, made)) == 1 + 3 + 0.5
