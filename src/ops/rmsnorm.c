/* SPDX-License-Identifier: Apache-2.0
 *
 * RMSNorm of a row [N1]: arguments. */
#include "core/check.h"

#define ARGS weft_rmsnorm_fwd_args
static const weft_scalar_info fwd_scalars[] = {SCALAR(eps, REAL), SCALARS_END};
static const weft_arg_info fwd_args[] = {IN(u, ACT, TOKENS, CHANNELS), OPT(weight, PARAM, CHANNELS),
                                         OUT_OVER(v, u, ACT, TOKENS, CHANNELS)};
#undef ARGS

#define ARGS weft_rmsnorm_bwd_args
static const weft_scalar_info bwd_scalars[] = {SCALAR(eps, REAL), SCALARS_END};
static const weft_arg_info bwd_args[] = {IN(u, ACT, TOKENS, CHANNELS), OPT(weight, PARAM, CHANNELS),
                                         IN(d_v, WIDE, TOKENS, CHANNELS), GRAD_OPT(d_u, WIDE, TOKENS, CHANNELS),
                                         GRAD_OPT(d_weight, PARAM, CHANNELS)};
#undef ARGS

static weft_status check_fwd(const weft_call *call, const void *args)
{
    return weft_check_eps(call, "eps", ((const weft_rmsnorm_fwd_args *)args)->eps);
}

static weft_status check_bwd(const weft_call *call, const void *args)
{
    const weft_rmsnorm_bwd_args *a = args;
    WEFT_TRY(weft_check_eps(call, "eps", a->eps));
    return weft_check_needs(call, "d_weight", &a->d_weight.to, "weight", &a->weight);
}

WEFT_DESC(rmsnorm_fwd, fwd_scalars, fwd_args, check_fwd);
WEFT_DESC(rmsnorm_bwd, bwd_scalars, bwd_args, check_bwd);
