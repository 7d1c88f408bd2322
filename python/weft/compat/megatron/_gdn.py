# SPDX-License-Identifier: Apache-2.0
"""What comes before the gated delta rule in Megatron's GatedDeltaNet, fused and in plain PyTorch: functions with
the arguments that Megatron's methods pass on."""

import functools

import torch
from torch import Tensor, nn

from weft.compat import _require as require
from weft.torch import GdnHeads, GdnOptions, GdnPieces, gdn_pre
from weft.torch.grads import any_takes_part

from ._switch import uses_native

_EPS = 1e-6  # of the l2 norm, inside the root


def fused_mega_pre_gated_delta_rule(
    qkvzba: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    num_key_heads: int,
    num_value_heads: int,
    key_head_dim: int,
    value_head_dim: int,
    use_qk_l2norm: bool = True,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cp_group=None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Projection rows [s, b, columns] -> query, key [b, s, Hv, Dk], value, gate [b, s, Hv, Dv], beta and g [b, s, Hv],
    in one pass. A bias, key and value heads of different widths and a call without the norm are served, too. seq_idx
    follows from cu_seqlens, and is not looked at; nothing is read back from the device, but for cu_seqlens where a
    cp_group of several ranks has the tokens. Each rank then gives its rows, and the cu_seqlens of the whole."""
    op = "fused_mega_pre_gated_delta_rule"
    sizes = (num_key_heads, num_value_heads, key_head_dim, value_head_dim)
    heads = _arguments(op, qkvzba, conv1d_weight, sizes, cp_group if uses_native() else None)
    settings = {"use_qk_l2norm": use_qk_l2norm, "cu_seqlens": cu_seqlens}
    if uses_native():
        return _native(qkvzba, conv1d_weight, conv1d_bias, A_log, dt_bias, heads, **settings)
    rows = qkvzba.transpose(0, 1)
    parameters = (conv1d_weight, A_log, dt_bias, conv1d_bias)
    settings = {"heads": heads, "options": GdnOptions(l2norm=use_qk_l2norm, l2_eps=_EPS)}
    settings["main_grad"] = any_takes_part(*parameters)
    if several(cp_group):
        return tuple(pieces_of(cp_group, rows, cu_seqlens).pre(rows, *parameters, **settings)[:6])
    return tuple(gdn_pre(rows, *parameters, **settings, cu_seqlens=cu_seqlens)[:6])


fused_streamed_pre_gated_delta_rule = fused_mega_pre_gated_delta_rule


def native_pre_gated_delta_rule(
    qkvzba: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    num_key_heads: int,
    num_value_heads: int,
    key_head_dim: int,
    value_head_dim: int,
    use_qk_l2norm: bool = True,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cp_group=None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What fused_mega_pre_gated_delta_rule computes, in plain PyTorch."""
    sizes = (num_key_heads, num_value_heads, key_head_dim, value_head_dim)
    heads = _arguments("native_pre_gated_delta_rule", qkvzba, conv1d_weight, sizes, cp_group)
    return _native(qkvzba, conv1d_weight, conv1d_bias, A_log, dt_bias, heads, use_qk_l2norm, cu_seqlens)


def several(group) -> bool:
    return group is not None and group.size() > 1


def pieces_of(group, rows: Tensor, cu_seqlens: Tensor | None) -> GdnPieces:
    """How the tokens of [b, s, ...] on all ranks make up the sequences. The offsets are those of the whole, which all ranks
    have alike; they are read on the host."""
    offsets = None if cu_seqlens is None else tuple(cu_seqlens.tolist())
    return _pieces_within(group)(rows.shape[1], rows.shape[0], offsets)


# Ranks agree on pieces when they make them, and all of a group make them anew at the same calls: what one has kept, all have. Of
# groups together that would not hold, for a rank may be in another one with calls of its own.
@functools.cache
def _pieces_within(group):
    @functools.lru_cache(maxsize=16)
    def pieces(tokens: int, batch: int, offsets: tuple[int, ...] | None) -> GdnPieces:
        return GdnPieces(tokens, batch=batch, cu_seqlens=offsets, group=group)

    return pieces


def _arguments(op: str, qkvzba: Tensor, weight: Tensor, sizes: tuple[int, ...], cp_group) -> GdnHeads:
    heads = GdnHeads(*sizes)
    if several(cp_group):
        raise NotImplementedError(f"{op}: cp_group: expected one rank in plain PyTorch: give the rows of all tokens")
    require.tensor(op, "qkvzba", qkvzba)
    require.tensor(op, "conv1d_weight", weight)
    if qkvzba.ndim != 3 or qkvzba.shape[2] != heads.columns:
        raise ValueError(f"{op}: qkvzba: expected (s, b, {heads.columns}), got {tuple(qkvzba.shape)}")
    if weight.shape[0] != heads.channels or weight.ndim not in (2, 3):
        raise ValueError(f"{op}: conv1d_weight: expected ({heads.channels}, 1, W), got {tuple(weight.shape)}")
    return heads


def _native(qkvzba, weight, bias, A_log, dt_bias, heads: GdnHeads, use_qk_l2norm, cu_seqlens) -> tuple[Tensor, ...]:
    full = require.full(qkvzba)
    rows = qkvzba.transpose(0, 1).to(full)
    steps = rows.shape[1]
    keys, values = heads.key_heads * heads.key_dim, heads.value_heads * heads.value_dim
    qkv, z, b, a = rows.split([2 * keys + values, values, heads.value_heads, heads.value_heads], -1)
    taps = weight.reshape(weight.shape[0], -1).to(full)
    width = taps.shape[1]
    place = torch.arange(steps, device=rows.device)
    first, used = torch.zeros_like(place), torch.ones_like(place, dtype=torch.bool)
    if cu_seqlens is not None:
        first = cu_seqlens[(torch.bucketize(place.to(cu_seqlens.dtype), cu_seqlens, right=True) - 1).clamp_min(0)]
        used = place < cu_seqlens[-1]
    padded = nn.functional.pad(qkv, (0, 0, width - 1, 0))
    u = 0 if bias is None else bias.to(full)
    for j in range(width):
        inside = (place - (width - 1) + j >= first).unsqueeze(-1)
        u = u + torch.where(inside, padded[:, j : j + steps], 0) * taps[:, j]
    y = nn.functional.silu(u)
    query, key = (t.unflatten(-1, (heads.key_heads, heads.key_dim)) for t in y[..., : 2 * keys].split(keys, -1))
    if use_qk_l2norm:
        query, key = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + _EPS) for t in (query, key))
    repeat = heads.value_heads // heads.key_heads
    value, gate = (t.unflatten(-1, (heads.value_heads, heads.value_dim)) for t in (y[..., 2 * keys :], z))
    g = -A_log.to(full).exp() * nn.functional.softplus(a + dt_bias.to(full))
    results = (query.repeat_interleave(repeat, 2), key.repeat_interleave(repeat, 2), value, gate, b.sigmoid())
    dtype = qkvzba.dtype

    def kept(t: Tensor) -> Tensor:
        return torch.where(used.view(1, -1, *[1] * (t.ndim - 2)), t, 0).contiguous()

    return *(kept(t).to(dtype) for t in results), kept(g)
