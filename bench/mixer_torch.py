#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A Gated DeltaNet mixer between its projections, by weft and by flash-linear-attention, whole and in parts.

    bench/mixer_torch.py [--batch 4 --steps 4096] [--sides weft,fla] [--json]

Heads are those of bench/gdn_torch.py: 16 of query and key, 32 of value, 128 wide, four taps; bf16, parameters fp32. front:
convolution, l2 norm, gates. rule: the gated delta rule in chunks. norm: the gated norm. mixer: all of it, by weft in three
calls from one projection row, by fla as its own layer calls it, with norm and gates of the rule "in the kernel". Each side
gets the projection as it likes it: weft one row a token, fla queries, keys and values in one tensor and z, b, a in one each.

On a GPU forward (with what autograd keeps), and forward with backward from random gradients of the results, are captured as
CUDA graphs, so that the host has no part in them; backward is the difference. Times are medians over --repeats in which the
sides take turns. Results and gradients are compared first. What a side refuses is a row with its own words: fla 0.6.0 does
not differentiate the rule on Hopper with Triton from 3.4 up to 3.7.1. fla needs a GPU."""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

try:
    import weft
except ImportError:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
    import weft

import weft.torch as wt
from compare_torch import relative_error, tuple_of
from gdn_torch import DIM, HEADS, KEY_HEADS, L2_EPS, VALUE_HEADS, WIDTH
from site_torch import replayed, timed

NORM_EPS = 1e-6
TOLERANCE = 2e-2  # of bf16: norm of the difference by the norm
SECTIONS = [HEADS.channels, VALUE_HEADS * DIM, VALUE_HEADS, VALUE_HEADS]
PARAMETERS = ("weight", "a_log", "dt_bias", "norm_weight")


class Weft:
    """Its functions take what the dictionary of inputs has under the names of their parameters."""

    def prepare(self, projection):
        return {"proj": projection}

    def front(self, proj, weight, a_log, dt_bias):
        options = wt.GdnOptions(l2_eps=L2_EPS)
        return wt.gdn_pre(proj, weight, a_log, dt_bias, heads=HEADS, options=options, repeat=False, gate="view")

    def rule(self, query, key, value, beta, g):
        return wt.gdn_rule(query, key, value, beta, g)[0]

    def norm(self, o, z, norm_weight):
        return wt.gdn_norm(o, z, norm_weight, NORM_EPS)

    def mixer(self, proj, weight, a_log, dt_bias, norm_weight):
        query, key, value, gate, beta, g, *_ = self.front(proj, weight, a_log, dt_bias)
        return self.norm(self.rule(query, key, value, beta, g), gate, norm_weight)


class Fla:
    def __init__(self):
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
        from fla.modules.norm.l2norm import l2norm
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.gated_delta_rule.gate import fused_gdn_gate

        self.convolution, self.unit, self.decay = causal_conv1d, l2norm, fused_gdn_gate
        self.chunk, self.gated_norm = chunk_gated_delta_rule, rms_norm_gated

    def prepare(self, projection):
        qkv, z, b, a = (part.contiguous() for part in projection.split(SECTIONS, -1))
        return {"qkv": qkv, "gate": z.unflatten(-1, (VALUE_HEADS, DIM)), "b": b, "a": a}

    def heads(self, qkv, weight):
        y, _ = self.convolution(qkv, weight, activation="silu")
        keys = KEY_HEADS * DIM
        parts = y.split([keys, keys, VALUE_HEADS * DIM], -1)
        return [part.unflatten(-1, (-1, DIM)) for part in parts]

    def front(self, qkv, b, a, weight, a_log, dt_bias):
        query, key, value = self.heads(qkv, weight)
        g = self.decay(a, a_log, dt_bias)
        return self.unit(query, L2_EPS), self.unit(key, L2_EPS), value, torch.sigmoid(b), g

    def rule(self, query, key, value, beta, g):
        return self.chunk(query, key, value, g, beta)[0]

    def norm(self, o, z, norm_weight):
        return self.gated_norm(o, z, norm_weight, None, "swish", eps=NORM_EPS)

    def mixer(self, qkv, gate, b, a, weight, a_log, dt_bias, norm_weight):
        query, key, value = self.heads(qkv, weight)
        inside = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_gate_in_kernel": True}
        o, _ = self.chunk(query, key, value, a, b, A_log=a_log, dt_bias=dt_bias, **inside)
        return self.norm(o, gate, norm_weight)


SIDES = {"weft": Weft, "fla": Fla}
# What a part is given; the projection is added as the side likes it, without what it has no use for.
PARTS = {
    "front": PARAMETERS[:3],
    "rule": ("query", "key", "value", "beta", "g"),
    "norm": ("o", "z", "norm_weight"),
    "mixer": PARAMETERS,
}


def data(batch, steps, device):
    torch.manual_seed(4)
    projection = torch.randn(batch, steps, HEADS.columns, device=device).bfloat16()
    inputs = {
        "weight": torch.randn(HEADS.channels, WIDTH, device=device) / 2,
        "a_log": torch.rand(VALUE_HEADS, device=device) * 2.77,
        "dt_bias": torch.randn(VALUE_HEADS, device=device),
        "norm_weight": torch.rand(DIM, device=device) + 0.5,
    }
    with torch.no_grad():
        front = Weft().front(projection, *(inputs[name] for name in PARAMETERS[:3]))
    inputs |= dict(zip(("query", "key", "value"), front[:3], strict=True)) | {"beta": front.beta, "g": front.g}
    inputs["z"] = front.gate.contiguous()
    inputs["o"] = torch.randn(front.value.shape, device=device).bfloat16()
    return projection, inputs


def both_have(out):
    """Of weft's front what fla's has, too: query, key, value, beta, g."""
    return (*out[:3], *out[4:6]) if isinstance(out, wt.GdnPre) else tuple_of(out)


class Side:
    def __init__(self, kind, part, projection, inputs):
        side, self.part = SIDES[kind](), part
        own = side.prepare(projection) if part in ("front", "mixer") else {}
        if part == "front":
            own.pop("gate", None)
        self.own = list(own)
        self.function = getattr(side, part)
        inputs = own | {name: inputs[name] for name in PARTS[part]}
        self.leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
        self.upstream = None

    def forward(self):
        return both_have(self.function(**self.leaves))

    def both(self):
        """Gradients of the inputs, in their order."""
        out = self.forward()
        if self.upstream is None:
            torch.manual_seed(5)
            self.upstream = [torch.randn(t.shape, dtype=t.dtype, device=t.device) for t in out]
        return torch.autograd.grad(out, list(self.leaves.values()), self.upstream)

    def named(self, gradients):
        """Gradients to compare: of the projection as one tensor, of everything else by name."""
        found = dict(zip(self.leaves, gradients, strict=True))
        own = [found.pop(name) for name in self.own]
        if self.part == "front" and len(own) == 1:  # one row has z in it, which goes past the front
            qkv, _, b, a = own[0].split(SECTIONS, -1)
            own = [qkv, b, a]
        return ({"proj": torch.cat([t.flatten(2) for t in own], -1)} if own else {}) | found


def compared(part, sides):
    """The largest difference between sides that can do a pass, and why others cannot; a wrong result ends the program."""
    refused, first, largest = {}, {}, 0.0
    for kind, side in sides.items():
        for way in ("forward", "both"):
            try:
                got = dict(enumerate(side.forward())) if way == "forward" else side.named(side.both())
            except RuntimeError as error:
                refused[kind, way] = str(error).splitlines()[0]
                continue
            for name, want in first.setdefault(way, got).items():
                error = relative_error(got[name].detach(), want.detach())
                largest = max(largest, error)
                if not error <= TOLERANCE:
                    sys.exit(
                        f"{part} {way}, {name}: expected {kind} within {TOLERANCE} of the first side, got {error:.1e}"
                    )
    return largest, refused


def measured(sides, refused, device, repeats):
    """Microseconds by side and pass."""
    calls = {}
    for kind, side in sides.items():
        for way in ("forward", "both"):
            if (kind, way) not in refused:
                calls[kind, way] = replayed(getattr(side, way), device)
    times = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            times[key].append(timed(call, device, 1))
    return {key: statistics.median(column) for key, column in times.items()}


def rows_of(part, kinds, projection, inputs, repeats):
    sides = {kind: Side(kind, part, projection, inputs) for kind in kinds}
    largest, refused = compared(part, sides)
    times = measured(sides, refused, projection.device, repeats)
    for kind in kinds:
        row = {"part": part, "side": kind}
        if (kind, "forward") in times:
            row["forward_us"] = round(times[kind, "forward"], 1)
        if (kind, "both") in times:
            row["backward_us"] = round(times[kind, "both"] - times[kind, "forward"], 1)
        reasons = {way: refused[kind, way] for way in ("forward", "both") if (kind, way) in refused}
        yield row | ({"refused": next(iter(reasons.values()))} if reasons else {}) | {"difference": round(largest, 5)}


def main():
    gpu = torch.cuda.is_available() and weft.info()["cuda"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--batch", type=int, default=4 if gpu else 1)
    parser.add_argument("--steps", type=int, default=4096 if gpu else 256)
    parser.add_argument("--repeats", type=int, default=20 if gpu else 5)
    parser.add_argument("--sides", default="weft,fla" if gpu else "weft")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    kinds, parts = options.sides.split(","), options.parts.split(",")
    for given, known, name in ((kinds, SIDES, "--sides"), (parts, PARTS, "--parts")):
        for one in given:
            if one not in known:
                parser.error(f"{name}: expected some of {', '.join(known)}, got {one}")
    device = torch.device(options.device)
    projection, inputs = data(options.batch, options.steps, device)
    for part in parts:
        for row in rows_of(part, kinds, projection, inputs, options.repeats):
            if options.json:
                name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
                where = {"batch": options.batch, "steps": options.steps, "device": name, "torch": torch.__version__}
                print(json.dumps(row | where), flush=True)
            else:
                times = "   ".join(
                    f"{way} {row[way + '_us']:8.1f} us" for way in ("forward", "backward") if way + "_us" in row
                )
                print(f"{part:6} {row['side']:5} {times}   {row.get('refused', '')}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
