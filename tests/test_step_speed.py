"Steps beside those of other libraries: each call is one step."
import time
from contextlib import nullcontext

import numpy as np
import tensorflow as tf

from xtts_nb import step_speed as page
from xtts_nb.step_speed import PLAIN_ARMS, TORCH_ARMS, gpt2_speed


def test_a_peers_answer_is_a_loss_and_not_a_number_of_steps(small, monkeypatch):
    def step():
        time.sleep(0.02)
        return 7.
    monkeypatch.setattr(page, 'step_peer', lambda *how, **sizes: nullcontext(step))
    monkeypatch.setattr(page, 'plain_gpt2', lambda *how: lambda ids: tf.constant(np.float32(ids.shape[0] / 8)))
    rows = {row['name']: row['step_ms'] for row in gpt2_speed(small, 8, rounds=3, torch_python='some python')}
    assert set(rows) == {*PLAIN_ARMS, *TORCH_ARMS} and all(rows[name] >= 20 for name in TORCH_ARMS)
