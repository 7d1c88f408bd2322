/* SPDX-License-Identifier: Apache-2.0
 *
 * The last step of a sum over rows: rows of partial sums become the gradient of a vector of parameters. */
#ifndef WEFT_CUDA_FOLD_CUH
#define WEFT_CUDA_FOLD_CUH

#include "cuda/common/launch.cuh"
#include "cuda/common/vec.cuh"

enum { FOLD_BLOCK = 1024 };

/* [rows][channels]: warp w adds rows w, w + 32, ..., then the warps are added in order. */
static __global__ void __launch_bounds__(FOLD_BLOCK)
    fold_kernel(view to, const float *partial, int64_t rows, int64_t channels)
{
    __shared__ float room[FOLD_BLOCK / 32][33];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int64_t stride = (int64_t)gridDim.x * 32;
    wait_for_previous();
    for (int64_t base = (int64_t)blockIdx.x * 32; base < channels; base += stride) {
        float sum = 0.0f;
        if (base + lane < channels)
#pragma unroll 8
            for (int64_t r = warp; r < rows; r += FOLD_BLOCK / 32) sum += partial[r * channels + base + lane];
        room[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && base + lane < channels) {
            for (int w = 1; w < FOLD_BLOCK / 32; w++) sum += room[w][lane];
            put(to, (base + lane) * to.stride[0], sum);
        }
        __syncthreads();
    }
}

/* Begins while the kernel that leaves the sums drains. */
static inline weft_status fold(const weft_call *call, const char *what, const view &to, const float *partial,
                               int64_t rows)
{
    return launch(call, what, fold_kernel,
                  {.grid = dim3(grid_of((call->channels + 31) / 32)), .block = FOLD_BLOCK, .order = OVERLAP}, to,
                  partial, rows, call->channels);
}

#endif
