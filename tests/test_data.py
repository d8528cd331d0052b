"Batches: least padding, each clip once, the same for any workers and after resuming, shapes that stand still."
import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.audio import save_audio, synthetic_voice
from xtts_nb.cache import Cache
from xtts_nb.config import DataConfig, UserError
from xtts_nb.data import BatchPlan, OnlineLoader, bucket_bounds, cached_batches, check_equal, check_native, online_batches
from xtts_nb.prepare import prepare


# --- buckets -------------------------------------------------------------------------------------------------------

def padding(lengths, bounds):
    bounds = np.array(bounds)
    return int((bounds[np.searchsorted(bounds, lengths)] - lengths).sum())

def least_padding(lengths, buckets):
    values = sorted(set(lengths))
    return min(padding(lengths, sorted({*cuts, values[-1]})) for k in range(buckets)
               for cuts in itertools.combinations(values[:-1], min(k, len(values) - 1)))

@pytest.mark.parametrize('buckets', [1, 2, 3, 5, 20])
@pytest.mark.parametrize('lengths', [[7], [7, 7, 7], [1, 2], [3, 1, 2], [1, 1, 1, 9], [5, 6, 7, 20, 21, 40],
                                     [1, 10, 11, 12, 13, 30, 30, 30]], ids=str)
def test_bounds_pad_least(lengths, buckets):
    bounds = bucket_bounds(np.array(lengths), buckets)
    assert bounds == sorted(set(bounds)) and bounds[-1] == max(lengths) and len(bounds) <= buckets
    assert padding(np.array(lengths), bounds) == least_padding(lengths, buckets)

@pytest.mark.parametrize('seed', range(30))
def test_bounds_equal_brute_force(seed):
    rng = np.random.default_rng(seed)
    lengths, buckets = rng.integers(1, 25, rng.integers(1, 40)), int(rng.integers(1, 5))
    assert padding(lengths, bucket_bounds(lengths, buckets)) == least_padding(list(lengths), buckets)


# --- a cache without sound -----------------------------------------------------------------------------------------

def fake_cache(lengths, speakers=None, seed=0):
    "What a plan and a reader need, with clip i's arrays full of i + 1."
    n, rng = len(lengths), np.random.default_rng(seed)
    cache = SimpleNamespace(folder='fake', clips=[{'id': str(i), 'speaker': (speakers or ['s'] * n)[i]} for i in range(n)])
    sizes = {'codes': np.array(lengths), 'text': rng.integers(1, 9, n), 'mel': rng.integers(3, 12, n)}
    for name, length in sizes.items():
        flat = np.repeat(np.arange(1, n + 1), length)
        setattr(cache, name, np.repeat(flat[:, None], 2, 1).astype(np.float16) if name == 'mel' else flat)
        setattr(cache, f'{name}_length', length.astype(np.int32))
        setattr(cache, f'{name}_start', np.cumsum(length) - length)
    type_with_len = type('FakeCache', (SimpleNamespace,), {'__len__': lambda self: n})
    return type_with_len(**vars(cache))

def data(**changes): return DataConfig(**{'batch_size': 4, 'buckets': 3, 'reference_frames': 6} | changes)

def epoch(plan, number=0, count=1):
    first = number * plan.steps_per_epoch
    return [{k: v.numpy() for k, v in b.items()} for b in cached_batches(plan, first, first + count * plan.steps_per_epoch)]

def heard(batches): return Counter(int(c) for b in batches for c, w in zip(b['clip'], b['weight']) if w)

CORPORA = {'one clip': [5], 'two equal': [5, 5], 'even': [3] * 8, 'spread': [1, 2, 3, 5, 8, 13, 21, 34, 55],
           'random': list(np.random.default_rng(1).integers(1, 60, 37))}

@pytest.mark.parametrize('buckets', [1, 3, 50])
@pytest.mark.parametrize('batch_size', [1, 4, 64])
@pytest.mark.parametrize('lengths', CORPORA.values(), ids=CORPORA)
def test_each_clip_once_an_epoch_and_one_shape_a_bucket(lengths, batch_size, buckets):
    plan = BatchPlan(fake_cache(lengths), data(batch_size=batch_size, buckets=buckets, seed=batch_size))
    both = epoch(plan, count=2)
    for batches in (both[:plan.steps_per_epoch], both[plan.steps_per_epoch:]):
        assert heard(batches) == Counter(range(len(lengths)))
        assert len({b['codes'].shape for b in batches}) == len(plan.bounds)
        assert len({(b['codes'].shape, b['text'].shape) for b in batches}) == len(plan.bounds)
        assert all(b['codes'].shape[0] == b['weight'].shape[0] == batch_size for b in batches)
        assert {b['reference'].shape for b in batches} == {(batch_size, 6, 2)}

def test_rows_hold_their_clip_and_zeros_behind():
    cache = fake_cache(CORPORA['random'], ['a', 'b', 'c'] * 12 + ['d'])
    for b in epoch(BatchPlan(cache, data())):
        for row, clip in enumerate(b['clip']):
            for name, length in (('codes', 'code_length'), ('text', 'text_length')):
                n = b[length][row]
                assert n == getattr(cache, f'{name}_length')[clip]
                assert (b[name][row, :n] == clip + 1).all() and not b[name][row, n:].any()
        assert b['codes'].dtype == b['text'].dtype == b['code_length'].dtype == np.int32 and b['weight'].dtype == np.float32

def test_only_filled_rows_weigh_nothing():
    plan = BatchPlan(fake_cache(CORPORA['random']), data(batch_size=8))
    batches = epoch(plan)
    assert sum(b['weight'].sum() for b in batches) == 37 and {w for b in batches for w in b['weight']} == {0., 1.}
    assert all(np.array_equal(b['weight'], np.sort(b['weight'])[::-1]) and b['weight'][0] == 1 for b in batches)

def test_padding_stays_within_its_bucket():
    plan = BatchPlan(fake_cache(CORPORA['random']), data(buckets=4))
    bounds = [0, *plan.bounds]
    for b in epoch(plan):
        width = b['codes'].shape[1]
        assert width in plan.bounds and (b['code_length'] > bounds[bounds.index(width) - 1]).all()
        assert (b['code_length'] <= width).all()

def test_epochs_and_seeds_differ_and_repeat():
    plan = lambda seed: BatchPlan(fake_cache(CORPORA['random']), data(seed=seed))
    order = lambda seed, number: [list(b['clip']) for b in epoch(plan(seed), number)]
    orders = [order(s, n) for s in (0, 1, 12345, 2**31 - 2) for n in (0, 1)]
    assert all(a != b for a, b in itertools.combinations(orders, 2)) and order(0, 1) == orders[1]

def test_the_order_looks_shuffled():
    "Over many epochs a clip is first about as often as any other."
    plan = BatchPlan(fake_cache([5] * 6), data(batch_size=1, buckets=1))
    first = Counter(int(plan.pick(tf.constant(6 * n, tf.int64))[1][0]) for n in range(300))
    assert set(first) == set(range(6)) and min(first.values()) > 20

@pytest.mark.parametrize('workers, ahead', [(1, 1), (4, 1), (2, 8)])
def test_workers_do_not_change_the_batches(workers, ahead):
    cache = fake_cache(CORPORA['random'], ['a', 'b'] * 18 + ['c'])
    one, other = (epoch(BatchPlan(cache, data(num_workers=w, prefetch_buffer_size=p))) for w, p in ((2, 4), (workers, ahead)))
    assert len(one) == len(other) and all(np.array_equal(a[k], b[k]) for a, b in zip(one, other) for k in a)

def test_workers_and_prefetch_reach_tensorflow(monkeypatch):
    asked, real_map, real_prefetch = {}, tf.data.Dataset.map, tf.data.Dataset.prefetch
    monkeypatch.setattr(tf.data.Dataset, 'map', lambda self, f, **how: asked.update(how) or real_map(self, f, **how))
    monkeypatch.setattr(tf.data.Dataset, 'prefetch', lambda self, n: asked.update(prefetch=n) or real_prefetch(self, n))
    cached_batches(BatchPlan(fake_cache([5]), data(num_workers=3, prefetch_buffer_size=7)))
    assert (asked['num_parallel_calls'], asked['deterministic'], asked['prefetch']) == (3, True, 7)

@pytest.mark.parametrize('first', [0, 1, 7, 12, 500])
def test_resuming_goes_on_where_it_stopped(first):
    cache = fake_cache(CORPORA['random'], ['a', 'b'] * 18 + ['c'])
    straight = list(cached_batches(BatchPlan(cache, data()), 0, first + 5).skip(first))
    resumed = list(cached_batches(BatchPlan(cache, data()), first).take(5))
    assert len(straight) == len(resumed) == 5
    assert all(np.array_equal(a[k], b[k]) for a, b in zip(straight, resumed) for k in a)


# --- references ----------------------------------------------------------------------------------------------------

def picks(plan, steps): return [[np.asarray(x) for x in plan.pick(tf.constant(s, tf.int64))] for s in range(steps)]

def test_the_reference_is_another_clip_of_the_same_speaker():
    speakers = ['a', 'b', 'c'] * 12 + ['alone']
    plan = BatchPlan(fake_cache(CORPORA['random'], speakers), data())
    pairs = Counter((int(c), int(o)) for _, clip, other, _, _ in picks(plan, 20 * plan.steps_per_epoch)
                    for c, o in zip(clip, other))
    assert all(speakers[c] == speakers[o] for c, o in pairs)
    assert all((c == o) == (speakers[c] == 'alone') for c, o in pairs) and (36, 36) in pairs
    assert {o for c, o in pairs if c == 0} == set(range(3, 36, 3))   # every other clip gets its turn

def test_a_crop_goes_round_at_the_end_of_its_clip():
    cache = fake_cache(CORPORA['random'], ['a', 'b'] * 18 + ['c'])
    cache.mel[:, 1] = np.concatenate([np.arange(n) for n in cache.mel_length])   # the frame's number
    plan = BatchPlan(cache, data(reference_frames=20))   # longer than any clip
    for (_, _, other, start, _), b in zip(picks(plan, 12), cached_batches(plan, 0, 12)):
        assert (start >= 0).all() and (start < cache.mel_length[other]).all()
        for row, (o, s) in enumerate(zip(other, start)):
            assert (b['reference'][row, :, 0].numpy() == o + 1).all()
            assert np.array_equal(b['reference'][row, :, 1], (s + np.arange(20)) % cache.mel_length[o])
    assert len({int(s) for _, _, _, start, _ in picks(plan, 12) for s in start}) > 3

def test_excluded_clips_are_never_heard_nor_referred_to():
    speakers = ['a', 'b'] * 18 + ['c']
    used = np.array([i for i in range(37) if i % 5])
    plan = BatchPlan(fake_cache(CORPORA['random'], speakers), data(), used)
    assert heard(epoch(plan)) == Counter(int(i) for i in used)
    others = {int(o) for _, clip, other, _, _ in picks(plan, 30 * plan.steps_per_epoch) for o in (*clip, *other)}
    assert others == {int(i) for i in used}

def test_a_speaker_left_with_one_clip_refers_to_itself():
    plan = BatchPlan(fake_cache([5] * 4, ['a', 'a', 'b', 'b']), data(batch_size=2), np.array([0, 2, 3]))
    for _, clip, other, _, _ in picks(plan, 12):
        assert all((o == 0) if c == 0 else (o == 5 - c) for c, o in zip(clip, other))

@pytest.mark.parametrize('clips', [[], np.array([], np.int64)])
def test_nothing_left_to_train_on_is_named(clips):
    with pytest.raises(UserError, match='fake: no clips are left to train on; hold fewer out'):
        BatchPlan(fake_cache([5, 6]), data(), clips)


# --- online --------------------------------------------------------------------------------------------------------

def test_three_pipelines_deliver_the_same(prepared, corpus, dvae, small, stats):
    plan = BatchPlan(prepared, small.data)
    loader = OnlineLoader(plan, corpus, stats)
    differ = check_equal(plan, loader, dvae.encode, batches=plan.steps_per_epoch + 1)
    assert set(differ) == {'mel', 'reference', 'cached reference', 'codes'} and max(differ.values()) < 1e-3

def test_a_difference_is_noticed(prepared, corpus, dvae, small, stats):
    plan = BatchPlan(prepared, small.data)
    with pytest.raises(AssertionError, match='different batches'): check_equal(plan, OnlineLoader(plan, corpus, stats * 1.1))
    with pytest.raises(AssertionError, match='different batches'):
        check_equal(plan, OnlineLoader(plan, corpus, stats), lambda mel: 1 - dvae.encode(mel))

@pytest.mark.parametrize('python', [True, False])
def test_online_shapes_are_static(prepared, corpus, stats, small, python):
    spec = online_batches(OnlineLoader(BatchPlan(prepared, small.data), corpus, stats), python).element_spec
    assert all(s.shape[1:].is_fully_defined() for s in spec.values()) and spec['reference'].shape[1:] == (32, 80)

# 11520 and others: rounded seconds fall short of a frame
@pytest.mark.parametrize('samples', [11520, 11521, 14080, 16640, 22050])
@pytest.mark.parametrize('python', [True, False])
def test_the_longest_clip_fits_whatever_its_length(tmp_path, small, dvae, samples, python, stats):
    for name, n in (('a', samples), ('b', 11100)): save_audio(tmp_path / 'corpus/wavs' / f'{name}.wav', synthetic_voice(1.)[:n])
    (tmp_path / 'corpus/metadata.csv').write_text('a|aa|aa\nb|bb|bb\n')
    prepare(tmp_path / 'corpus', tmp_path / 'cache', small, dvae)
    plan = BatchPlan(Cache(tmp_path / 'cache'), small.data.model_copy(update={'buckets': 1, 'batch_size': 2}))
    batch = next(iter(online_batches(OnlineLoader(plan, tmp_path / 'corpus', stats), python)))
    assert batch['mel'].shape == (2, 1 + samples // 256, 80)

def test_another_corpus_is_named(prepared, tmp_path, small, stats):
    (tmp_path / 'wavs').mkdir(); (tmp_path / 'metadata.csv').write_text('x|a|a\n')
    with pytest.raises(UserError, match=f'{tmp_path}: lacks the clip low-0 of .*give the corpus the cache came from'):
        OnlineLoader(BatchPlan(prepared, small.data), tmp_path, stats)

@pytest.mark.parametrize('how', [dict(subtype='FLOAT'), dict(samplerate=16000), dict(channels=2), dict(format='FLAC')], ids=str)
def test_native_reading_refuses_what_it_would_misread(tmp_path, how):
    import soundfile
    how = dict(samplerate=22050, channels=1, subtype='PCM_16', format='WAV') | how
    wav = np.zeros((100, how.pop('channels')))
    soundfile.write(tmp_path / 'good.wav', np.zeros(100), 22050, subtype='PCM_16')
    soundfile.write(tmp_path / 'a.wav', wav, **how)
    check_native([str(tmp_path / 'good.wav')], 22050)
    with pytest.raises(UserError, match='a.wav: is .*so use the cache'):
        check_native([str(tmp_path / 'good.wav'), str(tmp_path / 'a.wav')], 22050)

def test_only_the_python_loader_is_a_python_function(prepared, corpus, stats, small):
    "What a graph calls tells which pipeline holds the interpreter lock."
    loader = OnlineLoader(BatchPlan(prepared, small.data), corpus, stats)
    concrete = tf.function(loader.native).get_concrete_function(*[tf.TensorSpec([], tf.int64)] * 3)
    assert not any(op.type.endswith('PyFunc') for op in concrete.graph.get_operations())

def test_a_batch_has_what_the_losses_read(batch):
    assert set(batch) == {'clip', 'weight', 'reference', 'codes', 'text', 'code_length', 'text_length'}
