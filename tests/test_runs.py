"Runs on caches of all kinds."
import numpy as np
import pytest
import tensorflow as tf

from xtts_nb import data, runs
from xtts_nb.cache import Cache, Joined
from xtts_nb.config import UserError
from xtts_nb.data import BatchPlan, CodeReader, cached_batches, reader_of
from xtts_nb.prepare import prepare
from xtts_nb.runs import new_run, resume_run


@pytest.fixture(scope='module')
def mini(small):
    "One block, one shape, and nothing to trace."
    return small.replace(model={'gpt': {'layers': 1, 'conditioning_layers': 1, 'dropout': 0.}}, data={'buckets': 1},
                         training={'steps': 2, 'warmup_steps': 0, 'log_every': 2, 'validate_every': 2,
                                   'enable_eager_debug': True})

@pytest.fixture(scope='module')
def runtime(corpus, mini, dvae, prepared, tmp_path_factory):
    "The corpus of `prepared`, its codes left to be made."
    out = tmp_path_factory.mktemp('runtime') / 'cache'
    settings = prepared.config.replace(data={'preprocessing_mode': 'runtime'})
    prepare(corpus, out, settings, dvae, prepared.tokenizer, shard_clips=5)
    return Cache(out)

def test_a_cache_without_codes_gives_the_batches_of_one_with(prepared, runtime, small, dvae):
    plans = BatchPlan(prepared, small.data), BatchPlan(runtime, small.data, dvae=dvae)
    assert isinstance(reader_of(plans[1]), CodeReader)
    wrong = codes = 0
    for a, b in zip(*(cached_batches(plan, 0, 8) for plan in plans), strict=True):
        assert list(a) == list(b) and all(a[k].shape == b[k].shape and a[k].dtype == b[k].dtype for k in a)
        assert all(np.array_equal(a[k], b[k]) for k in ('clip', 'weight', 'text', 'text_length', 'code_length'))
        assert np.allclose(a['reference'], b['reference'], atol=6e-3)
        wrong, codes = wrong + int((a['codes'].numpy() != b['codes'].numpy()).sum()), codes + int(a['code_length'].numpy().sum())
    assert wrong <= codes // 1000

def test_without_a_dvae_it_is_said_what_to_do(runtime, small):
    with pytest.raises(UserError, match='holds no codes.*give its plan a DVAE, or prepare it with data.preprocessing_mode pre'):
        cached_batches(BatchPlan(runtime, small.data))

@pytest.mark.slow
def test_training_at_runtime_is_training_from_the_cache(prepared, runtime, mini, tmp_path):
    "Two updates, and a look at the sentences held out."
    run = lambda cache: new_run(cache, mini, tmp_path / cache.manifest['mode'], ['low-0', 'high-0'])
    one, two = (run(cache).fit() for cache in (prepared, runtime))
    assert one['loss_last'] == pytest.approx(two['loss_last'], rel=1e-3)
    assert one['best']['val_loss'] == pytest.approx(two['best']['val_loss'], rel=1e-3)
    assert resume_run(tmp_path / 'runtime').step == 2

def test_the_plan_of_a_large_corpus_is_made_once(prepared, mini, tmp_path, monkeypatch):
    new_run(prepared, mini, tmp_path / 'few')
    assert not (tmp_path / 'few' / 'plan').exists()
    monkeypatch.setattr(runs, 'LARGE', 14)
    first = new_run(prepared, mini, tmp_path / 'run')
    assert (tmp_path / 'run' / 'plan' / 'columns.json').is_file()
    monkeypatch.setattr(data, 'order_columns', None)   # would be called to make it again
    step = tf.constant(3, tf.int64)
    for a, b in zip(first.plan.pick(step), new_run(prepared, mini, tmp_path / 'run').plan.pick(step)): assert np.array_equal(a, b)

def test_a_plan_alone_is_what_a_killed_start_leaves(prepared, mini, tmp_path):
    (tmp_path / 'run' / 'plan').mkdir(parents=True)
    new_run(prepared, mini, tmp_path / 'run')
    assert (tmp_path / 'run' / 'run.json').is_file()

@pytest.mark.parametrize('gib, mapped', [(1, False), (0, True)])
def test_a_cache_larger_than_the_budget_is_mapped(prepared, mini, tmp_path, gib, mapped):
    config = mini.replace(data={'ram_budget': gib})
    assert isinstance(runs.open_cache(prepared.folder, config).mel, Joined) == mapped
    new_run(prepared, config, tmp_path / 'run')
    assert isinstance(resume_run(tmp_path / 'run').plan.cache.mel, Joined) == mapped
