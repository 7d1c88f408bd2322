/* SPDX-License-Identifier: Apache-2.0
 *
 * Workspace of a forward operator that is fused where it can be: unfused() lays out its other paths and returns what they need. */
#ifndef WEFT_CUDA_FUSED_OR_UNFUSED_H
#define WEFT_CUDA_FUSED_OR_UNFUSED_H

#include "cuda/site/fwd.h"

static inline size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Which path a call takes may depend on addresses: a query for any of them has room for both. */
template <class Unfused>
static inline size_t fused_or_unfused_bytes(const weft_call *call, const weft_site_plan *site,
                                            const weft_mhc_pre_fwd_args *pre, const Unfused &unfused)
{
    const bool fused = site->path == WEFT_SITE_FUSED;
    const size_t own = fused ? weft_cuda_site_fwd_bytes(call, pre) : 0;
    return fused && !call->any_address ? own : larger(own, unfused());
}

#endif
