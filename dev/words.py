"""Words that read as another language's English, and what to write instead; exit code 1 where one is used.

    python dev/words.py [FILE ..]     without files: the English pages, the library, README, CHANGELOG, LOG"""
import ast
import json
import re
import sys
from pathlib import Path

from tree import ROOT

REFUSED = {
    r'\bmend(s|ed|ing)?\b': 'fix, repair',
    r'\banew\b': 'again; "from the start"',
    r'\bbeside\b': 'next to, with, compared with; "in addition to"',
    r'\b(foretold|foretells?|foreseen|foresees?)\b': 'predicted, predicts',
    r'\bsooner\b': 'earlier, faster, "26 % less time"',
    r'\bfor want of\b': 'for lack of',
    r'\bat hand\b': 'available',
    r'\bfor ever\b': 'forever',
    r'\bhealthy\b': 'without a problem; of test programs: control',
    r'\bdiseases?\b': 'cause, problem',
    r'\bcure[sd]?\b|\bremed(y|ies)\b': 'fix, fixed',
    r'\bstrangers?\b': 'third party, new user',
    r'\bwards?\b': 'suite, test programs',
    r'\bpatients?\b': 'test trainings',
    r'\bquiet (record|run|machine)s?\b': 'low-variance record; idle machine',
    r'\bheadlines?\b': 'best record, main figure',
    r"\bPython's lock\b": 'the GIL',
    r'\bways? back\b': 'backward pass; prefix',
    r'\b(go|goes|going|gone|went) on\b(?! to)': 'continue, resume',
    r'\b(is|are|was|were) told\b(?! (apart|otherwise))': 'an actor: "`tune` reports", "you see"',
    r'\bbeaten\b': 'exceeded',
    r'\b(Kept|Given|Left|Meant|Said) (is|are)\b': 'normal order: "We keep ..."',
    r'\b(that|which) (is|are) none\b(?! of)': '"harmless messages", "not a ..."',
    r'\b(of|by) somebody else\b': 'of another program, of another user',
    r'\bin the course of\b': 'during',
    r'\blets? go of\b': 'releases',
    r'\btaken for an?\b': 'mistaken for',
    r'\bdoes without\b': 'needs no',
    r'(?<!only )\bso many\b(?! (of|first))': 'this many, N, a number of',
    r'\bwhoever\b': 'users who, a caller that',
    r'\bmean load\b|\bload of (the|a|an|both|that) (GPU|device|NVIDIA|card)': 'utilisation (duty cycle, MFU)',
    r'\b[Tt]he use of (the|a|that|this|its) (data |model )?GPU': 'GPU utilisation',
    r'\b(stands?|stood|standing) (in(?! for)|on|at|behind|between|before|after|above|below|alone|there|'
    r'here|first|last)\b': 'is, appears, comes',
    r'\b[Bb](elow|eside|ehind it) stands?\b': 'follow, are',
    r'\b(lies|lay|lain) (in|on|at|beyond|beside|behind|before)\b': 'is',
    r'\b(what|that|they|keys|files|folders|frames|clips|layers|images) lie (in|on|at|beyond|behind|before)\b':
        'are',
    r'(?<![Tt]here )\b(is|are|was|were) no '
    r'(?!longer|more|less|fewer|better|slower|faster|larger|smaller|worse|nearer|different)[a-z`]':
        '"is not a ..."',
    r'\beach (for itself|by itself)\b': 'separately',
}

CODE = re.compile(r'```.*?```|`[^`\n]*`|\]\([^)]*\)', re.S)   # names of files and functions do not count


def pages() -> list[Path]:
    return [p for p in sorted(ROOT.glob('nbs/**/*.ipynb'))
            if not p.stem.endswith('_fa') and '.ipynb_checkpoints' not in p.parts]


def texts(path: Path):
    "The prose of a file: markdown cells; docstrings, messages and comments of code; or all of it."
    text = path.read_text(encoding='utf-8')
    if path.suffix == '.ipynb':
        for cell in json.loads(text)['cells']:
            if cell['cell_type'] == 'markdown': yield ''.join(cell['source'])
    elif path.suffix == '.py':
        strings = (n.value for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant))
        yield from (s for s in strings if isinstance(s, str) and ' ' in s.strip())
        yield from re.findall(r'#\s(?!%%|\|)(.*)$', text, re.MULTILINE)
    else: yield text


def found(path: Path) -> list[str]:
    return [f'{path.relative_to(ROOT)}: "{m[0]}" -> {better}' for text in texts(path)
            for pattern, better in REFUSED.items() for m in re.finditer(pattern, CODE.sub('``', text))]


if __name__ == '__main__':
    library = [p for p in sorted(ROOT.glob('xtts_nb/**/*.py')) if p.name != '_modidx.py']
    documents = [ROOT / name for name in ('README.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'dev/LOG.md')]
    paths = [Path(name).resolve() for name in sys.argv[1:]] or [*pages(), *library, *documents]
    lines = [line for path in paths for line in found(path)]
    print(*lines, sep='\n', end='\n' if lines else '')
    raise SystemExit(bool(lines))
