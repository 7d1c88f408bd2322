/* SPDX-License-Identifier: Apache-2.0
 *
 * Sinkhorn [M3], one matrix per lane. Stream count and rule are constants inside, so that a 4x4 matrix of sixteen tokens
 * is sixteen registers. */
#include "cpu/common/lanes.h"
#include "cpu/common/math.h"
#include "cpu/common/tiles.h"

#define CASE_RULE(name, BODY)                                                                                      \
    case name: {                                                                                                   \
        const int RULE = name;                                                                                     \
        BODY;                                                                                                      \
    } break;

#define FOR_RULE(rule, BODY)                                                                                       \
    switch (rule) {                                                                                                \
        CASE_RULE(MM_LOG_NEAR, BODY)                                                                               \
        CASE_RULE(WEFT_SINKHORN_LOG, BODY)                                                                         \
        CASE_RULE(WEFT_SINKHORN_SOFTMAX_EPS, BODY)                                                                 \
        CASE_RULE(WEFT_SINKHORN_CLAMP, BODY)                                                                       \
        CASE_RULE(WEFT_SINKHORN_ADD, BODY)                                                                         \
        CASE_RULE(WEFT_SINKHORN_THRESHOLD, BODY)                                                                   \
    }

/* Up to 4x4 the matrix is copied to a local array that the compiler keeps in registers. */
INLINE void small_fwd(const int n, vf *z, int iters, float eps, const int rule)
{
    vf a[16];
    for (int i = 0; i < n * n; i++) a[i] = z[i];
    mm_sinkhorn_fwd(a, NULL, false, n, iters, eps, rule);
    for (int i = 0; i < n * n; i++) z[i] = a[i];
}

INLINE void small_bwd(const int n, vf *z, vf *d, vf *hist, int iters, float eps, const int rule)
{
    vf a[16], b[16];
    for (int i = 0; i < n * n; i++) a[i] = z[i], b[i] = d[i];
    mm_sinkhorn_bwd(a, b, hist, n, iters, eps, rule);
    for (int i = 0; i < n * n; i++) d[i] = b[i];
}

static void rule_fwd(const weft_mhc_numerics *m, int rule, int n, vf *z)
{
    float eps = (float)m->sinkhorn_eps;
    int iters = m->sinkhorn_iters;
    if (n == 4) {
        FOR_RULE(rule, small_fwd(4, z, iters, eps, RULE))
    } else if (n == 2) {
        FOR_RULE(rule, small_fwd(2, z, iters, eps, RULE))
    } else {
        mm_sinkhorn_fwd(z, NULL, false, n, iters, eps, rule);
    }
}

static void rule_bwd(const weft_mhc_numerics *m, int rule, int n, vf *z, vf *d, vf *hist)
{
    float eps = (float)m->sinkhorn_eps;
    int iters = m->sinkhorn_iters;
    if (n == 4) {
        FOR_RULE(rule, small_bwd(4, z, d, hist, iters, eps, RULE))
    } else if (n == 2) {
        FOR_RULE(rule, small_bwd(2, z, d, hist, iters, eps, RULE))
    } else {
        mm_sinkhorn_bwd(z, d, hist, n, iters, eps, rule);
    }
}

/* Which lanes of the log rule can do without logarithms: 1 or 0. */
INLINE int near_lanes(const weft_mhc_numerics *m, int n, const vf *z, vf *near)
{
    if (m->sinkhorn != WEFT_SINKHORN_LOG) return 0;
    *near = mm_sk_near(z, n);
    return vf_lanes_gt(*near, vf_set1(0));
}

/* from where near is 0. */
INLINE void take_far(vf *to, const vf *from, int count, vf near)
{
    for (int k = 0; k < count; k++) to[k] = vf_gt(near, vf_set1(0), to[k], from[k]);
}

/* Where the lanes of the log rule differ, all of them go both ways and each keeps its own: a token has the bits that it
 * has in any other company. */
void CPU(sinkhorn_lanes_fwd)(const weft_mhc_numerics *m, int n, vf *z)
{
    vf near, far[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS];
    int lanes = near_lanes(m, n, z, &near), mixed = lanes != 0 && lanes != ALL_LANES;
    for (int k = 0; mixed && k < n * n; k++) far[k] = z[k];
    rule_fwd(m, lanes ? MM_LOG_NEAR : (int)m->sinkhorn, n, z);
    if (!mixed) return;
    rule_fwd(m, WEFT_SINKHORN_LOG, n, far);
    take_far(z, far, n * n, near);
}

void CPU(sinkhorn_lanes_bwd)(const weft_mhc_numerics *m, int n, vf *z, vf *d, vf *hist)
{
    vf near, far[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS], d_far[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS];
    int lanes = near_lanes(m, n, z, &near), mixed = lanes != 0 && lanes != ALL_LANES;
    for (int k = 0; mixed && k < n * n; k++) far[k] = z[k], d_far[k] = d[k];
    rule_bwd(m, lanes ? MM_LOG_NEAR : (int)m->sinkhorn, n, z, d, hist);
    if (!mixed) return;
    rule_bwd(m, WEFT_SINKHORN_LOG, n, far, d_far, hist);
    take_far(d, d_far, n * n, near);
}

int64_t CPU(sinkhorn_history)(const weft_mhc_numerics *m, int64_t n)
{
    return mm_sk_history((int)n, m->sinkhorn_iters, (int)m->sinkhorn) * (int64_t)sizeof(vf);
}

/* ---- operators ----------------------------------------------------------------------------------------------------- */

typedef struct plan {
    const weft_call *call;
    const void *args;
    char *hist; /* one area per thread */
    int64_t hist_bytes;
} plan;

static weft_arena lay_out(plan *p, const weft_call *call, const void *args, const weft_mhc_numerics *bwd)
{
    weft_arena arena = cpu_arena(call);
    *p = (plan){.call = call, .args = args};
    if (bwd) {
        p->hist_bytes = (CPU(sinkhorn_history)(bwd, call->streams) + 63) / 64 * 64;
        p->hist = weft_arena_take(&arena, cpu_rooms(call, p->hist_bytes));
    }
    return arena;
}

static void fwd_body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    const weft_mhc_sinkhorn_fwd_args *a = p->args;
    vf z[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS];
    int n = (int)p->call->streams;
    (void)thread;
    for (int64_t m = item * BLOCK; m < min64((item + 1) * BLOCK, p->call->tokens); m += LANES) {
        int valid = (int)min64(LANES, p->call->tokens - m);
        lanes_load(z, &a->logits, m, valid, n * n);
        CPU(sinkhorn_lanes_fwd)(&a->numerics, n, z);
        lanes_store(&a->res, false, z, m, valid, n * n);
    }
}

static void bwd_body(void *context, int64_t item, int thread)
{
    const plan *p = context;
    const weft_mhc_sinkhorn_bwd_args *a = p->args;
    vf z[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS], d[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS];
    int n = (int)p->call->streams;
    for (int64_t m = item * BLOCK; m < min64((item + 1) * BLOCK, p->call->tokens); m += LANES) {
        int valid = (int)min64(LANES, p->call->tokens - m);
        lanes_load(z, &a->logits, m, valid, n * n);
        lanes_load(d, &a->d_res, m, valid, n * n);
        CPU(sinkhorn_lanes_bwd)(&a->numerics, n, z, d, (vf *)(void *)(p->hist + thread * p->hist_bytes));
        lanes_store(&a->d_logits.to, a->d_logits.add, d, m, valid, n * n);
    }
}

static weft_status run(const plan *p, cpu_body *body, int iters)
{
    int64_t work = p->call->tokens * p->call->streams * p->call->streams * iters;
    cpu_parallel(p->call, (p->call->tokens + BLOCK - 1) / BLOCK, work, body, (void *)(uintptr_t)p);
    return WEFT_OK;
}

static weft_status fwd(const weft_call *call, const void *args)
{
    plan p;
    lay_out(&p, call, args, NULL);
    return run(&p, fwd_body, ((const weft_mhc_sinkhorn_fwd_args *)args)->numerics.sinkhorn_iters);
}

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_mhc_sinkhorn_bwd_args *a = args;
    plan p;
    lay_out(&p, call, args, &a->numerics);
    return run(&p, bwd_body, a->numerics.sinkhorn_iters);
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    plan p;
    weft_arena arena = lay_out(&p, call, args, &((const weft_mhc_sinkhorn_bwd_args *)args)->numerics);
    return weft_arena_bytes(&arena);
}

const weft_kernel CPU(mhc_sinkhorn_fwd)[] = {{.run = fwd}, {0}};
const weft_kernel CPU(mhc_sinkhorn_bwd)[] = {{.run = bwd, .workspace = bwd_workspace}, {0}};
