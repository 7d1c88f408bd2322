/* SPDX-License-Identifier: Apache-2.0
 *
 * Elements of [B, S, heads, dim] and [B, S, heads] tensors by token, and which heads belong together [G2]. */
#ifndef WEFT_REF_GDN_H
#define WEFT_REF_GDN_H

#include "core/sequences.h"
#include "ref/common.h"

static inline int64_t offset_of_head(const weft_sequences *s, const weft_tensor *x, int64_t t, int64_t h, int64_t d)
{
    return weft_token_offset(s, x, t) + h * x->stride[2] + (x->ndim == 4 ? d * x->stride[3] : 0);
}

/* Absent: zero. */
static inline double get_head(const weft_sequences *s, const weft_tensor *x, int64_t t, int64_t h, int64_t d)
{
    return weft_has(x) ? load_at(x, offset_of_head(s, x, t, h, d)) : 0.0;
}

static inline void put_head(const weft_sequences *s, const weft_tensor *x, int64_t t, int64_t h, int64_t d,
                            double value)
{
    if (weft_has(x)) store_at(x, offset_of_head(s, x, t, h, d), value);
}

static inline void put_grad_head(const weft_sequences *s, const weft_grad *g, int64_t t, int64_t h, int64_t d,
                                 double value)
{
    if (weft_has(&g->to)) grad_at(g, offset_of_head(s, &g->to, t, h, d), value);
}

/* A token's row of zeros. */
static inline void put_zero_row(const weft_sequences *s, const weft_tensor *x, int64_t t)
{
    if (!weft_has(x)) return;
    for (int64_t h = 0; h < x->shape[2]; h++)
        for (int64_t d = 0; d < (x->ndim == 4 ? x->shape[3] : 1); d++) put_head(s, x, t, h, d, 0);
}

static inline void put_grad_zero_row(const weft_sequences *s, const weft_grad *g, int64_t t)
{
    if (!g->add) put_zero_row(s, &g->to, t);
}

/* The key head that head h of `heads` reads; heads may be the key heads themselves. */
static inline int64_t key_head_of(weft_gdn_head_map map, int64_t h, int64_t heads, int64_t key_heads)
{
    return map == WEFT_GDN_TILED ? h % key_heads : h / (heads / key_heads);
}

#endif
