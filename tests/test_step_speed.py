"Steps beside those of other libraries: a real process and a real step; only the other library's own code is replaced."
import sys

import pytest

from xtts_nb import step_speed as page
from xtts_nb.config import UserError
from xtts_nb.step_speed import PLAIN_ARMS, TORCH_ARMS, gpt2_speed


def slow_steps(threads, layers, width, heads, vocabulary, batch, tokens, mode):
    "In place of the steps of PyTorch: 30 ms each, the loss far from 1; another size than was asked for is an error."
    import time
    if (layers, width, batch, tokens) != (1, 64, 4, 8) or threads < 0: raise ValueError(f'{layers} {width} {batch} {tokens}')
    while True: time.sleep(0.03); yield 7.


def wrong_steps(mode, **sizes):
    raise ValueError('no such mode ' + mode)
    yield


@pytest.fixture
def one_arm(small, monkeypatch):
    "Settings of one block, and one mode of ours; `one_arm` compares it with the steps in another process."
    monkeypatch.setattr(page, 'PLAIN_ARMS', {'graph': PLAIN_ARMS['graph']})
    config = small.replace(model={'gpt': {'layers': 1}})
    def compare(steps, rounds=3):
        monkeypatch.setattr(page, '_torch_steps', steps)
        return gpt2_speed(config, 8, rounds=rounds, torch_python=sys.executable)
    return compare


def test_a_peer_s_answer_is_one_step_whatever_its_loss(one_arm):
    rows = {row['name']: row for row in one_arm(slow_steps)}
    assert set(rows) == {'graph', *TORCH_ARMS}
    for name in TORCH_ARMS: assert rows[name]['step_ms'] >= 30, 'a loss of 7 is not taken for 7 steps'
    assert rows['graph']['step_ms'] > 0 and all(row['spread'] >= 0 for row in rows.values())


def test_a_peer_that_fails_is_named(one_arm):
    with pytest.raises(UserError, match=r'transformers failed \(ValueError: no such mode torch'): one_arm(wrong_steps)


@pytest.mark.parametrize('answer', [{'positions': 62, 'dropout': 0.}, {'positions': 59, 'dropout': 0.1}])
def test_other_work_is_not_compared(answer):
    page.check_same_work({'loss': 1., 'positions': 59, 'dropout': 0.}, 59)
    with pytest.raises(UserError, match=f'coqui-tts computed {answer["positions"]} positions with dropout {answer["dropout"]}'):
        page.check_same_work({'loss': 1.} | answer, 59)
