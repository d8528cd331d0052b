"Changed graphs of a step, and what only a file, a watch or Keras shows; the rules: `golden.json`."
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from test_golden import compiled, gradient_of
from watched import calls, LINE, only, seen
from xtts_nb.monitor import diagnose, graph_rules as page
from xtts_nb.monitor.program import _every_fit_watched
from xtts_nb.monitor.seen import _compiled_call, steady_part, _variables_put_back
from xtts_nb.monitor.watch import Event, _Place, Watch

@pytest.mark.parametrize('name, types', [
    ('factor', page._LOOPS), ('one-hot 512', ('MatMul',)), ('all pairs', ('Sum',)), ('4 losses', ('MatMul',)),
    ('softmax 9999', ('MatMul', 'SparseSoftmaxCrossEntropyWithLogits')), ('rows in a loop', page._LOOPS)])
def test_a_step_without_some_operations_gives_the_same(name, types):
    "Their results are known; all that the step changes is changed."
    call = compiled(name)
    some = [op for op in call.concrete.graph.get_operations() if op.type in types]
    with _variables_put_back(): expected = tf.nest.flatten(call.function(*call.args))
    with _variables_put_back(): got = diagnose._done_without(call, some)()[1:]
    assert some
    for a, b in zip(got, expected, strict=True): np.testing.assert_allclose(a, b, rtol=1e-5)

def test_a_step_without_its_loop_is_quicker_and_changes_what_it_did():
    rows, total = tf.random.normal((300, 40)), tf.Variable(0.)
    def loss(x):
        total.assign_add(1.)
        return tf.reduce_sum(tf.map_fn(lambda row: row / tf.norm(row), x) + total)
    call = page.Call(tf.function(gradient_of(loss)), (rows,), {}, 0., False)
    some = [op for op in call.concrete.graph.get_operations() if op.type in page._LOOPS]
    with _variables_put_back():
        without = diagnose._done_without(call, some)
        assert total.numpy() == 0.   # the loops alone change nothing
        without()
        assert total.numpy() == 1.
    assert total.numpy() == 0. and 0 < page._left(call, lambda: diagnose._done_without(call, some)) < .9
    assert page._left(call, lambda: 1 / 0) is None

def test_metrics_are_left_out_and_all_else_is_done():
    call = compiled('AUC')
    writes = [op for op in call.concrete.graph.get_operations() if op.type == 'AssignAddVariableOp'
              and op.inputs[0].shape.rank == 0 and op.inputs[1].shape.rank == 1]
    with _variables_put_back():
        before = float(call.function(*call.args)[0])
        total, _ = diagnose._without_changes(call, writes)()[1:]
        assert float(total) == pytest.approx(before + .7)



def on_gpu(found): assert only(found).only_on_gpu and found[0].predicted_gain == 1.

@pytest.mark.parametrize('line, hides', [
    ("os.environ['CUDA_VISIBLE_DEVICES'] = '-1'", True), ('os.environ["CUDA_VISIBLE_DEVICES"]=""', True),
    ("os.environ.setdefault('CUDA_VISIBLE_DEVICES', '-1')", True),
    ("if '--cpu' in sys.argv: os.environ['CUDA_VISIBLE_DEVICES'] = '-1'", False),
    ("os.environ['CUDA_VISIBLE_DEVICES'] = '0'", False),
    ("# os.environ['CUDA_VISIBLE_DEVICES'] = '-1'", False)])
def test_a_program_that_hides_its_gpu(tmp_path, monkeypatch, line, hides):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', 'was' if 'if ' in line else '-1')
    (tmp_path / 'train.py').write_text(f'import os\n{line}\n')
    place = _Place(str(tmp_path / 'train.py'), 1)
    found = page.find_on_host(seen([(place, 'graph')] * 50, cards='was'))
    assert bool(found) == hides
    if hides:
        on_gpu(found)
        assert found[0].place == 'train.py:2' and found[0].line == line

def test_what_is_put_on_the_cpu(tmp_path):
    def look(function, *events):
        last = {('call', LINE): (tf.function(function), '__call__', (tf.zeros((40, 40)),), {})}
        looks = [(_Place(str(scope), 1), 'graph')] * 9
        return page.find_on_host(seen(looks, [*calls('call', 9), *events], last=last))
    def aside(x, cells=40):
        with tf.device('/CPU:0'): return tf.nn.softmax(x[:cells, :cells])
    scope = tmp_path / 'train.py'
    scope.write_text("with tf.device('/CPU:0'): ...")
    on_gpu(found := look(aside))
    assert 'Softmax' in found[0].evidence
    assert look(lambda x: aside(x, 31)) == [] == look(lambda x: x + 1)   # 961 numbers are few
    on_gpu(found := look(tf.random.shuffle))
    assert 'RandomShuffle' in found[0].evidence
    made = lambda device, rows: Event('variable', _Place(__file__, 4), 0., rows=rows, device=device)
    on_gpu(found := look(lambda x: x, made('/device:CPU:0', 1000)))
    assert found[0].disease == 'variables on the CPU'
    assert look(lambda x: x, made('', 1000), made('/device:CPU:0', 999)) == []
    scope.write_text('')   # Keras itself puts some things on the CPU
    page.linecache.checkcache()
    assert look(aside) == []

@pytest.mark.parametrize('x, used', [
    ([[1, 2, 0, 0], [3, 0, 0, 0]], (0, 2)), ([[0, 0, 1, 2], [0, 0, 0, 5]], (2, 4)),
    ([[1, 2], [3, 4]], (0, 2)), ([[7, 7], [7, 7]], (0, 0)), ([[7, 1, 0, 0], [7, 2, 0, 0]], (0, 2)),
    ([[1., 0.], [2., 0.]], None),
    ([[[1.], [0.]], [[2.], [0.]]], (0, 1)),
    ([[[0.], [3.]], [[0.], [0.]]], (1, 2)), ([1, 0], None), ([[[1], [0]]], None)])
def test_columns_in_which_something_is(x, used): assert page._used(tf.constant(x)) == used

@pytest.mark.parametrize('changes, trains, is_found', [
    (False, False, True), (True, False, False), (False, True, False)])
def test_a_part_that_is_the_same_in_each_call(monkeypatch, changes, trains, is_found):
    "Known from the arguments and variables that are the same; nothing that is drawn at random is."
    w, tried = tf.Variable(tf.ones((3, 3))), []
    @tf.function
    def decode(source, tokens):
        memory = tf.tanh(source @ w) @ w
        if trains: w.assign_add(tf.zeros((3, 3)))
        return tf.reduce_sum(memory + tokens) + tf.reduce_sum(tf.random.normal([3]))
    source = tf.ones((2, 3))
    with Watch() as watch:
        for i in range(20): decode(source + 0. if changes else source, tf.fill((2, 3), float(i)))
    monkeypatch.setattr(page, '_left', lambda call, changed: tried.append(changed.args[1]) or .2)
    part = steady_part(watch)
    found = page._same_part(part, _compiled_call(part), .9)
    assert bool(found) == is_found
    if not found: return
    assert [op.type for op in only(tried)] == ['MatMul'] and found[0].predicted_gain == pytest.approx(1 / .28)
    assert 'decode gets the same source' in found[0].evidence

def test_what_is_the_same_in_every_epoch_is_not_drawn_learned_or_written_elsewhere(monkeypatch):
    tried, rows = [], tf.data.Dataset.range(9).batch(3)
    monkeypatch.setattr(page, '_left', lambda call, changed: tried.append(changed.args[1]) or .2)
    part = seen(['graph'] * 9, calls('fit', 9), loop=('fit', LINE), fits=[SimpleNamespace(planned=9)],
                datasets={LINE: [rows]})
    for name in ('random', 'all learned', 'frozen'): page._in_every_epoch(part, call := compiled(name), 1.)
    assert ['Tanh' in [op.type for op in some] for some in tried] == [False, False, True]
    kernel = next(v for v in call.concrete.graph.variables if v.shape == (4, 3))
    average = tf.function(lambda: kernel.assign(kernel * .9))
    part.watch.concrete_functions = lambda: [average.get_concrete_function()]
    page._in_every_epoch(part, call, 1.)
    assert 'Tanh' not in [op.type for op in tried[-1]]

@pytest.mark.parametrize('frozen', [True, False])
def test_a_frozen_layer_of_fit_is_read_only_through_all_its_functions(monkeypatch, frozen):
    "`fit` gives every variable to the function of one step, by another function."
    first = keras.layers.Dense(8, activation='tanh', trainable=not frozen)
    model = keras.Sequential([keras.Input((4,)), first, keras.layers.Dense(1)])
    model.compile('sgd', 'mse')
    rows, tried = tf.data.Dataset.from_tensors((tf.ones(4), tf.ones(1))).repeat(60).batch(2), []
    with Watch() as watch, _every_fit_watched(watch): model.fit(rows, epochs=3, verbose=0)
    part = steady_part(watch)
    call = _compiled_call(part)
    monkeypatch.setattr(page, '_left', lambda call, changed: tried.append(changed.args[1]) or .2)
    page._in_every_epoch(part, call, 1.)
    assert any(op.type == 'Tanh' for ops in tried for op in ops) == frozen
