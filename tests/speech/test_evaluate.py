"Scores of sounds whose answers are known, what is offered, and a small model from its clips to its report."
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.data.audio import load_audio, synthetic_voice
from xtts_nb.data.corpora import Clip
from xtts_nb.speech import evaluate as page, fixed_sentences
from xtts_nb.speech.evaluate import (
    _choose_trials, evaluate, _read_clips, score_sounds, source_sounds, Trial)
from xtts_nb.speech.model_card import model_card
from xtts_nb.speech.score_page import evaluation_report
from xtts_nb.speech.scores import (
    end_judge, judged, _MAIN_SOURCES, _RATE, scores_text, Sound, SOUND_SOURCES, speaker_judge,
    spread, Wanted, warping_judge, _word_errors, words_judge)

def voice(seconds=0.5, pitch=120.): return Sound(synthetic_voice(seconds, pitch, _RATE), _RATE)

def silence(seconds=0.5): return Sound(np.zeros(int(seconds * _RATE)), _RATE)

def wanted(recorded, text='Hello, world', language='en'): return Wanted(text, language, recorded, recorded)

def test_a_sound_begins_and_ends_where_it_is_loud():
    tone = 0.5 * np.sin(np.arange(_RATE // 2))
    quiet = np.concatenate([np.zeros(_RATE // 10), 0.02 * tone, tone, 0.001 * tone])   # -28 and -54 dB
    sound = Sound(quiet, _RATE)
    assert (sound.sounds[0], sound.sounds[-1]) == (10, 109) and sound.seconds == 1.
    assert Sound(np.repeat(quiet, 2), 2 * _RATE).seconds == pytest.approx(1., abs=0.02)
    assert silence().seconds == 0 and not len(Sound(np.full(_RATE, 1e-4), _RATE).sounds)
    assert len(Sound(tone[:50], _RATE).mel) > 1

def test_distance_length_and_end():
    noise = Sound(np.random.default_rng(0).normal(0, .1, _RATE), _RATE)
    judge, slow = warping_judge(), voice(0.75)
    assert judge(slow, wanted(voice()))['duration'] == pytest.approx(1.5, abs=0.05)
    assert judge(slow, wanted(voice()))['mel'] < 0.5 * judge(noise, wanted(voice()))['mel']
    assert judge(silence(), wanted(voice())) == {'mel': None, 'duration': None}
    tone = np.sin(np.arange(_RATE) * .5).astype(np.float32) * .5
    end = lambda wav: end_judge()(Sound(wav, _RATE), None)['end']
    for after, level in ((tone[:0], 0), (.01 * tone, -40), (np.zeros(400, np.float32), -3)):   # half of 50 ms
        assert end(np.r_[tone, after]) == pytest.approx(level, abs=.2)
    assert end(np.zeros(_RATE)) is None

@pytest.mark.parametrize('heard, text, language, errors', [
    ('hello word', 'HELLO, World!', 'en', (10, 50)), ('Hello', 'hello', 'de', (0, 0)), ('x', '!', 'en', None),
    ('word hello', 'hello world', 'en', (90, 100)), ('hello my old world', 'hello world', 'en', (50, 100)),
    ('its five', "It's 5.", 'en', (100 / 8, 50)), ('well known', 'well-known', 'en', (0, 0)),
    ('می شود', 'می\u200cشود.', 'fa', (0, 0)), ('图书馆在', '图书馆在哪', 'zh-cn', (20, None)),
    ('नमस्ते', 'नमस्ते।', 'hi', (0, 0))])
def test_errors_of_words_and_characters(heard, text, language, errors):
    found = _word_errors(heard, text, language)
    names = () if errors is None else ('cer', 'wer') if errors[1] is not None else ('cer',)
    assert found == {name: pytest.approx(value) for name, value in zip(names, errors or ())}

def test_whisper_hears_the_sound_itself(monkeypatch):
    class Whisper:   # in place of the package, whose models are too large for a test
        def __init__(self, model): assert model == 'small'
        def transcribe(self, audio, language, **_):
            if language == 'xx': raise ValueError('xx')
            wav = load_audio(audio, _RATE)
            said = 'hello world' if np.abs(wav).max() > .01 else 'Thank you.'
            return [SimpleNamespace(text=said, end=1.)], SimpleNamespace(duration=1., language=language)
    monkeypatch.setitem(sys.modules, 'faster_whisper', SimpleNamespace(WhisperModel=Whisper))
    judge = words_judge('small')
    assert judge(voice(), wanted(voice())) == {'cer': 0, 'wer': 0}
    assert judge(silence(), wanted(voice()))['wer'] == 100
    assert judge(voice(), wanted(voice(), language='xx')) == {}
    monkeypatch.setitem(sys.modules, 'faster_whisper', None)
    for model in (None, 'small'):
        with pytest.raises(UserError, match='transcribe'): words_judge(model)

def test_a_speaker_resembles_itself(singer, xtts):
    judge, low, high = speaker_judge(singer.xtts), voice(1.), voice(1., 230.)
    same, other = (judge(sound, wanted(low))['speaker'] for sound in (low, high))
    assert same == pytest.approx(1, abs=1e-5) and other < same
    assert judge(silence(), wanted(low)) == {'speaker': None}
    with pytest.raises(UserError, match='no speaker encoder'): speaker_judge(xtts)

def test_none_is_worst_and_quartiles_run_from_best_to_worst():
    assert spread('low', [5, 1, None, 3, 2]) == {'median': 3, 'low': 2, 'high': 5, 'clips': 5, 'missing': 1}
    assert spread('high', [5, 1, 3, 2, 4]) == {'median': 3, 'low': 4, 'high': 2, 'clips': 5, 'missing': 0}
    assert spread('low', []) == {'median': None, 'low': None, 'high': None, 'clips': 0, 'missing': 0}

@pytest.mark.parametrize('score, real, untrained, offered', [   # worse quartile, better quartile
    ('wer', 1, 2, True), ('wer', 2, 2, False), ('speaker', .8, .3, True), ('speaker', .3, .8, False),
    ('wer', 1, None, True), ('wer', None, None, False), ('duration', 0.9, 1.3, True),
    ('duration', 1., 1.05, False), ('mel', 11, 23, True), ('mel', 22, 23, False)])
def test_a_score_is_offered_if_it_separates_real_speech(score, real, untrained, offered):
    "From the untrained model; a recording is never compared with itself, and the figures stay."
    row = {'score': score, 'offered': None, 'fault': 'by another rule'}
    row |= {name: {'median': 0, 'low': 0, 'high': 0, 'clips': 3} for name in _MAIN_SOURCES}
    row['recording' if score in ('wer', 'speaker') else 'copy']['high'] = real
    row['untrained']['low'] = untrained
    found = judged(row)
    assert (found['offered'], bool(found['fault'])) == (offered, not offered) and found.keys() == row.keys()

CLIPS = [Clip(f'{language}-{text}-{speaker}', text, speaker, language, None)
         for language in ('en', 'de') for text in 'abcd' for speaker in ('x', 'y')]

def test_trials_are_held_out_and_their_references_are_not():
    held = {'en-a-x', 'en-b-y', 'de-c-x', 'de-d-y'}
    trials = _choose_trials(CLIPS, [*held, 'gone'], 9)
    assert {t.clip.id for t in trials} == held
    for clip, reference, other_voice, other_sentence in trials:
        assert reference.id not in held and other_sentence.id not in held and reference != other_sentence
        for c in (reference, other_sentence):
            assert (c.speaker, c.language) == (clip.speaker, clip.language) and c.text != clip.text
        assert (other_voice.text, other_voice.language) == (clip.text, clip.language)
        assert other_voice.speaker != clip.speaker
    unseen = [c.id for c in CLIPS if c.speaker == 'y']   # a voice that was never seen
    assert all(t.reference.speaker == 'y' and t.reference.text != t.clip.text
               for t in _choose_trials(CLIPS, unseen, 9))
    assert _choose_trials(CLIPS[:1]) == [Trial(CLIPS[0], CLIPS[0], None, None)]

@pytest.fixture(scope='module')
def evaluation(xtts, prepared):
    "Three clips of a model with random weights, which has no speaker encoder."
    return evaluate(xtts, prepared.folder, [c['id'] for c in prepared.clips][:3], 9)

def test_every_source_of_every_clip_is_scored(evaluation, prepared, corpus):
    assert _read_clips(prepared.folder) == _read_clips(corpus)
    assert evaluation.about == {'clips': 3, 'voices': 1, 'languages': 'en', 'vocoder': 'griffin-lim',
                                'held_out': True}
    mel, duration, cer, wer, speaker = evaluation.scores
    assert mel['recording']['median'] < 0.05 < mel['copy']['median'] and duration['recording']['median'] == 1
    assert [mel[name]['clips'] for name in SOUND_SOURCES] == [3] * 6
    for row, word in ((cer, 'Whisper'), (wer, 'Whisper'), (speaker, 'speaker encoder')):
        assert not row['offered'] and word in row['fault'] and 'recording' not in row
    assert json.loads(json.dumps(evaluation.to_dict()))['offered'] == evaluation.offered
    model, blank = (evaluation.sounds[name][0].wav for name in ('model', 'untrained'))
    assert len(model) != len(blank) or not np.allclose(model, blank)
    longest = max(prepared.samples[:3]) / 22050
    assert all(len(s.wav) / s.rate < 1.6 * longest for s in evaluation.sounds['untrained'])

def test_the_report_shows_each_score_and_each_clip(evaluation, tmp_path):
    scores = [evaluation.scores[0] | {'offered': True, 'fault': '',
                                      'untrained': evaluation.scores[0]['copy'] | {'median': 99.}},
              evaluation.scores[1] | {'offered': False, 'fault': 'it says nothing'}, evaluation.scores[2]]
    path = evaluation_report(evaluation._replace(scores=scores), tmp_path / 'new', most=2)
    text = path.read_text(encoding='utf-8')
    assert text.count('<audio') == 10 and text.count('<h3') == 2 and 'src="http' not in text
    assert text.count('<svg') == 1 and text.count('<circle') == 6 and text.count('class=off') == 2
    assert 'never saw' in text and 'not offered: it says nothing' in text
    for line in text.split('<table class="scores">')[1].split('</table>')[0].split('<tr')[2:]:
        cells = re.findall(r'<td(?: class=model)?(?: colspan="(\d)")?>', line)
        assert sum(int(wide or 1) for wide in cells) == 8
    assert json.loads((tmp_path / 'new' / 'scores.json').read_text())['clips'] == 3
    lines = scores_text(scores).splitlines()
    assert lines[-2].startswith('Not valid: duration') and 'Whisper' in lines[-1]
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'report.html').write_text('of somebody else')
    with pytest.raises(UserError, match='mine'): evaluation_report(evaluation, tmp_path / 'mine')

def test_the_model_card(evaluation, prepared):
    config = XTTSConfig.tiny().replace(training={'gpt': {'finetune': 'lora'}}, data={'batch_size': 7})
    run = {'base': '/models/a|b', 'held_out': ['a', 'b'], 'mix': 'x', 'mix_share': .25}
    text = model_card(evaluation, config, run, prepared, 1234)
    for line in ('language: ["en"]', f'| clips | {len(prepared)} |', '| held out, not trained on | 2 clips |',
                 '| began from | a\\|b |', '| trained | adapters next to the weights (LoRA) |',
                 '| updates | 1,234 of 7 clips |', '| older clips | 25% of the updates |'):
        assert f'{line}\n' in text, line
    plain = model_card(evaluation._replace(about=evaluation.about | {'held_out': False}), XTTSConfig.tiny())
    assert '(not used in training)' in text and '(perhaps used in training)' in plain
    assert not any(f'| {word}' in plain for word in ('hours', 'updates', 'held out', 'began', 'trained'))

def test_fixed_sentences(xtts, prepared, tmp_path, monkeypatch):
    "In the voices of the data in turn, without letters that the model never saw, scored without a melody."
    language, known = xtts.tokenizer.languages[0], [c['text'] for c in prepared.clips]
    monkeypatch.setattr(fixed_sentences, 'SENTENCES', {language: ['ЖЖЖ', *known]})
    spoken = {name: [voice().wav] * 2 for name in ('model', 'untrained')}   # how they speak is shown above
    monkeypatch.setattr(page, '_speak_sources', lambda *given: spoken)
    fixed = lambda clips: fixed_sentences.sentence_trials(xtts, [language], tmp_path, clips, each=3)
    found = evaluate(xtts, prepared.folder, fixed=fixed)
    assert [t.clip.text for t in found.trials] == known[:2]
    assert found.about['fixed'] and found.about['held_out'] and found.about['voices'] == 2
    assert [s['score'] for s in found.scores] == ['duration', 'end', 'cer', 'wer', 'speaker']
    assert found.scores[0]['recording']['median'] == 1
    assert '(of fixed sentences; the recording is espeak-ng' in model_card(found, xtts.config)
    fixed_sentences.SENTENCES[language] = ['ЖЖЖ']
    for names in ([language], ['tlh']):
        with pytest.raises(UserError, match='letters|"tlh"'):
            fixed_sentences.sentence_trials(xtts, names, tmp_path, CLIPS[:1])

def test_what_cannot_be_scored(xtts, evaluation):
    "A silent recording is refused, and a score without a clip says so; given speech is kept."
    spoken = {name: [evaluation.sounds[name][0].wav] for name in ('model', 'untrained')}
    sounds = source_sounds(xtts, evaluation.trials[:1], spoken=spoken)
    assert all(sounds[name][0].wav is wav for name, (wav,) in spoken.items())
    with pytest.raises(UserError, match='is silent'):
        score_sounds(evaluation.sounds | {'recording': [silence()] * 3}, evaluation.trials)
    (row,) = score_sounds(evaluation.sounds, evaluation.trials,
                          judges={('wer',): lambda: lambda spoken, wanted: {}})
    assert row['fault'] == 'no clip of a language that it knows' and not row['offered']
