#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# tools/readme_example.sh <cc> <folder of libweft.so> <work folder>: builds and runs the first C block of README.md.
set -eu
cc=$1
lib=$2
work=$3
root=$(dirname "$0")/..
mkdir -p "$work"
# shellcheck disable=SC2016
sed -n '/^```c$/,/^```$/p' "$root/README.md" | sed -n '2,/^```$/p' | sed '$d' >"$work/example.c"
if [ ! -s "$work/example.c" ]; then
    echo "README.md has no C block" >&2
    exit 1
fi
$cc -std=c11 -Wall -Wextra -Wpedantic -Werror -I"$root/include" "$work/example.c" -o "$work/example" \
    -L"$lib" -Wl,-rpath,"$lib" -lweft -lm
"$work/example"
