"The placement, time and memory of a training step."
import keras
import numpy as np
import pytest
import tensorflow as tf

from process import tree, xtts_nb
from xtts_nb.config import UserError
from xtts_nb.models.gpt import GPT
from xtts_nb.train.profile import (
    memory, _owners, _prefixes, profile_text, tables, trace, _variable_placement, write_page)
from xtts_nb.train.step import Update, random_batch

def made(config, **training):
    keras.utils.set_random_seed(0)
    config = config.replace(training={'gpt': training})
    return Update(GPT(config, text_start=1), config.training.gpt)

@pytest.mark.cpu
def test_every_variable_has_an_owner_and_a_device(plain):
    update, half = made(plain), made(plain, ema=.9, precision='float16')
    rows = _variable_placement(update)
    assert {r['device'] for r in rows} == {'CPU:0'}
    assert len(rows) == len(update.gpt.variables) + len(update.optimizer.variables)
    size = {owner: sum(r['bytes'] for r in rows if r['owner'] == owner) for owner in ('weights', 'optimizer')}
    assert size['weights'] == sum(4 * int(np.prod(v.shape)) for v in update.weights)
    assert size['optimizer'] >= 2 * size['weights']   # two moments
    kinds = lambda of: [owner for owner in _owners(of) if owner != 'frozen']   # some may be frozen
    assert kinds(update) == ['weights', 'optimizer']
    assert kinds(half) == ['weights', 'optimizer', 'mean weights', 'loss scale']
    some = Update(update.gpt, update.training, update.gpt.trainable_variables[:2])
    assert {id(v) for v in _owners(some)['frozen']} == {id(v) for v in some.gpt.variables[:]} - {
        id(v) for v in some.weights}
    batch = random_batch(plain, text=12, codes=16)
    found = {r['owner']: r['bytes'] for r in memory(rows, batch, 7)}
    assert found['gradients'] == found['weights'] and found['step, gradients included'] == 7
    assert found['batch'] == sum(x.numpy().nbytes for x in batch.values())

def test_prefixes_are_parts_of_the_step(plain):
    "Alone, and in two parts of a batch."
    batch, number = random_batch(plain, text=12, codes=16), tf.constant(0)
    steps = _prefixes(made(plain))
    whole = made(plain)(batch, number)   # the same first weights: nothing was updated yet
    np.testing.assert_allclose(steps['backward'](batch, number)[0], whole['gradient_norm'], rtol=1e-4)
    for some in (steps, _prefixes(made(plain, grad_accum_steps=2))):
        np.testing.assert_allclose(some['forward'](batch, number), whole['loss'], rtol=1e-5)

FOUND = {'device': 'A <card>', 'mode': 'graph', 'trace': 'folder', 'unseen': ['this & that'],
         'phases': dict(spent={'wait': 1., 'step': 2.5}, au=None, clips_per_s=1234.5),
         'variables': [{'owner': o, 'name': f'v{i}', 'device': d, 'bytes': b} for i, (o, d, b) in enumerate(
             [('weights', 'GPU:0', 1000), ('weights', 'GPU:0', 24), ('weights', 'CPU:0', 3),
              ('optimizer', 'GPU:0', 3 * 2**19)])],
         'ops': [{'device': 'GPU:0', 'op': 'MatMul', 'count': 700},
                 {'device': 'CPU:0', 'op': 'Const', 'count': 5000},
                 {'device': 'GPU:0', 'op': 'Add', 'count': 600}],
         'split': [{'name': 'forward', 'ms': 1.5, 'share': 0.6, 'spread': 0.1}],
         'memory': [{'owner': 'batch', 'bytes': 2**30, 'how': 'counted'},
                    {'owner': 'step', 'bytes': None, 'how': 'not seen'}]}
TITLES = 'Variables', 'Operations, compiled without XLA', 'A step (graph)', 'With its data', 'Memory'

def test_findings_as_tables_as_text_and_as_a_page(tmp_path):
    "What is not markup is escaped; a list of nothing is empty."
    assert tuple(tables(FOUND)) == TITLES
    page = write_page(FOUND | {'ops': []}, tmp_path / 'deep' / 'page.html')
    text, html = profile_text(FOUND), page.read_text(encoding='utf-8')
    assert text.startswith('A <card>, a step of 1.5 ms')
    for row in ('weights GPU:0 2 1.0 KiB', 'weights CPU:0 1 3 bytes', 'optimizer GPU:0 1 1.5 MiB',
                'GPU:0 1,300 MatMul', 'forward 1.50 60% ± 10% ████████████', '1.00 ms 2.50 ms – 1,234',
                'batch 1.0 GiB counted', 'step – not seen'):
        assert row in ' '.join(text.split())
    assert text.endswith('Not seen: this & that.\n\nThe trace: tensorboard --logdir folder')
    assert 'A &lt;card&gt;' in html and 'this &amp; that' in html and '<card>' not in html
    assert html.count('<table>') == len(TITLES)   # no operations, and every variable

def test_one_recorder_at_a_time(tmp_path):
    with trace(tmp_path / 'a'):
        with pytest.raises(UserError, match='already'), trace(tmp_path / 'b'): pass
    with trace(tmp_path / 'c' / 'd') as folder: assert folder.is_dir()   # the first one has ended
    (tmp_path / 'file').touch()
    with pytest.raises(UserError, match='file'), trace(tmp_path / 'file'): pass

@pytest.mark.slow
@pytest.mark.cpu
def test_command(plain, prepared, tmp_path):
    (tmp_path / 'small.yaml').write_text(plain.to_yaml())
    done = xtts_nb('profile', '--data', prepared.folder, '--config', tmp_path / 'small.yaml',
                   '--out', tmp_path / 'out', '--rounds', 2, '--json')
    assert done.code == 0, done.err
    found = done.json
    assert found['phases']['spent'].keys() == {'wait', 'copy', 'step', 'callbacks'}
    assert found['device'].startswith('CPU') and found['mode'] == 'graph' and found['unseen']
    assert [r['name'] for r in found['split']] == ['forward', 'backward', 'optimizer']
    assert sum(r['share'] for r in found['split']) >= .99 and sum(r['count'] for r in found['ops']) > 500
    assert {'profile.html', 'profile.json', 'trace'} <= tree(tmp_path / 'out').keys()
    assert [*(tmp_path / 'out' / 'trace').rglob('*.xplane.pb')]   # for TensorBoard
