/* SPDX-License-Identifier: Apache-2.0
 *
 * A site of mHC in one launch [M9] [M10] [M11]: post makes the new streams y (or they are there: x), the projection and the
 * mean square of y are summed, coefficients follow, and u = sum_i pre[i] y[i], normed where asked. Bytes of memory a token,
 * bf16, four streams: reads 10C, writes 10C; without post reads 8C, writes 2C.
 *
 * A token's coefficients need all of its channels, and the aggregate needs the coefficients. So a tile of tokens is worked
 * on twice, a few microseconds apart: y is in the L2 cache the second time, and memory does not see it.
 *
 *   mixers    8 warps. A block has one slice of the channels; its part of psi stays in shared memory for the whole call. A
 *             warp has 32 channels: lane (g, t) has token g of eight and 8 neighbouring channels, which is what it copies
 *             ahead, what post computes on, what it stores, and what the tensor cores want for an operand. No lane reads
 *             what another one copied, so mixers wait for nobody.
 *   teller    one warp. Adds the sums of the mixers of a tile, leaves them in the ring of the group and counts the tile.
 *   fetcher   one warp. Fetches post's coefficients ahead.
 *   finishers 13 warps. When all slices of a token have been counted: adds them in order, makes the gates, reads the whole
 *             token once more and writes u, v. A token is one warp's.
 *   mater     one warp. Sinkhorn of eight tokens at a time, a token each lane: nobody in this launch waits for it.
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
    MIXERS = 8,
    TELLER = MIXERS,
    FETCHER,
    MATER,
    FIRST_FINISHER,
    SITE_WARPS = 20,
    FINISHERS = SITE_WARPS - FIRST_FINISHER,
    COEF_SLOTS = 3, /* tiles whose coefficients of post are on chip */
    EIGHT = 8       /* tokens that a mixer works on at a time, half a tile; tokens of the mater */
};

struct site_args {
    const bf16 *x;
    int64_t x_token, x_stream;
    /* post */
    const bf16 *f;
    int64_t f_token;
    view bias, post, res;
    weft_dropout dropout;
    bool in_out;
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
    static constexpr int stages = POST ? 5 : 6, copies = POST ? N + 1 : N, stage_bytes = copies * 512;
    static constexpr int psi_bytes = MIXERS * shape::steps * shape::tiles * 512;
    static constexpr int sums_floats = SITE_TILE * shape::width; /* of a warp */
    /* offsets */
    static constexpr int stream = psi_bytes, sums = stream + MIXERS * stages * stage_bytes;
    static constexpr int coef = sums + 2 * MIXERS * sums_floats * 4;
    static constexpr int logits = coef + (POST ? COEF_SLOTS * SITE_TILE * (N + N * N) * 4 : 0);
    static constexpr int param = logits + 2 * EIGHT * N * N * 4;
    static constexpr int barriers = param + (shape::rows + 3 + 1) / 2 * 8;
    static constexpr int bytes = barriers + (8 + 2 * COEF_SLOTS) * 8;
    static_assert(bytes <= SITE_SHARED, "more shared memory than a block has");
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
 * where the tensor cores are told that these are 2t, 2t + 1, 2t + 8, 2t + 9. Two warps share the work for one mixer. */
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
    float d[TILES == 3 ? 2 : 1][4] = {}, squares[4] = {};
};

template <int TILES>
static __device__ __forceinline__ void multiply(site_sums<TILES> &s, const uint4 (&a)[TILES], uint32_t b0, uint32_t b1)
{
    mma16(s.d[0], a[0].x, a[0].y, a[0].z, a[0].w, b0, b1);
    if constexpr (TILES == 3) {
        mma16(s.d[0], a[1].x, a[1].y, a[1].z, a[1].w, b0, b1);
        mma16(s.d[1], a[2].x, a[2].y, a[2].z, a[2].w, b0, b1);
    }
    /* The operand is its own transpose: token by token, and the diagonal is what we want. */
    mma16(s.squares, b0, 0, b1, 0, b0, b1);
}

/* To [token][row] of eight tokens. D has row g (and g + 8) of tokens 2t, 2t + 1. */
template <int N, bool HEAD>
static __device__ __forceinline__ void leave_sums(float *to, const site_sums<site_shape<N, HEAD>::tiles> &s, int lane)
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
    if (t == g >> 1) to[g * shape::width + shape::rows] = g & 1 ? s.squares[1] : s.squares[0];
}

/* New streams of one token and 8 channels, in the place of the old ones; f lies behind them. Streams are 512 bytes apart. */
template <int N, post_mode MODE>
static __device__ __forceinline__ void mix(char *own, const coefs<N> &k, const site_args &p, const weft_mask &mask,
                                           int64_t token, int channel)
{
    post_extra<N, 8> extra;
    raw<bf16, 8> x[N], f;
    load_extra<N, 8, MODE>(extra, p.bias, mask, token, channel);
#pragma unroll
    for (int i = 0; i < N; i++) memcpy(&x[i], __builtin_assume_aligned(own + i * 512, 16), 16);
    memcpy(&f, __builtin_assume_aligned(own + N * 512, 16), 16);
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
#pragma unroll
    for (int i = 0; i < N; i++) memcpy(__builtin_assume_aligned(own + i * 512, 16), &x[i], 16);
}

/* A lane of a mixer on its way through the tokens of its group, counted in eights: two a tile. */
struct mixer_walk {
    const bf16 *x, *f;
    bf16 *y;
    int64_t token;
    int32_t near, far; /* tokens from the first eight of a tile to the second, from there to the next tile */
    bool second;

    __device__ __forceinline__ void step(const site_args &p)
    {
        const int64_t by = second ? far : near;
        x += by * p.x_token, f += by * p.f_token, y += by * p.y_token;
        token += by;
        second = !second;
    }
};

static __device__ __forceinline__ mixer_walk mixer_begin(const site_args &p, int group, int channel, int lane)
{
    const int64_t token = (int64_t)group * SITE_TILE + (lane >> 2);
    return {p.x + token * p.x_token + channel,
            p.f + token * p.f_token + channel,
            p.y + token * p.y_token + channel,
            token,
            EIGHT,
            p.groups * SITE_TILE - EIGHT,
            false};
}

/* to: of this lane in the stage. What the finishers will read again stays in the cache as long as it can; what nobody
 * reads again goes first. */
template <int N, bool POST>
static __device__ __forceinline__ void copy_eight(const site_args &p, mixer_walk &m, bool inside, uint32_t to,
                                                  uint64_t policy)
{
    const bool valid = inside && m.token < p.tokens;
#pragma unroll
    for (int i = 0; i < N; i++)
        copy_async_hint(to + i * 512, valid ? m.x + i * p.x_stream : p.x, valid, policy);
    if constexpr (POST) copy_async_hint(to + N * 512, valid ? m.f : p.f, valid, policy);
    copy_commit();
    m.step(p);
}

template <int N, bool HEAD, bool POST, post_mode MODE>
static __device__ __forceinline__ void mixer(const site_args &p, char *shared, const site_barriers &b, mixer_walk ahead,
                                             uint64_t policy, int group, int channel, int warp, int lane)
{
    typedef site_room<N, HEAD, POST> room;
    typedef site_shape<N, HEAD> shape;
    constexpr int STAGES = room::stages;
    const bool inside = channel < p.channels;
    char *const own = shared + room::stream + warp * STAGES * room::stage_bytes + lane * 16;
    const uint32_t ring = shared_address(own);
    const uint4 *const psi = (const uint4 *)shared + warp * shape::steps * shape::tiles * 32 + lane;
    mixer_walk now = mixer_begin(p, group, channel, lane);
    weft_mask mask = {};
    if constexpr (POST && MODE == FULL) mask = weft_mask_open(&p.dropout, p.channels);

    int slot = 0, k = 0, half = 0;
    uint32_t coef_parity = 0, sums_parity = 1;
#pragma unroll 1
    for (int64_t tile = group; tile < p.tiles; tile += p.groups) {
        const int slots[2] = {slot, slot == STAGES - 1 ? 0 : slot + 1};
        site_sums<shape::tiles> sums[2];
        copy_wait<STAGES - 2>();
        if constexpr (POST) {
            barrier_wait(b.coef_full + k * 8, coef_parity);
#pragma unroll 1
            for (int e = 0; e < 2; e++) {
                char *const from = own + (e ? slots[1] : slots[0]) * room::stage_bytes;
                const coefs<N> &coef = ((const coefs<N> *)(shared + room::coef))[k * SITE_TILE + e * EIGHT + (lane >> 2)];
                if (inside && now.token < p.tokens) {
                    mix<N, MODE>(from, coef, p, mask, now.token, channel);
#pragma unroll
                    for (int i = 0; i < N; i++) {
                        const uint4 y = *(const uint4 *)(from + i * 512);
                        store_vector(now.y + i * p.y_stream, y.x, y.y, y.z, y.w);
                    }
                }
                now.step(p);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(b.coef_empty + k * 8);
            if (++k == COEF_SLOTS) k = 0, coef_parity ^= 1;
        }
#pragma unroll 2
        for (int i = 0; i < N; i++) {
            uint4 y[2];
#pragma unroll
            for (int e = 0; e < 2; e++) y[e] = *(const uint4 *)(own + slots[e] * room::stage_bytes + i * 512);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint4 a[shape::tiles];
#pragma unroll
                for (int q = 0; q < shape::tiles; q++) a[q] = psi[((i * 2 + h) * shape::tiles + q) * 32];
#pragma unroll
                for (int e = 0; e < 2; e++)
                    multiply<shape::tiles>(sums[e], a, h ? y[e].z : y[e].x, h ? y[e].w : y[e].y);
            }
        }
#pragma unroll
        for (int e = 0; e < 2; e++) copy_eight<N, POST>(p, ahead, inside, ring + slots[e] * room::stage_bytes, policy);
        slot = slots[1] == STAGES - 1 ? 0 : slots[1] + 1;

        barrier_wait(b.empty + half * 8, sums_parity);
        float *const to = (float *)(shared + room::sums) + (half * MIXERS + warp) * room::sums_floats;
#pragma unroll
        for (int e = 0; e < 2; e++) leave_sums<N, HEAD>(to + e * EIGHT * shape::width, sums[e], lane);
        __syncwarp(); /* what the warp stored comes before its arrival */
        if (lane == 0) barrier_arrive(b.full + half * 8);
        half ^= 1;
        if (half == 0) sums_parity ^= 1;
    }
    copy_wait<0>();
}

/* ---- counters in memory ------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void wait_count(const uint32_t *counter, uint32_t target)
{
    uint32_t seen;
    while (true) {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
        if (seen >= target) return;
        __nanosleep(100);
    }
}

static __device__ __forceinline__ void count_one(uint32_t *counter)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

/* ---- teller, fetcher ---------------------------------------------------------------------------------------------------- */

template <int N, bool HEAD, bool POST>
static __device__ __forceinline__ void teller(const site_args &p, const char *shared, const site_barriers &b, int slice,
                                              int group, int lane)
{
    typedef site_room<N, HEAD, POST> room;
    typedef site_shape<N, HEAD> shape;
    uint32_t *const counted = p.counters + group * 2 * SITE_RING, *const taken = counted + SITE_RING;
    float *const ring = p.ring + (int64_t)group * SITE_RING * p.slices * SITE_TILE * SITE_ROW;
    int64_t tile = 0;
#pragma unroll 1
    for (int64_t at = group; at < p.tiles; at += p.groups, tile++) {
        const int half = (int)(tile & 1), slot = (int)(tile % SITE_RING);
        const float *const from =
            (const float *)(shared + room::sums) + half * MIXERS * room::sums_floats + (lane < shape::width ? lane : 0);
        float v[SITE_TILE];
        barrier_wait(b.full + half * 8, (uint32_t)(tile >> 1) & 1);
#pragma unroll
        for (int i = 0; i < SITE_TILE; i++) v[i] = from[i * shape::width];
#pragma unroll 1
        for (int w = 1; w < MIXERS; w++)
#pragma unroll
            for (int i = 0; i < SITE_TILE; i++) v[i] += from[w * room::sums_floats + i * shape::width];
        __syncwarp();
        if (lane == 0) barrier_arrive(b.empty + half * 8);
        if (tile >= SITE_RING) {
            if (lane == 0) wait_count(taken + slot, (uint32_t)(tile / SITE_RING) * SITE_TILE);
            __syncwarp();
        }
        float *const to = ring + ((int64_t)slot * p.slices + slice) * SITE_TILE * SITE_ROW + lane;
#pragma unroll
        for (int i = 0; i < SITE_TILE; i++)
            if (lane < shape::width) to[i * SITE_ROW] = v[i];
        __syncwarp();
        if (lane == 0) count_one(counted + slot); /* after the streams of the mixers too, which arrived before */
    }
}

template <int N>
static __device__ __forceinline__ void fetcher(const site_args &p, float *coef, const site_barriers &b, int group,
                                               int lane)
{
    constexpr int M = N + N * N, OWN = SITE_TILE * M / 32;
    int64_t tile = 0;
#pragma unroll 1
    for (int64_t at = group; at < p.tiles; at += p.groups, tile++) {
        const int k = (int)(tile % COEF_SLOTS);
        float v[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int e = i * 32 + lane, row = e / M;
            const int64_t token = at * SITE_TILE + row;
            v[i] = coef_at(p.post, p.res, p.in_out, N, token < p.tokens ? token : p.tokens - 1, e - row * M);
        }
        barrier_wait(b.coef_empty + k * 8, ((uint32_t)(tile / COEF_SLOTS) & 1) ^ 1);
#pragma unroll
        for (int i = 0; i < OWN; i++) coef[k * SITE_TILE * M + i * 32 + lane] = v[i];
        __syncwarp();
        if (lane == 0) barrier_arrive(b.coef_full + k * 8);
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

/* u of a token, and the sum of its squares over the lanes. */
template <int N>
static __device__ __forceinline__ float aggregate_token(const bf16 *from, int64_t stream, bf16 *u,
                                                        const float (&pre)[N], int channels, int lane)
{
    constexpr int AHEAD = 2;
    float squares = 0.0f;
#pragma unroll 1
    for (int c0 = lane * 8; c0 < channels; c0 += AHEAD * 256) {
        uint4 x[AHEAD][N];
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
            if (c0 + a * 256 < channels)
#pragma unroll
                for (int i = 0; i < N; i++) x[a][i] = load_cached(from + i * stream + c0 + a * 256);
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (c0 + a * 256 >= channels) continue;
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
            store_vector(u + c0 + a * 256, word[0], word[1], word[2], word[3]);
        }
    }
    return warp_sum(squares);
}

/* v from u, which this lane stored itself. */
static __device__ __forceinline__ void norm_token(bf16 *v, const bf16 *u, float inverse, const view &weight, int channels,
                                                  int lane)
{
#pragma unroll 4
    for (int c = lane * 8; c < channels; c += 256) {
        float x[8], w[8];
        load_shared<bf16, 8>(x, u + c);
        if (has(weight)) get_param<8>(w, weight, c);
#pragma unroll
        for (int k = 0; k < 8; k++) x[k] = has(weight) ? x[k] * inverse * w[k] : x[k] * inverse * 1.0f;
        store<bf16, 8>(v + c, x);
    }
}

template <int N, bool HEAD, bool POST>
static __device__ __forceinline__ void finisher(const site_args &p, float *logits, const float *param,
                                                const site_barriers &b, int slice, int group, int which, int lane)
{
    typedef site_shape<N, HEAD> shape;
    constexpr int R = shape::rows;
    uint32_t *const counted = p.counters + group * 2 * SITE_RING, *const taken = counted + SITE_RING;
    const float *const ring = p.ring + (int64_t)group * SITE_RING * p.slices * SITE_TILE * SITE_ROW;
    const int64_t mine = tokens_of(p, slice, group);
#pragma unroll 1
    for (int64_t k = which; k < mine; k += FINISHERS) {
        const int64_t q = slice + k * p.slices, tile = q / SITE_TILE;
        const int row = (int)(q % SITE_TILE), slot = (int)(tile % SITE_RING);
        const int64_t token = (group + tile * p.groups) * SITE_TILE + row;
        float pre = 0.0f;
        if (has(p.pre_in) && lane < N) pre = get(p.pre_in, token * p.pre_in.stride[0] + lane * p.pre_in.stride[1]);
        if (lane == 0) wait_count(counted + slot, (uint32_t)(tile / SITE_RING + 1) * p.slices);
        __syncwarp();
        const float *from =
            ring + ((int64_t)slot * p.slices * SITE_TILE + row) * SITE_ROW + (lane < shape::width ? lane : 0);
        float h = 0.0f;
#pragma unroll 8
        for (int s = 0; s < p.slices; s++) h += __ldcg(from + (int64_t)s * SITE_TILE * SITE_ROW);
        __syncwarp();
        if (lane == 0) count_one(taken + slot);

        const float ms = __shfl_sync(0xffffffffu, h, R) * p.mean;
        const int kind = lane < N ? 0 : lane < 2 * N ? 1 : 2;
        const float inv = mm_inv_rms(ms, p.numbers.rms_eps, p.numbers.rms_eps_kind);
        float gate = 0.0f;
        if (lane < R) {
            if (has(p.h)) put(p.h, token * p.h.stride[0] + lane * p.h.stride[1], h);
            gate = gate_fwd(h, inv, param[R + kind], param[lane], kind, p.numbers);
            if (kind == 0 && has(p.pre)) put(p.pre, token * p.pre.stride[0] + lane * p.pre.stride[1], gate);
            if (kind == 1 && has(p.post_out))
                put(p.post_out, token * p.post_out.stride[0] + (lane - N) * p.post_out.stride[1], gate);
        } else if (lane == R && has(p.ms)) {
            put(p.ms, token * p.ms.stride[0], ms);
        }
        if constexpr (!HEAD) {
            if (has(p.res_out)) {
                const int batch = (int)(k / EIGHT & 1);
                barrier_wait(b.logits_empty + batch * 8, ((uint32_t)(k / (2 * EIGHT)) & 1) ^ 1);
                if (kind == 2 && lane < R) logits[(lane - 2 * N) * 2 * EIGHT + k % (2 * EIGHT)] = gate;
                __syncwarp();
                if (lane == 0) barrier_arrive(b.logits_full + batch * 8);
            }
        }
        if (p.u || p.v) {
            const bf16 *const streams = POST ? p.y + token * p.y_token : p.x + token * p.x_token;
            bf16 *const u = p.u ? p.u + token * p.u_token : p.v + token * p.v_token;
            float factor[N];
            if (!has(p.pre_in)) pre = as_stored(p.pre, gate);
#pragma unroll
            for (int i = 0; i < N; i++) factor[i] = __shfl_sync(0xffffffffu, pre, i);
            const float squares =
                aggregate_token<N>(streams, POST ? p.y_stream : p.x_stream, u, factor, p.channels, lane);
            if (p.v)
                norm_token(p.v + token * p.v_token, u, 1.0f / sqrtf(squares / (float)p.channels + p.sub_eps),
                           p.sub_weight, p.channels, lane);
        }
    }
}

template <int N>
static __device__ __forceinline__ void mater(const site_args &p, const float *logits, const site_barriers &b, int slice,
                                             int group, int lane)
{
    const int64_t mine = tokens_of(p, slice, group);
    if (!has(p.res_out)) return;
#pragma unroll 1
    for (int64_t k0 = 0; k0 < mine; k0 += EIGHT) {
        const int batch = (int)(k0 / EIGHT & 1);
        const int64_t k = k0 + lane % EIGHT, q = slice + k * p.slices, tile = q / SITE_TILE;
        const int64_t token = (group + tile * p.groups) * SITE_TILE + q % SITE_TILE;
        float z[N * N];
        /* The last ones may be fewer: the barrier does without those that never come. */
        for (int64_t missing = mine; missing < k0 + EIGHT; missing++)
            if (lane == 0) barrier_arrive(b.logits_full + batch * 8);
        barrier_wait(b.logits_full + batch * 8, (uint32_t)(k0 / (2 * EIGHT)) & 1);
#pragma unroll
        for (int e = 0; e < N * N; e++) z[e] = logits[e * 2 * EIGHT + k % (2 * EIGHT)];
        __syncwarp();
        if (lane == 0) barrier_arrive(b.logits_empty + batch * 8);
        sinkhorn_fwd<N>(z, p.numbers);
        if (lane < EIGHT && k < mine) {
            const view &to = p.res_out;
#pragma unroll
            for (int e = 0; e < N * N; e++)
                put(to, token * to.stride[0] + e / N * to.stride[1] + e % N * to.stride[2], z[e]);
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
    const int mixed = warp % MIXERS; /* the mixer that this warp is, or works for */
    const int channel = slice * SITE_CHANNELS + mixed * 32 + (lane & 3) * 8;
    mixer_walk ahead = mixer_begin(p, group, channel, lane);
    const uint64_t policy = POST ? evict_first() : evict_normal();
    if (warp < MIXERS) {
        const uint32_t to = shared_address(shared + room::stream) + warp * room::stages * room::stage_bytes + lane * 16;
#pragma unroll 1
        for (int s = 0; s < room::stages; s++)
            copy_eight<N, POST>(p, ahead, channel < p.channels, to + s * room::stage_bytes, policy);
    }
    if (slice == 0 && threadIdx.x < 2 * SITE_RING) p.counters[group * 2 * SITE_RING + threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            barrier_init(b.full + i * 8, MIXERS), barrier_init(b.empty + i * 8, 1);
            barrier_init(b.logits_full + i * 8, EIGHT), barrier_init(b.logits_empty + i * 8, 1);
        }
        for (int i = 0; i < COEF_SLOTS; i++)
            barrier_init(b.coef_full + i * 8, 1), barrier_init(b.coef_empty + i * 8, MIXERS);
    }
    stage_params(param, p.alpha, p.beta, shape::rows, HEAD ? 1 : 3);
    if (warp < 2 * MIXERS)
        fill_psi<N, HEAD>((uint4 *)shared + mixed * shape::steps * shape::tiles * 32, p, channel,
                          warp / MIXERS * (shape::steps / 2), lane);
    cooperative_groups::this_grid().sync(); /* barriers exist, counters are zero */

    if (warp < MIXERS) {
        mixer<N, HEAD, POST, MODE>(p, shared, b, ahead, policy, group, channel, warp, lane);
    } else if (warp == TELLER) {
        teller<N, HEAD, POST>(p, shared, b, slice, group, lane);
    } else if (warp == FETCHER) {
        if constexpr (POST) fetcher<N>(p, (float *)(shared + room::coef), b, group, lane);
    } else if (warp == MATER) {
        if constexpr (!HEAD) mater<N>(p, (const float *)(shared + room::logits), b, slice, group, lane);
    } else {
        finisher<N, HEAD, POST>(p, (float *)(shared + room::logits), param, b, slice, group, warp - FIRST_FINISHER, lane);
    }
}

#endif
