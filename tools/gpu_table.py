#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tables of a GPU's record in markdown: what was tested, then microseconds and per cent of the copy bandwidth.

    tools/gpu_table.py [bench/baselines/<gpu>.jsonl ...]             prints them; all records by default
    tools/gpu_table.py --write docs/performance.md [RECORD ...]      puts them between the two marker comments there, and
                                                                     the table of paths between two others

A suite of several shapes has a row for each shape and a column for each operator and pass; a suite of one shape has a row
for each operator. Exit status: 0 done, 2 it could not be done.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_record import BASELINES  # noqa: E402
from gpu_tasks import SUITES  # noqa: E402

BEGIN, END = "<!-- gpu tables: begin, written by tools/gpu_table.py -->", "<!-- gpu tables: end -->"
BEGIN_PATHS, END_PATHS = "<!-- gpu paths: begin, written by tools/gpu_table.py -->", "<!-- gpu paths: end -->"
NOTHING = "There is no record yet: `make gpu-record` on a machine with a GPU makes one."


class Unusable(Exception):
    pass


def read(path):
    """The header of a record, its timings by suite, the results of the suites, and those of everything else."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as why:
        raise Unusable(f"{path}: {why}") from why
    if not lines or lines[0].get("record") != "gpu":
        raise Unusable(f"{path} is not a record of a GPU")
    timings, results, tested = {}, {}, []
    for line in lines[1:]:
        if line.get("part") != "bench":
            tested.append(line)
        elif "us" in line:
            timings.setdefault(line["suite"], []).append(line)
        else:
            results[line["suite"]] = line.get("result")
    return lines[0], timings, results, tested


def only(rows, field):
    """The values of a field that all rows should share, in words."""
    return ", ".join(str(value) for value in dict.fromkeys(row[field] for row in rows))


def microseconds(row):
    return f"{row['us']:.1f}" if row["us"] < 100 else f"{row['us']:.0f}"


def per_cent(row):
    return f"{100 * row['of_copy']:.0f} %"


def table(head, lines):
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(line) + " |" for line in lines),
    ]


def has_heads(rows):
    """Whether these are rows of Gated DeltaNet alone, whose shapes are heads instead of channels."""
    return all("key_heads" in row for row in rows)


def shape_of(row, heads):
    if not heads:
        return f"{row['tokens']} x {row['channels']}"
    packed = f", {row['packed']} packed" if row["packed"] else ""
    return f"{row['tokens']}, {row['key_heads']}/{row['value_heads']}{packed}"


def shape_words(rows):
    return "tokens, heads" if has_heads(rows) else "tokens x channels"


def by_shape(rows):
    """[(shape, {(op, pass): row})] in the order of the run. A suite may have a shape twice, as two batches."""
    groups, heads = [], has_heads(rows)
    for row in rows:
        shape, what = shape_of(row, heads), (row["op"], row["pass"])
        if not groups or groups[-1][0] != shape or what in groups[-1][1]:
            groups.append((shape, {}))
        groups[-1][1][what] = row
    return groups


def of_shapes(rows):
    columns = dict.fromkeys((row["op"], row["pass"]) for row in rows)
    lines = []
    for shape, found in by_shape(rows):
        cells = (found.get(column) for column in columns)
        lines.append([shape, *(f"{microseconds(c)} ({per_cent(c)})" if c else "" for c in cells)])
    return table([shape_words(rows), *(f"`{op}` {direction}" for op, direction in columns)], lines)


def of_operators(rows):
    found = {(row["op"], row["pass"]): row for row in rows}
    lines = []
    for op in dict.fromkeys(key[0] for key in found):
        line = [f"`{op}`"]
        for direction in ("fwd", "bwd"):
            row = found.get((op, direction))
            line += [microseconds(row), per_cent(row)] if row else ["", ""]
        lines.append(line)
    return table(["operator", "fwd us", "fwd of copy", "bwd us", "bwd of copy"], lines)


def in_the_long_run(rows):
    """Operators whose later runs took more than 2 % longer than the first twenty, in words. Below 100 us that is the spread."""
    heads = has_heads(rows)
    slower = [
        f"`{row['op']}` {row['pass']} at {shape_of(row, heads)} {row['us_sustained']:.0f}"
        for row in rows
        if row.get("us_sustained", 0) > 1.02 * row["us"] and row["us"] >= 100
    ]
    return (
        [
            "From 100 us on, runs after the first twenty took more than 2 % longer, in microseconds: "
            + "; ".join(slower)
            + ".",
            "",
        ]
        if slower
        else []
    )


def of_suite(suite, rows, result):
    several = len(by_shape(rows)) > 1
    options = " ".join(SUITES.get(suite, ["of the suite", suite]))
    shape = "" if several else f", {rows[0]['tokens']} tokens x {rows[0]['channels']} channels"
    about = (
        "heads of 128"
        if has_heads(rows)
        else f"{only(rows, 'streams')} streams, layout {only(rows, 'layout')}, preset {only(rows, 'preset')}{shape}"
    )
    text = [
        f"`weft bench --backend cuda {options}`: {only(rows, 'dtype')}, {about}, L2 {only(rows, 'cache')}, copy "
        f"{rows[0]['copy_gbps']:.0f} GB/s."
    ]
    if several:
        text[0] += " Microseconds and, in brackets, per cent of copy."
    if result != "passed":
        text[0] += f" This run {result or 'was not finished'}: what is missing here is not measured."
    return [*text, "", *(of_shapes(rows) if several else of_operators(rows)), "", *in_the_long_run(rows)]


# What is counted of the lines of a part: (the part, `of` of ptx80): words for it.
TESTED = {
    ("tests", None): "test programs",
    ("check", None): "`weft check --backend cuda`",
    ("golden", None): "golden files",
    ("sanitizer", None): "compute-sanitizer",
    ("python", None): "`tests/python`",
    ("train", None): "`tests/train.py`, part `gpu`",
    ("ptx80", "tests"): "PTX for 8.0: test programs",
    ("ptx80", "check"): "PTX for 8.0: `weft check --backend cuda`",
    ("ptx80", "golden"): "PTX for 8.0: golden files",
    ("ptx80", "train"): "PTX for 8.0: `tests/train.py`, part `gpu`",
}


def words_of(line):
    """A line that counts or sums up by itself."""
    name = line.get("precision") or line.get("tool") or ""
    if line.get("threads"):
        name += f" planned for {line['threads']} multiprocessor"
    words = line.get("summary") or f"{line['passed']} passed, {line['failed']} failed"
    if line["result"] not in ("passed", "failed"):
        words = f"{line['result']}, {words}"
    return f"{name}: {words}" if name else words


def outcome(lines):
    """A cell about lines of one kind."""
    if any("on_gpu" in line for line in lines):
        counts = [f"{sum(line.get(word, 0) for line in lines)} {word}" for word in ("passed", "failed", "skipped")]
        on_gpu = sum(line.get("on_gpu", 0) for line in lines)
        return ", ".join(counts) + f"; of those that passed, {on_gpu} with tensors on the GPU"
    if all("summary" in line or "passed" in line for line in lines):
        return "; ".join(map(words_of, lines))
    results = [line["result"] for line in lines]
    return ", ".join(f"{results.count(result)} {result}" for result in dict.fromkeys(results))


def of_tests(tested):
    kinds = {kind: [line for line in tested if (line["part"], line.get("of")) == kind] for kind in TESTED}
    lines = [[TESTED[kind], outcome(found)] for kind, found in kinds.items() if found]
    return [*table(["tested", "outcome"], lines), ""] if lines else []


def of_record(path):
    header, timings, results, tested = read(path)
    if not timings:
        raise Unusable(f"{path} has no timings")
    lines = [
        f"### {header['gpu']}",
        "",
        f"Compute capability {header['capability']}; driver {header['driver']}; CUDA {header['cuda']}; weft "
        f"{header['version']}, `{header['command']}`, {header['date']}.",
        "",
        *of_tests(tested),
    ]
    missing = [suite for suite in SUITES if suite not in timings]
    if missing:
        lines += [f"Not timed in this record: {', '.join(missing)}.", ""]
    for suite in [*(s for s in SUITES if s in timings), *(s for s in timings if s not in SUITES)]:
        lines += of_suite(suite, timings[suite], results.get(suite))
    return lines


def largest(rows, op):
    """The forward and backward rows of an operator at the shape with the most bytes among those that have both."""
    found = {}
    for row in rows:
        if row["op"] == op and row["pass"] in ("fwd", "bwd"):
            found.setdefault((row["tokens"], row["channels"]), {})[row["pass"]] = row
    both = {shape: passes for shape, passes in found.items() if len(passes) == 2}
    # 32768 x 4096 where it is there: the shape of the tables beside peers.
    return both.get((32768, 4096)) or (both[max(both)] if both else None)


def of_paths(path):
    """Which path the fused suites took, by residual mix, dtype and layout, and how close to the copy bandwidth."""
    header, timings, _, _ = read(path)
    lines, shapes = [], set()
    for suite in (s for s in SUITES if s.startswith("fused") and s in timings):
        for op in ("mhc_boundary", "mhc_pre", "mhc_head"):
            passes = largest(timings[suite], op)
            row = passes and passes["fwd"]
            mixed = row and row["preset"] != "hy_v4"
            if passes and (mixed or op != "mhc_head"):
                shapes.add(shape_of(row, False))
                layout = {"nc": "(n, C)", "cn": "(C, n)"}[row["layout"]]
                times = (f"{microseconds(passes[p])} us, {per_cent(passes[p])}" for p in ("fwd", "bwd"))
                mix = "yes" if mixed else "none"
                lines.append([f"`{op}`", mix, row["dtype"], layout, *times, row["path"].partition(":")[0]])
    head = ["operator", "residual mix", "dtype", "layout", "forward", "backward", "path"]
    about = (
        f"{header['gpu']}, record of {header['date']}, 4 streams, {', '.join(sorted(shapes))} tokens x channels; per cent of "
        "the copy bandwidth."
    )
    return [about, "", *table(head, lines), ""] if lines else []


def between(text, begin, end, lines, document):
    """The text with these lines between its markers."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise Unusable(f"{document} must have, once and in this order: {begin} and {end}")
    before, rest = text.split(begin)
    return "\n".join([before + begin, "", *lines, end + rest.split(end)[1]])


def between_markers(document, lines, paths):
    text = between(document.read_text(encoding="utf-8"), BEGIN, END, lines, document)
    return between(text, BEGIN_PATHS, END_PATHS, paths, document) if paths else text


def main():
    parser = argparse.ArgumentParser(description="Tables of a GPU's record in markdown.")
    parser.add_argument(
        "records", nargs="*", type=Path, help="files of bench/baselines/; by default all that have timings"
    )
    parser.add_argument(
        "--write", type=Path, metavar="DOCUMENT", help="put the tables between the markers of a document"
    )
    options = parser.parse_args()
    try:
        lines, paths = [], []
        for path in options.records or [p for p in sorted(BASELINES.glob("*.jsonl")) if read(p)[1]]:
            lines += of_record(path)
            paths += of_paths(path)
        lines = lines or [NOTHING, ""]
        if options.write:
            options.write.write_text(between_markers(options.write, lines, paths), encoding="utf-8")
        else:
            print("\n".join(lines), end="")
    except (Unusable, OSError, KeyError) as why:
        print(f"gpu_table: {'no field ' if isinstance(why, KeyError) else ''}{why}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
