# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet as plain torch expressions, differentiable by autograd, in whatever dtype the inputs have: [G1] to
[G5] of docs/reference/math.md, token after token where the equations are. Written from the equations, not from the library."""

import math

import torch
import torch.nn.functional as TF
import weft.torch as wt


def split(proj, heads):
    """The six sections of rows [B, S, columns]."""
    heads = wt.GdnHeads(*heads)
    keys, values = heads.key_heads * heads.key_dim, heads.value_heads * heads.value_dim
    q, k, v, z, b, a = proj.split([keys, keys, values, values, heads.value_heads, heads.value_heads], -1)
    unit, value = (heads.key_heads, heads.key_dim), (heads.value_heads, heads.value_dim)
    return q.unflatten(-1, unit), k.unflatten(-1, unit), v.unflatten(-1, value), z.unflatten(-1, value), b, a


def sequences(batch, steps, cu_seqlens):
    """(row of the batch, first token, end) of every sequence."""
    if cu_seqlens is None:
        return [(n, 0, steps) for n in range(batch)]
    offsets = cu_seqlens.tolist()
    return [(0, first, end) for first, end in zip(offsets[:-1], offsets[1:], strict=True)]


def scatter(rows, like_shape, spans, pieces):
    """Tokens of sequences, each [tokens, ...], back in [B, S, ...]; zero where there is no sequence."""
    batch, steps = like_shape
    out = []
    for n in range(batch):
        here = [(first, end, p) for (row, first, end), p in zip(spans, pieces, strict=True) if row == n]
        parts, at = [], 0
        for first, end, piece in here:
            assert first == at
            parts.append(piece)
            at = end
        parts.append(rows.new_zeros((steps - at, *rows.shape[1:])))
        out.append(torch.cat(parts))
    return torch.stack(out) if out else rows.new_zeros((0, steps, *rows.shape[1:]))


def head_of(h, key_heads, value_heads, head_map):
    return h % key_heads if head_map == "tiled" else h // (value_heads // key_heads)


def gdn_pre(
    q, k, v, z, b, a, weight, a_log, dt_bias=None, bias=None, state=None, *, cu_seqlens=None, options, repeat=True,
    final_state=False, history=None,
):  # fmt: skip
    o = options
    batch, steps, key_heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    taps = weight.reshape(weight.shape[0], -1)
    width = taps.shape[1]
    slots = state.shape[2] if state is not None else width - 1 if history is None else history
    slots = max(slots, width - 1)
    channels = torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], -1)
    spans = sequences(batch, steps, cu_seqlens)
    ys, gs, betas, gates, finals = [], [], [], [], []
    for n, (row, first, end) in enumerate(spans):
        before = channels.new_zeros((slots, channels.shape[2])) if state is None else state[n].T
        x = torch.cat([before, channels[row, first:end]])
        u = sum(x[slots - width + 1 + j : slots - width + 1 + j + end - first] * taps[:, j] for j in range(width))
        u = u if bias is None else u + bias
        ys.append(TF.silu(u) if o.activation == "silu" else u)
        finals.append(x[x.shape[0] - slots :].T)
        arg = a[row, first:end] if dt_bias is None else a[row, first:end] + dt_bias
        g = -a_log.exp() * (arg.clamp_min(0) + torch.log1p(torch.exp(-arg.abs())))
        g = g / math.log(2) if o.g_log2 else g
        if o.g_chunk:
            g = torch.cat([c.cumsum(0) for c in g.split(o.g_chunk)]) if g.shape[0] else g
        gs.append(g)
        betas.append(o.beta_scale * b[row, first:end].sigmoid())
        gates.append(z[row, first:end])
    back = [
        scatter(like, (batch, steps), spans, pieces)
        for like, pieces in ((channels[0], ys), (a[0], gs), (b[0], betas), (z[0], gates))
    ] if batch else [channels, a, b, z]  # fmt: skip
    y, g, beta, gate = back
    keys = key_heads * key_dim
    unit = [y[..., :keys], y[..., keys : 2 * keys]]
    unit = [t.unflatten(-1, (key_heads, key_dim)) for t in unit]
    if o.l2norm:
        unit = [t / ((t * t).sum(-1, keepdim=True) + o.l2_eps).sqrt() for t in unit]
    query, key = o.q_scale * unit[0], unit[1]
    if repeat:
        reads = [head_of(h, key_heads, value_heads, o.head_map) for h in range(value_heads)]
        query, key = query[:, :, reads], key[:, :, reads]
    value = y[..., 2 * keys :].unflatten(-1, (value_heads, value_dim))
    final = torch.stack(finals) if finals else channels.new_zeros((0, channels.shape[2], slots))
    return (query, key, value, gate, beta, g) + ((final,) if final_state else ())


def gdn_rule(query, key, value, beta, g, state=None, *, scale=None, cu_seqlens=None, head_map="interleaved"):
    batch, steps, value_heads, value_dim = value.shape
    heads, key_dim = query.shape[2:]
    scale = key_dim**-0.5 if scale is None else scale
    reads = [head_of(h, heads, value_heads, head_map) for h in range(value_heads)]
    query, key = query[:, :, reads], key[:, :, reads]
    spans = sequences(batch, steps, cu_seqlens)
    pieces, finals = [], []
    for n, (row, first, end) in enumerate(spans):
        m = value.new_zeros((value_heads, key_dim, value_dim)) if state is None else state[n]
        outs = []
        for t in range(first, end):
            q, k, v = query[row, t], key[row, t], value[row, t]
            m = g[row, t].exp()[:, None, None] * m
            d = beta[row, t][:, None] * (v - torch.einsum("hkv,hk->hv", m, k))
            m = m + k[:, :, None] * d[:, None, :]
            outs.append(scale * torch.einsum("hkv,hk->hv", m, q))
        pieces.append(torch.stack(outs) if outs else value[row, first:first])
        finals.append(m)
    o = scatter(value[0], (batch, steps), spans, pieces) if batch else value
    return o, torch.stack(finals) if finals else value.new_zeros((0, value_heads, key_dim, value_dim))


def gdn_norm(o, z, weight=None, eps=1e-6, gate="silu"):
    """The gated norm over the last dimension."""
    factor = torch.sigmoid(z) if gate == "sigmoid" else z * torch.sigmoid(z)
    normed = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight) * factor
