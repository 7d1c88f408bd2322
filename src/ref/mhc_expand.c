/* SPDX-License-Identifier: Apache-2.0
 *
 * Expand 1 -> n [M7]. */
#include "ref/common.h"

static weft_status run_fwd(const weft_call *call, const void *args)
{
    const weft_mhc_expand_fwd_args *a = args;
    for (int64_t t = 0; t < call->tokens; t++)
        for (int64_t i = 0; i < call->streams; i++)
            for (int64_t c = 0; c < call->channels; c++) put3(&a->x, t, i, c, get2(&a->u, t, c));
    return WEFT_OK;
}

static weft_status run_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_expand_bwd_args *a = args;
    for (int64_t t = 0; t < call->tokens; t++) {
        for (int64_t c = 0; c < call->channels; c++) {
            double sum = 0.0;
            for (int64_t i = 0; i < call->streams; i++) sum += get3(&a->d_x, t, i, c);
            put_grad2(&a->d_u, t, c, sum);
        }
    }
    return WEFT_OK;
}

const weft_kernel weft_ref_mhc_expand_fwd[] = {{.run = run_fwd}, {0}};
const weft_kernel weft_ref_mhc_expand_bwd[] = {{.run = run_bwd}, {0}};
