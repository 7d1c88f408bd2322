#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws a record of benchmarks as an SVG: per cent of the copy bandwidth, an operator a row, a shape a column.

    tools/plot_bench.py bench/baselines/<gpu>.jsonl [--suite te] [--value of_copy|us] [--out FILE.svg]

Plain Python. Each cell has its number, and a bar as long as the share of the copy bandwidth.
"""

import argparse
import json
import sys
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_table import by_shape, shape_words  # noqa: E402

CELL_WIDTH, CELL_HEIGHT = 74, 22
LEFT, TOP = 150, 74
# Colour by share of copy speed: nothing to gain, some, much. Readable on white and on a dark page alike.
SHADES = ((0.9, "#7fb685"), (0.7, "#b9cf7e"), (0.5, "#e6c75f"), (0.0, "#e29578"))


def shade(share):
    return next(colour for least, colour in SHADES if share >= least)


def text(x, y, words, size=12, anchor="start", weight="normal"):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(words)}</text>"
    )


def cell(x, y, row, value):
    share = row["of_copy"]
    width = max(0.0, min(1.0, share)) * (CELL_WIDTH - 4)
    words = (
        f"{100 * share:.0f}%" if value == "of_copy" else f"{row['us']:.1f}" if row["us"] < 100 else f"{row['us']:.0f}"
    )
    title = (
        f"{row['op']} {row['pass']}, {row['tokens']} tokens x {row['channels']} channels: {row['us']:.1f} us, "
        f"{row['gbps']:.0f} GB/s, {100 * share:.1f}% of copy"
    )
    return [
        f"<g><title>{escape(title)}</title>"
        f'<rect x="{x + 2}" y="{y + 2}" width="{CELL_WIDTH - 4}" height="{CELL_HEIGHT - 4}" fill="#eceff1"/>'
        f'<rect x="{x + 2}" y="{y + 2}" width="{width:.1f}" height="{CELL_HEIGHT - 4}" fill="{shade(share)}"/>',
        text(x + CELL_WIDTH / 2, y + CELL_HEIGHT - 7, words, 11, "middle"),
        "</g>",
    ]


def draw(header, rows, suite, value):
    shapes = by_shape(rows)
    operators = list(dict.fromkeys((row["op"], row["pass"]) for row in rows))
    operators.sort(key=lambda pair: pair[1] != "fwd")  # forward above backward, each in the order of the run
    width, height = max(640, LEFT + CELL_WIDTH * len(shapes) + 16), TOP + CELL_HEIGHT * len(operators) + 30
    first = rows[0]
    unit = "per cent of the copy bandwidth" if value == "of_copy" else "microseconds"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" fill="#1c2833">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        text(12, 22, f"{header['gpu']}: {unit}", 15, weight="bold"),
        text(
            12,
            40,
            f"copy {first['copy_gbps']:.0f} GB/s, {first['dtype']}, {first['streams']} streams, layout "
            f"{first['layout']}, suite {suite}, weft {header['version']}, {header['date']}",
        ),
    ]
    for k, (shape, _) in enumerate(shapes):
        for line, part in enumerate(shape.split(" ", 1)):
            parts.append(text(LEFT + CELL_WIDTH * (k + 0.5), TOP - 16 + 12 * line, part, 11, "middle"))
    for i, (op, direction) in enumerate(operators):
        y = TOP + CELL_HEIGHT * i
        parts.append(text(12, y + CELL_HEIGHT - 7, f"{op} {direction}"))
        for k, (_, found) in enumerate(shapes):
            row = found.get((op, direction))
            if row:
                parts += cell(LEFT + CELL_WIDTH * k, y, row, value)
    parts.append(text(12, height - 10, f"columns: {shape_words(rows)}", 11))
    return "\n".join([*parts, "</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description="Draws a record of benchmarks as an SVG.")
    parser.add_argument("record", help="a file of bench/baselines/")
    parser.add_argument("--suite", default="te", help="which rows: te, te_cn, small, all")
    parser.add_argument("--value", default="of_copy", choices=("of_copy", "us"), help="the number in a cell")
    parser.add_argument("--out", help="file to write; standard output by default")
    options = parser.parse_args()
    lines = [json.loads(line) for line in Path(options.record).read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = [
        line for line in lines if line.get("part") == "bench" and line.get("suite") == options.suite and "us" in line
    ]
    if not rows or lines[0].get("record") != "gpu":
        print(f"plot_bench: {options.record} has no rows of the suite {options.suite}", file=sys.stderr)
        return 2
    picture = draw(lines[0], rows, options.suite, options.value)
    if options.out:
        Path(options.out).write_text(picture, encoding="utf-8")
    else:
        sys.stdout.write(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
