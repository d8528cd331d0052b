"The demo: the pairs that are spoken, the counts, the files; marked slow, whether the model has learned."
import csv
import json
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from process import main, python, SMALL, tree, xtts_nb
from xtts_nb.app import cli, demo
from xtts_nb.data.audio import load_audio, log_mel_numpy
from xtts_nb.data.cache import Cache
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.app.demo import (
    DEMO_SENTENCES, VOICES, corpus_digest, plan_corpus, Pair, choose_pairs, count_hits, spoken_counts,
    write_pairs)
from xtts_nb.speech.listen import hits
from xtts_nb.train.runs import new_run

CLIPS = plan_corpus()
COLUMNS = ['set', 'text', 'language', 'voice', 'reference', 'synthesised', 'target']


# --- pairs --------------------------------------------------------------------------------------------------

def few(sentences, voices):
    "A smaller corpus."
    return plan_corpus({l: t[:sentences] for l, t in DEMO_SENTENCES.items()},
                       dict(list(VOICES.items())[:voices]))

SIZES = {'all': (CLIPS, 16), 'one': (CLIPS, 1), 'few': (few(4, 3), 5), 'some': (few(6, 6), 16)}

@pytest.mark.parametrize('clips, n', SIZES.values(), ids=SIZES)
def test_held_out_pairs_are_not_in_training(clips, n):
    pairs = choose_pairs(clips, n)
    held = {p.target for p in pairs if p.set == 'heldout'}
    train = {p.target for p in pairs if p.set == 'train'}
    assert len(held) == len(train) == n and [p.set for p in pairs] == ['train'] * n + ['heldout'] * n
    assert not held & train
    known = [c for c in clips if c not in held]
    for p in pairs:   # a sentence and a voice that both occur in training, for held-out pairs never together
        assert any(c.text == p.target.text and c.speaker != p.target.speaker for c in known)
        assert any(c.speaker == p.target.speaker and c.text != p.target.text for c in known)
        assert any((c.text, c.speaker) == (p.target.text, p.target.speaker)
                   for c in known) == (p.set == 'train')
        # never held out, never the same words
        assert p.reference in known and p.reference.text != p.target.text
        assert (p.reference.speaker, p.reference.language) == (p.target.speaker, p.target.language)

def test_pairs_repeat_and_spread():
    pairs = choose_pairs(CLIPS)
    assert pairs == choose_pairs(CLIPS)
    for name in ('train', 'heldout'):
        targets = [p.target for p in pairs if p.set == name]
        assert {c.language for c in targets} == set(DEMO_SENTENCES)
        assert {c.speaker for c in targets} == set(VOICES)
        assert len({c.text for c in targets}) == 16
    assert len({p.reference for p in pairs}) > 16


def test_the_first_pairs_are_those_of_the_records():
    "What is written in benchmarks/ was said with these."
    pairs = choose_pairs(CLIPS, 2) + choose_pairs(CLIPS, 2, seed=1)
    assert [(p.target.id, p.reference.id) for p in pairs] == GOLDEN

GOLDEN = [   # two learned and two held-out ones, of seed 0 and of seed 1
    ('en-22-m2', 'en-00-m2'), ('fa-04-m4', 'fa-07-m4'), ('fa-06-m4', 'fa-00-m4'), ('de-00-m2', 'de-06-m2'),
    ('en-19-f4', 'en-00-f4'), ('de-11-m7', 'de-05-m7'), ('en-22-m4', 'en-00-m4'), ('fa-14-m7', 'fa-05-m7')]

def test_another_seed_is_another_choice():
    first, other = choose_pairs(CLIPS), choose_pairs(CLIPS, seed=3)
    assert other == choose_pairs(CLIPS, seed=3)
    for name in ('train', 'heldout'):
        held, others = ({p.target for p in pairs if p.set == name} for pairs in (first, other))
        assert len(held & others) < 8


# --- several seeds ------------------------------------------------------------------------------------------

def test_seeds_go_on_after_a_stop(tmp_path, small, monkeypatch):
    "Each seed's scores are kept as it ends; other settings are another measurement."
    seen = []
    def one_seed(clips, corpus, folder, config, pairs, seed, listen):
        seen.append((config.data.seed, config.training.seed))
        if seen == [(0, 0), (1, 1)]: raise KeyboardInterrupt
        return {'seed': seed, 'loss': 10. - seed, 'heldout_sentence_hits': 3 * seed}
    monkeypatch.setattr(demo, 'make_corpus', lambda *a, **k: CLIPS)
    monkeypatch.setattr(demo, '_one_seed', one_seed)
    with pytest.raises(KeyboardInterrupt): demo.demo_seeds(tmp_path, 3, small)
    rows = demo.demo_seeds(tmp_path, 3, small)
    assert seen == [(0, 0), (1, 1), (1, 1), (2, 2)]   # the first was not repeated
    assert [r['seed'] for r in rows] == [0, 1, 2] and demo.demo_seeds(tmp_path, 3, small) == rows
    assert len(seen) == 4
    assert demo.seed_spread(rows) == {'loss': {'min': 8., 'median': 9., 'max': 10.},
                                      'heldout_sentence_hits': {'min': 0, 'median': 3., 'max': 6}}
    demo.demo_seeds(tmp_path, 1, small.replace(training={'steps': small.training.steps + 1}))
    assert len(seen) == 5

def test_the_command_records_the_seeds(tmp_path, monkeypatch, capfd):
    (tmp_path / 'settings.ini').touch()
    monkeypatch.chdir(tmp_path)
    rows = [{'seed': s, 'loss': 1. + s, 'heldout_sentence_hits': 14 + s} for s in range(2)]
    monkeypatch.setattr(demo, 'demo_seeds', lambda out, seeds, config, listen: rows)
    assert main('demo', '--seeds', 2, '--out', tmp_path / 'there', '--record') == 0
    assert 'heldout_sentence_hits: 14.5 (14 to 15)' in capfd.readouterr().out
    (file,) = (tmp_path / 'benchmarks').glob('demo_seeds-*.json')
    one = json.loads(file.read_text())
    assert one['rows'] == rows and one['spread']['loss'] == {'min': 1., 'median': 1.5, 'max': 2.}
    assert one['command'] == 'xtts-nb demo --seeds 2 --out there --record'   # without its absolute path


# --- counting and writing -----------------------------------------------------------------------------------

def test_sentences_and_voices_are_counted_apart_and_by_set():
    pairs = [Pair(name, None, None) for name in ('train', 'train', 'heldout', 'train', 'heldout')]
    scores = [(True, True), (False, True), (True, False), (True, False), (False, False)]
    blank = [(False, True), (True, True), (True, True), (False, False), (True, False)]
    assert count_hits(pairs, scores, 'train') == (2, 2, 3)
    assert count_hits(pairs, scores, 'heldout') == (1, 0, 2)
    assert spoken_counts(pairs, scores, blank) == {
        'nearest_hits': 2, 'nearest_voice_hits': 2, 'nearest_total': 3,
        'heldout_sentence_hits': 1, 'heldout_voice_hits': 0, 'heldout_total': 2,
        'untrained_hits': 1, 'untrained_heldout_sentence_hits': 2, 'untrained_heldout_voice_hits': 1}

def read_pairs(path) -> list[dict]:
    with open(path, newline='', encoding='utf-8') as f: return list(csv.DictReader(f))

def test_pairs_are_written_with_paths_from_their_folder(tmp_path):
    pairs = choose_pairs(CLIPS, 2)
    spoken = [tmp_path / 'spoken' / f'{i}.wav' for i in range(4)]
    write_pairs(tmp_path / 'pairs.csv', pairs, spoken, tmp_path / 'corpus')
    rows = read_pairs(tmp_path / 'pairs.csv')
    assert list(rows[0]) == COLUMNS and len(rows) == 4
    for row, pair, file in zip(rows, pairs, spoken):
        assert (row['set'], row['text'], row['language'], row['voice']) == (
            pair.set, pair.target.text, pair.target.language, pair.target.speaker)
        assert tmp_path / row['synthesised'] == file and row['target'] == f'corpus/wavs/{pair.target.id}.wav'
        assert row['reference'] == f'corpus/wavs/{pair.reference.id}.wav'

def test_real_clips_score_right(prepared, corpus, small):
    "The recordings themselves are right; those of another voice or sentence are not."
    clips = [c for c in demo.read_corpus(corpus)[0] if len(c.text) > 5]
    first = clips[0]
    voice = next(c for c in clips if c.text == first.text and c.speaker != first.speaker)
    words = next(c for c in clips if c.text != first.text and c.speaker == first.speaker)
    pairs = [Pair('train', first, words)] * 3
    scores = demo.score_pairs(pairs, [c.path for c in (first, voice, words)], clips, corpus, small)
    assert scores[0] == (True, True) and scores[1] == (True, False) and not scores[2][0]

def test_a_demo_starts_anew(prepared, small, tmp_path):
    "A second demo does not go on with the run of the first."
    run = demo._fresh_run(prepared, small, tmp_path / 'run', ['low-0'])
    run.save()
    for name in ('notes.txt', 'checkpoints/notes.txt'):
        (tmp_path / 'run' / name).write_text('mine')
        with pytest.raises(UserError, match='notes.txt'):
            demo._fresh_run(prepared, small, tmp_path / 'run', [])
        (tmp_path / 'run' / name).unlink()
    again = demo._fresh_run(prepared, small, tmp_path / 'run', ['low-1'])
    assert again.step == 0
    assert json.loads((tmp_path / 'run' / 'run.json').read_text())['held_out'] == ['low-1']
    assert not list((tmp_path / 'run').glob('checkpoints/*'))

@pytest.mark.parametrize('steps, updates', [(8, 8), (20, 8)])
def test_a_run_that_no_demo_has_made_is_not_removed(cheap, prepared, mini, tmp_path, steps, updates):
    "Found before the minutes of work too."
    config, run = mini.replace(training={'steps': 8, 'checkpoint_every': 1}), tmp_path / 'run'
    new_run(prepared, config.replace(training={'steps': steps}), run).fit(steps=updates)
    before = tree(tmp_path)
    starts = partial(demo._fresh_run, prepared, config, run, []), partial(demo.run_demo, tmp_path, config)
    for start in starts:
        with pytest.raises(UserError, match=f'{run}: is not as a demo left it, and would be removed'): start()
        assert tree(tmp_path) == before

def test_a_demo_of_another_length_replaces_its_own_run(cheap, prepared, mini, tmp_path):
    "But not one that somebody trained further."
    config, run = mini.replace(training={'steps': 2, 'checkpoint_every': 1}), tmp_path / 'run'
    longer = config.replace(training={'steps': 3})
    demo._fresh_run(prepared, config, run, []).fit()
    assert demo._fresh_run(prepared, longer, run, []).step == 0
    demo._fresh_run(prepared, config, run, []).fit()
    (run / 'config.yaml').write_text(longer.to_yaml())   # as `train --run RUN --steps 3` does
    with pytest.raises(UserError, match='not as a demo left it'): demo._fresh_run(prepared, longer, run, [])

def test_a_folder_that_is_no_run_is_not_removed(prepared, small, tmp_path):
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'thesis').write_text('mine')
    before = tree(tmp_path)
    with pytest.raises(UserError): demo._fresh_run(prepared, small, tmp_path / 'run', [])
    assert tree(tmp_path) == before

def test_texts_and_voices_are_escaped_in_the_report(corpus, small):
    from test_report_demo import NASTY, Page
    clip = demo.read_corpus(corpus)[0][0]
    target = type(clip)(clip.id, NASTY, NASTY, clip.language, clip.path)
    mel = demo.mel_function(small, small.model.audio.dvae_n_fft)
    page = Page(''.join(demo._pair_section(Pair('heldout', target, clip), clip.path, (True, False), corpus,
                                           mel, 86.)))
    assert 'script' not in [tag for tag, _ in page.tags] and page.text.count(NASTY) == 2
    assert 'sentence right, voice wrong' in page.text and [tag for tag, _ in page.tags][0] == 'h3'
    assert [tag for tag, _ in page.tags].count('audio') == 3


# --- the parts of a demo, and how they are put together -----------------------------------------------------

TINY = XTTSConfig.tiny()

@pytest.fixture
def stages():
    "Stages, and the list of their reports."
    notes = []
    return demo.Stages(lambda *what: notes.append(what),
                       SimpleNamespace(mark=lambda name: notes.append(('mark', name)))), notes

def test_a_stage_is_reported_and_marked(stages):
    made, notes = stages
    progress = made.begin('speak')
    progress(1, 3)
    progress(2, 3, 'a note')
    assert notes == [('mark', 'speak'), ('speak', 0, 1, ''), ('speak', 1, 3, ''), ('speak', 2, 3, 'a note')]
    silent = demo.Stages(None, made.sampler)
    silent.begin('listen')(1, 3)
    assert notes[4:] == [('mark', 'listen')]

def row(name, unit, fault, *medians):
    sources = {source: {'median': m, 'low': m, 'high': m, 'clips': 16} for source, m in zip(
        ('recording', 'copy', 'model', 'untrained'), medians)}
    return {'score': name, 'name': name, 'unit': unit, 'offered': not fault, 'fault': fault} | sources

SCORES = [row('mel', '', '', 0., 11.5, 14.125, 23.), row('f0', 'cents', '', 0., 240., 250., 1008.),
          row('mcd', 'dB', 'pyworld is missing')]

def test_the_summary_has_a_line_of_scores():
    arms = [{'name': 'a', 'ratio': 1.}]
    result = {'data_before_after': arms, 'step_before_after': arms, 'spoken': spoken_counts([], [], [])}
    result |= {'scores': SCORES, 'seconds': 90., 'report': 'r.html'}
    assert cli._demo_text(result).splitlines()[-3:] == [
        'Scores, as model (copy-synthesis, untrained): mel 14.1 (11.5, 23), f0 250 (240, 1,008) cents; '
        'not offered: mcd (pyworld is missing).', '', '1.5 minutes. Listen and look: r.html']

REPORT = {'clips': 9, 'seconds': 12.5, 'speakers': {'a': 5, 'b': 4}, 'languages': {'en': 9},
          'dropped': ['x', 'y', 'z'], 'longest': 2.}

# --- the whole ----------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "`xtts-nb demo --json` as a user runs it: its folder and its result."
    home = tmp_path_factory.mktemp('demo')
    done = xtts_nb('demo', '--json', cwd=home, timeout=3600)
    assert done.code == 0, done.err
    return home, done

def rescore(home, rows) -> list[tuple[bool, bool]]:
    "Sentence and voice right, by the files alone: NumPy's mels, and the corpus as its rows describe it."
    known = [line.split('|')
             for line in (home / 'runs/demo/corpus/metadata.csv').read_text(encoding='utf-8').splitlines()]
    mel = lambda path: log_mel_numpy(load_audio(path), 1024)
    mels = {c[0]: mel(home / 'runs/demo/corpus/wavs' / f'{c[0]}.wav') for c in known}
    result = []
    for row in rows:
        rivals = [c for c in known if c[4] == row['language']]
        result.append(hits(mel(home / 'runs/demo' / row['synthesised']), [mels[c[0]] for c in rivals],
                           [(c[1], c[3]) for c in rivals], (row['text'], row['voice'])))
    return result

@pytest.mark.slow
def test_the_model_has_learned(whole):
    spoken = whole[1].json['spoken']
    assert spoken['nearest_hits'] == spoken['nearest_total'] == 16
    assert spoken['heldout_total'] == 16 and spoken['heldout_sentence_hits'] >= 12
    assert spoken['heldout_voice_hits'] >= 12
    assert spoken['untrained_hits'] < spoken['nearest_hits']
    assert spoken['untrained_heldout_sentence_hits'] < spoken['heldout_sentence_hits']
    assert spoken['untrained_heldout_voice_hits'] < spoken['heldout_voice_hits']

@pytest.mark.slow
def test_the_result_has_all_keys(whole):
    home, done = whole
    result = done.json
    assert {'corpus', 'data_before_after', 'step_before_after', 'train', 'spoken', 'scores', 'wav', 'report',
            'seconds'} <= result.keys()
    assert {'mel', 'duration'} <= {s['score'] for s in result['scores'] if s['offered']}
    for name, unit, arms in (('data_before_after', 'clips_per_s', ['numpy_function', 'native', 'cache']),
                             ('step_before_after', 'step_ms', ['eager', 'graph', 'xla'])):
        assert [r['name'] for r in result[name]] == arms and all(r[unit] > 0 for r in result[name])
        first = result[name][0][unit]
        ratios = [r[unit] / first if unit == 'clips_per_s' else first / r[unit] for r in result[name]]
        assert [r['ratio'] for r in result[name]] == pytest.approx(ratios, rel=0.02) and ratios[0] == 1
    assert [r['traces'] for r in result['step_before_after']] == [0, 1, 1]
    train = result['train']
    assert train['steps'] == 1000 and train['loss_last'] < train['loss_first'] and train['traces'] == 3
    corpus = result['corpus']
    assert corpus['clips'] >= 64 and corpus['voices'] >= 4 and corpus['languages'] == 3
    assert corpus['dropped'] == 0
    assert (home / result['wav']).is_file() and (home / result['report']).is_file() and result['seconds'] > 0

@pytest.mark.slow
@pytest.mark.parametrize('name, hit',
                         [('pairs', ('nearest_hits', 'heldout_sentence_hits', 'heldout_voice_hits')),
                                       ('untrained', ('untrained_hits', 'untrained_heldout_sentence_hits',
                                                      'untrained_heldout_voice_hits'))])
def test_anyone_can_score_them_again(whole, name, hit):
    home, done = whole
    rows = read_pairs(home / 'runs/demo' / f'{name}.csv')
    assert list(rows[0]) == COLUMNS and Counter(r['set'] for r in rows) == {'train': 16, 'heldout': 16}
    for row in rows:
        assert all((home / 'runs/demo' / row[key]).is_file()
                   for key in ('reference', 'synthesised', 'target'))
    scores = rescore(home, rows)
    train, held = ([s for s, r in zip(scores, rows) if r['set'] == which] for which in ('train', 'heldout'))
    counts = sum(s for s, _ in train), sum(s for s, _ in held), sum(v for _, v in held)
    assert counts == tuple(done.json['spoken'][key] for key in hit)

@pytest.mark.slow
def test_held_out_clips_were_kept_out(whole):
    home, _ = whole
    rows = read_pairs(home / 'runs/demo/pairs.csv')
    held = {Path(r['target']).stem for r in rows if r['set'] == 'heldout'}
    assert set(json.loads((home / 'runs/demo/run/run.json').read_text())['held_out']) == held
    assert len(held) == 16
    assert not held & {Path(r['reference']).stem for r in rows}
    cache = Cache(home / 'runs/demo/cache')
    assert {c['id'] for c in cache.clips} >= held and np.isfinite(cache.mel.astype(np.float32)).all()

@pytest.mark.slow
def test_the_report_needs_no_other_file(whole):
    from test_report_demo import Page
    home, done = whole
    text = (home / done.json['report']).read_text(encoding='utf-8')
    page = Page(text)
    count = Counter(tag for tag, _ in page.tags)
    assert page.open == [] and count['audio'] >= 3 and count['img'] >= 5
    assert all(a['src'].startswith('data:') for _, a in page.tags if 'src' in a) and len(text) < 20e6
    assert f'{done.json["spoken"]["nearest_hits"]} of 16' in page.text and 'Utilisation' in page.text

@pytest.mark.slow
def test_a_demo_leaves_no_other_files(whole):
    home, _ = whole
    assert {p.name for p in home.iterdir()} == {'runs'}
    assert {p.name for p in (home / 'runs/demo').iterdir()} == {
        'corpus', 'cache', 'run', 'spoken', 'untrained', 'pairs.csv', 'untrained.csv', 'report.html'}
    corpus = home / 'runs/demo/corpus'
    assert corpus_digest(corpus) == json.loads((corpus / 'corpus.json').read_text())['digest']

@pytest.mark.slow
def test_a_demo_can_be_spoken_with(whole, tmp_path):
    home, _ = whole
    row = next(r for r in read_pairs(home / 'runs/demo/pairs.csv') if r['set'] == 'heldout')
    done = xtts_nb('say', row['text'], '--language', row['language'], '--model', home / 'runs/demo/run',
                   '--voice',
                   home / 'runs/demo' / row['reference'], '--out', tmp_path / 'say.wav', '--json')
    assert done.code == 0 and 0.5 < done.json['seconds'] < 8, done.err

@pytest.mark.slow
def test_a_second_demo_in_the_same_place(whole, tmp_path, cheap_xla):
    "A small one: what stood there is made anew, and the corpus is found done."
    home, _ = whole
    shutil.copytree(home / 'runs', tmp_path / 'runs')
    there = tmp_path / 'runs/demo'
    made = lambda: (there / 'corpus/corpus.json').stat().st_mtime_ns
    before = made()
    done = python(SMALL, 'demo', '--steps', '20', '--json', cwd=tmp_path, timeout=1800)
    assert done.code == 0 and done.json['train']['steps'] == 20, done.err
    assert made() == before
    held = [Path(r['target']).stem for r in read_pairs(there / 'pairs.csv') if r['set'] == 'heldout']
    assert len(held) == 2 and json.loads((there / 'run/run.json').read_text())['held_out'] == sorted(held)
