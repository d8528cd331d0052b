"Preparing: incremental, deterministic, resumed after a kill; merging parts; repairing damage."
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import soundfile
import tensorflow as tf

from fake_dvae import (
    Fake, largest_file, load, load_and_die, load_and_die_later, load_and_fail, load_on_a_full_disk)
from process import Forked, server, tree
from xtts_nb.data.audio import decode_wav, load_audio, save_audio, synthetic_voice
from xtts_nb.data import prepare as module
from xtts_nb.data.cache import Cache, check_cache_folder, verify_cache
from xtts_nb.data.corpora import Clip, read_corpus
from xtts_nb.config import UserError
from xtts_nb.files import PART, read_json, write_json
from xtts_nb.data.prepare import (
    ClipEncoder, check_part, choose_mode, clip_row, default_workers, lesson_cache, Loudness, mel_sample,
    merge_caches, prepare, run_jobs, unfinished, work_folder, verify_and_fix_cache)
from xtts_nb.data.text import train_tokenizer

ROW = '{0}|aa bb|aa bb|low|en'



def line(folder, text): (folder / 'metadata.csv').open('a').write(text + '\n')


# --- nothing twice --------------------------------------------------------------------------------

CHANGES = {   # what is changed -> how many clips of each kind are made again
    'nothing': ({}, {}, (0, 0, 0)),
    'batch size': ({'data': {'batch_size': 2}}, {}, (0, 0, 0)),
    'reference FFT': ({'model': {'audio': {'reference_n_fft': 4096}}}, {}, (0, 0, 14)),
    'FFT of the codes': ({'model': {'audio': {'dvae_n_fft': 2048}}}, {}, (14, 0, 0)),
    'upper edge': ({'model': {'audio': {'f_max': 7000.}}}, {}, (14, 0, 14)),
    'DVAE': ({}, {'dvae': Fake(gain=1.5)}, (14, 0, 0)),
    'constants of the mels': ({}, {'dvae': Fake(stats=4.)}, (14, 0, 14)),
    'tokenizer': ({}, {'tokenizer': train_tokenizer(['abcdefgh aabb'], ['en'], 40)}, (0, 14, 0)),
    'shards': ({}, {'shard_clips': 4}, (0, 0, 0)),
    'limits that just hold': ({'data': {'min_seconds': 0.6, 'max_seconds': 1.2}}, {}, (0, 0, 0)),
}

@pytest.mark.parametrize('change', CHANGES)
def test_a_changed_setting_makes_again_what_hangs_on_it(corpus, small, tokenizer, copy, tmp_path, calls,
                                                        change):
    sections, arguments, expected = CHANGES[change]
    config, arguments = small.replace(**sections), {'dvae': Fake(), 'tokenizer': tokenizer,
                                                    'shard_clips': 5} | arguments
    made = prepare(corpus, copy, config, **arguments)['made']
    assert (made['codes'], made['text'], made['mel']) == expected
    assert (calls['codes'], calls['mel']) == expected[::2]
    prepare(corpus, tmp_path / 'fresh', config, **arguments)
    assert tree(copy) == tree(tmp_path / 'fresh')

def stamps(folder):
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.rglob('*') if p.is_file()}

@pytest.mark.parametrize('mode', ['precompute', 'runtime'])
def test_a_cache_that_is_up_to_date_is_not_touched(sounds, small, tokenizer, tmp_path, calls, mode):
    config, out = small.replace(data={'preprocessing_mode': mode, 'min_seconds': 0.1}), tmp_path / 'out'
    first = prepare(sounds, out, config, Fake(), tokenizer, shard_clips=4)
    before, many = stamps(out), dict(calls)
    again = prepare(sounds, out, config, Fake(), tokenizer, shard_clips=4)
    assert stamps(out) == before and calls == many and not first['up_to_date'] and again['up_to_date']
    assert again == first | {'up_to_date': True, 'made': dict.fromkeys(first['made'], 0)}

@pytest.mark.parametrize('mode', ['precompute', 'runtime'])
def test_a_shard_of_which_nothing_changed_is_not_touched(sounds, small, tokenizer, tmp_path, calls, mode):
    config, out = small.replace(data={'preprocessing_mode': mode, 'min_seconds': 0.1}), tmp_path / 'out'
    prepare(sounds, out, config, Fake(), tokenizer, shard_clips=4)
    before = stamps(out)
    convert(sounds / 'wavs' / 'low-0.wav', subtype='FLOAT')
    assert not prepare(sounds, out, config, Fake(), tokenizer, shard_clips=4)['up_to_date']
    kept = {name for name, stamp in stamps(out).items() if stamp == before.get(name)}
    shards = {'shard-00001.safetensors', 'shard-00002.safetensors'}
    assert kept == shards | {name for name in before if name.startswith(('00001-', '00002-'))}

AGAIN = {   # what differs -> how many clips are encoded again
    'settings': (lambda out: None, 0), 'a lost report': (lambda out: (out / 'report.json').unlink(), 0),
    'a lost index': (lambda out: (out / 'index.safetensors').unlink(), 0),
    'a damaged table': (
        lambda out: (out / 'clips.jsonl').write_text('x' * (out / 'clips.jsonl').stat().st_size), 0),
    'a damaged shard': (lambda out: (out / 'shard-00001.safetensors').write_bytes(b'x'), 5)}

@pytest.mark.parametrize('what', AGAIN)
def test_a_cache_in_which_anything_differs_is_written_anew(corpus, small, tokenizer, copy, tmp_path, calls,
                                                           what):
    config = small.replace(training={'steps': 7}) if what == 'settings' else small
    AGAIN[what][0](copy)
    report = prepare(corpus, copy, config, Fake(), tokenizer, shard_clips=5)
    prepare(corpus, tmp_path / 'fresh', config, Fake(), tokenizer, shard_clips=5)
    assert tree(copy) == tree(tmp_path / 'fresh') and not report['up_to_date']
    assert report['made']['codes'] == AGAIN[what][1]

def test_what_is_damaged_is_not_kept(corpus, small, tokenizer, copy, straight, calls):
    path = copy / 'shard-00001.safetensors'
    data = bytearray(path.read_bytes())
    data[data.index(Cache(straight).array('mel', 6).tobytes()) + 77] ^= 1
    path.write_bytes(data)
    assert prepare(corpus, copy, small, Fake(), tokenizer, shard_clips=5)['made'] == {'codes': 1, 'text': 1,
                                                                                      'mel': 1}
    assert tree(copy) == tree(straight)

def test_only_changed_rows_and_recordings_are_made(mine, small, tokenizer, tmp_path, calls):
    prepare(mine, tmp_path / 'out', small, Fake(), tokenizer, shard_clips=5)
    text = (mine / 'metadata.csv').read_text().splitlines()
    save_audio(mine / 'wavs' / 'low-0.wav', synthetic_voice(0.9))
    save_audio(mine / 'wavs' / 'new.wav', synthetic_voice(0.9))
    text[1] = 'low-1|hh|hh|low|en'
    # and low-2 is gone
    (mine / 'metadata.csv').write_text('\n'.join(['new|aa|aa|low|en', *text[:2], *text[3:]]))
    calls |= dict.fromkeys(calls, 0)
    report = prepare(mine, tmp_path / 'out', small, Fake(), tokenizer, shard_clips=5)
    assert report['made'] == {'codes': 2, 'text': 3, 'mel': 2} and calls == {'codes': 2, 'mel': 2}
    prepare(mine, tmp_path / 'fresh', small, Fake(), tokenizer, shard_clips=5)
    assert tree(tmp_path / 'out') == tree(tmp_path / 'fresh')

def test_limits_hold_for_what_is_kept(corpus, small, tokenizer, copy, calls):
    config = small.replace(data={'max_seconds': 0.95, 'max_drop_rate': 1.})
    report = prepare(corpus, copy, config, Fake(), tokenizer, shard_clips=5)
    assert report['longest'] <= 0.95
    assert all('data.max_seconds' in d['reason'] for d in report['dropped'])
    assert report['dropped']
    assert calls == {'codes': 0, 'mel': 0}

@pytest.mark.parametrize('change',
                         [{'model': {'audio': {'f_max': 7000.}}}, {'model': {'dvae': {'codes': 16}}}])
def test_the_key_tells_caches_apart(corpus, small, prepared, tmp_path, change):
    from xtts_nb.models.dvae import DVAE
    config = small.replace(**change)
    prepare(corpus, tmp_path / 'out', config, DVAE(config), prepared.tokenizer)
    assert Cache(tmp_path / 'out').manifest['key'] != prepared.manifest['key']


@pytest.mark.parametrize('ours, of_the_model', [(7, 40), (40, 7)])
def test_a_clip_that_the_model_just_takes_and_just_not(small, tokenizer, ours, of_the_model):
    config = small.replace(data={'max_text_tokens': ours}, model={'gpt': {'max_text_tokens': of_the_model}})
    encoder, clip = ClipEncoder(config, Fake(), tokenizer), Clip('x', 'aa', 'low', 'en', Path('x.wav'))
    limits = (7, 48), (8, 48), (7, 49)
    assert [encoder._problem(clip, [5] * tokens, codes) for tokens, codes in limits] == [
        None, 'the text has 8 tokens, more than 7', '49 codes, more than model.gpt.max_audio_codes 48']

def test_mels_are_drawn_until_there_are_enough(corpus, small):
    clips, seen = read_corpus(corpus)[0], []
    first, second = np.random.default_rng(small.data.seed).permutation(14)[:2]
    seconds = [soundfile.info(clips[i].path).duration for i in (first, second)]
    for wanted, count in ((seconds[0], 1), (seconds[0] + 0.01, 2)):
        mels = mel_sample(clips, small, wanted, lambda *done: seen.append(done))
        assert len(mels) == sum(1 + int(s * 22050) // 256 for s in seconds[:count])
    assert seen == [(1, 14), (1, 14), (2, 14)]

def test_the_line_of_a_clip():
    clip = Clip('1', 'a', 'b', 'en', Path('/corpus/wavs/1.wav'))
    line = {'id': '1', 'text': 'a', 'speaker': 'b', 'language': 'en', 'seconds': 0.4535, 'path': 'wavs/1.wav'}
    assert clip_row(clip, Path('/corpus'), 10_000, 22050) == line
    assert clip_row(clip, Path('/corpus'), 10_000, 22050, 'audio/1.wav') == line | {'wav': 'audio/1.wav'}

def test_the_drawn_report_is_made_where_it_is_wanted_and_not_there(corpus, small, tokenizer, tmp_path):
    out, drawn = tmp_path / 'out', []
    def page(report, path):
        drawn.append(report['clips'])
        path.write_text('page')
    for wanted, up_to_date, times in ((None, False, 0), (page, False, 1), (page, True, 1), (None, True, 1)):
        assert prepare(corpus, out, small, Fake(), tokenizer, page=wanted)['up_to_date'] == up_to_date
        assert len(drawn) == times and (out / module.REPORT_PAGE).exists() == bool(drawn)
    assert drawn == [14]

def test_clips_are_counted_for_whoever_wants_to_know():
    seen = []
    tell, silent = module._counter(lambda *done: seen.append(done), 5), module._counter(None, 5)
    for clips in (0, 2, 3):
        tell(clips)
        silent(clips)
    assert seen == [(2, 5), (5, 5)]

def test_processes_are_started_for_a_large_corpus_only(monkeypatch):
    monkeypatch.setattr(module, 'cores', lambda: 3)
    assert (default_workers(4095), default_workers(4096)) == (0, 3)


# --- whole or not at all --------------------------------------------------------------------------

@pytest.mark.parametrize('error, at, before', [(KeyboardInterrupt, 1, True), (KeyboardInterrupt, 6, False),
                                               (RuntimeError, 6, True), (KeyboardInterrupt, 14, True)])
def test_an_interrupted_run_leaves_what_was_there_and_goes_on(corpus, small, tokenizer, straight, tmp_path,
                                                              error, at, before):
    if before: shutil.copytree(straight, tmp_path / 'out')
    kept, dvae = tree(tmp_path), Fake(gain=1.5)
    def stop(done, total):
        if done == at: raise error
    with pytest.raises(error):
        prepare(corpus, tmp_path / 'out', small, dvae, tokenizer, shard_clips=2, progress=stop)
    finished = len(list((tmp_path / 'out.work').glob('shard-*.json')))
    assert {k: v for k, v in tree(tmp_path).items() if not k.startswith('out.work')} == kept
    assert finished == (at - 1) // 2 and (tmp_path / 'out.work').exists() == (finished > 0)
    report = prepare(corpus, tmp_path / 'out', small, dvae, tokenizer, shard_clips=2)
    assert report['made']['codes'] == 14 - 2 * finished and not (tmp_path / 'out.work').exists()
    prepare(corpus, tmp_path / 'fresh', small, dvae, tokenizer, shard_clips=2)
    assert tree(tmp_path / 'out') == tree(tmp_path / 'fresh')

def half(corpus, out, *arguments, **more):
    "Prepare, and be interrupted after the second shard of 5."
    def stop(done, total):
        if done == 11: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, out, *arguments, shard_clips=5, progress=stop, **more)

TAKEN = {'nothing': 4, 'DVAE': 14, 'recording': 9, 'text': 4, 'limits': 12, 'a flipped bit': 9,
         'a lost shard': 9}

@pytest.mark.parametrize('change', TAKEN)
def test_finished_shards_are_taken_over_if_they_fit(mine, small, tokenizer, tmp_path, change):
    "Two shards of 5 are finished, 4 clips are left."
    dvae, out, config = Fake(), tmp_path / 'out', small
    half(mine, out, small, dvae, tokenizer)
    shard, metadata = tmp_path / 'out.work' / 'shard-00001.safetensors', mine / 'metadata.csv'
    if change == 'DVAE': dvae = Fake(gain=1.5)
    if change == 'recording': save_audio(mine / 'wavs' / 'low-0.wav', synthetic_voice(0.9))
    if change == 'text':
        metadata.write_text(metadata.read_text().replace('low-0|', 'low-0|only the normalised counts', 1))
    if change == 'limits': config = small.replace(data={'max_seconds': 1.15})   # two are longer
    if change == 'a flipped bit': shard.write_bytes(shard.read_bytes()[:-1] + b'\x7f')
    if change == 'a lost shard': shard.unlink()
    assert prepare(mine, out, config, dvae, tokenizer, shard_clips=5)['made']['codes'] == TAKEN[change]
    prepare(mine, tmp_path / 'fresh', config, dvae, tokenizer, shard_clips=5)
    assert tree(out) == tree(tmp_path / 'fresh')

def test_too_many_dropped_clips_cost_no_finished_shard(mine, small, tokenizer, tmp_path):
    for name in ('high-5', 'high-6'): (mine / 'wavs' / f'{name}.wav').write_text('no sound')
    with pytest.raises(UserError, match='2 of 14'):
        prepare(mine, tmp_path / 'out', small.replace(data={'max_drop_rate': 0.1}), Fake(), tokenizer,
                shard_clips=2)
    assert [p.name for p in tmp_path.glob('out*')] == ['out.work']
    report = prepare(mine, tmp_path / 'out', small.replace(data={'max_drop_rate': 0.2}), Fake(), tokenizer,
                     shard_clips=2)
    assert report['made']['codes'] == 0 and [p.name for p in tmp_path.glob('out*')] == ['out']

def test_a_corpus_of_which_nothing_can_be_used_leaves_nothing(mine, small, tokenizer, tmp_path):
    for path in (mine / 'wavs').iterdir(): path.write_text('no sound')
    with pytest.raises(UserError, match='none of the 14'):
        prepare(mine, tmp_path / 'out', small, Fake(), tokenizer, shard_clips=2)
    assert not list(tmp_path.glob('out*'))

def test_a_killed_worker_costs_no_finished_shard(corpus, small, tokenizer, undisturbed, tmp_path, capfd):
    out, more = tmp_path / 'out', {'shard_clips': 2, 'workers': 1}
    with pytest.raises(UserError, match='ended before its work was done'):
        prepare(corpus, out, small, Fake(), tokenizer, load=load_and_die_later, **more)
    line = f'{out}.work: keeps 3 finished shards; the same command goes on from there.'
    assert line in capfd.readouterr().err
    assert prepare(corpus, out, small, Fake(), tokenizer, load=load, **more)['made']['codes'] == 14 - 3 * 2
    assert f'{out}.work: an earlier run left 3 finished shards' in capfd.readouterr().err
    assert tree(out) == undisturbed and [p.name for p in tmp_path.iterdir()] == ['out']

@contextmanager
def full_disk():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest_file(120_000)
    try: yield
    finally: resource.setrlimit(resource.RLIMIT_FSIZE, before)

@pytest.mark.parametrize('workers', [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_full_disk_costs_no_finished_shard(mine, small, tokenizer, tmp_path, workers):
    "The last shard is larger than a file may be."
    for i in range(6):
        save_audio(mine / 'wavs' / f'long-{i}.wav', synthetic_voice(2.))
        line(mine, ROW.format(f'long-{i}'))
    arguments, more = (mine, tmp_path / 'out', small, Fake(), tokenizer), {'shard_clips': 5,
                                                                           'workers': workers}
    with pytest.raises(UserError, match='shard-00003.safetensors: .*nothing was written there'), \
            nullcontext() if workers else full_disk():   # a worker has limits of its own
        prepare(*arguments, **more, load=load_on_a_full_disk)
    assert not (tmp_path / 'out').exists() and not list((tmp_path / 'out.work').rglob('*.part'))
    assert prepare(*arguments, **more, load=load)['made']['codes'] == 5
    prepare(mine, tmp_path / 'fresh', *arguments[2:], shard_clips=5)
    assert tree(tmp_path / 'out') == tree(tmp_path / 'fresh') and not (tmp_path / 'out.work').exists()

def test_the_error_names_an_unfinished_cache(corpus, small, tokenizer, tmp_path):
    half(corpus, tmp_path / 'out', small, Fake(), tokenizer)
    left = tmp_path / 'out.work' / f'shard-00002.safetensors.0123abcd{PART}'
    left.write_bytes(b'of a run that was killed')
    with pytest.raises(UserError, match='holds no cache; .*out.work keeps what an earlier run finished'):
        Cache(tmp_path / 'out')
    prepare(corpus, tmp_path / 'out', small, Fake(), tokenizer, shard_clips=5)
    assert [p.name for p in tmp_path.iterdir()] == ['out']

@pytest.mark.parametrize('kind', ['shard', 'recording'])
def test_unfinished_work_of_somebody_else_names_nothing_outside(corpus, small, tokenizer, tmp_path, kind):
    half(corpus, tmp_path / 'out', small, Fake(), tokenizer)
    work = tmp_path / 'out.work'
    facts = read_json(work / 'shard-00000.json')
    if kind == 'shard':
        facts['line']['file'] = '../thesis'
        (work / 'shard-00000.safetensors').rename(tmp_path / 'thesis')
    else:
        facts['rows'][0]['wav'] = '../thesis'
        (tmp_path / 'thesis').write_text('mine')
    write_json(work / 'shard-00000.json', facts)
    before = (tmp_path / 'thesis').read_bytes()
    assert prepare(corpus, tmp_path / 'out', small, Fake(), tokenizer,
                   shard_clips=5)['made']['codes'] == 4 + 5
    assert (tmp_path / 'thesis').read_bytes() == before

@pytest.mark.parametrize('files, left', [
    ([], ''), (['shard-1.json'], ''), (['shard-1.json', 'shard-1.safetensors'], '1 finished shard'),
    ([f'shard-{i}.{end}' for i in (1, 2) for end in ('json', 'safetensors')] + ['learned-x.safetensors'],
     '2 finished shards and 1 learned DVAE'),
    (['dvae-x/checkpoints/step-5.safetensors'], '1 DVAE in training')])
def test_what_is_left_of_a_run_in_words(tmp_path, files, left):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('')
    assert unfinished(tmp_path) == left

@pytest.mark.parametrize('there, ours', [
    (['lock'], True), (['lock', 'plan.json'], True), ([f'plan.json.0123abcd{PART}'], True),
    (['config.yaml'], False), (['plan.json', 'config.yaml'], True), (['x', 'plan.json'], False),
    (['plan.json', 'x.7.part'], False), (['x'], False), (None, False), ('a plan of mine', False)])
def test_a_work_folder_of_somebody_else_is_left_alone(tmp_path, there, ours):
    work = tmp_path / 'out.work'
    if there is None: work.write_text('mine')
    else: work.mkdir()
    if there == 'a plan of mine': there = write_json(work / 'plan.json', {'monday': 'write'})
    for name in there or (): (work / name).write_text('{"for": "out"}' if name == 'plan.json' else '')
    if ours:
        with work_folder(tmp_path / 'out') as given: assert given == work and (work / 'plan.json').is_file()
        assert not work.exists()
    else:
        with pytest.raises(UserError, match='out.work: holds something that is not ours'):
            with work_folder(tmp_path / 'out'): pass
        assert work.exists()

def test_what_is_not_ours_is_refused_and_kept(corpus, small, tokenizer, tmp_path):
    (tmp_path / 'out.work').mkdir()
    (tmp_path / 'out.work' / 'thesis.txt').write_text('mine')
    with pytest.raises(UserError, match='out.work: holds something that is not ours'):
        prepare(corpus, tmp_path / 'out', small, Fake(), tokenizer)
    assert tree(tmp_path) == {'out.work': b'', 'out.work/thesis.txt': b'mine'}

def test_progress_counts_every_row(corpus, small, tokenizer, tmp_path):
    seen = []
    prepare(corpus, tmp_path / 'out', small, Fake(), tokenizer, shard_clips=5,
            progress=lambda *done: seen.append(done))
    assert seen == [(i, 14) for i in range(1, 15)]

@pytest.mark.parametrize('kind', ['a file', 'notes', 'a hidden file'])
def test_foreign_content_is_refused_and_kept(corpus, small, tokenizer, tmp_path, kind):
    out = tmp_path / 'out'
    if kind == 'a file': out.write_text('mine')
    else:
        out.mkdir()
        (out / {'notes': 'notes.txt', 'a hidden file': '.git'}[kind]).write_text('mine')
    kept = tree(tmp_path)
    with pytest.raises(UserError, match='out: .*holds something'):
        prepare(corpus, out, small, Fake(), tokenizer)
    assert tree(tmp_path) == kept
    with pytest.raises(UserError): check_cache_folder(out)

@pytest.mark.parametrize('kind', ['manifest of NeMo', 'notes in a cache', 'recordings in a cache'])
def test_a_folder_is_replaced_only_if_all_of_it_is_a_cache(mine, small, tokenizer, copy, kind):
    "NeMo calls its list of recordings manifest.json too."
    out = {'manifest of NeMo': mine}.get(kind, copy)
    if kind == 'manifest of NeMo':
        rows = [line.split('|') for line in (mine / 'metadata.csv').read_text().splitlines()]
        (out / 'manifest.json').write_text(''.join(
            json.dumps({'audio_filepath': f'wavs/{id}.wav', 'text': text}) + '\n' for id, text, *_ in rows))
    if kind == 'notes in a cache': (out / 'notes.txt').write_text('mine')
    if kind == 'recordings in a cache': shutil.copytree(mine / 'wavs', out / 'audio')
    kept = tree(out)
    for writer in (lambda: prepare(mine, out, small, Fake(gain=2.), tokenizer),
                   lambda: merge_caches([copy], out)):
        with pytest.raises(UserError, match='holds something that is not a cache'): writer()
        assert tree(out) == kept

def test_an_older_cache_is_replaced_whole(corpus, small, tokenizer, copy, tmp_path):
    (tmp_path / 'one' / 'wavs').mkdir(parents=True)
    shutil.copy(corpus / 'wavs' / 'low-0.wav', tmp_path / 'one' / 'wavs')
    line(tmp_path / 'one', ROW.format('low-0'))
    prepare(tmp_path / 'one', copy, small, Fake(), tokenizer)
    assert [c['id'] for c in Cache(copy).clips] == ['low-0'] and len(list(copy.glob('shard-*'))) == 1

def test_an_empty_folder_may_hold_the_cache(corpus, small, tokenizer, tmp_path):
    (tmp_path / 'out').mkdir()
    assert prepare(corpus, tmp_path / 'out', small, Fake(), tokenizer)['clips'] == 14

def test_a_corpus_of_another_order_has_the_same_clips(mine, small, dvae, prepared, tmp_path):
    lines = (mine / 'metadata.csv').read_text().splitlines()
    (mine / 'metadata.csv').write_text('\n'.join(reversed(lines)))
    prepare(mine, tmp_path / 'out', small, dvae, prepared.tokenizer)
    other = Cache(tmp_path / 'out')
    for i, clip in enumerate(other.clips):
        j = next(j for j, c in enumerate(prepared.clips) if c['id'] == clip['id'])
        assert all(np.array_equal(other.array(n, i), prepared.array(n, j)) for n in ('codes', 'text', 'mel'))

def test_a_shard_of_which_nothing_is_left(mine, small, tokenizer, tmp_path):
    for name in [f'low-{i}' for i in range(4, 6)]: (mine / 'wavs' / f'{name}.wav').write_text('no sound')
    report = prepare(mine, tmp_path / 'out', small, Fake(), tokenizer, shard_clips=2)
    cache = Cache(tmp_path / 'out')
    assert report['clips'] == len(cache) == 12 and {d['id'] for d in report['dropped']} == {'low-4', 'low-5'}
    mapped = Cache(tmp_path / 'out', in_memory=False)
    assert all(np.array_equal(cache.array(k, i), mapped.array(k, i)) for k in ('codes', 'text', 'mel')
               for i in range(12))
    assert verify_and_fix_cache(tmp_path / 'out')['bad'] == 0


# --- processes ------------------------------------------------------------------------------------

def test_the_same_bytes_for_any_number_of_threads_and_processes(corpus, small, dvae, prepared, tmp_path):
    "The real encoder; in the workers TensorFlow has one thread, here it has two."
    from xtts_nb.models.dvae import load_dvae
    prepare(corpus, tmp_path / 'a', small.replace(data={'num_workers': 4}), dvae, shard_clips=5)
    prepare(corpus, tmp_path / 'b', small, dvae, shard_clips=5, workers=2, load=load_dvae)
    one, two, known = tree(tmp_path / 'a'), tree(tmp_path / 'b'), tree(prepared.folder)
    assert two == known
    # they name the threads
    assert {k for k in one if one[k] != known[k]} == {'config.yaml', 'manifest.json'}

@pytest.fixture(scope='module', autouse=True)
def imported_once():
    "The workers are forked from the server of the tests: else it would begin without half of the library."
    server()

@pytest.fixture
def children():
    "The processes that a test started and that still run."
    import psutil
    me = psutil.Process()
    before = set(me.children(recursive=True))
    return lambda: [p for p in me.children(recursive=True)
                    if p not in before and 'resource_tracker' not in ' '.join(p.cmdline())]

@pytest.mark.parametrize('loader, error, words', [(load_and_fail, RuntimeError, 'these weights are odd'),
                                                  (load_and_die, UserError,
                                                   'ended before its work was done')])
def test_a_worker_that_fails_is_heard_of(corpus, small, tokenizer, tmp_path, children, loader, error, words):
    with pytest.raises(error, match=words):
        prepare(corpus, tmp_path / 'out', small, Fake(), tokenizer, shard_clips=5, workers=1, load=loader)
    assert not list(tmp_path.glob('out*')) and not children()

def begin_adding(): return lambda x: x + 1

def test_jobs_are_spread_and_nobody_is_left(children):
    for job, answer in run_jobs(range(5), 1, begin_adding):
        assert answer == job + 1 and children()
        if job == 3: break
    assert job == 3 and not children()


# --- killed ---------------------------------------------------------------------------------------

PROGRAM = '''
import sys
from pathlib import Path
from fake_dvae import Slow, load_slow
from xtts_nb.config import XTTSConfig, setup_tf
from xtts_nb.data.prepare import prepare
from xtts_nb.data.text import Tokenizer
corpus, out, config, tokenizer, workers = sys.argv[1:]
setup_tf(threads=2)
print('ready', flush=True)
prepare(corpus, out, XTTSConfig.load(config), Slow(), Tokenizer.load(tokenizer), shard_clips=2,
        workers=int(workers), load=load_slow)
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

def family(process) -> list:
    import psutil
    return psutil.Process(process.pid).children(recursive=True)

def gone(processes) -> bool:
    "Whether they all end in due time."
    import psutil
    alive = lambda p: p.is_running() and p.status() != psutil.STATUS_ZOMBIE
    end = time.monotonic() + 20
    while any(map(alive, processes)) and time.monotonic() < end: time.sleep(0.05)
    return not any(map(alive, processes))

@pytest.fixture(scope='session')
def undisturbed(corpus, small, tokenizer, tmp_path_factory):
    out = tmp_path_factory.mktemp('undisturbed') / 'out'
    prepare(corpus, out, small, Fake(), tokenizer, shard_clips=2)
    return tree(out)

RANDOM = np.random.default_rng(4)
# finished shards of 7, seconds more
MOMENTS = [(int(RANDOM.integers(8)), float(RANDOM.uniform(0, 0.15))) for _ in range(12)]

@pytest.mark.parametrize('done, more', [pytest.param(*m, marks=[pytest.mark.slow] * (i not in (0, 3, 8)))
                                        for i, m in enumerate(MOMENTS)])
def test_kill_at_any_moment(start, corpus, small, tokenizer, undisturbed, tmp_path, done, more):
    child, out = start(0), tmp_path / 'here' / 'out'
    while child.poll() is None and not out.exists() and shards(tmp_path) < done: time.sleep(0.005)
    time.sleep(more)
    child.kill()
    child.communicate()
    assert not out.exists() or tree(out) == undisturbed
    kept = 7 if out.exists() else shards(tmp_path)
    assert prepare(corpus, out, small, Fake(), tokenizer, shard_clips=2)['made']['codes'] == 14 - 2 * kept
    assert kept >= done
    assert tree(out) == undisturbed and [p.name for p in (tmp_path / 'here').iterdir()] == ['out']

def shards(tmp_path): return len(list((tmp_path / 'here' / 'out.work').glob('shard-*.json')))

@pytest.mark.slow
@pytest.mark.parametrize('how', [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(start, corpus, small, tokenizer, undisturbed, tmp_path, how):
    child = start(2)
    while not shards(tmp_path):
        assert child.poll() is None
        time.sleep(0.01)
    workers = family(child)
    with pytest.raises(UserError, match='is being prepared by another run'):
        prepare(corpus, tmp_path / 'here' / 'out', small, Fake(), tokenizer, shard_clips=2)
    child.send_signal(how)
    _, err = child.communicate(timeout=60)
    assert len(workers) >= 2 and gone(workers) and err.count('Traceback') == (how == signal.SIGINT), err
    assert not (tmp_path / 'here' / 'out').exists() and 1 <= shards(tmp_path) < 7
    prepare(corpus, tmp_path / 'here' / 'out', small, Fake(), tokenizer, shard_clips=2)
    assert tree(tmp_path / 'here' / 'out') == undisturbed


# --- parts ----------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def parts(corpus, small, tokenizer, tmp_path_factory):
    "The corpus in three parts."
    folder = tmp_path_factory.mktemp('parts')
    for i in (1, 2, 3): prepare(corpus, folder / str(i), small, Fake(), tokenizer, shard_clips=3, part=(i, 3))
    return [folder / str(i) for i in (1, 2, 3)]

@pytest.mark.parametrize('order', [(0, 1, 2), (2, 0, 1)])
def test_merged_parts_are_the_whole(corpus, small, tokenizer, parts, tmp_path, order, capsys):
    whole = prepare(corpus, tmp_path / 'whole', small, Fake(), tokenizer, shard_clips=3)
    report = merge_caches([parts[i] for i in order], tmp_path / 'merged', load=load)
    assert not capsys.readouterr().err   # the sample of each part is the same here
    assert tree(tmp_path / 'merged') == tree(tmp_path / 'whole') and report.items() <= whole.items()
    assert [len(Cache(p)) for p in parts] == [6, 5, 3] and verify_and_fix_cache(parts[1])['bad'] == 0

class Elsewhere(Fake):
    "The same weights on another machine: one code of each clip comes out as its neighbour."
    def encode(self, mel):
        codes = super().encode(mel)
        return codes + tf.one_hot(0, tf.shape(codes)[1], dtype=tf.int32)

def test_a_part_whose_codes_come_out_differently_is_named(mine, small, tokenizer, tmp_path, capsys):
    folders = [tmp_path / str(i) for i in (1, 2, 3)]
    for i, (folder, kind) in enumerate(zip(folders, (Fake, Elsewhere, Fake)), 1):
        prepare(mine, folder, small, kind(), tokenizer, shard_clips=5, part=(i, 3))
    for path in (mine / 'wavs').glob('high-[3456].wav'): path.unlink()   # those of the third part
    capsys.readouterr()
    merge_caches(folders, tmp_path / 'merged', load=load)
    other, gone = capsys.readouterr().err.splitlines()
    assert other.startswith(f'{folders[1]}: 3 of ') and 'codes of 3 clips come out differently' in other
    assert gone.startswith(f'{folders[2]}: its codes were not compared')
    assert len(Cache(tmp_path / 'merged')) == 14

@pytest.mark.parametrize('kind, words', [
    ('missing', ['shard 2/3 is missing']), ('first missing', ['shard 1/3 is missing', '--shard 1/3']),
    ('two missing', ['shard 2/3, 3/3 is missing']),
    ('twice', ['is shard 1/3', 'give each once']), ('nothing', ['no parts']),
    ('DVAE', ['foreign', 'DVAE']), ('limits', ['foreign', 'settings']),
    ('corpus', ['foreign', 'another corpus']),
    ('another number', ['foreign', 'is shard 2/2', 'one of 3']),
    ('damaged', ['shard-00004', 'damaged', 'verify']),
    ('no cache', ['nowhere', 'holds no cache'])])
def test_what_does_not_belong_together_is_named(corpus, mine, small, tokenizer, parts, tmp_path, kind, words):
    foreign, config, dvae, part = tmp_path / 'foreign', small, Fake(), (2, 3)
    if kind == 'DVAE': dvae = Fake(gain=1.5)
    if kind == 'limits': config = small.replace(data={'max_seconds': 9.})
    if kind == 'another number': part = (2, 2)
    if kind == 'corpus': line(mine, ROW.format('nobody'))
    given = [parts[0], foreign, parts[2]]
    if kind in ('DVAE', 'limits', 'another number', 'corpus'):
        prepare(mine if kind == 'corpus' else corpus, foreign, config, dvae, tokenizer, shard_clips=3,
                part=part)
    if kind == 'damaged':
        shutil.copytree(parts[1], foreign)
        shard = foreign / 'shard-00004.safetensors'
        shard.write_bytes(shard.read_bytes()[:-1] + b'\x7f')
    given = {'missing': [parts[0], parts[2]], 'first missing': parts[1:], 'two missing': parts[:1],
             'twice': [parts[0], parts[1], parts[0]], 'nothing': [],
             'no cache': [parts[0], tmp_path / 'nowhere']}.get(kind, given)
    with pytest.raises(UserError) as e: merge_caches(given, tmp_path / 'merged')
    assert not [w for w in words if w not in str(e.value)] and not list(tmp_path.glob('merged*'))

@pytest.mark.parametrize('part, shared, clips, fault', [
    ((1, 1), False, 0, None), ((1, 2), True, 4, None), ((2, 2), True, 4, None),
    ((2, 2), True, 3, '3 clips can be divided into 1 at most'),
    ((5, 5), True, 13, None), ((1, 6), True, 15, '15 clips can be divided into 5 at most'),
    ((2, 2), False, 9, 'share one DVAE'),
    ((2, 1), True, 9, 'I from 1 to N'), ((0, 1), True, 9, 'I from 1 to N')])
def test_parts_that_can_just_be_made(part, shared, clips, fault):
    if not fault: return check_part(part, shared, clips, 3)
    with pytest.raises(UserError, match=f'--shard {part[0]}/{part[1]}: .*{fault}'):
        check_part(part, shared, clips, 3)

@pytest.mark.parametrize('part, shared, words',
                         [((0, 3), True, 'I from 1 to N'), ((4, 3), True, 'I from 1 to N'),
                          ((1, 9), True, 'into 5 at most'), ((1, 2), False, 'share one DVAE')])
def test_parts_that_cannot_be_made(corpus, small, tokenizer, tmp_path, part, shared, words):
    with pytest.raises(UserError, match=words):
        prepare(corpus, tmp_path / 'out', small, Fake(), tokenizer if shared else None, shard_clips=3,
                part=part)
    assert not list(tmp_path.glob('out*'))

def test_too_many_dropped_clips_are_found_when_parts_are_merged(mine, small, tokenizer, tmp_path):
    for i in range(7): (mine / 'wavs' / f'low-{i}.wav').write_text('no sound')
    config = small.replace(data={'max_drop_rate': 0.4})
    for i in (1, 2): prepare(mine, tmp_path / str(i), config, Fake(), tokenizer, shard_clips=7, part=(i, 2))
    assert len(Cache(tmp_path / '1')) == 0
    with pytest.raises(UserError, match='7 of 14 clips cannot be used'):
        merge_caches([tmp_path / '1', tmp_path / '2'], tmp_path / 'out')


# --- runtime --------------------------------------------------------------------------------------

def convert(path, rate=22050, channels=1, subtype='PCM_16', **how):
    soundfile.write(path, np.stack([soundfile.read(path)[0]] * channels, 1), rate, subtype, **how)

# the first and WAVEX are what native reading takes
KINDS_OF_SOUND = [{}, {'subtype': 'FLOAT'}, {'channels': 2}, {'rate': 44100}, {'subtype': 'PCM_24'},
                  {'format': 'WAVEX'}, {'format': 'RF64'}, {'format': 'FLAC'},
                  {'format': 'MP3', 'subtype': None}]

@pytest.fixture
def sounds(mine):
    "The corpus, each recording of another kind, whatever its name says."
    rows = (mine / 'metadata.csv').read_text().splitlines()[:len(KINDS_OF_SOUND)]
    (mine / 'metadata.csv').write_text('\n'.join(rows))
    for kind, row in zip(KINDS_OF_SOUND, rows): convert(mine / 'wavs' / f'{row.split("|")[0]}.wav', **kind)
    return mine

def test_runtime_mode_keeps_only_what_native_reading_takes(sounds, small, tokenizer, tmp_path):
    config = small.replace(data={'preprocessing_mode': 'runtime', 'min_seconds': 0.1})
    report = prepare(sounds, tmp_path / 'out', config, Fake(), tokenizer, shard_clips=4)
    cache = Cache(tmp_path / 'out')
    assert report['mode'] == cache.manifest['mode'] == 'runtime'
    assert len(cache) == len(KINDS_OF_SOUND), report['dropped']
    assert cache.wav_path(0) == sounds / 'wavs' / 'low-0.wav'
    taken = {}, {'format': 'WAVEX'}
    assert ['wav' in row for row in cache.clips] == [kind not in taken for kind in KINDS_OF_SOUND]
    for i, row in enumerate(cache.clips):
        wav = decode_wav(str(cache.wav_path(i))).numpy() / 32768
        original = load_audio(sounds / row['path'])
        assert len(wav) == cache.samples[i] and np.abs(wav - original).max() < 4e-5
        assert cache.codes_length[i] == -(-len(original) // 1024)
        assert cache.mel_length[i] == 1 + len(original) // 256
        assert tokenizer.decode(cache.array('text', i)) == '[en]' + row['text']
    with pytest.raises(UserError, match='holds no codes; prepare it with .* precompute'):
        cache.array('codes', 0)

def test_runtime_and_precomputed_caches_agree_on_lengths(corpus, small, tokenizer, straight, tmp_path):
    prepare(corpus, tmp_path / 'out', small.replace(data={'preprocessing_mode': 'runtime'}), Fake(),
            tokenizer)
    one, two = Cache(straight), Cache(tmp_path / 'out')
    for name in ('samples', 'codes_length', 'text_length', 'mel_length'):
        assert np.array_equal(getattr(one, name), getattr(two, name))
    assert not (tmp_path / 'out' / 'audio').exists() and one.manifest['key'] != two.manifest['key']
    assert all(one.wav_path(i) == two.wav_path(i) for i in range(14))

def test_the_disk_is_waited_for_at_the_end_alone(mine, small, tokenizer, tmp_path, monkeypatch):
    for path in (mine / 'wavs').iterdir(): convert(path, subtype='PCM_24')
    waits, sync = [], os.fsync
    monkeypatch.setattr(os, 'fsync', lambda handle: waits.append(os.readlink(f'/proc/self/fd/{handle}'))
                        or sync(handle))
    config = small.replace(data={'preprocessing_mode': 'runtime'})
    prepare(mine, tmp_path / 'out', config, Fake(), tokenizer)
    assert sum(name.endswith('.wav') for name in waits) <= 14 == len([*tmp_path.glob('out/audio/*.wav')])

def test_names_that_are_not_utf8_are_written_down_escaped(mine, small, tokenizer, tmp_path):
    with open(mine / 'metadata.csv', 'ab') as file: file.write(b'lo\xffw|aa bb\n')
    config = small.replace(data={'max_drop_rate': 0.5})
    report = prepare(mine, tmp_path / 'out', config, Fake(), tokenizer)
    assert [d['id'] for d in report['dropped']] == ['lo\\udcffw']
    for name in (b'anna.wav', b'anna.normalized.txt', b'be\xff.wav', b'be\xff.normalized.txt'):
        path = os.path.join(os.fsencode(tmp_path / 'libri/anna/1'), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if name.endswith(b'txt'): open(path, 'w').write('aa bb')
        else: shutil.copyfile(mine / 'wavs/low-1.wav', path)
    report = prepare(tmp_path / 'libri', tmp_path / 'out', config, Fake(), tokenizer)
    assert [d['id'] for d in report['dropped']] == ['be\\udcff']

def test_a_damaged_recording_of_the_cache_is_found_and_mended(sounds, small, tokenizer, tmp_path):
    config = small.replace(data={'preprocessing_mode': 'runtime', 'min_seconds': 0.1})
    prepare(sounds, tmp_path / 'out', config, Fake(), tokenizer, shard_clips=4)
    whole, (one, two, *_) = tree(tmp_path / 'out'), sorted((tmp_path / 'out' / 'audio').iterdir())
    one.write_bytes(one.read_bytes()[:-1] + b'\x7f')
    two.unlink()
    (tmp_path / 'out' / 'audio' / '00009-00000.wav').write_bytes(b'')
    result = verify_and_fix_cache(tmp_path / 'out')
    assert {(p['file'], p['clip']) for p in result['problems']} == {
        ('audio/00000-00001.wav', 'low-1'), ('audio/00000-00002.wav', 'low-2'), ('audio/00009-00000.wav', '')}
    result = verify_and_fix_cache(tmp_path / 'out', fix=True, load=load)
    assert result['fixed'] == 3 and result['failed'] == 0 and tree(tmp_path / 'out') == whole

@pytest.mark.parametrize('change, mode', [({}, 'precompute'), ({'max_cache_gb': 2e-6}, 'runtime'),
                                          ({'max_cache_gb': 3e-4}, 'precompute'),
                                          ({'preprocessing_mode': 'runtime'}, 'runtime'),
                                          ({'preprocessing_mode': 'precompute', 'max_cache_gb': 1e-9},
                                           'precompute')])
def test_the_mode_follows_the_settings_and_the_size(corpus, small, straight, change, mode):
    clips = read_corpus(corpus)[0]
    assert choose_mode(clips, small.replace(data=change)) == mode
    if change.get('max_cache_gb') == 3e-4:
        assert Cache(straight).mel.nbytes + Cache(straight).codes.nbytes < 3e5

def test_a_recording_of_unknown_length_does_not_change_the_mode(small, tmp_path):
    "As ffmpeg writes a FLAC to a pipe."
    clips = [Clip(str(i), 'a', 's', 'en', tmp_path / f'{i}.flac') for i in range(5)]
    for clip in clips: soundfile.write(clip.path, synthetic_voice(0.5), 22050)
    data = bytearray(clips[3].path.read_bytes())
    data[21], data[22:26] = data[21] & 0xF0, bytes(4)   # the number of samples
    clips[3].path.write_bytes(data)
    assert choose_mode(clips, small.replace(data={'preprocessing_mode': 'auto'})) == 'precompute'

@pytest.mark.parametrize('mode', ['precompute', 'runtime'])
def test_parts_of_a_recording_are_cut_out(small, tokenizer, tmp_path, mode):
    "Each becomes a clip of its own sound, in this run and in one that finds nothing to do."
    folder, wavs = tmp_path / 'corpus', [synthetic_voice(1., 100.), synthetic_voice(1.5, 200.)]
    save_audio(folder / 'talk.wav', np.concatenate(wavs))
    (folder / 'metadata.csv').write_text('file,offset,duration,text\ntalk.wav,0,1,aa\ntalk.wav,1,1.5,bb\n')
    config = small.replace(data={'preprocessing_mode': mode})
    prepare(folder, tmp_path / 'out', config, Fake(), tokenizer)
    assert prepare(folder, tmp_path / 'out', config, Fake(), tokenizer)['up_to_date']
    cache = Cache(tmp_path / 'out')
    assert [(c['text'], c['seconds']) for c in cache.clips] == [('aa', 1.), ('bb', 1.5)]
    for i, wav in enumerate(wavs): assert np.allclose(load_audio(cache.wav_path(i)), wav, atol=1e-4)
    assert not verify_cache(tmp_path / 'out')[1]

def test_runtime_caches_can_be_merged(sounds, small, tokenizer, tmp_path):
    config = small.replace(data={'preprocessing_mode': 'runtime', 'min_seconds': 0.1})
    for i in (1, 2): prepare(sounds, tmp_path / str(i), config, Fake(), tokenizer, shard_clips=3, part=(i, 2))
    prepare(sounds, tmp_path / 'whole', config, Fake(), tokenizer, shard_clips=3)
    merge_caches([tmp_path / '1', tmp_path / '2'], tmp_path / 'merged')
    assert tree(tmp_path / 'merged') == tree(tmp_path / 'whole')


# --- for lessons ------------------------------------------------------------------------------------

def test_a_cache_for_lessons_needs_no_trained_weights(small, tmp_path):
    "Sixteen clips, encoded by their loudness; or by a given encoder, with another number of clips."
    cache, mels = lesson_cache(tmp_path / 'a', small), np.float32([np.zeros((8, 80)), np.ones((8, 80)) * -5])
    assert len(cache) == 16 and cache.folder == tmp_path / 'a' / 'cache'
    assert len(read_corpus(tmp_path / 'a' / 'corpus')[0]) == 16
    assert Loudness().encode(mels).numpy().tolist() == [[0, 0], [100, 100]]
    few = lesson_cache(str(tmp_path / 'b'), small, Fake(), clips=2)
    assert len(few) == 4 and few.array('codes', 0).max() < 32 < cache.array('codes', 0).max()
