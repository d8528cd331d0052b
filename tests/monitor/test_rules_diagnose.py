"Rules: each on both sides of its thresholds, on measurements made by hand; no training runs."
import math
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from clock import Clock

from xtts_nb.bench import Arm, Comparison
from xtts_nb.monitor import diagnose as rules
from xtts_nb.config import setup_tf
from xtts_nb.monitor.diagnose import (
    MIN_GAIN, SMALL_FILE, Case, Finding, Measured, changed_arguments, matrix_products, merge_batches,
    ms, pad_to_few_shapes)
from xtts_nb.monitor.loop import Call, Stage, host_part, stages

setup_tf(threads=2)


def measured(**more):
    "Each batch takes 30 ms, the step 10 ms, one beside the other."
    return Measured(**dict(loop=.03, pipeline=.03, step=.01, compute=.01, first=1., batches=8, rows=4,
                           wait=.02) | more)

def case(some=(), dataset=(), resident=(), calls=(), graph=0, train=print, **more):
    "With the stages of the pipeline and their times, and the operations of its graph that call Python."
    return Case(dataset, train, measured(**more), list(resident), list(calls), list(some), graph)

def stage(name='Map', calls=None, *operations, elements=16):
    return Stage(name, None, calls, None, operations, elements)

READ, PYTHON = stage('Map', None, 'ReadFile'), stage('Map', None, 'EagerPyFunc')

@pytest.fixture
def trial(monkeypatch):
    "Three cores; a pipeline that is tried takes what the test puts into this list."
    seconds = []
    monkeypatch.setattr(rules, 'cores', lambda: 3)
    monkeypatch.setattr(rules, 'drain', lambda *_: [seconds.pop(0)])
    return seconds

@pytest.fixture
def tried(monkeypatch):
    "A step that is tried takes `seconds`; notes the `step` and the `batch`."
    note = SimpleNamespace(seconds=.002)
    def _trial_seconds(c, step, batch):
        note.step, note.batch = step, batch
        return note.seconds
    monkeypatch.setattr(rules, '_trial_seconds', _trial_seconds)
    return note

def gain(finding): return finding and finding.predicted_gain


# What the rules look at

def test_findings_are_json_and_compared_without_their_cure():
    with_cure, without = Finding('a', 'b', 'c', 1.236, cure=print), Finding('a', 'b', 'c', 1.236)
    assert with_cure.to_dict() == {'disease': 'a', 'evidence': 'b', 'remedy': 'c', 'predicted_gain': 1.24}
    assert len({with_cure, without}) == 1 and 'cure' not in repr(with_cure) and rules.ms(.0123) == '12.3 ms'


@pytest.mark.parametrize('times, pipeline, expected', [
    ([], 3., (None, 0.)), ([.5], 3., ('c', .5)), ([2., 1., 4.5, 4.75], 3., ('a', 2.5)),
    ([2., 1., 4.5], 2.25, ('a', 2.25)),
    ([3., 1., 2.], 3., ('c', 3.))])
def test_the_slow_stage_is_where_the_time_jumps(times, pipeline, expected):
    assert case(zip('cbad', times), pipeline=pipeline).slowest_stage == expected


# Findings about the input

@pytest.mark.parametrize('rule, change, expected', [
    ('find_python_in_pipeline', {}, None),
    ('find_python_in_pipeline', dict(graph=1, python=.02), 3.),
    ('find_python_in_pipeline', dict(graph=0, python=.01), 1.5),
    ('find_python_in_pipeline', dict(graph=1, some=[(PYTHON, .018)]), 2.5),
    ('find_python_in_pipeline', dict(graph=1, some=[(PYTHON, .015)], python=.01), 2.),
    ('find_python_in_pipeline', dict(graph=1, some=[(stage(), .02)], python=.01), 1.5),
    ('find_slow_disk', dict(some=[(READ, .015)]), 2.), ('find_slow_disk', {}, None),
    ('find_slow_disk', dict(some=[(stage(), .015)]), None),
    ('find_slow_disk', dict(some=[(stage('TFRecord'), .015)], busy=.49), 2.),
    ('find_slow_disk', dict(some=[(READ, .015)], busy=.5), None),
    ('find_slow_disk', dict(some=[(stage('Map', None, 'ReadFile', 'PyFunc'), .015)]), None),
    ('find_slow_disk', dict(some=[(READ, .02)], step=.031), None),
    ('find_slow_disk', dict(some=[(READ, .02)], step=.03, loop=.06, wait=.03), 1.5),
    ('find_small_files', dict(busy=1.), None),
    ('find_small_files', dict(some=[(stage(), .02)], busy=1.), None),
    ('find_small_files', dict(some=[(READ, .02)], busy=.5), 3.),
    ('find_small_files', dict(some=[(READ, .02)], busy=.49), None),
    ('find_small_files', dict(some=[(stage('Range'), .002), (READ, .012), (stage(), .03)], busy=1.), 1.5),
    ('find_small_files', dict(some=[(stage('Map', None, 'ReadFile', 'PyFunc'), .02)], busy=1.), None),
    ('find_small_files', dict(some=[(READ, .02)], busy=1., step=.031), None),
    ('find_small_files', dict(some=[(READ, .02)], busy=1., step=.03, loop=.06, wait=.03), 1.5),
    ('find_input_bound', {}, 3.)])
def test_rules_of_the_input(monkeypatch, rule, change, expected):
    monkeypatch.setattr(rules, 'opening_seconds', lambda size: 1.)
    c = case(resident=[np.zeros(1600, np.uint8)], **change)
    assert gain(getattr(rules, rule)(c)) == (expected and pytest.approx(expected))
    assert c.notes == c.unseen == []


def test_from_a_faster_disk_a_batch_still_has_to_be_computed(trial):
    "On three cores, of which a slow pipeline keeps less than half a core busy."
    look = lambda busy: gain(rules.find_slow_disk(case([(READ, .03)], busy=busy, step=.001, compute=.001)))
    assert look(.3) == pytest.approx(10, rel=.05) and look(.1) == pytest.approx(30, rel=.05)


def test_python_in_a_pipeline_without_cost_or_not_visible_is_a_note():
    c = case(graph=2)
    assert rules.find_python_in_pipeline(c) is None and not c.unseen
    (note,) = c.notes
    assert 'tf.numpy_function found in data pipeline! 2 operations' in note
    assert note.endswith('that costs nothing now.')
    blind = case(graph=None)
    assert rules.find_python_in_pipeline(blind) is None and not blind.notes
    assert blind.unseen == ['Python operations of the pipeline: its graph cannot be read']
    seen = rules.find_python_in_pipeline(case(graph=None, python=.02))   # by what it ran, not by its graph
    said = 'Unseen operations call Python (numpy_function, py_function or a generator), which ran 20.0 ms'
    assert said in seen.evidence


def test_opening_a_file_is_timed():
    assert 1e-6 < rules.opening_seconds(2000) < .01


def test_the_evidence_of_files(monkeypatch):
    monkeypatch.setattr(rules, 'opening_seconds', lambda size: 1.)
    c = case([(stage('Range'), .002), (stage('Map', 2, 'ReadFile', elements=64), .034), (stage(), .05)],
             resident=[{'x': np.zeros(6400, np.uint8), 'y': np.zeros(1600, np.float32)}], busy=1.)
    evidence = rules.find_small_files(c).evidence
    assert '64 files of about 0.2 kB' in evidence and '469 us each, 30.0 ms of 30.0 ms' in evidence
    for size, found in ((SMALL_FILE, True), (SMALL_FILE + 1, False)):
        c = case([(stage('Map', None, 'ReadFile', elements=4), .02)], resident=[np.zeros(4 * size, np.uint8)],
                 busy=1.)
        assert bool(rules.find_small_files(c)) == found
    monkeypatch.setattr(rules, 'opening_seconds', lambda size: size / 1e6)   # a quarter of its time
    c = case([(stage('Map', None, 'ReadFile', elements=4), .02)], busy=1.,
             resident=[np.zeros(5000, np.uint8)])
    assert '1250 us each, 5.0 ms of 30.0 ms' in rules.find_small_files(c).evidence
    c = case([(READ, .02)])
    assert 'Map reads files and waits 20.0 ms of the 30.0 ms' in rules.find_slow_disk(c).evidence
    assert 'a step 10.0 ms; stage Map takes 20.0 ms of it' in rules.find_input_bound(c).evidence
    assert rules.find_input_bound(case()).evidence == 'a batch takes 30.0 ms, a step 10.0 ms'


@pytest.mark.parametrize('some, more, expected', [
    # twelve calls at a time, or three where they compute
    ([(stage(), .018)], {}, 30 / (12 + 1.5)), ([(stage('ParallelMap', 1), .018)], {}, 30 / (12 + 1.5)),
    ([(stage(), .018)], dict(busy=.49), 30 / 13.5), ([(stage(), .018)], dict(busy=.5), 30 / 18),
    ([(READ, .018)], dict(busy=.5), 30 / 18), ([(READ, .018)], {}, None), ([(PYTHON, .018)], {}, None),
    ([], {}, None),
    ([(stage('Batch'), .018)], {}, None), ([(stage('ParallelMap', 4), .018)], {}, None),
    ([(stage(calls=-1), .018)], {}, None),
    ([(stage(), .018)], dict(step=.031, loop=.031), None), ([(stage(), .003)], {}, None),
    ([(stage(), .018)], dict(step=.03, loop=.06, wait=.03), 2.)])
def test_one_call_after_the_other(trial, some, more, expected):
    assert gain(rules.find_single_threaded_map(case(some, **more))) == (expected and pytest.approx(expected))


@pytest.mark.parametrize('cores, busy, calls, doing',
                         [(3, .2, 12, 'waits'), (5, .2, 16, 'waits'), (5, .9, 5, 'computes')])
def test_as_many_calls_as_help(trial, monkeypatch, cores, busy, calls, doing):
    monkeypatch.setattr(rules, 'cores', lambda: cores)
    found = rules.find_single_threaded_map(case([(stage(), .018)], busy=busy))
    assert found.remedy == f'num_parallel_calls={calls}' and f'{doing} 18.0 ms' in found.evidence
    assert found.cure((), print) is None   # no pipeline of TensorFlow


@pytest.mark.parametrize('seconds, expected', [(.012, 2.5), (.05, 1.)])
def test_more_calls_are_tried(trial, seconds, expected):
    trial.append(seconds)
    data = tf.data.Dataset.range(4).map(lambda i: i + 1)
    found = rules.find_single_threaded_map(case([(stage(), .018)], dataset=data))
    assert gain(found) == pytest.approx(expected)
    cured, step = found.cure(data, print)
    assert list(cured.as_numpy_iterator()) == [1, 2, 3, 4] and stages(cured)[-1].buffer == 2 and step is print


def test_more_calls_than_the_cores_can_bear(trial, monkeypatch):
    data = tf.data.Dataset.range(4).map(lambda i: i + 1, num_parallel_calls=24)
    for at_most, expected in ((23, None), (24, 3.)):
        trial[:] = .02, .01, .001
        monkeypatch.setattr(rules, 'max_parallel_calls', lambda dataset, at_most=at_most: at_most)
        found = rules.find_oversubscription(case(dataset=data))
        assert gain(found) == (expected and pytest.approx(expected))
    assert '24 calls or threads at a time on 3 cores; with 3 a batch takes 10.0 ms' in found.evidence
    cured, step = found.cure(data, print)
    assert list(cured.as_numpy_iterator()) == [1, 2, 3, 4] and step is print
    blind = case()
    assert rules.find_oversubscription(blind) is None and 'fewer calls at a time' in blind.unseen[0]


def test_threads_of_its_own_are_taken_from_a_pipeline_where_they_are_too_many():
    def with_threads(n):
        options = tf.data.Options()
        options.threading.private_threadpool_size = n
        return tf.data.Dataset.range(4).with_options(options)
    eight = with_threads(8)
    assert rules._own_threads(eight, 8) is eight and rules._own_threads([1], 4) == [1]
    assert rules._own_threads(eight, 7).options().threading.private_threadpool_size == 7
    plain = tf.data.Dataset.range(4)
    assert rules._own_threads(plain, 2) is plain


SOURCE = tf.data.Dataset.range(4).map(lambda i: i)

def test_batches_of_which_none_comes_later_than_a_step_do_not_oscillate():
    look = lambda pipeline: rules.find_missing_prefetch(case(
        dataset=SOURCE.prefetch(1), variation=.51, loop=.018, wait=.008, pipeline=pipeline))
    assert look(.0049) is None and look(.005).disease == 'oscillation'   # 2.02 times .005 s, a step .01 s
    short = lambda pipeline: rules.find_missing_prefetch(case(
        dataset=SOURCE.prefetch(1), variation=.51, loop=6e-4, step=1e-4, compute=1e-4, wait=5e-4,
        pipeline=pipeline))
    assert short(.0004) is None and short(.0005).disease == 'oscillation'   # not where no batch takes 1 ms

@pytest.mark.parametrize('dataset, more, disease, depth', [
    (SOURCE, {}, 'no prefetch', 2), ((), {}, 'no prefetch', 2), (SOURCE.prefetch(1), {}, None, None),
    (SOURCE.prefetch(1).map(lambda i: i), {}, 'no prefetch', 2),
    (SOURCE.prefetch(1).with_options(tf.data.Options()).repeat(), {}, None, None),
    (SOURCE.prefetch(2).take(3), {}, None, None), (SOURCE.repeat().prefetch(2).skip(1), {}, None, None),
    (SOURCE, dict(variation=.5), 'no prefetch', 2),
    (SOURCE.prefetch(1), dict(variation=.51, cycle=6, correlation=.9), 'oscillation', 12),
    (SOURCE, dict(variation=.6, cycle=2), 'oscillation', 4), (SOURCE, dict(variation=.6), 'oscillation', 4),
    (SOURCE, dict(loop=.01, wait=0.), None, None)])
def test_a_buffer_where_one_is_missing(dataset, more, disease, depth):
    c = case(dataset=dataset, **dict(loop=.018, pipeline=.008, wait=.008) | more)
    found = rules.find_missing_prefetch(c)
    assert (found and found.disease) == disease
    if not found: return
    assert gain(found) == pytest.approx(1.8) and found.remedy.startswith(f'prefetch({depth}) ')
    assert ('HIGH VARIATION' in found.evidence) == (disease == 'oscillation')
    assert (f'every {more.get("cycle")} batches' in found.evidence) == bool(more.get('cycle'))
    cured, _ = found.cure(dataset, print)
    assert cured is None if dataset == () else stages(cured)[-1].buffer == depth


def test_copies_that_the_pipeline_could_make(monkeypatch):
    "With a device that TensorFlow calls a GPU; a copy takes 2 ms of the step."
    c = case()
    assert rules.find_copy_bound(c) is None and c.unseen == ['copies to a device: there is no GPU']
    clock, copied = Clock(), []
    monkeypatch.setattr(rules, 'time', clock)
    monkeypatch.setattr(rules, 'wait_for', lambda xs: (copied.append(len(xs)), clock.sleep(.002)))
    monkeypatch.setattr(tf.config, 'list_logical_devices', lambda kind: [SimpleNamespace(name='/CPU:0')])
    monkeypatch.setattr(rules, 'prefetch_on_device', lambda *how: how)
    batch = tf.ones(3), tf.constant(['name']), np.ones(3)
    found = rules.find_copy_bound(case(dataset=SOURCE, resident=[batch], pipeline=.001, loop=.01, wait=0.))
    assert gain(found) == pytest.approx(10 / 8) and 'takes 2.0 ms of a step of 10.0 ms' in found.evidence
    assert set(copied) == {1}   # strings stay on the host, and NumPy copies by itself
    assert found.cure(SOURCE, print) == ((SOURCE, '/GPU:0', 2), print)
    there = SOURCE.apply(tf.data.experimental.prefetch_to_device('/CPU:0', 2))
    assert rules.find_copy_bound(case(dataset=there, resident=[batch])) is None


# Findings about the step

def called(function, *args, **kwargs):
    function(*args, **kwargs)
    return Call(function, args, kwargs, 0., False)

class Rate:
    "As a program makes one for each epoch."
    def __tf_tensor__(self, dtype=None, name=None): return tf.constant(1, dtype)

def traced(*calls):
    "A function traced for each of these arguments."
    function = tf.function(lambda x, rate, more=None: x * tf.cast(rate, tf.float32))
    return [called(function, *args, more={'a': tf.ones(2)}) for args in calls]

BY_VALUE = traced(*((tf.ones(2), i) for i in range(4)))
BY_OBJECT = traced(*((tf.ones(2), Rate()) for _ in range(4)))
BY_SHAPE = traced(*((tf.ones(n), tf.constant(1)) for n in (1, 2)))
BY_BOTH = traced(*((tf.ones(n), n) for n in (1, 2)))
ONCE = traced((tf.ones(2), tf.constant(1)))


def test_the_arguments_that_changed_are_named():
    (function,) = {c.function for c in BY_BOTH}
    changed = changed_arguments(function)
    assert list(changed) == ['x', 'rate'] and [len(v) for v in changed.values()] == [2, 2]
    assert list(changed_arguments(BY_VALUE[0].function)) == ['rate']
    assert changed_arguments(ONCE[0].function) == {}
    assert changed_arguments(BY_OBJECT[0].function).keys() == {'rate'}

@pytest.mark.parametrize('changed, what, change', [
    ({'x': ['TensorSpec()', 'TensorSpec(2)']}, None, None), ({}, None, None),
    ({'x': ['TensorSpec()', 'TensorSpec(2)'], 'rate': [f'Literal[{i}]' for i in range(4)]},
     'its argument rate is a Python value that changes: 0, 1, 2, ...', 'step(x, tf.constant(rate))'),
    ({'how': [f"Dict[['a', Literal[{i}.0]], ['b', TensorSpec()]]" for i in (1, 2)]},
     "its argument how is a Python value that changes: Dict[['a', 1.0], ['b', TensorSpec()]], "
     "Dict[['a', 2.0], ['b', TensorSpec()]], ...", 'step(x, tf.constant(how))'),
    ({'plan': ['Weakref[<weakref at 0x1; dead>])', 'Weakref[<weakref at 0x2; dead>])']},
     'its argument plan is an object that is new each time', 'step(x, tf.constant(rate))')])
def test_the_argument_of_python_is_named(changed, what, change):
    found = rules.python_argument(changed)
    assert (found and (found[0], found[2])) == (what and (what, change))


@pytest.mark.parametrize('calls, more, name, expected', [
    (BY_VALUE, dict(traces=1., traced=.005), 'rate', 1.5),
    (ONCE + BY_BOTH, dict(traces=1., traced=.005), 'rate', 1.5),
    (BY_OBJECT, dict(traces=1., traced=.005), 'object', 1.5),
    (BY_VALUE, dict(traced=.005), None, None), (BY_SHAPE, dict(traces=1.), None, None),
    (ONCE, dict(traces=1.), None, None),
    ([], dict(traces=1.), None, None)])
def test_retracing(calls, more, name, expected):
    found = rules.find_retracing(case(calls=calls, **dict(loop=.015, pipeline=.001, wait=0.) | more))
    assert gain(found) == (expected and pytest.approx(expected))
    if not found: return
    if calls is BY_OBJECT:
        assert found.evidence.endswith('because its argument rate is an object that is new each time')
        assert found.remedy == 'pass the numbers of rate as tensors instead of the object'
        return
    assert f'argument {name} is a Python value that changes: ' in found.evidence
    assert f'tf.constant({name})' in found.remedy
    if calls is BY_VALUE: assert found.evidence.endswith('changes: 0, 1, 2, ...')


@pytest.mark.parametrize('calls, more, expected', [
    (BY_SHAPE, dict(shapes=2, traced=.002, new_shapes=.004), 1.4),
    (ONCE, dict(shapes=3, traced=.004, new_shapes=.002), 1.4),
    (BY_SHAPE, dict(shapes=1, new_shapes=.004), None), (ONCE, dict(shapes=1, new_shapes=.004), None),
    (BY_VALUE, dict(shapes=3, new_shapes=.004), None),
    ([], dict(shapes=2, new_shapes=1.), 2.386)])   # at most 99 % of the loop
def test_variable_shapes(calls, more, expected):
    c = case(calls=calls, **dict(loop=.014, pipeline=.001, wait=0.) | more)
    found = rules.find_variable_shapes(c)
    assert gain(found) == (expected and pytest.approx(expected))
    if not found: return
    assert (', argument x: ' in found.evidence) == (calls is BY_SHAPE)
    assert f'{more["shapes"]} shapes in 16 batches' in found.evidence
    if calls: assert '4.0 ms per step' in found.evidence


def test_rebuilding_is_noted():
    c = case()
    assert rules.note_repeated_compilation(c) is None and c.notes == []
    c = case(rebuilt=4, rebuilding=.02)
    rules.note_repeated_compilation(c)
    assert c.notes[0].startswith('4 times ') and 'value, 5.0 ms each. What' in c.notes[0]


STEP = dict(loop=.012, pipeline=.004, wait=.002)   # half of the pipeline hides behind the step

@pytest.mark.parametrize('rule, more, expected', [
    ('find_host_sync', dict(STEP), None),
    ('find_host_sync', dict(STEP, compute=.004, syncs=2., sync=.005), 2.4),
    ('find_host_sync', dict(STEP, compute=.004, syncs=2., sync=.009), 3.),
    ('find_device_copy', dict(STEP, compute=.004, down=1e6, detour=.005), None),
    ('find_device_copy', dict(STEP, compute=.004, up=1e6, detour=.005), None),
    ('find_device_copy', dict(STEP, compute=.004, up=1e6, down=1e6, detour=.005), 12 / 7),
    ('find_device_copy', dict(STEP, compute=.004, up=1e6, down=1e6, detour=.009), 2.),
    ('find_python_in_step', dict(STEP, compute=.004, own=.005), 12 / 7),
    ('find_python_in_step', dict(STEP, compute=.004, own=.009), 2.),
    ('find_python_in_step', dict(STEP, compute=.004, own=.005, sync=.006), None),
    ('find_python_in_step', dict(STEP, compute=.004, own=.005, detour=.006), None),
    ('find_python_in_step', dict(STEP, compute=.004, own=.005, compiled=False), None),
    ('find_python_in_step', dict(STEP, compute=.004, own=.005, traces=1.), None),
    ('find_python_in_step', dict(STEP, own=.005), None),
    ('find_python_in_step', dict(loop=MIN_GAIN, pipeline=0., step=MIN_GAIN, compute=1., own=.05),
     MIN_GAIN / (MIN_GAIN - .05))])
def test_rules_of_the_step(rule, more, expected):
    c = case(**more)
    assert gain(getattr(rules, rule)(c)) == (expected and pytest.approx(expected)) and not c.notes


def test_what_costs_nothing_here_is_noted():
    for rule, more, said in ((rules.find_host_sync, dict(syncs=3., sync=1e-5),
                              ('3 results', 'on a GPU each one stops the pipeline')),
                             (rules.find_device_copy, dict(down=1e6, up=2e6, detour=1e-5),
                              ('1.0 MB leave the device and 2.0 MB',
                               'on a GPU each copy stops the pipeline'))):
        c = case(loop=.01, pipeline=.001, wait=0., **more)
        assert rule(c) is None
        (note,) = c.notes
        assert all(words in note for words in said), note


@pytest.mark.parametrize('rule', [
    'find_python_in_pipeline', 'find_single_threaded_map', 'find_missing_prefetch', 'find_host_sync',
    'find_device_copy'])
@pytest.mark.parametrize('promised, worth', [(MIN_GAIN, True), (math.nextafter(MIN_GAIN, 0), False)])
def test_a_gain_of_exactly_so_much_is_worth_a_change(trial, monkeypatch, rule, promised, worth):
    monkeypatch.setattr(rules, 'predict_gain', lambda m, **change: promised)
    c = case([(stage(), .02)], graph=1, syncs=1., down=1e6, up=1e6)
    assert bool(getattr(rules, rule)(c)) == worth
    noted = 'find_python_in_pipeline', 'find_host_sync', 'find_device_copy'
    assert len(c.notes) == (not worth and rule in noted)


# Trials

def test_a_trial_takes_the_better_of_two_runs(monkeypatch):
    periods, steps = [.02, .01, .001], []
    monkeypatch.setattr(rules, 'period', lambda some: periods.pop(0))
    assert rules._trial_seconds(case(), steps.append, 'batch') == .01
    assert steps == ['batch'] * 21   # once to compile, ten times in each run
    c = case()
    assert rules._trial_seconds(c, lambda batch: 1 / 0, 'batch') is None and not c.unseen
    monkeypatch.setattr(rules, 'time', Clock(5.))
    for deadline, late in ((5., False), (4.9, True)):
        c, periods[:] = case(), [.01, .01]
        c.deadline = deadline
        assert (rules._trial_seconds(c, steps.append, 'batch') is None) == late == bool(c.unseen)


def test_what_was_not_tried_has_not_failed(tried):
    c = case(resident=['batch'], calls=[PLAIN], **FULL | dict(compiled=False))
    c.deadline = -math.inf
    assert rules.find_uncompiled_step(c) is rules.find_missing_xla(c) is None
    assert c.unseen == ['some trials: no time was left for them'] and not vars(tried).get('step')


SAME, SCALAR = [tf.ones((4, 8))] * 5, [(tf.ones((4, 8)), tf.constant(1.))] * 4
FULL = dict(loop=.01, wait=0., pipeline=.001)   # the device computes all the time

@pytest.mark.parametrize('resident, seconds, more, expected', [
    (SAME, .0125, dict(FULL), 3.2), (SAME, .0125, dict(FULL, step=.011, loop=.011), 4 * 11 / 13.5),
    (SAME, .0125, dict(FULL, pipeline=.004), 2.5), (SAME, .0125, dict(FULL, first=5.), 3.2),
    (SAME, .0125, dict(FULL, first=5.1), None), (SAME, .0125, dict(FULL, compute=.005, loop=.01), 4 / 1.75),
    (SAME, .0125, dict(FULL, compute=.0049), None), (SAME[:1], .0125, dict(FULL, first=6.), None),
    (SAME[:3] + [tf.ones((3, 8))], .0125, dict(FULL), None), (SCALAR, .0125, dict(FULL), None),
    (SAME, .0125, dict(FULL, syncs=1.), None), (SAME, .0125, dict(FULL, traces=1.), None),
    (SAME, .0125, dict(FULL, compiled=False), None), (SAME, None, dict(FULL), None),
    (SAME, 1., dict(loop=.325, step=.325, compute=.325, wait=0., pipeline=.001), 1.3),
    (SAME, 1.001, dict(loop=.325, step=.325, compute=.325, wait=0., pipeline=.001), None)])
def test_batches_that_do_not_fill_the_device(tried, resident, seconds, more, expected):
    tried.seconds = seconds
    found = rules.find_tiny_batch(case(resident=resident, **more))
    assert gain(found) == (expected and pytest.approx(expected))
    if not found: return
    assert tried.step is print and tried.batch.shape == (16, 8) and '16 rows' in found.evidence
    assert 'of 16, ' in found.remedy
    bigger, step = found.cure(tf.data.Dataset.range(9).batch(2), print)
    assert [len(b) for b in bigger] == [8] and step is print


@pytest.mark.parametrize('own, compiled, seconds, expected', [
    (.0049, True, .002, None), (.005, True, .002, 2.4), (0., False, .002, 2.4), (0., False, None, None)])
def test_steps_that_are_not_compiled(tried, own, compiled, seconds, expected):
    tried.seconds = seconds
    c = case(resident=['batch'], loop=.012, pipeline=.004, wait=.002, own=own, compiled=compiled,
             train=lambda b: b + 1)
    found = rules.find_uncompiled_step(c)
    assert gain(found) == (expected and pytest.approx(expected))
    assert bool(c.unseen) == (not found and not compiled)
    if not found: return
    assert found.cure('data', print) == ('data', tried.step)
    assert tried.step(tf.constant(1)) == 2 and tried.batch == 'batch'


PLAIN = called(tf.function(lambda x, scale: tf.reduce_sum(x * scale)), tf.ones(3), scale=2.)
FUSED = called(tf.function(lambda x: x, jit_compile=True), tf.ones(1))
FROM_PYTHON = called(tf.function(lambda x: tf.numpy_function(lambda x: x, [x], tf.float32)), tf.ones(1))

@pytest.mark.parametrize('calls, more, expected', [
    ([PLAIN], {}, 10 / 4), ([PLAIN], dict(step=.012, loop=.012), 12 / 6), ([PLAIN], dict(first=5.), 10 / 4),
    ([PLAIN], dict(first=5.1), None), ([PLAIN], dict(compute=.005), 10 / 9),
    ([PLAIN], dict(compute=.0049), None),
    ([PLAIN], dict(traces=1.), None), ([FUSED], {}, None), ([PLAIN, PLAIN], {}, None), ([], {}, None)])
def test_steps_without_xla(tried, calls, more, expected):
    tried.seconds = .004
    c = case(resident=['batch'], calls=calls, **FULL | more)
    found = rules.find_missing_xla(c)
    assert gain(found) == (expected and pytest.approx(expected)) and not c.unseen
    if found: assert tried.batch == 'batch' and tried.step('batch') == 6.


def test_a_step_that_xla_refuses_is_reported_as_unseen():
    c = case(resident=[tf.ones(1)], calls=[FROM_PYTHON], **FULL)
    assert rules.find_missing_xla(c) is None and c.unseen == ['the step under XLA: its trial failed']


# The matrix products of a step

def test_products_are_counted_by_type_shape_and_way():
    w, wide = tf.ones((4, 4)), tf.ones((4, 4), tf.float64)
    inner = tf.function(lambda x: x @ w)
    middle = tf.function(lambda x: inner(inner(x)))
    outer = tf.function(lambda x: tf.linalg.matmul(middle(x) + inner(x), w, transpose_b=True))
    wider = tf.function(lambda x: tf.einsum('ij,jk->ik', x @ wide @ wide, wide) + tf.einsum('ij->ij', x) + x)
    stack = tf.function(lambda x: tf.linalg.matmul(x, x, adjoint_b=True))
    calls = [called(outer, tf.ones((2, 4))), called(wider, tf.ones((2, 4), tf.float64)),
             called(stack, tf.ones((5, 2, 4)))]
    for spec in ([None, 4], None):   # of unknown shape
        calls.append(called(tf.function(lambda x: tf.matmul(x, w), input_signature=[tf.TensorSpec(spec)]),
                            tf.ones((2, 4))))
    pair = ((2, 4), (4, 4))
    assert matrix_products(calls) == {
        tf.float32: {('MatMul', pair, (False, False)): 3,   # the innermost function is called three times
                     ('MatMul', pair, (False, True)): 1,
                     ('BatchMatMulV2', ((5, 2, 4), (5, 2, 4)), (False, True)): 1},
        tf.float64: {('MatMul', pair, (False, False)): 2, ('Einsum', pair, (b'ij,jk->ik',)): 1}}


@pytest.mark.parametrize('kind, a, b, how', [
    ('MatMul', (4, 2), (4, 3), (True, False)), ('MatMul', (2, 4), (3, 4), (False, True)),
    ('MatMul', (1, 4), (4, 1), (False, False)),
    ('BatchMatMulV2', (2, 3, 4), (2, 5, 4), (False, True)), ('Einsum', (2, 4), (4, 3), (b'ij,jk->ik',))])
def test_a_product_is_made_again(kind, a, b, how):
    product = rules._product((kind, (a, b), how), tf.float32)
    assert product() == product() == 4


def test_the_largest_products_are_made_as_often_as_the_step_makes_them(monkeypatch):
    monkeypatch.setattr(rules, '_product', lambda key, dtype: lambda: (key[0], dtype))
    some = {(n, ((n, 2), (2, 100 - n)), ()): 1 for n in range(1, 13)} | {('often', ((3, 1), (1, 1)), ()): 7}
    names, kinds = zip(*rules.product_runner(some, 'type')())
    # they hold 24, 22, 7 x 3, 20, ..., 4 numbers; the smallest is left out
    assert names == (12, 11, *['often'] * 7, *range(10, 1, -1)) and set(kinds) == {'type'}


PRODUCT = {kind: called(tf.function(lambda x: tf.reduce_sum(x @ x)), tf.ones((2, 2), kind))
           for kind in (tf.float32, tf.float64)}

@pytest.mark.parametrize('kind, gpu, times, more, expected', [
    (tf.float32, True, (.01, .004, .001), {}, 10 / 7), (tf.float32, True, (.01, .02, .01), {}, 2.),
    (tf.float32, True, (.01, .004, .001), dict(loop=1., step=1., compute=.3), 1 / .91),
    (tf.float32, True, (.01, .004, .001), dict(loop=1., step=1., compute=.299), None),
    (tf.float32, False, (.01, .004, .001), {}, None), (tf.float64, True, (), {}, None),
    (None, True, (), {}, None)])
def test_products_that_tensor_cores_could_do(monkeypatch, kind, gpu, times, more, expected):
    def compare(arms, unit, rounds):
        assert [arm() for arm in arms.values()] == [1, 1, 1]
        return Comparison([Arm(name, [2., t, 1.]) for name, t in zip(arms, times)], unit)
    monkeypatch.setattr(rules, 'compare', compare)
    monkeypatch.setattr(tf.config, 'list_logical_devices',
                        lambda kind: [SimpleNamespace(name='/GPU:0')] if gpu else [])
    c = case(calls=[PRODUCT[kind]] if kind else [], **FULL | more)
    found = rules.find_idle_tensor_cores(c)
    assert gain(found) == (expected and pytest.approx(expected))
    assert c.unseen == ([] if gpu else ['tensor cores: there is no GPU'])
    if not found: return
    assert (found.disease, found.remedy) == ('float32 on tensor cores', 'compute in bfloat16')
    assert '1 products' in found.evidence
    assert f'take {min(100, round(1e4 * times[1]))}% of' in found.evidence
    assert f'{times[2] / times[1]:.0%} of that' in found.evidence


# The same step in float32

@pytest.mark.parametrize('compiled', [False, True])
def test_a_step_in_float32_computes_the_same_on_copies(compiled):
    "Variables, a constant, a captured tensor, a function within, a branch, an integer beside."
    w, count = tf.Variable(tf.ones((2, 2), tf.float64)), tf.Variable(0)
    captured = tf.constant([.5, .25], tf.float64)
    inner = tf.function(lambda x: x @ w + captured)
    @tf.function(jit_compile=compiled)
    def step(x, more):
        y = tf.cond(more > 1, lambda: inner(x), lambda: x) * tf.constant([[1.5]], tf.float64)
        w.assign_add(tf.reduce_mean(y) * tf.ones((2, 2), tf.float64))
        count.assign_add(1)
        return {'y': y, 'n': more + 1}
    x, more = tf.constant([[1., 2.]], tf.float64), tf.constant(2)
    call = called(step, x, more)
    before, counted = w.numpy(), count.numpy()
    run = rules.in_float32(call)
    first, second = run(), run()
    assert np.array_equal(w.numpy(), before) and count.numpy() == counted   # those of the program stay
    now = step(x, more)
    assert [t.dtype for t in first] == [now['n'].dtype, tf.float32] and first[0] == now['n']
    assert np.allclose(first[1], now['y']) and np.allclose(second[1], step(x, more)['y'])


def test_what_is_no_variable_is_read_as_it_is():
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(['a'], tf.constant([3])), 0)
    step = tf.function(lambda x, name: x * 2 * tf.cast(table.lookup(name), tf.float64))
    (found,) = rules.in_float32(called(step, tf.constant([2.], tf.float64), tf.constant(['a'])))()
    assert found.dtype == tf.float32 and found == 12.


@pytest.mark.parametrize('times, more, expected', [
    ((.02, .005), {}, 4.), ((.01, .005), {}, 4 / 3), ((.04, .01), {}, 4.),   # compute is 20 ms of 20 ms
    ((.02, .005), dict(loop=.04, step=.04), 1 / .625), ((.02, .005), dict(loop=.1, step=.1), None)])
def test_numbers_that_are_wider_than_needed(monkeypatch, times, more, expected):
    def compare(arms, unit, rounds, warmup):
        assert [arm() > 0 for arm in arms.values()] == [True, True]
        return Comparison([Arm(name, [2., t, 1.]) for name, t in zip(arms, times)], unit)
    monkeypatch.setattr(rules, 'compare', compare)
    both, full = [PRODUCT[tf.float32], PRODUCT[tf.float64]], FULL | dict(loop=.02, step=.02, compute=.02)
    c = case(calls=both, **full | more)
    found = rules.find_float64(c)
    assert gain(found) == (expected and pytest.approx(expected))
    if found: assert found.disease == 'float64' and 'compute in float32' in found.remedy
    seconds = f'takes {ms(times[0])}, with the same operations in float32 {ms(times[1])}'
    if found: assert seconds in found.evidence
    for calls in ([], [PRODUCT[tf.float32]]): assert rules.find_float64(case(calls=calls, **FULL)) is None


@pytest.mark.parametrize('kind', [tf.float16, tf.bfloat16])
def test_half_precision_on_a_cpu(monkeypatch, kind):
    w = tf.Variable(tf.ones((2, 2)))
    step = tf.function(lambda x: tf.cast(x, kind) @ tf.cast(w, kind) * tf.constant(3, kind))
    half = called(step, tf.ones((1, 2)))
    (run,) = rules.in_float32(half, rules.HALF)()
    assert run.dtype == tf.float32 and run.numpy().tolist() == [[6., 6.]]
    def compare(arms, unit, rounds, warmup):
        assert [arm() > 0 for arm in arms.values()] == [True, True]
        return Comparison([Arm(name, [t]) for name, t in zip(arms, (.02, .005))], unit)
    monkeypatch.setattr(rules, 'compare', compare)
    given = FULL | dict(loop=.02, step=.02, compute=.02)
    found = rules.find_half_on_cpu(case(calls=[PRODUCT[tf.float32], half], **given))
    assert gain(found) == pytest.approx(4.) and found.disease == 'half precision on a CPU'
    assert 'takes 20.0 ms, with the same ones in float32 5.0 ms' in found.evidence
    assert rules.find_half_on_cpu(case(calls=[PRODUCT[tf.float32]], **given)) is None
    assert rules.find_float64(case(calls=[half], **given)) is None
    monkeypatch.setattr(rules.tf.config, 'list_logical_devices', lambda kind: [kind])
    assert rules.find_half_on_cpu(case(calls=[half], **given)) is None


def test_a_step_that_has_no_float32_is_reported_as_unseen(monkeypatch):
    monkeypatch.setattr(rules, 'in_float32', lambda call, kinds: 1 / 0)
    c = case(calls=[PRODUCT[tf.float64]], **FULL)
    assert rules.find_float64(c) is None and c.unseen == ['the step in float32: its trial failed']


# Cures

@pytest.mark.parametrize('make', [lambda i: {'x': tf.fill([3, 2], i)}, lambda i: (tf.fill([3, 2], i), i)])
def test_larger_batches_hold_the_same_rows(make):
    "Fourteen rows in twos make two batches of three times as many; the last batch is dropped."
    data = tf.data.Dataset.range(14).map(make).batch(2, drop_remainder=True)
    grown, rows = list(merge_batches(data, 3)), list(data)[:6]
    for i, _ in enumerate(tf.nest.flatten(rows[0])):
        have = [tf.nest.flatten(b)[i].numpy() for b in grown]
        assert [len(x) for x in have] == [6, 6]
        np.testing.assert_array_equal(np.concatenate(have),
                                      np.concatenate([tf.nest.flatten(b)[i] for b in rows]))
    there = data.apply(tf.data.experimental.prefetch_to_device('/CPU:0', 3))
    assert host_part(merge_batches(there, 3))[1:] == ('/CPU:0', 3)


@pytest.mark.parametrize('wrap', [lambda x, i: (x, i), lambda x, i: {'x': x, 'i': i}])
def test_rounded_shapes_are_few_and_nothing_is_cut(wrap):
    "The longest known batch has 20 columns: multiples of 5; a short axis and one of known length stay."
    def row(i): return wrap(tf.ensure_shape(tf.ones(tf.stack([3, i, i % 3 + 1])), [3, None, None]), i)
    ragged = tf.data.Dataset.range(1, 31).map(row)
    resident = [b for i, b in enumerate(ragged, 1) if i in (20, 3)]
    rounded = [tf.nest.flatten(b) for b in pad_to_few_shapes(ragged, resident)]
    for n, parts in enumerate(rounded, 1):
        (x,) = [x for x in parts if x.shape.rank]
        (i,) = [x for x in parts if not x.shape.rank]
        assert i == n and x.shape == (3, -(-n // 5) * 5, n % 3 + 1)
        assert np.all(x[:, :n] == 1) and np.all(x[:, n:] == 0)
    there = ragged.apply(tf.data.experimental.prefetch_to_device('/CPU:0', 3))
    assert host_part(pad_to_few_shapes(there, resident))[1:] == ('/CPU:0', 3)
    assert pad_to_few_shapes(iter(resident), resident) is None is merge_batches(resident, 3)   # no pipelines


def test_the_cure_of_variable_shapes_rounds_them():
    data = tf.data.Dataset.range(1, 9).map(lambda n: tf.ones([n]))
    found = rules.find_variable_shapes(case(resident=list(data), loop=.014, pipeline=.001, wait=0., shapes=2,
                                       new_shapes=.004))
    cured, step = found.cure(data, print)
    assert [len(b) for b in cured] == [2, 2, 4, 4, 6, 6, 8, 8] and step is print


# What a GPU would make of it

def call_of(function, *args): return SimpleNamespace(function=function, args=args, kwargs={})

def test_what_a_gpu_would_wait_for_is_noted():
    "Once for each function; products are the matter of another rule."
    def step(x): return tf.strings.length(tf.strings.as_string(x @ x))
    x, graph = tf.ones((3, 3)), tf.function(step)
    c = case(calls=[call_of(graph, x)] * 2)
    assert rules.note_for_a_gpu(c) is None
    (note,) = c.notes
    assert note.startswith('On a GPU, host operation: AsString at ') and 'test_rules_diagnose.py:' in note
    fine = case(calls=[call_of(tf.function(lambda x: x @ x), x)])
    assert rules.note_for_a_gpu(fine) is None and fine.notes == []
    assert rules.note_for_a_gpu in rules.STEP_RULES

def test_many_obstacles_are_counted():
    shuffle = tf.random.shuffle
    def many(x):
        a = shuffle(x)
        b = shuffle(x + 1)
        c = shuffle(x + 2)
        return a + b + c + shuffle(x + 3)
    c = case(calls=[call_of(tf.function(many), tf.ones((3, 3)))])
    rules.note_for_a_gpu(c, at_most=2)
    assert len(c.notes) == 3 and c.notes[-1] == 'On a GPU, 2 more; see `preflight`.'
