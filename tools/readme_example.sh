#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# tools/readme_example.sh <cc> <folder of libweft.so> <work folder>: builds and runs the C programs of the documents: the first C
# block of README.md, and all C blocks of docs/guides/c.md one after the other.
set -eu
cc=$1
lib=$2
work=$3
root=$(dirname "$0")/..
mkdir -p "$work"

run() {
    if [ ! -s "$work/$1.c" ]; then
        echo "$2 has no C block" >&2
        exit 1
    fi
    $cc -std=c11 -Wall -Wextra -Wpedantic -Werror -I"$root/include" "$work/$1.c" -o "$work/$1" \
        -L"$lib" -Wl,-rpath,"$lib" -lweft -lm
    "$work/$1"
}

# shellcheck disable=SC2016
sed -n '/^```c$/,/^```$/p' "$root/README.md" | sed -n '2,/^```$/p' | sed '$d' >"$work/example.c"
run example README.md
# shellcheck disable=SC2016
sed -n '/^```c$/,/^```$/p' "$root/docs/guides/c.md" | sed '/^```/d' >"$work/guide.c"
run guide docs/guides/c.md
