/* SPDX-License-Identifier: Apache-2.0
 *
 * Expand 1 -> n [M7]. Bytes per token, bf16: 2C + 2nC, forward and backward. */
#include "cuda/common/fan.cuh"

template <class T, int N> static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_mhc_expand_fwd_args *a = (const weft_mhc_expand_fwd_args *)args;
    return fan<T, N, true, false>(call, &a->x, 0, &a->u, 0, 1.0f);
}

template <class T, int N> static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_mhc_expand_bwd_args *a = (const weft_mhc_expand_bwd_args *)args;
    return fan<T, N, false, true>(call, &a->d_x, 0, &a->d_u.to, a->d_u.add, 1.0f);
}

#define ROWS(pass, T)                                                                                              \
    {number<T>::dtype, 2, pass<T, 2>, NULL}, {number<T>::dtype, 4, pass<T, 4>, NULL},                              \
        {number<T>::dtype, 8, pass<T, 8>, NULL},                                                                   \
    {                                                                                                              \
        number<T>::dtype, 0, pass<T, 0>, NULL                                                                      \
    }

const weft_kernel weft_cuda_mhc_expand_fwd[] = {ROWS(fwd, bf16), ROWS(fwd, float), ROWS(fwd, f16), {}};
const weft_kernel weft_cuda_mhc_expand_bwd[] = {ROWS(bwd, bf16), ROWS(bwd, float), ROWS(bwd, f16), {}};
