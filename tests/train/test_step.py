"One update: the same in parts, without what is not finite, in any precision, and compiled where it can be."
import math
import re
from functools import partial
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.bench import trace_count
from xtts_nb.config import GPTTraining
from xtts_nb.models.gpt import _fold_seed, GPT
from xtts_nb.models.xtts import POLICIES
from xtts_nb.train import step as step_page
from xtts_nb.train.step import (
    AdamW, averaged, _bfloat16_units, _check_modes_agree, choose_xla, compile_step, extended_rate,
    _global_norm, _lacked_memory, learning_rate, LossScale, mode_line, random_batch, step_modes, stop_counts,
    stop_shares, token_counts, token_losses, total_loss, Update)

@pytest.fixture(scope='module')
def rows(plain) -> dict:
    "Four rows of different lengths, the last of them filling."
    return random_batch(plain, 12, 20) | {'text_length': tf.constant([12, 7, 9, 12]),
                                         'code_length': tf.constant([20, 11, 3, 20]),
                                         'weight': tf.constant([1., 1., 1., 0.])}

def update(config, **changes) -> Update:
    keras.utils.set_random_seed(0)
    config = config.replace(**changes)
    return Update(GPT(config, 5, dtype=POLICIES[config.training.gpt.precision]), config.training.gpt)

def run(step, batch, count=3, first=0) -> list[dict]:
    return [{k: float(v) for k, v in step(batch, tf.constant(first + i)).items()} for i in range(count)]

def values(made: Update) -> list: return [v.numpy() for v in (*made.weights, *made.variables.values())]

ONES = {'text_count': tf.constant(1.), 'code_count': tf.constant(1.)}

# --- in parts -------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def parted(plain):
    "An update in four parts, with a running mean, and its compiled step."
    cut = update(plain, training={'gpt': {'grad_accum_steps': 4, 'ema': 0.9}})
    return cut, compile_step(cut, cut.training)

def test_parts_make_the_whole(plain, rows, parted):
    "Parts hold different numbers of tokens, one of them none at all; the gradients are clipped."
    (_, step), whole = parted, update(plain)
    lines = run(step, rows, 2)
    for a, b in zip(run(whole, rows, 2), lines): assert b == pytest.approx(a, rel=3e-4)   # whole: op by op
    assert trace_count(step) == 1 and lines[0]['gradient_norm'] > plain.training.gpt.gradient_clip_norm
    assert not step.xla and lines[0]['loss'] != lines[1]['loss']

@pytest.mark.parametrize('parts, first', [(1, None), (1, 3), (2, 3)])
def test_a_part_draws_by_its_index_in_the_whole_batch(plain, rows, parts, first):
    "A single part draws by the seed itself."
    made = update(plain, model={'gpt': {'dropout': 0.5}},
                  training={'gpt': {'grad_accum_steps': parts, 'seed': 7}})
    seed, size = tf.constant([7, 9]), 4 // parts
    cut = [{k: v[i * size:(i + 1) * size] for k, v in rows.items()} for i in range(parts)]
    folded = [_fold_seed(seed, (first or 0) + i) for i in range(parts)]
    seeds = [seed] if parts == 1 and first is None else folded
    wanted = [made.gradients_of(some, s, ONES) for some, s in zip(cut, seeds)]
    gradients, sums = made.gradients(rows, tf.constant(9), ONES, first)
    for name, total in sums.items():
        assert float(total) == pytest.approx(sum(float(w[1][name]) for w in wanted), rel=1e-4)
    assert np.allclose(gradients[0], sum(w[0][0] for w in wanted), rtol=1e-3, atol=1e-5)

def test_the_norm_reads_all_vectors_at_once():
    some = [tf.constant(x, tf.float32) for x in (3., [4., 12.], [[0., 84.]], [[[5.]]], [2., 1.])]
    norm = np.sqrt(sum(np.sum(np.square(g.numpy())) for g in some))
    assert float(_global_norm(some)) == pytest.approx(norm, rel=1e-6)
    assert float(_global_norm(some[2:3])) == 84 and float(_global_norm(some[1:2])) == pytest.approx(160**.5)
    ops = tf.function(lambda: _global_norm(some)).get_concrete_function().graph.get_operations()
    assert sum(op.type == 'L2Loss' for op in ops) == 3

def test_a_row_of_an_embedding_that_many_clips_share_is_counted_once(plain, rows):
    "So that the norm and Adam's second moment are those of the sum of the rows."
    made = update(plain)
    gradients = made.gradients(rows, tf.constant(0), ONES)[0]
    assert all(isinstance(g, tf.Tensor) and g.shape == v.shape for g, v in zip(gradients, made.weights))

def test_recomputed_blocks_give_the_same_gradients(plain, rows):
    "As a graph, in two parts; with dropout: a mask that is drawn again would give others."
    made = [update(plain, model={'gpt': {'num_layers': 2, 'dropout': 0.1}},
                   training={'gpt': {'grad_accum_steps': 2, 'gradient_checkpointing': on}})
            for on in (False, True)]
    assert [u.gpt.recompute for u in made] == [u.gpt.conditioning.recompute for u in made] == [False, True]
    both = [compute(rows, tf.constant(3), token_counts(made[0].gpt, rows))[0]
            for compute in (made[0].gradients, tf.function(made[1].gradients, autograph=False))]
    for v, a, b in zip(made[0].weights, *both): assert np.allclose(a, b, rtol=1e-4, atol=1e-6), v.path

# --- what is not finite ---------------------------------------------------------------------------

def test_a_broken_batch_changes_nothing(rows, parted):
    made, step = parted
    run(step, rows, 1)
    for number, what in ((1, np.nan), (3, np.inf)):
        before, reference = values(made), rows['reference'].numpy()
        reference[0, 3, 5] = what
        (line,) = run(step, rows | {'reference': tf.constant(reference)}, 1, first=number)
        assert line['skipped'] == line['bad'] == 1 and not np.isfinite(line['loss']), what
        assert all(np.array_equal(a, b) for a, b in zip(before, values(made))), what
        (line,) = run(step, rows, 1, first=number + 1)
        assert line['skipped'] == line['bad'] == 0, what
        assert not all(np.array_equal(a, b) for a, b in zip(before, values(made))), what

def test_an_overflow_lowers_the_scale_and_nothing_else(plain, rows):
    made = update(plain, training={'gpt': {'precision': 'float16'}})
    # TensorFlow has no kernel of a GPU for an int32 variable, and XLA cannot reach one on the host
    assert 'good_updates' in made.state and not [n for n, v in made.state.items() if 'int32' in str(v.dtype)]
    made.scale.factor.assign(2.**24)
    before = [v.numpy() for v in made.weights]
    lines = []
    while not lines or lines[-1]['skipped']: lines += run(made, rows, 1, first=len(lines))
    halved = len(lines) - 1
    assert halved > 0 and float(made.scale.factor) == 2.**(24 - halved)
    assert not any(line['bad'] for line in lines) and int(made.optimizer.iterations) == 1
    assert not all(np.array_equal(a, v.numpy()) for a, v in zip(before, made.weights))

OK, NAN, INF = 1., np.nan, np.inf

@pytest.mark.parametrize('factor, loss, norm, good, bad', [
    (None, OK, OK, True, False), (None, NAN, OK, False, True), (None, OK, INF, False, True),
    (8., OK, INF, False, False), (8., NAN, NAN, False, True), (1., OK, INF, False, True)])
def test_only_what_a_smaller_scale_cures_is_not_bad(factor, loss, norm, good, bad):
    noted = []
    scale = factor and SimpleNamespace(factor=tf.constant(factor),
                                       note=lambda finite: noted.append(bool(finite)))
    found = Update.check_finite(SimpleNamespace(scale=scale), tf.constant(loss), tf.constant(norm))
    assert [*map(bool, found)] == [good, bad]
    assert noted == ([good or bad] if scale else [])   # lowering a scale of 1 helps nobody

@pytest.mark.parametrize('precision', ['bfloat16', pytest.param('float16', marks=pytest.mark.slow)])
def test_half_precision_learns_as_float32_does(plain, rows, precision):
    half = update(plain, training={'gpt': {'precision': precision}})
    step = compile_step(half, half.training) if precision == 'float16' else half
    # op by op: a trace takes as long as ten updates
    losses = [[line['loss'] for line in run(u, rows, 3)] for u in (update(plain), step)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2) and losses[1] != losses[0]
    assert losses[1][-1] < losses[1][0]

# --- in three modes -------------------------------------------------------------------------------

@pytest.mark.slow
def test_eager_graph_and_xla_compute_the_same(plain, rows):
    modes = step_modes(plain.replace(training={'gpt': {'mode': 'xla'}}), 5)
    losses = _check_modes_agree(modes, [rows] * 3)
    assert list(losses) == ['eager', 'graph', 'xla'] and len(set(losses['eager'])) > 1   # it moves
    assert [trace_count(s) for s in modes.values()] == [0, 1, 1]

@pytest.mark.parametrize('setting, precision, gpus, units, written, xla', [
    ('auto', 'float32', [], True, 0., True), ('auto', 'bfloat16', [], True, 0., False),
    ('auto', 'bfloat16', [], False, 0., True), ('auto', 'bfloat16', ['GPU:0'], True, 9e9, True),
    ('auto', 'float32', [], True, 1.1e9, False), ('xla', 'bfloat16', [], True, 9e9, True),
    ('graph', 'float32', ['GPU:0'], True, 0., False)])
def test_xla_is_chosen_by_device_and_precision(monkeypatch, setting, precision, gpus, units, written, xla):
    monkeypatch.setattr(tf.config, 'get_visible_devices', lambda kind: gpus if kind == 'GPU' else None)
    monkeypatch.setattr(step_page, '_bfloat16_units', lambda: units)
    training = GPTTraining(mode=setting, precision=precision)
    chosen, why = choose_xla(training, written)
    assert chosen == xla
    if not written: assert f'({why})' in mode_line(training)

@pytest.mark.cpu
def test_a_large_update_on_a_cpu_is_a_plain_graph(plain, monkeypatch):
    made = update(plain, training={'gpt': {'mode': 'auto'}})
    size = sum(4 * v.numpy().size for v in (*made.weights, *made.optimizer.variables))
    for limit, xla in ((size, True), (size - 1, False)):
        monkeypatch.setattr(step_page, '_IN_PLACE', limit)
        assert compile_step(made, made.training).xla == xla
        assert ('old and the new' in mode_line(made.training, made)) != xla

@pytest.mark.parametrize('text, found', [
    ('flags\t: fpu avx512_bf16 avx\nflags\t: fpu\n', True), ('flags : fpu avx512f bf16\n', False),
    ('Features : bf16\n', False), (None, False)])
def test_whether_a_cpu_multiplies_in_bfloat16(tmp_path, text, found):
    if text: (tmp_path / 'cpuinfo').write_text(text)
    assert _bfloat16_units(tmp_path / 'cpuinfo') == found

@pytest.mark.cpu
def test_xla_turns_products_in_bfloat16_into_float32_ones_on_a_cpu():
    "The reason of the choice: as soon as this fails, measure the modes again."
    product = tf.function(lambda a: tf.reduce_max(tf.matmul(a, a)), jit_compile=True)
    a = tf.ones((64, 64), tf.bfloat16)
    program = product.experimental_get_compiler_ir(a)(stage='optimized_hlo')
    kinds = re.findall(r'= (\w+)\[64,64\]\S* (?:dot|custom-call|fusion)\(', program)
    assert 'f32' in kinds, program

@pytest.mark.parametrize('error, lacked', [
    (tf.errors.ResourceExhaustedError(None, None, 'OOM'), True), (MemoryError(), True),
    (tf.errors.AbortedError(None, None, 'Operation received an exception:Status: 1, message: out of'), True),
    (tf.errors.AbortedError(None, None, 'Operation received an exception:Status: 2, message: wrong'), False),
    (tf.errors.InternalError(None, None, 'Status: 1, message'), False)])
def test_what_ends_an_update_for_want_of_memory(error, lacked): assert _lacked_memory(error) == lacked

# --- losses ---------------------------------------------------------------------------------------

SEED = tf.constant([1, 2])

@pytest.fixture(scope='module')
def losses(xtts):
    "The loss, its parts, and the gradients as one vector; op by op, since a trace takes longer."
    def run(batch, seed):
        with tf.GradientTape() as tape:
            parts = token_losses(xtts.gpt, batch, seed)
            loss = total_loss(parts)
        gradients = tape.gradient(loss, xtts.gpt.trainable_variables)
        return loss, parts, tf.concat([tf.reshape(tf.convert_to_tensor(g), [-1]) for g in gradients], 0)
    return lambda batch, seed=None: tf.nest.map_structure(np.array, run(batch, seed))

def with_rows(batch, weight, **changes): return batch | {'weight': tf.constant(weight, tf.float32)} | changes

@pytest.mark.parametrize('seed', [None, SEED], ids=['plain', 'dropout'])
def test_zero_weight_rows_change_neither_loss_nor_gradients(losses, batch, seed):
    loss, _, gradient = losses(with_rows(batch, [1, 1, 1, 0]), seed)
    wild = {k: tf.concat([batch[k][:3], tf.constant(np.full((1, *batch[k].shape[1:]), v), batch[k].dtype)], 0)
            for k, v in dict(text=7, codes=9, reference=3., text_length=2, code_length=3).items()}
    loss2, _, gradient2 = losses(with_rows(batch, [1, 1, 1, 0], **wild), seed)
    assert loss == pytest.approx(loss2, rel=1e-6) and np.allclose(gradient, gradient2, atol=1e-6)

def test_where_the_likeliest_stop_comes():
    "Lengths and places of STOPs: at the end, 3 and 4 codes before, twice, behind, none; one without weight."
    ends = [(60, [60]), (65, [62]), (66, [62]), (130, [130]), (131, [128, 131]), (131, [20, 131]), (9, [10]),
            (131, []), (9, [1])]
    logits = np.zeros((len(ends), 133, 5), np.float32)
    for row, (_, stops) in enumerate(ends): logits[row, stops, 4] = 1.
    batch = {'code_length': tf.constant([n for n, _ in ends]), 'weight': tf.constant([1.] * 8 + [0.])}
    counts = stop_counts(SimpleNamespace(code_stop=4), batch, tf.constant(logits))
    assert {k: float(v) for k, v in counts.items()} == {
        'short_clips': 3, 'short_stops': 2, 'middle_clips': 2, 'middle_stops': 1, 'long_clips': 3,
        'long_stops': 1, 'never_stops': 2}
    assert stop_shares(counts) == {'stop': 4 / 8, 'stop_short': 2 / 3, 'stop_middle': .5,
                                    'stop_long': pytest.approx(1 / 3), 'never': 2 / 8}
    assert stop_shares({**counts, 'middle_clips': 0., 'middle_stops': 0.}).keys() == {
        'stop', 'stop_short', 'stop_long', 'never'}
    assert stop_shares({}) == {} == stop_shares({'short_clips': 0., 'short_stops': 0., 'never_stops': 0.})

def test_a_share_of_an_update_is_divided_by_the_counts_of_the_whole():
    parts = {'text_loss': tf.constant(6.), 'text_count': tf.constant(2.), 'code_loss': tf.constant(8.),
             'code_count': tf.constant(0.5)}
    assert float(total_loss(parts)) == pytest.approx(0.01 * 3 + 8)   # no division by less than one
    assert float(total_loss(parts, 2., {'text_count': 3., 'code_count': 16.})) == pytest.approx(2 * 2 + 0.5)

def test_a_batch_of_nothing_is_no_nan(losses, batch):
    loss, parts, gradient = losses(with_rows(batch, [0, 0, 0, 0]))
    assert loss == 0 and not gradient.any() and parts['code_count'] == 0

def test_losses_equal_loops(xtts, batch):
    "Cross-entropy of every counted position, one after the other."
    logits = xtts.gpt(*(batch[k] for k in ('text', 'text_length', 'codes', 'code_length', 'reference')))
    parts = token_losses(xtts.gpt, batch)
    for name, scores, ids, length, stop in (('text', logits[0], 'text', 'text_length', 0),
                                            ('code', logits[1], 'codes', 'code_length', xtts.gpt.code_stop)):
        total = 0.
        for row, n in enumerate(batch[length].numpy()):
            for place, target in enumerate([*batch[ids].numpy()[row, :n], stop]):
                s = scores.numpy()[row, place].astype(np.float64)
                total += np.log(np.exp(s).sum()) - s[target]
        assert float(parts[f'{name}_loss']) == pytest.approx(total, rel=1e-4)

# --- how fast, on which weights, and with which mean -----------------------------------------------

SCHEDULES = 'constant', 'cosine'

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
              'constant': [1] * len(shares)}[schedule]
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

def test_an_update_is_that_of_keras_and_computes_the_rate_once():
    """To the bit, with the same variables in the same order: checkpoints keep their names. Keras computes the
    rate for each weight that decays, the powers of beta for each variable."""
    training = GPTTraining(schedule='cosine', steps=9, warmup_steps=2)
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
    assert kinds.count('Pow') == 2 and sum('If' in kind for kind in kinds) == 1

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
