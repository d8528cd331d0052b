"The only timing code: with a clock that is set by hand, no test waits or asserts seconds of work."
import itertools
import json
import time

import pytest

from xtts_nb import bench
from xtts_nb.bench import (Arm, Comparison, accelerator_utilisation, compare, emulated_steps, record, recorded, rows_markdown,
                           timeline)
from xtts_nb.config import UserError


class Clock:
    "Time that only passes when told to."
    now = 0.
    def perf_counter(self): return self.now
    def sleep(self, seconds): self.now += seconds

@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(bench, 'time', made)
    return made


def test_medians_and_quartiles():
    arm = Arm('a', [1., 2., 3., 4., 100.], [1, 1, 1, 1, 1])
    assert arm.per_item == 3 and arm.spread == pytest.approx((52 - 1.5) / 3)
    assert Arm('one', [2.], [4]).per_item == 0.5 and Arm('one', [2.], [4]).spread == 0

@pytest.mark.parametrize('unit, values', [('clips_per_s', [2., 8.]), ('step_ms', [500., 125.])])
def test_the_ratio_is_the_speed_relative_to_the_first(unit, values):
    rows = Comparison([Arm('slow', [1., 1.], [2, 2]), Arm('fast', [1., 1.], [8, 8])], unit).rows()
    assert [r[unit] for r in rows] == values and [r['ratio'] for r in rows] == [1., 4.]
    assert list(rows[0]) == ['name', unit, 'ratio', 'spread']
    json.dumps(rows)

def test_arms_take_turns_and_the_warm_up_does_not_count(clock):
    log, first, seen = [], {'a': 9., 'b': 9.}, []
    def arm(name, seconds):
        def f():
            log.append(name); clock.sleep(first.pop(name, seconds))
            return 10
        return f
    result = compare({'a': arm('a', 2.), 'b': arm('b', 1.)}, 'clips_per_s', rounds=3, warmup=1,
                     before=lambda name: log.append('-' + name),
                     progress=lambda *done: seen.append(done))
    assert log == ['-a', 'a', '-b', 'b'] * 4 and seen == [(i, 8) for i in range(1, 9)]
    assert [a.seconds for a in result.arms] == [[2.] * 3, [1.] * 3]
    assert [r['clips_per_s'] for r in result.rows()] == [5., 10.]

def test_what_happens_before_the_clock_is_not_counted(clock):
    result = compare({'a': lambda: clock.sleep(1.) or 1}, 'step_ms', rounds=2, warmup=0, before=lambda name: clock.sleep(50.))
    assert result.arms[0].seconds == [1., 1.]

def test_an_error_in_an_arm_comes_out():
    def fail(): raise ValueError('broken')
    with pytest.raises(ValueError, match='broken'): compare({'a': fail}, 'step_ms')

def test_a_table_has_a_line_for_each_arm():
    rows = [{'name': 'a', 'clips_per_s': 1234.5, 'ratio': 1., 'spread': 0.1, 'au': 0.5},
            {'name': 'b', 'clips_per_s': 2., 'ratio': 2., 'spread': 0., 'au': 1.}]
    lines = rows_markdown(rows).splitlines()
    assert len(lines) == 4 and len({line.count('|') for line in lines}) == 1
    assert '1,234' in lines[2] and '10%' in lines[2] and '50%' in lines[2]
    assert Comparison([Arm('a', [1.], [1])], 'step_ms')._repr_markdown_().splitlines()[0].count('|') == 5

def feed(clock, seconds, count):
    for _ in range(count):
        clock.sleep(seconds)
        yield 1

@pytest.mark.parametrize('wait, step, au', [(0., 1., 1.), (1., 1., 1.), (2., 1., 0.5), (4., 1., 0.25)])
def test_utilisation_is_computing_over_all(clock, wait, step, au):
    got = accelerator_utilisation(feed(clock, wait, 100), step, steps=10)
    assert got['au'] == pytest.approx(au) and got['steps'] == 10 and got['cv'] == pytest.approx(0)

def test_utilisation_stops_where_the_batches_end(clock):
    assert accelerator_utilisation(feed(clock, 1., 4), 1., steps=50)['steps'] == 3

def test_uneven_batches_vary(clock):
    def source():
        for i in range(20): clock.sleep(0.1 if i % 2 else 2.); yield i
    assert accelerator_utilisation(source(), 0.1)['cv'] > 0.5

def test_a_timeline_adds_up(clock):
    "A batch takes longer than a step, so the device waits for each; the other way round for none."
    assert timeline(feed(clock, 5., 20), 3., steps=4) == [(5. * i, 2., 3.) for i in range(4)]
    assert timeline(feed(clock, 2., 20), 3., steps=4) == [(3. * i, 0., 3.) for i in range(4)]

def test_the_host_runs_one_batch_ahead_and_no_further(clock):
    taken = []
    def source():
        for i in range(9): taken.append(clock.now); yield i
    list(itertools.islice(emulated_steps(source(), 10.), 5))
    assert taken == [0., 0., 10., 20., 30.]

def test_the_clock_is_put_back(): assert bench.time is time

def test_a_record_names_device_day_and_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, 'device_name', lambda: 'CPU, 2 cores')
    path = record('30_trainer_xla', [{'name': 'a', 'step_ms': 1.}], tmp_path, corpus='demo')
    one = json.loads(path.read_text())
    assert path.name == f'30_trainer_xla-cpu-2-cores-{one["date"]}.json'
    assert one['device'] == 'CPU, 2 cores' and one['rows'] == [{'name': 'a', 'step_ms': 1.}] and one['corpus'] == 'demo'
    assert 'commit' in one
    record('30_trainer_xla', [], tmp_path)
    assert len(list(tmp_path.iterdir())) == 1

def test_the_newest_record_of_each_device_is_read(tmp_path):
    for device, date in [('A', '2025-01-02'), ('A', '2025-11-01'), ('A', '2024-12-31'), ('B', '2023-01-01')]:
        (tmp_path / f'page-{device}-{date}.json').write_text(json.dumps({'device': device, 'date': date, 'rows': []}))
    (tmp_path / 'other-A-2026-01-01.json').write_text(json.dumps({'device': 'A', 'date': '2026-01-01', 'rows': []}))
    assert sorted((r['device'], r['date']) for r in recorded('page', tmp_path)) == [('A', '2025-11-01'), ('B', '2023-01-01')]

@pytest.mark.parametrize('folder', ['.', 'nowhere'])
def test_without_a_record_the_remedy_is_named(tmp_path, folder):
    with pytest.raises(UserError, match='holds no record of 10_data; make one with'): recorded('10_data', tmp_path / folder)
