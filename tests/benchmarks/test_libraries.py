"Other libraries in another Python: the same work, answers one by one, and failures that name their reason."
import sys

import numpy as np
import pytest

from benchmarks import gpt2, step
from benchmarks.gpt2 import gpt2_speed, PLAIN_ARMS, TORCH_ARMS
from benchmarks.loaders import OneMelReader
from benchmarks.peer import Peer, run
from xtts_nb.config import UserError
from xtts_nb.data.native import BatchPlan, batches_of, MelReader

def ends(stderr):
    import os
    os.write(2, stderr.encode())
    os._exit(3)
    yield


def asks_for_agreement():
    "As coqui-tts does before it loads a model whose licence must be agreed to."
    import os
    if os.environ.get('COQUI_TOS_AGREED') != '1':
        print(' > You must confirm the following:')
        answer = input('"I agree to the terms of the non-commercial licence" - [y/n]')
        if answer != 'y': raise Exception('You must agree to the terms of service to use this model.')
    while True: yield 'loaded'

@pytest.mark.parametrize('stderr, error', [
    ('', 'no reason given'), ('first\nlast\n', 'last'),
    ('x.OddError: a\nValueErrors\nBadException\nlast', 'BadException'), ('an Error\nlast', 'last')])
def test_the_last_error_is_quoted(stderr, error):
    "Or the last line where none looks like one."
    with Peer(sys.executable, ends, needs='Python', stderr=stderr) as peer, \
            pytest.raises(UserError) as e: peer()
    assert str(e.value) == f'{sys.executable}: Python failed ({error}); check that environment.'

def test_only_the_user_agrees_to_terms(monkeypatch, capsys):
    monkeypatch.delenv('COQUI_TOS_AGREED', raising=False)
    with Peer(sys.executable, asks_for_agreement) as peer, pytest.raises(UserError) as e: peer()
    assert 'set COQUI_TOS_AGREED=1' in str(e.value)
    monkeypatch.setenv('COQUI_TOS_AGREED', '1')
    with Peer(sys.executable, asks_for_agreement) as peer: assert peer() == 'loaded'
    def main(): Peer('no-such-python', asks_for_agreement)
    with pytest.raises(SystemExit) as end: run(main)   # as of a script
    assert end.value.code == 2 and 'no-such-python: cannot be run' in capsys.readouterr().err


# --- steps --------------------------------------------------------------------------------------------------

def slow_steps(threads, layers, width, heads, vocabulary, batch, tokens, mode):
    "In place of the steps of PyTorch: 30 ms each, the loss 7 or 0; other sizes are an error."
    import time
    if (layers, width, batch, tokens) != (1, 64, 4, 8) or threads < 0:
        raise ValueError(f'{layers} {width} {batch} {tokens}')
    while True:
        time.sleep(0.03)
        yield 7. * (mode == 'torch')

@pytest.mark.slow
def test_the_answer_of_another_library_is_one_step_whatever_its_loss(small, monkeypatch):
    monkeypatch.setattr(gpt2, 'PLAIN_ARMS', {'graph': PLAIN_ARMS['graph']})
    monkeypatch.setattr(gpt2, '_torch_steps', slow_steps)
    config = small.replace(model={'gpt': {'num_layers': 1}})
    rows = {row['name']: row for row in gpt2_speed(config, 8, rounds=3, torch_python=sys.executable)}
    assert set(rows) == {'graph', *TORCH_ARMS}
    for name in TORCH_ARMS: assert rows[name]['step_ms'] >= 30, 'a loss of 7 is not taken for 7 steps'
    assert rows['graph']['step_ms'] > 0 and all(row['spread'] >= 0 for row in rows.values())

def test_other_work_is_not_compared():
    step.check_same_work({'loss': 1., 'positions': 59, 'dropout': 0.}, 59)
    for other in ({'positions': 62, 'dropout': 0.}, {'positions': 59, 'dropout': 0.1}):
        with pytest.raises(UserError, match=f'{other["positions"]} positions'):
            step.check_same_work({'loss': 1.} | other, 59)


# --- loaders ------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_one_mel_is_the_mel_of_both(prepared, small, stats):
    plan = BatchPlan(prepared, small.data)
    one, both = (next(iter(batches_of(kind(plan, stats), plan.data))) for kind in (OneMelReader, MelReader))
    assert 'reference' not in one and np.allclose(one['mel'], both['mel'], atol=1e-4)
