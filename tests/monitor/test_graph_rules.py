"Trials of a changed step give what the step gives, and change nothing of the program."
import numpy as np
import pytest
import tensorflow as tf

from watched import seen
from xtts_nb.monitor import diagnose, graph_rules as page
from xtts_nb.monitor.loop import Call
from xtts_nb.monitor.seen import _variables_put_back
from xtts_nb.monitor.watch import _Place

def call_of(loss, *given):
    "A step with its gradients, and what it is called with."
    def step(*given):
        with tf.GradientTape() as tape:
            tape.watch(given)
            value = loss(*given)
        return value, tape.gradient(value, given)
    return Call(tf.function(step), given, {}, 0., False)

def operations(call, *types):
    found = [op for op in call.concrete.graph.get_operations() if op.type in types]
    assert found
    return found

ROWS = tf.reshape(tf.range(1., 9.), (4, 2))

@pytest.mark.parametrize('loss, given, types', [
    (lambda x: tf.reduce_sum(tf.map_fn(lambda row: row / tf.norm(row), x)), (ROWS,), page._LOOPS),
    (lambda a, b: tf.reduce_sum((a[:, None] - b[None]) ** 2), (ROWS, ROWS[:3]), ('Sum',)),
    (lambda x: tf.reduce_sum(
        tf.nn.sparse_softmax_cross_entropy_with_logits([1, 2, 0, 1], x @ tf.ones((2, 9)))), (ROWS,),
     ('MatMul', 'SparseSoftmaxCrossEntropyWithLogits'))], ids=['loop', 'pairs', 'softmax'])
def test_a_step_without_some_operations_gives_the_same(loss, given, types):
    "Their results are known; all that the step changes is changed."
    call = call_of(loss, *given)
    got = diagnose._done_without(call, operations(call, *types))()[1:]
    for a, b in zip(got, tf.nest.flatten(call.function(*given)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)

def test_a_step_without_its_loop_is_quicker_and_changes_what_it_did():
    total, scale = tf.Variable(0.), tf.Variable(2.)   # others wait for a loop that reads a variable
    def loss(x):
        total.assign_add(1.)
        return tf.reduce_sum(tf.map_fn(lambda row: row / tf.norm(row) * scale, x) + total)
    call = call_of(loss, tf.random.normal((300, 40)))
    some = operations(call, *page._LOOPS)
    with _variables_put_back():
        without = diagnose._done_without(call, some)
        assert total.numpy() == 0.   # the loops alone change nothing
        without()
        assert total.numpy() == 1.
    assert total.numpy() == 0. and 0 < page._left(call, lambda: diagnose._done_without(call, some)) < .9
    assert page._left(call, lambda: 1 / 0) is None
    # without its count all else is done
    (count,) = operations(call, 'AssignAddVariableOp')
    diagnose._without_changes(call, [count])()
    assert total.numpy() == 0.

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
        assert found[0].only_on_gpu and found[0].place == 'train.py:2' and found[0].line == line
