"Word times and subtitles: `speech/subtitles` has what they are."
import io
import json

import pytest
import soundfile

from xtts_nb.config import UserError
from xtts_nb.data.espeak import speak, VOICES
from xtts_nb.speech.serve import _timed
from xtts_nb.speech.subtitles import TimedWord, timed_words, write_subtitles

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
    soundfile.write(file := io.BytesIO(), wav, rate, format='WAV')
    times = _timed(file.getvalue(), f'"{said}"', 'en')
    begins, ends = (times[f'character_{which}_times_seconds'] for which in ('start', 'end'))
    assert ''.join(times['characters']) == f'"{said}"' and begins[1:] == ends[:-1] == sorted(ends[:-1])
    assert begins[1 + said.index('door')] == next(word.begin for word in words if word.text == 'door')

def test_signs_of_the_text_stay(tmp_path):
    for ending, text in (('.srt', '— {a} C:\\new <b>'), ('.vtt', '— {a} C:\\new &lt;b&gt;')):
        write_subtitles([TimedWord('— {a} C:\\new <b>', .5, 3661.5, True)], path := tmp_path / f'b{ending}')
        assert path.read_text(encoding='utf-8').endswith(f':01:01{",."[ending == ".vtt"]}500\n{text}\n')
