/* SPDX-License-Identifier: Apache-2.0
 *
 * Everything in front of a sub-layer in one call [M10]. */
#include "ref/pre.h"

static size_t workspace_fwd(const weft_call *call, const void *args)
{
    weft_arena arena = weft_arena_open(NULL);
    pre_site s;
    (void)args;
    pre_take_forward(&s, call, &arena);
    take(&arena, s.width);
    return weft_arena_bytes(&arena);
}

static weft_status run_fwd(const weft_call *call, const void *args)
{
    const weft_mhc_pre_fwd_args *a = args;
    weft_arena arena = weft_arena_open(call->exec->workspace);
    pre_site s;
    double *x;

    pre_take_forward(&s, call, &arena);
    x = take(&arena, s.width);
    pre_load_forward(&s, a);
    for (int64_t t = 0; t < call->tokens; t++) {
        load_token(&a->x, t, s.width, x);
        pre_token_forward(&s, a, t, x);
    }
    return WEFT_OK;
}

static size_t workspace_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_pre_bwd_args *a = args;
    weft_arena arena = weft_arena_open(NULL);
    pre_site s;
    pre_take_backward(&s, call, &a->numerics, &arena);
    take(&arena, s.width);
    take(&arena, s.width);
    return weft_arena_bytes(&arena);
}

static weft_status run_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_pre_bwd_args *a = args;
    weft_arena arena = weft_arena_open(call->exec->workspace);
    pre_site s;
    double *x, *d_x;

    pre_take_backward(&s, call, &a->numerics, &arena);
    x = take(&arena, s.width);
    d_x = take(&arena, s.width);
    pre_load_backward(&s, a);
    for (int64_t t = 0; t < call->tokens; t++) {
        load_token(&a->x, t, s.width, x);
        clear(s.width, d_x);
        pre_token_backward(&s, a, t, x, d_x);
        grad_token(&a->d_x, t, s.width, d_x);
    }
    pre_store_sums(&s, a);
    return WEFT_OK;
}

const weft_kernel weft_ref_mhc_pre_fwd[] = {{.run = run_fwd, .workspace = workspace_fwd}, {0}};
const weft_kernel weft_ref_mhc_pre_bwd[] = {{.run = run_bwd, .workspace = workspace_bwd}, {0}};
