# SPDX-License-Identifier: Apache-2.0
"""Blocks of a model that is there, as a stack of hyper-connections."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from . import functional as F
from .modules import HyperConnection, _keywords_of
from .stack import HyperConnectionStack

Part = tuple[str | None, str]  # names of a norm and of the sub-layer after it


class Normed(nn.Module):
    """A sub-layer after a norm of its own: sublayer(norm(u), ...)."""

    def __init__(self, norm: nn.Module, sublayer: nn.Module):
        super().__init__()
        self.norm, self.sublayer = norm, sublayer
        self.takes = _keywords_of(sublayer)

    def forward(self, u, *args, **kwargs):
        return self.sublayer(self.norm(u), *args, **kwargs)


def convert_blocks(
    blocks: Iterable[nn.Module],
    parts: Sequence[Part],
    channels: int,
    streams: int = 4,
    *,
    plain: bool = True,
    fold_norms: bool = False,
    **options,
) -> HyperConnectionStack:
    """A stack of the sub-layers of blocks that compute x + sublayer(norm(x)) for each of their parts in turn. parts names
    the norm (None: there is none) and the sub-layer of each, as a block has them. The modules go over as they are, with
    their parameters; `block_names` tells where.

    plain=True begins with the function of the blocks: gates that read the mean of the streams, write to all of them alike
    and mix them evenly, whatever they hold; without a residual mix it is that function as long as the streams are alike,
    as after the entry. It is exact up to rounding where the numerics have no eps ("transformer_engine"), and up to about
    that eps for every part elsewhere. fold_norms=True hands RMSNorms to the operator before the sub-layer; a norm
    that is none is a ValueError. Options are those of HyperConnectionStack."""
    blocks = list(blocks)
    if "norm" in options:
        raise TypeError("convert_blocks: norm: expected fold_norms instead, got norm")
    sublayers, norms = [], []
    for k, block in enumerate(blocks):
        for norm_name, name in parts:
            norm, sublayer = (None if n is None else _module(k, block, n) for n in (norm_name, name))
            norms.append(norm)
            sublayers.append(sublayer if norm is None or fold_norms else Normed(norm, sublayer))
    if fold_norms:
        options["sub_eps"] = _eps_of_all(norms, channels)
    first = next((p for block in blocks for p in block.parameters()), None)
    if first is not None:
        options.setdefault("device", first.device)
    stack = HyperConnectionStack(sublayers, channels, streams, norm=fold_norms, **options)
    stack.block_parts = (tuple(tuple(part) for part in parts), fold_norms)
    for layer, norm in zip(stack.layers, norms, strict=True):
        if plain:
            _begin_plain(layer.connection)
        if fold_norms:
            layer.connection.sub_weight = norm.weight
    return stack


def block_names(stack: HyperConnectionStack) -> dict[str, str]:
    """For every parameter and buffer that convert_blocks has taken over: its name in the list of blocks, and its name in
    the stack. A checkpoint of the old model is loaded by giving its tensors their new names."""
    if not hasattr(stack, "block_parts"):
        raise ValueError("block_names: stack: expected one that convert_blocks has made, got another")
    parts, folded = stack.block_parts
    names = {}
    for k, layer in enumerate(stack.layers):
        norm, name = parts[k % len(parts)]
        block, here, inner = k // len(parts), f"layers.{k}.sublayer", layer.sublayer
        if folded:
            names[f"{block}.{norm}.weight"] = f"layers.{k}.connection.sub_weight"
        elif norm is not None:
            names |= {f"{block}.{norm}.{key}": f"{here}.norm.{key}" for key in inner.norm.state_dict()}
            here, inner = f"{here}.sublayer", inner.sublayer
        names |= {f"{block}.{name}.{key}": f"{here}.{key}" for key in inner.state_dict()}
    return names


def _module(k: int, block: nn.Module, name: str) -> nn.Module:
    module = getattr(block, name, None)
    if not isinstance(module, nn.Module):
        has = ", ".join(n for n, _ in block.named_children())
        raise ValueError(f"convert_blocks: parts: expected modules of block {k}, which has {has}, got {name!r}")
    return module


def _eps_of_all(norms: list[nn.Module | None], channels: int) -> float:
    """The eps of RMSNorms, after a look whether they are ones."""
    found = set()
    for norm in norms:
        weight = getattr(norm, "weight", None)
        eps = next((e for e in (getattr(norm, n, None) for n in ("eps", "variance_epsilon")) if e is not None), None)
        like = f"expected RMSNorms with weight [{channels}] and an eps"
        if weight is None or eps is None or tuple(weight.shape) != (channels,):
            raise ValueError(f"convert_blocks: fold_norms: {like}, got {norm}")
        if weight.is_meta:
            raise ValueError(f"convert_blocks: fold_norms: {like} that can be tried, got one on meta")
        with torch.no_grad():
            u = torch.linspace(-1, 2, channels, dtype=weight.dtype, device=weight.device).unsqueeze(0)
            off = (norm(u) - F.rmsnorm(u, weight, eps)).abs().max()
            allowed = 8 * torch.finfo(weight.dtype).eps * weight.abs().max() * 3
        if not off <= allowed:
            raise ValueError(f"convert_blocks: fold_norms: {like}, got {norm}, which computes something else")
        found.add(float(eps))
    if len(found) != 1:
        raise ValueError(f"convert_blocks: fold_norms: expected norms with one eps, got {sorted(found)}")
    return found.pop()


def _begin_plain(site: HyperConnection) -> None:
    """u is the mean of the streams, and each of them becomes their mean plus f; without a residual mix, itself plus f, which
    is the same as long as the streams are copies of each other."""
    n, numerics = site.streams, site.numerics
    with torch.no_grad():
        site.alpha.zero_()
        site.beta.zero_()
        site.beta[:n] = _logit(1 / n - numerics.pre_eps)
        site.beta[n : 2 * n] = _logit((1 - numerics.post_eps) / numerics.post_mult)


def _logit(p: float) -> float:
    """The number whose sigmoid is p; of 1, one whose sigmoid is 1 up to rounding."""
    return 40.0 if p >= 1 else math.log(p / (1 - p))
