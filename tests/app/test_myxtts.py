"The settings, options and functions of MyXTTS."
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.app.myxtts import (
    ABSENT_SETTINGS, THEIR_OPTIONS, THEIR_SETTINGS, TFNativeDataLoader, apply_aggressive_prefetching,
    configure_tensorflow_for_max_throughput, create_parallel_interleave_dataset, optimize_dataset_pipeline,
    our_keys, our_options, print_optimization_summary)
from xtts_nb.settings import config_diff, nested
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.data.audio import load_audio, log_mel, save_audio, synthetic_voice
from xtts_nb.monitor.loop import python_operations

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

# --- functions ----------------------------------------------------------------------------------------------

def test_the_native_loader_gives_samples_and_mel_in_graph(tmp_path):
    save_audio(tmp_path / 'a.wav', synthetic_voice(0.5))
    native, path = tf.function(TFNativeDataLoader().load_and_process_audio), str(tmp_path / 'a.wav')
    wav, mel = native(path)
    assert np.array_equal(wav, load_audio(tmp_path / 'a.wav')) and np.allclose(mel, log_mel(wav, 1024),
                                                                               atol=1e-4)
    assert [part.shape for part in native(path, max_length=5120)] == [(5120,), (21, 80)]

def test_a_whole_pipeline_in_one_call_refuses_python():
    table, options = configure_tensorflow_for_max_throughput(num_workers=3, ram_budget=2)
    assert 'intra-op threads' in table and options.autotune.ram_budget == 2**31
    source = tf.data.Dataset.range(10)
    fast = optimize_dataset_pipeline(source, lambda x: x * 2, batch_size=4, num_workers=3, buffer_size=5)
    assert [b.tolist() for b in fast.as_numpy_iterator()] == [[0, 2, 4, 6], [8, 10, 12, 14]]   # of one shape
    assert python_operations(fast) == 0 and 'parallel 3' in print_optimization_summary(fast)[1]
    with pytest.raises(UserError, match='runs Python'):
        optimize_dataset_pipeline(source, lambda x: tf.numpy_function(lambda v: v, (x,), tf.int64), 4)
    device = apply_aggressive_prefetching(source, batch_size=4, prefetch_to_device='/CPU:0')
    assert type(device._inputs()[0]).__name__ == '_CopyToDeviceDataset'   # the device is the last stage
    assert len(list(device.as_numpy_iterator())) == 2

def test_files_are_read_side_by_side_in_a_fixed_order(tmp_path):
    for name in 'abc': (tmp_path / name).write_text(f'{name}1\n{name}2\n')
    files = create_parallel_interleave_dataset([tmp_path / name for name in 'abc'], tf.data.TextLineDataset)
    assert list(files.as_numpy_iterator()) == [b'a1', b'b1', b'a2', b'b2', b'c1', b'c2']
