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

COMMANDS = """
import shlex, sys, xtts_nb, xtts_nb.data.cache as c
from xtts_nb.app.cli import main
print(xtts_nb.__file__, c.__file__, sep="\\n", flush=True)
for line in sys.argv[1:]:
    sys.argv = ['xtts-nb', *shlex.split(line)]
    try: main()
    except SystemExit as end: assert not end.code, line
"""

def test_prepare_train_and_say(installed, corpus, mini, tmp_path):
    "In one process, since TensorFlow starts longer than the commands run; the script shows its help."
    config = mini.replace(training={'gpt': {'steps': 2, 'warmup_steps': 0},
                                    'dvae': {'steps': 2, 'mode': 'eager'}})
    (tmp_path / 'tiny.yaml').write_text(config.to_yaml())
    said = there(installed, 'python', '-c', COMMANDS,
                 f'prepare {corpus} --out cache --config tiny.yaml', 'train --data cache --run run',
                 f'say "aa bb" --model run --voice {corpus}/wavs/low-0.wav --out said.wav', cwd=tmp_path)
    for file in said.splitlines()[:2]:
        assert Path(file).is_relative_to(installed.parent) and not Path(file).is_relative_to(ROOT), file
    assert (tmp_path / 'said.wav').stat().st_size > 1000
    assert ' prepare ' in there(installed, 'xtts-nb', '--help', cwd=tmp_path)
