"espeak-ng: paths that are too long for it."
import numpy as np
import pytest

from xtts_nb.config import UserError
from xtts_nb.data import espeak
from xtts_nb.data.espeak import _short_path, speak

def test_data_behind_a_long_path_is_found(tmp_path, monkeypatch):
    "espeak-ng cuts long paths, so they become a link."
    library, data = espeak.espeak_files()
    deep = tmp_path / ('x' * 100) / ('y' * 100)
    deep.mkdir(parents=True)
    (deep / 'espeak-ng-data').symlink_to(data)
    wanted = speak('Hello.', 'en')[0]
    monkeypatch.setattr(espeak, 'espeak_files', lambda: (library, str(deep / 'espeak-ng-data')))
    with pytest.raises(UserError, match='does not find its data'): speak('Hello.', 'en')
    monkeypatch.setattr(espeak, 'espeak_files', lambda: (library, _short_path(str(deep / 'espeak-ng-data'))))
    assert np.array_equal(speak('Hello.', 'en')[0], wanted)
