"The GPT and its blocks: nothing looks ahead, padding does not count, seeds decide, precision, parity."
import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks.parity import gpt_parity
from xtts_nb.models.gpt import (
    attend, AttentionBlock, causal_mask, dropout, _dropout_keys, gelu, GPT, Int8Dense, _recomputed, RMSNorm,
    TransformerBlock)

SEED = tf.constant([1, 2])

@pytest.mark.parametrize('kind, near', [('bfloat16', 0.05), ('float16', 0.005)])
def test_half_precision_is_close_to_float32(small, xtts, batch, kind, near):
    inputs = [batch[k] for k in ('text', 'text_length', 'codes', 'code_length', 'reference')]
    mixed = GPT(small, xtts.gpt.text_start, dtype=f'mixed_{kind}')
    for a, b in zip(mixed.variables, xtts.gpt.variables): a.assign(b)
    for plain, rough in zip(xtts.gpt(*inputs), mixed(*inputs)):
        assert rough.dtype == tf.float32 and 0 < np.abs(plain - rough).max() < near
    assert all(v.dtype == 'float32' for v in mixed.variables)

@pytest.mark.parametrize('xla', [False, True])
@pytest.mark.parametrize('dtype, near', [('float32', 1e-5), ('bfloat16', 5e-2)])
def test_written_gradients_are_those_of_tensorflow(dtype, near, xla):
    key, mask = _dropout_keys(SEED, 1)[0], causal_mask(7, 7)
    given = [tf.cast(tf.random.stateless_normal((2, 7, 3, 8), (0, i)), dtype) for i in range(3)]
    def plain(q, k, v):
        score = tf.where(mask, tf.cast(tf.einsum('blhk,bmhk->bhlm', q * 8**-.5, k), tf.float32), -1e9)
        weight = dropout(tf.cast(tf.nn.softmax(score), v.dtype), .3, key)
        return keras.ops.gelu(tf.reshape(tf.einsum('bhlm,bmhk->blhk', weight, v), (2, 7, 24)))
    written = lambda q, k, v: gelu(attend(q, k, v, mask, .3, key))
    def answers(function):
        with tf.GradientTape() as tape:
            tape.watch(given)
            y = function(*given)
        return [y, *tape.gradient(y, given, tf.random.stateless_normal(y.shape, (1, 1), dtype=y.dtype))]
    for a, b in zip(*(tf.function(answers, jit_compile=xla)(f) for f in (plain, written)), strict=True):
        np.testing.assert_allclose(tf.cast(b, tf.float32), tf.cast(a, tf.float32), rtol=near, atol=near)

def test_the_answers_are_those_of_coqui_tts(toy_xtts, toy_inputs, theirs, all_ok):
    all_ok(gpt_parity(toy_xtts.gpt, toy_inputs, theirs))

def test_a_recomputed_block_draws_its_masks_again():
    "Its keys depend on its input, so a compiler cannot hold the masks of the forward pass."
    block = _recomputed(lambda x, mask, keys: dropout(x * mask, 0.5, keys[0]))

    @tf.function
    def both(x, keys):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = block(x, 2., keys)
        return y, tape.gradient(y, x)

    x, keys = tf.random.normal((4, 50), seed=1), _dropout_keys(tf.constant([1, 2]), 1)
    y, gradient = both(x, keys)
    assert np.array_equal(y, dropout(2 * x, 0.5, keys[0])) and 50 < np.count_nonzero(gradient) < 150
    assert np.array_equal(gradient != 0, y != 0)   # the same masks
    graph = both.get_concrete_function(x, keys).graph
    drawn = [op for op in graph.get_operations() if op.type == 'StatelessRandomUniformFullIntV2']
    assert len(drawn) == 2 and all(graph.inputs[0].op in above(op.inputs[1].op) for op in drawn)

def above(op) -> set:
    "An operation and all that it is computed from."
    found, waiting = set(), [op]
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting += [x.op for x in op.inputs]
    return found

@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_masks_have_the_rate_in_every_precision(dtype):
    "On average: one mask drops 25 or 26 of 256, and scales by its own share."
    made = np.array([tf.cast(dropout(tf.ones((50, 203), dtype), 0.1, key), 'float32')
                     for key in _dropout_keys(SEED, 300)])
    assert abs(np.mean(made == 0) - 0.1) < 0.0006 and abs(np.mean(made) - 1) < 0.004
    assert {*np.unique(made)} == {0, *(float(tf.cast(256 / kept, dtype)) for kept in (230, 231))}

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

@pytest.mark.parametrize('kind', ['bfloat16', 'float16'])
def test_norms_are_float32_in_half_precision(kind):
    "A sum of squares of 300 is 90 000 a number, beyond float16."
    x = tf.cast(300 * tf.random.stateless_normal((2, 8, 32), SEED), kind)
    block = TransformerBlock(32, 2, dtype=f'mixed_{kind}')
    block.build((None, None, 32))
    for norm in (RMSNorm(dtype=f'mixed_{kind}'), block.attention_norm):
        out = np.array(tf.cast(norm(x), tf.float32))
        assert np.isfinite(out).all() and np.allclose((out**2).mean(-1), 1, rtol=0.02)
    frames = AttentionBlock(2, dtype=f'mixed_{kind}')(x)
    assert np.isfinite(np.array(tf.cast(frames, tf.float32))).all()

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
