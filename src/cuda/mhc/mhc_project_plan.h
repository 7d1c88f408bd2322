/* SPDX-License-Identifier: Apache-2.0
 *
 * How the projection is split into blocks [M1]. Two kinds of numbers: those that decide the order of sums come from
 * streams * channels and, for sums over tokens, from tokens; those that only spread the work may look at the GPU. */
#ifndef WEFT_CUDA_MHC_PROJECT_PLAN_H
#define WEFT_CUDA_MHC_PROJECT_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PROJECT_LEAVES =
        64, /* ranges of columns that a token's sum begins with; they are summed by fours, three times */
    PROJECT_FAN = 4,
    PROJECT_STAGE = 64 /* columns that a leaf is a multiple of */
};

#ifdef __CUDACC__
#define PROJECT_HD __host__ __device__
#else
#define PROJECT_HD
#endif

/* First stage of a leaf; leaf PROJECT_LEAVES is the end. Decides the order of sums, by the columns alone. */
PROJECT_HD static inline int64_t weft_project_leaf(int64_t stages, int64_t leaf)
{
    return stages * leaf / PROJECT_LEAVES;
}

/* None of this decides the result. */
typedef struct weft_project_fwd_plan {
    int32_t tile_tokens; /* tokens of a block: 32, 128, 192 or 256 */
    int32_t splits;      /* blocks that share the columns of a token: 1, 4, 16 or 64 */
    int64_t blocks;
    bool packed; /* psi is split by a launch of its own and not by every block */
} weft_project_fwd_plan;

/* row_tiles: tiles of 8 rows of phi; large: a kernel with tiles of 256 tokens exists. */
weft_project_fwd_plan weft_cuda_project_fwd_plan(int64_t tokens, int64_t columns, int32_t row_tiles, bool large,
                                                 int32_t sms);

typedef struct weft_project_bwd_plan {
    int32_t block_columns; /* of a block */
    int32_t splits;        /* partial sums over tokens that d_phi is made of; decides the result */
    int64_t split_tokens;
    int64_t blocks;
} weft_project_bwd_plan;

weft_project_bwd_plan weft_cuda_project_bwd_plan(int64_t tokens, int64_t columns, int64_t rows,
                                                 int32_t block_columns);

/* Tiles that the tensor-core kernels are compiled for; 0 where there is none. */
int32_t weft_cuda_project_row_tiles(int64_t rows);

#ifdef __cplusplus
}
#endif
#endif
