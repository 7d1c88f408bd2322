/* SPDX-License-Identifier: Apache-2.0
 *
 * Sinkhorn [M3]. A token is read as a whole before it is written, so both operators work in place. */
#include "ref/sinkhorn.h"

static weft_status run_fwd(const weft_call *call, const void *args)
{
    const weft_mhc_sinkhorn_fwd_args *a = args;
    int64_t n = call->streams;
    double m[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS];

    for (int64_t t = 0; t < call->tokens; t++) {
        load_token(&a->logits, t, n * n, m);
        sinkhorn_forward(&a->numerics, n, m, m);
        store_token(&a->res, t, n * n, m);
    }
    return WEFT_OK;
}

static size_t workspace_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_sinkhorn_bwd_args *a = args;
    weft_arena arena = weft_arena_open(NULL);
    take(&arena, sinkhorn_history(&a->numerics, call->streams));
    return weft_arena_bytes(&arena);
}

static weft_status run_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_sinkhorn_bwd_args *a = args;
    int64_t n = call->streams;
    double z[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS], d[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS];
    weft_arena arena = weft_arena_open(call->exec->workspace);
    double *history = take(&arena, sinkhorn_history(&a->numerics, n));

    for (int64_t t = 0; t < call->tokens; t++) {
        load_token(&a->logits, t, n * n, z);
        load_token(&a->d_res, t, n * n, d);
        sinkhorn_backward(&a->numerics, n, z, d, d, history);
        grad_token(&a->d_logits, t, n * n, d);
    }
    return WEFT_OK;
}

const weft_kernel weft_ref_mhc_sinkhorn_fwd[] = {{.run = run_fwd}, {0}};
const weft_kernel weft_ref_mhc_sinkhorn_bwd[] = {{.run = run_bwd, .workspace = workspace_bwd}, {0}};
