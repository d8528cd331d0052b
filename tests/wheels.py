"The wheel of the checkout, and a clean environment that holds it: what a user installs."
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import PathDistribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

from process import environment
from tree import ROOT

BUILD = 'import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))'

def built(kind: str, source: Path, out: Path) -> Path:
    "The file that `build_wheel` or `build_sdist` makes of a source."
    done = subprocess.run([sys.executable, '-c', BUILD, kind, out], cwd=source, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]

def build_wheels(home: Path) -> list[Path]:
    "The wheel of the tracked files, and the wheel of the sdist of these."
    listed = subprocess.run(['git', 'ls-files', '-z'], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split('\0')):
        if (ROOT / name).is_file():
            (home / 'source' / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, home / 'source' / name)
    with tarfile.open(built('build_sdist', home / 'source', home)) as archive:
        archive.extractall(home / 'sdist', filter='data')
    (source,) = (home / 'sdist').iterdir()
    for name in ('one', 'two'): (home / name).mkdir()
    return [built('build_wheel', home / 'source', home / 'one'), built('build_wheel', source, home / 'two')]

def install(wheel: Path, home: Path) -> Path:
    "The scripts of an environment that holds the wheel, and sees the other packages of this one behind it."
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', home], check=True)
    python = home / 'bin' / 'python'
    subprocess.run([sys.executable, '-m', 'pip', '--python', python, 'install', '--quiet', '--no-index',
                    '--no-deps', wheel], check=True)
    (own,) = home.glob('lib/python*/site-packages')
    # a folder in a .pth file: its own .pth files, and with them the checkout, are not read
    (own / 'beside.pth').write_text(sysconfig.get_path('purelib') + '\n')
    return python.parent

def link_packages(home: Path, wheel: Path, extra: str):
    "Put what a wheel asks for, and a kernel, into an environment from this one, and no more."
    (there,), seen = home.glob('lib/python*/site-packages'), set()

    def link(lines: list[str], extras):
        for one in map(Requirement, lines):
            asked = not one.marker or any(one.marker.evaluate({'extra': name}) for name in ('', *extras))
            if not asked or (one.name, *one.extras) in seen: continue
            seen.add((one.name, *one.extras))
            package = distribution(one.name)
            for file in package.files:
                if '..' in file.parts or (there / file).exists() or not file.locate().exists(): continue
                (there / file).parent.mkdir(parents=True, exist_ok=True)
                try: os.link(file.locate(), there / file)
                except OSError: shutil.copy(file.locate(), there / file)   # another disk
            link(package.requires or [], one.extras)

    (info,) = (path for path in zipfile.Path(wheel).iterdir() if path.name.endswith('.dist-info'))
    link([*PathDistribution(info).requires, 'ipykernel'], [extra])

def users_environment() -> dict:
    "The environment of a user: neither the checkout nor a setting of the tests."
    return {k: v for k, v in environment().items() if k not in ('MPLBACKEND', 'PYTHONPATH')}

def there(scripts: Path, *command, cwd: Path, **settings) -> str:
    "What a command of the environment prints, outside the checkout."
    done = subprocess.run([scripts / command[0], *map(str, command[1:])], cwd=cwd,
                          env=users_environment() | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
