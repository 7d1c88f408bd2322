#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# tests/install/run.sh <build folder> <cc> <work folder>: installs into an empty prefix and uses what is there as
# strangers would: through CMake's package, through pkg-config, and the program by itself. The tree is moved first, so
# that a path of the build machine in it would show.
set -eu
build=$1
cc=$2
work=$3
source=$(cd "$(dirname "$0")" && pwd)

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
"$cc" -std=c11 "$source/consumer.c" -o "$work/consumer_pc" $(pkg-config --cflags --libs weft) -Wl,-rpath,"$libdir"
"$work/consumer_pc"
[ "$(pkg-config --modversion weft)" = "$(basename "$(readlink -f "$libdir/libweft.so")" | sed 's/libweft\.so\.//')" ]

echo "- the program"
"$prefix/bin/weft" info
