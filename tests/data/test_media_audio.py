"Recordings of every format are read to their end, and from any place as from their start."
import io
import sys

import numpy as np
import pytest
import soundfile

from xtts_nb.config import UserError
from xtts_nb.data.audio import audio_seconds, load_audio, open_audio, synthetic_voice

VOICE = synthetic_voice(3., sample_rate=48000)


def sound(kind, level=None, rate=48000, **how):
    data = io.BytesIO()
    if level is not None: how = dict(compression_level=level, bitrate_mode='CONSTANT')
    with soundfile.SoundFile(data, 'w', rate, 1, format=kind, **how) as file: file.write(VOICE)
    return data.getvalue()

def bare(mp3):
    "Without its first frame, which holds the number of frames; both are of one size."
    at = mp3.index(b'\xff\xfb', 4)
    return mp3[at:]

def picture(size):
    bits = bytes(size >> s & 127 for s in (21, 14, 7, 0))
    return b'ID3\3\0\0' + bits + b'\xff\xfb' * (size // 2)

MP3S = {   # bytes, s
    'as written': (lambda: sound('MP3'), 3), 'joined': (lambda: sound('MP3') * 2, 6),
    'rising bit rate': (lambda: bare(sound('MP3', .9)) + bare(sound('MP3', 0.)), 6),
    'falling bit rate': (lambda: bare(sound('MP3', 0.)) + bare(sound('MP3', .9)), 6),
    'a picture': (lambda: picture(60_000) + bare(sound('MP3')), 3),
    'a tag between': (lambda: sound('MP3') + b'TAG' + bytes(125) + picture(999) + sound('MP3'), 6)}

@pytest.mark.parametrize('kind', MP3S)
def test_an_mp3_is_read_to_its_end(tmp_path, kind):
    content, seconds = MP3S[kind]
    (tmp_path / 'x.mp3').write_bytes(content())
    assert audio_seconds(tmp_path / 'x.mp3') == pytest.approx(seconds, abs=0.1)
    assert len(load_audio(tmp_path / 'x.mp3', 48000)) == pytest.approx(48000 * seconds, abs=4800)

def without_length(flac):
    data = bytearray(flac)
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    return bytes(data)

def test_a_flac_of_unknown_length_is_measured(tmp_path):
    (tmp_path / 'x.flac').write_bytes(without_length(sound('FLAC')))
    assert audio_seconds(tmp_path / 'x.flac') == 3
    assert np.abs(load_audio(tmp_path / 'x.flac', 48000) - VOICE).max() < 1e-4

@pytest.mark.parametrize('kind, how', [
    ('FLAC', {}), ('OGG', {'subtype': 'VORBIS'}), ('OGG', {'subtype': 'OPUS'})])
def test_joined_files_are_read_or_refused(tmp_path, monkeypatch, kind, how):
    (tmp_path / 'x').write_bytes(sound(kind, **how) * 2)
    monkeypatch.setitem(sys.modules, 'av', None)
    with pytest.raises(UserError, match='joined'): open_audio(tmp_path / 'x')
    monkeypatch.undo()
    pytest.importorskip('av')
    assert audio_seconds(tmp_path / 'x') == pytest.approx(6, abs=0.1)

def encoded(path, codec):
    "The voice in the container that the ending names, written by PyAV."
    av = pytest.importorskip('av')
    with av.open(str(path), 'w', format='mp4' if path.suffix in ('.m4a', '.m4b') else None) as container:
        stream = container.add_stream(codec, rate=48000, layout='mono')
        frame = av.AudioFrame.from_ndarray(VOICE[None], 'fltp', 'mono')
        frame.sample_rate = 48000
        for part in (frame, None):
            for packet in stream.encode(part): container.mux(packet)
    return path

@pytest.mark.parametrize('name, codec', [
    ('x.m4a', 'aac'), ('x.m4b', 'aac'), ('x.mp4', 'aac'), ('x.aac', 'aac'),
    ('x.webm', 'libopus'), ('x.opus', 'libopus')])
def test_what_phones_and_audiobooks_give(tmp_path, name, codec):
    wav = load_audio(encoded(tmp_path / name, codec), 48000)
    assert len(wav) == pytest.approx(len(VOICE), abs=4800)
    lag = np.fft.irfft(np.fft.rfft(wav, 2**18) * np.conj(np.fft.rfft(VOICE, 2**18))).argmax()
    assert np.corrcoef(wav[lag:lag + 99_999], VOICE[:len(wav[lag:lag + 99_999])])[0, 1] > 0.95

def test_without_pyav_it_is_named(tmp_path, monkeypatch):
    path = encoded(tmp_path / 'x.m4a', 'aac')
    monkeypatch.setitem(sys.modules, 'av', None)
    with pytest.raises(UserError, match=r'x.m4a: is MP4.*pip install "xtts_nb.media."'): open_audio(path)

@pytest.mark.parametrize('kind', ['FLAC', 'MP3', 'OGG', 'WAV'])
def test_a_part_sounds_as_in_the_whole(tmp_path, kind):
    "Also behind a later part, and of a file with a variable bit rate."
    how = {'bitrate_mode': 'VARIABLE', 'compression_level': .5} if kind == 'MP3' else {}
    (tmp_path / 'x').write_bytes(sound(kind, **how))
    with open_audio(tmp_path / 'x') as file:
        whole = file.read()
        for first in (99_999, 500, 50_000, 140_000):
            file.seek(first)
            assert np.array_equal(file.read(3000), whole[first:first + 3000])
    part = load_audio(tmp_path / 'x', 48000, 1., 1.5)
    assert np.array_equal(part, np.clip(whole[48000:72000], -1, 1))

@pytest.mark.parametrize('head, reason', [
    (b'', '0 bytes'), (b'\xef\xbb\xbf\n <html>', 'web page'),
    (b'version https://git-lfs.github.com/spec/v1', 'lfs'),
    (b'RIFF\x3c\x07\0\0WAVEfmt ', 'WAV|Format|format'),
    (b'RIFF\xff\xf1\0\0WAVEfmt ', 'WAV|Format|format')])
def test_what_a_file_is_that_is_no_sound(tmp_path, head, reason):
    "By bytes at their place: the size of a wav may hold any."
    (tmp_path / 'a.wav').write_bytes(head)
    with pytest.raises(UserError, match=f'a.wav: not readable as audio .*({reason})') as e:
        open_audio(tmp_path / 'a.wav')
    assert reason == 'web page' or 'web page' not in str(e.value)

def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    def refuse(*file): raise PermissionError(13, 'Permission denied')
    monkeypatch.setattr('xtts_nb.data.audio._decoder', refuse)
    (tmp_path / 'a.wav').write_bytes(sound('WAV'))
    with pytest.raises(UserError, match='a.wav.*Permission denied'): open_audio(tmp_path / 'a.wav')
