#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# examples/gdn_pieces_mpi.c: two and four processes, cuts at chunks and elsewhere, and pieces that do not join.
#
#     tests/gdn_pieces_mpi.sh MPIRUN PROGRAM
set -eu
mpirun=$1 program=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The arguments of each process in turn. MPI's own memory is not ours to free.
run() {
    set -- "$@"
    count=$#
    for arguments; do
        set -- "$@" : -x ASAN_OPTIONS=detect_leaks=0 -np 1 "$program" $arguments
    done
    shift $((count + 1))
    "$mpirun" --allow-run-as-root --oversubscribe "$@" >"$work/out" 2>"$work/err"
}

agree() {
    run "$@" || { cat "$work/out" "$work/err"; echo "pieces '$*' failed"; exit 1; }
    [ "$(grep -c 'are those of the whole' "$work/out")" = $# ] || { cat "$work/out"; echo "'$*' said something else"; exit 1; }
}

differ() {
    sentence=$1
    shift
    if run "$@"; then echo "pieces '$*' were taken"; exit 1; fi
    grep -qF "pieces do not join: $sentence" "$work/err" || { cat "$work/err"; echo "'$*': not the error '$sentence'"; exit 1; }
}

agree "0 64" "64 128"
agree "0 50" "50 81"
agree "0 64" "64 128" "128 192" "192 217"
agree "0 61" "61 64" "64 67" "67 90"
differ "rank 1: begin: expected 64, where rank 0 ends, got 60" "0 64" "60 128"
differ "rank 0: begin: expected 0, got 1" "1 64" "64 128"
differ "rank 1: tokens: expected at least 3, which the convolution reads, got 2" "0 64" "64 66"
differ "rank 1: value heads: expected 4 as on rank 0, got 8" "0 64" "64 128 8"
