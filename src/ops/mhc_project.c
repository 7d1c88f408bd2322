/* SPDX-License-Identifier: Apache-2.0
 *
 * Projection + mean square [M1]: arguments. */
#include "core/check.h"

#define ARGS weft_mhc_project_fwd_args
static const weft_arg_info fwd_args[] = {
    IN(x, ACT, TOKENS, STREAMS, CHANNELS), IN(phi, PARAM, ROWS, STREAMS, CHANNELS),
    OPT(norm_weight, PARAM, STREAMS, CHANNELS), OUT(h, FULL, TOKENS, ROWS), OUT(ms, FULL, TOKENS)};
#undef ARGS

#define ARGS weft_mhc_project_bwd_args
static const weft_arg_info bwd_args[] = {IN(x, ACT, TOKENS, STREAMS, CHANNELS),
                                         IN(phi, PARAM, ROWS, STREAMS, CHANNELS),
                                         OPT(norm_weight, PARAM, STREAMS, CHANNELS),
                                         OPT(d_h, FULL, TOKENS, ROWS),
                                         OPT(d_ms, FULL, TOKENS),
                                         GRAD_OPT(d_x, WIDE, TOKENS, STREAMS, CHANNELS),
                                         GRAD_OPT(d_phi, PARAM, ROWS, STREAMS, CHANNELS),
                                         GRAD_OPT(d_norm_weight, PARAM, STREAMS, CHANNELS)};
#undef ARGS

static weft_status check_fwd(const weft_call *call, const void *args)
{
    (void)call, (void)args;
    return WEFT_OK;
}

static weft_status check_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_project_bwd_args *a = args;
    return weft_check_needs(call, "d_norm_weight", &a->d_norm_weight.to, "norm_weight", &a->norm_weight);
}

WEFT_DESC(mhc_project_fwd, NULL, fwd_args, check_fwd);
WEFT_DESC(mhc_project_bwd, NULL, bwd_args, check_bwd);
