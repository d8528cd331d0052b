"The placement, time and memory of a training step."
import json
import re
from contextlib import nullcontext
from html import unescape
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from process import tree, xtts_nb
from xtts_nb.train import profile as page
from xtts_nb.config import UserError
from xtts_nb.models.gpt import GPT
from xtts_nb.models.xtts import token_losses
from xtts_nb.train.profile import (
    memory, op_placement, owners, peak_memory, prefixes, profile, profile_page, profile_text, split,
    tables, variable_placement, write_page)
from xtts_nb.train.step import Update, random_batch


def made(config, **training):
    keras.utils.set_random_seed(0)
    config = config.replace(training=training)
    return Update(GPT(config, text_start=1), config.training)


@pytest.fixture(scope='module')
def update(plain): return made(plain)


@pytest.fixture(scope='module')
def random(plain): return random_batch(plain, text=12, codes=16)


@pytest.fixture(scope='module')
def result(update, random, plain, tmp_path_factory):
    return profile(update, random, plain.training, tmp_path_factory.mktemp('profile') / 'trace', rounds=2)


@pytest.mark.cpu
def test_every_variable_has_an_owner_and_a_device(update):
    rows = variable_placement(update)
    assert {r['device'] for r in rows} == {'CPU:0'}
    assert len(rows) == len(update.gpt.variables) + len(update.optimizer.variables)
    weights = sum(r['bytes'] for r in rows if r['owner'] == 'weights')
    assert weights == sum(4 * int(np.prod(v.shape)) for v in update.weights)
    assert sum(r['bytes'] for r in rows if r['owner'] == 'optimizer') >= 2 * weights   # two moments


def test_owners_of_means_and_scale(plain, update):
    half = made(plain, ema=.9, precision='float16')
    kinds = lambda of: [owner for owner in owners(of) if owner != 'frozen']   # some may be frozen
    assert kinds(half) == ['weights', 'optimizer', 'mean weights', 'loss scale']
    assert kinds(update) == ['weights', 'optimizer']
    assert len(owners(half)['mean weights']) == len(half.weights)
    assert len(owners(half)['optimizer']) == len(owners(update)['optimizer'])
    names = [r['name'] for r in variable_placement(half) if r['owner'] == 'loss scale']
    assert names == ['loss_scale', 'good_updates']
    some = Update(update.gpt, update.training, update.gpt.trainable_variables[:2])
    frozen = {id(v) for v in owners(some)['frozen']}
    assert frozen == {id(v) for v in some.gpt.variables} - {id(v) for v in some.weights}
    assert len(owners(some)['weights']) == 2


@pytest.mark.cpu
def test_operations_have_a_place():
    v = tf.Variable(tf.ones((4, 4)))
    inner = tf.function(lambda x: tf.tanh(x @ v))
    rows = op_placement(lambda x: tf.reduce_sum(inner(x)), tf.ones((2, 4)))
    assert any('MatMul' in r['op'] for r in rows)   # it may be fused with others
    assert {r['device'] for r in rows} == {'CPU:0'}
    assert 'ReadVariableOp' in {r['op'] for r in rows}


def test_prefixes_are_parts_of_the_step(plain, random, update):
    steps, number = prefixes(update), tf.constant(0)
    forward, (norm, _) = steps['forward'](random, number), steps['backward'](random, number)
    whole = made(plain)(random, number)   # the same first weights: nothing was updated yet
    np.testing.assert_allclose(forward, whole['loss'], rtol=1e-5)
    np.testing.assert_allclose(norm, whole['gradient_norm'], rtol=1e-4)


def test_prefixes_in_parts(plain, random, monkeypatch):
    rows = []
    def losses(gpt, batch, seed):
        rows.append(len(batch['text']))
        return token_losses(gpt, batch, seed)
    monkeypatch.setattr(page, 'token_losses', losses)
    whole, parts = (prefixes(made(plain, accumulation=n))['forward'](random, tf.constant(0))
                    for n in (1, 2))
    np.testing.assert_allclose(whole, parts, rtol=1e-5)
    assert rows == [4, 2, 2]


def test_a_part_of_the_step_takes_what_it_adds(monkeypatch):
    "0.1 s to the losses, 0.3003 to the gradients, only 0.2 for all: nothing is left for the optimizer."
    def compare(arms, unit, rounds):
        assert (unit, rounds) == ('step_ms', 3) and [arm() for arm in arms.values()] == [1, 1, 1]
        took = zip(arms, (0.1, 0.3003, 0.2), (0.01234, 0.5, 0.))
        return SimpleNamespace(arms=[SimpleNamespace(name=n, per_item=s, spread=spread)
                                     for n, s, spread in took])
    monkeypatch.setattr(page, 'compare', compare)
    rows = split(dict.fromkeys(('forward', 'backward', 'optimizer'), lambda batch, number: None), {}, 3)
    keys = 'name', 'ms', 'share', 'spread'
    assert rows == [dict(zip(keys, row))
                    for row in (('forward', 100., 0.5, 0.012), ('backward', 200.3, 1.002, 0.5),
                                ('optimizer', 0., 0., 0.))]
    arm = SimpleNamespace(name='x', per_item=0.0123456789, spread=0.)
    monkeypatch.setattr(page, 'compare', lambda *_: SimpleNamespace(arms=[arm]))
    assert split({}, {})[0]['ms'] == 12.346


@pytest.mark.slow
@pytest.mark.cpu
def test_a_real_profile(result):
    assert result['mode'] == 'graph' and result['kernels'] and result['phases'] is None and result['unseen']
    assert json.dumps(result) and profile_text(result) and profile_page(result)
    assert [r['name'] for r in result['split']] == ['forward', 'backward', 'optimizer']
    assert sum(r['share'] for r in result['split']) >= .99 and all(r['ms'] >= 0 for r in result['split'])
    assert sum(r['count'] for r in result['ops']) > 500
    assert {r['device'] for r in result['ops']} <= {'CPU:0', 'unknown'}


def test_memory_by_owner(update, random):
    rows = variable_placement(update)
    by_owner = {r['owner']: r['bytes'] for r in memory(rows, random, 7)}
    assert by_owner['gradients'] == by_owner['weights'] and by_owner['step, gradients included'] == 7
    assert by_owner['batch'] == sum(x.numpy().nbytes for x in random.values())


@pytest.mark.cpu
def test_memory_that_cannot_be_seen_is_not_made_up():
    done = []
    assert peak_memory(lambda: done.append(1)) is None and done == [1]
    assert memory([], {}, None)[-1] == {'owner': 'step, gradients included', 'bytes': None,
                                        'how': 'not seen on a CPU'}


def test_memory_of_a_gpu_is_its_rise(monkeypatch):
    "As the allocator would tell; there is no GPU here."
    state = {'current': 100, 'peak': 900}
    monkeypatch.setattr(tf.config, 'list_logical_devices', lambda kind: ['GPU:0'])
    monkeypatch.setattr(tf.config.experimental, 'get_memory_info', lambda device: dict(state))
    monkeypatch.setattr(tf.config.experimental, 'reset_memory_stats',
                        lambda device: state.update(peak=state['current']))
    assert peak_memory(lambda: state.update(peak=700)) == 600


@pytest.mark.parametrize('step, mode',
                         [(SimpleNamespace(xla=True, graph=1), 'XLA'),
                          (SimpleNamespace(xla=False, graph=1), 'graph'),
                                        (None, 'eager')])
@pytest.mark.parametrize('cards, batches', [([], None), (['GPU:0'], [1, 2])])
def test_what_is_profiled(update, random, plain, monkeypatch, step, mode, cards, batches):
    stages = []
    compiled = lambda *_: None
    if step:
        compiled = type('Step', (), {'__call__': lambda self, *_: None})()
        vars(compiled).update(vars(step))
    for name, fake in {'compile_step': lambda part, training: compiled, 'trace': lambda folder: nullcontext(),
                       'top_kernels': lambda f: [f], 'device_name': str, 'op_placement': lambda *_: [],
                       'split': lambda steps, batch, rounds: [*steps, rounds],
                       'peak_memory': lambda work: work(),
                       'time_phases': lambda some, *_, steps: SimpleNamespace(to_dict=lambda: some)}.items():
        monkeypatch.setattr(page, name, fake)
    monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind: cards)
    result = profile(update, random, plain.training, 'folder', 2, batches, stages.append)
    assert stages == ['place', 'split', 'memory', 'trace', 'phases']
    assert result['split'] == ['forward', 'backward', 'optimizer', 2]
    assert (result['mode'], result['kernels'], result['trace']) == (mode, ['folder'], 'folder')
    assert result['phases'] is batches
    assert len(result['unseen']) == (not cards)


PHASES = dict(spent={'wait': 1., 'step': 2.5}, au=0.5, clips_per_s=1234.5)
KERNELS = [{'device': 'GPU:0', 'name': 'k' * 70, 'ms': 0.5, 'share': 0.25, 'calls': 3}]
FOUND = {'device': 'A <card>', 'mode': 'graph', 'trace': 'folder', 'phases': None, 'unseen': ['this & that'],
         'kernels': KERNELS,
         'variables': [{'owner': o, 'name': f'v{i}', 'device': d, 'bytes': b} for i, (o, d, b) in enumerate(
             [('weights', 'GPU:0', 1000), ('weights', 'GPU:0', 24), ('weights', 'CPU:0', 3),
              ('optimizer', 'GPU:0', 3 * 2**19)])],
         'ops': [{'device': 'GPU:0', 'op': 'MatMul', 'count': 700},
                 {'device': 'CPU:0', 'op': 'Const', 'count': 5000},
                 {'device': 'GPU:0', 'op': 'Add', 'count': 600}],
         'split': [{'name': 'forward', 'ms': 1.5, 'share': 0.6, 'spread': 0.1},
                   {'name': 'backward', 'ms': 1., 'share': 0.4, 'spread': 0.}],
         'memory': [{'owner': 'batch', 'bytes': 2**30, 'how': 'counted'},
                    {'owner': 'step', 'bytes': None, 'how': 'not seen'}]}
TABLES = {
    'Variables': (('owner', 'device', 'variables', 'memory'), [
        ('weights', 'GPU:0', '2', '1.0 KiB'), ('weights', 'CPU:0', '1', '3 bytes'),
        ('optimizer', 'GPU:0', '1', '1.5 MiB')]),
    'Operations, compiled without XLA': (('device', 'operations', 'most of them'), [
        ('CPU:0', '5,000', 'Const'), ('GPU:0', '1,300', 'MatMul')]),
    'A step (graph)': (('part', 'ms', 'share', 'spread', ''),
                       [('forward', '1.50', '60%', '± 10%', '█' * 12),
                        ('backward', '1.00', '40%', '± 0%', '█' * 8)]),
    'Memory': (('owner', 'memory', 'how it is known'),
               [('batch', '1.0 GiB', 'counted'), ('step', '–', 'not seen')]),
    'Dearest operations, of 5 steps and all threads': (('device', 'operation', 'ms', 'share', 'calls'),
                                                       [('GPU:0', 'k' * 60, '0.500', '25%', '3')])}


def test_findings_as_tables():
    assert tables(FOUND) == TABLES
    for au, text in ((0.5, '50%'), (None, '–')):
        heads, rows = tables(FOUND | {'phases': PHASES | {'au': au}})['With its data']
        assert (heads, rows) == (('wait', 'step', 'AU', 'clips/s'), [('1.00 ms', '2.50 ms', text, '1,234')])


@pytest.mark.parametrize('size, text', [
    (0, '0 bytes'), (1023, '1023 bytes'), (1024, '1.0 KiB'), (2**20 - 1, '1024.0 KiB'), (2**20, '1.0 MiB'),
    (2**30, '1.0 GiB'), (3 * 2**40, '3072.0 GiB'), (None, '–')])
def test_sizes_as_people_read_them(size, text): assert page._size(size) == text


def shown(page: str) -> list[str]:
    "The lines of a page without its marks."
    lines = page.replace('<pre>', '\n').splitlines()
    return [unescape(re.sub('<.*?>', '', line)).rstrip() for line in lines]

def test_findings_as_text_and_as_a_page(tmp_path):
    "Columns are as wide as their widest cell; what is not markup is escaped; a list of nothing is empty."
    text = profile_text(FOUND).split('\n\n')
    assert text[0] == 'A <card>, a step of 2.5 ms'
    assert text[-2:] == ['Not seen: this & that.', 'The trace: tensorboard --logdir folder']
    assert text[1].splitlines() == ['Variables', '  owner      device  variables  memory',
                                    '  weights    GPU:0   2          1.0 KiB',
                                    '  weights    CPU:0   1          3 bytes',
                                    '  optimizer  GPU:0   1          1.5 MiB']
    html = profile_page(FOUND)
    assert 'A &lt;card&gt;' in html and '<p>Not seen: this &amp; that.</p>' in html and '<card>' not in html
    assert html.count('<pre>') == len(TABLES) + 2
    for title, table in zip(TABLES, text[1:]):   # the text, and what a browser shows of the page
        assert table.splitlines()[0] == title and f'<h2>{title}</h2>' in html
        assert all(line in shown(html) for line in table.splitlines()[1:])
    for cells in ('owner name device bytes', 'weights v1 GPU:0 24', 'device op count', 'CPU:0 Const 5000'):
        assert cells.split() in [line.split() for line in shown(html)]
    one = profile_page(FOUND | {'ops': [], 'variables': FOUND['variables'][:1]})
    assert '<details><summary><h2>Every kind of operation</h2></summary></details>' in one
    for _ in range(2): written = write_page(FOUND, str(tmp_path / 'deep' / 'deeper' / 'page.HTM'))
    assert written.read_text(encoding='utf-8') == html
    pytest.raises(UserError, write_page, FOUND, tmp_path / 'page.txt').match('page.txt: a page ends in .html')


def test_command_refuses(ran, tmp_path):
    done = ran('profile', '--data', tmp_path / 'nothing', '--out', tmp_path / 'out')
    assert done.code == 2 and len(done.said) == 1 and not tree(tmp_path)


@pytest.mark.slow
@pytest.mark.cpu
def test_command(plain, prepared, tmp_path):
    (tmp_path / 'small.yaml').write_text(plain.to_yaml())
    done = xtts_nb('profile', '--data', prepared.folder, '--config', tmp_path / 'small.yaml',
                   '--out', tmp_path / 'out', '--rounds', 2, '--json')
    assert done.code == 0, done.err
    assert done.json['phases']['spent'].keys() == {'wait', 'copy', 'step', 'callbacks'}
    assert done.json['device'].startswith('CPU')
    assert {'profile.html', 'profile.json', 'trace'} <= tree(tmp_path / 'out').keys()
