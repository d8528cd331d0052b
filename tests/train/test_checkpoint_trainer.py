"A state on disk: whole, found again by name, and nothing else taken for it."
import numpy as np
import pytest
import tensorflow as tf

from process import tree
from xtts_nb.files import write_tensors
from xtts_nb.train import trainer as checkpoint
from xtts_nb.train.trainer import checkpoints, load_checkpoint, save_checkpoint
from xtts_nb.config import UserError


def state(*values, **more) -> dict:
    "A few variables of different kinds."
    return {'a/kernel': tf.Variable(np.float32(values or [1., 2.])),
            'count': tf.Variable(3, dtype=tf.int64)} | more

def empty() -> dict: return {k: tf.Variable(tf.zeros_like(v)) for k, v in state().items()}

def names(folder) -> list[str]: return [p.name for p in checkpoints(folder)]


def test_there_and_back(tmp_path):
    facts = {'losses': [0.1, 1 / 3, float(np.float32(0.1))], 'text': 'Größe', 'none': None}
    path = save_checkpoint(tmp_path / 'new' / 'folder', 7, state(1 / 3, -0.), **facts)
    found = empty()
    assert path.name == 'step-000000007.safetensors' and load_checkpoint(path, found) == facts | {'step': 7}
    assert np.array_equal(found['a/kernel'].numpy().view(np.int32), np.float32([1 / 3, -0.]).view(np.int32))
    assert found['count'].numpy() == 3 and found['count'].dtype == tf.int64

@pytest.mark.parametrize('keep', [1, 2, 3])
def test_the_newest_few_stay(tmp_path, keep):
    for step in (5, 10, 9_999, 10_000, 123_456_789): save_checkpoint(tmp_path, step, state(step), keep=keep)
    assert names(tmp_path) == [f'step-{s:09d}.safetensors'
                               for s in (5, 10, 9_999, 10_000, 123_456_789)][-keep:]

def test_the_same_step_again_replaces_it(tmp_path):
    for value in (1., 2.): path = save_checkpoint(tmp_path, 3, state(value, value))
    found = empty()
    load_checkpoint(path, found)
    assert names(tmp_path) == ['step-000000003.safetensors']
    assert found['a/kernel'].numpy().tolist() == [2., 2.]

def test_only_whole_checkpoints_count(tmp_path):
    for name in ('step-000000009.safetensors.123.part', 'step-9.safetensors', 'model.safetensors',
                 'step-000000009.txt'):
        (tmp_path / name).write_text('something else')
    assert checkpoints(tmp_path) == [] == checkpoints(tmp_path / 'nowhere')
    save_checkpoint(tmp_path, 1, state(), keep=1)
    assert names(tmp_path) == ['step-000000001.safetensors'] and len(tree(tmp_path)) == 5

def test_the_older_ones_stay_where_the_new_one_fails(tmp_path, monkeypatch):
    for step in (1, 2): save_checkpoint(tmp_path, step, state())
    before = tree(tmp_path)
    def full(done, total): raise OSError(28, 'No space left on device')
    monkeypatch.setattr('xtts_nb.files.write_tensors',
                        lambda path, arrays, **more: write_tensors(path, arrays, full, **more))
    with pytest.raises(UserError, match='the disk is full'): save_checkpoint(tmp_path, 3, state())
    assert tree(tmp_path) == before

@pytest.mark.parametrize('wanted, message', [
    ({'more': tf.Variable([1.])}, '"more" is missing'),
    ({'count': tf.Variable([1, 2])}, r'"count" has shape \(\), expected \(2,\)'),
], ids=['missing', 'shape'])
def test_another_models_state_is_refused_whole(tmp_path, wanted, message):
    path = save_checkpoint(tmp_path, 1, state())
    found = empty() | wanted
    with pytest.raises(UserError, match=message) as e: load_checkpoint(path, found)
    # nothing was filled in
    assert path.name in str(e.value) and found['a/kernel'].numpy().tolist() == [0., 0.]

@pytest.mark.parametrize('cut', [0, 5, 60, -1])
def test_a_damaged_file_is_named(tmp_path, cut):
    path = save_checkpoint(tmp_path, 1, state())
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UserError, match=path.name): load_checkpoint(path, empty())

def test_a_file_that_is_gone_is_named(tmp_path):
    with pytest.raises(UserError, match='step-000000004'):
        load_checkpoint(tmp_path / 'step-000000004.safetensors', empty())

def test_weights_without_a_step_are_no_checkpoint(tmp_path):
    path = tmp_path / 'step-000000004.safetensors'
    checkpoint.save_weights(path, state())
    with pytest.raises(UserError, match=path.name): load_checkpoint(path, empty())
