#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/check_exports.py <libweft.so>: the library exports every function declared WEFT_API and nothing else."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def declared():
    names = set()
    for header in sorted((ROOT / "include" / "weft").glob("*.h")):
        text = re.sub(r"/\*.*?\*/", "", header.read_text(encoding="utf-8"), flags=re.S)
        for declaration in re.findall(r"^WEFT_API\b[^;]*;", text, re.M):
            names.add(re.search(r"\b(weft_\w+)\s*\(", declaration).group(1))
    return names


def exported(library):
    lines = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    # "address type name@@version"; type A is the version node itself.
    symbols = [line.split()[-2:] for line in lines.splitlines()]
    return {name.split("@")[0] for kind, name in symbols if kind != "A"}


def main():
    want, got = declared(), exported(sys.argv[1])
    for name in sorted(want - got):
        print(f"{name}: declared WEFT_API, not exported")
    for name in sorted(got - want):
        print(f"{name}: exported, not declared WEFT_API in include/weft")
    print(f"exports: {len(want)} declared, {len(got)} exported")
    return 0 if want and want == got else 1


if __name__ == "__main__":
    sys.exit(main())
