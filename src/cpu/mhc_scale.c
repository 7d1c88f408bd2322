/* SPDX-License-Identifier: Apache-2.0
 *
 * Gates [M2], one token per lane. The learned head uses the same functions with n rows, all of them `pre`. */
#include "cpu/common/lanes.h"
#include "cpu/common/math.h"
#include "cpu/common/tiles.h"

enum { MAX_GATES = 2 * WEFT_MAX_STREAMS + WEFT_MAX_STREAMS * WEFT_MAX_STREAMS };

/* The row after the last one of group g: pre (0), post (1) or res (2). */
INLINE int64_t group_end(int g, int n, int64_t rows)
{
    return g == 2 || (g + 1) * n > rows ? rows : (g + 1) * n;
}

/* z receives pre[n] | post[n] | logits, as many as there are rows. */
void CPU(gates_fwd)(const weft_mhc_numerics *m, int n, int64_t rows, const float *alpha, const float *beta,
                    const vf *h, vf ms, vf *z)
{
    vf inv = mm_inv_rms(ms, (float)m->rms_eps, (int)m->rms_eps_kind), s, t;
    int64_t j = 0;
    for (int g = 0; g < 3; g++)
        for (int64_t end = group_end(g, n, rows); j < end; j++) {
            z[j] = mm_gate_logit(h[j], inv, alpha[g], beta[j]);
            if (g == 2) continue;
            mm_sigmoid(z[j], &s, &t);
            z[j] = g == 0 ? s + (float)m->pre_eps : s * (float)m->post_mult + (float)m->post_eps;
        }
}

/* dz: upstream of pre | post | logits, becomes the gradient of the arguments of the sigmoids (and so of beta).
 * dalpha[3] receives this token's part. */
void CPU(gates_bwd)(const weft_mhc_numerics *m, int n, int64_t rows, const float *alpha, const float *beta,
                    const vf *h, vf ms, vf *dz, vf *dh, vf *dms, vf *dalpha)
{
    vf inv = mm_inv_rms(ms, (float)m->rms_eps, (int)m->rms_eps_kind), dinv = vf_set1(0), s, t;
    int64_t j = 0;
    for (int g = 0; g < 3; g++) {
        vf sum = vf_set1(0);
        for (int64_t end = group_end(g, n, rows); j < end; j++) {
            vf d = dz[j];
            if (g < 2) {
                mm_sigmoid(mm_gate_logit(h[j], inv, alpha[g], beta[j]), &s, &t);
                d = d * s * t;
                if (g == 1) d = d * (float)m->post_mult;
                dz[j] = d;
            }
            sum = vf_fma(d, h[j] * inv, sum);
            vf da = d * alpha[g];
            dh[j] = da * inv;
            dinv = vf_fma(da, h[j], dinv);
        }
        dalpha[g] = sum;
    }
    *dms = dinv * mm_d_inv_rms(ms, inv, (float)m->rms_eps, (int)m->rms_eps_kind);
}

/* ---- operators ----------------------------------------------------------------------------------------------------- */

typedef struct plan {
    const weft_call *call;
    const void *args;
    float *alpha, *beta;
    cpu_sum sum; /* d_beta[N], d_alpha[S] */
    int64_t base;
} plan;

static weft_arena lay_out(plan *p, const weft_call *call, const void *args, bool sum)
{
    weft_arena arena = cpu_arena(call);
    *p = (plan){.call = call, .args = args};
    p->alpha = weft_arena_take(&arena, WIDE * 4);
    p->beta = weft_arena_take(&arena, (size_t)pad16(call->rows) * 4);
    p->sum = sum_take(&arena, SUM_TOKENS, call->rows + call->scales, sum);
    return arena;
}

/* Logits lie as their rows of h do, so they can skip the lanes: the operations of gates_fwd, a token at a time. */
static bool logits_direct(const weft_mhc_scale_fwd_args *a)
{
    int64_t n = a->logits.shape[2];
    return weft_has(&a->logits) && n * n % LANES == 0 && a->h.dtype == WEFT_F32 && a->logits.dtype == WEFT_F32 &&
           lane_dense(&a->h) && lane_dense(&a->logits);
}

static void logits_fwd(const weft_mhc_scale_fwd_args *a, float alpha, const float *beta, vf ms, int64_t m,
                       int valid)
{
    float inv[LANES];
    int64_t n = a->logits.shape[2];
    vf_store(inv, mm_inv_rms(ms, (float)a->numerics.rms_eps, (int)a->numerics.rms_eps_kind));
    for (int64_t j = 0; j < n * n; j += LANES) {
        vf b = vf_load(beta + j) + 0.0f; /* -0 becomes 0, as in vf_set1 */
        for (int l = 0; l < valid; l++) {
            const float *h = (const float *)(const void *)at(&a->h, m + l) + 2 * n + j;
            vf_store((float *)(void *)at(&a->logits, m + l) + j, vf_fma(vf_load(h) * alpha, vf_set1(inv[l]), b));
        }
    }
}

static void fwd_body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    const weft_mhc_scale_fwd_args *a = p->args;
    vf h[MAX_GATES], z[MAX_GATES], ms = vf_set1(0);
    int n = (int)p->call->streams;
    bool direct = logits_direct(a);
    int64_t rows = direct || !weft_has(&a->logits) ? 2 * n : p->call->rows;
    (void)thread;
    for (int64_t m = item * BLOCK; m < min64((item + 1) * BLOCK, p->call->tokens); m += LANES) {
        int valid = (int)min64(LANES, p->call->tokens - m);
        lanes_load(h, &a->h, m, valid, rows);
        lanes_load(&ms, &a->ms, m, valid, 1);
        CPU(gates_fwd)(&a->numerics, n, rows, p->alpha, p->beta, h, ms, z);
        lanes_store(&a->pre, false, z, m, valid, n);
        lanes_store(&a->post, false, z + n, m, valid, n);
        if (direct)
            logits_fwd(a, p->alpha[2], p->beta + 2 * n, ms, m, valid);
        else if (weft_has(&a->logits))
            lanes_store(&a->logits, false, z + 2 * n, m, valid, n * n);
    }
}

static void bwd_body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    const weft_mhc_scale_bwd_args *a = p->args;
    vf h[MAX_GATES], dz[MAX_GATES], dh[MAX_GATES], ms = vf_set1(0), dms, dalpha[3];
    int n = (int)p->call->streams;
    int64_t rows = p->call->rows, t0 = p->base + item * BLOCK, t1 = min64(t0 + BLOCK, p->call->tokens);
    float *sum = sum_block(&p->sum, item);
    (void)thread;
    sum_zero(sum, p->sum.width);
    for (int64_t m = t0; m < t1; m += LANES) {
        int valid = (int)min64(LANES, t1 - m);
        lanes_load(h, &a->h, m, valid, rows);
        lanes_load(&ms, &a->ms, m, valid, 1);
        lanes_zero(dz, rows);
        if (weft_has(&a->d_pre)) lanes_load(dz, &a->d_pre, m, valid, n);
        if (weft_has(&a->d_post)) lanes_load(dz + n, &a->d_post, m, valid, n);
        if (weft_has(&a->d_logits)) lanes_load(dz + 2 * n, &a->d_logits, m, valid, n * n);
        CPU(gates_bwd)(&a->numerics, n, rows, p->alpha, p->beta, h, ms, dz, dh, &dms, dalpha);
        if (weft_has(&a->d_h.to)) lanes_store(&a->d_h.to, a->d_h.add, dh, m, valid, rows);
        if (weft_has(&a->d_ms.to)) lanes_store(&a->d_ms.to, a->d_ms.add, &dms, m, valid, 1);
        if (!sum) continue;
        lanes_sum(sum, dz, valid, rows);
        lanes_sum(sum + rows, dalpha, valid, p->call->scales);
    }
}

static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_mhc_scale_fwd_args *a = args;
    plan p;
    lay_out(&p, call, args, false);
    vector_load(p.alpha, &a->alpha, call->scales, 0);
    vector_load(p.beta, &a->beta, call->rows, 0);
    cpu_parallel(call, (call->tokens + BLOCK - 1) / BLOCK, call->tokens * call->rows, fwd_body, &p);
    return WEFT_OK;
}

static bool wants_sum(const void *args)
{
    const weft_mhc_scale_bwd_args *a = args;
    return weft_has(&a->d_alpha.to) || weft_has(&a->d_beta.to);
}

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_mhc_scale_bwd_args *a = args;
    plan p;
    lay_out(&p, call, args, wants_sum(args));
    vector_load(p.alpha, &a->alpha, call->scales, 0);
    vector_load(p.beta, &a->beta, call->rows, 0);
    sum_zero(p.sum.total, p.sum.width);
    for (; p.base < call->tokens; p.base += SUM_TOKENS) {
        int64_t tokens = min64(SUM_TOKENS, call->tokens - p.base), blocks = (tokens + BLOCK - 1) / BLOCK;
        cpu_parallel(call, blocks, tokens * call->rows, bwd_body, &p);
        sum_fold(&p.sum, blocks);
    }
    sum_store(&p.sum, 0, &a->d_beta);
    sum_store(&p.sum, call->rows, &a->d_alpha);
    return WEFT_OK;
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    plan p;
    weft_arena arena = lay_out(&p, call, args, false);
    return weft_arena_bytes(&arena);
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    plan p;
    weft_arena arena = lay_out(&p, call, args, wants_sum(args));
    return weft_arena_bytes(&arena);
}

const weft_kernel CPU(mhc_scale_fwd)[] = {{.run = fwd, .workspace = fwd_workspace}, {0}};
const weft_kernel CPU(mhc_scale_bwd)[] = {{.run = bwd, .workspace = bwd_workspace}, {0}};
