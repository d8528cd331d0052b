"Parts of a cache, and its rows in a graph: from memory, from files, from mapped columns."
import shutil

import numpy as np
import pytest
import soundfile
import tensorflow as tf
import fake_dvae

from xtts_nb.config import DataConfig, UserError, XTTSConfig
from xtts_nb.data import cache as cache_module
from xtts_nb.data.cache import (
    Cache, ClipRows, Column, GraphArrays, InFiles, InMemory, clip_limits, cumulative_chances,
    left_out_line, map_whole_file, stored_columns, within_limits)
from xtts_nb.data.native import (
    BatchPlan, CacheReader, WavReader, batches_of, cached_batches, reader_of)
from xtts_nb.data.prepare import lesson_cache, prepare, verify_and_fix_cache


BALANCE = {(): [1 / 16, 1 / 16, 1 / 8, 3 / 4], ('speakers',): [1 / 6, 1 / 6, 1 / 3, 1 / 3],
           ('languages',): [1 / 8, 1 / 8, 1 / 4, 1 / 2],
           ('languages', 'speakers'): [1 / 8, 1 / 8, 1 / 4, 1 / 2]}

@pytest.mark.parametrize('what', BALANCE)
def test_chances_in_balance(what):
    "Four clips, three speakers, two languages; the last speaker speaks the second."
    weight, speaker, language = np.array([1., 1., 2., 12.]), np.array([0, 0, 1, 2]), np.array([0, 0, 0, 1])
    settings = DataConfig(**{f'balance_{name}': True for name in what})
    assert np.allclose(cumulative_chances(weight, speaker, language, settings), np.cumsum(BALANCE[what]))

def test_limits_to_the_sample_and_the_token():
    samples = np.array([22049, 22050, 44101, 44102, 44100, 1])
    tokens = np.array([1, 8, 8, 8, 9, 9])
    facts = dict(folder='fake', config=XTTSConfig(), samples=samples, text_length=tokens)
    cache = type('Lengths', (), {'__len__': lambda self: 6, **facts})()
    limits = DataConfig(min_seconds=1., max_seconds=2.00001, max_text_tokens=8)   # 44100.2 samples
    assert [np.flatnonzero(out).tolist() for out in clip_limits(cache, limits).values()] == [[0, 5], [3],
                                                                                             [4, 5]]
    assert np.flatnonzero(within_limits(cache, limits)).tolist() == [1, 2]
    assert left_out_line(cache, limits) == (
        'fake: 4 of 6 clips are left out: 2 shorter than data.min_seconds 1.0, '
        '1 longer than data.max_seconds 2.00001, 2 of more text tokens than data.max_text_tokens 8.')

@pytest.mark.parametrize('first', [0, 3])
def test_batches_from_files_are_those_from_memory(prepared, small, first):
    memory, files = (BatchPlan(Cache(prepared.folder, ram_budget=gib), small.data) for gib in (1., 0.))
    assert isinstance(CacheReader(memory.cache, memory).rows, InMemory)
    assert isinstance(CacheReader(files.cache, files).rows, InFiles)
    for a, b in zip(*(cached_batches(plan, first, first + 12) for plan in (memory, files)), strict=True):
        assert a.keys() == b.keys()
        assert all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)

def address(array) -> int: return np.asarray(array).__array_interface__['data'][0]

def test_the_arrays_of_a_cache_are_in_memory_once(prepared, small):
    "A tensor has their memory, that of a second plan too; a copy would double what the budget allows."
    cache = Cache(prepared.folder)
    for plan in (BatchPlan(cache, small.data), BatchPlan(cache, small.data, np.arange(3))):
        for kind, held in reader_of(plan).rows.flat.items():
            assert address(held()) == address(getattr(cache, kind)), kind
    assert cache.held == sum(getattr(cache, kind).nbytes for kind in ('codes', 'text', 'mel'))

def test_the_budget_decides_where_nothing_else_does(tmp_path, small, prepared):
    frugal = small.replace(data={'ram_budget': 0.})
    assert lesson_cache(tmp_path, frugal, clips=1).held == 0   # as its own settings say
    size = sum(line['bytes'] for line in prepared.manifest['shards'])
    for budget, held in ((0, 0), (size - 1, 0), (size, prepared.held)):
        assert Cache(prepared.folder, ram_budget=budget / 2**30).held == held
    cache = Cache(prepared.folder, in_memory=False)
    assert (cache.read(0).held, cache.read(1).held) == (0, prepared.held)
    for kind in ('codes', 'text', 'mel'): assert np.array_equal(getattr(cache, kind), getattr(prepared, kind))

def test_a_plan_has_one_reader(prepared, small, monkeypatch):
    made, real = [], CacheReader.__init__
    monkeypatch.setattr(CacheReader, '__init__', lambda self, *given: made.append(1) or real(self, *given))
    plan = BatchPlan(prepared, small.data)
    for _ in range(3): plan.stream(0, 1)   # as three validations do
    assert len(made) == 1

def test_the_table_of_a_runtime_cache_is_read_once(prepared, small, stats, monkeypatch):
    rows, real = [], ClipRows.__getitem__
    monkeypatch.setattr(ClipRows, '__getitem__', lambda self, i: rows.append(i) or real(self, i))
    cache = Cache(prepared.folder)
    readers = [WavReader(BatchPlan(cache, small.data), stats) for _ in range(2)]
    assert readers[0].names == readers[1].names
    assert [i for i in rows if i] == list(range(1, len(cache)))   # the first line tells the kind of the cache

@pytest.mark.parametrize('budget', [0., 1.])
def test_the_arrays_stay_on_the_host(prepared, small, budget):
    "On a GPU an op that reads them would be given a copy of all."
    reader = reader_of(BatchPlan(Cache(prepared.folder, ram_budget=budget), small.data))
    @tf.function
    def read(step):
        with tf.device('/GPU:0'): return reader(step)
    graph = read.get_concrete_function(tf.constant(0, tf.int64)).graph
    parts = [graph.as_graph_def(), *graph.as_graph_def().library.function]
    nodes = [n for part in parts for n in (getattr(part, 'node', None) or part.node_def)]
    lists = [n for n in nodes if n.op == 'TensorListGetItem']
    users = [n for n in nodes if any(i.split(':')[0] in {l.name for l in lists} for i in n.input)]
    assert lists and users
    assert {n.device for n in lists + users if n.op != 'StridedSlice'} == {'/device:CPU:0'}

def test_a_mapped_cache_is_streamed_even_if_it_would_fit(prepared, small):
    mapped, memory = (BatchPlan(Cache(prepared.folder, in_memory), small.data) for in_memory in (False, True))
    assert isinstance(CacheReader(mapped.cache, mapped).rows, InFiles)
    for a, b in zip(*(cached_batches(plan, 0, 3) for plan in (mapped, memory)), strict=True):
        assert all(np.array_equal(a[k], b[k]) for k in a)

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

def test_columns_are_stored_until_their_key_changes(tmp_path):
    made = []
    def make(): return made.append(1) or {'a': np.arange(6, dtype=np.int32).reshape(3, 2) + len(made),
                                          'b': np.zeros(0, np.float64)}
    for key, calls in (('one', 1), ('one', 1), ('two', 2), ('two', 2), ('one', 3)):
        columns = stored_columns(tmp_path / 'columns', key, make)
        assert len(made) == calls and np.array_equal(columns['a'], np.arange(6).reshape(3, 2) + calls)
        assert {name: (c.dtype, c.shape) for name, c in columns.items()} == {
            'a': (np.int32, (3, 2)), 'b': (np.float64, (0,))}
        assert isinstance(columns['a'], np.memmap)
    assert [path.name for path in tmp_path.iterdir()] == ['columns']


# --- a cache that is replaced while it is read --------------------------------------------------------------

@pytest.fixture
def replaced(copy, corpus, small, tokenizer):
    "Replaces the cache `copy` by one with other codes and files of the same sizes."
    return lambda: prepare(corpus, copy, small, fake_dvae.Fake(gain=2.), tokenizer, shard_clips=5)

@pytest.mark.parametrize('in_memory', [True, False], ids=['in memory', 'mapped'])
def test_a_plan_goes_on_with_the_cache_that_it_was_made_of(copy, replaced, small, in_memory):
    plan = BatchPlan(Cache(copy, in_memory), small.data)
    before = [{k: v.numpy() for k, v in batch.items()} for batch in cached_batches(plan, 0, 8)]
    batches = iter(cached_batches(plan, 0, 8))
    seen = [next(batches)]
    replaced()
    seen += list(batches)
    assert len(seen) == 8 and all(np.array_equal(a[k], b[k]) for a, b in zip(before, seen) for k in a)
    after = next(iter(cached_batches(BatchPlan(Cache(copy), small.data))))
    assert not np.array_equal(after['codes'], before[0]['codes'])

def test_what_is_opened_after_the_cache_was_replaced_is_refused(copy, replaced, small):
    mapped, plan = Cache(copy, in_memory=False), BatchPlan(Cache(copy), small.data)
    assert len(mapped.array('codes', 0))   # of the first shard, which is open
    replaced()
    for use in (lambda: mapped.array('codes', 13), lambda: cached_batches(BatchPlan(mapped, small.data)),
                lambda: next(iter(cached_batches(plan)))):
        with pytest.raises(UserError, match='out: was replaced while it was read; start again'): use()

def test_a_cache_that_is_replaced_while_it_is_opened_is_refused(copy, replaced, monkeypatch):
    "The manifest of one and the shards of the other."
    real = cache_module.map_arrays
    def late(path):
        monkeypatch.undo()
        replaced()
        return real(path)
    monkeypatch.setattr(cache_module, 'map_arrays', late)
    with pytest.raises(UserError, match='out: was replaced while it was read'): Cache(copy, in_memory=False)

def test_recordings_of_a_replaced_cache_are_refused(corpus, small, tokenizer, tmp_path):
    "Other clips have their names: the first of the second cache is the last of the first."
    runtime, rows = small.replace(data={'preprocessing_mode': 'runtime'}), tmp_path / 'corpus'
    shutil.copytree(corpus, rows)
    for path in (rows / 'wavs').iterdir(): soundfile.write(path, soundfile.read(path)[0][::2], 11025)
    prepare(rows, tmp_path / 'out', runtime, fake_dvae.Fake(), tokenizer)
    plan = BatchPlan(Cache(tmp_path / 'out'), runtime.data)
    batches = iter(batches_of(WavReader(plan, np.ones(80, np.float32)), runtime.data))
    next(batches)
    table = (rows / 'metadata.csv').read_text().splitlines(keepends=True)
    (rows / 'metadata.csv').write_text(''.join(table[::-1]))
    prepare(rows, tmp_path / 'out', runtime, fake_dvae.Fake(), tokenizer)
    with pytest.raises(tf.errors.InvalidArgumentError, match='out: was replaced while it was read'):
        for _ in range(20): next(batches)

def test_a_cache_that_is_mended_is_no_other(copy):
    cache = Cache(copy, in_memory=False)
    assert cache.array('codes', 0).size
    (copy / 'report.txt').unlink()
    verify_and_fix_cache(copy, fix=True, load=fake_dvae.load)
    assert (copy / 'report.txt').is_file()
    assert np.array_equal(cache.array('codes', 13), Cache(copy).array('codes', 13))
