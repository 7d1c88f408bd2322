/* SPDX-License-Identifier: Apache-2.0 */
#include "check/expect.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check/element.h"
#include "check/shape.h"

/* ---- memory -------------------------------------------------------------------------------------------------- */

struct expect_block {
    struct expect_block *next;
};

/* The program has nothing useful to do without memory, and these amounts are small. */
void *expect_room(expect_scope *scope, size_t bytes)
{
    struct expect_block *b = calloc(1, sizeof *b + bytes);
    if (!b) {
        fprintf(stderr, "weft: out of memory\n");
        exit(2);
    }
    b->next = scope->blocks;
    scope->blocks = b;
    return b + 1;
}

void expect_free(expect_scope *scope)
{
    while (scope->blocks) {
        struct expect_block *next = scope->blocks->next;
        free(scope->blocks);
        scope->blocks = next;
    }
}

double *expect_array(expect_scope *scope, int64_t length)
{
    return expect_room(scope, (size_t)length * sizeof(double) + sizeof(double));
}

void expect_fail(expect_scope *scope, const char *text)
{
    if (!scope->problem[0]) snprintf(scope->problem, sizeof scope->problem, "%s", text);
}

/* ---- calls by name ------------------------------------------------------------------------------------------- */

expect_call *expect_open(expect_scope *scope, const char *op, const void *args)
{
    expect_call *call = expect_room(scope, sizeof *call);
    call->scope = scope;
    call->op = weft_op_find(op);
    call->args = expect_room(scope, call->op->args_size);
    memcpy(call->args, args, call->op->args_size);
    *(size_t *)call->args = call->op->args_size;
    return call;
}

int expect_index(const expect_call *call, const char *name)
{
    for (int i = 0; i < call->op->num_args; i++)
        if (!strcmp(call->op->args[i].name, name)) return i;
    fprintf(stderr, "weft: %s has no argument %s\n", call->op->name, name);
    abort();
}

void expect_give(expect_call *call, const char *name, quantity q)
{
    call->q[expect_index(call, name)] = q;
}

void expect_want(expect_call *call, const char *name)
{
    call->wanted[expect_index(call, name)] = 1;
}

quantity expect_take(const expect_call *call, const char *name)
{
    return call->q[expect_index(call, name)];
}

quantity expect_got(const expect_call *call, const char *name)
{
    return (quantity){call->got[expect_index(call, name)], NULL};
}

static int64_t dim_size(const expect_call *call, int32_t dim)
{
    const expect_scope *s = call->scope;
    switch (dim) {
    case WEFT_DIM_TOKENS: return s->tokens;
    case WEFT_DIM_STREAMS: return s->streams;
    case WEFT_DIM_CHANNELS: return s->channels;
    case WEFT_DIM_GATES: return shape_gates(s->streams, s->scales);
    case WEFT_DIM_SCALES: return s->scales;
    case WEFT_DIM_ROWS: return call->rows;
    default: return dim;
    }
}

int64_t expect_length(const expect_call *call, int arg)
{
    int64_t length = 1;
    for (int d = 0; d < call->op->args[arg].ndim; d++) length *= dim_size(call, call->op->args[arg].dim[d]);
    return length;
}

/* ---- the reference in float64 -------------------------------------------------------------------------------- */

/* Calls the reference with these arrays, by argument; NULL: absent. */
static void reference(expect_call *call, double *const *arrays)
{
    const weft_op_info *op = call->op;
    weft_exec exec = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_REF);
    for (int i = 0; i < op->num_args; i++) {
        const weft_arg_info *info = &op->args[i];
        int64_t shape[WEFT_MAX_DIMS];
        weft_tensor t = {0};
        for (int d = 0; d < info->ndim; d++) shape[d] = dim_size(call, info->dim[d]);
        if (arrays[i]) t = weft_dense(arrays[i], WEFT_F64, info->ndim, shape);
        char *field = (char *)call->args + info->offset;
        if (info->kind == WEFT_ARG_GRAD)
            *(weft_grad *)field = (weft_grad){t, 0};
        else
            *(weft_tensor *)field = t;
    }
    if (weft_op_workspace(op, &exec, call->args, &exec.workspace_bytes) == WEFT_OK) {
        exec.workspace = malloc(exec.workspace_bytes + 1);
        if (exec.workspace && weft_op_call(op, &exec, call->args) == WEFT_OK) {
            free(exec.workspace);
            return;
        }
        free(exec.workspace);
    }
    expect_fail(call->scope, weft_last_error());
}

void expect_values(expect_call *call)
{
    double *arrays[EXPECT_MAX_ARGS] = {0};
    for (int i = 0; i < call->op->num_args; i++) {
        if (call->wanted[i]) {
            call->q[i].val = expect_array(call->scope, expect_length(call, i));
            call->q[i].err = expect_array(call->scope, expect_length(call, i));
        }
        arrays[i] = call->q[i].val;
    }
    reference(call, arrays);
}

/* ---- polynomials --------------------------------------------------------------------------------------------- */

/* Roundings on the longest path from an input to the result. A sum over channels runs in 16 lanes with the scope's tree
 * at the end; one over tokens or rows is bounded by one partial sum of all of them, whatever its real order; one over
 * streams is a chain of fused products. `split` counts the float32 factors that may be split into bf16; the other
 * one of a single factor is x, which has a low part of its own, an exact one, where it is f16. */
static const struct roundings {
    const char *op, *arg;
    int base, streams, lanes, all_lanes, tokens, rows, split;
} roundings[] = {
    {"mhc_project_fwd", "h", .base = 2, .all_lanes = 1, .split = 1},
    {"mhc_project_fwd", "ms", .base = 2, .all_lanes = 1},
    {"mhc_project_bwd", "d_x", .base = 4, .rows = 1, .split = 2},
    {"mhc_project_bwd", "d_phi", .base = 6, .tokens = 1, .split = 1},
    {"mhc_project_bwd", "d_norm_weight", .base = 6, .tokens = 1, .rows = 1, .split = 1},
    {"mhc_aggregate_fwd", "u", .base = 3, .streams = 1},
    {"mhc_aggregate_bwd", "d_x", .base = 4},
    {"mhc_aggregate_bwd", "d_pre", .base = 0, .lanes = 1},
    {"mhc_post_fwd", "y", .base = 3, .streams = 1},
    {"mhc_post_bwd", "d_x", .base = 3, .streams = 1},
    {"mhc_post_bwd", "d_f", .base = 3, .streams = 1},
    {"mhc_post_bwd", "d_bias", .base = 6, .streams = 1, .tokens = 1},
    {"mhc_post_bwd", "d_post", .base = 2, .lanes = 1},
    {"mhc_post_bwd", "d_res", .base = 0, .lanes = 1},
    {"mhc_expand_fwd", "x", .base = 0},
    {"mhc_expand_bwd", "d_u", .base = 3, .streams = 1},
    {"mhc_contract_fwd", "u", .base = 3, .streams = 1},
    {"mhc_contract_bwd", "d_x", .base = 4},
};

static const struct roundings *roundings_of(const char *op, const char *arg)
{
    for (size_t i = 0; i < sizeof roundings / sizeof roundings[0]; i++)
        if (!strcmp(roundings[i].op, op) && (!arg || !strcmp(roundings[i].arg, arg))) return &roundings[i];
    return NULL;
}

/* Tensor cores: units for each term, of one more lane and of 16 more tokens or rows, since they work in steps of 16. */
static double roundings_on_tensor_cores(const expect_scope *s, const struct roundings *r, double lanes,
                                        double terms)
{
    if (r->all_lanes) return s->tensor * (double)s->streams * (lanes + 1) + 32;
    return s->tensor * (terms + 16) + r->base;
}

/* Error of a result relative to the sum of its terms' magnitudes; negative where no bound is derived. */
static double relative_error(const expect_call *call, const char *arg)
{
    const expect_scope *s = call->scope;
    const struct roundings *r = roundings_of(call->op->name, arg);
    if (!r) return -1;
    /* without res a stream meets no other one */
    int alone = !strncmp(r->op, "mhc_post", 8) && !expect_take(call, "res").val;
    double n = alone && (!strcmp(arg, "y") || !strcmp(arg, "d_x")) ? 1 : (double)s->streams;
    double lanes = ceil((double)s->channels / 16);
    double terms = r->tokens * (double)s->tokens + r->rows * (double)call->rows;
    double k =
        r->base + r->streams * n + terms + r->lanes * (lanes + s->tree) + r->all_lanes * (n * lanes + s->tree);
    if (s->tensor > 0 && !strncmp(r->op, "mhc_project", 11)) k = roundings_on_tensor_cores(s, r, lanes, terms);
    if (!r->split || (!strcmp(arg, "h") && s->exact_phi)) return k * s->unit;
    return k * s->unit + r->split * s->split + (r->split == 2 || s->act == WEFT_F16 ? s->low : 0);
}

static void polynomial(expect_call *call)
{
    expect_scope *s = call->scope;
    double *size[EXPECT_MAX_ARGS] = {0}, *more[EXPECT_MAX_ARGS] = {0};
    int errors = 0;
    expect_values(call);
    for (int i = 0; i < call->op->num_args; i++) {
        quantity q = call->q[i];
        if (!q.val) continue;
        int64_t length = expect_length(call, i);
        size[i] = expect_array(s, length);
        more[i] = expect_array(s, length);
        if (call->wanted[i]) continue;
        if (q.err) errors = 1;
        for (int64_t k = 0; k < length; k++) {
            size[i][k] = fabs(q.val[k]);
            more[i][k] = fabs(q.val[k]) + error_of(q, k);
        }
    }
    reference(call, size);
    /* The terms have no sign any more, so the difference is what the inputs' errors can add up to. */
    if (errors) reference(call, more);
    for (int i = 0; i < call->op->num_args; i++) {
        if (!call->wanted[i]) continue;
        double relative = relative_error(call, call->op->args[i].name);
        if (relative < 0) expect_fail(s, "no error bound is known for this operator");
        for (int64_t k = 0; k < expect_length(call, i); k++)
            call->q[i].err[k] = relative * size[i][k] + (errors ? more[i][k] - size[i][k] : 0);
    }
}

/* The operators that are no polynomials; `chain` marks those that are expected as the chain of their parts. */
static const struct evaluator {
    const char *op;
    void (*eval)(expect_call *);
    int chain;
} evaluators[] = {
    {"mhc_scale_fwd", expect_scale_fwd, 0},
    {"mhc_scale_bwd", expect_scale_bwd, 0},
    {"mhc_sinkhorn_fwd", expect_sinkhorn_fwd, 0},
    {"mhc_sinkhorn_bwd", expect_sinkhorn_bwd, 0},
    {"rmsnorm_fwd", expect_rmsnorm_fwd, 0},
    {"rmsnorm_bwd", expect_rmsnorm_bwd, 0},
    {"mhc_coef_fwd", expect_coef_fwd, 0},
    {"mhc_coef_bwd", expect_coef_bwd, 0},
    {"mhc_head_fwd", expect_head_fwd, 1},
    {"mhc_head_bwd", expect_head_bwd, 1},
    {"mhc_pre_fwd", expect_pre_fwd, 1},
    {"mhc_pre_bwd", expect_pre_bwd, 1},
    {"mhc_boundary_fwd", expect_boundary_fwd, 1},
    {"mhc_boundary_bwd", expect_boundary_bwd, 1},
    {"gdn_pre_fwd", expect_gdn_pre_fwd, 0},
    {"gdn_pre_bwd", expect_gdn_pre_bwd, 0},
    {"gdn_pre_step", expect_gdn_pre_step, 0},
    {"gdn_rule_fwd", expect_gdn_rule_fwd, 0},
    {"gdn_rule_bwd", expect_gdn_rule_bwd, 0},
    {"gdn_rule_step", expect_gdn_rule_step, 0},
    {"gdn_norm_fwd", expect_gdn_norm_fwd, 0},
    {"gdn_norm_bwd", expect_gdn_norm_bwd, 0},
    {"mhc_replay_fwd", NULL, 1}, /* expect_head.c */
};

static const struct evaluator *evaluator_of(const char *op)
{
    for (size_t i = 0; i < sizeof evaluators / sizeof evaluators[0]; i++)
        if (!strcmp(evaluators[i].op, op)) return &evaluators[i];
    return NULL;
}

int expect_is_known(const char *op)
{
    return evaluator_of(op) || roundings_of(op, NULL);
}

int expect_is_single(const char *op)
{
    const struct evaluator *e = evaluator_of(op);
    return e ? !e->chain : roundings_of(op, NULL) != NULL;
}

void expect_eval(expect_call *call)
{
    const struct evaluator *e = evaluator_of(call->op->name);
    if (e && e->eval)
        e->eval(call);
    else
        polynomial(call);
}

quantity expect_stored(expect_scope *scope, weft_dtype dtype, quantity q, int64_t length)
{
    quantity r = {expect_array(scope, length), expect_array(scope, length)};
    for (int64_t k = 0; k < length; k++) {
        double low = element_round(dtype, q.val[k] - error_of(q, k)),
               high = element_round(dtype, q.val[k] + error_of(q, k));
        r.val[k] = element_round(dtype, q.val[k]);
        r.err[k] = fmax(high - r.val[k], r.val[k] - low);
    }
    return r;
}

quantity expect_sum(expect_scope *scope, quantity a, quantity b, int64_t length)
{
    if (!a.val) return b;
    if (!b.val) return a;
    quantity r = {expect_array(scope, length), expect_array(scope, length)};
    for (int64_t k = 0; k < length; k++) {
        r.val[k] = a.val[k] + b.val[k];
        r.err[k] = error_of(a, k) + error_of(b, k) + scope->unit * fabs(r.val[k]);
    }
    return r;
}
