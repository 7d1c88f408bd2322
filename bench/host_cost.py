#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a call costs the host, beside the work itself: one direct call of the extension, one registered operator, and
one with its backward pass.

    PYTHONPATH=python bench/host_cost.py [--json] [--device cuda] [--calls 2000]

Tensors are so small that the work hardly counts: two tokens, four streams, 64 channels; for Gated DeltaNet two value
heads of 8. On a GPU calls are queued: a burst begins with some that are outside the clock, and the device is waited for
after it, outside the clock as well. Sinkhorn makes one iteration. Eager mode. Every row has a burst of calls in each of
several rounds, so that a machine which others disturb disturbs all rows alike. On a shared machine some cores take
twice as long as others, and not the same ones all the time, so each round begins with a look for a quick one
(--any-core: wherever the system puts it). A time is the median of a row's bursts; beside it stands the least, which is
what is left on a machine that does nothing else. "ext" is a kernel's `fill` on tensors that exist, each an argument of
its own: to unpack a tuple of them costs as much as three more. "op" is torch.ops.weft.* without autograd, which also
allocates its results. "grad" is the same recorded by autograd, with torch.autograd.grad of its results for all its
tensors; much of it is torch's own, and its bursts have a tenth of the calls, or others would take the core in the
middle of each. For scale, "idle" is an operator of the same schema, registered from Python, that returns tensors which
exist, and "torch" are two of torch's own.

Goals: 5 us for the extension, 20 us for a registered operator."""

import argparse
import json
import os
import statistics
import time

import torch
from weft.torch import GdnHeads, GdnOptions, Numerics, register
from weft.torch.numerics import pack

TOKENS, STREAMS, CHANNELS = 2, 4, 64
GOAL = {"ext": 5.0, "op": 20.0}
ROUNDS = 21
WARM = 8  # calls in front of a burst, outside the clock: the rows before it have left other things in the caches
STAY = 1.15  # times as long as on the quickest core is no reason to move


LIB = torch.library.Library("weft_idle", "DEF")


def idle(op: torch._ops.OpOverload, results, device: torch.device) -> torch._ops.OpOverload:
    """An operator with the schema of `op` that does nothing."""
    schema = f"{device.type}_{str(op._schema).removeprefix('weft::')}"
    name = schema.partition("(")[0]
    LIB.define(schema)
    LIB.impl(name, lambda *args: results, "Autograd")
    return getattr(torch.ops.weft_idle, name).default


def with_backward(op: torch._ops.OpOverload, *args):
    """A call of `op` in which every tensor needs a gradient, and the backward pass of its results."""
    args = tuple(a.detach().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args)
    leaves = [a for a in args if isinstance(a, torch.Tensor)]

    def results() -> list[torch.Tensor]:
        made = op(*args)
        return [t for t in ((made,) if isinstance(made, torch.Tensor) else made) if t.requires_grad]

    with torch.enable_grad():
        upstream = [torch.randn_like(t) for t in results()]
    return lambda: torch.autograd.grad(results(), leaves, upstream, allow_unused=True)


def sides(device: torch.device) -> list[tuple[str, str, object]]:
    """Rows of (kind, name, function without arguments)."""
    gates = STREAMS * (STREAMS + 2)
    x = torch.randn(TOKENS, STREAMS, CHANNELS, device=device)
    f = torch.randn(TOKENS, CHANNELS, device=device)
    pre = torch.rand(TOKENS, STREAMS, device=device)
    res = torch.rand(TOKENS, STREAMS, STREAMS, device=device)
    phi = torch.randn(gates, STREAMS * CHANNELS, device=device)
    alpha, beta = torch.rand(3, device=device), torch.randn(gates, device=device)
    numerics = pack(Numerics.preset("deepseek_v4")._replace(sinkhorn_iters=1))
    u, y = torch.empty_like(f), torch.empty_like(x)
    weft_ops, kernel = torch.ops.weft, {name: operator.kernel for name, operator in register.OPERATORS.items()}

    site = (x, phi, alpha, beta, None, None, None)
    half = (x.bfloat16(), *site[1:])
    rest = (numerics, False, 1e-6, 0)
    boundary = (x, f, pre, res, None, *site[1:], None, numerics, False, 1e-6, 0.0, 0, 0)
    u_o, pre_o, post_o, res_o, h, ms = weft_ops.mhc_pre.default(*site, *rest)
    x16, u16 = half[0], u_o.bfloat16()
    fill, no = kernel["mhc_pre"].fill, None

    def pre_f32():
        return fill(0, u_o, pre_o, post_o, res_o, h, ms, x, phi, alpha, beta, no, no, no, numerics, False, 1e-6, 0)

    def pre_bf16():
        return fill(0, u16, pre_o, post_o, res_o, h, ms, x16, phi, alpha, beta, no, no, no, numerics, False, 1e-6, 0)

    fill_aggregate, fill_post = kernel["mhc_aggregate"].fill, kernel["mhc_post"].fill
    idle_aggregate = idle(weft_ops.mhc_aggregate.default, u, device)
    idle_pre = idle(weft_ops.mhc_pre.default, (u_o, pre_o, post_o, res_o, h, ms), device)

    heads = GdnHeads(1, 2, 8, 8)
    proj = torch.randn(1, TOKENS, heads.columns, device=device)
    weight, a_log, dt_bias = (torch.rand(n, device=device) for n in (heads.channels * 4, 2, 2))
    projection = (proj, *(None,) * 5, weight.view(-1, 4), None, a_log, dt_bias, None, None)
    front = (*projection, list(heads), GdnOptions().packed(), True, True, False, 0)
    query, key, value = (torch.randn(1, TOKENS, 2, 8, device=device) for _ in range(3))
    b, g = torch.rand(1, TOKENS, 2, device=device), -torch.rand(1, TOKENS, 2, device=device)
    rule = (query, key, value, b, g, None, None, 8**-0.5, 0, 0, False)
    rows = [
        ("ext", "mhc_aggregate_fwd", lambda: fill_aggregate(0, u, x, pre)),
        ("ext", "mhc_post_fwd", lambda: fill_post(0, y, x, f, pre, res, None, None, numerics, 0.0, 0)),
        ("ext", "mhc_pre_fwd", pre_f32),
        ("ext", "mhc_pre_fwd, bf16", pre_bf16),
        ("op", "mhc_aggregate", lambda: weft_ops.mhc_aggregate.default(x, pre)),
        ("op", "mhc_aggregate_bwd", lambda: weft_ops.mhc_aggregate_bwd.default(x, pre, f, [True, True])),
        ("op", "mhc_post", lambda: weft_ops.mhc_post.default(x, f, pre, res, None, None, numerics, 0.0, 0)),
        ("op", "mhc_pre", lambda: weft_ops.mhc_pre.default(*site, *rest)),
        ("op", "mhc_pre, bf16", lambda: weft_ops.mhc_pre.default(*half, *rest)),
        ("op", "mhc_boundary", lambda: weft_ops.mhc_boundary.default(*boundary)),
        ("op", "gdn_pre", lambda: weft_ops.gdn_pre.default(*front)),
        ("grad", "mhc_pre", with_backward(weft_ops.mhc_pre.default, *site, *rest)),
        ("grad", "mhc_boundary", with_backward(weft_ops.mhc_boundary.default, *boundary)),
        ("grad", "gdn_pre", with_backward(weft_ops.gdn_pre.default, *front)),
        ("idle", "mhc_aggregate", lambda: idle_aggregate(x, pre)),
        ("idle", "mhc_pre", lambda: idle_pre(*site, *rest)),
        ("torch", "empty", lambda: torch.empty(TOKENS, CHANNELS, device=device)),
        ("torch", "relu", lambda: torch.relu(x)),
    ]
    if device.type == "cpu":  # timed on the CPU only
        rows.append(("op", "gdn_rule", lambda: weft_ops.gdn_rule.default(*rule)))
        rows.append(("grad", "gdn_rule", with_backward(weft_ops.gdn_rule.default, *rule)))
    return rows


def seconds(spins: int = 2000) -> float:
    """What the core at hand needs for some arithmetic that touches no memory to speak of."""
    begin = time.perf_counter()
    for _ in range(spins):
        pass
    return time.perf_counter() - begin


def move_to_quick_core(cores: set[int]) -> None:
    """To the core that is the quickest now, unless the one at hand is hardly slower: its caches know the code. Of three
    times the least counts, as who comes to a core is slow at first."""

    def of(core: int) -> float:
        os.sched_setaffinity(0, {core})
        return min(seconds() for _ in range(3))

    here = os.sched_getaffinity(0)
    times = {core: of(core) for core in sorted(cores)}
    best = min(times, key=times.get)
    slow = len(here) > 1 or times[min(here)] > STAY * times[best]
    os.sched_setaffinity(0, {best} if slow else here)


def burst(kind: str, function, calls: int, device: torch.device) -> float:
    """Microseconds a call."""
    with torch.set_grad_enabled(kind == "grad"):
        for _ in range(WARM):
            function()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        micros = (time.perf_counter() - begin) / calls * 1e6
    if device.type == "cuda":
        torch.cuda.synchronize()
    return micros


def measure(rows: list, calls: int, device: torch.device, cores: set[int]) -> list[tuple[float, float]]:
    """Microseconds a call of each: median and least."""
    each = max(1, calls // ROUNDS)
    times: list[list[float]] = [[] for _ in rows]
    for start in range(ROUNDS):
        if len(cores) > 1:
            move_to_quick_core(cores)
        for k in range(len(rows)):  # each round begins with another row: who takes the core takes it from all alike
            k = (start + k) % len(rows)
            kind, _, function = rows[k]
            times[k].append(burst(kind, function, max(1, each // 10) if kind == "grad" else each, device))
    return [(statistics.median(row), min(row)) for row in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU backend; more than one have to be woken")
    parser.add_argument("--any-core", action="store_true", help="do not look for a quick core")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="both where there is a GPU, unless told")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    stay = args.any_core or args.threads > 1 or not hasattr(os, "sched_setaffinity")
    cores = set() if stay else os.sched_getaffinity(0)
    devices = [args.device] if args.device else ["cpu"] + ["cuda"] * torch.cuda.is_available()
    if not args.json:
        print(f"{'device':6}  {'kind':5}  {'call':18}  {'us':>7}  {'least':>7}  {'goal':>5}")
    with torch.no_grad():
        for name in devices:
            device = torch.device(name)
            rows = sides(device)
            times = measure(rows, args.calls, device, cores)
            for (kind, what, _), (micros, least) in zip(rows, times, strict=True):
                goal = GOAL.get(kind)
                if args.json:
                    row = {
                        "device": name,
                        "kind": kind,
                        "call": what,
                        "us": round(micros, 3),
                        "us_min": round(least, 3),
                    }
                    print(json.dumps(row | {"goal_us": goal, "threads": args.threads, "torch": torch.__version__}))
                    continue
                verdict = "" if goal is None else f"{goal:5.0f}  {'met' if micros <= goal else 'missed'}"
                print(f"{name:6}  {kind:5}  {what:18}  {micros:7.2f}  {least:7.2f}  {verdict}")


if __name__ == "__main__":
    main()
