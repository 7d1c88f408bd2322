#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fuzzes for a while and keeps a record of it, a line per target: executions, edges covered, CPU seconds, findings, commit.

    tools/fuzz_record.py --targets-from build-fuzz/tests --processes 2 --seconds 3600
    tools/fuzz_record.py --add FILE     lines of another run, or of another machine, into the record
    tools/fuzz_record.py --verify       what the record says and what it lacks; fails where it lacks something

Targets run in turn, a round each, by so many processes at a time. What a round found is merged into the folder --corpus, and the
record is written: a run that is killed loses the round it was in. A line adds up for as long as the sources of its target stay
the same (comments aside) and begins anew when they change. Which sources a target was built from says the file that --stamp
writes beside the targets; `make fuzz` does so.

Edges are those of the whole corpus. `quiet_seconds` is the CPU time of the rounds since the last one that reached a new edge. A
finding stays in its line, and the input in --corpus, until the sources change."""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from source_hash import ROOT, hash_of

FUZZ = Path("tests/fuzz")
RECORD = ROOT / FUZZ / "record.jsonl"
STAMP = "sources.json"
READER, CALLER = (10**8, 0), (10**7, 2 * 3600)  # executions, quiet CPU seconds
GOALS = {
    "fuzz_options": READER,
    "fuzz_runlog": READER,
    "fuzz_safetensors": READER,
    "fuzz_corpus": READER,
    "fuzz_golden": READER,
    "fuzz_api": CALLER,
    "fuzz_checkpoint": CALLER,
}
# Beyond the headers that a target includes, and their sources: all that it calls of the library.
CHECKS = ("src/core", "src/ops")
KERNELS = (*CHECKS, "src/ref", "src/cpu")
OF_LIBRARY = {
    "fuzz_options": (*CHECKS, "src/model"),
    "fuzz_checkpoint": (*CHECKS, "src/model"),
    "fuzz_golden": (*KERNELS, "cli/golden"),
    "fuzz_api": KERNELS,
}
# Behind so many bytes a target reads no further.
MAX_LEN = {"fuzz_api": 768, "fuzz_golden": 256}
TIMEOUT = 10
FLAGS = ("-entropic=0", f"-timeout={6 * TIMEOUT}", "-rss_limit_mb=2048", "-print_final_stats=1")
SLOW = "slow-unit-"  # an input that takes long is no finding
STOPPED = "timeout-"  # one that takes too long is, unless it was the machine that was busy
NEW = {"executions": 0, "edges": 0, "cpu_seconds": 0, "quiet_seconds": 0, "findings": []}


# ---- sources ---------------------------------------------------------------------------------------------------------------


def sources_of(target, root=ROOT):
    """The target, what it includes directly or not, the sources beside such headers, the library where it is called, the flags."""
    found, open_ = set(), [FUZZ / f"{target}.c"]
    while open_:
        name = open_.pop()
        if name in found or not (root / name).is_file():
            continue
        found.add(name)
        if name.suffix == ".h" and name.parts[0] in ("cli", "check"):
            open_.append(name.with_suffix(".c"))
        for quote, include in re.findall(
            r'^#\s*include\s+(["<])([\w./]+)', (root / name).read_text(encoding="utf-8"), re.M
        ):
            open_ += (
                [name.parent / include, Path("cli") / include, Path(include)]
                if quote == '"'
                else [Path("include") / include]
            )
    return sorted(map(str, found)) + [*OF_LIBRARY.get(target, ()), "cmake/flags.cmake"]


def sources_hash(target, root=ROOT):
    return hash_of(root, sources_of(target, root))[:16]


def commit():
    try:
        done = subprocess.run(
            ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def built_from(folder):
    """{target: {sources, commit}} of the targets in a folder."""
    try:
        return json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {target: {"sources": sources_hash(target), "commit": commit()} for target in GOALS}


# ---- record ----------------------------------------------------------------------------------------------------------------


def read(path):
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return {}
    return {line["target"]: line for line in lines}


def write(path, record):
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text("".join(json.dumps(record[t]) + "\n" for t in sorted(record)), encoding="utf-8")
    os.replace(beside, path)


def add(line, more):
    """One line of two about the same sources. The quiet time is that of the one that covers more, or of both where they cover
    the same."""
    if line is None or line["sources"] != more["sources"]:
        return more
    most = max(line["edges"], more["edges"])
    quiet = sum(one["quiet_seconds"] for one in (line, more) if one["edges"] == most)
    return {
        **more,
        "executions": line["executions"] + more["executions"],
        "edges": most,
        "cpu_seconds": round(line["cpu_seconds"] + more["cpu_seconds"], 3),
        "quiet_seconds": round(quiet, 3),
        "findings": sorted({*line["findings"], *more["findings"]}),
        "result": "finding" if line["findings"] or more["findings"] else "clean",
    }


def after_round(line, executions, cpu, grew, edges, findings):
    """The line behind a round that began with all edges of its corpus and reached new ones, or did not."""
    findings = sorted({*line["findings"], *findings})
    return {
        **line,
        "executions": line["executions"] + executions,
        "edges": max(line["edges"], edges),
        "cpu_seconds": round(line["cpu_seconds"] + cpu, 3),
        "quiet_seconds": 0 if grew else round(line["quiet_seconds"] + cpu, 3),
        "findings": findings,
        "result": "finding" if findings else "clean",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


# ---- a round ---------------------------------------------------------------------------------------------------------------


def call(target, options, env):
    """Runs a target to its end; what it said."""
    done = subprocess.run(
        [target, *map(str, options)],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    return done.returncode, done.stderr


def number(pattern, text):
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0


def edges_of(target, corpus, env):
    status, said = call(target, ["-runs=0", corpus], env)
    if status or " cov: " not in said:
        sys.exit(f"fuzz_record.py: {target}: expected to replay {corpus}, got status {status}:\n{said[-2000:]}")
    return number(r" cov: (\d+)", said)


def seconds_of(target, path, env):
    """CPU time of one input."""
    before = os.times()
    call(target, [f"-timeout={60 * TIMEOUT}", f"-artifact_prefix={path}.", path], env)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def fuzz(target, corpus, work, processes, seconds, env):
    """One round. Executions, CPU seconds, the folders of what is new, and the inputs that are findings."""
    flags = [*FLAGS, f"-max_total_time={seconds}", f"-max_len={MAX_LEN.get(target.name, 4096)}"]
    words = ROOT / FUZZ / f"{target.name}.dict"
    flags += [f"-dict={words}"] if words.is_file() else []
    running, folders, executions, cpu, findings = [], [], 0, 0.0, []
    for k in range(processes):
        folder, said = work / str(k), work / f"{k}.log"
        folder.mkdir()
        folders.append(folder)
        with said.open("wb") as log:
            running.append(
                (
                    said,
                    subprocess.Popen(
                        [target, *flags, f"-artifact_prefix={work}/found-{k}-", folder, corpus],
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                    ),
                )
            )
    for said, process in running:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        cpu += usage.ru_utime + usage.ru_stime
        text = said.read_text(encoding="utf-8", errors="replace")
        executions += number(r"stat::number_of_executed_units:\s*(\d+)", text)
        inputs = [p for p in work.glob(f"found-{said.stem}-*") if SLOW not in p.name]
        stopped = any(STOPPED in p.name for p in inputs)
        inputs = [p for p in inputs if STOPPED not in p.name or seconds_of(target, p, env) > TIMEOUT]
        if process.returncode and not inputs and not stopped:
            sys.exit(
                f"fuzz_record.py: {target}: expected status 0 or a finding, got status {process.returncode}:\n{text[-2000:]}"
            )
        for path in inputs:
            print(f"{target.name}: {path.name}\n{text[-3000:]}", file=sys.stderr)
        findings += inputs
    return executions, cpu, folders, findings


def run_round(target, line, corpus, seconds, options, env):
    """One round of a target, and the line behind it."""
    with tempfile.TemporaryDirectory(dir=options.work) as made:
        before = edges_of(target, corpus, env)
        executions, cpu, folders, inputs = fuzz(target, corpus, Path(made), options.processes, seconds, env)
        status, said = call(target, ["-merge=1", f"-max_len={1 << 16}", corpus, *folders], env)
        if status:
            sys.exit(f"fuzz_record.py: {target}: -merge=1 ended with status {status}:\n{said[-2000:]}")
        findings = []
        for path in inputs:
            kept = corpus.parent / f"{target.name}.findings" / path.name.split("-", 2)[2]
            kept.parent.mkdir(exist_ok=True)
            shutil.copy(path, kept)
            findings.append(kept.name)
        edges = edges_of(target, corpus, env)
    return after_round(line, executions, cpu, edges > before, edges, findings)


def run(options):
    folder = options.targets_from
    known = built_from(folder)
    names = options.only.split(",") if options.only else sorted(GOALS)
    for name in names:
        if name not in GOALS or not os.access(folder / name, os.X_OK):
            sys.exit(f"fuzz_record.py: expected a target in {folder}, got {name}; there are {', '.join(sorted(GOALS))}")
    # What one input has freed is all that the next must not meet; who allocated it a finding that is run again will tell.
    env = {
        **os.environ,
        "ASAN_OPTIONS": "quarantine_size_mb=8:malloc_context_size=0:" + os.environ.get("ASAN_OPTIONS", ""),
    }
    record, end = read(options.out), time.monotonic() + options.seconds
    options.work.mkdir(parents=True, exist_ok=True)
    for name in names:
        corpus, given = options.corpus / name, ROOT / FUZZ / "corpus" / name
        corpus.mkdir(parents=True, exist_ok=True)
        if given.is_dir():
            call(folder / name, ["-merge=1", f"-max_len={1 << 16}", corpus, given], env)
    while time.monotonic() < end:
        for name in names:
            seconds = int(min(options.round, end - time.monotonic()))
            if seconds < 1:
                return 0
            line = record.get(name)
            if line is None or line["sources"] != known[name]["sources"]:
                line = {"target": name, **NEW}
            line = {**line, **known[name], "machine": platform.machine()}
            record[name] = run_round(folder.resolve() / name, line, options.corpus / name, seconds, options, env)
            write(options.out, record)
            print(in_words(record[name]), flush=True)
    return 0


# ---- in words --------------------------------------------------------------------------------------------------------------


def in_words(line):
    return (
        f"{line['target']}: {line['executions']:.3g} executions, {line['edges']} edges, {line['cpu_seconds']:.0f} s of CPU time, "
        f"{line['quiet_seconds']:.0f} s since the last new edge, {len(line['findings'])} findings, {line['commit']}"
    )


def lacks(target, line, sources):
    """What stands between a line and its goal."""
    executions, quiet = GOALS[target]
    if line is None:
        return ["no line"]
    found = []
    if line["sources"] != sources:
        found.append("older than the sources")
    if line["findings"]:
        found.append("open findings: " + ", ".join(line["findings"]))
    if line["executions"] < executions:
        found.append(f"expected {executions:.0e} executions, got {line['executions']:.3g}")
    if line["quiet_seconds"] < quiet:
        found.append(f"expected {quiet} s of CPU time without a new edge, got {line['quiet_seconds']:.0f}")
    return found


def verify(record):
    failed = 0
    for target in sorted(GOALS):
        line = record.get(target)
        missing = lacks(target, line, sources_hash(target))
        print(in_words(line) if line else target)
        for what in missing:
            print(f"    {what}")
        failed |= bool(missing)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RECORD, help="the record")
    parser.add_argument("--targets-from", type=Path, default=ROOT / "build-fuzz" / "tests")
    parser.add_argument("--only", help="targets, with commas between them")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=int, default=600, help="for how long in all")
    parser.add_argument("--round", type=int, default=120, help="seconds of a round")
    parser.add_argument(
        "--corpus", type=Path, default=ROOT / "build-fuzz" / "found", help="where what is found is kept"
    )
    parser.add_argument("--work", type=Path, help="where rounds keep their files (--corpus/rounds)")
    parser.add_argument("--add", type=Path, metavar="FILE")
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--stamp", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    options.work = options.work or options.corpus / "rounds"
    if options.stamp:
        (options.stamp / STAMP).unlink(missing_ok=True)
        (options.stamp / STAMP).write_text(json.dumps(built_from(options.stamp), indent=1) + "\n", encoding="utf-8")
        return 0
    if options.add:
        record = read(options.out)
        for target, line in read(options.add).items():
            record[target] = add(record.get(target), line)
        write(options.out, record)
        return 0
    return verify(read(options.out)) if options.verify else run(options)


if __name__ == "__main__":
    sys.exit(main())
