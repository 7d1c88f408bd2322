/* SPDX-License-Identifier: Apache-2.0
 *
 * Sinkhorn [M3]: arguments. */
#include "core/check.h"

#define ARGS weft_mhc_sinkhorn_fwd_args
static const weft_scalar_info fwd_scalars[] = {SCALAR(numerics, NUMERICS), SCALARS_END};
static const weft_arg_info fwd_args[] = {IN(logits, COEF, TOKENS, STREAMS, STREAMS),
                                         OUT_OVER(res, logits, COEF, TOKENS, STREAMS, STREAMS)};
#undef ARGS

#define ARGS weft_mhc_sinkhorn_bwd_args
static const weft_scalar_info bwd_scalars[] = {SCALAR(numerics, NUMERICS), SCALARS_END};
static const weft_arg_info bwd_args[] = {IN(logits, COEF, TOKENS, STREAMS, STREAMS),
                                         IN(d_res, COEF, TOKENS, STREAMS, STREAMS),
                                         GRAD_OVER(d_logits, d_res, 0, COEF, TOKENS, STREAMS, STREAMS)};
#undef ARGS

static weft_status check_fwd(const weft_call *call, const void *args)
{
    return weft_check_sinkhorn(call, &((const weft_mhc_sinkhorn_fwd_args *)args)->numerics);
}

static weft_status check_bwd(const weft_call *call, const void *args)
{
    return weft_check_sinkhorn(call, &((const weft_mhc_sinkhorn_bwd_args *)args)->numerics);
}

WEFT_DESC(mhc_sinkhorn_fwd, fwd_scalars, fwd_args, check_fwd);
WEFT_DESC(mhc_sinkhorn_bwd, bwd_scalars, bwd_args, check_bwd);
