"What is said of a program for a GPU, compared with XLA itself; and nothing where nothing is wrong."
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.devices import _products_in_tf32
from xtts_nb.monitor.preflight import _KINDS, preflight

X = tf.ones((4, 6))

@pytest.fixture(autouse=True)
def full_precision():
    with _products_in_tf32(False): yield

def found(function, *args, jit=False) -> list[tuple]:   # (kind, operation)
    "What is said of a function of tensors."
    return [(o.kind, o.op) for o in preflight(tf.function(function, jit_compile=jit), *(args or [X]))]

def numpy_sine(x): return tf.numpy_function(np.sin, [x], tf.float32)
def python_sine(x): return tf.py_function(tf.sin, [x], tf.float32)
def words(x): return tf.strings.length(tf.strings.as_string(x))
def shuffled(x): return tf.random.shuffle(x)
def printed(x):
    tf.print(x)
    return x
def parts(x): return tf.math.segment_sum(x, tf.constant([0, 0, 1, 1]))
def chosen(x): return tf.boolean_mask(x, x > 0)
def distinct(x): return tf.unique(tf.reshape(x, [-1])).y
def divided(x): return tf.dynamic_partition(x, tf.cast(x > 0, tf.int32), 2)
def shaped(x): return tf.reshape(x, tf.stack([tf.cast(tf.reduce_max(x), tf.int32), -1]))
def checked(x):
    tf.debugging.assert_greater(x, 0.)
    return tf.linalg.norm(tf.debugging.check_numerics(x, 'x'))
def transformed(x): return tf.signal.rfft(x), tf.signal.stft(x[0], 4, 2)

@pytest.mark.parametrize('function', [
    numpy_sine, python_sine, words, printed, parts, chosen, distinct, divided, shaped, checked, transformed],
    ids=lambda f: f.__name__)
def test_xla_refuses_what_is_said_to_be_refused_and_nothing_else(function):
    "The first operation that is said to be refused is the one that XLA names. Sizes by value compile."
    compiled = tf.function(function, jit_compile=True)
    said = [op for kind, op in found(function, jit=True) if kind == 'refused by XLA']
    try: compiled(X)
    except tf.errors.InvalidArgumentError as e:
        assert said and f"No registered '{said[0]}' OpKernel for XLA_CPU_JIT" in str(e)
    else: assert said == []

GRAPH = {numpy_sine: ('Python', 'PyFunc'), python_sine: ('Python', 'EagerPyFunc'),
         words: ('host operation', 'AsString'), shuffled: ('host operation', 'RandomShuffle'),
         parts: None, checked: None, transformed: None,
         chosen: ('wait', 'Where'), distinct: ('wait', 'Unique'), divided: ('wait', 'DynamicPartition'),
         shaped: ('wait', 'Pack of int32')}

@pytest.mark.parametrize('function', GRAPH, ids=lambda f: f.__name__)
def test_what_a_graph_costs_on_a_gpu(function):
    "A string's length is computed beside the string: it is not said again. Assertions wait for nobody."
    assert found(function) == [GRAPH[function]] * (GRAPH[function] is not None)

def variable(dtype, name='counter'): return tf.Variable(0, dtype=dtype, name=name)

def test_an_int32_variable_is_no_part_of_a_compiled_program():
    "In a graph it may count on the host. In an inner function too, and by its own name."
    for dtype, said in (('int32', [('int32 variable', 'counter')]), ('int64', []), ('float32', [])):
        v = variable(dtype)
        count = lambda x: x + tf.cast(v.assign_add(1), tf.float32) * tf.cast(v, tf.float32)   # noqa: B023
        inner = tf.function(count, jit_compile=True)
        assert found(count, jit=True) == said == found(lambda x: 2 * inner(x)) and found(count) == []   # noqa: B023
        given = tf.function(lambda x, v: v.assign_add(1), jit_compile=True)
        assert [o.kind for o in preflight(given, X, v)] == [kind for kind, _ in said]

def test_conditions_and_loops_that_the_host_decides():
    v, w = variable('int32'), tf.ones((6, 6), tf.bfloat16)
    twice = lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2, lambda: x)
    cheap = lambda x: tf.cond(v > 3, lambda: x * 2, lambda: x)
    case = lambda x: tf.switch_case(tf.argmax(x[0], output_type=tf.int32), [lambda: x, lambda: x + 1])
    until = lambda x: tf.while_loop(lambda i, x: tf.reduce_sum(x) < 9., lambda i, x: (i + 1, x + 1), (0, x))
    three = lambda x: tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + 1), (0, x))
    assert found(twice) == [('wait', 'StatelessIf')] and found(cheap) == found(three) == []
    assert found(until) == [('wait', 'StatelessWhile')] and found(case) == [('wait', 'StatelessCase')]
    assert not any(found(f, jit=True) for f in (twice, case, until, three))
    inside = lambda x: tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, shuffled(twice(x))), (0, x))
    assert found(inside) == [('host operation', 'RandomShuffle'), ('wait', 'StatelessIf')]
    assert found(lambda x: tf.cond(v > 3, lambda: words(x), lambda: 0 * words(x))) == [
        ('host operation', 'AsString')] and w.dtype == tf.bfloat16

def test_int32_is_computed_on_the_host():
    "Free where the host has the numbers, a wait where the GPU made them."
    ids = tf.ones((4, 6), tf.int32)
    assert found(lambda x: tf.maximum(x + 1, 2), ids) == []
    assert found(lambda x: tf.cast(x, tf.int32) + 1) == [('wait', 'AddV2 of int32')]
    assert found(lambda x: tf.cast(x, tf.int64) + 1) == found(lambda x: tf.cast(x, tf.int32)) == []

def test_what_was_put_on_the_cpu_was_meant_so():
    def step(x):
        with tf.device('CPU'):
            tf.summary.text('words', tf.strings.as_string(x[0]), step=1)
            tf.print(tf.strings.as_string(x))
            with tf.summary.record_if(True): tf.summary.scalar('loss', tf.reduce_sum(x), step=1)
            length = tf.function(words)(x)
        return x, length
    assert found(step) == [] and found(step, jit=True)   # XLA compiles all of a function, wherever it was put

def test_what_is_not_run_or_known_before_is_not_named():
    def step(x):
        tf.strings.as_string(x)
        constant = tf.strings.length(tf.strings.as_string(tf.constant([1., 2.])))
        return x[:, :tf.shape(x)[1] // 2], tf.reshape(x, [tf.size(x)]), tf.cast(constant, tf.float32)
    assert found(step) == found(step, jit=True) == []
    assert found(step, tf.TensorSpec((None, None))) == []

def fit(model, x, y) -> list[tuple]:
    "What is said of the function that `fit` calls for each batch, before it is called."
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    model.optimizer.build(model.trainable_variables)
    model._symbolic_build(data_batch=(x, y))
    step = model.make_train_function() or model.train_function
    cells = [c.cell_contents for c in step.__closure__ or ()]
    inner = [function for function in cells if hasattr(function, 'get_concrete_function')]
    return {(o.kind, o.op) for o in preflight((inner or [step])[0], iter(data))}

@pytest.fixture
def half():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy('mixed_bfloat16')
    yield keras.layers
    keras.config.set_dtype_policy(before)

@pytest.mark.parametrize('jit, metrics, said', [
    (False, None, set()), (True, ['accuracy'], set()), (False, ['accuracy'], {('wait', 'Less of int32')})])
def test_a_small_network_for_images_of_keras(half, jit, metrics, said):
    "For the accuracy, Keras looks for the signs of zeros in the bits of the outputs, as int32."
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = keras.Sequential([half.Input((8, 8, 3)), half.Conv2D(4, 3), half.BatchNormalization(),
                              half.MaxPool2D(), half.Flatten(), half.Dense(5)])
    model.compile('adam', entropy, metrics=metrics, jit_compile=jit)
    assert fit(model, tf.ones((2, 8, 8, 3)), tf.zeros(2, tf.int32)) == said

def test_place_count_and_bytes():
    def step(x):
        for _ in range(3): x = x + tf.cast(words(x), tf.float32)
        return numpy_sine(x)
    python, strings = preflight(step, X)
    line = inspect.getsourcelines(words)[1]
    assert strings.place.endswith(f'test_preflight.py:{line}') and strings.count == 3
    assert strings.bytes == 3 * 4 * 6 * 4 and strings.node == 'AsString' and python.bytes == 4 * 6 * 4
    assert f'3 x AsString at {strings.place}, 288 bytes' in strings.line
    assert strings.to_dict()['means'] == _KINDS['host operation']

def test_a_kernel_fits_by_its_types():
    scattered = lambda x, dtype: tf.scatter_nd([[0]], [tf.cast(x[0, 0] > 0, dtype)], [3])
    assert found(lambda x: scattered(x, tf.bool)) == [('host operation', 'ScatterNd')]
    assert found(lambda x: scattered(x, tf.float32)) == found(lambda x: scattered(x, tf.bool), jit=True) == []
