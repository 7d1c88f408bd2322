/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums over tokens in a fixed order: over the lanes of a warp, then over slots [M2]. */
#ifndef WEFT_CUDA_TOKEN_SUMS_CUH
#define WEFT_CUDA_TOKEN_SUMS_CUH

#include "cuda/common/reduce.cuh"
#include "cuda/mhc/mhc_coef_plan.h"

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
        warp_sums<P>(all);
        const int mine = first + owner_index<P>(lane);
        if (mine < M && lane % (32 / P) == 0) to[mine] = all[0];
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

#endif
