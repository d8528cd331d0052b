"""XLA's compiler for NVIDIA GPUs takes every program of the library, on a machine without a GPU."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import xla_gpu

TOOL = Path(xla_gpu.__file__)

# what the host starts turn by turn: (conditionals, loops, loops whose number of turns XLA knows)
BY_HOST = {'gradients, accumulation': (0, 1, 1),   # the parts of a batch; the host reads nothing
           'speech': (0, 1, 0)}   # it ends with the last text: the host reads a flag for each code

@pytest.mark.slow
def test_a_gpu_takes_every_program_and_the_host_decides_nothing_but_what_is_named():
    try: xla_gpu.setup()
    except subprocess.CalledProcessError: pytest.skip('pip finds no wheels of JAX for CUDA here')
    command = [sys.executable, TOOL, 'small', 'h100']
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = {row['name']: row for row in map(json.loads, done.stdout.splitlines()) if row}
    assert {name: row['refused'] for name, row in rows.items() if row['refused']} == {}
    parts = {f'{part}, {one["name"]}' for one in xla_gpu.requests(True) for part in one.get('parts', ())}
    assert rows.keys() == parts | xla_gpu.OTHERS.keys() and len(parts) == 9
    assert all(row['kernels'] and row['peak'] for row in rows.values())
    found = {name: (row['host_conditionals'], row['host_loops'], row['known_turns'])
             for name, row in rows.items()}
    assert {name: n for name, n in found.items() if any(n)} == BY_HOST
    for name, row in rows.items():   # the update writes in place, the gradients write nothing
        if name.startswith('update'): assert row['in_place'] > 0.99 * row['results'], name
        if name.startswith('gradients'): assert row['in_place'] == 0, name

def test_the_plan_is_read_from_the_list_of_buffers():
    text = '''BufferAssignment:
allocation 0: size 100, parameter 0, shape |f32[25]| at ShapeIndex {}:
 value: <1 a @0> (size=100,offset=0): f32[25]{0}
allocation 1: size 40, parameter 1, shape |f32[10]| at ShapeIndex {}, maybe-live-out:
allocation 2: size 8, maybe-live-out:
allocation 3: size 4, constant:
allocation 4: size 1000, preallocated-temp:
'''
    assert xla_gpu.plan(text) == {'arguments': 140, 'results': 48, 'in_place': 40, 'temporary': 1000,
                                  'peak': 1148}
