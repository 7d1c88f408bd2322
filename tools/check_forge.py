#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the files of a public forge: workflows and forms against their schemas, and that what workflows run exists.

check-jsonschema brings the schemas, so the network is not needed. Exit status: 0 passed, 1 failed, 77 it is not installed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FORGE = ROOT / ".github"
SCHEMAS = {
    "vendor.github-workflows": sorted(FORGE.glob("workflows/*.yml")),
    "vendor.github-issue-config": [FORGE / "ISSUE_TEMPLATE" / "config.yml"],
    "vendor.github-issue-forms": sorted(p for p in FORGE.glob("ISSUE_TEMPLATE/*.yml") if p.name != "config.yml"),
}
MUST_RUN = {".ci/run", "make wheel"}


def commands():
    """What the workflows run, one command a line."""
    for path in SCHEMAS["vendor.github-workflows"]:
        for found in re.findall(r"^\s*(?:- )?run: (.*)$", path.read_text(encoding="utf-8"), re.M):
            yield path, found.strip()


def main():
    failures = []
    targets = set(
        re.findall(r"^([a-z][\w-]*(?: [a-z][\w-]*)*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    )
    targets = {name for names in targets for name in names.split()}
    for path, command in commands():
        program, *words = command.split()
        missing = [f"make {w}" for w in words if w not in targets] if program == "make" else []
        if program != "make" and not os.access(ROOT / program, os.X_OK):
            missing = [program]
        failures += [f"{path.relative_to(ROOT)}: {name} does not exist" for name in missing]
    ran = {command for _, command in commands()}
    failures += [f".github/workflows: nothing runs {command}" for command in sorted(MUST_RUN - ran)]
    print(*failures, sep="\n", end="\n" if failures else "")
    folders = os.pathsep.join([str(ROOT / ".venv" / "bin"), os.environ.get("PATH", "")])
    linter = shutil.which("check-jsonschema", path=folders)
    for schema, files in SCHEMAS.items():
        if linter and subprocess.run([linter, "--builtin-schema", schema, *files]).returncode:
            failures.append(schema)
    if failures:
        return 1
    if not linter:
        print("forge: skipped, check-jsonschema is not installed; tools/deps.sh docs installs it")
        return 77
    return 0


if __name__ == "__main__":
    sys.exit(main())
