/* SPDX-License-Identifier: Apache-2.0
 *
 * Launch shapes of the kernels that walk over rows: aggregate, expand, contract, RMSNorm. Plain arithmetic, no CUDA.
 *
 * A row of channels is split into tiles of `width` channels, one access of a thread. A team of `lanes` threads works on a
 * token; lane l holds the tiles l, l + lanes, l + 2 lanes, ..., up to `tiles` of them at a time. */
#ifndef WEFT_CUDA_ROWS_PLAN_H
#define WEFT_CUDA_ROWS_PLAN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define WEFT_ROWS_MAX_GRID ((int64_t)1 << 30)
#define WEFT_ROWS_PARTIAL_FLOATS ((int64_t)1 << 22) /* 16 MiB of partial sums */

/* A team is 1, 2, 4 .. 32 lanes of a warp, or the whole block. */
typedef struct weft_rows_team {
    int32_t lanes;
    int32_t bits;      /* lanes == 1 << bits where several teams share a block; unused otherwise */
    int32_t per_block; /* teams in a block */
} weft_rows_team;

/* Without sums over channels: rows fall into segments that different teams work on, so that few tokens also fill the
 * machine. Team number s + segments * t works on segment s of token t. */
typedef struct weft_rows_flat {
    weft_rows_team team;
    int32_t block;
    int64_t segments;
    int64_t grid; /* blocks; kernels step by the whole grid where that is not enough */
} weft_rows_flat;

/* With sums over channels: one team per token. Everything but the grid is a function of channels, width and tiles, and
 * so is the order of the sums. */
typedef struct weft_rows_sum {
    weft_rows_team team;
    int32_t block;
    int64_t steps; /* times a team passes over `tiles` tiles per lane */
    int64_t grid;
} weft_rows_sum;

/* Sums over tokens: chunk k is the tokens [k * tokens, (k + 1) * tokens) that there are; none is empty. */
typedef struct weft_rows_chunks {
    int64_t chunks, tokens;
} weft_rows_chunks;

weft_rows_flat weft_rows_plan_flat(int64_t tokens, int64_t channels, int64_t width, int64_t tiles, int32_t sms);
/* most_block: largest block to use, a multiple of 32. */
weft_rows_sum weft_rows_plan_sum(int64_t tokens, int64_t channels, int64_t width, int64_t tiles,
                                 int32_t most_block);
/* chunks * channels is at most WEFT_ROWS_PARTIAL_FLOATS, or there is one chunk. */
weft_rows_chunks weft_rows_plan_chunks(int64_t tokens, int64_t channels);
/* The same for at most `most` chunks, each of a multiple of `unit` tokens. */
weft_rows_chunks weft_rows_plan_pieces(int64_t tokens, int64_t channels, int64_t most, int64_t unit);

#ifdef __cplusplus
}
#endif
#endif
