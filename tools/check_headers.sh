#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# tools/check_headers.sh <cc> <c++>: every public header compiles by itself, as C11 and as C++17.
set -eu
cc=$1
cxx=$2
cd "$(dirname "$0")/../include"
for header in weft/*.h; do
    for compiler in "$cc -std=c11 -x c" "$cxx -std=c++17 -x c++"; do
        echo "$compiler <$header>"
        echo "#include <$header>" | $compiler -Wall -Wextra -Wpedantic -Werror -fsyntax-only -I. -
    done
done
