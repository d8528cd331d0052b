"Scores of sounds whose answers are known, what is offered, and a small model from its clips to its report."
import dataclasses
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from xtts_nb.app.demo import speak
from xtts_nb.bench import benchmarks, recorded
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.data.audio import load_audio, save_audio, synthetic_voice
from xtts_nb.data.corpora import Clip
from xtts_nb.data.text import LANGUAGES, train_tokenizer
from xtts_nb.speech import evaluate as page
from xtts_nb.speech.evaluate import (
    badness, choose_trials, copy_synthesis, dnsmos_judge, evaluate, evaluation_report, judged,
    mean_world_scores, mel_cepstrum, model_card, package, QUICK_JUDGES, RATE, read_clips, score_sounds,
    scores_table,
    scores_text, Sound, SOUND_SOURCES, source_sounds, speaker_judge, spread, Trial, Wanted, warp_path,
    warping_judge, words_judge, world_judge)
from xtts_nb.speech.generate import never_stop


def voice(seconds=0.5, pitch=120.):
    "A vowel that changes, at one pitch."
    t = np.arange(int(seconds * RATE)) / RATE
    centre = 600 + 500 * np.sin(3 * t / seconds)
    wav = sum(np.sin(2 * np.pi * k * pitch * t) / (1 + ((k * pitch - centre) / 150)**2) for k in range(1, 40))
    return Sound(0.2 * wav, RATE)

def silence(seconds=0.5): return Sound(np.zeros(int(seconds * RATE)), RATE)

def wanted(recorded, text='Hello, world', language='en'): return Wanted(text, language, recorded, recorded)


# --- sounds and signals -------------------------------------------------------------------------------------

def test_a_sound_begins_and_ends_where_it_is_loud():
    tone = 0.5 * np.sin(np.arange(RATE // 2))
    quiet = np.concatenate([np.zeros(RATE // 10), 0.02 * tone, tone, 0.001 * tone])   # -28 and -54 dB
    sound = Sound(quiet, RATE)
    assert (sound.sounds[0], sound.sounds[-1]) == (10, 109) and sound.seconds == 1.
    assert Sound(np.repeat(quiet, 2), 2 * RATE).seconds == pytest.approx(1., abs=0.02)
    assert silence().seconds == 0 and not len(silence().sounds)
    assert not len(Sound(np.full(RATE, 1e-4), RATE).sounds)
    short = Sound(tone[:50], RATE)
    assert len(short.low) == RATE // 4 and len(short.wav) == 50 and len(short.mel) > 1

def test_a_mel_cepstrum_is_found_again_in_decibels():
    "log |H| = sum of c_m cos(m w) on the warped axis; the distance of two is (10 sqrt 2 / ln 10) |c - d|."
    w = np.linspace(0, np.pi, 513)
    warped = w + 2 * np.arctan(0.42 * np.sin(w) / (1 - 0.42 * np.cos(w)))
    coefficients = np.array([0.3, -0.2, 0.05])
    envelope = np.exp(2 * (4 + np.cos(np.outer(warped, [1, 2, 9])) @ coefficients))
    found = mel_cepstrum(envelope[None])[0]
    expected = np.zeros(24)
    expected[[0, 1, 8]] = coefficients * 10 * 2**0.5 / np.log(10)
    assert np.allclose(found, expected, atol=2e-3)

@pytest.mark.parametrize('frames', [(1, 1), (1, 4), (5, 1), (6, 9)])
def test_no_path_is_cheaper(frames):
    cost = np.random.default_rng(0).uniform(1, 9, frames)
    path = warp_path(cost)
    weight = lambda steps: 1 + (steps.sum(-1) == 2)
    def total(p):
        p = np.asarray(p)
        return (cost[tuple(p.T)] * np.concatenate([[2], weight(np.diff(p, axis=0))])).sum()
    def paths(i, j):
        if (i, j) == (0, 0): yield [(0, 0)]
        for di, dj in ((1, 0), (0, 1), (1, 1)):
            if i >= di and j >= dj: yield from (p + [(i, j)] for p in paths(i - di, j - dj))
    assert path[0].tolist() == [0, 0] and path[-1].tolist() == [frames[0] - 1, frames[1] - 1]
    assert set(map(tuple, np.diff(path, axis=0))) <= {(1, 0), (0, 1), (1, 1)}
    assert total(path) == pytest.approx(min(map(total, paths(frames[0] - 1, frames[1] - 1))))


# --- judges -------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def by_world():
    pytest.importorskip('pyworld')
    low = voice()
    return lambda spoken: world_judge()(spoken, wanted(low))

def test_a_recording_is_its_own_ceiling(by_world):
    assert by_world(voice()) == {'mcd': pytest.approx(0, abs=1e-3), 'f0': 0, 'voicing': 0}
    assert warping_judge()(voice(), wanted(voice())) == {'mel': pytest.approx(0, abs=0.05), 'duration': 1}

@pytest.mark.parametrize('cents', [-300, 700])
def test_a_shifted_pitch_is_measured_in_cents(by_world, cents):
    found = by_world(voice(pitch=120 * 2**(cents / 1200)))
    assert found['f0'] == pytest.approx(abs(cents), abs=20) and found['mcd'] > 1

def test_a_slower_voice_is_the_same_sentence(by_world):
    slow, noise = voice(0.75), Sound(np.random.default_rng(0).normal(0, 0.1, RATE // 2), RATE)
    assert by_world(slow)['mcd'] < 0.2 * by_world(noise)['mcd'] and by_world(slow)['f0'] < 25
    assert by_world(noise)['voicing'] > 50
    scores = warping_judge()(slow, wanted(voice()))
    assert scores['duration'] == pytest.approx(1.5, abs=0.03)
    assert scores['mel'] < 0.3 * warping_judge()(noise, wanted(voice()))['mel']

def test_means_over_some_clips(by_world):
    "Of those clips that have a number."
    rate, wavs = 24_000, [voice().wav, voice(pitch=180).wav, silence().wav]
    low = voice().wav
    found = mean_world_scores(wavs, [low] * 3, RATE)
    each = [by_world(Sound(wav, RATE)) for wav in wavs]
    mean = lambda name: pytest.approx(np.mean([scores[name] for scores in each[:2]]), abs=1e-3)
    assert each[2]['mcd'] is None and found == {name: mean(name) for name in ('mcd', 'f0')}
    assert mean_world_scores(wavs, [low] * 3, rate) != found
    assert np.isnan([*mean_world_scores([silence().wav], [low], RATE).values()]).all()

def test_silence_is_worse_than_any_number(by_world):
    assert by_world(silence()) == {'mcd': None, 'f0': None, 'voicing': None}
    assert warping_judge()(silence(), wanted(voice())) == {'mel': None, 'duration': None}
    whisper = Sound(0.1 * np.random.default_rng(1).normal(size=RATE // 2), RATE)
    assert by_world(whisper)['mcd'] > 0

class Decoder:
    "A recogniser that hears what it is told."
    hypothesis, heard = SimpleNamespace(hypstr='hello word'), []
    def __init__(self, **settings): assert settings['samprate'] == RATE
    def start_utt(self): pass
    def end_utt(self): pass
    def process_raw(self, data, full_utt): self.heard.append(np.frombuffer(data, '<i2'))
    def hyp(self): return self.hypothesis

def test_words_of_an_english_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, 'pocketsphinx', SimpleNamespace(Decoder=Decoder))
    judge, sound = words_judge(), Sound(np.array([0, 0.5, -2.] * RATE), RATE)
    assert judge(sound, wanted(sound, 'HELLO, World!')) == {'cer': pytest.approx(100 / 11), 'wer': 50}
    assert Decoder.heard[-1][:3].tolist() == [0, 16383, -32767] and len(Decoder.heard[-1]) == 3 * RATE
    assert judge(sound, wanted(sound, 'Hello', 'de')) == judge(sound, wanted(sound, '12 !')) == {}
    assert judge(sound, wanted(sound, "it's well-known"))['wer'] == 100
    assert judge(sound, wanted(sound, 'Hello -- "WORD".')) == {'cer': 0, 'wer': 0}
    for text, share in (('word hello', 100), ('say hello', 100), ('hello my old word', 50)):
        assert judge(sound, wanted(sound, text))['wer'] == share
    for text, count in (('hallo word', 1), ('hello', 5), ('hello cold world', 6)):
        assert judge(sound, wanted(sound, text))['cer'] == pytest.approx(100 * count / len(text))
    monkeypatch.setattr(Decoder, 'hypothesis', None)
    assert judge(sound, wanted(sound)) == {'cer': 100, 'wer': 100}

@pytest.mark.parametrize('seconds, windows', [(0.5, 7), (6., 3), (9.01, 1), (10.5, 1), (11., 2)])
def test_dnsmos_hears_nine_seconds_at_a_time(monkeypatch, tmp_path, seconds, windows):
    runs = []
    class Session:
        def __init__(self, path, providers):
            assert path == str(tmp_path / 'dnsmos_models' / 'sig_bak_ovr.onnx')
        def run(self, _, inputs):
            runs.append(inputs['input_1'])
            return [np.array([[9., 9., len(runs)]])]
    monkeypatch.setitem(sys.modules, 'onnxruntime', SimpleNamespace(InferenceSession=Session))
    package = SimpleNamespace(__file__=str(tmp_path / '__init__.py'))
    monkeypatch.setitem(sys.modules, 'speechmos', package)
    judge, sound = dnsmos_judge(), Sound(np.linspace(-2, 0.5, int(seconds * RATE)), RATE)
    expected = np.mean([-0.06766283 * k * k + 1.11546468 * k + 0.04602535 for k in range(1, windows + 1)])
    assert judge(sound, wanted(sound)) == {'dnsmos': pytest.approx(expected)}
    assert [r.shape for r in runs] == [(1, 144160)] * windows and runs[0].dtype == 'float32'
    repeated = np.clip(np.resize(sound.low, 10**6), -1, 1)
    for k, heard in enumerate(runs): assert np.array_equal(heard[0, :9], repeated[k * RATE:][:9])
    assert judge(silence(), wanted(sound)) == {'dnsmos': None}

def test_speaker_similarity_reads_weights_only(monkeypatch):
    loads = []
    torch = SimpleNamespace(load=lambda path, **how: loads.append((path, how)))
    class VoiceEncoder:
        def __init__(self, device, verbose): torch.load('weights.pt')
        def embed_utterance(self, wav): return np.array([1, 0.]) if wav[0] else np.array([0.6, 0.8])
    fake = SimpleNamespace(VoiceEncoder=VoiceEncoder, preprocess_wav=lambda wav, rate: wav * (rate == RATE))
    monkeypatch.setitem(sys.modules, 'torch', torch)
    monkeypatch.setitem(sys.modules, 'resemblyzer', fake)
    judge = speaker_judge()
    assert loads == [('weights.pt', {'weights_only': True})]
    one, other = Sound(np.ones(RATE), RATE), Sound(np.arange(RATE) / RATE, RATE)
    assert judge(other, wanted(silence())._replace(voice=one)) == {'speaker': pytest.approx(0.6)}
    assert judge(silence(), wanted(one)) == {'speaker': None}

@pytest.mark.parametrize('make, name', [(world_judge, 'pyworld'), (dnsmos_judge, 'onnxruntime'),
                                        (words_judge, 'pocketsphinx'), (speaker_judge, 'resemblyzer')])
def test_a_missing_package_is_named_with_its_remedy(monkeypatch, make, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=f'{name} is missing.*pip install'): make()


# --- order --------------------------------------------------------------------------------------------------

def test_none_is_worst_and_a_ratio_is_best_at_one():
    assert badness('low', 2) < badness('low', 3) < badness('low', None) == badness('one', 0) == np.inf
    assert badness('high', 3) < badness('high', 2) < badness('high', float('nan'))
    assert badness('one', 1) < badness('one', 0.9) < badness('one', 1.2)
    assert badness('one', 2) == badness('one', 0.5)

def test_median_and_quartiles_go_from_best_to_worst():
    assert spread('low', [5, 1, None, 3, 2]) == {'median': 3, 'low': 2, 'high': 5, 'clips': 5, 'missing': 1}
    assert spread('high', [5, 1, 3, 2, 4]) == {'median': 3, 'low': 4, 'high': 2, 'clips': 5, 'missing': 0}
    assert spread('one', [1.1, 0.5, 1.])['median'] == 1.1 and spread('low', [None, None, 1])['median'] is None
    assert spread('low', []) == {'median': None, 'low': None, 'high': None, 'clips': 0, 'missing': 0}

@pytest.mark.parametrize('score, real, untrained, offered', [   # worse quartile, better quartile
    ('wer', 1, 2, True), ('wer', 2, 2, False), ('wer', 3, 2, False), ('dnsmos', 4, 3, True),
    ('dnsmos', 3, 4, False), ('wer', 1, None, True), ('wer', None, None, False),
    ('duration', 0.9, 1.3, True), ('duration', 1.3, 0.9, False), ('duration', 1., 1.05, False),
    ('mel', 11, 23, True), ('mel', 0, 1, False), ('mel', 22, 23, False)])
def test_a_score_is_offered_if_it_separates_real_speech(score, real, untrained, offered):
    "From the untrained model; a recording is never compared with itself, and the figures stay."
    row = {'score': score, 'offered': None, 'fault': 'by another rule'}
    row |= {name: {'median': 0, 'low': 0, 'high': 0, 'clips': 3} for name in page.MAIN_SOURCES}
    row['recording' if score in ('wer', 'dnsmos') else 'copy']['high'] = real
    row['untrained']['low'] = untrained
    found = judged(row)
    assert (found['offered'], bool(found['fault'])) == (offered, not offered) and found.keys() == row.keys()

def test_nobody_is_prompted_with_what_he_must_say():
    held = [c.id for c in CLIPS if c.speaker == 'y']   # a voice that was never seen
    assert all(t.reference.speaker == 'y' and t.reference != t.clip and t.reference.text != t.clip.text
               for t in choose_trials(CLIPS, held, 9))
    lone = Clip('lone', 'a', 'z', 'en', None)
    assert all(t.clip != lone for t in choose_trials([*CLIPS, lone], (), 99))
    takes = [Clip(name, 'a', 'z', 'en', None) for name in 'pq']
    assert [t.reference for t in choose_trials(takes)] == takes[::-1]

def test_the_line_of_a_score_has_its_quartiles_and_what_is_silent():
    "The smaller quartile first, whichever is better."
    of = lambda low, high, missing=0: dict(median=2.5, low=low, high=high, clips=4, missing=missing)
    row = {'score': 'dnsmos', 'offered': True, 'fault': ''}
    row |= {name: of(3., 1.25) for name in page.MAIN_SOURCES} | {'model': of(3., None, 1)}
    text = page.scores_table([row])
    assert text.count('2.5<small>1.25 – 3</small>') == 3
    assert '<td class=model>2.5<small>no sound in 1 of 4</small></td>' in text

def test_what_has_no_value_keeps_its_reason():
    row = {'score': 'mcd', 'offered': False, 'fault': 'pyworld is missing'}
    assert judged(row) == row

def test_a_record_of_the_demo_hides_no_figure():
    "Pitch error was once not offered, as copy-synthesis is not better than a good model."
    rows = [*map(judged, recorded('evaluate', benchmarks())[-1]['rows'])]
    text = scores_text(rows)
    for row in rows:
        assert ('recording' in row) == any(line.startswith(row['name']) for line in text.splitlines())
    assert {'mel', 'f0', 'voicing', 'dnsmos'} <= {row['score'] for row in rows if row['offered']}


# --- clips --------------------------------------------------------------------------------------------------

CLIPS = [Clip(f'{language}-{text}-{speaker}', text, speaker, language, None)
         for language in ('en', 'de') for text in 'abcd' for speaker in ('x', 'y')]

def test_trials_are_held_out_and_their_references_are_not():
    held = {'en-a-x', 'en-b-y', 'de-c-x', 'de-d-y'}
    trials = choose_trials(CLIPS, [*held, 'gone'], 9)
    assert {t.clip.id for t in trials} == held
    for clip, reference, other_voice, other_sentence in trials:
        assert reference.id not in held and other_sentence.id not in held and reference != other_sentence
        for c in (reference, other_sentence):
            assert (c.speaker, c.language) == (clip.speaker, clip.language) and c.text != clip.text
        assert (other_voice.text, other_voice.language) == (clip.text, clip.language)
        assert other_voice.speaker != clip.speaker

def test_the_seed_chooses_among_all_clips_where_none_is_held_out():
    chosen = [tuple(t.clip.id for t in choose_trials(CLIPS, (), 5, seed)) for seed in (0, 0, 1, 2)]
    assert chosen[0] == chosen[1] and len(set(chosen)) > 1 and len(set(chosen[0])) == 5
    assert all(t.reference != t.clip for t in choose_trials(CLIPS, (), 5))

def test_a_lone_clip_is_its_own_reference():
    assert choose_trials(CLIPS[:1]) == [Trial(CLIPS[0], CLIPS[0], None, None)]
    pair = [CLIPS[0], CLIPS[2]]   # two sentences in a voice
    assert choose_trials(pair, [CLIPS[0].id]) == [Trial(CLIPS[0], CLIPS[2], None, CLIPS[2])]
    other = CLIPS[2].__class__('z', 'z', 'x', 'fr', None)
    assert choose_trials([CLIPS[0], other], [CLIPS[0].id])[0].reference == other   # any language of the voice

def test_clips_of_a_cache_and_of_its_corpus(prepared, corpus):
    cached, read = read_clips(prepared.folder), read_clips(corpus)
    assert cached == read and len(read) == 14


# --- the whole way ------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def evaluation(xtts, prepared):
    "Three clips of a model with random weights, by two judges of which one is missing."
    told = []
    with pytest.MonkeyPatch.context() as m:
        missing = {('mcd',): lambda: package('no_such_package')}
        m.setattr(page, 'JUDGES', {('mel', 'duration'): warping_judge} | missing)
        found = evaluate(xtts, prepared.folder, [c['id'] for c in prepared.clips][:3], 9, 0, 'en',
                         lambda *what: told.append(what))
    assert told[0] == ('copy-synthesis', 0, 1) and told[-1] == ('score', 2, 2) and ('speak', 2, 2) in told
    return found

def test_every_source_of_every_clip_is_scored(evaluation, prepared):
    assert evaluation.about == {'clips': 3, 'voices': 1, 'languages': 'en', 'vocoder': 'griffin-lim',
                                'held_out': True}
    mel, duration, mcd = evaluation.scores
    assert mel['recording']['median'] < 0.05 < mel['copy']['median'] and duration['recording']['median'] == 1
    assert [mel[name]['clips'] for name in SOUND_SOURCES] == [3] * 6
    assert not mcd['offered'] and 'no_such_package' in mcd['fault'] and 'recording' not in mcd
    assert json.loads(json.dumps(evaluation.to_dict()))['offered'] == evaluation.offered
    model, blank = (evaluation.sounds[name][0].wav for name in ('model', 'untrained'))
    assert len(model) != len(blank) or not np.allclose(model, blank)
    longest = max(prepared.samples[:3]) / 22050
    assert all(len(s.wav) / s.rate < 1.6 * longest for s in evaluation.sounds['untrained'])

def test_scores_as_text(evaluation):
    values = {name: {'median': k + 0.125, 'clips': 1} for k, name in enumerate(SOUND_SOURCES)}
    row = {'name': 'a', 'unit': '', 'offered': True, 'fault': ''} | values
    lines = scores_text([row | {'copy': {'median': 1234.5}, 'untrained': {'median': None}},
                         row | {'name': 'b', 'unit': 'dB', 'offered': False, 'fault': 'why'}]).splitlines()
    assert lines[0].split('  ')[-1] == 'another sentence'
    assert lines[1].split() == ['a', '0.12', '1,234', '2.12', '–', '4.12', '5.12']
    assert lines[2].split() == ['b,', 'dB', '0.12', '1.12', '2.12', '3.12', '4.12', '5.12']
    assert lines[3:] == ['Not offered: b: why.'] and len({*map(len, lines[:3])}) == 1

def test_the_report_shows_each_score_and_each_clip(evaluation, tmp_path):
    scores = [evaluation.scores[0] | {'offered': True, 'fault': '',
                                      'untrained': evaluation.scores[0]['copy'] | {'median': 99.}},
              evaluation.scores[1] | {'offered': False, 'fault': 'it says nothing'}, evaluation.scores[2]]
    path = evaluation_report(evaluation._replace(scores=scores), tmp_path / 'new', most=2)
    text = path.read_text(encoding='utf-8')
    assert text.count('<audio') == 10 and text.count('<h3') == 2 and 'src="http' not in text
    assert text.count('<svg') == 1 and text.count('<circle') == 6 and text.count('class=off') == 2
    assert 'no_such_package' in text and 'never saw' in text and 'not offered: it says nothing' in text
    assert len(re.findall(r'<small>[\d.,]+ – [\d.,]+</small>', text)) == 12   # of both scores
    assert json.loads((tmp_path / 'new' / 'scores.json').read_text())['clips'] == 3
    assert {p.name for p in (tmp_path / 'new' / 'wavs').iterdir()} >= {'000-model.wav', '001-reference.wav'}

def test_the_model_card(evaluation, prepared):
    values = {name: {'median': k + 0.125, 'clips': 1} for k, name in enumerate(SOUND_SOURCES)}
    row = {'name': 'pitch error', 'unit': 'cents', 'offered': True, 'fault': ''} | values
    del row['other_sentence']   # of an older record
    scored = evaluation._replace(scores=[row, row | {'name': 'no use', 'offered': False}])
    config = XTTSConfig.tiny().replace(training={'finetune': 'lora', 'learning_rate': 2e-5},
                                       data={'batch_size': 7})
    run = {'base': '/models/old', 'held_out': ['a', 'b'], 'mix': 'x', 'mix_share': .25}
    text = model_card(scored, config, run, prepared, 1234)
    seconds = sum(c['seconds'] for c in prepared.clips)
    for line in ('language: ["en"]', '| hours | %.2f |' % (seconds / 3600), f'| clips | {len(prepared)} |',
                 '| voices | 2 |', '| held out, not trained on | 2 clips |', '| began from | old |',
                 '| trained | adapters beside the weights (LoRA) |', '| updates | 1,234 of 7 clips |',
                 '| peak learning rate | 2e-05 |', '| older clips | 25% of the updates |',
                 '| pitch error, cents | 0.12 | 1.12 | 2.12 | 3.12 | 4.12 | – |'):
        assert f'{line}\n' in text, line
    assert text.startswith('---\n') and text.endswith('.\n') and 'no use' not in text
    assert text.count('.wav)') == 6
    assert f'- {scored.trials[2].clip.text}: [model](wavs/002-model.wav)' in text
    trial = scored.trials[0]
    odd = scored._replace(trials=[trial._replace(clip=dataclasses.replace(trial.clip, text='a [b](c)'))])
    assert '- a \\[b\\](c): [model](wavs/000-model.wav), [recording](wavs/000-recording.wav)\n' in model_card(
        odd, config)
    silent = scored._replace(scores=[row | {'model': row['model'] | {'missing': 1}}])
    note = 'Some clips of the model have no sound'
    assert note not in text and note in model_card(silent, config)
    assert 'Medians of 3 clips (not used in training), with griffin-lim' in text
    scored.about['held_out'] = False
    for held, seen in ((True, 'not used in training, but by some clips of this kind the model was chosen'),
                       (False, 'perhaps used in training')):
        tried = scored._replace(about=scored.about | {'held_out': held})
        assert f'({seen})' in model_card(tried, config, run, prepared, chosen=True)
    plain, new = (model_card(scored, XTTSConfig.tiny(), run) for run in ({}, {'cache': 'x'}))
    scored.about['held_out'] = True
    assert '(perhaps used in training)' in plain and '| began from | random weights |' in new
    unknown = 'hours', 'updates', 'held out', 'older', 'clips', 'began', 'trained', 'precision', 'peak'
    assert not any(f'| {word}' in plain for word in unknown)
    assert '| began from | a\\|b |' in model_card(scored, XTTSConfig.tiny(), {'base': 'x/a|b'})
    assert '| languages | en |' in plain

def test_every_language_has_sentences_of_its_own():
    assert [*sorted(page.SENTENCES)] == sorted([*LANGUAGES, 'fa'])
    texts = [t for some in page.SENTENCES.values() for t in some]
    assert len({*texts}) == len(texts) == 5 * 18 and all(len(t) >= 9 for t in texts)
    assert all(len(t) == 5 for t in page.READ_AS.values())

def test_fixed_sentences_take_the_voices_in_turn(xtts, prepared, tmp_path, monkeypatch):
    said, language = [], xtts.tokenizer.languages[0]
    known = [c['text'] for c in prepared.clips][:3]
    monkeypatch.setattr(page, 'SENTENCES', {language: [*known, known[0]], 'de': ['ЖЖЖ']})
    def speak(text, language):
        said.append((text, language))
        return (np.arange(220) * 50).astype(np.int16), 22050
    voices = [CLIPS[0], CLIPS[2], CLIPS[-1]]
    made = page.sentence_trials(xtts, [language], speak, tmp_path, voices, each=3)
    texts = page.SENTENCES[language][:3]
    assert said == [(t, language) for t in texts] and [t.clip.text for t in made] == [*texts]
    assert [t.clip.id for t in made] == [f'{language}-{i}' for i in (1, 2, 3)]
    speakers = [*dict.fromkeys(c.speaker for c in voices)]
    assert [t.reference.speaker for t in made] == [speakers[i % len(speakers)] for i in range(3)]
    assert made[0].reference == CLIPS[0] and made[0].other_sentence == CLIPS[2]   # of that voice, another one
    assert made[1].other_sentence is None and all(t.other_voice is None for t in made)
    wav = load_audio(made[0].clip.path, 22050)
    assert np.allclose(wav, np.arange(220) * 50 / 32768, atol=1e-4)
    page.SENTENCES[language] = ['ЖЖЖ', known[0]]   # letters that it never saw
    (left,) = page.sentence_trials(xtts, [language], speak, tmp_path, voices)
    assert left.clip.text == known[0] and left.reference == CLIPS[0]
    page.SENTENCES[language] = ['ЖЖЖ']
    with pytest.raises(UserError, match='the model never saw some letters'):
        page.sentence_trials(xtts, [language], speak, tmp_path, voices)
    with pytest.raises(UserError, match='The tokenizer has no language "tlh"; it has'):
        page.sentence_trials(xtts, ['tlh'], speak, tmp_path, voices)

def test_what_espeak_ng_is_given(xtts, tmp_path):
    "Its own name of a language, and kana for kanji."
    languages, said = ['ja', 'zh-cn'], []
    tokenizer = train_tokenizer([t for k in languages for t in page.SENTENCES[k]], languages)
    def listen(*what):
        said.append(what)
        return speak(*what)
    any_of = SimpleNamespace(tokenizer=tokenizer, config=xtts.config)
    made = page.sentence_trials(any_of, languages, listen, tmp_path, CLIPS[:1], each=1)
    assert all(1 < len(load_audio(t.clip.path, 22050)) / 22050 < 6 for t in made)   # no letter is spelled
    assert said == [(page.READ_AS['ja'][0], 'ja'), (page.SENTENCES['zh-cn'][0], 'cmn')]
    assert [t.clip.text for t in made] == [page.SENTENCES[k][0] for k in ('ja', 'zh-cn')]
    assert [t.clip.language for t in made] == ['ja', 'zh-cn']

def test_the_end_of_a_sound():
    "10 * log10 of the power of its last 50 ms beside that of its loudest 10 ms."
    tone = np.sin(np.arange(RATE) * .5).astype(np.float32) * .5
    judge = page.end_judge()
    level = lambda wav: judge(Sound(wav, RATE), None)['end']
    assert level(tone) == pytest.approx(0, abs=.2)
    assert level(np.r_[tone, .01 * tone]) == pytest.approx(-40, abs=.2)
    assert level(np.r_[tone, np.zeros(800, np.float32)]) < -90
    assert level(np.r_[tone, np.zeros(400, np.float32)]) == pytest.approx(-3, abs=.2)   # half of 50 ms
    assert judge(silence(), None)['end'] is None

def test_fixed_sentences_are_scored_without_a_melody(xtts, prepared, tmp_path, monkeypatch):
    language = xtts.tokenizer.languages[0]
    monkeypatch.setattr(page, 'SENTENCES', {language: [c['text'] for c in prepared.clips]})
    fixed = lambda clips: page.sentence_trials(xtts, [language], speak, tmp_path, clips, each=2)
    found = evaluate(xtts, prepared.folder, fixed=fixed)
    assert found.about['fixed'] and found.about['held_out'] and found.about['clips'] == 2
    assert [s['score'] for s in found.scores] == ['duration', 'end', 'dnsmos', 'cer', 'wer', 'speaker']
    assert found.scores[0]['recording']['median'] == 1
    card = page.model_card(found, xtts.config, chosen=True)
    assert 'Medians of 2 clips (of fixed sentences; the recording is espeak-ng, a plain voice)' in card

def test_some_sources_by_some_judges(xtts, evaluation):
    "Of what is spoken already; pitch and cepstrum of all sounds are computed before they are compared."
    pytest.importorskip('pyworld')
    trials = evaluation.trials[:1]
    spoken = {name: [evaluation.sounds[name][0].wav] for name in ('model', 'untrained')}
    sounds = source_sounds(xtts, trials, spoken=spoken)
    assert all(sounds[name][0].wav is wav for name, (wav,) in spoken.items())
    sounds, told = {name: sounds[name] for name in (*page.MAIN_SOURCES, 'reference')}, []
    rows = score_sounds(sounds, trials, lambda *what: told.append(what), QUICK_JUDGES)
    assert told == [('score', k, 2) for k in range(3)] and set(rows[2]) >= {*page.MAIN_SOURCES}
    assert [r['score'] for r in rows] == ['mel', 'duration', 'mcd', 'f0', 'voicing']
    assert not {'other_voice', 'other_sentence', 'reference'} & set(rows[2])
    assert rows[2]['recording']['median'] == pytest.approx(0, abs=1e-3) and rows[2]['copy']['median'] > 1
    assert all('world' in vars(sounds[name][0]) for name in page.MAIN_SOURCES)
    table = scores_table(rows)
    assert table.count('<th>') == 6 and table.count('<i ') == 4 and 'another voice' not in table
    missing = {'score': 'dnsmos', 'offered': False, 'fault': 'its package is missing'}
    for line in scores_table([*rows, missing]).split('<tr')[2:]:
        cells = re.findall(r'<td(?: class=model)?(?: colspan="(\d)")?>', line)
        assert sum(int(wide or 1) for wide in cells) == 6

def test_a_silent_recording_is_refused(evaluation):
    sounds = evaluation.sounds | {'recording': [silence()] * 3}
    with pytest.raises(UserError, match='is silent'): score_sounds(sounds, evaluation.trials)

def test_a_score_without_a_clip_says_so(evaluation, monkeypatch):
    monkeypatch.setattr(page, 'JUDGES', {('wer',): lambda: lambda spoken, wanted: {}})
    (row,) = score_sounds(evaluation.sounds, evaluation.trials)
    assert row['fault'] == 'no clip of a language that it knows' and not row['offered']

def test_clips_that_the_model_cannot_speak_are_left_out(xtts, tmp_path):
    save_audio(tmp_path / 'a.wav', synthetic_voice(0.6))
    for text, language in (('aa', 'fr'), ('ß', 'en'), ('a' * 200, 'en')):
        (tmp_path / 'metadata.csv').write_text(f'a|{text}|{text}\n', encoding='utf-8')
        with pytest.raises(UserError, match='no clip that the model can speak'):
            evaluate(xtts, tmp_path, language=language)

@pytest.fixture
def endless(singer):
    "A speaker that makes as many codes as it may, whatever it draws."
    bias = singer.gpt.code_head.bias
    kept = bias.numpy()
    never_stop(singer.gpt)
    yield singer
    bias.assign(kept)

@pytest.mark.slow
def test_with_a_trained_decoder_the_gpt_is_given_the_codes(endless, tmp_path, monkeypatch):
    "Codes that the model itself chooses give the sound that it speaks."
    save_audio(tmp_path / 'a.wav', synthetic_voice(1.))
    clip = Clip('a', 'aa bb', 'v', 'en', tmp_path / 'a.wav')
    codes, (n,), _ = endless._codes([clip.text], ['en'], [endless.listen(clip.path)], endless.sampling)
    assert n == endless.max_codes
    monkeypatch.setattr(page.ClipEncoder, 'codes', lambda self, wav: codes.numpy()[0])
    (copied,) = copy_synthesis(endless.xtts, [Trial(clip, clip, None, None)], [np.zeros(9)], endless)
    (spoken,) = endless.batch([clip.text], ['en'], [clip.path])
    same = len(spoken) - 4000   # the copy has one state more, that of STOP, and its sound reaches back
    assert 1024 <= len(copied) - len(spoken) <= 1280 and np.allclose(copied[:same], spoken[:same], atol=1e-3)
