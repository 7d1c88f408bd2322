#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# install.sh SOURCE PYTHON WORK: `pip install .` in an environment of its own, then the package from an empty folder.
# The CPU backend alone, so that it takes a minute. Exit status 77 (skipped): the build backend cannot be had.
set -eu
source=$1 python=$2 work=$3
rm -rf "$work"
mkdir -p "$work/empty"
"$python" -m venv "$work/venv"
# PyTorch and NumPy are where the given Python has them, which may be an environment itself: what venv calls the system's packages
# are not those.
outside=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent.parent)')
echo "$outside" >"$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outside.pth"
pip="$work/venv/bin/python -m pip --disable-pip-version-check -q"
$pip download --no-deps -d "$work" 'scikit-build-core>=0.10' >/dev/null 2>&1 ||
    { echo "skipped: scikit-build-core cannot be downloaded"; exit 77; }
$pip install --config-settings=cmake.define.WEFT_CUDA=OFF "$source"
cd "$work/empty"
unset PYTHONPATH
"$work/venv/bin/python" - <<'END'
import pathlib, sys, weft, torch, weft.torch as wt
place = pathlib.Path(weft.__file__).parent
assert place.is_relative_to(sys.prefix), place
assert (place / "py.typed").exists() and (place / "_C.abi3.so").exists(), sorted(place.iterdir())
x = torch.randn(3, 4, 8, requires_grad=True)
wt.contract(x).sum().backward()
assert torch.equal(x.grad, torch.full_like(x, 0.25))
print("installed", weft.__version__, weft.info())
END
