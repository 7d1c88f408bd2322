/* SPDX-License-Identifier: Apache-2.0 */
#include "check/scalars.h"

#include <string.h>

void *scalar_find(const weft_op_info *op, void *args, weft_scalar_type type, const char *name)
{
    for (const weft_scalar_info *s = op->scalars; s && s->name; s++)
        if (s->type == type && (!name || !strcmp(s->name, name))) return (char *)args + s->offset;
    return NULL;
}

static double real_of(const char *name, const scalar_values *v)
{
    if (!strcmp(name, "rms_eps")) return v->numerics.rms_eps;
    if (!strcmp(name, "pre_eps")) return v->numerics.pre_eps;
    if (!strcmp(name, "scale")) return v->scale;
    return strstr(name, "eps") ? v->eps : 1;
}

static int32_t int_of(const char *name, const scalar_values *v)
{
    if (!strcmp(name, "rms_eps_kind")) return (int32_t)v->numerics.rms_eps_kind;
    if (!strcmp(name, "head_map")) return (int32_t)v->gdn.head_map;
    if (!strcmp(name, "gate")) return v->gdn.activation == WEFT_GDN_LINEAR ? WEFT_GDN_GATE_SIGMOID : 0;
    if (!strcmp(name, "kind")) return v->kind;
    return strcmp(name, "chunk") ? 0 : v->chunk;
}

void scalars_set(const weft_op_info *op, void *args, const scalar_values *v)
{
    for (const weft_scalar_info *s = op->scalars; s && s->name; s++) {
        char *field = (char *)args + s->offset;
        const double real = s->type == WEFT_SCALAR_REAL ? real_of(s->name, v) : 0;
        const int32_t whole = s->type == WEFT_SCALAR_INT ? int_of(s->name, v) : 0;
        switch (s->type) {
        case WEFT_SCALAR_REAL: memcpy(field, &real, sizeof real); break;
        case WEFT_SCALAR_INT: memcpy(field, &whole, sizeof whole); break;
        case WEFT_SCALAR_NUMERICS: memcpy(field, &v->numerics, sizeof v->numerics); break;
        case WEFT_SCALAR_DROPOUT: memcpy(field, &v->dropout, sizeof v->dropout); break;
        case WEFT_SCALAR_GDN: memcpy(field, &v->gdn, sizeof v->gdn); break;
        }
    }
}
