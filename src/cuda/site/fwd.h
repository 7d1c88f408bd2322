/* SPDX-License-Identifier: Apache-2.0
 *
 * The fused kernel of an mHC site: forward of pre, boundary and head where the plan allows it. */
#ifndef WEFT_CUDA_SITE_FWD_H
#define WEFT_CUDA_SITE_FWD_H

#include "cuda/site/fwd_plan.h"

/* post: the operator that writes the streams, with pre->x equal to post->y; NULL where pre->x is an input. */
weft_site_plan weft_cuda_site_fwd_plan(const weft_call *call, const weft_mhc_post_fwd_args *post,
                                       const weft_mhc_pre_fwd_args *pre);
/* Workspace of the fused kernel: psi, where phi is not it, or may not be at other addresses. */
size_t weft_cuda_site_fwd_bytes(const weft_call *call, const weft_mhc_pre_fwd_args *pre);
weft_status weft_cuda_site_fwd(const weft_call *call, const weft_site_plan *plan,
                               const weft_mhc_post_fwd_args *post, const weft_mhc_pre_fwd_args *pre);

#endif
