"""The check that notebooks and library agree notices what it must, and changes nothing."""
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / 'dev'))
import in_step  # noqa: E402


@pytest.fixture
def root(tmp_path) -> Path:
    "A repository of one page, in step."
    for folder in ('nbs', 'xtts_nb'): (tmp_path / folder).mkdir()
    for name in ('pyproject.toml', 'nbs/00_config.ipynb', 'xtts_nb/__init__.py'):
        shutil.copy(ROOT / name, tmp_path / name)
    for name, content in in_step.regenerated(tmp_path).items(): (tmp_path / name).write_bytes(content)
    return tmp_path


def test_it_notices_every_way_of_being_out_of_step(root, monkeypatch):
    notebook, module, orphan = (root / f for f in ('nbs/00_config.ipynb', 'xtts_nb/config.py',
                                                   'xtts_nb/orphan.py'))
    before = in_step.contents(root)
    assert in_step.differences(root) == []

    orphan.write_bytes(module.read_bytes())   # its notebook is gone
    module.write_text(module.read_text(encoding='utf-8') + '\nedited = True\n', encoding='utf-8')
    notebook.write_text(notebook.read_text(encoding='utf-8').replace('"execution_count": null',
                                                                     '"execution_count": 3'),
                        encoding='utf-8')
    now = in_step.contents(root)
    assert in_step.differences(root) == ['nbs/00_config.ipynb', 'xtts_nb/config.py', 'xtts_nb/orphan.py']
    assert in_step.contents(root) == now

    notebook.write_bytes(before['nbs/00_config.ipynb'])
    orphan.unlink()
    module.unlink()
    monkeypatch.setenv('IN_TEST', '1')   # under it nbdev exports nothing
    assert in_step.differences(root) == ['xtts_nb/config.py']
