"""Measurements and what the rules find in them, as a table: `golden.json`, each threshold from both sides.

`python tests/monitor/test_golden.py` writes into the table what is found now: read the change as a diff."""
import gc
import json
import re
import sys
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

sys.path.append(str(Path(__file__).parents[1]))
from watched import calls, LINE, OTHER, seen

from xtts_nb.bench import _Arm, Comparison
from xtts_nb.config import setup_tf
from xtts_nb.monitor import diagnose, graph_rules, input_rules, program, seen as trials
from xtts_nb.monitor.loop import Call, Stage, stages
from xtts_nb.monitor.watch import _Look, _PythonCall

setup_tf(threads=2)
TABLE = Path(__file__).with_name('golden.json')
MODULES = diagnose, graph_rules, input_rules, program, trials
gc.freeze()   # each trial looks for variables among all objects; none is among what imports made

# --- what the table names: pipelines and functions ---------------------------------------------------------

def threads(n, data):
    options = tf.data.Options()
    options.threading.private_threadpool_size = n
    return data.with_options(options)

def numbers(n=9): return tf.data.Dataset.range(n)
def read(i): return tf.io.read_file(tf.strings.as_string(i))
def raw(i): return tf.io.decode_raw(tf.strings.as_string(i), tf.uint8)
def python(i): return tf.numpy_function(lambda i: i, [i], tf.int64)
def same(i): return i
def in_reader(i): return tf.data.Dataset.range(4).map(lambda j: i + j).cache()
PAIRS, BASE = tf.data.Dataset.from_tensor_slices((np.ones((8, 3)), np.ones(8))), numbers()

PIPELINES = {
    'range': numbers, 'map': lambda: numbers().map(same), 'list': lambda: [1],
    'prefetch': lambda: numbers().map(same).prefetch(1),
    'prefetch, map': lambda: numbers().prefetch(1).map(same),
    'prefetch, options, repeat': lambda: numbers().prefetch(1).with_options(tf.data.Options()).repeat(),
    'prefetch, take': lambda: numbers().prefetch(2).take(3),
    'repeat, prefetch, skip': lambda: numbers().repeat().prefetch(2).skip(1),
    'map of 24': lambda: numbers(4).map(same, num_parallel_calls=24),
    'pairs': lambda: PAIRS, 'pairs, batch': lambda: PAIRS.batch(2), 'rows': lambda: PAIRS.map(lambda x, y: x),
    'labels': lambda: PAIRS.map(lambda x, y: y), 'pairs, map': lambda: PAIRS.shuffle(9).map(lambda *p: p),
    'names': lambda: numbers().map(tf.strings.as_string), 'files': lambda: numbers().map(read),
    'python': lambda: numbers().map(python), 'cache of python': lambda: numbers().map(python).cache(),
    'new map': lambda: numbers(3).map(same), 'cache': lambda: BASE.cache().batch(2),
    'new cache': lambda: numbers().cache(), 'take, cache': lambda: numbers(10).take(4).cache(),
    '4 calls, 1 thread': lambda: threads(1, numbers().map(same, num_parallel_calls=4)),
    '4 calls, 3 threads': lambda: threads(3, numbers().map(same, num_parallel_calls=4)),
    '4 calls, 4 threads': lambda: threads(4, numbers().map(same, num_parallel_calls=4)),
    '1 call, 1 thread': lambda: threads(1, numbers().map(same)),
    'batch': lambda: numbers(99).batch(3), 'one batch': lambda: numbers(99).batch(99),
    'shuffle': lambda: numbers().shuffle(9), 'repeat': lambda: numbers().repeat(),
    'random order inside': lambda: numbers().map(lambda x: tf.random.shuffle(x[None])),
    'random numbers': lambda: numbers().map(lambda x: x + tf.random.uniform((), 0, 9, tf.int64)),
    'map, repeat, cache': lambda: numbers().map(same).repeat().cache(),
    'cache, take, repeat': lambda: numbers().cache().take(3).repeat(),
    'cache, take': lambda: numbers().cache().take(3),
    'cache, repeat 9': lambda: numbers().cache().repeat(9).batch(2),
    'repeat 2, take, cache': lambda: numbers().repeat(2).take(5).cache(),
    'read, shuffle': lambda: numbers().map(read).shuffle(9),
    'raw, shuffle': lambda: numbers().map(raw).shuffle(9),
    'take, cache, repeat': lambda: numbers().take(3).cache().repeat(),
    'cache, shuffle, repeat': lambda: numbers().cache().shuffle(5).repeat().take(9),
    'cache inside': lambda: numbers(3).interleave(in_reader).shuffle(9).batch(2),
    'cache inside, cache': lambda: numbers(3).interleave(in_reader).cache(),
    'cache inside, repeat': lambda: numbers(3).interleave(in_reader).repeat(),
    'cumsum': lambda: numbers(64).map(lambda x: tf.cumsum(tf.fill([2000], x))).batch(2),
    'array': lambda: tf.data.Dataset.from_tensor_slices(np.ones((64, 3))).shuffle(9).batch(16),
    'range, batch': lambda: numbers(64).batch(16),
    'windows': lambda: numbers(64).window(4, 1, drop_remainder=True).flat_map(lambda w: w.batch(4)).batch(
        16).map(lambda x: x + 1),
    'flat map': lambda: numbers(64).flat_map(tf.data.Dataset.range).batch(16),
    'float64': lambda: numbers(4).map(lambda x: tf.cast(tf.fill([1000], x), tf.float64) * 2),
    'short float64': lambda: numbers(4).map(lambda x: tf.cast(tf.fill([999], x), tf.float64) * 2),
    'float32': lambda: numbers(4).map(lambda x: tf.cast(tf.fill([1000], x), tf.float32) * 2)}

STAGES = {
    'map': ('Map', None), 'map of 1': ('ParallelMap', 1), 'map of 4': ('ParallelMap', 4), 'auto': ('Map', -1),
    'batch': ('Batch', None), 'range': ('Range', None), 'records': ('TFRecord', None),
    'read': ('Map', None, 'ReadFile'), 'python': ('Map', None, 'EagerPyFunc'),
    'read in python': ('Map', None, 'ReadFile', 'PyFunc')}

def follow(x, turn):
    "What each row makes of the one before."
    h, out = tf.zeros(5), tf.TensorArray(tf.float32, 8)
    for i in tf.range(8):
        h = turn(h, x[i])
        out = out.write(i, h)
    return out.stack()

def of_rows(x):
    "As people write a loss: a row of a TensorArray in each turn."
    def turn(i, out): return i + 1, out.write(i, tf.norm(x - x[i]))
    return tf.while_loop(lambda i, _: i < 8, turn, (tf.constant(0), tf.TensorArray(tf.float32, 8)))[1].stack()

def summed(x):
    return tf.while_loop(lambda i, _: i < 8, lambda i, t: (i + 1, t + tf.norm(x[i])), (tf.constant(0), 0.))[1]

def of_updates(x):
    "Steps of a training in one function."
    tf.while_loop(lambda i: i < 8, lambda i: (TOTAL.assign_add(1.), i + 1)[1:], (tf.constant(0),))
    return tf.reduce_sum(x)

def of_parts(x, many): return tf.stack([tf.nn.softmax(x[:, t] @ KERNEL) for t in range(many)], 1)

def in_turn(x):
    h = tf.zeros((2, 3))
    for t in range(150): h = tf.tanh(x[:, t] + h @ KERNEL)
    return h

TOTAL, KERNEL = tf.Variable(2., trainable=False), tf.Variable(tf.zeros((3, 3)))
AUC = keras.metrics.AUC(thresholds=[.1, .3, .7, .8], name='area')
AUC.update_state([0., 1.], [.1, .2])   # its variables are made at the first call

def measured_by_auc(y, p):
    TOTAL.assign_add(tf.reduce_sum(p))
    AUC.update_state(y, p)
    return TOTAL.read_value(), AUC.result()

def one_hot(ids, columns):
    return tf.reduce_sum(tf.tensordot(tf.one_hot(ids, columns), learned(columns, 4), 1) ** 2)

def softmax(x, ids, classes):
    return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(ids, x @ learned(4, classes)))

def frozen(x): return tf.reduce_sum(tf.tanh(tf.exp(x) @ KERNEL_4) @ learned(3, 1))
def at_random(x): return frozen(x + tf.random.normal((6, 4)))
def all_learned(x): return tf.reduce_sum(tf.tanh(x @ learned(4, 1)))
KERNEL_4, FIRST, SECOND = (tf.Variable(tf.fill((4, n), .1)) for n in (3, 4, 4))

@cache
def learned(*shape): return tf.Variable(tf.fill(shape, .1))

def updated(loss, *shape):
    "A step that learns one table."
    table = learned(*shape)
    def step(*given):
        with tf.GradientTape() as tape: value = loss(*given)
        table.assign_sub(.1 * tf.convert_to_tensor(tape.gradient(value, table)))
        return value
    return step

def gradient_of(loss):
    def step(*given):
        with tf.GradientTape() as tape:
            tape.watch(given)
            value = tf.reduce_sum(loss(*given))
        return value, tape.gradient(value, given)
    return step

def several_losses(x, many):
    with tf.GradientTape(persistent=True) as tape:
        h = tf.tanh(x @ FIRST) @ SECOND
        each = [tf.reduce_sum(h ** (i + 2)) for i in range(many)]
    return sum(sum(tape.gradient(one, [FIRST, SECOND])) for one in each)

def padded(words, many=8, columns=20):
    ids = np.zeros((many, columns), 'int32')
    ids[:, :words] = np.arange(words) + 1
    return tf.constant(ids)

def uneven(words):
    ids = padded(words).numpy()
    ids[0, :17] = 6
    return tf.constant(ids)

def masked(ids, mask, y): return tf.reduce_sum(tf.cast(ids * mask, tf.float32)) + y
def batch_of(*weights): return tf.reshape(tf.range(8.), (4, 2)), tf.ones(4), tf.constant(weights, tf.float32)
def all_pairs(a, b): return tf.reduce_sum(tf.square(a[:, None] - b[None]), -1)
def norms(a, b): return tf.norm(a[:, None] - b, axis=-1)
def row_pairs(a, b): return tf.reduce_sum(tf.square(a - b[:1]), -1)          # one row is taken from each
def distances(a, b): return tf.reduce_sum(tf.abs(a[:, None] - b), -1)       # no product gives these

X, LONG, SIX, IDS = tf.ones((8, 5)), tf.zeros((2, 150, 3)), tf.ones((6, 4)), tf.constant([[1, 2], [3, 3]])
TWO = tf.reshape(tf.range(8.), (4, 2)), tf.ones((3, 2))
STEPS = {   # a function of TensorFlow, and what it is called with
    **{f'{n} rows': (lambda x: tf.constant(.1), tf.zeros((n, 3))) for n in (4, 16, 17)},
    'map_fn': (gradient_of(partial(tf.map_fn, lambda row: row / tf.norm(row))), X),
    'rows in a loop': (gradient_of(of_rows), X), 'sum in a loop': (gradient_of(summed), X),
    'updates in a loop': (of_updates, X),
    'state in a loop': (gradient_of(lambda x: follow(x, lambda h, row: tf.tanh(row + h))), X),
    'factor': (gradient_of(lambda x: follow(x, lambda h, row: .9 * h + row)), X),
    'division': (gradient_of(lambda x: follow(x, lambda h, row: (h - row) / 2.)), X),
    'square': (gradient_of(lambda x: follow(x, lambda h, row: h * h + row)), X),
    'inverse': (gradient_of(lambda x: follow(x, lambda h, row: row / (h + 1.))), X),
    'AUC': (measured_by_auc, tf.constant([0., 1.]), tf.constant([.2, .5])),
    **{f'one-hot {n}': (updated(partial(one_hot, columns=n), n, 4), IDS) for n in (511, 512)},
    **{f'softmax {n}': (updated(partial(softmax, classes=n), 4, n), tf.ones((2, 4)), tf.constant([1, 2]))
       for n in (9_999, 10_000)},
    **{f'{n} parts': (gradient_of(partial(of_parts, many=n)), LONG) for n in (40, 150)},
    '150 turns': (gradient_of(in_turn), LONG),
    'all pairs': (gradient_of(all_pairs), *TWO), 'norms': (gradient_of(norms), *TWO),
    'pairs of rows': (gradient_of(row_pairs), *TWO), 'distances': (gradient_of(distances), *TWO),
    **{f'{n} words': (masked, padded(n), tf.ones((8, 20), tf.int32), tf.constant(2.)) for n in (12, 13)},
    'few long': (same, uneven(3)), 'some long': (same, uneven(7)),
    'frozen': (updated(frozen, 3, 1), SIX), 'all learned': (updated(all_learned, 4, 1), SIX),
    'random': (updated(at_random, 3, 1), SIX), 'nothing learned': (frozen, SIX),
    **{f'weights {w}': (lambda b: tf.reduce_sum(b[0]) + tf.reduce_sum(b[2]), batch_of(*map(int, w)))
       for w in ('1000', '1110', '0000')},
    **{f'{n} losses': (partial(several_losses, many=n), tf.ones((2, 4)) / 9) for n in (3, 4)},
    'python inside': (lambda x: tf.numpy_function(lambda a: a, [x], tf.float32), tf.zeros(3)),
    'float32': (lambda x: tf.reduce_sum(x @ x), tf.ones((2, 2))),
    'float64': (lambda x: tf.reduce_sum(x @ x), tf.ones((2, 2), tf.float64)),
    'float16': (lambda x: tf.reduce_sum(tf.cast(x, tf.float16) @ tf.cast(x, tf.float16)), tf.ones((2, 2))),
    'table': (lambda ids: learned(40, 3).assign_sub(np.ones((40, 3), 'float32') * tf.reduce_sum(
        tf.gather(learned(40, 3), ids)))[0, 0], tf.constant([1, 2])),
    'decayed table': (updated(lambda ids: tf.reduce_sum(tf.gather(learned(40, 3), ids)) + tf.nn.l2_loss(
        learned(40, 3)), 40, 3), tf.constant([1, 2])),
    'rows of a table': (lambda ids: learned(40, 3).scatter_sub(tf.IndexedSlices(
        tf.gather(learned(40, 3), ids), ids))[0, 0], tf.constant([1, 2]))}

class Rate:
    "As a program makes one for each epoch."
    def __tf_tensor__(self, dtype=None, name=None): return tf.constant(1, dtype)

TRACED = {   # what one function is called with, one call after the other
    'values': [(tf.ones(2), i) for i in range(4)], 'objects': [(tf.ones(2), Rate()) for _ in range(4)],
    'shapes': [(tf.ones(n), tf.constant(1)) for n in (1, 2, 3)], 'both': [(tf.ones(n), n) for n in (1, 2)],
    'once': [(tf.ones(2), tf.constant(1))],
    'keys': [(tf.ones(2), {'a': 1., key: 2.}) for key in 'bcd'],
    'lists': [(tf.ones(2), [1.] * n) for n in (1, 2, 3)]}

def traced(kind: str) -> list[Call]:
    @tf.function
    def step(x, rate): return x * tf.add_n([tf.cast(t, tf.float32) for t in tf.nest.flatten(rate)])
    out = []
    for x, rate in TRACED[kind]:
        given = x, rate if isinstance(rate, (int, Rate)) else tf.nest.map_structure(tf.constant, rate)
        step(*given)
        out.append(Call(step, given, {}, 0., False))
    return out

@cache
def compiled(name: str, jit: bool = False) -> Call:
    function, *args = STEPS[name]
    return Call(tf.function(function, jit_compile=jit or None), tuple(args), {}, 0., False)

BATCHES = {'same': [tf.ones((4, 8))] * 5, 'scalar': [(tf.ones((4, 8)), tf.constant(1.))] * 4,
           'unlike': [tf.ones((4, 8))] * 3 + [tf.ones((3, 8))]}

# --- a line of the table -----------------------------------------------------------------------------------

def edges(patch, given: dict):
    "Cores, GPU and clock are those of the table; what is timed runs all the same."
    takes = [*given.get('takes', [])]
    def timed(call, *how):
        call()
        if takes and takes[0] is None: raise ValueError('the trial fails')
        return takes.pop(0) if takes[1:] else takes[0]
    def compared(arms, unit, *how, **named):
        for arm in arms.values(): arm()
        return Comparison([_Arm(name, [t]) for name, t in zip(arms, takes)], unit)
    edge = {'cores': lambda: given.get('cores', 3), '_seconds_of': timed, 'compare': compared,
            'period': lambda some: given['trial'],
            '_opening_seconds': lambda size: 1e-9 * given.get('opens', 1e9)}
    for module in MODULES:
        for name in edge.keys() & vars(module).keys() - ({'compare'} if module is trials else set()):
            patch.setattr(module, name, edge[name])
    if 'long' in given: patch.setattr(graph_rules, '_LONG_TABLE', given['long'])   # rows, and numbers
    if given.get('gpu'): patch.setattr(tf.config, 'list_logical_devices', lambda kind: [kind])

def training(given: dict) -> diagnose.Case:
    "A batch takes 30 ms, the step 10 ms, one beside the other."
    m = diagnose.Measured(**dict(loop=.03, pipeline=.03, step=.01, compute=.01, first=1., batches=8, rows=4,
                                 wait=.02) | given.get('m', {}))
    some = [(Stage(name, None, how[0], None, how[1:], given.get('elements', 16)), s)
            for kind, s in given.get('stages', []) for name, *how in [STAGES[kind]]]
    batches = BATCHES.get(given.get('batches')) or [np.zeros(given.get('bytes', 1600), np.uint8)]
    made = [c for kind in given.get('traced', []) for c in traced(kind)]
    made += [compiled(name, given.get('jit', False)) for name in given.get('steps', [])]
    data = PIPELINES[given['data']]() if 'data' in given else ()
    return diagnose.Case(data, lambda x: x, m, batches, made, some, given.get('python', 0))

def program_of(given: dict):
    "The steady part of a program: ten seconds, looked at a hundred times."
    place = {'': LINE, 'other': OTHER}
    looks = [(place[where], kind) for name, n in given.get('looks', {}).items()
             for where, _, kind in [name.rpartition(' ')] for _ in range(n)]
    events = []
    for name, count, every, seconds, *more in given.get('events', []):
        where, _, kind = name.rpartition(' ')
        events += calls(kind, count, every, seconds, place[where], **(more or [{}])[0])
    where, _, kind = (given.get('loop', 'next') or '').rpartition(' ')
    pipeline.cache_clear()
    data = [pipeline(name) for name in given.get('data', [])]
    part = seen(
        looks, events, loop=(kind, place[where]) if kind else (), datasets={LINE: data} if data else {},
        validated=data, eager_functions=list, fits=[fit(**f) for f in given.get('fits', [])],
        python=[_PythonCall(i * every, i * every + busy, LINE, name)
                for n, every, busy, name in given.get('python', []) for i in range(n)],
        beside=[_Look(i / 10, LINE, kind, '') for i, kind in enumerate(
            kind for kind, n in given.get('beside', {}).items() for _ in range(n))])
    for name, step in given.get('last', {}).items():
        call = compiled(step, given.get('jit', False)) if step in STEPS else None
        part.watch.last[name, LINE] = (call.function, '__call__', call.args, {}) if call else OWNERS[step]
    part.watch.functions = {kind: traced(kind)[0].function for kind in given.get('traced', [])}
    if 'shapes' in given: part.watch.shapes = {('call', LINE): {(i,) for i in range(given['shapes'])}}
    if 'seconds' in given: part.end = given['seconds']
    return part

def nothing(*args, **named): return tf.constant(0.)
def model_with(name, **given): return SimpleNamespace(**{name: nothing}), name, ('x',), given
OWNERS = {'network': (nothing, '__call__', (np.ones((1, 3)),), {}),
          'evaluate': model_with('evaluate'), 'evaluate, 1': model_with('evaluate', batch_size=1),
          **{f'predict, {n}': model_with('predict', batch_size=n) for n in (16, 17)},
          'on batch': model_with('predict_on_batch', batch_size=1)}

@cache
def pipeline(name: str): return PIPELINES[name.partition(' #')[0]]()   # `cache #2`: another one

def fit(**given) -> SimpleNamespace:
    model = SimpleNamespace(run_eagerly=False, jit_compile=given.pop('jit', False))
    given |= {'one': nothing} if 'shapes' in given else {}
    return SimpleNamespace(**dict(model=model, one=None, batch=1, wait_seconds=0., wait_share=0., planned=1,
                                  epochs=1, asked=None) | given)

def order_of_stages(given: dict) -> str | None:
    shape = input_rules._order(stages(PIPELINES[given['data']]()), given['passes'], given['whole'])
    return shape and shape.cause

def stage_that_costs(given: dict) -> str | None:
    some = stages(PIPELINES[given['data']]())
    stage = next(s for s in some if s.name == given['stage'])
    found = input_rules._shape(some, stage, given['share'], 1., given['again'])
    return found and f'{found[0].cause}, {found[1]:.3g} left'

def stage_in_double(given: dict) -> list[str]:
    last = stages(PIPELINES[given['data']]())[-1]
    waits = program_of({'looks': {'input': 9}})
    return [line(f) for f in input_rules._in_double(waits, last, .8, given['share'])]

def times_of_the_same_rows(given: dict) -> int: return graph_rules._epochs(program_of(given))

OTHERS = {f.__name__: f for f in (order_of_stages, stage_that_costs, stage_in_double, times_of_the_same_rows)}

def line(f) -> str:
    gain = 'only a GPU shows its gain' if f.only_on_gpu else f'{f.predicted_gain:.4g} x'
    interval = f' ({f.low:.3g} to {f.high:.3g})' if f.high else ''
    where = re.sub(r':\d+', '', f.place) if 'golden' in f.place else f.place
    return f'{f.disease}{where and " at "}{where}: {gain}{interval}; {f.evidence}'

def found_in(rule: str, given: dict):
    "What a rule finds, notes and could not see."
    with pytest.MonkeyPatch.context() as patch:
        edges(patch, given)
        if rule in OTHERS: return OTHERS[rule](given)
        if hasattr(diagnose, rule):
            case = training(given)
            found = getattr(diagnose, rule)(case)
            return ([line(found)] if found else []) + [f'note: {n}' for n in case.notes] + [
                f'unseen: {u}' for u in case.unseen]
        module = next(m for m in MODULES[1:] if hasattr(m, rule))
        return [line(f) for f in getattr(module, rule)(program_of(given))]

def table() -> dict: return json.loads(TABLE.read_text(encoding='utf-8'))

@pytest.mark.parametrize('rule', table() if TABLE.exists() else [])
def test_each_rule_finds_what_the_table_says(rule):
    for case in table()[rule]:
        given = {k: v for k, v in case.items() if k != 'found'}
        assert found_in(rule, given) == case['found'], given

def test_every_rule_is_in_the_table():
    every = {*diagnose._INPUT_RULES, *diagnose._STEP_RULES, *program._PROGRAM_RULES}
    apart = {'find_copy_bound', '_note_for_a_gpu', 'find_growth', 'find_added_operations', 'find_same_values',
             'find_copied_weights', 'find_slow_input', 'find_filled_again', 'find_on_host'}   # tested alone
    assert {rule.__name__ for rule in every} - apart == table().keys() & {r.__name__ for r in every}

def write():
    "The table with what is found now, a line each."
    rules = []
    for rule, cases in table().items():
        for case in cases: case['found'] = found_in(rule, {k: v for k, v in case.items() if k != 'found'})
        rows = ',\n'.join('  ' + json.dumps(case, ensure_ascii=False) for case in cases)
        rules.append(f' "{rule}": [\n{rows}]')
    TABLE.write_text('{\n' + ',\n'.join(rules) + '}\n', encoding='utf-8')

if __name__ == '__main__': write()
