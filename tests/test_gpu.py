"Needs a GPU: the placement of a step's tensors, the driver's figures, two logical devices on one card."
import pytest

pytestmark = pytest.mark.gpu

@pytest.fixture(autouse=True)
def card():
    import tensorflow as tf
    if not tf.config.list_physical_devices('GPU'):
        pytest.fail('make test GPU=1 was asked for, but TensorFlow sees no GPU')

def test_the_step_s_tensors_are_on_the_gpu_and_the_driver_answers(small):
    from xtts_nb.app.check import run_checks, StepTrial
    config = small.replace(model={'gpt': {'num_layers': 1, 'conditioning_layers': 1}})
    rows = {r['name']: r for r in run_checks(StepTrial(config, 8, 12))}
    for name in ('GPU placement', 'GPU monitoring', 'Training step'):
        assert rows[name]['result'] == 'PASSED', rows[name]
    assert rows['GPU placement']['reason'].endswith('tensors on GPU:0')

def test_every_weight_has_its_device(small):
    from xtts_nb.train.profile import _variable_placement
    from xtts_nb.models.gpt import GPT
    from xtts_nb.train.step import Update
    rows = _variable_placement(Update(GPT(small, 5), small.training.gpt))
    assert {r['device'] for r in rows if r['owner'] == 'weights'} == {'GPU:0'}

def test_the_memory_of_each_card_is_known():
    from xtts_nb.devices import card_memory
    import tensorflow as tf
    found = card_memory()
    assert len(found) == len(tf.config.list_physical_devices('GPU')) and all(mib > 1000 for mib in found)

def test_one_step_takes_memory_of_the_gpu():
    import tensorflow as tf
    from xtts_nb.train.profile import _peak_memory
    assert _peak_memory(lambda: tf.random.normal((1024, 1024)) + 1) >= 4 * 1024**2

def test_a_tensor_is_moved_to_the_gpu():
    import tensorflow as tf
    from xtts_nb.devices import to_device
    with tf.device('/CPU:0'): x = tf.ones(3)
    assert to_device({'x': x})['x'].device.endswith('GPU:0')

@pytest.mark.slow
def test_dual_devices_are_parts_of_the_cards(tmp_path):
    from process import xtts_nb
    done = xtts_nb('bench', 'dual', '--steps', 4, '--json', cwd=tmp_path)
    assert done.code == 0, done.err
    assert [r['name'] for r in done.json['rows']] == ['serial', 'pipelined']
