"""Test the pages as `nbdev-test` does, sooner: TensorFlow is imported once and compiles as in quick tests.

    python dev/quick_pages.py --n-workers 2 --timing     options are those of `nbdev-test`

`make test-all` runs the pages as a user does."""
import os

import quick

os.environ['TF_CPP_MIN_LOG_LEVEL'] = '3'   # as the library sets it where it is imported first
quick.choose()

from nbdev.test import nbdev_test  # noqa: E402

if __name__ == '__main__':
    quick.leave_graphs()
    nbdev_test()
