"Addresses of workers; workers that do not come, die, are killed or stopped, and no process left behind."
import json
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from process import hears_ctrl_c
from xtts_nb.train import launch as page
from xtts_nb.train.launch import (
    LOST_PEER, SLURM, WorkerGroup, claim_port, deal_gpus, exposure, find_workers, is_listening,
    local_workers, parse_workers, share_gpus, slurm_workers, supervise, tf_config, this_worker, visible_gpus,
    watch)
from xtts_nb.config import UserError


# --- addresses ------------------------------------------------------------------------------------

@pytest.mark.parametrize('text, wrong', [
    ('node1', 'node1'), ('a:1,b', '"b"'), ('a:1,a:1', 'twice'), ('a:0', 'a:0'), ('a:65536', 'a:65536'),
    (':22', ':22'), ('a:x', 'a:x'), ('', '""')], ids=repr)
def test_an_address_is_a_host_and_a_port(text, wrong):
    with pytest.raises(UserError, match=wrong): parse_workers(text)

def test_addresses_are_read():
    assert parse_workers('a:1, b.c:65535,[::1]:3') == ['a:1', 'b.c:65535', '[::1]:3']

@pytest.mark.parametrize('step, workers, index', [
    (('5', 'gpu[01-03]', '2(x2),1', 'gpu02', '1'),
     'gpu01:23456 gpu01:23457 gpu02:23456 gpu02:23457 gpu03:23456', 3),
    (('3', 'n[9-10],m', '1(x3)', 'n9', '0'), 'm:23456 n10:23456 n9:23456', 2)])
def test_a_job_of_slurm_is_read(monkeypatch, step, workers, index):
    "By node and number on it: TensorFlow sorts the nodes, and the number among all tasks may be another one."
    for name, value in zip(SLURM, ('123456', '0', *step)): monkeypatch.setenv(name, value)
    assert slurm_workers() == (workers.split(), index)

@pytest.mark.parametrize('nodes, node', [('r[1-2]n[1-2]', 'r1n1'), ('n[1-4]', 'm1')])
def test_a_job_of_slurm_that_cannot_be_read(monkeypatch, nodes, node):
    job = '1', '0', '4', nodes, '1(x4)', node, '0'
    for name, value in zip(SLURM, job): monkeypatch.setenv(name, value)
    message = 'SLURM: .*; give the addresses with --workers and --index'
    with pytest.raises(UserError, match=message): slurm_workers()

def test_workers_come_from_what_was_given(monkeypatch):
    for name in SLURM: monkeypatch.delenv(name, raising=False)
    assert find_workers('a:1,b:2', 1, None) == (['a:1', 'b:2'], [1])
    addresses, mine = find_workers(None, None, 2)
    assert len(set(addresses)) == 2 and mine == [0, 1]
    monkeypatch.setenv(SLURM[0], '7')   # of a job without a step
    (address,), mine = find_workers(None, None, None)
    assert address.startswith('127.0.0.1:') and mine == [0]
    job = '1', '1', '2', 'n[1-2]', '1(x2)', 'n2', '0'
    for name, value in zip(SLURM, job): monkeypatch.setenv(name, value)
    assert find_workers(None, None, None) == (['n1:20001', 'n2:20001'], [1])
    assert find_workers(None, None, 2)[1] == [0, 1]

@pytest.mark.parametrize('given, reason', [
    (('a:1,b:2', None, None), '--index'), (('a:1,b:2', 2, None), '0 to 1'), (('a:1', 0, 2), 'exclude'),
    ((None, 1, 2), 'belongs to')])
def test_options_that_contradict_are_refused(given, reason):
    with pytest.raises(UserError, match=reason): find_workers(*given)

def test_a_worker_knows_its_number(monkeypatch):
    monkeypatch.delenv('TF_CONFIG', raising=False)
    assert this_worker() == (0, 1)
    monkeypatch.setenv('TF_CONFIG', tf_config(['a:1', 'b:2', 'c:3'], 2))
    assert this_worker() == (2, 3)
    for config, found in (({}, (0, 1)), ({'cluster': {'worker': ['a:1', 'b:2']}}, (0, 2)),
                          ({'cluster': {'worker': ['a:1']}}, (0, 1)),
                          ({'cluster': {'chief': ['a:1'], 'worker': ['b:2']},
                            'task': {'type': 'chief', 'index': 0}}, (0, 2))):
        monkeypatch.setenv('TF_CONFIG', json.dumps(config))
        assert this_worker() == found
    cluster = {'chief': ['a:1'], 'worker': ['b:2']}
    monkeypatch.setenv('TF_CONFIG', json.dumps({'cluster': cluster, 'task': {'type': 'worker', 'index': 0}}))
    assert this_worker() == (1, 2)

def test_gpus_are_assigned(monkeypatch):
    for shown, gpus in (('2,5', ['2', '5']), ('', []), ('-1', []), ('0,-1,1', ['0']),
                        ('GPU-ab, GPU-cd', ['GPU-ab', 'GPU-cd'])):
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', shown)
        assert visible_gpus() == gpus
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES')
    monkeypatch.setattr(page, 'best_probe',
                        lambda say: lambda: SimpleNamespace(gpus=[SimpleNamespace(index=n) for n in (0, 3)]))
    assert visible_gpus() == ['0', '3']
    monkeypatch.setenv('XTTS_NB_CPU_CARDS', '2')
    assert visible_gpus() == ['0', '1']
    assert deal_gpus(['2', '5', '6'], 1) == ['2,5,6'] and deal_gpus(['2', '5', '6'], 3, 1) == ['2', '5', '6']
    assert deal_gpus(['2', '5', '6'], 2) == ['2', '5']
    assert deal_gpus([], 2) == deal_gpus(['0'], 2, 0) == ['-1', '-1']
    with pytest.raises(UserError, match='4 workers with 1 GPUs need 4, but only 2'): deal_gpus(['0', '1'], 4)
    with pytest.raises(UserError, match='need 4, but only 3'): deal_gpus(['2', '5', '6'], 2, 2)
    with pytest.raises(UserError, match='only 0 can be seen'): deal_gpus([], 1, 1)


# --- restarts -------------------------------------------------------------------------------------

WORKER = """
import json, os, signal, socket, sys, time
from pathlib import Path
config = json.loads(os.environ['TF_CONFIG'])
index = config['task']['index']
server = socket.create_server(('', int(config['cluster']['worker'][index].split(':')[1])))
folder = Path(sys.argv[1])
(folder / f'pid-{index}-{os.getpid()}').touch()
"""

@pytest.fixture
def worker(tmp_path):
    "A program that opens its port, notes its process, and goes on as given."
    return lambda rest='': [sys.executable, '-c', WORKER + rest, str(tmp_path)]

def alive(pid: int) -> bool:
    try: return 'Z' not in open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0]
    except OSError: return False

def gone(folder, seconds=0.) -> bool:
    "Whether no worker lives any more."
    until = time.monotonic() + seconds
    pids = [int(p.name.split('-')[2]) for p in folder.glob('pid-*')]
    while any(map(alive, pids)) and time.monotonic() < until: time.sleep(0.05)
    assert pids
    return not any(map(alive, pids))

def started(folder) -> dict[int, int]:
    "How often each worker started."
    seen = [int(p.name.split('-')[1]) for p in folder.glob('pid-*')]
    return {i: seen.count(i) for i in set(seen)}

TWO = {0: None, 1: None}

def test_all_end_well(worker, tmp_path):
    lines = []
    slow = "time.sleep(0.5 * index)\n(folder / f'done-{index}').touch()"
    assert supervise(worker(slow), local_workers(2), TWO, say=lines.append) == 0
    assert started(tmp_path) == {0: 1, 1: 1} and not lines
    assert {p.name for p in tmp_path.glob('done-*')} == {'done-0', 'done-1'}

def test_all_restart_after_one_dies(worker, tmp_path):
    once = """
time.sleep(0.5)
if index == 1 and len(list(folder.glob('pid-1-*'))) < 3: os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.3)
"""
    lines = []
    assert supervise(worker(once), local_workers(2), TWO, say=lines.append) == 0
    assert started(tmp_path) == {0: 3, 1: 3} and gone(tmp_path)
    assert len(lines) == 2 and all('Worker 1 was ended by SIGKILL; all start again' in line for line in lines)

def test_the_cause_is_named_before_its_consequence():
    "Worker 0 has lost its peer; both have ended before the first poll."
    codes = LOST_PEER, -signal.SIGKILL
    ended = {i: SimpleNamespace(poll=lambda code=code: code) for i, code in enumerate(codes)}
    group = SimpleNamespace(workers=local_workers(2), processes=ended, stderr_tail=lambda i: '')
    with pytest.raises(UserError, match='Worker 1 was ended by SIGKILL before it could begin'):
        watch(group, wait=1)

@pytest.mark.slow
def test_the_number_of_restarts_is_limited(worker, tmp_path):
    lines = []
    dies = """
time.sleep(0.5)
if index == 1:
    print('because', file=sys.stderr)
    sys.exit(7)
time.sleep(60)
"""
    with pytest.raises(UserError, match='died 3 times'):
        supervise(worker(dies), local_workers(2), TWO, restarts=2, say=lines.append)
    assert started(tmp_path) == {0: 3, 1: 3} and gone(tmp_path)
    assert [line.strip() for line in lines].count('because') == 3 and 'ended with code 7.' in lines[-1]

def test_a_worker_that_cannot_start_is_not_restarted(tmp_path):
    program = """
import os, sys, time
if '"index": 1' in os.environ['TF_CONFIG']: sys.exit('no such thing')
time.sleep(60)
"""
    message = r'Worker 1 ended with code 1 before it could begin; mend that. (.|\n)*no such thing'
    with pytest.raises(UserError, match=message):
        supervise([sys.executable, '-c', program], local_workers(2), TWO)

@pytest.mark.parametrize('code', [2, 130, 143])
def test_a_requested_end_is_final(worker, tmp_path, code):
    ends = worker(f'\nif index: sys.exit({code})\ntime.sleep(60)')
    assert supervise(ends, local_workers(2), TWO, say=lambda line: None) == code
    assert started(tmp_path) == {0: 1, 1: 1} and gone(tmp_path)

def test_a_peer_that_never_comes_is_named(worker, tmp_path):
    "The worker that waits for it ignores SIGTERM."
    workers = local_workers(2)
    ignores = '\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)'
    with pytest.raises(UserError, match=f'Of 2 workers {workers[1]} did not come within 2 s; start it'):
        supervise(worker(ignores), workers, {0: None}, wait=2)
    assert gone(tmp_path)

def test_a_port_in_use_is_named_before_anything_starts(worker, tmp_path):
    with socket.create_server(('', 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f':{port}: port {port}: cannot be used .*; choose another port'):
            supervise(worker(), [f'127.0.0.1:{port}'], {0: None})
    assert not list(tmp_path.iterdir())
    claim_port(f'127.0.0.1:{port}')

def test_nothing_listens_where_there_is_no_host():
    assert not is_listening('no-such-host.invalid:22')

SUPERVISOR = """
import sys
from xtts_nb.train.launch import local_workers, supervise
assert 'tensorflow' not in sys.modules
sys.exit(supervise(sys.argv[1:], local_workers(2), {0: None, 1: None}))
"""

def supervisor(command, folder):
    "A supervisor in a process of its own, after its workers started."
    child = subprocess.Popen([sys.executable, '-c', SUPERVISOR, *command], stderr=subprocess.PIPE,
                             stdout=subprocess.PIPE, preexec_fn=hears_ctrl_c)
    while started(folder) != {0: 1, 1: 1} and child.poll() is None: time.sleep(0.02)
    return child

@pytest.mark.parametrize('how', [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_supervisor(worker, tmp_path, how):
    "Workers that ignore SIGTERM are tested where they do not get a minute to save."
    ignores = '\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)' if how == signal.SIGKILL else ''
    child = supervisor(worker(ignores + '\ntime.sleep(60)'), tmp_path)
    child.send_signal(how)
    child.communicate(timeout=60)
    assert child.returncode != 0 and gone(tmp_path, seconds=5)

@pytest.mark.parametrize('how', [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_leaves_time_to_save(worker, tmp_path, how):
    saves = """
def save(*_):
    time.sleep(0.4)
    (folder / f'saved-{index}').touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
(folder / f'ready-{index}').touch()
time.sleep(60)
"""
    child = supervisor(worker(saves), tmp_path)
    while len(list(tmp_path.glob('ready-*'))) < 2: time.sleep(0.02)
    child.send_signal(how)
    child.communicate(timeout=60)
    assert child.returncode == (143 if how == signal.SIGTERM else -signal.SIGINT)
    assert len(list(tmp_path.glob('saved-*'))) == 2 and gone(tmp_path)

def test_only_worker_0_prints_a_result(worker, tmp_path, monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '-1')
    prints = '\ntime.sleep(0.5)\nprint("result of", index, os.environ["CUDA_VISIBLE_DEVICES"])'
    child = supervisor(worker(prints), tmp_path)
    out, err = child.communicate(timeout=60)
    assert out.decode() == 'result of 0 -1\n' and not err and child.returncode == 0

def test_how_a_process_ended():
    ends = {-9: 'was ended by SIGKILL', -1: 'was ended by SIGHUP', 0: 'ended with code 0',
            1: 'ended with code 1'}
    assert {code: page._exit_text(code) for code in ends} == ends

@pytest.mark.parametrize('mine, late, expected', [
    ([0], [1], ('b', 3, '2 s; start it, or look at .* are ended.$')),
    ([0], [1, 0], ('a, b', 9, '8 s; give a larger --wait. All others are ended. the end of 0$')),
    ([0, 1], [1], ('b', 9, '8 s; give a larger --wait. .* the end of 1$')), ([0], [], None)])
def test_the_time_limit_for_peers_is_four_times_as_long_on_slow_machines(monkeypatch, mine, late, expected):
    "The clock advances by a second between two polls."
    now, workers, polls = [50.], ['a', 'b'], iter([None] * 20 + [0] * 99)
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: now.__setitem__(0, now[0] + 1))
    monkeypatch.setattr(page, 'time', clock)
    monkeypatch.setattr(page, 'is_listening', lambda worker: workers.index(worker) not in late)
    process = SimpleNamespace(poll=lambda: next(polls))
    group = SimpleNamespace(workers=workers, processes={i: process for i in mine},
                            stderr_tail=lambda i: f'the end of {i}')
    if expected is None: assert watch(group, wait=2) is None
    else:
        complaint = f'Of 2 workers {expected[0]} did not come within {expected[2]}'
        with pytest.raises(UserError, match=complaint): watch(group, wait=2)
        assert now[0] == 50 + expected[1]

def test_a_worker_is_a_session_with_its_own_gpus(monkeypatch):
    "Only worker 0 writes to the terminal's stdout."
    started = []
    monkeypatch.setattr(subprocess, 'Popen', lambda command, **how: started.append(how) or command)
    monkeypatch.delenv('XTTS_NB_CPU_CARDS', raising=False)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '5')
    for index, gpus, shown in ((0, None, '5'), (1, '2,3', '2,3')):
        assert page.start_worker(['x'], ['a:1', 'b:2'], index, gpus) == ['x']
        how = started.pop()
        assert how['env']['CUDA_VISIBLE_DEVICES'] == shown
        assert how['env']['TF_CONFIG'] == tf_config(['a:1', 'b:2'], index)
        assert how['stdout'] == (subprocess.DEVNULL if index else None) and how['start_new_session'] is True
        assert callable(how['preexec_fn']) == (sys.platform == 'linux')

@pytest.mark.parametrize('machine, workers, own, threads', [
    (8, 2, None, '4'), (8, 3, None, '2'), (2, 3, None, '1'), (8, 1, None, '8'), (8, 2, '7', '7')])
def test_the_workers_of_a_machine_share_its_cores(monkeypatch, machine, workers, own, threads):
    "Unless the environment says how many threads each of them has."
    started = []
    monkeypatch.setattr(subprocess, 'Popen', lambda command, **how: started.append(how['env']))
    monkeypatch.setattr(page, 'cores', lambda: machine)
    monkeypatch.setattr(page, 'end_workers', lambda *given: None)
    for name in NUMBERS: monkeypatch.delenv(name, raising=False)
    if own: monkeypatch.setenv(NUMBERS[0], own)
    with WorkerGroup(['x'], [f'a:{i}' for i in range(5)], dict.fromkeys(range(workers), '-1')): pass
    assert [env[NUMBERS[0]] for env in started] == [threads] * workers
    assert [env[NUMBERS[1]] for env in started] == [str(max(1, machine // workers))] * workers

NUMBERS = 'TF_NUM_INTRAOP_THREADS', 'TF_NUM_INTEROP_THREADS'

def test_the_end_of_the_stderr_of_a_worker_without_a_terminal():
    group = WorkerGroup(['x'], ['a:1', 'b:2', 'c:3'], {1: None, 2: None})
    assert list(group.stderr) == [2] and group.stderr_tail(1) == group.stderr_tail(2) == ''
    group.stderr[2].write(b'x' * 1000 + b'y' * 1999 + b'\xff')
    assert group.stderr_tail(2) == 'y' * 1999 + '\ufffd'
    group.stderr[2].close()

def test_a_single_worker_needs_no_port():
    "It has no peers, so the time limit for peers does not end it."
    program = 'import time; time.sleep(1.5)'
    assert supervise([sys.executable, '-c', program], local_workers(1), {0: None}, wait=0.2) == 0

def test_the_warning_names_open_ports():
    where = 'TensorFlow listens on every address of this machine, at port 1, 3, and asks for no password'
    assert exposure(['a:1', 'b:2', 'a:3'], [0, 2]).startswith(where)
    assert exposure(['a:1'], [0]) == ''


NODES = ['a:1', 'a:2', 'b:1', 'b:2']

@pytest.mark.parametrize('gpus, slurm, mine, each, shares', [
    ('0123', '4', [3], None, {3: '2,3'}), ('0123', '4', [2], None, {2: '0,1'}),
    ('0123', '4', [0], 1, {0: '0'}),
    ('01', '4', [1], None, {1: '0,1'}),          # SLURM has dealt them to its tasks
    ('0123', None, [1], None, {1: '0,1,2,3'}),   # not of SLURM: as the environment shows them
    ('0123', '', [0, 1], None, {0: '0,1', 1: '2,3'}), ('', '0', [1], None, {1: '-1'})])
def test_tasks_of_a_node_share_its_cards(monkeypatch, gpus, slurm, mine, each, shares):
    for name in ('SLURM_LOCALID', 'SLURM_GPUS_ON_NODE'): monkeypatch.delenv(name, raising=False)
    if slurm is not None:
        monkeypatch.setenv('SLURM_LOCALID', '1')
        monkeypatch.setenv('SLURM_GPUS_ON_NODE', slurm)
    assert share_gpus([*gpus], NODES, mine, each) == shares
