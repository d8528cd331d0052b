"Scaling over devices: the ring, the limits, and the fit of a link."
import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import growth as page
from benchmarks.growth import (
    LINKS, Link, StepCost, check_growth, computed_cost, emulate, fit_link, growth, growth_verdict,
    measure_workers, measured_cost, plot_growth, predict, ring_seconds, run_workers, scaling_limit)
from xtts_nb.config import UserError

pytestmark = pytest.mark.slow

NET, INSIDE = Link(1e9, 0.), Link(1e12, 0.)
WORK = StepCost(fixed=0.01, per_row=0.01, gradients=1e8)


def test_a_ring_sends_twice_the_gradients():
    "(n - 1) / n of them, there and back; one device sends nothing."
    assert [ring_seconds(1e9, n, NET) for n in (1, 2, 4)] == pytest.approx([0., 1., 1.5])
    assert ring_seconds(0., 5, Link(1e9, 1e-3)) == pytest.approx(8e-3)

def test_the_network_counts_from_the_second_machine_on():
    eight, sixteen = (predict(WORK, n, 9, INSIDE, NET) for n in (8, 16))
    assert eight['all_reduce_ms'] == pytest.approx(1e3 * ring_seconds(1e8, 8, INSIDE))
    assert sixteen['all_reduce_ms'] == pytest.approx(1e3 * ring_seconds(1e8, 16, NET))
    assert sixteen['limit'] == 'all-reduce'
    one = predict(WORK, 16, 9, INSIDE, NET, per_machine=16)
    assert one['all_reduce_ms'] == pytest.approx(1e3 * ring_seconds(1e8, 16, INSIDE))

def test_a_prediction_by_hand():
    "Two machines: 30 ms alone; an all-reduce of 19.35 ms, 15 hidden; 1 ms to copy a row, 0.8 to read it."
    work = StepCost(0.01, 0.002, gradients=1e8, row_bytes=25e6, overlap=0.5, host_rate=1e4)
    result = predict(work, 16, 10, Link(1e11, 1e-5), Link(1e10, 2e-5))
    assert result.pop('limit') == result.pop('cause') == 'fixed costs'
    assert result == pytest.approx({'devices': 16, 'rows': 10, 'compute_ms': 30, 'all_reduce_ms': 4.35,
                                   'step_ms': 34.35,
                                   'rows_per_s': 160 / 0.03435, 'efficiency': 30 / 34.35})
    worse = predict(work, 16, 10, Link(5e9, 3e-5), Link(1e10, 2e-5))   # of both
    assert worse['all_reduce_ms'] == pytest.approx(1e3 * 30 * (1e8 / 16 / 5e9 + 3e-5) - 15)
    slow = [predict(replace(work, host_rate=rate), 2, 10, INSIDE, NET)['step_ms']
            for rate in (400., 1e3, 1e9)]
    assert slow == pytest.approx([50, 30, 30])   # two cards read 20 rows
    border = StepCost(fixed=1., per_row=1., gradients=0.)   # 20 % is not yet a limit
    limits = [predict(border, 1, rows, INSIDE, NET)['limit'] for rows in (3, 4, 5)]
    assert limits == ['fixed costs', 'compute', 'compute']

def test_overlap_hides_what_it_can():
    values = [predict(replace(WORK, overlap=share), 16, 9, INSIDE, NET)['all_reduce_ms']
            for share in (0, 0.5, 1)]
    assert values[0] - values[1] == pytest.approx(50) and values[2] == pytest.approx(values[0] - 100)
    assert predict(replace(WORK, overlap=1.), 8, 9, INSIDE, NET)['efficiency'] == 1

@pytest.mark.parametrize('work, rows, limit', [
    (WORK, 99, 'compute'), (replace(WORK, gradients=1e10), 9, 'all-reduce'), (WORK, 1, 'fixed costs'),
    (replace(WORK, host_rate=100.), 9, 'input'), (replace(WORK, row_bytes=1e9), 9, 'input')])
def test_the_limit_is_named(work, rows, limit):
    assert predict(work, 8, rows, Link(1e11, 0.), NET)['limit'] == limit

def test_the_input_of_a_machine_is_shared_by_its_devices():
    work = replace(WORK, host_rate=160.)
    rates = [round(predict(work, n, 10, INSIDE, INSIDE)['rows_per_s']) for n in (1, 2, 8, 16)]
    assert rates == [91, 160, 160, 320]

def test_a_batch_that_is_cut_runs_out_of_rows():
    lines = growth(WORK, 16, INSIDE, INSIDE, devices=(1, 2, 4, 8, 16), together=True)
    assert [line['rows'] for line in lines] == [16, 8, 4, 2, 1] and lines[0]['speed'] == 1
    assert scaling_limit(lines) == {'devices': 8, 'speed': pytest.approx(5.6, abs=0.1),
                                    'limit': 'fixed costs'}
    assert scaling_limit(growth(WORK, 16, INSIDE, INSIDE)) is None
    lines = growth(WORK, 3, INSIDE, INSIDE, devices=(2, 8), together=True)   # eight have no row each
    assert [line['rows'] for line in lines] == [1] and lines[0]['speed'] == 2

def test_where_it_breaks():
    speeds = {2: 2., 4: 3.2, 8: 6.36, 16: 5.}   # 3.2 of 4 are 80 % and good enough
    lines = [{'devices': n, 'speed': speed, 'limit': 'compute', 'cause': f'of {n}'}
             for n, speed in speeds.items()]
    assert scaling_limit(lines) == {'devices': 8, 'speed': 6.4, 'limit': 'of 8'}
    assert scaling_limit(lines, 0.79) == {'devices': 16, 'speed': 5., 'limit': 'of 16'}
    assert scaling_limit(lines, 0.1) is None
    assert [line['devices'] for line in growth(WORK, 1, INSIDE, INSIDE)] == [1, 2, 4, 8, 16, 32, 64]

def test_the_picture_has_a_line_for_each_network():
    lines = {net: growth(WORK, 16, INSIDE, LINKS[net], devices=(1, 2, 4)) for net in ('25 Gb/s', '400 Gb/s')}
    axes = plot_growth(lines, {'400 Gb/s': [(1, 1.), (2, 1.5)]}).axes[0]
    assert [line.get_label() for line in axes.lines[:3]] == ['ideal', '25 Gb/s', '400 Gb/s']
    assert [list(line.get_ydata()) for line in axes.lines] == [
        [1, 2, 4], *([row['speed'] for row in rows] for rows in lines.values()), [1., 1.5]]
    assert axes.lines[2].get_color() == axes.lines[3].get_color() != axes.lines[1].get_color()

def test_a_step_is_a_line_over_its_rows():
    work = measured_cost({2: 0.03, 4: 0.05, 8: 0.09}, 7., overlap=0.5)
    assert (work.fixed, work.per_row) == (pytest.approx(0.01), pytest.approx(0.01))
    assert (work.gradients, work.overlap) == (7., 0.5)
    assert measured_cost({1: 1., 2: 3.}, 0.).fixed == 0

def test_longer_clips_cost_more(small):
    short, long = (computed_cost(small, 10, n) for n in (10, 40))
    assert long.per_row > short.per_row > 0 and long.fixed == short.fixed
    assert long.gradients == short.gradients
    assert computed_cost(small, 10, 10, flops=1e12).per_row == pytest.approx(400 * short.per_row)

def test_work_is_counted(small, monkeypatch):
    "28 bytes of memory traffic a weight: weight and two moments read and written, a gradient read."
    monkeypatch.setattr(page, 'parameter_count', lambda gpt: 10)
    monkeypatch.setattr(page, 'step_flops', lambda config, rows, text, codes: 1e3 * rows + 10 * text + codes)
    result = computed_cost(small, 5, 7, flops=100., memory=40., overlap=0.25)
    row_bytes = 2 * 32 * 80 + 4 * 12   # float16 mel, int32 tokens
    assert result == StepCost(28 * 10 / 40, 1057 / 100, 40., row_bytes, overlap=0.25)

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
    true, values = ring(Link(1e9, 1e-4, shared=0.4)), []
    slow = lambda n, sizes, seconds: {s: t * (1.5 if n == 4 else 1)
                                      for s, t in true(n, sizes, seconds).items()}
    rows = check_growth(sizes=(10**6, 10**7), measure=slow, progress=lambda *a: values.append(a))
    by = {(r['workers'], r['megabytes']): r for r in rows}
    assert all(r['error'] == 0 for r in rows if r['fitted']) and by[1, 1]['predicted_ms'] == 50
    assert values[-1] == (4, 4)
    assert by[4, 10]['error'] == pytest.approx(1 / 1.5 - 1, abs=1e-3) and by[4, 10]['fitted'] is False
    result = growth_verdict(rows)
    assert result['holds'] is False and result['largest_error'] == pytest.approx(1 / 3, abs=1e-3)
    assert 'does not hold within 20%' in result['verdict'] and '4 workers' in result['verdict']
    assert (by[4, 10]['step_ms'], by[4, 10]['predicted_ms']) == (116.4, 77.6)   # 50 + 6 * (4.5 + 0.1)
    good = growth_verdict(check_growth(sizes=(10**6, 10**7), measure=true))
    assert good['holds'] and 'the model holds within' in good['verdict']

def test_rows_of_a_check_are_rounded_and_relative():
    "A link of 1e9 bytes/s; the third worker slows it by a half of the bytes."
    alone, link = 1 / 30, Link(1e9, 1e-4, shared=0.5)
    took = {n: {s: alone + ring_seconds(s, n, link) for s in (10**6, 10**7)} for n in (1, 2, 3, 4)}
    took[1] = {10**6: alone - 0.001, 10**7: alone + 0.001}   # the mean counts
    took[4][10**6] = 0.05
    rows = check_growth(measure=lambda n, sizes, seconds: took[n], sizes=(10**6, 10**7))
    by = {(r['workers'], r['megabytes']): r for r in rows}
    assert len(by) == 8 and [r['fitted'] for r in rows] == [True] * 6 + [False] * 2
    assert by[1, 1.] == {'workers': 1, 'megabytes': 1., 'step_ms': 32.33, 'predicted_ms': 33.33,
                         'error': 0.031, 'fitted': True}
    assert by[4, 1.] == {'workers': 4, 'megabytes': 1., 'step_ms': 50., 'predicted_ms': 36.93,
                         'error': -0.261, 'fitted': False}

def test_a_fit_never_gives_less_than_nothing():
    link = fit_link({10**6: 0.1, 2 * 10**6: 0.102}, {10**6: 0.101, 2 * 10**6: 0.102}, 0.1)   # begins below 0
    assert (link.bytes_per_s, link.seconds, link.shared) == (pytest.approx(5e8), 0, 0)
    made = ring(Link(2e9, 1e-3, 0.4))   # of three workers the largest size counts, the others are noise
    three = {10**6: 9.} | made(3, [10**7], 0.1)
    assert fit_link(made(2, (10**6, 10**7), 0.1), three, 0.1).shared == pytest.approx(0.4)

@pytest.mark.parametrize('errors, largest, holds', [([0.1, -0.3, 0.2], 0.3, False), ([0.1, -0.2], 0.2, True)])
def test_the_verdict_is_on_the_largest_error_of_what_was_not_fitted(errors, largest, holds):
    row = lambda n, error, fitted: {'workers': n, 'megabytes': 4., 'step_ms': 50.4, 'predicted_ms': 60.6,
                                    'error': error,
                                    'fitted': fitted}
    result = growth_verdict([row(2, 0.9, True), *(row(4 + i, e, False) for i, e in enumerate(errors))], 0.2)
    worst = 4 + [abs(e) for e in errors].index(largest)
    assert (result['bound'], result['largest_error'], result['holds']) == (0.2, largest, holds)
    assert result['verdict'].startswith(f'{worst} workers, 4 MB: predicted 61 ms, measured 50 ms')

@pytest.mark.parametrize('index', [0, 1])
def test_a_worker_sleeps_adds_up_and_worker_0_writes_the_medians(index, monkeypatch, tmp_path):
    "The first two steps, which compile, do not count."
    now, took, added = [5.], iter([90., 90., 1., 2., 3., 10.] * 2 + [0.] * 9), []
    clock = SimpleNamespace(perf_counter=lambda: now[0],
                            sleep=lambda s: now.__setitem__(0, now[0] + s * next(took)))
    strategy = SimpleNamespace(run=lambda f, x: added.append(x[0].shape[0]) or x[0], cluster_resolver=None,
                               experimental_local_results=lambda x: (x,))
    monkeypatch.setattr(page, 'time', clock)
    monkeypatch.setattr(page, 'setup_gpu_strategy', lambda: strategy)
    monkeypatch.setattr(page, 'this_worker', lambda resolver: (index, 2))
    emulate(tmp_path / 'medians.json', [100, 200], 0.5, 4)
    assert added == [25, 50]   # of four bytes
    assert sorted(tmp_path.iterdir()) == [tmp_path / 'medians.json'][index:]
    if not index: assert json.loads((tmp_path / 'medians.json').read_text()) == {'100': 1.25, '200': 1.25}

def test_workers_run_together_and_end_together(tmp_path):
    "Each in its own place, without a card; one that fails ends the others."
    program = f"""import json, os, pathlib, sys, time
place = json.loads(os.environ['TF_CONFIG'])
index = place['task']['index']
pathlib.Path({str(tmp_path)!r}, f'{{index}}-{{len(place["cluster"]["worker"])}}').touch()
assert os.environ['CUDA_VISIBLE_DEVICES'] == '-1'
"""
    assert run_workers(program, 3) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ['0-3', '1-3', '2-3']
    begun = time.monotonic()
    assert run_workers(program + 'if index: sys.exit(7)\ntime.sleep(60)', 2) == 7
    assert time.monotonic() - begun < 30
    with pytest.raises(UserError, match='2 local workers ended with code'): measure_workers(2, ['x'])
