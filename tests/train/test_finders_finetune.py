"How much fits and how fast to learn: the search, the trials behind it, and the commands."
import json
import time

import numpy as np
import pytest

from process import tree, xtts_nb
from xtts_nb.train import finetune as finders
from xtts_nb.config import TrainingConfig, UserError
from xtts_nb.train.finetune import (
    ExponentialRate, _trial_row, memory_settings, find_batch_size, find_learning_rate,
    memory_needs, plot_learning_rate, run_trial, smoothed)


@pytest.fixture(scope='module')
def mini(small):
    "One block, one shape, no XLA, a batch of 12."
    return small.replace(model={'gpt': {'layers': 1, 'conditioning_layers': 1}},
                         data={'buckets': 1, 'batch_size': 12},
                         training={'mode': 'graph'})


# --- rows -----------------------------------------------------------------------------------------

def test_choices_go_from_roomy_to_tight(mini):
    parts = lambda config: [(c.training.accumulation, c.training.gradient_checkpointing)
                            for c in memory_settings(config)]
    assert parts(mini) == [(n, on) for on in (False, True) for n in (1, 2, 3, 4, 6, 12)]
    begun = mini.replace(training={'accumulation': 4, 'gradient_checkpointing': True})
    assert parts(begun) == [(4, True), (6, True), (12, True)]
    assert all(c.data == mini.data for c in memory_settings(mini))   # what is learned from a batch stays

@pytest.mark.parametrize('begin', [0, 3, 6, 9, 11, 99])   # 99: no estimate fits; the tightest comes first
@pytest.mark.parametrize('first', [0, 1, 5, 6, 11])
def test_the_first_choice_that_fits_is_found(mini, monkeypatch, first, begin):
    "Wherever the estimate says to begin: on to the first that fits, or back to the last that does not."
    all_, tried, told = memory_settings(mini), [], []
    def needs(config, codes, text, rows):
        assert (codes, text, rows) == (20, 12, 4 + 2)
        return {'all': 50. - all_.index(config), 'more': 50., 'copy for a checkpoint': 0.}
    monkeypatch.setattr(finders, 'memory_needs', needs)
    def trial(config, *rest):
        assert rest == (20, 12, [(3, 7), (9, 11)], 100 - begin)
        tried.append(all_.index(config))
        return {'seconds': 1., 'peak': 10**9} if tried[-1] >= first else None
    monkeypatch.setattr(finders, 'run_trial', trial)
    found, rows = find_batch_size(mini, 20, 12, [(3, 7), (9, 11)], 100 - begin,
                                  lambda *done: told.append(done))
    at = min(begin, 11)
    assert tried == [*(range(at, first + 1) if first > at else range(at, max(first - 2, -1), -1))]
    assert found == all_[first] and [row['fits'] for row in rows] == [i >= first for i in tried]
    assert told == [(n, 12) for n in range(1, len(tried) + 1)]

def test_the_row_of_a_trial(mini):
    config = mini.replace(training={'accumulation': 4, 'gradient_checkpointing': True})
    row = {'rows': 3, 'accumulation': 4, 'gradient_checkpointing': True, 'fits': True, 'memory_gb': 1.23,
           'seconds': 0.5}
    assert str(_trial_row(config, {'peak': 1234567890, 'seconds': 0.5})) == str(row)
    assert _trial_row(config, None) == row | {'fits': False, 'memory_gb': None, 'seconds': None}

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
def test_a_trial_in_too_little_memory_ends_alone(sized):
    assert run_trial(sized, 250, 150, memory=2 * 10**8) is None

@pytest.mark.slow
@pytest.mark.parametrize('change',
                         [{}, {'gradient_checkpointing': True}, {'accumulation': 4}, {'finetune': 'lora'}],
                         ids=str)
@pytest.mark.cpu
def test_the_estimate_is_near_what_is_taken(sized, change):
    settings = sized.replace(training=change)
    begun = time.monotonic()
    needs, took = memory_needs(settings, 250, 150), run_trial(settings, 250, 150)
    estimate = sum(needs.values()) - needs['copy for a checkpoint']   # a trial saves nothing
    print(change, round(estimate / 1e6), 'MB estimated,', round(took['peak'] / 1e6), 'MB taken')
    assert 0.6 < estimate / took['peak'] < 1.6 and 0 < took['seconds'] < time.monotonic() - begun


# --- rates ----------------------------------------------------------------------------------------

def test_a_running_mean_forgets():
    assert np.allclose(smoothed([3.] * 7), 3) and smoothed([2.])[0] == 2
    steps = smoothed([0.] * 20 + [1.] * 20)
    assert (np.diff(steps) >= -1e-12).all() and steps[20] == pytest.approx(0.2, abs=0.01) and steps[-1] > 0.98

class Valley:
    "A trainer whose loss depends on the rate alone."
    training = TrainingConfig()
    def __init__(self, loss): self.loss, self.optimizer, self.steps = loss, type('Optimizer', (), {})(), 0
    def batches(self, first, last): return [{}] * (last - first)
    def train_step(self, batch, number):
        self.steps += 1
        return {'loss': np.float32(self.loss(float(self.optimizer.learning_rate(number))))}

@pytest.mark.parametrize('fall, found', [(.03, True), (.01, False)])
def test_nothing_is_suggested_where_no_rate_lowers_the_loss(fall, found, tmp_path):
    flat = find_learning_rate(Valley(lambda rate: 1 - fall * (1e-4 < rate < 1e-2)), high=1., steps=100)
    assert (flat['suggestion'] is not None) == found
    finders.plot_learning_rate(flat, tmp_path / 'a.png')
    assert (tmp_path / 'a.png').stat().st_size > 1000

@pytest.mark.parametrize('best', [1e-5, 1e-3, 1e-1])
def test_the_suggestion_lies_below_the_lowest_loss(best):
    found = find_learning_rate(Valley(lambda rate: 1 + np.log10(rate / best)**2), high=1e3, steps=100)
    assert best < found['lowest'] < 30 * best   # the mean comes a little late
    assert found['suggestion'] == pytest.approx(found['lowest'] / 10, rel=0.5)
    # it stopped where the loss climbed
    assert len(found['losses']) < 100 and found['smooth'][-1] > 2 * min(found['smooth'])
    assert len(found['rates']) == len(found['losses']) == len(found['smooth'])

def test_rates_rise_by_the_same_factor():
    rates = [float(ExponentialRate(1e-4, 1., 5)(step)) for step in range(5)]
    assert rates == pytest.approx([1e-4, 1e-3, 1e-2, 0.1, 1.], rel=1e-5)

def test_it_ends_where_the_mean_is_more_than_twice_its_lowest():
    "The same running mean in a plain loop; a flat loss of 0 goes on to the end of even the shortest range."
    trainer, told, means, mean, weight = Valley(lambda rate: 1 + np.log10(rate / 1e-3)**2), [], [], 0., 0.
    for rate in 1e-7 * 1e10**(np.arange(100) / 99):
        mean, weight = 0.8 * mean + trainer.loss(rate), 0.8 * weight + 1
        means.append(mean / weight)
        if means[-1] > 2 * min(means): break
    found = find_learning_rate(trainer, high=1e3, steps=100, progress=lambda *done: told.append(done))
    assert found['smooth'] == pytest.approx(means, rel=1e-4)
    assert told == [(n + 1, 100) for n in range(len(means))]
    assert trainer.steps == len(means)
    assert len(find_learning_rate(Valley(lambda rate: 0.), steps=10)['losses']) == 10

def test_a_loss_that_is_no_number_ends_the_test():
    trainer = Valley(lambda rate: 1. if rate < 1e-3 else np.nan)
    found = find_learning_rate(trainer, steps=50)
    assert np.isfinite(found['losses']).all() and found['rates'][-1] < 1e-3
    assert trainer.steps == len(found['losses']) + 1
    with pytest.raises(UserError, match='not finite at a rate of 1e-07'):
        find_learning_rate(Valley(lambda rate: np.inf))

@pytest.mark.parametrize('low, high, steps', [(0, 1, 50), (1, 1e-3, 50), (1, 1, 50), (1e-5, 1, 9)])
def test_a_range_that_is_none_is_refused(low, high, steps):
    with pytest.raises(UserError, match='are no range'):
        find_learning_rate(Valley(lambda rate: 1.), low, high, steps)

def test_the_picture_and_its_numbers(tmp_path):
    found = find_learning_rate(Valley(lambda rate: 1 + np.log10(rate / 1e-3)**2), steps=20)
    plot_learning_rate(found, tmp_path / 'rate.png')
    assert (tmp_path / 'rate.png').read_bytes()[1:4] == b'PNG'
    assert json.loads((tmp_path / 'rate.json').read_text()) == found


# --- the commands ---------------------------------------------------------------------------------

@pytest.mark.slow
def test_the_commands(prepared, mini, tmp_path):
    (tmp_path / 'a.yaml').write_text(mini.replace(data={'batch_size': 4}).to_yaml())
    asked = ['--data', prepared.folder, '--config', tmp_path / 'a.yaml']
    rate = xtts_nb('find', 'learning-rate', *asked, '--steps', 12, '--low', '1e-4', '--out',
                   tmp_path / 'r.png', '--json')
    assert rate.code == 0 and rate.json['updates'] <= 12 and rate.json['suggestion'] > 0, rate.err
    assert {'r.png', 'r.json'} < set(tree(tmp_path)) == {'r.png', 'r.json', 'a.yaml'}
    size = xtts_nb('find', 'batch-size', *asked, '--json')
    assert size.code == 0, size.err
    assert size.json['training'] == {'accumulation': 1, 'gradient_checkpointing': False}, size.err
    little = xtts_nb('train', *asked, '--model', tmp_path / 'nothing', '--fit-memory', '--run',
                     tmp_path / 'run')
    assert little.code == 2 and 'nothing' in little.err
    assert not (tmp_path / 'run').exists()
