"""The third-party programs, read from their folders and divided into two halves by their source.

    from benchmarks.diagnosis.programs.cases import cases
    for case in cases('development'): ...

`README.md` has the rule of the division and the fields of `case.json`."""
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from xtts_nb.config import UserError

FOLDER = Path(__file__).resolve().parent
HALVES = 'development', 'scored'
WAYS = 'fit', 'custom loop', 'predict', 'train_on_batch', 'python loop'
KINDS = (   # every one has a case
    'row by row', 'generator', 'run_eagerly', 'eager loop', 'retracing', 'created in a loop', 'host sync',
    'serial map', 'tiny map', 'decode before crop', 'cache and shuffle', 'repeat and cache', 'small files',
    'gzip', 'text parsing', 'from_generator', 'py_function', 'float64', 'recurrent dropout', 'ops on the CPU',
    'tiny batches', 'dense gradient', 'callbacks', 'summaries', 'threads', 'memory', 'slow disk')


@dataclass(frozen=True)
class Case:
    "A program that somebody reported, and what is known about it."
    name: str
    title: str
    source: str              # the address of the report
    checked: str             # where the report was read
    cause: str = ''
    place: str = ''          # the line of slow.py at fault
    fix: str = ''
    way: str = ''
    kind: str = ''
    named: tuple = ()        # a finding that matches one of these has named the cause
    led: tuple = ()          # a finding whose fix matches one of these is right
    gpu_only: bool = False
    why_healthy: str = ''    # a healthy case has this one and the next, and none of those from `cause` on
    looks_like: str = ''

    @property
    def healthy(self) -> bool: return bool(self.why_healthy)
    @property
    def half(self) -> str: return half_of(self.source)
    @property
    def folder(self) -> Path: return FOLDER / self.name
    @property
    def scripts(self) -> list[Path]:
        "The programs of the case, the slow one first."
        return [self.folder / f for f in (['program.py'] if self.healthy else ['slow.py', 'fixed.py'])]

    def is_named_by(self, finding: str) -> bool: return matches(self.named, finding)
    def is_led_to_by(self, fix: str) -> bool: return matches(self.led, fix)


def matches(expressions, text: str) -> bool:
    return any(re.search(e, text, re.IGNORECASE) for e in expressions)


def half_of(
    source: str,   # the address of a report
) -> str:          # `scored` or `development`
    first = hashlib.sha256(source.encode()).hexdigest()[0]
    return HALVES[int(first, 16) % 2]


def read_case(folder: Path) -> Case:
    fields = json.loads((folder / 'case.json').read_text(encoding='utf-8'))
    lists = {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
    return Case(name=folder.name, **{**fields, **lists})


def cases(
    half: str | None = None,   # `development` or `scored`; None: both
) -> list[Case]:
    "The cases of one half, or all, by name."
    if half not in (None, *HALVES): raise UserError(f'{half}: not a half of the programs; they are {HALVES}.')
    found = [read_case(f.parent) for f in sorted(FOLDER.glob('*/case.json'))]
    return [c for c in found if half in (None, c.half)]
