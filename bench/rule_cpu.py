#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule on the CPU beside the plain PyTorch that Hugging Face's layers fall back to.

    PYTHONPATH=python bench/rule_cpu.py [--threads 2] [--tokens 2048] [--heads 32] [--dim 128] [--dtype f32] [--json]

The other side is `torch_chunk_gated_delta_rule` of the installed transformers, the function itself, as a Qwen3-Next layer calls it:
query and key already repeated to the value heads, chunks of 64 tokens, autograd through it. weft gets the same tensors, and
once more query and key with half the heads, which it repeats by itself. Both sides take turns, so a machine that others
disturb disturbs both; a time is the median of --rounds turns, the least beside it. Results and gradients are compared
first: what is more than the given part of the largest apart is an error. Exit status 1: that, or a ratio below --least."""

import argparse
import inspect
import json
import statistics
import sys
import time

import torch
import transformers
import weft.torch as wt
from transformers.models.qwen3_next import modeling_qwen3_next

DTYPES = {"f32": (torch.float32, 1e-4), "bf16": (torch.bfloat16, 3e-2)}


def make(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(3)
    shape = (1, tokens, heads)
    query, key, value = torch.randn(3, *shape, dim)
    query, key = (torch.nn.functional.normalize(t, dim=-1) for t in (query, key))
    beta, g = torch.sigmoid(torch.randn(shape)), -torch.rand(shape)
    return [t.to(dtype) for t in (query, key, value, beta)] + [g]


def weft_rule(query, key, value, beta, g):
    return wt.gdn_rule(query, key, value, beta, g)[0]


def plain_rule(query, key, value, beta, g):
    rule = inspect.unwrap(
        modeling_qwen3_next.torch_chunk_gated_delta_rule
    )  # not what a hub of kernels may put in its place
    return rule(query, key, value, g=g, beta=beta)[0]


class Side:
    def __init__(self, rule, inputs: list[torch.Tensor], d_o: torch.Tensor):
        self.rule, self.d_o = rule, d_o
        self.leaves = [t.detach().requires_grad_() for t in inputs]
        self.forward, self.backward = [], []

    def turn(self) -> list[torch.Tensor]:
        begin = time.perf_counter()
        o = self.rule(*self.leaves)
        between = time.perf_counter()
        gradients = torch.autograd.grad(o, self.leaves, self.d_o)
        self.forward.append(between - begin)
        self.backward.append(time.perf_counter() - between)
        return [o.detach(), *gradients]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--least", type=float, default=0, help="the ratio that forward and backward must reach")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype, part = DTYPES[args.dtype]
    inputs = make(args.tokens, args.heads, args.dim, dtype)
    d_o = torch.randn(inputs[2].shape).to(dtype)
    few = [t[:, :, ::2] for t in inputs[:2]] + inputs[2:]
    sides = {
        "plain": Side(plain_rule, inputs, d_o),
        "weft": Side(weft_rule, inputs, d_o),
        "weft, half the key heads": Side(weft_rule, few, d_o),
    }
    want, got = sides["plain"].turn(), sides["weft"].turn()
    for name, w, x in zip(("o", "d_query", "d_key", "d_value", "d_beta", "d_g"), want, got, strict=True):
        apart = float((w.double() - x.double()).abs().max() / w.double().abs().max())
        if not apart <= part:
            print(f"{name}: {apart:.1e} of the largest apart", file=sys.stderr)
            return 1
    for side in sides.values():
        side.turn()
        side.forward.clear(), side.backward.clear()
    for _ in range(args.rounds):
        for side in sides.values():
            side.turn()
    rows = {}
    for name, side in sides.items():
        both = [f + b for f, b in zip(side.forward, side.backward, strict=True)]
        rows[name] = {
            what: (1e3 * statistics.median(t), 1e3 * min(t))
            for what, t in (("forward", side.forward), ("backward", side.backward), ("together", both))
        }
    if not args.json:
        print(
            f"{args.tokens} tokens, {args.heads} heads of {args.dim}, {args.dtype}, {args.threads} threads; "
            f"torch {torch.__version__}, transformers {transformers.__version__}; ms (least)"
        )
    for name, row in rows.items():
        ratio = {what: rows["plain"][what][0] / row[what][0] for what in row}
        if args.json:
            print(json.dumps({"side": name, **row, "ratio": ratio}))
            continue
        times = "  ".join(f"{what} {t:8.1f} ({least:.1f}) {ratio[what]:5.2f} x" for what, (t, least) in row.items())
        print(f"{name:<25} {times}")
    reached = rows["plain"]["together"][0] / rows["weft"]["together"][0]
    return 0 if reached >= args.least else 1


if __name__ == "__main__":
    sys.exit(main())
