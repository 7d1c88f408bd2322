/* SPDX-License-Identifier: Apache-2.0
 *
 * The fused kernel of an mHC site [M9] [M10] [M11]: post makes the new streams y (without a post they are the input x), the
 * projection and the mean square of y are summed, the coefficients follow, and u = sum_i pre[i] y[i], normed where requested.
 * Memory traffic per token, bf16, four streams: reads 10C bytes, writes 10C; without post reads 8C, writes 2C.
 *
 * A token's coefficients depend on all of its channels, and the aggregate depends on the coefficients. The channels of a token
 * are therefore split over the blocks of a cluster, and each block keeps its channels of a tile of eight tokens in shared
 * memory until the coefficients arrive: about 25 floats per token are sent to one block, the token's owner, and four return.
 * No warp stalls on the current tile.
 *
 *   mix warps            8, one token each. Post, in place and to memory; the aggregate when pre arrives; the norm when its
 *                        factor arrives.
 *   MMA warps            8, or 4 in a wide block, each with a share of the columns. The warp's part of psi is in registers,
 *                        the part that does not fit in shared memory. Tensor cores.
 *   producer warp        1. Issues the TMA loads that fill the ring of tiles, the loads of post's coefficients and of the
 *                        remaining psi.
 *   reduction owner      1. Adds the slices of a token in block order, computes the gates, sends pre to all blocks.
 *   reduction warp       1. Adds the partial sums of the MMA warps and sends them to the tokens' owners. Owner of the sum of
 *                        squares of u.
 *   Sinkhorn warp        1. Issues the first loads of psi, then turns logits into matrices, a batch of tokens at a time, one per
 *                        lane. No other warp depends on its output.
 *
 * Streams are bf16 or f16, in (n, C) or in (C, n). A *unit* is 64 neighbouring elements of a token, 128 bytes: in (n, C) 64
 * channels of a stream, in (C, n) 64 / n channels of all of them. 64 channels are n units either way and a tile is
 * [unit][token][element], so the MMA warps do not know the layout: psi has its columns in the same order.
 *
 * The order of every sum follows from streams and channels alone. Invariant of received data: a block sends nothing of a tile
 * before it has freed the tile's stage. It frees the stage when pre, or the norm's factors, of the stage's previous tile have
 * arrived, and these are sent after everything received for that tile has been read. A block waits for everything that is sent
 * to it, so it may exit when its own warps have finished. */
#ifndef WEFT_CUDA_SITE_FWD_CUH
#define WEFT_CUDA_SITE_FWD_CUH

#include "cuda/common/cluster.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/mhc/mhc_post.cuh"
#include "cuda/mhc/mhc_project.cuh"
#include "cuda/mhc/token_math.cuh"
#include "cuda/site/fwd_plan.h"

enum { MIX_WARPS = SITE_TILE, BOX_BYTES = SITE_TILE * TMA_ROW };

/* Warp roles of a block in order of warp index, and registers per role: setmaxnreg moves them from the others to the MMA warps.
 * 640 threads have 61440 registers at launch; one more warp would be the sixth on a multiprocessor partition and limit every warp
 * to 80. 512 threads have all 65536, and four MMA warps spend fewer registers on values other than psi. */
template <int PAIRS> struct site_roles {
    static constexpr bool wide = site_is_wide(PAIRS);
    static constexpr int mma_warps = site_mma_warps(PAIRS), kept = site_kept(PAIRS), batches = site_batches(PAIRS),
                         batch = site_batch(PAIRS);
    static constexpr int first_mix = mma_warps, producer = first_mix + MIX_WARPS, owner = producer + 1,
                         reduction = owner + 1, sinkhorn = reduction + 1, warps = sinkhorn + 1;
    static constexpr int mma_registers = wide ? 256 : 128, mix_registers = wide ? 96 : 88,
                         other_registers = wide ? 64 : 48;
};

struct site_args {
    CUtensorMap x, f, psi; /* psi: rows take the place of tokens */
    /* post */
    view bias, post, res;
    weft_dropout dropout;
    const char *old;               /* input streams to keep in the L2 until release_streams, or NULL */
    int64_t old_token, old_stream; /* bytes */
    int32_t in_cache;              /* upper bound of the tiles of a cluster that the L2 holds */
    void *y;
    int64_t y_token, y_step,
        y_at[4]; /* elements; bytes: from a tile of a cluster to its next, to each stream of (n, C) */
    /* the site */
    view alpha, beta;
    gate_numbers numbers;
    view pre_in, h, ms, pre, post_out, res_out;
    void *u, *v; /* or NULL */
    int64_t u_token, v_token, u_step;
    view sub_weight;
    float sub_eps;
    float mean; /* 1 / nC */
    int64_t tokens;
    int32_t channels, cluster, cluster_log, boxes, pairs, stages, psi_boxes, early, slots, tiles, clusters;
    bool rows, psi_rows; /* whole boxes: a tile of a block is one load, so is psi of 64 channels */
    bool norm, coef_lines,
        res_lines;      /* norm: v is an output; lines: coefficients can be moved N floats at a time */
    uint32_t per_stage; /* 2^32 / stages, rounded up: tile / stages by a multiplication */
    weft_site_room offset;
    const float *down; /* f16: reciprocals of psi's factors, [rank][row] (site/fwd_psi.cuh) */
    bool f_rows;       /* (C, n): `rows` of f, whose rows of channels are shorter than those of x */
    bool in_out;       /* SITE_EITHER: the matrix is applied as [in][out] */
    bool unmixed;      /* post has no matrix */
    int32_t phi_rows;  /* of the projection: without a residual mix fewer than the kernel has, where psi is zero */
};

/* How post applies the matrix, where the kernel is made for one convention; otherwise either one, known at run time. Whether there is
 * a matrix is known at run time in all of them: SITE_UNMIXED is a way of mixing, no kernel. */
enum site_apply { SITE_OUT_IN, SITE_IN_OUT, SITE_EITHER, SITE_UNMIXED };

/* Pairs of steps of an MMA warp; PAIRS 0: a number known at run time, up to the maximum. */
template <int PAIRS> static __host__ __device__ constexpr int site_most()
{
    return PAIRS ? PAIRS : SITE_MANY_PAIRS;
}

/* Boxes of a block: their maximum and, where known at compile time, their number. Groups of four boxes are mixed first, and the MMA
 * warps begin with them: a warp's pairs are in the order of the boxes. */
template <int N, int PAIRS> struct site_boxes {
    static constexpr int mma_warps = site_roles<PAIRS>::mma_warps;
    static constexpr int most = site_most<PAIRS>() * mma_warps / (2 * N), count = PAIRS ? most : 0;
    static constexpr int first_pairs = count / 4 * 8 * N / mma_warps; /* of an MMA warp, in groups of four boxes */
    static constexpr bool even = PAIRS && count % 4 == 0; /* no boxes remain beside the groups of four */
    static constexpr bool split = PAIRS && !even;         /* remaining boxes are mixed while the MMA warps work */
};

/* Rows of the projection on tensor cores; psi is the operand with 16 rows. The hi and lo parts of a row are two rows of that
 * operand, and D holds both to be added. 24 rows: hi of 0-15 | lo of 0-15 | hi, lo of 16-23. Up to 8 rows: hi, lo. */
template <int N, site_kind KIND> struct site_shape {
    static constexpr int rows = KIND == SITE_HEAD ? N : 2 * N + N * N, tiles = rows > 8 ? 3 : 1;
    /* sums of a token: the rows, and the square; in shared memory in groups of four, the last one padded */
    static constexpr int width = rows + 1, fours = (width + 3) / 4;
    /* bytes of psi of a pair of steps, which is 32 channels of a stream, and of 64 channels of all of them */
    static constexpr int psi_pair = rows * TMA_ROW, psi_box = 2 * N * psi_pair;
    static constexpr bool in_place = rows % 8 == 0; /* the operands of a pair are as long as its rows */
};

/* All of psi fits at once and is converted to operands in place. Each 64 channels then have a barrier of their own, so conversion
 * overlaps the loads of the next ones. */
template <int N, site_kind KIND, int PAIRS> static __host__ __device__ constexpr bool site_once()
{
    return PAIRS && PAIRS <= SITE_ONCE_PAIRS && site_shape<N, KIND>::in_place;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* Addresses of the mbarriers, an array per kind.
 * Per stage: full, the tile has arrived; mixed, its new streams are written; mixed_remaining, those of the boxes beside the groups
 * of four (used with site_boxes::split, otherwise `mixed` covers them); empty, the stage may be overwritten; pre, inverse: pre and
 * the norm's factors have arrived. Per slot: sums, squares of a token have arrived. Per batch: logits full, empty. psi: a part of it
 * has arrived, has been read. partial: the partial sums of the MMA warps for a tile are written, have been read. f, where it has a
 * buffer of its own: full, empty. */
struct site_barriers {
    uint32_t full, mixed, mixed_remaining, empty, pre, inverse, sums, squares, logits_full, logits_empty, psi_empty,
        partial_full, partial_empty, f_full, f_empty, psi_full;
};

/* Context of a warp. */
struct site_block {
    char *shared;
    site_barriers barrier;
    uint32_t rank, cluster;
    int32_t count, first_channel; /* tiles of this cluster; first channel of this block */
    int lane;
};

/* 16 bytes of shared memory in one access; for a struct of words the compiler emits four. */
static __device__ __forceinline__ uint4 load_shared4(uint32_t from)
{
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
    return v;
}

static __device__ __forceinline__ void store_shared4(uint32_t to, const uint4 &v)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

/* Whether the phase has completed, with one answer for the warp. */
static __device__ __forceinline__ bool is_over(uint32_t barrier, uint32_t parity)
{
    return __any_sync(0xffffffffu, barrier_test(barrier, parity));
}

static __device__ __forceinline__ int64_t site_token(const site_args &p, const site_block &b, int tile, int row)
{
    return ((int64_t)b.cluster + (int64_t)tile * p.clusters) * SITE_TILE + row;
}

/* Buffers of the MMA warps' partial sums of a tile: two in turn, or one. */
template <int N, site_kind KIND, int PAIRS> struct site_partials {
    static constexpr int count = PAIRS == SITE_FEW_PAIRS ? 2 : 1, each = SITE_TILE * site_shape<N, KIND>::fours * 4;
    static constexpr int floats = site_roles<PAIRS>::mma_warps * each;
    uint32_t buffer = 0, parity = 0; /* of this tile */

    __device__ __forceinline__ void next()
    {
        if (++buffer == count) buffer = 0, parity ^= 1;
    }
};

/* Tokens of a cluster are assigned to its blocks round-robin: the owner of token `row` of a tile, and the owner's slot for it. */
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

/* How many of the first `count` tokens of this cluster this block owns. */
static __device__ __forceinline__ uint32_t site_owned(const site_args &p, const site_block &b, int64_t count)
{
    return (uint32_t)((count - (int64_t)b.rank + p.cluster - 1) >> p.cluster_log);
}

/* Cursor over the tokens that a block owns, and the slot that receives their sums. Where groups of lanes work on several tokens at
 * once, group `ahead` has token k + ahead. */
struct site_queue {
    uint32_t k = 0, parity = 0;
    int slot = 0;

    __device__ __forceinline__ bool wraps(const site_args &p, int ahead) const
    {
        return slot + ahead >= p.slots;
    }
    __device__ __forceinline__ int slot_of(const site_args &p, int ahead) const
    {
        return slot + ahead - (wraps(p, ahead) ? p.slots : 0);
    }
    /* Groups whose tokens have arrived, in order; token k has. */
    template <int LANES>
    __device__ __forceinline__ int arrived(const site_args &p, uint32_t barriers, int ahead, bool may) const
    {
        const bool there = ahead == 0 || (may && ahead < p.slots &&
                                          barrier_test(barriers + slot_of(p, ahead) * 8, parity ^ wraps(p, ahead)));
        const uint32_t missing = ~__ballot_sync(0xffffffffu, there);
        return missing ? (__ffs((int)missing) - 1) / LANES : 32 / LANES;
    }
    /* Call when everything received for these tokens has been read. */
    __device__ __forceinline__ void next(const site_args &p, int many)
    {
        k += (uint32_t)many, slot += many;
        if (slot >= p.slots) slot -= p.slots, parity ^= 1;
    }
};

/* Where token k of those that a block owns is. */
struct site_place {
    uint32_t tile, row, stage;

    __device__ __forceinline__ site_place(const site_args &p, const site_block &b, uint32_t k)
    {
        const uint32_t number = b.rank + (k << p.cluster_log);
        tile = number / SITE_TILE, row = number % SITE_TILE;
        stage = tile - __umulhi(tile, p.per_stage) * (uint32_t)p.stages;
    }
};

#endif
#endif
