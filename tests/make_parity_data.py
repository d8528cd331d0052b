"""Writes tests/stored/parity.npz and utterance.npz, what coqui-tts computes from the toy checkpoint.

python tests/make_parity_data.py PYTHON_WITH_COQUI_TTS    (in an environment with the `convert` extra)
"""
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import coqui_toy

from benchmarks.parity import coqui_outputs
from xtts_nb.models.convert import _write_pth

HERE = Path(__file__).parent

def inputs():
    from benchmarks.parity import make_inputs
    from xtts_nb.data.audio import synthetic_voice
    cfg = coqui_toy.config().model
    return make_inputs([synthetic_voice(0.4)], cfg.gpt.text_tokens, cfg.gpt.hidden_dim, cfg.dvae.codes,
                       states=6)

def utterance():
    "Two references in pieces of a second; the first is longer than the part that is used."
    from benchmarks.parity import utterance_inputs
    from xtts_nb.data.audio import synthetic_voice
    return utterance_inputs([synthetic_voice(2.2, 100), synthetic_voice(1.6, 190)], ['en', 'de'], codes=16)

def main(coqui_python):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        coqui_toy.write_settings(folder)
        files = coqui_toy.tensors(coqui_toy.config())
        # its window and filters, which coqui-tts keeps as tensors
        speaker = 'hifigan_decoder.speaker_encoder.torch_spec.'
        mel = {'0.filter': np.array([[[-0.97, 1]]], np.float32)}
        files['model.pth'] |= {speaker + k: v for k, v in mel.items()}
        files['model.pth'] |= {speaker + k: v for k, v in speaker_mel().items()}
        _write_pth(folder / 'model.pth', {'model': files['model.pth']})
        _write_pth(folder / 'dvae.pth', files['dvae.pth'])
        _write_pth(folder / 'mel_stats.pth', files['mel_stats.pth'])
        theirs = coqui_outputs(folder, coqui_python, inputs() | utterance())
    said = {k: theirs.pop(k) for k in list(theirs) if k.startswith('utterance_')}
    for name, arrays in (('parity', theirs), ('utterance', said)):
        np.savez_compressed(HERE / 'stored' / f'{name}.npz', **arrays)
        print({k: v.shape for k, v in arrays.items()}, (HERE / 'stored' / f'{name}.npz').stat().st_size)

def speaker_mel():
    from xtts_nb.data.audio import _mel_triangles
    filters = _mel_triangles(512, 16000, 64, 8000.)[0].astype(np.float32)
    window = 0.54 - 0.46 * np.cos(2 * np.pi * np.arange(400) / 400)
    return {'1.mel_scale.fb': filters, '1.spectrogram.window': window.astype(np.float32)}

if __name__ == '__main__': main(sys.argv[1])
