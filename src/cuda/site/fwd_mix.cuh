/* SPDX-License-Identifier: Apache-2.0
 *
 * The mixers of a site in one launch: post, aggregate, norm. A warp has a token, or rows that are left over.
 */
#ifndef WEFT_CUDA_SINGLE_PASS_MIX_CUH
#define WEFT_CUDA_SINGLE_PASS_MIX_CUH

#include "cuda/norm/rmsnorm.cuh"
#include "cuda/site/fwd.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* ---- a lane's place in a tile ------------------------------------------------------------------------------------------- */

/* Eight channels of a token are 16 bytes of a row of a box; a warp has four rows at a time. Of each four boxes these are the
 * rows of its own token. The rows of the boxes that are left over are dealt to the warps in turn, so that no lane is idle.
 * Which warp has a row depends on the tile alone. */
struct site_rows {
    uint32_t streams, f; /* offsets: of stream 0 in a tile, of f behind the streams or in a place of its own */
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
    site_rows own; /* the first four of its own token; the next are four boxes further on */
    int times, left,
        lives[most]; /* times four boxes; boxes left over; tiles in which own rows are of this tensor */

    __device__ __forceinline__ site_share(const site_args &p, const site_block &b, int warp)
        : own(rows_at<N, site_cast<PAIRS>::wide>(p, b, b.lane >> 3, warp)),
          times((PAIRS ? boxes::count : p.boxes) / 4), left((PAIRS ? boxes::count : p.boxes) % 4)
    {
        const int all = b.count - (site_token(p, b, b.count - 1, warp) >= p.tokens);
#pragma unroll
        for (int t = 0; t < most; t++) lives[t] = own.channel + 4 * t * SITE_BOX < p.channels ? all : 0;
    }
    __device__ __forceinline__ bool has_own(int t) const
    {
        return t < times;
    }
    /* Rows left over that are this warp's in tile i. */
    __device__ __forceinline__ bool has_left(int warp, int i) const
    {
        return !boxes::even && ((warp - 2 * left * i) & (SITE_TILE - 1)) < 2 * left;
    }
    __device__ __forceinline__ site_rows left_at(const site_args &p, const site_block &b, int warp, int i) const
    {
        const int row = 4 * ((warp - 2 * left * i) & (SITE_TILE - 1)) + (b.lane >> 3);
        return rows_at<N, site_cast<PAIRS>::wide>(p, b, 4 * times + (row >> 3), row & 7);
    }
};

static __device__ __forceinline__ raw<bf16, 8> take_piece(uint32_t from)
{
    const uint4 v = take_four(from);
    raw<bf16, 8> r;
    r.word[0] = v.x, r.word[1] = v.y, r.word[2] = v.z, r.word[3] = v.w;
    return r;
}

static __device__ __forceinline__ void put_piece(uint32_t to, const raw<bf16, 8> &r)
{
    put_four(to, make_uint4(r.word[0], r.word[1], r.word[2], r.word[3]));
}

/* f of a warp's rows of the next tile, where f has a place of its own: taken into registers as soon as the tile before is mixed, for
 * the place is wanted. */
template <int N, int PAIRS> struct site_f {
    raw<bf16, 8> own[site_share<N, PAIRS>::most] = {}, left = {};
    int taken = 0; /* tiles */

    __device__ __forceinline__ void take(const site_args &p, const site_block &b, const site_share<N, PAIRS> &share,
                                         int warp)
    {
        const uint32_t at = shared_address(b.shared + p.at.f);
#pragma unroll
        for (int t = 0; t < share.most; t++)
            if (share.has_own(t)) own[t] = take_piece(at + share.own.f + t * 4 * BOX_BYTES);
        if (share.has_left(warp, taken)) left = take_piece(at + share.left_at(p, b, warp, taken).f);
        barrier_arrive(b.at.f_empty);
        taken++;
    }
};

/* ---- mixers ------------------------------------------------------------------------------------------------------------- */

/* New streams of one token and 8 channels, in the registers of the old ones. k.w: the matrix as it lies in memory. */
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
    for (int o = 0; o < N; o++) x[o] = take_piece(streams + o * BOX_BYTES);
    if (MODE == PLAIN || live) mix<N, MODE, IN_OUT>(x, f, k, p, mask, token, channel);
#pragma unroll
    for (int o = 0; o < N; o++) put_piece(streams + o * BOX_BYTES, x[o]);
    if (live)
#pragma unroll
        for (int o = 0; o < N; o++) store_once((bf16 *)(to + p.y_at[o]), x[o]);
}

/* 8 channels, rounded. */
template <int N> static __device__ __forceinline__ raw<bf16, 8> aggregate(uint32_t streams, const float (&pre)[N])
{
    raw<bf16, 8> x[N], u;
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = take_piece(streams + i * BOX_BYTES);
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

/* The sum of squares of u of a token's box, to the token's owner, where its sums were: boxes of all blocks in order, one after the
 * other. Eight lanes have the pieces of a box. */
static __device__ __forceinline__ void send_squares(const site_args &p, const site_block &b, int i, int token,
                                                    int box, float piece)
{
    const uint32_t number = (uint32_t)(i * SITE_TILE + token), owner = number & (uint32_t)(p.cluster - 1);
    const uint32_t slot = (number >> p.cluster_log) % (uint32_t)p.slots;
    const uint32_t to =
        shared_address(b.shared + p.at.received) + (slot * p.cluster * SITE_ROW + b.rank * p.boxes + box) * 4;
    const float squares = box_sum(piece);
    if ((b.lane & (BOX_PIECES - 1)) == 0)
        cluster_send(cluster_address(to, owner), squares, cluster_address(b.at.squares + slot * 8, owner));
}

/* A token's factors, read in one go. */
template <int N> struct alignas(N * 4) site_pre {
    float of[N];
};

/* u of rows of a tile to memory and, where it will be normed, in place of stream 0. Returns the sum of the squares of a piece. */
template <int N>
static __device__ __forceinline__ float aggregate_rows(const site_args &p, uint32_t streams,
                                                       const site_pre<N> &from, char *to, bool live)
{
    const site_pre<N> pre = from;
    float v[8];
    const raw<bf16, 8> u = aggregate<N>(streams, pre.of);
    if (live) store_raw((bf16 *)to, u);
    if (!p.norm) return 0.0f;
    put_piece(streams, u);
    unpack(v, u);
    return piece_squares(v);
}

static __device__ __forceinline__ void norm_rows(const site_args &p, uint32_t at, float inverse, int64_t token,
                                                 int channel)
{
    float x[8], w[8];
    unpack(x, take_piece(at));
    if (has(p.sub_weight)) get_param<8>(w, p.sub_weight, channel);
#pragma unroll
    for (int k = 0; k < 8; k++) x[k] = has(p.sub_weight) ? x[k] * inverse * w[k] : x[k] * inverse * 1.0f;
    store<bf16, 8>(p.v + token * p.v_token + channel, x);
}

/* Does whatever can be done next, and first what frees a place in the ring. */
template <int N, site_kind KIND, post_mode MODE, bool IN_OUT, int PAIRS>
static __device__ __forceinline__ void mixer(const site_args &p, const site_block &b, int warp)
{
    typedef site_boxes<N, PAIRS> boxes;
    const site_share<N, PAIRS> share(p, b, warp);
    const uint32_t tiles = shared_address(b.shared + p.at.tiles);
    const coefs<N> *const coef = (const coefs<N> *)(b.shared + p.at.coef);
    const site_pre<N> *const pre = (const site_pre<N> *)(b.shared + p.at.pre);
    const int64_t first = site_token(p, b, 0, warp);
    char *y = (char *)(p.y + first * p.y_token + share.own.channel);
    char *u = (char *)(p.u + first * p.u_token + share.own.channel);
    const bool wants_u = p.u != nullptr;
    constexpr bool APART = KIND == SITE_BOUNDARY && site_cast<PAIRS>::wide;
    int mixed = KIND == SITE_BOUNDARY ? 0 : b.count, summed = 0, normed = 0; /* tiles */
    site_cursor now, then, last;
    site_f<N, PAIRS> f;
    weft_mask mask = {};
    if constexpr (KIND == SITE_BOUNDARY && MODE == FULL) {
        wait_for_previous();
        mask = weft_mask_open(&p.dropout, p.channels);
    }
    cluster_wait_for_all();
#pragma unroll 1
    while ((p.norm ? normed : summed) < b.count) {
        if constexpr (APART)
            if (f.taken == mixed && mixed < b.count && is_over(b.at.f_full, mixed & 1)) f.take(p, b, share, warp);
        if (p.norm && normed < summed && is_over(b.at.inverse + last.stage * 8, last.parity)) {
            const uint32_t tile = tiles + last.stage * p.at.stage;
            const float *const inverse = (const float *)(b.shared + p.at.inverse) + last.stage * SITE_TILE;
#pragma unroll
            for (int t = 0; t < share.most; t++)
                if (share.has_own(t) && normed < share.lives[t])
                    norm_rows(p, tile + share.own.streams + t * 4 * N * BOX_BYTES, inverse[warp],
                              site_token(p, b, normed, warp), share.own.channel + t * 4 * SITE_BOX);
            if constexpr (!boxes::even)
                if (share.has_left(warp, normed)) {
                    const site_rows m = share.left_at(p, b, warp, normed);
                    const int64_t token = site_token(p, b, normed, m.token);
                    if (token < p.tokens && m.channel < p.channels)
                        norm_rows(p, tile + m.streams, inverse[m.token], token, m.channel);
                }
            barrier_arrive(b.at.empty + last.stage * 8);
            last.next(p.stages), normed++;
        } else if (summed < mixed && is_over(b.at.pre + then.stage * 8, then.parity)) {
            const uint32_t tile = tiles + then.stage * p.at.stage;
#pragma unroll
            for (int t = 0; t < share.most; t++)
                if (share.has_own(t)) {
                    const float piece = aggregate_rows<N>(p, tile + share.own.streams + t * 4 * N * BOX_BYTES,
                                                          pre[then.stage * SITE_TILE + warp], u + t * 4 * TMA_ROW,
                                                          wants_u && summed < share.lives[t]);
                    if (p.norm) send_squares(p, b, summed, warp, 4 * t + (b.lane >> 3), piece);
                }
            if constexpr (!boxes::even)
                if (share.has_left(warp, summed)) {
                    const site_rows m = share.left_at(p, b, warp, summed);
                    const int64_t token = site_token(p, b, summed, m.token);
                    const float piece =
                        aggregate_rows<N>(p, tile + m.streams, pre[then.stage * SITE_TILE + m.token],
                                          (char *)(p.u + token * p.u_token + m.channel),
                                          wants_u && token < p.tokens && m.channel < p.channels);
                    if (p.norm)
                        send_squares(p, b, summed, m.token, (m.channel - b.first_channel) / SITE_BOX, piece);
                }
            if (!p.norm) barrier_arrive(b.at.empty + then.stage * 8);
            u += p.u_step, then.next(p.stages), summed++;
        } else if (KIND == SITE_BOUNDARY && mixed < (APART ? f.taken : b.count) &&
                   is_over(b.at.full + now.stage * 8, now.parity)) {
            const uint32_t tile = tiles + now.stage * p.at.stage;
#pragma unroll
            for (int t = 0; t < share.most; t++)
                if (share.has_own(t))
                    mix_rows<N, MODE, IN_OUT>(
                        p, mask, tile + share.own.streams + t * 4 * N * BOX_BYTES,
                        APART ? f.own[t] : take_piece(tile + share.own.f + t * 4 * BOX_BYTES),
                        coef[now.stage * SITE_TILE + warp], y + t * 4 * TMA_ROW, mixed < share.lives[t],
                        MODE == PLAIN ? 0 : site_token(p, b, mixed, warp), share.own.channel + t * 4 * SITE_BOX);
            if constexpr (boxes::split) barrier_arrive(b.at.mixed + now.stage * 8);
            if constexpr (!boxes::even)
                if (share.has_left(warp, mixed)) {
                    const site_rows m = share.left_at(p, b, warp, mixed);
                    const int64_t token = site_token(p, b, mixed, m.token);
                    mix_rows<N, MODE, IN_OUT>(p, mask, tile + m.streams, APART ? f.left : take_piece(tile + m.f),
                                              coef[now.stage * SITE_TILE + m.token],
                                              (char *)(p.y + token * p.y_token + m.channel),
                                              token < p.tokens && m.channel < p.channels, token, m.channel);
                    if constexpr (boxes::split) barrier_arrive(b.at.mixed_left + now.stage * 8);
                }
            if constexpr (!boxes::split) barrier_arrive(b.at.mixed + now.stage * 8);
            y += p.y_step, now.next(p.stages), mixed++;
        } else {
            __nanosleep(20);
        }
    }
}

#endif
#endif
