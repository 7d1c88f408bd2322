# SPDX-License-Identifier: Apache-2.0
"""Recompute inside a stack: the streams and sub-layer inputs of a group of sub-layers are let go when its forward pass
has ended, and rebuilt by one call of the library when the gradient of the group's output is there.

The tensors that autograd saved stay the same objects. Their storage is emptied and later given back its size, and the
library writes into it; nothing is copied, and no graph is built twice. Where hooks keep what autograd saves
(offloading, torch.utils.checkpoint with use_reentrant=False) these objects are not what backward reads: there nothing
is let go."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C
from . import joins, storage
from .numerics import pack
from .unmerged import Unmerged


def kept(param: Tensor | None) -> Tensor | None:
    """A copy: a sharded parameter has its memory during its own layer's passes only."""
    return None if param is None else param.detach().clone()


def storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def place(tensor: Tensor) -> tuple:
    """What two tensors have in common that are the same memory, unchanged."""
    return tensor.untyped_storage().data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.storage_offset()


class Run:
    """Layers of which each begins with the streams that the one before it ended with. The first stream tensor and the
    last one stay; between them all is rebuilt."""

    def __init__(self, x: Tensor, numerics: list[float]):
        self._x, self._numerics = x.detach(), numerics
        self._rows: list[tuple[dict, Tensor, dict]] = []  # fields of a layer, its u, and those of what comes after u
        self._discarded: list[tuple[Tensor, int]] = []
        self._output, self._place = x, None

    def goes_on_with(self, layer: Unmerged) -> bool:
        return self._place == place(layer.x) and self._numerics == pack(layer.layer.connection.numerics)

    def add(self, layer: Unmerged, y: Tensor) -> None:
        if self._rows:
            self._discard(self._output)
        if layer.spares_u:
            self._discard(layer.coef.u)
        self._output, self._place = y, place(y)
        site = layer.layer.connection
        # Detached, or the run would keep the graph alive that keeps it.
        u, f, pre, post, res = (
            None if t is None else t.detach()
            for t in (layer.coef.u, layer.f, layer.used, layer.coef.post, layer.coef.res)
        )
        after = {"f": f, "bias": kept(layer.bias), "post": post, "res": res, "y": y.detach()}
        row = {"dropout": (float(layer.dropout), 0), "sub_eps": site.sub_eps, "step": layer.step, "pre": pre}
        row |= {"v" if site.sub_norm else "u": u, "sub_weight": kept(site.sub_weight)}
        self._rows.append((row, u, after))

    def _discard(self, tensor: Tensor) -> None:
        if tensor.requires_grad:
            self._discarded.append((tensor.detach(), storage_bytes(tensor)))

    def end(self) -> None:
        """Lets go of what can be rebuilt, and rebuilds it when the gradient of the output has come."""
        output, self._output = self._output, None
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
        rows = []
        rebuilt = {tensor.untyped_storage().data_ptr() for tensor, _ in self._discarded}
        for row, u, after in self._rows:
            if u.untyped_storage().data_ptr() not in rebuilt:
                row = row | {"u": None, "v": None, "sub_weight": None}
            rows.append(row | after)
        rows[-1] |= dict.fromkeys(self._rows[-1][2])  # the last one ends with u
        _C.replay(self._numerics, torch.get_num_threads(), self._x, rows)


def _has_read(layer: Unmerged) -> bool:
    """Whether the site has read the streams that the layer merges with, and no hook has given it others, or another pre_in,
    which leaves no trace."""
    own = layer.used is layer.coef.pre
    return own and joins.head_of(joins.origin_of(layer.x), layer.coef.post) is not None


class Group:
    """One group in one forward pass: a run of layers, or more of them where somebody has changed the streams on the way
    from one layer to the next."""

    def __init__(self):
        self._run: Run | None = None

    def add(self, layer: Unmerged, y: Tensor) -> None:
        """The next layer has been merged, with streams y as the result."""
        site = layer.layer.connection
        known = not storage.hooked() and site.is_itself() and (not site._forward_pre_hooks or _has_read(layer))
        if not known:  # what backward reads, or what the site did, or of which streams
            self.end()
            return
        if self._run is not None and not self._run.goes_on_with(layer):
            self.end()
        if self._run is None:
            self._run = Run(layer.x, pack(site.numerics))
        self._run.add(layer, y)

    def end(self) -> None:
        """The forward pass of the group has ended."""
        run, self._run = self._run, None
        if run is not None:
            run.end()
