/* SPDX-License-Identifier: Apache-2.0
 *
 * Kernels of the head's gates [M9]: the first group of [M2], n rows with one alpha. */
#ifndef WEFT_CUDA_HEAD_GATES_CUH
#define WEFT_CUDA_HEAD_GATES_CUH

#include "cuda/mhc/token_math.cuh"
#include "cuda/mhc/token_sums.cuh"

struct head_gates_params {
    gate_numbers numbers;
    int32_t streams;
    int64_t tokens, chunks, slots;
    view h, ms, alpha, beta;
    view gate;      /* out */
    view d_gate;    /* backward: upstream */
    view d_h, d_ms; /* out */
    view d_alpha, d_beta;
    float *partial; /* [n + 1][slots]; NULL where neither d_alpha nor d_beta is requested */
};

/* One gate per thread: neighbours share a token, so that memory is touched in order. */
static __global__ void __launch_bounds__(256) head_gates_fwd(head_gates_params p)
{
    __shared__ float param[WEFT_MAX_STREAMS + 1];
    const int n = p.streams;
    stage_params(param, p.alpha, p.beta, n, 1);
    __syncthreads();
    for (int64_t i = blockIdx.x * (int64_t)256 + threadIdx.x; i < p.tokens * n; i += gridDim.x * (int64_t)256) {
        const int64_t token = i / n;
        const int j = (int)(i - token * n);
        const float inv = mm_inv_rms(get(p.ms, token * p.ms.stride[0]), p.numbers.rms_eps, p.numbers.rms_eps_kind);
        const float h = get(p.h, token * p.h.stride[0] + j * p.h.stride[1]);
        put(p.gate, token * p.gate.stride[0] + j * p.gate.stride[1],
            gate_fwd(h, inv, param[n], param[j], 0, p.numbers));
    }
}

/* One token per thread, chunks and slots as in gates_bwd.cuh. */
static __global__ void __launch_bounds__(COEF_THREADS) head_gates_bwd(head_gates_params p)
{
    constexpr int MOST = WEFT_MAX_STREAMS + 1;
    __shared__ float param[MOST], room[COEF_THREADS / 32][MOST];
    const int n = p.streams, lane = threadIdx.x & 31;
    float *mine = room[threadIdx.x >> 5];
    stage_params(param, p.alpha, p.beta, n, 1);
    __syncthreads();
    for (int64_t slot = blockIdx.x; slot < p.slots; slot += gridDim.x) {
        float total = 0; /* thread k: of value k */
        for (int64_t chunk = slot; chunk < p.chunks; chunk += p.slots) {
            const int64_t token = chunk * COEF_THREADS + threadIdx.x;
            const bool live = token < p.tokens;
            const float ms = live ? get(p.ms, token * p.ms.stride[0]) : 0.0f;
            const float inv = mm_inv_rms(ms, p.numbers.rms_eps, p.numbers.rms_eps_kind);
            float d_inv = 0, d_alpha = 0;
            __syncthreads();
            for (int j = 0; j < n; j++) {
                float dz = 0;
                if (live) {
                    const float h = get(p.h, token * p.h.stride[0] + j * p.h.stride[1]);
                    dz = get(p.d_gate, token * p.d_gate.stride[0] + j * p.d_gate.stride[1]);
                    if (has(p.gate))
                        put(p.gate, token * p.gate.stride[0] + j * p.gate.stride[1],
                            gate_fwd(h, inv, param[n], param[j], 0, p.numbers));
                    const float d_h = gate_bwd(h, inv, param[n], param[j], 0, p.numbers, dz, d_inv, d_alpha);
                    if (has(p.d_h)) put(p.d_h, token * p.d_h.stride[0] + j * p.d_h.stride[1], d_h);
                }
                if (!p.partial) continue;
                dz = warp_sum(dz);
                if (lane == 0) mine[j] = dz;
            }
            if (live && has(p.d_ms))
                put(p.d_ms, token * p.d_ms.stride[0],
                    d_inv * mm_d_inv_rms(ms, inv, p.numbers.rms_eps, p.numbers.rms_eps_kind));
            if (!p.partial) continue;
            d_alpha = warp_sum(d_alpha);
            if (lane == 0) mine[n] = d_alpha;
            __syncthreads();
            if (threadIdx.x <= n) total += room[0][threadIdx.x] + room[1][threadIdx.x];
        }
        if (p.partial && threadIdx.x <= n) p.partial[threadIdx.x * p.slots + slot] = total;
    }
}

/* d_beta[n] and d_alpha[1], a block each. */
static __global__ void __launch_bounds__(COEF_THREADS) head_gates_fold(head_gates_params p)
{
    __shared__ float room[COEF_THREADS / 32];
    const int k = blockIdx.x;
    const float s = fold_column(p.partial + k * p.slots, p.slots, room);
    if (threadIdx.x > 0) return;
    if (k < p.streams) {
        if (has(p.d_beta)) put(p.d_beta, k * p.d_beta.stride[0], s);
    } else if (has(p.d_alpha)) {
        put(p.d_alpha, 0, s);
    }
}

#endif
