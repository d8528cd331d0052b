"The only timing code, with a clock that is set by hand, so that no test waits."
import itertools
import json

import pytest
from clock import Clock

from xtts_nb import bench
from xtts_nb.bench import accelerator_utilisation, compare, Comparison, _emulated_steps, fed_steps

@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(bench, 'time', Clock(0.))
    return bench.time

def test_arms_take_turns_and_the_warm_up_does_not_count(clock):
    log, first, seen = [], {'a': 9., 'b': 9.}, []
    def variant(name, seconds):
        def f():
            log.append(name)
            clock.sleep(first.pop(name, seconds))
            return 10
        return f
    result = compare({'a': variant('a', 2.), 'b': variant('b', 1.)}, 'clips_per_s', rounds=3, warmup=1,
                     before=lambda name: log.append('-' + name), progress=lambda *done: seen.append(done))
    assert log == ['-a', 'a', '-b', 'b'] * 4 and seen == [(i, 8) for i in range(1, 9)]
    assert [a.times for a in result.variants] == [[.2] * 3, [.1] * 3]
    for unit, values in (('clips_per_s', [5., 10.]), ('step_ms', [200., 100.]), ('start_s', [.2, .1])):
        rows = Comparison(result.variants, unit).rows()
        assert [r[unit] for r in rows] == values and [r['ratio'] for r in rows] == [1., 2.]
        json.dumps(rows)

@pytest.mark.parametrize('seconds,rounds', [(100., 9), (10., 4), (9.99, 3), (1., 3)])
def test_the_time_budget_ends_a_comparison(clock, seconds, rounds):
    clock.now = 50.
    nap = lambda: clock.sleep(1.) or 1
    with bench._time_budget(seconds): result = compare({'a': nap, 'b': nap}, 'step_ms', rounds=9)
    assert [len(variant.times) for variant in result.variants] == [rounds, rounds]
    assert len(compare({'a': nap}, 'step_ms', rounds=9).variants[0].times) == 9

def feed(clock, seconds, count):
    for _ in range(count):
        clock.sleep(seconds)
        yield 1

def test_utilisation_is_computing_over_all(clock):
    for wait, au in ((0., 1.), (1., 1.), (2., 0.5), (4., 0.25)):
        got = accelerator_utilisation(feed(clock, wait, 100), 1., steps=10)
        assert got['au'] == pytest.approx(au) and got['steps'] == 10 and got['cv'] == pytest.approx(0)
    uneven = (next(feed(clock, 0.1 if i % 2 else 2., 1)) for i in range(20))
    assert accelerator_utilisation(uneven, 0.1)['cv'] > 0.5

@pytest.mark.parametrize('most, limit', [(100., 60.), (100., 99.), (100., 5.), (100., 3.), (2500., 180.)])
def test_the_rate_that_is_fed_is_found(most, limit):
    "An accelerator that starves above some rate, and once below it: a rate counts only if it is kept twice."
    tried = []
    def measure(batches, step, steps):
        tried.append((batches, 1 / step, steps))
        return {'au': 0.995 if 1 / step <= limit else 0.98}
    found = fed_steps(lambda: 'a new one', most, seconds=0.5, measure=measure)
    if limit < most / 30: assert found is None
    else: assert limit / 1.05 <= found <= limit
    assert all(batches == 'a new one' and steps == max(20, round(0.5 * rate))
               for batches, rate, steps in tried)
    assert len(tried) < 40

def test_the_host_runs_one_batch_ahead_and_no_further(clock):
    taken = []
    def source():
        for i in range(9):
            taken.append(clock.now)
            yield i
    list(itertools.islice(_emulated_steps(source(), 10.), 5))
    assert taken == [0., 0., 10., 20., 30.]
