"What makes a program wait for its batches."
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from watched import calls, LINE, only, OTHER, seen
from xtts_nb.monitor import input_rules as page
from xtts_nb.monitor.input_rules import find_few_threads, find_python_input, find_tiny_steps
from xtts_nb.monitor.seen import gain_without
from xtts_nb.monitor.watch import Event, Look, Place, PythonCall


@pytest.mark.parametrize('rows, looks, alike, is_found', [
    (4, {'graph': 100}, True, True), (16, {'graph': 100}, True, True), (17, {'graph': 100}, True, False),
    (4, {'input': 60, 'graph': 40}, True, True), (4, {'input': 61, 'graph': 39}, True, False),
    (4, {'save': 30, 'graph': 70}, True, True), (4, {'save': 31, 'graph': 69}, True, False),
    (4, {'trace': 31, 'graph': 69}, True, False), (4, {'eager': 31, 'graph': 69}, True, False),
    (4, {'summary': 31, 'graph': 69}, True, False), (4, {'callback': 60, 'graph': 40}, True, True),
    (4, {'graph': 100}, False, False)])
def test_steps_of_few_rows(monkeypatch, rows, looks, alike, is_found):
    "Found where a batch of 64 rows takes less than 0.45 of what as many small ones take."
    monkeypatch.setattr(page, 'seconds_of', lambda call: float(call()))
    step = tf.function(lambda x: tf.constant(.1) if alike else tf.size(x, tf.int64) / (30 * rows))
    events = calls('call', 100)
    last = {('call', LINE): (step, '__call__', (tf.zeros((rows, 3)),), {})}
    looks = [kind for kind, count in looks.items() for _ in range(count)]
    found = find_tiny_steps(seen(looks, events, loop=('call', LINE), last=last))
    assert bool(found) == is_found
    if not found: return
    assert found[0].disease == 'tiny batch' and 'of 64 rows 100.0 ms' in found[0].evidence
    assert found[0].predicted_gain == pytest.approx(64 / rows, rel=.05) and 'batch(64)' in found[0].change

@pytest.mark.parametrize('name, given, rows, seconds, takes, is_found', [
    ('evaluate', {'batch_size': 1}, 4, .1, .5, True), ('predict', {'batch_size': 16}, 64, .1, .01, True),
    ('predict', {'batch_size': 17}, 640, .1, .01, False), ('evaluate', {}, 640, .1, .01, False),
    ('evaluate', {'batch_size': 1}, 3, .1, .01, False),
    ('predict_on_batch', {'batch_size': 1}, 9, .1, .01, False),
    ('evaluate', {'batch_size': 1}, 4, .0199, .01, False),
    ('evaluate', {'batch_size': 1}, 4, .1, .51, False)])
def test_an_evaluation_in_small_batches(monkeypatch, name, given, rows, seconds, takes, is_found):
    "Five calls, of ten seconds each at most; in batches of 256 rows a call takes a share of that."
    asked = []
    model = SimpleNamespace(**{name: lambda *args, **named: asked.append((args, named))})
    monkeypatch.setattr(page, 'tried', lambda call: call() or 10 * seconds * takes)
    kind = name.removesuffix('_on_batch')
    part = seen([], calls(kind, 10, seconds=10 * seconds, rows=rows),
                last={(kind, LINE): (model, name, ('x',), given)})
    part.begin, part.end = 0., 100 * seconds if seconds == .1 else 10.
    found = page.find_small_evaluation(part)
    assert bool(found) == is_found
    if not found: return
    assert asked == [(('x',), {'batch_size': 256, 'verbose': 0})] and only(found).place == 'watched.py:3'
    assert found[0].predicted_gain == pytest.approx(1 / takes, rel=.15)
    assert f'{rows} rows in batches of {given["batch_size"]}, and takes 100%' in found[0].evidence

def test_callbacks_that_somebody_chose():
    named = lambda name: Look(0., LINE, 'callback', 'inside', name)
    part = seen([])
    part.looks = [*map(named, ('', 'CallbackList', 'History', 'ProgbarLogger', 'Own', 'EarlyStopping')),
                  Look(0., LINE, 'graph', 'inside', 'Own'), Look(0., LINE, 'graph', 'inside')]
    assert page._callbacks(part) == 2 / 8 and page._callbacks(seen([])) == 0

@pytest.mark.parametrize('loop, is_found', [('call', False), ('fit', True)])
def test_what_keras_does_at_each_step_is_a_cost_of_the_step(monkeypatch, loop, is_found):
    monkeypatch.setattr(page, 'seconds_of', lambda call: float(call()))
    step = tf.function(lambda x: tf.constant(.01))
    part = seen(['eager'] * 60 + ['graph'] * 40, calls(loop, 100), loop=(loop, LINE),
                last={('call', LINE): (step, '__call__', (tf.zeros((4, 3)),), {})})
    part.events += calls('call', 100)
    assert bool(find_tiny_steps(part)) == is_found

def test_a_program_without_a_loop_has_no_tiny_steps(): assert find_tiny_steps(seen(['own'], loop=())) == []

def test_few_rows_whose_pipeline_takes_its_time_for_each(monkeypatch):
    "What a row takes before the step stays, in larger batches too; arguments may have names."
    monkeypatch.setattr(page, 'seconds_of', lambda call: float(call()))
    step, rows = tf.function(lambda x: tf.constant(.1)), tf.data.Dataset.range(9)
    def look(waits, *pipelines):
        part = seen(['input'] * waits + ['graph'] * (100 - waits), calls('call', 100), loop=('call', LINE),
                    last={('call', LINE): (step, '__call__', (), {'x': tf.zeros((4, 3))})},
                    datasets={LINE: [*pipelines]})
        return find_tiny_steps(part)
    paths = rows.map(tf.strings.as_string)
    reads = paths.map(tf.io.read_file)
    assert [page.works(d) for d in (rows, paths, reads)] == [False, False, True]
    python = rows.map(lambda i: tf.numpy_function(lambda i: i, [i], tf.int64))
    assert page.works(python) and only(look(50, paths)).predicted_gain == pytest.approx(16, rel=.05)
    assert only(look(35, reads)).predicted_gain == pytest.approx(1 / (1 / 16 + .35), rel=.05)
    assert look(50, reads) == []

def test_passes_that_end_with_a_wait():
    steps, ends = calls('next', 40), calls('end', 5, 2., .3)
    found = only(page.find_ended_passes(seen(['graph'] * 100, steps + ends)))
    assert found.disease == 'each pass ends with a wait' and found.place == 'watched.py:3'
    assert '5 passes' in found.evidence and '300.0 ms' in found.evidence and '15%' in found.evidence
    assert found.predicted_gain == pytest.approx(1 / (.85 + .15 * .03))
    assert page.find_ended_passes(seen([], steps + calls('end', 5, 2., .2399))) == []
    assert page.find_ended_passes(seen([], calls('end', 1, 2., 3.))) == []
    # one of four waited: what the next ones do is not known; with all of them it is
    one = calls('end', 3, 1., 0.) + calls('end', 1, seconds=2.)
    assert page.find_ended_passes(seen([], steps + one)) == []
    assert page.find_ended_passes(seen([], steps + calls('end', 4, 2., .5)))

def test_python_that_makes_the_batches():
    python = [PythonCall(i * .1, i * .1 + .08, LINE, 'load') for i in range(100)]
    found = only(find_python_input(seen(['input'] * 70 + ['graph'] * 30, python=python)))
    assert found.disease == 'Python makes the batches' and '80%' in found.evidence and '70%' in found.evidence
    assert found.evidence.startswith('a Python function') and found.place == 'watched.py:3'
    assert found.predicted_gain == pytest.approx(1 / (.3 + .01 * .7), rel=.01)   # the step is not timed
    little = [c._replace(end=c.start + .03) for c in python]   # waiting is not all its own
    found = only(find_python_input(seen(['input'] * 70 + ['graph'] * 30, python=little)))
    assert found.low == pytest.approx(1 / (1 - .9 * .3)) and found.high > 3
    made = [c._replace(name='generator_py_func') for c in python]
    found = only(find_python_input(seen(['input'] * 70 + ['graph'] * 30, python=made)))
    assert found.evidence.startswith('a Python generator makes rows or batches 80%')
    assert find_python_input(seen(['input'] * 9 + ['graph'] * 91, python=python)) == []
    assert find_python_input(seen(['input'] * 70 + ['graph'] * 30)) == []
    for seconds, count in ((1., 1), (.99, 0)):   # of ten
        once = [PythonCall(0., seconds, LINE, 'load')]
        assert len(find_python_input(seen(['input'] * 70 + ['graph'] * 30, python=once))) == count

def test_a_pipeline_whose_python_traces():
    python = [PythonCall(i, i + .9, LINE, 'generator_py_func') for i in range(10)]
    other = lambda kinds: [Look(i / 10, LINE, kind, '') for i, kind in enumerate(kinds)]
    look = lambda kinds: only(find_python_input(seen(['input'] * 80 + ['graph'] * 20, python=python,
                                                     beside=other(kinds))))
    found = look(['trace'] * 40 + ['graph'] * 20 + ['own'] * 40)
    assert found.disease == 'retracing in the pipeline' and '40% of its time' in found.evidence
    assert found.predicted_gain == pytest.approx(1 / (.2 + .8 * (.6 - .18)))
    assert look(['trace'] * 30 + ['own'] * 70).disease == 'Python makes the batches'
    before = [Look(-1., LINE, 'trace', '')] * 90   # of the time that is judged
    assert look([*'ab']).disease == 'Python makes the batches'
    part = seen([], beside=before + other(['trace', 'own', 'own', 'own']))
    assert part.beside('trace') == .25 and seen([], beside=before).beside('trace') == 0

@pytest.mark.parametrize('line, cause', [
    ('x = np.load(path)', 'many small files read in Python'),
    ('x = imread(path)', 'many small files read in Python'),
    ("f = gzip.open(path, 'rb')", 'compressed files read in Python'),
    ('x = loads(text)', 'Python makes the batches'),
    ("x = np.load('all.npz')['x']", 'compressed files read in Python')])
def test_a_line_of_the_pipeline_that_reads_files(tmp_path, line, cause):
    (path := tmp_path / 'train.py').write_text(f'{line}\n')
    python = [PythonCall(i * .1, i * .1 + .08, LINE, 'load') for i in range(100)]
    part = seen(['input'] * 60 + ['graph'] * 40, python=python)
    part.watch.pipeline_place = lambda *_: Place(str(path), 1)
    found = only(find_python_input(part))
    assert found.disease == cause and found.line == line and found.place == 'train.py:1'
    if 'read' in cause: assert found.predicted_gain == pytest.approx(1 / (1 - .6 * .95))
    assert ('uncompressed' in found.remedy) == cause.startswith('compressed')

def test_a_cache_inside_of_interleave():
    read = lambda i: tf.data.Dataset.range(4).map(lambda j: i + j).cache()
    plain, inside = (tf.data.Dataset.range(3).interleave(f) for f in (lambda i: read(i).take(9), read))
    for made in (plain, inside):
        some = page.stages(made.shuffle(9).batch(2))
        assert page._order(some, 2, True) is page.INSIDE and page._order(some, 1, True) is None
        assert page._filled(seen([]), some, 9, 9., [.1]) is None   # its buffer is filled by the same work
    assert page._order(page.stages(inside.cache()), 2, True) is None
    assert page._order(page.stages(inside.repeat()), 1, True) is page.INSIDE

@pytest.mark.parametrize('own, calls_at_once, waits, is_found', [
    (1, 4, 50, True), (3, 4, 50, True), (4, 4, 50, False), (1, 1, 50, False), (0, 4, 50, False),
    (1, 4, 12, False)])
def test_a_pool_of_threads_smaller_than_the_parallel_calls(monkeypatch, own, calls_at_once, waits, is_found):
    monkeypatch.setattr(page, 'cores', lambda: 8)
    options = tf.data.Options()
    options.threading.private_threadpool_size = own
    made = tf.data.Dataset.range(9).map(lambda x: x, num_parallel_calls=calls_at_once).with_options(options)
    found = find_few_threads(seen(['input'] * waits + ['graph'] * (100 - waits), datasets={LINE: [made]}))
    assert bool(found) == is_found
    if not found: return
    assert f'{own} thread{"s" * (own > 1)} (private_threadpool_size)' in only(found).evidence
    assert found[0].predicted_gain == pytest.approx(1 / (.5 + .5 * own / 4))
    monkeypatch.setattr(page, 'cores', lambda: own)
    assert not find_few_threads(seen(['input'] * 50 + ['graph'] * 50, datasets={OTHER: [made]}))

def test_a_step_alone_is_timed_and_what_python_does_beside_it_stays():
    step = tf.function(lambda x: x + 1)
    events, last = calls('call', 100), {('call', LINE): (step, '__call__', (tf.zeros(3),), {})}
    part = seen(['input'] * 40 + ['graph'] * 50 + ['own'] * 10, events, last=last)
    assert page.alone_seconds(part, 1.) == pytest.approx(.1, abs=.02)   # the graph takes far less than 0.5 s
    assert page.alone_seconds(part, 1e-6) == pytest.approx(.6e-6)       # never longer than in the loop
    assert page.alone_seconds(seen(['input'] * 40 + ['graph'] * 60), 1.) == pytest.approx(.6)

NEVER_FULL = 'a cache that is never full'

def raw(x): return tf.io.decode_raw(tf.strings.as_string(x), tf.uint8)

@pytest.mark.parametrize('build, passes, whole, cause', [
    (lambda d: d.map(lambda x: x + 1).repeat().cache(), 1, True, 'cache after repeat'),
    (lambda d: d.cache().take(3).repeat(), 1, True, NEVER_FULL),
    (lambda d: d.cache().take(3), 2, True, NEVER_FULL), (lambda d: d.cache().take(3), 1, True, None),
    (lambda d: d.cache(), 2, False, NEVER_FULL), (lambda d: d.cache(), 1, False, None),
    (lambda d: d.cache().repeat(9).batch(2), 2, False, None),
    (lambda d: d.repeat(2).take(5).cache(), 2, False, 'cache after repeat'),
    (lambda d: d.map(tf.io.decode_raw_or_read).shuffle(9), 1, True, 'shuffle after decoding'),
    (lambda d: d.map(raw).shuffle(9), 1, True, None),
    (lambda d: d.take(3).cache().repeat(), 2, True, None),
    (lambda d: d.cache().shuffle(5).repeat().take(9), 2, True, None)])
def test_the_order_of_a_pipeline(monkeypatch, build, passes, whole, cause):
    monkeypatch.setattr(tf.io, 'decode_raw_or_read', lambda x: tf.io.read_file(tf.strings.as_string(x)),
        raising=False)
    shape = page._order(page.stages(build(tf.data.Dataset.range(9))), passes, whole)
    assert (shape and shape.cause) == cause

@pytest.mark.parametrize('order, costs, expected', [
    (None, None, None), (None, page.ZIPPED, page.ZIPPED), (page.SHUFFLED, None, page.SHUFFLED),
    (page.SHUFFLED, page.ZIPPED, page.ZIPPED), (page.SHUFFLED, page.PARSED, page.PARSED),
    (page.SHUFFLED, page.SERIAL, page.SHUFFLED), (page.REPEATED, page.ZIPPED, page.REPEATED)])
def test_the_order_of_a_pipeline_or_what_a_stage_does(order, costs, expected):
    found = page._worse(order, costs and (costs, .3))
    assert found == (expected and (expected, .02 if expected is order else .3))

@pytest.mark.parametrize('dtype, part, is_found', [
    (tf.float64, .3, True), (tf.float64, .29, False), (tf.float32, .9, False)])
def test_a_stage_in_double_precision(dtype, part, is_found):
    data = tf.data.Dataset.range(4).map(lambda x: tf.cast(tf.fill([1000], x), dtype) * 2)
    found = page._in_double(seen(['input'] * 9), page.stages(data)[-1], .8, part)
    assert bool(found) == is_found
    if found: assert found[0].predicted_gain == pytest.approx(1 / (.2 + .8 * .85))
    few = tf.data.Dataset.range(4).map(lambda x: tf.cast(tf.fill([999], x), dtype) * 2)
    assert page._in_double(seen(['input'] * 9), page.stages(few)[-1], .8, .9) == []

def test_the_same_work_comes_before_its_threads():
    data = tf.data.Dataset.range(64).map(lambda x: tf.cumsum(tf.fill([2000], x))).batch(2)
    some = page.stages(data)
    stage = next(s for s in some if s.name == 'Map')
    assert page._shape(some, stage, .9, 1., True) == (page.EVERY_EPOCH, .05)
    assert page._shape(some, stage, .9, 1., False) == (page.SERIAL, 1 / page.cores())

def test_rows_that_are_in_memory_are_not_to_be_cached():
    some = page.stages(tf.data.Dataset.from_tensor_slices(np.ones((64, 3))).shuffle(9).batch(16))
    assert page._shape(some, some[0], .9, 1., True) == (page.ROWS, .4)
    assert page._shape(some, some[0], .2, 1., True) is None
    numbers = page.stages(tf.data.Dataset.range(64).batch(16))
    assert page._shape(numbers, numbers[0], .9, 1., True) is None

def test_what_asking_costs_is_no_wait(monkeypatch):
    "Only what a loop waits beyond that; within `fit` it is the graph that asks."
    assert 0 < page.next_seconds((tf.ones((4, 2)), tf.ones(4))) < .01
    data = tf.data.Dataset.range(400).map(heavy).batch(8)
    monkeypatch.setattr(page, 'alone_seconds', lambda seen, period: .001)
    part = lambda kind: seen(['input'] * 60 + ['graph'] * 40, calls(kind, 30, 10 / 30, .2), loop=(kind, LINE),
                             datasets={LINE: [data]})
    asked = lambda seconds: monkeypatch.setattr(page, 'next_seconds', lambda batch: seconds)
    asked(0.)
    assert page.find_slow_input(part('next'))
    asked(9.)
    assert page.find_slow_input(part('next')) == []

def test_the_function_of_a_stage_is_named():
    def load(x): return x + 1
    stage = page.stages(tf.data.Dataset.range(4).map(load))[-1]
    assert page._of(stage) == f' (load, test_input_rules.py:{load.__code__.co_firstlineno})'
    assert page._of(page.stages(tf.data.Dataset.range(4))[-1]) == ''

@pytest.mark.parametrize('again', [False, True])
def test_windows_that_are_made_one_by_one(again):
    data = tf.data.Dataset.range(64).window(4, 1, drop_remainder=True)
    some = page.stages(data.flat_map(lambda w: w.batch(4)).batch(16).map(lambda x: x + 1))
    stage = lambda name: next(s for s in some if s.name == name)
    for name in ('FlatMap', 'Window'):
        assert page._shape(some, stage(name), .3, 1., again) == (page.WINDOWS, .1)
    assert page._shape(some, stage('FlatMap'), .29, 1., again) is None
    shape = lambda some, stage: page._shape(some, stage, .9, 1., again) or (None,)
    assert shape(some, stage('Map'))[0] is not page.WINDOWS
    flat = page.stages(tf.data.Dataset.range(64).flat_map(lambda x: tf.data.Dataset.range(x)).batch(16))
    assert shape(flat, flat[1])[0] is not page.WINDOWS

def picture(parts):
    "A pipeline of maps, each a list of words."
    do = {'decode': lambda x: tf.io.decode_jpeg(x, channels=3), 'float': lambda x: tf.cast(x, tf.float32),
          'hue': lambda x: tf.image.adjust_hue(x, .1), 'crop': lambda x: tf.image.random_crop(x, (8, 8, 3)),
          'cut': lambda x: x[2:9, 3:7], 'resize': lambda x: tf.image.resize(x, (9, 9)),
          'both': lambda x: tf.image.decode_and_crop_jpeg(x, [0, 0, 8, 8], channels=3)}
    data = tf.data.Dataset.from_tensors('')
    for words in parts:
        def apply(x, words=words):
            for word in words.split(): x = do[word](x)
            return x
        data = data.map(apply)
    return page.stages(data)

@pytest.mark.parametrize('parts, first, later', [
    (['decode crop'], True, False), (['decode', 'crop'], True, False), (['decode cut'], True, False),
    (['decode float hue', 'float', 'crop'], True, False), (['both float hue'], False, False),
    (['decode resize crop'], False, False), (['decode', 'resize', 'cut'], False, False),
    (['decode'], False, False),
    (['decode', 'float hue', 'crop'], True, True), (['both', 'crop float hue'], False, False)])
def test_pictures_of_which_a_part_is_used(parts, first, later):
    some = picture(parts)
    assert page._crops_later(some, some[1]) == first
    assert page._crops_later(some, some[min(2, len(some) - 1)]) == (later if len(some) > 2 else first)

@pytest.mark.parametrize('build, packed', [
    (lambda f: tf.data.TFRecordDataset(f, 'GZIP'), True), (lambda f: tf.data.TFRecordDataset(f), False),
    (lambda f: tf.data.TFRecordDataset(f, ''), False), (lambda f: tf.data.TextLineDataset(f, 'ZLIB'), True),
    (lambda f: f.interleave(lambda n: tf.data.TFRecordDataset(n, compression_type='GZIP')), True),
    (lambda f: f.interleave(lambda n: tf.data.TFRecordDataset(n)), False),
    (lambda f: f.map(lambda x: tf.io.decode_compressed(x, 'ZLIB')), True),
    (lambda f: f.map(lambda x: tf.io.decode_compressed(x, '')), False)])
def test_what_is_unpacked(build, packed):
    some = page.stages(build(tf.data.Dataset.from_tensor_slices(['a'])))
    assert any(page._unpacks(s) for s in some) == packed

def test_passes_over_a_pipeline():
    data = tf.data.Dataset.range(10)
    look = lambda steps, made: page._passes(seen([], calls('next', steps), datasets={LINE: made}), made)
    assert look(22, [data] * 2) == (2, True) and look(18, [data] * 2) == (2, True)
    assert look(17, [data] * 2) == (2, False) and look(3, [data.repeat()]) == (1, True)
    fits = lambda asked: [SimpleNamespace(epochs=3, asked=asked)]
    fit = lambda asked: page._passes(seen([], loop=('fit', LINE), fits=fits(asked)), [data] * 7)
    assert [fit(n) for n in (None, 10, 9, 8)] == [(3, True)] * 3 + [(3, False)]
    part = seen([], calls('next', 30))
    some = lambda d: page.stages(d.map(lambda x: x).batch(2))
    assert page._again(part, some(data.repeat()), 1) and page._again(part, some(data), 2)
    assert not page._again(part, some(data), 1)
    assert not page._again(part, some(tf.data.Dataset.range(60).repeat()), 1)
    assert page._again(part, some(tf.data.Dataset.range(59).repeat()), 1)

def heavy(i):
    x = tf.sin(tf.reshape(tf.range(3600.), (60, 60)) + tf.cast(i, tf.float32))
    for _ in range(40): x = tf.tanh(x @ x / 8)
    return x[0]

@pytest.mark.parametrize('build, passes, steps, cause', [
    (lambda d: d.map(heavy).repeat().cache().batch(8), 1, 90, 'cache after repeat'),
    (lambda d: d.map(heavy, num_parallel_calls=2).batch(8), 3, 30, 'the same work in every epoch'),
    (lambda d: d.map(heavy, num_parallel_calls=2).repeat().batch(8), 1, 30, 'the same work in every epoch'),
    (lambda d: d.map(heavy, num_parallel_calls=2).cache().batch(8), 9, 9, 'a cache that is never full'),
    (lambda d: d.map(heavy, num_parallel_calls=2).shuffle(70).batch(2), 9, 315,
     'the shuffle buffer is filled again before each epoch')])
def test_a_pipeline_for_which_the_step_waits(monkeypatch, build, passes, steps, cause):
    "It waits 90 % of an iteration of 0.5 ms; the pipeline is read once more."
    monkeypatch.setattr(page, 'cores', lambda: 2)
    data = build(tf.data.Dataset.range(70))
    part = seen(['input'] * 90 + ['graph'] * 10, calls('next', steps, 1e-4), datasets={LINE: [data] * passes})
    part.begin, part.end = 0., 5e-4 * steps
    found = page.find_slow_input(part)[0]
    assert found.disease == cause and found.place == 'watched.py:3' and found.line == LINE.text
    assert found.low <= found.predicted_gain <= found.high

@pytest.mark.parametrize('build, passes, fill, share', [
    (lambda d: d.shuffle(5), 5, .58, .22), (lambda d: d.shuffle(5), 2, 2.5, 0),
    (lambda d: d.shuffle(5), 3, 1.03, 0), (lambda d: d.shuffle(5), 400, .08, 0),
    (lambda d: d.shuffle(5), 400, .081, .999),
    (lambda d: d.cache().shuffle(5), 5, .58, 0), (lambda d: d.shuffle(5).cache(), 5, .58, .22),
    (lambda d: d.batch(5), 5, .58, 0)])
def test_a_shuffle_that_is_filled_again(monkeypatch, build, passes, fill, share):
    "In 10 s, with batches of 10 ms."
    monkeypatch.setattr(page, 'first_seconds', lambda dataset: .4 * fill)
    some = page.stages(build(tf.data.Dataset.range(9)))
    found = page._filled(seen([]), some, passes, fill, [.01, .01, .5])
    assert bool(found) == bool(share)
    if found: assert found.predicted_gain == pytest.approx(gain_without(share, .05))
    assert page._filled(seen([]), some, passes, fill, []) is None
    monkeypatch.setattr(page, 'first_seconds', lambda dataset: .39 * fill)   # another stage takes the time
    assert page._filled(seen([]), some, passes, fill, [.01, .01, .5]) is None

def test_the_first_element_of_a_pass():
    slow = tf.data.Dataset.range(3).map(lambda x: (tf.py_function(lambda: time.sleep(.1), [], []), x)[1])
    assert .3 < page.first_seconds(slow.shuffle(9)) < 3

@pytest.mark.parametrize('build, loop, is_found', [
    (lambda d: d.shuffle(300).batch(2), 'fits', True), (lambda d: d.shuffle(300).batch(2), 'fit', False),
    (lambda d: d.batch(2), 'fits', False)])
def test_fit_in_a_loop_fills_its_shuffle_buffer_again(build, loop, is_found):
    data = build(tf.data.Dataset.range(400).map(heavy, num_parallel_calls=2))
    _, fill, times = page._read(data)
    part = seen([], calls(loop, 4), datasets={LINE: [data] * 4}, loop=(loop, LINE))
    part.end = 5 * fill
    found = page.find_filled_again(part)
    assert bool(found) == is_found and (not found or page.FILLED.cause == only(found).disease)

def validation(share, build=lambda d: d, passes=3, batches=4, loop='fit'):
    "What is found of three validations in 10 s, that read 4 of 10 rows each."
    tests = [Event('validation', LINE, 3. * i, 10 * share / 3, rows=batches - i) for i in range(3)]
    data = build(tf.data.Dataset.range(10))
    return page.find_validation(seen([], tests, validated=[data] * passes, loop=(loop, LINE)))

def test_a_validation_that_throws_its_cache_away():
    found = only(validation(.25, lambda d: d.cache()))
    assert found.disease == 'a cache that is never full' and 'takes 25% of the time' in found.evidence
    assert '833.3 ms for 4 batches' in found.evidence and found.predicted_gain < 1.1   # reading takes no time
    from_python = lambda d: d.map(lambda x: tf.numpy_function(lambda a: a, [x], tf.int64)).cache()
    assert only(validation(.25, from_python)).predicted_gain == pytest.approx(1.25)
    for keeps in (dict(build=lambda d: d), dict(build=lambda d: d.take(4).cache()),
                  dict(build=lambda d: d.cache(), batches=9), dict(build=lambda d: d.cache(), passes=1),
                  dict(build=lambda d: d.cache(), loop='fits'),
                  dict(build=lambda d: d.map(lambda x: tf.io.decode_raw(tf.as_string(x), tf.uint8))
                       .shuffle(9))):
        assert validation(**{'share': .3} | keeps) == []
    assert validation(.19, lambda d: d.cache()) == []

def test_a_validation_that_takes_most_of_the_time():
    found = only(validation(.5))
    assert found.disease == 'validation in each epoch' and 'validation_freq' in found.remedy
    assert found.predicted_gain == pytest.approx(gain_without(.5, .2)) and validation(.39) == []
    assert validation(.5, passes=0)[0].disease == 'validation in each epoch'

@pytest.mark.parametrize('build, made, steps, waits, is_found', [
    (lambda: tf.data.Dataset.range(99).batch(3), 40, 40, 50, True),
    (lambda: tf.data.Dataset.range(99).batch(3), 32, 40, 50, True),
    (lambda: tf.data.Dataset.range(99).batch(3), 31, 40, 50, False),    # most passes give several batches
    (lambda: tf.data.Dataset.range(99).batch(3), 7, 7, 50, False),
    (lambda: tf.data.Dataset.range(99).batch(3), 40, 40, 11, False),
    (lambda: tf.data.Dataset.range(99).batch(99), 40, 40, 50, False),   # there is one batch
    (None, 40, 40, 50, False)])                                         # each is another one
def test_an_iterator_for_each_step(build, made, steps, waits, is_found):
    same = build and build()
    some = [same or tf.data.Dataset.range(99).batch(3) for _ in range(made)]
    part = seen(['input'] * (waits - 5) + ['end'] * 5 + ['graph'] * (100 - waits), calls('next', steps),
                datasets={LINE: some})
    found = page.find_new_iterators(part)
    assert bool(found) == is_found
    if not found: return
    assert f'{made} times for {steps} batches' in found[0].evidence and found[0].place == 'watched.py:3'
    assert 1.7 < found[0].predicted_gain < 2.1   # a later batch is there at once
    part.loop = ('call', LINE)
    assert page.find_new_iterators(part) == []

def test_a_new_iterator_over_python_is_not_read_again(monkeypatch):
    monkeypatch.setattr(page, 'python_operations', lambda dataset: ('a',))
    monkeypatch.setattr(page, '_read', None)
    rows = [tf.data.Dataset.range(9)] * 9
    part = seen(['input'] * 50 + ['graph'] * 50, calls('next', 9), datasets={LINE: rows})
    assert only(page.find_new_iterators(part)).predicted_gain == pytest.approx(1 / .6)
