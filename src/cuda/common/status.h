/* SPDX-License-Identifier: Apache-2.0
 *
 * A CUDA error as a status with a sentence. */
#ifndef WEFT_CUDA_STATUS_H
#define WEFT_CUDA_STATUS_H

#include <cuda_runtime_api.h>

#include "core/kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

weft_status weft_cuda_status(const weft_call *call, const char *what, cudaError_t error);

#ifdef __cplusplus
}
#endif
#endif
