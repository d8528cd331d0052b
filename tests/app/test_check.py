"`check`, `report`, `diagnose --apply`: what passes, fails or is skipped, and what is changed."
import sys
import threading
from types import SimpleNamespace

import pytest
import tensorflow as tf
import yaml

from process import SMALL, python, xtts_nb
from xtts_nb.app import check, quick_fix
from xtts_nb.app.check import _CHECKS, run_checks, StepTrial
from xtts_nb.app.quick_fix import _change_for, _LEARNING
from xtts_nb.settings import flat
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.sampler import CPU, GPU, Sample
from xtts_nb.train.step import MODES, step_modes

TINY = XTTSConfig.tiny()

class FakeStep:
    "A step whose losses, traces and weights are given."
    def __init__(self, losses=(3., 2., 1., *(0.99**i for i in range(1, 80))), traces=1, xla=True, moves=True,
                 skipped=0., message='', trace_counts=()):
        self.message = message                   # printed on stderr, once
        self.trace_counts = list(trace_counts)   # a number for each time that the traces are counted
        self.losses, self.traces, self.xla, self.moves, self.skipped = losses, traces, xla, moves, skipped
        self.calls = 0
        self.weight = tf.Variable(0., name='weight')
        value = SimpleNamespace(path='weight', value=self.weight, numpy=self.weight.numpy)
        self.step = SimpleNamespace(weights=[value], optimizer=SimpleNamespace(variables=[]))
        count = lambda: self.trace_counts.pop(0) if self.trace_counts else self.traces
        self.graph = SimpleNamespace(experimental_get_tracing_count=count)
    def __call__(self, batch, number):
        if self.moves: self.weight.assign_add(1.)
        loss = self.losses[min(self.calls, len(self.losses) - 1)]
        self.calls += 1
        if self.message and self.calls == 1: print(self.message, file=sys.stderr)
        return {'loss': tf.constant(loss), 'skipped': tf.constant(self.skipped)}

def no_gpu(): raise UserError('NVML: there is no driver; install it.')

def trial(small, probe=no_gpu, **steps):
    made = {name: steps.get(name) or FakeStep() for name in ('eager', 'graph', 'xla')}
    return StepTrial(small, 12, 20, probe, lambda config, start: made)

NAN = float('nan')
FLAWS = [   # check, the step that has the flaw, and a word of the reason
    ('@tf.function compilation', {'graph': dict(traces=3)}, '3 traces'),
    ('@tf.function compilation', {'graph': dict(losses=(3., 2., 1.1))}, 'differ'),
    ('XLA JIT', {'xla': dict(xla=False, message='XLA refuses Where.\nmore')}, 'XLA refuses Where.'),
    ('XLA JIT', {'xla': dict(losses=(3., 2., 1.1))}, 'differ'),
    ('XLA JIT', {'xla': dict(traces=2)}, '2 traces'),
    ('Training step', {'xla': dict(losses=(3., 2., 1., 1., 2.))}, 'not fall'),
    ('Training step', {'xla': dict(losses=(3., 2., 1., NAN))}, 'nan'),
    ('Training step', {'xla': dict(losses=(3., 2., 1., .9, .8), moves=False)}, 'no weight')]

@pytest.mark.parametrize('name, steps, word', FLAWS)
def test_a_flaw_is_found(small, name, steps, word):
    rows = run_checks(trial(small, **{mode: FakeStep(**how) for mode, how in steps.items()}))
    row = next(row for row in rows if row['name'] == name)
    assert row['result'] == 'FAILED' and word in row['reason'], row

def gpu(busy, used):
    card = GPU(0, 'card', busy, used, 24 << 30, None, None, None)
    return lambda: Sample(0., (card,), CPU('c', 1., 1., 1, 2, 1))

@pytest.mark.parametrize('probe, got', [
    (lambda: gpu(50., 6 << 30), 'PASSED'), (lambda: gpu(None, 6 << 30), 'FAILED'),
    (lambda: gpu(50., None), 'FAILED'), (lambda: lambda: Sample(0., (), None, 'gone'), 'FAILED'),
    pytest.param(no_gpu, 'SKIPPED', marks=pytest.mark.cpu)],
    ids=['busy', 'no utilisation', 'no memory', 'gone', 'no driver'])
def test_monitoring(small, probe, got): assert run_checks(trial(small, probe))[-1]['result'] == got

@pytest.mark.parametrize('step, result', [
    ({}, '20 updates in 4 s, 20.0 clips/s, GPU 0 50 % busy, CPU 1 % busy'),
    ({'skipped': 1.}, '20 of 20 updates had a loss or gradient that is not finite'),
    ({'trace_counts': [3, 3]}, '20 updates in 4 s'),
    ({'trace_counts': [1, 2, 2]}, 'the step was traced 2 times')], ids=str)
def test_the_result_of_a_load(small, monkeypatch, step, result):
    "Ten updates at a time, until two seconds are over."
    clock, sampled, read = iter([0., 0., 1., 2., 4.]), threading.Event(), gpu(50., 6 << 30)
    def now():
        if (seconds := next(clock)) > 0: assert sampled.wait(20)
        return seconds
    monkeypatch.setattr(check, 'time', SimpleNamespace(perf_counter=now))
    t = trial(small.replace(data={'batch_size': 4}), xla=FakeStep(**step))
    try: text = check.stress(t, 2., lambda: sampled.set() or read())
    except AssertionError as e: text = str(e)
    assert text.startswith(result), text

def test_what_a_gpu_is_given_holds_nothing_that_it_cannot_do(small):
    "A real step of one block, traced and never compiled. Codes are made in float32, as on a CPU."
    config = small.replace(model={'gpt': {'num_layers': 1, 'conditioning_layers': 1}},
                           training={'gpt': {'precision': 'bfloat16', 'mode': 'xla'}})
    only = {'xla': MODES['xla']}
    real = StepTrial(config, 12, 20, make_steps=lambda config, start: step_modes(config, start, only))
    assert len(real.steps['xla'].step.weights) > 20
    found = [(row['program'], row['kind'], row['op']) for row in check.preflight_rows(real)]
    assert {pair[:2] for pair in found} == {('data', 'float32 product'), ('data', 'layout')}
    assert {op for *_, op in found} <= {'MatMul', 'BatchMatMulV2', 'Einsum', 'Conv2D'}

# --- the commands -------------------------------------------------------------------------------------------

@pytest.mark.parametrize('result, code', [('PASSED', 0), ('SKIPPED', 0), ('FAILED', 1)])
def test_check_ends_with_1_where_one_failed(monkeypatch, ran, result, code):
    rows = [{'name': 'a', 'result': 'PASSED', 'reason': 'x'}, {'name': 'b', 'result': result, 'reason': 'y'}]
    monkeypatch.setattr(check, 'run_checks', lambda *_: rows)
    monkeypatch.setattr(check, 'preflight_rows', lambda trial: [])
    done = ran('check --json')
    assert done.code == code and done.json['checks'] == rows
    assert done.json[result.lower()] == 1 + (result == 'PASSED')

@pytest.mark.slow
def test_check_and_report_as_a_user_runs_them(kernels):
    done = python(SMALL, 'check', '--stress-duration', '1', '--json', cwd=kernels)
    assert done.code == 0 and done.json['failed'] == 0
    assert [r['name'] for r in done.json['checks']] == [*_CHECKS, 'Stress']
    assert {row['program'] for row in done.json['preflight']} == {'step', 'data', 'speech'}
    done = python(SMALL, 'report', '--seconds', '0.1', '--out', 'report.md', cwd=kernels)
    assert done.code == 0, done.err
    text = (kernels / 'report.md').read_text()
    assert [line for line in text.splitlines() if line.startswith('## ')] == [
        '## Machine', '## The training step', '## Checks']
    assert 'FAILED' not in text and '| tensorflow |' in text and '- compiled: ' in text

# --- what is changed for a finding --------------------------------------------------------------------------

SLOW = TINY.replace(data={'prefetch_buffer_size': 1, 'num_workers': 2, 'batch_size': 4,
                          'prefetch_to_gpu': False}, training={'gpt': {'mode': 'eager'}})

@pytest.mark.parametrize('name, given, changed', [   # with six cores; of a fix, its number
    ('no prefetch', {}, {'data.prefetch_buffer_size': 4}),
    ('no prefetch', {'data': {'prefetch_buffer_size': 9}}, None),
    ('oscillation: prefetch(6)', {}, {'data.prefetch_buffer_size': 6}),
    ('single-threaded map', {}, {'data.num_workers': 6}),
    ('oversubscription', {'data': {'num_workers': 99}}, {'data.num_workers': 6}),
    ('oversubscription', {'data': {'num_workers': 6}}, None), ('input-bound', {}, {'data.num_workers': 6}),
    ('input-bound', {'data': {'num_workers': 5}}, {'data.num_workers': 10}),
    ('copy-bound', {}, {'data.prefetch_to_gpu': True}),
    ('variable shapes', {}, {'data.pad_to_fixed_length': True}),
    ('compiled again for each shape', {}, {'data.pad_to_fixed_length': True}),
    ('tiny batch', {}, {'data.batch_size': 16}), ('no XLA', {}, {'training.gpt.mode': 'xla'}),
    ('float32 on tensor cores', {}, {'training.gpt.precision': 'bfloat16'}),
    ('step not compiled', {}, {'training.gpt.mode': 'auto'}), ('something else', {}, None)])
def test_the_change_for_a_finding(monkeypatch, name, given, changed):
    monkeypatch.setattr(quick_fix, 'cores', lambda: 6)
    cause, _, fix = name.partition(': ')
    found = _change_for(SimpleNamespace(cause=cause, fix=fix), SLOW.replace(**given))
    assert (found and flat(found)) == changed
    assert {*_LEARNING} == {'data.batch_size', 'training.gpt.precision'} <= {*flat(TINY.model_dump())}

@pytest.mark.slow
def test_diagnose_writes_settings_that_are_faster_and_load(tmp_path, small, cheap_xla):
    config = small.replace(model={'gpt': {'num_layers': 1, 'conditioning_layers': 1}}, data={'buckets': 1},
                           training={'gpt': {'mode': 'eager'}})
    (tmp_path / 'toy.yaml').write_text(config.to_yaml())
    done = xtts_nb('diagnose', '--apply', '--out', 'fixed.yaml', '--config', 'toy.yaml', '--batch-size', '2',
                   '--num-batches', '8', '--seconds', '12', '--json', cwd=tmp_path)
    assert done.code == 0, done.err
    assert 'training.gpt.mode: eager -> auto' in done.json['changes'] and done.json['verified_gain'] > 1
    fixed = yaml.safe_load((tmp_path / 'fixed.yaml').read_text())
    assert (fixed['training']['gpt']['mode'], fixed['data']['batch_size']) == ('auto', 2)
