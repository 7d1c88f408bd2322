#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tests/fuzz_records.py <work folder>: tools/fuzz_record.py on targets that are made up here."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = Path(sys.argv[1]).resolve()
OUT = WORK / "fuzz.jsonl"
sys.path.insert(0, str(ROOT / "tools"))

from fuzz_record import GOALS, NEW, add, after_round, lacks, read, sources_hash, sources_of, write  # noqa: E402

# Edges are what `edges` says; a round runs 100 inputs, and what `crash` says.
TARGET = """#!/bin/sh
for word; do case "$word" in -artifact_prefix=*) prefix=${word#*=} ;; esac; done
case "$*" in
*-runs=0*) echo "#1 DONE cov: $(cat EDGES) ft: 9" >&2 ;;
*-merge=1*) cp NEXT EDGES ;;
*) echo 'stat::number_of_executed_units: 100' >&2; [ ! -s CRASH ] || { echo a >"$prefix$(cat CRASH)"; exit 77; } ;;
esac
"""


def say(name, value):
    (WORK / name).write_text(str(value), encoding="utf-8")


def record(*options, expect=0):
    command = [str(ROOT / "tools" / "fuzz_record.py"), "--out", str(OUT), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == expect, (options, done.returncode, done.stdout, done.stderr)
    return read(OUT), done.stdout


def fuzz(**say_first):
    for name, value in say_first.items():
        say(name, value)
    return record(
        "--targets-from",
        WORK,
        "--only",
        "fuzz_runlog",
        "--processes",
        3,
        "--round",
        1,
        "--seconds",
        2,
        "--corpus",
        WORK / "found",
    )[0]["fuzz_runlog"]


shutil.rmtree(WORK, ignore_errors=True)
WORK.mkdir(parents=True)
target = WORK / "fuzz_runlog"
text = TARGET
for file in ("EDGES", "NEXT", "CRASH"):
    text = text.replace(file, str(WORK / file))
target.write_text(text, encoding="utf-8")
target.chmod(0o755)

# Rounds.
line = fuzz(EDGES=40, NEXT=40, CRASH="")
assert line["executions"] % 300 == 0 < line["executions"] and line["edges"] == 40 and line["result"] == "clean", line
assert line["sources"] == sources_hash("fuzz_runlog") and line["quiet_seconds"] == line["cpu_seconds"] > 0
more = fuzz(NEXT=40)
assert more["executions"] > line["executions"] and more["quiet_seconds"] > line["quiet_seconds"]
assert fuzz(CRASH="timeout-1")["result"] == "clean"  # by itself it takes no time: the machine was busy
found = fuzz(CRASH="crash-1")
assert found["result"] == "finding" and found["findings"] == ["crash-1"]
assert (WORK / "found" / "fuzz_runlog.findings" / "crash-1").read_text() == "a\n"
assert fuzz(CRASH="")["result"] == "finding"  # until the sources change
_, said = record("--verify", expect=1)
assert "open findings: crash-1" in said and "fuzz_api\n    no line\n" in said and "expected 1e+08 executions" in said
lines = read(OUT)
lines["fuzz_runlog"].update(sources="others", executions=10**9)
write(OUT, lines)
again = fuzz()
assert again["result"] == "clean" and again["executions"] < 10**9

# A new edge ends the quiet time, an old one does not.
line = {"target": "fuzz_api", "sources": "a", **NEW}
line = after_round(line, 100, 7.0, False, 50, [])
line = after_round(line, 100, 2.0, False, 50, [])
assert (line["executions"], line["cpu_seconds"], line["quiet_seconds"]) == (200, 9.0, 9.0)
line = after_round(line, 100, 4.0, True, 51, [])
assert (line["edges"], line["quiet_seconds"]) == (51, 0)
line = after_round(line, 100, 3.0, False, 51, [])
assert (line["executions"], line["cpu_seconds"], line["quiet_seconds"]) == (400, 16.0, 3.0)

# Lines of two machines.
both = add(line, {**line, "commit": "b", "findings": ["crash-2"]})
assert (both["executions"], both["cpu_seconds"], both["quiet_seconds"], both["edges"]) == (800, 32.0, 6.0, 51)
assert both["result"] == "finding" and both["commit"] == "b"
assert add(line, {**line, "edges": 52, "quiet_seconds": 1.0})["quiet_seconds"] == 1.0
assert add(line, {**line, "edges": 50, "quiet_seconds": 9.0})["quiet_seconds"] == 3.0
assert (
    add(line, {**line, "sources": "b", "executions": 1})["executions"]
    == 1
    == add(None, {**line, "executions": 1})["executions"]
)
other = WORK / "other.jsonl"
write(other, {"fuzz_api": line})
assert json.dumps(record("--add", other)[0]["fuzz_api"]) == json.dumps(line)
assert record("--add", other)[0]["fuzz_api"]["executions"] == 800

# Goals.
full = {**line, "executions": 10**8, "quiet_seconds": 7200, "findings": []}
assert all(not lacks(t, full, "a") and lacks(t, full, "b") == ["older than the sources"] for t in GOALS)
assert lacks("fuzz_api", {**full, "quiet_seconds": 7199.9}, "a") and not lacks(
    "fuzz_golden", {**full, "quiet_seconds": 0}, "a"
)
assert lacks("fuzz_golden", {**full, "executions": 10**8 - 1}, "a") and lacks(
    "fuzz_api", {**full, "findings": ["x"]}, "a"
)

# What decides a target: every target there is has a goal.
assert {p.stem for p in (ROOT / "tests/fuzz").glob("fuzz_*.c")} == set(GOALS)
assert {"cli/common/json.c", "cli/report/runlog_read.c", "tests/fuzz/fuzz_runlog.c"} <= set(sources_of("fuzz_runlog"))
assert "src/core" not in sources_of("fuzz_runlog") and "src/cpu" in sources_of("fuzz_api")
print("fuzz_records: ok")
