"What slows a program that was watched: the rules, `Diagnose` in `fit`, and scripts."
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from watched import calls, LINE, only, OTHER, seen, watched
from xtts_nb.config import UserError
from xtts_nb.monitor import program as page
from xtts_nb.monitor.program import (
    Diagnose, explain, find_beside, find_growth, find_made_in_loop, find_own_python, find_pipelines,
    find_single_rows, find_traces, watch_script)
from xtts_nb.monitor.seen import finding, gain_without, only_on_gpu, Seen, steady_part
from xtts_nb.monitor.watch import Event, Look, Place, Watch


@pytest.mark.parametrize('calls_made, rows, seconds, eager, is_found', [
    (5, 1, .5, 0, True), (4, 1, .5, 0, False), (5, 4, .5, 0, True), (5, 5, .5, 0, False),
    (5, 1, .2, 0, True), (5, 1, .19, 0, False), (5, 1, .5, 50, True), (5, 1, .5, 51, False)])
def test_a_row_at_a_time(calls_made, rows, seconds, eager, is_found):
    "Found from five calls, four rows and a tenth of the time on; not in a training that runs eagerly."
    asked = []
    network = lambda x: asked.append(len(x)) or tf.constant(0.)   # as fast for many rows as for one
    events = calls('layer', calls_made, 1., seconds, rows=rows) + calls('gradient', 3)
    last = {('layer', LINE): (network, '__call__', (np.ones((rows, 3)),), {})}
    if eager > 50:   # without a gradient it is no training
        part = seen(['eager'] * 100, events[:-1], last=last)
        assert page.find_eager_rows(part) and not find_single_rows(part)
    assert page.find_eager_rows(seen(['eager'] * eager + ['graph'] * (100 - eager), events, last=last)) == []
    found = find_single_rows(seen(['eager'] * eager + ['graph'] * (100 - eager), events, last=last))
    assert bool(found) == is_found
    if found:
        assert only(found).disease == 'one row at a time' and found[0].place == 'watched.py:3'
        assert set(asked) == {64 * rows} and found[0].predicted_gain > 1

@pytest.mark.parametrize('data, steps, is_found', [
    (lambda d: d, 2000, True), (lambda d: d.shuffle(9).map(lambda x, y: (x, y)), 2000, True),
    (lambda d: d, 900, False), (lambda d: d.batch(2), 2000, False),
    (lambda d: d.map(lambda x, y: x), 2000, False),
    (lambda d: d.map(lambda x, y: y), 2000, False)])
def test_a_dataset_that_was_never_batched(data, steps, is_found):
    "Steps of 5 ms, each of one row with its label; not those of 11 ms, nor single numbers or vectors alone."
    data = data(tf.data.Dataset.from_tensor_slices((np.ones((8, 3)), np.ones(8))))
    events = calls('next', steps, 10 / steps, .001)
    found = find_single_rows(seen(['graph'] * 95 + ['trace'] * 5, events, datasets={LINE: [data]}))
    assert bool(found) == is_found
    if not found: return
    assert only(found).disease == 'one row at a time' and 'takes 5.0 ms' in found[0].evidence
    assert found[0].predicted_gain == pytest.approx(1 / (1 - .95 * .9))
    assert found[0].place == 'watched.py:3'
    assert find_single_rows(seen([], events[:15], datasets={LINE: [data]})) == []
    assert find_single_rows(seen([], calls('call', 2000), loop=('call', LINE), datasets={LINE: [data]})) == []

def test_rows_that_cost_as_much_among_many_as_alone_are_left():
    asked = []
    def network(x):
        asked.append(len(x))
        time.sleep(.002 * len(x))
        return tf.constant(0.)
    events = calls('layer', 600, .01, .002, rows=1)   # 12 % of the time
    last = {('layer', LINE): (network, '__call__', (np.ones((1, 3)),), {})}
    assert find_single_rows(seen(['graph'] * 100, events, last=last)) == [] and set(asked) == {64}

def test_rows_of_several_calls_are_one_finding():
    "With `fit` for single steps among them; their shares add up."
    network = lambda x: tf.constant(0.)
    events = calls('layer', 5, 1., .5, rows=1) + calls('fits', 6, 1., .5, place=OTHER)
    last = {('layer', LINE): (network, '__call__', (np.ones((1, 3)),), {})}
    look = lambda steps: find_single_rows(seen(['graph'] * 100, events, last=last, loop=('fits', OTHER),
                                               fits=[SimpleNamespace(steps=steps)] * 3))
    found = only(look(1))
    assert found.place == 'watched.py:4'
    assert found.predicted_gain == pytest.approx(1 / (1 - .55 * .96), rel=.1)
    assert found.evidence.startswith('model.fit in line 4 is called 6 times with 1 step each, 500.0 ms a '
                                     'call; the model in line 3 is called 5 times')
    assert 'call model.fit once' in found.remedy and 'times with 2 steps' in only(look(2)).evidence
    assert only(look(3)).place == 'watched.py:3'   # the other call alone

@pytest.mark.parametrize('kind', ['model', 'optimizer', 'variable'])
def test_what_is_made_in_the_loop(kind):
    looks = ['trace'] * 40 + [(OTHER, 'eager')] * 10 + ['graph'] * 50
    made = calls(kind, 9, 1., place=OTHER)
    found = only(find_made_in_loop(seen(looks, made)))
    assert found.disease == page.MADE[kind] and found.place == 'watched.py:4'
    assert found.predicted_gain == pytest.approx(1 / (1 - .5 * .97))
    assert find_made_in_loop(seen(looks, made[:2])) == [] == find_made_in_loop(seen(['graph'] * 99, made))
    assert find_made_in_loop(seen(looks, made, loop=('fit', LINE))) == []
    # a model makes many at once, as it is built or compiled
    assert find_made_in_loop(seen(looks, calls(kind, 9, .24, place=OTHER))) == []
    assert find_made_in_loop(seen(looks, calls(kind, 9, .26, place=OTHER)))

def traced(step, values):
    for value in values: step(*value)
    return {id(step): step}

@pytest.mark.parametrize('values, cause', [
    ([(tf.zeros(2), n) for n in range(5)], 'retracing'), ([(tf.zeros(n), 0) for n in range(1, 6)],
    'variable shapes')])
def test_traces(values, cause):
    functions = traced(tf.function(lambda x, n: x + n), values)
    events = calls('call', 5, traced=True)
    found = only(find_traces(seen(['trace'] * 60 + ['graph'] * 40, events, functions=functions)))
    assert found.disease == cause and '60%' in found.evidence
    assert found.predicted_gain == pytest.approx(1 / .4)   # nothing is known of a call without a trace
    assert find_traces(seen(['trace'] * 60 + ['graph'] * 40, events[:2], functions=functions)) == []
    assert find_traces(seen(['trace'] * 60 + ['graph'] * 40, events[:3], functions=functions))
    assert find_traces(seen(['trace'] * 7 + ['graph'] * 93, events, functions=functions)) == []
    new = [Event('call', LINE, .1 * i, .01, traced=True, new=True) for i in range(5)]
    assert only(find_traces(seen(['trace'] * 60 + ['graph'] * 40, new))).disease.startswith('a new '
                                                                                            'tf.function')

def test_fit_that_traces_again():
    looks = ['trace'] * 60 + ['graph'] * 40
    found = only(find_traces(seen(looks, calls('fits', 9), loop=('fits', LINE))))
    assert found.disease == 'fit traces its step again' and 'compile() once' in found.remedy
    assert find_traces(seen(looks, calls('fits', 9) + calls('model', 3), loop=('fits', LINE))) == []

@pytest.mark.parametrize('kind, cause', [
    ('callback', 'a callback blocks'), ('save', 'saving the model blocks'),
    ('summary', 'summaries at each step')])
def test_what_is_done_beside_training(kind, cause):
    found = only(find_beside(seen([kind] * 40 + ['graph'] * 60)))
    assert found.disease == cause and '40%' in found.evidence
    assert found.predicted_gain == pytest.approx(1 / (.6 + .4 * .02))
    assert find_beside(seen([kind] * 11 + ['graph'] * 89)) == []

BLOCKS = '''
for x in data:
    loss = step(x)
    if n % 1 == 0:
        with writer.as_default():
            made = model(seed)
            summary.image(made)
        writer.flush()
    n += 1
'''

@pytest.mark.parametrize('line, expected', [(1, range(1, 2)), (6, range(5, 8)), (8, range(4, 9)),
                                            (9, range(9, 10))])
def test_the_block_of_a_line(tmp_path, line, expected):
    (tmp_path / 'a.py').write_text(BLOCKS)
    assert page._block(Place(str(tmp_path / 'a.py'), line)) == expected
    (tmp_path / 'b.py').write_text('%time x\n' + BLOCKS)
    assert page._block(Place(str(tmp_path / 'b.py'), line)) == range(line, line + 1)

def test_what_is_computed_for_summaries_is_their_cost(tmp_path):
    (tmp_path / 'a.py').write_text(BLOCKS)
    at = lambda line: Place(str(tmp_path / 'a.py'), line)
    looks = [(at(line), kind) for line, kind, many in (
        (7, 'summary', 20), (6, 'eager', 30), (8, 'eager', 10), (3, 'graph', 40)) for _ in range(many)]
    look = lambda *lines: only(find_beside(seen(looks, [Event('call', at(n), .1, .1) for n in lines])))
    found = look(3)
    assert found.disease == 'summaries at each step' and '50%' in found.evidence
    assert found.predicted_gain == pytest.approx(1 / (.5 + .5 * .02))
    assert '20%' in look(3, 6).evidence   # a step is in that block too

def test_python_of_the_program():
    found = only(find_own_python(seen(['own'] * 30 + [(OTHER, 'numpy')] * 20 + ['graph'] * 50)))
    assert found.place == 'watched.py:3' and '50%' in found.evidence and 'inside' in found.evidence
    assert found.predicted_gain == pytest.approx(1 / .55)
    assert find_own_python(seen(['own'] * 19 + ['graph'] * 81)) == []
    assert find_own_python(seen(['own'] * 20 + ['graph'] * 80))

def test_python_that_holds_the_lock_is_known_by_the_clock():
    "Looks come when it calls TensorFlow; between calls of 4 ms, one in 10 ms, is time that none shows."
    steps = calls('predict', 1000, .01, .004)
    looks = ['own'] * 5 + ['graph'] * 85 + ['eager'] * 10
    look = lambda looks, steps, loop='predict': find_own_python(seen(looks, steps, loop=(loop, LINE)))
    found = only(look(looks, steps))
    assert found.predicted_gain == pytest.approx(1 / (1 - .9 * .4994), rel=1e-3) and '50%' in found.evidence
    assert '50% at this line' in found.evidence and found.place == 'watched.py:3'
    assert look(['graph'] * 90 + ['eager'] * 10, steps) == []   # at which line?
    assert look(looks, calls('predict', 1000, .01, .008)) == []
    assert look(looks, calls('fit', 1000, .01, .004), 'fit') == [] == look(looks, steps[::60])
    fetches = [e for pair in zip(steps, calls('fetch', 1000, .01, .01)) for e in pair]
    assert look(looks, fetches) == []   # the wait for a result

@pytest.mark.parametrize('kind', ['next', 'call', 'predict', 'train_on_batch'])
def test_a_look_that_came_too_late_is_not_the_programs_time(kind):
    "While all cores compute, looks come when the step is over; the clock says how long the calls took."
    late = ['own'] * 40 + [(OTHER, 'numpy')] * 10 + ['graph'] * 50
    found = only(find_own_python(seen(late, calls(kind, 100, .1, .06))))
    assert '40% of the time' in found.evidence and '32% at this line' in found.evidence
    assert 'also' in found.evidence and found.predicted_gain == pytest.approx(1 / (1 - .396 * .9))
    assert find_own_python(seen(late, calls(kind, 100, .1, .087))) == []
    rare = ['own'] * 48 + [(OTHER, 'numpy')] * 2 + ['graph'] * 50
    assert 'also' not in only(find_own_python(seen(rare, calls(kind, 100, .1, .06)))).evidence
    assert find_own_python(seen(late, calls('layer', 100, .1, .1)))   # it may run the program's own lines

def test_one_pause_is_not_the_programs_habit():
    "As when Python collects its garbage for a second; two of them count."
    steps, looks = calls('call', 80, .1, .1), ['own'] * 20 + ['graph'] * 80
    assert find_own_python(seen(looks, steps)) == []   # the last two seconds of ten
    apart = [replace(e, start=e.start + (1. if i > 40 else 0.)) for i, e in enumerate(steps[:60])]
    assert seen(looks, apart).outside('call') == pytest.approx(.1)

def test_steps_that_take_longer_and_longer():
    starts = np.cumsum(np.linspace(.01, .05, 60))
    steps = [Event('next', LINE, t, .001) for t in starts]
    looks = ['graph'] * 60 + [(OTHER, 'eager')] * 120
    found = only(find_growth(seen(looks, steps)))
    assert found.disease == 'time grows' and found.place == 'watched.py:4'
    assert find_growth(seen(looks, calls('next', 60))) == [] == find_growth(seen(looks, steps[:20]))
    parts = np.repeat([.01, .02, .015, .025, .02, .03], 10)   # it goes up and down
    assert find_growth(seen(looks, [Event('next', LINE, t, .001) for t in np.cumsum(parts)])) == []
    slow = np.where(np.arange(400) % 4 == 0, np.linspace(.01, .2, 400), .005)   # what grows
    uneven = [Event('next', LINE, t, .001) for t in np.cumsum(slow)]
    assert 'takes 7.' in only(find_growth(seen(looks, uneven))).evidence
    periods = np.array([.01, .03, .01, *np.linspace(.01, .05, 57)])   # the second is an accident
    steps = [Event('next', LINE, t, .001) for t in [0., *np.cumsum(periods)]]
    assert 'takes 10.0 ms at first' in only(find_growth(seen(looks, steps))).evidence
    jump = np.cumsum([.01] * 40 + [.05] * 20)   # something came later, and stayed
    assert find_growth(seen(looks, [Event('next', LINE, t, .001) for t in jump])) == []

def test_what_grows_begins_anew_in_each_pass():
    "As what is collected in an epoch; the longest pass shows it."
    once = np.cumsum(np.linspace(.01, .05, 60))
    times = [*once[:40], *(2. + once), *(5. + once[:30])]
    steps = [Event('next', LINE, t, .001) for t in times]
    looks = [(OTHER, 'eager') if i % 100 > 20 else 'graph' for i in range(700)]
    found = only(find_growth(seen(looks, steps + [Event('end', LINE, t) for t in (1.99, 4.99)])))
    assert '11.4 ms at first and 43.9 ms at the end' in found.evidence and found.place == 'watched.py:4'
    assert find_growth(seen(looks, steps[:40] + [Event('end', LINE, t) for t in (.2, .4)])) == []

def test_operations_that_a_loop_adds_to_its_graph():
    runs = [Event('session', LINE, i * .1, .002 if i % 2 else .05, rows=100 + i // 2 * 3) for i in range(100)]
    look = lambda runs: page.find_added_operations(
        seen([(OTHER, 'eager')] * 10 + ['graph'] * 90, runs, loop=('session', LINE)))
    found = only(look(runs))
    assert found.place == 'watched.py:4' and 'from 100 to 247 operations' in found.evidence
    assert found.predicted_gain == pytest.approx(1 / (1 - (.1 + 49 * .048 / 10) * .98))
    assert look([replace(e, rows=100) for e in runs]) == []
    few = [replace(e, rows=100 + 3 * (i > 20) + 3 * (i > 40)) for i, e in enumerate(runs)]
    assert look(few) == []

def test_weights_that_are_copied_through_numpy():
    def look(n):
        watch = watched([(OTHER, 'graph')] * (100 - n))
        watch.looks += [Look(9., LINE, kind, 'Layer.set_weights') for kind in ('own', 'eager')]
        watch.looks += [Look(9., LINE, 'numpy', 'mean')] * (n - 2)   # between them
        return page.find_copied_weights(Seen(watch, 0., 10., ('next', LINE), []))
    found = only(look(30))
    assert found.predicted_gain == pytest.approx(1 / (1 - .3 * .9)) and found.place == 'watched.py:3'
    assert 'take 30% of the time' in found.evidence and look(14) == []
    assert page.find_copied_weights(seen(['own'] * 100)) == []

def test_what_the_time_went_into():
    part = seen(['graph'] * 70 + ['input'] * 26 + ['own'] * 4)
    said = 'of the 10.0 s that were watched: compiled steps 70%, waiting for batches 26%'
    assert page.time_spent(part, False) == said
    assert page.time_spent(part, True).endswith('; the limit is ' + page.SPENT['graph'][1])
    fit = seen(['graph'] * 90 + ['callback'] * 10, loop=('fit', LINE), fits=[SimpleNamespace(wait_share=.6)])
    assert 'waiting for batches 60%, compiled steps 30%, callbacks 10%' in page.time_spent(fit, False)
    assert 'the pipeline' in page.time_spent(fit, True)

def test_pipelines_that_are_built_again():
    made = [tf.data.Dataset.range(3).map(lambda x: x) for _ in range(5)]
    found = only(find_pipelines(seen(['trace'] * 30 + ['graph'] * 70, datasets={LINE: made})))
    assert found.disease == 'a pipeline is made in the loop'
    assert found.predicted_gain == pytest.approx(1 / .709)
    assert find_pipelines(seen(['trace'] * 30 + ['graph'] * 70, datasets={LINE: [made[0].take(2)] * 5})) == []

def test_an_evaluation_of_the_program_counts_and_that_of_fit_does_not():
    x, model = np.ones((8, 3), 'float32'), keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile('sgd', 'mse')
    with Watch() as watch:
        model.fit(x, x[:, :1], validation_data=(x, x[:, :1]), verbose=0)
        model.evaluate(x, x[:, :1], batch_size=2, verbose=0)
    assert [e.rows for e in watch.events if e.kind == 'evaluate'] == [8]

def test_a_model_of_several_inputs_is_made_while_it_is_watched():
    "A layer that joins them is called with a list of symbols of Keras, or of arrays of unlike shapes."
    with Watch() as watch:
        a, b = keras.Input((3,)), keras.Input((4,))
        joined = keras.layers.Concatenate()
        model = keras.Model([a, b], joined([a, b]))
        assert joined([np.ones((2, 3)), np.ones((2, 4))]).shape == (2, 7)
    assert model.output_shape == (None, 7)
    assert [e.rows for e in watch.events if e.kind == 'layer'][-1] == 2

@pytest.mark.parametrize('known, shapes, seconds, is_found', [
    (.004, 10, .05, True), (.004, 3, .05, True), (.004, 2, .05, False), (.02, 10, .05, True),
    (.021, 10, .05, False), (.004, 10, .019, False), (None, 10, .05, False)])
def test_what_xla_compiles_again(monkeypatch, known, shapes, seconds, is_found):
    "Ten calls in a second, and what one with a known shape takes."
    monkeypatch.setattr(page, 'again', lambda *_: known)
    step = tf.function(lambda x: x, jit_compile=True)
    def look(step):
        part = seen(['graph'] * 100, calls('call', 10, seconds=seconds),
                    last={('call', LINE): (step, '__call__', (), {})},
                    shapes={('call', LINE): {(i,) for i in range(shapes)}})
        part.begin, part.end = 0., 1.
        return page.find_compiled_again(part)
    found = look(step)
    assert bool(found) == is_found and look(tf.function(lambda x: x)) == []
    if found: assert only(found).predicted_gain == pytest.approx(1 / (1 - 10 * (seconds - known)))

def test_findings_of_a_gpu_come_last_and_none_is_below_its_noise(monkeypatch):
    sure = page.Finding('sure', '', '', 1.5, low=1.01, high=2.)
    unsure = page.Finding('unsure', '', '', 1.5, low=1., high=2.)
    hidden = only_on_gpu('hidden', '', '', 'a.py:1')
    monkeypatch.setattr(page, 'PROGRAM_RULES', (lambda s: [hidden], lambda s: [unsure], lambda s: [sure]))
    assert [f.disease for f in explain(watched(['own'] * 100))[0]] == ['sure', 'hidden']
    there = page.replace(sure, place='a.py:1')
    monkeypatch.setattr(page, 'PROGRAM_RULES', (lambda s: [there], lambda s: [hidden]))
    assert [f.disease for f in explain(watched(['own'] * 100))[0]] == ['sure', 'hidden']   # of the same line

@pytest.mark.parametrize('gain, low, high, expected', [
    (3., 2.9, 3.1, (1.2, 7.5)), (3., 1.2, 9., (1.2, 9.)), (3., 0., 0., (1.2, 7.5)),
    (1.3, 1.2, 1.4, (1., 3.25))])
def test_an_interval_holds_what_a_rule_leaves_out(monkeypatch, gain, low, high, expected):
    found = page.Finding('cause', '', '', gain, low=low, high=high)
    monkeypatch.setattr(page, 'PROGRAM_RULES', (lambda s: [found],))
    one = only(explain(watched(['own'] * 100))[0])
    assert (one.low, one.high) == pytest.approx(expected)

def test_a_cache_that_is_made_in_the_loop():
    data = tf.data.Dataset.range(9)
    look = lambda made, looks: find_pipelines(seen(looks, datasets={LINE: made}))
    found = only(look([data.cache().batch(2) for _ in range(4)], ['input'] * 50 + ['graph'] * 50))
    assert found.disease == 'a cache is made in the loop' and found.predicted_gain == pytest.approx(1 / .525)
    assert look([data.cache().batch(2) for _ in range(3)], ['input'] * 50 + ['graph'] * 50) == []
    four = [data.cache() for _ in range(4)]   # read twice each
    assert look(four * 2, ['input'] * 50 + ['graph'] * 50) == []
    assert look([*four, four[0]], ['input'] * 50 + ['graph'] * 50)
    anew = [tf.data.Dataset.range(9).cache() for _ in range(5)]   # the whole pipeline is built again
    assert only(look(anew, ['input'] * 50 + ['graph'] * 50)).disease == 'a cache is made in the loop'
    assert only(look(anew, ['input'] * 20 + ['trace'] * 30)).disease == 'a pipeline is made in the loop'
    assert look([data.cache().batch(2)] * 4, ['input'] * 50 + ['graph'] * 50) == []
    assert look([data.cache() for _ in range(4)], ['input'] * 9 + ['graph'] * 91) == []

def test_a_cache_that_each_fit_fills(monkeypatch):
    slow = tf.data.Dataset.range(4).map(lambda x: (tf.py_function(lambda: time.sleep(.05), [], []), x)[1])
    plain = tf.data.Dataset.range(4)
    def look(base, graph, made=5):
        twice = [d for _ in range(made) for d in [base.cache().batch(2)] * 2]
        steps = calls('fits', 10, 1., .9)
        return find_pipelines(seen(['graph'] * graph + ['eager'] * (100 - graph), steps, ('fits', LINE),
                                   datasets={LINE: twice}))
    assert look(plain, 60) == [] == look(slow, 60)   # nearly for nothing; Python of the program
    monkeypatch.setattr(page, 'python_operations', lambda dataset: ())
    found = only(look(slow, 60))
    assert found.disease == 'a cache is made in the loop' and '10 passes' in found.evidence
    assert .1 < 1 - 1 / found.predicted_gain < .6   # 10 x 200 ms and more, of 10 s
    assert only(look(slow, 12)).predicted_gain == pytest.approx(1 / (1 - .12 * .95), rel=.15)
    assert look(slow, 9) == [] == look(slow, 60, made=3)

def validation(share, build=lambda d: d, passes=3, batches=4, loop='fit'):
    "What is found of three validations in 10 s, that read 4 of 10 rows each."
    tests = [Event('validation', LINE, 3. * i, 10 * share / 3, rows=batches - i) for i in range(3)]
    data = build(tf.data.Dataset.range(10))
    return page.find_validation(seen([], tests, validated=[data] * passes, loop=(loop, LINE)))

@pytest.mark.parametrize('more, expected', [
    (calls('call', 100, place=OTHER), 'operations beside the step'), (calls('call', 19), 'step not compiled'),
    (calls('call', 20), 'operations beside the step'),
    (calls('train_on_batch', 100), 'operations beside the step'),
    (calls('call', 100) + calls('gradient', 1), 'step not compiled'), ([], 'step not compiled')])
def test_what_is_eager_beside_a_compiled_step(more, expected):
    looks = ['graph'] * 50 + [(OTHER, 'eager')] * 50
    found = only(page.find_eager(seen(looks, calls('next', 100) + more, eager_functions=lambda: [])))
    assert found.disease == expected and found.place == 'watched.py:4' and '@tf.function' in found.remedy
    assert ('beside the compiled step' in found.evidence) == (expected != 'step not compiled')

@pytest.mark.parametrize('updates, beside', [(30, False), (29, True)])
def test_an_update_outside_of_a_compiled_function_is_a_part_of_the_step(updates, beside):
    part = seen(['eager'] * (100 - updates) + ['graph'] * 50, calls('next', 9) + calls('call', 9))
    part.looks += [Look(1., LINE, 'eager', 'BaseOptimizer.apply_gradients')] * updates
    assert page._step_is_compiled(part) == beside

@pytest.mark.parametrize('reads, eager, share', [
    (400, 50, .6), (399, 50, None), (400, 5, .15), (4000, 50, .6)])
def test_values_that_are_read_one_by_one(reads, eager, share):
    "Of 1,000 looks some operate on single values, and one hundred wait for them, at the same line."
    looks = ['graph'] * (900 - 10 * eager) + [(OTHER, 'eager')] * (10 * eager) + [(OTHER, 'fetch')] * 100
    events = calls('next', 100) + calls('call', 100) + calls('fetch', reads, .002, place=OTHER)
    found = page._read_singly(seen(looks, events))
    assert bool(found) == bool(share)
    if not found: return
    assert found[0].disease == 'host sync for single values' and found[0].place == 'watched.py:4'
    assert found[0].predicted_gain == pytest.approx(gain_without(share, .05))
    assert f'{reads // 100} of them in each iteration' in found[0].evidence
    assert page.find_eager(seen(looks, events)) == (found if eager > 20 else [])

def test_without_a_loop_nothing_is_said_of_its_steps():
    "As in a program that calls `predict` once."
    watch = watched(['eager'] * 100, calls('call', 100) + calls('fetch', 400, .002))
    assert page.find_eager(Seen(watch, 0., 10., (), [])) == []

def test_validation_is_no_cost_of_short_epochs():
    fit = SimpleNamespace(steps=8, epochs=2, model=keras.Sequential())
    looks = ['graph'] * 500 + ['eager'] * 500
    look = lambda *tests: page.find_eager(seen(looks, [Event('validation', LINE, *t) for t in tests],
                                               fits=[fit], loop=('fit', LINE)))
    assert only(look()).disease == 'short epochs'
    assert look((5., 3.), (8., 1.1)) == [] and '21% of the time' in only(look((5., 1.5), (7., 1.4))).evidence

@pytest.mark.parametrize('known, each, shapes, is_found', [
    (.004, .01, 3, True), (.0041, .01, 3, False), (.001, .0031, 3, False), (.001, .0033, 3, True),
    (.001, .01, 2, False)])
def test_a_fit_that_xla_compiles_for_each_shape(monkeypatch, known, each, shapes, is_found):
    "A hundred steps, and 25 ms for the batch of each; ten batches had so many shapes."
    monkeypatch.setattr(page, 'tried', lambda call: call())
    fit = SimpleNamespace(model=SimpleNamespace(jit_compile=True), one=lambda batch: known * batch, batch=1,
                          wait_seconds=.025, shapes=[(i % shapes,) for i in range(10)])
    part = seen([], calls('fit', 100, seconds=each + .025), loop=('fit', LINE), fits=[fit])
    part.begin, part.end = 0., 1.6
    found = page.find_compiled_again(part)
    assert bool(found) == is_found
    if found: assert only(found).predicted_gain == pytest.approx(1 / (1 - 100 * (each - known) / 1.6))
    fit.model.jit_compile = False
    assert page.find_compiled_again(part) == []

@pytest.mark.parametrize('ragged', [False, True])
def test_a_fit_under_xla_whose_batches_come_late(ragged):
    "As `fit` is compiled on a GPU by default: only what has many shapes is compiled again."
    lengths = np.random.default_rng(0).permutation(np.arange(20, 120)) if ragged else np.full(100, 20)
    def rows():
        for n in lengths:
            time.sleep(.004)
            yield np.ones((4, n, 3), 'float32'), np.ones((4, 1), 'float32')
    spec = tf.TensorSpec((4, None, 3)), tf.TensorSpec((4, 1))
    model = keras.Sequential([keras.Input((None, 3)), keras.layers.GlobalAveragePooling1D(),
                              keras.layers.Dense(1)])
    model.compile('sgd', 'mse', jit_compile=True)
    callback = Diagnose(report=None)
    model.fit(tf.data.Dataset.from_generator(rows, output_signature=spec), steps_per_epoch=100,
              verbose=0, callbacks=[callback])
    causes = [f.disease for f in callback.findings]
    assert ('compiled again for each shape' in causes) == ragged, callback.findings

def test_a_rule_that_fails_takes_no_other_with_it(monkeypatch):
    def broken(seen): raise ValueError('odd')
    monkeypatch.setattr(page, 'PROGRAM_RULES', (broken, find_own_python))
    found, notes = explain(watched(['own'] * 100))
    assert [f.disease for f in found] == ['Python beside the step']
    assert notes == ['broken failed: ValueError: odd', 'of the 10.0 s that were watched: Python 100%']
    assert 'too short' in explain(watched(['own'] * 9))[1][0]

def test_of_findings_at_one_line_the_first_is_believed_or_one_of_twice_the_gain(monkeypatch):
    at = lambda gain, place: lambda seen: [finding(seen, f'{gain}', '', '', 1 - 1 / gain, place=place)]
    rules = at(1.19, LINE), at(2, LINE), at(3.9, LINE), at(4.5, LINE), at(3, OTHER)
    monkeypatch.setattr(page, 'PROGRAM_RULES', rules)
    assert [f.disease for f in explain(watched(['own'] * 100))[0]] == ['4.5', '3', '2']
    monkeypatch.setattr(page, 'PROGRAM_RULES', (at(1.21, LINE),))
    assert [f.disease for f in explain(watched(['own'] * 1000))[0]] == ['1.21']

SCRIPT = '''
import sys
import tensorflow as tf
@tf.function
def step(x, count): return tf.reduce_sum(tf.stack([x * i for i in range(40)])) + count
total = 0.
for i in range(int(sys.argv[1])): total = step(tf.ones(9), i)
print(float(total))
'''

def test_a_script_runs_as_it_would_and_is_explained(tmp_path, capsys):
    path, before = tmp_path / 'train.py', [*sys.argv]
    path.write_text(SCRIPT)
    watch = watch_script(path, ['25'])
    assert float(capsys.readouterr().out) == 24 + 9 * 780 and sys.argv == before
    found, _ = explain(watch)
    assert found[0].disease == 'retracing' and found[0].place == 'train.py:7'
    assert found[0].line.startswith('for i in range(int(sys.argv[1]))')
    assert 'tf.constant(count)' in found[0].change

def test_a_script_is_ended_when_enough_was_seen(tmp_path):
    path = tmp_path / 'long.py'
    path.write_text('import tensorflow as tf\nf = tf.function(lambda x: x + 1)\nx = tf.zeros(1)\n'
                    'try:\n    while True: x = f(x)\nexcept Exception: pass\n')
    start = time.perf_counter()
    watch = watch_script(path, seconds=1.)
    assert time.perf_counter() - start < 20 and len(watch.events) > 9
    path.write_text('while True: pass')   # a loop that nothing counts
    start = time.perf_counter()
    assert watch_script(path, seconds=.2).events == [] and 1.9 < time.perf_counter() - start < 15

def test_a_script_that_fails_is_named(tmp_path):
    (tmp_path / 'bad.py').write_text('raise ValueError("no data")')
    with pytest.raises(UserError, match='bad.py: failed while it was watched: ValueError: no data'):
        watch_script(tmp_path / 'bad.py')
    with pytest.raises(UserError,
        match='none.py: there is no such script'): watch_script(tmp_path / 'none.py')

def test_a_training_that_fails_is_let_go():
    "Keras calls no callback then; the next `fit` is watched as if nothing had been."
    from tensorflow.python.data.ops.iterator_ops import OwnedIterator
    plain, rows, failing = OwnedIterator.__next__, np.ones((64, 3), 'float32'), True
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if failing and batch == 3: raise RuntimeError('in the middle')
    model, callback = keras.Sequential([keras.layers.Dense(1)]), Diagnose(report=None)
    model.compile('sgd', 'mse')
    train = lambda: model.fit(rows, rows[:, :1], batch_size=4, verbose=0, callbacks=[callback, Fails()])
    with pytest.raises(RuntimeError, match='in the middle'): train()
    assert OwnedIterator.__next__ is not plain
    until = time.monotonic() + 30
    while OwnedIterator.__next__ is not plain and time.monotonic() < until: time.sleep(.05)
    assert OwnedIterator.__next__ is plain and callback.findings is None
    failing = False
    train()
    assert OwnedIterator.__next__ is plain and callback.findings is not None

def test_a_validation_is_watched_apart(capsys):
    "Its batches and its pipeline are not those of the training; `evaluate` alone is none."
    rows = tf.data.Dataset.from_tensor_slices((np.ones((64, 3), 'float32'), np.ones((64, 1), 'float32')))
    model, callback = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), Diagnose(report=None)
    model.compile('sgd', 'mse')
    model.evaluate(rows.batch(8), verbose=0, callbacks=[callback])
    assert callback.watch is None
    model.fit(rows.batch(2), validation_data=rows.cache().batch(8), validation_steps=3, epochs=3, verbose=0,
              callbacks=[callback])
    tests = [e for e in callback.watch.events if e.kind == 'validation']
    assert tests and all(e.rows == 3 and e.seconds > 0 for e in tests)
    (training,), validated = callback.watch.datasets.values(), callback.watch.validated
    stages_of = lambda dataset: [s.name for s in page.stages(dataset)]
    assert len(validated) == len(tests) and all('Cache' in stages_of(d) for d in validated)
    assert not any('Cache' in stages_of(d) for d in training) and not callback.watch.validating
    model.evaluate(rows.batch(8), verbose=0, callbacks=[callback])   # after the training
    assert len([e for e in callback.watch.events if e.kind == 'validation']) == len(tests)

def test_fit_is_watched_and_goes_on(capsys):
    def rows():
        for _ in range(600):
            time.sleep(.004)
            yield np.ones(3, 'float32'), np.ones(1, 'float32')
    kinds = tf.TensorSpec(3), tf.TensorSpec(1)
    data = tf.data.Dataset.from_generator(rows, output_signature=kinds).batch(4)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile('sgd', 'mse')
    lines = []
    diagnose = Diagnose(steps=40, seconds=2., report=lines.append)
    history = model.fit(data, epochs=1, verbose=0, callbacks=[diagnose])
    assert len(history.history['loss']) == 1 and not isinstance(model.train_function, page.FitPhases)
    assert diagnose.findings[0].disease == 'Python makes the batches' and diagnose.fit.wait_share > .5
    assert lines[0].startswith('1. Python makes the batches at test_program.py:')

def test_the_command_takes_a_script(ran, tmp_path):
    path = tmp_path / 'train.py'
    path.write_text(SCRIPT)
    result = ran(f'diagnose --json {path} 40')
    assert result.json['findings'][0]['disease'] == 'retracing' and result.json['notes'] is not None
    assert result.json['findings'][0]['place'] == 'train.py:7'
    refused = ran(f'diagnose --apply {path} 40')
    assert refused.code == 2 and 'only --seconds and --json act on a script' in refused.err

def test_an_error_that_the_end_of_the_watch_became(tmp_path):
    "C code that calls Python may make an error of its own of the end; one that came before stays."
    script = tmp_path / 'a.py'
    script.write_text("""
import tensorflow as tf, time
for x in tf.data.Dataset.range(10**9):
    try: time.sleep(.01)
    except BaseException: raise SystemError('bad argument to internal function')
""")
    assert watch_script(script, seconds=.5).events
    script.write_text(script.read_text().replace('time.sleep(.01)', '1 / 0'))
    with pytest.raises(UserError, match='SystemError: bad argument'): watch_script(script, seconds=60.)

@pytest.mark.parametrize('at, windows', [(20, 0), (30, 1)])
def test_a_fit_that_the_end_of_the_watch_meets(at, windows):
    "Its waiting is what was measured until then; where nothing was, the fit tells nothing."
    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == at: raise page.Enough
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile('sgd', 'mse')
    whole = keras.Model.fit
    with Watch() as watch, page.every_fit_watched(watch), pytest.raises(page.Enough):
        model.fit(np.zeros((160, 2)), np.zeros((160, 1)), batch_size=4, callbacks=[Ends()], verbose=0)
    (fit,) = watch.fits
    assert len(watch.windows) == windows and (fit.one is not None) == bool(windows)
    assert fit.steps == at and fit.epochs == 1 and keras.Model.fit is whole

@pytest.mark.parametrize('change, eager, is_found', [
    (lambda i: 0, 50, True), (lambda i: i, 50, False), (lambda i: 0, 19, False)])
def test_what_comes_out_the_same_in_each_iteration(change, eager, is_found):
    step, mask = tf.function(lambda x, y, n: tf.reduce_sum(x * y)), tf.ones((40, 40))
    with Watch() as watch:
        for i in range(20): step(tf.fill((40, 40), float(change(i))), mask, 3)
    part = steady_part(watch)
    part.looks = [Look(0., LINE, kind, '') for kind in ['eager'] * eager + ['graph'] * (100 - eager)]
    found = page.find_same_values(part)
    assert bool(found) == is_found
    if not found: return
    assert found[0].predicted_gain == pytest.approx(1 / (1 - .5 * .98)) and found[0].place == 'watched.py:3'
    assert '((40, 40))' in found[0].evidence and 'each of 18 calls' in found[0].evidence
    part.loop = ('fit', LINE)
    assert page.find_same_values(part) == []

@pytest.mark.parametrize('old, new, alike', [
    (3, 3, True), (3, 4, False), ('a', 'a', True), (None, None, True), ([1], [1], False),
    (np.ones(2), np.ones(2), True), (np.ones(2), np.ones(3), False), (np.ones(2), np.zeros(2), False),
    (tf.ones(2), tf.ones(2), True), (tf.ones(2), tf.ones(2, tf.float64), False), (tf.ones(2), 1., False)])
def test_arguments_as_values(old, new, alike): assert page._are_equal(old, new) == alike

def test_same_arguments_and_small_ones_say_nothing():
    step, x = tf.function(lambda x, y: tf.reduce_sum(x) + y), tf.ones((40, 40))
    with Watch() as watch:
        for _ in range(20): step(x, tf.constant(1.))
    part = steady_part(watch)
    part.looks = [Look(0., LINE, 'eager', '')] * 9
    assert page.find_same_values(part) == []

def test_a_fit_in_a_loop_is_seen_from_inside():
    "Of unknown length, so that only the fits before tell where its middle is."
    def slow(x): return tf.reduce_sum(tf.sort(tf.random.uniform((60_000,))))[None] + x
    rows = tf.data.Dataset.range(800).batch(20).filter(lambda i: i[0] >= 0).map(   # 20: no tiny batch
        lambda i: (slow(tf.ones((20, 1))), tf.ones((20, 1))))
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile('sgd', 'mse')
    with Watch() as watch, page.every_fit_watched(watch):
        for _ in range(4): model.fit(rows, verbose=0)
    assert watch.fits[0].wait_share == 0. < .3 < watch.fits[-1].wait_share
    found, _ = explain(watch)
    assert found[0].disease == 'single-threaded map'

@pytest.mark.parametrize('looks, seconds, judged', [(19, .49, False), (20, .49, True), (19, .5, True)])
def test_a_program_that_is_too_short_is_not_judged(monkeypatch, looks, seconds, judged):
    part = replace(seen(), end=seconds)
    part.looks = seen(['graph'] * looks).looks
    monkeypatch.setattr(page, 'steady_part', lambda watch: part)
    monkeypatch.setattr(page, '_asked', lambda rules, seen, notes: [])
    found, notes = explain(SimpleNamespace(windows=[]))
    assert found == [] and (page.TOO_SHORT in notes[0]) is not judged
    assert page.finding_lines(found, notes)[0] == ('Nothing to fix.' if judged else 'Not judged.')

def test_a_method_keeps_its_object():
    class Trainer:
        def __init__(self): self.w = tf.Variable(2.)
        @tf.function
        def step(self, x): return x * self.w
    def train():
        trainer = Trainer()
        for i in range(5): trainer.step(tf.constant(float(i)))
    with Watch() as watch: train()
    part = steady_part(watch)
    assert page.again(part, part.loop[1]) is not None   # its variable is still there
    assert only(watch.early.values())[0][0] == 2. and only(watch.last.values())[2][0] == 4.

def test_tracing_is_no_part_of_what_a_graph_saves(monkeypatch):
    monkeypatch.setattr(page, '_as_graph', lambda watch: .1)
    part = seen(['eager'] * 30 + ['own'] * 20 + ['trace'] * 40 + ['end'] * 10, calls('gradient', 9))
    assert only(page.find_eager(part)).predicted_gain == pytest.approx(1 / (.5 + .5 * .1))

@pytest.mark.parametrize('fits, steps, kinds, share', [
    (9, 5, {'end': 40, 'eager': 10}, .5), (10, 5, {'end': 40}, .4), (9, 5, {'end': 19}, None),
    (7, 5, {'end': 40}, None), (7, 5, {'end': 40, 'eager': 20}, .2), (9, 9, {'end': 40}, None)])
def test_how_passes_of_fit_end_is_a_cost_where_there_are_many(fits, steps, kinds, share):
    looks = [kind for kind, n in kinds.items() for _ in range(n)]
    model = SimpleNamespace(run_eagerly=False)
    some = [SimpleNamespace(steps=steps, epochs=1, model=model)] * 3
    part = seen(looks + ['graph'] * (100 - len(looks)), calls('fits', fits, 1., .9), ('fits', LINE),
                fits=some)
    found = page._epoch_cost(part)
    assert bool(found) == bool(share)
    if found: assert only(found).predicted_gain == pytest.approx(1 / (1 - share * .95))
