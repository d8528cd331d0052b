"""How busy a GPU is, by its driver, while one training is fed and computed in the ways of the lessons.

    python benchmarks/busy.py
        --data DIR          a corpus; default: synthetic voices of 4 to 10 seconds
        --layers, --width, --heads, --batch-size   of the GPT
        --seconds N         of each turn of a variant, after a second that does not count
        --rounds, --budget  as of `xtts-nb bench train`
        --json, --record    one JSON object as the last line of stdout; a record in benchmarks/

Each variant trains on the same clips in the same order: two mels of each clip, the codes that the DVAE makes
of one of them, the step of the GPT with its update. `python` computes the mels in `tf.numpy_function`,
`native` by TensorFlow's own operations, `cache` reads mels and codes that were prepared. `eager` starts the
operations one by one, in float32; `xla` compiles the step, in bfloat16. Before anything is timed, the batches
of all readers are compared, the codes too, and the losses of the first step. The loss is read at every tenth
step, as a log does. Without a GPU it shows the load of the CPU, which says nothing: that is a rehearsal."""
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

from benchmarks.peer import (  # noqa: E402
    add_rounds, add_sizes, arguments, measuring, output, run, start)
from xtts_nb.app.cli_bench import _sized  # noqa: E402
from xtts_nb.app.bench_data import check_equal, _differing_share, readers  # noqa: E402
from xtts_nb.bench import compare  # noqa: E402
from xtts_nb.config import UserError, XTTSConfig  # noqa: E402
from xtts_nb.data.cache import Cache  # noqa: E402
from xtts_nb.data.corpora import synthetic_corpus  # noqa: E402
from xtts_nb.data.native import _BATCH, batches_of, BatchPlan  # noqa: E402
from xtts_nb.data.prepare import encode_corpus  # noqa: E402
from xtts_nb.models.dvae import DVAE  # noqa: E402
from xtts_nb.sampler import best_probe, Sampler, summarise_variants  # noqa: E402
from xtts_nb.train.step import step_modes  # noqa: E402

READ_EVERY = 10   # steps
SETTLE = 1.       # s at the beginning of a turn that do not count: buffers are full, the driver averages
STEPS = {'eager': {'mode': 'eager'}, 'xla': {'mode': 'xla', 'precision': 'bfloat16'}}
USE = 'mean', 'p50', 'min', 'max', 'variation', 'idle_share'   # of the driver's utilisation, %
ARMS = {'python_eager': ('numpy_function', 'eager'), 'cache_eager': ('cache', 'eager'),
        'python_xla': ('numpy_function', 'xla'), 'native_xla': ('native', 'xla'),
        'cache_xla': ('cache', 'xla')}


class Encode:
    "Codes of a batch that holds mels, on the device of the step."
    def __init__(self, plan: BatchPlan, dvae: DVAE, compiled: bool):
        self.dvae, self.lengths = dvae, tf.constant(np.asarray(plan.cache.codes_length), tf.int32)
        self.call = tf.function(self.codes, jit_compile=True) if compiled else self.codes

    def codes(self, mel, mel_length, clip):
        "Codes (B, S) int32, 0 after the end, and their lengths (B,)."
        length = tf.gather(self.lengths, clip)
        mel = tf.pad(mel, [[0, 0], [0, -mel.shape[1] % 4], [0, 0]])
        codes = tf.cast(self.dvae.encode(mel, mel_length), tf.int32)
        return tf.where(tf.range(codes.shape[1])[None] < length[:, None], codes, 0), length

    def __call__(self, batch: dict) -> dict:
        "The batch as a cache gives it."
        if 'codes' in batch: return batch
        codes, length = self.call(batch['mel'], batch['mel_length'], batch['clip'])
        batch |= {'codes': codes, 'code_length': length, 'reference': tf.cast(batch['reference'], tf.float16)}
        return {name: batch[name] for name in _BATCH}


def checked(plan: BatchPlan, feeds: dict, encode: Encode, steps: dict) -> dict:   # {what: number}
    "Compare readers, codes and first losses; raises `UserError` if they differ."
    check_equal(plan, np.asarray(encode.dvae.mel_stats), encode.dvae.encode, feeds)
    first = {name: next(iter(batches_of(reader, plan.data))) for name, reader in feeds.items()}
    made = {name: encode(batch) for name, batch in first.items()}
    codes = made['cache']['codes']
    differ = {name: _differing_share(codes, batch['codes'][:, :codes.shape[1]])
              for name, batch in made.items()}
    losses = {name: float(step(made['cache'], tf.constant(0))['loss']) for name, step in steps.items()}
    if max(differ.values()) > 0.02 or not np.allclose(losses['xla'], losses['eager'], rtol=0.02):
        raise UserError(f'the ways differ: codes {differ}, losses {losses}')
    return {'codes that differ': max(differ.values()), 'losses': losses}


def busy(
    config: XTTSConfig,
    corpus: Path,
    seconds: float,      # of a turn
    rounds: int,
    progress=None,       # called with (done, total)
) -> dict:               # rows, samples, what was compared
    "Clips per second and the use of the device of every variant."
    keras.utils.set_random_seed(0)
    dvae = DVAE(config)
    with tempfile.TemporaryDirectory() as folder:
        encode_corpus(corpus, Path(folder) / 'cache', config, dvae)
        cache = Cache(Path(folder) / 'cache')
        plan = BatchPlan(cache, cache.config.data.model_copy(update={'buckets': 1}))
        every = readers(plan, np.asarray(dvae.mel_stats))
        feeds = {name: every[name] for name, _ in ARMS.values()}
        steps = step_modes(cache.config, 5, STEPS)
        encoders = {name: Encode(plan, dvae, name != 'eager') for name in steps}
        equal = checked(plan, feeds, encoders['xla'], steps)
        running = {name: iter(batches_of(feeds[feed], plan.data)) for name, (feed, _) in ARMS.items()}
        marks, number = [], 0

        def turn(name, step):
            "Train for a second and then for `seconds`; clips and seconds of the second part."
            batches, encode, update = running[name], encoders[step], steps[step]

            def train(seconds):
                nonlocal number
                begun, done = time.perf_counter(), 0
                while not done or time.perf_counter() < begun + seconds:
                    loss = update(encode(next(batches)), tf.constant(number))['loss']
                    done, number = done + 1, number + 1
                    if not done % READ_EVERY: float(loss)
                float(loss)
                return done * config.data.batch_size, time.perf_counter() - begun

            train(SETTLE)
            marks.append((time.perf_counter(), name))
            counted = train(seconds)
            marks.append((time.perf_counter(), ''))
            return counted

        with Sampler(best_probe(), 0.1) as sampler:
            variants = {name: lambda name=name, step=step: turn(name, step)
                        for name, (_, step) in ARMS.items()}
            rows = compare(variants, 'clips_per_s', rounds, progress=progress).rows()
        del marks[:2 * len(ARMS)]   # of the round that does not count
        use = summarise_variants(sampler.samples, marks)
    for row in rows:
        device = next(iter(use[row['name']].values()))
        row |= {k: device.get(k) and round(device[k], 2) for k in USE}
        row['means'] = {k: round(v, 3) for k, v in device['means'].items()}
    begun = marks[0][0]
    samples = [(round(s.time - begun, 2), s.gpus[0].utilisation, s.gpus[0].sm_active) for s in sampler.samples
               if s.gpus and s.time > begun]
    return {'rows': rows, 'equal': equal, 'samples': samples,
            'arms': [(round(t - begun, 2), name) for t, name in marks], 'workers': plan.data.num_workers}


def main():
    "The command line."
    parser = add_sizes(add_rounds(arguments(__doc__), 3))
    parser.add_argument('--data', type=Path, help='a corpus')
    parser.add_argument('--clips', type=int, default=64, help='of each of two synthetic voices')
    parser.add_argument('--seconds', type=float, default=6., help='of each turn')
    parser.add_argument('--workers', type=int, default=8, help='parallel calls of the input pipeline')
    given = parser.parse_args()
    config = _sized(given.layers, given.width, given.heads, given.batch_size)
    config = config.replace(data={'num_workers': given.workers, 'max_drop_rate': 1.})
    start()
    with measuring(given) as tell, tempfile.TemporaryDirectory() as folder:
        corpus = given.data or synthetic_corpus(Path(folder), given.clips, 4.)
        result = busy(config, corpus, given.seconds, given.rounds, partial(tell, 'measure'))
    clips = f'clips of {given.data.name}' if given.data else 'clips of 4 to 10 s'
    about = f'GPT {given.layers} x {given.width}, batch {given.batch_size}, {clips}, no dropout'
    output(given, 'busy', result | {'model': about})


if __name__ == '__main__': run(main)
