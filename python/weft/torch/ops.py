# SPDX-License-Identifier: Apache-2.0
"""The operators, registered with PyTorch as torch.ops.weft.* (register.py).

Results are fresh, contiguous or in the memory order of x, one storage each, and never alias an input.

Gradients that nobody wants come back as tensors without elements, since a registered operator has a fixed number of
results; `want`, the last argument of such an operator, lists which ones are wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from .register import define, differentiate, planned, wanted

# ---- shapes of results -------------------------------------------------------------------------------------------


def maybe(wanted: bool, like: Tensor) -> Tensor:
    """An empty tensor like `like`, in its memory order, or one without elements."""
    return torch.empty_like(like) if wanted else like.new_empty(0)


def wide(x: Tensor) -> torch.dtype:
    """The dtype of coefficients: fp32, or float64 on the reference backend."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def single(x: Tensor) -> Tensor:
    """An empty [..., C] beside streams [..., n, C]."""
    return x.new_empty(x.shape[:-2] + x.shape[-1:])


def raw(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Raw projection and mean square."""
    dtype = wide(x)
    return x.new_empty((*x.shape[:-2], rows), dtype=dtype), x.new_empty(x.shape[:-2], dtype=dtype)


def coefficients(lead, streams: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """pre, post and res, or pre, post and logits."""
    dtype = wide(like)
    return (
        like.new_empty((*lead, streams), dtype=dtype),
        like.new_empty((*lead, streams), dtype=dtype),
        like.new_empty((*lead, streams, streams), dtype=dtype),
    )


def streams_of(gates: int) -> int:
    """n from 2n + n*n."""
    streams = int((gates + 1) ** 0.5) - 1
    if streams < 1 or streams * (streams + 2) != gates:
        raise ValueError(f"coefficients: expected 2n + n*n numbers a token, got {gates}")
    return streams


def rows_of(grad: Tensor | None, like: Tensor) -> Tensor | None:
    """A gradient as the library can read it: a copy where its leading dimensions are not one run of tokens."""
    if grad is None or grad.is_contiguous() or grad.stride() == like.stride():
        return grad
    return grad.contiguous()


def dense(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.contiguous()


# ---- projection --------------------------------------------------------------------------------------------------


def _project_outputs(x, phi, norm_weight, precision):
    return raw(x, phi.shape[0])


def _project_plan(precision):
    return planned("mhc_project_fwd", (0, 1, 2, ~0, ~1), precision=precision)


def _project_save(ctx, inputs, output):
    x, phi, norm_weight, ctx.precision = inputs
    ctx.save_for_backward(x, phi, norm_weight)


def _project_backward(ctx, d_h, d_ms):
    x, phi, norm_weight = ctx.saved_tensors
    want = list(ctx.needs_input_grad[:3])
    args = (x, phi, norm_weight, dense(d_h), dense(d_ms), ctx.precision, want)
    return *differentiate(ctx, "mhc_project_bwd", want, *args), None


def _project_bwd_outputs(x, phi, norm_weight, d_h, d_ms, precision, want):
    return maybe(want[0], x), maybe(want[1], phi), maybe(want[2], x if norm_weight is None else norm_weight)


def _project_bwd_plan(precision, want):
    return planned("mhc_project_bwd", (0, 1, 2, 3, 4, *wanted(want)), precision=precision)


define(
    "mhc_project(Tensor x, Tensor phi, Tensor? norm_weight, int precision) -> (Tensor, Tensor)",
    _project_outputs,
    _project_plan,
    _project_save,
    _project_backward,
)
define(
    "mhc_project_bwd(Tensor x, Tensor phi, Tensor? norm_weight, Tensor? d_h, Tensor? d_ms, int precision, bool[] want)"
    " -> (Tensor, Tensor, Tensor)",
    _project_bwd_outputs,
    _project_bwd_plan,
)

# ---- gates, Sinkhorn, and both in one ----------------------------------------------------------------------------


def _coef_outputs(h, ms, alpha, beta, numerics):
    return coefficients(h.shape[:-1], streams_of(h.shape[-1]), h)


def _coef_save(ctx, inputs, output):
    *tensors, ctx.numerics = inputs
    ctx.save_for_backward(*tensors)


def _coef_bwd_outputs(h, ms, alpha, beta, d_pre, d_post, d_res, numerics, want):
    return tuple(maybe(w, t) for w, t in zip(want, (h, ms, alpha, beta), strict=True))


def _define_coef(name: str) -> None:
    """`mhc_coef` and `mhc_scale` differ in what their third result is: res or logits."""

    def plan(numerics):
        return planned(f"{name}_fwd", (0, 1, 2, 3, ~0, ~1, ~2), ("numerics", tuple(numerics)))

    def plan_bwd(numerics, want):
        return planned(f"{name}_bwd", (0, 1, 2, 3, 4, 5, 6, *wanted(want)), ("numerics", tuple(numerics)))

    def backward(ctx, *grads):
        want = list(ctx.needs_input_grad[:4])
        args = (*ctx.saved_tensors, *map(dense, grads), ctx.numerics, want)
        return *differentiate(ctx, f"{name}_bwd", want, *args), None

    define(
        f"{name}(Tensor h, Tensor ms, Tensor alpha, Tensor beta, float[] numerics) -> (Tensor, Tensor, Tensor)",
        _coef_outputs,
        plan,
        _coef_save,
        backward,
    )
    define(
        f"{name}_bwd(Tensor h, Tensor ms, Tensor alpha, Tensor beta, Tensor? d_pre, Tensor? d_post, Tensor? d_res,"
        " float[] numerics, bool[] want) -> (Tensor, Tensor, Tensor, Tensor)",
        _coef_bwd_outputs,
        plan_bwd,
    )


_define_coef("mhc_coef")
_define_coef("mhc_scale")


def _sinkhorn_outputs(logits, numerics):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _sinkhorn_plan(numerics):
    return planned("mhc_sinkhorn_fwd", (0, ~0), ("numerics", tuple(numerics)))


def _sinkhorn_save(ctx, inputs, output):
    logits, ctx.numerics = inputs
    ctx.save_for_backward(logits)


def _sinkhorn_backward(ctx, d_res):
    (logits,) = ctx.saved_tensors
    return torch.ops.weft.mhc_sinkhorn_bwd(logits, dense(d_res), ctx.numerics), None


def _sinkhorn_bwd_outputs(logits, d_res, numerics):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _sinkhorn_bwd_plan(numerics):
    return planned("mhc_sinkhorn_bwd", (0, 1, ~0), ("numerics", tuple(numerics)))


define(
    "mhc_sinkhorn(Tensor logits, float[] numerics) -> Tensor",
    _sinkhorn_outputs,
    _sinkhorn_plan,
    _sinkhorn_save,
    _sinkhorn_backward,
)
define(
    "mhc_sinkhorn_bwd(Tensor logits, Tensor d_res, float[] numerics) -> Tensor",
    _sinkhorn_bwd_outputs,
    _sinkhorn_bwd_plan,
)

# ---- aggregate ---------------------------------------------------------------------------------------------------


def _aggregate_outputs(x, pre):
    return single(x)


def _aggregate_plan():
    return planned("mhc_aggregate_fwd", (0, 1, ~0))


def _aggregate_save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _aggregate_backward(ctx, d_u):
    want = list(ctx.needs_input_grad[:2])
    return differentiate(ctx, "mhc_aggregate_bwd", want, *ctx.saved_tensors, dense(d_u), want)


def _aggregate_bwd_outputs(x, pre, d_u, want):
    return maybe(want[0], x), maybe(want[1], pre)


def _aggregate_bwd_plan(want):
    return planned("mhc_aggregate_bwd", (0, 1, 2, *wanted(want)))


define(
    "mhc_aggregate(Tensor x, Tensor pre) -> Tensor",
    _aggregate_outputs,
    _aggregate_plan,
    _aggregate_save,
    _aggregate_backward,
)
define(
    "mhc_aggregate_bwd(Tensor x, Tensor pre, Tensor d_u, bool[] want) -> (Tensor, Tensor)",
    _aggregate_bwd_outputs,
    _aggregate_bwd_plan,
)

# ---- post: expand the sub-layer's output and mix the streams -----------------------------------------------------
# `step` is an int64 tensor of one element, drawn from torch's generator: with it as the counter's step, masks repeat
# under checkpointing and change with every replay of a captured graph, and no mask is stored.


def dropped(p: float, token_base: int) -> tuple:
    return (float(p), 0, 0, token_base, 0)


def post_scalars(numerics, p, token_base) -> tuple:
    return (("numerics", tuple(numerics)), ("dropout", dropped(p, token_base)))


def _post_outputs(x, f, post, res, bias, step, numerics, p, token_base):
    return torch.empty_like(x)


def _post_plan(numerics, p, token_base):
    return planned("mhc_post_fwd", (0, 1, 4, 2, 3, ~0), *post_scalars(numerics, p, token_base), step=5)


def _post_save(ctx, inputs, output):
    *tensors, ctx.numerics, ctx.p, ctx.token_base = inputs
    ctx.save_for_backward(*tensors)


def _post_backward(ctx, d_y):
    x, *rest = ctx.saved_tensors
    want = list(ctx.needs_input_grad[:5])
    args = (x, *rest, rows_of(d_y, x), ctx.numerics, ctx.p, ctx.token_base, want)
    return *differentiate(ctx, "mhc_post_bwd", want, *args), None, None, None, None


def _post_bwd_outputs(x, f, post, res, bias, step, d_y, numerics, p, token_base, want):
    d_bias = maybe(want[4], x if bias is None else bias)
    return maybe(want[0], x), maybe(want[1], f), maybe(want[2], post), maybe(want[3], res), d_bias


def _post_bwd_plan(numerics, p, token_base, want):
    d_x, d_f, d_post, d_res, d_bias = wanted(want)
    order = (0, 1, 4, 2, 3, 6, d_x, d_f, d_bias, d_post, d_res)
    return planned("mhc_post_bwd", order, *post_scalars(numerics, p, token_base), step=5)


POST_TENSORS = "Tensor x, Tensor f, Tensor post, Tensor res, Tensor? bias, Tensor? step"
POST_SCALARS = "float[] numerics, float p, int token_base"

define(
    f"mhc_post({POST_TENSORS}, {POST_SCALARS}) -> Tensor",
    _post_outputs,
    _post_plan,
    _post_save,
    _post_backward,
)
define(
    f"mhc_post_bwd({POST_TENSORS}, Tensor d_y, {POST_SCALARS}, bool[] want)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _post_bwd_outputs,
    _post_bwd_plan,
)

# ---- expand and contract -----------------------------------------------------------------------------------------


def _expand_outputs(u, streams):
    return u.new_empty((*u.shape[:-1], streams, u.shape[-1]))


def _expand_plan(streams):
    return planned("mhc_expand_fwd", (0, ~0))


def _expand_save(ctx, inputs, output):
    pass


def _expand_backward(ctx, d_x):
    return torch.ops.weft.mhc_expand_bwd(dense(d_x)), None


def _expand_bwd_plan():
    return planned("mhc_expand_bwd", (0, ~0))


define(
    "mhc_expand(Tensor u, int streams) -> Tensor",
    _expand_outputs,
    _expand_plan,
    _expand_save,
    _expand_backward,
)
define("mhc_expand_bwd(Tensor d_x) -> Tensor", single, _expand_bwd_plan)


def _contract_outputs(x, kind):
    return single(x)


def _contract_plan(kind):
    return planned("mhc_contract_fwd", (0, ~0), ("kind", kind))


def _contract_save(ctx, inputs, output):
    x, ctx.kind = inputs
    ctx.streams = x.shape[-2]
    ctx.swapped = x.stride(-1) > x.stride(-2)


def _contract_backward(ctx, d_u):
    return torch.ops.weft.mhc_contract_bwd(dense(d_u), ctx.streams, ctx.kind, ctx.swapped), None


def _contract_bwd_outputs(d_u, streams, kind, swapped):
    """Laid out like x, which is not there any more: (n, C), or (C, n) where `swapped`."""
    if swapped:
        return d_u.new_empty((*d_u.shape, streams)).transpose(-1, -2)
    return d_u.new_empty((*d_u.shape[:-1], streams, d_u.shape[-1]))


def _contract_bwd_plan(streams, kind, swapped):
    return planned("mhc_contract_bwd", (0, ~0), ("kind", kind))


define(
    "mhc_contract(Tensor x, int kind) -> Tensor",
    _contract_outputs,
    _contract_plan,
    _contract_save,
    _contract_backward,
)
define(
    "mhc_contract_bwd(Tensor d_u, int streams, int kind, bool swapped) -> Tensor",
    _contract_bwd_outputs,
    _contract_bwd_plan,
)

# ---- learned head ------------------------------------------------------------------------------------------------


def head_scalars(rms_eps, rms_eps_kind, pre_eps) -> tuple:
    return (("rms_eps", rms_eps), ("rms_eps_kind", rms_eps_kind), ("pre_eps", pre_eps))


def _head_outputs(x, phi, alpha, beta, norm_weight, rms_eps, rms_eps_kind, pre_eps, precision):
    return single(x), *raw(x, x.shape[-2])


def _head_plan(rms_eps, rms_eps_kind, pre_eps, precision):
    scalars = head_scalars(rms_eps, rms_eps_kind, pre_eps)
    return planned("mhc_head_fwd", (0, 1, 4, 2, 3, ~0, ~1, ~2), *scalars, precision=precision)


def _head_save(ctx, inputs, output):
    *tensors, rms_eps, rms_eps_kind, pre_eps, precision = inputs
    ctx.rest = rms_eps, rms_eps_kind, pre_eps, precision
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*tensors, *output[1:])


def _head_backward(ctx, d_u, *unused):
    want = list(ctx.needs_input_grad[:5])
    if d_u is None:
        return (None,) * 9
    args = (*ctx.saved_tensors, dense(d_u), *ctx.rest, want)
    return *differentiate(ctx, "mhc_head_bwd", want, *args), None, None, None, None


def _head_bwd_outputs(x, phi, alpha, beta, norm_weight, h, ms, d_u, rms_eps, rms_eps_kind, pre_eps, precision, want):
    tensors = (x, phi, alpha, beta, x if norm_weight is None else norm_weight)
    return tuple(maybe(w, t) for w, t in zip(want, tensors, strict=True))


def _head_bwd_plan(rms_eps, rms_eps_kind, pre_eps, precision, want):
    d_x, d_phi, d_alpha, d_beta, d_norm_weight = wanted(want)
    order = (0, 1, 4, 2, 3, 5, 6, 7, d_x, d_phi, d_norm_weight, d_alpha, d_beta)
    return planned("mhc_head_bwd", order, *head_scalars(rms_eps, rms_eps_kind, pre_eps), precision=precision)


define(
    "mhc_head(Tensor x, Tensor phi, Tensor alpha, Tensor beta, Tensor? norm_weight, float rms_eps, int rms_eps_kind,"
    " float pre_eps, int precision) -> (Tensor, Tensor, Tensor)",
    _head_outputs,
    _head_plan,
    _head_save,
    _head_backward,
)
define(
    "mhc_head_bwd(Tensor x, Tensor phi, Tensor alpha, Tensor beta, Tensor? norm_weight, Tensor h, Tensor ms,"
    " Tensor d_u, float rms_eps, int rms_eps_kind, float pre_eps, int precision, bool[] want)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _head_bwd_outputs,
    _head_bwd_plan,
)

# ---- RMSNorm of the sub-layer's input ----------------------------------------------------------------------------


def _rmsnorm_outputs(u, weight, eps):
    return torch.empty_like(u, memory_format=torch.contiguous_format)


def _rmsnorm_plan(eps):
    return planned("rmsnorm_fwd", (0, 1, ~0), ("eps", eps))


def _rmsnorm_save(ctx, inputs, output):
    u, weight, ctx.eps = inputs
    ctx.save_for_backward(u, weight)


def _rmsnorm_backward(ctx, d_v):
    want = list(ctx.needs_input_grad[:2])
    return *differentiate(ctx, "rmsnorm_bwd", want, *ctx.saved_tensors, dense(d_v), ctx.eps, want), None


def _rmsnorm_bwd_outputs(u, weight, d_v, eps, want):
    return maybe(want[0], u), maybe(want[1], u if weight is None else weight)


def _rmsnorm_bwd_plan(eps, want):
    return planned("rmsnorm_bwd", (0, 1, 2, *wanted(want)), ("eps", eps))


define(
    "rmsnorm(Tensor u, Tensor? weight, float eps) -> Tensor",
    _rmsnorm_outputs,
    _rmsnorm_plan,
    _rmsnorm_save,
    _rmsnorm_backward,
)
define(
    "rmsnorm_bwd(Tensor u, Tensor? weight, Tensor d_v, float eps, bool[] want) -> (Tensor, Tensor)",
    _rmsnorm_bwd_outputs,
    _rmsnorm_bwd_plan,
)
