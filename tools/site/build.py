#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the documentation site, without the network.

    tools/site/build.py [--out build/docs]     the site in build/docs/site, its pages in build/docs/pages

Pages are docs/, the documents of the repository's root, lab/notes, a page for each public header and for each module of the
Python package (api.py), and a page for each other file that a document links to. A link that leads nowhere, or to a heading
that does not exist, ends the build. Exit status: 0 done, 1 the site has a fault, 77 MkDocs is not installed."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import api  # noqa: E402

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MISSING = "site: skipped, MkDocs is not installed; tools/deps.sh docs installs what tools/docs-requirements.txt names"
FENCE = re.compile(r"^(?P<fence>`{3,})[^\n`]*\n.*?^(?P=fence)$", re.M | re.S)
LINK = re.compile(r"(!?\[(?:[^\]\[]|\[[^\]\[]*\])*\]\()([^)\s]+)(\))")
LANGUAGES = {".c": "c", ".h": "c", ".cu": "cuda", ".cuh": "cuda", ".py": "python", ".sh": "bash", ".def": "c"}
AT_ROOT = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
# An address outside, a file that the browser fetches by itself. Links that a reader clicks are not meant.
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//"""
    r"""|<link\b[^>]*rel=["']?(?:stylesheet|preload|preconnect)[^>]*href=["']?(?:https?:)?//"""
)


def documents():
    """{path of the repository: path in the site} of all Markdown documents."""
    pages = {path: path.relative_to(ROOT / "docs") for path in sorted((ROOT / "docs").rglob("*.md"))}
    for name in AT_ROOT:
        pages[ROOT / name] = Path("repository") / name.lower()
    for path in sorted((ROOT / "lab" / "notes").glob("*.md")):
        pages[path] = Path("notes") / path.name.replace("README.md", "index.md")
    return pages


class Site:
    def __init__(self, out):
        self.pages, self.site = out / "pages", out / "site"
        self.of = documents()
        self.files = {}  # of the repository, shown as pages of their own

    def target(self, source, page, link):
        """A link of a document, as a link of its page."""
        path, _, anchor = link.partition("#")
        if not path or re.match(r"^[a-z]+:", link):
            return link
        found = (source.parent / path).resolve()
        if found in self.of:
            to = self.of[found]
        elif found.is_relative_to(ROOT / "docs") and found.is_file():
            to = found.relative_to(ROOT / "docs")
        elif found.exists() and found.is_relative_to(ROOT):
            name = found.relative_to(ROOT).as_posix()
            to = api.page_of_header(name) or self.files.setdefault(found, Path("files") / f"{name}.md")
        else:
            sys.exit(f"{source.relative_to(ROOT)}: link to {link}, which does not exist")
        return os.path.relpath(to, page.parent).replace(os.sep, "/") + (f"#{anchor}" if anchor else "")

    def rewritten(self, source, page, text):
        parts, end = [], 0
        for fence in [*FENCE.finditer(text), None]:
            stop = fence.start() if fence else len(text)
            parts.append(LINK.sub(lambda m: m[1] + self.target(source, page, m[2]) + m[3], text[end:stop]))
            if fence:
                parts.append(fence.group())
                end = fence.end()
        return "".join(parts)

    def write(self, page, text):
        path = self.pages / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def collect(self):
        shutil.rmtree(self.pages, ignore_errors=True)
        for source, page in self.of.items():
            self.write(page, self.rewritten(source, page, source.read_text(encoding="utf-8")))
        for path in (ROOT / "docs").rglob("*"):
            if path.is_file() and path.suffix != ".md":
                to = self.pages / path.relative_to(ROOT / "docs")
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, to)
        for name in ("site.css", "worker.js"):
            shutil.copyfile(HERE / name, self.pages / name)
        for page, text in api.pages().items():
            self.write(page, text)
        for path, page in self.files.items():
            self.write(page, shown(path))

    def configure(self, nav):
        """The configuration of this build: what the one beside this script has, and the folders."""
        path = self.pages.parent / "mkdocs.yml"
        lines = [
            f"INHERIT: {HERE / 'mkdocs.yml'}",
            f"docs_dir: {self.pages}",
            f"site_dir: {self.site}",
            f"hooks: [{HERE / 'hooks.py'}]",
            "nav:",
            *nav_lines(nav, 1),
        ]
        files = "\n".join(f"  /{page.as_posix()}" for page in self.files.values())
        if files:
            lines += ["not_in_nav: |", files]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path


def shown(path):
    """A file or folder of the repository as a page."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"# {name}\n\n" + "".join(f"- `{entry.name}`\n" for entry in sorted(path.iterdir()))
    text = path.read_text(encoding="utf-8", errors="replace")
    return f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"


def nav_lines(entries, depth):
    for title, value in entries:
        pad = "  " * depth
        if isinstance(value, list):
            yield f"{pad}- {title}:"
            yield from nav_lines(value, depth + 1)
        elif title:
            yield f'{pad}- "{title}": {value}'
        else:
            yield f"{pad}- {value}"


def navigation():
    """The sections of docs/index.md in its order, and what only the site has."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    entries = [("Start", "index.md")]
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        title, _, body = section.partition("\n")
        rows = re.findall(r"^\| \[([^\]]+)\]\(([^)#]+\.md)\) \|", body, re.M)
        own = [(name.replace("`", ""), link) for name, link in rows if not link.startswith("..")]
        if own:
            entries.append((title, own))
    for title, pages in entries:
        if title == "Reference":
            pages += [("C headers", [(n, p) for n, p in api.headers()]), ("weft.torch, docstrings", api.PYTHON_PAGE)]
    notes = sorted((p for p in (ROOT / "lab" / "notes").glob("*.md") if p.name != "README.md"), reverse=True)
    entries.append(("Notes", [("", "notes/index.md"), *(("", f"notes/{p.name}") for p in notes)]))
    names = [("Read me", "readme.md"), ("Contributing", "contributing.md"), ("Changes", "changelog.md")]
    entries.append(("Repository", [(title, f"repository/{name}") for title, name in names]))
    return entries


def mkdocs():
    """The command of MkDocs with its theme and the converter of equations, or None."""
    for folder in (ROOT / ".venv" / "bin", Path(sys.executable).parent, *map(Path, os.get_exec_path())):
        python, program = folder / "python", folder / "mkdocs"
        if program.exists() and python.exists():
            wanted = "import mkdocs, material, latex2mathml"
            if subprocess.run([python, "-c", wanted], capture_output=True).returncode == 0:
                return [str(python), "-m", "mkdocs"]
    return None


def from_outside(site):
    """Pages that fetch something from the network by themselves."""
    return [p.relative_to(site) for p in site.rglob("*.html") if FETCHED.search(p.read_text(encoding="utf-8"))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs", help="folder of the site and its pages")
    options = parser.parse_args()
    command = mkdocs()
    if not command:
        print(MISSING)
        return 77
    start = time.monotonic()
    site = Site(options.out.resolve())
    site.collect()
    config = site.configure(navigation())
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    built = subprocess.run(
        [*command, "build", "--strict", "-f", config], env=environment, capture_output=True, text=True
    )
    if built.returncode:
        said = built.stdout + built.stderr
        print("\n".join(line for line in said.splitlines() if not line.startswith("INFO")))
        return 1
    for page in from_outside(site.site):
        print(f"{page} fetches from the network")
        return 1
    pages = sum(1 for _ in site.site.rglob("*.html"))
    print(f"site: {pages} pages in {site.site} after {time.monotonic() - start:.0f} s; open index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
