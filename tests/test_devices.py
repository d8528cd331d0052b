"Who does what: the plan, what TensorFlow is told, and what it kept."
import os
from types import SimpleNamespace

import pytest
import tensorflow as tf

from fake_dvae import Fake
from process import server
from xtts_nb import devices
from xtts_nb.config import UserError, setup_tf
from xtts_nb.devices import (DevicePlan, apply_plan, card_memory, card_names, check_plan, plan_devices,
                             setup_devices)
from xtts_nb.data.prepare import prepare

CARD = 24_000   # MiB


@pytest.mark.parametrize('cards, asked, limits, data, model', [
    ([], {}, {}, 'CPU:0', 'CPU:0'),
    ([CARD], {}, {0: ()}, 'GPU:0', 'GPU:0'),
    ([CARD, CARD], {}, {0: ()}, 'GPU:0', 'GPU:0'),
    ([CARD, CARD], dict(data_gpu=0, model_gpu=1), {0: (), 1: ()}, 'GPU:0', 'GPU:1'),
    ([CARD, CARD], dict(data_gpu=1, model_gpu=0), {0: (), 1: ()}, 'GPU:1', 'GPU:0'),
    ([CARD] * 4, dict(data_gpu=3, model_gpu=2), {2: (), 3: ()}, 'GPU:1', 'GPU:0'),
    ([CARD] * 4, dict(data_gpu=2), {0: (), 2: ()}, 'GPU:1', 'GPU:0'),
    ([CARD] * 4, dict(model_gpu=0), {0: (), 1: ()}, 'GPU:1', 'GPU:0'),
    ([CARD, CARD], dict(isolate=True), {0: (21_600,), 1: (21_600,)}, 'GPU:0', 'GPU:1'),
    ([CARD, 2 * CARD], dict(data_gpu=0, model_gpu=1, data_memory=8192), {0: (8192,), 1: (43_200,)}, 'GPU:0',
     'GPU:1'),
    ([CARD], dict(isolate=True), {0: (4800, 16_800)}, 'GPU:0', 'GPU:1'),
    ([CARD], dict(data_memory=4000, model_memory=20_000), {0: (4000, 20_000)}, 'GPU:0', 'GPU:1'),
    ([None], dict(data_memory=4000, model_memory=20_000), {0: (4000, 20_000)}, 'GPU:0', 'GPU:1'),
    ([CARD, CARD], dict(model_memory=1), {0: (21_600,), 1: (1,)}, 'GPU:0', 'GPU:1'),
    ([CARD] * 3, dict(data_gpu=2, model_gpu=1, kind='CPU'), {1: (), 2: ()}, 'CPU:1', 'CPU:0'),
    ([CARD], dict(isolate=True, kind='CPU'), {0: (4800, 16_800)}, 'CPU:0', 'CPU:1')])
def test_plans(cards, asked, limits, data, model):
    assert plan_devices(cards, **asked) == DevicePlan(limits, data, model)

@pytest.mark.parametrize('cards, asked, words', [
    ([CARD, CARD], dict(data_gpu=1, model_gpu=1), ['both 1', 'two different']),
    ([], dict(data_gpu=0, model_gpu=0), ['both 0']),
    ([CARD, CARD], dict(data_gpu=0, model_gpu=2), ['--model-gpu 2', 'no such GPU', '0 to 1']),
    ([CARD, CARD], dict(data_gpu=-1), ['--data-gpu -1', 'no such GPU']),
    ([CARD], dict(data_gpu=0, model_gpu=1), ['--model-gpu 1', 'no such GPU', 'leave']),
    ([CARD], dict(data_gpu=0), ['one GPU', '--enable-memory-isolation']),
    ([], dict(data_gpu=0, model_gpu=1), ['no GPU', 'leave both out']),
    ([], dict(data_gpu=0), ['no GPU', 'leave both out']),
    ([CARD, None], dict(isolate=True), ['of GPU 1', '--model-gpu-memory']),
    ([], dict(isolate=True), ['CPU takes no memory limit']),
    ([], dict(data_memory=100), ['CPU takes no memory limit']),
    ([CARD, CARD], dict(isolate=True, model_memory=CARD + 1), ['GPU 1', '24001', '24000 MiB', 'lower']),
    ([CARD], dict(data_memory=12_000, model_memory=12_001), ['12000 + 12001', 'lower']),
    ([CARD], dict(data_memory=0), ['--data-gpu-memory 0', 'at least']),
    ([None, None], dict(isolate=True), ['cannot be read', '--data-gpu-memory'])])
def test_plans_that_cannot_be(cards, asked, words):
    with pytest.raises(UserError) as e: plan_devices(cards, **asked)
    assert all(word in str(e.value) for word in words)


@pytest.mark.parametrize('plan, place', [
    (DevicePlan({}, 'CPU:0', 'CPU:0'), (0, 0)), (DevicePlan({0: (), 1: ()}, 'GPU:0', 'GPU:1'), (1, 0)),
    (DevicePlan({2: (), 3: ()}, 'GPU:1', 'GPU:0'), (2, 0)),
    (DevicePlan({0: (4800, 16_800)}, 'GPU:0', 'GPU:1'), (0, 1)),
    (DevicePlan({1: (8000,), 3: (9000,)}, 'GPU:0', 'GPU:1'), (3, 0))])
def test_the_card_that_trains(plan, place): assert plan.model_part == place


@pytest.mark.parametrize('cards, asked, limits, data, model', [
    ([], {}, {0: (), 1: ()}, 'CPU:0', 'CPU:1'), ([CARD], {}, {0: (4800, 16_800)}, 'GPU:0', 'GPU:1'),
    ([CARD] * 2, {}, {0: (), 1: ()}, 'GPU:0', 'GPU:1'),
    ([CARD] * 3, dict(model_gpu=0), {0: (), 1: ()}, 'GPU:1', 'GPU:0'),
    ([CARD] * 3, dict(data_gpu=2), {0: (), 2: ()}, 'GPU:1', 'GPU:0'),
    ([CARD] * 3, dict(isolate=True), {0: (21_600,), 1: (21_600,)}, 'GPU:0', 'GPU:1')])
def test_two_devices_in_any_case(cards, asked, limits, data, model, monkeypatch):
    plan = DevicePlan(limits, data, model)
    assert devices._plan_two(cards, 'GPU', asked) == plan
    applied = []
    monkeypatch.delenv('TF_CONFIG', raising=False)
    for name, fake in {'card_memory': lambda: cards, 'apply_plan': applied.append,
                       'check_plan': applied.append}.items():
        monkeypatch.setattr(devices, name, fake)
    assert setup_devices(two=True, **asked) == plan and applied == [plan] * 2   # set up, and read back

def test_two_devices_that_cannot_be():
    pytest.raises(UserError, devices._plan_two, [], 'CPU', {'isolate': True}).match('takes no memory limit')
    pytest.raises(UserError, devices._plan_two, [CARD], 'GPU', {'data_gpu': 0}).match('sees one GPU')

@pytest.fixture
def gpus(monkeypatch):
    "TensorFlow's device functions with two simulated GPUs, before it starts; returns their arguments."
    monkeypatch.delenv('XTTS_NB_CPU_CARDS', raising=False)
    monkeypatch.setattr(devices, 'tf_started', lambda: False)
    told, config = {}, tf.config
    cards = [tf.config.PhysicalDevice(f'/physical_device:GPU:{i}', 'GPU') for i in range(2)]
    def logical():
        parts = [n for gpu in told.get('visible', cards) for n in told.get(gpu.name) or [None]]
        return [SimpleNamespace(device_type='GPU', name=f'/device:GPU:{i}') for i in range(len(parts))]
    for name, f in {'list_physical_devices': lambda kind: cards, 'list_logical_devices': logical,
                    'get_visible_devices': lambda kind: told.get('visible', cards),
                    'set_visible_devices': lambda some, kind: told.update(visible=some),
                    'set_logical_device_configuration': lambda gpu, parts: told.update({gpu.name: parts}),
                    'get_logical_device_configuration': lambda gpu: told.get(gpu.name)}.items():
        monkeypatch.setattr(config, name, f)
    return told

def told_and_read(plan) -> dict:
    apply_plan(plan)
    return check_plan(plan)

def test_limits_are_set_and_read_back(gpus):
    got = told_and_read(plan_devices([CARD, CARD], 1, 0, data_memory=8000, model_memory=20_000))
    assert got == {'GPU 1, MiB': ((8000,), (8000,)), 'GPU 0, MiB': ((20_000,), (20_000,)),
                   'devices': (('GPU:1', 'GPU:0'), ['GPU:0', 'GPU:1'])}

def test_one_card_becomes_two_devices(gpus):
    got = told_and_read(plan_devices([CARD], isolate=True))
    assert got['GPU 0, MiB'] == ((4800, 16_800),) * 2 and got['devices'][1] == ['GPU:0', 'GPU:1']
    assert [gpu.name[-1] for gpu in gpus['visible']] == ['0']   # the other card is left to others

def test_without_options_one_card_is_taken_and_a_limit_of_the_environment_stays(gpus):
    gpus['/physical_device:GPU:0'] = [tf.config.LogicalDeviceConfiguration(memory_limit=4096)]
    assert setup_devices().model == 'GPU:0' and [gpu.name[-1] for gpu in gpus['visible']] == ['0']

def test_a_device_that_did_not_come_is_named(gpus, monkeypatch):
    monkeypatch.setattr(tf.config, 'list_logical_devices',
                        lambda: [SimpleNamespace(device_type='GPU', name='GPU:0')])
    with pytest.raises(UserError, match='has the devices GPU:0, not as planned'):
        told_and_read(plan_devices([CARD, CARD], 0, 1))

def test_logical_cpu_devices_take_no_limits(monkeypatch):
    cpu, logical = tf.config.list_physical_devices('CPU')[0], tf.config.LogicalDeviceConfiguration()
    assert devices._wanted(DevicePlan({0: (), 1: (5, 6)}, 'CPU:0', 'CPU:2')) == ([], {cpu: [logical] * 3})
    assert devices._wanted(DevicePlan({}, 'CPU:0', 'CPU:0')) == ([], {})
    two = [SimpleNamespace(device_type='CPU', name=f'/device:CPU:{i}') for i in range(2)]
    monkeypatch.setattr(tf.config, 'list_logical_devices',
                        lambda kind=None: two if kind in (None, 'CPU') else [])
    monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind: [])
    found = check_plan(DevicePlan({0: (5, 6)}, 'CPU:0', 'CPU:1'))
    assert found == {'devices': (('CPU:0', 'CPU:1'), ['CPU:0', 'CPU:1'])}
    assert card_names() == []
    monkeypatch.setenv('XTTS_NB_CPU_CARDS', '2')
    assert card_names() == ['CPU:0', 'CPU:1']

@pytest.mark.parametrize('cards', [0, 2])
def test_stand_ins_share_the_memory_and_a_worker_takes_them_all(monkeypatch, cards):
    monkeypatch.setenv('TF_CONFIG', '{}')
    monkeypatch.setenv('XTTS_NB_CPU_CARDS', str(cards) if cards else '')
    monkeypatch.setattr(devices, 'psutil',
                        SimpleNamespace(virtual_memory=lambda: SimpleNamespace(total=11 * 2**20 + 5)))
    monkeypatch.setattr(tf.config, 'list_physical_devices', lambda kind: [])
    monkeypatch.setattr(devices, 'visible_cards', lambda: pytest.fail('there is no GPU to ask'))
    monkeypatch.setattr(devices, 'check_plan',
                        lambda plan: pytest.fail('other workers are awaited before devices are read'))
    monkeypatch.setattr(devices, 'apply_plan', lambda plan: None)
    assert str(card_memory()) == str([5] * cards)   # whole MiB
    assert setup_devices() == DevicePlan({i: () for i in range(cards)}, 'CPU:0', 'CPU:0')

def test_what_tensorflow_refuses_is_a_sentence(gpus, monkeypatch):
    def full(): raise tf.errors.InternalError(None, None, 'out of memory')
    monkeypatch.setattr(tf.config, 'list_logical_devices', full)
    with pytest.raises(UserError, match='out of memory.*lower the limits'):
        told_and_read(plan_devices([CARD], isolate=True))

def test_a_plan_that_comes_too_late_is_refused_and_one_that_changes_nothing_is_not(gpus, monkeypatch):
    apply_plan(plan_devices([CARD, CARD], 0, 1))
    monkeypatch.setattr(devices, 'tf_started', lambda: True)
    apply_plan(plan_devices([CARD, CARD], 0, 1))
    with pytest.raises(UserError, match='has started before its devices were set up'):
        apply_plan(plan_devices([CARD, CARD]))
    with pytest.raises(UserError, match='before anything is computed'):
        apply_plan(plan_devices([CARD, CARD], 0, 1, isolate=True))

def test_a_worker_takes_all_its_cards_and_no_device_for_data(gpus, monkeypatch):
    monkeypatch.setenv('TF_CONFIG', '{}')
    assert setup_devices() == DevicePlan({0: (), 1: ()}, 'GPU:0', 'GPU:0')
    with pytest.raises(UserError, match='are for one machine; leave them out'): setup_devices(data_gpu=0)

@pytest.mark.parametrize('totals, found', [([20, 10], [20, 10]), ([10], [10, None]), ([None, 20], [None, 20]),
                                           ([1, 2, 3], [1, 2])])
def test_there_are_as_many_cards_as_tensorflow_sees(gpus, monkeypatch, totals, found):
    cards = [SimpleNamespace(memory_total=n and n * 2**20 + 7) for n in totals]
    monkeypatch.setattr(devices, 'visible_cards', lambda: cards)
    assert card_memory() == found

def test_gpus_and_their_stand_ins_exclude_each_other(gpus, monkeypatch):
    monkeypatch.setenv('XTTS_NB_CPU_CARDS', '2')
    with pytest.raises(UserError, match='2 GPUs are visible; hide them with CUDA_VISIBLE_DEVICES=-1'):
        card_memory()

def test_stand_ins_come_too_late_as_cards_do(monkeypatch):
    "The real TensorFlow, which has started with one CPU."
    tf.constant(0)
    with pytest.raises(UserError, match='has started before'): setup_devices(two=True)
    monkeypatch.setenv('XTTS_NB_CPU_CARDS', '2')
    for asked in ({}, dict(data_gpu=0, model_gpu=1), dict(isolate=True)):
        with pytest.raises(UserError, match='has started before'): setup_devices(**asked)


# --- processes that encode clips ------------------------------------------------------------------

def tell(path, config):
    "Called in a worker in the place of loading a DVAE."
    seen = [d.name.rpartition('device:')[2] for d in tf.config.list_logical_devices()]
    raise UserError(f'{os.environ["CUDA_VISIBLE_DEVICES"]} {os.environ["XTTS_NB_CPU_CARDS"]!r} {seen}')

def test_workers_that_encode_leave_the_cards_alone(corpus, small, tokenizer, tmp_path, monkeypatch):
    server()
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0,1')
    monkeypatch.setenv('XTTS_NB_CPU_CARDS', '2')
    with pytest.raises(UserError) as e:
        prepare(corpus, tmp_path / 'out', small, Fake(), tokenizer, shard_clips=5, workers=1, load=tell)
    assert str(e.value) == "-1 '' ['CPU:0']"


# --- products -----------------------------------------------------------------------------------------------

def precision_of_products() -> bool:
    "Whether XLA is told to multiply float32 in full, in a program that it compiles now."
    product = tf.function(lambda a: tf.matmul(a, a), jit_compile=True)
    program = product.experimental_get_compiler_ir(tf.ones((4, 4)))(stage='hlo')
    assert ' dot(' in program
    return 'operand_precision={highest,highest}' in program

def test_float32_is_float32_unless_tf32_is_asked_for():
    setup_tf(threads=2)
    enabled = tf.config.experimental.tensor_float_32_execution_enabled
    assert not enabled() and precision_of_products()
    with devices.products_in_tf32(True):
        assert enabled() and not precision_of_products()
        with devices.products_in_tf32(False): assert precision_of_products()
        assert enabled()
    with pytest.raises(KeyError), devices.products_in_tf32(True): raise KeyError
    assert not enabled()
