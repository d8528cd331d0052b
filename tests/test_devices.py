"Who does what: the plan, what TensorFlow is told, and what it kept."
from types import SimpleNamespace

import pytest
import tensorflow as tf

from xtts_nb import devices
from xtts_nb.config import UserError
from xtts_nb.devices import DevicePlan, apply_plan, card_memory, cpu_pair, dual_plan, plan_devices

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
    ([CARD, 2 * CARD], dict(data_gpu=0, model_gpu=1, data_memory=8192), {0: (8192,), 1: (43_200,)}, 'GPU:0', 'GPU:1'),
    ([CARD], dict(isolate=True), {0: (4800, 16_800)}, 'GPU:0', 'GPU:1'),
    ([CARD], dict(data_memory=4000, model_memory=20_000), {0: (4000, 20_000)}, 'GPU:0', 'GPU:1'),
    ([None], dict(data_memory=4000, model_memory=20_000), {0: (4000, 20_000)}, 'GPU:0', 'GPU:1')])
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
    ([], dict(isolate=True), ['CPU takes no memory limit']),
    ([], dict(data_memory=100), ['CPU takes no memory limit']),
    ([CARD, CARD], dict(isolate=True, model_memory=CARD + 1), ['GPU 1', '24001', '24000 MiB', 'lower']),
    ([CARD], dict(data_memory=12_000, model_memory=12_001), ['12000 + 12001', 'lower']),
    ([CARD], dict(data_memory=0), ['--data-gpu-memory 0', 'at least']),
    ([None, None], dict(isolate=True), ['cannot be read', '--data-gpu-memory'])])
def test_plans_that_cannot_be(cards, asked, words):
    with pytest.raises(UserError) as e: plan_devices(cards, **asked)
    assert all(word in str(e.value) for word in words)


@pytest.fixture
def gpus(monkeypatch):
    "TensorFlow's device functions over two GPUs that are not there; returns what they were told."
    told, config = {}, tf.config
    cards = [SimpleNamespace(name=f'/physical_device:GPU:{i}') for i in range(2)]
    def logical():
        parts = [n for gpu in told.get('visible', cards) for n in told.get(gpu.name) or [None]]
        return [SimpleNamespace(device_type='GPU', name=f'/device:GPU:{i}') for i in range(len(parts))]
    for name, f in {'list_physical_devices': lambda kind: cards, 'list_logical_devices': logical,
                    'set_visible_devices': lambda some, kind: told.update(visible=some),
                    'set_logical_device_configuration': lambda gpu, parts: told.update({gpu.name: parts}),
                    'get_logical_device_configuration': lambda gpu: told.get(gpu.name)}.items():
        monkeypatch.setattr(config, name, f)
    return told

def test_limits_are_set_and_read_back(gpus):
    got = apply_plan(plan_devices([CARD, CARD], 1, 0, data_memory=8000, model_memory=20_000))
    assert got == {'GPU 1, MiB': ((8000,), (8000,)), 'GPU 0, MiB': ((20_000,), (20_000,)),
                   'devices': (('GPU:1', 'GPU:0'), ['GPU:0', 'GPU:1'])}

def test_one_card_becomes_two_devices(gpus):
    got = apply_plan(plan_devices([CARD], isolate=True))
    assert got['GPU 0, MiB'] == ((4800, 16_800),) * 2 and got['devices'][1] == ['GPU:0', 'GPU:1']
    assert [gpu.name[-1] for gpu in gpus['visible']] == ['0']   # the other card is left to others

def test_a_device_that_did_not_come_is_named(gpus, monkeypatch):
    monkeypatch.setattr(tf.config, 'list_logical_devices', lambda: [SimpleNamespace(device_type='GPU', name='GPU:0')])
    with pytest.raises(UserError, match='has the devices GPU:0, not as planned'): apply_plan(plan_devices([CARD, CARD], 0, 1))

def test_a_limit_that_was_not_kept_is_noticed(gpus, monkeypatch):
    monkeypatch.setattr(tf.config, 'get_logical_device_configuration', lambda gpu: None)
    with pytest.raises(UserError, match='not as planned'): apply_plan(plan_devices([CARD], isolate=True))

def test_what_tensorflow_refuses_is_a_sentence(gpus, monkeypatch):
    def late(*_): raise RuntimeError('Virtual devices cannot be modified after being initialized')
    monkeypatch.setattr(tf.config, 'set_logical_device_configuration', late)
    with pytest.raises(UserError, match='before TensorFlow runs anything'): apply_plan(plan_devices([CARD], isolate=True))

@pytest.mark.parametrize('order, found', [(None, [10, 20]), ('1,0', [20, 10]), ('GPU-abc,1', [None, 20]), ('0,7', [10, None])])
def test_cards_are_counted_as_tensorflow_does(gpus, monkeypatch, order, found):
    if order is None: monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    else: monkeypatch.setenv('CUDA_VISIBLE_DEVICES', order)
    cards = [SimpleNamespace(memory_total=n * 2**20) for n in (10, 20)]
    monkeypatch.setattr(devices, 'nvml_probe', lambda: lambda: SimpleNamespace(gpus=cards))
    assert card_memory() == found

def test_too_late_for_two_cpus():
    tf.constant(0)
    with pytest.raises(UserError, match='has started'): cpu_pair()
    with pytest.raises(UserError, match='has started'): dual_plan()
