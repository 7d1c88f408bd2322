#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One number for the sources that decide what the CUDA backend computes and how fast: sha256 over names and contents.

Comments and white space decide neither, so a record does not grow old by a better sentence or a wrapped line. Nor do
sources that a record says nothing of: weft/gdn.h and what is below it, and the model that trains on top."""

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("include", "src/core", "src/cuda", "src/ops")
SUFFIXES = {".c", ".h", ".cu", ".cuh", ".def"}
NOT_RECORDED = re.compile(
    r"src/cuda/(gdn|nn)[_.]|src/cuda/blas|src/(core|ops)/(gdn|nn|sequences)|include/weft/(gdn|model|optim|plan|blas)\.h"
)
# Strings are matched so that what looks like a comment, or like a wrapped line, inside one stays.
STRING = r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
STRING_OR_COMMENT = re.compile(STRING + r"|/\*.*?\*/|//[^\n]*", re.S)
# Where a line may be wrapped that had no space: behind an opening bracket and beside "::". (In front of a bracket a space
# tells a macro with arguments from one without.)
STRING_OR_WRAP = re.compile(STRING + r"|(?<=[(\[]) | ?:: ?")


def code_of(text):
    flat = " ".join(STRING_OR_COMMENT.sub(lambda m: m.group(1) or " ", text).split())
    return STRING_OR_WRAP.sub(lambda m: m.group(1) or m.group().strip(), flat)


def source_hash(root=ROOT):
    total = hashlib.sha256()
    paths = [p for folder in FOLDERS for p in (root / folder).rglob("*") if p.suffix in SUFFIXES and p.is_file()]
    paths = [p for p in paths if not NOT_RECORDED.match(p.relative_to(root).as_posix())]
    for path in sorted(paths, key=lambda p: p.relative_to(root).as_posix()):
        content = code_of(path.read_text(encoding="utf-8")).encode()
        total.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest()


if __name__ == "__main__":
    print(source_hash())
