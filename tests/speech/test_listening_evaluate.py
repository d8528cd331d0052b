"Speech that runs free in a validation, and what it decides."
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.speech import evaluate as listening
from xtts_nb.speech.generate import Sampling
from xtts_nb.train import runs
from xtts_nb.train.finetune import make_update
from xtts_nb.data.audio import load_audio
from xtts_nb.config import UserError
from xtts_nb.data.native import BatchPlan
from xtts_nb.speech.evaluate import Listener, plot_spoken, spoken_distance, words_heard
from xtts_nb.models.xtts import XTTS
from xtts_nb.train.runs import export_run, new_run, resume_run
from xtts_nb.train.trainer import Trainer


@pytest.fixture(scope='module')
def quick(small):
    return small.replace(model={'gpt': {'layers': 1, 'conditioning_layers': 1}}, data={'buckets': 1},
                         training={'steps': 6, 'log_every': 2, 'checkpoint_every': 2, 'validate_every': 2,
                                   'listen_clips': 2,
                                   'mode': 'graph'})

@pytest.fixture(scope='module')
def heard_by(quick, prepared, dvae):
    "Seed -> who hears a model with these weights, op by op."
    def of(seed):
        keras.utils.set_random_seed(seed)
        return Listener(XTTS(quick, prepared.tokenizer, dvae), prepared, np.array([0, 5, 9]), 2)
    return of

@pytest.fixture(scope='module')
def listener(heard_by): return heard_by(0)

class Cheap(Trainer):
    "A trainer whose step does nothing."
    def custom_train_step(self, batch, number): return {'loss': tf.reduce_sum(batch['weight'])}

def test_it_hears_the_same_twice_and_keeps_sound_and_picture(listener, prepared, tmp_path):
    scores = listener(tmp_path / 'spoken')
    assert scores == listener() and scores['dtw'] > 0 and scores['length'] > 0
    ids = {prepared.clips[0]['id'], prepared.clips[9]['id']}
    assert set(listener.ids) == ids
    assert {p.name for p in (tmp_path / 'spoken').iterdir()} == {f'{i}.wav' for i in ids} | {'mels.png'}
    assert len(load_audio(tmp_path / 'spoken' / f'{listener.ids[0]}.wav')) > 0

def test_another_judge_gets_the_sounds(quick, prepared, dvae, tmp_path):
    given = []
    def judge(spoken, recorded, rate):
        given.append((spoken, recorded, rate))
        return {'mcd': 7. + len(given)}
    listener = Listener(XTTS(quick, prepared.tokenizer, dvae), prepared, np.array([0, 5, 9]), 2, judge=judge)
    scores = listener(tmp_path)
    assert [*scores] == ['dtw', 'words', 'length', 'mcd'] and listener()['mcd'] == 9. and scores['mcd'] == 8.
    (spoken, recorded, rate), (again, same, _) = given
    assert rate == quick.model.audio.sample_rate and recorded is same
    for wav, kept, once_more in zip(spoken, listener.ids, again, strict=True):
        scaled = wav / max(1, np.abs(wav).max())   # as `save_audio` does
        assert np.abs(scaled - load_audio(tmp_path / f'{kept}.wav')).max() < 1e-4
        assert np.array_equal(wav, once_more)
    frames = [len(mel) for mel in listener.recorded]
    length = [len(wav) / quick.model.audio.hop_length for wav in recorded]
    assert length == pytest.approx(frames, abs=1)

def test_the_recording_itself_is_at_zero_however_loud(listener):
    assert spoken_distance([mel + 2 for mel in listener.recorded], listener.recorded) < 0.05
    assert spoken_distance([mel[::-1] for mel in listener.recorded], listener.recorded) > 0.1

def test_rows_of_codes_become_mels(listener):
    "What is no code is the first one, and a row of none is one code long."
    gpt, decode = listener.xtts.gpt, listener.xtts.dvae.decode
    codes = tf.constant([[31, gpt.code_start, 3], [gpt.code_stop] * 3])
    mels = listener._mels(codes, tf.constant([3, 0]))
    for mel, wanted in zip(mels, ([31, 0, 3], [0])):
        assert np.allclose(mel, decode(tf.constant([wanted]))[0], atol=1e-5)

def test_scores_of_what_was_spoken(listener, monkeypatch):
    codes, length = listener.batch['codes'], listener.batch['code_length'] // 3
    monkeypatch.setattr(listener, '_speak', lambda *given: (codes, length, None))
    spoken = listener._mels(codes, length)
    share = length.numpy().sum() / listener.batch['code_length'].numpy().sum()
    assert listener() == {'dtw': round(spoken_distance(spoken, listener.recorded), 4),
                          'words': round(words_heard(spoken, listener.recorded), 4),
                          'length': round(float(share), 4)}
    for score in (spoken_distance, words_heard):
        with pytest.raises(ValueError): score(spoken, listener.recorded[:1])

def test_words_are_heard_in_any_voice(listener):
    "Not in a hum, in silence, nor in what was recorded played backwards."
    mels = listener.recorded
    rng = np.random.default_rng(0)
    walk = [np.cumsum(rng.normal(0, 1, (90 + 20 * k, 80)), 0).astype(np.float32) for k in range(2)]
    assert words_heard(walk, walk) > .95 and words_heard([m + np.arange(80) for m in walk], walk) > .95
    assert words_heard([m[::-1] for m in walk], walk) < -20
    assert words_heard([np.ones((9, 80))] * 2, walk) == pytest.approx(0, abs=5e-3)
    assert words_heard(walk[1:] + walk[:1], walk) < .2
    assert words_heard([np.ones((9, 80))] * 2, [np.zeros((5, 80))] * 2) == 0
    assert words_heard(mels, mels) > 0 > words_heard([m[::-1] for m in mels], mels)

@pytest.mark.parametrize('places', [48, 20])
def test_a_clip_may_take_half_as_long_again(quick, prepared, dvae, monkeypatch, places):
    "Not longer than the model has places; with the settings of `speech`, of the clips that there are."
    calls, spoken = [], (tf.zeros((3, 4), tf.int32), tf.ones(3, tf.int32), 0)
    monkeypatch.setattr(listening, 'generate',
                        lambda *given, **named: calls.append((*given[4:], named)) or spoken)
    config = quick.replace(model={'gpt': {'max_audio_codes': places}},
                           speech={'temperature': 0.5, 'top_k': 9})
    listener = Listener(XTTS(config, prepared.tokenizer, dvae), prepared, np.array([0, 5, 9]), 7)
    listener()
    s, width = config.speech, listener.batch['codes'].shape[1]
    assert calls == [(min(places, int(1.5 * width) + 1),
                      Sampling(0.5, 9, s.top_p, s.repetition_penalty)._asdict())]
    assert len(listener.ids) == 3 and width < 30   # the longest of them

def test_a_picture_has_a_column_a_clip(tmp_path):
    for n in (1, 2):
        plot_spoken(tmp_path / 'new' / f'{n}.png', ['a', 'b'][:n], [np.ones((9, 80))] * n,
                    [np.ones((5, 80))] * n)
        data = (tmp_path / 'new' / f'{n}.png').read_bytes()
        assert [int.from_bytes(data[i:i + 4], 'big') for i in (16, 20)] == [180 * n, 180]

@pytest.mark.slow
def test_another_model_is_heard(listener, heard_by):
    other = heard_by(5)
    assert other.ids == listener.ids and other() != listener()

def logged_scores(run) -> list[tuple]:
    lines = [json.loads(l) for l in (run / 'metrics.jsonl').read_text().splitlines()]
    return [(l['step'], l['val_loss'], l['val_dtw'], l['val_length']) for l in lines if 'val_dtw' in l]

@pytest.mark.slow
def test_a_run_listens_and_goes_on_to_the_same_numbers(prepared, quick, tmp_path):
    new_run(prepared, quick, tmp_path / 'whole', ['low-0', 'high-0']).fit()
    assert [step for step, *_ in logged_scores(tmp_path / 'whole')] == [2, 4, 6]
    spoken = sorted(p.name for p in (tmp_path / 'whole' / 'spoken').iterdir())
    assert spoken == ['000000002', '000000004', '000000006']
    new_run(prepared, quick, tmp_path / 'run', ['low-0', 'high-0']).fit(steps=4)
    resume_run(tmp_path / 'run').fit()
    assert logged_scores(tmp_path / 'run') == logged_scores(tmp_path / 'whole')

@pytest.mark.parametrize('judge, best, steps', [('loss', 6, 6), ('dtw', 2, 4)])
def test_either_score_decides(prepared, quick, tmp_path, monkeypatch, judge, best, steps):
    "The loss falls while speech becomes worse: one judge goes on, the other has seen enough at once."
    looked = {2: {'val_loss': 3., 'val_dtw': 1.}, 4: {'val_loss': 2., 'val_dtw': 2.},
              6: {'val_loss': 1., 'val_dtw': 3.}}
    monkeypatch.setattr(runs, 'Trainer', Cheap)
    run = new_run(prepared, quick.replace(training={'judge_by': judge, 'patience': 1}), tmp_path / 'run',
                  ['low-0', 'high-0'])
    monkeypatch.setattr(run, 'validate', lambda: looked[run.step])
    assert run.fit()['steps'] == steps and run.best == {'step': best, **looked[best]}

def test_listening_without_held_out_clips_is_refused(prepared, quick, tmp_path):
    with pytest.raises(UserError, match='listen_clips.*hold clips out'):
        new_run(prepared, quick, tmp_path / 'a')
    with pytest.raises(UserError, match='listen_clips.*validate_every'):
        new_run(prepared, quick.replace(training={'validate_every': 0}), tmp_path / 'b', ['low-0'])


# --- the model as trained -----------------------------------------------------------------------------------

def adapted(prepared, quick, dvae, kind, folder, **training) -> Trainer:
    "A trainer of a model that speaks, `kind` of which is trained at a high rate."
    config = quick.replace(training={'finetune': kind, 'learning_rate': 0.3, 'warmup_steps': 0,
                                     'schedule': 'constant', 'steps': 2, 'lora_alpha': 64.,
                                     'mode': 'eager'} | training)   # two updates: no trace
    keras.utils.set_random_seed(0)
    xtts = XTTS(config, prepared.tokenizer, dvae)
    for name, v in xtts.weights.items():   # zeros at first: neither text nor voice would matter
        if name.endswith('project/kernel'): v.assign(keras.random.normal(v.shape, stddev=0.3))
    clips, held = np.arange(4, len(prepared)), np.array([0, 1, 2, 3])
    data = config.data.model_copy(update={'buckets': 1})
    update = make_update(xtts.gpt, config.training, [(5, 48)])
    return Trainer(xtts, BatchPlan(prepared, data, clips), folder,
                   BatchPlan(prepared, data, held, fixed=True), update,
                   listen=Listener(xtts, prepared, held, 3))

@pytest.mark.slow
@pytest.mark.parametrize('kind, ema', [('lora', 0.5), ('lora', 0.), ('rows', 0.), ('whole', 0.5)])
def test_a_validation_hears_the_model_that_is_exported(prepared, quick, dvae, tmp_path, kind, ema):
    run = adapted(prepared, quick, dvae, kind, tmp_path / 'run', ema=ema)
    begun = run.validate()
    run.fit()
    scores = logged_scores(tmp_path / 'run')
    export_run(tmp_path / 'run', tmp_path / 'model')
    exported = Listener(XTTS.load(tmp_path / 'model'), prepared, np.array([0, 1, 2, 3]), 3)()
    assert scores[-1][2:] == (exported['dtw'], exported['length']) != (begun['val_dtw'], begun['val_length'])

def test_the_model_as_trained_is_shown_and_taken_back(prepared, quick, dvae, tmp_path):
    "Once inside another, after an error, and with functions that were traced before."
    run = adapted(prepared, quick, dvae, 'lora', None, ema=0.5)
    run.fit(2)
    kernel = run.update.parts[0].weight
    read = tf.function(lambda: tf.identity(kernel.value))
    before = read().numpy()
    with run.as_trained():
        trained = read().numpy()
        with run.as_trained(): assert np.array_equal(read(), trained)
        assert np.array_equal(read(), trained) and not np.array_equal(trained, before)
    with pytest.raises(KeyError), run.as_trained(): raise KeyError
    assert np.array_equal(read(), before)
