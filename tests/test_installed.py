"The wheel, which must be that of the sdist, in a clean environment."
import zipfile
from pathlib import Path

import pytest
from tree import ROOT, notebooks
from wheels import there

from dev.wheel import shown

pytestmark = pytest.mark.slow


def test_the_wheel_of_the_sdist_is_that_of_the_source(wheels):
    one, two = ({i.filename: i.CRC for i in zipfile.ZipFile(wheel).infolist()} for wheel in wheels)
    assert one == two and 'xtts_nb/notebooks/50_monitoring.ipynb' in one


def test_the_wheel_holds_the_library_its_pages_and_their_records(wheels):
    names = zipfile.ZipFile(wheels[0]).namelist()
    info = [n for n in names if '.dist-info/' in n]
    library = {f.relative_to(ROOT).as_posix() for f in (ROOT / 'xtts_nb').rglob('*.py')}
    pages = {f'xtts_nb/notebooks/{f.relative_to(ROOT / "nbs").as_posix()}' for f in notebooks()}
    records = {f'xtts_nb/notebooks/benchmarks/{name}' for name in shown(ROOT / 'benchmarks')}
    assert {n for n in names if n not in info} == {
        *library, 'xtts_nb/py.typed', 'xtts_nb/speech/page.html', *pages, *records}
    assert [n for n in info if n.endswith('licenses/LICENSE')]


def test_what_is_installed_is_the_wheel(installed, tmp_path):
    program = 'import xtts_nb, xtts_nb.data.cache as c; print(xtts_nb.__file__, c.__file__, sep="\\n")'
    for file in there(installed, 'python', '-c', program, cwd=tmp_path).splitlines():
        assert Path(file).is_relative_to(installed.parent) and not Path(file).is_relative_to(ROOT), file


def test_prepare_train_and_say(installed, corpus, small, tmp_path):
    config = small.replace(model={'gpt': {'layers': 1, 'conditioning_layers': 1}}, data={'buckets': 1},
                           training={'steps': 2, 'dvae_steps': 2, 'mode': 'graph'})
    (tmp_path / 'tiny.yaml').write_text(config.to_yaml())
    there(installed, 'xtts-nb', 'prepare', corpus, '--out', 'cache', '--config', 'tiny.yaml', cwd=tmp_path)
    there(installed, 'xtts-nb', 'train', '--data', 'cache', '--run', 'run', cwd=tmp_path)
    there(installed, 'xtts-nb', 'say', 'aa bb', '--model', 'run', '--voice', corpus / 'wavs' / 'low-0.wav',
          '--out', 'said.wav', cwd=tmp_path)
    assert (tmp_path / 'said.wav').stat().st_size > 1000
