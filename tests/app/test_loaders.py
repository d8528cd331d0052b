"Measuring: distinct copies, peers that do the same work, and the smallest setting that is enough."
import importlib.util
import itertools
import os
import sys
import time
from contextlib import ExitStack, nullcontext
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.data.audio import (
    hann_window, load_audio, log_mel_numpy, mel_filterbank, save_audio, synthetic_voice)
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.data.native import BatchPlan, batches_of, cached_batches
import xtts_nb.app.loaders
from xtts_nb.app.loaders import (
    CoquiLoader, DaliLoader, OneMelReader, Tiled, auto_tune_performance, bench_loaders, compared_text,
    data_before_after, measure_loaders, padding, watch_loaders)


# --- measuring ----------------------------------------------------------------------------------------------

def test_copies_are_clips_of_their_own(prepared, small):
    many = Tiled(prepared, 3)
    assert len(many) == 3 * len(prepared) == len({c['id'] for c in many.clips})
    for i in (0, 13, 14, 41):
        for kind in ('codes', 'text', 'mel'):
            assert np.array_equal(many.array(kind, i), prepared.array(kind, i % 14))
            assert np.shares_memory(many.array(kind, i), getattr(many, kind))
        assert many.wav_path(i) == prepared.wav_path(i % 14) and many.samples[i] == prepared.samples[i % 14]
    many.codes[many.codes_start[14]] += 1
    assert not np.array_equal(many.array('codes', 14), many.array('codes', 0))   # another place in memory
    plan = BatchPlan(many, small.data)
    seen = [int(c) for b in cached_batches(plan, 0, plan.steps_per_epoch)
            for c, w in zip(b['clip'], b['weight']) if w]
    assert sorted(seen) == list(range(42))

def test_padding_is_what_an_epoch_pads(prepared, small):
    plan = BatchPlan(prepared, small.data)
    epoch = list(cached_batches(plan, 0, plan.steps_per_epoch))
    room = sum(b['codes'].numpy().size + b['text'].numpy().size for b in epoch)
    used = sum(float(tf.reduce_sum((b['code_length'] + b['text_length']) * tf.cast(b['weight'], tf.int32)))
               for b in epoch)
    assert padding(plan) == pytest.approx(1 - used / room)

class Clock:
    "A clock that the test sets."
    now = 0.
    def perf_counter(self): return self.now
    def sleep(self, seconds): self.now += seconds

@pytest.mark.parametrize('seconds, count', [(0.875, 7), (0.001, 4)])
def test_every_loader_is_measured_in_turn(monkeypatch, seconds, count):
    "A batch takes 1/8 s, or 1/4 s of the second one in short rounds."
    clock, taken, slow = Clock(), [], 1 if count == 7 else 2
    for where in (xtts_nb.app.loaders, xtts_nb.bench): monkeypatch.setattr(where, 'time', clock)
    def source(name, takes):
        while True:
            clock.sleep(takes)
            taken.append(name)
            yield name
    two = {'a': source('a', 1 / 8), 'b': source('b', slow / 8)}
    rows = measure_loaders(two, 4, {'a': 1, 'b': 2}, rounds=2, seconds=seconds)
    step, same = 4 / 298, {'spread': 0., 'cv': 0.}   # clips a second that the emulated accelerator takes
    assert rows == [{'name': 'a', 'clips_per_s': 32., 'ratio': 1., 'au': round(8 * step, 4)} | same,
                    {'name': 'b', 'clips_per_s': 32 / slow, 'ratio': 1 / slow,
                     'au': round(8 / slow * step, 4)} | same]
    # a round for warm-up and two that count, then 20 steps and the one before
    for name, ahead in (('a', 1), ('b', 2)):
        assert taken.count(name) == ahead + 1 + 4 + 3 * (ahead + count) + ahead + 21

def test_three_ways_to_a_batch_are_measured(prepared, small, stats, monkeypatch):
    asked = {}
    def measure(sources, batch_size, ahead, rounds, seconds, progress):
        asked.update(locals())
        return []
    monkeypatch.setattr(xtts_nb.app.loaders, 'measure_loaders', measure)
    data = small.data.model_copy(update={'num_workers': 3, 'prefetch_buffer_size': 5})
    data_before_after(BatchPlan(prepared, data), stats, 2)
    assert list(asked['sources']) == ['numpy_function', 'native', 'cache']
    assert asked['batch_size'] == 4 and asked['rounds'] == 2
    assert asked['ahead'] == dict.fromkeys(asked['sources'], 3 + 5)

def test_a_round_waits_until_the_buffers_of_the_slowest_are_full(monkeypatch):
    now, pauses = [0.], []
    monkeypatch.setattr(xtts_nb.app.loaders, 'time',
                        SimpleNamespace(perf_counter=lambda: now[0], sleep=pauses.append))
    def source(seconds):
        while True:
            now[0] += seconds
            yield 0
    measure_loaders({'slow': source(0.5), 'fast': source(0.01)}, 4, {'slow': 3, 'fast': 8}, rounds=1,
                    seconds=0.001)
    assert len(pauses) == 6 and min(pauses) >= 3 * 0.5   # warm-up, a round and the utilisation, of two

def test_one_mel_is_the_mel_of_both(prepared, small, stats):
    from xtts_nb.data.native import MelReader
    plan = BatchPlan(prepared, small.data)
    one, both = (next(iter(batches_of(kind(plan, stats), plan.data))) for kind in (OneMelReader, MelReader))
    assert 'reference' not in one and np.allclose(one['mel'], both['mel'], atol=1e-4)

def bench(prepared, dvae, monkeypatch, **more):
    "Compare all loaders, with short measurements."
    monkeypatch.setattr(xtts_nb.app.loaders, 'fed_steps',
                        lambda pipeline, most, seconds: len(next(iter(pipeline()))['clip']) * 10.04)
    return bench_loaders(prepared, dvae, clips=14, rounds=1, seconds=0.001, **more)

def test_the_emulated_device_is_watched_while_each_pipeline_feeds_it():
    def slow():
        while True:
            time.sleep(0.03)
            yield 1
    found = watch_loaders({'slow': slow(), 'fast': itertools.repeat(1)}, 3, seconds=0.5, interval=0.05)
    assert found['device'] == 'emulated accelerator, 10 ms a step'
    (first, one), (second, other) = found['arms']
    assert (one, other) == ('slow', 'fast') and 0 <= first < 0.4 < second
    busy = {name: [b for t, b in found['samples'] if lo < t <= hi] for name, lo, hi in (
        (one, first, second), (other, second + 0.1, 99))}
    assert len(busy['slow']) >= 3 and len(busy['fast']) >= 3
    assert np.mean(busy['slow']) < 40 < np.mean(busy['fast']) <= 100
    assert all(round(value, 2) == value for values in busy.values() for value in values)

def test_the_result_names_what_was_compared_and_what_ran(prepared, dvae, monkeypatch):
    result = bench(prepared, dvae, monkeypatch)
    runs = {r['name']: r['runs'] for r in result['rows']}
    kind = 'librosa' if importlib.util.find_spec('librosa') else 'numpy'
    assert list(runs)[:4] == ['numpy_function', 'native_wav', 'native', 'cache']
    assert runs['numpy_function'] == kind
    assert result['rows'][3]['steps_per_s'] == round(10.04 * prepared.config.data.batch_size, 1)
    assert result['compared'].keys() == runs.keys() and 'codes' in result['compared']['cache']
    lines = compared_text(result | {'not_compared': {'x': 'what it draws'}}).splitlines()
    assert any(line.startswith('  cache: clip, ') and 'codes' in line for line in lines)
    assert lines[-1] == '  x, not compared: what it draws'

def test_other_loaders_are_compared_with_ours(prepared, dvae, monkeypatch):
    asked, copies = {}, []
    def measure(sources, batch_size, ahead, rounds, seconds, progress):
        asked.update(locals())
        return [{'name': name, 'clips_per_s': 99.} for name in sources]
    class Peer:
        ahead, not_compared = 7, 'what it draws'
        def compare(self): return {'mel': 0.}
        def __next__(self): return {'used': (1, 1024), 'room': (2, 4096)}
    def tiled(cache, times):
        copies.append(times)
        return Tiled(cache, times)
    monkeypatch.setattr(xtts_nb.app.loaders, 'Tiled', tiled)
    monkeypatch.setattr(xtts_nb.app.loaders, 'measure_loaders', measure)
    trials = []
    def fed(pipeline, most, seconds):
        trials.append(seconds)
        return most if most < 38 else None
    monkeypatch.setattr(xtts_nb.app.loaders, 'fed_steps', fed)
    monkeypatch.setattr(xtts_nb.app.loaders, '_peers', lambda *given: {'dali': Peer()})
    result = bench_loaders(prepared, dvae, clips=15, rounds=3, seconds=0.1)
    assert trials == [0.1] * 5
    rows = {row['name']: row for row in result['rows']}
    ahead = dict.fromkeys(list(rows)[:-1], 1 + prepared.config.data.num_workers) | {'dali': 7}
    assert copies == [2] and asked['ahead'] == ahead and list(rows)[-2:] == ['one_mel', 'dali']
    assert (asked['batch_size'], asked['rounds'], asked['seconds']) == (4, 3, 0.1)
    assert rows['dali'] == {'name': 'dali', 'runs': 'DALI: one mel', 'clips_per_s': 99.,
                            'padding': round(1 - 2 / 6, 4), 'steps_per_s': None}
    assert rows['cache']['steps_per_s'] == 37.1   # 1.5 * 99 / 4
    assert rows['cache']['padding'] == rows['native']['padding'] > 0
    assert result['compared']['dali'] == {'mel': 0.} and result['not_compared'] == {'dali': 'what it draws'}
    assert xtts_nb.app.loaders._fed(None, prepared.config.data, 200., 1.) is None

def test_padding_of_a_peer_is_that_of_twenty_batches():
    one, other = {'used': (2, 3072), 'room': (8, 4096)}, {'used': (4, 1024), 'room': (8, 4096)}
    batches = iter([one] * 10 + [other] * 10)
    found = xtts_nb.app.loaders._peer_padding(batches, 1024)
    assert found == pytest.approx(1 - (60 + 20 * 2) / (160 + 20 * 4)) and next(batches, None) is None

@pytest.mark.parametrize('python, with_dali, found', [
    (None, [], {}), (None, [sys.executable], {'dali': sys.executable}), ('p', [], {'coqui': 'p'}),
    ('p', ['p', sys.executable], {'dali': 'p', 'coqui': 'p'}),
    ('p', [sys.executable], {'dali': sys.executable, 'coqui': 'p'})])
def test_which_loaders_are_installed(prepared, monkeypatch, python, with_dali, found):
    monkeypatch.setattr(xtts_nb.app.loaders, '_has_dali', lambda python: python in with_dali)
    made = lambda python, cache, size, workers: nullcontext((python, size, workers))
    for kind in ('DaliLoader', 'CoquiLoader'): monkeypatch.setattr(xtts_nb.app.loaders, kind, made)
    data = prepared.config.data
    with ExitStack() as stack: there = xtts_nb.app.loaders._peers(stack, prepared, data, python)
    assert there == {name: (path, data.batch_size, data.num_workers) for name, path in found.items()}

def test_a_python_has_dali_if_it_can_import_it(tmp_path, monkeypatch):
    (tmp_path / 'nvidia').mkdir()
    (tmp_path / 'nvidia/dali.py').write_text('')
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    assert xtts_nb.app.loaders._has_dali(sys.executable)
    (tmp_path / 'nvidia/dali.py').write_text('raise ImportError')
    assert not xtts_nb.app.loaders._has_dali(sys.executable)

# what gives the mel of XTTS
LIBROSA = {'sr': 22050, 'hop_length': 256, 'win_length': 1024, 'pad_mode': 'reflect', 'n_mels': 80,
           'fmax': 8000., 'htk': True, 'norm': 'slaney'}

def test_librosa_is_named_where_it_runs_and_refused_where_it_differs(prepared, dvae, monkeypatch):
    "First a module that computes as librosa does, then one that returns other mels."
    def melspectrogram(*, y, n_fft, **how):
        assert how == LIBROSA
        return np.exp(log_mel_numpy(y, n_fft, prepared.config.model.audio)).T
    fake = SimpleNamespace(feature=SimpleNamespace(melspectrogram=melspectrogram))
    monkeypatch.setitem(sys.modules, 'librosa', fake)
    monkeypatch.setattr(xtts_nb.app.loaders.importlib.util, 'find_spec', lambda name: name == 'librosa')
    assert bench(prepared, dvae, monkeypatch)['rows'][0]['runs'] == 'librosa'
    fake.feature.melspectrogram = lambda **given: np.float32([[0, 1e-6], [1, 2e-5]])
    floor = xtts_nb.app.loaders.LibrosaReader.log_mel(None, 1024, prepared.config.model.audio)
    assert np.allclose(floor, np.log([[1e-5, 1], [1e-5, 2e-5]]))
    fake.feature.melspectrogram = lambda **given: melspectrogram(**given) * 1.1
    with pytest.raises(UserError, match='different batches, .*numpy_function mel'):
        bench(prepared, dvae, monkeypatch)


# --- the loaders of others, played by scripts ---------------------------------------------------------------

def play_coqui(folder, item, noise='0'):
    "Modules with the names that are imported from coqui-tts and torch; `noise` is added to the samples."
    for name, text in {'torch/__init__.py': '', 'torch/utils/__init__.py': '',
                       'torch/utils/data.py':
                            'def DataLoader(data, **how): return [data.batch(how) for _ in range(2)]',
                       'TTS/tts/layers/xtts/tokenizer.py': 'VoiceBpeTokenizer = str',
                       'TTS/tts/layers/xtts/trainer/dataset.py': f'''
import numpy, soundfile
class Padded(numpy.ndarray):
    def numel(self): return self.size
def padded(rows):
    return numpy.stack([numpy.pad(r, (0, max(map(len, rows)) - len(r))) for r in rows]).view(Padded)
class XTTSDataset:
    def __init__(self, settings, clips, tokenizer, rate):
        self.clips, limits = clips, vars(settings.model_args); print("noise on stdout")
        assert rate == 22050 and settings.training_seed == 1
        assert limits == dict(   # those of coqui's recipe for XTTS
            debug_loading_failures=False, gpt_use_masking_gt_prompt_approach=True, max_text_length=200,
            max_wav_length=255995, max_conditioning_length=132300, min_conditioning_length=66150)
    def load_item(self, clip): {item}
    def collate_fn(self, rows): return rows
    def batch(self, how):
        assert how == dict(batch_size=2, collate_fn=self.collate_fn, num_workers=2, drop_last=True,
                           persistent_workers=True)
        clips = self.clips[:2][::-1]   # not in the order of the cache
        text = [[len(c["text"])] * 3 for c in clips]
        wav = [soundfile.read(c["audio_file"])[0] + {noise} for c in clips]
        return dict(text_lengths=numpy.array([3, 3]), wav_lengths=numpy.array([len(w) for w in wav]),
                    padded_text=padded(text), wav=padded(wav)[:, None].view(Padded),
                    filenames=[c["audio_file"] for c in clips])
'''}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

@pytest.fixture
def clips(tmp_path):
    "A cache of two recordings, as a loader needs it; each of the three tokens is the length of the text."
    for i in range(2): save_audio(tmp_path / f'{i}.wav', synthetic_voice(0.1 + 0.1 * i))
    rows = [{'text': t, 'language': 'en', 'speaker': 's'} for t in ('hello', 'you')]
    class Clips:
        clips, folder, config = rows, tmp_path, XTTSConfig.tiny()
        def __len__(self): return 2
        def wav_path(self, i): return tmp_path / f'{i}.wav'
        def array(self, kind, i): return np.full(3, len(rows[i]['text']))
    return Clips()

def test_coquis_batches_come_one_for_one(tmp_path, monkeypatch, clips):
    play_coqui(tmp_path / 'fake', 'return clip')
    monkeypatch.setenv('PYTHONPATH', str(tmp_path / 'fake'))
    loader = CoquiLoader(sys.executable, clips, batch_size=2)
    assert loader.ahead == 2 * 2 + 1   # torch's loader has two batches a worker, and one is handed out
    assert [next(loader) for _ in range(5)] == [{'used': [6, 2205 + 4410], 'room': [6, 2 * 4410]}] * 5
    loader.close()
    assert loader.process.returncode == 0

@pytest.mark.parametrize('noise, words',
                         [('0', 'hello'), ('5e-5', 'hello'), ('1.5e-4', 'hello'), ('0', 'hellos')])
def test_coquis_batch_is_compared_by_file(tmp_path, monkeypatch, clips, noise, words):
    play_coqui(tmp_path / 'fake', 'return clip', noise)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path / 'fake'))
    with CoquiLoader(sys.executable, clips, 2) as loader:
        clips.clips[0]['text'] = words
        assert loader.compare() == {'text': 0. if words == 'hello' else 1.,
                                    'wav': 1. if noise == '1.5e-4' else 0.}

def test_an_error_of_coqui_is_reported(tmp_path, monkeypatch, clips):
    play_coqui(tmp_path / 'fake', 'raise ValueError("no such codec")')
    monkeypatch.setenv('PYTHONPATH', str(tmp_path / 'fake'))
    loader = CoquiLoader(sys.executable, clips, 2)
    with pytest.raises(UserError,
                       match='coqui-tts 0.28 failed .ValueError: no such codec.; check that environment'):
        next(loader)
    loader.close()
    with pytest.raises(UserError, match='nowhere: cannot be run; give the Python of coqui-tts'):
        CoquiLoader(tmp_path / 'nowhere', clips, 2)

def test_dalis_batch_is_compared_by_file(monkeypatch, clips):
    "The arrays of a first batch, reordered and padded; then with other mels."
    right = [log_mel_numpy(load_audio(clips.wav_path(i)), 1024, clips.config.model.audio) for i in (1, 0)]
    frames = np.array([[len(mel)] for mel in right])
    padded = np.stack([np.pad(mel, [[0, frames.max() - len(mel)], [0, 0]]) for mel in right])
    loader = DaliLoader(sys.executable, clips, 2)
    monkeypatch.setattr(loader, 'first', lambda: {'mel': padded, 'frames': frames, 'clip': np.array([1, 0])})
    assert loader.compare() == {'mel': 0.}
    for more, share in ((4e-3, 0.), (4e-3, 1.)):
        padded[1] += more
        assert loader.compare() == {'mel': share}
    assert loader.ahead == 2
    loader.close()

class Node:
    "Stands in for an output of DALI: the arrays of a batch."
    def __init__(self, rows): self.rows = rows
    def each(self, f): return Node([f(row) for row in self.rows])
    def __mul__(self, factor): return self.each(lambda row: row * factor)
    def __getitem__(self, i): return self.each(lambda row: row[i])
    def shape(self): return self.each(lambda row: np.array(row.shape))
    def as_array(self): return np.stack(self.rows)

def dali(asked):
    "The operations of DALI that are used, in NumPy; `asked` receives the settings of the pipeline."
    def file(files, labels, random_shuffle):
        assert random_shuffle
        return Node(files), Node([np.array([label]) for label in labels])
    def spectrogram(wav, nfft, window_length, power, window_step, window_fn):
        def one(x):
            mirrored = np.pad(x, nfft // 2, 'reflect')
            frames = np.lib.stride_tricks.sliding_window_view(mirrored, nfft)[::window_step]
            return (np.abs(np.fft.rfft(frames * window_fn))**power).T
        assert window_length == len(window_fn)
        return wav.each(one)
    def mels(power, sample_rate, freq_high, nfilter, mel_formula):
        assert (sample_rate, freq_high, nfilter, mel_formula) == (22050, 8000., 80, 'htk')
        return power.each(lambda x: mel_filterbank(1024).T @ x)
    def audio(file, dtype, downmix):
        assert downmix
        return file.each(load_audio), None
    def pad(x, fill_value):
        longest = max(len(row) for row in x.rows)
        return x.each(lambda row: np.pad(row, [[0, longest - len(row)], [0, 0]], constant_values=fill_value))
    def decibels(x, multiplier, reference, cutoff_db):
        floor = 10**(cutoff_db / multiplier)
        return x.each(lambda row: multiplier * np.log10(np.maximum(row / reference, floor)))
    def pipeline_def(**how):
        asked.update(how)
        return lambda define: lambda: SimpleNamespace(build=lambda: None, run=define)
    module = ModuleType('nvidia.dali')
    module.fn = SimpleNamespace(
        readers=SimpleNamespace(file=file), decoders=SimpleNamespace(audio=audio), mel_filter_bank=mels,
        spectrogram=spectrogram, to_decibels=decibels, pad=pad,
        transpose=lambda x, perm: x.each(lambda row: row.transpose(perm)))
    module.pipeline_def, module.types = pipeline_def, SimpleNamespace(FLOAT='float')
    return module

def test_dali_computes_the_mel_for_the_codes(tmp_path, monkeypatch, clips):
    asked, audio, shown = {}, clips.config.model.audio, tmp_path / 'first.npz'
    monkeypatch.setitem(sys.modules, 'nvidia', ModuleType('nvidia'))
    monkeypatch.setitem(sys.modules, 'nvidia.dali', dali(asked))
    save_audio(clips.wav_path(1), np.pad(synthetic_voice(0.1), [0, 9000]))   # silence ends at the floor
    files = [str(clips.wav_path(i)) for i in range(2)]
    window = hann_window(1024, 1024).tolist()
    batches = xtts_nb.app.loaders._dali_batches(files, audio.model_dump(), window, 2, 3, str(shown))
    right = [log_mel_numpy(load_audio(path), 1024, audio) for path in files]
    lengths = [len(mel) for mel in right]
    assert next(batches) == {'used': (0, sum(lengths)), 'room': (0, 2 * max(lengths))}
    first = np.load(shown)
    assert first['frames'].tolist() == lengths and first['clip'].tolist() == [0, 1]
    for mel, n, r in zip(first['mel'], lengths, right):
        assert np.allclose(mel[:n], r, atol=1e-4) and not mel[n:].any()
    assert asked == {'batch_size': 2, 'num_threads': 3, 'device_id': None, 'prefetch_queue_depth': 1}
    shown.unlink()
    next(batches)
    assert not shown.exists()   # the first one only


# --- the smallest setting -----------------------------------------------------------------------------------

def tune(prepared, small, monkeypatch, enough, **more):
    "Tune with an accelerator whose target is reached if `enough(workers, ahead)`."
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: [range(6)][pid], raising=False)
    monkeypatch.setattr(xtts_nb.app.loaders, 'batches_of',
                        lambda reader, data: (data.num_workers, data.prefetch_buffer_size))
    measure = lambda source, step, steps: {'au': 0.96 if enough(*source) else 0.1 * source[0]}
    return auto_tune_performance(BatchPlan(prepared, small.data), 0.01, measure=measure, **more)

@pytest.mark.parametrize('enough, found',
                         [(lambda w, a: True, (1, 1)), (lambda w, a: a >= 3, (1, 4)),
                          (lambda w, a: w > 1 and a > 1, (2, 2)), (lambda w, a: w > 4, (6, 1))])
def test_tuning_stops_at_the_smallest_that_is_enough(prepared, small, monkeypatch, tmp_path, enough, found):
    got = tune(prepared, small, monkeypatch, enough, out=tmp_path / 'tuned.yaml')
    assert (got['num_workers'], got['prefetch_buffer_size']) == found and got['reached']
    assert [(t['num_workers'], t['prefetch_buffer_size']) for t in got['tried']][-1] == found
    data = XTTSConfig.load(tmp_path / 'tuned.yaml').data
    assert (data.num_workers, data.prefetch_buffer_size) == found

@pytest.mark.parametrize('cores, workers', [
    (1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (64, [1, 2, 4, 8, 16, 32, 64]),
    (65, [1, 2, 4, 8, 16, 32, 64, 65])])
def test_settings_are_tried_from_the_smallest_on(cores, workers):
    tries = [(w, ahead) for w in workers for ahead in (1, 2, 4, 8)]
    assert xtts_nb.app.loaders._settings_to_try(cores) == tries

@pytest.mark.parametrize('step, seconds, steps', [(0.01, 5., 31), (0.1, 5., 5), (0.01, 1., 6)])
def test_a_trial_lasts_its_share_and_the_target_itself_is_enough(prepared, small, monkeypatch, step, seconds,
                                                                 steps):
    "There are 16 trials."
    monkeypatch.delattr(os, 'sched_getaffinity', raising=False)
    monkeypatch.setattr(os, 'cpu_count', lambda: 6)
    asked, rates = [], iter([0.12346, 0.9])
    def measure(source, *how):
        asked.append(how)
        return {'au': next(rates)}
    got = auto_tune_performance(BatchPlan(prepared, small.data), step, 0.9, seconds=seconds, measure=measure)
    assert asked == [(step, steps)] * 2 and got['reached']
    assert [t['au'] for t in got['tried']] == [0.1235, 0.9]

def test_tuning_reports_that_no_settings_are_enough(prepared, small, monkeypatch):
    got = tune(prepared, small, monkeypatch, lambda w, a: False)
    assert not got['reached'] and got['num_workers'] == 6 and len(got['tried']) == 16
