"The emulated stages of `bench dual`."
import time

import pytest

from benchmarks.dual import bench_stages, emulated_stages, run_emulated

pytestmark = pytest.mark.slow
SHORT = {'host': 0.003, 'data': 0.004, 'model': 0.005}


def test_bench_rows():
    told = []
    rows = bench_stages(6, SHORT, rounds=2, progress=lambda done, total: told.append((done, total)))
    assert [r['name'] for r in rows] == ['serial', 'pipelined']
    assert all(r['ideal_rate'] == 200. and 0 < r['rate'] <= 200. for r in rows)
    assert rows[0]['ring_max'] == 1 and rows[1]['ring_max'] <= 3 and told == [(n, 4) for n in range(1, 5)]
    assert bench_stages(3, SHORT, ring=1, rounds=1)[1]['ring_max'] == 1


def test_stages_sleep_as_long_as_they_are_told():
    read, stages, step = emulated_stages(2, SHORT)
    begun = time.perf_counter()
    assert [step(stages['data'](n)) for n in read] == [0, 1]
    assert time.perf_counter() - begun >= 2 * sum(SHORT.values())
    assert [run_emulated(3, SHORT, ring=n).most for n in (0, 1)] == [1, 1]
