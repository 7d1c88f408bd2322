/* SPDX-License-Identifier: Apache-2.0
 *
 * What the table of the CUDA backend (src/cuda/backend.c) is made of. */
#ifndef WEFT_CUDA_BACKEND_H
#define WEFT_CUDA_BACKEND_H

#include <weft/blas.h>

#include "core/kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

#define WEFT_OP(name) extern const weft_kernel weft_cuda_##name[];
#include "core/ops.def"
#undef WEFT_OP
extern const struct weft_nn_table weft_cuda_f32_nn, weft_cuda_bf16_nn;

/* src/cuda/device.c */
int weft_cuda_available(void);
/* The device of the call exists and is new enough; fills in what the call says of it. */
weft_status weft_cuda_check_device(weft_call *call);
weft_status weft_cuda_check_pointer(const weft_call *call, const char *prefix, const char *name, const void *p);
/* Makes the call's device current, and what was current before current again. */
weft_status weft_cuda_enter(const weft_call *call, int *previous);
void weft_cuda_leave(const weft_call *call, int previous);

/* cuBLASLt (src/cuda/nn/blas.c) */
weft_status weft_cuda_blas_open(const weft_exec *exec, const char *path, weft_blas *blas);

#ifdef __cplusplus
}
#endif
#endif
