"""Milliseconds of one compiled training step in bfloat16, as the loop calls it and with a wait after each.

    python benchmarks/one_step.py [--codes 220]
        --layers, --width, --heads, --batch-size   of the GPT and the batch
        --codes N         audio codes of each clip, with 120 text tokens
        --rounds, --budget  as of `xtts-nb bench train`
        --json, --record  one JSON object as the last line of stdout; a record in benchmarks/

One process measures one program, so that `XLA_FLAGS` can differ between two runs. A large difference between
the two times is the part of the host."""
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

import tensorflow as tf  # noqa: E402

from benchmarks.peer import add_rounds, add_sizes, arguments, measuring, output, run, start  # noqa: E402
from xtts_nb.app.cli_bench import _sized  # noqa: E402
from xtts_nb.bench import compare, wait_for  # noqa: E402
from xtts_nb.models.xtts import step_flops  # noqa: E402
from xtts_nb.train.step import first_steps, random_batch, step_modes  # noqa: E402

TEXT, STEPS = 120, 20


def main():
    parser = add_rounds(add_sizes(arguments(__doc__)), 3)
    parser.add_argument('--codes', type=int, default=220)
    given = parser.parse_args()
    start()
    config = _sized(given.layers, given.width, given.heads, given.batch_size)
    batch, number = random_batch(config, TEXT, given.codes), tf.constant(0)
    steps = step_modes(config, 5, {'xla_bf16': {'mode': 'xla', 'precision': 'bfloat16'}})
    (first,) = first_steps(steps, batch).values()
    (step,) = steps.values()

    def variant(many):
        def call():
            for _ in range(many): result = step(batch, number)
            wait_for(result)
            return many
        return call

    with measuring(given) as tell:
        timed = compare({'in a row': variant(STEPS), 'waited for': variant(1)}, 'step_ms', given.rounds,
                        progress=lambda done, total: tell('steps', done, total))
    flops = step_flops(config, given.batch_size, TEXT, given.codes)
    rows = [row | {'tflops': round(flops / row['step_ms'] / 1e9, 2)} for row in timed.rows()]
    output(given, 'one_step', {'rows': rows, 'first_s': first, 'flags': os.environ.get('XLA_FLAGS', ''),
                               'model': f'GPT {given.layers} x {given.width}, batch {given.batch_size}, '
                                        f'{given.codes} codes'})


if __name__ == '__main__': run(main)
