/* SPDX-License-Identifier: Apache-2.0
 *
 * One argument of a random call, from its description in weft/ops.h: sizes, dtype, strides, typical values, and what it
 * cannot do without. The only place that knows what the symbols of the description stand for. */
#ifndef WEFT_CHECK_SHAPE_H
#define WEFT_CHECK_SHAPE_H

#include <weft/ops.h>

/* What the symbols of weft_arg_dim stand for. */
typedef struct shape_sizes {
    int64_t tokens, streams, channels, rows;
    int64_t scales; /* 2 without a residual mix; 0: 3 */
    int64_t batch, steps, sequences, cache, key_heads, value_heads, heads, key_dim, value_dim, width, history;
} shape_sizes;

typedef struct shape_types {
    weft_dtype act, wide, coef, param, index;
} shape_types;

typedef enum layout {
    LAYOUT_NC = 0, /* dense, streams outside channels */
    LAYOUT_CN,     /* dense, channels outside streams; steps outside the batch */
    LAYOUT_LOOSE,  /* no stride is 1 and every dimension has a gap */
    LAYOUT_COUNT
} layout;

int64_t shape_dim(const shape_sizes *sizes, int32_t dim);
/* WEFT_TYPE_FULL is f32; everything but an index is f64 where act is. */
weft_dtype shape_dtype(const shape_types *types, weft_arg_type type);
/* Without data. pad: unused elements behind the row of each token, or of what else is outermost. */
weft_tensor shape_tensor(const shape_sizes *sizes, const weft_arg_info *info, weft_dtype dtype, layout order,
                         int64_t pad);

/* The argument without which argument i makes no sense, such as the tensor of a gradient; -1: none. */
int shape_partner(const weft_op_info *op, int i);
int shape_find(const weft_op_info *op, const char *name);
/* 1 where an argument is n x n numbers of a token, which independent hyper-connections do not have. */
int shape_is_mix(const weft_arg_info *info);
/* Rows of the projection of a site with so many scales. */
int64_t shape_gates(int64_t streams, int64_t scales);

/* Values of the size that they have in a network, as a function of a normal number. */
typedef struct shape_values {
    enum { VALUES_NORMAL = 0, VALUES_MAGNITUDE, VALUES_EXPONENTIAL } kind; /* of n, |n|, e^n */
    float center, size;
} shape_values;

/* For an argument whose name says nothing: N(0, 1). */
shape_values shape_values_of(const weft_op_info *op, const shape_sizes *sizes, const weft_arg_info *info);
double shape_value(shape_values values, double normal);

#endif
