"Measuring: distinct copies, honest peers, the smallest setting that is enough, and the functions the guides name."
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.audio import load_audio, log_mel, save_audio, synthetic_voice
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.data import BatchPlan, batches_of, cached_batches
from xtts_nb.pipeline import python_operations
from xtts_nb.throughput import (CARDS, CoquiLoader, H200_CLIPS_PER_SECOND, OneMelReader, TFNativeDataLoader, Tiled,
                                apply_aggressive_prefetching, auto_tune_performance, cards_fed,
                                configure_tensorflow_for_max_throughput, create_parallel_interleave_dataset,
                                get_optimized_dataset_options, measure_loaders, optimize_dataset_pipeline, padding,
                                print_optimization_summary)


# --- measuring -----------------------------------------------------------------------------------------------------

def test_cards_follow_from_their_peaks():
    assert CARDS == {'RTX 4090': 50, 'A100': 94, 'H200': 297} and abs(H200_CLIPS_PER_SECOND - CARDS['H200']) <= 1

def test_copies_are_clips_of_their_own(prepared, small):
    many = Tiled(prepared, 3)
    assert len(many) == 3 * len(prepared) == len({c['id'] for c in many.clips})
    for i in (0, 13, 14, 41):
        for kind in ('codes', 'text', 'mel'):
            assert np.array_equal(many.array(kind, i), prepared.array(kind, i % 14))
            assert np.shares_memory(many.array(kind, i), getattr(many, kind))
    many.codes[many.codes_start[14]] += 1
    assert not np.array_equal(many.array('codes', 14), many.array('codes', 0))   # another place in memory
    plan = BatchPlan(many, small.data)
    seen = [int(c) for b in cached_batches(plan, 0, plan.steps_per_epoch) for c, w in zip(b['clip'], b['weight']) if w]
    assert sorted(seen) == list(range(42))

def test_padding_is_what_an_epoch_pads(prepared, small):
    plan = BatchPlan(prepared, small.data)
    epoch = list(cached_batches(plan, 0, plan.steps_per_epoch))
    room = sum(b['codes'].numpy().size + b['text'].numpy().size for b in epoch)
    used = sum(float(tf.reduce_sum((b['code_length'] + b['text_length']) * tf.cast(b['weight'], tf.int32))) for b in epoch)
    assert padding(plan) == pytest.approx(1 - used / room)

def test_every_loader_is_measured_in_turn():
    taken = []
    def source(name):
        while True: taken.append(name); yield name
    two, steps = {'a': source('a'), 'b': source('b')}, {'a': 3, 'b': 2}
    rows = measure_loaders(two, 4, {'a': 1, 'b': 2}, rounds=2, seconds=0.001, steps=steps)
    assert [r['name'] for r in rows] == ['a', 'b'] and rows[0]['ratio'] == 1
    assert all(set(r) == {'name', 'clips_per_s', 'ratio', 'spread', 'au', 'cv'} and 0 < r['au'] <= 1 for r in rows)

def test_one_mel_is_the_mel_of_both(prepared, small, stats):
    from xtts_nb.data import MelReader
    plan = BatchPlan(prepared, small.data)
    one, both = (next(iter(batches_of(kind(plan, stats), plan.data))) for kind in (OneMelReader, MelReader))
    assert 'reference' not in one and np.allclose(one['mel'], both['mel'], atol=1e-4)

@pytest.mark.parametrize('most', [0, 1, 6, 40])
def test_cards_are_tried_until_they_are_fed(prepared, small, monkeypatch, most):
    "The pipeline could make batches for more; the emulated cards starve beyond some number."
    import xtts_nb.throughput
    tried = []
    monkeypatch.setattr(xtts_nb.throughput, '_groups', lambda plan, reader, number: iter(lambda: number, None))
    def utilisation(groups, step, steps):
        tried.append(next(groups))
        return {'au': 0.96 if tried[-1] <= most else 0.94}
    monkeypatch.setattr(xtts_nb.throughput, 'accelerator_utilisation', utilisation)
    fed = cards_fed(BatchPlan(prepared, small.data), clips_per_second=1e3)
    assert most - 0.05 * most - 1 <= fed <= most and len(tried) < 40

def test_a_group_is_that_many_batches(prepared, small, monkeypatch):
    import xtts_nb.throughput
    from xtts_nb.data import CacheReader
    plan, taken = BatchPlan(prepared, small.data), []
    count = lambda reader, data: taken.append(data.prefetch_buffer_size) or batches_of(reader, data, 0, 10)
    monkeypatch.setattr(xtts_nb.throughput, 'batches_of', count)
    groups = xtts_nb.throughput._groups(plan, CacheReader(prepared, plan), 5)
    next(groups); next(groups)
    with pytest.raises(tf.errors.OutOfRangeError): next(groups)
    assert taken == [5]


# --- coqui's loader, played by a script ----------------------------------------------------------------------------

def play_coqui(folder, item):
    "Modules with the names that are imported from coqui-tts and torch."
    for name, text in {'torch/__init__.py': '', 'torch/utils/__init__.py': '',
                       'torch/utils/data.py': 'def DataLoader(data, **how): return [data.batch(how) for _ in range(2)]',
                       'TTS/tts/layers/xtts/tokenizer.py': 'VoiceBpeTokenizer = str',
                       'TTS/tts/layers/xtts/trainer/dataset.py': f'''
import json
class Numbers(list):
    def sum(self): return sum(self)
    def numel(self): return len(self) * max(self)
class XTTSDataset:
    def __init__(self, settings, clips, tokenizer, rate): self.clips = clips; print("noise on stdout")
    def load_item(self, clip): {item}
    def collate_fn(self, rows): return rows
    def batch(self, how):
        text, wav = Numbers(len(c["text"]) for c in self.clips), Numbers([10, 30])
        return dict(text_lengths=text, wav_lengths=wav, padded_text=text, wav=wav)
'''}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

@pytest.fixture
def clips(tmp_path):
    audio = SimpleNamespace(sample_rate=22050)
    config = SimpleNamespace(model=SimpleNamespace(audio=audio))
    rows = [{'text': t, 'language': 'en', 'speaker': 's'} for t in ('hello', 'you')]
    return SimpleNamespace(clips=rows, folder=tmp_path, config=config, wav_path=lambda i: f'{i}.wav')

def test_coquis_batches_come_one_for_one(tmp_path, monkeypatch, clips):
    play_coqui(tmp_path / 'fake', 'return clip')
    monkeypatch.setenv('PYTHONPATH', str(tmp_path / 'fake'))
    loader = CoquiLoader(sys.executable, clips, batch_size=2)
    assert [next(loader) for _ in range(5)] == [{'used': [8, 40], 'room': [10, 60]}] * 5
    loader.close()
    assert loader.process.returncode == 0

def test_why_coqui_delivers_nothing_is_said(tmp_path, monkeypatch, clips):
    play_coqui(tmp_path / 'fake', 'raise ValueError("no such codec")')
    monkeypatch.setenv('PYTHONPATH', str(tmp_path / 'fake'))
    loader = CoquiLoader(sys.executable, clips, 2)
    with pytest.raises(UserError, match='coqui-tts 0.28 failed .ValueError: no such codec.; check that environment'):
        next(loader)
    loader.close()
    with pytest.raises(UserError, match='nowhere: cannot be run; give the Python of coqui-tts'):
        CoquiLoader(tmp_path / 'nowhere', clips, 2)


# --- the smallest setting ------------------------------------------------------------------------------------------

def tune(prepared, small, monkeypatch, enough, **more):
    "Tune with an accelerator that is content with `enough(workers, ahead)`."
    import xtts_nb.throughput
    monkeypatch.setattr(xtts_nb.throughput.os, 'sched_getaffinity', lambda _: range(6), raising=False)
    monkeypatch.setattr(xtts_nb.throughput, 'batches_of', lambda reader, data: (data.num_workers, data.prefetch_buffer_size))
    measure = lambda source, step, steps: {'au': 0.96 if enough(*source) else 0.1 * source[0]}
    return auto_tune_performance(BatchPlan(prepared, small.data), 0.01, measure=measure, **more)

@pytest.mark.parametrize('enough, found', [(lambda w, a: True, (1, 1)), (lambda w, a: a >= 3, (1, 4)),
                                           (lambda w, a: w > 1 and a > 1, (2, 2)), (lambda w, a: w > 4, (6, 1))])
def test_tuning_stops_at_the_smallest_that_is_enough(prepared, small, monkeypatch, tmp_path, enough, found):
    got = tune(prepared, small, monkeypatch, enough, out=tmp_path / 'tuned.yaml')
    assert (got['num_workers'], got['prefetch_buffer_size']) == found and got['reached']
    assert [(t['num_workers'], t['prefetch_buffer_size']) for t in got['tried']][-1] == found
    data = XTTSConfig.load(tmp_path / 'tuned.yaml').data
    assert (data.num_workers, data.prefetch_buffer_size) == found

def test_tuning_says_when_nothing_is_enough(prepared, small, monkeypatch):
    got = tune(prepared, small, monkeypatch, lambda w, a: False)
    assert not got['reached'] and got['num_workers'] == 6 and len(got['tried']) == 16


# --- the names of the guides ---------------------------------------------------------------------------------------

def test_the_native_loader_gives_samples_and_mel_in_graph(tmp_path):
    save_audio(tmp_path / 'a.wav', synthetic_voice(0.5))
    loader = TFNativeDataLoader()
    native = tf.function(loader.load_and_process_audio)
    path = tf.constant(str(tmp_path / 'a.wav'))
    wav, mel = native(path)
    assert np.array_equal(wav, load_audio(tmp_path / 'a.wav')) and np.allclose(mel, log_mel(wav, 1024), atol=1e-4)
    assert [part.shape for part in native(path, max_length=5120)] == [(5120,), (21, 80)]
    assert not any('PyFunc' in op.type for op in native.get_concrete_function(path).graph.get_operations())
    assert not np.allclose(TFNativeDataLoader(n_fft=2048).load_and_process_audio(path)[1], mel, atol=1e-2)

@pytest.mark.parametrize('how', [dict(channels=2), dict(subtype='PCM_24'), dict(samplerate=44100), dict(format='FLAC')], ids=str)
def test_the_native_loader_refuses_what_it_would_read_as_noise(tmp_path, how):
    "As a user's own pipeline meets it."
    import soundfile
    how = dict(samplerate=22050, channels=1, subtype='PCM_16', format='WAV') | how
    soundfile.write(tmp_path / 'a.wav', np.zeros((9000, how.pop('channels'))), **how)
    source = tf.data.Dataset.from_tensors(str(tmp_path / 'a.wav')).map(TFNativeDataLoader().load_and_process_audio)
    with pytest.raises(tf.errors.InvalidArgumentError, match='a.wav: is .*native reading takes'): next(iter(source))

def test_options_are_those_this_tensorflow_has():
    options = get_optimized_dataset_options(num_workers=3, ram_budget=2)
    assert options.deterministic and options.threading.private_threadpool_size == 3 and options.autotune.ram_budget == 2**31
    assert options.experimental_optimization.map_parallelization and get_optimized_dataset_options().autotune.ram_budget is None
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

def test_a_whole_pipeline_in_one_call_refuses_python(capsys):
    source = tf.data.Dataset.range(8)
    fast = optimize_dataset_pipeline(source, lambda x: x * 2, batch_size=4, num_workers=3, buffer_size=5)
    assert [b.tolist() for b in fast.as_numpy_iterator()] == [[0, 2, 4, 6], [8, 10, 12, 14]] and python_operations(fast) == 0
    lines = print_optimization_summary(fast)
    assert capsys.readouterr().out == '\n'.join(lines) + '\n'
    assert lines[0].startswith('Range') and 'parallel 3' in lines[1] and any('rows 4' in l for l in lines)
    assert 'Prefetch buffer 5' in lines[-2] and lines[-1].startswith('deterministic True')
    slow = lambda x: tf.numpy_function(lambda v: v, (x,), tf.int64)
    with pytest.raises(UserError, match='load runs Python, one call at a time; write it with TensorFlow operations'):
        optimize_dataset_pipeline(source, slow, 4)

def test_files_are_read_side_by_side_in_a_fixed_order(tmp_path):
    for name in 'abc': (tmp_path / name).write_text(f'{name}1\n{name}2\n')
    files = [tmp_path / name for name in 'abc']
    read = [list(create_parallel_interleave_dataset(files, tf.data.TextLineDataset).as_numpy_iterator()) for _ in range(2)]
    assert read[0] == read[1] == [b'a1', b'b1', b'a2', b'b2', b'c1', b'c2']
