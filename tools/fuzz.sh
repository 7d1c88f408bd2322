#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# tools/fuzz.sh <target> <seconds>: replays the kept corpus, then fuzzes for a while. New inputs go beside the target,
# in <target>.found; a crash is written there too. Words of tests/fuzz/<target>.dict are tried where there are any. To keep what
# was found: <target> -merge=1 -max_len=512 tests/fuzz/corpus/<target> <found>.
set -eu
target=$1
seconds=$2
folder=$(dirname "$0")/../tests/fuzz
name=$(basename "$target")
corpus=$folder/corpus/$name
words=$folder/$name.dict
[ -f "$words" ] || words=
found=$target.found
mkdir -p "$found"
# Of many thousand edges to tell the rare ones takes the fuzzer longer than most inputs: -entropic=0.
# What one input has freed is all that the next must not meet: more would only cost time.
export ASAN_OPTIONS="quarantine_size_mb=8:${ASAN_OPTIONS:-}"
if [ -d "$corpus" ]; then
    "$target" -runs=0 -print_final_stats=1 -artifact_prefix="$found/" "$corpus"
else
    echo "No corpus in tests/fuzz/corpus/$name yet"
    corpus=
fi
if [ "$seconds" -gt 0 ]; then
    # shellcheck disable=SC2086
    "$target" ${words:+-dict="$words"} -max_total_time="$seconds" -entropic=0 -max_len=4096 -timeout=10 -rss_limit_mb=2048 \
        -print_final_stats=1 -artifact_prefix="$found/" "$found" $corpus
fi
