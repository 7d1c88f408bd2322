#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# tools/first_run.sh <weft> <folder of runs> <page> <backend> <when it began> [option of weft train...]: what `make run` shows.
# Trains a deep and thin model with the plain residual, with hc and with mhc, seed after seed, and writes a report of all runs.
# The first seed is always trained; another one begins where all is done within LIMIT seconds of the beginning, which is a time in
# seconds since 1970.
set -euo pipefail
weft=$1 runs=$2 page=$3 backend=$4 begun=$5
shift 5
LIMIT=165 MOST_SEEDS=5

options=(--layers 24 --channels 32 --heads 2 --context 64 --batch 8 --steps 200 --rate 3e-3 --rate-end 3e-3 --save-every 0 --quiet)
options+=(--backend "$backend")
# Sizes this small are best served by one thread a run and several runs at a time.
export OMP_WAIT_POLICY=passive
side_by_side=$(($(nproc 2>/dev/null || echo 2) / 2))
if [ "$side_by_side" -lt 1 ]; then side_by_side=1; fi
if [ "$backend" = cpu ]; then options+=(--threads 1); else side_by_side=1; fi
options+=("$@")

train() { "$weft" train "${options[@]}" --residual "$1" --seed "$2" --out "$runs/$1-$2"; }
# hc takes as long as the other two.
train_seed() {
    train hc "$1" &
    other=$!
    train residual "$1" && train mhc "$1" && wait "$other"
}

# The terminal has told everybody; what runs in the background of a script does not hear it.
trap 'kill 0' INT
rm -rf "$runs"
seed=1 longest=0
while [ "$seed" -le "$MOST_SEEDS" ]; do
    start=$(date +%s)
    if [ "$seed" -gt 1 ] && [ $((start - begun + longest)) -gt "$LIMIT" ]; then break; fi
    pids=()
    while [ "$seed" -le "$MOST_SEEDS" ] && [ "${#pids[@]}" -lt "$side_by_side" ]; do
        train_seed "$seed" &
        pids+=($!)
        seed=$((seed + 1))
    done
    for pid in "${pids[@]}"; do wait "$pid"; done
    seconds=$(($(date +%s) - start))
    if [ "$seconds" -gt "$longest" ]; then longest=$seconds; fi
    echo "residual, hc and mhc: trained with $((seed - 1)) of at most $MOST_SEEDS seeds"
done

"$weft" report --runs "$runs"/* --out "$page" >/dev/null
echo
sed -n 's/^<h1>\(.*\)<\/h1>$/\1/p' "$page" | sed 's/<sup>/^/g; s/<[^>]*>//g'
echo
echo "The figure to it is in $page"
