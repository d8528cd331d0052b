"Wav files in a graph: any header of 16-bit PCM is read, anything else is named."
import numpy as np
import pytest
import tensorflow as tf

from wav_files import BAD, GOOD, SAMPLES
from xtts_nb.config import UserError
from xtts_nb.data.audio import check_native, decode_wav, load_audio


@pytest.fixture(scope='module')
def in_graph():
    "`decode_wav`, traced once."
    return tf.function(decode_wav, input_signature=[tf.TensorSpec([], tf.string)])

@pytest.mark.parametrize('name', GOOD)
def test_native_reading_gives_the_samples_that_libsndfile_gives(tmp_path, in_graph, name):
    (tmp_path / 'a.wav').write_bytes(GOOD[name])
    samples = load_audio(tmp_path / 'a.wav') * 32768
    assert np.array_equal(in_graph(str(tmp_path / 'a.wav')), samples)
    assert np.array_equal(samples, SAMPLES[:len(samples)])
    lengths = {'truncated': 749, 'truncated in a sample': 748, 'odd data': 998, 'data too short': 250,
               'one sample': 1, 'one sample behind a chunk': 1}
    assert len(samples) == lengths.get(name, 999)
    check_native([str(tmp_path / 'a.wav')], 22050)
    assert not any('Py' in op.type for op in in_graph.get_concrete_function().graph.get_operations())

@pytest.mark.parametrize('name', BAD)
def test_native_reading_refuses_what_it_would_read_as_noise(tmp_path, in_graph, name):
    "Inside a graph, outside of one, and before the first batch."
    file, found = BAD[name]
    path = str(tmp_path / 'bäd.wav')
    words = f'd.wav: is .*{found}.*so convert it, or use a cache of xtts-nb prepare'
    (tmp_path / 'bäd.wav').write_bytes(file)
    with pytest.raises(tf.errors.InvalidArgumentError, match=words): in_graph(path)
    with pytest.raises(UserError, match=f'bä{words}'): decode_wav(path)
    with pytest.raises(UserError, match='bäd.wav: (is .*so use the cache|not readable as audio)'):
        check_native([path], 22050)
