"The five checks: each can pass, fail and be skipped, and says why."
import json
import sys
import threading
from types import SimpleNamespace

import pytest
import tensorflow as tf

from clock import Clock
from xtts_nb import __version__
from xtts_nb.app import check
from xtts_nb.bench import cpu_name, device_name
from xtts_nb.app.check import CHECKS, StepTrial, checks_text, run_checks
from xtts_nb.config import UserError
from xtts_nb.app.recipes import config_diff
from xtts_nb.sampler import CPU, GPU, Sample
from xtts_nb.train.step import MODES, step_modes


class FakeStep:
    "A step whose losses, traces and weights are given."
    def __init__(self, losses=(3., 2., 1., *(0.99**i for i in range(1, 80))), traces=1, xla=True, moves=True,
                 skipped=0., message='', trace_counts=()):
        self.message = message              # printed on stderr, once
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

def show_gpu(monkeypatch):
    "TensorFlow lists a GPU."
    devices = lambda kind=None: ['GPU:0'] * (kind == 'GPU')
    monkeypatch.setattr(check.tf.config, 'list_logical_devices', devices)

def no_gpu(): raise UserError('NVML: there is no driver; install it.')

def trial(small, probe=no_gpu, **steps):
    made = {name: steps.get(name) or FakeStep() for name in ('eager', 'graph', 'xla')}
    return StepTrial(small, 12, 20, probe, lambda config, start: made)

def result(trial, name): return next(row for row in run_checks(trial) if row['name'] == name)

@pytest.mark.cpu
def test_all_pass_or_are_skipped_on_a_cpu(small):
    rows = run_checks(trial(small))
    assert [r['name'] for r in rows] == [*CHECKS] == ['@tf.function compilation', 'XLA JIT', 'GPU placement',
                                                      'Training step',
                                                      'GPU monitoring']
    assert [r['result'] for r in rows] == ['PASSED', 'PASSED', 'SKIPPED', 'PASSED', 'SKIPPED'], rows
    assert 'CUDA_VISIBLE_DEVICES' in rows[2]['reason'] and all(r['reason'] for r in rows)
    assert checks_text(rows).count('\n') == 4 and 'GPU placement .............. SKIPPED' in checks_text(rows)

def test_the_step_that_is_tried(small):
    "A constant rate of 1e-3, so that few updates show something; XLA where it compiles, else the graph."
    start = small.replace(training={'learning_rate': 1e-5, 'warmup_steps': 9, 'schedule': 'noam'})
    assert {k: new for k, (_, new) in config_diff(start, trial(start).config).items()} == {
        'training.learning_rate': 1e-3, 'training.warmup_steps': 0, 'training.schedule': 'constant'}
    for xla, name in ((FakeStep(), 'xla'), (FakeStep(xla=False), 'graph'), (object(), 'graph')):
        t = trial(small, xla=xla)
        assert t.best is t.steps[name]
    assert t.losses('eager') == [3., 2., 1.] == trial(small).eager and len(t.losses('eager', 5)) == 5
    assert t.batch['text'].shape == (small.data.batch_size, 12) and t.batch['codes'].shape[1] == 20

@pytest.mark.parametrize('graph, eager, result', [
    ((4., 4.0032, -4.0032), (4., 4., -4.), 'PASSED'), ((4., 4., 4.0048), (4., 4., 4.), 'FAILED'),
    ((4., 3.9952, 4.), (4., 4., 4.), 'FAILED'), ((-4.0048, 4., 4.), (-4., 4., 4.), 'FAILED')])
def test_losses_may_differ_by_a_thousandth(small, graph, eager, result):
    row = run_checks(trial(small, graph=FakeStep(graph), eager=FakeStep(eager)))[0]
    words = {'PASSED': '1 trace for 3 updates, losses within 8e-04 of those',
             'FAILED': 'its losses differ by 1.2e-03'}
    assert row['result'] == result and words[result] in row['reason'], row

FLAWS = {   # check, flaw -> what the reason holds
    ('@tf.function compilation', 'retraced'): (lambda: {'graph': FakeStep(traces=3)},
                                               '3 traces for 3 updates'),
    ('@tf.function compilation', 'other losses'): (lambda: {'graph': FakeStep((3., 2., 1.1))},
                                                   'differ by 1.0e-01'),
    ('XLA JIT', 'refused'): (lambda: {'xla': FakeStep(xla=False, message='XLA refuses Where.\nmore')},
                             'XLA refuses Where.'),
    ('XLA JIT', 'refused without a reason'): (lambda: {'xla': FakeStep(xla=False)},
                                              'XLA does not compile the step'),
    ('XLA JIT', 'other losses'): (lambda: {'xla': FakeStep((3., 2., 1.1))}, 'differ by 1.0e-01'),
    ('XLA JIT', 'retraced'): (lambda: {'xla': FakeStep(traces=2)}, '2 traces'),
    ('Training step', 'rises'): (lambda: {'xla': FakeStep((3., 2., 1., 1., 2.))},
                                 'the loss does not fall: 1.0000'),
    ('Training step', 'stays'): (lambda: {'xla': FakeStep((3., 2., 1., 1.))},
                                 'not fall: 1.0000, after 10 updates 1.0000'),
    ('Training step', 'NaN'): (lambda: {'xla': FakeStep((3., 2., 1., float('nan')))}, 'a loss is nan'),
    ('Training step', 'weights do not move'): (lambda: {'xla': FakeStep((3., 2., 1., .9, .8), moves=False)},
                                               'no weight has changed'),
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
    assert rows[0] == {'name': '@tf.function compilation', 'result': 'FAILED', 'reason': 'first line'}
    assert len(rows) == 5

@pytest.mark.parametrize('error, words', [
    ('first\nsecond', 'first'), ('in user code:\n\n  File x\n  the reason\n', 'the reason'),
    (' \n  late', 'late'), ('', 'ValueError')])
def test_the_line_that_says_what_is_wrong(error, words): assert check._error_line(ValueError(error)) == words

def test_the_result_of_a_training(small, monkeypatch):
    "Ten updates to see the loss fall, ten more against the clock."
    clock = iter([5., 5.5])
    monkeypatch.setattr(check, 'time', SimpleNamespace(perf_counter=lambda: next(clock)))
    t = trial(small)
    assert check.check_training(t) == 'loss 3.000 -> 0.932 in 10 updates, 1 of 1 weights moved, 50.0 ms each'
    assert t.steps['xla'].calls == 20

@pytest.mark.parametrize('elsewhere, reason', [
    ({}, '4 tensors on GPU:0'),
    ({'moment': 'CPU:0'}, '1 of 4 tensors are not on a GPU, such as moment on CPU:0'),
    ({'loss': '', 'codes': 'CPU:0'}, '2 of 4 tensors are not on a GPU, such as codes on CPU:0')])
def test_where_the_tensors_are(small, monkeypatch, elsewhere, reason):
    gpu = '/job:localhost/replica:0/task:0/device:GPU:0'
    on = lambda name: SimpleNamespace(device=elsewhere.get(name, gpu))
    class Placed:
        xla, traces = True, 1
        weights, moments = ([SimpleNamespace(path=name, value=on(name))] for name in ('weight', 'moment'))
        step = SimpleNamespace(weights=weights, optimizer=SimpleNamespace(variables=moments))
        def __call__(self, batch, number): return {'loss': on('loss')}
    show_gpu(monkeypatch)
    monkeypatch.setattr(check, 'to_device', lambda batch: {'codes': on('codes')})
    assert check_placement_of(trial(small, xla=Placed()))['reason'] == reason

@pytest.mark.parametrize('shown', ['', ' -1'])
def test_a_hidden_gpu_is_no_gpu(monkeypatch, shown):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', shown)
    assert check._no_gpu_reason() == 'CUDA_VISIBLE_DEVICES hides every GPU'

@pytest.mark.cpu
def test_tensors_that_are_not_on_the_gpu_are_named(small, monkeypatch):
    show_gpu(monkeypatch)
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
    monkeypatch.setattr(check, '_no_gpu_reason', lambda: None)
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
    t = trial(small, probe)
    row = result(t, 'GPU monitoring')
    assert row['result'] == got and words in row['reason'], row
    assert t.steps['graph'].calls == 3 + 10 * (probe is not no_gpu)   # of the first check; monitored

def test_a_gpu_that_nvml_does_not_see(small, monkeypatch):
    show_gpu(monkeypatch)
    with pytest.raises(AssertionError, match='TensorFlow has a GPU, NVML has none: NVML: there is no driver'):
        check.check_monitoring(trial(small))
    monkeypatch.setattr(check.tf.config, 'list_logical_devices', lambda kind=None: [])
    monkeypatch.setattr(check, '_no_gpu_reason', lambda: None)
    with pytest.raises(check.Skipped, match='NVML: there is no driver; install it.'):
        check.check_monitoring(trial(small))

def test_under_load(small):
    good, bad = trial(small), trial(small, xla=FakeStep(skipped=1.))
    for t in (good, bad): t.losses('xla', 3)
    rows = [run_checks(t, stress_seconds=0.05)[-1] for t in (good, bad)]
    assert [r['name'] for r in rows] == ['Stress'] * 2 and rows[0]['result'] == 'PASSED'
    assert 'clips/s' in rows[0]['reason']
    assert rows[1]['result'] == 'FAILED' and 'not finite' in rows[1]['reason']

@pytest.mark.parametrize('step, result', [
    ({}, '20 updates in 4 s, 20.0 clips/s, GPU 0 50 % busy, CPU 1 % busy'),
    ({'skipped': 1.}, '20 of 20 updates had a loss or gradient that is not finite'),
    ({'trace_counts': [0, 1]}, '20 updates in 4 s'), ({'trace_counts': [3, 3]}, '20 updates in 4 s'),
    ({'trace_counts': [1, 2, 2]}, 'the step was traced 2 times'),
    ({'trace_counts': [0, 2, 2]}, 'the step was traced 2 times')], ids=str)
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

def test_a_load_where_no_device_can_be_read(small):
    assert check.stress(trial(small), 0.01, lambda: Sample(0.,
        error='gone')).endswith(', no device could be read')

def test_progress_names_each_check(small):
    calls = []
    run_checks(trial(small), 0.01, lambda *call: calls.append(call))
    assert calls == [(i, 6, name) for i, name in enumerate([*CHECKS, 'Stress'])] + [(6, 6, 'Stress')]

@pytest.mark.slow
def test_the_real_step_is_asked(small):
    "Not a toy: the modes of `step_modes`, with every weight of the model."
    real = StepTrial(small.replace(model={'gpt': {'layers': 1, 'conditioning_layers': 1}}), 8, 12)
    assert set(real.steps) == {'eager', 'graph', 'xla'} and real.config.training.learning_rate == 1e-3
    assert all(len(getattr(step, 'step', step).weights) > 20 for step in real.steps.values())


# --- the programs of a GPU ----------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def real(small):
    "A step of one block, traced and never compiled."
    config = small.replace(model={'gpt': {'layers': 1, 'conditioning_layers': 1}},
                           training={'precision': 'bfloat16', 'mode': 'xla'})
    only = {'xla': MODES['xla']}
    return StepTrial(config, 12, 20, make_steps=lambda config, start: step_modes(config, start, only))

def test_what_a_gpu_is_given_holds_nothing_that_it_cannot_do(real):
    "Step and speech in bfloat16 have no obstacle. Codes are made in float32, as on a CPU."
    rows = check.preflight_rows(real)
    found = [(row['program'], row['kind'], row['op']) for row in rows]
    assert {pair[:2] for pair in found} == {('data', 'float32 product'), ('data', 'layout')}
    assert {op for *_, op in found} <= {'MatMul', 'BatchMatMulV2', 'Einsum', 'Conv2D'}
    text = check.preflight_text(rows).splitlines()
    assert text[1].startswith('data: float32 product: ') and len(text) == 1 + len(found)
    assert check.preflight_text([]).splitlines()[1].startswith('Nothing was found')

def test_a_step_with_an_int32_counter_is_named(real, monkeypatch):
    from xtts_nb.monitor.preflight import preflight
    counter = tf.Variable(0, name='good_updates')
    step = real.steps['xla'].step
    finish = type(step).finish
    monkeypatch.setattr(type(step), 'finish', lambda self, *given: finish(self, *given) | {
        'count': counter.assign_add(1)})
    gradients = [tf.TensorSpec(v.shape) for v in step.weights]
    sums = {name: tf.TensorSpec(()) for name in ('text_loss', 'code_loss')}
    counts = {name: tf.TensorSpec(()) for name in ('text_count', 'code_count')}
    found = preflight(tf.function(step.finish, jit_compile=True), gradients, sums, counts)
    assert [(o.kind, o.op) for o in found] == [('int32 variable', 'good_updates')]


# --- the report ---------------------------------------------------------------------------------------------

@pytest.mark.cpu
def test_the_machine_of_a_report(monkeypatch):
    monkeypatch.setattr(check, 'PACKAGES', ('tensorflow', 'no-such-package'))
    monkeypatch.setattr(check.psutil, 'virtual_memory', lambda: SimpleNamespace(total=24 << 30))
    monkeypatch.setattr(check, 'cores', lambda: 3)
    facts = check.machine()
    assert list(facts) == ['xtts_nb', 'Python', 'system', 'tensorflow', 'no-such-package', 'CPU', 'memory',
                           'GPU']
    assert (facts['xtts_nb'], facts['tensorflow']) == (__version__, tf.__version__)
    assert facts['no-such-package'] == 'not installed' and facts['memory'] == '24 GiB'
    assert facts['CPU'] == f'{cpu_name()}, 3 cores for this process'
    assert facts['GPU'] == 'none (CUDA_VISIBLE_DEVICES hides every GPU)'

def test_the_cards_of_a_report(monkeypatch):
    import pynvml
    cards = [GPU(i, 'NVIDIA H200', memory_total=141 << 30) for i in range(2)]
    monkeypatch.setattr(check, '_no_gpu_reason', lambda: None)
    monkeypatch.setattr(check, 'visible_cards', lambda: cards)
    monkeypatch.setattr(pynvml, 'nvmlSystemGetDriverVersion', lambda: '570.1')
    for built, shown in (({'cuda_version': '12.5'}, '12.5'), ({}, 'none: this wheel is for the CPU')):
        monkeypatch.setattr(check.tf.sysconfig, 'get_build_info', lambda built=built: built)
        facts = check.machine()
        assert 'GPU' not in facts and facts['GPU 0'] == facts['GPU 1'] == 'NVIDIA H200, 141 GiB'
        assert (facts['driver'], facts['CUDA of TensorFlow']) == ('570.1', shown)

def test_the_step_before_and_after(small, monkeypatch):
    "Two seconds of each, on a clock; what is compiled first does not count."
    clock, sampled, read = Clock(), threading.Event(), gpu(50.4, 6 << 30)
    monkeypatch.setattr(check, 'time', clock)
    class Timed(FakeStep):
        def __init__(self, seconds):
            super().__init__()
            self.seconds = seconds
        def __call__(self, batch, number):
            if not self.calls: sampled.clear()   # the devices are not watched yet
            else: assert sampled.wait(20)
            clock.sleep(self.seconds if self.calls else 60.)
            return super().__call__(batch, number)
    steps = {'eager': Timed(1.), 'xla': Timed(.25)}
    tried = trial(small.replace(data={'batch_size': 4}), **steps)
    rows = check.before_after(tried, 2., lambda: sampled.set() or read())
    busy = {'GPU 0': 50, 'CPU': 1}
    assert rows == [{'name': 'eager', 'clips_per_s': 4., 'ratio': 1.} | busy,
                    {'name': 'compiled', 'clips_per_s': 16., 'ratio': 4.} | busy]
    assert [step.calls for step in steps.values()] == [3, 9]

def test_the_records_of_this_machine(tmp_path):
    own = {'device': device_name(), 'cpu': cpu_name(), 'date': '2026-11-26', 'command': 'xtts-nb demo'}
    for name, one in {'b': own, 'a': own | {'date': '2026-11-25'}, 'c': own | {'cpu': 'another'},
                      'd': own | {'device': 'another'}}.items():
        (tmp_path / f'{name}.json').write_text(json.dumps(one))
    lines = ['a.json: 2026-11-25, xtts-nb demo', 'b.json: 2026-11-26, xtts-nb demo']
    assert check.own_records(tmp_path) == lines

def test_the_report_as_text():
    rows = [{'name': 'eager', 'clips_per_s': 4., 'ratio': 1., 'GPU 0': 9, 'CPU': 50},
            {'name': 'compiled', 'clips_per_s': 1600., 'ratio': 400.}]
    passed = [{'name': 'XLA JIT', 'result': 'PASSED', 'reason': 'why'}]
    text = check.machine_report({'Python': '3.11'}, rows, passed, [], ['a.json'])
    machine, step, checks, records = text.split('\n## ')
    assert machine == '## Machine\n\n| | |\n|---|---|\n| Python | 3.11 |\n'
    assert step == ('The training step\n\n- eager: 4.0 clips/s (1.00 x), GPU 0 9 % busy, CPU 50 % busy\n'
                    '- compiled: 1,600.0 clips/s (400.00 x), no device could be read\n')
    ahead = check.preflight_text([])
    assert checks == f'Checks\n\n```\n{checks_text(passed)}\n\n{ahead}\n```\n'
    assert records == 'Records of this machine\n\n- a.json'
    assert check.machine_report({}, [], [], [], []).endswith('machine\n\nnone')
