"The critics: what they see, what they pay."
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.config import XTTSConfig
from xtts_nb.discriminators import Critic, PeriodDiscriminator, SpectrumDiscriminator, adversarial_loss, critic_loss, feature_loss


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

def test_least_squares():
    ones, zeros = [[tf.zeros((2, 3)), tf.ones((2, 3))]], [[tf.ones((2, 3)), tf.zeros((2, 3))]]
    assert float(critic_loss(ones, zeros)) == 0 and float(critic_loss(zeros, ones)) == 2
    assert float(adversarial_loss(ones)) == 0 and float(adversarial_loss(zeros)) == 1
    assert float(feature_loss(ones, zeros)) == 1   # the score is no feature
