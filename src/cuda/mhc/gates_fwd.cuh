/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels of mhc_scale and, with SINKHORN, of mhc_coef [M2] [M4], one token per thread.
 *
 * Two, four and eight streams have kernels in which a token's matrix is registers. Any other number is served by a kernel
 * that keeps it in workspace, a thread's after the other's: it serves correctness, not speed. So are sites without a residual
 * mix, whatever their streams. */
#ifndef WEFT_CUDA_GATES_FWD_CUH
#define WEFT_CUDA_GATES_FWD_CUH

#include "cuda/mhc/token_math.cuh"
#include "cuda/mhc/token_rows.cuh"

/* What the kernels get. third: logits without Sinkhorn, res with it. */
struct gates_fwd_params {
    gate_numbers numbers;
    int32_t streams;
    int32_t groups; /* of rows: pre, post and, with a residual mix, res */
    int64_t tokens;
    token_rows h;
    view ms, alpha, beta;
    token_rows pre, post, third;
    float *rooms; /* workspace, a thread's part after the other */
    int64_t room;
};

/* A token's coefficients. h: its projection, overwritten. param: beta, alpha (stage_params). */
template <int N, bool SINKHORN>
static __device__ __forceinline__ void gates_fwd_token(const gates_fwd_params &p, const float *param, int64_t token,
                                                       float (&h)[2 * N + N * N], float ms)
{
    constexpr int R = 2 * N + N * N;
    const float inv = mm_inv_rms(ms, p.numbers.rms_eps, p.numbers.rms_eps_kind);
#pragma unroll
    for (int j = 0; j < R; j++) {
        const int g = j < N ? 0 : j < 2 * N ? 1 : 2;
        h[j] = gate_fwd(h[j], inv, param[R + g], param[j], g, p.numbers);
    }
    if (has(p.pre.v)) store_row<N>(p.pre, token, h);
    if (has(p.post.v)) store_row<N>(p.post, token, h + N);
    if (!has(p.third.v)) return;
    if constexpr (SINKHORN) sinkhorn_fwd<N>(h + 2 * N, p.numbers);
    store_row<N * N, N>(p.third, token, h + 2 * N);
}

template <int N, bool SINKHORN>
static __global__ void __launch_bounds__(COEF_THREADS) gates_fwd_small(gates_fwd_params p)
{
    wait_for_previous();
    constexpr int R = 2 * N + N * N;
    __shared__ float param[R + 3];
    float h[R], ms = 0;
    int64_t token = blockIdx.x * (int64_t)COEF_THREADS + threadIdx.x;
    const int64_t step = gridDim.x * (int64_t)COEF_THREADS;
    /* The loads of the first token and of the parameters overlap. */
    if (token < p.tokens) {
        load_row<R>(h, p.h, token);
        ms = get(p.ms, token * p.ms.stride[0]);
    }
    stage_params(param, p.alpha, p.beta, R, 3);
    __syncthreads();
    while (token < p.tokens) {
        gates_fwd_token<N, SINKHORN>(p, param, token, h, ms);
        token += step;
        if (token < p.tokens) {
            load_row<R>(h, p.h, token);
            ms = get(p.ms, token * p.ms.stride[0]);
        }
    }
}

/* Any number of streams, with a residual mix or without: for correctness, not speed. */
template <bool SINKHORN> static __global__ void __launch_bounds__(COEF_THREADS) gates_fwd_any(gates_fwd_params p)
{
    wait_for_previous();
    extern __shared__ float param[]; /* rows + groups */
    const int n = p.streams, rows = p.groups == 2 ? 2 * n : 2 * n + n * n;
    const int64_t thread = blockIdx.x * (int64_t)COEF_THREADS + threadIdx.x;
    float *z = SINKHORN ? p.rooms + thread * p.room : nullptr;
    stage_params(param, p.alpha, p.beta, rows, p.groups);
    __syncthreads();
    for (int64_t token = thread; token < p.tokens; token += gridDim.x * (int64_t)COEF_THREADS) {
        const float inv = any_inv_rms(get(p.ms, token * p.ms.stride[0]), p.numbers.rms_eps, p.numbers.rms_eps_kind);
#pragma unroll
        for (int g = 0; g < 3; g++) {
            const view &to = g == 0 ? p.pre.v : g == 1 ? p.post.v : p.third.v;
            if (!has(to)) continue;
#pragma unroll 1
            for (int k = 0; k < (g < 2 ? n : n * n); k++) {
                const int j = g * n + k;
                const float h = get(p.h.v, token * p.h.v.stride[0] + j * p.h.v.stride[1]);
                const float value = gate_fwd(h, inv, param[rows + g], param[j], g, p.numbers);
                if (g < 2)
                    put(to, token * to.stride[0] + k * to.stride[1], value);
                else if (SINKHORN)
                    z[k] = value;
                else
                    put(to, matrix_at(to, token, n, k), value);
            }
        }
        if (!SINKHORN || !has(p.third.v)) continue;
        sinkhorn_fwd_any(z, n, p.numbers);
#pragma unroll 1
        for (int k = 0; k < n * n; k++) put(p.third.v, matrix_at(p.third.v, token, n, k), z[k]);
    }
}

#endif
