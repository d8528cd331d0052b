"Batches: least padding, each clip once, the same for any workers and after resuming, static shapes."
import copy
import io
import itertools
import os
import struct
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import tensorflow as tf

from xtts_nb.data.audio import load_audio, save_audio, synthetic_voice
from xtts_nb.data.cache import Cache
from xtts_nb.config import DataConfig, UserError, XTTSConfig
from xtts_nb.data import native as module
from xtts_nb.data.native import (
    BatchPlan, CacheReader, Column, GraphArrays, InFiles, InMemory, MelReader, PythonReader, WavReader,
    batches_of, bucket_of, bucket_shapes, cached_batches, check_equal, check_native, clip_limits,
    comparison_plan, cumulative_chances, decode_wav, differing_share, fits_in_memory, fixed_shape,
    left_out_line, mels_of, order_columns, map_whole_file, readers, refuse_differences)
from xtts_nb.data.prepare import prepare


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
    shapes = bucket_shapes(codes, text, buckets)
    assert len(shapes) <= buckets and shapes[-1] == (codes.max(), text.max())
    assert all(a[0] <= b[0] and a[1] <= b[1] and a != b for a, b in zip(shapes, shapes[1:]))
    assert set(bucket_of(codes, text, shapes).tolist()) == set(range(len(shapes)))   # no empty bucket
    assert positions(codes, text, shapes) == fewest_positions(codes, text, buckets)

@pytest.mark.parametrize('seed', range(20))
def test_shapes_equal_brute_force(seed):
    rng = np.random.default_rng(seed)
    n, buckets = rng.integers(1, 12), int(rng.integers(1, 4))
    codes, text = rng.integers(1, 9, n), rng.integers(1, 6, n)
    assert positions(codes, text, bucket_shapes(codes, text, buckets)) == fewest_positions(codes, text,
                                                                                           buckets)

def speech_lengths(clips, seed=0):
    "Like those of LJSpeech: 1.1 to 10.1 s, 6.6 s on average, 8.7 text tokens a second."
    rng = np.random.default_rng(seed)
    seconds = 1.11 + 8.99 * rng.beta(1.86, 1.2, clips)
    text = 8.7 * seconds + 6 * np.clip(seconds / 6, 0.4, 1.2) * rng.normal(size=clips)
    return np.ceil(seconds * 22050 / 1024).astype(np.int32), np.maximum(text, 4).round().astype(np.int32)

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

@pytest.mark.parametrize('buckets', [1, 3, 50])
@pytest.mark.parametrize('batch_size', [1, 4, 64])
@pytest.mark.parametrize('lengths', CORPORA.values(), ids=CORPORA)
def test_each_clip_once_an_epoch_and_one_shape_a_bucket(lengths, batch_size, buckets):
    plan = BatchPlan(fake_cache(lengths), data(batch_size=batch_size, buckets=buckets, seed=batch_size))
    both = epoch(plan, count=2)
    for batches in (both[:plan.steps_per_epoch], both[plan.steps_per_epoch:]):
        assert heard(batches) == Counter(range(len(lengths)))
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
    found = {name: column.tolist() for name, column in order_columns(cache, data()).items()}
    assert found == {'shapes': [[2, 2], [4, 4], [9, 9]], 'frames': [31, 40, 7], 'members': [1, 3, 5, 2, 4, 0],
                     'member_count': [3, 2, 1], 'speaker': [1, 0, 0, 1, 2, 0],
                     'by_speaker': [1, 2, 5, 0, 3, 4], 'speaker_count': [3, 2, 1], 'share': []}
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
    ((), False): [[2, [5, 7, 7, 7], [6, 1, 4, 4], [4, 1, 1, 1]],
                  [1, [2, 0, 1, 1], [8, 3, 7, 7], [4, 0, 1, 4]],
                  [0, [6, 8, 4, 3], [8, 5, 1, 0], [4, 5, 4, 2]]],
    ((), True): [[2, [5, 7, 7, 7], [6, 1, 1, 1], [6, 0, 0, 0]], [1, [2, 0, 1, 1], [6, 5, 7, 7], [6, 7, 4, 4]],
                 [0, [6, 8, 4, 3], [5, 5, 7, 0], [0, 6, 2, 2]]],
    (('balance_speakers',), False): [
        [0, [6, 6, 6, 4], [8, 3, 3, 7], [2, 0, 1, 1]], [1, [2, 1, 1, 2], [8, 4, 7, 0], [4, 0, 1, 6]],
        [1, [1, 1, 2, 1], [4, 4, 8, 7], [4, 3, 3, 1]]]}

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

BALANCE = {(): [1 / 16, 1 / 16, 1 / 8, 3 / 4], ('speakers',): [1 / 6, 1 / 6, 1 / 3, 1 / 3],
           ('languages',): [1 / 8, 1 / 8, 1 / 4, 1 / 2],
           ('languages', 'speakers'): [1 / 8, 1 / 8, 1 / 4, 1 / 2]}

@pytest.mark.parametrize('what', BALANCE)
def test_chances_in_balance(what):
    "Four clips, three speakers, two languages; the last speaker speaks the second."
    weight, speaker, language = np.array([1., 1., 2., 12.]), np.array([0, 0, 1, 2]), np.array([0, 0, 0, 1])
    settings = DataConfig(**{f'balance_{name}': True for name in what})
    assert np.allclose(cumulative_chances(weight, speaker, language, settings), np.cumsum(BALANCE[what]))

def test_where_the_chances_of_a_bucket_end():
    cache = fake_cache([1, 1, 1, 9], ['a', 'b', 'b', 'b'])
    cache.text_length[:] = 1
    assert np.allclose(BatchPlan(cache, data(buckets=2, balance_speakers=True)).share_ends, [5 / 6, 1])

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

def test_limits_to_the_sample_and_the_token():
    cache = fake_cache([5] * 6)
    cache.samples, cache.text_length[:] = np.array([22049, 22050, 44101, 44102, 44100, 1]), [1, 8, 8, 8, 9, 9]
    limits = data(min_seconds=1., max_seconds=2.00001, max_text_tokens=8)   # 44100.2 samples
    assert [np.flatnonzero(out).tolist() for out in clip_limits(cache, limits).values()] == [[0, 5], [3],
                                                                                             [4, 5]]
    assert left_out_line(cache, limits) == (
        'fake: 4 of 6 clips are left out: 2 shorter than data.min_seconds 1.0, '
        '1 longer than data.max_seconds 2.00001, 2 of more text tokens than data.max_text_tokens 8.')

@pytest.mark.parametrize('spare, inside', [(0, True), (1, True), (-1, False)])
def test_a_cache_that_fills_the_budget_to_the_byte_is_held_in_memory(spare, inside):
    mib = 2**20
    one = np.broadcast_to(np.zeros(1, np.uint16), (mib, 2))
    cache = SimpleNamespace(codes=one, text=one, mel=one)
    budget = DataConfig().model_copy(update={'ram_budget': (12 * mib + spare) / 2**30})
    assert fits_in_memory(cache, budget) == inside and fits_in_memory(cache, budget, ('text',))

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

@pytest.mark.parametrize('first', [0, 3])
def test_batches_from_files_are_those_from_memory(prepared, small, first):
    memory, files = (BatchPlan(prepared, small.data.model_copy(update={'ram_budget': gib}))
                     for gib in (1., 0.))
    assert isinstance(CacheReader(prepared, memory).rows, InMemory)
    assert isinstance(CacheReader(prepared, files).rows, InFiles)
    for a, b in zip(*(cached_batches(plan, first, first + 12) for plan in (memory, files)), strict=True):
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)

@pytest.mark.parametrize('dtype', [np.int32, np.int64, np.float16])
def test_a_mapped_array_is_found_again_in_its_file(tmp_path, dtype):
    np.arange(5000, dtype=dtype).tofile(tmp_path / 'numbers')
    whole = np.memmap(tmp_path / 'numbers', dtype, 'r')
    behind = np.memmap(tmp_path / 'numbers', dtype, 'r', offset=64 * whole.itemsize)
    for array in (whole, whole[64:100], np.asarray(whole)[64:100], whole.view(np.uint8).view(dtype)[7:],
                  behind, behind[5:]):
        assert np.array_equal(Column(array)(tf.constant([0, 30], tf.int64)), array[[0, 30]])
        flat, first = map_whole_file(array)
        assert np.array_equal(flat[first:], array)
        seen = GraphArrays([flat])()
        flat[first] = 9   # a private write shows that it is the same memory
        assert seen[first] == 9 and whole[64] == 64
    odd = np.memmap(tmp_path / 'numbers', np.uint8, 'r')[3:3 + 40 * whole.itemsize].view(dtype)
    flat, first = map_whole_file(odd)
    assert first == 0
    assert not isinstance(flat, np.memmap)
    assert np.array_equal(flat.view(np.uint8), odd.view(np.uint8))
    for other in (whole[1:],
                  np.array(whole)[:64]):   # at an address that TensorFlow does not take; not over a file
        held = GraphArrays([other])
        if not isinstance(other, np.memmap): other[:] = 0
        assert held()[1] == whole[2 if isinstance(other, np.memmap) else 1]
    assert map_whole_file(np.arange(4))[1] == 0 and GraphArrays([np.zeros(0)])().shape == 0

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


# --- online ---------------------------------------------------------------------------------------

ONLINE = {'clip', 'weight', 'text', 'text_length', 'mel_length', 'mel', 'reference'}

def test_all_pipelines_deliver_the_same(prepared, dvae, small, stats):
    "Everything that they deliver, the codes of the cache among it."
    plan = BatchPlan(prepared, small.data)
    differ = check_equal(plan, stats, dvae.encode, batches=plan.steps_per_epoch + 1)
    assert {arm: set(parts) for arm, parts in differ.items()} == {
        'numpy_function': ONLINE, 'native_wav': ONLINE, 'native': ONLINE,
        'cache': ONLINE - {'mel', 'mel_length'} | {'codes', 'code_length'}}
    assert max(share for parts in differ.values() for share in parts.values()) < 1e-3

@pytest.mark.parametrize('arm, part, shown, change', [
    ('cache', 'codes', 'codes', lambda x: tf.concat([x[:, :1] + 1, x[:, 1:]], 1)),
    ('cache', 'code_length', 'code_length', lambda x: x - 1),
    ('cache', 'reference', 'reference', lambda x: x * 1.1),
    ('native', 'text', 'text', lambda x: x[:, ::-1]),
    ('numpy_function', 'mel', 'mel', lambda x: x[:, 1:]),
    ('native', 'mel', 'mel', lambda x: x + 7e-3),
    ('native_wav', 'wav', 'mel', lambda x: tf.roll(x, 99, 1)),
    ('native_wav', 'reference_wav', 'reference', lambda x: x // 2),
    ('native_wav', 'weight', 'weight', lambda x: x * 0)])
def test_a_difference_is_noticed_whatever_differs(prepared, dvae, small, stats, arm, part, shown, change):
    plan = BatchPlan(prepared, small.data)
    reader = readers(plan, stats)[arm]
    wrong = lambda step: (batch := reader(step)) | {part: change(batch[part])}
    found = f'different batches, .*: {arm} {shown} .*leave that loader out'
    with pytest.raises(UserError, match=found): check_equal(plan, stats, dvae.encode, {arm: wrong}, batches=1)

def test_a_difference_in_one_of_several_batches_is_noticed(prepared, dvae, small, stats):
    plan = BatchPlan(prepared, small.data)
    reader = CacheReader(prepared, plan)
    heavier = lambda step, weight: weight + tf.cast(step == 0, tf.float32)
    wrong = lambda step: (batch := reader(step)) | {'weight': heavier(step, batch['weight'])}
    with pytest.raises(UserError, match='cache weight 100.00%'):
        check_equal(plan, stats, dvae.encode, {'cache': wrong})

@pytest.mark.parametrize('x, y, tolerance, share', [
    ([1, 2], [1, 2], 0., 0.), ([1, 2, 3, 4], [1, 2, 3, 5], 0., 0.25), ([1], [1, 1], 0., 1.),
    ([1., 0.], [1.5, 1.], 0.5, 0.5), ([1.5, 1.], [1., 0.], 0.5, 0.5)], ids=str)
def test_the_share_of_cells_that_differ(x, y, tolerance, share):
    assert differing_share(x, y, tolerance) == share

def test_mels_and_codes_may_differ_in_one_cell_of_a_thousand():
    near = dict.fromkeys(('mel', 'reference', 'codes'), 1e-3)
    refuse_differences({'a': near | {'text': 0.}})
    for part, share in (*dict.fromkeys(near, 0.0011).items(), ('text', 1e-4)):
        with pytest.raises(UserError, match=f'compared: b {part} {share:.2%} of the cells differ'):
            refuse_differences({'a': near, 'b': near | {part: share}})

def test_a_comparison_takes_one_shape_and_lays_one_batch_by(prepared):
    plan = comparison_plan(prepared)
    assert len(plan.shapes) == 1 == plan.data.prefetch_buffer_size

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
@pytest.mark.parametrize('samples', [11520, 11521, 14080, 16640, 22050])
@pytest.mark.parametrize('kind', [PythonReader, MelReader])
def test_the_longest_clip_fits_whatever_its_length(tmp_path, small, dvae, samples, kind, stats):
    for name, n in (('a', samples), ('b', 11100)):
        save_audio(tmp_path / 'corpus/wavs' / f'{name}.wav', synthetic_voice(1.)[:n])
    (tmp_path / 'corpus/metadata.csv').write_text('a|aa|aa\nb|bb|bb\n')
    prepare(tmp_path / 'corpus', tmp_path / 'cache', small, dvae)
    cache = Cache(tmp_path / 'cache')
    plan = BatchPlan(cache, small.data.model_copy(update={'buckets': 1, 'batch_size': 2}))
    batch = next(iter(batches_of(kind(plan, stats), plan.data)))
    assert batch['mel'].shape == (2, 1 + samples // 256, 80)

def test_a_missing_recording_is_named(prepared, stats, small):
    plan = BatchPlan(prepared, small.data)
    plan.cache = copy.copy(prepared)
    plan.cache.wav_path = lambda i: f'gone-{i}.wav'
    with pytest.raises(UserError, match='gone-0.wav: is missing; prepare the cache again'):
        WavReader(plan, stats)

def test_a_mapped_cache_is_streamed_even_if_it_would_fit(prepared, small):
    mapped, memory = (BatchPlan(Cache(prepared.folder, in_memory), small.data) for in_memory in (False, True))
    assert isinstance(CacheReader(mapped.cache, mapped).rows, InFiles)
    for a, b in zip(*(cached_batches(plan, 0, 3) for plan in (mapped, memory)), strict=True):
        assert all(np.array_equal(a[k], b[k]) for k in a)

SAMPLES = np.random.default_rng(0).integers(-20000, 20000, 999, np.int16)

def chunk(name: bytes, body: bytes, size: int | None = None) -> bytes:
    "A chunk of a RIFF file with its padding; `size` is what it claims, if that is wrong."
    return name + struct.pack('<I', len(body) if size is None else size) + body + b'\0' * (len(body) % 2)

def fmt(form=1, channels=1, rate=22050, bits=16, more=b'') -> bytes:
    block = channels * bits // 8
    return chunk(b'fmt ', struct.pack('<HHIIHH', form, channels, rate, rate * block, block, bits) + more)

def riff(*chunks, mark=b'RIFF', kind=b'WAVE', size=None) -> bytes:
    return chunk(mark, kind + b''.join(chunks), size)

def extensible(form: int, bits: int) -> bytes:
    "Behind a `fmt ` of format 0xFFFE: valid bits, speaker positions, and the GUID that holds the format."
    return struct.pack('<HHIH', 22, bits, 4, form) + bytes.fromhex('000000001000800000aa00389b71')

def encoded(**how) -> bytes:
    "The samples as libsndfile writes them."
    file = io.BytesIO()
    soundfile.write(file, SAMPLES / 32768, **dict(samplerate=22050, format='WAV', subtype='PCM_16') | how)
    return file.getvalue()

BYTES = SAMPLES.tobytes()
DATA = chunk(b'data', BYTES)
LIST = chunk(b'LIST', b'noise!')
GOOD = {
    'plain': riff(fmt(), DATA),
    'long fmt': riff(fmt(more=b'\0\0'), DATA),
    'extensible': riff(fmt(0xFFFE, more=extensible(1, 16)), DATA),
    'WAVEX of libsndfile': encoded(format='WAVEX'),
    'chunk before': riff(fmt(), LIST, DATA),
    'odd chunk before': riff(fmt(), chunk(b'LIST', b'noise!!'), DATA),
    'odd chunk first': riff(chunk(b'JUNK', b'1234567'), fmt(), DATA),
    'data inside a chunk': riff(fmt(), chunk(b'JUNK', b'data\4\0\0\0noise!'), DATA),
    'chunk behind': riff(fmt(), DATA, LIST),
    'one sample': riff(fmt(), chunk(b'data', BYTES[:2])),
    'one sample behind a chunk': riff(fmt(), LIST, chunk(b'data', BYTES[:2])),
    'truncated': riff(fmt(), DATA)[:-500],
    'truncated in a sample': riff(fmt(), DATA)[:-501],
    'odd data': riff(fmt(), chunk(b'data', BYTES[:-1])),
    'endless': riff(fmt(), chunk(b'data', BYTES, 2**32 - 1), size=2**32 - 1),
    'data too long': riff(fmt(), chunk(b'data', BYTES, 9999)),
    'data too short': riff(fmt(), chunk(b'data', BYTES, 500)),
    'file too short': riff(fmt(), DATA, size=4)}
BAD = {   # name -> file, what its error says
    '8 bit': (encoded(subtype='PCM_U8'), 'wav of format 1, 1 channels, 22050 Hz, 8 bits'),
    '24 bit': (encoded(subtype='PCM_24'), 'wav of format 1, 1 channels, 22050 Hz, 24 bits'),
    '32 bit': (encoded(subtype='PCM_32'), 'wav of format 1, 1 channels, 22050 Hz, 32 bits'),
    'float': (encoded(subtype='FLOAT'), 'wav of format 3, .* 32 bits'),
    'double': (encoded(subtype='DOUBLE'), 'wav of format 3, .* 64 bits'),
    'extensible float': (riff(fmt(0xFFFE, bits=32, more=extensible(3, 32)), chunk(b'data', 2 * BYTES)),
                         'wav of format 3, 1 channels, 22050 Hz, 32 bits'),
    'mu-law': (encoded(subtype='ULAW'), 'wav of format 7'),
    'ADPCM': (encoded(subtype='MS_ADPCM'), 'wav of format 2'),
    'stereo': (riff(fmt(channels=2), chunk(b'data', 2 * BYTES)),
               'wav of format 1, 2 channels, 22050 Hz, 16 bits'),
    '44.1 kHz': (riff(fmt(rate=44100), DATA), 'wav of format 1, 1 channels, 44100 Hz, 16 bits'),
    'FLAC': (encoded(format='FLAC'), 'no wav file'),
    'AIFF': (encoded(format='AIFF'), 'no wav file'),
    'RF64': (encoded(format='RF64'), 'no wav file'),
    'RIFX': (riff(fmt(), DATA, mark=b'RIFX'), 'no wav file'),
    'AVI': (riff(fmt(), DATA, kind=b'AVI '), 'no wav file'),
    'text': (b'These are 45 bytes of text, and no wav file.\n', 'no wav file'),
    '4 bytes': (b'RIFF', 'broken head'),
    'empty': (b'', 'no wav file'),
    'no fmt': (riff(DATA), 'broken head'),
    'fmt behind': (riff(DATA, fmt()), 'broken head'),
    'no data': (riff(fmt()), 'with 0 bytes of samples'),
    'data never sized': (riff(fmt(), chunk(b'data', BYTES, 0)), 'with 0 bytes of samples'),
    'one byte': (riff(fmt(), chunk(b'data', b'a')), 'with 1 bytes of samples'),
    'one byte behind a chunk': (riff(fmt(), LIST, chunk(b'data', b'a')), 'with 1 bytes of samples'),
    'head only': (riff(fmt(), chunk(b'data', b'')), 'with 0 bytes of samples'),
    'endless chunk': (riff(fmt(), chunk(b'LIST', b'noise!', 2**32 - 16), DATA), 'with 0 bytes of samples')}

@pytest.fixture(scope='module')
def in_graph():
    "`decode_wav`, traced once."
    return tf.function(decode_wav, input_signature=[tf.TensorSpec([], tf.string)])

@pytest.mark.parametrize('name', GOOD)
def test_native_reading_gives_the_samples_that_libsndfile_gives(tmp_path, in_graph, name):
    (tmp_path / 'a.wav').write_bytes(GOOD[name])
    samples = load_audio(tmp_path / 'a.wav') * 32768
    assert np.array_equal(in_graph(str(tmp_path / 'a.wav')), samples)
    assert np.array_equal(samples, SAMPLES[:len(samples)])
    lengths = {'truncated': 749, 'truncated in a sample': 748, 'odd data': 998, 'data too short': 250,
               'one sample': 1,
               'one sample behind a chunk': 1}
    assert len(samples) == lengths.get(name, 999)
    check_native([str(tmp_path / 'a.wav')], 22050)
    assert not any('Py' in op.type for op in in_graph.get_concrete_function().graph.get_operations())

@pytest.mark.parametrize('name', BAD)
def test_native_reading_refuses_what_it_would_read_as_noise(tmp_path, in_graph, name):
    "Inside a graph, outside of one, and before the first batch."
    file, found = BAD[name]
    path = str(tmp_path / 'bäd.wav')
    words = f'd.wav: is .*{found}.*so convert it, or use a cache of xtts-nb prepare'
    (tmp_path / 'bäd.wav').write_bytes(file)
    with pytest.raises(tf.errors.InvalidArgumentError, match=words): in_graph(path)
    with pytest.raises(UserError, match=f'bä{words}'): decode_wav(path)
    with pytest.raises(UserError, match='bäd.wav: (is .*so use the cache|not readable as audio)'):
        check_native([path], 22050)

FOUND = {'plain': 999, 'chunk behind': 999, 'one sample': 1, 'file too short': 999, 'odd data': 998,
         'long fmt': 0,
         'truncated': 0, 'chunk before': 0}

@pytest.mark.parametrize('name', FOUND)
def test_only_an_unusual_head_is_searched(tmp_path, monkeypatch, name):
    monkeypatch.setattr(module, '_samples_by_head', lambda *a: tf.zeros([0], tf.int16))
    (tmp_path / 'a.wav').write_bytes(GOOD[name])
    assert len(decode_wav(str(tmp_path / 'a.wav'))) == FOUND[name]

def test_native_reading_takes_the_rate_of_the_model(tmp_path):
    save_audio(tmp_path / 'a.wav', SAMPLES / 32768, 24000)
    assert np.array_equal(decode_wav(str(tmp_path / 'a.wav'), 24000), SAMPLES)
    with pytest.raises(UserError, match='24000 Hz, 16 bits, .* 1 channel, 22050 Hz'):
        decode_wav(str(tmp_path / 'a.wav'))

def test_a_batch_has_what_the_losses_read(batch):
    assert set(batch) == {'clip', 'weight', 'reference', 'codes', 'text', 'code_length', 'text_length'}
