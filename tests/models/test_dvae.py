"Mel <-> codes: shapes, the nearest code, lost codes, training, files."
import keras
import numpy as np
import tensorflow as tf

from xtts_nb.models.dvae import Codebook, DVAE, _update_codebook
from benchmarks.parity import dvae_parity
from xtts_nb.models.hifigan import Critic, HiFiGAN, SpeakerEncoder

def normal(*shape, seed=0): return np.random.default_rng(seed).normal(size=shape).astype(np.float32)

def test_one_update_to_the_last_digit():
    "Running sums and counts, and vectors that are their quotients, steadied by 1e-5 a code."
    book = Codebook(3, 2)
    book.build()
    counts, sums, z = np.array([2e-5, 4., 2**-17]), normal(2, 3), normal(1, 4, 2, seed=1)
    book.cluster_size.assign(counts)
    book.embed_avg.assign(sums)
    _update_codebook(book, z, tf.constant([[0, 1, 1, 0]]), tf.constant([0, 1]), decay=0.75,
                     lost=0.75 * 2**-17)
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
    _update_codebook(book, np.full((1, 4, 2), np.nan, np.float32), codes, seed, good=bad)
    held = book.embed, book.cluster_size, book.embed_avg
    assert all((v.numpy() == old).all() for v, old in zip(held, before))
    _update_codebook(book, normal(1, 4, 2), codes, seed, good=tf.constant(True))
    assert (book.embed.numpy() != before[0]).any()

def test_gradients_pass_straight_through(dvae):
    "The encoder learns from the reconstruction although choosing a code has no derivative."
    with tf.GradientTape() as tape: loss = tf.reduce_mean(dvae(tf.constant(normal(1, 8, 80)))[0]**2)
    kernels = [v for v in dvae.encoder.trainable_variables if 'kernel' in v.path]
    assert all(np.abs(g).max() > 0 for g in tape.gradient(loss, kernels))

def test_codes_and_mels_are_those_of_coqui_tts(toy_xtts, toy_inputs, theirs, all_ok):
    all_ok(dvae_parity(toy_xtts.dvae, toy_inputs, theirs))

def test_no_layer_follows_the_global_policy(small):
    "Else a cache that a program with such a policy prepares would hold other codes under its key."
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy('mixed_bfloat16')
    try: nets = DVAE(small), HiFiGAN(small), SpeakerEncoder(small), Critic(small.training.decoder)
    finally: keras.config.set_dtype_policy(before)
    assert {layer.dtype_policy.name for net in nets for layer in net._flatten_layers()} == {'float32'}
