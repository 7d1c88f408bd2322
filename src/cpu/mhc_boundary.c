/* SPDX-License-Identifier: Apache-2.0
 *
 * Post of one sub-layer and pre of the next [M11], tile by tile: the new streams of a tile are projected and aggregated
 * while they are in cache. Bytes per token, bf16: forward 4nC + 4C. */
#include "core/mhc_parts.h"
#include "cpu/mhc_pre.h"

/* ---- forward ------------------------------------------------------------------------------------------------------- */

typedef struct fwd_plan {
    const weft_call *call;
    weft_mhc_post_fwd_args post;
    weft_mhc_pre_fwd_args pre;
    cpu_pre_fwd state;
    float *bias;
} fwd_plan;

static weft_arena fwd_lay_out(fwd_plan *p, const weft_call *call, const weft_mhc_boundary_fwd_args *a)
{
    weft_arena arena = cpu_arena(call);
    *p = (fwd_plan){.call = call, .post = weft_boundary_post_fwd(a), .pre = weft_boundary_pre_fwd(a)};
    p->state = CPU(pre_fwd_take)(&arena, call, &p->pre);
    if (weft_has(&a->bias)) p->bias = weft_arena_take(&arena, (size_t)pad16(call->channels) * 4);
    return arena;
}

static void fwd_body(void *context, int64_t item, int thread)
{
    const fwd_plan *p = context;
    int64_t tile = tile_tokens(p->call), t0 = item * tile, t1 = min64(t0 + tile, p->call->tokens);
    CPU(post_fwd_tile)(&p->post, p->bias, t0, t1, false); /* the next line reads it back */
    CPU(pre_fwd_tile)(p->call, &p->state, &p->pre, t0, t1, thread);
    stream_fence();
}

static weft_status fwd(const weft_call *call, const void *args)
{
    fwd_plan p;
    fwd_lay_out(&p, call, args);
    CPU(pre_fwd_pack)(call, &p.state, &p.pre);
    if (p.bias) vector_load(p.bias, &p.post.bias, call->channels, 0);
    int64_t tile = tile_tokens(call);
    cpu_parallel(call, (call->tokens + tile - 1) / tile, call->tokens * call->rows * call->streams * call->channels,
                 fwd_body, &p);
    return WEFT_OK;
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    fwd_plan p;
    weft_arena arena = fwd_lay_out(&p, call, args);
    return weft_arena_bytes(&arena);
}

/* ---- backward ------------------------------------------------------------------------------------------------------ */

typedef struct bwd_plan {
    const weft_call *call;
    const weft_mhc_boundary_bwd_args *args;
    weft_mhc_pre_bwd_args pre;
    cpu_pre_bwd state;
    float *bias;
    cpu_sum d_bias;
    char *y;   /* rebuilt streams of a macro tile, where the caller has none */
    float *dy; /* per thread: the whole gradient of y of a block, in fp32 */
    int64_t base;
} bwd_plan;

static weft_arena bwd_lay_out(bwd_plan *p, const weft_call *call, const weft_mhc_boundary_bwd_args *a)
{
    weft_arena arena = cpu_arena(call);
    int64_t row = call->streams * call->channels, macro = macro_tokens(call);
    *p = (bwd_plan){.call = call, .args = a, .pre = weft_boundary_pre_bwd(a)};
    if (!weft_has(&a->y)) {
        p->y = weft_arena_take(&arena, (size_t)(macro * row) * size_of(call->dtype));
        p->pre.x = weft_dense3(p->y, call->dtype, macro, call->streams, call->channels);
    }
    if (weft_boundary_wants_post(a)) p->dy = weft_arena_take(&arena, cpu_rooms(call, BLOCK * row * 4));
    p->state = CPU(pre_bwd_take)(&arena, call, &p->pre, weft_boundary_wants_post(a));
    if (weft_has(&a->bias)) p->bias = weft_arena_take(&arena, (size_t)pad16(call->channels) * 4);
    p->d_bias = sum_take(&arena, macro, call->channels, weft_has(&a->d_bias.to));
    return arena;
}

/* The streams of the block t .. t+m as the next site saw them: stored, or rebuilt into the macro tile's buffer. */
static weft_tensor streams_of_block(const bwd_plan *p, int64_t t, int64_t m)
{
    const weft_mhc_boundary_bwd_args *a = p->args;
    if (!p->y) return from(&a->y, t);
    weft_tensor y = from(&p->pre.x, t - p->base);
    weft_mhc_post_fwd_args post = weft_boundary_rebuild(a);
    post.x = from(&a->x, t);
    post.f = from(&a->f, t);
    post.post = from(&a->post, t);
    post.res = from(&a->res, t);
    post.y = y;
    post.dropout.token_base += t;
    CPU(post_fwd_tile)(&post, p->bias, 0, m, false);
    return y;
}

static void bwd_block(const bwd_plan *p, int64_t t, int64_t m, int thread)
{
    const weft_mhc_boundary_bwd_args *a = p->args;
    const weft_call *call = p->call;
    weft_mhc_pre_bwd_args whole = p->pre;
    whole.x = (weft_tensor){0};
    weft_mhc_pre_bwd_args pre = CPU(pre_bwd_from)(&whole, t);
    pre.x = streams_of_block(p, t, m);
    weft_tensor dy = {0};
    const weft_tensor d_y = from(&a->d_y, t);
    if (p->dy) {
        dy = weft_dense3(p->dy + thread * BLOCK * call->streams * call->channels, WEFT_F32, m, call->streams,
                         call->channels);
        pre.d_x.to = dy;
    }
    CPU(pre_bwd_tile)(call, &p->state, &pre, weft_has(&d_y) ? &d_y : NULL, t - p->base, m, thread);
    if (!p->dy) return;
    weft_mhc_post_bwd_args post = weft_boundary_post_bwd(a);
    post.x = from(&a->x, t);
    post.f = from(&a->f, t);
    post.post = from(&a->post, t);
    post.res = from(&a->res, t);
    post.d_y = dy;
    post.d_x = grad_from(&a->d_x, t);
    post.d_f = grad_from(&a->d_f, t);
    post.d_post = grad_from(&a->d_post, t);
    post.d_res = grad_from(&a->d_res, t);
    post.dropout.token_base += t;
    CPU(post_bwd_tile)(&post, p->bias, sum_block(&p->d_bias, (t - p->base) / BLOCK), 0, m, false);
}

static void bwd_body(void *context, int64_t item, int thread)
{
    const bwd_plan *p = context;
    int64_t t0 = p->base + item * BLOCK, end = min64(t0 + BLOCK, p->call->tokens);
    sum_zero(sum_block(&p->d_bias, item), p->d_bias.width);
    if (t0 < end) bwd_block(p, t0, end - t0, thread);
}

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_mhc_boundary_bwd_args *a = args;
    bwd_plan p;
    bwd_lay_out(&p, call, a);
    CPU(pre_bwd_pack)(call, &p.state, &p.pre);
    if (p.bias) vector_load(p.bias, &a->bias, call->channels, 0);
    sum_zero(p.d_bias.total, p.d_bias.width);
    for (; p.base < call->tokens; p.base += macro_tokens(call)) {
        int64_t tokens = min64(macro_tokens(call), call->tokens - p.base), blocks = (tokens + BLOCK - 1) / BLOCK;
        weft_tensor y = p.y ? p.pre.x : from(&a->y, p.base);
        cpu_parallel(call, blocks, tokens * call->rows * call->streams * call->channels, bwd_body, &p);
        CPU(pre_bwd_fold)(call, &p.state, &y, tokens);
        sum_fold(&p.d_bias, blocks);
    }
    CPU(pre_bwd_finish)(call, &p.state, &p.pre);
    sum_store(&p.d_bias, 0, &a->d_bias);
    return WEFT_OK;
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    bwd_plan p;
    weft_arena arena = bwd_lay_out(&p, call, args);
    return weft_arena_bytes(&arena);
}

const weft_kernel CPU(mhc_boundary_fwd)[] = {{.run = fwd, .workspace = fwd_workspace}, {0}};
const weft_kernel CPU(mhc_boundary_bwd)[] = {{.run = bwd, .workspace = bwd_workspace}, {0}};
