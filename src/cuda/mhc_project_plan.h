/* SPDX-License-Identifier: Apache-2.0
 *
 * How the projection is cut into blocks [M1]. Two kinds of numbers: those that decide the order of sums come from
 * streams * channels and, for sums over tokens, from tokens; those that only spread the work may look at the GPU. */
#ifndef WEFT_CUDA_MHC_PROJECT_PLAN_H
#define WEFT_CUDA_MHC_PROJECT_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    PROJECT_GROUPS = 16,  /* a token's sum over its columns: 4 sums of 4 groups of columns, each in order */
    PROJECT_SUPER = 4,    /* groups in a row that are summed first */
    PROJECT_UNIT = 128,   /* columns of a group are a multiple of this */
    PROJECT_TILE_ROWS = 8 /* rows of phi in a tensor-core tile */
};

typedef struct weft_project_fwd_plan {
    /* These decide the result. */
    int64_t group_columns;
    /* These do not. */
    int32_t tile_tokens; /* tokens of a block: 32, 128 or 256 */
    int32_t splits;      /* blocks that share the columns of a token: 1, 4 or 16 */
    int64_t blocks;
} weft_project_fwd_plan;

/* row_tiles: tiles of 8 rows of phi. */
weft_project_fwd_plan weft_cuda_project_fwd_plan(int64_t tokens, int64_t columns, int32_t row_tiles, int32_t sms);

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
