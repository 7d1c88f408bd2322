/* SPDX-License-Identifier: Apache-2.0
 *
 * Learned head contraction [M9]: arguments. */
#include "core/check.h"

#define ARGS weft_mhc_head_fwd_args
static const weft_scalar_info fwd_scalars[] = {SCALAR(rms_eps, REAL), SCALAR(rms_eps_kind, INT),
                                               SCALAR(pre_eps, REAL), SCALARS_END};
static const weft_arg_info fwd_args[] = {IN(x, ACT, TOKENS, STREAMS, CHANNELS),
                                         IN(phi, PARAM, STREAMS, STREAMS, CHANNELS),
                                         OPT(norm_weight, PARAM, STREAMS, CHANNELS),
                                         IN(alpha, PARAM, 1),
                                         IN(beta, PARAM, STREAMS),
                                         OUT(u, ACT, TOKENS, CHANNELS),
                                         OUT_OPT(h, FULL, TOKENS, STREAMS),
                                         OUT_OPT(ms, FULL, TOKENS)};
#undef ARGS

#define ARGS weft_mhc_head_bwd_args
static const weft_scalar_info bwd_scalars[] = {SCALAR(rms_eps, REAL), SCALAR(rms_eps_kind, INT),
                                               SCALAR(pre_eps, REAL), SCALARS_END};
static const weft_arg_info bwd_args[] = {IN(x, ACT, TOKENS, STREAMS, CHANNELS),
                                         IN(phi, PARAM, STREAMS, STREAMS, CHANNELS),
                                         OPT(norm_weight, PARAM, STREAMS, CHANNELS),
                                         IN(alpha, PARAM, 1),
                                         IN(beta, PARAM, STREAMS),
                                         IN(h, FULL, TOKENS, STREAMS),
                                         IN(ms, FULL, TOKENS),
                                         IN(d_u, WIDE, TOKENS, CHANNELS),
                                         GRAD_OPT(d_x, WIDE, TOKENS, STREAMS, CHANNELS),
                                         GRAD_OPT(d_phi, PARAM, STREAMS, STREAMS, CHANNELS),
                                         GRAD_OPT(d_norm_weight, PARAM, STREAMS, CHANNELS),
                                         GRAD_OPT(d_alpha, PARAM, 1),
                                         GRAD_OPT(d_beta, PARAM, STREAMS)};
#undef ARGS

static weft_status check_scalars(const weft_call *call, double rms_eps, weft_eps_kind kind, double pre_eps)
{
    WEFT_TRY(weft_check_eps(call, "rms_eps", rms_eps));
    WEFT_TRY(weft_check_enum(call, "rms_eps_kind", (int)kind, 2));
    return weft_check_eps(call, "pre_eps", pre_eps);
}

static weft_status check_fwd(const weft_call *call, const void *args)
{
    const weft_mhc_head_fwd_args *a = args;
    return check_scalars(call, a->rms_eps, a->rms_eps_kind, a->pre_eps);
}

static weft_status check_bwd(const weft_call *call, const void *args)
{
    const weft_mhc_head_bwd_args *a = args;
    WEFT_TRY(check_scalars(call, a->rms_eps, a->rms_eps_kind, a->pre_eps));
    return weft_check_needs(call, "d_norm_weight", &a->d_norm_weight.to, "norm_weight", &a->norm_weight);
}

WEFT_DESC(mhc_head_fwd, fwd_scalars, fwd_args, check_fwd);
WEFT_DESC(mhc_head_bwd, bwd_scalars, bwd_args, check_bwd);
