/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies a [T, w] tensor into another dtype, for the operators that are chains of others. */
#include "cuda/mhc/convert.h"

#include "cuda/common/launch.cuh"
#include "cuda/common/vec.cuh"

__global__ void convert_kernel(view from, view to, int64_t rows, int64_t width)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < rows * width;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t row = i / width, column = i % width;
        const float v = has(from) ? get(from, row * from.stride[0] + column * from.stride[1]) : 0.0f;
        put(to, row * to.stride[0] + column * to.stride[1], v);
    }
}

weft_status weft_cuda_convert(const weft_call *call, const weft_tensor *from, const weft_tensor *to)
{
    const int64_t rows = to->shape[0], width = to->shape[1], blocks = (rows * width + 255) / 256;
    if (blocks == 0) return WEFT_OK;
    return launch(call, "conversion", convert_kernel, {.grid = grid_of(blocks), .block = 256}, view_of(from),
                  view_of(to), rows, width);
}
