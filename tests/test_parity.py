"""Every stage against what coqui-tts computed from the same small checkpoint, stored, so that PyTorch is not needed."""
import sys
from pathlib import Path

import numpy as np
import pytest

from xtts_nb import convert, parity
from xtts_nb.config import UserError
from xtts_nb.model import XTTS

sys.path.insert(0, str(Path(__file__).parent))
import coqui_toy
from make_parity_data import inputs as make_inputs, utterance


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "The toy checkpoint, converted."
    there, out = tmp_path_factory.mktemp('coqui'), tmp_path_factory.mktemp('ours') / 'model'
    coqui_toy.write_settings(there)
    for name in ('model.pth', 'dvae.pth', 'mel_stats.pth'): (there / name).touch()
    with pytest.MonkeyPatch.context() as m:
        files = coqui_toy.tensors(coqui_toy.config())
        m.setattr(convert, 'read_pth', lambda path: files[path.name])
        convert.from_coqui(there, out)
    return out


@pytest.fixture(scope='module')
def inputs(): return make_inputs()


@pytest.fixture(scope='module')
def theirs():
    with np.load(Path(__file__).parent / 'data' / 'parity.npz') as file: return dict(file)


@pytest.fixture(scope='module')
def xtts(folder): return XTTS.load(folder, parity=True)


def check(rows): assert all(r['ok'] for r in rows), [r for r in rows if not r['ok']]


def test_features(folder, inputs, theirs, xtts): check(parity.feature_rows(inputs, theirs, xtts.config))


def test_dvae(inputs, theirs, xtts): check(parity.dvae_rows(xtts.dvae, inputs, theirs))


def test_gpt(inputs, theirs, xtts): check(parity.gpt_rows(xtts.gpt, inputs, theirs))


def test_latents(inputs, theirs, xtts): check(parity.latents_rows(xtts, inputs, theirs))


def test_voice(folder, inputs, theirs, xtts): check(parity.voice_rows(folder, xtts.config, inputs, theirs))


def test_greedy(inputs, theirs, xtts): check(parity.greedy_rows(xtts.gpt, inputs, theirs))


def test_a_whole_utterance(xtts):
    "Two recordings and a sentence in, sound out."
    with np.load(Path(__file__).parent / 'data' / 'utterance.npz') as file: theirs = dict(file)
    check(parity.utterance_rows(xtts, utterance(), theirs))


def test_habits_show_without_parity(folder, inputs, theirs):
    "Mended, the mask of the text's STOP and the number of STOPs make another loss."
    mended = XTTS.load(folder)
    batch = parity.gpt_batch(inputs, theirs)
    from xtts_nb.model import token_losses
    parts = token_losses(mended.gpt, batch)
    ours = {name: float(parts[f'{name}_loss'] / parts[f'{name}_count']) for name in ('text', 'code')}
    assert abs(ours['code'] / theirs['code_loss'] - 1) > 1e-3
    assert int(parts['code_count']) == sum(inputs['code_length'] + 1)


def test_a_changed_weight_is_seen(inputs, theirs, xtts):
    kernel = xtts.gpt.blocks[1].expand.kernel
    before = kernel.numpy()
    kernel.assign(before * 1.01)
    rows = parity.gpt_rows(xtts.gpt, inputs, theirs)
    kernel.assign(before)
    assert not next(r for r in rows if r['stage'] == 'code logits')['ok']


def test_compare_says_shapes():
    row = parity.compare('x', np.ones(3), np.ones(4))
    assert not row['ok'] and '(3,)' in row['note'] and '(4,)' in row['note']


def test_reference_names_a_python_that_is_none(tmp_path):
    with pytest.raises(UserError, match='no-python'): parity.reference(tmp_path, tmp_path / 'no-python', {'x': np.ones(1)})


def test_reference_tells_the_last_words(tmp_path):
    with pytest.raises(UserError, match='coqui-tts 0.28 failed'): parity.reference(tmp_path, sys.executable, {'x': np.ones(1)})
