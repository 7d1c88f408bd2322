#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that includes point one way: cli -> check -> include -> model -> ops -> core <- {ref, cpu, cuda}; no backend
knows another."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

C_STANDARD = {
    "assert",
    "complex",
    "ctype",
    "errno",
    "fenv",
    "float",
    "inttypes",
    "iso646",
    "limits",
    "locale",
    "math",
    "setjmp",
    "signal",
    "stdalign",
    "stdarg",
    "stdatomic",
    "stdbool",
    "stddef",
    "stdint",
    "stdio",
    "stdlib",
    "stdnoreturn",
    "string",
    "tgmath",
    "threads",
    "time",
    "uchar",
    "wchar",
    "wctype",
}

# Folder -> folders under src/ that its quoted includes may come from. The longest match decides.
ALLOWED = {
    "include/weft": set(),
    "src/core": {"core"},
    "src/model": {"model", "core"},
    "src/ops": {"ops", "core"},
    "src/ref": {"ref", "core"},
    "src/cpu": {"cpu", "core"},
    "src/cuda": {"cuda", "core"},
}

# The CUDA runtime is known to the backend and to one file of the program.
CUDA = re.compile(r"^(cuda\w*|cooperative_groups\w*|cub/.*|mma|nv/.*)(\.h|\.cuh)?$")
CUDA_FOLDER, CUDA_FILE = "src/cuda", "check/device.c"

INTRINSICS = re.compile(r"^(\w*mmintrin|x86intrin|arm_neon|arm_sve)\.h$")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.M)


def problem(folder, file, bracket, name):
    """Why this include is not allowed in this file of this folder, or None."""
    if bracket == "<":
        if CUDA.match(name) and folder != CUDA_FOLDER and file != CUDA_FILE:
            return f"CUDA headers belong in {CUDA_FOLDER} and {CUDA_FILE}"
        if name.startswith("weft/"):
            return None if (ROOT / "include" / name).is_file() else "no such public header"
        if folder == "include/weft" and name.removesuffix(".h") not in C_STANDARD:
            return "a public header includes public headers and C standard headers only"
        if INTRINSICS.match(name) and folder != "src/cpu":
            return "intrinsics belong in src/cpu"
        return None
    if folder == "check":
        return (
            None
            if name.startswith("check/") and (ROOT / name).is_file()
            else "check/ includes public headers and its own files only"
        )
    if folder == "cli":
        own = (ROOT / "cli" / name).is_file() or name.startswith("check/") and (ROOT / name).is_file()
        return None if own else "the program includes public headers, check/ and its own files only"
    if folder == "include/weft":
        return "public headers are included as <weft/...>"
    layer = name.split("/")[0]
    if "/" not in name or not (ROOT / "src" / name).is_file():
        return "not a path from src/"
    if layer not in ALLOWED[folder]:
        return f"{folder} may include from {', '.join(sorted(ALLOWED[folder]))} only"
    return None


def main():
    failures = files = 0
    for folder in [*ALLOWED, "check", "cli"]:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in {".c", ".h", ".cu", ".cuh", ".def"}:
                continue
            files += 1
            text = path.read_text(encoding="utf-8")
            for match in INCLUDE.finditer(text):
                why = problem(folder, path.relative_to(ROOT).as_posix(), *match.groups())
                if why:
                    line = text.count("\n", 0, match.start()) + 1
                    print(f"{path.relative_to(ROOT)}:{line}: {match.group(2)}: {why}")
                    failures += 1
    print(f"layers: {files} files, {failures} includes in the wrong direction")
    return 1 if failures or not files else 0


if __name__ == "__main__":
    sys.exit(main())
