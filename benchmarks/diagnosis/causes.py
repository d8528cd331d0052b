"""Trainings that are slow for one known cause each, and healthy ones: is the cause named, is the gain true?

    python benchmarks/diagnosis/causes.py [--num-batches N] [--seconds S] [--record] [--json]

This tests `xtts_nb.monitor.diagnose` on eleven emulated trainings, twelve real ones and three healthy ones.
Each slow training exists twice, with its cause and without. The top finding is compared with the known cause,
and its gain with that of the fixed training; it counts as true within 30 %.
A further training is one more `Training` in `TRAININGS`."""
import gzip
import itertools
import json
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from benchmarks.peer import arguments, output, run, start  # noqa: E402
from xtts_nb.app.terminal import progress  # noqa: E402
from xtts_nb.config import cores  # noqa: E402
from xtts_nb.monitor.diagnose import _compare_loops, diagnose  # noqa: E402
from xtts_nb.monitor.loop import emulated_step, _in_background, tf_sleep  # noqa: E402


# --- Parts of the emulated trainings --------------------------------------------------------------
# Their stages only sleep, in TensorFlow and without the CPU, so they behave the same on any machine.
# The device needs 10 ms for 16 rows, and twice as long for twice as many.

ROWS, DEVICE = 16, 0.010    # of a batch; s that the device needs for it

def for_rows(batch):
    return DEVICE / ROWS * tf.cast(tf.shape(tf.nest.flatten(batch)[0])[0], tf.float32)

def endless_numbers() -> tf.data.Dataset: return tf.data.Dataset.range(10**9)   # more than are ever used

def endless_batches(row: Callable, rows: int = ROWS, **calls) -> tf.data.Dataset:
    "Endless batches with a buffer; `row` makes a row from its number; `calls`: as of `map`."
    all_rows = endless_numbers().map(row, **calls)
    return as_written(all_rows.batch(rows, drop_remainder=True).prefetch(2))

def as_written(dataset) -> tf.data.Dataset:
    "The pipeline as it is written: TensorFlow makes no map parallel and adds no buffer."
    options = tf.data.Options()
    optimise = options.experimental_optimization
    optimise.map_parallelization = optimise.inject_prefetch = False
    return dataset.with_options(options)

def cheap_batches(shape: tuple = (ROWS, 64)) -> tf.data.Dataset:
    "Batches that cost nothing."
    return tf.data.Dataset.from_tensors(tf.ones(shape)).repeat().prefetch(2)

_FOLDERS = []   # of the training that is being diagnosed

def temporary_folder() -> Path:
    "A folder that is removed after the diagnosis of a training, or when Python ends."
    _FOLDERS.append(tempfile.TemporaryDirectory())
    return Path(_FOLDERS[-1].name)

@contextmanager
def _own_folders():
    "Remove at the end of the block all folders of `temporary_folder`."
    try: yield
    finally:
        while _FOLDERS: _FOLDERS.pop().cleanup()

@dataclass(frozen=True)
class Training:
    "A training that is slow for one reason, and the same training without that reason."
    name: str
    cause: str | None          # what the first finding must say; None: healthy
    slow: Callable             # -> (dataset, step)
    fixed: Callable | None = None
    kind: str = 'emulated'     # or real: whether the time passes in sleeps or in work


# --- Slow data ------------------------------------------------------------------------------------
# Python in the pipeline, a map that makes one call at a time, slow files, and no buffer before a step
# that blocks.

def slow_python(i):
    time.sleep(0.0012)
    return np.float32(i)

def numpy_function(native: bool = False):
    native_row = lambda i: tf.cast(i, tf.float32)
    python_row = lambda i: tf.ensure_shape(tf.numpy_function(slow_python, [i], tf.float32), [])
    return endless_batches(native_row if native else python_row), emulated_step(for_rows)

def single_threaded_map(calls: int | None = None):
    data = endless_batches(lambda i: tf_sleep(1500, tf.ones(8)), num_parallel_calls=calls)
    return data, emulated_step(for_rows)

def slow_disk(local: bool = False):
    file = str(temporary_folder() / 'clip')
    Path(file).write_bytes(bytes(64))
    read = lambda i: tf.ensure_shape(tf.io.decode_raw(tf.io.read_file(file), tf.uint8), [64])
    return endless_batches(read if local else lambda i: tf_sleep(1200, read(i))), emulated_step(for_rows)

def no_prefetch(buffer: int = 0):
    data = endless_numbers().map(lambda i: tf_sleep(8000, tf.ones((ROWS, 8))))
    return as_written(data.prefetch(buffer) if buffer else data), emulated_step(for_rows, blocking=True)


# Oscillation: a new file every six batches, and a buffer of one. On average the data is faster than the
# device.

def oscillation(buffer: int = 1, cycle: int = 6):
    batch = lambda j: tf_sleep(tf.where(j == 0, 42_000, 1000), tf.ones((ROWS, 8)))
    files = endless_numbers().flat_map(lambda f: tf.data.Dataset.range(cycle).map(batch))
    return files.prefetch(buffer), emulated_step(for_rows, blocking=True)


# Oversubscription: each call takes longer the more calls run beside it. A table of finished rows, one
# entry per iterator, tells a call how many there are.

def _crowded(x):
    "A row that takes longer, the more calls run beside it."
    i, run = x
    number = dict(key_dtype=tf.int64, value_dtype=tf.int64)
    table = tf.raw_ops.MutableHashTableV2(**number, shared_name='finished')
    none = tf.constant(-1, tf.int64)
    finished = tf.raw_ops.LookupTableFindV2(table_handle=table, keys=run, default_value=none)
    row = tf_sleep(400 * tf.cast(tf.maximum(i - finished, 1), tf.float32)**1.3, tf.ones(8))
    with tf.control_dependencies([row]):
        tf.raw_ops.LookupTableInsertV2(table_handle=table, keys=run, values=i)
    return row

def oversubscription(calls: int | None = None):
    draw = lambda old, _: (tf.where(old < 0, tf.random.uniform([], 0, 2**62, tf.int64), old),) * 2
    runs = tf.data.Dataset.from_tensors(0).repeat().scan(tf.constant(-1, tf.int64), draw)   # one per iterator
    rows = tf.data.Dataset.zip(endless_numbers(), runs)
    rows = rows.map(lambda *x: _crowded(x), num_parallel_calls=calls or 32 * cores())
    return rows.batch(ROWS).prefetch(2), emulated_step(for_rows)


# --- Slow steps -----------------------------------------------------------------------------------
# Tracing takes long if the graph is large; here it has sixty more operations. The function is traced
# again because the lengths of batches change, or because a counter is a Python number.

def many_operations(batch, *rest):
    x = tf.cast(batch, tf.float32)
    for _ in range(30): x = x * 1.001 + 0.1
    return tf.reduce_sum(x) + sum(tf.cast(r, tf.float32) for r in rest)

def variable_shapes(padded: bool = False):
    def batch(i): return tf.ones([ROWS, tf.random.uniform([], 100, 4000, tf.int32)])
    def fixed(i): return tf.ones((ROWS, 4000))
    data = endless_numbers().map(fixed if padded else batch).prefetch(2)
    return data, emulated_step(for_rows, many_operations)

def retracing(tensor: bool = False):
    device, numbers = emulated_step(for_rows, many_operations), itertools.count()
    number = (lambda: tf.constant(next(numbers))) if tensor else (lambda: next(numbers))
    return cheap_batches(), lambda batch: device(batch, number())


# A step that fetches its loss and then writes a log line for 8 ms; one that sends its batch through
# NumPy and over a slow bus; one whose batches do not fill the device.

def host_sync(fetched: bool = True):
    device = emulated_step(for_rows)
    def step(batch):
        loss = device(batch)
        if fetched: float(loss)
        time.sleep(0.008)
        return loss
    return cheap_batches(), step

def device_copy(through_host: bool = True):
    device = emulated_step(for_rows)
    def step(batch):
        if not through_host: return device(batch / 255)
        host = batch.numpy() / 255
        time.sleep(0.025)
        return device(tf.constant(host))
    return cheap_batches((ROWS, 4096)), step

def tiny_batch(rows: int = 4):
    wasteful = lambda batch: 0.008 + 0.0001 * tf.cast(tf.shape(batch)[0], tf.float32)
    return endless_batches(lambda i: tf.ones(8), rows), emulated_step(wasteful)


# --- Real trainings -------------------------------------------------------------------------------
# Sleeps show only that a rule is consistent with itself. Real work behaves differently: it competes for
# cores, for Python's lock and for memory. In the following trainings nothing sleeps. Samples are
# decoded in Python, spectra are computed, files are opened, functions are traced and compiled, and
# matrices are multiplied.
# Their device is the CPU itself: a feed-forward step whose products run on it.

CLIP_RATE, WIDTH = 16_000, 1024   # samples per second of a clip; width of a layer

def layers_step(layers: int = 3, width: int = WIDTH, dtype=tf.float32, between=tf.tanh, **how) -> Callable:
    "A compiled step: each batch is cut into rows of `width` numbers, which pass through the layers."
    draw = np.random.default_rng(0)
    new = lambda: tf.Variable(draw.normal(0, width**-0.5, (width, width)), dtype=dtype)
    weights = [new() for _ in range(layers)]
    @tf.function(**how)
    def step(batch):
        x = tf.cast(tf.reshape(batch, [-1, width]), dtype)
        for w in weights: x = between(x @ w)
        return tf.reduce_mean(x)
    return step

def recurrent_step(products: int = 100, width: int = 256, **how) -> Callable:
    "A compiled step whose small products depend on each other, so that it keeps one core busy."
    w = tf.Variable(np.random.default_rng(0).normal(0, width**-0.5, (width, width)), dtype=tf.float32)
    @tf.function(**how)
    def step(batch):
        product = lambda i, h: (i + 1, tf.tanh(h @ w))
        start = 0, batch[:, :width]
        _, h = tf.while_loop(lambda i, _: i < products, product, start, maximum_iterations=products)
        return tf.reduce_mean(h)
    return step

def pcm(clips: int = 64, samples: int = WIDTH * 16) -> list[bytes]:
    "Clips of noise as 16-bit samples."
    draw = np.random.default_rng(0)
    return [draw.integers(-2**15, 2**15, samples, dtype='<i2').tobytes() for _ in range(clips)]


# Slow data: samples are decoded in Python, spectra are computed one after the other, thousands of small
# files are opened, compressed files have no buffer behind them, and spectra are computed again in each
# epoch.

def python_decoding(raw):
    "Samples of a clip, one by one."
    return np.array([s / 2**15 for s in struct.unpack(f'<{len(raw) // 2}h', raw)], np.float32)

def decoded(raw, shape: list):
    return tf.cast(tf.ensure_shape(tf.io.decode_raw(raw, tf.int16), shape), tf.float32) / 2**15

def real_python(native: bool = False):
    clips, shape = pcm(), [16 * WIDTH]
    python_clip = lambda raw: tf.ensure_shape(tf.numpy_function(python_decoding, [raw], tf.float32), shape)
    row = (lambda raw: decoded(raw, shape)) if native else python_clip
    rows = tf.data.Dataset.from_tensor_slices(clips).repeat().map(row)
    return as_written(rows.batch(ROWS, drop_remainder=True).prefetch(2)), layers_step(1, 512)

def spectrum(clip):   # (samples,) -> (512,)
    return tf.reduce_mean(tf.math.log(1e-5 + tf.abs(tf.signal.stft(clip, 1024, 256))), 0)[:512]

def spectra(clips: int | None = None, **calls) -> tf.data.Dataset:
    "Spectra of clips of 10 s: of `clips` different ones, or without end."
    noise = lambda i: tf.random.stateless_uniform([10 * CLIP_RATE], [0, tf.cast(i, tf.int32)], -1., 1.)
    numbers = tf.data.Dataset.range(clips) if clips else endless_numbers()
    return numbers.map(lambda i: spectrum(noise(i)), **calls)

def real_map(calls: int | None = None):
    return as_written(spectra(num_parallel_calls=calls).batch(ROWS).prefetch(2)), recurrent_step(20)

def real_no_prefetch(buffer: int = 0):
    "Each batch is unpacked from a compressed file."
    samples = np.random.default_rng(0).integers(-8, 8, ROWS * 2**17, dtype='<i2')
    shard = tf.data.Dataset.from_tensors(gzip.compress(samples.tobytes())).repeat()
    unpack = lambda raw: tf.io.decode_raw(tf.io.decode_compressed(raw, 'GZIP'), tf.int16)
    data = shard.map(lambda raw: tf.cast(tf.reshape(unpack(raw), [ROWS, 2**17])[:, :WIDTH], tf.float32) / 8)
    return as_written(data.prefetch(buffer) if buffer else data), recurrent_step(600)

def real_no_cache(cached: bool = False):
    rows = spectra(96, num_parallel_calls=cores())
    return as_written((rows.cache() if cached else rows).batch(ROWS).prefetch(2)), recurrent_step(20)


def real_small_files(packed: bool = False, files: int = 2048):
    folder, clips = temporary_folder(), pcm(files, WIDTH)
    if packed:
        shard = str(folder / 'all.tfrecord')
        with tf.io.TFRecordWriter(shard) as file:
            for clip in clips: file.write(clip)
        raw = tf.data.TFRecordDataset(shard).repeat().batch(256)
        rows = raw.map(lambda some: decoded(some, [256, WIDTH]))
        return as_written(rows.prefetch(2)), layers_step(1, 256)
    for i, clip in enumerate(clips): (folder / f'{i}').write_bytes(clip)
    names = tf.data.Dataset.from_tensor_slices([str(folder / f'{i}') for i in range(files)])
    read = lambda name: decoded(tf.io.read_file(name), [WIDTH])
    rows = names.repeat().map(read, num_parallel_calls=cores())
    return as_written(rows.batch(256).prefetch(2)), layers_step(1, 256)


# Slow steps: XLA compiles each length again, a Python number causes a new trace, a loss is fetched
# while other work waits, a batch goes through NumPy, operations are never compiled, batches are too
# small for the cost of an update, and numbers are of a wide type.

def real_shapes(buckets: bool = False):
    def batch(i):
        length = tf.random.uniform([], 128, 1024, tf.int32)
        if buckets: length = (length + 255) // 256 * 256
        return tf.ones([ROWS, length, 64])
    w = tf.Variable(tf.ones((64, 64)))
    step = tf.function(lambda x: tf.reduce_mean(tf.tanh(x @ w) @ w), jit_compile=True,
                       input_signature=[tf.TensorSpec([ROWS, None, 64])])
    return endless_numbers().map(batch).prefetch(2), lambda x: step(x)

def real_retracing(tensor: bool = False):
    layers, numbers = layers_step(12, 256), itertools.count()
    step = tf.function(lambda batch, number: layers(batch) * tf.cast(number, tf.float32))
    number = (lambda: tf.constant(next(numbers))) if tensor else (lambda: next(numbers))
    return cheap_batches((64, 256)), lambda batch: step(batch, number())

def real_sync(fetched: bool = True):
    device, log = _in_background(recurrent_step(1000)), list(range(80_000))
    def step(batch):
        loss = device(batch)
        if fetched: loss.numpy()
        json.dumps(log)   # a log of the step, for which the device need not wait
        return loss
    return cheap_batches((ROWS, 256)), step

def real_copy(through_host: bool = True):
    "Samples are quantised to 256 levels, by a table in NumPy or by rounding on the device."
    device, edges = layers_step(1, 256), np.linspace(-1, 1, 257)[1:-1]
    quantised = tf.function(lambda x: device(tf.round(x * 128) / 128))
    def step(batch):
        if not through_host: return quantised(batch)
        return device(tf.constant((np.digitize(batch.numpy(), edges) / 128 - 1).astype('float32')))
    data = tf.data.Dataset.from_tensors(tf.random.uniform((ROWS, 16 * WIDTH), -1, 1))
    return data.repeat().prefetch(2), step


def learning_step(rows: int, width: int, layers: int) -> tuple:
    "Forward, backward and an update of all weights, and batches for it."
    normal = lambda i: tf.random.stateless_normal((width, width), [0, i])
    weights = [tf.Variable(normal(i) * width**-0.5) for i in range(layers)]
    def step(x):
        with tf.GradientTape() as tape:
            for w in weights: x = tf.tanh(x @ w)
            loss = tf.reduce_mean(x**2)
        for w, gradient in zip(weights, tape.gradient(loss, weights)): w.assign_sub(0.01 * gradient)
        return loss
    return cheap_batches((rows, width)), step

def real_eager(compiled: bool = False):
    data, step = learning_step(ROWS, 128, 32)
    return data, tf.function(step) if compiled else step

def real_tiny_batch(rows: int = 4):
    data, step = learning_step(rows, WIDTH, 6)
    return data, tf.function(step, jit_compile=True)

def product_step(dtype, width: int = WIDTH, layers: int = 3, **how) -> tuple:
    "Only matrix products, and batches for them."
    return cheap_batches((512, width)), layers_step(layers, width, dtype, tf.identity, **how)


# --- Healthy trainings ----------------------------------------------------------------------------
# A buffered pipeline that works as long as the device does, files that are read several at a time, and
# matrix products under XLA.

def healthy_pipeline():
    data = endless_batches(lambda i: tf_sleep(3000, tf.ones(8)), num_parallel_calls=ROWS)
    return data, emulated_step(for_rows)

def healthy_files():
    folder = temporary_folder()
    for n in range(4):
        with tf.io.TFRecordWriter(str(folder / f'{n}.tfrecord')) as file:
            for _ in range(256): file.write(bytes(64))
    files = tf.data.Dataset.list_files(str(folder / '*')).repeat()
    rows = files.interleave(tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=4)
    decoded = rows.map(lambda r: tf.ensure_shape(tf.io.decode_raw(r, tf.uint8), [64]), num_parallel_calls=4)
    return decoded.batch(ROWS, drop_remainder=True).prefetch(2), emulated_step(for_rows)

CAUSES = {   # where the cause has another name than the training
    'numpy_function': 'Python makes the batches', 'variable shapes': 'compiled again for each shape'}
TRAININGS = (
    Training('numpy_function', CAUSES['numpy_function'], numpy_function, lambda: numpy_function(native=True)),
    Training('no prefetch', 'no prefetch', no_prefetch, lambda: no_prefetch(2)),
    Training('variable shapes', 'variable shapes', variable_shapes, lambda: variable_shapes(padded=True)),
    Training('host sync per step', 'host sync per step', host_sync, lambda: host_sync(fetched=False)),
    Training('tiny batch', 'tiny batch', tiny_batch, lambda: tiny_batch(16)),
    Training('slow disk', 'slow disk', slow_disk, lambda: slow_disk(local=True)),
    Training('single-threaded map', 'single-threaded map', single_threaded_map,
            lambda: single_threaded_map(16)),
    Training('oversubscription', 'oversubscription', oversubscription, lambda: oversubscription(cores())),
    Training('retracing', 'retracing', retracing, lambda: retracing(tensor=True)),
    Training('oscillation', 'oscillation', oscillation, lambda: oscillation(12)),
    Training('device copy in step', 'device copy in step', device_copy,
            lambda: device_copy(through_host=False)),
    *(Training(f'real: {name}', CAUSES.get(name, name), *twins, kind='real') for name, *twins in (
        ('numpy_function', real_python, lambda: real_python(native=True)),
        ('single-threaded map', real_map, lambda: real_map(cores())),
        ('no prefetch', real_no_prefetch, lambda: real_no_prefetch(2)),
        ('input-bound', real_no_cache, lambda: real_no_cache(cached=True)),
        ('many small files', real_small_files, lambda: real_small_files(packed=True)),
        ('variable shapes', real_shapes, lambda: real_shapes(buckets=True)),
        ('retracing', real_retracing, lambda: real_retracing(tensor=True)),
        ('host sync per step', real_sync, lambda: real_sync(fetched=False)),
        ('device copy in step', real_copy, lambda: real_copy(through_host=False)),
        ('step not compiled', real_eager, lambda: real_eager(compiled=True)),
        ('tiny batch', real_tiny_batch, lambda: real_tiny_batch(16)),
        ('float64', lambda: product_step(tf.float64), lambda: product_step(tf.float32)))),
    Training('healthy pipeline', None, healthy_pipeline),
    Training('healthy files', None, healthy_files),
    Training('healthy products', None, lambda: product_step(tf.float32, jit_compile=True)))


@_own_folders()
def run_training(
    training: Training,
    batches: int = 24,
    seconds: float = 8.,      # for the rounds of the diagnosis, about
) -> dict:                    # training, kind, found, right, predicted, measured, true, seconds
    "Diagnose one training and compare it with the fixed training."
    verdict = diagnose(*training.slow(), batches=batches, seconds=seconds)
    found = verdict[0].cause if verdict else None
    row = {'training': training.name, 'kind': training.kind, 'found': found or 'nothing to fix',
           'right': found == training.cause, 'predicted': None, 'measured': None, 'true': None}
    if training.fixed:
        each = _compare_loops({'slow': training.slow(), 'fixed': training.fixed()}, batches, seconds / 4)
        gain = each['slow'].per_item / each['fixed'].per_item
        predicted = next((f.gain for f in verdict if f.cause == training.cause), None)
        row |= {'predicted': predicted and round(predicted, 2), 'measured': round(gain, 2),
                'true': bool(predicted) and abs(predicted / gain - 1) <= 0.3}
    return row | {'seconds': round(verdict.seconds, 1)}

def run_trainings(
    trainings=TRAININGS,
    batches: int = 24,
    seconds: float = 8.,
    progress=None,            # called with (done, total)
) -> list[dict]:
    "Diagnose all trainings."
    rows = []
    for n, training in enumerate(trainings, 1):
        rows.append(run_training(training, batches, seconds))
        if progress: progress(n, len(trainings))
    return rows


def training_totals(
    rows: list[dict],   # of `run_trainings`
) -> dict:              # {emulated, real: {slow, named, predicted}, healthy, left_alone}
    "How many diagnoses and predictions were right, of the emulated and of the real trainings apart."
    slow, healthy = ([r for r in rows if (r['measured'] is None) == well] for well in (False, True))
    counts = {}
    for kind in ('emulated', 'real'):
        some = [r for r in slow if r['kind'] == kind]
        counts[kind] = {'slow': len(some), 'named': sum(r['right'] for r in some),
                        'predicted': sum(bool(r['true']) for r in some)}
    return counts | {'healthy': len(healthy), 'left_alone': sum(r['right'] for r in healthy)}

def total_lines(total: dict) -> list[str]:
    "`training_totals` for reading."
    kinds = {kind: total[kind] for kind in ('emulated', 'real') if total[kind]['slow']}
    lines = [f'{kind}: {n["named"]} of {n["slow"]} causes named, {n["predicted"]} gains predicted within 30 %'
             for kind, n in kinds.items()]
    return [*lines, f'healthy: {total["left_alone"]} of {total["healthy"]} left alone']


def main():
    parser = arguments(__doc__)
    parser.add_argument('--num-batches', type=int, default=24, help='in each round of measurements')
    parser.add_argument('--seconds', type=float, default=8., help='of a diagnosis, about')
    given = parser.parse_args()
    start()
    with progress() as tell:
        rows = run_trainings(TRAININGS, given.num_batches, given.seconds, partial(tell, 'diagnose'))
    total = training_totals(rows)
    output(given, 'causes', {'rows': rows, 'about': 'Diagnosed trainings'} | total, about='about',
           below='\n'.join(total_lines(total)))


if __name__ == '__main__': run(main)
