# SPDX-License-Identifier: Apache-2.0
"""Operators of weft with one result, written straight into memory that the caller gives."""

import torch
from torch import Tensor

from weft.compat import _require as require
from weft.torch import register


class _Node(register.Node):
    """register.Node with the caller's memory in the place of the sink."""

    @staticmethod
    def forward(ctx, operator, out, *args):
        operator.fill(out, args)
        ctx.mark_dirty(out)
        register.Node.keep(ctx, operator, None, args, out)
        return out


def write(name: str, args: tuple, out: Tensor) -> Tensor:
    """torch.ops.weft.<name> of args in out. Returned is out's memory with the result's history; out itself stays outside
    of autograd and can be given again. In a compiled graph, and for tensors that the library does not see, the result
    is copied there."""
    operator = register.OPERATORS[name]
    target = out.detach()
    if torch.compiler.is_compiling() or not register.is_plain((*args, target)):
        return target.copy_(operator.op(*args))
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
        return _Node.apply(operator, target, *args)
    operator.fill(target, args)
    return target


def same_memory(op: str, out: object, like: Tensor, shape: tuple[int, ...]) -> None:
    """out can hold a result of that shape with the dtype and the device of `like`."""
    require.shape(op, "out", out, shape)
    if out.dtype != like.dtype or out.device != like.device or not out.is_contiguous() or out.requires_grad:
        want = f"contiguous {like.dtype} on {like.device} outside of autograd"
        got = f"{out.dtype} on {out.device}, strides {out.stride()}, requires_grad {out.requires_grad}"
        raise ValueError(f"{op}: out: expected {want}, got {got}")
