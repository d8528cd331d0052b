"A run and its folder: what does not fit is refused, held-out clips stay out, and the model can be had alone."
import json
import shutil

import numpy as np
import pytest
import tensorflow as tf

from cheap import HELD, lines_of
from process import main, tree
from xtts_nb.config import UserError
from xtts_nb.data.cache import Cache
from xtts_nb.data.prepare import prepare
from xtts_nb.files import read_tensors
from xtts_nb.models.dvae import DVAE
from xtts_nb.train.runs import export_run, held_out_share, new_run, _resume_run
from xtts_nb.train.trainer import checkpoints


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
def other(prepared, second, small):
    "The same clips as a cache, made with another encoder."
    dvae, home = DVAE(small), second.folder.parent
    dvae.mel_stats.assign(np.full(80, 4.))
    prepare(home / 'corpus', home / 'other', prepared.config, dvae, prepared.tokenizer)
    return Cache(home / 'other')

def test_what_does_not_fit_is_refused_and_changes_nothing(cheap, prepared, second, other, mini, tmp_path):
    run, of = tmp_path / 'run', lambda **model: mini.replace(model=model)
    new_run(prepared, mini, run).fit(steps=4)
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine/thesis').write_text('mine')
    before = tree(tmp_path)
    for given, words in (
            ((other, mini, run), 'was trained on the cache with key'), ((second, mini, run), 'with key'),
            ((prepared, of(gpt={'num_layers': 2}), run), 'another model'),
            ((prepared, of(gpt={'hidden_dim': 32, 'num_heads': 1}), run), 'has shape'),
            ((prepared, of(audio={'f_max': 7000.}), tmp_path / 'new'), 'settings of model.audio'),
            ((prepared, of(dvae={'codes': 16}), tmp_path / 'new'), 'settings of model.dvae'),
            ((prepared, mini, tmp_path / 'mine'), 'not a run'),
            ((prepared, mini, tmp_path / 'new', ['nobody']), 'no clip nobody')):
        with pytest.raises(UserError, match=words): new_run(*given)
    pytest.raises(UserError, _resume_run, tmp_path / 'mine').match('holds no run')
    pytest.raises(UserError, export_run, run, tmp_path / 'out', best=True).match('no best model')
    pytest.raises(UserError, export_run, run, run).match('already holds something')
    assert tree(tmp_path) == before
    newest = checkpoints(run / 'checkpoints')[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.raises(UserError, match=newest.name): _resume_run(run)

def test_a_cache_that_is_gone_is_named(cheap, prepared, mini, tmp_path):
    shutil.copytree(prepared.folder, tmp_path / 'cache')
    new_run(Cache(tmp_path / 'cache'), mini, tmp_path / 'run').fit(steps=2)
    shutil.rmtree(tmp_path / 'cache')
    with pytest.raises(UserError, match=str(tmp_path / 'cache')): _resume_run(tmp_path / 'run')

def test_held_out_clips_are_neither_trained_on_nor_heard(cheap, prepared, mini, tmp_path):
    out = {i for i, c in enumerate(prepared.clips) if c['id'] in HELD}
    new_run(prepared, mini, tmp_path / 'run', HELD).fit(steps=2)
    plan = _resume_run(tmp_path / 'run').plan   # also after a resume
    clips, references, pick = set(), set(), tf.function(plan.pick)
    for step in range(10 * plan.steps_per_epoch):
        _, clip, other, _, _ = pick(tf.constant(step, tf.int64))
        clips |= set(clip.numpy().tolist())
        references |= set(other.numpy().tolist())
    assert len(out) == 3 and clips == references == set(range(len(prepared))) - out

def test_validation_on_a_cache_of_its_own(cheap, prepared, second, other, mini, tmp_path):
    config = mini.replace(training={'gpt': {'validate_every': 2, 'steps': 2}})
    run = new_run(prepared, config, tmp_path / 'run', val=second)
    assert run.held_out.cache is second and run.held_out.count.sum() == 4
    assert run.plan.count.sum() == len(prepared)
    run.fit()
    assert 'val_loss' in lines_of(tmp_path / 'run')[-1]
    again = _resume_run(tmp_path / 'run')
    assert again.held_out.cache.folder == second.folder and again.validate() == run.validate()
    for known in ({}, {'held_out': ['low-0']}, {'val': prepared}):
        with pytest.raises(UserError, match='choose another folder'):
            new_run(prepared, config, tmp_path / 'run', **known)
    room = config.replace(model={'gpt': {'max_audio_codes': int(second.codes_length.max())}})
    for given, words in (((prepared, config, 'new', (), None, other), '--dvae'),
                         ((prepared, config, 'new', ['low-0'], None, second), 'give one of them'),
                         ((second, room, 'new', (), None, prepared), f'{prepared.folder}: the longest clip')):
        with pytest.raises(UserError, match=words): new_run(*given[:2], tmp_path / given[2], *given[3:])
    assert not (tmp_path / 'new').exists()

def test_epochs_are_counted_in_updates(cheap, prepared, mini, tmp_path):
    run = new_run(prepared, mini.replace(training={'gpt': {'epochs': 3, 'schedule': 'cosine'}}),
                  tmp_path / 'run')
    updates = 3 * run.plan.steps_per_epoch
    assert run.training.steps == updates != mini.training.gpt.steps and run.fit()['steps'] == updates
    rate = lines_of(tmp_path / 'run')[-1]['learning_rate']   # its end
    assert rate == pytest.approx(0.02 * mini.training.gpt.learning_rate)
    assert _resume_run(tmp_path / 'run').fit()['steps'] == updates

def test_a_share_of_the_sentences_is_held_out_in_every_voice(prepared):
    few, more = held_out_share(prepared, 0.01), held_out_share(prepared, 0.5)
    text = {c['id']: c['text'] for c in prepared.clips}
    sentences = {text[i] for i in more}
    assert few and set(few) < set(more) and len(sentences) == round(0.5 * len(set(text.values())))
    assert set(more) == {i for i, t in text.items() if t in sentences}
    for share in (0, 1): pytest.raises(UserError, held_out_share, prepared, share)

def test_the_command_exports_either_model(given, prepared, mini, tmp_path, capsys):
    run, moved = tmp_path / 'run', 'gpt/final_norm/beta'   # by the step of these runs
    new_run(prepared, mini.replace(training={'gpt': {'validate_every': 2}}), run, HELD).fit()
    written = []
    for flags in ([], ['--best']):
        out = tmp_path / f'out{len(flags)}'
        assert main('convert', 'to-model', out, '--model', run, *flags, '--json') == 0
        told = json.loads(capsys.readouterr().out)
        assert told == {'out': str(out), 'bytes': (out / 'model.safetensors').stat().st_size}
        wanted = dict(read_tensors((run / 'best' if flags else run) / 'model.safetensors'))
        written.append(dict(read_tensors(out / 'model.safetensors')))
        assert written[-1].keys() == wanted.keys()
        assert all(np.array_equal(array, wanted[name]) for name, array in written[-1].items())
    assert not np.array_equal(written[0][moved], written[1][moved])
