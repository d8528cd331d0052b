"The commands for a voice, with a stubbed library: calls, output and exit codes."
import json
from pathlib import Path

import pytest
import tree

from process import check_bounds
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

# --- say ----------------------------------------------------------------------------------------------------

REPORT = [{'piece': 1, 'text': 'Hallo', 'found': 'no end', 'done': 'left'}]

# --- voices -------------------------------------------------------------------------------------------------

ANNA = {'name': 'anna', 'seconds': 3.5,
        'made_from': [{'name': 'a.wav', 'seconds': 3.}, {'name': 'b.mp3', 'seconds': 0.5}]}
BOTH = {'name': 'both', 'seconds': 0.,
        'made_from': [{'name': 'anna', 'weight': 0.75}, {'name': 'bob', 'weight': 0.25}]}

# --- evaluate -----------------------------------------------------------------------------------------------

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

def test_bounds_of_serve():
    check_bounds(*((f'serve --model m --voices v --{name}', inside, outside) for name, inside, outside in (
        ('port', 65535, 65536), ('port', 0, -1), ('rows', 1, 0), ('queue', 1, 0), ('max-characters', 1, 0),
        ('grace', 0, -1), ('wait', 0, -1))))
