"Stages side by side: in order, never more than there is room for, nothing lost, nothing left."
import gc
import random
import threading
import time
import traceback
import weakref
from types import SimpleNamespace

import psutil
import pytest

from xtts_nb.train.dual import (
    PipelineClosed, SerialBatches, Pipeline, Ring, Span, alternating_runs, by_stage, overlap, pipeline_rows,
    pipeline_table, plot_timeline, stage_rows, steady_period)


@pytest.fixture(autouse=True)
def nobody_stays():
    "No thread outlives a test."
    before = set(threading.enumerate())
    yield
    assert not [t for t in threading.enumerate() if t not in before]

def waiting(seconds): return lambda batch: (time.sleep(seconds), batch)[1]

@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('ring, between', [(1, 1), (2, 1), (3, 2), (5, 4)])
def test_batches_arrive_in_order_whatever_the_times(seed, ring, between):
    draw = random.Random(seed)
    work = {name: lambda n, name=name: (time.sleep(draw.random() / 1e3), [*n, name])[1] for name in 'abc'}
    with Pipeline(([n] for n in range(12)), work, ring, between) as batches: got = list(batches)
    assert got == [[n, 'a', 'b', 'c'] for n in range(12)]
    assert batches.most <= ring and all(r.most <= between for r in batches.rings[:-1])
    assert [s.number for s in by_stage(batches.spans)['b']] == list(range(12))

@pytest.mark.parametrize('kind', [Pipeline, SerialBatches])
def test_both_ways_give_the_same(kind):
    with kind(range(5), {'double': lambda n: 2 * n}) as batches: assert list(batches) == [0, 2, 4, 6, 8]
    assert [s.stage for s in batches.spans].count('model') == 5

@pytest.mark.parametrize('kind', [Pipeline, SerialBatches])
def test_no_batches_at_all(kind):
    with kind([], {'data': str}) as batches: assert list(batches) == [] and list(batches) == []

def test_a_slow_reader_holds_everybody_back():
    asked = []
    with Pipeline((asked.append(n) or n for n in range(100)), {'data': str, 'copy': str}, ring=3,
                  between=2) as batches:
        next(batches)
        time.sleep(0.1)
        assert len(asked) <= 3 + 2 + 2 and [r.most for r in batches.rings] == [2, 2, 3] and batches.most == 3
        assert [t.name for t in batches.threads] == ['host', 'data', 'copy']
        assert all(t.daemon for t in batches.threads)
        held = len(asked)
        next(batches)
        time.sleep(0.05)
        assert len(asked) <= held + 1

def test_a_batch_is_gone_when_it_was_used():
    class Batch: pass
    alive, most = weakref.WeakSet(), 0
    def made(_):
        alive.add(b := Batch())
        return b
    with Pipeline(range(300), {'data': made}) as batches:
        for batch in batches:
            most = max(most, len(alive))
            del batch
    gc.collect()
    assert most <= 3 and not alive

@pytest.mark.parametrize('place', ['host', 'data', 'copy'])
@pytest.mark.parametrize('at', [0, 3])
def test_a_failure_comes_after_what_was_made_before_it(place, at):
    def fail(n):
        if n == at: raise KeyError('no such clip')
        return n
    same = lambda n: n
    source = (fail(n) if place == 'host' else n for n in range(9))
    seen = []
    with Pipeline(source, {name: fail if name == place else same for name in ('data', 'copy')}) as batches:
        with pytest.raises(KeyError, match='no such clip') as e: seen.extend(batches)
        with pytest.raises(KeyError): next(batches)
    assert seen == list(range(at)) and traceback.extract_tb(e.value.__traceback__)[-1].name == 'fail'

def test_a_failure_of_the_reader_ends_all():
    with pytest.raises(ZeroDivisionError), Pipeline(iter(int, 1), {'data': str}) as batches:
        for _ in batches: raise ZeroDivisionError
    assert not any(t.is_alive() for t in batches.threads)

def test_closed_in_the_middle_and_twice():
    batches = Pipeline(iter(int, 1), {'data': waiting(0.01)})
    next(batches)
    batches.close()
    batches.close()
    assert not any(t.is_alive() for t in batches.threads)
    with pytest.raises(PipelineClosed): next(batches)

def test_a_place_is_taken_before_and_given_back_after():
    ring = Ring(2)
    assert ring.most == 0
    ring.reserve()
    ring.reserve()
    third = threading.Thread(target=ring.reserve)
    third.start()
    third.join(0.05)
    assert third.is_alive() and ring.most == 2
    ring.put('a')
    assert ring.get() == 'a'
    third.join(0.05)
    assert third.is_alive()   # it is still in use
    ring.free()
    third.join(5)
    assert not third.is_alive() and ring.most == 2

def test_side_by_side_overlaps_and_in_turn_does_not():
    def run(kind):
        with kind(map(waiting(.003), range(20)), {'data': waiting(.004)}) as batches:
            for _ in batches: time.sleep(.005)
        return batches
    serial, pipelined = run(SerialBatches), run(Pipeline)
    turn, side = overlap(serial.spans), overlap(pipelined.spans)
    assert turn['work'] <= turn['wall'] and side['wall'] < side['work']
    assert side['model_wait_share'] < turn['model_wait_share']
    begun = {(s.stage, s.number): s.start for s in pipelined.spans}
    ended = {(s.stage, s.number): s.end for s in pipelined.spans}
    # the next is under way while one is used
    assert sum(begun['host', n + 1] < ended['model', n] for n in range(19)) > 15

def test_numbers_of_a_run_that_was_drawn_by_hand():
    spans = [Span('host', 0, 0., 1.), Span('model', 0, 1., 3.), Span('host', 1, 1., 2.),
             Span('model', 1, 4., 6.)]
    assert overlap(spans) == {'wall': 6., 'work': 6., 'rate': 1 / 3, 'model_wait_share': pytest.approx(0.2)}
    assert stage_rows(spans, {'model': 'GPU:1'}) == [
        {'name': 'host', 'device': None, 'batches': 2, 'ms': 1000., 'busy': 1.},
        {'name': 'model', 'device': 'GPU:1', 'batches': 2, 'ms': 2000., 'busy': 0.667}]

def test_the_busy_share_is_that_of_the_second_half():
    "Five batches: the first two are slow, the last one ends no period."
    starts, lasts = [0, 10, 20, 24, 28], [9, 9, 1, 2, 4]
    spans = [Span('model', n, start, start + last) for n, (start, last) in enumerate(zip(starts, lasts))]
    assert [row['busy'] for row in stage_rows(spans)] == [(1 + 2) / 8]
    assert [row['busy'] for row in stage_rows(spans[:1])] == [None]

def a_run(rate, most=1, host=0.25):
    "Four batches; the host works a share of its time, the model half of it."
    starts = [n / rate for n in range(4)]
    return SimpleNamespace(most=most, spans=[
        *(Span('host', n, start, start + host / rate) for n, start in enumerate(starts)),
        *(Span('model', n, start, start + 0.5 / rate) for n, start in enumerate(starts))])

def test_rows_are_medians_of_the_rounds():
    rows = pipeline_rows({'a': [a_run(1 / 3, host=h) for h in (0.1, 0.2, 0.9)],
                          'b': [a_run(r, most) for r, most in ((1, 2), (4, 3), (2, 1))]}, 2 / 3)
    assert rows == [{'name': 'a', 'rate': 0.333, 'ideal_rate': 0.667, 'ratio': 1., 'spread': 0.,
                     'busy': {'host': 0.2, 'model': 0.5}, 'model_wait_share': 0.4286, 'ring_max': 1},
                    {'name': 'b', 'rate': 2., 'ideal_rate': 0.667, 'ratio': 6., 'spread': 1.5,
                     'busy': {'host': 0.25, 'model': 0.5}, 'model_wait_share': 0.4286, 'ring_max': 3}]
    assert pipeline_rows({'a': [a_run(1)]}, 1)[0]['spread'] is None

def test_a_row_of_the_table_and_that_of_an_older_record():
    older = {'name': 'x', 'rate': 1234.5, 'ideal_rate': 2469., 'model_wait_share': 0.6169, 'ring_max': 1}
    shown = {'name': 'x', 'batches/s': '1,234.50', 'ratio': None, 'spread': None, 'of the ideal': '50.0%',
             'data busy': None, 'model waits': '61.7%', 'batches before the model': 1}
    row = older | {'ratio': 2., 'spread': 0.1, 'busy': {'host': 0.1, 'data': 0.25, 'model': 0.4}}
    assert pipeline_table([older, row]) == [
        shown, shown | {'ratio': 2., 'spread': 0.1, 'data busy': '25.0%'}]
    names = [r['name'] for r in pipeline_table([row | {'name': n} for n in ('serial', 'pipelined_real')])]
    assert names == ['serial, emulated', 'pipelined_real']   # the stages of the first only sleep

def test_arms_run_in_turn():
    ran, told = [], []
    arms = {name: lambda name=name: ran.append(name) or name * len(ran) for name in 'ab'}
    runs = alternating_runs(arms, 2, lambda done, total: told.append((done, total)))
    assert sorted(ran[:2]) == sorted(ran[2:]) == ['a', 'b'] and told == [(n, 4) for n in range(1, 5)]
    assert {name: [len(run) for run in some] for name, some in runs.items()} == {
        name: [i + 1 for i, one in enumerate(ran) if one == name] for name in 'ab'}

def test_one_batch_has_no_rate():
    spans = [Span('model', 0, 0., 1 / 3)]
    assert overlap(spans) == {'wall': 1 / 3, 'work': 1 / 3, 'rate': None, 'model_wait_share': 0}

def even(stage, batches, first=0., last=0.5):
    "A batch each second."
    return [Span(stage, n, first + n, first + n + last) for n in range(batches)]

@pytest.mark.parametrize('batches, period', [(15, (0., 16.5)), (16, (10., 15.5)), (20, (12., 19.5))])
def test_the_steady_period_is_the_second_half_while_all_work(batches, period):
    assert steady_period([*even('host', batches), *even('model', batches, 2.)]) == period

def test_a_run_whose_host_is_far_ahead_is_shown_whole():
    assert steady_period([*even('host', 5), *even('model', 20, 2.)]) == (0., 21.5)

def test_the_picture_shows_each_stage_with_its_device():
    one = [*even('host', 20), *even('model', 20, 2.25, 1.)]
    short = [Span('host', 4, 7., 8.), Span('model', 4, 8.5, 10.)]
    fig = plot_timeline({'a run': iter(one), 'a short one': short}, {'model': 'GPU:1'})
    first, second = fig.axes
    assert [t.get_text() for t in first.get_yticklabels()] == ['host\n50% busy', 'model GPU:1\n100% busy']
    assert [t.get_text() for t in second.get_yticklabels()] == ['host', 'model GPU:1']
    assert [ax.get_title() for ax in fig.axes] == ['a run', 'a short one'] and first.get_xlim() == (0., 3.)
    edges = lambda ax: [[tuple(p.get_extents().intervalx) for p in c.get_paths()] for c in ax.collections]
    # the model begins batch 10 at 12.25; what is cut off at the edges is not drawn beyond them
    assert edges(first) == [[(0., 0.25), (0.75, 1.25), (1.75, 2.25), (2.75, 3.)],
                            [(0., 1.), (1., 2.), (2., 3.)]]
    assert edges(second) == [[(0., 1.)], [(1.5, 3.)]]
    assert [c.get_paths()[0].get_extents().intervaly.tolist() for c in first.collections] == [
        [-0.4, 0.4], [0.6, 1.4]]

@pytest.mark.slow
def test_memory_is_flat_over_ten_thousand_steps():
    me, sizes = psutil.Process(), []
    def made(n): return bytearray(100_000)
    with Pipeline(range(10_000), {'data': made, 'copy': bytes}) as batches:
        for number, batch in enumerate(batches):
            if number in (2_000, 9_999): sizes.append(me.memory_info().rss)
            del batch
    assert sizes[1] - sizes[0] < 2_000_000 and batches.most <= 3 and len(batches.spans) == 10_000
