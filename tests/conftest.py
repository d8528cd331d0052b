"""What every test shares: where TensorFlow runs, seeds, and recorded speech where the machine has some."""
import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
os.environ.setdefault('KERAS_BACKEND', 'tensorflow')
os.environ.setdefault('MPLBACKEND', 'Agg')


def pytest_configure(config):
    "Hide the GPU unless its tests were asked for; it must happen before TensorFlow is imported."
    if 'not gpu' in config.option.markexpr: os.environ['CUDA_VISIBLE_DEVICES'] = '-1'


@pytest.fixture(autouse=True)
def seeds():
    "Every test draws the same numbers, alone or in company."
    random.seed(0)
    np.random.seed(0)
    if 'keras' in sys.modules: sys.modules['keras'].utils.set_random_seed(0)


@pytest.fixture(scope='session')
def speech() -> Path:
    "The folder of recorded speech that the environment names."
    folder = os.environ.get('XTTS_NB_SPEECH')
    if not folder: pytest.skip('no recorded speech: XTTS_NB_SPEECH names no folder')
    if not Path(folder).is_dir(): pytest.fail(f'XTTS_NB_SPEECH names {folder}, which is no folder')
    return Path(folder).resolve()
