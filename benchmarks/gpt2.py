"""Milliseconds of a training step of a plain GPT-2, in each mode of ours and in PyTorch.

    python benchmarks/gpt2.py [--torch-python PYTHON]
        --torch-python PYTHON   of an environment with PyTorch and transformers; default: leave them out
        --layers, --width, --heads, --batch-size, --rounds, --budget   as of `xtts-nb bench train`
        --tokens N         of each row
        --json, --record   one JSON object as the last line of stdout; a record in benchmarks/

coqui-tts may simply be slow. So this comparison leaves out everything that belongs to XTTS: a GPT-2 made of
our transformer blocks, with forward pass, backward pass and AdamW, on random tokens, against the GPT-2 of
`transformers` in PyTorch, eager and with `torch.compile`."""
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

from benchmarks.peer import (  # noqa: E402
    add_rounds, add_sizes, arguments, measuring, output, run, start, step_peer)
from xtts_nb.app.cli_bench import _sized  # noqa: E402
from xtts_nb.app.speed import _ARMS  # noqa: E402
from xtts_nb.bench import compare  # noqa: E402
from xtts_nb.config import XTTSConfig  # noqa: E402
from xtts_nb.models.gpt import TransformerBlock, causal_mask  # noqa: E402
from xtts_nb.models.xtts import POLICIES  # noqa: E402
from xtts_nb.train.step import AdamW, compile_step  # noqa: E402


def plain_gpt2(
    config: XTTSConfig,        # layers, width, heads of its GPT, and its precision
    tokens: int,               # L
    vocabulary: int = 1026,
):                             # (ids (B, L + 1)) -> loss
    "One update of a GPT-2 made of our blocks, without dropout, compiled as the training section says."
    gpt, training = config.model.gpt, config.training.gpt
    policy = POLICIES[training.precision]
    keras.utils.set_random_seed(training.seed)
    ids = keras.Input((tokens,), dtype='int32')
    embed = lambda n: keras.layers.Embedding(n, gpt.hidden_dim, keras.initializers.RandomNormal(stddev=0.02),
                                             dtype=policy)
    x, mask = embed(vocabulary)(ids) + embed(tokens)(keras.ops.arange(tokens)), causal_mask(tokens, tokens)
    for _ in range(gpt.num_layers):
        block = TransformerBlock(gpt.hidden_dim, gpt.num_heads, 0., (2 * gpt.num_layers)**-0.5, dtype=policy)
        x = block(x, mask)
    x = keras.layers.LayerNormalization(epsilon=1e-5, dtype=policy)(x)
    model = keras.Model(ids, keras.layers.Dense(vocabulary, dtype=policy)(x))
    weights, optimizer = model.trainable_variables, AdamW(model.trainable_variables, training)

    def step(ids):
        with tf.GradientTape() as tape:
            scores = tf.cast(model(ids[:, :-1]), 'float32')
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(ids[:, 1:], scores))
        optimizer.apply([tf.convert_to_tensor(g) for g in tape.gradient(loss, weights)], weights)
        return loss

    return compile_step(step, training)

def _torch_steps(threads, layers, width, heads, vocabulary, batch, tokens, mode):
    "The losses of training steps of the GPT-2 of `transformers`, without end."
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    gpt = GPT2LMHeadModel(GPT2Config(
        vocab_size=vocabulary, n_positions=tokens, n_embd=width, n_layer=layers, n_head=heads,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False, tie_word_embeddings=False)).to(device)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-4, betas=(0.9, 0.96), weight_decay=1e-2)
    ids = torch.randint(3, vocabulary, (batch, tokens + 1), device=device)

    def loss():
        with torch.autocast(device, torch.bfloat16, enabled='bf16' in mode): scores = gpt(ids[:, :-1]).logits
        return torch.nn.functional.cross_entropy(scores.float().flatten(0, 1), ids[:, 1:].flatten())

    if 'compile' in mode: loss = torch.compile(loss)
    while True:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        yield float(value.detach())

PLAIN_ARMS = {name: settings for name, settings in _ARMS.items() if name != 'eager'}
TORCH, TORCH_ARMS = 'PyTorch with transformers', ('torch', 'torch_compile', 'torch_bf16')

def gpt2_speed(
    config: XTTSConfig,
    tokens: int,                 # L
    rounds: int = 7,
    torch_python: str | Path | None = None,   # with PyTorch and transformers; default: leave them out
    progress=None,               # called with (done, total)
) -> list[dict]:                 # {name, step_ms, ratio, spread}
    "The step of a plain GPT-2 in all compiled modes, and that of PyTorch."
    gpt, B, vocabulary = config.model.gpt, config.data.batch_size, 1026
    ids = tf.constant(np.random.default_rng(0).integers(3, vocabulary, (B, tokens + 1)), tf.int32)
    steps = {name: plain_gpt2(config.replace(training={'gpt': changes}), tokens, vocabulary)
             for name, changes in PLAIN_ARMS.items()}
    sizes = dict(layers=gpt.num_layers, width=gpt.hidden_dim, heads=gpt.num_heads, batch=B, tokens=tokens,
                 vocabulary=vocabulary)
    variant = lambda loss: lambda: loss() is not None
    with ExitStack() as children:
        start = lambda mode: children.enter_context(
            step_peer(torch_python, _torch_steps, **sizes, mode=mode, needs=TORCH))
        theirs = {mode: start(mode) for mode in TORCH_ARMS} if torch_python else {}
        ours = {name: lambda step=step: float(step(ids)) for name, step in steps.items()}
        variants = {name: variant(loss) for name, loss in (theirs | ours).items()}
        return compare(variants, 'step_ms', rounds, progress=progress).rows()


def main():
    "The command line."
    parser = add_sizes(add_rounds(arguments(__doc__), 7))
    parser.add_argument('--tokens', type=int, default=512, help='of each row')
    parser.add_argument('--torch-python', help='of an environment with PyTorch and transformers')
    given = parser.parse_args()
    config = _sized(given.layers, given.width, given.heads, given.batch_size)
    start()
    with measuring(given) as tell:
        rows = gpt2_speed(config, given.tokens, given.rounds, given.torch_python, partial(tell, 'measure'))
    about = (f'GPT-2 {given.layers} x {given.width}, batch {given.batch_size}, '
             f'{given.tokens} tokens, no dropout')
    output(given, 'gpt2', {'rows': rows, 'model': about})


if __name__ == '__main__': run(main)
