"Scaling over devices: the ring, the limits and the fit of a link; and the emulated stages of `bench dual`."
from dataclasses import replace

import pytest

from benchmarks.dual import bench_stages
from benchmarks.growth import (
    Link, predict, StepCost)

pytestmark = pytest.mark.slow

NET, INSIDE = Link(1e9, 0.), Link(1e12, 0.)


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

def test_emulated_stages():
    short = {'host': 0.003, 'data': 0.004, 'model': 0.005}
    rows = bench_stages(6, short, rounds=2)
    assert [r['name'] for r in rows] == ['serial', 'pipelined']
    assert all(r['ideal_rate'] == 200. and 0 < r['rate'] <= 200. for r in rows)
    assert rows[0]['ring_max'] == 1 and rows[1]['ring_max'] <= 3
