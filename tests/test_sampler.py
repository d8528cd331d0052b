"The sampler on recorded traces, broken probes and a driver that is made up: no GPU, no waiting."
import os
import threading
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pynvml
import pytest

from xtts_nb import sampler
from xtts_nb.config import UserError
from xtts_nb.sampler import (
    best_probe, _cpu_probe, EmulatedDevice, GPU, _group_cpu_seconds, nvml_probe, _Process, Sample, Sampler,
    summarise, summarise_variants, variant_spans, visible_cards)

def gpu_trace(*curves, step=.1):
    "One GPU per curve."
    return [Sample(i * step, tuple(GPU(k, f'Card {k}', v) for k, v in enumerate(now)))
            for i, now in enumerate(zip(*curves))]

@pytest.fixture
def driver(monkeypatch):
    "A made-up driver with two cards; its readings can be replaced by errors."
    state = SimpleNamespace(count=2, use={0: 10, 1: 80}, power={0: 50_000, 1: 300_500}, fail={}, asked=[],
                            now=100., tells=set(),
                            activity={'SM_UTIL': 60., 'ANY_TENSOR_UTIL': 40., 'PCIE_RX_PER_SEC': 2.},
                            processes={0: [], 1: []}, process_use={0: [], 1: []}, since=[])
    def read(name, value):
        def call(handle, *args):
            state.asked.append((name, handle))
            if (name, handle) in state.fail: raise pynvml.NVMLError(state.fail[name, handle])
            return value(handle, *args)
        return call
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    monkeypatch.setattr(pynvml, 'nvmlInit', lambda: None)
    monkeypatch.setattr(pynvml, 'nvmlDeviceGetCount', lambda: state.count)
    monkeypatch.setattr(pynvml, 'nvmlDeviceGetHandleByIndex', lambda i: i)
    for name, value in {
        'Name': lambda h: f'Card {h}',
        'UtilizationRates': lambda h: SimpleNamespace(gpu=state.use[h], memory=5),
        'MemoryInfo': lambda h: SimpleNamespace(used=(h + 1) << 30, total=8 << 30, free=0),
        'PowerUsage': lambda h: state.power[h], 'Temperature': lambda h, which: 40 + h,
        'ClockInfo': lambda h, which: 1500 + h,
        'ComputeRunningProcesses': lambda h: state.processes[h],
        'ProcessUtilization': lambda h, since: state.since.append(since) or state.process_use[h],
        'PcieThroughput': lambda h, counter: 10 + counter,
    }.items(): monkeypatch.setattr(pynvml, f'nvmlDeviceGet{name}', read(name, value))
    told = {getattr(pynvml, f'NVML_GPM_METRIC_{name}'): value for name, value in state.activity.items()}
    def metrics(ask):
        for metric in ask.metrics[:ask.numMetrics]:   # ctypes: not copies
            known = metric.metricId in told
            metric.nvmlReturn = 0 if known else pynvml.NVML_ERROR_NOT_SUPPORTED
            metric.value = told[metric.metricId] if known else 0
    monkeypatch.setattr(pynvml, 'nvmlGpmQueryDeviceSupport',
                        read('Gpm', lambda h: SimpleNamespace(isSupportedDevice=h in state.tells)))
    monkeypatch.setattr(pynvml, 'nvmlGpmSampleAlloc', pynvml.c_nvmlGpmSample_t)
    monkeypatch.setattr(pynvml, 'nvmlGpmSampleGet', read('Snapshot', lambda h, into: None))
    monkeypatch.setattr(pynvml, 'nvmlGpmMetricsGet', metrics)
    monkeypatch.setattr(sampler.time, 'perf_counter', lambda: state.now)
    return state

def test_nvml_units(driver):
    probe = nvml_probe()
    driver.now += 1   # time for both cards' buses
    s, bus = probe(), dict(from_host=11 * 1024., to_host=10 * 1024.)
    assert s.gpus == (GPU(0, 'Card 0', 10., 1 << 30, 8 << 30, 50., 40, 1500, **bus),
                      GPU(1, 'Card 1', 80., 2 << 30, 8 << 30, 300.5, 41, 1501, **bus))
    assert s.error is None and s.cpu.memory_total == psutil.virtual_memory().total

def test_nvml_what_a_card_does_not_offer_is_none_and_a_lost_card_keeps_its_neighbour(driver):
    fields = {'UtilizationRates': 'utilisation', 'MemoryInfo': 'memory_used', 'PowerUsage': 'power'}
    codes = pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_NO_PERMISSION
    driver.fail = dict(zip(((name, 0) for name in fields), (*codes, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)))
    probe = nvml_probe()
    first, second = probe().gpus
    for field in fields.values():
        assert getattr(first, field) is None and getattr(second, field) is not None
    driver.fail['UtilizationRates', 0] = pynvml.NVML_ERROR_GPU_IS_LOST
    s = probe()
    assert s.gpus[0] == GPU(0, 'Card 0') and s.gpus[1].utilisation == 80 and s.error.startswith('GPU 0: ')
    driver.fail.clear()
    assert probe().gpus[0].utilisation == 10 and probe().error is None

def test_nvml_activity_of_a_card_that_tells(driver):
    driver.tells.add(1)
    probe = nvml_probe()
    assert probe().gpus[1].sm_active is None   # two snapshots make a reading
    driver.now += .05
    assert probe().gpus[1].sm_active is None
    assert driver.asked.count(('Snapshot', 1)) == 1   # too soon for the second
    driver.now += .06
    old, new = probe().gpus
    assert (new.sm_active, new.tensor_active, new.memory_active, new.from_host) == (60., 40., None, 2.**21)
    assert (old.sm_active, old.tensor_active) == (None, None)
    driver.fail['Snapshot', 1] = pynvml.NVML_ERROR_NO_PERMISSION
    driver.now += 1
    s = probe()
    assert s.error is None and s.gpus[1].sm_active is None and s.gpus[1].utilisation == 80

def test_nvml_processes_of_each_card(driver):
    running = SimpleNamespace(pid=os.getpid(), usedGpuMemory=5)
    busy = SimpleNamespace(pid=2**22 + 1, usedGpuMemory=None)
    driver.processes[1] = [running, busy]
    driver.process_use[1] = [SimpleNamespace(pid=busy.pid, smUtil=70, timeStamp=9),
                             SimpleNamespace(pid=running.pid, smUtil=2**31, timeStamp=9)]
    probe = nvml_probe()
    driver.now += 1
    first, second = probe().gpus
    assert first.processes == ()
    assert second.processes == (_Process(os.getpid(), psutil.Process().name(), 5),
                                _Process(busy.pid, None, None, 70.))
    driver.fail['ProcessUtilization', 1] = pynvml.NVML_ERROR_NOT_FOUND   # nobody worked since the last time
    driver.now += 2
    assert probe().gpus[1].processes[1] == _Process(busy.pid)
    # each card what came since the last time; the failed call is not among them
    assert driver.since == [0, 0, 0]
    driver.fail.clear()
    driver.process_use[1] = [SimpleNamespace(pid=busy.pid, smUtil=100, timeStamp=12),
                             SimpleNamespace(pid=running.pid, smUtil=101, timeStamp=11)]
    driver.now += 2
    assert [p.utilisation for p in probe().gpus[1].processes] == [None, 100.] and driver.since[3:] == [0, 9]

def test_each_reason_has_its_remedy_and_the_cpu_is_shown_instead(driver, monkeypatch):
    lines = []
    assert best_probe(lines.append)().devices.keys() == {'GPU 0', 'GPU 1', 'CPU'} and not lines
    for code, fix in ((pynvml.NVML_ERROR_NO_PERMISSION, '/dev/nvidia'),
                         (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, 'install the NVIDIA driver')):
        def refused(code=code): raise pynvml.NVMLError(code)
        monkeypatch.setattr(pynvml, 'nvmlInit', refused)
        with pytest.raises(UserError, match=fix): nvml_probe()
    assert best_probe(lines.append)().devices.keys() == {'CPU'} and 'CPU instead' in lines.pop() and not lines

def test_disk_rates_are_differences(monkeypatch):
    totals, now = iter([(100, 0), (1100, 40), (1100, 40), (100, 100), None, (300, 100)]), [0.]
    monkeypatch.setattr(sampler, '_disk_bytes', lambda: next(totals))
    monkeypatch.setattr(sampler.time, 'perf_counter', lambda: now[0])
    read = sampler._disk_rates()
    for now[0], rates in (
            (0., (None, None)), (2., (500., 20.)), (2.5, (500., 20.)), (4., (0., 0.)),   # once a second
            (5., (0., 60.)), (8., (0., 60.)), (9., (50., 0.))):   # began again at 0; nobody tells; as before
        assert read() == rates

def test_cpu_probe_waits_for_two_hundredths_of_a_second_and_stays_within_100_percent(monkeypatch):
    clocks = iter([(0., 0., 0., 0.), (.02, .01, .04, .01), (1., .5, 0., 0.), (1., .5, 3., 1.),
                   (2., 9., 4., 0.), (3., 8., 5., 9.)])
    monkeypatch.setattr(sampler, '_cpu_clocks', lambda: lambda: next(clocks))
    monkeypatch.setattr(sampler, '_usable_cores', lambda: 2.)
    probe = _cpu_probe()
    samples = [probe() for _ in range(5)]
    assert [s.time for s in samples] == [.02, 1., 1., 2., 3.]
    assert [(s.cpu.utilisation, s.cpu.process) for s in samples] == [
        (None, None), (None, None), (33.33, 25.), (0., 100.), (100., 0.)]

def test_seconds_of_the_cpu(monkeypatch):
    "Guests are counted in user as well; waiting for a disk is no work; a third core is not this process's."
    times = dict(user=5, nice=1, system=2, idle=10, iowait=3, guest=2, guest_nice=1)
    one, other = (namedtuple('Times', times)(*(n * v for v in times.values())) for n in (1, 2))
    monkeypatch.setattr(psutil, 'cpu_count', lambda: 3)
    monkeypatch.setattr(psutil, 'cpu_times', lambda percpu=False: [other, one, other] if percpu else one)
    monkeypatch.setattr(sampler, '_cpu_quota', lambda: (3., Path('/none')))
    for allowed, total, busy in (({0, 1, 2}, 21, 8), ({0, 1}, 63, 24)):
        monkeypatch.setattr(os, 'sched_getaffinity', lambda pid, its=allowed: its, raising=False)
        assert sampler._cpu_clocks()()[2:] == (total, busy)

@pytest.mark.parametrize('files, seconds', [
    ({'cpu.stat': 'usage_usec 2500000\nuser_usec 1\n'}, 2.5), ({'cpu.stat': 'nr_periods 1\n'}, None),
    ({}, None),
    ({'cpu/x/cpu.stat': 'nr_periods 1\n', 'cpuacct/x/cpuacct.usage': '1500000000\n'}, 1.5),
    ({'cpu/x/cpuacct.usage': '500000000\n'}, .5)], ids=['v2', 'v1 stat', 'none', 'v1', 'v1 joined'])
def test_seconds_of_a_control_group(tmp_path, monkeypatch, files, seconds):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    group = tmp_path / 'cpu/x' if (tmp_path / 'cpu').is_dir() else tmp_path
    assert _group_cpu_seconds(group) == seconds
    monkeypatch.setattr(sampler, '_cpu_quota', lambda: (.5, group))
    wall, _, total, busy = sampler._cpu_clocks()()
    assert (total == .5 * wall and busy == seconds) == (seconds is not None)

def test_summary_numbers_of_each_device():
    devices = summarise(gpu_trace(list(np.arange(101.)), [0.] * 101))['devices']
    d, idle = devices['GPU 0'], devices['GPU 1']
    assert [d[k] for k in ('min', 'p50', 'p95', 'max', 'mean', 'idle_share')] == [0, 50, 95, 100, 50, 5 / 101]
    assert idle['mean'] == 0 and idle['idle_share'] == 1 and idle['longest_idle_s'] == pytest.approx(10)
    gaps = summarise(gpu_trace([0., 0., 9., 4.9, 4.9, None, 4.9], step=1.))['devices']['GPU 0']
    assert gaps['longest_idle_s'] == 2   # between 9 and the gap
    used = summarise([Sample(5. + i, (GPU(0, 'a', 1., n, 9),)) for i, n in enumerate((3, 7, None, 5))])
    assert used['seconds'] == 3 and used['devices']['GPU 0']['memory_max'] == 7

def test_thread_samples_survives_and_ends():
    "The one test with a thread: it waits for events, not for time."
    seen, lines, gate = [], [], threading.Event()
    def probe():
        seen.append(threading.current_thread())
        if len(seen) == 2: raise RuntimeError('gone')
        if len(seen) >= 5: gate.set()
        return Sample(float(len(seen)))
    with Sampler(probe, interval=.001, say=lines.append) as s:
        assert gate.wait(20)
        thread = s._thread
        assert s.start() is s and s._thread is thread      # starting twice is starting once
        s.mark('here')
    assert not thread.is_alive() and set(seen) == {thread} and thread.daemon and len(lines) == 1
    taken = s.taken
    assert taken == len(seen) >= 5 and s.samples[1].error == 'RuntimeError: gone' and s.marks[0][1] == 'here'
    gate.clear()
    with s: assert gate.wait(20)                           # and it can start again

@pytest.fixture
def named(driver, monkeypatch):
    "Two cards with UUIDs; the second one has two MIG devices, 10 and 11."
    uuid = {0: 'GPU-aaaa1111', 1: 'GPU-aabb2222', 10: 'MIG-cccc3333', 11: 'MIG-ccdd4444'}
    def part(handle, i):
        if handle != 1 or i > 1: raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return 10 + i
    driver.use |= {10: 0, 11: 0}
    driver.power |= {10: 0, 11: 0}
    driver.processes |= {10: [], 11: []}
    driver.process_use |= {10: [], 11: []}
    monkeypatch.setattr(pynvml, 'nvmlDeviceGetUUID', uuid.get)
    monkeypatch.setattr(pynvml, 'nvmlDeviceGetMaxMigDeviceCount', lambda handle: 7)
    monkeypatch.setattr(pynvml, 'nvmlDeviceGetMigDeviceHandleByIndex', part)
    return driver

@pytest.mark.parametrize('shown, found', [
    (None, ['Card 0', 'Card 1']), ('1,0', ['Card 1', 'Card 0']), ('GPU-aaaa1111', ['Card 0']),
    (' GPU-aab , 0', ['Card 1', 'Card 0']),
    ('2', []), ('GPU-aa', []), ('GPU-zz,0', []), ('0,7,1', ['Card 0']), ('-1', []), ('', []),
    ('1,-1,0', ['Card 1']),
    ('MIG-ccdd4444', ['Card 11']), ('MIG-ccc', ['Card 10']), ('MIG-cc', [])])
def test_cards_are_found_as_cuda_finds_them(named, monkeypatch, shown, found):
    "By number, UUID or its beginning; CUDA ignores all names after an unknown or ambiguous one."
    if shown is not None: monkeypatch.setenv('CUDA_VISIBLE_DEVICES', shown)
    cards = visible_cards()
    assert [card.name for card in cards] == found and all(card.memory_total == 8 << 30 for card in cards)
    if found:   # the live view shows the same ones, under TensorFlow's numbers
        gpus = nvml_probe()().gpus
        assert [(gpu.label, gpu.name) for gpu in gpus] == [(f'GPU {i}', name) for i, name in enumerate(found)]
    else:
        with pytest.raises(UserError, match='CUDA_VISIBLE_DEVICES (hides every|names no) GPU'): nvml_probe()

def test_an_emulated_device_is_busy_while_it_computes():
    device = EmulatedDevice()
    for begin, end in ((10., 10.5), (10.8, 12.), (20., 21.), (20., 21.)): device.computes(begin, end)
    assert device.busy(10., 11.) == pytest.approx(70) and device.busy(11., 13.) == 50
    assert device.busy(20., 21.) == 100   # overlapping steps count once
    assert device.busy(10., 11.) == device.busy(24., 24.) == 0   # both are over, and forgotten
    begin = sampler.time.perf_counter()
    assert device.feed(iter([np.zeros(1)] * 3), .01) == 3
    assert device.busy(begin, begin + 10) == pytest.approx(.3)

def test_an_arm_ends_where_the_next_begins():
    variants = [(1., 'slow'), (3., 'fast'), (4., 'slow')]
    assert variant_spans(variants, 9.) == [('slow', 1., 3.), ('fast', 3., 4.), ('slow', 4., 9.)]
    slow, fast = (d['GPU 0'] for d in summarise_variants(gpu_trace([50., 50., 0., 20., 100., 40.], step=1.),
                                                     variants).values())
    assert (slow['samples'], fast['samples'], slow['mean']) == (3, 1, 20)   # at 2, 3 and 5 s; at 4 s
    assert slow['variation'] == pytest.approx(np.std([0, 20, 40]) / 20)
    assert summarise_variants([], variants) == {'slow': {}, 'fast': {}}
