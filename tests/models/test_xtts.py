"The losses: what counts in them, halves and wholes; and a model as a folder."
import re
from pathlib import Path
from types import SimpleNamespace

import keras
import nbformat
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.config import UserError
from xtts_nb.files import save_weights
from xtts_nb.models import xtts as page
from xtts_nb.models.xtts import (
    XTTS, call_traced, compiled_forward, cross_entropies, forward_flops, forward_numbers, INPUTS,
    longest_shape, pad_batch, row_by_row, speech_batches, step_flops, stop_counts, stop_shares,
    token_counts, token_losses, total_loss, whole_batch)
from xtts_nb.speech.generate import generate
from xtts_nb.data.native import speech_lengths
from xtts_nb.data.text import train_tokenizer

SEED = tf.constant([1, 2])


@pytest.fixture(scope='module')
def losses(xtts):
    "Compiled: loss, its parts, and the gradients as one vector."
    @tf.function
    def run(batch, seed):
        with tf.GradientTape() as tape:
            parts = token_losses(xtts.gpt, batch, seed)
            loss = total_loss(parts)
        gradients = tape.gradient(loss, xtts.gpt.trainable_variables)
        return loss, parts, tf.concat([tf.reshape(tf.convert_to_tensor(g), [-1]) for g in gradients], 0)
    return lambda batch, seed=None: tf.nest.map_structure(np.array, run(batch, seed))

def with_rows(batch, weight, **changes): return batch | {'weight': tf.constant(weight, tf.float32)} | changes

def take(batch, rows): return {k: tf.gather(v, rows) for k, v in batch.items()}


@pytest.mark.parametrize('seed', [None, SEED], ids=['plain', 'dropout'])
def test_zero_weight_rows_change_neither_loss_nor_gradients(losses, batch, seed):
    loss, _, gradient = losses(with_rows(batch, [1, 1, 1, 0]), seed)
    wild = {k: tf.concat([batch[k][:3], tf.constant(np.full((1, *batch[k].shape[1:]), v), batch[k].dtype)], 0)
            for k, v in dict(text=7, codes=9, reference=3., text_length=2, code_length=3).items()}
    loss2, _, gradient2 = losses(with_rows(batch, [1, 1, 1, 0], **wild), seed)
    assert loss == pytest.approx(loss2, rel=1e-6) and np.allclose(gradient, gradient2, atol=1e-6)

def test_rows_left_out_equal_rows_that_were_never_there(losses, batch):
    with_zero = losses(with_rows(batch, [1, 0, 1, 0]))
    without = losses(take(with_rows(batch, [1, 1, 1, 1]), [0, 2]))
    assert with_zero[0] == pytest.approx(without[0], rel=1e-5)
    assert np.allclose(with_zero[2], without[2], atol=1e-5)
    assert np.abs(with_zero[2]).max() > 1e-3

def test_the_loss_of_the_whole_is_that_of_its_halves(losses, batch):
    whole, halves = losses(batch)[1], [losses(take(batch, rows))[1] for rows in ([0, 1], [2, 3])]
    for name in whole: assert whole[name] == pytest.approx(sum(h[name] for h in halves), rel=1e-5)
    together = {name: tf.constant(sum(h[name] for h in halves)) for name in whole}
    assert float(total_loss(together)) == pytest.approx(float(losses(batch)[0]), rel=1e-5)

def test_counts_are_tokens_and_one_stop_a_row(losses, batch):
    parts = losses(with_rows(batch, [1, 1, 0, 1]))[1]
    rows = np.array([0, 1, 3])
    assert parts['text_count'] == batch['text_length'].numpy()[rows].sum() + 3
    assert parts['code_count'] == batch['code_length'].numpy()[rows].sum() + 3

def test_counts_are_known_before(losses, batch, xtts):
    some = with_rows(batch, [1, 0.5, 0, 1])
    known, parts = token_counts(xtts.gpt, some), losses(some)[1]
    assert {k: float(v) for k, v in known.items()} == {k: float(parts[k]) for k in known}
    four = SimpleNamespace(code_stops=4)   # as coqui-tts has it
    assert token_counts(four, some)['code_count'] - known['code_count'] == 3 * 2.5

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

def test_padding_does_not_change_the_loss(losses, batch):
    wide = {k: tf.pad(batch[k], [[0, 0], [0, 9]], constant_values=5) for k in ('text', 'codes')}
    assert losses(batch | wide)[0] == pytest.approx(float(losses(batch)[0]), rel=1e-5)

def test_the_order_of_rows_does_not_matter(losses, batch):
    assert losses(take(batch, [3, 1, 0, 2]))[0] == pytest.approx(float(losses(batch)[0]), rel=1e-5)

def test_dropout_follows_the_seed(losses, batch):
    a, b, c = (losses(batch, s)[0] for s in (SEED, SEED, tf.constant([1, 3])))
    assert a == b != c

@pytest.mark.parametrize('weight', [0., 0.01, 1.])
def test_the_text_weight(losses, batch, weight):
    parts = losses(batch)[1]
    expected = weight * parts['text_loss'] / parts['text_count'] + parts['code_loss'] / parts['code_count']
    assert float(total_loss(parts, weight)) == pytest.approx(float(expected), rel=1e-6)

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

def test_every_weight_learns(losses, batch, xtts):
    gradient, place = losses(batch)[2], 0
    for v in xtts.gpt.trainable_variables:
        size = int(np.prod(v.shape))
        assert np.abs(gradient[place:place + size]).max() > 0, v.path
        place += size

@pytest.mark.parametrize('kind, near', [('bfloat16', 0.01), ('float16', 0.001)])
def test_the_loss_in_half_precision_is_close(xtts, batch, kind, near):
    rough = XTTS(xtts.config, xtts.tokenizer, xtts.dvae, dtype=kind)
    for name, v in rough.weights.items(): v.assign(xtts.weights[name])
    parts = [token_losses(m.gpt, batch) for m in (xtts, rough)]
    a, b = (float(total_loss(p)) for p in parts)
    assert a != b and a == pytest.approx(b, rel=near) and rough.gpt.compute_dtype == kind
    assert all(v.dtype == 'float32' for v in parts[1].values())

def test_the_precision_of_training_is_the_default(small, xtts):
    rough = XTTS(small.replace(training={'precision': 'bfloat16'}), xtts.tokenizer, xtts.dvae)
    assert rough.gpt.compute_dtype == 'bfloat16'

@pytest.mark.parametrize('kind', ['float32', 'bfloat16', 'float16'])
def test_loaded_to_compute_in_any_precision(xtts, saved, batch, kind):
    loaded = XTTS.load(saved, dtype=kind)
    assert loaded.gpt.compute_dtype == kind and loaded.config == xtts.config
    assert all(np.array_equal(v, xtts.weights[k]) and v.dtype == 'float32' for k, v in loaded.weights.items())
    prompt = loaded.gpt.conditioning(batch['reference'][:1])
    codes = generate(loaded.gpt, batch['text'][:1], batch['text_length'][:1], prompt, 8, temperature=0)[0]
    assert codes.shape == (1, 8)
    loaded.save(saved.parent / 'again')
    first, second = (folder / 'model.safetensors' for folder in (saved, saved.parent / 'again'))
    assert first.read_bytes() == second.read_bytes()

def test_a_precision_that_is_none(saved):
    with pytest.raises(UserError, match='"int8" is none of float32, bfloat16, float16'):
        XTTS.load(saved, dtype='int8')


# --- row by row and at once, changing and static shapes -----------------------------------------------------

@pytest.mark.parametrize('weight', [[1, 1, 1, 1], [0, 1, 0.5, 2]], ids=str)
def test_rows_equal_the_whole_batch(xtts, batch, weight):
    some = with_rows(batch, weight)
    logits = xtts.gpt(*(some[k] for k in INPUTS))
    slow, fast = row_by_row(xtts.gpt, some, logits), whole_batch(xtts.gpt, some, logits)
    assert slow.keys() == fast.keys() == {'text', 'codes', 'mask', *cross_entropies(xtts.gpt, some, logits)}
    for name in ('text', 'codes', 'mask', 'text_count', 'code_count'):
        assert np.array_equal(slow[name], fast[name]), name
    for name, value in token_losses(xtts.gpt, some).items():
        assert slow[name] == pytest.approx(float(value), rel=1e-5)
        assert float(fast[name]) == pytest.approx(float(value), rel=1e-6)

def test_the_mask_and_the_inputs_are_those_of_the_model(xtts, batch, monkeypatch):
    seen = {}
    def hidden(x, mask, seed): seen['mask'] = mask; return x
    for name in ('text', 'codes'):
        def embed(ids, name=name): seen[name] = ids; return tf.zeros((*ids.shape, 64))
        monkeypatch.setattr(xtts.gpt, f'embed_{name}', embed)
    monkeypatch.setattr(xtts.gpt, 'hidden', hidden)
    logits = xtts.gpt(*(batch[k] for k in INPUTS))
    made = whole_batch(xtts.gpt, batch, logits)
    assert np.array_equal(made['mask'], seen['mask'][:, 0])
    assert all(np.array_equal(made[name], seen[name]) for name in ('text', 'codes'))

def test_reads_of_the_host():
    x = tf.constant([2., 3.])
    assert page.host_reads(lambda a: (float(a[0]), int(a[1]), a.numpy()), x) == 3
    assert page.host_reads(lambda: tf.reduce_sum(x)) == 0

def test_speech_batches(small):
    config = small.replace(data={'batch_size': 3})
    batches, (codes, text) = speech_batches(config, 2, seed=4), speech_lengths(6, seed=4)
    for i, batch in enumerate(batches):
        rows = slice(3 * i, 3 * i + 3)
        assert np.array_equal(batch['code_length'], codes[rows])
        assert np.array_equal(batch['text_length'], text[rows])
        assert batch['codes'].shape == (3, codes[rows].max()) and batch['text'].shape == (3, text[rows].max())
        assert batch['reference'].shape == (3, config.data.reference_frames, 80)
        assert np.array_equal(batch['weight'], [1, 1, 1]) and batch['reference'].dtype == 'float32'
        for name, top in (('codes', config.model.dvae.codes), ('text', config.model.gpt.text_tokens)):
            assert 3 <= np.min(batch[name]) and top - 5 < np.max(batch[name]) < top
            assert batch[name].dtype == batch[f'{name.rstrip("s")}_length'].dtype == 'int32'
    again, other = speech_batches(config, 2, seed=4), speech_batches(config, 2)
    assert all(np.array_equal(a[k], b[k]) for a, b in zip(batches, again) for k in a)
    assert not np.array_equal(batches[0]['codes'], other[0]['codes'])

def test_padded_to_one_shape(batch):
    shape = longest_shape([batch, {'text': tf.zeros((1, 99)), 'codes': tf.zeros((1, 1))}])
    assert shape == {'text': 99, 'codes': batch['codes'].shape[1]}
    wide = pad_batch(batch, text=99, codes=300)
    assert wide['text'].shape == (4, 99) and wide['codes'].shape == (4, 300) and wide.keys() == batch.keys()
    for name in ('text', 'codes'):
        n = batch[name].shape[1]
        assert np.array_equal(wide[name][:, :n], batch[name]) and not np.any(wide[name][:, n:])
    assert all(wide[name] is batch[name] for name in batch.keys() - {'text', 'codes'})

def test_a_trace_and_a_compilation_for_each_shape(xtts, batch):
    forward, S, T = compiled_forward(xtts.gpt), batch['codes'].shape[1], batch['text'].shape[1]
    results = [call_traced(forward, b)[0] for b in (batch, pad_batch(batch, T + 1, S), batch)]
    assert page.trace_count(forward) == 2
    expected = xtts.gpt(*(batch[k] for k in INPUTS))
    assert all(np.allclose(a, b, atol=1e-4) for a, b in zip(results[2], expected))
    assert np.allclose(results[1][0][:, :T], expected[0][:, :T], atol=1e-4)

def test_the_two_parts_of_a_call(monkeypatch):
    done, clock = [], iter([1., 3., 10.])
    class Step:
        def get_concrete_function(self, batch): done.append(('trace', batch))
        def __call__(self, batch): done.append(('call', batch)); return 'result'
    monkeypatch.setattr(page, 'wait_for', lambda result: done.append(('wait', result)))
    monkeypatch.setattr(page, 'time', SimpleNamespace(perf_counter=lambda: next(clock)))
    assert call_traced(Step(), 'batch') == ('result', 2., 7.)
    assert done == [('trace', 'batch'), ('call', 'batch'), ('wait', 'result')]

def test_the_arms_of_both_comparisons(monkeypatch, batch):
    "Each arm works on all it is given and says how much; the second comparison begins without a warm-up."
    asked, seen, gpt = [], [], lambda *inputs: tf.zeros(2)
    def compare(arms, unit, rounds, warmup=1, progress=None):
        asked.append(({name: arm() for name, arm in arms.items()}, unit, rounds, warmup, progress))
        return SimpleNamespace(rows=lambda: [{'name': name} for name in arms])
    def by_row(gpt, batch, logits): seen.append(logits); return {'sum': float(logits[0])}
    def at_once(gpt, batch, logits): return {'sum': logits[0]}
    for name, value in (('compare', compare), ('row_by_row', by_row), ('whole_batch', at_once)):
        monkeypatch.setattr(page, name, value)
    rows = page.losses_speed(gpt, batch, rounds=4, repeats=3, progress='p')
    names = 'row by row', 'whole batch', 'whole batch, compiled'
    assert asked.pop() == (dict.fromkeys(names, 3), 'step_ms', 4, 1, 'p') and len(seen) == 4
    assert [list(row.values()) for row in rows] == [[names[0], 1, 0], [names[1], 0, 0], [names[2], 0, 1]]

    def forward(batch): return tf.shape(batch['text'])
    def call(step, batch): seen.append((batch['text'].shape[1], batch['codes'].shape[1])); step(batch)
    monkeypatch.setattr(page, 'compiled_forward', lambda gpt: tf.function(forward))
    monkeypatch.setattr(page, 'call_traced', call)
    T, S = batch['text'].shape[1], batch['codes'].shape[1]
    rows = page.shapes_speed(gpt, [batch, pad_batch(batch, T + 1, S)], rounds=4, progress='p')
    assert asked.pop() == ({'changing shapes': 2, 'static shape': 2}, 'step_ms', 4, 0, 'p')
    assert seen[4:] == [(T, S), *3 * [(T + 1, S)]]
    assert [list(row.values()) for row in rows] == [['changing shapes', None, 2], ['static shape', None, 1]]

def test_progress_and_rows_of_the_comparison(monkeypatch):
    "Each comparison with its own stage; the model and its batches as named."
    asked = []
    def losses(gpt, batch, rounds, repeats, progress):
        progress(1, 2)
        size = gpt.cfg.layers, gpt.cfg.width, gpt.text_start
        asked.append((*size, batch['codes'].shape[0], rounds, repeats))
        return ['a']
    def shapes(gpt, batches, rounds, progress):
        progress(2, 2)
        asked.append((len(batches), rounds))
        return ['b']
    monkeypatch.setattr(page, 'losses_speed', losses)
    monkeypatch.setattr(page, 'shapes_speed', shapes)
    told = []
    assert page.model_speed(3, 2, 4, lambda *what: told.append(what)) == ['a', 'b']
    assert asked == [(1, 64, 3, 2, 4, 20), (3, 4)]
    assert told == [('masks and losses', 1, 2), ('shapes', 2, 2)]

@pytest.mark.filterwarnings('ignore:`shuffle=True` was passed')   # Keras, of any dataset
def test_the_code_for_own_data_works():
    "The code blocks of the page, with clips of 3, 5 and 7 ids, a loss and a model of Keras."
    notebook = nbformat.read(Path(__file__).parents[2] / 'nbs/20_model.ipynb', as_version=4)
    (text,) = [c.source for c in notebook.cells if c.source.startswith('## Your own data')]
    count, step, fit = re.findall(r'```python\n(.*?)```', text, re.DOTALL)
    size = lambda i: 3 + 2 * (i % 3)
    clips = tf.data.Dataset.range(32).map(lambda i: {'ids': tf.ones([size(i)]), 'length': size(i)})
    model = keras.Sequential([keras.layers.Embedding(4, 4), keras.layers.Dense(4)])
    names = {'tf': tf, 'keras': keras, 'clips': clips, 'model': model, 'batches': clips.padded_batch(4),
             'loss': lambda ids, counted: tf.reduce_sum(ids * counted)}
    exec(count, names)
    assert names['shapes'] == {(4, 7)}
    exec(step, names)
    losses = [float(names['step'](batch)) for batch in names['batches']]
    lengths = [size(i) for i in range(32)]
    assert losses == [sum(lengths[:16]), sum(lengths[16:])]
    assert names['step'].experimental_get_tracing_count() == 1
    exec(count, names)
    assert names['shapes'] == {(16, 200)}
    exec(fit, names)
    places = sum(lengths) - 32   # that count; the first id of a clip is no target
    assert np.isclose(model.history.history['loss'][0], np.log(4) * places / (32 * 199), rtol=0.2)


# --- the folder ---------------------------------------------------------------------------------------------

@pytest.fixture
def saved(xtts, tmp_path):
    xtts.save(tmp_path / 'm')
    return tmp_path / 'm'

def test_saved_and_loaded(xtts, saved, batch):
    again = XTTS.load(saved)
    assert again.config == xtts.config and again.tokenizer.to_json() == xtts.tokenizer.to_json()
    assert list(again.weights) == list(xtts.weights)
    assert all(np.array_equal(v, xtts.weights[k]) for k, v in again.weights.items())
    assert np.array_equal(token_losses(xtts.gpt, batch)['code_loss'],
                          token_losses(again.gpt, batch)['code_loss'])
    again.save(saved.parent / 'n')
    for path in saved.iterdir():
        assert path.read_bytes() == (saved.parent / 'n' / path.name).read_bytes(), path.name

@pytest.mark.parametrize('name', ['config.yaml', 'tokenizer.json', 'model.safetensors'])
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    with pytest.raises(UserError, match=name): XTTS.load(saved)

@pytest.mark.parametrize('name', ['tokenizer.json', 'model.safetensors'])
@pytest.mark.parametrize('share', [0., 0.01, 0.5, 0.99])
def test_a_file_cut_off_is_named(saved, name, share):
    data = (saved / name).read_bytes()
    (saved / name).write_bytes(data[:int(share * len(data))])
    with pytest.raises(UserError, match=name): XTTS.load(saved)

@pytest.mark.parametrize('change, name', [({'gpt': {'width': 128, 'heads': 4}}, 'gpt/'),
                                          ({'gpt': {'layers': 3}}, 'gpt/block_2'),
                                          ({'dvae': {'codes': 40}}, 'dvae/codebook'),
                                          ({'gpt': {'prompt_latents': 6}}, 'latents')], ids=str)
def test_another_size_is_named(xtts, saved, change, name):
    (saved / 'config.yaml').write_text(xtts.config.replace(model=change).to_yaml())
    with pytest.raises(UserError, match=f'model.safetensors: .*{name}.*(another size|another model)'):
        XTTS.load(saved)

def test_a_missing_tensor_is_named(xtts, saved):
    save_weights(saved / 'model.safetensors',
                 {k: v for k, v in xtts.weights.items() if k != 'gpt/code_head/bias'})
    with pytest.raises(UserError, match='model.safetensors: the tensor "gpt/code_head/bias" is missing'):
        XTTS.load(saved)

@pytest.mark.parametrize('kind', ['nowhere', 'empty', 'a file'])
def test_what_is_no_model_is_named(tmp_path, kind):
    if kind == 'empty': (tmp_path / 'm').mkdir()
    if kind == 'a file': (tmp_path / 'm').write_text('')
    with pytest.raises(UserError, match='/m: '): XTTS.load(tmp_path / 'm')

def test_what_came_with_a_model_goes_with_it(saved, tmp_path):
    "Settings of coqui-tts beside it and tensors of no network; also where it is saved in its own place."
    (saved / 'coqui.json').write_text('{"a": 1}')
    path = saved / 'model.safetensors'
    save_weights(path, {'coqui/more': np.ones(3, np.float32)}, others_from=path)
    before = {p.name: p.read_bytes() for p in saved.iterdir()}
    again = XTTS.load(saved)
    assert again.hifigan is None
    for folder in (saved, tmp_path / 'other'):
        again.save(folder)
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    XTTS(again.config, again.tokenizer, again.dvae, again.gpt).save(tmp_path / 'new')
    made = {p.name for p in (tmp_path / 'new').iterdir()}
    assert made == {'config.yaml', 'tokenizer.json', 'model.safetensors'}
    again.save(tmp_path / 'third', {k: v.numpy() + 1 for k, v in again.weights.items()})
    third = XTTS.load(tmp_path / 'third', parity=True)
    assert all(np.array_equal(v, again.weights[k].numpy() + 1) for k, v in third.weights.items())
    assert third.gpt.parity and not again.gpt.parity

def test_networks_that_are_given_stay_as_they_are(small, xtts, dvae):
    "A GPT that is made here divides by the constants of the DVAE; one that is given keeps its own."
    assert np.array_equal(XTTS(small, xtts.tokenizer, dvae).gpt.mel_stats, dvae.mel_stats)
    gpt = SimpleNamespace()
    given = XTTS(small, xtts.tokenizer, dvae, gpt)
    assert given.gpt is gpt and given.dvae is dvae and given.hifigan is None

def test_a_tokenizer_too_large_names_the_key(small):
    tokenizer = train_tokenizer(['abcdefghijklmnopqrstuvwxyz ' * 3], ['en'], 48)
    with pytest.raises(UserError,
                       match=f'has {tokenizer.size} tokens, model.gpt.text_tokens is {tokenizer.size - 1}'):
        XTTS(small.replace(model={'gpt': {'text_tokens': tokenizer.size - 1}}), tokenizer)
    XTTS(small.replace(model={'gpt': {'text_tokens': tokenizer.size}}), tokenizer)

def sized(small):
    "B 3, T 20, S 40, F 32, P 4, D 64, four heads; the perceiver's attention is 4 x 32 wide."
    return small.replace(model={'gpt': {'layers': 3, 'heads': 4, 'conditioning_layers': 2,
                                        'perceiver_layers': 2,
                                        'perceiver_heads': 4, 'perceiver_head_dim': 32}})

def test_flops_are_twice_the_products_of_every_matrix(small):
    F, P, T, S, D, L = 32, 4, 22, 42, 64, 4 + 22 + 42
    def attention(rows, keys): return [(rows, D, keys), (rows, keys, D)]
    def block(rows): return [(rows, D, 3 * D), *attention(rows, rows), (rows, D, D)]
    look = [(P, D, 128), (P + F, D, 256), (P, 128, D), (P, D, 16 * D / 3), (P, 8 * D / 3, D)]
    products = {'GPT voice': [(F, 80, D), *2 * block(F), *2 * look], 'GPT heads': [(T, D, 48), (S, D, 34)],
                'GPT blocks': 3 * [*block(L), (L, D, 4 * D), (L, 4 * D, D)]}
    expected = {part: 2 * sum(map(np.prod, each)) for part, each in products.items()}
    assert forward_flops(sized(small), 20, 40) == pytest.approx(expected)
    assert step_flops(sized(small), 3, 20,
                      40) == pytest.approx(3 * 3 * sum(expected.values()))   # forward, and backward twice

def test_numbers_that_are_kept(small):
    "Rows of width D and 4 D, scores before and behind the softmax, both heads with their losses."
    F, P, T, S, D, L = 32, 4, 22, 42, 64, 4 + 22 + 42
    look = 2 * (P + F) * 128 + 2 * P * 128 + 2 * 4 * P * (P + F)
    assert forward_numbers(sized(small), 20, 40) == pytest.approx({
        'GPT voice': F * D + 2 * (7 * F * D + 2 * 4 * F * F) + 2 * (look + 12 * P * D),
        'GPT embeddings': 3 * (T + S) * D,
        'GPT blocks': 3 * (18 * L * D + 2 * 4 * L * L), 'GPT heads': 2 * L * D + 2 * (T * 48 + S * 34)})

def test_flops_agree_with_what_tensorflow_counts(small):
    "The whole graph of a training step, with norms and losses, is at most 2 % above the formula."
    from tensorflow.python.profiler.model_analyzer import profile
    from tensorflow.python.profiler.option_builder import ProfileOptionBuilder

    from xtts_nb.models.gpt import GPT
    config = small.replace(model={'gpt': {'width': 256, 'heads': 8}})
    net, B, T, S = GPT(config, 3), 2, 20, 40
    shapes = dict(text=(B, T), text_length=(B,), codes=(B, S), code_length=(B,),
                  reference=(B, config.data.reference_frames, 80),
                  weight=(B,))
    batch = {k: tf.TensorSpec(v, tf.float32 if k in ('reference', 'weight') else tf.int32)
             for k, v in shapes.items()}
    def step(batch):
        with tf.GradientTape() as tape: loss = total_loss(token_losses(net, batch))
        return tape.gradient(loss, net.trainable_variables)
    graph = tf.function(step).get_concrete_function(batch).graph
    options = ProfileOptionBuilder(ProfileOptionBuilder.float_operation()).with_empty_output().build()
    counted = profile(graph, options=options).total_float_ops
    assert 0.98 < step_flops(config, B, T, S) / counted < 1

def test_precision_is_all_that_changes(small, xtts):
    keras.utils.set_random_seed(0)
    a = XTTS(small, xtts.tokenizer)
    keras.utils.set_random_seed(0)
    b = XTTS(small.replace(training={'precision': 'bfloat16'}), xtts.tokenizer)
    assert all(np.array_equal(v, b.weights[k]) and v.dtype == b.weights[k].dtype == 'float32'
               for k, v in a.weights.items())
