"The losses: what counts in them, wholes and parts, and where the likeliest STOP comes."
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.train.step import stop_counts, stop_shares, token_counts, token_losses, total_loss

SEED = tf.constant([1, 2])

@pytest.fixture(scope='module')
def losses(xtts):
    "The loss, its parts, and the gradients as one vector; op by op, since a trace takes longer."
    def run(batch, seed):
        with tf.GradientTape() as tape:
            parts = token_losses(xtts.gpt, batch, seed)
            loss = total_loss(parts)
        gradients = tape.gradient(loss, xtts.gpt.trainable_variables)
        return loss, parts, tf.concat([tf.reshape(tf.convert_to_tensor(g), [-1]) for g in gradients], 0)
    return lambda batch, seed=None: tf.nest.map_structure(np.array, run(batch, seed))

def with_rows(batch, weight, **changes): return batch | {'weight': tf.constant(weight, tf.float32)} | changes

@pytest.mark.parametrize('seed', [None, SEED], ids=['plain', 'dropout'])
def test_zero_weight_rows_change_neither_loss_nor_gradients(losses, batch, seed):
    loss, _, gradient = losses(with_rows(batch, [1, 1, 1, 0]), seed)
    wild = {k: tf.concat([batch[k][:3], tf.constant(np.full((1, *batch[k].shape[1:]), v), batch[k].dtype)], 0)
            for k, v in dict(text=7, codes=9, reference=3., text_length=2, code_length=3).items()}
    loss2, _, gradient2 = losses(with_rows(batch, [1, 1, 1, 0], **wild), seed)
    assert loss == pytest.approx(loss2, rel=1e-6) and np.allclose(gradient, gradient2, atol=1e-6)

def test_counts_are_known_before(losses, batch, xtts):
    some = with_rows(batch, [1, 0.5, 0, 1])
    known, parts = token_counts(xtts.gpt, some), losses(some)[1]
    assert {k: float(v) for k, v in known.items()} == {k: float(parts[k]) for k in known}

def test_where_the_likeliest_stop_comes():
    "Lengths and places of STOPs: at the end, 3 and 4 codes before, twice, behind, none; one without weight."
    ends = [(60, [60]), (65, [62]), (66, [62]), (130, [130]), (131, [128, 131]), (131, [20, 131]), (9, [10]),
            (131, []), (9, [1])]
    logits = np.zeros((len(ends), 133, 5), np.float32)
    for row, (_, stops) in enumerate(ends): logits[row, stops, 4] = 1.
    batch = {'code_length': tf.constant([n for n, _ in ends]), 'weight': tf.constant([1.] * 8 + [0.])}
    counts = stop_counts(SimpleNamespace(code_stop=4), batch, tf.constant(logits))
    assert {k: float(v) for k, v in counts.items()} == {
        'short_clips': 3, 'short_stops': 2, 'middle_clips': 2, 'middle_stops': 1, 'long_clips': 3,
        'long_stops': 1, 'never_stops': 2}
    assert stop_shares(counts) == {'stop': 4 / 8, 'stop_short': 2 / 3, 'stop_middle': .5,
                                    'stop_long': pytest.approx(1 / 3), 'never': 2 / 8}
    assert stop_shares({**counts, 'middle_clips': 0., 'middle_stops': 0.}).keys() == {
        'stop', 'stop_short', 'stop_long', 'never'}
    assert stop_shares({}) == {} == stop_shares({'short_clips': 0., 'short_stops': 0., 'never_stops': 0.})

def test_a_share_of_an_update_is_divided_by_the_counts_of_the_whole():
    parts = {'text_loss': tf.constant(6.), 'text_count': tf.constant(2.), 'code_loss': tf.constant(8.),
             'code_count': tf.constant(0.5)}
    assert float(total_loss(parts)) == pytest.approx(0.01 * 3 + 8)   # no division by less than one
    assert float(total_loss(parts, 2., {'text_count': 3., 'code_count': 16.})) == pytest.approx(2 * 2 + 0.5)

def test_a_batch_of_nothing_is_no_nan(losses, batch):
    loss, parts, gradient = losses(with_rows(batch, [0, 0, 0, 0]))
    assert loss == 0 and not gradient.any() and parts['code_count'] == 0

def test_losses_equal_loops(xtts, batch):
    "Cross-entropy of every counted position, one after the other."
    logits = xtts.gpt(*(batch[k] for k in ('text', 'text_length', 'codes', 'code_length', 'reference')))
    parts = token_losses(xtts.gpt, batch)
    for name, scores, ids, length, stop in (('text', logits[0], 'text', 'text_length', 0),
                                            ('code', logits[1], 'codes', 'code_length', xtts.gpt.code_stop)):
        total = 0.
        for row, n in enumerate(batch[length].numpy()):
            for place, target in enumerate([*batch[ids].numpy()[row, :n], stop]):
                s = scores.numpy()[row, place].astype(np.float64)
                total += np.log(np.exp(s).sum()) - s[target]
        assert float(parts[f'{name}_loss']) == pytest.approx(total, rel=1e-4)
