/* SPDX-License-Identifier: Apache-2.0
 *
 * The gated delta rule [G5] [G6]: arguments. */
#include "core/check.h"

#define TOKENS_OF_THE_RULE                                                                                         \
    IN(query, ACT, BATCH, STEPS, HEADS, KEY_DIM), IN(key, ACT, BATCH, STEPS, HEADS, KEY_DIM),                      \
        IN(value, ACT, BATCH, STEPS, VALUE_HEADS, VALUE_DIM), IN(beta, WIDE, BATCH, STEPS, VALUE_HEADS),           \
        IN(g, FULL, BATCH, STEPS, VALUE_HEADS), OPT(cu_seqlens, INDEX, OFFSETS)
#define INPUTS TOKENS_OF_THE_RULE, OPT(state, FULL, SEQUENCES, VALUE_HEADS, KEY_DIM, VALUE_DIM)

#define ARGS weft_gdn_rule_fwd_args
static const weft_scalar_info fwd_scalars[] = {SCALAR(scale, REAL), SCALAR(head_map, INT), SCALAR(chunk, INT),
                                               SCALARS_END};
static const weft_arg_info fwd_args[] = {INPUTS, OUT(o, ACT, BATCH, STEPS, VALUE_HEADS, VALUE_DIM),
                                         OUT_OPT(final_state, FULL, SEQUENCES, VALUE_HEADS, KEY_DIM, VALUE_DIM)};
#undef ARGS

#define ARGS weft_gdn_rule_bwd_args
static const weft_scalar_info bwd_scalars[] = {SCALAR(scale, REAL), SCALAR(head_map, INT), SCALAR(chunk, INT),
                                               SCALARS_END};
static const weft_arg_info bwd_args[] = {INPUTS,
                                         IN(d_o, WIDE, BATCH, STEPS, VALUE_HEADS, VALUE_DIM),
                                         OPT(d_final_state, FULL, SEQUENCES, VALUE_HEADS, KEY_DIM, VALUE_DIM),
                                         GRAD_OPT(d_query, WIDE, BATCH, STEPS, HEADS, KEY_DIM),
                                         GRAD_OPT(d_key, WIDE, BATCH, STEPS, HEADS, KEY_DIM),
                                         GRAD_OPT(d_value, WIDE, BATCH, STEPS, VALUE_HEADS, VALUE_DIM),
                                         GRAD_OPT(d_beta, WIDE, BATCH, STEPS, VALUE_HEADS),
                                         GRAD_OPT(d_g, FULL, BATCH, STEPS, VALUE_HEADS),
                                         GRAD_OPT(d_state, FULL, SEQUENCES, VALUE_HEADS, KEY_DIM, VALUE_DIM)};
#undef ARGS

#define ARGS weft_gdn_rule_step_args
static const weft_scalar_info step_scalars[] = {SCALAR(scale, REAL), SCALAR(head_map, INT), SCALARS_END};
static const weft_arg_info step_args[] = {
    TOKENS_OF_THE_RULE,
    OPT(state_index, INDEX, SEQUENCES),
    IN(state, WIDE, CACHE, VALUE_HEADS, KEY_DIM, VALUE_DIM),
    OUT(o, ACT, BATCH, STEPS, VALUE_HEADS, VALUE_DIM),
    OUT_OVER_OPT(new_state, state, WIDE, CACHE, VALUE_HEADS, KEY_DIM, VALUE_DIM),
    OUT_OPT(token_state, WIDE, BATCH, STEP_HEADS, KEY_DIM, VALUE_DIM)};
#undef ARGS

static weft_status check_common(const weft_call *call, double scale, weft_gdn_head_map map, int32_t chunk,
                                const weft_tensor *cu_seqlens)
{
    if (!(scale > -1e30 && scale < 1e30))
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: scale: expected a finite number, got %g", weft_op_name(call->op),
                         scale);
    WEFT_TRY(weft_check_enum(call, "head_map", (int)map, 2));
    WEFT_TRY(weft_check_enum(call, "chunk", chunk, WEFT_GDN_MAX_CHUNK + 1));
    if (call->value_heads % call->heads)
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "%s: value: expected a number of heads that is a multiple of the %lld of query, got %lld",
                         weft_op_name(call->op), (long long)call->heads, (long long)call->value_heads);
    return weft_check_sequences(call, cu_seqlens);
}

static weft_status check_fwd(const weft_call *call, const void *args)
{
    const weft_gdn_rule_fwd_args *a = args;
    return check_common(call, a->scale, a->head_map, a->chunk, &a->cu_seqlens);
}

static weft_status check_bwd(const weft_call *call, const void *args)
{
    const weft_gdn_rule_bwd_args *a = args;
    WEFT_TRY(weft_check_needs(call, "d_state", &a->d_state.to, "state", &a->state));
    return check_common(call, a->scale, a->head_map, a->chunk, &a->cu_seqlens);
}

static weft_status check_step(const weft_call *call, const void *args)
{
    const weft_gdn_rule_step_args *a = args;
    WEFT_TRY(check_common(call, a->scale, a->head_map, 0, &a->cu_seqlens));
    return weft_check_index(call, "state_index", &a->state_index, call->cache);
}

WEFT_DESC(gdn_rule_fwd, fwd_scalars, fwd_args, check_fwd);
WEFT_DESC(gdn_rule_bwd, bwd_scalars, bwd_args, check_bwd);
WEFT_DESC(gdn_rule_step, step_scalars, step_args, check_step);
