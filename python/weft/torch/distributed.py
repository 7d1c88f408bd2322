# SPDX-License-Identifier: Apache-2.0
"""Several processes: gradients of parameters that all of them have, each with its own tokens, and results of
collectives that have not arrived yet."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

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
    parameters in the same order. Of those that are DTensors, divided alike on all ranks of the group, the parts that
    ranks have are added. A gradient that a rank does not have counts as zero. Call it when backward has ended."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("sum_gradients: group: expected an initialised process group, got none")
    ranks = dist.get_world_size(group)
    parameters = [p for p in parameters if p.requires_grad]
    if ranks == 1 or not parameters:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for p in parameters:
        gradient = _gradient(p)
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    with torch.no_grad():
        for gradients in by_dtype.values():
            _sum(gradients, ranks, group)


def _gradient(p: Tensor) -> Tensor:
    """The memory that a rank has of a parameter's gradient."""
    gradient = getattr(p, "main_grad", None)
    if gradient is None:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        gradient = p.grad
    if not hasattr(gradient, "to_local"):
        return gradient
    if gradient.placements != p.placements:  # DTensor's operators return what costs them least
        gradient = p.grad = gradient.redistribute(placements=p.placements)
    return gradient.to_local()


def _sum(gradients: list[Tensor], ranks: int, group) -> None:
    """Each rank receives one slice of all gradients from everybody, adds them up in the order of ranks and hands the
    result to all: the traffic of an all-reduce in a ring, and one order of summation."""
    sizes = [g.numel() for g in gradients]
    slice_size = -(-sum(sizes) // ranks)
    mine = gradients[0].new_zeros(ranks * slice_size)
    torch.cat([g.reshape(-1) for g in gradients], out=mine[: sum(sizes)])
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    first, *others = theirs.view(ranks, slice_size)
    total = first.to(wide(first))
    for other in others:
        total += other
    _all_gather(mine, total.to(mine.dtype), group=group)
    for gradient, of_all in zip(gradients, mine[: sum(sizes)].split(sizes), strict=True):
        gradient.copy_(of_all.view_as(gradient))
