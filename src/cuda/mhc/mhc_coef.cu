/* SPDX-License-Identifier: Apache-2.0
 *
 * Coefficients = gates + Sinkhorn [M4], one token per thread and one launch a pass. Everything between h and the
 * coefficients stays on chip; backward starts again from h and ms. */
#include "cuda/mhc/gates_run.cuh"

static gates_fwd_call fwd_call(const void *args)
{
    const weft_mhc_coef_fwd_args *a = (const weft_mhc_coef_fwd_args *)args;
    return {&a->numerics, &a->h, &a->ms, &a->alpha, &a->beta, &a->pre, &a->post, &a->res};
}

static gates_bwd_call bwd_call(const void *args)
{
    const weft_mhc_coef_bwd_args *a = (const weft_mhc_coef_bwd_args *)args;
    return {&a->numerics, &a->h,     &a->ms,  &a->alpha, &a->beta,    &a->d_pre,
            &a->d_post,   &a->d_res, &a->d_h, &a->d_ms,  &a->d_alpha, &a->d_beta};
}

static weft_status fwd(const weft_call *call, const void *args)
{
    return gates_fwd_run<true>(call, "coefficients", fwd_call(args));
}

static weft_status bwd(const weft_call *call, const void *args)
{
    return gates_bwd_run<true>(call, "gradient of the coefficients", bwd_call(args));
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    return gates_fwd_workspace<true>(call, fwd_call(args));
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    return gates_bwd_workspace<true>(call, bwd_call(args));
}

const weft_kernel weft_cuda_mhc_coef_fwd[] = {{.run = fwd, .workspace = fwd_workspace}, {}};
const weft_kernel weft_cuda_mhc_coef_bwd[] = {{.run = bwd, .workspace = bwd_workspace}, {}};
