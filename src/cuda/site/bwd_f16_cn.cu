/* SPDX-License-Identifier: Apache-2.0
 *
 * The fused backward kernels of streams of f16 in the (C,n) layout [M11]. */
#include "cuda/site/bwd_kernel.cuh"

template weft_status weft_cuda_boundary_bwd_fused<f16, LAYOUT_CN>(const weft_call *, const boundary_work *,
                                                                  const fused_args *);
