"A generator in another process: its answers, and its failures."
import sys

import pytest

from xtts_nb.bench import Peer
from xtts_nb.config import UserError


def counts(start, step):
    print('this is no answer')
    while True:
        yield start
        start += step


def ends(stderr):
    import os
    os.write(2, stderr.encode())
    os._exit(3)
    yield


@pytest.mark.parametrize('stderr, error', [
    ('', 'no reason given'), ('first\nlast\n', 'last'),
    ('x.OddError: a\nValueErrors\nBadException\nlast', 'BadException'),
    ('OddError: no space before', 'OddError: no space before'), ('an Error\nlast', 'last')])
def test_the_last_error_is_quoted(stderr, error):
    "Or the last line where none looks like one."
    with Peer(sys.executable, ends, needs='Python', stderr=stderr) as peer, \
            pytest.raises(UserError) as e: peer()
    assert str(e.value) == f'{sys.executable}: Python failed ({error}); check that environment.'


def test_one_answer_per_call_without_prints():
    with Peer(sys.executable, counts, needs='Python', start=3, step=2) as peer:
        assert [peer() for _ in range(3)] == [3, 5, 7]
    assert peer.process.returncode == 0 and peer.errors.closed
