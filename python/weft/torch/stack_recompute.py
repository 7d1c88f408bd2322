# SPDX-License-Identifier: Apache-2.0
"""Recompute inside a stack: the streams and sub-layer inputs of a group of sub-layers are let go when its forward pass
has ended, and rebuilt by one call of the library when the gradient of the group's output is there.

The tensors that autograd saved stay the same objects. Their storage is emptied and later given back its size, and the
library writes into it; nothing is copied, and no graph is built twice."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C
from . import functional as F
from . import ops, ops_fused
from .numerics import pack


def branch(result) -> tuple[Tensor, Tensor | None]:
    """A sub-layer's result: its output, or the pair (output, bias) of those that leave the bias to the merge."""
    return result if isinstance(result, tuple) else (result, None)


def kept(param: Tensor | None) -> Tensor | None:
    """A copy: a sharded parameter has its memory during its own layer's passes only."""
    return None if param is None else param.detach().clone()


def storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


class Group:
    """One group in one forward pass. The first stream tensor and the last one stay; between them all is rebuilt."""

    def __init__(self, x: Tensor):
        self._x = x.detach()
        self._rows: list[tuple] = []
        self._discarded: list[tuple[Tensor, int]] = []
        self._numerics = None

    def forward(self, layer, x: Tensor, args, kwargs) -> Tensor:
        """One layer's forward pass, remembered for the replay."""
        site = layer.connection
        coef, x = site(x, carry=True)
        written = coef.u._version
        f, bias = branch(layer.sublayer(coef.u, *args, **kwargs))
        step = F.draw_step(x) if layer.dropout and layer.training else None
        y = site.merge(x, f, coef, bias, dropout=layer.dropout, dropout_step=step)
        # A sub-layer may hand its input on as its output, which is what the replay starts from, or write to it.
        if f.untyped_storage().data_ptr() != coef.u.untyped_storage().data_ptr() and coef.u._version == written:
            self._discard(coef.u)
        self._numerics = pack(site.numerics)
        scalars = {"dropout": ops.dropped(0.0 if step is None else layer.dropout, 0), "sub_eps": site.sub_eps}
        weights = kept(bias), kept(site.sub_weight)
        self._rows.append((scalars, site.sub_norm, coef, F._as_streams(x, f), *weights, step, y))
        return y

    def _discard(self, tensor: Tensor) -> None:
        if tensor.requires_grad:
            self._discarded.append((tensor.detach(), storage_bytes(tensor)))

    def close(self, output: Tensor) -> None:
        """Lets go of what can be rebuilt, and rebuilds it when the gradient of `output` has come."""
        for *_, y in self._rows[:-1]:
            self._discard(y)
        # Detached, or the group would keep the graph alive that keeps it.
        self._rows = [
            (scalars, norm, F.Pre(*(t.detach() for t in coef)), f.detach(), bias, weight, step, y.detach())
            for scalars, norm, coef, f, bias, weight, step, y in self._rows
        ]
        if not output.requires_grad:
            return
        for tensor, _ in self._discarded:
            tensor.untyped_storage().resize_(0)
        output.register_hook(self._restore)

    @torch.no_grad()
    def _restore(self, grad: Tensor) -> None:
        for tensor, size in self._discarded:
            if storage_bytes(tensor) == 0:
                tensor.untyped_storage().resize_(size)
        last = len(self._rows) - 1
        rows = []
        rebuilt = {tensor.untyped_storage().data_ptr() for tensor, _ in self._discarded}
        for k, (scalars, norm, coef, f, bias, weight, step, y) in enumerate(self._rows):
            u = coef.u if coef.u.untyped_storage().data_ptr() in rebuilt else None
            placed = ops_fused.placed(norm, u)
            weight = None if u is None else weight
            if k == last:
                rows.append((scalars, step, coef.pre, None, None, None, None, weight, *placed, None))
            else:
                rows.append((scalars, step, coef.pre, f, bias, coef.post, coef.res, weight, *placed, y))
        _C.replay(tuple(self._numerics), torch.get_num_threads(), self._x, rows)
