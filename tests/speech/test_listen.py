"What `words_heard` answers, and a run that listens to its model."
import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb.data.native import BatchPlan
from xtts_nb.models.xtts import XTTS
from xtts_nb.speech.listen import Listener, _spoken_distance, words_heard
from xtts_nb.train import runs
from xtts_nb.train.begin import begin
from xtts_nb.train.finetune import make_update
from xtts_nb.train.runs import export_run, new_run
from xtts_nb.train.trainer import Trainer

def clip(frames, seed, bins=80):
    "A smooth random walk: frames that resemble their neighbours, as in speech."
    return np.random.default_rng(seed).normal(size=(frames, bins)).cumsum(0).astype(np.float32)

@pytest.fixture(scope='module')
def quick(small):
    return small.replace(model={'gpt': {'num_layers': 1, 'conditioning_layers': 1}}, data={'buckets': 1},
                         training={'gpt': {'steps': 6, 'log_every': 2, 'checkpoint_every': 2,
                                           'validate_every': 2,
                                   'eval_clips': 2, 'mode': 'graph'}})

@pytest.fixture(scope='module')
def listener(quick, prepared, dvae):
    keras.utils.set_random_seed(0)
    return Listener(XTTS(quick, prepared.tokenizer, dvae), prepared, np.array([0, 5, 9]), 2)

def test_words_are_heard_in_any_voice(listener):
    "Not in silence, nor in what was recorded played backwards."
    mels = listener.recorded
    walk = [clip(90 + 20 * k, k) for k in range(2)]
    assert words_heard([m + np.arange(80) for m in walk], walk) > .95
    assert words_heard([m[::-1] for m in walk], walk) < -20
    assert words_heard([np.ones((9, 80))] * 2, [np.zeros((5, 80))] * 2) == 0
    assert words_heard(mels, mels) > 0 > words_heard([m[::-1] for m in mels], mels)
    for score in (_spoken_distance, words_heard):
        with pytest.raises(ValueError): score(mels, mels[:1])

def logged_scores(run) -> list[tuple]:
    lines = [json.loads(l) for l in (run / 'metrics.jsonl').read_text().splitlines()]
    return [(l['step'], l['val_loss'], l['val_dtw'], l['val_length']) for l in lines if 'val_dtw' in l]

@pytest.mark.slow
def test_a_run_listens_and_resumes_to_the_same_numbers(prepared, quick, tmp_path):
    few = quick.replace(training={'gpt': {'steps': 4}})
    new_run(prepared, few, tmp_path / 'whole', ['low-0', 'high-0']).fit()
    assert [step for step, *_ in logged_scores(tmp_path / 'whole')] == [2, 4]
    new_run(prepared, few, tmp_path / 'run', ['low-0', 'high-0']).fit(steps=2)
    begin(run=tmp_path / 'run').fit()
    assert logged_scores(tmp_path / 'run') == logged_scores(tmp_path / 'whole')

@pytest.mark.parametrize('judge, best, steps', [('loss', 6, 6), ('dtw', 2, 4)])
def test_either_score_decides(prepared, quick, tmp_path, monkeypatch, judge, best, steps):
    "The loss falls while speech becomes worse: one judge continues, the other has seen enough at once."
    class Cheap(Trainer):
        def custom_train_step(self, batch, number): return {'loss': tf.reduce_sum(batch['weight'])}
    looked = {2: {'val_loss': 3., 'val_dtw': 1.}, 4: {'val_loss': 2., 'val_dtw': 2.},
              6: {'val_loss': 1., 'val_dtw': 3.}}
    monkeypatch.setattr(runs, 'Trainer', Cheap)
    run = new_run(prepared, quick.replace(training={'gpt': {'judge_by': judge, 'patience': 1}}),
                  tmp_path / 'run', ['low-0', 'high-0'])
    monkeypatch.setattr(run, 'validate', lambda: looked[run.step])
    assert run.fit()['steps'] == steps and run.best == {'step': best, **looked[best]}

def adapted(prepared, quick, dvae, kind, folder, **training) -> Trainer:
    "A trainer of a model that speaks, `kind` of which is trained at a high rate."
    config = quick.replace(training={'gpt': {'finetune': kind, 'learning_rate': 0.3, 'warmup_steps': 0,
                                             'schedule': 'constant', 'steps': 2, 'lora_alpha': 64.,
                                             'mode': 'eager'} | training})   # two updates: no trace
    keras.utils.set_random_seed(0)
    xtts = XTTS(config, prepared.tokenizer, dvae)
    for name, v in xtts.weights.items():   # zeros at first: neither text nor voice would matter
        if name.endswith('project/kernel'): v.assign(keras.random.normal(v.shape, stddev=0.3))
    clips, held = np.arange(4, len(prepared)), np.array([0, 1, 2, 3])
    data = config.data.model_copy(update={'buckets': 1})
    update = make_update(xtts.gpt, config.training.gpt, [(5, 48)])
    fixed = BatchPlan(prepared, data, held, fixed=True)
    return Trainer(xtts, BatchPlan(prepared, data, clips), folder, fixed, update,
                   listener=Listener(xtts, prepared, held, 3))

@pytest.mark.slow
@pytest.mark.parametrize('kind, ema', [('lora', 0.5), ('rows', 0.), ('whole', 0.5)])
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
