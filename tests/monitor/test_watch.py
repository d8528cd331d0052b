"Watching a program: what a look says, what is counted, that nothing stays replaced; the steady part."
import os
import sys
import threading
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from watched import calls, LINE, OTHER, passes, seen, watched
from xtts_nb.monitor import seen as trials, watch as page
from xtts_nb.monitor.loop import TF_FUNCTION
from xtts_nb.monitor.leave_out import _variables_put_back
from xtts_nb.monitor.seen import steady_part, waiting
from xtts_nb.monitor.watch import _Place, Watch, _is_users, libraries, look_at, _place_of, _users_frame

HERE = __file__

def stack(*frames):
    "Frames from the innermost outwards, as (file, function, line)."
    outer = None
    for file, name, line in reversed(frames):
        code = SimpleNamespace(co_filename=file, co_name=name, co_qualname=name)
        outer = SimpleNamespace(f_code=code, f_lineno=line, f_back=outer)
    return outer

TF, KERAS = (f'{os.path.dirname(m.__file__)}/{part}' for m, part in ((tf, 'python'), (keras, 'src')))
USER = ('/users/me/train.py', 'main', 42)

CALLBACKS = f'{KERAS}/callbacks/callback_list.py', 'on_epoch_end', 1

@pytest.mark.parametrize('inside, kind', [
    ([(f'{TF}/data/ops/iterator_ops.py', '__next__', 1)], 'input'),
    ([(f'{TF}/framework/ops.py', 'numpy', 1)], 'fetch'),
    ([(f'{TF}/ops/math_ops.py', 'add', 1)], 'eager'),
    ([(f'{TF}/ops/math_ops.py', 'add', 1),
      (f'{TF}/eager/polymorphic_function/tracing_compilation.py', 'trace_function', 1)], 'trace'),
    ([(f'{TF}/eager/execute.py', 'quick_execute', 1),
      (f'{TF}/eager/polymorphic_function/polymorphic_function.py', '__call__', 1)], 'graph'),
    ([(f'{KERAS}/saving/saving_api.py', 'save_model', 1)], 'save'),
    ([(f'{TF}/ops/summary_ops_v2.py', 'scalar', 1)], 'summary'),
    ([(page.__file__, '_end_pass', 9)], 'end'),
    ([(f'{np.__path__[0]}/core/numeric.py', 'full', 1)], 'numpy'), ([], 'own')])
def test_a_look_says_what_a_line_waits_for(inside, kind):
    look = look_at(stack(*inside, USER, ('/users/me/train.py', '<module>', 7)), 3.)
    assert (look.time, look.place, look.kind) == (3., _Place('/users/me/train.py', 42), kind)
    assert look.within == (inside[-1][1] if inside else '')

def test_a_callback_of_the_user_is_a_callback():
    fit = CALLBACKS, (f'{KERAS}/backend/tensorflow/trainer.py', 'fit', 1), USER
    assert look_at(stack(USER, *fit)).kind == 'callback'
    board = f'{KERAS}/callbacks/tensorboard.py', 'TensorBoard.on_epoch_end', 1
    assert look_at(stack(board, *fit)).callback == 'TensorBoard'

def test_what_pip_installed_beside_a_program(tmp_path):
    "By the lists that pip leaves, as of `pip install --target`; scripts lie outside of the folder."
    for name, files in {'six-1.0': ['six.py', 'six-1.0.dist-info/RECORD'],
                        'tree-2': ['tree/a/b.py', 'tree/__init__.py', '../bin/tree', 'data.txt']}.items():
        (tmp_path / f'{name}.dist-info').mkdir()
        rows = ''.join(f'{file},sha256=x,9\n' for file in files)
        (tmp_path / f'{name}.dist-info/RECORD').write_text(rows)
    found = libraries([str(tmp_path)], ())
    assert {f'{tmp_path}/six.py', f'{tmp_path}/tree/'} <= {*found}
    assert f'{tmp_path}/tree/a/b.py'.startswith(found) and f'{tmp_path}/six.py'.startswith(found)
    assert not any(f'{tmp_path}/{name}'.startswith(found) for name in ('train.py', 'bin/x', 'trees/a.py'))
    assert not f'{tmp_path.parent}/bin/tree'.startswith(found)

def test_whose_file_it_is():
    mine, others = (HERE, '<ipython-input-3-abc>'), (threading.__file__, page.__file__, '<frozen x>')
    assert all(map(_is_users, mine)) and not any(map(_is_users, others))
    here = sys._getframe()
    assert _users_frame(here) is here and _place_of(here).file == HERE and _place_of(None) is None

def test_calls_are_counted_with_their_lines_and_nothing_stays_replaced():
    double, before = tf.function(lambda x: 2 * x), TF_FUNCTION.__call__
    data = tf.data.Dataset.range(6).batch(2)
    with Watch(interval=.001) as watch:
        assert not watch.missing   # with these versions of TensorFlow and Keras
        for x in data: y = double(x)
        y.numpy()
        time.sleep(.05)
    assert TF_FUNCTION.__call__ is before and not watch._patched
    calls = [e for e in watch.events if e.kind == 'call']
    assert [(e.traced, e.new) for e in calls] == [(True, True), (False, False), (False, False)]
    assert sum(e.kind == 'next' for e in watch.events) == 4   # the last one ends the dataset
    assert sum(e.kind == 'fetch' and e.place == _Place(HERE,
        calls[0].place.line + 1) for e in watch.events) == 1
    assert calls[0].place.text == 'for x in data: y = double(x)' == next(iter(watch.datasets)).text
    assert {l.kind for l in watch.looks if l.place and l.place.text == 'time.sleep(.05)'} == {'own'}
    assert watch.begun < watch.looks[0].time < watch.ended

def test_watches_that_overlap():
    double, before = tf.function(lambda x: 2 * x), TF_FUNCTION.__call__
    first, second = Watch().__enter__(), Watch().__enter__()
    first.__exit__()
    double(1)
    second.__exit__()
    assert not first.events and [e.kind for e in second.events] == ['call'] and TF_FUNCTION.__call__ is before

def test_rows_of_a_network_and_calls_inside_other_calls():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile('sgd', 'mse')
    with Watch() as watch:
        model(np.zeros((5, 3), 'float32'))
        model.predict_on_batch(np.zeros((4, 3), 'float32'))
        model.train_on_batch(np.zeros((1, 3), 'float32'), np.zeros((1, 2), 'float32'))
    networks = [(e.kind, e.rows, e.name) for e in watch.events if e.rows and e.kind != 'fetch']
    assert networks == [('layer', 5, '__call__'), ('predict', 4, 'predict_on_batch'),
                        ('train_on_batch', 1, 'train_on_batch')]
    assert not [e for e in watch.events if e.kind == 'call']   # they are inside

def test_the_shapes_of_calls_and_the_device_of_variables():
    double = tf.function(lambda x, n=1: 2 * x, jit_compile=True)
    with Watch() as watch:
        for n in (2, 3, 3): double(tf.zeros(n), n=n)
        with tf.device('/CPU:0'): tf.Variable(tf.zeros((2, 3)))
        tf.Variable(tf.zeros(4))
    (seen,) = watch.shapes.values()
    assert seen == {((2,),), ((3,),)}
    made = [(e.rows, 'CPU' in e.device) for e in watch.events if e.kind == 'variable']
    assert made == [(6, True), (4, False)]

def test_python_of_a_pipeline():
    def slow(i):
        time.sleep(.02)
        return i
    data = tf.data.Dataset.range(4).map(lambda i: tf.numpy_function(slow, [i], tf.int64))
    with Watch(interval=.001) as watch: list(data)
    assert len(watch.python) == 4 and all(p.end - p.start >= .02 for p in watch.python)
    assert watch.pipeline_place(watch.begun, watch.ended).text == 'time.sleep(.02)'

def test_functions_that_ran_operation_by_operation():
    "Their arguments are kept in their own thread, when they next ask for a gradient or call a layer."
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            for _ in range(50): x = x + 1.
        return tape.gradient(x, x)
    with Watch(interval=.001) as watch:
        until = time.time() + .5
        while time.time() < until: step(tf.zeros(3))
        watch._stop.set()   # a look may have asked just now
        time.sleep(.1)
        for _ in range(3): step(tf.zeros(3))   # it is kept when it is called again
    (function, (x,)), *_ = watch.eager_functions()
    assert function is step and x.shape == (3,)

def test_an_iterator_is_let_go_when_the_next_pass_begins():
    data = tf.data.Dataset.range(3)
    with Watch() as watch:
        for _ in data: pass
        assert watch._pass[0].text == 'for _ in data: pass' and watch._pass[1] is not None
        for _ in data.batch(2): pass
        other = threading.Thread(target=lambda: list(data))
        other.start(), other.join()
        it = iter(data)
        next(it)
        for _ in data: next(it, None)   # one that goes on is left to its program
        assert [e.place.text for e in watch.events if e.kind == 'end'] == [
            'for _ in data: pass', 'for _ in data.batch(2): pass', 'it = iter(data)']
    assert all(0 <= e.seconds < 5 for e in watch.events) and watch._pass is None

def test_an_iterator_that_a_function_gets_is_not_kept_beyond_its_next_call():
    take, plain = tf.function(lambda batches: next(batches)), tf.function(lambda x: x)
    with Watch() as watch:
        batches = iter(tf.data.Dataset.range(9))
        for i in range(5):
            take(batches)
            plain(tf.constant(i))
    (kept,) = watch.early.values()
    assert int(kept[0][0]) == 2
    assert page._reads_iterator((1, [batches]), {}) and page._reads_iterator((), {'x': batches})
    assert not page._reads_iterator((1, tf.constant(2)), {})

# --- the steady part of it ---------------------------------------------------------------------------------

def test_the_main_loop_begins_with_its_third_call():
    events = calls('next', 20, .5) + calls('call', 60, .15, place=OTHER) + calls('predict', 2)
    part = steady_part(watched(['graph'] * 1000, sorted(events, key=lambda e: e.start)))
    assert part.loop == ('call', OTHER) and part.begin == pytest.approx(.3)   # nearly as long, and more often
    assert part.end == pytest.approx(59 * .15 + .01) and len(part.steps) == 58
    assert len(part.looks) == 857
    nothing = steady_part(watched(['own'] * 10))
    assert nothing.loop == () and (nothing.begin, nothing.end) == (0., 10.)
    fits = steady_part(watched([], calls('fits', 6, 1.) + calls('fit', 50)))
    assert fits.loop == ('fits', LINE) and fits.begin == 2.
    few = calls('fits', 6, .01) + calls('call', 60, .15, place=OTHER)
    assert steady_part(watched([], few)).loop == ('call', OTHER)
    two = SimpleNamespace(wait_share=.25), SimpleNamespace(wait_share=.75)
    windows = [(2., 4.05, two[0]), (1., 2., two[1])]
    within = steady_part(watched([], calls('fit', 50), windows=windows, fits=two))
    assert (*within.loop, within.begin, within.end, len(within.steps)) == ('fit', LINE, 2., 4.05, 21)
    assert waiting(within) == .25   # of the fit whose steps these are

def test_variables_are_put_back():
    "One of a graph, as programs of the first TensorFlow have it, has no value outside: it is left alone."
    with tf.Graph().as_default(): inside = tf.compat.v1.get_variable('inside', initializer=[1., 2.])
    v = tf.Variable([1., 2.])
    with _variables_put_back() as possible: v.assign([5., 5.])
    assert possible and v.numpy().tolist() == [1., 2.] and inside.graph is not None
    with _variables_put_back(most=0.) as possible: v.assign([5., 5.])
    assert not possible and v.numpy().tolist() == [5., 5.]

def test_what_may_be_called_again():
    "Not a step that reads an iterator, which would be at its end. Nothing of the program is changed by it."
    total = tf.Variable(0.)
    @tf.function
    def step(x, *more):
        total.assign_add(1.)
        return x
    part = lambda *given: seen(['graph'] * 9, calls('call', 9), last={('call', LINE): (step, '', given, {})})
    assert trials._compiled_call(part(tf.zeros(3))).function is step
    assert trials._compiled_call(part(tf.zeros(3), iter(tf.data.Dataset.range(3)))) is None
    assert 0 < trials.again(part(tf.zeros(3)), LINE) < .1 and float(total) == 0
    assert trials.again(part(tf.zeros(3)), OTHER) is None
    broken = seen(last={('predict', LINE): (SimpleNamespace(predict=lambda x: 1 / 0), 'predict', (1,), {})})
    assert trials.again(broken, LINE) is None

def test_a_step_is_judged_by_a_whole_batch():
    "The last call may have got the rest of an epoch; where sizes are alike, the last one counts."
    step = tf.function(lambda x: x)
    def rows(early, last):
        given = lambda n, mark: ((tf.fill((n, 2), mark),), {})
        part = seen(['graph'] * 9, calls('call', 9), last={('call', LINE): (step, '', *given(last, 2.))},
                    early={('call', LINE): given(early, 1.)})
        x = trials._compiled_call(part).args[0]
        return x.shape[0], float(x[0, 0])
    assert rows(32, 10) == (32, 1.) and rows(32, 32) == (32, 2.) and rows(10, 32) == (32, 2.)
    part = seen(['graph'] * 9, calls('call', 9), last={('call', LINE): (step, '', (np.ones((4, 2)),), {})})
    assert tf.is_tensor(trials._compiled_call(part).args[0])   # so that a trial can repeat its rows

def test_datasets_that_take_turns_are_not_new():
    a, b = (tf.data.Dataset.range(n).cache() for n in (2, 3))
    both, fresh = passes([a, b] * 5), passes([tf.data.Dataset.range(2).cache() for _ in range(5)])
    assert (both.sources, both.caches, fresh.sources, fresh.caches) == (2, 2, 5, 5)
