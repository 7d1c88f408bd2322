#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs everything that needs a GPU and writes down what came of it: bench/baselines/<gpu>.jsonl.

    tools/gpu_record.py [--build DIR] [--ptx-build DIR] [--python PROGRAM] [--against DIR] [--out FILE] [--parts tests,bench,...]
        [--missing]
    tools/gpu_record.py --verify      says whether the records belong to the sources as they are, and what they lack

It needs the built tree and Python; what is missing (compute-sanitizer, golden files, PyTorch, a second build) is written down
as such. The first line of a record says which GPU, driver, command and sources it is about, one line each for every program,
tool and timing follows (bench/baselines/README.md). Lines are written as they come. Programs that test share the GPU,
--jobs of them at a time; benchmarks run alone, at the end.

A record can be made piece by piece: parts that are not run keep their lines where the sources are still the same, --missing
runs what has no line that passed, and --deadline ends a piece in time. Exit status: 0 all passed, 1 something failed (and is
in the record), 2 it could not be run, 3 the deadline came before the end.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_tasks import PARTS, SUITES, Build, Setting, Unusable, key_of, run  # noqa: E402
from source_hash import ROOT, python_hash, source_hash  # noqa: E402

BASELINES = ROOT / "bench" / "baselines"
GOOD, BAD = ("passed", "skipped"), ("failed", "timed out")  # other results say why there is none
OPTIONAL = ("against",)  # parts that a record may do without
LONG = 60.0  # seconds that a program is expected to take of which no record knows


def driver():
    if shutil.which("nvidia-smi"):
        status, text, _ = run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"])
        if status == 0:
            return text.strip()
    return "unknown"


def name_of(gpu):
    short = re.sub(r"^(nvidia|geforce|tesla)\s+", "", gpu.lower())
    return re.sub(r"[^a-z0-9]+", "-", short).strip("-")


def read(path):
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def belongs(row, before, now):
    """Whether a line of a record that begins with `before` is about the sources and the GPU of `now`."""
    fields = ("sources", "gpu", "python") if row["part"] == "python" else ("sources", "gpu")
    return all(before.get(name) == now[name] for name in fields)


def place(key):
    """Parts in their order, suites in theirs, everything else by name."""
    part, *name = key
    return (
        list(PARTS).index(part),
        list(SUITES).index(name[0]) if part in ("against", "bench") else 0,
        [str(n) for n in name],
    )


class Record:
    """The file. A task's lines stand together, in the order of the parts and of the keys within a part."""

    def __init__(self, path, header):
        self.path, self.header, self.lock = path, header, threading.Lock()
        self.lines = {}  # key of a task: its lines, the last of which has the result
        before = read(path)
        for row in before[1:]:
            if belongs(row, before[0], header):
                self.lines.setdefault(key_of(row), []).append(row)

    def keep(self, parts, suites, keys):
        """Of these parts, and of these suites of the benchmark, only lines with these keys."""
        self.lines = {
            key: rows
            for key, rows in self.lines.items()
            if key in keys or rows[-1]["part"] not in parts or rows[-1].get("suite", suites[0]) not in suites
        }

    def good(self, task):
        return self.lines.get(key_of(task.name), [{}])[-1].get("result") in GOOD

    def put(self, key, rows):
        with self.lock:
            self.lines[key] = rows
            rows = [self.header, *(row for key in sorted(self.lines, key=place) for row in self.lines[key])]
            fresh = self.path.with_suffix(".part")
            fresh.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            fresh.replace(self.path)

    def results(self):
        return [rows[-1] for rows in self.lines.values()]


def failed_of(rows):
    return [row for row in rows if row["result"] in BAD]


def lacking_of(rows):
    """Parts without a result, or with lines that say why there is none; of the others, suites and files without one."""
    found = {part: [row for row in rows if row["part"] == part] for part in PARTS}
    lacking = [
        part
        for part in PARTS
        if part not in OPTIONAL and (not found[part] or any(row["result"] not in GOOD + BAD for row in found[part]))
    ]
    if "bench" not in lacking:
        lacking += [f"suite {suite}" for suite in SUITES if suite not in {row["suite"] for row in found["bench"]}]
    if "python" not in lacking:
        files = {path.name for path in (ROOT / "tests" / "python").glob("test_*.py")}
        lacking += sorted(files - {row["file"] for row in found["python"]})
    return lacking


def say(row, output):
    words = " ".join(str(v) for k, v in row.items() if k not in ("part", "seconds"))
    text = f"{row['part']}: {words} ({row['seconds']:.1f} s)"
    if row["result"] in BAD:
        text += "\n    " + "\n    ".join(output.strip().splitlines()[-25:])
    print(text, flush=True)


class Runner:
    """Runs tasks until the deadline: those that share in a pool, longest first, then those that must be alone."""

    def __init__(self, record, options, expected):
        self.record, self.options, self.expected = record, options, expected
        self.end = time.monotonic() + options.deadline if options.deadline else None
        self.large = threading.Lock()  # of the GPU's memory
        self.unfinished = []

    def left(self):
        """Seconds that a task may take, and whether it is the deadline that says so."""
        if self.end is None:
            return self.options.timeout, False
        left = self.end - time.monotonic()
        return min(self.options.timeout, left), left < self.options.timeout

    def one(self, task):
        with self.large if task.large else threading.Lock():
            limit, by_deadline = self.left()
            if limit <= 0:
                self.unfinished.append(task)
                return
            rows, output = task.do(limit)
        if by_deadline and rows[-1]["result"] == "timed out":
            self.unfinished.append(task)
        elif not task.warms:
            self.record.put(key_of(task.name), rows)
            say(rows[-1], output)

    def seconds_of(self, task):
        """As the last time, or as the same program took with machine code."""
        like = {**task.name, "part": task.name["of"]} if task.name.get("of") in PARTS else task.name
        return self.expected.get(key_of(task.name), self.expected.get(key_of(like), LONG))

    def run(self, tasks):
        together = [task for task in tasks if not task.alone]
        # What makes the driver compile comes first, what needs it compiled last.
        together.sort(key=lambda t: (not t.warms, t.name["part"] == "ptx80", -self.seconds_of(t)))
        with ThreadPoolExecutor(max_workers=self.options.jobs) as pool:
            list(pool.map(self.one, together))
        for task in (task for task in tasks if task.alone):
            self.one(task)


def record(options):
    parts, suites = options.parts.split(","), options.suites.split(",")
    for what, given, known in (("part", parts, PARTS), ("suite", suites, SUITES)):
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise Unusable(f"no {what} {', '.join(unknown)}; there are {', '.join(known)}")
    build = Build(options.build)
    ptx_build = Build(options.ptx_build, ptx=True) if options.ptx_build and "ptx80" in parts else None
    setting = Setting(build, ptx_build, options.python, suites, options.seconds, options.against)
    header = {
        "record": "gpu",
        "gpu": build.gpu,
        "capability": build.capability,
        "driver": driver(),
        "cuda": build.cuda,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "command": "make gpu-record",
        "version": build.version,
        "sources": source_hash(),
        "python": python_hash(),
    }
    out = Path(options.out) if options.out else BASELINES / f"{name_of(build.gpu)}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    expected = {
        key_of(row): row["seconds"]
        for path in {out, *BASELINES.glob("*.jsonl")}
        for row in read(path)[1:]
        if "result" in row
    }
    result = Record(out, header)
    tasks = [task for part in PARTS if part in parts for task in PARTS[part](setting)]
    done = [task for task in tasks if options.missing and not task.warms and result.good(task)]
    result.keep(parts, suites, {key_of(task.name) for task in done})
    tasks = [task for task in tasks if task not in done]
    if all(task.warms for task in tasks if task.name["part"] == "ptx80"):
        tasks = [task for task in tasks if not task.warms]
    runner = Runner(result, options, expected)
    runner.run(tasks)
    rows = result.results()
    failed, lacking = failed_of(rows), lacking_of(rows)
    print(f"{out}: {len(rows)} results, {len(failed)} failed" + (f"; lacks {', '.join(lacking)}" if lacking else ""))
    if runner.unfinished:
        print(f"not finished in time, {len(runner.unfinished)}: run again with --missing")
    return 1 if failed else 3 if runner.unfinished else 0


def verify():
    now = {"sources": source_hash(), "python": python_hash()}
    records = sorted(BASELINES.glob("*.jsonl"))
    if not records:
        print("GPU record: there is none yet. Run make gpu-record on a machine with a GPU.")
    for path in records:
        head, *rows = read(path) or [{}]
        name = f"{path.relative_to(ROOT)} ({head.get('gpu')}, {head.get('date')})"
        anew = "Run make gpu-record on a machine with that GPU."
        rows = [row for row in rows if "result" in row]
        if head.get("sources") != now["sources"]:
            print(
                f"GPU record: WARNING: {name} is older than the sources: its figures and test results are about other code. {anew}"
            )
            continue
        failed, lacking = failed_of(rows), lacking_of(rows)
        if head.get("python") != now["python"] and "python" not in lacking:
            print(f"GPU record: WARNING: {name}: its part python is older than the Python package. {anew}")
        if lacking:
            print(f"GPU record: WARNING: {name} lacks {', '.join(lacking)}. {anew}")
        if failed:
            print(f"GPU record: WARNING: {name}: {len(failed)} results are failures.")
        if not lacking and not failed and head.get("python") == now["python"]:
            print(f"GPU record: {name} belongs to these sources.")
    return 0


def main():
    parser = argparse.ArgumentParser(description="Runs all that needs a GPU and records it.")
    parser.add_argument("--build", default=str(ROOT / "build"), help="folder of the build")
    parser.add_argument(
        "--ptx-build", help="folder of a build with WEFT_CUDA_ARCHITECTURES=80-virtual, for the part ptx80"
    )
    parser.add_argument("--against", help="folder of an older build, for the part against")
    parser.add_argument(
        "--python", default=sys.executable, help="a Python with PyTorch and pytest, for the part python"
    )
    parser.add_argument("--out", help="file to write; bench/baselines/<gpu>.jsonl by default")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated: " + ", ".join(PARTS))
    parser.add_argument("--suites", default=",".join(SUITES), help="of the benchmark: " + ", ".join(SUITES))
    parser.add_argument("--missing", action="store_true", help="only what has no line that passed")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="programs that test, at a time")
    parser.add_argument("--seconds", type=float, default=0.2, help="of the benchmark, for one row")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one program")
    parser.add_argument("--deadline", type=float, help="seconds for all; what is not finished then has no line")
    parser.add_argument("--verify", action="store_true", help="compare the records with the sources")
    options = parser.parse_args()
    try:
        return verify() if options.verify else record(options)
    except Unusable as why:
        print(f"gpu_record: {why}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
