"Pipelines that are read again, and lines that read files; the rules: `golden.json`."
from types import SimpleNamespace

import pytest
import tensorflow as tf

from watched import calls, LINE, only, seen
from xtts_nb.monitor import input_rules as page
from xtts_nb.monitor.input_rules import find_python_input
from xtts_nb.monitor.loop import tf_sleep
from xtts_nb.monitor.watch import _Place, _PythonCall

@pytest.mark.parametrize('line, cause', [
    ('x = np.load(path)', 'many small files read in Python'),
    ('x = imread(path)', 'many small files read in Python'),
    ("f = gzip.open(path, 'rb')", 'compressed files read in Python'),
    ('x = loads(text)', 'Python makes the batches'),
    ("x = np.load('all.npz')['x']", 'compressed files read in Python')])
def test_a_line_of_the_pipeline_that_reads_files(tmp_path, line, cause):
    (path := tmp_path / 'train.py').write_text(f'{line}\n')
    python = [_PythonCall(i * .1, i * .1 + .08, LINE, 'load') for i in range(100)]
    part = seen(['input'] * 60 + ['graph'] * 40, python=python)
    part.watch.pipeline_place = lambda *_: _Place(str(path), 1)
    found = only(find_python_input(part))
    assert found.disease == cause and found.line == line and found.place == 'train.py:1'
    if 'read' in cause: assert found.predicted_gain == pytest.approx(1 / (1 - .6 * .95))
    assert ('uncompressed' in found.remedy) == cause.startswith('compressed')

def test_a_step_alone_is_timed_and_what_python_does_beside_it_stays():
    step = tf.function(lambda x: x + 1)
    events, last = calls('call', 100), {('call', LINE): (step, '__call__', (tf.zeros(3),), {})}
    part = seen(['input'] * 40 + ['graph'] * 50 + ['own'] * 10, events, last=last)
    assert page._alone_seconds(part, 1.) == pytest.approx(.1, abs=.02)   # the graph takes far less than 0.5 s
    assert page._alone_seconds(part, 1e-6) == pytest.approx(.6e-6)       # never longer than in the loop
    assert page._alone_seconds(seen(['input'] * 40 + ['graph'] * 60), 1.) == pytest.approx(.6)

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
    (lambda f: tf.data.TFRecordDataset(f, ''), False), (lambda f: tf.data.TextLineDataset(f, 'ZLIB'), True),
    (lambda f: f.interleave(lambda n: tf.data.TFRecordDataset(n, compression_type='GZIP')), True),
    (lambda f: f.interleave(lambda n: tf.data.TFRecordDataset(n)), False),
    (lambda f: f.map(lambda x: tf.io.decode_compressed(x, 'ZLIB')), True)])
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
    some = lambda d: page.stages(d.map(lambda x: x).batch(2))
    again = lambda d, passes: page._again(seen([], calls('next', 30)), some(d), passes)
    assert [again(data.repeat(), 1), again(data, 2), again(data, 1)] == [True, True, False]
    assert [again(tf.data.Dataset.range(n).repeat(), 1) for n in (59, 60)] == [True, False]

def heavy(i): return tf_sleep(2000, tf.cast(i, tf.float32))   # as long on busy cores

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

@pytest.mark.parametrize('build, passes, fill, is_found', [
    (lambda d: d.shuffle(5), 5, .58, True), (lambda d: d.shuffle(5), 2, 2.5, False),
    (lambda d: d.shuffle(5), 400, .08, False), (lambda d: d.shuffle(5), 400, .081, True),
    (lambda d: d.cache().shuffle(5), 5, .58, False), (lambda d: d.shuffle(5).cache(), 5, .58, True)])
def test_a_shuffle_that_is_filled_again(monkeypatch, build, passes, fill, is_found):
    "In 10 s, with batches of 10 ms; or another stage takes the time."
    some = page.stages(build(tf.data.Dataset.range(9)))
    for share, expected in ((.4, is_found), (.39, False)):
        monkeypatch.setattr(page, '_first_seconds', lambda dataset, share=share: share * fill)
        assert bool(page._filled(seen([]), some, passes, fill, [.01, .01, .5])) == expected

@pytest.mark.parametrize('build, loop, is_found', [
    (lambda d: d.shuffle(300).batch(2), 'fits', True), (lambda d: d.shuffle(300).batch(2), 'fit', False),
    (lambda d: d.batch(2), 'fits', False)])
def test_fit_in_a_loop_fills_its_shuffle_buffer_again(build, loop, is_found):
    data = build(tf.data.Dataset.range(400).map(heavy, num_parallel_calls=2))
    _, fill, times = page._read(data)
    part = seen([], calls(loop, 4), datasets={LINE: [data] * 4}, loop=(loop, LINE))
    part.end = 5 * fill
    found = page.find_filled_again(part)
    assert bool(found) == is_found and (not found or page._FILLED.cause == only(found).disease)
