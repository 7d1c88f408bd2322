#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a residual connection costs in a step of `weft train`: kinds in turns, medians of steps, beside the plain residual.

    bench/train_kinds.py [--weft build/weft] [--kinds residual,hc,mhc] [--rounds 3] [--steps 30] [-- options of weft train]
    bench/train_kinds.py --kinds residual,mhc -- --backend cuda --layers 12 --channels 768 --heads 12 --context 1024 --batch 16

Every run trains on this repository's documents from the first step, without validation or checkpoints. The first --skip
steps of a run are left out: memory is touched and algorithms are chosen in them. The last column is the lowest and the
highest median of a run, which says what a difference means."""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUIET = ["--quiet", "--val-every", "0", "--gain-every", "0", "--save-every", "0"]


def seconds_of(args, kind, text, out):
    command = [args.weft, "train", *QUIET, "--data", text, "--out", out, "--residual", kind, "--steps", args.steps]
    subprocess.run([str(c) for c in [*command, *args.options]], check=True)
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["seconds"] for line in lines if "loss" in line][args.skip :]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weft", default=ROOT / "build/weft")
    parser.add_argument("--kinds", default="residual,hc,mhc,mhc_single_pass")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--skip", type=int, default=5)
    parser.add_argument("options", nargs="*", help="of weft train, behind --")
    args = parser.parse_args()
    if args.steps <= args.skip:
        parser.error(f"--steps: expected more than --skip, {args.skip}, got {args.steps}")
    runs = {kind: [] for kind in args.kinds.split(",")}
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        text = work / "text.txt"
        text.write_bytes(b"".join(p.read_bytes() for p in sorted(ROOT.glob("docs/**/*.md")) + [ROOT / "README.md"]))
        for turn in range(args.rounds):
            for kind, seconds in runs.items():
                seconds.append(seconds_of(args, kind, text, work / f"{kind}-{turn}"))
    print(f"{'kind':16} {'ms':>9} {'more':>9} {'per cent':>9}   runs")
    first = None
    for kind, seconds in runs.items():
        ms = 1e3 * statistics.median(s for run in seconds for s in run)
        first = ms if first is None else first
        medians = [1e3 * statistics.median(run) for run in seconds]
        more = f"{ms - first:9.2f} {100 * (ms / first - 1):9.1f}" if ms is not first else " " * 19
        print(f"{kind:16} {ms:9.2f} {more}   {min(medians):.2f} to {max(medians):.2f}")


if __name__ == "__main__":
    main()
