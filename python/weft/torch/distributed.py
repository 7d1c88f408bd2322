# SPDX-License-Identifier: Apache-2.0
"""Several processes: gradients of parameters that all of them have, each with its own tokens, and results of
collectives that have not arrived yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .grads import main_grad_of
from .register import wide

# The name of PyTorch 2.13, and the one before it.
_all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        return t.wait()

    @staticmethod
    def backward(ctx, grad):
        return grad


def arrived(t: Tensor) -> Tensor:
    """A tensor with memory. What tensor parallel layers return is a wrapper round the result of a collective, without
    memory that could be looked at; it waits when it is used."""
    return _Arrived.apply(t) if type(t).__name__ == "AsyncCollectiveTensor" else t


def sum_gradients(parameters: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Makes the gradient of each parameter, or its main_grad where there is one, the sum over the ranks of `group`.

    The sum runs in the order of the ranks, whatever the backend and the topology are, so all ranks get the same bits,
    and get them again in the next run; 16-bit gradients are summed in fp32 and rounded once. All ranks pass the same
    parameters in the same order; one that is passed twice counts once. Of those that are DTensors, divided alike on all
    ranks of the group, the parts that ranks have are added: the group must be orthogonal to the mesh of the parameter:
    its ranks have the same part. A gradient that a rank does not have counts as zero, and stays None where no rank has
    one. Call it when backward has ended."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("sum_gradients: group: expected an initialised process group, got none")
    ranks = dist.get_world_size(group)
    parameters = list({id(p): p for p in parameters if p.requires_grad}.values())
    if ranks == 1 or not parameters:
        return
    by_dtype: dict[torch.dtype, list[_Gradient]] = {}
    for p in parameters:
        gradient = _gradient(p)
        by_dtype.setdefault(gradient.local.dtype, []).append(gradient)
    with torch.no_grad():
        for gradients in by_dtype.values():
            _sum(gradients, ranks, group)


class _Gradient(NamedTuple):
    param: Tensor
    local: Tensor  # the memory that a rank has of it
    missing: bool  # this rank has none: zeros, for the sum


def _gradient(p: Tensor) -> _Gradient:
    main = main_grad_of(p)
    missing = main is None and p.grad is None
    if missing:
        p.grad = torch.zeros_like(p)
    gradient = p.grad if main is None else main
    if not hasattr(gradient, "to_local"):
        return _Gradient(p, gradient, missing)
    if gradient.placements != p.placements:  # DTensor's operators return what costs them least
        if main is not None and hasattr(p, "get_main_grad"):
            raise ValueError(
                f"sum_gradients: get_main_grad: expected placements {p.placements}, those of the parameter, got"
                f" {gradient.placements}"
            )
        gradient = gradient.redistribute(placements=p.placements)
        setattr(p, "grad" if main is None else "main_grad", gradient)
    return _Gradient(p, gradient.to_local(), missing)


def _sum(gradients: list[_Gradient], ranks: int, group) -> None:
    """Each rank receives one slice of all gradients from everybody, adds them up in the order of ranks and hands the
    result to all: the traffic of an all-reduce in a ring, and one order of summation. Behind the gradients goes a number
    for each, how many ranks have it, which those read that have not."""
    locals_of = [g.local for g in gradients]
    there = torch.tensor([float(not g.missing) for g in gradients]).to(locals_of[0])
    sizes = [t.numel() for t in (*locals_of, there)]
    slice_size = -(-sum(sizes) // ranks)
    mine = there.new_zeros(ranks * slice_size)
    torch.cat([t.reshape(-1) for t in (*locals_of, there)], out=mine[: sum(sizes)])
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    first, *others = theirs.view(ranks, slice_size)
    total = first.to(wide(first))
    for other in others:
        total += other
    _all_gather(mine, total.to(mine.dtype), group=group)
    *sums, owners = mine[: sum(sizes)].split(sizes)
    for local, of_all in zip(locals_of, sums, strict=True):
        local.copy_(of_all.view_as(local))
    if any(g.missing for g in gradients):
        for gradient, count in zip(gradients, owners.tolist(), strict=True):
            if gradient.missing and count == 0:
                gradient.param.grad = None
