/* SPDX-License-Identifier: Apache-2.0
 *
 * A site of mHC in one kernel: the fused path of pre, boundary and head, forward. */
#ifndef WEFT_CUDA_SINGLE_PASS_H
#define WEFT_CUDA_SINGLE_PASS_H

#include "cuda/site/fwd_plan.h"

/* post: what makes the streams, or NULL where pre->x has them already; otherwise pre->x is post->y. */
weft_site_plan weft_cuda_site_fwd_plan(const weft_call *call, const weft_mhc_post_fwd_args *post,
                                       const weft_mhc_pre_fwd_args *pre);
/* Workspace of the fused path: room for psi where phi is not it, or may not be at other addresses. */
size_t weft_cuda_site_fwd_bytes(const weft_call *call, const weft_mhc_pre_fwd_args *pre);
weft_status weft_cuda_site_fwd(const weft_call *call, const weft_site_plan *plan,
                               const weft_mhc_post_fwd_args *post, const weft_mhc_pre_fwd_args *pre);

#endif
