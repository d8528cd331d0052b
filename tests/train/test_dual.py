"Two devices: the batches of the cache, the losses of one, everything in its place, and what fails."
import json
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from cheap import Cheap
from process import main, python, xtts_nb
from xtts_nb.bench import trace_count
from xtts_nb.train import dual as page
from xtts_nb.data.cache import Cache
from xtts_nb.config import UserError
from xtts_nb.data.native import BatchPlan, cached_batches
from xtts_nb.devices import DevicePlan
from xtts_nb.models.dvae import load_dvae
from xtts_nb.train.distributed import Share, code_feed
from xtts_nb.train.dual import (
    Feed, bench_feed, dual_trainer, finish_batch, wait_computed, run_feed, sound_batches, SerialBatches, Span)
from xtts_nb.data.prepare import prepare
from xtts_nb.train.profile import device_placement, placement_summary
from xtts_nb.train.runs import new_run, resume_run

ONE = DevicePlan({}, 'CPU:0', 'CPU:0')


@pytest.fixture(scope='module')
def one_shape(corpus, mini, dvae, prepared, tmp_path_factory) -> Cache:
    "As `runtime`, with batches of one shape: half as much to trace. To be read only."
    out = tmp_path_factory.mktemp('runtime') / 'cache'
    settings = mini.replace(data={'preprocessing_mode': 'runtime', 'buckets': 1})
    prepare(corpus, out, settings, dvae, prepared.tokenizer, shard_clips=5)
    return Cache(out)


@pytest.mark.parametrize('change',
                         [{}, {'buckets': 3, 'batch_size': 3},
                          {'reference_frames': 128, 'reference_from': 'clip'},
                                    {'pad_to_fixed_length': True, 'max_seconds': 2.}])
def test_batches_are_those_of_the_cache(prepared, runtime, dvae, mini, change):
    config = mini.replace(data=change)
    sound = sound_batches(BatchPlan(runtime, config.data), 0, 5)
    for ours, cached in zip(sound, cached_batches(BatchPlan(prepared, config.data), 0, 5)):
        ours = finish_batch(ours, dvae, config)
        assert ours.keys() == cached.keys()
        for name, wanted in cached.items():
            assert (ours[name].shape, ours[name].dtype) == (wanted.shape, wanted.dtype)
            if name not in ('codes', 'reference'): assert np.array_equal(ours[name], wanted)
        # two vectors may be as near as makes no difference
        assert np.mean(ours['codes'] != cached['codes']) < 2e-3
        mine, theirs = (x['reference'].numpy().astype(np.float32) for x in (ours, cached))
        far = np.abs(mine - theirs) > 5e-3
        assert far.mean() < 1e-3

def test_the_end_of_the_batches_raises_no_error(runtime, mini, monkeypatch):
    "An op of another thread that copies between devices could end with the error of this one."
    monkeypatch.setattr(type(iter(tf.data.Dataset.range(1))), '__next__', None)
    assert len(list(sound_batches(BatchPlan(runtime, mini.data), 0, 2))) == 2

class Reading(Cheap):
    "Its small update reads what the data device makes."
    def custom_train_step(self, batch, number):
        losses = super().custom_train_step(batch, number)
        read = sum(tf.reduce_sum(tf.cast(batch[name], 'float32')) for name in ('codes', 'reference'))
        return losses | {'loss': losses['loss'] + 1e-3 * read}

@pytest.fixture(scope='module')
def worked(runtime, mini):
    "A trainer, and what six updates came to in turn and then, from the same weights, side by side."
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, 'Trainer', Reading)
        trainer = dual_trainer(runtime, mini.replace(data={'buckets': 1}), ONE, threads=False)
    state = [*trainer.state.values()]
    before = [v.numpy() for v in state]
    turn = run_feed(trainer, 6)
    for v, value in zip(state, before): v.assign(value)
    trainer.feed.threads = True
    return trainer, turn, run_feed(trainer, 6)

@pytest.mark.cpu
def test_threads_change_nothing(worked):
    trainer, turn, side = worked
    assert turn[0] == side[0] and len(turn[0]) == 6 and side[1].most <= 3
    assert {s.stage for s in side[1].spans} == {'host', 'data', 'model'}
    traces = [trace_count(f) for f in (trainer.feed.finish, trainer.train_step)]
    assert traces == [1, 1] and len(trainer.plan.shapes) == 1

@pytest.mark.cpu
def test_every_variable_and_stage_is_in_the_audit(worked):
    trainer = worked[0]
    rows = device_placement(trainer)
    names = {r['name'] for r in rows}
    assert {v.path for v in trainer.xtts.gpt.variables} | {*trainer.update.variables} <= names
    assert {r['owner'] for r in rows} >= {'stage host', 'stage data', 'optimizer', 'model',
                                          'DVAE of the data device'}
    weights = sum(r['bytes'] for r in rows if r['owner'] == 'model')
    assert weights == sum(v.value.numpy().nbytes for v in trainer.xtts.gpt.variables)
    # TensorFlow keeps int32 on the host, which is told and is no fault
    trainer.feed.outputs['host'] = {('its int32', '/device:CPU:1'): 4, ('a batch', '/device:CPU:0'): 8}
    (whole,) = (r for r in device_placement(trainer) if r['device'] == 'CPU:1')
    assert whole['owner'] == 'stage host' and whole['name'] == 'its int32' and whole['wanted'] == 'CPU:1'
    rows[0]['device'] = 'CPU:1'
    with pytest.raises(AssertionError, match='on CPU:1 instead of CPU:0'): placement_summary(rows)

@pytest.mark.slow
@pytest.mark.cpu
def test_trained_validated_stopped_and_resumed(runtime, mini, tmp_path):
    config, held = mini.replace(training={'validate_every': 4}, data={'buckets': 1}), [runtime.clips[0]['id']]
    begin = lambda run: new_run(runtime, config, tmp_path / run, held, feed=Feed(runtime, config, ONE),
                                device='CPU:0')
    straight = begin('straight').fit()
    begin('stopped').fit(4)
    again = resume_run(tmp_path / 'stopped', feed=Feed(runtime, config, ONE), device='CPU:0')
    assert again.step == 4
    resumed = again.fit()
    assert resumed['loss_last'] == straight['loss_last'] and resumed['best'] == straight['best']
    assert not [t.name for t in threading.enumerate() if t.name in ('host', 'data', 'copy')]

def test_the_codes_of_a_data_device_are_never_made_in_tf32(runtime, mini):
    with pytest.raises(UserError, match='training.tf32: the data GPU would make other codes'):
        Feed(runtime, mini.replace(training={'tf32': True}), ONE)

def test_a_cache_with_codes_needs_no_data_device(prepared, mini):
    with pytest.raises(UserError, match='has its codes already'): Feed(prepared, mini, ONE)

@pytest.mark.cpu
def test_a_recording_that_is_gone(mine, mini, dvae, prepared, tmp_path):
    settings = mini.replace(data={'preprocessing_mode': 'runtime'})
    prepare(mine, tmp_path / 'cache', settings, dvae, prepared.tokenizer)
    trainer = dual_trainer(Cache(tmp_path / 'cache'), mini, ONE)
    for wav in mine.rglob('*.wav'): wav.unlink()
    with pytest.raises(UserError, match='verify --fix'): trainer.fit(4)
    assert not any(t.is_alive() for t in trainer.feed.latest.threads)

def test_stages_and_their_devices():
    "With two devices there is something to copy."
    for data, model, where in (('GPU:0', 'GPU:0', {'host': 'CPU:0', 'data': 'GPU:0', 'model': 'GPU:0'}),
                               ('GPU:0', 'GPU:1', {'host': 'CPU:0', 'data': 'GPU:0', 'copy': 'GPU:1',
                                                   'model': 'GPU:1'})):
        feed = Feed.__new__(Feed)
        feed.devices, feed.outputs = DevicePlan({}, data, model), {}
        assert feed.where == where
        assert [*feed.stages] == [name for name in where if name not in ('host', 'model')]
    batch = {'a': tf.zeros((2, 3)), 'b': tf.zeros(4, tf.int64)}
    assert feed._note('data', batch) is batch
    assert feed.outputs == {'data': {('a batch', batch['a'].backing_device): 2 * 3 * 4 + 4 * 8}}
    on = lambda place, dtype: SimpleNamespace(device='GPU:1', backing_device=place, dtype=dtype, shape=(5,))
    feed._note('copy', {'text': on('CPU:0', tf.int32), 'clip': on('GPU:1', tf.int64)})
    assert feed.outputs['copy'] == {('its int32', 'CPU:0'): 5 * 4, ('a batch', 'GPU:1'): 5 * 8}
    wait_computed(tf.constant(1.))
    wait_computed(tf.zeros((2, 3)))   # of any shape

def test_a_batch_is_copied_by_one_program(runtime, mini, batch):
    "Each copy for itself waits for all that the model's device was given before; nothing is read there."
    from tensorflow.python.framework import op_callbacks
    feed, ran = Feed(runtime, mini, DevicePlan({}, 'CPU:0', 'CPU:0')), []
    def note(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        if graph is None: ran.append(op_type)
    op_callbacks.add_op_callback(note)
    try: copied = feed.copy(batch)
    finally: op_callbacks.remove_op_callback(note)
    assert len(ran) == 1 and 'all_to_model' in ran[0]
    assert copied.keys() == batch.keys() and all(np.array_equal(copied[k], batch[k]) for k in batch)

@pytest.mark.slow   # TensorFlow tries for 10 s and more to find the memory
def test_a_model_device_without_memory_is_named_with_a_remedy(runtime, mini, batch):
    feed = Feed(runtime, mini, DevicePlan({}, 'CPU:0', 'CPU:0'))
    size = tf.Variable([2**46], dtype=tf.int64)
    feed.transfer = tf.function(lambda batch: {'codes': tf.fill(size.read_value(), 0.) + 1})
    with pytest.raises(UserError, match='^CPU:0: out of memory for the next batch, beside the 2 before it; '
                                        'lower --buffer-size'): feed.copy(batch)

@pytest.mark.slow   # TensorFlow tries for 10 s and more to find the memory
def test_a_host_without_memory_is_not_taken_for_a_bad_recording(runtime, mini, monkeypatch):
    "Nothing is to be mended in the cache then."
    def read(self, step): return {'wav': tf.fill(tf.reshape(step, [1]) + 2**46, 0.) + 1}
    monkeypatch.setattr(page.SoundReader, '__call__', read)
    with pytest.raises(UserError, match='out of memory while recordings were read; lower data.batch_size'):
        next(sound_batches(BatchPlan(runtime, mini.data)))

def test_no_batch_waits_on_the_gpu_where_the_settings_say_so(runtime, mini):
    "`prefetch_to_gpu` off: the ring holds the batch in use alone."
    ahead = mini.replace(data={'buckets': 1}, training={'mode': 'eager'})   # op by op
    plain = ahead.replace(data={'prefetch_to_gpu': False})
    for config, ring in ((ahead, 3), (plain, 1)):
        feed = Feed(runtime, config, ONE)
        with feed(BatchPlan(runtime, config.data), 0, 4) as batches: made = sum(1 for _ in batches)
        assert (feed.ring, made) == (ring, 4) and batches.most <= ring

@pytest.mark.slow   # TensorFlow tries for 10 s and more to find the memory
def test_a_data_device_without_memory_is_named_with_a_remedy(runtime, mini):
    "A product that really does not fit, in the thread of the stage."
    feed = Feed(runtime, mini, ONE)
    size = tf.Variable([2**46], dtype=tf.int64)
    feed.finish = tf.function(lambda batch: {'codes': tf.fill(size.read_value(), 0.) + 1})
    with pytest.raises(UserError, match='^CPU:0: out of memory while it made a batch of 4 clips; lower data'):
        with feed(BatchPlan(runtime, mini.data), 0, 2) as batches: next(batches)

@pytest.mark.slow
def test_the_gpu_of_a_worker_makes_the_codes_of_its_rows(runtime, prepared, mini):
    "A batch at once; with prepared codes, on a CPU or with several cards it has nothing to make."
    config = mini.replace(data={'buckets': 1}, training={'mode': 'eager'})   # op by op
    plan = BatchPlan(runtime, config.data)
    with tf.device('CPU:0'): plan.dvae = load_dvae(runtime.folder / 'dvae.safetensors', config)
    for devices, cache in ((['CPU:0'], runtime), (['GPU:0', 'GPU:1'], runtime), (['GPU:0'], prepared)):
        assert code_feed(config, devices, [BatchPlan(cache, config.data)]) is None
    for worker in range(2):
        share = Share(plan, worker, 2)
        feed = code_feed(config, ['GPU:0'], [share])   # its DVAE is placed softly where there is no GPU
        assert (feed.devices.data, feed.devices.model, [*feed.stages]) == ('GPU:0', 'GPU:0', ['data'])
        feed.devices = DevicePlan({}, 'CPU:0', 'CPU:0')
        with feed(share, 0, 2) as made:
            for ours, theirs in zip(made, share.stream(0, 2), strict=True):   # row by row, on the CPU
                assert ours.keys() == theirs.keys() and {'whole_weight', 'whole_code_length'} < {*ours}
                for k in theirs:
                    assert ours[k].shape == theirs[k].shape and ours[k].dtype == theirs[k].dtype, k
                    if k not in ('codes', 'reference'): assert np.array_equal(ours[k], theirs[k]), k
                assert np.mean(ours['codes'].numpy() != theirs['codes'].numpy()) < 1e-2

def ran(most, seconds, batches=15):
    "A run whose model takes so many seconds a batch, the host a tenth of that."
    with SerialBatches([], {}) as made: made.most = most
    for n in range(batches):
        made.spans += [Span('host', n, n * seconds, (n + 0.1) * seconds),
                       Span('model', n, n * seconds, (n + 1) * seconds)]
    return made

def test_the_ideal_is_the_slowest_stage_alone(monkeypatch):
    "It is measured in turn, after a run that compiles."
    trainer, asked = SimpleNamespace(feed=SimpleNamespace(threads=None)), []
    def run(trainer, steps):
        asked.append((trainer.feed.threads, steps))
        return [], ran(3, 0.25) if trainer.feed.threads else ran(1, 0.4)
    monkeypatch.setattr(page, 'run_feed', run)
    rows = bench_feed(trainer, 7, 2)
    assert asked == [(None, 7), *[(False, 7), (True, 7)] * 2]
    keys = 'name', 'rate', 'ideal_rate', 'ratio', 'spread', 'busy', 'model_wait_share', 'ring_max'
    busy = {'host': .1, 'model': 1.}
    assert rows == [dict(zip(keys, row)) for row in (('serial_real', 2.5, 2.5, 1., 0., busy, 0, 1),
                                                     ('pipelined_real', 4., 2.5, 1.6, 0., busy, 0, 3))]
    asked.clear()
    assert bench_feed(trainer)[0]['spread'] == 0 and len(asked) == 7 and asked[0][1] == 30

CHILD = '''
import json, sys
from xtts_nb.data.cache import Cache
from xtts_nb.devices import setup_devices
from xtts_nb.train.dual import Feed
from xtts_nb.train.profile import device_placement, placement_summary
from xtts_nb.train.runs import new_run
devices, cache, run = setup_devices(two=True), Cache(sys.argv[1]), sys.argv[2]
trainer = new_run(cache, cache.config, run, feed=Feed(cache, cache.config, devices), device=devices.model)
trainer.fit(4)
print(json.dumps({'losses': trainer.first_losses, 'placement': placement_summary(device_placement(trainer)),
                  'ring': trainer.feed.latest.most,
                  'stages': sorted({s.stage for s in trainer.feed.latest.spans})}))
'''

@pytest.mark.slow   # the page does the shorter half of it
@pytest.mark.cpu
def test_two_devices_train_as_one_does_and_the_other_goes_on(runtime, mini, tmp_path):
    done = python(CHILD, runtime.folder, tmp_path / 'two', timeout=200)
    assert done.code == 0, done.err
    two = done.json
    one = new_run(runtime, mini, tmp_path / 'one', feed=Feed(runtime, mini, ONE), device='CPU:0')
    one.fit(4)
    assert two['losses'] == one.first_losses and two['ring'] <= 3
    assert two['stages'] == ['copy', 'data', 'host', 'model']
    where = {(r['name'], r['device']) for r in two['placement']}   # TensorFlow places int32 variables
    wanted = {'CPU:0': ('DVAE of the data device', 'stage data'),
              'CPU:1': ('model', 'optimizer', 'stage copy')}
    assert where >= {(name, device) for device, names in wanted.items() for name in names}, where
    again = resume_run(tmp_path / 'two', feed=Feed(runtime, mini, ONE), device='CPU:0')
    assert again.step == 4
    again.fit()
    one.fit()
    assert again.last_losses == one.last_losses


@pytest.mark.slow
@pytest.mark.parametrize('keep', [False, True])
def test_bench_dual(tmp_path, keep):
    (tmp_path / 'settings.ini').touch()
    done = xtts_nb('bench', 'dual', '--steps', 6, '--rounds', 2, '--json', *['--record'] * keep, cwd=tmp_path)
    assert done.code == 0, done.err
    rows = done.json['rows']
    assert [r['name'] for r in rows] == ['serial', 'pipelined'] and 'bench dual: 2 rounds' in done.err
    assert all(r.keys() == {'name', 'rate', 'ideal_rate', 'ratio', 'spread', 'busy', 'model_wait_share',
                            'ring_max'} for r in rows)
    turn, side = rows   # the causes: the stages work together, and the ring holds more than one batch
    assert [*turn['busy']] == ['host', 'data', 'model']
    assert sum(turn['busy'].values()) < sum(side['busy'].values())
    assert side['model_wait_share'] < turn['model_wait_share']
    assert turn['ring_max'] == 1 < side['ring_max'] <= 3
    kept = [json.loads(f.read_text())['rows'] for f in tmp_path.glob('benchmarks/dual-*.json')]
    assert kept == ([rows] if keep else [])

@pytest.mark.parametrize('arguments, words', [
    (['--data-gpu', 0], 'give a runtime cache'),
    (['--data', 'CACHE', '--data-gpu', 0, '--model-gpu', 0], 'both 0'),
    (['--data', 'CACHE', '--enable-memory-isolation'], 'CPU takes no memory limit')])
@pytest.mark.cpu
def test_bench_dual_says_what_is_wrong(runtime, arguments, words, capfd, monkeypatch):
    from xtts_nb.app import terminal
    from xtts_nb.app import cli  # noqa: F401  the commands
    arguments = [runtime.folder if a == 'CACHE' else a for a in arguments]
    monkeypatch.setattr(sys, 'argv', ['xtts-nb', 'bench', 'dual', *map(str, arguments)])
    with pytest.raises(SystemExit) as e: terminal.main()
    said = capfd.readouterr()
    assert e.value.code == 2 and words in said.err and 'Traceback' not in said.err and not said.out

@pytest.mark.slow
@pytest.mark.cpu
def test_bench_dual_with_real_stages(one_shape):
    done = xtts_nb('bench', 'dual', '--steps', 4, '--rounds', 1, '--data', one_shape.folder, '--json')
    assert done.code == 0, done.err
    assert [r['name'] for r in done.json['rows']] == ['serial', 'pipelined', 'serial_real', 'pipelined_real']
    assert 'CPU:1' in done.json['devices'] and all(r['ring_max'] <= 3 for r in done.json['rows'])

@pytest.mark.slow
@pytest.mark.cpu
def test_train_on_a_runtime_cache(one_shape, tmp_path):
    done = xtts_nb('train', '--data', one_shape.folder, '--run', tmp_path / 'run', '--steps', 4,
                   '--buffer-size', 2, '--json')
    assert done.code == 0, done.err
    assert done.json['steps'] == 4 and 'on one device, CPU:0' in done.err
    asked = xtts_nb('train', '--run', tmp_path / 'run', '--steps', 6, '--data-gpu', 0, '--model-gpu', 1)
    assert asked.code == 2 and asked.said[0].endswith('leave both out to train on the CPU.')


# --- two cards that are not there: logical CPU devices in their place -----------------------------

@pytest.fixture
def two_cards(monkeypatch): monkeypatch.setenv('XTTS_NB_CPU_CARDS', '2')

CARDS = '--data-gpu', 0, '--model-gpu', 1, '--enable-memory-isolation'

@pytest.mark.slow
def test_train_on_two_cards_with_isolated_memory(one_shape, two_cards, tmp_path):
    "The main command of the guides: nothing may be computed before the devices are set up."
    done = xtts_nb('train', '--data', one_shape.folder, '--run', tmp_path / 'run', '--steps', 1, *CARDS,
                   '--json')
    assert done.code == 0, done.err
    assert 'Batches are made on CPU:0, the model is trained on CPU:1.' in done.err and done.json['steps'] == 1

@pytest.mark.slow
def test_train_where_two_cards_can_be_seen(one_shape, two_cards, tmp_path):
    "Without options one card is taken, also by a runtime cache, which makes its batches on a device."
    done = xtts_nb('train', '--data', one_shape.folder, '--run', tmp_path / 'run', '--steps', 2, '--json')
    assert done.code == 0 and 'on one device, CPU:0.' in done.err, done.err

@pytest.mark.slow
def test_a_corpus_is_prepared_for_the_data_gpu(corpus, mini, two_cards, tmp_path):
    "In auto mode so small a corpus would get codes, and then there would be nothing to do for a data GPU."
    quick = mini.replace(data={'preprocessing_mode': 'auto', 'buckets': 1}, training={'dvae_steps': 2})
    (tmp_path / 'settings.yaml').write_text(quick.to_yaml())
    (tmp_path / 'settings.ini').touch()
    train = ('train', '--data', corpus, '--config', tmp_path / 'settings.yaml', '--run', tmp_path / 'run',
             '--steps', 2, *CARDS)
    done = xtts_nb(*train, '--json', cwd=tmp_path)
    assert done.code == 0 and 'the model is trained on CPU:1' in done.err, done.err
    refused = xtts_nb(*train, '--preprocessing-mode', 'precompute', cwd=tmp_path)
    assert refused.code == 2 and 'leaves nothing to do for a data GPU' in refused.said[0]
    assert 'encode' not in refused.err

@pytest.mark.slow
@pytest.mark.parametrize('command',
                         [['bench', 'dual', '--steps', '3', '--rounds', '1'],
                          ['profile', '--dual', '--out', 'out']],
                         ids=' '.join)
def test_real_stages_on_two_cards(one_shape, two_cards, tmp_path, command):
    (tmp_path / 'settings.ini').touch()
    done = xtts_nb(*command, '--data', one_shape.folder, '--json', cwd=tmp_path)
    assert done.code == 0, done.err
    assert 'Batches are made on CPU:0, the model is trained on CPU:1.' in done.out

@pytest.mark.slow
def test_say_where_two_cards_can_be_seen(xtts, two_cards, corpus, prepared, tmp_path):
    xtts.save(tmp_path / 'model')
    voice = sorted(corpus.rglob('*.wav'))[0]
    text = prepared.clips[0]['text']
    done = xtts_nb('say', text, '--model', tmp_path / 'model', '--voice', voice, '--out',
                   tmp_path / 'say.wav',
                   '--json')
    assert done.code == 0 and '2 logical CPU devices stand in for GPUs' in done.err, done.err
    assert done.json['seconds'] > 0, done.err

@pytest.mark.cpu
@pytest.mark.parametrize('options, words', [
    ([*CARDS, '--fit-memory'], '--fit-memory: tries updates on the first GPU'),
    (['--model-gpu', 2], 'no such GPU'),
    (['--data-gpu-memory', 10**9], 'are more than the')])
def test_devices_are_refused_before_anything_is_read(two_cards, tmp_path, options, words, capfd):
    "In this process TensorFlow has started: a plan that could be made would be refused for that."
    assert main('train', '--data', tmp_path / 'nothing', *options) == 2
    assert words in capfd.readouterr().err
