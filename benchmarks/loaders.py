"""Clips per second of the loaders of coqui-tts, DALI and librosa, beside the pipelines of this library.

    python benchmarks/loaders.py --data CORPUS [--coqui-python PYTHON]
        --coqui-python PYTHON   of an environment with coqui-tts 0.28, and possibly DALI
        --clips N, --rounds N, --budget MINUTES   as of `xtts-nb bench data`
        --json, --record   one JSON object as the last line of stdout; a record in benchmarks/

librosa computes the mels of the Python loader where it is installed beside TensorFlow. coqui-tts and DALI
run in their own Python environments. There, their loader reads the same recordings, reports how full each
batch is, and writes the first batch to a file for comparison; here, it is an iterator like any other. Their
batches stay in their process; the cost of handing them over is not counted, which favours them. They order
the clips in their own way, so rows are matched by file name. Different content is an error."""
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

import tensorflow as tf  # noqa: E402

from benchmarks.peer import (  # noqa: E402
    COQUI, OtherPython, add_rounds, arguments, measuring, output, run, start)
from xtts_nb.app.cli_bench import _data_speed  # noqa: E402
from xtts_nb.app.bench_data import compared_text, _differing_share, PythonReader  # noqa: E402
from xtts_nb.bench import _check_python  # noqa: E402
from xtts_nb.data.audio import _hann_window, load_audio, log_mel, log_mel_numpy  # noqa: E402
from xtts_nb.data.cache import Cache  # noqa: E402
from xtts_nb.data.native import BatchPlan, _OnlineReader, decode_wav  # noqa: E402


# --- readers of ours that run what others run ---------------------------------------------------------------

class LibrosaReader(PythonReader):
    "Both mels by librosa, inside `tf.numpy_function`."
    runs = 'librosa'

    @staticmethod
    def log_mel(wav, n_fft, audio):
        "(F, C) log-mel of samples (N,)."
        import librosa
        power = librosa.feature.melspectrogram(
            y=wav, sr=audio.sample_rate, n_fft=n_fft, hop_length=audio.hop_length,
            win_length=audio.win_length, pad_mode='reflect', n_mels=audio.n_mels, fmax=audio.f_max, htk=True,
            norm='slaney')
        return np.log(np.maximum(power, 1e-5)).T

class OneMelReader(_OnlineReader):
    "Only the clip's mel, by native ops."
    runs = 'tensorflow: one mel'

    def sounds(self, clip, other, start, bucket):
        "`mel` (B, F, C), zero after the end of each clip."
        frames = self.plan.frames[bucket]

        def row(clip):
            wav = tf.cast(decode_wav(self.files[clip], self.audio.sample_rate), tf.float32) / 32768
            mel = log_mel(wav, self.audio.dvae_n_fft, self.audio)
            return tf.pad(mel, [[0, frames - tf.shape(mel, tf.int64)[0]], [0, 0]])
        return {'mel': tf.map_fn(row, clip, fn_output_signature=tf.float32)}


# --- loaders of other libraries -----------------------------------------------------------------------------

class PeerLoader(OtherPython):
    "How full the batches of another library's loader are, as `{used, room}` in tokens and samples."
    def __init__(self, python: str | Path, main: Callable, ahead: int, needs: str, **settings):
        self.ahead = ahead   # batches that it buffers at most
        self.folder = tempfile.TemporaryDirectory()
        self.first_batch = Path(self.folder.name) / 'first.npz'
        super().__init__(python, main, needs=needs, first_batch=str(self.first_batch), **settings)

    def close(self):
        super().close()
        self.folder.cleanup()

    def __iter__(self): return self

    def __next__(self) -> dict: return self()

    def first(self) -> dict[str, np.ndarray]:
        "Take the first batch and return its arrays."
        next(self)
        with np.load(self.first_batch) as arrays: return dict(arrays)

    def padding(self, samples_per_code: int) -> float:
        "Padding in 20 batches: of coqui, with samples counted as codes; of DALI, of the mel frames."
        used, room = (np.array([batch[k] for batch in batches]).sum(0) / (1, samples_per_code)
                      for batches in [[next(self) for _ in range(20)]] for k in ('used', 'room'))
        return 1 - float(used.sum() / room.sum())

def _coqui_batches(clips, tokenizer, sample_rate, batch_size, workers, first_batch):
    "How full each batch of coqui's loader is, without end; the first one is written to a file."
    from types import SimpleNamespace
    import numpy
    from torch.utils.data import DataLoader
    from TTS.tts.layers.xtts.tokenizer import VoiceBpeTokenizer
    from TTS.tts.layers.xtts.trainer.dataset import XTTSDataset
    limits = SimpleNamespace(debug_loading_failures=False, gpt_use_masking_gt_prompt_approach=True,
                             max_text_length=200, max_wav_length=255995, max_conditioning_length=132300,
                             min_conditioning_length=66150)
    settings = SimpleNamespace(training_seed=1, model_args=limits)
    data = XTTSDataset(settings, list(clips), VoiceBpeTokenizer(tokenizer), sample_rate)
    data.load_item(clips[0])   # fails here if it can: inside a loader, coqui tries other clips forever
    loader = DataLoader(data, batch_size=batch_size, collate_fn=data.collate_fn, num_workers=workers,
                        drop_last=True, persistent_workers=True)
    while True:
        for batch in loader:
            if first_batch:
                names = 'filenames', 'padded_text', 'text_lengths', 'wav', 'wav_lengths'
                numpy.savez(first_batch, **{name: batch[name] for name in names})
                first_batch = None
            yield {'used': (int(batch['text_lengths'].sum()), int(batch['wav_lengths'].sum())),
                   'room': (batch['padded_text'].numel(), batch['wav'].numel())}

class CoquiLoader(PeerLoader):
    "Batches of coqui-tts' own loader over the recordings of a cache: text and samples."
    runs = 'coqui-tts: samples'
    not_compared = "conditioning: a crop of the clip itself that coqui's loader draws at random"

    def __init__(self, python: str | Path, cache: Cache, batch_size: int, workers: int = 2):
        self.cache, paths = cache, map(str, map(cache.wav_path, range(len(cache))))
        rows = [{'text': c['text'], 'audio_file': path, 'language': c['language'],
                 'speaker_name': c['speaker']} for c, path in zip(cache.clips, paths)]
        super().__init__(python, _coqui_batches, 2 * workers + 1, COQUI, clips=rows,
                         workers=workers, tokenizer=str(cache.folder / 'tokenizer.json'),
                         batch_size=batch_size, sample_rate=cache.config.model.audio.sample_rate)

    def compare(self) -> dict[str, float]:   # part -> share that differs
        "Compare its first batch with the cache's text and the samples of `load_audio`."
        batch, share = self.first(), {'text': 0., 'wav': 0.}
        index = {str(self.cache.wav_path(i)): i for i in range(len(self.cache))}
        for row, path in enumerate(batch['filenames']):
            text = batch['padded_text'][row, :batch['text_lengths'][row]]
            expected_text = self.cache.array('text', index[str(path)])
            wav = batch['wav'][row, 0, :batch['wav_lengths'][row]]
            expected = load_audio(path, self.cache.config.model.audio.sample_rate)
            share['text'] = max(share['text'], _differing_share(text, expected_text))
            share['wav'] = max(share['wav'], _differing_share(wav, expected, 1e-4))
        return share

def _dali_batches(files, audio, window, batch_size, workers, first_batch):
    "Frames and padded frames of each batch of log-mels (B, F, C) that DALI makes on the CPU, without end."
    import numpy
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=batch_size, num_threads=workers, device_id=None, prefetch_queue_depth=1)
    def pipeline():
        file, clip = fn.readers.file(files=files, labels=list(range(len(files))), random_shuffle=True)
        wav, _ = fn.decoders.audio(file, dtype=types.FLOAT, downmix=True)
        power = fn.spectrogram(wav, nfft=audio['dvae_n_fft'], window_length=audio['win_length'], power=2,
                               window_step=audio['hop_length'], window_fn=window)
        mel = fn.mel_filter_bank(power, sample_rate=audio['sample_rate'], freq_high=audio['f_max'],
                                 nfilter=audio['n_mels'], mel_formula='htk')
        decibels = fn.to_decibels(mel, multiplier=10., reference=1., cutoff_db=-50.)
        decibels = fn.transpose(decibels, perm=[1, 0])
        natural = decibels * float(numpy.log(10) / 10)
        return fn.pad(natural, fill_value=0), decibels.shape()[0], clip

    pipe = pipeline()
    pipe.build()
    while True:
        mel, frames, clip = pipe.run()
        frames = frames.as_array()
        if first_batch:
            numpy.savez(first_batch, mel=mel.as_array(), frames=frames, clip=clip.as_array()[:, 0])
        first_batch = None
        yield {'used': (0, int(frames.sum())), 'room': (0, int(frames.max()) * len(frames))}

class DaliLoader(PeerLoader):
    "Batches of DALI's pipeline on the CPU over the recordings of a cache: the log-mel for the codes."
    runs = 'DALI: one mel'

    def __init__(self, python: str | Path, cache: Cache, batch_size: int, workers: int = 2):
        self.cache, self.audio = cache, cache.config.model.audio
        window = _hann_window(self.audio.win_length, self.audio.win_length).tolist()
        files = [str(cache.wav_path(i)) for i in range(len(cache))]
        super().__init__(python, _dali_batches, 2, 'nvidia-dali', files=files, audio=self.audio.model_dump(),
                         window=window, batch_size=batch_size, workers=workers)

    def compare(self) -> dict[str, float]:   # part -> share that differs
        "Compare its first batch with `log_mel_numpy` of the same recordings."
        batch, share = self.first(), 0.
        for mel, frames, clip in zip(batch['mel'], batch['frames'].ravel(), batch['clip']):
            wav = load_audio(self.cache.wav_path(clip), self.audio.sample_rate)
            expected = log_mel_numpy(wav, self.audio.dvae_n_fft, self.audio)
            share = max(share, _differing_share(mel[:frames], expected, 5e-3))
        return {'mel': share}

def _has_dali(python: str | Path) -> bool:
    "Whether this Python can import DALI."
    return subprocess.run([python, '-c', 'import nvidia.dali'], capture_output=True).returncode == 0


# --- the comparison -----------------------------------------------------------------------------------------

def others(
    cache: Cache,
    plan: BatchPlan,
    stats: np.ndarray,             # (C,) mel constants of the DVAE
    stack: ExitStack,              # closes the loaders
    coqui_python: str | Path | None = None,
) -> tuple[dict, dict]:            # readers of ours, loaders of others
    "What is installed of librosa, DALI and coqui-tts."
    dali_python = next((p for p in (coqui_python, sys.executable) if p and _has_dali(p)), None)
    kinds = {'dali': (DaliLoader, dali_python), 'coqui': (CoquiLoader, coqui_python)}
    data = cache.config.data
    peers = {name: stack.enter_context(kind(python, cache, data.batch_size, data.num_workers))
             for name, (kind, python) in kinds.items() if python}
    more = {'numpy_function': LibrosaReader} if importlib.util.find_spec('librosa') else {}
    if dali_python: more['one_mel'] = OneMelReader
    return {name: reader(plan, stats) for name, reader in more.items()}, peers


def main():
    "The command line."
    parser = add_rounds(arguments(__doc__), 7)
    parser.add_argument('--data', type=Path, required=True, help='folder with metadata.csv and wavs/')
    parser.add_argument('--coqui-python', help='of an environment with coqui-tts 0.28, and possibly DALI')
    parser.add_argument('--clips', type=int, default=10_000, help='least number of distinct clips in memory')
    given = parser.parse_args()
    if given.coqui_python: _check_python(given.coqui_python, COQUI)
    start()
    found = lambda *what: others(*what, given.coqui_python)
    with measuring(given) as tell:
        result = _data_speed(given.data, given.clips, given.rounds, tell, found)
    output(given, 'data', result, about='corpus', below=compared_text(result))


if __name__ == '__main__': run(main)
