#!/bin/sh
# Runs the tests marked `torch`, which read and write real files of PyTorch, in .venv-convert: PyTorch's CPU build beside the
# packages of .venv. requirements.lock names no PyTorch, whose default build brings gigabytes of CUDA.
# Where pip finds no CPU build, the tests are skipped, and the reason is printed.
set -eu
cd "$(dirname "$0")/.."
wanted=torch==2.13.0
python=.venv-convert/bin/python

if ! $python -c 'import torch' 2>/dev/null; then
    rm -rf .venv-convert
    if command -v uv >/dev/null 2>&1; then uv venv --quiet --seed --python .venv/bin/python .venv-convert
    else .venv/bin/python -m venv .venv-convert; fi
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    # Only the names of the packages are asked for here.
    $python -m pip install --quiet --dry-run --report .venv-convert/found.json "$wanted"
    found=$($python - <<'END'
import json
names = [p['metadata']['name'] for p in json.load(open('.venv-convert/found.json'))['install']]
print(' '.join(n for n in names if n.startswith(('nvidia', 'cuda', 'triton'))))
END
    )
    if [ -n "$found" ]; then
        rm -rf .venv-convert
        echo "Skipped: pip finds no CPU build of $wanted here, only one that brings ${found%% *} and more."
        echo "Name an index that has one: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test-torch"
        exit 0
    fi
    echo "Installing the CPU build of $wanted into .venv-convert, once."
    $python -m pip install --quiet --no-compile "$wanted"
    packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    own=$($python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$packages')" > "$own/beside.pth"
fi
exec $python -m pytest -rs -m torch "$@"
