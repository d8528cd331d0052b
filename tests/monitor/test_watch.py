"Watching a program: what a look says, what is counted, and that nothing stays replaced."
import os
import sys
import threading
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.monitor import watch as page
from xtts_nb.monitor.loop import TF_FUNCTION
from xtts_nb.monitor.watch import Look, Place, Watch, is_users, libraries, look_at, place_of, users_frame

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
    ([(f'{np.__path__[0]}/core/numeric.py', 'full', 1)], 'numpy'), ([], 'own')])
def test_a_look_says_what_a_line_waits_for(inside, kind):
    look = look_at(stack(*inside, USER, ('/users/me/train.py', '<module>', 7)), 3.)
    assert (look.time, look.place, look.kind) == (3., Place('/users/me/train.py', 42), kind)
    assert look.within == (inside[-1][1] if inside else '')

def test_a_callback_of_the_user_is_a_callback():
    frames = [USER, (f'{KERAS}/callbacks/callback_list.py', 'on_epoch_end', 1),
              (f'{KERAS}/backend/tensorflow/trainer.py', 'fit', 1), ('/users/me/train.py', '<module>', 50)]
    assert look_at(stack(*frames)).kind == 'callback'
    board = (f'{KERAS}/callbacks/tensorboard.py', 'TensorBoard.on_epoch_end', 1)
    assert look_at(stack(board, *frames[1:])).callback == 'TensorBoard'

def test_where_libraries_lie(tmp_path, monkeypatch):
    "Those of `pip install --target` too, beside a program in the same folder."
    (tmp_path / 'apart').mkdir()
    (tmp_path / 'apart/__init__.py').touch()
    monkeypatch.syspath_prepend(tmp_path)
    found = libraries(['/usr/lib/python3/dist-packages', str(tmp_path), '/users/me'], ('apart',))
    own = f'{os.path.dirname(os.__file__)}/'
    assert {'/usr/lib/python3/dist-packages/', f'{tmp_path}/apart/', own} <= {*found}
    assert not f'{tmp_path}/train.py'.startswith(found) and not '/users/me/train.py'.startswith(found)
    packages = [os.path.dirname(module.__file__) + os.sep for module in (tf, keras, np)]
    assert {*packages} <= {*libraries([])}

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
    assert is_users(HERE) and is_users('<ipython-input-3-abc>') and is_users('<string>')
    assert not is_users(tf.__file__) and not is_users(threading.__file__) and not is_users(page.__file__)
    assert not is_users('<frozen importlib>')
    here = sys._getframe()
    assert users_frame(here) is here and place_of(here).file == HERE and place_of(None) is None
    assert str(Place(HERE, 1)) == 'test_watch.py:1' and Place(HERE, 1).text.startswith('"Watching')

def test_calls_are_counted_with_their_lines_and_nothing_stays_replaced():
    double, before = tf.function(lambda x: 2 * x), TF_FUNCTION.__call__
    data = tf.data.Dataset.range(6).batch(2)
    with Watch(interval=.001) as watch:
        for x in data: y = double(x)
        y.numpy()
        time.sleep(.05)
    assert TF_FUNCTION.__call__ is before and not watch._patched
    calls = [e for e in watch.events if e.kind == 'call']
    assert [(e.traced, e.new) for e in calls] == [(True, True), (False, False), (False, False)]
    assert sum(e.kind == 'next' for e in watch.events) == 4   # the last one ends the dataset
    assert sum(e.kind == 'fetch' and e.place == Place(HERE,
        calls[0].place.line + 1) for e in watch.events) == 1
    assert calls[0].place.text == 'for x in data: y = double(x)' == next(iter(watch.datasets)).text
    assert {l.kind for l in watch.looks if l.place and l.place.text == 'time.sleep(.05)'} == {'own'}
    assert watch.begun < watch.looks[0].time < watch.ended

def test_rows_of_a_network_and_calls_inside_other_calls():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile('sgd', 'mse')
    with Watch() as watch:
        model(np.zeros((5, 3), 'float32'))
        model.predict_on_batch(np.zeros((4, 3), 'float32'))
        model.train_on_batch(np.zeros((1, 3), 'float32'), np.zeros((1, 2), 'float32'))
    networks = [(e.kind, e.rows, e.name) for e in watch.events if e.rows]
    assert networks == [('layer', 5, '__call__'), ('predict', 4, 'predict_on_batch'),
                        ('train_on_batch', 1, 'train_on_batch')]
    assert not [e for e in watch.events if e.kind == 'call']   # they are inside

def test_what_is_made():
    with Watch() as watch:
        tf.Variable(1.).assign(2.)
        keras.optimizers.SGD()
        keras.Sequential()
    assert [e.kind for e in watch.events if e.kind in page.PASSED][0] == 'variable'
    kinds = [e.kind for e in watch.events]
    assert kinds.count('model') == 1 and kinds.count('optimizer') == 1 and kinds.count('variable') >= 1

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
        step(tf.zeros(3))
    (function, (x,)), *_ = watch.eager_functions()
    assert function is step and x.shape == (3,) and not watch._wanted

def test_a_function_is_kept_though_the_next_call_comes_from_the_loop(monkeypatch):
    "As where only what applies the gradients runs operation by operation: `next` follows it."
    made = tf.function(lambda x: 2. * x)
    def step(x):
        x = made(x)
        for _ in range(50): x = x + 1.
    data = iter(tf.data.Dataset.from_tensors(tf.zeros(3)).repeat())
    with Watch(interval=.001) as watch:
        watch._wanted = 2
        x = next(data)
        assert not watch.kept and watch._wanted == 1   # no function of the user takes a tensor there
        step(x)
    assert [function for function, _ in watch.eager_functions()] == [step]
    with Watch(interval=1.) as watch:
        watch._wanted = 2
        for _ in range(3): next(data)
    assert not watch.kept and watch._wanted == 0

def test_the_line_of_other_threads_is_one_of_the_given_time():
    watch = Watch()
    watch.beside = [Look(1., Place('a.py', 1), 'own', '')]
    assert watch.pipeline_place(1., 2.) == watch.pipeline_place(0., 1.) == Place('a.py', 1)
    assert watch.pipeline_place(1.1, 2.) is None

def test_no_function_is_wanted_where_nothing_runs_operation_by_operation():
    with Watch(interval=.001) as watch: time.sleep(.1)
    assert len(watch.looks) > 20 and not watch._wanted

def test_another_thread_is_not_counted():
    with Watch() as watch:
        other = threading.Thread(target=lambda: tf.zeros(1).numpy())
        other.start()
        other.join()
    assert not watch.events

def test_a_function_that_this_version_lacks_is_left_out(monkeypatch):
    monkeypatch.setitem(page.COUNTED, 'next', (('no.such.module:Thing', 'x'), ('tensorflow:Module',
    'nothing')))
    with Watch() as watch: tf.zeros(1).numpy()
    assert [e.kind for e in watch.events] == ['fetch']


# --- the end of a pass --------------------------------------------------------------------------------------

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
    assert look_at(stack((page.__file__, '_end_pass', 9), (HERE, 'f', 3))).kind == 'end'


def test_runs_of_a_session_and_the_operations_of_its_graph():
    "As programs of the first TensorFlow train."
    with tf.Graph().as_default(), tf.compat.v1.Session() as session, Watch() as watch:
        x = tf.constant(1.)
        for i in range(4):
            session.run(x)
            if i > 1: x = x + 1.
    runs = [e for e in watch.events if e.kind == 'session']
    assert [e.rows - runs[0].rows for e in runs] == [0, 0, 0, 2] and runs[0].place.text == 'session.run(x)'
    code = tf.compat.v1.Session.run.__code__
    assert page._about(code).kind == 'graph'

def test_arguments_that_are_the_same_tensor_in_each_call():
    f, a, plain = tf.function(lambda x, y, z: x + y), tf.constant(1.), np.ones(1, 'float32')
    with Watch() as watch:
        for _ in range(5): f(a, tf.constant(2.), plain)   # an array may have been written into
    assert [*watch.same.values()] == [{0: 4}]

def test_letting_go_of_an_iterator_is_the_end_of_a_pass():
    "A look that comes then knows it, and takes it for no operation."
    assert look_at(stack((page.__file__, '_keep_call', 1), (page.__file__, 'around', 1), USER)).kind == 'end'
    keras = f'{KERAS}/trainers/epoch_iterator.py', f'{KERAS}/backend/tensorflow/trainer.py'
    assert look_at(stack((keras[0], 'reset', 1), (keras[1], 'evaluate', 1), USER)).kind == 'end'
    assert look_at(stack((keras[0], 'enumerate_epoch', 1), (keras[1], 'fit', 1), USER)).kind == 'eager'

def test_the_owner_of_a_function():
    class Owner:
        def plain(self, x): return x
        method = tf.function(plain)
    owner = Owner()
    bound = owner.method
    assert page._owner(bound) is owner is page._owner(tf.function(owner.plain))
    assert page._owner(tf.function(lambda x: x)) is None

def test_an_iterator_that_a_function_gets_is_not_kept_beyond_its_next_call():
    take, plain = tf.function(lambda batches: next(batches)), tf.function(lambda x: x)
    with Watch() as watch:
        batches = iter(tf.data.Dataset.range(9))
        for i in range(5):
            take(batches)
            plain(tf.constant(i))
    (kept,) = watch.early.values()
    assert int(kept[0][0]) == 2
    assert page.reads_iterator((1, [batches]), {}) and page.reads_iterator((), {'x': batches})
    assert not page.reads_iterator((1, tf.constant(2)), {})
