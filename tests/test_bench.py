"The only timing code, with a clock that is set by hand, so that no test waits; and records."
import itertools
import json

import pytest
from clock import Clock

from xtts_nb import bench
from xtts_nb.bench import (
    accelerator_utilisation, _Arm, compare, Comparison, _emulated_steps, fed_steps, record, recorded,
    rows_markdown, timeline)
from xtts_nb.config import UserError
from xtts_nb.devices import _products_in_tf32


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(bench, 'time', Clock(0.))
    return bench.time


@pytest.mark.parametrize('unit, values', [('clips_per_s', [2., 8.]), ('step_ms', [500., 125.]),
                                          ('start_s', [.5, .125])])
def test_the_ratio_is_the_speed_relative_to_the_first(unit, values):
    rows = Comparison([_Arm('slow', [.5, .5]), _Arm('fast', [.125, .125])], unit).rows()
    assert [r[unit] for r in rows] == values and [r['ratio'] for r in rows] == [1., 4.]
    json.dumps(rows)

def test_arms_take_turns_and_the_warm_up_does_not_count(clock):
    log, first, seen = [], {'a': 9., 'b': 9.}, []
    def arm(name, seconds):
        def f():
            log.append(name)
            clock.sleep(first.pop(name, seconds))
            return 10
        return f
    result = compare({'a': arm('a', 2.), 'b': arm('b', 1.)}, 'clips_per_s', rounds=3, warmup=1,
                     before=lambda name: log.append('-' + name),
                     progress=lambda *done: seen.append(done))
    assert log == ['-a', 'a', '-b', 'b'] * 4 and seen == [(i, 8) for i in range(1, 9)]
    assert [a.times for a in result.arms] == [[.2] * 3, [.1] * 3]
    assert [r['clips_per_s'] for r in result.rows()] == [5., 10.]

def test_a_clock_of_its_own_and_what_happens_before_the_clock(clock):
    arms = {'a': lambda: clock.sleep(1.) or 1, 'b': lambda: clock.sleep(50.) or (10, 4.)}
    result = compare(arms, 'step_ms', rounds=2, warmup=0, before=lambda name: clock.sleep(50.))
    assert [a.times for a in result.arms] == [[1., 1.], [.4, .4]]

@pytest.mark.parametrize('seconds,rounds', [(100., 9), (10., 4), (9.99, 3), (1., 3)])
def test_the_time_budget_ends_a_comparison(clock, seconds, rounds):
    clock.now = 50.
    nap = lambda: clock.sleep(1.) or 1
    with bench._time_budget(seconds): result = compare({'a': nap, 'b': nap}, 'step_ms', rounds=9)
    assert [len(arm.times) for arm in result.arms] == [rounds, rounds]
    assert len(compare({'a': nap}, 'step_ms', rounds=9).arms[0].times) == 9

def test_a_table_has_a_line_for_each_arm():
    row = {'name': 'a', 'clips_per_s': 1234.4, 'step_ms': 5.55, 'ratio': 1234.04, 'spread': 0.104,
           'au': 0.996, 'mfu': 0.204, 'cv': 0.1234, 'padding': 0.0514, 'steps_per_s': 1234.04, 'runs': 'x'}
    assert rows_markdown([row, dict.fromkeys(row)]).splitlines()[2:] == [
        '| a | 1,234.4 | 5.5 | 1,234.0 × | ± 10% | 100% | 20% | 12.3% | 5.1% | 1,234.0 | x |',
        '| – ' * 11 + '|']

def feed(clock, seconds, count):
    for _ in range(count):
        clock.sleep(seconds)
        yield 1

@pytest.mark.parametrize('wait, step, au', [(0., 1., 1.), (1., 1., 1.), (2., 1., 0.5), (4., 1., 0.25)])
def test_utilisation_is_computing_over_all(clock, wait, step, au):
    got = accelerator_utilisation(feed(clock, wait, 100), step, steps=10)
    assert got['au'] == pytest.approx(au) and got['steps'] == 10 and got['cv'] == pytest.approx(0)

def test_uneven_batches_vary(clock):
    def source():
        for i in range(20):
            clock.sleep(0.1 if i % 2 else 2.)
            yield i
    assert accelerator_utilisation(source(), 0.1)['cv'] > 0.5

def test_a_timeline_adds_up(clock):
    "A batch takes longer than a step, so the device waits for each; the other way round for none."
    assert timeline(feed(clock, 5., 20), 3., steps=4) == [(5. * i, 2., 3.) for i in range(4)]
    assert timeline(feed(clock, 2., 20), 3., steps=4) == [(3. * i, 0., 3.) for i in range(4)]

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

ROWS = [{'name': 'a', 'step_ms': 1., 'spread': 0.1}, {'name': 'b', 'step_ms': 2., 'spread': 0.25}]
NOISY = [{'name': 'a', 'step_ms': 1., 'spread': 0.1}, {'name': 'b', 'step_ms': 9., 'spread': 0.251}]

@pytest.fixture
def cpu(monkeypatch): monkeypatch.setattr(bench, '_device_name', lambda: 'CPU, 2 cores')

def test_a_record_says_where_when_and_how(cpu, tmp_path, capsys):
    path = record('step_speed', ROWS, tmp_path / 'new', 'xtts-nb bench train --record', corpus='demo')
    one = json.loads(path.read_text())
    when = f'{one["date"]}-{one["time"].replace(":", "")}'
    assert path.name == f'step_speed-cpu-2-cores-{when}.json' and list(path.parent.iterdir()) == [path]
    assert one['device'] == 'CPU, 2 cores' and one['rows'] == ROWS and one['corpus'] == 'demo'
    assert one['cpu'] == bench._cpu_name() and one['command'] == 'xtts-nb bench train --record'
    assert one['noisy'] is False and one['noisy_rows'] == {} and capsys.readouterr().err == ''
    one = json.loads(record('a', ROWS, tmp_path, 'x', 'NVIDIA H200').read_text())
    assert one['device'] == 'NVIDIA H200' and 'tf32' not in one and one['cpu'] == bench._cpu_name()

def test_a_record_of_a_gpu_says_whether_it_multiplied_in_tf32(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, '_device_name', lambda: 'NVIDIA H200')
    for on in (True, False):
        with _products_in_tf32(on): assert json.loads(record('a', [], tmp_path,
                                                             'x').read_text())['tf32'] is on

@pytest.mark.parametrize('links', [True, False])
def test_no_record_replaces_another(cpu, tmp_path, monkeypatch, links):
    "Twelve runs within one second are twelve files, also on a disk without hard links."
    def link(part, path): raise PermissionError(1, 'Operation not permitted', str(part))
    if not links: monkeypatch.setattr(bench.os, 'link', link)
    paths = [record('step_speed', [{'name': str(i)}], tmp_path, 'c') for i in range(12)]
    assert len(set(paths)) == len(list(tmp_path.iterdir())) == 12
    assert [json.loads(p.read_text())['rows'][0]['name'] for p in paths] == [str(i) for i in range(12)]

@pytest.mark.parametrize('rows, said',
                         [(NOISY, 'b 25%'), ([{'name': 'once', 'spread': None}], 'once unknown')])
def test_a_noisy_run_says_so(cpu, tmp_path, capsys, rows, said):
    one = json.loads(record('step_speed', rows, tmp_path, 'c').read_text())
    assert one['noisy'] is True and list(one['noisy_rows']) == [said.split()[0]]
    assert said in capsys.readouterr().err
    assert bench.headline('step_speed', tmp_path) is None and bench.headline('10_data', tmp_path) is None

def test_records_of_the_wheel_stand_in_where_there_is_no_folder(cpu, tmp_path, monkeypatch):
    "As in Colab; a folder of one's own, even an empty one, has its own."
    monkeypatch.setattr(bench, '_PACKED', tmp_path / 'packed')
    (tmp_path / 'own').mkdir()
    record('demo', ROWS, tmp_path / 'packed', 'first')
    assert bench.headline('demo', tmp_path / 'missing')['command'] == 'first'
    assert [r['command'] for r in recorded('demo', tmp_path / 'missing')] == ['first']
    assert bench.headline('demo', tmp_path / 'own') is None

def test_a_noisy_run_is_never_the_headline(cpu, tmp_path):
    "It is newer than the other; a list of rows next to `rows` counts as well."
    record('demo', ROWS, tmp_path, 'first')
    record('demo', NOISY, tmp_path, 'second')
    record('demo', ROWS, tmp_path, 'third', data_before_after=NOISY)
    assert bench.headline('demo', tmp_path)['command'] == 'first'
    assert [r['command'] for r in recorded('demo', tmp_path)] == ['first']
    record('demo', ROWS, tmp_path, 'fourth')
    assert bench.headline('demo', tmp_path)['command'] == 'fourth'

def old(folder, device, date, rows, **more):
    "A record as it was written before records had a time, a command and a verdict on their spread."
    one = {'device': device, 'date': date, 'commit': None, 'rows': rows, **more}
    (folder / f'page-{device}-{date}.json').write_text(json.dumps(one))

def test_the_newest_record_of_each_device_is_read(tmp_path):
    for device, date in [('A', '2025-01-02'), ('A', '2025-11-01'), ('A', '2024-12-31'), ('B', '2023-01-01')]:
        old(tmp_path, device, date, [])
    assert sorted((r['device'], r['date']) for r in recorded('page', tmp_path)) == [('A', '2025-11-01'),
                                                                                    ('B', '2023-01-01')]

def test_a_record_is_drawn_with_its_origin(cpu, tmp_path):
    record('step_speed', NOISY, tmp_path, 'xtts-nb bench train --record')
    (one,) = recorded('step_speed', tmp_path)
    origin, table = bench.record_markdown(one, about='a small GPT').split('\n\n')
    assert origin.startswith(f'a small GPT, CPU, 2 cores ({bench._cpu_name()}), {one["date"]}.')
    assert '`xtts-nb bench train --record`' in origin and 'b 25%' in origin and table == rows_markdown(NOISY)
    with pytest.raises(UserError, match='10_data'): recorded('10_data', tmp_path)
