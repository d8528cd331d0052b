"The emulated stages of `bench dual`."
import pytest

from benchmarks.dual import bench_stages

@pytest.mark.slow
def test_emulated_stages():
    short = {'host': 0.003, 'data': 0.004, 'model': 0.005}
    rows = bench_stages(6, short, rounds=2)
    assert [r['name'] for r in rows] == ['serial', 'pipelined']
    assert all(r['ideal_rate'] == 200. and 0 < r['rate'] <= 200. for r in rows)
    assert rows[0]['ring_max'] == 1 and rows[1]['ring_max'] <= 3
