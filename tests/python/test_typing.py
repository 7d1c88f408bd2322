# SPDX-License-Identifier: Apache-2.0
"""mypy --strict on the examples of README.md and docs, and the types of what depends on an argument."""

import importlib.util
import re
import subprocess
import sys

import pytest
from test_docs import BLOCK, WITH_EXAMPLES, text_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")

DOCUMENTS = (*WITH_EXAMPLES, "docs/guides/hugging-face.md", "docs/guides/training.md")

# As a user has it: weft's own sources are not checked, and parts of PyTorch and transformers have no annotations.
CONFIG = """
[mypy]
strict = True
mypy_path = {python}
untyped_calls_exclude = torch, transformers
[mypy-weft.*]
follow_imports = silent
[mypy-transformers.*,safetensors.*]
ignore_missing_imports = True
"""

TYPES = """
from typing import assert_type

import torch
import weft
import weft.torch as wt
from torch import Tensor

t = torch.zeros(1)
maybe = bool(weft.info()["cuda"])
assert_type(weft.__version__, str)
assert_type(weft.presets(), list[str])
assert_type(wt.pre(t, t, t, t, numerics="liger"), wt.Pre)
assert_type(wt.gdn_rule(t, t, t, t, t), tuple[Tensor, None])
assert_type(wt.gdn_rule(t, t, t, t, t, final_state=True), tuple[Tensor, Tensor])
assert_type(wt.gdn_rule(t, t, t, t, t, final_state=maybe), tuple[Tensor, Tensor | None])
assert_type(wt.build_mhc_recompute_layer_plan(4, 2, True)[0], list[wt.CheckpointWithoutOutputManager])
"""

# Every line is wrong, so that the lines above mean something.
WRONG = """
number: int = weft.__version__
wt.pre(t, t, t, t, numerics="liger").gates
wt.pre(t, t, t, t, t, t, t)
wt.gdn_rule(t, t, t, t, t)[1].shape
wt.contract(t, kind=3)
"""


def blank_but(text: str) -> str:
    """The Python blocks of a document on the lines where they stand."""
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1))
        lines[first : first + block[1].count("\n")] = block[1].splitlines()
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def report(root, tmp_path_factory) -> list[str]:
    """What mypy says about all files; one run, since most of it is PyTorch."""
    work = tmp_path_factory.mktemp("typing")
    (work / "mypy.ini").write_text(CONFIG.format(python=root / "python"))
    sources = {path: blank_but(text_of(root, path)) for path in DOCUMENTS}
    assert all(source.strip() for source in sources.values())
    sources |= {"right.py": TYPES, "wrong.py": TYPES + WRONG}
    names = {path: re.sub(r"\W", "_", path) + ".py" for path in sources}
    for path, source in sources.items():
        (work / names[path]).write_text(source)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-error-summary", *names.values()]
    result = subprocess.run(command, cwd=work, text=True, capture_output=True)
    assert result.returncode == 1 and not result.stderr, result.stdout + result.stderr  # wrong.py has errors
    of = {name: path for path, name in names.items()}
    return [re.sub(r"^[\w.]+", lambda m: of.get(m[0], m[0]), line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("path", [*DOCUMENTS, "right.py"])
def test_examples_have_types(path, report):
    found = [line for line in report if line.startswith(f"{path}:")]
    assert not found, "\n".join(found)


def test_what_is_wrong_is_found(report):
    first = TYPES.count("\n") + 1
    wrong = {int(line.split(":")[1]) - first for line in report if line.startswith("wrong.py:") and ": error:" in line}
    assert wrong == set(range(1, WRONG.count("\n")))
