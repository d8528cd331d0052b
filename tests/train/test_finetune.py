"A run from a finished model: what it accepts, what it keeps, how it resumes, and what it says about memory."
import io
import json
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf

from benchmarks import xla_gpu
from cheap import read_eagerly
from process import COMMAND, environment, xtts_nb
from xtts_nb.bench import recorded
from xtts_nb.train import finetune, step as step_page
from xtts_nb.data.cache import Cache
from xtts_nb.train.trainer import checkpoints
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.devices import DevicePlan
from xtts_nb.files import named_weights, read_tensors, save_weights
from xtts_nb.models.dvae import DVAE
from xtts_nb.train.finetune import (
    activation_count, block_buffers, check_memory, compute_capability, free_memory, gpu_memory, grow,
    MEMORY_ERROR, memory_needs, parameter_counts, run_trial, trainable_count)
from xtts_nb.models.hifigan import HiFiGAN, SpeakerEncoder
from xtts_nb.models.xtts import XTTS
from xtts_nb.data.prepare import prepare
from xtts_nb.train.runs import export_run, new_run, resume_run
from xtts_nb.sampler import GPU

KINDS = 'whole', 'lora', 'rows'
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope='module')
def mini(small):
    "One block, one shape, op by op: nothing to trace."
    return small.replace(model={'gpt': {'layers': 1, 'conditioning_layers': 1}}, data={'buckets': 1},
                         training={'steps': 4, 'warmup_steps': 0, 'schedule': 'constant',
                                   'learning_rate': 1e-2, 'log_every': 2,
                                   'checkpoint_every': 2, 'mode': 'eager'})

@pytest.fixture(scope='module')
def base(mini, dvae, tokenizer, tmp_path_factory):
    "A model that grew by Persian, with a decoder and settings beside the GPT, as a converted one has."
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
    model = XTTS.load(base)
    prepare(folder / 'corpus', folder / 'cache', model.config, model.dvae, model.tokenizer)
    return Cache(folder / 'cache')

def settings(mini, kind): return mini.replace(training={'finetune': kind})

def outcome(run) -> dict:
    return {p.name: p.read_bytes() for p in (run / 'model.safetensors', checkpoints(run / 'checkpoints')[-1])}


# --- three ways -----------------------------------------------------------------------------------

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
@pytest.mark.parametrize('kind', KINDS)
def test_a_stopped_run_goes_on_to_the_bit(done, mini, base, persian, tmp_path, kind):
    new_run(persian, settings(mini, kind), tmp_path / 'run', base=base, feed=read_eagerly).fit(steps=2)
    again = resume_run(tmp_path / 'run', feed=read_eagerly)
    assert again.step == 2 and again.training.finetune == kind
    again.fit()
    assert outcome(tmp_path / 'run') == outcome(done(kind))

@pytest.mark.parametrize('kind', KINDS)
def test_an_export_is_an_ordinary_model(done, base, tmp_path, kind):
    "Only what may move has moved; the decoder and the settings of the base have come along."
    export_run(done(kind), tmp_path / 'out')
    before, after = (dict(read_tensors(folder / 'model.safetensors')) for folder in (base, tmp_path / 'out'))
    assert before.keys() == after.keys() and (tmp_path / 'out' / 'coqui.json').is_file()
    moved = {k for k in before if not np.array_equal(before[k], after[k])}
    assert not any(k.startswith(('dvae/', 'decoder/', 'speaker/')) for k in moved)
    rows = {'gpt/text_embedding/embeddings', 'gpt/text_head/kernel', 'gpt/text_head/bias'}
    if kind == 'lora': assert moved == rows | {'gpt/block_0/qkv/kernel', 'gpt/block_0/project/kernel'}
    if kind == 'whole': assert len(moved) > 20
    if kind == 'rows':
        assert moved == rows
        first = XTTSConfig.load(base / 'config.yaml').model.gpt.grown_from
        for k in moved:
            old, new = (x.T if 'kernel' in k else x for x in (before[k], after[k]))
            assert np.array_equal(old[:first], new[:first]) and not np.array_equal(old[first:], new[first:])
    assert XTTS.load(tmp_path / 'out').tokenizer.languages == ['en', 'fa']

def test_a_checkpoint_holds_what_moves(done):
    size = {kind: checkpoints(done(kind) / 'checkpoints')[-1].stat().st_size for kind in KINDS}
    assert size['rows'] < size['lora'] < size['whole'] / 5
    names = {name for name, _ in read_tensors(checkpoints(done('lora') / 'checkpoints')[-1])}
    assert not any(name.startswith('gpt/') for name in names)
    assert any(name.startswith('lora/') for name in names)

@pytest.mark.slow
def test_an_export_may_begin_the_next_run(done, mini, persian, tmp_path):
    export_run(done('rows'), tmp_path / 'first')
    assert new_run(persian, settings(mini, 'lora'), tmp_path / 'second',
                   base=tmp_path / 'first').fit(steps=1)['steps'] == 1


# --- what fits together ---------------------------------------------------------------------------

def test_a_cache_of_another_model_is_refused_with_both_keys(mini, base, persian, prepared, corpus, dvae,
                                                            tmp_path):
    model = XTTS.load(base)
    mine = persian.manifest['keys']
    with pytest.raises(UserError) as e:
        new_run(prepared, mini, tmp_path / 'run', base=base)   # another tokenizer
    assert all(part in str(e.value)
               for part in ('the text', prepared.manifest['keys']['text'], mine['text'], '--dvae'))
    other = DVAE(mini)
    other.mel_stats.assign(model.dvae.mel_stats.value)
    prepare(corpus, tmp_path / 'other', model.config, other, model.tokenizer)
    with pytest.raises(UserError) as e: new_run(Cache(tmp_path / 'other'), mini, tmp_path / 'run', base=base)
    assert all(part in str(e.value)
               for part in ('the codes', Cache(tmp_path / 'other').manifest['keys']['codes'], mine['codes']))
    assert not (tmp_path / 'run').exists()

def test_a_base_that_has_changed_or_gone_is_named(mini, base, persian, tmp_path):
    shutil.copytree(base, tmp_path / 'base')
    new_run(persian, settings(mini, 'lora'), tmp_path / 'run', base=tmp_path / 'base').fit(steps=1)
    with pytest.raises(UserError, match=r'began from .*base as it was then'):
        new_run(persian, mini, tmp_path / 'run')
    model = XTTS.load(tmp_path / 'base')
    model.gpt.final_norm.beta.assign_add(np.ones(64))
    model.save(tmp_path / 'base')
    with pytest.raises(UserError, match='as it was then; go on from that'): resume_run(tmp_path / 'run')
    shutil.rmtree(tmp_path / 'base')
    with pytest.raises(UserError, match='which is gone; put it back'): resume_run(tmp_path / 'run')


# --- memory ---------------------------------------------------------------------------------------

def test_moving_numbers_are_those_that_move(mini, base, persian):
    config = XTTSConfig.load(base / 'config.yaml')
    model = XTTS.load(base)
    from xtts_nb.train.finetune import make_update
    for kind in KINDS:
        training = config.replace(training={'finetune': kind}).training
        update = make_update(model.gpt, training, [(config.model.gpt.grown_from, model.tokenizer.size)])
        count = sum(int(np.prod(v.shape)) for v in update.weights)
        rows = model.tokenizer.size - config.model.gpt.grown_from
        assert trainable_count(config.replace(training={'finetune': kind}), rows) == count
    assert parameter_counts(config.model)['GPT'] == trainable_count(config)

@pytest.mark.parametrize('training, numbers', [
    ({}, 1850 + 2 * 400), ({'finetune': 'lora'}, 1250 + 2 * 400),
    ({'gradient_checkpointing': True}, (3 * 38 * 64 + 400) + (2 * 32 * 64 + 300) + 50 + 2 * 400),
    ({'gradient_checkpointing': True, 'finetune': 'rows'}, (3 * 38 * 64 + 400) + 50 + 2 * 400)])
def test_what_waits_for_the_backward_pass(mini, monkeypatch, training, numbers):
    "Three blocks of 400 numbers over 4 + 10 + 20 + 4 positions, two layers of 300 over 32 frames."
    monkeypatch.setattr(finetune, 'forward_numbers', lambda config, text, codes: {
        'GPT blocks': 120. * text, 'GPT voice': 600., 'GPT heads': 2.5 * codes})
    config = mini.replace(model={'gpt': {'layers': 3, 'conditioning_layers': 2}}, training=training)
    assert activation_count(config, 20, 10) == numbers

# 1000 numbers, 100 of a DVAE, 4 rows of 7
PLAIN = {'weights': 4400, 'copies of weights': 0, 'gradients': 4000, 'moments': 8000, 'mean weights': 0,
         'written anew': 0, 'copy for a checkpoint': 4 * 1000 + 8000 + 4 * 100, 'program': 2e8,
         'activations': 4 * 4 * 7}
MEANS = 4 * 1000 + 8000 + 4000 + 4400   # the copy, with a model of other weights than the state

@pytest.mark.parametrize('training, cards, other', [
    ({}, 0, {}), ({'precision': 'bfloat16'}, 0, {'copies of weights': 2000, 'activations': 2 * 4 * 7}),
    ({'accumulation': 2}, 0, {'gradients': 8000, 'activations': 4 * 2 * 7}),
    ({'ema': 0.5}, 0, {'mean weights': 4000, 'copy for a checkpoint': MEANS}),
    ({'mode': 'xla', 'ema': 0.5}, 0,
     {'mean weights': 4000, 'written anew': 4000 + 8000 + 4000, 'copy for a checkpoint': MEANS}),
    ({'mode': 'xla'}, 1, {'copies of weights': 8.9, 'activations': 5 * 2, 'copy for a checkpoint': 0}),
    ({'finetune': 'lora', 'lora_rank': 2}, 0,
     {'copies of weights': 16 * 64**2, 'gradients': 4 * 1413, 'moments': 8 * 1413,   # 768 and 645 of the rows
      'copy for a checkpoint': 12 * 1413 + 4400}),
    ({'finetune': 'rows'}, 0, {'gradients': 4 * 645, 'moments': 8 * 645,
                               'copy for a checkpoint': 12 * 645 + 4400})])
def test_the_estimate_by_hand(mini, monkeypatch, training, cards, other):
    monkeypatch.setattr(finetune, 'parameter_counts', lambda model: {'GPT': 1000, 'DVAE': 100})
    monkeypatch.setattr(finetune, 'activation_count', lambda config, codes, text: codes + text)
    monkeypatch.setattr(finetune, 'compute_capability', lambda: 8.9 * cards)
    monkeypatch.setattr(finetune, 'gpu_memory', lambda config, codes, text, gpu: {
        'copies of weights': gpu, 'activations': codes * text})
    config = mini.replace(training={'mode': 'graph'} | training)
    assert memory_needs(config, 5, 2, rows=5) == PLAIN | other

@pytest.mark.cpu
@pytest.mark.parametrize('limit, written', [(15_999, 4000 - 4 * 4 * 7), (16_000, 16_000)])
def test_a_large_update_needs_its_gradients_once_more(mini, monkeypatch, limit, written):
    "Where the activations were, so the estimate has only what they leave."
    monkeypatch.setattr(finetune, 'parameter_counts', lambda model: {'GPT': 1000, 'DVAE': 100})
    monkeypatch.setattr(finetune, 'activation_count', lambda config, codes, text: codes + text)
    monkeypatch.setattr(step_page, 'IN_PLACE', limit)
    config = mini.replace(training={'mode': 'xla', 'ema': 0.5})
    assert memory_needs(config, 5, 2)['written anew'] == written
    config = config.replace(data={'batch_size': 400})   # now the activations are larger
    assert memory_needs(config, 5, 2)['written anew'] == (0 if written < 16_000 else written)

PLANS = [row | {'card': one['device'], 'gpu': one['capability']}
         for one in recorded('xla_memory', ROOT / 'benchmarks') for row in one['rows']]

@pytest.mark.parametrize('row', PLANS, ids=lambda row: f'{row["name"]}, {row["card"]}')
def test_the_estimate_for_a_gpu_is_close_to_what_xla_plans(row):
    "The plan is that of the gradients; the moments are beside it, the DVAE and the code are not in it."
    config = XTTSConfig.xtts_v2().replace(model={'gpt': {'layers': row['layers']}},
                                          training=row['training'], data={'batch_size': row['rows']})
    needs = memory_needs(config, row['codes'], row['text'], gpu=row['gpu'])
    planned = row['peak'] + needs['moments']
    estimate = sum(needs.values()) - needs['program'] - 4 * parameter_counts(config.model)['DVAE']
    assert estimate / planned >= 1 - MEMORY_ERROR
    # XLA computes some values twice rather than fill a card
    card = next(c for c in xla_gpu.CARDS.values() if c['name'] == row['card'])
    crowded = row.get('rematerialised') and row['peak'] > 0.7 * card['memory']
    assert crowded or estimate / planned <= 1 + MEMORY_ERROR

@pytest.fixture
def block(mini):
    "Of two clips, 4 + 2 + 5 + 4 positions, 64 wide, 4 heads, three layers: bytes of (states, scores)."
    config = mini.replace(model={'gpt': {'layers': 3, 'heads': 4, 'dropout': 0.1}}, data={'batch_size': 2})
    gpt = config.model.gpt
    length = gpt.prompt_latents + 2 + 5 + 4
    return config, length, 2. * length * gpt.width, 2. * gpt.heads * length**2

@pytest.mark.parametrize('precision, gpu, states, scores', [
    ('float32', 8.6, 8 + 6 * 4 + 2 * 16 + 2, 2 * 4 + 1), ('bfloat16', 8.6, 8 + 6 * 2 + 2 * 8 + 2, 2 * 2 + 1),
    ('bfloat16', 9., 8 * 2 + 3 * 8 + 2, 4 + 2 + 1)])
def test_what_a_block_holds_on_a_gpu(block, precision, gpu, states, scores):
    "Bytes for a number of the states and one of the scores; with an adapter no input of the MLP's products."
    config, length, state, score = block
    for kind, less in (('whole', 0), ('lora', 5 * (4 if precision == 'float32' else 2))):
        held = block_buffers(config.replace(training={'precision': precision, 'finetune': kind}), length, gpu)
        assert sum(n * many for n, many in held) == (states - less) * state + scores * score

def test_places_of_gradients_hold_what_fits(block, monkeypatch):
    "Twelve places of 16, 12 and 4 times the square of the width, one value each; the larger go first."
    config, square = block[0], 64.**2
    sizes = [('activations', 16, 4), ('activations', 13, 1), ('activations', 17, 1),
             ('copies of weights', 8, 6), ('copies of weights', 2, 3)]
    monkeypatch.setattr(finetune, 'kept_for_backward',
                        lambda *_: [(purpose, n * square, many) for purpose, n, many in sizes])
    total = gpu_memory(config, 5, 2, 8.9)
    assert total == {'activations': 17 * square, 'copies of weights': (6 - 4) * 8 * square}
    adapters = gpu_memory(config.replace(training={'finetune': 'lora'}), 5, 2, 8.9)   # hardly any gradient
    assert adapters == {'activations': 94 * square, 'copies of weights': 54 * square}

@pytest.mark.parametrize('cards, details, said', [([], {}, 0), (['a'], {}, 8.),
                                                  (['a', 'b'], {'compute_capability': (9, 0)}, 9.)])
def test_the_compute_capability_is_that_of_the_first_card(monkeypatch, cards, details, said):
    monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind: cards)
    monkeypatch.setattr(tf.config.experimental, 'get_device_details', lambda card: {'a': details}[card])
    assert compute_capability() == said

@pytest.mark.parametrize('room, said', [
    (None, '; what is free is unknown on a card, so nothing was compared.'),
    (2.199e9, '; 2.2 GB are free on a card, which may not'),
    (2.2e9, '; 2.2 GB are free on a card.'),
    (1.2e9, '; 1.2 GB are free on a card, which may not suffice: xtts-nb train --fit'),
    (1.199e9, UserError)])
def test_the_message_about_memory(mini, monkeypatch, room, said):
    "Parts of less than 50 MB are not listed."
    needs = {'weights': 1.11e9, 'moments': 4e7, 'program': 5e7, 'activations': 1e9,
             'copy for a checkpoint': 0}
    monkeypatch.setattr(finetune, 'memory_needs', lambda *_: needs)
    begin = 'Training needs about 2.2 GB (weights 1.1, program 0.1, activations 1.0)'
    say = lambda kind: check_memory(mini.replace(training={'finetune': kind}), 48, 40, free=('a card', room))
    if said is not UserError: assert say('whole').startswith(begin + said)
    else:
        for kind, less in (('whole', 'training.finetune lora'), ('lora', 'a larger machine')):
            message = f'1.2 GB are free on a card, which cannot suffice; use {less}'
            with pytest.raises(UserError, match=message): say(kind)

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
    monkeypatch.setattr(finetune, 'visible_cards', cards)
    return state

def test_free_memory_of_a_card(card):
    assert free_memory() == ('A card', 7 * 10**9)
    # which TensorFlow has reserved already
    card.limit = [tf.config.LogicalDeviceConfiguration(memory_limit=1000)]
    assert free_memory() == ('GPU 0, limited', 1000 * 2**20 - 10**6)
    # a trial is another process: what this one has reserved is not free for it, nor more than the limit
    assert free_memory(child=True) == ('A card', 1000 * 2**20)
    assert finetune.memory_budget() == int(.9 * 1000 * 2**20)
    card.cards = [GPU(0, 'A card', memory_total=8 * 10**9, memory_used=8 * 10**9 - 5000)]
    assert free_memory(child=True) == ('A card', 5000) and finetune.memory_budget() == 4500

def test_free_memory_of_the_part_of_the_card_that_trains(card, monkeypatch):
    "The second part of the second card, which TensorFlow calls GPU:2."
    asked, part = [], lambda mib: tf.config.LogicalDeviceConfiguration(memory_limit=mib)
    monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind: ['one', 'two'])
    monkeypatch.setattr(tf.config, 'get_logical_device_configuration',
                        {'one': [part(9)], 'two': [part(50), part(70)]}.get)
    monkeypatch.setattr(tf.config.experimental, 'get_memory_info',
                        lambda name: asked.append(name) or {'current': 10**6})
    plan = DevicePlan({0: (9,), 1: (50, 70)}, 'GPU:1', 'GPU:2')
    assert free_memory(plan) == ('GPU 1, limited', 70 * 2**20 - 10**6)
    assert free_memory()[1] == 9 * 2**20 - 10**6 and asked == ['GPU:2', 'GPU:0']

@pytest.mark.parametrize('cards, why', [
    (UserError('NVML: Driver Not Loaded; load it'), 'GPU 0 (NVML: Driver Not Loaded)'),
    ([], 'NVML knows no card of this name'),
    ([GPU(0, 'A card', memory_used=5)], 'A card (NVML does not tell its memory)')])
def test_where_the_memory_is_unknown_training_goes_on_and_says_so(card, mini, cards, why):
    card.cards = cards
    line = check_memory(mini, 48, 40)
    assert 'what is free is unknown on' in line and why in line and 'nothing was compared' in line
    with pytest.raises(UserError, match='cannot be read; say how much to use: .* --memory GB'):
        finetune.memory_budget()
    assert finetune.memory_budget(10**9) == 10**9

@pytest.mark.cpu
def test_a_container_counts(tmp_path):
    room = lambda: finetune._room_in_container(tmp_path, tmp_path / 'own')
    assert room() == float('inf')
    for name, text in (('max', '1000\n'), ('current', '700\n'), ('stat', 'anon 5\ninactive_file 200\n')):
        (tmp_path / f'memory.{name}').write_text(text)
    assert room() == 500
    (tmp_path / 'memory.stat').write_text('anon 5\n')
    assert room() == 300
    (tmp_path / 'memory.max').write_text('max\n')
    assert room() == float('inf')
    second, first = ('max', 'current', 'stat'), ('limit_in_bytes', 'usage_in_bytes', 'stat')
    for own, group, names in (('0::/a/b\n', 'a', second),   # of a parent
                              ('3:cpu:/x\n4:memory:/c\n', 'memory/c', first)):
        (tmp_path / 'own').write_text(own)
        (tmp_path / group).mkdir(parents=True)
        for name, text in zip(names, ('90\n', '70\n', 'inactive_file 3\ntotal_inactive_file 5\n')):
            (tmp_path / group / f'memory.{name}').write_text(text)
        assert room() == 25
    device, free = free_memory()
    assert device == 'this machine' and 0 < free <= psutil.virtual_memory().total

@pytest.mark.cpu
def test_the_trial_gets_what_is_given_else_nine_tenths_of_the_free(monkeypatch):
    monkeypatch.setattr(finetune, '_room_in_container', lambda: 1000.)
    assert free_memory() == ('this machine', 1000)
    assert finetune.memory_budget() == 900 and finetune.memory_budget(1234) == 1234

def test_the_limit_of_a_trial(monkeypatch):
    "Of the first card, or what this process may write to besides what it has."
    set_, cards = [], ['one', 'two']
    status = 'Name:\tpython\nVmHWM:\t   12 kB\nVmData:\t   34 kB\nThreads:\t1\n'
    monkeypatch.setattr(finetune, 'Path', lambda path: SimpleNamespace(read_text=lambda encoding: status))
    monkeypatch.setattr(resource, 'setrlimit', lambda *given: set_.append(given))
    monkeypatch.setattr(resource, 'getrlimit', lambda kind: (1, 99))
    monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind: cards)
    monkeypatch.setattr(tf.config, 'set_visible_devices', lambda *given: set_.append(given))
    monkeypatch.setattr(tf.config, 'set_logical_device_configuration', lambda *given: set_.append(given))
    finetune.limit_memory(5 * 2**20 + 7)
    assert set_ == [(['one'], 'GPU'), ('one', [tf.config.LogicalDeviceConfiguration(memory_limit=5)])]
    cards.clear()
    set_.clear()
    finetune.limit_memory(1000)
    assert set_ == [(resource.RLIMIT_DATA, (34 * 1024 + 1000, 99))] and finetune._status('VmHWM') == 12 * 1024

@pytest.mark.parametrize('cards, peak', [([], 250), (['GPU:0'], 77)])
def test_a_trial_is_two_updates_and_tells_of_the_second(mini, monkeypatch, capsys, cards, peak):
    took, noted, now = iter([5., 0.12345, 9.]), [], [100.]
    def step(batch, number):
        now[0] += next(took)
        noted.append(int(number))
        return {'loss': tf.constant(1.)}
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=100))
    for name, fake in {'setup_tf': lambda **asked: noted.append(asked), 'limit_memory': noted.append,
                       'time': clock,
                       'GPT': lambda *_, **__: None, 'make_update': lambda gpt, training, runs: runs,
                       'compile_step': lambda update, training: noted.append(update) or step,
                       '_status': {'VmHWM': 350}.get,
                       'random_batch': lambda config, *shape: noted.append(shape),
                       'psutil': SimpleNamespace(Process=lambda: process)}.items():
        monkeypatch.setattr(finetune, name, fake)
    monkeypatch.setattr(tf.config, 'list_logical_devices', lambda kind: cards)
    monkeypatch.setattr(tf.config.experimental, 'get_memory_info', lambda name: {'peak': 77})
    asked = {'config': mini.model_dump(), 'shape': (12, 20), 'runs': [[3, 4]], 'memory': 10**9}
    monkeypatch.setattr(sys, 'stdin', io.StringIO(json.dumps(asked)))
    finetune.trial()
    assert noted == [{'memory_growth': False}, 10**9, [[3, 4]], (12, 20), 0, 1]
    assert json.loads(capsys.readouterr().out) == {'seconds': 0.123, 'peak': peak}
    for error in (MemoryError, tf.errors.ResourceExhaustedError(None, None, 'OOM')):
        monkeypatch.setattr(finetune, 'GPT', Mock(side_effect=error))
        monkeypatch.setattr(sys, 'stdin', io.StringIO(json.dumps(asked)))
        with pytest.raises(SystemExit) as e: finetune.trial()
        assert e.value.code == finetune.OUT_OF_MEMORY

@pytest.mark.parametrize('code, out, err, found', [
    (0, 'a word\n{"peak": 5}\n', '', {'peak': 5}), (finetune.OUT_OF_MEMORY, '', 'OOM', None),
    *((-number, '', '', None) for number in (6, 7, 9, 11)),   # as allocations fail
    (-2, '', '', r'failed \(SIGINT; no message\)'), (-15, '', 'bye\n', r'failed \(SIGTERM; bye\)'),
    (-4, '', '', 'SIGILL'), (-8, '', '', 'SIGFPE'),
    (1, '', 'first\nsecond\nlast words\n', r'failed \(last words\)'), (2, '', '', r'failed \(no message\)')])
def test_what_a_trial_comes_to(mini, monkeypatch, code, out, err, found):
    def run(command, input, **how):
        assert how == {'capture_output': True, 'text': True} and command[0] == sys.executable
        assert json.loads(input) == {'config': json.loads(json.dumps(mini.model_dump())), 'shape': [12, 20],
                                     'runs': [], 'memory': 77}
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)
    monkeypatch.setattr(subprocess, 'run', run)
    if not isinstance(found, str): assert run_trial(mini, 20, 12, [], 77) == found
    else: pytest.raises(UserError, run_trial, mini, 20, 12, [], 77).match(found)

@pytest.mark.slow
def test_a_trial_that_fails_for_another_reason_says_which(mini):
    with pytest.raises(UserError, match='trial of an update failed'):
        run_trial(mini.replace(training={'finetune': 'rows'}), 20, 12, [(47, 60)])   # rows that are not there


# --- the command ----------------------------------------------------------------------------------

@pytest.mark.slow
def test_train_from_a_model(base, persian, mini, tmp_path):
    own = mini.replace(training={'steps': 2}).model_dump(mode='json')
    del own['model']   # that of the base
    (tmp_path / 'run.yaml').write_text(json.dumps(own))
    asked = ['train', '--data', persian.folder, '--config', tmp_path / 'run.yaml', '--run', tmp_path / 'run',
             '--finetune', 'rows']
    refused = xtts_nb(*asked)
    assert refused.code == 2 and 'needs a model to begin from' in refused.err
    assert not (tmp_path / 'run').exists()
    made = xtts_nb(*asked, '--model', base, '--json')
    assert made.code == 0 and made.json['steps'] == 2, made.err
    assert 'Training needs about' in made.err
    assert json.loads((tmp_path / 'run' / 'run.json').read_text())['base'] == str(base)
    more = xtts_nb('train', '--run', tmp_path / 'run', '--steps', 3, '--json')
    assert more.code == 0 and more.json['steps'] == 3, more.err


# --- at full size ---------------------------------------------------------------------------------

def watched(command, most: float) -> tuple[int, float, str]:
    "Exit code, most memory ever held in GB, stderr; ended beyond `most` GB."
    child = subprocess.Popen([str(c) for c in command], env=environment(), stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE,
                             text=True)
    said, peak, status = [], 0., Path(f'/proc/{child.pid}/status')
    reader = threading.Thread(target=lambda: said.extend(child.stderr))
    reader.start()
    while child.poll() is None:
        lines = [line.split() for line in status.read_text().splitlines()] if status.exists() else []
        peak = max([peak, *(int(line[1]) * 1024 / 1e9 for line in lines if line and line[0] == 'VmHWM:')])
        if peak > most: child.kill()
        time.sleep(0.1)
    reader.join()
    return child.returncode, peak, ''.join(said)

MAKE = """
import json, sys
from pathlib import Path
import keras
from tokenizers import Tokenizer as BPE
from xtts_nb.config import XTTSConfig, setup_tf
setup_tf()
from xtts_nb.models.hifigan import HiFiGAN, SpeakerEncoder
from xtts_nb.models.xtts import XTTS
from xtts_nb.data.prepare import prepare
from xtts_nb.data.text import Tokenizer
from xtts_nb.files import named_weights, save_weights
corpus, folder = map(Path, sys.argv[1:])
small = Tokenizer.load(folder / 'small.json')
values = json.loads(small.bpe.to_str())
values['model']['vocab'] |= {f'<{i}>': i for i in range(small.size, 6681)}
keras.utils.set_random_seed(0)
model = XTTS(XTTSConfig.xtts_v2(), Tokenizer(BPE.from_str(json.dumps(values)), 'xtts'))
model.save(folder / 'base')
nets = {'decoder': HiFiGAN(model.config), 'speaker': SpeakerEncoder(model.config)}
voice = {f'{part}/{k}': v for part, net in nets.items()
         for k, v in named_weights(net).items()}
save_weights(folder / 'base' / 'model.safetensors', model.weights | voice)
prepare(corpus, folder / 'cache', model.config, model.dvae, model.tokenizer)
"""

@pytest.fixture(scope='module')
def full(corpus, tokenizer, tmp_path_factory):
    """A model of 441 million numbers with random weights, and a cache for it; skips where there is no
    room for that."""
    pytest.importorskip('torch', reason='files of coqui-tts are written by PyTorch')
    if psutil.virtual_memory().available < 17e9:
        pytest.skip('training at full size needs 16 GB of free memory')
    folder = tmp_path_factory.mktemp('full')
    tokenizer.save(folder / 'small.json')
    subprocess.run([sys.executable, '-c', MAKE, corpus, folder], check=True, env=environment())
    yield folder
    shutil.rmtree(folder)   # gigabytes

@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.torch
def test_the_full_size_trains_in_16_gb_and_goes_to_coqui(full, tmp_path, record_property):
    """Three updates of all weights, of one clip as long as any may be; then files that coqui-tts loads,
    every tensor in its place. LoRA needs less, and is trained at other sizes."""
    from xtts_nb.models.convert import read_pth, to_coqui
    config = XTTSConfig.xtts_v2().replace(data={'batch_size': 1, 'pad_to_fixed_length': True},
                                          training={'steps': 3, 'log_every': 1})
    (tmp_path / 'run.yaml').write_text(config.to_yaml())
    code, peak, said = watched([*COMMAND, 'train', '--data', full / 'cache', '--model', full / 'base',
                                '--run',
                                tmp_path / 'run',
                                '--config', tmp_path / 'run.yaml'], most=16)
    record_property('peak_gb', peak)
    assert code == 0 and peak < 16, f'{peak:.1f} GB; {said}'
    print(f'{peak:.1f} GB', *(tmp_path / 'run' / 'metrics.jsonl').read_text().splitlines(), sep='\n')
    to_coqui(tmp_path / 'run', tmp_path / 'coqui')
    names = read_pth(tmp_path / 'coqui' / 'model.pth')['model']
    assert len(names) > 900 and names['gpt.gpt.h.29.attn.c_attn.weight'].shape == (1024, 3072)
    shutil.rmtree(tmp_path)   # gigabytes
