# SPDX-License-Identifier: Apache-2.0
"""Pages of the public headers and of weft.torch, from their own text: comments and declarations, docstrings and signatures.

Nothing is compiled or imported."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "include" / "weft"
PYTHON = ROOT / "python" / "weft" / "torch"
PYTHON_PAGE = "api/weft_torch.md"

COMMENT = re.compile(r"/\*(.*?)\*/", re.S)
TITLE = re.compile(r"^-{4} (.*?)\s*-{4,}\s*$|^-{4} (.*?)\s*-{4,}\s*(?=\n|$)", re.M)
# What an include file has around its declarations.
FRAME = re.compile(
    r"#ifndef WEFT_\w+_H\n#define WEFT_\w+_H\n|#ifdef __cplusplus\n.*?#endif\n|^#endif\s*\Z|^#include[^\n]*\n",
    re.M | re.S,
)
NAMES = re.compile(r"\b(weft_\w+)\s*\(|\}\s*(weft_\w+)\s*;|#define (WEFT_\w+)|typedef struct (weft_\w+) \w+;")


def headers():
    """(title, page) of each public header, the shared one first."""
    names = sorted((p.name for p in INCLUDE.glob("*.h")), key=lambda name: (name != "weft.h", name))
    return [(f"weft/{name}", f"api/{Path(name).stem}.md") for name in names]


def page_of_header(name):
    """The page of a header of include/weft, or None."""
    path = Path(name)
    return Path("api") / f"{path.stem}.md" if path.parent.as_posix() == "include/weft" and path.suffix == ".h" else None


def words(comment):
    """The text of a comment without its frame."""
    lines = [re.sub(r"^ \* ?|^ \*$", "", line) for line in comment.split("\n")]
    return "\n".join(lines).strip("\n").rstrip()


def prose(text):
    """Text of a comment as Markdown: indented lines are code, the rest is paragraphs and lists."""
    out, code = [], []

    def close():
        if code:
            out.extend(["", "```text", *code, "```", ""])
            code.clear()

    listed = False
    for line in text.split("\n"):
        item = re.match(r"^\s*- (.*)$", line)
        if item:
            close()
            out.extend(([] if listed else [""]) + [f"- {escape(item[1])}"])
            listed = True
        elif listed and line.startswith("    "):
            out.append(f"  {escape(line.strip())}")
        elif line.startswith("    "):
            listed = False
            code.append(line[4:].rstrip())
        else:
            close()
            if listed and line.strip():
                out.append("")
            listed = False
            out.append(escape(line.strip()))
    close()
    return "\n".join(out)


def escape(line):
    """Text as it is, but for code in backticks."""
    parts = re.split(r"(`[^`]+`)", line)
    parts[::2] = [re.sub(r"([*_\[\]|$`])", r"\\\1", part.replace("<", "&lt;")) for part in parts[::2]]
    return "".join(parts)


def sections(text):
    """[(title or "", comment, [pieces])] of a header; a piece is a comment or a run of declarations."""
    text = FRAME.sub("", text)
    found, position = [("", "", [])], 0
    for match in COMMENT.finditer(text):
        if match.start() and text[match.start() - 1] != "\n":
            continue  # beside a declaration
        code = text[position : match.start()].strip("\n")
        if code.strip():
            found[-1][2].append(("code", code))
        position = match.end()
        comment = words(match[1].strip())
        title = TITLE.match(comment)
        if title:
            rest = comment[title.end() :].strip("\n")
            name, _, equation = (title[1] or title[2]).partition("]: ")
            found.append((f"{name}]", f"    {equation}\n{rest}", []) if equation else (name, rest, []))
        elif "SPDX" in comment:
            found[0] = ("", comment.split("\n", 1)[1] if "\n" in comment else "", found[0][2])
        else:
            found[-1][2].append(("text", comment))
    code = text[position:].strip("\n")
    if code.strip():
        found[-1][2].append(("code", code))
    return found


def anchors(code):
    names = [name for groups in NAMES.findall(code) for name in groups if name]
    return "".join(f'<a id="{name}"></a>' for name in dict.fromkeys(names))


def header_page(name):
    lines = [f"# {name}", ""]
    for title, comment, pieces in sections((ROOT / "include" / name).read_text(encoding="utf-8")):
        if title:
            lines += [f"## {escape(title)}", ""]
        lines += [prose(comment), ""]
        for kind, text in pieces:
            lines += [prose(text), ""] if kind == "text" else [anchors(text), "", "```c", text, "```", ""]
    return "\n".join(lines)


def exported():
    """The names of weft.torch in the order of its __all__."""
    tree = ast.parse((PYTHON / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    raise SystemExit("python/weft/torch/__init__.py has no __all__")


def definitions():
    found = {}
    for path in sorted(PYTHON.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.setdefault(node.name, (node, path))
    return found


def signature(node):
    arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("self")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    text = f"{node.name}({arguments}){returns}"
    if len(text) <= 100:
        return text
    pieces = split_arguments(arguments)
    return f"{node.name}(\n" + "".join(f"    {piece},\n" for piece in pieces) + f"){returns}"


def split_arguments(text):
    pieces, depth, start = [], 0, 0
    for k, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            pieces.append(text[start:k].strip())
            start = k + 1
    return [*pieces, text[start:].strip()]


def documented(node, level):
    yield f"{'#' * level} `{node.name}`"
    yield ""
    if isinstance(node, ast.ClassDef):
        parts = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
        fields = [ast.unparse(n) for n in node.body if isinstance(n, ast.AnnAssign)]
        shown = signature(parts["__init__"]).replace("__init__", node.name, 1) if "__init__" in parts else ""
        shown = shown.removesuffix(" -> None") or "\n".join([f"class {node.name}:", *(f"    {f}" for f in fields)])
    else:
        parts, shown = {}, signature(node)
    yield f"```python\n{shown}\n```\n"
    text = ast.get_docstring(node)
    if text:
        yield prose(text) + "\n"
    for name, method in parts.items():
        if name[0] != "_" and (ast.get_docstring(method) or name == "forward"):
            yield from documented(method, level + 1)


def python_page():
    found = definitions()
    lines = [
        "# weft.torch",
        "",
        "Signatures and docstrings of what `weft.torch` exports. [Python](../reference/python.md) has an example for each name, "
        "[PyTorch](../guides/pytorch.md#rules-for-all-of-it) the rules that hold for all of it.",
        "",
    ]
    for name in exported():
        if name in found:
            lines += documented(found[name][0], 2)
        else:
            lines += [f"## `{name}`", ""]
    return "\n".join(lines)


def pages():
    """{page: text}"""
    return {page: header_page(name) for name, page in headers()} | {PYTHON_PAGE: python_page()}
