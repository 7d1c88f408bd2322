/* SPDX-License-Identifier: Apache-2.0
 *
 * The small tensors, in and out of registers: what a token has of h, pre, post, logits, res and their gradients. */
#ifndef WEFT_CUDA_TOKEN_ROWS_CUH
#define WEFT_CUDA_TOKEN_ROWS_CUH

#include "cuda/common/vec.cuh"

/* [T, k] or [T, n, n]. wide: f32, a token's values side by side and aligned, so that they move 16 bytes at a time (8
 * where there are only two). */
struct token_rows {
    view v;
    int32_t wide;
};

static inline token_rows rows_of(const weft_tensor *t, int add = 0)
{
    token_rows r = {view_of(t, add), 0};
    if (!weft_has(t)) return r;
    int64_t count = t->ndim == 2 ? t->shape[1] : t->shape[1] * t->shape[2];
    int64_t odd = count % 4 == 0 ? 15 : count % 2 == 0 ? 7 : 3; /* bits of an address that is not aligned */
    bool dense = t->ndim == 2 ? t->stride[1] == 1 : t->stride[2] == 1 && t->stride[1] == t->shape[2];
    r.wide = t->dtype == WEFT_F32 && dense && ((uintptr_t)t->data & (uintptr_t)odd) == 0 &&
             (t->shape[0] <= 1 || (t->stride[0] * 4 & odd) == 0);
    return r;
}

static inline token_rows rows_of(const weft_grad *g)
{
    return rows_of(&g->to, g->add);
}

/* The k-th of M values, in lines of LINE: M for vectors, n for matrices. */
template <int M, int LINE> static __device__ __forceinline__ int64_t offset_of(const view &v, int k)
{
    return LINE == M ? k * v.stride[1] : k / LINE * v.stride[1] + k % LINE * v.stride[2];
}

template <class T, int M, int LINE>
static __device__ __forceinline__ void load_loose(float *to, const view &v, int64_t base)
{
#pragma unroll
    for (int k = 0; k < M; k++) to[k] = widen(((const T *)v.data)[base + offset_of<M, LINE>(v, k)]);
}

template <class T, int M, int LINE>
static __device__ __forceinline__ void store_loose(const view &v, int64_t base, const float *from)
{
#pragma unroll
    for (int k = 0; k < M; k++) ((T *)v.data)[base + offset_of<M, LINE>(v, k)] = narrow<T>(from[k]);
}

/* M values of a token from the `first` on; a matrix always as a whole. */
template <int M, int LINE = M>
static __device__ __forceinline__ void load_row(float *to, const token_rows &r, int64_t token, int first = 0)
{
    const view &v = r.v;
    if (r.wide) {
        const float *p = (const float *)v.data + token * v.stride[0] + first;
        if constexpr (M % 4 == 0) {
#pragma unroll
            for (int k = 0; k < M; k += 4) {
                float4 q = *(const float4 *)(p + k);
                to[k] = q.x, to[k + 1] = q.y, to[k + 2] = q.z, to[k + 3] = q.w;
            }
        } else {
            static_assert(M == 2, "two, or a multiple of four");
            float2 q = *(const float2 *)p;
            to[0] = q.x, to[1] = q.y;
        }
        return;
    }
    const int64_t base = token * v.stride[0] + first * v.stride[1];
    if (v.dtype == WEFT_F32)
        load_loose<float, M, LINE>(to, v, base);
    else if (v.dtype == WEFT_BF16)
        load_loose<bf16, M, LINE>(to, v, base);
    else
        load_loose<f16, M, LINE>(to, v, base);
}

/* from is changed where it is added to what is there. */
template <int M, int LINE = M>
static __device__ __forceinline__ void store_row(const token_rows &r, int64_t token, float *from, int first = 0)
{
    const view &v = r.v;
    if (v.add) {
        float old[M];
        load_row<M, LINE>(old, r, token, first);
#pragma unroll
        for (int k = 0; k < M; k++) from[k] = old[k] + from[k];
    }
    if (r.wide) {
        float *p = (float *)v.data + token * v.stride[0] + first;
        if constexpr (M % 4 == 0) {
#pragma unroll
            for (int k = 0; k < M; k += 4)
                *(float4 *)(p + k) = make_float4(from[k], from[k + 1], from[k + 2], from[k + 3]);
        } else {
            *(float2 *)p = make_float2(from[0], from[1]);
        }
        return;
    }
    const int64_t base = token * v.stride[0] + first * v.stride[1];
    if (v.dtype == WEFT_F32)
        store_loose<float, M, LINE>(v, base, from);
    else if (v.dtype == WEFT_BF16)
        store_loose<bf16, M, LINE>(v, base, from);
    else
        store_loose<f16, M, LINE>(v, base, from);
}

/* Element k of a token's matrix. */
static __device__ __forceinline__ int64_t matrix_at(const view &v, int64_t token, int n, int k)
{
    return token * v.stride[0] + k / n * v.stride[1] + k % n * v.stride[2];
}

#endif
