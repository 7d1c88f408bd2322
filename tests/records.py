#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tests/records.py <work folder>: tools/gpu_record.py on a build and a GPU that are made up here."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from gpu_tasks import SUITES  # noqa: E402  (the path above comes first)

ROOT = Path(__file__).resolve().parent.parent
WORK = Path(sys.argv[1]).resolve()
OUT, CALLS = WORK / "gpu.jsonl", WORK / "calls"
INFO = """weft          1.2.3
cuda          compiled for {code}; driver for CUDA 13.0
gpu 0         Made Up, compute capability 9.0, 132 multiprocessors, 1.0 GiB

operators
  mhc_post       fwd bwd
  gdn_pre        fwd bwd

presets
"""
WEFT = """#!/bin/sh
echo "$0 $*" >>{calls}
case "$1" in
info) cat {info} ;;
check) echo '3 passed, 0 failed' ;;
bench) echo '{{"op": "mhc_post", "pass": "fwd", "us": 1.5, "threads": 0}}'
    echo '{{"op": "mhc_post", "pass": "bwd", "us": {us}, "threads": 0}}' ;;
*) echo 'train: --backend cuda: no GPU' >&2; exit 2 ;;
esac
"""
PYTHON = """#!/bin/sh
echo "$0 $*" >>{calls}
[ "$1" = -c ] && {{ echo 'torch 9.8.7'; exit 0; }}
for word; do case "$word" in --junitxml=*) report=${{word#*=}} ;; esac; done
echo "share $WEFT_TEST_SHARE" >>{calls}
echo '<testsuites><testsuite><testcase name="test_a[cuda-1]"/><testcase name="test_a[cpu-1]"/>' >"$report"
echo '<testcase name="test_b[cuda-2]"><skipped/></testcase></testsuite></testsuites>' >>"$report"
"""
TEST = """#!/bin/sh
echo "$0 $WEFT_TEST_BACKENDS" >>{calls}
{body}
"""
# Fails where another one of its kind is at work.
LARGE = "mkdir {lock} || exit 1\nsleep 0.2\nrmdir {lock}"


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def build(name, code, tests, us=100.0):
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    script(folder / "weft", WEFT.format(calls=CALLS, info=folder / "info", us=us))
    (folder / "info").write_text(INFO.format(code=code))
    for test, body in tests.items():
        script(folder / "tests" / test, TEST.format(calls=CALLS, body=body))
    return folder


def record(*options, expect=0):
    """Runs the tool; the calls it made and the lines of the record."""
    CALLS.write_text("")
    env = {**os.environ, "WEFT_GOLDEN_DIR": str(WORK)}
    command = [
        str(ROOT / "tools" / "gpu_record.py"),
        "--out",
        str(OUT),
        "--python",
        str(WORK / "python"),
        *map(str, options),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == expect, (options, done.returncode, done.stdout, done.stderr)
    lines = [json.loads(line) for line in OUT.read_text().splitlines()] if OUT.is_file() else []
    return CALLS.read_text(), lines, done.stderr


def results(lines, part):
    return {
        line.get("test") or line.get("file") or line.get("suite") or part: line["result"]
        for line in lines[1:]
        if line["part"] == part and "result" in line
    }


def edit(change):
    lines = [json.loads(line) for line in OUT.read_text().splitlines()]
    change(lines[0])
    OUT.write_text("".join(json.dumps(line) + "\n" for line in lines))


shutil.rmtree(WORK, ignore_errors=True)
WORK.mkdir(parents=True)
script(WORK / "python", PYTHON.format(calls=CALLS))
broken = WORK / "broken"
broken.touch()
tests = {
    "test_good": "exit 0",
    "test_bad": f"test ! -e {broken}",
    "test_skips": "echo '[  SKIPPED ] a'; echo '[  SKIPPED ] 1 test(s)'; echo '[  PASSED  ] 0 test(s).'",
    "test_cuda_large": LARGE.format(lock=WORK / "lock"),
    "test_cuda_gdn": LARGE.format(lock=WORK / "lock"),
}
machine, ptx = build("machine", "90a", tests), build("ptx", "80 (PTX)", tests)

# Everything but the second build, which there is none of: that is written down, too.
calls, lines, _ = record("--build", machine, "--jobs", 4, expect=1)
assert (
    lines[0]["gpu"] == "Made Up" and lines[0]["cuda"].startswith("compiled for 90a") and len(lines[0]["python"]) == 64
)
assert results(lines, "tests") == {
    "test_good": "passed",
    "test_bad": "failed",
    "test_skips": "skipped",
    "test_cuda_large": "passed",
    "test_cuda_gdn": "passed",
}
files = {p.name for p in (ROOT / "tests" / "python").glob("test_*.py")}
assert results(lines, "python") == dict.fromkeys(files, "passed")
shares = [line["share"] for line in lines if line.get("file") == "test_ops.py"]
assert len(shares) > 1 and shares == [f"{k}/{len(shares)}" for k in range(1, len(shares) + 1)]
assert all(f"share {share}\n" in calls for share in (*shares, "1/1"))
one = next(line for line in lines if line.get("file") == "test_ops.py")
assert [one[k] for k in ("passed", "failed", "skipped", "on_gpu", "torch")] == [2, 0, 1, 1, "9.8.7"]
assert results(lines, "train") == {"train": "skipped"} and results(lines, "ptx80") == {"ptx80": "not built"}
assert results(lines, "bench").keys() == set(SUITES)
assert [line["part"] for line in lines[1:]].index("bench") > [line["part"] for line in lines[1:]].index("python")
assert "test_good cuda\n" in calls
whole = len(lines)

# What passed is not run again; what failed is, and what was not built.
broken.unlink()
calls, lines, _ = record("--build", machine, "--ptx-build", ptx, "--missing", "--jobs", 4)
again = [
    call for call in calls.splitlines() if "/machine/" in call and " info" not in call and "/tests/train.py" not in call
]
assert [call.split("/")[-1] for call in again if "/tests/" in call] == ["test_bad cuda"], again
assert not any(" bench " in call or " --precision " in call for call in again) and "/python -m" not in calls
assert results(lines, "tests")["test_bad"] == "passed"
of = {line["of"] for line in lines if line.get("part") == "ptx80" and line["result"] in ("passed", "skipped")}
assert of == {"tests", "check", "golden", "train"}, of
assert "/ptx/weft check --backend cuda --quick --op gdn_pre_bwd\n" in calls  # compiles, and has no line
full = lines

calls, lines, _ = record("--build", machine, "--ptx-build", ptx, "--missing", "--parts", "tests,ptx80")
assert not [call for call in calls.splitlines() if " info" not in call] and lines == full

# A part made anew replaces its lines, also those of programs that are gone.
(machine / "tests" / "test_skips").unlink()
_, lines, _ = record("--build", machine, "--parts", "tests,bench", "--suites", "gdn", "--jobs", 4)
assert "test_skips" not in results(lines, "tests") and len(lines) == len(full) - 1
assert [line for line in lines if line.get("suite") == "te"] == [line for line in full if line.get("suite") == "te"]

# Lines about other sources go, those of the Python tests with the package alone.
edit(lambda head: head.update(python="0"))
_, lines, _ = record("--build", machine, "--parts", "golden")
assert not results(lines, "python") and results(lines, "bench") and results(lines, "tests")
edit(lambda head: head.update(sources="0"))
_, lines, _ = record("--build", machine, "--parts", "golden")
assert [line.get("part") for line in lines] == [None, "golden"]

# A build for another GPU is not taken for PTX, and what is not finished in time has no line.
_, _, error = record("--build", machine, "--ptx-build", machine, "--parts", "ptx80", expect=2)
assert "expected a build with WEFT_CUDA_ARCHITECTURES=80-virtual" in error
slow = build("slow", "90a", {"test_for_ever": "exec sleep 100000"})
_, lines, _ = record("--build", slow, "--parts", "tests", "--deadline", 1, expect=3)
assert not results(lines, "tests")
record("--build", slow, "--parts", "tests", "--timeout", 1, expect=1)
# An older build is timed in turns with this one, and may be faster nowhere.
OUT.unlink()
calls, lines, _ = record(
    "--build", machine, "--against", build("equal", "90a", {}, us=98.5), "--parts", "against", "--suites", "te,small"
)
turns = [line.split("/")[-2] for line in calls.splitlines() if " bench " in line]
assert turns == ["equal", "machine", "machine", "equal"], turns
one = next(line for line in lines if line.get("part") == "against")
assert [one[k] for k in ("suite", "result", "rows", "slower", "worst")] == ["te", "passed", 1, 0, 1.0152], one
_, lines, _ = record(
    "--build",
    machine,
    "--against",
    build("older", "90a", {}, us=97.0),
    "--parts",
    "against",
    "--suites",
    "te",
    expect=1,
)
of = [line for line in lines if line.get("part") == "against"]
assert [line.get("ratio") for line in of] == [1.0309, None] and of[1]["result"] == "failed", of
verified = subprocess.run([str(ROOT / "tools" / "gpu_record.py"), "--verify"], capture_output=True, text=True)
assert verified.returncode == 0 and "lacks against" not in verified.stdout
print(f"records: {whole} lines of a GPU that there is not")
