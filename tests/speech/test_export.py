"The SavedModel sounds as the speaker does, in a process that cannot import the library."
import re

import numpy as np
import pytest

from process import python
from xtts_nb.config import UserError
from xtts_nb.data.audio import load_audio, save_audio, synthetic_voice
from xtts_nb.speech.export import export_speaker
from xtts_nb.speech.generate import Speaker
from xtts_nb.speech.voices import add_voice, load_voice

TEXT = 'aa bb'
ALONE = '''
import sys
for name in [n for n in sys.modules if n.split('.')[0] == 'xtts_nb']: del sys.modules[name]   # of the fork
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == 'xtts_nb': raise ImportError(name)
sys.meta_path.insert(0, Blocker())
TEXT = 'aa bb'
'''
MORE = '''
sounds, warm = {}, tf.constant(about['speech']['temperature'])
def call(text, length, codes):
    return speak(text=tf.constant([text]), length=tf.constant([length]), seed=tf.constant(3),
                 temperature=warm, max_codes=tf.constant(codes), **voice)['wav'].numpy()
for text, codes in (ids, 9999), (ids + [0] * 3, 5), (ids, 0): sounds[str(codes)] = call(text, len(ids), codes)
for text, length in (ids * 20, 4), (ids, 99):
    try: call(text, length, 1)
    except tf.errors.InvalidArgumentError as e: assert 'text: at most 40 ids' in str(e)
    else: raise AssertionError
import numpy
numpy.savez('sounds.npz', **sounds)
assert not any(name.split('.')[0] == 'xtts_nb' for name in sys.modules)
'''

@pytest.mark.slow
def test_another_process_makes_the_same_sound(singer, tmp_path):
    "With int8 weights and a decoder; the page of the export has neither."
    speaker = Speaker(singer.xtts, temperature=1.5, top_k=9, speed=0.8, weights='int8')
    add_voice(tmp_path / 'voices', "d'or", [synthetic_voice(1.)], speaker)
    export_speaker(speaker, tmp_path / 'out', folder=tmp_path / 'voices')
    program = re.search(r'```python\n(.*?)```', (tmp_path / 'out/README.md').read_text(), re.DOTALL)[1]
    done = python(ALONE + program + MORE, cwd=tmp_path / 'out')
    assert done.code == 0, done.err
    with np.load(tmp_path / 'out/sounds.npz') as file: sounds = dict(file)
    voice = load_voice(tmp_path / "voices/d'or.safetensors", speaker.xtts)
    expected, said = speaker(TEXT, 'en', voice, seed=3), speaker(TEXT, 'en', voice)
    assert expected.shape == sounds['9999'].shape and np.allclose(expected, sounds['9999'], atol=1e-3)
    assert 0 < len(sounds['0']) < len(sounds['5']) < len(expected)
    assert np.abs(load_audio(tmp_path / 'out/say.wav', speaker.sample_rate) - said.clip(-1, 1)).max() < 1e-3

@pytest.fixture
def graphless(monkeypatch):
    "The graph is not made."
    monkeypatch.setattr('xtts_nb.speech.export._saved_model', lambda speaker, folder: folder.mkdir())

def test_voices_of_several_kinds(xtts, graphless, tmp_path):
    speaker = Speaker(xtts)
    save_audio(tmp_path / 'anna.wav', synthetic_voice(1.))
    add_voice(tmp_path / 'v', 'bob', [synthetic_voice(1.)], speaker)
    bob = tmp_path / 'v/bob.safetensors'
    assert export_speaker(speaker, tmp_path / 'a', [tmp_path / 'anna.wav', bob])['voices'] == ['anna', 'bob']
    assert export_speaker(speaker, tmp_path / 'b', ['bob'], tmp_path / 'v')['voices'] == ['bob']
    about = export_speaker(speaker, tmp_path / 'c')
    assert about['voices'] == [] and about['speech']['temperature'] == 0
    assert 'voices/NAME.safetensors' in (tmp_path / 'c/README.md').read_text()
    again = [tmp_path / 'anna.wav'] * 2
    for voices, words in (([bob, bob], 'another voice is called "bob" too; rename one'),
                          (again, 'another voice is called "anna" too; rename one'),
                          ([bob.with_name('none.safetensors')], 'none.safetensors: not readable as a voice')):
        with pytest.raises(UserError, match=words): export_speaker(speaker, tmp_path / 'd', voices)
    with pytest.raises(UserError, match='already holds something'): export_speaker(speaker, tmp_path / 'a')
    assert not (tmp_path / 'd').exists()
