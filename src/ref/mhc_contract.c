/* SPDX-License-Identifier: Apache-2.0
 *
 * Contract n -> 1 [M8]: the sum over the streams, divided by n for the mean. */
#include "ref/common.h"

static double divisor(weft_contract kind, int64_t streams)
{
    return kind == WEFT_CONTRACT_MEAN ? (double)streams : 1.0;
}

static weft_status run_fwd(const weft_call *call, const void *args)
{
    const weft_mhc_contract_fwd_args *a = args;
    for (int64_t t = 0; t < call->tokens; t++) {
        for (int64_t c = 0; c < call->channels; c++) {
            double sum = 0.0;
            for (int64_t i = 0; i < call->streams; i++) sum += get3(&a->x, t, i, c);
            put2(&a->u, t, c, sum / divisor(a->kind, call->streams));
        }
    }
    return WEFT_OK;
}

static weft_status run_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_contract_bwd_args *a = args;
    for (int64_t t = 0; t < call->tokens; t++)
        for (int64_t i = 0; i < call->streams; i++)
            for (int64_t c = 0; c < call->channels; c++)
                put_grad3(&a->d_x, t, i, c, get2(&a->d_u, t, c) / divisor(a->kind, call->streams));
    return WEFT_OK;
}

const weft_kernel weft_ref_mhc_contract_fwd[] = {{.run = run_fwd}, {0}};
const weft_kernel weft_ref_mhc_contract_bwd[] = {{.run = run_bwd}, {0}};
