"The GPT: nothing looks ahead, padding does not count, seeds decide, sizes match the released model."
import keras
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.models import gpt as gpt_module
from xtts_nb.config import XTTSConfig
from xtts_nb.models.dvae import parameter_count
from xtts_nb.models.gpt import GPT, Int8GPT, dropout, dropout_keys, joint_mask, recomputed, shifted
from benchmarks.parity import gpt_parity

P, T, S, START = 4, 10, 12, 3
SEED = tf.constant([1, 2])


@pytest.fixture(scope='module')
def gpt(xtts): return xtts.gpt

@pytest.fixture(scope='module')
def inputs():
    "Two rows; the second is shorter in both parts."
    rng = np.random.default_rng(0)
    return dict(text=rng.integers(4, 20, (2, T)).astype(np.int32), text_length=np.array([T, 6], np.int32),
                codes=rng.integers(0, 32, (2, S)).astype(np.int32), code_length=np.array([S, 7], np.int32),
                reference=rng.normal(size=(2, 32, 80)).astype(np.float32))

def call(gpt, inputs, seed=None, **changes):
    return [np.array(x) for x in gpt(**{k: tf.constant(v) for k, v in (inputs | changes).items()}, seed=seed)]


def test_a_gpt_in_int8_shares_all_but_the_products(gpt):
    quick = Int8GPT(gpt)
    assert quick.cfg is gpt.cfg and quick.code_head is gpt.code_head and len(quick.blocks) == len(gpt.blocks)
    for a, b in zip(quick.blocks, gpt.blocks):
        assert (a.heads, a.width, a.attention_norm, a.mlp_norm) == (
            b.heads, b.width, b.attention_norm, b.mlp_norm)
        for name in ('qkv', 'project', 'expand', 'contract'):
            assert getattr(a, name).dense is getattr(b, name) and getattr(a, name).kernel.dtype == tf.int8
    assert len(gpt.trainable_variables) == len(quick.gpt.trainable_variables)

@pytest.mark.slow
def test_the_full_size(): assert parameter_count(GPT(XTTSConfig.xtts_v2(), 261)) == 441_018_563

def test_shapes(gpt, inputs, small):
    text, code = call(gpt, inputs)
    assert text.shape == (2, T + 2, small.model.gpt.text_tokens)
    assert code.shape == (2, S + 2, small.model.dvae.codes + 2)
    assert text.dtype == code.dtype == np.float32 and np.isfinite(text).all() and np.isfinite(code).all()

@pytest.mark.parametrize('stops', [1, 4])
@pytest.mark.parametrize('length', [0, 1, 3, 5])
def test_inputs_and_targets(length, stops):
    ids = tf.constant([[7, 8, 9, 10, 11]])
    inputs, targets, counted = (np.array(x)[0].tolist()
                                for x in shifted(ids, tf.constant([length]), 1, 2, stops))
    row_ids, rest = [7, 8, 9, 10, 11][:length], 5 - length
    assert inputs == [1, *row_ids] + [2] * (rest + stops) and targets == [*row_ids] + [2] * (rest + stops + 1)
    assert counted == [1.] * (length + stops) + [0.] * (rest + 1)

def test_what_stands_behind_the_length_does_not_matter():
    a, b = (shifted(tf.constant([[7, 8, x, x]]), tf.constant([2]), 1, 0) for x in (0, 31))
    assert all(np.array_equal(x, y) for x, y in zip(a, b))

@pytest.mark.parametrize('stop_visible', [True, False])
@pytest.mark.parametrize('length', [0, 2, 5])
def test_the_mask_position_by_position(length, stop_visible):
    prompt, text, codes = 2, 7, 3   # text part: START, at most 5 tokens, STOP
    mask = np.array(joint_mask(prompt, text, tf.constant([length]), codes, stop_visible))[0, 0]
    filled = set(range(prompt + length + 1 + stop_visible, prompt + text))
    assert all(mask[q, k] == (k <= q and k not in filled) for q in range(12) for k in range(12))

@pytest.mark.parametrize('place', [0, 5, S - 1])
def test_codes_see_only_what_came_before(gpt, inputs, place):
    changed = inputs['codes'].copy()
    changed[0, place] = (changed[0, place] + 1) % 32
    (text, code), (text2, code2) = call(gpt, inputs), call(gpt, inputs, codes=changed)
    moved = np.abs(code - code2).max(-1)
    assert np.array_equal(text, text2) and not moved[1].any()
    assert not moved[0, :place + 1].any() and moved[0, place + 1:].all()

@pytest.mark.parametrize('place', [0, 4, T - 1])
def test_text_sees_only_what_came_before_and_codes_see_all_of_it(gpt, inputs, place):
    changed = inputs['text'].copy()
    changed[0, place] = 30
    (text, code), (text2, code2) = call(gpt, inputs), call(gpt, inputs, text=changed)
    moved = np.abs(text - text2).max(-1)
    assert not moved[0, :place + 1].any() and moved[0, place + 1:].all() and not moved[1].any()
    assert (np.abs(code - code2).max(-1)[0] > 0).all()

def test_the_reference_reaches_every_position_of_its_own_row(gpt, inputs):
    changed = inputs['reference'].copy()
    changed[0] += 1
    (text, code), (text2, code2) = call(gpt, inputs), call(gpt, inputs, reference=changed)
    for a, b in ((text, text2), (code, code2)):
        assert (np.abs(a - b).max(-1)[0] > 1e-6).all() and np.allclose(a[1], b[1], atol=1e-6)

@pytest.mark.parametrize('more', [1, 5, 20])
@pytest.mark.parametrize('filler', [0, 17])
def test_padding_does_not_count(gpt, inputs, more, filler):
    wide = lambda x: np.pad(x, ((0, 0), (0, more)), constant_values=filler)
    text, code = call(gpt, inputs)
    text2, code2 = call(gpt, inputs, text=wide(inputs['text']), codes=wide(inputs['codes']))
    for row in range(2):
        t, c = inputs['text_length'][row] + 1, inputs['code_length'][row] + 1
        assert np.allclose(text[row, :t], text2[row, :t], atol=1e-5)
        assert np.allclose(code[row, :c], code2[row, :c], atol=1e-5)

def test_a_row_alone_equals_the_row_in_company(gpt, inputs):
    text, code = call(gpt, inputs)
    alone = call(gpt, {k: v[1:] for k, v in inputs.items()})
    assert np.allclose(text[1], alone[0][0], atol=1e-5) and np.allclose(code[1], alone[1][0], atol=1e-5)

def test_the_longest_text_and_codes_there_may_be(gpt, small):
    g = small.model.gpt
    text, code = call(gpt, dict(text=np.full((1, g.max_text_tokens), 4, np.int32),
                                text_length=np.array([g.max_text_tokens], np.int32),
                                codes=np.zeros((1, g.max_audio_codes), np.int32),
                                code_length=np.array([g.max_audio_codes], np.int32),
                                reference=np.zeros((1, 32, 80), np.float32)))
    assert np.isfinite(text).all() and code.shape[1] == g.max_audio_codes + 2

@pytest.mark.parametrize('frames', [2, 31, 100])
def test_a_reference_of_any_length(gpt, inputs, frames):
    reference = np.random.default_rng(1).normal(size=(2, frames, 80)).astype(np.float32)
    assert np.isfinite(call(gpt, inputs, reference=reference)[1]).all()
    assert gpt.conditioning(reference).shape == (2, P, 64)

def test_dropout_follows_the_seed(gpt, inputs):
    a, b, c, plain = (call(gpt, inputs, seed)[1] for seed in (SEED, SEED, tf.constant([1, 3]), None))
    assert np.array_equal(a, b) and not np.allclose(a, c) and not np.allclose(a, plain)

def test_every_dropout_has_a_seed_of_its_own(gpt, inputs, monkeypatch):
    seeds, real = [], gpt_module.dropout
    def spy(x, rate, key):
        if key is not None: seeds.append((rate, int(key[0])))
        return real(x, rate, key)
    monkeypatch.setattr(gpt_module, 'dropout', spy)
    call(gpt, inputs, SEED)
    assert len(seeds) == len(set(seeds)) == 1 + 3 * len(gpt.blocks)
    assert {rate for rate, *_ in seeds} == {gpt.cfg.dropout}

def test_without_dropout_the_seed_does_nothing(small, inputs):
    net = GPT(small.replace(model={'gpt': {'dropout': 0., 'code_noise': 0.}}), START)
    assert np.array_equal(call(net, inputs, SEED)[1], call(net, inputs)[1])

@pytest.mark.parametrize('share', [0.15, 0.6])
def test_noise_replaces_its_share_of_codes_and_no_edge(share):
    codes = np.random.default_rng(0).integers(0, 258, (8, 4000), dtype=np.int32)   # 256 is START, 257 STOP
    noisy = gpt_module.noisy_codes(tf.constant(codes), share, 256, SEED).numpy()
    assert np.array_equal(noisy[codes >= 256], codes[codes >= 256]) and noisy.min() == 0
    assert noisy.max() == 257
    inner = codes < 256
    assert np.mean(noisy[inner] != codes[inner]) == pytest.approx(share * 255 / 256, abs=0.01)
    assert len(np.unique(noisy[inner & (noisy != codes)])) == 256
    assert not np.array_equal(noisy,
                              gpt_module.noisy_codes(tf.constant(codes), share, 256, tf.constant([1, 3])))

def test_noise_is_for_training_alone(small, gpt, inputs):
    net = GPT(small.replace(model={'gpt': {'code_noise': 0.5}}), gpt.text_start)
    for a, b in zip(net.variables, gpt.variables): a.assign(b)
    assert np.array_equal(call(net, inputs)[1], call(gpt, inputs)[1])

def test_the_released_model_knows_no_noise():
    assert XTTSConfig.xtts_v2().model.gpt.code_noise == 0 < XTTSConfig.tiny().model.gpt.code_noise

def test_graph_equals_eager(gpt, inputs):
    fast = tf.function(lambda x, seed: gpt(**x, seed=seed))
    for seed in (None, SEED):
        got = fast({k: tf.constant(v) for k, v in inputs.items()}, seed)
        assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(got, call(gpt, inputs, seed)))

def test_the_seed_gives_the_first_weights(small):
    nets = []
    for seed in (5, 5, 6):
        keras.utils.set_random_seed(seed)
        nets.append(GPT(small, START))
    same = lambda a, b: all(np.array_equal(x, y) for x, y in zip(a.variables, b.variables))
    assert same(nets[0], nets[1]) and not same(nets[0], nets[2])

@pytest.mark.parametrize('kind, near', [('bfloat16', 0.05), ('float16', 0.005)])
def test_half_precision_is_close_to_float32(small, gpt, inputs, kind, near):
    mixed = GPT(small, gpt.text_start, dtype=f'mixed_{kind}')
    for a, b in zip(mixed.variables, gpt.variables): a.assign(b)
    for plain, rough in zip(call(gpt, inputs), call(mixed, inputs)):
        assert rough.dtype == np.float32 and 0 < np.abs(plain - rough).max() < near
    assert all(v.dtype == 'float32' for v in mixed.variables)

ARCHITECTURE = [('layers', 1), ('width', 128), ('text_tokens', 60), ('max_text_tokens', 50),
                ('max_audio_codes', 50),
                ('prompt_latents', 5),
                ('conditioning_layers', 1), ('perceiver_layers', 2), ('perceiver_heads', 2),
                ('perceiver_head_dim', 16)]

@pytest.mark.parametrize('key, value', ARCHITECTURE)
def test_every_size_changes_the_weights(small, gpt, key, value):
    shapes = lambda net: sorted(tuple(v.shape) for v in net.variables)
    assert getattr(small.model.gpt, key) != value
    assert shapes(GPT(small.replace(model={'gpt': {key: value}}), START)) != shapes(gpt)

@pytest.mark.parametrize('change', [{'heads': 4}, {'dropout': 0.5}, {'code_noise': 0.5}])
def test_what_no_shape_shows_changes_the_answer(small, gpt, inputs, change):
    net = GPT(small.replace(model={'gpt': change}), gpt.text_start)
    for a, b in zip(net.variables, gpt.variables): a.assign(b)
    assert not np.allclose(call(net, inputs, SEED)[1], call(gpt, inputs, SEED)[1], atol=1e-4)

def test_the_answers_are_those_of_coqui_tts(toy_xtts, toy_inputs, theirs, all_ok):
    all_ok(gpt_parity(toy_xtts.gpt, toy_inputs, theirs))

def test_a_gpt_begins_small(small):
    "A deviation of 0.02, less where it is added to the residual; tables with room for START and STOP."
    net = GPT(small.replace(model={'gpt': {'layers': 8}}), START)
    std = {name: float(np.std(v)) for name, v in dict(
        text=net.text_embedding.embeddings, code=net.code_embedding.embeddings,
        place=net.code_position.embeddings,
        text_head=net.text_head.kernel, code_head=net.code_head.kernel, qkv=net.blocks[0].qkv.kernel,
        project=net.blocks[7].project.kernel).items()}
    assert std == pytest.approx(dict.fromkeys(std, 0.02) | {'project': 0.02 / 4}, rel=0.06)
    tables = net.text_position, net.code_position, net.text_embedding, net.code_embedding
    assert [table.embeddings.shape[0] for table in tables] == [40 + 2, 48 + 3, 48, 32 + 2]
    assert not net.mel_stats.trainable and (net.mel_stats.numpy() == 1).all()
    assert (net.code_start, net.code_stop, net.code_stops) == (32, 33, 1)
    assert GPT(small, START, parity=True).code_stops == 4

def test_norms_of_little_are_divided_by_their_epsilon(gpt):
    x = np.float32(1e-5**0.5) * np.tile([1., -1.], 32)[None]   # a variance of 1e-5
    for norm in (gpt.stack_norm, gpt.final_norm): assert np.allclose(np.abs(norm(x)), 2**-0.5, rtol=1e-4)

def test_places_are_counted_from_the_first(gpt):
    codes = tf.constant([[3, 4, 5]])
    expected = gpt.code_embedding(codes) + gpt.code_position(tf.constant([7, 8, 9]))
    assert np.array_equal(gpt.embed_codes(codes, 7), expected)
    assert np.array_equal(gpt.embed_text(codes),
                          gpt.text_embedding(codes) + gpt.text_position(tf.constant([0, 1, 2])))


def test_a_recomputed_block_draws_its_masks_again():
    "Its keys depend on its input, so a compiler cannot hold the masks of the forward pass."
    block = recomputed(lambda x, mask, keys: dropout(x * mask, 0.5, keys[0]))

    @tf.function
    def both(x, keys):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = block(x, 2., keys)
        return y, tape.gradient(y, x)

    x, keys = tf.random.normal((4, 50), seed=1), dropout_keys(tf.constant([1, 2]), 1)
    y, gradient = both(x, keys)
    assert np.array_equal(y, dropout(2 * x, 0.5, keys[0])) and 50 < np.count_nonzero(gradient) < 150
    assert np.array_equal(gradient != 0, y != 0)   # the same masks
    graph = both.get_concrete_function(x, keys).graph
    drawn = [op for op in graph.get_operations() if op.type == 'StatelessRandomUniformV2']
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
