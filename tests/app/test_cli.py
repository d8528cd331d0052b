"The command line: help, the form of errors, each command as a whole, what a full disk or Ctrl-C leaves."
import io
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import soundfile
import tree as repository
import typer

from process import SMALL, Done, Forked, hears_ctrl_c, interrupted, main, python, started, tree, xtts_nb
from xtts_nb import __version__
from xtts_nb.app import cli_speak
from xtts_nb.app.cli import app
from xtts_nb.config import XTTSConfig
from xtts_nb.data.cache import Cache

ROOT = Path(__file__).resolve().parents[2]

def leaves(group, path=()):
    "Every command that can be run, with its path."
    for name, one in group.commands.items():
        if hasattr(one, 'commands'): yield from leaves(one, (*path, name))
        else: yield ' '.join((*path, name)), one

COMMANDS = dict(leaves(typer.main.get_command(app)))

@pytest.fixture(scope='session')
def mini(mini):
    "In one shape, with fewer updates."
    return mini.replace(data={'buckets': 1}, training={'gpt': {'steps': 4, 'checkpoint_every': 2},
                                                       'dvae': {'steps': 2, 'mode': 'eager'}})

@pytest.fixture(scope='session')
def session(corpus, mini, tmp_path_factory):
    """Prepare, train and say as a user does, in a folder whose name has a space and non-ASCII letters.

    In this process, which has most of their functions compiled; test_installed has processes of their own."""
    home = tmp_path_factory.mktemp('a b') / 'Größe 大'
    shutil.copytree(corpus, home / 'my corpus')
    (home / 'mini settings.yaml').write_text(mini.to_yaml())
    done = {'home': home, 'run': home / 'runs/train-1'}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for name, words in {
            'prepare': ['my corpus', '--out', 'the cache', '--config', 'mini settings.yaml'],
            'train': ['--data', 'the cache'],
            'say': ['aa bb', '--model', 'runs/train-1', '--voice', 'my corpus/wavs/low-0.wav', '--out',
                    'out put/ä.wav']}.items():
            with redirect_stdout(out := io.StringIO()), redirect_stderr(err := io.StringIO()):
                code = main(name, *words, '--json')
            assert code == 0, err.getvalue()
            done[name] = Done(code, out.getvalue(), err.getvalue())
    return done

# --- help and names -----------------------------------------------------------------------------------------

HELP = '''
import io, json, sys
from contextlib import redirect_stdout
from xtts_nb.app.cli import main
for command in json.loads(sys.argv[1]):
    sys.argv[1:], shown = command.split(), io.StringIO()
    with redirect_stdout(shown):
        try: main()
        except SystemExit as end: assert end.code == 0, command
    assert ('Usage' in shown.getvalue()) == command.endswith('--help'), command
    assert not {'tensorflow', 'keras'} & {*sys.modules}, command
'''

def test_help_and_new_settings_import_nothing_heavy(tmp_path):
    done = python(HELP, json.dumps([*(f'{c} --help' for c in ['', *COMMANDS]), 'config create']), cold=True,
                  cwd=tmp_path)
    assert done.code == 0 and not done.err, done.err
    assert xtts_nb('--version', cold=True) == Done(0, f'{__version__}\n', '')

def test_every_option_says_what_it_is_and_every_example_is_understood(monkeypatch):
    for check in ('exists', 'folder', 'model'): monkeypatch.setattr(f'xtts_nb.files.check_{check}', str)
    for path, one in COMMANDS.items():
        for option in one.params: assert len(getattr(option, 'help', None) or '') > 5, (path, option.name)
        words = shlex.split(one.epilog.removeprefix('Example: xtts-nb '))
        made = one.make_context(path, words[len(path.split()):])
        assert words[:len(path.split())] == path.split()
        assert made.params.keys() >= {p.name for p in one.params if p.required}

# up to the next command
NAMED = re.compile(r'xtts-nb +([a-z][a-z-]*(?: +(?:(?!xtts-nb| -- )[^\n`\'")};:])*)?)')

def unknown(text: str) -> list[str]:
    "The commands and options in a text that do not exist."
    options = {path: {o for p in one.params for o in (*p.opts, *p.secondary_opts)} | {'--help'}
               for path, one in COMMANDS.items()}
    out, groups = [], {path.split()[0] for path in COMMANDS if ' ' in path}
    for words in (part.split() for found in NAMED.finditer(text) for part in re.split(r'\s--\s', found[1])):
        path = next((p for p in (' '.join(words[:2]), words[0]) if p in COMMANDS), None)
        if not path and words[0] in groups and not words[1:]: continue
        given = {re.match(r'--[a-z0-9-]+', w)[0] for w in words if re.match(r'--[a-z]', w)}
        if wrong := given - (options['train'] | {'--json'} if path == 'config show'
                             else options.get(path, set())):
            out.append(' '.join([path or words[0], *sorted(wrong)]))
    return out

def test_options_that_pages_name_exist():
    assert unknown('run xtts-nb profile --trace.') == ['profile --trace']
    for page in (*repository.notebooks(), ROOT / 'README.md'):
        text = page.read_text(encoding='utf-8')
        if page.suffix == '.ipynb': text = '\n'.join(''.join(c['source']) for c in json.loads(text)['cells'])
        assert unknown(text) == [], page

def test_notebooks_are_copied_with_their_records(ran, tmp_path):
    folder = tmp_path / 'pages'
    assert ran(f'notebooks {folder} --json').json['notebooks'] == len(repository.notebooks())
    files = {p.relative_to(ROOT / 'nbs').as_posix() for p in repository.notebooks()}
    records = {f'benchmarks/{f.name}' for f in (ROOT / 'benchmarks').glob('*.json')}
    copied = {p.relative_to(folder).as_posix() for p in folder.rglob('*.*')}
    assert {f for f in copied if not f.startswith('images/')} == {*files, *records, 'settings.ini'}
    assert 'nbdev_export' not in (folder / 'data/cache.ipynb').read_text(encoding='utf-8')

# --- the form of every error: one sentence, no traceback, exit code 2, nothing written ---------------------

WRONG = '''notebooks foreign > foreign
download nothing > nothing
corpus nowhere --out out > nowhere
corpus corpus --out foreign > foreign
prepare nowhere --out out > nowhere
prepare corpus --out out --config bad.yaml > learnin_rate
prepare corpus --out out --shard one > I/N
prepare corpus --out out --dvae empty > config.yaml
merge empty --out out > empty
verify empty > empty
train > --data
train --run no-run > no-run
train --data CACHE --run foreign > foreign
train --data CACHE --run out --preset xtts_v2 > model.dvae
train --data CACHE --bach-size 3 > --batch-size
train --data CACHE --steps 3 --epochs 3 > --epochs
train --data CACHE --gpu-preset T4 > --fit-memory
train --data CACHE --preprocessing-mode runtime > data.preprocessing_mode
train --data CACHE --batch-size 6 --grad-accum 4 > grad_accum_steps
train --data CACHE --set data.max_seconds=0.55 > data.max_seconds
train --data CACHE --mix-share 0.5 > --mix
train-dvae > xtts-nb train-dvae
train-decoder > --model
find batch-size --data empty > empty
find learning-rate --data empty > empty
config create bad.yaml > bad.yaml
config show --nothing > --nothing
convert from-coqui empty out > empty
convert to-coqui out --model empty > empty
convert to-model out --model empty > empty
convert to-savedmodel out --model empty > empty
add-language out --model RUN --language fa --texts no.txt > no.txt
say aa --model empty --voice v.wav > config.yaml
say --model RUN --voice corpus/wavs/good.wav > text
say aa --model RUN --voice corpus/wavs/good.wav --language xx > xx
say aa --model RUN --voice corpus/wavs/text.wav > text.wav
say aa --model RUN --voice corpus/wavs/good.wav --say-as bad.yaml > pronunciations
subtitles corpus/wavs/good.wav aa --out a.txt > .srt
evaluate empty --model empty > empty
serve --model RUN --voices empty --voice-alias x > NAME=VOICE
voices add a/b empty --model RUN --voices v > a/b
voices import no.pth --model RUN --voices v > no.pth
voices list --voices nowhere > nowhere
voices blend both a=1 a=2 --voices v > twice
voices remove anna --voices v > voices
monitor --duration 0.1 --log-file log.txt > .jsonl
profile --preset huge > huge
diagnose --config none.yaml > none.yaml
diagnose --out new.yaml > --apply
check --preset huge > huge
report --out bad.yaml > bad.yaml
demo --steps -1 > --steps
demo --out demo > demo/corpus
bench data --data nowhere > nowhere
bench train --layers 0 > --layers
bench config --width 3 > --width
bench model --batches 1 > --batches
bench dual --data-gpu 0 > --data
bench say --preset huge > huge
bench service --model empty > empty
bench diagnose nothing > nothing
nothing > nothing'''

@pytest.fixture
def bad(tmp_path, corpus, monkeypatch):
    "A working directory with one file of each kind of error."
    wavs = tmp_path / 'corpus/wavs'
    wavs.mkdir(parents=True)
    for name in ('empty', 'foreign', 'demo/corpus'): (tmp_path / name).mkdir(parents=True)
    (wavs / 'text.wav').write_text('this is no sound\n' * 100)
    shutil.copy(corpus / 'wavs/low-0.wav', wavs / 'good.wav')
    (tmp_path / 'corpus/metadata.csv').write_text('good|aa|aa|low|en\ntext|aa|aa|low|en\n')
    for name in ('foreign/thesis.txt', 'demo/corpus/a'): (tmp_path / name).write_text('mine')
    (tmp_path / 'bad.yaml').write_text('training: {gpt: {learnin_rate: 1}}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path

def test_every_command_is_tried():
    tried = {path for path in COMMANDS for line in WRONG.splitlines() if line.startswith(path)}
    assert {*COMMANDS} - tried <= {'distributed', 'tune'}   # they have tests of their own

@pytest.mark.parametrize('line', WRONG.splitlines())
def test_an_error_is_one_sentence(line, bad, prepared, session, ran):
    line, _, word = line.partition(' > ')
    before = tree(bad)
    where = {'CACHE': str(prepared.folder), 'RUN': str(session['run'])}
    done = ran('', *(where.get(a, a) for a in line.split()))
    assert (done.code, done.out) == (2, '') and 'Traceback' not in done.err, done.err
    assert len(done.said) == 1 and done.said[0] == done.err.splitlines()[-1], done.err
    assert done.said[0][-1] in '.?' and word in done.said[0], done.said
    assert tree(bad) == before

# --- what a user does ---------------------------------------------------------------------------------------

def test_prepare_train_and_say(session, corpus, mini, ran, tmp_path):
    home, run = session['home'], session['run']
    report = json.loads((home / 'the cache/report.json').read_text(encoding='utf-8'))
    made = {'codes': 14, 'text': 14, 'mel': 14}
    assert session['prepare'].json == report | {'cache': 'the cache', 'mode': 'precompute', 'made': made,
                                                'up_to_date': False} and report['dropped'] == []
    assert XTTSConfig.load(home / 'the cache/config.yaml') == mini
    first = session['train'].json
    assert first['steps'] == 4 and first['run'] == str(run) and first['traces'] == 1 \
        and first['clips_per_s'] > 0
    wav, rate = soundfile.read(home / 'out put/ä.wav')
    said = session['say'].json
    assert (said['seconds'], said['sample_rate'], rate) == (round(len(wav) / rate, 3), rate, 22050)
    assert {p.name for p in home.iterdir()} == {'my corpus', 'mini settings.yaml', 'the cache', 'runs',
                                                'out put'}
    assert not [p for p in home.rglob('*') if '.part' in p.name]
    shutil.copytree(run, more := tmp_path / 'run')   # a run goes on, and --epochs extends it
    again = ran(f'train --run {more} --epochs 2 --set training.gpt.mode=eager --json')
    assert again.json['steps'] == 8 and 'continues at update 4' in again.err
    assert again.json['traces'] == 0
    assert again.json['loss_first'] != first['loss_first']   # of eight updates, not of four
    metrics = (more / 'metrics.jsonl').read_text().splitlines()
    assert [json.loads(line)['step'] for line in metrics] == [2, 4, 6, 8]
    ended = ran(f'train --run {more} --json').json   # nothing is left to do, and the summary is the same
    assert all(ended[k] == again.json[k] for k in ('steps', 'loss_first', 'loss_last'))
    assert main('prepare', corpus, '--out', tmp_path / 'out', '--dvae', run) == 0   # its DVAE is used again
    one, two = Cache(tmp_path / 'out'), Cache(home / 'the cache')
    assert one.manifest['key'] == two.manifest['key'] and np.array_equal(one.codes, two.codes)

def test_verify_finds_and_repairs(corpus, prepared, tmp_path, ran):
    out = tmp_path / 'out'
    assert main('prepare', corpus, '--dvae', prepared.folder, '--out', out) == 0
    assert main('merge', out, '--out', tmp_path / 'merged') == 0 and tree(tmp_path / 'merged') == tree(out)
    whole = tree(out)
    assert ran(f'verify {out} --json').json['bad'] == 0
    data = bytearray(whole['shard-00000.safetensors'])
    data[len(data) // 2] ^= 1
    (out / 'shard-00000.safetensors').write_bytes(data)
    done = ran(f'verify {out} --json')
    assert (done.code, done.json['bad']) == (1, 1)
    done = ran(f'verify {out} --fix --json')
    assert (done.code, done.json['fixed'], done.json['failed']) == (0, 1, 0) and tree(out) == whole

@pytest.fixture
def ten(mini, tmp_path):
    "Ten updates of the DVAE without a graph, which would take longer to trace."
    (tmp_path / 'ten.yaml').write_text(mini.replace(training={'dvae': {'mode': 'eager',
                                                                       'steps': 10}}).to_yaml())
    return tmp_path / 'ten.yaml'

@pytest.mark.slow
def test_prepare_again_learns_and_writes_nothing(mine, ten, tmp_path, ran):
    line, out = f'prepare {mine} --out {tmp_path}/out --json --config {ten}', tmp_path / 'out'
    stamps = lambda: {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in out.iterdir()}
    assert ran(line).json['made']['codes'] == 14
    before = stamps()
    assert ran(line).json['up_to_date'] and stamps() == before
    shutil.copy(mine / 'wavs/low-0.wav', mine / 'wavs/new.wav')
    with open(mine / 'metadata.csv', 'a') as file: file.write('new|aa bb|aa bb|low|en\n')
    weights = (out / 'dvae.safetensors').read_bytes()
    assert ran(line).json['made']['codes'] == 1 and (out / 'dvae.safetensors').read_bytes() == weights
    ten.write_text(XTTSConfig.load(ten).replace(training={'dvae': {'steps': 5}}).to_yaml())
    assert ran(line).json['made']['codes'] == 15 and (out / 'dvae.safetensors').read_bytes() != weights

@pytest.mark.slow
def test_the_training_of_a_dvae_goes_on(corpus, ten, tmp_path, ran):
    "After a kill; and a DVAE that was learned is not learned again where the encoding was stopped."
    line, work = f'prepare {corpus} --config {ten} --out', tmp_path / 'out.work'
    child = started(*line.split(), tmp_path / 'out')
    while not list(work.glob('dvae-*/checkpoints/step-*.safetensors')):
        assert child.poll() is None
        time.sleep(0.01)
    child.kill()
    child.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('xtts_nb.data.prepare._ShardMaker.__call__',
                      lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        done = ran(line, tmp_path / 'out')
    assert done.code == 130 and re.search(r'at update \d+ of 10',
                                          done.err) and 'keeps 1 learned DVAE' in done.err
    weights = next(work.glob('learned-*')).read_bytes()
    assert ran(line, tmp_path / 'out').code == ran(line, tmp_path / 'straight').code == 0
    for name in ('out', 'straight'): assert (tmp_path / name / 'dvae.safetensors').read_bytes() == weights
    assert not work.exists()

def test_what_a_run_has_never_seen(prepared, tmp_path):
    here, own, seen = Path(prepared.folder), prepared.manifest['key'], cli_speak._never_seen
    assert seen(here, {'key': own, 'held_out': ['a'], 'mix_key': 'x', 'mix_held_out': ['b']}) == ['a']
    assert seen(here, {'key': 'x', 'held_out': ['a'], 'mix_key': own, 'mix_held_out': ['b']}) == ['b']
    assert seen(here, {'key': 'x', 'held_out': ['a']}) == seen(here, {}) == []
    (tmp_path / 'run.json').write_text(json.dumps({'key': own, 'held_out': ['a', 'b']}))
    assert seen(here, {'part': 'decoder', 'model': str(tmp_path), 'held_out': ['b', 'c']}) == ['b']

@pytest.mark.slow
def test_fixed_sentences_from_the_command_to_the_card(ran, prepared, with_hifigan, tmp_path, monkeypatch):
    monkeypatch.setattr('xtts_nb.speech.fixed_sentences.SENTENCES', {'en': [prepared.clips[0]['text']]})
    result = ran(f'evaluate {prepared.folder} --model {with_hifigan} --clips 1 --sentences all '
                 f'--report {tmp_path}/r --json').json
    assert result['fixed'] and result['clips'] == 1 and (tmp_path / 'r/report.html').is_file()
    assert 'of fixed sentences' in (tmp_path / 'r/MODEL.md').read_text(encoding='utf-8')

def test_monitor(tmp_path):
    done = xtts_nb('monitor', '--log', '--duration', '0.2', '--interval', '0.05', '--json', cwd=tmp_path)
    (log,) = tmp_path.iterdir()
    assert done.code == 0 and done.json['log_file'] == log.name and done.json['interrupted'] is False
    assert len(log.read_text().splitlines()) == done.json['samples'] >= 2

TINY_STEP = '--layers 1 --width 64 --heads 2 --batch-size 2 --text-tokens 12 --codes 20'

@pytest.mark.slow
@pytest.mark.parametrize('what, unit, names, more', [
    ('data', 'clips_per_s', 'numpy_function native_wav native cache', '--data CORPUS --clips 14'),
    ('train', 'step_ms', 'eager graph xla graph_bf16 xla_bf16', TINY_STEP),
    ('say', 'tokens_per_s', 'naive float32 bfloat16 int8 batch8 batch8_int8 stream', '')])
def test_bench(corpus, tmp_path, cheap_xla, what, unit, names, more):
    done = python(SMALL, 'bench', what, *more.replace('CORPUS', str(corpus)).split(), '--rounds', '1',
                  '--record', '--json', cwd=tmp_path, timeout=900)
    assert done.code == 0, done.err
    rows = done.json['rows']
    assert [r['name'] for r in rows][:len(names.split())] == names.split()
    assert all(r[unit] > 0 and r['ratio'] > 0 for r in rows)
    if what == 'data':
        assert all(0 < r['au'] <= 1 and 0 <= r['padding'] < 1 and r['runs'] for r in rows[:4])
        online = {'clip', 'weight', 'text', 'text_length', 'mel_length', 'mel', 'reference'}
        codes = online - {'mel', 'mel_length'} | {'codes', 'code_length'}   # those that the DVAE makes
        compared = {variant: {*parts} for variant, parts in done.json['compared'].items()}
        assert compared == dict.fromkeys(names.split()[:3], online) | {'cache': codes}
    if what == 'train':
        assert [r['traces'] for r in rows] == [0, 1, 1, 1, 1] and all(r['syncs'] == 1 for r in rows[1:])
    if what == 'say':
        same, pieces = done.json['same_codes'], done.json['piece_ms']
        assert same['float32'] == same['batch8'] == 1 and 0 < same['bfloat16'] <= 1
        assert 0 < same['int8'] == same['batch8_int8'] <= 1
        assert len(pieces) == 20 and min(pieces) > 0   # of 320 codes: 16 each, after the first 8
        assert 0 < rows[-1]['first_sound_ms'] < sum(pieces)
    (file,) = (tmp_path / 'benchmarks').iterdir()
    assert json.loads(file.read_text())['rows'] == rows

# --- a full disk --------------------------------------------------------------------------------------------

@pytest.fixture
def disk(tmp_path):
    "A file system of 160 kB."
    folder = tmp_path / 'disk'
    folder.mkdir()
    if shutil.which('mount') is None or os.geteuid() or subprocess.run(
            ['mount', '-t', 'tmpfs', '-o', 'size=160k', 'tmpfs', folder], capture_output=True).returncode:
        pytest.skip('no file system can be mounted here')
    yield folder
    subprocess.run(['umount', folder], check=True)

def check_full(done, name):
    assert done.code == 2 and done.out == '' and 'Traceback' not in done.err, done.err
    assert len(done.said) == 1 and name in done.said[0], done.said

def allow(size):
    "Let the child write files of `size` bytes at most, which fails as a full disk does."
    return partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))

@pytest.mark.parametrize('size', [500, pytest.param(20_000, marks=pytest.mark.slow)], ids=['shard', 'DVAE'])
def test_a_full_disk_leaves_no_half_cache(bad, corpus, prepared, size):
    before = tree(bad)
    check_full(xtts_nb('prepare', corpus, '--out', 'out', '--dvae', prepared.folder, cwd=bad,
                       before=allow(size)), 'out')
    assert tree(bad) == before

@pytest.mark.slow
def test_a_full_disk_leaves_no_half_speech_corpus_or_cache(session, corpus, prepared, disk):
    check_full(xtts_nb('prepare', corpus, '--out', disk / 'out', '--dvae', prepared.folder), 'disk is full')
    check_full(xtts_nb('demo', '--out', disk / 'demo'), 'disk is full')
    assert {*tree(disk)} <= {'demo'}
    with open(disk / 'filler', 'wb', buffering=0) as f, suppress(OSError):
        while f.write(bytes(512)): pass
    before = tree(disk)
    check_full(xtts_nb('say', 'aa', '--model', session['run'], '--voice', corpus / 'wavs/low-0.wav', '--out',
                       disk / 'new.wav'), 'new.wav')
    assert tree(disk) == before

@pytest.mark.slow
@pytest.mark.parametrize('size, name', [(20_000, 'model.safetensors'), (3100, 'metrics.jsonl')])
def test_a_full_disk_leaves_a_run_that_goes_on(session, tmp_path, size, name):
    shutil.copytree(session['run'], run := tmp_path / 'run')
    lines = (run / 'metrics.jsonl').read_text().splitlines()
    filled = lines[:1] * (3000 // len(lines[0]) - 2) + lines   # no space for another line
    (run / 'metrics.jsonl').write_text(''.join(line + '\n' for line in filled))
    check_full(xtts_nb('train', '--run', run, '--steps', '8', before=allow(size)), name)
    assert not [p for p in tree(run) if '.part' in p]
    assert {p.name[5:14] for p in (run / 'checkpoints').iterdir()} == {'000000002', '000000004'}
    assert main('train', '--run', run, '--steps', '8') == 0   # there is space again
    steps = [json.loads(line)['step'] for line in (run / 'metrics.jsonl').read_text().splitlines()]
    assert steps[-4:] == [2, 4, 6, 8]

# --- Ctrl-C -------------------------------------------------------------------------------------------------

@pytest.fixture(scope='session')
def longer(corpus, tmp_path_factory):
    "The corpus forty times, so that a command can be interrupted in the middle."
    folder = tmp_path_factory.mktemp('longer')
    (folder / 'wavs').mkdir()
    rows = [line.split('|', 1) for line in (corpus / 'metadata.csv').read_text(encoding='utf-8').splitlines()]
    for i in range(40):
        for name, _ in rows: os.link(corpus / f'wavs/{name}.wav', folder / f'wavs/{name}-{i}.wav')
    (folder / 'metadata.csv').write_text(''.join(f'{name}-{i}|{rest}\n' for i in range(40)
                                                 for name, rest in rows), encoding='utf-8')
    return folder

def check_stopped(done):
    assert (done.code, done.out, len(done.said)) == (130, '', 1) and 'Traceback' not in done.err, done.err

@pytest.mark.parametrize('stage', ['encode the clips', pytest.param('read the clips', marks=pytest.mark.slow),
                                   pytest.param('train the DVAE', marks=pytest.mark.slow)])
def test_ctrl_c_leaves_no_half_cache(longer, mini, prepared, tmp_path, stage):
    "The DVAE's training leaves its checkpoints beside the cache."
    shutil.copytree(prepared.folder, tmp_path / 'out')
    (tmp_path / 'mini.yaml').write_text(mini.to_yaml())
    before = tree(tmp_path)
    how = ['--dvae', prepared.folder] if stage.startswith('encode') else ['--config', tmp_path / 'mini.yaml']
    check_stopped(interrupted('prepare', longer, '--out', tmp_path / 'out', *how, at=stage))
    if stage.startswith('train'): shutil.rmtree(tmp_path / 'out.work', ignore_errors=True)
    assert tree(tmp_path) == before

@pytest.mark.slow
def test_ctrl_c_leaves_a_run_that_goes_on(session, tmp_path):
    shutil.copytree(session['run'], run := tmp_path / 'run')
    check_stopped(interrupted('train', '--run', run, '--steps', '100000', at='clips/s'))
    assert not [p for p in tree(run) if '.part' in p]
    steps = [json.loads(line)['step'] for line in (run / 'metrics.jsonl').read_text().splitlines()]
    newest = sorted((run / 'checkpoints').iterdir())[-1].name
    assert steps[-1] >= 6 and 0 <= steps[-1] - int(newest[5:14]) <= 2

@pytest.mark.parametrize('clips', [1, 150])
def test_ctrl_c_reaches_us_through_espeak(tmp_path, clips):
    "Most of the time is spent in C, which calls Python: an exception raised there must not get lost."
    program = f'from xtts_nb.app.demo_corpus import make_corpus; make_corpus({str(tmp_path / "corpus")!r})'
    child = Forked(program, stderr=subprocess.PIPE, text=True)
    while len(list(tmp_path.glob('*.part/new/wavs/*.wav'))) < clips:
        assert child.poll() is None
        time.sleep(0.005)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert 'KeyboardInterrupt' in err and 'Exception ignored' not in err and child.returncode not in (0, None)
    assert tree(tmp_path) == {}

@pytest.mark.slow
def test_a_demo_that_was_stopped_begins_again(tmp_path, kernels):
    "In the same folder, with the corpus that is there; the one that is stopped compares nothing."
    program = SMALL.replace('pairs=2', 'pairs=2, sentences=6')
    stopped = program.replace('\nmain()', '\ndemo._measure_before_after = lambda *given: ([], [])\nmain()')
    words = ['demo', '--out', tmp_path / 'demo', '--steps', '20', '--json']
    check_stopped(interrupted(*words, at='train the GPT', timeout=900, program=stopped, cwd=kernels))
    assert not [p for p in tree(tmp_path) if '.part' in p]
    made = lambda: (tmp_path / 'demo/corpus/corpus.json').stat().st_mtime_ns
    before, done = made(), python(program, *words, timeout=900, cwd=kernels)
    assert done.code == 0 and done.json['train']['steps'] == 20 and made() == before, done.err

def test_ctrl_c_ends_the_monitor(tmp_path):
    done = interrupted('monitor', '--interval', '0.1', '--log-file', tmp_path / 'log.jsonl', '--json',
                       at='Ctrl-C ends')
    assert done.code == 130 and json.loads(done.out)['interrupted'] is True and 'Traceback' not in done.err
    assert all(json.loads(line)['cpu'] for line in (tmp_path / 'log.jsonl').read_text().splitlines())

@pytest.mark.slow
@pytest.mark.parametrize('delay', [0.5, 2.])
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
    assert child.returncode == 130 and 'Traceback' not in err and tree(tmp_path) == {}, err
