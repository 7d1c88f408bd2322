/* SPDX-License-Identifier: Apache-2.0
 *
 * Gates [M2], one token per thread and one launch a pass. mhc_coef runs the same kernels with Sinkhorn behind them. */
#include "cuda/mhc/gates_run.cuh"

static gates_fwd_call fwd_call(const void *args)
{
    const weft_mhc_scale_fwd_args *a = (const weft_mhc_scale_fwd_args *)args;
    return {&a->numerics, &a->h, &a->ms, &a->alpha, &a->beta, &a->pre, &a->post, &a->logits};
}

static gates_bwd_call bwd_call(const void *args)
{
    const weft_mhc_scale_bwd_args *a = (const weft_mhc_scale_bwd_args *)args;
    return {&a->numerics, &a->h,        &a->ms,  &a->alpha, &a->beta,    &a->d_pre,
            &a->d_post,   &a->d_logits, &a->d_h, &a->d_ms,  &a->d_alpha, &a->d_beta};
}

static weft_status fwd(const weft_call *call, const void *args)
{
    return gates_fwd_run<false>(call, "gates", fwd_call(args));
}

static weft_status bwd(const weft_call *call, const void *args)
{
    return gates_bwd_run<false>(call, "gradient of the gates", bwd_call(args));
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    return gates_fwd_workspace<false>(call, fwd_call(args));
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    return gates_bwd_workspace<false>(call, bwd_call(args));
}

const weft_kernel weft_cuda_mhc_scale_fwd[] = {{.run = fwd, .workspace = fwd_workspace}, {}};
const weft_kernel weft_cuda_mhc_scale_bwd[] = {{.run = bwd, .workspace = bwd_workspace}, {}};
