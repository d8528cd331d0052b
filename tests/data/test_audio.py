"Sound in every format and rate, clips that are no sound, and the mels against their definitions."
import io
import struct
import sys

import numpy as np
import pytest
import soundfile
import tensorflow as tf

from xtts_nb.config import AudioConfig, UserError
from xtts_nb.data.audio import (
    _LOG_FLOOR, audio_seconds, check_native, decode_wav, frame_count, griffin_lim, load_audio, log_mel,
    log_mel_numpy, open_audio, _pcm16, resample, resample_batch, save_audio, synthetic_voice, wav_bytes,
    _wav_header)

RATE = 22050
AUDIO = AudioConfig()
VOICE = synthetic_voice(3., sample_rate=48000)

def tone(): return 0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)

# --- reading ----------------------------------------------------------------------------------------

def test_channels_are_averaged_unless_they_cancel_out(tmp_path):
    soundfile.write(tmp_path / 'a.wav', np.stack([tone(), 0 * tone()], 1), RATE, subtype='FLOAT')
    soundfile.write(tmp_path / 'b.wav', np.stack([tone(), -tone()], 1), RATE, subtype='FLOAT')
    assert np.allclose(load_audio(tmp_path / 'a.wav'), tone() / 2, atol=1e-6)
    assert np.allclose(load_audio(tmp_path / 'b.wav'), tone(), atol=1e-6)
    soundfile.write(tmp_path / 'loud.wav', np.array([0., 8., -8.]), RATE, 'FLOAT')
    assert load_audio(tmp_path / 'loud.wav').tolist() == [0, 1, -1]
    wav = np.random.default_rng(0).integers(-9, 9, (2**19 + 1, 2), np.int16)   # more than a block
    soundfile.write(tmp_path / 'c.wav', wav, RATE)
    assert np.array_equal(load_audio(tmp_path / 'c.wav'), np.float32(wav.mean(1) / 32768))

# --- every recording to its end -----------------------------------------------------------------------

def sound(kind, level=None, **how):
    data = io.BytesIO()
    if level is not None: how = dict(compression_level=level, bitrate_mode='CONSTANT')
    with soundfile.SoundFile(data, 'w', 48000, 1, format=kind, **how) as file: file.write(VOICE)
    return data.getvalue()

def bare(mp3):
    "Without its first frame, which holds the number of frames; both are of one size."
    return mp3[mp3.index(b'\xff\xfb', 4):]

def picture(size):
    return b'ID3\3\0\0' + bytes(size >> s & 127 for s in (21, 14, 7, 0)) + b'\xff\xfb' * (size // 2)

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

def test_a_flac_of_unknown_length_is_measured(tmp_path):
    data = bytearray(sound('FLAC'))
    data[21], data[22:26] = data[21] & 0xF0, bytes(4)
    (tmp_path / 'x.flac').write_bytes(data)
    assert audio_seconds(tmp_path / 'x.flac') == 3
    assert np.abs(load_audio(tmp_path / 'x.flac', 48000) - VOICE).max() < 1e-4

@pytest.mark.parametrize('kind, subtype', [('FLAC', None), ('OGG', 'VORBIS'), ('OGG', 'OPUS')])
def test_joined_files_are_read_or_refused(tmp_path, monkeypatch, kind, subtype):
    (tmp_path / 'x').write_bytes(sound(kind, subtype=subtype) * 2)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, 'av', None)
        with pytest.raises(UserError, match='joined'): open_audio(tmp_path / 'x')
    pytest.importorskip('av')
    assert audio_seconds(tmp_path / 'x') == pytest.approx(6, abs=0.1)

@pytest.mark.parametrize('name, codec', [('x.m4a', 'aac'), ('x.aac', 'aac'), ('x.webm', 'libopus')])
def test_what_phones_and_audiobooks_give(tmp_path, monkeypatch, name, codec):
    av, path = pytest.importorskip('av'), tmp_path / name
    with av.open(str(path), 'w', format='mp4' if path.suffix == '.m4a' else None) as container:
        stream = container.add_stream(codec, rate=48000, layout='mono')
        frame = av.AudioFrame.from_ndarray(VOICE[None], 'fltp', 'mono')
        frame.sample_rate = 48000
        for part in (frame, None):
            for packet in stream.encode(part): container.mux(packet)
    wav = load_audio(path, 48000)
    assert len(wav) == pytest.approx(len(VOICE), abs=4800)
    lag = np.fft.irfft(np.fft.rfft(wav, 2**18) * np.conj(np.fft.rfft(VOICE, 2**18))).argmax()
    assert np.corrcoef(wav[lag:lag + 99_999], VOICE[:len(wav[lag:lag + 99_999])])[0, 1] > 0.95
    monkeypatch.setitem(sys.modules, 'av', None)
    with pytest.raises(UserError, match=r'x\..*: is .*pip install "xtts_nb.media."'): open_audio(path)

@pytest.mark.parametrize('kind', ['FLAC', 'MP3', 'OGG', 'WAV'])
def test_a_part_sounds_as_in_the_whole(tmp_path, kind):
    "Also after a later part, and of a file with a variable bit rate."
    how = {'bitrate_mode': 'VARIABLE', 'compression_level': .5} if kind == 'MP3' else {}
    (tmp_path / 'x').write_bytes(sound(kind, **how))
    with open_audio(tmp_path / 'x') as file:
        whole = file.read()
        for first in (99_999, 500, 50_000, 140_000):
            file.seek(first)
            assert np.array_equal(file.read(3000), whole[first:first + 3000])
    part = load_audio(tmp_path / 'x', 48000, 1., 1.5)
    assert np.array_equal(part, np.clip(whole[48000:72000], -1, 1))

# --- rates and writing --------------------------------------------------------------------------------

def windowed_sinc(wav, old, new, crossings=6, rolloff=0.99):
    "The defining sum, a sample at a time, as torchaudio has it."
    cutoff = rolloff * min(old, new)
    t = cutoff * (np.arange(len(wav)) / old - np.arange(-(-len(wav) * new // old))[:, None] / new)
    window = np.where(np.abs(t) < crossings, np.cos(np.pi * t / (2 * crossings))**2, 0)
    return (np.sinc(t) * window * cutoff / old) @ wav

@pytest.mark.parametrize('samples', [1, 701])
@pytest.mark.parametrize('old, new', [(22050, 16000), (48000, 22050), (8000, 24000), (44100, 22050)])
def test_resampling_is_the_defining_sum(samples, old, new):
    wav = np.random.default_rng(samples).uniform(-1, 1, (2, samples)).astype(np.float32)
    right = [windowed_sinc(row, old, new) for row in wav]
    assert np.allclose([resample(row, old, new) for row in wav], right, atol=1e-5)
    assert np.allclose(resample_batch(tf.constant(wav), old, new), right, atol=1e-5)
    assert resample(wav[0, :0], old, new).shape == (0,) and np.array_equal(resample(wav[0], old, old), wav[0])

def test_samples_are_written_as_libsndfile_writes_them(tmp_path):
    samples = np.array([0, 1, -2, 32767, -32768], np.int16)
    soundfile.write(tmp_path / 'b.wav', samples, 16000, subtype='PCM_16')
    assert (tmp_path / 'b.wav').read_bytes() == wav_bytes(samples, 16000)
    wav = np.array([0.5, -1, 1, 2, -2, 0.6 / 2**15, -0.6 / 2**15, 0.4 / 2**15], np.float32)
    assert np.frombuffer(_pcm16(wav), '<i2').tolist() == [16384, -32768, 32767, 32767, -32768, 1, -1, 0]

def test_written_sound_is_scaled_rather_than_clipped_and_calls_no_python(monkeypatch, tmp_path):
    "Ctrl-C in a call from C gets lost."
    for name in ('SoundFile', 'write'): monkeypatch.setattr(soundfile, name, None)
    for name, n in (('none', 0), ('one', 1), ('long', 22050)): save_audio(tmp_path / name, 6 * tone()[:n])
    monkeypatch.undo()
    assert [soundfile.info(tmp_path / name).frames for name in ('none', 'one', 'long')] == [0, 1, 22050]
    assert np.allclose(load_audio(tmp_path / 'long'), 2 * tone(), atol=1e-3)

# --- wav files in a graph -------------------------------------------------------------------------------

SAMPLES = np.random.default_rng(0).integers(-20000, 20000, 999, np.int16)

def chunk(name, body): return name + struct.pack('<I', len(body)) + body

def wav_file(*chunks, mark=b'RIFF', bits=16, channels=1, rate=22050, form=1):
    block = channels * bits // 8
    fmt = chunk(b'fmt ', struct.pack('<HHIIHH', form, channels, rate, rate * block, block, bits))
    return chunk(mark, b'WAVE' + fmt + b''.join(chunks))

def encoded(**how):
    file = io.BytesIO()
    soundfile.write(file, SAMPLES / 32768, **dict(samplerate=22050, format='WAV', subtype='PCM_16') | how)
    return file.getvalue()

DATA, NOTE = chunk(b'data', SAMPLES.tobytes()), chunk(b'LIST', b'noise!')
READ = {'plain': wav_bytes(SAMPLES), 'of libsndfile': encoded(), 'a chunk before': wav_file(NOTE, DATA),
        'a chunk behind': wav_file(DATA, NOTE), 'longer than it says': wav_bytes(SAMPLES) + b'\0' * 8,
        'data inside a chunk': wav_file(chunk(b'JUNK', b'data\4\0\0\0noise!'), DATA),
        'one sample': wav_bytes(SAMPLES[:1])}
REFUSED = {'24 bits': encoded(subtype='PCM_24'), 'float': encoded(subtype='FLOAT'),
           'AVI': chunk(b'RIFF', b'AVI '),
           'extensible': encoded(format='WAVEX'), 'stereo': wav_file(DATA, channels=2), 'empty': b'',
           'rate': wav_file(DATA, rate=44100), 'FLAC': encoded(format='FLAC'), 'RF64': encoded(format='RF64'),
           'cut off': wav_bytes(SAMPLES)[:-500], 'RIFX': wav_file(DATA, mark=b'RIFX'),
           'no data': wav_file(NOTE), 'chunks': wav_file(NOTE, NOTE, DATA), 'none': wav_bytes(SAMPLES[:0]),
           'a chunk beyond': wav_file(b'LIST' + struct.pack('<I', 2**32 - 16), DATA),
           'data too long': wav_file(chunk(b'data', SAMPLES.tobytes())[:-9]),
           'endless': _wav_header(22050) + SAMPLES.tobytes()}

def test_native_reading_gives_the_samples_that_libsndfile_gives_or_names_the_file(tmp_path):
    "Inside a graph, outside of one, and before the first batch: bytes of another kind would be noise."
    in_graph = tf.function(decode_wav, input_signature=[tf.TensorSpec([], tf.string)])
    path = str(tmp_path / 'bäd.wav')
    for kind, content in (READ | REFUSED).items():
        (tmp_path / 'bäd.wav').write_bytes(content)
        if kind in READ:
            assert np.array_equal(in_graph(path), SAMPLES[:1] if kind == 'one sample' else SAMPLES), kind
            assert np.array_equal(load_audio(path) * 32768, in_graph(path)), kind
            check_native([path], 22050)
            continue
        words = 'd.wav: is not what native reading takes, .* mono, at 22050 Hz; convert it'
        with pytest.raises(tf.errors.InvalidArgumentError, match=words): in_graph(path)
        with pytest.raises(UserError, match=f'bä{words}'): decode_wav(path)
        if kind in ('24 bits', 'float', 'AVI', 'stereo', 'rate', 'empty', 'FLAC'):   # by its header alone
            with pytest.raises(UserError, match=f'bä{words}'): check_native([path], 22050)
    assert not any('Py' in op.type for op in in_graph.get_concrete_function().graph.get_operations())
    (tmp_path / 'bäd.wav').write_bytes(wav_bytes(SAMPLES, 24000))
    assert np.array_equal(decode_wav(path, 24000), SAMPLES)

# --- mels -------------------------------------------------------------------------------------------

def frames_of(wav, n_fft, hop):
    mirrored = np.pad(wav, n_fft // 2, 'reflect')
    return np.stack([mirrored[i * hop:][:n_fft] for i in range(1 + len(wav) // hop)])

def triangles(n_fft, rate, n_mels, f_max):
    "Of the HTK mel scale, a number at a time: (n_fft // 2 + 1, C), and the width of each in Hz."
    top = 2595 * np.log10(1 + f_max / 700)
    edges = [700 * (10**(top * c / (n_mels + 1) / 2595) - 1) for c in range(n_mels + 2)]
    height = [[max(0, min((hz - a) / (b - a), (c - hz) / (c - b)))
               for a, b, c in zip(edges, edges[1:], edges[2:])]
              for hz in np.arange(n_fft // 2 + 1) * rate / n_fft]
    return np.array(height), np.array(edges[2:]) - edges[:-2]

def centred(window, n_fft):
    left = (n_fft - len(window)) // 2
    return np.pad(window, (left, n_fft - len(window) - left))

# every point matters
SMALL = AudioConfig.model_construct(sample_rate=8000, n_mels=5, hop_length=16, win_length=64, f_max=3800.)
ODD = SMALL.model_copy(update={'win_length': 61})

@pytest.mark.parametrize('audio, n_fft', [(AUDIO, 1024), (AUDIO, 2048), (SMALL, 64), (SMALL, 128), (ODD, 64)],
                         ids=['codes', 'voice', 'small', 'wide', 'odd'])
def test_the_mel_by_its_definition(audio, n_fft):
    wav = np.random.default_rng(0).normal(size=1500)
    window = centred(np.sin(np.pi * np.arange(audio.win_length) / audio.win_length)**2, n_fft)   # Hann's
    points = np.exp(-2j * np.pi * np.outer(np.arange(n_fft), np.arange(n_fft // 2 + 1)) / n_fft)
    height, width = triangles(n_fft, audio.sample_rate, audio.n_mels, audio.f_max)
    power = np.abs(frames_of(wav, n_fft, audio.hop_length) * window @ points)**2
    right = np.log(np.maximum(power @ (2 * height / width), 1e-5))
    assert np.allclose(log_mel_numpy(wav, n_fft, audio), right, atol=1e-4)
    assert np.allclose(log_mel(np.stack([0 * wav, wav]), n_fft, audio)[1], right, atol=1e-3)
    mirrored = np.pad(wav, n_fft // 2, 'reflect')
    assert np.allclose(log_mel(mirrored, n_fft, audio, mirror=False), right, atol=1e-3)

@pytest.mark.parametrize('samples, n_fft', [(1, 1024), (255, 1024), (512, 1024), (600, 2048), (1024, 2048)])
def test_a_clip_shorter_than_half_a_window_has_its_frames_or_is_refused(samples, n_fft):
    "Never quietly fewer frames than `frame_count` says, or none."
    wav = synthetic_voice(1.)[5000:5000 + samples]
    assert log_mel_numpy(wav, n_fft).shape == (frame_count(samples), 80)
    try: mel = log_mel(wav, n_fft)
    except (UserError, ValueError, tf.errors.InvalidArgumentError): return
    assert mel.shape == (frame_count(samples), 80)

# --- back to sound ------------------------------------------------------------------------------------

def test_a_mel_of_any_length_and_level_sounds_without_a_new_trace():
    mel = log_mel(synthetic_voice(0.8), AUDIO.dvae_n_fft)
    for frames in (1, 2, 3, 4, 5, 8):
        wav = griffin_lim(mel[:frames], iterations=3)
        assert wav.shape == ((frames - 1) * AUDIO.hop_length,) and np.isfinite(wav).all()
    before = griffin_lim.experimental_get_tracing_count()
    for level in (-100., _LOG_FLOOR, 0.):
        assert np.isfinite(griffin_lim(tf.fill((40, 80), float(level)), iterations=3)).all()
    again = log_mel(griffin_lim(mel, iterations=3), AUDIO.dvae_n_fft)
    assert np.abs(again - mel)[4:-4].mean() < 0.3   # 0.8 without an iteration
    assert griffin_lim.experimental_get_tracing_count() == before
