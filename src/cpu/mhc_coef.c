/* SPDX-License-Identifier: Apache-2.0
 *
 * Coefficients = gates + Sinkhorn [M4], one token per lane. Everything between h and the coefficients stays in
 * registers or on the stack; backward starts again from h and ms. */
#include "cpu/common/lanes.h"
#include "cpu/common/tiles.h"

enum { MAX_GATES = 2 * WEFT_MAX_STREAMS + WEFT_MAX_STREAMS * WEFT_MAX_STREAMS };

void CPU(coef_fwd_tile)(const weft_call *call, const weft_mhc_coef_fwd_args *a, const float *alpha,
                        const float *beta, int64_t t0, int64_t t1)
{
    vf h[MAX_GATES], z[MAX_GATES], ms = vf_set1(0);
    int64_t rows = call->rows;
    int n = (int)call->streams;
    /* Without res there is no need for the n*n logits. */
    int64_t used = weft_has(&a->res) ? rows : 2 * n;
    for (int64_t m = t0; m < t1; m += LANES) {
        int valid = (int)min64(LANES, t1 - m);
        lanes_load(h, &a->h, m, valid, used);
        lanes_load(&ms, &a->ms, m, valid, 1);
        CPU(gates_fwd)(&a->numerics, n, used, alpha, beta, h, ms, z);
        if (weft_has(&a->pre)) lanes_store(&a->pre, false, z, m, valid, n);
        if (weft_has(&a->post)) lanes_store(&a->post, false, z + n, m, valid, n);
        if (!weft_has(&a->res)) continue;
        CPU(sinkhorn_lanes_fwd)(&a->numerics, n, z + 2 * n);
        lanes_store(&a->res, false, z + 2 * n, m, valid, n * n);
    }
}

void CPU(coef_bwd_tile)(const weft_call *call, const weft_mhc_coef_bwd_args *a, const float *alpha,
                        const float *beta, float *sums, vf *hist, int64_t t0, int64_t t1)
{
    vf h[MAX_GATES], z[MAX_GATES], dz[MAX_GATES], dh[MAX_GATES], ms = vf_set1(0), dms, dalpha[3];
    int64_t rows = call->rows;
    int n = (int)call->streams;
    for (int64_t m = t0; m < t1; m += LANES) {
        int valid = (int)min64(LANES, t1 - m);
        lanes_load(h, &a->h, m, valid, rows);
        lanes_load(&ms, &a->ms, m, valid, 1);
        lanes_zero(dz, rows);
        if (weft_has(&a->d_pre)) lanes_load(dz, &a->d_pre, m, valid, n);
        if (weft_has(&a->d_post)) lanes_load(dz + n, &a->d_post, m, valid, n);
        if (weft_has(&a->d_res)) {
            lanes_load(dz + 2 * n, &a->d_res, m, valid, n * n);
            CPU(gates_fwd)(&a->numerics, n, rows, alpha, beta, h, ms, z);
            CPU(sinkhorn_lanes_bwd)(&a->numerics, n, z + 2 * n, dz + 2 * n, hist);
        }
        CPU(gates_bwd)(&a->numerics, n, rows, alpha, beta, h, ms, dz, dh, &dms, dalpha);
        if (weft_has(&a->d_h.to)) lanes_store(&a->d_h.to, a->d_h.add, dh, m, valid, rows);
        if (weft_has(&a->d_ms.to)) lanes_store(&a->d_ms.to, a->d_ms.add, &dms, m, valid, 1);
        if (!sums) continue;
        lanes_sum(sums, dz, valid, rows);
        lanes_sum(sums + rows, dalpha, valid, call->scales);
    }
}

/* ---- operators ----------------------------------------------------------------------------------------------------- */

typedef struct plan {
    const weft_call *call;
    const void *args;
    float *alpha, *beta;
    char *hist; /* one area per thread */
    int64_t hist_bytes, base;
    cpu_sum sum; /* d_beta[N], d_alpha[S] */
} plan;

static weft_arena lay_out(plan *p, const weft_call *call, const void *args, const weft_mhc_numerics *bwd, bool sum)
{
    weft_arena arena = cpu_arena(call);
    *p = (plan){.call = call, .args = args};
    p->alpha = weft_arena_take(&arena, WIDE * 4);
    p->beta = weft_arena_take(&arena, (size_t)pad16(call->rows) * 4);
    if (bwd) {
        p->hist_bytes = (CPU(sinkhorn_history)(bwd, call->streams) + 63) / 64 * 64;
        p->hist = weft_arena_take(&arena, cpu_rooms(call, p->hist_bytes));
    }
    p->sum = sum_take(&arena, SUM_TOKENS, call->rows + call->scales, sum);
    return arena;
}

static void fwd_body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    (void)thread;
    CPU(coef_fwd_tile)
    (p->call, p->args, p->alpha, p->beta, item * BLOCK, min64((item + 1) * BLOCK, p->call->tokens));
}

static void bwd_body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    int64_t t0 = p->base + item * BLOCK;
    float *sum = sum_block(&p->sum, item);
    sum_zero(sum, p->sum.width);
    CPU(coef_bwd_tile)
    (p->call, p->args, p->alpha, p->beta, sum, (vf *)(void *)(p->hist + thread * p->hist_bytes), t0,
     min64(t0 + BLOCK, p->call->tokens));
}

static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_mhc_coef_fwd_args *a = args;
    plan p;
    lay_out(&p, call, args, NULL, false);
    vector_load(p.alpha, &a->alpha, call->scales, 0);
    vector_load(p.beta, &a->beta, call->rows, 0);
    int64_t work = call->tokens * call->rows * a->numerics.sinkhorn_iters;
    cpu_parallel(call, (call->tokens + BLOCK - 1) / BLOCK, work, fwd_body, &p);
    return WEFT_OK;
}

static bool wants_sum(const weft_mhc_coef_bwd_args *a)
{
    return weft_has(&a->d_alpha.to) || weft_has(&a->d_beta.to);
}

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_mhc_coef_bwd_args *a = args;
    plan p;
    lay_out(&p, call, args, &a->numerics, wants_sum(a));
    vector_load(p.alpha, &a->alpha, call->scales, 0);
    vector_load(p.beta, &a->beta, call->rows, 0);
    sum_zero(p.sum.total, p.sum.width);
    for (; p.base < call->tokens; p.base += SUM_TOKENS) {
        int64_t tokens = min64(SUM_TOKENS, call->tokens - p.base), blocks = (tokens + BLOCK - 1) / BLOCK;
        cpu_parallel(call, blocks, tokens * call->rows * a->numerics.sinkhorn_iters, bwd_body, &p);
        sum_fold(&p.sum, blocks);
    }
    sum_store(&p.sum, 0, &a->d_beta);
    sum_store(&p.sum, call->rows, &a->d_alpha);
    return WEFT_OK;
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    plan p;
    weft_arena arena = lay_out(&p, call, args, NULL, false);
    return weft_arena_bytes(&arena);
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    const weft_mhc_coef_bwd_args *a = args;
    plan p;
    weft_arena arena = lay_out(&p, call, args, &a->numerics, wants_sum(a));
    return weft_arena_bytes(&arena);
}

const weft_kernel CPU(mhc_coef_fwd)[] = {{.run = fwd, .workspace = fwd_workspace}, {0}};
const weft_kernel CPU(mhc_coef_bwd)[] = {{.run = bwd, .workspace = bwd_workspace}, {0}};
