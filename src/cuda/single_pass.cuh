/* SPDX-License-Identifier: Apache-2.0
 *
 * A site of mHC in one launch [M9] [M10] [M11]: post makes the new streams y (or they are there: x), the projection and the
 * mean square of y are summed, coefficients follow, and u = sum_i pre[i] y[i], normed where asked. Bytes of memory a token,
 * bf16, four streams: reads 10C, writes 10C; without post reads 8C, writes 2C.
 *
 * A token's coefficients need all of its channels, and the aggregate needs the coefficients. So a token is dealt to the
 * blocks of a cluster, each of which keeps its channels of a tile of eight tokens in shared memory until the coefficients
 * have come back: about 25 floats a token go to one block, the token's owner, and four come from there. Nobody waits for
 * the tile at hand.
 *
 *   mixers      8 warps, a token each. Post, in place and to memory; when pre has come the aggregate, later yet the norm.
 *   projectors  8 warps, a share of the columns each, whose part of psi is in their registers (what does not fit: in shared
 *               memory). Tensor cores; then each warp adds the eight warps' sums of one token and sends them to its owner.
 *   bringer     one warp. Lets the copy engine fill the ring of tiles, and brings the coefficients of post.
 *   owner       one warp. Adds the slices of a token in order, makes the gates, sends pre to all blocks.
 *   normer      one warp. The same for the sum of squares of u.
 *   clerk       one warp. Makes matrices of logits, eight tokens at a time, one a lane: nobody in this launch waits for them.
 *
 * Sums are added in an order that follows from streams and channels alone. What must not be overwritten: a block sends
 * nothing of a tile before it has freed the stage of that tile, which it does when pre of the stage's last tile has come, and
 * that was sent after everything received for it had been read. */
#ifndef WEFT_CUDA_SINGLE_PASS_CUH
#define WEFT_CUDA_SINGLE_PASS_CUH

#include "cuda/common/cluster.cuh"
#include "cuda/common/reduce.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/mhc_post.cuh"
#include "cuda/mhc_project.cuh"
#include "cuda/single_pass_plan.h"
#include "cuda/token_math.cuh"

enum {
    PROJECTORS = SITE_TILE,
    MIXERS = SITE_TILE,
    FIRST_MIXER = PROJECTORS,
    BRINGER = FIRST_MIXER + MIXERS,
    OWNER,
    NORMER,
    CLERK,
    SITE_WARPS,
    BOX_BYTES = SITE_TILE * TMA_ROW
};
/* Registers are handed from the others to the projectors: 61440 in all, which is what 640 threads can have at launch. */
enum { PROJECTOR_REGISTERS = 128, MIXER_REGISTERS = 88, SERVER_REGISTERS = 48 };

struct site_args {
    CUtensorMap x, f, psi; /* psi: rows in place of tokens */
    /* post */
    view bias, post, res;
    weft_dropout dropout;
    bf16 *y;
    int64_t y_token, y_step, y_at[4]; /* step: bytes from a tile of a cluster to its next; at: to each stream */
    /* the site */
    view alpha, beta;
    gate_numbers numbers;
    view pre_in, h, ms, pre, post_out, res_out;
    bf16 *u, *v; /* or NULL */
    int64_t u_token, v_token, u_step;
    view sub_weight;
    float sub_eps;
    float mean; /* 1 / nC */
    int64_t tokens;
    int32_t channels, cluster, cluster_log, boxes, pairs, stages, psi_boxes, early, slots, tiles, clusters;
    bool norm, coef_lines, res_lines; /* norm: v is wanted; lines: coefficients can be moved N floats at a time */
    weft_site_room at;
};

/* What makes the streams. */
enum site_kind { SITE_HEAD, SITE_PRE, SITE_BOUNDARY };

/* Rows of the projection on tensor cores, psi on the side of 16: hi and lo of a row are both rows there, and D adds up
 * what belongs together. 24 rows: hi of 0-15 | lo of 0-15 | hi, lo of 16-23. Up to 8 rows: hi, lo. */
template <int N, site_kind KIND> struct site_shape {
    static constexpr int rows = KIND == SITE_HEAD ? N : 2 * N + N * N, tiles = rows > 8 ? 3 : 1, width = rows + 1;
    static constexpr int psi_box = rows * N * TMA_ROW, psi_place = (psi_box + 1023) / 1024 * 1024; /* 32 channels */
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

template <int COUNT, bool MORE> static __device__ __forceinline__ void set_registers()
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (MORE)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
    else
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

/* Addresses of barriers, an array of each kind. By stage: a tile has come, is mixed, may be overwritten; pre, the norm's
 * factors have come. By slot: sums, squares of a token have come. Logits: a batch is there, is taken. psi: some of it is
 * there, is taken. */
struct site_barriers {
    uint32_t full, mixed, empty, pre, inverse, sums, squares, logits_full, logits_empty, psi_full, psi_empty;
};

/* What every warp knows. */
struct site_block {
    char *shared;
    site_barriers at;
    uint32_t rank, cluster;
    int32_t count, first_channel; /* tiles of this cluster; channels from here on are this block's */
    int lane;
};

/* A place in the ring. */
struct site_cursor {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next(int stages)
    {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

static __device__ __forceinline__ int64_t site_token(const site_args &p, const site_block &b, int tile, int row)
{
    return ((int64_t)b.cluster + (int64_t)tile * p.clusters) * SITE_TILE + row;
}

/* Tokens of a cluster are dealt to its blocks one by one: who owns token `row` of a tile, and which of the owner's slots is
 * that token's. */
struct site_deal {
    uint32_t number, slot = 0;

    __device__ __forceinline__ site_deal(const site_args &p, uint32_t row) : number(row)
    {
        slot = row >> p.cluster_log;
        while (slot >= (uint32_t)p.slots) slot -= p.slots;
    }
    __device__ __forceinline__ uint32_t owner(const site_args &p) const
    {
        return number & (uint32_t)(p.cluster - 1);
    }
    __device__ __forceinline__ void next_tile(const site_args &p)
    {
        const uint32_t before = number >> p.cluster_log;
        number += SITE_TILE;
        slot += (number >> p.cluster_log) - before;
        if (slot >= (uint32_t)p.slots) slot -= p.slots;
    }
};

/* ---- bringer ------------------------------------------------------------------------------------------------------------ */

/* A line of N floats, or one float; zeros where it is not there. */
template <int BYTES> static __device__ __forceinline__ void copy_line(uint32_t to, const void *from, bool valid)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES),
                 "r"(valid ? BYTES : 0)
                 : "memory");
}

/* An arrival on the barrier when what this thread copied is there. */
static __device__ __forceinline__ void copy_arrive(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

/* Coefficients of post: a lane copies the same lines of every tile, so it walks along them. A token has post and the rows of
 * the matrix, as they lie in memory. */
template <int N> struct site_lines {
    static constexpr int each = N + 1, rounds = (SITE_TILE * each + 31) / 32;
    const char *from[rounds];
    int64_t step[rounds];
    int token[rounds]; /* of a tile; SITE_TILE: there is none */

    __device__ __forceinline__ void begin(const site_args &p, const site_block &b)
    {
#pragma unroll
        for (int r = 0; r < rounds; r++) {
            const int e = r * 32 + b.lane, line = e % each;
            const view &v = line == 0 ? p.post : p.res;
            token[r] = e / each < SITE_TILE ? e / each : SITE_TILE;
            from[r] =
                v.data + (site_token(p, b, 0, token[r]) * v.stride[0] + (line ? line - 1 : 0) * v.stride[1]) * 4;
            step[r] = (int64_t)p.clusters * SITE_TILE * v.stride[0] * 4;
        }
    }
    __device__ __forceinline__ void copy(const site_args &p, const site_block &b, int64_t first, uint32_t to)
    {
#pragma unroll
        for (int r = 0; r < rounds; r++) {
            const bool valid = first + token[r] < p.tokens;
            if (token[r] < SITE_TILE)
                copy_line<N * 4>(to + (r * 32 + b.lane) * N * 4, valid ? from[r] : p.post.data, valid);
            from[r] += step[r];
        }
    }
};

/* Coefficients that do not lie in lines, a float at a time. */
template <int N>
static __device__ __noinline__ void copy_loose(const site_args &p, const site_block &b, int64_t first, uint32_t to)
{
    constexpr int EACH = N + N * N;
#pragma unroll 1
    for (int e = b.lane; e < SITE_TILE * EACH; e += 32) {
        const int row = e / EACH, k = e - row * EACH - N;
        const bool valid = first + row < p.tokens;
        const int64_t token = valid ? first + row : 0;
        const int64_t at = k < 0 ? token * p.post.stride[0] + (k + N) * p.post.stride[1]
                                 : token * p.res.stride[0] + k / N * p.res.stride[1] + k % N * p.res.stride[2];
        copy_line<4>(to + e * 4, (k < 0 ? p.post.data : p.res.data) + at * 4, valid);
    }
}

/* One lane: psi of boxes of 64 channels from `box` on, as many as have room. */
template <int N, site_kind KIND>
static __device__ __forceinline__ void bring_psi(const site_args &p, const site_block &b, int box)
{
    typedef site_shape<N, KIND> shape;
    const int count = 2 * (p.boxes - box < p.psi_boxes ? p.boxes - box : p.psi_boxes);
    uint32_t to = shared_address(b.shared) + p.at.first_psi;
    int channel = b.first_channel + box * SITE_BOX;
    tma_expect(b.at.psi_full, (uint32_t)(count * shape::psi_box));
#pragma unroll 1
    for (int k = 0; k < count; k++, to += shape::psi_place, channel += TMA_ROW / 4)
        tma_load(to, &p.psi, channel, 0, b.at.psi_full);
}

/* The rest of psi; afterwards its place is free. */
template <int N, site_kind KIND>
static __device__ __forceinline__ void bring_rest(const site_args &p, const site_block &b)
{
    uint32_t parity = 0;
#pragma unroll 1
    for (int box = p.psi_boxes; box < p.boxes; box += p.psi_boxes, parity ^= 1) {
        barrier_wait(b.at.psi_empty, parity);
        if (b.lane == 0) bring_psi<N, KIND>(p, b, box);
        __syncwarp();
    }
    barrier_wait(b.at.psi_empty, parity);
}

/* Barriers for what comes back of a tile are armed before the tile is there. */
template <int N, site_kind KIND>
static __device__ __forceinline__ void bring(const site_args &p, const site_block &b)
{
    constexpr bool POST = KIND == SITE_BOUNDARY;
    const uint32_t tiles = shared_address(b.shared), coef = shared_address(b.shared + p.at.coef);
    const uint32_t pre = shared_address(b.shared + p.at.pre) + b.lane * 4;
    site_lines<N> lines;
    site_cursor c;
#pragma unroll 1
    for (int i = 0; i < b.count; i++, c.next(p.stages)) {
        const uint32_t barrier = b.at.full + c.stage * 8;
        const int64_t token = site_token(p, b, i, 0);
        if (i == p.early) bring_rest<N, KIND>(p, b);
        barrier_wait(b.at.empty + c.stage * 8, c.parity ^ 1);
        if (b.lane == 0) {
            uint32_t to = tiles + c.stage * p.at.stage;
            tma_publish(); /* what the mixers wrote here comes before what the copy engine writes */
            tma_expect(barrier, (uint32_t)p.boxes * (N + POST) * BOX_BYTES);
#pragma unroll 1
            for (int k = 0; k < p.boxes; k++, to += N * BOX_BYTES)
                tma_load(to, &p.x, b.first_channel + k * SITE_BOX, (int)token, barrier);
            if constexpr (POST)
#pragma unroll 1
                for (int k = 0; k < p.boxes; k++, to += BOX_BYTES)
                    tma_load(to, &p.f, b.first_channel + k * SITE_BOX, (int)token, barrier);
            if (i == 0) bring_psi<N, KIND>(p, b, 0);
            tma_expect(b.at.pre + c.stage * 8, SITE_TILE * N * 4);
            if (p.norm) tma_expect(b.at.inverse + c.stage * 8, SITE_TILE * 4);
        }
        __syncwarp();
        if constexpr (POST) {
            const uint32_t at = coef + c.stage * (SITE_TILE * (N + N * N) * 4);
            if (i == 0) lines.begin(p, b);
            if (p.coef_lines)
                lines.copy(p, b, token, at);
            else
                copy_loose<N>(p, b, token, at);
        }
        if (has(p.pre_in)) {
            const int row = b.lane / N;
            const bool valid = token + row < p.tokens;
            const int64_t at = valid ? (token + row) * p.pre_in.stride[0] + b.lane % N * p.pre_in.stride[1] : 0;
            if (row < SITE_TILE) copy_line<4>(pre + c.stage * (SITE_TILE * N * 4), p.pre_in.data + at * 4, valid);
        }
        if (POST || has(p.pre_in)) copy_arrive(barrier);
        if (i == 0) cluster_wait_for_all();
    }
    if (b.count <= p.early) bring_rest<N, KIND>(p, b);
}

/* ---- a lane's place in a tile ------------------------------------------------------------------------------------------- */

/* Eight channels of a token are 16 bytes of a row of a box; a warp has four rows at a time. Of each four boxes these are the
 * rows of its own token. The rows of the boxes that are left over are dealt to the warps in turn, so that no lane is idle.
 * Which warp has a row depends on the tile alone. */
struct site_rows {
    uint32_t streams, f; /* offsets in a tile: of stream 0, of f */
    int token, channel;  /* token: of the tile */
};

template <int N>
static __device__ __forceinline__ site_rows rows_at(const site_args &p, const site_block &b, int box, int token)
{
    const uint32_t piece = tma_piece(token, b.lane & 7);
    return {piece + box * N * BOX_BYTES, piece + (p.boxes * N + box) * BOX_BYTES, token,
            b.first_channel + box * SITE_BOX + (b.lane & 7) * 8};
}

template <int N, int PAIRS> struct site_share {
    static constexpr bool even = PAIRS == SITE_FEW_PAIRS; /* nothing is left over, */
    static constexpr int fixed = PAIRS / N;               /* and each token has so many times four boxes */
    static constexpr int most = even ? fixed : SITE_MANY_PAIRS / N;
    site_rows own; /* the first four of its own token; the next are four boxes further on */
    int times, left,
        lives[most]; /* times four boxes; boxes left over; tiles in which own rows are of this tensor */

    __device__ __forceinline__ site_share(const site_args &p, const site_block &b, int warp)
        : own(rows_at<N>(p, b, b.lane >> 3, warp)), times(p.boxes / 4), left(p.boxes % 4)
    {
        const int all = b.count - (site_token(p, b, b.count - 1, warp) >= p.tokens);
#pragma unroll
        for (int t = 0; t < most; t++) lives[t] = own.channel + 4 * t * SITE_BOX < p.channels ? all : 0;
    }
    __device__ __forceinline__ bool has_own(int t) const
    {
        return even || t < times;
    }
    /* Rows left over that are this warp's in tile i. */
    __device__ __forceinline__ bool has_left(int warp, int i) const
    {
        return !even && ((warp - 2 * left * i) & (SITE_TILE - 1)) < 2 * left;
    }
    __device__ __forceinline__ site_rows left_at(const site_args &p, const site_block &b, int warp, int i) const
    {
        const int row = 4 * ((warp - 2 * left * i) & (SITE_TILE - 1)) + (b.lane >> 3);
        return rows_at<N>(p, b, 4 * times + (row >> 3), row & 7);
    }
};

/* The compiler would make four accesses of 4 bytes. */
static __device__ __forceinline__ raw<bf16, 8> take_piece(uint32_t from)
{
    raw<bf16, 8> r;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.word[0]), "=r"(r.word[1]), "=r"(r.word[2]), "=r"(r.word[3])
                 : "r"(from)
                 : "memory");
    return r;
}

static __device__ __forceinline__ void put_piece(uint32_t to, const raw<bf16, 8> &r)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r.word[0]), "r"(r.word[1]),
                 "r"(r.word[2]), "r"(r.word[3])
                 : "memory");
}

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
                                                uint32_t f_at, const coefs<N> &k, char *to, bool live,
                                                int64_t token, int channel)
{
    raw<bf16, 8> x[N];
#pragma unroll
    for (int o = 0; o < N; o++) x[o] = take_piece(streams + o * BOX_BYTES);
    const raw<bf16, 8> f = take_piece(f_at);
    if (MODE == PLAIN || live) mix<N, MODE, IN_OUT>(x, f, k, p, mask, token, channel);
#pragma unroll
    for (int o = 0; o < N; o++) put_piece(streams + o * BOX_BYTES, x[o]);
    if (live)
#pragma unroll
        for (int o = 0; o < N; o++) store_raw((bf16 *)(to + p.y_at[o]), x[o]);
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

/* A part of the sum of squares of u of a token, to its owner: part 0 from the token's own warp, the others from the boxes that
 * were left over. */
static __device__ __forceinline__ void send_squares(const site_args &p, const site_block &b, int i, int token,
                                                    int part, float squares)
{
    const uint32_t number = (uint32_t)(i * SITE_TILE + token), owner = number & (uint32_t)(p.cluster - 1);
    const uint32_t slot = (number >> p.cluster_log) % (uint32_t)p.slots;
    const uint32_t to = shared_address(b.shared + p.at.squares) + ((slot * p.cluster + b.rank) * 4 + part) * 4;
    cluster_send(cluster_address(to, owner), squares, cluster_address(b.at.squares + slot * 8, owner));
}

/* A token's factors, read in one go. */
template <int N> struct alignas(N * 4) site_pre {
    float of[N];
};

/* u of rows of a tile to memory and, where it will be normed, in place of stream 0. Returns the sum of its squares. */
template <int N>
static __device__ __forceinline__ float aggregate_rows(const site_args &p, uint32_t streams,
                                                       const site_pre<N> &from, char *to, bool live)
{
    const site_pre<N> pre = from;
    float v[8], squares = 0.0f;
    const raw<bf16, 8> u = aggregate<N>(streams, pre.of);
    if (live) store_raw((bf16 *)to, u);
    if (!p.norm) return 0.0f;
    put_piece(streams, u);
    unpack(v, u);
#pragma unroll
    for (int k = 0; k < 8; k++) squares = fmaf(v[k], v[k], squares);
    return squares;
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

/* A barrier as the whole warp sees it. */
static __device__ __forceinline__ bool is_over(uint32_t barrier, uint32_t parity)
{
    return __any_sync(0xffffffffu, barrier_test(barrier, parity));
}

/* Does whatever can be done next, and first what frees a place in the ring. */
template <int N, site_kind KIND, post_mode MODE, bool IN_OUT, int PAIRS>
static __device__ __forceinline__ void mixer(const site_args &p, const site_block &b, int warp)
{
    const site_share<N, PAIRS> share(p, b, warp);
    const uint32_t tiles = shared_address(b.shared);
    const coefs<N> *const coef = (const coefs<N> *)(b.shared + p.at.coef);
    const site_pre<N> *const pre = (const site_pre<N> *)(b.shared + p.at.pre);
    const int64_t first = site_token(p, b, 0, warp);
    char *y = (char *)(p.y + first * p.y_token + share.own.channel);
    char *u = (char *)(p.u + first * p.u_token + share.own.channel);
    const bool wants_u = p.u != nullptr;
    int mixed = KIND == SITE_BOUNDARY ? 0 : b.count, summed = 0, normed = 0; /* tiles */
    site_cursor now, then, last;
    weft_mask mask = {};
    if constexpr (KIND == SITE_BOUNDARY && MODE == FULL) mask = weft_mask_open(&p.dropout, p.channels);
    cluster_wait_for_all();
#pragma unroll 1
    while ((p.norm ? normed : summed) < b.count) {
        if (p.norm && normed < summed && is_over(b.at.inverse + last.stage * 8, last.parity)) {
            const uint32_t tile = tiles + last.stage * p.at.stage;
            const float *const inverse = (const float *)(b.shared + p.at.inverse) + last.stage * SITE_TILE;
#pragma unroll
            for (int t = 0; t < share.most; t++)
                if (share.has_own(t) && normed < share.lives[t])
                    norm_rows(p, tile + share.own.streams + t * 4 * N * BOX_BYTES, inverse[warp],
                              site_token(p, b, normed, warp), share.own.channel + t * 4 * SITE_BOX);
            if constexpr (!share.even)
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
            float squares = 0.0f;
#pragma unroll
            for (int t = 0; t < share.most; t++)
                if (share.has_own(t))
                    squares += aggregate_rows<N>(p, tile + share.own.streams + t * 4 * N * BOX_BYTES,
                                                 pre[then.stage * SITE_TILE + warp], u + t * 4 * TMA_ROW,
                                                 wants_u && summed < share.lives[t]);
            if constexpr (!share.even)
                if (share.has_left(warp, summed)) {
                    const site_rows m = share.left_at(p, b, warp, summed);
                    const int64_t token = site_token(p, b, summed, m.token);
                    float more = aggregate_rows<N>(p, tile + m.streams, pre[then.stage * SITE_TILE + m.token],
                                                   (char *)(p.u + token * p.u_token + m.channel),
                                                   wants_u && token < p.tokens && m.channel < p.channels);
                    if (p.norm) {
                        const int part = 1 + (m.channel - b.first_channel) / SITE_BOX - 4 * share.times;
#pragma unroll
                        for (int step = 4; step > 0; step >>= 1) more += __shfl_xor_sync(0xffffffffu, more, step);
                        if ((b.lane & 7) == 0) send_squares(p, b, summed, m.token, part, more);
                    }
                }
            if (p.norm) {
                squares = warp_sum(squares);
                if (b.lane == 0) send_squares(p, b, summed, warp, 0, squares);
            } else {
                barrier_arrive(b.at.empty + then.stage * 8);
            }
            u += p.u_step, then.next(p.stages), summed++;
        } else if (KIND == SITE_BOUNDARY && mixed < b.count && is_over(b.at.full + now.stage * 8, now.parity)) {
            const uint32_t tile = tiles + now.stage * p.at.stage;
#pragma unroll
            for (int t = 0; t < share.most; t++)
                if (share.has_own(t))
                    mix_rows<N, MODE, IN_OUT>(
                        p, mask, tile + share.own.streams + t * 4 * N * BOX_BYTES,
                        tile + share.own.f + t * 4 * BOX_BYTES, coef[now.stage * SITE_TILE + warp],
                        y + t * 4 * TMA_ROW, mixed < share.lives[t],
                        MODE == PLAIN ? 0 : site_token(p, b, mixed, warp), share.own.channel + t * 4 * SITE_BOX);
            if constexpr (!share.even)
                if (share.has_left(warp, mixed)) {
                    const site_rows m = share.left_at(p, b, warp, mixed);
                    const int64_t token = site_token(p, b, mixed, m.token);
                    mix_rows<N, MODE, IN_OUT>(p, mask, tile + m.streams, tile + m.f,
                                              coef[now.stage * SITE_TILE + m.token],
                                              (char *)(p.y + token * p.y_token + m.channel),
                                              token < p.tokens && m.channel < p.channels, token, m.channel);
                }
            barrier_arrive(b.at.mixed + now.stage * 8);
            y += p.y_step, now.next(p.stages), mixed++;
        } else {
            __nanosleep(20);
        }
    }
}

/* ---- projectors: psi ---------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ float2 take_two(uint32_t from)
{
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
    return v;
}

/* psi for the 32 columns of a pair of steps, which are a box of 32 channels of one stream, as operands of the tensor cores.
 * from: rows of the stream in that box; first: the first one's number in the box. */
template <int ROWS, int TILES>
static __device__ __forceinline__ void take_psi(uint4 (&to)[2 * TILES], uint32_t from, int first, int lane)
{
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int s = 0; s < 2; s++) {
        uint2 hi[TILES], lo[TILES]; /* of eight rows; .x: columns 2t, 2t + 1; .y: eight behind these */
#pragma unroll
        for (int q = 0; q < TILES; q++) {
            float2 v[2] = {};
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const int row = first + g + 8 * q;
                if (ROWS % 8 == 0 || g < ROWS)
                    v[k] = take_two(from + tma_piece(row, 4 * s + 2 * k + (t >> 1)) + (t & 1) * 8);
            }
            split2(hi[q].x, lo[q].x, v[0].x, v[0].y);
            split2(hi[q].y, lo[q].y, v[1].x, v[1].y);
        }
        uint4 *const out = to + s * TILES;
        if constexpr (TILES == 3) {
            out[0] = make_uint4(hi[0].x, hi[1].x, hi[0].y, hi[1].y);
            out[1] = make_uint4(lo[0].x, lo[1].x, lo[0].y, lo[1].y);
            out[2] = make_uint4(hi[2].x, lo[2].x, hi[2].y, lo[2].y);
        } else {
            out[0] = make_uint4(hi[0].x, lo[0].x, hi[0].y, lo[0].y);
        }
    }
}

/* ---- projectors --------------------------------------------------------------------------------------------------------- */

/* What a warp sums of a tile. */
template <int TILES> struct site_sums {
    float d[TILES == 3 ? 2 : 1][4] = {}, squares[4] = {};
};

template <int TILES>
static __device__ __forceinline__ void multiply(site_sums<TILES> &s, const uint4 *a, uint32_t b0, uint32_t b1)
{
    mma16(s.d[0], a[0].x, a[0].y, a[0].z, a[0].w, b0, b1);
    if constexpr (TILES == 3) {
        mma16(s.d[1], a[2].x, a[2].y, a[2].z, a[2].w, b0, b1);
        mma16(s.d[0], a[1].x, a[1].y, a[1].z, a[1].w, b0, b1);
    }
    mma16(s.squares, b0, 0, b1, 0, b0, b1); /* the operand is its own transpose: squares are the diagonal */
}

/* To [token][row]. D has row g (and g + 8) of tokens 2t, 2t + 1. */
template <int N, site_kind KIND>
static __device__ __forceinline__ void leave_sums(float *to, const site_sums<site_shape<N, KIND>::tiles> &s,
                                                  int lane)
{
    typedef site_shape<N, KIND> shape;
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        float *const row = to + (2 * t + e) * shape::width;
        if constexpr (shape::tiles == 3) {
            row[g] = s.d[0][e];
            row[g + 8] = s.d[0][2 + e];
            row[g + 16] = s.d[1][e] + s.d[1][2 + e];
        } else {
            if (g < shape::rows) row[g] = s.d[0][e] + s.d[0][2 + e];
        }
    }
    if (t == g >> 1) to[g * shape::width + shape::rows] = g & 1 ? s.squares[1] : s.squares[0];
}

static __device__ __forceinline__ void projectors_sync()
{
    asm volatile("bar.sync 1, %0;" ::"n"(PROJECTORS * 32) : "memory");
}

/* psi of a warp: what it keeps in registers and what it reads from shared memory. */
template <int N, site_kind KIND, int PAIRS> struct site_psi {
    typedef site_shape<N, KIND> shape;
    static constexpr int T = shape::tiles, all = PAIRS * 2 * T, count = all < SITE_KEPT ? all : SITE_KEPT;
    uint4 kept[count];
    const uint4 *rest;

    /* Takes what the bringer brings, some boxes at a time. */
    __device__ __forceinline__ site_psi(const site_args &p, const site_block &b, int warp)
    {
        uint4 *const more = (uint4 *)(b.shared + p.at.psi) + warp * 32 + b.lane;
        const uint32_t from = shared_address(b.shared) + p.at.first_psi;
        uint32_t parity = 0;
        rest = more;
#pragma unroll
        for (int k = 0; k < count; k++) kept[k] = make_uint4(0, 0, 0, 0);
#pragma unroll 1
        for (int first = 0; first < p.boxes; first += p.psi_boxes, parity ^= 1) {
            barrier_wait(b.at.psi_full, parity);
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
                const int pair = warp * p.pairs + j, box = (pair >> 1) / N, stream = (pair >> 1) % N;
                uint4 a[2 * T];
                if (PAIRS != SITE_FEW_PAIRS && j >= p.pairs) continue;
                if (box < first || box >= first + p.psi_boxes) continue;
                take_psi<shape::rows, T>(a, from + (2 * (box - first) + (pair & 1)) * shape::psi_place,
                                         stream * shape::rows, b.lane);
#pragma unroll
                for (int e = 0; e < 2 * T; e++) {
                    const int k = j * 2 * T + e;
                    if (k < count)
                        kept[k < count ? k : 0] = a[e];
                    else
                        more[(k - count) * (PROJECTORS * 32)] = a[e];
                }
            }
            barrier_arrive(b.at.psi_empty);
        }
    }
    /* Operands of step s. */
    __device__ __forceinline__ void step(uint4 (&a)[T], int s) const
    {
#pragma unroll
        for (int q = 0; q < T; q++) {
            const int k = s * T + q;
            a[q] = k < count ? kept[k < count ? k : 0] : rest[(k - count) * (PROJECTORS * 32)];
        }
    }
};

template <int N, site_kind KIND, int PAIRS>
static __device__ __forceinline__ void projector(const site_args &p, const site_block &b, int warp)
{
    typedef site_shape<N, KIND> shape;
    constexpr int T = shape::tiles, ROOM = SITE_TILE * shape::width;
    const site_psi<N, KIND, PAIRS> psi(p, b, warp);
    const int first = warp * p.pairs;
    const uint32_t tiles = shared_address(b.shared);
    const uint32_t received = shared_address(b.shared + p.at.received) + (b.rank * SITE_ROW + b.lane) * 4;
    /* Pair j of this warp is half (pair & 1) of a box of one stream, pair >> 1: bit 6 of where its pieces lie. */
    const uint32_t piece = (b.lane & 7) * TMA_ROW + (((b.lane >> 3) ^ (b.lane & 7)) << 4);
    float *const room = (float *)(b.shared + p.at.sums);
    site_deal deal(p, warp);
    site_cursor c;
    cluster_wait_for_all();
#pragma unroll 1
    for (int i = 0; i < b.count; i++, c.next(p.stages), deal.next_tile(p)) {
        site_sums<T> s;
        const uint32_t from = tiles + c.stage * p.at.stage + piece;
        barrier_wait((KIND == SITE_BOUNDARY ? b.at.mixed : b.at.full) + c.stage * 8, c.parity);
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            uint32_t y[4];
            if (PAIRS > SITE_FEW_PAIRS && j >= p.pairs) break;
            ldmatrix4(y, (from + ((first + j) >> 1) * BOX_BYTES) ^ (((first + j) & 1) << 6));
#pragma unroll
            for (int k = 0; k < 2; k++) {
                uint4 a[T];
                psi.step(a, j * 2 + k);
                multiply<T>(s, a, y[2 * k], y[2 * k + 1]);
            }
        }
        /* Two rooms in turn, or one and another wait: others may still add what lies there. */
        float *const sums = room + (PAIRS == SITE_FEW_PAIRS && (i & 1) ? PROJECTORS * ROOM : 0);
        leave_sums<N, KIND>(sums + warp * ROOM, s, b.lane);
        projectors_sync();
        if (b.lane < shape::width) {
            const uint32_t owner = deal.owner(p);
            const float *const all = sums + warp * shape::width + b.lane;
            float v = 0.0f;
#pragma unroll
            for (int w = 0; w < PROJECTORS; w++) v += all[w * ROOM];
            cluster_send(cluster_address(received + deal.slot * p.cluster * (SITE_ROW * 4), owner), v,
                         cluster_address(b.at.sums + deal.slot * 8, owner));
        }
        if (PAIRS != SITE_FEW_PAIRS) projectors_sync();
    }
}

/* ---- owner, normer, clerk ----------------------------------------------------------------------------------------------- */

/* Tokens of this cluster, without those behind the last. */
static __device__ __forceinline__ int64_t site_live(const site_args &p, const site_block &b)
{
    const int64_t cut = site_token(p, b, b.count - 1, SITE_TILE) - p.tokens;
    return (int64_t)b.count * SITE_TILE - (cut > 0 ? cut : 0);
}

/* What a tensor keeps of v. */
static __device__ __forceinline__ float as_stored(const view &to, float v)
{
    return to.dtype == WEFT_BF16 ? rounded<bf16>(v) : to.dtype == WEFT_F16 ? rounded<f16>(v) : v;
}

/* The same four floats (or two) to the same place of every block. */
template <int N>
static __device__ __forceinline__ void to_all(const site_args &p, const site_block &b, uint32_t at,
                                              const float (&v)[N], uint32_t barrier)
{
    if (b.lane < p.cluster) cluster_send(cluster_address(at, b.lane), v, cluster_address(barrier, b.lane));
}

/* Where pre_in is given nobody waits for the values, but everybody does for the barrier: no owner may fall behind. */
template <int N, site_kind KIND> static __device__ __forceinline__ void own(const site_args &p, const site_block &b)
{
    constexpr int R = site_shape<N, KIND>::rows, LOGITS = 2 * SITE_TILE;
    const int lane = b.lane, kind = lane < N ? 0 : lane < 2 * N ? 1 : 2, column = lane <= R ? lane : 0;
    const float alpha = lane < R ? get(p.alpha, kind * p.alpha.stride[0]) : 0.0f;
    const float beta = lane < R ? get(p.beta, lane * p.beta.stride[0]) : 0.0f;
    float *const logits = (float *)(b.shared + p.at.logits);
    const uint32_t pre_at = shared_address(b.shared + p.at.pre), aside = shared_address(b.shared + p.at.aside);
    const int64_t live = site_live(p, b);
    int slot = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (uint32_t k = 0;; k++) {
        const uint32_t number = b.rank + (k << p.cluster_log), tile = number / SITE_TILE, row = number % SITE_TILE;
        if (tile >= (uint32_t)b.count) break;
        const uint32_t stage = tile % (uint32_t)p.stages;
        const float *const from = (const float *)(b.shared + p.at.received) + slot * p.cluster * SITE_ROW + column;
        float h = 0.0f;
        barrier_wait(b.at.sums + slot * 8, parity);
#pragma unroll 4
        for (int s = 0; s < p.cluster; s++) h += from[s * SITE_ROW];
        const float ms = __shfl_sync(0xffffffffu, h, R) * p.mean;
        const float inv = mm_inv_rms(ms, p.numbers.rms_eps, p.numbers.rms_eps_kind);
        const float gate = gate_fwd(h, inv, alpha, beta, kind, p.numbers);
        float pre[N];
#pragma unroll
        for (int i = 0; i < N; i++) pre[i] = __shfl_sync(0xffffffffu, as_stored(p.pre, gate), i);
        if (lane == 0) tma_expect(b.at.sums + slot * 8, (uint32_t)p.cluster * (R + 1) * 4);
        __syncwarp();
        to_all<N>(p, b, has(p.pre_in) ? aside : pre_at + (stage * SITE_TILE + row) * N * 4, pre,
                  b.at.pre + stage * 8);
        if (++slot == p.slots) slot = 0, parity ^= 1;
        if (number >= live) continue;

        if constexpr (KIND != SITE_HEAD) {
            if (has(p.res_out)) {
                const uint32_t batch = k / SITE_TILE & 1;
                barrier_wait(b.at.logits_empty + batch * 8, (k / LOGITS & 1) ^ 1);
                if (lane >= 2 * N && lane < R) logits[(lane - 2 * N) * LOGITS + k % LOGITS] = gate;
                barrier_arrive(b.at.logits_full + batch * 8);
            }
        }
        const int64_t token = site_token(p, b, (int)tile, (int)row);
        if (lane < R) {
            if (has(p.h)) put(p.h, token * p.h.stride[0] + lane * p.h.stride[1], h);
            if (kind == 0 && has(p.pre)) put(p.pre, token * p.pre.stride[0] + lane * p.pre.stride[1], gate);
            if (kind == 1 && has(p.post_out))
                put(p.post_out, token * p.post_out.stride[0] + (lane - N) * p.post_out.stride[1], gate);
        } else if (lane == R && has(p.ms)) {
            put(p.ms, token * p.ms.stride[0], ms);
        }
    }
}

static __device__ __forceinline__ void own_norm(const site_args &p, const site_block &b)
{
    const uint32_t inverse_at = shared_address(b.shared + p.at.inverse);
    const int parts = 1 + p.boxes % 4;
    int slot = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (uint32_t k = 0;; k++) {
        const uint32_t number = b.rank + (k << p.cluster_log), tile = number / SITE_TILE, row = number % SITE_TILE;
        if (tile >= (uint32_t)b.count) break;
        const uint32_t stage = tile % (uint32_t)p.stages;
        const float *const from = (const float *)(b.shared + p.at.squares) + slot * p.cluster * 4;
        float squares = 0.0f;
        barrier_wait(b.at.squares + slot * 8, parity);
#pragma unroll 1
        for (int s = 0; s < p.cluster; s++)
#pragma unroll 1
            for (int part = 0; part < parts; part++) squares += from[s * 4 + part];
        const float inverse = 1.0f / sqrtf(squares / (float)p.channels + p.sub_eps);
        __syncwarp();
        if (b.lane == 0) tma_expect(b.at.squares + slot * 8, (uint32_t)(p.cluster * parts * 4));
        __syncwarp();
        if (b.lane < p.cluster)
            cluster_send(cluster_address(inverse_at + (stage * SITE_TILE + row) * 4, b.lane), inverse,
                         cluster_address(b.at.inverse + stage * 8, b.lane));
        if (++slot == p.slots) slot = 0, parity ^= 1;
    }
}

/* One token a lane. */
template <int N> static __device__ __forceinline__ void clerk(const site_args &p, const site_block &b)
{
    constexpr int LOGITS = 2 * SITE_TILE;
    const int64_t live = site_live(p, b), mine = (live - (int64_t)b.rank + p.cluster - 1) >> p.cluster_log;
    const float *const logits = (const float *)(b.shared + p.at.logits);
    const view &to = p.res_out;
#pragma unroll 1
    for (int64_t k0 = 0; k0 < mine; k0 += SITE_TILE) {
        const int64_t k = k0 + b.lane % SITE_TILE;
        const uint32_t batch = k0 / SITE_TILE & 1, parity = k0 / LOGITS & 1;
        float z[N * N];
        /* The last tokens may be fewer than eight: the barrier counts those that never come. */
#pragma unroll 1
        for (int64_t missing = mine; missing < k0 + SITE_TILE; missing++)
            barrier_arrive(b.at.logits_full + batch * 8);
        barrier_wait(b.at.logits_full + batch * 8, parity);
#pragma unroll
        for (int e = 0; e < N * N; e++) z[e] = logits[e * LOGITS + k % LOGITS];
        barrier_arrive(b.at.logits_empty + batch * 8);
        if (b.lane >= SITE_TILE || k >= mine) continue;
        sinkhorn_fwd<N>(z, p.numbers);
        const int64_t number = (int64_t)b.rank + (k << p.cluster_log);
        const int64_t token = site_token(p, b, (int)(number / SITE_TILE), (int)(number % SITE_TILE));
        if (p.res_lines) {
            float *const line = (float *)to.data + token * to.stride[0];
#pragma unroll
            for (int o = 0; o < N; o++) {
                float v[N];
#pragma unroll
                for (int i = 0; i < N; i++) v[i] = z[o * N + i];
                store<float, N>(line + o * to.stride[1], v);
            }
        } else {
#pragma unroll 1
            for (int o = 0; o < N; o++)
#pragma unroll
                for (int i = 0; i < N; i++) {
                    float v = 0.0f;
#pragma unroll
                    for (int k = 0; k < N; k++)
                        if (o == k) v = z[k * N + i];
                    put(to, token * to.stride[0] + o * to.stride[1] + i * to.stride[2], v);
                }
        }
    }
}

/* ---- the kernel --------------------------------------------------------------------------------------------------------- */

/* One warp. Every lane of a warp arrives for itself, behind what it did itself. */
template <int N, site_kind KIND>
static __device__ __forceinline__ void init_barriers(const site_args &p, const site_barriers &b, int lane)
{
    const bool coefs_too = KIND == SITE_BOUNDARY || has(p.pre_in);
    if (lane < p.stages) {
        barrier_init(b.full + lane * 8, coefs_too ? 33 : 1);
        barrier_init(b.mixed + lane * 8, MIXERS * 32);
        barrier_init(b.empty + lane * 8, MIXERS * 32);
        barrier_init(b.pre + lane * 8, 1);
        barrier_init(b.inverse + lane * 8, 1);
    }
    if (lane < 2)
        barrier_init(b.logits_full + lane * 8, SITE_TILE * 32), barrier_init(b.logits_empty + lane * 8, 32);
    if (lane == 2) barrier_init(b.psi_full, 1), barrier_init(b.psi_empty, PROJECTORS * 32);
#pragma unroll 1
    for (int i = lane; i < p.slots; i += 32) {
        barrier_init(b.sums + i * 8, 1);
        barrier_init(b.squares + i * 8, 1);
    }
    tma_barriers_ready();
}

/* One warp, when they exist. */
template <int N, site_kind KIND>
static __device__ __forceinline__ void arm_barriers(const site_args &p, const site_barriers &b, int lane)
{
#pragma unroll 1
    for (int i = lane; i < p.slots; i += 32) {
        tma_expect(b.sums + i * 8, (uint32_t)p.cluster * site_shape<N, KIND>::width * 4);
        tma_expect(b.squares + i * 8, (uint32_t)(p.cluster * (1 + p.boxes % 4) * 4));
    }
}

template <int N, site_kind KIND, post_mode MODE, bool IN_OUT, int PAIRS>
static __device__ __forceinline__ void site(const site_args &p)
{
    extern __shared__ __align__(1024) char shared[];
    /* Shuffled, the compiler cannot ask for the thread's number again and again instead of keeping it. Where registers are
     * scarce it had better ask than spill. */
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x >> 5, 0), index = (int)threadIdx.x & 31;
    const int lane = PAIRS == SITE_FEW_PAIRS ? __shfl_sync(0xffffffffu, index, index) : index;
    const uint32_t at = shared_address(shared + p.at.barriers), s = p.stages * 8, sums = at + 5 * s,
                   logits = sums + 16 * p.slots;
    site_block b = {shared,
                    {at, at + s, at + 2 * s, at + 3 * s, at + 4 * s, sums, sums + 8 * p.slots, logits, logits + 16,
                     logits + 32, logits + 40}};
    b.rank = cluster_rank(), b.cluster = cluster_index(), b.lane = lane;
    b.count = (p.tiles - (int)b.cluster + p.clusters - 1) / p.clusters;
    b.first_channel = (int)b.rank * p.boxes * SITE_BOX;
    if (warp == 0) init_barriers<N, KIND>(p, b.at, lane);
    if (warp == BRINGER && lane < (KIND == SITE_BOUNDARY ? 3 : 2))
        tma_prefetch(lane == 0 ? &p.x : lane == 1 ? &p.psi : &p.f);
    __syncthreads();
    if (warp == 0) arm_barriers<N, KIND>(p, b.at, lane);
    __syncwarp();
    cluster_arrive(); /* barriers exist; before it sends to another block a warp waits for that one's arrival */

    if (warp < FIRST_MIXER) {
        set_registers<PROJECTOR_REGISTERS, true>();
        projector<N, KIND, PAIRS>(p, b, warp);
    } else if (warp < BRINGER) {
        set_registers<MIXER_REGISTERS, false>();
        mixer<N, KIND, MODE, IN_OUT, PAIRS>(p, b, warp - FIRST_MIXER);
    } else {
        set_registers<SERVER_REGISTERS, false>();
        if (warp == BRINGER) {
            bring<N, KIND>(p, b);
        } else {
            cluster_wait_for_all();
            if (warp == OWNER) own<N, KIND>(p, b);
            if (warp == NORMER && p.norm) own_norm(p, b);
            if constexpr (KIND != SITE_HEAD)
                if (warp == CLERK && has(p.res_out)) clerk<N>(p, b);
        }
    }
    __syncwarp();
    cluster_arrive(); /* nobody sends to a block that is gone */
    cluster_wait_for_all();
}

#endif

template <int N, site_kind KIND, post_mode MODE, bool IN_OUT, int PAIRS>
static __global__ void __launch_bounds__(SITE_WARPS * 32, 1) site_kernel(const __grid_constant__ site_args p)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
    site<N, KIND, MODE, IN_OUT, PAIRS>(p);
#endif
}

#endif
