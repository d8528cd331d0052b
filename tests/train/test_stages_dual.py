"Stages side by side: in order, never more than there is room for, nothing lost, nothing left."
import gc
import random
import threading
import time
import traceback
import weakref

import psutil
import pytest

from xtts_nb.train.dual import (
    PipelineClosed, SerialBatches, Pipeline, Ring, Span, bench_stages, by_stage, overlap, pipeline_row,
    pipeline_table,
    plot_timeline, run_emulated, stage_rows)

SHORT = {'host': 0.003, 'data': 0.004, 'model': 0.005}


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
    serial, pipelined = run_emulated(20, SHORT), run_emulated(20, SHORT, ring=3)
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
        {'name': 'host', 'device': None, 'batches': 2, 'ms': 1000., 'busy': 0.333},
        {'name': 'model', 'device': 'GPU:1', 'batches': 2, 'ms': 2000., 'busy': 0.667}]
    with SerialBatches([], {}) as batches: batches.spans.extend(spans)
    assert pipeline_row('x', batches, 0.5) == {'name': 'x', 'rate': 0.333, 'ideal_rate': 0.5,
                                               'model_wait_share': 0.2,
                                               'ring_max': 1}

def test_rows_are_rounded_and_one_batch_has_no_rate():
    spans = [Span('model', 0, 0., 1 / 3), Span('model', 1, 1.1, 1.1 + 1 / 7)]
    assert stage_rows(spans) == [{'name': 'model', 'device': None, 'batches': 2, 'ms': 238.1, 'busy': 0.383}]
    with SerialBatches([], {}) as batches: batches.spans.extend(spans)
    row = pipeline_row('x', batches, 2 / 3)
    assert row == {'name': 'x', 'rate': 0.909, 'ideal_rate': 0.667, 'model_wait_share': 0.6169, 'ring_max': 1}
    assert overlap(spans[:1]) == {'wall': 1 / 3, 'work': 1 / 3, 'rate': None, 'model_wait_share': 0}
    assert pipeline_table([row | {'rate': 1234.5, 'ideal_rate': 2469.}]) == [
        {'name': 'x', 'batches/s': '1,234.50', 'of the ideal': '50.0%', 'model waits': '61.7%',
         'batches before the model': 1}]

def test_bench_rows():
    told = []
    rows, spans = bench_stages(6, SHORT, progress=lambda done, total: told.append((done, total)))
    assert [r['name'] for r in rows] == ['serial', 'pipelined'] == [*spans]
    assert all(r['ideal_rate'] == 200. and 0 < r['rate'] <= 200. for r in rows)
    assert rows[0]['ring_max'] == 1 and rows[1]['ring_max'] <= 3 and told == [(n, 12) for n in range(1, 13)]

def test_the_picture_shows_each_stage_with_its_device():
    spans = run_emulated(4, SHORT, ring=3).spans
    ax, = plot_timeline({'a run': spans}, {'model': 'GPU:1'}, batches=2, first=1).axes
    assert [t.get_text() for t in ax.get_yticklabels()] == ['host', 'data', 'model  GPU:1']
    assert ax.get_title() == 'a run'
    assert [len(c.get_paths()) for c in ax.collections] == [2, 2, 2]
    drawn = [Span('host', 4, 7., 8.), Span('model', 4, 8.5, 10.)]   # from the begin of what is shown
    boxes = [c.get_paths()[0].get_extents()
             for c in plot_timeline({'a run': drawn}, first=4).axes[0].collections]
    edges = [x for box in boxes for x in (*box.intervalx, *box.intervaly)]
    assert edges == pytest.approx([0, 1, -0.4, 0.4, 1.5, 3, 0.6, 1.4])

@pytest.mark.slow
def test_memory_is_flat_over_ten_thousand_steps():
    me, sizes = psutil.Process(), []
    def made(n): return bytearray(100_000)
    with Pipeline(range(10_000), {'data': made, 'copy': bytes}) as batches:
        for number, batch in enumerate(batches):
            if number in (2_000, 9_999): sizes.append(me.memory_info().rss)
            del batch
    assert sizes[1] - sizes[0] < 2_000_000 and batches.most <= 3 and len(batches.spans) == 10_000
