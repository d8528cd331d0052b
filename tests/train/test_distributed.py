"Many devices: every clip once, the losses of one device, and a run that goes on when a worker is killed."
import json
import random
import subprocess
import time
from functools import partial
from types import SimpleNamespace

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

from process import Forked, python, reached, started, xtts_nb
from xtts_nb.train.trainer import checkpoints, Trainer, Writer
from xtts_nb.train import distributed as page
from xtts_nb.train.launch import LOST_PEER, local_workers, tf_config
from xtts_nb.train.distributed import (
    DistributedTrainer, Replicas, Share, Broadcast, bit_sums, cluster_run, differing,
    distributed_train_step, distributed_validation_step, dry_run, setup_gpu_strategy)
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.data.native import BatchPlan
from xtts_nb.models.gpt import GPT
from xtts_nb.models.xtts import token_counts
from xtts_nb.train.runs import held_out_share, new_run
from xtts_nb.train.step import Update, random_batch


@pytest.fixture(scope='module')
def mini(small) -> XTTSConfig:
    "One block, one shape, nothing random."
    return small.replace(
        model={'gpt': {'layers': 1, 'conditioning_layers': 1, 'dropout': 0., 'code_noise': 0.}},
        data={'buckets': 1},
        training={'steps': 6, 'warmup_steps': 0, 'log_every': 1, 'checkpoint_every': 3,
                  'mode': 'graph'})

def losses(run) -> list[float]:
    return [json.loads(line)['loss'] for line in (run / 'metrics.jsonl').read_text().splitlines()]

@pytest.fixture(scope='module')
def alone(prepared, mini, tmp_path_factory):
    "A run on one device."
    run = tmp_path_factory.mktemp('alone') / 'run'
    new_run(prepared, mini, run).fit()
    return run


# --- shares ---------------------------------------------------------------------------------------

@pytest.mark.parametrize('workers', [2, 4])
def test_every_clip_once_an_epoch(prepared, mini, workers):
    "Shares lie in the order of the batch, and each knows the lengths of all of it."
    config = mini.replace(data={'buckets': 2})
    plan = BatchPlan(prepared, config.data)
    shares = [list(Share(plan, i, workers).stream(0, 2 * plan.steps_per_epoch)) for i in range(workers)]
    whole = list(plan.stream(0, 2 * plan.steps_per_epoch))
    for parts, batch in zip(zip(*shares), whole):
        for k in batch: assert np.array_equal(np.concatenate([p[k] for p in parts]), batch[k])
        for k in ('weight', 'text_length', 'code_length'):
            assert all(np.array_equal(p[f'whole_{k}'], batch[k]) for p in parts)
    for epoch in range(2):
        first, last = epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch
        batches = [b for share in shares for b in share[first:last]]
        clips = np.concatenate([b['clip'][b['weight'] > 0] for b in batches])
        assert sorted(clips) == list(range(len(prepared)))

def test_a_share_is_otherwise_the_plan(prepared, mini):
    plan = BatchPlan(prepared, mini.data)
    share = Share(plan, 1, 2)
    assert share.shapes == plan.shapes and share.data is plan.data
    assert share.pick(tf.constant(0, tf.int64))[4].shape == (2,)

@pytest.mark.parametrize('wanted, worker', [(True, True), (True, False), (False, True), (False, False)])
def test_a_share_goes_to_the_gpu_if_settings_and_worker_allow_it(mini, monkeypatch, wanted, worker):
    monkeypatch.setattr(page, 'ShareReader', lambda share: 'reader')
    monkeypatch.setattr(page, 'batches_of', lambda *given, model: (*given, model))
    data = mini.data.model_copy(update={'prefetch_to_gpu': wanted})
    reader, found, *steps = Share(SimpleNamespace(data=data), 0, 2, worker).stream(model='GPU:1')
    assert found == data.model_copy(update={'prefetch_to_gpu': wanted and worker})
    assert (reader, steps) == ('reader', [0, None, 'GPU:1'])

def test_rows_elsewhere_are_parts_of_the_batch(mini):
    "The same gradients, masks included, as one device with twice the parts."
    config = mini.replace(model={'gpt': {'dropout': 0.3, 'code_noise': 0.1}}, data={'batch_size': 8})
    batch = random_batch(config, 12, 20)
    def update(parts):
        keras.utils.set_random_seed(0)
        return Update(GPT(config, 5), config.replace(training={'accumulation': parts}).training)
    whole, half = update(4), update(2)
    counts = token_counts(whole.gpt, batch)
    rows = lambda i: {k: x[4 * i:4 * i + 4] for k, x in batch.items()}
    wanted = whole.gradients(batch, tf.constant(3), counts)
    parts = [half.gradients(rows(i), tf.constant(3), counts, first=2 * i) for i in range(2)]
    (first, first_losses), (second, second_losses) = parts
    for a, b, c in zip(wanted[0], first, second): assert np.allclose(a, b + c, rtol=1e-4, atol=1e-6)
    total = float(first_losses['code_loss'] + second_losses['code_loss'])
    assert float(wanted[1]['code_loss']) == pytest.approx(total, rel=1e-5)


# --- strategies and refusals ----------------------------------------------------------------------

@pytest.mark.parametrize('workers, devices, seen, found', [
    (1, None, [], 'default'), (1, None, ['GPU:0'], 'one GPU:0'), (1, ['CPU:1'], ['GPU:0'], 'one CPU:1'),
    (1, None, ['GPU:0', 'GPU:1'], 'mirrored GPU:0 GPU:1'), (2, None, ['GPU:0'], 'many'),
    (2, ['CPU:0'], [], 'many')])
def test_the_strategy_by_workers_and_devices(monkeypatch, workers, devices, seen, found):
    monkeypatch.setenv('TF_CONFIG', tf_config([f'a:{i + 1}' for i in range(workers)], 0))
    monkeypatch.setattr(page, 'card_names', lambda: seen)
    for name, fake in {'MultiWorkerMirroredStrategy': lambda: 'many', 'get_strategy': lambda: 'default',
                       'OneDeviceStrategy': lambda device: f'one {device}',
                       'MirroredStrategy': lambda some: ' '.join(['mirrored', *some])}.items():
        monkeypatch.setattr(tf.distribute, name, fake)
    assert setup_gpu_strategy(devices) == found

@pytest.mark.parametrize('index, replicas', [(0, 1), (0, 4), (1, 4)])
def test_only_worker_0_of_several_keeps_a_run(monkeypatch, index, replicas):
    monkeypatch.setenv('TF_CONFIG', tf_config(['a:1', 'a:2'][:replicas], index))
    strategy = SimpleNamespace(num_replicas_in_sync=replicas)
    monkeypatch.setattr(page, 'setup_gpu_strategy', lambda: strategy)
    monkeypatch.setattr(page, 'new_run', lambda *given, **named: (given, named))
    make, count = cluster_run()
    given, named = make('cache', 'config', 'run', ['held'])
    assert count == replicas and given == ('cache', 'config', None if index else 'run', ['held'])
    if replicas > 1:
        assert (named['make'].func, named['make'].keywords) == (DistributedTrainer, {'strategy': strategy})

@pytest.mark.parametrize('rows, devices, parts, good', [
    (8, 2, 2, True), (8, 4, 2, True), (8, 3, 1, False), (8, 2, 3, False), (4, 4, 2, False)])
def test_a_batch_must_divide_evenly(rows, devices, parts, good):
    config = SimpleNamespace(data=SimpleNamespace(batch_size=rows),
                             training=SimpleNamespace(accumulation=parts))
    if good: page._check_rows(config, devices)
    else:
        error = pytest.raises(UserError, page._check_rows, config, devices)
        error.match(f'a multiple of {devices * parts}')

@pytest.mark.cpu
def test_the_strategy_follows_the_devices(monkeypatch):
    monkeypatch.delenv('TF_CONFIG', raising=False)
    kinds = [type(setup_gpu_strategy(devices)) for devices in (None, ['CPU:0'])]
    assert kinds == [type(tf.distribute.get_strategy()), tf.distribute.OneDeviceStrategy]

def test_a_trainer_may_keep_nothing(prepared, mini, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = new_run(prepared, mini, None)
    assert trainer.run is None and trainer.step == 0 and not list(tmp_path.iterdir())

@pytest.mark.slow
@pytest.mark.cpu
def test_one_replica_trains_as_the_plain_trainer_to_the_end(prepared, mini, alone, tmp_path):
    "It is not stopped, because nobody asked it to; the same losses."
    make = partial(DistributedTrainer, strategy=setup_gpu_strategy(['CPU:0']))
    trainer = new_run(prepared, mini, tmp_path / 'run', make=make)
    trainer.fit()
    assert trainer.step == 6 and losses(tmp_path / 'run') == pytest.approx(losses(alone), rel=1e-5)


# --- several devices, emulated by one -------------------------------------------------------------

@pytest.fixture
def pair(mini, monkeypatch):
    "Two devices of a worker, both the same CPU, and an update of all rows; the sums are made here."
    monkeypatch.delenv('TF_CONFIG', raising=False)
    def update():
        keras.utils.set_random_seed(0)
        return Update(GPT(config, 5), config.training)
    config = mini.replace(training={'mode': 'eager', 'accumulation': 2}, data={'batch_size': 8})
    copies = Replicas(update(), config,
                      SimpleNamespace(extended=SimpleNamespace(worker_devices=['CPU:0', 'CPU:0'])))
    for v, w in zip(copies.updates[1].weights, copies.updates[0].weights): v.assign(w.value)
    copies.all_reduce = lambda compute: [tf.nest.map_structure(tf.add, compute(0), compute(1))] * 2
    lengths = {'text_length': tf.range(5, 13), 'code_length': tf.range(20, 4, -2)}
    return copies, update(), random_batch(config, 12, 20) | lengths

def with_whole(batch) -> dict:
    return batch | {f'whole_{name}': batch[name] for name in ('weight', 'text_length', 'code_length')}

@pytest.mark.parametrize('worker', [0, 1])
def test_one_worker_scores_and_all_get_its_scores(worker):
    "Else each would score for itself, and one might stop alone."
    asked, sent = [], []
    all_workers = SimpleNamespace(replicas=SimpleNamespace(worker=worker),
                                  broadcast=lambda value: sent.append(value) or {'dtw': 7.})
    score = lambda folder: asked.append(folder) or {'dtw': np.float32(3.)}
    assert page.Broadcast.from_first(all_workers, score, 'a folder') == {'dtw': 7.}
    assert (asked, sent) == ((['a folder'], [{'dtw': 3.}]) if worker == 0 else ([], [{}]))

def test_the_checkpoint_that_is_being_written_is_finished_before_the_exit(monkeypatch):
    events, writer = [], Writer()
    monkeypatch.setattr(page.os, '_exit', lambda code: events.append(code))
    writer(lambda: (time.sleep(0.2), events.append('written')))
    lost = tf.errors.UnavailableError(None, None, 'Socket closed')
    with page._exit_if_peer_lost(3, writer): raise lost
    def full(): raise OSError('the disk is full')
    writer(full)
    with page._exit_if_peer_lost(3, writer): raise lost
    assert events == ['written', LOST_PEER, LOST_PEER]

def test_two_devices_make_the_update_of_one(pair):
    copies, whole, batch = pair
    assert len(copies.updates) == 2 and all(u.training is copies.training for u in copies.updates)
    number = tf.constant(3)
    validated = [{k: float(v) for k, v in found.items()}
                 for found in (distributed_validation_step(copies, with_whole(batch)), whole.evaluate(batch))]
    assert validated[0] == pytest.approx(validated[1], rel=1e-5)
    assert dry_run(copies, with_whole(batch), number) == [0., 0.]
    for _ in range(2):
        made = distributed_train_step(copies, with_whole(batch), number), whole(batch, number)
        found, wanted = ({k: float(v) for k, v in losses.items()} for losses in made)
        assert found == pytest.approx(wanted, rel=1e-3)
    first, second = ([v.numpy() for v in u.weights] for u in copies.updates)
    assert all(np.array_equal(a, b) for a, b in zip(first, second))

def test_places_among_all_devices(monkeypatch):
    "Two devices of the third worker: 4 and 5 of all, with parts 8 to 11 of a batch in two parts each."
    here = SimpleNamespace(worker=2, devices=['a', 'b'], training=SimpleNamespace(accumulation=2))
    monkeypatch.setattr(tf.distribute, 'get_replica_context',
                        lambda: SimpleNamespace(replica_id_in_sync_group=tf.constant(5)))
    assert Replicas.local_index(here) == 1
    batch = {'weight': tf.range(4), 'whole_weight': tf.range(24)}
    step = lambda rows, number, counts, part: (list(rows), list(rows['weight'].numpy()), part)
    here.gradient_steps = [step] * 2
    found = [page._gradients(here, batch, 0, {}, i) for i in range(2)]
    assert found == [(['weight'], [0, 1], 8), (['weight'], [2, 3], 10)]

def test_each_copy_writes_its_sums_at_its_own_index():
    states = [{'v': np.float32([n, n])} for n in (1, 3)]
    here = SimpleNamespace(worker=1, devices=['a', 'b'], strategy=SimpleNamespace(num_replicas_in_sync=4),
                           updates=[SimpleNamespace(state=state) for state in states],
                           all_reduce=lambda own: [own(0) + own(1), 'the same'])
    found = page._all_bit_sums(here).numpy()
    assert found.shape == (4, 1, 4) and not found[:2].any()
    for i, state in enumerate(states):
        assert np.array_equal(found[2 + i], bit_sums([*state.values()])) and found[2 + i].any()

@pytest.mark.parametrize('worker', [0, 1])
def test_only_the_first_copy_of_worker_0_is_received(worker):
    replicas = SimpleNamespace(worker=worker, all_reduce=lambda mine: [mine(0), mine(1)])
    received = Broadcast(replicas)._from_first([[tf.constant([5.])], [tf.constant([7.])]])
    assert [float(x[0][0]) for x in received] == [0. if worker else 5., 0.]

def test_a_dry_run_reports_the_failure(monkeypatch):
    "Out of memory, or XLA refuses on any device."
    monkeypatch.setattr(page, '_counts', lambda *_: {})
    def of(*refused, short=(), error=tf.errors.ResourceExhaustedError(None, None, 'OOM')):
        def gradients(self, batch, number, counts, i):
            if i in short: raise error
        monkeypatch.setattr(page, '_gradients', gradients)
        steps = [SimpleNamespace() if r is None else SimpleNamespace(refused=r) for r in refused]
        return dry_run(SimpleNamespace(devices=['CPU:0'] * 2, gradient_steps=steps), {}, 0)
    assert of(False, False) == of(None, None) == [0., 0.] and of(False, True) == [0., 1.]
    assert of(False, False, short=[0]) == of(True, True, short=[1]) == [1., 0.]
    with pytest.raises(tf.errors.AbortedError):
        of(False, short=[0], error=tf.errors.AbortedError(None, None, 'a peer'))

def test_adapters_need_one_device_a_worker(mini):
    none = lambda *_: None
    update = SimpleNamespace(gpt=None, training=mini.training, gradients=none, finish=none,
                             evaluate=none)   # no `Update`
    strategy = lambda count: SimpleNamespace(extended=SimpleNamespace(worker_devices=['CPU:0'] * count))
    assert Replicas(update, mini, strategy(1)).updates == [update]
    pytest.raises(UserError, Replicas, update, mini, strategy(2)).match('give distributed --local 2 --gpus 1')

def bare(**named) -> DistributedTrainer:
    "A trainer with nothing but what is given."
    trainer = DistributedTrainer.__new__(DistributedTrainer)
    vars(trainer).update(named)
    return trainer

def test_a_stop_is_voted_on_and_read_one_log_line_later():
    "All votes of the line before count; a worker that was not asked itself stops as well."
    trainer = bare(step=1, training=SimpleNamespace(log_every=2), last_vote=tf.constant(0.),
                   votes=lambda vote: vote)
    requested = []
    def at(step):
        trainer.step = step
        return trainer.stops(requested)
    assert [at(1), at(2), at(4)] == [False] * 3 and not requested
    requested.append(True)
    assert [at(5), at(6), at(7)] == [False] * 3   # voted at 6
    requested.clear()
    assert at(8) is True and requested == [True]

@pytest.mark.parametrize('rows, devices, parts, more',
                         [(16, 2, 1, 2), (24, 2, 2, 4), (24, 2, 4, 12), (18, 2, 1, 3), (8, 2, 4, None)])
def test_all_divide_the_rows_of_a_device(rows, devices, parts, more, mini, capsys):
    config = mini.replace(data={'batch_size': rows}, training={'accumulation': parts})
    changes = []
    trainer = bare(plan=SimpleNamespace(data=config.data), training=config.training, run=None, step=5,
                   compile=lambda **c: changes.append(c),
                   copies=SimpleNamespace(strategy=SimpleNamespace(num_replicas_in_sync=devices)),
                   xtts=SimpleNamespace(config=config))
    if more:
        trainer._divide()
        assert changes == [{'accumulation': more}] and trainer.xtts.config.training.accumulation == more
        assert f'compute it in {more} parts instead of {parts}' in capsys.readouterr().err
    else:
        for run, where in ((None, 'training'), ('a/run', 'a/run')):
            trainer.run = run
            pytest.raises(UserError, trainer._divide).match(f'^{where}: out of memory with 1 rows at once')

@pytest.mark.parametrize('run, where', [(None, 'training'), ('a/run', 'a/run')])
def test_out_of_memory_during_the_sum_is_an_error(run, where):
    with pytest.raises(UserError, match=f'^{where}: out of memory .* set training.accumulation to 6 and'):
        bare(run=run, training=SimpleNamespace(accumulation=3))._more_parts(None)

@pytest.mark.parametrize('devices, given, named, refused', [
    (1, (2, None, ['c']), {}, False), (2, (2, None), {}, False), (2, (2, None, ['c']), {}, True),
    (2, (), {'callbacks': ['c']}, True),
    (2, (), {'callbacks': []}, False), (1, (), {'callbacks': ['c']}, False)])
def test_callbacks_need_one_device_a_worker(monkeypatch, devices, given, named, refused):
    monkeypatch.setattr(Trainer, 'fit', lambda self, *given, **named: 'done')
    monkeypatch.setattr(page, 'to_device', lambda batch: 'moved')
    trainer = bare(copies=SimpleNamespace(devices=['CPU:0'] * devices, worker=0), writer=None)
    if refused: pytest.raises(UserError, trainer.fit, *given, **named).match('one copy of the model')
    else: assert trainer.fit(*given, **named) == 'done'
    assert trainer.place('batch') == ('moved' if devices == 1 else 'batch')

@pytest.mark.parametrize('error', ['UnavailableError', 'AbortedError', 'CancelledError'])
def test_a_worker_that_loses_a_peer_exits_at_once(monkeypatch, capsys, error):
    codes = []
    monkeypatch.setattr(page.os, '_exit', codes.append)
    with page._exit_if_peer_lost(3): raise getattr(tf.errors, error)(None, None, 'Socket closed\nand more')
    assert codes == [LOST_PEER] and capsys.readouterr().err == 'Worker 3 has lost a peer: Socket closed\n'


# --- one worker with one device: what all workers do ----------------------------------------------

@pytest.fixture
def single(prepared, mini, monkeypatch):
    "Makes the trainer of a cluster of one device."
    monkeypatch.delenv('TF_CONFIG', raising=False)
    make = partial(DistributedTrainer, strategy=tf.distribute.OneDeviceStrategy('CPU:0'))
    return lambda run=None, **training: new_run(prepared, mini.replace(training=training), run, make=make)

def test_epochs_set_the_updates_and_the_schedule_of_all_copies(single):
    trainer = single(epochs=2, steps=1000, schedule='cosine')
    assert trainer.training.steps == 2 * trainer.plan.steps_per_epoch == trainer.copies.training.steps
    assert all(update.training is trainer.training for update in trainer.copies.updates)

def test_the_parts_of_a_trainer(single, prepared, mini):
    "Only the parts on a device are compiled by XLA; batches go to the one GPU; other settings are refused."
    trainer = single(mode='xla')
    assert [trainer.train_step.xla, trainer.evaluate.xla] == [False] * 2
    assert all(step.xla for step in trainer.copies.gradient_steps)
    assert trainer.plan.to_gpu is True and trainer.held_out is None and float(trainer.last_vote) == 0
    update = trainer.copies.updates[0]
    xtts, plan = trainer.xtts, BatchPlan(prepared, mini.data)
    again = DistributedTrainer(xtts, plan, update=update, strategy=tf.distribute.OneDeviceStrategy('CPU:0'))
    assert again.copies.updates == [update]
    with pytest.MonkeyPatch.context() as m:
        m.setattr(Broadcast, 'broadcast', lambda self, value: 'other')
        with pytest.raises(UserError, match='Worker 0 has other settings'):
            DistributedTrainer(xtts, plan, update=update, strategy=tf.distribute.OneDeviceStrategy('CPU:0'))

@pytest.fixture
def oversized(monkeypatch):
    "Gradients that really allocate more memory than there is, as long as a batch is computed in one part."
    real = Update.gradients
    def gradients(self, batch, number, counts, first=None):
        size = tf.where(number >= 0, tf.constant(2**46 if self.training.accumulation < 2 else 1, tf.int64), 1)
        lack = tf.zeros(size[None])[0]   # one of them: TensorFlow tries for 10 s to find the memory
        batch = {name: x + tf.cast(lack, x.dtype) for name, x in batch.items()}
        return real(self, batch, number, counts, first)
    monkeypatch.setattr(Update, 'gradients', gradients)

@pytest.mark.slow
def test_out_of_memory_divides_the_batch_before_the_first_update(single, oversized, capsys):
    trainer = single()
    assert trainer.fit()['steps'] == 6
    assert trainer.training.accumulation == trainer.copies.training.accumulation == 2
    stderr = capsys.readouterr().err
    assert stderr.count('OUT OF MEMORY before update 0') == 1 and 'in 2 parts instead of 1' in stderr
    wanted = single(accumulation=2)
    wanted.fit()
    assert trainer.last_losses == wanted.last_losses

def test_out_of_memory_with_one_row_is_an_error(single, oversized):
    trainer = single(accumulation=4)
    trainer.votes = lambda found: tf.constant([1., 0.])   # another worker, always
    message = 'out of memory with 1 rows at once; set training.gradient_checkpointing'
    with pytest.raises(UserError, match=message): trainer.fit()

@pytest.mark.slow
def test_what_xla_cannot_compile_is_trained_without_it(single, monkeypatch, capsys):
    real = Update.gradients
    def gradients(self, batch, number, counts, first=None):
        nothing = tf.cast(tf.strings.length(tf.strings.as_string(number)), tf.float32) * 0
        return real(self, batch, number, counts | {'text_count': counts['text_count'] + nothing}, first)
    monkeypatch.setattr(Update, 'gradients', gradients)
    trainer = single(mode='xla')
    assert trainer.fit(2)['steps'] == 2 and 'XLA CANNOT COMPILE THE STEP: AsString' in capsys.readouterr().err
    copies = trainer.copies
    steps = *copies.gradient_steps, *copies.finish_steps, *copies.evaluate_steps
    assert not any(step.xla for step in steps)


# --- copies that differ ---------------------------------------------------------------------------

def test_one_changed_bit_is_found():
    values = [np.array([1., -2.], np.float32), np.array(3, np.int64), np.array([1., 2.], np.float16),
              np.zeros(4, np.float32)]
    sums = lambda: bit_sums([tf.constant(v) for v in values]).numpy()
    before, names = sums(), ['a', 'b', 'c', 'd']
    assert differing(names, np.stack([before, sums()])) is None
    for name, value in zip(names, values):
        flat = value.reshape(-1).view(np.uint8)
        flat[-1] ^= 1
        assert differing(names, np.stack([before, before, sums()])) == (name, 2, 1)
        flat[-1] ^= 1
    assert np.array_equal(before, sums()) and before.max() < 2**16 and before.min() >= 0

DRIFT = """
import sys
from functools import partial
from xtts_nb.config import XTTSConfig, UserError
from xtts_nb.app.terminal import start
start()
from xtts_nb.data.cache import Cache
from xtts_nb.train.distributed import DistributedTrainer, setup_gpu_strategy
from xtts_nb.train.runs import held_out_share, new_run
cache, settings, run = sys.argv[1:]
make = partial(DistributedTrainer, strategy=setup_gpu_strategy())
trainer = new_run(Cache(cache), XTTSConfig.load(settings), run, make=make)
first, second = trainer.copies.updates
assert first.training is second.training and first.training.steps == 2 * trainer.plan.steps_per_epoch
assert trainer.fit(3)['steps'] == 3
weight = second.weights[-1]
weight.assign(weight.value * 1.0001)
try: trainer.fit(6)
except UserError as e: print(weight.path, '|', e)
"""

@pytest.mark.slow
def test_a_copy_that_differs_ends_the_run(prepared, mini, tmp_path, monkeypatch):
    "Two devices with one schedule; the second copy is changed after update 3, so nothing is saved at 6."
    monkeypatch.setenv('XTTS_NB_CPU_CARDS', '2')
    monkeypatch.setenv('TF_CONFIG', tf_config(['127.0.0.1:1'], 0))
    config = mini.replace(training={'epochs': 2, 'schedule': 'cosine'})
    (tmp_path / 'settings.yaml').write_text(config.to_yaml())
    done = python(DRIFT, prepared.folder, tmp_path / 'settings.yaml', tmp_path / 'run', timeout=200)
    assert done.code == 0, done.err
    name, message = done.out.split(' | ')
    assert 'at update 6 the copies of the model are no longer equal' in message
    assert 'device 1 differs from device 0' in message
    assert [p.stem for p in checkpoints(tmp_path / 'run' / 'checkpoints')] == ['step-000000003']
    assert name in message or 'other variables' in message


# --- two workers ----------------------------------------------------------------------------------

def two_workers(prepared, settings, run) -> list:
    "The command line of two workers on this machine."
    train = ['train', '--data', prepared.folder, '--config', settings, '--run', run, '--json']
    return ['distributed', '--local', 2, '--', *train]

@pytest.fixture(scope='module')
def two_epochs(prepared, mini, tmp_path_factory):
    "A run of two epochs with a schedule and held-out clips on one device, and the folder of its settings."
    home = tmp_path_factory.mktemp('epochs')
    config = mini.replace(training={'epochs': 2, 'schedule': 'cosine', 'validate_every': 4})
    (home / 'settings.yaml').write_text(config.to_yaml())
    held = new_run(prepared, config, home / 'run', held_out_share(prepared, 0.2))
    held.fit()
    return home, held

@pytest.mark.slow
@pytest.mark.parametrize('how', [['--local', 2], []], ids=['two workers', 'two devices'])
def test_epochs_are_those_of_one_device(prepared, two_epochs, tmp_path, monkeypatch, how):
    "As many updates and the same losses with a schedule, on two workers or on one worker with two devices."
    home, held = two_epochs
    monkeypatch.setenv('XTTS_NB_CPU_CARDS', '2')
    train = ['train', '--data', prepared.folder, '--config', home / 'settings.yaml',
             '--run', tmp_path / 'run', '--val', 0.2, '--epochs', 2, '--json']
    done = xtts_nb('distributed', *how, '--', *train, cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.json['steps'] == held.step == 2 * held.plan.steps_per_epoch
    assert losses(tmp_path / 'run') == pytest.approx(losses(home / 'run'), rel=1e-5)


# --- slow: thirty updates, killed workers, workers that do not agree ------------------------------

MIRRORED = """
import sys
from functools import partial
from xtts_nb.config import XTTSConfig, setup_tf
setup_tf()
import tensorflow as tf
(cpu,) = tf.config.list_physical_devices('CPU')
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from xtts_nb.data.cache import Cache
from xtts_nb.train.distributed import DistributedTrainer, setup_gpu_strategy
from xtts_nb.train.runs import held_out_share, new_run
cache, settings, run = sys.argv[1:]
strategy = setup_gpu_strategy(['CPU:0', 'CPU:1'])
assert type(strategy) is tf.distribute.MirroredStrategy
make = partial(DistributedTrainer, strategy=strategy)
trainer = new_run(Cache(cache), XTTSConfig.load(settings), run, ['low-0', 'low-3', 'high-6'], make=make)
trainer.fit()
first, second = ([v.numpy() for v in (*u.weights, *u.variables.values())] for u in trainer.copies.updates)
assert all((a == b).all() for a, b in zip(first, second))
assert sorted({v.value.device[-1] for u in trainer.copies.updates for v in u.weights}) == ['0', '1']
"""

@pytest.mark.slow
@pytest.mark.cpu
def test_two_devices_train_as_one_does(prepared, mini, tmp_path, cheap_xla):
    """With XLA, two shapes, two parts, validation and mean weights; the copies stay equal to the bit.

    One device does it in four parts without XLA, which compiles longer than it would compute."""
    config = mini.replace(data={'buckets': 2},
                          training={'steps': 30, 'accumulation': 2, 'ema': 0.9, 'validate_every': 6,
                                    'mode': 'xla'})
    (tmp_path / 'settings.yaml').write_text(config.to_yaml())
    held_out = ['low-0', 'low-3', 'high-6']
    alone = config.replace(training={'accumulation': 4, 'mode': 'graph'})
    new_run(prepared, alone, tmp_path / 'one', held_out).fit()
    done = python(MIRRORED, prepared.folder, tmp_path / 'settings.yaml', tmp_path / 'two', timeout=200)
    assert done.code == 0, done.err
    files = [tmp_path / run / 'metrics.jsonl' for run in ('one', 'two')]
    lines = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    for name in ('loss', 'val_loss', 'gradient_norm'):
        a, b = ([line[name] for line in some if name in line] for some in lines)
        assert len(a) == (5 if name == 'val_loss' else 30)
        assert b == pytest.approx(a, rel=1e-5 if 'loss' in name else 1e-4)

def long_run(prepared, mini, home, shapes):
    "A run of thirty updates on one device: its folder, and the arguments of the same on two workers."
    config = mini.replace(data={'buckets': shapes}, training={'steps': 30, 'checkpoint_every': 7})
    (home / 'settings.yaml').write_text(config.to_yaml())
    new_run(prepared, config, home / 'run').fit()
    return home / 'run', {'prepared': prepared, 'settings': home / 'settings.yaml'}

@pytest.fixture(scope='module')
def two_shapes(prepared, mini, tmp_path_factory):
    return long_run(prepared, mini, tmp_path_factory.mktemp('two'), 2)

@pytest.fixture(scope='module')
def one_shape(prepared, mini, tmp_path_factory):
    return long_run(prepared, mini, tmp_path_factory.mktemp('one'), 1)

@pytest.fixture(scope='module')
def whole(two_shapes, tmp_path_factory):
    "A run on two workers that nobody disturbs: the folder in which it was started, and what it said."
    home = tmp_path_factory.mktemp('whole')
    return home, xtts_nb(*two_workers(**two_shapes[1], run=home / 'run'), cwd=home)

def background(command) -> Forked:
    "A command of `xtts-nb` that runs beside the test."
    return started(*command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

@pytest.mark.slow
@pytest.mark.cpu
def test_two_workers_train_as_one_device(whole, two_shapes):
    "The same losses in two shapes, one result, and files of worker 0 alone."
    (home, done), (alone, _) = whole, two_shapes
    assert done.code == 0, done.err
    assert losses(home / 'run') == pytest.approx(losses(alone), rel=1e-5)
    assert done.json['steps'] == 30 and [p.name for p in home.iterdir()] == ['run']
    assert sorted(p.name for p in (home / 'run').iterdir()) == sorted(p.name for p in alone.iterdir())

@pytest.mark.slow
@pytest.mark.cpu
def test_a_killed_worker_changes_nothing(two_shapes, whole, tmp_path):
    "kill -9 at a random update: the run recovers by itself and ends with the weights of an undisturbed one."
    chance = random.Random(time.time_ns())
    point, victim = chance.randint(2, 26), chance.randint(0, 1)
    child = background(two_workers(**two_shapes[1], run=tmp_path / 'killed'))
    while reached(tmp_path / 'killed') < point and child.poll() is None: time.sleep(0.005)
    workers = psutil.Process(child.pid).children()
    workers[victim].kill()
    out, err = child.communicate(timeout=200)
    assert child.returncode == 0 and f'Worker {victim} was ended by SIGKILL; all start again' in err, err
    assert json.loads(out)['steps'] == 30
    assert not any(w.is_running() and w.status() != 'zombie' for w in workers)
    undisturbed = whole[0] / 'run'
    for name in ('model.safetensors', 'checkpoints/step-000000030.safetensors'):
        assert (tmp_path / 'killed' / name).read_bytes() == (undisturbed / name).read_bytes(), (point, victim)
    assert losses(tmp_path / 'killed') == losses(undisturbed)

@pytest.mark.slow
@pytest.mark.cpu
def test_sigterm_stops_all_at_the_same_update(one_shape, tmp_path):
    alone, asked = one_shape
    child = background(two_workers(**asked, run=tmp_path / 'run'))
    while reached(tmp_path / 'run') < 10 and child.poll() is None: time.sleep(0.005)
    child.terminate()
    err = child.communicate(timeout=100)[1]
    assert child.returncode == 143 and 'Traceback' not in err, err
    saved = int(checkpoints(tmp_path / 'run' / 'checkpoints')[-1].stem[5:])
    assert saved == reached(tmp_path / 'run') and 10 <= saved < 30
    assert xtts_nb(*two_workers(**asked, run=tmp_path / 'run')).code == 0
    assert losses(tmp_path / 'run') == pytest.approx(losses(alone), rel=1e-5)

@pytest.mark.slow
def test_workers_on_two_machines_must_agree(prepared, mini, tmp_path):
    "Each has its own supervisor; the worker with other settings says so, the other loses its peer."
    addresses, children = ','.join(local_workers(2)), []
    for index in range(2):
        settings = tmp_path / f'{index}.yaml'
        settings.write_text(mini.replace(training={'seed': index}).to_yaml())
        train = ['train', '--data', prepared.folder, '--config', settings, '--run', tmp_path / 'run']
        command = ['distributed', '--workers', addresses, '--index', index, '--wait', 20, '--', *train]
        children.append(background(command))
    errors = [child.communicate(timeout=120)[1] for child in children]
    assert [child.returncode for child in children] == [2, 2], errors
    assert 'Worker 1 has other settings' in errors[1] and 'did not come within 20 s' in errors[0]

@pytest.mark.slow
@pytest.mark.cpu
def test_two_supervisors_recover_together(one_shape, tmp_path):
    "A worker is killed on one machine; the other machine's worker loses its peer, and both start again."
    (alone, asked), addresses, children = one_shape, ','.join(local_workers(2)), []
    for index in range(2):
        command = two_workers(**asked, run=tmp_path / 'run')
        command[1:3] = ['--workers', addresses, '--index', index]
        children.append(background(command))
    while reached(tmp_path / 'run') < 10 and children[0].poll() is None: time.sleep(0.005)
    psutil.Process(children[1].pid).children()[0].kill()
    outputs = [child.communicate(timeout=200) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert losses(tmp_path / 'run') == pytest.approx(losses(alone), rel=1e-5) and not outputs[1][0]
