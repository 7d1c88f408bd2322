#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# tests/install/run.sh <build folder> <cc> <work folder>: installs into an empty prefix and uses what is there as
# strangers would: through CMake's package, through pkg-config, and the program by itself. The tree is moved first, so
# that a path of the build machine in it would show. Then README's program, built by the commands that README and the C guide print.
set -eu
build=$1
cc=$2
work=$3
source=$(cd "$(dirname "$0")" && pwd)
root=$source/../..

rm -rf "$work"
mkdir -p "$work"
DESTDIR=$work/stage cmake --install "$build" --prefix /opt/weft >/dev/null
prefix=$work/moved
mv "$work/stage/opt/weft" "$prefix"
libdir=$(dirname "$(find "$prefix" -name libweft.so)")

echo "- a versioned shared library"
[ -L "$libdir/libweft.so" ] && [ -L "$libdir/libweft.so.0" ]
[ "$(readlink -f "$libdir/libweft.so.0")" = "$(readlink -f "$(find "$libdir" -name 'libweft.so.*.*.*')")" ]
if find "$prefix" -name '*.a' -o -name 'kernel.h' | grep .; then
    echo "internal files were installed" >&2
    exit 1
fi
if grep -rlF "$build" "$prefix"; then
    echo "files above name the build folder" >&2
    exit 1
fi

echo "- the CMake package"
cmake -S "$source" -B "$work/consumer" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_C_COMPILER="$cc" >/dev/null
cmake --build "$work/consumer" >/dev/null
"$work/consumer/consumer"

echo "- pkg-config"
PKG_CONFIG_PATH=$libdir/pkgconfig
export PKG_CONFIG_PATH
# shellcheck disable=SC2046
"$cc" -std=c11 "$source/consumer.c" -o "$work/consumer_pc" $(pkg-config --cflags --libs weft)
"$work/consumer_pc"
[ "$(pkg-config --modversion weft)" = "$(basename "$(readlink -f "$libdir/libweft.so")" | sed 's/libweft\.so\.//')" ]
unset PKG_CONFIG_PATH

echo "- the program"
"$prefix/bin/weft" info

echo "- README's program, as printed"
HOME=$work/home
export HOME
mkdir -p "$HOME/program"
# block <language>: its first block in README's section on C (c, sh), or in the guide's section on CMake
block() { section "$root/README.md" "In C" "$1"; }
section() {
    sed -n "/^## $2\$/,/^## /p" "$1" |
        awk -v want="$3" '/^```/ { on = !on && $0 == "```" want && ++k == 1; next } on'
}
guide() { section "$root/docs/guides/c.md" "Building with CMake" "$1"; }
# The tree's make, without the part that compiles: the build is there, and other tests use it.
cat >"$work/make" <<END
#!/bin/sh
exec make -C "$root" -o build BUILD="$build" "\$@"
END
chmod +x "$work/make"
# run_block <number> <where>: the commands, in the user's folder; in place of make, cc and cmake's compiler what the test was given
run_block() {
    "$2" sh >"$work/commands_$1"
    [ -s "$work/commands_$1" ] || { echo "README.md, docs/guides/c.md: no sh block for $2" >&2; exit 1; }
    sed 's/^/    $ /' "$work/commands_$1"
    (
        cd "$HOME/program"
        make() { "$work/make" "$@"; }
        cc() { command "$cc" "$@"; }
        CC=$cc
        export CC
        # shellcheck disable=SC1090
        . "$work/commands_$1"
    ) >"$work/printed_$1"
}
block c >"$HOME/program/example.c"
guide cmake >"$HOME/program/CMakeLists.txt"
run_block 1 block
run_block 2 guide
for k in 1 2; do
    tail -1 "$work/printed_$k" | grep -E ', column 0 of res sums to (1|0\.99999[0-9]*|1\.00000[0-9]*)$'
done

echo "- uninstall"
touch "$HOME/weft/include/weft/of_another.h" "$HOME/weft/lib/of_another.so"
"$work/make" uninstall PREFIX="$HOME/weft"
left=$(cd "$HOME/weft" && find . ! -type d | sort | tr '\n' ' ')
[ "$left" = "./include/weft/of_another.h ./lib/of_another.so " ] || { echo "left after uninstall: $left" >&2; exit 1; }
[ ! -e "$HOME/weft/lib/cmake/weft" ] || { echo "left after uninstall: lib/cmake/weft" >&2; exit 1; }
