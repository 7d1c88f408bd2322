/* SPDX-License-Identifier: Apache-2.0
 *
 * Contract n -> 1 [M8]: arguments. */
#include "core/check.h"

#define ARGS weft_mhc_contract_fwd_args
static const weft_scalar_info fwd_scalars[] = {SCALAR(kind, INT), SCALARS_END};
static const weft_arg_info fwd_args[] = {IN(x, ACT, TOKENS, STREAMS, CHANNELS), OUT(u, ACT, TOKENS, CHANNELS)};
#undef ARGS

#define ARGS weft_mhc_contract_bwd_args
static const weft_scalar_info bwd_scalars[] = {SCALAR(kind, INT), SCALARS_END};
static const weft_arg_info bwd_args[] = {IN(d_u, WIDE, TOKENS, CHANNELS),
                                         GRAD(d_x, WIDE, TOKENS, STREAMS, CHANNELS)};
#undef ARGS

static weft_status check_fwd(const weft_call *call, const void *args)
{
    return weft_check_enum(call, "kind", (int)((const weft_mhc_contract_fwd_args *)args)->kind, 2);
}

static weft_status check_bwd(const weft_call *call, const void *args)
{
    return weft_check_enum(call, "kind", (int)((const weft_mhc_contract_bwd_args *)args)->kind, 2);
}

WEFT_DESC(mhc_contract_fwd, fwd_scalars, fwd_args, check_fwd);
WEFT_DESC(mhc_contract_bwd, bwd_scalars, bwd_args, check_bwd);
