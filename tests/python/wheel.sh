#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# wheel.sh SOURCE PYTHON WORK: `make wheel` for the CPU, then the wheel as somebody gets it who has a Python and nothing else: no
# compiler on the path, no variables, and every library that is loaded comes from the wheel or is glibc's. Then with the PyTorch
# of PYTHON. Exit status 77 (skipped): the tools cannot be had.
set -eu
source=$1 python=$2 work=$3
mkdir -p "$work"
rm -rf "$work/dist" "$work/venv" "$work/empty"
"$source/tools/wheel.sh" "$work/dist" "$work/wheel" "$python" OFF
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip --disable-pip-version-check -q install --no-index "$work"/dist/*.whl
mkdir -p "$work/empty"
cd "$work/empty"
alone() { env -i PATH="$work/venv/bin" HOME="$work/empty" "$@"; }
package=$(alone python -c 'import weft; print(weft.__path__[0])')

echo "- what the wheel's files load"
# $1 is a library or program of the wheel: prints the libraries it loads that are neither the wheel's nor glibc's
foreign() {
    ldd "$1" | awk '$2 == "=>" { print $1, $3 } $2 != "=>" { print $1, "" }' | while read -r name path; do
        case $name in
        libc.so.6 | libm.so.6 | libpthread.so.0 | libdl.so.2 | linux-vdso.so.1 | */ld-linux*) continue ;;
        esac
        case $(realpath -m "${path:-$name}") in
        "$(realpath "$package")"* | "$(realpath "$package/..")"/weft.libs/*) ;;
        *) echo "$1 loads $name from ${path:-nowhere}" ;;
        esac
    done
}
for file in "$package"/*.so* "$package/bin/weft" "$package"/../weft.libs/*; do
    lines=$(foreign "$file")
    [ -z "$lines" ] || { echo "$lines" >&2; exit 1; }
done
# The library once: its code is not in the extension, and a file of its name elsewhere changes nothing.
[ "$(find "$package" "$package/../weft.libs" -size +1000k | xargs -n 1 basename)" = libweft.so.0 ]
touch "$work/empty/libweft.so.0"
alone LD_LIBRARY_PATH="$work/empty" python -c 'import weft'

echo "- the program, alone"
alone weft info | grep "^weft  *$(alone python -c 'import weft; print(weft.__version__)')\$"
alone python -m weft check | tail -1
if alone python -m weft check --op no_such_operator >"$work/refused" 2>&1; then
    echo "python -m weft hides the exit status of the program" >&2
    exit 1
fi
alone weft bench --op mhc_expand --tokens 8 | tail -1
printf 'to be or not to be, that is the question\n%.0s' $(seq 200) >"$work/empty/text"
alone weft train --data "$work/empty/text" --steps 2 --layers 1 --channels 32 --heads 2 --context 32 --quiet --out "$work/empty/run"

echo "- the package, alone, and with PyTorch"
alone python -c 'import weft; assert "deepseek_v4" in weft.presets(); assert not weft.info()["cuda"]'
# PyTorch and NumPy are where the given Python has them, which may be an environment itself: what venv calls the system's packages
# are not those.
outside=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent.parent)')
echo "$outside" >"$package/../outside.pth"
alone python - <<'END'
import pathlib, sys, weft, torch, weft.torch as wt
place = pathlib.Path(weft.__file__).parent
assert place.is_relative_to(sys.prefix), place
assert (place / "py.typed").exists() and (place / "_C.abi3.so").exists(), sorted(place.iterdir())
x = torch.randn(3, 4, 8, requires_grad=True)
wt.contract(x).sum().backward()
assert torch.equal(x.grad, torch.full_like(x, 0.25))
print("installed", weft.__version__, weft.info())
END
