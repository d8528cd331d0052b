#!/bin/sh
# Makes .venv with the locked packages and this repository in it; safe to run again at any time.
# Uses uv where it is installed, Python's own venv and pip where not. PYTHON=... names the interpreter.
set -eu
cd "$(dirname "$0")/.."

suits='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
python=
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    if "$candidate" -c "$suits" 2>/dev/null; then
        python=$("$candidate" -c 'import sys; print(sys.executable)')
        break
    fi
done
if [ -z "$python" ]; then
    echo "${PYTHON:-This machine} offers no Python 3.11, 3.12 or 3.13: install one, or name one with make PYTHON=/path/to/python3." >&2
    exit 2
fi

if command -v uv >/dev/null 2>&1; then with=uv; else with=pip; fi
if ! .venv/bin/python -c '' 2>/dev/null; then
    echo "Making .venv with $with for $("$python" --version)."
    rm -rf .venv
    if [ $with = uv ]; then
        uv venv --quiet --seed --no-python-downloads --python "$python" .venv
    elif ! "$python" -m venv .venv; then
        rm -rf .venv
        echo "$python cannot make a virtual environment: install its venv module (python3-venv on Debian), or uv." >&2
        exit 2
    fi
fi

echo "Installing the packages of requirements.lock into .venv with $with: about a minute, once."
if [ $with = uv ]; then
    uv pip install --quiet --python .venv/bin/python -r requirements.lock
    uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation -e .
else
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null
    # Not compiled, as uv leaves it too: most modules are never imported, and the others are compiled below.
    .venv/bin/python -m pip install -qq --no-compile -r requirements.lock
    .venv/bin/python -m pip install -qq --no-compile --no-deps --no-build-isolation -e .
fi
# Python finds a folder `xtts_nb` beside a script before what pip installs from a checkout, unless the path has this.
.venv/bin/python -c 'import os, sysconfig; print(os.getcwd(), file=open(sysconfig.get_path("purelib") + "/xtts_nb_checkout.pth", "w"))'
# Once here, and not in each of the processes with which the tests begin.
TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=-1 PYTHONDONTWRITEBYTECODE= \
    .venv/bin/python -c 'import tensorflow, keras, matplotlib.pyplot, pytest, nbdev.test' 2>/dev/null || true
touch .venv/.installed
