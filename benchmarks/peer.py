"""What the scripts share that measure other libraries: their process, and the output of a script.

coqui-tts, PyTorch and DALI need other versions of the same packages than TensorFlow, so each is installed in
an environment of its own. `OtherPython` runs a generator of ours with the Python of such an environment. A
library may ask its user to agree to its terms, as coqui-tts does before it loads the released model; nothing
here agrees for the user, and the error says how to do it."""
import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

from xtts_nb import bench  # noqa: E402
from xtts_nb.app.terminal import progress, start, table, to_stderr, write_record  # noqa: E402
from xtts_nb.config import UserError  # noqa: E402

COQUI = 'coqui-tts 0.28'


class OtherPython(bench.OtherPython):
    "A generator of ours in the Python of another library."
    def __init__(self, python: str | Path, main: Callable, *helpers: Callable, needs: str = COQUI, **sizes):
        super().__init__(python, main, *helpers, needs=needs, **sizes)

    def failed(self, stderr: str) -> UserError:
        "Names the terms of the library, if it asked for agreement."
        if 'agree to the terms' in stderr and os.environ.get('COQUI_TOS_AGREED') != '1':
            return UserError(f'{self.python}: {self.needs} asks for agreement to its terms; '
                             'read them, and if you agree, set COQUI_TOS_AGREED=1 and run this again.')
        return super().failed(stderr)


def step_peer(python: str | Path, main: Callable, **sizes) -> OtherPython:
    "A peer with as many threads as TensorFlow; a call returns a value of `main`."
    import tensorflow as tf
    return OtherPython(python, main, threads=tf.config.threading.get_intra_op_parallelism_threads(), **sizes)


def arguments(doc: str) -> argparse.ArgumentParser:
    "A parser with what all scripts take: --json and --record."
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', action='store_true', help='print one JSON object as the last line')
    parser.add_argument('--record', action='store_true', help='write the rows into a new file in benchmarks/')
    return parser


def add_rounds(parser: argparse.ArgumentParser, rounds: int) -> argparse.ArgumentParser:
    "--rounds and --budget, as of `xtts-nb bench`."
    parser.add_argument('--rounds', type=int, default=rounds, help='times that each variant runs')
    parser.add_argument('--budget', type=float, default=5., help='minutes; fewer rounds if they take longer')
    return parser


def add_sizes(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    "The sizes of a GPT and of the batch."
    for name, size in {'layers': 8, 'width': 512, 'heads': 8, 'batch-size': 4}.items():
        parser.add_argument(f'--{name}', type=int, default=size)
    return parser


@contextmanager
def measuring(given: argparse.Namespace):   # of `add_rounds`
    "Yields the progress of a measurement that ends after its budget."
    with bench._time_budget(60 * given.budget), progress() as tell: yield tell


def output(
    given: argparse.Namespace,   # of `arguments`
    page: str,                   # the name of the record
    result: dict,                # rows, and facts of the measurement, which are recorded too
    text: str | None = None,     # default: the rows as a table, below what was measured
    about: str = 'model',        # the fact that says what was measured
    below: str = '',             # text below the table
    **more,                      # facts that are printed as JSON, and not recorded
):
    "Print a result, and record it if asked to."
    if given.record: write_record(page, program=f'python {os.path.relpath(sys.argv[0], ROOT)}', **result)
    if given.json: print(json.dumps(result | more))
    else: print(text or '\n'.join(filter(None, [table(result[about], result['rows']), below])))


def run(main: Callable):   # a script; its value is the exit code, None: 0
    "Run a script; an error that the user can correct becomes one sentence and exit code 2."
    try: sys.exit(main())
    except UserError as e:
        to_stderr(f'{Path(sys.argv[0]).name}: {e}')
        sys.exit(2)


__all__ = ['COQUI', 'OtherPython', 'add_rounds', 'add_sizes', 'arguments', 'measuring', 'output', 'run',
           'start', 'step_peer', 'to_stderr']
