"Scaling over devices: the ring, the limits and the fit of a link; and the emulated stages of `bench dual`."
from dataclasses import replace

import pytest

from benchmarks.dual import bench_stages
from benchmarks.growth import (
    check_growth, growth, growth_verdict, Link, measured_cost, predict, ring_seconds, scaling_limit,
    StepCost)

pytestmark = pytest.mark.slow

NET, INSIDE = Link(1e9, 0.), Link(1e12, 0.)
WORK = StepCost(fixed=0.01, per_row=0.01, gradients=1e8)


def test_a_prediction_by_hand():
    "Two machines: 30 ms alone; an all-reduce of 19.35 ms, 15 hidden; 1 ms to copy a row, 0.8 to read it."
    work = StepCost(0.01, 0.002, gradients=1e8, row_bytes=25e6, overlap=0.5, host_rate=1e4)
    result = predict(work, 16, 10, Link(1e11, 1e-5), Link(1e10, 2e-5))
    assert result.pop('limit') == result.pop('cause') == 'fixed costs'
    assert result == pytest.approx({'devices': 16, 'rows': 10, 'compute_ms': 30, 'all_reduce_ms': 4.35,
                                   'step_ms': 34.35,
                                   'rows_per_s': 160 / 0.03435, 'efficiency': 30 / 34.35})
    slow = [predict(replace(work, host_rate=r), 2, 10, INSIDE, NET)['step_ms'] for r in (400., 1e3, 1e9)]
    assert slow == pytest.approx([50, 30, 30])   # two GPUs read 20 rows

@pytest.mark.parametrize('work, rows, limit', [
    (WORK, 99, 'compute'), (replace(WORK, gradients=1e10), 9, 'all-reduce'), (WORK, 1, 'fixed costs'),
    (replace(WORK, host_rate=100.), 9, 'input'), (replace(WORK, row_bytes=1e9), 9, 'input')])
def test_the_limit_is_named(work, rows, limit):
    assert predict(work, 8, rows, Link(1e11, 0.), NET)['limit'] == limit

def test_a_batch_that_is_cut_runs_out_of_rows():
    lines = growth(WORK, 16, INSIDE, INSIDE, devices=(1, 2, 4, 8, 16), together=True)
    assert [line['rows'] for line in lines] == [16, 8, 4, 2, 1] and lines[0]['speed'] == 1
    limit = scaling_limit(lines)
    assert limit == {'devices': 8, 'speed': pytest.approx(5.6, abs=0.1), 'limit': 'fixed costs'}
    assert scaling_limit(growth(WORK, 16, INSIDE, INSIDE)) is None
    work = measured_cost({2: 0.03, 4: 0.05, 8: 0.09}, 7.)   # a step is a line over its rows
    assert (work.fixed, work.per_row) == (pytest.approx(0.01), pytest.approx(0.01))

def ring(link): return lambda n, sizes, seconds=0.05: {s: seconds + ring_seconds(s, n, link) for s in sizes}

def test_four_workers_are_predicted_from_two_and_three():
    true = ring(Link(1e9, 1e-4, shared=0.4))
    slow = lambda n, sizes, seconds: {s: t * (1.5 if n == 4 else 1)
                                      for s, t in true(n, sizes, seconds).items()}
    rows = check_growth(sizes=(10**6, 10**7), measure=slow)
    by = {(r['workers'], r['megabytes']): r for r in rows}
    assert all(r['error'] == 0 for r in rows if r['fitted']) and by[1, 1]['predicted_ms'] == 50
    assert by[4, 10]['error'] == pytest.approx(1 / 1.5 - 1, abs=1e-3) and by[4, 10]['fitted'] is False
    assert (by[4, 10]['step_ms'], by[4, 10]['predicted_ms']) == (116.4, 77.6)   # 50 + 6 * (4.5 + 0.1)
    result = growth_verdict(rows)
    assert result['holds'] is False and result['largest_error'] == pytest.approx(1 / 3, abs=1e-3)
    assert growth_verdict(check_growth(sizes=(10**6, 10**7), measure=true))['holds']


def test_emulated_stages():
    short = {'host': 0.003, 'data': 0.004, 'model': 0.005}
    rows = bench_stages(6, short, rounds=2)
    assert [r['name'] for r in rows] == ['serial', 'pipelined']
    assert all(r['ideal_rate'] == 200. and 0 < r['rate'] <= 200. for r in rows)
    assert rows[0]['ring_max'] == 1 and rows[1]['ring_max'] <= 3
