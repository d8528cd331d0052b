"Steps beside those of other libraries: a real process and a real step; only the other library is stubbed."
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.app import step_speed as page
from xtts_nb.train import trainer as trainer_page
from xtts_nb import bench, sampler
from xtts_nb import config as settings
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.models.gpt import GPT
from xtts_nb.train.step import Update, random_batch, step_modes
from xtts_nb.app.step_speed import (
    ARMS, PLAIN_ARMS, TORCH_ARMS, gpt2_speed, loop_seconds, matmul_ceiling, plain_gpt2, step_speed)


def slow_steps(threads, layers, width, heads, vocabulary, batch, tokens, mode):
    "Stands in for the steps of PyTorch: 30 ms each, the loss 7 or 0; other sizes are an error."
    import time
    if (layers, width, batch, tokens) != (1, 64, 4, 8) or threads < 0:
        raise ValueError(f'{layers} {width} {batch} {tokens}')
    while True:
        time.sleep(0.03)
        yield 7. * (mode == 'torch')


def wrong_steps(mode, **sizes):
    raise ValueError('no such mode ' + mode)
    yield


@pytest.fixture
def one_arm(small, monkeypatch):
    "Settings of one block, and one mode of ours; `one_arm` compares it with the steps in another process."
    monkeypatch.setattr(page, 'PLAIN_ARMS', {'graph': PLAIN_ARMS['graph']})
    config = small.replace(model={'gpt': {'layers': 1}})
    def compare(steps, rounds=3):
        monkeypatch.setattr(page, '_torch_steps', steps)
        return gpt2_speed(config, 8, rounds=rounds, torch_python=steps and sys.executable)
    return compare


def test_a_peer_s_answer_is_one_step_whatever_its_loss(one_arm):
    rows = {row['name']: row for row in one_arm(slow_steps)}
    assert set(rows) == {'graph', *TORCH_ARMS}
    for name in TORCH_ARMS: assert rows[name]['step_ms'] >= 30, 'a loss of 7 is not taken for 7 steps'
    assert rows['graph']['step_ms'] > 0 and all(row['spread'] >= 0 for row in rows.values())
    assert [row['name'] for row in one_arm(None, 1)] == ['graph']


def test_a_peer_that_fails_is_named(one_arm):
    with pytest.raises(UserError, match=r'transformers failed \(ValueError: no such mode torch'):
        one_arm(wrong_steps)


@pytest.mark.parametrize('answer', [{'positions': 62, 'dropout': 0.}, {'positions': 59, 'dropout': 0.1}])
def test_other_work_is_not_compared(answer):
    page.check_same_work({'loss': 1., 'positions': 59, 'dropout': 0.}, 59)
    found = f'coqui-tts computed {answer["positions"]} positions with dropout {answer["dropout"]}'
    with pytest.raises(UserError, match=found):
        page.check_same_work({'loss': 1.} | answer, 59)


# --- our side -----------------------------------------------------------------------------------------------

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
                 'loop_seconds': lambda step, *_: (looped, 2), 'trace_count': lambda step: 9,
                 'coqui_step': lambda python, config, text, codes: nullcontext(peer)}
        for name, fake in fakes.items(): monkeypatch.setattr(page, name, fake)
        return {row.pop('name'): row for row in step_speed(quick, 6, 8, coqui_python=peer and 'python')}
    return of

LOSSES = {name: 1.01 if 'bf16' in name else 1. for name in ARMS}

def test_rows_of_the_comparison(compared):
    "4 clips in 0.15 s; 48 MFLOP; 4 latents, 6 text tokens and 8 codes, with START and STOP of both."
    row = {'step_ms': 150., 'clips_per_s': 26.667, 'au': 0.882, 'mfu': 3.2, 'positions': 22, 'dropout': 0.,
           'limit_gflops': 0.1, 'traces': 9, 'syncs': 2, 'first_s': 1.23,
           'emulated_au': None}
    half = row | {'mfu': 1.067, 'limit_gflops': 0.3, 'first_s': 2.23}
    apart = dict.fromkeys(('au', 'traces', 'syncs', 'first_s'))
    rows = compared(LOSSES, 0.17, lambda: {'loss': 0., 'positions': 22, 'dropout': 0.})
    assert rows['xla'].pop('emulated_au') == 0.9
    rows['xla']['emulated_au'] = None
    assert rows == {name: half if 'bf16' in name else row for name in ARMS} | {'coqui': row | apart}
    again = compared(LOSSES, 0.17)
    again['xla']['emulated_au'] = None
    assert again == {name: rows[name] for name in ARMS}
    assert compared(LOSSES, 0.1)['xla']['au'] == 1   # never more
    other = lambda: {'positions': 21, 'dropout': 0.}
    with pytest.raises(UserError, match='we compute 22 without'): compared(LOSSES, 0.17, other)

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

def test_coqui_is_asked_for_the_same_sizes(quick, monkeypatch):
    "coqui-tts adds START and STOP itself, and three more codes at the end."
    monkeypatch.setattr(page, 'step_peer', lambda python, main, **sizes: sizes)
    sizes = dict(layers=1, width=64, heads=2, vocabulary=48, batch=4, text=6, codes=5, frames=32)
    assert page.coqui_step('python', quick, 6, 8) == sizes

def test_the_blocks_of_a_plain_gpt2(quick, monkeypatch):
    "No dropout; output layers begin smaller by the root of the number of residuals, as in GPT-2; it learns."
    made, real = [], page.TransformerBlock
    monkeypatch.setattr(page, 'TransformerBlock', lambda *a, **k: made.append(a) or real(*a, **k))
    config = quick.replace(model={'gpt': {'layers': 2}},
                           training={'enable_eager_debug': True, 'learning_rate': 1e-2,
                                                                   'warmup_steps': 0, 'schedule': 'constant'})
    step, ids = plain_gpt2(config, 8, 40), tf.constant(np.arange(36).reshape(4, 9), tf.int32)
    losses = [float(step(ids)) for _ in range(12)]
    assert made == [(64, 2, 0., 0.5)] * 2 and losses[-1] < losses[0] / 2


# --- TensorFlow as it starts, and configured ----------------------------------------------------------------

PHASES = 'imports', 'model', 'trace', 'compile'
VARIABLES = 'TF_XLA_FLAGS', 'TF_NUM_INTRAOP_THREADS', 'TF_NUM_INTEROP_THREADS'

def test_a_training_process(quick, monkeypatch, tmp_path):
    "In this process: facts of the start, then of updates; the loss of the first update is that of the step."
    config = quick.replace(training={'enable_xla_compilation': False})
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
def test_a_second_start_compiles_nothing(quick):
    "Real processes: the counted starts read what the first one wrote; more threads, more switches."
    with page.kernel_workspace() as folder:
        rows = page.compare_starts(quick, 6, 8, folder, rounds=2)
        kept = {file.name: file.stat().st_mtime_ns for file in folder.rglob('xla_compile_cache*')}
        assert len(kept) == 1 and len({row['loss'] for row in rows}) == 1
        many, own, half = page.compare_steps(quick, 6, 8, folder, rounds=2, updates=5)
        assert own['switches'] < many['switches'] and half['loss'] != own['loss'] == rows[0]['loss']
        now = {file.name: file.stat().st_mtime_ns for file in folder.rglob('xla_compile_cache*')}
        assert now.items() > kept.items() and len(now) == 2   # another number of threads, another kernel

# --- their side: the other library's calls ------------------------------------------------------------------

class Loss(float):
    "A number with the methods of a tensor that has gradients."
    seen = []
    def __rmul__(self, other): return Loss(float(other) * float(self))
    def __add__(self, other): return Loss(float(self) + float(other))
    def detach(self): return self
    def backward(self): self.seen.append(float(self))

class Dropout: p = 0.1

@pytest.fixture(params=['cpu', 'cuda'])
def torch(monkeypatch, request):
    "Stands in for PyTorch and records the calls."
    torch = MagicMock()
    torch.cuda.is_available.return_value = request.param == 'cuda'
    torch.nn.modules.dropout._DropoutNd = Dropout
    torch.device_used = request.param
    for name in ('TTS', 'TTS.tts', 'TTS.tts.layers', 'TTS.tts.layers.xtts', 'TTS.tts.layers.xtts.gpt',
                 'transformers'):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setitem(sys.modules, 'torch', torch)
    Loss.seen.clear()
    return torch

ADAMW = dict(lr=1e-4, betas=(0.9, 0.96), weight_decay=1e-2)

def test_a_step_of_coqui(torch):
    "Its own sizes, as released; AdamW and clipping as ours; loss 0.01 x text + codes."
    model = sys.modules['TTS.tts.layers.xtts.gpt'].GPT
    gpt, dropout = model.return_value.to.return_value.train.return_value, Dropout()
    gpt.modules.return_value, gpt.return_value = [dropout, object()], (Loss(5.), Loss(3.), None)
    steps = page._coqui_steps(2, 30, 1024, 16, 6681, batch=4, text=6, codes=5, frames=32)
    assert next(steps)['dropout'] == 0 and dropout.p == 0
    hook = gpt.gpt.register_forward_pre_hook
    assert hook.call_args.kwargs == {'with_kwargs': True}
    hook.call_args.args[0](None, (), {'inputs_embeds': np.zeros((4, 22, 64))})
    assert next(steps) == {'loss': 3., 'dropout': 0., 'positions': 22} and Loss.seen == [3.05, 3.05]
    model.assert_called_once_with(
        layers=30, model_dim=1024, heads=16, number_text_tokens=6681, max_text_tokens=402, max_mel_tokens=605,
        num_audio_tokens=1026, start_audio_token=1024, stop_audio_token=1025, use_perceiver_resampler=True)
    model.return_value.to.assert_called_once_with(torch.device_used)
    torch.optim.AdamW.assert_called_once_with(gpt.parameters(), **ADAMW)
    torch.nn.utils.clip_grad_norm_.assert_called_with(gpt.parameters(), 1.0)
    assert torch.randint.call_args_list == [call(3, 250, (4, 6)), call(0, 1024, (4, 5))]
    assert torch.full.call_args_list == [call((4,), 6), call((4,), 5 * 1024)]
    assert torch.randn.call_args_list == [call(4, 1, 80, 32)]

@pytest.mark.parametrize('mode', ['torch', 'torch_compile', 'torch_bf16'])
def test_a_step_of_transformers(torch, mode):
    "No dropout, an output layer of its own, no cache; the next token is the target."
    library, made = sys.modules['transformers'], []
    gpt = library.GPT2LMHeadModel.return_value.to.return_value
    ids = torch.randint.return_value
    torch.nn.functional.cross_entropy.return_value = Loss(2.5)
    torch.compile.side_effect = lambda f: made.append(f) or f
    steps = page._torch_steps(2, 12, 768, 12, 1026, batch=4, tokens=8, mode=mode)
    assert [next(steps), next(steps)] == [2.5, 2.5] and Loss.seen == [2.5, 2.5]
    assert bool(made) == ('compile' in mode)
    library.GPT2Config.assert_called_once_with(
        vocab_size=1026, n_positions=8, n_embd=768, n_layer=12, n_head=12, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, use_cache=False, tie_word_embeddings=False)
    torch.optim.AdamW.assert_called_once_with(gpt.parameters(), **ADAMW)
    assert torch.randint.call_args.args[1:] == (1026, (4, 9))
    assert torch.randint.call_args.kwargs == {'device': torch.device_used}
    torch.autocast.assert_called_with(torch.device_used, torch.bfloat16, enabled='bf16' in mode)
    everything = slice(None)
    cut = [c.args[0] for c in ids.__getitem__.call_args_list[:2]]
    assert cut == [(everything, slice(None, -1)), (everything, slice(1, None))]
    scores = gpt.return_value.logits.float.return_value
    scores.flatten.assert_called_with(0, 1)
    torch.nn.functional.cross_entropy.assert_called_with(scores.flatten.return_value,
                                                         ids[0].flatten.return_value)
