"What a switch is worth: equal rounds, taking turns, and a verdict that knows the spread."
import pytest
import tensorflow as tf

from xtts_nb.train import switches as page
from xtts_nb.config import UserError
from xtts_nb.app.recipes import switches
from xtts_nb.sampler import CPU, GPU, Sample
from xtts_nb.train.switches import SwitchArm, _busy, bench_switch, verdict


@pytest.fixture(scope='module')
def mini(small):
    "One block, two shapes, no XLA."
    return small.replace(model={'gpt': {'layers': 1, 'conditioning_layers': 1}}, data={'buckets': 2},
                         training={'enable_xla_compilation': False})

def still():
    "A probe without a machine."
    return Sample(0., (), CPU('made up', 50., 50., 1, 2, 1))

@pytest.fixture
def light(monkeypatch):
    "A step that costs nothing."
    cheap = lambda batch, number: {'loss': tf.reduce_mean(batch['weight'])}
    monkeypatch.setattr(page, 'compile_step', lambda step, training: cheap)

def test_arms_have_the_same_clips_and_take_turns(prepared, mini, light, monkeypatch):
    begun = []
    begin = SwitchArm.begin
    monkeypatch.setattr(SwitchArm, 'begin', lambda arm: (begun.append(arm.plan.data.pad_to_fixed_length), begin(arm)))
    result = bench_switch('data.pad_to_fixed_length', prepared, mini, rounds=2, updates=5, probe=still)
    off, on = result['rows']
    assert begun == [False, True] * 3   # a warm-up and two rounds, each with a pipeline of its own
    assert off['clips'] == on['clips'] == 28 and off['updates'] >= 5 <= on['updates']   # 14 clips, twice
    assert on['positions'] > off['positions']
    assert result['configured'] is False and 'false' in result['verdict'] and off['clips_per_s'] > 0

@pytest.mark.slow
def test_arms_do_the_same_work(prepared, mini):
    result = bench_switch('training.gradient_checkpointing', prepared, mini.replace(data={'buckets': 1}), 1, 1, probe=still)
    kept, again = (row['loss'] for row in result['rows'])
    assert kept == pytest.approx(again, rel=1e-4)

@pytest.mark.slow
@pytest.mark.parametrize('key', switches())
def test_every_switch_can_be_measured(prepared, mini, key):
    result = bench_switch(key, prepared, mini.replace(data={'buckets': 1}), 1, 1, probe=still)
    assert len(result['rows']) == len(switches()[key]) and len({row['clips'] for row in result['rows']}) == 1
    if key not in ('data.reference_from', 'data.balance_speakers', 'data.balance_languages'):   # other clips or references
        assert len({round(row['loss'], 1) for row in result['rows']}) == 1

def test_what_is_no_switch_is_refused_before_anything_is_built(mini):
    with pytest.raises(UserError, match='data.batch_size: is no switch'): bench_switch('data.batch_size', None, mini)

def rows(**rates): return [{'name': n, 'clips_per_s': r, 'spread': s} for n, (r, s) in rates.items()]

@pytest.mark.parametrize('arms, now, said', [
    (rows(false=(100., .05), true=(150., .05)), 'false', 'true is 1.50 times as fast as false, which is set'),
    (rows(false=(100., .05), true=(150., .05)), 'true', 'true is set, and is 1.50 times as fast as false'),
    (rows(false=(100., .05), true=(104., .01)), 'false', 'no difference beyond the spread of the rounds; false is set'),
    (rows(a=(100., .01), b=(150., .01), c=(200., .01)), 'a', 'c is 2.00 times as fast as a, which is set'),
    (rows(a=(100., .01), b=(150., .01), c=(200., .01)), 'c', 'c is set, and is 1.33 times as fast as b')])
def test_the_verdict(arms, now, said): assert verdict(arms, now) == said

def test_utilisation_is_that_of_the_gpus_in_the_rounds_of_the_arm():
    gpu = lambda busy: GPU(0, 'card', busy, 1, 2, None, None, None)
    samples = [Sample(t, (gpu(10. * t),), CPU('made up', 99., 1., 1, 2, 1)) for t in range(10)]
    assert _busy(samples, [(1, 2), (7, 8)]) == pytest.approx(0.45) and _busy(samples, [(20, 30)]) is None
    assert _busy([still()], [(0, 1)]) == 0.5
