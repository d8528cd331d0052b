"The five checks: each can pass, fail and be skipped, and says why."
import sys
from types import SimpleNamespace

import pytest
import tensorflow as tf

from xtts_nb import check
from xtts_nb.check import CHECKS, Trial, checks_text, run_checks
from xtts_nb.config import UserError
from xtts_nb.sampler import CPU, GPU, Sample


class FakeStep:
    "A step whose losses, traces and weights are given."
    def __init__(self, losses=(3., 2., 1., *(0.99**i for i in range(1, 80))), traces=1, xla=True, moves=True, skipped=0.,
                 says=''):
        self.says = says   # on stderr, once
        self.list, self.traces, self.xla, self.moves, self.skipped, self.calls = losses, traces, xla, moves, skipped, 0
        self.weight = tf.Variable(0., name='weight')
        value = SimpleNamespace(path='weight', value=self.weight, numpy=self.weight.numpy)
        self.step = SimpleNamespace(weights=[value], optimizer=SimpleNamespace(variables=[]))
        self.graph = SimpleNamespace(experimental_get_tracing_count=lambda: self.traces)
    def __call__(self, batch, number):
        if self.moves: self.weight.assign_add(1.)
        loss = self.list[min(self.calls, len(self.list) - 1)]
        self.calls += 1
        if self.says and self.calls == 1: print(self.says, file=sys.stderr)
        return {'loss': tf.constant(loss), 'skipped': tf.constant(self.skipped)}

def no_gpu(): raise UserError('NVML: there is no driver; install it.')

def trial(small, probe=no_gpu, **steps):
    made = {name: steps.get(name) or FakeStep() for name in ('eager', 'graph', 'xla')}
    return Trial(small, 12, 20, probe, lambda config, start: made)

def result(trial, name): return next(row for row in run_checks(trial) if row['name'] == name)

@pytest.mark.cpu
def test_all_pass_or_are_skipped_on_a_cpu(small):
    rows = run_checks(trial(small))
    assert [r['name'] for r in rows] == [*CHECKS] == ['@tf.function compilation', 'XLA JIT', 'GPU placement', 'Training step',
                                                      'GPU monitoring']
    assert [r['result'] for r in rows] == ['PASSED', 'PASSED', 'SKIPPED', 'PASSED', 'SKIPPED'], rows
    assert 'CUDA_VISIBLE_DEVICES' in rows[2]['reason'] and all(r['reason'] for r in rows)
    assert checks_text(rows).count('\n') == 4 and 'GPU placement .............. SKIPPED' in checks_text(rows)

FLAWS = {   # check, flaw -> what the reason holds
    ('@tf.function compilation', 'retraced'): (lambda: {'graph': FakeStep(traces=3)}, '3 traces for 3 updates'),
    ('@tf.function compilation', 'other losses'): (lambda: {'graph': FakeStep((3., 2., 1.1))}, 'differ by 1.0e-01'),
    ('XLA JIT', 'refused'): (lambda: {'xla': FakeStep(xla=False, says='XLA refuses Where.\nmore')}, 'XLA refuses Where.'),
    ('XLA JIT', 'refused in silence'): (lambda: {'xla': FakeStep(xla=False)}, 'XLA does not compile the step'),
    ('XLA JIT', 'other losses'): (lambda: {'xla': FakeStep((3., 2., 1.1))}, 'differ by 1.0e-01'),
    ('XLA JIT', 'retraced'): (lambda: {'xla': FakeStep(traces=2)}, '2 traces'),
    ('Training step', 'rises'): (lambda: {'xla': FakeStep((3., 2., 1., 1., 2.))}, 'the loss does not fall: 1.0000'),
    ('Training step', 'NaN'): (lambda: {'xla': FakeStep((3., 2., 1., float('nan')))}, 'a loss is nan'),
    ('Training step', 'stands still'): (lambda: {'xla': FakeStep((3., 2., 1., .9, .8), moves=False)}, 'no weight has changed'),
}

@pytest.mark.parametrize('name, flaw', FLAWS, ids=lambda x: x)
def test_a_flaw_is_found(small, name, flaw):
    steps, words = FLAWS[name, flaw]
    row = result(trial(small, **steps()), name)
    assert row['result'] == 'FAILED' and words in row['reason'], row

def test_a_check_that_breaks_has_failed_and_the_next_is_made(small, monkeypatch):
    def broken(trial): raise RuntimeError('first line\nsecond line')
    monkeypatch.setitem(CHECKS, '@tf.function compilation', broken)
    rows = run_checks(trial(small))
    assert rows[0] == {'name': '@tf.function compilation', 'result': 'FAILED', 'reason': 'first line'} and len(rows) == 5

@pytest.mark.cpu
def test_tensors_that_are_not_on_the_gpu_are_named(small, monkeypatch):
    monkeypatch.setattr(check.tf.config, 'list_logical_devices', lambda kind=None: ['GPU:0'] if kind == 'GPU' else [])
    monkeypatch.setattr(check, 'to_device', lambda batch: batch)
    row = check_placement_of(trial(small))
    assert row['result'] == 'FAILED' and 'are not on a GPU, such as weight on' in row['reason']

def check_placement_of(trial):
    "As `run_checks` does, this check alone."
    try: return {'result': 'PASSED', 'reason': check.check_placement(trial)}
    except check.Skipped as e: return {'result': 'SKIPPED', 'reason': str(e)}
    except AssertionError as e: return {'result': 'FAILED', 'reason': str(e)}

@pytest.mark.cpu
def test_a_gpu_that_tensorflow_does_not_see(small, monkeypatch):
    monkeypatch.setattr(check, '_no_gpu', lambda: None)
    row = check_placement_of(trial(small))
    assert row['result'] == 'FAILED' and 'install tensorflow[and-cuda]' in row['reason']

def gpu(busy, used):
    card = GPU(0, 'card', busy, used, 24 << 30, None, None, None)
    return lambda: Sample(0., (card,), CPU('c', 1., 1., 1, 2, 1))

@pytest.mark.parametrize('probe, got, words', [
    (lambda: gpu(50., 6 << 30), 'PASSED', 'GPU 0 card: 50 % busy, 6.0 of 24 GiB'),
    (lambda: gpu(None, 6 << 30), 'FAILED', 'GPU 0 (card) gives no utilisation or no memory'),
    (lambda: gpu(50., None), 'FAILED', 'gives no utilisation or no memory'),
    (lambda: lambda: Sample(0., (), None, 'gone'), 'FAILED', 'no GPU answers: gone'),
    pytest.param(no_gpu, 'SKIPPED', 'CUDA_VISIBLE_DEVICES', marks=pytest.mark.cpu)],
    ids=['busy', 'no utilisation', 'no memory', 'gone', 'no driver'])
def test_monitoring(small, probe, got, words):
    row = result(trial(small, probe), 'GPU monitoring')
    assert row['result'] == got and words in row['reason'], row

def test_under_load(small):
    fine, sick = trial(small), trial(small, xla=FakeStep(skipped=1.))
    for t in (fine, sick): t.losses('xla', 3)
    rows = [run_checks(t, stress_seconds=0.05)[-1] for t in (fine, sick)]
    assert [r['name'] for r in rows] == ['Stress'] * 2 and rows[0]['result'] == 'PASSED' and 'clips/s' in rows[0]['reason']
    assert rows[1]['result'] == 'FAILED' and 'not finite' in rows[1]['reason']

@pytest.mark.slow
def test_the_real_step_is_asked(small):
    "Not a toy: the modes of `step_modes`, with every weight of the model."
    real = Trial(small.replace(model={'gpt': {'layers': 1, 'conditioning_layers': 1}}), 8, 12)
    assert set(real.steps) == {'eager', 'graph', 'xla'} and real.config.training.learning_rate == 1e-3
    assert all(len(getattr(step, 'step', step).weights) > 20 for step in real.steps.values())
