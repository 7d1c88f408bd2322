#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How far the gated delta rule is from float64, on random data and on data that is made to hurt.

    PYTHONPATH=python bench/rule_accuracy.py [--device cuda] [--dtype bf16] [--case NAME] [--no-fla] [--json]

The exact results come from the reference backend, token by token in float64, of the very numbers that the call gets. Beside each
error stand its bound (docs/reference/math.md, "Error bounds": token after token in fp32, or in chunks on tensor cores, as the
call is computed) and, where it can be imported and runs, the error of fla's forward on the same inputs. Errors are those
of the worst element, in parts of the largest exact one, and the root of the mean square in parts of that of the exact
results. Exit status 1: something is beyond its bound, which a NaN is too.

Cases: `random`, gates as a trained layer has them; `held`, beta from 1 - 2^-8 to 1 and g from -1e-5 to 0 over 32768 tokens, so
that nothing is forgotten but what is overwritten; `repeated`, the same eight keys again and again, where the system that
a chunk solves is as far from the identity as it gets; `one`, a single key throughout; `fast`, gates that forget within a
few tokens."""

import argparse
import json
import math
import sys

import torch
import weft.torch as wt

UNIT, HALF, SPLIT = 2.0**-24, 2.0**-8, 2.0**-17
CHUNK = 64
TERM = 17 * 2 * 3 / 16  # units of a term of a sum on tensor cores
ROUNDS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
HEADS = 2


def unit_keys(*shape: int) -> torch.Tensor:
    keys = torch.randn(shape)
    return keys / keys.norm(dim=-1, keepdim=True)


def make(case: str, dim: int, tokens: int) -> list[torch.Tensor]:
    """query, key, value, beta, g of one sequence, in fp32."""
    torch.manual_seed(5)
    shape = (1, tokens, HEADS)
    query, key, value = unit_keys(*shape, dim), unit_keys(*shape, dim), torch.randn(*shape, dim)
    beta, g = torch.sigmoid(torch.randn(shape)), -torch.rand(shape) * torch.nn.functional.softplus(torch.randn(shape))
    if case == "held":
        beta, g = 1 - torch.randint(0, 2, shape) * 2.0**-8, -1e-5 * torch.rand(shape)
    elif case in ("repeated", "one"):
        few = unit_keys(8 if case == "repeated" else 1, HEADS, dim)
        key = few[torch.randint(0, few.shape[0], (1, tokens))]
        beta, g = 1 - torch.rand(shape) * 2.0**-6, -1e-3 * torch.rand(shape)
    elif case == "fast":
        g = -8 * torch.rand(shape)
    return [query, key, value, beta, g]


CASES = {"random": 4096, "held": 32768, "repeated": 4096, "one": 4096, "fast": 4096}


# ---- bounds: check/expect_rule.c and check/expect_rule_chunk.c, a chunk at a time ------------------------------------------


class Chunk:
    """The quantities of a chunk in float64, [heads, ...]: `before` is the state in front of it."""

    def __init__(self, before, query, key, value, beta, g):
        self.before, self.value, self.beta, self.g = before, value, beta[..., None], g
        self.sum = g.cumsum(-1)
        apart = (self.sum[..., :, None] - self.sum[..., None, :]).tril()
        self.x, self.units = apart.exp().tril(), apart.abs() + 8  # decays, and units of their errors
        self.gam, self.gam_units = self.sum.exp()[..., None], self.sum.abs()[..., None] + 8
        self.kk, self.qk = key @ key.mT, query @ key.mT
        self.kn, self.qn = key.norm(dim=-1, keepdim=True), query.norm(dim=-1, keepdim=True)
        self.system = (self.beta * self.kk * self.x).tril(-1)
        self.seen = key @ before
        self.right = self.beta * (value - self.gam * self.seen)
        self.delta = torch.linalg.solve_triangular(self.system, self.right, upper=False, unitriangular=True)
        self.key = key

    def states(self) -> torch.Tensor:
        """Behind every token: [heads, tokens, Dk, Dv]."""
        parts = self.x[..., None, :] * self.key.mT[:, None]  # [heads, token, Dk, of which token]
        return self.gam[..., None] * self.before[:, None] + parts @ self.delta[:, None]

    def last(self) -> torch.Tensor:
        return self.gam[:, -1:] * self.before + (self.x[:, -1:] * self.key.mT) @ self.delta


def of_chunk(c: Chunk, dim: int):
    """What a token adds to delta, what the state lacks behind the chunk, errors of outputs without scale."""

    def units(count):
        return TERM * (count + 16)

    eye = torch.eye(c.system.shape[-1], dtype=torch.float64).expand_as(c.system)
    inverse = torch.linalg.solve_triangular(c.system, eye, upper=False, unitriangular=True)
    column, delta, kns = c.before.norm(dim=-2, keepdim=True), c.delta.abs(), c.kn.mT
    product = SPLIT + 2 * SPLIT + UNIT * units(CHUNK)
    error = product * (inverse.abs() @ c.right.abs())
    own = c.gam * c.kn * column * (SPLIT + UNIT * units(dim))
    own = own + UNIT * (c.gam_units * c.gam * c.seen.abs() + 2 * c.value.abs())
    own = c.beta.abs() * own + (SPLIT + UNIT) * c.right.abs() + error
    of_system = UNIT * (units(dim) + c.units + 24) * c.beta.abs() * c.kn * kns * c.x
    own = own + c.system.abs() @ error + of_system.tril(-1) @ delta
    o = c.gam * c.qn * column * (HALF + UNIT * (units(dim) + c.gam_units))
    o = o + (c.qk.abs() * c.x * (2 * HALF + UNIT * (units(CHUNK) + c.units))).tril() @ delta
    o = o + (c.qn * kns * c.x * UNIT * units(dim)).tril() @ delta
    last = c.x[:, -1:] * kns * (SPLIT + UNIT * (units(CHUNK) + c.units[:, -1:]))
    end = last @ delta + UNIT * c.gam[:, -1:] * column * (units(CHUNK) + c.gam_units[:, -1:])
    return own, end[:, 0], o


def bounds(inputs: list[torch.Tensor], scale: float, chunked: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of o [1, tokens, heads, Dv] and of the columns of the last state [1, heads, 1, Dv]."""
    query, key, value, beta, g = (t[0].double().cpu().transpose(0, 1) for t in inputs)  # [heads, tokens, ...]
    dim, chain = key.shape[-1], math.ceil(key.shape[-1] / 4) + 8
    state, out = value.new_zeros(HEADS, dim, value.shape[-1]), torch.empty_like(value)
    e = value.new_zeros(HEADS, value.shape[-1])  # of a state's columns, as norms
    for t0 in range(0, value.shape[1], CHUNK):
        piece = slice(t0, t0 + CHUNK)
        c = Chunk(state, *(t[:, piece] for t in (query, key, value, beta, g)))
        decay, kn, qn = c.g.exp()[..., None], c.kn, c.qn
        stretch = (1 - c.beta * kn * kn).abs().clamp(min=1)
        if chunked:
            own, end, of_o = of_chunk(c, dim)
        else:
            norms = c.states().norm(dim=-2)
            decayed = decay * torch.cat([state.norm(dim=-2)[:, None], norms[:, :-1]], 1)
            seen = c.gam * c.seen + (c.kk * c.x).tril(-1) @ c.delta
            own = c.beta.abs() * UNIT * ((chain + 2) * decayed * kn + 2 * (c.value.abs() + seen.abs()))
            own_state = kn * own + 3 * UNIT * (decayed + kn * c.delta.abs())
        for i in range(c.key.shape[1]):
            if chunked:
                e = stretch[:, i] * decay[:, i] * e + kn[:, i] * own[:, i]
                out[:, t0 + i] = abs(scale) * (qn[:, i] * e + of_o[:, i])
            else:
                e = stretch[:, i] * (decay[:, i] * e * (1 + 8 * UNIT) + 5 * UNIT * decayed[:, i]) + own_state[:, i]
                out[:, t0 + i] = abs(scale) * qn[:, i] * (e + UNIT * (chain + 3) * (norms[:, i] + e))
        if chunked:
            e = e + end
        state = c.last()
    return out.transpose(0, 1)[None], e[None, :, None]


# ---- who is compared ------------------------------------------------------------------------------------------------------


def weft_rule(query, key, value, beta, g, scale):
    return wt.gdn_rule(query, key, value, beta, g, scale=scale, final_state=True)


def fla_rule():
    """fla's forward, or why there is none."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"

    def run(query, key, value, beta, g, scale):
        with torch.no_grad():
            return chunk_gated_delta_rule(query, key, value, g=g, beta=beta, scale=scale, output_final_state=True)

    return run, ""


def errors(got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor | None) -> dict[str, float]:
    got, exact = got.double().cpu().reshape(exact.shape), exact.cpu()
    off = (got - exact).abs()
    row = {
        "worst": float(off.max() / exact.abs().max()),
        "rms": float((off.square().mean() / exact.square().mean()).sqrt()),
    }
    if bound is not None:
        row["of_bound"] = float((off / bound).max()) if not off.isnan().any() else math.inf
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=0, help="instead of a case's own number")
    parser.add_argument("--no-fla", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the bounds are thousands of small steps
    dtype, device = DTYPES[args.dtype], torch.device(args.device)
    chunked = device.type == "cuda" and dtype == torch.bfloat16 and args.dim in (64, 128)
    peer, why = None, "not asked for" if args.no_fla else "it needs a GPU"
    if device.type == "cuda" and not args.no_fla:
        peer, why = fla_rule()
    if not args.json:
        print(f"{device.type} {args.dtype} heads of {args.dim}, {'in chunks' if chunked else 'token by token'}; weft")
        print("case       tokens  result   worst      rms        of bound   fla: worst  rms")
    beyond = False
    for case in args.case or CASES:
        tokens = args.tokens or CASES[case]
        scale = args.dim**-0.5
        inputs = [t if k == 4 else t.to(dtype) for k, t in enumerate(make(case, args.dim, tokens))]
        exact = weft_rule(*(t.double() for t in inputs), scale)
        there = [t.to(device) for t in inputs]
        with torch.no_grad():
            got = weft_rule(*there, scale)
        e_o, e_state = bounds(inputs, scale, chunked)
        of_peer = (None, None)
        if peer:
            try:
                of_peer = peer(*there, scale)
            except Exception as error:
                peer, why = None, f"{type(error).__name__}: {error}"
        for k, (what, e) in enumerate((("o", e_o), ("state", e_state))):
            rounds = ROUNDS[dtype] if what == "o" else UNIT
            bound = e + rounds * (exact[k].abs() + e) + 2.0**-140
            row = errors(got[k], exact[k], bound)
            beyond |= not row["of_bound"] <= 1
            other = errors(of_peer[k], exact[k], None) if of_peer[k] is not None else {}
            if args.json:
                print(json.dumps({"case": case, "tokens": tokens, "result": what, **row, "fla": other}), flush=True)
                continue
            beside = f"{other['worst']:<11.2e} {other['rms']:.2e}" if other else "-"
            numbers = f"{row['worst']:<10.2e} {row['rms']:<10.2e} {row['of_bound']:<10.3f}"
            print(f"{case:<10} {tokens:<7} {what:<8} {numbers} {beside}", flush=True)
    if not peer and not args.json:
        print(f"fla: {why}")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
