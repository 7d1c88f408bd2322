#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/reference that the library and the program know: arguments of operators, presets, statuses, options.

    tools/reference.py build/libweft.so build/weft            writes them between the markers of the documents
    tools/reference.py build/libweft.so build/weft --check    fails where a document is not up to date

A table stands between `<!-- NAME: begin, written by tools/reference.py -->` and `<!-- NAME: end -->`."""

import argparse
import ctypes
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
BLOCK = re.compile(
    r"<!-- (?P<name>[\w ]+): begin, written by tools/reference\.py -->\n.*?<!-- (?P=name): end -->", re.S
)


class Arg(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("offset", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("type", ctypes.c_int),
        ("optional", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dim", ctypes.c_int32 * 4),
        ("in_place", ctypes.c_char_p),
    ]


class Scalar(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("offset", ctypes.c_size_t), ("type", ctypes.c_int)]


class Op(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("args_size", ctypes.c_size_t),
        ("num_args", ctypes.c_int32),
        ("args", ctypes.POINTER(Arg)),
        ("scalars", ctypes.POINTER(Scalar)),
    ]


class Numerics(ctypes.Structure):
    _fields_ = [
        ("rms_eps", ctypes.c_double),
        ("rms_eps_kind", ctypes.c_int),
        ("pre_eps", ctypes.c_double),
        ("post_mult", ctypes.c_double),
        ("sinkhorn", ctypes.c_int),
        ("sinkhorn_eps", ctypes.c_double),
        ("sinkhorn_iters", ctypes.c_int32),
        ("apply", ctypes.c_int),
        ("post_eps", ctypes.c_double),
        ("reserved", ctypes.c_uint64 * 5),
    ]


def enum(header, name):
    """The constants of an enumeration of include/weft, with their values and the comments beside them."""
    text = (ROOT / "include" / "weft" / header).read_text(encoding="utf-8")
    body = re.search(rf"typedef enum {name} {{(.*?)}} {name};", text, re.S)[1]
    comments = {m[1]: " ".join(m[2].split()) for m in re.finditer(r"(WEFT_\w+)[^,/]*,?\s*/\*(.*?)\*/", body, re.S)}
    value, constants = -1, []
    for constant, given in re.findall(r"(WEFT_\w+)(?: = (\d+))?", re.sub(r"/\*.*?\*/", "", body, flags=re.S)):
        value = int(given) if given else value + 1
        constants.append((constant, value, comments.get(constant, "")))
    return constants


def short(header, name, prefix):
    return {value: constant.removeprefix(prefix).lower() for constant, value, _ in enum(header, name)}


# Names that the reference uses for dimensions.
SYMBOLS = {
    "tokens": "T", "streams": "n", "channels": "C", "gates": "N", "rows": "R", "batch": "B", "steps": "S",
    "key_heads": "Hk", "value_heads": "Hv", "heads": "H", "key_dim": "Dk", "value_dim": "Dv", "conv": "C", "width": "W",
    "history": "L", "sequences": "N", "offsets": "N + 1", "cache": "rows", "step_heads": "S Hv", "scales": "S",
}  # fmt: skip
TYPES = {
    "act": "activation", "wide": "activation or f32", "coef": "f32, bf16, f16", "param": "f32, bf16, f16", "full": "f32",
    "index": "i32, i64",
}  # fmt: skip
HEADERS = {"rmsnorm": "norm.h", "gdn": "gdn.h"}
KINDS = {"in": "in", "out": "out", "grad": "gradient"}


def table(head, rows):
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows)]


class Library:
    def __init__(self, path):
        self.lib = ctypes.CDLL(str(path))
        self.lib.weft_op_at.restype = ctypes.POINTER(Op)
        self.lib.weft_mhc_preset_name.restype = ctypes.c_char_p
        self.lib.weft_status_name.restype = ctypes.c_char_p
        self.dims = short("ops.h", "weft_arg_dim", "WEFT_DIM_")
        self.types = short("ops.h", "weft_arg_type", "WEFT_TYPE_")
        self.kinds = short("ops.h", "weft_arg_kind", "WEFT_ARG_")

    def operators(self):
        """{stem: {pass: description}}"""
        found = {}
        for k in range(self.lib.weft_op_count()):
            op = self.lib.weft_op_at(k).contents
            stem, _, direction = op.name.decode().rpartition("_")
            found.setdefault(stem, {})[direction] = op
        return found

    def dimension(self, value):
        return SYMBOLS[self.dims[value]] if value in self.dims else str(value)

    def arguments(self, op):
        rows = []
        for arg in op.args[: op.num_args]:
            notes = ["optional"] if arg.optional else []
            if arg.in_place:
                notes.append(f"in place over `{arg.in_place.decode()}`")
            shape = ", ".join(map(self.dimension, arg.dim[: arg.ndim]))
            role, kind = KINDS[self.kinds[arg.kind]], TYPES[self.types[arg.type]]
            rows.append([f"`{arg.name.decode()}`", role, f"[{shape}]", kind, ", ".join(notes)])
        return table(["tensor", "role", "shape", "dtypes", ""], rows)

    def scalars(self, op):
        names = []
        for scalar in op.scalars if op.scalars else []:
            if not scalar.name:
                break
            names.append(f"`{scalar.name.decode()}`")
        return names

    def operator(self, passes):
        lines = []
        for op in passes.values():
            names = self.scalars(op)
            also = f", with {', '.join(names)}" if names else ""
            function = f"weft_{op.name.decode()}"
            header = HEADERS.get(function.split("_")[1], "mhc.h")
            link = f"[`{function}`](../../include/weft/{header}#{function}_args)"
            lines += ["", f"{link}{also}:", "", *self.arguments(op)]
        return [*lines[1:], ""]

    def presets(self):
        rules = short("mhc.h", "weft_sinkhorn", "WEFT_SINKHORN_")
        rows = []
        for k in range(len(enum("mhc.h", "weft_mhc_preset")) - 1):
            n = Numerics()
            if self.lib.weft_mhc_preset_numerics(k, ctypes.byref(n)):
                sys.exit(f"preset {k}: {self.lib.weft_last_error()}")
            eps = "2^-23" if n.rms_eps == 2.0**-23 else f"{n.rms_eps:g}"
            kind = ["inside", "outside"][n.rms_eps_kind]
            mix = ["no residual mix", "", "", ""]
            name = self.lib.weft_mhc_preset_name(k).decode()
            if name != "hy_v4":
                rule = rules[n.sinkhorn]
                mix = [
                    f"`{rule}`",
                    "none" if rule == "log" else f"{n.sinkhorn_eps:g}",
                    str(n.sinkhorn_iters),
                    f"`{['in_out', 'out_in'][n.apply]}`",
                ]
            rows.append([f"`{name}`", eps, kind, f"{n.pre_eps:g}", f"{n.post_mult:g}", f"{n.post_eps:g}", *mix])
        head = ["preset", "`rms_eps`", "`rms_eps_kind`", "`pre_eps`", "`post_mult`", "`post_eps`", "`sinkhorn`"]
        return table([*head, "`sinkhorn_eps`", "`sinkhorn_iters`", "`apply`"], rows)

    def statuses(self):
        python = {"WEFT_ERR_ARGUMENT": "`ValueError`", "WEFT_ERR_OVERLAP": "`ValueError`"}
        python |= {"WEFT_ERR_UNSUPPORTED": "`NotImplementedError`", "WEFT_OK": ""}
        rows = [
            [
                f"`{name}`",
                self.lib.weft_status_name(value).decode(),
                re.sub(r"(weft_\S+)", r"`\1`", comment),
                python.get(name, "`RuntimeError`"),
            ]
            for name, value, comment in enum("weft.h", "weft_status")
        ]
        return table(["status", "`weft_status_name`", "meaning", "in Python"], rows)


def options_of(program, command):
    """`weft COMMAND --help` as a code block."""
    text = subprocess.run([program, command, "--help"], capture_output=True, text=True, check=True).stdout
    return ["```text", text.rstrip(), "```"]


def contents(library, program):
    """{name of a block: its lines}"""
    found = {f"arguments of {stem}": library.operator(passes) for stem, passes in library.operators().items()}
    found["presets"] = library.presets()
    found["statuses"] = library.statuses()
    for command in ("check", "train", "sample", "report", "bench"):
        found[f"options of {command}"] = options_of(program, command)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("program", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing, fail where a document would change")
    options = parser.parse_args()
    blocks = contents(Library(options.library.resolve()), options.program.resolve())
    used, stale = set(), []

    def filled(match):
        name = match["name"]
        if name not in blocks:
            sys.exit(f"docs/reference: there is nothing for the marker {name!r}")
        used.add(name)
        begin, end = f"<!-- {name}: begin, written by tools/reference.py -->", f"<!-- {name}: end -->"
        return "\n".join([begin, "", *blocks[name], "", end]).replace("\n\n\n", "\n\n")

    for path in sorted(REFERENCE.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        new = BLOCK.sub(filled, text)
        if new != text:
            stale.append(path.relative_to(ROOT))
            if not options.check:
                path.write_text(new, encoding="utf-8")
    missing = sorted(set(blocks) - used)
    for name in missing:
        print(f"docs/reference has no marker for {name!r}")
    if options.check:
        for path in stale:
            print(f"{path} is not what tools/reference.py writes; run tools/reference.py build/libweft.so build/weft")
    return 1 if missing or (options.check and stale) else 0


if __name__ == "__main__":
    sys.exit(main())
