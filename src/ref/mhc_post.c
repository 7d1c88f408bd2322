/* SPDX-License-Identifier: Apache-2.0
 *
 * Post: expand the sub-layer's output and mix the streams [M6]. A token is read as a whole before it is written, so y
 * may be x and d_x may be d_y. */
#include "ref/streams.h"

typedef struct work {
    double *x, *y, *f, *bias;   /* [nC], [nC] (y or its gradient), [C], [C] */
    double *d_x, *d_f, *d_bias; /* backward */
} work;

static work work_forward(const weft_call *call, weft_arena *arena)
{
    int64_t width = call->streams * call->channels;
    work w = {0};
    w.x = take(arena, width);
    w.y = take(arena, width);
    w.f = take(arena, call->channels);
    w.bias = take(arena, call->channels);
    return w;
}

static work work_backward(const weft_call *call, weft_arena *arena)
{
    work w = work_forward(call, arena);
    w.d_x = take(arena, call->streams * call->channels);
    w.d_f = take(arena, call->channels);
    w.d_bias = take(arena, call->channels);
    return w;
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
    const weft_mhc_post_fwd_args *a = args;
    int64_t n = call->streams, channels = call->channels;
    double post[WEFT_MAX_STREAMS], res[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS];
    weft_arena arena = weft_arena_open(call->exec->workspace);
    work w = work_forward(call, &arena);
    weft_mask mask = weft_mask_open(&a->dropout, channels);
    post_token p = {n, channels, 0, a->numerics.apply, &mask, w.f, w.bias, post, weft_has(&a->res) ? res : NULL};

    load_param(&a->bias, channels, 0.0, w.bias);
    for (p.token = 0; p.token < call->tokens; p.token++) {
        load_token(&a->x, p.token, n * channels, w.x);
        load_token(&a->f, p.token, channels, w.f);
        load_token(&a->post, p.token, n, post);
        load_token(&a->res, p.token, n * n, res);
        post_forward(&p, w.x, w.y);
        store_token(&a->y, p.token, n * channels, w.y);
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
    const weft_mhc_post_bwd_args *a = args;
    int64_t n = call->streams, channels = call->channels;
    double post[WEFT_MAX_STREAMS], res[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS];
    double d_post[WEFT_MAX_STREAMS], d_res[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS];
    weft_arena arena = weft_arena_open(call->exec->workspace);
    work w = work_backward(call, &arena);
    weft_mask mask = weft_mask_open(&a->dropout, channels);
    post_token p = {n, channels, 0, a->numerics.apply, &mask, w.f, w.bias, post, weft_has(&a->res) ? res : NULL};

    load_param(&a->bias, channels, 0.0, w.bias);
    clear(channels, w.d_bias);
    for (p.token = 0; p.token < call->tokens; p.token++) {
        load_token(&a->x, p.token, n * channels, w.x);
        load_token(&a->f, p.token, channels, w.f);
        load_token(&a->post, p.token, n, post);
        load_token(&a->res, p.token, n * n, res);
        load_token(&a->d_y, p.token, n * channels, w.y);
        post_backward(&p, w.x, w.y, w.d_x, w.d_f, d_post, d_res);
        grad_token(&a->d_x, p.token, n * channels, w.d_x);
        grad_token(&a->d_f, p.token, channels, w.d_f);
        grad_token(&a->d_post, p.token, n, d_post);
        grad_token(&a->d_res, p.token, n * n, d_res);
        for (int64_t c = 0; c < channels; c++) w.d_bias[c] += w.d_f[c];
    }
    grad_param(&a->d_bias, channels, w.d_bias);
    return WEFT_OK;
}

const weft_kernel weft_ref_mhc_post_fwd[] = {{.run = run_fwd, .workspace = workspace_fwd}, {0}};
const weft_kernel weft_ref_mhc_post_bwd[] = {{.run = run_bwd, .workspace = workspace_bwd}, {0}};
