/* SPDX-License-Identifier: Apache-2.0
 *
 * Who does what when a site of mHC is one pass over the streams (docs/single-pass.md): pre [M10], boundary [M11] and the
 * head [M9], forward. Plain arithmetic, so that it is tested without a GPU.
 *
 * The channels of a token are dealt to the blocks of a cluster: a block has `boxes` boxes of 64 channels of all streams and
 * keeps its part of psi on chip. Clusters take tiles of SITE_TILE tokens in turn. The cluster decides the order of sums and
 * follows from streams and channels alone; how many clusters there are, and how many tiles a block holds, changes no
 * result. */
#ifndef WEFT_CUDA_SINGLE_PASS_PLAN_H
#define WEFT_CUDA_SINGLE_PASS_PLAN_H

#include "core/kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SITE_TILE = 8,       /* tokens */
    SITE_BOX = 64,       /* channels */
    SITE_CLUSTER = 16,   /* blocks of a cluster, at most; fewer are a smaller power of two, from 2 on */
    SITE_CLUSTERS = 5,   /* sizes of clusters by their logarithm, 2, 4, 8, 16 from 1 on */
    SITE_STAGES = 12,    /* tiles that a block holds, at most */
    SITE_FEW_PAIRS = 4,  /* pairs of steps of the tensor cores that a warp has; so many are all in registers */
    SITE_ONCE_PAIRS = 5, /* with so many a block has room for all of its psi as it comes */
    SITE_MANY_PAIRS = 7, /* at most */
    SITE_PROJECTORS = 8, /* warps that project */
    SITE_KEPT = 24, /* operands of psi that a lane has in registers, at most; the others are in shared memory */
    /* With four streams and most pairs a block is wide: half as many warps project, which have more registers together, f comes to
     * a place of its own, and a batch of logits has one. That is what a fifth tile has room by. */
    SITE_WIDE_PROJECTORS = 4,
    SITE_WIDE_PAIRS = SITE_MANY_PAIRS * SITE_PROJECTORS / SITE_WIDE_PROJECTORS,
    SITE_WIDE_KEPT = 51,
    SITE_ROW = 28,    /* floats for a token's partial sums */
    SITE_OLDEST = 90, /* compute capabilities for which there is code, times ten */
    SITE_NEWEST = 99
};

/* What a block of these pairs has room for, in shared memory (the plan) and in registers (the kernel). */
#ifdef __cplusplus
#define SITE_FN static constexpr
#else
#define SITE_FN static inline
#endif
SITE_FN bool site_is_wide(int32_t pairs)
{
    return pairs == SITE_WIDE_PAIRS;
}
SITE_FN int32_t site_projectors(int32_t pairs)
{
    return site_is_wide(pairs) ? SITE_WIDE_PROJECTORS : SITE_PROJECTORS;
}
/* Operands of psi that a lane keeps. */
SITE_FN int32_t site_kept(int32_t pairs)
{
    return site_is_wide(pairs) ? SITE_WIDE_KEPT : SITE_KEPT;
}
/* Batches of logits that have a place. */
SITE_FN int32_t site_batches(int32_t pairs)
{
    return site_is_wide(pairs) ? 1 : 2;
}

/* Barriers of a block behind six for each stage and two for each slot, in this order (site/fwd.cuh says what they are for): where an
 * array of them begins. psi's are as many as the boxes of psi that come apart. */
enum {
    SITE_LOGITS_FULL,
    SITE_LOGITS_EMPTY = SITE_LOGITS_FULL + 2,
    SITE_PSI_EMPTY = SITE_LOGITS_EMPTY + 2,
    SITE_LEFT_FULL,
    SITE_LEFT_EMPTY = SITE_LEFT_FULL + 2,
    SITE_F_FULL = SITE_LEFT_EMPTY + 2,
    SITE_F_EMPTY,
    SITE_PSI_FULL
};

/* What a site is: n rows of the projection for the aggregate alone; all of them, on streams that are there; the same behind a
 * post that makes the streams. */
typedef enum site_kind { SITE_HEAD, SITE_PRE, SITE_BOUNDARY } site_kind;

/* Fused, or why the call falls back to the unfused kernels. */
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

/* What the path depends on. Neither multiprocessors to use nor, but for none at all, tokens: a token's result may not depend
 * on the others. */
typedef struct weft_site_facts {
    int64_t tokens, streams, channels;
    int64_t rows;       /* of the projection */
    bool bf16;          /* the streams, f, u and v; coefficients that go in or leave before gates are fp32 */
    bool layout;        /* rows can be copied 16 bytes at a time */
    bool post;          /* the streams are made here: f comes with them */
    int32_t capability; /* of the code that would run, times ten */
    int64_t shared;     /* bytes that a block may have */
    int32_t resident[SITE_CLUSTERS]; /* clusters of each size that the device runs at once */
    int32_t sms;                     /* multiprocessors to use: decides no path */
} weft_site_facts;

/* Offsets in shared memory, in bytes. The tiles come first, behind f where it has a place of its own; at the beginning psi as it
 * lies in memory takes the place of the last ones, from first_psi on. */
typedef struct weft_site_room {
    int32_t f, tiles, stage, first_psi, psi, coef, pre, sums, received, inverse, aside, logits, barriers, bytes;
} weft_site_room;

typedef struct weft_site_plan {
    weft_site_path path;
    int32_t cluster, cluster_log, boxes;
    int32_t projectors, pairs; /* warps that project, and what each of them has */
    int32_t stages;            /* tiles that a block holds */
    int32_t psi_boxes;         /* of 64 channels, whose psi is brought at a time */
    int32_t early;             /* tiles that have room beside it */
    int32_t slots;             /* tokens whose sums a block can receive at once */
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
