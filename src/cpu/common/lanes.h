/* SPDX-License-Identifier: Apache-2.0
 *
 * LANES tokens side by side: the small per-token tensors (h, ms, pre, logits ...) with one token per lane, as
 * core/mhc_math.h takes them. The last group of a tile repeats its last token in the lanes that remain. */
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

/* LANES tokens in a row with one value each: ms and its gradient. */
INLINE bool lane_single(const weft_tensor *t, int valid)
{
    return t->ndim == 1 && t->dtype == WEFT_F32 && t->stride[0] == 1 && valid == LANES;
}

#if WEFT_CPU_LEVEL == 2
/* Vectors i and i + d exchange blocks of d lanes. */
INLINE void exchange(vf *m, const int size, const int d)
{
    const vi l = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vi swap = (l & d) != 0; /* lanes that come from the other vector */
    vi low = (swap & (l + 16 - d)) | (~swap & l), high = (swap & (l + 16)) | (~swap & (l + d));
    for (int i = 0; i < size; i++) {
        if (i & d) continue;
        vf a = m[i], b = m[i + d];
        m[i] = (vf)_mm512_permutex2var_ps(a, (__m512i)low, b);
        m[i + d] = (vf)_mm512_permutex2var_ps(a, (__m512i)high, b);
    }
}

/* Transposes 16x16, or with size 8 the two 8x8 halves side by side: lane l of vector k becomes lane k of vector l. The
 * steps are spelt out because gcc leaves a loop over them rolled, and m in memory. */
INLINE void transpose(vf *m, const int size)
{
    if (size == 16) exchange(m, size, 8);
    exchange(m, size, 4);
    exchange(m, size, 2);
    exchange(m, size, 1);
}

/* Values of a token that one transpose takes: 16 tokens of 16, or of 8, two tokens to a vector. */
INLINE __mmask16 block_mask(int64_t left, int size)
{
    return left < size ? (__mmask16)((1u << left) - 1) : (__mmask16)((1u << size) - 1);
}

INLINE void block_load(vf *dst, const float *p, int64_t stride, int valid, int64_t left, const int size)
{
    __mmask16 some = block_mask(left, size);
    vf m[16];
    for (int l = 0; l < 16; l++) {
        const float *row = p + (l < valid ? l : valid - 1) * stride;
        if (l < size)
            m[l] = (vf)_mm512_maskz_loadu_ps(some, row);
        else
            m[l - 8] = (vf)_mm512_insertf32x8(m[l - 8], _mm256_maskz_loadu_ps((__mmask8)some, row), 1);
    }
    transpose(m, size);
    for (int k = 0; k < size; k++)
        if (k < left) dst[k] = m[k];
}

/* Up to 16 or 8 values of 16 tokens, a token to a vector or to half of one: token l in m[l % size], its high half where
 * l >= size. */
INLINE void block_tokens(vf *m, const vf *src, int64_t left, const int size)
{
    for (int k = 0; k < size; k++) m[k] = k < left ? src[k] : vf_set1(0);
    transpose(m, size);
}

INLINE void block_store(float *p, int64_t stride, const vf *src, int valid, int64_t left, const int size)
{
    __mmask16 some = block_mask(left, size);
    vf m[16];
    block_tokens(m, src, left, size);
    for (int l = 0; l < 16; l++) {
        if (l >= valid) break;
        if (l < size)
            _mm512_mask_storeu_ps(p + l * stride, some, m[l]);
        else
            _mm256_mask_storeu_ps(p + l * stride, (__mmask8)some, _mm512_extractf32x8_ps(m[l - 8], 1));
    }
}

INLINE void block_sum(float *sums, const vf *src, int valid, int64_t left, const int size)
{
    __mmask16 some = block_mask(left, size);
    vf m[16], s = (vf)_mm512_maskz_loadu_ps(some, sums);
    block_tokens(m, src, left, size);
    for (int l = 0; l < 16; l++) {
        if (l >= valid) break;
        s = s + (l < size ? m[l] : (vf)_mm512_castps256_ps512(_mm512_extractf32x8_ps(m[l - 8], 1)));
    }
    _mm512_mask_storeu_ps(sums, some, s);
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

INLINE void load_fours(vf *v, const float *src)
{
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    __m512 a = vf_load(src), b = vf_load(src + 16), c = vf_load(src + 32), d = vf_load(src + 48);
    __m512 ab = _mm512_permutex2var_ps(a, even, b), cd = _mm512_permutex2var_ps(c, even, d);
    v[0] = (vf)_mm512_permutex2var_ps(ab, even, cd), v[2] = (vf)_mm512_permutex2var_ps(ab, odd, cd);
    ab = _mm512_permutex2var_ps(a, odd, b), cd = _mm512_permutex2var_ps(c, odd, d);
    v[1] = (vf)_mm512_permutex2var_ps(ab, even, cd), v[3] = (vf)_mm512_permutex2var_ps(ab, odd, cd);
}

INLINE bool lane_fours(const weft_tensor *t, int valid, int64_t count)
{
    return count == 4 && valid == LANES && t->dtype == WEFT_F32 && lane_dense(t) && t->stride[0] == 4;
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
    const float *dense = (const float *)(const void *)at(t, t0);
    if (lane_single(t, valid)) {
        *dst = vf_load(dense);
        return;
    }
#if WEFT_CPU_LEVEL == 2
    if (lane_fours(t, valid, count)) {
        load_fours(dst, dense);
        return;
    }
    for (int64_t left; lane_blocks(t, left = count - first); first += left > 8 ? 16 : 8)
        if (left > 8)
            block_load(dst + first, dense + first, t->stride[0], valid, left, 16);
        else
            block_load(dst + first, dense + first, t->stride[0], valid, left, 8);
#else
    (void)dense;
#endif
    for (int l = 0; l < LANES && first < count; l++) {
        const char *p = at(t, t0 + (l < valid ? l : valid - 1));
        for (int64_t k = first; k < count; k++) d[k * LANES + l] = get_f32(t->dtype, p, lane_offset(t, k));
    }
}

static inline void lanes_store(const weft_tensor *t, bool add, const vf *src, int64_t t0, int valid, int64_t count)
{
    const float *s = (const float *)src;
    int64_t first = 0;
    float *dense = (float *)(void *)at(t, t0);
    if (!add && lane_single(t, valid)) {
        vf_store(dense, *src);
        return;
    }
#if WEFT_CPU_LEVEL == 2
    if (!add && lane_fours(t, valid, count)) {
        store_fours(dense, src);
        return;
    }
    for (int64_t left; !add && lane_blocks(t, left = count - first); first += left > 8 ? 16 : 8)
        if (left > 8)
            block_store(dense + first, t->stride[0], src + first, valid, left, 16);
        else
            block_store(dense + first, t->stride[0], src + first, valid, left, 8);
#endif
    for (int l = 0; l < valid && first < count; l++) {
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
    int64_t first = 0;
#if WEFT_CPU_LEVEL == 2
    for (int64_t left; (left = count - first) > 0; first += left > 8 ? 16 : 8)
        if (left > 8)
            block_sum(sums + first, src + first, valid, left, 16);
        else
            block_sum(sums + first, src + first, valid, left, 8);
#endif
    for (int64_t k = first; k < count; k++) {
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
