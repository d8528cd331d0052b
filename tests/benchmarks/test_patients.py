"Slow trainings of known cause: what batches and steps hold, and that a remedy changes nothing but its cause."
import functools
import gzip
import inspect
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.diagnosis import patients
from xtts_nb.bench import Arm
from xtts_nb.monitor import loop as phases
from xtts_nb.config import setup_tf, UserError
from benchmarks.diagnosis.patients import (
    PATIENTS, ROWS, WIDTH, Patient, patient_totals, run_patient, run_patients, temporary_folder, total_lines)
from xtts_nb.monitor.loop import TF_FUNCTION, SyncHooks, stages
from xtts_nb.monitor.diagnose import Finding

pytestmark = pytest.mark.slow
setup_tf(threads=2)
BY_NAME = {p.name: p for p in PATIENTS}


@functools.cache
def compressed(samples: bytes) -> bytes: return gzip.compress(samples, 1)


@pytest.fixture(autouse=True)
def alike(monkeypatch, tmp_path):
    "The same machine everywhere: three cores, folders that are removed, files compressed once and quickly."
    folders = (tmp_path / str(i) for i in itertools.count())
    def temporary_folder():
        folder = next(folders)
        folder.mkdir()
        return folder
    monkeypatch.setattr(patients, 'cores', lambda: 3)
    monkeypatch.setattr(patients, 'gzip', SimpleNamespace(compress=compressed))
    monkeypatch.setattr(patients, 'temporary_folder', temporary_folder)


def in_words(dataset) -> str:
    "A pipeline in words: the shape of its batches; its stages with parallel calls, buffer, and what they do."
    does = {'SleepDataset': 'sleeps', 'PyFunc': 'calls Python', 'ReadFile': 'reads'}
    words = []
    for s in stages(dataset):
        events = [word for op, word in does.items() if op in s.operations]
        words.append(' '.join([s.name, *([f'x{s.calls}'] if s.calls else []),
                               *([str(s.buffer)] if s.buffer else []), *events]))
    return f'{tuple(dataset.element_spec.shape)} {" > ".join(w for w in words if w != "Options")}'


# name: the pipeline of the slow training; the other one, where it differs
PIPELINES = {
    'numpy_function': ('(16,) Range > Map calls Python > Batch > Prefetch 2',
                       '(16,) Range > Map > Batch > Prefetch 2'),
    'no prefetch': ('(16, 8) Range > Map sleeps', '(16, 8) Range > Map sleeps > Prefetch 2'),
    'variable shapes': ('(16, None) Range > Map > Prefetch 2', '(16, 4000) Range > Map > Prefetch 2'),
    'host sync per step': ('(16, 64) Tensor > Repeat > Prefetch 2',),
    'tiny batch': ('(4, 8) Range > Map > Batch > Prefetch 2', '(16, 8) Range > Map > Batch > Prefetch 2'),
    'slow disk': ('(16, 64) Range > Map sleeps reads > Batch > Prefetch 2',
                  '(16, 64) Range > Map reads > Batch > Prefetch 2'),
    'single-threaded map': ('(16, 8) Range > Map sleeps > Batch > Prefetch 2',
                            '(16, 8) Range > ParallelMap x16 sleeps > Batch > Prefetch 2'),
    'oversubscription': ('(None, 8) Range > Zip > ParallelMap x96 sleeps > Batch > Prefetch 2',
                         '(None, 8) Range > Zip > ParallelMap x3 sleeps > Batch > Prefetch 2'),
    'retracing': ('(16, 64) Tensor > Repeat > Prefetch 2',),
    'oscillation': ('(16, 8) Range > FlatMap sleeps > Prefetch 1',
                    '(16, 8) Range > FlatMap sleeps > Prefetch 12'),
    'device copy in step': ('(16, 4096) Tensor > Repeat > Prefetch 2',),
    'real: numpy_function': ('(16, 16384) TensorSlice > Repeat > Map calls Python > Batch > Prefetch 2',
                             '(16, 16384) TensorSlice > Repeat > Map > Batch > Prefetch 2'),
    'real: single-threaded map': ('(None, 512) Range > Map > Batch > Prefetch 2',
                                  '(None, 512) Range > ParallelMap x3 > Batch > Prefetch 2'),
    'real: no prefetch': ('(16, 1024) Tensor > Repeat > Map',
                          '(16, 1024) Tensor > Repeat > Map > Prefetch 2'),
    'real: input-bound': ('(None, 512) Range > ParallelMap x3 > Batch > Prefetch 2',
                          '(None, 512) Range > ParallelMap x3 > Cache > Batch > Prefetch 2'),
    'real: many small files': (
        '(None, 1024) TensorSlice > Repeat > ParallelMap x3 reads > Batch > Prefetch 2',
        '(256, 1024) TensorSlice > TFRecord > Repeat > Batch > Map > Prefetch 2'),
    'real: variable shapes': ('(16, None, 64) Range > Map > Prefetch 2',),
    'real: retracing': ('(64, 256) Tensor > Repeat > Prefetch 2',),
    'real: host sync per step': ('(16, 256) Tensor > Repeat > Prefetch 2',),
    'real: device copy in step': ('(16, 16384) Tensor > Repeat > Prefetch 2',),
    'real: step not compiled': ('(16, 128) Tensor > Repeat > Prefetch 2',),
    'real: tiny batch': ('(4, 1024) Tensor > Repeat > Prefetch 2', '(16, 1024) Tensor > Repeat > Prefetch 2'),
    'real: float64': ('(512, 1024) Tensor > Repeat > Prefetch 2',),
    'healthy pipeline': ('(16, 8) Range > ParallelMap x16 sleeps > Batch > Prefetch 2',),
    'healthy files': (
        '(16, 64) TensorSlice > Shuffle 4 > Repeat > ParallelInterleave x4 > ParallelMap x4 > Batch > '
        'Prefetch 2',),
    'healthy products': ('(512, 1024) Tensor > Repeat > Prefetch 2',)}

def test_every_patient_is_described(): assert list(PIPELINES) == [p.name for p in PATIENTS]


@pytest.mark.parametrize('name', PIPELINES)
def test_the_pipelines_differ_in_their_cause_alone(name):
    patient, expected = BY_NAME[name], PIPELINES[name]
    arms = [arm()[0] for arm in (patient.sick, patient.cured) if arm]
    expected = expected if len(expected) == 2 else expected * len(arms)
    assert [in_words(data) for data in arms] == [*expected]
    if patient.kind == 'real':
        for data in arms: assert 'SleepDataset' not in {op for s in stages(data) for op in s.operations}
    assert patient.kind == ('real' if name.startswith('real: ') else 'emulated')
    assert (patient.disease is None) == (len(arms) == 1)


def first(data, batches=1): return list(itertools.islice(data, batches))

@pytest.mark.parametrize('name, batches', [
    ('numpy_function', 2), ('slow disk', 1), ('single-threaded map', 1), ('no prefetch', 1),
    ('oversubscription', 1),
    ('real: numpy_function', 2), ('real: no prefetch', 1), ('real: input-bound', 1),
    ('real: many small files', 2)])
def test_both_pipelines_deliver_the_same(name, batches):
    sick, cured = (first(arm()[0], batches) for arm in (BY_NAME[name].sick, BY_NAME[name].cured))
    np.testing.assert_allclose(sick, cured, rtol=1e-6)
    assert len(sick) == batches


def test_rows_of_numbers_and_noise():
    native, _ = patients.numpy_function(native=True)
    assert np.array_equal(np.concatenate(first(native, 2)), np.arange(2 * ROWS))
    clips = patients.pcm(2, 1000)
    samples = np.frombuffer(b''.join(clips), '<i2')
    assert [len(c) for c in clips] == [2000, 2000] and samples.min() < -32_000 and samples.max() > 32_000
    assert patients.python_decoding(clips[0]).tolist() == (np.frombuffer(clips[0], '<i2') / 32768).tolist()
    for name in ('real: numpy_function', 'real: many small files'):
        (batch,) = first(BY_NAME[name].cured()[0])
        assert -1 <= batch.numpy().min() < -.99 and .99 < batch.numpy().max() < 1
    (batch,) = first(patients.real_no_prefetch()[0])
    assert set(np.unique(8 * batch)) == set(range(-8, 8))


def test_pipelines_are_run_as_they_are_written():
    "TensorFlow parallelises no map by itself and adds no buffer."
    for name in ('numpy_function', 'no prefetch', 'real: single-threaded map', 'real: no prefetch',
                 'real: input-bound'):
        optimised = BY_NAME[name].sick()[0].options().experimental_optimization
        assert (optimised.map_parallelization, optimised.inject_prefetch) == (False, False)


def test_what_could_be_kept_are_96_clips():
    assert int(BY_NAME['real: input-bound'].sick()[0].cardinality()) == 96 / ROWS


def test_files_of_equal_clips(tmp_path):
    "Four files of 256 records, or a file for each clip."
    patients.healthy_files()
    files = sorted(tmp_path.glob('*/*.tfrecord'))
    assert len(files) == 4
    for file in files: assert [len(r.numpy()) for r in tf.data.TFRecordDataset(str(file))] == [64] * 256
    patients.real_small_files(files=5)
    sizes = {f.name: f.stat().st_size for f in tmp_path.glob('1/*')}
    assert sizes == {str(i): 2 * WIDTH for i in range(5)}


def test_lengths_that_vary_and_lengths_in_buckets():
    patient = BY_NAME['real: variable shapes']
    sick, cured = ([b.shape[1] for b in first(arm()[0], 30)] for arm in (patient.sick, patient.cured))
    assert len(set(sick)) > 20 and all(128 <= n < 1024 for n in sick) and set(cured) <= {256, 512, 768, 1024}
    lengths = {b.shape[1] for b in first(patients.variable_shapes()[0], 30)}
    assert len(lengths) > 20 and 100 <= min(lengths) and max(lengths) < 4000


def test_a_batch_in_each_cycle_comes_late(monkeypatch):
    monkeypatch.setattr(patients, 'tf_sleep', lambda us, value: value * tf.cast(us, tf.float32))
    late = [float(b[0, 0]) > 10_000 for b in first(patients.oscillation()[0], 13)]
    assert late == ([True] + [False] * 5) * 2 + [True]
    rows = np.array(first(patients.oversubscription(1)[0], 2))
    assert rows.min() == rows.max() > 0   # one call at a time takes always the same
    run = tf.constant(77, tf.int64)
    # 1 to 3 run beside 4
    crowd = [float(patients._crowded((tf.constant(i, tf.int64), run))[0]) for i in (0, 4, 5)]
    assert crowd[0] == crowd[2] == rows.min() and crowd[1] == pytest.approx(crowd[0] * 4**1.3)


# Spectra, and steps against NumPy

def test_a_spectrum_against_numpy():
    clip = np.random.default_rng(0).uniform(-1, 1, 5000).astype('float32')
    window = .5 - .5 * np.cos(2 * np.pi * np.arange(1024) / 1024)
    frames = [np.abs(np.fft.rfft(clip[at:at + 1024] * window)) for at in range(0, 5000 - 1023, 256)]
    np.testing.assert_allclose(patients.spectrum(clip), np.log(1e-5 + np.array(frames)).mean(0)[:512],
                               atol=1e-3)
    quiet = patients.spectrum(tf.zeros(1024))
    np.testing.assert_allclose(quiet, np.full(512, np.log(1e-5)), rtol=1e-5)


def test_clips_of_ten_seconds_are_noise_and_the_same_in_every_run(monkeypatch):
    monkeypatch.setattr(patients, 'spectrum', lambda clip: clip)
    clips = [np.array(list(patients.spectra(2))) for _ in range(2)]
    assert clips[0].shape == (2, 160_000) and -1 <= clips[0].min() < -.999 and .999 < clips[0].max() < 1
    assert np.array_equal(*clips) and not np.array_equal(clips[0][0], clips[0][1])


def drawn(width, layers):
    draw = np.random.default_rng(0)
    return [draw.normal(0, width**-.5, (width, width)) for _ in range(layers)]

def through(x, weights, squash=np.tanh):
    for w in weights: x = squash(x @ w)
    return x

def test_steps_against_numpy():
    x = np.random.default_rng(1).normal(size=(6, 64)).astype('float32')
    for layers in (1, 3):
        expected = through(x.reshape(-1, 32), drawn(32, layers)).mean()   # cut into rows of the width
        assert float(patients.layers_step(layers, 32)(x)) == pytest.approx(expected, rel=1e-4)
    assert patients.layers_step(1, 8, jit_compile=True)._jit_compile
    expected = through(x[:, :32], drawn(32, 1) * 5).mean()
    assert float(patients.recurrent_step(5, 32)(x)) == pytest.approx(expected, rel=1e-4)
    for kind in (tf.float32, tf.float64):
        data, step = patients.product_step(kind, 64, 2)
        assert data.element_spec.shape == (512, 64) and step(x).dtype == kind
        assert float(step(x)) == pytest.approx(through(x, drawn(64, 2), lambda x: x).mean(), rel=1e-4)
    rows = np.arange(6.).reshape(2, 3)
    grown = rows
    for _ in range(30): grown = grown * 1.001 + .1
    found = patients.many_operations(rows, 3, tf.constant(4))
    assert float(found) == pytest.approx(grown.sum() + 7, rel=1e-5)
    for batch in (tf.ones((8, 3)), (tf.ones((8, 3)), 1)):
        assert float(patients.for_rows(batch)) == pytest.approx(.005)


def test_a_learning_step_goes_down_the_gradient():
    "The loss is that of NumPy; an update lowers it by its squared length over the rate, to first order."
    data, step = patients.learning_step(3, 16, 2)
    weights = inspect.getclosurevars(step).nonlocals['weights']
    batch, before = next(iter(data)), [w.numpy() for w in weights]
    for i, w in enumerate(before):
        np.testing.assert_allclose(w, tf.random.stateless_normal((16, 16), [0, i]).numpy() / 4, rtol=1e-5)
    assert batch.shape == (3, 16)
    assert float(step(batch)) == pytest.approx((through(batch.numpy(), before)**2).mean(), rel=1e-5)
    moved = sum(((w.numpy() - old)**2).sum() for w, old in zip(weights, before))
    losses = [(through(batch.numpy().astype('float64'), some)**2).mean()
              for some in (before, [w.numpy() for w in weights])]
    assert moved / (losses[0] - losses[1]) == pytest.approx(.01, rel=.05)


@pytest.mark.parametrize('name, widths', [
    ('real: numpy_function', [512]), ('real: single-threaded map', [256]), ('real: no prefetch', [256]),
    ('real: input-bound', [256]), ('real: many small files', [256]), ('real: retracing', [256] * 12),
    ('real: step not compiled', [128] * 32), ('real: tiny batch', [1024] * 6), ('real: float64', [1024] * 3),
    ('healthy products', [1024] * 3)])
def test_how_large_the_real_steps_are(name, widths):
    for arm in (BY_NAME[name].sick, BY_NAME[name].cured):
        if not arm: continue
        seen = inspect.getclosurevars(getattr(arm()[1], 'python_function', arm()[1])).nonlocals
        while 'weights' not in seen and 'w' not in seen:   # a step that calls another one
            inner = seen.get('layers') or seen['step']
            seen = inspect.getclosurevars(inner.python_function).nonlocals
        weights = seen.get('weights') or [seen['w']]
        assert [w.shape for w in weights] == [(n, n) for n in widths]


# What steps do, with the cause and without

def watched(arm, times=3):
    "What the later ones of some steps did, and all results."
    data, step = arm()
    (batch,) = first(data)
    notes, results = [], []
    with SyncHooks() as hooks:
        for _ in range(times):
            with hooks.step() as events: result = step(batch)
            notes.append(events)
            results.append(float(result))
    return notes[1:], results


@pytest.mark.parametrize('name, what, slow, remedied', [
    ('retracing', lambda i: len(i.traced), 1, 0), ('real: retracing', lambda i: len(i.traced), 1, 0),
    ('host sync per step', lambda i: i.syncs, 1, 0), ('real: host sync per step', lambda i: i.syncs, 1, 0),
    ('device copy in step', lambda i: (i.down, i.up), (16 * 4096 * 4,) * 2, (0, 0)),
    ('real: device copy in step', lambda i: (i.down, i.up), (16 * 16384 * 4,) * 2, (0, 0)),
    ('real: step not compiled', lambda i: len(i.calls), 0, 1),
    ('real: variable shapes', lambda i: len(i.calls), 1, 1)])
def test_a_remedy_takes_the_cause_away_and_keeps_the_results(name, what, slow, remedied):
    patient = BY_NAME[name]
    sick, results = watched(patient.sick)
    cured, same = watched(patient.cured)
    assert [what(i) for i in sick] == [slow] * 2 and [what(i) for i in cured] == [remedied] * 2
    assert results == pytest.approx(same, rel=1e-3,
                                    abs=1e-2 if name == 'real: device copy in step' else 1e-12)
    if name == 'real: variable shapes':
        assert all(i.calls[0].function._jit_compile for i in sick) and results == pytest.approx([64.] * 3)
    if name == 'device copy in step': assert results[0] == pytest.approx(16 * 4096 / 255)
    if name.endswith('retracing'): assert len(set(results)) == 3   # the number of the step is used


def test_samples_are_quantised_to_256_levels_on_either_way(monkeypatch):
    monkeypatch.setattr(patients, 'layers_step', lambda *size: tf.function(lambda x: x))
    for through_host in (True, False):
        data, step = patients.real_copy(through_host)
        batch = first(data)[0].numpy()
        levels = step(tf.constant(batch)).numpy() * 128
        assert -1 <= batch.min() < -.99 and .99 < batch.max() < 1
        assert np.array_equal(levels, np.round(levels)) and levels.min() == -128 and levels.max() >= 127
        assert abs(levels / 128 - batch).max() <= 1 / 128


def test_which_steps_are_compiled_and_how():
    for name, arm, graph in (('no prefetch', 'sick', True), ('no prefetch', 'cured', True),
                             ('oscillation', 'sick', True),
                             ('slow disk', 'sick', False), ('real: step not compiled', 'sick', False),
                             ('real: step not compiled', 'cured', True)):
        assert isinstance(getattr(BY_NAME[name], arm)()[1], TF_FUNCTION) == graph, name
    for name in ('real: tiny batch', 'healthy products'): assert BY_NAME[name].sick()[1]._jit_compile
    assert patients.product_step(tf.float32, 8, 1)[1]._jit_compile is None


def test_a_wasteful_device_takes_hardly_longer_for_four_times_the_rows(monkeypatch):
    monkeypatch.setattr(phases, 'tf_sleep', lambda microseconds, value: microseconds)
    _, step = patients.tiny_batch()
    few, many = (float(step(tf.ones((rows, 8)))) for rows in (4, 16))
    assert few < many < 1.3 * few


# Visits

class Verdict(list):
    seconds = 1.26

@pytest.mark.parametrize('found, healthy, row', [
    ([('slow', 1.2345), ('other', 9.)], False, ('slow', True, 1.23, 1.37, True)),
    ([('other', 9.), ('slow', 1.2345)], False, ('other', False, 1.23, 1.37, True)),
    ([('slow', .95)], False, ('slow', True, .95, 1.37, False)),
    ([('slow', 1.8)], False, ('slow', True, 1.8, 1.37, False)),
    ([], False, ('nothing to fix', False, None, 1.37, False)),
    ([], True, ('nothing to fix', True, None, None, None)),
    ([('other', 2.)], True, ('other', False, None, None, None))])
def test_a_patient_in_a_row(monkeypatch, found, healthy, row):
    "A diagnosis of 8 s, and 2 s for each run of both arms, of which one takes 1.366 times as long."
    asked = []
    def diagnose(data, step, batches, seconds):
        asked.append((data, step, batches, seconds))
        return Verdict(Finding(disease, '', '', gain) for disease, gain in found)
    def compare_loops(loops, batches, seconds):
        asked.append((loops, batches, seconds))
        return {'sick': Arm('', [.5, .683, .9]), 'cured': Arm('', [.5])}
    monkeypatch.setattr(patients, 'diagnose', diagnose)
    monkeypatch.setattr(patients, 'compare_loops', compare_loops)
    patient = Patient('name', None if healthy else 'slow', lambda: ('data', 1),
                      None if healthy else lambda: ('other', 2), 'real')
    seen = run_patient(patient, 12, 8.)
    assert tuple(seen[k] for k in ('found', 'right', 'predicted', 'measured', 'true')) == row
    assert (seen['patient'], seen['kind'], seen['seconds']) == ('name', 'real', 1.3) and json.dumps(seen)
    assert asked == [('data', 1, 12, 8.),
                     *([] if healthy else [({'sick': ('data', 1), 'cured': ('other', 2)}, 12, 2.)])]
    done = []
    rows = run_patients([patient] * 2, 12, 8., lambda *n: done.append(n))
    assert rows == [seen] * 2 == run_patients([patient] * 2, 12, 8.)
    assert done == [(1, 2), (2, 2)]


def test_no_folder_outlives_its_patient(monkeypatch):
    made, file = [], lambda: made.append(temporary_folder()) or (made[-1] / 'clip').touch()
    def diagnose(data, step, batches, seconds):
        assert made[0].is_dir()
        raise UserError('the step failed')
    monkeypatch.setattr(patients, 'diagnose', diagnose)
    with pytest.raises(UserError): run_patient(Patient('name', None, lambda: (file(), 1)))
    assert not made[0].exists()


def test_patients_are_counted():
    row = dict(kind='real', right=True, measured=2., true=True)
    rows = [row, row | {'right': False, 'true': False}, row | {'kind': 'emulated', 'true': None},
            row | {'measured': None},
            row | {'measured': None, 'right': False}, row | {'measured': None, 'right': False}]
    total = patient_totals(rows)
    assert total == {'emulated': {'slow': 1, 'named': 1, 'predicted': 0},
                     'real': {'slow': 2, 'named': 1, 'predicted': 1},
                     'healthy': 3, 'left_alone': 1}
    assert total_lines(total) == ['emulated: 1 of 1 causes named, 0 gains predicted within 30 %',
                                  'real: 1 of 2 causes named, 1 gains predicted within 30 %',
                                  'healthy: 1 of 3 left alone']
    assert total_lines(patient_totals(rows[2:])) == [total_lines(total)[0], total_lines(total)[2]]


@pytest.mark.parametrize('name', ['host sync per step', 'no prefetch'])
def test_a_patient_is_named(name):
    row = run_patient(BY_NAME[name], 12, 2.)
    assert row['right'], row


@pytest.mark.alone
def test_patients_that_compute_and_healthy_ones():
    """What helps on this machine, with what else computes on it, is named; the script records the gains.

    Those that sleep are in the quick tests of the rules."""
    rows = run_patients([p for p in PATIENTS if p.kind == 'real' or p.disease is None], seconds=12.)
    slow, healthy = ([row for row in rows if (row['measured'] is None) == well] for well in (False, True))
    helped = [row for row in slow if row['measured'] > 1.3]
    assert len(slow) == 12 and len(helped) >= 9 and len(healthy) == 3, rows
    assert not [row for row in (*helped, *healthy) if not row['right']]
