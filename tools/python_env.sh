#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# tools/python_env.sh: prints a Python that has PyTorch 2.11 or later and pytest, for the tests of the Python package.
# That is $PYTHON (python3 by default) where it has both; otherwise an environment in .venv, which is made and filled the
# first time unless WEFT_INSTALL_DEPS is 0. Prints nothing, and says why on standard error, where there is no way.
set -u
cd "$(dirname "$0")/.."

has_all() {
    "$1" - <<'END' >/dev/null 2>&1
import pytest, numpy, torch
assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
END
}

python=$(command -v "${PYTHON:-python3}") || { echo "Python tests: there is no ${PYTHON:-python3}" >&2; exit 0; }
has_all "$python" && { echo "$python"; exit 0; }
venv=$PWD/.venv
if ! has_all "$venv/bin/python"; then
    if [ "${WEFT_INSTALL_DEPS:-1}" = 0 ]; then
        echo "Python tests: there is no Python with PyTorch 2.11, NumPy and pytest, and WEFT_INSTALL_DEPS is 0" >&2
        exit 0
    fi
    echo "Installing PyTorch, NumPy and pytest in .venv for the tests of the Python package." >&2
    { "$python" -m venv "$venv" && "$venv/bin/python" -m pip -q install torch==2.13.0 numpy pytest; } >&2 ||
        { echo "Python tests: PyTorch and pytest could not be installed" >&2; exit 0; }
fi
has_all "$venv/bin/python" && echo "$venv/bin/python"
exit 0
