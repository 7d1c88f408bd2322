#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs everything that needs a GPU and writes down what came of it: bench/baselines/<gpu>.jsonl.

    tools/gpu_record.py [--build DIR] [--out FILE] [--parts tests,check,golden,sanitizer,bench] [--suites te,small,gdn,fused]
    tools/gpu_record.py --verify      says whether the records belong to the sources as they are

It needs the built tree, Python and nothing else; what is missing (compute-sanitizer, golden files) is written down as
such. The first line of a record says which GPU, driver, command and sources it is about, one line each for every test,
tool and timing follows. Parts that are not run keep their lines where the sources are still the same, so a record can be
made piece by piece.

Exit status: 0 all passed, 1 something failed (and is in the record), 2 it could not be run.
"""

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from source_hash import ROOT, source_hash  # noqa: E402

BASELINES = ROOT / "bench" / "baselines"
PARTS = ("tests", "check", "golden", "sanitizer", "bench")
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
# What is timed: a name for the rows and the options of `weft bench`.
SUITES = {
    "te": ["--suite", "te"],
    "te_cn": ["--suite", "te", "--layout", "cn"],
    "small": ["--suite", "small"],
    "gdn": ["--suite", "gdn"],
    "fused": ["--suite", "fused"],
    "all": ["--tokens", "32768", "--channels", "4096"],
}


class Unusable(Exception):
    pass


def run(command, env=None, timeout=None):
    """(exit status, output, seconds); the status is None where time ran out."""
    start = time.monotonic()
    try:
        done = subprocess.run(command, env=env, timeout=timeout, text=True, errors="replace",
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        return done.returncode, done.stdout, time.monotonic() - start
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        return None, output.decode(errors="replace") if isinstance(output, bytes) else output, time.monotonic() - start


def verdict(status):
    return "passed" if status == 0 else "timed out" if status is None else "failed"


class Recorder:
    def __init__(self, options):
        self.build = Path(options.build)
        self.jobs = options.jobs
        self.timeout = options.timeout
        self.suites = options.suites.split(",")
        self.seconds = options.seconds
        self.weft = self.build / "weft"
        if not self.weft.is_file():
            raise Unusable(f"{self.weft} is not there: build first (make)")
        # The built programs name the folder of the machine that linked them; here they may lie elsewhere.
        self.env = dict(os.environ)
        paths = [str(self.build.resolve()), self.env.get("LD_LIBRARY_PATH", "")]
        self.env["LD_LIBRARY_PATH"] = ":".join(p for p in paths if p)
        status, text, _ = run([str(self.weft), "info"], self.env)
        gpu = re.search(r"^gpu 0\s+(.*?), compute capability (\S+), (\d+) multiprocessors", text, re.M)
        if status != 0 or not gpu:
            raise Unusable("weft info shows no GPU:\n" + text[:600])
        self.gpu, self.capability = gpu.group(1), gpu.group(2)
        self.version = re.search(r"^weft\s+(\S+)", text, re.M).group(1)
        self.runtime = re.search(r"^cuda\s+(.*)$", text, re.M).group(1)

    def driver(self):
        if shutil.which("nvidia-smi"):
            status, text, _ = run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"])
            if status == 0:
                return text.strip()
        return "unknown"

    def name(self):
        short = re.sub(r"^(nvidia|geforce|tesla)\s+", "", self.gpu.lower())
        return re.sub(r"[^a-z0-9]+", "-", short).strip("-")

    def say(self, row, output=""):
        words = " ".join(str(v) for k, v in row.items() if k not in ("part", "seconds"))
        print(f"{row['part']}: {words} ({row['seconds']:.1f} s)", flush=True)
        if row["result"] not in ("passed", "skipped"):
            print("    " + "\n    ".join(output.strip().splitlines()[-25:]), flush=True)
        return row

    # ---- parts: each yields the lines of the record ----

    def tests(self):
        programs = sorted(p for p in (self.build / "tests").glob("test_*") if os.access(p, os.X_OK) and p.is_file())
        if not programs:
            yield self.say({"part": "tests", "test": "all", "result": "not built", "seconds": 0.0})
            return
        env = dict(self.env, OMP_WAIT_POLICY="passive", OMP_NUM_THREADS="2")

        def one(program):
            status, text, seconds = run([str(program)], env, self.timeout)
            result = verdict(status)
            if result == "passed" and "SKIPPED" in text and "[  PASSED  ] 0 test(s)" in text:
                result = "skipped"
            row = {"part": "tests", "test": program.name, "result": result, "seconds": round(seconds, 1)}
            skipped = len(re.findall(r"^\[  SKIPPED \]", text, re.M)) // 2
            if skipped:
                row["skipped"] = skipped
            return row, text

        with ThreadPoolExecutor(max_workers=self.jobs) as pool:
            for row, text in pool.map(one, programs):
                yield self.say(row, text)

    def check(self):
        for precision in ("full", "tf32"):
            command = [str(self.weft), "check", "--backend", "cuda", "--precision", precision]
            status, text, seconds = run(command, self.env, self.timeout)
            yield self.say({"part": "check", "precision": precision, "result": verdict(status),
                            "summary": (text.strip().splitlines() or [""])[-1], "seconds": round(seconds, 1)}, text)

    def golden(self):
        folder = os.environ.get("WEFT_GOLDEN_DIR") or str(ROOT.parent / "shared" / "golden")
        if not Path(folder).is_dir():
            yield self.say({"part": "golden", "result": "skipped", "seconds": 0.0})
            return
        status, text, seconds = run([str(self.weft), "check", "--golden", folder, "--backend", "cuda"], self.env,
                                    self.timeout)
        yield self.say({"part": "golden", "result": verdict(status),
                        "summary": (text.strip().splitlines() or [""])[-1], "seconds": round(seconds, 1)}, text)

    def sanitizer(self):
        found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        # Planned for one multiprocessor, a few tokens are cut like many: the kernels for long batches run too.
        for tool, planned in [*((tool, "0") for tool in SANITIZERS), ("memcheck", "1"), ("racecheck", "1")]:
            if not found:
                yield self.say({"part": "sanitizer", "tool": tool, "result": "not available", "seconds": 0.0})
                continue
            command = [found, "--tool", tool, "--error-exitcode", "9", str(self.weft), "check", "--backend", "cuda",
                       "--quick", "--threads", planned]
            status, text, seconds = run(command, dict(self.env, WEFT_DEVICE_EXACT="1"), self.timeout)
            summary = re.findall(r"^=+ .*SUMMARY: (.*)$", text, re.M)
            yield self.say({"part": "sanitizer", "tool": tool, "threads": int(planned), "result": verdict(status),
                            "summary": summary[-1] if summary else "no summary", "seconds": round(seconds, 1)}, text)

    def bench(self):
        for suite in self.suites:
            command = [str(self.weft), "bench", "--backend", "cuda", "--json", "--seconds", str(self.seconds),
                       *SUITES[suite]]
            status, text, seconds = run(command, self.env, self.timeout)
            rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
            for row in rows:
                yield {"part": "bench", "suite": suite, **row}
            yield self.say({"part": "bench", "suite": suite, "result": verdict(status), "rows": len(rows),
                            "seconds": round(seconds, 1)}, text)


def read(path):
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def verify():
    now = source_hash()
    records = sorted(BASELINES.glob("*.jsonl"))
    if not records:
        print("GPU record: there is none yet. Run make gpu-record on a machine with a GPU.")
    for path in records:
        head = (read(path) or [{}])[0]
        name = path.relative_to(ROOT)
        if head.get("sources") == now:
            print(f"GPU record: {name} belongs to these sources ({head.get('gpu')}, {head.get('date')}).")
        else:
            print(f"GPU record: WARNING: {name} ({head.get('gpu')}, {head.get('date')}) is older than the sources: "
                  "its figures and test results are about other code. Run make gpu-record on a machine with that GPU.")
    return 0


def record(options):
    recorder = Recorder(options)
    out = Path(options.out) if options.out else BASELINES / f"{recorder.name()}.jsonl"
    parts = options.parts.split(",")
    for what, given, known in (("part", parts, PARTS), ("suite", recorder.suites, SUITES)):
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise Unusable(f"no {what} {', '.join(unknown)}; there are {', '.join(known)}")
    header = {
        "record": "gpu", "gpu": recorder.gpu, "capability": recorder.capability, "driver": recorder.driver(),
        "cuda": recorder.runtime, "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "command": "make gpu-record", "version": recorder.version, "sources": source_hash(),
    }
    before = read(out)
    keep = []
    if before and before[0].get("sources") == header["sources"] and before[0].get("gpu") == recorder.gpu:
        keep = [row for row in before[1:]
                if row["part"] not in parts or row.get("suite", recorder.suites[0]) not in recorder.suites]
    lines = list(keep)
    out.parent.mkdir(parents=True, exist_ok=True)
    for part in (p for p in PARTS if p in parts):
        for row in getattr(recorder, part)():
            lines.append(row)
            if "result" not in row:
                continue
            # After each program: what is done is not lost where the machine is taken away.
            ordered = sorted(lines, key=lambda row: PARTS.index(row["part"]))
            out.write_text("".join(json.dumps(row) + "\n" for row in [header, *ordered]), encoding="utf-8")
    missing = [p for p in PARTS if not any(row["part"] == p for row in lines)]
    failed = [row for row in lines if row.get("result") in ("failed", "timed out", "not built")]
    print(f"{out}: {len(lines)} lines, {len(failed)} failed" + (f"; not run: {', '.join(missing)}" if missing else ""))
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description="Runs all that needs a GPU and records it.")
    parser.add_argument("--build", default=str(ROOT / "build"), help="folder of the build")
    parser.add_argument("--out", help="file to write; bench/baselines/<gpu>.jsonl by default")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated: " + ", ".join(PARTS))
    parser.add_argument("--suites", default=",".join(SUITES), help="of the benchmark: " + ", ".join(SUITES))
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="test programs at a time")
    parser.add_argument("--seconds", type=float, default=0.2, help="of the benchmark, for one row")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one program")
    parser.add_argument("--verify", action="store_true", help="compare the records with the sources")
    options = parser.parse_args()
    try:
        return verify() if options.verify else record(options)
    except Unusable as why:
        print(f"gpu_record: {why}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
