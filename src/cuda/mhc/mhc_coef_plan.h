/* SPDX-License-Identifier: Apache-2.0
 *
 * How gates and Sinkhorn are split for the GPU [M2] [M3] [M4]: where a token's history lies, how the sums over tokens are
 * grouped, how much workspace that takes. Plain C without CUDA, so that it is tested everywhere.
 *
 * Chunks and slots decide the order of sums and so the bits of d_alpha and d_beta: they follow from the number of tokens
 * alone. Everything else only spreads the work. */
#ifndef WEFT_CUDA_MHC_COEF_PLAN_H
#define WEFT_CUDA_MHC_COEF_PLAN_H

#include "core/kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    COEF_THREADS = 64, /* of a block, one token each; also the tokens of a chunk */
    COEF_GROUPS = 2, /* chunks that one block of as many groups takes at once, where there are no more: blocks that
                             * wait for each other cost 7 us */
    COEF_MOST_SLOTS = 2048, /* rows of partial sums, which bounds the workspace whatever the number of tokens */
    COEF_MOST_BLOCKS = 256  /* blocks that have room in the workspace, where a token's matrix lies there */
};

typedef struct weft_cuda_coef_plan {
    bool
        in_registers; /* stream counts that have kernels of their own; the others keep their matrices in workspace */
    int64_t history;  /* floats of history a token (backward of Sinkhorn) */
    size_t shared;    /* bytes of dynamic shared memory a block: the history of its tokens */
    int64_t room;     /* floats of workspace a thread: matrices and history, where not on chip */
    int64_t blocks;   /* as many as have work, or room */
    int64_t chunks;   /* runs of COEF_THREADS tokens */
    int64_t slots;    /* slot s sums the chunks s, s + slots, s + 2 slots ... in this order */
} weft_cuda_coef_plan;

/* Stream counts with a kernel of their own. */
bool weft_cuda_coef_small(int64_t n);
/* Floats that Sinkhorn's backward keeps of a token. */
int64_t weft_cuda_coef_history(int64_t n, const weft_mhc_numerics *q);
/* Chunks and slots: the same for every operator that sums over tokens here. */
void weft_cuda_coef_cut(int64_t tokens, int64_t *chunks, int64_t *slots);
/* q: NULL where there is no Sinkhorn. most_shared: bytes of dynamic shared memory a block may have. */
weft_cuda_coef_plan weft_cuda_coef_plan_fwd(int64_t tokens, int64_t n, const weft_mhc_numerics *q);
weft_cuda_coef_plan weft_cuda_coef_plan_bwd(int64_t tokens, int64_t n, const weft_mhc_numerics *q,
                                            size_t most_shared);
/* Floats of workspace: rooms of all blocks; partial sums of `width` values. */
int64_t weft_cuda_coef_rooms(const weft_cuda_coef_plan *p);
int64_t weft_cuda_coef_partials(const weft_cuda_coef_plan *p, int64_t width);

#ifdef __cplusplus
}
#endif
#endif
