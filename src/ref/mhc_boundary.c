/* SPDX-License-Identifier: Apache-2.0
 *
 * Post of one sub-layer and pre of the next in one call [M11]: post [M6] forms y, rounded as it is stored, and the site
 * behind it [M10] works on that. */
#include "core/mhc_parts.h"
#include "ref/pre.h"

typedef struct work {
    pre_site site;
    double *x, *y, *f, *bias;         /* [nC], [nC], [C], [C] */
    double *d_y, *d_x, *d_f, *d_bias; /* backward */
} work;

static void work_forward(work *w, const weft_call *call, weft_arena *arena)
{
    int64_t width = call->streams * call->channels;
    pre_take_forward(&w->site, call, arena);
    w->x = take(arena, width);
    w->y = take(arena, width);
    w->f = take(arena, call->channels);
    w->bias = take(arena, call->channels);
}

static void work_backward(work *w, const weft_call *call, const weft_mhc_numerics *q, weft_arena *arena)
{
    int64_t width = call->streams * call->channels;
    pre_take_backward(&w->site, call, q, arena);
    w->x = take(arena, width);
    w->y = take(arena, width);
    w->f = take(arena, call->channels);
    w->bias = take(arena, call->channels);
    w->d_y = take(arena, width);
    w->d_x = take(arena, width);
    w->d_f = take(arena, call->channels);
    w->d_bias = take(arena, call->channels);
}

static size_t workspace_fwd(const weft_call *call, const void *args)
{
    weft_arena arena = weft_arena_open(NULL);
    work w;
    (void)args;
    work_forward(&w, call, &arena);
    return weft_arena_bytes(&arena);
}

static weft_status run_fwd(const weft_call *call, const void *args)
{
    const weft_mhc_boundary_fwd_args *a = args;
    const weft_mhc_pre_fwd_args site = weft_boundary_pre_fwd(a);
    int64_t n = call->streams, channels = call->channels, width = n * channels;
    double post[WEFT_MAX_STREAMS], res[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS];
    weft_arena arena = weft_arena_open(call->exec->workspace);
    weft_mask mask = weft_mask_open(&a->dropout, channels);
    work w;

    work_forward(&w, call, &arena);
    pre_load_forward(&w.site, &site);
    load_param(&a->bias, channels, 0.0, w.bias);
    for (int64_t t = 0; t < call->tokens; t++) {
        post_token p = {
            n, channels, t, a->numerics.apply, &mask, w.f, w.bias, post, weft_has(&a->res) ? res : NULL};
        load_token(&a->x, t, width, w.x);
        load_token(&a->f, t, channels, w.f);
        load_token(&a->post, t, n, post);
        load_token(&a->res, t, n * n, res);
        post_forward(&p, w.x, w.y);
        store_token(&a->y, t, width, w.y);
        round_all(call->dtype, width, w.y);
        pre_token_forward(&w.site, &site, t, w.y);
    }
    return WEFT_OK;
}

static size_t workspace_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_boundary_bwd_args *a = args;
    weft_arena arena = weft_arena_open(NULL);
    work w;
    work_backward(&w, call, &a->numerics, &arena);
    return weft_arena_bytes(&arena);
}

static weft_status run_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_boundary_bwd_args *a = args;
    const weft_mhc_pre_bwd_args site = weft_boundary_pre_bwd(a);
    int64_t n = call->streams, channels = call->channels, width = n * channels;
    double post[WEFT_MAX_STREAMS], res[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS];
    double d_post[WEFT_MAX_STREAMS], d_res[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS];
    weft_arena arena = weft_arena_open(call->exec->workspace);
    weft_mask mask = weft_mask_open(&a->dropout, channels);
    work w;

    work_backward(&w, call, &a->numerics, &arena);
    pre_load_backward(&w.site, &site);
    load_param(&a->bias, channels, 0.0, w.bias);
    clear(channels, w.d_bias);
    for (int64_t t = 0; t < call->tokens; t++) {
        post_token p = {
            n, channels, t, a->numerics.apply, &mask, w.f, w.bias, post, weft_has(&a->res) ? res : NULL};
        load_token(&a->x, t, width, w.x);
        load_token(&a->f, t, channels, w.f);
        load_token(&a->post, t, n, post);
        load_token(&a->res, t, n * n, res);
        if (weft_has(&a->y)) {
            load_token(&a->y, t, width, w.y);
        } else {
            post_forward(&p, w.x, w.y);
            round_all(call->dtype, width, w.y);
        }
        /* dy = d_y + the site's parts, unrounded */
        load_token(&a->d_y, t, width, w.d_y);
        pre_token_backward(&w.site, &site, t, w.y, w.d_y);
        post_backward(&p, w.x, w.d_y, w.d_x, w.d_f, d_post, d_res);
        grad_token(&a->d_x, t, width, w.d_x);
        grad_token(&a->d_f, t, channels, w.d_f);
        grad_token(&a->d_post, t, n, d_post);
        grad_token(&a->d_res, t, n * n, d_res);
        for (int64_t c = 0; c < channels; c++) w.d_bias[c] += w.d_f[c];
    }
    grad_param(&a->d_bias, channels, w.d_bias);
    pre_store_sums(&w.site, &site);
    return WEFT_OK;
}

const weft_kernel weft_ref_mhc_boundary_fwd[] = {{.run = run_fwd, .workspace = workspace_fwd}, {0}};
const weft_kernel weft_ref_mhc_boundary_bwd[] = {{.run = run_bwd, .workspace = workspace_bwd}, {0}};
