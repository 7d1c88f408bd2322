/* SPDX-License-Identifier: Apache-2.0
 *
 * Learned head contraction n -> 1 [M9]: projection onto n rows, the gates of the first group, aggregate. */
#include "ref/coef.h"
#include "ref/project.h"
#include "ref/streams.h"

typedef struct work {
    double *psi, *x, *u; /* [n][nC], [nC], [C] (u or its gradient) */
    double *d_x, *d_psi; /* backward */
} work;

static work work_forward(const weft_call *call, weft_arena *arena)
{
    int64_t n = call->streams, width = n * call->channels;
    work w = {0};
    w.psi = take(arena, n * width);
    w.x = take(arena, width);
    w.u = take(arena, call->channels);
    return w;
}

static work work_backward(const weft_call *call, weft_arena *arena)
{
    int64_t n = call->streams, width = n * call->channels;
    work w = work_forward(call, arena);
    w.d_x = take(arena, width);
    w.d_psi = take(arena, n * width);
    return w;
}

static void head_gates(gates *p, int64_t n, double rms_eps, weft_eps_kind kind, double pre_eps,
                       const weft_tensor *alpha, const weft_tensor *beta)
{
    p->n = p->rows = n;
    p->rms_eps = rms_eps;
    p->rms_eps_kind = kind;
    p->pre_eps = pre_eps;
    p->post_mult = 0.0;
    load_param(alpha, 1, 0.0, p->alpha);
    load_param(beta, n, 0.0, p->beta);
}

static size_t workspace_fwd(const weft_call *call, const void *args)
{
    weft_arena arena = weft_arena_open(NULL);
    (void)args;
    work_forward(call, &arena);
    return weft_arena_bytes(&arena);
}

static weft_status run_fwd(const weft_call *call, const void *args)
{
    const weft_mhc_head_fwd_args *a = args;
    int64_t n = call->streams, channels = call->channels, width = n * channels;
    double h[WEFT_MAX_STREAMS], gate[WEFT_MAX_STREAMS], ms;
    weft_arena arena = weft_arena_open(call->exec->workspace);
    work w = work_forward(call, &arena);
    gates p;

    head_gates(&p, n, a->rms_eps, a->rms_eps_kind, a->pre_eps, &a->alpha, &a->beta);
    project_load(&a->phi, &a->norm_weight, n, width, w.psi);
    for (int64_t t = 0; t < call->tokens; t++) {
        load_token(&a->x, t, width, w.x);
        project_forward(n, width, w.x, w.psi, h, &ms);
        store_token(&a->h, t, n, h);
        store_token(&a->ms, t, 1, &ms);
        round_all(full_type(call), n, h);
        round_all(full_type(call), 1, &ms);
        gates_forward(&p, h, ms, gate);
        aggregate_forward(n, channels, gate, w.x, w.u);
        store_token(&a->u, t, channels, w.u);
    }
    return WEFT_OK;
}

static size_t workspace_bwd(const weft_call *call, const void *args)
{
    weft_arena arena = weft_arena_open(NULL);
    (void)args;
    work_backward(call, &arena);
    return weft_arena_bytes(&arena);
}

static weft_status run_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_head_bwd_args *a = args;
    int64_t n = call->streams, channels = call->channels, width = n * channels;
    double h[WEFT_MAX_STREAMS], gate[WEFT_MAX_STREAMS], d_gate[WEFT_MAX_STREAMS], d_h[WEFT_MAX_STREAMS], ms, d_ms;
    weft_arena arena = weft_arena_open(call->exec->workspace);
    work w = work_backward(call, &arena);
    gates p;
    gates_grad sums = {{0}, {0}};

    head_gates(&p, n, a->rms_eps, a->rms_eps_kind, a->pre_eps, &a->alpha, &a->beta);
    project_load(&a->phi, &a->norm_weight, n, width, w.psi);
    clear(n * width, w.d_psi);
    for (int64_t t = 0; t < call->tokens; t++) {
        load_token(&a->x, t, width, w.x);
        load_token(&a->h, t, n, h);
        load_token(&a->ms, t, 1, &ms);
        load_token(&a->d_u, t, channels, w.u);
        gates_forward(&p, h, ms, gate);
        clear(width, w.d_x);
        aggregate_backward(n, channels, gate, w.x, w.u, w.d_x, d_gate);
        gates_backward(&p, h, ms, d_gate, d_h, &d_ms, &sums);
        project_backward_x(n, width, w.x, w.psi, d_h, d_ms, w.d_x);
        project_backward_psi(n, width, w.x, d_h, w.d_psi);
        grad_token(&a->d_x, t, width, w.d_x);
    }
    project_store(&a->phi, &a->norm_weight, n, width, w.d_psi, &a->d_phi, &a->d_norm_weight);
    grad_param(&a->d_alpha, 1, sums.alpha);
    grad_param(&a->d_beta, n, sums.beta);
    return WEFT_OK;
}

const weft_kernel weft_ref_mhc_head_fwd[] = {{.run = run_fwd, .workspace = workspace_fwd}, {0}};
const weft_kernel weft_ref_mhc_head_bwd[] = {{.run = run_bwd, .workspace = workspace_bwd}, {0}};
