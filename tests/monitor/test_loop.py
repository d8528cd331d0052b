"Loops that are measured: iterations, phases, pipelines taken apart; data and steps that fail."
import threading
from concurrent.futures import Future

import numpy as np
import pytest
import tensorflow as tf
from clock import Clock
from tensorflow.python.framework import op_def_registry

from xtts_nb.config import UserError, setup_tf
from xtts_nb.monitor import loop as page
from xtts_nb.monitor.loop import (
    _batch_of_each_shape, _CALLS_INPUT, _dataset_graph, drain, _filled_at_once, first_batches, _host_part,
    _IntervalTimer, max_parallel_calls, operations, _prefetch_on_device, python_operations, period,
    run_iterations, stage_seconds, stages, time_phases, with_parallel_calls)

setup_tf(threads=2)

@pytest.fixture
def clock(monkeypatch):
    "One clock of loops and steps, on which results arrive at once."
    monkeypatch.setattr(page, 'time', Clock())
    monkeypatch.setattr(page, 'ThreadPoolExecutor', AtOnce)
    return page.time

class AtOnce:
    "Stands for a pool of threads: what is submitted is done at once."
    def __init__(self, *how): pass
    def shutdown(self): pass
    def submit(self, work):
        done = Future()
        done.set_result(work())
        return done

# --- iterations --------------------------------------------------------------------------------------------

def test_an_iteration_waits_for_the_step_before_the_last(clock):
    "A batch comes after 1/4 s, a step takes 1/2 s, and its result is there 1/8 s after it was asked for."
    results, waited = iter('abcd'), []
    times = run_iterations(
        clock.each([.25] * 9, np.ones((3, 2))), lambda batch: (clock.sleep(.5), next(results))[1], at_most=4,
        seconds=99., finish=lambda result: (waited.append(result), clock.sleep(.125)))
    assert waited == list('abcd')
    # the last one ends when nothing is left to do
    assert times == [100., 100.75, 101.5, 102.375, 103.5] and period(times) == 1.
    assert period(times[:1]) == 0.

@pytest.mark.parametrize('seconds, at_least, there, count', [
    (0., 4, 9, 4), (1.5, 1, 9, 2), (1.6, 1, 9, 3), (99., 1, 9, 6), (99., 4, 3, 3), (99., 4, 0, 0)])
def test_iterations_end_with_their_time_their_number_or_the_data(clock, seconds, at_least, there, count):
    "No batch is fetched in vain; nor by `drain`, whose batches take all of the time."
    batches = clock.each([.25] * there, 1.)
    limits = dict(at_most=6, seconds=seconds, at_least=at_least)
    some = run_iterations(batches, lambda batch: clock.sleep(.5), **limits)
    assert len(some) - 1 == count and sum(1 for _ in batches) == max(0, there - count)
    batches = clock.each([.75] * there)
    assert drain(batches, 6, seconds, at_least) == [.75] * count
    assert sum(1 for _ in batches) == max(0, there - count)

# --- data and steps that fail ------------------------------------------------------------------------------

def batches(n=40, rows=4): return [tf.fill([rows], float(i)) for i in range(n)]

def raising(n):
    yield from batches(n)
    raise OSError('clip 7 is gone')

def stuck(gate=threading.Event()):   # noqa: B008
    yield 1
    gate.wait(9)

@pytest.mark.parametrize('work, place', [
    (lambda: first_batches(raising(2)), 'batch 2: OSError: clip 7'),
    (lambda: first_batches(range(3)), '3 of'), (lambda: first_batches(stuck(), 2, .05), '0.05 s after 1'),
    (lambda: time_phases(batches(), len, steps=1), '1 steps'),
    (lambda: time_phases(raising(2), len, steps=4), 'batch 2: OSError: clip 7'),
    (lambda: time_phases(7, len, steps=4), 'first batch: TypeError')])
def test_what_fails_names_its_place(work, place):
    with pytest.raises(UserError, match=place): work()

@pytest.mark.parametrize('batches, seconds, at_most, lengths, left', [
    (9, 99., 9, [1, 2, 3, 4], 0), (9, 99., 2, [1, 2], 4), (3, 99., 9, [1, 2], 3), (9, .9, 9, [1, 2], 4)])
def test_one_batch_of_each_shape(clock, batches, seconds, at_most, lengths, left):
    "Half a second each; the first of each shape is kept."
    source = (clock.sleep(.5) or np.full(n, i) for i, n in enumerate([1, 2, 1, 3, 2, 4]))
    found = _batch_of_each_shape(source, batches, seconds, at_most)
    assert [len(b) for b in found] == lengths and [int(b[0]) for b in found[:2]] == [0, 1]
    assert sum(1 for _ in source) == left

# --- phases ------------------------------------------------------------------------------------------------

class LateResult:
    "A result that arrives when it is let go."
    def __init__(self, gate): self.gate, self.shape, self.asked = gate, (), 0
    def numpy(self): self.asked += 1; assert self.gate.wait(20); return 1.
    def __float__(self): return float(self.numpy())

def test_every_batch_is_trained_on_once_and_in_order():
    seen, called = [], []
    found = time_phases(batches(20), lambda b: seen.append(float(b[0])) or b[0], steps=10, warmup=3, every=4,
                        callback=lambda n, result: called.append((n, float(result))))
    assert seen == list(range(13)) and called == [(i, float(i)) for i in range(13)]
    assert found.steps == 10 and len(found.spans) == 10 and not found.ended
    found = time_phases(batches(12), lambda b: b[0], steps=50)
    assert found.ended and found.steps == 8
    step = tf.function(lambda b: {'loss': tf.reduce_sum(b)})
    assert time_phases([tf.ones(2 + i % 2) for i in range(30)], step, steps=10).traces == 2

def test_the_loop_does_not_wait_for_an_interval():
    "Results of an interval arrive late; the steps after it run on."
    gate, results = threading.Event(), []
    intervals = _IntervalTimer(every=2)
    intervals.timer.alone[((4,),)] = [0., 0., 0.]   # nothing is left to be timed alone
    for batch in batches(3):
        results.append(LateResult(gate))
        intervals.step(lambda b: {'loss': results[-1]}, batch)
    assert intervals.done == 3 and not intervals.lines and results[0].asked == 0   # the interval goes on
    gate.set()
    intervals.close()
    assert [line['step'] for line in intervals.lines] == [2] and intervals.lines[0]['loss'] == 1.

def test_phases_are_added_up_by_hand(clock):
    "A batch takes 1/4 s, one 3/4 s, a copy 1/8 s, a step 1/2 s and a callback 1/16 s. Two steps warm up."
    reported, done = [], []
    data = clock.each([.25, .25, .25, .75, .25], tf.ones((4, 2)))
    found = time_phases(
        data, lambda batch: clock.sleep(.5) or {'loss': 1.}, 3, lambda batch: clock.sleep(.125) or batch,
        lambda number, results: (clock.sleep(.0625), done.append((number, results))), 2, reported.append, 2)
    assert done == [(i, {'loss': 1.}) for i in range(5)] and [line['step'] for line in reported] == [2, 4, 5]
    assert (found.first_batch, found.first_step, found.steps, found.seconds) == (.25, .5, 3, 3.3125)
    assert found.clips_per_s == 3 * 4 / 3.3125 and found.au == 1.5 / 3.3125 and found.traces == 0
    assert not found.ended
    assert found.cv == pytest.approx(.25 / 1.1875)
    assert found.spent == pytest.approx({'wait': 1250 / 3, 'copy': 125., 'step': 500., 'callbacks': 62.5})
    assert found.spans == [(101.875, .25, .125, .5, .0625), (102.8125, .75, .125, .5, .0625),
                           (104.25, .25, .125, .5, .0625)]

def test_phases_where_every_step_compiles(clock):
    "Each batch has a shape of its own; a step that takes no time has no share of it."
    data = (clock.sleep(.5) or tf.ones(n) for n in range(1, 9))
    found = time_phases(data, lambda batch: 1., 3, warmup=1)
    assert (found.steps, found.au, found.clips_per_s, found.spent['wait']) == (0, None, 0., 1500.)
    assert '| – |' in found._repr_markdown_() and 'spans' not in found.to_dict()

# --- pipelines ---------------------------------------------------------------------------------------------

def numbers(n=16): return tf.data.Dataset.range(n)
def python_rows(n=16): return numbers(n).map(lambda i: tf.numpy_function(lambda i: i + 1, [i], tf.int64))
def on_device(dataset): return dataset.apply(tf.data.experimental.prefetch_to_device('/CPU:0', 3))
def values(dataset): return [x.tolist() for x in dataset.as_numpy_iterator()]

def test_the_host_part_is_found_behind_other_stages():
    host = numbers().batch(2)
    copied = host.apply(tf.data.experimental.copy_to_device('/CPU:0'))
    for data, device, buffer in ((host, None, 0), (on_device(host), '/CPU:0', 3), (copied, '/CPU:0', 0),
                                 (on_device(host).with_options(tf.data.Options()), '/CPU:0', 3)):
        assert _host_part(data) == (host, device, buffer)
    assert _host_part([1]) == ([1], None, 0)
    assert _prefetch_on_device(host, None, 0) is host
    for buffer, expected in ((0, 2), (5, 5)):
        assert _host_part(_prefetch_on_device(host, '/CPU:0', buffer)) == (host, '/CPU:0', expected)

def test_the_stages_from_the_source_on():
    kept = python_rows().filter(lambda i: i > 0).map(lambda i: i, num_parallel_calls=4)
    data = on_device(kept.batch(2).batch(3).prefetch(5))
    assert [(s.name, s.calls, s.buffer, s.elements, s.python) for s in stages(data)] == [
        ('Range', None, None, None, False), ('Map', None, None, None, True), ('Filter', None, None, 6, False),
        ('ParallelMap', 4, None, 6, False), ('Batch', None, None, 3, False), ('Batch', None, None, 1, False),
        ('Prefetch', None, 5, 1, False)]
    # the first of several sources
    both = tf.data.Dataset.zip(numbers().map(lambda i: i), numbers().shuffle(9))
    assert [(s.name, s.elements) for s in stages(both)] == [('Range', 1), ('Map', 1), ('Zip', 1)]

def calls_in(dataset) -> dict:
    "The fixed number of calls of each operation in the graph that has one."
    graph = _dataset_graph(dataset)
    constants = {n.name: tf.make_ndarray(n.attr['value'].tensor) for n in graph.node
                 if n.op == 'Const' and n.attr['dtype'].type == tf.int64.as_datatype_enum}
    return {n.op: int(constants[n.input[_CALLS_INPUT[n.op]]]) for n in graph.node if n.op in _CALLS_INPUT}

def test_the_number_of_calls_stands_where_tensorflow_says():
    for op, at in _CALLS_INPUT.items():
        assert op_def_registry.get(op).input_arg[at].name == 'num_parallel_calls', op

@pytest.mark.parametrize('calls, above, expected', [
    (5, 0, (5, 5, 5)), (5, 3, (3, 5, 5)), (2, 4, (3, 4, 2)), (5, 9, (3, 4, 6))])
def test_other_calls_are_made_in_all_stages_or_where_they_were_many(calls, above, expected):
    data = numbers(20).interleave(lambda i: tf.data.Dataset.from_tensors(i), cycle_length=6,
                                  num_parallel_calls=3)
    data = data.map(lambda i: 2 * i, num_parallel_calls=4).batch(3, num_parallel_calls=6)
    changed = with_parallel_calls(data, calls, above)
    assert values(changed) == values(data)
    assert tuple(calls_in(changed).values()) == expected

def test_plain_maps_become_parallel_only_where_all_stages_change():
    data = on_device(python_rows().map(lambda i: i, num_parallel_calls=tf.data.AUTOTUNE).batch(2))
    changed = with_parallel_calls(data, 4)
    assert [b.numpy().tolist() for b in changed] == [b.numpy().tolist() for b in data]
    assert _host_part(changed)[1:] == ('/CPU:0', 3) and python_operations(changed) == 1
    assert 'MapDataset' not in operations(_dataset_graph(changed))
    assert calls_in(changed) == {'ParallelMapDatasetV2': 4}
    same = with_parallel_calls(data, 4, above=1)   # what TensorFlow chooses is no fixed number
    assert 'MapDataset' in operations(_dataset_graph(same)) and calls_in(same) == {'ParallelMapDatasetV2': -1}

TABLE = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1, 2], [5, 6], tf.int64, tf.int64), 0)

@pytest.mark.parametrize('source', [
    lambda: numbers(9).shuffle(4, seed=1), lambda: numbers(9).cache(), lambda: numbers(9).map(TABLE.lookup),
    lambda: tf.data.Dataset.sample_from_datasets([numbers(4)], seed=1),
    lambda: tf.data.Dataset.from_tensor_slices(['a', 'bc']).map(tf.strings.length),
    lambda: tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]])).map(tf.size)],
    ids=['shuffle', 'cache', 'table', 'sample', 'text', 'ragged'])
def test_any_constant_may_stand_in_the_graph(source):
    "Resources, variants and texts are constants too; they are no numbers of calls."
    data = source().map(lambda x: x + 1)
    for above in (0, 1):
        changed = with_parallel_calls(data, 3, above)
        assert sorted(map(str, values(changed))) == sorted(map(str, values(data)))
    assert 3 in calls_in(with_parallel_calls(data, 3)).values()

def test_the_largest_number_of_calls():
    options, same = tf.data.Options(), lambda i: i
    options.threading.private_threadpool_size = 8
    parallel = numbers().map(same, num_parallel_calls=4).map(same, num_parallel_calls=3).batch(2)
    tuned = numbers().map(same, num_parallel_calls=tf.data.AUTOTUNE)
    cases = numbers().map(same), tuned, parallel, on_device(parallel.with_options(options)), [1]
    assert [*map(max_parallel_calls, cases)] == [1, 1, 4, 8, 1]

def test_a_large_shuffle_buffer_is_not_filled_again_to_time_the_stages():
    counted = []
    count = lambda i: counted.append(1) or i
    rows = tf.data.Dataset.range(10**6).map(lambda i: tf.numpy_function(count, [i], tf.int64))
    data = rows.shuffle(5000).batch(4)
    assert {s.name for s, _ in stage_seconds(data, 1., 4)} == {'Range', 'Map', 'Shuffle', 'Batch'}
    assert 100 < len(counted) < 5000
    cached = tf.data.Dataset.range(9000).cache().shuffle(5000)
    assert _filled_at_once(cached) is cached   # that of a graph would be empty
