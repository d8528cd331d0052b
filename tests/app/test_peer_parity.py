"Another library in another Python: its answers, its prompts, and its failures."
import sys

import pytest

from xtts_nb.config import UserError
from xtts_nb.app.parity import Peer


def agreement():
    import os
    while True: yield os.environ.get('COQUI_TOS_AGREED')


def asks_for_agreement():
    "As coqui-tts does before it loads a model whose licence must be agreed to."
    import os
    if os.environ.get('COQUI_TOS_AGREED') != '1':
        print(' > You must confirm the following:')
        answer = input('"I agree to the terms of the non-commercial licence" - [y/n]')
        if answer != 'y': raise Exception('You must agree to the terms of service to use this model.')
    while True: yield 'loaded'


def reads_its_input():
    while True: yield input()


def counts(start, step):
    print('this is no answer')
    while True:
        yield start
        start += step


@pytest.mark.parametrize('set_to', [None, '0', '1'])
def test_only_the_user_agrees_to_terms(monkeypatch, set_to):
    if set_to is None: monkeypatch.delenv('COQUI_TOS_AGREED', raising=False)
    else: monkeypatch.setenv('COQUI_TOS_AGREED', set_to)
    with Peer(sys.executable, agreement, needs='Python') as peer: assert peer() == set_to


def test_a_library_that_asks_for_agreement_fails_with_the_remedy(monkeypatch):
    monkeypatch.delenv('COQUI_TOS_AGREED', raising=False)
    with Peer(sys.executable, asks_for_agreement) as peer, pytest.raises(UserError) as e: peer()
    assert str(e.value) == (f'{sys.executable}: coqui-tts 0.28 asks for agreement to its terms; '
                            'read them, and if you agree, set COQUI_TOS_AGREED=1 and run this again.')
    monkeypatch.setenv('COQUI_TOS_AGREED', '1')
    with Peer(sys.executable, asks_for_agreement) as peer: assert peer() == 'loaded'


def test_the_library_cannot_read_the_lines_of_the_peer():
    with Peer(sys.executable, reads_its_input, needs='Python') as peer, \
            pytest.raises(UserError, match=r'Python failed \(EOFError.*\); check that environment'): peer()


def ends(stderr):
    import os
    os.write(2, stderr.encode())
    os._exit(3)
    yield


@pytest.mark.parametrize('stderr, error', [
    ('', 'no reason given'), ('first\nlast\n', 'last'),
    ('x.OddError: a\nValueErrors\nBadException\nlast', 'BadException'),
    ('OddError: no space before', 'OddError: no space before'), ('an Error\nlast', 'last'),
    ('Exception: You must agree to the terms', 'Exception: You must agree to the terms')])
def test_the_last_error_is_quoted(monkeypatch, stderr, error):
    "Or the last line where none looks like one; whoever has agreed to the terms gets any other error."
    monkeypatch.setenv('COQUI_TOS_AGREED', '1')
    with Peer(sys.executable, ends, needs='Python',
              stderr=stderr) as peer, pytest.raises(UserError) as e: peer()
    assert str(e.value) == f'{sys.executable}: Python failed ({error}); check that environment.'


def test_one_answer_per_call_without_prints():
    with Peer(sys.executable, counts, needs='Python', start=3, step=2) as peer:
        assert [peer() for _ in range(3)] == [3, 5, 7]
    assert peer.process.returncode == 0 and peer.errors.closed


def test_a_missing_python():
    with pytest.raises(UserError, match='^no-such-python: cannot be run; give the Python of coqui-tts 0.28'):
        Peer('no-such-python', agreement)
