#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# tools/python_env.sh: prints a Python that has PyTorch 2.11 or later and pytest, for the tests of the Python package.
# That is $PYTHON (python3 by default) where it has both; otherwise an environment in .venv, which is made and filled the
# first time unless WEFT_INSTALL_DEPS is 0, and gets transformers where the network allows. Prints nothing, and says why on standard error, where there is no way.
set -u
cd "$(dirname "$0")/.."

has_all() {
    "$1" - <<'END' >/dev/null 2>&1
import pytest, numpy, torch
assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
END
}

python=$(command -v "${PYTHON:-python3}") || { echo "Python tests: there is no ${PYTHON:-python3}" >&2; exit 0; }
# Tests of weft.hf need transformers too. They are skipped without it, so that nothing more than a sentence is lost.
transformers=5.22.2
has_transformers() { "$1" -c "import importlib.metadata as m; m.version('transformers')" >/dev/null 2>&1; }
say_skipped() { echo "Python tests: those of weft.hf will be skipped: $1" >&2; }

if has_all "$python"; then
    has_transformers "$python" || say_skipped "$python has no transformers ($transformers is what they are written for)"
    echo "$python"
    exit 0
fi
venv=$PWD/.venv
if ! has_all "$venv/bin/python"; then
    if [ "${WEFT_INSTALL_DEPS:-1}" = 0 ]; then
        echo "Python tests: there is no Python with PyTorch 2.11, NumPy and pytest, and WEFT_INSTALL_DEPS is 0" >&2
        exit 0
    fi
    echo "Installing PyTorch, NumPy, pytest and mypy in .venv for the tests of the Python package." >&2
    { "$python" -m venv "$venv" && "$venv/bin/python" -m pip -q install torch==2.13.0 numpy pytest mypy; } >&2 ||
        { echo "Python tests: PyTorch and pytest could not be installed" >&2; exit 0; }
fi
has_all "$venv/bin/python" || exit 0
if ! has_transformers "$venv/bin/python"; then
    if [ "${WEFT_INSTALL_DEPS:-1}" = 0 ]; then
        say_skipped "there is no transformers, and WEFT_INSTALL_DEPS is 0"
    else
        echo "Installing transformers in .venv for the tests of weft.hf." >&2
        "$venv/bin/python" -m pip -q --retries 1 --timeout 20 install "transformers==$transformers" >&2 ||
            say_skipped "transformers could not be installed"
    fi
fi
echo "$venv/bin/python"
exit 0
