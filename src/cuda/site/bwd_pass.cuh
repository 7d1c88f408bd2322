/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared by the warps of the fused backward kernel [M11], site/bwd_pass.cu: arguments, shared memory, barriers, and the order of
 * a block's tiles. */
#ifndef WEFT_CUDA_SITE_BWD_PASS_CUH
#define WEFT_CUDA_SITE_BWD_PASS_CUH

#include "cuda/common/tma.cuh"
#include "cuda/site/bwd.cuh"

/* Three warp groups of four warps: two compute, the third loads and stores. setmaxnreg moves registers from the third to the others:
 * on a multiprocessor partition two compute warps with 232 registers reside beside one load/store warp. */
enum { COMPUTE_WARPS = 8, LOAD_STORE_WARPS = 4, THREADS = (COMPUTE_WARPS + LOAD_STORE_WARPS) * 32 };
enum { COMPUTE_REGISTERS = 232, LOAD_STORE_REGISTERS = 40 };

/* Shared memory. A stage of the ring: x and d_y as two boxes of 64 channels each, f, and d_u or d_v. After the tiles: their
 * records, the norm's weights, a lane's sums over tokens, the bias, and psi's lo part where the registers do not hold it (FULL). */
template <int N, bool FULL_, site_kind KIND> struct sizes {
    static constexpr int stages = FULL_ ? BOUNDARY_FULL_STAGES : BOUNDARY_STAGES;
    static constexpr int row_box = BOUNDARY_TILE * TMA_ROW, box = N * row_box;
    static constexpr int x = 0, d_y = 2 * box, f = 4 * box, row = f + 2 * row_box, tile = row + 2 * row_box;
    static constexpr int record = BOUNDARY_TILE * boundary_record<N, KIND>::pieces * 16;
    static constexpr int records = stages * tile, weight = records + stages * record;
    static constexpr int d_weight = weight + BOUNDARY_SLICE * 4, d_bias = d_weight + COMPUTE_WARPS * 32 * 16;
    static constexpr int bias = d_bias + (FULL_ ? COMPUTE_WARPS * 32 * 16 : 0);
    static constexpr int psi_lo = bias + (FULL_ ? BOUNDARY_SLICE * 4 : 0);
    static constexpr int barriers = psi_lo + (FULL_ ? COMPUTE_WARPS * 2 * N * 32 * 16 : 0);
    static constexpr int all = barriers + 3 * stages * 8 + 8 + TMA_ALIGN;
    static_assert(tile % TMA_ALIGN == 0, "boxes are aligned to the swizzle of TMA");
    static_assert(boundary_record<N, KIND>::row_tiles <= 3, "a tile of psi's lo part is a piece of 16 bytes");
};

struct fused_args {
    CUtensorMap x, f, d_y, row, d_x, d_f; /* row: d_u, or d_v where there is a norm */
    const uint4 *records;
    const float *psi;            /* [phi_rows], psi_stride apart */
    float *dpsi;                 /* [pieces][record rows][n][128], or NULL */
    float *sums;                 /* [slices][tiles * 16][sums of a token], or NULL */
    float *d_bias, *d_weight;    /* [pieces][128], or NULL */
    view weight;                 /* NORM: of the norm */
    view bias, d_x_any, d_f_any; /* FULL: gradients that TMA cannot store */
    view d_u;                    /* FULL: beside d_v */
    weft_dropout dropout;
    int64_t psi_stride, tokens;
    boundary_bwd_plan plan;
    int32_t channels;
    int32_t
        phi_rows; /* of the projection: without a residual mix fewer than a record has; psi of the others is zero */
    bool has_d_y, has_row, store_d_x, store_d_f;
    int32_t boxes; /* (C,n): boxes of the streams that are one load or store */
    bool has_norm;
    bool d_x_wide; /* (C,n), FULL: all streams of a channel of d_x_any are one access */
};

/* One source file per type and layout has its kernels. */
template <class T, stream_layout L>
weft_status weft_cuda_boundary_bwd_fused(const weft_call *call, const boundary_work *w, const fused_args *p);

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000

/* Where the streams lie in a tile, from x or d_y on. A warp has 16 channels of all streams: in (n,C) two pieces of 16 bytes in the
 * rows of a box for each stream; in (C,n) 2 N pieces, one after the other, in the rows of one box, which is whole at n = 4 and half
 * at n = 2. A lane has two tokens and four neighbouring channels. */
template <int N, stream_layout L> struct lane_place;

template <int N> struct lane_place<N, LAYOUT_NC> {
    static constexpr int row_box = BOUNDARY_TILE * TMA_ROW, box = N * row_box;
    /* The token of a tensor-core tile's row r is arbitrary: with 0 2 4 6 1 3 5 7 the sixteen lanes of half a warp read eight
     * different pieces of 16 bytes. */
    static __device__ __forceinline__ int token_of(int r)
    {
        return (r & 8) | (r & 3) << 1 | (r >> 2 & 1);
    }
    /* Piece `part` of 16 bytes of a warp and stream. */
    static __device__ __forceinline__ uint32_t piece(int warp, int stream, int token, int part)
    {
        return (warp >> 2) * box + stream * row_box + tma_piece(token, 2 * (warp & 3) + part);
    }
    /* The offset in another warp's part that corresponds to this one of warp 0; tiles are aligned to more than a row. */
    static __device__ __forceinline__ uint32_t of_warp(uint32_t of_first, int warp)
    {
        return (of_first ^ (uint32_t)(warp & 3) << 5) + (warp >> 2) * box;
    }
};

/* The order of tokens serves the rows of f and d_u too, eight bytes for each lane: tokens of half a warp differ in bits 1 and 2. A lane
 * reads 16 bytes of the streams, at n = 4 twice: there the two tokens of a quarter of a warp differ in bit 0, at n = 2 in bit 2. */
template <int N> struct lane_place<N, LAYOUT_CN> {
    static constexpr int row_box = BOUNDARY_TILE * TMA_ROW, of_box = 4 / N; /* warps whose channels share a box */
    static __device__ __forceinline__ int token_of(int r)
    {
        /* 0 3 4 7 1 2 5 6, or 0 4 2 6 1 5 3 7 */
        return N == 4 ? (r & 8) | (r & 3) << 1 | ((r >> 2 ^ r) & 1)
                      : (r & 8) | (r & 1) << 2 | (r & 2) | (r >> 2 & 1);
    }
    /* Where a lane's first piece is; at n = 4 the second differs in bit 4. */
    static __device__ __forceinline__ uint32_t of_lane(int warp, int token, int t)
    {
        return piece(warp, 0, token, t * (N / 2));
    }
    static __device__ __forceinline__ uint32_t piece(int warp, int stream, int token, int part)
    {
        return warp / of_box * row_box + tma_piece(token, warp % of_box * (2 * N) + 2 * stream + part);
    }
    static __device__ __forceinline__ uint32_t of_warp(uint32_t of_first, int warp)
    {
        return (of_first ^ (uint32_t)(warp % of_box * (2 * N)) << 4) + warp / of_box * row_box;
    }
};

/* A token's sums over channels: their number, rounded up to a multiple of four, and their layout in shared memory. They overwrite the
 * warp's y, where a token has two pieces of 16 bytes for each stream; each half of the sums takes one of them. Tokens 8 to 15 swap
 * the halves of a piece to avoid bank conflicts with tokens 0 to 7. */
template <int N, stream_layout L, bool SHIFTED, site_kind KIND> struct sum_room {
    static constexpr int used = (KIND == SITE_BOUNDARY ? N + N * N : 0) + (SHIFTED ? N : 0),
                         count = (used + 3) / 4 * 4, half = count / 2;
    static_assert(half <= N * 4, "a piece for each stream");
    static __device__ __forceinline__ uint32_t offset(int warp, int token, int part, int k)
    {
        return lane_place<N, L>::piece(warp, k >> 2, token, part) + (((k >> 1) ^ (token >> 3)) & 1) * 8;
    }
};

/* Barriers, per stage: full, the tile has arrived; done, the compute warps have finished it; free, it is stored and its sums are
 * added. Every lane arrives at `done` itself, so that racecheck can verify the order of each lane's writes; at `free`, which hands nothing
 * on, one lane for each warp does. psi: the first psi has arrived. */
struct ring_barriers {
    uint32_t full, done, free, psi;
};

/* Context of a warp. */
struct tiles_of_block {
    char *shared;
    ring_barriers barrier;
};

/* Cursor over the tiles of a block, piece by piece. */
struct tile_walk {
    const boundary_bwd_plan &plan;
    int slice, tile, remaining; /* remaining: tiles of the piece */
    ring_cursor ring;
    __device__ __forceinline__ tile_walk(const boundary_bwd_plan &p) : plan(p)
    {
        slice = boundary_first_slice(&p, blockIdx.x) - 1;
        do next_piece();
        while (remaining == 0 && !is_last());
    }
    __device__ __forceinline__ bool is_last() const
    {
        return slice >= boundary_last_slice(&plan, blockIdx.x);
    }
    __device__ __forceinline__ void next_piece()
    {
        const boundary_piece piece = boundary_piece_of(&plan, blockIdx.x, ++slice);
        tile = piece.tile, remaining = piece.count;
    }
    template <int STAGES> __device__ __forceinline__ void next()
    {
        tile++, ring.next(STAGES);
        if (--remaining == 0 && !is_last()) next_piece();
    }
};

#endif

#endif
