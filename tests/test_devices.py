"Who does what: the plan, what TensorFlow is told, and what it kept."
import os
from types import SimpleNamespace

import pytest
import tensorflow as tf

from fake_dvae import Fake
from process import server
from xtts_nb import devices
from xtts_nb.config import UserError, setup_tf
from xtts_nb.data.prepare import encode_corpus
from xtts_nb.devices import (
    _apply_plan, card_memory, card_names, _check_plan, DevicePlan, in_cluster, plan_devices, _plan_two,
    setup_devices)

CARD = 24_000   # MiB
ISOLATED = dict(enable_memory_isolation=True)

@pytest.fixture(autouse=True)
def alone(monkeypatch):
    "No cluster and no stand-ins but those of the test."
    for name in ('TF_CONFIG', 'SLURM_STEP_NUM_TASKS', 'XTTS_NB_CPU_CARDS'):
        monkeypatch.delenv(name, raising=False)

@pytest.mark.parametrize('cards, asked, limits, data, model, part', [
    ([], {}, {}, 'CPU:0', 'CPU:0', (0, 0)), ([CARD, CARD], {}, {0: ()}, 'GPU:0', 'GPU:0', (0, 0)),
    ([CARD, CARD], dict(data_gpu=1, model_gpu=0), {0: (), 1: ()}, 'GPU:1', 'GPU:0', (0, 0)),
    ([CARD] * 4, dict(data_gpu=3, model_gpu=2), {2: (), 3: ()}, 'GPU:1', 'GPU:0', (2, 0)),
    ([CARD] * 4, dict(data_gpu=2), {0: (), 2: ()}, 'GPU:1', 'GPU:0', (0, 0)),
    ([CARD, CARD], ISOLATED, {0: (21_600,), 1: (21_600,)}, 'GPU:0', 'GPU:1', (1, 0)),
    ([CARD, 2 * CARD], dict(data_gpu=0, model_gpu=1, data_gpu_memory=8192), {0: (8192,), 1: (43_200,)},
     'GPU:0', 'GPU:1', (1, 0)),
    ([CARD], ISOLATED, {0: (4800, 16_800)}, 'GPU:0', 'GPU:1', (0, 1)),
    ([None], dict(data_gpu_memory=4000, model_gpu_memory=20_000), {0: (4000, 20_000)},
     'GPU:0', 'GPU:1', (0, 1)),
    ([CARD] * 3, dict(data_gpu=2, model_gpu=1, kind='CPU'), {1: (), 2: ()}, 'CPU:1', 'CPU:0', (1, 0))])
def test_plans(cards, asked, limits, data, model, part):
    plan = plan_devices(cards, **asked)
    assert plan == DevicePlan(limits, data, model) and plan.model_part == part

@pytest.mark.parametrize('cards, asked, words', [
    ([], dict(data_gpu=0, model_gpu=1), 'no GPU'), ([CARD, None], ISOLATED, '`model_gpu_memory`'),
    ([CARD], dict(data_gpu_memory=0), '`data_gpu_memory` 0'),
    ([CARD], dict(data_gpu_memory=12_000, model_gpu_memory=12_001), '12000 \\+ 12001')])
def test_plans_that_cannot_be(cards, asked, words):
    with pytest.raises(UserError, match=words): plan_devices(cards, **asked)

@pytest.mark.parametrize('cards, asked, limits, data, model', [
    ([], {}, {0: (), 1: ()}, 'CPU:0', 'CPU:1'), ([CARD], {}, {0: (4800, 16_800)}, 'GPU:0', 'GPU:1'),
    ([CARD] * 3, {}, {0: (), 1: ()}, 'GPU:0', 'GPU:1'),
    ([CARD] * 3, dict(data_gpu=2), {0: (), 2: ()}, 'GPU:1', 'GPU:0')])
def test_two_devices_in_any_case(cards, asked, limits, data, model):
    assert _plan_two(cards, 'GPU', asked) == DevicePlan(limits, data, model)

@pytest.mark.parametrize('variables, every, read_back', [
    ({}, True, True), ({'TF_CONFIG': '{}'}, False, False), ({'SLURM_STEP_NUM_TASKS': '2'}, False, False)])
def test_a_training_and_a_worker_take_all_cards(variables, every, read_back, monkeypatch):
    "A worker reads nothing back: that would start TensorFlow before its strategy is made."
    read = []
    for name, value in variables.items(): monkeypatch.setenv(name, value)
    for name, fake in {'card_memory': lambda: [CARD] * 2, '_apply_plan': lambda plan: None,
                       '_check_plan': read.append}.items(): monkeypatch.setattr(devices, name, fake)
    assert setup_devices(every=every) == DevicePlan({0: (), 1: ()}, 'GPU:0', 'GPU:0')
    assert bool(read) == read_back == (not in_cluster())
    with pytest.raises(UserError, match='for one machine'): setup_devices(every=every, data_gpu=0)

@pytest.fixture
def gpus(not_started, monkeypatch):
    "Two cards of a TensorFlow that has not started, and does not when it is asked for its logical devices."
    _, cards = not_started(2)
    def logical():
        parts = [n for gpu in tf.config.get_visible_devices('GPU')
                 for n in tf.config.get_logical_device_configuration(gpu) or [None]]
        return [SimpleNamespace(device_type='GPU', name=f'/device:GPU:{i}') for i in range(len(parts))]
    monkeypatch.setattr(tf.config, 'list_logical_devices', logical)
    return cards

def test_limits_are_set_and_read_back(gpus, monkeypatch):
    _apply_plan(plan := plan_devices([CARD], enable_memory_isolation=True))   # one card becomes two devices
    assert _check_plan(plan) == {'GPU 0, MiB': ((4800, 16_800),) * 2,
                                'devices': (('GPU:0', 'GPU:1'), ['GPU:0', 'GPU:1'])}
    assert tf.config.get_visible_devices('GPU') == gpus[:1]   # the other card is left to others
    monkeypatch.setattr(devices, '_tf_started', lambda: True)
    _apply_plan(plan)   # changes nothing
    with pytest.raises(UserError, match='has started before'): _apply_plan(plan_devices([CARD, CARD], 0, 1))
    def full(): raise tf.errors.InternalError(None, None, 'out of memory')
    for fake, words in ((lambda: [], 'not as planned'), (full, 'out of memory.*lower the limits')):
        monkeypatch.setattr(tf.config, 'list_logical_devices', fake)
        with pytest.raises(UserError, match=words): _check_plan(plan)

def test_without_options_one_card_is_taken_and_a_limit_of_the_environment_stays(gpus):
    tf.config.set_logical_device_configuration(gpus[0], [tf.config.LogicalDeviceConfiguration(4096)])
    assert setup_devices().model == 'GPU:0' and tf.config.get_visible_devices('GPU') == gpus[:1]
    (limit,) = tf.config.get_logical_device_configuration(gpus[0])
    assert limit.memory_limit == 4096

@pytest.mark.parametrize('totals, found', [([20, 10], [20, 10]), ([10], [10, None]), ([1, 2, 3], [1, 2])])
def test_there_are_as_many_cards_as_tensorflow_sees(gpus, monkeypatch, totals, found):
    cards = [SimpleNamespace(memory_total=n and n * 2**20 + 7) for n in totals]
    monkeypatch.setattr(devices, 'visible_cards', lambda: cards)
    assert card_memory() == found
    monkeypatch.setenv('XTTS_NB_CPU_CARDS', '2')
    with pytest.raises(UserError, match='2 GPUs are visible'): card_memory()

@pytest.mark.cpu
def test_stand_ins_share_the_memory_and_come_too_late_as_cards_do(monkeypatch):
    "The real TensorFlow, which has started with one CPU."
    tf.constant(0)
    assert card_names() == card_memory() == []
    with pytest.raises(UserError, match='has started before'): setup_devices(two=True)
    monkeypatch.setenv('XTTS_NB_CPU_CARDS', '2')
    room = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(total=11 * 2**20 + 5))
    monkeypatch.setattr(devices, 'psutil', room)
    assert card_memory() == [5, 5]   # whole MiB
    with pytest.raises(UserError, match='has started before'): setup_devices(data_gpu=0, model_gpu=1)

class Telling(Fake):
    "Tells what its worker sees."
    @classmethod
    def load(cls, path, config):
        seen = [d.name.rpartition('device:')[2] for d in tf.config.list_logical_devices()]
        raise UserError(f'{os.environ["CUDA_VISIBLE_DEVICES"]} {os.environ["XTTS_NB_CPU_CARDS"]!r} {seen}')

def test_workers_that_encode_leave_the_cards_alone(corpus, small, tokenizer, tmp_path, monkeypatch):
    server()
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0,1')
    monkeypatch.setenv('XTTS_NB_CPU_CARDS', '2')
    with pytest.raises(UserError) as e:
        encode_corpus(corpus, tmp_path / 'out', small, Telling(), tokenizer, shard_clips=5, workers=1)
    assert str(e.value) == "-1 '' ['CPU:0']"

def precision_of_products() -> bool:
    "Whether XLA is told to multiply float32 in full, in a program that it compiles now."
    product = tf.function(lambda a: tf.matmul(a, a), jit_compile=True)
    program = product.experimental_get_compiler_ir(tf.ones((4, 4)))(stage='hlo')
    assert ' dot(' in program
    return 'operand_precision={highest,highest}' in program

def test_float32_is_float32_where_it_must_be():
    enabled = tf.config.experimental.tensor_float_32_execution_enabled
    with devices._products_in_tf32(True):
        assert setup_tf(threads=2)['TF32'] == (None, True) and not precision_of_products()   # as it was
        with devices._products_in_tf32(False): assert precision_of_products()
        assert enabled() and setup_tf(tf32=False)['TF32'] == (False, False) and precision_of_products()
    before = enabled()
    with pytest.raises(KeyError), devices._products_in_tf32(not before): raise KeyError
    assert enabled() is before
