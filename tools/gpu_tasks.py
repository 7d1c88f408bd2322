# SPDX-License-Identifier: Apache-2.0
"""What a GPU record is made of: programs to run, and the lines that their output becomes.

A task is one program and becomes one line of the record, which some of its fields tell from the others (NAMES). A task of
the part `bench` has a line for each timing in front of it. Tasks that are not `alone` may run beside each other: they test,
and how long that takes is of no interest."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from source_hash import ROOT

# The fields that name a line, by its part.
NAMES = {
    "tests": ("test",),
    "check": ("precision",),
    "golden": (),
    "sanitizer": ("tool", "threads"),
    "python": ("file", "share"),
    "train": (),
    "ptx80": ("of", "test", "precision"),
    "against": ("suite",),
    "bench": ("suite",),
}
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Programs with tensors beyond 2^32 elements: one at a time, for together they ask for more memory than a GPU has.
LARGE = {"test_cuda_large", "test_cuda_gdn"}
# Files of tests/python that take long: so many processes share one.
SHARES = {"test_ops.py": 4, "test_compile.py": 4}
# What is timed: a name for the rows and the options of `weft bench`.
SUITES = {
    "te": ["--suite", "te"],
    "te_cn": ["--suite", "te", "--layout", "cn"],
    "small": ["--suite", "small"],
    "gdn": ["--suite", "gdn"],
    "rule": ["--suite", "rule"],
    "fused": ["--suite", "fused"],
    "fused_cn": ["--suite", "fused", "--layout", "cn"],
    "fused_f16": ["--suite", "fused", "--dtype", "f16"],
    "fused_f16_cn": ["--suite", "fused", "--dtype", "f16", "--layout", "cn"],
    "fused_hy_v4": ["--suite", "fused", "--preset", "hy_v4"],
    "fused_hy_v4_cn": ["--suite", "fused", "--preset", "hy_v4", "--layout", "cn"],
    "all": ["--tokens", "32768", "--channels", "4096"],
}
# Of programs that share the processor: threads that spin while they wait would take it from the others.
SHARED = {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2"}
GROUP = {"process_group": 0} if sys.version_info >= (3, 11) else {}


class Unusable(Exception):
    pass


def key_of(row):
    return (row["part"], *(row.get(name) for name in NAMES[row["part"]]))


def run(command, env=None, timeout=None):
    """(exit status, output, seconds); the status is None where time ran out, and what it had started ends with it."""
    start = time.monotonic()
    with tempfile.TemporaryFile(mode="w+", errors="replace") as output:
        process = subprocess.Popen(
            command, env=env, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, **GROUP
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, 9) if GROUP else process.kill()
            process.wait()
        output.seek(0)
        return status, output.read(), time.monotonic() - start


def verdict(status):
    return "passed" if status == 0 else "timed out" if status is None else "failed"


def summary_of(status, text):
    return {"result": verdict(status), "summary": (text.strip().splitlines() or [""])[-1]}


@dataclass
class Task:
    name: dict  # fields that name its line
    command: list | None = None  # None: there is nothing to run, for `instead`
    env: dict | None = None
    read: Callable = summary_of  # (exit status, output) -> further fields of the line
    rows: Callable = lambda text: []  # output -> lines in front of it
    instead: str = "not built"
    alone: bool = False
    large: bool = False
    warms: bool = False  # only makes the driver compile: no line

    def do(self, timeout):
        """(lines, the last of which has the result; output). No lines where it was not finished in time."""
        if self.command is None:
            return [{**self.name, "result": self.instead, "seconds": 0.0}], ""
        status, text, seconds = run(self.command, self.env if self.alone else {**self.env, **SHARED}, timeout)
        last = {**self.name, **self.read(status, text), "seconds": round(seconds, 1)}
        return [*({**self.name, **row} for row in self.rows(text)), last], text


class Build:
    """A build folder on this machine, its GPU, and an environment that its programs run in."""

    def __init__(self, folder, ptx=False):
        self.folder = Path(folder).resolve()
        self.weft = self.folder / "weft"
        if not self.weft.is_file():
            raise Unusable(f"{self.weft} is not there: build first (make)")
        # The built programs name the folder of the machine that linked them; here they may lie elsewhere.
        self.env = dict(os.environ)
        paths = [str(self.folder), self.env.get("LD_LIBRARY_PATH", "")]
        self.env["LD_LIBRARY_PATH"] = ":".join(p for p in paths if p)
        if ptx:  # what the driver compiles for one program, all others find
            self.env.setdefault("CUDA_CACHE_PATH", str(self.folder / "cuda_cache"))
            self.env.setdefault("CUDA_CACHE_MAXSIZE", str(1 << 32))
        status, self.info, _ = run([str(self.weft), "info"], self.env)
        gpu = re.search(r"^gpu 0\s+(.*?), compute capability (\S+), (\d+) multiprocessors", self.info, re.M)
        if status != 0 or not gpu:
            raise Unusable(f"{self.weft} info shows no GPU:\n" + self.info[:600])
        self.gpu, self.capability = gpu.group(1), gpu.group(2)
        self.version = re.search(r"^weft\s+(\S+)", self.info, re.M).group(1)
        self.cuda = re.search(r"^cuda\s+(.*)$", self.info, re.M).group(1)
        if ptx and not self.cuda.startswith("compiled for 80 (PTX);"):
            raise Unusable(
                f"{self.folder}: expected a build with WEFT_CUDA_ARCHITECTURES=80-virtual, got one {self.cuda}"
            )

    def operators(self):
        """With their passes: mhc_post_fwd, mhc_post_bwd, ..."""
        listed = self.info.partition("\noperators\n")[2].partition("\n\n")[0]
        rows = [line.split() for line in listed.splitlines()]
        return [f"{stem}_{way}" for stem, *ways in rows for way in ways]


@dataclass
class Setting:
    """What there is to make a record with."""

    build: Build
    ptx_build: Build | None
    python: str
    suites: list
    seconds: float
    against: str | None = None  # folder of an older build


def tests(build):
    """The test programs, on CUDA alone: the CPU backend has its tests wherever there is a CPU."""
    programs = sorted(p for p in (build.folder / "tests").glob("test_*") if os.access(p, os.X_OK) and p.is_file())
    env = dict(build.env, WEFT_TEST_BACKENDS="cuda")

    def read(status, text):
        result = verdict(status)
        if result == "passed" and "SKIPPED" in text and "[  PASSED  ] 0 test(s)" in text:
            result = "skipped"
        counts = {
            "skipped": len(re.findall(r"^\[  SKIPPED \]", text, re.M)) // 2,
            "without_memory": text.count("skipped, not enough memory"),
        }
        return {"result": result, **{name: count for name, count in counts.items() if count}}

    if not programs:
        return [Task({"part": "tests", "test": "all"})]
    return [Task({"part": "tests", "test": p.name}, [str(p)], env, read, large=p.name in LARGE) for p in programs]


def check(build):
    return [
        Task(
            {"part": "check", "precision": precision},
            [str(build.weft), "check", "--backend", "cuda", "--precision", precision],
            build.env,
        )
        for precision in ("full", "tf32")
    ]


def golden(build):
    folder = os.environ.get("WEFT_GOLDEN_DIR")
    if not folder:
        return [Task({"part": "golden"}, instead="skipped")]
    return [Task({"part": "golden"}, [str(build.weft), "check", "--golden", folder, "--backend", "cuda"], build.env)]


def sanitizer(build):
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")

    def read(status, text):
        summary = re.findall(r"^=+ .*SUMMARY: (?!.*not printed)(.*)$", text, re.M)
        return {"result": verdict(status), "summary": summary[-1] if summary else "no summary"}

    def task(tool, planned):
        name = {"part": "sanitizer", "tool": tool, "threads": planned}
        if not found:
            return Task(name, instead="not available")
        command = [
            found,
            "--tool",
            tool,
            "--error-exitcode",
            "9",
            str(build.weft),
            "check",
            "--backend",
            "cuda",
            "--quick",
            "--threads",
            str(planned),
        ]
        return Task(name, command, dict(build.env, WEFT_DEVICE_EXACT="1"), read)

    # Planned for one multiprocessor, a few tokens are cut like many: the kernels for long batches run too.
    return [*(task(tool, 0) for tool in SANITIZERS), task("memcheck", 1), task("racecheck", 1)]


def python(build, interpreter):
    """tests/python, a process or more for each file, with the extension that lies beside the Python sources."""
    env = dict(build.env, PYTHONDONTWRITEBYTECODE="1", WEFT_TEST_NEEDS_GPU="1")
    env["PYTHONPATH"] = ":".join(p for p in (str(ROOT / "python"), env.get("PYTHONPATH", "")) if p)
    probe = "import pytest, importlib.metadata; print('torch', importlib.metadata.version('torch'))"
    status, text, _ = run([interpreter, "-c", probe], env)
    if status != 0:
        return [Task({"part": "python", "file": "all"}, instead="not available")]
    version = text.split()[-1]
    folder = Path(tempfile.mkdtemp(prefix="weft_record_"))

    def reader(report):
        def read(status, _):
            counts = dict.fromkeys(("passed", "failed", "skipped", "on_gpu"), 0)
            cases = xml.parse(report).iter("testcase") if report.is_file() else ()
            for case in cases:
                kinds = {child.tag for child in case}
                how = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
                counts[how] += 1
                counts["on_gpu"] += how == "passed" and "cuda" in case.get("name", "")
            nothing = status == 5 and not counts["failed"]  # pytest's word for a file whose tests are all skipped
            return {"result": "skipped" if nothing else verdict(status), **counts, "torch": version}

        return read

    def task(path, share, shares):
        report = folder / f"{path.stem}{share}.xml"
        command = [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(path)]
        name = {"part": "python", "file": path.name, "share": f"{share}/{shares}"}
        return Task(name, command, dict(env, WEFT_TEST_SHARE=name["share"]), reader(report))

    paths = sorted((ROOT / "tests" / "python").glob("test_*.py"))
    shares = {path: SHARES.get(path.name, 1) for path in paths}
    return [task(path, share, shares[path]) for path in paths for share in range(1, shares[path] + 1)]


def train(build):
    """The part of tests/train.py that needs a GPU."""

    def read(status, text):
        counts = {"passed": len(re.findall(r"^ok  ", text, re.M)), "failed": len(re.findall(r"^FAIL", text, re.M))}
        return {"result": "skipped" if status == 0 and not counts["passed"] else verdict(status), **counts}

    command = [
        sys.executable,
        str(ROOT / "tests" / "train.py"),
        str(build.weft),
        str(build.folder / "gpu_train"),
        "gpu",
    ]
    return [Task({"part": "train"}, command, build.env, read)]


def ptx80(build):
    """Tests, check, golden files and training once more, with PTX for compute capability 8.0, which the driver compiles for
    this GPU: what GPUs run that the library has no machine code for. Programs that use one operator each come first, so
    that all kernels are compiled side by side: those of gdn_pre alone take the driver a minute or two."""
    if build is None:
        return [Task({"part": "ptx80", "of": "all"})]
    tasks = [
        Task(
            {"part": "ptx80", "of": operator},
            [str(build.weft), "check", "--backend", "cuda", "--quick", "--op", operator],
            build.env,
            warms=True,
        )
        for operator in build.operators()
    ]
    for task in (*tests(build), *check(build), *golden(build), *train(build)):
        task.name = {**task.name, "part": "ptx80", "of": task.name["part"]}
        tasks.append(task)
    return tasks


def bench(setting):
    def rows(text):
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def task(suite):
        command = [
            str(setting.build.weft),
            "bench",
            "--backend",
            "cuda",
            "--json",
            "--seconds",
            str(setting.seconds),
            *SUITES[suite],
        ]
        return Task(
            {"part": "bench", "suite": suite},
            command,
            setting.build.env,
            lambda status, text: {"result": verdict(status), "rows": len(rows(text))},
            rows,
            alone=True,
        )

    return [task(suite) for suite in setting.suites]


def against(setting):
    """No row may be slower than in an older build (tools/bench_against.py); one line a suite, and none without such a build."""

    def read(status, text):
        rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return {"result": verdict(status), **(rows[-1] if rows else {})}

    def rows(text):
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")][:-1]

    def task(suite):
        command = [
            sys.executable,
            str(ROOT / "tools" / "bench_against.py"),
            setting.against,
            str(setting.build.folder),
            "--suite",
            suite,
            "--seconds",
            str(setting.seconds),
        ]
        return Task({"part": "against", "suite": suite}, command, setting.build.env, read, rows, alone=True)

    # In the suite `small` launches are measured, not kernels.
    return [task(suite) for suite in setting.suites if suite != "small"] if setting.against else []


# In the order of a record's lines.
PARTS = {
    "tests": lambda s: tests(s.build),
    "check": lambda s: check(s.build),
    "golden": lambda s: golden(s.build),
    "sanitizer": lambda s: sanitizer(s.build),
    "python": lambda s: python(s.build, s.python),
    "train": lambda s: train(s.build),
    "ptx80": lambda s: ptx80(s.ptx_build),
    "against": against,
    "bench": bench,
}
