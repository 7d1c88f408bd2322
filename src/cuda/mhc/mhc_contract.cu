/* SPDX-License-Identifier: Apache-2.0
 *
 * Contract n -> 1 [M8]: mean or sum. Bytes per token, bf16: 2nC + 2C, forward and backward. */
#include "cuda/common/fan.cuh"

static float factor_of(const weft_call *call, weft_contract kind)
{
    return kind == WEFT_CONTRACT_MEAN ? 1.0f / (float)call->streams : 1.0f;
}

template <class T, int N> static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_mhc_contract_fwd_args *a = (const weft_mhc_contract_fwd_args *)args;
    return fan<T, N, false, false>(call, &a->x, 0, &a->u, 0, factor_of(call, a->kind));
}

template <class T, int N> static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_mhc_contract_bwd_args *a = (const weft_mhc_contract_bwd_args *)args;
    return fan<T, N, true, true>(call, &a->d_x.to, a->d_x.add, &a->d_u, 0, factor_of(call, a->kind));
}

#define ROWS(pass, T)                                                                                              \
    {number<T>::dtype, 2, pass<T, 2>, NULL}, {number<T>::dtype, 4, pass<T, 4>, NULL},                              \
        {number<T>::dtype, 8, pass<T, 8>, NULL},                                                                   \
    {                                                                                                              \
        number<T>::dtype, 0, pass<T, 0>, NULL                                                                      \
    }

const weft_kernel weft_cuda_mhc_contract_fwd[] = {ROWS(fwd, bf16), ROWS(fwd, float), ROWS(fwd, f16), {}};
const weft_kernel weft_cuda_mhc_contract_bwd[] = {ROWS(bwd, bf16), ROWS(bwd, float), ROWS(bwd, f16), {}};
