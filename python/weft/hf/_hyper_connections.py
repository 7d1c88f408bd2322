# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections of transformers' models: sites, heads, and decoder layers whose merge goes together with the site
after it.

A decoder layer runs as site, norm, sub-layer, and merge, twice. Here the norm is part of the site's operator, and the
merge is one operator with the next site: inside a layer always, and from layer to layer where nothing else reads
what a layer returns. In that case a layer returns its streams unmerged, as the next layer takes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .. import torch as wt
from ..torch.stack import GLOBAL_HOOKS, _not_plain

BASE = wt.Numerics.preset("deepseek_v4")
MAX_STREAMS = 32
Forward = Callable[..., Any]
# Classes of norms whose forward is u / sqrt(mean(u^2) + variance_epsilon) * weight.
NORMS = ("DeepseekV4RMSNorm", "Glm5NextTextRMSNorm", "HYV4RMSNorm")


class Unmerged(NamedTuple):
    """Streams that the next site makes: post f + the residual mix of x, or x itself in HY-V4."""

    x: Tensor  # [B, S, n, C]
    f: Tensor  # [B, S, C]
    post: Tensor  # [B, S, n]
    res: Tensor | None  # [B, S, n, n]

    def merge(self) -> Tensor:
        return wt.post(self.x, self.f, self.post, self.res, numerics=BASE)


class Entered(NamedTuple):
    """A sub-layer's input, and what its merge needs."""

    x: Tensor
    post: Tensor
    res: Tensor | None
    v: Tensor  # [B, S, C]

    def after(self, f: Tensor) -> Unmerged:
        """The streams after the sub-layer, whose output is f."""
        if torch.promote_types(self.x.dtype, f.dtype) == self.x.dtype:
            f = f.to(self.x.dtype)  # as in the model's own sum
        return Unmerged(self.x, f.contiguous(), self.post, self.res)


def is_ours(module: nn.Module) -> bool:
    """Whether the class of a module has a forward of weft's."""
    return hasattr(type(module).forward, "weft_row")


def is_plain(module: nn.Module) -> bool:
    """Whether to call a module is to run its class's forward and nothing else."""
    if any(getattr(torch_module, hooks) for hooks in GLOBAL_HOOKS):
        return False
    return "forward" not in module.__dict__ and _not_plain(module) is None


def refuses_site(site: Any) -> str | None:
    if not 1 <= site.hc_mult <= MAX_STREAMS:
        return f"hc_mult: expected 1 to {MAX_STREAMS} streams, got {site.hc_mult}"
    return None


def refuses_layer(layer: Any) -> str | None:
    known = [site for site in (layer.attn_hc, layer.ffn_hc) if hasattr(site, "hc_mult")]  # not in a wrapper
    return next((reason for reason in map(refuses_site, known) if reason), None)


def is_independent(site: Any) -> bool:
    """Whether a site has no residual mix."""
    return site.scale.shape[0] == 2


def numerics_of(site: Any) -> wt.Numerics:
    own = BASE._replace(rms_eps=site.input_norm.eps, pre_eps=site.hc_eps)
    if is_independent(site):
        return own._replace(post_mult=site.hc_post_magnitude, post_eps=site.hc_eps)
    return own._replace(sinkhorn_eps=site.hc_eps, sinkhorn_iters=site.hc_sinkhorn_iters)


def joined_norm(norm: Any) -> dict[str, Any] | None:
    """The norm as arguments of the site's operator, or None where it has to be called."""
    kind = type(norm)
    known = kind.__name__ in NORMS and kind.forward.__module__ == kind.__module__
    if not known or not is_plain(norm):
        return None
    return {"sub_norm": True, "sub_weight": norm.weight, "sub_eps": norm.variance_epsilon}


def enter(site: Any, norm: Any, streams: Tensor | Unmerged) -> Entered:
    """Everything between a sub-layer and the one before it."""
    if not (is_ours(site) and is_plain(site)):
        x = streams.merge() if isinstance(streams, Unmerged) else streams
        post, *mix, u = site(x)
        return Entered(x, post.float(), mix[0].float() if mix else None, norm(u))
    inside = joined_norm(norm)
    options: dict[str, Any] = {"numerics": numerics_of(site), **(inside or {})}
    if isinstance(streams, Unmerged):
        y, u, _, post, res = wt.boundary(*streams, site.fn, site.scale, site.base, **options)
    else:
        y = streams.contiguous()
        u, _, post, res = wt.pre(y, site.fn, site.scale, site.base, **options)
    return Entered(y, post, res, u if inside else norm(u))


def leave(layer: nn.Module, streams: Unmerged, layers: tuple[nn.Module, ...]) -> Tensor | Unmerged:
    """What a layer returns: `layers` are those that the model's loop runs, or () where that is not known."""
    behind = [two for one, two in zip(layers, layers[1:], strict=False) if one is layer]
    joined = len(behind) == 1 and _takes_unmerged(layer, behind[0], streams)
    return streams if joined else streams.merge()


def _takes_unmerged(layer: Any, after: Any, streams: Unmerged) -> bool:
    for one in (layer, after):
        # A hook may look at the streams between layers, and a checkpoint of a layer keeps its input.
        if not is_plain(one) or (one.gradient_checkpointing and one.training):
            return False
    site = after.attn_hc
    here = is_ours(site) and is_plain(site) and site.fn.device == streams.x.device
    return here and site.hc_mult == streams.x.shape[-2]


# ---- forwards: each is made from the one that it stands for -----------------------------------------------------


def site(original: Forward) -> Forward:
    def forward(self: Any, hidden_streams: Tensor) -> tuple[Tensor, ...]:
        x = hidden_streams.contiguous()
        found: Any = wt.pre(x, self.fn, self.scale, self.base, numerics=numerics_of(self))
        return (found.post, found.u) if found.res is None else (found.post, found.res, found.u)

    return forward


def learned_head(original: Forward) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        eps = self.input_norm.eps
        return wt.head(x, self.hc_fn, self.hc_scale, self.hc_base, rms_eps=eps, pre_eps=self.eps)

    return forward


def mean_head(original: Forward) -> Forward:
    def forward(self: Any, hidden_streams: Tensor) -> Tensor:
        return wt.contract(hidden_streams.contiguous(), "mean")

    return forward


def deepseek_v4_layer(original: Forward) -> Forward:
    def forward(
        self: Any,
        hidden_states: Tensor | Unmerged,
        input_ids: Tensor | None = None,
        *,
        weft_layers: tuple[nn.Module, ...] = (),
        **kwargs: Any,
    ) -> Tensor | Unmerged:
        attn = enter(self.attn_hc, self.input_layernorm, hidden_states)
        f, _ = self.self_attn(attn.v, **kwargs)
        ffn = enter(self.ffn_hc, self.post_attention_layernorm, attn.after(f))
        return leave(self, ffn.after(self.mlp(ffn.v, input_ids=input_ids)), weft_layers)

    return forward


def indexed_layer(original: Forward) -> Forward:
    """A layer whose attention tells the next one which tokens it has chosen: of glm5_next and hy_v4."""

    def forward(
        self: Any,
        hidden_states: Tensor | Unmerged,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        prev_topk_indices: Tensor | None = None,
        *,
        weft_layers: tuple[nn.Module, ...] = (),
        **kwargs: Any,
    ) -> tuple[Tensor | Unmerged, Tensor | None]:
        attn = enter(self.attn_hc, self.input_layernorm, hidden_states)
        chosen = None
        if getattr(self, "block_type", None) == "linear_attention":
            f = self.self_attn(
                hidden_states=attn.v, cache_params=past_key_values, attention_mask=attention_mask, **kwargs
            )
        else:
            f, _, chosen = self.self_attn(
                hidden_states=attn.v,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                prev_topk_indices=prev_topk_indices,
                **kwargs,
            )
        ffn = enter(self.ffn_hc, self.post_attention_layernorm, attn.after(f))
        return leave(self, ffn.after(self.mlp(ffn.v)), weft_layers), chosen

    return forward


def loop(original: Forward) -> Forward:
    """The model's forward, which runs its own loop: each layer is told which one follows."""

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        layers = tuple(self.layers[: self.config.num_hidden_layers])
        if all(is_ours(layer) for layer in layers):
            kwargs["weft_layers"] = layers
        return original(self, *args, **kwargs)

    return forward
