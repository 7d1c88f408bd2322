/* SPDX-License-Identifier: Apache-2.0
 *
 * Walking over rows: which token and channels a thread works on (src/cuda/common/rows_plan.h), loads that are issued before any
 * of them is waited for, sums over a team.
 *
 * A load becomes a wait where its value is first used, and a 16-bit number is used when it is widened. So the kernels
 * load raw words for all their tiles first, coefficients after them, and unpack last. */
#ifndef WEFT_CUDA_ROWS_CUH
#define WEFT_CUDA_ROWS_CUH

#include <type_traits>

#include "cuda/common/reduce.cuh"
#include "cuda/common/rows_plan.h"
#include "cuda/common/streams.cuh"

/* ---- host --------------------------------------------------------------------------------------------------------- */

/* Whether a token's row begins on a vector must not depend on how many tokens there are where this decides the order of
 * a sum: for that, the token stride counts even if there is one token. `unit` is the vector in elements. */
static inline bool steady(const weft_tensor *t, int64_t unit)
{
    return !weft_has(t) || t->stride[0] % unit == 0;
}

/* n / by for 0 <= n < 2^63 with one multiplication: the quotient by a reciprocal that was rounded down is at most one
 * too small. */
struct divider {
    uint64_t magic;
    int64_t by;
};

static inline divider divider_of(int64_t by)
{
    return {UINT64_MAX / (uint64_t)by, by};
}

/* ---- device: who does what ---------------------------------------------------------------------------------------- */

static __device__ __forceinline__ int64_t divide(int64_t n, const divider &d, int64_t *rest)
{
    int64_t q = (int64_t)__umul64hi((uint64_t)n, d.magic), r = n - q * d.by;
    if (r >= d.by) q++, r -= d.by;
    *rest = r;
    return q;
}

/* The calling thread's place: lane of its team, and the team's number in the block. */
struct place {
    int lane, slot;
};

static __device__ __forceinline__ place place_of(const weft_rows_team &t)
{
    if (t.lanes > 32) return {(int)threadIdx.x, 0};
    return {(int)threadIdx.x & (t.lanes - 1), (int)threadIdx.x >> t.bits};
}

/* Where element (token, c) of a [tokens, channels] tensor lies. */
static __device__ __forceinline__ int64_t at(const view &v, int64_t token, int64_t c)
{
    return token * v.stride[0] + c * v.stride[1];
}

/* Sums M values over a team; every lane gets the totals. All threads of the block call it together. room holds M floats
 * per warp and may be used again at once. */
template <int M>
static __device__ __forceinline__ void team_sums(float (&v)[M], const weft_rows_team &t, float *room)
{
    if (t.lanes > 32) {
        block_sums<M>(v, room, (int)(blockDim.x >> 5));
#pragma unroll
        for (int k = 0; k < M; k++) v[k] = room[k];
        __syncthreads();
    } else {
        for (int step = t.lanes >> 1; step > 0; step >>= 1)
#pragma unroll
            for (int k = 0; k < M; k++) v[k] += __shfl_xor_sync(0xffffffffu, v[k], step);
    }
}

/* One value for each stream of a token, from first on: the lanes of a team share the stores. */
template <int M>
static __device__ __forceinline__ void put_coefs(const view &to, int64_t token, int first, int n,
                                                 const float (&v)[M], int lane, int lanes)
{
    for (int i = lane; i < M; i += lanes) {
        float value = v[0];
#pragma unroll
        for (int k = 1; k < M; k++) value = k == i ? v[k] : value;
        if (first + i < n) put(to, at(to, token, first + i), value);
    }
}

/* A token's N coefficients. One branch for all of them: in fp32 nothing is waited for. */
template <int N> static __device__ __forceinline__ void get_coefs(float (&v)[N], const view &from, int64_t token)
{
    const int64_t row = token * from.stride[0], step = from.stride[1];
    if (from.dtype == WEFT_F32) {
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = __ldg((const float *)from.data + row + i * step);
    } else {
        unsigned short bits[N];
#pragma unroll
        for (int i = 0; i < N; i++) bits[i] = __ldg((const unsigned short *)from.data + row + i * step);
        const bool brain = from.dtype == WEFT_BF16;
#pragma unroll
        for (int i = 0; i < N; i++)
            v[i] = brain ? widen(__ushort_as_bfloat16(bits[i])) : widen(__ushort_as_half(bits[i]));
    }
}

/* ---- device: tiles in memory order -------------------------------------------------------------------------- */

/* W channels of N streams, not yet unpacked. */
template <class T, int N, int W, stream_layout L> struct raw_tile {
    static constexpr int piece = L == LAYOUT_NC ? W : N * W, pieces = L == LAYOUT_NC ? N : 1;
    static constexpr int bytes = N * W * (int)sizeof(T);
    raw<T, piece> part[pieces];
};

/* For tensors that the kernel only reads. */
template <class T, int N, int W, stream_layout L>
static __device__ __forceinline__ void load_tile(raw_tile<T, N, W, L> &r, const T *row, int64_t stream, int64_t c)
{
    if constexpr (L == LAYOUT_NC) {
#pragma unroll
        for (int i = 0; i < N; i++) load_raw(r.part[i], row + i * stream + c);
    } else {
        load_raw(r.part[0], row + c * N);
    }
}

template <class T, int N, int W, stream_layout L>
static __device__ __forceinline__ void unpack_tile(float (&x)[N][W], const raw_tile<T, N, W, L> &r)
{
    if constexpr (L == LAYOUT_NC) {
#pragma unroll
        for (int i = 0; i < N; i++) unpack(x[i], r.part[i]);
    } else {
        float flat[N * W];
        unpack(flat, r.part[0]);
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int k = 0; k < W; k++) x[i][k] = flat[k * N + i];
    }
}

/* Tiles of a thread at a time: 128 bytes of streams. */
template <class T, int N, stream_layout L> struct tiles_of {
    static constexpr int width = stream_tile<T, N, L>::width;
    static constexpr int count = 128 / (N * width * (int)sizeof(T));
    static_assert(count >= 1, "a tile is at most 128 bytes");
};

/* W neighbouring elements of a row that is only read: T where PLAIN, else T or f32 as its view says. Words first, numbers
 * later. */
template <class T, int W, bool PLAIN> struct wide_words {
    raw<typename std::conditional<PLAIN, T, float>::type, W> r;
};

template <class T, int W, bool PLAIN>
static __device__ __forceinline__ void load_wide(wide_words<T, W, PLAIN> &w, const view &from, int64_t i)
{
    if (!PLAIN && from.dtype == WEFT_F32) {
        if constexpr (!PLAIN) load_raw(w.r, (const float *)from.data + i);
    } else {
        raw<T, W> part;
        load_raw(part, (const T *)from.data + i);
#pragma unroll
        for (int k = 0; k < raw<T, W>::words; k++) w.r.word[k] = part.word[k];
    }
}

template <class T, int W, bool PLAIN>
static __device__ __forceinline__ void unpack_wide(float (&v)[W], const wide_words<T, W, PLAIN> &w,
                                                   const view &from)
{
    if (!PLAIN && from.dtype == WEFT_F32) {
        if constexpr (!PLAIN) unpack(v, w.r);
    } else {
        raw<T, W> part;
#pragma unroll
        for (int k = 0; k < raw<T, W>::words; k++) part.word[k] = w.r.word[k];
        unpack(v, part);
    }
}

#endif
