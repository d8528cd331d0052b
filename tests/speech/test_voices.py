"Saved voices: what is written comes back, damaged and foreign files are named, and names are no paths."
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf

from xtts_nb.config import UserError
from xtts_nb.data.audio import synthetic_voice
from xtts_nb.files import write_tensors
from xtts_nb.models.xtts import XTTS
from xtts_nb.speech.voices import Voice
from xtts_nb.speech.voices import (
    add_voice, blend_voices, find_voice, _import_voices, list_voices, _read_voice, remove_voice,
    _save_voice, voice_model, voice_path)

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch_file

LOW, HIGH = synthetic_voice(1., 110.), synthetic_voice(1.5, 210.)

@pytest.fixture(scope='module')
def shelf(singer, tmp_path_factory):
    "A folder with the voices `low` and `high`; to be read only."
    folder = tmp_path_factory.mktemp('voices') / 'mine'
    for name, wavs in (('low', [LOW, HIGH]), ('high', [HIGH])): add_voice(folder, name, wavs, singer)
    return folder

@pytest.fixture
def plain(tmp_path):
    "A folder with two voices of another model, which has no speaker encoder: all 1, and all 3."
    for name, value in (('one', 1.), ('three', 3.)):
        _save_voice(tmp_path / f'{name}.safetensors', Voice(np.full((4, 64), value), None), 'm', [])
    return tmp_path

GOOD = {'format': '1', 'name': 'v', 'model': 'm', 'made_from': '[]'}
PROMPT = {'prompt': np.ones((4, 64), np.float32)}

@pytest.mark.parametrize('tensors, header', [
    (PROMPT, None), ({'vector': np.ones(3, np.float32)}, GOOD), (PROMPT, GOOD | {'format': '2'}),
    (PROMPT | {'more': np.ones(3, np.float32)}, GOOD), ({'prompt': np.ones((4, 64))}, GOOD),
    ({'prompt': np.ones((0, 64), np.float32)}, GOOD), (PROMPT, {'format': '1'}),
    (PROMPT | {'vector': np.array([1., np.nan], np.float32)}, GOOD), (PROMPT, GOOD | {'made_from': '[{}]'}),
    (PROMPT, GOOD | {'made_from': '[' * 10**5}),
    (PROMPT, GOOD | {'made_from': f'[{{"name": "a", "seconds": 1{"0" * 400}}}]'})])
def test_a_damaged_file_is_named(tmp_path, tensors, header):
    write_tensors(tmp_path / 'v.safetensors', tensors, metadata=header)
    with pytest.raises(UserError, match='v.safetensors: '): _read_voice(tmp_path / 'v.safetensors')
    [row] = list_voices(tmp_path)
    assert row.keys() == {'name', 'error'} and row['name'] == 'v'

def test_the_fingerprint_is_that_of_the_encoders(with_hifigan, singer, tmp_path):
    xtts, same = XTTS.load(with_hifigan), voice_model(singer.xtts)
    xtts.gpt.code_head.bias.assign_add(tf.ones(34))
    assert voice_model(xtts) == same
    for v in (xtts.gpt.mel_stats, xtts.gpt.conditioning.variables[0], xtts.hifigan[1].variables[0]):
        old = v.numpy()
        v.assign(old + 1)
        assert voice_model(xtts) != same
        v.assign(old)
    xtts.save(tmp_path / 'm', {n: tf.cast(v.value, 'bfloat16').numpy() for n, v in xtts.weights.items()})
    assert voice_model(xtts) == same == voice_model(XTTS.load(tmp_path / 'm'))

@pytest.mark.parametrize('name', ['', '.', '..', '../../etc', '/etc/passwd', 'a/b', 'a\\b', 'C:x', 'a\0',
                                  'a\n', '.hidden', 'end.', ' a', 'a ', '\udc80', 'a' * 201, 'é' * 101])
def test_a_name_is_no_path(tmp_path, name):
    with pytest.raises(UserError, match='is not a valid voice name; use letters'): voice_path(tmp_path, name)

def test_a_voice_is_replaced_only_by_force(singer, plain):
    before = (plain / 'one.safetensors').read_bytes()
    never = SimpleNamespace(xtts=singer.xtts)   # nothing is computed
    for refused in (lambda: add_voice(plain, 'one', [LOW], never),
                    lambda: blend_voices(plain, 'one', {'three': 1.})):
        with pytest.raises(UserError, match='one.safetensors: the voice exists already; .*`force`'): refused()
    assert (plain / 'one.safetensors').read_bytes() == before
    (plain / 'model.safetensors').write_bytes(safetensors.numpy.save({'w': np.ones(2)}))   # of somebody else
    (plain / 'cut.safetensors').write_bytes(before[:-1])
    for refused in (lambda: blend_voices(plain, 'model', {'three': 1.}, force=True),
                    lambda: remove_voice(plain, 'model')):
        with pytest.raises(UserError, match='model.safetensors: is not a voice'): refused()
    remove_voice(plain, 'cut')
    blend_voices(plain, 'one', {'three': 1.}, force=True)
    assert (_read_voice(plain / 'one.safetensors')[0].prompt == 3).all()

# --- what a user means --------------------------------------------------------------------------------------

def test_a_voice_is_found(shelf, singer, tmp_path):
    recordings = [str(tmp_path / 'a.wav'), tmp_path / 'b.flac']
    for path in recordings: Path(path).touch()
    assert find_voice(recordings, singer.xtts) is recordings
    assert find_voice(there := recordings[:1], singer.xtts, tmp_path) is there   # a file, not a name
    for given, folder in ((['a.wav', 'v.safetensors'], None), (['low', 'high'], shelf)):
        with pytest.raises(UserError, match='several voices cannot speak one text'):
            find_voice(given, singer.xtts, folder)
    with pytest.raises(UserError, match=r'has no voice "none" \(it has: high, low\)'):
        find_voice(['none'], singer.xtts, shelf)

def test_a_file_that_is_shortened_while_it_is_read(tmp_path):
    "A mapped file would end the process with SIGBUS; so a child reads, and shortens it between the parts."
    path, finite = tmp_path / 'a.safetensors', np.isfinite
    _save_voice(path, Voice(np.ones((32, 1024)), np.ones(512)), 'm', [])
    if not (child := os.fork()):
        np.isfinite = lambda x: (os.truncate(path, 0), finite(x))[1]
        os._exit(len(_read_voice(path)[0].vector) != 512)
    assert os.waitpid(child, 0)[1] == 0 and not path.stat().st_size

def studio(**shapes):
    "The parts of a voice as coqui-tts stores them."
    draw = np.random.default_rng(len(shapes))
    shapes = {'gpt_cond_latent': (1, 4, 64), 'speaker_embedding': (1, 32, 1)} | shapes
    return {part: draw.normal(size=shape).astype(np.float32) for part, shape in shapes.items()}

def test_studio_voices_become_voices_of_a_folder(singer, tmp_path):
    "By their names, as a user and a client of the service give them; none is replaced without force."
    file, folder = tmp_path / 'speakers_xtts.pth', tmp_path / 'voices'
    given = {name: studio() for name in ('Claribel Dervla', 'Eugenio Mataracı')}
    torch_file.write_dict(file, given)
    rows = _import_voices(folder, file, singer.xtts)
    assert rows == list_voices(folder) and [row['name'] for row in rows] == [*given]
    assert rows[0]['made_from'] == [{'name': 'speakers_xtts.pth'}] and rows[0]['seconds'] == 0
    voice, parts = find_voice(['Claribel Dervla'], singer.xtts, folder), given['Claribel Dervla']
    assert np.array_equal(voice.prompt, parts['gpt_cond_latent'][0])
    assert np.array_equal(voice.vector, parts['speaker_embedding'][0, :, 0])
    assert len(singer('aa bb', 'en', voice))
    with pytest.raises(UserError, match='exists already'): _import_voices(folder, file, singer.xtts)
    assert len(_import_voices(folder, file, singer.xtts, force=True)) == 2

@pytest.mark.parametrize('contents, words', [
    ({}, 'holds no voices'),
    ({'A': studio(gpt_cond_latent=(1, 4, 32))}, r'"A" has .*\(1, 4, 32\).*takes .*\(1, 4, 64\)'),
    ({'A': studio(), 'B': {'gpt_cond_latent': np.zeros((1, 4, 64), np.float32)}}, '"B" has'),
    ({'A': {k: x * np.float32('nan') for k, x in studio().items()}}, '"A" has'),
    ({'A': np.zeros(3, np.float32)}, '"A" has'), ({'../A': studio()}, "'../A' is not a valid voice name")],
    ids=['none', 'shape', 'part', 'nan', 'tensor', 'name'])
def test_a_file_of_other_voices_is_refused_whole(singer, tmp_path, contents, words):
    torch_file.write_dict(tmp_path / 'x.pth', contents)
    with pytest.raises(UserError, match=words):
        _import_voices(tmp_path / 'voices', tmp_path / 'x.pth', singer.xtts)
    assert not (tmp_path / 'voices').exists()
