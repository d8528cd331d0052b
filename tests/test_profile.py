"Where everything lies, and what a step is made of."
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from process import tree, xtts_nb
from xtts_nb.config import UserError
from xtts_nb.gpt import GPT
from xtts_nb.profile import (memory, op_placement, owners, peak_memory, placement, prefixes, profile, profile_page, profile_text,
                             tables, write_page)
from xtts_nb.step import Update, random_batch


def settings(small, **training):
    return small.replace(training={'enable_xla_compilation': False} | training,
                         model={'gpt': {'layers': 1, 'conditioning_layers': 1, 'dropout': 0., 'code_noise': 0.}})


def made(config):
    keras.utils.set_random_seed(0)
    return Update(GPT(config, text_start=1), config.training)


@pytest.fixture(scope='module')
def config(small): return settings(small)


@pytest.fixture(scope='module')
def update(config): return made(config)


@pytest.fixture(scope='module')
def random(config): return random_batch(config, text=12, codes=16)


@pytest.fixture(scope='module')
def found(update, random, config, tmp_path_factory):
    return profile(update, random, config.training, tmp_path_factory.mktemp('profile') / 'trace', rounds=2)


@pytest.mark.cpu
def test_every_variable_has_an_owner_and_a_device(update):
    rows = placement(update)
    assert {r['device'] for r in rows} == {'CPU:0'}
    assert len(rows) == len(update.gpt.variables) + len(update.optimizer.variables)
    weights = sum(r['bytes'] for r in rows if r['owner'] == 'weights')
    assert weights == sum(4 * int(np.prod(v.shape)) for v in update.weights)
    assert sum(r['bytes'] for r in rows if r['owner'] == 'optimizer') >= 2 * weights   # two moments


def test_owners_of_means_and_scale(small):
    update = made(settings(small, ema=.9, precision='float16'))
    assert set(owners(update)) >= {'weights', 'optimizer', 'mean weights', 'loss scale'}
    assert len(owners(update)['mean weights']) == len(update.weights)


@pytest.mark.cpu
def test_operations_have_a_place():
    v = tf.Variable(tf.ones((4, 4)))
    inner = tf.function(lambda x: tf.tanh(x @ v))
    rows = op_placement(lambda x: tf.reduce_sum(inner(x)), tf.ones((2, 4)))
    assert any('MatMul' in r['op'] for r in rows) and {r['device'] for r in rows} == {'CPU:0'}   # it may be fused with others
    assert 'ReadVariableOp' in {r['op'] for r in rows}


def test_prefixes_are_parts_of_the_step(config, random, update):
    steps, number = prefixes(update), tf.constant(0)
    forward, (norm, _) = steps['forward'](random, number), steps['backward'](random, number)
    whole = made(config)(random, number)   # the same first weights: nothing was updated yet
    np.testing.assert_allclose(forward, whole['loss'], rtol=1e-5)
    np.testing.assert_allclose(norm, whole['gradient_norm'], rtol=1e-4)


def test_prefixes_in_parts(small, random):
    whole, parts = (prefixes(made(settings(small, accumulation=n)))['forward'](random, tf.constant(0)) for n in (1, 2))
    np.testing.assert_allclose(whole, parts, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.cpu
def test_split_adds_up(found):
    assert [r['name'] for r in found['split']] == ['forward', 'backward', 'optimizer']
    assert sum(r['share'] for r in found['split']) >= .99 and all(r['ms'] >= 0 for r in found['split'])
    assert sum(r['count'] for r in found['ops']) > 500 and {r['device'] for r in found['ops']} <= {'CPU:0', 'unknown'}


def test_memory_by_owner(update, random):
    rows = placement(update)
    by_owner = {r['owner']: r['bytes'] for r in memory(rows, random, 7)}
    assert by_owner['gradients'] == by_owner['weights'] and by_owner['step, gradients included'] == 7
    assert by_owner['batch'] == sum(x.numpy().nbytes for x in random.values())


@pytest.mark.cpu
def test_memory_that_cannot_be_seen_is_not_made_up():
    done = []
    assert peak_memory(lambda: done.append(1)) is None and done == [1]
    assert memory([], {}, None)[-1] == {'owner': 'step, gradients included', 'bytes': None, 'how': 'not seen on a CPU'}


def test_memory_of_a_gpu_is_its_rise(monkeypatch):
    "As the allocator would tell; there is no GPU here."
    state = {'current': 100, 'peak': 900}
    monkeypatch.setattr(tf.config, 'list_logical_devices', lambda kind: ['GPU:0'])
    monkeypatch.setattr(tf.config.experimental, 'get_memory_info', lambda device: dict(state))
    monkeypatch.setattr(tf.config.experimental, 'reset_memory_stats', lambda device: state.update(peak=state['current']))
    assert peak_memory(lambda: state.update(peak=700)) == 600


@pytest.mark.slow
@pytest.mark.cpu
def test_findings_as_json_text_and_page(found, tmp_path):
    json.dumps(found)
    assert found['mode'] == 'graph' and found['kernels'] and found['phases'] is None and found['unseen']
    text = profile_text(found)
    assert all(word in text for word in ('weights', 'CPU:0', 'forward', 'backward', 'optimizer', 'gradients', '--logdir'))
    assert 'Not seen' in text
    odd = found | {'device': '<script>', 'kernels': [found['kernels'][0] | {'name': '<b>'}]}
    page = write_page(odd, tmp_path / 'deep' / 'page.html').read_text()
    assert '<script>' not in page and '&lt;b&gt;' in page and found['variables'][0]['name'] in page
    with pytest.raises(UserError, match='html'): write_page(found, tmp_path / 'page.txt')


@pytest.mark.slow
def test_page_of_a_step_with_its_data(found):
    phases = dict(spent={'wait': 1., 'copy': 0., 'step': 2., 'callbacks': 0.}, au=None, clips_per_s=5.)
    assert 'With its data' in tables(found | {'phases': phases}) and '1.00 ms' in profile_page(found | {'phases': phases})


def test_command_refuses(tmp_path):
    done = xtts_nb('profile', '--data', tmp_path / 'nothing', '--out', tmp_path / 'out')
    assert done.code == 2 and len(done.said) == 1 and not tree(tmp_path)


@pytest.mark.slow
@pytest.mark.cpu
def test_command(small, prepared, tmp_path):
    (tmp_path / 'small.yaml').write_text(settings(small).to_yaml())
    done = xtts_nb('profile', '--data', prepared.folder, '--config', tmp_path / 'small.yaml', '--out', tmp_path / 'out',
                   '--rounds', 2, '--json')
    assert done.code == 0, done.err
    assert done.json['phases']['spent'].keys() == {'wait', 'copy', 'step', 'callbacks'} and done.json['device'].startswith('CPU')
    assert {'profile.html', 'profile.json', 'trace'} <= tree(tmp_path / 'out').keys()
