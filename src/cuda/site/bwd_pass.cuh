/* SPDX-License-Identifier: Apache-2.0
 *
 * What the warps of boundary's backward pass share [M11], site/bwd_pass.cu: arguments, shared memory, barriers, and the
 * way through a block's tiles. */
#ifndef WEFT_CUDA_MHC_BOUNDARY_BWD_PASS_CUH
#define WEFT_CUDA_MHC_BOUNDARY_BWD_PASS_CUH

#include "cuda/common/tma.cuh"
#include "cuda/site/bwd.cuh"

/* Three groups of four warps: two work, the third serves. Registers are handed from the third to the others, as far as the
 * GPU can: the two that are resident beside one serving warp then have 232 each. */
enum { WARPS = 8, SERVERS = 4, THREADS = (WARPS + SERVERS) * 32 };
enum { WORKING_REGISTERS = 232, SERVING_REGISTERS = 40 };

/* Shared memory. A stage of the ring: x and d_y as two boxes of 64 channels each, f, and d_u or d_v. Behind all tiles their
 * records, the norm's weights, a lane's sums over tokens, and where there are no registers left for it psi's lo part. */
template <int N, bool FULL_, site_kind KIND> struct sizes {
    static constexpr int stages = FULL_ ? BOUNDARY_FULL_STAGES : BOUNDARY_STAGES;
    static constexpr int row_box = BOUNDARY_TILE * TMA_ROW, box = N * row_box;
    static constexpr int x = 0, d_y = 2 * box, f = 4 * box, row = f + 2 * row_box, tile = row + 2 * row_box;
    static constexpr int record = BOUNDARY_TILE * boundary_record<N, KIND>::pieces * 16;
    static constexpr int records = stages * tile, weight = records + stages * record;
    static constexpr int d_weight = weight + BOUNDARY_SLICE * 4, d_bias = d_weight + WARPS * 32 * 16;
    static constexpr int psi_lo = d_bias + (FULL_ ? WARPS * 32 * 16 : 0);
    static constexpr int barriers = psi_lo + (FULL_ ? WARPS * 2 * N * 32 * 16 : 0);
    static constexpr int all = barriers + 3 * stages * 8 + 8 + TMA_ALIGN;
    static_assert(tile % TMA_ALIGN == 0, "boxes begin on multiples of what the copy engine swizzles");
    static_assert(boundary_record<N, KIND>::row_tiles <= 3, "a tile of psi's lo part is a piece of 16 bytes");
};

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
template <int N, bool SHIFTED, site_kind KIND> struct sum_room {
    typedef sizes<N, false, KIND> S;
    static constexpr int used = (KIND == SITE_BOUNDARY ? N + N * N : 0) + (SHIFTED ? N : 0),
                         count = (used + 3) / 4 * 4, half = count / 2;
    static_assert(half <= N * 4, "a piece for each stream");
    static __device__ __forceinline__ uint32_t at(int warp, int token, int part, int k)
    {
        return (warp >> 2) * S::box + (k >> 2) * S::row_box + tma_piece(token, 2 * (warp & 3) + part) +
               (((k >> 1) ^ (token >> 3)) & 1) * 8;
    }
    /* Of the first warp: the piece that k is in. */
    static __device__ __forceinline__ uint32_t piece_at(int token, int part, int k)
    {
        return (k >> 2) * S::row_box + tma_piece(token, part);
    }
    /* The place in another warp's room that is like this one of warp 0; tiles are aligned to more than a row. */
    static __device__ __forceinline__ uint32_t of_warp(uint32_t of_first, int warp)
    {
        return (of_first ^ (uint32_t)(warp & 3) << 5) + (warp >> 2) * S::box;
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

#endif

#endif
