/* SPDX-License-Identifier: Apache-2.0
 *
 * `pre` [M10] as boundary uses it. */
#ifndef WEFT_CUDA_MHC_PRE_H
#define WEFT_CUDA_MHC_PRE_H

#include "core/kernel.h"

/* base: the gradient that d_x begins with, where it is not d_x itself; absent otherwise. */
weft_status weft_cuda_pre_bwd(const weft_call *call, const weft_mhc_pre_bwd_args *a, const weft_tensor *base);
size_t weft_cuda_pre_bwd_bytes(const weft_call *call, const weft_mhc_pre_bwd_args *a);

#endif
