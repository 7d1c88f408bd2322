/* SPDX-License-Identifier: Apache-2.0
 *
 * Small moves between the kernels of a chain. */
#ifndef WEFT_CUDA_CONVERT_H
#define WEFT_CUDA_CONVERT_H

#include "core/kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

/* to = from, [T, w] of any dtypes and strides; an absent `from` is zero. */
weft_status weft_cuda_convert(const weft_call *call, const weft_tensor *from, const weft_tensor *to);

#ifdef __cplusplus
}
#endif
#endif
