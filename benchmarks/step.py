"""Milliseconds of a training step of coqui-tts, beside ours in each mode.

    python benchmarks/step.py [--coqui-python PYTHON]
        --coqui-python PYTHON   of an environment with coqui-tts 0.28; default: leave it out
        --layers, --width, --heads, --batch-size, --text-tokens, --codes, --rounds, --budget
                           as of `xtts-nb bench train`
        --json, --record   one JSON object as the last line of stdout; a record in benchmarks/

coqui-tts does the same work with its own model of the same size, in PyTorch: the same lengths, forward pass,
backward pass, gradient clipping and AdamW, on as many threads, one step per request. The same work means no
dropout on either side and the same number of positions in the transformer. coqui-tts adds three codes to each
clip, so it receives three fewer. With each step it reports the number of positions and its largest dropout;
both are compared with ours before the measurement, and both are in the record."""
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

from benchmarks.peer import (  # noqa: E402
    OtherPython, add_rounds, add_sizes, arguments, measuring, output, run, start, step_peer)
from xtts_nb.app.cli_bench import _sized  # noqa: E402
from xtts_nb.app.speed import _step_positions, step_speed  # noqa: E402
from xtts_nb.config import UserError, XTTSConfig  # noqa: E402


def _coqui_steps(threads, layers, width, heads, vocabulary, batch, text, codes, frames):
    "Without end, of each training step of coqui-tts's GPT: loss over the codes, positions, largest dropout."
    import torch
    from TTS.tts.layers.xtts.gpt import GPT
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    gpt = GPT(layers=layers, model_dim=width, heads=heads, number_text_tokens=vocabulary, max_text_tokens=402,
              max_mel_tokens=605, num_audio_tokens=1026, start_audio_token=1024, stop_audio_token=1025,
              use_perceiver_resampler=True)
    gpt, counts = gpt.to(device).train(), {}
    dropouts = [m for m in gpt.modules() if isinstance(m, torch.nn.modules.dropout._DropoutNd)]
    for m in dropouts: m.p = 0.
    count = lambda module, _, named: counts.update(positions=named['inputs_embeds'].shape[1])
    gpt.gpt.register_forward_pre_hook(count, with_kwargs=True)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-4, betas=(0.9, 0.96), weight_decay=1e-2)
    clips = [torch.randint(3, 250, (batch, text)), torch.full((batch,), text),
             torch.randint(0, 1024, (batch, codes)), torch.full((batch,), codes * 1024),
             torch.randn(batch, 1, 80, frames)]
    while True:
        text_loss, code_loss, _ = gpt(*(x.to(device) for x in clips))
        optimizer.zero_grad()
        (0.01 * text_loss + code_loss).backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        yield {'loss': float(code_loss.detach()), 'dropout': max(m.p for m in dropouts), **counts}

def coqui_step(python: str | Path, config: XTTSConfig, text: int, codes: int) -> OtherPython:
    "The training step of coqui-tts at these sizes; a call returns code loss, positions and dropout."
    gpt = config.model.gpt
    return step_peer(python, _coqui_steps, layers=gpt.num_layers, width=gpt.hidden_dim, heads=gpt.num_heads,
                     vocabulary=gpt.text_tokens, batch=config.data.batch_size, text=text, codes=codes - 3,
                     frames=config.data.reference_frames)

def check_same_work(result: dict, positions: int):
    "Raise `UserError` unless a step of coqui-tts computed `positions` positions without dropout."
    if (result['positions'], result['dropout']) != (positions, 0.):
        raise UserError(f'coqui-tts computed {result["positions"]} positions with dropout {result["dropout"]}'
                        f', and we compute {positions} without; compare with coqui-tts 0.28.')


def main():
    "The command line."
    parser = add_sizes(add_rounds(arguments(__doc__), 7))
    parser.add_argument('--text-tokens', type=int, default=120, help='of each clip')
    parser.add_argument('--codes', type=int, default=220, help='of each clip')
    parser.add_argument('--coqui-python', help='of an environment with coqui-tts 0.28')
    given = parser.parse_args()
    config = _sized(given.layers, given.width, given.heads, given.batch_size)
    sizes = given.text_tokens, given.codes
    start()
    with (coqui_step(given.coqui_python, config, *sizes) if given.coqui_python else nullcontext() as theirs,
          measuring(given) as tell):
        if theirs: check_same_work(theirs(), _step_positions(config, *sizes))
        rows = step_speed(config, *sizes, given.rounds, {'coqui': theirs} if theirs else None,
                          partial(tell, 'measure'))
    about = (f'GPT {given.layers} x {given.width}, batch {given.batch_size}, '
             f'{sizes[0]} text tokens, '
             f'{sizes[1]} codes, no dropout')
    output(given, 'step_speed', {'rows': rows, 'model': about})


if __name__ == '__main__': run(main)
