"Repair: derived parts are restored byte for byte, others give a reason, and nothing else changes."
import shutil
import subprocess

import numpy as np
import pytest
import soundfile

from fake_dvae import Fake, load
from process import Forked, tree
from xtts_nb.data import cache as cache_module
from xtts_nb.data.audio import save_audio, synthetic_voice
from xtts_nb.data.cache import Cache, file_sha, read_manifest, verify_cache, write_manifest
from xtts_nb.config import UserError
from xtts_nb.files import PART
from xtts_nb.data.prepare import (
    ClipEncoder, merge_caches, prepare, verify_and_fix_cache, work_folder)
from xtts_nb.data.text import train_tokenizer


def flip(path, place, bit=0):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.unlink()   # it may be linked
    path.write_bytes(data)

FIXABLE = ['clips.jsonl', 'index.safetensors', 'report.json', 'report.txt', 'shard-00000.safetensors',
           'shard-00002.safetensors']

@pytest.mark.parametrize('how', ['flipped', 'cut off', 'missing'])
def test_what_follows_from_the_corpus_is_mended(copy, straight, how):
    for name in FIXABLE:
        path = copy / name
        if how == 'flipped': flip(path, path.stat().st_size // 2)
        elif how == 'cut off': path.write_bytes(path.read_bytes()[:40])
        else: path.unlink()
        result = verify_and_fix_cache(copy, fix=True, load=load)
        assert result['bad'] == result['fixed'] == 1 and result['failed'] == 0, (name, result)
        assert tree(copy) == tree(straight)

def test_all_of_it_at_once(copy, straight):
    for name in FIXABLE[1:]: flip(copy / name, (copy / name).stat().st_size // 2)
    result = verify_and_fix_cache(copy, fix=True, load=load)
    assert result['bad'] == result['fixed'] == 5 and tree(copy) == tree(straight)

def test_only_the_damaged_record_is_encoded(copy, straight, calls):
    shard = copy / 'shard-00001.safetensors'
    flip(shard, shard.read_bytes().index(Cache(straight).array('mel', 7).tobytes()) + 5)
    result = verify_and_fix_cache(copy)
    assert result == {'checked': verify_cache(copy)[0], 'bad': 1, 'fixed': 0, 'failed': 0, 'problems': [
        {'file': 'shard-00001.safetensors', 'clip': 'high-0', 'problem': 'is not what was written',
         'fixed': False}]}
    assert verify_and_fix_cache(copy, fix=True, load=load)['fixed'] == 1
    assert calls == {'codes': 1, 'mel': 1} and tree(copy) == tree(straight)

@pytest.mark.parametrize('kind, words', [('gone', 'low-1.wav is missing'), ('another', 'has changed since')])
def test_what_cannot_be_mended_says_why(mine, small, tokenizer, tmp_path, kind, words):
    prepare(mine, tmp_path / 'out', small, Fake(), tokenizer, shard_clips=5)
    shard = tmp_path / 'out' / 'shard-00000.safetensors'
    flip(shard, shard.read_bytes().index(Cache(tmp_path / 'out').array('mel', 1).tobytes()) + 5)
    before = shard.read_bytes()
    if kind == 'gone': (mine / 'wavs' / 'low-1.wav').unlink()
    if kind == 'another': save_audio(mine / 'wavs' / 'low-1.wav', synthetic_voice(0.9))
    result = verify_and_fix_cache(tmp_path / 'out', fix=True, load=load)
    assert (result['bad'], result['fixed'], result['failed']) == (1, 0, 1)
    assert words in result['problems'][0]['reason']
    assert shard.read_bytes() == before

def test_without_the_index_the_shard_tells_that_a_recording_has_changed(mine, small, tokenizer, tmp_path):
    out = tmp_path / 'out'
    prepare(mine, out, small, Fake(), tokenizer, shard_clips=5)
    shard = out / 'shard-00000.safetensors'
    flip(shard, shard.read_bytes().index(Cache(out).array('mel', 1).tobytes()) + 5)
    (out / 'index.safetensors').unlink()
    save_audio(mine / 'wavs' / 'low-1.wav', synthetic_voice(0.9))
    result = verify_and_fix_cache(out, fix=True, load=load)
    assert any('low-1.wav: has changed since' in p.get('reason', '') for p in result['problems'])

def test_a_corpus_that_was_moved(mine, small, tokenizer, tmp_path):
    prepare(mine, tmp_path / 'out', small, Fake(), tokenizer, shard_clips=5)
    whole = tree(tmp_path / 'out')
    (tmp_path / 'out' / 'shard-00001.safetensors').unlink()
    mine.rename(tmp_path / 'there')
    assert verify_and_fix_cache(tmp_path / 'out', fix=True, load=load)['failed'] == 1
    assert verify_and_fix_cache(tmp_path / 'out', fix=True, source=tmp_path / 'there',
                                load=load)['fixed'] == 1
    now = tree(tmp_path / 'out')   # the manifest names the new place
    assert {name for name in now | whole if now[name] != whole[name]} == {'manifest.json'}

@pytest.mark.parametrize('name', ['dvae.safetensors', 'config.yaml', 'manifest.json'])
def test_what_the_corpus_does_not_hold_is_a_failure(copy, name):
    flip(copy / name, 200)
    result = verify_and_fix_cache(copy, fix=True, load=load)
    assert result['failed'] == result['bad'] == 1
    assert result['problems'][0]['file'] == name
    assert result['problems'][0]['reason']

def test_without_its_dvae_a_cache_is_not_touched_and_with_it_all_is_repaired(copy, straight):
    for name in ('dvae.safetensors', 'index.safetensors'): (copy / name).unlink()
    kept = tree(copy)
    result = verify_and_fix_cache(copy, fix=True, load=load)
    assert result['failed'] == 2 and 'the DVAE of the cache is damaged' in result['problems'][0]['reason']
    assert tree(copy) == kept
    shutil.copy(straight / 'dvae.safetensors', copy)
    assert verify_and_fix_cache(copy, fix=True, load=load)['fixed'] == 1 and tree(copy) == tree(straight)

def test_the_corpus_is_not_needed_for_what_follows_from_the_shards(mine, small, tokenizer, tmp_path):
    out = tmp_path / 'out'
    prepare(mine, out, small, Fake(), tokenizer, page=lambda report, path: path.write_text('drawn'))
    whole = tree(out)
    shutil.rmtree(mine)
    (out / 'index.safetensors').unlink()
    assert verify_and_fix_cache(out, fix=True, load=load)['fixed'] == 1 and tree(out) == whole

def test_a_cache_that_another_run_prepares_is_not_repaired(copy, straight):
    flip(copy / 'report.json', 9)
    program = ('import sys; from xtts_nb.data.prepare import verify_and_fix_cache; '
               'verify_and_fix_cache(sys.argv[1], fix=True, load=1)')
    with work_folder(copy):
        other = Forked(program, copy, stderr=subprocess.PIPE, text=True)
        assert 'is being prepared by another run' in other.communicate()[1] and other.returncode
    assert verify_and_fix_cache(copy, fix=True, load=load)['fixed'] == 1 and tree(copy) == tree(straight)

@pytest.mark.parametrize('learned', [True, False])
def test_a_tokenizer_is_learned_again_if_it_was_learned_here(corpus, small, tmp_path, learned):
    prepare(corpus, tmp_path / 'out', small, Fake(),
            None if learned else train_tokenizer(['abcdefgh'], ['en'], 40))
    whole = tree(tmp_path / 'out')
    flip(tmp_path / 'out' / 'tokenizer.json', 200)
    result = verify_and_fix_cache(tmp_path / 'out', fix=True, load=load)
    if learned: assert result['fixed'] == 1 and tree(tmp_path / 'out') == whole
    else: assert result['failed'] == 1 and 'was not learned from' in result['problems'][0]['reason']

@pytest.mark.parametrize('name, lost, reason', [
    ('dvae.safetensors', True, 'the DVAE of the cache is damaged too'),
    ('tokenizer.json', False, 'the tokenizer of the cache is damaged'),
    ('tokenizer.json', True, 'the tokenizer of the cache is damaged')])
def test_a_clip_is_not_encoded_without_what_encoded_the_others(corpus, small, tmp_path, name, lost, reason):
    out, foreign = tmp_path / 'out', train_tokenizer(['abcdefgh'], ['en'], 40)   # learned from another corpus
    prepare(corpus, out, small, Fake(), foreign)
    if lost: (out / name).unlink()
    else: (out / name).write_text((out / name).read_text().replace('"[STOP]"', ' "[STOP]"'))
    (out / 'shard-00000.safetensors').unlink()
    result = verify_and_fix_cache(out, fix=True, load=load)
    reasons = {p['file']: p['reason'] for p in result['problems']}
    assert result['failed'] == 2 and reason in reasons['shard-00000.safetensors']

def test_clips_that_were_left_out_and_recordings_of_its_own_are_found_again(mine, small, tokenizer, tmp_path):
    "Clip 2 of the first shard was no sound, clip 3 had to be written as another wav file."
    (mine / 'wavs/low-2.wav').write_text('no sound')
    sound = soundfile.read(mine / 'wavs/low-3.wav')[0]
    soundfile.write(mine / 'wavs/low-3.wav', sound, 22050, subtype='FLOAT')
    out = tmp_path / 'out'
    config = small.replace(data={'preprocessing_mode': 'runtime', 'max_drop_rate': 0.5})
    prepare(mine, out, config, Fake(), tokenizer, shard_clips=5)
    whole, own = tree(out), 'audio/00000-00003.wav'
    for names in ([own], ['clips.jsonl'], ['shard-00000.safetensors'],
                  ['index.safetensors', 'shard-00001.safetensors'],
                  ['report.json', 'shard-00000.safetensors']):
        for name in names: flip(out / name, (out / name).stat().st_size // 2)
        assert verify_and_fix_cache(out, fix=True, load=load)['failed'] == 0, names
        assert tree(out) == whole, names
    soundfile.write(mine / 'wavs/low-3.wav', sound / 2, 22050, subtype='FLOAT')
    flip(out / own, 999)
    (problem,) = verify_and_fix_cache(out, fix=True, load=load)['problems']
    assert problem['file'] == own and not problem['fixed']
    assert 'low-3.wav: has changed since' in problem['reason']

MINE = 'thesis.txt', 'my-voice.wav', 'notes.part', 'index.safetensors.123.part', f'film.0123abcd{PART}'

def test_leftovers_go_and_what_is_not_ours_stays(copy, straight):
    (copy / 'shard-00009.safetensors').write_bytes(b'old')
    for name in ('index.safetensors', 'shard-00009.safetensors'):
        (copy / f'{name}.0123abcd{PART}').write_bytes(b'half')
    for name in MINE: (copy / name).write_text('mine')
    result = verify_and_fix_cache(copy, fix=True, load=load)
    assert (result['bad'], result['fixed'], result['failed']) == (3 + len(MINE), 3, len(MINE))
    assert tree(copy) == tree(straight) | dict.fromkeys(MINE, b'mine')
    assert all(p['fixed'] or p['reason'].startswith(f'{p["file"]}: is not ours') for p in result['problems'])

def test_another_version_makes_it_stale(copy, monkeypatch):
    monkeypatch.setattr(cache_module, 'FEATURES', 99)
    result = verify_and_fix_cache(copy)
    assert [p['problem'] for p in result['problems']] == [f'the {kind} are stale'
                                                          for kind in ('codes', 'text', 'mel')]

def test_a_repair_on_another_processor_is_accepted_where_only_roundings_differ(copy, straight, monkeypatch):
    key, shard, real = Cache(straight).manifest['key'], copy / 'shard-00001.safetensors', ClipEncoder.mel
    monkeypatch.setattr(ClipEncoder, 'mel', lambda self, wav: real(self, wav) * 1.001)
    flip(shard, shard.read_bytes().index(Cache(straight).array('mel', 7).tobytes()) + 5)
    assert verify_and_fix_cache(copy, fix=True, load=load)['fixed'] == 1
    assert Cache(copy).manifest['key'] == key
    assert np.allclose(Cache(copy).array('mel', 7), Cache(straight).array('mel', 7), rtol=2e-3)
    assert not np.array_equal(Cache(copy).array('mel', 7), Cache(straight).array('mel', 7))


# --- names that lead out of the folder ------------------------------------------------------------

@pytest.fixture(scope='module')
def own_sound(corpus, small, tokenizer, tmp_path_factory):
    "A runtime cache that had to write a recording of its own; to be read only."
    home = tmp_path_factory.mktemp('own')
    shutil.copytree(corpus, home / 'corpus')
    first = home / 'corpus' / 'wavs' / 'low-0.wav'
    soundfile.write(first, soundfile.read(first)[0], 22050, subtype='FLOAT')
    prepare(home / 'corpus', home / 'cache', small.replace(data={'preprocessing_mode': 'runtime'}), Fake(),
            tokenizer)
    return home / 'cache'

def seal(folder, files=(), **facts):
    "Write the manifest anew, as somebody does who wants it to be believed."
    kept = {k: v for k, v in read_manifest(folder).items() if k not in ('format', 'files')}
    whole = write_manifest(folder, kept | facts)
    if files:
        (folder / 'manifest.json').write_text(cache_module._manifest_text(whole | {'files': whole['files']
                                                                                   | files}))

def name_a_shard_outside(cache, outside):
    (cache / 'shard-00000.safetensors').rename(outside / 'shard.safetensors')
    shards = read_manifest(cache)['shards']
    seal(cache, shards=[shards[0] | {'file': '../outside/shard.safetensors'}, *shards[1:]])

def name_a_file_outside(cache, outside):
    seal(cache, files={'../outside/thesis.txt': {'bytes': 4, 'sha': file_sha(outside / 'thesis.txt')}})

def name_a_recording_outside(cache, outside):
    table, own = cache / 'clips.jsonl', 'audio/00000-00000.wav'
    (outside / '00-000.wav').write_text('mine')
    # as long as before: the index holds
    table.write_text(table.read_text().replace(own, '../outside/00-000.wav'))
    seal(cache)

def link_the_recordings(cache, outside):
    shutil.rmtree(cache / 'audio')
    (outside / '00000-00000.wav').write_text('mine')
    (cache / 'audio').symlink_to(outside)

def link_a_shard(cache, outside):
    (cache / 'shard-00000.safetensors').rename(outside / 'shard.safetensors')
    (cache / 'shard-00000.safetensors').symlink_to(outside / 'shard.safetensors')

TRICKS = [name_a_shard_outside, name_a_file_outside, name_a_recording_outside, link_the_recordings,
          link_a_shard]
READERS = {'open': lambda cache: Cache(cache).wav_path(0),
           'map': lambda cache: Cache(cache, in_memory=False).wav_path(0),
           'verify': verify_cache,
           'verify --fix': lambda cache: verify_and_fix_cache(cache, fix=True, load=load),
           'merge': lambda cache: merge_caches([cache], cache.with_name('merged'))}

@pytest.mark.parametrize('trick', TRICKS, ids=lambda t: t.__name__)
@pytest.mark.parametrize('reader', READERS)
def test_a_cache_reaches_nothing_outside_its_folder(own_sound, tmp_path, trick, reader):
    cache, outside = tmp_path / 'cache', tmp_path / 'outside'
    shutil.copytree(own_sound, cache)
    outside.mkdir()
    (outside / 'thesis.txt').write_text('mine')
    trick(cache, outside)
    before = tree(outside)
    if reader.startswith('verify'):
        found = READERS[reader](cache)
        problems = found[1] if reader == 'verify' else found['problems']
        assert any('leads out of this folder' in p['problem'] for p in problems)
    else:
        with pytest.raises(UserError, match='leads out of this folder'): READERS[reader](cache)
    assert tree(outside) == before and not (tmp_path / 'merged').exists()

def test_a_linked_folder_of_somebody_else_is_not_tidied(copy, tmp_path):
    (tmp_path / 'music').mkdir()
    (tmp_path / 'music' / 'song.wav').write_text('mine')
    (copy / 'audio').symlink_to(tmp_path / 'music')
    verify_and_fix_cache(copy, fix=True, load=load)
    assert tree(tmp_path / 'music') == {'song.wav': b'mine'}
