"Batches: least padding, each clip once, the same for any workers and after resuming, static shapes."
import itertools
import math
import os
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from fake_dvae import Fake
from wav_files import SAMPLES
from xtts_nb.config import DataConfig, UserError, XTTSConfig
from xtts_nb.data import native as module
from xtts_nb.data.audio import save_audio, synthetic_voice
from xtts_nb.data.cache import Cache, left_out_line
from xtts_nb.data.native import (
    BatchPlan, CacheReader, MelReader, PythonReader, WavReader, batches_of, bucket_of, bucket_shapes,
    cached_batches, decode_wav, fixed_shape, mels_of, order_columns, speech_lengths)
from xtts_nb.data.prepare import Loudness, lesson_cache, prepare


# --- buckets --------------------------------------------------------------------------------------

def positions(codes, text, shapes):
    return int(np.array(shapes)[bucket_of(codes, text, shapes)].sum())

def fewest_positions(codes, text, buckets):
    "Over all chains of shapes that end in one that takes every clip."
    corner = int(codes.max()), int(text.max())
    corners = [c for c in itertools.product(sorted({*codes.tolist()}), sorted({*text.tolist()}))
               if c != corner]
    best = positions(codes, text, [corner])
    for k in range(1, buckets):
        for chain in itertools.combinations(corners, k):
            if all(a[0] <= b[0] and a[1] <= b[1] for a, b in zip(chain, chain[1:])):
                best = min(best, positions(codes, text, [*chain, corner]))
    return best

@pytest.mark.parametrize('buckets', [1, 2, 3])
@pytest.mark.parametrize('codes, text',
                         [([7], [3]), ([7, 7, 7], [3, 3, 3]), ([1, 2], [2, 1]), ([3, 1, 2], [9, 9, 9]),
                          ([1, 1, 1, 9], [1, 5, 1, 1]), ([5, 6, 20, 21], [2, 3, 9, 8])], ids=str)
def test_shapes_are_a_chain_that_takes_every_clip(codes, text, buckets):
    codes, text = np.array(codes), np.array(text)
    shapes = bucket_shapes(codes, text, buckets, least=1)
    assert len(shapes) <= buckets and shapes[-1] == (codes.max(), text.max())
    assert all(a[0] <= b[0] and a[1] <= b[1] and a != b for a, b in zip(shapes, shapes[1:]))
    assert set(bucket_of(codes, text, shapes).tolist()) == set(range(len(shapes)))   # no empty bucket
    assert positions(codes, text, shapes) == fewest_positions(codes, text, buckets)

@pytest.mark.parametrize('seed', range(20))
def test_shapes_equal_brute_force(seed):
    rng = np.random.default_rng(seed)
    n, buckets = rng.integers(1, 12), int(rng.integers(1, 4))
    codes, text = rng.integers(1, 9, n), rng.integers(1, 6, n)
    assert positions(codes, text, bucket_shapes(codes, text, buckets, least=1)) == fewest_positions(
        codes, text, buckets)

@pytest.mark.parametrize('clips', [9, 28, 95, 285])
@pytest.mark.parametrize('batch_size', [8, 16, 32])
def test_most_rows_are_clips(clips, batch_size):
    "Of a small corpus too: each bucket has a batch of clips, or clips are read again until one is full."
    codes, text = speech_lengths(clips)
    shapes = bucket_shapes(codes, text, 4, least=8)
    assert np.bincount(bucket_of(codes, text, shapes)).min() >= 8
    plan = BatchPlan(fake_cache(codes), data(batch_size=batch_size, buckets=4))
    weight = [float(plan.pick(tf.constant(step, tf.int64))[-1].numpy().mean())
              for step in range(plan.steps_per_epoch)]
    assert np.mean(weight) > .5 and clips <= sum(weight) * batch_size

def test_a_validation_counts_each_clip_once():
    plan = BatchPlan(fake_cache([5] * 3), data(), fixed=True)
    assert heard(epoch(plan)) == Counter(range(3))

def test_speech_lengths():
    codes, text = speech_lengths(5000, seed=1)
    assert codes.min() >= 24 and 210 < codes.max() <= 218 and codes.mean() == pytest.approx(142, abs=4)
    assert text.min() >= 4 and text.max() < 200 and text.mean() == pytest.approx(58, abs=3)
    assert np.corrcoef(codes, text)[0, 1] > 0.9 and np.std(text - text.mean() / codes.mean() * codes) > 4
    assert np.array_equal(speech_lengths(5000, seed=1), (codes, text))
    assert not np.array_equal(speech_lengths(5000)[0], codes)

def test_six_buckets_leave_little_empty():
    codes, text = speech_lengths(13100)
    used = int(codes.sum() + text.sum())
    waste = {k: 1 - used / positions(codes, text, bucket_shapes(codes, text, k)) for k in (1, 6)}
    assert waste[6] < 0.13 < 0.38 < waste[1]
    few = positions(codes, text, bucket_shapes(codes, text, 6))
    # forty lengths are enough
    assert few < 1.006 * positions(codes, text, bucket_shapes(codes, text, 6, most=60))

@pytest.mark.parametrize('lengths, most, ends', [
    ([1, 3, 3], 9, [1, 3]), ([1, 3, 3], 2, [1, 3]), ([1, 2, 3, 3, 3, 3], 2, [3]), ([1], 1, [1]),
    (range(1, 101), 4, [25, 50, 75, 100]),
    (range(1, 101), 99, [*range(2, 101)])], ids=str)
def test_a_bucket_ends_at_a_length_that_occurs(lengths, most, ends):
    assert module._candidates(np.bincount(lengths).cumsum(), most).tolist() == ends

# --- a cache without sound ------------------------------------------------------------------------

def fake_cache(lengths, speakers=None, seed=0, languages=None):
    "What a plan and a reader need, with clip i's arrays full of i + 1."
    n, rng = len(lengths), np.random.default_rng(seed)
    who, tongue = speakers or ['s'] * n, languages or ['en'] * n
    cache = SimpleNamespace(folder='fake', manifest={'key': 'fake'}, config=XTTSConfig(),
                            check_unchanged=lambda: None,
                            samples=np.full(n, 22050), speaker=np.unique(who, return_inverse=True)[1],
                            language=np.unique(tongue, return_inverse=True)[1],
                            clips=[{'id': str(i), 'speaker': who[i], 'language': tongue[i]}
                                   for i in range(n)])
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
    return [{k: v.numpy() for k, v in b.items()}
            for b in cached_batches(plan, first, first + count * plan.steps_per_epoch)]

def heard(batches): return Counter(int(c) for b in batches for c, w in zip(b['clip'], b['weight']) if w)

CORPORA = {'one clip': [5], 'two equal': [5, 5], 'even': [3] * 8, 'spread': [1, 2, 3, 5, 8, 13, 21, 34, 55],
           'random': list(np.random.default_rng(1).integers(1, 60, 37))}

# clips of one length have one shape, whatever the number of buckets
@pytest.mark.parametrize('corpus, buckets', [
    ('one clip', 3), ('two equal', 3), ('even', 3), *itertools.product(('spread', 'random'), (1, 3, 50))])
@pytest.mark.parametrize('batch_size', [1, 4, 64])
def test_each_clip_once_an_epoch_and_one_shape_a_bucket(corpus, batch_size, buckets):
    lengths = CORPORA[corpus]
    plan = BatchPlan(fake_cache(lengths), data(batch_size=batch_size, buckets=buckets, seed=batch_size))
    both = epoch(plan, count=2)
    for batches in (both[:plan.steps_per_epoch], both[plan.steps_per_epoch:]):
        often = batch_size / len(lengths) if batch_size > len(lengths) else 1
        times = heard(batches)
        assert set(times) == set(range(len(lengths)))
        assert set(times.values()) <= {int(often), math.ceil(often)}
        assert {(b['codes'].shape[1], b['text'].shape[1]) for b in batches} == set(plan.shapes)
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
        assert b['codes'].dtype == b['text'].dtype == b['code_length'].dtype == np.int32
        assert b['weight'].dtype == np.float32

def test_only_filled_rows_weigh_nothing():
    plan = BatchPlan(fake_cache(CORPORA['random']), data(batch_size=8))
    batches = epoch(plan)
    assert sum(b['weight'].sum() for b in batches) == 37
    assert {w for b in batches for w in b['weight']} == {0., 1.}
    assert all(np.array_equal(b['weight'], np.sort(b['weight'])[::-1]) and b['weight'][0] == 1
               for b in batches)

def test_a_clip_goes_to_the_first_bucket_it_fits():
    plan = BatchPlan(fake_cache(CORPORA['random']), data(buckets=4))
    for b in epoch(plan):
        shape = b['codes'].shape[1], b['text'].shape[1]
        assert shape in plan.shapes
        for c, t in zip(b['code_length'], b['text_length']):
            assert next(s for s in plan.shapes if c <= s[0] and t <= s[1]) == shape

def test_the_columns_of_a_plan():
    "Three buckets: codes up to 2, 4 and 9; the longest mel of each, and the clips in the order of the files."
    cache = fake_cache([9, 2, 4, 1, 4, 2], ['b', 'a', 'a', 'b', 'c', 'a'])
    cache.text_length[:], cache.mel_length[:] = [9, 2, 4, 2, 4, 2], [7, 30, 5, 6, 40, 31]
    found = {name: column.tolist() for name, column in order_columns(cache, data(batch_size=1)).items()}
    assert found == {'shapes': [[2, 2], [4, 4], [9, 9]], 'frames': [31, 40, 7], 'members': [1, 3, 5, 2, 4, 0],
                     'member_count': [3, 2, 1], 'speaker': [1, 0, 0, 1, 2, 0],
                     'by_speaker': [1, 2, 5, 0, 3, 4], 'speaker_count': [3, 2, 1], 'share': []}
    shapes = [(0, 0), *map(tuple, found['shapes']), (99, 99)]   # those that no clip needs are left out
    again = order_columns(cache, data(batch_size=1), None, shapes)
    assert {name: np.array(column).tolist() for name, column in again.items()} == found
    few = order_columns(cache, data(buckets=1, balance_speakers=True), np.array([0, 3, 4]))
    assert few['frames'].tolist() == [40] and few['members'].tolist() == [0, 3, 4]
    assert np.allclose(few['share'], [1 / 4, 1 / 2, 1])

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
    one, other = (epoch(BatchPlan(cache, data(num_workers=w, prefetch_buffer_size=p)))
                  for w, p in ((2, 4), (workers, ahead)))
    assert len(one) == len(other) and all(np.array_equal(a[k], b[k]) for a, b in zip(one, other) for k in a)

@pytest.mark.cpu   # on a GPU two batches wait there
def test_workers_and_prefetch_reach_tensorflow(monkeypatch):
    asked, real_map, real_prefetch = {}, tf.data.Dataset.map, tf.data.Dataset.prefetch
    monkeypatch.setattr(tf.data.Dataset, 'map', lambda self, f,
                        **how: asked.update(how) or real_map(self, f, **how))
    monkeypatch.setattr(tf.data.Dataset, 'prefetch', lambda self,
                        n: asked.update(prefetch=n) or real_prefetch(self, n))
    cached_batches(BatchPlan(fake_cache([5]), data(num_workers=3, prefetch_buffer_size=7)))
    assert (asked['num_parallel_calls'], asked['deterministic'], asked['prefetch']) == (3, True, 7)

@pytest.mark.parametrize('first', [0, 1, 7, 12, 500])
def test_resuming_goes_on_where_it_stopped(first):
    cache = fake_cache(CORPORA['random'], ['a', 'b'] * 18 + ['c'])
    straight = list(cached_batches(BatchPlan(cache, data()), 0, first + 5).skip(first))
    resumed = list(cached_batches(BatchPlan(cache, data()), first).take(5))
    assert len(straight) == len(resumed) == 5
    assert all(np.array_equal(a[k], b[k]) for a, b in zip(straight, resumed) for k in a)


# --- references -----------------------------------------------------------------------------------

def picks(plan, steps): return list(tf.data.Dataset.range(steps).map(plan.pick).as_numpy_iterator())

def test_the_reference_is_another_clip_of_the_same_speaker():
    speakers = ['a', 'b', 'c'] * 12 + ['alone']
    plan = BatchPlan(fake_cache(CORPORA['random'], speakers), data())
    pairs = Counter((int(c), int(o)) for _, clip, other, _, _ in picks(plan, 80 * plan.steps_per_epoch)
                    for c, o in zip(clip, other))
    assert all(speakers[c] == speakers[o] for c, o in pairs)
    assert all((c == o) == (speakers[c] == 'alone') for c, o in pairs) and (36, 36) in pairs
    assert {o for c, o in pairs if c == 0} == set(range(3, 36, 3))   # every other clip gets its turn

@pytest.mark.parametrize('frames', [1, 5, 20])
def test_a_crop_lies_in_its_clip_and_goes_round_only_if_that_is_shorter(frames):
    cache = fake_cache(CORPORA['random'], ['a', 'b'] * 18 + ['c'])
    cache.mel[:, 1] = np.concatenate([np.arange(n) for n in cache.mel_length])   # the frame's number
    plan = BatchPlan(cache, data(reference_frames=frames))
    for (_, _, other, start, _), b in zip(picks(plan, 12), cached_batches(plan, 0, 12)):
        room = cache.mel_length[other] - frames
        assert (start >= 0).all() and (start <= np.maximum(room, 0)).all()
        for row, (o, s) in enumerate(zip(other, start)):
            assert (b['reference'][row, :, 0].numpy() == o + 1).all()
            assert np.array_equal(b['reference'][row, :, 1], s + np.arange(frames) % cache.mel_length[o])

def test_crops_begin_anywhere_in_the_clip():
    plan = BatchPlan(fake_cache([5] * 8), data(reference_frames=3))
    room = plan.cache.mel_length - 3
    seen = {(int(o), int(s)) for _, _, other, start, _ in picks(plan, 400) for o, s in zip(other, start)}
    assert seen == {(o, s) for o in range(8) for s in range(room[o] + 1)}

def test_a_reference_may_come_from_the_clip_itself():
    plan = BatchPlan(fake_cache(CORPORA['random']), data(reference_from='clip'))
    assert all((clip == other).all() for _, clip, other, _, _ in picks(plan, 20))

def test_excluded_clips_are_never_heard_nor_referred_to():
    speakers = ['a', 'b'] * 18 + ['c']
    used = np.array([i for i in range(37) if i % 5])
    plan = BatchPlan(fake_cache(CORPORA['random'], speakers), data(), used)
    assert heard(epoch(plan)) == Counter(int(i) for i in used)
    others = {int(o) for _, clip, other, _, _ in picks(plan, 30 * plan.steps_per_epoch)
              for o in (*clip, *other)}
    assert others == {int(i) for i in used}

def test_a_speaker_left_with_one_clip_refers_to_itself():
    plan = BatchPlan(fake_cache([5] * 4, ['a', 'a', 'b', 'b']), data(batch_size=2), np.array([0, 2, 3]))
    for _, clip, other, _, _ in picks(plan, 12):
        assert all((o == 0) if c == 0 else (o == 5 - c) for c, o in zip(clip, other))

@pytest.mark.parametrize('clips', [[], np.array([], np.int64)])
def test_nothing_left_to_train_on_is_named(clips):
    with pytest.raises(UserError, match='fake: no clips are left to train on; hold fewer out'):
        BatchPlan(fake_cache([5, 6]), data(), clips)

def test_validation_hears_a_clip_with_the_same_reference_every_time():
    plans = (BatchPlan(fake_cache(CORPORA['random']), data(), fixed=fixed) for fixed in (True, False))
    heard = [{row for p in picks(plan, 90) for row in zip(*map(tuple, p[1:4]))} for plan in plans]
    assert len(heard[0]) == 37 < len(heard[1])

def test_a_seed_gives_the_same_order_in_every_release():
    "A run that is resumed by another version hears the clips that it would have heard."
    cache = fake_cache([3, 1, 4, 1, 5, 9, 2, 6, 5], ['a', 'b', 'a'] * 3)
    for (how, fixed), order in ORDERS.items():
        plan = BatchPlan(cache, data(seed=7, reference_frames=3, **dict.fromkeys(how, True)), fixed=fixed)
        assert [[x.tolist() for x in p[:4]] for p in picks(plan, 3)] == order, how

ORDERS = {   # (balanced columns, fixed references): bucket, clips, references and crops of three steps
    ((), False): [[1, [2, 0, 1, 5], [6, 3, 4, 8], [4, 0, 1, 0]],
                  [0, [3, 3, 3, 3], [2, 8, 0, 0], [8, 0, 2, 6]],
                  [0, [6, 7, 4, 8], [8, 4, 1, 0], [4, 3, 4, 2]]],
    ((), True): [[1, [2, 0, 1, 5], [6, 5, 7, 6], [6, 7, 4, 6]], [0, [3, 3, 3, 3], [0, 0, 0, 0], [2, 2, 2, 2]],
                 [0, [6, 7, 4, 8], [5, 1, 7, 5], [0, 0, 2, 6]]],
    (('balance_speakers',), False): [
        [0, [7, 7, 7, 4], [4, 1, 4, 7], [3, 1, 1, 1]], [0, [7, 7, 7, 8], [1, 4, 1, 0], [5, 0, 1, 6]],
        [0, [6, 4, 7, 6], [8, 7, 1, 0], [4, 3, 4, 2]]]}

@pytest.mark.parametrize('place, bucket, begin',
                         [(0, 0, 0), (2, 0, 0), (3, 1, 3), (4, 1, 3), (5, 1, 3), (99, 1, 3)])
def test_a_place_lies_in_a_bucket_even_if_rounding_puts_it_behind_all(place, bucket, begin):
    assert [int(x) for x in module._bucket(np.array([3, 5]), tf.constant(place, tf.int64))] == [bucket, begin]


# --- balance --------------------------------------------------------------------------------------

def drawn(plan, steps=600): return Counter(int(c) for _, clip, *_ in picks(plan, steps) for c in clip)

def test_speakers_and_languages_are_balanced_where_asked():
    "One clip of a, 36 of b; b speaks two languages' worth of clips."
    speakers, languages = ['a'] + ['b'] * 36, ['de'] * 5 + ['en'] * 32
    share = lambda count, which: sum(n for c, n in count.items() if which[c]) / sum(count.values())
    cache = fake_cache(CORPORA['random'], speakers, languages=languages)
    first, german = [s == 'a' for s in speakers], [x == 'de' for x in languages]
    plain, voices, tongues = (drawn(BatchPlan(cache, data(**how))) for how in
                              ({}, {'balance_speakers': True}, {'balance_languages': True}))
    assert share(plain, first) < 0.06 and 0.45 < share(voices, first) < 0.55
    assert share(plain, german) < 0.2 and 0.45 < share(tongues, german) < 0.55
    both = drawn(BatchPlan(cache, data(balance_speakers=True, balance_languages=True)))
    assert 0.45 < share(both, german) < 0.55 and share(both, first) > 0.3
    assert set(voices) == set(range(37))   # nobody is left out

def test_where_the_chances_of_a_bucket_end():
    cache = fake_cache([1, 1, 1, 9], ['a', 'b', 'b', 'b'])
    cache.text_length[:] = 1
    plan = BatchPlan(cache, data(batch_size=1, buckets=2, balance_speakers=True))
    assert np.allclose(plan.share_ends, [5 / 6, 1])

def test_balanced_batches_have_full_rows_of_one_shape():
    plan = BatchPlan(fake_cache(CORPORA['random'], ['a'] + ['b'] * 36), data(balance_speakers=True))
    for b in epoch(plan, count=4):
        assert (b['weight'] == 1).all() and (b['codes'].shape[1], b['text'].shape[1]) in plan.shapes
        assert all(b['codes'][row, :n].all() for row, n in enumerate(b['code_length']))


# --- one shape, files instead of memory, columns that are kept ------------------------------------

def test_a_fixed_length_is_that_of_the_settings(prepared, small):
    plan = BatchPlan(prepared, small.data.model_copy(update={'pad_to_fixed_length': True}))
    shape = fixed_shape(prepared.config.model, plan.data)
    assert shape == (48, 40) and plan.shapes == [shape]   # 11.6 s would be 250 codes, but the model takes 48
    assert {(b['codes'].shape[1], b['text'].shape[1]) for b in epoch(plan)} == {shape}
    large = XTTSConfig().model
    most = large.gpt.max_audio_codes, large.gpt.max_text_tokens
    for seconds, tokens, right in ((11.6, 400, (250, 400)), (1., 20, (22, 20)), (1e4, 10**5, most)):
        assert fixed_shape(large, DataConfig(max_seconds=seconds, max_text_tokens=tokens)) == right

def most_tokens(cache): return int(cache.text_length.max()) - 1

LIMITS = {'min_seconds': (lambda cache: 0.9, lambda seconds, tokens, limit: seconds < limit),
          'max_seconds': (lambda cache: 0.9, lambda seconds, tokens, limit: seconds > limit),
          'max_text_tokens': (most_tokens, lambda seconds, tokens, limit: tokens > limit)}

@pytest.mark.parametrize('fixed', [False, True])
@pytest.mark.parametrize('key', LIMITS)
def test_limits_leave_clips_of_a_finished_cache_out(prepared, small, key, fixed):
    limit, outside = LIMITS[key][0](prepared), LIMITS[key][1]
    changed = small.data.model_copy(update={key: limit, 'pad_to_fixed_length': fixed})
    lengths = [(clip['seconds'], tokens) for clip, tokens in zip(prepared.clips, prepared.text_length)]
    inside = [i for i, (seconds, tokens) in enumerate(lengths) if not outside(seconds, tokens, limit)]
    plan, out = BatchPlan(prepared, changed), len(prepared) - len(inside)
    assert 0 < out < len(prepared) and sorted(heard(epoch(plan))) == inside
    line = left_out_line(prepared, changed)
    assert f'{prepared.folder}: {out} of 14 clips are left out: {out} ' in line
    assert f'data.{key} {limit}' in line
    assert left_out_line(prepared, small.data) == ''
    with pytest.raises(UserError, match='14 of 14 clips are left out.*widen these limits'):
        BatchPlan(prepared, small.data.model_copy(update={'min_seconds': 5.}))

def test_a_kept_plan_is_made_again_for_other_limits(prepared, small, tmp_path):
    sizes = [BatchPlan(prepared, small.data.model_copy(update=update), keep=tmp_path / 'plan').count.sum()
             for update in ({}, {'min_seconds': 0.9}, {'max_seconds': 0.9},
                            {'max_text_tokens': most_tokens(prepared)}, {})]
    assert sizes[0] == sizes[4] == 14 > max(sizes[1:4])

def test_kept_columns_are_used_until_something_else_is_asked(tmp_path, monkeypatch):
    import xtts_nb.data.native
    made, real = [], xtts_nb.data.native.order_columns
    monkeypatch.setattr(xtts_nb.data.native, 'order_columns', lambda *a: made.append(1) or real(*a))
    cache = fake_cache(CORPORA['random'], ['a', 'b'] * 18 + ['c'])
    plan = lambda clips=None, **how: BatchPlan(cache, data(**how), clips, keep=tmp_path / 'plan')
    fresh = epoch(BatchPlan(cache, data()))
    for _ in range(2):
        kept = epoch(plan())
        assert all(np.array_equal(a[k], b[k]) for a, b in zip(fresh, kept, strict=True) for k in a)
    assert len(made) == 2   # once without keeping, once kept
    plan(batch_size=2, seed=7)
    assert len(made) == 2
    for n, other in enumerate([dict(buckets=2), dict(balance_speakers=True), dict(clips=np.arange(9))], 3):
        plan(**other)
        plan(**other)
        assert len(made) == n
    assert sorted(p.name for p in tmp_path.iterdir()) == ['plan']

def lengths_only(folder, clips):
    "What a plan needs of a cache, mapped from files."
    columns = dict(zip(('codes_length', 'text_length'), speech_lengths(clips)),
                   speaker=np.arange(clips) % 1000)
    columns |= {'mel_length': columns['codes_length'] * 4, 'samples': columns['codes_length'] * 1024}
    for name, array in columns.items(): array.astype(np.int32).tofile(folder / name)
    arrays = {name: np.memmap(folder / name, np.int32, 'r') for name in columns}
    return type('Lengths', (), {'__len__': lambda self: clips, 'manifest': {'key': 'x'}, 'folder': folder,
                                'config': XTTSConfig(),
                                **arrays})()

def own_memory() -> int:
    "Bytes of this process that are not pages of files."
    return next(int(line.split()[1]) * 1024
                for line in open('/proc/self/status') if line.startswith('RssAnon'))

@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='memory is told apart on Linux only')
@pytest.mark.parametrize('clips', [3_000_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
def test_resuming_reads_nothing_of_a_large_plan(tmp_path, monkeypatch, clips):
    "The columns stay in their files: reopened, also in a dataset, they take no memory; the order is equal."
    import xtts_nb.data.native
    cache, step = lengths_only(tmp_path, clips), 1_000_000
    before = BatchPlan(cache, data(), keep=tmp_path / 'plan').pick(tf.constant(step, tf.int64))
    monkeypatch.setattr(xtts_nb.data.native, 'order_columns', lambda *a: pytest.fail('made again'))
    start = own_memory()
    again = BatchPlan(cache, data(), keep=tmp_path / 'plan')
    after = next(iter(tf.data.Dataset.range(step, step + 1).map(again.pick)))
    assert own_memory() - start < 4 * clips   # less than one column
    assert all(np.array_equal(a, b) for a, b in zip(before, after))


# --- ahead of the step ----------------------------------------------------------------------------

def stages(dataset): return [name for d in dataset._inputs() for name in stages(d)] + [type(dataset).__name__]

@pytest.mark.cpu
def test_the_device_comes_last_and_the_batches_are_the_same():
    plan = BatchPlan(fake_cache(CORPORA['random']), data())
    with_device = cached_batches(plan, 0, 6, device='/CPU:0')
    assert stages(with_device)[-3:] == ['_PrefetchDataset', '_CopyToDeviceDataset', '_PrefetchDataset']
    assert stages(cached_batches(plan, 0, 6))[-2:] == ['_ParallelMapDataset', '_PrefetchDataset']
    for a, b in zip(with_device, cached_batches(plan, 0, 6), strict=True):
        assert all(np.array_equal(a[k], b[k]) for k in a)

@pytest.mark.parametrize('on, gpus, device, asked', [
    (True, ['gpu'], None, '/GPU:0'), (True, [], None, None), (False, ['gpu'], None, None),
    (True, ['gpu'], '/GPU:1', '/GPU:1')])
def test_prefetch_to_gpu_asks_for_the_gpu_there_is(monkeypatch, on, gpus, device, asked):
    seen = []
    monkeypatch.setattr(tf.config, 'list_logical_devices', lambda kind: gpus)
    apply = lambda device, n: seen.append((device, n)) or (lambda ds: ds)
    monkeypatch.setattr(tf.data.experimental, 'prefetch_to_device', apply)
    cached_batches(BatchPlan(fake_cache([5]), data(prefetch_to_gpu=on)), device=device)
    assert seen == ([(asked, 2)] if asked else [])   # one in use, one on its way

@pytest.mark.parametrize('on, model, asked', [
    (True, 'GPU:1', 'GPU:1'), (True, '/device:GPU:1', '/device:GPU:1'), (True, 'CPU:0', None),
    (False, 'GPU:1', None), (True, None, '/GPU:0')])
def test_batches_go_to_the_gpu_of_the_model(monkeypatch, on, model, asked):
    "A trainer names its device; copied to the first GPU, each batch would have to move again."
    seen = []
    monkeypatch.setattr(tf.config, 'list_logical_devices', lambda kind: ['gpu', 'gpu'])
    apply = lambda device, n: seen.append(device) or (lambda ds: ds)
    monkeypatch.setattr(tf.data.experimental, 'prefetch_to_device', apply)
    BatchPlan(fake_cache([5]), data(prefetch_to_gpu=on)).stream(0, 2, model=model)
    assert seen == [asked] * bool(asked)


# --- online ---------------------------------------------------------------------------------------

@pytest.mark.parametrize('start, count', [(0, 6), (1, 2), (3, 3)])
def test_the_frames_of_a_clip_have_mirrored_ends(start, count):
    "Ten samples have six frames of four, one every two; the first and the last reach beyond the clip."
    mirrored = np.pad(np.arange(10), 2, 'reflect')
    found = module._frames_of(tf.range(10), 4, 2, start, count).numpy()
    assert found.tolist() == mirrored[2 * start:2 * (start + count) + 2].tolist()
    assert len(found) == 2 * count + 2

@pytest.mark.parametrize('source', ['speaker', 'clip'])
def test_samples_become_the_mels_of_the_cache_on_any_device(prepared, small, stats, source):
    "The whole batch at once, as a device would compute it."
    # longer than some clips
    data_ = small.data.model_copy(update={'reference_from': source, 'reference_frames': 80})
    plan = BatchPlan(prepared, data_)
    audio = prepared.config.model.audio
    kinds = WavReader(plan, stats), MelReader(plan, stats), CacheReader(prepared, plan)
    for wav, native, cached in zip(*(batches_of(kind, data_, 0, 4) for kind in kinds)):
        mel = mels_of(wav['wav'], audio.dvae_n_fft, audio).numpy()
        voice = mels_of(wav['reference_wav'], audio.reference_n_fft, audio).numpy() / stats
        for row, (n, m) in enumerate(zip(wav['mel_length'].numpy(), wav['reference_length'].numpy())):
            assert np.allclose(mel[row, :n], native['mel'][row, :n], atol=1e-4)
            assert not native['mel'][row, n:].numpy().any()
            assert np.allclose(voice[row, np.arange(80) % m], cached['reference'][row], atol=6e-3)
        assert wav['wav'].dtype == tf.int16 and wav['wav'].shape[1] == (mel.shape[1] - 1) * 256 + 1024
        assert native['mel'].shape[1] == mel.shape[1]

@pytest.mark.parametrize('kind', [PythonReader, MelReader])
def test_online_shapes_follow_the_buckets(prepared, stats, small, kind):
    plan = BatchPlan(prepared, small.data)
    source = batches_of(kind(plan, stats), plan.data, 0, plan.steps_per_epoch)
    assert source.element_spec['reference'].shape[1:] == (32, 80)
    assert {(b['mel'].shape[1], b['text'].shape[1])
            for b in source} == set(zip(plan.frames.numpy(), (t for _, t in plan.shapes)))

# 11520 and others: rounded seconds fall short of a frame
@pytest.mark.parametrize('samples', [11520, 22050, *(
    pytest.param(n, marks=pytest.mark.slow) for n in (11521, 14080, 16640))])
def test_the_longest_clip_fits_whatever_its_length(tmp_path, small, tokenizer, samples, stats):
    for name, n in (('a', samples), ('b', 11100)):
        save_audio(tmp_path / 'corpus/wavs' / f'{name}.wav', synthetic_voice(1.)[:n])
    (tmp_path / 'corpus/metadata.csv').write_text('a|aa|aa\nb|bb|bb\n')
    prepare(tmp_path / 'corpus', tmp_path / 'cache', small, Fake(), tokenizer)
    cache = Cache(tmp_path / 'cache')
    plan = BatchPlan(cache, small.data.model_copy(update={'buckets': 1, 'batch_size': 2}))
    for kind in (PythonReader, MelReader):
        batch = next(iter(batches_of(kind(plan, stats), plan.data)))
        assert batch['mel'].shape == (2, 1 + samples // 256, 80), kind

def test_a_missing_recording_is_named(prepared, stats, small):
    plan = BatchPlan(prepared, small.data)
    plan.cache = Cache(prepared.folder)
    plan.cache.wav_path = lambda i: f'gone-{i}.wav'
    with pytest.raises(UserError, match='gone-0.wav: is missing; prepare the cache again'):
        WavReader(plan, stats)

def test_native_reading_takes_the_rate_of_the_model(tmp_path):
    save_audio(tmp_path / 'a.wav', SAMPLES / 32768, 24000)
    assert np.array_equal(decode_wav(str(tmp_path / 'a.wav'), 24000), SAMPLES)
    with pytest.raises(UserError, match='24000 Hz, 16 bits, .* 1 channel, 22050 Hz'):
        decode_wav(str(tmp_path / 'a.wav'))

def test_a_batch_has_what_the_losses_read(batch):
    assert set(batch) == {'clip', 'weight', 'reference', 'codes', 'text', 'code_length', 'text_length'}

def test_a_runtime_cache_gives_the_batches_of_a_prepared_one(tmp_path, small):
    how = lambda mode: small.replace(data={'preprocessing_mode': mode})
    modes = {mode: lesson_cache(tmp_path / mode, how(mode), clips=3) for mode in ('precompute', 'runtime')}
    stored = BatchPlan(modes['precompute'], small.data)
    computed = BatchPlan(modes['runtime'], small.data, dvae=Loudness())
    for a, b in zip(*(cached_batches(plan, 0, 3) for plan in (stored, computed)), strict=True):
        assert a.keys() == b.keys()
        assert all(np.allclose(a[k], b[k], atol=6e-3) and a[k].dtype == b[k].dtype for k in a)
    with pytest.raises(UserError, match='holds no codes, it was prepared for runtime; give its plan a DVAE'):
        cached_batches(BatchPlan(modes['runtime'], small.data))
