/* SPDX-License-Identifier: Apache-2.0
 *
 * Backward of mhc_scale and, with SINKHORN, of mhc_coef [M2] [M4], one token per thread, with the sums over tokens behind
 * it in the same launch.
 *
 * Two, four and eight streams have kernels in which a token's matrix is registers and its history shared memory. Any
 * other number, a history that is too long, and a site without a residual mix is served by a kernel that keeps both in
 * workspace, a thread's after the other's: it serves correctness, not speed. */
#ifndef WEFT_CUDA_GATES_BWD_CUH
#define WEFT_CUDA_GATES_BWD_CUH

#include <cooperative_groups.h>

#include "cuda/mhc/token_math.cuh"
#include "cuda/mhc/token_rows.cuh"
#include "cuda/mhc/token_sums.cuh"

/* What the kernels get. d_third: of the logits without Sinkhorn, of res with it. */
struct gates_bwd_params {
    gate_numbers numbers;
    int32_t streams;
    int32_t groups; /* as in gates_fwd_params */
    int64_t tokens, chunks, slots;
    int64_t history; /* floats of a group */
    token_rows h;
    view ms, alpha, beta;
    token_rows d_pre, d_post, d_third;
    token_rows d_h;
    view d_ms, d_alpha, d_beta;
    float *rooms;
    int64_t room;
    float *partial; /* [rows + groups][slots] */
};

/* ---- sums over tokens ----------------------------------------------------------------------------------------------- */

/* Value k of d_beta | d_alpha. */
static __device__ __forceinline__ void put_sum(const view &d_alpha, const view &d_beta, int rows, int k,
                                               float value)
{
    if (k < rows) {
        if (has(d_beta)) put(d_beta, k * d_beta.stride[0], value);
    } else if (has(d_alpha)) {
        put(d_alpha, (k - rows) * d_alpha.stride[0], value);
    }
}

/* All blocks have written their partial sums; the columns are divided among them. */
static __device__ __forceinline__ void fold_all(const gates_bwd_params &p, int rows, int groups, float *room)
{
    cooperative_groups::this_grid().sync();
    for (int k = blockIdx.x; k < rows + groups; k += gridDim.x) {
        const float s = fold_column(p.partial + k * p.slots, p.slots, room);
        if (threadIdx.x == 0) put_sum(p.d_alpha, p.d_beta, rows, k, s);
    }
}

/* ---- a token -------------------------------------------------------------------------------------------------------- */

/* A token on its way through backward: h; dz, upstream, becomes the gradient of z (so of beta), and behind its rows lies
 * this token's part of d_alpha. */
template <int N> struct gates_token {
    static constexpr int rows = 2 * N + N * N;
    static constexpr int piece = N == 8 ? 8 : rows; /* beside two 8x8 matrices there is no room for a row of h */
    float h[rows], ms, dz[rows + 3];
};

/* Default sink of a token's d_h and d_ms: only the stores that the parameters describe. Other sinks pass them on in a form
 * of their own, are told of the padding tokens of the last chunk, and keep partial sums even with one slot. unmixed: there may be no
 * residual mix, whose rows, third scale and their sums are then zeros. */
struct gates_bwd_plain {
    static constexpr bool keeps_sums = false, unmixed = false;
    template <int N> __device__ void begin(int64_t) const
    {
    }
    template <int N> __device__ void put(int64_t, const float (&)[2 * N + N * N], float) const
    {
    }
    template <int N> __device__ void none(int64_t) const
    {
    }
};

/* As stage_params for `rows` rows and three groups. Without a residual mix the rows after `kept` and the third scale are zeros. */
static __device__ __forceinline__ void stage_either(float *to, const gates_bwd_params &p, int kept, int rows)
{
    if (p.groups == 3) kept = rows;
    for (int k = threadIdx.x; k < rows + 3; k += blockDim.x) {
        const bool is_beta = k < rows, given = is_beta ? k < kept : k - rows < p.groups;
        const view &from = is_beta ? p.beta : p.alpha;
        to[k] = given ? get(from, (is_beta ? k : k - rows) * from.stride[0]) : 0.0f;
    }
}

template <int N, bool UNMIXED>
static __device__ __forceinline__ void gates_bwd_load(const gates_bwd_params &p, int64_t token, gates_token<N> &t)
{
    t.ms = get(p.ms, token * p.ms.stride[0]);
    if (UNMIXED && p.groups == 2) {
        load_row<2 * N>(t.h, p.h, token);
#pragma unroll
        for (int j = 2 * N; j < t.rows; j++) t.h[j] = 0.0f;
    } else if (t.piece == t.rows) {
        load_row<t.rows>(t.h, p.h, token);
    }
    if (has(p.d_pre.v)) load_row<N>(t.dz, p.d_pre, token);
    if (has(p.d_post.v)) load_row<N>(t.dz + N, p.d_post, token);
    if (has(p.d_third.v)) load_row<N * N, N>(t.dz + 2 * N, p.d_third, token);
}

template <int N, bool SINKHORN, class SINK>
static __device__ __forceinline__ void gates_bwd_token(const gates_bwd_params &p, const float *param, float *shared,
                                                       int64_t token, gates_token<N> &t, const SINK &sink)
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
    const float d_ms = d_inv * mm_d_inv_rms(t.ms, inv, p.numbers.rms_eps, p.numbers.rms_eps_kind);
    if (has(p.d_ms)) put(p.d_ms, token * p.d_ms.stride[0], d_ms);
    sink.template put<N>(token, t.h, d_ms);
}

/* A block of one group of threads has a chunk of tokens at a time; a block of two has both chunks there are. Writes the
 * partial sums of its slots. */
template <int N, bool SINKHORN, class SINK>
static __device__ __forceinline__ void gates_bwd_slots(const gates_bwd_params &p, const SINK &sink,
                                                       float *fold_room)
{
    constexpr int R = 2 * N + N * N, M = R + 3, EACH = (M + COEF_THREADS - 1) / COEF_THREADS;
    constexpr int WARPS = COEF_THREADS / 32;
    extern __shared__ float4 dynamic[];
    __shared__ float param[M];
    float(*const room)[M] = (float(*)[M])fold_room;
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
            if (token < p.tokens)
                gates_bwd_load<N, SINK::unmixed>(p, token, t), sink.template begin<N>(token);
            else
                sink.template none<N>(token);
            if (!staged) { /* the loads of the parameters and of the first token overlap */
                if constexpr (SINK::unmixed)
                    stage_either(param, p, 2 * N, R);
                else
                    stage_params(param, p.alpha, p.beta, R, 3);
                __syncthreads();
                staged = true;
            }
            if (token < p.tokens)
                gates_bwd_token<N, SINKHORN>(p, param, (float *)dynamic + group * p.history, token, t, sink);
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
            if (SINK::keeps_sums || p.slots > 1)
                p.partial[k * p.slots + slot] = total[i];
            else
                put_sum(p.d_alpha, p.d_beta, R, k, total[i]);
        }
    }
}

template <int N> struct gates_bwd_room {
    static constexpr int floats = COEF_GROUPS * COEF_THREADS / 32 * (2 * N + N * N + 3);
};

template <int N, bool SINKHORN>
static __global__ void __launch_bounds__(COEF_GROUPS *COEF_THREADS) gates_bwd_small(gates_bwd_params p)
{
    __shared__ float room[gates_bwd_room<N>::floats];
    gates_bwd_slots<N, SINKHORN>(p, gates_bwd_plain(), room);
    if ((has(p.d_alpha) || has(p.d_beta)) && p.slots > 1) fold_all(p, 2 * N + N * N, 3, room);
}

/* Any number of streams, histories of any length, with a residual mix or without: for correctness, not speed. */
template <bool SINKHORN> static __global__ void __launch_bounds__(COEF_THREADS) gates_bwd_any(gates_bwd_params p)
{
    extern __shared__ float shared_any[]; /* parameters, totals, and a row for each warp */
    const int n = p.streams, groups = p.groups, rows = groups == 2 ? 2 * n : 2 * n + n * n, width = rows + groups;
    const int lane = threadIdx.x & 31;
    float *param = shared_any, *total = param + width, *room = total + width,
          *mine = room + (threadIdx.x >> 5) * width;
    const bool sums = has(p.d_alpha) || has(p.d_beta);
    float *z = SINKHORN ? p.rooms + (blockIdx.x * (int64_t)COEF_THREADS + threadIdx.x) * p.room : nullptr;
    float *d = z + n * n, *hist = d + n * n;
    stage_params(param, p.alpha, p.beta, rows, groups);
    __syncthreads();
    for (int64_t slot = blockIdx.x; slot < p.slots; slot += gridDim.x) {
        for (int k = threadIdx.x; k < width; k += COEF_THREADS) total[k] = 0;
        for (int64_t chunk = slot; chunk < p.chunks; chunk += p.slots) {
            const int64_t token = chunk * COEF_THREADS + threadIdx.x;
            const bool live = token < p.tokens;
            const int64_t row = token * p.h.v.stride[0];
            const float ms = live ? get(p.ms, token * p.ms.stride[0]) : 0.0f;
            const float inv = any_inv_rms(ms, p.numbers.rms_eps, p.numbers.rms_eps_kind);
            if (SINKHORN && live && has(p.d_third.v)) {
#pragma unroll 1
                for (int k = 0; k < n * n; k++) {
                    const float h = get(p.h.v, row + (2 * n + k) * p.h.v.stride[1]);
                    z[k] = any_gate_logit(h, inv, param[rows + 2], param[2 * n + k]);
                    d[k] = get(p.d_third.v, matrix_at(p.d_third.v, token, n, k));
                }
                sinkhorn_bwd_any(z, d, hist, n, p.numbers);
            }
            float d_inv = 0, d_alpha[3] = {0, 0, 0};
            __syncthreads();
#pragma unroll
            for (int g = 0; g < 3; g++) {
                if (g == groups) break;
                const view &up = g == 0 ? p.d_pre.v : g == 1 ? p.d_post.v : p.d_third.v;
#pragma unroll 1
                for (int k = 0; k < (g < 2 ? n : n * n); k++) {
                    const int j = g * n + k;
                    float dz = 0;
                    if (live) {
                        if (has(up)) {
                            if (g < 2)
                                dz = get(up, token * up.stride[0] + k * up.stride[1]);
                            else
                                dz = SINKHORN ? d[k] : get(up, matrix_at(up, token, n, k));
                        }
                        const float h = get(p.h.v, row + j * p.h.v.stride[1]);
                        const float d_h =
                            gate_bwd(h, inv, param[rows + g], param[j], g, p.numbers, dz, d_inv, d_alpha[g]);
                        if (has(p.d_h.v)) put(p.d_h.v, token * p.d_h.v.stride[0] + j * p.d_h.v.stride[1], d_h);
                    }
                    if (!sums) continue;
                    dz = warp_sum(dz);
                    if (lane == 0) mine[j] = dz;
                }
            }
            if (live && has(p.d_ms))
                put(p.d_ms, token * p.d_ms.stride[0],
                    d_inv * any_d_inv_rms(ms, inv, p.numbers.rms_eps, p.numbers.rms_eps_kind));
            if (!sums) continue;
#pragma unroll
            for (int g = 0; g < 3; g++) {
                if (g == groups) break;
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
                put_sum(p.d_alpha, p.d_beta, rows, k, total[k]);
        }
    }
    if (sums && p.slots > 1) fold_all(p, rows, groups, room);
}

#endif
