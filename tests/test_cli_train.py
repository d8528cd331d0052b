"The options of `xtts-nb train` and `config create`: each changes what is trained, or is refused with its reason."
import json
import os
import sys

import numpy as np
import pytest
import tensorflow as tf
import yaml

from process import main, tree, xtts_nb
from xtts_nb import cli, cli_train, runs
from xtts_nb.cache import Cache
from xtts_nb.config import XTTSConfig
from xtts_nb.data import BatchPlan, cached_batches
from xtts_nb.step import CompiledStep


@pytest.fixture(scope='module')
def mini(small):
    "One block, one shape, no XLA."
    return small.replace(model={'gpt': {'layers': 1, 'conditioning_layers': 1}}, data={'buckets': 1},
                         training={'steps': 4, 'log_every': 2, 'checkpoint_every': 2, 'dvae_steps': 2, 'learning_rate': 1e-3,
                                   'schedule': 'constant', 'warmup_steps': 0, 'enable_xla_compilation': False})

@pytest.fixture
def home(mini, tmp_path, monkeypatch):
    "A working directory of its own, with the settings in mini.yaml."
    (tmp_path / 'settings.ini').write_text('[workspace]\n')
    (tmp_path / 'mini.yaml').write_text(mini.to_yaml())
    (tmp_path / 'fast.yaml').write_text(mini.replace(training={'enable_xla_compilation': True}).to_yaml())
    monkeypatch.chdir(tmp_path)
    for name in ('XTTS_NB_XLA', 'XTTS_NB_PRECISION'): monkeypatch.delenv(name, raising=False)
    return tmp_path

@pytest.fixture
def built(prepared, home, monkeypatch):
    "Runs `xtts-nb train` up to the first update; returns the trainer."
    class Stopped(Exception): pass
    really = runs.Trainer.fit
    def fit(self, *given, **named):
        if not isinstance(self.plan, BatchPlan): return really(self, *given, **named)   # the DVAE of a corpus
        raise Stopped(self)
    monkeypatch.setattr(runs.Trainer, 'fit', fit)
    def build(*options, data=prepared.folder, config='mini.yaml'):
        given = [*(['--data', data] if data else []), *(['--config', config] if config else []), *options]
        monkeypatch.setattr(sys, 'argv', ['xtts-nb', 'train', *map(str, given)])
        with pytest.raises(Stopped) as stopped: cli.main()
        (trainer,) = stopped.value.args
        return trainer
    return build


# --- every option has an effect ------------------------------------------------------------------------------------

def source(trainer):
    "The stages of its pipeline, last first."
    stages = [cached_batches(trainer.plan, 0, 4)]
    while stages[-1]._inputs(): stages += stages[-1]._inputs()
    return stages

def width(trainer): return next(iter(cached_batches(trainer.plan)))['codes'].shape

EFFECTS = {   # option -> what is looked at, and what is seen; without the option something else is seen
    ('--batch-size', '2'): (lambda t: width(t)[0], 2),
    ('--num-workers', '3'): (lambda t: int(source(t)[1]._num_parallel_calls), 3),
    ('--prefetch-buffer-size', '7'): (lambda t: int(source(t)[0]._buffer_size), 7),
    ('--enable-static-shapes',): (lambda t: width(t)[1] > 40, True),   # room for the longest that is let in
    ('--pad-to-fixed-length',): (lambda t: width(t)[1] > 40, True),
    ('--grad-accum', '2'): (lambda t: t.update.training.accumulation, 2),
    ('--lr', '1e-2'): (lambda t: float(t.optimizer.learning_rate), pytest.approx(1e-2)),
    ('--learning-rate', '1e-2'): (lambda t: float(t.optimizer.learning_rate), pytest.approx(1e-2)),
    ('--steps', '9'): (lambda t: t.training.steps, 9),
    ('--epochs', '5'): (lambda t: t.training.steps / t.plan.steps_per_epoch, 5),
    ('--enable-eager-debug',): (lambda t: isinstance(t.train_step, CompiledStep), False),
    ('--set', 'training.ema=0.5'): (lambda t: t.optimizer.use_ema, True),
    ('--optimization-level', 'enhanced'): (lambda t: t.train_step.xla, True),
    ('--optimization-level', 'experimental'): (lambda t: (t.xtts.gpt.compute_dtype, t.optimizer.use_ema), ('bfloat16', True)),
    ('--gpu-preset', '3060'): (lambda t: (width(t)[0], t.training.accumulation, t.xtts.gpt.compute_dtype), (8, 2, 'bfloat16')),
    ('--batch-size', '6'): (lambda t: width(t)[0], 6),
    ('--gpu-preset', '3090'): (lambda t: t.plan.data.prefetch_buffer_size, 24),
    ('--set', 'data.reference_frames=48'): (lambda t: next(iter(cached_batches(t.plan)))['reference'].shape[1], 48),
    ('--val', '0.3'): (lambda t: t.held_out is not None, True),
}

TOGETHER = [   # options that can be looked at in one run
    ['--batch-size 2', '--num-workers 3', '--prefetch-buffer-size 7', '--enable-static-shapes', '--grad-accum 2', '--lr 1e-2',
     '--epochs 5', '--set data.reference_frames=48', '--val 0.3', '--optimization-level enhanced'],
    ['--batch-size 6', '--gpu-preset 3090', '--grad-accum 2', '--pad-to-fixed-length', '--learning-rate 1e-2', '--steps 9',
     '--enable-eager-debug'],   # one option over a card's preset, and the rest of the preset
    ['--gpu-preset 3060'], ['--optimization-level experimental'],
    ['--optimization-level basic', '--set training.ema=0.5']]   # over a level

@pytest.mark.parametrize('options', TOGETHER, ids=' '.join)
def test_an_option_changes_what_is_trained(built, options):
    trainer = built(*' '.join(options).split())
    for option in options:
        if option.endswith('basic'): continue   # as in mini.yaml; the next test
        look, seen = EFFECTS[tuple(option.split())]
        assert look(trainer) == seen, option

def test_every_option_is_tried():
    assert {tuple(o.split()) for options in TOGETHER for o in options} == {*EFFECTS, ('--optimization-level', 'basic')}

def test_the_basic_level_leaves_xla_out(built):
    assert not built('--optimization-level', 'basic', '--config', 'fast.yaml', config=None).train_step.xla

def test_without_the_options_something_else_is_seen(built):
    trainer = built()
    for look, seen in EFFECTS.values(): assert look(trainer) != seen

def test_the_gpu_prefetch_can_be_left_out(built, monkeypatch):
    "With a GPU that is only claimed: the last stage is made for it, or not."
    asked = []
    monkeypatch.setattr(tf.config, 'list_logical_devices', lambda kind=None: ['GPU:0'])
    monkeypatch.setattr(tf.data.experimental, 'prefetch_to_device', lambda device, n: asked.append(device) or (lambda data: data))
    for options, devices in (((), ['/GPU:0']), (('--disable-gpu-prefetch',), [])):
        asked.clear()
        plan = built(*options).plan
        cached_batches(plan, 0, 1)
        assert asked == devices

def test_the_environment_counts_over_the_file_and_below_options(built, monkeypatch):
    monkeypatch.setenv('XTTS_NB_XLA', 'true'); monkeypatch.setenv('XTTS_NB_PRECISION', 'bfloat16')
    trainer = built('--set', 'training.precision=float32')
    assert trainer.train_step.xla and trainer.xtts.gpt.compute_dtype == 'float32'

def test_a_guides_file_is_laid_over_what_the_cache_was_made_with(built, home, prepared, capfd):
    (home / 'guide.yaml').write_text('data: {batch_size: 4, pin_memory: true}\ntraining: {batch_size: 4, learning_rate: 1e-4}\n')
    trainer = built(config='guide.yaml')
    assert trainer.xtts.config.model == prepared.config.model and trainer.update.training.learning_rate == 1e-4
    err = capfd.readouterr().err
    assert 'guide.yaml: data.pin_memory does nothing here' in err and 'training.batch_size is data.batch_size here, 4.' in err

def test_what_an_option_changes_is_said(built, capfd):
    built('--batch-size', '2', '--gpu-preset', '3060')
    err = capfd.readouterr().err
    assert 'GPU preset 3060: data.batch_size 4 -> 8, ' in err and 'options: data.batch_size 8 -> 2' in err


def test_limits_act_on_a_finished_cache(built, prepared, capfd):
    "Longer clips are left out of the plan, in training and in validation, and a line says how many."
    lengths = [clip['seconds'] for clip in prepared.clips]
    kept = sum(s <= 0.9 for s in lengths)
    trainer = built('--set', 'data.max_seconds=0.9', '--val', '0.3')
    assert trainer.plan.count.sum() + trainer.held_out.count.sum() == kept < len(lengths)
    out = len(lengths) - kept
    line = f'{prepared.folder}: {out} of 14 clips are left out: {out} longer than data.max_seconds 0.9.'
    assert capfd.readouterr().err.count(line) == 1
    assert built().plan.count.sum() == 14 and 'left out' not in capfd.readouterr().err

def test_settings_of_the_preparation_are_refused_from_a_file_too(home, prepared, capfd):
    (home / 'c.yaml').write_text('data: {max_drop_rate: 0.1, batch_size: 2}\n')
    for command in (['train'], ['find', 'batch-size'], ['find', 'learning-rate']):
        assert main(*command, '--data', prepared.folder, '--config', 'c.yaml') == 2
        assert 'data.max_drop_rate: 0.1 does nothing here' in capfd.readouterr().err.splitlines()[-1]

# --- corpora instead of caches -------------------------------------------------------------------------------------

def test_a_corpus_is_prepared_first_and_found_again(built, home, corpus, capfd):
    first = built('--preprocessing-mode', 'precompute', data=corpus)
    (made,) = (home / 'cache').iterdir()
    before, err = tree(made), capfd.readouterr().err
    assert f'is a corpus; its cache is {made}, made now.' in err and first.plan.cache.folder == made
    again = built('--preprocessing-mode', 'precompute', data=corpus)
    assert 'brought up to date' in capfd.readouterr().err and tree(made) == before and len(again.plan.cache) == 14
    named = cli_train._prepared_folder
    settings = first.xtts.config
    assert named(corpus, settings) == made and named(corpus, settings, made) != made   # of another DVAE
    for change in ({'data': {'min_seconds': 0.8}}, {'model': {'audio': {'f_max': 7000.}}}, {'training': {'dvae_steps': 3}}):
        assert named(corpus, settings.replace(**change)) != made
    assert named(corpus, settings.replace(data={'batch_size': 2}, training={'steps': 7})) == made

def test_a_corpus_to_validate_on(built, home, corpus, prepared):
    trainer = built('--val-data', corpus)
    assert trainer.held_out.count.sum() == 14 and trainer.training.validate_every == trainer.training.checkpoint_every
    assert trainer.held_out.cache.manifest['keys'] == prepared.manifest['keys']   # its DVAE and tokenizer
    assert built('--val-data', trainer.held_out.cache.folder).held_out.count.sum() == 14   # a cache


# --- refused -------------------------------------------------------------------------------------------------------

WRONG = {
    ('--disable-tf-native-loading',): ['is no option here', 'always native', 'leave it out'],
    ('--disable-cpu-gpu-overlap',): ['is no option here', '--prefetch-buffer-size 1'],
    ('--bach-size', '3'): ['--bach-size', 'did you mean --batch-size?'],
    ('--steps', '3', '--epochs', '3'): ['--steps and --epochs', 'give one'],
    ('--val', '0.3', '--val-data', 'x'): ['--val and --val-data', 'give one'],
    ('--gpu-preset', 'T4'): ['"T4"', 'there is 4090, 3090, 3060, A100, H200'],
    ('--optimization-level', 'turbo'): ['"turbo"', 'basic, enhanced, experimental'],
    ('--preprocessing-mode', 'runtime'): ['data.preprocessing_mode: runtime does nothing', 'with preprocessing_mode precompute'],
    ('--preprocessing-mode', 'never'): ["'never'", "'precompute'"],
    ('--val-data', 'no-such'): ['no-such', 'holds no cache'],
    ('--set', 'data.bach_size=3'): ['data.bach_size', 'did you mean "batch_size"?'],
    ('--batch-size', '6', '--grad-accum', '4'): ['batch_size 6', 'accumulation 4'],
    ('--set', 'data.max_drop_rate=0.1'): ['data.max_drop_rate: 0.1 does nothing', 'prepare the corpus again', 'leave it out'],
    ('--set', 'data.max_cache_gb=1'): ['data.max_cache_gb: 1.0 does nothing', 'prepare the corpus again', 'leave it out'],
    ('--set', 'data.max_seconds=0.55'): ['14 of 14 clips are left out: 14 longer than data.max_seconds 0.55', 'widen'],
    ('--set', 'model.gpt.max_audio_codes=20'): ['model.gpt.max_audio_codes 20', 'lower data.max_seconds'],
    ('--set', 'model.gpt.max_text_tokens=9'): ['model.gpt.max_text_tokens 9', 'lower data.max_text_tokens'],
    ('--lr', '0'): ['training.learning_rate', 'greater than 0'],
    ('stray',): ['stray'],
}

@pytest.mark.parametrize('options', WRONG, ids=' '.join)
def test_a_wrong_option_is_answered_in_a_sentence(home, prepared, capfd, options):
    before = tree(home)
    assert main('train', '--data', prepared.folder, *options) == 2
    out, err = capfd.readouterr()
    last = err.splitlines()[-1]
    assert out == '' and last.startswith('xtts-nb: ') and not [part for part in WRONG[options] if part not in last], last
    assert tree(home) == before

def test_a_corpus_can_be_read_as_it_is_trained_on(built, home, corpus, mini, capfd):
    (home / 'runtime.yaml').write_text(mini.replace(data={'preprocessing_mode': 'runtime'}).to_yaml())
    cache = built(data=corpus, config='runtime.yaml').plan.cache
    assert cache.manifest['mode'] == 'runtime' and 'codes' not in cache.manifest['stored']
    assert main('train', '--data', cache.folder, '--preprocessing-mode', 'precompute') == 2
    assert 'is prepared, with preprocessing_mode runtime' in capfd.readouterr().err.splitlines()[-1]


# --- config create -------------------------------------------------------------------------------------------------

def test_config_create_and_train_with_it(home, prepared, mini, capfd):
    assert main('config', 'create', 'c.yaml', '--preset', 'tiny', '--gpu-preset', '3060', '--json') == 0
    said = json.loads(capfd.readouterr().out)
    config = XTTSConfig.load(home / 'c.yaml')
    assert said['changed']['data.batch_size'] == 8 == config.data.batch_size and config.model == XTTSConfig.tiny().model
    before = tree(home)
    assert main('config', 'create', 'c.yaml') == 2 and 'already exists' in capfd.readouterr().err and tree(home) == before
    assert main('config', 'create') == 0 and XTTSConfig.load(home / 'config.yaml') == XTTSConfig()
    text = (home / 'config.yaml').read_text()
    assert '# batches ready ahead of the step' in text and yaml.safe_load(text)['training']['learning_rate'] == 5e-6

def test_config_create_needs_no_tensorflow(home):
    done = xtts_nb('config', 'create', cwd=home)
    assert done.code == 0 and done.err == '' and os.listdir(home).count('config.yaml') == 1

@pytest.mark.slow
def test_two_epochs_from_a_file_to_the_end(home, prepared, capfd):
    "Nothing patched: settings from a file, a flag over it, and a run that goes on to more epochs."
    given, sizes = ['--run', 'run', '--json'], ['--epochs', '1', '--batch-size', '2']
    assert main('train', '--train-data', prepared.folder, '--config', 'mini.yaml', *sizes, *given) == 0
    first = json.loads(capfd.readouterr().out)
    assert first['steps'] == 7 and XTTSConfig.load(home / 'run' / 'config.yaml').data.batch_size == 2
    assert main('train', *given, '--epochs', '2') == 0
    assert json.loads(capfd.readouterr().out)['steps'] == 14 and np.isfinite(first['loss_last'])
    assert Cache(json.loads((home / 'run' / 'run.json').read_text())['cache']).manifest['key'] == prepared.manifest['key']
