"Other libraries in another Python: the same work, answers one by one, and failures that name their reason."
import sys

import pytest

from benchmarks import step
from benchmarks.peer import OtherPython, run
from xtts_nb.config import UserError

def asks_for_agreement():
    "As coqui-tts does before it loads a model whose licence must be agreed to."
    import os
    if os.environ.get('COQUI_TOS_AGREED') != '1':
        print(' > You must confirm the following:')
        answer = input('"I agree to the terms of the non-commercial licence" - [y/n]')
        if answer != 'y': raise Exception('You must agree to the terms of service to use this model.')
    while True: yield 'loaded'

def test_only_the_user_agrees_to_terms(monkeypatch, capsys):
    monkeypatch.delenv('COQUI_TOS_AGREED', raising=False)
    with OtherPython(sys.executable, asks_for_agreement) as peer, pytest.raises(UserError) as e: peer()
    assert 'set COQUI_TOS_AGREED=1' in str(e.value)
    monkeypatch.setenv('COQUI_TOS_AGREED', '1')
    with OtherPython(sys.executable, asks_for_agreement) as peer: assert peer() == 'loaded'
    def main(): OtherPython('no-such-python', asks_for_agreement)
    with pytest.raises(SystemExit) as end: run(main)   # as of a script
    assert end.value.code == 2 and 'no-such-python: cannot be run' in capsys.readouterr().err

# --- steps --------------------------------------------------------------------------------------------------

def test_other_work_is_not_compared():
    step.check_same_work({'loss': 1., 'positions': 59, 'dropout': 0.}, 59)
    for other in ({'positions': 62, 'dropout': 0.}, {'positions': 59, 'dropout': 0.1}):
        with pytest.raises(UserError, match=f'{other["positions"]} positions'):
            step.check_same_work({'loss': 1.} | other, 59)

# --- loaders ------------------------------------------------------------------------------------------------
