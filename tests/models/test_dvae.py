"Mel <-> codes: shapes, the nearest code, lost codes, training, files."
import keras
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.files import named_weights
from xtts_nb.models.dvae import (
    DVAE, Codebook, dvae_losses, load_dvae, mel_stats, parameter_count, update_codebook)
from benchmarks.parity import dvae_parity
from xtts_nb.models.hifigan import Critic, HiFiGAN, SpeakerEncoder


def normal(*shape, seed=0): return np.random.default_rng(seed).normal(size=shape).astype(np.float32)

@pytest.mark.slow
def test_the_full_size(): assert parameter_count(DVAE(XTTSConfig.xtts_v2())) == 51_567_184

@pytest.mark.parametrize('frames', [1, 2, 3, 4, 5, 7, 8, 63, 64, 65])
def test_a_code_for_four_frames_begun(dvae, frames):
    codes = dvae.encode(tf.constant(normal(2, frames, 80)))
    assert codes.shape == (2, -(-frames // 4)) and codes.dtype == tf.int32
    assert dvae.decode(codes).shape == (2, 4 * codes.shape[1], 80) and dvae.decode(codes).dtype == tf.float32

def test_codes_of_a_row_do_not_depend_on_its_neighbours(dvae):
    mel = 5 * normal(3, 40, 80)
    assert np.array_equal(dvae.encode(tf.constant(mel)),
                          np.concatenate([dvae.encode(tf.constant(mel[i:i + 1])) for i in range(3)]))

@pytest.mark.parametrize('lengths', [(40, 1, 17), (39, 38, 37), (5, 4, 3)])
def test_padding_is_not_heard(dvae, lengths):
    mel = 5 * normal(3, 40, 80)
    with_length = dvae.encode(tf.constant(mel), tf.constant(lengths))
    for codes, row, n in zip(with_length, mel, lengths):
        assert np.array_equal(codes[:-(-n // 4)], dvae.encode(tf.constant(row[None, :n]))[0])

def test_codes_are_local(dvae):
    "What follows far behind does not change a code, so a cut clip has the codes of the whole one."
    mel = 5 * normal(1, 80, 80)
    whole, cut = dvae.encode(tf.constant(mel)).numpy()[0], dvae.encode(tf.constant(mel[:, :40])).numpy()[0]
    assert np.array_equal(whole[:6], cut[:6])

def test_the_nearest_code_is_chosen():
    book = Codebook(7, 3)
    book.build()
    z = normal(2, 5, 3)
    far = ((z[:, :, None] - np.array(book.embed.numpy()).T[None, None])**2).sum(-1)
    assert np.array_equal(book.encode(z), far.argmin(-1))
    assert np.array_equal(book.encode(book.decode(tf.range(7)[None])), np.arange(7)[None])

def moved(book, z, codes, steps):
    "The vectors of the codes after some updates."
    update = tf.function(lambda i: update_codebook(book, z, codes, tf.stack([0, i])))
    for i in range(steps): update(tf.constant(i))
    return book.embed.numpy().T

def test_codes_move_to_the_mean_of_what_chose_them():
    book = Codebook(2, 3)
    book.build()
    z, codes = normal(1, 8, 3), tf.constant([[0, 0, 0, 1, 1, 1, 1, 1]])
    assert np.allclose(moved(book, z, codes, 600), [z[0, :3].mean(0), z[0, 3:].mean(0)], atol=0.05)

@pytest.mark.parametrize('size, lost', [(0.06, False), (0.04, True)])
def test_a_code_is_lost_below_one_choice_in_twenty_batches(size, lost):
    book = Codebook(2, 3)
    book.build()
    book.cluster_size.assign([1., size / 0.99])
    before = book.embed_avg.numpy()[:, 1]
    update_codebook(book, normal(1, 8, 3), tf.zeros((1, 8), tf.int32), tf.constant([0, 1]))
    assert np.allclose(book.embed_avg.numpy()[:, 1], 0.99 * before) == (not lost)
    assert book.cluster_size.numpy()[1] == pytest.approx(1. if lost else size)

def test_one_update_to_the_last_digit():
    "Running sums and counts, and vectors that are their quotients, steadied by 1e-5 a code."
    book = Codebook(3, 2)
    book.build()
    counts, sums, z = np.array([2e-5, 4., 2**-17]), normal(2, 3), normal(1, 4, 2, seed=1)
    book.cluster_size.assign(counts)
    book.embed_avg.assign(sums)
    update_codebook(book, z, tf.constant([[0, 1, 1, 0]]), tf.constant([0, 1]), decay=0.75, lost=0.75 * 2**-17)
    counts = 0.75 * counts + 0.25 * np.array([2, 2, 0])
    sums = 0.75 * sums + 0.25 * np.stack([z[0, 0] + z[0, 3], z[0, 1] + z[0, 2], np.zeros(2)], 1)
    assert np.allclose(book.cluster_size, counts, rtol=1e-5) and np.allclose(book.embed_avg, sums, rtol=1e-5)
    steady = (counts + 1e-5) / (counts.sum() + 3e-5) * counts.sum()
    assert np.allclose(book.embed, sums / steady,
                       rtol=1e-4)   # the third, as rare as it may be, has kept its vector
    assert not any(v.trainable for v in (book.embed, book.cluster_size, book.embed_avg))

def test_a_bad_batch_leaves_the_codes_as_they_are():
    book = Codebook(3, 2)
    book.build()
    book.cluster_size.assign([1., 2., 3.])
    before = [v.numpy() for v in (book.embed, book.cluster_size, book.embed_avg)]
    codes, seed, bad = tf.constant([[0, 1, 1, 0]]), tf.constant([0, 1]), tf.constant(False)
    update_codebook(book, np.full((1, 4, 2), np.nan, np.float32), codes, seed, good=bad)
    held = book.embed, book.cluster_size, book.embed_avg
    assert all((v.numpy() == old).all() for v, old in zip(held, before))
    update_codebook(book, normal(1, 4, 2), codes, seed, good=tf.constant(True))
    assert (book.embed.numpy() != before[0]).any()

def test_lost_codes_move_to_vectors_from_the_whole_batch():
    book, z = Codebook(200, 1), np.arange(5, dtype=np.float32).reshape(1, 5, 1)
    book.build()
    assert not book.cluster_size.numpy().any() and not book.embed_avg.numpy().any()
    assert 0.8 < np.std(book.embed) < 1.2
    update_codebook(book, z, tf.zeros((1, 5), tf.int32), tf.constant([0, 1]))
    assert {*book.embed_avg.numpy()[0, 1:].tolist()} == {0., 1., 2., 3., 4.}
    assert (book.cluster_size.numpy()[1:] == 1).all()

def test_a_code_that_nothing_chose_moves_to_a_vector_of_the_batch():
    book = Codebook(4, 3)
    book.build()
    z = normal(1, 8, 3)
    lost = moved(book, z, tf.zeros((1, 8), tf.int32), 100)[3]
    assert np.abs(z[0] - lost).max(-1).min() < 0.1

def test_the_codebook_gets_no_gradient(dvae):
    with tf.GradientTape() as tape: loss = tf.reduce_sum(dvae(tf.constant(normal(1, 8, 80)))[0])
    assert all(g is not None for g in tape.gradient(loss, dvae.trainable_variables))
    assert not any('codebook' in v.path or 'mel_stats' in v.path for v in dvae.trainable_variables)

def test_gradients_pass_straight_through(dvae):
    "The encoder learns from the reconstruction although choosing a code has no derivative."
    with tf.GradientTape() as tape: loss = tf.reduce_mean(dvae(tf.constant(normal(1, 8, 80)))[0]**2)
    kernels = [v for v in dvae.encoder.trainable_variables if 'kernel' in v.path]
    assert all(np.abs(g).max() > 0 for g in tape.gradient(loss, kernels))

def test_mel_constants():
    mels = np.array([[1., -3., 0.], [3., -1., 0.]])
    assert np.allclose(mel_stats(mels), [2, 2, 0.1])   # never zero, it is divided by
    assert mel_stats(mels).dtype == np.float32

def test_saved_and_loaded(dvae, small, tmp_path):
    dvae.save(tmp_path / 'd.safetensors')
    again, mel = load_dvae(tmp_path / 'd.safetensors', small), tf.constant(5 * normal(1, 40, 80))
    assert np.array_equal(dvae.encode(mel), again.encode(mel))
    assert np.array_equal(dvae.mel_stats, again.mel_stats)
    assert all(np.array_equal(a, b) for a, b in zip(dvae.variables, again.variables))
    again.save(tmp_path / 'e.safetensors')
    assert (tmp_path / 'd.safetensors').read_bytes() == (tmp_path / 'e.safetensors').read_bytes()

@pytest.mark.parametrize('change', [{'hidden': 32}, {'codes': 16}, {'codebook_dim': 4}, {'resnet_blocks': 2}])
def test_another_size_is_named(dvae, small, tmp_path, change):
    dvae.save(tmp_path / 'd.safetensors')
    with pytest.raises(UserError, match='d.safetensors.*(of another size|belongs to another model)'):
        load_dvae(tmp_path / 'd.safetensors', small.replace(model={'dvae': change}))

@pytest.mark.parametrize('kind', ['bfloat16', 'float16'])
def test_half_precision_keeps_codebook_and_constants_in_float32(small, kind):
    keras.utils.set_random_seed(0)
    plain = DVAE(small)
    keras.utils.set_random_seed(0)
    mixed = DVAE(small, dtype=f'mixed_{kind}')
    assert all(v.dtype == 'float32' for v in named_weights(mixed).values())
    codes = tf.constant([[1, 2, 3, 4]])
    assert np.abs(plain.decode(codes) - mixed.decode(codes)).max() < 0.05 * np.abs(plain.decode(codes)).max()

def test_codes_and_mels_are_those_of_coqui_tts(toy_xtts, toy_inputs, theirs, all_ok):
    all_ok(dvae_parity(toy_xtts.dvae, toy_inputs, theirs))

def test_the_losses(dvae):
    mel = 5 * normal(2, 8, 80)
    rebuilt, z, codes = (x.numpy() for x in dvae(tf.constant(mel)))
    losses = dvae_losses(dvae, tf.constant(mel))
    error, away = rebuilt - mel / dvae.mel_stats.numpy(), z - dvae.codebook.decode(codes).numpy()
    assert float(losses['mel_loss']) == pytest.approx(np.abs(error).mean() + (error**2).mean(), rel=1e-5)
    assert float(losses['commitment']) == pytest.approx((away**2).mean(), rel=1e-5)
    assert np.array_equal(losses['codes'], codes) and np.array_equal(losses['z'], z)

def test_a_dvae_in_a_larger_file(dvae, small, tmp_path):
    from xtts_nb.files import save_weights
    save_weights(tmp_path / 'm.safetensors', {f'dvae/{k}': v for k, v in named_weights(dvae).items()})
    again = load_dvae(tmp_path / 'm.safetensors', small, 'dvae/')
    assert all(np.array_equal(a, b) for a, b in zip(dvae.variables, again.variables))


# --- the precision is the network's own -----------------------------------------------------------

@pytest.fixture
def other_policy():
    "A global policy of Keras as `configure` sets it."
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy('mixed_bfloat16')
    yield
    keras.config.set_dtype_policy(before)

@pytest.mark.parametrize('make', [DVAE, HiFiGAN, SpeakerEncoder, lambda config: Critic(config.voice)],
                         ids=['DVAE', 'HiFiGAN', 'SpeakerEncoder', 'Critic'])
def test_no_layer_follows_the_global_policy(small, other_policy, make):
    "Else a cache that is prepared after `configure` would hold other codes under the same key."
    layers = [layer for layer in make(small)._flatten_layers() if layer.dtype_policy.name != 'float32']
    assert not layers, layers

def test_codes_are_the_same_under_another_global_policy(small, dvae, tmp_path, other_policy):
    dvae.save(tmp_path / 'dvae.safetensors')
    mel = tf.random.stateless_normal((2, 40, 80), (1, 2)) * 3
    again = load_dvae(tmp_path / 'dvae.safetensors', small)
    assert (again.encode(mel).numpy() == dvae.encode(mel).numpy()).all()
    assert (again.decode(again.encode(mel)).numpy() == dvae.decode(dvae.encode(mel)).numpy()).all()

def test_a_policy_that_is_named_reaches_every_layer(small):
    "Except the normalisation, which is always in float32."
    kinds = (HiFiGAN(small, dtype='mixed_bfloat16'), SpeakerEncoder(small, dtype='mixed_bfloat16'),
             Critic(small.voice, dtype='mixed_bfloat16'))
    for net in kinds:
        names = {layer.dtype_policy.name for layer in net._flatten_layers()
                 if not isinstance(layer, keras.layers.BatchNormalization)}
        assert names == {'mixed_bfloat16'}, net
