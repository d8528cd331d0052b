"Bad input is dropped and counted, or raises an error of one sentence; a cache is written atomically."
import hashlib
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
import soundfile

from xtts_nb.data.audio import log_mel, save_audio, synthetic_voice
from xtts_nb.data import cache as cache_module
from xtts_nb.data.cache import (
    DTYPES, ARRAYS, Cache, InFiles, check_cache_folder, content_keys, digest, file_sha,
    load_shard, map_arrays, read_manifest, records, verify_cache, work_path, write_manifest, write_shard,
    write_table)
from xtts_nb.config import UserError
from xtts_nb.data.corpora import Dropped, read_corpus, read_audio
from xtts_nb.data.prepare import ClipEncoder, mel_sample, prepare
from xtts_nb.data.text import train_tokenizer

LINE = 'low-0|aa bb|aa bb|low|en'   # a row that can be used


@pytest.fixture
def make(corpus, tmp_path):
    "Write metadata beside a copy of the corpus' sound."
    folder = tmp_path / 'corpus'
    def write(rows=(), raw=None, extra=()):
        (folder / 'wavs').mkdir(parents=True, exist_ok=True)
        for i in range(3): shutil.copy(corpus / 'wavs' / f'low-{i}.wav', folder / 'wavs')
        for name, wav in dict(extra).items(): save_audio(folder / 'wavs' / f'{name}.wav', wav)
        (folder / 'metadata.csv').write_bytes(raw if raw is not None else '\n'.join(rows).encode())
        return folder
    return write


# --- sound ----------------------------------------------------------------------------------------

SOUND = {'not audio': 'not readable as audio', 'empty file': 'not readable as audio',
         'no samples': '0 samples', 'nan': 'NaN',
         'too short': 'shorter than data.min_seconds', 'too long': 'longer than data.max_seconds'}

@pytest.fixture
def mixed(make):
    "Three good clips and one of every bad kind."
    folder = make([f'low-{i}|aa bb|aa bb|low|en' for i in range(3)] + [f'{k}|aa|aa|low|en' for k in SOUND],
                  extra={'too short': np.zeros(2000), 'too long': np.zeros(22050 * 12),
                         'no samples': np.zeros(0)})
    (folder / 'wavs/not audio.wav').write_text('this is text')
    (folder / 'wavs/empty file.wav').write_bytes(b'')
    soundfile.write(folder / 'wavs/nan.wav', np.full(22050, np.nan), 22050, subtype='FLOAT')
    return folder

def test_one_bad_clip_never_ends_a_run(mixed, small, dvae, tmp_path):
    report = prepare(mixed, tmp_path / 'out', small.replace(data={'max_drop_rate': 0.9}), dvae)
    dropped = {d['id']: d['reason'] for d in report['dropped']}
    assert report['clips'] == 3 and set(dropped) == set(SOUND)
    assert all(SOUND[k] in dropped[k] for k in SOUND), dropped
    assert not any(str(mixed) in r or '\n' in r for r in dropped.values())
    text = (tmp_path / 'out/report.txt').read_text()
    assert all(f'{k}: {dropped[k]}' in text for k in SOUND) and 'dropped    6' in text
    assert json.loads((tmp_path / 'out/report.json').read_text()).items() <= report.items()
    assert [c['id'] for c in Cache(tmp_path / 'out').clips] == ['low-0', 'low-1', 'low-2']

@pytest.mark.parametrize('rate, works', [(0.66, False), (0.67, True)])
def test_more_dropped_clips_than_allowed_is_an_error(mixed, small, dvae, tmp_path, rate, works):
    config = small.replace(data={'max_drop_rate': rate})   # 6 of 9
    if works:
        assert prepare(mixed, tmp_path / 'out', config, dvae)['clips'] == 3
        return
    with pytest.raises(UserError,
                       match='6 of 9 clips cannot be used, more than data.max_drop_rate.*not audio') as e:
        prepare(mixed, tmp_path / 'out', config, dvae)
    assert str(mixed) in str(e.value)
    assert not (tmp_path / 'out').exists()   # finished shards wait in `out.work`

@pytest.mark.parametrize('rows', [['nobody|a|a', 'noone|a|a'], ['low-0'], ['too long|aa|aa|low|en']])
def test_no_usable_clip_is_an_error_whatever_is_allowed(make, small, dvae, tmp_path, rows):
    folder = make(rows, extra={'too long': np.zeros(22050 * 12)})
    with pytest.raises(UserError, match='none of the . clips can be used \\('):
        prepare(folder, tmp_path / 'out', small.replace(data={'max_drop_rate': 1.}), dvae)
    assert not any(tmp_path.glob('out*'))

def test_a_drop_rate_of_zero_takes_a_clean_corpus_only(make, small, dvae, tmp_path):
    config = small.replace(data={'max_drop_rate': 0.})
    assert prepare(make([LINE]), tmp_path / 'a', config, dvae)['dropped'] == []
    with pytest.raises(UserError, match='1 of 2'):
        prepare(make([LINE, 'nobody|a|a']), tmp_path / 'b', config, dvae)

def test_what_the_model_cannot_take_is_dropped(make, small, dvae, tmp_path):
    tokenizer = train_tokenizer(['aa bb'], ['en'], 48)
    folder = make([LINE, 'low-1|Ж aa ?|Ж \ufeffaa ?|low|en', 'low-2|aa|aa|low|de',
                   f'long|{"a" * 90}|{"a" * 90}|low|en',
                   'codes|aa|aa|low|en'],
                  extra={'long': synthetic_voice(1.), 'codes': synthetic_voice(2.5)})
    report = prepare(folder, tmp_path / 'out', small.replace(data={'max_drop_rate': 0.9}), dvae, tokenizer)
    dropped = {d['id']: d['reason'] for d in report['dropped']}
    assert dropped['low-1'] == r'the tokenizer does not know ? ж'
    assert 'no language de' in dropped['low-2']
    assert 'tokens, more than 40' in dropped['long']
    assert '54 codes, more than model.gpt.max_audio_codes 48' == dropped['codes']
    assert report['clips'] == 1

def test_a_clip_too_short_for_a_frame_is_dropped_even_if_allowed(make, small, dvae, tmp_path):
    folder = make([LINE, 'tiny|aa|aa|low|en', 'one|aa|aa|low|en'],
                  extra={'tiny': synthetic_voice(1.)[:300], 'one': np.ones(1)})
    config = small.replace(data={'min_seconds': 0., 'max_drop_rate': 0.9})
    report = prepare(folder, tmp_path / 'out', config, dvae)
    assert all(Cache(tmp_path / 'out').mel_length > 0) and report['clips'] + len(report['dropped']) == 3

def test_mels_to_train_on(corpus, mixed, small):
    clips, seen = read_corpus(corpus)[0], []
    mels = mel_sample(clips, small, progress=lambda *done: seen.append(done))
    assert mels.shape[1] == 80 and seen == [(i, 14) for i in range(1, 15)]
    assert np.array_equal(mels, mel_sample(clips, small))
    assert len(mel_sample(clips, small, seconds=1.)) < len(mels)
    good = [c for c in read_corpus(mixed)[0] if c.id not in SOUND]
    assert len(mel_sample(read_corpus(mixed)[0], small)) == len(mel_sample(good, small))
    with pytest.raises(UserError, match='none of the 6 clips can be used'):
        mel_sample([c for c in read_corpus(mixed)[0] if c.id in SOUND], small)


# --- reading it again -----------------------------------------------------------------------------

def test_arrays_are_those_of_the_clips(corpus, small, dvae, stats, prepared):
    encoder, (clips, _) = ClipEncoder(small, dvae, prepared.tokenizer), read_corpus(corpus)
    assert len(prepared) == len(clips) == 14 and len(prepared.manifest['shards']) == 3
    for i, (clip, wav) in enumerate(read_audio(clips, small)):
        made = encoder(clip, wav)
        assert not isinstance(made, Dropped) and prepared.clips[i]['id'] == clip.id
        assert np.array_equal(prepared.array('codes', i), made['codes'])
        assert list(prepared.array('text', i)) == made['text']
        assert np.array_equal(prepared.array('mel', i), made['mel'].astype(np.float16))
        assert len(made['codes']) == -(-len(wav) // 1024) and len(made['mel']) == 1 + len(wav) // 256
        voice = log_mel(wav, 2048).numpy() / stats
        assert np.abs(prepared.array('mel', i).astype(np.float32) - voice).max() < 2e-3

def test_the_dvae_of_the_cache_makes_its_codes(corpus, small, prepared):
    from xtts_nb.models.dvae import load_dvae
    again = ClipEncoder(small, load_dvae(prepared.folder / 'dvae.safetensors', prepared.config),
                        prepared.tokenizer)
    clip, wav = next(read_audio(read_corpus(corpus)[0], small))
    assert np.array_equal(again(clip, wav)['codes'], prepared.array('codes', 0))

PARTS = ['manifest.json', 'clips.jsonl', 'tokenizer.json', 'config.yaml', 'shard-00001.safetensors',
         'index.safetensors']

@pytest.mark.parametrize('name', PARTS)
@pytest.mark.parametrize('in_memory', [True, False])
def test_a_missing_part_is_named(prepared, tmp_path, name, in_memory):
    shutil.copytree(prepared.folder, tmp_path / 'c')
    (tmp_path / 'c' / name).unlink()
    with pytest.raises(UserError, match='holds no cache' if name == 'manifest.json' else name):
        cache = Cache(tmp_path / 'c', in_memory)
        cache.array('codes', 6)   # a mapped shard is opened when it is needed

@pytest.mark.parametrize('name', PARTS[:3] + PARTS[4:])
@pytest.mark.parametrize('in_memory', [True, False])
def test_a_part_cut_off_is_named(prepared, tmp_path, name, in_memory):
    shutil.copytree(prepared.folder, tmp_path / 'c')
    path = tmp_path / 'c' / name
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2 + 10])
    if not in_memory and name.startswith('shard'):   # opened when needed
        assert Cache(tmp_path / 'c', False)
        return
    with pytest.raises(UserError, match=name): Cache(tmp_path / 'c', in_memory)

def test_a_mapped_cache_is_opened_without_reading_its_files_whole(prepared, tmp_path):
    shutil.copytree(prepared.folder, tmp_path / 'c')
    path = tmp_path / 'c/report.txt'
    path.write_bytes(path.read_bytes()[::-1])
    assert len(Cache(tmp_path / 'c', in_memory=False)) == 14
    with pytest.raises(UserError, match='report.txt: is damaged; mend the cache'): Cache(tmp_path / 'c')

def test_the_table_and_the_index_by_hand(tmp_path):
    "Two shards; the codes were left to be made at runtime."
    rows = [{'id': 'ä', 'speaker': 'b', 'language': 'en'}, {'id': 'x', 'speaker': 'a', 'language': 'en'},
            {'id': 'y', 'speaker': 'b', 'language': 'de'}]
    shards = []
    for i, lengths in enumerate(([3, 1], [2])):
        made = [record(i, text=np.arange(n), text_length=n, codes=[], mel=np.ones((0, 80))) for n in lengths]
        write_shard(tmp_path / f'{i}', made)
        shards.append(load_shard(tmp_path / f'{i}'))
    (tmp_path / 'c').mkdir()
    names = write_table(tmp_path / 'c', [(0, rows[:2], shards[0]), (7, rows[2:], shards[1])], ['text'])
    index = {name: array.tolist() for name, array in map_arrays(tmp_path / 'c/index.safetensors').items()}
    lines = (tmp_path / 'c/clips.jsonl').read_bytes().splitlines(keepends=True)
    assert names == {'speakers': ['b', 'a'], 'languages': ['en', 'de']} and [*map(json.loads, lines)] == rows
    assert index.items() >= {
        'row': [0, len(lines[0]), len(lines[0] + lines[1])], 'shard': [0, 0, 7], 'speaker': [0, 1, 0],
        'language': [0, 0, 1], 'text_length': [3, 1, 2], 'text_start': [0, 3, 4], 'codes_length': [4] * 3,
        'codes_start': [0] * 3, 'mel_start': [0] * 3, 'samples': [4000] * 3, 'source': [0, 0, 1]}.items()
    assert len(list(records(shards[0], ['text']))) == 2 and 'ä'.encode() in lines[0]
    with pytest.raises(ValueError, match='lengths of codes do not add up'): list(records(shards[0], ARRAYS))

def test_fingerprints_are_the_same_in_every_release(tmp_path):
    "Else every cache that was made before would be refused."
    data = b''.join(len(part).to_bytes(8, 'little') + part for part in (b'ab', b'c'))
    assert digest(b'ab', b'c') == int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), 'little')
    facts = {'a': 'ü', 'b': [1]}
    sha = cache_module.fingerprint(facts)
    assert cache_module._manifest_text(facts) == f'{{\n "a": "ü",\n "b": [\n  1\n ],\n "sha": "{sha}"\n}}\n'
    (tmp_path / 'x').write_bytes(b'abc')
    assert file_sha(tmp_path / 'x') == hashlib.sha256(b'abc').hexdigest()[:16]

def test_only_a_free_folder_or_a_cache_is_written_to(tmp_path):
    places = {name: tmp_path / name for name in ('nowhere', 'empty', 'cache', 'file', 'music')}
    for name in ('empty', 'cache', 'music'): places[name].mkdir()
    for path in (places['file'], places['music'] / 'a'): path.write_text('x')
    keys = 'format', 'key', 'mode', 'keys', 'shards', 'files', 'sha'
    (places['cache'] / 'manifest.json').write_text(json.dumps(dict.fromkeys(keys)))
    (places['music'] / 'manifest.json').write_text('{"format": 1, "files": {"a": {}}}')   # of somebody else
    for name in ('nowhere', 'empty', 'cache'): check_cache_folder(places[name])
    for name in ('file', 'music'):
        with pytest.raises(UserError, match=f'{name}: .*holds something'):
            check_cache_folder(places[name])

def test_a_cache_that_was_begun_is_mentioned(tmp_path):
    said = []
    for _ in range(2):
        with pytest.raises(UserError, match='c: holds no cache') as e: read_manifest(tmp_path / 'c')
        said.append(str(e.value).endswith(f' {work_path(tmp_path / "c")} keeps what an earlier run '
                                          'finished.'))
        work_path(tmp_path / 'c').mkdir(exist_ok=True)
    assert said == [False, True] and work_path(tmp_path / 'c') == tmp_path / 'c.work'

def test_where_a_recording_lies(prepared, corpus):
    cache = Cache(prepared.folder, in_memory=False)
    assert cache.wav_path(0) == corpus / 'wavs/low-0.wav'
    cache.clips = [{'path': 'wavs/low-0.wav', 'wav': 'audio/x.wav'}]
    assert cache.wav_path(0) == cache.folder / 'audio/x.wav'

def test_a_shard_with_other_arrays_is_named(prepared, tmp_path):
    shutil.copytree(prepared.folder, tmp_path / 'c')
    safetensors.numpy.save_file({'x': np.zeros(3)}, tmp_path / 'c/shard-00001.safetensors')
    with pytest.raises(UserError, match='shard-00001'): Cache(tmp_path / 'c')

def test_a_flipped_byte_is_noticed(prepared, tmp_path):
    shutil.copytree(prepared.folder, tmp_path / 'c')
    path = tmp_path / 'c/shard-00001.safetensors'
    data = bytearray(path.read_bytes())
    data[-50] ^= 0xff
    path.write_bytes(data)
    with pytest.raises(UserError, match='shard-00001'): Cache(tmp_path / 'c')

def test_mapped_arrays_are_those_in_memory(prepared):
    mapped = Cache(prepared.folder, in_memory=False)
    for kind, dtype in ARRAYS.items():
        pairs = [[cache.array(kind, i) for cache in (prepared, mapped)] for i in (*range(14), -1)]
        assert all(np.array_equal(one, other) and one.dtype == other.dtype == dtype for one, other in pairs)
    assert list(mapped.clips) == list(prepared.clips) and mapped.clips[-1] == mapped.clips[13]
    assert [mapped.speakers[n] for n in mapped.speaker] == [c['speaker'] for c in mapped.clips]
    assert (mapped.samples / 22050).round(4).tolist() == [c['seconds'] for c in mapped.clips]
    with pytest.raises(IndexError): mapped.clips[14]

def test_more_shards_than_files_may_be_open(tmp_path):
    import resource
    many, limit = 300, resource.getrlimit(resource.RLIMIT_NOFILE)
    lines = [write_shard(tmp_path / f'{i}', [record(i)]) for i in range(many)]
    class Mapped(Cache):
        __init__, __len__, check_unchanged = object.__init__, lambda self: many, lambda self: None
    cache = Mapped()
    cache.folder, cache.manifest = tmp_path, {'shards': lines, 'stored': ['codes']}
    cache.codes_start, cache.codes_length = np.arange(many) * 4, np.full(many, 4)
    cache._open()
    used = len(os.listdir('/proc/self/fd')) if os.path.isdir('/proc/self/fd') else 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 270, limit[1]))
    try: assert [int(cache.array('codes', i)[0]) for i in range(many)] == [i % 32 for i in range(many)]
    finally: resource.setrlimit(resource.RLIMIT_NOFILE, limit)

def test_more_shards_than_files_may_be_open_are_read_in_a_graph(tmp_path):
    import resource
    many, limit = 300, resource.getrlimit(resource.RLIMIT_NOFILE)
    lines = [write_shard(tmp_path / f'{i}', [record(i)]) for i in range(many)]
    cache = SimpleNamespace(folder=tmp_path, manifest={'shards': lines}, codes_start=np.arange(many) * 4)
    used = len(os.listdir('/proc/self/fd')) if os.path.isdir('/proc/self/fd') else 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 100, limit[1]))
    try: rows = InFiles(cache, ('codes',))('codes', np.arange(many) * 4, np.full(many, 4), 4)
    finally: resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert rows[:, 0].numpy().tolist() == [i % 32 for i in range(many)]

def record(i, **changes):
    made = dict(codes=np.full(4, i % 32), text=np.arange(3), mel=np.ones((5, 80)), codes_length=4,
                text_length=3, mel_length=5,
                samples=4000, source=i, sound=0)
    return made | changes

def hollow(cache, folder, clips):
    "A copy of a cache whose index says that there are so many clips; most of the file is a hole."
    shutil.copytree(cache.folder, folder)
    head, end = {}, 0
    for name, array in cache.index.items():
        dtype = {v: k for k, v in DTYPES.items()}[array.dtype.type]
        head[name] = {'dtype': dtype, 'shape': [clips],
                      'data_offsets': [end, end := end + clips * array.itemsize]}
    text = json.dumps(head).encode()
    text += b' ' * (-len(text) % 8)
    with open(folder / 'index.safetensors', 'wb') as f:
        f.write(len(text).to_bytes(8, 'little') + text)
        f.truncate(8 + len(text) + end)
    return folder

def test_ten_million_clips_are_opened_without_reading_them(prepared, tmp_path):
    "What is read of the index does not grow with it: the pages of the file that are touched."
    import psutil
    folder = hollow(prepared, tmp_path / 'c', 10_000_000)
    facts = {k: v for k, v in prepared.manifest.items() if k not in ('format', 'files')}
    with pytest.MonkeyPatch.context() as patch:   # its fingerprint would take a second
        patch.setattr(cache_module, 'file_sha', lambda path: '0' * 16)
        write_manifest(folder, facts)
    process = psutil.Process()
    before = process.memory_info().rss
    cache = Cache(folder, in_memory=False)
    assert len(cache) == 10_000_000 and process.memory_info().rss - before < 20e6
    assert cache.codes_length[5_000_000] == 0 and process.memory_info().rss - before < 20e6


# --- verifying ------------------------------------------------------------------------------------

@pytest.fixture
def copy(prepared, tmp_path):
    shutil.copytree(prepared.folder, tmp_path / 'c')
    return tmp_path / 'c'

def test_a_whole_cache_has_no_problem(prepared):
    seen = []
    checked, problems = verify_cache(prepared.folder, lambda *done: seen.append(done))
    assert problems == [] and checked == 14 + sum(p.suffix != '.part' for p in prepared.folder.iterdir()) - 3
    assert seen == [(5, 14), (10, 14), (14, 14)]

def test_every_flipped_bit_is_found(copy):
    "Drawn at random; from each file as many."
    rng, missed = np.random.default_rng(0), []
    for path in sorted(copy.iterdir()):
        whole = path.read_bytes()
        for _ in range(20):
            broken, place, bit = bytearray(whole), rng.integers(len(whole)), int(rng.integers(8))
            broken[place] ^= 1 << bit
            path.write_bytes(broken)
            try: found = verify_cache(copy)[1]
            except UserError: found = ['refused']
            if not any(p == 'refused' or p['file'] == path.name for p in found):
                missed.append((path.name, int(place), bit))
        path.write_bytes(whole)
    assert not missed and verify_cache(copy)[1] == []

@pytest.mark.parametrize('name', ['codes_length', 'samples', 'source', 'check'])
def test_the_sign_of_a_number_is_found(copy, name):
    path = copy / 'shard-00001.safetensors'
    shard = {k: np.array(a) for k, a in map_arrays(path).items()}
    data = bytearray(path.read_bytes())
    data[data.index(shard[name].tobytes()) + shard[name].itemsize - 1] ^= 128
    path.write_bytes(data)
    assert {p['file'] for p in verify_cache(copy)[1]} == {path.name}

def test_every_bit_of_a_head_is_found(copy):
    "Where a flip changes the sense of what follows."
    path = copy / 'shard-00001.safetensors'
    whole = path.read_bytes()
    for place in range(0, 8 + int.from_bytes(whole[:8], 'little'), 9):
        broken = bytearray(whole)
        broken[place] ^= 1 << place % 7
        path.write_bytes(broken)
        assert {p['file'] for p in verify_cache(copy)[1]} == {path.name}, place

@pytest.mark.parametrize('name', PARTS[1:] + ['dvae.safetensors', 'report.json', 'report.txt'])
@pytest.mark.parametrize('how', ['missing', 'cut off', 'empty', 'longer'])
def test_what_is_missing_or_cut_off_is_found(copy, name, how):
    data = (copy / name).read_bytes()
    if how == 'missing': (copy / name).unlink()
    else:
        (copy / name).write_bytes({'cut off': data[:len(data) // 2], 'empty': b'',
                                   'longer': data + b'x'}[how])
    problems = verify_cache(copy)[1]
    assert {p['file'] for p in problems} == {name}
    assert how != 'missing' or problems[0]['problem'] == 'is missing'

@pytest.mark.parametrize('content', [b'', b'{', b'[]', b'{"format": 1}', b'null'])
def test_a_manifest_that_is_none_is_a_problem(copy, content):
    (copy / 'manifest.json').write_bytes(content)
    checked, (problem,) = verify_cache(copy)
    assert checked == 1 and (problem['file'], problem['clip']) == ('manifest.json', '')
    with pytest.raises(UserError, match='manifest.json'): Cache(copy)

def test_what_belongs_to_nothing_is_named(copy):
    (copy / 'notes.txt').write_text('mine')
    (copy / 'audio').mkdir()
    (copy / 'audio' / 'x.wav').write_bytes(b'')
    assert [(p['file'], p['problem'])
            for p in verify_cache(copy)[1]] == [('audio/x.wav', 'belongs to nothing'),
                                                ('notes.txt', 'belongs to nothing')]

def test_in_a_cache_without_clips_every_shard_belongs_to_nothing(copy, tmp_path):
    facts = {k: v for k, v in read_manifest(copy).items() if k not in ('format', 'files')}
    write_table(copy, [])
    for i in range(3): (copy / f'shard-0000{i}.safetensors').rename(tmp_path / f'shard-0000{i}.safetensors')
    write_manifest(copy, facts | {'shards': []})
    for i in range(3): (tmp_path / f'shard-0000{i}.safetensors').rename(copy / f'shard-0000{i}.safetensors')
    assert [p['file'] for p in verify_cache(copy)[1]] == [f'shard-0000{i}.safetensors' for i in range(3)]

def test_recordings_of_a_cache_are_checked_one_by_one(tmp_path):
    for name in 'ab': (tmp_path / name).write_bytes(b'sound')
    names = 'a', 'none', 'b', 'gone', '../out'
    rows = [{'id': name} | ({} if name == 'none' else {'wav': name}) for name in names]
    found = cache_module._check_sound(tmp_path, rows, [digest(b'sound'), 0, digest(b'sound') + 1, 0, 0])
    assert found[:2] == [('b', 'b', 'is not what was written'), ('gone', 'gone', 'is missing')]
    ((*place, problem),) = found[2:]
    assert place == ['../out', '../out'] and 'leads out of this folder' in problem

def test_a_clip_is_named_by_its_number_where_the_table_is_lost(copy):
    path, mel = copy / 'shard-00001.safetensors', Cache(copy).array('mel', 7).tobytes()
    path.write_bytes(path.read_bytes().replace(mel, mel[::-1]))
    (copy / 'clips.jsonl').unlink()
    problems = verify_cache(copy)[1]
    assert [(p['file'], p['clip']) for p in problems] == [('clips.jsonl', ''), (path.name, 'record 7')]

WRONG = {'NaN': ({'mel': np.full((5, 80), np.nan)}, 'not finite'),
         'infinite': ({'mel': np.full((5, 80), np.inf)}, 'not finite'),
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

def test_another_kind_of_numbers_is_found(copy):
    path, facts = copy / 'shard-00001.safetensors', read_manifest(copy)
    shard = dict(map_arrays(path))
    for name, array in (('codes', shard['codes'].astype(np.int32)), ('mel', shard['mel'].ravel()),
                        ('check', None)):
        arrays = {k: np.array(v) for k, v in (shard | {name: array}).items() if v is not None}
        path.unlink()
        safetensors.numpy.save_file(arrays, path)
        facts['shards'][1]['sha'] = file_sha(path)
        write_manifest(copy, {k: v for k, v in facts.items() if k not in ('format', 'files')})
        (found,) = verify_cache(copy)[1]
        assert found['file'] == path.name and name in found['problem']

def test_the_key_follows_from_what_goes_in(small):
    one = content_keys(small, 'a', 'b', np.ones(80))
    # that of caches which were made before the precision was a part of it
    audio = {k: v for k, v in small.model.audio.model_dump().items() if not k.endswith('_n_fft')}
    known = cache_module.fingerprint(1, audio, small.model.audio.dvae_n_fft, 'a')
    assert one['codes'] == known and 'precision' not in one
    half = content_keys(small, 'a', 'b', np.ones(80), 'bfloat16')
    assert half['codes'] != one['codes'] and half['precision'] == 'bfloat16'
    assert {k: v for k, v in half.items() if k not in ('codes', 'precision')} == {
        k: v for k, v in one.items() if k != 'codes'}
    assert one == content_keys(small.replace(training={'steps': 5}), 'a', 'b', np.ones(80))
    changed = {'dvae': content_keys(small, 'x', 'b', np.ones(80)),
               'text': content_keys(small, 'a', 'x', np.ones(80)),
               'stats': content_keys(small, 'a', 'b', np.full(80, 2.))}
    for name, value in (('dvae_n_fft', 4096), ('reference_n_fft', 4096), ('hop_length', 128)):
        changed[name] = content_keys(small.replace(model={'audio': {name: value}}), 'a', 'b', np.ones(80))
    differ = {name: {k for k in ARRAYS if keys[k] != one[k]} for name, keys in changed.items()}
    assert differ == {'dvae': {'codes'}, 'text': {'text'}, 'stats': {'mel'}, 'dvae_n_fft': {'codes'},
                      'reference_n_fft': {'mel'}, 'hop_length': {'codes', 'mel'}}
    assert one == content_keys(small, 'a', 'b', one['stats'])

@pytest.mark.parametrize('kind', ['nowhere', 'a file', 'empty'])
def test_what_is_no_cache_is_named_with_the_remedy(tmp_path, kind):
    path = tmp_path / 'c'
    if kind == 'a file': path.write_text('')
    if kind == 'empty': path.mkdir()
    with pytest.raises(UserError, match='c: holds no cache; make one with xtts-nb prepare'): Cache(path)
