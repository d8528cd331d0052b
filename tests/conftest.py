"""Shared by all tests: the devices of TensorFlow, seeds, fixtures, and recorded speech if there is some."""
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'dev'))
import quick
import tree

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
os.environ.setdefault('KERAS_BACKEND', 'tensorflow')
os.environ.setdefault('MPLBACKEND', 'Agg')
# `nbformat` would take three seconds to build grammars of addresses, which no notebook holds.
sys.modules.setdefault('rfc3987_syntax', None)

# Runs repeat bit for bit, and memory is allocated as it is needed.
ON_GPU = {'TF_DETERMINISTIC_OPS': '1', 'TF_FORCE_GPU_ALLOW_GROWTH': 'true'}

def pytest_configure(config):
    """Hide the GPU, or make it deterministic and share its memory; before TensorFlow is imported.

    Slow tests compile as a user does."""
    if 'not slow and not gpu' in config.option.markexpr: quick.choose()
    if 'not gpu' in config.option.markexpr: os.environ['CUDA_VISIBLE_DEVICES'] = '-1'
    if 'not cpu' in config.option.markexpr: os.environ.update(ON_GPU)

def pytest_collection_modifyitems(config, items):
    "A slow test ends after an hour, where it names no other limit; files that take longest come first."
    for item in items:
        if item.get_closest_marker('slow') and not item.get_closest_marker('timeout'):
            item.add_marker(pytest.mark.timeout(3600))
    if config.getoption('splits', None): return   # a part is a stretch of the tests as they are collected
    seconds = Counter()
    for test, took in json.loads((tree.ROOT / 'dev/durations.json').read_text(encoding='utf-8')).items():
        seconds[test.partition('::')[0]] += took
    items.sort(key=lambda item: -seconds[item.nodeid.partition('::')[0]])

@pytest.fixture(autouse=True)
def seeds(request):
    "Each test starts with the same seeds, alone or with others."
    random.seed(0)
    np.random.seed(0)
    if 'keras' not in sys.modules: return
    if not request.node.get_closest_marker('slow'): quick.keep_functions()
    sys.modules['keras'].utils.set_random_seed(0)

@pytest.fixture(scope='session', autouse=True)
def float32_is_float32(request):
    "On a GPU, as every command has it."
    if 'not cpu' in request.config.option.markexpr:
        import tensorflow as tf
        tf.config.experimental.enable_tensor_float_32_execution(False)

@pytest.fixture(scope='session')
def speech() -> Path:
    "The folder of recorded speech that the environment names."
    folder = os.environ.get('XTTS_NB_SPEECH')
    if not folder: pytest.skip('no recorded speech: XTTS_NB_SPEECH names no folder')
    if not Path(folder).is_dir(): pytest.fail(f'XTTS_NB_SPEECH names {folder}, which is no folder')
    return Path(folder).resolve()

@pytest.fixture(scope='session')
def small():
    "Settings of a model that is built and compiled in a second."
    from xtts_nb.config import XTTSConfig, setup_tf
    setup_tf(threads=2)
    return XTTSConfig.tiny(64).replace(
        model={'dvae': {'hidden': 16, 'codebook_dim': 8, 'codes': 32},
               'gpt': {'num_layers': 2, 'conditioning_layers': 1, 'text_tokens': 48, 'max_text_tokens': 40,
                       'max_audio_codes': 48, 'prompt_latents': 4},
               'decoder': {'channels': 32, 'rates': (16, 16), 'up_kernels': (32, 32),
                           'residual_kernels': (3, 7), 'dilations': (1, 3)}},
        data={'batch_size': 4, 'reference_frames': 32, 'max_text_tokens': 40})

@pytest.fixture(scope='session')
def corpus(tmp_path_factory) -> Path:
    "Two voices, seven clips each, 0.6 to 1.2 s; to be read only."
    from xtts_nb.data.corpora import synthetic_corpus
    return synthetic_corpus(tmp_path_factory.mktemp('corpus'), clips=7, seconds=0.6)

@pytest.fixture(scope='session')
def dvae(small):
    "A DVAE with random weights and the mel constants of a trained one's size."
    import keras
    from xtts_nb.models.dvae import DVAE
    keras.utils.set_random_seed(0)
    model = DVAE(small)
    model.mel_stats.assign(np.full(small.model.audio.n_mels, 5.))
    return model

@pytest.fixture(scope='session')
def stats(dvae) -> np.ndarray:
    "The mel constants of the DVAE."
    return dvae.mel_stats.numpy()

@pytest.fixture(scope='session')
def prepared(corpus, small, dvae, tmp_path_factory):
    "The corpus as a cache; to be read only."
    from xtts_nb.data.cache import Cache
    from xtts_nb.data.prepare import encode_corpus
    out = tmp_path_factory.mktemp('prepared') / 'cache'
    encode_corpus(corpus, out, small, dvae, shard_clips=5)
    return Cache(out)

@pytest.fixture
def mine(corpus, tmp_path):
    "A copy of the corpus that a test may change."
    import shutil
    shutil.copytree(corpus, tmp_path / 'mine')
    return tmp_path / 'mine'

@pytest.fixture(scope='session')
def tokenizer(corpus):
    "A tokenizer trained on the corpus."
    from xtts_nb.data.corpora import read_corpus
    from xtts_nb.data.text import train_tokenizer
    clips = read_corpus(corpus)[0]
    return train_tokenizer([c.text for c in clips], ['en'], 48)

@pytest.fixture(scope='session')
def straight(corpus, small, tokenizer, tmp_path_factory):
    "The corpus in three shards, with a DVAE that needs no weights; to be read only."
    from fake_dvae import Fake
    from xtts_nb.data.prepare import encode_corpus
    out = tmp_path_factory.mktemp('straight') / 'out'
    encode_corpus(corpus, out, small, Fake(), tokenizer, shard_clips=5)
    return out

@pytest.fixture
def copy(straight, tmp_path):
    "A cache to be damaged."
    import shutil
    shutil.copytree(straight, tmp_path / 'out')
    return tmp_path / 'out'

@pytest.fixture
def calls(monkeypatch):
    "Counts the clips that are encoded."
    from xtts_nb.data.prepare import ClipEncoder
    counts = {'codes': 0, 'mel': 0}
    for name in counts:
        real = getattr(ClipEncoder, name)
        def counted(self, wav, name=name, real=real):
            counts[name] += 1
            return real(self, wav)
        monkeypatch.setattr(ClipEncoder, name, counted)
    return counts

@pytest.fixture(scope='session')
def xtts(small, prepared, dvae):
    "A model with random weights, the voice's output layers included; to be read only."
    import keras
    from xtts_nb.models.xtts import XTTS
    keras.utils.set_random_seed(0)
    model = XTTS(small, prepared.tokenizer, dvae)
    for name, v in model.weights.items():   # zeros at first: the reference would not matter to the blocks
        if name.endswith('project/kernel') and 'conditioning' in name:
            v.assign(keras.random.normal(v.shape, stddev=0.1))
    return model

@pytest.fixture(scope='session')
def with_hifigan(xtts, small, tmp_path_factory):
    "The folder of the same model, with a decoder and a speaker encoder in its file; to be read only."
    from xtts_nb.models.hifigan import HiFiGAN, SpeakerEncoder
    from xtts_nb.files import named_weights, save_weights
    folder = tmp_path_factory.mktemp('hifigan') / 'm'
    xtts.save(folder)
    path, nets = folder / 'model.safetensors', {'decoder/': HiFiGAN(small), 'speaker/': SpeakerEncoder(small)}
    save_weights(path, {n: v for part, net in nets.items() for n, v in named_weights(net, part).items()},
                 others_from=path)
    return folder

@pytest.fixture(scope='session')
def singer(with_hifigan):
    "Its speaker."
    from xtts_nb.models.xtts import XTTS
    from xtts_nb.speech.generate import Speaker
    return Speaker(XTTS.load(with_hifigan))

@pytest.fixture(scope='session')
def batch(prepared, small):
    "The first batch, of four clips."
    from xtts_nb.data.native import BatchPlan
    return next(iter(BatchPlan(prepared, small.data).stream()))

@pytest.fixture(scope='session')
def mini(small):
    "One block, two shapes, no XLA: a second to trace."
    return small.replace(model={'gpt': {'num_layers': 1, 'conditioning_layers': 1, 'perceiver_layers': 1}},
                         data={'buckets': 2},
                         training={'gpt': {'steps': 8, 'warmup_steps': 2, 'log_every': 2,
                                           'checkpoint_every': 4, 'mode': 'graph'}})

@pytest.fixture
def cheap(monkeypatch):
    "Runs train with a step that takes no time."
    from cheap import Cheap
    from xtts_nb.train import runs
    monkeypatch.setattr(runs, 'Trainer', Cheap)

@pytest.fixture
def given(monkeypatch):
    "The same, with given validation losses."
    from cheap import Given
    from xtts_nb.train import runs
    monkeypatch.setattr(runs, 'Trainer', Given)

@pytest.fixture(scope='session')
def wheels(tmp_path_factory) -> list[Path]:
    "The wheel of the tracked files, and the wheel of the sdist of these."
    from wheels import build_wheels
    return build_wheels(tmp_path_factory.mktemp('wheels'))

@pytest.fixture(scope='session')
def installed(wheels, tmp_path_factory) -> Path:
    "The scripts of an environment that holds the wheel, and sees the other packages of this one behind it."
    from wheels import install
    return install(wheels[0], tmp_path_factory.mktemp('installed') / 'env')

@pytest.fixture
def not_started(monkeypatch):
    "A TensorFlow that has not started, by its own rules, with some cards that are not there."
    import tensorflow as tf
    from tensorflow.python.eager import context
    def begin(count=1):
        fresh = context.Context()
        cards = [tf.config.PhysicalDevice(f'/physical_device:GPU:{i}', 'GPU') for i in range(count)]
        fresh._physical_devices, fresh._pluggable_devices = [*cards], []
        fresh._visible_device_list, fresh._memory_growth_map = [*cards], dict.fromkeys(cards)
        fresh._physical_device_to_index = {card: i for i, card in enumerate(cards)}
        monkeypatch.setattr(context, 'context', lambda: fresh)
        return fresh, cards
    return begin

@pytest.fixture
def cheap_xla(monkeypatch):
    "Processes of the test compile as those of quick tests: it compares runs that are compiled alike."
    monkeypatch.setenv('XLA_FLAGS', quick.XLA)

@pytest.fixture
def kernels(cheap_xla, tmp_path) -> Path:
    "A folder with settings: of the commands that run in it the first alone compiles a program."
    (tmp_path / 'settings.ini').write_text('[workspace]\nxla_cache = kernels\n')
    return tmp_path

# --- commands in this process, and what stands behind them --------------------------------------------------

@pytest.fixture
def ran(capfd):
    "Runs a command in this process, `ran('verify cache --json')`; how it ended and what it printed."
    from process import Done, main
    def run(line, *more):
        capfd.readouterr()
        return Done(main(*line.split(), *more), *capfd.readouterr())
    return run

# --- a checkpoint of coqui-tts -----------------------------------------------------------------------------

@pytest.fixture(scope='session')
def toy(tmp_path_factory) -> Path:
    "A small checkpoint of coqui-tts, converted; to be read only."
    import coqui_toy
    from xtts_nb.models import convert
    there, out = tmp_path_factory.mktemp('coqui'), tmp_path_factory.mktemp('toy') / 'model'
    coqui_toy.write_settings(there)
    for name in ('model.pth', 'dvae.pth', 'mel_stats.pth'): (there / name).touch()
    with pytest.MonkeyPatch.context() as m:
        files = coqui_toy.tensors(coqui_toy.config())
        m.setattr(convert, '_read_pth', lambda path: files[path.name])
        convert.from_coqui(there, out)
    return out

@pytest.fixture(scope='session')
def toy_xtts(toy):
    "Its model, with the settings of coqui-tts; to be read only."
    from xtts_nb.models.xtts import XTTS
    return XTTS.load(toy, parity=True)

@pytest.fixture(scope='session')
def toy_inputs() -> dict:
    "The inputs of both libraries."
    import make_parity_data
    return make_parity_data.inputs()

@pytest.fixture(scope='session')
def theirs() -> dict:
    "What coqui-tts computed with the small checkpoint, stored, so that PyTorch is not needed."
    with np.load(Path(__file__).parent / 'stored' / 'parity.npz') as file: return dict(file)

@pytest.fixture(scope='session')
def all_ok():
    "Checks that all rows of a comparison are ok."
    def check(rows): assert rows and all(r['ok'] for r in rows), [r for r in rows if not r['ok']]
    return check
