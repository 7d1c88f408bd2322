# SPDX-License-Identifier: Apache-2.0
"""A layer between its sub-layer and its merge. There a stack decides: merge with the streams, or merge and continue to the
next layer in one operator. The input of a stack is such a layer, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import functional as F
from .distributed import arrived
from .register import wide

if TYPE_CHECKING:
    from .modules import HyperConnection, HyperConnectionLayer
    from .stack_recompute import Group


def branch(result, output: int | None) -> tuple[Tensor, Tensor | None]:
    """A sub-layer's result: its output, or the pair (output, bias [C]) of those that leave the bias to the merge, or a
    tuple that has the output in that place."""
    if isinstance(result, Tensor):
        return result, None
    if isinstance(result, tuple) and output is not None:
        return result[output], None
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Tensor):
        f, bias = result
        if bias is None or (isinstance(bias, Tensor) and bias.shape == f.shape[-1:]):
            return f, bias
    kinds = f"({', '.join(map(_kind, result))})" if isinstance(result, tuple) else _kind(result)
    raise TypeError(
        "HyperConnectionLayer: sublayer: expected an output [..., C] or the pair (output, bias [C]); with output=0 the first"
        f" of a tuple is taken; got {kinds}"
    )


def _kind(value) -> str:
    return f"tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


class Unmerged(NamedTuple):
    """A layer whose sub-layer has run."""

    layer: HyperConnectionLayer
    x: Tensor
    coef: F.Pre
    used: Tensor  # the coefficients that u was aggregated with: the layer's own, or those of the site before
    f: Tensor
    bias: Tensor | None
    step: Tensor | None  # of dropout; None: no dropout
    group: Group | None  # of the recompute that the layer takes part in
    spares_u: bool  # the sub-layer has left its input as it was, and in memory of its own: it can be rebuilt
    source: F.Source | None = None  # what x was made of, where x is not kept for backward

    @classmethod
    def run(
        cls, layer, x: Tensor, coef: F.Pre, pre_in: Tensor | None, args, kwargs, group=None, source=None
    ) -> Unmerged:
        """Runs a layer's sub-layer."""
        u = coef.u
        written = None if group is None else u._version
        f, bias = branch(layer.sublayer(u, *args, **kwargs), layer.output)
        f = arrived(f)
        spares_u = (
            group is not None
            and f.untyped_storage().data_ptr() != u.untyped_storage().data_ptr()
            and u._version == written
        )
        step = F.draw_step(x) if layer.dropout and layer.connection.training else None
        f = F._as_streams(x, f)  # here, and so once: whoever keeps it keeps the same tensor
        return cls(layer, x, coef, coef.pre if pre_in is None else pre_in, f, bias, step, group, spares_u, source)

    @property
    def dropout(self) -> float:
        return 0.0 if self.step is None else self.layer.dropout

    def as_source(self) -> F.Source:
        return F.Source(self.x, self.f, self.coef.post, self.coef.res, self.bias, self.dropout, self.step)

    def merge(self) -> Tensor:
        """The streams after the layer."""
        # What is not there is not passed: a site may have a merge of its own that knows nothing of it.
        more = {k: v for k, v in (("dropout_step", self.step), ("source", self.source)) if v is not None}
        y = self.layer.connection.merge(self.x, self.f, self.coef, self.bias, dropout=self.dropout, **more)
        return self._merged(y)

    def follow(self, site: HyperConnection, pre_in: Tensor | None, keep: bool = True) -> tuple[F.Pre, Tensor]:
        """The streams after the layer, and what comes before the next one, whose site is given."""
        coef, y = site.follow(
            self.layer.connection,
            self.x,
            self.f,
            self.coef,
            self.bias,
            pre_in,
            dropout=self.dropout,
            dropout_step=self.step,
            source=self.source,
            keep=keep,
        )
        return coef, self._merged(y)

    def _merged(self, y: Tensor) -> Tensor:
        if self.group is not None:
            self.group.add(self, y)
        return y


def zero_streams(u: Tensor, streams: int) -> Tensor:
    """Zeros [..., n, C] beside u [..., C], to be read. All of them lie in the same few bytes per token, so to read them
    costs no memory traffic; strides are like those of streams that have memory of their own: positive, whole vectors,
    and falling from left to right."""
    unit = 8
    strides = [1, unit, unit * streams]
    for size in reversed(u.shape[1:-1]):
        strides.append(strides[-1] * size)
    lead = u.dim() - 1
    tokens = u.numel() // max(u.shape[-1], 1)
    memory = u.new_zeros(tokens * unit * streams + u.shape[-1])
    return memory.as_strided((*u.shape[:-1], streams, u.shape[-1]), strides[: lead + 2][::-1])


class Entry(NamedTuple):
    """The input of a stack as a layer whose sub-layer has run: its streams are zero, and its output, the input, goes to
    each of them as it is."""

    made_of: F.Source
    source: None = None  # its streams are zeros, and kept

    @classmethod
    def of(cls, u: Tensor, streams: int) -> Entry:
        lead, make = u.shape[:-1], {"dtype": wide(u), "device": u.device}
        post = torch.ones(streams, **make).expand(*lead, streams)
        res = torch.zeros(streams, streams, **make).expand(*lead, streams, streams)
        return cls(F.Source(zero_streams(u, streams), u, post, res))

    def as_source(self) -> F.Source:
        return self.made_of

    def follow(self, site: HyperConnection, pre_in: Tensor | None, keep: bool = True) -> tuple[F.Pre, Tensor]:
        """The streams that the stack begins with, and what comes before its first layer, whose site is given."""
        x, f, post, res, *_ = self.made_of
        return site.follow(site, x, f, F.Pre(None, None, post, res), None, pre_in, keep=keep)
