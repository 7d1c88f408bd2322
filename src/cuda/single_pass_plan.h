/* SPDX-License-Identifier: Apache-2.0
 *
 * Who does what when a site of mHC is one pass over the streams (docs/single-pass.md): pre [M10], boundary [M11] and the
 * head [M9], forward. Plain arithmetic, so that it is tested without a GPU.
 *
 * A slice is SITE_CHANNELS channels of all streams; one block has a slice and keeps its part of psi on chip. The slices of
 * a token are the blocks of a group, and groups take tiles of SITE_TILE tokens in turn. Slices decide the order of sums and
 * follow from the channels alone; how many groups there are changes no result. */
#ifndef WEFT_CUDA_SINGLE_PASS_PLAN_H
#define WEFT_CUDA_SINGLE_PASS_PLAN_H

#include "core/kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SITE_TILE = 16,      /* tokens */
    SITE_CHANNELS = 256, /* of a slice */
    SITE_RING =
        5, /* tiles between the sums of a tile and its end: what waits there should still be in the L2 cache */
    SITE_ROW = 32,           /* floats for the partial sums of a token */
    SITE_SHARED = 227 * 1024 /* bytes of shared memory that a block needs to be allowed to have */
};

/* Why a call takes the chain of single operators instead. */
typedef enum weft_site_path {
    WEFT_SITE_SINGLE_PASS = 0,
    WEFT_SITE_NO_TOKENS,
    WEFT_SITE_DTYPE,
    WEFT_SITE_STREAMS,
    WEFT_SITE_CHANNELS,
    WEFT_SITE_LAYOUT,
    WEFT_SITE_TOO_WIDE,
    WEFT_SITE_DEVICE,
    WEFT_SITE_PATHS
} weft_site_path;

typedef struct weft_site_plan {
    weft_site_path path;
    int32_t slices, groups;
    int64_t tiles;
    size_t ring_floats, counters; /* workspace: partial sums, and counters of four bytes */
} weft_site_plan;

/* What the plan must know of a device: bytes of shared memory that a block may have, multiprocessors. */
typedef struct weft_site_device {
    size_t most_shared;
    int32_t sms;
} weft_site_device;

/* layout: the tensors lie as the kernel wants; sms: multiprocessors to use, which decides no path. Nor does the number of
 * tokens: a token's result may not depend on the others. */
weft_site_plan weft_cuda_site_plan(int64_t tokens, int64_t streams, int64_t channels, weft_dtype dtype, bool layout,
                                   weft_site_device device, int32_t sms);
/* A sentence for people. */
const char *weft_cuda_site_reason(weft_site_path path);

#ifdef __cplusplus
}
#endif
#endif
