#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# tools/check_headers.sh <cc> <c++>: every public header compiles by itself, as C11 and as C++17, and so does as C++17
# what CUDA sources will share with C.
set -eu
cc=$1
cxx=$2
cd "$(dirname "$0")/.."
flags="-Wall -Wextra -Wpedantic -Werror -fsyntax-only"
for header in include/weft/*.h; do
    header=${header#include/}
    for compiler in "$cc -std=c11 -x c" "$cxx -std=c++17 -x c++"; do
        echo "$compiler <$header>"
        # shellcheck disable=SC2086
        echo "#include <$header>" | $compiler $flags -Iinclude -
    done
done
for source in tests/headers/*.cc; do
    echo "$cxx -std=c++17 $source"
    # shellcheck disable=SC2086
    $cxx -std=c++17 $flags -Iinclude -Isrc "$source"
done
