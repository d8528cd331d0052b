"What slows a program that was watched: the rules, `Diagnose` in `fit`, and scripts."
import sys
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.config import UserError
from xtts_nb.monitor import program as page
from xtts_nb.monitor.program import (
    Diagnose, Seen, explain, find_beside, find_few_threads, find_growth, find_made_in_loop, find_own_python,
    find_pipelines, find_python_input, find_single_rows, find_tiny_steps, find_traces, finding, finding_lines,
    gain_without, steady_part, variables_put_back, watch_script)
from xtts_nb.monitor.watch import Event, Look, Place, PythonCall

LINE, OTHER = Place(__file__, 3), Place(__file__, 4)


def watched(looks=(), events=(), python=(), **more):
    "A watch of 10 s: the kind of each look, 100 a second, at one line."
    looks = [Look(i / 100, *(k if isinstance(k, tuple) else (LINE, k)), 'inside') for i,
        k in enumerate(looks)]
    given = dict(begun=0., ended=10., fits=[], windows=[], datasets={}, functions={}, last={})
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
                         'Note: a note.']
    assert finding_lines([], []) == ['Nothing to fix.']
    assert {'place', 'line', 'change', 'gain_interval'} < found.to_dict().keys()

def test_variables_are_put_back():
    v = tf.Variable([1., 2.])
    with variables_put_back() as possible: v.assign([5., 5.])
    assert possible and v.numpy().tolist() == [1., 2.]
    with variables_put_back(most=0.) as possible: v.assign([5., 5.])
    assert not possible and v.numpy().tolist() == [5., 5.]

@pytest.mark.parametrize('calls_made, rows, seconds, eager, is_found', [
    (5, 1, .5, 0, True), (4, 1, .5, 0, False), (5, 4, .5, 0, True), (5, 5, .5, 0, False),
    (5, 1, .2, 0, True), (5, 1, .19, 0, False), (5, 1, .5, 50, True), (5, 1, .5, 51, False)])
def test_a_row_at_a_time(calls_made, rows, seconds, eager, is_found):
    "Found from five calls, four rows and a tenth of the time on; not where all else runs eagerly too."
    asked = []
    network = lambda x: asked.append(len(x)) or tf.constant(0.)   # as fast for many rows as for one
    events = calls('layer', calls_made, 1., seconds, rows=rows)
    last = {('layer', LINE): (network, '__call__', (np.ones((rows, 3)),), {})}
    found = find_single_rows(seen(['eager'] * eager + ['graph'] * (100 - eager), events, last=last))
    assert bool(found) == is_found
    if found:
        assert only(found).disease == 'one row at a time' and found[0].place == 'test_program.py:3'
        assert set(asked) == {32 * rows} and found[0].predicted_gain > 1

def test_rows_that_cost_as_much_among_many_as_alone_are_left():
    asked = []
    def network(x):
        asked.append(len(x))
        time.sleep(.002 * len(x))
        return tf.constant(0.)
    events = calls('layer', 600, .01, .002, rows=1)   # 12 % of the time
    last = {('layer', LINE): (network, '__call__', (np.ones((1, 3)),), {})}
    assert find_single_rows(seen(['graph'] * 100, events, last=last)) == [] and set(asked) == {32}

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
    made = calls(kind, 9, place=OTHER)
    found = only(find_made_in_loop(seen(looks, made)))
    assert found.disease == page.MADE[kind] and found.place == 'test_program.py:4'
    assert found.predicted_gain == pytest.approx(1 / (1 - .5 * .97))
    assert find_made_in_loop(seen(looks, made[:2])) == [] == find_made_in_loop(seen(['graph'] * 99, made))
    assert find_made_in_loop(seen(looks, made, loop=('fit', LINE))) == []

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
    assert found.predicted_gain == pytest.approx(1 / .412)
    assert find_traces(seen(['trace'] * 60 + ['graph'] * 40, events[:2], functions=functions)) == []
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
    (4, {'input': 30, 'graph': 70}, True, True), (4, {'input': 31, 'graph': 69}, True, False),
    (4, {'callback': 30, 'graph': 70}, True, True), (4, {'callback': 31, 'graph': 69}, True, False),
    (4, {'trace': 31, 'graph': 69}, True, False),
    (4, {'graph': 100}, False, False)])
def test_steps_of_few_rows(monkeypatch, rows, looks, alike, is_found):
    "Found where eight times as many rows take less than 0.45 of eight times as long."
    monkeypatch.setattr(page, 'seconds_of', lambda call: float(call()))
    step = tf.function(lambda x: tf.constant(.1) if alike else tf.size(x, tf.int64) / (30 * rows))
    events = calls('call', 100)
    last = {('call', LINE): (step, '__call__', (tf.zeros((rows, 3)),), {})}
    looks = [kind for kind, count in looks.items() for _ in range(count)]
    found = find_tiny_steps(seen(looks, events, loop=('call', LINE), last=last))
    assert bool(found) == is_found
    if not found: return
    assert found[0].disease == 'tiny batch' and f'of {8 * rows} rows 100.0 ms' in found[0].evidence
    assert found[0].predicted_gain == pytest.approx(8, rel=.01) and f'batch({8 * rows})' in found[0].change

@pytest.mark.parametrize('kind, cause', [('callback', 'a callback blocks'), ('save', 'saving blocks'),
                                         ('summary', 'summaries at each step')])
def test_what_is_done_beside_training(kind, cause):
    found = only(find_beside(seen([kind] * 40 + ['graph'] * 60)))
    assert found.disease == cause and '40%' in found.evidence
    assert found.predicted_gain == pytest.approx(1 / .62)
    assert find_beside(seen([kind] * 11 + ['graph'] * 89)) == []

def test_python_of_the_program():
    found = only(find_own_python(seen(['own'] * 30 + [(OTHER, 'numpy')] * 20 + ['graph'] * 50)))
    assert found.place == 'test_program.py:3' and '50%' in found.evidence and 'inside' in found.evidence
    assert found.predicted_gain == pytest.approx(1 / .55)
    assert find_own_python(seen(['own'] * 14 + ['graph'] * 86)) == []

def test_steps_that_take_longer_and_longer():
    starts = np.cumsum(np.linspace(.01, .05, 60))
    steps = [Event('next', LINE, t, .001) for t in starts]
    looks = ['graph'] * 60 + [(OTHER, 'eager')] * 120
    found = only(find_growth(seen(looks, steps)))
    assert found.disease == 'time grows' and found.place == 'test_program.py:4'
    assert find_growth(seen(looks, calls('next', 60))) == [] == find_growth(seen(looks, steps[:20]))

def test_python_that_makes_the_batches():
    python = [PythonCall(i * .1, i * .1 + .08, LINE, 'load') for i in range(100)]
    found = only(find_python_input(seen(['input'] * 70 + ['graph'] * 30, python=python)))
    assert found.disease == 'Python makes the batches' and '80%' in found.evidence and '70%' in found.evidence
    assert found.evidence.startswith('a Python function') and found.place == 'test_program.py:3'
    assert found.predicted_gain == pytest.approx(1 / (.3 + .04 * .7), rel=.01)   # the step is not timed
    made = [c._replace(name='generator_py_func') for c in python]
    found = only(find_python_input(seen(['input'] * 70 + ['graph'] * 30, python=made)))
    assert found.evidence.startswith('a Python generator makes rows or batches 80%')
    assert find_python_input(seen(['input'] * 9 + ['graph'] * 91, python=python)) == []
    assert find_python_input(seen(['input'] * 70 + ['graph'] * 30)) == []

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

@pytest.mark.parametrize('build, cause', [
    (lambda d: d.map(lambda x: x + 1).repeat().cache(), 'cache after repeat'),
    (lambda d: d.cache().take(3).repeat(), 'a cache that is never full'),
    (lambda d: d.map(tf.io.decode_raw_or_read).shuffle(9), 'shuffle after decoding'),
    (lambda d: d.take(3).cache().repeat(), None), (lambda d: d.cache().shuffle(5).repeat().take(9), None)])
def test_the_order_of_a_pipeline(monkeypatch, build, cause):
    monkeypatch.setattr(tf.io, 'decode_raw_or_read', lambda x: tf.io.read_file(tf.strings.as_string(x)),
        raising=False)
    shape = page._order(page.stages(build(tf.data.Dataset.range(9))))
    assert (shape and shape.cause) == cause

def test_a_rule_that_fails_takes_no_other_with_it(monkeypatch):
    def broken(seen): raise ValueError('odd')
    monkeypatch.setattr(page, 'PROGRAM_RULES', (broken, find_own_python))
    found, notes = explain(watched(['own'] * 100))
    assert [f.disease for f in found] == ['Python beside the step'] and notes == ['broken failed: '
                                                                                  'ValueError: odd']
    assert 'too short' in explain(watched(['own'] * 9))[1][0]


def test_of_findings_at_one_line_the_first_is_believed_or_one_of_twice_the_gain(monkeypatch):
    at = lambda gain, place: lambda seen: [finding(seen, f'{gain}', '', '', 1 - 1 / gain, place=place)]
    rules = at(1.1, LINE), at(2, LINE), at(3.9, LINE), at(4.5, LINE), at(3, OTHER)
    monkeypatch.setattr(page, 'PROGRAM_RULES', rules)
    assert [f.disease for f in explain(watched(['own'] * 100))[0]] == ['4.5', '3', '2']

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
