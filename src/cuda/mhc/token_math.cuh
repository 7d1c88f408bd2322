/* SPDX-License-Identifier: Apache-2.0
 *
 * Gates and Sinkhorn of one token on one thread [M2] [M3]: what mhc_coef, mhc_scale, mhc_sinkhorn and the head's gates
 * share. mhc_coef has the bits of mhc_scale followed by mhc_sinkhorn because all three are these functions. */
#ifndef WEFT_CUDA_TOKEN_MATH_CUH
#define WEFT_CUDA_TOKEN_MATH_CUH

#include "cuda/common/vec.cuh"
#include "cuda/mhc/mhc_coef_plan.h"
#include "cuda/mhc/mhc_math_f32.h"

/* 1/x as MM_RECIPROCAL may assume x: the bits of the division, without its branch for all other x. */
static __device__ __forceinline__ float reciprocal(float x)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return fmaf(r, -fmaf(x, r, -1.0f), r);
}

#define MM_RECIPROCAL(x) reciprocal(x)

/* For n and rule constant. The history is shared memory in which the threads of a block lie side by side: an access of a
 * warp touches every bank once. */
#define MM(name) mm_##name
#define MM_FN static __device__ __forceinline__
#define MM_UNROLL _Pragma("unroll")
#define MM_HISTORY float *
#define MM_AT(h, i) (h)[COEF_THREADS * (i)]
#define MM_FROM(h, i) ((h) + COEF_THREADS * (int)(i))
#include "core/mhc_math.h"
#undef MM
#undef MM_FN
#undef MM_UNROLL
#undef MM_HISTORY
#undef MM_AT
#undef MM_FROM

/* For n known at run time: matrices and history are arrays in workspace. */
#define MM(name) any_##name
#define MM_FN static __device__
#define MM_UNROLL _Pragma("unroll 1")
#define MM_HISTORY float *
#define MM_AT(h, i) (h)[i]
#define MM_FROM(h, i) ((h) + (i))
#include "core/mhc_math.h"
#undef MM
#undef MM_FN
#undef MM_UNROLL
#undef MM_HISTORY
#undef MM_AT
#undef MM_FROM
#undef real
#undef scalar

struct gate_numbers {
    float rms_eps, pre_eps, post_mult, post_eps, sinkhorn_eps;
    int32_t rms_eps_kind, sinkhorn, iters;
};

static inline gate_numbers numbers_of(const weft_mhc_numerics *q)
{
    gate_numbers m = {};
    m.rms_eps = (float)q->rms_eps;
    m.pre_eps = (float)q->pre_eps;
    m.post_mult = (float)q->post_mult;
    m.post_eps = (float)q->post_eps;
    m.sinkhorn_eps = (float)q->sinkhorn_eps;
    m.rms_eps_kind = (int32_t)q->rms_eps_kind;
    m.sinkhorn = (int32_t)q->sinkhorn;
    m.iters = q->sinkhorn_iters;
    return m;
}

/* ---- Sinkhorn ------------------------------------------------------------------------------------------------------- */

template <int N, int RULE> static __device__ __forceinline__ void rule_fwd(float *z, const gate_numbers &m)
{
    mm_sinkhorn_fwd(z, nullptr, false, N, m.iters, m.sinkhorn_eps, RULE);
}

template <int N> static __device__ __forceinline__ void sinkhorn_fwd(float *z, const gate_numbers &m)
{
    switch (m.sinkhorn) {
    case WEFT_SINKHORN_LOG:
        if (mm_sk_near(z, N) > 0)
            rule_fwd<N, MM_LOG_NEAR>(z, m);
        else
            rule_fwd<N, WEFT_SINKHORN_LOG>(z, m);
        break;
    case WEFT_SINKHORN_SOFTMAX_EPS: rule_fwd<N, WEFT_SINKHORN_SOFTMAX_EPS>(z, m); break;
    case WEFT_SINKHORN_CLAMP: rule_fwd<N, WEFT_SINKHORN_CLAMP>(z, m); break;
    case WEFT_SINKHORN_ADD: rule_fwd<N, WEFT_SINKHORN_ADD>(z, m); break;
    default: rule_fwd<N, WEFT_SINKHORN_THRESHOLD>(z, m); break;
    }
}

template <int N, int RULE>
static __device__ __forceinline__ void rule_bwd(float *z, float *d, float *shared, const gate_numbers &m)
{
    mm_sinkhorn_bwd(z, d, shared + threadIdx.x % COEF_THREADS, N, m.iters, m.sinkhorn_eps, RULE);
}

/* z: logits, overwritten; d: upstream of res, becomes the gradient of the logits. */
template <int N>
static __device__ __forceinline__ void sinkhorn_bwd(float *z, float *d, float *shared, const gate_numbers &m)
{
    switch (m.sinkhorn) {
    case WEFT_SINKHORN_LOG:
        if (mm_sk_near(z, N) > 0)
            rule_bwd<N, MM_LOG_NEAR>(z, d, shared, m);
        else
            rule_bwd<N, WEFT_SINKHORN_LOG>(z, d, shared, m);
        break;
    case WEFT_SINKHORN_SOFTMAX_EPS: rule_bwd<N, WEFT_SINKHORN_SOFTMAX_EPS>(z, d, shared, m); break;
    case WEFT_SINKHORN_CLAMP: rule_bwd<N, WEFT_SINKHORN_CLAMP>(z, d, shared, m); break;
    case WEFT_SINKHORN_ADD: rule_bwd<N, WEFT_SINKHORN_ADD>(z, d, shared, m); break;
    default: rule_bwd<N, WEFT_SINKHORN_THRESHOLD>(z, d, shared, m); break;
    }
}

/* Matrix and history in workspace; the rule is found out at run time. */
static __device__ int rule_of(const float *z, int n, const gate_numbers &m)
{
    return m.sinkhorn == WEFT_SINKHORN_LOG && any_sk_near(z, n) > 0 ? MM_LOG_NEAR : m.sinkhorn;
}

static __device__ void sinkhorn_fwd_any(float *z, int n, const gate_numbers &m)
{
    any_sinkhorn_fwd(z, nullptr, false, n, m.iters, m.sinkhorn_eps, rule_of(z, n, m));
}

static __device__ void sinkhorn_bwd_any(float *z, float *d, float *hist, int n, const gate_numbers &m)
{
    any_sinkhorn_bwd(z, d, hist, n, m.iters, m.sinkhorn_eps, rule_of(z, n, m));
}

/* ---- gates ---------------------------------------------------------------------------------------------------------- */

/* beta[rows] and then alpha[groups], in fp32. The caller synchronises. */
static __device__ __forceinline__ void stage_params(float *to, const view &alpha, const view &beta, int rows,
                                                    int groups)
{
    for (int k = threadIdx.x; k < rows + groups; k += blockDim.x)
        to[k] = k < rows ? get(beta, k * beta.stride[0]) : get(alpha, (k - rows) * alpha.stride[0]);
}

/* Group 0, 1, 2: pre, post or the logit as it is. */
static __device__ __forceinline__ float gate_of(float z, int group, const gate_numbers &m)
{
    float s, t;
    if (group == 2) return z;
    mm_sigmoid(z, &s, &t);
    return group == 0 ? s + m.pre_eps : s * m.post_mult + m.post_eps;
}

/* The same from h. */
static __device__ __forceinline__ float gate_fwd(float h, float inv, float alpha, float beta, int group,
                                                 const gate_numbers &m)
{
    return gate_of(mm_gate_logit(h, inv, alpha, beta), group, m);
}

/* dz: upstream, becomes the gradient of z. Adds to d_inv and d_alpha, returns d_h. */
static __device__ __forceinline__ float gate_bwd(float h, float inv, float alpha, float beta, int group,
                                                 const gate_numbers &m, float &dz, float &d_inv, float &d_alpha)
{
    if (group < 2) {
        float s, t;
        mm_sigmoid(mm_gate_logit(h, inv, alpha, beta), &s, &t);
        dz = dz * s * t;
        if (group == 1) dz = dz * m.post_mult;
    }
    d_alpha = fmaf(dz, h * inv, d_alpha);
    const float da = dz * alpha;
    d_inv = fmaf(da, h, d_inv);
    return da * inv;
}

#endif
