"The only timing code: with a clock that is set by hand, no test waits or asserts seconds of work."
import itertools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from clock import Clock

from xtts_nb.devices import products_in_tf32
from xtts_nb import bench
from xtts_nb.bench import (
    Arm, Comparison, accelerator_utilisation, compare, emulated_steps, fed_steps, record,
    recorded, rows_markdown, timeline)
from xtts_nb.config import UserError


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(bench, 'time', Clock(0.))
    return bench.time


@pytest.mark.parametrize('unit, values', [('clips_per_s', [2., 8.]), ('step_ms', [500., 125.]),
                                          ('start_s', [.5, .125])])
def test_the_ratio_is_the_speed_relative_to_the_first(unit, values):
    rows = Comparison([Arm('slow', [.5, .5]), Arm('fast', [.125, .125])], unit).rows()
    assert [r[unit] for r in rows] == values and [r['ratio'] for r in rows] == [1., 4.]
    assert list(rows[0]) == ['name', unit, 'ratio', 'spread']
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

def test_what_happens_before_the_clock_is_not_counted(clock):
    result = compare({'a': lambda: clock.sleep(1.) or 1}, 'step_ms', rounds=2, warmup=0,
                     before=lambda name: clock.sleep(50.))
    assert result.arms[0].times == [1., 1.]

def test_an_arm_may_have_its_own_clock(clock):
    "Ten items in 4 s by its own clock, while 50 s pass."
    result = compare({'a': lambda: clock.sleep(50.) or (10, 4.)}, 'step_ms', rounds=2, warmup=0)
    assert result.arms[0].times == [.4, .4]

def test_an_error_in_an_arm_comes_out():
    def fail(): raise ValueError('broken')
    with pytest.raises(ValueError, match='broken'): compare({'a': fail}, 'step_ms')

def test_a_table_has_a_line_for_each_arm():
    rows = [{'name': 'a', 'clips_per_s': 1234.5, 'ratio': 1., 'spread': 0.1, 'au': 0.5},
            {'name': 'b', 'clips_per_s': 2., 'ratio': 2., 'spread': 0., 'au': 1.}]
    lines = rows_markdown(rows).splitlines()
    assert len(lines) == 4 and len({line.count('|') for line in lines}) == 1
    assert '1,234' in lines[2] and '10%' in lines[2] and '50%' in lines[2]
    row = {'name': 'a', 'clips_per_s': 1234.4, 'step_ms': 5.55, 'ratio': 1234.04, 'spread': 0.104,
           'au': 0.996,
           'mfu': 0.204, 'cv': 0.1234, 'padding': 0.0514, 'steps_per_s': 1234.04, 'runs': 'x'}
    assert rows_markdown([row, dict.fromkeys(row)]) == (
        '|  | clips/s | ms per step | speed | spread | AU | MFU | variation | padding | steps/s at AU 99 % | '
        'runs |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n'
        '| a | 1,234.4 | 5.5 | 1,234.0 × | ± 10% | 100% | 20% | 12.3% | 5.1% | 1,234.0 | x |\n' + '| – ' * 11
        + '|')
    assert Comparison([Arm('a', [1.])], 'step_ms')._repr_markdown_().splitlines()[0].count('|') == 5

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
    def three_and_one():
        for i in range(20):
            clock.sleep(3. if i % 2 else 1.)
            yield i
    assert accelerator_utilisation(three_and_one(), 0.5, steps=10) == {
        'au': pytest.approx(0.25), 'cv': pytest.approx(0.5), 'steps': 10}

def test_a_timeline_adds_up(clock):
    "A batch takes longer than a step, so the device waits for each; the other way round for none."
    assert timeline(feed(clock, 5., 20), 3., steps=4) == [(5. * i, 2., 3.) for i in range(4)]
    assert timeline(feed(clock, 2., 20), 3., steps=4) == [(3. * i, 0., 3.) for i in range(4)]

class Part:
    "An array whose copy takes two seconds."
    def __init__(self, clock, device='CPU'): self.clock, self.device = clock, device
    def __array__(self, dtype=None, copy=None):
        self.clock.sleep(2.)
        return np.zeros(1)

@pytest.mark.parametrize('batch, copies', [(lambda p, gpu: p, 1), (lambda p, gpu: {'a': p, 'b': (p, [p])}, 3),
                                           (lambda p, gpu: {'a': gpu, 'b': p}, 1), (lambda p, gpu: gpu, 0)])
def test_the_copy_of_every_array_is_counted(clock, batch, copies):
    batch = batch(Part(clock), Part(clock, '/job:localhost/replica:0/task:0/device:GPU:0'))
    assert accelerator_utilisation([batch] * 9, 1.)['au'] == pytest.approx(min(1., 1 / (2 * copies or 1)))

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
    rates = list(dict.fromkeys(round(rate, 6) for _, rate, _ in tried))
    first = next(n for n in range(1, 9) if most / 1.5**n <= limit or n == 8)   # 1.5**8 < 30 < 1.5**9
    assert rates[:first] == [round(most / 1.5**n, 6) for n in range(1, first + 1)]
    passed = [rate for _, rate, _ in tried if rate <= limit]
    assert len(passed) == 2 * len(set(passed)) and len(tried) < 40

def test_the_host_runs_one_batch_ahead_and_no_further(clock):
    taken = []
    def source():
        for i in range(9):
            taken.append(clock.now)
            yield i
    list(itertools.islice(emulated_steps(source(), 10.), 5))
    assert taken == [0., 0., 10., 20., 30.]

ROWS = [{'name': 'a', 'step_ms': 1., 'spread': 0.1}, {'name': 'b', 'step_ms': 2., 'spread': 0.25}]
NOISY = [{'name': 'a', 'step_ms': 1., 'spread': 0.1}, {'name': 'b', 'step_ms': 9., 'spread': 0.251}]

@pytest.fixture
def cpu(monkeypatch): monkeypatch.setattr(bench, 'device_name', lambda: 'CPU, 2 cores')

def test_a_record_says_where_when_and_how(cpu, tmp_path, capsys):
    path = record('step_speed', ROWS, tmp_path / 'new', 'xtts-nb bench train --record', corpus='demo')
    one = json.loads(path.read_text())
    when = f'{one["date"]}-{one["time"].replace(":", "")}'
    assert path.name == f'step_speed-cpu-2-cores-{when}.json' and list(path.parent.iterdir()) == [path]
    assert one['device'] == 'CPU, 2 cores' and one['rows'] == ROWS and one['corpus'] == 'demo'
    assert one['cpu'] == bench.cpu_name()
    assert one['command'] == 'xtts-nb bench train --record'
    assert 'commit' in one
    assert one['noisy'] is False and one['noisy_rows'] == {} and capsys.readouterr().err == ''

@pytest.mark.parametrize('device, shown', [('CPU, 2 cores', False), ('NVIDIA H200', True)])
def test_a_record_of_a_gpu_says_whether_it_multiplied_in_tf32(tmp_path, monkeypatch, device, shown):
    monkeypatch.setattr(bench, 'device_name', lambda: device)
    found = []
    for on in (True, False):
        with products_in_tf32(on): one = json.loads(record('a', [], tmp_path, 'x').read_text())
        found.append(one.get('tf32'))
    assert found == ([True, False] if shown else [None, None])

def test_rows_about_another_device_name_it(cpu, tmp_path):
    path = record('a', ROWS, tmp_path, 'x', 'NVIDIA H200', model='m')
    one = json.loads(path.read_text())
    assert path.name.startswith('a-nvidia-h200-20') and (one['device'], one['model']) == ('NVIDIA H200', 'm')
    assert 'tf32' not in one and one['cpu'] == bench.cpu_name()

@pytest.mark.parametrize('links', [True, False])
def test_a_name_that_is_taken_gets_a_number(tmp_path, monkeypatch, links):
    def link(part, path): raise PermissionError(1, 'Operation not permitted', str(part))
    if not links: monkeypatch.setattr(bench.os, 'link', link)   # as on a disk without hard links
    names = ['a.json', 'a-2.json', 'a-3.json']
    assert [bench._write_new(tmp_path / 'a', {}).name for _ in range(3)] == names
    assert {f.name for f in tmp_path.iterdir()} == set(names)

def test_the_device_is_the_gpu_or_the_cores_that_may_be_used(monkeypatch):
    there, about = [], {'device_name': 'NVIDIA X'}
    details = lambda gpu: about if gpu == 'first' else {}
    config = SimpleNamespace(list_physical_devices=lambda kind: there if kind == 'GPU' else ['CPU'],
                             experimental=SimpleNamespace(get_device_details=details))
    monkeypatch.setitem(sys.modules, 'tensorflow', SimpleNamespace(config=config))
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: [{0, 1, 2}][pid], raising=False)
    monkeypatch.setattr(os, 'cpu_count', lambda: 7)
    names = [bench.device_name()]
    monkeypatch.delattr(os, 'sched_getaffinity')   # as on macOS
    names.append(bench.device_name())
    there += ['first', 'second']
    names.append(bench.device_name())
    about.clear()
    names.append(bench.device_name())
    assert names == ['CPU, 3 cores', 'CPU, 7 cores', 'NVIDIA X', 'gpu']

@pytest.mark.parametrize('text, name', [
    ('flags : x\nmodel name\t: Foo CPU: II \nmodel name\t: Bar\n', 'Foo CPU: II'),
    ('flags : x\n', 'some chip'),
    (None, 'some chip')])
def test_the_processor_as_it_calls_itself(monkeypatch, text, name):
    def read_text(encoding):
        if text is None: raise FileNotFoundError
        return text
    monkeypatch.setattr(bench, 'Path', lambda path: SimpleNamespace(read_text=read_text))
    monkeypatch.setattr(bench.platform, 'processor', lambda: '')
    monkeypatch.setattr(bench.platform, 'machine', lambda: 'some chip')
    monkeypatch.setattr(bench.psutil, 'cpu_count', lambda: 5)
    for usable, count in ((5, '5'), (2., '2 of 5'), (1.5, '1.5 of 5')):
        monkeypatch.setattr(bench, 'usable_cores', lambda usable=usable: usable)
        assert bench.cpu_name() == f'{name}, {count} cores'

@pytest.mark.parametrize('script, commit',
                         [('echo abc123', 'abc123'), ('echo fatal; exit 128', None), (None, None)])
def test_the_commit_is_that_of_a_checkout(tmp_path, monkeypatch, script, commit):
    if script:
        (tmp_path / 'git').write_text(f'#!/bin/sh\n{script}\n')
        (tmp_path / 'git').chmod(0o755)
    monkeypatch.setenv('PATH', str(tmp_path))
    assert bench._commit() == commit

def test_no_record_replaces_another(cpu, tmp_path):
    "Twelve runs within one second are twelve files, each as it was written."
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
    assert bench.PACKED == Path(bench.__file__).parent / 'notebooks/benchmarks'
    monkeypatch.setattr(bench, 'PACKED', tmp_path / 'packed')
    (tmp_path / 'own').mkdir()
    record('demo', ROWS, tmp_path / 'packed', 'first')
    assert bench.headline('demo', tmp_path / 'missing')['command'] == 'first'
    assert [r['command'] for r in recorded('demo', tmp_path / 'missing')] == ['first']
    assert bench.headline('demo', tmp_path / 'own') is None

def test_a_noisy_run_is_never_the_headline(cpu, tmp_path):
    "It is newer than the quiet one; a list of rows beside `rows` counts as well."
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
    (tmp_path / 'other-A-2026-01-01.json').write_text(json.dumps({'device': 'A', 'date': '2026-01-01',
                                                                  'rows': []}))
    assert sorted((r['device'], r['date']) for r in recorded('page', tmp_path)) == [('A', '2025-11-01'),
                                                                                    ('B', '2023-01-01')]

def test_old_records_are_judged_when_they_are_read(tmp_path):
    old(tmp_path, 'A', '2025-01-01', ROWS)
    old(tmp_path, 'A', '2025-02-02', ROWS, step_before_after=NOISY)
    old(tmp_path, 'B', '2025-03-03', NOISY)
    assert [(r['date'], r['noisy']) for r in recorded('page', tmp_path)] == [('2025-01-01', False),
                                                                             ('2025-03-03', True)]
    assert bench.headline('page', tmp_path)['date'] == '2025-01-01'

def test_a_record_is_drawn_with_its_origin(cpu, tmp_path):
    record('step_speed', NOISY, tmp_path, 'xtts-nb bench train --record')
    (one,) = recorded('step_speed', tmp_path)
    origin, table = bench.record_markdown(one, about='a small GPT').split('\n\n')
    assert origin.startswith(f'a small GPT, CPU, 2 cores ({bench.cpu_name()}), {one["date"]}.')
    assert '`xtts-nb bench train --record`' in origin and 'noisy (spread above 25%): b 25%' in origin
    assert table == rows_markdown(NOISY)
    assert bench.record_markdown(one, ROWS).split('\n\n')[1] == rows_markdown(ROWS)
    plain = {'device': 'GPU', 'date': '2025-01-02', 'noisy': False, 'rows': ROWS}
    assert bench.record_origin(plain) == 'GPU, 2025-01-02.'
    more = bench.record_origin(plain | {'cpu': 'X', 'command': 'c'}, 'small')
    assert more == 'small, GPU (X), 2025-01-02. Written by `c`.'

@pytest.mark.parametrize('folder', ['.', 'nowhere'])
def test_without_a_record_the_remedy_is_named(tmp_path, folder):
    with pytest.raises(UserError, match='holds no record of 10_data; make one with xtts-nb bench --record'):
        recorded('10_data', tmp_path / folder)

@pytest.mark.parametrize('seconds,rounds', [(100., 9), (10., 4), (9.99, 3), (1., 3)])
def test_the_time_budget_ends_a_comparison(clock, seconds, rounds):
    clock.now = 50.
    nap = lambda: clock.sleep(1.) or 1
    with bench.time_budget(seconds): result = compare({'a': nap, 'b': nap}, 'step_ms', rounds=9)
    assert [len(arm.times) for arm in result.arms] == [rounds, rounds]
    assert len(compare({'a': nap}, 'step_ms', rounds=9).arms[0].times) == 9
