"The demo: which pairs are spoken, what is counted and written, and, in the slow tier, whether it has really learned."
import csv
import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from process import main, tree, xtts_nb
from xtts_nb import demo
from xtts_nb.audio import load_audio, log_mel_numpy
from xtts_nb.cache import Cache
from xtts_nb.config import UserError
from xtts_nb.corpus import SENTENCES, VOICES, digest, plan
from xtts_nb.demo import Pair, choose_pairs, count_hits, spoken_counts, write_pairs
from xtts_nb.score import hits

CLIPS = plan()
COLUMNS = ['set', 'text', 'language', 'voice', 'reference', 'synthesised', 'target']


# --- pairs ---------------------------------------------------------------------------------------------------------

def few(sentences, voices):
    "A smaller corpus."
    return plan({l: t[:sentences] for l, t in SENTENCES.items()}, dict(list(VOICES.items())[:voices]))

SIZES = {'all': (CLIPS, 16), 'one': (CLIPS, 1), 'few': (few(4, 3), 5), 'some': (few(6, 6), 16)}

@pytest.mark.parametrize('clips, n', SIZES.values(), ids=SIZES)
def test_pairs_are_what_they_are_called(clips, n):
    pairs = choose_pairs(clips, n)
    held = {p.target for p in pairs if p.set == 'heldout'}
    train = {p.target for p in pairs if p.set == 'train'}
    assert len(held) == len(train) == n and [p.set for p in pairs] == ['train'] * n + ['heldout'] * n
    assert not held & train
    known = [c for c in clips if c not in held]
    for p in pairs:   # a sentence and a voice that both occur in training, for held-out pairs never together
        assert any(c.text == p.target.text and c.speaker != p.target.speaker for c in known)
        assert any(c.speaker == p.target.speaker and c.text != p.target.text for c in known)
        assert any((c.text, c.speaker) == (p.target.text, p.target.speaker) for c in known) == (p.set == 'train')
        assert p.reference in known and p.reference.text != p.target.text   # never held out, never the same words
        assert (p.reference.speaker, p.reference.language) == (p.target.speaker, p.target.language)

def test_pairs_repeat_and_spread():
    pairs = choose_pairs(CLIPS)
    assert pairs == choose_pairs(CLIPS)
    for name in ('train', 'heldout'):
        targets = [p.target for p in pairs if p.set == name]
        assert {c.language for c in targets} == set(SENTENCES) and {c.speaker for c in targets} == set(VOICES)
        assert len({c.text for c in targets}) == 16
    assert len({p.reference for p in pairs}) > 16


def test_another_seed_is_another_choice():
    first, other = choose_pairs(CLIPS), choose_pairs(CLIPS, seed=3)
    assert other == choose_pairs(CLIPS, seed=3)
    for name in ('train', 'heldout'):
        held, others = ({p.target for p in pairs if p.set == name} for pairs in (first, other))
        assert len(held & others) < 8


# --- several seeds -------------------------------------------------------------------------------------------------

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
    assert seen == [(0, 0), (1, 1), (1, 1), (2, 2)]   # the first was not made again
    assert [r['seed'] for r in rows] == [0, 1, 2] and demo.demo_seeds(tmp_path, 3, small) == rows and len(seen) == 4
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
    (file,) = (tmp_path / 'benchmarks').glob('58_demo_seeds-*.json')
    one = json.loads(file.read_text())
    assert one['rows'] == rows and one['spread']['loss'] == {'min': 1., 'median': 1.5, 'max': 2.}
    assert one['command'] == 'xtts-nb demo --seeds 2 --out there --record'   # the folder of this machine is left out


# --- counting and writing ------------------------------------------------------------------------------------------

def test_sentences_and_voices_are_counted_apart_and_by_set():
    pairs = [Pair(name, None, None) for name in ('train', 'train', 'heldout', 'train', 'heldout')]
    scores = [(True, True), (False, True), (True, False), (True, False), (False, False)]
    blank = [(False, True), (True, False), (True, True), (False, False), (True, True)]
    assert count_hits(pairs, scores, 'train') == (2, 2, 3) and count_hits(pairs, scores, 'heldout') == (1, 0, 2)
    assert spoken_counts(pairs, scores, blank) == {
        'nearest_hits': 2, 'nearest_voice_hits': 2, 'nearest_total': 3,
        'heldout_sentence_hits': 1, 'heldout_voice_hits': 0, 'heldout_total': 2,
        'untrained_hits': 1, 'untrained_heldout_sentence_hits': 2, 'untrained_heldout_voice_hits': 2}

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

def test_the_judge_knows_the_real_clips(prepared, corpus, small):
    "The recordings themselves are right; those of another voice or sentence are not."
    clips = [c for c in demo.read_corpus(corpus)[0] if len(c.text) > 5]
    first = clips[0]
    voice = next(c for c in clips if c.text == first.text and c.speaker != first.speaker)
    words = next(c for c in clips if c.text != first.text and c.speaker == first.speaker)
    pairs = [Pair('train', first, words)] * 3
    scores = demo.judge(pairs, [c.path for c in (first, voice, words)], clips, corpus, small)
    assert scores[0] == (True, True) and scores[1] == (True, False) and not scores[2][0]

def test_a_demo_starts_anew(prepared, small, tmp_path):
    "A second demo does not go on with the run of the first."
    run = demo._fresh_run(prepared, small, tmp_path / 'run', ['low-0'])
    run.save()
    again = demo._fresh_run(prepared, small, tmp_path / 'run', ['low-1'])
    assert again.step == 0 and json.loads((tmp_path / 'run' / 'run.json').read_text())['held_out'] == ['low-1']
    assert not list((tmp_path / 'run').glob('checkpoints/*'))

def test_a_folder_that_is_no_run_is_not_removed(prepared, small, tmp_path):
    (tmp_path / 'run').mkdir(); (tmp_path / 'run' / 'thesis').write_text('mine')
    before = tree(tmp_path)
    with pytest.raises(UserError): demo._fresh_run(prepared, small, tmp_path / 'run', [])
    assert tree(tmp_path) == before

def test_texts_and_voices_are_escaped_in_the_report(corpus, small):
    from test_report import NASTY, Page
    clip = demo.read_corpus(corpus)[0][0]
    target = type(clip)(clip.id, NASTY, NASTY, clip.language, clip.path)
    mel = demo.mel_function(small, small.model.audio.dvae_n_fft)
    page = Page(''.join(demo._speech(Pair('heldout', target, clip), clip.path, (True, False), corpus, mel, 86.)))
    assert 'script' not in [tag for tag, _ in page.tags] and page.text.count(NASTY) == 2
    assert 'sentence right, voice wrong' in page.text and [tag for tag, _ in page.tags].count('audio') == 3


# --- the whole -----------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "`xtts-nb demo --json` as a user runs it: its folder and its result."
    home = tmp_path_factory.mktemp('demo')
    done = xtts_nb('demo', '--json', cwd=home, timeout=3600)
    assert done.code == 0, done.err
    return home, done

def rescore(home, rows) -> list[tuple[bool, bool]]:
    "Sentence and voice right, by the files alone: NumPy's mels, and the corpus as its rows describe it."
    known = [line.split('|') for line in (home / 'runs/demo/corpus/metadata.csv').read_text(encoding='utf-8').splitlines()]
    mel = lambda path: log_mel_numpy(load_audio(path), 1024)
    mels = {c[0]: mel(home / 'runs/demo/corpus/wavs' / f'{c[0]}.wav') for c in known}
    result = []
    for row in rows:
        rivals = [c for c in known if c[4] == row['language']]
        result.append(hits(mel(home / 'runs/demo' / row['synthesised']), [mels[c[0]] for c in rivals],
                           [(c[1], c[3]) for c in rivals], (row['text'], row['voice'])))
    return result

@pytest.mark.slow
def test_it_has_really_learned(whole):
    spoken = whole[1].json['spoken']
    assert spoken['nearest_hits'] == spoken['nearest_total'] == 16
    assert spoken['heldout_total'] == 16 and spoken['heldout_sentence_hits'] >= 12 and spoken['heldout_voice_hits'] >= 12
    assert spoken['untrained_hits'] < spoken['nearest_hits']
    assert spoken['untrained_heldout_sentence_hits'] < spoken['heldout_sentence_hits']
    assert spoken['untrained_heldout_voice_hits'] < spoken['heldout_voice_hits']

@pytest.mark.slow
def test_the_result_has_what_was_promised(whole):
    home, done = whole
    result = done.json
    assert {'corpus', 'data_before_after', 'step_before_after', 'train', 'spoken', 'wav', 'report', 'seconds'} <= result.keys()
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
    assert corpus['clips'] >= 64 and corpus['voices'] >= 4 and corpus['languages'] == 3 and corpus['dropped'] == 0
    assert (home / result['wav']).is_file() and (home / result['report']).is_file() and result['seconds'] > 0

@pytest.mark.slow
@pytest.mark.parametrize('name, hit', [('pairs', ('nearest_hits', 'heldout_sentence_hits', 'heldout_voice_hits')),
                                       ('untrained', ('untrained_hits', 'untrained_heldout_sentence_hits',
                                                      'untrained_heldout_voice_hits'))])
def test_anyone_can_score_them_again(whole, name, hit):
    home, done = whole
    rows = read_pairs(home / 'runs/demo' / f'{name}.csv')
    assert list(rows[0]) == COLUMNS and Counter(r['set'] for r in rows) == {'train': 16, 'heldout': 16}
    for row in rows: assert all((home / 'runs/demo' / row[key]).is_file() for key in ('reference', 'synthesised', 'target'))
    scores = rescore(home, rows)
    train, held = ([s for s, r in zip(scores, rows) if r['set'] == which] for which in ('train', 'heldout'))
    found = sum(s for s, _ in train), sum(s for s, _ in held), sum(v for _, v in held)
    assert found == tuple(done.json['spoken'][key] for key in hit)

@pytest.mark.slow
def test_held_out_clips_were_kept_out(whole):
    home, _ = whole
    rows = read_pairs(home / 'runs/demo/pairs.csv')
    held = {Path(r['target']).stem for r in rows if r['set'] == 'heldout'}
    assert set(json.loads((home / 'runs/demo/run/run.json').read_text())['held_out']) == held and len(held) == 16
    assert not held & {Path(r['reference']).stem for r in rows}
    cache = Cache(home / 'runs/demo/cache')
    assert {c['id'] for c in cache.clips} >= held and np.isfinite(cache.mel.astype(np.float32)).all()

@pytest.mark.slow
def test_the_report_stands_alone(whole):
    from test_report import Page
    home, done = whole
    text = (home / done.json['report']).read_text(encoding='utf-8')
    page = Page(text)
    count = Counter(tag for tag, _ in page.tags)
    assert page.open == [] and count['audio'] >= 3 and count['img'] >= 5
    assert all(a['src'].startswith('data:') for _, a in page.tags if 'src' in a) and len(text) < 20e6
    assert f'{done.json["spoken"]["nearest_hits"]} of 16' in page.text and 'Utilisation' in page.text

@pytest.mark.slow
def test_a_demo_leaves_what_it_says_and_no_more(whole):
    home, _ = whole
    assert {p.name for p in home.iterdir()} == {'runs'}
    assert {p.name for p in (home / 'runs/demo').iterdir()} == {
        'corpus', 'cache', 'run', 'spoken', 'untrained', 'pairs.csv', 'untrained.csv', 'report.html'}
    assert digest(home / 'runs/demo/corpus') == json.loads((home / 'runs/demo/corpus/corpus.json').read_text())['digest']

@pytest.mark.slow
def test_a_demo_can_be_spoken_with(whole, tmp_path):
    home, _ = whole
    row = next(r for r in read_pairs(home / 'runs/demo/pairs.csv') if r['set'] == 'heldout')
    done = xtts_nb('say', row['text'], '--language', row['language'], '--run', home / 'runs/demo/run', '--voice',
                   home / 'runs/demo' / row['reference'], '--out', tmp_path / 'say.wav', '--json')
    assert done.code == 0 and 0.5 < done.json['seconds'] < 8, done.err

@pytest.mark.slow
def test_a_second_demo_in_the_same_place(whole, tmp_path):
    "Short: what stood there is made anew, and the corpus is found done."
    home, _ = whole
    shutil.copytree(home / 'runs', tmp_path / 'runs')
    done = xtts_nb('demo', '--steps', '20', '--json', cwd=tmp_path, timeout=1800)
    assert done.code == 0 and done.json['train']['steps'] == 20, done.err
