/* SPDX-License-Identifier: Apache-2.0
 *
 * Aggregate n -> 1 [M5]. */
#include "ref/streams.h"

typedef struct work {
    double *x, *u, *d_x; /* [nC], [C] (u or its gradient), [nC] */
} work;

static work work_open(const weft_call *call, weft_arena *arena)
{
    int64_t width = call->streams * call->channels;
    work w;
    w.x = take(arena, width);
    w.u = take(arena, call->channels);
    w.d_x = take(arena, width);
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
    const weft_mhc_aggregate_fwd_args *a = args;
    int64_t n = call->streams, channels = call->channels;
    double pre[WEFT_MAX_STREAMS];
    weft_arena arena = weft_arena_open(call->exec->workspace);
    work w = work_open(call, &arena);

    for (int64_t t = 0; t < call->tokens; t++) {
        load_token(&a->x, t, n * channels, w.x);
        load_token(&a->pre, t, n, pre);
        aggregate_forward(n, channels, pre, w.x, w.u);
        store_token(&a->u, t, channels, w.u);
    }
    return WEFT_OK;
}

static weft_status run_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_aggregate_bwd_args *a = args;
    int64_t n = call->streams, channels = call->channels;
    double pre[WEFT_MAX_STREAMS], d_pre[WEFT_MAX_STREAMS];
    weft_arena arena = weft_arena_open(call->exec->workspace);
    work w = work_open(call, &arena);

    for (int64_t t = 0; t < call->tokens; t++) {
        load_token(&a->x, t, n * channels, w.x);
        load_token(&a->pre, t, n, pre);
        load_token(&a->d_u, t, channels, w.u);
        clear(n * channels, w.d_x);
        aggregate_backward(n, channels, pre, w.x, w.u, w.d_x, d_pre);
        grad_token(&a->d_x, t, n * channels, w.d_x);
        grad_token(&a->d_pre, t, n, d_pre);
    }
    return WEFT_OK;
}

const weft_kernel weft_ref_mhc_aggregate_fwd[] = {{.run = run_fwd, .workspace = workspace}, {0}};
const weft_kernel weft_ref_mhc_aggregate_bwd[] = {{.run = run_bwd, .workspace = workspace}, {0}};
