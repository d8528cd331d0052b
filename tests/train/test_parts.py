"The DVAE and the decoder, trained by the loop of the GPT: they learn, and they resume to the bit."
import json
import shutil
import signal
import subprocess
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from process import main, reached, started, xtts_nb
from xtts_nb.train import parts as voices
from xtts_nb.data.audio import load_audio, log_mel, resample, resample_batch, speaker_log_mel
from xtts_nb.data.cache import Cache
from xtts_nb.app.cli_train import _voice_settings
from xtts_nb.config import AudioConfig, UserError, VoiceConfig, XTTSConfig
from xtts_nb.models.hifigan import adversarial_loss, critic_loss, feature_loss, HiFiGAN, SpeakerEncoder
from xtts_nb.models.dvae import DVAE, dvae_losses, load_dvae
from xtts_nb.files import write_json
from xtts_nb.models.xtts import XTTS
from xtts_nb.data.prepare import prepare
from xtts_nb.train.runs import COMMANDS, new_run, resume_run
from xtts_nb.speech.generate import Speaker
from xtts_nb.data.text import train_tokenizer
from xtts_nb.train.parts import (
    DVAE_ALWAYS, VOICE_ALWAYS, Crops, DVAEUpdate, SavedDVAE, SavedVoice, VoiceUpdate, Windows, _check_same,
    _fill_audio, _is_made, _limits, _other, _trained_as, cache_of, dvae_trainer, dvae_training, make_bank,
    mel_distance, new_dvae_run, new_voice_run, train_dvae, voice_training)

LOSSES = ('loss', 'mel_loss', 'commitment', 'speaker_loss', 'adversarial_loss', 'feature_loss', 'critic_loss',
          'val_loss')


def lines_of(run) -> list[dict]:
    "Its metrics, without what the clock says."
    lines = [json.loads(l) for l in (run / 'metrics.jsonl').read_text().splitlines()]
    return [{k: v for k, v in line.items() if k in LOSSES or k == 'step'} for line in lines]

class Killed(BaseException): "What nobody catches."

def kill_at(trainer, update):
    "Train until just before an update, and fall over."
    step, calls = trainer.train_step, []
    def bomb(*arguments):
        calls.append(1)
        if len(calls) == update: raise Killed
        return step(*arguments)
    trainer.train_step = bomb
    with pytest.raises(Killed): trainer.fit()
    trainer.writer.wait()   # what was being written is there

def same(a, b): return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


# --- the DVAE -------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def mels():
    return np.repeat(np.random.default_rng(0).normal(size=(40, 80)).astype(np.float32).cumsum(0), 4, 0)

def settings(small, **training):
    "Op by op: cheaper than a trace."
    return small.replace(training={'dvae_steps': 6, 'dvae_batch_size': 4, 'dvae_learning_rate': 2e-3,
                                   'log_every': 1,
                                   'mode': 'eager'} | training)

def losses(mels, config) -> list[float]:
    seen = []
    train_dvae(mels, config, lambda done, total, line: seen.append(line['mel_loss']))
    return seen

@pytest.fixture(scope='module')
def learned(small, mels): return losses(mels, settings(small))

def test_a_dvae_repeats_itself_whenever_it_is_logged(small, mels, learned):
    assert len(set(learned)) == 6
    means = [np.mean(learned[:3]), np.mean(learned[3:])]
    assert losses(mels, settings(small, log_every=3)) == pytest.approx(means, rel=1e-5)

@pytest.mark.slow
def test_every_setting_of_the_dvae_matters(small, mels):
    t = dvae_training(settings(small, dvae_steps=20, dvae_learning_rate=1e-3))
    assert (t.steps, t.learning_rate, t.log_every) == (20, 1e-3, 1)
    crops = Crops(mels, settings(small, dvae_batch_size=2))
    assert next(iter(crops.stream()))['mel'].shape == (2, 64, 80)
    starts = [Crops(mels, settings(small, seed=s)).starts(tf.constant(0, tf.int64)).numpy().tolist()
              for s in (0, 0, 1)]
    assert starts[0] == starts[1] != starts[2]

@pytest.mark.slow
def test_xla_changes_the_speed_only(small, mels, learned):
    assert np.allclose(losses(mels, settings(small, mode='auto')), learned, rtol=1e-2)

@pytest.mark.parametrize('frames, starts, epoch',
                         [(1, {0}, 1), (63, {0}, 1), (64, {0}, 1), (65, {0}, 1), (67, {0, 1, 2}, 1),
                                                   (2 * 256 - 1, None, 1), (2 * 256, None, 2)])
def test_crops_lie_in_the_pool(small, frames, starts, epoch):
    "Batches of four crops of 64 frames; in a shorter pool the last frame is repeated."
    mels, found = np.random.default_rng(0).normal(size=(frames, 80)).astype(np.float32), set()
    crops = Crops(mels, settings(small))
    for step, batch in enumerate(crops.stream(0, 12)):
        begin = crops.starts(tf.constant(step, tf.int64)).numpy()
        found |= {*begin.tolist()}
        assert np.array_equal(batch['mel'], mels[np.minimum(begin[:, None] + np.arange(64), frames - 1)])
        assert crops.names(step) == [f'mels {s} to {s + 64}' for s in begin]
    assert found == starts or starts is None and len(found) > 30 and max(found) > 300
    assert crops.steps_per_epoch == epoch
    assert np.array_equal(next(iter(crops.stream()))['mel'], crops(tf.constant(0, tf.int64))['mel'])

def test_the_losses_of_a_dvae(small):
    config, mel = settings(small), tf.random.normal((2, 16, 80))
    update = DVAEUpdate(DVAE(config), dvae_training(config))
    before, found = dvae_losses(update.model, mel), update({'mel': mel}, tf.constant(0))
    parts = {name: float(before[name]) for name in ('mel_loss', 'commitment')}
    assert float(found['loss']) == pytest.approx(parts['mel_loss'] + parts['commitment'] / 4, rel=1e-5)
    assert {name: float(found[name]) for name in parts} == pytest.approx(parts, rel=1e-5)
    after = dvae_losses(update.model, mel)['mel_loss']
    means = update.means(update.evaluate({'mel': mel}))
    assert means.keys() == {'loss'} and float(means['loss']) == pytest.approx(float(after))
    assert update.means({'loss': 6., 'more': 3., 'count': 3.}) == {'loss': 2., 'more': 1.}

@pytest.mark.parametrize('share, every, learned, held',
                         [(0.25, 4, 120, 40), (0., 4, 160, 0), (0.25, 0, 120, 0)])
def test_the_last_frames_are_held_out(small, mels, share, every, learned, held):
    trainer = dvae_trainer(mels, settings(small, validate_every=every), None, share)
    assert np.array_equal(trainer.plan.pool, mels[:learned])
    assert np.array_equal(trainer.held_out.pool, mels[-held:]) if held else trainer.held_out is None

def test_the_weights_that_are_given_are_saved(small, dvae, tmp_path):
    saved, seen = SavedDVAE(small, dvae), []
    for folder, more in (('own', 0), ('given', 1)):
        given = {k: v.numpy() + 1 for k, v in saved.weights.items()}
        saved.save(tmp_path / folder, given if more else None)
        kept = load_dvae(tmp_path / folder / 'dvae.safetensors', small)
        assert all(np.array_equal(a, b + more) for a, b in zip(kept.variables, dvae.variables))
    keep = lambda folder, weights: seen.append(weights)
    voice = SavedVoice(SimpleNamespace(config=small, weights={'gpt/a': 1}, save=keep), {})
    voice.save(tmp_path)
    voice.save(tmp_path, {'b': 2})
    assert seen == [{'gpt/a': 1}, {'b': 2}]

def test_a_broken_batch_changes_neither_weights_nor_codebook(small):
    keras.utils.set_random_seed(0)
    config = settings(small)
    update = DVAEUpdate(DVAE(config), dvae_training(config))
    before = {name: v.numpy() for name, v in update.state.items()}
    found = update({'mel': tf.fill((2, 16, 80), np.nan)}, tf.constant(0))
    assert found['skipped'] == found['bad'] == 1
    assert same(before, {name: v.numpy() for name, v in update.state.items()})
    assert update({'mel': tf.random.normal((2, 16, 80))}, tf.constant(1))['skipped'] == 0
    assert not same(before, {name: v.numpy() for name, v in update.state.items()})

def test_a_killed_dvae_goes_on_to_the_bit(small, mels, tmp_path):
    config = settings(small, checkpoint_every=2, validate_every=2)
    whole = new_dvae_run(tmp_path / 'whole', config, lambda: mels, 0.25)
    whole.fit()
    kill_at(new_dvae_run(tmp_path / 'run', config, lambda: mels, 0.25), 4)
    again = new_dvae_run(tmp_path / 'run')
    assert again.step == 2
    again.fit()
    assert same(whole.state, again.state) and lines_of(tmp_path / 'run') == lines_of(tmp_path / 'whole')
    assert [l['step'] for l in lines_of(tmp_path / 'run') if 'val_loss' in l] == [2, 4, 6]
    kept = load_dvae(tmp_path / 'run' / 'dvae.safetensors', config)
    assert all(np.array_equal(a, b) for a, b in zip(kept.variables, whole.update.model.variables))
    assert (tmp_path / 'run' / 'best' / 'dvae.safetensors').is_file()

def test_a_run_of_another_part_is_refused(small, prepared, mels, tmp_path):
    new_dvae_run(tmp_path / 'dvae', settings(small), lambda: mels)
    assert json.loads((tmp_path / 'dvae' / 'run.json').read_text()) == {'part': 'dvae', 'held_out': 0.}
    with pytest.raises(UserError, match='dvae: is a run of xtts-nb train-dvae; go on with'):
        resume_run(tmp_path / 'dvae')
    with pytest.raises(UserError, match='dvae: is a run of xtts-nb train-dvae'):
        new_run(prepared, small, tmp_path / 'dvae')
    with pytest.raises(UserError, match='dvae: is a run of xtts-nb train-dvae'):
        new_voice_run(tmp_path / 'dvae')
    for part, begin in (('dvae', new_dvae_run), ('voice', new_voice_run)):
        with pytest.raises(UserError, match=f'holds no run; begin one with xtts-nb {COMMANDS[part]}'):
            begin(tmp_path / 'nowhere')


# --- the decoder ----------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def tiny(small):
    return small.replace(
        model={'gpt': {'layers': 1, 'conditioning_layers': 1},
               'decoder': {'channels': 16, 'residual_kernels': [3], 'dilations': [1, 3]},
               'speaker': {'filters': [8, 8], 'blocks': [1, 1], 'width': 8}},
        voice={'steps': 8, 'batch_size': 2, 'window': 4, 'periods': [2], 'windows': [256], 'channels': 2,
               'reference_seconds': 0.5},
        training={'log_every': 2, 'checkpoint_every': 4, 'mode': 'eager'})

@pytest.fixture(scope='module')
def model(tiny, prepared, dvae, tmp_path_factory):
    "The folder of a model without a decoder."
    keras.utils.set_random_seed(0)
    folder = tmp_path_factory.mktemp('model') / 'model'
    XTTS(tiny, prepared.tokenizer, dvae).save(folder)
    return folder

@pytest.fixture(scope='module')
def bank(model, prepared, tmp_path_factory):
    "Made by a graph, unlike those of single tests."
    xtts = XTTS.load(model)
    xtts.config = xtts.config.replace(training={'mode': 'auto'})
    return make_bank(xtts, prepared, tmp_path_factory.mktemp('bank') / 'bank')

def test_a_bank_holds_states_and_recordings(bank, model, prepared):
    xtts, i = XTTS.load(model), 3
    n, first = prepared.codes_length[i], bank.start['states'][i]
    assert bank.ids == [c['id'] for c in prepared.clips]
    assert bank.length['states'].tolist() == prepared.codes_length.tolist()
    batch = next(b for b in _epoch(prepared, xtts.config) if i in b['clip'].numpy()[b['weight'].numpy() > 0])
    row = batch['clip'].numpy().tolist().index(i)
    states = xtts.gpt.states(*(batch[k] for k in ('text', 'text_length', 'codes', 'code_length')),
                             xtts.gpt.conditioning(batch['reference']))[1]
    assert np.allclose(bank.states[first:first + n], states[row, :n], atol=2e-2)
    samples = np.array(prepared.samples, int)
    assert bank.length['wav'].tolist() == (samples * 24000 // 22050).tolist()
    assert bank.length['voice'].tolist() == [1 + n * 16000 // 22050 // 160 for n in samples]
    wav, mel = heard(prepared, i, xtts.config)
    assert np.array_equal(part(bank, 'wav', i), wav[:bank.length['wav'][i]])
    assert np.allclose(part(bank, 'voice', i), mel[:bank.length['voice'][i]], atol=0.01)

def part(bank, name, clip): return getattr(bank, name)[bank.start[name][clip]:][:bank.length[name][clip]]

def heard(cache, clip, config) -> tuple:
    "Samples and speaker mel of a clip, as a bank keeps them."
    wav, speaker = load_audio(cache.wav_path(clip), 24000), config.model.speaker
    return np.round(wav * 32767), speaker_log_mel(resample(wav, 24000, 16000), speaker).numpy()

def test_what_rounding_leaves_out_is_held(prepared, tiny):
    "The lengths of a bank follow from the table of clips; a shorter recording repeats its end."
    wav, mel = heard(prepared, 3, tiny)
    (n, frames), done = (len(wav), len(mel)), []
    out = [np.zeros(n + 5, np.int16), np.zeros((frames + 3, 64), np.float32)]
    _fill_audio(tiny, prepared, np.array([3]), None, out, np.array([[n + 3], [frames + 3]]), done.append)
    assert np.array_equal(out[0], np.r_[wav, [wav[-1]] * 3, 0, 0]) and done == [1]
    assert np.array_equal(out[1], np.r_[mel, mel[[-1] * 3]])

def has_states(bank) -> list[bool]:
    "Of each clip, whether every code has a state."
    return [bool(bank.states[first:first + n].any(-1).all())
            for first, n in zip(bank.start['states'], bank.length['states'])]

@pytest.mark.parametrize('balance', ['balance_speakers', 'balance_languages'])
def test_balance_leaves_no_clip_without_states(model, prepared, bank, balance, tmp_path):
    "Balanced batches draw clips with replacement; the bank still holds the states of every clip."
    xtts = XTTS.load(model)
    xtts.config = xtts.config.replace(data={balance: True, 'batch_size': 2})
    made = make_bank(xtts, prepared, tmp_path / 'bank')
    assert all(has_states(made)) and made.ids == bank.ids

def test_limits_leave_clips_out_of_a_bank(model, prepared, bank, tmp_path):
    xtts = XTTS.load(model)
    xtts.config, calls = xtts.config.replace(data={'max_seconds': 0.9}), []
    made = make_bank(xtts, prepared, tmp_path / 'bank', progress=lambda *done: calls.append(done))
    n = len(made)
    assert calls[-n:] == [(n + i, 2 * n) for i in range(1, n + 1)] and [*calls[:-n]] == sorted(calls[:-n])
    assert calls[-n - 1] == (n, 2 * n)
    short = [i for i, clip in enumerate(prepared.clips) if clip['seconds'] <= 0.9]
    assert 0 < len(short) < len(prepared) and made.ids == [prepared.clips[i]['id'] for i in short]
    assert all(has_states(made))
    for place, i in enumerate(short):
        for name in ('wav', 'voice'):
            assert np.array_equal(part(made, name, place), part(bank, name, i))
    xtts.config = xtts.config.replace(data={'max_seconds': 0.55})
    with pytest.raises(UserError, match='14 of 14 clips are left out: 14 longer than data.max_seconds 0.55'):
        make_bank(xtts, prepared, tmp_path / 'none')

def _epoch(cache, config):
    from xtts_nb.data.native import BatchPlan
    plan = BatchPlan(cache, config.data)
    return plan.stream(0, plan.steps_per_epoch)

@pytest.mark.parametrize('window, frames', [(4, 17), (40, 174)])   # no clip has 40 codes
def test_windows_lie_where_their_codes_lie(bank, tiny, window, frames):
    "State and sound of a window begin at the same moment, and the voice is another clip's."
    plan = Windows(bank, tiny.replace(voice={'window': window}))
    assert plan.samples == frames * 256
    assert plan.steps_per_epoch == bank.length['states'].sum() // (2 * window)
    first = plan(tf.constant(0, tf.int64))
    assert all(np.array_equal(x, first[k]) for k, x in next(iter(plan.stream())).items())
    for step, batch in enumerate(plan.stream(0, 3)):
        picked = [x.numpy() for x in plan.pick(tf.constant(step, tf.int64))]
        assert plan.names(step) == [bank.ids[plan.clips[r]] for r in picked[0]]
        for b, (row, start, other, turn) in enumerate(zip(*picked)):
            clip, begin = plan.clips[row], round(start * 1024 * 24000 / 22050)
            states, wav = part(bank, 'states', clip), part(bank, 'wav', clip)
            voice = part(bank, 'voice', plan.clips[other])
            assert np.array_equal(batch['wav'][b], np.pad(wav, (0, plan.samples))[begin:begin + plan.samples])
            assert np.array_equal(batch['states'][b],
                                  states[np.minimum(start + np.arange(window), len(states) - 1)])
            assert np.array_equal(batch['voice'][b], voice[(turn + np.arange(50)) % len(voice)])   # 0.5 s
            assert row != other and bank.speaker[plan.clips[other]] == bank.speaker[clip]
            assert (window < 40 or start == 0)

def picked(bank, config, clips=None) -> tuple:
    "The plan, and 4000 rows, starts, rows of references and their beginnings."
    plan = Windows(bank, config.replace(voice={'batch_size': 4000}), clips)
    return plan, *(x.numpy() for x in plan.pick(tf.constant(0, tf.int64)))

def test_every_place_is_as_likely(bank, tiny):
    plan, rows, starts, others, turns = picked(bank, tiny)
    places = bank.length['states'][plan.clips] - 4 + 1
    for row, n in enumerate(places):
        drawn = np.bincount(starts[rows == row], minlength=n) / 4000 * places.sum()
        assert len(drawn) == n and drawn.min() > 0.1 and drawn.max() < 2.5
        group = range(row // 7 * 7, row // 7 * 7 + 7)
        assert {*others[rows == row]} == {*group} - {row}
    whole = turns / bank.length['voice'][plan.clips[others]]
    assert whole.min() < 0.01 and 0.98 < whole.max() < 1 and abs(np.corrcoef(others % 7, whole)[0, 1]) < 0.1
    assert plan.steps_per_epoch == 1

def test_the_reference_is_another_clip_where_there_is_one(bank, tiny):
    _, rows, _, others, _ = picked(bank, tiny, np.array([0, 1, 7]))   # the last is alone with its speaker
    assert {*zip(rows, others)} == {(0, 1), (1, 0), (2, 2)}
    of_three = [[int(_other(row, 5, 3, draw)) for draw in (0, 1)] for row in (5, 6, 7)]
    assert of_three == [[6, 7], [5, 7], [5, 6]] and int(_other(5, 5, 1, 0)) == 5


def test_speakers_are_drawn_as_often_where_that_is_asked(bank, tiny):
    def share(balance) -> float:
        plan, rows, *_ = picked(bank, tiny.replace(data={'balance_speakers': balance}),
                                np.arange(6, 14))   # 1 and 7
        return np.mean(bank.speaker[plan.clips[rows]] == bank.speaker[6])
    assert share(True) == pytest.approx(0.5, abs=0.03) and share(False) < 0.25

def first_update(bank, config, learning=True, number=0, batch=None):
    "The update after its first call, and what it returned."
    keras.utils.set_random_seed(0)
    update = VoiceUpdate(HiFiGAN(config), SpeakerEncoder(config), learning, config)
    (own,) = Windows(bank, config).stream(0, 1)
    return update, {name: float(x) for name, x in update(batch or own, tf.constant(number)).items()}

@pytest.fixture(scope='module')
def plain(bank, tiny): return first_update(bank, tiny)

def test_one_update_moves_all_three_networks(bank, tiny, plain):
    update, found = plain
    keras.utils.set_random_seed(0)
    fresh = VoiceUpdate(HiFiGAN(tiny), SpeakerEncoder(tiny), True, tiny)
    moved = {name: not np.array_equal(v, update.state[name]) for name, v in fresh.state.items()}
    for part in ('decoder', 'speaker', 'critic'):
        assert any(m for name, m in moved.items() if name.startswith(f'{part}/')), part
    assert found['skipped'] == 0 and np.isfinite(list(found.values())).all()
    (batch,) = Windows(bank, tiny).stream(0, 1)
    made, looked = fresh.decoder(batch['states'], fresh.encoder(batch['voice'])), fresh.evaluate(batch)
    expected = float(mel_distance(made, tf.cast(batch['wav'], tf.float32) / 32768, 24000))
    assert [found['mel_loss'], float(looked['loss'])] == pytest.approx([expected] * 2, rel=1e-4)
    assert looked['count'] == 1
    assert found['speaker_loss'] == pytest.approx(float(looked['speaker_loss']), rel=1e-3)
    fresh.optimizer.learning_rate = 0.5
    rates = [float(o.learning_rate) for o in fresh.optimizers]
    assert rates == [0.5, 0.5]   # a callback sets the rate of both
    still = VoiceUpdate(fresh.decoder, fresh.encoder, False, tiny)
    assert len(still.weights) == len(fresh.decoder.trainable_variables) < len(fresh.weights)

@pytest.mark.slow
def test_a_speaker_encoder_that_came_along_stays(bank, tiny):
    update, _ = first_update(bank, tiny, learning=False)
    keras.utils.set_random_seed(0)
    HiFiGAN(tiny)
    assert all(np.array_equal(a, b) for a, b in zip(SpeakerEncoder(tiny).variables, update.encoder.variables))

WEIGHTS = {'mel_weight': 3., 'adversarial_weight': 5., 'feature_weight': 7., 'speaker_weight': 11.,
           'adversarial_from': 5}

@pytest.mark.parametrize('number', [4, 5])
def test_the_loss_is_the_weighed_sum(tiny, number):
    "Before update `adversarial_from` the critics have no say."
    config = tiny.replace(voice=WEIGHTS)
    made, real = (tf.random.stateless_normal((1, 3000), [i, 0], stddev=0.1) for i in (0, 1))
    update = VoiceUpdate(HiFiGAN(config), SpeakerEncoder(config), True, config)
    found, judged = update.losses(made, real, tf.constant(number))
    seen, known = update.critic(made), update.critic(real)
    voice = [update.encoder(speaker_log_mel(resample_batch(x, 24000, 16000), config.model.speaker))
             for x in (made, real)]
    mel, speaker = mel_distance(made, real, 24000), 1 - tf.reduce_sum(voice[0] * voice[1])
    adversarial, feature = adversarial_loss(seen), feature_loss(known, seen)
    loss = 3 * mel + 11 * speaker + (5 * adversarial + 7 * feature if number >= 5 else 0)
    expected = dict(loss=loss, mel_loss=mel, speaker_loss=speaker, adversarial_loss=adversarial,
                    feature_loss=feature)
    as_floats = lambda losses: {name: float(x) for name, x in losses.items()}
    assert as_floats(found) == pytest.approx(as_floats(expected), rel=1e-3, abs=1e-5)
    assert float(judged) == pytest.approx(float(critic_loss(known, seen)), rel=1e-4)

def test_the_mel_distance():
    a, b = (0.1 * np.random.default_rng(i).normal(size=(2, 6000)).astype(np.float32) for i in (0, 1))
    expected = []
    for points, bins in ((512, 40), (1024, 80), (2048, 120)):
        audio = AudioConfig(sample_rate=24000, n_mels=bins, hop_length=points // 4, win_length=points,
                            dvae_n_fft=points, reference_n_fft=points, f_max=12000)
        expected.append(np.abs(log_mel(a, points, audio) - log_mel(b, points, audio)).mean())
    assert float(mel_distance(a, b, 24000)) == pytest.approx(np.mean(expected), rel=1e-5)
    assert float(mel_distance(a, a / 2, 24000)) == pytest.approx(np.log(4), rel=1e-3)   # of the power

@pytest.mark.slow
def test_settings_of_the_batches(bank, tiny):
    changed = tiny.replace(voice={'window': 5, 'batch_size': 3, 'reference_seconds': 0.6,
                                  'learning_rate': 0.5, 'steps': 7})
    before, after = ({k: x.shape for k, x in next(iter(Windows(bank, c).stream())).items()}
                     for c in (tiny, changed))
    assert (before['states'], after['states']) == ((2, 4, 64), (3, 5, 64))
    assert after['voice'][1] > before['voice'][1]
    assert (voice_training(changed).learning_rate, voice_training(changed).steps) == (0.5, 7)

BATCHES = {'window', 'batch_size', 'reference_seconds', 'learning_rate', 'steps'}
CRITICS = {'periods', 'windows', 'channels'}   # test_discriminators.py

def test_no_key_of_the_voice_is_forgotten():
    assert {*WEIGHTS, *BATCHES, *CRITICS} == set(VoiceConfig.model_fields)

@pytest.mark.slow
def test_a_broken_window_changes_nothing(bank, tiny):
    (batch,) = Windows(bank, tiny).stream(0, 1)
    broken = batch | {'states': tf.fill(batch['states'].shape, tf.constant(np.nan, tf.float16))}
    update, found = first_update(bank, tiny, batch=broken)
    keras.utils.set_random_seed(0)
    fresh = VoiceUpdate(HiFiGAN(tiny), SpeakerEncoder(tiny), True, tiny)
    assert found['skipped'] == 1 and same(fresh.state, update.state)

@pytest.mark.slow
def test_the_decoder_learns(bank, tiny):
    config = tiny.replace(voice={'steps': 150, 'learning_rate': 3e-3})
    keras.utils.set_random_seed(0)
    update = VoiceUpdate(HiFiGAN(config), SpeakerEncoder(config), True, config)
    step = tf.function(update)
    seen = [float(step(b, tf.constant(i))['mel_loss'])
            for i, b in enumerate(Windows(bank, config).stream(0, 150))]
    assert np.mean(seen[-10:]) < 0.6 * np.mean(seen[:10])

@pytest.mark.slow
def test_a_killed_voice_goes_on_to_the_bit_and_speaks(model, prepared, tiny, tmp_path, monkeypatch):
    "Although a checkpoint does not write the GPT again."
    monkeypatch.setattr(SavedVoice, 'exports', 1)
    config = tiny.replace(training={'validate_every': 2, 'checkpoint_every': 2, 'mode': 'eager'},
                          voice={'steps': 4})
    whole = new_voice_run(tmp_path / 'whole', model, prepared, config, ['low-0', 'high-0'])
    whole.fit()
    run = new_voice_run(tmp_path / 'run', model, prepared, config, ['low-0', 'high-0'])
    written = lambda: (tmp_path / 'run' / 'model.safetensors').stat().st_mtime_ns
    begun = written()
    kill_at(run, 4)
    again = new_voice_run(tmp_path / 'run')
    assert again.step == 2 and written() == begun
    again.fit()
    assert same(whole.state, again.state) and lines_of(tmp_path / 'run') == lines_of(tmp_path / 'whole')
    assert [l['step'] for l in lines_of(tmp_path / 'run') if 'val_loss' in l] == [2, 4]
    speaker = Speaker(XTTS.load(tmp_path / 'run'), max_seconds=0.5)
    held, wanted = speaker.xtts.hifigan, (whole.update.decoder, whole.update.encoder)
    assert all(np.array_equal(a, b) for mine, theirs in zip(held, wanted)
               for a, b in zip(mine.variables, theirs.variables))
    assert speaker.vocoder == 'hifigan' and np.isfinite(speaker('aa', 'en', prepared.wav_path(0))).all()
    best = XTTS.load(tmp_path / 'run' / 'best')
    assert best.hifigan
    assert all(np.array_equal(a, b) for a, b in zip(best.weights.values(), XTTS.load(model).weights.values()))

@pytest.mark.slow
def test_a_model_that_has_a_decoder_keeps_its_ears(model, prepared, tiny, tmp_path):
    "Trained on, its speaker encoder stays as it came and its decoder goes on from where it was."
    new_voice_run(tmp_path / 'first', model, prepared, tiny).save()
    run = new_voice_run(tmp_path / 'second', tmp_path / 'first', prepared, tiny)
    before = [np.array(v) for net in XTTS.load(tmp_path / 'first').hifigan for v in net.variables]
    now = [*run.update.decoder.variables, *run.update.encoder.variables]
    assert all(np.array_equal(a, b) for a, b in zip(before, now))
    run.fit(steps=2)
    decoder, encoder = (net.variables for net in XTTS.load(tmp_path / 'second').hifigan)
    assert all(np.array_equal(a, b) for a, b in zip(before[len(decoder):], encoder))
    assert not all(np.array_equal(a, b) for a, b in zip(before, decoder))

def test_a_cache_in_other_codes_is_refused(model, corpus, small, tmp_path):
    keras.utils.set_random_seed(7)
    prepare(corpus, tmp_path / 'cache', small, DVAE(small))
    with pytest.raises(UserError, match='another DVAE or tokenizer.*--dvae'):
        new_voice_run(tmp_path / 'run', model, Cache(tmp_path / 'cache'))
    assert not (tmp_path / 'run').exists()

def test_the_tokenizer_of_the_cache_counts_too(xtts, prepared):
    _check_same(xtts, prepared, 'm')
    other = SimpleNamespace(config=xtts.config, dvae=xtts.dvae, tokenizer=train_tokenizer(['zz'], ['en'], 48))
    with pytest.raises(UserError, match='another DVAE or tokenizer than m has'):
        _check_same(other, prepared, 'm')

@pytest.mark.parametrize('facts, made', [(None, False), ([], False), ({}, False),
                                         ({'limits': [0, 1, 2]}, False), ('own', True)])
def test_a_bank_of_other_clips_is_made_again(tiny, tmp_path, facts, made):
    if facts == 'own': facts = {'limits': _limits(tiny)}
    if facts is not None: write_json(tmp_path / 'clips.json', facts)
    assert _is_made(tmp_path, tiny) is made

@pytest.fixture
def banks(bank, monkeypatch) -> list:
    "Whose banks were asked for; they are made by copying."
    asked = []
    def copied(xtts, cache, folder, corpus, progress):
        asked.append((cache.folder, corpus, progress))
        shutil.copytree(bank.folder, folder, dirs_exist_ok=True)
        write_json(folder / 'clips.json', {'ids': bank.ids, 'limits': _limits(xtts.config)})
    monkeypatch.setattr(voices, 'make_bank', copied)
    return asked

def test_a_voice_begins_and_goes_on(model, prepared, tiny, banks, tmp_path):
    config, run = tiny.replace(training={'validate_every': 2}), tmp_path / 'run'
    begun = new_voice_run(run, model, prepared, config, ['low-0', 'high-0'], progress=print)
    facts = {'part': 'voice', 'model': str(model.resolve()), 'cache': str(prepared.folder.resolve()),
             'corpus': None, 'held_out': ['high-0', 'low-0'], 'learning_voices': True}
    assert json.loads((run / 'run.json').read_text()) == facts and banks == [(prepared.folder, None, print)]
    ids = lambda plan: {plan.bank.ids[i] for i in plan.clips}
    assert ids(begun.held_out) == {'low-0', 'high-0'} == {*begun.plan.bank.ids} - ids(begun.plan)
    again = new_voice_run(run)
    assert same(begun.state, again.state) and len(banks) == 1
    assert XTTSConfig.load(run / 'config.yaml').voice == config.voice
    (run / 'model.safetensors').unlink()   # killed while it was written, and before the bank was made
    shutil.rmtree(run / 'bank')
    assert same(begun.state, new_voice_run(run, config=config).state)
    assert json.loads((run / 'run.json').read_text()) == facts
    assert new_voice_run(run, config=tiny.replace(training={'validate_every': 0},
                                                  data={'max_seconds': 9.})).held_out is None
    assert banks[1:] == [(prepared.folder.resolve(), None, None)] * 2   # of other clips the second time

def test_held_out_clips_outside_the_limits_are_left_out_and_named(model, prepared, tiny, tmp_path, capsys):
    "They are in no bank; the run goes on without them, now and when it resumes."
    seconds = {c['id']: c['seconds'] for c in prepared.clips}
    short, *_, long = sorted(seconds, key=seconds.get)
    limited = tiny.replace(data={'max_seconds': seconds[long] - .01}, training={'validate_every': 2})
    begun = new_voice_run(tmp_path / 'run', model, prepared, limited, [short, long])
    for trainer in (begun, new_voice_run(tmp_path / 'run')):
        assert [trainer.held_out.bank.ids[i] for i in trainer.held_out.clips] == [short]
    line = f'1 of the held-out clips lie outside the limits of data and are left out: {long}.'
    assert capsys.readouterr().err.count(line) == 2

def test_a_voice_that_came_along_is_not_learned_again(model, prepared, tiny, banks, tmp_path):
    first = new_voice_run(tmp_path / 'first', model, prepared, tiny)
    second = new_voice_run(tmp_path / 'second', tmp_path / 'first', prepared, tiny, corpus=tmp_path)
    assert not second.update.vector_weights and second.held_out is None
    assert banks[1][1] == str(tmp_path.resolve())
    for one, other in ((second.update.decoder, first.update.decoder),
                       (second.update.encoder, first.update.encoder)):
        assert all(np.array_equal(a, b) for a, b in zip(one.variables, other.variables))
    with pytest.raises(UserError, match='holds no run'): new_voice_run(tmp_path / 'third', model)
    with pytest.raises(UserError, match='has no clip nobody to hold out'):
        new_voice_run(tmp_path / 'fourth', model, prepared, tiny, ['nobody'])
    assert not (tmp_path / 'fourth').exists()

@pytest.mark.slow
def test_a_recording_that_is_gone_is_named(model, mine, small, dvae, tiny, tmp_path):
    prepare(mine, tmp_path / 'cache', small, dvae, XTTS.load(model).tokenizer)
    shutil.move(mine, tmp_path / 'elsewhere')
    cache = Cache(tmp_path / 'cache')
    with pytest.raises(UserError, match='the file is missing'):
        make_bank(XTTS.load(model), cache, tmp_path / 'bank')
    assert not (tmp_path / 'bank').exists()
    assert len(make_bank(XTTS.load(model), cache, tmp_path / 'bank', tmp_path / 'elsewhere')) == len(cache)

def test_which_cache_a_model_was_trained_on(model, prepared, small, tmp_path):
    new_run(prepared, small.replace(model={'gpt': {'layers': 1, 'conditioning_layers': 1}}), tmp_path / 'run')
    assert cache_of(tmp_path / 'run') == cache_of(tmp_path / 'run' / 'best') == prepared.folder.resolve()
    with pytest.raises(UserError, match='name one with --data'): cache_of(model)

def test_the_sections_of_the_loop(tiny):
    assert voice_training(tiny).steps == 8 and dvae_training(tiny).steps == tiny.training.dvae_steps
    assert voice_training(tiny).log_every == dvae_training(tiny).log_every == 2


# --- the commands ---------------------------------------------------------------------------------

@pytest.fixture
def yaml(tiny, tmp_path):
    path = tmp_path / 'tiny.yaml'
    path.write_text(tiny.replace(training={'steps': 2, 'dvae_steps': 4, 'validate_every': 2},
                                 voice={'steps': 2}).to_yaml())
    return path

def told(capsys) -> dict: return json.loads(capsys.readouterr().out.splitlines()[-1])

@pytest.mark.slow
def test_from_a_corpus_to_a_voice_of_its_own(corpus, yaml, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main('train-dvae', corpus, '--config', yaml, '--val', 0.2, '--json') == 0
    codes = told(capsys)
    assert codes['run'].endswith('runs/dvae-1') and codes['steps'] == 4 and codes['best']
    assert main('prepare', corpus, '--dvae', codes['run'], '--out', 'cache', '--json') == 0
    learned, own = (load_dvae(f'{at}/dvae.safetensors', Cache('cache').config)
                    for at in ('cache', 'runs/dvae-1'))
    assert all(np.array_equal(a, b) for a, b in zip(learned.variables, own.variables))
    assert main('train', '--data', 'cache', '--json') == 0
    assert main('train-decoder', '--model', 'runs/train-1', '--val', 0.2, '--json') == 0
    capsys.readouterr()
    assert main('train-decoder', '--run', 'runs/voice-1', '--steps', 3, '--json') == 0
    assert told(capsys)['steps'] == 3
    voice = corpus / 'wavs' / 'low-0.wav'
    assert main('say', 'aa', '--model', 'runs/voice-1', '--voice', voice, '--json') == 0
    assert told(capsys)['vocoder'] == 'hifigan'

@pytest.mark.parametrize('arguments, parts', [
    (['train-dvae'], ['CORPUS']), (['train-dvae', '--run', 'nowhere'], ['nowhere', 'train-dvae CORPUS']),
    (['train-decoder'], ['MODEL']), (['train-decoder', '--model', 'nowhere'], ['nowhere']),
    (['train', '--run', 'other'], ['other', 'train-decoder'])])
def test_a_mistake_is_a_sentence(tmp_path, monkeypatch, capsys, arguments, parts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other' / 'run.json').write_text('{"part": "voice"}')
    assert main(*arguments) == 2
    said = capsys.readouterr().err
    assert 'Traceback' not in said and all(part in said for part in parts), said

FIXED = {'precision': 'bfloat16', 'accumulation': 2, 'schedule': 'noam', 'warmup_steps': 7, 'epochs': 3,
         'gradient_clip_norm': 0.5, 'beta_2': 0.9, 'gradient_checkpointing': True, 'listen_clips': 2}

@pytest.mark.parametrize('part, key', [(part, key) for part in ('dvae', 'voice') for key in FIXED])
def test_a_setting_that_a_command_does_not_use_is_refused(part, key, corpus, model, tmp_path, capsys):
    (tmp_path / 'c.yaml').write_text(f'training: {{{key}: {FIXED[key]}}}\ndata: {{batch_size: 4}}\n')
    source = [corpus] if part == 'dvae' else ['--model', model]
    assert main(COMMANDS[part], *source, '--config', tmp_path / 'c.yaml', '--run', tmp_path / 'run') == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(part in last for part in (f'training.{key}: ', 'does nothing here', 'leave it out')), last
    assert not (tmp_path / 'run').exists()

def test_the_refused_keys_are_those_that_are_always_the_same():
    assert {*FIXED, 'judge_by'} == set(VOICE_ALWAYS)
    assert {*FIXED, 'judge_by', 'weight_decay'} == set(DVAE_ALWAYS)
    for always, made in ((DVAE_ALWAYS, dvae_training), (VOICE_ALWAYS, voice_training)):
        used = made(XTTSConfig().replace(training=FIXED)).model_dump()
        assert {key: used[key] for key in always} == always

def test_a_file_may_hold_what_asks_for_nothing(model, tmp_path):
    "The settings of the model itself, the defaults, and the values that are used anyway are no request."
    begun = XTTSConfig.load(model / 'config.yaml')
    for text in (begun.to_yaml(), 'training: {precision: float32, schedule: constant}',
                 'training: {schedule: cosine}',
                 'voice: {steps: 3}'):
        (tmp_path / 'c.yaml').write_text(text)
        found = _voice_settings(model, tmp_path / 'c.yaml', known=False)
        assert found.model == begun.model and found.data == begun.data

def test_the_sizes_of_a_decoder_yet_to_be_made_count(model, tmp_path):
    (tmp_path / 'c.yaml').write_text('model: {decoder: {channels: 32}}')
    found = _voice_settings(model, tmp_path / 'c.yaml', known=False)
    assert _trained_as(XTTS.load(model), found).model.decoder.channels == 32
    had = SimpleNamespace(hifigan=('decoder', 'encoder'), config=XTTSConfig.load(model / 'config.yaml'))
    assert _trained_as(had, found).model == had.config.model != found.model
    with pytest.raises(UserError, match='model.decoder.channels: 32 does nothing'):
        _voice_settings(model, tmp_path / 'c.yaml', True)
    (tmp_path / 'c.yaml').write_text('model: {gpt: {layers: 3}}')
    with pytest.raises(UserError, match='model.gpt.layers: 3 does nothing'):
        _voice_settings(model, tmp_path / 'c.yaml', False)

@pytest.mark.slow
@pytest.mark.parametrize('part', ['dvae', 'voice'])
def test_kill_9(part, corpus, model, prepared, tiny, tmp_path, cheap_xla):
    """A run killed at some moment and gone on with is the run that nobody disturbed; a decoder's under
    XLA, see dev/LOG.md."""
    config = tiny.replace(training={'dvae_steps': 60, 'checkpoint_every': 5, 'log_every': 3,
                                    'mode': 'xla' if part == 'voice' else 'graph'},
                          voice={'steps': 40})
    (tmp_path / 'c.yaml').write_text(config.to_yaml())
    given = {'dvae': [corpus], 'voice': ['--model', model, '--data', prepared.folder]}[part]
    arguments = [COMMANDS[part], *map(str, given), '--config', str(tmp_path / 'c.yaml'), '--run']
    assert xtts_nb(*arguments, tmp_path / 'whole', '--json').code == 0
    child = started(*arguments, tmp_path / 'run', stderr=subprocess.PIPE)
    while reached(tmp_path / 'run') < 17 and child.poll() is None: time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    assert child.communicate() and child.returncode == -signal.SIGKILL
    assert xtts_nb(COMMANDS[part], '--run', tmp_path / 'run', '--json').code == 0
    assert lines_of(tmp_path / 'run') == lines_of(tmp_path / 'whole')
    for name in ('checkpoints', {'dvae': 'dvae.safetensors', 'voice': 'model.safetensors'}[part]):
        whole = tmp_path / 'whole'
        for file in sorted(whole.glob(f'{name}/*') if name == 'checkpoints' else [whole / name]):
            assert file.read_bytes() == (tmp_path / 'run' / file.relative_to(whole)).read_bytes(), file
