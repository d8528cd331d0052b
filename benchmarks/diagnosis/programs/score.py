"""Diagnose the third-party programs, and count how often the diagnosis is right.

    xtts-nb bench diagnose [CASE ...] [--half development|scored] [--repeat N] [--out FILE]

Each program is run by `xtts-nb diagnose` as its user would run it, in a process of its own. A slow case is
*named* if one of its first two findings names the cause, and *led* if one of them proposes the right fix (the
expressions of its `case.json` decide); a control is a false alarm if there is any finding. Its gain is
measured too: slow and fixed program take turns N times. A finding that says "measured" holds if it is within
30 % of that, one that says "at most" if it is not less. Each case is a line of FILE, and a run that was
stopped goes on there. Of the scored half only kinds and numbers are shown."""
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))

from benchmarks.diagnosis.programs.cases import HALVES, Case  # noqa: E402
from benchmarks.diagnosis.programs.run import chosen, measure, shows_here  # noqa: E402

FIRST = 2        # findings that count
NOISE = 1.1      # times that a measured gain may exceed what is possible at most
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
           'findings': [{k: f[k] for k in ('cause', 'place', 'gain', 'measured', 'spread') if k in f}
                        for f in findings], 'notes': said.get('notes', [])}
    if 'error' in said: row['error'] = said['error']
    if case.healthy: return row | {'false_alarm': bool(findings) or 'error' in said}
    named = first_that(findings, lambda f: case.is_named_by(f'{f["cause"]}. {f["evidence"]}'))
    led = first_that(findings, lambda f: case.is_led_to_by(f'{f["fix"]} {f.get("change", "")}'))
    row |= {'named': named, 'led': led, 'ratio': ratio}
    if not (named or led) or not ratio: return row
    right = findings[(named or led) - 1]
    if right.get('only_on_gpu'): return row   # its gain is not known
    holds = 1 / 1.3 <= right['gain'] / ratio <= 1.3 if right['measured'] else ratio <= NOISE * right['gain']
    return row | {'gain': right['gain'], 'tried': right['measured'], 'holds': holds}


def totals(rows: list[dict]) -> dict:
    "The counts of each half."
    out = {}
    for half in HALVES:
        some = [r for r in rows if r['half'] == half]
        slow, healthy = ([r for r in some if (r['kind'] == 'healthy') == well] for well in (False, True))
        tried, most = ([r['holds'] for r in slow if r.get('tried') is how] for how in (True, False))
        out[half] = {
            'slow': len(slow), 'named': sum(bool(r['named']) for r in slow),
            'named_first': sum(r['named'] == 1 for r in slow), 'led': sum(bool(r['led']) for r in slow),
            'healthy': len(healthy), 'false_alarms': sum(r['false_alarm'] for r in healthy),
            'tried': len(tried), 'within_30_percent': sum(tried), 'at_most': len(most), 'held': sum(most),
            'errors': sum('error' in r for r in some),
            'longest_seconds': max((r['seconds'] for r in some), default=0)}
    return out


def in_words(row: dict) -> str:
    "One line of a judged case."
    what = ('ALARM' if row['false_alarm'] else 'no finding') if 'false_alarm' in row else \
        f'named {row["named"] or "-"} led {row["led"] or "-"}'
    gain = lambda f: f'{"" if f["measured"] else "at most "}{f["gain"] or 1:.1f} x'   # none: on a GPU alone
    found = '; '.join(f'{f["cause"]} {gain(f)}' for f in row['findings'][:3])
    measured = f' (measured {row["ratio"]:.1f} x)' if row.get('ratio') else ''
    return f'{row["case"]:34} {what:16} {row["seconds"]:5.1f} s  {row.get("error", found)[-300:]}{measured}'


def score_cases(
    names: list[str] | None,   # of cases; default: all
    half: str | None = None,
    repeat: int = 1,           # how often slow and fixed program take turns; 0: no gain is measured
    out: Path | None = None,   # a file with one JSON line for each case
    say=None,                  # gets a line for each case
    seconds: float = 30.,      # of the loop of a program
) -> list[dict]:               # rows of `judge`
    "Diagnose cases one after the other, and measure what their fixes gain."
    before = out.read_text(encoding='utf-8').splitlines() if out and out.exists() else []
    rows, known = [json.loads(line) for line in before], chosen(names or [], half)
    done = {r['case'] for r in rows}
    for n, case in enumerate(known, 1):
        if case.name in done: continue
        said = diagnosed(case.scripts[0], seconds)
        ratio = measure(case, repeat)['ratio'] if repeat and shows_here(case) else None
        rows.append(judge(case, said, ratio))
        if say: say(f'{n} of {len(known)}  {in_words(rows[-1]) if case.half != "scored" else "scored"}')
        if out:
            with out.open('a', encoding='utf-8') as f: f.write(json.dumps(rows[-1]) + '\n')
    return rows


def published(rows: list[dict]) -> list[dict]:
    "Rows for a table and a record; of the scored half without names and findings."
    out = []
    for r in rows:
        hidden = r['half'] == 'scored'
        first = r['findings'][0]['cause'] if r['findings'] else 'nothing to fix'
        out.append({'case': 'of the scored half' if hidden else r['case'], 'kind': r['kind'],
                    'first': None if hidden else 'an error' if 'error' in r else first,
                    'named': r.get('named'), 'led': r.get('led'), 'alarm': r.get('false_alarm'),
                    'gain': r.get('gain'), 'tried': r.get('tried'), 'holds': r.get('holds'),
                    'measured': r.get('ratio'), 'seconds': r['seconds']})
    return out


def total_lines(total: dict) -> list[str]:   # of `totals`
    "The counts for reading."
    return [f'{half} half: {n["led"]} of {n["slow"]} right fixes proposed, {n["named"]} causes named; '
            f'{n["false_alarms"]} of {n["healthy"]} controls flagged; '
            f'{n["within_30_percent"]} of {n["tried"]} tried gains within 30 %, {n["held"]} of '
            f'{n["at_most"]} upper limits held; {n["longest_seconds"]:.0f} s at most'
            for half, n in total.items() if n['slow'] + n['healthy']]
