"Measuring a training: distinct copies, steps in each mode, and starts of TensorFlow."
import itertools
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from xtts_nb import bench, sampler
from xtts_nb import config as settings
from xtts_nb.app import speed as page
from xtts_nb.app.speed import (
    ARMS, Tiled, bench_loaders, compared_text, data_before_after, loop_seconds, matmul_ceiling,
    measure_loaders, padding, step_speed, watch_loaders)
from xtts_nb.config import XTTSConfig
from xtts_nb.data.native import BatchPlan, cached_batches
from xtts_nb.models.gpt import GPT
from xtts_nb.train import trainer as trainer_page
from xtts_nb.train.step import Update, random_batch, step_modes


# --- the data pipelines -------------------------------------------------------------------------------------

def test_copies_are_clips_of_their_own(prepared, small):
    many = Tiled(prepared, 3)
    assert len(many) == 3 * len(prepared) == len({c['id'] for c in many.clips})
    for i in (0, 13, 14, 41):
        for kind in ('codes', 'text', 'mel'):
            assert np.array_equal(many.array(kind, i), prepared.array(kind, i % 14))
            assert np.shares_memory(many.array(kind, i), getattr(many, kind))
        assert many.wav_path(i) == prepared.wav_path(i % 14) and many.samples[i] == prepared.samples[i % 14]
    many.codes[many.codes_start[14]] += 1
    assert not np.array_equal(many.array('codes', 14), many.array('codes', 0))   # another place in memory
    plan = BatchPlan(many, small.data)
    seen = [int(c) for b in cached_batches(plan, 0, plan.steps_per_epoch)
            for c, w in zip(b['clip'], b['weight']) if w]
    assert sorted(seen) == list(range(42))

def test_padding_is_what_an_epoch_pads(prepared, small):
    plan = BatchPlan(prepared, small.data)
    epoch = list(cached_batches(plan, 0, plan.steps_per_epoch))
    room = sum(b['codes'].numpy().size + b['text'].numpy().size for b in epoch)
    used = sum(float(tf.reduce_sum((b['code_length'] + b['text_length']) * tf.cast(b['weight'], tf.int32)))
               for b in epoch)
    assert padding(plan) == pytest.approx(1 - used / room)

class Clock:
    "A clock that the test sets."
    now = 0.
    def perf_counter(self): return self.now
    def sleep(self, seconds): self.now += seconds

@pytest.mark.parametrize('seconds, count', [(0.875, 7), (0.001, 4)])
def test_every_loader_is_measured_in_turn(monkeypatch, seconds, count):
    "A batch takes 1/8 s, or 1/4 s of the second one in short rounds."
    clock, taken, slow = Clock(), [], 1 if count == 7 else 2
    for where in (page, bench): monkeypatch.setattr(where, 'time', clock)
    def source(name, takes):
        while True:
            clock.sleep(takes)
            taken.append(name)
            yield name
    two = {'a': source('a', 1 / 8), 'b': source('b', slow / 8)}
    rows = measure_loaders(two, 4, {'a': 1, 'b': 2}, rounds=2, seconds=seconds)
    step, same = 4 / 298, {'spread': 0., 'cv': 0.}   # clips a second that the emulated accelerator takes
    assert rows == [{'name': 'a', 'clips_per_s': 32., 'ratio': 1., 'au': round(8 * step, 4)} | same,
                    {'name': 'b', 'clips_per_s': 32 / slow, 'ratio': 1 / slow,
                     'au': round(8 / slow * step, 4)} | same]
    # a round for warm-up and two that count, then 20 steps and the one before
    for name, ahead in (('a', 1), ('b', 2)):
        assert taken.count(name) == ahead + 1 + 4 + 3 * (ahead + count) + ahead + 21

def test_three_ways_to_a_batch_are_measured(prepared, small, stats, monkeypatch):
    asked = {}
    def measure(sources, batch_size, ahead, rounds, seconds, progress):
        asked.update(locals())
        return []
    monkeypatch.setattr(page, 'measure_loaders', measure)
    data = small.data.model_copy(update={'num_workers': 3, 'prefetch_buffer_size': 5})
    data_before_after(BatchPlan(prepared, data), stats, 2)
    assert list(asked['sources']) == ['numpy_function', 'native', 'cache']
    assert asked['batch_size'] == 4 and asked['rounds'] == 2
    assert asked['ahead'] == dict.fromkeys(asked['sources'], 3 + 5)

def test_a_round_waits_until_the_buffers_of_the_slowest_are_full(monkeypatch):
    now, pauses = [0.], []
    monkeypatch.setattr(page, 'time',
                        SimpleNamespace(perf_counter=lambda: now[0], sleep=pauses.append))
    def source(seconds):
        while True:
            now[0] += seconds
            yield 0
    measure_loaders({'slow': source(0.5), 'fast': source(0.01)}, 4, {'slow': 3, 'fast': 8}, rounds=1,
                    seconds=0.001)
    assert len(pauses) == 6 and min(pauses) >= 3 * 0.5   # warm-up, a round and the utilisation, of two

def test_the_emulated_device_is_watched_while_each_pipeline_feeds_it():
    def slow():
        while True:
            time.sleep(0.03)
            yield 1
    found = watch_loaders({'slow': slow(), 'fast': itertools.repeat(1)}, 3, seconds=0.5, interval=0.05)
    assert found['device'] == 'emulated accelerator, 10 ms a step'
    (first, one), (second, other) = found['arms']
    assert (one, other) == ('slow', 'fast') and 0 <= first < 0.4 < second
    busy = {name: [b for t, b in found['samples'] if lo < t <= hi] for name, lo, hi in (
        (one, first, second), (other, second + 0.1, 99))}
    assert len(busy['slow']) >= 3 and len(busy['fast']) >= 3
    assert np.mean(busy['slow']) < 40 < np.mean(busy['fast']) <= 100
    assert all(round(value, 2) == value for values in busy.values() for value in values)

@pytest.mark.slow
def test_the_result_names_what_was_compared_and_what_ran(prepared, dvae, monkeypatch):
    monkeypatch.setattr(page, 'fed_steps',
                        lambda pipeline, most, seconds: len(next(iter(pipeline()))['clip']) * 10.04)
    result = bench_loaders(prepared, dvae, clips=14, rounds=1, seconds=0.001)
    runs = {r['name']: r['runs'] for r in result['rows']}
    assert runs == page.RUNS
    assert result['rows'][3]['steps_per_s'] == round(10.04 * prepared.config.data.batch_size, 1)
    assert result['compared'].keys() == runs.keys() and 'codes' in result['compared']['cache']

def test_what_was_compared_as_text():
    result = {'compared': {'cache': {'clip': 0., 'codes': 0.}}, 'not_compared': {'x': 'what it draws'}}
    assert compared_text(result).splitlines()[1:] == [
        '  cache: clip, codes', '  x, not compared: what it draws']

def test_other_loaders_are_compared_with_ours(prepared, dvae, monkeypatch):
    asked, copies = {}, []
    def measure(sources, batch_size, ahead, rounds, seconds, progress):
        asked.update(locals())
        return [{'name': name, 'clips_per_s': 99.} for name in sources]
    class Peer:
        runs, ahead, not_compared = 'DALI: one mel', 7, 'what it draws'
        def compare(self): return {'mel': 0.}
        def padding(self, samples_per_code): return 1 - 2 * 1024 / 6 / samples_per_code
    class Reader(page.readers(BatchPlan(prepared, prepared.config.data), dvae.mel_stats)['cache'].__class__):
        runs = 'one more'
    def others(cache, plan, stats, stack):
        assert cache is prepared and len(plan.cache) == 28
        return {'more': Reader(plan.cache, plan)}, {'dali': Peer()}
    def tiled(cache, times):
        copies.append(times)
        return Tiled(cache, times)
    monkeypatch.setattr(page, 'Tiled', tiled)
    monkeypatch.setattr(page, 'measure_loaders', measure)
    trials = []
    def fed(pipeline, most, seconds):
        trials.append(seconds)
        return most if most < 38 else None
    monkeypatch.setattr(page, 'fed_steps', fed)
    monkeypatch.setattr(page, 'watch_loaders', lambda sources, *how: list(sources))
    equal = lambda plan, stats, encode, ours: {name: {'clip': 0.} for name in ours}   # compares for seconds
    monkeypatch.setattr(page, 'check_equal', equal)
    result = bench_loaders(prepared, dvae, clips=15, rounds=3, seconds=0.1, others=others)
    assert trials == [0.1] * 5
    rows = {row['name']: row for row in result['rows']}
    ahead = dict.fromkeys(list(rows)[:-1], 1 + prepared.config.data.num_workers) | {'dali': 7}
    assert copies == [2] and asked['ahead'] == ahead and list(rows)[-2:] == ['more', 'dali']
    assert (asked['batch_size'], asked['rounds'], asked['seconds']) == (4, 3, 0.1)
    assert rows['dali'] == {'name': 'dali', 'runs': 'DALI: one mel', 'clips_per_s': 99.,
                            'padding': round(1 - 2 / 6, 4), 'steps_per_s': None}
    assert rows['more']['runs'] == 'one more' and result['swing'] == ['numpy_function', 'native', 'cache']
    assert rows['cache']['steps_per_s'] == 37.1   # 1.5 * 99 / 4
    assert rows['cache']['padding'] == rows['native']['padding'] > 0
    assert result['compared']['dali'] == {'mel': 0.} and result['not_compared'] == {'dali': 'what it draws'}
    assert page._fed(None, prepared.config.data, 200., 1.) is None


# --- the step -----------------------------------------------------------------------------------------------

@pytest.fixture
def clock(monkeypatch):
    "A clock that the test sets; threads deliver at once."
    clock = SimpleNamespace(now=100.)
    clock.perf_counter = lambda: clock.now
    at_once = SimpleNamespace(submit=lambda f: SimpleNamespace(result=lambda found=f(): found))
    monkeypatch.setattr(trainer_page, 'time', clock)
    monkeypatch.setattr(trainer_page, 'ThreadPoolExecutor', lambda *_: at_once)
    monkeypatch.setattr(page, 'time', clock)
    return clock

def test_the_ceiling_is_the_best_of_the_step_s_products_but_for_the_first(clock, monkeypatch):
    "Eight products of (6, 16) and (16, 64) in 2 s."
    took, products, multiply = iter([1., 2., 4., 0.5]), [], tf.matmul
    noted = lambda a, b: products.append((a.shape, b.shape, a.dtype)) or multiply(a, b)
    monkeypatch.setattr(tf, 'matmul', noted)
    monkeypatch.setattr(tf, 'function',
                        lambda f: lambda: setattr(clock, 'now', clock.now + next(took)) or f())
    assert matmul_ceiling('bfloat16', 6, 16, rounds=2) == 8 * 2 * 6 * 16 * 64 / 2
    up, down = ((6, 16), (16, 64), tf.bfloat16), ((6, 64), (64, 16), tf.bfloat16)
    assert products == 3 * 4 * [up, down]

class Timed:
    "A step that advances a clock by a number of seconds, which depends on the number of steps before."
    def __init__(self, update, clock, seconds):
        self.step, self.clock, self.seconds, self.numbers = update, clock, seconds, []
    def __call__(self, batch, number):
        self.clock.now += self.seconds(len(self.numbers))
        self.numbers.append(number)   # fetched later: syncs are counted
        return {'loss': tf.constant(1.)}

@pytest.fixture(scope='module')
def quick(small): return small.replace(model={'gpt': {'layers': 1, 'conditioning_layers': 1}})

@pytest.mark.parametrize('steps, warm', [(1, 4), (3, 6), (4, 4), (5, 5)])
def test_the_loop_is_timed_behind_the_first_steps(quick, clock, steps, warm):
    step = Timed(Update(GPT(quick, 5), quick.training), clock, lambda n: 0.25 if n < warm + steps else 0.5)
    seconds, syncs = loop_seconds(step, random_batch(quick, 6, 8), quick, steps)
    assert seconds == pytest.approx(0.5) and syncs == 1
    assert [int(n) for n in step.numbers] == [*range(warm + 2 * steps)]

FLOPS, CEILINGS = 1e6, {'float32': 1e8, 'bfloat16': 3e8}

@pytest.fixture
def compared(quick, monkeypatch):
    "Rows of `step_speed` with all modes of ours, each step as given: its loss, and seconds in the loop."
    def of(losses, looped, peer=None, step_ms=150.):
        step = lambda loss: lambda batch, number: {'loss': tf.constant(loss)}
        steps = {name: step(loss) for name, loss in losses.items()}
        def compare(arms, unit, rounds, progress=None):
            assert unit == 'step_ms' and all(arm() is True for arm in arms.values())
            return SimpleNamespace(rows=lambda: [{'name': name, 'step_ms': step_ms} for name in arms])
        fakes = {'step_modes': lambda config, start, modes: steps, 'compare': compare,
                 'first_steps': lambda steps, batch: {name: 1.234 + ('bf16' in name) for name in steps},
                 'emulated_use': lambda config: {'xla': 0.9},
                 'matmul_ceiling': lambda p, rows, width: CEILINGS[p] * (rows == 4 * 22) * width / 64,
                 'step_flops': lambda config, rows, text, codes: FLOPS * (rows == 4) * text * codes,
                 'loop_seconds': lambda step, *_: (looped, 2), 'trace_count': lambda step: 9}
        for name, fake in fakes.items(): monkeypatch.setattr(page, name, fake)
        return {row.pop('name'): row for row in step_speed(quick, 6, 8, others=peer and {'coqui': peer})}
    return of

LOSSES = {name: 1.01 if 'bf16' in name else 1. for name in ARMS}

@pytest.mark.cpu   # emulates a device
def test_rows_of_the_comparison(compared):
    "4 clips in 0.15 s; 48 MFLOP; 4 latents, 6 text tokens and 8 codes, with START and STOP of both."
    row = {'step_ms': 150., 'clips_per_s': 26.667, 'au': 0.882, 'mfu': 3.2, 'positions': 22, 'dropout': 0.,
           'limit_gflops': 0.1, 'traces': 9, 'syncs': 2, 'first_s': 1.23,
           'emulated_au': None}
    half = row | {'mfu': 1.067, 'limit_gflops': 0.3, 'first_s': 2.23}
    apart = dict.fromkeys(('au', 'traces', 'syncs', 'first_s'))
    rows = compared(LOSSES, 0.17, lambda: {'loss': 0.})
    assert rows['xla'].pop('emulated_au') == 0.9
    rows['xla']['emulated_au'] = None
    assert rows == {name: half if 'bf16' in name else row for name in ARMS} | {'coqui': row | apart}
    again = compared(LOSSES, 0.17)
    again['xla']['emulated_au'] = None
    assert again == {name: rows[name] for name in ARMS}
    assert compared(LOSSES, 0.1)['xla']['au'] == 1.5   # a loop that was faster than the step alone is seen

def test_on_a_gpu_no_accelerator_is_emulated(compared, monkeypatch):
    monkeypatch.setattr(tf.config, 'list_logical_devices', lambda kind: ['GPU:0'])
    assert {row['emulated_au'] for row in compared(LOSSES, 0.17).values()} == {None}

def test_the_time_of_a_step_on_the_emulated_accelerator():
    "All blocks of the released model take 48 clips at 298 clips/s; one block of thirty takes a small part."
    assert page.emulated_step_seconds(XTTSConfig.xtts_v2()) == pytest.approx(48 / 298)
    assert 0.3 * 48 / 298 / 6 < page.emulated_step_seconds(page.NARROW) < 0.1 * 48 / 298

def test_the_emulated_accelerator_waits_for_the_host(quick, monkeypatch):
    "A step of 30 ms for one of 10 ms leaves it idle for two thirds; the first calls are not counted."
    called = []
    def slow(batch, number):
        called.append(time.sleep(0.03))
        return {'loss': 1.}
    quickly = lambda batch, number: {'loss': 1.}
    monkeypatch.setattr(page, 'step_modes', lambda config, start: {'eager': slow, 'xla': quickly})
    monkeypatch.setattr(page, 'emulated_step_seconds', lambda config: 0.01)
    found = page.emulated_use(quick, count=5)
    assert found['eager'] < 0.4 < found['xla'] <= 1 and len(called) == 7   # one to start, one to fill

def test_only_half_precision_may_differ_and_not_by_much(compared):
    for name, loss in (('graph', 1.01), ('xla', 0.99), ('xla_bf16', 1.03), ('graph_bf16', 0.97)):
        wrong = LOSSES | {name: loss}
        pytest.raises(AssertionError, compared, wrong, 1.).match(f'{name} computes other losses than eager')


# --- TensorFlow as it starts, and configured ----------------------------------------------------------------

PHASES = 'imports', 'model', 'trace', 'compile'

VARIABLES = 'TF_XLA_FLAGS', 'TF_NUM_INTRAOP_THREADS', 'TF_NUM_INTEROP_THREADS'

@pytest.mark.slow
def test_a_training_process(quick, monkeypatch, tmp_path):
    "In this process: facts of the start, then of updates; the loss of the first update is that of the step."
    config = quick.replace(training={'mode': 'graph'})
    asked = []
    monkeypatch.setattr(settings, 'setup_tf', lambda threads: asked.append((threads, Path.cwd())))
    monkeypatch.chdir(tmp_path)
    for name in VARIABLES: monkeypatch.setenv(name, '1')
    folder = tmp_path / 'there'
    folder.mkdir()
    answers = page.training_process(config.model_dump(), 6, 8, str(folder), 7, 3)
    first, then = next(answers), next(answers)
    assert asked == [(7, folder)] and not {*VARIABLES} & os.environ.keys()
    step = step_modes(config, 5, {'graph': {}})['graph']
    loss = float(step(random_batch(config, 6, 8), tf.constant(0))['loss'])
    assert first.pop('loss') == pytest.approx(loss, rel=1e-5) and first.pop('gpu_gib') is None
    assert tuple(first) == PHASES and min(first.values()) >= 0 and first['trace'] > first['compile'] / 100
    assert set(then) == {'updates', 'seconds', 'cpu_ms', 'switches'} and then['updates'] == 3
    assert 0 < then['cpu_ms'] < 1e6 and then['seconds'] > 0 and then['switches'] >= 0
    card = SimpleNamespace(memory_used=3 * 2**29)
    monkeypatch.setattr(sampler, 'visible_cards', lambda: [card])
    monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind: ['GPU:0'])
    assert next(page.training_process(config.model_dump(), 6, 8, None, None, 3))['gpu_gib'] == 1.5
    assert len(asked) == 1   # without a folder TensorFlow stays as it starts

def test_a_workspace_that_keeps_kernels():
    with page.kernel_workspace() as folder: assert settings.workspace(folder).xla_cache == folder / 'kernels'
    assert not folder.exists()

def test_a_training_is_a_process_of_this_python(quick, monkeypatch, tmp_path):
    monkeypatch.setattr(page, 'Peer', lambda *where, **what: (where, what))
    where, what = page.start_training(quick, 6, 8, tmp_path, 5, 4)
    assert where == (sys.executable, page.training_process)
    assert (what['text'], what['codes'], what['folder'], what['threads'], what['updates']) == (
        6, 8, str(tmp_path), 5, 4)
    assert XTTSConfig.from_dict(what['config']) == quick
    assert page.start_training(quick, 6, 8)[1]['folder'] is None

class Process:
    "Stands in for a training: facts of its start, then of its updates."
    def __init__(self, log, name, loss, clock, seconds):
        self.log, self.name, self.loss, self.calls = log, name, loss, 0
        self.clock, self.seconds = clock, seconds
    def __enter__(self): return self
    def __exit__(self, *_): self.log.append(f'end {self.name}')
    def __call__(self):
        self.calls, number = self.calls + 1, len(self.log)
        self.log.append(self.name)
        self.clock.now += self.seconds
        if self.calls == 1: return dict.fromkeys(PHASES, float(number)) | {'loss': self.loss, 'gpu_gib': None}
        return {'updates': 10, 'cpu_ms': 7.25 * self.calls, 'switches': 9.}

@pytest.fixture
def processes(clock, monkeypatch):
    "Trainings without processes, on a clock: 8 s without a folder, 2 s with one; calls and ends in order."
    log, losses = [], {}
    def start(config, text, codes, folder=None, threads=None, updates=10):
        name = f'{folder} {threads} {config.training.precision}'
        return Process(log, name, losses.get(name, 5.), clock, 2. if folder else 8.)
    monkeypatch.setattr(page, 'start_training', start)
    monkeypatch.setattr(bench, 'time', clock)
    return log, losses

PLAIN, KEPT = 'None None float32', 'there None float32'

def test_starts_take_turns_and_the_first_ones_do_not_count(quick, processes):
    log, losses = processes
    plain, kept = page.compare_starts(quick, 6, 8, 'there', rounds=3)
    assert log == [PLAIN, f'end {PLAIN}', KEPT, f'end {KEPT}'] * 4
    facts = dict.fromkeys(PHASES, 8.) | {'gpu_gib': None, 'loss': 5.}
    assert plain == {'name': 'default', 'start_s': 8., 'ratio': 1., 'spread': 0.} | facts
    assert (kept['name'], kept['start_s'], kept['ratio'], kept['compile']) == ('configured', 2., 4., 10.)
    losses[KEPT] = 5.01
    with pytest.raises(AssertionError, match='the starts compute other losses'):
        page.compare_starts(quick, 6, 8, 'there', rounds=1)

def test_steps_take_turns_in_processes_that_stay(quick, processes):
    log, losses = processes
    many, half = 'there 64 float32', 'there None bfloat16'
    rows = page.compare_steps(quick, 6, 8, 'there', rounds=2, updates=4)
    names = [many, KEPT, half]
    assert sorted(log[:3]) == sorted(names)   # they start together
    assert log[3:] == names * 3 + [f'end {name}' for name in reversed(names)]
    assert [row.pop('name') for row in rows] == ['host_threads', 'own_threads', 'bfloat16']
    # 7.25 ms at each answer, of which the third and the fourth count
    facts = {'cpu_ms': 25.4, 'switches': 9., 'loss': 5.}
    assert rows == [{'step_ms': 500., 'ratio': 1., 'spread': 0.} | facts] * 3
    losses[half] = 5.05
    assert page.compare_steps(quick, 6, 8, 'there', rounds=1)[2]['loss'] == 5.05
    for name, loss in ((half, 5.2), (KEPT, 5.01)):
        losses.update({half: 5., KEPT: 5.} | {name: loss})
        with pytest.raises(AssertionError, match='computes another loss'):
            page.compare_steps(quick, 6, 8, 'there', rounds=1)

def test_both_comparisons_have_one_bar_and_one_folder(quick, monkeypatch):
    seen, bar = [], []
    def starts(config, text, codes, folder, rounds, progress):
        (folder / 'kernels').mkdir()
        (folder / 'kernels' / 'xla_compile_cache_1').write_bytes(bytes(1_250_000))
        seen.append((text, codes, rounds, folder))
        if progress: progress(8, 8)
        return ['starts']
    def steps(config, text, codes, folder, rounds, updates, progress):
        seen.append((text, codes, rounds, folder, updates))
        if progress: progress(12, 12)
        return ['steps']
    monkeypatch.setattr(page, 'compare_starts', starts)
    monkeypatch.setattr(page, 'compare_steps', steps)
    result = {'rows': ['starts'], 'steps': ['steps'], 'kernels': 1.2}
    assert page.bench_config(quick, 6, 8, 3, 5, lambda *done: bar.append(done)) == result
    assert bar == [(8, 20), (20, 20)] and seen[0][:3] == (6, 8, 3) and seen[1] == (*seen[0], 5)
    assert page.bench_config(quick, 6, 8) == result and not seen[0][3].exists()

@pytest.mark.slow
def test_a_second_start_compiles_nothing(quick, cheap_xla):
    "Real processes: the counted start reads what the first one wrote; more threads, more switches."
    with page.kernel_workspace() as folder:
        rows = page.compare_starts(quick, 6, 8, folder, rounds=1)
        kept = {file.name: file.stat().st_mtime_ns for file in folder.rglob('xla_compile_cache*')}
        assert len(kept) == 2 and len({row['loss'] for row in rows}) == 1   # of gradients and of the update
        many, own, half = page.compare_steps(quick, 6, 8, folder, rounds=2, updates=5)
        assert own['switches'] < many['switches'] and half['loss'] != own['loss'] == rows[0]['loss']
        now = {file.name: file.stat().st_mtime_ns for file in folder.rglob('xla_compile_cache*')}
        assert now.items() >= kept.items()   # other threads may need more kernels, not these anew
