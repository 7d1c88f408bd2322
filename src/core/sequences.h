/* SPDX-License-Identifier: Apache-2.0
 *
 * Sequences of weft/gdn.h in host memory: dense ones have computed offsets, packed ones those of cu_seqlens. Tokens are
 * counted through all of them, sequence by sequence, so that both are the same to a kernel. */
#ifndef WEFT_CORE_SEQUENCES_H
#define WEFT_CORE_SEQUENCES_H

#include "core/kernel.h"

static inline int64_t weft_index_at(const weft_tensor *t, int64_t i)
{
    int64_t at = i * t->stride[0];
    return t->dtype == WEFT_I32 ? ((const int32_t *)t->data)[at] : ((const int64_t *)t->data)[at];
}

typedef struct weft_sequences {
    const weft_tensor *cu; /* NULL: dense */
    int64_t count, steps, tokens;
} weft_sequences;

static inline weft_sequences weft_sequences_of(const weft_call *call, const weft_tensor *cu_seqlens)
{
    weft_sequences s = {NULL, call->batch, call->steps, call->batch * call->steps};
    if (weft_has(cu_seqlens)) {
        s.cu = cu_seqlens;
        s.count = call->sequences;
    }
    return s;
}

/* First token of sequence n; of n = count, the end of the last one. */
static inline int64_t weft_sequence_start(const weft_sequences *s, int64_t n)
{
    return s->cu ? weft_index_at(s->cu, n) : n * s->steps;
}

/* The sequence that token t belongs to; count where it is padding behind the last one. */
static inline int64_t weft_sequence_of(const weft_sequences *s, int64_t t)
{
    if (!s->cu) return s->steps > 0 ? t / s->steps : s->count;
    int64_t low = 0, high = s->count; /* the first n that ends behind t */
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (weft_sequence_start(s, middle + 1) > t)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* Offset of token t in a tensor [B, S, ...], in elements. */
static inline int64_t weft_token_offset(const weft_sequences *s, const weft_tensor *x, int64_t t)
{
    if (s->cu) return t * x->stride[1];
    return t / s->steps * x->stride[0] + t % s->steps * x->stride[1];
}

#endif
