/* SPDX-License-Identifier: Apache-2.0
 *
 * Backward of `boundary` [M11] from the gradients of the projection on, in one pass: reads x, f, d_y, d_u (or d_v) and
 * writes d_x, d_f, 6nC + 6C bytes a token in bf16. y and its whole gradient never leave the chip.
 *
 *     y[o]      = post (x, f), rounded, as forward made it                                             mhc_post.cuh
 *     du        = d_u + r (d_v weight - k u), u = sum_o pre[o] y[o], rounded
 *     g[o]      = d_y[o] + pre[o] du + sum_j d_h[j] psi[j,o] + (2 d_ms / K) y[o]                       fp32
 *     d_f, d_x  = sum_o post[o] g[o], sum_o W(i,o) g[o]
 *     d_post[o] = sum_c g[o] (f + bias);  d_W(i,o) = sum_c x[i] g[o];  d_pre_in[o] = sum_c du y[o]
 *     dpsi[j,o] = sum_t d_h[j] y[o];      d_sub_weight = sum_t d_v u r;  d_bias = sum_t d_f
 *
 * A block owns 128 channels of all streams and a range of tokens; where its share of the work is more it goes on with the next
 * channels, and with the last tokens of these. Eight warps own 16 channels each: psi of these stays in registers, and so do
 * their sums over tokens. Four more warps let the copy engine fill a ring of tiles of 16 tokens, let it store what the others
 * left in a tile, and add their sums over channels. The parts of d_x and dpsi that are products of matrices run on tensor
 * cores, fp32 factors as bf16 hi + lo, as in mhc_project_bwd.cu.
 *
 * mhc_boundary_bwd_fold.cu adds the slices of the channels and the ranges of tokens in order; both depend on the shape only. */
#include "core/status.h"
#include "cuda/common/kept.h"
#include "cuda/common/tma.cuh"
#include "cuda/mhc_boundary_bwd.cuh"

/* Three groups of four warps: two work, the third serves. Registers are handed from the third to the others, as far as the
 * GPU can: the two that are resident beside one serving warp then have 232 each. */
enum { WARPS = 8, SERVERS = 4, THREADS = (WARPS + SERVERS) * 32 };
enum { WORKING_REGISTERS = 232, SERVING_REGISTERS = 40 };

/* Shared memory. A stage of the ring: x and d_y as two boxes of 64 channels each, f, and d_u or d_v. Behind all tiles their
 * records, the norm's weights, a lane's sums over tokens, and where there are no registers left for it psi's lo part. */
template <int N, bool FULL_> struct sizes {
    static constexpr int stages = FULL_ ? BOUNDARY_FULL_STAGES : BOUNDARY_STAGES;
    static constexpr int row_box = BOUNDARY_TILE * TMA_ROW, box = N * row_box;
    static constexpr int x = 0, d_y = 2 * box, f = 4 * box, row = f + 2 * row_box, tile = row + 2 * row_box;
    static constexpr int record = BOUNDARY_TILE * boundary_record<N>::pieces * 16;
    static constexpr int records = stages * tile, weight = records + stages * record;
    static constexpr int d_weight = weight + BOUNDARY_SLICE * 4, d_bias = d_weight + WARPS * 32 * 16;
    static constexpr int psi_lo = d_bias + (FULL_ ? WARPS * 32 * 16 : 0);
    static constexpr int barriers = psi_lo + (FULL_ ? WARPS * 2 * N * 32 * 16 : 0);
    static constexpr int all = barriers + 3 * stages * 8 + 8 + TMA_ALIGN;
    static_assert(tile % TMA_ALIGN == 0, "boxes begin on multiples of what the copy engine swizzles");
    static_assert(boundary_record<N>::row_tiles <= 3, "a tile of psi's lo part is a piece of 16 bytes");
};

/* ---- the pass ----------------------------------------------------------------------------------------------------------- */

struct fused_args {
    CUtensorMap x, f, d_y, row, d_x, d_f; /* row: d_u, or d_v where there is a norm */
    const uint4 *records;
    const float *psi;            /* [rows], psi_stride apart */
    float *dpsi;                 /* [pieces][rows][n][128], or NULL */
    float *sums;                 /* [slices][tiles * 16][sums of a token], or NULL */
    float *d_bias, *d_weight;    /* [pieces][128], or NULL */
    view weight;                 /* NORM: of the norm */
    view bias, d_x_any, d_f_any; /* FULL: gradients that the copy engine cannot store */
    view d_u;                    /* FULL: beside d_v */
    weft_dropout dropout;
    int64_t psi_stride, tokens;
    boundary_bwd_plan plan;
    int32_t channels;
    bool has_d_y, has_row, store_d_x, store_d_f;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* How many numbers a token's sums over channels are, to a multiple of four, and where they lie between two warps: in place
 * of the warp's y, where a token has two pieces of 16 bytes for each stream. Either half of the numbers takes one of them;
 * tokens 8 to 15 swap the halves of a piece, or they would meet tokens 0 to 7 in the same banks. */
template <int N, bool SHIFTED, bool POST> struct sum_room {
    static constexpr int used = (POST ? N + N * N : 0) + (SHIFTED ? N : 0), count = (used + 3) / 4 * 4,
                         half = count / 2;
    static_assert(half <= N * 4, "a piece for each stream");
    static __device__ __forceinline__ uint32_t at(int warp, int token, int part, int k)
    {
        return (warp >> 2) * sizes<N, false>::box + (k >> 2) * sizes<N, false>::row_box +
               tma_piece(token, 2 * (warp & 3) + part) + (((k >> 1) ^ (token >> 3)) & 1) * 8;
    }
    /* Of the first warp: the piece that k is in. */
    static __device__ __forceinline__ uint32_t piece_at(int token, int part, int k)
    {
        return (k >> 2) * sizes<N, false>::row_box + tma_piece(token, part);
    }
    /* The place in another warp's room that is like this one of warp 0; tiles are aligned to more than a row. */
    static __device__ __forceinline__ uint32_t of_warp(uint32_t of_first, int warp)
    {
        return (of_first ^ (uint32_t)(warp & 3) << 5) + (warp >> 2) * sizes<N, false>::box;
    }
};

/* Barriers, one of each kind for each stage: a tile has come; the eight warps have done with it; it has gone and its sums
 * are added. Every lane arrives at the last two itself: one arrival a warp would do, 0.3 % faster, but no tool sees then
 * that what the other lanes wrote is in order. And one of its own: the first psi has come. */
struct ring_barriers {
    uint32_t full, done, free, psi;
};

/* What a warp knows of the block's work. */
struct tiles_of_block {
    char *shared;
    ring_barriers at;
};

/* A place in the ring. */
struct ring_place {
    int slot = 0, phase = 0;
    template <int STAGES> __device__ __forceinline__ void next()
    {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    }
};

/* On the way through the tiles of a block, piece by piece. */
struct tile_walk {
    const boundary_bwd_plan &plan;
    int slice, tile, left; /* left: of the piece */
    ring_place ring;
    __device__ __forceinline__ tile_walk(const boundary_bwd_plan &p) : plan(p)
    {
        slice = boundary_first_slice(&p, blockIdx.x) - 1;
        do next_piece();
        while (left == 0 && !is_last());
    }
    __device__ __forceinline__ bool is_last() const
    {
        return slice >= boundary_last_slice(&plan, blockIdx.x);
    }
    __device__ __forceinline__ void next_piece()
    {
        const boundary_piece piece = boundary_piece_of(&plan, blockIdx.x, ++slice);
        tile = piece.tile, left = piece.count;
    }
    template <int STAGES> __device__ __forceinline__ void next()
    {
        tile++, ring.next<STAGES>();
        if (--left == 0 && !is_last()) next_piece();
    }
};

/* One thread: tiles in. */
template <int N, bool FULL_, bool POST>
static __device__ __forceinline__ void bring(const fused_args &p, const tiles_of_block &b)
{
    typedef sizes<N, FULL_> S;
    const uint32_t tiles = shared_address(b.shared), records = tiles + S::records;
    auto load_record = [&](const tile_walk &i) {
        tma_load_bytes(records + i.ring.slot * S::record,
                       p.records + (int64_t)i.tile * (BOUNDARY_TILE * boundary_record<N>::pieces), S::record,
                       b.at.full + i.ring.slot * 8);
    };
    auto load_tile = [&](const tile_walk &i) {
        const uint32_t barrier = b.at.full + i.ring.slot * 8;
        const int token = i.tile * BOUNDARY_TILE;
        tma_expect(barrier, S::record + 2 * S::box + (POST ? 2 * S::row_box : 0) + (p.has_d_y ? 2 * S::box : 0) +
                                (p.has_row ? 2 * S::row_box : 0));
#pragma unroll 1
        for (int k = 0; k < 2; k++) {
            const uint32_t to = tiles + i.ring.slot * S::tile + k * S::row_box;
            const int c = i.slice * BOUNDARY_SLICE + k * TMA_CHANNELS;
            tma_load(to + S::x + k * (S::box - S::row_box), &p.x, c, token, barrier);
            if (POST) tma_load(to + S::f, &p.f, c, token, barrier);
            if (p.has_d_y) tma_load(to + S::d_y + k * (S::box - S::row_box), &p.d_y, c, token, barrier);
            if (p.has_row) tma_load(to + S::row, &p.row, c, token, barrier);
        }
    };
    /* psi of the next channels, so that the warps find it in the L2 when they get there; only where it is easy. */
    const bool whole = p.psi_stride % 4 == 0 && (uintptr_t)p.psi % 16 == 0;
    auto prefetch_psi = [&](int slice) {
        const int c = slice * BOUNDARY_SLICE, bytes = min(p.channels - c, (int)BOUNDARY_SLICE) * 4;
#pragma unroll 1 /* code that runs for the first time is slow, and in a row this is 1400 instructions of it */
        for (int k = 0; whole && k < boundary_record<N>::rows * N; k++)
            tma_prefetch_bytes(p.psi + k / N * p.psi_stride + k % N * p.channels + c, bytes);
    };
    /* At the beginning one tile, what the gates and the sums left, another tile, and no more before psi is there: what is asked
     * for first comes first, and nothing can be done without psi. */
    int begun = 0;
#pragma unroll 1
    for (tile_walk i(p.plan); i.left > 0; i.next<S::stages>()) {
        barrier_wait(b.at.free + i.ring.slot * 8, i.ring.phase ^ 1);
        if (begun == 2) barrier_wait(b.at.psi, 0);
        load_tile(i);
        if (begun == 0) wait_for_previous();
        if (begun < 3) begun++;
        load_record(i);
        if (i.left == 1 && !i.is_last()) prefetch_psi(i.slice + 1);
    }
}

/* The other serving warps, `server` from 0 on: tiles out, and the sums of the eight warps in their order. */
template <int N, bool FULL_, bool SHIFTED, bool POST>
static __device__ __forceinline__ void clear(const fused_args &p, const tiles_of_block &b, int server)
{
    typedef sizes<N, FULL_> S;
    typedef sum_room<N, SHIFTED, POST> room;
    /* A lane adds four of a token's sums. */
    constexpr int EACH = room::half ? (room::half + 3) / 4 : 1, PIECES = BOUNDARY_TILE * 2 * EACH,
                  ITEMS = BOUNDARY_TILE * room::count / 2;
    static_assert(PIECES <= (SERVERS - 1) * 32, "a piece for each lane");
    const int lane = threadIdx.x & 31, piece = server * 32 + lane;
    const int token = piece / (2 * EACH), part = piece / EACH & 1, k = piece % EACH * 4;
    const bool stores = server == 0 && lane == 0 && (p.store_d_x || p.store_d_f);
    float2 *const all_sums = (float2 *)p.sums + (token * room::count + part * room::half + k) / 2;
    for (tile_walk i(p.plan); i.left > 0; i.next<S::stages>()) {
        char *const tile = b.shared + i.ring.slot * S::tile;
        barrier_wait(b.at.done + i.ring.slot * 8, i.ring.phase);
        if (stores) {
            const uint32_t from = shared_address(tile);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int c = i.slice * BOUNDARY_SLICE + h * TMA_CHANNELS, first = i.tile * BOUNDARY_TILE;
                if (p.store_d_x) tma_store(&p.d_x, from + S::d_y + h * S::box, c, first);
                if (POST && p.store_d_f) tma_store(&p.d_f, from + S::f + h * S::row_box, c, first);
            }
            tma_commit();
        }
        __syncwarp();
        if (room::count && p.sums && piece < PIECES) {
            const uint32_t from = S::x + room::piece_at(token, part, k);
            float4 total = *(const float4 *)(tile + from);
#pragma unroll
            for (int w = 1; w < WARPS; w++) {
                const float4 v = *(const float4 *)(tile + room::of_warp(from, w));
                total.x = total.x + v.x, total.y = total.y + v.y, total.z = total.z + v.z, total.w = total.w + v.w;
            }
            if (token & 8) total = make_float4(total.z, total.w, total.x, total.y);
            float2 *const sums = all_sums + (i.slice * p.plan.tiles + i.tile) * ITEMS;
            sums[0] = make_float2(total.x, total.y);
            if (k + 2 < room::half) sums[1] = make_float2(total.z, total.w);
        }
        if (stores) tma_wait<false>();
        barrier_arrive(b.at.free + i.ring.slot * 8);
    }
    if (stores) tma_wait<true>();
}

/* What a lane holds of one token: four channels of all streams. */
struct quad {
    uint32_t word[2];
};

static __device__ __forceinline__ quad get_quad(const char *p)
{
    const uint2 v = *(const uint2 *)p;
    return {{v.x, v.y}};
}

static __device__ __forceinline__ void put_quad(char *p, const quad &q)
{
    *(uint2 *)p = make_uint2(q.word[0], q.word[1]);
}

/* The second half of a sum over the four lanes that share two tokens; the first is in the order of the work. Afterwards
 * lane t has half of the sums, part t >> 1, in the first elements. */
template <int M> static __device__ __forceinline__ void share_sums(float (&v)[M], int t)
{
#pragma unroll
    for (int k = 0; k < M / 2; k++)
        v[k] = (t & 2 ? v[k + M / 2] : v[k]) + __shfl_xor_sync(0xffffffffu, t & 2 ? v[k] : v[k + M / 2], 2);
}

/* Two channels of gradients that the copy engine does not store. */
template <int N, bool POST>
static __device__ __forceinline__ void put_pairs(const fused_args &p, int64_t token, int channel,
                                                 const float (&d_x)[N][2], const float (&d_f)[2])
{
    const view &to = p.d_x_any, &row = p.d_f_any;
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int j = 0; j < N; j++)
            if (has(to)) put(to, token * to.stride[0] + j * to.stride[1] + (channel + e) * to.stride[2], d_x[j][e]);
        if (POST && has(row)) put(row, token * row.stride[0] + (channel + e) * row.stride[1], d_f[e]);
    }
}

/* Sums over tokens of four channels: of all lanes that have the same ones. */
static __device__ __forceinline__ void put_sums(float *to, const float2 *from)
{
    float v[4] = {from[0].x, from[0].y, from[1].x, from[1].y};
#pragma unroll
    for (int c = 0; c < 4; c++) {
#pragma unroll
        for (int step = 16; step >= 4; step >>= 1) v[c] += __shfl_xor_sync(0xffffffffu, v[c], step);
        if ((threadIdx.x & 31) < 4) to[c] = v[c];
    }
}

/* One of the eight warps, with a piece. */
template <int N, bool FULL_, bool SHIFTED, bool NORM, bool POST>
static __device__ __forceinline__ void work(const fused_args &p, const tiles_of_block &b, const weft_mask &mask,
                                            int slice, const boundary_piece &part, bool is_first, ring_place &ring)
{
    typedef sizes<N, FULL_> S;
    typedef sum_room<N, SHIFTED, POST> room;
    constexpr int NT = boundary_record<N>::row_tiles, PIECES = boundary_record<N>::pieces, M = room::count;
    /* y is stored word by word where there is no register left to keep it in. */
    constexpr bool AT_ONCE = POST && SHIFTED && NORM;
    constexpr int PRE_AT = room::used - N; /* of d_pre_in among the sums */
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int channel0 = slice * BOUNDARY_SLICE + warp * 16, channel = channel0 + t * 4;
    /* Which token is a tensor-core tile's row r is free as well: with 0 2 4 6 1 3 5 7 the sixteen lanes of half a warp read
     * eight different pieces of 16 bytes. */
    auto token_of = [](int r) { return (r & 8) | (r & 3) << 1 | (r >> 2 & 1); };
    const int token = token_of(g);
    const uint32_t piece = tma_piece(token, 2 * (warp & 3) + (t >> 1)) + (t & 1) * 8;
    const uint32_t at = (warp >> 2) * S::box + piece, row_at = (warp >> 2) * S::row_box + piece;
    /* psi of this warp's columns, hi and lo, as halves of B. Column n of tile q of a stream is channel
     * (n >> 1) * 4 + 2 q + (n & 1), so that a lane ends up with four neighbours. */
    uint32_t psi_hi[2 * N][NT], psi_lo[2 * N][NT];
    uint4 *const psi_room = (uint4 *)(b.shared + S::psi_lo) + (warp * 2 * N) * 32 + lane;
#pragma unroll
    for (int q = 0; q < 2 * N; q++) {
        const int c = channel0 + (g >> 1) * 4 + 2 * (q & 1) + (g & 1);
#pragma unroll
        for (int h = 0; h < NT; h++) {
            float v[2] = {};
            const float *from = p.psi + (8 * h + 2 * t) * p.psi_stride + (int64_t)(q >> 1) * p.channels + c;
            if (c < p.channels) v[0] = __ldg(from), v[1] = __ldg(from + p.psi_stride);
            split2(psi_hi[q][h], psi_lo[q][h], v[0], v[1]);
        }
        if constexpr (FULL_)
            psi_room[q * 32] = make_uint4(psi_lo[q][0], psi_lo[q][NT > 1 ? 1 : 0], psi_lo[q][NT > 2 ? 2 : 0], 0);
    }
    float dpsi[N][NT][4] = {};
    /* A lane's sums over tokens of its four channels. */
    float2 *const d_weight = (float2 *)(b.shared + S::d_weight) + threadIdx.x * 2;
    float2 *const d_bias = (float2 *)(b.shared + S::d_bias) + threadIdx.x * 2;
    if constexpr (NORM) {
        const int c = channel0 + (lane & 15);
        __syncwarp();
        if (lane < 16)
            ((float *)(b.shared + S::weight))[warp * 16 + lane] =
                has(p.weight) && c < p.channels ? get(p.weight, c * p.weight.stride[0]) : 1.0f;
        __syncwarp();
        d_weight[0] = d_weight[1] = make_float2(0.0f, 0.0f);
    }
    if constexpr (FULL_) d_bias[0] = d_bias[1] = make_float2(0.0f, 0.0f);
    const float factor_kept = FULL_ ? (float)mask.scale : 1.0f;
    if (is_first) barrier_arrive(b.at.psi);

    for (int tile_token = part.tile * BOUNDARY_TILE, end = tile_token + part.count * BOUNDARY_TILE;
         tile_token != end; tile_token += BOUNDARY_TILE) {
        char *const tile = b.shared + ring.slot * S::tile, *const record =
                                                               b.shared + S::records + ring.slot * S::record;
        barrier_wait(b.at.full + ring.slot * 8, ring.phase);

        /* d_y and the projection's part of g: halves of A are 8 columns of d_h, hi then lo; hi hi, lo hi, then hi lo. */
        float acc[2 * N][4] = {};
        if (POST && p.has_d_y) {
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int j = 0; j < N; j++) {
                    const quad v = get_quad(tile + at + half * 8 * TMA_ROW + S::d_y + j * S::row_box);
#pragma unroll
                    for (int q = 0; q < 2; q++)
                        widen2(acc[2 * j + q][2 * half], acc[2 * j + q][2 * half + 1], v.word[q], bf16());
                }
        }
        {
            uint32_t a[2 * NT][2];
#pragma unroll
            for (int h = 0; h < 2 * NT; h += 2) {
                uint32_t r[4];
                ldmatrix4(r, shared_address(record) + (token_of(lane & 15) * PIECES + h + (lane >> 4)) * 16);
                a[h][0] = r[0], a[h][1] = r[1], a[h + 1][0] = r[2], a[h + 1][1] = r[3];
            }
            /* NT is odd: one product begins with hi hi and ends with lo hi, and one is of half the size. */
#pragma unroll
            for (int h = 0; h < 2 * NT; h += 2)
#pragma unroll
                for (int q = 0; q < 2 * N; q++)
                    mma16(acc[q], a[h][0], a[h][1], a[h + 1][0], a[h + 1][1], psi_hi[q][h % NT],
                          psi_hi[q][(h + 1) % NT]);
#pragma unroll
            for (int q = 0; q < 2 * N; q++) {
                if constexpr (FULL_) {
                    const uint4 v = psi_room[q * 32];
                    const uint32_t word[3] = {v.x, v.y, v.z};
#pragma unroll
                    for (int h = 0; h < NT; h++) psi_lo[q][h] = word[h];
                }
                if constexpr (NT == 3)
                    mma16(acc[q], a[0][0], a[0][1], a[1][0], a[1][1], psi_lo[q][0], psi_lo[q][1]);
                mma8(acc[q], a[NT - 1][0], a[NT - 1][1], psi_lo[q][NT - 1]);
            }
        }

        /* Lane t first works on the token whose sums lane t ^ 1 keeps and hands these over: even lanes keep the first token's,
         * odd lanes the second's. What it gets in return it adds at the end: to go on from there would add up a token's
         * channels in an order that depends on the token's place in the tile. */
        float sums[M ? M : 1], got[M ? M : 1];
#pragma unroll
        for (int turn = 0; turn < 2; turn++) {
            const int half = turn ? t & 1 : ~t & 1;
            char *const mine = tile + at + half * 8 * TMA_ROW, *const my_row = tile + row_at + half * 8 * TMA_ROW;
            const int own = tile_token + token + half * 8;
            token_coefs<N> k;
            get_record<N>(k, record + (token + half * 8) * PIECES * 16);
            const float scale = k.scale + k.late;
            quad x[N], out[N], f = {}, row = {};
            if constexpr (POST) f = get_quad(my_row + S::f);
#pragma unroll
            for (int j = 0; j < N; j++) {
                x[j] = get_quad(mine + S::x + j * S::row_box);
                out[j] = quad{};
                if (!POST && p.has_d_y) out[j] = get_quad(mine + S::d_y + j * S::row_box);
            }
            if (NORM || p.has_row) row = get_quad(my_row + S::row);
            const bool inside = own < p.tokens && channel < p.channels;
            uint32_t kept = 0; /* four bits for each stream */
            if constexpr (FULL_ && POST)
                if (mask.on) {
                    uint32_t keep[N];
                    keep_tile<N, 4>(keep, mask, own, channel);
#pragma unroll
                    for (int o = 0; o < N; o++) kept |= keep[o] << 4 * o;
                }
#pragma unroll
            for (int e = 0; e < M; e++) {
                if (turn) got[e] = __shfl_xor_sync(0xffffffffu, sums[e], 1);
                sums[e] = 0.0f;
            }
#pragma unroll
            for (int q = 0; q < 2; q++) {
                float xs[N][2], ys[N][2], gs[N][2], fb[2], du[2], d_x[N][2], d_f[2];
                widen2(fb[0], fb[1], f.word[q], bf16());
                widen2(du[0], du[1], row.word[q], bf16());
#pragma unroll
                for (int j = 0; j < N; j++) widen2(xs[j][0], xs[j][1], x[j].word[q], bf16());
                if constexpr (FULL_ && POST)
                    if (has(p.bias) && inside) {
                        float bias[2];
                        get_param<2>(bias, p.bias, channel + 2 * q);
                        fb[0] = fb[0] + bias[0], fb[1] = fb[1] + bias[1];
                    }
                auto factor = [&](int o, int e) { return kept >> (4 * o + 2 * q + e) & 1 ? factor_kept : 0.0f; };
#pragma unroll
                for (int o = 0; o < N; o++) {
                    ys[o][0] = xs[o][0], ys[o][1] = xs[o][1];
                    if constexpr (POST) {
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            ys[o][e] = k.post[o] * fb[e];
                            if constexpr (FULL_)
                                if (mask.on) ys[o][e] = ys[o][e] * factor(o, e);
#pragma unroll
                            for (int j = 0; j < N; j++) ys[o][e] = fmaf(k.w[o][j], xs[j][e], ys[o][e]);
                        }
                        x[o].word[q] = narrow2(ys[o][0], ys[o][1], bf16());
                        widen2(ys[o][0], ys[o][1], x[o].word[q], bf16());
                        if constexpr (AT_ONCE) *(uint32_t *)(mine + S::x + o * S::row_box + 4 * q) = x[o].word[q];
                    }
                }
                if constexpr (NORM) {
                    const float2 weight = ((const float2 *)(b.shared + S::weight))[(warp * 16 + t * 4 + 2 * q) / 2];
                    float u[2], d_u[2] = {};
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        u[e] = k.pre[0] * ys[0][e];
#pragma unroll
                        for (int o = 1; o < N; o++) u[e] = fmaf(k.pre[o], ys[o][e], u[e]);
                    }
                    widen2(u[0], u[1], narrow2(u[0], u[1], bf16()), bf16());
                    if constexpr (FULL_)
                        if (has(p.d_u) && inside) {
                            const bf16 *from = (const bf16 *)p.d_u.data + own * p.d_u.stride[0] + channel + 2 * q;
                            widen2(d_u[0], d_u[1], *(const uint32_t *)from, bf16());
                        }
                    float2 sum = d_weight[q];
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        (e ? sum.y : sum.x) = fmaf(du[e], u[e] * k.r, e ? sum.y : sum.x);
                        du[e] = fmaf(fmaf(u[e], -k.k, du[e] * (e ? weight.y : weight.x)), k.r, d_u[e]);
                    }
                    d_weight[q] = sum;
                }
#pragma unroll
                for (int o = 0; o < N; o++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        gs[o][e] = fmaf(k.pre[o], du[e],
                                        fmaf(scale, ys[o][e], half ? acc[2 * o + q][2 + e] : acc[2 * o + q][e]));
#pragma unroll
                for (int e = 0; e < 2; e++) {
#pragma unroll
                    for (int o = 0; o < N; o++) {
                        if constexpr (SHIFTED) sums[PRE_AT + o] = fmaf(du[e], ys[o][e], sums[PRE_AT + o]);
                        if constexpr (POST) {
                            float gm = gs[o][e];
                            if constexpr (FULL_)
                                if (mask.on) gm = gm * factor(o, e);
                            d_f[e] = o ? fmaf(k.post[o], gm, d_f[e]) : k.post[o] * gm;
                            sums[o] = fmaf(gm, fb[e], sums[o]);
#pragma unroll
                            for (int j = 0; j < N; j++) {
                                sums[N + o * N + j] = fmaf(xs[j][e], gs[o][e], sums[N + o * N + j]);
                                d_x[j][e] = o ? fmaf(k.w[o][j], gs[o][e], d_x[j][e]) : k.w[o][j] * gs[o][e];
                            }
                        }
                    }
                }
                if constexpr (!POST) {
#pragma unroll
                    for (int j = 0; j < N; j++) {
                        widen2(d_x[j][0], d_x[j][1], out[j].word[q], bf16());
                        d_x[j][0] = d_x[j][0] + gs[j][0], d_x[j][1] = d_x[j][1] + gs[j][1];
                    }
                }
#pragma unroll
                for (int j = 0; j < N; j++) out[j].word[q] = narrow2(d_x[j][0], d_x[j][1], bf16());
                if constexpr (POST) f.word[q] = narrow2(d_f[0], d_f[1], bf16());
                if constexpr (FULL_ && POST) {
                    const float2 sum = d_bias[q];
                    d_bias[q] = make_float2(sum.x + d_f[0], sum.y + d_f[1]);
                }
                if constexpr (FULL_)
                    if (inside) put_pairs<N, POST>(p, own, channel + 2 * q, d_x, d_f);
            }
#pragma unroll
            for (int j = 0; j < N; j++) {
                if constexpr (POST && !AT_ONCE) put_quad(mine + S::x + j * S::row_box, x[j]);
                put_quad(mine + S::d_y + j * S::row_box, out[j]);
            }
            if constexpr (POST) put_quad(my_row + S::f, f);
        }
#pragma unroll
        for (int e = 0; e < M; e++) sums[e] += got[e];
        __syncwarp();

        /* dpsi: A = y with channels as rows, B = d_h: both transposed on the way out of shared memory. */
        if (p.dpsi) {
            uint32_t dh[NT][4]; /* hi of tokens 0-7, 8-15, lo of the same */
#pragma unroll
            for (int q = 0; q < NT; q++)
                ldmatrix4_trans(dh[q], shared_address(record) + ((lane & 15) * PIECES + q + (lane >> 4) * NT) * 16);
            const uint32_t row = (lane & 7) + (lane >> 4) * 8;
            const uint32_t from = shared_address(tile) + S::x + (warp >> 2) * S::box +
                                  tma_piece(row, 2 * (warp & 3) + (lane >> 3 & 1));
#pragma unroll
            for (int o = 0; o < N; o++) {
                uint32_t a[4];
                ldmatrix4_trans(a, from + o * S::row_box);
#pragma unroll
                for (int q = 0; q < NT; q++) mma16(dpsi[o][q], a[0], a[1], a[2], a[3], dh[q][0], dh[q][1]);
#pragma unroll
                for (int q = 0; q < NT; q++) mma16(dpsi[o][q], a[0], a[1], a[2], a[3], dh[q][2], dh[q][3]);
            }
        }
        if constexpr (M > 0) share_sums(sums, t); /* while the tensor cores are busy */
        __syncwarp();
        if (M && p.sums) {
#pragma unroll
            for (int e = 0; e < room::half; e += 2)
                *(float2 *)(tile + S::x + room::at(warp, token + (t & 1) * 8, t >> 1, e)) =
                    make_float2(sums[e], sums[e + 1]);
        }
        tma_publish();
        barrier_arrive(b.at.done + ring.slot * 8);
        ring.next<S::stages>();
    }

    const int64_t piece_of_all = (int64_t)blockIdx.x + slice;
    if (p.dpsi) {
        constexpr int ROW = N * BOUNDARY_SLICE;
        float *const to = p.dpsi + piece_of_all * (boundary_record<N>::rows * ROW) + warp * 16 + g;
#pragma unroll
        for (int o = 0; o < N; o++)
#pragma unroll
            for (int q = 0; q < NT; q++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    to[(q * 8 + 2 * t + (e & 1)) * ROW + o * BOUNDARY_SLICE + (e >> 1) * 8] = dpsi[o][q][e];
    }
    const int64_t own = piece_of_all * BOUNDARY_SLICE + warp * 16 + t * 4;
    if constexpr (NORM)
        if (p.d_weight) put_sums(p.d_weight + own, d_weight);
    if constexpr (FULL_ && POST)
        if (p.d_bias) put_sums(p.d_bias + own, d_bias);
}

#endif

/* FULL: also bias, dropout, d_u beside d_v, and gradients of any dtype and layout. SHIFTED: also the gradient of pre_in.
 * NORM: the gradient comes through the sub-layer's norm. POST: behind a post, as in boundary; else y is what is read, its
 * gradient is what is written, and d_y is what was there before. */
template <int N, bool FULL_, bool SHIFTED, bool NORM, bool POST>
static __global__ void __launch_bounds__(THREADS, 1) fused_kernel(const __grid_constant__ fused_args p)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
    typedef sizes<N, FULL_> S;
    extern __shared__ char raw_shared[];
    __shared__ weft_mask mask; /* registers are scarce */
    char *const shared = raw_shared + (-shared_address(raw_shared) & (TMA_ALIGN - 1));
    const uint32_t barriers = shared_address(shared) + S::barriers;
    const tiles_of_block b = {
        shared, {barriers, barriers + S::stages * 8, barriers + S::stages * 16, barriers + S::stages * 24}};
    if (threadIdx.x == 0) {
        for (int s = 0; s < S::stages; s++) {
            barrier_init(b.at.full + s * 8, 1);
            barrier_init(b.at.done + s * 8, WARPS * 32);
            barrier_init(b.at.free + s * 8, (SERVERS - 1) * 32);
        }
        barrier_init(b.at.psi, WARPS * 32);
        tma_barriers_ready();
        if constexpr (FULL_ && POST) mask = weft_mask_open(&p.dropout, p.channels);
    }
    let_next_begin();
    __syncthreads();
    if (threadIdx.x >= WARPS * 32) {
        set_registers<SERVING_REGISTERS, false>();
        const int server = (int)(threadIdx.x >> 5) - WARPS;
        if (server < SERVERS - 1)
            clear<N, FULL_, SHIFTED, POST>(p, b, server);
        else if ((threadIdx.x & 31) == 0)
            bring<N, FULL_, POST>(p, b);
    } else {
        set_registers<WORKING_REGISTERS, true>();
        ring_place ring;
        bool is_first = true;
#pragma unroll 1
        for (int slice = boundary_first_slice(&p.plan, blockIdx.x);
             slice <= boundary_last_slice(&p.plan, blockIdx.x); slice++) {
            const boundary_piece piece = boundary_piece_of(&p.plan, blockIdx.x, slice);
            if (piece.count == 0) continue;
            work<N, FULL_, SHIFTED, NORM, POST>(p, b, mask, slice, piece, is_first, ring);
            is_first = false;
        }
    }
#endif
}

/* ---- host --------------------------------------------------------------------------------------------------------------------- */

static weft_status map_of(const weft_call *call, tma_encode *encode, CUtensorMap *map, const weft_tensor *t)
{
    if (!weft_has(t)) return WEFT_OK;
    const bool streams = t->ndim == 3;
    const tma_tensor tensor = {t->data,        call->tokens, streams ? call->streams : 1,
                               call->channels, t->stride[0], streams ? t->stride[1] : 0};
    return tma_map(call, encode, map, &tensor, BOUNDARY_TILE);
}

/* The copy engine can store this gradient; one that is added to, only where `base` says that the kernel reads it. */
static bool is_stored(const weft_grad *g, bool base)
{
    return weft_has(&g->to) && (base || !g->add) && g->to.dtype == WEFT_BF16 && tma_fits(&g->to);
}

static weft_status args_of(const weft_call *call, const boundary_work *w, fused_args *p)
{
    const weft_mhc_boundary_bwd_args *a = w->a;
    const bool post = weft_has(&a->x);
    const weft_tensor *row = weft_has(&a->d_v) ? &a->d_v : &a->d_u;
    tma_encode *encode = NULL;
    *p = fused_args{};
    p->records = w->records;
    p->dpsi = w->dpsi, p->sums = w->sums, p->d_bias = w->d_bias, p->d_weight = w->d_weight;
    p->weight = view_of(&a->sub_weight), p->bias = view_of(&a->bias);
    if (weft_has(&a->d_v)) p->d_u = view_of(&a->d_u);
    p->dropout = a->dropout;
    p->tokens = call->tokens, p->channels = (int32_t)call->channels;
    p->plan = w->plan;
    p->store_d_x = is_stored(&a->d_x, !post), p->store_d_f = is_stored(&a->d_f, false);
    if (!p->store_d_x) p->d_x_any = view_of(&a->d_x);
    if (!p->store_d_f) p->d_f_any = view_of(&a->d_f);
    /* Without a post what is added to comes with the tiles, too. */
    const weft_tensor none = {}, *d_y = post ? &a->d_y : p->store_d_x && a->d_x.add ? &a->d_x.to : &none;
    p->has_d_y = weft_has(d_y), p->has_row = weft_has(row);
    WEFT_TRY(tma_open(call, &encode));
    WEFT_TRY(map_of(call, encode, &p->x, post ? &a->x : &a->y));
    WEFT_TRY(map_of(call, encode, &p->f, &a->f));
    WEFT_TRY(map_of(call, encode, &p->d_y, d_y));
    WEFT_TRY(map_of(call, encode, &p->row, row));
    if (p->store_d_x) WEFT_TRY(map_of(call, encode, &p->d_x, &a->d_x.to));
    if (p->store_d_f) WEFT_TRY(map_of(call, encode, &p->d_f, &a->d_f.to));
    p->psi = w->psi, p->psi_stride = call->streams * call->channels;
    if (weft_project_phi_is_psi(&a->phi, &a->norm_weight, LAYOUT_NC))
        p->psi = (const float *)a->phi.data, p->psi_stride = a->phi.stride[0];
    return WEFT_OK;
}

template <int N, bool POST> static weft_status run(const weft_call *call, const boundary_work *w)
{
    const weft_mhc_boundary_bwd_args *a = w->a;
    const bool shifted = weft_has(&a->d_pre_in.to), norm = weft_has(&a->d_v);
    fused_args p;
    WEFT_TRY(args_of(call, w, &p));
    const bool plain =
        !has(p.d_x_any) && !has(p.d_f_any) && !has(p.bias) && !p.d_bias && !has(p.d_u) && !(a->dropout.p > 0);
    void (*const kernels[2][2][2])(fused_args) = {
        {{fused_kernel<N, false, false, false, POST>, fused_kernel<N, false, false, true, POST>},
         {fused_kernel<N, false, true, false, POST>, fused_kernel<N, false, true, true, POST>}},
        {{fused_kernel<N, true, false, false, POST>, fused_kernel<N, true, false, true, POST>},
         {fused_kernel<N, true, true, false, POST>, fused_kernel<N, true, true, true, POST>}}};
    return launch(call, POST ? "boundary backward" : "pre backward", kernels[!plain][shifted][norm],
                  {.grid = (unsigned)w->plan.blocks,
                   .block = THREADS,
                   .shared = (size_t)(plain ? sizes<N, false>::all : sizes<N, true>::all),
                   .order = OVERLAP},
                  p);
}

int32_t weft_cuda_boundary_bwd_code(int32_t device)
{
    static kept_answers known;
    return (int32_t)(kept_answer(known, device,
                                 [] {
                                     cudaFuncAttributes code = {};
                                     if (cudaFuncGetAttributes(&code, fused_kernel<4, false, false, false, true>) !=
                                         cudaSuccess)
                                         (void)cudaGetLastError();
                                     return (uint64_t)1 | (uint64_t)code.ptxVersion << 8;
                                 }) >>
                     8);
}

weft_status weft_cuda_boundary_bwd_pass(const weft_call *call, const boundary_work *w)
{
    if (!weft_has(&w->a->x)) return call->streams == 2 ? run<2, false>(call, w) : run<4, false>(call, w);
    return call->streams == 2 ? run<2, true>(call, w) : run<4, true>(call, w);
}
