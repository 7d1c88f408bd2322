#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/report_svg.py <report.html> <folder>: the charts of a report as SVG files that stand by themselves.

A chart of `weft report` takes its colours from the page around it. Here they come into the file, and the names of the
runs with them: training_loss.svg, validation_loss.svg, row_gain.svg and so on."""

import html
import re
import sys
from pathlib import Path

COLOURS = ("#2f6fde", "#d9603b", "#2a9d6f", "#8b5fbf", "#b58a00", "#c2407d", "#3b8ea5", "#6b7280")
LEGEND = 22  # its height
STYLE = (
    "svg{background:#fff}text{fill:#677080;font:12px system-ui,sans-serif}.grid{stroke:#d9dde3}"
    ".title{fill:#1d2430;font-weight:600;font-size:14px}.axis{fill:none;stroke:#677080}"
)


def names(page):
    """The runs, in the order of their colours."""
    return [html.unescape(name) for name in re.findall(r'<span class="key"[^>]*></span>(.*?)</td>', page)]


def legend(runs, height):
    """Names in a line of their own below the chart."""
    x, parts = 60, []
    for i, name in enumerate(runs):
        parts.append(f'<rect x="{x}" y="{height - 17}" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 14}" y="{height - 8}">{html.escape(name)}</text>')
        x += 8 * len(name) + 34
    return "".join(parts)


def alone(svg, runs):
    """A chart with its own colours and names."""
    size = re.search(r'viewBox="0 0 \d+ (\d+)', svg)
    names_below = ""
    if "<path" in svg:  # bars have theirs beside them
        height = int(size.group(1)) + LEGEND
        svg = svg[: size.start(1)] + str(height) + svg[size.end(1) :]
        names_below = legend(runs, height)
    head = '<svg xmlns="http://www.w3.org/2000/svg" '
    svg = re.sub(r"var\(--c(\d)\)", lambda match: COLOURS[int(match.group(1))], svg.replace("<svg ", head, 1))
    begin = svg.index(">") + 1
    return f"{svg[:begin]}<style>{STYLE}</style>{svg[begin:-6]}{names_below}</svg>\n"


def main():
    page, folder = Path(sys.argv[1]).read_text(encoding="utf-8"), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    runs, count = names(page), 0
    for svg in re.findall(r"<svg .*?</svg>", page, re.S):
        title = re.search(r'aria-label="(.*?)"', svg)
        words = re.split(r"[:,(]", title.group(1))[0].strip().lower().replace(" ", "_")
        (folder / f"{words}.svg").write_text(alone(svg, runs), encoding="utf-8")
        count += 1
    print(f"{folder}: {count} charts")
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main())
