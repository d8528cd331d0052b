"Adapters and rows: what is trained, what stays, and the same gradients as those of the weights."
import keras
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.files import named_weights
from xtts_nb.train.finetune import (
    DerivedWeights, low_rank_parts, make_update, new_rows, row_parts, grow_tokenizer)
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.models.gpt import GPT
from xtts_nb.models.xtts import POLICIES, token_counts
from xtts_nb.train.step import Update, compile_step, random_batch
from xtts_nb.data.text import train_tokenizer

RUNS = [(20, 25), (30, 48)]   # of 48 text tokens


@pytest.fixture(scope='module')
def rows(plain) -> dict: return random_batch(plain, 12, 20)

def made(config, kind, **changes) -> Update:
    config = config.replace(training={'finetune': kind, 'learning_rate': 1e-2}).replace(**changes)
    keras.utils.set_random_seed(0)
    gpt = GPT(config, 5, dtype=POLICIES[config.training.precision])
    update = make_update(gpt, config.training, RUNS)
    if kind == 'lora':   # as after some training: a zero hides half of the gradients
        for v in update.weights: v.assign(v.value + 0.02 * keras.random.normal(v.shape, seed=1))
    return update

def run(update, batch, count=3) -> list[float]:
    step = compile_step(update, update.training)
    return [float(step(batch, tf.constant(i))['loss']) for i in range(count)]

def values(update) -> list: return [v.numpy() for v in (*update.weights, *update.variables.values())]


@pytest.mark.parametrize('kind', ['lora', 'rows'])
@pytest.mark.parametrize('parts, again, precision', [(2, True, 'float32'), *(
    pytest.param(*m, marks=pytest.mark.slow) for m in ((1, False, 'float32'), (1, True, 'bfloat16')))])
def test_the_model_stays_and_its_adapters_move(plain, rows, kind, parts, again, precision):
    update = made(plain, kind,
                  training={'accumulation': parts, 'gradient_checkpointing': again, 'precision': precision})
    before = {k: v.numpy() for k, v in named_weights(update.gpt).items()}
    own = [v.numpy() for v in update.weights]
    losses = run(update, rows)
    assert all(np.array_equal(v.numpy(), before[k]) for k, v in named_weights(update.gpt).items())
    assert not any(np.array_equal(v.numpy(), old) for v, old in zip(update.weights, own))
    assert losses[-1] < losses[0]

@pytest.mark.parametrize('kind', ['lora', 'rows'])
def test_the_gradients_are_those_of_the_weights(plain, rows, kind):
    """By the chain rule from the gradients of a whole model with the same weights; and the same, computed
    again or in parts."""
    update = made(plain, kind)
    whole = made(plain, 'whole')
    with update.as_trained(): seen = {k: v.numpy() for k, v in named_weights(update.gpt).items()}
    for k, v in named_weights(whole.gpt).items(): v.assign(seen[k])
    counts = token_counts(update.gpt, rows)
    names = [v.path.removeprefix(f'{whole.gpt.name}/') for v in whole.weights]
    of = dict(zip(names, whole.gradients(rows, tf.constant(0), counts)[0]))
    wanted = []
    for part in update.parts:
        g = of[part.weight.path.removeprefix(f'{update.gpt.name}/')].numpy()
        if hasattr(part, 'down'):
            wanted += [part.scale * g @ part.up.numpy().T, part.scale * part.down.numpy().T @ g]
        else: wanted.append(np.take(g, [i for a, b in RUNS for i in range(a, b)], part.axis))
    for change in ({}, {'accumulation': 2, 'gradient_checkpointing': True}):
        other = made(plain, kind, training=change)
        got = tf.function(other.gradients)(rows, tf.constant(0), counts)[0]
        for v, a, b in zip(update.weights, wanted, got):
            assert np.allclose(a, b, rtol=1e-3, atol=1e-6), (change, v.path)

@pytest.mark.slow
def test_xla_computes_the_same(plain, rows):
    for kind in ('lora', 'rows'):
        graph, fused = (run(made(plain, kind, training={'mode': mode}), rows)
                        for mode in ('graph', 'xla'))
        assert fused == pytest.approx(graph, rel=1e-4)

def test_new_rows_and_nothing_else_differ(plain, rows):
    update = made(plain, 'rows')
    run(update, rows)
    with update.as_trained(): after = {k: v.numpy() for k, v in named_weights(update.gpt).items()}
    new = np.zeros(48, bool)
    for a, b in RUNS: new[a:b] = True
    for k, v in named_weights(update.gpt).items():
        axis = {'text_embedding/embeddings': 0, 'text_head/kernel': 1, 'text_head/bias': 0}.get(k)
        if axis is None: assert np.array_equal(after[k], v.numpy()), k
        else:
            axes = tuple({0, 1} & set(range(after[k].ndim)) - {axis})
            moved = (after[k] != v.numpy()).reshape(after[k].shape).any(axes)
            assert not moved[~new].any() and moved[new].any(), k
            if 'head' in k: assert moved[new].all()   # the softmax touches each

def test_an_adapter_begins_as_nothing_and_alpha_scales_it(plain):
    gpt = GPT(plain, 5)
    for alpha in (8., 32.):
        training = plain.replace(training={'finetune': 'lora', 'lora_rank': 4, 'lora_alpha': alpha}).training
        part = low_rank_parts(gpt, training)[0]
        with DerivedWeights([part]): assert np.array_equal(part.weight.numpy(), part.base.numpy())
        part.up.assign(np.ones(part.up.shape))
        assert part.down.shape == (64, 4) and part.scale == alpha / 4
        with DerivedWeights([part]): delta = part.weight.numpy() - part.base.numpy()
        assert np.allclose(delta, alpha / 4 * part.down.numpy() @ part.up.numpy(), atol=1e-5)
        assert np.abs(delta).max() > 0

def test_first_factors_are_random_each_for_itself_and_second_ones_zero(small):
    training = small.replace(training={'finetune': 'lora', 'lora_rank': 16}).training
    parts = low_rank_parts(GPT(small, 5), training)
    shapes = [(tuple(p.down.shape), tuple(p.up.shape)) for p in parts]
    assert shapes == [((64, 16), (16, 192)), ((64, 16), (16, 64))] * 2
    assert all(0.9 < np.std(p.down) * 64**0.5 < 1.1 and not p.up.numpy().any() for p in parts)
    assert len({p.down.numpy().tobytes() for p in parts}) == 4
    assert len({v.name for p in parts for v in p.own}) == 8
    other = low_rank_parts(GPT(small, 5), training.model_copy(update={'seed': training.seed + 100}))
    assert not np.array_equal(other[0].down, parts[0].down)

def test_half_precision_does_not_swallow_small_changes(plain):
    "In bfloat16 the sum is rounded once: a change far below the last bit of the weights survives on average."
    update = made(plain, 'lora', training={'precision': 'bfloat16'})
    part = update.parts[0]
    part.up.assign(1e-4 * np.sign(part.up.numpy()))
    wanted = part.scale * part.down.numpy() @ part.up.numpy()
    with DerivedWeights([part]): seen = part.weight.numpy()
    assert seen.dtype == np.float32 and np.allclose(seen - part.base.numpy(), wanted, atol=1e-8)

def test_only_what_moves_is_kept(plain, rows):
    for kind, names, decayed in (('lora', 7, 5), ('rows', 3, 1)):
        update = made(plain, kind, training={'ema': 0.9})
        assert sum(map(update.optimizer._use_weight_decay, update.weights)) == decayed   # the matrices
        numbers = sum(int(np.prod(v.shape)) for v in update.state.values())
        own = update.state.keys() - update.variables.keys()
        assert len(own) == names and all(k.startswith(f'{kind}/') for k in own)
        # moments, means; a counter
        assert numbers == 4 * sum(int(np.prod(v.shape)) for v in update.weights) + 1

def test_rows_of_several_languages():
    config = lambda grown: XTTSConfig().replace(model={'gpt': {'grown_from': grown}},
                                                training={'finetune': 'rows'})
    old = train_tokenizer(['the old dog'], ['en'], 40)
    both = grow_tokenizer(grow_tokenizer(old, 'fa', ['سگ پیر']), 'sv', ['å ä ö'])
    first, second = old.size, grow_tokenizer(old, 'fa', ['سگ پیر']).size
    assert new_rows(config(old.size), both, ['fa']) == [(first, second)]
    assert new_rows(config(old.size), both, ['sv', 'en']) == [(second, both.size)]
    assert new_rows(config(old.size), both, ['fa', 'sv']) == [(first, second), (second, both.size)]
    for grown, languages in ((old.size, ['en']), (old.size, ['xx']), (0, ['fa']), (second, ['fa'])):
        with pytest.raises(UserError, match='was not grown by .* xtts-nb add-language OUT --model'):
            new_rows(config(grown), both, languages)
    of = lambda kind, grown: new_rows(config(grown).replace(training={'finetune': kind}), both, ['en', 'sv'])
    assert of('lora', 0) == of('whole', old.size) == [] and of('lora', old.size) == [(second, both.size)]

def test_adjacent_runs_and_the_very_end(plain):
    gpt = GPT(plain, 5)
    for part in row_parts(gpt, [(40, 44), (44, 48)]):
        assert np.array_equal(part(), part.base.numpy()) and part.rows.shape[part.axis] == 8
        part.rows.assign(part.rows.value + 1)
        moved = np.nonzero((part().numpy() != part.base.numpy()).reshape(part().shape))[part.axis]
        assert set(moved) == set(range(40, 48))
