/* SPDX-License-Identifier: Apache-2.0
 *
 * One small function per kind of args struct. */
#include "support/fields.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

/* The public functions take a typed pointer; these take any, so that they fit one table. */
#define WEFT_OP(name)                                                                                              \
    static weft_status call_##name(const weft_exec *exec, const void *args)                                        \
    {                                                                                                              \
        return weft_##name(exec, args);                                                                            \
    }                                                                                                              \
    static weft_status workspace_##name(const weft_exec *exec, const void *args, size_t *bytes)                    \
    {                                                                                                              \
        return weft_##name##_workspace(exec, args, bytes);                                                         \
    }
#include "core/ops.def"
#undef WEFT_OP

static const struct {
    const char *name;
    weft_status (*call)(const weft_exec *exec, const void *args);
    weft_status (*workspace)(const weft_exec *exec, const void *args, size_t *bytes);
} functions[] = {
#define WEFT_OP(name) {#name, call_##name, workspace_##name},
#include "core/ops.def"
#undef WEFT_OP
};

void fields_bind(problem *p)
{
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (strcmp(functions[i].name, p->op->name) == 0) {
            p->call = functions[i].call;
            p->workspace = functions[i].workspace;
            return;
        }
    fail_msg("%s is not in core/ops.def", p->op->name);
}

static bool is(const problem *p, const char *op)
{
    return strcmp(p->op->name, op) == 0;
}

weft_mhc_numerics *fields_numerics(problem *p)
{
#define HAS(op)                                                                                                    \
    if (is(p, #op)) return &((weft_##op##_args *)p->args)->numerics;
    HAS(mhc_scale_fwd)
    HAS(mhc_scale_bwd)
    HAS(mhc_sinkhorn_fwd)
    HAS(mhc_sinkhorn_bwd)
    HAS(mhc_coef_fwd)
    HAS(mhc_coef_bwd)
    HAS(mhc_post_fwd)
    HAS(mhc_post_bwd)
    HAS(mhc_pre_fwd)
    HAS(mhc_pre_bwd)
    HAS(mhc_boundary_fwd)
    HAS(mhc_boundary_bwd)
    HAS(mhc_replay_fwd)
#undef HAS
    return NULL;
}

weft_dropout *fields_dropout(problem *p)
{
#define HAS(op)                                                                                                    \
    if (is(p, #op)) return &((weft_##op##_args *)p->args)->dropout;
    HAS(mhc_post_fwd)
    HAS(mhc_post_bwd)
    HAS(mhc_boundary_fwd)
    HAS(mhc_boundary_bwd)
#undef HAS
    if (is(p, "mhc_replay_fwd")) return &p->layers[0].dropout;
    return NULL;
}

void fields_token_base(problem *p, int64_t token)
{
    weft_dropout *d = fields_dropout(p);
    if (d) d->token_base = token;
    if (is(p, "mhc_replay_fwd"))
        for (int l = 0; l < p->spec.layers; l++) p->layers[l].dropout.token_base = token;
}

static double *sub_eps(problem *p)
{
#define HAS(op, field)                                                                                             \
    if (is(p, #op)) return &((weft_##op##_args *)p->args)->field;
    HAS(mhc_pre_fwd, sub_eps)
    HAS(mhc_pre_bwd, sub_eps)
    HAS(mhc_boundary_fwd, sub_eps)
    HAS(mhc_boundary_bwd, sub_eps)
    HAS(rmsnorm_fwd, eps)
    HAS(rmsnorm_bwd, eps)
#undef HAS
    return NULL;
}

void fields_set(problem *p)
{
    const spec *s = &p->spec;
    weft_mhc_numerics *numerics = fields_numerics(p);
    weft_dropout *dropout = fields_dropout(p);
    double *eps = sub_eps(p);
    if (numerics) *numerics = s->numerics;
    if (dropout) *dropout = s->dropout;
    if (eps) *eps = s->sub_eps;
#define HEAD(op)                                                                                                   \
    if (is(p, #op)) {                                                                                              \
        weft_##op##_args *args = p->args;                                                                          \
        args->rms_eps = s->numerics.rms_eps;                                                                       \
        args->rms_eps_kind = s->numerics.rms_eps_kind;                                                             \
        args->pre_eps = s->numerics.pre_eps;                                                                       \
    }
    HEAD(mhc_head_fwd)
    HEAD(mhc_head_bwd)
#undef HEAD
#define OPTIONS(op)                                                                                                \
    if (is(p, #op)) ((weft_##op##_args *)p->args)->options = s->gdn;
    OPTIONS(gdn_pre_fwd)
    OPTIONS(gdn_pre_bwd)
    OPTIONS(gdn_pre_step)
#undef OPTIONS
#define RULE(op)                                                                                                   \
    if (is(p, #op)) {                                                                                              \
        weft_##op##_args *args = p->args;                                                                          \
        args->scale = 1 / sqrt((double)s->key_dim);                                                                \
        args->head_map = s->gdn.head_map;                                                                          \
        args->chunk = s->rule_chunk;                                                                               \
    }
    RULE(gdn_rule_fwd)
    RULE(gdn_rule_bwd)
#undef RULE
    if (is(p, "mhc_contract_fwd")) ((weft_mhc_contract_fwd_args *)p->args)->kind = s->contract;
    if (is(p, "mhc_contract_bwd")) ((weft_mhc_contract_bwd_args *)p->args)->kind = s->contract;
    if (is(p, "mhc_replay_fwd")) {
        weft_mhc_replay_fwd_args *args = p->args;
        args->layers = p->layers;
        args->num_layers = s->layers;
        for (int l = 0; l < s->layers; l++) {
            p->layers[l].struct_size = sizeof p->layers[l];
            p->layers[l].dropout = s->dropout;
            p->layers[l].dropout.site += (uint64_t)l;
            p->layers[l].sub_eps = s->sub_eps;
        }
    }
}
