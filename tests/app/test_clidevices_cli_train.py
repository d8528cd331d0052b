"The commands for several GPUs and machines, with a stubbed library: calls, output and exit codes."

import pytest

from process import check_bounds

ROWS = [{'name': 'in turn', 'rate': 8., 'ideal_rate': 20., 'model_wait_share': 0.5, 'ring_max': 1}]


def test_bounds():
    check_bounds(('bench dual --steps', 3, 2), ('bench dual --rounds', 1, 0),
                 ('distributed x --index', 0, -1),
                 ('distributed x --local', 1, 0),
                 ('distributed x --gpus', 0, -1), ('distributed x --wait', 1, 0.9),
                 ('distributed x --restarts', 0, -1))


# --- bench dual ---------------------------------------------------------------------------------------------

# --- distributed --------------------------------------------------------------------------------------------

# --- what is a script now -----------------------------------------------------------------------------------

@pytest.mark.parametrize('line', ['bench growth', 'bench growth --record --json'])
def test_a_command_that_is_a_script_now_names_it(ran, line):
    done = ran(line)
    assert done.code == 2 and done.said == [
        'xtts-nb: bench growth: write python benchmarks/growth.py in a checkout of the repository instead.']
