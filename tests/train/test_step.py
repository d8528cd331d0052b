"One update: the same in parts, without what is not finite, in any precision, and compiled where it can be."
import re
import time
from pathlib import Path
from types import SimpleNamespace

import keras
import nbformat
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.bench import trace_count
from xtts_nb import bench
from xtts_nb.config import TrainingConfig
from xtts_nb.models.gpt import GPT, fold_seed
from xtts_nb.models.xtts import POLICIES, token_counts
from xtts_nb.train import step as step_page
from xtts_nb.train.step import (
    MODES, WRITES_NOTHING, CompiledStep, Update, _refused_operation, bfloat16_units, check_modes_agree,
    choose_xla, compile_step, first_steps, global_norm, lacked_memory, mode_line, random_batch,
    step_before_after, step_modes)
from xtts_nb.train.trainer import _untouched


@pytest.fixture(scope='module')
def rows(plain) -> dict:
    "Four rows of different lengths, the last of them filling."
    return random_batch(plain, 12, 20) | {'text_length': tf.constant([12, 7, 9, 12]),
                                         'code_length': tf.constant([20, 11, 3, 20]),
                                         'weight': tf.constant([1., 1., 1., 0.])}

def update(config, **changes) -> Update:
    keras.utils.set_random_seed(0)
    config = config.replace(**changes)
    return Update(GPT(config, 5, dtype=POLICIES[config.training.precision]), config.training)

def run(step, batch, count=3, first=0) -> list[dict]:
    return [{k: float(v) for k, v in step(batch, tf.constant(first + i)).items()} for i in range(count)]

def values(made: Update) -> list: return [v.numpy() for v in (*made.weights, *made.variables.values())]


# --- in parts -------------------------------------------------------------------------------------

@pytest.mark.parametrize('xla', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_parts_make_the_whole(plain, rows, xla):
    "Parts hold different numbers of tokens, one of them none at all; the clip is at work."
    whole, cut = update(plain), update(plain, training={'accumulation': 4, 'mode': 'xla' if xla else 'graph'})
    step = compile_step(cut, cut.training)
    lines = run(step, rows)
    for a, b in zip(run(whole, rows), lines): assert b == pytest.approx(a, rel=3e-4)   # whole: op by op
    assert trace_count(step) == 1 and lines[0]['gradient_norm'] > plain.training.gradient_clip_norm
    assert step.xla == xla and lines[0]['loss'] != lines[1]['loss']

def test_gradients_of_parts_add_up(plain, rows):
    "As a graph; the whole batch op by op, which takes less time than a trace."
    whole = update(plain)
    wanted = whole.gradients(rows, tf.constant(0), token_counts(whole.gpt, rows))[0]
    for parts, cut in ((n, update(plain, training={'accumulation': n})) for n in (2, 4)):
        compute = tf.function(cut.gradients) if parts == 2 else cut.gradients
        found = compute(rows, tf.constant(0), token_counts(cut.gpt, rows))[0]
        for v, a, b in zip(whole.weights, wanted, found):
            assert np.allclose(a, b, rtol=1e-4, atol=1e-6), (parts, v.path)

def test_parts_draw_masks_of_their_own(plain, rows):
    same = {k: tf.concat([v[:2], v[:2]], 0) for k, v in rows.items()}
    cut = update(plain, model={'gpt': {'dropout': 0.5}}, training={'accumulation': 2})
    seen = []
    share, cut.share = cut.share, lambda *a: (lambda out: (seen.append(float(out[1]['code_loss'])),
                                                           out)[1])(share(*a))
    cut.gradients(same, tf.constant(0), {'text_count': tf.constant(1.), 'code_count': tf.constant(1.)})
    assert len(seen) == 2 and seen[0] != seen[1]

ONES = {'text_count': tf.constant(1.), 'code_count': tf.constant(1.)}

@pytest.mark.parametrize('first', [None, 0, 3])
@pytest.mark.parametrize('parts', [1, 2])
def test_a_part_draws_by_its_place_in_the_whole_batch(plain, rows, parts, first):
    "One part that nobody shares draws by the seed itself."
    made = update(plain, model={'gpt': {'dropout': 0.5}}, training={'accumulation': parts, 'seed': 7})
    seed, size = tf.constant([7, 9]), 4 // parts
    cut = [{k: v[i * size:(i + 1) * size] for k, v in rows.items()} for i in range(parts)]
    folded = [fold_seed(seed, (first or 0) + i) for i in range(parts)]
    seeds = [seed] if parts == 1 and first is None else folded
    wanted = [made.share(some, s, ONES) for some, s in zip(cut, seeds)]
    gradients, sums = made.gradients(rows, tf.constant(9), ONES, first)
    for name, total in sums.items():
        assert float(total) == pytest.approx(sum(float(w[1][name]) for w in wanted), rel=1e-4)
    assert np.allclose(gradients[0], sum(w[0][0] for w in wanted), rtol=1e-3, atol=1e-5)

def test_losses_are_means_over_the_tokens_that_there_are(plain):
    "Where there is none the sum stays, which is zero then."
    made = update(plain, training={'text_loss_weight': 0.5})
    sums = {'text_loss': tf.constant(6.), 'code_loss': tf.constant(9.)}
    nothing = lambda: [tf.zeros(v.shape) for v in made.weights]
    for texts, mean in ((0., 6.), (1., 6.), (3., 2.)):
        counts = {'text_count': tf.constant(texts), 'code_count': tf.constant(2.)}
        found = {k: float(v) for k, v in made.finish(nothing(), sums, counts).items()}
        assert found == {'loss': 0.5 * mean + 4.5, 'text_loss': mean, 'code_loss': 4.5, 'gradient_norm': 0,
                         'skipped': 0, 'bad': 0}
    means = made.means(sums | {'text_count': tf.constant(3.), 'code_count': tf.constant(2.)})
    assert {k: float(v) for k, v in means.items()} == {'loss': 5.5, 'text_loss': 2., 'code_loss': 4.5}

def test_the_norm_reads_all_vectors_at_once():
    "Gradients of any rank, and where there are only matrices."
    some = [tf.constant(x, tf.float32) for x in (3., [4., 12.], [[0., 84.]], [[[5.]]], [2., 1.])]
    norm = np.sqrt(sum(np.sum(np.square(g.numpy())) for g in some))
    assert float(global_norm(some)) == pytest.approx(norm, rel=1e-6)
    assert float(global_norm(some[2:3])) == 84 and float(global_norm(some[1:2])) == pytest.approx(160**.5)
    ops = tf.function(lambda: global_norm(some)).get_concrete_function().graph.get_operations()
    assert sum(op.type == 'L2Loss' for op in ops) == 3

def test_some_of_the_weights(plain):
    gpt = update(plain).gpt
    assert Update(gpt, plain.training, gpt.trainable_variables[:2]).weights == gpt.trainable_variables[:2]

def test_a_random_batch_holds_ordinary_tokens_in_full_rows(plain):
    batch = random_batch(plain, 300, 400)
    for kind, length, top in (('text', 300, 48), ('codes', 400, 32)):
        ids = batch[kind].numpy()
        assert ids.shape == (4, length) and ids.min() == 3 and ids.max() == top - 1
        assert (batch[f'{kind.removesuffix("s")}_length'].numpy() == length).all()
    assert batch['reference'].shape == (4, 32, 80) and list(batch['clip']) == [0, 1, 2, 3]
    assert (batch['weight'].numpy() == 1).all()

def test_a_position_that_many_clips_share_is_counted_once(plain, rows):
    "The norm and Adam's second moment are those of the sum of an embedding's rows."
    made = update(plain)
    counts = {'text_count': tf.constant(1.), 'code_count': tf.constant(1.)}
    gradients = made.gradients(rows, tf.constant(0), counts)[0]
    assert all(isinstance(g, tf.Tensor) and g.shape == v.shape for g, v in zip(gradients, made.weights))
    norm = np.sqrt(sum(np.sum(np.square(g.numpy())) for g in gradients))
    assert float(tf.linalg.global_norm(gradients)) == pytest.approx(norm, rel=1e-5)


# --- memory for time ------------------------------------------------------------------------------

@pytest.mark.parametrize('parts', [pytest.param(1, marks=pytest.mark.slow), 2])
def test_recomputed_blocks_give_the_same_gradients(plain, rows, parts):
    "With dropout: a mask drawn anew would give others."
    noisy = {'model': {'gpt': {'layers': 2, 'dropout': 0.1}}}
    made = [update(plain, **noisy, training={'accumulation': parts, 'gradient_checkpointing': on})
            for on in (False, True)]
    assert [u.gpt.recompute for u in made] == [u.gpt.conditioning.recompute for u in made] == [False, True]
    both = [compute(rows, tf.constant(3), token_counts(made[0].gpt, rows))[0]
            for compute in (made[0].gradients, tf.function(made[1].gradients))]
    for v, a, b in zip(made[0].weights, *both): assert np.allclose(a, b, rtol=1e-4, atol=1e-6), v.path


# --- what is not finite ---------------------------------------------------------------------------

@pytest.mark.parametrize('parts', [1, 2])
def test_a_broken_batch_changes_nothing(plain, rows, parts):
    made = update(plain, training={'accumulation': parts, 'ema': 0.9})
    step = compile_step(made, made.training)
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

def test_no_variable_of_an_update_lives_on_the_host(plain):
    "TensorFlow has no kernel of a GPU for an int32 variable, and XLA cannot reach one on the host."
    made = update(plain, training={'precision': 'float16', 'ema': 0.5})
    assert 'good_updates' in made.state and not [n for n, v in made.state.items() if 'int32' in str(v.dtype)]

def test_an_overflow_lowers_the_scale_and_nothing_else(plain, rows):
    made = update(plain, training={'precision': 'float16'})
    made.scale.factor.assign(2.**24)
    before = [v.numpy() for v in made.weights]
    step, lines = compile_step(made, made.training), []
    while not lines or lines[-1]['skipped']: lines += run(step, rows, 1, first=len(lines))
    halved = len(lines) - 1
    assert halved > 0 and float(made.scale.factor) == 2.**(24 - halved)
    assert not any(line['bad'] for line in lines)
    assert int(made.optimizer.iterations) == 1
    assert not all(np.array_equal(a, v.numpy()) for a, v in zip(before, made.weights))
    assert set(made.variables) >= {'loss_scale', 'good_updates'}

OK, NAN, INF = 1., np.nan, np.inf

@pytest.mark.parametrize('factor, loss, norm, good, bad', [
    (None, OK, OK, True, False), (None, NAN, OK, False, True), (None, OK, INF, False, True),
    (8., OK, OK, True, False), (8., OK, INF, False, False), (8., NAN, NAN, False, True),
    (2., OK, NAN, False, False),
    (1., OK, INF, False, True), (1., OK, OK, True, False)])
def test_only_what_a_smaller_scale_cures_is_not_bad(factor, loss, norm, good, bad):
    noted = []
    scale = factor and SimpleNamespace(factor=tf.constant(factor),
                                       note=lambda finite: noted.append(bool(finite)))
    found = Update.check_finite(SimpleNamespace(scale=scale), tf.constant(loss), tf.constant(norm))
    assert [*map(bool, found)] == [good, bad]
    assert noted == ([good or bad] if scale else [])   # lowering a scale of 1 helps nobody

@pytest.mark.parametrize('precision', ['bfloat16', pytest.param('float16', marks=pytest.mark.slow)])
def test_half_precision_learns_as_float32_does(plain, rows, precision):
    losses = [[line['loss'] for line in run(u, rows, 4)]   # op by op: a trace takes as long as ten updates
              for u in (update(plain), update(plain, training={'precision': precision}))]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2) and losses[1] != losses[0]
    assert losses[1][-1] < losses[1][0]


# --- in three modes -------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def modes(plain): return step_modes(plain.replace(training={'mode': 'xla'}), 5)

@pytest.mark.slow
def test_eager_graph_and_xla_compute_the_same(modes, rows):
    losses = check_modes_agree(modes, [rows] * 3)
    assert list(losses) == ['eager', 'graph', 'xla'] and len(set(losses['eager'])) > 1   # it moves
    assert [trace_count(s) for s in modes.values()] == [0, 1, 1]

def test_other_losses_are_noticed(rows):
    right, wrong = (lambda b, i, factor=f: {'loss': factor * tf.reduce_sum(b['weight'])} for f in (1., 1.001))
    assert check_modes_agree({'eager': right, 'graph': tf.function(right)}, [rows])['graph'] == [3.]
    with pytest.raises(AssertionError, match='graph computes other losses than eager'):
        check_modes_agree({'eager': right, 'graph': wrong}, [rows])

def test_the_comparison_has_a_row_for_each_mode():
    step, seen = lambda batch, number: time.sleep(0.005) or {'loss': 1.}, []
    steps = {'eager': step, 'xla': tf.function(lambda batch, number: {'loss': tf.constant(1.)})}
    rows = step_before_after(steps, {'clip': tf.zeros(2)}, rounds=2, progress=lambda *a: seen.append(a))
    assert [r['name'] for r in rows] == ['eager', 'xla'] and rows[0]['ratio'] == 1
    assert rows[0]['step_ms'] >= 5 and rows[1]['step_ms'] > 0
    assert [r['traces'] for r in rows] == [0, 1] and seen[-1] == (6, 6)

def test_the_first_call_of_a_step_traces_it():
    def slow_trace(batch, number):
        time.sleep(0.05)   # while Python runs, and so in the trace of a graph
        return {'loss': batch['x'] * 2.}
    steps = {'eager': slow_trace, 'graph': tf.function(slow_trace)}
    first, again = (first_steps(steps, {'x': tf.constant(1.)}) for _ in range(2))
    assert list(first) == ['eager', 'graph'] and min(first.values()) >= 0.05 <= again['eager']
    assert trace_count(steps['graph']) == 1

def lesson(start: str) -> str:
    "The source of a cell of the lesson."
    nb = nbformat.read(Path(__file__).parents[2] / 'nbs/30_trainer_xla.ipynb', as_version=4)
    return next(c.source for c in nb.cells if c.source.startswith(start))

def test_the_code_for_a_step_of_one_s_own(capsys):
    "As the lesson prints it, with a step that is not ours."
    def make_step():
        weight = tf.Variable(1.)
        def step(batch, number):
            weight.assign_sub(0.1)
            return {'loss': tf.reduce_sum(batch['x']) * weight}
        return step
    exec(lesson('### A step of your own in each mode').split('```')[1].removeprefix('python'),
         {'make_step': make_step, 'batch': {'x': tf.ones(3)}})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(' | ')[0] for line in lines[2:]] == ['| eager', '| graph', '| xla']

@pytest.mark.parametrize('one, said', [
    ({'graph': 1.5, 'xla': 1.2, 'graph_bf16': 2.5},
     'XLA is 0.80 times as fast as the graph; the fastest mode is `graph_bf16`, 2.50 times (± 8%)'),
    ({'graph': 1.5, 'xla': 1.6, 'coqui': 4.}, 'than their spread; the fastest mode is `xla`, 1.60 times'),
    ({'graph': 1.5, 'xla': 1.45}, 'than their spread; the fastest mode is `graph`, 1.50 times'),
    ({'graph': 1.5, 'xla': 3.}, 'as a graph the step is 1.50 times (± 8%) as fast as in eager mode, with XLA '
     '3.00 times (± 8%)** (a card, today; a model). XLA is 2.00 times as fast as the graph')])
def test_the_claim_of_the_lesson_is_that_of_the_record(one, said):
    drawn = {'Markdown': lambda text: text, 'headline': lambda *_: None, 'benchmarks': lambda: None}
    exec(lesson('#| echo: false'), drawn)
    record = {'device': 'a card', 'date': 'today', 'model': 'a model',
              'rows': [{'name': name, 'ratio': ratio, 'spread': 0.08} for name, ratio in one.items()]}
    assert said in drawn['claim'](record)

@pytest.mark.parametrize('device, more, verdicts', [
    ('CPU, 2 cores', {}, ['not reached', 'not measured', 'not measured']),
    ('CPU, 2 cores', {'first_s': 5., 'emulated_au': 0.8}, ['kept', 'not measured', 'not reached']),
    ('A card', {'first_s': 1.5}, ['kept', 'beaten', 'kept'])])
def test_the_promises_beside_a_record(device, more, verdicts):
    drawn = {name: getattr(bench, name) for name in ('record_markdown', 'rows_markdown', 'promise_row')}
    busy = {'device': 'A card',
            'rows': [{'name': 'python_xla', 'mean': 20.}, {'name': 'cache_xla', 'mean': 86.}]}
    drawn |= {'Markdown': lambda text: text, 'benchmarks': lambda: None,
              'recorded': lambda page, _: [busy] if page == 'busy' else []}
    exec(lesson('def with_promises'), drawn)
    row = {'step_ms': 5., 'spread': 0.1, 'au': 0.9}
    rows = [row | {'name': name, 'ratio': ratio} | more
            for name, ratio in (('eager', 1.), ('graph', 6.), ('xla', 7. if more else 4.), ('coqui', 1.))]
    text = drawn['with_promises']({'device': device, 'date': 'today', 'model': 'm', 'noisy': 0, 'rows': rows})
    found = [line.split(' | ')[-1].rstrip(' |').partition(':')[0] for line in text.splitlines()[-3:]]
    assert found == verdicts and '| eager |' in text and '| coqui |' not in text
    assert ('first step' in text.splitlines()[2]) == bool(more)
    assert ('| 86 % | A card |' in text) == (device == 'A card')

@pytest.mark.cpu
@pytest.mark.parametrize('flags, compiled, line', [
    ({}, True, 'with XLA JIT compilation (the choice for float32 on this CPU)'),
    ({'mode': 'xla'}, True, 'with XLA JIT compilation (as training.mode says)'),
    ({'mode': 'graph'}, False, 'without XLA (as training.mode says)'), ({'mode': 'eager'}, None, 'Eager')],
    ids=str)
def test_the_mode_of_a_step(flags, compiled, line):
    training, inside = TrainingConfig(**flags), []
    def step(x):
        inside.append(tf.executing_eagerly())
        return x + 1
    made = compile_step(step, training)
    assert float(made(tf.constant(1.))) == 2 and inside == [compiled is None]
    assert compiled is None or made.graph._jit_compile == compiled
    assert line in mode_line(training)

@pytest.mark.parametrize('setting, precision, gpus, units, xla, why', [
    ('auto', 'float32', [], True, True, 'the choice for float32 on this CPU'),
    ('auto', 'float16', [], True, True, 'the choice for float16 on this CPU'),
    ('auto', 'bfloat16', [], True, False, 'this CPU multiplies in bfloat16, XLA would multiply in float32'),
    ('auto', 'bfloat16', [], False, True, 'the choice for bfloat16 on this CPU'),
    ('auto', 'bfloat16', ['GPU:0'], True, True, 'on a GPU it makes fewer kernels'),
    ('xla', 'bfloat16', [], True, True, 'as training.mode says'),
    ('graph', 'float32', ['GPU:0'], True, False, 'as training.mode says')])
def test_xla_is_chosen_by_device_and_precision(monkeypatch, setting, precision, gpus, units, xla, why):
    monkeypatch.setattr(tf.config, 'get_visible_devices', lambda kind: gpus if kind == 'GPU' else None)
    monkeypatch.setattr(step_page, 'bfloat16_units', lambda: units)
    training = TrainingConfig(mode=setting, precision=precision)
    assert choose_xla(training) == (xla, why) and f'({why})' in mode_line(training)
    assert compile_step(lambda x: x, training).graph._jit_compile == xla

@pytest.mark.parametrize('text, found', [
    ('flags\t: fpu avx512_bf16 avx\nflags\t: fpu\n', True), ('model name: x\nflags : amx_bf16\n', True),
    ('flags : fpu avx512f bf16\n', False), ('Features : bf16\n', False), (None, False)])
def test_whether_a_cpu_multiplies_in_bfloat16(tmp_path, text, found):
    if text: (tmp_path / 'cpuinfo').write_text(text)
    assert bfloat16_units(tmp_path / 'cpuinfo') == found

@pytest.mark.cpu
def test_xla_turns_products_in_bfloat16_into_float32_ones_on_a_cpu():
    "The reason of the choice: as soon as this fails, measure the modes again."
    product = tf.function(lambda a: tf.reduce_max(tf.matmul(a, a)), jit_compile=True)
    a = tf.ones((64, 64), tf.bfloat16)
    program = product.experimental_get_compiler_ir(a)(stage='optimized_hlo')
    kinds = re.findall(r'= (\w+)\[64,64\]\S* (?:dot|custom-call|fusion)\(', program)
    assert 'f32' in kinds, program

def test_every_mode_has_its_line():
    assert len({mode_line(TrainingConfig(**flags)) for flags in MODES.values()}) == 3

def test_what_xla_cannot_compile_runs_as_a_graph_and_says_so(capsys):
    step = compile_step(lambda x: tf.strings.length(tf.strings.as_string(x)) + 1, TrainingConfig())
    assert [int(step(tf.constant(value))) for value in (12, 345)] == [3, 4]
    assert step.refused and not compile_step(lambda x: x, TrainingConfig()).refused
    said = capsys.readouterr().err
    assert said.count('XLA CANNOT COMPILE THE STEP: AsString') == 1
    assert 'Training goes on as a plain graph, without XLA.' in said
    assert not step.xla and trace_count(step) == 1

class Hungry(Update):
    "An update of one number that asks for 2^50 numbers of memory in one of its two programs, or none."
    def __init__(self, gpt, where):
        self.gpt, self.where = gpt, where
        self.number, self.weights = tf.Variable(1.), []
        self.optimizer = SimpleNamespace(name='adamw', variables=[])

    def _asks(self, where, number):
        size = (2**30 if self.where == where else 1, 2**20)
        drawn = tf.random.stateless_uniform(size, tf.stack([number, number]))
        return tf.reduce_sum(tf.sort(drawn, 0)[0, :2])

    def gradients(self, batch, number, counts, first=None):
        return [self.number + counts['code_count']], {'code_loss': self._asks('gradients', number)}

    def finish(self, gradients, sums, counts):
        asked = self._asks('finish', tf.cast(counts['code_count'], 'int32'))
        self.number.assign_add(gradients[0] + 0 * asked)
        return {'loss': sums['code_loss']}

@pytest.mark.slow   # TensorFlow tries for 10 s and more to find the memory
@pytest.mark.parametrize('where, untouched', [('gradients', True), ('finish', False)])
def test_without_memory_for_gradients_no_weight_is_lost(plain, rows, where, untouched):
    "The program that writes gives the memory of the old values away: after an error in it they are gone."
    made = Hungry(SimpleNamespace(code_stops=1), where)
    step = compile_step(made, TrainingConfig(mode='xla'))
    assert step.xla
    with pytest.raises(tf.errors.ResourceExhaustedError) as error: step(rows, tf.constant(0))
    assert _untouched(step, made.optimizer, error.value) == untouched
    if not untouched: return
    assert float(made.number) == 1
    made.where = None
    compile_step(made, TrainingConfig(mode='xla'))(rows, tf.constant(0))
    assert float(made.number) == 2 + 20 + 11 + 3 + 3   # twice itself, and the codes with a STOP in each row

@pytest.mark.parametrize('error, lacked', [
    (tf.errors.ResourceExhaustedError(None, None, 'OOM'), True), (MemoryError(), True),
    (tf.errors.AbortedError(None, None, 'Operation received an exception:Status: 1, message: out of'), True),
    (tf.errors.AbortedError(None, None, 'Operation received an exception:Status: 2, message: wrong'), False),
    (tf.errors.InternalError(None, None, 'Status: 1, message'), False), (ValueError('Status: 1, '), False)])
def test_what_ends_an_update_for_want_of_memory(error, lacked): assert lacked_memory(error) == lacked

@pytest.mark.parametrize('step, message, untouched', [
    ({'xla': True, 'graph': 1}, f'... [[{{{{node {WRITES_NOTHING}/while}}}}]]', True),
    ({'xla': True, 'graph': 1}, '... [[{{node finish/AssignAdd}}]]', False),
    ({'xla': False, 'graph': 1}, '... [[{{node gpt/MatMul}}]]', True),
    ({'xla': False, 'graph': 1}, '... [[{{node adamw/Sqrt}}]]', False), ({}, 'op by op', False)])
def test_where_memory_was_short_says_whether_weights_are_as_before(step, message, untouched):
    optimizer = SimpleNamespace(name='adamw')
    assert _untouched(SimpleNamespace(**step), optimizer, Exception(message)) == untouched

@pytest.mark.cpu
def test_a_large_update_on_a_cpu_writes_in_place(plain, rows, monkeypatch):
    "The gradients stay a program of XLA, the update becomes a graph; both train alike."
    trained = {}
    for limit in (1e9, 0):
        monkeypatch.setattr(step_page, 'IN_PLACE', limit)
        made = update(plain, training={'mode': 'xla'})
        step = compile_step(made, made.training)
        losses = [each['loss'] for each in run(step, rows, 2)]
        inside = step.graph.get_concrete_function(rows, tf.constant(0)).graph.as_graph_def().library.function
        trained[limit] = losses, sum(f.attr['_XlaMustCompile'].b for f in inside), values(made)
    (fused, programs, one), (plainly, left, other) = trained.values()
    assert left == programs - 1 and fused == pytest.approx(plainly, rel=1e-5) and fused[1] < fused[0]
    for a, b in zip(one, other): np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

@pytest.mark.cpu
def test_only_a_large_update_on_a_cpu_is_no_program_of_xla(monkeypatch):
    assert [step_page.writes_in_place(n) for n in (1e9, 1.1e9)] == [False, True]
    monkeypatch.setattr(tf.config, 'get_visible_devices', lambda kind: ['a card'])
    assert not step_page.writes_in_place(1.1e9)

def test_an_update_in_two_programs_that_xla_refuses_runs_as_a_graph(rows, capsys):
    made = Hungry(SimpleNamespace(code_stops=1), None)
    size = made._asks
    made._asks = lambda *a: size(*a) + tf.cast(tf.strings.length(tf.strings.as_string(a[1])), 'float32')
    step = compile_step(made, TrainingConfig(mode='xla'))
    assert 'loss' in step(rows, tf.constant(0)) and step.refused and not step.xla
    assert 'XLA CANNOT COMPILE THE STEP: AsString' in capsys.readouterr().err

@pytest.mark.parametrize('xla', [True, False])
def test_any_other_error_of_a_step_stays_one(xla):
    step = compile_step(lambda x: tf.reshape(x, [7]), TrainingConfig(mode='xla' if xla else 'graph'))
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError)): step(tf.constant([1., 2.]))

@pytest.mark.parametrize('xla, said', [(True, 'other'), (False, 'other'), (False, '_XlaMustCompile')])
def test_an_error_while_it_runs_that_is_not_of_xla_stays_one(xla, said, capsys):
    def broken(*_): raise tf.errors.InvalidArgumentError(None, None, said)
    step = CompiledStep(lambda x: x, xla)
    step.graph = broken
    with pytest.raises(tf.errors.InvalidArgumentError, match=said): step(1)
    assert (step.xla, step.refused, step.graph) == (xla, False, broken) and not capsys.readouterr().err

@pytest.mark.parametrize('message, said', [
    ('On XLA_CPU_JIT: AsString (no kernel for it){{node AsString}}\n File "a.py", line 3, in f\n '
     'File "b.py", line 7, in g',
     'AsString (no kernel for it) at File "b.py", line 7, in g'),
    ('On XLA_GPU_JIT: Where {{node Where}}', 'Where'), ('What is this?\nNobody knows.', 'What is this?')])
def test_what_xla_refuses_is_named_with_its_place(message, said): assert _refused_operation(message) == said
