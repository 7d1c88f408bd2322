# SPDX-License-Identifier: Apache-2.0
"""weft's operators as functions of tensors, with gradients.

Shapes: `...` stands for any leading dimensions (tokens), n for streams, C for channels, N for 2n + n*n. Streams are
[..., n, C] in any memory order that is dense in its last two dimensions: memory laid out as (..., C, n) is passed as
`x.transpose(-1, -2)`, a view. Results shaped like x are laid out like x. Activations are float32, bfloat16 or float16
(float64 on the CPU goes to the reference backend), coefficients float32, parameters any of these.

Independent hyper-connections have no residual mix. A site with an alpha of two elements instead of three has none: N is 2n,
and res is None. A merge without res lets the streams pass unchanged.

`numerics` is a Numerics or the name of a preset. `main_grad=True` adds the gradients of parameters to their `main_grad`
where they have one when backward comes, and returns them to autograd where they have none."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _C
from . import ops, ops_rebuild  # noqa: F401  (register the operators)
from .distributed import arrived
from .grads import GradX, call_and_sum, operation
from .numerics import RMS_EPS_KINDS, Numerics, choice, pack

PRECISIONS = ("full", "tf32")
CONTRACTIONS = ("mean", "sum")


class Pre(NamedTuple):
    """What comes before a sub-layer: its input and the coefficients."""

    u: Tensor  # [..., C]
    pre: Tensor  # [..., n]
    post: Tensor  # [..., n]
    res: Tensor | Any  # [..., n, n]; None without a residual mix, which types do not show


class Boundary(NamedTuple):
    """The streams after one sub-layer, and what comes before the next."""

    y: Tensor  # [..., n, C]
    u: Tensor
    pre: Tensor
    post: Tensor
    res: Tensor | Any


class Source(NamedTuple):
    """What `post` made streams of: they need not be kept for backward as long as this is."""

    x: Tensor
    f: Tensor
    post: Tensor
    res: Tensor | None = None
    bias: Tensor | None = None
    dropout: float = 0.0
    dropout_step: Tensor | None = None
    token_base: int = 0


class ReplayLayer(NamedTuple):
    """One sub-layer of a replay: what its forward pass stored, and what is wanted."""

    pre: Tensor | None = None
    f: Tensor | None = None
    post: Tensor | None = None
    res: Tensor | None = None
    bias: Tensor | None = None
    sub_weight: Tensor | None = None
    sub_norm: bool = False  # u is the RMSNorm of the aggregate
    sub_eps: float = 1e-6
    want_u: bool = True
    want_y: bool = True
    dropout: float = 0.0
    dropout_step: Tensor | None = None
    token_base: int = 0


def draw_step(like: Tensor) -> Tensor:
    """A step for dropout from torch's generator: 8 bytes on the device of `like`; no host synchronisation."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=like.device)


def _dropout(like: Tensor, p: float, training: bool, step: Tensor | None) -> tuple[float, Tensor | None]:
    if not training or p == 0:
        return 0.0, None
    return p, draw_step(like) if step is None else step


def _as_streams(x: Tensor, f: Tensor) -> Tensor:
    """Under autocast a sub-layer's output comes in the autocast dtype; the streams keep theirs."""
    f = arrived(f)
    return f.to(x.dtype) if f.dtype != x.dtype and torch.is_autocast_enabled(x.device.type) else f


def _lean(
    name: str, tensors: tuple, scalars: tuple, source: Source | None, main_grad: bool = False, options: tuple = ()
):
    """Calls operator `name` in its form that keeps fewer streams (ops_rebuild.py)."""
    rebuild = operation(f"{name}_rebuild", main_grad)
    if source is None:
        return rebuild(*tensors, *(None,) * 6, *scalars, 0.0, 0, *options)
    x, f, post, res, bias, p, step, token_base = source
    if p and step is None:
        raise ValueError(f"{name}: source: expected dropout_step beside dropout, got None")
    # Detached: a source is there to be read, and its gradients come by way of the streams that were made of it.
    made_of = (None if t is None else t.detach() for t in (x, _as_streams(x, f), post, res, bias, step))
    return rebuild(*tensors, *made_of, *scalars, float(p), token_base, *options)


def project(
    x: Tensor,
    phi: Tensor,
    norm_weight: Tensor | None = None,
    *,
    precision: str = "full",
    main_grad: bool = False,
    grad_x: GradX | None = None,
) -> tuple[Tensor, Tensor]:
    """Raw projection h [..., R] and mean square ms [...] of streams x, both float32.

    phi is [R, n, C] with any strides, or [R, n*C]; norm_weight [n, C] or [n*C] is a gain folded into phi. precision,
    "full" or "tf32", decides nothing today."""
    args = (x, phi, norm_weight, choice("mhc_project: precision", precision, PRECISIONS))
    return call_and_sum("mhc_project", args, grad_x, GradX.LAST, main_grad)


def _mix(alpha: Tensor, res: Tensor) -> Tensor | Any:
    """What a call has of the residual mix: an operator returns a tensor without elements where there is none."""
    return None if alpha.shape[0] == 2 else res


def scale(
    h: Tensor, ms: Tensor, alpha: Tensor, beta: Tensor, numerics: Numerics | str, *, main_grad: bool = False
) -> tuple[Tensor, Tensor, Tensor | Any]:
    """Gates: pre [..., n], post [..., n] and the residual logits [..., n, n] from a projection. alpha [3], beta [N]; with
    alpha [2] there are no logits."""
    pre, post, logits = operation("mhc_scale", main_grad)(h, ms, alpha, beta, pack(numerics))
    return pre, post, _mix(alpha, logits)


def sinkhorn(logits: Tensor, numerics: Numerics | str) -> Tensor:
    """The doubly stochastic matrix of each [n, n] of logits, by the rule of `numerics`."""
    return torch.ops.weft.mhc_sinkhorn.default(logits, pack(numerics))


def coef(
    h: Tensor, ms: Tensor, alpha: Tensor, beta: Tensor, numerics: Numerics | str, *, main_grad: bool = False
) -> tuple[Tensor, Tensor, Tensor | Any]:
    """Gates and Sinkhorn in one call: pre [..., n], post [..., n] and res [..., n, n], or None with alpha [2]."""
    pre, post, res = operation("mhc_coef", main_grad)(h, ms, alpha, beta, pack(numerics))
    return pre, post, _mix(alpha, res)


def aggregate(x: Tensor, pre: Tensor, *, grad_x: GradX | None = None) -> Tensor:
    """u [..., C] = sum over streams of pre[i] x[i]."""
    return call_and_sum("mhc_aggregate", (x, pre), grad_x, GradX.ADDER)


def post(
    x: Tensor,
    f: Tensor,
    post: Tensor,
    res: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    numerics: Numerics | str,
    dropout: float = 0.0,
    training: bool = True,
    dropout_step: Tensor | None = None,
    token_base: int = 0,
    grad_x: GradX | None = None,
    source: Source | None = None,
) -> Tensor:
    """The streams after a sub-layer with output f [..., C]: y[o] = dropout(post[o] (f + bias)) + sum_i W(i, o) x[i],
    with W from res as `numerics.apply` says. Without res the sum is x[o].

    Masks are not stored: they are a function of a step that is drawn from torch's generator (or given as an int64
    tensor), so checkpointing and graph replay behave. token_base is the global index of the first token, for shards of
    a sequence that share a step.

    source is what a `post` or `boundary` with the same numerics made x of: backward then keeps the source, which that
    call keeps too, and makes x again."""
    p, step = _dropout(x, dropout, training, dropout_step)
    tensors, scalars = (x, _as_streams(x, f), post, res, bias, step), (pack(numerics), p, token_base)
    if source is None or not torch.is_grad_enabled():
        return call_and_sum("mhc_post", (*tensors, *scalars), grad_x, GradX.WRITER)
    if grad_x is not None:
        raise ValueError("mhc_post: expected grad_x or source, got both")
    return _lean("mhc_post", tensors, scalars, source)


def expand(u: Tensor, streams: int) -> Tensor:
    """n copies of u: [..., C] to [..., n, C]."""
    return torch.ops.weft.mhc_expand.default(u, streams)


def contract(x: Tensor, kind: str = "mean") -> Tensor:
    """The mean or the sum of the streams: [..., n, C] to [..., C]."""
    return torch.ops.weft.mhc_contract.default(x, choice("mhc_contract: kind", kind, CONTRACTIONS))


def head(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    beta: Tensor,
    norm_weight: Tensor | None = None,
    *,
    rms_eps: float = 1e-6,
    rms_eps_kind: str = "inside",
    pre_eps: float = 1e-6,
    precision: str = "full",
    main_grad: bool = False,
) -> Tensor:
    """Learned contraction: gates from a projection of all streams, then their weighted sum. phi [n, n, C] or [n, n*C],
    alpha [1], beta [n]. x is only read, so it stays available, for multi-token prediction for example."""
    kind = choice("mhc_head: rms_eps_kind", rms_eps_kind, RMS_EPS_KINDS)
    tf32 = choice("mhc_head: precision", precision, PRECISIONS)
    args = (x, phi, alpha, beta, norm_weight, float(rms_eps), kind, float(pre_eps), tf32)
    return operation("mhc_head", main_grad)(*args)[0]


def pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    beta: Tensor,
    norm_weight: Tensor | None = None,
    sub_weight: Tensor | None = None,
    pre_in: Tensor | None = None,
    *,
    numerics: Numerics | str,
    sub_norm: bool = False,
    sub_eps: float = 1e-6,
    precision: str = "full",
    main_grad: bool = False,
) -> Pre:
    """Everything before a sub-layer in one call: projection, gates, Sinkhorn, aggregate, and with sub_norm the
    sub-layer's RMSNorm (gain sub_weight [C], or 1). pre_in [..., n] makes the shifted form: u is aggregated with the
    coefficients that the previous site predicted."""
    tf32 = choice("mhc_pre: precision", precision, PRECISIONS)
    args = (
        x,
        phi,
        alpha,
        beta,
        norm_weight,
        sub_weight,
        pre_in,
        pack(numerics),
        sub_norm,
        float(sub_eps),
        tf32,
    )
    u, pre, post, res, *_ = operation("mhc_pre", main_grad)(*args)
    return Pre(u, pre, post, _mix(alpha, res))


def boundary(
    x: Tensor,
    f: Tensor,
    post: Tensor,
    res: Tensor | None,
    phi: Tensor,
    alpha: Tensor,
    beta: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    sub_weight: Tensor | None = None,
    pre_in: Tensor | None = None,
    *,
    numerics: Numerics | str,
    sub_norm: bool = False,
    sub_eps: float = 1e-6,
    dropout: float = 0.0,
    training: bool = True,
    dropout_step: Tensor | None = None,
    token_base: int = 0,
    precision: str = "full",
    main_grad: bool = False,
    source: Source | None = None,
    keep: bool = True,
) -> Boundary:
    """`post` of one sub-layer and `pre` of the next in one call; phi and what follows it belong to the next. res: None where
    the streams pass the merge unchanged.

    With keep=False backward does not keep y and rebuilds it; with a source, as for `post`, it does not keep x. Of a
    chain of streams every second one can go that way: made with keep=False, and read with a source."""
    p, step = _dropout(x, dropout, training, dropout_step)
    tf32 = choice("mhc_boundary: precision", precision, PRECISIONS)
    tensors = (x, _as_streams(x, f), post, res, bias, phi, alpha, beta, norm_weight, sub_weight, pre_in, step)
    scalars = (pack(numerics), sub_norm, float(sub_eps), p, token_base, tf32)
    if (source is None and keep) or not torch.is_grad_enabled():
        found = operation("mhc_boundary", main_grad)(*tensors, *scalars)
    else:
        found = _lean("mhc_boundary", tensors, scalars, source, main_grad, (keep,))
    y, u, pre, post, res, *_ = found
    return Boundary(y, u, pre, post, _mix(alpha, res))


def rmsnorm(u: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """u / sqrt(mean(u^2) + eps) * weight over the last dimension."""
    return torch.ops.weft.rmsnorm.default(u, weight, float(eps))


def replay(x: Tensor, layers: list[ReplayLayer], numerics: Numerics | str) -> list[tuple[Tensor | None, Tensor | None]]:
    """Rebuilds several sub-layers from the first stream tensor and what their forward passes stored, bit for bit as the
    single operators would: (u, y) of each, None where it is not wanted. Forward only."""
    if torch.is_grad_enabled() and any(
        isinstance(t, Tensor) and t.requires_grad for t in (x, *(t for layer in layers for t in layer))
    ):
        raise NotImplementedError("mhc_replay_fwd: it has no gradient: call it under torch.no_grad()")
    results = []
    for layer in layers:
        u = x.new_empty(x.shape[:-2] + x.shape[-1:]) if layer.want_u else None
        y = torch.empty_like(x) if layer.want_y and layer.f is not None else None
        results.append((u, y))
    _replay_into(x, layers, numerics, results)
    return results


def _replay_into(x: Tensor, layers: list[ReplayLayer], numerics: Numerics | str, results: list) -> None:
    """`replay` into memory that is there: (u, y) of each layer, None where it is not wanted."""
    rows = []
    for layer, (u, y) in zip(layers, results, strict=True):
        row = {name: getattr(layer, name) for name in ("pre", "f", "bias", "post", "res", "sub_eps")}
        row |= {"dropout": (float(layer.dropout), layer.token_base), "step": layer.dropout_step}
        row |= {"v" if layer.sub_norm else "u": u, "y": y, "sub_weight": layer.sub_weight if u is not None else None}
        rows.append(row)
    _C.replay(pack(numerics), torch.get_num_threads(), x, rows)
