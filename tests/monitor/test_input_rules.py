"Pipelines that are read again; the rules: `golden.json`."
from types import SimpleNamespace

import pytest
import tensorflow as tf

from watched import calls, LINE, seen
from xtts_nb.monitor import input_rules as page
from xtts_nb.monitor.loop import tf_sleep

def test_a_step_alone_is_timed_and_what_python_does_beside_it_stays():
    step = tf.function(lambda x: x + 1)
    events, last = calls('call', 100, .1, .05), {('call', LINE): (step, '__call__', (tf.zeros(3),), {})}
    part = seen(['input'] * 40 + ['graph'] * 50 + ['own'] * 10, events, last=last)
    assert page._alone_seconds(part, 1.) == pytest.approx(.1, abs=.02)   # the graph takes far less than 0.5 s
    assert page._alone_seconds(part, 1e-6) == pytest.approx(.6e-6)       # never longer than in the loop
    assert page._alone_seconds(seen(['input'] * 40 + ['graph'] * 60), 1.) == pytest.approx(.6)

def test_passes_over_a_pipeline():
    data = tf.data.Dataset.range(10)
    look = lambda steps, made: page._passes(seen([], calls('next', steps), datasets={LINE: made}), made)
    assert look(22, [data] * 2) == (2, True) and look(18, [data] * 2) == (2, True)
    assert look(17, [data] * 2) == (2, False) and look(3, [data.repeat()]) == (1, True)
    fits = lambda asked: [SimpleNamespace(epochs=3, asked=asked)]
    fit = lambda asked: page._passes(seen([], loop=('fit', LINE), fits=fits(asked)), [data] * 7)
    assert [fit(n) for n in (None, 10, 9, 8)] == [(3, True)] * 3 + [(3, False)]
    some = lambda d: page.stages(d.map(lambda x: x).batch(2))
    again = lambda d, passes: page._again(seen([], calls('next', 30)), some(d), passes)
    assert [again(data.repeat(), 1), again(data, 2), again(data, 1)] == [True, True, False]
    assert [again(tf.data.Dataset.range(n).repeat(), 1) for n in (59, 60)] == [True, False]

def heavy(i): return tf_sleep(2000, tf.cast(i, tf.float32))   # as long on busy cores

def test_a_pipeline_for_which_the_step_waits(monkeypatch):
    "It waits 90 % of an iteration of 0.5 ms; the pipeline is read once more."
    monkeypatch.setattr(page, 'cores', lambda: 2)
    data = tf.data.Dataset.range(70).map(heavy, num_parallel_calls=2).shuffle(70).batch(2)
    part = seen(['input'] * 90 + ['graph'] * 10, calls('next', 315, 1e-4), datasets={LINE: [data] * 9})
    part.begin, part.end = 0., 5e-4 * 315
    found = page.find_slow_input(part)[0]
    assert found.cause == 'the shuffle buffer is filled again before each epoch'
    assert found.place == 'watched.py:3' and found.line == LINE.text
    assert found.low <= found.gain <= found.high
