/* SPDX-License-Identifier: Apache-2.0
 *
 * Which backward of `boundary` a call takes on the CUDA backend [M11], and how the single pass is cut into blocks. What is
 * decided here decides bits, so it looks at the inputs and the shape alone: not at which gradients are wanted or where
 * they go, and at the GPU only as far as it can run the kernel at all. */
#ifndef WEFT_CUDA_MHC_BOUNDARY_BWD_PLAN_H
#define WEFT_CUDA_MHC_BOUNDARY_BWD_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    BOUNDARY_SLICE = 128,     /* channels of a block, of all streams */
    BOUNDARY_TILE = 16,       /* tokens that are worked on at a time */
    BOUNDARY_STAGES = 5,      /* tiles in shared memory */
    BOUNDARY_FULL_STAGES = 4, /* of the kernels that take everything */
    BOUNDARY_OLDEST = 90,     /* compute capability: tensor maps and bulk copies */
    BOUNDARY_NEWEST = 99,     /* registers that warps hand to each other; nobody has measured others */
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
    BOUNDARY_BWD_SIZE,
    BOUNDARY_BWD_PATHS
} boundary_bwd_path;

typedef struct boundary_bwd_facts {
    int64_t tokens, streams, channels;
    bool bf16;          /* the streams, f, and the upstream gradients of y, u and v as far as there are any */
    bool rows_are_wide; /* the same tensors: channels side by side, everything else a multiple of 16 bytes apart */
    int32_t capability; /* that the kernels were compiled for, 10 major + minor */
    int64_t shared;     /* bytes of shared memory that a block may have */
} boundary_bwd_facts;

boundary_bwd_path weft_boundary_bwd_path(const boundary_bwd_facts *f);
/* A sentence without a full stop; NULL where path is out of range. */
const char *weft_boundary_bwd_path_text(boundary_bwd_path path);

/* Shared memory of a block: a ring of tiles, each with its tokens' records and three barriers. */
typedef struct boundary_bwd_ring {
    int32_t streams_bytes, row_bytes; /* of a tile: all streams, one row per token */
    int32_t tile_bytes, record_bytes; /* of a stage */
    int64_t bytes;                    /* with room to align the first tile */
} boundary_bwd_ring;

boundary_bwd_ring weft_boundary_bwd_ring(int64_t streams);

/* Floats of a token's sums over channels: gradients of post and res, with `shifted` of pre_in; to a multiple of four. */
int32_t weft_boundary_bwd_sums(int64_t streams, bool shifted);

typedef struct boundary_bwd_plan {
    int32_t slices; /* of the channels */
    int32_t
        splits; /* of the tokens: partial sums that the gradients of parameters are made of; decides the result */
    int64_t tiles, split_tiles;
    int64_t blocks; /* slices * splits, slices side by side */
} boundary_bwd_plan;

boundary_bwd_plan weft_boundary_bwd_plan(int64_t tokens, int64_t streams, int64_t channels);

#ifdef __cplusplus
}
#endif
#endif
