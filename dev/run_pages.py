"""Test the pages as `nbdev-test` does, sooner: TensorFlow is imported once.

    python dev/run_pages.py --n-workers 2 --timing     options are those of `nbdev-test`

Without slow cells it compiles as in quick tests; with them, in `make test-all`, as for a user."""
import os
import sys

import quick

SLOW = any('slow' in given.split() for given in sys.argv)   # --flags "slow cpu"
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'   # as the library sets it where it is imported first
if not SLOW: quick.choose()

from nbdev.test import nbdev_test  # noqa: E402

if __name__ == '__main__':
    if SLOW: import tensorflow  # noqa: F401
    else: quick.leave_graphs()
    nbdev_test()
