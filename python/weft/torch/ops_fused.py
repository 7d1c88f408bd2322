# SPDX-License-Identifier: Apache-2.0
"""`pre` (everything in front of a sub-layer) and `boundary` (post of one sub-layer and pre of the next), registered as
the operators of ops.py are. Saved for backward: the streams, the raw projection and the mean square."""

from __future__ import annotations

import torch

from .ops import (
    coefficients,
    define,
    dense,
    differentiate,
    dropped,
    given,
    maybe,
    raw,
    rows_of,
    run,
    single,
)

# ---- pre ---------------------------------------------------------------------------------------------------------


def pre_scalars(numerics, sub_eps) -> tuple:
    return (("numerics", tuple(numerics)), ("sub_eps", sub_eps))


def placed(sub_norm: bool, u):
    """The sub-layer's input as the library's (u, v): the aggregate itself, or its RMSNorm."""
    return (None, u) if sub_norm else (u, None)


def normed(d_u, sub_weight, d_sub_weight, add: tuple):
    """The gain of the norm and its gradient, or neither where the sub-layer's input is not part of the loss: the
    library refuses a gain without a gradient that comes through it."""
    if d_u is not None:
        return sub_weight, d_sub_weight
    if d_sub_weight is not None and not any(d_sub_weight is a for a in add):
        d_sub_weight.zero_()
    return None, None


def _pre_outputs(x, phi, alpha, beta, norm_weight, sub_weight, pre_in, numerics, sub_norm, sub_eps, precision):
    return single(x), *coefficients(x.shape[:-2], x.shape[-2], x), *raw(x, phi.shape[0])


def _pre(out, x, phi, alpha, beta, norm_weight, sub_weight, pre_in, numerics, sub_norm, sub_eps, precision):
    u, pre, post, res, h, ms = out
    run(
        "mhc_pre_fwd",
        pre_scalars(numerics, sub_eps),
        *(x, phi, norm_weight, alpha, beta, pre_in, sub_weight),
        *(h, ms, pre, post, res, *placed(sub_norm, u)),
        precision=precision,
    )


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


def _pre_bwd(
    out, x, phi, alpha, beta, norm_weight, sub_weight, pre_in, h, ms, d_u, d_pre, d_post, d_res, numerics, sub_norm,
    sub_eps, precision, want, add=(),
):  # fmt: skip
    d_x, d_phi, d_alpha, d_beta, d_norm_weight, d_sub_weight, d_pre_in = map(given, out)
    sub_weight, d_sub_weight = normed(d_u, sub_weight, d_sub_weight, add)
    run(
        "mhc_pre_bwd",
        pre_scalars(numerics, sub_eps),
        *(x, phi, norm_weight, pre_in, sub_weight, alpha, beta, h, ms),
        *(*placed(sub_norm, d_u), d_pre, d_post, d_res),
        *(d_x, d_phi, d_norm_weight, d_alpha, d_beta, d_pre_in, d_sub_weight),
        add=add,
        precision=precision,
    )


_PRE_TENSORS = (
    "Tensor x, Tensor phi, Tensor alpha, Tensor beta, Tensor? norm_weight, Tensor? sub_weight, Tensor? pre_in"
)
_PRE_SCALARS = "float[] numerics, bool sub_norm, float sub_eps, int precision"

define(
    f"mhc_pre({_PRE_TENSORS}, {_PRE_SCALARS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _pre_outputs,
    _pre,
    _pre_save,
    _pre_backward,
)
define(
    f"mhc_pre_bwd({_PRE_TENSORS}, Tensor h, Tensor ms, Tensor? d_u, Tensor? d_pre, Tensor? d_post, Tensor? d_res,"
    f" {_PRE_SCALARS}, bool[] want) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _pre_bwd_outputs,
    _pre_bwd,
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


def _boundary(
    out, x, f, post, res, bias, phi, alpha, beta, norm_weight, sub_weight, pre_in, step, numerics, sub_norm, sub_eps, p,
    token_base, precision,
):  # fmt: skip
    y, u, pre_out, post_out, res_out, h, ms = out
    run(
        "mhc_boundary_fwd",
        boundary_scalars(numerics, sub_eps, p, token_base),
        *(x, f, bias, post, res, phi, norm_weight, alpha, beta, pre_in, sub_weight),
        *(y, h, ms, pre_out, post_out, res_out, *placed(sub_norm, u)),
        precision=precision,
        step=step,
    )


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


def _boundary_bwd(
    out, x, f, post, res, bias, phi, alpha, beta, norm_weight, sub_weight, pre_in, step, y, h, ms, d_y, d_u, d_pre,
    d_post, d_res, numerics, sub_norm, sub_eps, p, token_base, precision, want, add=(),
):  # fmt: skip
    d_x, d_f, d_post_in, d_res_in, d_bias, d_phi, d_alpha, d_beta, d_norm_weight, d_sub_weight, d_pre_in = map(
        given, out
    )
    sub_weight, d_sub_weight = normed(d_u, sub_weight, d_sub_weight, add)
    run(
        "mhc_boundary_bwd",
        boundary_scalars(numerics, sub_eps, p, token_base),
        *(x, f, bias, post, res, y, phi, norm_weight, pre_in, sub_weight, alpha, beta, h, ms),
        *(d_y, *placed(sub_norm, d_u), d_pre, d_post, d_res),
        *(d_x, d_f, d_bias, d_post_in, d_res_in),
        *(d_phi, d_norm_weight, d_alpha, d_beta, d_pre_in, d_sub_weight),
        add=add,
        precision=precision,
        step=step,
    )


_BOUNDARY_TENSORS = (
    "Tensor x, Tensor f, Tensor post, Tensor res, Tensor? bias, Tensor phi, Tensor alpha, Tensor beta,"
    " Tensor? norm_weight, Tensor? sub_weight, Tensor? pre_in, Tensor? step"
)
_BOUNDARY_SCALARS = "float[] numerics, bool sub_norm, float sub_eps, float p, int token_base, int precision"

define(
    f"mhc_boundary({_BOUNDARY_TENSORS}, {_BOUNDARY_SCALARS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _boundary_outputs,
    _boundary,
    _boundary_save,
    _boundary_backward,
)
define(
    f"mhc_boundary_bwd({_BOUNDARY_TENSORS}, Tensor y, Tensor h, Tensor ms, Tensor? d_y, Tensor? d_u, Tensor? d_pre,"
    f" Tensor? d_post, Tensor? d_res, {_BOUNDARY_SCALARS}, bool[] want) -> (Tensor, Tensor, Tensor, Tensor, Tensor,"
    " Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _boundary_bwd_outputs,
    _boundary_bwd,
)
