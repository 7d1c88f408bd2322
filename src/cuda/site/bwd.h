/* SPDX-License-Identifier: Apache-2.0
 *
 * The fused backward of a site [M11]: boundary, pre and head. */
#ifndef WEFT_CUDA_SITE_BWD_H
#define WEFT_CUDA_SITE_BWD_H

#include "core/kernel.h"
#include "cuda/site/bwd_plan.h"

/* Depends on the inputs alone; data without an address yet count as aligned. */
boundary_bwd_path weft_cuda_boundary_bwd_path(const weft_call *call, const weft_mhc_boundary_bwd_args *a);
weft_status weft_cuda_boundary_bwd(const weft_call *call, const weft_mhc_boundary_bwd_args *a);
size_t weft_cuda_boundary_bwd_bytes(const weft_call *call, const weft_mhc_boundary_bwd_args *a);

#endif
