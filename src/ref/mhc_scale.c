/* SPDX-License-Identifier: Apache-2.0
 *
 * Gates [M2]. */
#include "ref/coef.h"

static weft_status run_fwd(const weft_call *call, const void *args)
{
    const weft_mhc_scale_fwd_args *a = args;
    int64_t n = call->streams;
    double h[REF_MAX_GATES], out[REF_MAX_GATES], ms;
    gates p;

    gates_load(&p, &a->numerics, n, &a->alpha, &a->beta);
    for (int64_t t = 0; t < call->tokens; t++) {
        load_token(&a->h, t, p.rows, h);
        load_token(&a->ms, t, 1, &ms);
        gates_forward(&p, h, ms, out);
        store_token(&a->pre, t, n, out);
        store_token(&a->post, t, n, out + n);
        store_token(&a->logits, t, n * n, out + 2 * n);
    }
    return WEFT_OK;
}

static weft_status run_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_scale_bwd_args *a = args;
    int64_t n = call->streams;
    double h[REF_MAX_GATES], d_out[REF_MAX_GATES], d_h[REF_MAX_GATES], ms, d_ms;
    gates p;
    gates_grad sums = {{0}, {0}};

    gates_load(&p, &a->numerics, n, &a->alpha, &a->beta);
    for (int64_t t = 0; t < call->tokens; t++) {
        load_token(&a->h, t, p.rows, h);
        load_token(&a->ms, t, 1, &ms);
        load_token(&a->d_pre, t, n, d_out);
        load_token(&a->d_post, t, n, d_out + n);
        load_token(&a->d_logits, t, n * n, d_out + 2 * n);
        gates_backward(&p, h, ms, d_out, d_h, &d_ms, &sums);
        grad_token(&a->d_h, t, p.rows, d_h);
        grad_token(&a->d_ms, t, 1, &d_ms);
    }
    grad_param(&a->d_alpha, p.scales, sums.alpha);
    grad_param(&a->d_beta, p.rows, sums.beta);
    return WEFT_OK;
}

const weft_kernel weft_ref_mhc_scale_fwd[] = {{.run = run_fwd}, {0}};
const weft_kernel weft_ref_mhc_scale_bwd[] = {{.run = run_bwd}, {0}};
