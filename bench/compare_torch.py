#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every operator of weft.torch beside the same expression in PyTorch, eager and torch.compile.

    bench/compare_torch.py [--quick] [--op mhc_post] [--device cuda] [--json] ...      (build weft first: make python)

One row is one operator and pass. All sides get the same inputs and the same number of threads, and allocate their
results anew in every call. A time is the median over repeats in which the sides take turns. Forward runs without
autograd. Backward is torch.autograd.grad alone, from random upstream gradients, through a graph that is built once and
retained.

The expressions are in bench/mhc_torch.py and bench/gdn_torch.py. Eager mixes streams with batched matrix products, its
fastest spelling; torch.compile gets products and sums, which it fuses. --eager sums gives eager that spelling too.

Before a row is timed, weft's results are compared with eager's on the same buffers: norm of the difference
over the norm. Goals: 3 times as fast as eager (a pass that only copies or broadcasts, which is expand forward
and contract backward: not slower), and not slower than torch.compile; ratios are rounded to two decimals.
Exit status: 1 where a result of weft is wrong, else 0, whatever the times are. The default size takes about
7 GB of memory and four minutes on two cores, of which torch.compile's compiler has a good part."""

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch
import torch._dynamo
import torch._functorch.config

try:
    import weft
except ImportError:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
    import weft

import weft.torch as wt
from gdn_torch import make_gdn_cases
from mhc_torch import ACTIVATIONS, Expressions, make_cases

TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-4}
EAGER_GOAL, COPY_GOAL, COMPILE_GOAL = 3.0, 1.0, 1.0
SHORT = 0.01  # seconds: shorter calls are timed in bursts of about this length


# ---- the sides of a row ------------------------------------------------------------------------------------
# A side is a function of the case's inputs. Both of these return what is timed: it takes nothing, and returns a tuple.


def tuple_of(value):
    return value if isinstance(value, tuple) else (value,)


def forward_of(case, function):
    inputs = tuple(case.inputs.values())
    return lambda: tuple_of(function(*inputs))


def backward_of(case, function):
    leaves = [t.detach().requires_grad_() for t in case.inputs.values()]
    results = tuple_of(function(*leaves))
    torch.manual_seed(3)
    upstream = [torch.randn(t.shape, dtype=t.dtype, device=t.device) for t in results]
    return lambda: torch.autograd.grad(results, leaves, upstream, retain_graph=True)


# ---- checking and timing -----------------------------------------------------------------------------------


def relative_error(got, want):
    want = want.float()
    return float(torch.linalg.vector_norm(got.float() - want) / torch.linalg.vector_norm(want).clamp(min=1e-30))


def compare(names, got, want, narrow):
    """The largest relative error, and in words the results that are further off than they may be, or NaN."""
    largest, off = 0.0, []
    for name, g, w in zip(names, got, want, strict=True):
        error = relative_error(g, w)
        largest = max(largest, error)
        if not error <= TOLERANCE[narrow or w.dtype]:
            off.append(f"{name} {error:.1e}")
    return largest, ", ".join(off)


def wait():
    """Until the GPU has done what it was given."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def sample(function, calls):
    """Seconds for one call. The pause lets threads of the previous side that still spin go to sleep."""
    time.sleep(0.01)
    if calls > 1:
        function()
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        results = function()
    wait()
    seconds = (time.perf_counter() - start) / calls
    del results
    return seconds


def measure(sides, repeats, long):
    """Median seconds of a call for each side. Those in `long` need no trial to find the length of a burst."""
    calls = {}
    for side, function in sides.items():
        calls[side] = 1 if side in long else min(1000, math.ceil(SHORT / sample(function, 1)))
    times = {side: [] for side in sides}
    for _ in range(repeats):
        for side, function in sides.items():
            times[side].append(sample(function, calls[side]))
    return {side: statistics.median(times[side]) for side in sides}


def run_row(case, direction, eager, compiled, repeats):
    """A dict. `wrong`: why weft was not timed; `note`: what is odd about torch.compile; both mostly empty."""
    row = {"op": case.op, "pass": direction, "copy": case.copies == direction, "wrong": "", "note": ""}
    narrow = next(iter(case.inputs.values())).dtype if case.narrow == direction else None
    names = case.outputs if direction == "fwd" else [f"d_{name}" for name in case.inputs]
    prepare = forward_of if direction == "fwd" else backward_of
    with torch.set_grad_enabled(direction == "bwd"):
        sides = {"eager": prepare(case, eager)}
        start = time.perf_counter()
        want = sides["eager"]()
        wait()
        long = ["eager"] if time.perf_counter() - start > 10 * SHORT else []
        try:
            sides["weft"] = prepare(case, case.weft)
            error, row["wrong"] = compare(names, sides["weft"](), want, narrow)
        except (ValueError, NotImplementedError, RuntimeError) as failure:
            row["wrong"] = str(failure)
        if row["wrong"]:
            return row
        row["error"] = error
        try:
            if compiled:
                sides["compile"] = prepare(case, compiled)
                _, off = compare(names, sides["compile"](), want, narrow)
                row["note"] = off and f"torch.compile differs: {off}"
        except Exception as failure:  # noqa: BLE001 - a compiler fails in any way; the other sides still count
            sides.pop("compile", None)
            row["note"] = f"torch.compile failed: {type(failure).__name__}: {str(failure).strip()[:80]!r}"
        del want
        row["seconds"] = measure(sides, repeats, long)
    return row


def judge(row):
    """Adds the speed-ups and whether they meet the goals; None where there is no time."""
    seconds = row.get("seconds", {})
    for side, goal in (("eager", COPY_GOAL if row["copy"] else EAGER_GOAL), ("compile", COMPILE_GOAL)):
        ratio = round(seconds[side] / seconds["weft"], 2) if side in seconds else None
        row[f"vs_{side}"], row[f"goal_{side}"] = ratio, goal
        row[f"meets_{side}"] = None if ratio is None else ratio >= goal
    return row


# ---- report ------------------------------------------------------------------------------------------------

HEADER = "operator       pass    weft ms  eager ms compile ms  vs eager vs compile   error  verdict"


def verdict(row):
    if row["wrong"]:
        return f"WRONG: {row['wrong']}"
    missed = [side for side in ("eager", "compile") if row[f"meets_{side}"] is False]
    words = [f"below {row[f'goal_{side}']:g}x {side}" for side in missed]
    return "; ".join([*words, row["note"]] if row["note"] else words) or "ok"


def table_line(row):
    def cell(value, form, width):
        return f" {'-' if value is None else format(value, form):>{width}}"

    ms = {side: seconds * 1e3 for side, seconds in row.get("seconds", {}).items()}
    cells = [
        cell(ms.get("weft"), ".3f", 9),
        cell(ms.get("eager"), ".3f", 9),
        cell(ms.get("compile"), ".3f", 10),
        cell(row["vs_eager"], ".2f", 9),
        cell(row["vs_compile"], ".2f", 10),
        cell(row.get("error"), ".0e", 7),
    ]
    return f"{row['op']:<14} {row['pass']} {''.join(cells)}  {verdict(row)}"


def json_line(row, options):
    sizes = ("tokens", "channels", "streams", "dtype", "preset", "threads", "device")
    record = {"op": row["op"], "pass": row["pass"], **{name: getattr(options, name) for name in sizes}}
    record |= {f"{side}_us": round(seconds * 1e6, 2) for side, seconds in row.get("seconds", {}).items()}
    record |= {name: value for name, value in row.items() if name != "seconds"}
    return json.dumps(record | {"verdict": verdict(row)})


def summary(rows):
    wrong = sum(bool(row["wrong"]) for row in rows)
    missed = {side: sum(row[f"meets_{side}"] is False for row in rows) for side in ("eager", "compile")}
    good = sum(verdict(row) == "ok" for row in rows)
    alone = sum(row["meets_compile"] is None for row in rows) - wrong
    return (
        f"{len(rows)} rows: {good} meet the goals, {missed['eager']} miss the one against eager, "
        f"{missed['compile']} the one against torch.compile; {alone} without torch.compile, {wrong} wrong"
    )


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--channels", type=int, default=2048)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=1, help="of gdn_pre, which share an eighth of the tokens")
    parser.add_argument("--dtype", choices=ACTIVATIONS, default="bf16", help="of activations; the rest is f32")
    parser.add_argument("--preset", default="deepseek_v4", help="numerics, by weft's name for them")
    parser.add_argument("--iterations", type=int, help="of Sinkhorn; as in the preset by default")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's by default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--op", help="one operator: mhc_post, or mhc_post_fwd for one pass")
    parser.add_argument("--eager", choices=("bmm", "sums"), default="bmm", help="how eager mixes streams")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--quick", action="store_true", help="2048 tokens")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the table")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    if options.quick:
        options.tokens = 2048
    return options


def all_cases(numerics, options):
    dtype, gdn = ACTIVATIONS[options.dtype], options.op is not None and options.op.startswith("gdn")
    cases = []
    with torch.device(options.device):
        if not gdn:
            cases += make_cases(options.tokens, options.channels, options.streams, dtype, numerics)
        if gdn or options.op is None:
            tokens = max(options.sequences, options.tokens // 8)  # a token is about eight times as wide there
            cases += make_gdn_cases(tokens, dtype, options.sequences)
    return cases


def run_all(numerics, options):
    n = options.streams
    eager, fusible = Expressions(numerics, n, options.eager == "sums"), Expressions(numerics, n, sums=True)
    rows = []
    for case in all_cases(numerics, options):
        for direction in case.passes:
            if options.op not in (None, case.op, f"{case.op}_{direction}"):
                continue
            if sys.stderr.isatty():
                print(f"\r{case.op} {direction} ...\033[K\r", end="", file=sys.stderr, flush=True)
            torch._dynamo.reset()
            plain, compiled = case.function or getattr(eager, case.expression), None
            if not options.no_compile:
                compiled = torch.compile(case.function or getattr(fusible, case.expression), dynamic=False)
            rows.append(judge(run_row(case, direction, plain, compiled, options.repeats)))
            print(json_line(rows[-1], options) if options.json else table_line(rows[-1]), flush=True)
    return rows


def main():
    options = parse_options()
    torch.set_num_threads(options.threads)
    torch._functorch.config.donated_buffer = False  # a graph that is retained keeps its buffers
    if options.preset not in weft.presets():
        sys.exit(f"compare_torch.py: no preset {options.preset!r}; there are {', '.join(weft.presets())}")
    numerics = wt.Numerics.preset(options.preset)
    if options.iterations is not None:
        numerics = numerics._replace(sinkhorn_iters=options.iterations)
    if not options.json:
        info = weft.info()
        where = torch.cuda.get_device_name() if options.device == "cuda" else f"{options.threads} threads"
        sizes = f"tokens {options.tokens}, channels {options.channels}, streams {options.streams}"
        print(f"weft {info['version']} ({info['isa']}), torch {torch.__version__}, {where}")
        print(f"{sizes}, {options.dtype}, {options.preset}\n\n{HEADER}")
    rows = run_all(numerics, options)
    if not rows:
        sys.exit(f"compare_torch.py: no operator {options.op!r}")
    print(
        summary(rows) if options.json else f"\n{summary(rows)}",
        file=sys.stderr if options.json else sys.stdout,
    )
    sys.exit(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
