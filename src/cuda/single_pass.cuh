/* SPDX-License-Identifier: Apache-2.0
 *
 * A site of mHC in one launch [M9] [M10] [M11]: post makes the new streams y (or they are there: x), the projection and the
 * mean square of y are summed, coefficients follow, and u = sum_i pre[i] y[i], normed where asked. Bytes of memory a token,
 * bf16, four streams: reads 10C, writes 10C; without post reads 8C, writes 2C.
 *
 * A token's coefficients need all of its channels, and the aggregate needs the coefficients. So a tile of tokens is worked
 * on twice, a few microseconds apart: y is in the L2 cache the second time, and memory does not see it.
 *
 *   mixers    16 warps. A block has one slice of the channels; its part of psi stays in shared memory for the whole call.
 *             Eight pairs of warps have 32 channels each, and of a pair one has the first eight tokens of a tile, the other
 *             the second. Lane (g, t) has token g and 8 neighbouring channels, which is what it copies ahead, what post
 *             computes on, what it stores, and what the tensor cores want for an operand. No lane reads what another one
 *             copied, so mixers wait for nobody.
 *   tellers   2 warps, in turn. Add the sums of the mixers of a tile, leave them in the ring of the group, count the tile.
 *   clerk     one warp. Fetches post's coefficients ahead, and makes matrices of logits, eight tokens at a time, one a lane:
 *             nobody in this launch waits for these.
 *   finishers 4 teams of 2 warps. When all slices of a token have been counted: adds them in order, makes the gates, reads
 *             the whole token once more and writes u, v. A token is one team's.
 *
 * Blocks of a group wait for each other, so all blocks are resident at once (a cooperative launch). Sums are added in an
 * order that follows from the number of channels alone. */
#ifndef WEFT_CUDA_SINGLE_PASS_CUH
#define WEFT_CUDA_SINGLE_PASS_CUH

#include <cooperative_groups.h>

#include "cuda/common/reduce.cuh"
#include "cuda/mhc_post.cuh"
#include "cuda/mhc_project.cuh"
#include "cuda/single_pass_plan.h"
#include "cuda/token_math.cuh"

enum {
    EIGHT =
        8, /* tokens that a mixer works on at a time, half a tile; tokens whose matrices the clerk makes at a time */
    PAIRS = SITE_CHANNELS / 32,
    MIXERS = 2 * PAIRS,
    TELLERS = 2,
    TEAMS = 4,
    TEAM = 2, /* warps */
    FIRST_TELLER = MIXERS,
    CLERK = FIRST_TELLER + TELLERS,
    FIRST_FINISHER,
    SITE_WARPS = FIRST_FINISHER + TEAMS * TEAM,
    COEF_SLOTS = 4 /* tiles whose coefficients of post are on chip */
};

struct site_args {
    const bf16 *x;
    int64_t x_token, x_stream;
    /* In bytes, and constants, which cost no registers: from tile to tile of a group; from a place in x to the same place of
     * each stream some stages ahead, in f likewise, and to each stream of y, whose tokens are as far apart as those of x. */
    int64_t x_step, f_step, x_ahead[4], f_ahead, y_at[4];
    /* post */
    const bf16 *f;
    int64_t f_token;
    view bias, post, res;
    weft_dropout dropout;
    bool in_out, coef_wide; /* wide: fp32 lines that can be read in one go */
    bf16 *y;
    int64_t y_token, y_stream;
    /* the site */
    weights w;
    const float *psi; /* rows that can be read 16 bytes at a time, or NULL */
    int64_t psi_row, psi_stream;
    view alpha, beta;
    gate_numbers numbers;
    view pre_in, h, ms, pre, post_out, res_out;
    bf16 *u, *v; /* or NULL */
    int64_t u_token, v_token;
    view sub_weight;
    float sub_eps;
    int64_t tokens, tiles;
    int32_t channels, slices, groups;
    float mean; /* 1 / nC */
    float *ring;
    uint32_t *counters; /* of each group: tiles counted, tokens taken, by slots of the ring */
};

/* Rows of the projection on tensor cores, psi on the side of 16: hi and lo of a row are both rows there, and D adds up
 * what belongs together. 24 rows: hi of 0-15 | lo of 0-15 | hi, lo of 16-23. Up to 8 rows: hi, lo. */
template <int N, bool HEAD> struct site_shape {
    static constexpr int rows = HEAD ? N : 2 * N + N * N, tiles = rows > 8 ? 3 : 1, width = rows + 1;
    static constexpr int steps = 2 * N; /* of 16 columns, of a warp */
};

template <int N, bool HEAD, bool POST> struct site_room {
    typedef site_shape<N, HEAD> shape;
    static constexpr int stages = POST ? 2 : 3, copies = POST ? N + 1 : N, stage_bytes = copies * 512;
    static constexpr int psi_bytes = PAIRS * shape::steps * shape::tiles * 512;
    static constexpr int sums_floats = EIGHT * shape::width; /* of a warp */
    /* offsets */
    static constexpr int stream = psi_bytes, sums = stream + MIXERS * stages * stage_bytes;
    static constexpr int coef = sums + TELLERS * MIXERS * sums_floats * 4;
    static constexpr int logits = coef + (POST ? COEF_SLOTS * SITE_TILE * (N + N * N) * 4 : 0);
    static constexpr int param = logits + 2 * EIGHT * N * N * 4;
    static constexpr int teams = param + (shape::rows + 3 + 1) / 2 * 8; /* of each team: N factors, TEAM sums */
    static constexpr int barriers = teams + TEAMS * 8 * 4;
    static constexpr int bytes = barriers + (2 * TELLERS + 4 + 2 * COEF_SLOTS) * 8;
    static_assert(bytes <= SITE_SHARED, "more shared memory than a block has");
    static_assert(N + TEAM <= 8, "room of a team");
};

/* Addresses of barriers: sums of the mixers, coefficients of post, logits are there, are taken. */
struct site_barriers {
    uint32_t full, empty, coef_full, coef_empty, logits_full, logits_empty;
};

/* Tokens of a group are dealt to its blocks one by one. */
static __device__ __forceinline__ int64_t tokens_of(const site_args &p, int slice, int group)
{
    const int64_t tiles = (p.tiles - group + p.groups - 1) / p.groups, last = group + (tiles - 1) * p.groups;
    const int64_t cut = (last + 1) * SITE_TILE - p.tokens; /* of the last tile */
    const int64_t all = tiles * SITE_TILE - (cut > 0 ? cut : 0);
    return (all - slice + p.slices - 1) / p.slices;
}

/* ---- psi ---------------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ float4 psi_four(const site_args &p, int row, int stream, int channel)
{
    if (row >= p.w.rows || channel >= p.channels) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (p.psi) return __ldg((const float4 *)(p.psi + row * p.psi_row + stream * p.psi_stream + channel));
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; k++) v[k] = psi_at(p.w, row, stream, channel + k);
    return make_float4(v[0], v[1], v[2], v[3]);
}

/* The operands of a mixer, as its lanes will want them: of step (stream, half of 8 channels) columns 8t + 4 half + 0 .. 3,
 * where the tensor cores are told that these are 2t, 2t + 1, 2t + 8, 2t + 9. The two warps of a pair share the work. */
template <int N, bool HEAD>
static __device__ __forceinline__ void fill_psi(uint4 *to, const site_args &p, int channel, int first, int lane)
{
    typedef site_shape<N, HEAD> shape;
    constexpr int EACH = shape::steps / 2;
    const int g = lane >> 2;
    float4 all[EACH][shape::tiles];
#pragma unroll
    for (int k = 0; k < EACH; k++)
#pragma unroll
        for (int q = 0; q < shape::tiles; q++)
            all[k][q] = psi_four(p, g + 8 * q, (first + k) >> 1, channel + ((first + k) & 1) * 4);
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        uint4 *const out = to + (first + k) * shape::tiles * 32 + lane;
        const float4(&v)[shape::tiles] = all[k];
        uint2 hi[shape::tiles], lo[shape::tiles];
#pragma unroll
        for (int q = 0; q < shape::tiles; q++) {
            split2(hi[q].x, lo[q].x, v[q].x, v[q].y);
            split2(hi[q].y, lo[q].y, v[q].z, v[q].w);
        }
        if constexpr (shape::tiles == 3) {
            out[0] = make_uint4(hi[0].x, hi[1].x, hi[0].y, hi[1].y);
            out[32] = make_uint4(lo[0].x, lo[1].x, lo[0].y, lo[1].y);
            out[64] = make_uint4(hi[2].x, lo[2].x, hi[2].y, lo[2].y);
        } else {
            out[0] = make_uint4(hi[0].x, lo[0].x, hi[0].y, lo[0].y);
        }
    }
}

/* ---- mixers ------------------------------------------------------------------------------------------------------------- */

/* What a warp sums of eight tokens. */
template <int TILES> struct site_sums {
    float d[TILES == 3 ? 2 : 1][4] = {}, low[4] = {}, high[4] = {};
};

template <int TILES>
static __device__ __forceinline__ void multiply(site_sums<TILES> &s, const uint4 (&a)[TILES], uint32_t b0,
                                                uint32_t b1)
{
    mma16(s.d[0], a[0].x, a[0].y, a[0].z, a[0].w, b0, b1);
    if constexpr (TILES == 3) {
        mma16(s.d[0], a[1].x, a[1].y, a[1].z, a[1].w, b0, b1);
        mma16(s.d[1], a[2].x, a[2].y, a[2].z, a[2].w, b0, b1);
    }
    /* The operand is its own transpose: token by token. Squares are the diagonals of b0 b0 (above) and b1 b1 (below). */
    mma8(s.low, b0, b1, b0);
    mma8(s.high, b0, b1, b1);
}

/* To [token][row] of eight tokens. D has row g (and g + 8) of tokens 2t, 2t + 1. */
template <int N, bool HEAD>
static __device__ __forceinline__ void leave_sums(float *to, const site_sums<site_shape<N, HEAD>::tiles> &s,
                                                  int lane)
{
    typedef site_shape<N, HEAD> shape;
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
    if (t == g >> 1) to[g * shape::width + shape::rows] = g & 1 ? s.low[1] + s.high[3] : s.low[0] + s.high[2];
}

/* New streams of one token and 8 channels, in the registers of the old ones. */
template <int N, post_mode MODE>
static __device__ __forceinline__ void mix(raw<bf16, 8> (&x)[N], const raw<bf16, 8> &f, const coefs<N> &from,
                                           const site_args &p, const weft_mask &mask, int64_t token, int channel)
{
    post_extra<N, 8> extra;
    const coefs<N> k = from;
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
                for (int i = 0; i < N; i++) y[q] = fmaf(k.w[o][i], v[i][q], y[q]);
            }
            x[o].word[pair] = narrow2(y[0], y[1], bf16());
        }
    }
}

/* A lane of a mixer on its way through the tiles of its group. */
struct mixer_walk {
    const char *x, *f;    /* of this tile, or of the one to copy */
    int32_t tiles, least; /* a lane has nothing in the last `least` of them: channels or tokens behind the last */
};

static __device__ __forceinline__ mixer_walk mixer_begin(const site_args &p, int group, int channel, int warp,
                                                         int lane)
{
    const int64_t tiles = (p.tiles - group + p.groups - 1) / p.groups, step = (int64_t)p.groups * SITE_TILE;
    const int64_t token = (int64_t)group * SITE_TILE + (warp & 1) * EIGHT + (lane >> 2);
    const bool all = token + (tiles - 1) * step < p.tokens;
    return {(const char *)(p.x + token * p.x_token + channel), (const char *)(p.f + token * p.f_token + channel),
            (int32_t)tiles,
            channel >= p.channels ? (int32_t)tiles
            : all                 ? 0
                                  : 1};
}

/* The tile that is `stages` behind the one that the pointers are at. to: of this lane in the stage. What nobody reads again
 * need not stay in the cache. */
template <int N, bool POST>
static __device__ __forceinline__ void copy_eight(const site_args &p, const char *x, const char *f, bool valid,
                                                  uint32_t to)
{
    if constexpr (POST) {
        const uint64_t policy = evict_first();
#pragma unroll
        for (int i = 0; i < N; i++) copy_async_hint(to + i * 512, x + p.x_ahead[i], valid, policy);
        copy_async_hint(to + N * 512, f + p.f_ahead, valid, policy);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) copy_async(to + i * 512, x + p.x_ahead[i], valid);
    }
    copy_commit();
}

template <int N, bool HEAD, bool POST, post_mode MODE>
static __device__ __forceinline__ void mixer(const site_args &p, char *shared, const site_barriers &b,
                                             mixer_walk walk, int group, int channel, int warp, int lane)
{
    typedef site_room<N, HEAD, POST> room;
    typedef site_shape<N, HEAD> shape;
    constexpr int STAGES = room::stages;
    static_assert((COEF_SLOTS & (COEF_SLOTS - 1)) == 0 && TELLERS == 2,
                  "slots and parities are bits of the tile's number");
    char *const own = shared + room::stream + warp * STAGES * room::stage_bytes + lane * 16;
    const uint4 *const psi = (const uint4 *)shared + (warp >> 1) * shape::steps * shape::tiles * 32 + lane;
    const coefs<N> *const coef = (const coefs<N> *)(shared + room::coef) + (warp & 1) * EIGHT + (lane >> 2);
    float *const sums_to = (float *)(shared + room::sums) + warp * room::sums_floats;
    weft_mask mask = {};
    if constexpr (POST && MODE == FULL) mask = weft_mask_open(&p.dropout, p.channels);

    int stage = 0; /* in bytes */
#pragma unroll 1
    for (int n = 0; n < walk.tiles; n++) {
        const int k = n & (COEF_SLOTS - 1), teller = n & 1;
        raw<bf16, 8> x[N];
        site_sums<shape::tiles> sums;
        copy_wait<STAGES - 1>();
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = *(const raw<bf16, 8> *)(own + stage + i * 512);
        if constexpr (POST) {
            const raw<bf16, 8> f = *(const raw<bf16, 8> *)(own + stage + N * 512);
            barrier_wait(b.coef_full + k * 8, (uint32_t)(n / COEF_SLOTS) & 1);
            if (n < walk.tiles - walk.least) { /* the others have zeros */
                int64_t token = 0;             /* of the mask */
                if constexpr (MODE == FULL)
                    token = (group + (int64_t)n * p.groups) * SITE_TILE + (warp & 1) * EIGHT + (lane >> 2);
                mix<N, MODE>(x, f, coef[k * SITE_TILE], p, mask, token, channel);
#pragma unroll
                for (int i = 0; i < N; i++) store_raw((bf16 *)(walk.x + p.y_at[i]), x[i]);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(b.coef_empty + k * 8);
        }
        copy_eight<N, POST>(p, walk.x, walk.f, n + STAGES < walk.tiles - walk.least, shared_address(own) + stage);
        walk.x += p.x_step, walk.f += p.f_step;
        stage = stage == (STAGES - 1) * room::stage_bytes ? 0 : stage + room::stage_bytes;
#pragma unroll
        for (int step = 0; step < shape::steps; step++) {
            uint4 a[shape::tiles];
#pragma unroll
            for (int q = 0; q < shape::tiles; q++) a[q] = psi[(step * shape::tiles + q) * 32];
            multiply<shape::tiles>(sums, a, x[step >> 1].word[(step & 1) * 2],
                                   x[step >> 1].word[(step & 1) * 2 + 1]);
        }
        barrier_wait(b.empty + teller * 8, ((uint32_t)(n >> 1) & 1) ^ 1);
        leave_sums<N, HEAD>(sums_to + teller * MIXERS * room::sums_floats, sums, lane);
        __syncwarp(); /* what the warp stored comes before its arrival */
        if (lane == 0) barrier_arrive(b.full + teller * 8);
    }
    copy_wait<0>();
}

/* ---- counters in memory ------------------------------------------------------------------------------------------------- */

/* An acquire would also throw away the L1 cache at each look. It is not needed: what the count promises is read past that
 * cache (__ldcg), and after this loop, since a load is never issued ahead of a branch. */
static __device__ __forceinline__ void wait_count(const uint32_t *counter, uint32_t target)
{
    uint32_t seen;
    while (true) {
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
        if (seen >= target) return;
        __nanosleep(100);
    }
}

static __device__ __forceinline__ void count_one(uint32_t *counter)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

/* ---- tellers, clerk ----------------------------------------------------------------------------------------------------- */

template <int N, bool HEAD, bool POST>
static __device__ __forceinline__ void teller(const site_args &p, const char *shared, const site_barriers &b,
                                              int slice, int group, int which, int lane)
{
    typedef site_room<N, HEAD, POST> room;
    typedef site_shape<N, HEAD> shape;
    uint32_t *const counted = p.counters + group * 2 * SITE_RING, *const taken = counted + SITE_RING;
    float *const ring = p.ring + (int64_t)group * SITE_RING * p.slices * SITE_TILE * SITE_ROW;
    const float *const sums = (const float *)(shared + room::sums) + which * MIXERS * room::sums_floats +
                              (lane < shape::width ? lane : 0);
    uint32_t parity = 0;
    int64_t tile = which;
#pragma unroll 1
    for (int64_t at = group + which * p.groups; at < p.tiles; at += TELLERS * p.groups, tile += TELLERS) {
        const int slot = (int)(tile % SITE_RING);
        float v[SITE_TILE] = {};
        barrier_wait(b.full + which * 8, parity);
        parity ^= 1;
#pragma unroll 1
        for (int w = 0; w < PAIRS; w++)
#pragma unroll
            for (int i = 0; i < SITE_TILE; i++)
                v[i] += sums[(2 * w + i / EIGHT) * room::sums_floats + i % EIGHT * shape::width];
        __syncwarp();
        if (lane == 0) {
            barrier_arrive(b.empty + which * 8);
            if (tile >= SITE_RING) wait_count(taken + slot, (uint32_t)(tile / SITE_RING) * SITE_TILE);
        }
        __syncwarp();
        float *const to = ring + ((int64_t)slot * p.slices + slice) * SITE_TILE * SITE_ROW + lane;
#pragma unroll
        for (int i = 0; i < SITE_TILE; i++)
            if (lane < shape::width) to[i * SITE_ROW] = v[i];
        __syncwarp();
        if (lane == 0) count_one(counted + slot); /* after the streams of the mixers too, which arrived before */
    }
}

/* Coefficients of post of a tile. A lane takes a line at a time: post, or one of the matrix. */
template <int N>
static __device__ __forceinline__ void put_line(const site_args &p, coefs<N> &to, int line, const float (&v)[N])
{
    float *const first = line == 0 ? to.post : p.in_out ? &to.w[0][line - 1] : to.w[line - 1];
    const int step = line > 0 && p.in_out ? N : 1;
#pragma unroll
    for (int k = 0; k < N; k++) first[k * step] = v[k];
}

template <int N>
static __device__ __noinline__ void fetch_any_coefs(const site_args &p, coefs<N> *to, int64_t tile, int lane)
{
#pragma unroll 1
    for (int e = lane; e < SITE_TILE * (N + N * N); e += 32) {
        const int row = e / (N + N * N);
        const int64_t at = tile * SITE_TILE + row, token = at < p.tokens ? at : p.tokens - 1;
        ((float *)to)[e] = coef_at(p.post, p.res, p.in_out, N, token, e - row * (N + N * N));
    }
}

template <int N>
static __device__ __forceinline__ void fetch_coefs(const site_args &p, coefs<N> *to, int64_t tile, int lane)
{
    constexpr int LINES = N + 1, ROUNDS = (SITE_TILE * LINES + 31) / 32;
    if (!p.coef_wide) return fetch_any_coefs<N>(p, to, tile, lane);
    float v[ROUNDS][N];
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int e = r * 32 + lane, row = e / LINES, line = e - row * LINES;
        const int64_t at = tile * SITE_TILE + row, token = at < p.tokens ? at : p.tokens - 1;
        const float *const from =
            line == 0 ? (const float *)p.post.data + token * p.post.stride[0]
                      : (const float *)p.res.data + token * p.res.stride[0] + (line - 1) * p.res.stride[1];
        if (e < SITE_TILE * LINES) load_shared<float, N>(v[r], from);
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int e = r * 32 + lane, row = e / LINES;
        if (e < SITE_TILE * LINES) put_line<N>(p, to[row], e - row * LINES, v[r]);
    }
}

/* Matrices of the tokens k0 .. of this block. No part of its caller: it would take that one's registers. */
template <int N>
static __device__ __noinline__ void make_matrices(const site_args &p, const float *logits, uint32_t empty,
                                                  int64_t k0, int64_t mine, int slice, int group, int lane)
{
    const int64_t k = k0 + lane % EIGHT, q = slice + k * p.slices, tile = q / SITE_TILE;
    const int64_t token = (group + tile * p.groups) * SITE_TILE + q % SITE_TILE;
    const view &to = p.res_out;
    float z[N * N];
#pragma unroll
    for (int e = 0; e < N * N; e++) z[e] = logits[e * 2 * EIGHT + k % (2 * EIGHT)];
    __syncwarp();
    if (lane == 0) barrier_arrive(empty);
    sinkhorn_fwd<N>(z, p.numbers);
    if (lane >= EIGHT || k >= mine) return;
#pragma unroll
    for (int e = 0; e < N * N; e++)
        put(to, token * to.stride[0] + e / N * to.stride[1] + e % N * to.stride[2], z[e]);
}

/* A barrier as the whole warp sees it. */
static __device__ __forceinline__ bool warp_test(uint32_t barrier, uint32_t parity)
{
    return __any_sync(0xffffffffu, barrier_test(barrier, parity));
}

/* Does whatever can be done next, and never waits for one thing alone: mixers wait for coefficients, finishers for room for
 * their logits. */
template <int N, bool HEAD, bool POST>
static __device__ __forceinline__ void clerk(const site_args &p, char *shared, const site_barriers &b, int slice,
                                             int group, int lane)
{
    typedef site_room<N, HEAD, POST> room;
    const float *const logits = (const float *)(shared + room::logits);
    const int64_t mine = !HEAD && has(p.res_out) ? tokens_of(p, slice, group) : 0;
    int64_t tile = POST ? group : p.tiles, k0 = 0;
    int slot = 0, batch = 0;
    uint32_t coef_parity = 1, logits_parity = 0;
    /* The last tokens may be fewer than eight: their barrier counts those that never come. */
    auto complete = [&]() {
        if (mine - k0 < EIGHT && lane < EIGHT && k0 + lane >= mine) barrier_arrive(b.logits_full + batch * 8);
    };
    if (mine > 0) complete();
#pragma unroll 1
    while (tile < p.tiles || k0 < mine) {
        bool idle = true;
        if constexpr (POST) {
            if (tile < p.tiles && warp_test(b.coef_empty + slot * 8, coef_parity)) {
                fetch_coefs<N>(p, (coefs<N> *)(shared + room::coef) + slot * SITE_TILE, tile, lane);
                __syncwarp();
                if (lane == 0) barrier_arrive(b.coef_full + slot * 8);
                tile += p.groups;
                if (++slot == COEF_SLOTS) slot = 0, coef_parity ^= 1;
                idle = false;
            }
        }
        if constexpr (!HEAD) {
            if (k0 < mine && warp_test(b.logits_full + batch * 8, logits_parity)) {
                make_matrices<N>(p, logits, b.logits_empty + batch * 8, k0, mine, slice, group, lane);
                k0 += EIGHT;
                batch ^= 1;
                if (batch == 0) logits_parity ^= 1;
                if (k0 < mine) complete();
                idle = false;
            }
        }
        if (idle) __nanosleep(50);
    }
}

/* ---- finishers ---------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint4 load_cached(const bf16 *from)
{
    return __ldcg((const uint4 *)from);
}

/* What a tensor keeps of v. */
static __device__ __forceinline__ float as_stored(const view &to, float v)
{
    return to.dtype == WEFT_BF16 ? rounded<bf16>(v) : to.dtype == WEFT_F16 ? rounded<f16>(v) : v;
}

/* A finisher's part of a token: 256 channels at a time, TEAM apart; AHEAD of these are on their way at once. */
template <int N> struct site_part {
    static constexpr int ahead = 2, step = TEAM * 256;
    uint4 x[ahead][N];

    __device__ __forceinline__ void fetch(const bf16 *from, int64_t stream, int channels, int c0)
    {
#pragma unroll
        for (int a = 0; a < ahead; a++)
            if (c0 + a * step < channels)
#pragma unroll
                for (int i = 0; i < N; i++) x[a][i] = load_cached(from + i * stream + c0 + a * step);
    }

    /* Writes u, adds the squares of what it wrote. */
    __device__ __forceinline__ void finish(bf16 *u, const float (&pre)[N], int channels, int c0,
                                           float &squares) const
    {
#pragma unroll
        for (int a = 0; a < ahead; a++) {
            if (c0 + a * step >= channels) continue;
            uint32_t word[4];
#pragma unroll
            for (int pair = 0; pair < 4; pair++) {
                float s[2], v[2];
                auto part = [&](const uint4 &w) {
                    return pair == 0 ? w.x : pair == 1 ? w.y : pair == 2 ? w.z : w.w;
                };
                widen2(v[0], v[1], part(x[a][0]), bf16());
                s[0] = pre[0] * v[0], s[1] = pre[0] * v[1];
#pragma unroll
                for (int i = 1; i < N; i++) {
                    widen2(v[0], v[1], part(x[a][i]), bf16());
                    s[0] = fmaf(pre[i], v[0], s[0]), s[1] = fmaf(pre[i], v[1], s[1]);
                }
                word[pair] = narrow2(s[0], s[1], bf16());
                widen2(v[0], v[1], word[pair], bf16());
                squares = fmaf(v[0], v[0], squares);
                squares = fmaf(v[1], v[1], squares);
            }
            store_vector(u + c0 + a * step, word[0], word[1], word[2], word[3]);
        }
    }
};

/* v from u, which this lane stored itself. */
static __device__ __forceinline__ void norm_part(bf16 *v, const bf16 *u, float inverse, const view &weight,
                                                 int channels, int c0)
{
#pragma unroll 2
    for (int c = c0; c < channels; c += TEAM * 256) {
        float x[8], w[8];
        load_shared<bf16, 8>(x, u + c);
        if (has(weight)) get_param<8>(w, weight, c);
#pragma unroll
        for (int k = 0; k < 8; k++) x[k] = has(weight) ? x[k] * inverse * w[k] : x[k] * inverse * 1.0f;
        store<bf16, 8>(v + c, x);
    }
}

static __device__ __forceinline__ void team_sync(int team)
{
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(TEAM * 32) : "memory");
}

/* Gates of a token, a row each lane, from what its slices have left in the ring. */
template <int N, bool HEAD>
static __device__ __forceinline__ float token_gates(const site_args &p, const float *param, const float *from,
                                                    int64_t token, int lane)
{
    constexpr int R = site_shape<N, HEAD>::rows;
    const int kind = lane < N ? 0 : lane < 2 * N ? 1 : 2;
    float h = 0.0f, gate = 0.0f;
#pragma unroll 8
    for (int s = 0; s < p.slices; s++) h += __ldcg(from + s * (SITE_TILE * SITE_ROW) + (lane <= R ? lane : 0));
    const float ms = __shfl_sync(0xffffffffu, h, R) * p.mean;
    const float inv = mm_inv_rms(ms, p.numbers.rms_eps, p.numbers.rms_eps_kind);
    if (lane < R) {
        if (has(p.h)) put(p.h, token * p.h.stride[0] + lane * p.h.stride[1], h);
        gate = gate_fwd(h, inv, param[R + kind], param[lane], kind, p.numbers);
        if (kind == 0 && has(p.pre)) put(p.pre, token * p.pre.stride[0] + lane * p.pre.stride[1], gate);
        if (kind == 1 && has(p.post_out))
            put(p.post_out, token * p.post_out.stride[0] + (lane - N) * p.post_out.stride[1], gate);
    } else if (lane == R && has(p.ms)) {
        put(p.ms, token * p.ms.stride[0], ms);
    }
    return gate;
}

template <int N, bool HEAD, bool POST>
static __device__ __forceinline__ void finisher(const site_args &p, float *logits, const float *param, float *room,
                                                const site_barriers &b, int slice, int group, int team, int member,
                                                int lane)
{
    constexpr int R = site_shape<N, HEAD>::rows;
    uint32_t *const counted = p.counters + group * 2 * SITE_RING, *const taken = counted + SITE_RING;
    const float *const ring = p.ring + (int64_t)group * SITE_RING * p.slices * SITE_TILE * SITE_ROW;
    const int64_t mine = tokens_of(p, slice, group), stream = POST ? p.y_stream : p.x_stream;
    const int c0 = (member * 32 + lane) * 8;
    const bool wants_u = p.u || p.v;
#pragma unroll 1
    for (int64_t k = team; k < mine; k += TEAMS) {
        const int64_t q = slice + k * p.slices, tile = q / SITE_TILE;
        const int row = (int)(q % SITE_TILE), slot = (int)(tile % SITE_RING);
        const int64_t token = (group + tile * p.groups) * SITE_TILE + row;
        const bf16 *const streams = POST ? p.y + token * p.y_token : p.x + token * p.x_token;
        site_part<N> part;
        if (member == 0 && lane == 0) wait_count(counted + slot, (uint32_t)(tile / SITE_RING + 1) * p.slices);
        team_sync(team);
        if (wants_u) part.fetch(streams, stream, p.channels, c0);
        if (member == 0) {
            float pre = 0.0f;
            if (has(p.pre_in) && lane < N)
                pre = get(p.pre_in, token * p.pre_in.stride[0] + lane * p.pre_in.stride[1]);
            const float gate = token_gates<N, HEAD>(
                p, param, ring + ((int64_t)slot * p.slices * SITE_TILE + row) * SITE_ROW, token, lane);
            if (!has(p.pre_in)) pre = as_stored(p.pre, gate);
            if (lane < N) room[lane] = pre;
            __syncwarp();
            if (lane == 0) count_one(taken + slot);
            if constexpr (!HEAD) {
                if (has(p.res_out)) {
                    const int batch = (int)(k / EIGHT & 1);
                    barrier_wait(b.logits_empty + batch * 8, ((uint32_t)(k / (2 * EIGHT)) & 1) ^ 1);
                    if (lane >= 2 * N && lane < R) logits[(lane - 2 * N) * 2 * EIGHT + k % (2 * EIGHT)] = gate;
                    __syncwarp();
                    if (lane == 0) barrier_arrive(b.logits_full + batch * 8);
                }
            }
        }
        if (!wants_u) continue;
        team_sync(team);
        float factor[N], squares = 0.0f;
        bf16 *const u = p.u ? p.u + token * p.u_token : p.v + token * p.v_token;
#pragma unroll
        for (int i = 0; i < N; i++) factor[i] = room[i];
#pragma unroll 1
        for (int c = c0; c < p.channels; c += part.ahead * part.step) {
            if (c != c0) part.fetch(streams, stream, p.channels, c);
            part.finish(u, factor, p.channels, c, squares);
        }
        if (p.v) {
            squares = warp_sum(squares);
            if (lane == 0) room[N + member] = squares;
            team_sync(team);
            squares = room[N];
#pragma unroll
            for (int w = 1; w < TEAM; w++) squares += room[N + w];
            norm_part(p.v + token * p.v_token, u, 1.0f / sqrtf(squares / (float)p.channels + p.sub_eps),
                      p.sub_weight, p.channels, c0);
        }
    }
}

/* ---- the kernel --------------------------------------------------------------------------------------------------------- */

template <int N, bool HEAD, bool POST, post_mode MODE>
static __global__ void __launch_bounds__(SITE_WARPS * 32, 1) site_kernel(const __grid_constant__ site_args p)
{
    typedef site_room<N, HEAD, POST> room;
    typedef site_shape<N, HEAD> shape;
    extern __shared__ __align__(128) char shared[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int group = (int)blockIdx.x / p.slices, slice = (int)blockIdx.x - group * p.slices;
    float *const param = (float *)(shared + room::param);
    const uint32_t at = shared_address(shared + room::barriers);
    const site_barriers b = {at, at + 16, at + 64, at + 64 + COEF_SLOTS * 8, at + 32, at + 48};
    const int channel = slice * SITE_CHANNELS + (warp >> 1) % PAIRS * 32 + (lane & 3) * 8;
    mixer_walk walk = mixer_begin(p, group, channel, warp, lane);
    if (warp < MIXERS) {
        const uint32_t to =
            shared_address(shared + room::stream) + warp * room::stages * room::stage_bytes + lane * 16;
#pragma unroll 1
        for (int s = -room::stages; s < 0; s++) /* pointers that are as far back as the copies are ahead */
            copy_eight<N, POST>(p, walk.x + s * p.x_step, walk.f + s * p.f_step,
                                s + room::stages < walk.tiles - walk.least,
                                to + (s + room::stages) * room::stage_bytes);
        fill_psi<N, HEAD>((uint4 *)shared + (warp >> 1) * shape::steps * shape::tiles * 32, p, channel,
                          (warp & 1) * (shape::steps / 2), lane);
    }
    if (slice == 0 && threadIdx.x < 2 * SITE_RING) p.counters[group * 2 * SITE_RING + threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < TELLERS; i++) barrier_init(b.full + i * 8, MIXERS), barrier_init(b.empty + i * 8, 1);
        for (int i = 0; i < 2; i++)
            barrier_init(b.logits_full + i * 8, EIGHT), barrier_init(b.logits_empty + i * 8, 1);
        for (int i = 0; i < COEF_SLOTS; i++)
            barrier_init(b.coef_full + i * 8, 1), barrier_init(b.coef_empty + i * 8, MIXERS);
    }
    stage_params(param, p.alpha, p.beta, shape::rows, HEAD ? 1 : 3);
    cooperative_groups::this_grid().sync(); /* barriers exist, counters are zero */

    if (warp < MIXERS) {
        mixer<N, HEAD, POST, MODE>(p, shared, b, walk, group, channel, warp, lane);
    } else if (warp < CLERK) {
        teller<N, HEAD, POST>(p, shared, b, slice, group, warp - FIRST_TELLER, lane);
    } else if (warp == CLERK) {
        clerk<N, HEAD, POST>(p, shared, b, slice, group, lane);
    } else {
        const int team = (warp - FIRST_FINISHER) / TEAM;
        finisher<N, HEAD, POST>(p, (float *)(shared + room::logits), param,
                                (float *)(shared + room::teams) + team * 8, b, slice, group, team,
                                (warp - FIRST_FINISHER) % TEAM, lane);
    }
}

#endif
