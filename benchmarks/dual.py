"""What the pipeline of two devices loses, measured with stages that only sleep.

    xtts-nb bench dual [--record] [--json]     runs it, in a checkout; with --data CACHE the real stages too

The times of the stages are chosen, so the factor between stages in turn and overlapped stages follows from
them and says nothing of a GPU. What is measured is how close the pipeline comes to the rate of its slowest
stage. Sleeping takes no core from the others, so this is the same on any machine."""
import time
from collections.abc import Callable, Iterable

from xtts_nb.train.dual import Batches, Pipeline, _pipeline_rows, SerialBatches

STAGE_SECONDS = {'host': 0.030, 'data': 0.040, 'model': 0.050}


def emulated_stages(
    steps: int,
    times: dict[str, float] = STAGE_SECONDS,   # of the host first, of the model last
) -> tuple[Iterable, dict[str, Callable], Callable]:   # source, stages, step
    "Stages that only sleep."
    def sleeper(name):
        def work(item=None):
            time.sleep(times[name])
            return item
        return work
    first, *between, last = times
    read = sleeper(first)
    return (read(n) for n in range(steps)), {name: sleeper(name) for name in between}, sleeper(last)


def run_emulated(steps: int, times: dict[str, float] = STAGE_SECONDS, ring: int = 0) -> Batches:
    "Emulated stages, overlapped if `ring` is given, else in turn."
    source, stages, step = emulated_stages(steps, times)
    with Pipeline(source, stages, ring) if ring else SerialBatches(source, stages) as batches:
        for batch in batches: step(batch)
    return batches


def bench_stages(
    steps: int = 60,
    times: dict[str, float] = STAGE_SECONDS,   # seconds of the stages, host first, model last
    ring: int = 3,
    rounds: int = 3,
    progress=None,        # called with (done, total)
) -> list[dict]:          # of `_pipeline_rows`
    "Emulated stages in turn and overlapped, in alternating rounds."
    variants = {'serial': 0, 'pipelined': ring}
    runs = {name: [] for name in variants}
    for done in range(2 * rounds):
        name = [*variants][done % 2]
        runs[name].append(run_emulated(steps, times, variants[name]))
        if progress: progress(done + 1, 2 * rounds)
    return _pipeline_rows(runs, 1 / max(times.values()))
