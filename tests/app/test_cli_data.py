"The commands from recordings to a cache: calls, output and exit codes; what takes long is a stub."
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from process import check_bounds
from xtts_nb.app import cli_data
from xtts_nb.config import DataConfig, UserError, XTTSConfig
from xtts_nb.data.corpora import read_corpus
from xtts_nb.app.download import find_source
from xtts_nb.models.dvae import load_dvae
from xtts_nb.app.demo import corpus_page, DEMO_SENTENCES, speak, VOICES

TINY = XTTSConfig.tiny()


def test_bounds():
    check_bounds(('prepare c --out o --workers', 0, -1), ('bench data --data c --clips', 1, 0))


# --- download -----------------------------------------------------------------------------------------------

def test_the_list_of_what_there_is(ran):
    rows, text = ran('download --json').json['sources'], ran('download').out
    assert rows[2] == {'name': 'ljspeech', 'GB': 2.75, 'licence': 'public domain'}
    assert [row['name'] for row in rows[:2]] == ['xtts-v2', 'xtts-voices']
    assert text.startswith('xtts-nb download NAME') and all(row['name'] in text for row in rows)

def test_download(ran, behind, bars, tmp_path, monkeypatch):
    (tmp_path / 'settings.ini').write_text('[workspace]\ndata = there\n')
    monkeypatch.chdir(tmp_path)
    result, terms = {'folder': 'x', 'files': []}, behind('app.download.terms', 'THE TERMS')
    fetched = behind('app.download.download', lambda **call: result if call.get('accept')
                     or not call['source'].terms else 1 / 0)
    done = ran('download ljspeech')
    assert (done.code, done.err) == (0, '') and 'x is ready (public domain): xtts-nb prepare x' in done.out
    assert ran('download xtts-v2 --from http://m --out o --accept-cpml --json').json == result and not terms
    with pytest.raises(ZeroDivisionError): ran('download xtts-v2 --from http://m')
    assert [(c['source'].name, str(c['out']), c['base'], c['accept']) for c in fetched] == [
        ('ljspeech', str(tmp_path / 'there' / 'ljspeech'), None, False), ('xtts-v2', 'o', 'http://m', True),
        ('xtts-v2', str(tmp_path / 'there' / 'xtts-v2'), 'http://m', False)]
    assert terms == [{'source': find_source('xtts-v2'), 'base': 'http://m'}]
    behind('app.download.download', KeyboardInterrupt())
    done = ran('download vctk')
    assert done.code == 130
    assert 'Complete files are kept: the same command goes on from there.' in done.err


# --- a recording and its text -------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def book(tmp_path_factory):
    "A recording of six sentences and its text."
    folder, texts = tmp_path_factory.mktemp('book'), DEMO_SENTENCES['en'][:6]
    parts = [p for t in texts for p in (speak(t, 'en', VOICES['f4'])[0], np.zeros(11025, np.int16))]
    soundfile.write(folder / 'book.wav', np.concatenate(parts), 22050)
    (folder / 'book.txt').write_text(' '.join(texts[:5]))
    return folder

def test_corpus(ran, bars, book, tmp_path):
    out = tmp_path / 'out'
    made = ran(f'corpus {book}/book.wav --text {book}/book.txt --out {out} --json')
    assert made.code == 0 and made.json['missing'] == []
    clips = made.json['clips']
    assert ' '.join(c['text'] for c in clips) == ' '.join(DEMO_SENTENCES['en'][:5])
    assert all({'text', 'start', 'end', 'file', 'score'} == {*c} for c in clips)
    assert all((out / c['file']).is_file() for c in clips)
    page = (out / 'listen.html').read_text()
    assert page.count('<audio') == len(clips) and DEMO_SENTENCES['en'][5] not in page
    assert 'no sentence of the text is spoken here' in page
    (tmp_path / 'cuts.csv').write_text('source|start|end|text\nbook.wav|0|2|Only this.\n')
    done = ran(f'corpus {book}/book.wav --fix {tmp_path}/cuts.csv --out {tmp_path}/fixed')
    assert done.out.splitlines()[0].startswith('1 clips, 0.0 minutes of')
    assert done.out.splitlines()[-1] == f'{tmp_path}/fixed is ready: xtts-nb prepare {tmp_path}/fixed'
    assert 'Only this.' in (tmp_path / 'fixed' / 'listen.html').read_text()

def test_corpus_checks_clips(ran, bars, tmp_path):
    texts, clips = DEMO_SENTENCES['de'][:9], tmp_path / 'clips'
    clips.mkdir()
    (clips / 'metadata.csv').write_text(''.join(f'{i}|{t}\n' for i, t in enumerate(texts)), encoding='utf-8')
    for i, text in enumerate(texts):
        wav = speak(text, 'de', VOICES['f4'])[0]
        soundfile.write(clips / f'{i}.wav', wav if i else wav[:9000], 22050)
    done = ran(f'corpus {tmp_path}/clips --language de --out {tmp_path}/out --json')
    assert [d['source'] for d in done.json['dropped']] == ['0.wav'] and len(done.json['clips']) == 8
    assert done.json['unclear'] == 0 and (tmp_path / 'out' / 'listen.html').is_file()
    done = ran(f'corpus {tmp_path}/clips/metadata.csv --language de --out {tmp_path}/again')
    assert done.code == 0 and 'dropped  1 × its text goes on after the sound' in done.out

@pytest.mark.parametrize('missing', ['text', 'sound', 'espeak'])
def test_corpus_without_a_part(ran, bars, behind, tmp_path, missing):
    sound, text = tmp_path / 'a.wav', tmp_path / 'a.txt'
    if missing != 'text': text.write_text('Hello there.')
    if missing != 'sound': sound.touch()
    if missing == 'espeak': behind('app.demo.espeak_files', UserError('espeak-ng is missing; install it.'))
    done = ran(f'corpus {sound} --text {text} --out {tmp_path / "out"}')
    place = {'text': f'{text}: there is no such file', 'sound': f'{sound}: there is no such file',
             'espeak': 'espeak-ng is'}
    assert done.code == 2 and done.err.splitlines()[-1].startswith(f'xtts-nb: {place[missing]}')
    assert not list(tmp_path.glob('out*'))


# --- the DVAE of a cache ------------------------------------------------------------------------------------

def test_the_dvae_of_a_run_or_a_cache(behind, tmp_path, monkeypatch):
    loaded = behind('models.dvae.load_dvae', 'the DVAE')
    monkeypatch.setattr('xtts_nb.data.text.Tokenizer.load', lambda path: path)
    assert cli_data._given(tmp_path, TINY) == ('the DVAE', None)
    (tmp_path / 'dvae.safetensors').touch()
    (tmp_path / 'tokenizer.json').touch()
    assert cli_data._given(tmp_path, TINY) == ('the DVAE', tmp_path / 'tokenizer.json')
    assert loaded == [{'path': tmp_path / 'model.safetensors', 'config': TINY, 'prefix': 'dvae/'},
                      {'path': tmp_path / 'dvae.safetensors', 'config': TINY, 'prefix': ''}]

def test_what_a_learned_dvae_belongs_to(tmp_path):
    key = lambda corpus='a', layout=None, **changes: cli_data._learned_key(tmp_path / corpus,
        TINY.replace(**changes), layout)
    same = (key(data={'batch_size': 3}), key(training={'steps': 7}), key(model={'gpt': {'layers': 1}}),
            key('b/../a'))
    others = {key('b'), key(layout='vctk'), key(training={'seed': 3}), key(training={'dvae_steps': 3}),
              key(model={'audio': {'f_max': 7000.}}), key(model={'dvae': {'codes': 7}})}
    assert {*same} == {key()} and len(others - {key()}) == 6

@pytest.mark.parametrize('learned, changed, left, found', [
    ('key', [], False, 'out'), ('key', [], True, 'out'), ('other', [], True, 'left'),
    (None, [], True, 'left'),
    ('other', [], False, None), ('key', ['dvae.safetensors'], True, 'left'),
    ('key', ['mel.safetensors'], True, 'out')])
def test_a_learned_dvae_is_found_again(behind, tmp_path, learned, changed, left, found):
    behind('data.cache.read_manifest', {'source': {'learned': learned}} if learned else UserError('no cache'))
    behind('data.cache.changed_files', changed)
    places = {'out': tmp_path / 'out' / 'dvae.safetensors', 'left': tmp_path / 'learned-key.safetensors',
              None: None}
    if left: places['left'].touch()
    assert cli_data._known_dvae(tmp_path / 'out', tmp_path, 'key') == places[found]

def test_a_dvae_is_learned_once(behind, tmp_path, capsys):
    (tmp_path / 'run').mkdir()
    loaded, saved = behind('models.dvae.load_dvae', 'the DVAE'), []
    trained = behind('app.cli_data._train_dvae', (SimpleNamespace(save=saved.append), tmp_path / 'run'))
    behind('app.cli_data._known_dvae', 'there')
    given = ['clips'], tmp_path, tmp_path / 'out', 'key', TINY, 'tell'
    assert cli_data._learned(*given) == 'the DVAE' and loaded == [{'path': 'there', 'config': TINY}]
    assert not trained
    assert 'there: was learned from this corpus with these settings, and is kept.' in capsys.readouterr().err
    behind('app.cli_data._known_dvae')
    cli_data._learned(*given)
    assert trained == [{'clips': ['clips'], 'work': tmp_path, 'settings': TINY, 'tell': 'tell'}]
    assert len(loaded) == 1
    assert saved == [tmp_path / 'learned-key.safetensors'] and not (tmp_path / 'run').exists()

@pytest.mark.parametrize('steps, every, begun, often', [(2, 500, 0, 1), (1000, 30, 4, 30), (1000, 500, 4,
    100), (29, 500, 0, 2)])
def test_training_a_dvae(behind, mine, tmp_path, capsys, steps, every, begun, often):
    class Trainer:
        step = begun
        def fit(self, progress): progress(7, steps, {'mel_loss': 0.12345})
    clips, settings, bars = read_corpus(mine)[0], TINY.replace(training={'dvae_steps': steps,
        'checkpoint_every': every}), []
    sampled, loaded = behind('data.prepare.mel_sample', 'mels'), behind('models.dvae.load_dvae', 'the DVAE')
    def new_run(run, config, mels):
        assert (run / 'run.json').is_file() == run.exists() == (begun > 0) and mels() == 'mels'
        return Trainer()
    runs, tell = behind('train.parts.new_dvae_run', new_run), lambda *what: bars.append(what)
    train = lambda settings=settings: cli_data._train_dvae(clips, tmp_path, settings, tell)
    run = tmp_path / 'dvae-0'
    behind('files.fingerprint', '0')
    run.mkdir()   # killed before it began, or in the middle
    if begun: (run / 'run.json').touch()
    assert train() == ('the DVAE', run) and sampled == [{'clips': clips, 'config': settings}]
    assert runs[0]['config'] == settings.replace(training={'checkpoint_every': often, 'keep_checkpoints': 1})
    assert loaded == [{'path': run / 'dvae.safetensors', 'config': settings}]
    assert bars == [('read the clips', 1, 2), ('train the DVAE', begun, steps, 'compiling'),
                    ('train the DVAE', 7, steps, 'mel loss 0.123')]
    note = f'The training of the DVAE goes on at update 4 of {steps}.\n'
    assert capsys.readouterr().err == note * (begun > 0)

def test_other_recordings_are_another_training(behind, mine, tmp_path):
    marks = behind('files.fingerprint', '0')
    behind('train.parts.new_dvae_run', lambda run, config, mels: SimpleNamespace(step=0,
        fit=lambda progress: None))
    behind('models.dvae.load_dvae')
    clips = read_corpus(mine)[0]
    train = lambda: cli_data._train_dvae(clips, tmp_path, TINY, lambda *what: None)
    train(), train()
    file = clips[0].path
    file.write_bytes(file.read_bytes() + b'00')
    train()
    assert marks[0] == marks[1] != marks[2] and TINY.model_dump() in [*marks[0].values()][0]


# --- prepare and merge --------------------------------------------------------------------------------------

def test_making_a_cache(behind, bars, tmp_path, capsys):
    behind('data.corpora.layout_line', 'THE LAYOUT')
    behind('app.cli_data._learned_key', 'the key')
    given, made = behind('app.cli_data._given', ('the DVAE', 'the tokenizer')), behind('data.prepare.prepare',
        'the report')
    learned = behind('app.cli_data._learned', 'a learned DVAE')
    assert cli_data.make_cache(tmp_path, 'out', TINY, 'run', 'de', 'vctk', 3, (2, 4)) == 'the report'
    assert given == [{'dvae': 'run', 'settings': TINY}] and capsys.readouterr().err == 'THE LAYOUT\n'
    shared = {'corpus': tmp_path, 'out': 'out', 'config': TINY, 'load': load_dvae, 'page': corpus_page}
    assert made.pop() == shared | {'dvae': 'the DVAE', 'tokenizer': 'the tokenizer', 'language': 'de',
                                   'workers': 3,
                                   'part': (2, 4), 'layout': 'vctk', 'learned': ''}
    cli_data.make_cache(tmp_path, 'out', TINY)
    (call,) = made
    assert call.pop('dvae')(['clips'], 'work') == 'a learned DVAE'
    assert bars == [('encode the clips', 1, 2)] * 2
    assert call == shared | {'tokenizer': None, 'language': 'en', 'workers': None, 'part': (1, 1),
                             'layout': None,
                             'learned': 'the key'}
    learned[0].pop('tell')
    assert learned == [{'clips': ['clips'], 'work': 'work', 'out': 'out', 'key': 'the key', 'settings': TINY}]

@pytest.fixture
def report(behind):
    texts = behind('data.corpora.report_text', 'THE REPORT\n')
    yield {'clips': 3, 'up_to_date': False}
    assert texts and all(call['most'] == 20 for call in texts)

def test_prepare(ran, behind, bars, report, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'config.yaml').write_text(TINY.replace(data={'buckets': 2}).to_yaml())
    (tmp_path / 'over.yaml').write_text('data: {batch_size: 3}\n')
    made = behind('app.cli_data.make_cache', report)
    done = ran('prepare c --out o')
    ready = 'o is ready: xtts-nb train --data o\n'
    assert (done.code, done.out) == (0, f'THE REPORT\nAll of it: o/report.html\n{ready}')
    assert ran('prepare c --out o --json --preset xtts_v2').json == report | {'cache': 'o'}
    report['up_to_date'] = True
    more = '--dvae . --config over.yaml --language de --layout vctk --workers 0 --shard 2/4'
    assert ran(f'prepare c --out o {more}').out == (
        'THE REPORT\n'
        'o is up to date: these recordings and settings would make the same; nothing was written.\n'
        'All of it: o/report.html\no is shard 2/4; xtts-nb merge joins them.\n')
    plain = {'corpus': 'c', 'out': 'o', 'dvae': None, 'language': 'en', 'layout': None, 'workers': None,
             'part': (1, 1)}
    settings = [call.pop('settings') for call in made]
    assert settings == [TINY, XTTSConfig.xtts_v2(), TINY.replace(data={'buckets': 2, 'batch_size': 3})]
    assert [{k: v if k in ('workers', 'part') or v is None else str(v) for k, v in call.items()}
            for call in made] == [
        plain, plain, plain | {'dvae': '.', 'language': 'de', 'layout': 'vctk', 'workers': 0, 'part': (2, 4)}]
    assert bars == [('start', {})] * 3
    done = ran('prepare c --out o --dvae . --preset tiny')
    assert done.code == 2 and 'come from --dvae .; leave out --preset tiny.' in done.err and len(bars) == 3

@pytest.mark.parametrize('shard', ['one', '1', '/2', '1/', 'a/2', '1/b', '-1/2', ''])
def test_what_is_no_shard(shard):
    assert cli_data._part('12/34') == (12, 34)
    with pytest.raises(UserError, match=f'^--shard {shard}: give I/N, such as 2/4'): cli_data._part(shard)

def test_merge(ran, behind, report):
    merged = behind('data.prepare.merge_caches', report)
    assert ran('merge a b --out o').out == 'THE REPORT\no is ready: xtts-nb train --data o\n'
    assert ran('merge a --out o --json').json == report | {'cache': 'o'}
    assert [([str(p) for p in c['parts']], str(c['out']), c['page'], c['load']) for c in merged] == [
        (['a', 'b'], 'o', corpus_page, load_dvae), (['a'], 'o', corpus_page, load_dvae)]


# --- verify -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('bad, fixed, code', [(0, 0, 0), (1, 0, 1), (1, 1, 0), (2, 1, 1)])
def test_verify(ran, behind, bars, bad, fixed, code):
    problems = [{'file': 'shard', 'clip': None, 'problem': 'is missing', 'fixed': True},
                {'file': 'shard', 'clip': 'low-0', 'problem': 'differs', 'fixed': False,
                 'reason': 'the corpus is gone'},
                {'file': 'text', 'clip': None, 'problem': 'differs', 'fixed': False}]
    result = {'checked': 14, 'bad': bad, 'fixed': fixed, 'failed': 2, 'problems': problems}
    asked = behind('data.prepare.verify_and_fix_cache', result)
    done = ran('verify cache')
    assert done.code == code and bars == [('verify the clips', 1, 2)]
    assert done.out == ('shard: is missing, repaired\nshard low-0: differs; the corpus is gone\n'
                        'text: differs\n'
                        f'checked 14\nbad     {bad}\nfixed   {fixed}\nfailed  2\n')
    assert ran('verify cache --fix --source there --json').json == result and bars[1] == ('start', {})
    assert [(str(c['folder']), c['fix'], c['source'] and str(c['source'])) for c in asked] == [
        ('cache', False, None), ('cache', True, 'there')]


# --- bench data ---------------------------------------------------------------------------------------------

def test_a_cache_to_measure_with(behind):
    made, trained = behind('data.prepare.prepare'), behind('app.cli_data._train_dvae',
                                                           ('the DVAE', 'its run'))
    behind('data.cache.Cache', lambda folder: folder)
    bars = []
    with cli_data._temporary_cache('corpus', lambda *what: bars.append(what), {'batch_size': 3}) as folder:
        assert folder.name == 'cache' and folder.parent.is_dir()
    with cli_data._temporary_cache('corpus', print): pass
    assert not folder.parent.exists() and bars == [('encode the clips', 1, 2)]
    settings = TINY.replace(training={'dvae_steps': 200}, data={'batch_size': 3})
    assert made[0].pop('dvae')(['clips'], 'work') == 'the DVAE'
    assert made[0] == {'corpus': 'corpus', 'out': folder, 'config': settings}
    assert (trained[0]['clips'], trained[0]['work'], trained[0]['settings']) == (['clips'], 'work', settings)
    assert made[1]['config'] == TINY.replace(training={'dvae_steps': 200})

def test_bench_data(ran, behind, bars, tmp_path):
    cache = SimpleNamespace(folder=tmp_path, config=TINY, clips=[{'seconds': 1.24}, {'seconds': 0.5},
        {'seconds': 0.7}])
    made = behind('app.cli_data._temporary_cache', nullcontext(cache))
    loaded = behind('models.dvae.load_dvae', 'the DVAE')
    kept = behind('app.cli_data.write_record')
    result = {'rows': [{'name': 'native', 'clips_per_s': 9.}], 'compared': 'x'}
    measured = behind('app.speed.bench_loaders', result)
    behind('app.speed.compared_text', 'THE COMPARISON')
    frames = DataConfig().reference_frames
    about = f'3 clips of 0.5 to 1.2 s, laid out as 10,000 or more, batch 16, references of {frames} frames'
    done = ran('bench data --data corpus')
    assert done.code == 0 and ' '.join(done.out.split()).startswith(about)
    assert 'native' in done.out and done.out.endswith('\nTHE COMPARISON\n')
    assert not kept and loaded == [{'path': tmp_path / 'dvae.safetensors', 'config': TINY}]
    asked = ran('bench data --data corpus --clips 5 --rounds 2 --record --json').json
    about = about.replace('10,000', '5')
    assert asked == result | {'corpus': about}
    assert kept == [{'page': 'data', 'rows': result['rows'],
                     'notes': {'corpus': about, 'compared': 'x'}}]
    assert [(c['cache'], c['dvae'], c['clips'], c['rounds']) for c in measured] == [
        (cache, 'the DVAE', 10_000, 7), (cache, 'the DVAE', 5, 2)]
    assert bars == [('start', {}), ('measure', 1, 2)] * 2
    assert made[0]['data'] == DataConfig().model_dump() | {'batch_size': 16, 'buckets': 6}
    assert str(made[0]['corpus']) == 'corpus'
