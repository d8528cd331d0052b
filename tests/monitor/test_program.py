"What slows a program that was watched: the rules, `Diagnose` in `fit`, and scripts."
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from clock import Clock
from xtts_nb import bench
from xtts_nb.config import UserError
from xtts_nb.monitor import diagnose, program as page
from xtts_nb.monitor.program import (
    Diagnose, Seen, explain, find_beside, find_few_threads, find_growth, find_made_in_loop, find_own_python,
    find_pipelines, find_python_input, find_single_rows, find_tiny_steps, find_traces, finding, finding_lines,
    gain_without, steady_part, variables_put_back, watch_script)
from xtts_nb.monitor.watch import Event, Look, Place, PythonCall, Watch

LINE, OTHER = Place(__file__, 3), Place(__file__, 4)


def watched(looks=(), events=(), python=(), **more):
    "A watch of 10 s: the kind of each look, 100 a second, at one line."
    looks = [Look(i / 100, *(k if isinstance(k, tuple) else (LINE, k)), 'inside') for i,
        k in enumerate(looks)]
    given = dict(begun=0., ended=10., fits=[], windows=[], datasets={}, functions={}, last={}, shapes={},
                 validated=[], beside=[], same={})
    return SimpleNamespace(looks=looks, events=[*events], python=[*python], pipeline_place=lambda *_: None,
                           **given | more)

def seen(looks=(), events=(), loop=('next', LINE), **more) -> Seen:
    watch = watched(looks, events, **more)
    return Seen(watch, 0., 10., loop, [e for e in events if e.kind == loop[0]])

def calls(kind, count, every=.1, seconds=.01, place=LINE, **more):
    return [Event(kind, place, every * i, seconds, **more) for i in range(count)]

def only(found):
    (one,) = found
    return one


@pytest.mark.parametrize('takes, expected, made', [(.005, .095 / 13, 35), (.2, .23, 5), (.0002, .0005, 158)])
def test_a_short_call_is_timed_among_others(monkeypatch, takes, expected, made):
    "The first one after a pause takes 30 ms longer; as many follow as fill a tenth of a second, at most 100."
    clock, count, cold = Clock(), [0], [True]
    for where in (diagnose, bench): monkeypatch.setattr(where, 'time', clock)
    monkeypatch.setattr(diagnose, 'wait_for', lambda result: cold.append(True))
    def call():
        count[0] += 1
        clock.sleep(takes + .03 * bool(cold))
        cold.clear()
    assert page.seconds_of(call) == pytest.approx(expected) and count[0] == made

def test_the_main_loop_begins_with_its_third_call():
    events = calls('next', 20, .5) + calls('call', 60, .15, place=OTHER) + calls('predict', 2)
    part = steady_part(watched(['graph'] * 1000, sorted(events, key=lambda e: e.start)))
    assert part.loop == ('call', OTHER) and part.begin == pytest.approx(.3)   # nearly as long, and more often
    assert part.end == pytest.approx(59 * .15 + .01) and len(part.steps) == 58
    assert len(part.looks) == 857
    nothing = steady_part(watched(['own'] * 10))
    assert nothing.loop == () and (nothing.begin, nothing.end) == (0., 10.)
    fits = steady_part(watched([], calls('fits', 6, 1.) + calls('fit', 50)))
    assert fits.loop == ('fits', LINE) and fits.begin == 2.
    within = steady_part(watched([], calls('fit', 50), windows=[(1., 2.), (2., 4.05)]))
    assert within.loop == ('fit', LINE) and (within.begin, within.end) == (2.,
        4.05) and len(within.steps) == 21

def test_shares_and_lines():
    part = seen(['own'] * 10 + [(OTHER, 'own')] * 30 + ['graph'] * 60)
    assert part.share('own') == .4 and part.share('own', place=LINE) == .1 and part.share('own',
        'graph') == 1.
    assert part.places('own') == [(OTHER, .3), (LINE, .1)] and part.error(.5) == pytest.approx(.2)

@pytest.mark.parametrize('share, left, gain', [(.5, 0., 2.), (.5, .5, 4 / 3), (1., .25, 4.), (1., 0., 1000.)])
def test_a_gain_follows_from_a_share(share, left, gain): assert gain_without(share,
    left) == pytest.approx(gain)

def test_a_finding_has_an_interval_and_a_line():
    found = finding(seen(['own'] * 400), 'cause', 'evidence', 'remedy', .5, .2, LINE, 'a\nb')
    assert found.predicted_gain == pytest.approx(1 / .6) and found.low < found.predicted_gain < found.high
    assert found.place == 'test_program.py:3' and found.line == 'import time'
    lines = finding_lines([found], ['a note'])
    assert lines[0].startswith('1. cause at test_program.py:3: about 1.7 x as fast (')
    assert lines[1:] == ['   > import time', '   evidence.', '   Change: remedy.', '       a', '       b',
                         'Run it again after a change: the next cause may show only then.', 'Note: a note.']
    for high, shown in ((499.9, '(3.0 to 499.9)'), (500., '(3.0 or more)')):
        assert finding_lines([replace(found, low=3., high=high)], [])[0].endswith(shown)
    assert finding_lines([], []) == ['Nothing to fix.']
    assert {'place', 'line', 'change', 'gain_interval'} < found.to_dict().keys()

def test_variables_are_put_back():
    v = tf.Variable([1., 2.])
    with variables_put_back() as possible: v.assign([5., 5.])
    assert possible and v.numpy().tolist() == [1., 2.]
    with variables_put_back(most=0.) as possible: v.assign([5., 5.])
    assert not possible and v.numpy().tolist() == [5., 5.]

def test_a_variable_of_a_graph_is_left_alone():
    "As a program of the first TensorFlow has them; it has no value outside of its graph."
    with tf.Graph().as_default(): inside = tf.compat.v1.get_variable('inside', initializer=[1., 2.])
    v = tf.Variable(3.)
    with variables_put_back() as possible: v.assign(4.)
    assert possible and v.numpy() == 3. and inside.graph is not None

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
        assert only(found).disease == 'one row at a time' and found[0].place == 'test_program.py:3'
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
    assert found[0].place == 'test_program.py:3'
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
    assert found.place == 'test_program.py:4'
    assert found.predicted_gain == pytest.approx(1 / (1 - .55 * .96), rel=.1)
    assert found.evidence.startswith('model.fit is called 6 times with 1 step each, 500.0 ms a call; '
                                     'the model is called 5 times')
    assert 'call model.fit once' in found.remedy and 'times with 2 steps' in only(look(2)).evidence
    assert only(look(3)).place == 'test_program.py:3'   # the other call alone

@pytest.mark.parametrize('kind', ['model', 'optimizer', 'variable'])
def test_what_is_made_in_the_loop(kind):
    looks = ['trace'] * 40 + [(OTHER, 'eager')] * 10 + ['graph'] * 50
    made = calls(kind, 9, 1., place=OTHER)
    found = only(find_made_in_loop(seen(looks, made)))
    assert found.disease == page.MADE[kind] and found.place == 'test_program.py:4'
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

@pytest.mark.parametrize('rows, looks, alike, is_found', [
    (4, {'graph': 100}, True, True), (16, {'graph': 100}, True, True), (17, {'graph': 100}, True, False),
    (4, {'input': 60, 'graph': 40}, True, True), (4, {'input': 61, 'graph': 39}, True, False),
    (4, {'save': 30, 'graph': 70}, True, True), (4, {'save': 31, 'graph': 69}, True, False),
    (4, {'trace': 31, 'graph': 69}, True, False), (4, {'eager': 31, 'graph': 69}, True, False),
    (4, {'summary': 31, 'graph': 69}, True, False), (4, {'callback': 60, 'graph': 40}, True, True),
    (4, {'graph': 100}, False, False)])
def test_steps_of_few_rows(monkeypatch, rows, looks, alike, is_found):
    "Found where a batch of 64 rows takes less than 0.45 of what as many small ones take."
    monkeypatch.setattr(page, 'seconds_of', lambda call: float(call()))
    step = tf.function(lambda x: tf.constant(.1) if alike else tf.size(x, tf.int64) / (30 * rows))
    events = calls('call', 100)
    last = {('call', LINE): (step, '__call__', (tf.zeros((rows, 3)),), {})}
    looks = [kind for kind, count in looks.items() for _ in range(count)]
    found = find_tiny_steps(seen(looks, events, loop=('call', LINE), last=last))
    assert bool(found) == is_found
    if not found: return
    assert found[0].disease == 'tiny batch' and 'of 64 rows 100.0 ms' in found[0].evidence
    assert found[0].predicted_gain == pytest.approx(64 / rows, rel=.05) and 'batch(64)' in found[0].change

@pytest.mark.parametrize('name, given, rows, seconds, takes, is_found', [
    ('evaluate', {'batch_size': 1}, 4, .1, .5, True), ('predict', {'batch_size': 16}, 64, .1, .01, True),
    ('predict', {'batch_size': 17}, 640, .1, .01, False), ('evaluate', {}, 640, .1, .01, False),
    ('evaluate', {'batch_size': 1}, 3, .1, .01, False),
    ('predict_on_batch', {'batch_size': 1}, 9, .1, .01, False),
    ('evaluate', {'batch_size': 1}, 4, .0199, .01, False),
    ('evaluate', {'batch_size': 1}, 4, .1, .51, False)])
def test_an_evaluation_in_small_batches(monkeypatch, name, given, rows, seconds, takes, is_found):
    "Five calls, of ten seconds each at most; in batches of 256 rows a call takes a share of that."
    asked = []
    model = SimpleNamespace(**{name: lambda *args, **named: asked.append((args, named))})
    monkeypatch.setattr(page, 'tried', lambda call: call() or 10 * seconds * takes)
    kind = name.removesuffix('_on_batch')
    part = seen([], calls(kind, 10, seconds=10 * seconds, rows=rows),
                last={(kind, LINE): (model, name, ('x',), given)})
    part.begin, part.end = 0., 100 * seconds if seconds == .1 else 10.
    found = page.find_small_evaluation(part)
    assert bool(found) == is_found
    if not found: return
    assert asked == [(('x',), {'batch_size': 256, 'verbose': 0})] and only(found).place == 'test_program.py:3'
    assert found[0].predicted_gain == pytest.approx(1 / takes, rel=.15)
    assert f'{rows} rows in batches of {given["batch_size"]}, and takes 100%' in found[0].evidence

def test_callbacks_that_somebody_chose():
    named = lambda name: Look(0., LINE, 'callback', 'inside', name)
    part = seen([])
    part.looks = [*map(named, ('', 'CallbackList', 'History', 'ProgbarLogger', 'Own', 'EarlyStopping')),
                  Look(0., LINE, 'graph', 'inside', 'Own'), Look(0., LINE, 'graph', 'inside')]
    assert page._callbacks(part) == 2 / 8 and page._callbacks(seen([])) == 0

@pytest.mark.parametrize('loop, is_found', [('call', False), ('fit', True)])
def test_what_keras_does_at_each_step_is_a_cost_of_the_step(monkeypatch, loop, is_found):
    monkeypatch.setattr(page, 'seconds_of', lambda call: float(call()))
    step = tf.function(lambda x: tf.constant(.01))
    part = seen(['eager'] * 60 + ['graph'] * 40, calls(loop, 100), loop=(loop, LINE),
                last={('call', LINE): (step, '__call__', (tf.zeros((4, 3)),), {})})
    part.events += calls('call', 100)
    assert bool(find_tiny_steps(part)) == is_found

def test_a_program_without_a_loop_has_no_tiny_steps(): assert find_tiny_steps(seen(['own'], loop=())) == []

def test_few_rows_whose_pipeline_takes_its_time_for_each(monkeypatch):
    "What a row takes before the step stays, in larger batches too; arguments may have names."
    monkeypatch.setattr(page, 'seconds_of', lambda call: float(call()))
    step, rows = tf.function(lambda x: tf.constant(.1)), tf.data.Dataset.range(9)
    def look(waits, *pipelines):
        part = seen(['input'] * waits + ['graph'] * (100 - waits), calls('call', 100), loop=('call', LINE),
                    last={('call', LINE): (step, '__call__', (), {'x': tf.zeros((4, 3))})},
                    datasets={LINE: [*pipelines]})
        return find_tiny_steps(part)
    paths = rows.map(tf.strings.as_string)
    reads = paths.map(tf.io.read_file)
    assert [page.works(d) for d in (rows, paths, reads)] == [False, False, True]
    python = rows.map(lambda i: tf.numpy_function(lambda i: i, [i], tf.int64))
    assert page.works(python) and only(look(50, paths)).predicted_gain == pytest.approx(16, rel=.05)
    assert only(look(35, reads)).predicted_gain == pytest.approx(1 / (1 / 16 + .35), rel=.05)
    assert look(50, reads) == []

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

def test_passes_that_end_with_a_wait():
    steps, ends = calls('next', 40), calls('end', 5, 2., .3)
    found = only(page.find_ended_passes(seen(['graph'] * 100, steps + ends)))
    assert found.disease == 'each pass ends with a wait' and found.place == 'test_program.py:3'
    assert '5 passes' in found.evidence and '300.0 ms' in found.evidence and '15%' in found.evidence
    assert found.predicted_gain == pytest.approx(1 / (.85 + .15 * .03))
    assert page.find_ended_passes(seen([], steps + calls('end', 5, 2., .2399))) == []
    assert page.find_ended_passes(seen([], calls('end', 1, 2., 3.))) == []
    # one of four waited: what the next ones do is not known; with all of them it is
    one = calls('end', 3, 1., 0.) + calls('end', 1, seconds=2.)
    assert page.find_ended_passes(seen([], steps + one)) == []
    assert page.find_ended_passes(seen([], steps + calls('end', 4, 2., .5)))

def test_python_of_the_program():
    found = only(find_own_python(seen(['own'] * 30 + [(OTHER, 'numpy')] * 20 + ['graph'] * 50)))
    assert found.place == 'test_program.py:3' and '50%' in found.evidence and 'inside' in found.evidence
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
    assert '50% at this line' in found.evidence and found.place == 'test_program.py:3'
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
    assert found.disease == 'time grows' and found.place == 'test_program.py:4'
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
    assert '11.4 ms at first and 43.9 ms at the end' in found.evidence and found.place == 'test_program.py:4'
    assert find_growth(seen(looks, steps[:40] + [Event('end', LINE, t) for t in (.2, .4)])) == []

def test_operations_that_a_loop_adds_to_its_graph():
    runs = [Event('session', LINE, i * .1, .002 if i % 2 else .05, rows=100 + i // 2 * 3) for i in range(100)]
    look = lambda runs: page.find_added_operations(
        seen([(OTHER, 'eager')] * 10 + ['graph'] * 90, runs, loop=('session', LINE)))
    found = only(look(runs))
    assert found.place == 'test_program.py:4' and 'from 100 to 247 operations' in found.evidence
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
    assert found.predicted_gain == pytest.approx(1 / (1 - .3 * .9)) and found.place == 'test_program.py:3'
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

def test_python_that_makes_the_batches():
    python = [PythonCall(i * .1, i * .1 + .08, LINE, 'load') for i in range(100)]
    found = only(find_python_input(seen(['input'] * 70 + ['graph'] * 30, python=python)))
    assert found.disease == 'Python makes the batches' and '80%' in found.evidence and '70%' in found.evidence
    assert found.evidence.startswith('a Python function') and found.place == 'test_program.py:3'
    assert found.predicted_gain == pytest.approx(1 / (.3 + .01 * .7), rel=.01)   # the step is not timed
    little = [c._replace(end=c.start + .03) for c in python]   # waiting is not all its own
    found = only(find_python_input(seen(['input'] * 70 + ['graph'] * 30, python=little)))
    assert found.low == pytest.approx(1 / (1 - .9 * .3)) and found.high > 3
    made = [c._replace(name='generator_py_func') for c in python]
    found = only(find_python_input(seen(['input'] * 70 + ['graph'] * 30, python=made)))
    assert found.evidence.startswith('a Python generator makes rows or batches 80%')
    assert find_python_input(seen(['input'] * 9 + ['graph'] * 91, python=python)) == []
    assert find_python_input(seen(['input'] * 70 + ['graph'] * 30)) == []
    for seconds, count in ((1., 1), (.99, 0)):   # of ten
        once = [PythonCall(0., seconds, LINE, 'load')]
        assert len(find_python_input(seen(['input'] * 70 + ['graph'] * 30, python=once))) == count

def test_a_pipeline_whose_python_traces():
    python = [PythonCall(i, i + .9, LINE, 'generator_py_func') for i in range(10)]
    other = lambda kinds: [Look(i / 10, LINE, kind, '') for i, kind in enumerate(kinds)]
    look = lambda kinds: only(find_python_input(seen(['input'] * 80 + ['graph'] * 20, python=python,
                                                     beside=other(kinds))))
    found = look(['trace'] * 40 + ['graph'] * 20 + ['own'] * 40)
    assert found.disease == 'retracing in the pipeline' and '40% of its time' in found.evidence
    assert found.predicted_gain == pytest.approx(1 / (.2 + .8 * (.6 - .18)))
    assert look(['trace'] * 30 + ['own'] * 70).disease == 'Python makes the batches'
    before = [Look(-1., LINE, 'trace', '')] * 90   # of the time that is judged
    assert look([*'ab']).disease == 'Python makes the batches'
    part = seen([], beside=before + other(['trace', 'own', 'own', 'own']))
    assert part.beside('trace') == .25 and seen([], beside=before).beside('trace') == 0

@pytest.mark.parametrize('line, cause', [
    ('x = np.load(path)', 'many small files read in Python'),
    ('x = imread(path)', 'many small files read in Python'),
    ("f = gzip.open(path, 'rb')", 'compressed files read in Python'),
    ('x = loads(text)', 'Python makes the batches'),
    ("x = np.load('all.npz')['x']", 'compressed files read in Python')])
def test_a_line_of_the_pipeline_that_reads_files(tmp_path, line, cause):
    (path := tmp_path / 'train.py').write_text(f'{line}\n')
    python = [PythonCall(i * .1, i * .1 + .08, LINE, 'load') for i in range(100)]
    part = seen(['input'] * 60 + ['graph'] * 40, python=python)
    part.watch.pipeline_place = lambda *_: Place(str(path), 1)
    found = only(find_python_input(part))
    assert found.disease == cause and found.line == line and found.place == 'train.py:1'
    if 'read' in cause: assert found.predicted_gain == pytest.approx(1 / (1 - .6 * .95))
    assert ('uncompressed' in found.remedy) == cause.startswith('compressed')

def test_a_cache_inside_of_interleave():
    read = lambda i: tf.data.Dataset.range(4).map(lambda j: i + j).cache()
    plain, inside = (tf.data.Dataset.range(3).interleave(f) for f in (lambda i: read(i).take(9), read))
    for made in (plain, inside):
        some = page.stages(made.shuffle(9).batch(2))
        assert page._order(some, 2, True) is page.INSIDE and page._order(some, 1, True) is None
        assert page._filled(seen([]), some, 9, 9., [.1]) is None   # its buffer is filled by the same work
    assert page._order(page.stages(inside.cache()), 2, True) is None
    assert page._order(page.stages(inside.repeat()), 1, True) is page.INSIDE

@pytest.mark.parametrize('own, calls_at_once, waits, is_found', [
    (1, 4, 50, True), (3, 4, 50, True), (4, 4, 50, False), (1, 1, 50, False), (0, 4, 50, False),
    (1, 4, 12, False)])
def test_a_pool_of_threads_smaller_than_the_parallel_calls(monkeypatch, own, calls_at_once, waits, is_found):
    monkeypatch.setattr(page, 'cores', lambda: 8)
    options = tf.data.Options()
    options.threading.private_threadpool_size = own
    made = tf.data.Dataset.range(9).map(lambda x: x, num_parallel_calls=calls_at_once).with_options(options)
    found = find_few_threads(seen(['input'] * waits + ['graph'] * (100 - waits), datasets={LINE: [made]}))
    assert bool(found) == is_found
    if not found: return
    assert f'{own} thread{"s" * (own > 1)} (private_threadpool_size)' in only(found).evidence
    assert found[0].predicted_gain == pytest.approx(1 / (.5 + .5 * own / 4))
    monkeypatch.setattr(page, 'cores', lambda: own)
    assert not find_few_threads(seen(['input'] * 50 + ['graph'] * 50, datasets={OTHER: [made]}))

def test_a_step_alone_is_timed_and_what_python_does_beside_it_stays():
    step = tf.function(lambda x: x + 1)
    events, last = calls('call', 100), {('call', LINE): (step, '__call__', (tf.zeros(3),), {})}
    part = seen(['input'] * 40 + ['graph'] * 50 + ['own'] * 10, events, last=last)
    assert page.alone_seconds(part, 1.) == pytest.approx(.1, abs=.02)   # the graph takes far less than 0.5 s
    assert page.alone_seconds(part, 1e-6) == pytest.approx(.6e-6)       # never longer than in the loop
    assert page.alone_seconds(seen(['input'] * 40 + ['graph'] * 60), 1.) == pytest.approx(.6)

def test_pipelines_that_are_built_again():
    made = [tf.data.Dataset.range(3).map(lambda x: x) for _ in range(5)]
    found = only(find_pipelines(seen(['trace'] * 30 + ['graph'] * 70, datasets={LINE: made})))
    assert found.disease == 'a pipeline is made in the loop'
    assert found.predicted_gain == pytest.approx(1 / .709)
    assert find_pipelines(seen(['trace'] * 30 + ['graph'] * 70, datasets={LINE: [made[0].take(2)] * 5})) == []

NEVER_FULL = 'a cache that is never full'

def raw(x): return tf.io.decode_raw(tf.strings.as_string(x), tf.uint8)

@pytest.mark.parametrize('build, passes, whole, cause', [
    (lambda d: d.map(lambda x: x + 1).repeat().cache(), 1, True, 'cache after repeat'),
    (lambda d: d.cache().take(3).repeat(), 1, True, NEVER_FULL),
    (lambda d: d.cache().take(3), 2, True, NEVER_FULL), (lambda d: d.cache().take(3), 1, True, None),
    (lambda d: d.cache(), 2, False, NEVER_FULL), (lambda d: d.cache(), 1, False, None),
    (lambda d: d.cache().repeat(9).batch(2), 2, False, None),
    (lambda d: d.repeat(2).take(5).cache(), 2, False, 'cache after repeat'),
    (lambda d: d.map(tf.io.decode_raw_or_read).shuffle(9), 1, True, 'shuffle after decoding'),
    (lambda d: d.map(raw).shuffle(9), 1, True, None),
    (lambda d: d.take(3).cache().repeat(), 2, True, None),
    (lambda d: d.cache().shuffle(5).repeat().take(9), 2, True, None)])
def test_the_order_of_a_pipeline(monkeypatch, build, passes, whole, cause):
    monkeypatch.setattr(tf.io, 'decode_raw_or_read', lambda x: tf.io.read_file(tf.strings.as_string(x)),
        raising=False)
    shape = page._order(page.stages(build(tf.data.Dataset.range(9))), passes, whole)
    assert (shape and shape.cause) == cause

@pytest.mark.parametrize('order, costs, expected', [
    (None, None, None), (None, page.ZIPPED, page.ZIPPED), (page.SHUFFLED, None, page.SHUFFLED),
    (page.SHUFFLED, page.ZIPPED, page.ZIPPED), (page.SHUFFLED, page.PARSED, page.PARSED),
    (page.SHUFFLED, page.SERIAL, page.SHUFFLED), (page.REPEATED, page.ZIPPED, page.REPEATED)])
def test_the_order_of_a_pipeline_or_what_a_stage_does(order, costs, expected):
    found = page._worse(order, costs and (costs, .3))
    assert found == (expected and (expected, .02 if expected is order else .3))

def test_a_step_that_reads_an_iterator_is_not_called_again():
    "It would be at its end."
    batches = iter(tf.data.Dataset.range(3))
    step = tf.function(lambda x: x)
    part = lambda *given: seen(['graph'] * 9, calls('call', 9), last={('call', LINE): (step, '', given, {})})
    assert page.compiled_call(part(tf.zeros(3))).function is step
    assert page.compiled_call(part(tf.zeros(3), batches)) is None

def test_what_a_call_takes_without_a_trace():
    "The last call again, whose arguments are known: nothing of the program is changed by it."
    total = tf.Variable(0.)
    @tf.function
    def step(x):
        total.assign_add(1.)
        return x
    part = seen(last={('call', LINE): (step, '__call__', (tf.zeros(3),), {})})
    assert 0 < page.again(part, LINE) < .1 and float(total) == 0
    assert page.again(part, OTHER) is None
    broken = seen(last={('predict', LINE): (SimpleNamespace(predict=lambda x: 1 / 0), 'predict', (1,), {})})
    assert page.again(broken, LINE) is None

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
            assert 'test_program.py:' in found[0].place and 'l2_loss(rows)' in found[0].remedy
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
    assert found.disease == 'Python inside the step' and found.place.startswith('test_program.py:')
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
    assert found[0].place.startswith('test_program.py:') and 'Softmax' in found[0].evidence
    assert look(lambda x: aside(x, 31)) == [] == look(lambda x: x + 1)   # 961 numbers are few
    on_gpu(found := look(tf.random.shuffle))
    assert 'RandomShuffle' in found[0].evidence and 'no kernel' in found[0].evidence
    made = lambda device, rows: Event('variable', OTHER, 0., rows=rows, device=device)
    on_gpu(found := look(lambda x: x, made('/device:CPU:0', 1000)))
    assert found[0].disease == 'variables on the CPU' and found[0].place == 'test_program.py:4'
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
        assert only(found).disease == 'host sync per step' and found[0].place == 'test_program.py:4'
        assert found[0].only_on_gpu != known
        if known: assert found[0].predicted_gain == pytest.approx(1 / (.6 + .4 * .1))
    part.loop = ('fit', LINE)
    assert page.find_fetches(part) == []

def test_a_finding_that_only_a_gpu_shows():
    found = page.only_on_gpu('cause', 'evidence', 'remedy', LINE)
    assert finding_lines([found], [])[0] == '1. cause at test_program.py:3: only a GPU shows its gain'
    assert 'without a GPU' in found.evidence and found.line == 'import time'
    assert found.to_dict()['only_on_gpu'] and 'gain_interval' not in found.to_dict()
    assert 'only_on_gpu' not in finding(seen(['own'] * 9), 'a', 'b', 'c', .5).to_dict()

def test_findings_of_a_gpu_come_last_and_none_is_below_its_noise(monkeypatch):
    sure = page.Finding('sure', '', '', 1.5, low=1.01, high=2.)
    unsure = page.Finding('unsure', '', '', 1.5, low=1., high=2.)
    hidden = page.only_on_gpu('hidden', '', '', 'a.py:1')
    monkeypatch.setattr(page, 'PROGRAM_RULES', (lambda s: [hidden], lambda s: [unsure], lambda s: [sure]))
    assert [f.disease for f in explain(watched(['own'] * 100))[0]] == ['sure', 'hidden']
    there = page.replace(sure, place='a.py:1')
    monkeypatch.setattr(page, 'PROGRAM_RULES', (lambda s: [there], lambda s: [hidden]))
    assert [f.disease for f in explain(watched(['own'] * 100))[0]] == ['sure', 'hidden']   # of the same line

@pytest.mark.parametrize('gain, low, high, expected', [
    (3., 2.9, 3.1, (1.5, 6.)), (3., 1.2, 9., (1.2, 9.)), (3., 0., 0., (1.5, 6.)),
    (1.3, 1.2, 1.4, (1., 2.6))])
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
    assert .1 < 1 - 1 / found.predicted_gain < .3   # 10 x 200 ms and more, of 10 s
    assert only(look(slow, 12)).predicted_gain == pytest.approx(1 / (1 - .12 * .95), rel=.15)
    assert look(slow, 9) == [] == look(slow, 60, made=3)

@pytest.mark.parametrize('dtype, part, is_found', [
    (tf.float64, .3, True), (tf.float64, .29, False), (tf.float32, .9, False)])
def test_a_stage_in_double_precision(dtype, part, is_found):
    data = tf.data.Dataset.range(4).map(lambda x: tf.cast(tf.fill([1000], x), dtype) * 2)
    found = page._in_double(seen(['input'] * 9), page.stages(data)[-1], .8, part)
    assert bool(found) == is_found
    if found: assert found[0].predicted_gain == pytest.approx(1 / (.2 + .8 * .85))
    few = tf.data.Dataset.range(4).map(lambda x: tf.cast(tf.fill([999], x), dtype) * 2)
    assert page._in_double(seen(['input'] * 9), page.stages(few)[-1], .8, .9) == []

def test_the_same_work_comes_before_its_threads():
    data = tf.data.Dataset.range(64).map(lambda x: tf.cumsum(tf.fill([2000], x))).batch(2)
    some = page.stages(data)
    stage = next(s for s in some if s.name == 'Map')
    assert page._shape(some, stage, .9, 1., True) == (page.EVERY_EPOCH, .05)
    assert page._shape(some, stage, .9, 1., False) == (page.SERIAL, 1 / page.cores())

@pytest.mark.parametrize('again', [False, True])
def test_windows_that_are_made_one_by_one(again):
    data = tf.data.Dataset.range(64).window(4, 1, drop_remainder=True)
    some = page.stages(data.flat_map(lambda w: w.batch(4)).batch(16).map(lambda x: x + 1))
    stage = lambda name: next(s for s in some if s.name == name)
    for name in ('FlatMap', 'Window'):
        assert page._shape(some, stage(name), .3, 1., again) == (page.WINDOWS, .1)
    assert page._shape(some, stage('FlatMap'), .29, 1., again) is None
    shape = lambda some, stage: page._shape(some, stage, .9, 1., again) or (None,)
    assert shape(some, stage('Map'))[0] is not page.WINDOWS
    flat = page.stages(tf.data.Dataset.range(64).flat_map(lambda x: tf.data.Dataset.range(x)).batch(16))
    assert shape(flat, flat[1])[0] is not page.WINDOWS

def picture(parts):
    "A pipeline of maps, each a list of words."
    do = {'decode': lambda x: tf.io.decode_jpeg(x, channels=3), 'float': lambda x: tf.cast(x, tf.float32),
          'hue': lambda x: tf.image.adjust_hue(x, .1), 'crop': lambda x: tf.image.random_crop(x, (8, 8, 3)),
          'cut': lambda x: x[2:9, 3:7], 'resize': lambda x: tf.image.resize(x, (9, 9)),
          'both': lambda x: tf.image.decode_and_crop_jpeg(x, [0, 0, 8, 8], channels=3)}
    data = tf.data.Dataset.from_tensors('')
    for words in parts:
        def apply(x, words=words):
            for word in words.split(): x = do[word](x)
            return x
        data = data.map(apply)
    return page.stages(data)

@pytest.mark.parametrize('parts, first, later', [
    (['decode crop'], True, False), (['decode', 'crop'], True, False), (['decode cut'], True, False),
    (['decode float hue', 'float', 'crop'], True, False), (['both float hue'], False, False),
    (['decode resize crop'], False, False), (['decode', 'resize', 'cut'], False, False),
    (['decode'], False, False),
    (['decode', 'float hue', 'crop'], True, True), (['both', 'crop float hue'], False, False)])
def test_pictures_of_which_a_part_is_used(parts, first, later):
    some = picture(parts)
    assert page._crops_later(some, some[1]) == first
    assert page._crops_later(some, some[min(2, len(some) - 1)]) == (later if len(some) > 2 else first)

@pytest.mark.parametrize('build, packed', [
    (lambda f: tf.data.TFRecordDataset(f, 'GZIP'), True), (lambda f: tf.data.TFRecordDataset(f), False),
    (lambda f: tf.data.TFRecordDataset(f, ''), False), (lambda f: tf.data.TextLineDataset(f, 'ZLIB'), True),
    (lambda f: f.interleave(lambda n: tf.data.TFRecordDataset(n, compression_type='GZIP')), True),
    (lambda f: f.interleave(lambda n: tf.data.TFRecordDataset(n)), False),
    (lambda f: f.map(lambda x: tf.io.decode_compressed(x, 'ZLIB')), True),
    (lambda f: f.map(lambda x: tf.io.decode_compressed(x, '')), False)])
def test_what_is_unpacked(build, packed):
    some = page.stages(build(tf.data.Dataset.from_tensor_slices(['a'])))
    assert any(page._unpacks(s) for s in some) == packed

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
    assert found[0].place.startswith('test_program.py:') and 'for t in range(many)' in found[0].line

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
def by_product(x): return follow(x, lambda h, row: tf.squeeze(h[None] @ tf.ones((5, 5)), 0) + row)
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
        assert found[0].place.startswith('test_program.py:')
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
    assert found[0].predicted_gain == pytest.approx(gain) and found[0].place.startswith('test_program.py:')
    assert 'decode gets the same source' in found[0].evidence and 'takes 80% of' in found[0].evidence
    changing = loop(decode, lambda: source + 1)
    assert page._same_part(changing, page.compiled_call(changing), 1.) == []
    training = loop(tf.function(lambda x, y: w.assign_add(tf.zeros((3, 3))) + tf.reduce_sum(x @ w + y)), None)
    assert page._same_part(training, page.compiled_call(training), 1.) == []

def test_passes_over_a_pipeline():
    data = tf.data.Dataset.range(10)
    look = lambda steps, made: page._passes(seen([], calls('next', steps), datasets={LINE: made}), made)
    assert look(22, [data] * 2) == (2, True) and look(18, [data] * 2) == (2, True)
    assert look(17, [data] * 2) == (2, False) and look(3, [data.repeat()]) == (1, True)
    fits = lambda asked: [SimpleNamespace(epochs=3, asked=asked)]
    fit = lambda asked: page._passes(seen([], loop=('fit', LINE), fits=fits(asked)), [data] * 7)
    assert [fit(n) for n in (None, 10, 9, 8)] == [(3, True)] * 3 + [(3, False)]
    part = seen([], calls('next', 30))
    some = lambda d: page.stages(d.map(lambda x: x).batch(2))
    assert page._again(part, some(data.repeat()), 1) and page._again(part, some(data), 2)
    assert not page._again(part, some(data), 1)
    assert not page._again(part, some(tf.data.Dataset.range(60).repeat()), 1)
    assert page._again(part, some(tf.data.Dataset.range(59).repeat()), 1)


def heavy(i):
    x = tf.sin(tf.reshape(tf.range(3600.), (60, 60)) + tf.cast(i, tf.float32))
    for _ in range(40): x = tf.tanh(x @ x / 8)
    return x[0]

@pytest.mark.parametrize('build, passes, steps, cause', [
    (lambda d: d.map(heavy).repeat().cache().batch(8), 1, 90, 'cache after repeat'),
    (lambda d: d.map(heavy, num_parallel_calls=2).batch(8), 3, 30, 'the same work in every epoch'),
    (lambda d: d.map(heavy, num_parallel_calls=2).repeat().batch(8), 1, 30, 'the same work in every epoch'),
    (lambda d: d.map(heavy, num_parallel_calls=2).cache().batch(8), 9, 9, 'a cache that is never full'),
    (lambda d: d.map(heavy, num_parallel_calls=2).shuffle(70).batch(2), 9, 315,
     'the shuffle buffer is filled again before each epoch')])
def test_a_pipeline_for_which_the_step_waits(monkeypatch, build, passes, steps, cause):
    "It waits 90 % of an iteration of 0.5 ms; the pipeline is read once more."
    monkeypatch.setattr(page, 'cores', lambda: 2)
    data = build(tf.data.Dataset.range(70))
    part = seen(['input'] * 90 + ['graph'] * 10, calls('next', steps, 1e-4), datasets={LINE: [data] * passes})
    part.begin, part.end = 0., 5e-4 * steps
    found = page.find_slow_input(part)[0]
    assert found.disease == cause and found.place == 'test_program.py:3' and found.line == 'import time'
    assert found.low <= found.predicted_gain <= found.high

@pytest.mark.parametrize('build, passes, fill, share', [
    (lambda d: d.shuffle(5), 5, .58, .22), (lambda d: d.shuffle(5), 2, 2.5, 0),
    (lambda d: d.shuffle(5), 3, 1.03, 0), (lambda d: d.shuffle(5), 400, .08, 0),
    (lambda d: d.shuffle(5), 400, .081, .999),
    (lambda d: d.cache().shuffle(5), 5, .58, 0), (lambda d: d.shuffle(5).cache(), 5, .58, .22),
    (lambda d: d.batch(5), 5, .58, 0)])
def test_a_shuffle_that_is_filled_again(monkeypatch, build, passes, fill, share):
    "In 10 s, with batches of 10 ms."
    monkeypatch.setattr(page, 'first_seconds', lambda dataset: .4 * fill)
    some = page.stages(build(tf.data.Dataset.range(9)))
    found = page._filled(seen([]), some, passes, fill, [.01, .01, .5])
    assert bool(found) == bool(share)
    if found: assert found.predicted_gain == pytest.approx(gain_without(share, .05))
    assert page._filled(seen([]), some, passes, fill, []) is None
    monkeypatch.setattr(page, 'first_seconds', lambda dataset: .39 * fill)   # another stage takes the time
    assert page._filled(seen([]), some, passes, fill, [.01, .01, .5]) is None

def test_the_first_element_of_a_pass():
    slow = tf.data.Dataset.range(3).map(lambda x: (tf.py_function(lambda: time.sleep(.1), [], []), x)[1])
    assert .3 < page.first_seconds(slow.shuffle(9)) < 3

@pytest.mark.parametrize('build, loop, is_found', [
    (lambda d: d.shuffle(300).batch(2), 'fits', True), (lambda d: d.shuffle(300).batch(2), 'fit', False),
    (lambda d: d.batch(2), 'fits', False)])
def test_fit_in_a_loop_fills_its_shuffle_buffer_again(build, loop, is_found):
    data = build(tf.data.Dataset.range(400).map(heavy, num_parallel_calls=2))
    _, fill, times = page._read(data)
    part = seen([], calls(loop, 4), datasets={LINE: [data] * 4}, loop=(loop, LINE))
    part.end = 5 * fill
    found = page.find_filled_again(part)
    assert bool(found) == is_found and (not found or page.FILLED.cause == only(found).disease)

def validation(share, build=lambda d: d, passes=3, batches=4, loop='fit'):
    "What is found of three validations in 10 s, that read 4 of 10 rows each."
    tests = [Event('validation', LINE, 3. * i, 10 * share / 3, rows=batches - i) for i in range(3)]
    data = build(tf.data.Dataset.range(10))
    return page.find_validation(seen([], tests, validated=[data] * passes, loop=(loop, LINE)))

def test_a_validation_that_throws_its_cache_away():
    found = only(validation(.25, lambda d: d.cache()))
    assert found.disease == 'a cache that is never full' and 'takes 25% of the time' in found.evidence
    assert '833.3 ms for 4 batches' in found.evidence and found.predicted_gain < 1.1   # reading takes no time
    from_python = lambda d: d.map(lambda x: tf.numpy_function(lambda a: a, [x], tf.int64)).cache()
    assert only(validation(.25, from_python)).predicted_gain == pytest.approx(1.25)
    for keeps in (dict(build=lambda d: d), dict(build=lambda d: d.take(4).cache()),
                  dict(build=lambda d: d.cache(), batches=9), dict(build=lambda d: d.cache(), passes=1),
                  dict(build=lambda d: d.cache(), loop='fits'),
                  dict(build=lambda d: d.map(lambda x: tf.io.decode_raw(tf.as_string(x), tf.uint8))
                       .shuffle(9))):
        assert validation(**{'share': .3} | keeps) == []
    assert validation(.19, lambda d: d.cache()) == []

def test_a_validation_that_takes_most_of_the_time():
    found = only(validation(.5))
    assert found.disease == 'validation in each epoch' and 'validation_freq' in found.remedy
    assert found.predicted_gain == pytest.approx(gain_without(.5, .2)) and validation(.39) == []
    assert validation(.5, passes=0)[0].disease == 'validation in each epoch'

@pytest.mark.parametrize('more, expected', [
    (calls('call', 100, place=OTHER), 'operations beside the step'), (calls('call', 19), 'step not compiled'),
    (calls('call', 20), 'operations beside the step'),
    (calls('train_on_batch', 100), 'operations beside the step'),
    (calls('call', 100) + calls('gradient', 1), 'step not compiled'), ([], 'step not compiled')])
def test_what_is_eager_beside_a_compiled_step(more, expected):
    looks = ['graph'] * 50 + [(OTHER, 'eager')] * 50
    found = only(page.find_eager(seen(looks, calls('next', 100) + more, eager_functions=lambda: [])))
    assert found.disease == expected and found.place == 'test_program.py:4' and '@tf.function' in found.remedy
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
    assert found[0].disease == 'host sync for single values' and found[0].place == 'test_program.py:4'
    assert found[0].predicted_gain == pytest.approx(gain_without(share, .05))
    assert f'{reads // 100} of them in each iteration' in found[0].evidence
    assert page.find_eager(seen(looks, events)) == (found if eager > 20 else [])

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
    monkeypatch.setattr(page, 'seconds_of', lambda call: call())
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
