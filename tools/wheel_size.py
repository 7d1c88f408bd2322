#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/wheel_size.py <wheel> --limit-mb N: what the files of a wheel take, compressed and not; fails above the limit."""

import argparse
import sys
import zipfile
from pathlib import Path

MB = 1000 * 1000
SHOWN = 0.01  # smaller files are summed in the last line

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("wheel", type=Path)
parser.add_argument("--limit-mb", type=float, required=True)
args = parser.parse_args()

files = sorted(zipfile.ZipFile(args.wheel).infolist(), key=lambda file: -file.compress_size)
size = args.wheel.stat().st_size
print(f"{'MB':>8} {'unpacked':>8}  {args.wheel.name}")
rows = [(f.compress_size, f.file_size, f.filename) for f in files if f.compress_size >= SHOWN * size]
rest = [(f.compress_size, f.file_size) for f in files if f.compress_size < SHOWN * size]
rows.append((sum(r[0] for r in rest), sum(r[1] for r in rest), f"{len(rest)} smaller files"))
for packed, unpacked, name in rows:
    print(f"{packed / MB:8.2f} {unpacked / MB:8.2f}  {name}")
print(f"{size / MB:8.2f} {sum(f.file_size for f in files) / MB:8.2f}  together, of at most {args.limit_mb:g} MB")
if size > args.limit_mb * MB:
    sys.exit(f"{args.wheel}: {size / MB:.1f} MB, expected at most {args.limit_mb:g}")
