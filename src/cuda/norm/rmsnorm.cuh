/* SPDX-License-Identifier: Apache-2.0
 *
 * What all kernels that norm a row share [N1]: the order of its squares, and the factor. */
#ifndef WEFT_CUDA_RMSNORM_CUH
#define WEFT_CUDA_RMSNORM_CUH

#include "cuda/common/vec.cuh"

/* The squares of a row are summed by several kernels, each of which assigns channels to threads in its own way, and a
 * rebuilt row must have the bits of the row: so the order follows from the channels alone. Pieces of 16 bytes, each in
 * order; the eight pieces of a box as a tree; boxes k, k + 32, .. in order; the 32 of these as a tree. A missing piece is a
 * zero, which changes nothing. */
enum { BOX_BITS = 3, BOX_PIECES = 1 << BOX_BITS };

template <int W> static __device__ __forceinline__ float piece_squares(const float (&x)[W])
{
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < W; k++) sum = fmaf(x[k], x[k], sum);
    return sum;
}

/* Eight neighbouring lanes have the pieces; all of them get the sum. */
static __device__ __forceinline__ float box_sum(float piece)
{
#pragma unroll
    for (int step = BOX_PIECES / 2; step > 0; step >>= 1) piece += __shfl_xor_sync(0xffffffffu, piece, step);
    return piece;
}

static __device__ __forceinline__ float inverse_rms(float squares, int64_t channels, float eps)
{
    return 1.0f / sqrtf(squares / (float)channels + eps);
}

#endif
