"""Run a lesson and keep its outputs, up to the cell at which it fails or is stopped.

    python benchmarks/lesson.py nbs/30_trainer_xla.ipynb OUT [--scale tiny|full]

OUT/30_trainer_xla.ipynb is written after each cell, so a lesson that is stopped keeps what it showed. Cells
marked `#| eval: false` and the export at the end are left out. The exit code is 1 where a cell fails."""
import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path

from fastcore.nbio import read_nb, write_nb
from execnb.shell import CaptureShell

ROOT = Path(__file__).resolve().parents[1]


def workspace(
    folder: Path,
    scale: str,     # tiny or full
) -> Path:          # the folder of its pages
    "A copy of the pages and the records, with a `settings.ini` of this scale."
    for name in ('nbs', 'benchmarks'): shutil.copytree(ROOT / name, folder / name)
    settings = (ROOT / 'settings.ini').read_text(encoding='utf-8')
    settings = re.sub(r'(?m)^scale\s*=.*', f'scale = {scale}', settings)
    (folder / 'settings.ini').write_text(settings, encoding='utf-8')
    return folder / 'nbs'


def run(
    page: Path,
    out: Path,      # the notebook to write
    folder: Path,   # where its cells run
) -> bool:          # whether every cell ran
    nb, shell = read_nb(page), CaptureShell(folder / page.name)
    shell.run_cell(f'import os; os.chdir({str(folder)!r})')
    left_out = re.compile(r'^#\|\s*eval:\s*false|nbdev_export\(\)', re.M)
    for cell in nb.cells:
        if cell.cell_type != 'code' or left_out.search(cell.source): continue
        shell.cell(cell)
        write_nb(nb, out)
        if shell.exc:
            print(shell.prettytb(fname=page))
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog='lesson.py')
    parser.add_argument('page', type=Path)
    parser.add_argument('out', type=Path)
    parser.add_argument('--scale', choices=('tiny', 'full'), default='tiny')
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return 1 - run(given.page, given.out / given.page.name, workspace(Path(folder), given.scale))


if __name__ == '__main__': sys.exit(main())
