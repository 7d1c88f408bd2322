# SPDX-License-Identifier: Apache-2.0
"""Results and gradients of an operator against its plain expression, with bounds that follow from the arithmetic.

exact    the expression in float64, evaluated on the very values of the operator's inputs
noise    how far the expression moves when its inputs and the result of every single operation in it, forward and
         backward, are moved by one unit roundoff of the operator's arithmetic (2^-24; float64: 2^-53), up or down at
         random: the largest move of any element of that tensor over DRAWS draws. It shows condition and cancellation.
bound    PATH noise + u_out (|exact| + PATH noise) + half the smallest number of the dtype, u_out being the unit
         roundoff of the result's dtype: one rounding at the store.

PATH covers that a random draw is not the worst one and that one operation of the expression, a sum over channels say,
is a chain of roundings in the library."""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
HALF_SMALLEST = {torch.float64: 0.0, torch.float32: 2.0**-150, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}
PATH, DRAWS = 16.0, 2


def move(t: Tensor, unit: float) -> Tensor:
    return t * (1 + unit * (torch.randint(0, 2, t.shape, dtype=t.dtype) * 2 - 1))


class Noise(TorchDispatchMode):
    """Moves every float64 result by one unit, up or down; views, writes in place and maxima, which have no
    rounding, stay as they are."""

    def __init__(self, unit: float):
        super().__init__()
        self.unit = unit

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.amax.default or any(r.alias_info is not None for r in func._schema.returns):
            return result
        if isinstance(result, tuple):
            return tuple(map(self._moved, result))
        return self._moved(result)

    def _moved(self, value):
        """A convolution's backward has None among its results."""
        return move(value, self.unit) if isinstance(value, Tensor) and value.dtype == torch.float64 else value


def close(got: Tensor, exact: Tensor, error: float | Tensor, what: str) -> float:
    """Fails unless every element is within `error` before its one rounding; returns the largest error by its bound."""
    assert got.shape == exact.shape, f"{what}: expected shape {list(exact.shape)}, got {list(got.shape)}"
    assert torch.isfinite(exact).all(), f"{what}: the expression itself is not finite"
    if got.numel() == 0:
        return 0.0
    value, exact = got.detach().double().cpu(), exact.detach()
    bound = error + UNIT[got.dtype] * (exact.abs() + error) + HALF_SMALLEST[got.dtype]
    ratio = (value - exact).abs() / bound.clamp_min(1e-300)
    bad = ~(ratio <= 1)  # NaN is bad
    if bad.any():
        k = int(torch.where(bad, ratio.nan_to_num(torch.inf), 0).argmax())
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.numel()} elements off; element {k}: expected"
            f" {exact.flatten()[k].item():.9g} +- {bound.expand(exact.shape).flatten()[k].item():.2g}, got"
            f" {value.flatten()[k].item():.9g}"
        )
    return float(ratio.max())


def same(got, want, what: str = "result") -> None:
    """Bitwise, NaN included; nested tuples and None as they are."""
    if isinstance(want, (tuple, list)):
        assert len(got) == len(want), what
        for k, (g, w) in enumerate(zip(got, want, strict=True)):
            same(g, w, f"{what}[{k}]")
    elif want is None:
        assert got is None, f"{what}: expected None"
    else:
        assert got.dtype == want.dtype and got.shape == want.shape, f"{what}: {got.dtype} {got.shape}"
        as_bytes = [t.detach().contiguous().view(-1).view(torch.uint8) for t in (got, want)]
        assert torch.equal(*as_bytes), f"{what}: not the same bits"


def tuple_of(value) -> tuple:
    """A result that a call does not have is None."""
    return (value,) if isinstance(value, Tensor) else tuple(v for v in value if v is not None)


def grads_of(outputs: tuple, upstream: tuple, inputs: list[Tensor]) -> list[Tensor | None]:
    """Results that depend on none of the inputs take no part."""
    used = [(o, g) for o, g in zip(outputs, upstream, strict=True) if o.requires_grad]
    outputs, upstream = zip(*used, strict=True)
    return list(torch.autograd.grad(outputs, inputs, upstream, allow_unused=True))


def check(function, expression, tensors: dict, *, wrt=None, unit=None, coarse=(), coarse_unit=2.0**-16) -> float:
    """Calls function(**tensors) and expression(**tensors), both returning tensors, and compares results and gradients.

    wrt: names of the inputs that require a gradient, all of the floating ones unless told. coarse: names of inputs that
    the library may hold in fewer bits, which are moved by coarse_unit. Returns the largest error by its bound."""
    floating = [k for k, t in tensors.items() if t is not None and t.is_floating_point()]
    wrt = floating if wrt is None else list(wrt)
    leaves = {k: t.detach().requires_grad_() if k in wrt else t for k, t in tensors.items()}
    outputs = tuple_of(function(**leaves))
    upstream = tuple(torch.randn(t.shape, dtype=torch.float64).to(t) for t in outputs)
    grads = grads_of(outputs, upstream, [leaves[k] for k in wrt]) if wrt else []
    for name, grad in zip(wrt, grads, strict=True):
        assert grad is not None, f"d_{name}: expected a gradient, got None"
        assert grad.dtype == leaves[name].dtype, f"d_{name}: got {grad.dtype}"

    if unit is None:
        unit = UNIT[torch.float64 if outputs[0].dtype == torch.float64 else torch.float32]

    def evaluate(noise: float):
        wide = {k: t.detach().double().cpu() if k in floating else t for k, t in tensors.items()}
        pulled = [g.double().cpu() for g in upstream]
        if noise:
            wide = {k: move(t, coarse_unit if k in coarse else noise) if k in floating else t for k, t in wide.items()}
            pulled = [move(g, noise) for g in pulled]
        wide = {k: t.requires_grad_() if k in wrt else t for k, t in wide.items()}
        with Noise(noise) if noise else nullcontext():
            results = tuple_of(expression(**wide))
            back = grads_of(results, tuple(pulled), [wide[k] for k in wrt]) if wrt else []
        return [t.detach() for t in results] + [
            torch.zeros_like(wide[k]) if g is None else g for k, g in zip(wrt, back, strict=True)
        ]

    exact = evaluate(0.0)
    moved = [evaluate(unit) for _ in range(DRAWS)]
    worst = 0.0
    names = [f"result {k}" for k in range(len(outputs))] + [f"d_{k}" for k in wrt]
    for k, (name, got) in enumerate(zip(names, (*outputs, *grads), strict=True)):
        noise = max((float((m[k] - exact[k]).abs().max()) if exact[k].numel() else 0.0) for m in moved)
        worst = max(worst, close(got, exact[k], PATH * noise, name))
    return worst
