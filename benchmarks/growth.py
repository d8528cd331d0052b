"""What grows with the devices, and what with the hours of a corpus.

    python benchmarks/growth.py             measures 1 to 4 local workers, and prints rows and verdict
    python benchmarks/growth.py --prepare   measures time and memory of `prepare`, up to 1,000 hours
        --most H    leaves out corpora of more hours
        --json      one JSON object as the last line of stdout
        --record    writes a record into benchmarks/ too

`--prepare` prepares corpora of clips of 5 s, each in a process of its own: of 1 and 10 hours as they are,
with loudness in place of codes, and of 100 and 1,000 hours with synthetic frames. There the decoder and
the mels, whose cost per clip is the same in any corpus, are replaced by a few bytes for each clip. What is
done with all clips is measured: the table, the plan, the shards, the report.

An all-reduce adds up the gradients of all devices and gives the sum to each. In a ring it takes 2 (n - 1)
rounds; in each round every device sends one n-th of the gradients to its neighbour. So each device sends at
most twice the gradients, whatever the number of devices; the number of rounds grows, and with it the latency.
A step has a cost for each row and a fixed cost: the launch of its kernels, and the optimizer, which reads and
writes every weight and its moments. `predict` adds both up and names what limits the speed: the link, the
fixed costs of few rows, or the input. Up to eight devices are in one machine; beyond, the network is the
slowest link of the ring. The links in `LINKS` are assumptions: about 80 % of the nominal rate, and the time
of a small message.

What needs checking is the time of an all-reduce as gradients and workers grow. Local workers run steps that
sleep instead of computing, and add up real tensors with TensorFlow's own collectives. Workers of one machine
share its memory and cores, so each further worker slows the transfers of all: the link has a number for that,
`shared`, fitted to three workers at the largest size. Four workers are predicted and then measured. (The
first model gave each pair of workers a link of its own; for four workers and 16 MB it was 28 % below the
measurement.) `shared` says nothing of other machines: behind a switch that serves all ports at full rate, and
over NVLink, it is 0. It has not been tried where every worker has a device of its own."""
import argparse
import json
import math
import os
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

import tensorflow as tf  # noqa: E402

from xtts_nb.bench import COLOURS, png_bytes, rows_markdown  # noqa: E402
from xtts_nb.config import UserError, XTTSConfig, setup_tf  # noqa: E402
from xtts_nb.data import prepare as preparing  # noqa: E402
from xtts_nb.data.audio import save_audio, synthetic_voice  # noqa: E402
from xtts_nb.data.prepare import Loudness, encode_corpus, _ShardMaker  # noqa: E402
from xtts_nb.files import read_json, write_json  # noqa: E402
from xtts_nb.models.dvae import parameter_count, without_values  # noqa: E402
from xtts_nb.models.gpt import GPT  # noqa: E402
from xtts_nb.models.xtts import step_flops  # noqa: E402
from xtts_nb.records import record  # noqa: E402
from xtts_nb.train.distributed import setup_gpu_strategy, _this_worker  # noqa: E402


@dataclass(frozen=True)
class Link:
    "The link between two devices, in each direction."
    bytes_per_s: float
    seconds: float      # latency, of an empty message
    shared: float = 0.  # slowdown of all transfers by each device beyond two; 0: a link for every pair

LINKS = {'NVLink': Link(360e9, 5e-6), 'PCIe 4': Link(25e9, 10e-6), '400 Gb/s': Link(40e9, 20e-6),
         '100 Gb/s': Link(10e9, 25e-6), '25 Gb/s': Link(2.5e9, 30e-6)}

def ring_seconds(
    size: float,        # bytes of the gradients
    devices: int,
    link: Link,         # the slowest of the ring
) -> float:
    "The time of an all-reduce."
    slower = 1 + link.shared * max(0, devices - 2)
    return 2 * (devices - 1) * (slower * size / devices / link.bytes_per_s + link.seconds)


@dataclass(frozen=True)
class StepCost:
    "The cost of an update on one device."
    fixed: float             # s, for any number of rows
    per_row: float           # s
    gradients: float         # bytes that are added up
    row_bytes: float = 0.    # copied to the device
    overlap: float = 0.      # share of the step during which an all-reduce can run
    host_rate: float = math.inf   # rows/s that a machine can read

def measured_cost(seconds: dict[int, float], gradients: float, **more) -> StepCost:   # {rows: s of a step}
    "The line through measured step times."
    per_row, fixed = np.polyfit(list(seconds), list(seconds.values()), 1)
    return StepCost(max(0., float(fixed)), float(per_row), gradients, **more)

def computed_cost(
    config: XTTSConfig,
    text: int,               # T, of a mean clip
    codes: int,              # S
    flops: float = 400e12,   # FLOP/s that the model reaches on the card
    memory: float = 3e12,    # bytes/s of its memory
    **more,
) -> StepCost:
    "The cost from the number of operations and bytes."
    weights = parameter_count(without_values(lambda: GPT(config, text_start=0)))
    frames = config.data.reference_frames
    row_bytes = 2 * frames * config.model.audio.n_mels + 4 * (text + codes)
    per_row = step_flops(config, 1, text, codes) / flops
    return StepCost(28. * weights / memory, per_row, 4. * weights, row_bytes, **more)


def predict(
    work: StepCost,
    devices: int,
    rows: int,               # of each device
    inner: Link,             # within a machine
    outer: Link,             # between machines
    per_machine: int = 8,
) -> dict:   # devices, rows, compute_ms, all_reduce_ms, step_ms, rows_per_s, efficiency, limit, cause
    "The time of one step, the visible part of its all-reduce, what limits it, and the main `cause` of loss."
    machines = math.ceil(devices / per_machine)
    link = inner if machines == 1 else Link(min(inner.bytes_per_s, outer.bytes_per_s),
                                            max(inner.seconds, outer.seconds))
    alone = work.fixed + rows * work.per_row
    visible = max(0., ring_seconds(work.gradients, devices, link) - work.overlap * alone)
    fetch = rows * max(min(devices, per_machine) / work.host_rate,
                       work.row_bytes / LINKS['PCIe 4'].bytes_per_s)
    step = max(alone + visible, fetch)
    causes = {'input': fetch - alone - visible, 'all-reduce': visible, 'fixed costs': work.fixed}
    cause, lost = max(causes.items(), key=lambda item: item[1])
    return {'devices': devices, 'rows': rows, 'compute_ms': 1e3 * alone, 'all_reduce_ms': 1e3 * visible,
            'step_ms': 1e3 * step, 'rows_per_s': devices * rows / step, 'efficiency': alone / step,
            'limit': cause if lost > 0.2 * step else 'compute', 'cause': cause}

def growth(
    work: StepCost,
    rows: int,                   # of each device, or of all together
    inner: Link,
    outer: Link,
    devices=(1, 2, 4, 8, 16, 32, 64),
    together: bool = False,      # the batch keeps its size and is divided among at most as many devices
    per_machine: int = 8,
) -> list[dict]:                 # as from `predict`, and `speed`, relative to one device
    "The predicted speed of 1, 2, 4, ... devices."
    lines = [predict(work, n, rows // n if together else rows, inner, outer, per_machine)
             for n in devices if not together or n <= rows]
    one = lines[0]['rows_per_s'] / lines[0]['devices'] if lines else None
    return [line | {'speed': line['rows_per_s'] / one} for line in lines]

def scaling_limit(lines: list[dict], least: float = 0.8) -> dict | None:
    "The first number of devices with less than `least` of the ideal speed, and why; None if there is none."
    return next(({'devices': n['devices'], 'speed': round(n['speed'], 1), 'limit': n['cause']} for n in lines
                 if n['speed'] < least * n['devices']), None)


def plot_growth(
    lines: dict,             # {name: rows from `growth`}
    measured: dict = {},     # {name: [(devices, speed), ...]}   # noqa: B006 -- only read
    title: str = '',
):                           # matplotlib Figure
    "Speed by the number of devices: predictions as lines, the ideal dotted, measurements as dots."
    from matplotlib.figure import Figure
    fig = Figure(figsize=(7.2, 3.2), layout='constrained')
    fig._repr_png_ = lambda: png_bytes(fig)
    ax = fig.add_subplot(xscale='log', yscale='log', xlabel='devices', ylabel='times as fast as one',
                         title=title)
    devices = sorted({line['devices'] for rows in lines.values() for line in rows})
    ax.plot(devices, devices, ':', color='#999999', label='ideal')
    for colour, (name, rows) in zip(COLOURS * len(lines), lines.items()):
        ax.plot([line['devices'] for line in rows], [line['speed'] for line in rows], color=colour,
                label=name)
        if name in measured: ax.plot(*zip(*measured[name]), 'o', color=colour)
    ax.set_xticks(devices, [str(n) for n in devices])
    ax.set_yticks(devices, [str(n) for n in devices])
    ax.minorticks_off()
    ax.legend(fontsize=8)
    return fig


def emulate(out: str, sizes: list[int], seconds: float, steps: int):
    "Run by a worker: steps that sleep and then add up `sizes` bytes; worker 0 writes the median times."
    strategy, medians = setup_gpu_strategy(), {}
    add = lambda x: tf.distribute.get_replica_context().all_reduce('SUM', tf.identity(x))
    summed = tf.function(lambda x: strategy.experimental_local_results(strategy.run(add, (x,)))[0])
    for size in sizes:
        x, times = tf.zeros(size // 4), []
        for _ in range(steps + 2):
            begin = time.perf_counter()
            time.sleep(seconds)
            summed(x)[0].numpy()
            times.append(time.perf_counter() - begin)
        medians[size] = statistics.median(times[2:])
    if _this_worker(strategy.cluster_resolver)[0] == 0: write_json(out, medians)

def run_workers(program: str, count: int) -> int:
    "Run `program` as so many workers of this machine, without a GPU; the first exit code that is not 0."
    with ExitStack() as open_:   # all at once, so that no port is taken twice
        servers = [open_.enter_context(socket.create_server(('127.0.0.1', 0))) for _ in range(count)]
        workers = [f'127.0.0.1:{server.getsockname()[1]}' for server in servers]
    def start(index):
        place = {'cluster': {'worker': workers}, 'task': {'type': 'worker', 'index': index}}
        env = os.environ | {'TF_CONFIG': json.dumps(place), 'CUDA_VISIBLE_DEVICES': '-1'}
        return subprocess.Popen([sys.executable, '-c', program], env=env)
    children = [start(index) for index in range(count)]
    try:
        while not any(codes := [child.poll() for child in children]) and None in codes: time.sleep(0.2)
        return next(filter(None, codes), 0)
    finally:
        for child in children:
            child.kill()
            child.wait()

def measure_workers(workers: int, sizes: list[int], seconds: float = 0.05,
                    steps: int = 15) -> dict[int, float]:
    "{bytes: s of a step} of `workers` workers on this machine."
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / 'medians.json')
        program = (f'import sys; sys.path.insert(0, {str(ROOT)!r}); '
                   'from xtts_nb.config import setup_tf; setup_tf(); '
                   f'from benchmarks.growth import emulate; emulate({out!r}, {sizes}, {seconds}, {steps})')
        code = run_workers(program, workers)
        if code: raise UserError(f'{workers} local workers ended with code {code}; see above.')
        return {int(size): s for size, s in read_json(out).items()}


BOUND = 0.2   # of a step, the largest error of a good prediction

def fit_link(
    two: dict[int, float],     # {bytes: s of a step of two workers}
    three: dict[int, float],   # the same of three
    seconds: float,            # of computing per step
) -> Link:
    "The link of two workers, with the slowdown by a third one."
    per_byte, start = (float(x) for x in np.polyfit(list(two), [s - seconds for s in two.values()], 1))
    link, largest = Link(1 / per_byte, max(0., start / 2)), max(three)
    bytes_alone = ring_seconds(largest, 3, replace(link, seconds=0.))
    bytes_seen = three[largest] - seconds - ring_seconds(0, 3, link)
    return replace(link, shared=max(0., bytes_seen / bytes_alone - 1))

def check_growth(
    workers=(1, 2, 3, 4),                       # those after the third are only predicted
    sizes=(1_000_000, 4_000_000, 16_000_000),   # bytes
    seconds: float = 0.05,                      # of computing per step
    measure=measure_workers,
    progress=None,                              # called with (done, total)
) -> list[dict]:   # workers, megabytes, step_ms, predicted_ms, error (of a step), fitted
    "Compare measurement and prediction; the link is fitted to two and three workers only."
    steps = {}
    for done, n in enumerate(workers, 1):
        steps[n] = measure(n, list(sizes), seconds)
        if progress: progress(done, len(workers))
    alone = statistics.mean(steps[1].values())
    link = fit_link(steps[2], steps[3], alone)
    def row(n, size):
        took, expected = steps[n][size], alone + ring_seconds(size, n, link)
        return {'workers': n, 'megabytes': size / 1e6, 'step_ms': round(1e3 * took, 2),
                'predicted_ms': round(1e3 * expected, 2), 'error': round(expected / took - 1, 3),
                'fitted': n <= 3}
    return [row(n, size) for n in workers for size in sizes]

def growth_verdict(rows: list[dict], bound: float = BOUND) -> dict:   # bound, largest_error, holds, verdict
    "Whether the predictions for workers that were not fitted are within the bound."
    worst = max((r for r in rows if not r['fitted']), key=lambda r: abs(r['error']))
    holds = abs(worst['error']) <= bound
    verdict = (f'{worst["workers"]} workers, {worst["megabytes"]:g} MB: '
               f'predicted {worst["predicted_ms"]:.0f} ms, measured {worst["step_ms"]:.0f} ms, '
               'the largest error of what was not fitted; '
               f'the model {"holds" if holds else "does not hold"} within {bound:.0%} of a step.')
    return {'bound': bound, 'largest_error': abs(worst['error']), 'holds': holds, 'verdict': verdict}


CORPORA = (1, 'real'), (10, 'real'), (100, 'synthetic'), (1000, 'synthetic')
CLIP_SECONDS = 5

def spoken_corpus(folder: Path, clips: int):
    "A table of clips with different texts, which share 32 recordings."
    for i in range(32): save_audio(folder / f'wavs/{i}.wav', synthetic_voice(CLIP_SECONDS, 90 + 5. * i))
    rng = np.random.default_rng(0)
    word = lambda: ''.join(rng.choice([*'abcdefghijklmnoprstuvw'], rng.integers(2, 9)))
    words = np.array([word() for _ in range(5000)])
    with open(folder / 'metadata.csv', 'w') as file:
        file.write('id|audio|text|speaker\n')
        for i in range(clips):
            file.write(f'clip-{i}|{i % 32}.wav|{" ".join(rng.choice(words, 12))}|voice-{i % 50}\n')

def synthetic_frames():
    "From now on no recording is read: the frames of each clip are made up."
    loud = dict.fromkeys(('peak', 'clipped', 'leading', 'inner', 'trailing'), .1)
    def records(maker, job, sources):
        for clip in job.clips:
            ids = maker.encoder.tokenizer.encode(clip.text, clip.language)
            arrays = {'codes': np.zeros(8), 'mel': np.zeros((4, 80)), 'text': ids}
            lengths = {f'{name}_length': len(x) for name, x in arrays.items()}
            yield arrays | lengths | {'samples': CLIP_SECONDS * 22050}, None, maker.plan.stored
    _ShardMaker._records, _ShardMaker._measured = records, lambda maker, clip, wav: loud | {'sound': clip.id}
    preparing._source_digest = lambda path: 1

def peak_mb() -> float:
    "The most memory that this process has used."
    return int(re.search(r'VmHWM:\s+(\d+)', Path('/proc/self/status').read_text())[1]) / 1024

def prepare_hours(hours: int, frames: str) -> dict:
    "Prepare a corpus; its row of the record."
    clips, config = hours * 3600 // CLIP_SECONDS, XTTSConfig.tiny()
    if frames == 'synthetic': synthetic_frames()
    with tempfile.TemporaryDirectory() as folder:
        for name in ('a', 'b'): spoken_corpus(Path(folder) / name, clips if name == 'b' else 64)
        encode_corpus(Path(folder) / 'a', Path(folder) / 'first', config, Loudness())   # imports, traces
        start, before, cpu = time.perf_counter(), peak_mb(), time.process_time()
        report = encode_corpus(Path(folder) / 'b', Path(folder) / 'cache', config, Loudness())
        seconds = time.perf_counter() - start
    assert report['clips'] == clips
    return {'hours': hours, 'frames': frames, 'clips': clips, 'seconds': round(seconds, 1),
            'cpu_seconds': round(time.process_time() - cpu, 1),
            'ms_per_clip': round(1e3 * seconds / clips, 3), 'peak_mb': round(peak_mb()),
            'kb_per_clip': round(1024 * (peak_mb() - before) / clips, 2)}

def check_prepare(most: float = math.inf) -> list[dict]:
    "The rows of all corpora, each prepared in a process of its own."
    rows = []
    for hours, frames in CORPORA:
        if hours > most: continue
        child = [sys.executable, __file__, '--hours', str(hours), '--frames', frames]
        done = subprocess.run(child, stdout=subprocess.PIPE, text=True)
        if done.returncode: raise UserError(f'{hours} hours: the process ended with code {done.returncode}.')
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], file=sys.stderr)
    return rows

def prepare_verdict(rows: list[dict]) -> dict:   # linear, verdict
    "Whether ten times the clips take at most ten times the time and the memory, and a third more."
    made = [r for r in rows if r['frames'] == 'synthetic'][-2:]
    growth = lambda name: made[-1][name] / max(made[0][name], 1e-9)
    linear = growth('ms_per_clip') < 1.34 and growth('kb_per_clip') < 1.34
    last = made[-1]
    than = ' and '.join(f'{growth(n):.2f}' for n in ('ms_per_clip', 'kb_per_clip'))
    return {'linear': linear, 'verdict': f'{last["hours"]:,} hours: {last["ms_per_clip"]} ms and '
            f'{last["kb_per_clip"]} KB a clip, {than} times those of {made[0]["hours"]} hours.'}


def main():
    "The command line."
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument('--json', action='store_true', help='print one JSON object as the last line')
    parse.add_argument('--record', action='store_true', help='write a record into benchmarks/')
    parse.add_argument('--prepare', action='store_true', help='time and memory of prepare by hours')
    parse.add_argument('--most', type=float, default=math.inf, help='hours; larger corpora are left out')
    parse.add_argument('--hours', type=int, help=argparse.SUPPRESS)
    parse.add_argument('--frames', help=argparse.SUPPRESS)
    given = parse.parse_args()
    setup_tf()
    if given.hours: return print(json.dumps(prepare_hours(given.hours, given.frames)))
    tell = lambda done, total: print(f'{done} of {total} measured', file=sys.stderr)
    rows = check_prepare(given.most) if given.prepare else check_growth(progress=tell)
    found = prepare_verdict(rows) if given.prepare else growth_verdict(rows)
    if given.record:
        command = shlex.join(['python', 'benchmarks/growth.py', *sys.argv[1:]])
        page = 'prepare' if given.prepare else 'growth'
        print(record(page, rows, ROOT / 'benchmarks', command, **found), file=sys.stderr)
    if given.json: print(json.dumps({'rows': rows} | found))
    else: print(rows_markdown(rows), found['verdict'], sep='\n\n')


if __name__ == '__main__':
    try: main()
    except UserError as error:
        print(f'growth.py: {error}', file=sys.stderr)
        sys.exit(2)
