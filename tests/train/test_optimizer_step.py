"How fast, on which weights, and with which mean."
import math
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.config import GPTTraining
from xtts_nb.train.step import AdamW, averaged, extended_rate, learning_rate, LossScale, _Noam

SCHEDULES = 'constant', 'cosine', 'noam'


@pytest.mark.parametrize('schedule', SCHEDULES)
@pytest.mark.parametrize('steps, warmup', [(20, 0), (20, 5), (20, 50), (1, 3)])
def test_the_schedule_is_what_it_is_called(schedule, steps, warmup):
    "Also where it is shorter than the warm-up that was requested: a quarter of it is one."
    training = GPTTraining(steps=steps, warmup_steps=warmup, schedule=schedule, learning_rate=3e-4)
    warmup = min(warmup, steps // 4)
    rates = [float(learning_rate(training)(s)) / 3e-4 for s in range(steps + 1)]
    assert rates[warmup] == pytest.approx(1, rel=1e-5) and rates[0] == pytest.approx(0 if warmup else 1)
    assert np.allclose(np.diff(rates[:warmup + 1], 2), 0, atol=1e-5)   # a straight line
    shares = [(s - warmup) / max(1, steps - warmup) for s in range(warmup, steps + 1)]   # after the warm-up
    wanted = {'cosine': [0.02 + 0.98 * (1 + math.cos(math.pi * s)) / 2 for s in shares],
              'constant': [1] * len(shares),
              'noam': [math.sqrt(max(1, warmup) / max(1, s)) for s in range(warmup, steps + 1)]}[schedule]
    assert rates[warmup:] == pytest.approx(wanted, rel=1e-4)

@pytest.mark.parametrize('schedule', SCHEDULES)
def test_a_run_that_is_extended_continues_from_its_rate(schedule):
    "Extended twice, once at its end and once before it; resumed with the same length, the same to the bit."
    of = lambda steps: GPTTraining(steps=steps, warmup_steps=10, schedule=schedule, learning_rate=1.)
    known, rates = {'steps': 100}, [float(learning_rate(of(100))(n)) for n in range(100)]
    for first, steps in ((100, 200), (150, 400)):
        rate, known = extended_rate(of(steps), known, first)
        rates[first:] = [float(rate(n)) for n in range(first, steps)]
        again, same = extended_rate(of(steps), known, first + 20)
        assert same == known and float(again(first + 30)) == rates[first + 30]
    assert max(np.abs(np.diff(rates))) < 0.101   # a step of the warm-up
    assert rates[399] == pytest.approx(float(learning_rate(of(400))(399)), rel=1e-5)

def test_weight_decay_is_for_matrices_only(xtts):
    "With gradients of zero, what moves is what decays, and by exactly rate x decay."
    variables = [keras.Variable(tf.ones(v.shape), name=v.name, dtype='float32')
                 for v in xtts.gpt.trainable_variables]
    names = {v.path.rsplit('/', 1)[-1] for v in xtts.gpt.trainable_variables}
    # a new kind wants a decision
    assert names == {'beta', 'bias', 'embeddings', 'gain', 'gamma', 'kernel', 'latents'}
    optimizer = AdamW(variables, GPTTraining(learning_rate=0.1, weight_decay=0.5))
    optimizer.apply([tf.zeros(v.shape) for v in variables], variables)
    for v in variables:
        decays = v.name in ('kernel', 'latents', 'gain')
        assert np.allclose(v.numpy(), 0.95 if decays else 1., atol=1e-6), v.path
        assert (decays or (v.numpy() == 1).all()), v.path

def variable(*values): return keras.Variable(np.float32(values), name='kernel')

def test_a_number_replaces_the_schedule():
    "Zero included; what reports it does not report schedules."
    x = variable(1.)
    optimizer = AdamW([x], GPTTraining(learning_rate=0.1, weight_decay=0.))
    rate = lambda: float(optimizer.learning_rate)
    assert optimizer.assigned is None and rate() == pytest.approx(0.1)
    for value in (0.5, 2., 0.):
        optimizer.learning_rate = value
        assert optimizer.assigned == rate() == value
        assert float(optimizer.schedule.schedule(0)) == pytest.approx(0.1)
    optimizer.apply([tf.ones(1)], [x])
    assert x.numpy() == 1   # at a rate of 0 nothing moves
    optimizer = AdamW([x], GPTTraining(learning_rate=0.1))
    optimizer.learning_rate = _Noam(0.3, 0)
    assert optimizer.assigned is None and rate() == pytest.approx(0.3)

@pytest.mark.parametrize('schedule', ['cosine', 'noam'])
def test_an_update_is_that_of_keras_and_computes_the_rate_once(schedule):
    """To the bit, with the same variables in the same order: checkpoints keep their names. Keras computes the
    rate for each weight that decays, the powers of beta for each variable."""
    training = GPTTraining(schedule=schedule, steps=9, warmup_steps=2)
    draw, rate = np.random.default_rng(0), learning_rate(training)
    values = [draw.normal(size=(2, 3)).astype('float32') for _ in range(3)]
    ours, theirs = ([variable(*v) for v in values] for _ in range(2))
    optimizers = (AdamW(ours, training),
                  keras.optimizers.AdamW(rate, training.weight_decay, beta_2=training.beta_2, name='adamw'))
    optimizers[1].build(theirs)
    gradients = [tf.constant(v) for v in draw.normal(size=(3, 2, 3)).astype('float32')]
    steps = [tf.function(partial(o.apply, gradients, some)) for o, some in zip(optimizers, (ours, theirs))]
    for _ in range(4):
        for step in steps: step()
    for a, b in zip((*ours, *optimizers[0].variables), (*theirs, *optimizers[1].variables), strict=True):
        assert np.array_equal(a, b) and a.path == b.path
    kinds = [op.type for op in steps[0].get_concrete_function().graph.get_operations()]
    assert kinds.count('Pow') == 2 and sum('If' in kind for kind in kinds) == (schedule == 'cosine')

@pytest.mark.parametrize('share', [0.5, 0.99])
def test_the_mean_follows_the_weights_and_training_never_sees_it(share):
    training = GPTTraining(learning_rate=0.1, ema=share)
    x, y = variable(3., -1.), variable(3., -1.)
    with_mean, without = AdamW([x], training), AdamW([y], GPTTraining(learning_rate=0.1))
    with averaged(with_mean, [x]): assert x.numpy().tolist() == [3., -1.]   # before the first update
    mean = None
    for n in range(12):
        for optimizer, v in ((with_mean, x), (without, y)): optimizer.apply([2 * v.value], [v])
        decay = min(share, n / (n + 9))   # at first it is the mean of all updates
        mean = x.numpy().copy() if mean is None else decay * mean + (1 - decay) * x.numpy()
        assert np.array_equal(x.numpy(), y.numpy())
    with pytest.raises(KeyError), averaged(with_mean, [x]):
        assert np.allclose(x.numpy(), mean, rtol=1e-5)
        raise KeyError
    assert np.array_equal(x.numpy(), y.numpy())   # they come back after an error too
    with averaged(without, [y]): assert np.array_equal(x.numpy(), y.numpy())
    names = [v.path for v in with_mean.variables]   # so it is saved with the rest
    assert names == ['adamw/iteration', *(f'adamw/kernel_{n}' for n in ('average', 'momentum', 'velocity'))]

def test_the_scale_backs_off_and_comes_back_within_bounds():
    scale, step = LossScale(patience=2), tf.function(lambda finite: scale.note(finite))
    def after(*finite):
        for f in finite: step(tf.constant(f))
        return math.log2(scale.factor.numpy())
    assert after(False) == 14 and after(True, True) == 15 and after(True, False, True) == 14
    assert after(True) == 15
    assert after(*[False] * 20) == 0 and after(*[True] * 60) == 24
