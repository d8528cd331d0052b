"Traces: what costs most, recording on demand, and a real TensorBoard."
import json
import socket
from importlib.util import find_spec
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from xtts_nb import traces
from xtts_nb.config import UserError
from xtts_nb.traces import TensorBoard, TraceCallback, free_port, own_times, top_kernels, trace


@pytest.fixture(scope='module')
def recorded(tmp_path_factory):
    "The folder of a trace of ten matrix products."
    folder, a = tmp_path_factory.mktemp('traced'), tf.random.normal((200, 200))
    step = tf.function(lambda x: tf.linalg.matmul(x, x))
    step(a)
    with trace(folder):
        for _ in range(10): step(a).numpy()
    return folder


def test_own_times_leave_out_what_runs_inside():
    event = lambda kind, start, length: SimpleNamespace(metadata_id=kind, offset_ps=start, duration_ps=length)
    line = SimpleNamespace(events=[event(2, 10, 30), event(1, 0, 100), event(3, 15, 5), event(2, 50, 20), event(4, 100, 7)])
    assert own_times(line) == {1: 50, 2: 45, 3: 5, 4: 7}


def test_the_dearest_operations(recorded):
    rows = top_kernels(recorded, most=50)
    (product,) = [r for r in rows if r['name'].endswith('MatMul')]   # or another that does the same
    assert product['calls'] == 10 and product['ms'] > 0 and rows == sorted(rows, key=lambda r: -r['ms'])
    assert len(top_kernels(recorded, most=2)) == 2
    json.dumps(rows)


@pytest.mark.parametrize('name, short', [
    ('void cutlass::Kernel<int, 4>(float*)', 'void cutlass::Kernel'), ('MatMul:MatMul', 'MatMul'), ('a/b/Add_1:AddV2', 'AddV2'),
    ('loop_fusion.3', 'loop_fusion.3'), ('step#id=4#', 'step')])
def test_names_of_kernels(name, short): assert traces._kernel_name(name) == short


def test_no_trace(tmp_path):
    with pytest.raises(UserError, match='holds no trace'): top_kernels(tmp_path)


def test_one_recorder_at_a_time(tmp_path):
    with trace(tmp_path / 'a'):
        with pytest.raises(UserError, match='already'):
            with trace(tmp_path / 'b'): pass
    with trace(tmp_path / 'c'): pass   # the first one has ended


def test_no_place_for_a_trace(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(UserError, match='no trace can be kept there'):
        with trace(tmp_path / 'file'): pass


@pytest.fixture
def recorder(monkeypatch):
    "Notes when recording began and ended instead of doing it."
    notes = []
    class Noted:
        def __init__(self, folder): pass
        def __enter__(self): notes.append('begin')
        def __exit__(self, *error): notes.append('end')
    monkeypatch.setattr(traces, 'trace', Noted)
    return notes


def steps(callback, notes, n):
    for i in range(n): callback.on_train_batch_end(i); notes.append(i)


def test_recording_begins_by_itself_and_when_asked(tmp_path, recorder):
    callback = TraceCallback(tmp_path, steps=2, first=2)
    steps(callback, recorder, 5)
    assert recorder == [0, 'begin', 1, 2, 'end', 3, 4]
    recorder.clear()
    callback.ask()
    steps(callback, recorder, 4)
    assert recorder == ['begin', 0, 1, 'end', 2, 3]
    recorder.clear()
    (tmp_path / 'now').touch()
    steps(callback, recorder, 1)
    callback.on_train_end()   # in the middle of a recording
    assert recorder == ['begin', 0, 'end'] and not (tmp_path / 'now').exists() and callback.traces == 3


def test_nothing_is_recorded_unasked(tmp_path, recorder):
    steps(TraceCallback(tmp_path / 'not there', first=None), recorder, 3)
    assert recorder == [0, 1, 2] and not (tmp_path / 'not there').exists()
    with pytest.raises(UserError, match='1 or more'): TraceCallback(tmp_path, steps=0)


def test_training_goes_on_where_another_records(tmp_path, capsys):
    model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(1)])
    model.compile('sgd', 'mse')
    with trace(tmp_path / 'other'):
        mine = TraceCallback(tmp_path / 'mine', first=1)
        model.fit(tf.ones((8, 3)), tf.ones((8, 1)), batch_size=2, verbose=0, callbacks=[mine])
    assert 'already' in capsys.readouterr().err


def test_tensorboard_that_cannot_start(tmp_path, monkeypatch):
    with pytest.raises(UserError, match='no such folder'): TensorBoard(tmp_path / 'nothing')
    monkeypatch.setattr(traces, 'find_spec', lambda name: None)
    with pytest.raises(UserError, match='pip install'): TensorBoard(tmp_path)


@pytest.mark.slow
def test_a_real_tensorboard_shows_curves_and_the_trace(recorded):
    for name in ('tensorboard', 'xprof'):
        if not find_spec(name): pytest.skip(f'{name} is not installed')
    with tf.summary.create_file_writer(str(recorded)).as_default(): tf.summary.scalar('loss', 1., step=0)
    with TensorBoard(recorded) as board:
        listed = json.loads(board.get('data/plugins_listing'))
        assert listed['scalars']['enabled'] and listed['profile']['enabled']
        assert json.loads(board.get('data/plugin/scalars/tags')) == {'.': {'loss': {'displayName': '', 'description': ''}}}
        (run,) = json.loads(board.get('data/plugin/profile/runs'))
        tools = json.loads(board.get(f'data/plugin/profile/run_tools?run={run}'))
        assert {'overview_page', 'framework_op_stats'} <= set(tools)
        (host,) = json.loads(board.get(f'data/plugin/profile/hosts?run={run}&tag=framework_op_stats'))
        assert b'MatMul' in board.get(f'data/plugin/profile/data?run={run}&tag=framework_op_stats&host={host["hostname"]}')
        process = board.process
    assert process.poll() is not None and board.process is None


def test_tensorboard_on_a_port_that_is_taken(tmp_path):
    if not find_spec('tensorboard'): pytest.skip('tensorboard is not installed')
    with socket.socket() as taken:
        taken.bind(('127.0.0.1', 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f'127.0.0.1:{port}: cannot be listened at .* choose another port'):
            TensorBoard(tmp_path, port=port).start()
    assert free_port(port) == port
