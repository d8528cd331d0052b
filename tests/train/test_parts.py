"The DVAE and the decoder, trained by the loop of the GPT: they learn, and they resume to the bit."
import json
import shutil
import signal
import subprocess
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from cheap import lines_of
from process import PROGRAM, reached, started, xtts_nb
from xtts_nb.train import parts as voices
from xtts_nb.data.audio import load_audio, resample, speaker_log_mel
from xtts_nb.data.cache import Cache
from xtts_nb.data.native import BatchPlan
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.models.hifigan import HiFiGAN, SpeakerEncoder
from xtts_nb.models.dvae import DVAE, load_dvae
from xtts_nb.files import read_tensors, write_json
from xtts_nb.models.xtts import XTTS
from xtts_nb.data.prepare import encode_corpus
from xtts_nb.train.runs import _COMMANDS
from xtts_nb.train.trainer import checkpoints
from xtts_nb.speech.generate import Speaker
from xtts_nb.data.text import train_tokenizer
from xtts_nb.train.parts import (
    _Crops, _DVAEUpdate, _DecoderUpdate, Windows, _limits, _other, _make_bank, _mel_distance,
    new_decoder_run)

def same(a, b): return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)

# --- the DVAE -------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def mels():
    return np.repeat(np.random.default_rng(0).normal(size=(40, 80)).astype(np.float32).cumsum(0), 4, 0)

def settings(small, **training):
    "Op by op: cheaper than a trace."
    return small.replace(training={'dvae': {'steps': 6, 'batch_size': 4, 'learning_rate': 2e-3,
                                            'log_every': 1, 'mode': 'eager'} | training})

@pytest.mark.parametrize('frames, starts, epoch',
                         [(1, {0}, 1), (64, {0}, 1), (67, {0, 1, 2}, 1), (2 * 256, None, 2)])
def test_crops_lie_in_the_pool(small, frames, starts, epoch):
    "Batches of four crops of 64 frames; in a shorter pool the last frame is repeated."
    mels, found = np.random.default_rng(0).normal(size=(frames, 80)).astype(np.float32), set()
    crops = _Crops(mels, settings(small))
    for step, batch in enumerate(crops.stream(0, 12)):
        begin = crops.starts(tf.constant(step, tf.int64)).numpy()
        found |= {*begin.tolist()}
        assert np.array_equal(batch['mel'], mels[np.minimum(begin[:, None] + np.arange(64), frames - 1)])
        assert crops.names(step) == [f'mels {s} to {s + 64}' for s in begin]
    assert found == starts or starts is None and len(found) > 30 and max(found) > 300
    assert crops.steps_per_epoch == epoch
    assert np.array_equal(next(iter(crops.stream()))['mel'], crops(tf.constant(0, tf.int64))['mel'])

def test_a_broken_batch_changes_neither_weights_nor_codebook(small):
    keras.utils.set_random_seed(0)
    config = settings(small)
    update = _DVAEUpdate(DVAE(config), config.training.dvae)
    before = {name: v.numpy() for name, v in update.state.items()}
    found = update({'mel': tf.fill((2, 16, 80), np.nan)}, tf.constant(0))
    assert found['skipped'] == found['bad'] == 1
    assert same(before, {name: v.numpy() for name, v in update.state.items()})
    assert update({'mel': tf.random.normal((2, 16, 80))}, tf.constant(1))['skipped'] == 0
    assert not same(before, {name: v.numpy() for name, v in update.state.items()})

# --- the decoder ----------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def tiny(mini):
    return mini.replace(
        model={'decoder': {'channels': 16, 'residual_kernels': [3], 'dilations': [1, 3]},
               'speaker': {'filters': [8, 8], 'blocks': [1, 1], 'width': 8}},
        training={'gpt': {'mode': 'eager'}, 'dvae': {'mode': 'eager'},
                  'decoder': {'steps': 8, 'batch_size': 2, 'window': 4, 'periods': [2], 'windows': [256],
                              'channels': 2, 'reference_seconds': 0.5, 'log_every': 2, 'checkpoint_every': 4,
                              'mode': 'eager'}})

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
    xtts.config = xtts.config.replace(training={'gpt': {'mode': 'graph'}})
    return _make_bank(xtts, prepared, tmp_path_factory.mktemp('bank') / 'bank')

def test_a_bank_holds_states_and_recordings(bank, model, prepared):
    xtts, i = XTTS.load(model), 3
    n, first = prepared.codes_length[i], bank.start['states'][i]
    assert bank.ids == [c['id'] for c in prepared.clips]
    assert bank.length['states'].tolist() == prepared.codes_length.tolist()
    plan = BatchPlan(prepared, xtts.config.data)
    batch = next(b for b in plan.stream(0, plan.steps_per_epoch)
                 if i in b['clip'].numpy()[b['weight'].numpy() > 0])
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

def test_neither_balance_nor_limits_leave_a_clip_without_states(model, prepared, bank, tiny, tmp_path):
    """Balanced batches draw clips with replacement, speakers as often; a bank still holds the states of all
    clips within the limits."""
    xtts, calls = XTTS.load(model), []
    xtts.config = xtts.config.replace(data={'max_seconds': 0.9, 'balance_speakers': True, 'batch_size': 2})
    made = _make_bank(xtts, prepared, tmp_path / 'bank', progress=lambda *done: calls.append(done))
    n = len(made)
    assert calls[-n:] == [(n + i, 2 * n) for i in range(1, n + 1)] and [*calls[:-n]] == sorted(calls[:-n])
    assert calls[-n - 1] == (n, 2 * n)
    short = [i for i, clip in enumerate(prepared.clips) if clip['seconds'] <= 0.9]
    assert 0 < len(short) < len(prepared) and made.ids == [prepared.clips[i]['id'] for i in short]
    assert all(bool(made.states[first:first + n].any(-1).all())   # each code has one
               for first, n in zip(made.start['states'], made.length['states']))
    for place, i in enumerate(short):
        for name in ('wav', 'voice'):
            assert np.array_equal(part(made, name, place), part(bank, name, i))
    xtts.config = xtts.config.replace(data={'max_seconds': 0.55})
    with pytest.raises(UserError, match='14 of 14 clips are left out: 14 longer than data.max_seconds 0.55'):
        _make_bank(xtts, prepared, tmp_path / 'none')
    def share(balance) -> float:
        plan, rows, *_ = picked(bank, tiny.replace(data={'balance_speakers': balance}),
                                np.arange(6, 14))   # 1 and 7
        return np.mean(bank.speaker[plan.clips[rows]] == bank.speaker[6])
    assert share(True) == pytest.approx(0.5, abs=0.03) and share(False) < 0.25

@pytest.mark.parametrize('window, frames', [(4, 17), (40, 174)])   # no clip has 40 codes
def test_windows_lie_where_their_codes_lie(bank, tiny, window, frames):
    "State and sound of a window begin at the same moment, and the voice is another clip's."
    plan = Windows(bank, tiny.replace(training={'decoder': {'window': window}}))
    assert plan.samples == frames * 256
    assert plan.steps_per_epoch == bank.length['states'].sum() // (2 * window)
    for step, batch in zip(range(3), plan.stream()):
        same = plan(tf.constant(step, tf.int64))
        assert all(np.array_equal(x, same[k]) for k, x in batch.items())
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
    plan = Windows(bank, config.replace(training={'decoder': {'batch_size': 4000}}), clips)
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

def test_one_update_moves_all_three_networks(bank, tiny):
    def made():
        keras.utils.set_random_seed(0)
        return _DecoderUpdate(HiFiGAN(tiny), SpeakerEncoder(tiny), True, tiny)
    (batch,) = Windows(bank, tiny).stream(0, 1)
    update, fresh = made(), made()
    found = {name: float(x) for name, x in update(batch, tf.constant(0)).items()}
    moved = {name: not np.array_equal(v, update.state[name]) for name, v in fresh.state.items()}
    for part in ('decoder', 'speaker', 'critic'):
        assert any(m for name, m in moved.items() if name.startswith(f'{part}/')), part
    assert found['skipped'] == 0 and np.isfinite(list(found.values())).all()
    sound, looked = fresh.decoder(batch['states'], fresh.encoder(batch['voice'])), fresh.evaluate(batch)
    expected = float(_mel_distance(sound, tf.cast(batch['wav'], tf.float32) / 32768, 24000))
    assert [found['mel_loss'], float(looked['loss'])] == pytest.approx([expected] * 2, rel=1e-4)
    assert looked['count'] == 1
    assert found['speaker_loss'] == pytest.approx(float(looked['speaker_loss']), rel=1e-3)
    fresh.optimizer.learning_rate = 0.5
    rates = [float(o.learning_rate) for o in fresh.optimizers]
    assert rates == [0.5, 0.5]   # a callback sets the rate of both
    still = _DecoderUpdate(fresh.decoder, fresh.encoder, False, tiny)
    assert len(still.weights) == len(fresh.decoder.trainable_variables) < len(fresh.weights)

def test_a_cache_with_other_codes_or_another_tokenizer_is_refused(small, tiny, dvae, prepared, tmp_path):
    keras.utils.set_random_seed(7)
    for name, tokenizer, codes in (('codes', prepared.tokenizer, DVAE(small)),
                                   ('text', train_tokenizer(['zz'], ['en'], 48), dvae)):
        XTTS(tiny, tokenizer, codes).save(tmp_path / name)
        with pytest.raises(UserError, match='another DVAE or tokenizer.*`dvae`'):
            new_decoder_run(tmp_path / 'run', tmp_path / name, prepared)
    assert not (tmp_path / 'run').exists()

@pytest.fixture
def banks(bank, monkeypatch) -> list:
    "Whose banks were asked for; they are made by copying."
    asked = []
    def copied(xtts, cache, folder, corpus, progress):
        asked.append((cache.folder, corpus, progress))
        shutil.copytree(bank.folder, folder, dirs_exist_ok=True)
        write_json(folder / 'clips.json', {'ids': bank.ids, 'limits': _limits(xtts.config)})
    monkeypatch.setattr(voices, '_make_bank', copied)
    return asked

def test_a_voice_begins_and_goes_on(model, prepared, tiny, banks, tmp_path):
    config, run = tiny.replace(training={'decoder': {'validate_every': 2}}), tmp_path / 'run'
    begun = new_decoder_run(run, model, prepared, config, ['low-0', 'high-0'], progress=print)
    facts = {'part': 'decoder', 'model': str(model.resolve()), 'cache': str(prepared.folder.resolve()),
             'corpus': None, 'held_out': ['high-0', 'low-0'], 'learning_voices': True}
    assert json.loads((run / 'run.json').read_text()) == facts and banks == [(prepared.folder, None, print)]
    ids = lambda plan: {plan.bank.ids[i] for i in plan.clips}
    assert ids(begun.validation) == {'low-0', 'high-0'} == {*begun.plan.bank.ids} - ids(begun.plan)
    (run / 'model.safetensors').unlink()   # killed while it was written
    assert same(begun.state, new_decoder_run(run, config=config).state) and len(banks) == 1
    assert XTTSConfig.load(run / 'config.yaml').training.decoder == config.training.decoder
    assert json.loads((run / 'run.json').read_text()) == facts
    assert new_decoder_run(run, config=tiny.replace(training={'decoder': {'validate_every': 0}},
                                                  data={'max_seconds': 9.})).validation is None
    assert banks[1:] == [(prepared.folder.resolve(), None, None)]   # of other clips

def test_held_out_clips_outside_the_limits_are_left_out_and_named(model, prepared, tiny, tmp_path, capsys):
    "They are in no bank; the run goes on without them, now and when it resumes."
    seconds = {c['id']: c['seconds'] for c in prepared.clips}
    short, _, third, *_, long = sorted(seconds, key=seconds.get)
    limited = tiny.replace(data={'max_seconds': seconds[third] + .001},   # a small bank
                           training={'decoder': {'validate_every': 2}})
    begun = new_decoder_run(tmp_path / 'run', model, prepared, limited, [short, long])
    for trainer in (begun, new_decoder_run(tmp_path / 'run')):
        assert [trainer.validation.bank.ids[i] for i in trainer.validation.clips] == [short]
    line = f'1 of the held-out clips lie outside the limits of data and are left out: {long}.'
    assert capsys.readouterr().err.count(line) == 2

def test_a_voice_that_came_along_is_not_learned_again(model, prepared, tiny, banks, tmp_path):
    first = new_decoder_run(tmp_path / 'first', model, prepared, tiny)
    second = new_decoder_run(tmp_path / 'second', tmp_path / 'first', prepared, tiny, corpus=tmp_path)
    assert not second.update.vector_weights and second.validation is None
    assert banks[1][1] == str(tmp_path.resolve())
    for one, other in ((second.update.decoder, first.update.decoder),
                       (second.update.encoder, first.update.encoder)):
        assert all(np.array_equal(a, b) for a, b in zip(one.variables, other.variables))
    with pytest.raises(UserError, match='began with model'):
        new_decoder_run(tmp_path / 'second', model, prepared, tiny)
    with pytest.raises(UserError, match='holds no run'): new_decoder_run(tmp_path / 'third', model)
    with pytest.raises(UserError, match='has no clip nobody to hold out'):
        new_decoder_run(tmp_path / 'fourth', model, prepared, tiny, ['nobody'])
    assert not (tmp_path / 'fourth').exists()

@pytest.mark.slow
def test_a_recording_that_is_gone_is_named(model, mine, small, dvae, tiny, tmp_path):
    encode_corpus(mine, tmp_path / 'cache', small, dvae, XTTS.load(model).tokenizer)
    shutil.move(mine, tmp_path / 'elsewhere')
    cache = Cache(tmp_path / 'cache')
    with pytest.raises(UserError, match='the file is missing'):
        _make_bank(XTTS.load(model), cache, tmp_path / 'bank')
    assert not (tmp_path / 'bank').exists()
    assert len(_make_bank(XTTS.load(model), cache, tmp_path / 'bank', tmp_path / 'elsewhere')) == len(cache)

# --- the commands ---------------------------------------------------------------------------------

@pytest.fixture
def yaml(tiny, tmp_path):
    path = tmp_path / 'tiny.yaml'
    path.write_text(tiny.replace(training={part: {'steps': steps, 'validate_every': 2} for part, steps in (
        ('gpt', 2), ('dvae', 4), ('decoder', 2))}).to_yaml())
    return path

@pytest.mark.slow
def test_from_a_corpus_to_a_voice_of_its_own(corpus, yaml, tmp_path, monkeypatch, ran):
    monkeypatch.chdir(tmp_path)
    codes = ran('train-dvae --val 0.2 --json --config', yaml, corpus).json
    assert codes['run'].endswith('runs/dvae-1') and codes['steps'] == 4 and codes['best']
    assert ran('prepare --out cache --json --dvae', codes['run'], corpus).code == 0
    learned, own = (load_dvae(f'{at}/dvae.safetensors', Cache('cache').config)
                    for at in ('cache', 'runs/dvae-1'))
    assert all(np.array_equal(a, b) for a, b in zip(learned.variables, own.variables))
    assert ran('train --data cache --json').code == 0
    run = ran('train-decoder --model runs/train-1 --val 0.2 --json').json['run']
    assert ran('train-decoder --steps 3 --json --run', run).json['steps'] == 3
    said = ran('say aa --json --model', run, '--voice', corpus / 'wavs' / 'low-0.wav')
    assert said.json['vocoder'] == 'hifigan'

@pytest.mark.slow
@pytest.mark.parametrize('part', ['dvae', 'decoder'])
def test_kill_9(part, corpus, model, prepared, tiny, tmp_path, kernels):
    """A run killed at some moment and resumed is the run that nobody disturbed; a decoder's under XLA, see
    dev/LOG.md. Its checkpoints do not write the GPT again; what it leaves speaks."""
    each = {'checkpoint_every': 5, 'log_every': 3}
    config = tiny.replace(training={'dvae': each | {'steps': 60, 'mode': 'graph'},
                                    'decoder': each | {'steps': 30, 'mode': 'xla', 'validate_every': 10}})
    (tmp_path / 'c.yaml').write_text(config.to_yaml())
    given = {'dvae': [corpus], 'decoder': ['--model', model, '--data', prepared.folder, '--val', 0.2]}[part]
    arguments = [_COMMANDS[part], *given, '--config', tmp_path / 'c.yaml', '--run']
    whole, run = tmp_path / 'whole', tmp_path / 'run'
    assert xtts_nb(*arguments, whole, '--json').code == 0
    once = 'from xtts_nb.train.parts import _SavedDecoder; _SavedDecoder.exports = 1; '   # at the end alone
    child = started(*arguments, run, stderr=subprocess.PIPE, program=once + PROGRAM, cwd=kernels)
    while reached(run) < 12 and child.poll() is None: time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    assert child.communicate() and child.returncode == -signal.SIGKILL
    nets = lambda file: {k: v for k, v in read_tensors(file) if k.startswith(('decoder/', 'speaker/'))}
    saved = lambda: checkpoints(run / 'checkpoints')[-1]
    if part == 'decoder': assert not same(nets(run / 'model.safetensors'), nets(saved()))
    assert xtts_nb(_COMMANDS[part], '--run', run, '--json', cwd=kernels).code == 0
    assert lines_of(run) == lines_of(whole)
    for name in ('checkpoints', {'dvae': 'dvae.safetensors', 'decoder': 'model.safetensors'}[part]):
        for file in sorted(whole.glob(f'{name}/*') if name == 'checkpoints' else [whole / name]):
            assert file.read_bytes() == (run / file.relative_to(whole)).read_bytes(), file
    if part == 'dvae': return
    assert [line['step'] for line in lines_of(run) if 'val_loss' in line] == [10, 20, 30]
    assert same(nets(run / 'model.safetensors'), nets(saved()))
    speaker = Speaker(XTTS.load(run), max_seconds=0.5)
    assert speaker.vocoder == 'hifigan' and np.isfinite(speaker('aa', 'en', prepared.wav_path(0))).all()
    best = XTTS.load(run / 'best')
    assert best.hifigan
    assert all(np.array_equal(a, b) for a, b in zip(best.weights.values(), XTTS.load(model).weights.values()))
