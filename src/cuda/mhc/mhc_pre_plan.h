/* SPDX-License-Identifier: Apache-2.0
 *
 * Whether pre [M10] in fp32 is one launch, and how that is cut. Plain arithmetic, so that it is tested without a GPU. None of
 * it decides a result: the launch has the bits of the chain. */
#ifndef WEFT_CUDA_MHC_PRE_PLAN_H
#define WEFT_CUDA_MHC_PRE_PLAN_H

#include "core/kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PRE_ONE_TOKENS = 8,  /* of a cluster */
    PRE_ONE_ROWS = 8,    /* of the projection, of a block */
    PRE_ONE_CLUSTER = 3, /* blocks, at most: those of four streams */
    PRE_ONE_MOST = 64,   /* clusters; with more the chain is as fast on the device, or faster */
    PRE_ONE_COLUMNS = 1 << 20,
    PRE_ONE_CAPABILITY = 90, /* the oldest compute capability with clusters, times ten */
};

typedef enum weft_pre_path {
    WEFT_PRE_ONE_LAUNCH = 0,
    WEFT_PRE_DTYPE,
    WEFT_PRE_NO_TOKENS,
    WEFT_PRE_UNMIXED,
    WEFT_PRE_STREAMS,
    WEFT_PRE_LAYOUT,
    WEFT_PRE_LONG,
    WEFT_PRE_OTHER_GPU,
    WEFT_PRE_PATHS
} weft_pre_path;

typedef struct weft_pre_facts {
    int64_t tokens, streams;
    int64_t columns;    /* streams * channels */
    int64_t rows;       /* of the projection */
    bool f32;           /* the streams */
    bool unmixed;       /* no residual mix */
    bool layout;        /* parameters are fp32, and channels lie side by side and can be moved 16 bytes at a time */
    int32_t capability; /* of the code that would run, times ten */
} weft_pre_facts;

typedef struct weft_pre_plan {
    weft_pre_path path;
    int32_t cluster; /* blocks */
    int32_t clusters;
} weft_pre_plan;

weft_pre_plan weft_cuda_pre_plan(const weft_pre_facts *facts);
/* "unfused: ...", for one launch has the bits of the unfused kernels; NULL where path is out of range. */
const char *weft_cuda_pre_path_text(weft_pre_path path);

#ifdef __cplusplus
}
#endif
#endif
