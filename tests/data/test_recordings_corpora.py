"Sound of every kind: decoded as it is, or left out with its reason; and the report of what is there."
import io
import json
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from xtts_nb.data.audio import load_audio, resample, synthetic_voice
from xtts_nb.data.cache import Cache
from xtts_nb.data.prepare import prepare
from xtts_nb.config import XTTSConfig
from xtts_nb.data.corpora import (
    Clip, Dropped, read_corpus, STREAMED, _load, _ogg_ends, measure_clip, missing_share,
    read_audio, reason_kind, report_text, distribution, summary)

CONFIG = XTTSConfig.tiny()
VOICE = synthetic_voice(1.)

def sound(kind='WAV', subtype=None, rate=22050, wav=VOICE, channels=1):
    "A file's bytes."
    data = io.BytesIO()
    soundfile.write(data, np.stack([wav] * channels, 1), rate, format=kind, subtype=subtype)
    return data.getvalue()

def half(kind, subtype=None, rate=22050):
    data = sound(kind, subtype, rate)
    return data[:len(data) // 2]

def at(rate): return resample(VOICE, 22050, rate)

def head(size: int, data=None):
    "A wav file whose head says that it holds `size` bytes of sound."
    data = data or sound()
    return data[:40] + struct.pack('<I', size) + data[44:]

def chunk():
    data = sound()
    return data[:12] + b'LIST\x04\0\0\0INFO' + data[12:] + b'junk\x02\0\0\0ab'

def endless():
    data = bytearray(sound('FLAC'))
    data[21] |= 15
    data[22:26] = b'\xff' * 4
    return bytes(data)

def pages():
    "A sound of several Ogg pages without the last one."
    data = sound('OGG', 'OPUS', 24000, np.tile(at(24000), 4))
    return data[:data.rindex(b'OggS')]

def antiphase():
    data = io.BytesIO()
    soundfile.write(data, np.stack([VOICE, -VOICE], 1), 22050, format='WAV')
    return data.getvalue()

GOOD = {   # name: bytes, largest error
    **{f'{s}.wav': (sound('WAV', s), 0.04)
       for s in ('PCM_U8', 'PCM_16', 'PCM_24', 'PCM_32', 'FLOAT', 'DOUBLE', 'ALAW', 'ULAW',
                 'IMA_ADPCM', 'MS_ADPCM')},
    **{f'{k}.wav': (sound(k), 1e-4) for k in ('WAVEX', 'RF64', 'W64', 'AIFF', 'AU', 'CAF')},
    'x.flac': (sound('FLAC'), 1e-4), 'x.mp3': (sound('MP3'), 0.05), 'x.ogg': (sound('OGG', 'VORBIS'), 0.05),
    'x.opus': (sound('OGG', 'OPUS', 24000, at(24000)), 0.2), 'flac in.wav': (sound('FLAC'), 1e-4),
    'mp3 in.wav': (sound('MP3'), 0.05), 'wav in.mp3': (sound(), 1e-4),
    'stereo.wav': (sound(channels=2), 1e-4), '6 channels.wav': (sound(channels=6), 1e-4),
    '8 kHz.wav': (sound(rate=8000, wav=at(8000)), 0.2),
        '192 kHz.wav': (sound(rate=192000, wav=at(192000)), 0.01),
    '37800 Hz.wav': (sound(rate=37800, wav=at(37800)), 0.01), 'more chunks.wav': (chunk(), 1e-4),
    'from a pipe.wav': (head(0xFFFFFFFF), 1e-4), '4 GB.wav': (head(0xF0000000), 1e-4),
    'one byte short.wav': (sound()[:-1], 1e-4), 'antiphase.wav': (antiphase(), 1e-4)}

BAD = {   # name: bytes, reason
    'cut off.wav': (half('WAV'), 'the sound is cut off: 50% of it is missing'),
    'cut off 24.wav': (half('WAV', 'PCM_24'), 'cut off'),
    'cut off float.wav': (half('WAV', 'FLOAT'), 'cut off'),
       'cut off extensible.wav': (half('WAVEX'), 'cut off'),
    'cut off RF64.wav': (half('RF64'), 'cut off'), 'cut off.w64': (half('W64'), 'cut off'),
    'cut off.aiff': (half('AIFF'), 'cut off'),
    'cut off.au': (half('AU'), 'cut off'), 'cut off.flac': (half('FLAC'), 'to its end'),
    'cut off.mp3': (half('MP3'), 'cut off'),
    'cut off.ogg': (half('OGG', 'VORBIS'), 'not readable as audio'),
    'a page cut off.opus': (pages(), 'cut off'),
    '1 GB.wav': (head(2**30), 'cut off: 100%'),
    'damaged.flac': ((d := sound('FLAC'))[:len(d) // 2] + b'x' * 9 + d[len(d) // 2 + 9:], 'to its end'),
    'empty.wav': (b'', '0 bytes'), 'head only.wav': (sound()[:44], '0 samples'),
    'half a head.wav': (sound()[:20], 'not readable as audio'),
    'no samples.wav': (sound(wav=np.zeros(0)), '0 samples'), 'no length.wav': (head(0), '0 samples'),
    'nan.wav': (sound(subtype='FLOAT', wav=np.where(np.arange(22050) == 99, np.nan, VOICE)), 'NaN'),
    'inf.wav': (sound(subtype='FLOAT', wav=np.where(np.arange(22050) == 99, np.inf, VOICE)), 'infinite'),
    'beyond float.wav': (sound(subtype='DOUBLE',
                               wav=np.where(np.arange(22050) == 99, 1e300, VOICE.astype(float))), 'infinite'),
    'integers as floats.wav': (sound(subtype='FLOAT', wav=VOICE * 32768), 'times full scale'),
    'silent.wav': (sound(wav=np.zeros(22050)), 'silent'),
       'one level.wav': (sound(wav=np.full(22050, 0.5)), 'silent'),
    'one sample.wav': (sound(wav=np.ones(1)), '1 samples, too short for a mel'),
    'short.wav': (sound(wav=VOICE[:5000]), 'shorter than data.min_seconds'),
    '10 minutes.wav': (sound(subtype='PCM_U8', rate=8000, wav=np.zeros(4_800_000)),
                       '600.00 s, longer than data.max_seconds'),
    'days.flac': (endless(), 'no possible length'),
    '44101 Hz.wav': (sound(rate=44101), '44101 Hz have too small a common divisor'),
    'text.wav': (b'hello ' * 999, 'not readable as audio'),
       'page.mp3': (b'<!DOCTYPE html><p>404' * 99, 'a web page'),
    'song.m4a': (b'\0\0\0\x18ftypM4A \0\0\0\0M4A mp42' + bytes(999), 'read'),
    'noise.wav': (np.random.default_rng(0).bytes(9999), 'not readable as audio'),
    'head.raw': (bytes(999), 'not readable as audio')}

def load(path, content):
    path.write_bytes(content)
    return _load(Clip('x', 'a', 'a', 'en', path), CONFIG)

@pytest.mark.parametrize('name', GOOD)
def test_sound_that_is_read_as_it_is(tmp_path, name):
    content, error = GOOD[name]
    wav = load(tmp_path / name, content)
    assert not isinstance(wav, Dropped), wav
    assert wav.dtype == np.float32 and abs(len(wav) - 22050) < 1200   # ADPCM fills its last block
    assert np.abs(wav[500:21000] - VOICE[500:21000]).max() < error
    assert np.array_equal(wav, load_audio(tmp_path / name))

@pytest.mark.parametrize('name', BAD)
def test_sound_that_is_left_out_with_a_reason(tmp_path, name):
    content, reason = BAD[name]
    dropped = load(tmp_path / name, content)
    assert isinstance(dropped, Dropped) and reason in dropped.reason
    assert str(tmp_path) not in dropped.reason
    assert len(dropped.reason.splitlines()) == 1
    assert dropped.reason[-1] != '.'

LEVEL = np.where(np.arange(22050) % 2, 1, -1)
BOUNDS = {   # name: what is asked, samples that are just taken, samples that are just not, the reason
    'long': ({'max_seconds': 1.}, VOICE, np.append(VOICE, 0), '1.00 s, longer than data.max_seconds 1.0'),
    'short': ({'min_seconds': 0.5}, VOICE[:11025], VOICE[:11024],
              '0.50 s, shorter than data.min_seconds 0.5'),
    'no mel': ({'min_seconds': 0.01}, VOICE[:1025], VOICE[:1024], '1024 samples, too short for a mel'),
    'silent': ({}, LEVEL * 0.0011, LEVEL * 0.0009, 'the clip is silent: nothing in it is louder than -60 dB')}

@pytest.mark.parametrize('name', BOUNDS)
def test_what_is_just_taken_and_just_not(tmp_path, name):
    wishes, good, bad, reason = BOUNDS[name]
    for wav, found in ((good, None), (bad, reason)):
        soundfile.write(tmp_path / 'x.wav', wav, 22050, subtype='FLOAT')
        got = _load(Clip('x', 'a', 'a', 'en', tmp_path / 'x.wav'), CONFIG.replace(data=wishes))
        assert getattr(got, 'reason', None) == found

@pytest.mark.parametrize('promised, cut', [(44544, False), (44548, True)])
def test_one_sample_of_a_hundred_may_be_missing(tmp_path, promised, cut):
    assert isinstance(load(tmp_path / 'x.wav', head(promised)), Dropped) == cut   # 44100 bytes are there

@pytest.mark.parametrize('about, share', [
    ({}, 0), ({'promised': 200}, 0.5), ({'extra_info': ' data : 400 (should be 100)\n'}, 0.75),
    ({'extra_info': 'SSND : 0 (should be 100)'}, 0),
    ({'extra_info': f'riff : {STREAMED} (should be 100)'}, 0),
    ({'extra_info': f'riff : {STREAMED - 1} (should be 0)'}, 1),
    ({'extra_info': 'other : 400 (should be 100)'}, 0),
    ({'extra_info': ' Frames : 400', 'format': 'RF64'}, 0.75), ({'extra_info': ' Frames : 400'}, 0)], ids=str)
def test_how_much_is_missing_by_what_the_head_promises(about, share):
    usual = {'extra_info': '', 'promised': 100, 'format': 'WAV', 'name': 'x'}
    assert missing_share(SimpleNamespace(**usual | about), 100) == share

def page(flags, rest=b'\xff', length=99): return b'OggS\0' + bytes([flags]) + rest * length

@pytest.mark.parametrize('content, whole', [
    (page(4, b'\0'), True), (page(3), False), (page(4) + page(3), False), (page(3) + page(4, b'\0'), True),
    (page(2, length=2**17) + page(5, b'\0', 65307), True),
    (page(4, length=2**17) + page(1, length=65307), False)],
    ids=['last', 'not last', 'more follows', 'two', 'long', 'long and more follows'])
def test_the_last_page_says_that_it_is_the_last(tmp_path, content, whole):
    (tmp_path / 'x.ogg').write_bytes(content)
    assert _ogg_ends(tmp_path / 'x.ogg') is whole

def test_all_kinds_in_one_corpus(small, dvae, tmp_path):
    "Nothing ends the run, nothing is missing from the report, nothing stands in for another."
    kinds = GOOD | {k: v for k, v in BAD.items() if k.endswith(('.wav', '.mp3', '.flac', '.m4a', '.opus'))}
    (tmp_path / 'corpus/wavs').mkdir(parents=True)
    for name, (content, _) in kinds.items(): (tmp_path / 'corpus/wavs' / name).write_bytes(content)
    (tmp_path / 'corpus/metadata.csv').write_text('path|text\n'
                                                  + ''.join(f'{name}|aa bb\n' for name in kinds))
    report = prepare(tmp_path / 'corpus', tmp_path / 'out', small.replace(data={'max_drop_rate': 0.9}), dvae)
    kept = [c['id'] for c in Cache(tmp_path / 'out').clips]
    assert kept == list(GOOD) and [d['id'] for d in report['dropped']] == [k for k in kinds if k not in GOOD]
    assert all(kinds[d['id']][1] in d['reason'] for d in report['dropped'])
    assert sum(report['reasons'].values()) == len(report['dropped'])

def test_a_head_that_promises_a_day_is_not_given_the_memory(tmp_path):
    "2^34 samples promised: reading in blocks finds out that they are not there."
    data = bytearray(sound('FLAC'))
    data[21] |= 4
    dropped = load(tmp_path / 'x.flac', bytes(data))
    assert 'longer than data.max_seconds' in dropped.reason

def test_a_reason_holds_no_path_whatever_the_folder_is_called(small, tmp_path):
    folder = tmp_path / 'a: b'
    (folder / 'wavs').mkdir(parents=True)
    (folder / 'wavs/x.wav').write_text('no sound')
    (folder / 'metadata.csv').write_text('x|a|a\n')
    [(_, dropped)] = read_audio(read_corpus(folder)[0], small)
    assert dropped.reason.startswith('not readable as audio')

def test_a_disk_that_fails_is_a_reason(small, tmp_path, monkeypatch):
    def fail(*file): raise OSError(5, 'Input/output error')
    monkeypatch.setattr('xtts_nb.data.audio._decoder', fail)
    assert 'Input/output error' in load(tmp_path / 'x.wav', b'text').reason

def test_a_file_that_is_gone_by_now_is_a_reason(corpus, small, tmp_path):
    [(_, dropped)] = read_audio([Clip('x', 'a', 'a', 'en', tmp_path / 'x.wav')], small)
    assert 'missing' in dropped.reason

def test_clips_come_in_order_for_any_number_of_workers(corpus, small):
    clips = read_corpus(corpus)[0]
    runs = [[(c.id, len(w)) for c, w in read_audio(clips, small.replace(data={'num_workers': n}), chunk=3)]
            for n in (1, 4)]
    assert runs[0] == runs[1] and [i for i, _ in runs[0]] == [c.id for c in clips]

# --- what is measured -----------------------------------------------------------------------------

def test_silence_is_measured_by_position():
    noise = lambda n: np.random.default_rng(0).standard_normal(n).astype(np.float32)
    quiet = lambda seconds: 1e-4 * noise(int(seconds * 22050))
    loud = 0.3 * np.sin(np.arange(22050) / 10).astype(np.float32)
    told = measure_clip(np.concatenate([quiet(1), loud, quiet(2), loud, quiet(3)]), 22050)
    assert [told[k] for k in ('leading', 'inner', 'trailing')] == pytest.approx([1 / 8, 2 / 8, 3 / 8],
                                                                                abs=0.01)
    assert told['peak'] == pytest.approx(0.3, abs=1e-3) and told['clipped'] == 0

@pytest.mark.parametrize('rate', [22050, 44100, 48000])
def test_clipping_is_found_after_a_change_of_rate(tmp_path, rate):
    wav = at(rate) * 9
    soundfile.write(tmp_path / 'x.wav', np.clip(wav, -1, 1), rate)
    assert measure_clip(load_audio(tmp_path / 'x.wav'),
                        22050)['clipped'] > 0.5 * np.mean(np.abs(wav) >= 1) > 0
    soundfile.write(tmp_path / 'x.wav', at(rate), rate)
    assert measure_clip(load_audio(tmp_path / 'x.wav'), 22050)['clipped'] == 0

@pytest.mark.parametrize('wav', [np.zeros(0), np.ones(1), np.zeros(9999), np.ones(300)])
def test_anything_can_be_measured(wav):
    told = measure_clip(wav.astype(np.float32), 22050)
    json.dumps(told, allow_nan=False)
    assert all(0 <= v <= 1 for v in told.values() if not isinstance(v, str))

@pytest.mark.parametrize('scale', [1., 0.05])
def test_a_frame_is_silent_below_a_hundredth_of_the_loudest(scale):
    "20 ms each: 1 just silent, loud, just loud, 2 silent, loud, 3 silent; and an incomplete frame."
    levels = [0.00995, 0.9, 0.01005, 0, 0, 1, 0, 0, 0.00995]
    wav = np.concatenate([level * LEVEL[:441] for level in levels] + [LEVEL[:440]]).astype(np.float32)
    told = measure_clip(wav * np.float32(scale), 22050)
    assert [told[k] for k in ('leading', 'inner', 'trailing')] == [round(n / 9, 4) for n in (1, 2, 3)]
    clipped = round((440 + 441) / len(wav), 4) if scale == 1 else 0
    assert told['peak'] == pytest.approx(scale) and told['clipped'] == clipped

def test_what_is_measured_of_silence_and_of_nothing():
    parts = 'peak', 'clipped', 'leading', 'inner', 'trailing'
    shares = lambda wav: [measure_clip(np.float32(wav), 22050)[k] for k in parts]
    assert shares(np.zeros(441)) == shares(np.zeros(4410)) == [0, 0, 0, 0, 1] and shares([]) == [0] * 5
    assert shares([0.99, 0.1, -0.99, 0.98]) == [0.99, 0.5, 0, 0, 0]
    assert shares([0.123456]) == [0.1235, 0, 0, 0, 0]

def test_the_fingerprint_of_a_clip_depends_on_its_samples():
    assert measure_clip(VOICE, 22050)['sound'] == measure_clip(VOICE.copy(),
                                                               22050)['sound'] != measure_clip(VOICE[:-1],
                                                                                               22050)['sound']

# --- the report -----------------------------------------------------------------------------------

def row(name, text='hello', speaker='anna', seconds=1., **values):
    "A line of the table of clips."
    return {'id': name, 'text': text, 'speaker': speaker, 'language': 'en', 'seconds': seconds, 'peak': 0.5,
            'clipped': 0., 'leading': 0., 'inner': 0., 'trailing': 0., 'sound': name} | values

def test_the_report_adds_up(prepared, corpus):
    report = json.loads((prepared.folder / 'report.json').read_text())
    seconds = [soundfile.info(corpus / 'wavs' / f'{c["id"]}.wav').duration for c in prepared.clips]
    assert report['seconds'] == pytest.approx(sum(seconds), abs=0.01)
    assert (report['shortest'], report['longest']) == pytest.approx((min(seconds), max(seconds)), abs=1e-3)
    assert report['speakers'] == {'low': 7, 'high': 7} and report['languages'] == {'en': 14}
    assert set(report['characters']) == set(' abcdefgh')
    assert sum(report['characters'].values()) == sum(len(c['text']) for c in prepared.clips)
    for part in ('durations', 'text_lengths'): assert sum(report[part]['counts']) == 14
    assert report_text(report).splitlines()[0].startswith('14 clips')

def test_clips_that_are_alike_are_named():
    table = [row('a', 'Hello, you!'), row('b', 'hello you'), row('c', 'hello you', 'bert'),
             row('d', 'other', sound='a'),
             row('e', 'more')]
    report = summary(table, [])
    assert report['same_text'] == [['a', 'b']] and report['same_sound'] == [['a', 'd']]
    assert 'same text  2 clips (a = b)' in report_text(report)
    assert 'same sound 2 clips (a = d)' in report_text(report)

def test_the_worst_are_named():
    table = [row('a', clipped=0.02), row('b', clipped=0.0005), row('c', leading=0.5, trailing=0.25),
             row('d', inner=0.25)]
    report = summary(table, [])
    assert report['clipped'] == 1 and report['most_clipped'] == [{'id': 'a', 'share': 0.02}]
    assert report['most_silent'] == [{'id': 'c', 'share': 0.75}, {'id': 'd', 'share': 0.25}]
    assert report['silence'] == {'leading': 0.125, 'inner': 0.0625, 'trailing': 0.0625}

@pytest.mark.parametrize('reasons, kind', [
    (['the file wavs/a.wav is missing', 'the file b: 3 (x).wav is missing'], 'the file … is missing'),
    (['12.00 s, longer than data.max_seconds 11.6', '600.01 s, longer than data.max_seconds 11.6'],
     'N s, longer than data.max_seconds N'),
    (['line 3 has 4 columns instead of id|text', 'line 17 has 1 columns instead of id|text'],
     'line N has N columns instead of id|text'),
    (['not UTF-8: "a b" in line 3', 'not UTF-8: "c" in line 4'], 'not UTF-8'),
    (['no language code such as en or zh-cn: "x"', 'no language code such as en or zh-cn: "y: z"'],
     'no language code such as en or zh-cn'),
    (['the text has 400 tokens, more than 200'], 'the text has N tokens, more than N')])
def test_reasons_of_one_kind_are_counted_together(reasons, kind):
    report = summary([row('a')], [Dropped(str(i), r) for i, r in enumerate(reasons)])
    assert report['reasons'] == {kind: len(reasons)} and f'{len(reasons)} × {kind}' in report_text(report)
    assert {reason_kind(r) for r in reasons} == {kind}

def test_no_name_forges_a_line():
    report = summary([row('a\nclipped 99', speaker='\u202ex\n'), row('b', sound='a\nclipped 99')],
                     [Dropped('c\ndropped 0',
        'bad')])
    lines = report_text(report).splitlines()
    assert not any(line.startswith(('clipped 99', 'dropped 0')) for line in lines)
    assert '\u202e' not in '\n'.join(lines)

TEXT = """\
11 clips, 0.1 minutes, 0.3 to 2.0 s
seconds    90 % lie between 0.3 and 1.2, half below 0.3
characters 90 % lie between 3.0 and 5.0, half below 5.0
speakers   0 1, 1 1, 2 1, 3 1, 4 1, 5 1, 6 1, 7 1, 8 1, 9 1, and 1 more
languages  en 11
letters    l 20, h 10, e 10, o 10, a 1
same text  0 clips
same sound 11 clips (a = b = c; e = f; g = h)
silence    leading 33.3%, inner 3.0%, trailing 0.0%
  most in  f 67%, a 33%, b 33%, c 33%, d 33%
clipped    7: g 70%, a 7%, b 6%, c 5%, d 4%
dropped    3
  2 × bad
  1 × worse
  x: bad
  y: bad
  and 1 more
"""

def test_the_report_to_read_and_its_numbers():
    "A third of a second each, and 2 s; four groups of equal sound; seven clipped, one almost clipped."
    clipped = dict(zip('abcdefgh', (0.07, 0.06, 0.05, 0.04, 0.03, 0.02, 0.7, 0.001)))
    table = [row(name, 'hello' if i else 'a ', str(i), 1 / 3 if i < 10 else 2., leading=1 / 3,
                 inner=(name == 'f') / 3,
                 clipped=clipped.get(name, 0.), sound='ddddaabbccc'[i])
             for i, name in enumerate('abcdefghijk')]
    report = summary(table, [Dropped('x', 'bad'), Dropped('y', 'bad'), Dropped('z', 'worse')])
    assert report_text(report, most=2) == TEXT
    assert report_text(report, most=3).endswith('  y: bad\n  z: worse\n') and len(report['most_clipped']) == 5
    assert report['seconds'] == 5.33 and report['most_silent'][0] == {'id': 'f', 'share': 0.6667}
    assert report['silence'] == {'leading': 0.3333, 'inner': 0.0303, 'trailing': 0.}

def test_a_report_of_nothing_and_of_clips_that_are_measured_in_part():
    report = summary([], [])
    assert (report['clips'], report['seconds'], report['shortest'], report['longest']) == (0, 0, 0, 0)
    assert set(report['durations']['quantiles'].values()) == {0}
    assert report_text(report).startswith('0 clips, 0.0 minutes')
    part = {k: v for k, v in row('b').items() if k in ('id', 'text', 'speaker', 'language', 'seconds')}
    assert 'silence' not in summary([row('a'), part], [])

def test_a_long_list_can_be_cut():
    report = summary([row('a')], [Dropped(str(i), 'bad') for i in range(30)])
    assert report_text(report).count(': bad') == 30
    assert report_text(report, most=20).count(': bad') == 20
    assert report_text(report, most=20).endswith('  and 10 more\n')

def test_a_table_that_was_not_measured_has_a_report():
    table = [{k: v for k, v in row('a').items() if k in ('id', 'text', 'speaker', 'language', 'seconds')}]
    report = summary(table, [])
    assert 'silence' not in report and 'silence' not in report_text(report)

def test_spread():
    told = distribution(np.arange(101.))
    assert told['quantiles'] == {'0': 0, '5': 5, '25': 25, '50': 50, '75': 75, '95': 95, '100': 100}
    assert sum(told['counts']) == 101 and len(told['edges']) == len(told['counts']) + 1
    quantiles = {'0': 0, '5': 0.017, '25': 0.083, '50': 0.167, '75': 0.25, '95': 0.317, '100': 0.333}
    assert distribution(np.array([0., 1 / 3]), 1) == {'quantiles': quantiles, 'counts': [2],
                                                      'edges': [0, 0.333]}
