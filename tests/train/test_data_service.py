"The data service: every step once, nobody left behind, a member that is killed comes back."
import hashlib
import json
import signal
import socket
import subprocess
import threading
import time
from collections import Counter

import psutil
import pytest

from process import COMMAND, environment, hears_ctrl_c, main, xtts_nb
from xtts_nb.config import UserError
from xtts_nb.data.native import BatchPlan, MelReader, batches_of, cached_batches
from xtts_nb.train.data_service import service_batches
from xtts_nb.train.supervisor import DataService, Member, Supervisor, claim_port


def start(*arguments) -> tuple:
    "A service of the command line: its process and what it said when it was ready."
    command = [*COMMAND, 'data-service', '--host', 'localhost', '--port', '0', '--json', *arguments]
    child = subprocess.Popen(command, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             preexec_fn=hears_ctrl_c)
    said = child.stdout.readline()
    assert said, child.communicate()[1]
    return child, json.loads(said)

def members(child) -> list: return psutil.Process(child.pid).children(recursive=True)

def gone(processes) -> bool:
    "Whether they all end in due time."
    return not psutil.wait_procs(processes, timeout=20)[1]

@pytest.fixture(scope='module')
def running():
    child, said = start('--workers', '2')
    yield child, said['address']
    processes = members(child)
    child.terminate()
    assert child.wait(20) == 143 and len(processes) == 3 and gone(processes)   # SIGTERM leaves nobody

@pytest.fixture
def service(running): return running[1]

@pytest.fixture
def plan(prepared, small): return BatchPlan(prepared, small.data)

def digest(batch) -> str:
    return hashlib.sha256(b''.join(batch[k].numpy().tobytes() for k in sorted(batch))).hexdigest()

def taken(batches, each=lambda number: None, timeout=90) -> list:
    "All batches; a client that hangs fails the test and does not stop the run."
    got, done = [], threading.Event()
    def take():
        for batch in batches: each(len(got)); got.append(batch)
        done.set()
    threading.Thread(target=take, daemon=True).start()
    assert done.wait(timeout), f'hangs after {len(got)} batches'
    return got

def steps_of(batches, plan, steps) -> Counter:
    "How often each step came."
    name = {digest(b): i for i, b in enumerate(cached_batches(plan, 0, steps))}
    assert len(name) == steps
    return Counter(name[digest(b)] for b in batches)


# --- the same batches ----------------------------------------------------------------------------------------------

def test_shards_are_disjoint_and_complete(service, plan):
    there = Counter(map(digest, taken(service_batches(plan, service, 5, 40))))
    assert there == Counter(map(digest, cached_batches(plan, 5, 40)))

def test_without_sharding_every_worker_makes_every_batch(service, plan):
    there = Counter(map(digest, taken(service_batches(plan, service, 0, 9, sharding='off'))))
    assert there == Counter(2 * list(map(digest, cached_batches(plan, 0, 9))))

@pytest.mark.slow
def test_recordings_are_read_by_the_workers(service, plan, stats):
    there = taken(service_batches(plan, service, 0, 5, reader=lambda plan: MelReader(plan, stats)))
    assert Counter(map(digest, there)) == Counter(map(digest, batches_of(MelReader(plan, stats), plan.data, 0, 5)))

def test_a_dvae_stays_at_home(plan, prepared, small, dvae):
    with pytest.raises(UserError, match='a DVAE cannot be sent to the workers'):
        service_batches(BatchPlan(prepared, small.data, dvae=dvae), 'localhost:1')


# --- killed --------------------------------------------------------------------------------------------------------

HELD = 12   # batches at most that one worker was given and had not delivered; 2 and 3 were seen

def disturbed(plan, who: int, sharding: str, steps: int):
    "A run of `steps` steps in which a member is killed and started again; the steps that came, and what was said."
    lines = []
    with DataService(workers=2, say=lines.append) as service:
        def each(number):
            if number == 4: service.members[who].process.kill()
            time.sleep(0.005)
        seen = steps_of(taken(service_batches(plan, service.address, 0, steps, sharding), each), plan, steps)
        processes = [psutil.Process(m.process.pid) for m in service.members]
        assert all(m.process.poll() is None for m in service.members)
    assert gone(processes)
    return seen, lines

@pytest.mark.slow
def test_a_killed_worker_comes_back_and_no_step_comes_twice(running, plan):
    child, address = running
    jobs = lambda: {p.cmdline()[-1]: p for p in members(child)}   # what each is and at which port
    before = jobs()
    worker = next(p for job, p in before.items() if 'dispatcher' in json.loads(job))
    def each(number):
        if number == 4: worker.kill()
        time.sleep(0.005)
    seen = steps_of(taken(service_batches(plan, address, 0, 60), each), plan, 60)
    assert set(seen.values()) == {1} and 60 - HELD <= len(seen) <= 60
    assert jobs().keys() == before.keys() and not worker.is_running()
    assert any(line.startswith('worker localhost:') for line in iter(child.stderr.readline, ''))   # said what is started again

@pytest.mark.slow
@pytest.mark.parametrize('who', [1, 2])
def test_every_worker_comes_back(plan, who):
    seen, lines = disturbed(plan, who, 'dynamic', 60)
    assert len(lines) == 1 and 'worker' in lines[0] and set(seen.values()) == {1} and 60 - HELD <= len(seen) <= 60

@pytest.mark.slow
def test_without_sharding_nothing_is_lost(plan):
    seen, lines = disturbed(plan, 2, 'off', 60)
    assert len(lines) == 1 and len(seen) == 60 and max(seen.values()) >= 2

@pytest.mark.slow
def test_a_killed_dispatcher_goes_on_by_its_journal(plan):
    seen, lines = disturbed(plan, 0, 'dynamic', 200)
    assert len(lines) == 1 and 'dispatcher' in lines[0] and len(seen) == 200 and set(seen.values()) == {1}

@pytest.mark.slow
@pytest.mark.parametrize('how, code', [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_members_end_with_their_supervisor(how, code):
    child, said = start('--workers', '1')
    processes = members(child)
    child.send_signal(how)
    assert child.wait(20) == code and len(processes) == 2 and gone(processes)


def test_a_member_that_cannot_begin_ends_the_service():
    bad = Member('bad', 'raise SystemExit(3)')
    with pytest.raises(UserError, match='bad: ended before it was ready'): Supervisor([Member('good', SLEEP), bad]).__enter__()
    assert bad.process.poll() is not None

def test_a_member_that_cannot_begin_again_ends_the_service(tmp_path):
    once = f'import os; os.mkdir({str(tmp_path / "begun")!r})\n' + SLEEP   # the second time the folder is there
    with Supervisor([Member('once', once)], say=lambda line: None) as both:
        both.members[0].process.kill()
        with pytest.raises(UserError, match='once: could not be started again'): both.wait()

SLEEP = 'import time; print("ready", flush=True); time.sleep(60)'


# --- mistakes ------------------------------------------------------------------------------------------------------

def test_a_port_in_use_is_named_and_nothing_starts():
    with socket.socket() as other:
        other.bind(('', 0)); other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f'port {port}: cannot be used'): DataService(port=port)
    assert claim_port(port) == port

@pytest.mark.slow
def test_the_command_names_a_port_in_use():
    with socket.socket() as other:
        other.bind(('', 0)); other.listen()
        done = xtts_nb('data-service', '--host', 'localhost', '--port', other.getsockname()[1])
    assert done.code == 2 and len(done.said) == 1 and 'cannot be used' in done.said[0] and 'Traceback' not in done.err

def test_nobody_serves_others_without_being_told(capsys):
    assert main('data-service') == 2
    said = capsys.readouterr().err
    assert 'listens on every address of this machine' in said and 'with --host' in said

@pytest.mark.parametrize('address', ['localhost:1', 'localhost', 'localhost:x', 'localhost:99999', ''])
def test_an_address_where_nobody_answers_is_named(plan, address):
    for ask in (lambda: service_batches(plan, address), lambda: DataService(join=address)):
        with pytest.raises(UserError, match='no data service answers there .*start one with xtts-nb data-service'): ask()
