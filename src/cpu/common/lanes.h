/* SPDX-License-Identifier: Apache-2.0
 *
 * LANES tokens side by side: the small per-token tensors (h, ms, pre, logits ...) with one token per lane, as
 * core/mhc_math.h wants them. The last group of a tile repeats its last token in the lanes that are left over. */
#ifndef WEFT_CPU_LANES_H
#define WEFT_CPU_LANES_H

#include "cpu/common/rows.h"

/* Element k of a token's vector or matrix, as an offset in elements. */
INLINE int64_t lane_offset(const weft_tensor *t, int64_t k)
{
    if (t->ndim == 1) return 0;
    if (t->ndim == 2) return k * t->stride[1];
    return k / t->shape[2] * t->stride[1] + k % t->shape[2] * t->stride[2];
}

/* A token's values lie one after the other? */
INLINE bool lane_dense(const weft_tensor *t)
{
    return t->ndim == 1 || (t->stride[t->ndim - 1] == 1 && (t->ndim == 2 || t->stride[1] == t->shape[2]));
}

/* dst[k] lane l = value k of token t0 + min(l, valid - 1), for k < count. */
static inline void lanes_load(vf *dst, const weft_tensor *t, int64_t t0, int valid, int64_t count)
{
    float *d = (float *)dst;
    for (int l = 0; l < LANES; l++) {
        const char *p = at(t, t0 + (l < valid ? l : valid - 1));
        if (t->dtype == WEFT_F32 && lane_dense(t)) {
            float row[64];
            for (int64_t k = 0; k < count; k += 64) {
                int64_t part = count - k < 64 ? count - k : 64;
                memcpy(row, p + k * 4, (size_t)part * 4);
                for (int64_t i = 0; i < part; i++) d[(k + i) * LANES + l] = row[i];
            }
        } else {
            for (int64_t k = 0; k < count; k++) d[k * LANES + l] = get_f32(t->dtype, p, lane_offset(t, k));
        }
    }
}

static inline void lanes_store(const weft_tensor *t, bool add, const vf *src, int64_t t0, int valid, int64_t count)
{
    const float *s = (const float *)src;
    for (int l = 0; l < valid; l++) {
        char *p = at(t, t0 + l);
        if (t->dtype == WEFT_F32 && lane_dense(t) && !add) {
            for (int64_t k = 0; k < count; k++) memcpy(p + k * 4, &s[k * LANES + l], 4);
        } else {
            for (int64_t k = 0; k < count; k++) {
                int64_t o = lane_offset(t, k);
                float v = s[k * LANES + l];
                put_f32(t->dtype, p, o, add ? get_f32(t->dtype, p, o) + v : v);
            }
        }
    }
}

/* sums[k] += the values of the valid lanes, token after token. */
static inline void lanes_sum(float *sums, const vf *src, int valid, int64_t count)
{
    const float *s = (const float *)src;
    for (int64_t k = 0; k < count; k++) {
        float t = sums[k];
        for (int l = 0; l < valid; l++) t += s[k * LANES + l];
        sums[k] = t;
    }
}

INLINE void lanes_zero(vf *dst, int64_t count)
{
    for (int64_t k = 0; k < count; k++) dst[k] = vf_set1(0);
}

#endif
