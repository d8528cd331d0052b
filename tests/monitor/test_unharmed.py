"A program that is watched prints, saves, seeds and exits as one that is not."
import gc
import signal
import threading
import time
import weakref
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.config import UserError
from xtts_nb.monitor import leave_out
from xtts_nb.monitor.leave_out import _times_that_fit
from xtts_nb.monitor.program import Diagnose, explain, watch_script
from xtts_nb.monitor.seen import steady_part
from xtts_nb.monitor.watch import Watch

STEPS = 'import tensorflow as tf\nf, x = tf.function(lambda x: x + 1), tf.zeros(9)\n'

def run(tmp_path, code: str, seconds: float = .4) -> Watch:
    (tmp_path / 'train.py').write_text(code)
    return watch_script(tmp_path / 'train.py', seconds=seconds)

def test_its_end_comes_once_and_what_it_saves_then_is_whole(tmp_path):
    watch = run(tmp_path, STEPS + f'import time\ntry:\n    while True: x = f(x)\nfinally:\n'
                f'    with open({str(tmp_path / "saved")!r}, "w") as out:\n'
                '        for _ in range(16):\n            out.write("whole"); time.sleep(.1)\n')
    assert (tmp_path / 'saved').read_text() == 16 * 'whole' and watch.over and steady_part(watch).steps

def test_an_end_that_native_code_loses_comes_again(tmp_path):
    lost = (STEPS + 'n = 0\nwhile n < 2:\n    try:\n        while True: x = f(x)\n'
            '    except BaseException: n += 1\n')
    assert steady_part(run(tmp_path, lost)).seconds > 1.   # after a second more

def test_its_own_alarm_stays(tmp_path):
    alarm = ('import signal\nrung = []\nsignal.signal(signal.SIGALRM, lambda *_: rung.append(1))\n'
             'signal.setitimer(signal.ITIMER_REAL, .1)\ntry:\n    while True: x = f(x)\n'
             'finally: assert rung == [1], rung\n')
    assert run(tmp_path, STEPS + alarm).over
    signal.signal(signal.SIGALRM, signal.SIG_DFL)

@pytest.mark.parametrize('code, exit_code', [
    ('sys.exit()', 0), ('sys.exit(3)', 3), ('sys.exit("no rows")', 1), ('sys.exit(["no rows"])', 1)])
def test_it_exits_as_it_would(tmp_path, capfd, code, exit_code):
    trained = STEPS + f'import sys\nfor _ in range(9): x = f(x)\n{code}\n'
    assert run(tmp_path, trained, 60.).exit_code == exit_code
    assert ('no rows' in capfd.readouterr().err) == ('rows' in code)
    if not exit_code: return
    with pytest.raises(UserError, match='before it trained'): run(tmp_path, f'import sys\n{code}\n')

def test_it_may_choose_its_backend_only_alone(tmp_path):
    with pytest.raises(UserError, match='KERAS_BACKEND=jax: only'):
        run(tmp_path, 'import os\nos.environ["KERAS_BACKEND"] = "jax"\nraise ValueError')

def test_it_finds_its_files_and_passes_any_argument(tmp_path, monkeypatch):
    "Through a link, by a relative path and after a change of the folder."
    (tmp_path / 'real').mkdir()
    (tmp_path / 'real' / 'rate.py').write_text('RATE = 2.')
    (tmp_path / 'real' / 'train.py').write_text(
        f'{STEPS}import os, rate\nos.chdir("/")\nprint(open(__file__).read()[:6])\ndef step(x, names):\n'
        '    with tf.GradientTape() as tape: return tf.nn.relu(x) * rate.RATE\n'
        'for _ in range(99): step(x, {1: "a", "b": 2})\n')
    (tmp_path / 'train.py').symlink_to(tmp_path / 'real' / 'train.py')
    monkeypatch.chdir(tmp_path)
    assert not watch_script('train.py').exit_code

class Unfreeze(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 8: self.model.make_train_function(force=True)

def test_a_step_that_a_callback_makes_again_stays():
    model, mine = keras.Sequential([keras.layers.Dense(1)]), Diagnose(steps=10, warm=2, report=None)
    model.compile('sgd', 'mse')
    model.fit(np.ones((40, 2)), np.ones(40), 8, 12, verbose=0, callbacks=[mine, Unfreeze()])
    assert mine.phases and model.train_function not in (mine.phases, mine.phases.whole)

def test_fit_takes_what_it_takes(tmp_path, capsys):
    run(tmp_path, 'import keras\nimport numpy as np\nmodel = keras.Sequential([keras.layers.Dense(1)])\n'
        'model.compile("sgd", "mse")\nx, of = np.ones((8, 2), "float32"), keras.callbacks\n'
        'for given in ([of.TerminateOnNaN()], None, of.History(), of.CallbackList([], True, model=model)):\n'
        '    model.fit(x, x[:, :1], 4, 2, 0, given)\nprint("TRAINED")\n', 60.)
    assert 'TRAINED' in capsys.readouterr().out

def test_a_layer_may_get_rows_of_unknown_rank():
    layer = keras.layers.Normalization(mean=0., variance=1.)
    layer.build((None, 2))
    def load(i): return layer(tf.numpy_function(lambda i: np.full(2, i, 'float32'), [i], tf.float32))
    with Watch(): assert len([*tf.data.Dataset.range(3).map(load)]) == 3

def test_what_it_lets_go_is_let_go():
    with Watch() as watch:
        for _ in range(3):
            data = tf.data.Dataset.from_tensors(np.ones(9))
            for _ in range(2): assert len([*data]) == 1
            known, data = weakref.ref(data), None
    (passes,) = watch.datasets.values()
    assert (passes.total, passes.alike, passes.sources) == (6, 2, 3) and passes.last is known()
    del passes, watch
    gc.collect()
    assert known() is None

def test_a_model_that_is_built_is_no_training():
    with Watch(interval=.001) as watch:
        x = keras.Input((2,))
        for _ in range(12): x = keras.layers.Dense(2)(x)
        time.sleep(.6)
    (note,) = explain(watch)[1]
    assert not steady_part(watch).loop and 'no training was seen' in note and 'test_unharmed.py' in note

def test_a_program_that_only_waits_is_ended_and_not_judged(tmp_path):
    start = time.monotonic()
    watch = run(tmp_path, 'import time\ntime.sleep(60)\n', .1)
    assert watch.over and time.monotonic() - start < 30 and 'train.py:2' in explain(watch)[1][0]

def test_a_thread_of_its_own_makes_no_batches():
    done = threading.Event()
    other = threading.Thread(target=lambda: done.wait(20), daemon=True)
    other.start()
    def row(i):
        time.sleep(.02)
        return i
    data = tf.data.Dataset.range(30).map(lambda i: tf.numpy_function(row, [i], tf.int64))
    with Watch(interval=.001) as watch: assert len([*data]) == 30
    done.set()
    lines = {look.place.text for look in watch.beside}
    assert lines and 'time.sleep(.02)' in lines and not any('done.wait' in line for line in lines)

class Interrupt(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 60: raise KeyboardInterrupt

def test_an_interrupted_fit_keeps_nothing_of_the_watch():
    model, mine = keras.Sequential([keras.layers.Dense(1)]), Diagnose(steps=10, warm=2, report=None)
    model.compile('sgd', 'mse')
    with pytest.raises(KeyboardInterrupt):
        model.fit(np.ones((400, 2)), np.ones(400), batch_size=4, verbose=0, callbacks=[mine, Interrupt()])
    assert mine.phases and model.train_function is mine.phases.whole
    mine.watch._looker.join(20)
    assert not mine.watch._patched

class Rows(keras.Model):
    "Its result is the first row of each batch."
    def train_step(self, rows): return {'row': rows[0]}

class Keep(keras.callbacks.Callback):
    def on_train_begin(self, logs=None): self.rows = []
    def on_train_batch_end(self, batch, logs=None): self.rows.append(int(logs['row']))

def test_a_fit_reads_its_rows_in_the_same_order():
    "Whatever is tried is tried when the training is over."
    def read(*more):
        keras.utils.set_random_seed(1)
        model, keep = Rows(), Keep()
        model.compile()
        data = tf.data.Dataset.range(400).shuffle(400, seed=3).map(lambda i: tf.cast(i, tf.float32)).batch(4)
        model.fit(data, epochs=2, verbose=0, callbacks=[*more, keep])
        return keep.rows
    assert read() == read(Diagnose(steps=20, seconds=2., report=None))

def test_a_trial_takes_less_than_half_of_what_the_program_takes(monkeypatch):
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=2e9))
    monkeypatch.setattr(leave_out.psutil, 'Process', lambda: process)
    assert [_times_that_fit(size, 64) for size in (0., 1e9 / 64, 1e8, 1e9, 9e9)] == [64, 64, 8, 1, 1]
