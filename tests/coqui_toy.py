"""A small checkpoint in coqui-tts' names and layouts; its numbers depend only on the names."""
import json
from math import prod
from pathlib import Path
from zlib import crc32

import numpy as np

from xtts_nb.config import XTTSConfig
from xtts_nb.models.convert import _expected_shapes, _name_map, _to_torch
from xtts_nb.data.text import train_tokenizer

WORDS = 'the old dog sleeps all day in the bay and every boat waits for wind'
SPELLINGS = {'new': ('parametrizations.weight.original0', 'parametrizations.weight.original1'),
             'old': ('weight_g', 'weight_v')}

def tokenizer():
    return train_tokenizer([WORDS], ['en', 'de'], size=64)

def config(small: bool = False) -> XTTSConfig:
    "A checkpoint that coqui-tts can build; `small` has a smaller voice than its classes allow."
    voice = dict(speaker=dict(filters=(8, 8, 8, 8), blocks=(1, 1, 2, 1), width=16),
                 decoder=dict(channels=32)) if small else {}
    return XTTSConfig.from_dict({'model': dict(
        **voice,
        dvae=dict(hidden=32, codebook_dim=16, codes=64, resnet_blocks=2),
        gpt=dict(num_layers=2, hidden_dim=64, num_heads=4, text_tokens=tokenizer().size, max_text_tokens=60,
                 max_audio_codes=90))})

def numbers(name: str, shape: tuple) -> np.ndarray:
    "Random numbers that depend on the name only, of a size that keeps activations near 1."
    random = np.random.RandomState(crc32(name.encode()))
    x = random.standard_normal(shape or (1,)).astype(np.float32).reshape(shape)
    if name.endswith('running_var'): return 1 + np.abs(x) / 4
    if len(shape) == 1:
        return x / 10 + (1 if name.endswith(('norm.weight', 'ln_1.weight', 'ln_2.weight', 'ln_f.weight',
                                             'gamma', 'bn1.weight', 'bn2.weight', 'downsample.1.weight'))
                         else 0)
    embedding = 'embedding' in name or name.endswith(('latents', 'embed'))
    return x * np.float32(0.5 if embedding else prod(shape[1:])**-0.5).__float__()

def tensors(cfg: XTTSConfig, spelling: str = 'new') -> dict:
    "`{file: {name: array}}` of the whole checkpoint."
    names = {here: (key, layout) for key, (here, layout) in _name_map(cfg.model).items()}
    files = {'model.pth': {}, 'dvae.pth': {}, 'mel_stats.pth': {}}
    for here, shape in _expected_shapes(cfg, tokenizer().start).items():
        pair = here + '_original1' in names and here.startswith('decoder/')
        (file, name), layout = names[here + '_original1' if pair else here]
        there = _to_torch(np.empty(shape, np.bool_), layout).shape
        if pair:
            length, direction = (name.replace(SPELLINGS['new'][1], s) for s in SPELLINGS[spelling])
            files[file][direction] = numbers(name, there) * 3
            files[file][length] = np.abs(numbers(name + 'g', (there[0], 1, 1))) / 4 + 0.3
        elif name: files[file][name] = numbers(name, there)
    files['model.pth']['mel_stats'] = files['mel_stats.pth'] = numbers('mel', (80,))**2 + 0.5
    for name in [n for n in files['model.pth'] if n.endswith('running_mean')]:
        files['model.pth'][name.replace('running_mean', 'num_batches_tracked')] = np.array(7)
    return files

def settings() -> dict:
    g = config().model.gpt
    audio = {'sample_rate': 22050, 'output_sample_rate': 24000}
    speech = dict(repetition_penalty=3.0, max_ref_len=2, gpt_cond_len=3, gpt_cond_chunk_len=1)
    return {'model': 'xtts', 'languages': ['en', 'de'], 'audio': audio, **speech, 'model_args': dict(
        gpt_layers=g.num_layers, gpt_n_model_channels=g.hidden_dim, gpt_n_heads=g.num_heads,
        gpt_number_text_tokens=g.text_tokens,
        gpt_max_text_tokens=g.max_text_tokens, gpt_max_audio_tokens=g.max_audio_codes,
        gpt_start_text_token=tokenizer().start,
        gpt_stop_text_token=0, gpt_num_audio_tokens=66, gpt_start_audio_token=64, gpt_stop_audio_token=65,
        gpt_use_masking_gt_prompt_approach=True, gpt_use_perceiver_resampler=True,
        decoder_input_dim=g.hidden_dim)}

def write_settings(folder: Path):
    "The two files that hold no tensors."
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(folder / 'vocab.json')
    (folder / 'config.json').write_text(json.dumps(settings()))
