# SPDX-License-Identifier: Apache-2.0
"""Hyper-connections in plain PyTorch, as the equations are: wide arithmetic, one rounding where a result is stored."""

import torch
from torch import Tensor, nn

from weft.compat import _into
from weft.compat import _require as require

from . import _arguments as check


def native_sinkhorn(input_logits: Tensor, num_iterations: int, eps: float = 1e-6) -> Tensor:
    """dev's rule: softmax of the rows plus eps, a column step, then rounds of rows and columns."""
    check.positive("native_sinkhorn", num_iterations)
    a = input_logits.to(require.full(input_logits)).softmax(-1) + eps
    a = a / (a.sum(-2, keepdim=True) + eps)
    for _ in range(num_iterations - 1):
        a = a / (a.sum(-1, keepdim=True) + eps)
        a = a / (a.sum(-2, keepdim=True) + eps)
    return a.to(input_logits.dtype)


def native_h_aggregate(x: Tensor, h_pre: Tensor) -> Tensor:
    """sum_j h_pre[j] x[j]: x [..., n, C], h_pre [..., n] -> [..., C]."""
    check.streams_and("native_h_aggregate", x, h_pre=(h_pre, 1))
    full = require.full(x)
    return (h_pre.to(full).unsqueeze(-1) * x.to(full)).sum(-2).to(x.dtype)


def native_h_aggregate_into(x: Tensor, h_pre: Tensor, out: Tensor) -> Tensor:
    """native_h_aggregate, stored in out."""
    require.tensor("native_h_aggregate_into", "x", x, 2)
    _into.same_memory("native_h_aggregate_into", out, x, (*x.shape[:-2], x.shape[-1]))
    return out.detach().copy_(native_h_aggregate(x, h_pre))


def native_h_post_bda(
    h_res: Tensor, original_residual: Tensor, h_post: Tensor, x: Tensor, bias: Tensor | None
) -> Tensor:
    """dev's merge: h_res^T residual + h_post (x + bias); original_residual [s, b, n, C], x [s, b, C]."""
    check.merge("native_h_post_bda", h_res, original_residual, h_post, x, bias)
    return merge(h_res.mT, original_residual, h_post, x, bias, 0.0, False)


def native_proj_rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """x [M, K], weight [N, K] -> x weight^T [M, N] and 1/(rms + eps) [M, 1], in x's dtype."""
    check.projection("native_proj_rms", x, weight)
    wide = x.to(require.full(x))
    r = 1 / (root(wide.square().mean(-1, keepdim=True)) + eps)
    return (wide @ weight.to(wide.dtype).T).to(x.dtype), r.to(x.dtype)


def native_proj_rms_compute_h(
    x: Tensor,
    weight: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    bias: Tensor,
    n: int,
    eps: float = 1e-6,
    compute_h_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What fused_proj_rms_compute_h computes."""
    alpha = check.gates("native_proj_rms_compute_h", x, weight, alpha_pre, alpha_post, alpha_res, bias, n)
    wide = x.to(require.full(x))
    rms = root(wide.square().mean(-1, keepdim=True))
    h = wide @ weight.to(wide.dtype).T / (rms + eps)
    pre, post, logits = gates(h, alpha.to(wide.dtype), bias.to(wide.dtype), n, compute_h_eps)
    return pre, post, logits, rms


def native_fused_add_3(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a + b + c, rounded once."""
    for name, value in (("a", a), ("b", b), ("c", c)):
        require.shape("native_fused_add_3", name, value, a.shape)
    full = require.full(a)
    return (a.to(full) + b.to(full) + c.to(full)).to(a.dtype)


def contract(hidden_states: Tensor, head_fn: Tensor, base: Tensor, scale: Tensor, n: int, eps: float) -> Tensor:
    full = require.full(hidden_states)
    wide = hidden_states.to(full)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    gate = torch.sigmoid(scale.to(full) * inverse * (wide @ head_fn.to(full).T) + base.to(full)) + eps
    return (gate.unsqueeze(-1) * wide.unflatten(-1, (n, -1))).sum(-2).to(hidden_states.dtype)


def exp_sinkhorn(logits: Tensor, iterations: int, eps: float, rule: str) -> Tensor:
    """The rules of main (clamp: no divisor is below eps) and of dsv4 (add: eps is added to it)."""
    a = torch.exp(logits - logits.amax(-1, keepdim=True))
    for axis in (-1, -2) * iterations:
        divisor = a.sum(axis, keepdim=True)
        a = a / (divisor.clamp(min=eps) if rule == "clamp" else divisor + eps)
    return a


def gates(h: Tensor, alpha: Tensor, bias: Tensor, n: int, pre_eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """h: normalised projections [..., N]; the logits stay flat."""
    factors = torch.cat([alpha[:1].expand(n), alpha[1:2].expand(n), alpha[2:].expand(n * n)])
    z = h * factors + bias
    pre, post, logits = z.split([n, n, n * n], -1)
    return torch.sigmoid(pre) + pre_eps, 2 * torch.sigmoid(post), logits


def merge(mix: Tensor, x: Tensor, post: Tensor, f: Tensor, bias: Tensor | None, p: float, training: bool) -> Tensor:
    """mix[..., o, i]: what output stream o takes of input stream i."""
    full = require.full(x)
    wide = f.to(full) if bias is None else f.to(full) + bias.to(full)
    branch = nn.functional.dropout(post.to(full).unsqueeze(-1) * wide.unsqueeze(-2), p, training)
    return (mix.to(full) @ x.to(full) + branch).to(x.dtype)


def root(mean_square: Tensor) -> Tensor:
    # The root has no derivative at 0; a token of zeros gets the gradient 0 instead of NaN.
    return mean_square.clamp(min=torch.finfo(mean_square.dtype).tiny).sqrt()
