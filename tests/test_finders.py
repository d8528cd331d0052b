"How much fits and how fast to learn: the search, the trials behind it, and the commands."
import json
import time

import numpy as np
import pytest

from process import tree, xtts_nb
from xtts_nb import finders
from xtts_nb.config import UserError
from xtts_nb.finders import choices, find_batch_size, find_learning_rate, plot_learning_rate, smoothed
from xtts_nb.finetune import memory_needs, run_trial


@pytest.fixture(scope='module')
def mini(small):
    "One block, one shape, no XLA, a batch of 12."
    return small.replace(model={'gpt': {'layers': 1, 'conditioning_layers': 1}}, data={'buckets': 1, 'batch_size': 12},
                         training={'enable_xla_compilation': False})


# --- rows ----------------------------------------------------------------------------------------------------------

def test_choices_go_from_roomy_to_tight(mini):
    parts = lambda config: [(c.training.accumulation, c.training.gradient_checkpointing) for c in choices(config)]
    assert parts(mini) == [(n, on) for on in (False, True) for n in (1, 2, 3, 4, 6, 12)]
    assert parts(mini.replace(training={'accumulation': 4, 'gradient_checkpointing': True})) == [(4, True), (6, True), (12, True)]
    assert all(c.data == mini.data for c in choices(mini))   # what is learned from a batch stays

@pytest.mark.parametrize('begin', range(0, 12, 3))
@pytest.mark.parametrize('first', [0, 1, 5, 6, 11])
def test_the_first_choice_that_fits_is_found(mini, monkeypatch, first, begin):
    "Wherever the estimate says to begin, and with no more trials than the way from there."
    all_, tried = choices(mini), []
    monkeypatch.setattr(finders, 'memory_needs', lambda config, *rest: {'all': 100. - all_.index(config)})
    def trial(config, *rest):
        tried.append(all_.index(config))
        return {'seconds': 1., 'peak': 10**9} if tried[-1] >= first else None
    monkeypatch.setattr(finders, 'run_trial', trial)
    found, rows = find_batch_size(mini, 20, 12, memory=100 - begin)
    assert found == all_[first] and len(tried) == len(set(tried)) <= abs(first - begin) + 2
    assert [row['fits'] for row in rows] == [i >= first for i in tried]
    assert all(row['rows'] * row['accumulation'] == 12 for row in rows)

def test_where_nothing_fits_the_remedy_is_named(mini, monkeypatch):
    monkeypatch.setattr(finders, 'run_trial', lambda *_: None)
    with pytest.raises(UserError, match='do not suffice for one row of 20 codes and 12 text tokens; use'):
        find_batch_size(mini, 20, 12, memory=10**9)

@pytest.fixture
def sized(mini):
    gpt = {'layers': 4, 'max_text_tokens': 150, 'max_audio_codes': 250}
    return mini.replace(model={'gpt': gpt}, data={'batch_size': 16})

@pytest.mark.slow
@pytest.mark.cpu
def test_a_trial_in_too_little_memory_ends_alone(sized): assert run_trial(sized, 250, 150, memory=2 * 10**8) is None

@pytest.mark.slow
@pytest.mark.parametrize('change', [{}, {'gradient_checkpointing': True}, {'accumulation': 4}, {'finetune': 'lora'}], ids=str)
@pytest.mark.cpu
def test_the_estimate_is_near_what_is_taken(sized, change):
    settings = sized.replace(training=change)
    begun = time.monotonic()
    estimate, took = sum(memory_needs(settings, 250, 150).values()), run_trial(settings, 250, 150)
    print(change, round(estimate / 1e6), 'MB estimated,', round(took['peak'] / 1e6), 'MB taken')
    assert 0.6 < estimate / took['peak'] < 1.6 and 0 < took['seconds'] < time.monotonic() - begun


# --- rates ---------------------------------------------------------------------------------------------------------

def test_a_running_mean_forgets():
    assert np.allclose(smoothed([3.] * 7), 3) and smoothed([2.])[0] == 2
    steps = smoothed([0.] * 20 + [1.] * 20)
    assert (np.diff(steps) >= -1e-12).all() and steps[20] == pytest.approx(0.2, abs=0.01) and steps[-1] > 0.98

class Valley:
    "A trainer whose loss depends on the rate alone."
    def __init__(self, loss): self.loss, self.optimizer = loss, type('Optimizer', (), {})()
    def batches(self, first, last): return [{}] * (last - first)
    def train_step(self, batch, number): return {'loss': np.float32(self.loss(float(self.optimizer.learning_rate(number))))}

@pytest.mark.parametrize('best', [1e-5, 1e-3, 1e-1])
def test_the_suggestion_lies_below_the_lowest_loss(best):
    found = find_learning_rate(Valley(lambda rate: 1 + np.log10(rate / best)**2), high=1e3, steps=100)
    assert best < found['lowest'] < 30 * best   # the mean comes a little late
    assert found['suggestion'] == pytest.approx(found['lowest'] / 10, rel=0.5)
    assert len(found['losses']) < 100 and found['smooth'][-1] > 2 * min(found['smooth'])   # it stopped where the loss climbed
    assert len(found['rates']) == len(found['losses']) == len(found['smooth'])

def test_a_loss_that_is_no_number_ends_the_test():
    found = find_learning_rate(Valley(lambda rate: 1. if rate < 1e-3 else np.nan), steps=50)
    assert np.isfinite(found['losses']).all() and found['rates'][-1] < 1e-3
    with pytest.raises(UserError, match='not finite at a rate of 1e-07'): find_learning_rate(Valley(lambda rate: np.inf))

@pytest.mark.parametrize('low, high, steps', [(0, 1, 50), (1, 1e-3, 50), (1e-5, 1, 9)])
def test_a_range_that_is_none_is_refused(low, high, steps):
    with pytest.raises(UserError, match='are no range'): find_learning_rate(Valley(lambda rate: 1.), low, high, steps)

def test_the_picture_and_its_numbers(tmp_path):
    found = find_learning_rate(Valley(lambda rate: 1 + np.log10(rate / 1e-3)**2), steps=20)
    plot_learning_rate(found, tmp_path / 'rate.png')
    assert (tmp_path / 'rate.png').read_bytes()[1:4] == b'PNG'
    assert json.loads((tmp_path / 'rate.json').read_text()) == found


# --- the commands --------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_the_commands(prepared, mini, tmp_path):
    (tmp_path / 'a.yaml').write_text(mini.replace(data={'batch_size': 4}).to_yaml())
    asked = ['--data', prepared.folder, '--config', tmp_path / 'a.yaml']
    rate = xtts_nb('find', 'learning-rate', *asked, '--steps', 12, '--low', '1e-4', '--out', tmp_path / 'r.png', '--json')
    assert rate.code == 0 and rate.json['updates'] <= 12 and rate.json['suggestion'] > 0, rate.err
    assert {'r.png', 'r.json'} < set(tree(tmp_path)) == {'r.png', 'r.json', 'a.yaml'}
    size = xtts_nb('find', 'batch-size', *asked, '--json')
    assert size.code == 0 and size.json['training'] == {'accumulation': 1, 'gradient_checkpointing': False}, size.err
    little = xtts_nb('train', *asked, '--from', tmp_path / 'nothing', '--fit-memory', '--run', tmp_path / 'run')
    assert little.code == 2 and 'holds no model to begin from' in little.err and not (tmp_path / 'run').exists()
