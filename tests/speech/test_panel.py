"The panel: attention by hand, the sound of a press, what is compiled, and what a user does wrong."
import io
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import soundfile
import tensorflow as tf

from xtts_nb.config import UserError
from xtts_nb.data.audio import synthetic_voice
from xtts_nb.models.gpt import GPT
from xtts_nb.speech import panel as page
from xtts_nb.speech import stream as streaming
from xtts_nb.speech.generate import Speaker
from xtts_nb.speech.voices import Voice
from xtts_nb.speech.long import TextPiece
from xtts_nb.speech.panel import attention_pass, speech_panel, text_attention
from xtts_nb.speech.voices import save_voice, voice_model

close = np.testing.assert_allclose
LOW, HIGH = synthetic_voice(1., 110.), synthetic_voice(1., 210.)
IDS, CODES = [5, 9, 6, 7], np.array([3, 1, 4, 1, 5])
VOICE = Voice(tf.constant(np.random.default_rng(0).normal(size=(4, 64)), tf.float32), None)
SETTINGS = {'max_seconds': 0.5, 'top_p': 1., 'repetition_penalty': 2.}


# --- attention ----------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def gpt(small):
    "A GPT whose attention is uneven."
    gpt = GPT(small, text_start=3)
    for v in gpt.trainable_variables: v.assign_add(keras.random.normal(v.shape, stddev=0.1, seed=len(v.path)))
    return gpt

def by_hand(gpt) -> np.ndarray:   # (layers, S, L)
    "The attention of each block in NumPy, head by head."
    norm = lambda x, layer: ((x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
                             * layer.gamma.numpy() + layer.beta.numpy())
    dense = lambda x, layer: x @ layer.kernel.numpy() + layer.bias.numpy()
    part = lambda ids, table, place: table.embeddings.numpy()[ids] + place.embeddings.numpy()[:len(ids)]
    x = np.concatenate([VOICE.prompt, part([3, *IDS, 0], gpt.text_embedding, gpt.text_position),
                        part([gpt.code_start, *CODES[:-1]], gpt.code_embedding, gpt.code_position)])
    found = []
    for block in gpt.blocks:
        heads, mixed = [], []
        for q, k, v in zip(*(np.split(y, gpt.cfg.heads, 1) for y in
                             np.split(dense(norm(x, block.attention_norm), block.qkv), 3, 1))):
            score = np.exp(q @ k.T / np.sqrt(q.shape[1])) * np.tri(len(x))
            heads.append(score / score.sum(1, keepdims=True))
            mixed.append(heads[-1] @ v)
        x = x + dense(np.concatenate(mixed, 1), block.project)
        y = dense(norm(x, block.mlp_norm), block.expand)
        gelu = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        x = x + dense(gelu, block.contract)
        found.append(np.mean(heads, 0)[-len(CODES):])
    return np.stack(found)

def test_attention_is_that_of_the_model(gpt):
    states, weights = attention_pass(gpt, IDS, VOICE.prompt, CODES)
    text, codes = tf.constant([[*IDS, 0, 0]]), tf.constant([CODES], tf.int32)
    _, expected = gpt.states(text, tf.constant([4]), codes, tf.constant([5]), VOICE.prompt[None])
    close(states, expected[0, :5], atol=1e-4)
    close(weights, by_hand(gpt), atol=1e-5)

@pytest.mark.parametrize('layers', [None, [1], slice(0, 1)], ids=str)
def test_attention_is_shared_out_over_the_text(gpt, layers):
    chosen = () if layers is None else (layers,)
    found = text_attention(SimpleNamespace(gpt=gpt), IDS, VOICE, CODES, *chosen)
    over_text = np.mean(by_hand(gpt)[layers or slice(None)], 0)[:, 5:9]
    close(found, over_text / over_text.sum(1, keepdims=True), atol=1e-5)
    assert found.std() > 0.01


# --- the picture --------------------------------------------------------------------------------------------

def drawn(xtts, gpt, names, pieces=1):
    "The axes of a second of sound at 24 kHz, spoken with five codes at double speed."
    bpe = SimpleNamespace(id_to_token=names.__getitem__)
    xtts = SimpleNamespace(gpt=gpt, config=xtts.config, tokenizer=SimpleNamespace(bpe=bpe))
    ids, wav = [*range(len(names))], np.tile(LOW, 2)[:24000]
    spoken = SimpleNamespace(wav=wav, ids=ids, codes=CODES, pieces=pieces)
    above, below = page._picture(SimpleNamespace(xtts=xtts, sample_rate=24000), spoken, VOICE, 2.).axes
    close(below.images[0].get_array(), text_attention(xtts, ids, VOICE, CODES).T, atol=1e-6)
    return above, below

def test_mel_and_attention_share_the_time(xtts, gpt):
    above, below = drawn(xtts, gpt, ['[en]', 'a', '[SPACE]', '字', '$b$'], pieces=2)
    (mel,), (attention,) = above.images, below.images
    close(below.get_xlim(), (0, 1), atol=1e-4)
    close(mel.get_extent(), [0, 1, 0, 80], atol=1e-4)
    close(attention.get_extent(), [0, 5 * 1024 / 22050 / 2, -0.5, 4.5])
    assert (mel.origin, attention.origin, attention.get_clim()[0]) == ('lower', 'lower', 0)
    close(mel.get_clim(), np.array([-12, 0]) + mel.get_array().max())
    assert mel.get_array().shape[0] == 80 and abs(mel.get_array().shape[1] - 22050 / 256) < 2
    assert [t.get_text() for t in below.get_yticklabels()] == ['[en]', 'a', '_', '3', '$b$']
    assert not below.get_yticklabels()[0].get_parse_math()
    assert 'piece 1 of 2' in below.get_title('left')

@pytest.mark.parametrize('tokens', [32, 33])
def test_many_tokens_are_counted(xtts, gpt, tokens):
    _, below = drawn(xtts, gpt, ['a'] * tokens)
    assert (len(below.get_yticks()) == 32) is (tokens == 32) and 'piece' not in below.get_title('left')


# --- the button ---------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def made(xtts):
    return speech_panel(Speaker(xtts, temperature=0.9, speed=1.1, **SETTINGS), {'low': LOW, 'high': HIGH})

def press(panel, **values) -> str:   # the message
    "Press the button with these settings."
    for name, value in values.items(): getattr(panel.controls, name).value = value
    panel.controls.button.click()
    assert not panel.controls.button.disabled
    return panel.controls.message.value

def shown(panel) -> bool: return panel.children[-1].layout.display is None

def test_the_panel_begins_with_the_settings_of_the_speaker(made):
    c = made.controls
    assert (c.temperature.value, c.speed.value, c.seed.value) == (0.9, 1.1, 0)
    assert [(s.min, s.max) for s in (c.temperature, c.speed, c.seed)] == [(0, 1.5), (0.5, 2), (0, 2**31 - 1)]
    assert c.language.options == ('en', 'auto') and c.voice.options == ('low', 'high')
    assert not shown(made) and not c.player.loop

def test_a_press_speaks_and_other_settings_compile_nothing(made, xtts, monkeypatch):
    traced, step, function = [], streaming.advance_rows, tf.function
    monkeypatch.setattr(streaming, 'advance_rows', lambda *a, **k: traced.append(1) or step(*a, **k))
    monkeypatch.setattr(tf, 'function', lambda *f, jit_compile=None, **k: function(*f, **k))   # without XLA
    given = {'text': 'aa bb', 'voice': 'high', 'temperature': 0.6, 'speed': 1.25, 'seed': 3}
    message, first = press(made, **given), made.controls.player.value
    sound, rate = soundfile.read(io.BytesIO(first), dtype='float32')
    expected = Speaker(xtts, temperature=0.6, speed=1.25, **SETTINGS)('aa bb', 'en', HIGH, seed=3)
    close(sound, expected.clip(-1, 1), atol=1e-3)
    assert rate == 22050 and np.abs(sound).max() > 0.01 and shown(made)
    assert message == f'{len(expected) / 22050:.2f} s at 22050 Hz, griffin-lim; functions compiled: 3'
    assert bytes(made.controls.picture.value[:4]) == b'\x89PNG'

    message = press(made, speed=2., seed=4, voice='low', temperature=0.)
    assert message.endswith('functions compiled: 0') and len(traced) == 1
    assert len(made.controls.player.value) < 0.7 * len(first)

def test_pieces_are_joined_with_their_pauses(monkeypatch):
    "A piece with nothing to say adds nothing; the row of an interrupted text is freed."
    class Rows:
        speaker = SimpleNamespace(sample_rate=100, _ids=lambda text, language: [len(text), language])
        free, log = [], []
        def release(self, row): self.log.append(('released', row))
        def sounds(self, *given):
            self.log.append(given)
            self.last = SimpleNamespace(codes=[[given[0][0]], [1]])
            yield np.ones(3)
            yield np.full(2, 0.5)
    pieces = [TextPiece('a', 'en', 0.2), TextPiece('-', 'en', 9.), TextPiece('bb', 'de', 0.7)]
    monkeypatch.setattr(page, 'spoken_pieces', lambda *given: (pieces, [1, 0, 2]))
    spoken = page._speak(Rows(), 'text', 'auto', 'voice', 7, 2.)
    assert Rows.log == [('released', 0), ([1, 'en'], 'voice', 7, 2.), ([2, 'de'], 'voice', 7, 2.)]
    assert spoken.wav.tolist() == [1., 1., 1., .5, .5] + [0.] * 10 + [1., 1., 1., .5, .5]
    assert (spoken.pieces, spoken.ids, spoken.codes.tolist()) == (2, [1, 'en'], [1, 1])
    monkeypatch.setattr(Rows, 'sounds', lambda *given: [np.ones(3)])
    monkeypatch.setattr(Rows, 'last', SimpleNamespace(codes=[[]]), raising=False)
    with pytest.raises(UserError, match='ended before its first code'):
        page._speak(Rows(), 'text', 'en', 'voice', 7, 2.)


# --- what goes wrong ----------------------------------------------------------------------------------------

def test_what_cannot_be_spoken_is_one_line(made, monkeypatch):
    made.children[-1].layout.display = None
    assert press(made, text=' ') == 'The text is empty; give the model something to say.'
    assert not shown(made)
    assert '"&lt;Ж"' in press(made, text='<Ж')
    monkeypatch.setattr(page, '_speak', lambda *given: 1 / 0)
    assert press(made, text='aa') == 'Failed.'

def test_a_folder_of_voices(xtts, tmp_path, monkeypatch):
    with pytest.raises(UserError, match='holds no voice; add one with xtts-nb voices add'):
        speech_panel(Speaker(xtts), tmp_path)
    for name, value in (('one', 1.), ('two', 2.)):
        voice = Voice(np.full((4, 64), value), None)
        save_voice(tmp_path / f'{name}.safetensors', voice, voice_model(xtts), [])
    (tmp_path / 'broken.safetensors').write_text('no voice')
    panel, used = speech_panel(Speaker(xtts), tmp_path), []
    assert panel.controls.voice.options == ('one', 'two')
    monkeypatch.setattr(page, '_speak', lambda *given: used.append(given[3]) or 1 / 0)
    press(panel, voice='two', text='aa')
    assert (used[0].prompt.numpy() == 2).all()
    (tmp_path / 'one.safetensors').unlink()
    assert 'has no voice "one"' in press(panel, voice='one')
