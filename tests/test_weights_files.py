"Tensors by name, and files that are missing, cut off, or of another model."
import json

import keras
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from xtts_nb.config import UserError
from xtts_nb.files import load_weights, named_weights, read_tensors, save_weights, write_tensors


def model(width=4, seed=0):
    keras.utils.set_random_seed(seed)
    net = keras.Sequential([keras.layers.Dense(width, name='one'), keras.layers.Dense(2, name='two')],
                           name='net')
    net.build((None, 3))
    return net

def values(net): return {k: np.asarray(v) for k, v in named_weights(net).items()}

def test_names_are_places():
    assert list(named_weights(model())) == ['one/kernel', 'one/bias', 'two/kernel', 'two/bias']

def test_names_do_not_depend_on_how_many_models_there_are(xtts, small):
    from xtts_nb.models.dvae import DVAE
    from xtts_nb.models.gpt import GPT
    for kind, made in ((DVAE, DVAE(small)), (GPT, GPT(small, 3))):
        again = kind(small) if kind is DVAE else GPT(small, 3)
        assert list(named_weights(made)) == list(named_weights(again))
        assert len(named_weights(made)) == len(made.variables)

def test_there_and_back_with_metadata(tmp_path):
    save_weights(tmp_path / 'new' / 'a.safetensors', named_weights(model()), step='7', note='ü')
    other = model(seed=1)
    assert not np.array_equal(values(other)['one/kernel'], values(model())['one/kernel'])
    assert load_weights(tmp_path / 'new' / 'a.safetensors', named_weights(other)) == {'step': '7',
                                                                                      'note': 'ü'}
    assert all(np.array_equal(v, values(model())[k]) for k, v in values(other).items())

def test_without_metadata(tmp_path):
    save_weights(tmp_path / 'a.safetensors', {'x': np.zeros(3)})
    assert load_weights(tmp_path / 'a.safetensors', {}) == {}

@pytest.mark.parametrize('array', [np.float32(3), np.zeros((0, 3), np.float32),
                                   np.asfortranarray(np.arange(6.).reshape(2, 3)),
                                   np.arange(12.).reshape(3, 4)[:, ::2], np.arange(3, dtype=np.int64)],
                         ids=['scalar', 'empty', 'F', 'strided', 'int'])
def test_every_kind_of_array(tmp_path, array):
    save_weights(tmp_path / 'a.safetensors', {'x': array})
    with safetensors.safe_open(tmp_path / 'a.safetensors', 'numpy') as f:
        assert np.array_equal(f.get_tensor('x'), array) and f.get_tensor('x').dtype == array.dtype

def test_more_tensors_than_needed_are_fine(tmp_path):
    save_weights(tmp_path / 'a.safetensors', named_weights(model()) | {'more': np.zeros(2)})
    other = model(seed=1)
    load_weights(tmp_path / 'a.safetensors', named_weights(other))
    assert all(np.array_equal(v, values(model())[k]) for k, v in values(other).items())

@pytest.mark.parametrize('kind, message', [
    ('missing', 'not readable as weights'), ('empty', 'not readable as weights'),
    ('text', 'not readable as weights'),
    ('cut in the head', 'not readable as weights'), ('cut in the tensors', 'not readable as weights'),
    ('folder', 'not readable as weights'),
    ('lacking', 'the tensor "two/bias" is missing; the file belongs to another model'),
    ('wider',
     r'"one/kernel" has shape \(3, 5\), expected \(3, 4\); the file belongs to a model of another size')])
def test_a_bad_file_is_named_and_changes_nothing(tmp_path, kind, message):
    path, net = tmp_path / 'a.safetensors', model()
    save_weights(path, named_weights(model(5 if kind == 'wider' else 4, seed=1)))
    data = path.read_bytes()
    if kind == 'missing': path.unlink()
    if kind == 'folder':
        path.unlink()
        path.mkdir()
    if kind == 'empty': path.write_bytes(b'')
    if kind == 'text': path.write_text('these are no weights\n' * 9)
    if kind == 'cut in the head': path.write_bytes(data[:20])
    if kind == 'cut in the tensors': path.write_bytes(data[:-10])
    if kind == 'lacking': save_weights(path, {k: v for k, v in named_weights(net).items() if k != 'two/bias'})
    before = values(net)
    with pytest.raises(UserError, match=message) as e: load_weights(path, named_weights(net))
    assert str(path) in str(e.value) and all(np.array_equal(v, before[k]) for k, v in values(net).items())

def test_one_at_a_time_gives_what_all_at_once_gives(tmp_path):
    given = {'a': np.ones((3, 2), np.float32).T, 'b': np.arange(3, dtype=np.int8),
             'c': np.ones((), np.float16),
             'd': np.ones(5, ml_dtypes.bfloat16), 'e': np.zeros((0, 2))}
    write_tensors(tmp_path / 'x.safetensors', given)
    with safetensors.safe_open(tmp_path / 'x.safetensors', 'numpy') as f:
        whole = {n: f.get_tensor(n) for n in f.keys()}
    for read in (whole, dict(read_tensors(tmp_path / 'x.safetensors'))):
        assert read.keys() == given.keys()
        assert all(np.array_equal(read[n], x) and read[n].dtype == x.dtype for n, x in given.items())

def test_the_bytes_are_those_of_the_safetensors_library(tmp_path):
    given = {'b': np.arange(6, dtype=np.float32).reshape(2, 3), 'a': np.zeros(3, np.float16),
             'é"x/y': np.array(3, np.int64),
             'z': np.ones((2, 0), np.float32), 'c': np.ones(4, np.uint8), 'q': np.ones(2, bool),
             'i': np.ones(1, np.int32),
             'h': np.ones(3, ml_dtypes.bfloat16), 'd': np.ones(1), 'e': np.ones(3, np.int8),
             'f': np.ones(3, np.int16)}
    for metadata in ({}, {'facts': json.dumps({'step': 1, 'note': 'ü\n'})}):
        save_weights(tmp_path / 'ours', given, **metadata)
        safetensors.numpy.save_file(given, tmp_path / 'theirs', metadata or None)
        assert (tmp_path / 'ours').read_bytes() == (tmp_path / 'theirs').read_bytes()
    for n in range(1, 10):   # heads of every length
        save_weights(tmp_path / 'ours', {'x' * n: np.ones(1)})
        safetensors.numpy.save_file({'x' * n: np.ones(1)}, tmp_path / 'theirs')
        assert (tmp_path / 'ours').read_bytes() == (tmp_path / 'theirs').read_bytes()

def test_progress_is_reported_and_a_file_may_be_empty(tmp_path):
    calls = []
    write_tensors(tmp_path / 'x', {'a': np.ones(1), 'b': np.ones(1)}, lambda *done: calls.append(done))
    write_tensors(tmp_path / 'y', {})
    assert calls == [(1, 2), (2, 2)] and list(read_tensors(tmp_path / 'y')) == []

def test_parts_that_are_not_written_come_from_another_file(tmp_path):
    old = {'gpt/a': np.zeros(1), 'gpt/b': np.zeros(2), 'voice/a': np.ones(1), 'gptx': np.ones(2)}
    save_weights(tmp_path / 'old', old)
    save_weights(tmp_path / 'new', {'gpt/a': np.full(3, 7.)}, tmp_path / 'old', step='1')
    read = {name: x.tolist() for name, x in read_tensors(tmp_path / 'new')}
    assert read == {'gpt/a': [7, 7, 7], 'voice/a': [1], 'gptx': [1, 1]}

def test_an_interrupted_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / 'a.safetensors'
    save_weights(path, named_weights(model()))
    original = path.read_bytes()
    def stop(done, total): raise KeyboardInterrupt
    monkeypatch.setattr('xtts_nb.files.write_tensors',
                        lambda path, arrays, **more: write_tensors(path, arrays, stop, **more))
    with pytest.raises(KeyboardInterrupt): save_weights(path, named_weights(model(seed=1)))
    assert path.read_bytes() == original and len(list(tmp_path.iterdir())) == 1
