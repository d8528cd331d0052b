"Checkpoints of coqui-tts in and out. Most tests replace PyTorch's reader and writer; the last need it."
import json
import os
import re
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from xtts_nb.files import named_weights, read_tensors, save_weights
from xtts_nb.models import convert
from xtts_nb.config import UserError
from xtts_nb.models.hifigan import _load_decoder
from xtts_nb.models.xtts import XTTS
from xtts_nb.train.finetune import grow_folder
from xtts_nb.data.text import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
import coqui_toy
import torch_file
from process import main, tree

class Disk:
    "Stands for PyTorch's files: what was written is what is read."
    def __init__(self): self.files = {}

    def write(self, path, contents):
        path.touch()
        self.files[path.name] = contents

    def read(self, path):
        if path.name not in self.files: raise UserError(f'{path}: the file is missing')
        return self.files[path.name]

@pytest.fixture
def disk(monkeypatch):
    disk = Disk()
    monkeypatch.setattr(convert, '_read_pth', disk.read)
    monkeypatch.setattr(convert, '_write_pth', disk.write)
    return disk

def coqui_folder(disk, folder: Path, spelling='new', prefix='') -> dict:
    "A folder of coqui-tts on `disk`; returns its tensors."
    coqui_toy.write_settings(folder)
    files = coqui_toy.tensors(coqui_toy.config(small=True), spelling)
    disk.write(folder / 'model.pth',
               {'model': {prefix + n: x for n, x in files['model.pth'].items()}, 'step': 3})
    disk.write(folder / 'dvae.pth', files['dvae.pth'])
    disk.write(folder / 'mel_stats.pth', files['mel_stats.pth'])
    return files

def assert_same(a: dict, b: dict):
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert a[name].tobytes() == b[name].tobytes(), name

@pytest.mark.parametrize('spelling, prefix', [('new', ''), ('old', ''), ('new', 'xtts.')])
def test_round_trip_is_bit_identical(disk, tmp_path, spelling, prefix):
    """Tensors in half precision too; and each mel has its own constants: those of model.pth are for the
    reference in speaking, those of mel_stats.pth for the codes and for training."""
    files = coqui_folder(disk, tmp_path / 'coqui', spelling, prefix)
    state, code_head = files['model.pth'], files['model.pth']['gpt.mel_head.weight']
    for name, kind in (('gpt.text_head.weight', np.float16), ('gpt.mel_head.weight', ml_dtypes.bfloat16)):
        disk.files['model.pth']['model'][prefix + name] = state[name] = state[name].astype(kind)
    state['mel_stats'] = disk.files['model.pth']['model'][f'{prefix}mel_stats'] = state['mel_stats'] * 2 + 1
    convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    convert.to_coqui(tmp_path / 'ours', tmp_path / 'back')
    assert_same(disk.files['model.pth']['model'], state)
    assert_same(disk.files['dvae.pth'], files['dvae.pth'])
    assert np.array_equal(disk.files['mel_stats.pth'], files['mel_stats.pth'])
    xtts = XTTS.load(tmp_path / 'ours')
    assert np.allclose(xtts.gpt.code_head.kernel, code_head.T, rtol=1e-2)
    assert np.array_equal(xtts.gpt.mel_stats, state['mel_stats'])
    assert np.array_equal(xtts.dvae.mel_stats, files['mel_stats.pth'])
    assert (tmp_path / 'back/vocab.json').read_bytes() == (tmp_path / 'coqui/vocab.json').read_bytes()
    assert json.loads((tmp_path / 'back/config.json').read_text())['languages'] == ['en', 'de']

def test_the_written_config_has_the_sizes_of_the_tensors(disk, tmp_path):
    "With the commands, in and out; a model made here has no `coqui.json` to take a number from."
    coqui_folder(disk, tmp_path / 'coqui')
    assert main('convert', 'from-coqui', tmp_path / 'coqui', tmp_path / 'ours') == 0
    (tmp_path / 'ours/coqui.json').unlink()
    assert main('convert', 'to-coqui', tmp_path / 'back', '--model', tmp_path / 'ours') == 0
    written, given = json.loads((tmp_path / 'back/config.json').read_text()), coqui_toy.settings()
    assert written['model_args'] == given['model_args'] | {'d_vector_dim': 16}
    assert written['model'] == 'xtts' and sorted(written['languages']) == ['de', 'en']
    assert written['audio'] == given['audio']

def test_a_decoder_trained_here_has_lengths_again(disk, tmp_path):
    "Its kernels are folded; coqui-tts expects a length and a direction, under its own names and no others."
    files = coqui_folder(disk, tmp_path / 'coqui')
    convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    path = tmp_path / 'ours/model.safetensors'
    decoder = _load_decoder(path, coqui_toy.config(small=True))
    rest = {name: x for name, x in read_tensors(path) if not name.startswith('decoder/')}
    save_weights(path, rest | {f'decoder/{name}': v for name, v in named_weights(decoder).items()})
    convert.to_coqui(tmp_path / 'ours', tmp_path / 'back')
    result = disk.files['model.pth']['model']
    assert result.keys() == files['model.pth'].keys()
    length, direction = (result[f'hifigan_decoder.waveform_decoder.ups.1.{s}']
                         for s in coqui_toy.SPELLINGS['new'])
    assert np.allclose(length, np.sqrt((direction**2).sum((1, 2), keepdims=True)), rtol=1e-5)

def test_trainer_folder_without_released_files(disk, tmp_path):
    "A trainer leaves best_model.pth with the DVAE and copies inside, and neither dvae.pth nor mel_stats.pth."
    files = coqui_folder(disk, tmp_path / 'coqui')
    state = {f'xtts.{n}': x for n, x in files['model.pth'].items()}
    state |= {f'dvae.{n}': x for n, x in files['dvae.pth'].items()}
    state |= {'torch_mel_spectrogram_dvae.mel_norms': np.ones(80),
              'xtts.gpt.gpt_inference.lm_head.weight': np.ones((2, 2))}
    for name in ('model.pth', 'dvae.pth', 'mel_stats.pth'):
        (tmp_path / 'coqui' / name).unlink()
        disk.files.pop(name)
    disk.write(tmp_path / 'coqui/best_model.pth', {'model': state, 'optimizer': {}, 'config': {}})
    convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    convert.to_coqui(tmp_path / 'ours', tmp_path / 'back')
    assert_same(disk.files['model.pth']['model'], files['model.pth'])
    assert_same(disk.files['dvae.pth'], files['dvae.pth'])

ROWS = ('gpt.text_embedding.weight', 'gpt.text_head.weight', 'gpt.text_head.bias')   # one row per text token

def grow_rows(state: dict, rows: int):
    for name in ROWS: state[name] = np.resize(state[name], (rows, *state[name].shape[1:]))

PAIR = 'hifigan_decoder.waveform_decoder.ups.0.parametrizations.weight.original'
SIZE = coqui_toy.tokenizer().size
ROWS_AND_TOKENS = f'vocab.json: has {SIZE} tokens, but gpt.text_embedding has {{}} rows'

@pytest.mark.parametrize('change, message', [   # settings, tensors or files; or the text of config.json
    (lambda s, t, f: f['dvae.pth'].pop('decoder.0.bias'), 'dvae.pth.*"decoder.0.bias" is missing'),
    (lambda s, t, f: t.pop(f'{PAIR}0'), f'model.pth.*"{PAIR}0" is missing'),
    (lambda s, t, f: t.pop('hifigan_decoder.speaker_encoder.layer3.1.bn1.running_var'), 'var" is missing'),
    (lambda s, t, f: t.update({'gpt.mel_head.weight': np.ones((66, 60), 'f')}),
     r'gpt.mel_head.weight" has shape \(66, 60\), expected \(66, 64\)'),
    (lambda s, t, f: t.update({f'{PAIR}0': np.ones((31, 1, 1), 'f')}), 'ups.0.*has shape'),
    (lambda s, t, f: grow_rows(t, SIZE - 3), ROWS_AND_TOKENS.format(SIZE - 3)),
    (lambda s, t, f: grow_rows(t, SIZE + 540), ROWS_AND_TOKENS.format(SIZE + 540)),
    (lambda s, t, f: s['model_args'].update(gpt_layers=30), 'gpt_layers is 30, the tensors have 2'),
    (lambda s, t, f: s['model_args'].update(gpt_n_heads=0.5), 'heads'),
    (lambda s, t, f: s.update(audio={'output_sample_rate': 44100}), 'audio.output_sample_rate is 44100'),
    (lambda s, t, f: s.update(temperature='hot'), r'config.json: speech\..*give '),
    (lambda s, t, f: '', 'config.json: not JSON'), (lambda *_: '{"model_args": 3}', 'holds no settings'),
    (lambda s, t, f: f.update({'model.pth': {'model': 5}}), 'model.pth: holds no named tensors'),
    (lambda s, t, f: f.update({'dvae.pth': None}), 'dvae.pth: holds no named tensors'),
    (lambda s, t, f: f.update({'mel_stats.pth': np.ones(79, 'f')}), r'has shape \(79,\), expected')])
def test_what_is_wrong_with_a_folder_is_named(disk, tmp_path, change, message):
    coqui_folder(disk, tmp_path / 'coqui')
    settings = coqui_toy.settings()
    text = change(settings, disk.files['model.pth']['model'], disk.files)
    (tmp_path / 'coqui/config.json').write_text(text if isinstance(text, str) else json.dumps(settings))
    with pytest.raises(UserError, match=message): convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    assert not (tmp_path / 'ours').exists()

def test_merges_that_stand_twice(disk, tmp_path):
    "As in XTTS's vocabulary: the last place counts, here and after the way through our file."
    coqui_folder(disk, tmp_path / 'coqui')
    path = tmp_path / 'coqui/vocab.json'
    values = json.loads(path.read_text())
    merges = values['model']['merges']
    values['model']['merges'] = [' '.join(m) for m in [*merges, *reversed(merges)]]
    path.write_text(json.dumps(values, indent=4))
    letters = coqui_toy.WORDS.replace(' ', '')
    words = [letters[i:i + 9] for i in range(0, len(letters), 4)]
    ids = lambda path, cleaner=None: [Tokenizer.load(path, cleaner).encode(w, 'en') for w in words]
    given = ids(path, 'xtts')
    convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    assert ids(tmp_path / 'ours/tokenizer.json') == given
    assert given != [coqui_toy.tokenizer().encode(w, 'en') for w in words]
    convert.to_coqui(tmp_path / 'ours', tmp_path / 'back')
    assert (tmp_path / 'back/vocab.json').read_bytes() == path.read_bytes()
    XTTS.load(tmp_path / 'ours').save(tmp_path / 'saved')
    convert.to_coqui(tmp_path / 'saved', tmp_path / 'again')
    assert (tmp_path / 'again/vocab.json').read_bytes() == path.read_bytes()

def test_a_grown_model_goes_back_with_its_vocabulary(disk, tmp_path):
    files = coqui_folder(disk, tmp_path / 'coqui')
    convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    done = grow_folder(tmp_path / 'ours', tmp_path / 'grown', 'fa', ['سگ پیر'])
    convert.to_coqui(tmp_path / 'grown', tmp_path / 'back')
    state = disk.files['model.pth']['model']
    settings = json.loads((tmp_path / 'back/config.json').read_text())
    for name in ROWS:
        assert len(state[name]) == done['tokens'] > done['tokens_before']
        assert_same({name: state.pop(name)[:done['tokens_before']]}, {name: files['model.pth'].pop(name)})
    assert_same(state, files['model.pth'])
    assert settings['languages'] == ['en', 'de', 'fa']
    assert settings['model_args']['gpt_number_text_tokens'] == done['tokens']
    assert Tokenizer.load(tmp_path / 'back/vocab.json').size == done['tokens']

def test_names_that_look_like_paths_stay_names(disk, tmp_path):
    "Whatever a tensor is called, nothing is written but the new folder, in and out."
    coqui_folder(disk, tmp_path / 'coqui')
    evil = {'../../evil': np.ones(2, np.float32), '/evil': np.ones(3, np.float32),
            'a/../../evil.pth': np.ones(1, np.float32)}
    disk.files['model.pth']['model'] |= evil
    before = tree(tmp_path)
    convert.from_coqui(tmp_path / 'coqui', tmp_path / 'new/ours')
    convert.to_coqui(tmp_path / 'new/ours', tmp_path / 'new/back')
    assert {path: data for path, data in tree(tmp_path).items() if not path.startswith('new')} == before
    assert {p.name for p in (tmp_path / 'new').iterdir()} == {'ours', 'back'}
    assert_same({n: disk.files['model.pth']['model'][n] for n in evil}, evil)

@pytest.mark.parametrize('name', ['coqui/../../x', 'gpt/block_99/qkv/kernel'])
def test_a_tensor_that_no_one_knows_is_named(disk, tmp_path, name):
    coqui_folder(disk, tmp_path / 'coqui')
    convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    path = tmp_path / 'ours/model.safetensors'
    convert.write_tensors(path, dict(convert.read_tensors(path)) | {name: np.ones(1)})
    with pytest.raises(UserError, match=f'model.safetensors: "{re.escape(name)}" is not a tensor of XTTS'):
        convert.to_coqui(tmp_path / 'ours', tmp_path / 'back')
    assert not (tmp_path / 'back').exists()

# With PyTorch: real files

class Touch:
    def __init__(self, path): self.path = path
    def __reduce__(self): return os.system, (f'touch {self.path}',)

@pytest.fixture
def torch(): return pytest.importorskip('torch')

@pytest.mark.parametrize('archive', [True, False])
@pytest.mark.torch
def test_code_in_a_checkpoint_never_runs(torch, tmp_path, archive):
    contents = {'model': {'w': torch.ones(2)}, 'config': Touch(tmp_path / 'ran')}
    torch.save(contents, tmp_path / 'model.pth', _use_new_zipfile_serialization=archive)
    with pytest.raises(UserError, match=r'model.pth: asks for (posix|nt)\.system'):
        convert._read_pth(tmp_path / 'model.pth')
    assert not (tmp_path / 'ran').exists()

@pytest.mark.torch
def test_files_of_pytorch_come_back(torch, tmp_path):
    given = {'model': {'a': np.random.randn(3, 4).astype(np.float32).T, 'b': np.ones(3, ml_dtypes.bfloat16),
                       'c': np.array(5)}}
    convert._write_pth(tmp_path / 'x.pth', given)
    assert_same(convert._read_pth(tmp_path / 'x.pth')['model'], given['model'])

# --- files of tensors alone, without PyTorch ----------------------------------------------------------------

def test_tensors_are_read_without_pytorch(tmp_path, monkeypatch):
    "Whole ones, and one that is a part of others' numbers in another order."
    monkeypatch.setitem(sys.modules, 'torch', None)
    x, path = np.arange(12, dtype=np.float32), tmp_path / 'x.pth'
    turned = torch_file.tensor(0, 12, (2, 3), (1, 4), 2)
    torch_file.write_dict(path, {'a': {'b': x.reshape(1, 3, 4)}, 'c': x[:1] / 2}, turned=turned)
    found = convert.read_plain_pth(path)
    assert [*found] == ['a', 'c', 'turned'] and found['c'].tolist() == [0]
    assert np.array_equal(found['a']['b'], x.reshape(1, 3, 4))
    assert np.array_equal(found['turned'], [[2, 6, 10], [3, 7, 11]])

@pytest.mark.parametrize('code, named', [
    (torch_file.call(torch_file.name('os', 'system'), torch_file.text('touch ran')), 'os.system'),
    (torch_file.call(torch_file.name('builtins', 'eval'), torch_file.text('open("ran", "w")')),
     'builtins.eval'),
    (torch_file.text('os') + torch_file.text('system') + b'\x93', 'os.system'),
    (torch_file.call(torch_file.name('torch', 'load'), torch_file.text('x')), 'torch.load'),
    (torch_file.call(torch_file.name('collections', 'Counter')), 'collections.Counter')],
    ids=['system', 'eval', 'stack', 'torch', 'counter'])
def test_a_name_in_a_file_of_tensors_is_refused(tmp_path, monkeypatch, code, named):
    monkeypatch.chdir(tmp_path)
    torch_file.write_dict(tmp_path / 'x.pth', {'a': np.ones(2, np.float32)}, more=code)
    with pytest.raises(UserError, match=f'x.pth: asks for {named}, which could run code'):
        convert.read_plain_pth(tmp_path / 'x.pth')
    assert not (tmp_path / 'ran').exists()

@pytest.mark.parametrize('pickled', [
    torch_file.tensor(0, 4, (5,), (1,)), torch_file.tensor(0, 4, (2,), (1,), 3),
    torch_file.tensor(0, 4, (9,), (0,)), torch_file.tensor(0, 4, (2,), (-1,), 1),
    torch_file.tensor(0, 4, (2, 2), (1,)), torch_file.tensor(1, 4, (4,), (1,)),
    torch_file.tensor(0, 4, (2**30, 2**30), (0, 0)), torch_file.call(torch_file.text('x')), b'', b'}(u}b'],
    ids='beyond end repeated back rank missing huge call empty state'.split())
def test_a_damaged_file_of_tensors_is_named(tmp_path, pickled):
    torch_file.write(tmp_path / 'x.pth', pickled, [np.arange(4, dtype=np.float32)])
    try: found = convert.read_plain_pth(tmp_path / 'x.pth')
    except UserError as e: assert re.match('.*x.pth: not readable as a PyTorch file of tensors', str(e))
    else: assert found == {}   # a state that a dictionary ignores
