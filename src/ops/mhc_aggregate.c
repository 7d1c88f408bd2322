/* SPDX-License-Identifier: Apache-2.0
 *
 * Aggregate n -> 1 [M5]: arguments. */
#include "core/check.h"

#define ARGS weft_mhc_aggregate_fwd_args
static const weft_arg_info fwd_args[] = {IN(x, ACT, TOKENS, STREAMS, CHANNELS), IN(pre, COEF, TOKENS, STREAMS),
                                         OUT(u, ACT, TOKENS, CHANNELS)};
#undef ARGS

#define ARGS weft_mhc_aggregate_bwd_args
static const weft_arg_info bwd_args[] = {
    IN(x, ACT, TOKENS, STREAMS, CHANNELS), IN(pre, COEF, TOKENS, STREAMS), IN(d_u, WIDE, TOKENS, CHANNELS),
    GRAD_OPT(d_x, WIDE, TOKENS, STREAMS, CHANNELS), GRAD_OPT(d_pre, COEF, TOKENS, STREAMS)};
#undef ARGS

static weft_status check(const weft_call *call, const void *args)
{
    (void)call, (void)args;
    return WEFT_OK;
}

WEFT_DESC(mhc_aggregate_fwd, NULL, fwd_args, check);
WEFT_DESC(mhc_aggregate_bwd, NULL, bwd_args, check);
