"The demo: its corpus, the pairs that are spoken, the report, whose files it removes; slow: what was learned."
import csv
import errno
import json
import re
import shutil
from functools import partial
from html import escape
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from process import PROGRAM, python, tree, xtts_nb
from xtts_nb.app import demo
from xtts_nb.report import facts, heading, picture, player
from xtts_nb.app.demo_corpus import _corpus_digest, _DEMO_SENTENCES, make_corpus, _plan_corpus
from xtts_nb.app.demo_pairs import choose_pairs
from xtts_nb.config import UserError
from xtts_nb.data.audio import load_audio, save_audio, synthetic_voice
from xtts_nb.data.cache import Cache
from xtts_nb.data.corpora import Dropped, summary
from xtts_nb.data.espeak import VOICES
from xtts_nb.data.pages import corpus_page
from xtts_nb.train.runs import new_run

CLIPS = _plan_corpus()

# --- the corpus ---------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def spoken(tmp_path_factory):
    out = tmp_path_factory.mktemp('corpus') / 'small'
    return out, make_corpus(out, limit=1)

HUSH = ('import hashlib, time; from xtts_nb.app.demo_corpus import make_corpus\n'
        'from xtts_nb.data.espeak import speak, SynthVoice\n'
        'print(hashlib.sha256(speak("Hush.", "en", SynthVoice("whisper"))[0].tobytes()).hexdigest())\n')

def test_fresh_processes_write_the_same_bytes(spoken, tmp_path):
    "Whatever was spoken before, and whenever: noise is not seeded by the clock."
    first = python(HUSH + f'make_corpus({str(tmp_path / "a")!r}, limit=1); time.sleep(1.1)')
    assert first.code == 0 and _corpus_digest(tmp_path / 'a') == _corpus_digest(spoken[0])
    assert python(HUSH).out == first.out != ''

def test_every_voice_speaks_every_sentence_for_a_second_to_six(spoken):
    out, clips = spoken
    everything = {(v, l, t) for v in VOICES for l in _DEMO_SENTENCES for t in _DEMO_SENTENCES[l][:1]}
    assert {(c.speaker, c.language, c.text) for c in clips} == everything
    audio = [load_audio(out / 'wavs' / f'{c.id}.wav') for c in clips]
    assert all(1 <= len(x) / 22050 <= 6 and np.abs(x).max() > 0.09 for x in audio)
    assert len({x.tobytes() for x in audio}) == len(clips) == len([*(out / 'wavs').iterdir()])
    before = {p: p.stat().st_mtime_ns for p in out.rglob('*')}
    assert make_corpus(out, limit=1, progress=lambda *_: pytest.fail('the clips are made again')) == clips
    assert {p: p.stat().st_mtime_ns for p in out.rglob('*')} == before

def test_a_corpus_that_was_changed_stays(spoken, tmp_path):
    shutil.copytree(spoken[0], out := tmp_path / 'c')
    next((out / 'wavs').iterdir()).write_bytes(b'of somebody')
    before = tree(out)
    with pytest.raises(UserError, match='changed after'): make_corpus(out, limit=1)
    assert tree(out) == before

def test_an_interrupted_corpus_and_a_full_disk_leave_nothing(monkeypatch, tmp_path):
    def stop(done, total):
        if done == 3: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): make_corpus(tmp_path / 'c', limit=1, progress=stop)
    def full(*_): raise OSError(errno.ENOSPC, 'No space left on device')
    monkeypatch.setattr(Path, 'write_bytes', full)
    with pytest.raises(UserError, match='c: the disk is full'): make_corpus(tmp_path / 'c', limit=1)
    assert not any(tmp_path.iterdir())

def test_a_library_held_by_others_is_noticed(tmp_path):
    code = ('import ctypes; from xtts_nb.app.demo_corpus import make_corpus\n'
            'from xtts_nb.data.espeak import espeak_files; held = ctypes.CDLL(espeak_files()[0])\n'
            f'make_corpus({str(tmp_path / "c")!r}, limit=1)')
    assert 'a process of its own' in python(code).err and not list(tmp_path.iterdir())

# --- pairs --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('clips, n', [
    (CLIPS, 16), (CLIPS, 1), (_plan_corpus({l: t[:4] for l, t in _DEMO_SENTENCES.items()},
                                           dict([*VOICES.items()][:3])), 5)], ids=['all', 'one', 'few'])
def test_held_out_pairs_are_not_in_training(clips, n):
    pairs = choose_pairs(clips, n)
    held = {p.target for p in pairs if p.set == 'heldout'}
    train = {p.target for p in pairs if p.set == 'train'}
    assert len(held) == len(train) == n and [p.set for p in pairs] == ['train'] * n + ['heldout'] * n
    known = [c for c in clips if c not in held]
    for p in pairs:   # a sentence and a voice that both occur in training, for held-out pairs never together
        assert any(c.text == p.target.text and c.speaker != p.target.speaker for c in known)
        assert any(c.speaker == p.target.speaker and c.text != p.target.text for c in known)
        assert (p.target in known) == (p.set == 'train')
        assert p.reference in known and p.reference.text != p.target.text   # never the same words
        assert (p.reference.speaker, p.reference.language) == (p.target.speaker, p.target.language)

# --- whose run it removes -----------------------------------------------------------------------------------

def test_a_demo_starts_again_and_removes_only_its_own_run(cheap, prepared, mini, tmp_path):
    "Not what somebody trained further, nor what somebody put there; that is found before minutes of work."
    config, run = mini.replace(training={'gpt': {'steps': 2, 'checkpoint_every': 1}}), tmp_path / 'run'
    longer, fresh = config.replace(training={'gpt': {'steps': 3}}), partial(demo._fresh_run, prepared)
    fresh(config, run, ['low-0']).fit()
    for name in ('notes.txt', 'checkpoints/notes.txt'):
        (run / name).write_text('mine')
        with pytest.raises(UserError, match='notes.txt'): fresh(config, run, [])
        (run / name).unlink()
    again = fresh(longer, run, ['low-1'])
    assert again.step == 0 and not list(run.glob('checkpoints/*'))
    assert json.loads((run / 'run.json').read_text())['held_out'] == ['low-1']
    again.fit()
    nine = config.replace(training={'gpt': {'steps': 9}})   # as by `train`
    (run / 'config.yaml').write_text(nine.to_yaml())
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine/thesis').write_text('mine')
    new_run(prepared, config.replace(training={'gpt': {'steps': 8}}), tmp_path / 'other').fit(steps=8)
    before = tree(tmp_path)
    for folder in (run, tmp_path / 'mine', tmp_path / 'other'):
        with pytest.raises(UserError): fresh(config, folder, [])
        assert tree(tmp_path) == before
    with pytest.raises(UserError, match='not as a demo left it'): demo.run_demo(tmp_path, config)
    assert tree(tmp_path) == before

# --- the report ---------------------------------------------------------------------------------------------

NASTY = '<script>alert("1")</script> & "quoted" \' سلام'

def test_texts_are_escaped(tmp_path):
    "In attributes too, which a quotation mark would end."
    save_audio(tmp_path / 'a.wav', synthetic_voice(0.1), 22050)
    clip = {'id': NASTY, 'text': NASTY, 'speaker': f'{NASTY}\u202e', 'seconds': 1., 'language': 'fa'}
    page = corpus_page(summary([clip], [Dropped('x', NASTY)]), tmp_path / 'p.html', NASTY)
    for text in (picture(Figure(), NASTY), player(tmp_path / 'a.wav', NASTY), heading(NASTY, NASTY),
                 facts({NASTY: NASTY}), page.read_text(encoding='utf-8')):
        assert escape(NASTY) in text
        assert not [part for part in ('<script', '"quoted"', '\u202e') if part in text]

# --- the whole ----------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "`xtts-nb demo --json` as a user runs it, which compares for one round: its folder and its result."
    home = tmp_path_factory.mktemp('demo')
    once = ('from functools import partial; from xtts_nb.app import demo\n'
            'demo.run_demo = partial(demo.run_demo, rounds=1)\n')
    done = python(once + PROGRAM, 'demo', '--json', cwd=home, timeout=3600)
    assert done.code == 0, done.err
    return home, done.json

@pytest.mark.slow
def test_the_model_has_learned(whole):
    home, result = whole
    spoken = result['spoken']
    assert spoken['nearest_hits'] == spoken['nearest_total'] == spoken['heldout_total'] == 16
    assert spoken['heldout_sentence_hits'] >= 12 and spoken['heldout_voice_hits'] >= 12
    assert spoken['untrained_hits'] < 16
    for name in 'heldout_sentence_hits', 'heldout_voice_hits':
        assert spoken[f'untrained_{name}'] < spoken[name]
    for name, unit in ('data_before_after', 'clips_per_s'), ('step_before_after', 'step_ms'):
        assert [r['ratio'] > 0 and r[unit] > 0 for r in result[name]] == [True] * 3
    assert [r['traces'] for r in result['step_before_after']] == [0, 1, 1]
    train = result['train']
    assert train['steps'] == 1000 and train['loss_last'] < train['loss_first'] and train['traces'] == 3
    assert {'mel', 'duration'} <= {s['score'] for s in result['scores'] if s['offered']}

@pytest.mark.slow
def test_what_a_demo_leaves(whole, tmp_path):
    "Nothing else; held-out clips were kept out; its model speaks."
    home, result = whole
    there = home / 'runs/demo'
    assert {p.name for p in home.iterdir()} == {'runs'} and {p.name for p in there.iterdir()} == {
        'corpus', 'cache', 'run', 'spoken', 'untrained', 'pairs.csv', 'untrained.csv', 'report.html'}
    with open(there / 'pairs.csv', newline='', encoding='utf-8') as file: rows = [*csv.DictReader(file)]
    held = {Path(r['target']).stem for r in rows if r['set'] == 'heldout'}
    assert {*json.loads((there / 'run/run.json').read_text())['held_out']} == held and len(held) == 16
    assert not held & {Path(r['reference']).stem for r in rows}
    cache = Cache(there / 'cache')
    assert {c['id'] for c in cache.clips} >= held and np.isfinite(cache.mel.astype(np.float32)).all()
    page = (home / result['report']).read_text(encoding='utf-8')
    assert {*re.findall(r'\bsrc="([^":]*)', page)} == {'data'}   # nothing is loaded from elsewhere
    assert f'{result["spoken"]["nearest_hits"]} of 16' in re.sub(r'(<[^>]*>|\s)+', ' ', page)
    row = next(r for r in rows if r['set'] == 'heldout')
    done = xtts_nb('say', row['text'], '--language', row['language'], '--model', there / 'run', '--voice',
                   there / row['reference'], '--out', tmp_path / 'say.wav', '--json')
    assert done.code == 0 and 0.5 < done.json['seconds'] < 8, done.err
