/* SPDX-License-Identifier: Apache-2.0
 *
 * Gates and Sinkhorn of one token per thread [M2] [M3] [M4]: what mhc_coef, mhc_scale, mhc_sinkhorn and the head's gates
 * share. mhc_coef has the bits of mhc_scale followed by mhc_sinkhorn because all three are these functions.
 *
 * Two, four and eight streams have kernels in which a token's matrix is registers and its history shared memory. Any
 * other number, and a history that is too long, is served by kernels that keep both in workspace, a thread's after the
 * other's: they are there to be correct, not to be fast. */
#ifndef WEFT_CUDA_GATES_CUH
#define WEFT_CUDA_GATES_CUH

#include <cooperative_groups.h>

#include "cuda/common/launch.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/mhc_coef_plan.h"

/* ---- the mathematics, twice ---------------------------------------------------------------------------------------- */

/* What the division does for such x, bit for bit, without its branch for all others. */
static __device__ __forceinline__ float reciprocal(float x)
{
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return fmaf(r, -fmaf(x, r, -1.0f), r);
}

#define real float
#define scalar float
#define MM_RECIPROCAL(x) reciprocal(x)
#define MM_SET(x) ((float)(x))
#define MM_EXP(x) expf(x)
#define MM_LOG(x) logf(x)
#define MM_SQRT(x) sqrtf(x)
#define MM_MAX(a, b) fmaxf(a, b)
#define MM_FMA(a, b, c) fmaf(a, b, c)
#define MM_GT(a, b, x, y) ((a) > (b) ? (x) : (y))
#define MM_EQ(a, b, x, y) ((a) == (b) ? (x) : (y))
#define MM_WALK_BACK 1

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
#define MM(name) far_##name
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
    float rms_eps, pre_eps, post_mult, sinkhorn_eps;
    int32_t rms_eps_kind, sinkhorn, iters;
};

static inline gate_numbers numbers_of(const weft_mhc_numerics *q)
{
    gate_numbers m = {};
    m.rms_eps = (float)q->rms_eps;
    m.pre_eps = (float)q->pre_eps;
    m.post_mult = (float)q->post_mult;
    m.sinkhorn_eps = (float)q->sinkhorn_eps;
    m.rms_eps_kind = (int32_t)q->rms_eps_kind;
    m.sinkhorn = (int32_t)q->sinkhorn;
    m.iters = q->sinkhorn_iters;
    return m;
}

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
    return m.sinkhorn == WEFT_SINKHORN_LOG && far_sk_near(z, n) > 0 ? MM_LOG_NEAR : m.sinkhorn;
}

static __device__ void sinkhorn_fwd_any(float *z, int n, const gate_numbers &m)
{
    far_sinkhorn_fwd(z, nullptr, false, n, m.iters, m.sinkhorn_eps, rule_of(z, n, m));
}

static __device__ void sinkhorn_bwd_any(float *z, float *d, float *hist, int n, const gate_numbers &m)
{
    far_sinkhorn_bwd(z, d, hist, n, m.iters, m.sinkhorn_eps, rule_of(z, n, m));
}

/* ---- a token's row of a small tensor ------------------------------------------------------------------------------- */

/* [T, k] or [T, n, n]. wide: f32, a token's values side by side and aligned, so that they move 16 bytes at a time (8
 * where there are only two). */
struct token_rows {
    view v;
    int32_t wide;
};

static inline token_rows rows_of(const weft_tensor *t, int add = 0)
{
    token_rows r = {view_of(t, add), 0};
    if (!weft_has(t)) return r;
    int64_t count = t->ndim == 2 ? t->shape[1] : t->shape[1] * t->shape[2];
    int64_t bytes = count % 4 == 0 ? 16 : count % 2 == 0 ? 8 : 4;
    bool dense = t->ndim == 2 ? t->stride[1] == 1 : t->stride[2] == 1 && t->stride[1] == t->shape[2];
    r.wide = t->dtype == WEFT_F32 && dense && (uintptr_t)t->data % (uintptr_t)bytes == 0 &&
             (t->shape[0] <= 1 || t->stride[0] * 4 % bytes == 0);
    return r;
}

static inline token_rows rows_of(const weft_grad *g)
{
    return rows_of(&g->to, g->add);
}

/* The k-th of M values, in lines of LINE: M for vectors, n for matrices. */
template <int M, int LINE> static __device__ __forceinline__ int64_t offset_of(const view &v, int k)
{
    return LINE == M ? k * v.stride[1] : k / LINE * v.stride[1] + k % LINE * v.stride[2];
}

template <class T, int M, int LINE>
static __device__ __forceinline__ void load_loose(float *to, const view &v, int64_t base)
{
#pragma unroll
    for (int k = 0; k < M; k++) to[k] = widen(((const T *)v.data)[base + offset_of<M, LINE>(v, k)]);
}

template <class T, int M, int LINE>
static __device__ __forceinline__ void store_loose(const view &v, int64_t base, const float *from)
{
#pragma unroll
    for (int k = 0; k < M; k++) ((T *)v.data)[base + offset_of<M, LINE>(v, k)] = narrow<T>(from[k]);
}

/* M values of a token from the `first` on; a matrix always as a whole. */
template <int M, int LINE = M>
static __device__ __forceinline__ void load_row(float *to, const token_rows &r, int64_t token, int first = 0)
{
    const view &v = r.v;
    if (r.wide) {
        const float *p = (const float *)v.data + token * v.stride[0] + first;
        if constexpr (M % 4 == 0) {
#pragma unroll
            for (int k = 0; k < M; k += 4) {
                float4 q = *(const float4 *)(p + k);
                to[k] = q.x, to[k + 1] = q.y, to[k + 2] = q.z, to[k + 3] = q.w;
            }
        } else {
            static_assert(M == 2, "two, or a multiple of four");
            float2 q = *(const float2 *)p;
            to[0] = q.x, to[1] = q.y;
        }
        return;
    }
    const int64_t base = token * v.stride[0] + first * v.stride[1];
    if (v.dtype == WEFT_F32)
        load_loose<float, M, LINE>(to, v, base);
    else if (v.dtype == WEFT_BF16)
        load_loose<bf16, M, LINE>(to, v, base);
    else
        load_loose<f16, M, LINE>(to, v, base);
}

/* from is changed where it is added to what is there. */
template <int M, int LINE = M>
static __device__ __forceinline__ void store_row(const token_rows &r, int64_t token, float *from, int first = 0)
{
    const view &v = r.v;
    if (v.add) {
        float old[M];
        load_row<M, LINE>(old, r, token, first);
#pragma unroll
        for (int k = 0; k < M; k++) from[k] = old[k] + from[k];
    }
    if (r.wide) {
        float *p = (float *)v.data + token * v.stride[0] + first;
        if constexpr (M % 4 == 0) {
#pragma unroll
            for (int k = 0; k < M; k += 4)
                *(float4 *)(p + k) = make_float4(from[k], from[k + 1], from[k + 2], from[k + 3]);
        } else {
            *(float2 *)p = make_float2(from[0], from[1]);
        }
        return;
    }
    const int64_t base = token * v.stride[0] + first * v.stride[1];
    if (v.dtype == WEFT_F32)
        store_loose<float, M, LINE>(v, base, from);
    else if (v.dtype == WEFT_BF16)
        store_loose<bf16, M, LINE>(v, base, from);
    else
        store_loose<f16, M, LINE>(v, base, from);
}

/* ---- gates of one row ---------------------------------------------------------------------------------------------- */

/* What the kernels get. third: logits without Sinkhorn, res with it, and likewise their gradients. */
struct gates_fwd_params {
    gate_numbers numbers;
    int32_t streams;
    int64_t tokens;
    token_rows h;
    view ms, alpha, beta;
    token_rows pre, post, third;
    float *rooms; /* workspace, a thread's part after the other */
    int64_t room;
};

struct gates_bwd_params {
    gate_numbers numbers;
    int32_t streams;
    int64_t tokens, chunks, slots;
    int64_t history; /* floats of a group */
    token_rows h;
    view ms, alpha, beta;
    token_rows d_pre, d_post, d_third;
    token_rows d_h;
    view d_ms, d_alpha, d_beta;
    float *rooms;
    int64_t room;
    float *partial; /* [rows + 3][slots] */
};

/* beta[rows] and then alpha[groups], in fp32. The caller synchronises. */
static __device__ __forceinline__ void stage_params(float *to, const view &alpha, const view &beta, int rows,
                                                    int groups)
{
    for (int k = threadIdx.x; k < rows + groups; k += blockDim.x)
        to[k] = k < rows ? get(beta, k * beta.stride[0]) : get(alpha, (k - rows) * alpha.stride[0]);
}

/* Group 0, 1, 2: pre, post or logit, from h. */
static __device__ __forceinline__ float gate_fwd(float h, float inv, float alpha, float beta, int group,
                                                 const gate_numbers &m)
{
    float z = mm_gate_logit(h, inv, alpha, beta), s, t;
    if (group == 2) return z;
    mm_sigmoid(z, &s, &t);
    return group == 0 ? s + m.pre_eps : s * m.post_mult;
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

/* ---- forward ------------------------------------------------------------------------------------------------------- */

template <int N, bool SINKHORN>
static __global__ void __launch_bounds__(COEF_THREADS) gates_fwd_small(gates_fwd_params p)
{
    constexpr int R = 2 * N + N * N;
    __shared__ float param[R + 3];
    float h[R], ms = 0;
    int64_t token = blockIdx.x * (int64_t)COEF_THREADS + threadIdx.x;
    const int64_t step = gridDim.x * (int64_t)COEF_THREADS;
    /* The first token is on its way while the parameters are. */
    if (token < p.tokens) {
        load_row<R>(h, p.h, token);
        ms = get(p.ms, token * p.ms.stride[0]);
    }
    stage_params(param, p.alpha, p.beta, R, 3);
    __syncthreads();
    while (token < p.tokens) {
        const float inv = mm_inv_rms(ms, p.numbers.rms_eps, p.numbers.rms_eps_kind);
#pragma unroll
        for (int j = 0; j < R; j++) {
            const int g = j < N ? 0 : j < 2 * N ? 1 : 2;
            h[j] = gate_fwd(h[j], inv, param[R + g], param[j], g, p.numbers);
        }
        if (has(p.pre.v)) store_row<N>(p.pre, token, h);
        if (has(p.post.v)) store_row<N>(p.post, token, h + N);
        if (has(p.third.v)) {
            if constexpr (SINKHORN) sinkhorn_fwd<N>(h + 2 * N, p.numbers);
            store_row<N * N, N>(p.third, token, h + 2 * N);
        }
        token += step;
        if (token < p.tokens) {
            load_row<R>(h, p.h, token);
            ms = get(p.ms, token * p.ms.stride[0]);
        }
    }
}

/* Element k of a token's matrix. */
static __device__ __forceinline__ int64_t matrix_at(const view &v, int64_t token, int n, int k)
{
    return token * v.stride[0] + k / n * v.stride[1] + k % n * v.stride[2];
}

/* Any number of streams: correct, not fast. */
template <bool SINKHORN> static __global__ void __launch_bounds__(COEF_THREADS) gates_fwd_any(gates_fwd_params p)
{
    extern __shared__ float param[]; /* rows + 3 */
    const int n = p.streams, rows = 2 * n + n * n;
    const int64_t thread = blockIdx.x * (int64_t)COEF_THREADS + threadIdx.x;
    float *z = SINKHORN ? p.rooms + thread * p.room : nullptr;
    stage_params(param, p.alpha, p.beta, rows, 3);
    __syncthreads();
    for (int64_t token = thread; token < p.tokens; token += gridDim.x * (int64_t)COEF_THREADS) {
        const float inv = far_inv_rms(get(p.ms, token * p.ms.stride[0]), p.numbers.rms_eps, p.numbers.rms_eps_kind);
#pragma unroll 1
        for (int j = 0; j < rows; j++) {
            const int g = j < n ? 0 : j < 2 * n ? 1 : 2;
            const view &to = g == 0 ? p.pre.v : g == 1 ? p.post.v : p.third.v;
            if (!has(to)) continue;
            const float h = get(p.h.v, token * p.h.v.stride[0] + j * p.h.v.stride[1]);
            const float value = gate_fwd(h, inv, param[rows + g], param[j], g, p.numbers);
            if (g < 2)
                put(to, token * to.stride[0] + (j - g * n) * to.stride[1], value);
            else if (SINKHORN)
                z[j - 2 * n] = value;
            else
                put(to, matrix_at(to, token, n, j - 2 * n), value);
        }
        if (!SINKHORN || !has(p.third.v)) continue;
        sinkhorn_fwd_any(z, n, p.numbers);
#pragma unroll 1
        for (int k = 0; k < n * n; k++) put(p.third.v, matrix_at(p.third.v, token, n, k), z[k]);
    }
}

/* ---- sums over tokens ----------------------------------------------------------------------------------------------- */

/* warp_sums of common/reduce.cuh, in the same order, with every index a constant: v stays in registers. */
template <int HALF, int STEP> static __device__ __forceinline__ void sum_halves(float *v, int lane)
{
    if constexpr (HALF > 0) {
        const bool upper = (lane & STEP) != 0;
#pragma unroll
        for (int k = 0; k < HALF; k++) {
            const float give = upper ? v[k] : v[k + HALF], keep = upper ? v[k + HALF] : v[k];
            v[k] = keep + __shfl_xor_sync(0xffffffffu, give, STEP);
        }
    } else {
        v[0] += __shfl_xor_sync(0xffffffffu, v[0], STEP);
    }
    if constexpr (STEP > 1) sum_halves<HALF / 2, STEP / 2>(v, lane);
}

/* The sums of M values over a warp's tokens, to M floats of shared memory. */
template <int M> static __device__ __forceinline__ void sum_warp(const float *v, float *to)
{
    constexpr int P = M <= 16 ? 16 : 32;
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int first = 0; first < M; first += P) {
        float all[P];
#pragma unroll
        for (int k = 0; k < P; k++) all[k] = first + k < M ? v[first + k] : 0.0f;
        sum_halves<P / 2, 16>(all, lane);
        /* The upper half of the lanes kept the upper half of the values, and so on. */
        const int mine = first + lane / (32 / P);
        if (mine < M && lane % (32 / P) == 0) to[mine] = all[0];
    }
}

/* Value k of d_beta | d_alpha. */
static __device__ __forceinline__ void put_sum(const gates_bwd_params &p, int rows, int k, float value)
{
    if (k < rows) {
        if (has(p.d_beta)) put(p.d_beta, k * p.d_beta.stride[0], value);
    } else if (has(p.d_alpha)) {
        put(p.d_alpha, (k - rows) * p.d_alpha.stride[0], value);
    }
}

/* A column of partial sums: each thread adds its slots in order, then the threads in a fixed tree. Thread 0 has it. */
static __device__ __forceinline__ float fold_column(const float *column, int64_t slots, float *room)
{
    float s = 0;
    for (int64_t i = threadIdx.x; i < slots; i += COEF_THREADS) s += __ldcg(column + i);
    s = warp_sum(s);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = s;
    __syncthreads();
    return room[0] + room[1];
}

/* All blocks have left their partial sums: the columns are shared out among them. */
static __device__ __forceinline__ void fold_all(const gates_bwd_params &p, int rows, float *room)
{
    cooperative_groups::this_grid().sync();
    for (int k = blockIdx.x; k < rows + 3; k += gridDim.x) {
        const float s = fold_column(p.partial + k * p.slots, p.slots, room);
        if (threadIdx.x == 0) put_sum(p, rows, k, s);
    }
}

/* ---- backward ------------------------------------------------------------------------------------------------------ */

/* A token on its way through backward: h; dz, upstream, becomes the gradient of z (so of beta), and behind its rows lies
 * this token's part of d_alpha. */
template <int N> struct gates_token {
    static constexpr int rows = 2 * N + N * N;
    static constexpr int piece = N == 8 ? 8 : rows; /* beside two 8x8 matrices there is no room for a row of h */
    float h[rows], ms, dz[rows + 3];
};

template <int N>
static __device__ __forceinline__ void gates_bwd_load(const gates_bwd_params &p, int64_t token, gates_token<N> &t)
{
    t.ms = get(p.ms, token * p.ms.stride[0]);
    if (t.piece == t.rows) load_row<t.rows>(t.h, p.h, token);
    if (has(p.d_pre.v)) load_row<N>(t.dz, p.d_pre, token);
    if (has(p.d_post.v)) load_row<N>(t.dz + N, p.d_post, token);
    if (has(p.d_third.v)) load_row<N * N, N>(t.dz + 2 * N, p.d_third, token);
}

template <int N, bool SINKHORN>
static __device__ __forceinline__ void gates_bwd_token(const gates_bwd_params &p, const float *param, float *shared,
                                                       int64_t token, gates_token<N> &t)
{
    constexpr int R = t.rows, PIECE = t.piece;
    const float inv = mm_inv_rms(t.ms, p.numbers.rms_eps, p.numbers.rms_eps_kind);
    if (SINKHORN && has(p.d_third.v)) {
        float z[N * N];
        if (PIECE < R) load_row<N * N>(t.h + 2 * N, p.h, token, 2 * N);
#pragma unroll
        for (int k = 0; k < N * N; k++) z[k] = mm_gate_logit(t.h[2 * N + k], inv, param[R + 2], param[2 * N + k]);
        sinkhorn_bwd<N>(z, t.dz + 2 * N, shared, p.numbers);
        if (PIECE < R) asm volatile("" ::: "memory"); /* h is read again, not kept */
    }
    float d_inv = 0;
#pragma unroll
    for (int first = 0; first < R; first += PIECE) {
        if (PIECE < R) load_row<PIECE>(t.h + first, p.h, token, first);
#pragma unroll
        for (int j = first; j < first + PIECE; j++) {
            const int g = j < N ? 0 : j < 2 * N ? 1 : 2;
            t.h[j] = gate_bwd(t.h[j], inv, param[R + g], param[j], g, p.numbers, t.dz[j], d_inv, t.dz[R + g]);
        }
        if (has(p.d_h.v)) store_row<PIECE>(p.d_h, token, t.h + first, first);
    }
    if (has(p.d_ms))
        put(p.d_ms, token * p.d_ms.stride[0],
            d_inv * mm_d_inv_rms(t.ms, inv, p.numbers.rms_eps, p.numbers.rms_eps_kind));
}

/* A block of one group of threads has a chunk of tokens at a time; a block of two has both chunks there are. */
template <int N, bool SINKHORN>
static __global__ void __launch_bounds__(COEF_GROUPS *COEF_THREADS) gates_bwd_small(gates_bwd_params p)
{
    constexpr int R = 2 * N + N * N, M = R + 3, EACH = (M + COEF_THREADS - 1) / COEF_THREADS;
    constexpr int WARPS = COEF_THREADS / 32;
    extern __shared__ float4 dynamic[];
    __shared__ float param[M], room[COEF_GROUPS * WARPS][M];
    const int group = threadIdx.x / COEF_THREADS, groups = blockDim.x / COEF_THREADS;
    const bool sums = has(p.d_alpha) || has(p.d_beta);
    bool staged = false;
    for (int64_t slot = blockIdx.x; slot < p.slots; slot += gridDim.x) {
        float total[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) total[i] = 0;
        for (int64_t chunk = slot; chunk < p.chunks; chunk += groups * p.slots) {
            const int64_t token = (chunk + group) * COEF_THREADS + threadIdx.x % COEF_THREADS;
            gates_token<N> t;
#pragma unroll
            for (int j = 0; j < M; j++) t.dz[j] = 0;
            if (token < p.tokens) gates_bwd_load<N>(p, token, t);
            if (!staged) { /* the parameters come while the first token does */
                stage_params(param, p.alpha, p.beta, R, 3);
                __syncthreads();
                staged = true;
            }
            if (token < p.tokens)
                gates_bwd_token<N, SINKHORN>(p, param, (float *)dynamic + group * p.history, token, t);
            if (!sums) continue;
            __syncthreads();
            sum_warp<M>(t.dz, room[threadIdx.x >> 5]);
            __syncthreads();
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int k = threadIdx.x + i * COEF_THREADS;
                for (int g = 0; g < groups && k < M; g++) total[i] += room[g * WARPS][k] + room[g * WARPS + 1][k];
            }
        }
        if (!sums || group > 0) continue;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int k = threadIdx.x + i * COEF_THREADS;
            if (k >= M) continue;
            if (p.slots > 1)
                p.partial[k * p.slots + slot] = total[i];
            else
                put_sum(p, R, k, total[i]);
        }
    }
    if (sums && p.slots > 1) fold_all(p, R, &room[0][0]);
}

/* Any number of streams, histories of any length: correct, not fast. */
template <bool SINKHORN> static __global__ void __launch_bounds__(COEF_THREADS) gates_bwd_any(gates_bwd_params p)
{
    extern __shared__ float shared_any[]; /* parameters, totals, and a row for each warp */
    const int n = p.streams, rows = 2 * n + n * n, width = rows + 3, lane = threadIdx.x & 31;
    float *param = shared_any, *total = param + width, *room = total + width,
          *mine = room + (threadIdx.x >> 5) * width;
    const bool sums = has(p.d_alpha) || has(p.d_beta);
    float *z = SINKHORN ? p.rooms + (blockIdx.x * (int64_t)COEF_THREADS + threadIdx.x) * p.room : nullptr;
    float *d = z + n * n, *hist = d + n * n;
    stage_params(param, p.alpha, p.beta, rows, 3);
    __syncthreads();
    for (int64_t slot = blockIdx.x; slot < p.slots; slot += gridDim.x) {
        for (int k = threadIdx.x; k < width; k += COEF_THREADS) total[k] = 0;
        for (int64_t chunk = slot; chunk < p.chunks; chunk += p.slots) {
            const int64_t token = chunk * COEF_THREADS + threadIdx.x;
            const bool live = token < p.tokens;
            const int64_t row = token * p.h.v.stride[0];
            const float ms = live ? get(p.ms, token * p.ms.stride[0]) : 0.0f;
            const float inv = far_inv_rms(ms, p.numbers.rms_eps, p.numbers.rms_eps_kind);
            if (SINKHORN && live && has(p.d_third.v)) {
#pragma unroll 1
                for (int k = 0; k < n * n; k++) {
                    const float h = get(p.h.v, row + (2 * n + k) * p.h.v.stride[1]);
                    z[k] = far_gate_logit(h, inv, param[rows + 2], param[2 * n + k]);
                    d[k] = get(p.d_third.v, matrix_at(p.d_third.v, token, n, k));
                }
                sinkhorn_bwd_any(z, d, hist, n, p.numbers);
            }
            float d_inv = 0, d_alpha[3] = {0, 0, 0};
            __syncthreads();
#pragma unroll 1
            for (int j = 0; j < rows; j++) {
                const int g = j < n ? 0 : j < 2 * n ? 1 : 2;
                float dz = 0;
                if (live) {
                    const view &up = g == 0 ? p.d_pre.v : g == 1 ? p.d_post.v : p.d_third.v;
                    if (has(up)) {
                        if (g < 2)
                            dz = get(up, token * up.stride[0] + (j - g * n) * up.stride[1]);
                        else
                            dz = SINKHORN ? d[j - 2 * n] : get(up, matrix_at(up, token, n, j - 2 * n));
                    }
                    const float h = get(p.h.v, row + j * p.h.v.stride[1]);
                    float part = g == 0 ? d_alpha[0] : g == 1 ? d_alpha[1] : d_alpha[2];
                    const float d_h = gate_bwd(h, inv, param[rows + g], param[j], g, p.numbers, dz, d_inv, part);
                    if (g == 0) d_alpha[0] = part;
                    if (g == 1) d_alpha[1] = part;
                    if (g == 2) d_alpha[2] = part;
                    if (has(p.d_h.v)) put(p.d_h.v, token * p.d_h.v.stride[0] + j * p.d_h.v.stride[1], d_h);
                }
                if (!sums) continue;
                dz = warp_sum(dz);
                if (lane == 0) mine[j] = dz;
            }
            if (live && has(p.d_ms))
                put(p.d_ms, token * p.d_ms.stride[0],
                    d_inv * far_d_inv_rms(ms, inv, p.numbers.rms_eps, p.numbers.rms_eps_kind));
            if (!sums) continue;
#pragma unroll
            for (int g = 0; g < 3; g++) {
                const float s = warp_sum(d_alpha[g]);
                if (lane == 0) mine[rows + g] = s;
            }
            __syncthreads();
            for (int k = threadIdx.x; k < width; k += COEF_THREADS) total[k] += room[k] + room[width + k];
        }
        if (!sums) continue;
        for (int k = threadIdx.x; k < width; k += COEF_THREADS) {
            if (p.slots > 1)
                p.partial[k * p.slots + slot] = total[k];
            else
                put_sum(p, rows, k, total[k]);
        }
    }
    if (sums && p.slots > 1) fold_all(p, rows, room);
}

/* ---- from a call to a launch ---------------------------------------------------------------------------------------- */

/* Dynamic shared memory that a block may have beside what the kernels declare. */
static inline size_t most_shared(const weft_call *call)
{
    int bytes = 0;
    if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, call->exec->device) !=
        cudaSuccess) {
        (void)cudaGetLastError();
        bytes = 48 * 1024;
    }
    return (size_t)bytes - 4096;
}

/* At most as many blocks as are resident at once. */
template <class... Formal>
static weft_status resident(const weft_call *call, const char *what, void (*kernel)(Formal...), launch_shape *s)
{
    int per_sm = 0, sms = 0;
    if (s->shared > 48 * 1024)
        CUDA_TRY(call, what,
                 cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      (int)s->shared));
    CUDA_TRY(call, what, cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, (int)s->block, s->shared));
    CUDA_TRY(call, what, cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, call->exec->device));
    if (call->sms < sms) sms = call->sms;
    const int64_t most = (int64_t)per_sm * sms;
    if (s->grid.x > most) s->grid.x = (unsigned)(most > 0 ? most : 1);
    s->together = true;
    return WEFT_OK;
}

/* The arguments of mhc_scale and mhc_coef, which differ in the third tensor only. */
struct gates_fwd_call {
    const weft_mhc_numerics *numerics;
    const weft_tensor *h, *ms, *alpha, *beta, *pre, *post, *third;
};

struct gates_bwd_call {
    const weft_mhc_numerics *numerics;
    const weft_tensor *h, *ms, *alpha, *beta, *d_pre, *d_post, *d_third;
    const weft_grad *d_h, *d_ms, *d_alpha, *d_beta;
};

template <bool SINKHORN>
static weft_arena gates_fwd_lay_out(const weft_call *call, const gates_fwd_call *a, weft_cuda_coef_plan *plan,
                                    float **rooms)
{
    weft_arena arena = cuda_arena(call);
    *plan = weft_cuda_coef_plan_fwd(call->tokens, call->streams, SINKHORN ? a->numerics : nullptr);
    *rooms = (float *)weft_arena_take(&arena, (size_t)weft_cuda_coef_rooms(plan) * sizeof(float));
    return arena;
}

template <bool SINKHORN>
static weft_status gates_fwd_run(const weft_call *call, const char *what, const gates_fwd_call *a)
{
    weft_cuda_coef_plan plan;
    gates_fwd_params p = {};
    gates_fwd_lay_out<SINKHORN>(call, a, &plan, &p.rooms);
    if (call->tokens == 0) return WEFT_OK;
    p.numbers = numbers_of(a->numerics);
    p.streams = (int32_t)call->streams;
    p.tokens = call->tokens;
    p.h = rows_of(a->h);
    p.ms = view_of(a->ms);
    p.alpha = view_of(a->alpha);
    p.beta = view_of(a->beta);
    p.pre = rows_of(a->pre);
    p.post = rows_of(a->post);
    p.third = rows_of(a->third);
    p.room = plan.room;
    if (!has(p.pre.v) && !has(p.post.v) && !has(p.third.v)) return WEFT_OK;
    launch_shape shape = {dim3(grid_of(plan.blocks)), COEF_THREADS};
    if (!plan.in_registers) {
        shape.shared = (size_t)(2 * p.streams + p.streams * p.streams + 3) * sizeof(float);
        return launch(call, what, gates_fwd_any<SINKHORN>, shape, p);
    }
    switch (p.streams) {
    case 2: return launch(call, what, gates_fwd_small<2, SINKHORN>, shape, p);
    case 4: return launch(call, what, gates_fwd_small<4, SINKHORN>, shape, p);
    default: return launch(call, what, gates_fwd_small<8, SINKHORN>, shape, p);
    }
}

template <bool SINKHORN>
static weft_arena gates_bwd_lay_out(const weft_call *call, const gates_bwd_call *a, weft_cuda_coef_plan *plan,
                                    float **rooms, float **partial)
{
    weft_arena arena = cuda_arena(call);
    const bool sums = weft_has(&a->d_alpha->to) || weft_has(&a->d_beta->to);
    *plan =
        weft_cuda_coef_plan_bwd(call->tokens, call->streams, SINKHORN ? a->numerics : nullptr, most_shared(call));
    *rooms = (float *)weft_arena_take(&arena, (size_t)weft_cuda_coef_rooms(plan) * sizeof(float));
    *partial = (float *)weft_arena_take(
        &arena, sums ? (size_t)weft_cuda_coef_partials(plan, call->rows + 3) * sizeof(float) : 0);
    return arena;
}

/* One launch. Where sums over tokens span several slots, its blocks wait for each other before they add them up. */
template <class... Formal>
static weft_status gates_bwd_launch(const weft_call *call, const char *what, void (*kernel)(Formal...),
                                    launch_shape shape, const gates_bwd_params &p)
{
    if ((has(p.d_alpha) || has(p.d_beta)) && p.slots > 1) {
        weft_status status = resident(call, what, kernel, &shape);
        if (status != WEFT_OK) return status;
    }
    return launch(call, what, kernel, shape, p);
}

template <bool SINKHORN>
static weft_status gates_bwd_run(const weft_call *call, const char *what, const gates_bwd_call *a)
{
    weft_cuda_coef_plan plan;
    gates_bwd_params p = {};
    gates_bwd_lay_out<SINKHORN>(call, a, &plan, &p.rooms, &p.partial);
    p.numbers = numbers_of(a->numerics);
    p.streams = (int32_t)call->streams;
    p.tokens = call->tokens;
    p.chunks = plan.chunks;
    p.slots = plan.slots;
    p.h = rows_of(a->h);
    p.ms = view_of(a->ms);
    p.alpha = view_of(a->alpha);
    p.beta = view_of(a->beta);
    p.d_pre = rows_of(a->d_pre);
    p.d_post = rows_of(a->d_post);
    p.d_third = rows_of(a->d_third);
    p.d_h = rows_of(a->d_h);
    p.d_ms = view_of(a->d_ms);
    p.d_alpha = view_of(a->d_alpha);
    p.d_beta = view_of(a->d_beta);
    p.room = plan.room;
    if (call->tokens == 0) {
        /* One slot without tokens writes zeros; what is added to stays as it is. */
        if (p.d_alpha.add) p.d_alpha.dtype = WEFT_NONE;
        if (p.d_beta.add) p.d_beta.dtype = WEFT_NONE;
        if (!has(p.d_alpha) && !has(p.d_beta)) return WEFT_OK;
        p.slots = plan.blocks = 1;
    }
    const bool sums = has(p.d_alpha) || has(p.d_beta);
    if (!sums && !has(p.d_h.v) && !has(p.d_ms)) return WEFT_OK;
    launch_shape shape = {dim3(1), COEF_THREADS};
    if (!plan.in_registers) {
        shape.grid = dim3(grid_of(plan.blocks < p.slots ? plan.blocks : p.slots));
        shape.shared = 4 * (size_t)(call->rows + 3) * sizeof(float);
        return gates_bwd_launch(call, what, gates_bwd_any<SINKHORN>, shape, p);
    }
    /* Without sums every chunk may as well be a slot of its own. */
    if (!sums) p.slots = p.chunks;
    shape.grid = dim3(grid_of(p.slots));
    shape.shared = plan.shared;
    p.history = (int64_t)(plan.shared / sizeof(float));
    if (p.slots < p.chunks && p.chunks <= COEF_GROUPS && COEF_GROUPS * plan.shared <= most_shared(call))
        shape.block *= COEF_GROUPS, shape.shared *= COEF_GROUPS;
    switch (p.streams) {
    case 2: return gates_bwd_launch(call, what, gates_bwd_small<2, SINKHORN>, shape, p);
    case 4: return gates_bwd_launch(call, what, gates_bwd_small<4, SINKHORN>, shape, p);
    default: return gates_bwd_launch(call, what, gates_bwd_small<8, SINKHORN>, shape, p);
    }
}

#endif
