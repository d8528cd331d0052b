"Costs of an iteration: its parts, what a change would bring, and what a measurement adds up."
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
from clock import Clock

from xtts_nb.monitor import diagnose as costs
from xtts_nb.config import setup_tf
from xtts_nb.monitor.diagnose import (
    Measured, Round, compiled_by_shape, count_rebuilds, measure_training, one_round, predict_gain,
    repeat_if_finite)
from xtts_nb.monitor.loop import Call, SyncHooks, StepEvents, Iteration, host_part

setup_tf(threads=2)


def measured(**more):
    "Nothing hides behind anything: 8 s of a pipeline, then 10 s of a step."
    return Measured(**dict(loop=18., pipeline=8., step=10., compute=10., first=0., batches=20, rows=4,
                           wait=8.) | more)


# Parts and whole

@pytest.mark.parametrize('compute, traced_alone, expected', [(4., 0., 10.), (4., 2., 8.), (9., 2., 9.)])
def test_a_step_without_its_traces(compute, traced_alone, expected):
    assert measured(compute=compute, traced_alone=traced_alone).clean_step == expected


@pytest.mark.parametrize('more, expected', [
    ({}, 0.), (dict(loop=14.), .5), (dict(wait=4.), .5), (dict(loop=10.), 1.), (dict(loop=5.), 1.),
    (dict(loop=30., wait=20.), 0.),
    (dict(loop=18., traced=4.), .5), (dict(pipeline=16., loop=21., wait=99.), .5), (dict(pipeline=0.), 1.),
    (dict(loop=.7, pipeline=.25, step=.5, compute=.5, wait=.125), .5)])
def test_how_much_of_the_shorter_part_is_hidden(more, expected): assert measured(**more).overlap == expected


@pytest.mark.parametrize('more, change, expected', [
    ({}, {}, 1.), ({}, dict(pipeline=4.), 18 / 14), ({}, dict(step=5.), 18 / 13), ({}, dict(overlap=1.), 1.8),
    ({}, dict(overlap=.5), 18 / 14), ({}, dict(pipeline=-3.), 1.8), ({}, dict(traced=2.), .9),
    ({}, dict(pipeline=0., step=0.), 18e9),
    (dict(loop=20., traced=2.), dict(traced=0.), 20 / 18),
    (dict(loop=20., traced=2.), dict(pipeline=4.), 20 / 16),
    (dict(loop=10.), dict(overlap=1.), 1.), (dict(loop=10.), dict(pipeline=0.), 1.),   # it is hidden already
    (dict(loop=50., pipeline=0.), dict(pipeline=0.), 1.), (dict(loop=50., pipeline=0.), dict(step=5.), 2.)])
def test_what_a_change_would_bring(more, change, expected):
    assert predict_gain(measured(**more), **change) == pytest.approx(expected)


# What is measured

def test_what_ends_is_repeated():
    data = tf.data.Dataset.range(3)
    assert list(repeat_if_finite(data).take(7).as_numpy_iterator()) == [0, 1, 2, 0, 1, 2, 0]
    unknown, batches = data.filter(lambda i: i > 0), [1, 2]
    assert repeat_if_finite(unknown) is unknown and repeat_if_finite(batches) is batches
    there = data.apply(tf.data.experimental.prefetch_to_device('/CPU:0', 3))
    assert host_part(repeat_if_finite(there))[1:] == ('/CPU:0', 3)
    assert [int(i) for _, i in zip(range(4), repeat_if_finite(there))] == [0, 1, 2, 0]


def call(seconds, traced=False, function=None, new=False): return Call(function, (), {}, seconds, traced, new)
def iteration(begun, wait=0., used=0., ended=0., calls=(), shapes=(), **events):
    return Iteration(begun, wait, used, ended, StepEvents([call(*c) for c in calls], **events), shapes)


@pytest.mark.parametrize('calls, seconds, traces', [
    ([], 0., 0.), ([[]], 0., 0.), ([[(.5,)], [(.25,)]], 0., 0.), ([[(2., True)], [(3., True)]], 2.5, 1.),
    ([[(.25,), (2.5, True)], [(.75,)], [(.5,), (.25, True)], []], .5, .5)])
def test_what_tracing_adds(calls, seconds, traces):
    "Beyond the median of the other calls, half a second in the last case."
    assert costs._traced([iteration(0., calls=c) for c in calls]) == (seconds, traces)


@pytest.mark.parametrize('some, expected', [
    # (20 - 3.5) / 3, and (80 - 4) / 4
    ([('a', 1.)] * 4, 0.), ([], 0.), ([('a', 1.), ('a', 1.), ('b', 20.), ('a', 3.), ('b', 4.)], 5.5),
    ([(n, 20.) for n in range(8)], 19.), ([('a', 1.), ('a', 3.), ('b', 2.), ('a', 3.)], 0.)])
def test_what_new_shapes_cost_beyond_a_usual_call(some, expected):
    assert costs._new_shapes([iteration(0., used=s, shapes=name) for name, s in some], usual=1.) == expected


def test_what_was_built_again_after_the_first_call():
    xla, plain = SimpleNamespace(_jit_compile=True), SimpleNamespace(_jit_compile=False)
    library = SimpleNamespace(function=[])
    graph = SimpleNamespace(as_graph_def=lambda: SimpleNamespace(library=library))
    plain.get_concrete_function = lambda: SimpleNamespace(graph=graph)
    first = [call(9., True, xla, True), call(1., False, xla), call(5., False, xla, True),
             call(3., False, xla), call(1., True, xla)]
    assert count_rebuilds(first) == (2, 3.)        # 5 s and 1 s; a usual call takes 2 s
    always = [call(2., True, plain, True), call(3., True, plain, True), call(2.5, True, plain, True)]
    assert count_rebuilds(always) == (2, 1.5)      # no usual call: beyond the shortest
    other = [*always, call(9., False, plain, True), call(9., False, plain)]
    assert count_rebuilds([c for pair in zip(first, other) for c in pair]) == (4, 3.)
    assert count_rebuilds([]) == (0, 0.)


def test_xla_inside_a_function_is_compiled_by_shape():
    inner, eager = tf.function(lambda b: b * 2, jit_compile=True), tf.function(lambda b: b * 2)
    spec = [tf.TensorSpec([None])]
    outer = tf.function(lambda b: inner(b) + eager(b), input_signature=spec)
    plain = tf.function(lambda b: eager(b) + 1, input_signature=spec)
    for function, expected in ((inner, 1), (outer, 1), (plain, 0)):
        with SyncHooks() as hooks, hooks.step() as events:
            for n in (2, 3, 2): function(tf.ones(n))
        assert count_rebuilds(events.calls)[0] == expected
        assert compiled_by_shape(events.calls[0]) == bool(expected)


def test_a_round_measures_three_things_for_a_third_of_the_time_each(monkeypatch):
    "The pipeline runs Python for 2 s, and keeps one and a half cores busy."
    clock, asked, hooks = Clock(), [], SyncHooks()
    monkeypatch.setattr(costs, 'time', clock)
    def run_iterations(batches, step, at_most, seconds, hooks):
        asked.append((next(batches), step, at_most, seconds))
        hooks.python.append((0., 50.))
        return f'turns {len(asked)}'
    def drain(batches, at_most, seconds):
        asked.append((next(batches), at_most, seconds))
        hooks.python.extend([(0., 1.), (.5, 2.)])
        clock.sleep(2.)
        clock.cpu += 3.
        return pulls
    monkeypatch.setattr(costs, 'run_iterations', run_iterations)
    monkeypatch.setattr(costs, 'drain', drain)
    for pulls, python in (([1.] * 4, .5), ([2.], 2.), ([], 2.)):
        asked.clear()
        assert one_round([7], print, [8], 5, 12., hooks) == Round('turns 1', pulls, 'turns 3', python, 1.5)
        assert asked == [(7, print, 5, 4.), (7, 5, 4.), (8, print, 5, 4.)]


@pytest.mark.parametrize('took, computing, rounds, compute', [
    (5., [2., 1., .5], 2, 1.), (10., [1., 2.], 1, 1.), (5., [None, None], 2, None), (5., [None, 3.], 2, 3.)])
def test_a_measurement(monkeypatch, took, computing, rounds, compute):
    "Batches, a step of each, as many rounds as fit into 10 s, and what was compiled again in all of it."
    clock, asked, stepped = Clock(), [], []
    monkeypatch.setattr(costs, 'time', clock)
    def first_step(hooks, step, batch):
        stepped.append(batch)
        clock.sleep(.5)
        return StepEvents([call(4., True, function, True)])
    def one_round(dataset, step, resident, batches, seconds, hooks):
        asked.append((batches, seconds))
        clock.sleep(took - clock.now + 100)
        alone = [iteration(0., calls=[(s,)]) for s in (9., 9., len(asked))]
        return Round([iteration(0., calls=[(1., False, function)])], [], alone, 0., 0.)
    def patient_totals(*what): asked.append(what); return measured()
    function = SimpleNamespace(_jit_compile=True)
    monkeypatch.setattr(costs, 'first_batches', lambda dataset, many, timeout: list('abcdef')[:many])
    monkeypatch.setattr(costs, 'batch_of_each_shape', lambda data, *how: asked.append(how) or ['x', 'y'])
    monkeypatch.setattr(costs, '_first_step', first_step)
    monkeypatch.setattr(costs, 'one_round', one_round)
    monkeypatch.setattr(costs, 'compute_seconds', lambda calls: computing.pop(0))
    monkeypatch.setattr(costs, '_summed_up', patient_totals)
    m, resident, calls = measure_training([1], print, 7, 10., 3.)
    assert resident == list('abcd') and stepped == [*'abcd', 'x', 'y']
    assert [c.seconds for c in calls] == [1 + rounds]
    assert asked[:-1] == [(7, 10 / 6), *[(7, 5.)] * rounds]
    assert asked[-1][1:] == (list('abcd'), .5, compute) and len(asked[-1][0]) == rounds
    assert (m.rebuilt, m.rebuilding) == (5, 15.)   # six first steps, 4 s each; the function takes a second


def test_the_first_step_is_noted():
    double = tf.function(lambda b: b * 2)
    events = costs._first_step(SyncHooks(), lambda b: double(b).numpy(), tf.ones(1))
    assert [c.traced for c in events.calls] == [True]


def test_batches_are_let_go():
    "Beside the four that are ready and those under way, none stays; the calls keep what describes them."
    made, alive = [], []
    class Batches:
        def __iter__(self):
            while True:
                made.append(weakref.ref(x := tf.random.normal([4, 8])))
                yield x
    step = tf.function(lambda x: tf.reduce_sum(x))
    def watched(batch):
        result = step(batch)
        alive.append(sum(ref() is not None for ref in made))
        return result
    m, resident, calls = measure_training(Batches(), watched, 24, .2)
    assert len(made) > 12 and max(alive) <= 4 + 3   # resident; in hand, the one before, one of another shape
    assert any(calls[0].args[0] is x for x in resident)   # the last step can be called again


def loop(length, waits, traced=(), shapes='aaaaaa'):
    "Iterations begin every so many seconds; a compiled call takes half a second, or 2 s if it is traced."
    return [iteration(length * i, w, 4. if s == 'c' else 1., length * (i + 1),
                 [(.5,), *([(2., True)] if i in traced else [])], s)
            for i, (w, s) in enumerate(zip(waits, shapes))]

ALONE = [iteration(i, 0., used, i + 1., [(.25,), *([(2.25, True)] if i == 2 else [])],
              sync=sync, syncs=i, down=8 * i, up=4 * i, detour=.0625)
         for i, (used, sync) in enumerate(zip([9., 9., 4., .75, .75, .75], [9., 9., .125, .125, .25, .125]))]
FIRST = Round(loop(4., [9., 9., 1., 1., 1., 1.]), [5., 5., *[1.5, .5] * 4],
              [iteration(2. * i, ended=2. * i + 2) for i in range(6)], .1, .2)
LAST = Round(loop(3., [9., 9., 2., 1., 1., 1.], [4], 'ababac'), [9.] * 12, ALONE, .3, .4)


def test_the_best_of_the_rounds_is_summed_up():
    "By hand: the loop and the step of the last round and the pipeline of the first one were shortest."
    m = costs._summed_up([FIRST, LAST], [np.zeros((7, 2)), np.zeros((5, 2))], 3., .5)
    assert (m.loop, m.traced, m.traces, m.wait) == (3 - 1.5 / 4 + .5, .5, 1 / 3, 1.25)
    assert (m.pipeline, m.cycle, m.python, m.busy, m.variation) == (.9, 2, .1, .2, .5) and m.correlation > .9
    assert (m.step, m.compute, m.compiled, m.first, m.rows, m.batches) == (1., .5, True, 3., 7, 6)
    assert m.traced_alone == .5 and m.shapes == 3 and m.new_shapes == (4 - 1) / 3
    assert (m.sync, m.syncs, m.down, m.up, m.detour) == (.15625, 3.5, 28., 14., .0625)
    assert m.own == (4 - 2.5 - .125 - .0625 + 3 * (.75 - .25 - .125 - .0625) - .125) / 4


def test_a_single_round_of_a_step_that_is_not_compiled():
    alone = [iteration(i, 0., .125, i + 1., [(.25,)]) for i in range(6)]
    m = costs._summed_up([Round(LAST.loop, LAST.batch_seconds, alone, 0., 0.)], [np.zeros((7, 2))], 3., None)
    assert (m.loop, m.compute, m.compiled, m.own, m.cycle) == (3.125, 1., False, 0., 0)
    m = costs._summed_up([LAST], [7], 3., 2.)   # longer than the step that it is a part of
    assert (m.compute, m.rows) == (1., None)


def test_a_real_measurement_tells_the_parts_apart():
    "A step that fetches two results, on batches of two shapes, and a pipeline that runs Python."
    compiled = tf.function(lambda b: (tf.reduce_sum(b), tf.reduce_max(b)))
    rows = tf.data.Dataset.range(40).map(lambda i: tf.numpy_function(np.float32, [i], tf.float32))
    data = rows.map(lambda x: tf.ensure_shape(tf.fill([tf.cast(x, tf.int32) % 2 + 3, 4], x), [None, 4]))
    step = lambda b: [x.numpy() for x in compiled(b)]
    m, resident, calls = measure_training(data, step, batches=8, seconds=1.)
    assert (m.shapes, m.syncs, m.traces, m.rebuilt, m.compiled, m.rows, m.batches) == (2, 2, 0, 1, True, 3, 8)
    assert len(resident) == 4 and len(calls) == 1 and m.python > 0 and 0 < m.compute <= m.step
