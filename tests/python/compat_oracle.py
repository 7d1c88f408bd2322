# SPDX-License-Identifier: Apache-2.0
"""What the tests of the drop-ins compare with: the equations of docs/reference/math.md in fp64, written as sums over names
of axes, and the golden files. Everything here takes (..., n, C); a drop-in's layout is its test's business.

Bounds. A result is a value computed in fp32 (fp64 on the reference backend) and rounded where it is stored:
    arithmetic   depth roundings of 2^-24 (2^-53), relative to the largest value of the tensor; depth counts the
                 terms of the longest chain of sums and the steps of Sinkhorn
    store        one rounding of the element itself; or k of them relative to the largest value, where k results
                 of 16 bits were added up outside of weft
    parts        how far the result moves when every sum of products in a projection is off by all that tensor cores
                 may leave out of it (class Apart), up or down at random: the largest move of any element of the
                 tensor over DRAWS draws; streams of 16 bits on the GPU, bf16 on AMX
Comparisons are written so that NaN fails."""

import json
import os
import struct
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path

import pytest
import torch
import torch._dynamo
import weft
from conftest import NO_GPU
from torch import Tensor

Named = dict[str, Tensor]
DEVICES = ["cpu"] + ["cuda"] * (NO_GPU is None)
DRAWS = 2
DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
dtypes_but_f16 = pytest.mark.parametrize("dtype", list(DTYPES.values())[:3], ids=list(DTYPES)[:3])


# ---- equations ---------------------------------------------------------------------------------------------


def project(x: Tensor, phi: Tensor, gain: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """phi (R, n, C) -> h (..., R), mean square (...)."""
    psi = phi if gain is None else phi * gain
    streams, weight = x.flatten(-2), psi.flatten(1)
    h = streams @ weight.mT if apart.get() is None else Apart.apply(streams, weight, apart.get())
    return h, streams.pow(2).mean(-1)


# The streams' dtype where projections are to be off by what taking factors apart leaves out.
apart: ContextVar[torch.dtype | None] = ContextVar("apart", default=None)


class Apart(torch.autograd.Function):
    """h = x psi^T with every sum of products, forward and backward, off by all that the arithmetic of 16-bit streams
    may leave out ("CUDA" under "Error bounds" in docs/reference/math.md), relative to the sum of the terms' magnitudes:
        ONE   for a float32 factor, psi or d_h, which is taken apart into two bf16 numbers
        LOW   where both factors have a low part, as f16 streams do too: the product of these
        CUT   for each term of a sum, in whole steps of 16 terms"""

    ONE, LOW, CUT, STEP, LEAF = 2.0**-17, 2.0**-16, 2.0**-24 * 17 * 2 * 3 / 16, 16, 64

    @staticmethod
    def off(a: Tensor, b: Tensor, left_out: float) -> Tensor:
        most = left_out * (a.abs() @ b.abs())
        return a @ b + most * (torch.randint(0, 2, most.shape) * 2 - 1)

    @staticmethod
    def forward(ctx, x, psi, dtype):
        ctx.save_for_backward(x, psi)
        ctx.dtype = dtype
        columns = min(x.shape[-1] + Apart.STEP, Apart.LEAF)  # of a partial sum, up to 64 of which are added in a tree
        return Apart.off(x, psi.mT, Apart.with_x(dtype) + Apart.CUT * columns)

    @staticmethod
    def backward(ctx, d_h):
        x, psi = ctx.saved_tensors
        rows, tokens = psi.shape[0] + Apart.STEP, d_h[..., 0].numel() + Apart.STEP
        d_x = Apart.off(d_h, psi, 2 * Apart.ONE + Apart.LOW + Apart.CUT * rows)
        d_psi = Apart.off(d_h.flatten(0, -2).mT, x.flatten(0, -2), Apart.with_x(ctx.dtype) + Apart.CUT * tokens)
        return d_x, d_psi, None

    @staticmethod
    def with_x(dtype: torch.dtype) -> float:
        return Apart.ONE + (Apart.LOW if dtype == torch.float16 else 0.0)


def gates(h: Tensor, ms: Tensor, alpha: Tensor, beta: Tensor, n: int, eps: float, kind: str, pre_eps: float,
          post_mult: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    root = (ms + eps).sqrt() if kind == "inside" else ms.sqrt() + eps
    mix = h / root.unsqueeze(-1)
    pre = 1 / (1 + torch.exp(-(alpha[0] * mix[..., :n] + beta[:n]))) + pre_eps
    post = post_mult / (1 + torch.exp(-(alpha[1] * mix[..., n : 2 * n] + beta[n : 2 * n])))
    logits = alpha[2] * mix[..., 2 * n :] + beta[2 * n :]
    return pre, post, logits.reshape(*logits.shape[:-1], n, n)


def sinkhorn(logits: Tensor, rule: str, iterations: int, eps: float) -> Tensor:
    if rule == "log":  # without an eps this is plain alternation, which fp64 does not need in log space
        a = torch.exp(logits - logits.detach().amax((-1, -2), keepdim=True))
        for _ in range(iterations):
            a = a / a.sum(-1, keepdim=True)
            a = a / a.sum(-2, keepdim=True)
        return a
    start = torch.exp(logits - logits.amax(-1, keepdim=True))
    rounds = iterations
    if rule == "softmax_eps":
        start = start / start.sum(-1, keepdim=True) + eps
        start = start / (start.sum(-2, keepdim=True) + eps)
        rounds -= 1
    a = start
    for _ in range(rounds):
        for axis in (-1, -2):
            total = a.sum(axis, keepdim=True)
            a = a / (torch.where(total > eps, total, eps) if rule == "clamp" else total + eps)
    return a


def aggregate(x: Tensor, pre: Tensor) -> Tensor:
    return torch.einsum("...i,...ic->...c", pre, x)


def combine(x: Tensor, f: Tensor, post: Tensor, res: Tensor, bias: Tensor | None, apply: str) -> Tensor:
    inner = f if bias is None else f + bias
    mix = torch.einsum("...io,...ic->...oc" if apply == "in_out" else "...oi,...ic->...oc", res, x)
    return mix + torch.einsum("...o,...c->...oc", post, inner)


# ---- comparing ---------------------------------------------------------------------------------------------


def draw(seed: int = 0, **shapes: tuple[int, ...]) -> Named:
    """Standard normal tensors in fp64; a projection's weight is smaller, so that gates see values of order one."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {k: t / max(t.shape) ** 0.5 if k in ("phi", "fn", "weight", "head_fn") else t for k, t in drawn.items()}


def as_dtypes(inputs: Named, dtype: torch.dtype, wide: str = "") -> Named:
    """Inputs in dtype; those named in wide in fp32 where dtype has 16 bits."""
    narrow = dtype in (torch.bfloat16, torch.float16)
    return {k: v.to(torch.float32 if narrow and k in wide.split() else dtype) for k, v in inputs.items()}


def differentiate(function: Callable, inputs: Named, upstream: Named | None = None) -> tuple[Named, Named, Named]:
    """Results, random upstream gradients (or those given) and gradients of all inputs, None where there is none."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
    results = function(**leaves)
    if upstream is None:
        drawn = draw(99, **{name: tuple(t.shape) for name, t in results.items()})
        upstream = {name: drawn[name].to(t) for name, t in results.items()}
    torch.autograd.backward(list(results.values()), [upstream[k] for k in results])
    grads = {name: leaf.grad for name, leaf in leaves.items()}
    return {k: t.detach() for k, t in results.items()}, upstream, grads


def depth(n: int, c: int, tokens: int = 0, iterations: int = 20) -> int:
    """Roundings of a site's longest chain: sums over a token's streams and over tokens, divisions of Sinkhorn in both
    directions, forward and back, and the gates."""
    return n * c + tokens + 4 * n * iterations + 32


def largest_of(*values: Tensor) -> float:
    return max((float(t.abs().max()) for t in values if t.numel()), default=0.0)


def bound(got: Tensor, want: Tensor, depth: int, stores: int, largest: float, parts: float) -> Tensor:
    unit = 2.0**-53 if got.dtype == torch.float64 else 2.0**-24
    store = torch.finfo(got.dtype).eps / 2
    stored = store * (want.abs() + parts) if stores == 1 else stores * store * (largest + parts)
    return depth * unit * largest + parts + stored


def assert_close(
    name: str, got: Tensor, want: Tensor, depth: int, stores: int = 1, largest: float | None = None, parts: float = 0.0
) -> None:
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    want = want.double()
    largest = largest_of(want) if largest is None else largest
    error, allowed = (got.double() - want).abs(), bound(got, want, depth, stores, largest, parts)
    fine = error <= allowed  # False for NaN
    assert fine.all(), (
        f"{name}: {int((~fine).sum())} of {fine.numel()} elements are off, the largest error is "
        f"{float(error.max()):.3e}, the largest value {largest:.3e}, "
        f"the bound there {float(torch.as_tensor(allowed).max()):.3e}"
    )


def check(
    function: Callable,
    oracle: Callable,
    inputs: Named,
    depth: int,
    stores: dict[str, int] | None = None,
    alike: tuple[str, ...] = (),
) -> None:
    """function on inputs as they are against oracle on their fp64 values: every result, every gradient; on the GPU
    too where there is one. The streams come first in inputs. `alike` are inputs whose gradients are sums of like
    terms: a scalar's own may cancel, so it is no scale for its error."""
    stores = stores or {}
    for device in DEVICES:
        if device == "cpu" or all(t.dtype != torch.float64 for t in inputs.values()):  # fp64 is for the CPU
            _check_on(device, function, oracle, inputs, depth, stores, alike)


def _check_on(device, function, oracle, inputs, depth, stores, alike) -> None:
    got, upstream, d_got = differentiate(function, {k: t.to(device) for k, t in inputs.items()})
    wide = {k: t.double() for k, t in inputs.items()}
    upstream = {k: t.cpu().double() for k, t in upstream.items()}
    want, _, d_want = differentiate(oracle, wide, upstream)
    streams = taken_apart(device, next(iter(inputs.values())).dtype)
    moved = [differentiate_apart(streams, oracle, wide, upstream) for _ in range(DRAWS if streams else 0)]
    parts, d_parts = largest_move(want, [m[0] for m in moved]), largest_move(d_want, [m[2] for m in moved])
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert_close(f"{name} on {device}", got[name].cpu(), value, depth, stores.get(name, 1), parts=parts[name])
    shared = largest_of(*(d_want[name] for name in alike))
    d_parts |= dict.fromkeys(alike, max((d_parts[name] for name in alike), default=0.0))
    for name, value in d_want.items():
        assert value is not None and value.abs().max() > 0, f"d_{name}: the case does not test it"
        assert d_got[name] is not None, f"d_{name} on {device}: no gradient"
        assert d_got[name].dtype == inputs[name].dtype
        largest = shared if name in alike else None
        stored = stores.get(f"d_{name}", 1)
        assert_close(f"d_{name} on {device}", d_got[name].cpu(), value, depth, stored, largest, d_parts[name])


def taken_apart(device: str, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of streams whose projection may take float32 factors apart into two bf16 numbers; None: it does not."""
    if device == "cuda":
        return dtype if dtype in (torch.bfloat16, torch.float16) else None
    return dtype if dtype == torch.bfloat16 and weft.info()["isa"] == "amx" else None


def differentiate_apart(dtype: torch.dtype, *arguments) -> tuple[Named, Named, Named]:
    token = apart.set(dtype)
    try:
        return differentiate(*arguments)
    finally:
        apart.reset(token)


def largest_move(exact: Named, moved: list[Named]) -> dict[str, float]:
    return {name: largest_of(*(m[name] - t for m in moved)) for name, t in exact.items()}


def check_compiled(function: Callable, inputs: Named) -> None:
    """In one graph: results and gradients are eager's but for the order of sums, some dozen roundings."""
    torch._dynamo.reset()
    plain, upstream, d_plain = differentiate(function, inputs)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    whole, _, d_whole = differentiate(compiled, inputs, upstream)
    assert whole.keys() == plain.keys()
    for name, value in plain.items():
        assert_close(name, whole[name], value, 64)
    for name, value in d_plain.items():
        assert_close(f"d_{name}", d_whole[name], value, 64)


# ---- golden files ------------------------------------------------------------------------------------------

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16}


def golden(name: str) -> dict[str, Named]:
    """Cases of a golden file: names of tensors within a case."""
    folder = os.environ.get("WEFT_GOLDEN_DIR")
    if not folder:
        pytest.skip("golden files: WEFT_GOLDEN_DIR is not set")
    path = Path(folder) / f"{name}.safetensors"
    if not path.exists():
        pytest.skip(f"golden files: there is no {path.name} in WEFT_GOLDEN_DIR")
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    cases: dict[str, Named] = {}
    for key, info in header.items():
        if key != "__metadata__":
            begin, end = (8 + length + offset for offset in info["data_offsets"])
            flat = torch.frombuffer(bytearray(data[begin:end]), dtype=_DTYPES[info["dtype"]])
            case, _, tensor = key.partition(".")
            cases.setdefault(case, {})[tensor] = flat.reshape(info["shape"])
    return cases


def assert_golden(case: str, name: str, got: Tensor, want: Tensor, of_largest: float, ulps: int = 0) -> None:
    """The tolerances of the golden files' README: a part of the largest value, and ulps of each 16-bit result."""
    assert got.shape == want.shape, f"{case}.{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    got, wide = got.double(), want.double()
    allowed = of_largest * wide.abs().max() + ulps * torch.finfo(want.dtype).eps * wide.abs()
    error = (got - wide).abs()
    worst = f"off by {float(error.max()):.3e}, allowed {float(allowed.max()):.3e}"
    assert (error <= allowed).all(), f"{case}.{name}: {worst}"
