/* SPDX-License-Identifier: Apache-2.0
 *
 * Everything in front of a sub-layer [M10]: a tile of tokens goes through projection, coefficients, aggregate and norm
 * while it is in cache, so x is read from memory once. */
#include "cpu/mhc_pre.h"

static cpu_pre_room room_at(char *base, const weft_call *call, const weft_mhc_numerics *bwd, int64_t *bytes)
{
    weft_arena arena = {base, 0};
    int64_t ld = pad16(call->channels);
    cpu_pre_room r = {0};
    r.h = weft_arena_take(&arena, (size_t)(TILE * call->rows) * 4);
    r.ms = weft_arena_take(&arena, TILE * 4);
    r.pre = weft_arena_take(&arena, (size_t)(TILE * call->streams) * 4);
    r.u = weft_arena_take(&arena, (size_t)(TILE * call->channels) * size_of(call->dtype));
    r.norm = weft_arena_take(&arena, (size_t)(3 * ld) * 4);
    if (bwd) {
        r.d_pre = weft_arena_take(&arena, (size_t)(TILE * call->streams) * 4);
        r.du = weft_arena_take(&arena, (size_t)(TILE * call->channels) * 4);
        r.hist = weft_arena_take(&arena, (size_t)CPU(sinkhorn_history)(bwd, call->streams));
    }
    if (bytes) *bytes = (int64_t)arena.used;
    return r;
}

/* ---- forward ------------------------------------------------------------------------------------------------------- */

cpu_pre_fwd CPU(pre_fwd_take)(weft_arena *arena, const weft_call *call, const weft_mhc_pre_fwd_args *a)
{
    cpu_pre_fwd p = {0};
    p.psi = CPU(psi_take)(arena, call, &a->x, &a->phi, &a->norm_weight, false);
    p.alpha = weft_arena_take(arena, WIDE * 4);
    p.beta = weft_arena_take(arena, (size_t)pad16(call->rows) * 4);
    if (weft_has(&a->sub_weight)) p.sub_weight = weft_arena_take(arena, (size_t)pad16(call->channels) * 4);
    room_at(NULL, call, NULL, &p.room_bytes);
    p.rooms = weft_arena_take(arena, cpu_rooms(call, p.room_bytes));
    p.stream = stream_pays(call, weft_has(&a->v) ? &a->v : &a->u, call->tokens * call->channels);
    return p;
}

void CPU(pre_fwd_pack)(const weft_call *call, const cpu_pre_fwd *p, const weft_mhc_pre_fwd_args *a)
{
    CPU(psi_pack)(call, &p->psi, &a->phi, &a->norm_weight);
    vector_load(p->alpha, &a->alpha, call->scales, 0);
    vector_load(p->beta, &a->beta, call->rows, 0);
    if (p->sub_weight) vector_load(p->sub_weight, &a->sub_weight, call->channels, 1);
}

void CPU(pre_fwd_tile)(const weft_call *call, const cpu_pre_fwd *p, const weft_mhc_pre_fwd_args *a, int64_t t0,
                       int64_t t1, int thread)
{
    cpu_pre_room room = room_at(p->rooms + thread * p->room_bytes, call, NULL, NULL);
    int64_t m = t1 - t0;
    bool want_u = weft_has(&a->u) || weft_has(&a->v);
    weft_tensor x = from(&a->x, t0), pre = from(&a->pre, t0), u = from(&a->u, t0);
    weft_tensor h = weft_has(&a->h) ? from(&a->h, t0) : weft_dense2(room.h, WEFT_F32, m, call->rows);
    weft_tensor ms = weft_has(&a->ms) ? from(&a->ms, t0) : weft_dense1(room.ms, WEFT_F32, m);
    if (!weft_has(&pre) && want_u && !weft_has(&a->pre_in)) pre = weft_dense2(room.pre, WEFT_F32, m, call->streams);
    if (!weft_has(&u) && want_u) u = weft_dense2(room.u, call->dtype, m, call->channels);
    CPU(project_fwd_tile)(&p->psi, &x, &h, &ms, 0, m);
    weft_mhc_coef_fwd_args coef = {.numerics = a->numerics,
                                   .h = h,
                                   .ms = ms,
                                   .pre = pre,
                                   .post = from(&a->post, t0),
                                   .res = from(&a->res, t0)};
    CPU(coef_fwd_tile)(call, &coef, p->alpha, p->beta, 0, m);
    if (!want_u) return;
    weft_mhc_aggregate_fwd_args aggregate = {
        .x = x, .pre = weft_has(&a->pre_in) ? from(&a->pre_in, t0) : pre, .u = u};
    CPU(aggregate_fwd_tile)(&aggregate, 0, m, p->stream && !weft_has(&a->v));
    if (!weft_has(&a->v)) return;
    weft_rmsnorm_fwd_args norm = {.eps = a->sub_eps, .u = u, .v = from(&a->v, t0)};
    CPU(rmsnorm_fwd_tile)(&norm, p->sub_weight, room.norm, 0, m, p->stream);
}

/* ---- backward ------------------------------------------------------------------------------------------------------ */

cpu_pre_bwd CPU(pre_bwd_take)(weft_arena *arena, const weft_call *call, const weft_mhc_pre_bwd_args *a, bool d_x)
{
    cpu_pre_bwd p = {0};
    int64_t macro = macro_tokens(call);
    if (d_x) p.psi = CPU(psi_take)(arena, call, &a->x, &a->phi, &a->norm_weight, true);
    p.dpsi = CPU(dpsi_take)(arena, call, weft_has(&a->d_phi.to) || weft_has(&a->d_norm_weight.to));
    p.alpha = weft_arena_take(arena, WIDE * 4);
    p.beta = weft_arena_take(arena, (size_t)pad16(call->rows) * 4);
    if (weft_has(&a->sub_weight)) p.sub_weight = weft_arena_take(arena, (size_t)pad16(call->channels) * 4);
    p.dh = weft_arena_take(arena, (size_t)(macro * call->rows) * 4);
    p.dms = weft_arena_take(arena, (size_t)macro * 4);
    p.gates =
        sum_take(arena, macro, call->rows + call->scales, weft_has(&a->d_alpha.to) || weft_has(&a->d_beta.to));
    p.norm = sum_take(arena, macro, call->channels, weft_has(&a->d_sub_weight.to));
    p.stream = stream_pays(call, &a->d_x.to, call->tokens * call->streams * call->channels);
    room_at(NULL, call, &a->numerics, &p.room_bytes);
    p.rooms = weft_arena_take(arena, cpu_rooms(call, p.room_bytes));
    return p;
}

void CPU(pre_bwd_pack)(const weft_call *call, const cpu_pre_bwd *p, const weft_mhc_pre_bwd_args *a)
{
    if (p->psi.rows) CPU(psi_pack)(call, &p->psi, &a->phi, &a->norm_weight);
    CPU(dpsi_zero)(call, &p->dpsi);
    sum_zero(p->gates.total, p->gates.width);
    sum_zero(p->norm.total, p->norm.width);
    vector_load(p->alpha, &a->alpha, call->scales, 0);
    vector_load(p->beta, &a->beta, call->rows, 0);
    if (p->sub_weight) vector_load(p->sub_weight, &a->sub_weight, call->channels, 1);
}

weft_mhc_pre_bwd_args CPU(pre_bwd_from)(const weft_mhc_pre_bwd_args *a, int64_t t0)
{
    weft_mhc_pre_bwd_args s = *a;
    s.x = from(&a->x, t0);
    s.pre_in = from(&a->pre_in, t0);
    s.h = from(&a->h, t0);
    s.ms = from(&a->ms, t0);
    s.d_u = from(&a->d_u, t0);
    s.d_v = from(&a->d_v, t0);
    s.d_pre = from(&a->d_pre, t0);
    s.d_post = from(&a->d_post, t0);
    s.d_res = from(&a->d_res, t0);
    s.d_x = grad_from(&a->d_x, t0);
    s.d_pre_in = grad_from(&a->d_pre_in, t0);
    return s;
}

/* du = d_u + the norm's part of d_v, in fp32 where there is a norm. */
static weft_tensor join_du(const weft_call *call, const cpu_pre_bwd *p, const weft_mhc_pre_bwd_args *a,
                           const weft_tensor *pre, const cpu_pre_room *room, float *d_weight, int64_t m)
{
    if (!weft_has(&a->d_v)) return a->d_u;
    weft_tensor u = weft_dense2(room->u, call->dtype, m, call->channels);
    weft_tensor du = weft_dense2(room->du, WEFT_F32, m, call->channels);
    weft_mhc_aggregate_fwd_args aggregate = {.x = a->x, .pre = *pre, .u = u};
    CPU(aggregate_fwd_tile)(&aggregate, 0, m, false);
    for (int64_t t = 0; t < m && weft_has(&a->d_u); t++)
        for (int64_t c = 0; c < call->channels; c += CHUNK) {
            _Alignas(64) float part[CHUNK];
            int64_t count = min64(CHUNK, call->channels - c);
            row_load(part, &a->d_u, t, c, count);
            row_store(&du, false, part, t, c, count);
        }
    weft_rmsnorm_bwd_args norm = {
        .eps = a->sub_eps, .u = u, .d_v = a->d_v, .d_u = {.to = du, .add = weft_has(&a->d_u)}};
    CPU(rmsnorm_bwd_tile)(&norm, p->sub_weight, d_weight, room->norm, 0, m, false);
    return du;
}

void CPU(pre_bwd_tile)(const weft_call *call, const cpu_pre_bwd *p, const weft_mhc_pre_bwd_args *a,
                       const weft_tensor *base, int64_t offset, int64_t tokens, int thread)
{
    cpu_pre_room room = room_at(p->rooms + thread * p->room_bytes, call, &a->numerics, NULL);
    int64_t m = tokens, block = offset / BLOCK;
    bool shifted = weft_has(&a->pre_in), has_du = weft_has(&a->d_u) || weft_has(&a->d_v);
    weft_tensor pre = shifted ? a->pre_in : weft_dense2(room.pre, WEFT_F32, m, call->streams);
    weft_tensor d_pre = a->d_pre, du = {0};
    sum_zero(sum_block(&p->gates, block), p->gates.width);
    sum_zero(sum_block(&p->norm, block), p->norm.width);
    if (has_du) {
        weft_mhc_coef_fwd_args coef = {.numerics = a->numerics, .h = a->h, .ms = a->ms, .pre = pre};
        if (!shifted) CPU(coef_fwd_tile)(call, &coef, p->alpha, p->beta, 0, m);
        du = join_du(call, p, a, &pre, &room, sum_block(&p->norm, block), m);
        /* The aggregate's part of d_pre belongs to pre_in where there is one, else to the coefficients of this site. */
        weft_mhc_aggregate_bwd_args aggregate = {.x = a->x, .pre = pre, .d_u = du, .d_pre = a->d_pre_in};
        if (!shifted) {
            d_pre = weft_dense2(room.d_pre, WEFT_F32, m, call->streams);
            aggregate.d_pre = (weft_grad){d_pre, weft_has(&a->d_pre)};
            for (int64_t t = 0; t < m && weft_has(&a->d_pre); t++)
                coef_load(room.d_pre + t * call->streams, &a->d_pre, t);
        }
        if (weft_has(&aggregate.d_pre.to)) CPU(aggregate_bwd_tile)(&aggregate, 0, m, false);
    } else if (weft_has(&a->d_pre_in.to) && !a->d_pre_in.add) {
        float zero[WEFT_MAX_STREAMS] = {0};
        for (int64_t t = 0; t < m; t++) coef_store(&a->d_pre_in.to, false, zero, t);
    }
    weft_tensor dh = weft_dense2(p->dh + offset * call->rows, WEFT_F32, m, call->rows);
    weft_tensor dms = weft_dense1(p->dms + offset, WEFT_F32, m);
    weft_mhc_coef_bwd_args coef = {.numerics = a->numerics,
                                   .h = a->h,
                                   .ms = a->ms,
                                   .d_pre = d_pre,
                                   .d_post = a->d_post,
                                   .d_res = a->d_res,
                                   .d_h = {.to = dh},
                                   .d_ms = {.to = dms}};
    CPU(coef_bwd_tile)(call, &coef, p->alpha, p->beta, sum_block(&p->gates, block), room.hist, 0, m);
    if (weft_has(&a->d_x.to)) CPU(project_dx_tile)
    (&p->psi, &a->x, &dh, &dms, has_du ? &pre : NULL, &du, base, &a->d_x, 0, m, p->stream);
}

void CPU(pre_bwd_fold)(const weft_call *call, const cpu_pre_bwd *p, const weft_tensor *x, int64_t tokens)
{
    weft_tensor dh = weft_dense2(p->dh, WEFT_F32, tokens, call->rows);
    CPU(dpsi_add)(call, &p->dpsi, x, &dh, tokens);
    sum_fold(&p->gates, (tokens + BLOCK - 1) / BLOCK);
    sum_fold(&p->norm, (tokens + BLOCK - 1) / BLOCK);
}

void CPU(pre_bwd_finish)(const weft_call *call, const cpu_pre_bwd *p, const weft_mhc_pre_bwd_args *a)
{
    CPU(dpsi_store)(call, &p->dpsi, &a->phi, &a->norm_weight, &a->d_phi, &a->d_norm_weight);
    sum_store(&p->gates, 0, &a->d_beta);
    sum_store(&p->gates, call->rows, &a->d_alpha);
    sum_store(&p->norm, 0, &a->d_sub_weight);
}

/* ---- operators ----------------------------------------------------------------------------------------------------- */

typedef struct fwd_plan {
    const weft_call *call;
    const weft_mhc_pre_fwd_args *args;
    cpu_pre_fwd pre;
} fwd_plan;

static void fwd_body(void *context, int64_t item, int thread)
{
    const fwd_plan *p = context;
    int64_t tile = tile_tokens(p->call);
    CPU(pre_fwd_tile)(p->call, &p->pre, p->args, item * tile, min64((item + 1) * tile, p->call->tokens), thread);
    stream_fence();
}

static weft_status fwd(const weft_call *call, const void *args)
{
    fwd_plan p = {.call = call, .args = args};
    weft_arena arena = cpu_arena(call);
    p.pre = CPU(pre_fwd_take)(&arena, call, args);
    CPU(pre_fwd_pack)(call, &p.pre, args);
    int64_t tile = tile_tokens(call);
    cpu_parallel(call, (call->tokens + tile - 1) / tile, call->tokens * call->rows * call->streams * call->channels,
                 fwd_body, &p);
    return WEFT_OK;
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    weft_arena arena = cpu_arena(call);
    CPU(pre_fwd_take)(&arena, call, args);
    return weft_arena_bytes(&arena);
}

typedef struct bwd_plan {
    const weft_call *call;
    const weft_mhc_pre_bwd_args *args;
    cpu_pre_bwd pre;
    int64_t base;
} bwd_plan;

static void bwd_body(void *context, int64_t item, int thread)
{
    const bwd_plan *p = context;
    int64_t t = p->base + item * BLOCK;
    weft_mhc_pre_bwd_args a = CPU(pre_bwd_from)(p->args, t);
    CPU(pre_bwd_tile)(p->call, &p->pre, &a, NULL, item * BLOCK, min64(BLOCK, p->call->tokens - t), thread);
    stream_fence();
}

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_mhc_pre_bwd_args *a = args;
    bwd_plan p = {.call = call, .args = args};
    weft_arena arena = cpu_arena(call);
    p.pre = CPU(pre_bwd_take)(&arena, call, a, weft_has(&a->d_x.to));
    CPU(pre_bwd_pack)(call, &p.pre, a);
    for (; p.base < call->tokens; p.base += macro_tokens(call)) {
        int64_t tokens = min64(macro_tokens(call), call->tokens - p.base);
        weft_tensor x = from(&a->x, p.base);
        cpu_parallel(call, (tokens + BLOCK - 1) / BLOCK, tokens * call->rows * call->streams * call->channels,
                     bwd_body, &p);
        CPU(pre_bwd_fold)(call, &p.pre, &x, tokens);
    }
    CPU(pre_bwd_finish)(call, &p.pre, a);
    return WEFT_OK;
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    const weft_mhc_pre_bwd_args *a = args;
    weft_arena arena = cpu_arena(call);
    CPU(pre_bwd_take)(&arena, call, a, weft_has(&a->d_x.to));
    return weft_arena_bytes(&arena);
}

const weft_kernel CPU(mhc_pre_fwd)[] = {{.run = fwd, .workspace = fwd_workspace}, {0}};
const weft_kernel CPU(mhc_pre_bwd)[] = {{.run = bwd, .workspace = bwd_workspace}, {0}};
