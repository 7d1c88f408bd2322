#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that the documents speak of things that exist.

- A path of the repository named in `backticks` or as the target of a link exists. <stem> and * match anything, and
  a name with "foo" in it is an example. A link to a heading leads to one.
- Every document of docs/ is one link away from docs/index.md or README.md, and every figure is in a document.
- docs/questions.md has ten questions or more, and each answer links to the page that has it in full.
- In docs/reference/math.md a tag such as [M1] stands in a heading, and its section names an implementing file under src/.
- A tag cited in a header or source exists in docs/reference/math.md.
- A source whose opening comment cites a tag is named in the section of the first one it cites, and a source under src/
  with the name of an operator cites one: from an equation to its code in every backend, and back.
- Every operator of src/core/ops.def is named in docs/reference/math.md.
- The table of docs/internals/design.md about what is remembered names the files under src/ with static variables, and no others.
- No document, script or source has a line that a merge conflict left.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MATH = DOCS / "reference" / "math.md"

TAG = re.compile(r"\[([A-Z][0-9]+)\]")
CODE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(`{3,})[^\n`]*\n.*?^\1$", re.M | re.S)
# A variable that keeps its value between calls: no constant, no function.
STATIC = re.compile(r"^[ \t]*static (?!inline\b|__)(?![^;=\n]*\bconst)(?![^;=\n]*\()[^;=\n]*[;=]", re.M)
PATH = re.compile(r"^[\w.*<>{},+-]+(/[\w.*<>{},+-]+)*/?$")

# What git leaves of two versions that it could not merge.
CONFLICT = re.compile(r"^(?:<{7}|={7}$|>{7})", re.M)
TEXT = {".c", ".cu", ".cuh", ".def", ".h", ".md", ".py", ".sh"}
FOLDERS = ("bench", "check", "cli", "docs", "examples", "include", "lab", "python", "src", "tests", "tools")

# Characters that a heading loses in its anchor; spaces become dashes.
NOT_IN_ANCHOR = re.compile(r"[^\w\- ]")

failures = []


def fail(path, text, position, message):
    failures.append(f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, position) + 1}: {message}")


def blank_fences(text):
    """The text with fenced blocks emptied, lines kept."""
    return FENCE.sub(lambda match: "\n" * match.group().count("\n"), text)


def variants(name):
    """`a/{b,c}.h` names two files."""
    brace = re.search(r"\{([^{}]*)\}", name)
    if not brace:
        return [name]
    return [
        v for part in brace.group(1).split(",") for v in variants(name[: brace.start()] + part + name[brace.end() :])
    ]


def resolve(name):
    """Folders a name may be relative to, or [] where it does not look like a path of this repository."""
    first = name.split("/")[0]
    if "/" not in name:
        is_root_file = re.fullmatch(r"(README|CONTRIBUTING|CHANGELOG|LICENSE|Makefile|CMake\w+)(\.\w+)?", name)
        return [ROOT] if is_root_file else []
    if first.startswith("build"):
        return []
    if (ROOT / first).is_dir() or first in {"python", ".ci"}:
        return [ROOT]
    if first == "weft" and name.endswith(".h"):
        return [ROOT / "include"]
    if (ROOT / "src" / first).is_dir():
        return [ROOT / "src"]
    return []


def exists(base, name):
    pattern = re.sub(r"<[^<>/]*>", "*", name.rstrip("/"))
    return any(base.glob(pattern)) if "*" in pattern else (base / pattern).exists()


def files(name):
    return ROOT.glob(name) if "*" in name else [ROOT / name]


def check_paths(document):
    text = blank_fences(document.read_text(encoding="utf-8"))
    for match in CODE.finditer(text):
        name = re.sub(r":\d+$", "", match.group(1))
        if not PATH.match(name) or "foo" in name:
            continue
        for variant in variants(name):
            bases = resolve(variant)
            if bases and not any(exists(base, variant) for base in bases):
                fail(document, text, match.start(), f"{variant} does not exist")
    for match in LINK.finditer(text):
        target, _, anchor = match.group(1).partition("#")
        if re.match(r"^[a-z]+:", target):
            continue
        to = document.parent / target if target else document
        if not to.exists():
            fail(document, text, match.start(), f"link to {target}, which does not exist")
        elif anchor and to.suffix == ".md" and anchor not in anchors(to):
            fail(document, text, match.start(), f"{target or document.name} has no heading #{anchor}")


def anchors(document):
    """What links to the headings of a document end with."""
    headings = re.findall(r"^#+ (.*?)\s*$", blank_fences(document.read_text(encoding="utf-8")), re.M)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings)
    return {NOT_IN_ANCHOR.sub("", heading.lower()).replace(" ", "-") for heading in plain}


def links_of(document):
    """The files that a document links to."""
    targets = (link.split("#")[0] for link in LINK.findall(blank_fences(document.read_text(encoding="utf-8"))))
    return {(document.parent / target).resolve() for target in targets if target and not re.match(r"^[a-z]+:", target)}


def check_reach(documents):
    index = DOCS / "index.md"
    text = index.read_text(encoding="utf-8")
    near = links_of(index) | links_of(ROOT / "README.md") | {index}
    for document in documents:
        if document.is_relative_to(DOCS) and document not in near:
            fail(index, text, 0, f"nothing here or in README.md links to {document.relative_to(ROOT)}")
    used = set().union(*(links_of(document) for document in documents))
    for figure in sorted(DOCS.rglob("*.svg")):
        if figure not in used:
            fail(index, text, 0, f"no document shows {figure.relative_to(ROOT)}")


def check_questions():
    path = DOCS / "questions.md"
    text = path.read_text(encoding="utf-8")
    asked = list(re.finditer(r"^## (.*)\n((?:(?!^## ).*\n?)*)", text, re.M))
    if len(asked) < 10:
        fail(path, text, 0, f"expected ten questions or more, got {len(asked)}")
    for question in asked:
        if not question[1].endswith("?") or not LINK.search(question[2]):
            fail(path, text, question.start(), f"{question[1]!r}: expected a question, and a link in its answer")


def check_math():
    text = blank_fences(MATH.read_text(encoding="utf-8"))
    headings = [match for match in re.finditer(r"^#+ .*$", text, re.M) if TAG.search(match.group())]
    tags = set()
    named_in = {}
    for i, heading in enumerate(headings):
        end = headings[i + 1].start() if i + 1 < len(headings) else len(text)
        named = [v for code in CODE.findall(text[heading.start() : end]) for v in variants(code)]
        here = TAG.findall(heading.group())
        tags.update(here)
        for tag in here:
            named_in[tag] = {
                path for name in named if name.startswith("src/") and PATH.match(name) for path in files(name)
            }
        if not any(name.startswith("src/") and PATH.match(name) and exists(ROOT, name) for name in named):
            fail(MATH, text, heading.start(), f"[{'], ['.join(here)}] names no implementing file under src/")
    if not tags:
        fail(MATH, text, 0, "no heading carries a tag such as [M1]")

    sources = [
        path
        for folder in ("include", "src")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".c", ".h", ".cu", ".cuh"}
    ]
    for path in sources:
        source = path.read_text(encoding="utf-8")
        for comment in re.finditer(r"/\*.*?\*/|//[^\n]*", source, re.S):
            for tag in TAG.finditer(comment.group()):
                if tag.group(1) not in tags:
                    fail(
                        path,
                        source,
                        comment.start() + tag.start(),
                        f"{tag.group()} is not a heading of docs/reference/math.md",
                    )

    operators = re.findall(r"^WEFT_OP\((\w+)\)", (ROOT / "src/core/ops.def").read_text(encoding="utf-8"), re.M)
    stems = sorted({re.sub(r"_(fwd|bwd)$", "", name) for name in operators})
    for path in (path for path in sources if path.is_relative_to(ROOT / "src")):
        source = path.read_text(encoding="utf-8")
        opening = re.match(r"/\*.*?\*/", source, re.S)
        cited = TAG.findall(opening.group()) if opening else []
        if cited and cited[0] in tags and path not in named_in[cited[0]]:
            fail(
                path,
                source,
                0,
                f"not named in the section [{cited[0]}] of docs/reference/math.md, which it cites first",
            )
        if not cited and path.stem in stems:
            fail(path, source, 0, "the opening comment of an operator cites no tag of docs/reference/math.md")
    for stem in stems:
        if not re.search(rf"\b{stem}\b", text):
            fail(MATH, text, 0, f"the operator {stem} is not named")
    return len(tags)


def check_remembered():
    design = ROOT / "docs" / "internals" / "design.md"
    text = design.read_text(encoding="utf-8")
    start = text.find("| remembered | where |")
    if start < 0:
        fail(design, text, 0, "there is no table of what is remembered")
        return
    table = {name for name in CODE.findall(text[start : text.index("\n\n", start)]) if name.startswith("src/")}
    kept = set()
    for path in sorted((ROOT / "src").rglob("*")):
        if path.suffix in {".c", ".h", ".cu", ".cuh"}:
            source = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.S)
            if STATIC.search(source):
                kept.add(path.relative_to(ROOT).as_posix())
    for name in sorted(kept - table):
        fail(design, text, start, f"{name} keeps a static variable that the table does not have")
    for name in sorted(table - kept):
        fail(design, text, start, f"{name} keeps no static variable")


def check_conflicts(documents):
    found = {
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in TEXT and path.is_file()
    }
    for path in sorted(found.union(document for document in documents if document.is_file())):
        text = path.read_text(encoding="utf-8")
        for match in CONFLICT.finditer(text):
            fail(path, text, match.start(), "a conflict of a merge")


def main():
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
    for document in documents:
        if document.is_file():
            check_paths(document)
        else:
            failures.append(f"{document.relative_to(ROOT)} is missing")
    check_reach(documents)
    check_questions()
    tags = 0
    if MATH.is_file():
        tags = check_math()
    else:
        failures.append("docs/reference/math.md is missing")
    check_remembered()
    check_conflicts(documents)
    print(*failures, sep="\n", end="\n" if failures else "")
    print(f"docs: {len(documents)} documents, {tags} tags, {len(failures)} problems")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
