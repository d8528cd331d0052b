"Two devices: the placement of a trainer with a feed, and the profile of its stages."
from types import SimpleNamespace

import pytest

from xtts_nb.devices import DevicePlan
from xtts_nb.train import profile as page
from xtts_nb.train.dual import Span
from xtts_nb.train.profile import placement_summary, profile_dual, slowest_stage_text

def ran(most, seconds):
    "A run of 15 batches whose model takes so many seconds for each, the host a tenth of that."
    span = lambda stage, n, last: Span(stage, n, n * seconds, (n + last) * seconds)
    return SimpleNamespace(most=most, spans=[
        span(*one) for n in range(15) for one in (('host', n, 0.1), ('model', n, 1))])


@pytest.mark.parametrize('name, word', [('host', 'num_workers'), ('data', 'precompute'), ('copy', 'switch'),
                                        ('model', 'nothing')])
def test_the_verdict_names_the_slowest(name, word):
    rows = [{'name': n, 'ms': 9. if n == name else 1.} for n in ('host', 'data', 'copy', 'model')]
    said = slowest_stage_text(rows, {'wall': 1., 'work': 2., 'model_wait_share': 0.25})
    assert f'slowest stage is {name}' in said and word in said and 'waited 25%' in said

def test_the_audit_by_owner_and_device():
    row = lambda owner, size, device='CPU:0': {'owner': owner, 'name': 'x', 'device': device,
                                               'wanted': device, 'bytes': size}
    found = placement_summary([row('model', 500), row('model', 1000), row('model', 64, 'GPU:0'),
                               row('other', 40)])
    assert [tuple(r.values()) for r in found] == [('model', 'CPU:0', 2, '1.5'), ('model', 'GPU:0', 1, '0.1'),
                                                  ('other', 'CPU:0', 1, '0.0')]
    assert page.short_device('/job:localhost/replica:0/task:0/device:GPU:1') == 'GPU:1'

def test_a_profile_asks_for_two_devices_and_runs_twice(monkeypatch, tmp_path):
    "The first run compiles; the second one is shown. Devices that are given are taken as they are."
    plan, runs, drawn, asked = DevicePlan({}, 'CPU:0', 'CPU:1'), [], [], []
    feed = SimpleNamespace(where={'model': 'CPU:1'}, devices=plan)
    def trainer(cache, config, devices, **more):
        asked.append((devices, more))
        return SimpleNamespace(feed=feed)
    def run(trainer, steps):
        runs.append(steps)
        return [0.5], ran(3, 0.25) if len(runs) % 2 else ran(2, 0.5)
    for name, fake in {'setup_devices': lambda two: plan if two else None,
                       'Cache': lambda folder: SimpleNamespace(config='config'),
                       'dual_trainer': trainer, 'run_feed': run,
                       'save_timeline': lambda path, runs, where: drawn.append([*runs]) or path}.items():
        monkeypatch.setattr(page, name, fake)
    found = profile_dual('cache', 'a.png', 5, 2)
    assert runs == [5, 5] and asked.pop() == (plan, {'ring': 2})
    assert (found['ring_max'], found['losses'], found['rate']) == (2, [0.5], 2)
    assert found['rows'][1] == {'name': 'model', 'device': 'CPU:1', 'batches': 15, 'ms': 500., 'busy': 1.}
    assert drawn == [[plan.line]]
    assert found['verdict'].startswith(f'{plan.line} The slowest stage is model with 500.0 ms')
    given = DevicePlan({}, 'CPU:0', 'CPU:0')
    profile_dual('cache', 'a.png', 5, devices=given)
    assert asked[0][0] is given
