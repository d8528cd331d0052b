"A finished model learns on: a language is added, adapters move, the memory is known, the rate is found."
import json
import os
import shutil
import subprocess
import time
from copy import copy
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

from benchmarks import xla_gpu
from cheap import read_eagerly
from process import started, tree, xtts_nb
from xtts_nb.config import GPTTraining, UserError, XTTSConfig
from xtts_nb.data.cache import Cache
from xtts_nb.data.prepare import encode_corpus
from xtts_nb.data.text import Tokenizer, train_tokenizer
from xtts_nb.files import named_weights, read_tensors, _room_in_container, save_weights, write_tensors
from xtts_nb.models.dvae import DVAE
from xtts_nb.models.gpt import GPT
from xtts_nb.models.hifigan import HiFiGAN, SpeakerEncoder
from xtts_nb.models.xtts import POLICIES, XTTS
from xtts_nb.records import recorded
from xtts_nb.sampler import GPU
from xtts_nb.train import memory
from xtts_nb.train.begin import begin
from xtts_nb.train.finetune import (
    _DerivedWeights, grow, _grow_tokenizer, _low_rank_parts, make_update, new_rows, read_texts, _row_parts)
from xtts_nb.train.learning_rate import find_learning_rate, plot_learning_rate
from xtts_nb.train.memory import (
    _activation_count, check_memory, _find_batch_size, _free_memory, _memory_budget, _MEMORY_ERROR,
    memory_needs, _memory_settings, parameter_counts, _run_trial, _trainable_count)
from xtts_nb.train.runs import export_run, new_run
from xtts_nb.train.step import compile_step, random_batch, token_counts, Update
from xtts_nb.train.trainer import checkpoints

ROOT = Path(__file__).resolve().parents[2]
OLD = ['The old dog sleeps all day.', 'The boat is old, too!']
NEW = ['سگ پیر می‌خوابد.', 'قایق ۱۲ تومان است؟']
MANY = [f'{a} {b}' for a in ('سگ', 'سگ‌ها', 'قایق', 'old سگ', 'boat')
        for b in ('پیر', 'پیرتر', 'کهنه', 'dog')]

# --- a model with one more language ---------------------------------------------------------------

@pytest.fixture(scope='module')
def english(): return Tokenizer(train_tokenizer(OLD, ['en'], 48).bpe, 'xtts')

SHALLOW = XTTSConfig.tiny(width=64).replace(model={'gpt': {'num_layers': 1, 'conditioning_layers': 1,
                                                            'perceiver_layers': 1}})

@pytest.fixture(scope='module')
def model(english): return XTTS(SHALLOW.replace(model={'gpt': {'text_tokens': english.size}}), english)

def test_new_texts_are_known_in_any_order_and_from_a_file(english, tmp_path):
    grown = _grow_tokenizer(english, 'fa', NEW)
    assert grown.start == english.start and grown.languages == ['en', 'fa']
    grown.save(tmp_path / 't.json')
    again = Tokenizer.load(tmp_path / 't.json')
    assert again.to_json() == grown.to_json() == _grow_tokenizer(english, 'fa', reversed(NEW)).to_json()
    marks = {m.pop('content'): m for m in json.loads(grown.bpe.to_str())['added_tokens']}
    assert marks['[fa]'] == marks['[en]'] | {'id': english.size}
    more = _grow_tokenizer(again, 'sw', ['ŋ'])
    for text in NEW:
        ids = more.encode(text, 'fa')
        assert ids == grown.encode(text, 'fa') and 1 not in ids and not more.unknown(text, 'fa')

def test_pieces_make_rows_shorter_and_leave_old_texts_alone(english):
    plain, most = (_grow_tokenizer(english, 'fa', MANY, n) for n in (0, 10**6))
    grown = {n: _grow_tokenizer(english, 'fa', MANY, n) for n in (5, 30, 40)}
    assert {n: g.size for n, g in grown.items()} == {
        n: min(max(english.size + n, plain.size), most.size) for n in grown} and plain.size < most.size
    for text in [*OLD, 'boatdog', 'olddog the']:
        assert grown[40].encode(text, 'en') == english.encode(text, 'en')

def test_new_rows_are_like_the_old_ones(model):
    grown, same, other = (grow(model, 'fa', NEW, seed) for seed in (0, 0, 1))
    a, b, c, old = (m.weights['gpt/text_embedding/embeddings'].numpy() for m in (grown, same, other, model))
    new = a[len(old):]
    assert np.array_equal(a, b) and not np.array_equal(a, c)
    assert 0.5 < new.std() / old.std() < 2 and len({row.tobytes() for row in new}) == len(new)
    assert grown.config.model.gpt.text_tokens == grown.tokenizer.size > model.tokenizer.size
    assert grow(grown, 'sv', ['å ä']).config.model.gpt.grown_from == model.tokenizer.size
    spare = XTTS(SHALLOW, model.tokenizer)   # 256 rows are used before more are made
    assert grow(spare, 'fa', NEW).config == spare.config.replace(
        model={'gpt': {'grown_from': model.tokenizer.size}})

def test_grow_as_a_command_and_what_it_refuses(model, english, tmp_path, ran, monkeypatch):
    "Of a model with a tensor and settings of its own, and texts."
    monkeypatch.chdir(tmp_path)
    model.save(Path('model'))
    path = Path('model/model.safetensors')
    write_tensors(path, dict(read_tensors(path)) | {'decoder/enter/bias': np.arange(3, dtype=np.float32)})
    Path('model/coqui.json').write_text('{"model": "xtts"}')
    Path('fa.txt').write_bytes(('\ufeff' + '\r\n\r\n'.join(NEW) + '\r\n').encode())   # as of Windows
    Path('empty.txt').write_text(' \n\n')
    Path('binary.txt').write_bytes(b'\xff\xfe\x00')
    Path('taken').mkdir()
    Path('taken/note').write_text('mine')
    before = tree(tmp_path)
    for line, part in (('out --model nowhere --language fa --texts fa.txt', 'nowhere'),
                       ('out --model model --language en --texts fa.txt', 'has en already'),
                       ('out --model model --language fas --texts fa.txt', 'fas'),
                       ('out --model model --language fa --texts no.txt', 'no.txt'),
                       ('out --model model --language fa --texts empty.txt', 'empty.txt'),
                       ('out --model model --language fa --texts binary.txt', 'UTF-8'),
                       ('taken --model model --language fa --texts fa.txt', 'taken')):
        done = ran(f'add-language {line}')
        assert done.code == 2 and done.out == '' and part in done.err.splitlines()[-1], (line, done.err)
        assert tree(tmp_path) == before, line
    done = ran('add-language grown --model model --language fa --texts fa.txt --tokens 30 --json')
    assert done.code == 0 and read_texts('fa.txt') == NEW, done.err
    sizes = dict(tokens_before=english.size, tokens=XTTS.load('grown').tokenizer.size)
    assert done.json == sizes | {'out': 'grown'} and before.items() <= tree(tmp_path).items()
    assert Path('grown/coqui.json').read_text() == '{"model": "xtts"}'
    old, new = (dict(read_tensors(Path(name, 'model.safetensors'))) for name in ('model', 'grown'))
    assert old.keys() == new.keys() and np.array_equal(*(x['decoder/enter/bias'] for x in (old, new)))

# --- adapters and rows ----------------------------------------------------------------------------

RUNS = [(20, 25), (30, 48)]   # of 48 text tokens

@pytest.fixture(scope='module')
def rows(plain) -> dict: return random_batch(plain, 12, 20)

def made(config, kind, **changes) -> Update:
    config = config.replace(training={'gpt': {'finetune': kind, 'learning_rate': 1e-2}}).replace(**changes)
    keras.utils.set_random_seed(0)
    gpt = GPT(config, 5, dtype=POLICIES[config.training.gpt.precision])
    update = make_update(gpt, config.training.gpt, RUNS)
    if kind == 'lora':   # as after some training: a zero hides half of the gradients
        for v in update.weights: v.assign(v.value + 0.02 * keras.random.normal(v.shape, seed=1))
    return update

def run(step, batch, count=3) -> list[float]:
    return [float(step(batch, tf.constant(i))['loss']) for i in range(count)]

def values(gpt) -> dict: return {k: v.numpy() for k, v in named_weights(gpt).items()}

@pytest.mark.parametrize('kind', ['lora', 'rows'])
@pytest.mark.parametrize('again, precision', [
    (False, 'float32'), pytest.param(True, 'bfloat16', marks=pytest.mark.slow)])
def test_the_model_stays_and_its_adapters_move(plain, rows, kind, again, precision):
    update = made(plain, kind, training={'gpt': {
        'grad_accum_steps': 2, 'gradient_checkpointing': again, 'precision': precision}})
    before, own = values(update.gpt), [v.numpy() for v in update.weights]
    losses = run(compile_step(update, update.training) if again else update, rows)
    assert losses[-1] < losses[0] and all(np.array_equal(v, before[k]) for k, v in values(update.gpt).items())
    assert not any(np.array_equal(v.numpy(), old) for v, old in zip(update.weights, own))
    if kind == 'lora': return
    with update.as_trained(): after = values(update.gpt)
    new = np.zeros(48, bool)
    for a, b in RUNS: new[a:b] = True
    for k, v in before.items():
        axis = {'text_embedding/embeddings': 0, 'text_head/kernel': 1, 'text_head/bias': 0}.get(k)
        if axis is None: assert np.array_equal(after[k], v), k
        else:
            moved = (after[k] != v).reshape(v.shape).any(tuple({0, 1} & set(range(v.ndim)) - {axis}))
            assert not moved[~new].any() and moved[new].any(), k

@pytest.mark.parametrize('kind, change', [
    ('lora', {'grad_accum_steps': 2, 'gradient_checkpointing': True}), ('rows', {})])
def test_the_gradients_are_those_of_the_weights(plain, rows, kind, change):
    "By the chain rule from the gradients of a whole model with the same weights."
    update, whole = made(plain, kind), made(plain, 'whole')
    with update.as_trained(): seen = values(update.gpt)
    for k, v in named_weights(whole.gpt).items(): v.assign(seen[k])
    counts = token_counts(update.gpt, rows)
    names = [v.path.removeprefix(f'{whole.gpt.name}/') for v in whole.weights]
    of = dict(zip(names, whole.gradients(rows, tf.constant(0), counts)[0]))
    wanted = []
    for part in update.parts:
        g = of[part.weight.path.removeprefix(f'{update.gpt.name}/')].numpy()
        if hasattr(part, 'down'):
            wanted += [part.scale * g @ part.up.numpy().T, part.scale * part.down.numpy().T @ g]
        else: wanted.append(np.take(g, [i for a, b in RUNS for i in range(a, b)], part.axis))
    compute = made(plain, kind, training={'gpt': change}).gradients
    if change: compute = tf.function(compute)   # else op by op: no trace
    for v, a, b in zip(update.weights, wanted, compute(rows, tf.constant(0), counts)[0], strict=True):
        assert np.allclose(a, b, rtol=1e-3, atol=1e-6), v.path

def test_an_adapter_begins_as_nothing_and_alpha_scales_it(plain):
    "Its first factor is random, each its own; in bfloat16 a change below the last bit of a weight survives."
    gpt = GPT(plain, 5)
    for alpha in (8., 32.):
        training = plain.replace(training={'gpt': {'finetune': 'lora', 'lora_rank': 4,
                                                   'lora_alpha': alpha}}).training.gpt
        part, other = _low_rank_parts(gpt, training)
        assert 0.8 < np.std(part.down) * 64**0.5 < 1.2 and not np.array_equal(part.down, other.down)
        with _DerivedWeights([part]): assert np.array_equal(part.weight.numpy(), part.base.numpy())
        assert part.down.shape == (64, 4) and part.scale == alpha / 4
    part = made(plain, 'lora', training={'gpt': {'precision': 'bfloat16'}}).parts[0]
    part.up.assign(1e-4 * np.sign(part.up.numpy()))
    with _DerivedWeights([part]): seen = part.weight.numpy()
    assert np.allclose(seen - part.base.numpy(), part.scale * part.down.numpy() @ part.up.numpy(), atol=1e-8)

def test_rows_of_several_languages(plain):
    config = lambda grown, kind='rows': XTTSConfig().replace(model={'gpt': {'grown_from': grown}},
                                                             training={'gpt': {'finetune': kind}})
    old = train_tokenizer(['the old dog'], ['en'], 40)
    one = _grow_tokenizer(old, 'fa', ['سگ پیر'])
    both, first, second = _grow_tokenizer(one, 'sv', ['å ä ö']), old.size, one.size
    assert new_rows(config(first), both, ['fa']) == [(first, second)]
    assert new_rows(config(first), both, ['fa', 'sv']) == [(first, second), (second, both.size)]
    for grown, languages in ((first, ['en']), (0, ['fa']), (second, ['fa'])):
        with pytest.raises(UserError, match='add-language'): new_rows(config(grown), both, languages)
    assert new_rows(config(first, 'whole'), both, ['sv']) == [] == new_rows(config(0, 'lora'), both, ['sv'])
    for part in _row_parts(GPT(plain, 5), [(40, 44), (44, 48)]):   # adjacent, and to the very end
        assert np.array_equal(part(), part.base.numpy()) and part.rows.shape[part.axis] == 8
        part.rows.assign(part.rows.value + 1)
        moved = np.nonzero((part().numpy() != part.base.numpy()).reshape(part().shape))[part.axis]
        assert set(moved) == set(range(40, 48))

# --- runs from a model ----------------------------------------------------------------------------

@pytest.fixture(scope='module')
def mini(mini):
    "One block, one shape, op by op: nothing to trace."
    return mini.replace(data={'buckets': 1}, training={'gpt': {
        'steps': 4, 'warmup_steps': 0, 'schedule': 'constant', 'learning_rate': 1e-2, 'checkpoint_every': 2,
        'mode': 'eager'}})

@pytest.fixture(scope='module')
def base(mini, dvae, tokenizer, tmp_path_factory):
    "A model that grew by Persian, with a decoder and settings next to the GPT, as a converted one has."
    keras.utils.set_random_seed(0)
    folder = tmp_path_factory.mktemp('base') / 'model'
    grown = grow(XTTS(mini, tokenizer, dvae), 'fa', ['سگ پیر'])
    grown.save(folder)
    voice = {f'{part}/{k}': v for part, net in (('decoder', HiFiGAN(mini)), ('speaker', SpeakerEncoder(mini)))
             for k, v in named_weights(net).items()}
    save_weights(folder / 'model.safetensors', grown.weights | voice)
    (folder / 'coqui.json').write_text('{}')
    return folder

@pytest.fixture(scope='module')
def persian(corpus, base, tmp_path_factory) -> Cache:
    "The corpus, said to be Persian, prepared with the model."
    folder = tmp_path_factory.mktemp('persian')
    shutil.copytree(corpus, folder / 'corpus')
    table = folder / 'corpus' / 'metadata.csv'
    table.write_text(table.read_text(encoding='utf-8').replace('|en', '|fa').replace('aa', 'سگ'),
                     encoding='utf-8')
    grown = XTTS.load(base)
    encode_corpus(folder / 'corpus', folder / 'cache', grown.config, grown.dvae, grown.tokenizer)
    return Cache(folder / 'cache')

def settings(mini, kind): return mini.replace(training={'gpt': {'finetune': kind}})

@pytest.fixture(scope='module')
def done(mini, base, persian, tmp_path_factory):
    "Kind -> a run to its end."
    folders = {}
    def of(kind):
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind) / 'run'
            new_run(persian, settings(mini, kind), folders[kind], base=base, feed=read_eagerly).fit()
        return folders[kind]
    return of

@pytest.mark.slow
@pytest.mark.parametrize('kind', ['lora', 'rows'])
def test_a_stopped_run_is_resumed_to_the_bit(done, mini, base, persian, tmp_path, kind):
    new_run(persian, settings(mini, kind), tmp_path / 'run', base=base, feed=read_eagerly).fit(steps=2)
    again = begin(run=tmp_path / 'run')
    again.feed = read_eagerly
    assert again.step == 2 and again.training.finetune == kind
    again.fit()
    left = [[p.read_bytes() for p in (run / 'model.safetensors', checkpoints(run / 'checkpoints')[-1])]
            for run in (tmp_path / 'run', done(kind))]
    assert left[0] == left[1]

@pytest.mark.parametrize('kind', ['lora', 'rows'])
def test_an_export_is_an_ordinary_model(done, base, mini, persian, tmp_path, kind):
    "Only what may move has moved; decoder and settings of the base are copied; another run may begin."
    export_run(done(kind), tmp_path / 'out')
    before, after = (dict(read_tensors(folder / 'model.safetensors')) for folder in (base, tmp_path / 'out'))
    assert before.keys() == after.keys() and (tmp_path / 'out' / 'coqui.json').is_file()
    moved = {k for k in before if not np.array_equal(before[k], after[k])}
    assert not any(k.startswith(('dvae/', 'decoder/', 'speaker/')) for k in moved)
    rows = {'gpt/text_embedding/embeddings', 'gpt/text_head/kernel', 'gpt/text_head/bias'}
    if kind == 'lora': assert moved == rows | {'gpt/block_0/qkv/kernel', 'gpt/block_0/project/kernel'}
    if kind == 'rows':
        assert moved == rows
        first = XTTSConfig.load(base / 'config.yaml').model.gpt.grown_from
        for k in moved:
            old, new = (x.T if 'kernel' in k else x for x in (before[k], after[k]))
            assert np.array_equal(old[:first], new[:first]) and not np.array_equal(old[first:], new[first:])
        assert new_run(persian, settings(mini, 'lora'), None, base=tmp_path / 'out').step == 0
        size = {kind: checkpoints(done(kind) / 'checkpoints')[-1].stat().st_size for kind in ('rows', 'lora')}
        gpt = sum(v.nbytes for k, v in before.items() if k.startswith('gpt/'))
        assert size['rows'] < size['lora'] < 3 * gpt / 5   # a checkpoint holds what moves, and its moments
    assert Tokenizer.load(tmp_path / 'out/tokenizer.json').languages == ['en', 'fa']

def test_a_cache_of_another_model_is_refused_by_key(mini, base, persian, prepared, tmp_path):
    other, mine = copy(persian), persian.manifest['keys']
    other.manifest = persian.manifest | {'keys': mine | {'codes': 'of another DVAE'}}
    for cache, kind in ((prepared, 'text'), (other, 'codes')):
        with pytest.raises(UserError) as e: new_run(cache, mini, tmp_path / 'run', base=base)
        keys = cache.manifest['keys'][kind], mine[kind]
        assert all(part in str(e.value) for part in (kind, *keys, '--dvae'))
    assert not (tmp_path / 'run').exists()

def test_a_base_that_has_changed_or_gone_is_named(mini, base, persian, tmp_path):
    shutil.copytree(base, tmp_path / 'base')
    new_run(persian, settings(mini, 'lora'), tmp_path / 'run', base=tmp_path / 'base').fit(steps=1)
    with pytest.raises(UserError, match='base as it was then'): new_run(persian, mini, tmp_path / 'run')
    grown = XTTS.load(tmp_path / 'base')
    grown.gpt.final_norm.beta.assign_add(np.ones(64))
    grown.save(tmp_path / 'base')
    with pytest.raises(UserError, match='as it was then'): begin(run=tmp_path / 'run')
    shutil.rmtree(tmp_path / 'base')
    with pytest.raises(UserError, match='which is gone'): begin(run=tmp_path / 'run')

# --- memory ---------------------------------------------------------------------------------------

def test_moving_numbers_are_those_that_move(mini, base, persian):
    config, grown = XTTSConfig.load(base / 'config.yaml'), XTTS.load(base)
    first, last = config.model.gpt.grown_from, grown.tokenizer.size
    for kind in ('whole', 'lora', 'rows'):
        changed = config.replace(training={'gpt': {'finetune': kind}})
        update = make_update(grown.gpt, changed.training.gpt, [(first, last)])
        assert _trainable_count(changed, last - first) == sum(int(np.prod(v.shape)) for v in update.weights)

HALF, EMA = {'precision': 'bfloat16'}, {'ema': 0.5}

@pytest.mark.cpu
@pytest.mark.parametrize('training, changes', [   # bytes for each number of the GPT
    ({}, {}), (HALF, {'copies of weights': 2}), ({'grad_accum_steps': 2}, {'gradients': 8}),
    (EMA, {'mean weights': 4, 'copy for a checkpoint': 20}),
    ({'mode': 'xla'} | EMA, {'mean weights': 4, 'copy for a checkpoint': 20, 'new values': 16})])
def test_the_estimate_by_parts(mini, training, changes):
    "Stored for a number: itself, its gradient, two moments; XLA on a CPU writes them once more."
    config = mini.replace(training={'gpt': {'mode': 'graph'} | training})
    counts, found = parameter_counts(config.model), memory_needs(config, 5, 2)
    wanted = {'weights': 4, 'copies of weights': 0, 'gradients': 4, 'moments': 8, 'mean weights': 0,
              'new values': 0, 'copy for a checkpoint': 12} | changes
    wanted = {name: n * counts['GPT'] for name, n in wanted.items()} | {'program': 2e8}
    for name in 'weights', 'copy for a checkpoint': wanted[name] += 4 * counts['DVAE']
    wanted['activations'] = 4 * _activation_count(config, 5, 2) * config.data.batch_size
    if training == HALF or 'grad_accum_steps' in training: wanted['activations'] /= 2
    assert found == wanted

PLANS = [row | {'card': one['device'], 'gpu': one['capability']}
         for one in recorded('xla_memory', ROOT / 'benchmarks') for row in one['rows']]

@pytest.mark.parametrize('row', PLANS, ids=lambda row: f'{row["name"]}, {row["card"]}')
def test_the_estimate_for_a_gpu_is_close_to_what_xla_plans(row):
    "The plan is that of the gradients; the moments are in memory too, the DVAE and the code are not in it."
    config = XTTSConfig.xtts_v2().replace(model={'gpt': {'num_layers': row['layers']}},
                                          training={'gpt': row['training']}, data={'batch_size': row['rows']})
    needs = memory_needs(config, row['codes'], row['text'], gpu=row['gpu'])
    planned = row['peak'] + needs['moments']
    estimate = sum(needs.values()) - needs['program'] - 4 * parameter_counts(config.model)['DVAE']
    assert estimate / planned >= 1 - _MEMORY_ERROR
    # XLA computes some values twice rather than fill a card
    card = next(c for c in xla_gpu.CARDS.values() if c['name'] == row['card'])
    crowded = row.get('rematerialised') and row['peak'] > 0.7 * card['memory']
    assert crowded or estimate / planned <= 1 + _MEMORY_ERROR

@pytest.fixture
def card(monkeypatch):
    "A GPU that is not there, read by NVML; returns what NVML tells of it."
    told = GPU(0, 'A card', memory_total=8 * 10**9, memory_used=10**9)
    state = SimpleNamespace(cards=[told], limit=None)
    monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind=None: [SimpleNamespace(name='GPU:0')])
    monkeypatch.setattr(tf.config, 'get_logical_device_configuration', lambda gpu: state.limit)
    monkeypatch.setattr(tf.config.experimental, 'get_device_details', lambda gpu: {})
    monkeypatch.setattr(tf.config.experimental, 'get_memory_info', lambda name: {'current': 10**6})
    def cards():
        if isinstance(state.cards, UserError): raise state.cards
        return state.cards
    monkeypatch.setattr(memory, 'visible_cards', cards)
    return state

def test_free_memory_of_a_card(card):
    assert _free_memory() == ('A card', 7 * 10**9)
    # which TensorFlow has reserved already
    card.limit = [tf.config.LogicalDeviceConfiguration(memory_limit=1000)]
    assert _free_memory() == ('GPU 0, limited', 1000 * 2**20 - 10**6)
    # a trial is another process: what this one has reserved is not free for it, nor more than the limit
    assert _free_memory(child=True) == ('A card', 1000 * 2**20) and _memory_budget() == int(.9 * 1000 * 2**20)
    card.cards = [GPU(0, 'A card', memory_total=8 * 10**9, memory_used=8 * 10**9 - 5000)]
    assert _free_memory(child=True) == ('A card', 5000) and _memory_budget() == 4500

@pytest.mark.parametrize('cards, why', [
    (UserError('NVML: Driver Not Loaded; load it'), 'NVML: Driver Not Loaded'), ([], 'knows no card'),
    ([GPU(0, 'A card', memory_used=5)], 'does not report its memory')])
def test_where_the_memory_is_unknown_training_continues_and_says_so(card, mini, cards, why):
    card.cards = cards
    assert why in check_memory(mini, 48, 40)
    with pytest.raises(UserError, match='--memory GB'): _memory_budget()
    assert _memory_budget(10**9) == 10**9

@pytest.mark.cpu
def test_a_container_counts(tmp_path):
    room = lambda: _room_in_container(tmp_path, tmp_path / 'own')
    def write(folder, names, *texts):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in zip(names, texts): (folder / f'memory.{name}').write_text(text)
    second, first = ('max', 'current', 'stat'), ('limit_in_bytes', 'usage_in_bytes', 'stat')
    assert room() == float('inf')
    write(tmp_path, second, '1000\n', '700\n', 'anon 5\ninactive_file 200\n')
    assert room() == 500
    write(tmp_path, second, 'max\n', '700\n', 'anon 5\n')
    assert room() == float('inf')
    for own, group, names in (('0::/a/b\n', 'a', second),   # of a parent
                              ('3:cpu:/x\n4:memory:/c\n', 'memory/c', first)):
        (tmp_path / 'own').write_text(own)
        write(tmp_path / group, names, '90\n', '70\n', 'inactive_file 3\ntotal_inactive_file 5\n')
        assert room() == 25
    device, free = _free_memory()
    assert device == 'this machine' and 0 < free <= psutil.virtual_memory().total

@pytest.fixture(scope='module')
def wide(mini): return mini.replace(data={'batch_size': 12}, training={'gpt': {'mode': 'graph'}})

@pytest.mark.parametrize('first, begin', [   # 99: nothing fits; no estimate fits: the tightest comes first
    (0, 0), (5, 0), (0, 6), (5, 6), (11, 6), (99, 6), (5, 99), (11, 99)])
def test_the_first_choice_that_fits_is_found(wide, monkeypatch, first, begin):
    "Wherever the estimate says to begin: on to the first that fits, or back to the last that does not."
    all_, tried, asked = _memory_settings(wide), [], (20, 12, [(3, 7), (9, 11)], 100 - begin)
    monkeypatch.setattr(memory, 'memory_needs', lambda config, *rest: {
        'all': 100. - all_.index(config), 'copy for a checkpoint': 0.})
    def trial(config, *rest):
        assert rest == asked
        tried.append(all_.index(config))
        return {'seconds': 1., 'peak': 10**9} if tried[-1] >= first else None
    monkeypatch.setattr(memory, '_run_trial', trial)
    if first == 99:   # nothing fits
        with pytest.raises(UserError, match='training.gpt.finetune'): _find_batch_size(wide, *asked)
        return
    found, rows = _find_batch_size(wide, *asked)
    at = min(begin, 11)
    assert tried == [*(range(at, first + 1) if first > at else range(at, max(first - 2, -1), -1))]
    assert found == all_[first] and [row['fits'] for row in rows] == [i >= first for i in tried]

@pytest.mark.slow
@pytest.mark.cpu
def test_a_trial_that_fails_for_another_reason_is_an_error(mini):
    with pytest.raises(UserError, match='trial of an update failed'):
        _run_trial(mini.replace(training={'gpt': {'finetune': 'rows'}}), 20, 12, [(47, 60)])   # absent rows

@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.parametrize('change', [
    {'gradient_checkpointing': True}, {'finetune': 'lora', 'grad_accum_steps': 4}], ids=str)
def test_the_estimate_is_near_what_is_taken(wide, change):
    sized = wide.replace(model={'gpt': {'num_layers': 4, 'max_text_tokens': 150, 'max_audio_codes': 250}},
                         data={'batch_size': 16}, training={'gpt': change})
    needs, begun = memory_needs(sized, 250, 150), time.monotonic()
    took = _run_trial(sized, 250, 150)
    estimate = sum(needs.values()) - needs['copy for a checkpoint']   # a trial saves nothing
    print(change, round(estimate / 1e6), 'MB estimated,', round(took['peak'] / 1e6), 'MB taken')
    assert 0.6 < estimate / took['peak'] < 1.6 and 0 < took['seconds'] < time.monotonic() - begun

# --- rates ----------------------------------------------------------------------------------------

class Valley:
    "A trainer whose loss depends on the rate alone."
    training = GPTTraining()
    def __init__(self, loss): self.loss, self.optimizer, self.steps = loss, type('Optimizer', (), {})(), 0
    def batches(self, first, last): return [{}] * (last - first)
    def train_step(self, batch, number):
        self.steps += 1
        return {'loss': np.float32(self.loss(float(self.optimizer.learning_rate(number))))}

@pytest.mark.parametrize('best', [1e-5, 1e-1])
def test_the_suggestion_lies_below_the_lowest_loss(best, tmp_path):
    "It ends where the mean, as of a plain loop, is more than twice its lowest; a picture is written."
    trainer, told, means, mean, weight = Valley(lambda rate: 1 + np.log10(rate / best)**2), [], [], 0., 0.
    found = find_learning_rate(trainer, high=1e3, steps=100, progress=lambda *done: told.append(done))
    assert best < found['lowest'] < 30 * best   # the mean comes a little late
    assert found['suggestion'] == pytest.approx(found['lowest'] / 10, rel=0.5)
    for rate in 1e-7 * 1e10**(np.arange(100) / 99):
        mean, weight = 0.8 * mean + trainer.loss(rate), 0.8 * weight + 1
        means.append(mean / weight)
        if means[-1] > 2 * min(means): break
    assert found['smooth'] == pytest.approx(means, rel=1e-4)
    assert told == [(n + 1, 100) for n in range(len(means))] and trainer.steps == len(means) < 100
    plot_learning_rate(found, tmp_path / 'rate.png')
    assert (tmp_path / 'rate.png').read_bytes()[1:4] == b'PNG'
    assert json.loads((tmp_path / 'rate.json').read_text()) == found

def test_a_loss_that_is_no_number_ends_the_test():
    trainer = Valley(lambda rate: 1. if rate < 1e-3 else np.nan)
    found = find_learning_rate(trainer, steps=50)
    assert np.isfinite(found['losses']).all() and found['rates'][-1] < 1e-3
    assert trainer.steps == len(found['losses']) + 1
    for fall, said in ((.03, True), (.01, False)):   # nothing is suggested where no rate lowers the loss
        flat = Valley(lambda rate, fall=fall: 1 - fall * (1e-4 < rate < 1e-2))
        assert (find_learning_rate(flat, steps=100)['suggestion'] is not None) == said
    for loss, given in ((np.inf, (1e-7, 1., 50)), (1., (0, 1, 50)), (1., (1, 1, 50)), (1., (1e-5, 1, 9))):
        with pytest.raises(UserError): find_learning_rate(Valley(lambda rate, loss=loss: loss), *given)

@pytest.mark.slow
def test_the_commands(prepared, wide, tmp_path):
    (tmp_path / 'a.yaml').write_text(wide.replace(data={'batch_size': 4}).to_yaml())
    asked = ['--data', prepared.folder, '--config', tmp_path / 'a.yaml']
    rate = xtts_nb('find', 'learning-rate', *asked, '--steps', 12, '--low', '1e-4', '--out',
                   tmp_path / 'r.png', '--json')
    assert rate.code == 0 and rate.json['updates'] <= 12 and rate.json['suggestion'] > 0, rate.err
    assert set(tree(tmp_path)) == {'r.png', 'r.json', 'a.yaml'}
    size = xtts_nb('find', 'batch-size', *asked, '--json')
    assert size.code == 0, size.err
    assert size.json['training']['gpt'] == {'grad_accum_steps': 1, 'gradient_checkpointing': False}, size.err

# --- at full size ---------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.cpu
def test_the_full_size_trains_in_16_gb(corpus, tokenizer, tmp_path):
    "Two updates of all 441 million weights, of one clip as long as any may be. LoRA needs less."
    if psutil.virtual_memory().available < 17e9: pytest.skip('it needs 16 GB of free memory')
    config = XTTSConfig.xtts_v2().replace(data={'batch_size': 1, 'pad_to_fixed_length': True},
                                          training={'gpt': {'steps': 2, 'log_every': 1}})
    encode_corpus(corpus, tmp_path / 'cache', config, DVAE(config), tokenizer)
    (tmp_path / 'run.yaml').write_text(config.to_yaml())
    child = started('train', '--data', tmp_path / 'cache', '--config', tmp_path / 'run.yaml', '--run',
                    tmp_path / 'run', cold=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    said = child.stderr.read().decode()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode, peak = os.waitstatus_to_exitcode(status), used.ru_maxrss * 1024
    print(f'{peak / 1e9:.1f} GB', (tmp_path / 'run' / 'metrics.jsonl').read_text(), sep='\n')
    shutil.rmtree(tmp_path)   # gigabytes
    assert child.returncode == 0 and 5e9 < peak < 16e9, said   # 7 GB are weights, gradients and moments
