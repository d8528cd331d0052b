"Runs on caches of all kinds, and what does not belong together."
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from cheap import Cheap, outcome, read_eagerly
from process import tree
from xtts_nb.data import native as data
from xtts_nb.train import runs
from xtts_nb.config import UserError
from xtts_nb.files import append_line, _PART
from xtts_nb.data.native import BatchPlan, _CodeReader, cached_batches, _reader_of
from xtts_nb.speech.listen import Listener
from xtts_nb.train.trainer import (
    checkpoints, _epochs_to_steps, _late_interrupt, _save_checkpoint, _updates_of)
from xtts_nb.train.runs import (
    _base_config, _check_made_for, held_out_share, _Mix, new_run, _Replay, _resume_run, _run_facts,
    _shared_shapes)


@pytest.fixture(scope='module')
def eager(small):
    "One block, one shape, and nothing to trace."
    return small.replace(model={'gpt': {'num_layers': 1, 'conditioning_layers': 1, 'perceiver_layers': 1,
                                        'dropout': 0.}},
                         data={'buckets': 1},
                         training={'gpt': {'steps': 2, 'warmup_steps': 0, 'log_every': 2, 'validate_every': 2,
                                   'mode': 'eager'}})

def test_a_cache_without_codes_gives_the_batches_of_one_with(prepared, runtime, small, dvae):
    plans = BatchPlan(prepared, small.data), BatchPlan(runtime, small.data, dvae=dvae)
    assert isinstance(_reader_of(plans[1]), _CodeReader)
    wrong = codes = 0
    for a, b in zip(read_eagerly(plans[0], 0, 8), cached_batches(plans[1], 0, 8), strict=True):
        assert list(a) == list(b) and all(a[k].shape == b[k].shape and a[k].dtype == b[k].dtype for k in a)
        assert all(np.array_equal(a[k], b[k])
                   for k in ('clip', 'weight', 'text', 'text_length', 'code_length'))
        assert np.allclose(a['reference'], b['reference'], atol=6e-3)
        wrong += int((a['codes'].numpy() != b['codes'].numpy()).sum())
        codes += int(a['code_length'].numpy().sum())
    assert wrong <= codes // 1000

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

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], 'ab')
fcntl.flock(file, fcntl.LOCK_EX)
print('held', flush=True)
sys.stdin.read()
"""

@pytest.mark.parametrize('known, origin, said', [
    ({}, {}, None), ({'base': '/m', 'base_sha': 's', 'val': '/v', 'val_key': 'w'},
                     {'base_sha': 's', 'val_key': 'w'}, None),
    ({'key': 'l'}, {}, 'key l, here has k'), ({'held_out': ['a']}, {}, '1 other clips'),
    ({'base': '/m', 'base_sha': 's'}, {'base_sha': 't'}, 'from /m'), ({}, {'base_sha': 's'}, 'from nothing'),
    ({'val': '/v', 'val_key': 'w'}, {}, 'on /v'), ({}, {'mix_key': 'm'}, 'no older clips')])
def test_a_run_continues_with_what_it_was_begun_with(known, origin, said):
    here = SimpleNamespace(folder='here', manifest={'key': 'k'})
    known = {'key': 'k', 'held_out': ['a', 'b']} | known
    ask = lambda: runs._check_run('run', known, here, ['b', 'a'], origin)
    if said is None: ask()
    else: pytest.raises(UserError, ask).match(said)

@pytest.mark.parametrize('wanted, said', [
    (dict(mix=_Mix(None), feed='f'), 'one device'), (dict(mix=_Mix(None), make='m'), 'one device'),
    (dict(val=SimpleNamespace(folder='other'), held_out=['a']), 'other')])
def test_what_does_not_go_together_is_refused(prepared, eager, wanted, said):
    with pytest.raises(UserError, match=said): new_run(prepared, eager, None, **wanted)
    with pytest.raises(UserError, match='share of 1'): _Replay(None, None, 1)

def test_a_run_that_another_process_trains_is_not_touched(cheap, prepared, eager, tmp_path):
    run = tmp_path / 'run'
    trainer = new_run(prepared, eager.replace(training={'gpt': {'steps': 1}}), run)
    half = run / f'half{_PART}'
    half.write_text('of the other process')
    append_line(run / 'metrics.jsonl', '{"step": 7}')
    with subprocess.Popen([sys.executable, '-c', HOLDER, run / 'lock'], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == 'held\n'
        for begin in (lambda: _resume_run(run), trainer.fit):
            with pytest.raises(UserError, match=f'{run}: another process trains here; wait'): begin()
        assert half.is_file() and (run / 'metrics.jsonl').read_text() == '{"step": 7}\n'
        other.stdin.close()
    assert _resume_run(run).fit()['steps'] == 1 and not half.exists()

def test_a_run_that_changed_since_it_was_read_is_not_trained(cheap, prepared, mini, tmp_path):
    first, second = (new_run(prepared, mini, tmp_path / 'run') for _ in range(2))
    second.fit(steps=4)
    kept = tree(tmp_path / 'run')
    with pytest.raises(UserError, match='has trained here since this one read it; begin again'):
        first.fit(steps=6)
    assert tree(tmp_path / 'run') == kept
    assert second.fit(steps=6)['steps'] == 6 and _resume_run(tmp_path / 'run').fit()['steps'] == 8

def test_a_damaged_checkpoint_is_put_aside(cheap, prepared, mini, tmp_path, capsys):
    "The one before it goes on, to the same bits; with none left, the last is named."
    whole, torn = (tmp_path / name for name in ('whole', 'torn'))
    new_run(prepared, mini, whole).fit(steps=6)
    shutil.copytree(whole, torn)
    first, last = checkpoints(torn / 'checkpoints')
    last.write_bytes(last.read_bytes()[:-1])
    trainer = _resume_run(torn)
    assert trainer.step == int(first.stem.removeprefix('step-')) == 4
    said = capsys.readouterr().err
    assert f'{last}: not readable' in said and 'resumes from the checkpoint before' in said
    assert (damaged := last.with_name(f'{last.name}.damaged')).is_file()
    trainer.fit(), _resume_run(whole).fit()
    damaged.unlink()
    last = 'step-000000008.safetensors'
    same = [{k: v for k, v in outcome(run).items() if 'step' not in k or k == last} for run in (torn, whole)]
    assert same[0] == same[1] and last in same[0]
    for path in checkpoints(torn / 'checkpoints'): path.write_bytes(b'')
    kept = tree(torn)
    with pytest.raises(UserError, match='step-000000004.safetensors: not readable'): _resume_run(torn)
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

@pytest.mark.parametrize('said, out', [('a', None), ('aaa', None), ('ab', 1), ('aaaaaab', 1)])
def test_one_sentence_is_held_out_and_one_left_to_train_on(said, out):
    cache = SimpleNamespace(clips=[{'id': str(i), 'text': t, 'speaker': 's'} for i, t in enumerate(said)])
    for share in (.05, .9):
        if out: assert len(held_out_share(cache, share)) == out
        else: pytest.raises(UserError, held_out_share, cache, share).match('same sentence')

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
    parts = {'config.yaml': other.to_yaml(), 'tokenizer.json': '{}', 'model.safetensors': ''}
    for name in parts:   # one after the other
        pytest.raises(UserError, _base_config, tmp_path, eager).match(f'no model to begin from .{name} is '
                                                                    'missing')
        (tmp_path / name).write_text(parts[name])
    lora = eager.replace(training={'gpt': {'finetune': 'lora'}})
    for settings in (eager, lora):
        assert _base_config(tmp_path, settings) == settings.replace(model={'gpt': {'num_layers': 3}})
    assert _base_config(None, eager) is eager
    pytest.raises(UserError, _base_config, None,
                  lora).match('training.gpt.finetune lora needs a model to begin '
                                                             'from')

@pytest.mark.parametrize('inside, found', [
    (None, {}), (['plan'], {}), (['lock', 'mels.npy', 'config.yaml', f'plan.0123abcd{_PART}'], {}),
    (['config.yaml'], UserError), (['plan.7.part'], UserError), (['plan', 'lock', 'thesis'], UserError),
    ({'key': 1}, {'key': 1}), ({'part': 'gpt'}, {'part': 'gpt'}), ({'part': 'decoder'}, UserError),
    ({'run_id': 'of another program'}, UserError)])
def test_what_a_folder_holds(tmp_path, inside, found):
    "A start that was cut off is made again; files of somebody else are never touched."
    run = tmp_path / 'run'
    if inside is not None: run.mkdir()
    if isinstance(inside, dict): (run / 'run.json').write_text(json.dumps(inside))
    for name in inside if isinstance(inside, list) else (): (run / name).touch()
    if found is not UserError: assert _run_facts(run) == found
    else:
        with pytest.raises(UserError) as e: _run_facts(run)
        part = inside.get('part') if isinstance(inside, dict) else None
        wanted = f'continue with xtts-nb {runs._COMMANDS[part]} --run {run}' if part else 'not .*a run'
        assert re.search(wanted, str(e.value))
        if part: assert _run_facts(run, part) == inside

def test_a_cache_must_be_made_with_the_front_end_and_fit_into_the_gpt(prepared, eager):
    longest = {'audio_codes': prepared.codes_length.max(), 'text_tokens': prepared.text_length.max()}
    for name, n in longest.items():
        _check_made_for(prepared, eager.replace(model={'gpt': {f'max_{name}': int(n)}}))
        with pytest.raises(UserError,
                           match=f'the longest clip has {n} .* more than model.gpt.max_{name} {n - 1}'):
            _check_made_for(prepared, eager.replace(model={'gpt': {f'max_{name}': int(n) - 1}}))
    with pytest.raises(UserError, match=r'other settings of model.dvae; .*\(codes 16 instead of 32\)'):
        _check_made_for(prepared, eager.replace(model={'dvae': {'codes': 16}}))

def test_who_looks_and_who_listens(prepared, eager):
    """Only where clips are held out and validation is asked for; as many rows as are computed at once,
    one shape."""
    settings = eager.replace(training={'gpt': {'grad_accum_steps': 2, 'eval_clips': 1}})
    run = new_run(prepared, settings, None, ['low-0', 'high-0'])
    assert run.run is None and isinstance(run.listen, Listener)
    assert (run.held_out.data.batch_size, len(run.held_out.shapes), run.held_out.fixed) == (2, 1, True)
    assert type(run.held_out.data.batch_size) is int and run.held_out.count.sum() == 2 and not run.plan.fixed
    for held, changes in (([], {}), (['low-0'], {'validate_every': 0})):
        silent = new_run(prepared, settings.replace(training={'gpt': changes | {'eval_clips': 0}}), None,
                         held)
        assert silent.held_out is silent.listen is None
        with pytest.raises(UserError, match='there is nothing to listen to'):
            new_run(prepared, settings.replace(training={'gpt': changes}), None, held)


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
    mixed = lambda share: _Mix(prepared, ['high-1'], share)
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
    mix = _Mix(prepared, ['high-1'], .5)
    begin = lambda mix: new_run(prepared, eager, tmp_path / 'run', ['low-0'], mix=mix)
    def feed(plan, first, last):
        "What `stream` gives, op by op."
        if plan.fixed: return read_eagerly(plan, first, last)
        turns = [plan.turn(tf.constant(n, tf.int64)) for n in range(first, last)]
        return (next(read_eagerly(plan.old if old else plan.plan, int(n), int(n) + 1)) for old, n in turns)
    trainer = begin(mix)
    trainer.feed = feed
    assert trainer.old.count.sum() == trainer.held_out.count.sum() == 1
    # what is held out of one of the two is read from neither
    assert trainer.plan.old.count.sum() == trainer.plan.count.sum() == len(prepared) - 2
    before = trainer._means_of(trainer.old)['loss']
    trainer.fit()
    log = [json.loads(line) for line in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
    assert log[0] == {'step': 0, 'val_old_loss': before}
    after = trainer._means_of(trainer.old)['loss']
    assert log[-1]['val_old_loss'] == pytest.approx(after) != before and log[-1]['val_loss'] != after
    again = _resume_run(tmp_path / 'run')
    again.feed = feed
    assert again.plan.share == .5 and again.old.count.sum() == 1 and again.step == 2
    again.training = again.training.model_copy(update={'validate_every': 0})   # the end is measured still
    again.fit(3)
    log = [json.loads(line) for line in (tmp_path / 'run/metrics.jsonl').read_text().splitlines()]
    assert [line['step'] for line in log if 'val_old_loss' in line] == [0, 2, 3]
    for other in (None, mix._replace(share=.2), mix._replace(held_out=[])):
        with pytest.raises(UserError, match='was trained with older clips in'): begin(other)

@pytest.mark.parametrize('voices, share, out', [
    (3, .25, 3), (3, .01, 1), (3, .999, 4), (2, .5, 4)])
def test_a_sentence_of_several_voices_is_held_out_in_one_of_them(voices, share, out):
    row = lambda text, voice: {'id': f'{voice}-{text}', 'text': text, 'speaker': voice}
    clips = [row(text, voice) for text in 'abcd' for voice in range(voices)]
    held = held_out_share(SimpleNamespace(clips=clips), share)
    assert len(held) == out == len(set(held))
    assert len({name[-1] for name in held}) == (out if voices == 3 else 2)
    takes = [{'id': f'{i}-{text}', 'text': text, 'speaker': 'a'} for text in 'ab' for i in range(5)]
    assert len(held_out_share(SimpleNamespace(clips=takes), .5)) == 5   # takes of one voice are no voices

