"What other tools say of the programs of the ward: their traces, their sentences, and how these are counted."
import json
import subprocess
import sys

import pytest

from benchmarks.diagnosis.ward import others
from benchmarks.diagnosis.ward.cases import Case

SLOW = Case('a', 'A', 'one', '', kind='retracing', named=('retrac',), led=('signature',))
HEALTHY = Case('b', 'B', 'one', '', why_healthy='fast', looks_like='slow')
BOUND = 'Your program is HIGHLY input-bound because 29.6% of the total step time is waiting for input.'
RETRACED = 'WARNING:tensorflow:5 out of the last 5 calls to <function f> triggered tf.function retracing.'

def test_warnings_about_speed_are_taken_from_stderr():
    right = [RETRACED, 'W0000 00:00:1795.344632   26456 cache.cc:9] the cache will be discarded',
             'file.py:3: UserWarning: the dataset was too small']
    wrong = ['I0000 00:00:1795.344112   26456 port.cc:153] slow', 'WARNING:tensorflow:a shape is unknown']
    assert others.warnings_of('\n'.join([*wrong, *right, RETRACED])) == right

@pytest.mark.parametrize('sentence, bound', [
    (BOUND, True), ('Your program is POTENTIALLY input-bound because 4.4% of it', True),
    ('Your program is NOT input-bound because only 0.1% of it', False),
    ('No step time measured. Therefore we cannot tell where the performance bottleneck is.', False)])
def test_which_sentences_name_a_bottleneck(sentence, bound):
    assert others.is_about_something(sentence) is bound

def test_what_is_said_is_judged_by_the_case_and_counted():
    rows = [others.judged(case, said, warned) | {'seconds': seconds} for case, said, warned, seconds in (
        (SLOW, [BOUND], [RETRACED], 3.), (SLOW, [], [], 9.), (HEALTHY, [BOUND], [], 2.))]
    assert [(r['xprof_named'], r['warnings_named'], r['kind']) for r in rows] == [
        (False, True, 'retracing'), (False, False, 'retracing'), (False, False, 'healthy')]
    facts = {'slow': 2, 'healthy': 1, 'longest_s': 9.}
    half = f'{SLOW.half} half'
    assert others.totals(rows) == [
        {'name': f'XProf, {half}', 'named': 0, 'said': 1, 'alarms': 1} | facts,
        {'name': f'warnings of TensorFlow and Keras, {half}', 'named': 1, 'said': 1, 'alarms': 0} | facts]

PROGRAM = """
import json, time
import keras, numpy as np, tensorflow as tf
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile('sgd', 'mse')
start = time.perf_counter()
model.fit(np.zeros((64, 4)), np.zeros(64), batch_size=8, verbose=0)
for batch in tf.data.Dataset.range(5): batch + 1
print(json.dumps({'items': 8, 'seconds': time.perf_counter() - start}))
"""

@pytest.mark.slow
def test_a_program_is_traced_with_its_steps(tmp_path):
    "Those of `fit` and of a loop over a dataset; the trace ends with the program, if not before."
    script = tmp_path / 'program.py'
    script.write_text(PROGRAM)
    done = subprocess.run([sys.executable, others.__file__, '--trace', script, tmp_path / 'trace', '60'],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])['items'] == 8
    (trace,) = (tmp_path / 'trace').rglob('*.xplane.pb')
    marks = trace.read_bytes()
    assert b'step_num' in marks and b'train' in marks
