/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/backend.h"
#include "core/backend.h"
#include "core/nn.h"

static const weft_kernel *const ops[WEFT_OP_COUNT] = {
#define WEFT_OP(name) [WEFT_OP_##name] = weft_cuda_##name,
#include "core/ops.def"
#undef WEFT_OP
};
static const weft_nn_table *const nn[] = {&weft_cuda_f32_nn, &weft_cuda_bf16_nn, NULL};

static const weft_kernel_set *kernels(weft_isa isa)
{
    static const weft_kernel_set set = {ops, nn};
    (void)isa;
    return &set;
}

const weft_backend_table weft_cuda_backend = {.available = weft_cuda_available,
                                              .check_exec = weft_cuda_check_device,
                                              .check_pointer = weft_cuda_check_pointer,
                                              .kernels = kernels,
                                              .enter = weft_cuda_enter,
                                              .leave = weft_cuda_leave,
                                              .blas_open = weft_cuda_blas_open};
