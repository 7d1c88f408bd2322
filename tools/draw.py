#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of README.md and the concepts and internals in docs/.

    tools/draw.py            writes the files of DRAWINGS in docs/figures
    tools/draw.py --check    fails where a file differs from what would be written

The bars of peers.svg are the rows of the table "Beside TransformerEngine" in docs/performance.md. Plain Python; colours follow
the reader's light or dark page.
"""

import argparse
import math
import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parent.parent / "docs"
FIGURES = DOCS / "figures"

STYLE = """
text{font:14px system-ui,-apple-system,'Segoe UI',sans-serif;fill:#1f2733}
.small{font-size:12px}.dim{fill:#5b6675}.strong{font-weight:600}.mono{font-family:ui-monospace,Menlo,Consolas,monospace}
.box{fill:#f3f5f8;stroke:#8a95a5}.wire{fill:none;stroke:#5b6675;stroke-width:1.5}.tip{fill:#5b6675}
.s0{stroke:#2f6fde}.s1{stroke:#c2571a}.s2{stroke:#1f8a5f}.s3{stroke:#8b5fbf}.stream{fill:none;stroke-width:4}
.axis{stroke:#c3cad4;stroke-width:1}
.cell{fill:#2f6fde}.bar{fill:#2f6fde}.peer{fill:#9aa5b4}.least{stroke:#1f2733;stroke-width:1.5;stroke-dasharray:3 3}
@media (prefers-color-scheme:dark){
text{fill:#e6eaf0}.dim{fill:#a3adbb}.box{fill:#232a34;stroke:#76818f}.wire{stroke:#a3adbb}.tip{fill:#a3adbb}
.s0{stroke:#6ea0ff}.s1{stroke:#f0965a}.s2{stroke:#55c495}.s3{stroke:#b893ea}.cell,.bar{fill:#6ea0ff}.peer{fill:#6b7686}
.axis{stroke:#414b59}.least{stroke:#e6eaf0}}
"""


def page(width, height, title, parts):
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(x, y, words, kind="", anchor="start"):
    kinds = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{kinds}>{escape(words)}</text>'


def box(x, y, width, height):
    return f'<rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'


def arrow(x, y, to_x, to_y, bend):
    """A curve from (x, y) that leaves and arrives horizontally, with a tip."""
    path = f"M{x:g} {y:g} C{x + bend:g} {y:g} {to_x - bend:g} {to_y:g} {to_x - 6:g} {to_y:g}"
    tip = f"M{to_x - 8:g} {to_y - 4:g} L{to_x:g} {to_y:g} L{to_x - 8:g} {to_y + 4:g} Z"
    return f'<path class="wire" d="{path}"/><path class="tip" d="{tip}"/>'


def streams():
    """One sub-layer between four residual streams."""
    rows = [70, 100, 130, 160]
    mix_x, mix_end, branch, merge, below = 330, 450, 120, 640, 265
    parts = []
    for k, y in enumerate(rows):
        parts.append(f'<path class="stream s{k}" d="M40 {y} H{mix_x}"/>')
        parts.append(f'<path class="stream s{k}" d="M{mix_end} {y} H820"/>')
        parts.append(arrow(branch, y, 196, below - 9 + 6 * k, 30))
        parts.append(arrow(586, below - 9 + 6 * k, merge + 8, y + 2, 24))
    parts += [box(mix_x, 52, mix_end - mix_x, 126)]
    # A doubly stochastic matrix: its shares are areas of blue.
    shares = [[0.7, 0.1, 0.1, 0.1], [0.1, 0.6, 0.2, 0.1], [0.1, 0.2, 0.5, 0.2], [0.1, 0.1, 0.2, 0.6]]
    for i, row in enumerate(shares):
        for j, share in enumerate(row):
            side = 24 * share**0.5
            x, y = mix_x + 6 + 28 * j + (24 - side) / 2, 61 + 28 * i + (24 - side) / 2
            parts.append(f'<rect class="cell" x="{x:.1f}" y="{y:.1f}" width="{side:.1f}" height="{side:.1f}" rx="2"/>')
    parts += [
        text(390, 26, "residual mix", "strong", "middle"),
        text(390, 43, "rows and columns sum to 1", "small dim", "middle"),
        text(40, 26, "n streams of C channels", "strong"),
        text(40, 43, "the residual connection, n = 4", "small dim"),
        text(820, 26, "n streams", "strong", "end"),
        text(820, 43, "into the next sub-layer", "small dim", "end"),
        box(196, 240, 88, 50),
        text(240, 262, "pre", "strong mono", "middle"),
        text(240, 279, "n to 1", "small dim", "middle"),
        arrow(284, below, 330, below, 10),
        box(330, 240, 120, 50),
        text(390, 262, "sub-layer", "strong", "middle"),
        text(390, 279, "attention or MLP", "small dim", "middle"),
        arrow(450, below, 496, below, 10),
        box(496, 240, 90, 50),
        text(541, 262, "post", "strong mono", "middle"),
        text(541, 279, "1 to n", "small dim", "middle"),
        text(196, 316, "mhc_pre predicts the weights of all three boxes from the streams themselves", "small dim"),
        text(196, 334, "mhc_boundary is post and mix of one sub-layer and pre of the next, in one kernel", "small dim"),
    ]
    return page(860, 350, "Four residual streams around one sub-layer", parts)


def table(heading):
    """The rows of the first table below a heading of docs/performance.md, as lists of cells."""
    document = (DOCS / "performance.md").read_text(encoding="utf-8")
    section = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#|\Z)", document, re.M | re.S)
    if not section:
        sys.exit(f"docs/performance.md has no heading '{heading}'")
    rows = [line for line in section[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def peers():
    """Forward and backward of a site beside TransformerEngine's, with the bound of the bytes."""
    row = next(r for r in table("Beside TransformerEngine") if r[0] == "32768 x 4096")
    times = [[float(part) for part in cell.split("/")] for cell in row[1:4]]
    rival, ours, bound = times
    left, width, parts = 240, 480, []
    scale = width / max(rival)
    for k, name in enumerate(("forward", "backward")):
        y = 66 + 92 * k
        parts.append(text(30, y + 32, name, "strong"))
        for j, (who, kind, pair) in enumerate((("TransformerEngine", "peer", rival), ("weft", "bar", ours))):
            top = y + 32 * j
            parts.append(text(left - 10, top + 17, who, "small", "end"))
            parts.append(
                f'<rect class="{kind}" x="{left}" y="{top}" width="{scale * pair[k]:.1f}" height="24" rx="2"/>'
            )
            parts.append(text(left + scale * pair[k] + 8, top + 17, f"{pair[k]:.0f} us", "small strong"))
        x = left + scale * bound[k]
        parts.append(f'<path class="least" d="M{x:.1f} {y - 6} V{y + 62}"/>')
    parts += [
        text(
            30, 28, "All that happens between two sub-layers, 32768 tokens, 4 streams of 4096 channels, bf16", "strong"
        ),
        text(30, 46, "one NVIDIA H200, one process; dashed: the fewest bytes at the speed of a copy", "small dim"),
    ]
    return page(800, 242, "Time between two sub-layers beside TransformerEngine", parts)


def matrix_product(a, b):
    return [[sum(x * y for x, y in zip(row, column, strict=True)) for column in zip(*b, strict=True)] for row in a]


def gain():
    """The largest row sum of a product of residual mixes, by the number of sub-layers."""
    left, right, top, bottom, layers = 90, 770, 70, 300, 48
    kinds = [
        ("unconstrained: rows sum to 1.2", "s1", [[1.1, 0.1], [0.1, 1.1]]),
        ("doubly stochastic: rows and columns sum to 1", "s0", [[0.9, 0.1], [0.1, 0.9]]),
    ]
    parts = [text(30, 28, "How much a signal can grow through the residual mixes", "strong")]
    parts.append(text(30, 46, "largest row sum of the product, logarithmic", "small dim"))
    for exponent in range(5):
        y = bottom - (bottom - top) * exponent / 4
        parts.append(f'<path class="axis" d="M{left} {y:g} H{right}"/>')
        parts.append(text(left - 10, y + 4, f"{10**exponent}", "small dim", "end"))
    for layer in range(0, layers + 1, 12):
        x = left + (right - left) * layer / layers
        parts.append(text(x, bottom + 20, f"{layer}", "small dim", "middle"))
    parts.append(text(right, bottom + 38, "sub-layers", "small dim", "end"))
    for name, kind, mix in kinds:
        product, points = [[1.0, 0.0], [0.0, 1.0]], []
        for layer in range(layers + 1):
            largest = max(sum(map(abs, row)) for row in product)
            y = bottom - (bottom - top) * math.log10(largest) / 4
            points.append(f"{left + (right - left) * layer / layers:.1f} {y:.1f}")
            product = matrix_product(product, mix)
        parts.append(f'<path class="stream {kind}" d="M{" L".join(points)}"/>')
        grows = kind == "s1"
        parts.append(text(right - (250 if grows else 0), 110 if grows else bottom - 10, name, "small strong", "end"))
    return page(800, 350, "Growth of a signal through residual mixes", parts)


def labelled(x, y, width, name, line="", height=50):
    """A box with its name and a line below."""
    middle = x + width / 2
    parts = [box(x, y, width, height), text(middle, y + 22 + (0 if line else 8), name, "strong", "middle")]
    return [*parts, text(middle, y + 39, line, "small dim", "middle")] if line else parts


def delta():
    """A Gated DeltaNet layer, and one step of its rule."""
    parts = [text(30, 28, "A Gated DeltaNet layer", "strong")]
    chain = [
        ("projection", "q k v z b a", 30),
        ("gdn_pre", "conv, silu, norm, gates", 190),
        ("gdn_rule", "state of Dk x Dv", 410),
        ("gdn_norm", "RMSNorm, gate z", 570),
        ("projection", "back to C", 730),
    ]
    width = {190: 170}
    for k, (name, line, x) in enumerate(chain):
        parts += labelled(x, 50, width.get(x, 120), name, line)
        if k:
            before = chain[k - 1][2]
            parts.append(arrow(before + width.get(before, 120), 75, x, 75, 12))
    parts += [
        text(385, 42, "q k v", "small dim mono", "middle"),
        text(385, 116, "g beta", "small dim mono", "middle"),
        text(30, 158, "One token of the rule, for one head", "strong"),
    ]
    steps = [
        ("forget", "S = exp(g) S", 30),
        ("predict", "S^T k", 240),
        ("compare", "d = beta (v - S^T k)", 450),
        ("correct", "S = S + k d^T", 660),
    ]
    for k, (name, line, x) in enumerate(steps):
        parts += labelled(x, 176, 170, name, line)
        if k:
            parts.append(arrow(x - 40, 201, x, 201, 10))
    parts += [
        *labelled(660, 256, 170, "read", "o = S^T q"),
        '<path class="wire" d="M745 226 V248"/><path class="tip" d="M741 248 L745 256 L749 248 Z"/>',
        '<path class="wire" d="M660 281 H115 V234"/><path class="tip" d="M111 234 L115 226 L119 234 Z"/>',
        text(
            388,
            274,
            "the state goes on to the next token; its size does not depend on the length",
            "small dim",
            "middle",
        ),
    ]
    return page(880, 320, "A Gated DeltaNet layer and one step of its rule", parts)


def pipeline():
    """The forward kernel of a site: which warps do what with a tile of eight tokens."""
    parts = [
        text(30, 28, "One block of the fused site kernel, forward", "strong"),
        text(
            30,
            46,
            "its channels of eight tokens at a time; the blocks of a cluster share the channels of a token",
            "small dim",
        ),
        *labelled(30, 80, 130, "global memory", "x, f, psi"),
        *labelled(210, 80, 130, "producer warp", "TMA loads"),
        *labelled(390, 80, 150, "shared memory", "ring of tiles"),
        *labelled(590, 80, 130, "mix warps", "y = post + mix"),
        *labelled(770, 80, 100, "memory", "y"),
        *labelled(390, 190, 150, "MMA warps", "psi y and y^2"),
        *labelled(590, 190, 130, "reduction warp", "sums of the block"),
        *labelled(770, 190, 100, "owner", "sums, gates"),
        *labelled(770, 300, 100, "Sinkhorn", "in batches"),
        *labelled(390, 300, 150, "mix warps", "u = pre y, then norm"),
        *labelled(210, 300, 130, "global memory", "u, v"),
        arrow(160, 105, 210, 105, 12),
        arrow(340, 105, 390, 105, 12),
        arrow(540, 98, 590, 98, 12),
        arrow(720, 105, 770, 105, 12),
        arrow(540, 215, 590, 215, 12),
        arrow(720, 215, 770, 215, 12),
        '<path class="wire" d="M590 118 C560 118 560 118 548 118"/><path class="tip" d="M548 114 L540 118 L548 122 Z"/>',
        '<path class="wire" d="M465 130 V182"/><path class="tip" d="M461 182 L465 190 L469 182 Z"/>',
        '<path class="wire" d="M820 240 V292"/><path class="tip" d="M816 292 L820 300 L824 292 Z"/>',
        '<path class="wire" d="M790 240 C790 275 700 318 548 318"/><path class="tip" d="M548 314 L540 318 L548 322 Z"/>',
        '<path class="wire" d="M390 325 H348"/><path class="tip" d="M348 321 L340 325 L348 329 Z"/>',
        '<path class="wire" d="M405 130 C360 160 360 270 402 294"/><path class="tip" d="M398 290 L407 299 L405 288 Z"/>',
        text(476, 164, "y, rounded", "small dim"),
        text(745, 182, "st.async", "small dim mono", "middle"),
        text(832, 272, "logits", "small dim"),
        text(650, 286, "pre, to all blocks", "small dim", "middle"),
        text(300, 220, "some tiles later", "small dim", "middle"),
    ]
    return page(900, 370, "Pipeline of the fused site kernel", parts)


DRAWINGS = {
    "streams.svg": streams,
    "peers.svg": peers,
    "gain.svg": gain,
    "delta.svg": delta,
    "pipeline.svg": pipeline,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where a file is not up to date")
    check = parser.parse_args().check
    stale = []
    for name, draw in DRAWINGS.items():
        path, drawing = FIGURES / name, draw()
        if check and (not path.exists() or path.read_text(encoding="utf-8") != drawing):
            stale.append(name)
        elif not check:
            path.write_text(drawing, encoding="utf-8")
    for name in stale:
        print(f"docs/figures/{name} is not what tools/draw.py writes; run tools/draw.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
