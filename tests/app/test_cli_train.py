"The options of `xtts-nb train`: which keys each sets; what a run is made of."
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from process import main, tree
from xtts_nb.app import cli
from xtts_nb.config import UserError, XTTSConfig
from xtts_nb.data.native import BatchPlan
from xtts_nb.settings import flat
from xtts_nb.train import begin, caches, runs

TINY = XTTSConfig.tiny()

@pytest.fixture(scope='module')
def mini(mini):
    "In one shape, with fewer updates at a constant rate."
    return mini.replace(data={'buckets': 1}, training={
        'gpt': {'steps': 4, 'learning_rate': 1e-3, 'schedule': 'constant', 'warmup_steps': 0},
        'dvae': {'steps': 2, 'mode': 'eager'}})

@pytest.fixture
def home(mini, tmp_path, monkeypatch):
    "A working directory of its own, with the settings in mini.yaml."
    (tmp_path / 'settings.ini').write_text('[workspace]\n')
    (tmp_path / 'mini.yaml').write_text(mini.to_yaml())
    monkeypatch.chdir(tmp_path)
    for name in ('XTTS_NB_MODE', 'XTTS_NB_PRECISION'): monkeypatch.delenv(name, raising=False)
    return tmp_path

@pytest.fixture
def built(prepared, home, monkeypatch):
    "Runs `xtts-nb train` up to the first update; returns the trainer."
    class Stopped(Exception): pass
    really = runs.Trainer.fit
    def fit(self, *given, **named):
        if not isinstance(self.plan, BatchPlan | runs._Replay): return really(self, *given, **named)  # DVAE
        raise Stopped(self)
    monkeypatch.setattr(runs.Trainer, 'fit', fit)
    def build(*options, data=prepared.folder, config='mini.yaml'):
        given = [*(['--data', data] if data else []), *(['--config', config] if config else []), *options]
        monkeypatch.setattr(sys, 'argv', ['xtts-nb', 'train', *map(str, given)])
        with pytest.raises(Stopped) as stopped: cli.main()
        (trainer,) = stopped.value.args
        return trainer
    return build

# --- every option sets its keys; tests/test_settings.py shows the effect of each key ------------------------

OPTIONS = {   # -> the keys that differ from those without it
    '--batch-size 2': {'data.batch_size': 2}, '--num-workers 3': {'data.num_workers': 3},
    '--prefetch-buffer-size 7': {'data.prefetch_buffer_size': 7},
    '--enable-static-shapes': {'data.pad_to_fixed_length': True},
    '--disable-gpu-prefetch': {'data.prefetch_to_gpu': False},
    '--grad-accum 2': {'training.gpt.grad_accum_steps': 2}, '--lr 1e-2': {'training.gpt.learning_rate': 1e-2},
    '--steps 9': {'training.gpt.steps': 9}, '--epochs 5': {'training.gpt.epochs': 5},
    '--enable-eager-debug': {'training.gpt.mode': 'eager'},   # of MyXTTS
    '--set data.reference_frames=48': {'data.reference_frames': 48}}

def test_an_option_sets_its_keys(ran, home, prepared):
    line = f'config show --json --data {prepared.folder} --config mini.yaml '
    shown = lambda options='': {row['key']: row['value'] for row in ran(line + options).json['settings']}
    plain = shown()
    changed = lambda options: {key: value for key, value in shown(options).items() if value != plain[key]}
    assert {options: changed(options) for options in OPTIONS} == OPTIONS

def test_a_trainer_has_them(built):
    trainer = built('--batch-size', 2, '--epochs', 5, '--set', 'training.gpt.precision=bfloat16',
                    '--set', 'training.gpt.ema=0.999', '--val', .3)
    assert (trainer.plan.data.batch_size, trainer.training.steps) == (2, 5 * trainer.plan.steps_per_epoch)
    assert trainer.xtts.gpt.compute_dtype == 'bfloat16' and trainer.optimizer.use_ema and trainer.validation

def test_a_file_of_myxtts_is_laid_over_what_the_cache_was_made_with(built, home, prepared, capfd,
                                                                    monkeypatch):
    (home / 'guide.yaml').write_text('data: {batch_size: 4, pin_memory: true}\ntraining: {batch_size: 4, '
                                     'learning_rate: 1e-4, enable_graph_mode: true}\n')
    monkeypatch.setenv('XTTS_NB_MODE', 'eager')
    monkeypatch.setenv('XTTS_NB_PRECISION', 'bfloat16')
    trainer = built('--set', 'training.gpt.precision=float32', config='guide.yaml')
    assert trainer.xtts.config.model == prepared.config.model and trainer.training.mode == 'eager'
    assert trainer.xtts.gpt.compute_dtype == 'float32' and trainer.update.training.learning_rate == 1e-4
    said = capfd.readouterr().err
    assert said.count('guide.yaml: data.pin_memory') == 1 and 'training.batch_size is data.batch_size' in said

def test_the_settings_are_shown_with_where_they_come_from(ran, home, prepared, monkeypatch):
    (home / 'f.yaml').write_text('training: {enable_xla: false, ema: 0.5}\ndata: {seed: 1, buckets: 2}\n')
    monkeypatch.setenv('XTTS_NB_PRECISION', 'bfloat16')
    line = f'config show --train-data {prepared.folder} --config f.yaml --set data.seed=3 --lr 2e-4'
    shown = {row['key']: (row['value'], row['from']) for row in ran(f'{line} --json').json['settings']}
    assert shown['data.buckets'] == (2, 'f.yaml') and shown['training.gpt.mode'] == ('graph', 'f.yaml')
    assert shown['data.seed'] == (3, 'options') and shown['training.gpt.learning_rate'] == (2e-4, 'options')
    assert shown['training.gpt.precision'] == ('bfloat16', 'environment')
    assert shown['data.max_seconds'] == (prepared.config.data.max_seconds, str(prepared.folder))
    assert [*shown] == [*flat(prepared.config.model_dump())]
    assert {row['from'] for row in ran('config show --preset xtts_v2 --json').json['settings']} == {
        'preset xtts_v2', 'environment'}

# --- corpora and older clips --------------------------------------------------------------------------------

def test_a_corpus_is_prepared_first_and_found_again(built, home, corpus, prepared, capfd):
    options = '--preprocessing-mode', 'precompute', '--set', 'training.gpt.mode=eager'
    first = built(*options, data=corpus)
    (made,) = (home / 'cache').iterdir()
    before = tree(made)
    assert first.plan.cache.folder == made and f'is a corpus; its cache is {made}' in capfd.readouterr().err
    assert len(built(*options, data=corpus).plan.cache) == 14 and tree(made) == before
    named, settings = caches._cache_folder, first.xtts.config
    assert named(corpus, settings) == made and named(corpus, settings, made) != made   # of another DVAE
    for change in ({'data': {'min_seconds': 0.8}}, {'model': {'audio': {'f_max': 7000.}}},
                   {'training': {'dvae': {'steps': 3}}}):
        assert named(corpus, settings.replace(**change)) != made
    assert named(corpus, settings.replace(data={'batch_size': 2}, training={'gpt': {'steps': 7}})) == made
    (home / 'runtime.yaml').write_text(settings.replace(data={'preprocessing_mode': 'runtime'}).to_yaml())
    stored = built(data=corpus, config='runtime.yaml').plan.cache.manifest['stored']
    assert 'codes' not in stored and caches.is_corpus(corpus) and not caches.is_corpus(made)
    validated = built('--val-data', corpus)
    assert validated.validation.count.sum() == 14 and validated.training.validate_every == 1   # of 4 updates
    assert validated.validation.cache.manifest['keys'] == prepared.manifest['keys']   # its DVAE and tokenizer

def test_older_clips_are_read_too(built, prepared, corpus, tmp_path, ran):
    run = tmp_path / 'mixed'
    trainer = built('--mix', prepared.folder, '--val', .3, '--run', run)
    assert (trainer.plan.share, trainer.plan.old.cache.folder) == (.2, prepared.folder)
    assert trainer.old_validation.count.sum() == trainer.validation.count.sum() > 0
    again = built('--run', run, data=None, config=None)
    assert again.plan.share == .2 and again.old_validation.count.sum() == trainer.old_validation.count.sum()
    assert built('--run', run, '--mix', prepared.folder, data=None,
                 config=None).plan.share == .2   # where it is now
    done = ran(f'train --run {run} --mix-share .4')
    assert done.code == 2 and 'a share of 0.2' in done.err   # another share is another run
    alone = built('--mix', prepared.folder, '--mix-share', 0)
    assert alone.plan.share == 0 and alone.old_validation.count.sum() > 0   # a tenth of the sentences
    old = built('--mix', corpus).plan.old.cache
    assert old.folder != prepared.folder and old.manifest['keys'] == prepared.manifest['keys']

# --- a model to start from ----------------------------------------------------------------------------------

@pytest.fixture
def base(tmp_path) -> Path:
    "The folder of a model of another size, with a voice and a speech of its own."
    own = TINY.replace(model={'gpt': {'num_layers': 3, 'dropout': .3}},
                       speech={'temperature': .25, 'top_k': 7},
                       training={'decoder': {'steps': 9}})
    for name in ('cache', 'base'): (folder := tmp_path / name).mkdir()
    (folder / 'config.yaml').write_text(own.to_yaml())
    for name in ('tokenizer.json', 'model.safetensors'): (folder / name).touch()
    return folder

def test_what_is_requested_beside_a_base_is_kept(base):
    "Its architecture, voice and speech, but for what a person sets; resuming loses nothing of that."
    with_base = lambda settings, *more: begin._with_base(base, settings, TINY, *more)
    slower = {'learning_rate': 1e-4, 'warmup_steps': 0, 'schedule': 'constant'}
    assert with_base(TINY) == TINY.replace(model={'gpt': {'num_layers': 3}},
                                           speech={'temperature': .25, 'top_k': 7},
                                           training={'gpt': slower, 'decoder': {'steps': 9}})
    wanted = TINY.replace(model={'gpt': {'dropout': .1, 'code_noise': .2}}, speech={'temperature': .5},
                          training={'decoder': {'batch_size': 3}}, data={'batch_size': 5})
    assert with_base(wanted) == wanted.replace(model={'gpt': {'num_layers': 3}}, speech={'top_k': 7},
                                               training={'gpt': slower, 'decoder': {'steps': 9}})
    other = TINY.replace(model={'gpt': {'num_layers': 5}})
    for folder, resumed in ((base, False), (base, True), (None, True)):
        with pytest.raises(UserError, match='model.gpt.num_layers = 5'):
            begin._with_base(folder, other, TINY, resumed)
    assert begin._with_base(None, other, TINY) == other   # a new model

@pytest.mark.parametrize('options, expected', [
    ([], (5e-6, 0, 'constant')), (['--finetune', 'lora'], (1e-4, 50, 'cosine')),
    (['--finetune', 'lora', '--lr', '5e-6'], (5e-6, 50, 'cosine')),
    (['--config', 'c.yaml'], (5e-6, 0, 'constant')), (['--config', 'two.yaml'], (3e-5, 7, 'constant')),
    (['--finetune', 'lora', '--config', 'three.yaml'], (5e-6, 0, 'constant')),
    (None, (1e-4, 1000, 'cosine'))])
def test_the_rate_is_that_of_what_is_trained(ran, base, monkeypatch, options, expected):
    "Unless somebody chose another; a file that holds every key, as `config create` writes it, chooses none."
    monkeypatch.chdir(base.parent)
    made = SimpleNamespace(config=XTTSConfig(), folder='cache')   # with the DVAE of a converted XTTS-v2
    monkeypatch.setattr(begin, 'Cache', lambda *given, **named: made)
    monkeypatch.setattr(begin, '_check_prepared', lambda *given: None)
    (base / 'config.yaml').write_text(XTTSConfig().to_yaml())
    Path('c.yaml').write_text(XTTSConfig.xtts_v2().to_yaml())
    Path('two.yaml').write_text('training: {gpt: {learning_rate: 3e-5, warmup_steps: 7}}')
    three = 'learning_rate: 5e-6, warmup_steps: 0, schedule: constant'   # as usual for all weights
    Path('three.yaml').write_text(f'training: {{gpt: {{{three}}}}}')
    model = [] if options is None else ['--model', str(base), *options]
    found = {row['key']: row['value'] for row
             in ran('config show --json --data cache', *model).json['settings']}
    assert tuple(found[f'training.gpt.{key}'] for key
                 in ('learning_rate', 'warmup_steps', 'schedule')) == expected

def test_settings_come_in_any_form():
    of = lambda config: begin._as_layer(config)['config']['training.gpt.steps']
    assert of({'training.gpt.steps': 7}) == of({'training': {'gpt': {'steps': 7}}}) == 7
    assert of(TINY.replace(training={'gpt': {'steps': 7}})) == 7 and begin._as_layer(None) == {}

def test_an_interval_that_is_asked_for_stays(built, home):
    "Also where it is the one that a shorter training had by itself."
    first = built('--run', home / 'r', '--val', .1, '--steps', 50, config=None).training
    again = lambda *options: built('--run', home / 'r', *options, data=None,
                                   config=None).training.validate_every
    assert first.validate_every == again() == 5 and again('--steps', 90) == 9 and again('--steps', 50) == 5
    assert again('--steps', 90, '--set', 'training.gpt.validate_every=5') == again('--steps', 120) == 5

# --- config create, and the whole ---------------------------------------------------------------------------

def test_config_create(home, ran):
    assert ran('config create c.yaml --preset tiny --json').json == {'config': 'c.yaml', 'preset': 'tiny'}
    assert XTTSConfig.load(home / 'c.yaml') == XTTSConfig.tiny()
    assert main('config', 'create') == 0 and XTTSConfig.load(home / 'config.yaml') == XTTSConfig.xtts_v2()
