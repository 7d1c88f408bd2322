/* SPDX-License-Identifier: Apache-2.0 */
#include "check/shape.h"

#include <math.h>
#include <string.h>

int64_t shape_gates(int64_t streams, int64_t scales)
{
    return 2 * streams + (scales == 2 ? 0 : streams * streams);
}

int64_t shape_dim(const shape_sizes *s, int32_t dim)
{
    switch (dim) {
    case WEFT_DIM_TOKENS: return s->tokens;
    case WEFT_DIM_STREAMS: return s->streams;
    case WEFT_DIM_CHANNELS: return s->channels;
    case WEFT_DIM_GATES: return shape_gates(s->streams, s->scales);
    case WEFT_DIM_SCALES: return s->scales == 2 ? 2 : 3;
    case WEFT_DIM_ROWS: return s->rows;
    case WEFT_DIM_BATCH: return s->batch;
    case WEFT_DIM_STEPS: return s->steps;
    case WEFT_DIM_KEY_HEADS: return s->key_heads;
    case WEFT_DIM_VALUE_HEADS: return s->value_heads;
    case WEFT_DIM_HEADS: return s->heads;
    case WEFT_DIM_KEY_DIM: return s->key_dim;
    case WEFT_DIM_VALUE_DIM: return s->value_dim;
    case WEFT_DIM_CONV: return 2 * s->key_heads * s->key_dim + s->value_heads * s->value_dim;
    case WEFT_DIM_WIDTH: return s->width;
    case WEFT_DIM_HISTORY: return s->history;
    case WEFT_DIM_SEQUENCES: return s->sequences;
    case WEFT_DIM_OFFSETS: return s->sequences + 1;
    case WEFT_DIM_CACHE: return s->cache;
    case WEFT_DIM_STEP_HEADS: return s->steps * s->value_heads;
    default: return dim;
    }
}

weft_dtype shape_dtype(const shape_types *t, weft_arg_type type)
{
    if (type == WEFT_TYPE_INDEX) return t->index;
    if (t->act == WEFT_F64) return WEFT_F64;
    switch (type) {
    case WEFT_TYPE_ACT: return t->act;
    case WEFT_TYPE_WIDE: return t->wide;
    case WEFT_TYPE_COEF: return t->coef;
    case WEFT_TYPE_PARAM: return t->param;
    default: return WEFT_F32;
    }
}

/* Dimensions from the outermost to the innermost in memory. */
static void order_dimensions(const weft_arg_info *info, layout order, int *dims)
{
    int last = info->ndim - 1;
    for (int d = 0; d <= last; d++) dims[d] = d;
    if (order != LAYOUT_CN) return;
    if (last >= 1 && info->dim[last - 1] == WEFT_DIM_STREAMS && info->dim[last] == WEFT_DIM_CHANNELS) {
        dims[last - 1] = last;
        dims[last] = last - 1;
    }
    if (info->dim[0] == WEFT_DIM_BATCH) {
        dims[0] = 1;
        dims[1] = 0;
    }
}

weft_tensor shape_tensor(const shape_sizes *sizes, const weft_arg_info *info, weft_dtype dtype, layout order,
                         int64_t pad)
{
    int dims[WEFT_MAX_DIMS], last = info->ndim - 1, padded = 0;
    int64_t gap = order == LAYOUT_LOOSE, step = 1 + gap;
    weft_tensor t = {.dtype = dtype, .ndim = info->ndim};
    for (int d = 0; d <= last; d++) t.shape[d] = shape_dim(sizes, info->dim[d]);
    order_dimensions(info, order, dims);
    if (info->dim[0] == WEFT_DIM_BATCH && last > 1 && dims[0] == 0)
        padded = 1; /* a token is a step of a sequence */
    for (int k = last; k >= 0; k--) {
        if (k == padded && last > 0) step += pad;
        t.stride[dims[k]] = step;
        step = step * t.shape[dims[k]] + gap;
    }
    return t;
}

int shape_find(const weft_op_info *op, const char *name)
{
    for (int i = 0; i < op->num_args; i++)
        if (!strcmp(op->args[i].name, name)) return i;
    return -1;
}

int shape_is_mix(const weft_arg_info *info)
{
    return info->ndim == 3 && info->dim[1] == WEFT_DIM_STREAMS && info->dim[2] == WEFT_DIM_STREAMS;
}

int shape_partner(const weft_op_info *op, int i)
{
    const weft_arg_info *info = &op->args[i];
    if (!strcmp(info->name, "sub_weight")) {
        int v = shape_find(op, "v");
        return v >= 0 ? v : shape_find(op, "d_v");
    }
    if (!strcmp(info->name, "gate")) return shape_find(op, "z");
    return info->kind == WEFT_ARG_GRAD ? shape_find(op, info->name + 2) : -1;
}

shape_values shape_values_of(const weft_op_info *op, const shape_sizes *s, const weft_arg_info *info)
{
    const char *name = info->name;
    float streams = (float)s->streams;
    if (!strncmp(op->name, "gdn_rule", 8)) { /* keys of about unit length, gates that forget */
        if (!strcmp(name, "key")) return (shape_values){VALUES_NORMAL, 0, 1 / sqrtf((float)s->key_dim)};
        if (!strcmp(name, "beta")) return (shape_values){VALUES_MAGNITUDE, 0, 1 / 3.5f};
        if (!strcmp(name, "g")) return (shape_values){VALUES_MAGNITUDE, 0, -0.3f};
    }
    if (!strcmp(name, "phi")) return (shape_values){VALUES_NORMAL, 0, 1 / sqrtf(streams * (float)s->channels)};
    if (!strcmp(name, "ms")) return (shape_values){VALUES_EXPONENTIAL, 0, 0.5f};
    if (!strcmp(name, "res")) return (shape_values){VALUES_NORMAL, 1 / streams, 1 / streams};
    if (!strcmp(name, "logits")) return (shape_values){VALUES_NORMAL, 0, 2};
    if (!strcmp(name, "alpha") || (strstr(name, "weight") && strncmp(name, "d_", 2)))
        return (shape_values){VALUES_NORMAL, 1, 0.3f};
    return (shape_values){VALUES_NORMAL, 0, 1};
}

double shape_value(shape_values v, double normal)
{
    double x = v.kind == VALUES_MAGNITUDE ? fabs(normal) : normal;
    x = (double)v.center + (double)v.size * x;
    return v.kind == VALUES_EXPONENTIAL ? exp(x) : x;
}
