"Saved voices: what is written comes back, damaged and foreign files are named, and names are no paths."
import os
import shutil
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
import soundfile
import tensorflow as tf

from xtts_nb.config import UserError
from xtts_nb.data.audio import synthetic_voice
from xtts_nb.files import write_tensors
from xtts_nb.models.xtts import XTTS
from xtts_nb.speech import voices
from xtts_nb.speech.generate import Speaker
from xtts_nb.speech.voices import Voice
from xtts_nb.speech.voices import (
    add_voice, blend_voices, find_voice, import_voices, list_voices, load_voice, read_voice, remove_voice,
    save_voice, voice_model, voice_path)

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
        save_voice(tmp_path / f'{name}.safetensors', Voice(np.full((4, 64), value), None), 'm', [])
    return tmp_path


# --- one file -----------------------------------------------------------------------------------------------

def test_a_voice_comes_back(shelf, singer):
    loaded, heard = load_voice(shelf / 'low.safetensors', singer.xtts), singer.listen([LOW, HIGH])
    assert all(np.array_equal(a, b) and a.dtype == tf.float32 for a, b in zip(loaded, heard, strict=True))
    assert read_voice(shelf / 'low.safetensors')[1] == {
        'name': 'low', 'seconds': 2.5, 'prompt': [4, 64], 'vector': [32], 'model': voice_model(singer.xtts),
        'made_from': [{'name': 'samples', 'seconds': 1.}, {'name': 'samples', 'seconds': 1.5}]}

@pytest.mark.parametrize('name', ['r.flac', 'r.mp3', 'r.ogg', 'r.wav'])
def test_recordings_of_other_formats_and_rates(singer, tmp_path, name):
    wav = np.interp(np.arange(24000 * 2) / 48000, np.arange(22050) / 22050, LOW)
    soundfile.write(tmp_path / name, np.stack([wav, wav], 1), 48000)
    row = add_voice(tmp_path, 'r', [tmp_path / name], singer)
    assert row['made_from'] == [{'name': name, 'seconds': 1.}]

@pytest.mark.parametrize('wav, words', [
    (LOW[:2205], '0.10 s .* too short'), (np.zeros(22050, np.float32), 'is silent; give a recording'),
    (0.3 + 9e-4 * np.sign(LOW), 'is silent'), (None, r'notes.txt: not readable as audio')])
def test_what_is_no_recording_is_refused(singer, tmp_path, wav, words):
    (tmp_path / 'notes.txt').write_text('no sound')
    with pytest.raises(UserError, match=words):
        add_voice(tmp_path, 'v', [tmp_path / 'notes.txt' if wav is None else wav], singer)
    assert not list(tmp_path.glob('v*'))

def test_the_limit_of_seconds_is_that_of_the_model(singer, tmp_path):
    speaker = Speaker(singer.xtts, max_reference_seconds=0.6)
    assert add_voice(tmp_path, 'v', [HIGH], speaker)['seconds'] == 0.6

GOOD = {'format': '1', 'name': 'v', 'model': 'm', 'made_from': '[]'}
PROMPT = {'prompt': np.ones((4, 64), np.float32)}

@pytest.mark.parametrize('tensors, header, words', [
    (PROMPT, None, 'holds no voice; make one with'),
    ({'vector': np.ones(3, np.float32)}, GOOD, 'holds no voice'),
    (PROMPT | {'more': np.ones(3, np.float32)}, GOOD, 'holds no voice'),
    (PROMPT, GOOD | {'format': '2'}, 'has version 2 of the format of voices, expected 1'),
    ({'prompt': np.ones((4, 64))}, GOOD, r'"prompt" has type F64 and shape \(4, 64\), expected F32'),
    ({'prompt': np.ones((1, 4, 64), np.float32)}, GOOD, r'shape \(1, 4, 64\), expected F32 and 2 dimensions'),
    ({'prompt': np.ones((0, 64), np.float32)}, GOOD, r'"prompt" has type F32 and shape \(0, 64\)'),
    (PROMPT | {'vector': np.ones((3, 1), np.float32)}, GOOD, r'"vector" .* expected F32 and 1 dimensions'),
    (PROMPT | {'vector': np.array([1., np.nan], np.float32)}, GOOD, '"vector" holds NaN or infinite values'),
    ({'prompt': np.full((4, 64), -np.inf, np.float32)}, GOOD, '"prompt" holds NaN or infinite values'),
    (PROMPT, GOOD | {'made_from': 'x'}, 'its header is damaged'),
    (PROMPT, GOOD | {'made_from': '[1]'}, 'its header is damaged'),
    (PROMPT, GOOD | {'made_from': '[{}]'}, 'its header is damaged'),
    (PROMPT, GOOD | {'made_from': '[' * 10**5}, 'its header is damaged'),
    (PROMPT, GOOD | {'made_from': f'[{{"name": "a", "seconds": 1{"0" * 400}}}]'}, 'its header is damaged'),
    (PROMPT, {'format': '1'}, 'its header is damaged')])
def test_a_damaged_file_is_named(tmp_path, tensors, header, words):
    write_tensors(tmp_path / 'v.safetensors', tensors, metadata=header)
    with pytest.raises(UserError, match=f'v.safetensors: {words}|v.safetensors: .*{words}'):
        read_voice(tmp_path / 'v.safetensors')
    [row] = list_voices(tmp_path)
    assert row.keys() == {'name', 'error'} and row['name'] == 'v'

@pytest.mark.parametrize('content', [b'', b'text', struct.pack('<Q', 2**62), b'\x02\0\0\0\0\0\0\0{}'])
def test_a_file_of_something_else_is_named(tmp_path, content):
    (tmp_path / 'v.safetensors').write_bytes(content)
    with pytest.raises(UserError, match='v.safetensors: (not readable as a voice|holds no voice)'):
        read_voice(tmp_path / 'v.safetensors')


# --- the model of a voice -----------------------------------------------------------------------------------

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

def test_a_voice_of_another_model_is_refused(shelf, plain, singer, xtts):
    for path, model, words in ((shelf / 'low.safetensors', xtts, 'has the shapes'),
                               (plain / 'one.safetensors', singer.xtts, 'has the shapes .* the model takes'),
                               (plain / 'one.safetensors', xtts, 'with other encoders')):
        with pytest.raises(UserError, match=f'{words}.*; add the voice again with this model'):
            load_voice(path, model)
    save_voice(plain / 'mine.safetensors', Voice(np.ones((4, 64)), None), voice_model(xtts), [])
    assert load_voice(plain / 'mine.safetensors', xtts).vector is None
    save_voice(plain / 'wide.safetensors', Voice(np.ones((5, 64)), None), voice_model(xtts), [])
    with pytest.raises(UserError, match='has the shapes'): load_voice(plain / 'wide.safetensors', xtts)


# --- a folder -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', ['', '.', '..', '../../etc', '/etc/passwd', 'a/b', 'a\\b', 'C:x', 'a\0',
                                  'a\n', '.hidden', 'end.', ' a', 'a ', '\udc80', 'a' * 201, 'é' * 101])
def test_a_name_is_no_path(tmp_path, name):
    with pytest.raises(UserError, match='is no name of a voice; use letters'): voice_path(tmp_path, name)

@pytest.mark.parametrize('name', ['anna', 'Anna 2.b', 'نگار', 'प्रिया', 'a' * 200])
def test_names_are_those_of_people(tmp_path, name):
    assert voice_path(tmp_path, name) == tmp_path / f'{name}.safetensors'

def test_a_link_out_of_the_folder_is_refused(shelf, tmp_path):
    (tmp_path / 'v.safetensors').symlink_to(shelf / 'low.safetensors')
    with pytest.raises(UserError, match='leads out of this folder'): voice_path(tmp_path, 'v')

def test_a_voice_is_replaced_only_by_force(singer, plain):
    before = (plain / 'one.safetensors').read_bytes()
    never = SimpleNamespace(xtts=singer.xtts)   # nothing is computed
    for refused in (lambda: add_voice(plain, 'one', [LOW], never),
                    lambda: blend_voices(plain, 'one', {'three': 1.})):
        with pytest.raises(UserError, match='one.safetensors: the voice exists already; .*--force'): refused()
    assert (plain / 'one.safetensors').read_bytes() == before
    (plain / 'model.safetensors').write_bytes(safetensors.numpy.save({'w': np.ones(2)}))   # of somebody else
    (plain / 'cut.safetensors').write_bytes(before[:-1])
    for refused in (lambda: blend_voices(plain, 'model', {'three': 1.}, force=True),
                    lambda: remove_voice(plain, 'model')):
        with pytest.raises(UserError, match='model.safetensors: is not a voice'): refused()
    remove_voice(plain, 'cut')
    blend_voices(plain, 'one', {'three': 1.}, force=True)
    assert (read_voice(plain / 'one.safetensors')[0].prompt == 3).all()

def test_voices_are_listed_and_removed(plain):
    assert [r['name'] for r in list_voices(plain)] == ['one', 'three']
    assert list_voices(plain)[0] == {'name': 'one', 'seconds': 0., 'prompt': [4, 64], 'model': 'm',
                                     'made_from': []}
    remove_voice(plain, 'one')
    with pytest.raises(UserError, match=r'has no voice "one" \(it has: three\)'): remove_voice(plain, 'one')
    remove_voice(plain, 'three')
    with pytest.raises(UserError, match=r'\(it has: none\)'): voice_path(plain, 'one', exists=True)
    with pytest.raises(UserError, match='is no such folder of voices; make one'): list_voices(plain / 'none')


# --- between voices -----------------------------------------------------------------------------------------

def test_a_blend_is_the_weighted_mean(shelf, plain):
    row = blend_voices(plain, 'new', {'one': 6., 'three': 2.})
    assert np.allclose(read_voice(plain / 'new.safetensors')[0].prompt, 1.5)
    assert row['made_from'] == [{'name': 'one', 'weight': 0.75}, {'name': 'three', 'weight': 0.25}]
    assert row['seconds'] == 0 and row['model'] == 'm' and 'vector' not in row
    for name in ('low', 'high'): shutil.copy(shelf / f'{name}.safetensors', plain)
    blend_voices(plain, 'louder', {'low': 0., 'high': 1e-3})
    new, high = (read_voice(plain / f'{n}.safetensors')[0] for n in ('louder', 'high'))
    assert all(np.allclose(a, b) for a, b in zip(new, high, strict=True))

@pytest.mark.parametrize('weights', [{}, {'one': 0.}, {'one': -1., 'three': 2.}, {'one': np.nan},
                                     {'one': np.inf}], ids=str)
def test_weights_that_give_no_voice_are_refused(plain, weights):
    with pytest.raises(UserError, match='give numbers from 0 on, at least one of them above 0'):
        blend_voices(plain, 'new', weights)

def test_voices_of_two_models_are_not_blended(plain):
    save_voice(plain / 'other.safetensors', Voice(np.ones((4, 64)), None), 'other', [])
    with pytest.raises(UserError, match='one, other were made by different models'):
        blend_voices(plain, 'new', {'one': 1., 'other': 1.})
    with pytest.raises(UserError, match='has no voice "none"'): blend_voices(plain, 'new', {'none': 1.})
    assert not (plain / 'new.safetensors').exists()


# --- what a user means --------------------------------------------------------------------------------------

def test_a_voice_is_found(shelf, singer, tmp_path):
    recordings = ['a.wav', shelf / 'b.flac']
    assert find_voice(recordings, singer.xtts) is recordings
    there = [str(tmp_path / 'a.wav')]
    Path(there[0]).touch()
    assert find_voice(there, singer.xtts, tmp_path) is there   # a file, not a name
    saved = load_voice(shelf / 'low.safetensors', singer.xtts)
    for given, folder in (([shelf / 'low.safetensors'], None), (['low'], shelf)):
        assert np.array_equal(find_voice(given, singer.xtts, folder).prompt, saved.prompt)
    for given, folder in ((['a.wav', 'v.safetensors'], None), (['low', 'high'], shelf)):
        with pytest.raises(UserError, match='several voices cannot speak one text'):
            find_voice(given, singer.xtts, folder)
    with pytest.raises(UserError, match=r'has no voice "none" \(it has: high, low\)'):
        find_voice(['none'], singer.xtts, shelf)


def test_a_file_that_is_shortened_while_it_is_read(tmp_path):
    "A mapped file would end the process with SIGBUS; so a child reads, and shortens it between the parts."
    path, finite = tmp_path / 'a.safetensors', np.isfinite
    save_voice(path, Voice(np.ones((32, 1024)), np.ones(512)), 'm', [])
    if not (child := os.fork()):
        np.isfinite = lambda x: (os.truncate(path, 0), finite(x))[1]
        os._exit(len(read_voice(path)[0].vector) != 512)
    assert os.waitpid(child, 0)[1] == 0 and not path.stat().st_size

def test_a_file_too_large_for_a_voice(tmp_path, monkeypatch):
    monkeypatch.setattr(voices, 'VOICE_BYTES', 999)
    save_voice(path := tmp_path / 'a.safetensors', Voice(np.ones((4, 64)), None), 'm', [])
    with pytest.raises(UserError, match='is too large for a voice'): read_voice(path)


# --- voices that come with a model --------------------------------------------------------------------------

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
    rows = import_voices(folder, file, singer.xtts)
    assert rows == list_voices(folder) and [row['name'] for row in rows] == [*given]
    assert rows[0]['made_from'] == [{'name': 'speakers_xtts.pth'}] and rows[0]['seconds'] == 0
    voice, parts = find_voice(['Claribel Dervla'], singer.xtts, folder), given['Claribel Dervla']
    assert np.array_equal(voice.prompt, parts['gpt_cond_latent'][0])
    assert np.array_equal(voice.vector, parts['speaker_embedding'][0, :, 0])
    assert len(singer('aa bb', 'en', voice))
    with pytest.raises(UserError, match='exists already'): import_voices(folder, file, singer.xtts)
    assert len(import_voices(folder, file, singer.xtts, force=True)) == 2

@pytest.mark.parametrize('contents, words', [
    ({}, 'holds no voices'),
    ({'A': studio(gpt_cond_latent=(1, 4, 32))}, r'"A" has .*\(1, 4, 32\).*takes .*\(1, 4, 64\)'),
    ({'A': studio(), 'B': {'gpt_cond_latent': np.zeros((1, 4, 64), np.float32)}}, '"B" has'),
    ({'A': {k: x * np.float32('nan') for k, x in studio().items()}}, '"A" has'),
    ({'A': np.zeros(3, np.float32)}, '"A" has'), ({'../A': studio()}, "'../A' is no name of a voice")],
    ids=['none', 'shape', 'part', 'nan', 'tensor', 'name'])
def test_a_file_of_other_voices_is_refused_whole(singer, tmp_path, contents, words):
    torch_file.write_dict(tmp_path / 'x.pth', contents)
    with pytest.raises(UserError, match=words):
        import_voices(tmp_path / 'voices', tmp_path / 'x.pth', singer.xtts)
    assert not (tmp_path / 'voices').exists()

def test_a_file_of_voices_that_runs_code_is_refused(singer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = torch_file.call(torch_file.name('os', 'mkdir'), torch_file.text('ran'))
    torch_file.write_dict(tmp_path / 'x.pth', {'A': studio()}, B=code)
    with pytest.raises(UserError, match='x.pth: asks for os.mkdir, which could run code'):
        import_voices('voices', tmp_path / 'x.pth', singer.xtts)
    assert [*tmp_path.iterdir()] == [tmp_path / 'x.pth']

def test_studio_voices_need_a_decoder(xtts, tmp_path):
    torch_file.write_dict(tmp_path / 'x.pth', {'A': studio()})
    with pytest.raises(UserError, match='no HiFi-GAN'): import_voices(tmp_path, tmp_path / 'x.pth', xtts)
