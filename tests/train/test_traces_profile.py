"Traces: the slowest operations, and a real TensorBoard."
import gzip
import io
import json
import os
import socket
import subprocess
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import tensorflow as tf
from clock import Clock

from xtts_nb.config import UserError
from xtts_nb.train import profile as page
from xtts_nb.train.profile import TensorBoard, free_port, own_times, top_kernels, trace


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
    line = SimpleNamespace(events=[event(2, 10, 30), event(1, 0, 100), event(3, 15, 5), event(2, 50, 20),
                                   event(4, 100, 7)])
    assert own_times(line) == {1: 50, 2: 45, 3: 5, 4: 7}
    together = SimpleNamespace(events=[event(2, 0, 30), event(1, 0, 100), event(3, 10, 5), event(4, 20, 5)])
    assert own_times(together) == {1: 70, 2: 20, 3: 5, 4: 5}


def test_the_slowest_operations(recorded):
    rows = top_kernels(recorded, at_most=50)
    (product,) = [r for r in rows if r['name'].endswith('MatMul')]   # or another that does the same
    assert product['calls'] == 10 and product['ms'] > 0 and rows == sorted(rows, key=lambda r: -r['ms'])
    assert len(top_kernels(recorded, at_most=2)) == 2
    json.dumps(rows)


def plane(name, kinds, **lines):
    "Lines of (kind, start, length) events, in ps."
    event = lambda kind, start, length: SimpleNamespace(metadata_id=kind, offset_ps=start, duration_ps=length)
    return SimpleNamespace(
        name=name, event_metadata={i: SimpleNamespace(name=kind) for i, kind in enumerate(kinds)},
        lines=[SimpleNamespace(name=line.replace('_', ' '), events=[event(*e) for e in some])
               for line, some in lines.items()])

HOST = plane('/host:CPU', ['MatMul:MatMul', 'ThreadpoolListener::Record', 'x:AddV2', ''], python=[
    (1, 0, 10**9), (0, 0, 4 * 10**8), (2, 5 * 10**8, 10**8), (3, 7 * 10**8, 10**8)],
    other=[(0, 0, 123_456_789)])
CARD = plane('/device:GPU:1', ['gemm<4>(int)', 'function_copy', ''],
             Stream_7=[(0, 0, 3 * 10**9), (1, 3 * 10**9, 10**9)],
             Stream_8=[(0, 0, 2 * 10**9)], Steps=[(1, 0, 10**12)])

@pytest.mark.parametrize('planes, at_most, rows', [
    ([plane('/host:metadata', ['x'], a=[(0, 0, 10**9)]), HOST], 9,
     [('host:CPU', 'MatMul', .5235, .8396, 2), ('host:CPU', 'AddV2', .1, .1604, 1)]),
    ([HOST, CARD], 9, [('GPU:1', 'gemm', 5., .8333, 2), ('GPU:1', 'function_copy', 1., .1667, 1)]),
    ([HOST, CARD], 1, [('GPU:1', 'gemm', 5., .8333, 2)]),
    ([plane('/host:CPU', ['Threadpool'], a=[(0, 0, 9)])], 9, [])])
def test_kernels_of_the_gpu_or_operations_of_the_host(monkeypatch, planes, at_most, rows):
    "Added up over lines; who only calls others is left out on the host, and on a GPU all that is no stream."
    monkeypatch.setattr(page, '_planes', lambda folder: planes)
    found = top_kernels('folder', at_most)
    assert [tuple(row[k] for k in ('device', 'name', 'ms', 'share', 'calls')) for row in found] == rows


@pytest.mark.parametrize('name, short', [
    ('void cutlass::Kernel<int, 4>(float*)', 'void cutlass::Kernel'), ('MatMul:MatMul', 'MatMul'),
    ('a/b/Add_1:AddV2', 'AddV2'),
    ('loop_fusion.3', 'loop_fusion.3'), ('step#id=4#', 'step')])
def test_names_of_kernels(name, short): assert page._kernel_name(name) == short


def test_no_trace(tmp_path):
    with pytest.raises(UserError, match='holds no trace'): top_kernels(tmp_path)


def test_the_newest_trace_is_read(tmp_path):
    from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace
    for i, name in enumerate('bca'):
        file = tmp_path / name / 'host.xplane.pb'
        file.parent.mkdir()
        space = XSpace()
        space.planes.add(name=name)
        file.write_bytes(space.SerializeToString())
        os.utime(file.parent, (i, i))
    assert [plane.name for plane in page._planes(tmp_path)] == ['a']


def test_one_recorder_at_a_time(tmp_path):
    with trace(tmp_path / 'a'):
        with pytest.raises(UserError, match='already'):
            with trace(tmp_path / 'b'): pass
    with trace(tmp_path / 'c' / 'd') as folder: assert folder.is_dir()   # the first one has ended


def test_no_place_for_a_trace(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(UserError, match='no trace can be kept there'):
        with trace(tmp_path / 'file'): pass


def test_tensorboard_that_cannot_start(tmp_path, monkeypatch):
    with pytest.raises(UserError, match='no such folder'): TensorBoard(tmp_path / 'nothing')
    monkeypatch.setattr(page, 'find_spec', lambda name: None)
    with pytest.raises(UserError, match='pip install'): TensorBoard(tmp_path)


@pytest.fixture
def server(monkeypatch):
    "Stands for the process of a TensorBoard: what it says, whether it has ended, and what was asked of it."
    one = SimpleNamespace(says='', code=None, calls=[], stubborn=False)
    def popen(command, stdout, stderr, env):
        one.command, one.env = command, env
        stderr.write(one.says)
        return one
    def wait(seconds=None):
        one.calls.append('wait')
        if one.stubborn and seconds: raise subprocess.TimeoutExpired('tensorboard', seconds)
    one.poll, one.wait = lambda: one.code, wait
    for name in ('terminate', 'kill'): setattr(one, name, lambda name=name: one.calls.append(name))
    monkeypatch.setattr(page, 'subprocess', SimpleNamespace(
        Popen=popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired))
    monkeypatch.setattr(page, 'time', Clock())
    monkeypatch.setattr(page, 'find_spec', lambda name: name)
    return one


@pytest.mark.parametrize('says, code, timeout, reason, asked', [
    ('gone', 1, 60, 'gone', 0), ('first\nand last\n', 1, 60, 'and last', 0),
    ('', 1, 60, 'it gave no reason', 0),
    ('slow', None, 1, 'slow', 5)])
def test_a_tensorboard_that_is_silent(tmp_path, server, monkeypatch, says, code, timeout, reason, asked):
    "Asked five times a second while it runs, and stopped."
    server.says, server.code, tries = says, code, []
    def get(board, path=''):
        tries.append(path)
        raise OSError
    monkeypatch.setattr(TensorBoard, 'get', get)
    board = TensorBoard(tmp_path, timeout=timeout)
    with pytest.raises(UserError) as said: board.start()
    assert str(said.value) == f'TensorBoard does not answer at http://127.0.0.1:{board.port}/: {reason}'
    assert len(tries) in (asked, asked + 1 if asked else 0) and server.calls == ['terminate', 'wait']
    assert board.process is None


def test_a_tensorboard_is_waited_for_and_stopped(tmp_path, server, monkeypatch):
    answers = iter([OSError, OSError, b'ready'])
    def get(board, path=''):
        if (answer := next(answers)) is OSError: raise OSError
        return answer
    monkeypatch.setattr(TensorBoard, 'get', get)
    server.stubborn = True
    with TensorBoard(tmp_path) as board:
        assert board.process is server and board.port > 1024 and not server.calls
        assert server.command[-4:] == ['--host', '127.0.0.1', '--port', str(board.port)]
        assert server.command[-6:-4] == ['--logdir', str(tmp_path)]
        assert server.env['CUDA_VISIBLE_DEVICES'] == '-1'
    assert server.calls == ['terminate', 'wait', 'kill', 'wait'] and board.process is None
    board.stop()   # once more
    assert len(server.calls) == 4


@pytest.mark.parametrize('body', [b'{"a": 1}', gzip.compress(b'{"a": 1}')], ids=['plain', 'compressed'])
def test_what_a_tensorboard_answers(tmp_path, server, monkeypatch, body):
    asked = []
    def urlopen(url, timeout): asked.append((url, timeout)); return io.BytesIO(body)
    monkeypatch.setattr(page.urllib.request, 'urlopen', urlopen)
    assert TensorBoard(tmp_path, port=7, timeout=3.).get('data/x') == b'{"a": 1}'
    assert asked == [('http://127.0.0.1:7/data/x', 3.)]


@pytest.mark.slow
def test_a_real_tensorboard_shows_curves_and_the_trace(recorded):
    for name in ('tensorboard', 'xprof'):
        if not find_spec(name): pytest.skip(f'{name} is not installed')
    with tf.summary.create_file_writer(str(recorded)).as_default(): tf.summary.scalar('loss', 1., step=0)
    with TensorBoard(recorded) as board:
        listed = json.loads(board.get('data/plugins_listing'))
        assert listed['scalars']['enabled'] and listed['profile']['enabled']
        tags = json.loads(board.get('data/plugin/scalars/tags'))
        assert tags == {'.': {'loss': {'displayName': '', 'description': ''}}}
        (run,) = json.loads(board.get('data/plugin/profile/runs'))
        tools = json.loads(board.get(f'data/plugin/profile/run_tools?run={run}'))
        assert {'overview_page', 'framework_op_stats'} <= set(tools)
        (host,) = json.loads(board.get(f'data/plugin/profile/hosts?run={run}&tag=framework_op_stats'))
        statistics = f'run={run}&tag=framework_op_stats&host={host["hostname"]}'
        assert b'MatMul' in board.get(f'data/plugin/profile/data?{statistics}')
        process = board.process
    assert process.poll() is not None and board.process is None


def test_tensorboard_on_a_port_that_is_taken(tmp_path):
    if not find_spec('tensorboard'): pytest.skip('tensorboard is not installed')
    with socket.socket() as taken:
        taken.bind(('127.0.0.1', 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f'127.0.0.1:{port}: cannot be listened at .* another port'):
            TensorBoard(tmp_path, port=port).start()
    assert free_port(port) == port and free_port() > 1024
