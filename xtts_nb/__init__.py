"""XTTS, the multilingual zero-shot voice, trained in TensorFlow with the accelerator kept busy.

XTTSConfig  all settings of a model and its training      setup_tf  TensorFlow configured for this machine
prepare     a corpus as a cache                           begin     a `Trainer` of a cache or of a run
XTTS        a model: XTTS.load(folder)                    Speaker   makes a model speak
gpu_live    the utilisation of the GPU, live              diagnose  why a training is slow"""
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# For editors; at run time a name is loaded when it is first used, so that the import is instant.
if TYPE_CHECKING:
    from .config import XTTSConfig, setup_tf
    from .models.xtts import XTTS
    from .monitor.diagnose import diagnose
    from .monitor.live import gpu_live
    from .speech.generate import Speaker
    from .train.begin import begin
    from .train.caches import prepare
    from .train.trainer import Trainer

_MODULES = {'Speaker': 'speech.generate', 'Trainer': 'train.trainer', 'XTTS': 'models.xtts',
            'XTTSConfig': 'config', 'begin': 'train.begin', 'diagnose': 'monitor.diagnose', 'gpu_live': 'monitor.live',
            'prepare': 'train.caches', 'setup_tf': 'config'}
__all__ = ['Speaker', 'Trainer', 'XTTS', 'XTTSConfig', 'begin', 'diagnose', 'gpu_live', 'prepare', 'setup_tf']


def __getattr__(name: str):
    if name not in _MODULES: raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    value = globals()[name] = getattr(import_module(f'{__name__}.{_MODULES[name]}'), name)
    return value


def __dir__(): return [name for name in globals() if name.startswith('__')] + __all__
