/* SPDX-License-Identifier: Apache-2.0
 *
 * The gated norm behind the gated delta rule [G7]: arguments. */
#include "core/check.h"

#define INPUTS                                                                                                     \
    IN(o, ACT, BATCH, STEPS, VALUE_HEADS, CHANNELS), IN(z, ACT, BATCH, STEPS, VALUE_HEADS, CHANNELS),              \
        OPT(weight, PARAM, CHANNELS)

#define ARGS weft_gdn_norm_fwd_args
static const weft_scalar_info fwd_scalars[] = {SCALAR(eps, REAL), SCALAR(gate, INT), SCALARS_END};
static const weft_arg_info fwd_args[] = {INPUTS, OUT_OVER(y, o, ACT, BATCH, STEPS, VALUE_HEADS, CHANNELS)};
#undef ARGS

#define ARGS weft_gdn_norm_bwd_args
static const weft_scalar_info bwd_scalars[] = {SCALAR(eps, REAL), SCALAR(gate, INT), SCALARS_END};
static const weft_arg_info bwd_args[] = {INPUTS, IN(d_y, WIDE, BATCH, STEPS, VALUE_HEADS, CHANNELS),
                                         GRAD_OPT(d_o, WIDE, BATCH, STEPS, VALUE_HEADS, CHANNELS),
                                         GRAD_OPT(d_z, WIDE, BATCH, STEPS, VALUE_HEADS, CHANNELS),
                                         GRAD_OPT(d_weight, PARAM, CHANNELS)};
#undef ARGS

static weft_status check_common(const weft_call *call, double eps, weft_gdn_gate gate)
{
    WEFT_TRY(weft_check_eps(call, "eps", eps));
    WEFT_TRY(weft_check_enum(call, "gate", (int)gate, 2));
    return weft_check_sequences(call, &(weft_tensor){0});
}

static weft_status check_fwd(const weft_call *call, const void *args)
{
    const weft_gdn_norm_fwd_args *a = args;
    return check_common(call, a->eps, a->gate);
}

static weft_status check_bwd(const weft_call *call, const void *args)
{
    const weft_gdn_norm_bwd_args *a = args;
    WEFT_TRY(weft_check_needs(call, "d_weight", &a->d_weight.to, "weight", &a->weight));
    return check_common(call, a->eps, a->gate);
}

WEFT_DESC(gdn_norm_fwd, fwd_scalars, fwd_args, check_fwd);
WEFT_DESC(gdn_norm_bwd, bwd_scalars, bwd_args, check_bwd);
