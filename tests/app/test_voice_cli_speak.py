"The commands for a voice, with a stubbed library: calls, output and exit codes."
import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tree

from process import check_bounds, main
from xtts_nb.app import cli_speak
from xtts_nb.config import XTTSConfig

TINY = XTTSConfig.tiny()


def test_bounds():
    check_bounds(('say t --model r --voice v --retries', 0, -1), ('demo --steps', 1, 0),
                 ('demo --seed', 0, -1), ('demo --seeds', 1, 0),
                 ('evaluate d --model m --clips', 1, 0), ('evaluate d --model m --seed', 0, -1),
                 ('add-language o --model m --language fa --texts t --tokens', 0, -1),
                 ('add-language o --model m --language fa --texts t --seed', 0, -1))


# --- demo ---------------------------------------------------------------------------------------------------

SPOKEN = {'nearest_hits': 15, 'nearest_total': 16, 'untrained_hits': 1, 'heldout_sentence_hits': 12,
          'heldout_total': 14,
          'heldout_voice_hits': 11, 'untrained_heldout_sentence_hits': 2, 'untrained_heldout_voice_hits': 3}
RESULT = {'data_before_after': [{'name': 'cache', 'clips_per_s': 7.}],
          'step_before_after': [{'name': 'xla', 'step_ms': 3.}],
          'train': {'steps': 4}, 'seconds': 90., 'spoken': SPOKEN, 'report': 'o/report.html',
          'scores': [{'name': 'mel', 'unit': '', 'offered': True, 'fault': ''} | {
              source: {'median': m} for source, m in (('model', 14.), ('copy', 11.5), ('untrained', 23.))}]}

def test_demo(ran, behind, bars):
    def run_demo(**call):
        call['say']('A LINE')
        call['listen']('speak', 1, 2, '')
        return RESULT
    demos, kept = behind('app.demo.run_demo', run_demo), behind('app.cli.write_record')
    done = ran('demo')
    *tables, counts, end = done.out.split('\n\n')
    words = ' '.join(' '.join(tables).split())
    assert done.code == 0 and done.err == 'A LINE\n' and not kept and tables
    assert words.startswith('Data: the same batches from three pipelines clips/s')
    assert words.endswith('xla 3.0')
    assert 'Step: the same update, run in three ways ms per step' in words
    assert counts.splitlines() == [
        'Sentences it was trained on: 15 of 16 are nearest to their own recording (untrained: 1).',
        'Sentence and voice never together in the training of the GPT: '
        '12 of 14 the right sentence, 11 of 14 the right voice',
        '(untrained: 2 and 3).', 'Scores, as model (copy-synthesis, untrained): mel 14 (11.5, 23).']
    assert end == '1.5 minutes. Listen and look: o/report.html\n'
    assert bars == [('start', {}), ('speak', 1, 2, '')]
    assert ran('demo --out there --steps 7 --seed 3 --record --json').json == RESULT
    assert [(str(c['out']), c['config'], c['seed']) for c in demos] == [
        ('runs/demo', TINY, 0), ('there', TINY.replace(training={'steps': 7}), 3)]
    more = {name: RESULT[name] for name in (
        'data_before_after', 'step_before_after', 'train', 'scores', 'seconds')}
    assert kept == [{'page': 'demo', 'rows': [SPOKEN], 'notes': more}]

def test_demo_of_several_seeds(ran, behind, bars):
    rows = [{'seed': s, 'loss': 1. + s, 'voice_hits': 14 + 2 * s} for s in range(2)]
    spread = {'loss': {'min': 1., 'median': 1.5, 'max': 2.},
              'voice_hits': {'min': 14, 'median': 15., 'max': 16}}
    asked, kept = behind('app.demo.demo_seeds', rows), behind('app.cli.write_record')
    assert ran('demo --seeds 2').out == '2 seeds\nloss: 1.5 (1 to 2)\nvoice_hits: 15 (14 to 16)\n'
    assert not kept
    assert ran('demo --seeds 2 --steps 5 --record --json').json == {'rows': rows, 'spread': spread}
    assert kept == [{'page': 'demo_seeds', 'rows': rows, 'notes': {'steps': 5, 'spread': spread}}]
    assert [(str(c['out']), c['seeds'], c['config'].training.steps) for c in asked] == [
        ('runs/demo', 2, TINY.training.steps), ('runs/demo', 2, 5)]
    done = ran('demo --seeds 2 --seed 0')
    assert (done.code, len(asked)) == (2, 2) and 'runs the seeds 0 to 1; leave out --seed.' in done.err


# --- say ----------------------------------------------------------------------------------------------------

REPORT = [{'piece': 1, 'text': 'Hallo', 'found': 'no end', 'done': 'left'}]

@pytest.fixture
def speakers(monkeypatch, tmp_path):
    "Stubs the model; the settings of each speaker and the calls of `speak_file`."
    class Speaker:
        sample_rate, vocoder, made = 22050, 'griffin-lim', []
        def __init__(self, xtts, **speech): self.made.append((xtts, speech))
    def speak_file(speaker, text, language, voice, path, seed, progress, log):
        calls.append((text, language, [str(p) for p in voice], seed))
        progress(1, 2)
        return 1.5, REPORT if text == 'Hallo' else []
    calls = []
    monkeypatch.chdir(tmp_path)   # `say` looks whether it can write
    monkeypatch.setattr('xtts_nb.speech.guard.GuardedSpeaker', Speaker)
    monkeypatch.setattr('xtts_nb.speech.guard.run_rates', lambda run: f'the rates of {run}')
    monkeypatch.setattr('xtts_nb.speech.stream.speak_file', speak_file)
    monkeypatch.setattr('xtts_nb.models.xtts.XTTS.load', lambda run: f'the model of {run}')
    return Speaker.made, calls

def test_say(ran, behind, bars, speakers):
    made, calls = speakers
    done = ran('say Hello --model run --voice a.wav')
    assert (done.code, done.out) == (0, 'say.wav: 1.50 s at 22050 Hz, griffin-lim\n')
    assert bars == [('start', {}), ('load the model', 0, 1), ('speak', 0, 1), ('speak', 1, 2)]
    given = {'temperature': 0., 'top_k': 0, 'top_p': 0.5, 'repetition_penalty': 1., 'speed': 2.}
    options = ' '.join(f'--{name.replace("_", "-")} {value}' for name, value in given.items())
    done = ran(f'say Hallo --model run --voice a.wav --voice b.wav --language de --out o.wav --seed 5 '
               f'{options} --retries 0 --check-words --json')
    assert done.json == {'wav': 'o.wav', 'seconds': 1.5, 'sample_rate': 22050, 'vocoder': 'griffin-lim',
                         'report': REPORT}
    assert calls == [('Hello', 'en', ['a.wav'], 0), ('Hallo', 'de', ['a.wav', 'b.wav'], 5)]
    usual = {'retries': 2, 'rates': 'the rates of run', 'check_words': False}
    assert made == [('the model of run', usual),
                    ('the model of run', given | usual | {'retries': 0, 'check_words': True})]
    assert ran('say Hallo --model run --voice a.wav').out.endswith(
        'griffin-lim\npiece 1, "Hallo": no end, left as it is\n')
    found = behind('speech.voices.find_voice', ['ANNA'])
    assert ran('say Hello --model m --voice anna --voices v').code == 0
    assert made[-1] == ('the model of m', usual | {'rates': 'the rates of m'})
    assert calls[-1] == ('Hello', 'en', ['ANNA'], 0)
    assert [{k: str(v) for k, v in call.items()} for call in found] == [
        {'given': "[PosixPath('anna')]", 'xtts': 'the model of m', 'folder': 'v'}]

def test_say_as_a_stream(ran, behind, bars, speakers, monkeypatch):
    "Sound and nothing else on stdout; a speaker that looks for no faults."
    monkeypatch.setattr('xtts_nb.speech.generate.Speaker', lambda xtts, **given: SimpleNamespace(
        sample_rate=10, vocoder='hifigan', given=(xtts, given)))
    found = behind('speech.voices.find_voice', ['ANNA'])
    streamed = behind('speech.stream.stream_text', [np.zeros(3), np.ones(2)])
    out = SimpleNamespace(buffer=io.BytesIO(), isatty=lambda: False)
    monkeypatch.setattr('sys.__stdout__', out)
    done = ran('say Hello --model run --voice anna --seed 4 --stream --speed 2')
    assert (done.code, done.out) == (0, '') and done.err.endswith('0.50 s at 10 Hz, hifigan\n') and found
    assert out.buffer.getvalue()[:4] == b'RIFF' and len(out.buffer.getvalue()) == 44 + 10
    assert streamed[0].pop('speaker').given == (
        'the model of run', {'rates': 'the rates of run', 'speed': 2.})
    assert streamed == [{'text': 'Hello', 'language': 'en', 'reference': ['ANNA'], 'seed': 4}]
    for more, words in (('--out a.wav', 'leave out --out'), ('--check-words', 'and --check-words')):
        done = ran(f'say Hello --model run --voice anna --stream {more}')
        assert done.code == 2 and words in done.err
    out.isatty = lambda: True
    assert 'pipe it' in ran('say Hello --model run --voice anna --pcm').err

def test_say_as_a_stream_leaves_stdout_to_the_sound(behind, bars, speakers, monkeypatch, capfdbinary):
    "What really comes through a pipe; the result is the last line of stderr."
    monkeypatch.setattr('xtts_nb.speech.generate.Speaker', lambda xtts, **_: SimpleNamespace(
        sample_rate=10, vocoder='hifigan'))
    behind('speech.voices.find_voice', ['ANNA'])
    behind('speech.stream.stream_text', [np.zeros(3), np.ones(2)])
    assert main('say', 'Hello', '--model', 'run', '--voice', 'anna', '--pcm', '--json') == 0
    out, err = capfdbinary.readouterr()
    assert out == bytes(6) + b'\xff\x7f' * 2
    assert json.loads(err.splitlines()[-1]) == {'seconds': 0.5, 'sample_rate': 10, 'vocoder': 'hifigan'}

def test_say_reads_the_text_from_a_file(ran, behind, bars, speakers, tmp_path, monkeypatch):
    (tmp_path / 'a.txt').write_bytes('\ufeffÄ.\nB.'.encode())
    (tmp_path / 'b.txt').write_bytes(b'\xff')
    say = f'say --model run --voice a.wav --text-file {tmp_path}/'
    assert ran(f'{say}a.txt').code == 0
    monkeypatch.setattr('sys.stdin', io.TextIOWrapper(io.BytesIO('ö'.encode())))
    assert ran('say --model run --voice a.wav --text-file - --language auto').code == 0
    assert [words[:2] for words in speakers[1]] == [('Ä.\nB.', 'en'), ('ö', 'auto')]
    for line, words in ((f'{say}b.txt', 'b.txt: is not UTF-8'), (f'{say}a.txt a', 'Give either'),
                        (f'{say}c.txt', 'c.txt: cannot be read (No such'),
                        ('say --model run --voice a.wav', 'Give either')):
        done = ran(line)
        assert done.code == 2 and words in done.err


# --- voices -------------------------------------------------------------------------------------------------

ANNA = {'name': 'anna', 'seconds': 3.5,
        'made_from': [{'name': 'a.wav', 'seconds': 3.}, {'name': 'b.mp3', 'seconds': 0.5}]}
BOTH = {'name': 'both', 'seconds': 0.,
        'made_from': [{'name': 'anna', 'weight': 0.75}, {'name': 'bob', 'weight': 0.25}]}

def text_of(call): return {k: [*map(str, v)] if isinstance(v, list) else str(v) for k, v in call.items()}

def test_voices_add(ran, behind, bars, monkeypatch):
    monkeypatch.setattr('xtts_nb.models.xtts.XTTS.load', lambda folder: f'the model of {folder}')
    monkeypatch.setattr('xtts_nb.speech.generate.Speaker', lambda xtts: f'a speaker of {xtts}')
    added = behind('speech.voices.add_voice', ANNA)
    assert ran('voices add anna a.wav b.mp3 --model m --voices v').out == 'anna: a.wav (3 s), b.mp3 (0.5 s)\n'
    assert bars == [('start', {}), ('load the model', 0, 1), ('make the voice', 0, 1)]
    assert ran('voices add anna a.wav --model m --voices v --force --json').json == ANNA
    asked = {'folder': 'v', 'name': 'anna', 'recordings': ['a.wav', 'b.mp3'],
             'speaker': 'a speaker of the model of m', 'force': 'False'}
    assert [text_of(call) for call in added] == [asked, asked | {'recordings': ['a.wav'], 'force': 'True'}]

def test_voices_add_refuses_a_bad_name_before_it_loads_the_model(ran, bars, tmp_path):
    (tmp_path / 'anna.safetensors').touch()
    for name, why in (('anna', 'exists already'), ('a/b', 'no name')):
        done = ran(f'voices add {name} a.wav --model m --voices {tmp_path}')
        assert done.code == 2 and why in done.err
    assert bars == [('start', {})] * 2

def test_voices_import(ran, behind, bars, monkeypatch):
    monkeypatch.setattr('xtts_nb.models.xtts.XTTS.load', lambda folder: f'the model of {folder}')
    row = {'name': 'Claribel Dervla', 'made_from': [{'name': 'speakers_xtts.pth'}]}
    imported = behind('speech.voices.import_voices', [row])
    line = 'voices import x/speakers_xtts.pth --model m --voices v'
    assert ran(line).out == 'Claribel Dervla: speakers_xtts.pth\n'
    assert ran(f'{line} --force --json').json == {'voices': [row]}
    asked = {'folder': 'v', 'path': 'x/speakers_xtts.pth', 'xtts': 'the model of m', 'force': 'False'}
    assert [text_of(call) for call in imported] == [asked, asked | {'force': 'True'}]

def test_voices_list(ran, behind, bars):
    rows = [ANNA, BOTH, {'name': 'bad', 'error': 'holds no voice.'}]
    behind('speech.voices.list_voices', lambda folder: rows if folder.name == 'v' else [])
    lines = ['anna: a.wav (3 s), b.mp3 (0.5 s)', 'both: 75% anna, 25% bob', 'bad: holds no voice.']
    assert ran('voices list --voices v').out.splitlines() == lines
    assert ran('voices list --voices v --json').json == {'voices': rows}
    assert ran('voices list --voices none').out == 'none: holds no voice.\n'

def test_voices_blend_and_remove(ran, behind, bars):
    blended, removed = behind('speech.voices.blend_voices', BOTH), behind('speech.voices.remove_voice')
    assert ran('voices blend both anna=3 bob --voices v').out == 'both: 75% anna, 25% bob\n'
    assert ran('voices blend both a=b=0.5 --voices v --force --json').json == BOTH
    assert [(str(c['folder']), c['name'], c['weights'], c['force']) for c in blended] == [
        ('v', 'both', {'anna': 3., 'bob': 1.}, False), ('v', 'both', {'a=b': 0.5}, True)]
    done = ran('voices blend both anna=much --voices v')
    assert done.code == 2 and '"anna=much": the weight is no number; write NAME=WEIGHT.' in done.err
    done = ran('voices blend both anna=1 anna --voices v')
    assert done.code == 2 and '"anna": the voice is named twice' in done.err
    assert ran('voices remove anna --voices v').out == 'anna: removed from v\n'
    assert ran('voices remove anna --voices v --json').json == {'removed': 'anna'}
    assert [text_of(call) for call in removed] == [{'folder': 'v', 'name': 'anna'}] * 2

def test_to_savedmodel(ran, behind, bars, monkeypatch):
    monkeypatch.setattr('xtts_nb.models.xtts.XTTS.load', lambda folder: f'the model of {folder}')
    monkeypatch.setattr('xtts_nb.speech.generate.Speaker', lambda xtts, **speech: f'{xtts} {speech}')
    asked = behind('speech.export.export_speaker',
                   lambda voices, **_: {'vocoder': 'hifigan', 'voices': [*map(str, voices)]})
    line = 'convert to-savedmodel o --model m'
    assert ran(f'{line} --voice anna --voice bob --voices v').out == (
        'o: hifigan, voices: anna, bob; see o/README.md\n')
    assert bars == [('start', {}), ('load the model', 0, 1), ('write the graph', 0, 1)]
    assert ran(line).out == 'o: hifigan, voices: none; see o/README.md\n'
    assert ran(f'{line} --temperature 0.5 --json').json == {'vocoder': 'hifigan', 'voices': [], 'out': 'o'}
    first = {'speaker': 'the model of m {}', 'out': 'o', 'voices': ['anna', 'bob'], 'folder': 'v'}
    assert [text_of(call) for call in asked] == [
        first, bare := first | {'voices': '()', 'folder': 'None'},
        bare | {'speaker': "the model of m {'temperature': 0.5}"}]


# --- evaluate -----------------------------------------------------------------------------------------------

def test_evaluate(ran, behind, bars, tmp_path, monkeypatch):
    from xtts_nb.speech.evaluate import Evaluation
    row = {'score': 'mel', 'offered': False, 'name': 'mel', 'unit': '', 'fault': 'F'}
    found = Evaluation({'clips': 2}, [row], [], {})
    asked, kept = behind('speech.evaluate.evaluate', found), behind('app.cli_speak.write_record')
    pages = behind('speech.evaluate.evaluation_report', lambda **call: call['folder'] / 'report.html')
    cards = behind('app.cli_speak._write_card', 'out/MODEL.md')
    monkeypatch.setattr('xtts_nb.models.xtts.XTTS.load',
                        lambda model: SimpleNamespace(config=str(model)))
    done = ran(f'evaluate data --model {tmp_path}')
    assert done.code == 0 and done.out.splitlines()[-1] == 'Not offered: mel: F.'
    assert not (kept or pages or cards)
    (tmp_path / 'run.json').write_text('{"held_out": ["a"]}')
    (tmp_path / 'best').mkdir()
    line = f'evaluate data --model {tmp_path}/best --clips 3 --seed 4 --language fa --report out --record'
    files = {'report': 'out/report.html', 'card': 'out/MODEL.md'}
    assert ran(f'{line} --json').json == found.to_dict() | files
    assert ran(line).out.splitlines()[-2:] == ['Listen and look: out/report.html',
                                               'Model card: out/MODEL.md']
    assert [str(v) for v in cards[0].values()] == ['out', str(found), f'{tmp_path}/best', f'{tmp_path}/best',
                                                   "{'held_out': ['a']}", "['a']"]
    assert [[str(v) for v in call.values()][1:6] for call in asked[:2]] == [
        ['data', '[]', '16', '0', 'en'], ['data', "['a']", '3', '4', 'fa']]
    assert [call['xtts'].config for call in asked[:2]] == [str(tmp_path), f'{tmp_path}/best']
    assert kept[0] == {'page': 'evaluate', 'rows': found.scores, 'notes': {'clips': 2}}
    assert [call['fixed'] for call in asked] == [None] * 3
    speaks = SimpleNamespace(config='', tokenizer=SimpleNamespace(languages=['de', 'fa', 'tlh']))
    monkeypatch.setattr('xtts_nb.models.xtts.XTTS.load', lambda model: speaks)
    made = behind('speech.evaluate.sentence_trials', [])
    line = f'evaluate data --model {tmp_path} --clips 3 --sentences'
    for given, names in (('all', ['de', 'fa']), ('fa', ['fa']), ('en,de', ['en', 'de'])):
        assert ran(f'{line} {given}').code == 0 and asked[-1]['fixed'](['clips']) == []
        assert [made[-1][k] for k in ('languages', 'clips', 'each')] == [names, ['clips'], 3]
        assert not made[-1]['folder'].exists()   # it was there while they were spoken
    done = ran(f'{line} de,xx')
    assert done.code == 2 and '--sentences xx: use all, or some of en,es,' in done.err


def test_fixed_sentences_from_the_command_to_the_card(ran, prepared, with_hifigan, tmp_path, monkeypatch):
    line = (f'evaluate {prepared.folder} --model {with_hifigan} --clips 1 --sentences all '
            f'--report {tmp_path}/r')
    done = ran(line)   # its tokenizer is learned from a few words
    assert done.code == 2 and 'en: the model never saw some letters of each fixed sentence' in done.err
    monkeypatch.setattr('xtts_nb.speech.evaluate.SENTENCES', {'en': [prepared.clips[0]['text']]})
    result = ran(f'{line} --json').json
    assert result['fixed'] and result['clips'] == 1 and result['scores'][0]['score'] == 'duration'
    assert 'of fixed sentences' in (tmp_path / 'r' / 'MODEL.md').read_text(encoding='utf-8')
    assert (tmp_path / 'r' / 'report.html').is_file()

def test_a_card_of_a_run_and_of_a_model(behind, prepared, tmp_path):
    "A run tells its cache and its updates, that of a decoder those of the GPT; an export tells neither."
    cards = behind('speech.evaluate.model_card', 'THE CARD')
    saved = tmp_path / 'gpt/checkpoints'
    saved.mkdir(parents=True)
    for step in (3, 12): (saved / f'step-{step:09d}.safetensors').touch()
    facts = {'cache': str(prepared.folder), 'key': prepared.manifest['key']}
    (tmp_path / 'gpt/run.json').write_text(json.dumps(facts))
    write = lambda model, facts: cli_speak._write_card(tmp_path, 'found', 'config', tmp_path / model, facts,
                                                       [])
    assert write('gpt', facts).name == 'MODEL.md'
    write('voice', {'part': 'voice', 'model': str(tmp_path / 'gpt'), 'held_out': ['x']})
    write('other', {})
    for other in ({'key': 'another'}, {'cache': str(tmp_path / 'gone')}): write('gpt', facts | other)
    assert [(c['run'].get('cache'), c['cache'] and len(c['cache']), c['updates']) for c in cards] == [
        *[(facts['cache'], len(prepared), 12)] * 2, (None, None, None), (facts['cache'], None, 12),
        (str(tmp_path / 'gone'), None, 12)]
    (tmp_path / 'MODEL.md').write_text('completed')
    assert write('gpt', facts).name == 'MODEL.new.md' and (tmp_path / 'MODEL.md').read_text() == 'completed'

@pytest.mark.parametrize('model, facts, held, is_chosen', [
    ('r/best', {'held_out': ['a'], 'mix_held_out': ['b']}, ['a'], True),
    ('r', {'held_out': ['a']}, ['a'], False),
    ('r/best', {'held_out': ['a'], 'mix_held_out': ['b']}, ['b'], False),
    ('d/best', {'part': 'voice', 'model': 'r', 'held_out': ['a']}, ['a'], True),
    ('d', {'part': 'voice', 'model': 'r/best', 'held_out': ['a']}, ['a'], True),
    ('d', {'part': 'voice', 'model': 'best/r', 'held_out': ['a']}, ['a'], False)])
def test_by_which_clips_a_model_was_chosen(behind, tmp_path, monkeypatch, model, facts, held, is_chosen):
    cards = behind('speech.evaluate.model_card', 'THE CARD')
    monkeypatch.setattr('xtts_nb.speech.guard.training_facts', lambda model: {})
    cli_speak._write_card(tmp_path, 'found', 'config', Path(model), facts, held)
    assert cards[0]['chosen'] is is_chosen

def test_what_a_run_has_never_seen(prepared, tmp_path):
    here, own = Path(prepared.folder), prepared.manifest['key']
    seen = cli_speak._never_seen
    assert seen(here, {'key': own, 'held_out': ['a'], 'mix_key': 'x', 'mix_held_out': ['b']}) == ['a']
    assert seen(here, {'key': 'x', 'held_out': ['a'], 'mix_key': own, 'mix_held_out': ['b']}) == ['b']
    assert seen(here, {'key': 'x', 'held_out': ['a']}) == seen(here, {}) == seen(tmp_path, {}) == []
    assert seen(tmp_path, {'key': 'x', 'held_out': ['a']}) == ['a']   # a corpus
    (tmp_path / 'run.json').write_text(json.dumps({'key': own, 'held_out': ['a', 'b']}))
    voice = {'part': 'voice', 'model': str(tmp_path), 'held_out': ['b', 'c']}
    assert seen(here, voice) == ['b'] and seen(here, voice | {'model': 'gone'}) == []


# --- convert and grow ---------------------------------------------------------------------------------------

@pytest.mark.parametrize('given, place, text, shown', [
    ('from-coqui f o', 'models.convert.from_coqui', 'o: 7 tensors, 9 text tokens\n',
     [('write the tensors', 1, 2)]),
    ('to-coqui o --model f', 'models.convert.to_coqui', 'o: 7 tensors\n',
     [('write the tensors', 0, 1), ('write the tensors', 1, 1)])])
def test_convert(ran, behind, bars, given, place, text, shown):
    calls = behind(place, {'tensors': 7, 'text_tokens': 9})
    assert ran(f'convert {given}').out == text and bars == shown
    assert ran(f'convert {given} --json').json == {'tensors': 7, 'text_tokens': 9, 'out': 'o'}
    assert [{k: str(v) for k, v in call.items()} for call in calls] == [{'folder': 'f', 'out': 'o'}] * 2

def test_grow(ran, behind, bars):
    read, grown = behind('train.finetune.read_texts',
                         ['salam']), behind('train.finetune.grow_folder',
                                            {'tokens_before': 5, 'tokens': 9})
    line = 'add-language o --model m --language fa --texts t.txt'
    assert ran(line).out == 'o: 5 -> 9 text tokens, fa among them\n'
    assert bars == [('start', {}), ('grow the model', 0, 1), ('grow the model', 1, 1)]
    assert ran(f'{line} --tokens 4 --seed 3 --json').json == {'tokens_before': 5, 'tokens': 9, 'out': 'o'}
    plain = {'folder': 'm', 'out': 'o', 'language': 'fa', 'texts': ['salam'], 'tokens': 0, 'seed': 0}
    assert [call | {'folder': str(call['folder']), 'out': str(call['out'])} for call in grown] == [
        plain, plain | {'tokens': 4, 'seed': 3}]
    assert [str(call['path']) for call in read] == ['t.txt'] * 2


# --- parity -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('line', ['parity', 'parity f --coqui-python py --json'])
def test_parity_is_a_script_of_the_repository(ran, line):
    done = ran(line)
    assert done.code == 2 and done.err.splitlines() == [
        'xtts-nb: parity: write python benchmarks/parity.py in a checkout of the repository instead.']


# --- notebooks ----------------------------------------------------------------------------------------------

def test_notebooks_are_copied_with_their_records(ran, tmp_path):
    root = Path(__file__).resolve().parents[2]
    done = ran(f'notebooks {tmp_path / "pages"}')
    files = {p.relative_to(root / 'nbs').as_posix() for p in tree.notebooks()}
    copied = {p.relative_to(tmp_path / 'pages').as_posix() for p in (tmp_path / 'pages').rglob('*.*')}
    folder = tmp_path / 'pages'
    assert done.out == f'{folder}: {len(files)} pages. Open them: jupyter lab {folder}\n'
    assert {f for f in copied if f.endswith('.ipynb')} == files and 'settings.ini' in copied
    assert {Path(f).name for f in copied if f.startswith('benchmarks/')} == {
        f.name for f in (root / 'benchmarks').glob('*.json')}
    assert not [f for f in copied if f.endswith(('.yml', '.py'))]
    pages = [json.loads((f / 'data/cache.ipynb').read_text()) for f in (root / 'nbs', tmp_path / 'pages')]
    *cells, export = pages[0].pop('cells')
    assert pages[1].pop('cells') == cells and 'nbdev_export' in ''.join(export['source'])
    assert pages[0] == pages[1]
    again = ran(f'notebooks {tmp_path / "pages"}')
    assert again.code == 2 and 'exists already; name a new folder.' in again.err
    assert ran(f'notebooks {tmp_path / "more"} --json').json == {'folder': str(tmp_path / 'more'),
                                                                 'notebooks': len(files)}


# --- serve --------------------------------------------------------------------------------------------------

def test_serve(ran, behind, bars, monkeypatch, tmp_path):
    engines = []
    class Engine:
        sample_rate, rows, closed = 24000, SimpleNamespace(streams=[None] * 8), False
        def __init__(self, speaker, rows):
            self.speaker, self.given, self.warm = speaker, rows, []
            engines.append(self)
        def warm_up(self, voice): self.warm.append(voice)
        def close(self): self.closed = True
    tokenizer = SimpleNamespace(languages=['de', 'fa'])
    behind('speech.guard.run_rates', {})
    monkeypatch.setattr('xtts_nb.speech.generate.Speaker',
                        lambda xtts, rates: SimpleNamespace(xtts=xtts, rates=rates))
    monkeypatch.setattr('xtts_nb.models.xtts.XTTS.load', lambda folder: SimpleNamespace(tokenizer=tokenizer))
    monkeypatch.setattr('xtts_nb.speech.stream.Engine', Engine)
    loaded = behind('speech.voices.load_voice', lambda path, xtts, model: f'voice {path.stem}')
    hashed = behind('speech.voices.voice_model', 'abc')
    for name in ('a', 'b'): (tmp_path / f'{name}.safetensors').touch()
    def serve(service, ready, **_):
        for status, count in ((429, 1), (200, 2)): service.metrics.requests.labels(status).inc(count)
        ready('http://x:1')
    served, ports = behind('speech.serve.serve', serve), []
    monkeypatch.setattr('xtts_nb.speech.serve.check_port',
                        lambda *where: ports.append((*where, len(engines))))
    done = ran(f'serve --model m --voices {tmp_path}')
    assert done.out == 'Requests by status: {200: 2, 429: 1}\n'
    assert 'Ready: http://x:1, voices: 2. Ctrl-C ends' in done.err
    more = ('--port 0 --host h --key k --language fa --rows 3 --queue 5 --max-characters 7 --grace 2 '
            '--wait 4 --json')
    assert ran(f'serve --model m --voices {tmp_path} {more}').json == {'requests': {'200': 2, '429': 1}}
    one, two = ([s['service'].queue, s['service'].max_characters, s['service'].language, s['service'].key,
                 s['host'], s['port'], s['grace'], s['service'].wait] for s in served)
    assert one == [64, 4096, 'de', None, '127.0.0.1', 8000, 30., 30.]
    assert two == [5, 7, 'fa', 'k', 'h', 0, 2., 4.]
    assert [(e.given, e.warm) for e in engines] == [(8, ['voice a']), (3, ['voice a'])]
    assert len(loaded) == 4 and len(hashed) == 2 and {one['model'] for one in loaded} == {'abc'}
    for e in engines: assert e.speaker.xtts.tokenizer is tokenizer and e.speaker.rates == {}
    assert ports == [('127.0.0.1', 8000, 0), ('h', 0, 1)]   # before the model is loaded

@pytest.mark.parametrize('option, variable', [([], ''), ([], ' '), (['--key', ''], 'k'),
                                              (['--key', ' '], 'k')])
def test_an_empty_key_is_refused_before_the_model_is_loaded(ran, bars, monkeypatch, option, variable):
    monkeypatch.setenv('XTTS_NB_KEY', variable)
    done = ran('serve --model none --voices none', *option)
    assert done.code == 2 and 'The key is empty; give one' in done.err

def test_bounds_of_serve():
    check_bounds(*((f'serve --model m --voices v --{name}', inside, outside) for name, inside, outside in (
        ('port', 65535, 65536), ('port', 0, -1), ('rows', 1, 0), ('queue', 1, 0), ('max-characters', 1, 0),
        ('grace', 0, -1), ('wait', 0, -1))))
