#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a call costs the host, beside the work itself: one direct call of the extension, and one registered operator.

    PYTHONPATH=python bench/host_cost.py [--json] [--device cuda] [--calls 2000]

Tensors are so small that the work hardly counts: two tokens, four streams, 64 channels. On a GPU calls are queued: a
burst begins with some that are outside the clock, and the device is waited for after it, outside the clock as well.
Sinkhorn makes one iteration. Eager mode, no autograd. Every row has a burst of calls in each of several rounds, so
that a machine which others disturb disturbs all rows alike. On a shared machine some cores take twice as long as
others, and not the same ones all the time, so each round begins with a look for a quick one (--any-core: wherever the
system puts it). A time is the median of a row's bursts; beside it stands the least, which is what is left on a
machine that does nothing else. "ext" is _C.run with a prepared call on tensors that exist, each an argument of its
own: to unpack a tuple of them costs as much as three more. "op" is torch.ops.weft.*, which also allocates its
results. For scale, "idle" is an operator of the same schema, registered from Python, that returns tensors which
exist, and "torch" are two of torch's own.

Goals: 5 us for the extension, 20 us for a registered operator."""

import argparse
import json
import os
import statistics
import time

import torch
from weft import _C
from weft.torch import Numerics, ops, ops_fused, register
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
    threads = torch.get_num_threads()
    weft_ops = torch.ops.weft

    site = (x, phi, alpha, beta, None, None, None)
    half = (x.bfloat16(), *site[1:])
    rest = (numerics, False, 1e-6, 0)
    aggregate = register.prepared("mhc_aggregate_fwd", ())
    post = register.prepared("mhc_post_fwd", ops.post_scalars(numerics, 0.0, 0))
    whole = register.prepared("mhc_pre_fwd", ops_fused.pre_scalars(numerics, 1e-6))
    u_out, *coef, h, ms = weft_ops.mhc_pre.default(*site, *rest)
    (pre_o, post_o, res_o), u_o = coef, u_out
    x16, u16 = half[0], u_out.bfloat16()

    def pre_f32():
        return _C.run(
            whole, 0, 0, threads, None, x, phi, None, alpha, beta, None, None, h, ms, pre_o, post_o, res_o, u_o, None
        )

    def pre_bf16():
        return _C.run(
            whole, 0, 0, threads, None, x16, phi, None, alpha, beta, None, None, h, ms, pre_o, post_o, res_o, u16, None
        )

    idle_aggregate = idle(weft_ops.mhc_aggregate.default, u, device)
    idle_pre = idle(weft_ops.mhc_pre.default, (u_out, *coef, h, ms), device)
    return [
        ("ext", "mhc_aggregate_fwd", lambda: _C.run(aggregate, 0, 0, threads, None, x, pre, u)),
        ("ext", "mhc_post_fwd", lambda: _C.run(post, 0, 0, threads, None, x, f, None, pre, res, y)),
        ("ext", "mhc_pre_fwd", pre_f32),
        ("ext", "mhc_pre_fwd, bf16", pre_bf16),
        ("op", "mhc_aggregate", lambda: weft_ops.mhc_aggregate.default(x, pre)),
        ("op", "mhc_aggregate_bwd", lambda: weft_ops.mhc_aggregate_bwd.default(x, pre, f, [True, True])),
        ("op", "mhc_post", lambda: weft_ops.mhc_post.default(x, f, pre, res, None, None, numerics, 0.0, 0)),
        ("op", "mhc_pre", lambda: weft_ops.mhc_pre.default(*site, *rest)),
        ("op", "mhc_pre, bf16", lambda: weft_ops.mhc_pre.default(*half, *rest)),
        ("idle", "mhc_aggregate", lambda: idle_aggregate(x, pre)),
        ("idle", "mhc_pre", lambda: idle_pre(*site, *rest)),
        ("torch", "empty", lambda: torch.empty(TOKENS, CHANNELS, device=device)),
        ("torch", "relu", lambda: torch.relu(x)),
    ]


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


def burst(function, calls: int, device: torch.device) -> float:
    """Microseconds a call."""
    for _ in range(WARM):
        function()
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    micros = (time.perf_counter() - begin) / calls * 1e6
    if device.type == "cuda":
        torch.cuda.synchronize()
    return micros


def measure(functions: list, calls: int, device: torch.device, cores: set[int]) -> list[tuple[float, float]]:
    """Microseconds a call of each: median and least."""
    each = max(1, calls // ROUNDS)
    rounds = []
    for _ in range(ROUNDS):
        if len(cores) > 1:
            move_to_quick_core(cores)
        rounds.append([burst(function, each, device) for function in functions])
    return [(statistics.median(times), min(times)) for times in zip(*rounds, strict=True)]


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
            times = measure([function for _, _, function in rows], args.calls, device, cores)
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
