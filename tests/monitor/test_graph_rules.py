"What the graph of a step shows, and trials of changed graphs."
from dataclasses import replace
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from watched import calls, LINE, only, OTHER, seen
from xtts_nb.monitor import diagnose, graph_rules as page
from xtts_nb.monitor.program import every_fit_watched
from xtts_nb.monitor.seen import steady_part, variables_put_back
from xtts_nb.monitor.watch import Event, Look, Place, PythonCall, Watch


WHOLE = np.ones((40, 3), 'float32')

def decayed(ids, table):
    with tf.GradientTape() as tape: loss = tf.reduce_sum(tf.gather(table, ids)) + tf.nn.l2_loss(table)
    return table.assign_sub(.1 * tape.gradient(loss, table))

def like_adam(ids, table):
    gradient = WHOLE * tf.reduce_sum(tf.gather(table, ids))
    return table.assign_sub(gradient / tf.sqrt(gradient))

@pytest.mark.parametrize('compiled, build, share, says', [
    (False, lambda ids, table: table.assign_sub(WHOLE * tf.reduce_sum(tf.gather(table, ids))), .3,
     '3 operations go over all rows (40 x 3'),   # a product, the update, and the sum that is returned
    (True, lambda ids, table: table.assign_sub(WHOLE * tf.reduce_sum(tf.gather(table, ids))), .1,
     '1 operations go over all rows'),
    (False, lambda ids, table: table.assign_sub(WHOLE * tf.reduce_sum(tf.gather(table + 0., ids))), .4,
     ': its optimizer'),
    (False, like_adam, .5, ': an optimizer that keeps a mean for each number'),
    # also the sum of squares, its gradient, the rows' gradient, their sum, times .1
    (False, decayed, .7, ': tf.nn.l2_loss of the whole table'),
    (False, lambda ids, table: table.scatter_sub(tf.IndexedSlices(tf.gather(table, ids), ids)), 0, ''),
    (False, lambda ids, table: table.assign_sub(WHOLE * tf.reduce_sum(tf.one_hot(ids, 40) @ table)), .4,
     ': a product with tf.one_hot'),
    (False, lambda ids, table: table.assign_sub(WHOLE), 0, '')])
def test_a_table_that_changes_as_a_whole(monkeypatch, compiled, build, share, says):
    "Read by gather or one_hot, in steps of a second."
    monkeypatch.setattr(page, 'LONG_TABLE', (40, 100))
    monkeypatch.setattr(page, '_over_table', lambda shape: .1 * (shape == (40, 3)))
    monkeypatch.setattr(page, '_one_hot_product', lambda shape: .05)
    table = tf.Variable(tf.zeros((40, 3)))
    step = tf.function(lambda ids: tf.reduce_sum(tf.function(build)(ids, table)), jit_compile=compiled)
    part = seen(['graph'] * 100, calls('call', 10),
                last={('call', LINE): (step, '__call__', (tf.constant([1, 2]),), {})}, loop=('call', LINE))
    found = [f for f in page.find_in_graph(part) if 'dense gradient' in f.disease]
    assert bool(found) == bool(share)
    if found:
        assert found[0].predicted_gain == pytest.approx(1 / (1 - share * .98))
        assert says in found[0].evidence
        if build is decayed:
            assert 'test_graph_rules.py:' in found[0].place and 'l2_loss(rows)' in found[0].remedy
            assert found[0].change == 'tf.nn.l2_loss(rows)   # instead of the table'
    monkeypatch.setattr(page, 'LONG_TABLE', (41, 100))
    assert not [f for f in page.find_in_graph(part) if 'dense gradient' in f.disease]

def test_python_inside_a_compiled_step():
    step = tf.function(lambda x: tf.numpy_function(lambda a: a, [x], tf.float32))
    last = {('call', LINE): (step, '__call__', (tf.zeros(3),), {})}
    python = [PythonCall(i * .1, i * .1 + .05, OTHER, 'f') for i in range(100)]
    look = lambda looks, python: page.find_in_graph(
        seen(looks, calls('call', 10), python=python, last=last, loop=('call', LINE)))
    found = only(look(['graph'] * 100, python))
    assert found.disease == 'Python inside the step' and found.place.startswith('test_graph_rules.py:')
    assert '50%' in found.evidence and found.predicted_gain == pytest.approx(1 / .55)
    assert look(['input'] * 30 + ['graph'] * 70, python) == []   # the pipeline calls it

def on_gpu(found): assert only(found).only_on_gpu and found[0].predicted_gain == 1.

@pytest.mark.parametrize('line, hides', [
    ("os.environ['CUDA_VISIBLE_DEVICES'] = '-1'", True), ('os.environ["CUDA_VISIBLE_DEVICES"]=""', True),
    ("os.environ.setdefault('CUDA_VISIBLE_DEVICES', '-1')", True),
    ("tf.config.set_visible_devices([], 'GPU')", True), ("os.environ['CUDA_VISIBLE_DEVICES'] = '0'", False),
    ("# os.environ['CUDA_VISIBLE_DEVICES'] = '-1'", False),
    ("tf.config.set_visible_devices(gpus, 'GPU')", False)])
def test_a_program_that_hides_its_gpu(tmp_path, line, hides):
    (tmp_path / 'train.py').write_text(f'import os\n{line}\n')
    place = Place(str(tmp_path / 'train.py'), 1)
    found = page.find_on_host(seen([(place, 'graph')] * 50))
    assert bool(found) == hides
    if hides:
        on_gpu(found)
        assert found[0].place == 'train.py:2' and found[0].line == line

def test_what_is_put_on_the_cpu(tmp_path):
    def look(function, *events):
        last = {('call', LINE): (tf.function(function), '__call__', (tf.zeros((40, 40)),), {})}
        looks = [(Place(str(scope), 1), 'graph')] * 9
        return page.find_on_host(seen(looks, [*calls('call', 9), *events], last=last))
    def aside(x, cells=40):
        with tf.device('/CPU:0'): return tf.nn.softmax(x[:cells, :cells])
    scope = tmp_path / 'train.py'
    scope.write_text("with tf.device('/CPU:0'): ...")
    on_gpu(found := look(aside))
    assert found[0].place.startswith('test_graph_rules.py:') and 'Softmax' in found[0].evidence
    assert look(lambda x: aside(x, 31)) == [] == look(lambda x: x + 1)   # 961 numbers are few
    on_gpu(found := look(tf.random.shuffle))
    assert 'RandomShuffle' in found[0].evidence and 'no kernel' in found[0].evidence
    made = lambda device, rows: Event('variable', Place(__file__, 4), 0., rows=rows, device=device)
    on_gpu(found := look(lambda x: x, made('/device:CPU:0', 1000)))
    assert found[0].disease == 'variables on the CPU' and found[0].place == 'test_graph_rules.py:4'
    assert look(lambda x: x, made('', 1000), made('/device:CPU:0', 999)) == []
    scope.write_text('')   # Keras itself puts some things on the CPU
    page.linecache.checkcache()
    assert look(aside) == []

@pytest.mark.parametrize('fetched, every, kinds, is_found, known', [
    (90, .005, {'graph': 100}, True, False), (89, .005, {'graph': 100}, False, False),
    (100, .011, {'graph': 100}, False, False), (100, .005, {'graph': 60, 'fetch': 40}, True, True)])
def test_values_that_are_read_in_each_iteration(fetched, every, kinds, is_found, known):
    events = calls('call', 100, every) + calls('fetch', fetched, every, place=OTHER)
    part = seen([k for k, n in kinds.items() for _ in range(n)], events, loop=('call', LINE))
    part.begin, part.end = 0., 100 * every
    found = page.find_fetches(part)
    assert bool(found) == is_found
    if found:
        assert only(found).disease == 'host sync per step' and found[0].place == 'watched.py:4'
        assert found[0].only_on_gpu != known
        if known: assert found[0].predicted_gain == pytest.approx(1 / (.6 + .4 * .1))
    part.loop = ('fit', LINE)
    assert page.find_fetches(part) == []

def of_parts(x, w, many):
    return tf.stack([tf.nn.softmax(x[:, t] @ w) for t in range(many)], 1)

def in_turn(x, w, many):
    h = tf.zeros((2, 3))
    for t in range(many): h = tf.tanh(x[:, t] + h @ w)
    return h

@pytest.mark.parametrize('loop, many, layers, turns', [
    (of_parts, 16, 1, 16), (of_parts, 15, 1, 0), (of_parts, 20, 3, 20), (in_turn, 20, 1, 0)])
def test_a_loop_of_python_in_a_step(loop, many, layers, turns):
    "Found if its turns do not need each other; layers made by the same lines do."
    def step(x, w):
        for _ in range(layers): x = loop(x, w, many)
        return tf.reduce_sum(x)
    graph = tf.function(step).get_concrete_function(tf.zeros((2, 20, 3)), tf.zeros((3, 3))).graph
    some, made = page._turns(graph)
    assert len(some) == turns and {op.type for op in some} <= {'StridedSlice'}
    assert turns == made == 0 or 3 * turns * layers <= made <= 3 * turns * layers + 3   # and they are stacked

def test_operations_that_need_each_other():
    with tf.Graph().as_default():
        a, b = tf.constant(1.), tf.constant(2.)
        c = a + b
        d = c * a
    assert page._needs(d.op, a.op) and page._needs(d.op, c.op)
    assert not page._needs(a.op, d.op) and not page._needs(c.op, c.op)

@pytest.mark.parametrize('parts, seconds, looks, is_found', [
    (150, 10, 100, True), (150, 900, 100, False), (150, 10, 25, False), (50, 10, 100, False)])
def test_what_a_loop_of_python_costs(parts, seconds, looks, is_found):
    "In a step of so many ms, with its gradient; larger operations take longer than their start."
    def step(x, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = tf.reduce_sum(of_parts(x, w, parts))
        return tape.gradient(loss, w)
    given = tf.zeros((2, 150, 3)), tf.zeros((3, 3))
    function = tf.function(step)
    part = seen([], calls('call', 10), loop=('call', LINE))
    part.end = .01 * seconds
    found = page._unrolled(part, page.Call(function, given, {}, 0., False), looks / 100)
    assert bool(found) == is_found
    if not found: return
    assert found[0].disease == 'a loop over rows inside the step' and 'each of 150 parts' in found[0].evidence
    assert found[0].place.startswith('test_graph_rules.py:') and 'for t in range(many)' in found[0].line

def by_map(x): return tf.map_fn(lambda row: row / tf.norm(row), x)

def by_while(x):
    "As people write a loss: a row of a TensorArray in each turn."
    def turn(i, out): return i + 1, out.write(i, tf.norm(x - x[i]))
    _, out = tf.while_loop(lambda i, _: i < 8, turn, (tf.constant(0), tf.TensorArray(tf.float32, 8)))
    return out.stack()

def by_sum(x):
    return tf.while_loop(lambda i, _: i < 8, lambda i, t: (i + 1, t + tf.norm(x[i])), (tf.constant(0), 0.))[1]

def by_state(x):
    "A recurrence: each turn needs the state of the one before."
    return tf.while_loop(lambda i, _: i < 8, lambda i, h: (i + 1, tf.tanh(h + x[i])),
                         (tf.constant(0), tf.zeros(5)))[1]

TOTAL = tf.Variable(2., trainable=False)

def by_updates(x):
    "Steps of a training in one function."
    tf.while_loop(lambda i: i < 8, lambda i: (TOTAL.assign_add(1.), i + 1)[1:], (tf.constant(0),))
    return tf.reduce_sum(x)

def by_reading(x): return tf.map_fn(lambda row: row * TOTAL, x)

def by_calling(x):
    "A network in a function of its own, for each row."
    return tf.map_fn(tf.function(lambda row: row * TOTAL, autograph=False), x)

def gradient_of(loss):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(loss(x))
        return y, tape.gradient(y, x)
    return tf.function(step)

@pytest.mark.parametrize('build, over_rows', [
    (by_map, 2), (by_while, 1), (by_sum, 1), (by_state, 0), (by_updates, 0), (by_reading, 2),
    (by_calling, 2)])
def test_a_loop_whose_turns_do_not_need_each_other(build, over_rows):
    "Of forward and backward pass; TensorFlow names both after `map_fn`."
    graph = gradient_of(build).get_concrete_function(tf.zeros((8, 5))).graph
    loops = [op for op in graph.get_operations() if op.type in page.LOOPS]
    assert len(loops) == 2 - (build is by_updates)
    assert [op for op in loops if page._is_row_loop(op)] == loops[:over_rows]

@pytest.mark.parametrize('build, left, computing, gain', [
    (by_while, .2, .9, 1 / (1 - .9 * .76)), (by_map, .8, .6, 1 / (1 - .6 * .19)), (by_while, .91, 1., None),
    (by_while, .8, .49, None), (by_while, None, 1., None), (by_state, .1, 1., None)])
def test_what_a_loop_over_rows_costs(monkeypatch, build, left, computing, gain):
    "It goes, and that of its gradient; a twentieth of it is left."
    tried = []
    monkeypatch.setattr(page, '_left', lambda call, changed: tried.append(changed.args[1]) or left)
    call = page.Call(gradient_of(build), (tf.ones((8, 5)),), {}, 0., False)
    found = page._row_loops(seen([], calls('call', 1), loop=('call', LINE)), call, computing)
    assert [len(some) for some in tried] == [2] * (build is not by_state) and bool(found) == bool(gain)
    if not found: return
    assert found[0].predicted_gain == pytest.approx(gain)
    assert f'({tried[0][0].name}) that computes row by row' in found[0].evidence
    assert found[0].evidence.endswith(f'it takes {1 - left:.0%} of the step')

def test_a_step_without_its_loop():
    "In a real graph: the rest of the step is done, on the results of the loop, and is quicker."
    rows, total = tf.random.normal((300, 40)), tf.Variable(0.)
    def loss(x):
        total.assign_add(1.)
        return tf.reduce_sum(tf.map_fn(lambda row: row / tf.norm(row), x) + total)
    call = page.Call(gradient_of(loss), (rows,), {}, 0., False)
    some = [op for op in call.concrete.graph.get_operations() if op.type in page.LOOPS]
    assert len(some) == 2
    with variables_put_back():
        without = diagnose.done_without(call, some)
        assert total.numpy() == 0.   # the loops alone change nothing
        y, gradient = without()[1:]
        assert total.numpy() == 1.
        total.assign(0.)
        for a, b in zip((y, gradient), call.function(rows)): np.testing.assert_allclose(a, b, rtol=1e-5)
    left = lambda call: page._left(call, lambda: diagnose.done_without(call, some))
    assert total.numpy() == 0. and 0 < left(call) < .9
    assert left(replace(call, function=None)) is None   # it fails

def by_factor(x): return follow(x, lambda h, row: .9 * h + row)

def by_division(x): return follow(x, lambda h, row: (h - row) / 2. - tf.reshape(h, [5]))

def by_square(x): return follow(x, lambda h, row: h * h + row)

def by_inverse(x): return follow(x, lambda h, row: row / (h + 1.))

def by_tanh(x): return follow(x, lambda h, row: tf.tanh(row + h))

def follow(x, turn):
    "What each row makes of the one before."
    h, out = tf.zeros(5), tf.TensorArray(tf.float32, 8)
    for i in tf.range(8):
        h = turn(h, x[i])
        out = out.write(i, h)
    return tf.reduce_sum(out.stack())

def check_same(call, some):
    "The step without these operations gives what the step gives."
    results = diagnose.done_without(call, some)()[1:]
    for a, b in zip(results, tf.nest.flatten(call.function(*call.args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)

@pytest.mark.parametrize('build, linear', [(by_factor, True), (by_division, True), (by_square, False),
                                           (by_inverse, False), (by_tanh, False), (by_map, False)])
def test_a_loop_that_only_adds_and_multiplies(build, linear):
    graph = gradient_of(build).get_concrete_function(tf.zeros((8, 5))).graph
    loops = [op for op in graph.get_operations() if op.type in page.LOOPS]
    assert page._is_linear_loop(loops[0]) == linear

@pytest.mark.parametrize('build, left, computing, gain', [
    (by_factor, .2, .9, 1 / (1 - .9 * .72)), (by_factor, .8, .99, None), (by_factor, None, 1., None),
    (by_tanh, .1, 1., None), (by_map, .1, 1., None)])
def test_what_a_linear_loop_costs(monkeypatch, build, left, computing, gain):
    "It goes, and that of its gradient; a tenth of it is left."
    tried = []
    monkeypatch.setattr(page, '_left', lambda call, changed: tried.append(changed.args[1]) or left)
    call = page.Call(gradient_of(build), (tf.ones((8, 5)),), {}, 0., False)
    found = page._linear_loops(seen([], calls('call', 1), loop=('call', LINE)), call, computing)
    assert [len(some) for some in tried] == [2] * (build is by_factor) and bool(found) == bool(gain)
    if found:
        assert found[0].predicted_gain == pytest.approx(gain)
        assert f'takes {1 - left:.0%} of the step' in found[0].evidence
        assert found[0].place.startswith('test_graph_rules.py:')
        check_same(call, tried[0])

def in_loop(call): return seen(['graph'] * 100, calls('call', 10), loop=('call', LINE),
                               last={('call', LINE): (call.function, '__call__', call.args, {})})

@pytest.mark.parametrize('left, computing, gain', [
    (.2, .9, 1 / .28), (.86, 1., None), (None, 1., None)])
def test_metrics_that_take_the_step(monkeypatch, left, computing, gain):
    "The step is tried without what they write; it changes all else, and returns what it did."
    costly, total = keras.metrics.AUC(thresholds=[.1, .3, .7, .8], name='area'), tf.Variable(0.)
    costly.update_state([0., 1.], [.1, .2])   # its variables are made at the first call
    costly.reset_state()
    @tf.function
    def step(y, p):
        total.assign_add(tf.reduce_sum(p))
        costly.update_state(y, p)
        return total.read_value(), costly.result()
    call, tried = page.Call(step, (tf.constant([0., 1.]), tf.constant([.2, .5])), {}, 0., False), []
    monkeypatch.setattr(page, '_left', lambda call, changed: tried.append(changed) or left)
    found = page._metrics(in_loop(call), call, computing)
    assert len(tried) == 1 and bool(found) == bool(gain)
    if found:
        assert found[0].predicted_gain == pytest.approx(gain) and '(area) take 80%' in found[0].evidence
        assert [float(x) for x in tried[0]()()[1:]] == [pytest.approx(.7), 0.] and total.numpy() == \
            pytest.approx(.7)
        assert not any(np.any(v.numpy()) for v in costly.variables)
        plain = page.Call(tf.function(lambda x: total.assign_add(x)), (tf.constant(1.),), {}, 0., False)
        assert page._metrics(in_loop(plain), plain, 1.) == []

@pytest.mark.parametrize('columns, left, computing, gain', [
    (512, .2, .9, 1 / (1 - .72)), (511, .2, .9, None), (512, .81, 1., None), (512, None, 1., None)])
def test_a_product_that_only_picks_rows(monkeypatch, columns, left, computing, gain):
    table, tried = tf.Variable(tf.random.normal((columns, 4))), []
    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(tf.tensordot(tf.one_hot(ids, columns), table, 1) ** 2)
        return tape.gradient(y, table)
    call = page.Call(step, (tf.constant([[1, 2], [3, 3]]),), {}, 0., False)
    monkeypatch.setattr(page, '_left', lambda call, changed: tried.append(changed.args[1]) or left)
    found = page._one_hot(in_loop(call), call, computing)
    assert [len(some) for some in tried] == [2] * (columns == 512) and bool(found) == bool(gain)
    if found:
        assert found[0].predicted_gain == pytest.approx(gain) and '512 columns' in found[0].evidence
        assert 'take 80% of the step' in found[0].evidence and 'tensordot' in found[0].line
        check_same(call, tried[0])

@pytest.mark.parametrize('classes, left, computing, gain', [
    (10_000, .2, .9, 1 / .28), (9_999, .2, .9, None), (10_000, .41, 1., None), (10_000, None, 1., None)])
def test_a_softmax_over_all_classes(monkeypatch, classes, left, computing, gain):
    "Tried without all that has so many numbers: logits, their loss, both products of the gradient."
    table, tried = tf.Variable(tf.zeros((4, classes))), []
    @tf.function
    def step(x, ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(ids, x @ table))
        return tape.gradient(loss, table)
    call = page.Call(step, (tf.ones((2, 4)), tf.constant([1, 2])), {}, 0., False)
    monkeypatch.setattr(page, '_left', lambda call, changed: tried.append(changed.args[1]) or left)
    found = page._full_softmax(in_loop(call), call, computing)
    assert bool(found) == bool(gain) and len(tried) == (classes == 10_000)
    if found:
        types = [op.type for op in tried[0]]
        assert types.count('MatMul') == 2 and 'SparseSoftmaxCrossEntropyWithLogits' in types
        assert 'ReadVariableOp' not in types and found[0].predicted_gain == pytest.approx(gain)
        assert '10,000 classes' in found[0].evidence and 'takes 80% of it' in found[0].evidence
        assert 'sparse_softmax' in found[0].line
        check_same(call, tried[0])

@pytest.mark.parametrize('x, used', [
    ([[1, 2, 0, 0], [3, 0, 0, 0]], (0, 2)), ([[0, 0, 1, 2], [0, 0, 0, 5]], (2, 4)),
    ([[1, 2], [3, 4]], (0, 2)), ([[7, 7], [7, 7]], (0, 0)), ([[7, 1, 0, 0], [7, 2, 0, 0]], (0, 2)),
    ([[1., 0.], [2., 0.]], None),
    ([[[1.], [0.]], [[2.], [0.]]], (0, 1)),
    ([[[0.], [3.]], [[0.], [0.]]], (1, 2)), ([1, 0], None), ([[[1], [0]]], None)])
def test_columns_in_which_something_is(x, used): assert page._used(tf.constant(x)) == used

@pytest.mark.parametrize('short, computing, gain', [
    (3, .9, 1 / (1 - .9 * (.7 - .2375))), (7, 1., None), (3, .2, None)])
def test_few_long_texts_that_pad_all_others(short, computing, gain):
    "Seven of three words and one of sixteen: a quarter is used."
    ids = np.zeros((8, 20), 'int32')
    ids[:, :short], ids[0, :17] = 5, 6
    call = page.Call(tf.function(lambda x: x + 1), (tf.constant(ids),), {}, 0., False)
    found = page._padding(in_loop(call), call, computing)
    assert bool(found) == bool(gain)
    if found:
        assert found[0].predicted_gain == pytest.approx(gain)
        assert 'padded to 20, and hold 5' in found[0].evidence

@pytest.mark.parametrize('texts, left, computing, gain', [
    (12, .3, .9, 1 / (1 - .63)), (13, .3, .9, None), (12, None, 1., 20 / 12), (12, .81, 1., None)])
def test_texts_that_are_mostly_padding(monkeypatch, texts, left, computing, gain):
    "All that is as long is cut in the trial; where it fails, the length is believed."
    ids = np.zeros((3, 20), 'int32')
    ids[:, :texts] = np.arange(texts) + 1
    step, tried = tf.function(lambda ids, mask, y: tf.reduce_sum(tf.cast(ids * mask, tf.float32)) + y), []
    given = tf.constant(ids), tf.ones((3, 20), tf.int32), tf.constant(2.)
    call = page.Call(step, given, {}, 0., False)
    monkeypatch.setattr(page, '_left', lambda call, changed: tried.append(changed()) or left)
    found = page._padding(in_loop(call), call, computing)
    assert bool(found) == bool(gain)
    if found:
        assert found[0].predicted_gain == pytest.approx(gain, rel=.01)
        assert [x.shape.as_list() for x in tried[0].args] == [[3, 12], [3, 12], []] and tried[0]() == 236.
        assert 'padded to 20' in found[0].evidence and 'more than 12' in found[0].evidence
        short = page.Call(step, (tf.constant(ids[:, :15]) * 0, given[1], given[2]), {}, 0., False)
        assert page._padding(in_loop(short), short, 1.) == []

@pytest.mark.parametrize('left, computing, gain', [
    (.2, .9, 1 / .28), (.81, 1., None), (None, 1., None)])
def test_a_part_that_is_the_same_in_each_call(monkeypatch, left, computing, gain):
    "Known from the arguments and variables that are the same; nothing that is drawn at random is."
    w, tried = tf.Variable(tf.ones((3, 3))), []
    @tf.function
    def decode(source, tokens):
        memory = tf.tanh(source @ w) @ w
        return tf.reduce_sum(memory + tokens) + tf.reduce_sum(tf.random.normal([3]))
    source = tf.ones((2, 3))
    def loop(function, other):
        with Watch() as watch:
            for i in range(20): function(source if other is None else other(), tf.fill((2, 3), float(i)))
        return steady_part(watch)
    monkeypatch.setattr(page, '_left', lambda call, changed: tried.append(changed.args[1]) or left)
    part = loop(decode, None)
    found = page._same_part(part, page.compiled_call(part), computing)
    assert bool(found) == bool(gain) and [op.type for op in only(tried)] == ['MatMul']
    if not found: return
    assert found[0].predicted_gain == pytest.approx(gain)
    assert found[0].place.startswith('test_graph_rules.py:')
    assert 'decode gets the same source' in found[0].evidence and 'takes 80% of' in found[0].evidence
    changing = loop(decode, lambda: source + 1)
    assert page._same_part(changing, page.compiled_call(changing), 1.) == []
    training = loop(tf.function(lambda x, y: w.assign_add(tf.zeros((3, 3))) + tf.reduce_sum(x @ w + y)), None)
    assert page._same_part(training, page.compiled_call(training), 1.) == []

def by_difference(a, b): return tf.reduce_sum(tf.square(a[:, None] - b[None]), -1)
def by_squared_difference(a, b): return tf.reduce_mean(tf.math.squared_difference(a[:, None], b), -1)
def by_norm(a, b): return tf.norm(a[:, None] - b, axis=-1)
def by_rows(a, b): return tf.reduce_sum(tf.square(a - b[:1]), -1)      # one row is taken from each
def by_distance(a, b): return tf.reduce_sum(tf.abs(a[:, None] - b), -1)   # no product gives these
def by_largest(a, b): return tf.reduce_max(tf.square(a[:, None] - b), -1)

@pytest.mark.parametrize('build, left, computing, gain', [
    (by_difference, .2, 1., 1 / (.2 + .07 * .8)), (by_squared_difference, .2, .5, 1 / (.5 + .5 * .256)),
    (by_norm, .2, 1., 1 / .256), (by_difference, .81, 1., None), (by_rows, .2, 1., None),
    (by_distance, .2, 1., None), (by_largest, .2, 1., None)])
def test_differences_of_all_pairs(monkeypatch, build, left, computing, gain):
    step, tried = gradient_of_two(build), []
    call = page.Call(step, (tf.reshape(tf.range(8.), (4, 2)), tf.ones((3, 2))), {}, 0., False)
    monkeypatch.setattr(page, '_left', lambda call, changed: tried.append(changed) or left)
    found = page._pairs(in_loop(call), call, computing)
    assert bool(found) == bool(gain) and len(tried) == (build not in (by_rows, by_distance, by_largest))
    if tried: np.testing.assert_allclose(tried[0]()()[-1], step(*call.args), rtol=1e-6)
    if tried: assert all(op.type in ('Sum', 'Mean') for op in tried[0].args[1]) and len(tried[0].args[1]) > 1
    if not found: return
    assert found[0].predicted_gain == pytest.approx(gain, rel=.01)
    assert '4 x 3 x 2 numbers' in found[0].evidence and found[0].place.startswith('test_graph_rules.py:')

def gradient_of_two(loss):
    @tf.function
    def step(a, b):
        with tf.GradientTape() as tape:
            tape.watch((a, b))
            value = tf.reduce_sum(loss(a, b) ** 2)
        of_a, of_b = tape.gradient(value, (a, b))
        return of_a + tf.reduce_sum(of_b)
    return step

@pytest.mark.parametrize('there, turns, left, gain', [
    ('/CPU:1', 4, .5, 2.), ('/CPU:1', 3, .5, None), ('/CPU:1', 4, .81, None), ('/CPU:0', 4, .5, None),
    ('', 4, .5, None)])
def test_tensors_that_go_from_device_to_device(monkeypatch, there, turns, left, gain):
    "Two of them in each turn; no second CPU is here, so only the changed graph can run."
    @tf.function
    def step(x):
        for _ in range(turns):
            with tf.device('/CPU:0'): x = tf.tanh(x)
            with tf.device(there): x = x + 1.
        with tf.device('/CPU:0'): return tf.reduce_sum(x)
    call, tried = page.Call(step, (tf.zeros((3,)),), {}, 0., False), []
    monkeypatch.setattr(page, '_left', lambda call, changed: tried.append(changed()()) or left)
    found = page._several_devices(in_loop(call), call, 1.)
    assert bool(found) == bool(gain) and len(tried) == (there == '/CPU:1' and turns == 4)
    if not found: return
    x = 0.
    for _ in range(4): x = np.tanh(x) + 1
    assert float(tried[0][-1]) == pytest.approx(3 * x)
    assert found[0].predicted_gain == pytest.approx(gain, rel=.01) and '8 operations' in found[0].evidence
    assert 'CPU:0, device:CPU:1' in found[0].evidence and found[0].place.startswith('test_graph_rules.py:')

def fitted(loss, w, frozen, rows=6):
    "A step that learns `w`, as the loop of `fit` calls it."
    @tf.function
    def step(batch):
        with tf.GradientTape() as tape: value = loss(batch, w, frozen)
        w.assign_sub(tape.gradient(value, w))
        return value
    return page.Call(step, (tf.ones((rows, 4)),), {}, 0., False)

def with_frozen(x, w, frozen): return tf.reduce_sum(tf.tanh(tf.exp(x) @ frozen) @ w)
def at_random(x, w, frozen): return tf.reduce_sum(tf.exp(tf.tanh(x + tf.random.normal((6, 4))) @ frozen) @ w)
def all_learned(x, w, frozen): return tf.reduce_sum(tf.tanh(x @ w))

@pytest.mark.parametrize('loss, left, computing, epochs, gain', [
    (with_frozen, .2, 1., 9, 5.), (with_frozen, .2, .5, 2, 1 / .6), (with_frozen, .76, 1., 9, None),
    (with_frozen, .2, 1., 1, None), (all_learned, .2, 1., 9, None), (at_random, .2, 1., 9, None)])
def test_a_part_that_is_the_same_in_every_epoch(monkeypatch, loss, left, computing, epochs, gain):
    w, frozen = tf.Variable(tf.ones((4 if loss is all_learned else 3, 1))), tf.Variable(tf.fill((4, 3), .1))
    call, tried = fitted(loss, w, frozen), []
    def time_left(call, changed):   # only the frozen layer takes time
        tried.append([op.type for op in changed.args[1]])
        assert np.isfinite(changed()()[-1])
        return left if 'Tanh' in tried[-1] else 1.
    monkeypatch.setattr(page, '_left', time_left)
    rows = tf.data.Dataset.range(9).batch(3)
    fit = SimpleNamespace(planned=epochs)
    part = seen(['graph'] * 9, calls('fit', 9), loop=('fit', LINE), fits=[fit], datasets={LINE: [rows]})
    found = page._in_every_epoch(part, call, computing)
    assert bool(found) == bool(gain) and (not tried or 'MatMul' not in tried[0])
    assert any('Tanh' in types for types in tried) == (loss is with_frozen and epochs > 1)
    if not found: return
    assert found[0].predicted_gain == pytest.approx(gain, rel=.01)
    assert 'of the step depends' in found[0].evidence
    average = tf.function(lambda: frozen.assign(frozen * .9))
    part.watch.concrete_functions = lambda: [average.get_concrete_function()]
    assert page._in_every_epoch(part, call, computing) == []   # what is read is written elsewhere
    part.watch.concrete_functions = list
    part.looks = [Look(0., LINE, 'eager', 'BaseResourceVariable.assign')]
    assert page._in_every_epoch(part, call, computing) == []
    part.looks, part.loop = [], ('next', LINE)
    part.watch.datasets[LINE] *= 2
    assert page._in_every_epoch(part, call, computing)
    assert page._parts_of_a_batch(part) == 1 < page._parts_of_a_batch(replace(part, loop=('fit', LINE)))
    monkeypatch.setattr(page, '_parts_of_a_batch', lambda part: 0)
    assert page._in_every_epoch(part, call, computing) == []   # the step gets something else
    evaluated = tf.function(lambda x: tf.reduce_sum(tf.tanh(x)))
    plain = page.Call(evaluated, (tf.ones((6, 4)),), {}, 0., False)
    assert page._in_every_epoch(part, plain, 1.) == []   # nothing is learned

@pytest.mark.parametrize('build, loop, passes, fits, epochs', [
    (lambda d: d, 'next', 1, [], 1), (lambda d: d, 'next', 3, [], 3),
    (lambda d: d.repeat(), 'next', 1, [], 2),
    (lambda d: d, 'fit', 7, [4], 4), (lambda d: d, 'fit', 7, [1, 1, 1], 3),
    (lambda d: d.shuffle(9), 'fit', 1, [4], 4),
    (lambda d: d.map(lambda x: tf.random.shuffle(x[None])), 'fit', 1, [4], 4),
    (lambda d: d.map(lambda x: x + tf.random.uniform((), 0, 9, tf.int64)), 'fit', 1, [4], 1),
    (lambda d: d.map(lambda x: tf.py_function(lambda x: x, [x], tf.int64)), 'fit', 1, [4], 1)])
def test_how_often_the_same_rows_are_given(build, loop, passes, fits, epochs):
    data = build(tf.data.Dataset.range(9))
    part = seen([], loop=(loop, LINE), datasets={LINE: [data] * passes},
                fits=[SimpleNamespace(planned=n) for n in fits])
    assert page._epochs(part) == epochs
    assert page._epochs(seen([], loop=(loop, LINE))) == 1   # nobody knows

@pytest.mark.parametrize('weights, left, computing, gain', [
    ([1, 0, 0, 0], .3, 1., 1 / .3), ([1, 0, 0, 0], None, 1., 4.), ([1, 1, 1, 0], .3, 1., None),
    ([0, 0, 0, 0], .3, 1., None), ([1, 0, 0, 0], .81, 1., None),
    ([[0, 0], [0, 1], [0, 0], [0, 0]], .3, 1., 1 / .3)])
def test_rows_without_weight(monkeypatch, weights, left, computing, gain):
    seen_rows = []
    step = tf.function(lambda batch: tf.reduce_sum(batch[0]) + tf.reduce_sum(batch[2]))
    batch = tf.reshape(tf.range(8.), (4, 2)), tf.ones(4), tf.constant(weights, tf.float32)
    call = page.Call(step, (batch,), {}, 0., False)
    monkeypatch.setattr(page, '_left', lambda call, changed: seen_rows.append(changed()) or left)
    part = seen(['graph'] * 9, calls('fit', 9), loop=('fit', LINE))
    found = page._weightless(part, call, computing)
    assert bool(found) == bool(gain)
    if not found: return
    assert found[0].predicted_gain == pytest.approx(gain, rel=.01) and '75% of the rows' in found[0].evidence
    row = weights.index(1) if 1 in weights else 1
    assert float(seen_rows[0]()) == float(tf.reduce_sum(batch[0][row])) + 1
    assert page._weightless(in_loop(call), call, 1.) == []
    pair = page.Call(step, (batch[:2],), {}, 0., False)
    assert page._weightless(part, pair, 1.) == []

@pytest.mark.parametrize('losses, left, gain', [(4, .4, 1 / .43), (3, .4, None), (4, .76, None)])
def test_several_ways_back(monkeypatch, losses, left, gain):
    w, v, tried = tf.Variable(tf.ones((4, 4))), tf.Variable(tf.ones((4, 4))), []
    @tf.function
    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            h = tf.tanh(x @ w) @ v
            each = [tf.reduce_sum(h ** (i + 2)) for i in range(losses)]
        return sum(sum(tape.gradient(one, [w, v])) for one in each)
    call = page.Call(step, (tf.ones((2, 4)) / 9,), {}, 0., False)
    monkeypatch.setattr(page, '_left', lambda call, changed: tried.append(changed) or left)
    found = page._backward_again(in_loop(call), call, 1.)
    assert bool(found) == bool(gain)
    if tried: np.testing.assert_allclose(tried[0]()()[-1], step(*call.args), rtol=1e-5)
    if not found: return
    assert found[0].predicted_gain == pytest.approx(gain, rel=.01)
    assert 'times through the same layers' in found[0].evidence
    once = fitted(with_frozen, tf.Variable(tf.ones((3, 1))), tf.Variable(tf.ones((4, 3))))
    assert page._backward_again(in_loop(once), once, 1.) == []
    def in_time(x, w, frozen):   # one way back, though each time step has its own part of it
        for _ in range(6): x = tf.tanh(x @ w)
        return tf.reduce_sum(x)
    unrolled = fitted(in_time, tf.Variable(tf.ones((4, 4))), None)
    assert page._backward_again(in_loop(unrolled), unrolled, 1.) == []

@pytest.mark.parametrize('frozen', [True, False])
def test_a_frozen_layer_of_fit_is_read_only_through_all_its_functions(monkeypatch, frozen):
    "`fit` gives every variable to the function of one step, by another function."
    first = keras.layers.Dense(8, activation='tanh', trainable=not frozen)
    model = keras.Sequential([keras.Input((4,)), first, keras.layers.Dense(1)])
    model.compile('sgd', 'mse')
    rows, tried = tf.data.Dataset.from_tensors((tf.ones(4), tf.ones(1))).repeat(60).batch(2), []
    with Watch() as watch, every_fit_watched(watch): model.fit(rows, epochs=3, verbose=0)
    part = steady_part(watch)
    call = page.compiled_call(part)
    monkeypatch.setattr(page, '_left', lambda call, changed: tried.append(changed.args[1]) or .2)
    page._in_every_epoch(part, call, 1.)
    assert any(op.type == 'Tanh' for ops in tried for op in ops) == frozen
