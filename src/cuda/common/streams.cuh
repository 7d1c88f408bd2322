/* SPDX-License-Identifier: Apache-2.0
 *
 * The streams of one token between memory and registers. A thread works on W neighbouring channels of all N streams at
 * once, x[N][W]; what differs between the layouts is where these lie:
 *     (n,C)  N pieces of W elements, one stream apart; W fills 16 bytes
 *     (C,n)  one piece of W*N elements, W the smallest that fills 16 bytes
 * Either way neighbouring threads touch neighbouring memory. Anything else (odd C, loose strides, other n) is served by
 * kernels that go element by element through `view`. */
#ifndef WEFT_CUDA_STREAMS_CUH
#define WEFT_CUDA_STREAMS_CUH

#include "cuda/common/vec.cuh"

enum stream_layout { LAYOUT_NC = 0, LAYOUT_CN, LAYOUT_ANY };

/* Channels a thread works on at a time. */
template <class T, int N, stream_layout L> struct stream_tile {
    static constexpr int vector = number<T>::per_vector;
    static constexpr int width = L == LAYOUT_NC ? vector : vector > N ? vector / N : 1;
};

/* ---- host: which layout do these tensors share? ------------------------------------------------------------------- */

static inline bool aligned_to(const weft_tensor *t, int64_t elements)
{
    int64_t bytes = elements * (int64_t)weft_dtype_size(t->dtype);
    return bytes < 16 ? (uintptr_t)t->data % (uintptr_t)bytes == 0 : (uintptr_t)t->data % 16 == 0;
}

/* [tokens, channels] rows that can be read `width` elements at a time. Absent tensors fit anything. */
static inline bool row_fits(const weft_tensor *t, int64_t width)
{
    if (!weft_has(t)) return true;
    return (t->stride[1] == 1 || t->shape[1] == 1) && t->shape[1] % width == 0 &&
           (t->stride[0] % width == 0 || t->shape[0] == 1) && aligned_to(t, width);
}

/* A vector over the channels. */
static inline bool vector_fits(const weft_tensor *t, int64_t width)
{
    return !weft_has(t) ||
           ((t->stride[0] == 1 || t->shape[0] == 1) && t->shape[0] % width == 0 && aligned_to(t, width));
}

static inline bool streams_fit(const weft_tensor *t, stream_layout layout, int64_t width)
{
    if (!weft_has(t)) return true;
    int64_t n = t->shape[1], channels = t->shape[2];
    if (channels % width) return false;
    if (layout == LAYOUT_NC)
        return t->stride[2] == 1 && (t->stride[1] % width == 0 || n == 1) &&
               (t->stride[0] % width == 0 || t->shape[0] == 1) && aligned_to(t, width);
    return t->stride[1] == 1 && t->stride[2] == n && (t->stride[0] % (n * width) == 0 || t->shape[0] == 1) &&
           aligned_to(t, n * width);
}

/* ---- device --------------------------------------------------------------------------------------------------------- */

template <class T, int N, int W, stream_layout L>
static __device__ __forceinline__ void load_streams(float (&x)[N][W], const T *row, int64_t stream, int64_t c)
{
    if constexpr (L == LAYOUT_NC) {
        raw<T, W> r[N];
#pragma unroll
        for (int i = 0; i < N; i++) load_raw_shared(r[i], row + i * stream + c);
#pragma unroll
        for (int i = 0; i < N; i++) unpack(x[i], r[i]);
    } else {
        raw<T, N * W> r;
        float flat[N * W];
        load_raw_shared(r, row + c * N);
        unpack(flat, r);
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int k = 0; k < W; k++) x[i][k] = flat[k * N + i];
    }
}

template <class T, int N, int W, stream_layout L>
static __device__ __forceinline__ void store_streams(T *row, int64_t stream, int64_t c, const float (&x)[N][W])
{
    if constexpr (L == LAYOUT_NC) {
#pragma unroll
        for (int i = 0; i < N; i++) store<T, W>(row + i * stream + c, x[i]);
    } else {
        float flat[N * W];
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int k = 0; k < W; k++) flat[k * N + i] = x[i][k];
        store<T, N * W>(row + c * N, flat);
    }
}

/* The same for stream gradients, whose dtype is T or f32 and known at run time. */
template <class T, int N, int W, stream_layout L>
static __device__ __forceinline__ void get_streams(float (&x)[N][W], const view &v, int64_t token, int64_t c)
{
    const int64_t row = token * v.stride[0];
    if (sizeof(T) == 4 || v.dtype == WEFT_F32)
        load_streams<float, N, W, L>(x, (const float *)v.data + row, v.stride[1], c);
    else
        load_streams<T, N, W, L>(x, (const T *)v.data + row, v.stride[1], c);
}

template <class T, int N, int W, stream_layout L>
static __device__ __forceinline__ void put_streams(const view &v, int64_t token, int64_t c, float (&x)[N][W])
{
    const int64_t row = token * v.stride[0];
    if (v.add) {
        float old[N][W];
        get_streams<T, N, W, L>(old, v, token, c);
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int k = 0; k < W; k++) x[i][k] = old[i][k] + x[i][k];
    }
    if (sizeof(T) == 4 || v.dtype == WEFT_F32)
        store_streams<float, N, W, L>((float *)v.data + row, v.stride[1], c, x);
    else
        store_streams<T, N, W, L>((T *)v.data + row, v.stride[1], c, x);
}

#endif
