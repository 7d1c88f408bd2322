#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tests/guide.py <work folder> [--format] [--python PYTHON] [--cuda OFF|OBJECT|ON]: docs/internals/adding-an-op.md, to the letter.

Lays the blocks of the guide into a copy of the tree, builds the copy and runs what the guide says to run. A block goes where
the line above it says:

    `path`, new:                      a file of its own
    `path`, at the end:               behind what the file has
    `path`, in front of `text`:       before the one line that begins with this text
    `path`, behind `text`:            after that line

Blocks marked `sh guide` and `python guide` are run, in the copy. The table of files at the head of the guide must name the
files of the blocks, in their order and no others.

--cuda OBJECT (the default is OFF) compiles the guide's CUDA files and nothing else of the CUDA backend, which takes seconds;
ON builds all of it, and the commands run on the GPU as well. Without --python nothing is run in Python. --format builds
nothing and holds the files that the blocks touch against the rules of `make check-format`."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "internals" / "adding-an-op.md"

BLOCK = re.compile(r"^(?P<fence>`{3,})(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=fence)$", re.M | re.S)
CAPTION = re.compile(
    r"^`(?P<path>[\w./-]+)`, (?P<how>new|at the end|in front of|behind)(?: `(?P<anchor>[^\n]+)`)?:\n\n\Z", re.M
)
ROW = re.compile(r"^\| `([^`]+)` \|", re.M)


class Block(NamedTuple):
    line: int
    info: str  # behind the fence: "c", "sh guide"
    text: str
    path: str  # "" where no caption stands above it
    how: str
    anchor: str


def read_guide(text):
    blocks = []
    for match in BLOCK.finditer(text):
        caption = CAPTION.search(text, 0, match.start())
        place = caption.groups("") if caption else ("", "", "")
        line = text.count("\n", 0, match.start()) + 1
        blocks.append(Block(line, match["info"].strip(), match["text"], *place))
    return blocks


def check_table(text, blocks):
    """The table of files is the list of files."""
    table = ROW.findall(text.split("\n## ")[0])
    touched = list(dict.fromkeys(block.path for block in blocks if block.path))
    if table != touched:
        sys.exit(f"{GUIDE.name}: the table of files and the blocks differ:\n  table:  {table}\n  blocks: {touched}")
    return touched


def lay(block, tree):
    path = tree / block.path
    where = f"{GUIDE.name}:{block.line}: {block.path}"
    if block.how == "new":
        if path.exists():
            sys.exit(f"{where} exists already")
        path.write_text(block.text, encoding="utf-8")
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    at = len(lines)
    if block.anchor:
        found = [k for k, line in enumerate(lines) if line.strip().startswith(block.anchor)]
        if len(found) != 1:
            sys.exit(f"{where}: expected one line that begins with {block.anchor!r}, got {len(found)}")
        at = found[0] + (block.how == "behind")
    elif block.how != "at the end":
        sys.exit(f"{where}: {block.how}: expected a text")
    elif block.path.endswith(".py"):
        lines.append("\n\n")
        at += 1
    lines.insert(at, block.text)
    path.write_text("".join(lines), encoding="utf-8")


def copy_tree(tree):
    """The files of the working tree. Files that have not changed keep their time, so that a second run builds little."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    tree.mkdir(parents=True, exist_ok=True)
    for old in tree.iterdir():
        if old.is_file():
            old.unlink()
        elif not old.name.startswith("build"):
            shutil.rmtree(old)
    for name in filter(None, listed.split("\0")):
        if not (ROOT / name).is_file():
            continue
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)


def run(command, tree, **environment):
    shown = command if isinstance(command, str) else " ".join(command)
    print("+", shown if "\n" not in shown else shown.splitlines()[0] + " ...", flush=True)
    start = time.monotonic()
    result = subprocess.run(
        command,
        cwd=tree,
        shell=isinstance(command, str),
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        print(result.stdout[-12000:])
        sys.exit(f"exit status {result.returncode}")
    print(f"  {time.monotonic() - start:.0f} s", flush=True)


def build(tree, folder, targets, **options):
    run(
        [
            "cmake",
            "-S",
            ".",
            "-B",
            folder,
            "-G",
            "Ninja",
            "-DCMAKE_BUILD_TYPE=Release",
            "-DWEFT_WERROR=ON",
            *(f"-DWEFT_{name}={value}" for name, value in options.items()),
        ],
        tree,
    )
    run(["cmake", "--build", folder, "--parallel", str(os.cpu_count()), "--target", *targets], tree)


def targets_of(commands):
    """What `sh guide` lines run: build/tests/test_foo is the target test_foo, build/weft is weft_cli."""
    found = re.findall(r"^(?:\w+=\S* )*build/(tests/\w+|weft)\b", "".join(commands), re.M)
    return list(dict.fromkeys(name.replace("tests/", "") if "/" in name else "weft_cli" for name in found))


def check_format(files, tree):
    sources = [f for f in files if f.endswith((".c", ".h", ".cu"))]
    scripts = [f for f in files if f.endswith(".py")]
    run(["clang-format", "--dry-run", "-Werror", *sources], tree)
    run(["ruff", "check", "-q", *scripts], tree)
    run(["ruff", "format", "-q", "--check", *scripts], tree)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("work", type=Path)
    options.add_argument("--format", action="store_true")
    options.add_argument("--python", default="")
    options.add_argument("--cuda", choices=("OFF", "OBJECT", "ON"), default="OFF")
    options = options.parse_args()

    text = GUIDE.read_text(encoding="utf-8")
    blocks = read_guide(text)
    files = check_table(text, blocks)
    print(f"{len(files)} files: {', '.join(files)}")

    tree = options.work.resolve() / "tree"
    copy_tree(tree)
    for block in blocks:
        if block.path:
            lay(block, tree)
    if options.format:
        check_format(files, tree)
        return

    commands = [block.text for block in blocks if block.info == "sh guide"]
    scripts = [block.text for block in blocks if block.info == "python guide"]
    python = "ON" if options.python else "OFF"
    targets = [*targets_of(commands), *(["weft_python"] if options.python else [])]
    extension = {"TEST_PYTHON": options.python} if options.python else {}
    build(tree, "build", targets, TESTS="ON", PYTHON=python, CUDA="ON" if options.cuda == "ON" else "OFF", **extension)
    if options.cuda == "OBJECT":
        build(tree, "build-cuda", [f"CMakeFiles/weft_cuda.dir/{f}.o" for f in files if f.endswith(".cu")], CUDA="ON")
    if options.cuda == "OFF":
        print("CUDA: skipped, there is no nvcc")

    for line in "".join(commands).splitlines():
        if "$PYTHON" in line and not options.python:
            continue
        run(line, tree, PYTHON=options.python)
        if options.cuda == "ON" and " check " in line:
            run(f"{line} --backend cuda", tree)
    if not options.python:
        print("Python: skipped, there is none with PyTorch")
        return
    for script in scripts:
        run([options.python, "-c", script], tree, PYTHONPATH=str(tree / "python"))


if __name__ == "__main__":
    main()
