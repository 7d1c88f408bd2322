# SPDX-License-Identifier: Apache-2.0
"""`pre` (everything in front of a sub-layer) and `boundary` (post of one sub-layer and pre of the next), registered as
the operators of ops.py are. Saved for backward: the streams, the raw projection and the mean square."""

from __future__ import annotations

import torch

from .ops import coefficients, dense, dropped, maybe, raw, rows_of, single
from .register import define, differentiate, planned, wanted

# ---- pre ---------------------------------------------------------------------------------------------------------


def pre_scalars(numerics, sub_eps) -> tuple:
    return (("numerics", tuple(numerics)), ("sub_eps", sub_eps))


def placed(sub_norm: bool, u):
    """The sub-layer's input as the library's (u, v): the aggregate itself, or its RMSNorm."""
    return (None, u) if sub_norm else (u, None)


def unnormed(gain: int):
    """For a backward pass in which the sub-layer's input is not part of the loss: the same without its norm's gain,
    argument and result number `gain`. The library refuses a gain without a gradient that comes through it."""

    def without(results, args, add):
        *args, want = args
        if want[gain] and not any(results[gain] is a for a in add):
            results[gain].zero_()
        args[gain] = None
        return *args, [w and k != gain for k, w in enumerate(want)]

    return without


def _pre_outputs(x, phi, alpha, beta, norm_weight, sub_weight, pre_in, numerics, sub_norm, sub_eps, precision):
    return single(x), *coefficients(x.shape[:-2], x.shape[-2], x), *raw(x, phi.shape[0])


def _pre_plan(numerics, sub_norm, sub_eps, precision):
    order = (0, 1, 4, 2, 3, 6, 5, ~4, ~5, ~1, ~2, ~3, *placed(sub_norm, ~0))
    return planned("mhc_pre_fwd", order, *pre_scalars(numerics, sub_eps), precision=precision)


def _pre_save(ctx, inputs, output):
    *tensors, numerics, sub_norm, sub_eps, precision = inputs
    ctx.rest = numerics, sub_norm, sub_eps, precision
    raw_outputs = output[4:]
    ctx.mark_non_differentiable(*raw_outputs)
    ctx.save_for_backward(*tensors, *raw_outputs)


def _pre_backward(ctx, d_u, d_pre, d_post, d_res, *unused):
    want = list(ctx.needs_input_grad[:7])
    args = (*ctx.saved_tensors, dense(d_u), dense(d_pre), dense(d_post), dense(d_res), *ctx.rest, want)
    return *differentiate(ctx, "mhc_pre_bwd", want, *args), None, None, None, None


def _pre_bwd_outputs(
    x, phi, alpha, beta, norm_weight, sub_weight, pre_in, h, ms, d_u, d_pre, d_post, d_res, numerics, sub_norm, sub_eps,
    precision, want,
):  # fmt: skip
    tensors = (x, phi, alpha, beta, norm_weight, sub_weight, pre_in)
    return tuple(maybe(w, x if t is None else t) for w, t in zip(want, tensors, strict=True))


def _pre_bwd_plan(numerics, sub_norm, sub_eps, precision, want):
    d_x, d_phi, d_alpha, d_beta, d_norm_weight, d_sub_weight, d_pre_in = wanted(want)
    order = (0, 1, 4, 6, 5, 2, 3, 7, 8, *placed(sub_norm, 9), 10, 11, 12)
    order = (*order, d_x, d_phi, d_norm_weight, d_alpha, d_beta, d_pre_in, d_sub_weight)
    return planned("mhc_pre_bwd", order, *pre_scalars(numerics, sub_eps), precision=precision)


_PRE_TENSORS = (
    "Tensor x, Tensor phi, Tensor alpha, Tensor beta, Tensor? norm_weight, Tensor? sub_weight, Tensor? pre_in"
)
_PRE_SCALARS = "float[] numerics, bool sub_norm, float sub_eps, int precision"

define(
    f"mhc_pre({_PRE_TENSORS}, {_PRE_SCALARS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _pre_outputs,
    _pre_plan,
    _pre_save,
    _pre_backward,
)
define(
    f"mhc_pre_bwd({_PRE_TENSORS}, Tensor h, Tensor ms, Tensor? d_u, Tensor? d_pre, Tensor? d_post, Tensor? d_res,"
    f" {_PRE_SCALARS}, bool[] want) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _pre_bwd_outputs,
    _pre_bwd_plan,
    needs=9,
    without=unnormed(5),
)

# ---- boundary ----------------------------------------------------------------------------------------------------


def boundary_scalars(numerics, sub_eps, p, token_base) -> tuple:
    return (*pre_scalars(numerics, sub_eps), ("dropout", dropped(p, token_base)))


def _boundary_outputs(
    x, f, post, res, bias, phi, alpha, beta, norm_weight, sub_weight, pre_in, step, numerics, sub_norm, sub_eps, p,
    token_base, precision,
):  # fmt: skip
    y = torch.empty_like(x)
    return y, single(x), *coefficients(x.shape[:-2], x.shape[-2], x), *raw(x, phi.shape[0])


def _boundary_plan(numerics, sub_norm, sub_eps, p, token_base, precision):
    order = (0, 1, 4, 2, 3, 5, 8, 6, 7, 10, 9, ~0, ~5, ~6, ~2, ~3, ~4, *placed(sub_norm, ~1))
    scalars = boundary_scalars(numerics, sub_eps, p, token_base)
    return planned("mhc_boundary_fwd", order, *scalars, precision=precision, step=11)


def _boundary_save(ctx, inputs, output):
    *tensors, numerics, sub_norm, sub_eps, p, token_base, precision = inputs
    ctx.rest = numerics, sub_norm, sub_eps, p, token_base, precision
    y, raw_outputs = output[0], output[5:]
    ctx.mark_non_differentiable(*raw_outputs)
    ctx.save_for_backward(*tensors, y, *raw_outputs)


def _boundary_backward(ctx, d_y, d_u, d_pre, d_post, d_res, *unused):
    want = list(ctx.needs_input_grad[:11])
    saved = ctx.saved_tensors
    upstream = (rows_of(d_y, saved[0]), dense(d_u), dense(d_pre), dense(d_post), dense(d_res))
    args = (*saved, *upstream, *ctx.rest, want)
    return *differentiate(ctx, "mhc_boundary_bwd", want, *args), *(None,) * 7


def _boundary_bwd_outputs(
    x, f, post, res, bias, phi, alpha, beta, norm_weight, sub_weight, pre_in, step, y, h, ms, d_y, d_u, d_pre, d_post,
    d_res, numerics, sub_norm, sub_eps, p, token_base, precision, want,
):  # fmt: skip
    tensors = (x, f, post, res, bias, phi, alpha, beta, norm_weight, sub_weight, pre_in)
    return tuple(maybe(w, x if t is None else t) for w, t in zip(want, tensors, strict=True))


def _boundary_bwd_plan(numerics, sub_norm, sub_eps, p, token_base, precision, want):
    d_x, d_f, d_post, d_res, d_bias, d_phi, d_alpha, d_beta, d_norm_weight, d_sub_weight, d_pre_in = wanted(want)
    order = (0, 1, 4, 2, 3, 12, 5, 8, 10, 9, 6, 7, 13, 14, 15, *placed(sub_norm, 16), 17, 18, 19)
    order = (*order, d_x, d_f, d_bias, d_post, d_res, d_phi, d_norm_weight, d_alpha, d_beta, d_pre_in, d_sub_weight)
    scalars = boundary_scalars(numerics, sub_eps, p, token_base)
    return planned("mhc_boundary_bwd", order, *scalars, precision=precision, step=11)


BOUNDARY_TENSORS = (
    "Tensor x, Tensor f, Tensor post, Tensor res, Tensor? bias, Tensor phi, Tensor alpha, Tensor beta,"
    " Tensor? norm_weight, Tensor? sub_weight, Tensor? pre_in, Tensor? step"
)
BOUNDARY_SCALARS = "float[] numerics, bool sub_norm, float sub_eps, float p, int token_base, int precision"

define(
    f"mhc_boundary({BOUNDARY_TENSORS}, {BOUNDARY_SCALARS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _boundary_outputs,
    _boundary_plan,
    _boundary_save,
    _boundary_backward,
)
define(
    f"mhc_boundary_bwd({BOUNDARY_TENSORS}, Tensor? y, Tensor h, Tensor ms, Tensor? d_y, Tensor? d_u, Tensor? d_pre,"
    f" Tensor? d_post, Tensor? d_res, {BOUNDARY_SCALARS}, bool[] want) -> (Tensor, Tensor, Tensor, Tensor, Tensor,"
    " Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _boundary_bwd_outputs,
    _boundary_bwd_plan,
    needs=16,
    without=unnormed(9),
)
