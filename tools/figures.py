#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Numbers in the text of documents that a record of bench/baselines has.

    tools/figures.py            writes them
    tools/figures.py --check    fails where a document has another number than the record

A number stands between two comments. The first names the record, its suite, the operator, the pass, the shape (tokens x channels,
or tokens x heads and the number of packed sequences) and what of it: us, ms, ms3 (three places), or copy, which is per cent of the
copy bandwidth. The second is empty. A line does not begin with a comment, which would end its paragraph:

    <!--h200 fused mhc_boundary fwd 32768x4096 ms-->0.65<!---->
    <!--h200 rule gdn_rule fwd 32768x16/32p4 ms3-->1.574<!---->"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_record import BASELINES  # noqa: E402
from gpu_table import microseconds, read  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
NUMBER = re.compile(r"(<!--(\w+) (\w+) (\w+) (\w+) ([\w/]+) (us|ms|ms3|copy)-->)(.*?)(<!---->)")
VALUES = {
    "us": microseconds,
    "ms": lambda row: f"{row['us'] / 1000:.2f}",
    "ms3": lambda row: f"{row['us'] / 1000:.3f}",
    "copy": lambda row: f"{100 * row['of_copy']:.0f}",
}


def shape_of(row):
    if "key_heads" not in row:
        return f"{row['tokens']}x{row['channels']}"
    return f"{row['tokens']}x{row['key_heads']}/{row['value_heads']}" + (f"p{row['packed']}" if row["packed"] else "")


def row_of(record, suite, op, direction, shape):
    for row in read(BASELINES / f"{record}.jsonl")[1].get(suite, []):
        if (row["op"], row["pass"], shape_of(row)) == (op, direction, shape):
            return row
    raise KeyError(f"{record} has no {suite} {op} {direction} {shape}")


def renewed(match):
    *names, what = match.groups()[1:7]
    return match[1] + VALUES[what](row_of(*names)) + match[9]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, fail where a number would change")
    check = parser.parse_args().check
    count, stale = 0, []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        count += len(NUMBER.findall(text))
        if re.search(r"^<!--\w+ \w+ \w+ \w+ [\w/]+ (us|ms|ms3|copy)-->", text, re.M):
            print(f"{path.relative_to(ROOT)}: a line begins with the comment of a number")
            return 1
        try:
            new = NUMBER.sub(renewed, text)
        except KeyError as why:
            print(f"{path.relative_to(ROOT)}: {why.args[0]}")
            return 1
        if new != text:
            stale.append(path.relative_to(ROOT))
            if not check:
                path.write_text(new, encoding="utf-8")
    for path in stale if check else []:
        print(f"{path} has other numbers than its record; run tools/figures.py")
    print(f"figures: {count} numbers from records")
    return 1 if count == 0 or (check and stale) else 0


if __name__ == "__main__":
    sys.exit(main())
