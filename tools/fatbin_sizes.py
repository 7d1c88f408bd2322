#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bytes of device code: of each source in src/cuda, by architecture, the largest first.

    tools/fatbin_sizes.py [build folder, libweft.so or wheel] [--expect "80;90a-real"]

A build folder gives a row for each operator; a library or a wheel has no names of sources in it and gives one row. Sizes are
those in the file, behind nvcc's compression; the last column is what it unpacks to. --expect takes a list as of
WEFT_CUDA_ARCHITECTURES and fails where a row has other architectures."""

import argparse
import struct
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

MAGIC = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2
OWN_FEATURES = 1 << 20  # of the flags: code for exactly this GPU, as in 90a


def section(elf: bytes, wanted: bytes) -> bytes:
    """A section of a 64-bit ELF file, empty where there is none."""
    if elf[:5] != b"\x7fELF\x02":
        sys.exit("expected a 64-bit ELF file")
    (headers,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    rows = [struct.unpack_from("<IIQQQQ", elf, headers + k * size) for k in range(count)]
    for name, _, _, _, offset, length in rows:
        start = rows[names][4] + name
        if elf[start : elf.index(b"\0", start)] == wanted:
            return elf[offset : offset + length]
    return b""


def images(fatbin: bytes) -> Iterator[tuple[str, int, int]]:
    """(architecture, bytes, bytes unpacked) of each image; PTX as 80-virtual, machine code as 80-real."""
    at = 0
    while at < len(fatbin):
        magic, _, header, size = struct.unpack_from("<IHHQ", fatbin, at)
        if magic != MAGIC:
            sys.exit(f".nv_fatbin: expected a header at {at}, got {magic:#x}")
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, head, payload = struct.unpack_from("<HHIQ", fatbin, entry)
            (number,) = struct.unpack_from("<I", fatbin, entry + 28)
            flags, _, unpacked = struct.unpack_from("<QQQ", fatbin, entry + 40)
            own = "a" if flags & OWN_FEATURES else ""
            ending = {PTX: "virtual", MACHINE_CODE: "real"}.get(kind, f"kind{kind}")
            yield f"{number}{own}-{ending}", head + payload, unpacked or payload
            entry += head + payload
        at = end + -end % 8


def elf_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, contents) of what may hold device code."""
    if path.is_dir():
        root = path / "CMakeFiles" / "weft_cuda.dir" / "src" / "cuda"
        for file in sorted(root.rglob("*.cu.o")):
            yield str(file.relative_to(root)).removesuffix(".cu.o"), file.read_bytes()
    elif path.suffix == ".whl":
        wheel = zipfile.ZipFile(path)
        for name in wheel.namelist():
            if Path(name).name.startswith("libweft.so"):
                yield name, wheel.read(name)
    else:
        yield path.name, path.read_bytes()


def expected_images(architectures: str) -> set[str]:
    """What nvcc is asked for: a number alone is machine code and PTX."""
    found = set()
    for one in architectures.replace(",", ";").split(";"):
        found |= {one} if "-" in one else {f"{one}-real", f"{one}-virtual"}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, nargs="?", default=Path("build"))
    parser.add_argument("--expect", help='architectures, e.g. "80;90a-real"')
    args = parser.parse_args()

    table: dict[str, dict[str, int]] = {}
    unpacked_of: dict[str, int] = defaultdict(int)
    for name, elf in elf_files(args.path):
        row: dict[str, int] = defaultdict(int)
        for architecture, size, unpacked in images(section(elf, b".nv_fatbin")):
            row[architecture] += size
            unpacked_of[name] += unpacked
        table[name] = row
    if not any(table.values()):
        sys.exit(f"{args.path}: no device code: expected a build with the CUDA backend")

    columns = sorted({a for row in table.values() for a in row}, key=lambda a: (int(a.split("-")[0].rstrip("a")), a))
    total = sum(sum(row.values()) for row in table.values())
    width = max(len(name) for name in (*table, "together"))
    print(f"{'kB':{width}} " + " ".join(f"{c:>11}" for c in columns) + "       total  share    unpacked")
    for name in sorted(table, key=lambda name: -sum(table[name].values())):
        cells = " ".join(f"{table[name][c] / 1e3:11.1f}" for c in columns)
        size = sum(table[name].values())
        print(f"{name:{width}} {cells} {size / 1e3:11.1f} {size / total:6.1%} {unpacked_of[name] / 1e3:11.1f}")
    cells = " ".join(f"{sum(row[c] for row in table.values()) / 1e3:11.1f}" for c in columns)
    print(f"{'together':{width}} {cells} {total / 1e3:11.1f} {1:6.1%} {sum(unpacked_of.values()) / 1e3:11.1f}")

    if args.expect:
        wrong = {n: sorted(c for c in row if row[c]) for n, row in table.items()}
        wrong = {n: has for n, has in wrong.items() if set(has) != expected_images(args.expect)}
        for name, has in wrong.items():
            print(
                f"{name}: expected {' '.join(sorted(expected_images(args.expect)))}, got {' '.join(has)}",
                file=sys.stderr,
            )
        sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
