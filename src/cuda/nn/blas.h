/* SPDX-License-Identifier: Apache-2.0
 *
 * Products by cuBLASLt. */
#ifndef WEFT_CUDA_BLAS_H
#define WEFT_CUDA_BLAS_H

#include "core/nn.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { WEFT_CUDA_BLAS_ROOM = 32 << 20 }; /* bytes of device memory that a product may use */

/* blas: weft_blas.device. WEFT_ERR_UNSUPPORTED without a sentence where the library has no algorithm for the shape. */
weft_status weft_cuda_blas_product(const weft_call *call, void *blas, const weft_matmul *a, weft_dtype in,
                                   weft_dtype out, void *room);

#ifdef __cplusplus
}
#endif
#endif
