"""Measurements and what the rules find in them, as a table: `golden.json`, each cause and what is none.

`python tests/monitor/test_golden.py` writes into the table what is found now: read the change as a diff."""
import gc
import json
import re
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

sys.path.append(str(Path(__file__).parents[1]))
from watched import calls, LINE, OTHER, passes, seen, threads

from xtts_nb.bench import Comparison, _Variant
from xtts_nb.config import setup_tf
from xtts_nb.monitor import graph_rules, input_rules, leave_out, loop_rules, program, seen as trials
from xtts_nb.monitor.input_rules import _Batches
from xtts_nb.monitor.leave_out import Call
from xtts_nb.monitor.loop import Stage, stages
from xtts_nb.monitor.seen import Finding
from xtts_nb.monitor.watch import _Look, _PythonCall

setup_tf(threads=2)
TABLE = Path(__file__).with_name('golden.json')
MODULES = graph_rules, input_rules, loop_rules, program, trials, leave_out
gc.freeze()   # each trial looks for variables among all objects; none is among what imports made

# --- what the table names: pipelines and functions ---------------------------------------------------------

def numbers(n=9): return tf.data.Dataset.range(n)
def read(i): return tf.io.read_file(tf.strings.as_string(i))
def python(i): return tf.numpy_function(lambda i: i, [i], tf.int64)
def same(i): return i
def in_reader(i): return tf.data.Dataset.range(4).map(lambda j: i + j).cache()
PAIRS, BASE = tf.data.Dataset.from_tensor_slices((np.ones((8, 3)), np.ones(8))), numbers()

PIPELINES = {
    'range': numbers, 'map': lambda: numbers().map(same),
    'prefetch': lambda: numbers().map(same).prefetch(1),
    'prefetch, options, repeat': lambda: numbers().prefetch(1).with_options(tf.data.Options()).repeat(),
    'map of 24': lambda: numbers(4).map(same, num_parallel_calls=24),
    'rows': lambda: PAIRS.map(lambda x, y: x), 'python': lambda: numbers().map(python),
    'cache of python': lambda: numbers().map(python).cache(), 'new map': lambda: numbers(3).map(same),
    'cache': lambda: BASE.cache().batch(2), 'new cache': lambda: numbers().cache(),
    '4 calls, 1 thread': lambda: threads(1, numbers().map(same, num_parallel_calls=4)),
    '4 calls, 4 threads': lambda: threads(4, numbers().map(same, num_parallel_calls=4)),
    '1 call, 1 thread': lambda: threads(1, numbers().map(same)), 'repeat': lambda: numbers().repeat(),
    'map, repeat, cache': lambda: numbers().map(same).repeat().cache(),
    'cache, take, repeat': lambda: numbers().cache().take(3).repeat(),
    'cache, take': lambda: numbers().cache().take(3),
    'read, shuffle': lambda: numbers().map(read).shuffle(9),
    'cache inside': lambda: numbers(3).interleave(in_reader).shuffle(9).batch(2),
    'cumsum': lambda: numbers(64).map(lambda x: tf.cumsum(tf.fill([2000], x))).batch(2),
    'array': lambda: tf.data.Dataset.from_tensor_slices(np.ones((64, 3))).shuffle(9).batch(16),
    'range, batch': lambda: numbers(64).batch(16),
    'windows': lambda: numbers(64).window(4, 1, drop_remainder=True).flat_map(lambda w: w.batch(4)).batch(
        16).map(lambda x: x + 1),
    'float64': lambda: numbers(4).map(lambda x: tf.cast(tf.fill([1000], x), tf.float64) * 2),
    'float32': lambda: numbers(4).map(lambda x: tf.cast(tf.fill([1000], x), tf.float32) * 2)}

STAGES = {'map': ('Map', None), 'range': ('Range', None), 'read': ('Map', None, 'ReadFile'),
          'python': ('Map', None, 'EagerPyFunc')}

STEPS = {   # a function of TensorFlow, and what it is called with
    '4 rows': (lambda x: tf.constant(.1), tf.zeros((4, 3))),
    '17 rows': (lambda x: tf.constant(.1), tf.zeros((17, 3))),
    'python inside': (lambda x: tf.numpy_function(lambda a: a, [x], tf.float32), tf.zeros(3)),
    'float32': (lambda x: tf.reduce_sum(x @ x), tf.ones((2, 2))),
    'float64': (lambda x: tf.reduce_sum(x @ x), tf.ones((2, 2), tf.float64)),
    'float16': (lambda x: tf.reduce_sum(tf.cast(x, tf.float16) @ tf.cast(x, tf.float16)), tf.ones((2, 2)))}

TRACED = {'values': [(tf.ones(2), i) for i in range(4)],   # what one function is called with, call after call
          'shapes': [(tf.ones(n), tf.constant(1)) for n in (1, 2, 3)]}

def traced(kind: str) -> list[Call]:
    @tf.function
    def step(x, rate): return x * tf.cast(rate, tf.float32)
    for given in TRACED[kind]: step(*given)
    return [Call(step, given) for given in TRACED[kind]]

@cache
def compiled(name: str, jit: bool = False) -> Call:
    function, *args = STEPS[name]
    return Call(tf.function(function, jit_compile=jit or None), tuple(args))

# --- a line of the table -----------------------------------------------------------------------------------

def edges(patch, given: dict):
    "Cores, GPU and clock are those of the table; what is timed runs all the same."
    takes = [*given.get('takes', [])]
    def timed(call, *how):
        call()
        if takes and takes[0] is None: raise ValueError('the trial fails')
        return takes.pop(0) if takes[1:] else takes[0]
    def compared(variants, unit, *how, **named):
        for variant in variants.values(): variant()
        return Comparison([_Variant(name, [t]) for name, t in zip(variants, takes)], unit)
    edge = {'cores': lambda: given.get('cores', 3), '_seconds_of': timed, 'compare': compared,
            '_opening_seconds': lambda size: 1e-9 * given.get('opens', 1e9),
            '_read_seconds': lambda data: .01}
    for module in MODULES:
        for name in edge.keys() & vars(module).keys() - ({'compare'} if module is trials else set()):
            patch.setattr(module, name, edge[name])
    if given.get('gpu'): patch.setattr(tf.config, 'list_logical_devices', lambda kind: [kind])

def batches(given: dict) -> _Batches:
    "A batch takes 30 ms, the step 10 ms, one beside the other."
    some = [(Stage(name, None, how[0], None, how[1:], given.get('elements', 16)), s)
            for kind, s in given.get('stages', []) for name, *how in [STAGES[kind]]]
    return _Batches(**dict(
        dataset=PIPELINES[given['data']]() if 'data' in given else (), period=.03, wait=.02, step=.01,
        busy=0., first=np.zeros(given.get('bytes', 1600), np.uint8), fill=0., times=[.03] * 30, seconds=.03,
        stages=some) | given.get('m', {}))

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
        validated=passes(data), eager_functions=list, fits=[fit(**f) for f in given.get('fits', [])],
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
          'predict, 17': model_with('predict', batch_size=17)}

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
    return found and found.cause

def stage_in_double(given: dict) -> list[str]:
    last = stages(PIPELINES[given['data']]())[-1]
    waits = program_of({'looks': {'input': 9}})
    return [line(f) for f in input_rules._in_double(waits, last, .8, given['share'])]

def times_of_the_same_rows(given: dict) -> int: return graph_rules._epochs(program_of(given))

ALONE = {rule.__name__ for rule in (*input_rules._MEASURED, input_rules._no_buffer)}   # of `_Batches`
OTHERS = {f.__name__: f for f in (order_of_stages, stage_that_costs, stage_in_double, times_of_the_same_rows)}

def line(f) -> str:
    gain = 'only a GPU shows its gain' if f.only_on_gpu else \
        f'{"measured" if f.measured else "at most"} {f.gain:.4g} x'
    interval = f' ({f.low:.3g} to {f.high:.3g})' if f.high else ''
    where = re.sub(r':\d+', '', f.place) if 'golden' in f.place else f.place
    return f'{f.cause}{where and " at "}{where}: {gain}{interval}; {f.evidence}'

def found_in(rule: str, given: dict):
    "What a rule finds, notes and could not see."
    with pytest.MonkeyPatch.context() as patch:
        edges(patch, given)
        if rule in OTHERS: return OTHERS[rule](given)
        if rule in ALONE:
            f = getattr(input_rules, rule)(batches(given))
            return [line(Finding(*f[:5]))] if f else []
        module = next(m for m in MODULES if hasattr(m, rule))
        return [line(f) for f in getattr(module, rule)(program_of(given))]

def table() -> dict: return json.loads(TABLE.read_text(encoding='utf-8'))

@pytest.mark.parametrize('rule', table() if TABLE.exists() else [])
def test_each_rule_finds_what_the_table_says(rule):
    for case in table()[rule]:
        given = {k: v for k, v in case.items() if k != 'found'}
        assert found_in(rule, given) == case['found'], given

def test_every_rule_is_in_the_table():
    every = {*input_rules._MEASURED, input_rules._no_buffer, *program._PROGRAM_RULES}
    apart = {   # third-party programs show these
        'find_copy_bound', 'find_growth', 'find_added_operations', 'find_same_values',
        'find_copied_weights', 'find_slow_input', 'find_filled_again', 'find_on_host', 'find_in_graph'}
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
