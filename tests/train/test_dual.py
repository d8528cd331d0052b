"Two devices: stages that lose nothing, the batches of the cache, the losses of one device, and what fails."
import gc
import random
import threading
import time
import traceback
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from cheap import read_eagerly
from process import main, python, xtts_nb
from xtts_nb.config import UserError
from xtts_nb.data.cache import Cache
from xtts_nb.data.native import BatchPlan, _CodeReader, _reader_of
from xtts_nb.data.prepare import encode_corpus
from xtts_nb.devices import DevicePlan
from xtts_nb.train import dual as page
from xtts_nb.train.distributed import Share
from xtts_nb.train.dual import (
    Feed, Pipeline, PipelineClosed, Span, by_stage, dual_trainer, finish_batch, overlap,
    _pipeline_rows, pipeline_table, sound_batches, _stage_rows, _steady_period)
from xtts_nb.train.runs import new_run

ONE = DevicePlan({}, 'CPU:0', 'CPU:0')

@pytest.fixture
def nobody_stays():
    "No thread outlives a test."
    before = set(threading.enumerate())
    yield
    assert not [t for t in threading.enumerate() if t not in before]

# --- stages in threads ----------------------------------------------------------------------------

@pytest.mark.parametrize('ring, between', [(1, 1), (2, 1), (3, 2), (5, 4)])
def test_batches_arrive_in_order_whatever_the_times(ring, between, nobody_stays):
    draw = random.Random(ring)
    work = {name: lambda n, name=name: (time.sleep(draw.random() / 1e3), [*n, name])[1] for name in 'abc'}
    with Pipeline(([n] for n in range(12)), work, ring, between) as batches: got = list(batches)
    assert got == [[n, 'a', 'b', 'c'] for n in range(12)]
    assert batches.most <= ring and all(r.most <= between for r in batches.rings[:-1])
    assert [s.number for s in by_stage(batches.spans)['b']] == list(range(12))

def test_a_slow_reader_holds_everybody_back(nobody_stays):
    asked = []
    with Pipeline((asked.append(n) or n for n in range(100)), {'data': str, 'copy': str}, ring=3,
                  between=2) as batches:
        next(batches)
        time.sleep(0.1)
        assert len(asked) <= 3 + 2 + 2 and [r.most for r in batches.rings] == [2, 2, 3] and batches.most == 3
        assert [t.name for t in batches.threads] == ['host', 'data', 'copy']

def test_a_batch_is_freed_when_it_was_used(nobody_stays):
    class Batch: pass
    alive, most = weakref.WeakSet(), 0
    def made(_):
        alive.add(b := Batch())
        return b
    with Pipeline(range(300), {'data': made}) as batches:
        for batch in batches:
            most = max(most, len(alive))
            del batch
    gc.collect()
    assert most <= 3 and not alive

@pytest.mark.parametrize('place, at', [('host', 0), ('host', 3), ('data', 0), ('copy', 3)])
def test_a_failure_comes_after_the_batches_before_it(place, at, nobody_stays):
    def fail(n):
        if n == at: raise KeyError('no such clip')
        return n
    same = lambda n: n
    source = (fail(n) if place == 'host' else n for n in range(9))
    seen = []
    with Pipeline(source, {name: fail if name == place else same for name in ('data', 'copy')}) as batches:
        with pytest.raises(KeyError, match='no such clip') as e: seen.extend(batches)
        with pytest.raises(KeyError): next(batches)
    assert seen == list(range(at)) and traceback.extract_tb(e.value.__traceback__)[-1].name == 'fail'

def test_a_failure_of_the_reader_and_a_second_close_leave_nothing(nobody_stays):
    with pytest.raises(ZeroDivisionError), Pipeline(iter(int, 1), {'data': str}) as batches:
        for _ in batches: raise ZeroDivisionError
    batches = Pipeline(iter(int, 1), {'data': lambda batch: (time.sleep(0.01), batch)[1]})
    next(batches)
    for _ in range(2): batches.close()
    with pytest.raises(PipelineClosed): next(batches)

# --- measures of a run ----------------------------------------------------------------------------

def test_measures_of_a_run_by_hand():
    spans = [Span('host', 0, 0., 1.), Span('model', 0, 1., 3.), Span('host', 1, 1., 2.),
             Span('model', 1, 4., 6.)]
    assert overlap(spans) == {'wall': 6., 'work': 6., 'rate': 1 / 3, 'model_wait_share': pytest.approx(0.2)}
    assert _stage_rows(spans, {'model': 'GPU:1'}) == [
        {'name': 'host', 'device': None, 'batches': 2, 'ms': 1000., 'busy': 1.},
        {'name': 'model', 'device': 'GPU:1', 'batches': 2, 'ms': 2000., 'busy': 0.667}]
    starts, lasts = [0, 10, 20, 24, 28], [9, 9, 1, 2, 4]   # of the second half; the last one ends no period
    slow = [Span('model', n, start, start + last) for n, (start, last) in enumerate(zip(starts, lasts))]
    assert [row['busy'] for some in (slow, slow[:1]) for row in _stage_rows(some)] == [(1 + 2) / 8, None]
    alone = {'wall': 9, 'work': 9, 'rate': None, 'model_wait_share': 0}
    assert overlap(slow[:1]) == alone   # one batch has no rate

def a_run(rate, most=1, host=0.25):
    "Four batches; the host works a share of its time, the model half of it."
    shares = ('host', host), ('model', 0.5)
    return SimpleNamespace(most=most, spans=[Span(stage, n, n / rate, (n + share) / rate)
                                             for stage, share in shares for n in range(4)])

def test_rows_are_medians_of_the_rounds():
    rows = _pipeline_rows({'a': [a_run(1 / 3, host=h) for h in (0.1, 0.2, 0.9)],
                           'b': [a_run(r, most) for r, most in ((1, 2), (4, 3), (2, 1))]}, 2 / 3)
    assert rows == [{'name': 'a', 'rate': 0.333, 'ideal_rate': 0.667, 'ratio': 1., 'spread': 0., 'rounds': 3,
                     'busy': {'host': 0.2, 'model': 0.5}, 'model_wait_share': 0.4286, 'ring_max': 1},
                    {'name': 'b', 'rate': 2., 'ideal_rate': 0.667, 'ratio': 6., 'spread': 1.5, 'rounds': 3,
                     'busy': {'host': 0.25, 'model': 0.5}, 'model_wait_share': 0.4286, 'ring_max': 3}]
    older = {k: v for k, v in rows[0].items() if k not in ('busy', 'ratio', 'spread')}
    assert [row['of the ideal'] for row in pipeline_table([*rows, older])] == ['49.9%', '299.9%', '49.9%']

def even(stage, batches, first=0., last=0.5):
    "A batch each second."
    return [Span(stage, n, first + n, first + n + last) for n in range(batches)]

@pytest.mark.parametrize('host, model, period', [
    (15, 15, (0., 16.5)), (16, 16, (10., 15.5)), (20, 20, (12., 19.5)), (5, 20, (0., 21.5))])
def test_the_steady_period_is_the_second_half_while_all_work(host, model, period):
    assert _steady_period([*even('host', host), *even('model', model, 2.)]) == period

# --- batches of a runtime cache -------------------------------------------------------------------

@pytest.mark.parametrize('change', [
    {'reference_frames': 128, 'reference_from': 'clip'}, {'pad_to_fixed_length': True, 'max_seconds': 2.}])
def test_batches_are_those_of_the_cache(prepared, runtime, dvae, mini, change):
    config = mini.replace(data=change)
    sound = sound_batches(BatchPlan(runtime, config.data), 0, 3)
    for ours, cached in zip(sound, read_eagerly(BatchPlan(prepared, config.data), 0, 3), strict=True):
        same_batch(finish_batch(ours, dvae, config), cached, 2e-3)

def same_batch(ours, cached, codes: float):   # two vectors may be as near as makes no difference
    assert ours.keys() == cached.keys()
    for name, wanted in cached.items():
        assert (ours[name].shape, ours[name].dtype) == (wanted.shape, wanted.dtype)
        if name not in ('codes', 'reference'): assert np.array_equal(ours[name], wanted)
    assert np.mean(np.asarray(ours['codes']) != np.asarray(cached['codes'])) < codes
    mine, theirs = (np.asarray(x['reference'], np.float32) for x in (ours, cached))
    assert (np.abs(mine - theirs) > 5e-3).mean() < 1e-3

def test_a_plan_without_codes_gives_the_batches_of_one_with(prepared, runtime, small, dvae):
    plans = BatchPlan(prepared, small.data), BatchPlan(runtime, small.data, dvae=dvae)
    assert isinstance(_reader_of(plans[1]), _CodeReader)
    for cached, ours in zip(read_eagerly(plans[0], 0, 3), plans[1].stream(0, 3), strict=True):
        same_batch(ours, cached, 2e-3)

def test_each_worker_makes_the_codes_of_its_rows(runtime, mini, dvae):
    "The shares of a runtime cache together are the batch of one device; each knows the lengths of all rows."
    plan = BatchPlan(runtime, mini.data, dvae=dvae)
    plans = plan, Share(plan, 0, 2), Share(plan, 1, 2)
    for whole, *halves in zip(*(some.stream(0, 2) for some in plans), strict=True):
        for name, rows in whole.items():
            assert np.array_equal(np.concatenate([half[name] for half in halves]), rows), name
        assert all(np.array_equal(half['whole_code_length'], whole['code_length']) for half in halves)

def test_the_end_of_the_batches_raises_no_error(runtime, mini, monkeypatch):
    "An op of another thread that copies between devices could end with the error of this one."
    monkeypatch.setattr(type(iter(tf.data.Dataset.range(1))), '__next__', None)
    assert len(list(sound_batches(BatchPlan(runtime, mini.data), 0, 2))) == 2

def test_a_batch_is_copied_by_one_program(runtime, mini, batch):
    "Each copy for itself waits for all that the model's device was given before; nothing is read there."
    from tensorflow.python.framework import op_callbacks
    feed, ran = Feed(runtime, mini, ONE), []
    def note(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        if graph is None: ran.append(op_type)
    op_callbacks.add_op_callback(note)
    try: copied = feed.copy(batch)
    finally: op_callbacks.remove_op_callback(note)
    assert len(ran) == 1 and 'all_to_model' in ran[0]
    assert copied.keys() == batch.keys() and all(np.array_equal(copied[k], batch[k]) for k in batch)
    feed.devices = DevicePlan({}, 'GPU:0', 'GPU:1')
    assert feed.where == {'host': 'CPU:0', 'data': 'GPU:0', 'copy': 'GPU:1', 'model': 'GPU:1'}

def test_no_batch_waits_on_the_gpu_where_the_settings_say_so(runtime, mini):
    "`prefetch_to_gpu` off: the ring holds the batch in use alone."
    ahead = mini.replace(data={'buckets': 1}, training={'gpt': {'mode': 'eager'}})   # op by op
    for config, ring in ((ahead, 3), (ahead.replace(data={'prefetch_to_gpu': False}), 1)):
        feed = Feed(runtime, config, ONE)
        with feed(BatchPlan(runtime, config.data), 0, 4) as batches: made = sum(1 for _ in batches)
        assert (feed.ring, made) == (ring, 4) and batches.most <= ring

def test_what_a_data_device_cannot_do(prepared, runtime, mini):
    with pytest.raises(UserError, match='training.gpt.tf32'):
        Feed(runtime, mini.replace(training={'gpt': {'tf32': True}}), ONE)
    with pytest.raises(UserError, match='has its codes already'): Feed(prepared, mini, ONE)

@pytest.mark.cpu
def test_a_recording_that_is_gone(mine, mini, dvae, prepared, tmp_path):
    settings = mini.replace(data={'preprocessing_mode': 'runtime'})
    encode_corpus(mine, tmp_path / 'cache', settings, dvae, prepared.tokenizer)
    trainer = dual_trainer(Cache(tmp_path / 'cache'), mini, ONE)
    for wav in mine.rglob('*.wav'): wav.unlink()
    with pytest.raises(UserError, match='verify --fix'): trainer.fit(4)
    assert not any(t.is_alive() for t in trainer.feed.latest.threads)

@pytest.mark.slow   # TensorFlow tries for 10 s and more to find the memory
def test_devices_without_memory_are_named(runtime, mini, batch, monkeypatch):
    "A product that does not fit; a host without memory is not taken for a recording that cannot be read."
    feed, plan = Feed(runtime, mini, ONE), BatchPlan(runtime, mini.data)
    size = tf.Variable([2**46], dtype=tf.int64)
    feed.transfer = feed.finish = tf.function(lambda batch: {'codes': tf.fill(size.read_value(), 0.) + 1})
    with pytest.raises(UserError, match='^CPU:0: out of memory for the next batch'): feed.copy(batch)
    with pytest.raises(UserError, match='^CPU:0: out of memory while it made a batch of 4 clips'):
        with feed(plan, 0, 2) as batches: next(batches)
    def read(self, step): return {'wav': tf.fill(tf.reshape(step, [1]) + 2**46, 0.) + 1}
    monkeypatch.setattr(page.SoundReader, '__call__', read)
    with pytest.raises(UserError, match='out of memory while recordings were read'): next(sound_batches(plan))

# --- slow: trained, resumed, and two cards that are logical CPU devices ---------------------------

CHILD = '''
import json, sys
from xtts_nb.data.cache import Cache
from xtts_nb.devices import setup_devices
from xtts_nb.files import named_weights
from xtts_nb.train.dual import Feed, sound_batches
from xtts_nb.train.runs import new_run
devices, cache, run = setup_devices(two=True), Cache(sys.argv[1]), sys.argv[2]
config = cache.config.replace(training={'gpt': {'validate_every': 4}})
held = [cache.clips[0]['id']]
trainer = new_run(cache, config, run, held, feed=Feed(cache, config, devices), device=devices.model)
trainer.fit(4)
feed, place = trainer.feed, lambda x: x.device.rpartition('device:')[2]
made = feed.make(next(sound_batches(trainer.plan)))
held = {'DVAE': [place(v.value) for v in named_weights(feed.dvae).values()],
        'model': [place(v.value) for v in trainer.xtts.gpt.trainable_variables],
        'optimizer': [place(v.value) for v in trainer.optimizer.variables if 'int' not in v.dtype],
        'made': [place(made['reference'])], 'copied': [place(feed.copy(made)['reference'])]}
print(json.dumps({'losses': trainer.first_losses, 'where': {name: sorted({*at}) for name, at in held.items()},
                  'ring': trainer.feed.latest.most,
                  'stages': sorted({s.stage for s in trainer.feed.latest.spans})}))
'''

@pytest.mark.slow
@pytest.mark.cpu
def test_two_devices_train_as_one_does_and_the_other_continues(runtime, tmp_path):
    "Validated, stopped after four updates, and resumed exactly."
    done = python(CHILD, runtime.folder, tmp_path / 'two', timeout=200)
    assert done.code == 0, done.err
    two = done.json
    config = runtime.config.replace(training={'gpt': {'validate_every': 4}})
    feed = lambda: dict(feed=Feed(runtime, config, ONE), device='CPU:0')
    one = new_run(runtime, config, tmp_path / 'one', [runtime.clips[0]['id']], **feed())
    one.fit(4)
    assert two['losses'] == one.first_losses and two['ring'] <= 3
    assert two['stages'] == ['copy', 'data', 'host', 'model']
    assert two['where'] == {'DVAE': ['CPU:0'], 'made': ['CPU:0'],
                            'model': ['CPU:1'], 'optimizer': ['CPU:1'], 'copied': ['CPU:1']}
    again = new_run(runtime, config, tmp_path / 'two', [runtime.clips[0]['id']], **feed())
    assert again.step == 4
    resumed, straight = again.fit(), one.fit()
    assert again.last_losses == one.last_losses and resumed['best'] == straight['best']
    assert not [t.name for t in threading.enumerate() if t.name in ('host', 'data', 'copy')]

CARDS = '--data-gpu', 0, '--model-gpu', 1, '--enable-memory-isolation'
BOTH = 'Batches are made on CPU:0, the model is trained on CPU:1.'

@pytest.mark.slow
@pytest.mark.parametrize('options, said', [   # with CARDS: see `test_a_corpus_is_prepared_for_the_data_gpu`
    (['--buffer-size', 2], 'on one device, CPU:0.'),
    ([], 'uses the first of 2 GPUs: it also makes the codes of a runtime cache')])
def test_train_on_a_runtime_cache_with_two_cards(runtime, two_cards, tmp_path, options, said):
    "The main command of the guides: nothing may be computed before the devices are set up."
    done = xtts_nb('train', '--data', runtime.folder, '--run', tmp_path / 'run', '--steps', 1, *options,
                   '--json')
    assert done.code == 0 and said in done.err and done.json['steps'] == 1, done.err

@pytest.mark.slow
def test_a_corpus_is_prepared_for_the_data_gpu(corpus, mini, two_cards, tmp_path):
    "In auto mode so small a corpus would get codes, and then there would be nothing to do for a data GPU."
    quick = mini.replace(data={'preprocessing_mode': 'auto', 'buckets': 1},
                         training={'dvae': {'steps': 2, 'mode': 'eager'}})
    (tmp_path / 'settings.yaml').write_text(quick.to_yaml())
    (tmp_path / 'settings.ini').touch()
    train = ('train', '--data', corpus, '--config', tmp_path / 'settings.yaml', '--run', tmp_path / 'run',
             '--steps', 2, *CARDS)
    done = xtts_nb(*train, '--json', cwd=tmp_path)
    assert done.code == 0 and 'the model is trained on CPU:1' in done.err, done.err
    refused = xtts_nb(*train, '--preprocessing-mode', 'precompute', cwd=tmp_path)
    assert refused.code == 2 and 'leaves nothing to do for a data GPU' in refused.said[0]

@pytest.mark.slow
def test_real_stages_on_two_cards(runtime, two_cards, tmp_path):
    (tmp_path / 'settings.ini').touch()
    done = xtts_nb('bench', 'dual', '--data', runtime.folder, '--steps', 3, '--rounds', 1, '--record',
                   '--json', cwd=tmp_path)
    assert done.code == 0 and BOTH in done.out and [*tmp_path.glob('benchmarks/dual-*.json')], done.err

@pytest.mark.slow
def test_say_where_two_cards_can_be_seen(xtts, two_cards, corpus, prepared, tmp_path):
    xtts.save(tmp_path / 'model')
    done = xtts_nb('say', prepared.clips[0]['text'], '--model', tmp_path / 'model', '--voice',
                   sorted(corpus.rglob('*.wav'))[0], '--out', tmp_path / 'say.wav', '--json')
    assert done.code == 0 and '2 logical CPU devices stand in for GPUs' in done.err, done.err
    assert done.json['seconds'] > 0

@pytest.mark.cpu
@pytest.mark.parametrize('line, words', [
    (['train', '--data', '.', *CARDS, '--fit-memory'], '--fit-memory tries updates on the first GPU'),
    (['train', '--data', '.', '--model-gpu', 2], 'no such GPU'),
    (['train', '--data', '.', '--data-gpu-memory', 10**9], 'are more than the'),
    (['bench', 'dual', '--data-gpu', 0], 'give a runtime cache')])
def test_devices_are_refused_before_anything_is_read(two_cards, line, words, capfd):
    "In this process TensorFlow has started: a plan that could be made would be refused for that."
    assert main(*line) == 2 and words in capfd.readouterr().err
