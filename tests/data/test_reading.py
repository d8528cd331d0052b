"Reading that is killed goes on at its step, and nothing shows that it was."
import functools
import time

import numpy as np
import pytest

from fake_dvae import Fake
from process import Forked
from reading import KINDS, digests
from xtts_nb.data.cache import Cache
from xtts_nb.data.prepare import prepare

STEPS = 60
RANDOM = np.random.default_rng(5)
MOMENTS = [(KINDS[i % 3], int(RANDOM.integers(STEPS)), float(RANDOM.uniform(0, 0.02))) for i in range(12)]


@pytest.fixture(scope='module')
def folder(corpus, small, tokenizer, straight, tmp_path_factory):
    "kind -> a cache of that kind."
    out = tmp_path_factory.mktemp('runtime') / 'cache'
    prepare(corpus, out, small.replace(data={'preprocessing_mode': 'runtime'}), Fake(), tokenizer,
            shard_clips=5)
    return lambda kind: out if kind == 'runtime' else straight

@pytest.fixture(scope='module')
def undisturbed(folder):
    return functools.cache(lambda kind: list(digests(folder(kind), kind, 0, STEPS)))

def test_streamed_batches_are_those_from_memory(undisturbed, folder):
    assert undisturbed('streamed') == undisturbed('memory') and len(set(undisturbed('memory'))) == STEPS
    assert 'codes' not in Cache(folder('runtime')).manifest['stored']

@pytest.mark.parametrize('kind, step, more', [
    pytest.param(*m, marks=[pytest.mark.slow] * (i != KINDS.index('memory'))) for i, m in enumerate(MOMENTS)])
def test_killed_at_any_moment_it_goes_on(folder, undisturbed, tmp_path, kind, step, more):
    out = tmp_path / 'digests'
    child = Forked('import reading; reading.main()', folder(kind), kind, STEPS, out)
    # a line is whole if its end is there
    lines = lambda: out.read_text().split('\n')[:-1] if out.exists() else []
    end = time.monotonic() + 60
    while child.poll() is None and len(lines()) < step and time.monotonic() < end: time.sleep(0.001)
    time.sleep(more)
    child.kill()
    child.wait()
    read = lines()
    assert len(read) >= step
    assert read + list(digests(folder(kind), kind, len(read), STEPS)) == undisturbed(kind)
