/* SPDX-License-Identifier: Apache-2.0
 *
 * Launch plan of the fused backward of a site [M11] on the CUDA backend: whether a call of `boundary`, `pre` or `head` takes it,
 * and how it is split into blocks. These decisions change bits of the result, so they depend on the inputs and the shape alone:
 * neither on the gradients that are requested nor on their addresses, and on the GPU only in whether it can run the kernel. */
#ifndef WEFT_CUDA_SITE_BWD_PLAN_H
#define WEFT_CUDA_SITE_BWD_PLAN_H

#include "cuda/site/fwd_plan.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    BOUNDARY_SLICE = 128,     /* channels of a block, of all streams */
    BOUNDARY_TILE = 16,       /* tokens that are worked on at a time */
    BOUNDARY_STAGES = 5,      /* tiles in shared memory */
    BOUNDARY_FULL_STAGES = 4, /* of the FULL kernels */
    BOUNDARY_SWITCH = 5,      /* cost of changing to the next channels, in tiles */
    BOUNDARY_OLDEST = 90,     /* compute capability: tensor maps and bulk copies */
    BOUNDARY_NEWEST = 99,     /* setmaxnreg; newer GPUs are not measured */
};

typedef enum boundary_bwd_path {
    BOUNDARY_BWD_FUSED = 0,
    BOUNDARY_BWD_NO_TOKENS,
    BOUNDARY_BWD_OTHER_GPU,
    BOUNDARY_BWD_SMALL_GPU,
    BOUNDARY_BWD_DTYPE,
    BOUNDARY_BWD_STREAMS,
    BOUNDARY_BWD_CHANNELS,
    BOUNDARY_BWD_LAYOUT,
    BOUNDARY_BWD_GATES,
    BOUNDARY_BWD_SIZE,
    BOUNDARY_BWD_PATHS
} boundary_bwd_path;

typedef struct boundary_bwd_facts {
    int64_t tokens, streams, channels;
    bool is_16_bit; /* the streams, f, and the given upstream gradients of y, u and v: all bf16, or all f16 */
    bool
        rows_are_wide; /* the same tensors: channels side by side, or in (C,n) streams and channels; tokens 16 bytes apart, or several */
    bool gates_on_chip; /* Sinkhorn's history fits a block's shared memory; a head has none */
    int32_t capability; /* of the code that would run (code.h); it has the fused kernel from OLDEST to NEWEST */
    int64_t shared;     /* bytes of a block's shared memory */
} boundary_bwd_facts;

boundary_bwd_path weft_boundary_bwd_path(const boundary_bwd_facts *f);
/* "fused: ..." or "unfused: <reason>"; NULL where path is out of range. */
const char *weft_boundary_bwd_path_text(boundary_bwd_path path);

/* Shared memory of a block: a ring of tiles, each with its tokens' records and three barriers, and a barrier for psi. */
typedef struct boundary_bwd_ring {
    int32_t streams_bytes, row_bytes; /* of a tile: all streams, one row per token */
    int32_t tile_bytes, record_bytes; /* of a stage */
    int64_t bytes;                    /* with room to align the first tile */
} boundary_bwd_ring;

boundary_bwd_ring weft_boundary_bwd_ring(int64_t streams, site_kind kind);

/* Floats of a token's sums over channels: with `post` the gradients of post and res, with `shifted` of pre_in; rounded up to a
 * multiple of four. */
int32_t weft_boundary_bwd_sums(int64_t streams, bool post, bool shifted);

/* The work as a sequence of steps: slice after slice of the channels, one step per tile of tokens, and BOUNDARY_SWITCH steps for the
 * change of slice. A block has `steps` of them, so all blocks end together. Its share of a slice is a piece, with partial sums of the
 * gradients of parameters. First pieces of blocks are laid out from a slice's first token on, so these blocks process the same
 * tokens at the same time, which improves locality; the piece of a block that continues from the previous slice is the end of the
 * tokens. A piece has number block + slice, so those of a slice are neighbours. */
typedef struct boundary_bwd_plan {
    int32_t slices, blocks;
    int64_t tiles, steps;
} boundary_bwd_plan;

typedef struct boundary_piece {
    int32_t tile, count; /* tiles from `tile` on */
} boundary_piece;

boundary_bwd_plan weft_boundary_bwd_plan(int64_t tokens, int64_t channels);

#ifdef __CUDACC__
#define BOUNDARY_FN static __host__ __device__ __forceinline__
#else
#define BOUNDARY_FN static inline
#endif

/* The first step of a slice. */
BOUNDARY_FN int64_t boundary_begin(const boundary_bwd_plan *p, int64_t slice)
{
    return slice * (p->tiles + BOUNDARY_SWITCH);
}

/* The slices of a block, clipped to the last. */
BOUNDARY_FN int32_t boundary_first_slice(const boundary_bwd_plan *p, int64_t block)
{
    return (int32_t)(block * p->steps / (p->tiles + BOUNDARY_SWITCH));
}

BOUNDARY_FN int32_t boundary_last_slice(const boundary_bwd_plan *p, int64_t block)
{
    const int64_t last = ((block + 1) * p->steps - 1) / (p->tiles + BOUNDARY_SWITCH);
    return (int32_t)(last < p->slices ? last : p->slices - 1);
}

/* The piece of a block in a slice; empty where the block begins after the tiles of its first slice. */
BOUNDARY_FN boundary_piece boundary_piece_of(const boundary_bwd_plan *p, int64_t block, int64_t slice)
{
    const int64_t begin = boundary_begin(p, slice), from = block * p->steps, to = from + p->steps;
    const int64_t low = from > begin ? from : begin, high = to < begin + p->tiles ? to : begin + p->tiles;
    const int64_t count = high > low ? high - low : 0;
    /* the first block that begins in the slice begins with its first token */
    const int64_t first = (begin + p->steps - 1) / p->steps * p->steps;
    const boundary_piece piece = {(int32_t)(from < begin ? p->tiles - count : from - first), (int32_t)count};
    return piece;
}

BOUNDARY_FN int64_t boundary_pieces(const boundary_bwd_plan *p)
{
    return (int64_t)p->blocks + p->slices - 1;
}

/* The pieces of a slice: the first, and how many. */
BOUNDARY_FN int64_t boundary_first_piece(const boundary_bwd_plan *p, int64_t slice)
{
    return boundary_begin(p, slice) / p->steps + slice;
}

BOUNDARY_FN int32_t boundary_pieces_of(const boundary_bwd_plan *p, int64_t slice)
{
    const int64_t begin = boundary_begin(p, slice);
    return (int32_t)((begin + p->tiles - 1) / p->steps - begin / p->steps) + 1;
}

#ifdef __cplusplus
}
#endif
#endif
