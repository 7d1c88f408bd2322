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
 * warp has a row depends on the tile alone. */
struct site_rows {
    uint32_t streams, f; /* offsets: of stream 0 in a tile; of f, behind the streams or in its own buffer */
    int token, channel;  /* token: of the tile */
};

template <int N, bool APART>
static __device__ __forceinline__ site_rows rows_at(const site_args &p, const site_block &b, int box, int token)
{
    const uint32_t piece = tma_piece(token, b.lane & 7);
    return {piece + box * N * BOX_BYTES, piece + (APART ? box : p.boxes * N + box) * BOX_BYTES, token,
            b.first_channel + box * SITE_BOX + (b.lane & 7) * 8};
}

template <int N, int PAIRS> struct site_share {
    typedef site_boxes<N, PAIRS> boxes;
    static constexpr int most = boxes::most / 4;
    site_rows own; /* the first four of its own token; the next are four boxes further */
    int times, remaining,
        live_tiles
            [most]; /* groups of four boxes; remaining boxes; tiles in which the own rows are inside the tensor */

    __device__ __forceinline__ site_share(const site_args &p, const site_block &b, int warp)
        : own(rows_at<N, site_roles<PAIRS>::wide>(p, b, b.lane >> 3, warp)),
          times((PAIRS ? boxes::count : p.boxes) / 4), remaining((PAIRS ? boxes::count : p.boxes) % 4)
    {
        const int all = b.count - (site_token(p, b, b.count - 1, warp) >= p.tokens);
#pragma unroll
        for (int t = 0; t < most; t++) live_tiles[t] = own.channel + 4 * t * SITE_BOX < p.channels ? all : 0;
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
        return rows_at<N, site_roles<PAIRS>::wide>(p, b, 4 * times + (row >> 3), row & 7);
    }
};

static __device__ __forceinline__ raw<bf16, 8> load_piece(uint32_t from)
{
    const uint4 v = load_shared4(from);
    raw<bf16, 8> r;
    r.word[0] = v.x, r.word[1] = v.y, r.word[2] = v.z, r.word[3] = v.w;
    return r;
}

static __device__ __forceinline__ void store_piece(uint32_t to, const raw<bf16, 8> &r)
{
    store_shared4(to, make_uint4(r.word[0], r.word[1], r.word[2], r.word[3]));
}

/* f of a warp's rows of the next tile, where f has its own buffer: loaded into registers as soon as the previous tile is mixed, which
 * frees the buffer. */
template <int N, int PAIRS> struct site_f {
    raw<bf16, 8> own[site_share<N, PAIRS>::most] = {}, remaining = {};
    int loaded = 0; /* tiles */

    __device__ __forceinline__ void load(const site_args &p, const site_block &b, const site_share<N, PAIRS> &share,
                                         int warp)
    {
        const uint32_t from = shared_address(b.shared + p.offset.f);
#pragma unroll
        for (int t = 0; t < share.most; t++)
            if (share.has_own(t)) own[t] = load_piece(from + share.own.f + t * 4 * BOX_BYTES);
        if (share.has_remaining(warp, loaded))
            remaining = load_piece(from + share.remaining_at(p, b, warp, loaded).f);
        barrier_arrive(b.barrier.f_empty);
        loaded++;
    }
};

/* ---- post, aggregate, norm ---------------------------------------------------------------------------------------------- */

/* New streams of one token and 8 channels, in the registers of the old ones. k.w: the matrix in memory order. */
template <int N, post_mode MODE, bool IN_OUT>
static __device__ __forceinline__ void mix(raw<bf16, 8> (&x)[N], const raw<bf16, 8> &f, const coefs<N> &k,
                                           const site_args &p, const weft_mask &mask, int64_t token, int channel)
{
    post_extra<N, 8> extra;
    load_extra<N, 8, MODE>(extra, p.bias, mask, token, channel);
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        float v[N][2], fb[2], y[2];
#pragma unroll
        for (int i = 0; i < N; i++) widen2(v[i][0], v[i][1], x[i].word[pair], bf16());
        widen2(fb[0], fb[1], f.word[pair], bf16());
        if (extra.biased) fb[0] = fb[0] + extra.bias[pair * 2], fb[1] = fb[1] + extra.bias[pair * 2 + 1];
#pragma unroll
        for (int o = 0; o < N; o++) {
#pragma unroll
            for (int q = 0; q < 2; q++) {
                y[q] = k.post[o] * fb[q];
                if (extra.masked) y[q] = y[q] * (extra.keep[o] >> (pair * 2 + q) & 1 ? extra.scale : 0.0f);
#pragma unroll
                for (int i = 0; i < N; i++) y[q] = fmaf(IN_OUT ? k.w[i][o] : k.w[o][i], v[i][q], y[q]);
            }
            x[o].word[pair] = narrow2(y[0], y[1], bf16());
        }
    }
}

/* Post of rows of a tile, in place and to memory. */
template <int N, post_mode MODE, bool IN_OUT>
static __device__ __forceinline__ void mix_rows(const site_args &p, const weft_mask &mask, uint32_t streams,
                                                const raw<bf16, 8> &f, const coefs<N> &k, char *to, bool live,
                                                int64_t token, int channel)
{
    raw<bf16, 8> x[N];
#pragma unroll
    for (int o = 0; o < N; o++) x[o] = load_piece(streams + o * BOX_BYTES);
    if (MODE == PLAIN || live) mix<N, MODE, IN_OUT>(x, f, k, p, mask, token, channel);
#pragma unroll
    for (int o = 0; o < N; o++) store_piece(streams + o * BOX_BYTES, x[o]);
    if (live)
#pragma unroll
        for (int o = 0; o < N; o++) store_once((bf16 *)(to + p.y_at[o]), x[o]);
}

/* 8 channels, rounded. */
template <int N> static __device__ __forceinline__ raw<bf16, 8> aggregate(uint32_t streams, const float (&pre)[N])
{
    raw<bf16, 8> x[N], u;
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = load_piece(streams + i * BOX_BYTES);
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        float s[2], v[2];
        widen2(v[0], v[1], x[0].word[pair], bf16());
        s[0] = pre[0] * v[0], s[1] = pre[0] * v[1];
#pragma unroll
        for (int i = 1; i < N; i++) {
            widen2(v[0], v[1], x[i].word[pair], bf16());
            s[0] = fmaf(pre[i], v[0], s[0]), s[1] = fmaf(pre[i], v[1], s[1]);
        }
        u.word[pair] = narrow2(s[0], s[1], bf16());
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
template <int N>
static __device__ __forceinline__ float aggregate_rows(const site_args &p, uint32_t streams,
                                                       const site_pre<N> &from, char *to, bool live)
{
    const site_pre<N> pre = from;
    float v[8];
    const raw<bf16, 8> u = aggregate<N>(streams, pre.of);
    if (live) store_raw((bf16 *)to, u);
    if (!p.norm) return 0.0f;
    store_piece(streams, u);
    unpack(v, u);
    return piece_squares(v);
}

static __device__ __forceinline__ void norm_rows(const site_args &p, uint32_t from, float inverse, int64_t token,
                                                 int channel)
{
    float x[8], w[8];
    unpack(x, load_piece(from));
    if (has(p.sub_weight)) get_param<8>(w, p.sub_weight, channel);
#pragma unroll
    for (int k = 0; k < 8; k++) x[k] = has(p.sub_weight) ? x[k] * inverse * w[k] : x[k] * inverse * 1.0f;
    store<bf16, 8>(p.v + token * p.v_token + channel, x);
}

/* Mix warp. Runs whichever phase has its input, in the order norm, aggregate, post: the phases that free a stage come first. */
template <int N, site_kind KIND, post_mode MODE, bool IN_OUT, int PAIRS>
static __device__ __forceinline__ void mix_warp(const site_args &p, const site_block &b, int warp)
{
    typedef site_boxes<N, PAIRS> boxes;
    const site_share<N, PAIRS> share(p, b, warp);
    const uint32_t tiles = shared_address(b.shared + p.offset.tiles);
    const coefs<N> *const coef = (const coefs<N> *)(b.shared + p.offset.coef);
    const site_pre<N> *const pre = (const site_pre<N> *)(b.shared + p.offset.pre);
    const int64_t first = site_token(p, b, 0, warp);
    char *y = (char *)(p.y + first * p.y_token + share.own.channel);
    char *u = (char *)(p.u + first * p.u_token + share.own.channel);
    const bool wants_u = p.u != nullptr;
    constexpr bool APART = KIND == SITE_BOUNDARY && site_roles<PAIRS>::wide;
    int mixed = KIND == SITE_BOUNDARY ? 0 : b.count, aggregated = 0, normed = 0; /* tiles */
    ring_cursor mixing, aggregating, norming;
    site_f<N, PAIRS> f;
    weft_mask mask = {};
    if constexpr (KIND == SITE_BOUNDARY && MODE == FULL) {
        wait_for_previous();
        mask = weft_mask_open(&p.dropout, p.channels);
    }
    cluster_wait_for_all();
#pragma unroll 1
    while ((p.norm ? normed : aggregated) < b.count) {
        if constexpr (APART)
            if (f.loaded == mixed && mixed < b.count && is_over(b.barrier.f_full, mixed & 1))
                f.load(p, b, share, warp);
        /* Epilogue: norm */
        if (p.norm && normed < aggregated && is_over(b.barrier.inverse + norming.stage * 8, norming.parity)) {
            const uint32_t tile = tiles + norming.stage * p.offset.stage;
            const float *const inverse = (const float *)(b.shared + p.offset.inverse) + norming.stage * SITE_TILE;
#pragma unroll
            for (int t = 0; t < share.most; t++)
                if (share.has_own(t) && normed < share.live_tiles[t])
                    norm_rows(p, tile + share.own.streams + t * 4 * N * BOX_BYTES, inverse[warp],
                              site_token(p, b, normed, warp), share.own.channel + t * 4 * SITE_BOX);
            if constexpr (!boxes::even)
                if (share.has_remaining(warp, normed)) {
                    const site_rows m = share.remaining_at(p, b, warp, normed);
                    const int64_t token = site_token(p, b, normed, m.token);
                    if (token < p.tokens && m.channel < p.channels)
                        norm_rows(p, tile + m.streams, inverse[m.token], token, m.channel);
                }
            barrier_arrive(b.barrier.empty + norming.stage * 8);
            norming.next(p.stages), normed++;
        } else if (aggregated < mixed && is_over(b.barrier.pre + aggregating.stage * 8, aggregating.parity)) {
            const uint32_t tile = tiles + aggregating.stage * p.offset.stage;
#pragma unroll
            for (int t = 0; t < share.most; t++)
                if (share.has_own(t)) {
                    const float piece =
                        aggregate_rows<N>(p, tile + share.own.streams + t * 4 * N * BOX_BYTES,
                                          pre[aggregating.stage * SITE_TILE + warp], u + t * 4 * TMA_ROW,
                                          wants_u && aggregated < share.live_tiles[t]);
                    if (p.norm) send_squares(p, b, aggregated, warp, 4 * t + (b.lane >> 3), piece);
                }
            if constexpr (!boxes::even)
                if (share.has_remaining(warp, aggregated)) {
                    const site_rows m = share.remaining_at(p, b, warp, aggregated);
                    const int64_t token = site_token(p, b, aggregated, m.token);
                    const float piece =
                        aggregate_rows<N>(p, tile + m.streams, pre[aggregating.stage * SITE_TILE + m.token],
                                          (char *)(p.u + token * p.u_token + m.channel),
                                          wants_u && token < p.tokens && m.channel < p.channels);
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
                    mix_rows<N, MODE, IN_OUT>(
                        p, mask, tile + share.own.streams + t * 4 * N * BOX_BYTES,
                        APART ? f.own[t] : load_piece(tile + share.own.f + t * 4 * BOX_BYTES),
                        coef[mixing.stage * SITE_TILE + warp], y + t * 4 * TMA_ROW, mixed < share.live_tiles[t],
                        MODE == PLAIN ? 0 : site_token(p, b, mixed, warp), share.own.channel + t * 4 * SITE_BOX);
            if constexpr (boxes::split) barrier_arrive(b.barrier.mixed + mixing.stage * 8);
            if constexpr (!boxes::even)
                if (share.has_remaining(warp, mixed)) {
                    const site_rows m = share.remaining_at(p, b, warp, mixed);
                    const int64_t token = site_token(p, b, mixed, m.token);
                    mix_rows<N, MODE, IN_OUT>(
                        p, mask, tile + m.streams, APART ? f.remaining : load_piece(tile + m.f),
                        coef[mixing.stage * SITE_TILE + m.token], (char *)(p.y + token * p.y_token + m.channel),
                        token < p.tokens && m.channel < p.channels, token, m.channel);
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
