/* SPDX-License-Identifier: Apache-2.0
 *
 * Rows of tensors in any dtype and stride, as fp32 in a scratch area. Kernels have a direct path for rows that are
 * contiguous in channels and share one dtype; everything else (the (C,n) layout, fp32 gradients beside bf16 streams,
 * odd strides) goes through a chunk of scratch here and then through the very same loop. */
#ifndef WEFT_CPU_ROWS_H
#define WEFT_CPU_ROWS_H

#include "cpu/common/vec.h"

/* Floats of scratch per tensor and chunk: n streams of chunk_width(n) channels. Small enough for several in L1. */
enum { CHUNK = 2048 };

/* Channels per chunk, a multiple of 16. */
INLINE int64_t chunk_width(int64_t n)
{
    return CHUNK / n / WIDE * WIDE;
}

INLINE char *at(const weft_tensor *t, int64_t token)
{
    return (char *)t->data + token * t->stride[0] * (int64_t)size_of(t->dtype);
}

/* The tensor from token t0 on. */
INLINE weft_tensor from(const weft_tensor *t, int64_t t0)
{
    weft_tensor s = *t;
    if (t->dtype != WEFT_NONE && t->data) s.data = at(t, t0);
    return s;
}

INLINE weft_grad grad_from(const weft_grad *g, int64_t t0)
{
    weft_grad s = *g;
    s.to = from(&g->to, t0);
    return s;
}

INLINE float get_f32(weft_dtype t, const void *p, int64_t i)
{
    if (t == WEFT_F32) return ((const float *)p)[i];
    return t == WEFT_BF16 ? weft_bf16_to_f32(((const uint16_t *)p)[i]) : weft_f16_to_f32(((const uint16_t *)p)[i]);
}

INLINE void put_f32(weft_dtype t, void *p, int64_t i, float v)
{
    if (t == WEFT_F32)
        ((float *)p)[i] = v;
    else
        ((uint16_t *)p)[i] = t == WEFT_BF16 ? weft_f32_to_bf16(v) : weft_f32_to_f16(v);
}

/* One contiguous run of count elements to fp32. */
INLINE void run_load_t(weft_dtype t, float *dst, const void *src, int64_t count)
{
    int64_t c = 0;
    for (; c + LANES <= count; c += LANES) vf_store(dst + c, vf_get(t, src, c));
    for (; c < count; c++) dst[c] = get_f32(t, src, c);
}

static inline void run_load(weft_dtype t, float *dst, const void *src, int64_t count)
{
    if (t == WEFT_F32)
        memcpy(dst, src, (size_t)count * 4);
    else if (t == WEFT_BF16)
        run_load_t(WEFT_BF16, dst, src, count);
    else
        run_load_t(WEFT_F16, dst, src, count);
}

INLINE void run_store_t(weft_dtype t, void *dst, const float *src, int64_t count, bool add)
{
    int64_t c = 0;
    for (; c + LANES <= count; c += LANES) {
        vf v = vf_load(src + c);
        vf_put(t, dst, c, add ? vf_get(t, dst, c) + v : v, false);
    }
    for (; c < count; c++) put_f32(t, dst, c, add ? get_f32(t, dst, c) + src[c] : src[c]);
}

static inline void run_store(weft_dtype t, void *dst, const float *src, int64_t count, bool add)
{
    if (t == WEFT_F32)
        run_store_t(WEFT_F32, dst, src, count, add);
    else if (t == WEFT_BF16)
        run_store_t(WEFT_BF16, dst, src, count, add);
    else
        run_store_t(WEFT_F16, dst, src, count, add);
}

/* Transposes between [count][n] and [n] rows of ld; constants for the stream counts that matter. */
INLINE void split_n(int n, float *dst, int64_t ld, const float *src, int64_t count)
{
    for (int i = 0; i < n; i++)
        for (int64_t c = 0; c < count; c++) dst[i * ld + c] = src[c * n + i];
}

INLINE void merge_n(int n, float *dst, const float *src, int64_t ld, int64_t count)
{
    for (int64_t c = 0; c < count; c++)
        for (int i = 0; i < n; i++) dst[c * n + i] = src[i * ld + c];
}

/* Channels c0 .. c0+count of all streams of one token: dst[i * ld + c]. count <= ld <= chunk_width(n). Channels from
 * count up to the next multiple of 16 become zero, so that sums over whole lanes may read them. */
static inline void rows_load(float *dst, int64_t ld, const weft_tensor *x, int64_t token, int64_t c0, int64_t count)
{
    int n = (int)x->shape[1];
    int64_t size = (int64_t)size_of(x->dtype), ss = x->stride[1], cs = x->stride[2];
    const char *p = at(x, token) + c0 * cs * size;
    int64_t padded = (count + WIDE - 1) / WIDE * WIDE;
    if (cs == 1) {
        for (int i = 0; i < n; i++) run_load(x->dtype, dst + i * ld, p + i * ss * size, count);
    } else if (ss == 1 && cs == n) {
        float flat[CHUNK];
        run_load(x->dtype, flat, p, count * n);
        if (n == 4)
            split_n(4, dst, ld, flat, count);
        else if (n == 2)
            split_n(2, dst, ld, flat, count);
        else
            split_n(n, dst, ld, flat, count);
    } else {
        for (int i = 0; i < n; i++)
            for (int64_t c = 0; c < count; c++) dst[i * ld + c] = get_f32(x->dtype, p, i * ss + c * cs);
    }
    for (int i = 0; i < n && padded <= ld; i++)
        for (int64_t c = count; c < padded; c++) dst[i * ld + c] = 0;
}

/* Where a token's stream i, channel c lies, to prefetch it ahead of rows_load; NULL where a stream is not one run. The
 * requests are spread over the arithmetic in between: a burst of them stalls as the loads themselves would. */
INLINE const char *run_at(const weft_tensor *x, int64_t token, int64_t i, int64_t c)
{
    return x->stride[2] == 1 ? at(x, token) + (i * x->stride[1] + c) * (int64_t)size_of(x->dtype) : NULL;
}

/* Rounds a row of whole lines past the caches. */
static inline void run_stream(weft_dtype t, char *dst, const float *src, int64_t count)
{
    for (int64_t c = 0; c < count; c += line_channels(WEFT_BF16)) {
        vf v[MAX_LINE];
        for (int h = 0; h < MAX_LINE; h++) v[h] = vf_load(src + c + h * LANES);
        if (t == WEFT_BF16)
            line_put(WEFT_BF16, dst, c, v, true);
        else
            for (int h = 0; h < MAX_LINE; h++) vf_put(WEFT_F32, dst, c + h * LANES, v[h], true);
    }
}

static inline void rows_store(const weft_tensor *y, bool add, const float *src, int64_t ld, int64_t token,
                              int64_t c0, int64_t count)
{
    int n = (int)y->shape[1];
    int64_t size = (int64_t)size_of(y->dtype), ss = y->stride[1], cs = y->stride[2];
    char *p = at(y, token) + c0 * cs * size;
    if (cs == 1) {
        for (int i = 0; i < n; i++) run_store(y->dtype, p + i * ss * size, src + i * ld, count, add);
    } else if (ss == 1 && cs == n) {
        float flat[CHUNK];
        if (n == 4)
            merge_n(4, flat, src, ld, count);
        else if (n == 2)
            merge_n(2, flat, src, ld, count);
        else
            merge_n(n, flat, src, ld, count);
        run_store(y->dtype, p, flat, count * n, add);
    } else {
        for (int i = 0; i < n; i++)
            for (int64_t c = 0; c < count; c++) {
                int64_t k = i * ss + c * cs;
                float v = src[i * ld + c];
                put_f32(y->dtype, p, k, add ? get_f32(y->dtype, p, k) + v : v);
            }
    }
}

/* One stream's channels c0 .. c0+count of token (or row) m of a [m, streams, channels] tensor. */
static inline void stream_load(float *dst, const weft_tensor *x, int64_t m, int64_t i, int64_t c0, int64_t count)
{
    int64_t cs = x->stride[2];
    const char *p = at(x, m) + (i * x->stride[1] + c0 * cs) * (int64_t)size_of(x->dtype);
    if (cs == 1)
        run_load(x->dtype, dst, p, count);
    else
        for (int64_t c = 0; c < count; c++) dst[c] = get_f32(x->dtype, p, c * cs);
}

static inline void stream_store(const weft_tensor *x, bool add, const float *src, int64_t m, int64_t i, int64_t c0,
                                int64_t count)
{
    int64_t cs = x->stride[2];
    char *p = at(x, m) + (i * x->stride[1] + c0 * cs) * (int64_t)size_of(x->dtype);
    if (cs == 1)
        run_store(x->dtype, p, src, count, add);
    else
        for (int64_t c = 0; c < count; c++)
            put_f32(x->dtype, p, c * cs, add ? get_f32(x->dtype, p, c * cs) + src[c] : src[c]);
}

/* The same for [tokens, channels] tensors and for [channels] parameters (token 0 of a view with one row). */
static inline void row_load(float *dst, const weft_tensor *u, int64_t token, int64_t c0, int64_t count)
{
    int64_t size = (int64_t)size_of(u->dtype), cs = u->stride[1];
    const char *p = at(u, token) + c0 * cs * size;
    if (cs == 1)
        run_load(u->dtype, dst, p, count);
    else
        for (int64_t c = 0; c < count; c++) dst[c] = get_f32(u->dtype, p, c * cs);
    for (int64_t c = count; c % WIDE; c++) dst[c] = 0;
}

static inline void row_store(const weft_tensor *u, bool add, const float *src, int64_t token, int64_t c0,
                             int64_t count)
{
    int64_t size = (int64_t)size_of(u->dtype), cs = u->stride[1];
    char *p = at(u, token) + c0 * cs * size;
    if (cs == 1)
        run_store(u->dtype, p, src, count, add);
    else
        for (int64_t c = 0; c < count; c++)
            put_f32(u->dtype, p, c * cs, add ? get_f32(u->dtype, p, c * cs) + src[c] : src[c]);
}

/* A [channels] vector seen as [1, channels]. */
INLINE weft_tensor as_row(const weft_tensor *w)
{
    weft_tensor r = *w;
    r.ndim = 2;
    r.shape[0] = 1, r.shape[1] = w->shape[0];
    r.stride[0] = 0, r.stride[1] = w->stride[0];
    return r;
}

/* A whole vector parameter as fp32; absent: `fill`. Padded to a multiple of 16 with zeros. */
static inline void vector_load(float *dst, const weft_tensor *w, int64_t count, float fill)
{
    if (weft_has(w)) {
        weft_tensor r = as_row(w);
        row_load(dst, &r, 0, 0, count);
    } else {
        for (int64_t c = 0; c < count; c++) dst[c] = fill;
        for (int64_t c = count; c % WIDE; c++) dst[c] = 0;
    }
}

/* The few coefficients of a token: pre or post [n], res [n, n], h [rows]. */
INLINE void coef_load(float *dst, const weft_tensor *t, int64_t token)
{
    const char *p = at(t, token);
    if (t->ndim == 2) {
        for (int64_t i = 0; i < t->shape[1]; i++) dst[i] = get_f32(t->dtype, p, i * t->stride[1]);
        return;
    }
    for (int64_t a = 0; a < t->shape[1]; a++)
        for (int64_t b = 0; b < t->shape[2]; b++)
            dst[a * t->shape[2] + b] = get_f32(t->dtype, p, a * t->stride[1] + b * t->stride[2]);
}

INLINE void coef_put(const weft_tensor *t, bool add, int64_t token, int64_t k, float v)
{
    char *p = at(t, token);
    put_f32(t->dtype, p, k, add ? get_f32(t->dtype, p, k) + v : v);
}

INLINE void coef_store(const weft_tensor *t, bool add, const float *src, int64_t token)
{
    if (t->ndim == 2) {
        for (int64_t i = 0; i < t->shape[1]; i++) coef_put(t, add, token, i * t->stride[1], src[i]);
        return;
    }
    for (int64_t a = 0; a < t->shape[1]; a++)
        for (int64_t b = 0; b < t->shape[2]; b++)
            coef_put(t, add, token, a * t->stride[1] + b * t->stride[2], src[a * t->shape[2] + b]);
}

/* ---- paths -------------------------------------------------------------------------------------------------------- */

/* Can a kernel read or write these streams (this row) where they are: contiguous in channels, of dtype t, in whole lines?
 * Absent tensors do not object. f16 is rare enough to take the way through scratch. */
INLINE bool row_direct(const weft_tensor *u, weft_dtype t)
{
    int last = u->ndim - 1;
    return !weft_has(u) ||
           (u->dtype == t && t != WEFT_F16 && u->stride[last] == 1 && u->shape[last] % line_channels(t) == 0);
}

/* Should an output be written past the caches? Large ones, which would not be read back from there, unless their pages are
 * fresh. */
INLINE bool stream_pays(const weft_call *call, const weft_tensor *out, int64_t elements)
{
    int64_t bytes = elements * (int64_t)size_of(out->dtype);
    return !call->query && weft_has(out) && bytes >= WEFT_LARGE_BYTES &&
           weft_pages_present(out->data, (size_t)bytes);
}

/* Is an output dense, untouched and too large for huge pages? Then each tile has its pages handed out by rows_fill. */
INLINE bool fill_pays(const weft_call *call, const weft_tensor *out, int64_t elements)
{
    int64_t bytes = elements * (int64_t)size_of(out->dtype);
    return !call->query && weft_has(out) && bytes > WEFT_HUGE_BYTES && out->stride[0] * call->tokens == elements &&
           !weft_pages_present(out->data, (size_t)bytes);
}

INLINE void rows_fill(const weft_tensor *out, int64_t t0, int64_t t1)
{
    weft_pages_fill(at(out, t0), (size_t)(at(out, t1) - at(out, t0)));
}

/* May rows be stored past the caches? Only where they begin on cache lines. */
INLINE bool aligned(const void *p, int64_t stride_elements, weft_dtype t)
{
    return line_streams(t) && ((uintptr_t)p | (uintptr_t)(stride_elements * (int64_t)size_of(t))) % 64 == 0;
}

#endif
