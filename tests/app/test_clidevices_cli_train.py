"The commands that measure several GPUs, and a script that was one."
import pytest

from process import check_bounds


def test_bounds(): check_bounds(('bench dual --steps', 3, 2), ('bench dual --rounds', 1, 0))

@pytest.mark.parametrize('line', ['bench growth', 'bench growth --record --json'])
def test_a_command_that_is_a_script_now_names_it(ran, line):
    done = ran(line)
    assert done.code == 2 and done.said == [
        'xtts-nb: bench growth: write python benchmarks/growth.py in a checkout of the repository instead.']
