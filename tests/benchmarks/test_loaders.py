"The loaders of others, played by scripts: they do the same work, and are compared before they are measured."
import sys
from contextlib import ExitStack, nullcontext
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from benchmarks import loaders as page
from benchmarks.loaders import CoquiLoader, DaliLoader, OneMelReader, PeerLoader
from xtts_nb.app import speed
from xtts_nb.app.speed import bench_loaders
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.data.audio import (
    hann_window, load_audio, log_mel_numpy, mel_filterbank, save_audio, synthetic_voice)
from xtts_nb.data.native import BatchPlan, batches_of

pytestmark = pytest.mark.slow


def test_one_mel_is_the_mel_of_both(prepared, small, stats):
    from xtts_nb.data.native import MelReader
    plan = BatchPlan(prepared, small.data)
    one, both = (next(iter(batches_of(kind(plan, stats), plan.data))) for kind in (OneMelReader, MelReader))
    assert 'reference' not in one and np.allclose(one['mel'], both['mel'], atol=1e-4)

def test_padding_of_a_peer_is_that_of_twenty_batches():
    one, other = {'used': (2, 3072), 'room': (8, 4096)}, {'used': (4, 1024), 'room': (8, 4096)}
    loader = PeerLoader.__new__(PeerLoader)
    answers = iter([one] * 10 + [other] * 10)
    loader.__class__ = type('Played', (PeerLoader,), {'__next__': lambda self: next(answers)})
    assert loader.padding(1024) == pytest.approx(1 - (60 + 20 * 2) / (160 + 20 * 4))
    assert next(answers, None) is None

@pytest.mark.parametrize('python, with_dali, found', [
    (None, [], {}), (None, [sys.executable], {'dali': sys.executable}), ('p', [], {'coqui': 'p'}),
    ('p', ['p', sys.executable], {'dali': 'p', 'coqui': 'p'}),
    ('p', [sys.executable], {'dali': sys.executable, 'coqui': 'p'})])
def test_which_loaders_are_installed(prepared, monkeypatch, python, with_dali, found):
    monkeypatch.setattr(page, '_has_dali', lambda python: python in with_dali)
    made = lambda python, cache, size, workers: nullcontext((python, size, workers))
    for kind in ('DaliLoader', 'CoquiLoader'): monkeypatch.setattr(page, kind, made)
    data = prepared.config.data
    monkeypatch.setattr(page.importlib.util, 'find_spec', lambda name: None)
    monkeypatch.setattr(page, 'OneMelReader', lambda plan, stats: (plan, stats))
    with ExitStack() as stack: more, there = page.others(prepared, 'plan', 'stats', stack, python)
    assert more == ({'one_mel': ('plan', 'stats')} if 'dali' in found else {})
    assert there == {name: (path, data.batch_size, data.num_workers) for name, path in found.items()}

def test_a_python_has_dali_if_it_can_import_it(tmp_path, monkeypatch):
    (tmp_path / 'nvidia').mkdir()
    (tmp_path / 'nvidia/dali.py').write_text('')
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    assert page._has_dali(sys.executable)
    (tmp_path / 'nvidia/dali.py').write_text('raise ImportError')
    assert not page._has_dali(sys.executable)

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
    monkeypatch.setattr(page.importlib.util, 'find_spec', lambda name: name == 'librosa')
    monkeypatch.setattr(speed, 'fed_steps', lambda *_, **__: 1.)
    bench = lambda: bench_loaders(prepared, dvae, clips=14, rounds=1, seconds=0.001, others=page.others)
    assert bench()['rows'][0]['runs'] == 'librosa'
    fake.feature.melspectrogram = lambda **given: np.float32([[0, 1e-6], [1, 2e-5]])
    floor = page.LibrosaReader.log_mel(None, 1024, prepared.config.model.audio)
    assert np.allclose(floor, np.log([[1e-5, 1], [1e-5, 2e-5]]))
    fake.feature.melspectrogram = lambda **given: melspectrogram(**given) * 1.1
    with pytest.raises(UserError, match='different batches, .*numpy_function mel'):
        bench()

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
    batches = page._dali_batches(files, audio.model_dump(), window, 2, 3, str(shown))
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
