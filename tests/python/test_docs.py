# SPDX-License-Identifier: Apache-2.0
"""The documents of the Python package name all that it exports and nothing else, and their examples run; so do README's."""

import enum
import importlib
import inspect
import pkgutil
import re

import pytest
import torch
import weft.compat
import weft.torch

HEADING = re.compile(r"^(##|###) `([\w.]+)`$", re.M)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
REFERENCE, DROP_INS = "docs/reference/python.md", "docs/guides/drop-ins.md"
# Documents with one program each; that of the guide goes on in two others.
WITH_EXAMPLES = (f"docs/guides/pytorch.md {REFERENCE} {DROP_INS}", "README.md")


def text_of(root, paths: str) -> str:
    return "\n".join((root / path).read_text() for path in paths.split())


def documented(text: str) -> dict[str, dict[str, str]]:
    """{module: {name: the text of its section}} from headings of level two and three."""
    found: dict[str, dict[str, str]] = {}
    module = None
    headings = list(re.finditer(r"^(##|###) (.*)$", text, re.M))
    for k, heading in enumerate(headings):
        end = headings[k + 1].start() if k + 1 < len(headings) else len(text)
        match = HEADING.match(heading.group())
        if heading[1] == "##":
            module = match[2] if match else None
            if module:
                found[module] = {}
        elif module:
            assert match, f"{heading.group()}: expected a name in backticks"
            found[module][match[2]] = text[heading.end() : end]
    return found


def modules() -> list[str]:
    """The package's public modules."""
    drop_ins = [m.name for m in pkgutil.iter_modules(weft.compat.__path__) if m.name[0] != "_"]
    return ["weft", "weft.torch", "weft.compat", *(f"weft.compat.{name}" for name in drop_ins)]


def exports(name: str) -> list[str]:
    return getattr(importlib.import_module(name), "__all__", [])


def is_enum(thing) -> bool:
    """An enumeration's call has parameters that nobody passes."""
    return inspect.isclass(thing) and issubclass(thing, enum.Enum)


@pytest.fixture(scope="module")
def sections(root):
    return documented((root / REFERENCE).read_text())


@pytest.mark.parametrize("name", ["weft", "weft.torch"])
def test_every_export_is_documented(name, sections):
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    assert set(sections[name]) == set(module.__all__)
    for export in module.__all__:
        assert hasattr(module, export)


def test_every_drop_in_is_documented(root):
    """Drop-ins have the signatures of other projects: a section for each module, which names its exports."""
    parts = re.split(r"^## (.*)$", (root / DROP_INS).read_text(), flags=re.M)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert "`weft.compat`" in texts
    for name in modules():
        if name.startswith("weft.compat"):
            text = texts.get(f"`{name}`", "")
            missing = [e for e in exports(name) if f"`{e}`" not in text]
            assert not missing, f"{DROP_INS}: section `{name}` does not name {', '.join(missing)}"


def test_what_drop_ins_lack_is_true(root):
    """The table of missing names has a row for every drop-in, and a name in it is not exported."""
    section = (root / DROP_INS).read_text().split("\n## `weft.compat`\n")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.M))
    assert {f"weft.compat.{name}" for name in rows} == {m for m in modules() if m.startswith("weft.compat.")}
    for name, row in rows.items():
        module = importlib.import_module(f"weft.compat.{name}")
        there = [e for e in re.findall(r"`(\w+)`", row) if hasattr(module, e)]
        assert not there, f"{DROP_INS}: {name} has {', '.join(there)}"


def test_public_names_of_weft_torch_are_exported():
    """A class or function of these files without an underscore is public, or else has one."""
    import weft.torch as wt
    from weft.torch import convert, functional, gdn, gdn_modules, modules, stack

    for module in (convert, functional, gdn, gdn_modules, modules, stack):
        own = {
            k
            for k, v in vars(module).items()
            if k[0] != "_" and inspect.isroutine(v) | inspect.isclass(v) and v.__module__ == module.__name__
        }
        assert own <= set(wt.__all__)


@pytest.mark.parametrize("module", ["weft", "weft.torch"])
def test_every_parameter_is_named(module, sections):
    for name, text in sections[module].items():
        thing = getattr(importlib.import_module(module), name)
        if not callable(thing) or is_enum(thing):
            continue
        for parameter in inspect.signature(thing).parameters:
            assert re.search(rf"\b{parameter}\b", text), f"{name}: {parameter} is not mentioned"
        assert BLOCK.search(text), f"{name}: no example"


def run_blocks(text: str, path: str) -> int:
    """Runs the Python blocks of a document one after the other in one namespace."""
    space: dict = {"__name__": "example"}
    count = 0
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], path, "exec"), space)
        count += 1
    return count


@pytest.mark.parametrize("path", WITH_EXAMPLES)
def test_examples_run(path, root):
    torch.manual_seed(0)
    assert run_blocks(text_of(root, path), path) >= 1


def numbers_of(text: str, name: str) -> torch.Tensor:
    """The matrix of docs/concepts/hyper-connections.md whose second row begins with `name =`."""
    block = next(b for b in re.findall(r"^```\n(.*?)^```$", text, re.M | re.S) if re.search(rf"\b{name} = \|", b))
    rows = re.findall(r"\|([^|\n]*)\|", block)
    return torch.tensor([[float(number) for number in row.split()] for row in rows], dtype=torch.float64)


def test_worked_example(root):
    """The 4 x 4 example of docs/concepts/hyper-connections.md and its growth of an unconstrained mix are what is computed."""
    text = (root / "docs" / "concepts" / "hyper-connections.md").read_text()
    logits, shown = numbers_of(text, "logits"), numbers_of(text, "res")
    res = weft.torch.sinkhorn(logits.unsqueeze(0), "megatron_main")[0]
    torch.testing.assert_close(res, shown, rtol=0, atol=5.01e-4)
    for axis in (0, 1):
        torch.testing.assert_close(res.sum(axis), torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-5)
    streams = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    mix, merged = numbers_of(text, "mix")
    torch.testing.assert_close(streams @ res, mix, rtol=0, atol=5.01e-4)
    u = weft.torch.aggregate(streams.reshape(1, 4, 1), torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64))
    torch.testing.assert_close(u, torch.full((1, 1), 2.0, dtype=torch.float64))
    post = torch.tensor([[1.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    y = weft.torch.post(streams.reshape(1, 4, 1), 10 * u, post, res.unsqueeze(0), numerics="deepseek_v4")
    torch.testing.assert_close(y.flatten(), merged, rtol=0, atol=5.01e-4)
    a = numbers_of(text, "A")
    grown = torch.linalg.matrix_power(a, 48).abs().sum(1).max()
    assert f"1.2^48 = {grown:.0f}" in text


def test_worked_step(root):
    """The two tokens of docs/concepts/gated-deltanet.md."""
    text = (root / "docs" / "concepts" / "gated-deltanet.md").read_text()
    rows = re.findall(r"\|([^|\n]*)\|[^|\n]*\|([^|\n]*)\|", text.split("worked step")[1])
    first, second = (torch.tensor([[float(n) for n in row[k].split()] for row in rows[:2]]) for k in (0, 1))
    key = torch.tensor([1.0, 0.0]).repeat(2, 1).reshape(1, 2, 1, 2)
    value = torch.tensor([[3.0, 4.0], [5.0, 4.0]]).reshape(1, 2, 1, 2)
    beta, g = torch.tensor([1.0, 0.5]).reshape(1, 2, 1), torch.zeros(1, 2, 1)
    for tokens, shown in ((1, first), (2, second)):
        parts = (part[:, :tokens] for part in (key, key, value, beta, g))
        torch.testing.assert_close(weft.torch.gdn_rule(*parts, final_state=True)[1][0, 0], shown)


def test_error_sentences(root):
    """docs/reference/errors.md shows what the library says."""
    text = (root / "docs" / "reference" / "errors.md").read_text()
    with pytest.raises(ValueError) as wrong:
        weft.torch.post(torch.zeros(8, 4, 64), torch.zeros(8, 32), torch.zeros(8, 4), numerics="liger")
    assert str(wrong.value) in text


def test_answers_of_performance(root):
    """The answers at the head of docs/performance.md are what its tables say."""
    text = (root / "docs" / "performance.md").read_text()
    answers = text.split("\n## ")[0]
    peer, ours = (
        [float(number) for number in cell.split("/")]
        for cell in re.search(r"^\| 32768 x 4096 \| ([\d /]+) \| ([\d /]+) \|", text, re.M).groups()
    )
    forward, backward = (a / b for a, b in zip(peer, ours, strict=True))
    assert f"{forward:.1f} times forward, {backward:.1f} backward" in answers
    step = text.split("\n## What does it cost")[1].split("\n## ")[0]
    first, second = (run.split("| C 2048") for run in step.split("| C 4096")[1:3])
    shares = [re.search(r"^\| \| weft \| [\d.]+ \| ([\d.]+) %", part, re.M)[1] for part in (*first, *second)]
    wide, narrow = (f"{shares[k]} and {shares[k + 2]} %" for k in (0, 1))
    assert f"{wide} at 4096 channels, {narrow} at 2048" in answers


def test_version(root):
    """One number, from the public header."""
    header = (root / "include" / "weft" / "weft.h").read_text()
    parts = [re.search(rf"#define WEFT_VERSION_{p}\s+(\d+)", header)[1] for p in ("MAJOR", "MINOR", "PATCH")]
    assert weft.__version__ == ".".join(parts)


def test_docstrings():
    """Everything exported says what it is."""
    for name in modules():
        module = importlib.import_module(name)
        assert module.__doc__
        for export in exports(name):
            thing = getattr(module, export)
            if callable(thing):
                assert inspect.getdoc(thing), f"{name}.{export}"
