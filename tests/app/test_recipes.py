"Recipes: commented files, GPU presets, files of the guides, precedence; the effect of each key and option."
from typing import Literal

import pytest
import yaml

from xtts_nb.app import recipes
from xtts_nb.config import REFUSED_KEYS, SWITCHES, Section, UserError, XTTSConfig
from xtts_nb.app.recipes import (
    FLAGS, GPU_PRESETS, LEVELS, REDUNDANT_KEYS, REFUSED_FLAGS, RENAMED_KEYS, check_unknown, check_used,
    commented_yaml, config_diff, convert_guide, descriptions, flat, from_environment, gpu_preset,
    load_recipe, nested, optimization_level, parse_assignments, recipe)

DEFAULT = XTTSConfig()


def at(config, key):
    "The value of a dotted key."
    for name in key.split('.'): config = getattr(config, name)
    return config

def load(values, where='their.yaml'):
    "The settings of a guide's file, and the lines about it."
    own, said = convert_guide(values, where)
    return XTTSConfig.from_dict(own, where), said

def sections(section=XTTSConfig):
    yield section
    for field in section.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from sections(field.annotation)


# --- the commented file -------------------------------------------------------------------------------------

@pytest.mark.parametrize('config', [XTTSConfig(), XTTSConfig.tiny()], ids=['xtts_v2', 'tiny'])
def test_a_commented_file_says_the_same(config):
    assert XTTSConfig.from_dict(yaml.safe_load(commented_yaml(config))) == config

def test_every_key_has_a_comment_and_the_file_shows_it():
    lines = commented_yaml(DEFAULT).splitlines()
    for section in sections():
        words = descriptions(section)
        for name, field in section.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section): continue
            assert name in words, f'{section.__name__}.{name} has no comment'
            assert any(line.strip().startswith(f'{name}: ') and f'# {words[name]}' in line for line in lines)

def test_choices_are_listed():
    assert 'precision: float32' in commented_yaml(DEFAULT)
    assert 'one of float32, bfloat16, float16' in commented_yaml(DEFAULT)


class Inner(Section):
    "What lies within."
    word: Literal['a', 'b'] = 'a'   # which of them
    plain: str | None = None

class Outer(Section):
    "All."
    long: str = 'x ' * 60           # long enough
    kind: Literal[1, 2] = 1
    inner: Inner = Inner()
    last: int = 3                   # the end

def test_the_lines_of_a_section():
    assert list(recipes._lines(Outer())) == [
        f"long: '{'x ' * 60}'   # long enough", 'kind: 1'.ljust(36) + '   # one of 1, 2', '',
        'inner:   # What lies within.',
        '  word: a'.ljust(36) + '   # which of them; one of a, b', '  plain: null',
        'last: 3'.ljust(36) + '   # the end']


# --- dotted keys --------------------------------------------------------------------------------------------

def test_flat_and_nested_are_inverse():
    values = DEFAULT.model_dump()
    assert flat({'a': {}, 'b': {'c': 1, 'd': {'e': 2}}}) == {'a': {}, 'b.c': 1, 'b.d.e': 2}
    assert nested(flat(values)) == values and flat(values)['model.gpt.width'] == 1024

def test_a_key_given_as_value_and_as_section():
    with pytest.raises(UserError, match='data.seed: data is given as 3 too'):
        nested({'data': 3, 'data.seed': 1})
    with pytest.raises(UserError, match='model.gpt.layers: model is given as 1 too'):
        nested({'model': 1, 'model.gpt.layers': 2})

def test_what_differs():
    after = DEFAULT.replace(data={'batch_size': 3}, model={'gpt': {'layers': 2}})
    assert config_diff(DEFAULT, after) == {'model.gpt.layers': (30, 2), 'data.batch_size': (8, 3)}
    assert config_diff(after, after) == {}


# --- cards and levels ---------------------------------------------------------------------------------------

@pytest.mark.parametrize('card', GPU_PRESETS)
def test_a_preset_changes_the_keys_it_names(card):
    keys = gpu_preset(card, cores=64)
    config = recipe(DEFAULT, {'card': keys}, say=lambda line: None)
    assert {k: at(config, k) for k in keys} == keys and set(config_diff(DEFAULT, config)) <= set(keys)
    assert config.data.batch_size == GPU_PRESETS[card][0] and config.training.precision == 'bfloat16'
    assert gpu_preset(card, cores=3)['data.num_workers'] == 3

@pytest.mark.parametrize('name, card',
                         [('RTX 4090', '4090'), ('NVIDIA GeForce RTX 3060', '3060'), ('a100', 'A100'),
                          ('h-200', 'H200')])
def test_cards_as_people_call_them(name, card): assert gpu_preset(name, 8) == gpu_preset(card, 8)

@pytest.mark.parametrize('name', ['3060 Ti', 'T4', ''])
def test_an_unknown_card_names_those_there_are(name):
    with pytest.raises(UserError, match='there is 4090, 3090, 3060, A100, H200'): gpu_preset(name, 8)

@pytest.mark.parametrize('name', LEVELS)
def test_a_level_changes_what_it_names(name):
    start = DEFAULT.replace(training={'precision': 'float16', 'schedule': 'noam', 'ema': 0.5})
    for keys in (optimization_level(name), optimization_level(name)):
        config = recipe(start, {name: keys}, say=lambda line: None)
        assert {k: at(config, k) for k in keys} == keys and config_diff(start, config)

def test_an_unknown_level():
    with pytest.raises(UserError, match='"turbo"; choose one of basic, enhanced, experimental'):
        optimization_level('turbo')


# --- the guides' keys ---------------------------------------------------------------------------------------

CARRIED = [   # their key, their value -> our key, our value: each different from the default
    ('data.enable_xla', False, 'training.mode', 'graph'),
    ('data.mixed_precision', True, 'training.precision', 'bfloat16'),
    ('training.mixed_precision', 'mixed_float16', 'training.precision', 'float16'),
    ('training.gradient_accumulation_steps', 2, 'training.accumulation', 2),
    ('data.enhanced_gpu_prefetch', False, 'data.prefetch_to_gpu', False),
    ('data.pipeline_buffer_size', 100, 'data.prefetch_buffer_size', 100),
    ('data.max_mel_frames', 800, 'data.max_seconds', pytest.approx(9.288, abs=1e-3)),
    ('model.max_mel_frames', '800', 'data.max_seconds', pytest.approx(9.288, abs=1e-3)),
    ('data.max_mel_frames', 150, 'data.max_seconds', 1.741),   # 150 * 256 / 22050 s
    ('data.min_audio_length', 1.0, 'data.min_seconds', 1.0),
    ('data.max_text_length', 180, 'data.max_text_tokens', 180),
    ('model.max_text_length', 180, 'data.max_text_tokens', 180),
    ('data.sample_rate', 24000, 'model.audio.sample_rate', 24000),
    ('model.sample_rate', 24000, 'model.audio.sample_rate', 24000),
    ('data.n_mels', 64, 'model.audio.n_mels', 64), ('model.n_mels', 64, 'model.audio.n_mels', 64),
    # in another section here
    ('training.batch_size', 48, 'data.batch_size', 48), ('batch_size', 48, 'data.batch_size', 48),
    ('training.num_workers', 12, 'data.num_workers', 12),
    ('data.learning_rate', '1e-4', 'training.learning_rate', 1e-4),
    ('data.gradient_checkpointing', True, 'training.gradient_checkpointing', True),
    # theirs and ours
    ('data.batch_size', 48, 'data.batch_size', 48), ('data.num_workers', 12, 'data.num_workers', 12),
    ('data.prefetch_buffer_size', 12, 'data.prefetch_buffer_size', 12),
    ('data.max_text_tokens', 180, 'data.max_text_tokens', 180),
    ('data.prefetch_to_gpu', False, 'data.prefetch_to_gpu', False),
    ('data.pad_to_fixed_length', True, 'data.pad_to_fixed_length', True),
    ('data.preprocessing_mode', 'precompute', 'data.preprocessing_mode', 'precompute'),
    ('training.enable_graph_mode', False, 'training.mode', 'eager'),
    ('training.epochs', 9, 'training.epochs', 9),
    ('training.enable_xla_compilation', True, 'training.mode', 'xla'),
    ('training.enable_eager_debug', True, 'training.mode', 'eager'),
    ('training.mode', 'graph', 'training.mode', 'graph'),
    ('training.learning_rate', '1e-4', 'training.learning_rate', 1e-4)]

@pytest.mark.parametrize('theirs, value, ours, got', CARRIED, ids=[f'{c[0]}={c[1]}' for c in CARRIED])
def test_their_key_is_converted_to_ours(theirs, value, ours, got):
    config, said = load(nested({theirs: value}))
    assert at(config, ours) == got and at(DEFAULT, ours) != got
    assert list(config_diff(DEFAULT, config)) == [ours]
    assert len(said) == (theirs != ours) and all(theirs in line and ours in line for line in said)

@pytest.mark.parametrize('key, name', [
    ('data.batch_size', None), ('model.gpt.layers', None), ('model.gpt', None), ('nope', 'nope'),
    ('data.nope', 'nope'),
    ('model.gpt.nope', 'nope'), ('data.batch_size.nope', 'nope'), ('data.a.b', 'b')])
def test_which_part_of_a_key_is_theirs(key, name): assert recipes._theirs(key) == name

def test_every_renamed_key_is_tested(): assert {c[0].split('.')[-1] for c in CARRIED} >= set(RENAMED_KEYS)

NOTHING = [('data.use_tf_native_loading', True), ('data.optimize_cpu_gpu_overlap', True),
           ('training.enable_tensorrt', False), ('data.shuffle_buffer_multiplier', 20),
           ('data.pin_memory', True), ('data.pin_memory', False), ('data.cache_verification', True),
           ('training.model_start_delay', 2.0), ('data.auto_tune_performance', True)]

@pytest.mark.parametrize('key, value', NOTHING)
def test_a_redundant_key_is_reported(key, value):
    config, said = load(nested({key: value}))
    assert config == DEFAULT
    assert said == [f'their.yaml: {key} does nothing here: {REFUSED_KEYS[key.split(".")[-1]]}.']
    assert {k.split('.')[-1] for k, _ in NOTHING} == set(REDUNDANT_KEYS) <= set(REFUSED_KEYS)

@pytest.mark.parametrize('key, value',
                         [('data.use_tf_native_loading', False), ('data.optimize_cpu_gpu_overlap', False),
                          ('training.enable_tensorrt', True), ('training.max_memory_fraction', 0.9),
                          ('training.kl_loss_weight', 1.0)])
def test_a_key_without_counterpart_is_refused_with_its_reason(key, value):
    with pytest.raises(UserError) as e: load(nested({key: value}))
    assert str(e.value) == f'their.yaml: there is no key "{key}": {REFUSED_KEYS[key.split(".")[-1]]}.'

def test_every_known_foreign_key_is_handled():
    renamed = set(RENAMED_KEYS) - {'sample_rate', 'n_mels'}
    assert set(REFUSED_KEYS) == renamed | set(REDUNDANT_KEYS) | {'max_memory_fraction', 'kl_loss_weight'}

@pytest.mark.parametrize('key, value', [('data.mixed_precision', 'maybe'), ('data.mixed_precision', [1]),
                                        ('data.max_mel_frames', 'many')])
def test_a_value_that_cannot_be_converted(key, value):
    with pytest.raises(UserError, match=rf'their.yaml: {key}: .* cannot be made a value of \w+\.\w+'):
        load(nested({key: value}))

@pytest.mark.parametrize('key, value',
                         [('data.enable_xla', 'maybe'), ('data.pipeline_buffer_size', 0),
                          ('data.sample_rate', -1), ('training.batch_size', [4])])
def test_a_converted_value_is_validated(key, value):
    with pytest.raises(UserError, match='their.yaml: '): load(nested({key: value}))

def test_our_key_takes_precedence_over_theirs():
    config, said = load({'data': {'batch_size': 48, 'prefetch_buffer_size': 8, 'pipeline_buffer_size': 100},
                         'training': {'batch_size': 48}})
    assert (config.data.batch_size, config.data.prefetch_buffer_size) == (48, 8)
    assert said == ['their.yaml: data.pipeline_buffer_size is data.prefetch_buffer_size here, 8, which the '
                    'file sets too; 100 is ignored.',
                    'their.yaml: training.batch_size is data.batch_size here, 48.']

@pytest.mark.parametrize('values, meant', [
    ({'data': {'bach_size': 1}}, 'batch_size'), ({'training': {'learnin_rate': 1}}, 'learning_rate'),
    ({'trainin': {'learning_rate': 1, 'x': 1}}, 'training'), ({'model': {'gpt': {'layer': 2}}}, 'layers')])
def test_a_misspelled_key_names_the_nearest(values, meant):
    with pytest.raises(UserError, match=f'did you mean "{meant}"'): load(values)

GUIDES = {   # settings from the guides on low GPU utilisation
    'utilisation': '''
data: {batch_size: 48, num_workers: 12, prefetch_buffer_size: 8, shuffle_buffer_multiplier: 20,
       enable_xla: true, mixed_precision: true, pin_memory: true}
training: {batch_size: 48}''',
    'critical': '''
training: {enable_graph_mode: true, enable_xla_compilation: true, enable_eager_debug: false,
           learning_rate: 1e-4}''',
    'dual GPU': '''
data: {batch_size: 128, num_workers: 32, prefetch_buffer_size: 100, pipeline_buffer_size: 100,
       prefetch_to_gpu: true, pad_to_fixed_length: true, use_tf_native_loading: true}''',
    'bottleneck': '''
data: {preprocessing_mode: precompute, batch_size: 48, num_workers: 16, prefetch_buffer_size: 12,
       max_mel_frames: 800, use_tf_native_loading: true, enhanced_gpu_prefetch: true,
       optimize_cpu_gpu_overlap: true}
training: {epochs: 1000}''',
    'oscillation': '''
data: {use_tf_native_loading: true, prefetch_to_gpu: true, auto_tune_performance: true, batch_size: 8,
       num_workers: 8, prefetch_buffer_size: 8}
training: {gradient_accumulation_steps: 2}''',
}

@pytest.mark.parametrize('name', GUIDES)
def test_the_files_of_the_guides_load(name, tmp_path):
    (tmp_path / 'guide.yaml').write_text(GUIDES[name])
    said = []
    config = load_recipe(tmp_path / 'guide.yaml', said.append)
    asked, changed = flat(yaml.safe_load(GUIDES[name])), config_diff(DEFAULT, config)
    for key, value in asked.items():   # the key is ours, or a line names it
        if any(f': {key} ' in line for line in said): continue
        assert at(config, key) == (float(value) if key.endswith('rate') else value)
    assert changed and all(line.startswith(str(tmp_path / 'guide.yaml')) for line in said)

def test_a_file_that_is_not_there_or_no_yaml(tmp_path):
    with pytest.raises(UserError, match='no such settings file'): load_recipe(tmp_path / 'no.yaml')
    (tmp_path / 'bad.yaml').write_text('a: [')
    with pytest.raises(UserError, match='not YAML'): load_recipe(tmp_path / 'bad.yaml')

@pytest.mark.parametrize('values',
                         [{'data': None}, {'data': [1]}, {1: 2}, {'data': {1: 2}}, {'model': {}}, {}])
def test_odd_shapes(values):
    if values in ({'model': {}}, {}):
        assert load(values) == (DEFAULT, [])
        return
    with pytest.raises(UserError, match='their.yaml: '): load(values)


# --- layers -------------------------------------------------------------------------------------------------

def test_precedence_of_options_levels_presets_and_files():
    said = []
    file = DEFAULT.replace(data={'batch_size': 4, 'min_seconds': 1.0})
    layers = {'GPU preset 4090': gpu_preset('4090', 64), 'level': optimization_level('basic'),
              'flags': {'data.batch_size': 16}}
    config = recipe(file, layers, said.append)
    assert config.data.min_seconds == 1.0 and config.data.batch_size == 16   # file, flag
    assert config.data.num_workers == 24 and config.training.accumulation == 4   # card
    # level over card and default
    assert config.training.precision == 'float32' and config.training.mode == 'graph'
    assert said[0].startswith('GPU preset 4090: data.batch_size 4 -> 32, ')
    assert said[2] == 'flags: data.batch_size 32 -> 16'

def test_only_the_whole_is_checked():
    "A preset's batch of 8 in 2 parts over a file's batch of 3: only the end result has to be valid."
    odd = DEFAULT.replace(data={'batch_size': 3})
    assert recipe(odd, {'card': gpu_preset('3060', 8)}, print).training.accumulation == 2
    with pytest.raises(UserError, match='batch_size 3 is not a multiple of training.accumulation 2'):
        recipe(DEFAULT, {'card': gpu_preset('3060', 8), 'flags': {'data.batch_size': 3}}, lambda line: None)

def test_a_layer_with_an_old_switch_changes_the_mode():
    said = []
    eager = recipe(DEFAULT, {'options': {'training.enable_eager_debug': True}}, said.append)
    assert eager.training.mode == 'eager' and said == ['options: training.mode auto -> eager']
    both = {'file': {'training.mode': 'graph'}, 'options': {'training.enable_xla_compilation': True}}
    assert recipe(DEFAULT, both, said.append).training.mode == 'xla'
    resolved = recipes.resolve(DEFAULT, 'preset', None, both, said.append)
    assert resolved.came_from['training.mode'] == 'options'
    off = {'training.enable_graph_mode': False, 'training.enable_xla_compilation': True}
    with pytest.raises(UserError, match='^options: training: .* contradict each other; set training.mode'):
        recipe(DEFAULT, {'options': off}, said.append)

def test_without_layers_nothing_changes():
    said = []
    for layers in ({}, {'flags': {}}): assert recipe(DEFAULT, layers, said.append) is DEFAULT
    assert recipe(DEFAULT, {'flags': {'data.seed': DEFAULT.data.seed}}, said.append) == DEFAULT and not said

def test_the_environment(monkeypatch):
    monkeypatch.setenv('XTTS_NB_XLA', 'false')
    monkeypatch.setenv('XTTS_NB_PRECISION', '')
    assert from_environment() == {'training.mode': 'graph'}
    monkeypatch.delenv('XTTS_NB_XLA')
    monkeypatch.setenv('XTTS_NB_PRECISION', 'float16')
    assert from_environment() == {'training.precision': 'float16'}

@pytest.mark.parametrize('changes, explicit, key', [
    ({}, [], None), ({'data': {'seed': 7}}, [], None), ({'training': {'precision': 'float16'}},
                                                        ['training.precision'], None),
    ({'training': {'precision': 'float32'}}, [], None),   # back to the default: not a request
    ({'training': {'precision': 'float32'}}, ['training.precision'], 'training.precision: float32'),
    ({'data': {'seed': 7, 'batch_size': 3}}, [], 'data.batch_size: 3'),
    ({'data': {'seed': 7, 'batch_size': 3}}, ['data.seed'], 'data.batch_size: 3')])
def test_a_change_without_effect_is_refused(changes, explicit, key):
    begun = DEFAULT.replace(training={'precision': 'bfloat16'})
    check = lambda: check_used(begun, begun.replace(**changes),
                               {'training.precision': 'float16', 'data.batch_size': 5}, 'why', explicit)
    if not key:
        check()
        return
    with pytest.raises(UserError, match=f'^{key} does nothing here: why.$'): check()

@pytest.mark.parametrize('key', FLAGS.values())
def test_every_flag_has_a_key(key):
    assert key in flat(DEFAULT.model_dump()) or key.removeprefix('training.') in SWITCHES

@pytest.mark.parametrize('text, key, value', [
    ('training.precision=bfloat16', 'training.precision', 'bfloat16'),
    ('data.prefetch_to_gpu=false', 'data.prefetch_to_gpu', False),
    ('training.learning_rate=1e-4', 'training.learning_rate', 1e-4),
    ('model.speaker.blocks=[1, 2, 3, 4]', 'model.speaker.blocks', (1, 2, 3, 4)),
    ('speech.reference_chunk_seconds=null', 'speech.reference_chunk_seconds', None)])
def test_any_key_can_be_set(text, key, value):
    assert at(recipe(DEFAULT, {'--set': parse_assignments([text])}, print), key) == value

@pytest.mark.parametrize('text', ['seed', '=3', 'data.seed=[', ''])
def test_what_is_no_assignment(text):
    with pytest.raises(UserError, match='--set'): parse_assignments([text])

@pytest.mark.parametrize('text, hint', [('data.bach_size=3', 'did you mean "batch_size"'), ('data=3', 'data'),
                                        ('training.pin_memory=true', 'leave it out')])
def test_a_wrong_key_is_named(text, hint):
    with pytest.raises(UserError, match=hint):
        recipe(DEFAULT, {'--set': parse_assignments([text])}, lambda line: None)

@pytest.mark.parametrize('option', REFUSED_FLAGS)
def test_options_of_other_trainers_are_refused_with_a_reason(option):
    with pytest.raises(UserError, match=f'^{option} is no option here: ') as e:
        check_unknown([f'{option}=3', '7'], ['--run'])
    assert any(word in str(e.value) for word in ('use ', 'leave', '--prefetch-buffer-size'))

def test_a_misspelled_option_names_the_nearest():
    with pytest.raises(UserError, match='no option --bach-size; did you mean --batch-size?'):
        check_unknown(['--bach-size'], ['--batch-size'])
    with pytest.raises(UserError, match=r'no option --zzz\. See'): check_unknown(['--zzz'], ['--batch-size'])
    assert check_unknown([], []) is None
