"The wheel, which must be the source's and the sdist's, in a clean environment: its commands and its lessons."
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from process import environment
from tree import ROOT, notebooks

pytestmark = pytest.mark.slow
LESSONS = [path.name for path in notebooks() if path.parent.name == 'nbs' and path.stem != 'index']
SLOW_PAGES = [path.relative_to(ROOT).as_posix() for path in notebooks()
              if path.name not in LESSONS and '#| slow' in path.read_text(encoding='utf-8')]
BUILD = 'import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))'
# One line for each output on stderr; an error in a cell ends it.
LESSON = '''
import sys, nbformat
from nbclient import NotebookClient
page = nbformat.read(sys.argv[1], 4)
NotebookClient(page, timeout=900).execute()
for cell in page.cells:
    for output in cell.get('outputs', []):
        if output.get('name') == 'stderr': print(cell.id, repr(output.text))
'''


def built(kind: str, source: Path, out: Path) -> Path:
    "The file that `build_wheel` or `build_sdist` makes of a source."
    done = subprocess.run([sys.executable, '-c', BUILD, kind, out], cwd=source, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope='module')
def wheels(tmp_path_factory) -> list[Path]:
    "The wheel of the tracked files, and the wheel of the sdist of these."
    home = tmp_path_factory.mktemp('wheels')
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


@pytest.fixture(scope='module')
def installed(wheels, tmp_path_factory) -> Path:
    "The scripts of an environment that holds the wheel, and sees the other packages of this one behind it."
    home = tmp_path_factory.mktemp('installed') / 'env'
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', home], check=True)
    python = home / 'bin' / 'python'
    uv = shutil.which('uv')
    how = [uv, 'pip', 'install', '--quiet', '--offline', '--python', python] if uv else \
        [sys.executable, '-m', 'pip', '--python', python, 'install', '--quiet', '--no-index']
    subprocess.run([*how, '--no-deps', wheels[0]], check=True)
    (own,) = home.glob('lib/python*/site-packages')
    # a folder in a .pth file: its own .pth files, and with them the checkout, are not read
    (own / 'beside.pth').write_text(sysconfig.get_path('purelib') + '\n')
    return python.parent


def there(scripts: Path, *command, cwd: Path, **settings) -> str:
    "What a command of the environment prints, outside the checkout."
    env = {k: v for k, v in environment().items() if k not in ('MPLBACKEND', 'PYTHONPATH')}
    done = subprocess.run([scripts / command[0], *map(str, command[1:])], cwd=cwd, env=env | settings,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_of_the_sdist_is_that_of_the_source(wheels):
    one, two = ({i.filename: i.CRC for i in zipfile.ZipFile(wheel).infolist()} for wheel in wheels)
    assert one == two and 'xtts_nb/notebooks/50_monitoring.ipynb' in one


def test_the_wheel_holds_the_library_its_pages_and_their_records(wheels):
    names = zipfile.ZipFile(wheels[0]).namelist()
    info = [n for n in names if '.dist-info/' in n]
    library = {f.relative_to(ROOT).as_posix() for f in (ROOT / 'xtts_nb').rglob('*.py')}
    shown = {f'xtts_nb/notebooks/{f.relative_to(ROOT / "nbs").as_posix()}' for f in notebooks()}
    records = {f'xtts_nb/notebooks/benchmarks/{f.name}' for f in (ROOT / 'benchmarks').glob('*.json')}
    assert {n for n in names if n not in info} == {
        *library, 'xtts_nb/py.typed', 'xtts_nb/speech/page.html', *shown, *records}
    assert [n for n in info if n.endswith('licenses/LICENSE')]


def test_what_is_installed_is_the_wheel(installed, tmp_path):
    program = 'import xtts_nb, xtts_nb.data.cache as c; print(xtts_nb.__file__, c.__file__, sep="\\n")'
    for file in there(installed, 'python', '-c', program, cwd=tmp_path).splitlines():
        assert Path(file).is_relative_to(installed.parent) and not Path(file).is_relative_to(ROOT), file


def test_prepare_train_and_say(installed, corpus, small, tmp_path):
    config = small.replace(model={'gpt': {'layers': 1, 'conditioning_layers': 1}}, data={'buckets': 1},
                           training={'steps': 2, 'dvae_steps': 2, 'enable_xla_compilation': False})
    (tmp_path / 'tiny.yaml').write_text(config.to_yaml())
    there(installed, 'xtts-nb', 'prepare', corpus, '--out', 'cache', '--config', 'tiny.yaml', cwd=tmp_path)
    there(installed, 'xtts-nb', 'train', '--data', 'cache', '--run', 'run', cwd=tmp_path)
    there(installed, 'xtts-nb', 'say', 'aa bb', '--run', 'run', '--voice', corpus / 'wavs' / 'low-0.wav',
          '--out', 'said.wav', cwd=tmp_path)
    assert (tmp_path / 'said.wav').stat().st_size > 1000


@pytest.fixture(scope='module')
def pages(installed, tmp_path_factory) -> Path:
    "The pages as `xtts-nb notebooks` copies them out of the wheel."
    home = tmp_path_factory.mktemp('pages')
    there(installed, 'xtts-nb', 'notebooks', home / 'pages', cwd=home)
    return home / 'pages'


@pytest.mark.parametrize('lesson', LESSONS)
def test_a_lesson_runs_and_shows_nothing_on_stderr(installed, pages, lesson):
    "Every cell in a kernel of this environment, at the sizes that a user gets."
    scripts = f'{installed}{os.pathsep}{os.environ["PATH"]}'
    assert there(installed, 'python', '-c', LESSON, pages / lesson, cwd=pages, PATH=scripts) == ''


@pytest.mark.parametrize('page', SLOW_PAGES)
def test_a_page_with_its_slow_cells(page):
    program = Path(sysconfig.get_path('scripts')) / 'nbdev-test'
    done = subprocess.run([program, page, '--flags', 'slow cpu'], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
