"`check`, `configure`, `report`, `quick-fix`: what passes, fails or is skipped; settings are read back."
import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import tensorflow as tf
import yaml

from process import SMALL, python, xtts_nb
from xtts_nb.app import check, quick_fix
from xtts_nb.app.check import _CHECKS, run_checks, StepTrial
from xtts_nb.app.configure import environment, TFSettings, verify_settings, write_environment
from xtts_nb.app.quick_fix import _change_for, _LEARNING
from xtts_nb.settings import flat, from_environment
from xtts_nb.config import GPTTraining, UserError, XTTSConfig
from xtts_nb.sampler import CPU, GPU, Sample
from xtts_nb.train.step import MODES, choose_xla, step_modes

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

# --- settings of TensorFlow ---------------------------------------------------------------------------------

@pytest.fixture
def clean(monkeypatch):
    "No settings of an earlier test."
    for name in environment(TFSettings(memory_limit=1, allocator='cuda_malloc_async')):
        monkeypatch.delenv(name, raising=False)

def test_a_shell_reads_the_file_and_training_takes_its_keys(clean, tmp_path, monkeypatch):
    "Each setting differs from its default."
    monkeypatch.setenv('TF_XLA_FLAGS', '--tf_xla_auto_jit=1 --other=2')   # flags of others stay
    write_environment(tmp_path / 'tf.env', TFSettings(3, 512, 'cuda_malloc_async', False, False))
    shell = 'set -a; . ./tf.env; set +a; exec "$0" -c "import os, json; print(json.dumps(dict(os.environ)))"'
    done = subprocess.run(['sh', '-c', shell, sys.executable], cwd=tmp_path, capture_output=True, text=True,
                          check=True)
    got = json.loads(done.stdout)
    expected = {'TF_NUM_INTRAOP_THREADS': '3', 'TF_NUM_INTEROP_THREADS': '3', 'XTTS_NB_MEMORY_LIMIT': '512',
                'TF_GPU_ALLOCATOR': 'cuda_malloc_async', 'TF_XLA_FLAGS': '--other=2'}
    assert expected.items() <= got.items() and 'TF_FORCE_GPU_ALLOW_GROWTH' not in got
    for name in ('XTTS_NB_MODE', 'XTTS_NB_PRECISION'): monkeypatch.setenv(name, got[name])
    assert from_environment() == {'training.gpt.precision': 'float32'} | {
        f'training.{part}.mode': 'graph' for part in ('gpt', 'dvae', 'decoder')}
    default = environment(TFSettings())
    assert default['TF_FORCE_GPU_ALLOW_GROWTH'] == 'true'
    assert default['TF_XLA_FLAGS'] == '--other=2 --tf_xla_auto_jit=2'

CHILD = '''
import json
from xtts_nb.app.configure import configure
first = configure(threads=1, xla=True, mixed_precision=True)
import keras, tensorflow as tf
layer = keras.layers.Dense(2)
layer(tf.ones((1, 2)))
late = configure(threads=2, xla=False, mixed_precision=False)
dtypes = layer.compute_dtype, keras.layers.Dense(2).compute_dtype
print(json.dumps([first, late, *dtypes, bool(tf.config.optimizer.get_jit())]))
'''

def test_what_is_set_in_tensorflow_is_read_back(clean):
    done = python(CHILD, env={k: v for k, v in os.environ.items() if k != 'TF_XLA_FLAGS'})
    assert done.code == 0, done.err
    first, late, *got = json.loads(done.out.splitlines()[-1])
    assert {row['setting']: row['got'] for row in first} | {'allocator': None} == {
        'intra-op threads': 1, 'inter-op threads': 1, 'memory growth': None, 'allocator': None, 'XLA': True,
        'precision': 'mixed_bfloat16'}
    assert not [row for row in first if row['ok'] is False] and got == ['bfloat16', 'float32', False]
    assert [(row['got'], row['ok']) for row in late if 'threads' in row['setting']] == [(1, False)] * 2

@pytest.mark.slow
def test_a_child_trains_with_the_settings(clean, cheap_xla):
    "The page of `configure` has one without XLA, in bfloat16."
    rows = {row['setting']: row for row in verify_settings(TFSettings(threads=2, mixed_precision=False))}
    assert not [row for row in rows.values() if row['ok'] is False]
    assert [rows[name]['got'] for name in ('intra-op threads', 'XLA', 'precision')] == [
        2, choose_xla(GPTTraining(mode='auto', precision='float32'))[0], 'float32']

# --- what a training needs, and what is changed for a finding -----------------------------------------------

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
def test_quick_fix_writes_settings_that_are_faster_and_load(tmp_path, small, cheap_xla):
    config = small.replace(model={'gpt': {'num_layers': 1, 'conditioning_layers': 1}}, data={'buckets': 1},
                           training={'gpt': {'mode': 'eager'}})
    (tmp_path / 'toy.yaml').write_text(config.to_yaml())
    done = xtts_nb('quick-fix', '--config', 'toy.yaml', '--batch-size', '2', '--num-batches', '8',
                   '--seconds', '12', '--json', cwd=tmp_path)
    assert done.code == 0, done.err
    assert 'training.gpt.mode: eager -> auto' in done.json['changes'] and done.json['verified_gain'] > 1
    fixed = yaml.safe_load((tmp_path / 'fixed.yaml').read_text())
    assert (fixed['training']['gpt']['mode'], fixed['data']['batch_size']) == ('auto', 2)
