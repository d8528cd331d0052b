"Sound in every format and rate, clips that are no sound, and the mels against float64."
import os

import numpy as np
import pytest
import soundfile
import tensorflow as tf

from xtts_nb.audio import (LOG_FLOOR, frame_count, griffin_lim, load_audio, log_mel, log_mel_numpy, mel_filterbank, resample,
                           save_audio,
                           stft, synthetic_voice)
from xtts_nb.config import AudioConfig, UserError

RATE, TONE = 22050, 440.
AUDIO = AudioConfig()


def tone(seconds=1.0, rate=RATE, hz=TONE): return 0.5 * np.sin(2 * np.pi * hz * np.arange(int(seconds * rate)) / rate)

def loudest_hz(wav, rate=RATE):
    middle = wav[len(wav) // 4:-len(wav) // 4] * np.hanning(len(wav[len(wav) // 4:-len(wav) // 4]))
    return np.abs(np.fft.rfft(middle, 1 << 16)).argmax() * rate / (1 << 16)


# --- reading -------------------------------------------------------------------------------------------------------

FORMATS = [('wav', 'PCM_16', 1e-4), ('wav', 'PCM_24', 1e-5), ('wav', 'PCM_32', 1e-5), ('wav', 'FLOAT', 1e-6),
           ('wav', 'DOUBLE', 1e-6),
           ('wav', 'PCM_U8', 1e-2), ('flac', 'PCM_16', 1e-4), ('flac', 'PCM_24', 1e-5), ('ogg', 'VORBIS', 0.05),
           ('mp3', 'MPEG_LAYER_III', 0.05)]

@pytest.mark.parametrize('form, subtype, tolerance', FORMATS, ids=lambda x: str(x))
def test_every_format_gives_the_same_sound(tmp_path, form, subtype, tolerance):
    if form.upper() not in soundfile.available_formats(): pytest.skip(f'this libsndfile does not write {form}')
    path = tmp_path / f'a.{form}'
    soundfile.write(path, tone(), RATE, subtype=subtype)
    wav = load_audio(path)
    assert wav.dtype == np.float32 and wav.ndim == 1 and abs(len(wav) - RATE) <= (0 if form != 'mp3' else 2304)
    assert abs(loudest_hz(wav) - TONE) < 1
    if form != 'mp3': assert np.abs(wav - tone())[500:-500].max() < tolerance   # mp3 may begin late
    else: assert abs(np.abs(wav[5000:-5000]).max() - 0.5) < tolerance

@pytest.mark.parametrize('rate', [8000, 11025, 16000, 22050, 24000, 32000, 44100, 48000, 96000])
@pytest.mark.parametrize('target', [22050, 24000])
def test_every_rate_gives_length_and_tone(tmp_path, rate, target):
    soundfile.write(tmp_path / 'a.wav', tone(rate=rate), rate, subtype='FLOAT')
    wav = load_audio(tmp_path / 'a.wav', target)
    assert len(wav) == target and abs(loudest_hz(wav, target) - TONE) < 1
    assert np.abs(wav - tone(rate=target))[2000:-2000].max() < 0.02

@pytest.mark.parametrize('samples', [1, 2, 7, 159, 160, 161, 4410, 44101])
@pytest.mark.parametrize('old, new', [(44100, 22050), (8000, 22050), (48000, 22050), (22050, 44100), (16000, 22050)])
def test_the_length_is_rounded_up(samples, old, new):
    out = resample(np.ones(samples), old, new)
    assert len(out) == -(-samples * new // old) and out.dtype == np.float32 and np.isfinite(out).all()

def test_what_the_new_rate_cannot_hold_is_gone():
    assert np.abs(resample(tone(rate=48000, hz=15000), 48000, 22050))[500:-500].max() < 0.01

def test_stereo_is_averaged(tmp_path):
    soundfile.write(tmp_path / 'a.wav', np.stack([tone(), 0 * tone()], 1), RATE, subtype='FLOAT')
    soundfile.write(tmp_path / 'b.wav', np.stack([tone(), -tone()], 1), RATE, subtype='FLOAT')
    assert np.allclose(load_audio(tmp_path / 'a.wav'), tone() / 2, atol=1e-6)
    assert np.abs(load_audio(tmp_path / 'b.wav')).max() < 1e-6

def test_samples_beyond_full_scale_are_clipped(tmp_path):
    soundfile.write(tmp_path / 'a.wav', 4 * tone(), RATE, subtype='FLOAT')
    assert np.abs(load_audio(tmp_path / 'a.wav')).max() == 1

def test_a_wav_that_ends_early_gives_what_is_there(tmp_path):
    save_audio(tmp_path / 'a.wav', tone())
    (tmp_path / 'a.wav').write_bytes((tmp_path / 'a.wav').read_bytes()[:2044])
    assert len(load_audio(tmp_path / 'a.wav')) == 1000

def bad(folder, kind):
    "A file that is no clip."
    path = folder / ('x.raw' if kind == 'raw' else 'x.wav')
    if kind == 'empty file': path.write_bytes(b'')
    if kind == 'text': path.write_text('id|text|text\n' * 50)
    if kind == 'cut in the head': save_audio(path, tone()); path.write_bytes(path.read_bytes()[:30])
    if kind == '0 samples': save_audio(path, np.zeros(0))
    if kind in ('nan', 'inf'): soundfile.write(path, np.array([0., float(kind), 0.]), RATE, subtype='FLOAT')
    if kind == 'directory': path.mkdir()
    if kind == 'raw': path.write_bytes(bytes(2000))
    if kind == 'dangling link': path.symlink_to(folder / 'nowhere.wav')
    return path

@pytest.mark.parametrize('kind, reason', [
    ('missing', 'missing'), ('dangling link', 'missing'), ('empty file', 'not readable as audio'),
    ('text', 'not readable as audio'),
    ('cut in the head', 'not readable as audio'), ('0 samples', '0 samples'), ('nan', 'NaN'), ('inf', 'infinite'),
    ('directory', 'missing|folder|not readable'), ('raw', 'not readable as audio')])
def test_what_is_no_clip_is_named_with_its_reason(tmp_path, kind, reason):
    path = bad(tmp_path, kind)
    with pytest.raises(UserError, match=reason) as e: load_audio(path)
    assert str(path) in str(e.value) and len(str(e.value).splitlines()) == 1


# --- writing -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('samples', [0, 1, 5000])
def test_written_sound_is_read_again(tmp_path, samples):
    wav = tone()[:samples]
    save_audio(tmp_path / 'new' / 'a.wav', wav)
    back, rate = soundfile.read(tmp_path / 'new' / 'a.wav')
    info = soundfile.info(tmp_path / 'new' / 'a.wav')
    assert (rate, info.subtype, info.channels, len(back)) == (RATE, 'PCM_16', 1, samples)
    assert np.allclose(back, wav, atol=1e-4)

def test_too_loud_is_scaled_and_not_clipped(tmp_path):
    save_audio(tmp_path / 'a.wav', 6 * tone())
    assert np.allclose(load_audio(tmp_path / 'a.wav'), 2 * tone(), atol=1e-3)

def test_the_same_sound_gives_the_same_bytes(tmp_path):
    for name in 'ab': save_audio(tmp_path / name, synthetic_voice())
    assert (tmp_path / 'a').read_bytes() == (tmp_path / 'b').read_bytes()


# --- mels ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('n_fft', [1024, 2048])
@pytest.mark.parametrize('samples', [1025, 1026, 1279, 1280, 1281, 5120, 22050, 22051])
def test_the_graph_agrees_with_float64(samples, n_fft):
    wav = synthetic_voice(2.)[:samples]
    ours, trusted = log_mel(wav, n_fft).numpy(), log_mel_numpy(wav.astype(np.float64), n_fft)
    assert ours.shape == trusted.shape == (frame_count(samples), 80)
    assert np.abs(ours - trusted).max() < 2e-3

@pytest.mark.parametrize('samples, n_fft', [(1, 1024), (100, 1024), (255, 1024), (512, 1024), (1, 2048), (600, 2048),
                                            (1024, 2048)])
def test_a_clip_shorter_than_half_a_window_has_its_frames_or_is_refused(samples, n_fft):
    "Never quietly fewer frames than `frame_count` says, or none."
    wav = synthetic_voice(1.)[5000:5000 + samples]
    assert log_mel_numpy(wav, n_fft).shape == (frame_count(samples), 80)
    try: mel = log_mel(wav, n_fft)
    except (UserError, ValueError, tf.errors.InvalidArgumentError): return
    assert mel.shape == (frame_count(samples), 80)

def test_the_smallest_clip_that_reflects():
    assert log_mel(synthetic_voice(1.)[:513], 1024).shape == (3, 80)
    assert log_mel(synthetic_voice(1.)[:1025], 2048).shape == (5, 80)

def test_float64_sound_is_sound():
    wav = synthetic_voice(0.5)
    assert np.array_equal(log_mel(wav.astype(np.float64), 1024), log_mel(wav, 1024))

def test_silence_is_the_floor():
    assert np.allclose(log_mel(np.zeros(5000, np.float32), 1024), np.log(LOG_FLOOR))

def test_a_batch_equals_its_rows():
    wavs = np.stack([synthetic_voice(0.5, p) for p in (90., 150., 220.)])
    assert np.allclose(log_mel(wavs, 1024), [log_mel(w, 1024) for w in wavs], atol=1e-4)

@pytest.mark.parametrize('change', [{'n_mels': 40}, {'hop_length': 128}, {'win_length': 512}, {'f_max': 6000.},
                                    {'sample_rate': 16000}])
def test_every_setting_changes_the_mel(change):
    audio, wav = AUDIO.model_copy(update=change), synthetic_voice(0.5)
    other, usual = log_mel(wav, 1024, audio).numpy(), log_mel(wav, 1024).numpy()
    assert other.shape != usual.shape or not np.allclose(other, usual, atol=0.1)
    assert np.abs(other - log_mel_numpy(wav.astype(np.float64), 1024, audio)).max() < 2e-3

def test_filters_have_equal_area_and_cover_the_band():
    filters = mel_filterbank(2048)
    area = filters.sum(0) * RATE / 2048
    hz = np.linspace(0, RATE / 2, 1025)
    assert np.allclose(area[20:], 1, atol=0.05) and (filters >= 0).all()
    assert filters[hz > AUDIO.f_max].max() == 0 and (filters[(hz > 100) & (hz < 7900)].sum(1) > 0).all()

def test_a_tone_lands_in_its_bin():
    bins = [int(log_mel(tone(0.3, hz=f).astype(np.float32), 2048).numpy()[5].argmax()) for f in (200, 400, 800, 1600, 3200)]
    assert bins == sorted(bins) and len(set(bins)) == 5

def test_a_transform_goes_with_the_sound():
    wav = synthetic_voice(0.5)
    spectrum, shifted = stft(wav, 1024).numpy(), stft(wav[256:], 1024).numpy()
    assert np.allclose(spectrum[6:20], shifted[5:19], atol=1e-3)


# --- back to sound -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('frames', [4, 5, 8, 40])
def test_a_mel_of_any_length_sounds(frames):
    mel = log_mel(synthetic_voice(1.), AUDIO.dvae_n_fft)[:frames]
    wav = griffin_lim(mel, iterations=3)
    assert wav.shape == ((frames - 1) * AUDIO.hop_length,) and np.isfinite(wav).all()

def test_the_sound_has_the_mel_it_came_from():
    mel = log_mel(synthetic_voice(0.8), AUDIO.dvae_n_fft)
    again = log_mel(griffin_lim(mel), AUDIO.dvae_n_fft)
    inside, untouched = slice(4, mel.shape[0] - 4), log_mel(griffin_lim(mel, iterations=0), AUDIO.dvae_n_fft)
    error = lambda x: float(np.abs(x - mel)[inside].mean())
    assert error(again) < 0.5 and error(again) < 0.7 * error(untouched)

def test_the_seed_decides():
    mel = log_mel(synthetic_voice(0.5), AUDIO.dvae_n_fft)
    a, b, c = (griffin_lim(mel, iterations=3, seed=s).numpy() for s in (1, 1, 2))
    assert np.array_equal(a, b) and not np.allclose(a, c)

def test_lengths_do_not_retrace():
    for n in (30, 31): griffin_lim(tf.zeros((n, 80)), iterations=3)
    before = griffin_lim.experimental_get_tracing_count()
    for n in (33, 50): griffin_lim(tf.zeros((n, 80)), iterations=3)
    assert griffin_lim.experimental_get_tracing_count() == before


def test_recorded_speech(speech):
    "Every file that is there can be read, and its mels agree."
    files = sorted(speech.rglob('*.wav'))[:3]
    assert files, os.listdir(speech)
    for path in files:
        wav = load_audio(path)
        assert np.abs(wav).max() > 0.01
        assert np.abs(log_mel(wav, 2048).numpy() - log_mel_numpy(wav.astype(np.float64), 2048)).max() < 1e-2
