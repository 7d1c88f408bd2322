/* SPDX-License-Identifier: Apache-2.0
 *
 * psi in front of an f16 site kernel: each number as two f16, hi and lo. f16 has few exponents, and the lo part of a number near
 * 0.01 would be below them, so the numbers of a row that a block of the cluster multiplies have a factor, a power of two that
 * brings their largest magnitude to 2^14 .. 2^15. hi + lo then keeps 22 bits of numbers down to 2^-18 of the largest, 16 bits
 * down to 2^-24 of it, and leaves an error of 2^-40 of it at smaller ones. The block's reduction warp multiplies its sums by the
 * reciprocals; both are exact. */
#ifndef WEFT_CUDA_SITE_FWD_PSI_CUH
#define WEFT_CUDA_SITE_FWD_PSI_CUH

#include "cuda/mhc/mhc_project.cuh"
#include "cuda/site/fwd_plan.h"

enum {
    PSI_THREADS = 256,
    PSI_EACH = 2 * SITE_MANY_PAIRS * SITE_MMA_WARPS * 16 / PSI_THREADS, /* most numbers of a thread */
    PSI_TOP = 14                                                        /* exponent of the largest number */
};

/* The exponent of the factor for this largest magnitude. The factor and its reciprocal are normal floats. */
static __device__ __forceinline__ int psi_exponent(float largest)
{
    const int exponent = (int)(__float_as_uint(largest) >> 23) - 127;
    return largest > 0.0f ? min(PSI_TOP - exponent, 126) : 0;
}

static __device__ __forceinline__ float power_of_two(int exponent)
{
    return __uint_as_float((uint32_t)(exponent + 127) << 23);
}

static __device__ __forceinline__ float warp_largest(float v)
{
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, step));
    return v;
}

/* A block per row and rank in the cluster: the numbers of `width` channels of all streams, in the order of x's columns; hi in the
 * lower half of a word. down: [rank][row]. */
static __global__ void __launch_bounds__(PSI_THREADS)
    psi_f16_kernel(uint32_t *to, float *down, weights w, columns k, uint32_t width)
{
    __shared__ float largest[PSI_THREADS / 32];
    const uint32_t rank = blockIdx.x, row = blockIdx.y, first = rank * width;
    const uint32_t channels = first < k.channels ? min(width, k.channels - first) : 0;
    float v[PSI_EACH], most = 0.0f;
    uint32_t column[PSI_EACH];
    let_next_begin();
    wait_for_previous();
#pragma unroll
    for (int e = 0; e < PSI_EACH; e++) {
        const uint32_t item = e * PSI_THREADS + threadIdx.x;
        v[e] = 0.0f;
        if (item >= channels * k.streams) continue;
        const uint32_t stream = k.cn ? item % k.streams : item / channels;
        const uint32_t channel = first + (k.cn ? item / k.streams : item % channels);
        column[e] = k.cn ? channel * k.streams + stream : stream * k.channels + channel;
        v[e] = psi_at(w, row, stream, channel);
        if (fabsf(v[e]) < __int_as_float(0x7f800000)) most = fmaxf(most, fabsf(v[e]));
    }
    most = warp_largest(most);
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = most;
    __syncthreads();
    const int exponent = psi_exponent(warp_largest(largest[threadIdx.x % (PSI_THREADS / 32)]));
    const float up = power_of_two(exponent);
    if (threadIdx.x == 0) down[rank * w.rows + row] = power_of_two(-exponent);
#pragma unroll
    for (int e = 0; e < PSI_EACH; e++) {
        const float scaled = v[e] * up, hi = rounded<f16>(scaled);
        if (e * PSI_THREADS + threadIdx.x < channels * k.streams)
            to[(int64_t)row * k.count + column[e]] = narrow2(hi, rest_of(scaled, hi), f16());
    }
}

static weft_status launch_psi_f16(const weft_call *call, const weft_site_plan *plan, const weft_tensor *phi,
                                  const weft_tensor *norm_weight, columns k, float *psi, float *down)
{
    const weights w = {view_of(phi), view_of(norm_weight), (int32_t)call->rows};
    const dim3 grid((unsigned)plan->cluster, (unsigned)call->rows);
    return launch(call, "psi", psi_f16_kernel, {.grid = grid, .block = PSI_THREADS, .order = OVERLAP},
                  (uint32_t *)psi, down, w, k, (uint32_t)(plan->boxes * SITE_BOX));
}

#endif
