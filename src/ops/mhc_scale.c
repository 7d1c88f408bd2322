/* SPDX-License-Identifier: Apache-2.0
 *
 * Gates [M2]: arguments. */
#include "core/check.h"

#define ARGS weft_mhc_scale_fwd_args
static const weft_scalar_info fwd_scalars[] = {SCALAR(numerics, NUMERICS), SCALARS_END};
static const weft_arg_info fwd_args[] = {IN(h, FULL, TOKENS, GATES),
                                         IN(ms, FULL, TOKENS),
                                         IN(alpha, PARAM, SCALES),
                                         IN(beta, PARAM, GATES),
                                         OUT(pre, COEF, TOKENS, STREAMS),
                                         OUT(post, COEF, TOKENS, STREAMS),
                                         OUT_OPT(logits, COEF, TOKENS, STREAMS, STREAMS)};
#undef ARGS

#define ARGS weft_mhc_scale_bwd_args
static const weft_scalar_info bwd_scalars[] = {SCALAR(numerics, NUMERICS), SCALARS_END};
static const weft_arg_info bwd_args[] = {IN(h, FULL, TOKENS, GATES),
                                         IN(ms, FULL, TOKENS),
                                         IN(alpha, PARAM, SCALES),
                                         IN(beta, PARAM, GATES),
                                         OPT(d_pre, COEF, TOKENS, STREAMS),
                                         OPT(d_post, COEF, TOKENS, STREAMS),
                                         OPT(d_logits, COEF, TOKENS, STREAMS, STREAMS),
                                         GRAD_OPT(d_h, FULL, TOKENS, GATES),
                                         GRAD_OPT(d_ms, FULL, TOKENS),
                                         GRAD_OPT(d_alpha, PARAM, SCALES),
                                         GRAD_OPT(d_beta, PARAM, GATES)};
#undef ARGS

static weft_status check_fwd(const weft_call *call, const void *args)
{
    const weft_mhc_scale_fwd_args *a = args;
    WEFT_TRY(weft_check_no_mix(call, "logits", &a->logits));
    return weft_check_gates(call, &a->numerics);
}

static weft_status check_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_scale_bwd_args *a = args;
    WEFT_TRY(weft_check_no_mix(call, "d_logits", &a->d_logits));
    return weft_check_gates(call, &a->numerics);
}

WEFT_DESC(mhc_scale_fwd, fwd_scalars, fwd_args, check_fwd);
WEFT_DESC(mhc_scale_bwd, bwd_scalars, bwd_args, check_bwd);
