"What more devices bring: the ring, the limits, and a link that is found again."
from dataclasses import replace

import pytest

from xtts_nb.growth import (Link, Work, breaks, check_growth, computed_work, fit_link, growth, growth_verdict, measured_work,
                            predict, ring_seconds)

NET, INSIDE = Link(1e9, 0.), Link(1e12, 0.)
WORK = Work(fixed=0.01, per_row=0.01, gradients=1e8)


def test_a_ring_sends_twice_the_gradients():
    "(n - 1) / n of them, there and back; one device sends nothing."
    assert [ring_seconds(1e9, n, NET) for n in (1, 2, 4)] == pytest.approx([0., 1., 1.5])
    assert ring_seconds(0., 5, Link(1e9, 1e-3)) == pytest.approx(8e-3)

def test_the_network_counts_from_the_second_machine_on():
    eight, sixteen = (predict(WORK, n, 9, INSIDE, NET) for n in (8, 16))
    assert eight['all_reduce_ms'] == pytest.approx(1e3 * ring_seconds(1e8, 8, INSIDE))
    assert sixteen['all_reduce_ms'] == pytest.approx(1e3 * ring_seconds(1e8, 16, NET)) and sixteen['limit'] == 'all-reduce'
    one = predict(WORK, 16, 9, INSIDE, NET, per_machine=16)
    assert one['all_reduce_ms'] == pytest.approx(1e3 * ring_seconds(1e8, 16, INSIDE))

def test_overlap_hides_what_it_can():
    seen = [predict(replace(WORK, overlap=share), 16, 9, INSIDE, NET)['all_reduce_ms'] for share in (0, 0.5, 1)]
    assert seen[0] - seen[1] == pytest.approx(50) and seen[2] == pytest.approx(seen[0] - 100)
    assert predict(replace(WORK, overlap=1.), 8, 9, INSIDE, NET)['efficiency'] == 1

@pytest.mark.parametrize('work, rows, limit', [
    (WORK, 99, 'compute'), (replace(WORK, gradients=1e10), 9, 'all-reduce'), (WORK, 1, 'fixed costs'),
    (replace(WORK, host_rate=100.), 9, 'input'), (replace(WORK, row_bytes=1e9), 9, 'input')])
def test_the_limit_is_named(work, rows, limit): assert predict(work, 8, rows, Link(1e11, 0.), NET)['limit'] == limit

def test_the_input_of_a_machine_is_shared_by_its_devices():
    work = replace(WORK, host_rate=160.)
    assert [round(predict(work, n, 10, INSIDE, INSIDE)['rows_per_s']) for n in (1, 2, 8, 16)] == [91, 160, 160, 320]

def test_a_batch_that_is_cut_runs_out_of_rows():
    lines = growth(WORK, 16, INSIDE, INSIDE, devices=(1, 2, 4, 8, 16), together=True)
    assert [line['rows'] for line in lines] == [16, 8, 4, 2, 1] and lines[0]['speed'] == 1
    assert breaks(lines) == {'devices': 8, 'speed': pytest.approx(5.6, abs=0.1), 'limit': 'fixed costs'}
    assert breaks(growth(WORK, 16, INSIDE, INSIDE)) is None

def test_a_step_is_a_line_over_its_rows():
    work = measured_work({2: 0.03, 4: 0.05, 8: 0.09}, 7., overlap=0.5)
    assert (work.fixed, work.per_row, work.gradients, work.overlap) == (pytest.approx(0.01), pytest.approx(0.01), 7., 0.5)
    assert measured_work({1: 1., 2: 3.}, 0.).fixed == 0

def test_longer_clips_cost_more(small):
    short, long = (computed_work(small, 10, n) for n in (10, 40))
    assert long.per_row > short.per_row > 0 and long.fixed == short.fixed and long.gradients == short.gradients
    assert computed_work(small, 10, 10, flops=1e12).per_row == pytest.approx(400 * short.per_row)

def ring(link): return lambda n, sizes, seconds=0.05: {s: seconds + ring_seconds(s, n, link) for s in sizes}

def test_a_device_more_slows_the_bytes_of_a_shared_link_and_not_its_messages():
    shared = Link(1e9, 1e-3, shared=0.5)
    assert ring_seconds(1e9, 2, shared) == ring_seconds(1e9, 2, replace(shared, shared=0.))
    assert ring_seconds(1e9, 4, shared) == pytest.approx(6 * (2 * 0.25 + 1e-3))

@pytest.mark.parametrize('shared', [0., 0.4])
def test_a_link_is_found_again(shared):
    made = ring(Link(2e9, 1e-3, shared))
    link = fit_link(*(made(n, (10**6, 10**7), 0.1) for n in (2, 3)), 0.1)
    assert (link.bytes_per_s, link.seconds, link.shared) == pytest.approx((2e9, 1e-3, shared))

def test_four_workers_are_predicted_from_two_and_three():
    true, seen = ring(Link(1e9, 1e-4, shared=0.4)), []
    slow = lambda n, sizes, seconds: {s: t * (1.5 if n == 4 else 1) for s, t in true(n, sizes, seconds).items()}
    rows = check_growth(sizes=(10**6, 10**7), measure=slow, progress=lambda *a: seen.append(a))
    by = {(r['workers'], r['megabytes']): r for r in rows}
    assert all(r['error'] == 0 for r in rows if r['fitted']) and by[1, 1]['predicted_ms'] == 50 and seen[-1] == (4, 4)
    assert by[4, 10]['error'] == pytest.approx(1 / 1.5 - 1, abs=1e-3) and by[4, 10]['fitted'] is False
    found = growth_verdict(rows)
    assert found['holds'] is False and found['largest_error'] == pytest.approx(1 / 3, abs=1e-3)
    assert 'does not hold within 20%' in found['verdict'] and '4 workers' in found['verdict']
    good = growth_verdict(check_growth(sizes=(10**6, 10**7), measure=true))
    assert good['holds'] and 'the model holds within' in good['verdict']
