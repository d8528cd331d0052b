"The settings and options of MyXTTS."
import pytest

from xtts_nb.app.myxtts import ABSENT_SETTINGS, THEIR_OPTIONS, THEIR_SETTINGS, our_keys, our_options
from xtts_nb.settings import config_diff, nested
from xtts_nb.config import UserError, XTTSConfig

DEFAULT = XTTSConfig()

CONVERTED = [   # their key, their value -> our key, our value: each different from the default
    ('data.enable_xla', False, 'training.gpt.mode', 'graph'),
    ('data.mixed_precision', True, 'training.gpt.precision', 'bfloat16'),
    ('training.mixed_precision', 'mixed_float16', 'training.gpt.precision', 'float16'),
    ('training.gradient_accumulation_steps', 2, 'training.gpt.grad_accum_steps', 2),
    ('data.enhanced_gpu_prefetch', False, 'data.prefetch_to_gpu', False),
    ('data.pipeline_buffer_size', 100, 'data.prefetch_buffer_size', 100),
    ('model.max_mel_frames', '800', 'data.max_seconds', 9.288),
    ('data.max_mel_frames', 150, 'data.max_seconds', 1.741),
    ('data.min_audio_length', 1.0, 'data.min_seconds', 1.0),
    ('model.max_text_length', 180, 'data.max_text_tokens', 180),
    ('data.sample_rate', 24000, 'model.audio.sample_rate', 24000),
    ('model.n_mels', 64, 'model.audio.n_mels', 64),
    ('training.batch_size', 48, 'data.batch_size', 48), ('batch_size', 48, 'data.batch_size', 48),
    ('data.learning_rate', '1e-4', 'training.gpt.learning_rate', 1e-4),
    ('training.enable_graph_mode', False, 'training.gpt.mode', 'eager'),
    ('training.enable_xla_compilation', True, 'training.gpt.mode', 'xla'),
    ('training.enable_eager_debug', True, 'training.gpt.mode', 'eager'),
    ('training.gpt.epochs', 9, 'training.gpt.epochs', 9)]

def test_their_keys_become_ours():
    for theirs, value, ours, got in CONVERTED:
        keys, said = our_keys({theirs: value}, 'their.yaml')
        config = XTTSConfig.from_dict(nested(keys))
        assert {k: new for k, (_, new) in config_diff(DEFAULT, config).items()} == {ours: got}
        assert len(said) == (theirs != ours) and all(theirs in line and ours in line for line in said)
    assert {c[0].rpartition('.')[2] for c in CONVERTED} >= {*THEIR_SETTINGS}

def test_keys_without_counterpart_are_reported_or_refused():
    for name, (why, harmless) in ABSENT_SETTINGS.items():
        for value in (2.0,) if harmless is None else harmless:
            assert our_keys({f'data.{name}': value}, 'f') == ({},
                                                              [f'f: data.{name} does nothing here: {why}.'])
        if harmless is None: continue
        with pytest.raises(UserError, match=f'f: there is no key "data.{name}": {why}'):
            our_keys({f'data.{name}': 'another'}, 'f')
    for value in ('maybe', [1]):
        with pytest.raises(UserError, match='data.mixed_precision'): our_keys({'data.mixed_precision': value},
                                                                              'f')

def test_our_key_wins_and_running_op_by_op_over_a_graph():
    both = {'data.prefetch_buffer_size': 9, 'data.pipeline_buffer_size': 100,
            'training.enable_graph_mode': True, 'training.enable_xla_compilation': True}
    keys, said = our_keys(both, 'f')
    assert keys == {'data.prefetch_buffer_size': 9, 'training.gpt.mode': 'xla'} and len(said) == 3
    assert our_keys(both | {'training.enable_eager_debug': True}, 'f')[0]['training.gpt.mode'] == 'eager'

def test_their_options_become_ours():
    said = []
    assert our_options('--train-data c --lr 1 --resume --model-start-delay 2 --max-text-length=9'.split(),
                       said.append) == '--data c --lr 1 --set data.max_text_tokens=9'.split()
    assert len(said) == 4 and our_options(['--train-data'],
                                          said.append) == ['--data']   # its value is missing
    for old, new in THEIR_OPTIONS.items():
        if new.startswith('not here'):
            with pytest.raises(UserError,
                               match=f'^{old.split()[0]} is not an option here: '): our_options(old.split())
