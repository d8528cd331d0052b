"The functions that exist for the names of the guides."

import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.app import myxtts
from xtts_nb.app.myxtts import (
    TFNativeDataLoader, apply_aggressive_prefetching, configure_tensorflow_for_max_throughput,
    create_parallel_interleave_dataset, ensure_gpu_placement, get_optimized_dataset_options,
    optimize_dataset_pipeline, print_optimization_summary)
from xtts_nb.config import UserError
from xtts_nb.data.audio import load_audio, log_mel, save_audio, synthetic_voice
from xtts_nb.monitor.loop import python_operations


def test_the_native_loader_gives_samples_and_mel_in_graph(tmp_path):
    save_audio(tmp_path / 'a.wav', synthetic_voice(0.5))
    loader = TFNativeDataLoader()
    native = tf.function(loader.load_and_process_audio)
    path = tf.constant(str(tmp_path / 'a.wav'))
    wav, mel = native(path)
    assert np.array_equal(wav, load_audio(tmp_path / 'a.wav'))
    assert np.allclose(mel, log_mel(wav, 1024), atol=1e-4)
    assert [part.shape for part in native(path, max_length=5120)] == [(5120,), (21, 80)]
    assert not any('PyFunc' in op.type for op in native.get_concrete_function(path).graph.get_operations())
    assert not np.allclose(TFNativeDataLoader(n_fft=2048).load_and_process_audio(path)[1], mel, atol=1e-2)

@pytest.mark.parametrize('how', [dict(channels=2), dict(subtype='PCM_24'), dict(samplerate=44100),
                                 dict(format='FLAC')], ids=str)
def test_the_native_loader_refuses_what_it_would_read_as_noise(tmp_path, how):
    "As a user's own pipeline meets it."
    import soundfile
    how = dict(samplerate=22050, channels=1, subtype='PCM_16', format='WAV') | how
    soundfile.write(tmp_path / 'a.wav', np.zeros((9000, how.pop('channels'))), **how)
    load = TFNativeDataLoader().load_and_process_audio
    source = tf.data.Dataset.from_tensors(str(tmp_path / 'a.wav')).map(load)
    with pytest.raises(tf.errors.InvalidArgumentError, match='a.wav: is .*native reading takes'):
        next(iter(source))

def test_options_are_those_this_tensorflow_has():
    options = get_optimized_dataset_options(num_workers=3, ram_budget=2)
    assert options.deterministic
    assert options.threading.private_threadpool_size == 3
    assert options.autotune.ram_budget == 2**31
    better = options.experimental_optimization
    assert better.map_and_batch_fusion and better.map_parallelization and better.parallel_batch
    assert get_optimized_dataset_options(ram_budget=0.5).autotune.ram_budget == 2**29
    plain = get_optimized_dataset_options()
    assert plain.threading.private_threadpool_size is None and plain.autotune.ram_budget is None
    taken = tf.data.Dataset.range(2).with_options(options).options()
    assert taken.threading.private_threadpool_size == 3
    table, again = configure_tensorflow_for_max_throughput(num_workers=2)
    assert 'intra-op threads' in table and again.threading.private_threadpool_size == 2

def test_prefetching_ends_on_the_device():
    source = tf.data.Dataset.range(10)
    plain = apply_aggressive_prefetching(source, batch_size=4, buffer_size=3)
    assert [b.tolist() for b in plain.as_numpy_iterator()] == [[0, 1, 2, 3], [4, 5, 6, 7]]   # of one shape
    assert plain.element_spec.shape == (4,)
    device = apply_aggressive_prefetching(source, batch_size=4, prefetch_to_device='/CPU:0')
    names = lambda dataset: [n for d in dataset._inputs() for n in names(d)] + [type(dataset).__name__]
    assert names(plain)[-1] == '_PrefetchDataset' and '_CopyToDeviceDataset' not in names(plain)
    assert names(device)[-3:] == ['_PrefetchDataset', '_CopyToDeviceDataset', '_PrefetchDataset']
    assert [b.tolist() for b in device.as_numpy_iterator()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    stages = myxtts._stages(device)
    assert stages[-3] == 'Prefetch buffer 4'
    assert stages[-1] == 'Prefetch buffer 2'   # one used, one on its way

def test_a_whole_pipeline_in_one_call_refuses_python(capsys):
    source = tf.data.Dataset.range(8)
    fast = optimize_dataset_pipeline(source, lambda x: x * 2, batch_size=4, num_workers=3, buffer_size=5)
    assert [b.tolist() for b in fast.as_numpy_iterator()] == [[0, 2, 4, 6], [8, 10, 12, 14]]
    assert python_operations(fast) == 0
    lines = print_optimization_summary(fast)
    assert capsys.readouterr().out == '\n'.join(lines) + '\n'
    assert lines[0].startswith('Range') and 'parallel 3' in lines[1] and any('rows 4' in l for l in lines)
    assert 'Prefetch buffer 5' in lines[-2] and lines[-1].startswith('deterministic True')
    slow = lambda x: tf.numpy_function(lambda v: v, (x,), tf.int64)
    with pytest.raises(UserError,
                       match='load runs Python, one call at a time; write it with TensorFlow operations'):
        optimize_dataset_pipeline(source, slow, 4)

def test_files_are_read_side_by_side_in_a_fixed_order(tmp_path):
    for name in 'abc': (tmp_path / name).write_text(f'{name}1\n{name}2\n')
    files = [tmp_path / name for name in 'abc']
    read = [list(create_parallel_interleave_dataset(files, tf.data.TextLineDataset).as_numpy_iterator())
            for _ in range(2)]
    assert read[0] == read[1] == [b'a1', b'b1', b'a2', b'b2', b'c1', b'c2']

@pytest.mark.cpu
def test_tensors_stay_where_they_are_without_a_gpu():
    x = tf.constant(1.)
    assert ensure_gpu_placement(x) is x and ensure_gpu_placement({'a': x}) == {'a': x}
