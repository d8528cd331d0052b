"Settings, workspace and the setup of TensorFlow. test_settings.py checks that every key has an effect."
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pydantic
import pytest
import yaml

from process import python
from xtts_nb import config as page
from xtts_nb.config import (
    REFUSED_KEYS, ModelConfig, UserError, XTTSConfig,
    control_groups, cores,
    cpu_quota, environment_number, setup_tf, sizes, usable_cores, workspace)

SECTIONS = {name: field.annotation for part in (ModelConfig, XTTSConfig)
            for name, field in part.model_fields.items() if name != 'model'}
KEYS = [(section, key) for section, model in SECTIONS.items() for key in model.model_fields]


# --- YAML and dictionaries ------------------------------------------------------------------------

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

@pytest.mark.parametrize('written, value',
                         [('1e-4', 1e-4), ('1.0e-4', 1e-4), ('0.0001', 1e-4), ('"2e-3"', 2e-3), ('1', 1.0)])
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

OTHERS = ['shuffle_buffer_multiplier', 'pipeline_buffer_size', 'enhanced_gpu_prefetch', 'pin_memory',
          'cache_verification', 'optimize_cpu_gpu_overlap', 'use_tf_native_loading', 'model_start_delay',
          'max_mel_frames', 'min_audio_length', 'max_text_length', 'auto_tune_performance', 'enable_xla',
          'enable_tensorrt', 'mixed_precision', 'gradient_accumulation_steps', 'max_memory_fraction',
          'kl_loss_weight']   # keys of other trainers

@pytest.mark.parametrize('section', ['data', 'training'])
@pytest.mark.parametrize('name', OTHERS)
def test_keys_of_others_are_refused_with_the_reason_and_the_key_to_use(section, name):
    with pytest.raises(UserError) as e: XTTSConfig.from_dict({section: {name: True}}, 'their.yaml')
    assert str(e.value) == f'their.yaml: there is no key "{section}.{name}": {REFUSED_KEYS[name]}.'
    assert set(OTHERS) == set(REFUSED_KEYS)
    assert 'use that' in str(e.value) or 'use these' in str(e.value) or 'leave it out' in str(e.value)
    for word in REFUSED_KEYS[name].replace(',', ' ').replace(';', ' ').split():   # named keys exist
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
    ({'speech': {'temperature': -1}}, ['speech.temperature', '-1']),
    ({'speech': {'top_p': 1.1}}, ['speech.top_p', '1.1']),
    ({'speech': {'speed': 0}}, ['speech.speed', '0']),
    ({'speech': {'repetition_penalty': 0}}, ['speech.repetition_penalty']),
    ({'training': {'judge_by': 'dtw'}}, ['training', 'listen_clips']),
    ({'voice': {'periods': [], 'windows': []}}, ['voice', 'at least one discriminator']),
    ({'voice': {'window': 0}}, ['voice.window', '0']),
    ({'data': None}, ['data', 'None']),
    ({'data': [1]}, ['data', '[1]']),
    ({'data': {1: 2}}, ['data', '1']),
    ({'model': {'gpt': {'dropout': 1.0}}}, ['model.gpt.dropout', '1.0']),
    ({'model': {'gpt': {'width': 100, 'heads': 3}}}, ['model.gpt', 'width 100', 'heads 3'])])
def test_a_wrong_value_names_key_and_value(values, parts):
    with pytest.raises(UserError) as e: XTTSConfig.from_dict(values, 'run.yaml')
    assert str(e.value).startswith('run.yaml: ') and all(p in str(e.value) for p in parts), str(e.value)

EDGES = {   # key: values that are let in, and those just beyond
    'model.audio.f_max': ([0.5, 11025], [0, 11026]), 'model.audio.win_length': ([1, 1024], [0, 1025]),
    'model.gpt.dropout': ([0, 0.9], [-0.1, 1]), 'model.gpt.code_noise': ([0, 0.9], [1]),
    'model.gpt.grown_from': ([0], [-1]), 'model.speaker.pre_emphasis': ([0, 0.9], [1]),
    'data.min_seconds': ([0, 11.6], [-0.1, 11.7]), 'data.max_seconds': ([0.5], [0.4]),
    'data.ram_budget': ([0], [-1]), 'data.max_drop_rate': ([0, 1], [1.1]), 'data.max_cache_gb': ([0.1], [0]),
    'data.seed': ([0, 2**31 - 1], [-1, 2**31]), 'training.seed': ([0, 2**31 - 1], [-1, 2**31]),
    'training.lora_alpha': ([0.1], [0]), 'training.weight_decay': ([0], [-1]),
    'training.beta_2': ([0.1, 0.999], [0, 1]), 'training.gradient_clip_norm': ([0.1], [0]),
    'training.text_loss_weight': ([0], [-1]), 'training.ema': ([0, 0.9], [-1, 1]),
    'speech.top_p': ([0, 1], [-0.1, 1.1]), 'speech.repetition_penalty': ([0.1], [0]),
    'speech.speed': ([0.25, 4], [0.24, 4.1]), 'speech.max_reference_seconds': ([0.5], [0.4]),
    'speech.reference_seconds': ([0.5], [0.4]), 'speech.reference_chunk_seconds': ([0.5, None], [0.4]),
    'voice.reference_seconds': ([0.5], [0.4]), 'voice.learning_rate': ([0.1], [0])}
EDGES |= {f'voice.{name}_weight': ([0], [-1]) for name in ('mel', 'adversarial', 'feature', 'speaker')}

@pytest.mark.parametrize('text, mode', [
    ('auto', 'auto'), ('on', 'xla'), ('off', 'graph'), ('true', 'xla'), ('false', 'graph'), ('"on"', 'xla'),
    ('"off"', 'graph'), ('1', 'xla'), ('0', 'graph')])
def test_the_old_switch_of_xla_is_read_and_the_mode_written(tmp_path, text, mode):
    (tmp_path / 'run.yaml').write_text(f'training: {{enable_xla_compilation: {text}}}')
    config = XTTSConfig.load(tmp_path / 'run.yaml')
    assert config.training.mode == mode and XTTSConfig().training.mode == 'auto'
    assert 'mode: ' + mode in config.to_yaml() and 'enable_' not in config.to_yaml()
    (tmp_path / 'again.yaml').write_text(config.to_yaml())
    assert XTTSConfig.load(tmp_path / 'again.yaml') == config

@pytest.mark.parametrize('training, words', [
    ({'enable_graph_mode': False, 'enable_xla_compilation': True}, 'training.mode to eager or xla instead'),
    ({'mode': 'xla', 'enable_graph_mode': False}, 'mode xla and enable_graph_mode contradict each other'),
    ({'mode': 'eager', 'enable_xla_compilation': 'auto'}, 'leave the older keys out'),
    *(({'enable_xla_compilation': value}, f'is neither on nor off: {value!r}; set training.mode')
      for value in ('maybe', 2, None, 0.5)), ({'enable_graph_mode': 'auto'}, "neither on nor off: 'auto'")])
def test_contradicting_switches_are_refused(training, words):
    for refuse in (lambda: XTTSConfig.from_dict({'training': training}, 'f.yaml'),
                   lambda: XTTSConfig().replace('f.yaml', training=training)):
        with pytest.raises(UserError, match=rf'^f\.yaml: training: [^\n]*{re.escape(words)}[^\n]*\.$'):
            refuse()

def test_values_are_let_in_up_to_the_edge():
    for key, (good, bad) in EDGES.items():
        for value in good + bad:
            values = value
            for name in reversed(key.split('.')): values = {name: values}
            if value in good: XTTSConfig.from_dict(values)
            else:
                said = f'{key.rpartition(".")[0]}.*{value}'
                with pytest.raises(UserError, match=said): XTTSConfig.from_dict(values)

@pytest.mark.parametrize('content', [b'a: [', b'a: b: c', b'\t- x', b'just words', b'[1, 2]', b'\x00',
                                     b'1: 2', b'model: \xff',
                                     None],
                         ids=['open', 'twice', 'tab', 'words', 'list', 'binary', 'number-key', 'latin1',
                              'missing'])
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
    assert changed.replace(data={'batch_size': config.data.batch_size},
                           model={'gpt': {'layers': 4}}) == config
    with pytest.raises(UserError, match='did you mean "batch_size"'): config.replace(data={'batchsize': 3})
    for wrong in ({'data': 3}, {'dat': {'batch_size': 3}}):   # no section, no such section
        with pytest.raises(UserError, match=f'settings: .*{[*wrong][0]}'): config.replace(**wrong)

def test_settings_are_frozen():
    with pytest.raises(pydantic.ValidationError, match='frozen'): XTTSConfig().data.batch_size = 3

def test_presets_by_name():
    assert XTTSConfig.preset('tiny') == XTTSConfig.tiny()
    assert XTTSConfig.preset('xtts_v2').model == ModelConfig()
    with pytest.raises(UserError, match='no preset "huge".*tiny, xtts_v2'): XTTSConfig.preset('huge')

TINY = {   # what it has instead of the released model's
    'dvae': dict(hidden=96, codebook_dim=64, codes=256, resnet_blocks=1),
    'gpt': dict(layers=4, width=192, heads=6, text_tokens=256, max_text_tokens=200, max_audio_codes=256,
                prompt_latents=8, conditioning_layers=2, perceiver_layers=1, perceiver_heads=4,
                perceiver_head_dim=32, code_noise=0.15),
    'speaker': dict(filters=(8, 16, 16, 16), blocks=(1, 1, 1, 1), width=32), 'decoder': dict(channels=64),
    'data': dict(batch_size=16, reference_frames=128, buckets=3),
    'training': dict(learning_rate=1e-3, warmup_steps=50, beta_2=0.98, dvae_learning_rate=2e-3),
    'voice': dict(steps=2000, batch_size=8, window=8, learning_rate=1e-3, reference_seconds=1.,
                  periods=(2, 3, 5), windows=(512,), channels=8)}

# --- the workspace --------------------------------------------------------------------------------

@pytest.fixture
def outside(tmp_path, monkeypatch):
    "A working directory under no settings file, and no test environment."
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('IN_TEST', raising=False)
    return tmp_path.resolve()

def write(folder, text): (folder / 'settings.ini').write_text(text, encoding='utf-8')

def test_without_a_file_everything_lies_in_the_working_directory(outside):
    w = workspace()
    assert (w.root, w.data, w.cache, w.runs,
            w.scale) == (outside, *(outside / n for n in ('data', 'cache', 'runs')), 'tiny')

def test_the_file_is_searched_upwards_and_the_nearest_counts(outside, monkeypatch):
    deep = outside / 'a' / 'b' / 'c'
    deep.mkdir(parents=True)
    write(outside, '[workspace]\ndata = far\nscale = full\n')
    monkeypatch.chdir(deep)
    assert (workspace().data, workspace().root, workspace().scale) == (outside / 'far', outside, 'full')
    write(outside / 'a', '[workspace]\ndata = near\n')
    assert (workspace().data, workspace().scale) == (outside / 'a' / 'near', 'tiny')
    assert workspace(outside).data == outside / 'far'

def test_under_test_the_scale_is_tiny(outside, monkeypatch):
    write(outside, '[workspace]\nscale = full\n')
    assert sizes(tiny=1, full=2) == 2
    monkeypatch.setenv('IN_TEST', '1')
    assert workspace().scale == 'tiny' and sizes(tiny=1, full=2) == 1

@pytest.mark.parametrize('text, part', [
    ('nonsense\n', 'section headers'), ('[workspace]\nscal = tiny\n', 'did you mean "scale"'),
    ('[workspace]\nscale = huge\n', "'tiny' or 'full'"),
    ('[workspace]\ndata = a\ndata = b\n', 'already exists'),
    ('[workspace\n', 'settings.ini'),
    ('[workspace]\nzzz = 1\n', 'it has root, data, cache, runs, xla_cache, scale'),
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


def test_settings_of_an_editor_of_windows(outside):
    (outside / 'a.yaml').write_bytes(
        b'\xef\xbb\xbfdata:  # a\r\n  batch_size: 3\r\n\r\nspeech:\r\n  top_k: 7\r\n')
    config = XTTSConfig.load(outside / 'a.yaml')
    assert (config.data.batch_size, config.speech.top_k) == (3, 7)


# --- TensorFlow -----------------------------------------------------------------------------------

def test_setup_twice_changes_nothing_and_tells_what_it_got():
    first = setup_tf(threads=2)
    assert setup_tf(threads=2) == first
    late = setup_tf(threads=7)   # TensorFlow has started, or takes it now: either way the table tells
    import tensorflow as tf
    assert late['intra-op threads'] == (7, tf.config.threading.get_intra_op_parallelism_threads())
    setup_tf(threads=2)

@pytest.fixture
def tf_config(monkeypatch):
    "TensorFlow's settings as it takes them before it starts, on three cores, with a card that is not there."
    import tensorflow as tf
    told, gpu = {}, SimpleNamespace(name='GPU:0')
    monkeypatch.setattr(tf.config.experimental, 'get_device_details', lambda gpu: {})
    fake = {'list_physical_devices': lambda kind: [gpu] if told.get('card', True) else [],
            'set_logical_device_configuration': lambda gpu, parts: told.update(parts=parts),
            'get_logical_device_configuration': lambda gpu: told.get('parts')}
    for name, f in fake.items(): monkeypatch.setattr(tf.config, name, f)
    for kind in ('intra', 'inter'):
        name = f'{kind}_op_parallelism_threads'
        monkeypatch.setattr(tf.config.threading, f'set_{name}', lambda n, kind=kind: told.update({kind: n}))
        monkeypatch.setattr(tf.config.threading, f'get_{name}', lambda kind=kind: told[kind])
        monkeypatch.delenv(f'TF_NUM_{kind.upper()}OP_THREADS', raising=False)
    monkeypatch.setattr(tf.config.experimental, 'set_memory_growth', lambda gpu, on: told.update(growth=on))
    monkeypatch.setattr(tf.config.experimental, 'get_memory_growth', lambda gpu: told['growth'])
    monkeypatch.delenv('XTTS_NB_MEMORY_LIMIT', raising=False)
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {3, 4, 5} if pid == 0 else {0}, raising=False)
    monkeypatch.setattr(page, 'cpu_quota', lambda: (64., None))
    return told

def test_threads_and_memory_as_given_else_as_the_environment_asks(tf_config, monkeypatch):
    import tensorflow as tf
    rows = lambda within, between, **card: {'intra-op threads': (within,) * 2,
                                            'inter-op threads': (between,) * 2} | card
    growing = {'memory growth GPU:0': (True, True)}
    assert setup_tf() == rows(3, 3, **growing) and setup_tf(threads=2) == rows(2, 2, **growing)
    assert setup_tf(memory_growth=False)['memory growth GPU:0'] == (False, False)
    assert setup_tf(memory_limit=500) == rows(3, 3, **{'memory limit GPU:0': (500, 500)})
    monkeypatch.setenv('TF_NUM_INTEROP_THREADS', '7')
    monkeypatch.setenv('XTTS_NB_MEMORY_LIMIT', '600')
    assert setup_tf() == rows(3, 7, **{'memory limit GPU:0': (600, 600)})
    assert setup_tf(5)['intra-op threads'] == (5, 5)
    with monkeypatch.context() as late:   # TensorFlow has started
        late.setattr(tf.config, 'get_logical_device_configuration', lambda gpu: [])
        assert setup_tf(5)['memory limit GPU:0'] == (600, None)
    tf_config.update(card=False)
    assert setup_tf(1) == rows(1, 1)
    monkeypatch.delattr(os, 'sched_getaffinity')
    monkeypatch.setattr(os, 'cpu_count', lambda: 11)
    assert setup_tf()['intra-op threads'] == (11, 11)

@pytest.mark.parametrize('limit', [None, 500])
def test_a_card_with_the_other_kind_of_memory_keeps_it(tf_config, monkeypatch, limit):
    "TensorFlow raises `ValueError` for a card that is divided already, or that grows already."
    import tensorflow as tf
    def refuse(*given): raise ValueError('Cannot set memory growth on device when virtual devices configured')
    tf_config['growth'] = False
    monkeypatch.setattr(tf.config, 'set_logical_device_configuration', refuse)
    monkeypatch.setattr(tf.config.experimental, 'set_memory_growth', refuse)
    expected = {'memory limit GPU:0': (500, None)} if limit else {'memory growth GPU:0': (True, False)}
    got = setup_tf(threads=2, memory_limit=limit)
    assert got == {'intra-op threads': (2, 2), 'inter-op threads': (2, 2)} | expected

@pytest.mark.parametrize('shown, cards, says', [
    (None, 2, 'has 2 GPUs, but TensorFlow opens none'), ('0', 1, 'has 1 GPU, but TensorFlow opens none'),
    ('-1', 2, None), ('', 2, None), (None, 0, None)])
def test_a_card_that_tensorflow_cannot_open_is_named_once(tf_config, monkeypatch, capsys, shown, cards, says):
    monkeypatch.setattr(page, '_reported', set())
    monkeypatch.setattr('pynvml.nvmlInit', lambda: None)
    monkeypatch.setattr('pynvml.nvmlDeviceGetCount', lambda: cards)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    if shown is not None: monkeypatch.setenv('CUDA_VISIBLE_DEVICES', shown)
    tf_config.update(card=False)
    setup_tf(), setup_tf()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(says) and all(says in line and "pip install" in line for line in lines)

@pytest.mark.parametrize('capability, named', [((9, 0), False), ((8, 6), False), ((10, 0), True),
                                               ((12, 0), True), (None, False)])
def test_a_card_that_is_too_new_for_tensorflow_is_named(tf_config, monkeypatch, capsys, capability, named):
    import tensorflow as tf
    monkeypatch.setattr(page, '_reported', set())
    details = {'device_name': 'RTX 5090', 'compute_capability': capability}
    monkeypatch.setattr(tf.config.experimental, 'get_device_details', lambda gpu: details)
    setup_tf()
    said = capsys.readouterr().err
    assert ('built for 9.x at most' in said) == named == bool(said)   # as the wheel says of itself
    if named: assert said.startswith(f'RTX 5090 has compute capability {capability[0]}.0, and TensorFlow')

@pytest.fixture
def two_cards(monkeypatch):
    "TensorFlow's own rules for two cards that are not there, in a context that has not started."
    import tensorflow as tf
    from tensorflow.python.eager import context
    fresh = context.Context()
    cards = [tf.config.PhysicalDevice(f'/physical_device:GPU:{i}', 'GPU') for i in range(2)]
    fresh._physical_devices, fresh._pluggable_devices = list(cards), []
    fresh._visible_device_list, fresh._memory_growth_map = list(cards), dict.fromkeys(cards)
    fresh._physical_device_to_index = {card: i for i, card in enumerate(cards)}
    monkeypatch.setattr(context, 'context', lambda: fresh)
    monkeypatch.setattr(tf.config.experimental, 'get_device_details', lambda gpu: {})
    monkeypatch.setattr(page, '_reported', set())
    monkeypatch.delenv('XTTS_NB_MEMORY_LIMIT', raising=False)
    return fresh, cards

@pytest.mark.parametrize('limit', [None, 500])
def test_cards_that_are_divided_already_stay_so(two_cards, limit):
    "One is divided, the other is not: no error of TensorFlow, now or when it starts."
    import tensorflow as tf
    fresh, cards = two_cards
    parts = [tf.config.LogicalDeviceConfiguration(memory_limit=m) for m in (100, 200)]
    tf.config.set_logical_device_configuration(cards[0], parts)
    got = setup_tf(threads=2, memory_limit=limit)
    if limit: assert [got[f'memory limit {c.name}'] for c in cards] == [(500, 500)] * 2
    else: assert [got[f'memory growth {c.name}'] for c in cards] == [(True, None), (True, True)]
    divided = tf.config.get_logical_device_configuration(cards[0])
    assert [part.memory_limit for part in divided] == ([500] if limit else [100, 200])
    options = fresh._compute_gpu_options()
    assert len(options.experimental.virtual_devices) == 2 and fresh._context_handle is None

def test_a_card_is_named_before_tensorflow_starts(two_cards, monkeypatch, capsys):
    import tensorflow as tf
    details = {'device_name': 'RTX 5090', 'compute_capability': (12, 0)}
    monkeypatch.setattr(tf.config.experimental, 'get_device_details', lambda gpu: details)
    setup_tf(threads=2)
    said = capsys.readouterr().err
    assert said.count('RTX 5090 has compute capability 12.0') == 1 and 'Use the container' in said
    assert two_cards[0]._context_handle is None

@pytest.mark.parametrize('before, after', [(None, 'PCI_BUS_ID'), ('FASTEST_FIRST', 'FASTEST_FIRST')])
def test_cuda_numbers_the_cards_as_nvml_does(tf_config, monkeypatch, before, after):
    monkeypatch.setenv('CUDA_DEVICE_ORDER', before or '')
    if not before: monkeypatch.delenv('CUDA_DEVICE_ORDER')
    setup_tf()
    assert os.environ['CUDA_DEVICE_ORDER'] == after

@pytest.mark.parametrize('value, number', [
    (None, None), ('', None), ('1', 1), ('12', 12), ('0', UserError), ('-1', UserError), ('x', UserError),
    ('1.5', UserError)])
def test_a_number_in_the_environment(monkeypatch, value, number):
    monkeypatch.delenv('A_NUMBER', raising=False)
    if value is not None: monkeypatch.setenv('A_NUMBER', value)
    if number is not UserError: assert environment_number('A_NUMBER') == number
    else:
        pytest.raises(UserError, environment_number,
                      'A_NUMBER').match(f'^A_NUMBER={value}: give a positive number')

@pytest.mark.parametrize('level, loaded, said', [(None, False, ''), ('2', False, ''), ('0', False, 'hello'),
                                                 (None, True, 'hello'), ('0', True, 'hello')])
def test_the_greeting_of_tensorflow_is_hidden_unless_wanted(monkeypatch, capfd, level, loaded, said):
    modules = {'tensorflow': None} if loaded else {}
    monkeypatch.setenv('TF_XLA_FLAGS', '--a')
    monkeypatch.setattr(page, 'sys', SimpleNamespace(modules=modules, stderr=sys.stderr))
    monkeypatch.delenv('TF_CPP_MIN_LOG_LEVEL', raising=False)
    if level: monkeypatch.setenv('TF_CPP_MIN_LOG_LEVEL', level)
    with page.without_start_messages(): os.write(2, b'hello')
    os.write(2, b', later')
    assert capfd.readouterr().err == f'{said}, later'
    if not loaded: assert os.environ['TF_CPP_MIN_LOG_LEVEL'] == (level or '3')

MINE = '--tf_xla_persistent_cache_directory=/kept/here --tf_xla_persistent_cache_device_types=CPU,GPU'

KEPT, THEIRS = Path('/kept'), '--tf_xla_persistent_cache_directory=/theirs'

@pytest.mark.parametrize('folder, flags, after', [
    (None, '', ''), (None, '--a', '--a'), (KEPT, '', MINE), (KEPT, '--a', f'--a {MINE}'),
    (KEPT, THEIRS, THEIRS), (Path('/a b'), '', MINE.replace('/kept/here', '"/a b/here"'))])
def test_the_folder_of_xla_is_named_once(monkeypatch, folder, flags, after):
    monkeypatch.setenv('TF_XLA_FLAGS', flags)
    monkeypatch.setattr(page, '_machine', lambda: 'here')
    page._keep_compiled(folder)
    assert os.environ['TF_XLA_FLAGS'] == after

def test_compiled_code_is_kept_apart_for_each_kind_of_machine(monkeypatch):
    "Flags of the CPU, kind of the GPU and version of TensorFlow count; its frequency does not."
    files = {'cpuinfo': 'flags\t: avx amx\ncpu MHz\t: 2000', 'information': 'Model: \tH100\nIRQ: 1'}
    gpus, version = [Path('/proc/driver/nvidia/gpus/0/information')], '2.21.0'
    monkeypatch.setattr(page.Path, 'glob', lambda path, pattern: gpus if str(path).endswith('gpus') else [])
    monkeypatch.setattr(page.Path, 'read_text', lambda path, **_: files[path.name])
    monkeypatch.setattr(page.metadata, 'version', lambda name: version)
    first = page._machine()
    assert first == page._machine() and first.startswith('tensorflow-2.21.0-')
    files['cpuinfo'] = files['cpuinfo'].replace('2000', '3000')
    assert page._machine() == first
    names, others = {first}, [('cpuinfo', 'flags\t: avx'), ('cpuinfo', 'Features\t: sve')]
    for name, text in (*others, ('information', 'Model: A100')):
        files[name] = text
        names.add(page._machine())
    monkeypatch.setattr(page.platform, 'machine', lambda: 'riscv')
    names.add(page._machine())
    monkeypatch.setattr(page.metadata, 'version', lambda name: '2.22.0')
    names.add(page._machine())
    assert len(names) == 6
    def missing(*_, **__): raise page.metadata.PackageNotFoundError
    monkeypatch.setattr(page.metadata, 'version', missing)
    monkeypatch.setattr(page.Path, 'read_text', lambda path, **_: (_ for _ in ()).throw(OSError))
    assert page._machine().startswith('tensorflow-other-')

CHILD = '''
from xtts_nb.config import setup_tf
first = setup_tf(threads=1)
import tensorflow as tf
tf.reduce_sum(tf.ones(3)).numpy()
again, late = setup_tf(threads=1), setup_tf(threads=2)
assert first == again == {'intra-op threads': (1, 1), 'inter-op threads': (1, 1)}, (first, again)
assert late['intra-op threads'] == (2, 1), late
'''

def test_a_request_that_comes_too_late_is_shown():
    done = python(CHILD, env=os.environ | {'CUDA_VISIBLE_DEVICES': '-1'})
    assert done.code == 0, done.err


# --- what XLA compiled ----------------------------------------------------------------------------

COMPILE = '''
from xtts_nb.config import setup_tf
setup_tf()
import tensorflow as tf
print(float(tf.function(lambda x: tf.sin(x) @ x, jit_compile=True)(tf.ones((4, 4)))[0, 0]))'''

def compiled(folder) -> set[str]:
    "Compile in a process that starts in `folder`; the files that XLA keeps there."
    env = {k: v for k, v in os.environ.items() if k != 'TF_XLA_FLAGS'} | {'CUDA_VISIBLE_DEVICES': '-1'}
    subprocess.run([sys.executable, '-c', COMPILE], cwd=folder, env=env, check=True, capture_output=True)
    return {p.name for p in (folder / 'kept').glob('*/*')}

@pytest.mark.slow
def test_a_second_start_finds_what_xla_compiled(tmp_path):
    (tmp_path / 'settings.ini').write_text('[workspace]\n')
    assert compiled(tmp_path) == set()
    (tmp_path / 'settings.ini').write_text('[workspace]\nxla_cache = kept\n')
    first = compiled(tmp_path)
    assert first and compiled(tmp_path) == first


@pytest.mark.parametrize('files, quota', [
    ({}, math.inf), ({'cpu.max': 'max 100000\n'}, math.inf), ({'cpu.max': '250000 100000\n'}, 2.5),
    ({'cpu/cpu.cfs_quota_us': '-1\n', 'cpu/cpu.cfs_period_us': '100000\n'}, math.inf),
    ({'cpu/cpu.cfs_quota_us': '400000\n', 'cpu/cpu.cfs_period_us': '200000\n'}, 2.),
    ({'cpu/cpu.cfs_quota_us': '400000\n'}, math.inf), ({'cpu.max': 'nonsense'}, math.inf)],
    ids=['none', 'v2 free', 'v2', 'v1 free', 'v1', 'v1 half', 'odd'])
def test_the_quota_of_a_container(monkeypatch, tmp_path, files, quota):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    groups = lambda kind: [tmp_path, tmp_path / kind]
    monkeypatch.setattr(page, 'control_groups', groups)
    assert cpu_quota()[0] == quota
    if quota < math.inf: assert cpu_quota()[1] in groups('cpu')

def test_the_control_groups_of_a_process(tmp_path):
    own = tmp_path / 'own'
    own.write_text('4:cpu,cpuacct:/a/b\n3:memory:/m\n0::/c\n')
    find = lambda kind: [g.relative_to(tmp_path).as_posix() for g in control_groups(kind, tmp_path, own)]
    assert find('cpu') == ['.', 'cpu', 'cpu/a/b', 'cpu/a', 'c']
    assert find('memory') == ['.', 'memory', 'memory/m', 'c']
    own.unlink()
    assert find('cpu') == ['.', 'cpu']   # not on Linux

@pytest.mark.parametrize('quota, number', [(64., 3), (3., 3), (2.5, 3), (2., 2), (0.1, 1)])
def test_a_container_has_the_cores_of_its_quota(monkeypatch, quota, number):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {1, 5, 7}, raising=False)
    monkeypatch.setattr(page, 'cpu_quota', lambda: (quota, None))
    assert cores() == number and usable_cores() == min(3, quota)

def test_as_many_cores_as_the_process_may_use(monkeypatch):
    monkeypatch.setattr(page, 'cpu_quota', lambda: (math.inf, None))
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: {1, 5, 7} if pid == 0 else set(), raising=False)
    assert cores() == 3
    monkeypatch.delattr(os, 'sched_getaffinity')   # as on macOS
    monkeypatch.setattr(os, 'cpu_count', lambda: 6)
    assert cores() == 6
