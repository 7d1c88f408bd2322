/* SPDX-License-Identifier: Apache-2.0
 *
 * Projection and mean square [M1]. */
#include "ref/project.h"

typedef struct work {
    double *psi, *x, *h;       /* [R][nC], [nC], [R] */
    double *d_x, *d_h, *d_psi; /* backward */
} work;

static work work_forward(const weft_call *call, int64_t rows, weft_arena *arena)
{
    int64_t width = call->streams * call->channels;
    work w = {0};
    w.psi = take(arena, rows * width);
    w.x = take(arena, width);
    w.h = take(arena, rows);
    return w;
}

static work work_backward(const weft_call *call, int64_t rows, weft_arena *arena)
{
    int64_t width = call->streams * call->channels;
    work w = work_forward(call, rows, arena);
    w.d_x = take(arena, width);
    w.d_h = take(arena, rows);
    w.d_psi = take(arena, rows * width);
    return w;
}

static size_t workspace_fwd(const weft_call *call, const void *args)
{
    const weft_mhc_project_fwd_args *a = args;
    weft_arena arena = weft_arena_open(NULL);
    work_forward(call, a->phi.shape[0], &arena);
    return weft_arena_bytes(&arena);
}

static weft_status run_fwd(const weft_call *call, const void *args)
{
    const weft_mhc_project_fwd_args *a = args;
    int64_t rows = a->phi.shape[0], width = call->streams * call->channels;
    weft_arena arena = weft_arena_open(call->exec->workspace);
    work w = work_forward(call, rows, &arena);

    project_load(&a->phi, &a->norm_weight, rows, width, w.psi);
    for (int64_t t = 0; t < call->tokens; t++) {
        double ms;
        load_token(&a->x, t, width, w.x);
        project_forward(rows, width, w.x, w.psi, w.h, &ms);
        store_token(&a->h, t, rows, w.h);
        store_token(&a->ms, t, 1, &ms);
    }
    return WEFT_OK;
}

static size_t workspace_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_project_bwd_args *a = args;
    weft_arena arena = weft_arena_open(NULL);
    work_backward(call, a->phi.shape[0], &arena);
    return weft_arena_bytes(&arena);
}

static weft_status run_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_project_bwd_args *a = args;
    int64_t rows = a->phi.shape[0], width = call->streams * call->channels;
    weft_arena arena = weft_arena_open(call->exec->workspace);
    work w = work_backward(call, rows, &arena);

    project_load(&a->phi, &a->norm_weight, rows, width, w.psi);
    clear(rows * width, w.d_psi);
    for (int64_t t = 0; t < call->tokens; t++) {
        double d_ms;
        load_token(&a->x, t, width, w.x);
        load_token(&a->d_h, t, rows, w.d_h);
        load_token(&a->d_ms, t, 1, &d_ms);
        clear(width, w.d_x);
        project_backward_x(rows, width, w.x, w.psi, w.d_h, d_ms, w.d_x);
        project_backward_psi(rows, width, w.x, w.d_h, w.d_psi);
        grad_token(&a->d_x, t, width, w.d_x);
    }
    project_store(&a->phi, &a->norm_weight, rows, width, w.d_psi, &a->d_phi, &a->d_norm_weight);
    return WEFT_OK;
}

const weft_kernel weft_ref_mhc_project_fwd[] = {{.run = run_fwd, .workspace = workspace_fwd}, {0}};
const weft_kernel weft_ref_mhc_project_bwd[] = {{.run = run_bwd, .workspace = workspace_bwd}, {0}};
