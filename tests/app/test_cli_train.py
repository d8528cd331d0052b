"The options of `xtts-nb train` and `config create`: each has an effect, or is refused with a reason."
import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf
import yaml

from process import check_bounds, main, tree, xtts_nb
from xtts_nb.app import cli, cli_train
from xtts_nb.train import runs
from xtts_nb.data.cache import Cache
from xtts_nb.config import cores, UserError, XTTSConfig
from xtts_nb.data.native import BatchPlan, cached_batches
from xtts_nb.app.recipes import flat, gpu_preset, optimization_level
from xtts_nb.train.step import CompiledStep


TINY = XTTSConfig.tiny()

@pytest.fixture(scope='module')
def mini(small):
    "One block, one shape, no XLA."
    return small.replace(model={'gpt': {'layers': 1, 'conditioning_layers': 1}}, data={'buckets': 1},
                         training={'steps': 4, 'log_every': 2, 'checkpoint_every': 2, 'dvae_steps': 2,
                                   'learning_rate': 1e-3, 'schedule': 'constant', 'warmup_steps': 0,
                                   'mode': 'graph'})

@pytest.fixture
def home(mini, tmp_path, monkeypatch):
    "A working directory of its own, with the settings in mini.yaml."
    (tmp_path / 'settings.ini').write_text('[workspace]\n')
    (tmp_path / 'mini.yaml').write_text(mini.to_yaml())
    (tmp_path / 'fast.yaml').write_text(mini.replace(training={'mode': 'xla'}).to_yaml())
    monkeypatch.chdir(tmp_path)
    for name in ('XTTS_NB_XLA', 'XTTS_NB_PRECISION'): monkeypatch.delenv(name, raising=False)
    return tmp_path

@pytest.fixture
def built(prepared, home, monkeypatch):
    "Runs `xtts-nb train` up to the first update; returns the trainer."
    class Stopped(Exception): pass
    really = runs.Trainer.fit
    def fit(self, *given, **named):
        if not isinstance(self.plan, BatchPlan | runs.Replay): return really(self, *given, **named)   # a DVAE
        raise Stopped(self)
    monkeypatch.setattr(runs.Trainer, 'fit', fit)
    def build(*options, data=prepared.folder, config='mini.yaml'):
        given = [*(['--data', data] if data else []), *(['--config', config] if config else []), *options]
        monkeypatch.setattr(sys, 'argv', ['xtts-nb', 'train', *map(str, given)])
        with pytest.raises(Stopped) as stopped: cli.main()
        (trainer,) = stopped.value.args
        return trainer
    return build


# --- every option has an effect -----------------------------------------------------------------------------

def source(trainer):
    "The stages of its pipeline, last first."
    stages = [cached_batches(trainer.plan, 0, 4)]
    while stages[-1]._inputs(): stages += stages[-1]._inputs()
    return stages

def width(trainer): return next(iter(cached_batches(trainer.plan)))['codes'].shape

EFFECTS = {   # option -> (observer, value with the option); without the option the value is another
    ('--batch-size', '2'): (lambda t: width(t)[0], 2),
    ('--num-workers', '3'): (lambda t: int(source(t)[1]._num_parallel_calls), 3),
    ('--prefetch-buffer-size', '7'): (lambda t: int(source(t)[0]._buffer_size), 7),
    ('--enable-static-shapes',): (lambda t: width(t)[1] > 40, True),   # fits the longest clip
    ('--pad-to-fixed-length',): (lambda t: width(t)[1] > 40, True),
    ('--grad-accum', '2'): (lambda t: t.update.training.accumulation, 2),
    ('--lr', '1e-2'): (lambda t: float(t.optimizer.learning_rate), pytest.approx(1e-2)),
    ('--learning-rate', '1e-2'): (lambda t: float(t.optimizer.learning_rate), pytest.approx(1e-2)),
    ('--steps', '9'): (lambda t: t.training.steps, 9),
    ('--epochs', '5'): (lambda t: t.training.steps / t.plan.steps_per_epoch, 5),
    ('--enable-eager-debug',): (lambda t: isinstance(t.train_step, CompiledStep), False),
    ('--set', 'training.ema=0.5'): (lambda t: t.optimizer.use_ema, True),
    ('--optimization-level', 'enhanced'): (lambda t: t.train_step.xla, True),
    ('--optimization-level', 'experimental'): (lambda t: (t.xtts.gpt.compute_dtype, t.optimizer.use_ema),
                                               ('bfloat16', True)),
    ('--gpu-preset', '3060'): (lambda t: (width(t)[0], t.training.accumulation, t.xtts.gpt.compute_dtype),
                               (8, 2, 'bfloat16')),
    ('--batch-size', '6'): (lambda t: width(t)[0], 6),
    ('--gpu-preset', '3090'): (lambda t: t.plan.data.prefetch_buffer_size, 24),
    ('--set', 'data.reference_frames=48'): (
        lambda t: next(iter(cached_batches(t.plan)))['reference'].shape[1], 48),
    ('--val', '0.3'): (lambda t: t.held_out is not None, True),
}

TOGETHER = [   # options that can be tested in one run
    ['--batch-size 2', '--num-workers 3', '--prefetch-buffer-size 7', '--enable-static-shapes',
     '--grad-accum 2', '--lr 1e-2',
     '--epochs 5', '--set data.reference_frames=48', '--val 0.3', '--optimization-level enhanced'],
    ['--batch-size 6', '--gpu-preset 3090', '--grad-accum 2', '--pad-to-fixed-length', '--learning-rate 1e-2',
     '--steps 9',
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
    assert {tuple(o.split()) for options in TOGETHER for o in options} == {*EFFECTS,
                                                                           ('--optimization-level', 'basic')}

def test_the_basic_level_leaves_xla_out(built):
    assert not built('--optimization-level', 'basic', '--config', 'fast.yaml', config=None).train_step.xla

def test_without_the_options_something_else_is_seen(built):
    trainer = built()
    for look, seen in EFFECTS.values(): assert look(trainer) != seen

def test_the_gpu_prefetch_can_be_left_out(built, monkeypatch):
    "With a fake GPU: whether the last stage prefetches to it."
    asked = []
    monkeypatch.setattr(tf.config, 'list_logical_devices', lambda kind=None: ['GPU:0'])
    monkeypatch.setattr(tf.data.experimental, 'prefetch_to_device',
                        lambda device, n: asked.append(device) or (lambda data: data))
    for options, devices in (((), ['/GPU:0']), (('--disable-gpu-prefetch',), [])):
        asked.clear()
        plan = built(*options).plan
        cached_batches(plan, 0, 1)
        assert asked == devices

def test_the_environment_counts_over_the_file_and_below_options(built, monkeypatch):
    monkeypatch.setenv('XTTS_NB_XLA', 'true')
    monkeypatch.setenv('XTTS_NB_PRECISION', 'bfloat16')
    trainer = built('--set', 'training.precision=float32')
    assert trainer.train_step.xla and trainer.xtts.gpt.compute_dtype == 'float32'

def test_a_guides_file_is_laid_over_what_the_cache_was_made_with(built, home, prepared, capfd):
    (home / 'guide.yaml').write_text('data: {batch_size: 4, pin_memory: true}\n'
                                     'training: {batch_size: 4, learning_rate: 1e-4}\n')
    trainer = built(config='guide.yaml')
    assert trainer.xtts.config.model == prepared.config.model
    assert trainer.update.training.learning_rate == 1e-4
    err = capfd.readouterr().err
    assert 'guide.yaml: data.pin_memory does nothing here' in err
    assert 'training.batch_size is data.batch_size here, 4.' in err

def test_each_layer_prints_what_it_changes(built, capfd):
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

# --- corpora instead of caches ------------------------------------------------------------------------------

def test_a_corpus_is_prepared_first_and_found_again(built, home, corpus, capfd):
    options = '--preprocessing-mode', 'precompute', '--set', 'training.enable_graph_mode=false'
    first = built(*options, data=corpus)
    (made,) = (home / 'cache').iterdir()
    before, err = tree(made), capfd.readouterr().err
    assert f'is a corpus; its cache is {made}, made now.' in err and first.plan.cache.folder == made
    again = built(*options, data=corpus)
    assert 'brought up to date' in capfd.readouterr().err and tree(made) == before
    assert len(again.plan.cache) == 14
    named = cli_train._corpus_cache_folder
    settings = first.xtts.config
    assert named(corpus, settings) == made and named(corpus, settings, made) != made   # of another DVAE
    for change in ({'data': {'min_seconds': 0.8}}, {'model': {'audio': {'f_max': 7000.}}},
                   {'training': {'dvae_steps': 3}}):
        assert named(corpus, settings.replace(**change)) != made
    assert named(corpus, settings.replace(data={'batch_size': 2}, training={'steps': 7})) == made

def test_a_corpus_to_validate_on(built, home, corpus, prepared):
    trainer = built('--val-data', corpus)
    assert trainer.held_out.count.sum() == 14
    assert trainer.training.validate_every == 1   # of 4 updates
    assert trainer.held_out.cache.manifest['keys'] == prepared.manifest['keys']   # its DVAE and tokenizer
    assert built('--val-data', trainer.held_out.cache.folder).held_out.count.sum() == 14   # a cache


# --- refused ------------------------------------------------------------------------------------------------

WRONG = {
    ('--disable-tf-native-loading',): ['is no option here', 'always native', 'leave it out'],
    ('--disable-cpu-gpu-overlap',): ['is no option here', '--prefetch-buffer-size 1'],
    ('--bach-size', '3'): ['--bach-size', 'did you mean --batch-size?'],
    ('--steps', '3', '--epochs', '3'): ['--steps and --epochs', 'give one'],
    ('--val', '0.3', '--val-data', 'x'): ['--val and --val-data', 'give one'],
    ('--gpu-preset', 'T4'): ['"T4"', 'there is 4090, 3090, 3060, A100, H200'],
    ('--optimization-level', 'turbo'): ['"turbo"', 'basic, enhanced, experimental'],
    ('--preprocessing-mode', 'runtime'): ['data.preprocessing_mode: runtime does nothing',
                                          'with preprocessing_mode precompute'],
    ('--preprocessing-mode', 'never'): ["'never'", "'precompute'"],
    ('--val-data', 'no-such'): ['no-such', 'holds no cache'],
    ('--set', 'data.bach_size=3'): ['data.bach_size', 'did you mean "batch_size"?'],
    ('--batch-size', '6', '--grad-accum', '4'): ['batch_size 6', 'accumulation 4'],
    ('--set', 'data.max_drop_rate=0.1'): ['data.max_drop_rate: 0.1 does nothing', 'prepare the corpus again',
                                          'leave it out'],
    ('--set', 'data.max_cache_gb=1'): ['data.max_cache_gb: 1.0 does nothing', 'prepare the corpus again',
                                       'leave it out'],
    ('--set', 'data.max_seconds=0.55'): ['14 of 14 clips are left out: 14 longer than data.max_seconds 0.55',
                                         'widen'],
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
    assert out == '' and last.startswith('xtts-nb: '), last
    assert not [part for part in WRONG[options] if part not in last], last
    assert tree(home) == before

def test_a_corpus_can_be_read_as_it_is_trained_on(built, home, corpus, mini, capfd):
    settings = mini.replace(data={'preprocessing_mode': 'runtime'}, training={'mode': 'eager'})
    (home / 'runtime.yaml').write_text(settings.to_yaml())
    cache = built(data=corpus, config='runtime.yaml').plan.cache
    assert cache.manifest['mode'] == 'runtime' and 'codes' not in cache.manifest['stored']
    assert main('train', '--data', cache.folder, '--preprocessing-mode', 'precompute') == 2
    assert 'is prepared, with preprocessing_mode runtime' in capfd.readouterr().err.splitlines()[-1]


# --- what an option becomes ---------------------------------------------------------------------------------

def test_bounds():
    check_bounds(
        ('train --steps', 1, 0), ('train --epochs', 1, 0), ('train --val', 0, -0.1),
        ('train --val', 0.9, 0.91),
        ('train --batch-size', 1, 0), ('train --grad-accum', 1, 0), ('train --num-workers', 1, 0),
        ('train --prefetch-buffer-size', 1, 0), ('train --data-gpu', 0, -1), ('train --model-gpu', 0, -1),
        ('train --data-gpu-memory', 1, 0), ('train --model-gpu-memory', 1, 0), ('train --buffer-size', 1, 0),
        ('train-dvae --steps', 1, 0), ('train-dvae --val', 0, -0.1), ('train-dvae --val', 0.9, 0.91),
        ('train-decoder --steps', 1, 0), ('train-decoder --val', 0, -0.1), ('train-decoder --val', 0.9, 0.91),
        ('find batch-size --data c --memory', 0.1, 0.09), ('find learning-rate --data c --steps', 10, 9),
        ('bench train --layers', 1, 0), ('bench train --width', 64, 63), ('bench train --heads', 1, 0),
        ('bench train --batch-size', 1, 0), ('bench train --text-tokens', 1, 0),
        ('bench train --text-tokens', 400, 401),
        ('bench train --codes', 1, 0), ('bench train --codes', 603, 604),
        ('bench say --rounds', 1, 0), ('bench model --batches', 2, 1),
        ('bench model --batch-size', 1, 0))

@pytest.mark.parametrize('group', ['find', 'config'])
def test_a_group_without_a_command_shows_help(ran, group):
    done = ran(group)
    assert 'Usage' in done.out + done.err and 'Missing command' not in done.err

def test_options_that_were_given():
    assert cli_train.given(a=0, b=None, c=False, d='x', e=True) == {'a': 0, 'd': 'x', 'e': True}

def test_layers_of_settings():
    layers, nothing = cli_train._layers, {'environment': {}, 'options': {}}
    assert layers({'val': 0.}) == layers({'val': 0.3}) == layers({'val': 0., 'val_data': 'c'}) == nothing
    asked = layers({'val': 0., 'steps': 7, 'lr': 0.1, 'set_': ['data.seed=3'], 'gpu_preset': '3060',
                    'optimization_level': 'basic'})
    own = {'training.steps': 7, 'training.epochs': 0, 'training.learning_rate': 0.1, 'data.seed': 3}
    assert list(asked.items()) == [
        ('environment', {}), ('GPU preset 3060', gpu_preset('3060', cores())),
        ('optimization level basic', optimization_level('basic')), ('options', own)]
    assert layers({'val': 0., 'epochs': 2})['options'] == {'training.epochs': 2}

GPU_OPTIONS = 'data_gpu', 'model_gpu', 'isolate', 'data_memory', 'model_memory'

def test_the_settings_are_shown_with_where_they_come_from(ran, home, prepared, monkeypatch):
    (home / 'f.yaml').write_text('training: {enable_xla: false, ema: 0.5}\ndata: {seed: 1, buckets: 2}\n')
    monkeypatch.setenv('XTTS_NB_PRECISION', 'bfloat16')
    line = (f'config show --data {prepared.folder} --config f.yaml --gpu-preset 3060 '
            '--set data.seed=3 --lr 2e-4')
    shown = {row['key']: (row['value'], row['from']) for row in ran(f'{line} --json').json['settings']}
    assert shown['data.buckets'] == (2, 'f.yaml') and shown['training.ema'] == (0.5, 'f.yaml')
    assert shown['training.mode'] == ('graph', 'f.yaml')   # a guide's name of it
    assert shown['data.seed'] == (3, 'options') and shown['training.learning_rate'] == (2e-4, 'options')
    assert shown['training.precision'] == ('bfloat16', 'GPU preset 3060')   # over the environment
    assert shown['data.max_seconds'] == (prepared.config.data.max_seconds, str(prepared.folder))
    assert [*shown] == [*flat(prepared.config.model_dump())]
    assert re.search(r'^data\.seed +3 +options$', ran(line).out, re.MULTILINE)
    assert ('training.precision', 'environment') in {
        (row['key'], row['from']) for row in ran('config show --json').json['settings']}
    assert {row['from'] for row in ran('config show --preset xtts_v2 --json').json['settings']} == {
        'preset xtts_v2', 'environment'}
    assert ran('config show --nothing').said == ['xtts-nb: There is no option --nothing. See xtts-nb --help.']

def test_the_budget_is_that_of_both_caches(built, prepared):
    size = sum(line['bytes'] for line in prepared.manifest['shards']) / 2**30
    for budget, caches in ((0., (False, False)), (size, (True, False)), (2 * size, (True, True))):
        run = built('--val-data', prepared.folder, '--set', f'data.ram_budget={budget!r}')
        assert (run.plan.cache.held > 0, run.held_out.cache.held > 0) == caches

# --- the parts of a trainer ---------------------------------------------------------------------------------

def test_older_clips_are_read_too(built, prepared, tmp_path):
    run = tmp_path / 'mixed'
    trainer = built('--mix', prepared.folder, '--val', .3, '--run', run)
    assert (trainer.plan.share, trainer.plan.old.cache.folder) == (.2, prepared.folder)
    assert trainer.old.count.sum() == trainer.held_out.count.sum() > 0
    again = built('--run', run, data=None, config=None)
    assert again.plan.share == .2 and again.old.count.sum() == trainer.old.count.sum()
    again = built('--run', run, '--mix', prepared.folder, data=None, config=None)   # where it lies now
    assert again.plan.share == .2
    alone = built('--mix', prepared.folder, '--mix-share', 0)
    assert alone.plan.share == 0 and alone.old.count.sum() > 0   # a tenth of the sentences

def test_a_corpus_of_older_clips_is_prepared_for_the_cache(built, corpus, prepared):
    old = built('--mix', corpus).plan.old.cache
    assert old.folder != prepared.folder and old.manifest['keys'] == prepared.manifest['keys']

@pytest.mark.parametrize('asked, facts, fed, cluster, said', [
    ({'mix_share': .5}, {}, False, '', '--mix-share: there are no older clips; name them with --mix'),
    ({'mix': 'a'}, {}, True, '', '--mix: older clips are read where one device does all'),
    ({}, {'mix': 'a'}, True, '', '--mix: older clips are read where one device does all'),
    ({'mix': 'a'}, {}, False, 'x', '--mix: is for one machine; train on one, or leave it out'),
    ({}, {'mix': 'a'}, False, 'x', '--mix: is for one machine')])
def test_where_older_clips_cannot_be_read(monkeypatch, asked, facts, fed, cluster, said):
    if cluster: monkeypatch.setenv('TF_CONFIG', cluster)
    asked = SimpleNamespace(**{'mix': None, 'mix_share': None, 'val': 0.} | asked)
    with pytest.raises(UserError, match=said): cli_train._mix(asked, facts, None, None, fed)

def test_a_share_that_differs_is_another_run(built, prepared, tmp_path, capfd):
    built('--mix', prepared.folder, '--run', tmp_path / 'run')
    assert main('train', '--run', tmp_path / 'run', '--mix-share', .4) == 2
    assert 'a share of 0.2; give the same or choose' in capfd.readouterr().err

def test_what_is_forgotten_is_told(tmp_path):
    trainer = SimpleNamespace(old=True, run=tmp_path, step=2)
    lines = [{'step': 0, 'val_old_loss': 2.5}, {'step': 1, 'loss': 3}, {'step': 2, 'val_old_loss': 2.25}]
    told = {'before': 2.5, 'after': 2.25}
    for some, found in ((lines[:1], {}), (lines[1:], {}), (lines, told), ([*lines, {'step': 2}], told),
                        ([*lines, {'step': 2, 'val_old_loss': math.nan}], told | {'after': None})):
        (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in some))
        assert cli_train._forgotten(trainer) == found
    assert cli_train._forgotten(SimpleNamespace()) == cli_train._forgotten(SimpleNamespace(old=None)) == {}

@pytest.fixture
def base(tmp_path) -> Path:
    "The folder of a model of another size, with a voice and a speech of its own."
    own = TINY.replace(model={'gpt': {'layers': 3, 'dropout': .3}}, speech={'temperature': .25, 'top_k': 7},
                       voice={'steps': 9})
    folder = tmp_path / 'base'
    folder.mkdir()
    (folder / 'config.yaml').write_text(own.to_yaml())
    for name in ('tokenizer.json', 'model.safetensors'): (folder / name).touch()
    return folder

def test_what_is_requested_beside_a_base_is_kept(base):
    "Its architecture, voice and speech, but for what a person sets; resuming loses nothing of that."
    with_base = lambda settings, *more: cli_train._with_base(base, settings, None, TINY, *more)
    slower = {'learning_rate': 1e-4, 'warmup_steps': 0, 'schedule': 'constant'}
    assert with_base(TINY) == TINY.replace(model={'gpt': {'layers': 3}}, training=slower,
                                           speech={'temperature': .25, 'top_k': 7}, voice={'steps': 9})
    wanted = TINY.replace(model={'gpt': {'dropout': .1, 'code_noise': .2}}, speech={'temperature': .5},
                          voice={'batch_size': 3}, data={'batch_size': 5})
    assert with_base(wanted) == wanted.replace(model={'gpt': {'layers': 3}}, training=slower,
                                               speech={'top_k': 7}, voice={'steps': 9})
    assert cli_train._with_base(base, wanted, 'lora', wanted, True) == wanted.replace(
        model={'gpt': {'layers': 3}}, training={'finetune': 'lora'})

@pytest.mark.parametrize('options, expected', [
    ([], (5e-6, 0, 'constant')), (['--finetune', 'lora'], (1e-4, 50, 'cosine')),
    (['--finetune', 'rows'], (1e-3, 50, 'cosine')),
    (['--finetune', 'lora', '--lr', '5e-6'], (5e-6, 50, 'cosine')),
    (['--config', 'c.yaml'], (5e-6, 0, 'constant')), (['--config', 'two.yaml'], (3e-5, 7, 'constant')),
    (None, (1e-4, 1000, 'cosine'))])
def test_the_rate_is_that_of_what_is_trained(ran, base, monkeypatch, options, expected):
    "Unless somebody chose another; a file that holds every key, as `config create` writes it, chooses none."
    monkeypatch.chdir(base.parent)
    made = SimpleNamespace(config=XTTSConfig(), folder='cache')   # with the DVAE of a converted XTTS-v2
    monkeypatch.setattr('xtts_nb.data.cache.Cache', lambda *given, **named: made)
    (base / 'config.yaml').write_text(XTTSConfig().to_yaml())
    Path('c.yaml').write_text(XTTSConfig.xtts_v2().to_yaml())
    Path('two.yaml').write_text('training: {learning_rate: 3e-5, warmup_steps: 7}')
    model = [] if options is None else ['--model', str(base), *options]
    shown = ran('config show --json --data cache', *model).json['settings']
    found = {row['key']: row for row in shown}
    keys = [f'training.{key}' for key in ('learning_rate', 'warmup_steps', 'schedule')]
    assert tuple(found[key]['value'] for key in keys) == expected
    if options is None: assert found[keys[0]]['from'] == 'new model'
    if options == ['--finetune', 'lora']: assert found[keys[0]]['from'] == 'finetune lora'

@pytest.mark.parametrize('change', [{'gpt': {'layers': 5}}, {'audio': {'f_max': 7000.}}],
                         ids=['layers', 'f_max'])
def test_another_architecture_is_refused_by_its_key(base, change):
    ((section, values),) = change.items()
    ((key, value),) = values.items()
    other = TINY.replace(model=change)
    for folder, resumed in ((base, False), (base, True), (None, True)):
        with pytest.raises(UserError, match=f'model.{section}.{key} = {value}: the model that is trained'):
            cli_train._with_base(folder, other, None, TINY, resumed)
    assert cli_train._with_base(None, other, None, TINY) == other   # a new model
    same = TINY.replace(model={'gpt': {'layers': 3}})
    assert cli_train._with_base(base, same, None, TINY).model.gpt.layers == 3

def test_codes_are_left_to_the_data_gpu():
    assert cli_train._without_codes(TINY).data.preprocessing_mode == 'runtime'
    with pytest.raises(UserError, match='leaves nothing to do for a data GPU'):
        cli_train._without_codes(TINY.replace(data={'preprocessing_mode': 'precompute'}))

def test_a_corpus_is_a_folder_that_is_no_cache(tmp_path):
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'full').mkdir()
    (tmp_path / 'full' / 'a').touch()
    looks = {name: cli_train._is_corpus(tmp_path / name) for name in ('missing', 'empty', 'full', 'full/a')}
    assert looks == {'missing': False, 'empty': False, 'full': True, 'full/a': True}
    assert not cli_train._is_corpus(None)
    (tmp_path / 'full' / 'manifest.json').touch()
    assert not cli_train._is_corpus(tmp_path / 'full')

def test_the_first_free_name(home):
    for free in ('voice-1', 'voice-2', 'voice-3'):
        assert cli_train._free_run('voice') == home / 'runs' / free
        (home / 'runs' / free).mkdir(parents=True)
    assert cli_train._free_run() == home / 'runs' / 'train-1'

def test_a_run_or_something_to_begin_one_with(tmp_path):
    known = lambda run, source: cli_train._known(run, source, 'nothing is given', 'begin one')
    assert not known(None, 'corpus') and not known(tmp_path, 'corpus')
    with pytest.raises(UserError, match='^nothing is given; begin one.$'): known(None, None)
    with pytest.raises(UserError, match='holds no run to go on with; begin one.$'): known(tmp_path, None)
    (tmp_path / 'run.json').touch()
    assert known(tmp_path, None) and known(tmp_path, 'corpus')
    (tmp_path / 'best').mkdir()
    (tmp_path / 'best' / 'model').touch()
    for inner in (tmp_path / 'best', tmp_path / 'best' / 'model'):   # a checkpoint is as deep
        for source in (None, 'corpus'): pytest.raises(UserError, known, inner, source).match(f'{tmp_path}.$')
    assert not known(tmp_path / 'new', 'corpus')

def test_held_out_clips_turn_validation_on():
    most, changed = TINY.training.checkpoint_every, cli_train._changed
    assert changed(TINY, 0., 9, steps=None) == TINY
    assert changed(TINY, 0., 9, steps=3) == TINY.replace(training={'steps': 3})
    for updates, every in ((1, 1), (9, 1), (25, 2), (10 * most - 1, most - 1), (20 * most, most)):
        validated = TINY.replace(training={'validate_every': every})
        assert changed(TINY, 0.3, updates) == changed(TINY, 'cache', updates) == validated
    own = TINY.replace(training={'validate_every': most + 1})
    assert changed(own, 0.3, 9) == own

@pytest.mark.parametrize('begun, now, every', [
    (None, {'steps': 50}, 5), (None, {'epochs': 3}, 2),   # 9 updates an epoch
    ({'steps': 50, 'validate_every': 5}, {'steps': 90, 'validate_every': 5}, 9),
    ({'epochs': 3, 'validate_every': 2}, {'epochs': 6, 'validate_every': 2}, 5),
    ({'steps': 50, 'validate_every': 5}, {'steps': 90, 'validate_every': 7}, 7),   # asked for
    ({'steps': 50, 'validate_every': 4}, {'steps': 90, 'validate_every': 4}, 4)])
def test_a_training_that_goes_on_is_validated_by_its_new_length(begun, now, every):
    begun, now = (values and TINY.replace(training=values, data={'batch_size': 4}) for values in (begun, now))
    assert cli_train._validated(now, begun, .1, range(33)).training.validate_every == every
    again = cli_train._validated(now, begun, 0, range(33))   # without the option: only what the run knows
    assert again.training.validate_every == (every if begun else 0)

def test_an_interval_that_is_asked_for_stays(built, home):
    "Also where it is the one that a shorter training had by itself."
    first = built('--run', home / 'r', '--val', .1, '--steps', 50, config=None).training
    again = lambda *options: built('--run', home / 'r', *options, data=None, config=None).training
    assert first.validate_every == again().validate_every == 5
    assert again('--steps', 90).validate_every == 9 and again('--steps', 50).validate_every == 5
    assert again('--steps', 90, '--set', 'training.validate_every=5').validate_every == 5
    assert again('--steps', 120).validate_every == 5


# --- memory -------------------------------------------------------------------------------------------------

# --- a DVAE and a voice -------------------------------------------------------------------------------------

VOICE = {'voice.steps=5': (True, True), 'model.decoder.channels=256': (True, False),
         'model.speaker.blocks=[2, 1, 1, 1]': (True, False),
         'model.gpt.layers=2': (False, False), 'training.warmup_steps=7': (False,
    False)}   # for a new decoder, for a known one

@pytest.mark.parametrize('text', VOICE)
def test_settings_that_a_decoder_is_trained_with(tmp_path, text):
    from xtts_nb.app.recipes import parse_assignments, nested
    (tmp_path / 'config.yaml').write_text(TINY.to_yaml())
    (tmp_path / 'f.yaml').write_text(yaml.safe_dump(nested(parse_assignments([text]))))
    for known, may in zip((False, True), VOICE[text]):
        if may:
            assert cli_train._voice_settings(tmp_path, tmp_path / 'f.yaml', known) != TINY
            continue
        with pytest.raises(UserError, match='does nothing here: the decoder is trained'):
            cli_train._voice_settings(tmp_path, tmp_path / 'f.yaml', known)


# --- export and bench ---------------------------------------------------------------------------------------

SIZES = '--layers 2 --width 64 --heads 4 --batch-size 3'

IN_CHECKOUT = 'in a checkout of the repository'

@pytest.mark.parametrize('line, said', [
    ('bench gpt2 --torch-python py', f'gpt2: write python benchmarks/gpt2.py {IN_CHECKOUT} instead.'),
    ('bench train --coqui-python py',
     f'train: --coqui-python is an option of python benchmarks/step.py {IN_CHECKOUT}; use that.'),
    ('bench data --data d --coqui-python py',
     f'data: --coqui-python is an option of python benchmarks/loaders.py {IN_CHECKOUT}; use that.')])
def test_other_libraries_are_measured_by_scripts_of_the_repository(ran, line, said):
    done = ran(line)
    assert done.code == 2 and done.err.splitlines()[-1] == f'xtts-nb: bench {said}'

def test_bench_model_counts_causes(ran):
    "The command as it is, at the smallest size."
    done = ran('bench model --batches 2 --batch-size 2 --rounds 1 --json')
    rows = {row.pop('name'): row for row in done.json['rows']}
    assert {name: (row['syncs'], row['traces']) for name, row in rows.items()} == {
        'row by row': (10, 0), 'whole batch': (0, 0), 'whole batch, compiled': (0, 1),
        'changing shapes': (None, 2), 'static shape': (None, 1)}
    assert [rows[name]['ratio'] for name in ('row by row', 'changing shapes')] == [1., 1.]
    assert all(row['step_ms'] > 0 and row['spread'] is None for row in rows.values())


# --- config create ------------------------------------------------------------------------------------------

def test_config_create_and_train_with_it(home, prepared, mini, capfd):
    assert main('config', 'create', 'c.yaml', '--preset', 'tiny', '--gpu-preset', '3060', '--json') == 0
    said = json.loads(capfd.readouterr().out)
    config = XTTSConfig.load(home / 'c.yaml')
    assert said['preset'] == 'tiny' and said['config'] == 'c.yaml' and 'training.steps' not in said['changed']
    assert said['changed']['data.batch_size'] == 8 == config.data.batch_size
    assert config.model == XTTSConfig.tiny().model
    before = tree(home)
    assert main('config', 'create', 'c.yaml') == 2 and 'already exists' in capfd.readouterr().err
    assert tree(home) == before
    assert main('config', 'create') == 0 and XTTSConfig.load(home / 'config.yaml') == XTTSConfig.xtts_v2()
    assert capfd.readouterr().out == 'config.yaml: xtts-nb train --config config.yaml --data CACHE\n'
    assert '# batches ready ahead of the step' in (home / 'config.yaml').read_text()

def test_config_create_needs_no_tensorflow(home):
    done = xtts_nb('config', 'create', cwd=home)
    assert done.code == 0 and done.err == '' and os.listdir(home).count('config.yaml') == 1

@pytest.mark.slow
def test_two_epochs_from_a_file_to_the_end(home, prepared, capfd):
    "Nothing is stubbed: settings from a file, an option over it, and a run that continues to more epochs."
    given, sizes = ['--run', 'run', '--json'], ['--epochs', '1', '--batch-size', '2']
    assert main('train', '--train-data', prepared.folder, '--config', 'mini.yaml', *sizes, *given) == 0
    first = json.loads(capfd.readouterr().out)
    assert first['steps'] == 7 and XTTSConfig.load(home / 'run' / 'config.yaml').data.batch_size == 2
    assert main('train', *given, '--epochs', '2') == 0
    assert json.loads(capfd.readouterr().out)['steps'] == 14 and np.isfinite(first['loss_last'])
    cache = Cache(json.loads((home / 'run' / 'run.json').read_text())['cache'])
    assert cache.manifest['key'] == prepared.manifest['key']


@pytest.mark.parametrize('validated, text', [
    ({}, ''), ({'val_loss': 1.}, ''),
    ({'val_stop': .75, 'val_stop_short': .5, 'val_stop_long': 1., 'val_never': .125},
     '\nHeld-out clips: 75% end within 3 codes (0.14 s) of their end (up to 3 s 50%, longer 100%), '
     '12% never.')])
def test_where_held_out_clips_end(validated, text): assert cli_train._ends(validated) == text
