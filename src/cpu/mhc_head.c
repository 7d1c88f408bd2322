/* SPDX-License-Identifier: Apache-2.0
 *
 * Learned head contraction [M9]: projection to n rows, gates, aggregate, tile by tile. */
#include "cpu/common/lanes.h"
#include "cpu/common/tiles.h"

static weft_mhc_numerics numerics_of(double rms_eps, weft_eps_kind kind, double pre_eps)
{
    return (weft_mhc_numerics){.rms_eps = rms_eps, .rms_eps_kind = kind, .pre_eps = pre_eps, .post_mult = 1};
}

/* gate [m, n] from h and ms. */
static void gate_tile(const weft_mhc_numerics *num, const weft_tensor *h, const weft_tensor *ms, const float *alpha,
                      const float *beta, const weft_tensor *gate, int64_t m)
{
    vf z[WEFT_MAX_STREAMS], hv[WEFT_MAX_STREAMS], msv = vf_set1(0);
    int n = (int)h->shape[1];
    for (int64_t t = 0; t < m; t += LANES) {
        int valid = (int)min64(LANES, m - t);
        lanes_load(hv, h, t, valid, n);
        lanes_load(&msv, ms, t, valid, 1);
        CPU(gates_fwd)(num, n, n, alpha, beta, hv, msv, z);
        lanes_store(gate, false, z, t, valid, n);
    }
}

/* Scratch of one thread. */
typedef struct room {
    float *h, *ms, *gate, *d_gate;
} room;

static room room_at(char *base, const weft_call *call, int64_t *bytes)
{
    weft_arena arena = {base, 0};
    room r;
    r.h = weft_arena_take(&arena, (size_t)(TILE * call->streams) * 4);
    r.ms = weft_arena_take(&arena, TILE * 4);
    r.gate = weft_arena_take(&arena, (size_t)(TILE * call->streams) * 4);
    r.d_gate = weft_arena_take(&arena, (size_t)(TILE * call->streams) * 4);
    if (bytes) *bytes = (int64_t)arena.used;
    return r;
}

typedef struct plan {
    weft_call call; /* with rows = streams */
    const void *args;
    cpu_psi psi;
    cpu_dpsi dpsi;
    float *alpha, *beta, *dh, *dms;
    cpu_sum sum; /* d_beta[n], d_alpha[1] */
    char *rooms;
    int64_t room_bytes, base;
    bool stream;
} plan;

static void take_common(plan *p, weft_arena *arena, const weft_call *call, const void *args)
{
    *p = (plan){.call = *call, .args = args};
    p->call.rows = call->streams;
    p->alpha = weft_arena_take(arena, WIDE * 4);
    p->beta = weft_arena_take(arena, (size_t)pad16(call->streams) * 4);
    room_at(NULL, call, &p->room_bytes);
    p->rooms = weft_arena_take(arena, cpu_rooms(call, p->room_bytes));
}

/* ---- forward ------------------------------------------------------------------------------------------------------- */

static weft_arena fwd_lay_out(plan *p, const weft_call *call, const weft_mhc_head_fwd_args *a)
{
    weft_arena arena = cpu_arena(call);
    take_common(p, &arena, call, a);
    p->psi = CPU(psi_take)(&arena, &p->call, &a->x, &a->phi, &a->norm_weight, false);
    return arena;
}

static void fwd_body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    const weft_mhc_head_fwd_args *a = p->args;
    room r = room_at(p->rooms + thread * p->room_bytes, &p->call, NULL);
    weft_mhc_numerics num = numerics_of(a->rms_eps, a->rms_eps_kind, a->pre_eps);
    int64_t tile = tile_tokens(&p->call), t0 = item * tile, m = min64(tile, p->call.tokens - t0),
            n = p->call.streams;
    weft_tensor h = weft_has(&a->h) ? from(&a->h, t0) : weft_dense2(r.h, WEFT_F32, m, n);
    weft_tensor ms = weft_has(&a->ms) ? from(&a->ms, t0) : weft_dense1(r.ms, WEFT_F32, m);
    weft_tensor gate = weft_dense2(r.gate, WEFT_F32, m, n);
    weft_mhc_aggregate_fwd_args aggregate = {.x = from(&a->x, t0), .pre = gate, .u = from(&a->u, t0)};
    CPU(project_fwd_tile)(&p->psi, &aggregate.x, &h, &ms, 0, m);
    gate_tile(&num, &h, &ms, p->alpha, p->beta, &gate, m);
    CPU(aggregate_fwd_tile)(&aggregate, 0, m, p->stream);
    stream_fence();
}

static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_mhc_head_fwd_args *a = args;
    plan p;
    fwd_lay_out(&p, call, a);
    p.stream = stream_pays(call, &a->u, call->tokens * call->channels);
    CPU(psi_pack)(call, &p.psi, &a->phi, &a->norm_weight);
    vector_load(p.alpha, &a->alpha, 1, 0);
    vector_load(p.beta, &a->beta, call->streams, 0);
    int64_t tile = tile_tokens(call);
    cpu_parallel(call, (call->tokens + tile - 1) / tile, call->tokens * call->streams * call->channels, fwd_body,
                 &p);
    return WEFT_OK;
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    plan p;
    weft_arena arena = fwd_lay_out(&p, call, args);
    return weft_arena_bytes(&arena);
}

/* ---- backward ------------------------------------------------------------------------------------------------------ */

static weft_arena bwd_lay_out(plan *p, const weft_call *call, const weft_mhc_head_bwd_args *a)
{
    weft_arena arena = cpu_arena(call);
    int64_t macro = macro_tokens(call);
    take_common(p, &arena, call, a);
    if (weft_has(&a->d_x.to)) p->psi = CPU(psi_take)(&arena, &p->call, &a->x, &a->phi, &a->norm_weight, true);
    p->dpsi = CPU(dpsi_take)(&arena, &p->call, weft_has(&a->d_phi.to) || weft_has(&a->d_norm_weight.to));
    p->dh = weft_arena_take(&arena, (size_t)(macro * call->streams) * 4);
    p->dms = weft_arena_take(&arena, (size_t)macro * 4);
    p->sum = sum_take(&arena, macro, call->streams + 3, weft_has(&a->d_alpha.to) || weft_has(&a->d_beta.to));
    return arena;
}

/* dh and dms from d_gate, and this tile's part of d_beta and d_alpha. */
static void gate_bwd_tile(const weft_mhc_numerics *num, const weft_tensor *h, const weft_tensor *ms,
                          const float *alpha, const float *beta, const weft_tensor *d_gate, const weft_tensor *dh,
                          const weft_tensor *dms, float *sum, int64_t m)
{
    vf hv[WEFT_MAX_STREAMS], dz[WEFT_MAX_STREAMS], dhv[WEFT_MAX_STREAMS], msv = vf_set1(0), dmsv, dalpha[3];
    int n = (int)h->shape[1];
    for (int64_t t = 0; t < m; t += LANES) {
        int valid = (int)min64(LANES, m - t);
        lanes_load(hv, h, t, valid, n);
        lanes_load(&msv, ms, t, valid, 1);
        lanes_load(dz, d_gate, t, valid, n);
        CPU(gates_bwd)(num, n, n, alpha, beta, hv, msv, dz, dhv, &dmsv, dalpha);
        lanes_store(dh, false, dhv, t, valid, n);
        lanes_store(dms, false, &dmsv, t, valid, 1);
        if (!sum) continue;
        lanes_sum(sum, dz, valid, n);
        lanes_sum(sum + n, dalpha, valid, 1);
    }
}

static void bwd_body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    const weft_mhc_head_bwd_args *a = p->args;
    room r = room_at(p->rooms + thread * p->room_bytes, &p->call, NULL);
    weft_mhc_numerics num = numerics_of(a->rms_eps, a->rms_eps_kind, a->pre_eps);
    int64_t n = p->call.streams, offset = item * BLOCK, t = p->base + offset, m = min64(BLOCK, p->call.tokens - t);
    float *sum = sum_block(&p->sum, item);
    weft_tensor x = from(&a->x, t), h = from(&a->h, t), ms = from(&a->ms, t), d_u = from(&a->d_u, t);
    weft_tensor gate = weft_dense2(r.gate, WEFT_F32, m, n), d_gate = weft_dense2(r.d_gate, WEFT_F32, m, n);
    weft_tensor dh = weft_dense2(p->dh + offset * n, WEFT_F32, m, n),
                dms = weft_dense1(p->dms + offset, WEFT_F32, m);
    weft_mhc_aggregate_bwd_args aggregate = {.x = x, .pre = gate, .d_u = d_u, .d_pre = {.to = d_gate}};
    weft_grad d_x = grad_from(&a->d_x, t);
    sum_zero(sum, p->sum.width);
    gate_tile(&num, &h, &ms, p->alpha, p->beta, &gate, m);
    CPU(aggregate_bwd_tile)(&aggregate, 0, m, false);
    gate_bwd_tile(&num, &h, &ms, p->alpha, p->beta, &d_gate, &dh, &dms, sum, m);
    if (weft_has(&d_x.to)) CPU(project_dx_tile)(&p->psi, &x, &dh, &dms, &gate, &d_u, NULL, &d_x, 0, m, p->stream);
    stream_fence();
}

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_mhc_head_bwd_args *a = args;
    plan p;
    bwd_lay_out(&p, call, a);
    p.stream = stream_pays(call, &a->d_x.to, call->tokens * call->streams * call->channels);
    if (weft_has(&a->d_x.to)) CPU(psi_pack)(call, &p.psi, &a->phi, &a->norm_weight);
    CPU(dpsi_zero)(call, &p.dpsi);
    vector_load(p.alpha, &a->alpha, 1, 0);
    vector_load(p.beta, &a->beta, call->streams, 0);
    sum_zero(p.sum.total, p.sum.width);
    for (; p.base < call->tokens; p.base += macro_tokens(call)) {
        int64_t tokens = min64(macro_tokens(call), call->tokens - p.base), blocks = (tokens + BLOCK - 1) / BLOCK;
        weft_tensor x = from(&a->x, p.base), dh = weft_dense2(p.dh, WEFT_F32, tokens, call->streams);
        cpu_parallel(call, blocks, tokens * call->streams * call->streams * call->channels, bwd_body, &p);
        CPU(dpsi_add)(call, &p.dpsi, &x, &dh, tokens);
        sum_fold(&p.sum, blocks);
    }
    CPU(dpsi_store)(call, &p.dpsi, &a->phi, &a->norm_weight, &a->d_phi, &a->d_norm_weight);
    sum_store(&p.sum, 0, &a->d_beta);
    sum_store(&p.sum, call->streams, &a->d_alpha);
    return WEFT_OK;
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    plan p;
    weft_arena arena = bwd_lay_out(&p, call, args);
    return weft_arena_bytes(&arena);
}

const weft_kernel CPU(mhc_head_fwd)[] = {{.run = fwd, .workspace = fwd_workspace}, {0}};
const weft_kernel CPU(mhc_head_bwd)[] = {{.run = bwd, .workspace = bwd_workspace}, {0}};
