"Runs on caches of all kinds, and their folders: what does not belong together is refused."
import fcntl
import json
import os
import re
import shutil
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from cheap import Cheap, HELD, lines_of, outcome, read_eagerly
from process import tree
from xtts_nb.app.cli_train import _forgotten
from xtts_nb.config import UserError
from xtts_nb.data import native as data
from xtts_nb.data.cache import Cache
from xtts_nb.data.native import BatchPlan
from xtts_nb.data.prepare import encode_corpus
from xtts_nb.files import append_line, PART, read_tensors
from xtts_nb.models.dvae import DVAE
from xtts_nb.speech.listen import Listener
from xtts_nb.train import runs
from xtts_nb.train.begin import begin
from xtts_nb.train.runs import (
    _base_config, export_run, held_out_share, Mix, new_run, _Replay, run_facts, _shared_shapes)
from xtts_nb.train.trainer import (
    checkpoints, _epochs_to_steps, _late_interrupt, _save_checkpoint, _updates_of)

@pytest.fixture(scope='module')
def eager(mini):
    "One block, one shape, and nothing to trace."
    return mini.replace(model={'gpt': {'dropout': 0.}}, data={'buckets': 1}, training={'gpt': {
        'steps': 2, 'warmup_steps': 0, 'validate_every': 2, 'mode': 'eager'}})

def test_the_plan_of_a_large_corpus_is_made_once(prepared, eager, tmp_path, monkeypatch):
    new_run(prepared, eager, tmp_path / 'few')
    assert not (tmp_path / 'few' / 'plan').exists()
    monkeypatch.setattr(runs, '_LARGE_CACHE', 14)
    first = new_run(prepared, eager, tmp_path / 'run')
    assert (tmp_path / 'run' / 'plan' / 'columns.json').is_file()
    monkeypatch.setattr(data, '_order_columns', None)   # would be called to make it again
    step = tf.constant(3, tf.int64)
    for a, b in zip(first.plan.pick(step), new_run(prepared, eager, tmp_path / 'run').plan.pick(step)):
        assert np.array_equal(a, b)

@pytest.mark.parametrize('wanted, said', [
    (dict(mix=Mix(None), feed='f'), 'one device'), (dict(mix=Mix(None), make='m'), 'one device'),
    (dict(val_cache=SimpleNamespace(folder='other'), held_out=['a']), 'other')])
def test_what_does_not_go_together_is_refused(prepared, eager, wanted, said):
    with pytest.raises(UserError, match=said): new_run(prepared, eager, None, **wanted)
    with pytest.raises(UserError, match='share of 1'): _Replay(None, None, 1)

def test_a_run_that_another_process_trains_is_not_touched(cheap, prepared, eager, tmp_path):
    run = tmp_path / 'run'
    trainer = new_run(prepared, eager.replace(training={'gpt': {'steps': 1}}), run)
    half = run / f'half{PART}'
    half.write_text('of the other process')
    append_line(run / 'metrics.jsonl', '{"step": 7}')
    with open(run / 'lock', 'ab') as other:
        fcntl.flock(other, fcntl.LOCK_EX)   # a lock belongs to who opened the file
        for train in (lambda: begin(run=run), trainer.fit):
            with pytest.raises(UserError, match=f'{run}: another process trains here; wait'): train()
        assert half.is_file() and (run / 'metrics.jsonl').read_text() == '{"step": 7}\n'
    assert begin(run=run).fit()['steps'] == 1 and not half.exists()

def test_a_run_that_changed_since_it_was_read_is_not_trained(cheap, prepared, mini, tmp_path):
    first, second = (new_run(prepared, mini, tmp_path / 'run') for _ in range(2))
    second.fit(steps=4)
    kept = tree(tmp_path / 'run')
    with pytest.raises(UserError, match='has trained here since this one read it; begin again'):
        first.fit(steps=6)
    assert tree(tmp_path / 'run') == kept
    assert second.fit(steps=6)['steps'] == 6 and begin(run=tmp_path / 'run').fit()['steps'] == 8

def test_a_damaged_checkpoint_is_put_aside(cheap, prepared, mini, tmp_path, capsys):
    "The one before it goes on, to the same bits; with none left, the last is named."
    whole, torn = (tmp_path / name for name in ('whole', 'torn'))
    new_run(prepared, mini, whole).fit(steps=6)
    shutil.copytree(whole, torn)
    first, last = checkpoints(torn / 'checkpoints')
    last.write_bytes(last.read_bytes()[:-1])
    trainer = begin(run=torn)
    assert trainer.step == int(first.stem.removeprefix('step-')) == 4
    said = capsys.readouterr().err
    assert f'{last}: not readable' in said and 'resumes from the checkpoint before' in said
    assert (damaged := last.with_name(f'{last.name}.damaged')).is_file()
    trainer.fit(), begin(run=whole).fit()
    damaged.unlink()
    last = 'step-000000008.safetensors'
    same = [{k: v for k, v in outcome(run).items() if 'step' not in k or k == last} for run in (torn, whole)]
    assert same[0] == same[1] and last in same[0]
    for path in checkpoints(torn / 'checkpoints'): path.write_bytes(b'')
    kept = tree(torn)
    with pytest.raises(UserError, match='step-000000004.safetensors: not readable'): begin(run=torn)
    assert tree(torn) == kept

def test_an_update_that_is_done_is_counted(prepared, mini, tmp_path, monkeypatch):
    "Ctrl-C while the device computes: in a notebook, `fit` goes on with the update that follows."
    class Pressed(Cheap):
        def compiled_step(self):
            step = super().compiled_step()
            def pressed(batch, number):
                result = step(batch, number)
                if int(number) == 3 and not done: done.append(os.kill(os.getpid(), signal.SIGINT))
                return result
            return pressed
    done, before = [], signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        plain = new_run(prepared, mini, tmp_path / 'plain', make=Cheap)
        plain.fit(steps=8)
        run = new_run(prepared, mini, tmp_path / 'run', make=Pressed)
        with pytest.raises(KeyboardInterrupt): run.fit(steps=8)
        assert run.step == int(run.optimizer.iterations) == 4 and done
        run.fit(steps=8)
        assert int(run.optimizer.iterations) == 8
        assert np.array_equal(run.xtts.gpt.final_norm.beta.numpy(), plain.xtts.gpt.final_norm.beta.numpy())
        with pytest.raises(KeyboardInterrupt), _late_interrupt():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0)
            done.append('late')
            os.kill(os.getpid(), signal.SIGINT)   # the second acts at once
            time.sleep(1)
            done.append('never')
        assert done[1:] == ['late'] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally: signal.signal(signal.SIGINT, before)

def test_what_is_held_out_of_one_cache_is_not_read_from_the_other():
    "A sentence wholly held out in no voice; one that other voices read as well, not in the same voice."
    def part(voices, *held):
        clips = [{'text': text, 'speaker': voice} for text in 'ab' for voice in voices]
        return SimpleNamespace(clips=clips), np.array([f"{c['text']}{c['speaker']}" in held for c in clips])
    left = lambda *parts: [[c['text'] + c['speaker'] for c, out in zip(cache.clips, mask) if out]
                           for (cache, _), mask in zip(parts, runs._kept_apart(parts))]
    assert left(part('xyz', 'ax'), part('xw')) == [['ax'], ['ax']]
    assert left(part('x', 'ax'), part('yw', 'by')) == [['ax'], ['ay', 'aw', 'by']]

# --- what belongs together ------------------------------------------------------------------------

def test_the_architecture_comes_from_the_base_and_the_rest_from_the_run(eager, tmp_path):
    other = eager.replace(model={'gpt': {'num_layers': 3, 'dropout': 0.2, 'code_noise': 0.3}},
                          training={'gpt': {'steps': 99}}, data={'seed': 3}, speech={'reference_seconds': 7.})
    (tmp_path / 'config.yaml').write_text(other.to_yaml())
    for name in ('tokenizer.json', 'model.safetensors'):
        pytest.raises(UserError, _base_config, tmp_path, eager).match(f'begin from .{name} is missing')
        (tmp_path / name).touch()
    lora = eager.replace(training={'gpt': {'finetune': 'lora'}})
    for settings in (eager, lora):
        assert _base_config(tmp_path, settings) == settings.replace(model={'gpt': {'num_layers': 3}})
    assert _base_config(None, eager) is eager
    pytest.raises(UserError, _base_config, None, lora).match('finetune lora needs a model to begin from')

@pytest.mark.parametrize('inside, found', [
    (None, {}), (['plan'], {}), (['lock', 'mels.npy', 'config.yaml', f'plan.0123abcd{PART}'], {}),
    (['config.yaml'], UserError), (['plan.7.part'], UserError), (['plan', 'lock', 'thesis'], UserError),
    ({'key': 1}, {'key': 1}), ({'part': 'gpt'}, {'part': 'gpt'}), ({'part': 'decoder'}, UserError),
    ({'run_id': 'of another program'}, UserError)])
def test_what_a_folder_holds(tmp_path, inside, found):
    "A start that was cut off is made again; files of somebody else are never touched."
    run = tmp_path / 'run'
    if inside is not None: run.mkdir()
    if isinstance(inside, dict): (run / 'run.json').write_text(json.dumps(inside))
    for name in inside if isinstance(inside, list) else (): (run / name).touch()
    if found is not UserError: assert run_facts(run) == found
    else:
        with pytest.raises(UserError) as e: run_facts(run)
        part = inside.get('part') if isinstance(inside, dict) else None
        wanted = f'continue with xtts-nb {runs._COMMANDS[part]} --run {run}' if part else 'not .*a run'
        assert re.search(wanted, str(e.value))
        if part: assert run_facts(run, part) == inside

def test_who_looks_and_who_listens(prepared, eager):
    """Only where clips are held out and validation is asked for; as many rows as are computed at once,
    one shape."""
    settings = eager.replace(training={'gpt': {'grad_accum_steps': 2, 'eval_clips': 1}})
    run = new_run(prepared, settings, None, ['low-0', 'high-0'])
    assert run.run is None and isinstance(run.listener, Listener)
    assert type((plan := run.validation).data.batch_size) is int and not run.plan.fixed
    assert (plan.data.batch_size, len(plan.shapes), plan.fixed, plan.count.sum()) == (2, 1, True, 2)
    for held, changes in (([], {}), (['low-0'], {'validate_every': 0})):
        silent = new_run(prepared, settings.replace(training={'gpt': changes | {'eval_clips': 0}}), None,
                         held)
        assert silent.validation is silent.listener is None
        with pytest.raises(UserError, match='there is nothing to listen to'):
            new_run(prepared, settings.replace(training={'gpt': changes}), None, held)

# --- a run and its folder -------------------------------------------------------------------------

@pytest.fixture(scope='module')
def second(prepared, corpus, dvae, tmp_path_factory):
    "Four clips as a cache of their own, made with the same encoder and tokenizer."
    folder = tmp_path_factory.mktemp('second')
    shutil.copytree(corpus, folder / 'corpus')
    kept = (folder / 'corpus' / 'metadata.csv').read_text(encoding='utf-8').splitlines()[:4]
    (folder / 'corpus' / 'metadata.csv').write_text('\n'.join(kept) + '\n', encoding='utf-8')
    encode_corpus(folder / 'corpus', folder / 'cache', prepared.config, dvae, prepared.tokenizer)
    return Cache(folder / 'cache')

@pytest.fixture(scope='module')
def other(prepared, second, small):
    "The same clips as a cache, made with another encoder."
    dvae, home = DVAE(small), second.folder.parent
    dvae.mel_stats.assign(np.full(80, 4.))
    encode_corpus(home / 'corpus', home / 'other', prepared.config, dvae, prepared.tokenizer)
    return Cache(home / 'other')

def test_what_does_not_fit_is_refused_and_changes_nothing(cheap, prepared, second, other, mini, tmp_path):
    run, of = tmp_path / 'run', lambda **model: mini.replace(model=model)
    longest = int(prepared.text_length.max())
    new_run(prepared, mini, run).fit(steps=4)
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine/thesis').write_text('mine')
    before = tree(tmp_path)
    for given, words in (
            ((other, mini, run), 'was trained on the cache with key'), ((second, mini, run), 'with key'),
            ((prepared, of(gpt={'num_layers': 2}), run), 'another model'),
            ((prepared, of(gpt={'hidden_dim': 32, 'num_heads': 1}), run), 'has shape'),
            ((prepared, of(gpt={'max_text_tokens': longest - 1}), tmp_path / 'new'), f'has {longest} text'),
            ((prepared, of(audio={'f_max': 7000.}), tmp_path / 'new'), 'settings of model.audio'),
            ((prepared, of(dvae={'codes': 16}), tmp_path / 'new'), 'settings of model.dvae'),
            ((prepared, mini, tmp_path / 'mine'), 'not a run'),
            ((prepared, mini, tmp_path / 'new', ['nobody']), 'no clip nobody')):
        with pytest.raises(UserError, match=words): new_run(*given)
    pytest.raises(UserError, begin, run=tmp_path / 'mine').match('holds no run')
    pytest.raises(UserError, export_run, run, tmp_path / 'out', best=True).match('no best model')
    pytest.raises(UserError, export_run, run, run).match('already holds something')
    assert tree(tmp_path) == before
    newest = checkpoints(run / 'checkpoints')[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    with pytest.raises(UserError, match=newest.name): begin(run=run)

def test_a_cache_that_is_gone_is_named(cheap, prepared, mini, tmp_path):
    shutil.copytree(prepared.folder, tmp_path / 'cache')
    new_run(Cache(tmp_path / 'cache'), mini, tmp_path / 'run').fit(steps=2)
    shutil.rmtree(tmp_path / 'cache')
    with pytest.raises(UserError, match=str(tmp_path / 'cache')): begin(run=tmp_path / 'run')

def test_held_out_clips_are_neither_trained_on_nor_heard(cheap, prepared, mini, tmp_path):
    out = {i for i, c in enumerate(prepared.clips) if c['id'] in HELD}
    new_run(prepared, mini, tmp_path / 'run', HELD).fit(steps=2)
    plan = begin(run=tmp_path / 'run').plan   # also after a resume
    clips, references, pick = set(), set(), tf.function(plan.pick)
    for step in range(10 * plan.steps_per_epoch):
        _, clip, other, _, _ = pick(tf.constant(step, tf.int64))
        clips |= set(clip.numpy().tolist())
        references |= set(other.numpy().tolist())
    assert len(out) == 3 and clips == references == set(range(len(prepared))) - out

def test_validation_on_a_cache_of_its_own(cheap, prepared, second, other, mini, tmp_path):
    config = mini.replace(training={'gpt': {'validate_every': 2, 'steps': 2}})
    run = new_run(prepared, config, tmp_path / 'run', val_cache=second)
    assert run.validation.cache is second and run.validation.count.sum() == 4
    assert run.plan.count.sum() == len(prepared)
    run.fit()
    assert 'val_loss' in lines_of(tmp_path / 'run')[-1]
    again = begin(run=tmp_path / 'run')
    assert again.validation.cache.folder == second.folder and again.validate() == run.validate()
    for known in ({}, {'held_out': ['low-0']}, {'val': prepared}):
        with pytest.raises(UserError, match='choose another folder'):
            new_run(prepared, config, tmp_path / 'run', **known)
    room = config.replace(model={'gpt': {'max_audio_codes': int(second.codes_length.max())}})
    for given, words in (((prepared, config, 'new', (), None, other), '--dvae'),
                         ((prepared, config, 'new', ['low-0'], None, second), 'give one of them'),
                         ((second, room, 'new', (), None, prepared), f'{prepared.folder}: the longest clip')):
        with pytest.raises(UserError, match=words): new_run(*given[:2], tmp_path / given[2], *given[3:])
    assert not (tmp_path / 'new').exists()

def test_a_share_of_the_sentences_is_held_out_in_every_voice(prepared):
    few, more = held_out_share(prepared, 0.01), held_out_share(prepared, 0.5)
    text = {c['id']: c['text'] for c in prepared.clips}
    sentences = {text[i] for i in more}
    assert few and set(few) < set(more) and len(sentences) == round(0.5 * len(set(text.values())))
    assert set(more) == {i for i, t in text.items() if t in sentences}
    for share in (0, 1): pytest.raises(UserError, held_out_share, prepared, share)

def test_the_command_exports_either_model(given, prepared, mini, tmp_path, ran):
    run, moved = tmp_path / 'run', 'gpt/final_norm/beta'   # by the step of these runs
    new_run(prepared, mini.replace(training={'gpt': {'validate_every': 2}}), run, HELD).fit()
    written = []
    for flags in ('', '--best'):
        out = tmp_path / f'out{flags}'
        done = ran(f'convert to-model {flags} --json --model', run, out)
        assert done.json == {'out': str(out), 'bytes': (out / 'model.safetensors').stat().st_size}
        wanted = dict(read_tensors((run / 'best' if flags else run) / 'model.safetensors'))
        written.append(dict(read_tensors(out / 'model.safetensors')))
        assert written[-1].keys() == wanted.keys()
        assert all(np.array_equal(array, wanted[name]) for name, array in written[-1].items())
    assert not np.array_equal(written[0][moved], written[1][moved])

# --- older clips beside the new ones ------------------------------------------------------------------------

def test_older_clips_come_between_the_new_ones(prepared, eager):
    "Each keeps its own order, and a stream may begin anywhere."
    new, old = (BatchPlan(prepared, eager.data.model_copy(update={'seed': seed})) for seed in (0, 5))
    replay, clips = _Replay(new, old, .4), lambda batches: [b['clip'].numpy().tolist() for b in batches]
    kinds = [bool(replay.turn(tf.constant(n, tf.int64))[0]) for n in range(10)]
    assert kinds == [False, False, True, False, True] * 2
    parts = {False: clips(read_eagerly(new, 0, 6)), True: clips(read_eagerly(old, 0, 4))}
    read, found = {kind: iter(part) for kind, part in parts.items()}, clips(replay.stream(0, 10))
    assert found == [next(read[kind]) for kind in kinds] and clips(replay.stream(3, 7)) == found[3:7]
    assert parts[False][:4] != parts[True]
    assert replay.names(2) == old.names(0) != new.names(2) == replay.names(3)
    assert replay.cache is prepared and replay.data is new.data

@pytest.mark.parametrize('share', [0, .3, .44, .84, .85, .9])
@pytest.mark.parametrize('batches, epochs', [(1, 1), (7, 5)])
def test_epochs_are_over_when_each_new_clip_was_read(share, batches, epochs):
    replay = _Replay(SimpleNamespace(steps_per_epoch=batches), None, share)
    older = replay.turn(tf.range(3000, dtype=tf.int64))[0].numpy()
    new = lambda n: int((~older[:n]).sum())
    done = replay.updates(epochs)
    assert new(done) == epochs * batches > new(done - 1) and replay.steps_per_epoch == replay.updates(1)
    training = SimpleNamespace(epochs=epochs, model_copy=lambda update: update)
    assert _epochs_to_steps(training, replay) == {'steps': done}

def test_the_updates_of_a_model(tmp_path):
    "Of the newest checkpoint, and of the best model by the file beside it."
    best = tmp_path / 'best'
    best.mkdir()
    assert _updates_of(tmp_path) is None and _updates_of(best) is None
    for step in (4, 6): _save_checkpoint(tmp_path / 'checkpoints', step, {'a': np.zeros(1)})
    (best / 'best.json').write_text('{"step": 5, "val_loss": 1.0}')
    assert _updates_of(tmp_path) == 6 and _updates_of(best) == 5

def test_caches_share_the_shapes_of_their_batches(prepared, eager, monkeypatch):
    "A step is compiled once for each shape; the clips of one cache need not come in all of them."
    config = eager.replace(data={'batch_size': 1, 'buckets': 3})
    order = np.argsort(prepared.codes_length)
    short, long = (~np.isin(np.arange(len(prepared)), some) for some in (order[:4], order[4:]))   # not read
    monkeypatch.setattr(runs, '_kept_apart', lambda parts: [long, short])
    mixed = lambda share: Mix(prepared, ['high-1'], share)
    plans = lambda share: new_run(prepared, config, None, ['low-0'], mix=mixed(share)).plan
    shapes, both = _shared_shapes([(prepared, long, .6), (prepared, short, .4)], config.data), plans(.4)
    assert len(shapes) == 3 and both.old.shapes == shapes[:1] and both.plan.shapes == shapes[1:]
    alone = BatchPlan(prepared, config.data, np.flatnonzero(~long)).shapes
    assert plans(0).plan.shapes == alone != both.plan.shapes   # no older clip is read
    most = [_shared_shapes([(prepared, long, 1 - share), (prepared, short, share)], config.data)
            for share in (1e-6, 1 - 1e-6)]
    assert most[0] != most[1] and most[0][1:] != most[1][1:]   # those of what is read more often
    nothing = prepared, np.ones(len(prepared), bool), .5
    assert _shared_shapes([nothing], config.data) is None
    assert _shared_shapes([nothing, (prepared, long, .5)], config.data) == alone
    assert _shared_shapes([], config.data.model_copy(update={'pad_to_fixed_length': True})) is None

def test_what_is_forgotten_is_measured(prepared, eager, tmp_path):
    "Before the first update, and with each validation; a resumed run is the same one."
    mix = Mix(prepared, ['high-1'], .5)
    start = lambda mix: new_run(prepared, eager, tmp_path / 'run', ['low-0'], mix=mix)
    def feed(plan, first, last):
        "What `stream` gives, op by op."
        if plan.fixed: return read_eagerly(plan, first, last)
        turns = [plan.turn(tf.constant(n, tf.int64)) for n in range(first, last)]
        return (next(read_eagerly(plan.old if old else plan.plan, int(n), int(n) + 1)) for old, n in turns)
    trainer = start(mix)
    trainer.feed = feed
    assert trainer.old_validation.count.sum() == trainer.validation.count.sum() == 1
    # what is held out of one of the two is read from neither
    assert trainer.plan.old.count.sum() == trainer.plan.count.sum() == len(prepared) - 2
    before = trainer._means_of(trainer.old_validation)['loss']
    trainer.fit()
    log = [json.loads(line) for line in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
    assert log[0] == {'step': 0, 'val_old_loss': before}
    after = trainer._means_of(trainer.old_validation)['loss']
    assert log[-1]['val_old_loss'] == pytest.approx(after) != before and log[-1]['val_loss'] != after
    again = begin(run=tmp_path / 'run')
    again.feed = feed
    assert again.plan.share == .5 and again.old_validation.count.sum() == 1 and again.step == 2
    again.training = again.training.model_copy(update={'validate_every': 0})   # the end is measured still
    again.fit(3)
    log = [json.loads(line) for line in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in log if 'val_old_loss' in line] == [0, 2, 3]
    assert _forgotten(again) == {'before': before, 'after': log[-1]['val_old_loss']}
    assert again.fit(0)['steps'] == 3
    for other in (None, mix._replace(share=.2), mix._replace(held_out=[])):
        with pytest.raises(UserError, match='was trained with older clips in'): start(other)

@pytest.mark.parametrize('texts, voices, share, clips, sentences', [
    ('abcd', 'xyz', .25, 3, 3), ('abcd', 'xyz', .01, 1, 1), ('abcd', 'xyz', .999, 4, 4),
    ('abcdabcd', 'xyz', .25, 6, 3),   # two takes of each
    ('abcd', 'xy', .5, 4, 2), ('aaaaabbbbb', 'x', .5, 5, 1),   # takes of one voice are no voices
    ('ab', 'x', .05, 1, 1), ('aaaaaab', 'x', .9, 1, 1), ('a', 'x', .05, 0, 0), ('aaa', 'x', .9, 0, 0)])
def test_a_sentence_of_several_voices_is_held_out_in_one_of_them(texts, voices, share, clips, sentences):
    rows = [{'id': f'{i}-{voice}-{text}', 'text': text, 'speaker': voice}
            for i, text in enumerate(texts) for voice in voices]
    cache = SimpleNamespace(clips=rows)
    if not clips:
        with pytest.raises(UserError, match='same sentence'): held_out_share(cache, share)
        return
    held = held_out_share(cache, share)
    assert len(held) == clips == len(set(held)) and len({name[-1] for name in held}) == sentences
    said = lambda out: {(r['text'], r['speaker']) for r in rows if (r['id'] in held) is out}
    assert not said(True) & said(False)
