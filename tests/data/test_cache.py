"A cache: bad input is dropped with its reason, every damage is found, and its rows are the same from files."
import os
import resource
import shutil

import fake_dvae
import numpy as np
import pytest
import soundfile
import tensorflow as tf

from xtts_nb.config import DataConfig, UserError, XTTSConfig
from xtts_nb.data import cache as cache_module
from xtts_nb.data.audio import save_audio, synthetic_voice
from xtts_nb.data.cache import (
    ARRAYS, Cache, InFiles, InMemory, _clip_limits, left_out_line, map_arrays, read_manifest,
    verify_cache, within_limits, write_manifest, write_shard, write_table)
from xtts_nb.data.corpora import read_audio, read_corpus
from xtts_nb.data.native import BatchPlan, WavReader, batches_of, _reader_of
from xtts_nb.data.prepare import ClipEncoder, mel_sample, encode_corpus
from xtts_nb.data.repair import verify_and_fix_cache
from xtts_nb.data.text import train_tokenizer
from xtts_nb.models.dvae import load_dvae

# --- what is dropped ----------------------------------------------------------------------------------

DROPPED = {'empty': 'not readable as audio', 'nobody': 'nobody.wav is missing',
           'words': 'the tokenizer does not know ? ж', 'language': 'no language de',
           'tokens': 'tokens, more than 40',
           'codes': '54 codes, more than model.gpt.max_audio_codes 48'}

@pytest.fixture
def mixed(tmp_path):
    "Three good clips and one of every bad kind."
    folder, wavs = tmp_path / 'corpus', tmp_path / 'corpus/wavs'
    texts = {'words': 'Ж \ufeffaa ?', 'tokens': 'a' * 90}
    for name in ('good-0', 'good-1', 'good-2', 'words', 'language', 'tokens', 'codes'):
        save_audio(wavs / f'{name}.wav', synthetic_voice(2.5 if name == 'codes' else 1.))
    (wavs / 'empty.wav').write_bytes(b'')
    names = *(f'good-{i}' for i in range(3)), *DROPPED
    rows = ((name, text := texts.get(name, 'aa bb'), text, 'low', 'de' if name == 'language' else 'en')
            for name in names)
    (folder / 'metadata.csv').write_text('\n'.join(map('|'.join, rows)))
    return folder

def test_bad_clips_are_dropped_with_their_reason_as_far_as_is_allowed(mixed, small, dvae, tmp_path):
    tokenizer, allow = train_tokenizer(['aa bb'], ['en'], 48), lambda rate: small.replace(
        data={'max_drop_rate': rate})
    with pytest.raises(UserError, match='corpus.*6 of 9 clips cannot be used, .*data.max_drop_rate'):
        encode_corpus(mixed, tmp_path / 'out', allow(.66), dvae, tokenizer)
    assert not (tmp_path / 'out').exists()   # finished shards wait in `out.work`
    report = encode_corpus(mixed, tmp_path / 'out', allow(.67), dvae, tokenizer)
    dropped = {d['id']: d['reason'] for d in report['dropped']}
    assert report['clips'] == 3 and dropped.keys() == DROPPED.keys()
    assert all(DROPPED[k] in dropped[k] for k in DROPPED), dropped
    assert not any(str(mixed) in r or '\n' in r for r in dropped.values())
    assert [c['id'] for c in Cache(tmp_path / 'out').clips] == ['good-0', 'good-1', 'good-2']

def test_mels_to_train_on_are_drawn_until_there_are_enough(corpus, mixed, small):
    clips, seen = read_corpus(corpus)[0], []
    first, second = np.random.default_rng(small.data.seed).permutation(14)[:2]
    seconds = [soundfile.info(clips[i].path).duration for i in (first, second)]
    for wanted, count in ((seconds[0], 1), (seconds[0] + 0.01, 2)):
        mels = mel_sample(clips, small, wanted, lambda *done: seen.append(done))
        assert mels.shape == (sum(1 + int(s * 22050) // 256 for s in seconds[:count]), 80)
    assert seen == [(1, 14), (1, 14), (2, 14)]
    bad = [c for c in read_corpus(mixed)[0] if c.id == 'empty'] * 2
    assert len(mel_sample([*bad, clips[0]], small)) == len(mel_sample(clips[:1], small))
    with pytest.raises(UserError, match='none of the 2 clips can be used'): mel_sample(bad, small)

# --- reading ------------------------------------------------------------------------------------------

def test_arrays_are_those_of_the_clips_in_memory_and_mapped(corpus, small, prepared):
    "Made by the DVAE that is stored with them; of two shards."
    clips, mapped = read_corpus(corpus)[0], Cache(prepared.folder, in_memory=False)
    dvae = load_dvae(prepared.folder / 'dvae.safetensors', prepared.config)
    encode = ClipEncoder(small, dvae, prepared.tokenizer)
    assert len(prepared) == len(clips) == 14 and len(prepared.manifest['shards']) == 3
    for i, (clip, wav) in enumerate(read_audio(clips[:6], small)):
        made = encode(clip, wav)
        for kind, dtype in ARRAYS.items():
            for cache in (prepared, mapped):
                found = cache.array(kind, i)
                assert found.dtype == dtype and np.array_equal(found, np.asarray(made[kind], dtype))
    assert list(mapped.clips) == list(prepared.clips) and mapped.clips[-1] == mapped.clips[13]
    assert [mapped.speakers[n] for n in mapped.speaker] == [c['speaker'] for c in mapped.clips]
    assert (mapped.samples / 22050).round(4).tolist() == [c['seconds'] for c in mapped.clips]
    assert prepared.recordings is prepared.recordings   # the table is read once
    with pytest.raises(IndexError): mapped.clips[14]

def record(i, **changes):
    return dict(codes=np.full(4, i % 32), text=np.arange(3), mel=np.ones((5, 80)), codes_length=4,
                text_length=3, mel_length=5, samples=4000, source=i, sound=0) | changes

def test_more_shards_than_files_may_be_open(tmp_path):
    many, limit = 300, resource.getrlimit(resource.RLIMIT_NOFILE)
    lines = [write_shard(tmp_path / f'{i}', [record(i)]) for i in range(10)]
    for i in range(10, many): os.link(tmp_path / f'{i % 10}', tmp_path / f'{i}')
    class Mapped(Cache):
        __init__, __len__, check_unchanged = object.__init__, lambda self: many, lambda self: None
    cache = Mapped()
    shards = [lines[i % 10] | {'file': f'{i}'} for i in range(many)]
    cache.folder, cache.manifest = tmp_path, {'shards': shards, 'stored': ['codes']}
    cache.codes_start, cache.codes_length = np.arange(many) * 4, np.full(many, 4)
    cache._open()
    used = len(os.listdir('/proc/self/fd')) if os.path.isdir('/proc/self/fd') else 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 270, limit[1]))
    try:
        assert [int(cache.array('codes', i)[0]) for i in range(many)] == [i % 10 for i in range(many)]
        some = np.arange(3, many, 42)
        rows = InFiles(cache, ('codes',))('codes', some * 4, np.full(len(some), 4), 4)   # as in a graph
    finally: resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert rows[:, 0].numpy().tolist() == (some % 10).tolist()

# --- damage -------------------------------------------------------------------------------------------

PARTS = ['clips.jsonl', 'tokenizer.json', 'config.yaml', 'shard-00001.safetensors', 'index.safetensors']

@pytest.mark.parametrize('how', ['missing', 'cut off', 'empty', 'longer', 'flipped'])
def test_what_is_damaged_is_found_and_not_opened(copy, how):
    for name in [*PARTS, 'dvae.safetensors', 'report.txt']:
        whole = (copy / name).read_bytes()
        (copy / name).unlink()
        if how != 'missing':
            flipped = whole[:-50] + bytes([whole[-50] ^ 255]) + whole[-49:]
            (copy / name).write_bytes({'cut off': whole[:len(whole) // 2], 'empty': b'',
                                       'longer': whole + b'x', 'flipped': flipped}[how])
        problems = verify_cache(copy)[1]
        assert {p['file'] for p in problems} == {name}
        assert how != 'missing' or problems[0]['problem'] == 'is missing'
        with pytest.raises(UserError, match=f'{name}: is '): Cache(copy, in_memory=True)
        if how == 'missing' and name in PARTS:
            with pytest.raises(UserError, match=f'{name}: is '): Cache(copy, False).array('codes', 6)
        if how == 'flipped' and name == 'report.txt': assert len(Cache(copy, False)) == 14   # not read whole
        (copy / name).write_bytes(whole)
    for content in (b'', b'{', b'[]', b'{"format": 1}'):
        (copy / 'manifest.json').write_bytes(content)
        checked, (problem,) = verify_cache(copy)
        assert checked == 1 and (problem['file'], problem['clip']) == ('manifest.json', '')
        with pytest.raises(UserError, match='manifest.json'): Cache(copy)

def test_a_whole_cache_has_no_problem_but_what_belongs_to_nothing(copy):
    seen = []
    checked, problems = verify_cache(copy, lambda *done: seen.append(done))
    assert problems == [] and checked == 14 + len(list(copy.iterdir())) - 4   # 3 shards, the page
    assert seen == [(5, 14), (10, 14), (14, 14)]
    shutil.copy(copy / 'shard-00002.safetensors', copy / 'shard-00003.safetensors')
    (copy / 'notes.txt').write_text('mine')
    assert [(p['file'], p['problem']) for p in verify_cache(copy)[1]] == [
        (name, 'belongs to nothing') for name in ('notes.txt', 'shard-00003.safetensors')]

WRONG = {'NaN': ({'mel': np.full((5, 80), np.nan)}, 'not finite'),
         'a code too high': ({'codes': [0, 1, 2, 32]}, 'codes go beyond the 32'),
         'an id too high': ({'text': [0, 1, None]}, 'text go beyond'),   # None: one more than the last
         'an id below 0': ({'text': [0, 1, -1]}, 'text go beyond'),
         'a length': ({'codes_length': 5}, 'lengths of codes do not add up'),
         'a length below 0': ({'mel_length': -5}, 'lengths of mel do not add up')}

@pytest.mark.parametrize('kind', WRONG)
def test_a_record_that_was_written_wrong_is_found(copy, kind):
    "Bytes and checksums agree, the sense does not."
    changes, problem = WRONG[kind]
    facts = read_manifest(copy)
    rows, ids = list(Cache(copy).clips)[:5], Cache(copy).tokenizer.size
    for line in facts['shards']: (copy / line['file']).unlink()
    if None in changes.get('text', ()): changes = {'text': [0, 1, ids]}
    good = {'codes': [0, 1, 31, 0], 'text': [0, ids - 1, 1]}   # the first and the last that there are
    made = [record(i, **(changes if i == 3 else good)) for i in range(5)]
    line = {'number': 0} | write_shard(copy / 'shard-00000.safetensors', made)
    write_table(copy, [(0, rows, map_arrays(copy / line['file']))])
    write_manifest(copy, {k: v for k, v in facts.items() if k not in ('format', 'files')}
                   | {'shards': [line]})
    (found,) = verify_cache(copy)[1]
    assert problem in found['problem'] and found['clip'] == ('' if 'length' in kind else rows[3]['id'])

# --- parts of a cache, and its rows in a graph --------------------------------------------------------

def test_limits_to_the_sample_and_the_token():
    facts = dict(folder='fake', config=XTTSConfig(), text_length=np.array([1, 8, 8, 8, 9, 9]),
                 samples=np.array([22049, 22050, 44101, 44102, 44100, 1]))
    cache = type('Lengths', (), {'__len__': lambda self: 6, **facts})()
    limits = DataConfig(min_seconds=1., max_seconds=2.00001, max_text_tokens=8)   # 44100.2 samples
    assert [np.flatnonzero(out).tolist() for out in _clip_limits(cache, limits).values()] == [
        [0, 5], [3], [4, 5]]
    assert np.flatnonzero(within_limits(cache, limits)).tolist() == [1, 2]
    assert left_out_line(cache, limits) == (
        'fake: 4 of 6 clips are left out: 2 shorter than data.min_seconds 1.0, '
        '1 longer than data.max_seconds 2.00001, 2 of more text tokens than data.max_text_tokens 8.')

def address(array) -> int: return np.asarray(array).__array_interface__['data'][0]

def test_the_arrays_of_a_cache_are_in_memory_once_and_on_the_host(prepared, small):
    "A copy would double what the budget allows; on a GPU an op that reads them would be given a copy of all."
    cache = Cache(prepared.folder)
    for plan in (BatchPlan(cache, small.data), BatchPlan(cache, small.data, np.arange(3))):
        assert _reader_of(plan) is _reader_of(plan)
        for kind, held in _reader_of(plan).gather.flat.items():
            assert address(held()) == address(getattr(cache, kind)), kind
    for budget in (0., 1.):
        reader = _reader_of(BatchPlan(Cache(prepared.folder, ram_budget=budget), small.data))
        @tf.function
        def read(step, reader=reader):
            with tf.device('/GPU:0'): return reader(step)
        graph = read.get_concrete_function(tf.constant(0, tf.int64)).graph
        parts = [graph.as_graph_def(), *graph.as_graph_def().library.function]
        nodes = [n for part in parts for n in (getattr(part, 'node', None) or part.node_def)]
        lists = [n for n in nodes if n.op == 'TensorListGetItem']
        users = [n for n in nodes if any(i.split(':')[0] in {l.name for l in lists} for i in n.input)]
        assert lists and users
        assert {n.device for n in lists + users if n.op != 'StridedSlice'} == {'/device:CPU:0'}

def test_the_budget_decides_where_nothing_else_does(prepared):
    size = sum(line['bytes'] for line in prepared.manifest['shards'])
    assert prepared.held == sum(getattr(prepared, kind).nbytes for kind in ARRAYS)
    for budget, held in ((size - 1, 0), (size, prepared.held)):
        assert Cache(prepared.folder, ram_budget=budget / 2**30).held == held
    assert Cache(prepared.folder, in_memory=False).read(1).held == prepared.held

# --- a cache that is replaced while it is read --------------------------------------------------------

@pytest.fixture
def replaced(copy, corpus, small, tokenizer):
    "Replaces the cache `copy` by one with other codes and files of the same sizes."
    return lambda: encode_corpus(corpus, copy, small, fake_dvae.Fake(gain=2.), tokenizer, shard_clips=5)

def test_a_plan_goes_on_with_the_cache_that_it_was_made_of(copy, replaced, small):
    "In memory or from files, whose batches are the same."
    plans = [BatchPlan(Cache(copy, in_memory), small.data) for in_memory in (True, False)]
    assert [type(_reader_of(plan).gather) for plan in plans] == [InMemory, InFiles]
    batch = lambda plan, step: _reader_of(plan)(tf.constant(step, tf.int64))
    before = [batch(plans[0], step) for step in range(8)]
    sources = [iter(plan.stream(0, 8)) for plan in plans]
    seen = [[next(source)] for source in sources]
    replaced()
    for some, source in zip(seen, sources):
        for a, b in zip(before, [*some, *source], strict=True):
            assert a.keys() == b.keys()
            assert all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
    assert not np.array_equal(batch(BatchPlan(Cache(copy), small.data), 0)['codes'], before[0]['codes'])

def test_what_is_opened_after_the_cache_was_replaced_is_refused(copy, replaced, small, monkeypatch):
    mapped, plan = Cache(copy, in_memory=False), BatchPlan(Cache(copy), small.data)
    assert len(mapped.array('codes', 0))   # of the first shard, which is open
    replaced()
    real = cache_module.map_arrays
    def late(path):   # the manifest of one and the shards of the other
        monkeypatch.undo()
        verify_and_fix_cache(copy)
        encode_corpus(mapped.manifest['source']['corpus'], copy, small, fake_dvae.Fake(), mapped.tokenizer)
        return real(path)
    for use in (lambda: mapped.array('codes', 13), lambda: BatchPlan(mapped, small.data).stream(),
                lambda: next(iter(plan.stream())),
                lambda: monkeypatch.setattr(cache_module, 'map_arrays', late) or Cache(copy, False)):
        with pytest.raises(UserError, match='out: was replaced while it was read'): use()

def test_recordings_of_a_replaced_cache_are_refused(corpus, small, tokenizer, tmp_path):
    "Other clips have their names: the first of the second cache is the last of the first."
    runtime, rows = small.replace(data={'preprocessing_mode': 'runtime'}), tmp_path / 'corpus'
    shutil.copytree(corpus, rows)
    for path in (rows / 'wavs').iterdir(): soundfile.write(path, soundfile.read(path)[0][::2], 11025)
    encode_corpus(rows, tmp_path / 'out', runtime, fake_dvae.Fake(), tokenizer)
    plan = BatchPlan(Cache(tmp_path / 'out'), runtime.data)
    batches = iter(batches_of(WavReader(plan, np.ones(80, np.float32)), runtime.data))
    next(batches)
    table = (rows / 'metadata.csv').read_text().splitlines(keepends=True)
    (rows / 'metadata.csv').write_text(''.join(table[::-1]))
    encode_corpus(rows, tmp_path / 'out', runtime, fake_dvae.Fake(), tokenizer)
    with pytest.raises(tf.errors.InvalidArgumentError, match='out: was replaced while it was read'):
        for _ in range(20): next(batches)

def test_a_cache_that_is_repaired_is_no_other(copy):
    cache = Cache(copy, in_memory=False)
    assert cache.array('codes', 0).size
    (copy / 'report.txt').unlink()
    verify_and_fix_cache(copy, fix=True, load=fake_dvae.load)
    assert np.array_equal(cache.array('codes', 13), Cache(copy).array('codes', 13))
