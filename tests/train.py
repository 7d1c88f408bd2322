#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tests/train.py <weft> <work folder> [part...]: the program's training as its user sees it.

Kill and resume, several processes against one, checkpoints, bad input, a GPU. Every run is small; random moments come from a
seed that is printed. Parts are functions of this file, or alone and ranks, which stand for several; without any, all of them
run."""

import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
import xml.etree.ElementTree
from pathlib import Path

WEFT, WORK = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
SMALL = [
    "--layers",
    "2",
    "--channels",
    "32",
    "--heads",
    "2",
    "--context",
    "32",
    "--batch",
    "4",
    "--quiet",
    "--threads",
    "1",
]
ENV = {**os.environ, "OMP_WAIT_POLICY": "passive"}
HANG_S = float(os.environ.get("WEFT_TEST_HANG_S", 600))  # ends a hang; how fast the machine is does not matter
failures = 0


def say(name, ok, detail=""):
    global failures
    failures += not ok
    print(f"{'ok  ' if ok else 'FAIL'} {name}{': ' + str(detail) if detail and not ok else ''}", flush=True)


def weft(*args, limit=None, cwd=None, before=()):
    def limits():
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    # ThreadSanitizer maps a temporary file of its own over the program's constants: not one that the limit cut short.
    env = ENV if limit is None else {**ENV, "TMPDIR": str(WORK / "nowhere")}
    words = [word if isinstance(word, bytes) else str(word) for word in args]
    try:
        result = subprocess.run(
            [*before, str(WEFT), *words],
            capture_output=True,
            text=True,
            errors="replace",
            env=env,
            cwd=cwd or WORK,
            preexec_fn=limits,
            timeout=HANG_S,
        )
    except subprocess.TimeoutExpired:
        return None, "", f"ended after {HANG_S} s: it hangs"
    return result.returncode, result.stdout, result.stderr


def train(out, *args, **options):
    return weft("train", *SMALL, "--data", WORK / "text.txt", "--out", out, *args, **options)


def refused(name, word, code, *args, **options):
    got, out, err = weft("train", *args, **options)
    say(name, got == code and word in err and "Sanitizer" not in err, f"exit {got}, {err.strip()[:200]}")


def figures(out):
    """What a log says, without what depends on the clock."""
    lines = [json.loads(line) for line in (WORK / out / "log.jsonl").read_text().splitlines()]
    keep = ("step", "loss", "val_loss", "rate", "gradient_norm", "row_gain", "layer_gradient_norms")
    return [{k: line[k] for k in keep if k in line} for line in lines if "step" in line]


def figures_so_far(out):
    """The same of a log that grows."""
    log = WORK / out / "log.jsonl"
    return [
        line
        for line in (log.read_bytes().splitlines(True) if log.exists() else [])
        if line.startswith(b'{"step"') and line.endswith(b"\n")
    ]


def checkpoint(out, step):
    folder = WORK / out / f"step-{step:08d}"
    return {p.name: p.read_bytes() for p in folder.iterdir()} if folder.is_dir() else None


def tensors(data):
    """Names to bytes, without the metadata."""
    size = struct.unpack("<Q", data[:8])[0]
    head = json.loads(data[8 : 8 + size])
    head.pop("__metadata__")
    return {k: data[8 + size + v["data_offsets"][0] : 8 + size + v["data_offsets"][1]] for k, v in head.items()}


def is_utf8(data):
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def crc32c_of_byte(byte):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


CRC32C = [crc32c_of_byte(byte) for byte in range(256)]


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ CRC32C[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def rewritten(data, metadata=None, tensors=b""):
    """A file of a checkpoint with other metadata (None removes an entry), its first tensor's bytes replaced, and the checksum
    that belongs to it."""
    size = struct.unpack("<Q", data[:8])[0]
    head = json.loads(data[8 : 8 + size])
    head["__metadata__"].update({"crc32c": "0" * 8, **(metadata or {})})
    head["__metadata__"] = {k: v for k, v in head["__metadata__"].items() if v is not None}
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = struct.pack("<Q", len(text)) + text + tensors + data[8 + size + len(tensors) :]
    place = data.find(b'"crc32c":"')
    return data if place < 0 else data[: place + 10] + b"%08x" % crc32c(data) + data[place + 18 :]


def same_checkpoint(a, b, step):
    x, y = checkpoint(a, step), checkpoint(b, step)
    return x and y and all(tensors(x[f]) == tensors(y[f]) for f in ("model.safetensors", "optimizer.safetensors"))


def apart(a, b):
    """The largest difference of two runs' losses, where each has figures of every step; else, and for NaN, infinity."""
    one, other = figures(a), figures(b)
    if not one or [x["step"] for x in one] != [y["step"] for y in other]:
        return float("inf")
    off = [abs(x["loss"] - y["loss"]) for x, y in zip(one, other, strict=True)]
    return max(off) if all(o == o for o in off) else float("inf")


def setup():
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir(parents=True)
    rng = random.Random(1)
    words = ["stream", "residual", "mixes", "the", "a", "gain", "of", "one", "and", "layer", "into", "next"]
    (WORK / "text.txt").write_text(
        "".join(rng.choice(words) + rng.choice([" ", " ", ", ", ".\n"]) for _ in range(4000))
    )


def killed_run(out, options, steps, signals, rng):
    """Kills a run at random moments, by these signals in turn, and resumes it each time. Returns how often it was killed before it
    was done, the steps at which that was, and what went wrong."""
    targets = sorted(rng.randrange(steps * 9 // 10) for _ in signals)
    struck, log = [], WORK / out / "log.jsonl"
    for number, target in zip(signals, targets, strict=True):
        node = log.stat().st_ino if log.exists() else None
        command = [
            str(WEFT),
            "train",
            *SMALL,
            "--data",
            str(WORK / "text.txt"),
            "--out",
            out,
            *map(str, options),
            "--resume",
        ]
        process = subprocess.Popen(command, cwd=WORK, env=ENV, stderr=subprocess.PIPE, text=True)
        # The log of a run that goes on is a new file. One moment in four is while it starts.
        while target % 4 and process.poll() is None:
            if log.exists() and log.stat().st_ino != node and len(figures_so_far(out)) >= target:
                break
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.02))
        process.send_signal(number)
        _, err = process.communicate()
        done = len(figures_so_far(out))
        if process.returncode == 0 and last_checkpoint(out) != f"step-{done:08d}":
            return len(struck), struck, f"{number!r}: the last checkpoint is {last_checkpoint(out)} after step {done}"
        if process.returncode not in (0, -number):
            return len(struck), struck, f"{number!r}: exit {process.returncode} {err}"
        if done == steps:
            break
        struck.append(done)
    code, _, err = train(out, *options, "--resume")
    return len(struck), struck, "" if code == 0 else f"exit {code} {err}"


def kill_and_resume():
    """WEFT_TEST_KILLS of them, over every kind of residual connection and optimiser."""
    kills = int(os.environ.get("WEFT_TEST_KILLS", 24))
    kinds = [
        (kind, optimizer)
        for kind in ("residual", "hc", "mhc", "mhc_single_pass", "independent")
        for optimizer in ("adamw", "muon")
    ]
    turns = [(signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[i % 3] for i in range(kills)]
    by_signal, seed = {number: 0 for number in turns}, 0
    for index, (kind, optimizer) in enumerate(kinds):
        mine = [turns[i] for i in range(kills) if i // 3 % len(kinds) == index]
        steps = max(100, 20 * len(mine))
        options = [
            "--residual",
            kind,
            "--optimizer",
            optimizer,
            "--steps",
            steps,
            "--save-every",
            7,
            "--val-every",
            10,
            "--dropout",
            0.1,
        ]
        whole = f"whole-{kind}-{optimizer}"
        code, _, err = train(whole, *options)
        say(f"a run, {kind} and {optimizer}", code == 0 and len(figures(whole)) == steps, err)
        expected = [f"step-{step:08d}" for step in [*range(7, steps, 7), steps][-3:]]
        say("the last three checkpoints are kept", visible(whole) == ["log.jsonl", *expected], str(visible(whole)))
        # A run that was done before all its kills had struck leaves the rest to another.
        while mine:
            seed += 1
            out = f"killed-{kind}-{optimizer}-{seed}"
            count, struck, problem = killed_run(out, options, steps, mine, random.Random(seed))
            for number in mine[:count]:
                by_signal[number] += 1
            ok = not problem and same_checkpoint(whole, out, steps) and figures(whole) == figures(out)
            say(f"killed {count} times after steps {struck} and resumed, bit for bit (seed {seed})", ok, problem)
            left = visible(out)
            say(
                "and nothing else is left there",
                len(left) == 4 and left[0] == "log.jsonl" and left[3] == expected[-1],
                str(left),
            )
            if not ok:
                break
            mine = mine[count:]
    print("     kills: " + ", ".join(f"{count} by {number.name}" for number, count in by_signal.items()))
    say("asked to stop, it saves", asked_to_stop("asked", "--steps", "100000") == 0 and last_checkpoint("asked"))


def asked_to_stop(out, *args):
    """The exit status of a run that is asked to stop once it has done a step."""
    log = WORK / out / "log.jsonl"

    def state():
        """A run that begins or goes on has a new file, and a step more in it than it began with."""
        try:
            return log.stat().st_ino, log.read_bytes().count(b"\n")
        except FileNotFoundError:
            return None, 0

    old = state()[0]
    process = subprocess.Popen(
        [str(WEFT), "train", *SMALL, "--data", str(WORK / "text.txt"), "--out", out, *args], cwd=WORK, env=ENV
    )
    new = state()
    while process.poll() is None and new[0] in (None, old):
        time.sleep(0.02)
        new = state()
    while process.poll() is None and state()[1] < new[1] + 2:
        time.sleep(0.02)
    process.terminate()
    return process.wait(HANG_S)


def visible(out):
    return sorted(p.name for p in (WORK / out).iterdir() if p.name != ".lock")


def last_checkpoint(out):
    return max((p.name for p in (WORK / out).glob("step-*")), default="")


def processes():
    options = ["--residual", "mhc", "--steps", 10, "--dropout", 0.1]
    if not shutil.which("mpirun"):
        print("skip several processes: no mpirun")
        return
    # The MPI library keeps memory until the end, which is not the program's to free.
    two = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-x", "ASAN_OPTIONS=detect_leaks=0", "-np", "2"]
    train("one", *options, "--micro-batches", 2)
    code, _, err = train("two", *options, "--micro-batches", 1, before=two)
    ok = code == 0 and figures("one")[0]["loss"] == figures("two")[0]["loss"] and len(figures("one")) == 10
    say("two processes are one with two micro-batches", ok and apart("one", "two") < 1e-4, err)
    code, _, err = train("gone", "--steps", 5, "--rate", 1e30, before=two)
    say("several processes end together", code != 0, err)
    command = [
        *two,
        str(WEFT),
        "train",
        *SMALL,
        "--data",
        str(WORK / "text.txt"),
        "--out",
        "dies",
        "--steps",
        "1000000",
        "--save-every",
        "5",
    ]
    process = subprocess.Popen(command, cwd=WORK, env=ENV, stderr=subprocess.PIPE, text=True)
    for _ in range(200):
        time.sleep(0.1)
        ranks = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True
        ).stdout.split()
        if len(ranks) == 2 and list((WORK / "dies").glob("step-*")):
            break
    os.kill(int(ranks[1]), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    say("a process that dies ends the run", process.returncode != 0 and "signal" in err, err)
    left = last_checkpoint("dies")
    code = asked_to_stop("dies", "--resume", "--steps", "1000000", "--save-every", "5")
    say(
        "and its checkpoints are whole", code == 0 and last_checkpoint("dies") > left > "", f"exit {code}, after {left}"
    )


# ---- several processes that must agree ---------------------------------------------------------------------------------


def ranks_begin(out, *apps):
    """mpirun of one process per element of apps: its own options, and what comes before the program."""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe"]
    for number, (args, before) in enumerate(apps):
        command += [":"] if number else []
        command += [
            "-np",
            "1",
            *before,
            str(WEFT),
            "train",
            *SMALL,
            "--data",
            str(WORK / "text.txt"),
            "--out",
            out,
            *map(str, args),
        ]
    # The MPI library keeps memory until the end, which is not the program's to free.
    return subprocess.Popen(
        command,
        cwd=WORK,
        env={**ENV, "ASAN_OPTIONS": "detect_leaks=0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def ranks_end(process):
    """Exit status and messages; a status of None where it hangs."""
    try:
        _, err = process.communicate(timeout=120)
        return process.returncode, err
    except subprocess.TimeoutExpired:
        process.terminate()  # mpirun then kills its processes
        _, err = process.communicate(timeout=60)
        return None, "hangs: " + err


def ranks_differ(name, words, *apps):
    """Each process ends with the words in its message and none has written anything."""
    code, err = ranks_end(ranks_begin("differ", *((a, ()) if isinstance(a, list) else a for a in apps)))
    lines = [line for line in err.splitlines() if line.startswith("weft train: ")]
    ok = code == 2 and len(lines) == len(apps) and len(set(lines)) == 1 and all(word in lines[0] for word in words)
    say(
        f"{name} on one of {len(apps)} processes",
        ok and not (WORK / "differ").exists() and "Sanitizer" not in err,
        f"exit {code}, {err.strip()[:600]}",
    )
    shutil.rmtree(WORK / "differ", ignore_errors=True)


def disagreeing_ranks():
    if not shutil.which("mpirun"):
        print("skip disagreeing processes: no mpirun")
        return
    few = ["--steps", 3]
    for option, one, other in (
        ("channels", 32, 64),
        ("steps", 3, 5),
        ("seed", 1, 2),
        ("batch", 4, 3),
        ("micro-batches", 1, 2),
        ("layers", 2, 1),
        ("residual", "mhc", "hc"),
        ("optimizer", "adamw", "muon"),
        ("backend", "cpu", "cuda"),
        ("dropout", 0, 0.5),
        ("save-every", 100, 2),
    ):
        ranks_differ(
            f"--{option} {other}",
            [f"--{option} is {one} (rank 0), {other} (rank 1)"],
            few,
            [*few, f"--{option}={other}"],
        )
    both = ["--seed is 2 (rank 0), 1 (ranks 1-2)", "--clip is 1 (ranks 0, 2), 3 (rank 1)"]
    ranks_differ("another option", both, [*few, "--seed", 2], [*few, "--clip", 3], few)
    (WORK / "rate.conf").write_text("rate = 2e-3\n")
    ranks_differ(
        "a file of options", ["--rate is 0.001 (rank 0), 0.002 (rank 1)"], few, [*few, "--config", "rate.conf"]
    )
    text = (WORK / "text.txt").read_text()
    (WORK / "swapped.txt").write_text(text[:-2] + text[-1] + text[-2])
    ranks_differ("a text of the same size", ["the text of --data is"], few, [*few, "--data", "swapped.txt"])
    ranks_differ("no text", ["rank 2: nowhere.txt: No such file"], few, few, [*few, "--data", "nowhere.txt"])
    ranks_differ(
        "options that contradict",
        ["rank 0: --warmup: expected at most --steps, which is 3, got 9"],
        [*few, "--warmup", 9],
        few,
    )
    code, err = ranks_end(ranks_begin("differ", ([*few, "--help"], ()), (few, ())))
    say(
        "help on one of 2 processes",
        code == 2 and "rank 0: its options do not start a run" in err,
        f"exit {code}, {err}",
    )
    code, err = ranks_end(ranks_begin("differ", ([*few, "--bogus"], ()), (few, ())))
    say(
        "an unknown option on one of 2 processes",
        code == 2 and "unknown option '--bogus'" in err,
        f"exit {code}, {err}",
    )
    shutil.copy(WORK / "text.txt", WORK / "copy.txt")
    code, err = ranks_end(
        ranks_begin("same", ([*few, "--threads", 2], ()), ([*few, "--data", "copy.txt", "--quiet"], ()))
    )
    say("threads and the text's path may differ", code == 0 and len(figures("same")) == 3, f"exit {code}, {err}")


def disagreeing_machines():
    """Versions, BLAS and instruction sets, where this machine can be made to show two of them."""
    if not shutil.which("mpirun") or not shutil.which("cc"):
        print("skip disagreeing machines: no mpirun or no compiler")
        return
    few = ["--steps", 3]
    for function, value, word in (
        ("const char *weft_version(void)", '"9.8.7"', "the version of the library is"),
        ("int weft_cpu_isa(void)", "1", "the instruction set is"),
    ):
        other = WORK / "other.so"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-o", other, "-x", "c", "-"],
            input=f"{function} {{ return {value}; }}",
            text=True,
            check=True,
        )
        before = ("env", f"LD_PRELOAD={other}")
        _, facts, err = weft("info", before=before)
        if "ASan runtime does not come first" in err or facts == weft("info")[1]:
            print(f"skip {function}: it cannot be replaced, or is the same")
            continue
        ranks_differ(function, [word, "(rank 0)", "(rank 1)"], few, (few, before))
    before = ("env", "OPENBLAS_CORETYPE=Nehalem")
    if weft("info", before=before)[1] == weft("info")[1]:
        print("skip the BLAS: there is only one")
    else:
        ranks_differ("another BLAS", ["the BLAS is", "(rank 0)", "(rank 1)"], few, (few, before))


def disagreeing_checkpoints():
    """Folders that only one machine sees."""
    if not shutil.which("mpirun"):
        print("skip disagreeing checkpoints: no mpirun")
        return
    options = ["--steps", 6, "--save-every", 2, "--resume"]
    alone = train("alone", *options)
    code, err = ranks_end(ranks_begin("shared", (options, ()), (options, ())))
    say("runs of one and of two processes", alone[0] == 0 and code == 0, err)
    (WORK / "behind").mkdir()
    for name in ("step-00000002", "step-00000004"):
        shutil.copytree(WORK / "shared" / name, WORK / "behind" / name)
    found = "the checkpoint found in --out is step-00000006 (rank 0), "
    for name, words, args in (
        ("no checkpoint", [found + "none (rank 1)"], [*options, "--out", "empty"]),
        ("an older checkpoint", [found + "step-00000004 (rank 1)"], [*options, "--out", "behind"]),
        ("a checkpoint of another run", ["the state of the model is"], [*options, "--out", "alone"]),
        ("no --resume", ["rank 1: alone holds a run already"], [*options[:-1], "--out", "alone"]),
    ):
        ranks_differ(name, words, [*options, "--out", "shared"], args)
    say("no folder is made for it", not (WORK / "empty").exists())
    left = {p.name: p.read_bytes() for p in (WORK / "shared").rglob("*") if p.is_file()}
    shutil.copytree(WORK / "shared", WORK / "mirror")
    code, err = ranks_end(ranks_begin("shared", (options, ()), ([*options, "--out", "mirror"], ())))
    same = {p.name: p.read_bytes() for p in (WORK / "shared").rglob("*") if p.is_file()} == left
    say("a copy of the folder is as good", code == 0 and same, f"exit {code}, {err}")


def ranks_of(process):
    """Process ids by rank."""
    found = {}
    for pid in subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True
    ).stdout.split():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for entry in environment:
            if entry.startswith(b"OMPI_COMM_WORLD_RANK="):
                found[int(entry.split(b"=")[1])] = int(pid)
    return found


def wait_until(process, true):
    """Polls while the process runs; a hang ends after two minutes."""
    for _ in range(2400):
        if true() or process.poll() is not None:
            return
        time.sleep(0.05)


def last_step(out):
    log = WORK / out / "log.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return max(
        (json.loads(line)["step"] for line in lines if line.endswith("}") and line.startswith('{"step"')), default=0
    )


def signalled_ranks():
    """One process, or mpirun, is asked to stop: all stop after the same step, which is saved, and resumed runs have the bits of
    one that was never stopped."""
    if not shutil.which("mpirun"):
        print("skip signalled processes: no mpirun")
        return
    endless = ["--steps", 1000000, "--dropout", 0.1]
    for count, stops in (
        (2, ((1, signal.SIGTERM), (0, signal.SIGINT), ("mpirun", signal.SIGTERM), ("mpirun", signal.SIGUSR1))),
        (3, ((2, signal.SIGINT), (0, signal.SIGTERM))),
    ):
        out = f"signalled{count}"
        for target, number in stops:
            before = last_step(out)
            process = ranks_begin(out, *[([*endless, "--save-every", 0, "--resume"], ())] * count)
            # Where mpirun kills what does not end at once, the run goes on from an older checkpoint.
            begun = int(last_checkpoint(out)[5:] or 0)
            wait_until(process, lambda: begun + 3 <= last_step(out) != before and len(ranks_of(process)) == count)
            os.kill(process.pid if target == "mpirun" else ranks_of(process)[target], number)
            code, err = ranks_end(process)
            name = f"{signal.Signals(number).name} to {target if target == 'mpirun' else f'rank {target}'} of {count}"
            if (target, number) == ("mpirun", signal.SIGTERM):
                say(f"{name} ends the run", code is not None, err)
                continue
            saved = last_checkpoint(out)
            say(
                f"{name} stops all and saves",
                code == 0 and saved == f"step-{last_step(out):08d}" and int(saved[5:]) > begun,
                f"exit {code}, {saved}, step {last_step(out)}, {err}",
            )
        last = last_step(out)
        process = ranks_begin(f"whole{count}", *[([*endless, "--save-every", last or 1], ())] * count)
        wait_until(process, lambda: last_checkpoint(f"whole{count}"))
        process.send_signal(signal.SIGUSR1)
        code, err = ranks_end(process)
        same = same_checkpoint(out, f"whole{count}", last) and figures(out) == figures(f"whole{count}")[:last]
        say(
            f"stopped and resumed, {count} processes have the bits of a run that was not",
            code == 0 and same,
            f"exit {code}, {err}",
        )


def recompute():
    options = ["--residual", "mhc", "--layers", 3, "--steps", 5, "--dropout", 0.2]
    train("kept", *options)
    for group in (1, 2, 3):
        train(f"group{group}", *options, "--recompute", "--poison", "--recompute-group", group)
        say(f"recompute in groups of {group}, bit for bit", same_checkpoint("kept", f"group{group}", 5))


def kinds():
    for kind in ("residual", "hc", "mhc", "mhc_single_pass", "independent"):
        code, _, err = train(f"kind-{kind}", "--residual", kind, "--steps", 60, "--rate", 3e-3)
        lines = figures(f"kind-{kind}") if code == 0 else [{"loss": 0}]
        say(f"{kind} learns", code == 0 and lines[-1]["loss"] < lines[0]["loss"] - 2, f"{err} {lines[0]} {lines[-1]}")
    code, _, err = train("muon", "--optimizer", "muon", "--steps", 60, "--rate", 3e-3)
    say("muon learns", code == 0 and figures("muon")[-1]["loss"] < figures("muon")[0]["loss"] - 2, err)
    code, out, err = weft("sample", "--from", "kind-mhc", "--prompt", "the ", "--count", 60)
    again = weft("sample", "--from", "kind-mhc", "--prompt", "the ", "--count", 60)
    say("a sample", code == 0 and out.startswith("the ") and len(out) > 60 and again[1] == out, err)
    names = set(tensors(checkpoint("kind-mhc", 60)["model.safetensors"]))
    say("names of tensors", {"embed.weight", "layers.0.attention.connection.phi", "layers.1.mlp.down.weight"} <= names)


def cells(page, kind):
    """The kinds table's row of a kind, without its name."""
    row = re.search(f"<tr><td><span[^>]*></span>{re.escape(kind)}</td>(.*?)</tr>", page)
    return re.findall("<td>(.*?)</td>", row.group(1)) if row else []


def unfinished_runs(page_of, words_of, log):
    """Runs of which a kill left less than they were to have: their losses and norms are no end, their steps are said."""

    def cut(folder, residual, seed, step, loss, gain=1, norms=(1, 1, 1)):
        log(folder, residual, seed, gain, 0, steps="300")
        lines = (WORK / folder / "log.jsonl").read_text().splitlines()
        row = {"loss": loss, "val_loss": loss, "row_gain": gain, "layer_gradient_norms": norms}
        text = "".join(json.dumps({"step": s, **row}) + "\n" for s in (1, step))
        (WORK / folder / "log.jsonl").write_text(lines[0] + "\n" + text)
        return folder

    hc = [cut("u-hc-1", "hc", 1, 300, 2.5, 100), cut("u-hc-2", "hc", 2, 300, 2.51, 200)]
    mhc = [cut("u-mhc-1", "mhc", 1, 300, 2.6), cut("u-mhc-2", "mhc", 2, 300, 2.61)]
    whole, _ = page_of("four finished runs", *hc, *mhc)
    say("names no run as unfinished", "Unfinished" not in whole and cells(whole, "hc")[:2] == ["2", "300"])
    cut("u-hc-1", "hc", 1, 20, 4.5, 3, (1, 9, 1))
    page, _ = page_of("a run that was cut short", *hc, *mhc)
    say("has the same winner", "; hc ends with the lowest loss, with one seed." in words_of(page), words_of(page))
    say("its least gain is of a finished run", "can grow 200-fold with hc" in words_of(page), words_of(page))
    say("its steps beside those of the finished", cells(page, "hc")[:4] == ["2", "300; 20 of 300", "2.5100", "2.5100"])
    say("its norms are left out", cells(page, "hc")[6] == "1", cells(page, "hc"))
    say("it is named", "Unfinished: u-hc-1 (20 of 300 steps)." in page)
    cut("u-hc-2", "hc", 2, 100, 0.01, 3e4)
    page, _ = page_of("a kind without a finished run", *hc, *mhc)
    say(
        "is not compared",
        words_of(page).endswith("can grow 3.00 to 30000-fold with hc (20 to 100 of 300 steps) and 1.00-fold with mhc."),
        words_of(page),
    )
    say("how far it is", cells(page, "hc")[1] == "20 to 100 of 300", cells(page, "hc"))
    more = cut("u-hc-wide", "hc_wide", 1, 300, 2.3, 300)
    page, _ = page_of("three kinds, one without a finished run", *hc, *mhc, more)
    say("the lowest loss is of the others", "hc_wide ends with the lowest loss, with" in words_of(page), words_of(page))
    say("and so are the losses", "Mean validation loss: mhc 2.6050 (2.6000 to 2.6100, 2 runs), hc_wide 2.3" in page)
    page, _ = page_of("one unfinished run", hc[0])
    say("ends nowhere", words_of(page) == "hc (20 of 300 steps) is at a validation loss of 4.5.", words_of(page))


def seeds_and_kinds(page_of, words_of, log):
    """What is one run, one seed and one kind."""
    runs = [log(f"s-{kind}", kind, 1, 1, loss) for kind, loss in (("hc", 2.5), ("mhc", 2.6))]
    if not (WORK / "s-link").exists():
        (WORK / "s-link").symlink_to("s-hc")
    page, _ = page_of("paths given twice", *runs, *runs, "s-hc/", "s-hc/log.jsonl", "s-link")
    say("each log is read once", "; seed 1; 2 runs." in page and cells(page, "hc")[0] == "1", cells(page, "hc"))
    copies = [log(f"s-{kind}-copy", kind, 1, 1, loss) for kind, loss in (("hc", 2.5), ("mhc", 2.6))]
    page, _ = page_of("copies", *runs, *copies)
    say("are no other seeds", words_of(page) == "hc ends with the lowest loss, with one seed.", words_of(page))
    other = [log(f"s-{kind}-2", kind, 2, 1, loss) for kind, loss in (("hc", 2.5), ("mhc", 2.6))]
    page, _ = page_of("two seeds and copies", *runs, *copies, *other)
    say("are two seeds", words_of(page) == "hc ends with the lowest loss." and "; seeds 1, 2; 6 runs" in page)

    for kind in ("residual", "hc", "mhc", "mhc_single_pass"):
        uniform, mhc = {"first-mix": "uniform"}, kind.startswith("mhc")
        old, new = log("m-old", kind, 1, 1, 2), log("m-new", kind, 2, 1, 2, **{"first-mix": "identity"})
        same = log("m-same", kind, 3, 1, 2, **(uniform if mhc else {"first-mix": "identity"}))
        page, _ = page_of(f"{kind} with and without a first mix", old, new, same)
        order = re.findall(r"</span>([^<]*)</li>", page)
        wanted = [f"{kind}, first-mix uniform", f"{kind}, first-mix identity"] if mhc else [kind]
        say("an older log began uniform, where there is a choice", order == wanted, order)

    def longer(folder, seed, *parts):
        """Runs of steps 1 to the first part, then to the second of a run that was made longer, and so on."""
        text, done = "", 0
        for steps in parts:
            text += json.dumps({"options": {"residual": "mhc", "seed": str(seed), "steps": str(steps)}}) + "\n"
            text += "".join(f'{{"step":{s},"loss":{4 - s / 50}}}\n' for s in range(done + 1, steps + 1))
            done = steps
        (WORK / folder).mkdir(exist_ok=True)
        (WORK / folder / "log.jsonl").write_text(text)
        return folder

    runs = [longer("l-1", 1, 40), longer("l-2", 2, 20, 40), longer("l-3", 3, 20, 40), longer("l-4", 4, 20, 30, 40)]
    page, _ = page_of("runs that were made longer", *runs, longer("l-5", 5, 40, 40))
    order = re.findall(r"</span>([^<]*)</li>", page)
    wanted = ["mhc", "mhc, lengthened at 20", "mhc, lengthened at 20 and 30"]
    say("are kinds apart", order == wanted and [cells(page, k)[0] for k in wanted] == ["2", "2", "1"], order)
    (WORK / "g-c").mkdir(exist_ok=True)
    text = '{"options":{"residual":"hc"}}\n{"step":1,"loss":2,"row_gain":-1}\n'
    (WORK / "g-c/log.jsonl").write_text(text)
    page, _ = page_of("a negative gain and one of two", "g-c", log("g-d", "mhc", 1, 2, 2), log("g-e", "k", 1, 1, 2))
    say(
        "only what can grow is told",
        "grow 2.00-fold with mhc and 1.00-fold with k;" in words_of(page) and "-1" not in words_of(page),
        words_of(page),
    )


def page_over_log(log):
    """A page in the place of a log that it is of."""
    path = WORK / log("over", "mhc", 1, 1, 3) / "log.jsonl"
    (WORK / "over-cut").mkdir(exist_ok=True)
    (WORK / "over-cut/log.jsonl").write_text('{"options":{"residual":"mhc"}}\n{"st')
    (WORK / "over-bad").mkdir(exist_ok=True)
    (WORK / "over-bad/log.jsonl").write_text('{"step":1,"loss":2}\nno log\n')
    (WORK / "over-none").mkdir(exist_ok=True)
    (WORK / "over-none/log.jsonl").write_text('{"opt')
    if not (WORK / "over-link.html").is_symlink():
        (WORK / "over-link.html").symlink_to(path)
    for out in (
        "over/log.jsonl",
        path,
        "over/../over/log.jsonl",
        "over-link.html",
        "over-cut/log.jsonl",
        "over-bad/log.jsonl",
        "over-none/log.jsonl",
    ):
        before = (WORK / out).read_bytes()
        code, _, err = weft("report", "--runs", "over", "over-cut", "over-bad", "over-none", f"--out={out}")
        ok = code == 2 and f"{out}: expected another file for --out" in err and (WORK / out).read_bytes() == before
        say(f"report --out {out} leaves the log alone", ok, f"exit {code}: {err}")
    (WORK / "over.html").write_text("<!doctype html>\n")
    code, _, err = weft("report", "--runs", "over", "over.html", "--out", "over.html")
    say("an older page among the runs is replaced", code == 0 and "</svg>" in (WORK / "over.html").read_text(), err)


def smooth_curve(page_of):
    """The line of a training loss is the mean over a fiftieth of the run on either side."""
    random_loss = random.Random(1)
    losses = [3 + random_loss.random() * (50 if step == 80 else 1) for step in range(200)]
    losses[30] = losses[31] = None
    lines = [json.dumps({"step": step + 1, "loss": loss}) for step, loss in enumerate(losses)]
    (WORK / "smooth.jsonl").write_text("\n".join(lines) + "\n")
    page, _ = page_of("a noisy run", "smooth.jsonl")
    chart = re.search('<svg[^>]*aria-label="Training loss".*?</svg>', page, re.S)
    paths = re.findall('<path class="mark"[^>]* d="([^"]*)"', chart.group()) if chart else []
    wanted = []
    for at, loss in enumerate(losses):
        around = [v for v in losses[max(0, at - 4) : at + 5] if v is not None]
        if loss is not None:
            wanted.append(sum(around) / len(around))
    places = [[float(word.split()[1]) for word in re.split("[ML]", path)[1:]] for path in paths]
    if not (len(places) == 2 and len(places[0]) == len(places[1]) == len(wanted)):
        return say("its line has a point per loss", False, [len(p) for p in places])
    # The raw line, drawn in the same frame, says where a value lies; both are rounded to a tenth of a pixel.
    raw = [loss for loss in losses if loss is not None]
    low, high = raw.index(min(raw)), raw.index(max(raw))
    slope = (places[0][high] - places[0][low]) / (raw[high] - raw[low])
    off = max(abs(p - places[0][low] - slope * (w - raw[low])) for p, w in zip(places[1], wanted, strict=True))
    say("its line is the mean around each step", off <= 0.2, off)


def report():
    def page_of(name, *words):
        code, _, err = weft("report", "--runs", *words, "--out", "page.html")
        page = (WORK / "page.html").read_text() if code == 0 else ""
        ok = page.count("</svg>") == page.count("<svg") > 0 and "nan" not in page and "http" not in page
        say(f"report of {name}", ok and "<script" not in page, f"exit {code}: {err}")
        return page, err

    def words_of(page):
        return re.sub("<[^>]*>", "", re.search("<h1>(.*)</h1>", page).group(1)) if page else ""

    for name, words in (
        ("runs with commas", ["kind-mhc,kind-residual,kind-hc/log.jsonl"]),
        ("runs as a shell has them", ["kind-hc", "kind-mhc/", "kind-residual"]),
    ):
        page, _ = page_of(name, *words)
        order = re.findall(r"</span>([^<]*)</li>", page)
        say("the plain residual is the first", order == ["residual", "hc", "mhc"], order)
        say("all charts and the maps of hc and mhc", page.count("<svg") == 6 and page.count("<caption>") == 6)

    def log(folder, residual, seed, gain, loss, more="", **options):
        """A run of two steps whose figures are known."""
        options = {"residual": residual, "streams": "0", "layers": "9", "seed": str(seed), "steps": "2", **options}
        (WORK / folder).mkdir(exist_ok=True)
        (WORK / folder / "log.jsonl").write_text(
            json.dumps({"options": options})
            + f'\n{{"step":1,"loss":5,"row_gain":1}}\n{{"step":2,"loss":{loss},"val_loss":{loss},"seconds":0.5,'
            f'"row_gain":{gain}{more}}}\n'
        )
        return folder

    hc = [log(f"r-hc-{i}", "hc", i, 10.0**i, 2.5 + 0.01 * i) for i in (2, 3)]
    mhc = [log(f"r-mhc-{i}", "mhc", i, 1, 2.6 + 0.01 * i) for i in (2, 3)]
    page, _ = page_of("known figures", *mhc, *hc)
    say(
        "its sentence",
        words_of(page)
        == "Through 9 layers a signal can grow 100 to 1000-fold with hc and 1.00-fold with mhc; hc ends with the lowest loss.",
        words_of(page),
    )
    say("its losses", "hc 2.5250 (2.5200 to 2.5300, 2 runs), mhc 2.6250 (2.6200 to 2.6300, 2 runs)" in page)
    say("a band each", page.count("opacity:.18") == 6, page.count("opacity:.18"))
    say("streams and seeds", "hc with 4 streams, mhc with 4 streams; seeds 2, 3; 4 runs" in page)
    log("r-mhc-3", "mhc", 3, 1, 2.1)
    page, _ = page_of("losses within their spread", *mhc, *hc)
    say(
        "it says so",
        words_of(page).endswith("; mhc ends with the lowest loss, but no lower than hc by more than seeds differ."),
        words_of(page),
    )
    page, _ = page_of(
        "two rates", log("r-a", "mhc", 1, 1, 3, rate="0.0030000000000000001"), log("r-b", "mhc", 1, 1, 2, rate="0.01")
    )
    order = re.findall(r"</span>([^<]*)</li>", page)
    say("kinds are called after what differs", order == ["mhc, rate 0.003", "mhc, rate 0.01"], order)
    same = [log("r-c", "mhc", 1, 1, 3, streams="0"), log("r-d", "mhc", 2, 1, 3, streams="4")]
    page, _ = page_of("streams by default and by name, and two", *same, log("r-e", "mhc", 1, 1, 3, streams="2"))
    order = re.findall(r"</span>([^<]*)</li>", page)
    say("kinds go by the streams that are used", order == ["mhc, streams 4", "mhc, streams 2"], order)
    page, _ = page_of("fifty runs", *(log(f"fifty-{i}", "mhc", i, 1, 2 + i / 100) for i in range(50)))
    say("of one kind", page.count("<li>") == 1 and "50 runs" in page and page.count("fifty-") == 50)
    page, _ = page_of("fifty kinds", *(log(f"many-{i}", f"k{i}", i, 1, 2 + i / 100) for i in range(50)))
    say("with as many names", page.count("<li>") == 50)
    unfinished_runs(page_of, words_of, log)
    seeds_and_kinds(page_of, words_of, log)
    page_over_log(log)
    smooth_curve(page_of)
    mix = ',"residual_mix":[[0.9,0.1,0.1,0.9],[1,0,0,-0.5]],"new":[{"a":"]"},[true]],"newer":{},"newest":"x"'
    page, _ = page_of("a log of a later version", log("later", "mhc", 1, 1, 3, mix))
    say("has its maps", page.count("<caption>") == 2 and "0.90" in page and 'class="minus"' in page)
    for wrong, word in (
        ("[[1,2]]", "not square"),
        ("[[1],[1,0,0,1]]", "not of one size"),
        ("[[]]", "not square"),
        ("[1]", ""),
    ):
        log("odd-mix", "mhc", 1, 1, 3, f',"residual_mix":{wrong}')
        code, _, err = weft("report", "--runs", "odd-mix", "--out", "never.html")
        say(f"report of a mix {wrong}", code == 2 and "line 3" in err and word in err, f"exit {code}: {err}")
    for key in ("[", "}", '{"a":[}', "", ",", '"'):
        log("odd-key", "mhc", 1, 1, 3, f',"new":{key}')
        code, _, err = weft("report", "--runs", "odd-key", "--out", "never.html")
        say(f"report of a strange value {key}", code == 2 and "line 3" in err, f"exit {code}: {err}")

    (WORK / "r-empty").mkdir(exist_ok=True)
    (WORK / "r-killed").mkdir(exist_ok=True)
    (WORK / "r-killed/log.jsonl").write_text('{"options":{"residual":"mhc"}}\n{"st')
    page, err = page_of("a pattern with what is no run in it", *hc, "r-empty", "r-killed", "text.txt")
    for word in (
        "r-empty: there is no log.jsonl in it",
        "r-killed/log.jsonl: the run ended before its first step",
        "text.txt: line 1",
    ):
        say(f"it says {word}", word in err and word in page, err)
    code, _, err = weft("report", "--runs", "r-empty", "r-killed", "--out", "never.html")
    say("report of no run at all", code == 2 and "expected at least one run with a step, got none" in err, err)
    code, _, err = weft("report", "--runs", hc[0], "nowhere", "--out", "never.html")
    say("report of a path that is not there", code == 2 and "nowhere: No such file" in err, err)
    code, _, err = weft("report", "--runs", "--out", "never.html")
    say(
        "report of --runs and nothing",
        code == 2 and "--runs: expected one or several of PATH..., got nothing" in err,
        err,
    )
    say("nothing is written", not (WORK / "never.html").exists())
    steps = [json.loads(line) for line in (WORK / "kind-mhc/log.jsonl").read_text().splitlines()]
    mixes = [line["residual_mix"] for line in steps if "residual_mix" in line]
    say("mixes are logged with validations", len(mixes) == 3 and all(len(m) == 4 for m in mixes), len(mixes))
    for mix in mixes[-1] if mixes else [[]]:
        sums = [sum(mix[o::4]) for o in range(4)] + [sum(mix[4 * i : 4 * i + 4]) for i in range(4)]
        say("a mix is doubly stochastic", len(mix) == 16 and all(abs(s - 1) < 1e-3 for s in sums), sums)
    plain = (WORK / "kind-residual/log.jsonl").read_text()
    say("the plain residual has no mix", "residual_mix" not in plain)
    (WORK / "foreign.jsonl").write_text("no log\n")
    (WORK / "cut.jsonl").write_text('{"step":1,"loss":2.5}\n{"step":2,"lo')
    for path, word in (
        ("nowhere", "No such file"),
        ("foreign.jsonl", "line 1"),
        ("text.txt", "line 1"),
        (",", "--runs: expected a folder or a log"),
    ):
        code, _, err = weft("report", "--runs", path, "--out", "never.html")
        say(f"report of {path}", code == 2 and word in err and not (WORK / "never.html").exists(), err)
    code, _, err = weft("report", "--runs", "cut.jsonl", "--out", "cut.html")
    say("report of a log that was cut off", code == 0, err)
    code, _, err = weft("report", "--runs", "kind-mhc", "--out", "full.html", limit=1000)
    say("report on a full disk", code != 0 and not (WORK / "full.html").exists(), f"exit {code} {err}")


def first_run():
    """What `make run` does, with models that take no time."""
    script = Path(__file__).resolve().parent.parent / "tools/first_run.sh"
    tiny = ["--layers", "2", "--steps", "6", "--data", str(WORK / "text.txt"), "--val-every", "3"]
    for name, begun, seeds in (("with time", time.time(), 5), ("without time", time.time() - 1000, 1)):
        runs, page = WORK / f"first-{seeds}", WORK / f"first-{seeds}.html"
        words = [script, WEFT, runs, page, "cpu", str(int(begun)), *tiny]
        result = subprocess.run(words, capture_output=True, text=True, env=ENV, timeout=HANG_S)
        made = sorted(folder.name for folder in runs.iterdir()) if runs.exists() else []
        wanted = sorted(f"{kind}-{seed}" for kind in ("residual", "hc", "mhc") for seed in range(1, seeds + 1))
        # On many processors seeds run side by side, and the first round has more than one.
        ok = result.returncode == 0 and (made == wanted or (seeds == 1 and set(wanted) <= set(made)))
        say(f"the first minutes, {name}", ok, f"{result.stderr} {made}")
        sentence = re.search("<h1>(.*)</h1>", page.read_text()).group(1) if ok else ""
        plain = re.sub("<[^>]*>", "", sentence.replace("<sup>", "^"))
        say("end with the page's sentence", ok and plain in result.stdout and str(page) in result.stdout, result.stdout)
    words = [script, WEFT, WORK / "first-bad", WORK / "bad.html", "cpu", "0", *tiny, "--heads", "3"]
    result = subprocess.run(words, capture_output=True, text=True, env=ENV, timeout=HANG_S)
    say("and fail where training does", result.returncode != 0 and not (WORK / "bad.html").exists(), result.stderr)


def odd_reports():
    """Logs with any numbers and names in them: a page that ends, in UTF-8, every number in it finite, every chart well-formed."""

    def wrong(page):
        if not is_utf8(page):
            return "not UTF-8"
        text = page.decode()
        found = re.search(r".{0,30}(?<![a-z])-?(nan|inf)(?![a-z]).{0,30}", text, re.I)
        if found:
            return found.group()
        for chart in re.findall(r"<svg.*?</svg>", text, re.S):
            try:
                xml.etree.ElementTree.fromstring(chart)
            except xml.etree.ElementTree.ParseError as error:
                return f"{error}: {chart[:80]}"
        return "" if text.count("</svg>") == text.count("<svg") else "a chart is not closed"

    def shows(name, log, run="log"):
        folder = os.fsencode(WORK) + b"/odd-report-" + os.fsencode(run)
        os.makedirs(folder, exist_ok=True)
        Path(os.fsdecode(folder), "log.jsonl").write_text(log)
        code, _, err = weft("report", "--runs", b"report-base," + folder, "--out", "odd.html")
        alone = weft("report", "--runs", folder, "--out", "odd-alone.html")[0]
        detail = (
            ""
            if code or alone
            else wrong((WORK / "odd.html").read_bytes()) or wrong((WORK / "odd-alone.html").read_bytes())
        )
        say(f"report of {name}", code == alone == 0 and not detail, f"exit {code}, {alone}: {err} {detail}")

    train("report-base", "--steps", 4)
    shows("a run without figures", '{"step":1,"loss":null,"seconds":null}\n')
    shows(
        "a run that went wrong",
        '{"step":1,"loss":inf,"seconds":inf,"bytes":inf,"row_gain":inf,"layer_gradient_norms":[nan,inf,1]}\n'
        '{"step":2,"loss":nan,"gradient_norm":-inf,"row_gain_max":1e999}\n',
    )
    shows(
        "numbers at the ends of their range",
        '{"step":1,"loss":1e308,"gradient_norm":1e308,"seconds":1e308,"bytes":5e-324}\n'
        '{"step":2,"loss":-1e308,"gradient_norm":5e-324,"seconds":1e-308,"row_gain":5e-324}\n',
    )
    shows("losses that differ in their last bit", '{"step":1,"loss":2.5}\n{"step":2,"loss":2.5000000000000004}\n')
    shows("large losses that are one", '{"step":1,"loss":1e60}\n{"step":2,"loss":1e60}\n')
    shows("a late step", '{"step":9007199254740992,"loss":1}\n')
    for step in ("null", "-1", "1.5", "1e17", "nan"):
        (WORK / "odd.jsonl").write_text(f'{{"step":{step},"loss":1}}\n')
        code, _, err = weft("report", "--runs", "odd.jsonl", "--out", "never.html")
        say(f"report of step {step}", code == 2 and "whole number" in err, f"exit {code}: {err}")
    figures = '{"step":1,"loss":1,"seconds":1}\n'
    for run in (
        b"latin-\xe9",
        b"half-\xe2\x82",
        b"<b>&\"'",
        b"x" * 57 + "\u20ac\u20ac\u20ac".encode(),
        b"control-\x01\x7f",
    ):
        shows(f"a run called {run!r}", figures, run)
    long = "\u20ac" * 50
    shows(
        "long names in a log",
        json.dumps(
            {"options": {"residual": long, "layers": long, "optimizer": long, "context": long}}, ensure_ascii=False
        )
        + "\n"
        + figures,
    )
    rng = random.Random(13)
    columns = (
        "loss",
        "val_loss",
        "rate",
        "gradient_norm",
        "seconds",
        "tokens_per_s",
        "row_gain",
        "row_gain_max",
        "column_gain",
        "column_gain_max",
        "bytes",
        "stream_bytes",
        "peak_bytes",
    )
    for number in range(20):
        lines = []
        for step in sorted(rng.choice((rng.randrange(9), rng.randrange(1 << 53))) for _ in range(rng.randrange(1, 9))):
            values = (
                f"{rng.choice((-1, 1)) * 10 ** rng.uniform(-330, 308):.17g}"
                if rng.random() < 0.7
                else rng.choice(("null", "nan", "inf", "-inf", "0", "-0", "1", "1e999"))
                for _ in columns
            )
            lines.append(
                f'{{"step":{step},'
                + ",".join(f'"{c}":{v}' for c, v in zip(columns, values, strict=True) if rng.random() < 0.8)
                + ',"layer_gradient_norms":[1e-300,nan,1e300,2]}'
            )
        shows(f"any numbers, {number}", "\n".join(lines).replace(",,", ",") + "\n")


def config_file():
    (WORK / "run.conf").write_text("# a run\nresidual = hc\nsteps=3\nbias = on   # biases\n\nlayers = 1\n")
    code, _, err = train("conf", "--config", "run.conf", "--layers", 2)
    head = json.loads((WORK / "conf/log.jsonl").read_text().splitlines()[0])["options"] if code == 0 else {}
    ok = (
        code == 0
        and head["residual"] == "hc"
        and head["bias"] == "on"
        and head["layers"] == "2"
        and head["steps"] == "3"
    )
    say("a file of options; the command line takes precedence", ok, err)
    for text, word in (
        ("layers = two\n", "line 1"),
        ("\nlayer = 2\n", "line 2: unknown option 'layer'; did you mean layers?"),
        ("steps 3\n", "name = value"),
        ("bias = 1\n", "line 1: bias: expected on or off, got '1'"),
        ("seed = 1\nseed = 2\n", "twice"),
        ("steps = 3\0", "not text"),
    ):
        (WORK / "bad.conf").write_text(text)
        refused(f"file of options {text!r}", word, 2, "--config", "bad.conf", "--data", "text.txt", "--out", "never")


def bad_options():
    base = ["--data", "text.txt", "--out", "never"]
    for args, word in (
        (["--layer", 3], "unknown option '--layer'; did you mean --layers?"),
        (["--nothing-like-it", 3], "unknown option '--nothing-like-it'\n"),
        (["--layers"], "--layers: expected 1 to 256, got nothing"),
        (["3"], "expected an option, got '3'"),
        (["--layers", 0], "--layers: expected 1 to 256, got '0'"),
        (["--rate", "fast"], "--rate"),
        (["--dropout", 1.5], "--dropout: expected 0 to 0.999999, got '1.5'"),
        (["--dropout", "nan"], "--dropout"),
        (["--alpha", -0.1], "--alpha"),
        (["--alpha", "nan"], "--alpha"),
        (["--streams", 33], "--streams"),
        (
            ["--residual", "mch"],
            "--residual: expected one of residual, hc, mhc, mhc_single_pass, independent, got 'mch'",
        ),
        (["--residual", "residual", "--streams", 4], "streams"),
        (["--residual", "residual", "--recompute"], "recompute"),
        (["--residual", "residual", "--sinkhorn", 5], "sinkhorn"),
        (["--residual", "independent", "--sinkhorn", 5], "--sinkhorn: rejected with --residual independent"),
        (["--residual", "hc", "--preset", "liger"], "--preset: rejected with --residual hc"),
        (["--recompute-group", 2], "group"),
        (["--recompute", "--recompute-group", 9], "group"),
        (["--poison"], "poison"),
        (["--exit", "mix"], "exit"),
        (["--residual", "mhc_single_pass", "--exit", "mean"], "exit"),
        (["--heads", 3], "heads"),
        (["--mixer", "rnn"], "--mixer: expected one of attention, gdn, hybrid, got 'rnn'"),
        (["--mixer", "hybrid", "--layers", 3], "layers: expected at least 4 with the mixer hybrid"),
        (["--mixer", "hybrid", "--layers", 1], "layers: expected at least 4 with the mixer hybrid"),
        (
            ["--mixer", "gdn", "--heads", 1],
            "heads: expected an even number with the mixer gdn, or key_heads that divide them",
        ),
        (["--mixer", "gdn", "--key-heads", 3], "key_heads: expected a divisor of the 4 heads"),
        (["--mixer", "gdn", "--conv-width", 9], "--conv-width: expected 0 to 8, got '9'"),
        (["--key-heads", 2], "--key-heads: rejected with --mixer attention"),
        (["--conv-width", 4], "--conv-width: rejected with --mixer attention"),
        (["--warmup", 300], "warmup"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--config", "nowhere.conf"], "nowhere.conf"),
        (["--dtype", "bf16"], "--backend cuda"),
        (["--backend", "gpu"], "--backend"),
    ):
        refused(" ".join(map(str, args)), word, 2, *base, *args)
    say("nothing was written", not (WORK / "never").exists())
    # Options in front of --help, and one whose value is that word, change no default.
    code, out, err = weft("train", "--steps", 7, "--seed=9", "--help")
    for line in (
        "transformer layers (1 to 256; default 4)",
        "nothing is learnt (0 to 1073741824; default 200)",
        "the residual connection (default mhc)",
        "log.jsonl and checkpoints (default runs/weft)",
        "learning rate after warm-up (0 to 1e+30; default 0.001)",
        "go on from the last checkpoint in DIR, or begin where there is none\n",
    ):
        say(f"help says: {line.strip()}", code == 0 and line in out, err)
    code, out, err = weft("train", "--config", "--help", "--data", "text.txt", "--out", "never")
    say("a value may be --help", code == 2 and "--help: No such file" in err, f"exit {code}, {err}")


def longer():
    """A run that is made longer: its first steps stay, the others have the rates of a run that long."""
    base = ["--val-every", 5, "--save-every", 4]
    code, _, err = train("longer", *base, "--steps", 8)
    first = figures("longer")
    code, _, err = train("longer", "--resume", "--steps", 16)
    train("long", *base, "--steps", 16)
    after, long = figures("longer"), figures("long")
    rates = [[line["rate"] for line in lines] for lines in (after, long)]
    say(
        "a run made longer",
        code == 0 and len(after) == 16 and after[:8] == first and rates[0][8:] == rates[1][8:] and rates[0] != rates[1],
        f"{err} {rates}",
    )
    heads = [json.loads(line)["options"]["steps"] for line in open(WORK / "longer/log.jsonl") if "options" in line]
    say("its log names both lengths", heads == ["8", "16"], str(heads))
    # A longer run that ended before its first checkpoint leaves nothing behind.
    with open(WORK / "longer/log.jsonl", "a") as log:
        log.write('{"options":{"steps":"900"}}\n{"step":17,"loss":1}\n')
    train("longer", "--resume", "--steps", 16)
    heads = [json.loads(line)["options"]["steps"] for line in open(WORK / "longer/log.jsonl") if "options" in line]
    say("nor a length that no checkpoint has", heads == ["8", "16"], str(heads))
    # Killed after its first checkpoint and resumed, it is the same run.
    train("longer-twice", *base, "--steps", 8)
    train("longer-twice", "--resume", "--steps", 16)
    for step in (12, 16):
        say(f"again, step {step}, bit for bit", same_checkpoint("longer", "longer-twice", step))
    shutil.rmtree(WORK / "longer-twice/step-00000016", ignore_errors=True)
    code, _, err = train("longer-twice", "--resume")
    say("resumed, it keeps its length", code == 0 and same_checkpoint("longer", "longer-twice", 16), err)
    refused(
        "a run is not made shorter",
        "--steps 15, but the run has 16: expected at least that",
        2,
        *SMALL,
        "--data",
        "text.txt",
        "--resume",
        "--out",
        "longer",
        "--steps",
        15,
    )


def bad_data():
    (WORK / "empty.txt").write_text("")
    (WORK / "short.txt").write_text("too short")
    (WORK / "binary.bin").write_bytes(bytes(range(256)) * 100)
    (WORK / "folder").mkdir()
    for data, word in (
        ("empty.txt", "no text"),
        ("short.txt", "too few"),
        ("binary.bin", "not text"),
        ("folder", "no text"),
    ):
        refused(f"--data {data}", word, 2, "--data", data, "--out", "never")
    refused("no --data outside the source tree", "--data", 2, "--out", "never")


def bad_checkpoints():
    code, _, err = train("base", "--steps", 4, "--save-every", 2)
    whole = checkpoint("base", 4)
    (WORK / "other.txt").write_text("another text " * 1000)
    refused("a run is not overwritten", "holds a run already", 2, *SMALL, "--data", "text.txt", "--out", "base")
    resume = [*SMALL, "--data", "text.txt", "--resume", "--out"]
    refused("another model", "--residual hc, but the run was begun with mhc", 2, *resume, "base", "--residual", "hc")
    refused("another text", "not the text of the run", 2, *SMALL, "--data", "other.txt", "--resume", "--out", "base")

    def damaged(name, file, change, word):
        shutil.copytree(WORK / "base", WORK / "damaged")
        path = WORK / "damaged/step-00000004" / file
        change(path)
        refused(name, word, 2, *resume, "damaged")
        if file == "model.safetensors":
            code, _, err = weft("sample", "--from", "damaged")
            say(f"{name}, sample", code == 2 and len(err) > 20, err)
        shutil.rmtree(WORK / "damaged")

    model = whole["model.safetensors"]
    damaged("truncated", "model.safetensors", lambda p: p.write_bytes(model[: len(model) // 2]), "truncated?")
    damaged("an empty file", "model.safetensors", lambda p: p.write_bytes(b""), "too few")
    damaged(
        "a foreign file",
        "model.safetensors",
        lambda p: p.write_bytes(struct.pack("<Q", 2) + b"{}"),
        "not a checkpoint of weft",
    )
    damaged("a missing file", "optimizer.safetensors", lambda p: p.unlink(), "No such file")
    damaged(
        "files exchanged",
        "model.safetensors",
        lambda p: p.write_bytes(whole["optimizer.safetensors"]),
        "tensors, the model has",
    )
    say("the checksum is that of the file with zeros in its place", rewritten(model) == model)
    poisoned = rewritten(model, tensors=b"\xff" * 64)
    damaged("a value that is not finite", "model.safetensors", lambda p: p.write_bytes(poisoned), "not finite")
    for name, metadata, word in (
        ("a checksum that was removed", {"crc32c": None}, "no checksum"),
        ("another format", {"weft": "3"}, "format 3"),
        ("no format", {"weft": None}, "not a checkpoint of weft"),
        ("another step", {"step": "3"}, "called after its step"),
        ("no step", {"step": "4 "}, "no step"),
        ("options of more layers", {"option.layers": "200"}, "tensors, the model has"),
        ("options of a huge model", {"option.channels": "1048576", "option.heads": "1024"}, "another shape"),
        ("a text that is not escaped", {"option.data": "100%.txt"}, "--data in the checkpoint"),
        ("a zero in a text", {"option.data": "a%00"}, "--data in the checkpoint"),
    ):
        changed = rewritten(model, metadata)
        shutil.copytree(WORK / "base", WORK / "damaged")
        (WORK / "damaged/step-00000004/model.safetensors").write_bytes(changed)
        resumed = ["--threads", 1, "--resume", "--quiet", "--out", "damaged"]
        refused(name, word, 2, *resumed)
        shutil.rmtree(WORK / "damaged")


def flipped_bits():
    """Any bit of a checkpoint that is another is noticed, in the length, the header, the metadata and the tensors."""
    train("flipped", "--steps", 2)
    folder = WORK / "flipped/step-00000002"
    for file, command in (
        ("model.safetensors", ("sample", "--from", "flipped", "--count", 1)),
        ("optimizer.safetensors", ("train", "--resume", "--quiet", "--threads", 1, "--out", "flipped")),
    ):
        whole = (folder / file).read_bytes()
        header = 8 + struct.unpack("<Q", whole[:8])[0]
        rng = random.Random(file)
        bits = [rng.randrange(8 * len(whole)) for _ in range(60)] + [rng.randrange(8 * header) for _ in range(30)]
        checksum = 8 * max(whole.find(b'"crc32c"'), 0)
        bits += [rng.randrange(64) for _ in range(4)] + [checksum + rng.randrange(8 * 19) for _ in range(6)]
        taken = []
        for bit in bits:
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            (folder / file).write_bytes(data)
            code, _, err = weft(*command)
            if code != 2 or len(err) < 20 or "Sanitizer" in err:
                taken.append((bit, code, err[:80]))
        (folder / file).write_bytes(whole)
        say(f"{len(bits)} flipped bits in {file}", not taken, f"{len(taken)} were accepted: {taken[:3]}")
        code, _, err = weft(*command)
        say(f"{file} as it was", code == 0, err)


def older_format():
    """Checkpoints of format 1 have no checksum and texts as they are."""
    (WORK / "50%41.txt").write_bytes((WORK / "text.txt").read_bytes())
    code, _, err = weft("train", *SMALL, "--data", "50%41.txt", "--out", "older", "--steps", 2)
    for path in (WORK / "older/step-00000002").iterdir():
        path.write_bytes(
            rewritten(path.read_bytes(), {"weft": "1", "crc32c": None, "option.data": "50%41.txt", "option.steps": "4"})
        )
    code, out, err = weft("sample", "--from", "older", "--count", 5)
    say("a sample of format 1, with a word about it", code == 0 and len(out) > 5 and "no checksum" in err, err)
    code, _, err = weft("train", "--resume", "--quiet", "--threads", 1, "--out", "older")
    say(
        "a run of format 1 goes on, with a word about it",
        code == 0 and "no checksum" in err and checkpoint("older", 4),
        err,
    )
    code, _, err = weft("sample", "--from", "older", "--count", 5)
    say("and is of the new format then", code == 0 and not err, err)


def first_mixes():
    """A run keeps the first mix that it was begun with. Checkpoints from before there was a choice are of the uniform one."""

    def says(out, step):
        data = checkpoint(out, step)["model.safetensors"]
        return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])["__metadata__"].get("option.first-mix")

    resume = ["--data", "text.txt", "--resume", "--out"]
    for mix in ("uniform", "identity"):
        code, _, err = train(f"mix-{mix}", "--steps", 2, "--first-mix", mix)
        say(f"--first-mix {mix} is what the checkpoint says", code == 0 and says(f"mix-{mix}", 2) == mix, err)
    train("mix-default", "--steps", 2)
    say(
        "identity is the default",
        same_checkpoint("mix-default", "mix-identity", 2) and not same_checkpoint("mix-default", "mix-uniform", 2),
    )
    refused(
        "another first mix", "--first-mix identity, but the run was begun with uniform", 2, *SMALL, *resume, "mix-uniform",
        "--first-mix", "identity",
    )  # fmt: skip
    for kind in ("residual", "hc"):
        refused(
            f"a first mix of {kind}", "--first-mix uniform: rejected", 2, *SMALL, "--data", "text.txt", "--out", "never",
            "--residual", kind, "--first-mix", "uniform",
        )  # fmt: skip
    refused("no such mix", "--first-mix: expected one of uniform, identity", 2, *SMALL, "--first-mix", "one")
    for kind, mix, want in (("mhc", "uniform", "uniform"), ("hc", "identity", "identity")):
        out = f"mix-older-{kind}"
        own = ["--first-mix", mix] if kind == "mhc" else []
        train(out, "--steps", 2, "--residual", kind, *own)
        for path in (WORK / out / "step-00000002").iterdir():
            path.write_bytes(rewritten(path.read_bytes(), {"option.first-mix": None, "option.steps": "4"}))
        say(f"{kind}: a checkpoint without one", says(out, 2) is None)
        if kind == "mhc":
            refused(
                "and another one now", "--first-mix identity, but the run was begun with uniform", 2, "--quiet",
                "--resume", "--out", out, "--first-mix", "identity",
            )  # fmt: skip
        code, _, err = weft("train", "--threads", 1, "--quiet", "--resume", "--out", out)
        say(f"{kind}: goes on as {want}", code == 0 and says(out, 4) == want, err)


def mixers():
    """A run keeps its mixer, resumes to the same bits, and a sample from a state is that of the whole computation."""

    def says(out, step):
        data = checkpoint(out, step)["model.safetensors"]
        return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])["__metadata__"].get("option.mixer")

    text = ["--data", "text.txt", "--quiet", "--threads", 1]
    sizes = {"gdn": [], "hybrid": ["--layers", 4, "--conv-width", 3, "--key-heads", 2]}
    for mixer, options in sizes.items():
        options = ["--mixer", mixer, *options, "--rate", 3e-3]
        code, _, err = train(f"mixer-{mixer}", *options, "--steps", 60, "--save-every", 25)
        lines = figures(f"mixer-{mixer}") if code == 0 else [{"loss": 0}]
        learns = code == 0 and lines[-1]["loss"] < lines[0]["loss"] - 2
        say(f"{mixer} learns", learns and says(f"mixer-{mixer}", 60) == mixer, f"{err} {lines[0]} {lines[-1]}")
        (WORK / f"mixer-again-{mixer}").mkdir()
        shutil.copytree(WORK / f"mixer-{mixer}/step-00000025", WORK / f"mixer-again-{mixer}/step-00000025")
        train(f"mixer-again-{mixer}", *options, "--steps", 60, "--resume", "--recompute", "--poison")
        say(f"{mixer} goes on to the same bits", same_checkpoint(f"mixer-{mixer}", f"mixer-again-{mixer}", 60))
        # 140 bytes are more than a hybrid's context, and more than one piece of a prompt is remembered in.
        for prompt, heat in (("the ", 0), ("the stream, " * 7, 0), ("", 0.8), ("a gain of one " * 3, 1)):
            asked = ["sample", "--from", f"mixer-{mixer}", "--prompt", prompt, "--temperature", heat, "--threads", 1]
            code, out, err = weft(*asked, "--count", 140)
            whole = weft(*asked, "--count", 140, "--whole")
            ok = code == 0 and len(out.encode()) > 140 and whole[:2] == (0, out)
            say(f"a sample of {mixer} from {len(prompt)} bytes at {heat}", ok, f"{err}{whole[2]} {out!r} {whole[1]!r}")
        for other in ("attention", "gdn", "hybrid"):
            if other != mixer:
                refused(
                    f"{mixer} as {other}", f"--mixer {other}, but the run was begun with {mixer}", 2, *text, "--resume",
                    "--out", f"mixer-{mixer}", "--mixer", other,
                )  # fmt: skip
        path = WORK / f"mixer-{mixer}/step-00000060/model.safetensors"
        whole = path.read_bytes()
        path.write_bytes(
            rewritten(whole, {"option.mixer": "attention", "option.key-heads": "0", "option.conv-width": "0"})
        )
        code, _, err = weft("sample", "--from", f"mixer-{mixer}")
        say(f"a checkpoint of {mixer} that says attention", code == 2 and "tensor" in err, err)
        path.write_bytes(whole)
    refused(
        "other key heads", "--key-heads 1, but the run was begun with 2", 2, *text, "--resume", "--out", "mixer-hybrid",
        "--key-heads", 1,
    )  # fmt: skip
    train("mixer-older", "--steps", 2)
    for path in (WORK / "mixer-older/step-00000002").iterdir():
        metadata = {"option.mixer": None, "option.key-heads": None, "option.conv-width": None, "option.steps": "4"}
        path.write_bytes(rewritten(path.read_bytes(), metadata))
    refused(
        "an older run as gdn", "--mixer gdn, but the run was begun with attention", 2, *text, "--resume", "--out",
        "mixer-older", "--mixer", "gdn",
    )  # fmt: skip
    code, _, err = weft("train", "--threads", 1, "--quiet", "--resume", "--out", "mixer-older")
    say("an older run goes on with attention", code == 0 and says("mixer-older", 4) == "attention", err)
    code, _, err = weft("sample", "--from", "mixer-older", "--whole")
    say(
        "a sample of attention has no state",
        code == 2 and "--whole: expected a run of --mixer gdn or hybrid" in err,
        err,
    )
    code, _, err = weft("report", "--runs", "mixer-gdn", "mixer-hybrid", "--out", "mixers.html")
    page = (WORK / "mixers.html").read_text() if code == 0 else ""
    say("a report tells mixers apart", "mhc, mixer gdn" in page and "mhc, mixer hybrid" in page, err)


def former_names():
    """Options of a checkpoint of version 0.1's first months, by the names that they had."""
    for out in ("former", "latter"):
        train(out, "--steps", 2, "--recompute", "--micro-batches", 2, "--weight-decay", 0.25)
    names = {"recompute-group": "group", "micro-batches": "micro", "weight-decay": "decay"}
    for path in (WORK / "former/step-00000002").iterdir():
        data = path.read_bytes()
        meta = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])["__metadata__"]
        new = {f"option.{now}": None for now in names} | {
            f"option.{old}": meta[f"option.{now}"] for now, old in names.items()
        }
        path.write_bytes(rewritten(data, new))
    code, _, err = weft("train", "--threads", 1, "--quiet", "--resume", "--out", "former", "--steps", 4)
    weft("train", "--threads", 1, "--quiet", "--resume", "--out", "latter", "--steps", 4)
    say(
        "options by their former names",
        code == 0 and checkpoint("former", 4) and same_checkpoint("former", "latter", 4),
        err,
    )


def one_folder():
    """Several processes in one folder: one of them trains, the others are rejected, and readers work all the while."""

    def begin(out, *args):
        command = [str(WEFT), "train", *SMALL, "--data", str(WORK / "text.txt"), "--out", out, *args]
        return subprocess.Popen(
            command, cwd=WORK, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def until_saved(process, out):
        while process.poll() is None and not last_checkpoint(out):
            time.sleep(0.05)

    first = begin("one-folder", "--steps", "1000000", "--save-every", "1", "--keep", "1")
    until_saved(first, "one-folder")
    for args in (("--resume",), (), ("--resume", "--keep", 1)):
        code, _, err = train("one-folder", "--steps", 1000000, *args)
        say(
            f"a second process {' '.join(map(str, args))}",
            code == 2 and f"process {first.pid} " in err,
            f"exit {code}: {err}",
        )
    results = [weft("sample", "--from", "one-folder", "--count", 3, "--threads", 1) for _ in range(20)]
    say(
        "samples of a run that drops its checkpoints",
        all(r[0] == 0 for r in results),
        str([r[2] for r in results if r[0]]),
    )
    code, _, err = weft("report", "--runs", "one-folder", "--out", "one-folder.html")
    say("a report of a run that trains", code == 0, err)
    say("the first goes on", first.poll() is None)
    first.kill()
    first.communicate()
    before = last_checkpoint("one-folder")
    code = asked_to_stop("one-folder", "--resume", "--steps", "1000000")
    say("a killed process leaves no lock", code == 0 and last_checkpoint("one-folder") > before, f"exit {code}")
    train("crowd-alone", "--steps", 20, "--save-every", 5)
    crowd = [begin("crowd", "--steps", "20", "--save-every", "5") for _ in range(6)]
    errors = [process.communicate()[1] for process in crowd]
    codes = sorted(process.returncode for process in crowd)
    say(
        "of six at once one trains",
        codes == [0, 2, 2, 2, 2, 2]
        and same_checkpoint("crowd", "crowd-alone", 20)
        and figures("crowd") == figures("crowd-alone"),
        f"{codes} {errors}",
    )


def changing_text():
    """Text that changes under a run: what is gone is an error with a name in it, what can still be read is as it was."""

    def begin(out, data):
        command = [str(WEFT), "train", *SMALL, "--data", data, "--out", out, "--steps", "1000000", "--save-every", "1"]
        process = subprocess.Popen(
            command, cwd=WORK, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        while process.poll() is None and not last_checkpoint(out):
            time.sleep(0.02)
        return process

    def end(process):
        try:
            return process.returncode, process.communicate(timeout=HANG_S)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            return process.returncode, "trains on: " + process.communicate()[1]

    text = (WORK / "text.txt").read_bytes()
    for name, change, word in (
        ("cut short", lambda p: os.truncate(p, 100), "shorter"),
        ("emptied", lambda p: os.truncate(p, 0), "shorter"),
    ):
        path = WORK / "changing.txt"
        path.write_bytes(text)
        out = f"text-{name.replace(' ', '-')}"
        process = begin(out, path.name)
        change(path)
        err = end(process)[1]
        ok = process.returncode == 1 and f"changing.txt: has become {word}" in err and "last good checkpoint" in err
        say(f"a text that is {name} while it is learnt", ok, f"exit {process.returncode}: {err}")
        path.write_bytes(text)
        say(
            "goes on once the text is back",
            asked_to_stop(out, "--data", path.name, "--resume", "--steps", "1000000") == 0,
        )

    path.write_bytes(text)
    process = begin("text-replaced", path.name)
    (WORK / "changed.txt").write_bytes(text[::-1])
    os.replace(WORK / "changed.txt", path)
    seen = len(figures_so_far("text-replaced"))
    while process.poll() is None and len(figures_so_far("text-replaced")) < seen + 5:
        time.sleep(0.02)
    process.terminate()
    err = end(process)[1]
    replaced = figures("text-replaced")
    other = begin("text-kept", "text.txt")
    while other.poll() is None and len(figures_so_far("text-kept")) < len(replaced):
        time.sleep(0.02)
    other.terminate()
    end(other)
    ok = process.returncode == 0 and replaced == figures("text-kept")[: len(replaced)]
    say("a text that was replaced is learnt as it was", ok, f"exit {process.returncode}: {err}")

    folder = WORK / "many-texts"
    folder.mkdir()
    for i in range(300):
        (folder / f"{i}.txt").write_bytes(text[i * len(text) // 300 : (i + 1) * len(text) // 300])
    for name, word in (("replaced", "another file"), ("removed", "No such file")):
        process = begin(f"texts-{name}", folder.name)
        for path in list(folder.iterdir()):
            if name == "removed":
                path.unlink()
            else:
                (folder / "new").write_bytes(path.read_bytes())
                (folder / "new").rename(path)
        err = end(process)[1]
        say(
            f"300 texts that are {name} while they are learnt",
            process.returncode == 1 and word in err,
            f"exit {process.returncode}: {err}",
        )


def huge_context():
    """The metadata of a file may name any context: a sample costs what it writes."""
    train("context", "--steps", 2)
    model = WORK / "context/step-00000002/model.safetensors"
    asked = ("sample", "--from", "context", "--prompt", "the ", "--count", 20, "--temperature", 0, "--threads", 1)
    before = weft(*asked)
    model.write_bytes(rewritten(model.read_bytes(), {"option.context": str(1 << 20)}))
    # Sanitizers reserve terabytes, so under them only the text is compared.
    little = ("prlimit", f"--as={4 << 30}")
    after = weft(*asked, before=little if weft("info", before=little)[0] == 0 else ())
    say(
        "a sample of a file that names a context of 1048576",
        before[0] == 0 and after == before,
        f"exit {after[0]}: {after[2]}",
    )


def odd_names():
    """Text under names that are not UTF-8, and more names than a path has room for: resume, sample and report read all of them."""
    text = (WORK / "text.txt").read_bytes()
    names = [
        b"latin-\xe9.txt",
        b"half-\xe2\x82.txt",
        b'quote"back\\slash.txt',
        b"tab\t100%25.txt",
        "stra\u00dfe.txt".encode(),
        b"%FF\xff.txt",
    ]
    many = [b"part-%04d-" % i + b"x" * 100 + b".txt" for i in range(1000)]
    for out, files in (("odd-names", names), ("many-names", many)):
        for i, name in enumerate(files):
            (Path(os.fsdecode(os.fsencode(WORK) + b"/" + name))).write_bytes(
                text[i * len(text) // len(files) : (i + 1) * len(text) // len(files)]
            )
        data = b",".join(files)
        code, _, err = weft("train", *SMALL, "--data", data, "--out", out, "--steps", 2)
        say(f"{out}: a run over {len(data)} bytes of names", code == 0, err)
        say(f"{out}: its log is UTF-8", is_utf8((WORK / out / "log.jsonl").read_bytes()))
        code, _, err = weft("train", "--threads", 1, "--quiet", "--resume", "--out", out)
        say(f"{out}: resumed from what the checkpoint says", code == 0, err)
        shutil.rmtree(WORK / out / "step-00000002")
        code, _, err = weft("train", *SMALL, "--data", data, "--out", out, "--steps", 3, "--save-every", 2)
        lines = (WORK / out / "log.jsonl").read_bytes().splitlines()
        shutil.rmtree(WORK / out / "step-00000003")
        code, _, err = weft("train", "--threads", 1, "--quiet", "--resume", "--out", out)
        again = (WORK / out / "log.jsonl").read_bytes().splitlines()
        say(f"{out}: its log goes on", code == 0 and len(again) == 4 and again[:3] == lines[:3], f"{err} {len(again)}")
        for command in (("sample", "--from", out, "--count", 5), ("report", "--runs", out, "--out", f"{out}.html")):
            code, _, err = weft(*command)
            say(f"{out}: {command[0]}", code == 0, err)


def renamed_checkpoints():
    """Names that the program does not give are removed as they are, or left alone, and the run goes on."""

    def names(out):
        return sorted(p.name for p in (WORK / out).glob("step-*"))

    train("renamed", "--steps", 4, "--save-every", 2)
    (WORK / "renamed/step-00000002").rename(WORK / "renamed/step-2")
    code, _, err = train("renamed", "--resume", "--keep", 1)
    say(
        "a checkpoint without its zeros is dropped",
        code == 0 and names("renamed") == ["step-00000004"],
        f"exit {code}, {names('renamed')} {err}",
    )
    (WORK / "renamed/step-00000004").rename(WORK / "renamed/step-4")
    code, _, err = train("renamed", "--resume", "--keep", 1)
    say(
        "one is resumed and then dropped",
        code == 0 and names("renamed") == ["step-00000004"],
        f"exit {code}, {names('renamed')} {err}",
    )

    train("guests", "--steps", 4, "--save-every", 1, "--keep", 4)
    (WORK / "guests/step-00000001/notes.txt").write_text("the user's own")
    (WORK / "guests/step-00000003").rename(WORK / "kept-elsewhere")
    (WORK / "guests/step-00000003").symlink_to(WORK / "kept-elsewhere")
    (WORK / "guests/step-0").write_text("a file")
    (WORK / "guests/step-00000000").mkdir()
    (WORK / "guests/step-00000000/other").write_text("no model")
    (WORK / "guests/step-00000002/model.safetensors").unlink()
    (WORK / "guests/step-00000002/optimizer.safetensors").unlink()
    (WORK / "guests/step-99999999").mkdir()
    (WORK / "guests/step--5").mkdir()
    left = ["step--5", "step-0", "step-00000000", "step-00000001", "step-00000003", "step-00000004", "step-99999999"]
    (WORK / "guests/step-00000004").rename(WORK / "guests/step-004")
    code, _, err = train("guests", "--resume", "--keep", 1)
    say(
        "what is no checkpoint stays, what was half dropped does not",
        code == 0 and names("guests") == left,
        f"exit {code}, {names('guests')} {err}",
    )
    whole = sorted(p.name for p in (WORK / "kept-elsewhere").iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
    ]
    own = [p.name for p in (WORK / "guests/step-00000001").iterdir()] == ["notes.txt"]
    say("so do a link's target and a file of the user's", whole and own)


def odd_files():
    """FIFOs, devices and links where files are expected: an error at once, and nothing outside the folder is written."""
    folder = WORK / "odd"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "golden").mkdir(parents=True)
    (folder / "run").mkdir()
    for name in ("fifo", "golden/gdn.safetensors", "run/model.safetensors"):
        os.mkfifo(folder / name)
    for path in ("odd/fifo", "/dev/zero"):
        for args in (
            ("train", "--data", path, "--out", "never"),
            ("train", "--config", path, "--data", "text.txt", "--out", "never"),
            ("report", "--runs", path, "--out", "never.html"),
        ):
            code, _, err = weft(*args)
            say(f"{args[0]} {args[1]} {path}", code == 2 and "not a regular file" in err, err)
    for args in (("sample", "--from", "odd/run"), ("check", "--golden", "odd/golden")):
        code, _, err = weft(*args)
        say(f"{args[0]} of a FIFO", code == 2 and "not a regular file" in err, err)
    # A FIFO stands for devices: a test that fails must not replace one of the machine's.
    train("odd-run", "--steps", 1)
    os.mkfifo(folder / "page.html")
    (folder / "link.html").symlink_to("page.html")
    for name in ("page.html", "link.html"):
        code, _, err = weft("report", "--runs", "odd-run", "--out", f"odd/{name}")
        kept = (folder / "page.html").is_fifo() and (folder / "link.html").is_symlink()
        say(
            f"report --out {name} leaves a FIFO alone",
            code == 2 and "not a regular file" in err and kept,
            f"exit {code}: {err}",
        )
    (WORK / "odd-run/log.jsonl").unlink()
    os.mkfifo(WORK / "odd-run/log.jsonl")
    code, _, err = weft("report", "--runs", "odd-run", "--out", "never.html")
    say("report of a FIFO in a run's folder", code == 2 and "not a regular file" in err, f"exit {code}: {err}")
    (WORK / "odd-run/step-00000001/optimizer.safetensors").unlink()
    os.mkfifo(WORK / "odd-run/step-00000001/optimizer.safetensors")
    code, _, err = train("odd-run", "--steps", 1, "--resume")
    say("train --resume of a FIFO", code == 2 and "not a regular file" in err, f"exit {code}: {err}")
    say("nothing was written for them", not (WORK / "never").exists() and not (WORK / "never.html").exists())

    victim = WORK / "victim"
    shutil.rmtree(victim, ignore_errors=True)
    victim.mkdir()
    for name in ("log", "page", "model.safetensors"):
        (victim / name).write_text("precious")
    out = WORK / "links"
    out.mkdir()
    (out / ".log.jsonl").symlink_to(victim / "log")
    (out / ".step-00000002").symlink_to(victim)
    (WORK / "links.html.part").symlink_to(victim / "page")
    code, _, err = train("links", "--steps", 2)
    page = weft("report", "--runs", "links", "--out", "links.html")
    ok = code == 0 and page[0] == 0 and len(figures("links")) == 2 and checkpoint("links", 2)
    say("links named as temporary files do no harm", ok, f"{err} {page[2]}")
    say(
        "their targets are what they were",
        all((victim / n).read_text() == "precious" for n in ("log", "page", "model.safetensors"))
        if len(list(victim.iterdir())) == 3
        else False,
        str(list(victim.iterdir())),
    )


def bad_luck():
    code, _, err = train(
        "nan", "--steps", 50, "--rate", 1e30, "--warmup", 0, "--save-every", 1, "--clip", 0, "--weight-decay", 0
    )
    say("a loss that is not a number", code == 1 and "step" in err and "not finite" in err, f"exit {code}: {err}")
    whole = {"log.jsonl", *(f"step-{line['step']:08d}" for line in figures("nan"))}
    say("and no checkpoint of it", set(visible("nan")) <= whole)
    code, _, err = train("full", "--steps", 4, "--save-every", 2, limit=200000)
    say("a full disk", code == 2 and "full/" in err and not list((WORK / "full").glob("*step*")), f"exit {code}: {err}")
    train("nearly", "--steps", 2, "--save-every", 1)
    before = checkpoint("nearly", 2)
    code, _, err = train("nearly", "--resume", "--steps", 4, "--save-every", 1, "--keep", 1, limit=200000)
    say(
        "an older checkpoint outlives a full disk",
        code == 2 and checkpoint("nearly", 2) == before,
        f"exit {code}: {err}",
    )
    if os.geteuid() != 0:
        (WORK / "locked").mkdir(mode=0o500)
        code, _, err = train("locked/run", "--steps", 1)
        say("a folder that cannot be written", code == 2 and "locked" in err, err)
    (WORK / "file").write_text("")
    code, _, err = train("file", "--steps", 1)
    say("a file in the place of the folder", code == 2 and "file" in err, err)
    code, _, err = weft("sample", "--from", "nowhere")
    say("sample without a checkpoint", code == 2 and "no checkpoint" in err, err)


def gpu():
    """The same promises on a GPU; skipped with a message where there is none."""
    on = ("--backend", "cuda", "--steps", 8, "--save-every", 4, "--bias", "--dropout", 0.1, "--residual", "mhc")
    code, _, err = train("gpu", *on)
    if code == 2 and "--backend cuda" in err:
        print(f"skipped: {err.strip()}")
        return
    say("a run on a GPU", code == 0, err)
    for args, other in ((("--recompute", "--poison"), "gpu_recompute"), ((), "gpu_again")):
        train(other, *on, *args)
        say(f"{other} has the same bits", figures(other) == figures("gpu") and same_checkpoint(other, "gpu", 8))
    (WORK / "gpu_resumed").mkdir()
    shutil.copytree(WORK / "gpu" / "step-00000004", WORK / "gpu_resumed" / "step-00000004")
    code, _, err = train("gpu_resumed", *on, "--resume")
    say("a resumed run on a GPU has the same bits", code == 0 and same_checkpoint("gpu_resumed", "gpu", 8), err)
    code, _, err = train("gpu_resumed", *on[2:], "--backend", "cpu", "--steps", 8, "--resume")
    say("and goes on on the CPU", code == 0, err)
    train("gpu_f32", *on, "--dtype", "f32")
    train("gpu_cpu", *on[2:])
    off = [apart(run, "gpu_cpu") for run in ("gpu", "gpu_f32")]
    say(
        "losses on a GPU are those of the CPU",
        off[0] < 0.03 and off[1] < 1e-4,
        f"bf16 off by {off[0]}, f32 by {off[1]}",
    )
    for backend in ("cpu", "cuda"):
        code, out, err = weft("sample", "--from", "gpu", "--backend", backend, "--prompt", "the ", "--count", 20)
        say(
            f"a sample on {backend} of a run on a GPU",
            code == 0 and out.startswith("the ") and len(out) > 5,
            f"{out!r} {err}",
        )
    code, _, err = train("gpu_nan", *on, "--rate", 1e30, "--warmup", 0, "--clip", 0, "--weight-decay", 0)
    say("a loss on a GPU that is not a number", code == 1 and "not finite" in err, f"exit {code}: {err}")
    train("gpu_muon", *on, "--optimizer", "muon")
    train("cpu_muon", *on[2:], "--optimizer", "muon")
    off = apart("gpu_muon", "cpu_muon")
    say("muon on a GPU", off < 0.05, f"off by {off}")
    mpirun = shutil.which("mpirun")
    if not mpirun:
        return
    before = (mpirun, "--allow-run-as-root", "--oversubscribe", "-np")
    code, _, err = train("gpu_one", *on, before=(*before, "1"))
    say("one process under mpirun", code == 0 and same_checkpoint("gpu_one", "gpu", 8), err)
    if "NCCL" in err:
        print(f"     {err.strip()}")
    train("gpu_micro", *on, "--micro-batches", 2)
    code, _, err = train("gpu_two", *on, before=(*before, "2"))
    off = apart("gpu_two", "gpu_micro") if code == 0 else float("inf")
    say("two processes on GPUs", off < 0.01, f"exit {code}, off by {off}: {err}")


setup()
ALONE = (
    kill_and_resume,
    recompute,
    kinds,
    report,
    odd_reports,
    first_run,
    config_file,
    bad_options,
    longer,
    bad_data,
    bad_checkpoints,
    flipped_bits,
    older_format,
    first_mixes,
    mixers,
    one_folder,
    changing_text,
    former_names,
    huge_context,
    odd_names,
    renamed_checkpoints,
    odd_files,
    bad_luck,
    gpu,
)
RANKS = (processes, disagreeing_ranks, disagreeing_machines, disagreeing_checkpoints, signalled_ranks)
PARTS = {"alone": ALONE, "ranks": RANKS, **{part.__name__: (part,) for part in ALONE + RANKS}}
for name in sys.argv[3:] or ("alone", "ranks"):
    for part in PARTS[name]:
        part()
print(f"{failures} failures")
sys.exit(1 if failures else 0)
