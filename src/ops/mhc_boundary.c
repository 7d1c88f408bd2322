/* SPDX-License-Identifier: Apache-2.0
 *
 * Post of one sub-layer and pre of the next [M11]: arguments. */
#include "core/check.h"

#define ARGS weft_mhc_boundary_fwd_args
static const weft_scalar_info fwd_scalars[] = {SCALAR(numerics, NUMERICS), SCALAR(dropout, DROPOUT),
                                               SCALAR(sub_eps, REAL), SCALARS_END};
static const weft_arg_info fwd_args[] = {IN(x, ACT, TOKENS, STREAMS, CHANNELS),
                                         IN(f, ACT, TOKENS, CHANNELS),
                                         OPT(bias, PARAM, CHANNELS),
                                         IN(post, COEF, TOKENS, STREAMS),
                                         OPT(res, COEF, TOKENS, STREAMS, STREAMS),
                                         IN(phi, PARAM, GATES, STREAMS, CHANNELS),
                                         OPT(norm_weight, PARAM, STREAMS, CHANNELS),
                                         IN(alpha, PARAM, SCALES),
                                         IN(beta, PARAM, GATES),
                                         OPT(pre_in, COEF, TOKENS, STREAMS),
                                         OPT(sub_weight, PARAM, CHANNELS),
                                         OUT(y, ACT, TOKENS, STREAMS, CHANNELS),
                                         OUT_OPT(h, FULL, TOKENS, GATES),
                                         OUT_OPT(ms, FULL, TOKENS),
                                         OUT_OPT(pre_out, COEF, TOKENS, STREAMS),
                                         OUT_OPT(post_out, COEF, TOKENS, STREAMS),
                                         OUT_OPT(res_out, COEF, TOKENS, STREAMS, STREAMS),
                                         OUT_OPT(u, ACT, TOKENS, CHANNELS),
                                         OUT_OPT(v, ACT, TOKENS, CHANNELS)};
#undef ARGS

#define ARGS weft_mhc_boundary_bwd_args
static const weft_scalar_info bwd_scalars[] = {SCALAR(numerics, NUMERICS), SCALAR(dropout, DROPOUT),
                                               SCALAR(sub_eps, REAL), SCALARS_END};
static const weft_arg_info bwd_args[] = {IN(x, ACT, TOKENS, STREAMS, CHANNELS),
                                         IN(f, ACT, TOKENS, CHANNELS),
                                         OPT(bias, PARAM, CHANNELS),
                                         IN(post, COEF, TOKENS, STREAMS),
                                         OPT(res, COEF, TOKENS, STREAMS, STREAMS),
                                         OPT(y, ACT, TOKENS, STREAMS, CHANNELS),
                                         IN(phi, PARAM, GATES, STREAMS, CHANNELS),
                                         OPT(norm_weight, PARAM, STREAMS, CHANNELS),
                                         OPT(pre_in, COEF, TOKENS, STREAMS),
                                         OPT(sub_weight, PARAM, CHANNELS),
                                         IN(alpha, PARAM, SCALES),
                                         IN(beta, PARAM, GATES),
                                         IN(h, FULL, TOKENS, GATES),
                                         IN(ms, FULL, TOKENS),
                                         OPT(d_y, WIDE, TOKENS, STREAMS, CHANNELS),
                                         OPT(d_u, WIDE, TOKENS, CHANNELS),
                                         OPT(d_v, WIDE, TOKENS, CHANNELS),
                                         OPT(d_pre_out, COEF, TOKENS, STREAMS),
                                         OPT(d_post_out, COEF, TOKENS, STREAMS),
                                         OPT(d_res_out, COEF, TOKENS, STREAMS, STREAMS),
                                         GRAD_OPT(d_x, WIDE, TOKENS, STREAMS, CHANNELS),
                                         GRAD_OPT(d_f, WIDE, TOKENS, CHANNELS),
                                         GRAD_OPT(d_bias, PARAM, CHANNELS),
                                         GRAD_OPT(d_post, COEF, TOKENS, STREAMS),
                                         GRAD_OPT(d_res, COEF, TOKENS, STREAMS, STREAMS),
                                         GRAD_OPT(d_phi, PARAM, GATES, STREAMS, CHANNELS),
                                         GRAD_OPT(d_norm_weight, PARAM, STREAMS, CHANNELS),
                                         GRAD_OPT(d_alpha, PARAM, SCALES),
                                         GRAD_OPT(d_beta, PARAM, GATES),
                                         GRAD_OPT(d_pre_in, COEF, TOKENS, STREAMS),
                                         GRAD_OPT(d_sub_weight, PARAM, CHANNELS)};
#undef ARGS

static weft_status check_scalars(const weft_call *call, const weft_mhc_numerics *numerics,
                                 const weft_dropout *dropout, double sub_eps)
{
    WEFT_TRY(weft_check_gates(call, numerics));
    WEFT_TRY(weft_check_sinkhorn(call, numerics));
    WEFT_TRY(weft_check_apply(call, numerics));
    WEFT_TRY(weft_check_dropout(call, "", dropout));
    return weft_check_eps(call, "sub_eps", sub_eps);
}

static weft_status check_fwd(const weft_call *call, const void *args)
{
    const weft_mhc_boundary_fwd_args *a = args;
    WEFT_TRY(check_scalars(call, &a->numerics, &a->dropout, a->sub_eps));
    WEFT_TRY(weft_check_no_mix(call, "res_out", &a->res_out));
    return weft_check_needs(call, "sub_weight", &a->sub_weight, "v", &a->v);
}

static weft_status check_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_boundary_bwd_args *a = args;
    WEFT_TRY(check_scalars(call, &a->numerics, &a->dropout, a->sub_eps));
    WEFT_TRY(weft_check_no_mix(call, "d_res_out", &a->d_res_out));
    WEFT_TRY(weft_check_needs(call, "d_res", &a->d_res.to, "res", &a->res));
    WEFT_TRY(weft_check_needs(call, "d_bias", &a->d_bias.to, "bias", &a->bias));
    WEFT_TRY(weft_check_needs(call, "d_norm_weight", &a->d_norm_weight.to, "norm_weight", &a->norm_weight));
    WEFT_TRY(weft_check_needs(call, "d_sub_weight", &a->d_sub_weight.to, "sub_weight", &a->sub_weight));
    WEFT_TRY(weft_check_needs(call, "sub_weight", &a->sub_weight, "d_v", &a->d_v));
    return weft_check_needs(call, "d_pre_in", &a->d_pre_in.to, "pre_in", &a->pre_in);
}

WEFT_DESC(mhc_boundary_fwd, fwd_scalars, fwd_args, check_fwd);
WEFT_DESC(mhc_boundary_bwd, bwd_scalars, bwd_args, check_bwd);
