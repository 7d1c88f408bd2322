/* SPDX-License-Identifier: Apache-2.0
 *
 * `pre` [M10]: what its files share, and what boundary uses of it. */
#ifndef WEFT_CUDA_MHC_PRE_H
#define WEFT_CUDA_MHC_PRE_H

#include "cuda/mhc/mhc_pre_plan.h"

/* Forward of fp32 streams in one launch, v excepted. u: where the aggregate goes, absent where it is not requested. */
weft_pre_plan weft_cuda_pre_one_plan(const weft_call *call, const weft_mhc_pre_fwd_args *a, const weft_tensor *u);
weft_status weft_cuda_pre_one(const weft_call *call, const weft_pre_plan *plan, const weft_mhc_pre_fwd_args *a,
                              const weft_tensor *u);

/* Backward as a chain. base: the gradient that d_x begins with, where it is not d_x itself; absent otherwise. */
weft_status weft_cuda_pre_bwd_unfused(const weft_call *call, const weft_mhc_pre_bwd_args *a,
                                      const weft_tensor *base);
size_t weft_cuda_pre_bwd_unfused_bytes(const weft_call *call, const weft_mhc_pre_bwd_args *a);

#endif
