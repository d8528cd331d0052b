"""Diagnose the programs of the ward, and count how often the diagnosis is right.

    python benchmarks/diagnosis/ward/score.py [NAME ...] [--half development|scored] [--ratios N] [--out FILE]

Each program is run by `xtts-nb diagnose` as its user would run it, in a process of its own. A slow case is
*named* if one of its first two findings names the cause, and *led* if one of them leads to the cure (the
expressions of its `case.json` decide); a healthy one is a false alarm if there is any finding. `--ratios N`
measures the gain too: slow and cured program take turns N times. Each case is a line of FILE, and a run
that was stopped goes on there. Of the scored half only the counts are shown."""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

from benchmarks.diagnosis.ward.cases import HALVES, Case  # noqa: E402
from benchmarks.diagnosis.ward.run import chosen, measure, parser_of, shows_here  # noqa: E402

FIRST = 2        # findings that count
LONGEST = 180    # s for a program and its diagnosis, before it counts as failed


def diagnosed(
    script: Path,
    seconds: float = 30.,   # of its loop
) -> dict:                  # findings, notes, seconds in all; or error
    "What `xtts-nb diagnose` says of a script."
    program = 'from xtts_nb.app.cli import main; main()'
    line = [sys.executable, '-c', program, 'diagnose', script, '--seconds', str(seconds), '--json']
    paths = os.pathsep.join(p for p in (str(ROOT), os.environ.get('PYTHONPATH')) if p)
    start = time.perf_counter()
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=LONGEST,
                              env=os.environ | {'PYTHONPATH': paths})
    except subprocess.TimeoutExpired: return {'error': f'longer than {LONGEST} s', 'seconds': LONGEST}
    took = {'seconds': round(time.perf_counter() - start, 1)}
    if done.returncode: return {'error': done.stderr.strip()[-600:]} | took
    return json.loads(done.stdout.strip().splitlines()[-1]) | took


def first_that(findings: list[dict], holds) -> int | None:
    "The place of the first of the first findings of which something holds, from 1 on."
    return next((i for i, f in enumerate(findings[:FIRST], 1) if holds(f)), None)


def judge(
    case: Case,
    said: dict,                    # of `diagnosed`
    ratio: float | None = None,    # measured
) -> dict:
    "Whether the diagnosis of a case is right, and its gain."
    findings = said.get('findings', [])
    row = {'case': case.name, 'half': case.half, 'kind': case.kind or 'healthy', 'seconds': said['seconds'],
           'findings': [{k: f[k] for k in ('disease', 'place', 'predicted_gain', 'gain_interval') if k in f}
                        for f in findings], 'notes': said.get('notes', [])}
    if 'error' in said: row['error'] = said['error']
    if case.healthy: return row | {'false_alarm': bool(findings) or 'error' in said}
    named = first_that(findings, lambda f: case.is_named_by(f'{f["disease"]}. {f["evidence"]}'))
    led = first_that(findings, lambda f: case.is_led_to_by(f'{f["remedy"]} {f.get("change", "")}'))
    row |= {'named': named, 'led': led, 'ratio': ratio}
    if not (named or led) or not ratio: return row
    right = findings[(named or led) - 1]
    low, high = right.get('gain_interval', (right['predicted_gain'],) * 2)
    return row | {'predicted': right['predicted_gain'],
                  'within_30_percent': 1 / 1.3 <= right['predicted_gain'] / ratio <= 1.3,
                  'in_interval': low <= ratio <= high}


def totals(rows: list[dict]) -> dict:
    "The counts of each half."
    out = {}
    for half in HALVES:
        some = [r for r in rows if r['half'] == half]
        slow, healthy = ([r for r in some if (r['kind'] == 'healthy') == well] for well in (False, True))
        gains = [r for r in slow if 'predicted' in r]
        out[half] = {
            'slow': len(slow), 'named': sum(bool(r['named']) for r in slow),
            'named_first': sum(r['named'] == 1 for r in slow), 'led': sum(bool(r['led']) for r in slow),
            'healthy': len(healthy), 'false_alarms': sum(r['false_alarm'] for r in healthy),
            'gains': len(gains), 'within_30_percent': sum(r['within_30_percent'] for r in gains),
            'in_interval': sum(r['in_interval'] for r in gains), 'errors': sum('error' in r for r in some),
            'longest_seconds': max((r['seconds'] for r in some), default=0)}
    return out


def in_words(row: dict) -> str:
    "One line of a judged case."
    what = ('ALARM' if row['false_alarm'] else 'healthy') if 'false_alarm' in row else \
        f'named {row["named"] or "-"} led {row["led"] or "-"}'
    found = '; '.join(f'{f["disease"]} {f["predicted_gain"]:.1f} x' for f in row['findings'][:3])
    measured = f' (measured {row["ratio"]:.1f} x)' if row.get('ratio') else ''
    return f'{row["case"]:34} {what:16} {row["seconds"]:5.1f} s  {row.get("error", found)[-300:]}{measured}'


def options():
    parser = parser_of(__doc__)
    parser.add_argument('--ratios', type=int, default=0, metavar='N')
    parser.add_argument('--seconds', type=float, default=30., help='of the loop of a program')
    parser.add_argument('--out', type=Path, help='a file with one JSON line for each case')
    return parser.parse_args()


def main():
    given = options()
    before = given.out.read_text(encoding='utf-8').splitlines() if given.out and given.out.exists() else []
    rows = [json.loads(line) for line in before]
    known = {r['case'] for r in rows}
    for case in chosen(given.names, given.half):
        if case.name in known: continue
        said = diagnosed(case.scripts[0], given.seconds)
        ratio = measure(case, given.ratios)['ratio'] if given.ratios and shows_here(case) else None
        rows.append(judge(case, said, ratio))
        if case.half != 'scored': print(in_words(rows[-1]), file=sys.stderr, flush=True)
        if given.out:
            with given.out.open('a', encoding='utf-8') as f: f.write(json.dumps(rows[-1]) + '\n')
    print(json.dumps(totals(rows)))


if __name__ == '__main__': main()
