#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# tools/uninstall.sh <build folder> <prefix>: removes what `cmake --install` of that build puts under the prefix (and DESTDIR), and
# the folders named weft that are then empty. What would be installed is asked of CMake: a manifest knows only the last prefix.
set -eu
build=$1
prefix=$2
[ -f "$build/CMakeCache.txt" ] || { echo "$build: expected the build that was installed, there is none" >&2; exit 1; }
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
DESTDIR=$stage cmake --install "$build" --prefix "$prefix" >/dev/null
cd "$stage"
find . ! -type d | while IFS= read -r file; do rm -f "${DESTDIR:-}/$file"; done
find . -depth -type d -name weft | while IFS= read -r folder; do
    [ ! -d "${DESTDIR:-}/$folder" ] || rmdir --ignore-fail-on-non-empty "${DESTDIR:-}/$folder"
done
