"Word times and subtitles: `speech/subtitles` has what they are."
import json

import pytest
import soundfile

from xtts_nb.config import UserError
from xtts_nb.data.espeak import speak, VOICES
from xtts_nb.speech.subtitles import timed_words, write_subtitles

def test_subtitles_hold_what_is_said_and_nothing_else(tmp_path):
    pytest.importorskip('espeakng_loader', reason='no espeak-ng here: pip install xtts_nb[demo]')
    said, other = 'Please close the door behind you.', 'Nobody has said a word of this sentence.'
    wav, rate = speak(said, 'en', VOICES['f4'])
    soundfile.write(tmp_path / 'a.wav', wav, rate)
    words = timed_words(tmp_path / 'a.wav', [f'{other} {said}'], 'en')
    assert [word.text for word in words] == said.split() and words[-1].last
    times = [t for word in words for t in (word.begin, word.end)]
    assert times == sorted(times) and times[-1] < len(wav) / rate + .1
    for ending, head in (('.srt', '1\n00:00:00,'), ('.vtt', 'WEBVTT\n\n')):
        write_subtitles(words, path := tmp_path / f'a{ending}')
        assert path.read_text().startswith(head) and said in path.read_text()
    write_subtitles(words, path := tmp_path / 'a.json')
    assert json.loads(path.read_text())[0]['text'] == 'Please'
    for text in (other, '...'):
        with pytest.raises(UserError): timed_words(tmp_path / 'a.wav', [text], 'en')
