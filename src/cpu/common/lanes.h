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

#if WEFT_CPU_LEVEL == 2
/* Lane l of vector k becomes lane k of vector l, in four exchanges of halves, quarters and so on. */
INLINE void transpose16(vf *m)
{
    for (int d = 8; d >= 1; d /= 2) {
        vi l = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        vi swap = (l & d) != 0; /* lanes that come from the other vector */
        vi low = (swap & (l + 16 - d)) | (~swap & l), high = (swap & (l + 16)) | (~swap & (l + d));
        for (int i = 0; i < 16; i++) {
            if (i & d) continue;
            vf a = m[i], b = m[i + d];
            m[i] = (vf)_mm512_permutex2var_ps(a, (__m512i)low, b);
            m[i + d] = (vf)_mm512_permutex2var_ps(a, (__m512i)high, b);
        }
    }
}

/* Four values of 16 tokens to 64 floats in a row, token by token: what pre and post of four streams look like. */
INLINE void store_fours(float *dst, const vf *v)
{
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
    __m512 a = _mm512_permutex2var_ps(v[0], low, v[2]), b = _mm512_permutex2var_ps(v[0], high, v[2]);
    __m512 c = _mm512_permutex2var_ps(v[1], low, v[3]), d = _mm512_permutex2var_ps(v[1], high, v[3]);
    vf_store(dst, (vf)_mm512_permutex2var_ps(a, low, c));
    vf_store(dst + 16, (vf)_mm512_permutex2var_ps(a, high, c));
    vf_store(dst + 32, (vf)_mm512_permutex2var_ps(b, low, d));
    vf_store(dst + 48, (vf)_mm512_permutex2var_ps(b, high, d));
}

/* Do the values left of a token make a block worth transposing? */
INLINE bool lane_blocks(const weft_tensor *t, int64_t left)
{
    return left >= 4 && t->dtype == WEFT_F32 && lane_dense(t);
}
#endif

/* dst[k] lane l = value k of token t0 + min(l, valid - 1), for k < count. */
static inline void lanes_load(vf *dst, const weft_tensor *t, int64_t t0, int valid, int64_t count)
{
    float *d = (float *)dst;
    int64_t first = 0;
#if WEFT_CPU_LEVEL == 2
    for (; lane_blocks(t, count - first); first += 16) {
        vf m[16];
        int part = count - first < 16 ? (int)(count - first) : 16;
        for (int l = 0; l < 16; l++)
            m[l] = (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << part) - 1),
                                             (const float *)(const void *)at(t, t0 + (l < valid ? l : valid - 1)) +
                                                 first);
        transpose16(m);
        for (int k = 0; k < part; k++) dst[first + k] = m[k];
    }
#endif
    for (int l = 0; l < LANES; l++) {
        const char *p = at(t, t0 + (l < valid ? l : valid - 1));
        for (int64_t k = first; k < count; k++) d[k * LANES + l] = get_f32(t->dtype, p, lane_offset(t, k));
    }
}

static inline void lanes_store(const weft_tensor *t, bool add, const vf *src, int64_t t0, int valid, int64_t count)
{
    const float *s = (const float *)src;
    int64_t first = 0;
#if WEFT_CPU_LEVEL == 2
    if (!add && count == 4 && valid == LANES && lane_blocks(t, count) && t->stride[0] == 4) {
        store_fours((float *)(void *)at(t, t0), src);
        return;
    }
    for (; !add && lane_blocks(t, count - first); first += 16) {
        vf m[16];
        int part = count - first < 16 ? (int)(count - first) : 16;
        for (int k = 0; k < 16; k++) m[k] = k < part ? src[first + k] : vf_set1(0);
        transpose16(m);
        for (int l = 0; l < valid; l++)
            _mm512_mask_storeu_ps((float *)(void *)at(t, t0 + l) + first, (__mmask16)((1u << part) - 1), m[l]);
    }
#endif
    for (int l = 0; l < valid; l++) {
        char *p = at(t, t0 + l);
        for (int64_t k = first; k < count; k++) {
            int64_t o = lane_offset(t, k);
            float v = s[k * LANES + l];
            put_f32(t->dtype, p, o, add ? get_f32(t->dtype, p, o) + v : v);
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
