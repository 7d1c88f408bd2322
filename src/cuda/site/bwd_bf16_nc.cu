/* SPDX-License-Identifier: Apache-2.0
 *
 * The fused backward kernels of streams of bf16 in the (n,C) layout [M11]. */
#include "cuda/site/bwd_kernel.cuh"

template weft_status weft_cuda_boundary_bwd_fused<bf16, LAYOUT_NC>(const weft_call *, const boundary_work *,
                                                                   const fused_args *);
