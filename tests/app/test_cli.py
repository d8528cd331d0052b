"""The command line in child processes: one JSON object, one sentence, an exit code, no partial output.

The commands of cli_data, cli_voice and cli_devices; test_cli_train and test_cli_watch hold the others."""
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import soundfile

from process import (
    Done, Forked, hears_ctrl_c, interrupted, main, python, SMALL, started, tree, xtts_nb)
from xtts_nb import __version__
from xtts_nb.data.audio import load_audio
from xtts_nb.data.cache import Cache
from xtts_nb.config import XTTSConfig

COMMANDS = [[], ['demo'], ['download'], ['prepare'], ['merge'], ['verify'], ['train'], ['say'], ['evaluate'],
            ['monitor'],
            ['serve'], ['bench'], ['bench', 'data'], ['bench', 'train'], ['bench', 'dual'], ['bench', 'say'],
            ['train-dvae'], ['train-decoder'], ['convert'], ['convert', 'from-coqui'],
            ['convert', 'to-coqui'], ['add-language'], ['config'], ['config', 'create'], ['configure'],
            ['check'], ['voices'],
            ['voices', 'add'], ['voices', 'blend'], ['convert', 'to-savedmodel']]


@pytest.fixture(scope='session')
def mini(small):
    "The smallest settings that still have every part; one shape, and seconds less without XLA."
    return small.replace(model={'gpt': {'layers': 1, 'conditioning_layers': 1}},
                         data={'buckets': 1, 'max_drop_rate': 1.},
                         training={'steps': 4, 'log_every': 2, 'checkpoint_every': 2, 'dvae_steps': 2,
                                   'mode': 'graph'})

@pytest.fixture(scope='session')
def settings(mini, tmp_path_factory):
    path = tmp_path_factory.mktemp('settings') / 'mini.yaml'
    path.write_text(mini.to_yaml())
    return path

@pytest.fixture(scope='session')
def session(corpus, settings, tmp_path_factory):
    "Prepare, train and say as a user does, in a folder whose name has a space and non-ASCII letters."
    home = tmp_path_factory.mktemp('a b') / 'Größe 大'
    home.mkdir()
    shutil.copytree(corpus, home / 'my corpus')
    shutil.copy(settings, home / 'mini settings.yaml')
    done = {'home': home}
    done['prepare'] = xtts_nb('prepare', 'my corpus', '--out', 'the cache', '--config', 'mini settings.yaml',
                              '--json', cwd=home)
    done['train'] = xtts_nb('train', '--data', 'the cache', '--json', cwd=home)
    voice = 'my corpus/wavs/low-0.wav'
    done['say'] = xtts_nb('say', 'aa bb', '--model', 'runs/train-1', '--voice', voice, '--out',
                          'out put/ä.wav',
                          '--json', cwd=home)
    return done


# --- help and options ---------------------------------------------------------------------------------------

HELP = '''
import io, json, sys
from contextlib import redirect_stdout
from xtts_nb.app.cli import main
for command in json.loads(sys.argv[1]):
    sys.argv[1:], shown, code = [*command, '--help'], io.StringIO(), None
    with redirect_stdout(shown):
        try: main()
        except SystemExit as end: code = end.code
    heavy = [m for m in ('tensorflow', 'keras', 'numpy', 'pydantic') if m in sys.modules]
    print(json.dumps([' '.join(command), code, shown.getvalue(), heavy]))
'''

@pytest.fixture(scope='module')
def helps():
    "Command -> [exit code, text, heavy modules that are imported by then], of a single process."
    done = python(HELP, json.dumps(COMMANDS), cold=True)
    assert done.code == 0 and not done.err, done.err
    return {name: rest for name, *rest in map(json.loads, done.out.splitlines())}

@pytest.mark.parametrize('command', COMMANDS, ids=' '.join)
def test_help_imports_nothing_heavy(helps, command):
    code, text, heavy = helps[' '.join(command)]
    assert code == 0 and 'Usage' in text and not {'tensorflow', 'keras'} & {*heavy}
    if not command: assert all(names[0] in text for names in COMMANDS if names)
    else: assert command in (['bench'], ['convert'], ['config'], ['voices']) or '--json' in text

@pytest.mark.parametrize('arguments', [
    ['no-such-command'], ['prepare'], ['prepare', 'corpus'], ['train', '--no-such-option'],
    ['train', '--steps', 'many'],
    ['train', '--steps', '0'], ['say', 'text'], ['monitor', '--interval', '0'], ['bench', 'nothing'],
    ['demo', '--steps', '-1'],
], ids=' '.join)
def test_wrong_options_are_answered_in_a_sentence(arguments, capfd):
    assert main(*arguments) == 2
    out, err = capfd.readouterr()
    unknown = any('no-such' in word for word in arguments)   # the parser does not say where
    place = ['xtts-nb', *([] if unknown else arguments[:1])]
    assert out == '' and err.startswith('xtts-nb: ') and err.endswith(f'See {" ".join(place)} --help.\n')
    assert len(err.splitlines()) == 1

def test_wrong_options_in_a_process_of_its_own():
    done = xtts_nb('train', '--no-such-option', cold=True)
    assert (done.code, done.out) == (2, '') and '--no-such-option' in done.said[0]
    assert 'Traceback' not in done.err

def test_the_version():
    done = xtts_nb('--version', cold=True)
    assert (done.code, done.out.strip(), done.err) == (0, __version__, '')

@pytest.mark.parametrize('arguments', [[], ['bench']], ids=['nothing', 'bench'])
def test_without_a_command_help_is_shown(arguments, capfd):
    main(*arguments)
    out, err = capfd.readouterr()
    assert 'Usage' in out + err and 'Traceback' not in err


# --- what a user does ---------------------------------------------------------------------------------------

def test_prepare(session, corpus, mini):
    done = session['prepare']
    assert done.code == 0, done.err
    report = json.loads((session['home'] / 'the cache' / 'report.json').read_text(encoding='utf-8'))
    made = {'codes': 14, 'text': 14, 'mel': 14}
    assert done.json == report | {'cache': 'the cache', 'mode': 'precompute', 'made': made,
                                  'up_to_date': False}
    assert done.json['dropped'] == []
    assert 'my corpus/metadata.csv: read as ljspeech' in done.err
    page = session['home'] / 'the cache' / 'report.html'
    assert page.read_text(encoding='utf-8').startswith('<!doctype html>')
    assert XTTSConfig.load(session['home'] / 'the cache' / 'config.yaml') == mini

@pytest.mark.slow
def test_prepare_in_parts_with_workers_and_merge(corpus, prepared, tmp_path):
    "The parts together are what one run gives."
    given = ['prepare', corpus, '--dvae', prepared.folder]
    assert xtts_nb(*given, '--out', tmp_path / 'a', '--workers', '1').code == 0
    assert main(*given, '--out', tmp_path / 'b', '--shard', '1/1', '--workers', '0') == 0
    assert main('merge', tmp_path / 'b', '--out', tmp_path / 'c') == 0
    assert tree(tmp_path / 'a') == tree(tmp_path / 'b') == tree(tmp_path / 'c')

def test_verify_finds_and_mends(corpus, prepared, tmp_path, capfd):
    out = tmp_path / 'out'
    assert main('prepare', corpus, '--dvae', prepared.folder, '--out', out) == 0
    whole = tree(out)
    capfd.readouterr()
    assert main('verify', out, '--json') == 0
    clean = json.loads(capfd.readouterr().out)
    assert clean.pop('checked') > 14 and clean == {'bad': 0, 'fixed': 0, 'failed': 0, 'problems': []}
    data = bytearray((out / 'shard-00000.safetensors').read_bytes())
    data[len(data) // 2] ^= 1
    (out / 'shard-00000.safetensors').write_bytes(data)
    assert main('verify', out, '--json') == 1
    assert json.loads(capfd.readouterr().out)['bad'] == 1
    assert main('verify', out, '--fix', '--json') == 0
    result = json.loads(capfd.readouterr().out)
    assert (result['bad'], result['fixed'], result['failed']) == (1, 1, 0) and tree(out) == whole
    (out / 'dvae.safetensors').unlink()
    assert main('verify', out, '--fix') == 1
    assert 'dvae.safetensors: is missing' in capfd.readouterr().out

@pytest.fixture
def eager(mini, tmp_path):
    "The settings without a graph: two updates of the DVAE take less time than to trace one."
    (tmp_path / 'eager.yaml').write_text(mini.replace(training={'mode': 'eager'}).to_yaml())
    return tmp_path / 'eager.yaml'

@pytest.fixture
def ten(mini, tmp_path):
    "The same with ten updates of the DVAE."
    ten = mini.replace(training={'dvae_steps': 10, 'mode': 'eager'})
    (tmp_path / 'ten.yaml').write_text(ten.to_yaml())
    return tmp_path / 'ten.yaml'

def stamps(folder): return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.iterdir()}

@pytest.mark.slow
def test_prepare_again_learns_and_writes_nothing(mine, eager, ten, tmp_path, capfd):
    out = tmp_path / 'out'
    here = ['prepare', mine, '--out', out, '--json', '--config']
    def run(config):
        assert main(*here, config) == 0
        return Done(0, *capfd.readouterr())
    first, before = run(eager), stamps(out)
    again = run(eager)
    assert again.json['up_to_date'] and stamps(out) == before and 'was learned from this corpus' in again.err
    assert not first.json['up_to_date'] and first.json['made']['codes'] == 14
    shutil.copy(mine / 'wavs' / 'low-0.wav', mine / 'wavs' / 'new.wav')
    with open(mine / 'metadata.csv', 'a') as file: file.write('new|aa bb|aa bb|low|en\n')
    weights = (out / 'dvae.safetensors').read_bytes()
    assert run(eager).json['made']['codes'] == 1 and (out / 'dvae.safetensors').read_bytes() == weights
    assert run(ten).json['made']['codes'] == 15 and (out / 'dvae.safetensors').read_bytes() != weights

def test_a_dvae_that_was_learned_survives_a_kill(corpus, eager, tmp_path, capfd):
    "It is found in the folder of unfinished work, and is not learned again."
    here = ['prepare', corpus, '--out', tmp_path / 'out', '--config', eager]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('xtts_nb.data.prepare.ShardMaker.__call__',
                      lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(*here) == 130
    note = f'{tmp_path}/out.work: keeps 1 learned DVAE; the same command goes on from there.'
    assert note in capfd.readouterr().err
    (learned,) = (tmp_path / 'out.work').glob('learned-*')
    weights = learned.read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('xtts_nb.train.parts.new_dvae_run', lambda *args, **more: pytest.fail('learned again'))
        assert main(*here) == 0
    assert (tmp_path / 'out' / 'dvae.safetensors').read_bytes() == weights
    assert not (tmp_path / 'out.work').exists()

@pytest.mark.slow
@pytest.mark.parametrize('how', ['Ctrl-C', 'SIGKILL'])
def test_the_training_of_a_dvae_goes_on(corpus, ten, tmp_path, capfd, how):
    from xtts_nb.train.trainer import Hooks
    work, here = tmp_path / 'out.work', ['prepare', corpus, '--config', ten, '--out']
    if how == 'Ctrl-C':
        def stop(self, step):
            if step == 5: raise KeyboardInterrupt   # the sixth update
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Hooks, 'update_ends', stop)
            assert main(*here, tmp_path / 'out') == 130
    else:
        child = started(*here, tmp_path / 'out')
        while not list(work.glob('dvae-*/checkpoints/step-*.safetensors')):
            assert child.poll() is None
            time.sleep(0.01)
        child.kill()
        child.wait()
    (at,) = [int(p.stem.removeprefix('step-')) for p in work.glob('dvae-*/checkpoints/step-*.safetensors')]
    capfd.readouterr()
    assert main(*here, tmp_path / 'out') == 0 and main(*here, tmp_path / 'straight') == 0
    err = capfd.readouterr().err
    assert f'at update {at} of 10' in err
    one, two = (tree(tmp_path / name) for name in ('out', 'straight'))
    assert one['dvae.safetensors'] == two['dvae.safetensors'] and not work.exists()

def test_train_takes_the_settings_of_the_cache(session, mini):
    done, run = session['train'], session['home'] / 'runs' / 'train-1'
    assert done.code == 0, done.err
    assert {'steps', 'loss_first', 'loss_last', 'clips_per_s', 'run'} <= done.json.keys()
    assert done.json['steps'] == 4 and done.json['run'] == str(run)
    assert done.json['loss_last'] > 0 and done.json['clips_per_s'] > 0 and done.json['traces'] == 1
    assert 'Graph mode ENABLED without XLA' in done.err

def test_say(session):
    done = session['say']
    assert done.code == 0, done.err
    wav, rate = soundfile.read(session['home'] / 'out put' / 'ä.wav')
    assert rate == 22050
    assert done.json == {'wav': 'out put/ä.wav', 'seconds': round(len(wav) / rate, 3), 'sample_rate': rate,
                         'vocoder': 'griffin-lim', 'report': done.json['report']}

def test_train_goes_on_with_a_run_and_steps_extend_it(session, tmp_path, capfd):
    run = tmp_path / 'run'
    shutil.copytree(session['home'] / 'runs' / 'train-1', run)
    assert main('train', '--run', run, '--steps', '6', '--json') == 0
    out, err = capfd.readouterr()
    more = Done(0, out, err).json
    assert more['steps'] == 6 and 'continues at update 4' in err
    metrics = (run / 'metrics.jsonl').read_text().splitlines()
    assert [json.loads(line)['step'] for line in metrics] == [2, 4, 6]
    assert XTTSConfig.load(run / 'config.yaml').training.steps == 6
    # of the first six updates, not of the first four
    assert more['loss_first'] != session['train'].json['loss_first']
    assert main('train', '--run', run, '--json') == 0
    again = Done(0, *capfd.readouterr()).json   # there is nothing left to do, and the summary is the same
    assert [again[k] for k in ('steps', 'loss_first',
                               'loss_last')] == [more[k] for k in ('steps', 'loss_first', 'loss_last')]

def test_the_dvae_of_a_run_can_be_used_again(session, corpus, tmp_path):
    run = session['home'] / 'runs' / 'train-1'
    assert main('prepare', corpus, '--out', tmp_path / 'out', '--dvae', run) == 0
    made, used = Cache(tmp_path / 'out'), Cache(session['home'] / 'the cache')
    assert made.manifest['key'] == used.manifest['key'] and np.array_equal(made.codes, used.codes)

def test_nothing_but_the_outputs_is_left(session):
    names = {p.name for p in session['home'].iterdir()}
    assert names == {'my corpus', 'mini settings.yaml', 'the cache', 'runs', 'out put'}
    assert not [p for p in session['home'].rglob('*') if '.part' in p.name]

def test_monitor():
    done = xtts_nb('monitor', '--duration', '0.2', '--interval', '0.05', '--json')
    assert done.code == 0 and done.json['interrupted'] is False and done.json['log_file'] is None


# --- bad input, one item after the other --------------------------------------------------------------------

@pytest.fixture
def bad(tmp_path, corpus, prepared):
    "A folder with one file of each kind of error."
    wavs = tmp_path / 'corpus' / 'wavs'
    wavs.mkdir(parents=True)
    (tmp_path / 'empty').mkdir()
    (wavs / 'text.wav').write_text('this is no sound\n' * 100)
    soundfile.write(wavs / 'nothing.wav', np.zeros(0), 22050)
    soundfile.write(wavs / 'short.wav', np.zeros(2000), 22050)
    shutil.copy(corpus / 'wavs' / 'low-0.wav', wavs / 'good.wav')
    (tmp_path / 'foreign').mkdir()
    (tmp_path / 'foreign' / 'thesis.txt').write_text('mine')
    (tmp_path / 'bad.yaml').write_text('training: {learnin_rate: 1}\n')
    (tmp_path / 'broken.yaml').write_text('training: [\n')
    return tmp_path

def rows(folder, *lines):
    "Write the corpus with these rows."
    (folder / 'corpus' / 'metadata.csv').write_text(''.join(line + '\n' for line in lines), encoding='utf-8')

BAD = {   # rows of the corpus; arguments; what the sentence names
    'no folder': ([], ['prepare', 'no-such', '--out', 'out'], ['no-such', 'metadata.csv']),
    'empty folder': ([], ['prepare', 'empty', '--out', 'out'], ['empty', 'metadata.csv', 'wavs/']),
    'no metadata': (None, ['prepare', 'corpus', '--out', 'out'], ['corpus', 'metadata.csv']),
    'no rows': ([], ['prepare', 'corpus', '--out', 'out'], ['metadata.csv', 'no rows']),
    'missing file': (['gone|aa bb|aa bb'], ['prepare', 'corpus', '--out', 'out'],
                     ['corpus', 'gone', 'wavs/gone.wav', 'missing']),
    'not audio': (['text|aa bb|aa bb'], ['prepare', 'corpus', '--out', 'out'],
                  ['corpus', 'text', 'not readable as audio']),
    '0 samples': (['nothing|aa bb|aa bb'], ['prepare', 'corpus', '--out', 'out'],
                  ['corpus', 'nothing', '0 samples']),
    'too short': (['short|aa bb|aa bb'], ['prepare', 'corpus', '--out', 'out'],
                  ['corpus', 'short', 'data.min_seconds']),
    'columns': (['good|a|b|c'], ['prepare', 'corpus', '--out', 'out'],
                ['metadata.csv', 'columns', 'good']),
    'unknown characters': (['good|aa жü|aa жü'], ['prepare', 'corpus', '--out', 'out', '--dvae', 'CACHE'],
                           ['corpus', 'good', 'ж', 'ü']),
    'too many dropped': (['good|aa|aa', 'gone|aa|aa', 'text'], ['prepare', 'corpus', '--out', 'out'],
                         ['corpus', '2 of 3', 'gone', 'max_drop_rate']),
    'out is foreign': (['good|aa|aa'], ['prepare', 'corpus', '--out', 'foreign'],
                       ['foreign', 'not a cache', 'another folder']),
    'out is a file': (['good|aa|aa'], ['prepare', 'corpus', '--out', 'bad.yaml'],
                      ['bad.yaml']),
    'no settings file': (['good|aa|aa'], ['prepare', 'corpus', '--out', 'out', '--config', 'no.yaml'],
                         ['no.yaml']),
    'misspelled key': (['good|aa|aa'], ['prepare', 'corpus', '--out', 'out', '--config', 'bad.yaml'],
                       ['bad.yaml', 'learnin_rate', 'learning_rate']),
    'no YAML': (['good|aa|aa'], ['prepare', 'corpus', '--out', 'out', '--config', 'broken.yaml'],
                ['broken.yaml', 'not YAML']),
    'no such layout': (['good|aa|aa'], ['prepare', 'corpus', '--out', 'out', '--layout', 'lj'],
                       ['"lj"', 'ljspeech', 'vctk']),
    'another layout': (['good|aa|aa'], ['prepare', 'corpus', '--out', 'out', '--layout', 'vctk'],
                       ['corpus', 'not laid out as vctk']),
    'no such language': (['good|aa|aa'], ['prepare', 'corpus', '--out', 'out', '--language', 'English'],
                         ['"English"', 'zh-cn']),
    'no such preset': (['good|aa|aa'], ['prepare', 'corpus', '--out', 'out', '--preset', 'huge'],
                       ['huge', 'tiny']),
    'verify: no cache': ([], ['verify', 'empty'], ['empty', 'holds no cache', 'xtts-nb prepare']),
    'merge: no cache': ([], ['merge', 'empty', '--out', 'out'], ['empty', 'holds no cache']),
    'half of a shard': (['good|aa|aa'], ['prepare', 'corpus', '--out', 'out', '--shard', 'one'],
                        ['one', 'I/N']),
    'shard without DVAE': (['good|aa|aa'], ['prepare', 'corpus', '--out', 'out', '--shard', '1/2'],
                           ['1/2', '--dvae']),
    'no DVAE': (['good|aa|aa'], ['prepare', 'corpus', '--out', 'out', '--dvae', 'empty'],
                ['empty', 'config.yaml']),
    'train: nothing given': ([], ['train'], ['--data', 'xtts-nb prepare']),
    'train: no run, no cache': ([], ['train', '--run', 'no-run'], ['no-run', '--data']),
    'train: no cache': ([], ['train', '--data', 'empty'], ['empty', 'xtts-nb prepare']),
    'train: foreign run': ([], ['train', '--data', 'CACHE', '--run', 'foreign'],
                           ['foreign', 'another folder']),
    'train: other model': ([], ['train', '--data', 'CACHE', '--run', 'out', '--preset', 'xtts_v2'],
                           ['model.dvae', 'prepare']),
    'say: no run': ([], ['say', 'aa', '--model', 'empty', '--voice', 'corpus/wavs/good.wav'],
                    ['empty', 'config.yaml', 'train']),
    'say: a cache': ([], ['say', 'aa', '--model', 'CACHE', '--voice', 'corpus/wavs/good.wav'],
                     ['model.safetensors']),
    'monitor: ending': ([], ['monitor', '--duration', '0.1', '--log-file', 'log.txt'], ['log.txt', '.jsonl']),
    'bench: no corpus': ([], ['bench', 'data', '--data', 'no-such'], ['no-such', 'metadata.csv']),
    'bench: no coqui': ([], ['bench', 'data', '--data', 'corpus', '--coqui-python', 'no'],
                        ['--coqui-python', 'benchmarks/loaders.py']),
    'demo: foreign corpus': ([], ['demo', '--out', 'demo'], ['demo/corpus', 'another folder']),
}

@pytest.mark.parametrize('kind', BAD)
def test_one_sentence_names_what_and_the_remedy(kind, bad, prepared, capfd, monkeypatch):
    lines, arguments, parts = BAD[kind]
    if lines is not None: rows(bad, *lines)
    if kind.startswith('demo'):
        (bad / 'demo' / 'corpus').mkdir(parents=True)
        (bad / 'demo' / 'corpus' / 'a').write_text('b')
    monkeypatch.chdir(bad)
    before = tree(bad)
    assert main(*(str(prepared.folder) if a == 'CACHE' else a for a in arguments)) == 2
    out, err = capfd.readouterr()
    said = Done(2, out, err).said
    assert out == '' and len(said) == 1 and said[0] == err.splitlines()[-1] and 'Traceback' not in err
    assert said[0][-1] in '.?' and not [p for p in parts if p not in said[0]], said[0]
    assert tree(bad) == before

@pytest.mark.parametrize('text, language, voice, parts', [
    ('', 'en', 'corpus/wavs/good.wav', ['empty']), ('aa', 'xx', 'corpus/wavs/good.wav', ['xx', 'en']),
    ('...', 'en', 'corpus/wavs/good.wav', ['no letter']),
    ('aa', 'en', 'no.wav', ['no.wav', 'no such recording']),
    ('aa', 'en', 'corpus/wavs/text.wav', ['text.wav', 'audio']),
    ('aa', 'en', 'corpus/wavs/nothing.wav', ['nothing.wav', '0 samples']),
    ('aa', 'en', 'corpus/wavs/short.wav', ['short.wav']),
    ('aa', 'en', 'corpus', ['corpus']),
], ids=['no text', 'language', 'no words', 'no voice', 'no sound', 'no samples', 'short',
        'folder'])
def test_say_refuses_what_it_cannot_speak(session, bad, capfd, monkeypatch, text, language, voice, parts):
    monkeypatch.chdir(bad)
    before = tree(bad)
    assert main('say', text, '--model', session['home'] / 'runs' / 'train-1', '--voice', voice, '--language',
                language) == 2
    out, err = capfd.readouterr()
    (said,) = Done(2, out, err).said
    assert out == '' and 'Traceback' not in err and not [p for p in parts if p not in said], said
    assert tree(bad) == before

def test_an_error_is_one_sentence(bad):
    done = xtts_nb('prepare', 'empty', '--out', 'out', cwd=bad)
    assert (done.code, done.out) == (2, '') and done.err.splitlines() == done.said and len(done.said) == 1

@pytest.mark.parametrize('place', [0, 1, 3])
def test_debug_shows_a_traceback(bad, place):
    arguments = ['monitor', '--log-file', 'log.txt']
    arguments.insert(place, '--debug')
    done = xtts_nb(*arguments, cwd=bad)
    assert done.code and done.out == '' and 'Traceback' in done.err and 'UserError: log.txt' in done.err

def test_one_bad_clip_never_ends_a_run(bad, corpus, prepared):
    "Good rows and one of each bad kind: all bad ones are dropped, counted, and listed with their reason."
    good = (corpus / 'metadata.csv').read_text(encoding='utf-8').splitlines()
    for file in (corpus / 'wavs').iterdir(): shutil.copy(file, bad / 'corpus' / 'wavs')
    reasons = {'gone': 'missing', 'text': 'not readable as audio', 'nothing': '0 samples',
               'short': 'data.min_seconds', 'columns': 'columns', 'good': 'ж', 'low-0': 'occurs twice',
               'high-0': 'twice'}
    rows(bad, *good, *(f'{name}|aa|aa|low|en' for name in ('gone', 'text', 'nothing', 'short')),
         'columns|a|b|c', 'good|aa ж|aa ж|low|en', 'low-0|aa|aa|low|en', 'high-0|aa|aa|low|xx')
    before = tree(bad)
    done = xtts_nb('prepare', 'corpus', '--out', 'out', '--dvae', prepared.folder, '--json', cwd=bad)
    assert done.code == 0, done.err
    listed = {d['id']: d['reason']
              for d in json.loads((bad / 'out' / 'report.json').read_text(encoding='utf-8'))['dropped']}
    assert done.json['clips'] == 14 and {d['id']: d['reason'] for d in done.json['dropped']} == listed
    assert listed.keys() == reasons.keys(), listed
    assert not [k for k, reason in reasons.items() if reason not in listed[k]], listed
    assert {k: v for k, v in tree(bad).items() if k.split('/')[0] != 'out'} == before


# --- a full disk --------------------------------------------------------------------------------------------

@pytest.fixture
def disk(tmp_path):
    "A file system of 160 kB."
    folder = tmp_path / 'disk'
    folder.mkdir()
    if shutil.which('mount') is None or os.geteuid():
        pytest.skip('a small file system is mounted by root alone')
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=160k', 'tmpfs', folder],
                      capture_output=True).returncode:
        pytest.skip('no file system can be mounted here')
    yield folder
    subprocess.run(['umount', folder], check=True)

def check_full(done, folder, before, names):
    assert done.code == 2 and done.out == '' and 'Traceback' not in done.err, done.err
    assert len(done.said) == 1 and any(n in done.said[0] for n in names), done.said
    assert tree(folder) == before

def allow(size):
    "Let the child write files of `size` bytes at most, which fails as a full disk does."
    return partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))

@pytest.mark.parametrize('size', [500, pytest.param(20_000, marks=pytest.mark.slow)], ids=['shard', 'DVAE'])
def test_a_full_disk_leaves_no_half_cache(bad, corpus, prepared, size):
    before = tree(bad)
    done = xtts_nb('prepare', corpus, '--out', 'out', '--dvae', prepared.folder, cwd=bad, before=allow(size))
    check_full(done, bad, before, ['out'])

@pytest.mark.slow
def test_a_full_disk_leaves_no_half_speech(session, corpus, disk):
    with open(disk / 'filler', 'wb', buffering=0) as f:
        with suppress(OSError):
            while f.write(bytes(512)): pass
    before, voice = tree(disk), corpus / 'wavs' / 'low-0.wav'
    done = xtts_nb('say', 'aa', '--model', session['home'] / 'runs' / 'train-1', '--voice', voice, '--out',
                   disk / 'new.wav')
    check_full(done, disk, before, ['new.wav'])

@pytest.mark.slow
@pytest.mark.parametrize('size, name', [(20_000, 'model.safetensors'), (3100, 'metrics.jsonl')])
def test_a_full_disk_leaves_a_run_that_goes_on(session, tmp_path, size, name):
    run = tmp_path / 'run'
    shutil.copytree(session['home'] / 'runs' / 'train-1', run)
    lines = (run / 'metrics.jsonl').read_text().splitlines()
    filled = lines[:1] * (3000 // len(lines[0]) - 2) + lines   # no space for another line
    (run / 'metrics.jsonl').write_text(''.join(line + '\n' for line in filled))
    done = xtts_nb('train', '--run', run, '--steps', '8', before=allow(size))
    assert done.code == 2 and 'Traceback' not in done.err and len(done.said) == 1, done.err
    assert str(run) in done.said[0] and name in done.said[0]
    assert not [p for p in tree(run) if '.part' in p]
    assert {p.name for p in (run / 'checkpoints').iterdir()} == {'step-000000002.safetensors',
                                                                 'step-000000004.safetensors'}
    assert main('train', '--run', run, '--steps', '8') == 0   # there is space again
    assert [json.loads(line)['step']
            for line in (run / 'metrics.jsonl').read_text().splitlines()][-4:] == [2, 4, 6, 8]

def test_a_disk_that_is_full(disk, corpus, prepared):
    done = xtts_nb('prepare', corpus, '--out', disk / 'out', '--dvae', prepared.folder)
    check_full(done, disk, {}, [str(disk / 'out')])
    assert 'disk is full' in done.said[0] and 'free some space' in done.said[0]

@pytest.mark.slow
def test_a_full_disk_leaves_no_half_corpus(disk):
    done = xtts_nb('demo', '--out', disk / 'demo')
    check_full(done, disk, {'demo': b''} if (disk / 'demo').exists() else {}, [str(disk / 'demo')])
    assert 'disk is full' in done.said[0]


# --- Ctrl-C -------------------------------------------------------------------------------------------------

@pytest.fixture(scope='session')
def longer(corpus, tmp_path_factory):
    "The corpus forty times, so that a command can be interrupted in the middle."
    folder = tmp_path_factory.mktemp('longer')
    (folder / 'wavs').mkdir()
    lines = []
    for i in range(40):
        for line in (corpus / 'metadata.csv').read_text(encoding='utf-8').splitlines():
            name, rest = line.split('|', 1)
            os.link(corpus / 'wavs' / f'{name}.wav', folder / 'wavs' / f'{name}-{i}.wav')
            lines.append(f'{name}-{i}|{rest}\n')
    (folder / 'metadata.csv').write_text(''.join(lines), encoding='utf-8')
    return folder

def check_stopped(done):
    assert (done.code, done.out) == (130, '') and len(done.said) == 1, done.err
    assert 'Traceback' not in done.err, done.err

@pytest.mark.parametrize('stage', ['encode the clips', pytest.param('read the clips', marks=pytest.mark.slow),
                                   pytest.param('train the DVAE', marks=pytest.mark.slow)])
def test_ctrl_c_leaves_no_half_cache(longer, settings, prepared, tmp_path, stage):
    "The DVAE's training leaves its checkpoints beside the cache."
    shutil.copytree(prepared.folder, tmp_path / 'out')
    before = tree(tmp_path)
    how = ['--dvae', prepared.folder] if stage.startswith('encode') else ['--config', settings]
    check_stopped(interrupted('prepare', longer, '--out', tmp_path / 'out', *how, at=stage))
    if stage.startswith('train'): shutil.rmtree(tmp_path / 'out.work', ignore_errors=True)
    assert tree(tmp_path) == before

@pytest.mark.slow
def test_ctrl_c_leaves_a_run_that_goes_on(session, tmp_path):
    run = tmp_path / 'run'
    shutil.copytree(session['home'] / 'runs' / 'train-1', run)
    check_stopped(interrupted('train', '--run', run, '--steps', '100000', at='clips/s'))
    assert not [p for p in tree(run) if '.part' in p]
    steps = [json.loads(line)['step'] for line in (run / 'metrics.jsonl').read_text().splitlines()]
    newest = sorted((run / 'checkpoints').iterdir())[-1].name
    assert steps[-1] >= 6 and 0 <= steps[-1] - int(newest[5:14]) <= 2

def test_ctrl_c_during_the_synthesis_of_the_corpus(tmp_path):
    check_stopped(interrupted('demo', '--out', tmp_path / 'demo', at='speak the corpus'))
    assert tree(tmp_path) in ({}, {'demo': b''})   # before or after the empty folder was made

@pytest.mark.parametrize('clips', [1, 60, 150])
def test_ctrl_c_reaches_us_through_espeak(tmp_path, clips):
    "Most of the time is spent in C, which calls Python: an exception raised there must not get lost."
    program = f'from xtts_nb.app.demo import make_corpus; make_corpus({str(tmp_path / "corpus")!r})'
    child = Forked(program, stderr=subprocess.PIPE, text=True)
    while len(list(tmp_path.glob('*.part/new/wavs/*.wav'))) < clips:
        assert child.poll() is None
        time.sleep(0.005)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert 'KeyboardInterrupt' in err and 'Exception ignored' not in err and child.returncode not in (0, None)
    assert tree(tmp_path) == {}

@pytest.mark.slow
def test_ctrl_c_in_the_demo(tmp_path, cheap_xla):
    "At three stages of a small one, in the same folder."
    program = SMALL.replace('pairs=2', 'pairs=2, sentences=6')
    for stage in 'train the DVAE', 'measure the step', 'train the GPT':
        check_stopped(interrupted('demo', '--out', tmp_path / 'demo', '--steps', '20', at=stage, timeout=900,
                                  program=program))
        assert not [p for p in tree(tmp_path) if '.part' in p], stage

def test_ctrl_c_ends_the_monitor(tmp_path):
    done = interrupted('monitor', '--interval', '0.1', '--log-file', tmp_path / 'log.jsonl', '--json',
                       at='Ctrl-C ends')
    assert done.code == 130 and json.loads(done.out)['interrupted'] is True and 'Traceback' not in done.err
    assert all(json.loads(line)['cpu'] for line in (tmp_path / 'log.jsonl').read_text().splitlines())

@pytest.mark.slow
@pytest.mark.parametrize('delay', np.linspace(0.1, 2, 10).round(2))
def test_ctrl_c_while_it_starts(longer, prepared, tmp_path, delay):
    program = ('import sys; from xtts_nb.app.cli import main\n'
               'print("ready", file=sys.stderr, flush=True); main()')
    arguments = ['prepare', longer, '--out', tmp_path / 'out', '--dvae', prepared.folder]
    child = subprocess.Popen([sys.executable, '-c', program, *arguments], stderr=subprocess.PIPE, text=True,
                             preexec_fn=hears_ctrl_c)
    assert child.stderr.readline() == 'ready\n'
    time.sleep(delay)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130 and 'Traceback' not in err, err
    assert tree(tmp_path) == {}


# --- measuring ----------------------------------------------------------------------------------------------

TINY_STEP = ['--layers', '1', '--width', '64', '--heads', '2', '--batch-size', '2', '--text-tokens', '12',
             '--codes', '20']

@pytest.mark.slow
@pytest.mark.parametrize('what, unit, names, more', [
    ('data', 'clips_per_s', ['numpy_function', 'native_wav', 'native', 'cache'], ['--clips', '60']),
    ('train', 'step_ms', ['eager', 'graph', 'xla', 'graph_bf16', 'xla_bf16'], TINY_STEP),
    ('say', 'tokens_per_s', ['naive', 'float32', 'bfloat16', 'int8', 'batch8', 'batch8_int8', 'stream'], [])])
def test_bench(corpus, tmp_path, request, what, unit, names, more):
    if what != 'data': request.getfixturevalue('cheap_xla')   # its DVAE computes longer than it compiles
    given = ['--data', corpus, *more] if what == 'data' else more
    done = python(SMALL, 'bench', what, *given, '--rounds', '1', '--record', '--json', cwd=tmp_path,
                  timeout=900)
    assert done.code == 0, done.err
    if what == 'data':
        assert all(0 < r['au'] <= 1 and r['cv'] >= 0 and 0 <= r['padding'] < 1 for r in done.json['rows'][:4])
        assert all(r['runs'] and (r['steps_per_s'] is None or r['steps_per_s'] > 0)
                   for r in done.json['rows'])
        assert {'codes', 'reference', 'text'} < set(done.json['compared']['cache'])
        assert 'cards' not in done.json
    if what == 'train':
        assert [r['traces'] for r in done.json['rows']] == [0, 1, 1, 1, 1]
        assert all(r['syncs'] == 1 for r in done.json['rows'][1:])
    assert [r['name'] for r in done.json['rows']][:len(names)] == names
    assert all(r[unit] > 0 and r['ratio'] > 0 for r in done.json['rows'])
    (file,) = (tmp_path / 'benchmarks').iterdir()
    assert json.loads(file.read_text())['rows'] == done.json['rows']

def test_load_audio_is_what_say_writes(session):
    assert np.abs(load_audio(session['home'] / 'out put' / 'ä.wav')).max() > 0
