/* SPDX-License-Identifier: Apache-2.0
 *
 * The mix warps of the fused site kernel: post, aggregate, norm. A warp has one token of a tile, and a share of the remaining
 * boxes. */
#ifndef WEFT_CUDA_SITE_FWD_MIX_CUH
#define WEFT_CUDA_SITE_FWD_MIX_CUH

#include "cuda/norm/rmsnorm.cuh"
#include "cuda/site/fwd.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* ---- rows of a lane in a tile ------------------------------------------------------------------------------------------- */

/* Eight channels of a token are 16 bytes of a row of a box; a warp processes four rows at a time. Of each group of four boxes these are
 * the rows of its own token. The rows of the remaining boxes are assigned to the warps round-robin, so that no lane is idle; which
 * warp has a row depends on the tile alone.
 *
 * In (C, n) a lane has as many elements, n pieces of 16 bytes with 8 / n channels of all streams each. Neighbouring lanes have
 * neighbouring pieces, so an access of a warp is 512 bytes side by side; the pieces of a lane are site_step apart. */
struct site_rows {
    uint32_t streams,
        f; /* offsets: of stream 0, or of the first piece, in a tile; of f, behind the streams or in its own buffer */
    int token, channel; /* token: of the tile */
};

/* (C, n): from a lane's piece to its next, of its own token's rows (OWN) or of the remaining boxes. Own pieces 0 are the four units
 * of the group, whose next ones come behind them; a remaining box has n units, a row of each. */
template <int N, bool OWN> struct site_step {
    static constexpr int units = OWN ? 4 : 1, channels = units * SITE_BOX / N, width = 8 / N;
    static constexpr uint32_t in_tile = units * BOX_BYTES, in_memory = units * TMA_ROW;
    /* f, or a row of channels, at its first piece's place; BOX: bytes from a box of it to the next */
    template <int BOX> static __device__ __forceinline__ uint32_t row(uint32_t at, int k)
    {
        return OWN ? at + k * (4 / N) * BOX : at ^ k * (TMA_ROW / N);
    }
};

template <int N, bool APART>
static __device__ __forceinline__ site_rows rows_at(const site_args &p, const site_block &b, int box, int token)
{
    const uint32_t piece = tma_piece(token, b.lane & 7);
    return {piece + box * N * BOX_BYTES, piece + (APART ? box : p.boxes * N + box) * BOX_BYTES, token,
            b.first_channel + box * SITE_BOX + (b.lane & 7) * 8};
}

/* The same in (C, n): a lane's first piece, of its own token's first group of four boxes or of a remaining box. */
template <int N, bool APART, bool OWN>
static __device__ __forceinline__ site_rows pieces_at(const site_args &p, const site_block &b, int box, int token)
{
    const int unit = OWN ? b.lane >> 3 : box * N, channel = (unit * SITE_BOX + (b.lane & 7) * 8) / N;
    const int bytes = channel % SITE_BOX * 2, at = channel / SITE_BOX;
    return {tma_piece(token, b.lane & 7) + unit * BOX_BYTES,
            tma_piece(token, bytes >> 4) + (bytes & 15) + (APART ? at : p.boxes * N + at) * BOX_BYTES, token,
            b.first_channel + channel};
}

template <stream_layout L, int N, int PAIRS> struct site_share {
    typedef site_boxes<N, PAIRS> boxes;
    static constexpr int most = boxes::most / 4;
    site_rows own; /* the first four of its own token; the next are four boxes further */
    int times, remaining,
        live_tiles[L == LAYOUT_NC
                       ? most
                       : 1]; /* groups of four boxes; remaining boxes; tiles in which the own rows are inside
                                                   the tensor; (C, n): the own token */

    __device__ __forceinline__ site_share(const site_args &p, const site_block &b, int warp)
        : own(L == LAYOUT_NC ? rows_at<N, site_roles<PAIRS>::wide>(p, b, b.lane >> 3, warp)
                             : pieces_at<N, site_roles<PAIRS>::wide, true>(p, b, 0, warp)),
          times((PAIRS ? boxes::count : p.boxes) / 4), remaining((PAIRS ? boxes::count : p.boxes) % 4)
    {
        const int all = b.count - (site_token(p, b, b.count - 1, warp) >= p.tokens);
        if constexpr (L == LAYOUT_NC)
#pragma unroll
            for (int t = 0; t < most; t++) live_tiles[t] = own.channel + 4 * t * SITE_BOX < p.channels ? all : 0;
        else
            live_tiles[0] = all;
    }
    /* Channels of the tensor from own channel t on; none where the token is behind the last. (C, n): pieces of a lane are cut one by
     * one. */
    __device__ __forceinline__ int live_channels(const site_args &p, int i, int t) const
    {
        return i < live_tiles[0] ? p.channels - own.channel - 4 * t * SITE_BOX : 0;
    }
    /* How much of the own rows is inside the tensor: in (n, C) a lane's eight channels are or are not. */
    __device__ __forceinline__ auto live(const site_args &p, int i, int t) const
    {
        if constexpr (L == LAYOUT_NC)
            return i < live_tiles[t];
        else
            return live_channels(p, i, t);
    }
    __device__ __forceinline__ auto live_remaining(const site_args &p, int64_t token, const site_rows &m) const
    {
        if constexpr (L == LAYOUT_NC)
            return token < p.tokens && m.channel < p.channels;
        else
            return token < p.tokens ? p.channels - m.channel : 0;
    }
    __device__ __forceinline__ bool has_own(int t) const
    {
        return t < times;
    }
    /* This warp has remaining rows in tile i. */
    __device__ __forceinline__ bool has_remaining(int warp, int i) const
    {
        return !boxes::even && ((warp - 2 * remaining * i) & (SITE_TILE - 1)) < 2 * remaining;
    }
    __device__ __forceinline__ site_rows remaining_at(const site_args &p, const site_block &b, int warp,
                                                      int i) const
    {
        const int row = 4 * ((warp - 2 * remaining * i) & (SITE_TILE - 1)) + (b.lane >> 3);
        return L == LAYOUT_NC ? rows_at<N, site_roles<PAIRS>::wide>(p, b, 4 * times + (row >> 3), row & 7)
                              : pieces_at<N, site_roles<PAIRS>::wide, false>(p, b, 4 * times + (row >> 3), row & 7);
    }
    /* The same in (n, C)'s order, in which u lies with a norm. */
    __device__ __forceinline__ site_rows rows_of_remaining(const site_args &p, const site_block &b, int warp,
                                                           int i) const
    {
        const int row = 4 * ((warp - 2 * remaining * i) & (SITE_TILE - 1)) + (b.lane >> 3);
        return rows_at<N, site_roles<PAIRS>::wide>(p, b, 4 * times + (row >> 3), row & 7);
    }
};

template <class T> static __device__ __forceinline__ raw<T, 8> load_piece(uint32_t from)
{
    const uint4 v = load_shared4(from);
    raw<T, 8> r;
    r.word[0] = v.x, r.word[1] = v.y, r.word[2] = v.z, r.word[3] = v.w;
    return r;
}

template <class T> static __device__ __forceinline__ void store_piece(uint32_t to, const raw<T, 8> &r)
{
    store_shared4(to, make_uint4(r.word[0], r.word[1], r.word[2], r.word[3]));
}

/* f of a lane's eight channels; (C, n): 8 / n at a time, at `from` and site_step further. */
template <class T, stream_layout L, int N, bool OWN>
static __device__ __forceinline__ raw<T, 8> load_f_piece(uint32_t from)
{
    raw<T, 8> r;
    if constexpr (L == LAYOUT_NC) {
        r = load_piece<T>(from);
    } else {
#pragma unroll
        for (int k = 0; k < N; k++) {
            const uint32_t at = site_step<N, OWN>::template row<BOX_BYTES>(from, k);
            if constexpr (N == 4)
                asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r.word[k]) : "r"(at) : "memory");
            else
                asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                             : "=r"(r.word[2 * k]), "=r"(r.word[2 * k + 1])
                             : "r"(at)
                             : "memory");
        }
    }
    return r;
}

/* f of a warp's rows of the next tile, where f has its own buffer: loaded into registers as soon as the previous tile is mixed, which
 * frees the buffer. */
template <class T, stream_layout L, int N, int PAIRS> struct site_f {
    raw<T, 8> own[site_share<L, N, PAIRS>::most] = {}, remaining = {};
    int loaded = 0; /* tiles */

    __device__ __forceinline__ void load(const site_args &p, const site_block &b,
                                         const site_share<L, N, PAIRS> &share, int warp)
    {
        const uint32_t from = shared_address(b.shared + p.offset.f);
#pragma unroll
        for (int t = 0; t < share.most; t++)
            if (share.has_own(t)) own[t] = load_f_piece<T, L, N, true>(from + share.own.f + t * 4 * BOX_BYTES);
        if (share.has_remaining(warp, loaded))
            remaining = load_f_piece<T, L, N, false>(from + share.remaining_at(p, b, warp, loaded).f);
        barrier_arrive(b.barrier.f_empty);
        loaded++;
    }
};

/* ---- gain and bias ------------------------------------------------------------------------------------------------------ */

/* Of the block's channels, in shared memory: a mix warp needs them for every tile, and would wait for global memory each time. */
static __device__ __forceinline__ float *site_weights(const site_args &p, int channel, bool bias)
{
    extern __shared__ __align__(1024) char shared[];
    const int own = p.boxes * SITE_BOX;
    return (float *)(shared + p.offset.weights) + (bias ? own : 0) + channel - (int)cluster_rank() * own;
}

/* All mix warps. */
static __device__ __forceinline__ void keep_weights(const site_args &p, const site_block &b, int warp, bool bias)
{
    const view &from = bias ? p.bias : p.sub_weight;
#pragma unroll 1
    for (int c = warp * 32 + b.lane; c < p.boxes * SITE_BOX; c += MIX_WARPS * 32)
        *site_weights(p, b.first_channel + c, bias) =
            b.first_channel + c < p.channels ? get(from, (b.first_channel + c) * from.stride[0]) : 0.0f;
}

template <int W>
static __device__ __forceinline__ void load_weights(float (&v)[W], const site_args &p, int channel, bool bias)
{
    if (!p.offset.weights) {
        get_param<W>(v, bias ? p.bias : p.sub_weight, channel);
        return;
    }
    const float *const from = site_weights(p, channel, bias);
    if constexpr (W % 4 == 0) {
#pragma unroll
        for (int k = 0; k < W; k += 4) {
            const uint4 four = load_shared4(shared_address(from + k));
            v[k] = __uint_as_float(four.x), v[k + 1] = __uint_as_float(four.y);
            v[k + 2] = __uint_as_float(four.z), v[k + 3] = __uint_as_float(four.w);
        }
    } else {
#pragma unroll
        for (int k = 0; k < W; k++) v[k] = from[k];
    }
}

/* ---- post, aggregate, norm ---------------------------------------------------------------------------------------------- */

/* What dropout keeps of a lane's eight channels: 8 / N bits of each output for each piece in (C, n), 8 bits of each output in
 * (n, C). A function, because twenty times ten rounds would be a third of the kernel. */
template <stream_layout L, int N, bool OWN>
static __device__ __noinline__ uint32_t kept_bits(const weft_mask mask, int64_t token, int channel)
{
    constexpr int W = L == LAYOUT_NC ? 8 : 8 / N, PIECES = 8 / W;
    uint32_t bits = 0;
#pragma unroll 1
    for (int q = PIECES * N - 1; q >= 0; q--)
        bits = bits << W | keep_bits<W>(mask, token, q % N, channel + q / N * site_step<N, OWN>::channels);
    return bits;
}

/* W channels of piece `piece`. COUNTED: `keep` has been drawn. */
template <int N, int W, post_mode MODE, bool COUNTED>
static __device__ __forceinline__ void load_site_extra(post_extra<N, W> &extra, const site_args &p,
                                                       const weft_mask &mask, uint32_t keep, int piece,
                                                       int64_t token, int channel)
{
    extra.biased = MODE == BIASED || (MODE == FULL && has(p.bias));
    extra.masked = MODE == FULL; /* see mix_any */
    extra.scale = (float)mask.scale;
    if (extra.biased) load_weights<W>(extra.bias, p, channel, true);
    if constexpr (MODE == FULL && COUNTED)
#pragma unroll
        for (int o = 0; o < N; o++) extra.keep[o] = keep >> (piece * N + o) * W;
    else if constexpr (MODE == FULL)
        keep_tile<N, W>(extra.keep, mask, token, channel);
}

/* Stream o of one channel, from post f. k.w: the matrix in memory order. Without a matrix no stream meets another: a product with a
 * zero would let what is not finite in one of them into all. */
template <int N, site_apply HOW>
static __device__ __forceinline__ float mixed(float y, int o, const coefs<N> &k, const float (&v)[N])
{
    if constexpr (HOW == SITE_UNMIXED) {
        y = v[o] + y;
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) y = fmaf(HOW == SITE_IN_OUT ? k.w[i][o] : k.w[o][i], v[i], y);
    }
    return y;
}

/* New streams of one token and 8 channels, in the registers of the old ones. */
template <class T, int N, site_apply HOW>
static __device__ __forceinline__ void mix(raw<T, 8> (&x)[N], const raw<T, 8> &f, const coefs<N> &k,
                                           const post_extra<N, 8> &extra)
{
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        float v[2][N], fb[2], y[2];
#pragma unroll
        for (int i = 0; i < N; i++) widen2(v[0][i], v[1][i], x[i].word[pair], T());
        widen2(fb[0], fb[1], f.word[pair], T());
        if (extra.biased) fb[0] = fb[0] + extra.bias[pair * 2], fb[1] = fb[1] + extra.bias[pair * 2 + 1];
#pragma unroll
        for (int o = 0; o < N; o++) {
#pragma unroll
            for (int q = 0; q < 2; q++) {
                y[q] = k.post[o] * fb[q];
                if (extra.masked) y[q] = y[q] * (extra.keep[o] >> (pair * 2 + q) & 1 ? extra.scale : 0.0f);
                y[q] = mixed<N, HOW>(y[q], o, k, v[q]);
            }
            x[o].word[pair] = narrow2(y[0], y[1], T());
        }
    }
}

/* Post of rows of a tile, in place and to memory. */
template <class T, int N, post_mode MODE, site_apply HOW, bool COUNTED>
static __device__ __forceinline__ void mix_rows(const site_args &p, const weft_mask &mask, uint32_t keep,
                                                uint32_t streams, const raw<T, 8> &f, const coefs<N> &k, char *to,
                                                bool live, int64_t token, int channel)
{
    raw<T, 8> x[N];
#pragma unroll
    for (int o = 0; o < N; o++) x[o] = load_piece<T>(streams + o * BOX_BYTES);
    if (MODE == PLAIN || live) {
        post_extra<N, 8> extra;
        load_site_extra<N, 8, MODE, COUNTED>(extra, p, mask, keep, 0, token, channel);
        mix<T, N, HOW>(x, f, k, extra);
    }
#pragma unroll
    for (int o = 0; o < N; o++) store_piece(streams + o * BOX_BYTES, x[o]);
    if (live)
#pragma unroll
        for (int o = 0; o < N; o++) store_once((T *)(to + p.y_at[o]), x[o]);
}

/* New streams of a piece of (C, n) in the registers of the old ones; f: of its 8 / N channels. */
template <class T, int N, site_apply HOW>
static __device__ __forceinline__ void mix_piece(raw<T, 8> &x, const uint32_t *f, const coefs<N> &k,
                                                 const post_extra<N, 8 / N> &extra)
{
    constexpr int W = 8 / N;
    raw<T, W> row;
    float all[8], fb[W];
#pragma unroll
    for (int w = 0; w < W / 2; w++) row.word[w] = f[w];
    unpack(all, x);
    unpack_row<T, N, W>(fb, row, extra);
#pragma unroll
    for (int c = 0; c < W; c++) {
        float y[N], v[N];
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = all[c * N + i];
#pragma unroll
        for (int o = 0; o < N; o++) {
            y[o] = k.post[o] * fb[c];
            if (extra.masked) y[o] = y[o] * (extra.keep[o] >> c & 1 ? extra.scale : 0.0f);
            y[o] = mixed<N, HOW>(y[o], o, k, v);
        }
#pragma unroll
        for (int o = 0; o < N; o += 2) x.word[(c * N + o) / 2] = narrow2(y[o], y[o + 1], T());
    }
}

/* mix_rows of (C, n). live: channels from the first on that are inside the tensor. */
template <class T, int N, post_mode MODE, site_apply HOW, bool OWN>
static __device__ __forceinline__ void mix_pieces(const site_args &p, const weft_mask &mask, uint32_t keep,
                                                  uint32_t streams, const raw<T, 8> &f, const coefs<N> &k, char *to,
                                                  int live, int64_t token, int channel)
{
    typedef site_step<N, OWN> step;
    raw<T, 8> x[N];
#pragma unroll
    for (int e = 0; e < N; e++) x[e] = load_piece<T>(streams + e * step::in_tile);
#pragma unroll
    for (int e = 0; e < N; e++) {
        if (MODE != PLAIN && e * step::channels >= live) continue;
        post_extra<N, 8 / N> extra;
        load_site_extra<N, 8 / N, MODE, true>(extra, p, mask, keep, e, token, channel + e * step::channels);
        mix_piece<T, N, HOW>(x[e], f.word + e * (4 / N), k, extra);
    }
#pragma unroll
    for (int e = 0; e < N; e++) store_piece(streams + e * step::in_tile, x[e]);
#pragma unroll
    for (int e = 0; e < N; e++)
        if (e * step::channels < live) store_once((T *)(to + e * step::in_memory), x[e]);
}

/* Post of a lane's rows by layout and convention. */
template <class T, stream_layout L, int N, post_mode MODE, site_apply HOW, bool COUNTED, bool OWN, class Live>
static __device__ __forceinline__ void mix_some(const site_args &p, const weft_mask &mask, uint32_t keep,
                                                uint32_t streams, const raw<T, 8> &f, const coefs<N> &k, char *to,
                                                Live live, int64_t token, int channel)
{
    if constexpr (L == LAYOUT_NC)
        mix_rows<T, N, MODE, HOW, COUNTED>(p, mask, keep, streams, f, k, to, live, token, channel);
    else
        mix_pieces<T, N, MODE, HOW, OWN>(p, mask, keep, streams, f, k, to, live, token, channel);
}

/* A token's coefficients by accesses of 16 bytes; from a reference the compiler reads floats. */
template <int N> static __device__ __forceinline__ coefs<N> load_coefs(const coefs<N> &from)
{
    constexpr int WORDS = sizeof(coefs<N>) / 4, WIDE = N == 4 ? 4 : 2;
    const uint32_t at = shared_address(&from);
    float word[WORDS];
    coefs<N> k;
#pragma unroll
    for (int w = 0; w < WORDS; w += WIDE) {
        if constexpr (N == 4) {
            const uint4 v = load_shared4(at + w * 4);
            word[w] = __uint_as_float(v.x), word[w + 1] = __uint_as_float(v.y);
            word[w + 2] = __uint_as_float(v.z), word[w + 3] = __uint_as_float(v.w);
        } else {
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                         : "=f"(word[w]), "=f"(word[w + 1])
                         : "r"(at + w * 4)
                         : "memory");
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) k.post[i] = word[i];
#pragma unroll
    for (int i = 0; i < N * N; i++) k.w[i / N][i % N] = word[N + i];
    return k;
}

template <int N> static __device__ __forceinline__ void transpose(coefs<N> &k)
{
#pragma unroll
    for (int o = 0; o < N; o++)
#pragma unroll
        for (int i = 0; i < o; i++) {
            const float w = k.w[o][i];
            k.w[o][i] = k.w[i][o], k.w[i][o] = w;
        }
}

template <class T, stream_layout L, int N, post_mode MODE, site_apply APPLY, bool OWN, class Live>
static __device__ __forceinline__ void mix_any(const site_args &p, const weft_mask &mask, uint32_t streams,
                                               const raw<T, 8> &f, const coefs<N> &from, char *to, Live live,
                                               int64_t token, int channel)
{
    if constexpr (MODE == FULL) /* without dropout there is a bias: a way of its own, which nothing spills in */
        if (!mask.on)
            return mix_any<T, L, N, BIASED, APPLY, OWN>(p, mask, streams, f, from, to, live, token, channel);
    if constexpr (APPLY == SITE_EITHER) {
        coefs<N> k = load_coefs<N>(from);
        uint32_t keep = 0;
        if constexpr (MODE == FULL) keep = kept_bits<L, N, OWN>(mask, token, channel);
        if constexpr (MODE != PLAIN)
            if (p.in_out) transpose(k); /* instead of a copy of what follows */
        if (p.unmixed)
            mix_some<T, L, N, MODE, SITE_UNMIXED, true, OWN>(p, mask, keep, streams, f, k, to, live, token,
                                                             channel);
        else if (MODE == PLAIN && p.in_out)
            mix_some<T, L, N, MODE, SITE_IN_OUT, true, OWN>(p, mask, keep, streams, f, k, to, live, token, channel);
        else
            mix_some<T, L, N, MODE, SITE_OUT_IN, true, OWN>(p, mask, keep, streams, f, k, to, live, token, channel);
    } else if (p.unmixed) {
        mix_some<T, L, N, MODE, SITE_UNMIXED, false, OWN>(p, mask, 0, streams, f, from, to, live, token, channel);
    } else {
        mix_some<T, L, N, MODE, APPLY, false, OWN>(p, mask, 0, streams, f, from, to, live, token, channel);
    }
}

/* 8 channels, rounded. */
template <class T, int N>
static __device__ __forceinline__ raw<T, 8> aggregate(uint32_t streams, const float (&pre)[N])
{
    raw<T, 8> x[N], u;
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = load_piece<T>(streams + i * BOX_BYTES);
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        float s[2], v[2];
        widen2(v[0], v[1], x[0].word[pair], T());
        s[0] = pre[0] * v[0], s[1] = pre[0] * v[1];
#pragma unroll
        for (int i = 1; i < N; i++) {
            widen2(v[0], v[1], x[i].word[pair], T());
            s[0] = fmaf(pre[i], v[0], s[0]), s[1] = fmaf(pre[i], v[1], s[1]);
        }
        u.word[pair] = narrow2(s[0], s[1], T());
    }
    return u;
}

/* The same in (C, n), 8 / N channels a piece. */
template <class T, int N, bool OWN>
static __device__ __forceinline__ raw<T, 8> aggregate_of_pieces(uint32_t streams, const float (&pre)[N])
{
    raw<T, 8> x[N], u;
#pragma unroll
    for (int e = 0; e < N; e++) x[e] = load_piece<T>(streams + e * site_step<N, OWN>::in_tile);
#pragma unroll
    for (int e = 0; e < N; e++) {
        float v[8], s[8 / N];
        unpack(v, x[e]);
#pragma unroll
        for (int c = 0; c < 8 / N; c++) {
            s[c] = pre[0] * v[c * N];
#pragma unroll
            for (int i = 1; i < N; i++) s[c] = fmaf(pre[i], v[c * N + i], s[c]);
        }
#pragma unroll
        for (int c = 0; c < 8 / N; c += 2) u.word[(e * (8 / N) + c) / 2] = narrow2(s[c], s[c + 1], T());
    }
    return u;
}

static_assert(SITE_BOX == BOX_PIECES * 8, "a box of the tile is a box of the order of squares");

/* Sends the sum of squares of u of a token's box to the token's owner, into the buffer of its sums, boxes of all blocks in order.
 * Eight lanes have the pieces of a box. */
static __device__ __forceinline__ void send_squares(const site_args &p, const site_block &b, int i, int token,
                                                    int box, float piece)
{
    const uint32_t number = (uint32_t)(i * SITE_TILE + token), owner = number & (uint32_t)(p.cluster - 1);
    const uint32_t slot = (number >> p.cluster_log) % (uint32_t)p.slots;
    const uint32_t to =
        shared_address(b.shared + p.offset.received) + (slot * p.cluster * SITE_ROW + b.rank * p.boxes + box) * 4;
    const float squares = box_sum(piece);
    if ((b.lane & (BOX_PIECES - 1)) == 0)
        cluster_send(cluster_address(to, owner), squares, cluster_address(b.barrier.squares + slot * 8, owner));
}

/* A token's pre, read in one access. */
template <int N> struct alignas(N * 4) site_pre {
    float of[N];
};

/* Writes u of rows of a tile to memory and, with a norm, over stream 0. Returns the sum of squares of a piece. */
template <class T, int N>
static __device__ __forceinline__ float aggregate_rows(const site_args &p, uint32_t streams,
                                                       const site_pre<N> &from, char *to, bool live)
{
    const site_pre<N> pre = from;
    float v[8];
    const raw<T, 8> u = aggregate<T, N>(streams, pre.of);
    if (live) store_raw((T *)to, u);
    if (!p.norm) return 0.0f;
    store_piece(streams, u);
    unpack(v, u);
    return piece_squares(v);
}

/* The same in (C, n). With a norm u goes to where (n, C) has it, over the first unit of its box: `row` is that place of the lane's
 * first channels, `piece` that of the eight channels that (n, C) assigns to the lane, whose squares it returns. */
template <class T, int N, bool OWN>
static __device__ __forceinline__ float aggregate_pieces(const site_args &p, uint32_t streams,
                                                         const site_pre<N> &from, char *to, int live, uint32_t row,
                                                         uint32_t piece)
{
    typedef site_step<N, OWN> step;
    const site_pre<N> pre = from;
    const raw<T, 8> u = aggregate_of_pieces<T, N, OWN>(streams, pre.of);
#pragma unroll
    for (int e = 0; e < N; e++) {
        raw<T, step::width> part;
#pragma unroll
        for (int w = 0; w < 4 / N; w++) part.word[w] = u.word[e * (4 / N) + w];
        if (e * step::channels < live) store_raw((T *)(to + e * step::channels * (int)sizeof(T)), part);
    }
    if (!p.norm) return 0.0f;
    __syncwarp(); /* the rows that u overwrites have been read */
#pragma unroll
    for (int e = 0; e < N; e++) {
        const uint32_t at = step::template row<N * BOX_BYTES>(row, e);
        if constexpr (N == 4)
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(u.word[e]) : "memory");
        else
            asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(at), "r"(u.word[2 * e]), "r"(u.word[2 * e + 1])
                         : "memory");
    }
    __syncwarp();
    float v[8];
    unpack(v, load_piece<T>(piece));
    return piece_squares(v);
}

template <class T>
static __device__ __forceinline__ void norm_rows(const site_args &p, uint32_t from, float inverse, int64_t token,
                                                 int channel)
{
    float x[8], w[8];
    unpack(x, load_piece<T>(from));
    if (has(p.sub_weight)) load_weights<8>(w, p, channel, false);
#pragma unroll
    for (int k = 0; k < 8; k++) x[k] = has(p.sub_weight) ? x[k] * inverse * w[k] : x[k] * inverse * 1.0f;
    store<T, 8>((T *)p.v + token * p.v_token + channel, x);
}

/* Mix warp. Runs whichever phase has its input, in the order norm, aggregate, post: the phases that free a stage come first. */
template <class T, stream_layout L, int N, site_kind KIND, post_mode MODE, site_apply APPLY, int PAIRS>
static __device__ __forceinline__ void mix_warp(const site_args &p, const site_block &b, int warp)
{
    typedef site_boxes<N, PAIRS> boxes;
    constexpr bool NC = L == LAYOUT_NC, WIDE = site_roles<PAIRS>::wide;
    const site_share<L, N, PAIRS> share(p, b, warp);
    const uint32_t tiles = shared_address(b.shared + p.offset.tiles);
    const coefs<N> *const coef = (const coefs<N> *)(b.shared + p.offset.coef);
    const site_pre<N> *const pre = (const site_pre<N> *)(b.shared + p.offset.pre);
    const int64_t first = site_token(p, b, 0, warp);
    char *y = (char *)((T *)p.y + first * p.y_token + share.own.channel * (NC ? 1 : N));
    char *u = (char *)((T *)p.u + first * p.u_token + share.own.channel);
    const bool wants_u = p.u != nullptr;
    constexpr bool APART = KIND == SITE_BOUNDARY && WIDE;
    int mixed = KIND == SITE_BOUNDARY ? 0 : b.count, aggregated = 0, normed = 0; /* tiles */
    ring_cursor mixing, aggregating, norming;
    site_f<T, L, N, PAIRS> f;
    weft_mask mask = {};
    const bool gain = p.norm && has(p.sub_weight), bias = KIND == SITE_BOUNDARY && MODE == FULL && has(p.bias);
    if (MODE == FULL || gain) wait_for_previous();
    if constexpr (KIND == SITE_BOUNDARY && MODE == FULL) mask = weft_mask_open(&p.dropout, p.channels);
    if (p.offset.weights && (gain || bias)) {
        if (gain) keep_weights(p, b, warp, false);
        if (bias) keep_weights(p, b, warp, true);
        asm volatile("bar.sync 2, %0;" ::"n"(MIX_WARPS * 32) : "memory");
    }
    cluster_wait_for_all();
#pragma unroll 1
    while ((p.norm ? normed : aggregated) < b.count) {
        if constexpr (APART)
            if (f.loaded == mixed && mixed < b.count && is_over(b.barrier.f_full, mixed & 1))
                f.load(p, b, share, warp);
        /* Epilogue: norm. u lies in (n, C)'s order. */
        if (p.norm && normed < aggregated && is_over(b.barrier.inverse + norming.stage * 8, norming.parity)) {
            const uint32_t tile = tiles + norming.stage * p.offset.stage;
            const float *const inverse = (const float *)(b.shared + p.offset.inverse) + norming.stage * SITE_TILE;
            const site_rows own = NC ? share.own : rows_at<N, WIDE>(p, b, b.lane >> 3, warp);
#pragma unroll
            for (int t = 0; t < share.most; t++)
                if (share.has_own(t) && normed < share.live_tiles[NC ? t : 0] &&
                    (NC || own.channel + t * 4 * SITE_BOX < p.channels))
                    norm_rows<T>(p, tile + own.streams + t * 4 * N * BOX_BYTES, inverse[warp],
                                 site_token(p, b, normed, warp), own.channel + t * 4 * SITE_BOX);
            if constexpr (!boxes::even)
                if (share.has_remaining(warp, normed)) {
                    const site_rows m = share.rows_of_remaining(p, b, warp, normed);
                    const int64_t token = site_token(p, b, normed, m.token);
                    if (token < p.tokens && m.channel < p.channels)
                        norm_rows<T>(p, tile + m.streams, inverse[m.token], token, m.channel);
                }
            barrier_arrive(b.barrier.empty + norming.stage * 8);
            norming.next(p.stages), normed++;
        } else if (aggregated < mixed && is_over(b.barrier.pre + aggregating.stage * 8, aggregating.parity)) {
            const uint32_t tile = tiles + aggregating.stage * p.offset.stage;
#pragma unroll
            for (int t = 0; t < share.most; t++)
                if (share.has_own(t)) {
                    const uint32_t group = tile + t * 4 * N * BOX_BYTES;
                    const site_pre<N> &of = pre[aggregating.stage * SITE_TILE + warp];
                    float piece;
                    if constexpr (NC)
                        piece =
                            aggregate_rows<T, N>(p, tile + share.own.streams + t * 4 * N * BOX_BYTES, of,
                                                 u + t * 4 * TMA_ROW, wants_u && aggregated < share.live_tiles[t]);
                    else
                        piece = aggregate_pieces<T, N, true>(
                            p, group + share.own.streams, of, u + t * 4 * TMA_ROW,
                            wants_u ? share.live_channels(p, aggregated, t) : 0,
                            group + (b.lane >> 3) / N * N * BOX_BYTES + (share.own.f & (BOX_BYTES - 1)),
                            group + rows_at<N, WIDE>(p, b, b.lane >> 3, warp).streams);
                    if (p.norm) send_squares(p, b, aggregated, warp, 4 * t + (b.lane >> 3), piece);
                }
            if constexpr (!boxes::even)
                if (share.has_remaining(warp, aggregated)) {
                    const site_rows m = share.remaining_at(p, b, warp, aggregated);
                    const int64_t token = site_token(p, b, aggregated, m.token);
                    const site_pre<N> &of = pre[aggregating.stage * SITE_TILE + m.token];
                    char *const to = (char *)((T *)p.u + token * p.u_token + m.channel);
                    float piece;
                    if constexpr (NC)
                        piece = aggregate_rows<T, N>(p, tile + m.streams, of, to,
                                                     wants_u && token < p.tokens && m.channel < p.channels);
                    else
                        piece = aggregate_pieces<T, N, false>(
                            p, tile + m.streams, of, to, wants_u && token < p.tokens ? p.channels - m.channel : 0,
                            tile + (m.streams & ~(BOX_BYTES - 1)) + (m.f & (BOX_BYTES - 1)), tile + m.streams);
                    if (p.norm)
                        send_squares(p, b, aggregated, m.token, (m.channel - b.first_channel) / SITE_BOX, piece);
                }
            if (!p.norm) barrier_arrive(b.barrier.empty + aggregating.stage * 8);
            u += p.u_step, aggregating.next(p.stages), aggregated++;
        } else if (KIND == SITE_BOUNDARY && mixed < (APART ? f.loaded : b.count) &&
                   is_over(b.barrier.full + mixing.stage * 8, mixing.parity)) {
            const uint32_t tile = tiles + mixing.stage * p.offset.stage;
#pragma unroll
            for (int t = 0; t < share.most; t++)
                if (share.has_own(t))
                    mix_any<T, L, N, MODE, APPLY, true>(
                        p, mask, tile + share.own.streams + t * 4 * N * BOX_BYTES,
                        APART ? f.own[t] : load_f_piece<T, L, N, true>(tile + share.own.f + t * 4 * BOX_BYTES),
                        coef[mixing.stage * SITE_TILE + warp], y + t * 4 * (NC ? 1 : N) * TMA_ROW,
                        share.live(p, mixed, t), MODE == PLAIN ? 0 : site_token(p, b, mixed, warp),
                        share.own.channel + t * 4 * SITE_BOX);
            if constexpr (boxes::split) barrier_arrive(b.barrier.mixed + mixing.stage * 8);
            if constexpr (!boxes::even)
                if (share.has_remaining(warp, mixed)) {
                    const site_rows m = share.remaining_at(p, b, warp, mixed);
                    const int64_t token = site_token(p, b, mixed, m.token);
                    mix_any<T, L, N, MODE, APPLY, false>(
                        p, mask, tile + m.streams, APART ? f.remaining : load_f_piece<T, L, N, false>(tile + m.f),
                        coef[mixing.stage * SITE_TILE + m.token],
                        (char *)((T *)p.y + token * p.y_token + m.channel * (NC ? 1 : N)),
                        share.live_remaining(p, token, m), token, m.channel);
                    if constexpr (boxes::split) barrier_arrive(b.barrier.mixed_remaining + mixing.stage * 8);
                }
            if constexpr (!boxes::split) barrier_arrive(b.barrier.mixed + mixing.stage * 8);
            y += p.y_step, mixing.next(p.stages), mixed++;
        } else {
            __nanosleep(20);
        }
    }
}

#endif
#endif
