/* SPDX-License-Identifier: Apache-2.0
 *
 * Workspace of an operator whose forward is a single pass where it can be, and otherwise links: chain() asks for theirs. */
#ifndef WEFT_CUDA_SINGLE_OR_CHAIN_H
#define WEFT_CUDA_SINGLE_OR_CHAIN_H

#include "cuda/site/fwd.h"

static inline size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

template <class Chain>
static inline size_t single_or_chain_bytes(const weft_call *call, const weft_mhc_post_fwd_args *post,
                                           const weft_mhc_pre_fwd_args *pre, const Chain &chain)
{
    size_t site;
    const bool that_is_all = weft_cuda_site_fwd_bytes(call, post, pre, &site);
    return that_is_all ? site : larger(site, chain());
}

#endif
