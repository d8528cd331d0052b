"The wheel, which must be that of the sdist, in a clean environment."
import zipfile
from pathlib import Path

import pytest
from tree import ROOT, notebooks
from wheels import there

from dev.wheel import shown

pytestmark = pytest.mark.slow


def test_the_wheel_holds_the_library_its_pages_and_their_records(wheels):
    one, two = ({i.filename: i.CRC for i in zipfile.ZipFile(wheel).infolist()} for wheel in wheels)
    assert one == two   # of the source, and of the sdist
    info = {n for n in one if '.dist-info/' in n}
    library = {f.relative_to(ROOT).as_posix() for f in (ROOT / 'xtts_nb').rglob('*.py')}
    pages = {f'xtts_nb/notebooks/{f.relative_to(ROOT / "nbs").as_posix()}' for f in notebooks()}
    records = {f'xtts_nb/notebooks/benchmarks/{name}' for name in shown(ROOT / 'benchmarks')}
    assert {*one} - info == {*library, 'xtts_nb/py.typed', 'xtts_nb/speech/page.html', *pages, *records}
    assert [n for n in info if n.endswith('licenses/LICENSE')]


def test_prepare_train_and_say(installed, corpus, mini, tmp_path):
    program = 'import xtts_nb, xtts_nb.data.cache as c; print(xtts_nb.__file__, c.__file__, sep="\\n")'
    for file in there(installed, 'python', '-c', program, cwd=tmp_path).splitlines():
        assert Path(file).is_relative_to(installed.parent) and not Path(file).is_relative_to(ROOT), file
    config = mini.replace(training={'gpt': {'steps': 2, 'warmup_steps': 0}, 'dvae': {'steps': 2}})
    (tmp_path / 'tiny.yaml').write_text(config.to_yaml())
    there(installed, 'xtts-nb', 'prepare', corpus, '--out', 'cache', '--config', 'tiny.yaml', cwd=tmp_path)
    there(installed, 'xtts-nb', 'train', '--data', 'cache', '--run', 'run', cwd=tmp_path)
    there(installed, 'xtts-nb', 'say', 'aa bb', '--model', 'run', '--voice', corpus / 'wavs/low-0.wav',
          '--out',
          'said.wav', cwd=tmp_path)
    assert (tmp_path / 'said.wav').stat().st_size > 1000
