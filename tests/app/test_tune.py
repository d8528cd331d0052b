"From a recording to a voice: the plan, what is run again, failures, and the whole on a small recording."
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import yaml

from xtts_nb.app import tune as page
from xtts_nb.app.demo_corpus import _DEMO_SENTENCES
from xtts_nb.app.tune import plan_tuning, _run_stage, tune
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.data.audio import save_audio
from xtts_nb.data.cache import file_sha
from xtts_nb.data.espeak import speak, VOICES

@pytest.fixture
def runs(tmp_path):
    "Stages that only make their file, up to one that fails; the names of those that ran, and the result."
    def run(fails='', **asked):
        names = []
        def plan(): return plan_tuning('book.mp3', tmp_path / 'out', **asked)
        def stage(words):
            if words[0] == fails: raise UserError('no room')
            names.append(words[0])
            made = next(s.made for s in plan() if s.name == words[0])
            made.parent.mkdir(parents=True, exist_ok=True)
            made.write_text('{}')
            return {'words': len(words)}
        return names, tune(plan, tmp_path / 'out', lambda line: None, stage)
    return run

def test_the_commands(tmp_path):
    plan = plan_tuning('b.mp3', tmp_path, 'b.srt', 'de', 'MODEL', (), ('--config', 'c'), ('--steps', '9'))
    assert [' '.join(s.words).replace(f'{tmp_path}/', '') for s in plan] == [
        'corpus b.mp3 --out corpus --language de --text b.srt',
        'prepare corpus --out cache --language de --dvae MODEL --config c',
        'train --data cache --run run --val 0.05 --model MODEL --set training.gpt.eval_clips=4 '
        '--set training.gpt.judge_by=dtw --steps 9',
        'evaluate cache --model run/best --report scores --language de']
    heard = plan_tuning('b', tmp_path, language=None, cut=('--transcribe', 'small'))
    assert not any('--language' in stage.words for stage in heard)   # each clip has the one that was heard
    short = plan_tuning(tmp_path / 'mine', tmp_path, skip=('corpus', 'evaluate'))
    assert [s.name for s in short] == ['prepare', 'train'] and short[0].words[1] == str(tmp_path / 'mine')
    mixed = plan_tuning('b', tmp_path, train=('--steps', '9'), mix=Path('OLD'))[2]
    assert [str(p) for p in mixed.reads[1:]] == ['OLD/manifest.json', 'OLD/metadata.csv']
    for key, given in (('--transcribe', dict(skip=('corpus',), cut=('--transcribe', 'small'))),
                       ('b.txt', dict(skip=('corpus',), text='b.txt')), ('--skip', dict(skip=('train',)))):
        with pytest.raises(UserError, match=key): plan_tuning('b', tmp_path, **given)

@pytest.mark.parametrize('text, listens, judges', [
    ('training: {gpt: {eval_clips: 8}}', False, True), ('training: {gpt: {judge_by: loss}}', True, False),
    ('training: {gpt: {eval_clips: 0}}', False, False), ('training: {gpt: {steps: 5}}', True, True),
    ('training: {gpt: {eval_clips: 0, judge_by: loss}}', True, True), ('', True, True)])   # as a whole config
def test_a_file_may_choose_the_model_otherwise(tmp_path, text, listens, judges):
    (tmp_path / 'own.yaml').write_text(text)
    words = page._judged_words(tmp_path / 'own.yaml')
    assert words == (*('--set', 'training.gpt.eval_clips=4') * listens,
                     *('--set', 'training.gpt.judge_by=dtw') * judges)
    assert plan_tuning('b', tmp_path, judged=words)[2].words.count('--set') == listens + judges
    if '{' in text:   # with the words, the settings are valid
        keys = [word.removeprefix('training.gpt.').replace('=', ': ') for word in words[1::2]]
        sets = yaml.safe_load('\n'.join(keys))
        given = yaml.safe_load(text)['training']['gpt']
        XTTSConfig.tiny().replace(training={'gpt': given | (sets or {})})

def test_only_what_changed_and_what_follows_runs_again(runs, tmp_path):
    assert runs()[0] == [*page._STAGES] and runs()[0] == []
    assert runs(train=('--steps', '9'))[0] == ['train', 'evaluate']
    (tmp_path / 'out' / 'cache' / 'manifest.json').unlink()
    names, done = runs(train=('--steps', '9'))
    assert names == ['prepare', 'train', 'evaluate'] and done['corpus']['result'] == {'words': 6}
    os.utime(tmp_path / 'out' / 'corpus' / 'metadata.csv', (1, 1))   # it was corrected
    names, done = runs(train=('--steps', '9'))
    assert names == ['prepare', 'train', 'evaluate']
    assert json.loads((tmp_path / 'out' / 'tune.json').read_text()) == done

def test_what_follows_a_stage_that_ran_again_is_not_complete(runs):
    "Also if it fails: the model of before is not that of the new clips."
    runs()
    with pytest.raises(UserError): runs('train', prepare=('--preset', 'xtts_v2'))
    assert runs(prepare=('--preset', 'xtts_v2'))[0] == ['train', 'evaluate']

def test_each_cache_has_a_run_of_its_own(tmp_path):
    "A corrected corpus begins one, the corpus as it was goes on; likewise another model, or older clips."
    out, base, mix, words = tmp_path / 'out', tmp_path / 'base', tmp_path / 'mix', {}
    def write(path, text): path.parent.mkdir(parents=True, exist_ok=True), path.write_text(text)
    write(base / 'model.safetensors', 'a')
    write(mix / 'manifest.json', '{"key": "old"}')
    def run(key, **asked):
        def stage(said):
            words[said[0]] = said
            if said[0] == 'prepare': write(out / 'cache/manifest.json', json.dumps({'key': key}))
            if said[0] == 'train':
                folder = Path(said[said.index('--run') + 1])
                facts = {'key': key}
                if 'model' in asked: facts['base_sha'] = file_sha(base / 'model.safetensors')
                if 'mix' in asked: facts |= {'mix': str(mix), 'mix_key': 'old'}
                known = folder / 'run.json'
                assert not known.exists() or json.loads(known.read_text()) == facts
                write(folder / 'run.json', json.dumps(facts))
                write(folder / 'model.safetensors', key)
            return {}
        (out / 'cache/manifest.json').unlink(missing_ok=True)   # the corpus was changed
        tune(lambda: plan_tuning(tmp_path, out, skip=('corpus',), **asked), out, lambda line: None, stage)
        trained = Path(words['train'][words['train'].index('--run') + 1])
        assert words['evaluate'][3] == str(trained / 'best')
        return trained.name
    assert [run('a'), run('b'), run('a')] == ['run', 'run-2', 'run']
    assert [run('b', model=base), run('b', mix=mix), run('b', model=base)] == ['run-3', 'run-4', 'run-3']
    write(base / 'model.safetensors', 'trained on')
    write(out / 'run-5/thesis.txt', 'of somebody')
    assert run('b', model=base) == 'run-6' and (out / 'run' / 'model.safetensors').read_text() == 'a'

@pytest.mark.parametrize('ends, raised, match', [
    (r'print("a\n{\"a\": \"\u2028\"}")', None, ''), ('os.kill(os.getpid(), 15)', SystemExit, '143'),
    ('sys.exit(2)', UserError, 'corpus'), ('sys.exit(130)', SystemExit, '130')])
def test_a_process_of_its_own(tmp_path, monkeypatch, ends, raised, match):
    program = f'#!{sys.executable}\nimport os, sys\nassert sys.argv[3:] == ["corpus", "--json"]\n{ends}\n'
    (tmp_path / 'python').write_text(program)
    (tmp_path / 'python').chmod(0o755)
    monkeypatch.setattr(page.sys, 'executable', str(tmp_path / 'python'))
    if raised is None: assert _run_stage(['corpus']) == {'a': '\u2028'}
    else:
        with pytest.raises(raised, match=match): _run_stage(['corpus'])

def tuned(folder, *lines, steps=100, begun=False, **trained):
    "What `tune` returns for a training with this log, whose first validation is kept."
    (folder / 'run').mkdir(exist_ok=True)
    log = [{'val_dtw': 2., 'val_loss': 1.} | line for line in lines]
    (folder / 'run' / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in log))
    corpus = {'clips': [], 'dropped': [{'start': 3., 'end': 33., 'reason': 'pause'}], 'missing': ['a']}
    results = {'corpus': corpus, 'prepare': {'clips': 1234, 'seconds': 90.},
               'train': {'steps': steps, 'best': {'step': log[0]['step']}} | trained}
    return {name: {'words': ['--model'] * begun, 'result': result} for name, result in results.items()}

def test_the_page_lets_one_hear_the_candidates(tmp_path):
    "Also where a validation has no sound any more, or the log is of a training that was not listened to."
    lines = {'step': 20, 'val_loss': .75, 'val_length': .98, 'val_stop': .25, 'val_words': .5}, {
        'step': 40, 'val_loss': .5, 'val_dtw': 2.25}
    for name in ('b', 'a'): save_audio(tmp_path / f'run/spoken/000000020/{name}.wav', np.zeros(9), 22050)
    done = tuned(tmp_path, *lines)
    text = page.tuning_page(done, tmp_path).read_text()
    rows = [re.sub('<figure>.*?</figure>', '!', row).replace('</td><td>', '|')
            for row in re.findall('<tr.*?</tr>', text[text.index('Candidates'):])]
    assert rows[1:] == ['<tr style=font-weight:600><td>20|0.750|25%|50%|2.00|98%|kept|!</td></tr>',
                        '<tr><td>40|0.500|||2.25|||</td></tr>']
    assert text.count(f'--model {tmp_path}/run/best') == 3 == text.count('--model ')
    (tmp_path / 'run/metrics.jsonl').write_text('{"step": 5, "loss": 3.0}\n')
    done['train']['result']['best'] = None
    done['evaluate'] = {'words': [], 'result': {'scores': [], 'card': 'scores/MODEL.md'}}
    text = page.tuning_page(done, tmp_path, 'de').read_text()
    assert f'xtts-nb say TEXT --language de --model {tmp_path}/run --voice' in text
    assert 'Candidates' not in text and 'href="scores/MODEL.md"' in text

def test_a_stage_is_a_command(tmp_path):
    (tmp_path / 'voices').mkdir()
    assert _run_stage(['voices', 'list', '--voices', str(tmp_path / 'voices')]) == {'voices': []}

@pytest.mark.slow
def test_from_a_recording_to_a_voice(ran, cheap, tmp_path, monkeypatch):
    texts = _DEMO_SENTENCES['en'][:10]
    parts = [p for t in texts for p in (speak(t, 'en', VOICES['f4'])[0], np.zeros(9000, np.int16))]
    soundfile.write(tmp_path / 'book.wav', np.concatenate(parts), 22050)
    (tmp_path / 'book.txt').write_text(' '.join(texts))
    small = XTTSConfig.tiny(64).replace(
        model={'gpt': {'num_layers': 1, 'conditioning_layers': 1}, 'dvae': {'hidden': 16, 'codes': 32}},
        training={'gpt': {'log_every': 1, 'mode': 'graph'},
                  'dvae': {'steps': 2, 'batch_size': 2, 'mode': 'eager'}})
    (tmp_path / 'small.yaml').write_text(small.to_yaml())
    def stage(words):
        done = ran('', *words, '--json')
        assert done.code == 0, done.err
        return json.loads((done.out or done.err).splitlines()[-1])   # stdout of a command in a command
    monkeypatch.setattr(page.tune, '__defaults__', (print, stage))
    out = tmp_path / 'voice'
    line = f'tune {tmp_path}/book.wav --out {out} --config {tmp_path}/small.yaml --steps 2'
    done = ran(f'{line} --json')
    assert done.code == 0, done.err
    assert done.json['train']['steps'] == 2 and done.json['evaluate']['scores']
    assert done.json['model'] == f'{out}/run/best'
    text = (out / 'index.html').read_text()
    for name in ('corpus/listen.html', 'cache/report.html', 'scores/report.html'):
        assert f'href="{name}"' in text and (out / name).is_file()
    assert text.count('<audio') == 2   # of two validations
    kept = done.json['train']['best']['step']
    assert f'| updates | {kept} of ' in (out / 'scores/MODEL.md').read_text()
    assert 'xtts-nb train --data' in text and 'xtts-nb say' in text and '<img' in text
    again = ran(line)
    assert again.code == 0 and again.err.count('(complete)') == 4
