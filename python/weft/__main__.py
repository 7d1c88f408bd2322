# SPDX-License-Identifier: Apache-2.0
"""`python -m weft` and the script `weft`: the program that a wheel brings beside its library."""

import os
import sys
from pathlib import Path
from typing import NoReturn


def main() -> NoReturn:
    program = Path(__file__).resolve().parent / "bin" / "weft"
    if not program.is_file():
        sys.exit(f"python -m weft: expected the program at {program}: a build of the tree has it in its build folder")
    sys.stdout.flush()
    os.execv(program, ["weft", *sys.argv[1:]])


if __name__ == "__main__":
    main()
