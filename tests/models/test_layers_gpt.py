"The blocks: what each position may see, seeds, shapes, precision."
from math import erf

import keras
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.models import gpt
from xtts_nb.models.dvae import Conv1D, ResidualBlock
from xtts_nb.models.gpt import (
    AttentionBlock, FEW_ROWS, Int8Dense, Perceiver, PerceiverLayer, RMSNorm, TransformerBlock, attend,
    causal_mask, dropout, dropout_keys, fold_seed, gelu, split_heads)
from benchmarks.parity import gpt_parity


def normal(*shape, seed=0): return np.random.default_rng(seed).normal(size=shape).astype(np.float32)

SEED = tf.constant([3, 4])


# --- dropout ------------------------------------------------------------------------------------------------

def test_the_seed_decides_the_mask():
    x = tf.ones((50, 50))
    a, b, c = (dropout(x, 0.3, dropout_keys(SEED, 3)[p]).numpy() for p in (1, 1, 2))
    assert np.array_equal(a, b) and not np.array_equal(a, c)
    assert set(np.unique(a)) == {0., np.float32(1 / 0.7)} and abs((a == 0).mean() - 0.3) < 0.03

def test_graph_and_eager_draw_the_same_mask():
    x = tf.ones((20, 20))
    masks = lambda seed: [dropout(x, 0.5, key) for key in tf.unstack(dropout_keys(seed, 2))]
    assert np.array_equal(masks(SEED), tf.function(masks)(SEED))

@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_masks_have_the_rate_in_every_precision(dtype):
    "A number drawn in bfloat16 would have eight bits, and the share would be 13/128."
    made = dropout(tf.ones((1000, 1000), dtype), 0.1, dropout_keys(SEED, 1)[0])
    assert made.dtype == dtype and abs(float(np.mean(made.numpy() == 0)) - 0.1) < 0.0012
    assert float(tf.reduce_max(made)) == pytest.approx(1 / 0.9, rel=4e-3)

def test_masks_of_different_keys_are_independent():
    drawn = [dropout(tf.ones(40_000), 0.5, key).numpy() > 0
             for seed in (SEED, SEED + 1) for key in dropout_keys(seed, 3)]
    shared = [np.mean(a == b) for i, a in enumerate(drawn) for b in drawn[:i]]
    assert np.allclose(shared, 0.5, atol=0.015)

def test_gradients_pass_where_numbers_stay():
    x, key = tf.ones(200), dropout_keys(SEED, 1)[0]
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = dropout(x, 0.25, key)
    assert np.allclose(tape.gradient(y, x), y) and 0 < np.mean(y.numpy() == 0) < 1

def test_all_keys_are_drawn_by_one_operation():
    graph = tf.function(lambda seed: dropout_keys(seed, 91)).get_concrete_function(SEED).graph
    drawn = [op.type for op in graph.get_operations() if 'StatelessRandom' in op.type]
    assert len(drawn) == 2   # the key of the seed, and with it all others
    keys = dropout_keys(SEED, 91)
    assert keys.shape == (91, 1) and len(set(keys.numpy().ravel())) == 91
    assert dropout_keys(None, 2) == [None, None]

@pytest.mark.parametrize('rate, keys', [(0., dropout_keys(SEED, 1)), (0.9, [None]), (0., [None])])
def test_without_rate_or_key_nothing_happens(rate, keys):
    x = tf.ones(10)
    assert dropout(x, rate, keys[0]) is x

def test_folding_gives_other_seeds_and_keeps_none():
    seeds = {tuple(fold_seed(SEED, i).numpy()) for i in range(100)}
    assert len(seeds) == 100 and fold_seed(None, 3) is None
    assert tuple(fold_seed(fold_seed(SEED, 1), 2).numpy()) != tuple(fold_seed(fold_seed(SEED, 2), 1).numpy())


# --- attention ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize('queries, keys, offset', [(1, 1, 0), (4, 4, 0), (1, 9, 5), (3, 9, 6)])
def test_the_causal_mask(queries, keys, offset):
    mask = np.array(causal_mask(queries, keys, offset))
    assert all(mask[q, k] == (k <= q + offset) for q in range(queries) for k in range(keys))

def test_scores_beyond_the_range_of_float16():
    "q·k is 64 x 40 x 40 = 102,400, and float16 ends at 65,504; scaled it is 12,800."
    q = k = tf.constant(40., tf.float16, (1, 1, 1, 64))
    k = tf.concat([k, -k], 1)
    assert np.array_equal(attend(q, k, tf.stack([q[0] * 0 + 1, q[0] * 0 + 2], 1)), q[0] * 0 + 1)

@pytest.mark.parametrize('precision', ['float16', 'bfloat16', 'float32'])
def test_large_activations_have_finite_gradients(precision):
    "Beyond 147, the cube in the approximation of GELU has a gradient beyond the range of float16."
    x = tf.constant([-60000., -300., -150., -20., 0., 20., 150., 300., 60000.])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = gelu(tf.cast(x, precision))
    slope = tape.gradient(y, x)
    assert y.dtype == precision and np.allclose(slope, [0., 0, 0, 0, .5, 1, 1, 1, 1], atol=1e-3)
    assert np.allclose(tf.cast(y, 'float32'), np.maximum(x, 0), rtol=1e-2)

def test_a_block_in_float16_takes_large_activations():
    "Of 3,000, as the last blocks of a trained GPT have them: states and gradients stay finite."
    keras.utils.set_random_seed(0)
    block = TransformerBlock(32, 2, dtype='mixed_float16')
    block.build((None, 5, 32))
    block.expand.kernel.assign(block.expand.kernel * 2000)   # to some 200 before GELU
    x = tf.cast(3000 * tf.random.stateless_normal((2, 5, 32), (0, 1)), tf.float16)
    with tf.GradientTape() as tape:
        y = block(x, causal_mask(5, 5))
        loss = tf.reduce_mean(tf.cast(y, tf.float32) / 1e4)
    found = [y, *tape.gradient(loss, block.trainable_variables)]
    assert all(np.isfinite(tf.cast(v, tf.float32)).all() for v in found)

def loops(q, k, v, mask):
    out = np.zeros((*q.shape[:2], q.shape[2] * v.shape[3]))
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            score = np.where(mask, q[b, :, h] @ k[b, :, h].T / np.sqrt(q.shape[3]), -1e9)
            weight = np.exp(score - score.max(-1, keepdims=True))
            weight /= weight.sum(-1, keepdims=True)
            out[b, :, h * v.shape[3]:(h + 1) * v.shape[3]] = weight @ v[b, :, h]
    return out

@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('batch, queries, keys, heads, size',
                         [(1, 1, 2, 1, 1), (2, 5, 5, 3, 4), (3, 2, 7, 2, 8)])
def test_attention_equals_loops(batch, queries, keys, heads, size, causal):
    q = normal(batch, queries, heads, size)
    k, v = (normal(batch, keys, heads, size, seed=s) for s in (1, 2))
    mask = np.array(causal_mask(queries, keys)) if causal else np.ones((queries, keys), bool)
    got = attend(tf.constant(q), tf.constant(k), tf.constant(v), mask if causal else None)
    assert got.shape == (batch, queries, heads * size) and np.allclose(got, loops(q, k, v, mask), atol=1e-5)

def test_masked_keys_do_not_matter_even_if_huge():
    q, k, v = (tf.constant(normal(1, 4, 2, 8, seed=s)) for s in range(3))
    wild = tf.tensor_scatter_nd_update(v, [[0, 3]], [tf.fill((2, 8), 1e6)])
    mask = np.array([[True, True, True, False]] * 4)
    assert np.array_equal(attend(q, k, v, mask), attend(q, k, wild, mask))

def test_heads_are_slices_of_the_width():
    x = tf.constant(normal(2, 3, 12))
    split = split_heads(x, 4)
    assert split.shape == (2, 3, 4, 3) and np.array_equal(split[:, :, 1], x[:, :, 3:6])


# --- blocks -------------------------------------------------------------------------------------------------

def test_what_is_added_to_the_residual_begins_smaller():
    keras.utils.set_random_seed(0)
    block = TransformerBlock(64, 2, residual_scale=0.25)
    block.build((None, None, 64))
    stds = {name: float(np.std(getattr(block, name).kernel))
            for name in ('qkv', 'expand', 'project', 'contract')}
    assert stds == pytest.approx({'qkv': 0.02, 'expand': 0.02, 'project': 0.005, 'contract': 0.005}, rel=0.05)

def test_dropout_in_a_block_follows_the_seed():
    block, x, mask = TransformerBlock(16, 2, rate=0.5), normal(1, 6, 16), causal_mask(6, 6)
    a, b, c, plain = (np.array(block(x, mask, dropout_keys(seed, 3)))
                      for seed in (SEED, SEED, SEED + 1, None))
    assert np.array_equal(plain, block(x, mask))
    assert np.array_equal(a, b) and not np.allclose(a, c) and not np.allclose(a, plain)

def _built(block, shape):
    block.build(shape)
    return block

@pytest.mark.parametrize('frames', [1, 2, 7, 64])
def test_the_perceiver_takes_any_length(frames):
    perceiver = Perceiver(4, 32, 2, 2, 8)
    out = perceiver(tf.constant(normal(3, frames, 32)))
    assert out.shape == (3, 4, 32) and np.isfinite(out).all()
    assert np.allclose(np.linalg.norm(out, axis=-1), 32**0.5, atol=1e-3)

def test_the_perceiver_does_not_mind_the_order_of_frames():
    perceiver, x = Perceiver(4, 32, 2, 2, 8), normal(1, 9, 32)
    assert np.allclose(perceiver(tf.constant(x)), perceiver(tf.constant(x[:, ::-1])), atol=1e-5)

def test_rows_of_a_batch_do_not_meet():
    x = normal(3, 8, 32)
    block = _built(AttentionBlock(2), (1, 8, 32))
    block.project.kernel.assign(normal(32, 32, seed=1))
    for layer in (block, Perceiver(4, 32, 1, 2, 8), ResidualBlock(32), Conv1D(8, 3, 2)):
        assert np.allclose(layer(tf.constant(x)),
                           np.concatenate([layer(tf.constant(x[i:i + 1])) for i in range(3)]),
                           atol=1e-5), layer

def test_an_attention_block_begins_as_its_norm():
    "The released model adds to the normalised frames, not to the frames."
    block, x = AttentionBlock(2), tf.constant(3 * normal(2, 8, 32) + 1)
    assert np.allclose(block(x), block.norm(x), atol=1e-6) and abs(float(tf.reduce_mean(block(x)))) < 1e-3

@pytest.mark.parametrize('frames', [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize('stride', [1, 2])
def test_a_convolution_halves_rounding_up(frames, stride):
    conv = _built(Conv1D(5, 3, stride), (None, None, 4))
    assert conv(tf.constant(normal(1, frames, 4))).shape == (1, -(-frames // stride), 5)

def test_a_convolution_equals_loops():
    conv, x = Conv1D(5, 3, 2), normal(1, 9, 4)
    got = conv(tf.constant(x))
    padded, kernel = np.pad(x[0], ((1, 1), (0, 0))), conv.conv.kernel.numpy()
    assert np.allclose(got[0], [np.einsum('kc,kcf->f', padded[i:i + 3], kernel) for i in range(0, 9, 2)],
                       atol=1e-5)

@pytest.mark.parametrize('scale', [1e-20, 1., 1e8])
def test_the_norm_is_one_for_any_loudness(scale):
    out = np.array(RMSNorm()(tf.constant(normal(3, 16)) * scale))
    assert np.isfinite(out).all()
    assert scale < 1e-15 or np.allclose(np.linalg.norm(out, axis=-1), 4, atol=1e-3)

@pytest.mark.parametrize('layer',
                         [lambda p: TransformerBlock(32, 2, dtype=p), lambda p: AttentionBlock(2, dtype=p),
                          lambda p: Perceiver(4, 32, 1, 2, 8, dtype=p), lambda p: ResidualBlock(32, dtype=p),
                          lambda p: RMSNorm(dtype=p)],
                         ids=['transformer', 'attention', 'perceiver', 'residual', 'norm'])
@pytest.mark.parametrize('kind, near', [('bfloat16', 0.1), ('float16', 0.01)])
def test_half_precision_is_close_and_weights_stay_float32(layer, kind, near):
    x, outs = tf.constant(normal(2, 8, 32)), []
    for policy in ('float32', f'mixed_{kind}'):
        keras.utils.set_random_seed(1)
        net = layer(policy)
        out = net(x, causal_mask(8, 8)) if isinstance(net, TransformerBlock) else net(x)
        assert all(v.dtype == 'float32' for v in net.variables)
        outs.append(np.array(tf.cast(out, tf.float32)))
    assert out.dtype == kind and 0 < np.abs(outs[0] - outs[1]).max() < near

@pytest.mark.parametrize('kind', ['bfloat16', 'float16'])
def test_softmax_is_float32_in_half_precision(monkeypatch, kind):
    calls, softmax = [], gpt.ops.softmax
    monkeypatch.setattr(gpt.ops, 'softmax', lambda score: calls.append(score.dtype) or softmax(score))
    out = attend(*(tf.cast(tf.constant(normal(1, 5, 2, 4)), kind) for _ in 'qkv'))
    assert calls == ['float32'] and out.dtype == kind

@pytest.mark.parametrize('kind', ['bfloat16', 'float16'])
def test_norms_are_float32_in_half_precision(kind):
    "A sum of squares of 300 is 90 000 a number, beyond float16."
    x = tf.cast(tf.constant(300 * normal(2, 8, 32)), kind)
    block = _built(TransformerBlock(32, 2, dtype=f'mixed_{kind}'), (None, None, 32))
    for norm in (_built(RMSNorm(dtype=f'mixed_{kind}'), (None, 32)), block.attention_norm):
        out = np.array(tf.cast(norm(x), tf.float32))
        assert np.isfinite(out).all() and np.allclose((out**2).mean(-1), 1, rtol=0.02)
    frames = AttentionBlock(2, dtype=f'mixed_{kind}')(x)
    assert np.isfinite(np.array(tf.cast(frames, tf.float32))).all()


# --- what each block computes ------------------------------------------------------------------------------

def erf_gelu(x): return x * (1 + np.vectorize(erf)(x / 2**0.5)) / 2

def tanh_gelu(x): return x / 2 * (1 + np.tanh((2 / np.pi)**0.5 * (x + 0.044715 * x**3)))

def affine(layer, x): return x @ layer.kernel.numpy() + (layer.bias.numpy() if layer.use_bias else 0)

def split(x, heads): return x.reshape(*x.shape[:2], heads, -1)

def standard(x, axis, epsilon=1e-5):
    return (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + epsilon)

def test_a_perceiver_layer_is_attention_and_a_gated_mlp():
    layer, latents, frames = PerceiverLayer(9, 2, 4), normal(2, 3, 9), normal(2, 5, 9, seed=1)
    layer.build(latents.shape, frames.shape)
    k, v = np.split(affine(layer.to_kv, np.concatenate([latents, frames], 1)), 2, -1)
    q, k, v = (split(x, 2) for x in (affine(layer.to_q, latents), k, v))
    x = latents + affine(layer.to_out, loops(q, k, v, np.ones((3, 8), bool)))
    value, gate = np.split(affine(layer.expand, x), 2, -1)
    assert value.shape[-1] == 24
    assert [layer.to_q.use_bias, layer.to_out.use_bias, layer.expand.use_bias] == [False, False, True]
    assert np.allclose(layer(latents, frames), x + affine(layer.contract, value * erf_gelu(gate)), atol=1e-4)

def test_a_transformer_block_is_that_of_gpt_2():
    block, x = TransformerBlock(16, 2), 2 * normal(2, 5, 16) + 1
    block.build(x.shape)
    for v in block.variables: v.assign(v.value + tf.random.stateless_normal(v.shape, SEED, stddev=0.3))
    normed = lambda norm, x: standard(x, -1) * norm.gamma.numpy() + norm.beta.numpy()
    q, k, v = (split(t, 2) for t in np.split(affine(block.qkv, normed(block.attention_norm, x)), 3, -1))
    y = x + affine(block.project, loops(q, k, v, np.tri(5, dtype=bool)))
    y = y + affine(block.contract, tanh_gelu(affine(block.expand, normed(block.mlp_norm, y))))
    assert np.allclose(block(x, causal_mask(5, 5)), y, atol=2e-4)

@pytest.mark.parametrize('width, groups', [(16, 16), (48, 16), (64, 16), (72, 8), (96, 32)])
def test_an_attention_block_norms_groups_and_splits_by_head(width, groups):
    "Groups over all frames, as in torch; of each head's slice a third is q. A quiet input shows the epsilon."
    block, x = AttentionBlock(2), 0.003 * normal(1, 6, width)
    block.build(x.shape)
    for v in block.variables: v.assign(v.value + tf.random.stateless_normal(v.shape, SEED, stddev=0.3))
    normed = standard(x.reshape(1, 6, groups, -1),
                      (1, 3)).reshape(x.shape) * block.norm.gamma.numpy() + block.norm.beta.numpy()
    q, k, v = np.split(split(affine(block.qkv, normed), 2), 3, -1)
    expected = normed + affine(block.project, loops(q, k, v, np.ones((6, 6), bool)))
    assert np.allclose(block(x), expected, atol=1e-3) and block.norm.groups == groups

def test_a_residual_block_equals_its_convolutions():
    block, x = ResidualBlock(4), normal(1, 6, 4)
    block.build(x.shape)
    y = block.convs[1](tf.nn.relu(block.convs[0](x)))
    assert np.allclose(block(x), x + block.convs[2](tf.nn.relu(y)), atol=1e-5)
    assert [conv.kernel_size for conv in block.convs] == [3, 3, 1]

def test_norms_of_little_are_divided_by_their_epsilon():
    x = np.float32(1e-5**0.5) * np.tile([1., -1.], 8)[None]   # a variance of 1e-5
    block = _built(TransformerBlock(16, 2), (None, None, 16))
    for norm in (block.attention_norm, block.mlp_norm):
        assert np.allclose(np.abs(norm(x)), 2**-0.5, rtol=1e-4)

def test_every_dropout_of_a_block_has_its_place(monkeypatch):
    "Of the weights of attention, of what it adds and of what the MLP adds, with the rate of the block."
    calls, real = [], gpt.dropout
    monkeypatch.setattr(gpt, 'dropout', lambda x, rate,
                        key: calls.append((x.shape, rate, int(key[0]))) or real(x, rate, key))
    TransformerBlock(16, 2, rate=0.25)(normal(1, 5, 16), causal_mask(5, 5), keys := dropout_keys(SEED, 3))
    made = [((1, 2, 5, 5), 0.25), ((1, 5, 16), 0.25), ((1, 5, 16), 0.25)]
    assert [(tuple(shape), rate) for shape, rate, _ in calls] == made
    assert [key for *_, key in calls] == keys.numpy().ravel().tolist()

def test_the_first_latents_are_small():
    latents = _built(Perceiver(64, 64, 1, 2, 8), (None, None, 64)).latents
    assert float(np.std(latents)) == pytest.approx(0.02, rel=0.06)

def test_voice_and_logits_are_those_of_coqui_tts(toy_xtts, toy_inputs, theirs, all_ok):
    all_ok(gpt_parity(toy_xtts.gpt, toy_inputs, theirs))


# --- int8 ---------------------------------------------------------------------------------------------------

def dense_layer(kernel, dtype='float32'):
    dense = keras.layers.Dense(kernel.shape[1], dtype=dtype)
    dense.build((None, None, kernel.shape[0]))
    dense.set_weights([kernel, np.arange(kernel.shape[1], dtype=np.float32)])
    return dense

@pytest.mark.parametrize('shape', [(1, 1), (3, 1), (1, 3), (2, 2)], ids=str)
@pytest.mark.parametrize('compiled', [False, True])
def test_a_product_of_whole_numbers_is_exact(shape, compiled):
    "Columns and rows whose greatest value is 127 times their scale lose nothing."
    random = np.random.default_rng(0)
    kernel, x = random.integers(-126, 127, (16, 6)), random.integers(-126, 127, (*shape, 16))
    kernel[3], x[..., 5] = 127, -127
    kernel, x = (kernel * [1, 2, .5, 4, 8, 1]).astype(np.float32), (x * .25).astype(np.float32)
    dense = dense_layer(kernel)
    product = tf.function(Int8Dense(dense), jit_compile=True) if compiled else Int8Dense(dense)
    np.testing.assert_allclose(product(tf.constant(x)), x @ kernel + np.arange(6), rtol=1e-5)

def test_a_product_in_int8_is_near():
    x, dense = tf.constant(normal(4, 1, 64)), dense_layer(normal(64, 96, seed=1))
    error = tf.norm(Int8Dense(dense)(x) - dense(x)) / tf.norm(dense(x))
    assert 0.001 < error < 0.02
    each = [Int8Dense(dense)(x[i:i + 1]) for i in range(4)]   # a row does not depend on the others
    np.testing.assert_array_equal(tf.concat(each, 0), Int8Dense(dense)(x))

def test_many_rows_and_unknown_numbers_of_rows_are_float():
    dense = dense_layer(normal(8, 5))
    product, x = Int8Dense(dense), tf.constant(normal(2, FEW_ROWS // 2, 8, seed=1))
    assert not np.array_equal(product(x), dense(x))
    more = tf.constant(normal(1, FEW_ROWS + 1, 8, seed=1))
    np.testing.assert_array_equal(product(more), dense(more))
    free = tf.function(product, input_signature=[tf.TensorSpec((1, None, 8))])
    np.testing.assert_allclose(free(x[:1]), dense(x[:1]), atol=1e-5)

def test_zeros_and_bfloat16():
    kernel = normal(8, 5)
    kernel[:, 2] = 0
    product = Int8Dense(dense_layer(kernel, 'mixed_bfloat16'))
    np.testing.assert_array_equal(product(tf.zeros((1, 1, 8), tf.bfloat16))[0, 0], np.arange(5))
    assert product(tf.ones((1, 1, 8), tf.bfloat16)).dtype == tf.bfloat16
    assert product.kernel.dtype == tf.int8 and not product.kernel.trainable
