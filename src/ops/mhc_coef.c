/* SPDX-License-Identifier: Apache-2.0
 *
 * Coefficients = gates + Sinkhorn [M4]: arguments. */
#include "core/check.h"

#define ARGS weft_mhc_coef_fwd_args
static const weft_scalar_info fwd_scalars[] = {SCALAR(numerics, NUMERICS), SCALARS_END};
static const weft_arg_info fwd_args[] = {IN(h, FULL, TOKENS, GATES),
                                         IN(ms, FULL, TOKENS),
                                         IN(alpha, PARAM, SCALES),
                                         IN(beta, PARAM, GATES),
                                         OUT_OPT(pre, COEF, TOKENS, STREAMS),
                                         OUT_OPT(post, COEF, TOKENS, STREAMS),
                                         OUT_OPT(res, COEF, TOKENS, STREAMS, STREAMS)};
#undef ARGS

#define ARGS weft_mhc_coef_bwd_args
static const weft_scalar_info bwd_scalars[] = {SCALAR(numerics, NUMERICS), SCALARS_END};
static const weft_arg_info bwd_args[] = {IN(h, FULL, TOKENS, GATES),
                                         IN(ms, FULL, TOKENS),
                                         IN(alpha, PARAM, SCALES),
                                         IN(beta, PARAM, GATES),
                                         OPT(d_pre, COEF, TOKENS, STREAMS),
                                         OPT(d_post, COEF, TOKENS, STREAMS),
                                         OPT(d_res, COEF, TOKENS, STREAMS, STREAMS),
                                         GRAD_OPT(d_h, FULL, TOKENS, GATES),
                                         GRAD_OPT(d_ms, FULL, TOKENS),
                                         GRAD_OPT(d_alpha, PARAM, SCALES),
                                         GRAD_OPT(d_beta, PARAM, GATES)};
#undef ARGS

static weft_status check_fwd(const weft_call *call, const void *args)
{
    const weft_mhc_coef_fwd_args *a = args;
    WEFT_TRY(weft_check_no_mix(call, "res", &a->res));
    WEFT_TRY(weft_check_gates(call, &a->numerics));
    return weft_check_sinkhorn(call, &a->numerics);
}

static weft_status check_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_coef_bwd_args *a = args;
    WEFT_TRY(weft_check_no_mix(call, "d_res", &a->d_res));
    WEFT_TRY(weft_check_gates(call, &a->numerics));
    return weft_check_sinkhorn(call, &a->numerics);
}

WEFT_DESC(mhc_coef_fwd, fwd_scalars, fwd_args, check_fwd);
WEFT_DESC(mhc_coef_bwd, bwd_scalars, bwd_args, check_bwd);
