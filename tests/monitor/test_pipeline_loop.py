"A pipeline taken apart: its stages, its operations, the time of each stage, and other numbers of calls."
import pytest
import tensorflow as tf
from clock import Clock
from tensorflow.python.framework import op_def_registry

from xtts_nb.monitor import loop as pipeline
from xtts_nb.config import setup_tf
from xtts_nb.monitor.loop import (
    CALLS_INPUT, Stage, dataset_graph, drain, host_part, max_parallel_calls, operations, prefetch_on_device,
    python_operations, stage_seconds, stages, steady_mean, tf_sleep, with_parallel_calls)

setup_tf(threads=2)


def numbers(n=16): return tf.data.Dataset.range(n)
def python_rows(n=16): return numbers(n).map(lambda i: tf.numpy_function(lambda i: i + 1, [i], tf.int64))
def on_device(dataset): return dataset.apply(tf.data.experimental.prefetch_to_device('/CPU:0', 3))
def values(dataset): return [x.tolist() for x in dataset.as_numpy_iterator()]


# Host and device

def test_the_host_part_is_found_behind_other_stages():
    host = numbers().batch(2)
    copied = host.apply(tf.data.experimental.copy_to_device('/CPU:0'))
    for data, device, buffer in ((host, None, 0), (on_device(host), '/CPU:0', 3), (copied, '/CPU:0', 0),
                                 (on_device(host).with_options(tf.data.Options()), '/CPU:0', 3)):
        assert host_part(data) == (host, device, buffer)
    assert host_part([1]) == ([1], None, 0)
    assert prefetch_on_device(host, None, 0) is host
    for buffer, expected in ((0, 2), (5, 5)):
        assert host_part(prefetch_on_device(host, '/CPU:0', buffer)) == (host, '/CPU:0', expected)


# The graph

@pytest.mark.parametrize('end', [
    lambda d: d, lambda d: d.repeat().shuffle(4), on_device,
    lambda d: d.interleave(tf.data.Dataset.from_tensors)])
def test_python_is_found_whatever_stands_behind_it(end):
    assert python_operations(end(python_rows())) == 1 and python_operations(end(numbers())) == 0


def test_a_dataset_without_a_graph_is_unknown_not_clean():
    for unknown in (iter([1]), [1, 2]):
        assert python_operations(unknown) is None and dataset_graph(unknown) is None
        assert with_parallel_calls(unknown, 4) is None
        assert stages(unknown) == stage_seconds(unknown) == [] and max_parallel_calls(unknown) == 1


def test_python_in_a_comment_is_not_found():
    def load(i): return i + 1   # not tf.numpy_function
    assert python_operations(numbers().map(load)) == 0
    assert {'RangeDataset', 'MapDataset', 'AddV2'} <= set(operations(dataset_graph(numbers().map(load))))


# Stages

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


@pytest.mark.parametrize('name, events, python, reads', [
    ('Map', (), False, False), ('Map', ('AddV2', 'EagerPyFunc'), True, False),
    ('Map', ('AddV2', 'ReadFile'), False, True),
    ('TFRecord', (), False, True), ('FlatMap', ('AddV2', 'TFRecordDataset'), False, True)])
def test_what_a_stage_does(name, events, python, reads):
    stage = Stage(name, None, None, None, events, 1)
    assert (stage.python, stage.reads) == (python, reads) and hash(stage)


# Time

@pytest.mark.parametrize('seconds, at_least, there, count', [
    (0., 4, 9, 4), (0., 2, 9, 2), (1., 1, 9, 2), (1.1, 1, 9, 3), (99., 1, 9, 6), (99., 4, 3, 3),
    (99., 4, 0, 0)])
def test_batches_are_fetched_until_their_time_or_number_is_over(monkeypatch, seconds, at_least, there, count):
    clock = Clock()
    monkeypatch.setattr(pipeline, 'time', clock)
    batches = clock.each([.5] * there)
    assert drain(batches, 6, seconds, at_least) == [.5] * count
    assert sum(1 for _ in batches) == max(0, there - count)


@pytest.mark.parametrize('seconds, expected',
                         [([], 0.), ([5.], 5.), ([9., 1., 3.], 2.), ([9., 8., 1., 3.], 2.)])
def test_the_first_half_does_not_count(seconds, expected): assert steady_mean(seconds) == expected


@pytest.mark.parametrize('n, elements, ticks',
                         [(2, 3, 0), (3, 3, 1), (5, 3, 1), (6, 3, 2), (4, 2, 2), (5, 1, 5)])
def test_a_tick_for_every_batch(n, elements, ticks):
    assert len(list(pipeline._ticks(numbers(n), elements))) == ticks


def test_each_beginning_of_a_pipeline_is_timed(monkeypatch):
    "Stages that only buffer are left out, and what stands before a filter, whose share is unknown."
    asked = []
    def timed(batches, at_most, seconds):
        asked.append((len(list(batches)), at_most, seconds))
        return [float(len(asked))]
    monkeypatch.setattr(pipeline, 'drain', timed)
    kept = numbers(12).map(lambda i: i).filter(lambda i: i > 1).map(lambda i: i)
    data = kept.batch(5).prefetch(2).repeat(1)
    found = stage_seconds(data.with_options(tf.data.Options()), 6., 7)
    assert [(s.name, seconds) for s, seconds in found] == [('Filter', 1.), ('Map', 2.), ('Batch', 3.)]
    assert asked == [(2, 7, 2.)] * 3   # ten numbers are two batches


def test_a_real_stage_is_seen_to_be_slow():
    slow = numbers(10**6).map(lambda i: tf_sleep(2000, i)).batch(4)
    (source, before), (stage, now), (end, after) = stage_seconds(slow, .2, batches=8)
    assert (source.name, stage.name, end.name) == ('Range', 'Map', 'Batch') and before < .5 * now
    assert after < 2 * now


def test_tensorflow_sleeps_twice_half_of_the_time(monkeypatch):
    asked, sleep = [], tf.raw_ops.SleepDataset
    monkeypatch.setattr(tf.raw_ops, 'SleepDataset',
                        lambda **how: asked.append(int(how['sleep_microseconds'])) or sleep(**how))
    out = tf_sleep(1001, {'a': tf.constant(3), 'b': [tf.ones(2)]})
    assert out['a'] == 3 and out['b'][0].shape == (2,) and asked == [500]


# Other numbers of calls

def calls_in(dataset) -> dict:
    "The fixed number of calls of each operation in the graph that has one."
    graph = dataset_graph(dataset)
    constants = {n.name: tf.make_ndarray(n.attr['value'].tensor) for n in graph.node
                 if n.op == 'Const' and n.attr['dtype'].type == tf.int64.as_datatype_enum}
    return {n.op: int(constants[n.input[CALLS_INPUT[n.op]]]) for n in graph.node if n.op in CALLS_INPUT}


def test_the_number_of_calls_stands_where_tensorflow_says():
    for op, at in CALLS_INPUT.items():
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
    assert host_part(changed)[1:] == ('/CPU:0', 3) and python_operations(changed) == 1
    assert 'MapDataset' not in operations(dataset_graph(changed))
    assert calls_in(changed) == {'ParallelMapDatasetV2': 4}
    same = with_parallel_calls(data, 4, above=1)   # what TensorFlow chooses is no fixed number
    assert 'MapDataset' in operations(dataset_graph(same)) and calls_in(same) == {'ParallelMapDatasetV2': -1}


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
    def threads(n, dataset):
        options = tf.data.Options()
        options.threading.private_threadpool_size = n
        return dataset.with_options(options)
    def same(i): return i
    parallel = numbers().map(same, num_parallel_calls=4).map(same, num_parallel_calls=3).batch(2)
    for data, at_most in ((numbers().map(same), 1),
                       (numbers().map(same, num_parallel_calls=tf.data.AUTOTUNE), 1),
                       (parallel, 4), (threads(3, parallel), 4), (on_device(threads(8, parallel)), 8),
                       ([1], 1)):
        assert max_parallel_calls(data) == at_most
