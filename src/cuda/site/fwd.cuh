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
 *   projectors  8 warps, or 4, a share of the columns each, whose part of psi is in their registers (what does not fit: in
 *               shared memory). Tensor cores.
 *   bringer     one warp. Lets the copy engine fill the ring of tiles, and brings the coefficients of post and the rest of psi.
 *   owner       one warp. Adds the slices of a token in order, makes the gates, sends pre to all blocks.
 *   adder       one warp. Adds the projectors' sums of a tile and sends them to the tokens' owners. Is the owner for the sum
 *               of squares of u.
 *   clerk       one warp. Brings the first of psi. Makes matrices of logits, eight tokens at a time, one a lane: nobody in this
 *               launch waits for them.
 *
 * Sums are added in an order that follows from streams and channels alone. What must not be overwritten: a block sends
 * nothing of a tile before it has freed the stage of that tile, which it does when pre, or the norm's factors, of the stage's
 * last tile have come, and these were sent after everything received for it had been read. Whatever is sent to a block is waited for
 * there, so a block may end when its own warps have, and nobody sends to one that is gone. */
#ifndef WEFT_CUDA_SINGLE_PASS_CUH
#define WEFT_CUDA_SINGLE_PASS_CUH

#include "cuda/common/cluster.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/mhc/mhc_post.cuh"
#include "cuda/mhc/mhc_project.cuh"
#include "cuda/mhc/token_math.cuh"
#include "cuda/site/fwd_plan.h"

enum { MIXERS = SITE_TILE, BOX_BYTES = SITE_TILE * TMA_ROW };

/* Who is who among the warps of a block, and the registers of each: they are handed from the others to the projectors. 640
 * threads have 61440 at launch; one warp more would be a sixth one on a quarter of the multiprocessor, and all would have 80. 512
 * threads have all 65536, and half as many projectors lose less to what is not psi. */
template <int PAIRS> struct site_cast {
    static constexpr bool wide = site_is_wide(PAIRS);
    static constexpr int projectors = site_projectors(PAIRS), kept = site_kept(PAIRS),
                         batches = site_batches(PAIRS);
    static constexpr int first_mixer = projectors, bringer = first_mixer + MIXERS, owner = bringer + 1,
                         adder = owner + 1, clerk = adder + 1, warps = clerk + 1;
    static constexpr int projector_registers = wide ? 256 : 128, mixer_registers = wide ? 96 : 88,
                         server_registers = wide ? 64 : 48;
};

struct site_args {
    CUtensorMap x, f, psi; /* psi: rows in place of tokens */
    /* post */
    view bias, post, res;
    weft_dropout dropout;
    const char *old;               /* streams that shall stay in the L2 until they are let go, or NULL */
    int64_t old_token, old_stream; /* bytes */
    int32_t in_cache;              /* tiles of a cluster that the L2 has room for, at most */
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
    bool rows, psi_rows;              /* of whole boxes: a tile of a block is one load, psi of 64 channels is */
    bool norm, coef_lines, res_lines; /* norm: v is wanted; lines: coefficients can be moved N floats at a time */
    weft_site_room at;
};

/* Pairs of steps that a warp has where PAIRS says so; 0: any number up to the most. */
template <int PAIRS> static __host__ __device__ constexpr int site_most()
{
    return PAIRS ? PAIRS : SITE_MANY_PAIRS;
}

/* Boxes of a block: the most there are and, where it is known, their number. Those by fours are mixed first, and projectors begin
 * with them: a projector's pairs are in the order of the boxes. */
template <int N, int PAIRS> struct site_boxes {
    static constexpr int projectors = site_cast<PAIRS>::projectors;
    static constexpr int most = site_most<PAIRS>() * projectors / (2 * N), count = PAIRS ? most : 0;
    static constexpr int first_pairs = count / 4 * 8 * N / projectors; /* a projector's, of boxes by fours */
    static constexpr bool even = PAIRS && count % 4 == 0;              /* nothing is left over */
    static constexpr bool split = PAIRS && !even; /* something is, and is mixed while projectors work */
};

/* Rows of the projection on tensor cores, psi on the side of 16: hi and lo of a row are both rows there, and D adds up
 * what belongs together. 24 rows: hi of 0-15 | lo of 0-15 | hi, lo of 16-23. Up to 8 rows: hi, lo. */
template <int N, site_kind KIND> struct site_shape {
    static constexpr int rows = KIND == SITE_HEAD ? N : 2 * N + N * N, tiles = rows > 8 ? 3 : 1;
    /* sums of a token: the rows, and the square; in shared memory fours of them, of which the last may be filled up */
    static constexpr int width = rows + 1, fours = (width + 3) / 4;
    /* bytes of psi of a pair of steps, which is 32 channels of a stream, and of 64 channels of all of them */
    static constexpr int psi_pair = rows * TMA_ROW, psi_box = 2 * N * psi_pair;
    static constexpr bool in_place = rows % 8 == 0; /* the operands of a pair are as long as its rows */
};

/* Is all of psi there at once, and made into operands in place? Then each 64 channels of it have a barrier: operands are made of
 * the ones while the next ones come. */
template <int N, site_kind KIND, int PAIRS> static __host__ __device__ constexpr bool site_once()
{
    return PAIRS && PAIRS <= SITE_ONCE_PAIRS && site_shape<N, KIND>::in_place;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* Addresses of barriers, an array of each kind. By stage: a tile has come, is mixed, its boxes left over are (where site_boxes knows
 * of them; otherwise "mixed" says so), it may be overwritten; pre, the norm's factors have come. By slot: sums, squares of a token
 * have come. Logits: a batch is there, is taken. psi: some of it is there, is taken. Left: the projectors' sums of a tile are there,
 * are taken. f, where it has a place of its own: a tile's is there, is taken. */
struct site_barriers {
    uint32_t full, mixed, mixed_left, empty, pre, inverse, sums, squares, logits_full, logits_empty, psi_empty,
        left_full, left_empty, f_full, f_empty, psi_full;
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

/* 16 bytes of shared memory. The compiler would make four accesses of 4 bytes where a struct of words is wanted. */
static __device__ __forceinline__ uint4 take_four(uint32_t from)
{
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

static __device__ __forceinline__ void put_four(uint32_t to, const uint4 &v)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

/* A barrier as the whole warp sees it. */
static __device__ __forceinline__ bool is_over(uint32_t barrier, uint32_t parity)
{
    return __any_sync(0xffffffffu, barrier_test(barrier, parity));
}

static __device__ __forceinline__ int64_t site_token(const site_args &p, const site_block &b, int tile, int row)
{
    return ((int64_t)b.cluster + (int64_t)tile * p.clusters) * SITE_TILE + row;
}

/* Where the projectors leave the sums of a tile: two rooms in turn, or one. */
template <int N, site_kind KIND, int PAIRS> struct site_rooms {
    static constexpr int count = PAIRS == SITE_FEW_PAIRS ? 2 : 1, each = SITE_TILE * site_shape<N, KIND>::fours * 4;
    static constexpr int floats = site_cast<PAIRS>::projectors * each;
    uint32_t at = 0, parity = 0; /* the room of this tile, and how often it was used */

    __device__ __forceinline__ void next()
    {
        if (++at == count) at = 0, parity ^= 1;
    }
};

/* Tokens of a cluster are dealt to its blocks one by one: who owns token `row` of a tile, and which of the owner's slots is
 * that token's. */
struct site_deal {
    uint32_t number, slot;

    __device__ __forceinline__ void begin(const site_args &p, uint32_t row)
    {
        number = row, slot = row >> p.cluster_log;
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

/* The tokens that a block owns, one after the other, and where what it receives for them lies. */
struct site_owned {
    uint32_t k = 0, tile, row, stage, parity = 0;
    int slot = 0;

    __device__ __forceinline__ site_owned(const site_args &p, const site_block &b)
        : tile(b.rank / SITE_TILE), row(b.rank % SITE_TILE), stage(tile % (uint32_t)p.stages)
    {
    }
    /* What was received for this token has been read. */
    __device__ __forceinline__ void next(const site_args &p)
    {
        k++;
        if (++slot == p.slots) slot = 0, parity ^= 1;
        row += p.cluster;
        const uint32_t tiles = row / SITE_TILE; /* at most two, and a block holds three */
        row %= SITE_TILE, tile += tiles, stage += tiles;
        if (stage >= (uint32_t)p.stages) stage -= p.stages;
    }
};

#endif
#endif
