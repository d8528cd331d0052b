"Fixtures of more than one file about training."
import pytest

@pytest.fixture(scope='session')
def plain(small):
    "One block, no dropout, no XLA, a constant rate."
    return small.replace(model={'gpt': {'num_layers': 1, 'conditioning_layers': 1, 'perceiver_layers': 1,
                                        'dropout': 0., 'code_noise': 0.}},
                         training={'gpt': {'learning_rate': 1e-3, 'warmup_steps': 0, 'schedule': 'constant',
                                   'mode': 'graph'}})

@pytest.fixture(scope='session')
def runtime(corpus, mini, dvae, prepared, tmp_path_factory):
    "The corpus of `prepared` for batches of one shape, its codes left to be made; to be read only."
    from xtts_nb.data.cache import Cache
    from xtts_nb.data.prepare import encode_corpus
    out = tmp_path_factory.mktemp('runtime') / 'cache'
    settings = mini.replace(data={'preprocessing_mode': 'runtime', 'buckets': 1})
    encode_corpus(corpus, out, settings, dvae, prepared.tokenizer, shard_clips=5)
    return Cache(out)

@pytest.fixture
def two_cards(monkeypatch): monkeypatch.setenv('XTTS_NB_CPU_CARDS', '2')
