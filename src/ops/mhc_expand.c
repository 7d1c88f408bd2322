/* SPDX-License-Identifier: Apache-2.0
 *
 * Expand 1 -> n [M7]: arguments. */
#include "core/check.h"

#define ARGS weft_mhc_expand_fwd_args
static const weft_arg_info fwd_args[] = {IN(u, ACT, TOKENS, CHANNELS), OUT(x, ACT, TOKENS, STREAMS, CHANNELS)};
#undef ARGS

#define ARGS weft_mhc_expand_bwd_args
static const weft_arg_info bwd_args[] = {IN(d_x, WIDE, TOKENS, STREAMS, CHANNELS),
                                         GRAD(d_u, WIDE, TOKENS, CHANNELS)};
#undef ARGS

static weft_status check(const weft_call *call, const void *args)
{
    (void)call, (void)args;
    return WEFT_OK;
}

WEFT_DESC(mhc_expand_fwd, NULL, fwd_args, check);
WEFT_DESC(mhc_expand_bwd, NULL, bwd_args, check);
