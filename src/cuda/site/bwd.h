/* SPDX-License-Identifier: Apache-2.0
 *
 * boundary's backward with a single pass over the streams at its end [M11]. */
#ifndef WEFT_CUDA_MHC_BOUNDARY_BWD_H
#define WEFT_CUDA_MHC_BOUNDARY_BWD_H

#include "core/kernel.h"
#include "cuda/site/bwd_plan.h"

/* By the inputs alone; data that are not there yet count as aligned. */
boundary_bwd_path weft_cuda_boundary_bwd_path(const weft_call *call, const weft_mhc_boundary_bwd_args *a);
weft_status weft_cuda_boundary_bwd(const weft_call *call, const weft_mhc_boundary_bwd_args *a);
size_t weft_cuda_boundary_bwd_bytes(const weft_call *call, const weft_mhc_boundary_bwd_args *a);

#endif
