# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet layers of transformers' models: between their projections, one `gdn_pre`, the gated delta rule and the
gated norm. The cache is the model's own, with the contents that the model would give it.

One token with a cache is `gdn_rule_step`, on the cache's own state."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import torch as wt

Forward = Callable[..., Any]
ACTIVATIONS = ("silu", "swish")
MAX_WIDTH = 8

# ---- projections: the sections of a layer's input, by the names that a family has for them --------------------------


def fused_projection(layer: Any, x: Tensor) -> wt.GdnSections:
    """One projection with q, k, v, z of a key head side by side, one with b and a."""
    return wt.GdnSections(*layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x)))


def split_projection(layer: Any, x: Tensor) -> wt.GdnSections:
    z = layer.in_proj_z(x).unflatten(-1, (layer.num_v_heads, layer.head_v_dim))
    return wt.GdnSections(layer.in_proj_qkv(x), None, None, z, layer.in_proj_b(x), layer.in_proj_a(x))


def single_projections(layer: Any, x: Tensor) -> wt.GdnSections:
    key, value = (layer.num_k_heads, layer.head_k_dim), (layer.num_v_heads, layer.head_v_dim)
    q, k = (proj(x).unflatten(-1, key) for proj in (layer.q_proj, layer.k_proj))
    v, z = (proj(x).unflatten(-1, value) for proj in (layer.v_proj, layer.g_proj))
    return wt.GdnSections(q, k, v, z, layer.b_proj(x), layer.a_proj(x))


# ---- parts ----------------------------------------------------------------------------------------------------------


def refuses_layer(layer: Any) -> str | None:
    if layer.activation not in ACTIVATIONS:
        return f"hidden_act: expected one of {', '.join(ACTIVATIONS)}, got {layer.activation}"
    if layer.conv_kernel_size > MAX_WIDTH:
        return f"linear_conv_kernel_dim: expected at most {MAX_WIDTH}, got {layer.conv_kernel_size}"
    if layer.num_v_heads % layer.num_k_heads:
        return (
            f"linear_num_value_heads: expected a multiple of the {layer.num_k_heads} key heads, got {layer.num_v_heads}"
        )
    return None


def _columns(parts: wt.GdnSections) -> Tensor:
    """Input of the convolution as the cache takes it, [B, C, S]."""
    rows = torch.cat([t.flatten(2) for t in parts[:3] if t is not None], -1) if parts.k is not None else parts.q
    return rows.transpose(1, 2)


def _front(layer: Any, parts: wt.GdnSections, cache: Any, cu_seqlens: Tensor | None) -> wt.GdnPre:
    """The convolution and everything up to the rule; the cache's state of the convolution moves on."""
    parameters = (layer.conv1d.weight, layer.A_log, layer.dt_bias, layer.conv1d.bias)
    heads = wt.GdnHeads(layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
    beta_scale = 2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0
    common: dict[str, Any] = {
        "heads": heads,
        "options": wt.GdnOptions(beta_scale=beta_scale),
        "repeat": False,
        "gate": "none",
        "cu_seqlens": cu_seqlens,
    }
    if cache is None:
        return wt.gdn_pre(parts, *parameters, **common)
    state = cache.get_conv_state(layer.layer_idx, state_idx=0)
    steps = parts.q.shape[1]
    records = cache.is_recording_past(layer.layer_idx)
    if state is not None and steps == 1 and not records and not torch.is_grad_enabled():
        return wt.gdn_pre_step(parts, *parameters, state=state, **common)
    if state is not None:
        short = layer.conv_kernel_size - 1 - state.shape[-1]  # where a cache that records has seen fewer tokens
        # The cache writes its next state over this one, which backward may still need.
        state = F.pad(state, (short, 0)) if short > 0 else state.clone()
    cache.update_conv_state(_columns(parts), layer.layer_idx, conv_kernel_size=layer.conv_kernel_size)
    return wt.gdn_pre(parts, *parameters, state=state, **common)


def _decodes(x: Tensor, state: Tensor, records: bool) -> bool:
    """One token each, the cache's state of the rule in place."""
    one = x.shape[1] == 1 and not records and not torch.is_grad_enabled()
    return one and state.dtype in (torch.float32, x.dtype) and state.shape[0] == x.shape[0]


# ---- forwards: each is made from the one that it stands for ---------------------------------------------------------


def layer(sections: Callable[[Any, Tensor], wt.GdnSections], norm: str, out: str) -> Callable[[Forward], Forward]:
    """The forward of a layer by its projections and the names of its norm and of its output projection."""

    def make(original: Forward) -> Forward:
        def forward(
            self: Any,
            hidden_states: Tensor,
            cache_params: Any = None,
            attention_mask: Tensor | None = None,
            **kwargs: Any,
        ) -> Tensor:
            reason = refuses_layer(self)
            if reason:
                raise ValueError(f"weft.hf: {type(self).__name__}: {reason}")
            modeling = sys.modules[type(self).__module__]
            x = modeling.apply_mask_to_padding_states(hidden_states, attention_mask)
            cu_seqlens = kwargs.pop("cu_seq_lens_q", None)
            state = None if cache_params is None else cache_params.get_recurrent_state(self.layer_idx, state_idx=0)
            parts = sections(self, x)
            decodes = state is not None and _decodes(x, state, cache_params.is_recording_past(self.layer_idx))
            front = _front(self, parts, cache_params, cu_seqlens)
            if decodes:
                o, _ = wt.gdn_rule_step(front.query, front.key, front.value, front.beta, front.g, state=state)
            else:
                if state is not None and torch.is_grad_enabled():
                    state = state.clone()  # the cache writes its next state over this one, which backward still needs
                o, state = wt.gdn_rule(
                    *(front.query, front.key, front.value, front.beta, front.g),
                    cu_seqlens=cu_seqlens,
                    state=state,
                    final_state=cache_params is not None,
                )
                if cache_params is not None:
                    cache_params.update_recurrent_state(state, self.layer_idx)
            width = self.head_v_dim
            z: Any = parts.z
            o = getattr(self, norm)(o.reshape(-1, width), z.reshape(-1, width))
            y: Tensor = getattr(self, out)(o.view(*x.shape[:2], -1))
            return y

        modeling = sys.modules[original.__module__]
        hooked: Forward = modeling.force_accelerate_hooks("conv1d")(forward)
        return hooked

    return make


GATES = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


def refuses_norm(norm: Any) -> str | None:
    if norm.activation not in GATES:
        return f"output gate: expected one of {', '.join(GATES)}, got {norm.activation}"
    return None


def gated_norm(original: Forward) -> Forward:
    def forward(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
        reason = refuses_norm(self)
        if reason:
            raise ValueError(f"weft.hf: {type(self).__name__}: {reason}")
        same = gate.dtype == hidden_states.dtype
        o, z = (hidden_states, gate) if same else (hidden_states.float(), gate.float())
        y = wt.gdn_norm(o, z, self.weight, self.variance_epsilon, gate=GATES[self.activation])
        return y.to(hidden_states.dtype)

    return forward
