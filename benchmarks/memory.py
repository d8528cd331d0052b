"""The memory that training takes on a GPU, as TensorFlow's allocator reports it, beside our estimate.

    python benchmarks/memory.py
        --gigabytes N     that each trial may take; three run at once; default: 24
        --json, --record  one JSON object as the last line of stdout; a record in benchmarks/

The released model, clips of 200 text tokens and 250 codes, under XLA, in bfloat16 unless a row says
otherwise. Each row is a process of its own that makes two updates, as `xtts-nb find batch-size` does."""
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

import tensorflow as tf  # noqa: E402

from benchmarks.peer import arguments, output, run  # noqa: E402
from xtts_nb.config import UserError, XTTSConfig  # noqa: E402
from xtts_nb.train.memory import memory_needs, _run_trial  # noqa: E402

TEXT, CODES, AT_ONCE = 200, 250, 3
CASES = {'batch 2': (2, {}), 'batch 8': (8, {}),
         'batch 8, checkpointing': (8, {'gradient_checkpointing': True}),
         'batch 8, lora': (8, {'finetune': 'lora'}), 'batch 4, float32': (4, {'precision': 'float32'})}


def compared(name: str, rows: int, training: dict, memory: float) -> dict:   # memory: bytes
    "The estimate for a case, and what it took; in GB."
    changes = {'precision': 'bfloat16', 'mode': 'xla'} | training
    config = XTTSConfig.xtts_v2().replace(data={'batch_size': rows}, training={'gpt': changes})
    needs = sum(memory_needs(config, CODES, TEXT).values())
    found = _run_trial(config, CODES, TEXT, memory=memory)
    peak = found and found['peak']
    return {'name': name, 'estimate_gb': round(needs / 1e9, 2), 'peak_gb': peak and round(peak / 1e9, 2),
            'estimate_to_peak': peak and round(needs / peak, 3)}


def main():
    "The command line."
    parser = arguments(__doc__)
    parser.add_argument('--gigabytes', type=float, default=24., help='that each trial may take')
    given = parser.parse_args()
    if not tf.config.list_physical_devices('GPU'):
        raise UserError('there is no GPU here; its memory can only be planned: benchmarks/xla_gpu.py memory.')
    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = [*pool.map(lambda case: compared(case[0], *case[1], 1e9 * given.gigabytes), CASES.items())]
    output(given, 'memory', {'rows': rows, 'model': f'the released model, clips of {TEXT} text tokens and '
                                                    f'{CODES} codes'})


if __name__ == '__main__': run(main)
