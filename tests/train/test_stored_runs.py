"A run and its folder: what does not fit is refused, held-out clips stay out, and the model can be had alone."
import json
import shutil

import numpy as np
import pytest
import tensorflow as tf

from cheap import HELD, lines_of
from process import main, tree
from xtts_nb.data.cache import Cache
from xtts_nb.files import read_tensors
from xtts_nb.train.trainer import checkpoints
from xtts_nb.config import UserError
from xtts_nb.models.dvae import DVAE
from xtts_nb.models.xtts import XTTS
from xtts_nb.data.prepare import prepare
from xtts_nb.train.runs import export_run, held_out_share, new_run, resume_run


# --- folders that do not fit ----------------------------------------------------------------------

@pytest.fixture(scope='module')
def second(prepared, corpus, dvae, tmp_path_factory):
    "Four clips as a cache of their own, made with the same encoder and tokenizer."
    folder = tmp_path_factory.mktemp('second')
    shutil.copytree(corpus, folder / 'corpus')
    kept = (folder / 'corpus' / 'metadata.csv').read_text(encoding='utf-8').splitlines()[:4]
    (folder / 'corpus' / 'metadata.csv').write_text('\n'.join(kept) + '\n', encoding='utf-8')
    prepare(folder / 'corpus', folder / 'cache', prepared.config, dvae, prepared.tokenizer)
    return Cache(folder / 'cache')

@pytest.fixture(scope='module')
def other(prepared, corpus, small, tmp_path_factory):
    "The corpus as a cache, made with another encoder."
    dvae = DVAE(small)
    dvae.mel_stats.assign(np.full(80, 4.))
    folder = tmp_path_factory.mktemp('other') / 'cache'
    prepare(corpus, folder, prepared.config, dvae, prepared.tokenizer)
    return Cache(folder)

@pytest.mark.parametrize('kind', ['other', 'second'])
def test_a_run_of_another_cache_is_refused(cheap, prepared, mini, tmp_path, kind, request):
    "With other clips their order, and so the run, would be another."
    new_run(prepared, mini, tmp_path / 'run').fit(steps=2)
    before = tree(tmp_path)
    with pytest.raises(UserError, match='was trained on the cache with key .* choose another folder'):
        new_run(request.getfixturevalue(kind), mini, tmp_path / 'run')
    assert tree(tmp_path) == before

def test_a_model_of_another_size_is_refused(cheap, prepared, mini, tmp_path):
    new_run(prepared, mini, tmp_path / 'run').fit(steps=2)
    before = tree(tmp_path)
    for size, message in (({'layers': 2}, 'belongs to another model'),
                          ({'width': 32, 'heads': 1}, 'has shape')):
        with pytest.raises(UserError, match=message):
            new_run(prepared, mini.replace(model={'gpt': size}), tmp_path / 'run')
    assert tree(tmp_path) == before

@pytest.mark.parametrize('change', [{'audio': {'f_max': 7000.}}, {'dvae': {'codes': 16}}], ids=str)
def test_another_front_end_is_refused(prepared, mini, tmp_path, change):
    (part,) = change
    with pytest.raises(UserError, match=f'other settings of model.{part}; prepare it again'):
        new_run(prepared, mini.replace(model=change), tmp_path / 'run')
    assert tree(tmp_path) == {}

def test_what_is_no_run_is_left_alone(prepared, mini, tmp_path):
    (tmp_path / 'thesis').write_text('mine')
    with pytest.raises(UserError, match='not a run; choose another folder'): new_run(prepared, mini, tmp_path)
    with pytest.raises(UserError, match='holds no run; begin one with'): resume_run(tmp_path)
    assert tree(tmp_path) == {'thesis': b'mine'}

def test_an_unknown_clip_cannot_be_held_out(prepared, mini, tmp_path):
    with pytest.raises(UserError, match='has no clip nobody'):
        new_run(prepared, mini, tmp_path / 'run', ['low-0', 'nobody'])

def test_a_damaged_checkpoint_is_named(cheap, prepared, mini, tmp_path):
    new_run(prepared, mini, tmp_path / 'run').fit(steps=4)
    newest = checkpoints(tmp_path / 'run' / 'checkpoints')[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.raises(UserError, match=newest.name): resume_run(tmp_path / 'run')

def test_a_cache_that_is_gone_is_named(cheap, prepared, mini, tmp_path):
    shutil.copytree(prepared.folder, tmp_path / 'cache')
    new_run(Cache(tmp_path / 'cache'), mini, tmp_path / 'run').fit(steps=2)
    shutil.rmtree(tmp_path / 'cache')
    with pytest.raises(UserError, match=str(tmp_path / 'cache')): resume_run(tmp_path / 'run')


# --- clips held out -------------------------------------------------------------------------------

def test_held_out_clips_are_neither_trained_on_nor_heard(cheap, prepared, mini, tmp_path):
    out = {i for i, c in enumerate(prepared.clips) if c['id'] in HELD}
    new_run(prepared, mini, tmp_path / 'run', HELD).fit(steps=2)
    plan = resume_run(tmp_path / 'run').plan   # also after a resume
    clips, references = set(), set()
    for step in range(10 * plan.steps_per_epoch):
        _, clip, other, _, _ = plan.pick(tf.constant(step, tf.int64))
        clips |= set(clip.numpy().tolist())
        references |= set(other.numpy().tolist())
    assert len(out) == 3 and clips == references == set(range(len(prepared))) - out

def test_validation_on_a_cache_of_its_own(cheap, prepared, second, mini, tmp_path):
    config = mini.replace(training={'validate_every': 2, 'steps': 2})
    run = new_run(prepared, config, tmp_path / 'run', val=second)
    assert run.held_out.cache is second and run.held_out.count.sum() == 4
    assert run.plan.count.sum() == len(prepared)
    run.fit()
    assert 'val_loss' in lines_of(tmp_path / 'run')[-1]
    again = resume_run(tmp_path / 'run')
    assert again.held_out.cache.folder == second.folder and again.validate() == run.validate()
    for other in ({}, {'held_out': ['low-0']}, {'val': prepared}):
        with pytest.raises(UserError, match='choose another folder'):
            new_run(prepared, config, tmp_path / 'run', **other)

def test_validation_on_a_cache_that_does_not_fit(prepared, second, other, mini, tmp_path):
    with pytest.raises(UserError) as e: new_run(prepared, mini, tmp_path / 'run', val=other)
    # both keys and the remedy
    assert prepared.manifest['keys']['codes'] in str(e.value) and '--dvae' in str(e.value)
    with pytest.raises(UserError, match='give one of them'):
        new_run(prepared, mini, tmp_path / 'run', ['low-0'], val=second)
    assert not (tmp_path / 'run').exists()

def test_a_validation_clip_that_has_no_room_is_refused(cheap, prepared, second, mini, tmp_path):
    longest = [int(cache.codes_length.max()) for cache in (second, prepared)]
    assert longest[0] < longest[1]
    room = mini.replace(model={'gpt': {'max_audio_codes': longest[0]}}, training={'validate_every': 2})
    with pytest.raises(UserError, match=f'{prepared.folder}: the longest clip has {longest[1]} codes tokens'):
        new_run(second, room, tmp_path / 'run', val=prepared)
    assert not (tmp_path / 'run').exists()

def test_epochs_are_counted_in_updates(cheap, prepared, mini, tmp_path):
    run = new_run(prepared, mini.replace(training={'epochs': 3, 'schedule': 'cosine'}), tmp_path / 'run')
    updates = 3 * run.plan.steps_per_epoch
    assert run.training.steps == updates != mini.training.steps and run.fit()['steps'] == updates
    # its end
    rate = lines_of(tmp_path / 'run')[-1]['learning_rate']
    assert rate == pytest.approx(0.02 * mini.training.learning_rate)
    assert resume_run(tmp_path / 'run').fit()['steps'] == updates

def test_a_share_of_the_sentences_is_held_out_in_every_voice(prepared):
    few, more = held_out_share(prepared, 0.01), held_out_share(prepared, 0.5)
    text = {c['id']: c['text'] for c in prepared.clips}
    sentences = {text[i] for i in more}
    assert few and set(few) < set(more) and len(sentences) == round(0.5 * len(set(text.values())))
    assert set(more) == {i for i, t in text.items() if t in sentences}
    for share in (0, 1, -0.1): pytest.raises(UserError, held_out_share, prepared, share)


# --- the model alone ------------------------------------------------------------------------------

KINDS = [(best, half) for best in (False, True) for half in (False, True)]

@pytest.mark.slow
def test_the_command_exports_either_model_in_either_precision(given, prepared, mini, tmp_path, capsys):
    run = tmp_path / 'run'
    new_run(prepared, mini.replace(training={'validate_every': 2}), run, HELD).fit()
    written = {}
    for best, half in KINDS:
        out, flags = tmp_path / f'{best}-{half}', ['--best'] * best + ['--bfloat16'] * half
        assert main('convert', 'to-model', out, '--model', run, *flags, '--json') == 0
        told = json.loads(capsys.readouterr().out)
        assert told == {'out': str(out), 'bytes': (out / 'model.safetensors').stat().st_size}
        assert set(tree(out)) == {'config.yaml', 'model.safetensors', 'tokenizer.json'}
        wanted = XTTS.load(run / 'best' if best else run).weights
        written[best, half] = dict(read_tensors(out / 'model.safetensors'))
        assert written[best, half].keys() == wanted.keys() == XTTS.load(out).weights.keys()
        for name, array in written[best, half].items():
            value = tf.cast(wanted[name].value, 'bfloat16' if half else 'float32').numpy()
            assert array.dtype == value.dtype and np.array_equal(array, value), name
    moved = 'gpt/final_norm/beta'   # by the step of these runs
    assert not np.array_equal(written[True, False][moved], written[False, False][moved])
    assert main('convert', 'to-model', tmp_path / 'text', '--model', run) == 0
    assert capsys.readouterr().out.strip().endswith('MB')

def test_export_refuses_what_is_not_there(cheap, prepared, mini, tmp_path):
    new_run(prepared, mini, tmp_path / 'run').fit(2)
    with pytest.raises(UserError, match='keeps no best model'):
        export_run(tmp_path / 'run', tmp_path / 'out', best=True)
    with pytest.raises(UserError, match='nowhere'): export_run(tmp_path / 'nowhere', tmp_path / 'out')
    with pytest.raises(UserError, match='already holds something'):
        export_run(tmp_path / 'run', tmp_path / 'run')
