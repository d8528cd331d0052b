"What a watch has seen: the steady part, gains, and trials."
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tensorflow as tf

from clock import Clock
from watched import calls, LINE, OTHER, seen, watched
from xtts_nb import bench
from xtts_nb.monitor import diagnose, seen as page
from xtts_nb.monitor.program import finding_lines
from xtts_nb.monitor.seen import finding, gain_without, steady_part, variables_put_back


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
    assert found.place == 'watched.py:3' and found.line == LINE.text
    lines = finding_lines([found], ['a note'])
    assert lines[0].startswith('1. cause at watched.py:3: about 1.7 x as fast (')
    assert lines[1:] == [f'   > {LINE.text}', '   evidence.', '   Change: remedy.', '       a', '       b',
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

def test_a_step_that_reads_an_iterator_is_not_called_again():
    "It would be at its end."
    batches = iter(tf.data.Dataset.range(3))
    step = tf.function(lambda x: x)
    part = lambda *given: seen(['graph'] * 9, calls('call', 9), last={('call', LINE): (step, '', given, {})})
    assert page.compiled_call(part(tf.zeros(3))).function is step
    assert page.compiled_call(part(tf.zeros(3), batches)) is None

def test_a_step_is_judged_by_a_whole_batch():
    "The last call may have got the rest of an epoch; where sizes are alike, the last one counts."
    step = tf.function(lambda x: x)
    def rows(early, last):
        given = lambda n, mark: ((tf.fill((n, 2), mark),), {})
        part = seen(['graph'] * 9, calls('call', 9), last={('call', LINE): (step, '', *given(last, 2.))},
                    early={('call', LINE): given(early, 1.)})
        x = page.compiled_call(part).args[0]
        return x.shape[0], float(x[0, 0])
    assert rows(32, 10) == (32, 1.) and rows(32, 32) == (32, 2.) and rows(10, 32) == (32, 2.)

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

def test_a_finding_that_only_a_gpu_shows():
    found = page.only_on_gpu('cause', 'evidence', 'remedy', LINE)
    assert finding_lines([found], [])[0] == '1. cause at watched.py:3: only a GPU shows its gain'
    assert 'without a GPU' in found.evidence and found.line == LINE.text
    assert found.to_dict()['only_on_gpu'] and 'gain_interval' not in found.to_dict()
    assert 'only_on_gpu' not in finding(seen(['own'] * 9), 'a', 'b', 'c', .5).to_dict()
