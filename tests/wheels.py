"The wheel of the checkout, and a clean environment that holds it: what a user installs."
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

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
    uv = shutil.which('uv')
    how = [uv, 'pip', 'install', '--quiet', '--offline', '--python', python] if uv else \
        [sys.executable, '-m', 'pip', '--python', python, 'install', '--quiet', '--no-index']
    subprocess.run([*how, '--no-deps', wheel], check=True)
    (own,) = home.glob('lib/python*/site-packages')
    # a folder in a .pth file: its own .pth files, and with them the checkout, are not read
    (own / 'beside.pth').write_text(sysconfig.get_path('purelib') + '\n')
    return python.parent


def users_environment() -> dict:
    "The environment of a user: neither the checkout nor a setting of the tests."
    return {k: v for k, v in environment().items() if k not in ('MPLBACKEND', 'PYTHONPATH')}


def there(scripts: Path, *command, cwd: Path, **settings) -> str:
    "What a command of the environment prints, outside the checkout."
    done = subprocess.run([scripts / command[0], *map(str, command[1:])], cwd=cwd,
                          env=users_environment() | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
