"""Milliseconds of one compiled training step in bfloat16, as the loop calls it and with a wait after each.

    python benchmarks/one_step.py [--codes 220]
        --layers, --width, --heads, --batch-size   of the GPT and the batch
        --codes N         audio codes of each clip, with 120 text tokens
        --dropout         with the dropout of the settings; default: without
        --json, --record  one JSON object as the last line of stdout; a record in benchmarks/

One process measures one program, so that `XLA_FLAGS` can differ between two runs. A large difference between
the two times is the part of the host."""
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

import tensorflow as tf  # noqa: E402

from benchmarks.peer import add_sizes, arguments, output, run, start  # noqa: E402
from xtts_nb.app.cli_train import _sized  # noqa: E402
from xtts_nb.bench import wait_for  # noqa: E402
from xtts_nb.models.gpt import GPT  # noqa: E402
from xtts_nb.models.xtts import step_flops  # noqa: E402
from xtts_nb.train.step import compile_step, random_batch, Update  # noqa: E402

TEXT, STEPS = 120, 20


def seconds_of(call, many: int) -> float:
    "The mean time of calls in a row, until the last result has arrived."
    begun = time.perf_counter()
    for _ in range(many): result = call()
    wait_for(result)
    return (time.perf_counter() - begun) / many


def main():
    parser = add_sizes(arguments(__doc__))
    parser.add_argument('--codes', type=int, default=220)
    parser.add_argument('--dropout', action='store_true')
    given = parser.parse_args()
    start()
    config = _sized(given.layers, given.width, given.heads, given.batch_size).replace(
        model={'gpt': {} if given.dropout else {'dropout': 0., 'code_noise': 0.}},
        training={'gpt': {'precision': 'bfloat16', 'mode': 'xla'}})
    training = config.training.gpt
    batch, number = random_batch(config, TEXT, given.codes), tf.constant(0)
    step = compile_step(Update(GPT(config, 5, dtype='mixed_bfloat16'), training), training)
    call = lambda: step(batch, number)
    first = seconds_of(call, 1)
    seconds_of(call, 3)
    in_a_row = min(seconds_of(call, STEPS) for _ in range(3))
    waited = statistics.median(seconds_of(call, 1) for _ in range(STEPS))
    rows = [{'name': 'xla_bf16', 'step_ms': round(1e3 * in_a_row, 2), 'waited_ms': round(1e3 * waited, 2),
             'tflops': round(step_flops(config, given.batch_size, TEXT, given.codes) / in_a_row / 1e12, 2),
             'first_s': round(first, 1)}]
    output(given, 'one_step', {'rows': rows, 'flags': os.environ.get('XLA_FLAGS', ''), 'model':
           f'GPT {given.layers} x {given.width}, batch {given.batch_size}, {given.codes} codes'})


if __name__ == '__main__': run(main)
