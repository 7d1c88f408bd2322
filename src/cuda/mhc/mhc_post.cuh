/* SPDX-License-Identifier: Apache-2.0
 *
 * The arithmetic of post [M6] and aggregate [M5] on a tile of channels in registers. The post kernels and replay share
 * it, so replay equals the chain of single operators bit for bit. The order per channel, in every kernel:
 *     y[o] = post[o] (f + bias);  y[o] *= D;  y[o] = fma(W(i,o), x[i], y[o]) for i = 0 .. n-1
 *     u    = pre[0] x[0];         u = fma(pre[i], x[i], u)                    for i = 1 .. n-1
 * Without res, y[o] += x[o] in the place of the products: the bits of a mix that is the identity, for finite streams. */
#ifndef WEFT_CUDA_MHC_POST_CUH
#define WEFT_CUDA_MHC_POST_CUH

#include "core/philox.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/streams.cuh"
#include "cuda/mhc/mhc_post_plan.h"

/* Coefficients of a token in shared memory; w[o][i] = W(i,o), whatever the convention. */
template <int N> struct alignas(N == 2 ? 8 : 16) coefs {
    float post[N], w[N][N];
};

/* What a thread holds of a token at once: `batch` tiles of `width` channels, in memory order. */
template <class T, int N, stream_layout L> struct post_tile {
    /* Eight streams in half vectors: backward holds two such tiles and 72 sums. */
    static constexpr int width = L == LAYOUT_NC && N == 8 ? 4 : stream_tile<T, N, L>::width;
    static constexpr int words = N * width * (int)sizeof(T) / 4;
    static constexpr int batch = words >= 16 ? 1 : 16 / words; /* 64 bytes of streams before the first wait */
    static constexpr int pair = width < 2 ? 1 : 2;             /* channels that are unpacked at a time */
    typedef raw<T, N * width> streams;
    typedef raw<T, width> row;
    /* Where stream i of channel k is in `streams`. */
    static __host__ __device__ constexpr int at(int i, int k)
    {
        return L == LAYOUT_NC ? i * width + k : k * N + i;
    }
};

/* ---- tiles between memory and registers --------------------------------------------------------------------------- */

template <class T, int N, stream_layout L>
static __device__ __forceinline__ void load_tile(typename post_tile<T, N, L>::streams &r, const T *row,
                                                 int64_t stream, int64_t c)
{
    if constexpr (L == LAYOUT_NC) {
        constexpr int W = post_tile<T, N, L>::width, words = raw<T, W>::words;
        raw<T, W> piece[N];
#pragma unroll
        for (int i = 0; i < N; i++) load_raw_shared(piece[i], row + i * stream + c);
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int k = 0; k < words; k++) r.word[i * words + k] = piece[i].word[k];
    } else {
        load_raw_shared(r, row + c * N);
    }
}

template <class T, int N, stream_layout L>
static __device__ __forceinline__ void store_tile(T *row, int64_t stream, int64_t c,
                                                  const typename post_tile<T, N, L>::streams &r)
{
    if constexpr (L == LAYOUT_NC) {
        constexpr int W = post_tile<T, N, L>::width, words = raw<T, W>::words;
#pragma unroll
        for (int i = 0; i < N; i++) {
            raw<T, W> piece;
#pragma unroll
            for (int k = 0; k < words; k++) piece.word[k] = r.word[i * words + k];
            store_raw(row + i * stream + c, piece);
        }
    } else {
        store_raw(row + c * N, r);
    }
}

/* Element e of packed words; e is known at compile time wherever this is used. */
template <class T> static __device__ __forceinline__ float element(const uint32_t *word, int e)
{
    if constexpr (sizeof(T) == 4) {
        return __uint_as_float(word[e]);
    } else {
        float low, high;
        widen2(low, high, word[e >> 1], T());
        return e & 1 ? high : low;
    }
}

/* Channels k0 .. k0+pair-1 of all streams, from and to packed words. */
template <class T, int N, stream_layout L, int P>
static __device__ __forceinline__ void unpack_pair(float (&v)[N][P], const typename post_tile<T, N, L>::streams &r,
                                                   int k0)
{
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int q = 0; q < P; q++) v[i][q] = element<T>(r.word, post_tile<T, N, L>::at(i, k0 + q));
}

template <class T, int N, stream_layout L, int P>
static __device__ __forceinline__ void pack_pair(typename post_tile<T, N, L>::streams &r, const float (&v)[N][P],
                                                 int k0)
{
    static_assert(N % 2 == 0, "two streams, or two channels, share a word");
    typedef post_tile<T, N, L> tile;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int q = 0; q < P; q++) r.word[tile::at(i, k0 + q)] = __float_as_uint(v[i][q]);
    } else if constexpr (L == LAYOUT_NC) {
#pragma unroll
        for (int i = 0; i < N; i++) r.word[tile::at(i, k0) / 2] = narrow2(v[i][0], v[i][P - 1], T());
    } else {
#pragma unroll
        for (int q = 0; q < P; q++)
#pragma unroll
            for (int i = 0; i < N; i += 2) r.word[tile::at(i, k0 + q) / 2] = narrow2(v[i][q], v[i + 1][q], T());
    }
}

/* The same for a row. */
template <class T, int W, int P>
static __device__ __forceinline__ void pack_row(raw<T, W> &r, const float (&v)[P], int k0)
{
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int q = 0; q < P; q++) r.word[k0 + q] = __float_as_uint(v[q]);
    } else {
        r.word[k0 / 2] = narrow2(v[0], P == 1 ? 0.0f : v[P - 1], T());
    }
}

/* Element e of the coefficients of a token: post, then, where there is res, w by rows of o. */
static __device__ __forceinline__ float coef_at(const view &post, const view &res, bool in_out, int n,
                                                int64_t token, int e)
{
    if (e < n) return get(post, token * post.stride[0] + e * post.stride[1]);
    const int o = (e - n) / n, i = (e - n) - o * n;
    return get(res, token * res.stride[0] + (in_out ? i : o) * res.stride[1] + (in_out ? o : i) * res.stride[2]);
}

/* ---- dropout [D1] --------------------------------------------------------------------------------------------------- */

/* Bit k: channel c + k of output o is kept. c and the number of channels are multiples of W. */
template <int W>
static __device__ __forceinline__ uint32_t keep_bits(const weft_mask &m, int64_t token, int64_t o, int64_t c)
{
    const int64_t e = (m.shared ? 0 : o * m.channels) + c;
    uint32_t bits = 0;
#pragma unroll
    for (int q = 0; q < (W >= 4 ? W / 4 : 1); q++) {
        uint32_t draw[4];
        weft_mask_draw(draw, &m, token, (e >> 2) + q);
#pragma unroll
        for (int k = 0; k < 4; k++) bits |= (draw[k] >= m.threshold ? 1u : 0u) << (4 * q + k);
    }
    if constexpr (W < 4) bits = bits >> (e & 3) & ((1u << W) - 1u);
    return bits;
}

/* The same for all outputs of a tile. */
template <int N, int W>
static __device__ __forceinline__ void keep_tile(uint32_t (&keep)[N], const weft_mask &m, int64_t token, int64_t c)
{
#pragma unroll
    for (int o = 0; o < N; o++) {
        if (o > 0 && m.shared)
            keep[o] = keep[0];
        else
            keep[o] = keep_bits<W>(m, token, o, c);
    }
}

/* ---- arithmetic ----------------------------------------------------------------------------------------------------- */

/* What a call has beside the streams. FULL looks at run time; the others are there for the sake of registers. UNMIXED and
 * UNMIXED_PLAIN: as FULL and PLAIN, without res. */
enum post_mode { PLAIN = 0, BIASED, FULL, UNMIXED, UNMIXED_PLAIN };

static __host__ __device__ constexpr bool post_mixes(post_mode mode)
{
    return mode != UNMIXED && mode != UNMIXED_PLAIN;
}

/* Does it look at run time? */
static __host__ __device__ constexpr bool post_asks(post_mode mode)
{
    return mode == FULL || mode == UNMIXED;
}

static inline post_mode post_mode_of(const weft_tensor *bias, const weft_dropout *dropout)
{
    return dropout->p > 0 ? FULL : weft_has(bias) ? BIASED : PLAIN;
}

template <int N, int W> struct post_extra {
    bool biased, masked;
    float scale; /* of kept elements */
    float bias[W];
    uint32_t keep[N];
};

template <int N, int W, post_mode MODE>
static __device__ __forceinline__ void load_extra(post_extra<N, W> &e, const view &bias, const weft_mask &mask,
                                                  int64_t token, int64_t c)
{
    e.biased = MODE == BIASED || (post_asks(MODE) && has(bias));
    e.masked = post_asks(MODE) && mask.on;
    e.scale = (float)mask.scale;
    if (e.biased) get_param<W>(e.bias, bias, c);
    if (e.masked) keep_tile<N, W>(e.keep, mask, token, c);
}

/* Streams of a tile, and the sub-layer's output with its bias. */
template <class T, int N, stream_layout L>
static __device__ __forceinline__ void unpack_tile(float (&v)[N][post_tile<T, N, L>::width],
                                                   const typename post_tile<T, N, L>::streams &x)
{
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int q = 0; q < post_tile<T, N, L>::width; q++)
            v[i][q] = element<T>(x.word, post_tile<T, N, L>::at(i, q));
}

template <class T, int N, int W>
static __device__ __forceinline__ void unpack_row(float (&fb)[W], const raw<T, W> &f, const post_extra<N, W> &e)
{
    unpack(fb, f);
    if (e.biased)
#pragma unroll
        for (int q = 0; q < W; q++) fb[q] = fb[q] + e.bias[q];
}

/* Output stream o of a tile. */
template <int N, int W, bool MIX = true>
static __device__ __forceinline__ void post_output(float (&y)[W], int o, const float (&v)[N][W],
                                                   const float (&fb)[W], const coefs<N> &k,
                                                   const post_extra<N, W> &e)
{
#pragma unroll
    for (int q = 0; q < W; q++) {
        y[q] = k.post[o] * fb[q];
        if (e.masked) y[q] = y[q] * (e.keep[o] >> q & 1 ? e.scale : 0.0f);
        if constexpr (MIX) {
#pragma unroll
            for (int i = 0; i < N; i++) y[q] = fmaf(k.w[o][i], v[i][q], y[q]);
        } else {
            y[q] = v[o][q] + y[q];
        }
    }
}

/* u of a tile, rounded. */
template <class T, int N, stream_layout L>
static __device__ __forceinline__ void aggregate_forward(typename post_tile<T, N, L>::row &u,
                                                         const typename post_tile<T, N, L>::streams &x,
                                                         const float (&pre)[N])
{
    constexpr int W = post_tile<T, N, L>::width, P = post_tile<T, N, L>::pair;
#pragma unroll
    for (int k0 = 0; k0 < W; k0 += P) {
        float v[N][P], s[P];
        unpack_pair<T, N, L, P>(v, x, k0);
#pragma unroll
        for (int q = 0; q < P; q++) {
            s[q] = pre[0] * v[0][q];
#pragma unroll
            for (int i = 1; i < N; i++) s[q] = fmaf(pre[i], v[i][q], s[q]);
        }
        pack_row<T, W, P>(u, s, k0);
    }
}

/* ---- any number of streams, any strides: rows of fp32 in shared memory, element by element ------------------------- */

/* Element number `item` of n rows of `count` channels. Neighbouring threads take neighbouring memory, as far as a
 * stride of 1 in either direction allows. */
struct any_element {
    int i, c;
};

static __device__ __forceinline__ any_element any_split(int item, int n, int count, bool along_channels)
{
    const int a = along_channels ? count : n, q = item / a, r = item - q * a;
    return along_channels ? any_element{q, r} : any_element{r, q};
}

static __device__ __forceinline__ bool any_along_channels(const view &v)
{
    return v.stride[2] <= v.stride[1];
}

static __device__ __forceinline__ float any_factor(const weft_mask &m, int64_t token, int o, int64_t c)
{
    return keep_bits<1>(m, token, o, c) ? (float)m.scale : 0.0f;
}

/* y[o] of one channel; w: row o of the mix, x: the channel's column, `pitch` apart. */
static __device__ __forceinline__ float any_post(const float *w, const float *x, int pitch, int n, float expanded)
{
    for (int i = 0; i < n; i++) expanded = fmaf(w[i], x[i * pitch], expanded);
    return expanded;
}

static __device__ __forceinline__ float any_aggregate(const float *pre, const float *x, int pitch, int n)
{
    float u = pre[0] * x[0];
    for (int i = 1; i < n; i++) u = fmaf(pre[i], x[i * pitch], u);
    return u;
}

/* ---- host ----------------------------------------------------------------------------------------------------------- */

template <class T, int N, stream_layout L> static inline post_shape post_shape_of(const weft_call *call, int room)
{
    typedef post_tile<T, N, L> tile;
    return post_shape{call->tokens, call->channels, tile::width, tile::batch, room, call->sms};
}

/* The table rows of an operator: fast kernels for 2, 4 and 8 streams, and one for everything. */
#define POST_ROWS(T, run, any, workspace)                                                                          \
    {number<T>::dtype, 2, run<T, 2>, workspace}, {number<T>::dtype, 4, run<T, 4>, workspace},                      \
        {number<T>::dtype, 8, run<T, 8>, workspace},                                                               \
    {                                                                                                              \
        number<T>::dtype, 0, any<T>, workspace                                                                     \
    }

#endif
