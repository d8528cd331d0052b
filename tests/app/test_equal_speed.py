"The comparison of the batches of pipelines, before they are timed."

import pytest
import tensorflow as tf

from xtts_nb.app.speed import (
    check_equal, comparison_plan, differing_share, readers, refuse_differences)
from xtts_nb.config import UserError
from xtts_nb.data.native import BatchPlan, CacheReader

ONLINE = {'clip', 'weight', 'text', 'text_length', 'mel_length', 'mel', 'reference'}

def test_all_pipelines_deliver_the_same(prepared, dvae, small, stats):
    "Everything that they deliver, the codes of the cache among it."
    plan = BatchPlan(prepared, small.data)
    differ = check_equal(plan, stats, dvae.encode, batches=plan.steps_per_epoch + 1)
    assert {arm: set(parts) for arm, parts in differ.items()} == {
        'numpy_function': ONLINE, 'native_wav': ONLINE, 'native': ONLINE,
        'cache': ONLINE - {'mel', 'mel_length'} | {'codes', 'code_length'}}
    assert max(share for parts in differ.values() for share in parts.values()) < 1e-3

@pytest.mark.parametrize('arm, part, shown, change', [
    ('cache', 'codes', 'codes', lambda x: tf.concat([x[:, :1] + 1, x[:, 1:]], 1)),
    ('cache', 'code_length', 'code_length', lambda x: x - 1),
    ('cache', 'reference', 'reference', lambda x: x * 1.1),
    ('native', 'text', 'text', lambda x: x[:, ::-1]),
    ('native_wav', 'weight', 'weight', lambda x: x * 0),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        ('numpy_function', 'mel', 'mel', lambda x: x[:, 1:]),
        ('native', 'mel', 'mel', lambda x: x + 7e-3),
        ('native_wav', 'wav', 'mel', lambda x: tf.roll(x, 99, 1)),
        ('native_wav', 'reference_wav', 'reference', lambda x: x // 2)))])
def test_a_difference_is_noticed_whatever_differs(prepared, dvae, small, stats, arm, part, shown, change):
    plan = BatchPlan(prepared, small.data)
    reader = readers(plan, stats)[arm]
    wrong = lambda step: (batch := reader(step)) | {part: change(batch[part])}
    found = f'different batches, .*: {arm} {shown} .*leave that loader out'
    with pytest.raises(UserError, match=found): check_equal(plan, stats, dvae.encode, {arm: wrong}, batches=1)

def test_a_difference_in_one_of_several_batches_is_noticed(prepared, dvae, small, stats):
    plan = BatchPlan(prepared, small.data)
    reader = CacheReader(prepared, plan)
    heavier = lambda step, weight: weight + tf.cast(step == 0, tf.float32)
    wrong = lambda step: (batch := reader(step)) | {'weight': heavier(step, batch['weight'])}
    with pytest.raises(UserError, match='cache weight 100.00%'):
        check_equal(plan, stats, dvae.encode, {'cache': wrong})

@pytest.mark.parametrize('x, y, tolerance, share', [
    ([1, 2], [1, 2], 0., 0.), ([1, 2, 3, 4], [1, 2, 3, 5], 0., 0.25), ([1], [1, 1], 0., 1.),
    ([1., 0.], [1.5, 1.], 0.5, 0.5), ([1.5, 1.], [1., 0.], 0.5, 0.5)], ids=str)
def test_the_share_of_cells_that_differ(x, y, tolerance, share):
    assert differing_share(x, y, tolerance) == share

def test_mels_and_codes_may_differ_in_one_cell_of_a_thousand():
    near = dict.fromkeys(('mel', 'reference', 'codes'), 1e-3)
    refuse_differences({'a': near | {'text': 0.}})
    for part, share in (*dict.fromkeys(near, 0.0011).items(), ('text', 1e-4)):
        with pytest.raises(UserError, match=f'compared: b {part} {share:.2%} of the cells differ'):
            refuse_differences({'a': near, 'b': near | {part: share}})

def test_a_comparison_takes_one_shape_and_lays_one_batch_by(prepared):
    plan = comparison_plan(prepared)
    assert len(plan.shapes) == 1 == plan.data.prefetch_buffer_size
