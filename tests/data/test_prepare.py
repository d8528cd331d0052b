"Preparing: incremental, deterministic, resumed after a kill; merging parts; repairing damage."
import json
import os
import resource
import shutil
import signal
import subprocess
import time

import numpy as np
import psutil
import pytest
import soundfile
import tensorflow as tf

from fake_dvae import Dying, Fake, largest_file, load, Odd, OnAFullDisk
from process import Forked, server, tree
from xtts_nb.config import UserError
from xtts_nb.data import cache as cache_module
from xtts_nb.data.audio import decode_wav, load_audio, save_audio, synthetic_voice
from xtts_nb.data.cache import Cache, read_manifest, verify_cache, write_manifest
from xtts_nb.data.corpora import read_corpus
from xtts_nb.data.merge import merge_caches
from xtts_nb.data.prepare import ClipEncoder, _choose_mode, encode_corpus, _run_jobs, _work_folder
from xtts_nb.data.repair import verify_and_fix_cache
from xtts_nb.data.text import train_tokenizer
from xtts_nb.files import PART, read_json, write_json

def convert(path, rate=22050, channels=1, subtype='PCM_16', **how):
    soundfile.write(path, np.stack([soundfile.read(path)[0]] * channels, 1), rate, subtype, **how)

def flip(path, place, bit=0):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.unlink()   # it may be linked
    path.write_bytes(data)

# --- nothing twice ------------------------------------------------------------------------------------

CHANGES = {   # what is changed -> how many clips of each kind are made again
    'reference FFT': ({'model': {'audio': {'reference_n_fft': 4096}}}, {}, (0, 0, 14)),
    'FFT of the codes': ({'model': {'audio': {'dvae_n_fft': 2048}}}, {}, (14, 0, 0)),
    'DVAE': ({}, {'dvae': Fake(gain=1.5)}, (14, 0, 0)),
    'constants of the mels': ({}, {'dvae': Fake(stats=4.)}, (14, 0, 14)),
    'tokenizer': ({}, {'tokenizer': train_tokenizer(['abcdefgh aabb'], ['en'], 40)}, (0, 14, 0)),
    'shards': ({}, {'shard_clips': 4}, (0, 0, 0)),
    'limits that leave clips out': ({'data': {'max_seconds': .95, 'max_drop_rate': 1.}}, {}, (0, 0, 0))}

@pytest.mark.parametrize('change', CHANGES)
def test_a_changed_setting_makes_again_what_depends_on_it(
        corpus, small, tokenizer, copy, tmp_path, calls, change):
    sections, arguments, expected = CHANGES[change]
    config, arguments = small.replace(**sections), {'dvae': Fake(), 'tokenizer': tokenizer,
                                                    'shard_clips': 5} | arguments
    made = encode_corpus(corpus, copy, config, **arguments)['made']
    assert (made['codes'], made['text'], made['mel']) == expected
    assert (calls['codes'], calls['mel']) == expected[::2]
    encode_corpus(corpus, tmp_path / 'fresh', config, **arguments)
    assert tree(copy) == tree(tmp_path / 'fresh')

def test_only_changed_rows_and_recordings_are_made(mine, small, tokenizer, tmp_path, calls):
    encode_corpus(mine, tmp_path / 'out', small, Fake(), tokenizer, shard_clips=5)
    text = (mine / 'metadata.csv').read_text().splitlines()
    save_audio(mine / 'wavs' / 'low-0.wav', synthetic_voice(0.9))
    save_audio(mine / 'wavs' / 'new.wav', synthetic_voice(0.9))
    text[1] = 'low-1|hh|hh|low|en'
    (mine / 'metadata.csv').write_text('\n'.join(['new|aa|aa|low|en', *text[:2], *text[3:]]))   # no low-2
    calls |= dict.fromkeys(calls, 0)
    report = encode_corpus(mine, tmp_path / 'out', small, Fake(), tokenizer, shard_clips=5)
    assert report['made'] == {'codes': 2, 'text': 3, 'mel': 2} and calls == {'codes': 2, 'mel': 2}
    encode_corpus(mine, tmp_path / 'fresh', small, Fake(), tokenizer, shard_clips=5)
    assert tree(tmp_path / 'out') == tree(tmp_path / 'fresh')

KINDS_OF_SOUND = [{}, {'subtype': 'FLOAT'}, {'channels': 2}, {'rate': 44100}, {'subtype': 'PCM_24'},
                  {'format': 'WAVEX'}, {'format': 'RF64'}, {'format': 'FLAC'},
                  {'format': 'MP3', 'subtype': None}]

@pytest.fixture
def sounds(mine):
    "The corpus, each recording of another kind, whatever its name says; only the first is plain."
    rows = (mine / 'metadata.csv').read_text().splitlines()[:len(KINDS_OF_SOUND)]
    (mine / 'metadata.csv').write_text('\n'.join(rows))
    for kind, row in zip(KINDS_OF_SOUND, rows): convert(mine / 'wavs' / f'{row.split("|")[0]}.wav', **kind)
    return mine

def stamps(folder):
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.rglob('*') if p.is_file()}

@pytest.mark.parametrize('mode', ['precompute', 'runtime'])
def test_what_is_up_to_date_is_not_touched(sounds, small, tokenizer, tmp_path, calls, mode):
    config, out = small.replace(data={'preprocessing_mode': mode, 'min_seconds': 0.1}), tmp_path / 'out'
    run = lambda **how: encode_corpus(sounds, out, config, Fake(), tokenizer, shard_clips=4, **how)
    first, before, many = run(), stamps(out), dict(calls)
    assert run() == first | {'up_to_date': True, 'made': dict.fromkeys(first['made'], 0)}
    assert stamps(out) == before and calls == many and not first['up_to_date']
    (out / 'report.html').unlink()   # is written again
    assert [run()['up_to_date'] for _ in range(2)] == [False, True] and (out / 'report.html').is_file()
    convert(sounds / 'wavs' / 'low-0.wav', subtype='FLOAT')
    assert not run()['up_to_date']   # shards of which nothing changed are kept as they are
    kept = {name for name, stamp in stamps(out).items() if stamp == before.get(name)}
    shards = {'shard-00001.safetensors', 'shard-00002.safetensors'}
    assert kept == shards | {name for name in before if name.startswith(('00001-', '00002-'))}

# --- whole or not at all ------------------------------------------------------------------------------

TAKEN = {'DVAE': 14, 'recording': 9, 'limits': 12, 'a flipped bit': 9, 'a lost shard': 9,
         'a shard outside': 9}

@pytest.mark.parametrize('change', TAKEN)
def test_finished_shards_are_taken_over_if_they_fit(mine, small, tokenizer, tmp_path, change):
    "Two shards of 5 are finished, 4 clips are left."
    dvae, out, work, config = Fake(), tmp_path / 'out', tmp_path / 'out.work', small
    def stop(done, total):
        if done == 11: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        encode_corpus(mine, out, small, dvae, tokenizer, shard_clips=5, progress=stop)
    with pytest.raises(UserError, match='holds no cache; .*out.work keeps what an earlier run'): Cache(out)
    (work / f'shard-00002.safetensors.0123abcd{PART}').write_bytes(b'of a run that was killed')
    shard = work / 'shard-00001.safetensors'
    if change == 'DVAE': dvae = Fake(gain=1.5)
    if change == 'recording': save_audio(mine / 'wavs' / 'low-0.wav', synthetic_voice(0.9))
    if change == 'limits': config = small.replace(data={'max_seconds': 1.15})   # two are longer
    if change == 'a flipped bit': shard.write_bytes(shard.read_bytes()[:-1] + b'\x7f')
    if change == 'a lost shard': shard.unlink()
    if change == 'a shard outside':   # the work of somebody else
        facts = read_json(work / 'shard-00001.json')
        shard.rename(thesis := tmp_path / 'thesis')
        write_json(work / 'shard-00001.json', facts | {'line': facts['line'] | {'file': '../thesis'}})
        before = thesis.read_bytes()
    assert encode_corpus(mine, out, config, dvae, tokenizer, shard_clips=5)['made']['codes'] == TAKEN[change]
    encode_corpus(mine, tmp_path / 'fresh', config, dvae, tokenizer, shard_clips=5)
    assert tree(out) == tree(tmp_path / 'fresh') and not work.exists()
    assert change != 'a shard outside' or thesis.read_bytes() == before

def test_too_many_dropped_clips_cost_no_finished_shard(mine, small, tokenizer, tmp_path):
    for name in ('low-4', 'low-5'): (mine / 'wavs' / f'{name}.wav').write_text('no sound')   # a shard of 2
    run = lambda rate: encode_corpus(mine, tmp_path / 'out', small.replace(data={'max_drop_rate': rate}),
                                     Fake(), tokenizer, shard_clips=2)
    with pytest.raises(UserError, match='2 of 14'): run(0.1)
    assert [p.name for p in tmp_path.glob('out*')] == ['out.work']
    assert run(0.2)['made']['codes'] == 0 and [p.name for p in tmp_path.glob('out*')] == ['out']
    assert len(Cache(tmp_path / 'out')) == 12 and not verify_cache(tmp_path / 'out')[1]

def test_a_killed_worker_costs_no_finished_shard(corpus, small, tokenizer, undisturbed, tmp_path, capfd):
    out, more = tmp_path / 'out', {'shard_clips': 2, 'workers': 1}
    with pytest.raises(UserError, match='ended before its work was done'):
        encode_corpus(corpus, out, small, Dying(), tokenizer, **more)
    assert f'{out}.work: keeps 3 finished shards; the same command continues' in capfd.readouterr().err
    assert encode_corpus(corpus, out, small, Fake(), tokenizer, **more)['made']['codes'] == 14 - 3 * 2
    assert f'{out}.work: an earlier run left 3 finished shards' in capfd.readouterr().err
    assert tree(out) == undisturbed and [p.name for p in tmp_path.iterdir()] == ['out']

@pytest.mark.parametrize('workers', [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_full_disk_costs_no_finished_shard(mine, small, tokenizer, tmp_path, workers):
    "The last shard is larger than a file may be."
    for i in range(6): save_audio(mine / 'wavs' / f'long-{i}.wav', synthetic_voice(2.))
    with open(mine / 'metadata.csv', 'a') as rows:
        rows.writelines(f'long-{i}|aa bb|aa bb|low|en\n' for i in range(6))
    run = lambda kind, out='out', workers=workers: encode_corpus(
        mine, tmp_path / out, small, kind(), tokenizer, shard_clips=5, workers=workers)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not workers: largest_file(120_000)   # a worker has limits of its own
    try:
        with pytest.raises(UserError, match='shard-00003.safetensors: .*nothing was written there'):
            run(OnAFullDisk)
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / 'out').exists() and not list((tmp_path / 'out.work').rglob('*.part'))
    assert run(Fake)['made']['codes'] == 5
    run(Fake, 'fresh', 0)
    assert tree(tmp_path / 'out') == tree(tmp_path / 'fresh') and not (tmp_path / 'out.work').exists()

@pytest.mark.parametrize('there, ours', [
    (['lock'], True), (['lock', 'plan.json'], True), ([f'plan.json.0123abcd{PART}'], True),
    (['config.yaml'], False), (['plan.json', 'config.yaml'], True), (['x', 'plan.json'], False),
    (None, False), ('a plan of mine', False)])
def test_a_work_folder_of_somebody_else_is_left_alone(tmp_path, there, ours):
    work = tmp_path / 'out.work'
    if there is None: work.write_text('mine')
    else: work.mkdir()
    if there == 'a plan of mine': there = write_json(work / 'plan.json', {'monday': 'write'})
    for name in there or (): (work / name).write_text('{"for": "out"}' if name == 'plan.json' else '')
    if ours:
        with _work_folder(tmp_path / 'out') as given: assert given == work and (work / 'plan.json').is_file()
        assert not work.exists()
    else:
        with pytest.raises(UserError, match='out.work: holds something that is not ours'):
            with _work_folder(tmp_path / 'out'): pass
        assert work.exists()

@pytest.mark.parametrize('kind', ['a file', 'a hidden file', 'a manifest of NeMo', 'notes', 'recordings'])
def test_a_folder_is_replaced_only_if_all_of_it_is_a_cache(mine, small, tokenizer, copy, tmp_path, kind):
    "NeMo calls its list of recordings manifest.json too."
    out = {'a manifest of NeMo': mine, 'notes': copy, 'recordings': copy}.get(kind, tmp_path / 'new')
    if kind == 'a file': out.write_text('mine')
    if kind == 'a hidden file': write_json(out / '.git', 'mine')
    if kind == 'a manifest of NeMo':
        (mine / 'manifest.json').write_text(json.dumps({'audio_filepath': 'wavs/low-0.wav', 'text': 'aa'}))
    if kind == 'notes': (copy / 'notes.txt').write_text('mine')
    if kind == 'recordings': shutil.copytree(mine / 'wavs', copy / 'audio')
    kept = tree(tmp_path)
    writers = lambda: encode_corpus(mine, out, small, Fake(), tokenizer), lambda: merge_caches([copy], out)
    for write in writers:
        with pytest.raises(UserError, match='holds something'): write()
        assert tree(tmp_path) == kept

# --- processes ----------------------------------------------------------------------------------------

def test_the_same_bytes_for_any_number_of_threads_and_processes(corpus, small, dvae, prepared, tmp_path):
    "The real encoder; in the workers TensorFlow has one thread, here it has two."
    encode_corpus(corpus, tmp_path / 'b', small, dvae, shard_clips=5, workers=2)
    assert tree(tmp_path / 'b') == tree(prepared.folder)

@pytest.fixture(scope='module', autouse=True)
def forked():
    "Workers are forked from the server of the tests: else it would begin without half of the library."
    server()

def begin_adding(): return lambda x: x + 1

def test_a_worker_that_fails_is_reported_and_nobody_is_left(corpus, small, tokenizer, tmp_path):
    me = psutil.Process()
    before = set(me.children(recursive=True))
    children = lambda: [p for p in me.children(recursive=True)
                        if p not in before and 'resource_tracker' not in ' '.join(p.cmdline())]
    with pytest.raises(RuntimeError, match='these weights are odd'):
        encode_corpus(corpus, tmp_path / 'out', small, Odd(), tokenizer, workers=1)
    assert not list(tmp_path.glob('out*')) and not children()
    for job, answer in _run_jobs(range(5), 1, begin_adding):
        assert answer == job + 1 and children()
        if job == 3: break
    assert job == 3 and not children()

PROGRAM = '''
import sys
from fake_dvae import Slow
from xtts_nb.config import XTTSConfig, setup_tf
from xtts_nb.data.prepare import encode_corpus
from xtts_nb.data.text import Tokenizer
corpus, out, config, tokenizer, workers = sys.argv[1:]
setup_tf(threads=2)
print('ready', flush=True)
encode_corpus(corpus, out, XTTSConfig.load(config), Slow(), Tokenizer.load(tokenizer), shard_clips=2,
              workers=int(workers))
'''

@pytest.fixture
def start(corpus, small, tokenizer, tmp_path):
    "Begins to prepare in a process of its own."
    (tmp_path / 'config.yaml').write_text(small.to_yaml())
    tokenizer.save(tmp_path / 'tokenizer.json')
    def begin(workers):
        child = Forked(PROGRAM, corpus, tmp_path / 'here' / 'out', tmp_path / 'config.yaml',
                       tmp_path / 'tokenizer.json', workers, text=True, stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE)
        assert child.stdout.readline() == 'ready\n'
        return child
    return begin

@pytest.fixture(scope='session')
def undisturbed(corpus, small, tokenizer, tmp_path_factory):
    out = tmp_path_factory.mktemp('undisturbed') / 'out'
    encode_corpus(corpus, out, small, Fake(), tokenizer, shard_clips=2)
    return tree(out)

def shards(tmp_path): return len(list((tmp_path / 'here' / 'out.work').glob('shard-*.json')))

MOMENTS = [*enumerate(np.random.default_rng(4).uniform(0, 0.15, 8))]   # finished shards of 7, seconds more

@pytest.mark.parametrize('done, more', [pytest.param(*m, marks=[pytest.mark.slow] * (m[0] not in (0, 3, 7)))
                                        for m in MOMENTS])
def test_kill_at_any_moment(start, corpus, small, tokenizer, undisturbed, tmp_path, done, more):
    child, out = start(0), tmp_path / 'here' / 'out'
    while child.poll() is None and not out.exists() and shards(tmp_path) < done: time.sleep(0.005)
    time.sleep(more)
    child.kill()
    child.communicate()
    assert not out.exists() or tree(out) == undisturbed
    kept = 7 if out.exists() else shards(tmp_path)
    made = encode_corpus(corpus, out, small, Fake(), tokenizer, shard_clips=2)['made']
    assert made['codes'] == 14 - 2 * kept and kept >= done
    assert tree(out) == undisturbed and [p.name for p in (tmp_path / 'here').iterdir()] == ['out']

@pytest.mark.slow
@pytest.mark.parametrize('how', [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(start, corpus, small, tokenizer, undisturbed, tmp_path, how):
    child = start(2)
    while not shards(tmp_path):
        assert child.poll() is None
        time.sleep(0.01)
    workers = psutil.Process(child.pid).children(recursive=True)
    with pytest.raises(UserError, match='is being prepared by another run'):
        encode_corpus(corpus, tmp_path / 'here' / 'out', small, Fake(), tokenizer, shard_clips=2)
    child.send_signal(how)
    _, err = child.communicate(timeout=60)
    assert len(workers) >= 2 and not psutil.wait_procs(workers, 20)[1]
    assert err.count('Traceback') == (how == signal.SIGINT), err
    assert not (tmp_path / 'here' / 'out').exists() and 1 <= shards(tmp_path) < 7
    encode_corpus(corpus, tmp_path / 'here' / 'out', small, Fake(), tokenizer, shard_clips=2)
    assert tree(tmp_path / 'here' / 'out') == undisturbed

# --- parts --------------------------------------------------------------------------------------------

class Elsewhere(Fake):
    "The same weights on another machine: one code of each clip comes out as its neighbour."
    def encode(self, mel):
        codes = super().encode(mel)
        return codes + tf.one_hot(0, tf.shape(codes)[1], dtype=tf.int32)

def test_a_part_whose_codes_come_out_differently_is_named(mine, small, tokenizer, tmp_path, capsys):
    folders = [tmp_path / str(i) for i in (1, 2, 3)]
    for i, (folder, kind) in enumerate(zip(folders, (Fake, Elsewhere, Fake)), 1):
        encode_corpus(mine, folder, small, kind(), tokenizer, shard_clips=5, part=(i, 3))
    for path in (mine / 'wavs').glob('high-[3456].wav'): path.unlink()   # those of the third part
    capsys.readouterr()
    merge_caches(folders, tmp_path / 'merged', load=load)
    other, gone = capsys.readouterr().err.splitlines()
    assert other.startswith(f'{folders[1]}: 3 of ') and 'codes of 3 clips come out differently' in other
    assert gone.startswith(f'{folders[2]}: its codes were not compared')

PARTS = {   # part, settings, DVAE, words of the error
    'settings': ((2, 3), {'max_seconds': 9.}, Fake(), 'foreign.*settings'),
    'DVAE': ((2, 3), {}, Fake(gain=1.5), 'foreign.*DVAE'),
    'number': ((2, 2), {}, Fake(), 'foreign: is shard 2/2.*one of 3'),
    'twice': (None, {}, None, 'is shard 1/3'),
    'missing': (None, {}, None, 'shard 2/3 is missing'), 'none': (None, {}, None, 'no parts'),
    'corpus': ((2, 3), {}, Fake(), 'foreign.*another corpus'),
    'damaged': ((2, 3), {}, Fake(), 'shard-00004.* is damaged')}

def test_parts_become_the_whole_if_they_belong_together(mine, small, tokenizer, tmp_path, capsys):
    make = lambda out, part=(1, 1), dvae=None, **data: encode_corpus(
        mine, tmp_path / out, small.replace(data=data), dvae or Fake(), tokenizer, shard_clips=3, part=part)
    parts = [tmp_path / str(i) for i in (1, 2, 3)]
    for i in (1, 2, 3): make(str(i), (i, 3))
    whole, report = make('whole'), merge_caches([parts[i] for i in (2, 0, 1)], tmp_path / 'merged', load=load)
    assert not capsys.readouterr().err   # the sample of each part is the same here
    assert tree(tmp_path / 'merged') == tree(tmp_path / 'whole') and report.items() <= whole.items()
    assert [len(Cache(p)) for p in parts] == [6, 5, 3]
    for kind, (part, settings, dvae, words) in PARTS.items():
        if kind == 'corpus':
            with open(mine / 'metadata.csv', 'a') as rows: rows.write('nobody|aa|aa|low|en\n')
        if kind == 'damaged':
            shutil.copytree(parts[1], tmp_path / 'foreign')
            flip(tmp_path / 'foreign/shard-00004.safetensors', -1)
        elif part: make('foreign', part, dvae, **settings)
        given = {'twice': [parts[0], parts[1], parts[0]], 'missing': [parts[0], parts[2]], 'none': []}.get(
            kind, [parts[0], tmp_path / 'foreign', parts[2]])
        with pytest.raises(UserError, match=words): merge_caches(given, tmp_path / 'bad')
        shutil.rmtree(tmp_path / 'foreign', ignore_errors=True)
        assert not list(tmp_path.glob('bad*'))

# --- runtime ------------------------------------------------------------------------------------------

def test_runtime_mode_writes_what_native_reading_does_not_take(sounds, small, tokenizer, tmp_path):
    config = small.replace(data={'preprocessing_mode': 'runtime', 'min_seconds': 0.1})
    report = encode_corpus(sounds, tmp_path / 'out', config, Fake(), tokenizer, shard_clips=4)
    cache = Cache(tmp_path / 'out')
    assert report['mode'] == cache.manifest['mode'] == 'runtime'
    assert len(cache) == len(KINDS_OF_SOUND), report['dropped']
    assert cache.wav_path(0) == sounds / 'wavs' / 'low-0.wav'
    assert ['wav' in row for row in cache.clips] == [bool(kind) for kind in KINDS_OF_SOUND]
    for i, row in enumerate(cache.clips):
        wav, original = decode_wav(str(cache.wav_path(i))).numpy() / 32768, load_audio(sounds / row['path'])
        assert len(wav) == cache.samples[i] and np.abs(wav - original).max() < 4e-5
        assert cache.codes_length[i] == -(-len(original) // 1024)
        assert cache.mel_length[i] == 1 + len(original) // 256
        assert tokenizer.decode(cache.array('text', i)) == '[en]' + row['text']
    with pytest.raises(UserError, match='holds no codes; prepare it'): cache.array('codes', 0)
    for i in (1, 2):
        encode_corpus(sounds, tmp_path / str(i), config, Fake(), tokenizer, shard_clips=4, part=(i, 2))
    merge_caches([tmp_path / '1', tmp_path / '2'], tmp_path / 'merged')
    assert tree(tmp_path / 'merged') == tree(tmp_path / 'out')
    whole, (one, two, *_) = tree(tmp_path / 'out'), sorted((tmp_path / 'out' / 'audio').iterdir())
    flip(one, -1)
    two.unlink()
    (tmp_path / 'out' / 'audio' / '00009-00000.wav').write_bytes(b'')
    result = verify_and_fix_cache(tmp_path / 'out', fix=True, load=load)
    assert {(p['file'], p['clip']) for p in result['problems']} == {
        ('audio/00000-00001.wav', 'low-1'), ('audio/00000-00002.wav', 'low-2'), ('audio/00009-00000.wav', '')}
    assert result['fixed'] == 3 and result['failed'] == 0 and tree(tmp_path / 'out') == whole

def test_names_that_are_not_utf8_are_written_down_escaped(mine, small, tokenizer, tmp_path):
    with open(mine / 'metadata.csv', 'ab') as file: file.write(b'lo\xffw|aa bb\n')
    config = small.replace(data={'max_drop_rate': 0.5})
    report = encode_corpus(mine, tmp_path / 'out', config, Fake(), tokenizer)
    assert [d['id'] for d in report['dropped']] == ['lo\\udcffw']
    for name in (b'anna.wav', b'anna.normalized.txt', b'be\xff.wav', b'be\xff.normalized.txt'):
        path = os.path.join(os.fsencode(tmp_path / 'libri/anna/1'), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if name.endswith(b'txt'): open(path, 'w').write('aa bb')
        else: shutil.copyfile(mine / 'wavs/low-1.wav', path)
    report = encode_corpus(tmp_path / 'libri', tmp_path / 'out', config, Fake(), tokenizer)
    assert [d['id'] for d in report['dropped']] == ['be\\udcff']

def test_the_mode_follows_the_size(mine, small):
    "Also if one recording says nothing of its length, as a FLAC that ffmpeg writes to a pipe."
    convert(mine / 'wavs/low-0.wav', format='FLAC')
    data = bytearray((mine / 'wavs/low-0.wav').read_bytes())
    data[21], data[22:26] = data[21] & 0xF0, bytes(4)   # the number of samples
    (mine / 'wavs/low-0.wav').write_bytes(data)
    for change, mode in (({'max_cache_gb': 2e-6}, 'runtime'), ({'max_cache_gb': 3e-4}, 'precompute'),
                         ({'preprocessing_mode': 'precompute', 'max_cache_gb': 1e-9}, 'precompute')):
        assert _choose_mode(read_corpus(mine)[0], small.replace(data=change)) == mode

@pytest.mark.parametrize('mode', ['precompute', 'runtime'])
def test_parts_of_a_recording_are_cut_out(small, tokenizer, tmp_path, mode):
    "Each becomes a clip of its own sound, in this run and in one that finds nothing to do."
    folder, wavs = tmp_path / 'corpus', [synthetic_voice(1., 100.), synthetic_voice(1.5, 200.)]
    save_audio(folder / 'talk.wav', np.concatenate(wavs))
    (folder / 'metadata.csv').write_text('file,offset,duration,text\ntalk.wav,0,1,aa\ntalk.wav,1,1.5,bb\n')
    config = small.replace(data={'preprocessing_mode': mode})
    run = lambda: encode_corpus(folder, tmp_path / 'out', config, Fake(), tokenizer)['up_to_date']
    assert [run(), run()] == [False, True]
    cache = Cache(tmp_path / 'out')
    assert [(c['text'], c['seconds']) for c in cache.clips] == [('aa', 1.), ('bb', 1.5)]
    for i, wav in enumerate(wavs): assert np.allclose(load_audio(cache.wav_path(i)), wav, atol=1e-4)
    assert not verify_cache(tmp_path / 'out')[1]

# --- repair -------------------------------------------------------------------------------------------

FIXABLE = ['clips.jsonl', 'index.safetensors', 'report.json', 'report.txt', 'shard-00000.safetensors',
           'shard-00002.safetensors']

def test_what_follows_from_the_corpus_is_repaired(copy, straight):
    "Each file alone, and several at once."
    cases = [(how, [FIXABLE[i]]) for i, how in enumerate(['flipped', 'cut off', 'missing'] * 2)]
    for how, names in (*cases, ('flipped', FIXABLE[1:]), ('missing', FIXABLE[1:])):
        for path in (copy / name for name in names):
            if how == 'flipped': flip(path, path.stat().st_size // 2)
            elif how == 'cut off': path.write_bytes(path.read_bytes()[:40])
            else: path.unlink()
        result = verify_and_fix_cache(copy, fix=True, load=load)
        assert result['bad'] == result['fixed'] == len(names) and result['failed'] == 0, (how, names, result)
        assert tree(copy) == tree(straight)

def flip_mel(shard, cache, i): flip(shard, shard.read_bytes().index(cache.array('mel', i).tobytes()) + 5)

def test_only_the_damaged_record_is_encoded(copy, straight, calls, monkeypatch):
    shard = copy / 'shard-00001.safetensors'
    flip_mel(shard, Cache(straight), 7)
    assert verify_and_fix_cache(copy)['problems'] == [
        {'file': 'shard-00001.safetensors', 'clip': 'high-0', 'problem': 'is not what was written',
         'fixed': False}]
    assert verify_and_fix_cache(copy, fix=True, load=load)['fixed'] == 1
    assert calls == {'codes': 1, 'mel': 1} and tree(copy) == tree(straight)
    key, real = Cache(straight).manifest['key'], ClipEncoder.mel   # another processor rounds differently
    monkeypatch.setattr(ClipEncoder, 'mel', lambda self, wav: real(self, wav) * 1.001)
    flip_mel(shard, Cache(straight), 7)
    assert verify_and_fix_cache(copy, fix=True, load=load)['fixed'] == 1
    assert Cache(copy).manifest['key'] == key
    assert not np.array_equal(Cache(copy).array('mel', 7), Cache(straight).array('mel', 7))
    monkeypatch.setattr(cache_module, '_FEATURES', 99)   # another version of the library
    assert [p['problem'] for p in verify_and_fix_cache(copy)['problems']] == [
        f'the {kind} are stale' for kind in ('codes', 'text', 'mel')]

def test_what_cannot_be_repaired_says_why(mine, small, tokenizer, tmp_path):
    out, voice, there = tmp_path / 'out', mine / 'wavs/low-1.wav', tmp_path / 'there'
    encode_corpus(mine, out, small, Fake(), tokenizer, shard_clips=5)
    shard, whole, good = out / 'shard-00000.safetensors', tree(out), voice.read_bytes()
    flip_mel(shard, Cache(out), 1)
    before = shard.read_bytes()
    for change, words in (
            (voice.unlink, 'low-1.wav is missing'),
            (lambda: save_audio(voice, synthetic_voice(0.9)), 'low-1.wav: has changed since'),
            ((out / 'index.safetensors').unlink, 'low-1.wav: has changed since'),
            (lambda: voice.write_bytes(good) and mine.rename(there), '')):
        change()
        result = verify_and_fix_cache(out, fix=True, load=load)
        assert any(words in p['reason'] for p in result['problems']) and result['failed'], words
        assert shard.read_bytes() == before
    assert verify_and_fix_cache(out, fix=True, source=there, load=load)['fixed'] == 2
    assert {name for name, content in tree(out).items() if whole[name] != content} == {'manifest.json'}

def test_a_clip_is_not_encoded_without_what_encoded_the_others(corpus, small, tmp_path):
    "A tokenizer is learned again, but only from the corpus from which it was learned."
    out, own, shard = tmp_path / 'out', tmp_path / 'own', 'shard-00000.safetensors'
    encode_corpus(corpus, out, small, Fake(), train_tokenizer(['abcdefgh'], ['en'], 40))
    first = tree(out)
    for name in ('dvae.safetensors', 'config.yaml', 'manifest.json', 'tokenizer.json'):
        flip(out / name, 200)
        (out / shard).unlink()
        kept = tree(out)
        result = verify_and_fix_cache(out, fix=True, load=load)
        assert result['failed'] == result['bad'] and all(p['reason'] for p in result['problems']), name
        assert tree(out) == kept
        for file in (name, shard): (out / file).write_bytes(first[file])
    encode_corpus(corpus, own, small, Fake())
    whole = tree(own)
    flip(own / 'tokenizer.json', 200)
    assert verify_and_fix_cache(own, fix=True, load=load)['fixed'] == 1
    assert tree(own) == whole

def test_clips_that_were_left_out_and_recordings_of_its_own_are_found_again(mine, small, tokenizer, tmp_path):
    "Clip 2 of the first shard was no sound, clip 3 had to be written as another wav file."
    (mine / 'wavs/low-2.wav').write_text('no sound')
    convert(mine / 'wavs/low-3.wav', subtype='FLOAT')
    out = tmp_path / 'out'
    config = small.replace(data={'preprocessing_mode': 'runtime', 'max_drop_rate': 0.5})
    encode_corpus(mine, out, config, Fake(), tokenizer, shard_clips=5)
    whole, own = tree(out), 'audio/00000-00003.wav'
    for names in ([own], ['clips.jsonl'], ['index.safetensors', 'shard-00001.safetensors'],
                  ['report.json', 'shard-00000.safetensors']):
        for name in names: flip(out / name, (out / name).stat().st_size // 2)
        assert verify_and_fix_cache(out, fix=True, load=load)['failed'] == 0, names
        assert tree(out) == whole, names

MINE = 'thesis.txt', 'my-voice.wav', 'notes.part', 'index.safetensors.123.part', f'film.0123abcd{PART}'

def test_leftovers_go_and_what_is_not_ours_stays(copy, straight, tmp_path):
    for name in ('index.safetensors', 'shard-00009.safetensors'):
        (copy / f'{name}.0123abcd{PART}').write_bytes(b'half')
    (copy / 'shard-00009.safetensors').write_bytes(b'old')
    for name in MINE: (copy / name).write_text('mine')
    result = verify_and_fix_cache(copy, fix=True, load=load)
    assert (result['bad'], result['fixed'], result['failed']) == (3 + len(MINE), 3, len(MINE))
    assert tree(copy) == tree(straight) | dict.fromkeys(MINE, b'mine')
    write_json(tmp_path / 'music/song.wav', 'mine')
    (copy / 'audio').symlink_to(tmp_path / 'music')   # a folder of somebody else
    verify_and_fix_cache(copy, fix=True, load=load)
    assert (tmp_path / 'music/song.wav').is_file()

# --- names that lead out of the folder ----------------------------------------------------------------

@pytest.fixture(scope='module')
def own_sound(corpus, small, tokenizer, tmp_path_factory):
    "A runtime cache that had to write a recording of its own; to be read only."
    home = tmp_path_factory.mktemp('own')
    shutil.copytree(corpus, home / 'corpus')
    convert(home / 'corpus/wavs/low-0.wav', subtype='FLOAT')
    config = small.replace(data={'preprocessing_mode': 'runtime'})
    encode_corpus(home / 'corpus', home / 'cache', config, Fake(), tokenizer)
    return home / 'cache'

def seal(folder, **facts):
    "Write the manifest again, as somebody does who wants it to be believed."
    kept = {k: v for k, v in read_manifest(folder).items() if k not in ('format', 'files')}
    write_manifest(folder, kept | facts)

def name_a_shard_outside(cache, outside):
    (cache / 'shard-00000.safetensors').rename(outside / 'shard.safetensors')
    shards = read_manifest(cache)['shards']
    seal(cache, shards=[shards[0] | {'file': '../outside/shard.safetensors'}, *shards[1:]])

def name_a_recording_outside(cache, outside):
    table, own = cache / 'clips.jsonl', 'audio/00000-00000.wav'
    (outside / '00-000.wav').write_text('mine')
    table.write_text(table.read_text().replace(own, '../outside/00-000.wav'))   # as long: the index holds
    seal(cache)

def link_the_recordings(cache, outside):
    shutil.rmtree(cache / 'audio')
    (outside / '00000-00000.wav').write_text('mine')
    (cache / 'audio').symlink_to(outside)

@pytest.mark.parametrize('trick', [name_a_shard_outside, name_a_recording_outside, link_the_recordings],
                         ids=lambda t: t.__name__)
def test_a_cache_reaches_nothing_outside_its_folder(own_sound, tmp_path, trick):
    cache, outside = tmp_path / 'cache', tmp_path / 'outside'
    shutil.copytree(own_sound, cache)
    outside.mkdir()
    (outside / 'thesis.txt').write_text('mine')
    trick(cache, outside)
    before = tree(outside)
    for read in (lambda: Cache(cache).wav_path(0), lambda: Cache(cache, in_memory=False).wav_path(0),
                 lambda: merge_caches([cache], tmp_path / 'merged')):
        with pytest.raises(UserError, match='leads out of this folder'): read()
    for problems in (verify_cache(cache)[1], verify_and_fix_cache(cache, fix=True, load=load)['problems']):
        assert any('leads out of this folder' in p['problem'] for p in problems)
    assert tree(outside) == before and not (tmp_path / 'merged').exists()
