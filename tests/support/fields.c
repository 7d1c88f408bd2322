/* SPDX-License-Identifier: Apache-2.0
 *
 * The public functions by name, and fields that are not tensors through check/scalars.h. */
#include "support/fields.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "check/scalars.h"

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

weft_mhc_numerics *fields_numerics(problem *p)
{
    return scalar_find(p->op, p->args, WEFT_SCALAR_NUMERICS, NULL);
}

static bool has_layers(const problem *p)
{
    return strcmp(p->op->name, "mhc_replay_fwd") == 0;
}

weft_dropout *fields_dropout(problem *p)
{
    return has_layers(p) ? &p->layers[0].dropout : scalar_find(p->op, p->args, WEFT_SCALAR_DROPOUT, NULL);
}

void fields_token_base(problem *p, int64_t token)
{
    weft_dropout *d = fields_dropout(p);
    if (d) d->token_base = token;
    for (int l = 0; has_layers(p) && l < p->spec.layers; l++) p->layers[l].dropout.token_base = token;
}

void fields_set(problem *p)
{
    const spec *s = &p->spec;
    scalar_values values = {.numerics = s->numerics,
                            .dropout = s->dropout,
                            .gdn = s->gdn,
                            .eps = s->sub_eps,
                            .scale = 1 / sqrt((double)s->key_dim),
                            .chunk = s->rule_chunk,
                            .kind = (int32_t)s->contract};
    scalars_set(p->op, p->args, &values);
    if (!has_layers(p)) return;
    weft_mhc_replay_fwd_args *args = p->args;
    args->layers = p->layers;
    args->num_layers = s->layers;
    for (int l = 0; l < s->layers; l++) {
        p->layers[l].struct_size = sizeof p->layers[l];
        scalars_set(weft_mhc_replay_layer_info(), &p->layers[l], &values);
        values.dropout.site++;
    }
}
