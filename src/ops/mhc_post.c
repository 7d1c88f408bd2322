/* SPDX-License-Identifier: Apache-2.0
 *
 * Expand-combine [M6]: arguments. */
#include "core/check.h"

#define ARGS weft_mhc_post_fwd_args
static const weft_scalar_info fwd_scalars[] = {SCALAR(numerics, NUMERICS), SCALAR(dropout, DROPOUT), SCALARS_END};
static const weft_arg_info fwd_args[] = {IN(x, ACT, TOKENS, STREAMS, CHANNELS),
                                         IN(f, ACT, TOKENS, CHANNELS),
                                         OPT(bias, PARAM, CHANNELS),
                                         IN(post, COEF, TOKENS, STREAMS),
                                         OPT(res, COEF, TOKENS, STREAMS, STREAMS),
                                         OUT_OVER(y, x, ACT, TOKENS, STREAMS, CHANNELS)};
#undef ARGS

#define ARGS weft_mhc_post_bwd_args
static const weft_scalar_info bwd_scalars[] = {SCALAR(numerics, NUMERICS), SCALAR(dropout, DROPOUT), SCALARS_END};
static const weft_arg_info bwd_args[] = {IN(x, ACT, TOKENS, STREAMS, CHANNELS),
                                         IN(f, ACT, TOKENS, CHANNELS),
                                         OPT(bias, PARAM, CHANNELS),
                                         IN(post, COEF, TOKENS, STREAMS),
                                         OPT(res, COEF, TOKENS, STREAMS, STREAMS),
                                         IN(d_y, WIDE, TOKENS, STREAMS, CHANNELS),
                                         GRAD_OVER(d_x, d_y, 1, WIDE, TOKENS, STREAMS, CHANNELS),
                                         GRAD_OPT(d_f, WIDE, TOKENS, CHANNELS),
                                         GRAD_OPT(d_bias, PARAM, CHANNELS),
                                         GRAD_OPT(d_post, COEF, TOKENS, STREAMS),
                                         GRAD_OPT(d_res, COEF, TOKENS, STREAMS, STREAMS)};
#undef ARGS

static weft_status check_fwd(const weft_call *call, const void *args)
{
    const weft_mhc_post_fwd_args *a = args;
    WEFT_TRY(weft_check_apply(call, &a->numerics));
    return weft_check_dropout(call, "", &a->dropout);
}

static weft_status check_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_post_bwd_args *a = args;
    WEFT_TRY(weft_check_apply(call, &a->numerics));
    WEFT_TRY(weft_check_dropout(call, "", &a->dropout));
    WEFT_TRY(weft_check_needs(call, "d_res", &a->d_res.to, "res", &a->res));
    return weft_check_needs(call, "d_bias", &a->d_bias.to, "bias", &a->bias);
}

WEFT_DESC(mhc_post_fwd, fwd_scalars, fwd_args, check_fwd);
WEFT_DESC(mhc_post_bwd, bwd_scalars, bwd_args, check_bwd);
