/* SPDX-License-Identifier: Apache-2.0
 *
 * The aggregate of a thread's channels [M5]: streams in their order, so that every kernel that needs u has the same bits. */
#ifndef WEFT_CUDA_MHC_AGGREGATE_CUH
#define WEFT_CUDA_MHC_AGGREGATE_CUH

template <int N, int W>
static __device__ __forceinline__ void aggregate(float (&u)[W], const float (&pre)[N], const float (&x)[N][W])
{
#pragma unroll
    for (int k = 0; k < W; k++) {
        u[k] = pre[0] * x[0][k];
#pragma unroll
        for (int i = 1; i < N; i++) u[k] = fmaf(pre[i], x[i][k], u[k]);
    }
}

#endif
