"Checkpoints of coqui-tts in and out. Most tests replace PyTorch's reader and writer; the last need it."
import json
import os
import re
import sys
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from xtts_nb.files import named_weights, read_tensors, save_weights
from xtts_nb.models import convert
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.models.hifigan import fold_weight_norm, load_decoder
from xtts_nb.models.xtts import XTTS
from xtts_nb.train.finetune import grow_folder
from xtts_nb.data.text import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
import coqui_toy
import torch_file
from process import main


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
    monkeypatch.setattr(convert, 'read_pth', disk.read)
    monkeypatch.setattr(convert, 'write_pth', disk.write)
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
    files = coqui_folder(disk, tmp_path / 'coqui', spelling, prefix)
    convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    convert.to_coqui(tmp_path / 'ours', tmp_path / 'back')
    assert_same(disk.files['model.pth']['model'], files['model.pth'])
    assert_same(disk.files['dvae.pth'], files['dvae.pth'])
    assert np.array_equal(disk.files['mel_stats.pth'], files['mel_stats.pth'])
    assert (tmp_path / 'back/vocab.json').read_bytes() == (tmp_path / 'coqui/vocab.json').read_bytes()
    assert json.loads((tmp_path / 'back/config.json').read_text())['languages'] == ['en', 'de']


def test_half_precision_survives(disk, tmp_path):
    files = coqui_folder(disk, tmp_path / 'coqui')
    state = disk.files['model.pth']['model']
    for name, kind in (('gpt.text_head.weight', np.float16), ('gpt.mel_head.weight', ml_dtypes.bfloat16)):
        state[name] = state[name].astype(kind)
    given = dict(state)
    convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    convert.to_coqui(tmp_path / 'ours', tmp_path / 'back')
    assert_same(disk.files['model.pth']['model'], given)
    xtts = XTTS.load(tmp_path / 'ours')
    assert np.allclose(xtts.gpt.code_head.kernel, files['model.pth']['gpt.mel_head.weight'].T, rtol=1e-2)


def test_loads_and_has_the_sizes_of_the_tensors(disk, tmp_path):
    coqui_folder(disk, tmp_path / 'coqui')
    report = convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    xtts, expected = XTTS.load(tmp_path / 'ours'), coqui_toy.config(small=True)
    assert xtts.config.model == expected.model
    there = dict(read_tensors(tmp_path / 'ours/model.safetensors'))
    assert report == dict(tensors=len(there), kept_aside=sum(n.startswith('coqui/') for n in there),
                          text_tokens=expected.model.gpt.text_tokens) and report['kept_aside'] > 0
    back = convert.to_coqui(tmp_path / 'ours', tmp_path / 'back')
    assert back == {'tensors': len(there)}


def sizes_of(files: dict) -> dict:
    "What config.json must say of the tensors beside it."
    state, dvae = files['model.pth'], files['dvae.pth']
    rows = lambda name, axis=0: state[name].shape[axis]
    codes = dvae['codebook.embed'].shape[1]
    return {'gpt_layers': len([n for n in state if re.fullmatch(r'gpt\.gpt\.h\.\d+\.ln_1\.weight', n)]),
            'gpt_n_model_channels': rows('gpt.text_embedding.weight', 1),
            'gpt_n_heads': coqui_toy.config().model.gpt.heads,
            'gpt_number_text_tokens': rows('gpt.text_embedding.weight'),
            'gpt_max_text_tokens': rows('gpt.text_pos_embedding.emb.weight') - 2,
            'gpt_max_audio_tokens': rows('gpt.mel_pos_embedding.emb.weight') - 3,
            'gpt_start_text_token': coqui_toy.tokenizer().start, 'gpt_stop_text_token': 0,
            'gpt_num_audio_tokens': rows('gpt.mel_embedding.weight'), 'gpt_start_audio_token': codes,
            'gpt_stop_audio_token': codes + 1, 'gpt_use_masking_gt_prompt_approach': True,
            'gpt_use_perceiver_resampler': True,
            'decoder_input_dim': rows('hifigan_decoder.waveform_decoder.conv_pre.weight', 1),
            'd_vector_dim': rows('hifigan_decoder.speaker_encoder.fc.weight')}


@pytest.mark.parametrize('came_with', [True, False])
def test_the_written_config_has_the_sizes_of_the_tensors(disk, tmp_path, came_with):
    "With the commands, in and out; a model made here has no `coqui.json` to take a number from."
    files = coqui_folder(disk, tmp_path / 'coqui')
    assert main('convert', 'from-coqui', tmp_path / 'coqui', tmp_path / 'ours') == 0
    if not came_with: (tmp_path / 'ours/coqui.json').unlink()
    assert main('convert', 'to-coqui', tmp_path / 'back', '--model', tmp_path / 'ours') == 0
    written = json.loads((tmp_path / 'back/config.json').read_text())
    assert written['model_args'] == sizes_of(files) and written['model'] == 'xtts'
    assert sorted(written['languages']) == ['de', 'en']
    assert written['audio'] == {'sample_rate': 22050, 'output_sample_rate': 24000}


@pytest.mark.parametrize('change, key, number', [
    ({'gpt': {'layers': 5}}, 'gpt_layers', 5), ({'gpt': {'width': 128}}, 'gpt_n_model_channels', 128),
    ({'gpt': {'width': 128}}, 'decoder_input_dim', 128), ({'gpt': {'heads': 2}}, 'gpt_n_heads', 2),
    ({'gpt': {'text_tokens': 70}}, 'gpt_number_text_tokens', 70),
    ({'gpt': {'max_text_tokens': 33}}, 'gpt_max_text_tokens', 33),
    ({'gpt': {'max_audio_codes': 44}}, 'gpt_max_audio_tokens', 44),
    ({'dvae': {'codes': 32}}, 'gpt_num_audio_tokens', 34),
    ({'dvae': {'codes': 32}}, 'gpt_start_audio_token', 32),
    ({'dvae': {'codes': 32}}, 'gpt_stop_audio_token', 33),
    ({'speaker': {'width': 24}}, 'd_vector_dim', 24),
    ({'audio': {'sample_rate': 16000}}, 'sample_rate', 16000),
    ({'decoder': {'sample_rate': 48000}}, 'output_sample_rate', 48000)],
                         ids=lambda x: x if isinstance(x, str) else '')
def test_every_number_of_the_written_config_follows_the_model(tmp_path, change, key, number):
    "What came with the model does not count where the model has become another."
    (tmp_path / 'coqui.json').write_text(json.dumps(coqui_toy.settings()))
    config = coqui_toy.config(small=True).replace(model=change)
    written = convert.coqui_settings(config, coqui_toy.tokenizer(), tmp_path)
    assert (written['model_args'] | written['audio'])[key] == number


def test_a_model_saved_after_training_goes_back_whole(disk, tmp_path):
    files = coqui_folder(disk, tmp_path / 'coqui')
    convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    xtts = XTTS.load(tmp_path / 'ours')
    xtts.gpt.code_head.bias.assign(xtts.gpt.code_head.bias + 1)
    xtts.save(tmp_path / 'tuned')
    convert.to_coqui(tmp_path / 'tuned', tmp_path / 'back')
    tuned = disk.files['model.pth']['model']
    assert np.allclose(tuned.pop('gpt.mel_head.bias'), files['model.pth'].pop('gpt.mel_head.bias') + 1)
    assert_same(tuned, files['model.pth'])
    assert json.loads((tmp_path / 'back/config.json').read_text())['languages'] == ['en', 'de']


@pytest.mark.parametrize('spelling', ['new', 'old'])
def test_weight_norm_is_folded_on_loading(disk, tmp_path, spelling):
    files = coqui_folder(disk, tmp_path / 'coqui', spelling)
    convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    decoder = load_decoder(tmp_path / 'ours/model.safetensors', coqui_toy.config(small=True))
    up = 'hifigan_decoder.waveform_decoder.ups.1.'
    length, direction = (files['model.pth'][up + s] for s in coqui_toy.SPELLINGS[spelling])
    kernel = direction * length / np.sqrt((direction.astype(np.float64)**2).sum((1, 2), keepdims=True))
    assert np.allclose(decoder.ups[1].kernel, kernel.transpose(2, 1, 0), atol=1e-6)


def test_a_decoder_trained_here_has_lengths_again(disk, tmp_path):
    "Its kernels are folded; coqui-tts expects a length and a direction, under its own names and no others."
    files = coqui_folder(disk, tmp_path / 'coqui')
    convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    path = tmp_path / 'ours/model.safetensors'
    decoder = load_decoder(path, coqui_toy.config(small=True))
    rest = {name: x for name, x in read_tensors(path) if not name.startswith('decoder/')}
    save_weights(path, rest | {f'decoder/{name}': v for name, v in named_weights(decoder).items()})
    convert.to_coqui(tmp_path / 'ours', tmp_path / 'back')
    result = disk.files['model.pth']['model']
    assert result.keys() == files['model.pth'].keys()
    length, direction = (result[f'hifigan_decoder.waveform_decoder.ups.1.{s}']
                         for s in coqui_toy.SPELLINGS['new'])
    assert np.allclose(length, np.sqrt((direction**2).sum((1, 2), keepdims=True)), rtol=1e-5)
    assert np.allclose(direction, decoder.ups[1].kernel.numpy().transpose(2, 1, 0), rtol=1e-6)


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

def test_a_missing_file_is_named_before_pytorch_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch', None)
    with zipfile.ZipFile(tmp_path / 'model.pth', 'w') as archive:
        archive.writestr('archive/data.pkl', b'gpt.text_embedding.weight mel_stats')
    with pytest.raises(UserError, match='dvae.pth: the file is missing'): convert.read_coqui(tmp_path)

def test_a_dvae_beside_a_trainers_file_comes_before_the_one_inside(disk, tmp_path):
    files = coqui_folder(disk, tmp_path / 'coqui', prefix='xtts.')
    disk.files['model.pth']['model'] |= {f'dvae.{n}': x + 1 for n, x in files['dvae.pth'].items()}
    convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    assert np.array_equal(XTTS.load(tmp_path / 'ours').dvae.codebook.embed,
                          files['dvae.pth']['codebook.embed'])


def test_the_usual_number_of_heads(tmp_path):
    files = coqui_toy.tensors(coqui_toy.config(small=True))
    shapes = {(file, name): np.shape(x) for file, contents in files.items() if file != 'mel_stats.pth'
              for name, x in contents.items()}
    for args, heads in (({}, 16), ({'gpt_n_heads': 8}, 8)):
        assert convert.infer_config(shapes, args, tmp_path).model.gpt.heads == heads
    few = {key: shape for key, shape in shapes.items() if 'conditioning_encoder.attn' not in key[1]}
    with pytest.raises(UserError, match='conditioning_layers.*got 0'): convert.infer_config(few, {}, tmp_path)


def test_the_last_checkpoint_is_taken(tmp_path):
    "The best of all, then the latest of the best, then the latest; a released file before all of them."
    names = ['checkpoint_900.pth', 'checkpoint_1000.pth', 'best_model_5.pth', 'best_model_10.pth',
             'best_model.pth', 'model.pth']
    for i, name in enumerate(names):
        (tmp_path / name).touch()
        if i: assert convert.checkpoint_file(tmp_path).name == name


def test_no_checkpoint(tmp_path):
    with pytest.raises(UserError, match='model.pth is missing'): convert.checkpoint_file(tmp_path)


ROWS = ('gpt.text_embedding.weight', 'gpt.text_head.weight', 'gpt.text_head.bias')   # one row per text token


def grow_rows(state: dict, rows: int):
    for name in ROWS: state[name] = np.resize(state[name], (rows, *state[name].shape[1:]))


def grow_vocabulary(path: Path, rows: int):
    values = json.loads(path.read_text())
    size = max(values['model']['vocab'].values()) + 1
    values['model']['vocab'] |= {chr(0x4e00 + i): i for i in range(size, rows)}
    path.write_text(json.dumps(values))


# What a folder can have wrong

def lacks(file, name):
    def change(folder, files): files[file].get('model', files[file]).pop(name)
    return change, f'{file}.*"{name}" is missing'


def has(name, shape, message):
    "A tensor of another shape."
    def change(folder, files): files['model.pth']['model'][name] = np.ones(shape, np.float32)
    return change, message


def holds(file, contents, message=None):
    def change(folder, files): files[file] = contents
    return change, message or f'{file}: holds no named tensors'


def says(values, message):
    "The text of config.json, or some of its settings."
    text = values if isinstance(values, str) else json.dumps(coqui_toy.settings() | values)
    return lambda folder, files: (folder / 'config.json').write_text(text), message


def args(message, **values): return says({'model_args': coqui_toy.settings()['model_args'] | values}, message)


def rows(more):
    "Text tokens that the vocabulary lacks, or has too many."
    size = coqui_toy.tokenizer().size
    return (lambda folder, files: grow_rows(files['model.pth']['model'], size + more),
            f'vocab.json: has {size} tokens, but gpt.text_embedding has {size + more} rows')


def cut(share):
    def change(folder, files):
        data = (folder / 'vocab.json').read_bytes()
        (folder / 'vocab.json').write_bytes(data[:int(share * len(data))])
    return change, 'vocab.json: not a tokenizer'


def without(name): return lambda folder, files: (folder / name).unlink(), f'{name}: the file is missing'


DECODER = 'hifigan_decoder.waveform_decoder.'
PAIR = f'{DECODER}ups.0.parametrizations.weight.original'

@pytest.mark.parametrize('change, message', [
    without('config.json'), without('vocab.json'), lacks('dvae.pth', 'decoder.0.bias'),
    *(lacks('model.pth', name) for name in (
        'gpt.gpt.h.1.mlp.c_fc.weight', 'gpt.text_embedding.weight', f'{DECODER}conv_pre.weight', f'{PAIR}0',
        'hifigan_decoder.speaker_encoder.layer3.1.bn1.running_var')),
    has('gpt.mel_head.weight', (66, 60), r'gpt.mel_head.weight" has shape \(66, 60\), expected \(66, 64\)'),
    has(f'{PAIR}1', (32, 16, 15), 'ups.0.*has shape'), has(f'{PAIR}0', (31, 1, 1), 'ups.0.*has shape'),
    *map(rows, (-3, 1, 540)), *map(cut, (0, 0.5, 0.99)),
    args('gpt_layers is 30, the tensors have 2', gpt_layers=30),
    args('model_args.output_sample_rate is 48000, XTTS-v2 has 24000', output_sample_rate=48000),
    says({'audio': {'output_sample_rate': 44100}}, 'audio.output_sample_rate is 44100'),
    *(args('heads', gpt_n_heads=heads) for heads in (7, 'many', -1, 0.5)),
    *(says(text, 'config.json: (not JSON|holds no settings)') for text in (
        '', '[]', '{"model_args": 3}', '{"model_args": []}', '"xtts"', '{"model_args": {"gpt_la')),
    *(says(speech, r'config.json: speech\..*got ') for speech in (
        {'temperature': 'hot'}, {'temperature': -1}, {'top_p': 2}, {'gpt_cond_chunk_len': 0})),
    *(holds('model.pth', contents) for contents in ([1, 2], {'model': 5}, {'step': 5}, np.ones(3))),
    holds('dvae.pth', {}), holds('dvae.pth', None), holds('mel_stats.pth', {'a': 1}),
    holds('mel_stats.pth', 'x'), holds('mel_stats.pth', np.ones(79, np.float32),
                                       r'mel_stats.pth: .*has shape \(79,\), expected \(80,\)')])
def test_what_is_wrong_with_a_folder_is_named(disk, tmp_path, change, message):
    coqui_folder(disk, tmp_path / 'coqui')
    change(tmp_path / 'coqui', disk.files)
    with pytest.raises(UserError, match=message): convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    assert not (tmp_path / 'ours').exists()


@pytest.mark.parametrize('rows', [*(pytest.param(n, marks=pytest.mark.slow) for n in (6153, 6681)), 6700])
def test_the_sizes_of_vocabulary_there_are(disk, tmp_path, rows):
    "Both released ones and a grown one; what config.json says of it does not matter to coqui-tts either."
    files = coqui_folder(disk, tmp_path / 'coqui')
    for contents in (disk.files['model.pth']['model'], files['model.pth']): grow_rows(contents, rows)
    grow_vocabulary(tmp_path / 'coqui/vocab.json', rows)
    assert convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')['text_tokens'] == rows
    assert XTTS.load(tmp_path / 'ours').config.model.gpt.text_tokens == rows
    convert.to_coqui(tmp_path / 'ours', tmp_path / 'back')
    assert_same(disk.files['model.pth']['model'], files['model.pth'])
    assert (tmp_path / 'back/vocab.json').read_bytes() == (tmp_path / 'coqui/vocab.json').read_bytes()
    args = json.loads((tmp_path / 'back/config.json').read_text())['model_args']
    assert args['gpt_number_text_tokens'] == rows


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


def test_spare_rows_are_refused_on_the_way_out(disk, tmp_path):
    coqui_folder(disk, tmp_path / 'coqui')
    convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    config = XTTSConfig.load(tmp_path / 'ours/config.yaml')
    size = config.model.gpt.text_tokens
    spare = config.replace(model={'gpt': {'text_tokens': size + 2}})
    (tmp_path / 'ours/config.yaml').write_text(spare.to_yaml())
    with pytest.raises(UserError, match=f'tokenizer.json: has {size} tokens, but .* {size + 2} rows'):
        convert.to_coqui(tmp_path / 'ours', tmp_path / 'back')
    assert not (tmp_path / 'back').exists()


def everything(folder: Path) -> dict:
    return {p: p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file()}


def test_names_that_look_like_paths_stay_names(disk, tmp_path):
    "Whatever a tensor is called, nothing is written but the new folder, in and out."
    coqui_folder(disk, tmp_path / 'coqui')
    evil = {'../../evil': np.ones(2, np.float32), '/evil': np.ones(3, np.float32),
            'a/../../evil.pth': np.ones(1, np.float32)}
    disk.files['model.pth']['model'] |= evil
    before = everything(tmp_path)
    convert.from_coqui(tmp_path / 'coqui', tmp_path / 'new/ours')
    convert.to_coqui(tmp_path / 'new/ours', tmp_path / 'new/back')
    after = everything(tmp_path)
    assert {p for p in after if p not in before} == {p for p in after if p.is_relative_to(tmp_path / 'new')}
    assert {p.name for p in (tmp_path / 'new').iterdir()} == {'ours', 'back'}
    assert all(after[p] == data for p, data in before.items())
    assert_same({n: disk.files['model.pth']['model'][n] for n in evil}, evil)


@pytest.mark.parametrize('name', ['evil', 'coqui/../../x', 'coqui/evil.pth/x', 'coqui/model.pth',
                                  'gpt/block_99/qkv/kernel'])
def test_a_tensor_that_no_one_knows_is_named(disk, tmp_path, name):
    coqui_folder(disk, tmp_path / 'coqui')
    convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    path = tmp_path / 'ours/model.safetensors'
    convert.write_tensors(path, dict(convert.read_tensors(path)) | {name: np.ones(1)})
    with pytest.raises(UserError, match=f'model.safetensors: "{re.escape(name)}" is no tensor of XTTS'):
        convert.to_coqui(tmp_path / 'ours', tmp_path / 'back')
    assert not (tmp_path / 'back').exists()


def test_nothing_half_written_stays(disk, tmp_path, monkeypatch):
    coqui_folder(disk, tmp_path / 'coqui')
    before = everything(tmp_path)
    def full(path, tensors, progress=None):
        path.write_bytes(b'half')
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(convert, 'write_tensors', full)
    with pytest.raises(UserError, match='disk is full'):
        convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    assert everything(tmp_path) == before and not list(tmp_path.glob('*.part'))


def test_nothing_is_overwritten(disk, tmp_path):
    coqui_folder(disk, tmp_path / 'coqui')
    (tmp_path / 'ours').mkdir()
    (tmp_path / 'ours/note').write_text('mine')
    with pytest.raises(UserError, match='already holds something'):
        convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    assert (tmp_path / 'ours/note').read_text() == 'mine'


def test_a_model_without_decoder_is_refused(disk, tmp_path):
    coqui_folder(disk, tmp_path / 'coqui')
    convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    path = tmp_path / 'ours/model.safetensors'
    convert.write_tensors(path, {n: x for n, x in convert.read_tensors(path) if not n.startswith('decoder/')})
    with pytest.raises(UserError, match='waveform_decoder'):
        convert.to_coqui(tmp_path / 'ours', tmp_path / 'back')
    assert not (tmp_path / 'back').exists()


def test_every_name_of_the_released_model_is_mapped_once():
    here = [name for name, _ in convert.name_map(XTTSConfig.xtts_v2().model).values()]
    assert len(set(here)) == len(here)
    small = coqui_toy.config(small=True)
    assert set(convert.expected_shapes(small, 3)) <= {name
                                                      for name, _ in convert.name_map(small.model).values()}


def test_fold_weight_norm_has_the_given_lengths():
    length = np.array([1., 2., 3.]).reshape(1, 1, 3)
    kernel = fold_weight_norm(length, np.random.randn(5, 4, 3))
    assert np.allclose(np.sqrt((kernel**2).sum((0, 1))), [1, 2, 3])


# Without PyTorch: the calls that it gets

class Tensor:
    "Stands for a tensor: an array and the name of its kind."
    layout = 'torch.strided'
    def __init__(self, x, kind=None): self.x, self.dtype = x, f'torch.{kind or x.dtype}'
    def detach(self): return self
    def view(self, kind): return Tensor(self.x.view(kind)) if kind == np.int16 else Tensor(self.x, kind)
    def numpy(self): return self.x


@pytest.fixture
def pytorch(monkeypatch):
    "The arguments of `load`, which returns or raises `contents`."
    from contextlib import nullcontext
    from types import SimpleNamespace
    calls = SimpleNamespace(contents=None, how=None)
    def load(path, **how):
        calls.how = how
        if isinstance(calls.contents, Exception): raise calls.contents
        return calls.contents
    def safe_globals(known):
        calls.known = known
        return nullcontext()
    fake = SimpleNamespace(Tensor=Tensor, int16=np.int16, bfloat16='bfloat16', load=load, from_numpy=Tensor,
                           serialization=SimpleNamespace(safe_globals=safe_globals))
    monkeypatch.setitem(sys.modules, 'torch', fake)
    return calls


@pytest.mark.parametrize('archive', [True, False])
def test_tensors_become_arrays_and_nothing_is_unpickled(pytorch, tmp_path, archive):
    path, half = tmp_path / 'm.pth', np.ones(3, ml_dtypes.bfloat16)
    if archive:
        import zipfile
        with zipfile.ZipFile(path, 'w') as z: z.writestr('a', 'b')
    else: path.write_bytes(b'old')
    pytorch.contents = {'model': {'a': Tensor(np.arange(3.)), 'b': Tensor(half.view(np.int16), 'bfloat16')},
                    3: 'text'}
    result = convert.read_pth(path)
    assert_same(result['model'], {'a': np.arange(3.), 'b': half})
    assert result[3] == 'text' and pytorch.how == dict(map_location='cpu',
                                                      weights_only=True) | ({'mmap': True} if archive else {})
    known = [(kind.__name__, name) for kind, name in pytorch.known]
    assert ('XttsConfig', 'TTS.tts.configs.xtts_config.XttsConfig') in known
    back = convert._tensor(result['model'])
    assert [(t.dtype, t.x.tobytes()) for t in back.values()] == [
        ('torch.float64', np.arange(3.).tobytes()), ('torch.bfloat16', half.tobytes())]
    assert convert._tensor(np.float32(5).reshape(())).x.shape == ()


@pytest.mark.parametrize('contents, message', [
    (ValueError('GLOBAL os.system is not allowed. More'),
     r'asks for os.system, which could run code, so it was not read'),
    (OSError('torn off. More\nand more'), r'not readable as a PyTorch file \(torn off\); copy it again'),
    (OSError('first\nsecond'), r'\(first\)'),
    ({'odd': Tensor(np.ones(2), 'complex64')}, '"odd" is a tensor of complex64, strided')])
def test_what_cannot_be_read_is_reported_in_a_sentence(pytorch, tmp_path, contents, message):
    (tmp_path / 'm.pth').touch()
    pytorch.contents = contents
    with pytest.raises(UserError, match=f'm.pth: .*{message}'): convert.read_pth(tmp_path / 'm.pth')
    with pytest.raises(UserError, match='n.pth: the file is missing'): convert.read_pth(tmp_path / 'n.pth')


def test_a_tensor_that_is_not_strided_has_no_place(pytorch, tmp_path):
    (tmp_path / 'm.pth').touch()
    pytorch.contents = {'odd': Tensor(np.ones(2))}
    pytorch.contents['odd'].layout = 'torch.sparse_coo'
    with pytest.raises(UserError, match='"odd" is a tensor of float64, sparse_coo'):
        convert.read_pth(tmp_path / 'm.pth')


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
        convert.read_pth(tmp_path / 'model.pth')
    assert not (tmp_path / 'ran').exists()


class Call:
    def __init__(self, function, *args): self.call = function, args
    def __reduce__(self): return self.call


@pytest.mark.parametrize('call, name', [
    (Call(eval, '1'), r'(builtins\.)?eval'), (Call(getattr, 1, 'real'), r'(builtins\.)?getattr'),
    (Call(Path, 'x'), r'pathlib\.\w+'), (Call(np.random.RandomState), 'numpy.random.*RandomState'),
    (Call(convert.read_json, 'x'), 'xtts_nb.files.read_json')],
    ids=['eval', 'getattr', 'path', 'numpy', 'ours'])
@pytest.mark.torch
def test_any_other_name_is_refused(torch, tmp_path, call, name):
    torch.save({'model': {'w': torch.ones(2)}, 'extra': call}, tmp_path / 'model.pth')
    with pytest.raises(UserError, match=f'model.pth: asks for {name}, which could run code'):
        convert.read_pth(tmp_path / 'model.pth')


@pytest.mark.torch
def test_a_name_beside_the_known_settings_is_refused(torch, tmp_path, monkeypatch):
    import types
    name = 'TTS.tts.configs.xtts_config'
    for part in ('TTS', 'TTS.tts', 'TTS.tts.configs', name):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    kind = sys.modules[name].Other = type('Other', (), {'__module__': name})
    torch.save({'config': kind()}, tmp_path / 'model.pth')
    with pytest.raises(UserError, match=f'asks for {name}.Other'): convert.read_pth(tmp_path / 'model.pth')


@pytest.mark.parametrize('make, kind', [
    (lambda t: t.ones(2, dtype=t.complex64), 'complex64'), (lambda t: t.eye(3).to_sparse(), 'sparse'),
    (lambda t: t.ones(2).to(t.float8_e4m3fn), 'float8')], ids=['complex', 'sparse', 'float8'])
@pytest.mark.torch
def test_a_kind_of_tensor_that_has_no_place(torch, tmp_path, make, kind):
    torch.save({'model': {'odd': make(torch)}}, tmp_path / 'model.pth')
    with pytest.raises(UserError, match=f'model.pth: not readable .*"odd" is a tensor of .*{kind}'):
        convert.read_pth(tmp_path / 'model.pth')


@pytest.mark.parametrize('archive', [True, False])
@pytest.mark.torch
def test_settings_objects_are_read_as_nothing(torch, tmp_path, monkeypatch, archive):
    import types
    name = 'TTS.tts.configs.xtts_config'
    for part in ('TTS', 'TTS.tts', 'TTS.tts.configs', name):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    kind = type('XttsConfig', (), {'__module__': name})
    sys.modules[name].XttsConfig = kind
    given = kind()
    given.lr = 1
    torch.save({'model': {'w': torch.ones(2)}, 'config': given}, tmp_path / 'model.pth',
               _use_new_zipfile_serialization=archive)
    contents = convert.read_pth(tmp_path / 'model.pth')
    assert np.array_equal(contents['model']['w'], [1, 1]) and not vars(contents['config'])


@pytest.mark.parametrize('archive', [True, False])
@pytest.mark.parametrize('size', [0, 5, 100, 2000])
@pytest.mark.torch
def test_a_cut_checkpoint_is_named(torch, tmp_path, archive, size):
    torch.save({'w': torch.ones(1000)}, tmp_path / 'model.pth', _use_new_zipfile_serialization=archive)
    (tmp_path / 'model.pth').write_bytes((tmp_path / 'model.pth').read_bytes()[:size])
    with pytest.raises(UserError, match='model.pth: not readable'): convert.read_pth(tmp_path / 'model.pth')


@pytest.mark.torch
def test_files_of_pytorch_come_back(torch, tmp_path):
    given = {'model': {'a': np.random.randn(3, 4).astype(np.float32).T, 'b': np.ones(3, ml_dtypes.bfloat16),
                       'c': np.array(5)}}
    convert.write_pth(tmp_path / 'x.pth', given)
    assert_same(convert.read_pth(tmp_path / 'x.pth')['model'], given['model'])


def test_without_pytorch_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch', None)
    (tmp_path / 'model.pth').touch()
    with pytest.raises(UserError, match=r'xtts_nb\[convert\]'): convert.read_pth(tmp_path / 'model.pth')


def test_each_mel_has_its_own_constants(disk, tmp_path):
    "model.pth's are for the reference in speaking, mel_stats.pth's for the codes and for training."
    files = coqui_folder(disk, tmp_path / 'coqui')
    other = files['mel_stats.pth'] * 2 + 1
    disk.files['model.pth']['model']['mel_stats'] = other
    convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    xtts = XTTS.load(tmp_path / 'ours')
    assert np.array_equal(xtts.gpt.mel_stats, other)
    assert np.array_equal(xtts.dvae.mel_stats, files['mel_stats.pth'])
    convert.to_coqui(tmp_path / 'ours', tmp_path / 'back')
    assert np.array_equal(disk.files['model.pth']['model']['mel_stats'], other)
    assert np.array_equal(disk.files['mel_stats.pth'], files['mel_stats.pth'])


@pytest.mark.parametrize('speech, expected', [
    ({}, (2.0, 12, 4)), ({'repetition_penalty': 5.0, 'gpt_cond_len': 30}, (5.0, 30, 4)),
    ({'gpt_cond_chunk_len': 6}, (2.0, 12, 6))])
def test_it_speaks_as_its_config_says(disk, tmp_path, speech, expected):
    "A silent config.json means the defaults of coqui-tts' class."
    coqui_folder(disk, tmp_path / 'coqui')
    plain = {k: v
             for k, v in coqui_toy.settings().items() if k in ('model', 'languages', 'audio', 'model_args')}
    (tmp_path / 'coqui/config.json').write_text(json.dumps(plain | speech))
    convert.from_coqui(tmp_path / 'coqui', tmp_path / 'ours')
    speech = XTTSConfig.load(tmp_path / 'ours/config.yaml').speech
    assert (speech.repetition_penalty, speech.reference_seconds, speech.reference_chunk_seconds) == expected
    rest = speech.temperature, speech.top_k, speech.top_p, speech.max_reference_seconds
    assert rest == (0.85, 50, 0.85, 10)


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

def test_what_is_no_file_of_tensors(tmp_path, monkeypatch):
    path = tmp_path / 'x.pth'
    with pytest.raises(UserError, match='x.pth: the file is missing'): convert.read_plain_pth(path)
    path.write_bytes(b'\x80\x02}.')   # not in an archive
    with pytest.raises(UserError, match='not readable as a PyTorch file'): convert.read_plain_pth(path)
    torch_file.write_dict(path, {'a': np.ones(300, np.float32)})
    monkeypatch.setattr(convert, 'PLAIN_BYTES', 1000)
    with pytest.raises(UserError, match='holds more than 1,000 bytes'): convert.read_plain_pth(path)

@pytest.mark.torch
def test_tensors_of_pytorch_itself_are_read_without_it(torch, tmp_path):
    voices = {'A b': {'gpt_cond_latent': torch.randn(1, 4, 8), 'speaker_embedding': torch.randn(1, 5, 1)},
              'C': {'gpt_cond_latent': torch.randn(1, 8, 4).transpose(1, 2)}}
    torch.save(voices, tmp_path / 'x.pth')
    found = convert.read_plain_pth(tmp_path / 'x.pth')
    assert {k: [*v] for k, v in found.items()} == {k: [*v] for k, v in voices.items()}
    for name, parts in voices.items():
        for part, x in parts.items(): assert np.array_equal(found[name][part], x.numpy())

POINTER = 'version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1867929118\n'
PAGE = '\n<!DOCTYPE html><html><title>Sign in</title></html>'

@pytest.mark.parametrize('name, text, word', [
    ('model.pth', POINTER, 'git lfs pull'), ('vocab.json', POINTER, 'git lfs pull'),
    ('model.pth', PAGE, 'web page'), ('config.json', PAGE, 'web page')])
def test_a_file_that_did_not_arrive_is_named(tmp_path, xtts, name, text, word):
    "Before PyTorch is asked for, and nothing half-made is left."
    folder = tmp_path / 'theirs'
    folder.mkdir()
    (folder / 'config.json').write_text('{}')
    (folder / 'model.pth').write_bytes(b'')
    xtts.tokenizer.save(folder / 'vocab.json')
    (folder / name).write_text(text)
    with pytest.raises(UserError, match=f'{name}: .*{word}'): convert.from_coqui(folder, tmp_path / 'out')
    assert [path.name for path in tmp_path.iterdir()] == ['theirs']

def test_a_model_is_a_folder_and_its_weights_have_arrived(tmp_path, xtts):
    xtts.save(tmp_path)
    for place, word in (('config.yaml', 'give its folder'), ('none', 'no such folder')):
        with pytest.raises(UserError, match=f'{place}: .*{word}'): XTTS.load(tmp_path / place)
    (tmp_path / 'model.safetensors').write_text(POINTER)
    with pytest.raises(UserError, match='model.safetensors: .*git lfs pull'): XTTS.load(tmp_path)
