/* SPDX-License-Identifier: Apache-2.0
 *
 * Launch plan of the fused site kernel (docs/internals/fused-site.md): forward of pre [M10], boundary [M11] and head [M9]. Plain
 * arithmetic, tested without a GPU.
 *
 * The channels of a token are split over the blocks of a cluster: a block has `boxes` boxes of 64 channels of all streams and
 * keeps its part of psi on chip. Clusters process tiles of SITE_TILE tokens round-robin. The cluster size decides the order of
 * sums and follows from streams and channels alone; the number of clusters and of tiles that a block holds changes no result. */
#ifndef WEFT_CUDA_SITE_FWD_PLAN_H
#define WEFT_CUDA_SITE_FWD_PLAN_H

#include "core/kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SITE_TILE = 8,       /* tokens */
    SITE_BOX = 64,       /* channels */
    SITE_CLUSTER = 16,   /* most blocks of a cluster; a power of two from 2 on */
    SITE_CLUSTERS = 5,   /* cluster sizes by their logarithm: 1 to 4 are 2, 4, 8, 16 */
    SITE_STAGES = 12,    /* most tiles that a block holds */
    SITE_FEW_PAIRS = 4,  /* pairs of tensor-core steps of a warp; this many fit in registers */
    SITE_ONCE_PAIRS = 5, /* up to this many, a block has room for all of its psi at once */
    SITE_MANY_PAIRS = 7, /* maximum */
    SITE_MMA_WARPS = 8,  /* MMA warps */
    SITE_KEPT = 24,      /* most operands of psi that a lane has in registers; the others are in shared memory */
    /* With four streams and the most pairs a block is wide: half as many MMA warps, which have more registers together; f has a
     * buffer of its own; one batch of logits, a small one, has a buffer. This frees the room for a fifth tile. */
    SITE_WIDE_MMA_WARPS = 4,
    SITE_WIDE_PAIRS = SITE_MANY_PAIRS * SITE_MMA_WARPS / SITE_WIDE_MMA_WARPS,
    SITE_WIDE_KEPT = 51,
    SITE_ROW = 28,    /* floats for a token's partial sums */
    SITE_OLDEST = 90, /* compute capabilities with code, times ten */
    SITE_NEWEST = 99
};

/* Capacity of a block by its pairs, in shared memory (the plan) and in registers (the kernel). */
#ifdef __cplusplus
#define SITE_FN static constexpr
#else
#define SITE_FN static inline
#endif
SITE_FN bool site_is_wide(int32_t pairs)
{
    return pairs == SITE_WIDE_PAIRS;
}
SITE_FN int32_t site_mma_warps(int32_t pairs)
{
    return site_is_wide(pairs) ? SITE_WIDE_MMA_WARPS : SITE_MMA_WARPS;
}
/* Operands of psi that a lane has in registers. */
SITE_FN int32_t site_kept(int32_t pairs)
{
    return site_is_wide(pairs) ? SITE_WIDE_KEPT : SITE_KEPT;
}
/* Buffers for batches of logits, and tokens of a batch. A batch takes the Sinkhorn warp the same time whatever its tokens, one of a
 * lane: where a block owns many tokens of a tile, small batches would set the pace. */
SITE_FN int32_t site_batches(int32_t pairs)
{
    return site_is_wide(pairs) ? 1 : 2;
}
SITE_FN int32_t site_batch(int32_t pairs)
{
    return site_is_wide(pairs) ? 8 : 32;
}

/* Barriers of a block (site/fwd.cuh): six arrays per stage and two per slot come first; these are the offsets of the arrays after them.
 * psi has a barrier for each part that is loaded separately. */
enum {
    SITE_LOGITS_FULL,
    SITE_LOGITS_EMPTY = SITE_LOGITS_FULL + 2,
    SITE_PSI_EMPTY = SITE_LOGITS_EMPTY + 2,
    SITE_PARTIAL_FULL,
    SITE_PARTIAL_EMPTY = SITE_PARTIAL_FULL + 2,
    SITE_F_FULL = SITE_PARTIAL_EMPTY + 2,
    SITE_F_EMPTY,
    SITE_PSI_FULL
};

/* Kinds of a site: head, n rows of the projection, for the aggregate alone; pre, all rows, on given streams; boundary, pre behind a
 * post that writes the streams. */
typedef enum site_kind { SITE_HEAD, SITE_PRE, SITE_BOUNDARY } site_kind;

/* Rows of the projection that the kernels of a site have. Without a residual mix phi has the first 2n alone and psi is zero in the
 * others: the products are the same, so the gates have the same bits whether the site is a pre or a boundary. */
SITE_FN int64_t site_psi_rows(int64_t streams, site_kind kind)
{
    return kind == SITE_HEAD ? streams : 2 * streams + streams * streams;
}

/* The path of a call: the fused kernel, or the reason why it falls back to the unfused kernels. */
typedef enum weft_site_path {
    WEFT_SITE_FUSED = 0,
    WEFT_SITE_NO_TOKENS,
    WEFT_SITE_DTYPE,
    WEFT_SITE_STREAMS,
    WEFT_SITE_CHANNELS,
    WEFT_SITE_LAYOUT,
    WEFT_SITE_TOO_WIDE,
    WEFT_SITE_SIZE,
    WEFT_SITE_SMALL_GPU,
    WEFT_SITE_OTHER_GPU,
    WEFT_SITE_PATHS
} weft_site_path;

/* Inputs of the plan. The path depends neither on `sms` nor, except for zero, on `tokens`: a token's result must not depend on the
 * others. */
typedef struct weft_site_facts {
    int64_t tokens, streams, channels;
    int64_t rows; /* of the projection: site_psi_rows */
    bool
        half; /* the streams, f, u and v are all bf16 or all f16; coefficients that are inputs or the projection's outputs are fp32 */
    bool layout; /* (n, C) or (C, n), the same for all streams, in rows that can be copied 16 bytes at a time */
    bool post;   /* the streams are written here: f is an input */
    int32_t capability;              /* of the code that would run, times ten */
    int64_t shared;                  /* bytes of a block's shared memory */
    int32_t resident[SITE_CLUSTERS]; /* clusters of each size that the device runs at once */
    int32_t sms;                     /* multiprocessors to use */
} weft_site_facts;

/* Offsets in shared memory, in bytes. The tiles come first, after f where it has a buffer of its own. At start-up psi in its memory
 * layout occupies the last tiles, from first_psi on. */
typedef struct weft_site_room {
    int32_t f, tiles, stage, first_psi, psi, coef, pre, sums, received, inverse, aside, logits, barriers;
    int32_t weights; /* gain and bias of the block's channels in fp32; 0: no room, they are read from memory */
    int32_t bytes;
} weft_site_room;

typedef struct weft_site_plan {
    weft_site_path path;
    int32_t cluster, cluster_log, boxes;
    int32_t mma_warps, pairs; /* MMA warps, and the pairs of each */
    int32_t stages;           /* tiles that a block holds */
    int32_t psi_boxes;        /* boxes of 64 channels whose psi is loaded at a time */
    int32_t early;            /* tiles that fit beside psi at start-up */
    int32_t slots;            /* tokens whose sums a block can receive concurrently */
    int32_t tiles, clusters;
    weft_site_room room;
} weft_site_plan;

weft_site_plan weft_cuda_site_plan(const weft_site_facts *facts);
/* "fused: ..." or "unfused: <reason>"; NULL where path is out of range. */
const char *weft_cuda_site_path_text(weft_site_path path);

#ifdef __cplusplus
}
#endif
#endif
