"Settings from commented files, cards, the environment and options, and what wins."
import pytest
import yaml

from xtts_nb.settings import (
    _GPU_PRESETS, _LEVELS, _OPTIONS, check_used, commented_yaml, descriptions, flat,
    from_environment, gpu_preset, nested, option_keys, optimization_level, parse_assignments, resolve)
from xtts_nb.config import Section, UserError, XTTSConfig

DEFAULT = XTTSConfig()

def laid_over(begun, **layers): return resolve(begun, 'run', layers, say=lambda line: None).config

def test_a_commented_file_says_the_same_and_explains_each_key():
    assert XTTSConfig.from_dict(yaml.safe_load(commented_yaml(DEFAULT))) == DEFAULT
    lines, todo = commented_yaml(DEFAULT).splitlines(), [XTTSConfig]
    while todo:
        section = todo.pop()
        comments = descriptions(section)
        for name, field in section.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                todo.append(field.annotation)
                continue
            assert any(line.strip().startswith(f'{name}: ')
                       and f'# {comments[name]}' in line for line in lines), name
    assert 'one of float32, bfloat16, float16' in commented_yaml(DEFAULT)

def test_a_key_is_given_once_and_options_are_keys():
    assert flat({'a': {}, 'b': {'c': 1, 'd': {'e': 2}}}) == {'a': {}, 'b.c': 1, 'b.d.e': 2}
    assert {*_OPTIONS.values()} <= {*flat(DEFAULT.model_dump())}
    with pytest.raises(UserError,
                       match='data.seed: data is given as 3 too'): nested({'data': 3, 'data.seed': 1})

@pytest.mark.parametrize('name', [*_GPU_PRESETS, *_LEVELS])
def test_a_preset_changes_the_keys_it_names(name):
    start = DEFAULT.replace(training={'gpt': {'precision': 'float16', 'ema': 0.5}})
    keys = gpu_preset(name, cores=3) if name in _GPU_PRESETS else optimization_level(name)
    config = laid_over(start, preset=keys)
    assert keys.items() <= flat(config.model_dump()).items() and config != start
    assert keys.get('data.num_workers', 3) == 3   # no more than cores

def test_cards_as_people_call_them():
    for name, card in (('RTX 4090', '4090'), ('NVIDIA GeForce RTX 3060', '3060'), ('h-200', 'H200')):
        assert gpu_preset(name, 8) == gpu_preset(card, 8)
    with pytest.raises(UserError, match='4090'): gpu_preset('3060 Ti', 8)

def test_what_wins():
    "File < environment < card < level < options; only the end has to be valid; each prints a line."
    said, file = [], DEFAULT.replace(data={'batch_size': 3, 'min_seconds': 1.0})
    layers = {'environment': {'training.gpt.precision': 'float16'}, 'GPU preset 4090': gpu_preset('4090', 64),
              'level': optimization_level('basic'), 'options': {'data.batch_size': 16}}
    found = resolve(file, 'run', layers, say=said.append)
    shown = {row['key']: (row['value'], row['from']) for row in found.rows()}
    assert shown['data.min_seconds'] == (1.0, 'run') and shown['data.batch_size'] == (16, 'options')
    assert shown['data.num_workers'] == (24, 'GPU preset 4090')
    assert shown['training.gpt.precision'] == ('float32', 'level')
    assert said[1].startswith('GPU preset 4090: data.batch_size 3 -> 32, ')
    assert said[3] == 'options: data.batch_size 32 -> 16'
    assert resolve(DEFAULT, '', {'options': {'data.seed': 0}}, say=said.append).config == DEFAULT
    assert len(said) == 4
    with pytest.raises(UserError, match='batch_size 3'):
        laid_over(file, card={'training.gpt.grad_accum_steps': 2})
    with pytest.raises(UserError, match='a.yaml: data.seed'):   # a file is checked by itself
        resolve(DEFAULT, '', {'a.yaml': {'data.seed': -1}, 'options': {'data.seed': 1}}, 'a.yaml')
    for wrong in ({'steps': 1, 'epochs': 1}, {'stepps': 1}): pytest.raises(UserError, option_keys, wrong)

def test_the_environment(monkeypatch):
    monkeypatch.setenv('XTTS_NB_MODE', 'graph')
    monkeypatch.setenv('XTTS_NB_PRECISION', '')
    assert from_environment() == {f'training.{part}.mode': 'graph' for part in ('gpt', 'dvae', 'decoder')}

@pytest.mark.parametrize('text, value', [
    ('training.gpt.precision=bfloat16', 'bfloat16'), ('data.prefetch_to_gpu=false', False),
    ('training.gpt.learning_rate=1e-4', 1e-4), ('model.speaker.blocks=[1, 2, 3, 4]', (1, 2, 3, 4)),
    ('speech.reference_chunk_seconds=null', None),
    ('seed', UserError), ('=3', UserError), ('data.seed=[', UserError), ('data=3', UserError),
    ('val=0.1', UserError)])
def test_any_key_can_be_set(text, value):
    config = lambda: laid_over(DEFAULT, options=parse_assignments([text]))
    if value is UserError: pytest.raises(UserError, config)
    else: assert flat(config().model_dump())[text.partition('=')[0]] == value

@pytest.mark.parametrize('changes, explicit, refused', [
    ({'data': {'seed': 7}, 'training': {'gpt': {'precision': 'float16'}}}, [], None),
    ({'training': {'gpt': {'precision': 'float32'}}}, [], None),   # back to the default: not a request
    ({'training': {'gpt': {'precision': 'float32'}}}, ['training.gpt.precision'],
     'training.gpt.precision: float32'),
    ({'data': {'batch_size': 3}}, [], 'data.batch_size: 3')])
def test_a_change_without_effect_is_refused(changes, explicit, refused):
    begun = DEFAULT.replace(training={'gpt': {'precision': 'bfloat16'}})
    always = {'training.gpt.precision': 'float16', 'data.batch_size': 5}
    check = lambda: check_used(begun, begun.replace(**changes), always, 'why', explicit)
    if refused: pytest.raises(UserError, check).match(refused)
    else: check()
