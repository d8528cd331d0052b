"""What XProf, TensorFlow and Keras say about the programs, next to what `xtts-nb diagnose` says.

    python benchmarks/diagnosis/programs/others.py [CASE ...] [--half development|scored]
        --xprof-python PYTHON [--seconds 4] [--out FILE] [--json] [--record]

Each program runs once. From where it begins to measure itself on, TensorFlow's profiler traces it, and each
step is marked as its guide says: XProf says nothing about steps that are not marked. PYTHON is that of an
environment with `xprof`, which reads the trace: the statement of its overview and its smart suggestions.
What TensorFlow and Keras write as warnings is taken from stderr. A slow case is *named* if its expressions
match one of these sentences (of `case.json`, the same as for our own findings); something is *said* if XProf
calls the program bound by its input, has a suggestion, or a warning is about speed. For a healthy program
that is a false alarm. Each case is a line of FILE, and a run that was stopped goes on there. Of the scored
half only numbers are shown."""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

from benchmarks.diagnosis.programs.cases import HALVES, Case  # noqa: E402
from benchmarks.diagnosis.programs.run import chosen, parser_of  # noqa: E402
from benchmarks.peer import OtherPython, output, run  # noqa: E402

LONGEST = 180   # s for a program
WARNED = re.compile(r'WARNING:tensorflow|UserWarning|DeprecationWarning|^W0000', re.MULTILINE)
# TensorFlow's notes that speak of time or of repeated work
ABOUT_SPEED = re.compile('retrac|slow|expensive|discarded|bottleneck|inefficient|performance|too small', re.I)


def traced(script: str, folder: str, seconds: float):
    "Run a program; the profiler traces it from its first look at the clock on, each step marked."
    import runpy
    import threading
    import keras
    import tensorflow as tf
    from tensorflow.python.data.ops.iterator_ops import OwnedIterator
    clock, fit, following = time.perf_counter, keras.Model.fit, OwnedIterator.__next__
    mark, steps, lock, on = [], [0], threading.Lock(), []

    def end_step():
        while mark: mark.pop().__exit__(None, None, None)
    def begin_step():
        end_step()
        steps[0] += 1
        mark.append(tf.profiler.experimental.Trace('train', step_num=steps[0], _r=1))
        mark[-1].__enter__()
    def end_trace():
        with lock:
            if on and on.pop(): tf.profiler.experimental.stop()
    def read_clock():
        if not began and sys._getframe(1).f_globals.get('__name__') == '__main__':
            began.append(True)
            tf.profiler.experimental.start(folder)
            on.append(True)
            timer = threading.Timer(seconds, end_trace)
            timer.daemon = True
            timer.start()
        return clock()
    class Marks(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None): begin_step()
        def on_train_end(self, logs=None): end_step()
    def marked_fit(self, *args, **kwargs):
        own = kwargs.get('callbacks') or []
        own = list(own) if isinstance(own, (list, tuple)) else [own]
        return fit(self, *args, **kwargs | {'callbacks': [*own, Marks()]})
    def marked_next(self):
        if 'keras' not in sys._getframe(1).f_code.co_filename: begin_step()
        return following(self)

    began = []
    time.perf_counter, keras.Model.fit, OwnedIterator.__next__ = read_clock, marked_fit, marked_next
    sys.argv = [script]
    try: runpy.run_path(script, run_name='__main__')
    finally:
        end_step()
        end_trace()


def xprof_says(
    folder,    # of the newest trace
):
    "Runs with the Python of XProf: its sentences about what the folder holds at each call."
    import glob
    import json
    from xprof.convert.raw_to_tool_data import xspace_to_tool_data
    while True:
        said = []
        if files := glob.glob(f'{folder}/**/*.xplane.pb', recursive=True):
            advice, _ = xspace_to_tool_data(files, 'smart_suggestion', {})
            said = [s['suggestionText'] for s in json.loads(advice or '{}').get('suggestions', [])]
            overview, _ = xspace_to_tool_data(files, 'overview_page', {})
            for part in json.loads(overview): said.append((part.get('p') or {}).get('statement', ''))
        yield [s for s in said if s]


def warnings_of(stderr: str) -> list[str]:
    "The warnings about speed that TensorFlow and Keras wrote."
    some = [line for line in stderr.splitlines() if WARNED.search(line) and ABOUT_SPEED.search(line)]
    return list(dict.fromkeys(line[:400] for line in some))


def is_about_something(sentence: str) -> bool:
    "Whether a sentence of XProf's overview names a bottleneck."
    return not re.search(r'not input-bound|cannot tell', sentence, re.IGNORECASE)


def said_of(
    case: Case,
    xprof: OtherPython,          # of `xprof_says`
    folder: Path,         # that it reads
    seconds: float = 4.,  # of the trace
) -> dict:
    "What the others say of one case, and whether that is right."
    start = time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    line = [sys.executable, __file__, '--trace', case.scripts[0], folder, str(seconds)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LONGEST)
    sentences = [s for s in xprof() if is_about_something(s)]
    warned = warnings_of(done.stderr)
    return judged(case, sentences, warned) | {'seconds': round(time.perf_counter() - start, 1)} | (
        {'error': done.stderr.strip()[-300:]} if done.returncode else {})


def judged(case: Case, sentences: list[str], warned: list[str]) -> dict:
    "What XProf and the warnings are worth for a case."
    row = {'case': case.name, 'half': case.half, 'kind': case.kind or 'healthy'}
    for by, words in (('xprof', sentences), ('warnings', warned)):
        row |= {f'{by}_says': words, f'{by}_named': not case.healthy and any(map(case.is_named_by, words))}
    return row


def totals(rows: list[dict]) -> list[dict]:
    "A row for each half and each of the two."
    said = lambda some, by: sum(bool(r[f'{by}_says']) for r in some)
    out = []
    for half in HALVES:
        some = [r for r in rows if r['half'] == half]
        if not some: continue
        slow, healthy = ([r for r in some if (r['kind'] == 'healthy') == well] for well in (False, True))
        for by, about in (('xprof', 'XProf'), ('warnings', 'warnings of TensorFlow and Keras')):
            named = sum(r[f'{by}_named'] for r in slow)
            out.append({'name': f'{about}, {half} half', 'slow': len(slow), 'named': named,
                        'said': said(slow, by), 'healthy': len(healthy), 'alarms': said(healthy, by),
                        'longest_s': max(r['seconds'] for r in some)})
    return out


def main():
    parser = parser_of(__doc__)
    parser.add_argument('--xprof-python', required=True, metavar='PYTHON')
    parser.add_argument('--seconds', type=float, default=4., help='of the trace')
    parser.add_argument('--out', type=Path, metavar='FILE')
    for flag in ('--json', '--record'): parser.add_argument(flag, action='store_true')
    given = parser.parse_args()
    before = given.out.read_text(encoding='utf-8').splitlines() if given.out and given.out.exists() else []
    rows = [json.loads(line) for line in before]
    done = {r['case'] for r in rows}
    folder = Path(tempfile.mkdtemp()) / 'trace'
    with OtherPython(given.xprof_python, xprof_says, needs='xprof', folder=str(folder)) as xprof:
        for case in chosen(given.names, given.half):
            if case.name in done: continue
            rows.append(said_of(case, xprof, folder, given.seconds))
            if case.half != 'scored': print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if given.out:
                with given.out.open('a', encoding='utf-8') as f: f.write(json.dumps(rows[-1]) + '\n')
    output(given, 'others', {'rows': totals(rows), 'model': 'third-party programs'})


if __name__ == '__main__':
    if sys.argv[1:2] == ['--trace']:
        os.environ['TF_CPP_MIN_LOG_LEVEL'] = '1'   # warnings are shown
        script, folder, seconds = sys.argv[2:]
        traced(script, folder, float(seconds))
    else: run(main)
