"""Run third-party programs, and say how much faster the fixed ones are.

    python benchmarks/diagnosis/programs/run.py [NAME ...] [--half development|scored] [--repeat N] [--json]

A NAME is that of a case, or the path of one script. Each program runs in its own process, one at a time;
with `--repeat` the slow and the fixed one take turns, and the ratio is the median."""
import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

from benchmarks.diagnosis.programs.cases import HALVES, FOLDER, Case, cases  # noqa: E402
from benchmarks.peer import run  # noqa: E402
from xtts_nb.config import UserError  # noqa: E402
from xtts_nb.sampler import best_probe  # noqa: E402


def rows_per_second(
    script: Path,        # one program
    timeout: int = 300,  # s
    how: tuple = (),     # arguments of Python before it; default: it runs alone
) -> float:
    "What the last line of a program says."
    done = subprocess.run([sys.executable, *how, script], capture_output=True, text=True, timeout=timeout)
    if done.returncode: raise RuntimeError(f'{script} ended with {done.returncode}:\n{done.stderr[-2000:]}')
    said = json.loads(done.stdout.strip().splitlines()[-1])
    return said['items'] / said['seconds']


def measure(
    case: Case,
    repeat: int = 1,   # how often each program runs
) -> dict:
    "Rows per second of the programs of a case, and the ratio of the fixed one to the slow one."
    rounds = [[rows_per_second(s) for s in case.scripts] for _ in range(repeat)]
    row = {'case': case.name, 'kind': case.kind or 'healthy',
           'rows_per_second': [round(statistics.median(r), 1) for r in zip(*rounds)]}
    if case.healthy: return row
    ratios = [fixed / slow for slow, fixed in rounds]
    return {**row, 'ratio': round(statistics.median(ratios), 2), 'ratios': [round(r, 2) for r in ratios]}


def chosen(
    names: list[str],    # of cases; none: all
    half: str | None,
) -> list[Case]:
    known = {c.name: c for c in cases(half)}
    unknown = [n for n in names if n not in known]
    if unknown: raise UserError(f'{", ".join(unknown)}: no such case; they are the folders of {FOLDER}.')
    return [known[n] for n in names or known]


def shows_here(case: Case) -> bool:
    "Whether this machine shows a gain."
    return not case.healthy and (not case.gpu_only or bool(best_probe(lambda line: None)().gpus))


def in_words(row: dict) -> str:
    "One line of a measured case."
    rates = ' -> '.join(f'{r:,.0f}' for r in row['rows_per_second'])
    factor = f'{row["ratio"]:8.2f} x' if 'ratio' in row else ' ' * 10
    return f'{factor}  {row["case"]:32} {rates} rows/s'


def parser_of(about: str) -> argparse.ArgumentParser:
    "With the options that choose cases."
    by_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=by_lines)
    parser.add_argument('names', nargs='*', metavar='NAME')
    parser.add_argument('--half', choices=HALVES)
    return parser


def options():
    parser = parser_of(__doc__)
    parser.add_argument('--repeat', type=int, default=1, metavar='N')
    parser.add_argument('--json', action='store_true', help='one JSON object as the last line')
    return parser.parse_args()


def main():
    given = options()
    if given.names and given.names[0].endswith('.py'):
        for name in given.names: print(f'{rows_per_second(Path(name)):.1f} rows/s  {name}')
        return
    rows = []
    for case in chosen(given.names, given.half):
        if not (given.names or shows_here(case)): continue
        rows.append(measure(case, given.repeat))
        print(in_words(rows[-1]), file=sys.stderr if given.json else sys.stdout, flush=True)
    if given.json: print(json.dumps({'rows': rows}))


if __name__ == '__main__': run(main)
