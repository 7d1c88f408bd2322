# SPDX-License-Identifier: Apache-2.0
"""A stack of layers as one module.

Neighbours in it are joined: the merge of one and what comes before the next are one operator (`boundary`), which
reads and writes the streams once instead of three times. So is the first layer with the entry, where the streams are
made. A joined layer's own `forward` is not called. So a layer that somebody has put something on, hooks for instance,
is not joined, and called as a module."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from . import functional as F
from .distributed import arrived
from .modules import Contract, Expand, Head, HyperConnection, HyperConnectionLayer, _not_itself
from .register import wide
from .stack_recompute import Group
from .unmerged import Entry, Unmerged

GLOBAL_HOOKS = tuple(f"_global_{when}_hooks" for when in ("forward_pre", "forward", "backward_pre", "backward"))


def _not_plain(module: nn.Module) -> str | None:
    """Why to call a module is more than to run its forward, or None if it is not."""
    if module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks:
        return "has hooks"
    return "is compiled by itself" if module._compiled_call_impl is not None else None


def _alone(k: int, layer: nn.Module) -> str | None:
    """Why layer k has to be called as a module, or None if it has not."""
    reason = _not_itself(layer, HyperConnectionLayer, "forward") or _not_plain(layer)
    return f"layer {k} {reason}" if reason else None


def _not_followed(k: int, site: HyperConnection) -> str | None:
    """Why the site of layer k does not go together with anything before it, or None if it may."""
    reason = _not_itself(site, HyperConnection, "forward", "follow") or _not_plain(site)
    return f"connection of layer {k} {reason}" if reason else None


def _not_joined(k: int, before: HyperConnection, site: HyperConnection) -> str | None:
    """Why the site of layer k does not go together with the one before it, or None if it does."""
    reason = _not_itself(before, HyperConnection, "merge")
    if reason:
        return f"connection of layer {k - 1} {reason}"
    reason = _not_followed(k, site)
    if reason:
        return reason
    if before.streams != site.streams or before.channels != site.channels:
        return f"layer {k} has other streams or channels than layer {k - 1}"
    if before.numerics is not site.numerics and before.numerics != site.numerics:
        return f"layer {k} has other numerics than layer {k - 1}"
    return None


class HyperConnectionStack(nn.Module):
    """Sub-layers in n residual streams, with entry and exit: [..., C] to [..., C].

    contract: "mean", "sum", "learned" (a Head), or None to return the streams; expand=False takes streams as input: for
    the stages of a pipeline. first_site: number of the first of these sites in the whole network, where this is a stage.
    Positional arguments of forward after the input are handed to every sub-layer, keyword
    arguments to those whose forward takes them. Of sub-layers that return a tuple, `output` is the place of the output.

    shifted=True: a sub-layer's input is aggregated with the coefficients that the site before it predicted, that of the
    first one is stream 0, and contract="pre" aggregates the output with those of the last site. The stages of a
    pipeline then hand on pairs (streams, pre).

    join=True makes one operator of the merge of a layer and what comes before the next, and of the entry and what
    comes before the first, wherever it can; `joins` and `joins_entry` tell where it cannot. join=False runs layer
    by layer.

    rebuild=True keeps the streams before every second layer only, and makes the others again in backward, one at a
    time. recompute=k keeps the streams and sub-layer inputs of every group of k sub-layers only until the group's
    forward pass has ended, and rebuilds them in one call when its backward pass begins; what is kept is the input of
    each group, the sub-layers' outputs and the coefficients. Results are bitwise the same with either."""

    def __init__(
        self,
        sublayers: Iterable[nn.Module],
        channels: int,
        streams: int = 4,
        *,
        norm: bool = True,
        dropout: float = 0.0,
        output: int | None = None,
        contract: str | None = "mean",
        expand: bool = True,
        shifted: bool = False,
        join: bool = True,
        rebuild: bool = False,
        recompute: int | None = None,
        first_site: int = 0,
        device=None,
        dtype: torch.dtype = torch.float32,
        **options,
    ):
        super().__init__()
        if recompute is not None and (isinstance(recompute, bool) or int(recompute) != recompute or recompute < 1):
            raise ValueError(f"HyperConnectionStack: recompute: expected None or 1 and more, got {recompute!r}")
        if rebuild and (recompute or not join):
            other = "recompute" if recompute else "join=False"
            raise ValueError(f"HyperConnectionStack: rebuild: expected False with {other}, got True")
        if contract == "pre" and not shifted:
            raise ValueError('HyperConnectionStack: contract: expected shifted=True with "pre", got False')
        make = {"device": device, "dtype": dtype}
        # Shifted, what a site predicts is the next one's.
        sites = itertools.count(first_site + shifted)
        self.layers = nn.ModuleList(
            HyperConnectionLayer(
                sub, channels, streams, norm=norm, dropout=dropout, output=output, site=next(sites), **make, **options
            )
            for sub in sublayers
        )
        self.shifted, self.join, self.rebuild, self.recompute = shifted, join, rebuild, recompute
        self.expand = Expand(streams) if expand else None
        self.contract_by_pre = contract == "pre"
        if contract is None or self.contract_by_pre:
            self.contract = None
        elif contract == "learned":
            shared = {k: options[k] for k in ("precision", "main_grad") if k in options}
            self.contract = Head(channels, streams, **make, **shared)
        else:
            self.contract = Contract(contract)

    def _never(self) -> str | None:
        """Why nothing at all is joined, or None."""
        if not self.join:
            return "join=False"
        if any(getattr(torch_module, hooks) for hooks in GLOBAL_HOOKS):
            return "there are hooks for all modules"
        return None

    def joins(self) -> list[str | None]:
        """For every layer but the first why it is not joined with the layer before it, as things are now, or None where
        it is."""
        never = self._never()
        if never:
            return [never] * (len(self.layers) - 1)
        found: list[str | None] = []
        site = alone = None
        for k, layer in enumerate(self.layers):
            before, was_alone = site, alone
            alone = _alone(k, layer)
            if not alone:
                site = layer.connection
            if k > 0:
                found.append(was_alone or alone or _not_joined(k, before, site))
        return found

    def joins_entry(self) -> str | None:
        """Why the first layer is not joined with the entry, as things are now, or None where it is."""
        if self.expand is None or not self.layers:
            return "expand=False" if self.expand is None else "there are no layers"
        reason = _not_itself(self.expand, Expand, "forward") or _not_plain(self.expand)
        if reason:
            return f"the entry {reason}"
        first = self.layers[0]
        return self._never() or _alone(0, first) or _not_followed(0, first.connection)

    def _taken(self, kwargs: dict) -> list[dict]:
        """For every layer the keyword arguments that its sub-layer takes."""
        taken = []
        for layer in self.layers:
            takes = getattr(layer, "takes", None)
            taken.append(kwargs if takes is None else {k: v for k, v in kwargs.items() if k in takes})
        for name in kwargs:
            if self.layers and not any(name in own for own in taken):
                raise TypeError(f"HyperConnectionStack: {name}: expected an argument that a sub-layer takes, none does")
        return taken

    def forward(self, x, *args, **kwargs):
        pre = entry = None
        if self.expand is None and self.shifted:
            x, pre = x
        x = arrived(x)
        if self.expand is not None:
            if self.joins_entry() is None:
                entry = Entry.of(x, self.expand.streams)
            else:
                x = self.expand(x)
        if self.shifted and pre is None:
            like = x if entry is None else entry.made_of.x
            pre = torch.zeros(like.shape[:-1], dtype=wide(like), device=like.device)
            pre[..., 0] = 1
        x, pre = self._through(x, pre, entry, args, kwargs)
        if self.contract is not None:
            return self.contract(x)
        if self.contract_by_pre:
            return F.aggregate(x, pre)
        return (x, pre) if self.shifted else x

    def _through(
        self, x: Tensor, pre: Tensor | None, entry: Entry | None, args, kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """The streams after all layers, from streams x or, where there is one, from an entry. `pre` is what the next
        layer's input is aggregated with; None: its own."""
        joined = [entry is not None, *(reason is None for reason in self.joins()), False]
        graph = torch.is_grad_enabled()
        rebuild = self.rebuild and graph
        recompute = self.recompute if graph and self.training and not torch.compiler.is_compiling() else None
        group, last = None, entry
        taken = self._taken(kwargs)
        for k, layer in enumerate(self.layers):
            kwargs, source = taken[k], None
            if joined[k]:
                keep = not rebuild or last.source is not None or not layer.connection.is_itself()
                coef, x = last.follow(layer.connection, pre, keep)
                source = None if keep else last.as_source()
            if recompute and k % recompute == 0:
                if group is not None:
                    group.end()
                group = Group()
            if not joined[k] and not joined[k + 1]:
                x, pre = self._alone(layer, x, pre, group, args, kwargs)
                continue
            if not joined[k]:
                coef = layer.connection(x, pre)
            last = Unmerged.run(layer, x, coef, pre, args, kwargs, group, source)
            pre = coef.pre if self.shifted else None
            if not joined[k + 1]:
                x = last.merge()
        if group is not None:
            group.end()
        return x, pre

    def _alone(self, layer: nn.Module, x: Tensor, pre: Tensor | None, group: Group | None, args, kwargs):
        """A layer by a call, so that whatever somebody has put on it has its effect."""
        own = {}
        if group is not None:
            own["recompute_group"] = group
        if self.shifted:
            return layer(x, *args, pre_in=pre, **own, **kwargs)
        return layer(x, *args, **own, **kwargs), None
