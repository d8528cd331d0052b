"""Test the pages as `nbdev-test` does, sooner: TensorFlow is imported once, and compiles unoptimised.

    python dev/quick_pages.py --n-workers 2 --timing     options are those of `nbdev-test`

What the pages compile runs a few times, so that to optimise it takes longer than it saves: LLVM's passes and
the fusion emitters of XLA, and TensorFlow's rewriting of graphs. `make test-all` runs the pages as a user
does."""
import os

os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'   # as the library sets it where it is imported first
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false')

import tensorflow as tf  # noqa: E402
from nbdev.test import nbdev_test  # noqa: E402

if __name__ == '__main__':
    tf.config.optimizer.set_experimental_options({'disable_meta_optimizer': True})
    nbdev_test()
