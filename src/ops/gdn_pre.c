/* SPDX-License-Identifier: Apache-2.0
 *
 * In front of the gated delta rule [G1] [G2] [G3] [G4]: arguments. */
#include "core/check.h"

#define PROJECTION                                                                                                 \
    IN(q, ACT, BATCH, STEPS, KEY_HEADS, KEY_DIM), IN(k, ACT, BATCH, STEPS, KEY_HEADS, KEY_DIM),                    \
        IN(v, ACT, BATCH, STEPS, VALUE_HEADS, VALUE_DIM)
#define GATES_AND_PARAMETERS                                                                                       \
    IN(b, ACT, BATCH, STEPS, VALUE_HEADS), IN(a, ACT, BATCH, STEPS, VALUE_HEADS), IN(weight, PARAM, CONV, WIDTH),  \
        OPT(bias, PARAM, CONV), IN(a_log, PARAM, VALUE_HEADS), OPT(dt_bias, PARAM, VALUE_HEADS),                   \
        OPT(cu_seqlens, INDEX, OFFSETS)
#define RESULTS                                                                                                    \
    OUT(query, ACT, BATCH, STEPS, HEADS, KEY_DIM), OUT(key, ACT, BATCH, STEPS, HEADS, KEY_DIM),                    \
        OUT(value, ACT, BATCH, STEPS, VALUE_HEADS, VALUE_DIM),                                                     \
        OUT_OPT(gate, ACT, BATCH, STEPS, VALUE_HEADS, VALUE_DIM), OUT(beta, WIDE, BATCH, STEPS, VALUE_HEADS),      \
        OUT(g, FULL, BATCH, STEPS, VALUE_HEADS)

#define ARGS weft_gdn_pre_fwd_args
static const weft_scalar_info fwd_scalars[] = {SCALAR(options, GDN), SCALARS_END};
static const weft_arg_info fwd_args[] = {PROJECTION,
                                         OPT(z, ACT, BATCH, STEPS, VALUE_HEADS, VALUE_DIM),
                                         GATES_AND_PARAMETERS,
                                         OPT(state, WIDE, SEQUENCES, CONV, HISTORY),
                                         RESULTS,
                                         OUT_OVER_OPT(final_state, state, WIDE, SEQUENCES, CONV, HISTORY)};
#undef ARGS

#define ARGS weft_gdn_pre_step_args
static const weft_scalar_info step_scalars[] = {SCALAR(options, GDN), SCALARS_END};
static const weft_arg_info step_args[] = {PROJECTION,
                                          OPT(z, ACT, BATCH, STEPS, VALUE_HEADS, VALUE_DIM),
                                          GATES_AND_PARAMETERS,
                                          OPT(state_index, INDEX, SEQUENCES),
                                          IN(state, WIDE, CACHE, CONV, HISTORY),
                                          RESULTS,
                                          OUT_OVER(new_state, state, WIDE, CACHE, CONV, HISTORY)};
#undef ARGS

#define ARGS weft_gdn_pre_bwd_args
static const weft_scalar_info bwd_scalars[] = {SCALAR(options, GDN), SCALARS_END};
static const weft_arg_info bwd_args[] = {PROJECTION,
                                         GATES_AND_PARAMETERS,
                                         OPT(state, WIDE, SEQUENCES, CONV, HISTORY),
                                         OPT(d_query, WIDE, BATCH, STEPS, HEADS, KEY_DIM),
                                         OPT(d_key, WIDE, BATCH, STEPS, HEADS, KEY_DIM),
                                         OPT(d_value, WIDE, BATCH, STEPS, VALUE_HEADS, VALUE_DIM),
                                         OPT(d_gate, WIDE, BATCH, STEPS, VALUE_HEADS, VALUE_DIM),
                                         OPT(d_beta, WIDE, BATCH, STEPS, VALUE_HEADS),
                                         OPT(d_g, FULL, BATCH, STEPS, VALUE_HEADS),
                                         OPT(d_final_state, WIDE, SEQUENCES, CONV, HISTORY),
                                         GRAD_OPT(d_q, WIDE, BATCH, STEPS, KEY_HEADS, KEY_DIM),
                                         GRAD_OPT(d_k, WIDE, BATCH, STEPS, KEY_HEADS, KEY_DIM),
                                         GRAD_OPT(d_v, WIDE, BATCH, STEPS, VALUE_HEADS, VALUE_DIM),
                                         GRAD_OPT(d_z, WIDE, BATCH, STEPS, VALUE_HEADS, VALUE_DIM),
                                         GRAD_OPT(d_b, WIDE, BATCH, STEPS, VALUE_HEADS),
                                         GRAD_OPT(d_a, WIDE, BATCH, STEPS, VALUE_HEADS),
                                         GRAD_OPT(d_weight, PARAM, CONV, WIDTH),
                                         GRAD_OPT(d_bias, PARAM, CONV),
                                         GRAD_OPT(d_a_log, PARAM, VALUE_HEADS),
                                         GRAD_OPT(d_dt_bias, PARAM, VALUE_HEADS),
                                         GRAD_OPT(d_state, WIDE, SEQUENCES, CONV, HISTORY)};
#undef ARGS

static weft_status check_scale(const weft_call *call, const char *name, double scale)
{
    if (scale > -1e30 && scale < 1e30 && scale != 0) return WEFT_OK;
    return weft_fail(WEFT_ERR_ARGUMENT,
                     "%s: %s: expected a finite number other than 0 (weft_gdn_defaults has 1), got %g",
                     weft_op_name(call->op), name, scale);
}

static weft_status check_heads(const weft_call *call)
{
    const char *op = weft_op_name(call->op);
    if (call->value_heads % call->key_heads)
        return weft_fail(WEFT_ERR_ARGUMENT,
                         "%s: v: expected a number of heads that is a multiple of the %lld of q, got %lld", op,
                         (long long)call->key_heads, (long long)call->value_heads);
    if (call->heads < 0 || call->heads == call->key_heads || call->heads == call->value_heads) return WEFT_OK;
    return weft_fail(WEFT_ERR_ARGUMENT, "%s: %s: expected %lld or %lld heads, got %lld", op,
                     call->op == WEFT_OP_gdn_pre_bwd ? "d_query" : "query", (long long)call->key_heads,
                     (long long)call->value_heads, (long long)call->heads);
}

/* What all three passes share. */
static weft_status check_common(const weft_call *call, const weft_gdn_options *o, const weft_tensor *cu_seqlens)
{
    const char *op = weft_op_name(call->op);
    WEFT_TRY(weft_check_enum(call, "options.activation", (int)o->activation, 2));
    WEFT_TRY(weft_check_enum(call, "options.l2norm", o->l2norm, 2));
    WEFT_TRY(weft_check_eps(call, "options.l2_eps", o->l2_eps));
    WEFT_TRY(check_scale(call, "options.q_scale", o->q_scale));
    WEFT_TRY(check_scale(call, "options.beta_scale", o->beta_scale));
    WEFT_TRY(weft_check_enum(call, "options.head_map", (int)o->head_map, 2));
    WEFT_TRY(weft_check_enum(call, "options.rounding", (int)o->rounding, 2));
    WEFT_TRY(weft_check_enum(call, "options.g_chunk", o->g_chunk, WEFT_GDN_MAX_CHUNK + 1));
    WEFT_TRY(weft_check_enum(call, "options.g_log2", o->g_log2, 2));
    WEFT_TRY(check_heads(call));
    if (call->history >= 0 && call->history < call->width - 1)
        return weft_fail(WEFT_ERR_ARGUMENT, "%s: state: expected at least %lld slots for %lld taps, got %lld", op,
                         (long long)call->width - 1, (long long)call->width, (long long)call->history);
    return weft_check_sequences(call, cu_seqlens);
}

static weft_status check_fwd(const weft_call *call, const void *args)
{
    const weft_gdn_pre_fwd_args *a = args;
    WEFT_TRY(weft_check_needs(call, "gate", &a->gate, "z", &a->z));
    return check_common(call, &a->options, &a->cu_seqlens);
}

static weft_status check_step(const weft_call *call, const void *args)
{
    const weft_gdn_pre_step_args *a = args;
    WEFT_TRY(weft_check_needs(call, "gate", &a->gate, "z", &a->z));
    WEFT_TRY(check_common(call, &a->options, &a->cu_seqlens));
    return weft_check_index(call, "state_index", &a->state_index, call->cache);
}

static weft_status check_bwd(const weft_call *call, const void *args)
{
    const weft_gdn_pre_bwd_args *a = args;
    WEFT_TRY(weft_check_needs(call, "d_bias", &a->d_bias.to, "bias", &a->bias));
    WEFT_TRY(weft_check_needs(call, "d_dt_bias", &a->d_dt_bias.to, "dt_bias", &a->dt_bias));
    WEFT_TRY(weft_check_needs(call, "d_state", &a->d_state.to, "state", &a->state));
    return check_common(call, &a->options, &a->cu_seqlens);
}

WEFT_DESC(gdn_pre_fwd, fwd_scalars, fwd_args, check_fwd);
WEFT_DESC(gdn_pre_bwd, bwd_scalars, bwd_args, check_bwd);
WEFT_DESC(gdn_pre_step, step_scalars, step_args, check_step);
