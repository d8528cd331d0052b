"Settings: every mistake is named, and the workspace is found. That every key acts is asked in test_settings.py."
import os
import subprocess
import sys

import pydantic
import pytest
import yaml

from xtts_nb.config import (REFUSED, AudioConfig, DataConfig, DecoderConfig, DVAEConfig, GPTConfig, SpeakerConfig, SpeechConfig,
                            TrainingConfig, UserError, VoiceConfig, XTTSConfig, setup_tf, sizes, workspace)

SECTIONS = {'audio': AudioConfig, 'dvae': DVAEConfig, 'gpt': GPTConfig, 'speaker': SpeakerConfig,
            'decoder': DecoderConfig, 'data': DataConfig, 'training': TrainingConfig,
            'voice': VoiceConfig, 'speech': SpeechConfig}
KEYS = [(section, key) for section, model in SECTIONS.items() for key in model.model_fields]


# --- YAML and dictionaries -----------------------------------------------------------------------------------------

@pytest.mark.parametrize('config', [XTTSConfig.tiny(), XTTSConfig.xtts_v2(), XTTSConfig.tiny(64)],
                         ids=['tiny', 'xtts_v2', 'tiny64'])
def test_yaml_goes_there_and_back(config, tmp_path):
    (tmp_path / 'c.yaml').write_text(config.to_yaml())
    assert XTTSConfig.load(tmp_path / 'c.yaml') == config
    assert list(yaml.safe_load(config.to_yaml())) == ['model', 'data', 'training', 'voice', 'speech']

@pytest.mark.parametrize('text', ['', '# nothing\n', '{}', 'model: {}\n'])
def test_what_is_left_out_keeps_its_default(text, tmp_path):
    (tmp_path / 'c.yaml').write_text(text)
    assert XTTSConfig.load(tmp_path / 'c.yaml') == XTTSConfig()

@pytest.mark.parametrize('written, value', [('1e-4', 1e-4), ('1.0e-4', 1e-4), ('0.0001', 1e-4), ('"2e-3"', 2e-3), ('1', 1.0)])
def test_numbers_as_people_write_them(written, value, tmp_path):
    (tmp_path / 'c.yaml').write_text(f'training: {{learning_rate: {written}}}')
    assert XTTSConfig.load(tmp_path / 'c.yaml').training.learning_rate == value

TOP = ('data', 'training', 'voice', 'speech')

def misspelled(key): return key + key[-1]

@pytest.mark.parametrize('section, key', KEYS, ids=lambda x: x)
def test_a_misspelled_key_names_the_nearest(section, key):
    wrong = misspelled(key)
    values = {section: {wrong: 1}} if section in TOP else {'model': {section: {wrong: 1}}}
    with pytest.raises(UserError) as e: XTTSConfig.from_dict(values, 'run.yaml')
    place = f'{section}.{wrong}' if section in TOP else f'model.{section}.{wrong}'
    assert str(e.value).startswith(f'run.yaml: there is no key "{place}"')
    assert f'did you mean "{key}"?' in str(e.value)

OTHERS = ['shuffle_buffer_multiplier', 'pipeline_buffer_size', 'enhanced_gpu_prefetch', 'pin_memory', 'cache_verification',
          'optimize_cpu_gpu_overlap', 'use_tf_native_loading', 'model_start_delay', 'max_mel_frames', 'min_audio_length',
          'max_text_length', 'auto_tune_performance', 'enable_xla', 'enable_tensorrt', 'mixed_precision',
          'gradient_accumulation_steps', 'max_memory_fraction', 'kl_loss_weight']   # keys of other trainers

@pytest.mark.parametrize('section', ['data', 'training'])
@pytest.mark.parametrize('name', OTHERS)
def test_keys_of_others_are_refused_with_the_reason_and_the_key_to_use(section, name):
    with pytest.raises(UserError) as e: XTTSConfig.from_dict({section: {name: True}}, 'their.yaml')
    assert str(e.value) == f'their.yaml: there is no key "{section}.{name}": {REFUSED[name]}.' and set(OTHERS) == set(REFUSED)
    assert 'use that' in str(e.value) or 'use these' in str(e.value) or 'leave it out' in str(e.value)
    for word in REFUSED[name].replace(',', ' ').replace(';', ' ').split():   # every key that is named exists
        if word.startswith(('data.', 'training.')):
            part, field = word.split('.')
            assert field in getattr(XTTSConfig(), part).model_dump(), word

@pytest.mark.parametrize('values, parts', [
    ({'trainin': {}}, ['"trainin"', 'did you mean "training"?']),
    ({'zzz': 1}, ['"zzz"', 'it has model, data, training']),
    ({'model': {'zzz': 1}}, ['"model.zzz"', 'it has audio, dvae, gpt']),
    ({'training': {'batch_size': 8}}, ['"training.batch_size"', 'did you mean "data.batch_size"?']),
    ({'batch_size': 8}, ['"batch_size"', 'did you mean "data.batch_size"?']),
    ({'model': {'seed': 8}}, ['"model.seed"', 'it has audio, dvae, gpt']),   # two sections have one
    ({'training': {'learning_rate': 'fast'}}, ['training.learning_rate', "'fast'"]),
    ({'training': {'learning_rate': 0}}, ['training.learning_rate', 'greater than 0', '0']),
    ({'training': {'learning_rate': float('nan')}}, ['training.learning_rate', 'nan']),
    ({'training': {'precision': 'float8'}}, ['training.precision', "'bfloat16'", "'float8'"]),
    ({'data': {'batch_size': 6}, 'training': {'accumulation': 4}}, ['batch_size 6', 'accumulation 4']),
    ({'data': {'batch_size': 1.5}}, ['data.batch_size', '1.5']),
    ({'data': {'batch_size': -1}}, ['data.batch_size', '-1']),
    ({'data': {'max_drop_rate': 1.1}}, ['data.max_drop_rate', '1.1']),
    ({'data': {'seed': -1}}, ['data.seed', '-1']), ({'training': {'seed': -1}}, ['training.seed', '-1']),
    ({'training': {'seed': 2**40}}, ['training.seed', str(2**40)]),
    ({'model': {'gpt': {'width': 80, 'heads': 2}}}, ['model.gpt', 'width 80', '32']),   # groups of the norm
    ({'model': {'audio': {'win_length': 2000}}}, ['model.audio', 'win_length 2000', '1024']),
    ({'model': {'audio': {'f_max': 12000}}}, ['model.audio', 'f_max 12000', 'above 11025', 'sample_rate']),
    ({'data': {'min_seconds': 5, 'max_seconds': 4}}, ['data', 'min_seconds 5', 'max_seconds 4']),
    ({'speech': {'temperature': -1}}, ['speech.temperature', '-1']), ({'speech': {'top_p': 1.1}}, ['speech.top_p', '1.1']),
    ({'speech': {'speed': 0}}, ['speech.speed', '0']), ({'speech': {'repetition_penalty': 0}}, ['speech.repetition_penalty']),
    ({'training': {'judge_by': 'dtw'}}, ['training', 'listen_clips']),
    ({'voice': {'periods': [], 'windows': []}}, ['voice', 'at least one critic']),
    ({'voice': {'window': 0}}, ['voice.window', '0']),
    ({'data': None}, ['data', 'None']),
    ({'data': [1]}, ['data', '[1]']),
    ({'data': {1: 2}}, ['data', '1']),
    ({'model': {'gpt': {'dropout': 1.0}}}, ['model.gpt.dropout', '1.0']),
    ({'model': {'gpt': {'width': 100, 'heads': 3}}}, ['model.gpt', 'width 100', 'heads 3'])])
def test_a_wrong_value_names_key_and_value(values, parts):
    with pytest.raises(UserError) as e: XTTSConfig.from_dict(values, 'run.yaml')
    assert str(e.value).startswith('run.yaml: ') and all(p in str(e.value) for p in parts), str(e.value)

@pytest.mark.parametrize('content', [b'a: [', b'a: b: c', b'\t- x', b'just words', b'[1, 2]', b'\x00', b'1: 2', b'model: \xff',
                                     None],
                         ids=['open', 'twice', 'tab', 'words', 'list', 'binary', 'number-key', 'latin1', 'missing'])
def test_a_file_that_is_no_settings_is_named(content, tmp_path):
    path = tmp_path / 'c.yaml'
    if content is not None: path.write_bytes(content)
    with pytest.raises(UserError, match='c.yaml'): XTTSConfig.load(path)

def test_a_folder_is_no_settings_file(tmp_path):
    with pytest.raises(UserError, match=str(tmp_path)): XTTSConfig.load(tmp_path)

def test_replace_keeps_the_rest():
    config = XTTSConfig.tiny()
    changed = config.replace(data={'batch_size': 3}, model={'gpt': {'layers': 1}})
    assert (changed.data.batch_size, changed.model.gpt.layers) == (3, 1)
    assert changed.replace(data={'batch_size': config.data.batch_size}, model={'gpt': {'layers': 4}}) == config
    with pytest.raises(UserError, match='did you mean "batch_size"'): config.replace(data={'batchsize': 3})

def test_settings_are_frozen():
    with pytest.raises(pydantic.ValidationError, match='frozen'): XTTSConfig().data.batch_size = 3

def test_presets_by_name():
    assert XTTSConfig.preset('tiny') == XTTSConfig.tiny() and XTTSConfig.preset('xtts_v2') == XTTSConfig()
    with pytest.raises(UserError, match='no preset "huge".*tiny, xtts_v2'): XTTSConfig.preset('huge')

@pytest.mark.parametrize('width', [64, 128, 192, 256])
def test_every_tiny_width_is_valid(width):
    gpt = XTTSConfig.tiny(width).model.gpt
    assert gpt.width == width and gpt.width // gpt.heads == 32

def test_the_table_shows_every_key():
    table = XTTSConfig()._repr_markdown_()
    assert all(key in table for _, key in KEYS)


# --- the workspace -------------------------------------------------------------------------------------------------

@pytest.fixture
def outside(tmp_path, monkeypatch):
    "A working directory under no settings file, and no test environment."
    monkeypatch.chdir(tmp_path); monkeypatch.delenv('IN_TEST', raising=False)
    return tmp_path.resolve()

def write(folder, text): (folder / 'settings.ini').write_text(text, encoding='utf-8')

def test_without_a_file_everything_lies_in_the_working_directory(outside):
    w = workspace()
    assert (w.root, w.data, w.cache, w.runs, w.scale) == (outside, *(outside / n for n in ('data', 'cache', 'runs')), 'tiny')

def test_the_file_is_searched_upwards_and_the_nearest_counts(outside, monkeypatch):
    deep = outside / 'a' / 'b' / 'c'
    deep.mkdir(parents=True)
    write(outside, '[workspace]\ndata = far\nscale = full\n')
    monkeypatch.chdir(deep)
    assert (workspace().data, workspace().root, workspace().scale) == (outside / 'far', outside, 'full')
    write(outside / 'a', '[workspace]\ndata = near\n')
    assert (workspace().data, workspace().scale) == (outside / 'a' / 'near', 'tiny')
    assert workspace(outside).data == outside / 'far'

def test_absolute_paths_stay(outside):
    write(outside, f'[workspace]\nruns = {outside / "elsewhere"}\n')
    assert workspace().runs == outside / 'elsewhere'

def test_under_test_the_scale_is_tiny(outside, monkeypatch):
    write(outside, '[workspace]\nscale = full\n')
    assert sizes(tiny=1, full=2) == 2
    monkeypatch.setenv('IN_TEST', '1')
    assert workspace().scale == 'tiny' and sizes(tiny=1, full=2) == 1

@pytest.mark.parametrize('text, part', [
    ('nonsense\n', 'section headers'), ('[workspace]\nscal = tiny\n', 'did you mean "scale"'),
    ('[workspace]\nscale = huge\n', "'tiny' or 'full'"), ('[workspace]\ndata = a\ndata = b\n', 'already exists'),
    ('[workspace\n', 'settings.ini'), ('[workspace]\nzzz = 1\n', 'it has root, data, cache, runs, xla_cache, scale'),
    ('[workspac]\ndata = a\n', 'no section [workspac]; did you mean [workspace]'),
    ('[workspace]\n[Workspace]\n', 'no section [Workspace]; did you mean')],
    ids=['words', 'key', 'value', 'twice', 'bracket', 'unknown', 'section', 'capital'])
def test_a_bad_file_is_named(outside, text, part):
    write(outside, text)
    with pytest.raises(UserError) as e: workspace()
    assert str(outside / 'settings.ini') in str(e.value) and part in str(e.value)

def test_a_file_that_is_not_utf8_is_named(outside):
    (outside / 'settings.ini').write_bytes(b'[workspace]\ndata = \xff\n')
    with pytest.raises(UserError, match='settings.ini'): workspace()

@pytest.mark.parametrize('text, data', [('[other]\nx = 1\n', 'data'), ('', 'data'), ('[workspace]\n', 'data'),
                                        ('[workspace]\ndata = 50%\n', '50%'),
                                        ('\ufeff[workspace]\ndata = a b\n', 'a b'),
                                        ('# note\n[workspace]\ndata = ü ; x\n', 'ü ; x')],
                         ids=['other', 'empty', 'no key', 'percent', 'BOM', 'comment'])
def test_what_people_write_is_read(outside, text, data):
    write(outside, text)
    assert workspace().data == outside / data


# --- TensorFlow ----------------------------------------------------------------------------------------------------

def test_setup_twice_changes_nothing_and_tells_what_it_got():
    first = setup_tf(threads=2)
    assert setup_tf(threads=2) == first
    late = setup_tf(threads=7)   # TensorFlow has started, or takes it now: either way the table tells
    import tensorflow as tf
    assert late['intra-op threads'] == (7, tf.config.threading.get_intra_op_parallelism_threads())
    setup_tf(threads=2)

CHILD = '''
import sys
from xtts_nb.config import setup_tf
assert 'tensorflow' not in sys.modules
first = setup_tf(threads=1)
import tensorflow as tf
tf.reduce_sum(tf.ones(3)).numpy()
again, late = setup_tf(threads=1), setup_tf(threads=2)
assert first == again == {'intra-op threads': (1, 1), 'inter-op threads': (1, 1)}, (first, again)
assert late['intra-op threads'] == (2, 1), late
'''

def test_a_request_that_comes_too_late_is_shown():
    subprocess.run([sys.executable, '-c', CHILD], check=True, env=os.environ | {'CUDA_VISIBLE_DEVICES': '-1'})

def test_the_package_is_light_to_import():
    code = "import sys, xtts_nb, xtts_nb.config, xtts_nb.files; sys.exit('tensorflow' in sys.modules or 'keras' in sys.modules)"
    subprocess.run([sys.executable, '-c', code], check=True)


# --- what XLA compiled ---------------------------------------------------------------------------------------------

COMPILE = '''
from xtts_nb.config import setup_tf
setup_tf()
import tensorflow as tf
print(float(tf.function(lambda x: tf.sin(x) @ x, jit_compile=True)(tf.ones((4, 4)))[0, 0]))'''

def compiled(folder) -> set[str]:
    "Compile in a process that starts in `folder`; the files that XLA keeps there."
    env = {k: v for k, v in os.environ.items() if k != 'TF_XLA_FLAGS'} | {'CUDA_VISIBLE_DEVICES': '-1'}
    subprocess.run([sys.executable, '-c', COMPILE], cwd=folder, env=env, check=True, capture_output=True)
    return {p.name for p in (folder / 'kept').glob('*')}

@pytest.mark.slow
def test_a_second_start_finds_what_xla_compiled(tmp_path):
    (tmp_path / 'settings.ini').write_text('[workspace]\n')
    assert compiled(tmp_path) == set()
    (tmp_path / 'settings.ini').write_text('[workspace]\nxla_cache = kept\n')
    first = compiled(tmp_path)
    assert first and compiled(tmp_path) == first
