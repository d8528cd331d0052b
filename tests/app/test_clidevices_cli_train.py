"The commands for several GPUs and machines, with a stubbed library: calls, output and exit codes."
import sys

import pytest

from process import check_bounds
from xtts_nb.app import cli_train as cli_devices
from xtts_nb.config import UserError

ROWS = [{'name': 'in turn', 'rate': 8., 'ideal_rate': 20., 'model_wait_share': 0.5, 'ring_max': 1}]


def test_bounds():
    check_bounds(('bench dual --steps', 3, 2), ('bench dual --rounds', 1, 0),
                 ('distributed x --index', 0, -1),
                 ('distributed x --local', 1, 0),
                 ('distributed x --gpus', 0, -1), ('distributed x --wait', 1, 0.9),
                 ('distributed x --restarts', 0, -1))


# --- bench dual ---------------------------------------------------------------------------------------------

def test_bench_dual_of_emulated_stages(ran, behind, bars):
    asked, kept = behind('benchmarks.dual.bench_stages', ROWS), behind('app.cli_train.write_record')
    done = ran('bench dual')
    lines = done.out.split()
    assert 'bench dual: 3 rounds' in done.err and lines[:2] == ['Emulated', 'stages']
    figures = [word for word in lines if word == '–' or word[0].isdigit()]
    assert figures == ['8.00', '–', '–', '40.0%', '–', '50.0%', '1'] and not kept
    about = {'stages_ms': [30, 40, 50], 'steps': 5, 'rounds': 2, 'devices': None}
    done = ran('bench dual --steps 5 --rounds 2 --buffer-size 4 --record --json')
    assert done.json == {'rows': ROWS} | about
    assert kept == [{'page': 'dual', 'rows': ROWS, 'notes': about}]
    assert asked == [{'steps': 60, 'ring': 3, 'rounds': 3}, {'steps': 5, 'ring': 4, 'rounds': 2}]
    assert bars == [('emulated stages', 1, 2)] * 2
    done = ran('bench dual --data-gpu 0')
    assert done.code == 2 and 'emulated stages run on no device; give a runtime cache' in done.said[0]

def test_bench_dual_of_real_stages(ran, behind, bars):
    behind('benchmarks.dual.bench_stages', lambda **call: ROWS[:])
    made = behind('app.cli_train._dual_trainer', ('the trainer', 'Two cards.'))
    real = [ROWS[0] | {'name': 'real'}]
    measured = behind('train.dual.bench_feed', real)
    assert ran('bench dual --data c').out.startswith('Two cards.\n')
    gpus = '--data-gpu 0 --model-gpu 1 --enable-memory-isolation --data-gpu-memory 2 --model-gpu-memory 3'
    result = ran(f'bench dual --data c --buffer-size 4 --steps 5 --json {gpus}').json
    assert result['rows'] == ROWS + real and result['devices'] == 'Two cards.'
    given = {'data_gpu': 0, 'model_gpu': 1, 'isolate': True, 'data_memory': 2, 'model_memory': 3}
    assert [tuple(call.values())[1:] for call in made] == [({}, 3), (given, 4)]
    assert measured == [{'trainer': 'the trainer', 'steps': steps, 'rounds': 3} for steps in (60, 5)]

def test_bench_dual_without_a_checkout(ran, behind, bars, monkeypatch):
    "Emulated stages are in the repository; the real ones of a cache are measured everywhere."
    def gone(name, what): raise UserError(f'{what}: needs benchmarks/')
    monkeypatch.setattr(cli_devices, 'from_checkout', gone)
    behind('app.cli_train._dual_trainer', ('the trainer', 'Two cards.'))
    behind('train.dual.bench_feed', ROWS)
    done = ran('bench dual')
    assert done.code == 2 and done.said == ['xtts-nb: bench dual without --data CACHE: needs benchmarks/']
    assert ran('bench dual --data c --json').json == {
        'rows': ROWS, 'stages_ms': None, 'steps': 60, 'rounds': 3, 'devices': 'Two cards.'}

def test_a_trainer_on_two_devices(behind, bars, prepared):
    made = behind('train.dual.dual_trainer', 'the trainer')
    assert cli_devices._dual_trainer(prepared.folder, {'data_gpu': 0}, 5) == ('the trainer', 'Two cards.')
    (call,) = made
    assert bars == [('start', {'two': True, 'data_gpu': 0})] and call['feed'] == {'ring': 5}
    assert call['config'] == prepared.config and call['cache'].folder == prepared.folder
    assert call['devices'].line == 'Two cards.'


# --- distributed --------------------------------------------------------------------------------------------

@pytest.mark.parametrize('words', ['prepare --run r', 'train', 'train --steps 3', 'train --runs r',
                                   'trains --run=r'])
def test_what_cannot_be_spread(ran, behind, words):
    ended = behind('train.launch.supervise', 0)
    done = ran(f'distributed --local 2 -- {words}')
    assert done.code == 2 and f'"{words}" cannot be spread; write train with --run RUN' in done.said[0]
    assert not ended

@pytest.mark.parametrize('warning', ['', 'Others can reach it.'])
def test_distributed(ran, behind, warning):
    found = behind('train.launch.find_workers', (['a:1', 'b:1', 'c:1'], [1, 2]))
    behind('train.launch.visible_gpus', ['0', '1', '2', '3'])
    dealt = behind('train.launch.deal_gpus', ['0,1', '2,3'])
    shown = behind('train.launch.exposure', warning)
    ended = behind('train.launch.supervise', 3)
    done = ran('distributed -- train --run r --steps 4')
    assert done.code == 3 and done.err == f'{warning}\n' * bool(warning) and done.out == ''
    ran('distributed --workers a:1,b:1 --index 1 --local 2 --gpus 0 --wait 5 --restarts 0 -- train --run=r')
    assert found == [{'workers': None, 'index': None, 'local': None},
                     {'workers': 'a:1,b:1', 'index': 1, 'local': 2}]
    assert dealt == [{'gpus': ['0', '1', '2', '3'], 'workers': 2, 'each': each} for each in (None, 0)]
    assert shown == [{'workers': ['a:1', 'b:1', 'c:1'], 'mine': [1, 2]}] * 2
    program = [sys.executable, '-c', 'from xtts_nb.app.cli import main; main()', 'train']
    gpus = {'workers': ['a:1', 'b:1', 'c:1'], 'gpus': {1: '0,1', 2: '2,3'}}
    assert ended == [{'command': [*program, '--run', 'r', '--steps', '4'], 'wait': 30.,
                      'restarts': 10} | gpus,
                     {'command': [*program, '--run=r'], 'wait': 5., 'restarts': 0} | gpus]


# --- what is a script now -----------------------------------------------------------------------------------

@pytest.mark.parametrize('line', ['bench growth', 'bench growth --record --json'])
def test_a_command_that_is_a_script_now_names_it(ran, line):
    done = ran(line)
    assert done.code == 2 and done.said == [
        'xtts-nb: bench growth: write python benchmarks/growth.py in a checkout of the repository instead.']
