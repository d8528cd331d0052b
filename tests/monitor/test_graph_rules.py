"Trials of a changed step give what the step gives, and change nothing of the program."
import keras
import numpy as np
import pytest
import tensorflow as tf

from watched import calls, LINE, seen
from xtts_nb.monitor import graph_rules as page, leave_out
from xtts_nb.monitor.leave_out import Call, _variables_put_back
from xtts_nb.monitor.watch import _Place

def call_of(loss, *given):
    "A step with its gradients, and what it is called with."
    def step(*given):
        with tf.GradientTape() as tape:
            tape.watch(given)
            value = loss(*given)
        return value, tape.gradient(value, given)
    return Call(tf.function(step), given)

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
    got = leave_out._done_without(call, operations(call, *types))()[1:]
    for a, b in zip(got, tf.nest.flatten(call.function(*given)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)

def test_a_step_without_its_loop_is_quicker_and_changes_what_it_did():
    total, scale = tf.Variable(0.), tf.Variable(2.)   # others wait for a loop that reads a variable
    ones = tf.Variable([1.])   # an operation on the device of a variable
    def loss(x):
        total.assign_add(tf.nn.embedding_lookup(ones, 0))
        return tf.reduce_sum(tf.map_fn(lambda row: row / tf.norm(row) * scale, x) + total)
    call = call_of(loss, tf.random.normal((300, 40)))
    some = operations(call, *page._LOOPS)
    with _variables_put_back():
        without = leave_out._done_without(call, some)
        assert total.numpy() == 0.   # the loops alone change nothing
        without()
        assert total.numpy() == 1.
    assert total.numpy() == 0. and 0 < leave_out._left(call, lambda: leave_out._done_without(call, some)) < .9
    assert leave_out._left(call, lambda: 1 / 0) is None
    # without its count all else is done
    (count,) = operations(call, 'AssignAddVariableOp')
    leave_out._without_changes(call, [count])()
    assert total.numpy() == 0.

X, IDS, TABLE = tf.ones((4, 8)), tf.range(4), tf.Variable(tf.ones((20_000, 60)))
LOSS = tf.nn.sparse_softmax_cross_entropy_with_logits
def discounted(x):
    return tf.while_loop(lambda i, h: i < 4, lambda i, h: (i + 1, .9 * h + x[i]), (0, x[0]))
def sliced(x): return [tf.exp(x[:, t % 8]) for t in range(600)]
def losses(x):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = x @ tf.transpose(x) @ x
        each = [tf.reduce_sum(y[i]) for i in range(4)]
    return [tape.gradient(loss, x) for loss in each]
def summed(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.reduce_sum(x @ tf.transpose(x) @ x)
    return tape.gradient(y, x)
def dense(ids): return TABLE.assign_sub(tf.ones_like(TABLE) * tf.reduce_sum(tf.gather(TABLE, ids)))
def sparse(ids): TABLE.scatter_sub(tf.IndexedSlices(tf.gather(TABLE, ids), ids))

@pytest.mark.parametrize('part, slow, fixed, given', [
    (page._ROW_LOOP, lambda x: tf.map_fn(tf.sin, x), tf.sin, X),
    (page._LINEAR_LOOP, discounted, tf.cumsum, X),
    (page._ONE_HOT, lambda ids: tf.one_hot(ids, 600) @ tf.ones((600, 2)),
     lambda ids: tf.gather(tf.ones((600, 2)), ids), IDS),
    (page._SOFTMAX, lambda i: LOSS(i, tf.ones((4, 10**4))), lambda i: LOSS(i, tf.ones((4, 9))), IDS),
    (page._PAIRS, lambda x: tf.reduce_sum((x[:, None] - x[None]) ** 2, 2), lambda x: x @ x[0][:, None], X),
    (page._DOUBLE, lambda x: tf.cast(x, tf.float64) * 2, lambda x: x * 2, X),
    (page._HALF, lambda x: tf.cast(x, tf.float16) * 2, lambda x: x * 2, X),
    (page._UNROLLED_LOOP, sliced, tf.exp, X), (page._BACKWARD, losses, summed, X),
    (page._DENSE_TABLE, dense, sparse, IDS),
    (page._NO_XLA, tf.sin, tf.function(tf.sin, jit_compile=True), X)],
    ids=lambda p: getattr(p, 'cause', ''))
def test_each_cause_is_recognised_and_its_fix_is_not(part, slow, fixed, given):
    "A step of 1 ms."
    of = lambda f: Call(f if hasattr(f, 'get_concrete_function') else tf.function(f), (given,))
    part_of = seen(['graph'] * 50, calls('next', 100))
    part_of.end = 1e-3 * len(part_of.steps)
    found = part.select(part_of, of(slow))
    assert found and part.evidence.format(share='50%', rest='50%', **found)
    assert not part.select(part_of, of(fixed))

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

@pytest.mark.parametrize('xla', [False, True])
def test_a_step_tells_which_layer_and_line_its_time_goes_into(xla):
    layers = keras.Sequential([keras.layers.Dense(2000, name='large'), keras.layers.Dense(1, name='small')])
    x, total = tf.ones((64, 300)), tf.Variable(0.)
    layers(x)
    @tf.function(jit_compile=xla)
    def step(x):
        with tf.GradientTape() as tape: loss = tf.reduce_sum(layers(x) ** 2)
        total.assign_add(loss)
        return [tf.reduce_sum(g) for g in tape.gradient(loss, layers.trainable_variables)]
    event = calls('call', 30, place=LINE)
    watching = seen(['graph'] * 50, event, ('call', LINE), last={('call', LINE): (step, 'step', (x,), {})})
    (told,) = page._spent_inside(watching)
    assert '/large_1 (test_graph_rules.py:' in told and total.numpy() == 0., told
    assert told.endswith('without XLA') is xla
