"Sound in every format and rate, clips that are no sound, and the mels against float64."
import os

import numpy as np
import pytest
import soundfile
import tensorflow as tf

from xtts_nb.data import audio as module
from xtts_nb.data.audio import (
    LOG_FLOOR, frame_count, griffin_lim, load_audio, log_mel, log_mel_numpy, mel_filterbank, open_audio,
    pcm16, resample, resample_batch, save_audio, speaker_log_mel, stft, synthetic_voice, wav_bytes)
from xtts_nb.config import AudioConfig, SpeakerConfig, UserError

RATE, TONE = 22050, 440.
AUDIO = AudioConfig()


def tone(seconds=1.0, rate=RATE, hz=TONE):
    return 0.5 * np.sin(2 * np.pi * hz * np.arange(int(seconds * rate)) / rate)

def loudest_hz(wav, rate=RATE):
    middle = wav[len(wav) // 4:-len(wav) // 4] * np.hanning(len(wav[len(wav) // 4:-len(wav) // 4]))
    return np.abs(np.fft.rfft(middle, 1 << 16)).argmax() * rate / (1 << 16)


# --- reading --------------------------------------------------------------------------------------

FORMATS = [('wav', 'PCM_16', 1e-4), ('wav', 'PCM_24', 1e-5), ('wav', 'PCM_32', 1e-5), ('wav', 'FLOAT', 1e-6),
           ('wav', 'DOUBLE', 1e-6),
           ('wav', 'PCM_U8', 1e-2), ('flac', 'PCM_16', 1e-4), ('flac', 'PCM_24', 1e-5),
           ('ogg', 'VORBIS', 0.05),
           ('mp3', 'MPEG_LAYER_III', 0.05)]

@pytest.mark.parametrize('form, subtype, tolerance', FORMATS, ids=lambda x: str(x))
def test_every_format_gives_the_same_sound(tmp_path, form, subtype, tolerance):
    if form.upper() not in soundfile.available_formats():
        pytest.skip(f'this libsndfile does not write {form}')
    path = tmp_path / f'a.{form}'
    soundfile.write(path, tone(), RATE, subtype=subtype)
    wav = load_audio(path)
    assert wav.dtype == np.float32
    assert wav.ndim == 1
    assert abs(len(wav) - RATE) <= (0 if form != 'mp3' else 2304)
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
@pytest.mark.parametrize('old, new',
                         [(44100, 22050), (8000, 22050), (48000, 22050), (22050, 44100), (16000, 22050)])
def test_the_length_is_rounded_up(samples, old, new):
    out = resample(np.ones(samples), old, new)
    assert len(out) == -(-samples * new // old) and out.dtype == np.float32 and np.isfinite(out).all()

def windowed_sinc(wav, old, new, crossings=6, rolloff=0.99):
    "The defining sum, a sample at a time, as torchaudio has it."
    cutoff = rolloff * min(old, new)
    t = cutoff * (np.arange(len(wav)) / old - np.arange(-(-len(wav) * new // old))[:, None] / new)
    window = np.where(np.abs(t) < crossings, np.cos(np.pi * t / (2 * crossings))**2, 0)
    return (np.sinc(t) * window * cutoff / old) @ wav

RATES = [(22050, 16000), (16000, 22050), (48000, 22050), (8000, 24000), (44100, 22050)]

@pytest.mark.parametrize('samples', [1, 160, 700])
@pytest.mark.parametrize('old, new', RATES)
def test_resampling_is_the_defining_sum(samples, old, new):
    wav = np.random.default_rng(samples).uniform(-1, 1, (2, samples)).astype(np.float32)
    right = [windowed_sinc(row, old, new) for row in wav]
    assert np.allclose([resample(row, old, new) for row in wav], right, atol=1e-5)
    assert np.allclose(resample_batch(tf.constant(wav), old, new), right, atol=1e-5)

def test_nothing_and_an_equal_rate_stay_as_they_are():
    assert resample(np.zeros(0), 24000, 16000).shape == (0,)
    assert np.array_equal(resample(tone(), 8000, 8000), np.float32(tone()))

def test_what_the_new_rate_cannot_hold_is_gone():
    assert np.abs(resample(tone(rate=48000, hz=15000), 48000, 22050))[500:-500].max() < 0.01

def test_stereo_is_averaged(tmp_path):
    soundfile.write(tmp_path / 'a.wav', np.stack([tone(), 0 * tone()], 1), RATE, subtype='FLOAT')
    soundfile.write(tmp_path / 'b.wav', np.stack([tone(), -tone()], 1), RATE, subtype='FLOAT')
    assert np.allclose(load_audio(tmp_path / 'a.wav'), tone() / 2, atol=1e-6)
    assert np.allclose(load_audio(tmp_path / 'b.wav'), tone(), atol=1e-6)   # they would cancel out

def test_samples_beyond_full_scale_are_clipped(tmp_path):
    soundfile.write(tmp_path / 'a.wav', 4 * tone(), RATE, subtype='FLOAT')
    assert np.abs(load_audio(tmp_path / 'a.wav')).max() == 1

@pytest.mark.parametrize('peak', [8., -8., 8.5, -9.])
def test_samples_far_beyond_full_scale_are_no_sound(tmp_path, peak):
    soundfile.write(tmp_path / 'a.wav', np.array([0., peak, 0.1]), RATE, subtype='FLOAT')
    if abs(peak) == 8:
        assert load_audio(tmp_path / 'a.wav')[1] == np.sign(peak)
        return
    with pytest.raises(UserError, match=f'a.wav: has samples of {abs(peak):,.0f} times full scale'):
        load_audio(tmp_path / 'a.wav')

@pytest.mark.parametrize('samples', [2**19 - 1, 2**19, 2**19 + 1])
def test_a_long_file_is_read_in_blocks(tmp_path, samples):
    wav = np.random.default_rng(0).integers(-9, 9, (samples, 2), np.int16)
    soundfile.write(tmp_path / 'a.wav', wav, RATE)
    assert np.array_equal(load_audio(tmp_path / 'a.wav'), np.float32(wav.mean(1) / 32768))

@pytest.mark.parametrize('rate, wanted, fits', [
    (30, 20, True), (70, 10, False), (70, 20, False), (7, 1, False), (6, 1, True)])
def test_rates_whose_filter_would_be_huge_are_refused(tmp_path, monkeypatch, rate, wanted, fits):
    "3 x 2 entries are allowed here, 7 x 1 are not."
    monkeypatch.setattr(module, 'LARGEST_FILTER', 6)
    soundfile.write(tmp_path / 'a.wav', tone(), rate)
    if fits:
        open_audio(tmp_path / 'a.wav', wanted).close()
        return
    with pytest.raises(UserError, match=f'a.wav: {rate} Hz have too small a common divisor with {wanted} Hz'):
        open_audio(tmp_path / 'a.wav', wanted)

def test_a_wav_that_ends_early_gives_what_is_there(tmp_path):
    save_audio(tmp_path / 'a.wav', tone())
    (tmp_path / 'a.wav').write_bytes((tmp_path / 'a.wav').read_bytes()[:2044])
    assert len(load_audio(tmp_path / 'a.wav')) == 1000

def bad(folder, kind):
    "A file that is no clip."
    path = folder / ('x.raw' if kind == 'raw' else 'x.wav')
    if kind == 'empty file': path.write_bytes(b'')
    if kind == 'text': path.write_text('id|text|text\n' * 50)
    if kind == 'cut in the head':
        save_audio(path, tone())
        path.write_bytes(path.read_bytes()[:30])
    if kind == '0 samples': save_audio(path, np.zeros(0))
    if kind in ('nan', 'inf'): soundfile.write(path, np.array([0., float(kind), 0.]), RATE, subtype='FLOAT')
    if kind == 'directory': path.mkdir()
    if kind == 'raw': path.write_bytes(bytes(2000))
    if kind == 'dangling link': path.symlink_to(folder / 'nowhere.wav')
    return path

@pytest.mark.parametrize('kind, reason', [
    ('missing', 'missing'), ('dangling link', 'missing'), ('empty file', 'not readable as audio'),
    ('text', 'not readable as audio'),
    ('cut in the head', 'not readable as audio'), ('0 samples', '0 samples'), ('nan', 'NaN'),
    ('inf', 'infinite'),
    ('directory', 'missing|folder|not readable'), ('raw', 'not readable as audio')])
def test_what_is_no_clip_is_named_with_its_reason(tmp_path, kind, reason):
    path = bad(tmp_path, kind)
    with pytest.raises(UserError, match=reason) as e: load_audio(path)
    assert str(path) in str(e.value) and len(str(e.value).splitlines()) == 1


# --- writing --------------------------------------------------------------------------------------

def test_whole_samples_are_written_as_they_are(tmp_path):
    samples = np.array([0, 1, -2, 32767, -32768], np.int16)
    (tmp_path / 'a.wav').write_bytes(wav_bytes(samples, 16000))
    read, rate = soundfile.read(tmp_path / 'a.wav', dtype='int16')
    assert rate == 16000 and read.tolist() == samples.tolist()
    assert soundfile.info(tmp_path / 'a.wav').subtype == 'PCM_16'
    soundfile.write(tmp_path / 'b.wav', samples, 16000, subtype='PCM_16')
    assert (tmp_path / 'b.wav').read_bytes() == (tmp_path / 'a.wav').read_bytes()

def test_floats_are_written_to_the_nearest_sample():
    wav = np.array([0.5, -1, 1, 2, -2, 0.6 / 2**15, -0.6 / 2**15, 0.4 / 2**15], np.float32)
    assert np.frombuffer(pcm16(wav), '<i2').tolist() == [16384, -32768, 32767, 32767, -32768, 1, -1, 0]

def test_written_sound_calls_no_python(monkeypatch, tmp_path):
    "Ctrl-C in a call from C gets lost."
    monkeypatch.setattr(soundfile, 'SoundFile', None)
    monkeypatch.setattr(soundfile, 'write', None)
    save_audio(tmp_path / 'a.wav', tone())
    assert (tmp_path / 'a.wav').stat().st_size == 44 + 2 * len(tone())

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

def test_the_synthetic_voice_is_the_same_in_every_release():
    "Recorded times and scores were taken on it."
    assert np.allclose(synthetic_voice(0.5)[500::1111], VOICE, atol=1e-6)
    assert synthetic_voice(0.5, 200., 16000).shape == (8000,)

VOICE = [-0.018358, -0.155355, 0.0118, -0.063861, -0.008241, 0.013919, -0.031782, 0.001817, -0.00636,
         -0.103179]

def test_the_same_sound_gives_the_same_bytes(tmp_path):
    for name in 'ab': save_audio(tmp_path / name, synthetic_voice())
    assert (tmp_path / 'a').read_bytes() == (tmp_path / 'b').read_bytes()


# --- mels -----------------------------------------------------------------------------------------

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
    assert np.allclose(log_mel(wav, n_fft, audio), right, atol=1e-3)
    mirrored = np.pad(wav, n_fft // 2, 'reflect')
    assert np.allclose(log_mel(mirrored, n_fft, audio, mirror=False), right, atol=1e-3)

TINY = SpeakerConfig(n_fft=64, win_length=40, hop_length=16, n_mels=5, pre_emphasis=0.5)

@pytest.mark.parametrize('speaker', [SpeakerConfig(), TINY], ids=['XTTS', 'tiny'])
def test_the_mel_of_the_speaker_encoder_by_its_definition(speaker):
    wav, n_fft = np.random.default_rng(0).normal(size=1500), speaker.n_fft
    turn = 2 * np.pi * np.arange(speaker.win_length) / speaker.win_length
    window = centred(0.54 - 0.46 * np.cos(turn), n_fft)   # Hamming's
    sharp = wav - speaker.pre_emphasis * np.concatenate([wav[1:2], wav[:-1]])
    power = np.abs(np.fft.rfft(frames_of(sharp, n_fft, speaker.hop_length) * window))**2
    height, _ = triangles(n_fft, speaker.sample_rate, speaker.n_mels, speaker.sample_rate / 2)
    right = np.log(power @ height + 1e-6)
    assert np.allclose(speaker_log_mel(wav, speaker), right, atol=1e-3)
    assert np.allclose(speaker_log_mel(np.stack([wav, wav]), speaker)[1], right, atol=1e-3)
    assert np.allclose(speaker_log_mel(np.zeros(500, np.float32), speaker), np.log(1e-6))

@pytest.mark.parametrize('audio', [AUDIO, AUDIO.model_copy(update={'win_length': 801})])
def test_a_transform_is_undone(audio):
    wav = synthetic_voice(0.5)
    transform = stft(wav, 1024, audio)
    weight = module._overlap_weight(len(transform), audio)
    again = module._inverse_stft(transform, weight, 1024, audio).numpy()
    assert len(again) == len(wav) // 256 * 256
    assert np.allclose(again[256:-256], wav[256:len(again) - 256], atol=1e-4)

def test_a_spectrum_explains_its_mel():
    mel = log_mel(synthetic_voice(0.3), 1024)
    power = module._spectrum_from_mel(mel, 1024, AUDIO).numpy()**2
    assert power.shape == (mel.shape[0], 513) and (power >= 0).all()
    again, wanted = power @ mel_filterbank(1024), np.exp(mel)
    # after 10 rounds
    assert np.isclose(np.abs(again - wanted).sum() / wanted.sum(), 0.00844, rtol=0.02)
    assert np.isclose(np.abs(np.log(again / wanted)).mean(), 0.01532, rtol=0.02)

def test_fast_griffin_lim_by_its_definition():
    "Perraudin, Balazs and Søndergaard 2013: what one round adds is laid upon it once more, times 0.99."
    mel = log_mel(synthetic_voice(0.3), 1024)
    size = module._spectrum_from_mel(mel, 1024, AUDIO).numpy()
    angle, before = np.exp(1j * module._phase_from_spectrum(size, 1024, AUDIO).numpy()), 0
    weight = module._overlap_weight(len(mel), AUDIO)
    back = lambda: module._inverse_stft(tf.constant(size * angle, tf.complex64), weight, 1024, AUDIO)
    for _ in range(2):
        built = stft(back(), 1024).numpy()
        target = built + 0.99 * (built - before)
        angle, before = target / (np.abs(target) + 1e-12), built
    assert np.allclose(griffin_lim(mel, iterations=2), back(), atol=2e-3)   # rounding, where bins are near 0

@pytest.mark.parametrize('n_fft', [1024, 2048])
@pytest.mark.parametrize('samples', [1025, 1026, 1279, 1280, 1281, 5120, 22050, 22051])
def test_the_graph_agrees_with_float64(samples, n_fft):
    wav = synthetic_voice(2.)[:samples]
    ours, trusted = log_mel(wav, n_fft).numpy(), log_mel_numpy(wav.astype(np.float64), n_fft)
    assert ours.shape == trusted.shape == (frame_count(samples), 80)
    assert np.abs(ours - trusted).max() < 2e-3

@pytest.mark.parametrize('samples, n_fft',
                         [(1, 1024), (100, 1024), (255, 1024), (512, 1024), (1, 2048), (600, 2048),
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

@pytest.mark.parametrize('change',
                         [{'n_mels': 40}, {'hop_length': 128}, {'win_length': 512}, {'f_max': 6000.},
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
    bins = [int(log_mel(tone(0.3, hz=f).astype(np.float32), 2048).numpy()[5].argmax())
            for f in (200, 400, 800, 1600, 3200)]
    assert bins == sorted(bins) and len(set(bins)) == 5

def test_a_transform_goes_with_the_sound():
    wav = synthetic_voice(0.5)
    spectrum, shifted = stft(wav, 1024).numpy(), stft(wav[256:], 1024).numpy()
    assert np.allclose(spectrum[6:20], shifted[5:19], atol=1e-3)


# --- back to sound --------------------------------------------------------------------------------

@pytest.mark.parametrize('frames', [1, 2, 3, 4, 5, 8, 40])
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

def turn(phase):
    "A difference of phases, in radians between -π and π."
    return (phase + np.pi) % (2 * np.pi) - np.pi

@pytest.mark.parametrize('hz', [305., 1000., 2222., 7000.])
@pytest.mark.parametrize('change', [{}, {'hop_length': 200}, {'win_length': 800}])
def test_the_estimated_phase_advances_with_a_tone(hz, change):
    "The centre of the nearest bin alone would be wrong by up to 0.7 radians."
    audio = AUDIO.model_copy(update=change)
    magnitude = tf.abs(stft(tone(6., hz=hz).astype(np.float32), 1024, audio))
    phase = module._phase_from_spectrum(magnitude, 1024, audio).numpy()
    near, inside = round(hz * 1024 / RATE), slice(10, -10)
    advance = 2 * np.pi * hz * audio.hop_length / RATE
    assert np.abs(turn(np.diff(phase[inside, near], axis=0) - advance)).max() < 0.1

def test_the_sound_of_a_mel_is_one():
    mel = log_mel(synthetic_voice(0.5), AUDIO.dvae_n_fft)
    assert np.array_equal(griffin_lim(mel), griffin_lim(mel))

@pytest.mark.parametrize('level', [-100., LOG_FLOOR, 0.])
def test_an_even_mel_sounds(level):
    assert np.isfinite(griffin_lim(tf.fill((40, 80), float(level)))).all()

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
