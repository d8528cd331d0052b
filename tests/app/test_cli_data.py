"The commands from recordings to a cache: calls, output and exit codes; what takes long is a stub."

import numpy as np
import pytest
import soundfile

from process import check_bounds
from xtts_nb.app import cli_data
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.app.demo import DEMO_SENTENCES, speak, VOICES

TINY = XTTSConfig.tiny()


def test_bounds():
    check_bounds(('prepare c --out o --workers', 0, -1), ('bench data --data c --clips', 1, 0))


# --- download -----------------------------------------------------------------------------------------------

def test_the_list_of_what_there_is(ran):
    rows, text = ran('download --json').json['sources'], ran('download').out
    assert rows[2] == {'name': 'ljspeech', 'GB': 2.75, 'licence': 'public domain'}
    assert [row['name'] for row in rows[:2]] == ['xtts-v2', 'xtts-voices']
    assert text.startswith('xtts-nb download NAME') and all(row['name'] in text for row in rows)

# --- a recording and its text -------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def book(tmp_path_factory):
    "A recording of six sentences and its text."
    folder, texts = tmp_path_factory.mktemp('book'), DEMO_SENTENCES['en'][:6]
    parts = [p for t in texts for p in (speak(t, 'en', VOICES['f4'])[0], np.zeros(11025, np.int16))]
    soundfile.write(folder / 'book.wav', np.concatenate(parts), 22050)
    (folder / 'book.txt').write_text(' '.join(texts[:5]))
    return folder

# --- the DVAE of a cache ------------------------------------------------------------------------------------

def test_what_a_learned_dvae_belongs_to(tmp_path):
    key = lambda corpus='a', layout=None, **changes: cli_data._learned_key(tmp_path / corpus,
        TINY.replace(**changes), layout)
    same = (key(data={'batch_size': 3}), key(training={'steps': 7}), key(model={'gpt': {'layers': 1}}),
            key('b/../a'))
    others = {key('b'), key(layout='vctk'), key(training={'seed': 3}), key(training={'dvae_steps': 3}),
              key(model={'audio': {'f_max': 7000.}}), key(model={'dvae': {'codes': 7}})}
    assert {*same} == {key()} and len(others - {key()}) == 6

# --- prepare and merge --------------------------------------------------------------------------------------

@pytest.mark.parametrize('shard', ['one', '1', '/2', '1/', 'a/2', '1/b', '-1/2', ''])
def test_what_is_no_shard(shard):
    assert cli_data._part('12/34') == (12, 34)
    with pytest.raises(UserError, match=f'^--shard {shard}: give I/N, such as 2/4'): cli_data._part(shard)

# --- verify -------------------------------------------------------------------------------------------------

# --- bench data ---------------------------------------------------------------------------------------------
