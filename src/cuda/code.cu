/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/code.h"

#include <cuda_runtime.h>

#include "cuda/common/kept.h"

/* Code for 9.0a differs from code for 9.0 in nothing that the runtime tells, but for what a kernel says of itself. */
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
enum { MOST_THREADS = 64 };
#else
enum { MOST_THREADS = 128 };
#endif

static __global__ void __launch_bounds__(MOST_THREADS) any_kernel()
{
}

static uint64_t ask_device()
{
    cudaFuncAttributes code = {};
    if (cudaFuncGetAttributes(&code, any_kernel) != cudaSuccess) {
        (void)cudaGetLastError();
        code.ptxVersion = 0;
        code.maxThreadsPerBlock = 0;
    }
    return 1 | (uint64_t)(code.maxThreadsPerBlock == 64) << 1 | (uint64_t)code.ptxVersion << 8;
}

static kept_answers known;

int32_t weft_cuda_code(int32_t device)
{
    return (int32_t)(kept_answer(known, device, ask_device) >> 8);
}

bool weft_cuda_has_groups(int32_t device)
{
    return kept_answer(known, device, ask_device) >> 1 & 1;
}
