#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two builds on one GPU in one sitting: is the new one slower anywhere?

    tools/bench_against.py OLD NEW --suite te [--rounds 2] [--seconds 0.2] [--over 20] [--slower 0.02]

OLD and NEW are build folders. Each round runs the suite of tools/gpu_tasks.py in both, in turns (old new, new old, ...), so a
clock that drifts disturbs both alike. A row's time in a build is the least of its medians. Rows of at most `--over`
microseconds measure the launch and do not count. Prints a JSON line for each row that is slower by more than `--slower`, then
one for the suite. Exit status: 0 none is slower, 1 some are, 2 it could not be run."""

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_tasks import SUITES, Build, Unusable, run  # noqa: E402

NAMES = ("op", "pass", "tokens", "channels", "streams", "dtype", "layout", "preset", "batch", "steps", "heads", "case")


def times(build, suite, seconds):
    """Microseconds by row. Rows that are named alike are told apart by their order."""
    command = [str(build.weft), "bench", "--backend", "cuda", "--json", "--seconds", str(seconds), *SUITES[suite]]
    status, text, _ = run(command, build.env)
    if status != 0:
        raise Unusable(f"{' '.join(command)}: exit status {status}\n{text[-600:]}")
    found = {}
    for row in (json.loads(line) for line in text.splitlines() if line.startswith("{")):
        name = tuple((name, row[name]) for name in NAMES if name in row)
        number = sum(known[:-1] == name for known in found)
        found[(*name, ("number", number))] = row["us"]
    return found


def compare(old, new, options):
    """(lines of slower rows, line of the suite)."""
    least = [{}, {}]
    for turn in range(options.rounds):
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            for name, us in times((old, new)[side], options.suite, options.seconds).items():
                least[side][name] = min(us, least[side].get(name, us))
    both = [name for name in least[0] if name in least[1] and max(least[0][name], least[1][name]) > options.over]
    ratios = {name: least[1][name] / least[0][name] for name in both}
    slower = [
        {**dict(name), "us_old": least[0][name], "us_new": least[1][name], "ratio": round(ratio, 4)}
        for name, ratio in ratios.items()
        if not ratio <= 1 + options.slower
    ]
    only = len(least[0].keys() ^ least[1].keys())
    last = {
        "rows": len(both),
        "only_in_one": only,
        "slower": len(slower),
        "worst": round(max(ratios.values(), default=0), 4),
        "median": round(statistics.median(ratios.values()), 4) if ratios else 0,
    }
    return slower, last


def main():
    parser = argparse.ArgumentParser(description="Compares the speed of two builds on one GPU.")
    parser.add_argument("old", help="folder of the build that is compared with")
    parser.add_argument("new", help="folder of the build that may be slower nowhere")
    parser.add_argument("--suite", choices=SUITES, default="fused")
    parser.add_argument("--rounds", type=int, default=2, help="of both builds each")
    parser.add_argument("--seconds", type=float, default=0.2, help="for one row")
    parser.add_argument("--over", type=float, default=20, help="microseconds that a row must take to count")
    parser.add_argument("--slower", type=float, default=0.02, help="share that a row may be slower by")
    options = parser.parse_args()
    try:
        slower, last = compare(Build(options.old), Build(options.new), options)
    except Unusable as why:
        print(f"bench_against: {why}", file=sys.stderr)
        return 2
    for row in (*slower, last):
        print(json.dumps(row))
    return 1 if slower or not last["rows"] else 0


if __name__ == "__main__":
    sys.exit(main())
