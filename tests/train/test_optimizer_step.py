"How fast, on which weights, and with which mean."
import math
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.config import TrainingConfig
from xtts_nb.train.step import LossScale, Noam, averaged, extended_rate, learning_rate, make_optimizer


@pytest.mark.parametrize('schedule', ['constant', 'cosine', 'noam'])
@pytest.mark.parametrize('steps, warmup', [(20, 0), (20, 1), (20, 5), (20, 50), (5, 5), (1, 3)])
def test_the_schedule_is_what_it_is_called(schedule, steps, warmup):
    "Also where it is shorter than the warm-up that was asked for: a quarter of it is one."
    training = TrainingConfig(steps=steps, warmup_steps=warmup, schedule=schedule, learning_rate=3e-4)
    warmup = min(warmup, steps // 4)
    rates = [float(learning_rate(training)(s)) / 3e-4 for s in range(steps + 1)]
    assert rates[warmup] == pytest.approx(1, rel=1e-5) and rates[0] == pytest.approx(0 if warmup else 1)
    assert np.allclose(np.diff(rates[:warmup + 1], 2), 0, atol=1e-5)   # a straight line
    # of the way behind the warm-up
    shares = [(s - warmup) / max(1, steps - warmup) for s in range(warmup, steps + 1)]
    wanted = {'cosine': [0.02 + 0.98 * (1 + math.cos(math.pi * s)) / 2 for s in shares],
              'constant': [1] * len(shares),
              'noam': [math.sqrt(max(1, warmup) / max(1, s)) for s in range(warmup, steps + 1)]}[schedule]
    assert rates[warmup:] == pytest.approx(wanted, rel=1e-4)
    if schedule == 'cosine' and steps > warmup: assert rates[-1] == pytest.approx(0.02, rel=1e-4)

@pytest.mark.parametrize('schedule', ['constant', 'cosine', 'noam'])
def test_a_run_that_is_extended_goes_on_from_its_rate(schedule):
    "Extended twice, once at its end and once before it; resumed with the same length, the same to the bit."
    of = lambda steps: TrainingConfig(steps=steps, warmup_steps=10, schedule=schedule, learning_rate=1.)
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
    keras.utils.set_random_seed(0)
    variables = [keras.Variable(tf.ones(v.shape), name=v.name, dtype='float32')
                 for v in xtts.gpt.trainable_variables]
    names = {v.path.rsplit('/', 1)[-1] for v in xtts.gpt.trainable_variables}
    # a new kind wants a decision
    assert names == {'beta', 'bias', 'embeddings', 'gain', 'gamma', 'kernel', 'latents'}
    training = TrainingConfig(learning_rate=0.1, weight_decay=0.5)
    optimizer = make_optimizer(variables, training)
    optimizer.apply([tf.zeros(v.shape) for v in variables], variables)
    for v in variables:
        decays = v.name in ('kernel', 'latents', 'gain')
        assert np.allclose(v.numpy(), 0.95 if decays else 1., atol=1e-6), v.path
        assert (decays or (v.numpy() == 1).all()), v.path

def variable(*values): return keras.Variable(np.float32(values), name='kernel')

def test_a_number_takes_the_place_of_the_schedule():
    "Zero included; what tells of it does not tell of schedules."
    x = variable(1.)
    optimizer = make_optimizer([x], TrainingConfig(learning_rate=0.1, weight_decay=0.))
    rate = lambda: float(optimizer.learning_rate)
    assert optimizer.assigned is None and rate() == pytest.approx(0.1)
    optimizer.learning_rate = Noam(0.3, 0)
    assert optimizer.assigned is None and rate() == pytest.approx(0.3)
    optimizer = make_optimizer([x], TrainingConfig(learning_rate=0.1, weight_decay=0.))
    for value in (0.5, 2., 0.):
        optimizer.learning_rate = value
        assert optimizer.assigned == rate() == value
        assert float(optimizer.schedule.schedule(0)) == pytest.approx(0.1)
    optimizer.apply([tf.ones(1)], [x])
    assert x.numpy() == 1   # at a rate of 0 nothing moves

@pytest.mark.parametrize('schedule', ['cosine', 'noam'])
def test_an_update_is_that_of_keras_and_computes_the_rate_once(schedule):
    "To the bit; Keras computes the rate for each weight that decays, the powers of beta for each variable."
    training = TrainingConfig(schedule=schedule, steps=9, warmup_steps=2)
    draw, rate = np.random.default_rng(0), learning_rate(training)
    values = [draw.normal(size=(2, 3)).astype('float32') for _ in range(3)]
    ours, theirs = ([variable(*v) for v in values] for _ in range(2))
    optimizers = (make_optimizer(ours, training),
                  keras.optimizers.AdamW(rate, training.weight_decay, beta_2=training.beta_2))
    optimizers[1].build(theirs)
    gradients = [tf.constant(v) for v in draw.normal(size=(3, 2, 3)).astype('float32')]
    steps = [tf.function(partial(o.apply, gradients, some)) for o, some in zip(optimizers, (ours, theirs))]
    for _ in range(4):
        for step in steps: step()
    for a, b in zip((*ours, *optimizers[0].variables), (*theirs, *optimizers[1].variables)):
        assert np.array_equal(a, b), a.path
    kinds = [op.type for op in steps[0].get_concrete_function().graph.get_operations()]
    assert kinds.count('Pow') == 2 and sum('If' in kind for kind in kinds) == (schedule == 'cosine')

@pytest.mark.parametrize('share', [0.5, 0.99])
def test_the_mean_follows_the_weights_and_training_never_sees_it(share):
    training = TrainingConfig(learning_rate=0.1, ema=share)
    x, y = variable(3., -1.), variable(3., -1.)
    with_mean, without = make_optimizer([x], training), make_optimizer([y], TrainingConfig(learning_rate=0.1))
    mean = None
    for n in range(12):
        for optimizer, v in ((with_mean, x), (without, y)): optimizer.apply([2 * v.value], [v])
        decay = min(share, n / (n + 9))   # at first it is the mean of all updates
        mean = x.numpy().copy() if mean is None else decay * mean + (1 - decay) * x.numpy()
        assert np.array_equal(x.numpy(), y.numpy())
    with averaged(with_mean, [x]): assert np.allclose(x.numpy(), mean, rtol=1e-5)
    assert np.array_equal(x.numpy(), y.numpy())
    with averaged(without, [y]): assert np.array_equal(x.numpy(), y.numpy())
    assert len(with_mean.variables) == len(without.variables) + 1   # so it is saved with the rest

def test_the_weights_come_back_after_an_error_too():
    x = variable(1.)
    optimizer = make_optimizer([x], TrainingConfig(learning_rate=0.1, ema=0.9))
    for _ in range(3): optimizer.apply([tf.ones(1)], [x])
    before = x.numpy()
    with pytest.raises(KeyError):
        with averaged(optimizer, [x]):
            assert not np.array_equal(x.numpy(), before)
            raise KeyError
    assert np.array_equal(x.numpy(), before)

def test_before_the_first_update_the_mean_is_the_weights():
    x = variable(4.)
    with averaged(make_optimizer([x], TrainingConfig(ema=0.9)), [x]): assert x.numpy() == 4

def test_the_scale_backs_off_and_comes_back_within_bounds():
    scale, step = LossScale(patience=2), tf.function(lambda finite: scale.note(finite))
    def after(*finite):
        for f in finite: step(tf.constant(f))
        return math.log2(scale.factor.numpy())
    assert after(False) == 14 and after(True, True) == 15 and after(True, False, True) == 14
    assert after(True) == 15
    assert after(*[False] * 20) == 0 and after(*[True] * 60) == 24
