"One update: the same in parts, without what is not finite, in any precision, and compiled where it can be."
import re
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.bench import trace_count
from xtts_nb.config import GPTTraining
from xtts_nb.models.gpt import _fold_seed, GPT
from xtts_nb.models.xtts import _POLICIES
from xtts_nb.train import step as step_page
from xtts_nb.train.step import (
    _bfloat16_units, _check_modes_agree, choose_xla, compile_step, _global_norm, _lacked_memory,
    mode_line, random_batch, step_modes, token_counts, Update)


@pytest.fixture(scope='module')
def rows(plain) -> dict:
    "Four rows of different lengths, the last of them filling."
    return random_batch(plain, 12, 20) | {'text_length': tf.constant([12, 7, 9, 12]),
                                         'code_length': tf.constant([20, 11, 3, 20]),
                                         'weight': tf.constant([1., 1., 1., 0.])}

def update(config, **changes) -> Update:
    keras.utils.set_random_seed(0)
    config = config.replace(**changes)
    return Update(GPT(config, 5, dtype=_POLICIES[config.training.gpt.precision]), config.training.gpt)

def run(step, batch, count=3, first=0) -> list[dict]:
    return [{k: float(v) for k, v in step(batch, tf.constant(first + i)).items()} for i in range(count)]

def values(made: Update) -> list: return [v.numpy() for v in (*made.weights, *made.variables.values())]

ONES = {'text_count': tf.constant(1.), 'code_count': tf.constant(1.)}


# --- in parts -------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def parted(plain):
    "Mode -> a compiled update in four parts, with a running mean, and its step."
    made = {}
    def of(mode):
        if mode not in made:
            cut = update(plain, training={'gpt': {'grad_accum_steps': 4, 'ema': 0.9, 'mode': mode}})
            made[mode] = cut, compile_step(cut, cut.training)
        return made[mode]
    return of

@pytest.mark.parametrize('mode', ['graph', pytest.param('xla', marks=pytest.mark.slow)])
def test_parts_make_the_whole(plain, rows, parted, mode):
    "Parts hold different numbers of tokens, one of them none at all; the gradients are clipped."
    (_, step), whole = parted(mode), update(plain)
    lines = run(step, rows, 2)
    for a, b in zip(run(whole, rows, 2), lines): assert b == pytest.approx(a, rel=3e-4)   # whole: op by op
    assert trace_count(step) == 1 and lines[0]['gradient_norm'] > plain.training.gpt.gradient_clip_norm
    assert step.xla == (mode == 'xla') and lines[0]['loss'] != lines[1]['loss']

@pytest.mark.parametrize('parts, first', [(1, None), (1, 3), (2, 3)])
def test_a_part_draws_by_its_index_in_the_whole_batch(plain, rows, parts, first):
    "A single part draws by the seed itself."
    made = update(plain, model={'gpt': {'dropout': 0.5}},
                  training={'gpt': {'grad_accum_steps': parts, 'seed': 7}})
    seed, size = tf.constant([7, 9]), 4 // parts
    cut = [{k: v[i * size:(i + 1) * size] for k, v in rows.items()} for i in range(parts)]
    folded = [_fold_seed(seed, (first or 0) + i) for i in range(parts)]
    seeds = [seed] if parts == 1 and first is None else folded
    wanted = [made.share(some, s, ONES) for some, s in zip(cut, seeds)]
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
    "The norm and Adam's second moment are those of the sum of the rows."
    made = update(plain)
    gradients = made.gradients(rows, tf.constant(0), ONES)[0]
    assert all(isinstance(g, tf.Tensor) and g.shape == v.shape for g, v in zip(gradients, made.weights))
    norm = np.sqrt(sum(np.sum(np.square(g.numpy())) for g in gradients))
    assert float(tf.linalg.global_norm(gradients)) == pytest.approx(norm, rel=1e-5)

@pytest.mark.parametrize('parts', [pytest.param(1, marks=pytest.mark.slow), 2])
def test_recomputed_blocks_give_the_same_gradients(plain, rows, parts):
    "With dropout: a mask that is drawn again would give others."
    noisy = {'model': {'gpt': {'num_layers': 2, 'dropout': 0.1}}}
    made = [update(plain, **noisy,
                   training={'gpt': {'grad_accum_steps': parts, 'gradient_checkpointing': on}})
            for on in (False, True)]
    assert [u.gpt.recompute for u in made] == [u.gpt.conditioning.recompute for u in made] == [False, True]
    again = made[1].gradients if parts > 1 else tf.function(made[1].gradients)
    both = [compute(rows, tf.constant(3), token_counts(made[0].gpt, rows))[0]
            for compute in (made[0].gradients, again)]
    for v, a, b in zip(made[0].weights, *both): assert np.allclose(a, b, rtol=1e-4, atol=1e-6), v.path


# --- what is not finite ---------------------------------------------------------------------------

def test_a_broken_batch_changes_nothing(rows, parted):
    made, step = parted('graph')
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
