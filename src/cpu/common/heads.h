/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows of [B, S, heads, dim] and [B, S, heads] tensors, by token counted through all sequences. */
#ifndef WEFT_CPU_HEADS_H
#define WEFT_CPU_HEADS_H

#include "core/sequences.h"
#include "cpu/common/tiles.h"

INLINE char *token_at(const weft_sequences *s, const weft_tensor *x, int64_t t)
{
    return (char *)x->data + weft_token_offset(s, x, t) * (int64_t)size_of(x->dtype);
}

/* One head of a token, or its row of gates (h = 0, dim = heads): stride and place differ. */
INLINE char *head_of(const weft_tensor *x, char *token, int64_t h)
{
    return token + h * x->stride[2] * (int64_t)size_of(x->dtype);
}

INLINE int64_t last_stride(const weft_tensor *x)
{
    return x->stride[x->ndim - 1];
}

static inline void head_load(float *dst, const weft_tensor *x, const char *head, int64_t dim)
{
    int64_t step = last_stride(x);
    if (step == 1)
        run_load(x->dtype, dst, head, dim);
    else
        for (int64_t d = 0; d < dim; d++) dst[d] = get_f32(x->dtype, head, d * step);
    for (int64_t d = dim; d % WIDE; d++) dst[d] = 0;
}

static inline void head_store(const weft_tensor *x, bool add, char *head, const float *src, int64_t dim)
{
    int64_t step = last_stride(x);
    if (step == 1)
        run_store(x->dtype, head, src, dim, add);
    else
        for (int64_t d = 0; d < dim; d++)
            put_f32(x->dtype, head, d * step, add ? get_f32(x->dtype, head, d * step) + src[d] : src[d]);
}

#endif
