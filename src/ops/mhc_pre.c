/* SPDX-License-Identifier: Apache-2.0
 *
 * Everything in front of a sub-layer [M10]: arguments. */
#include "core/check.h"

#define ARGS weft_mhc_pre_fwd_args
static const weft_scalar_info fwd_scalars[] = {SCALAR(numerics, NUMERICS), SCALAR(sub_eps, REAL), SCALARS_END};
static const weft_arg_info fwd_args[] = {IN(x, ACT, TOKENS, STREAMS, CHANNELS),
                                         IN(phi, PARAM, GATES, STREAMS, CHANNELS),
                                         OPT(norm_weight, PARAM, STREAMS, CHANNELS),
                                         IN(alpha, PARAM, SCALES),
                                         IN(beta, PARAM, GATES),
                                         OPT(pre_in, COEF, TOKENS, STREAMS),
                                         OPT(sub_weight, PARAM, CHANNELS),
                                         OUT_OPT(h, FULL, TOKENS, GATES),
                                         OUT_OPT(ms, FULL, TOKENS),
                                         OUT_OPT(pre, COEF, TOKENS, STREAMS),
                                         OUT_OPT(post, COEF, TOKENS, STREAMS),
                                         OUT_OPT(res, COEF, TOKENS, STREAMS, STREAMS),
                                         OUT_OPT(u, ACT, TOKENS, CHANNELS),
                                         OUT_OPT(v, ACT, TOKENS, CHANNELS)};
#undef ARGS

#define ARGS weft_mhc_pre_bwd_args
static const weft_scalar_info bwd_scalars[] = {SCALAR(numerics, NUMERICS), SCALAR(sub_eps, REAL), SCALARS_END};
static const weft_arg_info bwd_args[] = {IN(x, ACT, TOKENS, STREAMS, CHANNELS),
                                         IN(phi, PARAM, GATES, STREAMS, CHANNELS),
                                         OPT(norm_weight, PARAM, STREAMS, CHANNELS),
                                         OPT(pre_in, COEF, TOKENS, STREAMS),
                                         OPT(sub_weight, PARAM, CHANNELS),
                                         IN(alpha, PARAM, SCALES),
                                         IN(beta, PARAM, GATES),
                                         IN(h, FULL, TOKENS, GATES),
                                         IN(ms, FULL, TOKENS),
                                         OPT(d_u, WIDE, TOKENS, CHANNELS),
                                         OPT(d_v, WIDE, TOKENS, CHANNELS),
                                         OPT(d_pre, COEF, TOKENS, STREAMS),
                                         OPT(d_post, COEF, TOKENS, STREAMS),
                                         OPT(d_res, COEF, TOKENS, STREAMS, STREAMS),
                                         GRAD_OPT(d_x, WIDE, TOKENS, STREAMS, CHANNELS),
                                         GRAD_OPT(d_phi, PARAM, GATES, STREAMS, CHANNELS),
                                         GRAD_OPT(d_norm_weight, PARAM, STREAMS, CHANNELS),
                                         GRAD_OPT(d_alpha, PARAM, SCALES),
                                         GRAD_OPT(d_beta, PARAM, GATES),
                                         GRAD_OPT(d_pre_in, COEF, TOKENS, STREAMS),
                                         GRAD_OPT(d_sub_weight, PARAM, CHANNELS)};
#undef ARGS

static weft_status check_numerics(const weft_call *call, const weft_mhc_numerics *numerics, double sub_eps)
{
    WEFT_TRY(weft_check_gates(call, numerics));
    WEFT_TRY(weft_check_sinkhorn(call, numerics));
    return weft_check_eps(call, "sub_eps", sub_eps);
}

static weft_status check_fwd(const weft_call *call, const void *args)
{
    const weft_mhc_pre_fwd_args *a = args;
    WEFT_TRY(check_numerics(call, &a->numerics, a->sub_eps));
    WEFT_TRY(weft_check_no_mix(call, "res", &a->res));
    return weft_check_needs(call, "sub_weight", &a->sub_weight, "v", &a->v);
}

static weft_status check_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_pre_bwd_args *a = args;
    WEFT_TRY(check_numerics(call, &a->numerics, a->sub_eps));
    WEFT_TRY(weft_check_no_mix(call, "d_res", &a->d_res));
    WEFT_TRY(weft_check_needs(call, "d_norm_weight", &a->d_norm_weight.to, "norm_weight", &a->norm_weight));
    WEFT_TRY(weft_check_needs(call, "d_sub_weight", &a->d_sub_weight.to, "sub_weight", &a->sub_weight));
    WEFT_TRY(weft_check_needs(call, "sub_weight", &a->sub_weight, "d_v", &a->d_v));
    return weft_check_needs(call, "d_pre_in", &a->d_pre_in.to, "pre_in", &a->pre_in);
}

WEFT_DESC(mhc_pre_fwd, fwd_scalars, fwd_args, check_fwd);
WEFT_DESC(mhc_pre_bwd, bwd_scalars, bwd_args, check_bwd);
