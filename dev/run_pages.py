"""Test the pages as `nbdev-test` does, sooner: TensorFlow is imported once and compiles as in quick tests.

    python dev/run_pages.py --n-workers 2 --timing     options are those of `nbdev-test`"""
import os
import sys

import quick

SLOW = any('slow' in given.split() for given in sys.argv)   # --flags "slow cpu": other processes take part
os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'   # as the library sets it where it is imported first
quick.choose()

from nbdev.test import nbdev_test  # noqa: E402

if __name__ == '__main__':
    if SLOW: import tensorflow  # noqa: F401
    else:
        quick.leave_graphs()
        quick.keep_functions()
    nbdev_test()
