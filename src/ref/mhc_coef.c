/* SPDX-License-Identifier: Apache-2.0
 *
 * Coefficients: gates and Sinkhorn in one call [M4]. The logits between the two are never stored, so never rounded. */
#include "ref/coef.h"

static weft_status run_fwd(const weft_call *call, const void *args)
{
    const weft_mhc_coef_fwd_args *a = args;
    int64_t n = call->streams;
    double h[REF_MAX_GATES], out[REF_MAX_GATES], ms;
    gates p;

    gates_load(&p, &a->numerics, n, &a->alpha, &a->beta);
    for (int64_t t = 0; t < call->tokens; t++) {
        load_token(&a->h, t, p.rows, h);
        load_token(&a->ms, t, 1, &ms);
        coef_forward(&p, &a->numerics, h, ms, out);
        store_token(&a->pre, t, n, out);
        store_token(&a->post, t, n, out + n);
        store_token(&a->res, t, n * n, out + 2 * n);
    }
    return WEFT_OK;
}

static size_t workspace_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_coef_bwd_args *a = args;
    weft_arena arena = weft_arena_open(NULL);
    take(&arena, sinkhorn_history(&a->numerics, call->streams));
    return weft_arena_bytes(&arena);
}

static weft_status run_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_coef_bwd_args *a = args;
    int64_t n = call->streams;
    double h[REF_MAX_GATES], d_out[REF_MAX_GATES], d_h[REF_MAX_GATES], ms, d_ms;
    weft_arena arena = weft_arena_open(call->exec->workspace);
    double *history = take(&arena, sinkhorn_history(&a->numerics, n));
    gates p;
    gates_grad sums = {{0}, {0}};

    gates_load(&p, &a->numerics, n, &a->alpha, &a->beta);
    for (int64_t t = 0; t < call->tokens; t++) {
        load_token(&a->h, t, p.rows, h);
        load_token(&a->ms, t, 1, &ms);
        load_token(&a->d_pre, t, n, d_out);
        load_token(&a->d_post, t, n, d_out + n);
        load_token(&a->d_res, t, n * n, d_out + 2 * n);
        coef_backward(&p, &a->numerics, h, ms, d_out, d_h, &d_ms, &sums, history);
        grad_token(&a->d_h, t, p.rows, d_h);
        grad_token(&a->d_ms, t, 1, &d_ms);
    }
    grad_param(&a->d_alpha, p.scales, sums.alpha);
    grad_param(&a->d_beta, p.rows, sums.beta);
    return WEFT_OK;
}

const weft_kernel weft_ref_mhc_coef_fwd[] = {{.run = run_fwd}, {0}};
const weft_kernel weft_ref_mhc_coef_bwd[] = {{.run = run_bwd, .workspace = workspace_bwd}, {0}};
