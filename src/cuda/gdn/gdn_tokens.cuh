/* SPDX-License-Identifier: Apache-2.0
 *
 * Tokens of Gated DeltaNet, dense or packed: where their rows are, which sequence they belong to, and walks over them. */
#ifndef WEFT_CUDA_GDN_TOKENS_CUH
#define WEFT_CUDA_GDN_TOKENS_CUH

#include <stdio.h>

#include "core/status.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/vec.cuh"

/* ---- tensors of four dimensions ------------------------------------------------------------------------------------ */

/* [B, S, H, D] or [B, S, H] as a kernel gets it. */
struct rows {
    char *data;
    weft_dtype dtype; /* WEFT_NONE: absent */
    int32_t add;
    int64_t batch, step, head, channel; /* strides in elements */
};

static inline rows rows_of(const weft_tensor *t, int add = 0)
{
    return {
        (char *)t->data, t->dtype, add, t->stride[0], t->stride[1], t->stride[2], t->ndim > 3 ? t->stride[3] : 0};
}

static inline rows rows_of(const weft_grad *g)
{
    return rows_of(&g->to, g->add);
}

static __host__ __device__ __forceinline__ bool has(const rows &r)
{
    return r.dtype != WEFT_NONE;
}

/* Whether all rows can be read `vec` channels at a time, by strides and address. */
static inline bool reads_wide(const weft_tensor *t, int64_t vec)
{
    if (!weft_has(t)) return true;
    const int64_t bytes = vec * (int64_t)weft_dtype_size(t->dtype), unit = bytes < 16 ? bytes : 16;
    if (t->stride[3] != 1 || (uintptr_t)t->data % (uintptr_t)unit) return false;
    for (int d = 0; d < 3; d++)
        if (t->shape[d] > 1 && t->stride[d] * (int64_t)weft_dtype_size(t->dtype) % unit) return false;
    return t->shape[3] % vec == 0;
}

static __device__ __forceinline__ float get(const rows &r, int64_t i)
{
    return get(view{r.data, r.dtype, 0, {0, 0, 0}}, i);
}

static __device__ __forceinline__ void put(const rows &r, int64_t i, float v)
{
    put(view{r.data, r.dtype, r.add, {0, 0, 0}}, i, v);
}

/* ---- sequences --------------------------------------------------------------------------------------------------------- */

struct sequences {
    const void *cu; /* NULL: dense */
    bool wide;      /* cu is int64 */
    int64_t stride, count, steps, tokens;
};

static inline sequences sequences_of(const weft_call *call, const weft_tensor *cu)
{
    sequences s = {NULL, false, 0, call->batch, call->steps, call->batch * call->steps};
    if (!weft_has(cu)) return s;
    s.cu = cu->data, s.wide = cu->dtype == WEFT_I64, s.stride = cu->stride[0], s.count = call->sequences;
    return s;
}

/* First token of sequence n. What the device finds in cu is not checked: the first offset counts as 0, so that every token
 * belongs to a sequence or lies behind the last, and the others are clamped into the tokens there are. */
static __device__ __forceinline__ int64_t start_of(const sequences &s, int64_t n)
{
    if (!s.cu || n == 0) return n * s.steps;
    const int64_t at = s.wide ? ((const int64_t *)s.cu)[n * s.stride] : ((const int32_t *)s.cu)[n * s.stride];
    return at < 0 ? 0 : at > s.tokens ? s.tokens : at;
}

#ifndef NDEBUG
/* Says what start_of takes silently. */
static __global__ void report_offsets(const sequences s)
{
    const int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n > s.count) return;
    auto at = [&](int64_t i) {
        return s.wide ? ((const int64_t *)s.cu)[i * s.stride] : (int64_t)((const int32_t *)s.cu)[i * s.stride];
    };
    const int64_t low = n ? at(n - 1) : 0, high = n ? s.tokens : 0;
    if (at(n) < low || at(n) > high)
        printf("weft: cu_seqlens[%lld]: expected %lld to %lld, got %lld\n", (long long)n, (long long)low,
               (long long)high, (long long)at(n));
}
#endif

/* Debug builds print offsets that decrease or pass the end, from the device, when the stream comes to it. */
static inline weft_status look_at_offsets(const weft_call *call, const sequences &s)
{
#ifndef NDEBUG
    if (s.cu)
        return launch(call, "offsets", report_offsets, {.grid = grid_of((s.count + 128) / 128), .block = 128}, s);
#endif
    (void)call, (void)s;
    return WEFT_OK;
}

/* The sequence of token t, or count after the last one. All lanes ask for the same token and search together. */
static __device__ __forceinline__ int64_t sequence_of(const sequences &s, int64_t t)
{
    if (!s.cu) return s.steps > 0 ? t / s.steps : s.count;
    int64_t low = 0, high = s.count; /* the first that ends behind t */
    while (low < high) {
        const int64_t step = (high - low + 31) / 32;
        int64_t probe = low + ((threadIdx.x & 31) + 1) * step - 1;
        if (probe > high - 1) probe = high - 1;
        const unsigned behind = __ballot_sync(0xffffffffu, start_of(s, probe + 1) > t);
        if (!behind) return high;
        const int first = __ffs(behind) - 1;
        const int64_t found = __shfl_sync(0xffffffffu, probe, first);
        const int64_t before = __shfl_sync(0xffffffffu, probe, first ? first - 1 : 0);
        if (first) low = before + 1;
        high = found;
    }
    return low;
}

/* Where a walk is: the sequence and its bounds. */
struct place {
    int64_t n, start, end;
};

static __device__ __forceinline__ place place_of(const sequences &s, int64_t t)
{
    place p;
    p.n = sequence_of(s, t);
    if (p.n < s.count) {
        p.start = start_of(s, p.n), p.end = start_of(s, p.n + 1);
        if (p.start > t) p.start = t;
    } else {
        p.start = t, p.end = s.tokens;
    }
    return p;
}

/* The sequence that begins at t, the end of the one before. */
static __device__ __forceinline__ void next_sequence(const sequences &s, place &p, int64_t t)
{
    do {
        p.n++;
        p.end = p.n < s.count ? start_of(s, p.n + 1) : s.tokens;
    } while (p.n < s.count && p.end <= t);
    p.start = t;
}

/* A token of dense sequences as (b, s); of packed ones as (0, t). */
struct token {
    int64_t b, s;
};

static __device__ __forceinline__ token token_at(const sequences &q, int64_t t)
{
    if (q.cu || q.steps == 0) return {0, t};
    const int64_t b = t / q.steps;
    return {b, t - b * q.steps};
}

static __device__ __forceinline__ void advance(token &t, const sequences &q)
{
    if (++t.s == q.steps && !q.cu) t.s = 0, t.b++;
}

static __device__ __forceinline__ void retreat(token &t, const sequences &q)
{
    if (--t.s < 0 && !q.cu) t.s = q.steps - 1, t.b--;
}

static __device__ __forceinline__ int64_t offset_of(const rows &r, const token &t)
{
    return t.b * r.batch + t.s * r.step;
}

/* Of a token of the sequence in which a walk is. */
static __device__ __forceinline__ int64_t offset_in(const rows &r, const sequences &q, const place &p, int64_t t)
{
    return q.cu ? t * r.step : p.n * r.batch + (t - p.start) * r.step;
}

/* Tokens from t on, up to `to` or the end of a dense sequence: their rows are a stride apart. `there` of them lie before `end`,
 * behind which there is nothing. */
struct run {
    token at;
    int count, there;
};

static __device__ __forceinline__ run run_at(const sequences &q, int64_t t, int64_t to, int64_t end)
{
    run r;
    r.at = token_at(q, t);
    const int64_t stop = q.cu || to - t < q.steps - r.at.s ? to : t + q.steps - r.at.s;
    r.count = (int)(stop - t), r.there = end >= stop ? r.count : end < t ? 0 : (int)(end - t);
    return r;
}

/* The end of the last sequence. */
static __device__ __forceinline__ int64_t end_of(const sequences &q)
{
    return q.cu ? start_of(q, q.count) : q.tokens;
}

#endif
