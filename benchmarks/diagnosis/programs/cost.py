"""What watching a program costs: third-party programs, watched as by `xtts-nb diagnose` and not, in turn.

    python benchmarks/diagnosis/programs/cost.py [NAME ...] [--half development|scored] [--repeat N]

Each run is a process of its own, and a program measures itself. A cost of 0.02 means that a step takes 2 %
longer while it is watched. Without names: the healthy programs, whose steps are as people want them."""
import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

from benchmarks.diagnosis.programs.cases import Case  # noqa: E402
from benchmarks.diagnosis.programs.run import chosen, parser_of, rows_per_second  # noqa: E402
from benchmarks.peer import run  # noqa: E402

WATCHED = ('-c', 'import sys; from xtts_nb.monitor.program import watch_script; '
                 'watch_script(sys.argv[1], [], 1e9)')


def cost(
    case: Case,
    repeat: int,   # how often in each way
) -> dict:
    "The time of a step while it is watched ÷ that of one that is not, less 1."
    ways = {'plain': (), 'watched': WATCHED}
    rates = {name: [] for name in ways}
    for _ in range(repeat):
        for name, how in ways.items(): rates[name].append(rows_per_second(case.scripts[0], how=how))
    costs = [plain / watched - 1 for plain, watched in zip(*rates.values())]
    return {'case': case.name, 'way': case.way, 'cost': round(statistics.median(costs), 4),
            'costs': [round(c, 4) for c in costs]}


def main():
    parser = parser_of(__doc__)
    parser.add_argument('--repeat', type=int, default=3, metavar='N')
    given = parser.parse_args()
    rows = []
    for case in chosen(given.names, given.half):
        if not (given.names or case.healthy): continue
        rows.append(cost(case, given.repeat))
        print(f'{rows[-1]["cost"]:+7.1%}  {case.name}', file=sys.stderr, flush=True)
    print(json.dumps({'median': statistics.median(r['cost'] for r in rows), 'rows': rows}))


if __name__ == '__main__': run(main)
