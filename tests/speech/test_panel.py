"The panel: the sound of a press, and what is compiled."
import io

import numpy as np
import pytest
import soundfile
import tensorflow as tf

from xtts_nb.data.audio import synthetic_voice
from xtts_nb.speech import stream as streaming
from xtts_nb.speech.generate import Speaker
from xtts_nb.speech.panel import speech_panel

close = np.testing.assert_allclose
LOW, HIGH = synthetic_voice(1., 110.), synthetic_voice(1., 210.)
SETTINGS = {'max_seconds': 0.5, 'top_p': 1., 'repetition_penalty': 2.}

@pytest.fixture(scope='module')
def made(xtts):
    return speech_panel(Speaker(xtts, temperature=0.9, speed=1.1, **SETTINGS), {'low': LOW, 'high': HIGH})

def press(panel, **values) -> str:   # the message
    "Press the button with these settings."
    for name, value in values.items(): getattr(panel.controls, name).value = value
    panel.controls.button.click()
    assert not panel.controls.button.disabled
    return panel.controls.message.value

def test_a_press_speaks_and_other_settings_compile_nothing(made, xtts, monkeypatch):
    traced, step, function = [], streaming.advance_rows, tf.function
    monkeypatch.setattr(streaming, 'advance_rows', lambda *a, **k: traced.append(1) or step(*a, **k))
    monkeypatch.setattr(tf, 'function', lambda *f, jit_compile=None, **k: function(*f, **k))   # without XLA
    given = {'text': 'aa bb', 'voice': 'high', 'temperature': 0.6, 'speed': 1.25, 'seed': 3}
    message, first = press(made, **given), made.controls.player.value
    sound, rate = soundfile.read(io.BytesIO(first), dtype='float32')
    expected = Speaker(xtts, temperature=0.6, speed=1.25, **SETTINGS)('aa bb', 'en', HIGH, seed=3)
    close(sound, expected.clip(-1, 1), atol=1e-3)
    assert rate == 22050 and np.abs(sound).max() > 0.01
    assert message == f'{len(expected) / 22050:.2f} s at 22050 Hz, griffin-lim; functions compiled: 3'
    assert bytes(made.controls.picture.value[:4]) == b'\x89PNG'

    message = press(made, speed=2., seed=4, voice='low', temperature=0.)
    assert message.endswith('functions compiled: 0') and len(traced) == 1
    assert len(made.controls.player.value) < 0.7 * len(first)
