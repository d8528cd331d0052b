"Bad input of every kind: dropped, counted and named, or refused in one sentence; a cache is there whole or not at all."
import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
import soundfile

from xtts_nb.audio import log_mel, save_audio, synthetic_voice
from xtts_nb.cache import Cache, ClipEncoder, check_cache_folder, mel_sample, prepare
from xtts_nb.config import UserError
from xtts_nb.corpora import Dropped, read_corpus
from xtts_nb.recordings import read_audio
from xtts_nb.text import train_tokenizer

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

def tree(folder): return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file()}


# --- sound ---------------------------------------------------------------------------------------------------------

SOUND = {'not audio': 'not readable as audio', 'empty file': 'not readable as audio', 'no samples': '0 samples', 'nan': 'NaN',
         'too short': 'shorter than data.min_seconds', 'too long': 'longer than data.max_seconds'}

@pytest.fixture
def mixed(make):
    "Three good clips and one of every bad kind."
    folder = make([f'low-{i}|aa bb|aa bb|low|en' for i in range(3)] + [f'{k}|aa|aa|low|en' for k in SOUND],
                  extra={'too short': np.zeros(2000), 'too long': np.zeros(22050 * 12), 'no samples': np.zeros(0)})
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
    assert json.loads((tmp_path / 'out/report.json').read_text()) == report
    assert [c['id'] for c in Cache(tmp_path / 'out').clips] == ['low-0', 'low-1', 'low-2']

@pytest.mark.parametrize('rate, works', [(0.66, False), (0.67, True)])
def test_more_dropped_clips_than_allowed_is_an_error(mixed, small, dvae, tmp_path, rate, works):
    config = small.replace(data={'max_drop_rate': rate})   # 6 of 9
    if works:
        assert prepare(mixed, tmp_path / 'out', config, dvae)['clips'] == 3
        return
    with pytest.raises(UserError, match='6 of 9 clips cannot be used, more than data.max_drop_rate.*not audio') as e:
        prepare(mixed, tmp_path / 'out', config, dvae)
    assert str(mixed) in str(e.value) and not any(tmp_path.glob('out*'))

@pytest.mark.parametrize('rows', [['nobody|a|a', 'noone|a|a'], ['low-0'], ['too long|aa|aa|low|en']])
def test_no_usable_clip_is_an_error_whatever_is_allowed(make, small, dvae, tmp_path, rows):
    folder = make(rows, extra={'too long': np.zeros(22050 * 12)})
    with pytest.raises(UserError, match='none of the . clips can be used \\('):
        prepare(folder, tmp_path / 'out', small.replace(data={'max_drop_rate': 1.}), dvae)
    assert not any(tmp_path.glob('out*'))

def test_a_drop_rate_of_zero_takes_a_clean_corpus_only(make, small, dvae, tmp_path):
    config = small.replace(data={'max_drop_rate': 0.})
    assert prepare(make([LINE]), tmp_path / 'a', config, dvae)['dropped'] == []
    with pytest.raises(UserError, match='1 of 2'): prepare(make([LINE, 'nobody|a|a']), tmp_path / 'b', config, dvae)

def test_what_the_model_cannot_take_is_dropped(make, small, dvae, tmp_path):
    tokenizer = train_tokenizer(['aa bb'], ['en'], 48)
    folder = make([LINE, 'low-1|Ж aa ?|Ж aa ?|low|en', 'low-2|aa|aa|low|de', f'long|{"a" * 90}|{"a" * 90}|low|en',
                   'codes|aa|aa|low|en'],
                  extra={'long': synthetic_voice(1.), 'codes': synthetic_voice(2.5)})
    report = prepare(folder, tmp_path / 'out', small.replace(data={'max_drop_rate': 0.9}), dvae, tokenizer)
    dropped = {d['id']: d['reason'] for d in report['dropped']}
    assert dropped['low-1'] == 'the tokenizer does not know ? ж' and 'no language de' in dropped['low-2']
    assert 'tokens, more than 40' in dropped['long'] and '54 codes, more than model.gpt.max_audio_codes 48' == dropped['codes']
    assert report['clips'] == 1

def test_a_clip_too_short_for_a_frame_is_dropped_even_if_allowed(make, small, dvae, tmp_path):
    folder = make([LINE, 'tiny|aa|aa|low|en', 'one|aa|aa|low|en'], extra={'tiny': synthetic_voice(1.)[:300], 'one': np.ones(1)})
    config = small.replace(data={'min_seconds': 0., 'max_drop_rate': 0.9})
    report = prepare(folder, tmp_path / 'out', config, dvae)
    assert all(Cache(tmp_path / 'out').mel_length > 0) and report['clips'] + len(report['dropped']) == 3

def test_mels_to_train_on(corpus, mixed, small):
    clips, seen = read_corpus(corpus)[0], []
    mels = mel_sample(clips, small, progress=lambda *done: seen.append(done))
    assert mels.shape[1] == 80 and seen == [(i, 14) for i in range(1, 15)]
    assert np.array_equal(mels, mel_sample(clips, small)) and len(mel_sample(clips, small, seconds=1.)) < len(mels)
    good = [c for c in read_corpus(mixed)[0] if c.id not in SOUND]
    assert len(mel_sample(read_corpus(mixed)[0], small)) == len(mel_sample(good, small))
    with pytest.raises(UserError, match='none of the 6 clips can be used'):
        mel_sample([c for c in read_corpus(mixed)[0] if c.id in SOUND], small)


# --- whole or not at all -------------------------------------------------------------------------------------------

@pytest.mark.parametrize('error', [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize('at', [1, 6, 14])
@pytest.mark.parametrize('before', [False, True])
def test_an_interrupted_prepare_leaves_what_was_there(corpus, small, dvae, prepared, tmp_path, error, at, before):
    if before: shutil.copytree(prepared.folder, tmp_path / 'out')
    kept = tree(tmp_path)
    def stop(done, total):
        if done == at: raise error
    with pytest.raises(error): prepare(corpus, tmp_path / 'out', small, dvae, shard_clips=2, progress=stop)
    assert tree(tmp_path) == kept and len(list(tmp_path.iterdir())) == before

def test_progress_counts_every_row(mixed, small, dvae, tmp_path):
    seen = []
    prepare(mixed, tmp_path / 'out', small.replace(data={'max_drop_rate': 0.9}), dvae, progress=lambda *a: seen.append(a))
    assert seen == [(i, 9) for i in range(1, 10)]

@pytest.mark.parametrize('kind', ['a file', 'notes', 'a hidden file'])
def test_foreign_content_is_refused_and_kept(make, small, dvae, tmp_path, kind):
    out = tmp_path / 'out'
    if kind == 'a file': out.write_text('mine')
    else: out.mkdir(); (out / {'notes': 'notes.txt', 'a hidden file': '.git'}[kind]).write_text('mine')
    kept = tree(tmp_path)
    with pytest.raises(UserError, match='out: holds something that is not a cache; choose another folder'):
        prepare(make([LINE]), out, small, dvae)
    assert {k: v for k, v in tree(tmp_path).items() if not k.startswith('corpus')} == kept
    with pytest.raises(UserError): check_cache_folder(out)

def test_an_older_cache_is_replaced_whole(make, corpus, small, dvae, tmp_path):
    prepare(corpus, tmp_path / 'out', small, dvae, shard_clips=2)
    assert len(list((tmp_path / 'out').glob('shard-*'))) == 7
    prepare(make([LINE]), tmp_path / 'out', small, dvae)
    assert [c['id'] for c in Cache(tmp_path / 'out').clips] == ['low-0'] and len(list((tmp_path / 'out').glob('shard-*'))) == 1

def test_an_empty_folder_may_hold_the_cache(make, small, dvae, tmp_path):
    (tmp_path / 'out').mkdir()
    assert prepare(make([LINE]), tmp_path / 'out', small, dvae)['clips'] == 1

@pytest.mark.parametrize('workers', [1, 4])
def test_the_same_corpus_gives_the_same_bytes(corpus, small, dvae, prepared, tmp_path, workers):
    prepare(corpus, tmp_path / 'out', small.replace(data={'num_workers': workers}), dvae, shard_clips=5)
    mine, theirs = tree(tmp_path / 'out'), tree(prepared.folder)
    assert set(mine) == set(theirs)
    assert {k for k in mine if mine[k] != theirs[k]} <= {'config.yaml'}   # it names the workers

def test_a_corpus_of_another_order_has_the_same_clips(corpus, small, dvae, prepared, tmp_path):
    folder = tmp_path / 'corpus'
    shutil.copytree(corpus, folder)
    lines = (folder / 'metadata.csv').read_text().splitlines()
    (folder / 'metadata.csv').write_text('\n'.join(reversed(lines)))
    prepare(folder, tmp_path / 'out', small, dvae, prepared.tokenizer)
    other = Cache(tmp_path / 'out')
    for i, clip in enumerate(other.clips):
        j = next(j for j, c in enumerate(prepared.clips) if c['id'] == clip['id'])
        assert all(np.array_equal(other.array(n, i), prepared.array(n, j)) for n in ('codes', 'text', 'mel'))

@pytest.mark.parametrize('change', [{'model': {'audio': {'f_max': 7000.}}}, {'model': {'dvae': {'codes': 16}}}])
def test_the_key_tells_caches_apart(corpus, small, dvae, prepared, tmp_path, change):
    from xtts_nb.dvae import DVAE
    config = small.replace(**change)
    prepare(corpus, tmp_path / 'out', config, DVAE(config), prepared.tokenizer)
    assert Cache(tmp_path / 'out').manifest['key'] != prepared.manifest['key']


# --- reading it again ----------------------------------------------------------------------------------------------

def test_arrays_are_those_of_the_clips(corpus, small, dvae, stats, prepared):
    encoder, (clips, _) = ClipEncoder(small, dvae, prepared.tokenizer), read_corpus(corpus)
    assert len(prepared) == len(clips) == 14 and len(prepared.manifest['shards']) == 3
    for i, (clip, wav) in enumerate(read_audio(clips, small)):
        made = encoder(clip, wav)
        assert not isinstance(made, Dropped) and prepared.clips[i]['id'] == clip.id
        assert np.array_equal(prepared.array('codes', i), made['codes']) and list(prepared.array('text', i)) == made['text']
        assert np.array_equal(prepared.array('mel', i), made['mel'].astype(np.float16))
        assert len(made['codes']) == -(-len(wav) // 1024) and len(made['mel']) == 1 + len(wav) // 256
        voice = log_mel(wav, 2048).numpy() / stats
        assert np.abs(prepared.array('mel', i).astype(np.float32) - voice).max() < 2e-3

def test_the_dvae_of_the_cache_makes_its_codes(corpus, small, prepared):
    from xtts_nb.dvae import load_dvae
    again = ClipEncoder(small, load_dvae(prepared.folder / 'dvae.safetensors', prepared.config), prepared.tokenizer)
    clip, wav = next(read_audio(read_corpus(corpus)[0], small))
    assert np.array_equal(again(clip, wav)['codes'], prepared.array('codes', 0))

PARTS = ['manifest.json', 'clips.jsonl', 'tokenizer.json', 'config.yaml', 'shard-00001.safetensors']

@pytest.mark.parametrize('name', PARTS)
def test_a_missing_part_is_named(prepared, tmp_path, name):
    shutil.copytree(prepared.folder, tmp_path / 'c')
    (tmp_path / 'c' / name).unlink()
    with pytest.raises(UserError, match='holds no cache' if name == 'manifest.json' else name): Cache(tmp_path / 'c')

@pytest.mark.parametrize('name', PARTS[:3] + PARTS[4:])
def test_a_part_cut_off_is_named(prepared, tmp_path, name):
    shutil.copytree(prepared.folder, tmp_path / 'c')
    path = tmp_path / 'c' / name
    path.write_bytes(path.read_bytes()[:path.stat().st_size // 2 + 10])
    with pytest.raises(UserError, match=name): Cache(tmp_path / 'c')

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

@pytest.mark.parametrize('kind', ['nowhere', 'a file', 'empty'])
def test_what_is_no_cache_is_named_with_the_remedy(tmp_path, kind):
    path = tmp_path / 'c'
    if kind == 'a file': path.write_text('')
    if kind == 'empty': path.mkdir()
    with pytest.raises(UserError, match='c: holds no cache; make one with xtts-nb prepare'): Cache(path)
