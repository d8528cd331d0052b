"""Are the notebooks clean, and is the library what they export? Asks a copy, and changes nothing here."""
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from tree import ROOT

NOISE = shutil.ignore_patterns('.ipynb_checkpoints', '__pycache__', '_*.yml')
with tempfile.TemporaryDirectory(prefix='xtts_nb-') as folder:
    here, there = Path(folder) / 'here', Path(folder) / 'there'
    for copy in (here, there):
        for name in ('nbs', 'xtts_nb'): shutil.copytree(ROOT / name, copy / name, ignore=NOISE)
    shutil.copy(ROOT / 'pyproject.toml', there)
    env = {k: v for k, v in os.environ.items() if k != 'IN_TEST'}   # under IN_TEST nbdev exports nothing
    for command in ('nbdev-export', 'nbdev-clean'):
        subprocess.run([Path(sysconfig.get_path('scripts')) / command], cwd=there, env=env, check=True)
    (there / 'pyproject.toml').unlink()
    if subprocess.run(['git', 'diff', '--no-index', '--stat', 'here', 'there'], cwd=folder).returncode:
        sys.exit('Notebooks and library disagree in the files above: run `make export` and see what changed.')
print('Notebooks are clean, and the library is what they export.')
