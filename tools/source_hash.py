#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One number for the sources that decide what runs on a GPU: sha256 over names and contents.

    tools/source_hash.py            of the library: what the CUDA backend computes and how fast
    tools/source_hash.py python     of the Python package, which decides what tests/python find beyond that

The library's sources are the public headers, all of src/cuda, what validates, dispatches and plans calls (src/core,
src/ops), the model that trains on top (src/model), and the flags of the CUDA compiler. The reference, the CPU backend,
the program and the tests are not among them: they decide what a result is compared with, not the result.

Comments, docstrings and white space decide nothing, so a record does not grow old by a better sentence or a wrapped line."""

import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ("include", "src/core", "src/cuda", "src/model", "src/ops", "cmake/cuda.cmake")
PYTHON = ("python",)
C_SUFFIXES = {".c", ".h", ".cu", ".cuh", ".def"}
# Strings are matched so that what looks like a comment, or like a wrapped line, inside one stays.
STRING = r"""("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
STRING_OR_COMMENT = re.compile(STRING + r"|/\*.*?\*/|//[^\n]*", re.S)
# Where a line may be wrapped that had no space: behind an opening bracket and beside "::". (In front of a bracket a space
# tells a macro with arguments from one without.)
STRING_OR_WRAP = re.compile(STRING + r"|(?<=[(\[]) | ?:: ?")
# A statement that is nothing but a string.
DOCSTRING = re.compile(r'^[ \t]*"""(?:[^\\]|\\.)*?"""[ \t]*$', re.M | re.S)
HASH_COMMENT = re.compile(r"^[ \t]*#.*$", re.M)


def code_of_c(text):
    flat = " ".join(STRING_OR_COMMENT.sub(lambda m: m.group(1) or " ", text).split())
    return STRING_OR_WRAP.sub(lambda m: m.group(1) or m.group().strip(), flat)


def lines_of(text):
    """Lines as they are indented, without empty ones and those that are a comment."""
    return "\n".join(line.rstrip() for line in HASH_COMMENT.sub("", text).splitlines() if line.strip())


def code_of_python(text):
    return lines_of(DOCSTRING.sub("", text))


CODE_OF = {**dict.fromkeys(C_SUFFIXES, code_of_c), ".py": code_of_python, ".cmake": lines_of}


def files_of(root, names):
    for name in names:
        path = root / name
        yield from (p for p in (path.rglob("*") if path.is_dir() else [path]) if p.suffix in CODE_OF and p.is_file())


def hash_of(root, names):
    total = hashlib.sha256()
    for path in sorted(files_of(root, names), key=lambda p: p.relative_to(root).as_posix()):
        content = CODE_OF[path.suffix](path.read_text(encoding="utf-8")).encode()
        total.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        total.update(content)
    return total.hexdigest()


def source_hash(root=ROOT):
    return hash_of(root, LIBRARY)


def python_hash(root=ROOT):
    return hash_of(root, PYTHON)


if __name__ == "__main__":
    print(python_hash() if sys.argv[1:] == ["python"] else source_hash())
