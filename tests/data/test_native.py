"Batches: least padding, each clip once, the same for any workers and after resuming, static shapes."
import itertools
import math
import os
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from cheap import read_eagerly
from fake_dvae import Fake
from xtts_nb.config import DataConfig, UserError, XTTSConfig
from xtts_nb.data import native as module
from xtts_nb.data.audio import save_audio, synthetic_voice
from xtts_nb.data.cache import Cache, left_out_line
from xtts_nb.data.native import (
    BatchPlan, CacheReader, MelReader, WavReader, batches_of, bucket_of, bucket_shapes,
    _fixed_shape, speech_lengths)
from xtts_nb.data.prepare import Loudness, lesson_cache, encode_corpus

# --- buckets ----------------------------------------------------------------------------------------

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

LENGTHS = [([7], [3]), ([7] * 3, [3] * 3), ([1, 2], [2, 1]), ([1, 1, 1, 9], [1, 5, 1, 1])]
LENGTHS += [(draw.integers(1, 9, n), draw.integers(1, 6, n))
            for draw in [np.random.default_rng(0)] for n in draw.integers(1, 12, 20)]

@pytest.mark.parametrize('case', range(len(LENGTHS)))
def test_shapes_are_the_chain_that_brute_force_finds(case):
    codes, text = map(np.array, LENGTHS[case])
    for buckets in (1, 2, 3):
        shapes = bucket_shapes(codes, text, buckets, least=1)
        assert len(shapes) <= buckets and shapes[-1] == (codes.max(), text.max())
        assert all(a[0] <= b[0] and a[1] <= b[1] and a != b for a, b in zip(shapes, shapes[1:]))
        assert set(bucket_of(codes, text, shapes).tolist()) == set(range(len(shapes)))   # no empty bucket
        assert positions(codes, text, shapes) == fewest_positions(codes, text, buckets)

@pytest.mark.parametrize('clips, batch_size', [(9, 8), (28, 32), (95, 16), (285, 32)])
def test_most_rows_are_clips(clips, batch_size):
    "Of a small corpus too: each bucket has a batch of clips, or clips are read again until one is full."
    codes, text = speech_lengths(clips)
    shapes = bucket_shapes(codes, text, 4, least=8)
    assert np.bincount(bucket_of(codes, text, shapes)).min() >= 8
    plan = BatchPlan(fake_cache(codes), data(batch_size=batch_size, buckets=4))
    weight = [float(plan.pick(tf.constant(step, tf.int64))[-1].numpy().mean())
              for step in range(plan.steps_per_epoch)]
    assert np.mean(weight) > .5 and clips <= sum(weight) * batch_size

# --- a cache without sound ----------------------------------------------------------------------------

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

def epoch(plan, count=1):
    "Its batches; to trace the graph is worth it for many only."
    steps = count * plan.steps_per_epoch
    read = read_eagerly if steps <= 16 else BatchPlan.stream
    return [{k: v.numpy() for k, v in b.items()} for b in read(plan, 0, steps)]

def same(a, b): return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)

def used(batches): return Counter(int(c) for b in batches for c, w in zip(b['clip'], b['weight']) if w)

CORPORA = {'one clip': [5], 'two equal': [5, 5], 'spread': [1, 2, 3, 5, 8, 13, 21, 34, 55],
           'random': list(np.random.default_rng(1).integers(1, 60, 37))}
SPEAKERS = ['a', 'b'] * 18 + ['c']

@pytest.mark.parametrize('corpus, buckets, batch_size', [
    ('one clip', 3, 4), ('two equal', 3, 1), ('spread', 50, 1), ('spread', 1, 64), ('random', 3, 4),
    ('random', 50, 64)])
def test_each_clip_once_an_epoch_and_one_shape_a_bucket(corpus, batch_size, buckets):
    lengths = CORPORA[corpus]
    plan = BatchPlan(fake_cache(lengths), data(batch_size=batch_size, buckets=buckets, seed=batch_size))
    both = epoch(plan, count=2)
    for batches in (both[:plan.steps_per_epoch], both[plan.steps_per_epoch:]):
        often = batch_size / len(lengths) if batch_size > len(lengths) else 1
        times = used(batches)
        assert set(times) == set(range(len(lengths)))
        assert set(times.values()) <= {int(often), math.ceil(often)}
        assert {(b['codes'].shape[1], b['text'].shape[1]) for b in batches} == set(plan.shapes)
        assert all(b['codes'].shape[0] == b['weight'].shape[0] == batch_size for b in batches)
        assert {b['reference'].shape for b in batches} == {(batch_size, 6, 2)}
    counted = epoch(BatchPlan(fake_cache(lengths), plan.data, fixed=True))   # a validation: each clip once
    assert used(counted) == Counter(range(len(lengths)))

def test_rows_hold_their_clip_and_zeros_after_it():
    cache = fake_cache(CORPORA['random'], ['a', 'b', 'c'] * 12 + ['d'])
    plan = BatchPlan(cache, data(batch_size=8, buckets=4))
    batches = epoch(plan)
    for b in batches:
        shape = b['codes'].shape[1], b['text'].shape[1]
        for row, clip in enumerate(b['clip']):
            for name, length in (('codes', 'code_length'), ('text', 'text_length')):
                n = b[length][row]
                assert n == getattr(cache, f'{name}_length')[clip]
                assert (b[name][row, :n] == clip + 1).all() and not b[name][row, n:].any()
            c, t = b['code_length'][row], b['text_length'][row]
            assert next(s for s in plan.shapes if c <= s[0] and t <= s[1]) == shape   # the first it fits
        assert b['codes'].dtype == b['text'].dtype == b['code_length'].dtype == np.int32
        assert np.array_equal(b['weight'], np.sort(b['weight'])[::-1]) and b['weight'][0] == 1
    assert {w for b in batches for w in b['weight']} == {0., 1.}   # only rows that fill a batch weigh nothing
    assert sum(b['weight'].sum() for b in batches) == 37

def test_epochs_and_seeds_differ_and_the_order_looks_shuffled():
    "Over many epochs a clip is first about as often as any other."
    orders = []
    for seed in (0, 1, 2**31 - 2):
        order = [p[1].tolist() for p in picks(BatchPlan(fake_cache([5] * 12), data(seed=seed)), 6)]
        orders += order[:3], order[3:]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    plan = BatchPlan(fake_cache([5] * 6), data(batch_size=1, buckets=1))
    first = Counter(int(p[1][0]) for p in picks(plan, 600)[::6])
    assert set(first) == set(range(6)) and min(first.values()) > 7

def test_workers_and_resuming_do_not_change_the_batches():
    plan = lambda **how: BatchPlan(fake_cache(CORPORA['random'], SPEAKERS), data(**how))
    straight = list(plan(num_workers=2, prefetch_buffer_size=4).stream(0, 35))
    other = list(plan(num_workers=4, prefetch_buffer_size=1).stream(0, 35))
    assert len(other) == 35 and all(map(same, straight, other))
    for first in (1, 30): assert all(map(same, straight[first:], plan().stream(first, 35)))

ORDERS = {   # (balanced columns, fixed references): bucket, clips, references and crops of three steps
    ((), False): [[1, [2, 0, 1, 5], [6, 3, 4, 8], [4, 0, 1, 0]],
                  [0, [3, 3, 3, 3], [2, 8, 0, 0], [8, 0, 2, 6]],
                  [0, [6, 7, 4, 8], [8, 4, 1, 0], [4, 3, 4, 2]]],
    ((), True): [[1, [2, 0, 1, 5], [6, 5, 7, 6], [6, 7, 4, 6]], [0, [3, 3, 3, 3], [0, 0, 0, 0], [2, 2, 2, 2]],
                 [0, [6, 7, 4, 8], [5, 1, 7, 5], [0, 0, 2, 6]]],
    (('balance_speakers',), False): [
        [0, [7, 7, 7, 4], [4, 1, 4, 7], [3, 1, 1, 1]], [0, [7, 7, 7, 8], [1, 4, 1, 0], [5, 0, 1, 6]],
        [0, [6, 4, 7, 6], [8, 7, 1, 0], [4, 3, 4, 2]]]}

def test_a_seed_gives_the_same_order_in_every_release():
    "A run that is resumed by another version reads the clips that it would have read."
    cache = fake_cache([3, 1, 4, 1, 5, 9, 2, 6, 5], ['a', 'b', 'a'] * 3)
    for (how, fixed), order in ORDERS.items():
        plan = BatchPlan(cache, data(seed=7, reference_frames=3, **dict.fromkeys(how, True)), fixed=fixed)
        assert [[x.tolist() for x in p[:4]] for p in picks(plan, 3)] == order, how

# --- references and balance ---------------------------------------------------------------------------

def picks(plan, steps):
    "What the first steps take; to trace the graph is worth it for many steps only."
    if steps > 40: return list(tf.data.Dataset.range(steps).map(plan.pick).as_numpy_iterator())
    return [[x.numpy() for x in plan.pick(tf.constant(step, tf.int64))] for step in range(steps)]

def test_the_reference_is_another_clip_of_the_same_speaker():
    speakers = ['a', 'b', 'c'] * 12 + ['alone']
    plan = BatchPlan(fake_cache(CORPORA['random'], speakers), data())
    pairs = Counter((int(c), int(o)) for _, clip, other, _, _ in picks(plan, 80 * plan.steps_per_epoch)
                    for c, o in zip(clip, other))
    assert all(speakers[c] == speakers[o] for c, o in pairs)
    assert all((c == o) == (speakers[c] == 'alone') for c, o in pairs) and (36, 36) in pairs
    assert {o for c, o in pairs if c == 0} == set(range(3, 36, 3))   # every other clip comes
    own = BatchPlan(plan.cache, data(reference_from='clip'))
    assert all((clip == other).all() for _, clip, other, _, _ in picks(own, 20))

@pytest.mark.parametrize('frames', [1, 5, 20])
def test_a_crop_is_part_of_its_clip_and_repeats_only_if_that_is_shorter(frames):
    cache = fake_cache(CORPORA['random'], SPEAKERS)
    cache.mel[:, 1] = np.concatenate([np.arange(n) for n in cache.mel_length])   # the frame's number
    plan = BatchPlan(cache, data(reference_frames=frames))
    read = CacheReader(cache, plan)
    for step, (_, _, other, start, _) in enumerate(picks(plan, 12)):
        b = read(tf.constant(step, tf.int64))
        room = np.maximum(cache.mel_length[other] - frames, 0)
        assert (start >= 0).all() and (start <= room).all()
        for row, (o, s) in enumerate(zip(other, start)):
            assert (b['reference'][row, :, 0].numpy() == o + 1).all()
            assert np.array_equal(b['reference'][row, :, 1], s + np.arange(frames) % cache.mel_length[o])
    if frames > 1: return
    few = BatchPlan(fake_cache([5] * 8), data(reference_frames=3))
    starts = {(int(o), int(s)) for _, _, other, start, _ in picks(few, 150) for o, s in zip(other, start)}
    assert starts == {(o, s) for o in range(8) for s in range(few.cache.mel_length[o] - 2)}

def test_excluded_clips_are_neither_read_nor_referred_to():
    some = np.array([i for i in range(37) if i % 5])
    plan = BatchPlan(fake_cache(CORPORA['random'], SPEAKERS), data(), some)
    assert used(epoch(plan)) == Counter(some.tolist())
    others = {int(o) for _, clip, other, _, _ in picks(plan, 30 * plan.steps_per_epoch)
              for o in (*clip, *other)}
    assert others == set(some.tolist())
    plan = BatchPlan(fake_cache([5] * 4, ['a', 'a', 'b', 'b']), data(batch_size=2), np.array([0, 2, 3]))
    for _, clip, other, _, _ in picks(plan, 12):   # a speaker that is left with one clip refers to itself
        assert all((o == 0) if c == 0 else (o == 5 - c) for c, o in zip(clip, other))

def test_an_index_has_a_bucket_even_if_rounding_puts_it_after_all():
    for index, right in ((0, [0, 0]), (2, [0, 0]), (3, [1, 3]), (4, [1, 3]), (99, [1, 3])):
        assert [int(x) for x in module._bucket(np.array([3, 5]), tf.constant(index, tf.int64))] == right

def test_speakers_and_languages_are_balanced_where_asked():
    "One clip of a, 36 of b; b speaks two languages' worth of clips."
    speakers, languages = ['a'] + ['b'] * 36, ['de'] * 5 + ['en'] * 32
    cache = fake_cache(CORPORA['random'], speakers, languages=languages)
    def drawn(**how):
        taken = picks(BatchPlan(cache, data(**how)), 300)
        assert not how or all((p[-1] == 1).all() for p in taken)   # no row only fills a batch
        return Counter(int(c) for p in taken for c in p[1])
    share = lambda count, which: sum(n for c, n in count.items() if which[c]) / sum(count.values())
    first, german = [s == 'a' for s in speakers], [x == 'de' for x in languages]
    plain, voices, tongues = drawn(), drawn(balance_speakers=True), drawn(balance_languages=True)
    assert share(plain, first) < 0.06 and 0.45 < share(voices, first) < 0.55
    assert share(plain, german) < 0.2 and 0.45 < share(tongues, german) < 0.55
    both = drawn(balance_speakers=True, balance_languages=True)
    assert 0.45 < share(both, german) < 0.55 and share(both, first) > 0.3
    assert set(voices) == set(range(37))   # nobody is left out
    few = fake_cache([1, 1, 1, 9], ['a', 'b', 'b', 'b'])
    few.text_length[:] = 1
    plan = BatchPlan(few, data(batch_size=1, buckets=2, balance_speakers=True))
    assert np.allclose(plan.share_ends, [5 / 6, 1])   # where the chances of a bucket end

# --- one shape, limits, columns that are kept ---------------------------------------------------------

def test_a_fixed_length_is_that_of_the_settings(prepared, small):
    plan = BatchPlan(prepared, small.data.model_copy(update={'pad_to_fixed_length': True}))
    shape = _fixed_shape(prepared.config.model, plan.data)
    assert shape == (48, 40) and plan.shapes == [shape]   # 11.6 s would be 250 codes, but the model takes 48
    assert {(b['codes'].shape[1], b['text'].shape[1]) for b in epoch(plan)} == {shape}
    large = XTTSConfig().model
    most = large.gpt.max_audio_codes, large.gpt.max_text_tokens
    for seconds, tokens, right in ((11.6, 400, (250, 400)), (1., 20, (22, 20)), (1e4, 10**5, most)):
        assert _fixed_shape(large, DataConfig(max_seconds=seconds, max_text_tokens=tokens)) == right

@pytest.mark.parametrize('key', ['min_seconds', 'max_seconds', 'max_text_tokens'])
def test_limits_leave_clips_of_a_finished_cache_out(prepared, small, tmp_path, key):
    column, sign = prepared.samples / 22050, 1 if key == 'max_seconds' else -1
    limit = 0.9
    if key == 'max_text_tokens': column, limit, sign = prepared.text_length, prepared.text_length.max() - 1, 1
    inside = np.flatnonzero(sign * column <= sign * limit).tolist()
    changed = small.data.model_copy(update={key: limit})
    for keep in (None, tmp_path / 'plan'):   # a plan that is kept is made again for other limits
        assert BatchPlan(prepared, small.data, keep=keep).count.sum() == 14
        assert sorted(used(epoch(BatchPlan(prepared, changed, keep=keep)))) == inside
    assert f'{14 - len(inside)} of 14 clips are left out: ' in left_out_line(prepared, changed)
    assert 0 < len(inside) < 14 and left_out_line(prepared, small.data) == ''
    with pytest.raises(UserError, match='14 of 14 clips are left out.*widen'):
        BatchPlan(prepared, small.data.model_copy(update={'min_seconds': 5.}))

def test_kept_columns_are_used_until_something_else_is_asked(tmp_path, monkeypatch):
    made, real = [], module._order_columns
    monkeypatch.setattr(module, '_order_columns', lambda *a: made.append(1) or real(*a))
    cache = fake_cache(CORPORA['random'], SPEAKERS)
    plan = lambda clips=None, **how: BatchPlan(cache, data(**how), clips, keep=tmp_path / 'plan')
    fresh = epoch(BatchPlan(cache, data()))
    for _ in range(2): assert all(map(same, fresh, epoch(plan())))
    plan(batch_size=2, seed=7)
    assert len(made) == 2   # once without keeping, once kept
    for n, other in enumerate([dict(buckets=2), dict(balance_speakers=True), dict(clips=np.arange(9))], 3):
        for _ in range(2): plan(**other)
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
                                'config': XTTSConfig(), **arrays})()

@pytest.mark.skipif(not os.path.exists('/proc/self/status'), reason='memory is told apart on Linux only')
def test_a_large_plan_is_resumed_in_little_memory(tmp_path, monkeypatch):
    "Some bytes per clip, also in a dataset: of the columns that are kept, nothing is made again or copied."
    own = lambda: int(re.search(r'RssAnon:\s+(\d+)', Path('/proc/self/status').read_text())[1]) * 1024
    clips, step = 720_000, 100_000
    cache = lengths_only(tmp_path, clips)
    before = BatchPlan(cache, data(), keep=tmp_path / 'plan').pick(tf.constant(step, tf.int64))
    monkeypatch.setattr(module, '_order_columns', lambda *a: pytest.fail('made again'))
    start = own()
    again = BatchPlan(cache, data(), keep=tmp_path / 'plan')
    after = next(iter(tf.data.Dataset.range(step, step + 1).map(again.pick)))
    assert own() - start < 20 * clips
    assert all(np.array_equal(a, b) for a, b in zip(before, after))

# --- online -------------------------------------------------------------------------------------------

def test_the_longest_clip_fits_whatever_its_length(tmp_path, small, tokenizer, stats):
    "Rounded seconds fall short of a frame."
    for name, n in (('a', 11520), ('b', 11100)):
        save_audio(tmp_path / 'corpus/wavs' / f'{name}.wav', synthetic_voice(1.)[:n])
    (tmp_path / 'corpus/metadata.csv').write_text('a|aa|aa\nb|bb|bb\n')
    encode_corpus(tmp_path / 'corpus', tmp_path / 'cache', small, Fake(), tokenizer)
    plan = BatchPlan(Cache(tmp_path / 'cache'), small.data.model_copy(update={'buckets': 1, 'batch_size': 2}))
    batch = next(iter(batches_of(MelReader(plan, stats), plan.data)))
    assert batch['mel'].shape == (2, 1 + 11520 // 256, 80)
    (tmp_path / 'corpus/wavs/a.wav').unlink()
    with pytest.raises(UserError, match='a.wav: is missing'): WavReader(plan, stats)

def test_a_runtime_cache_gives_the_batches_of_a_prepared_one(tmp_path, small):
    how = lambda mode: small.replace(data={'preprocessing_mode': mode})
    modes = {mode: lesson_cache(tmp_path / mode, how(mode), clips=3) for mode in ('precompute', 'runtime')}
    stored = BatchPlan(modes['precompute'], small.data)
    computed = BatchPlan(modes['runtime'], small.data, dvae=Loudness())
    for a, b in zip(*(read_eagerly(plan, 0, 2) for plan in (stored, computed)), strict=True):
        assert a.keys() == b.keys()
        assert all(np.allclose(a[k], b[k], atol=6e-3) and a[k].dtype == b[k].dtype for k in a)
    with pytest.raises(UserError, match='holds no codes'): BatchPlan(computed.cache, small.data).stream()
