/* SPDX-License-Identifier: Apache-2.0
 *
 * RMSNorm [N1]. A row is read as a whole before it is written, so v may be u. */
#include "ref/norm.h"

typedef struct work {
    double *u, *weight, *v; /* [C]; v or its gradient */
    double *d_u, *d_weight; /* backward */
} work;

static work work_open(const weft_call *call, weft_arena *arena)
{
    int64_t channels = call->channels;
    work w;
    w.u = take(arena, channels);
    w.weight = take(arena, channels);
    w.v = take(arena, channels);
    w.d_u = take(arena, channels);
    w.d_weight = take(arena, channels);
    return w;
}

static size_t workspace(const weft_call *call, const void *args)
{
    weft_arena arena = weft_arena_open(NULL);
    (void)args;
    work_open(call, &arena);
    return weft_arena_bytes(&arena);
}

static weft_status run_fwd(const weft_call *call, const void *args)
{
    const weft_rmsnorm_fwd_args *a = args;
    int64_t channels = call->channels;
    weft_arena arena = weft_arena_open(call->exec->workspace);
    work w = work_open(call, &arena);

    load_param(&a->weight, channels, 1.0, w.weight);
    for (int64_t t = 0; t < call->tokens; t++) {
        load_token(&a->u, t, channels, w.u);
        rmsnorm_forward(channels, a->eps, w.u, w.weight, w.v);
        store_token(&a->v, t, channels, w.v);
    }
    return WEFT_OK;
}

static weft_status run_bwd(const weft_call *call, const void *args)
{
    const weft_rmsnorm_bwd_args *a = args;
    int64_t channels = call->channels;
    weft_arena arena = weft_arena_open(call->exec->workspace);
    work w = work_open(call, &arena);

    load_param(&a->weight, channels, 1.0, w.weight);
    clear(channels, w.d_weight);
    for (int64_t t = 0; t < call->tokens; t++) {
        load_token(&a->u, t, channels, w.u);
        load_token(&a->d_v, t, channels, w.v);
        clear(channels, w.d_u);
        rmsnorm_backward(channels, a->eps, w.u, w.weight, w.v, w.d_u, w.d_weight);
        grad_token(&a->d_u, t, channels, w.d_u);
    }
    grad_param(&a->d_weight, channels, w.d_weight);
    return WEFT_OK;
}

const weft_kernel weft_ref_rmsnorm_fwd[] = {{.run = run_fwd, .workspace = workspace}, {0}};
const weft_kernel weft_ref_rmsnorm_bwd[] = {{.run = run_bwd, .workspace = workspace}, {0}};
