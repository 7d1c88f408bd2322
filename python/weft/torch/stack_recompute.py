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
from .unmerged import Unmerged


def kept(param: Tensor | None) -> Tensor | None:
    """A copy: a sharded parameter has its memory during its own layer's passes only."""
    return None if param is None else param.detach().clone()


def storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


class Group:
    """A group of `size` layers in one forward pass. The first stream tensor and the last one stay; between them all is
    rebuilt."""

    def __init__(self, size: int):
        self._size = size
        self._x: Tensor | None = None
        self._rows: list[tuple] = []
        self._discarded: list[tuple[Tensor, int]] = []
        self._numerics = None

    def ran(self, u: Tensor, f: Tensor, written: int) -> None:
        """A sub-layer has made f of u, whose version was `written` before."""
        # It may have handed its input on as its output, which is what the replay starts from, or have written to it.
        if f.untyped_storage().data_ptr() != u.untyped_storage().data_ptr() and u._version == written:
            self._discard(u)

    def add(self, layer: Unmerged, y: Tensor) -> None:
        """The next layer has been merged, with streams y as the result. After the last one, the group lets go of what
        can be rebuilt."""
        site = layer.layer.connection
        if self._x is None:
            self._x, self._numerics = layer.x.detach(), pack(site.numerics)
        # Detached, or the group would keep the graph alive that keeps it.
        u, f, pre, post, res = (
            t.detach() for t in (layer.coef.u, layer.f, layer.used, layer.coef.post, layer.coef.res)
        )
        scalars = {"dropout": ops.dropped(layer.dropout, 0), "sub_eps": site.sub_eps}
        weights = kept(layer.bias), kept(site.sub_weight)
        after = (F._as_streams(layer.x, f), post, res)
        self._rows.append((scalars, site.sub_norm, u, pre, *after, *weights, layer.step, y.detach()))
        if len(self._rows) == self._size:
            self._close(y)
        else:
            self._discard(y)

    def _discard(self, tensor: Tensor) -> None:
        if tensor.requires_grad:
            self._discarded.append((tensor.detach(), storage_bytes(tensor)))

    def _close(self, output: Tensor) -> None:
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
        for k, (scalars, norm, u, pre, f, post, res, bias, weight, step, y) in enumerate(self._rows):
            if u.untyped_storage().data_ptr() not in rebuilt:
                u = weight = None
            placed = ops_fused.placed(norm, u)
            if k == last:
                rows.append((scalars, step, pre, None, None, None, None, weight, *placed, None))
            else:
                rows.append((scalars, step, pre, f, bias, post, res, weight, *placed, y))
        _C.replay(tuple(self._numerics), torch.get_num_threads(), self._x, rows)
