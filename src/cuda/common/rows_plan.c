/* SPDX-License-Identifier: Apache-2.0
 *
 * Launch shapes of the kernels that walk over rows. */
#include "cuda/common/rows_plan.h"

enum {
    WARP = 32,
    FLAT_BLOCK = 256,
    TEAM_BLOCK = 128, /* of small teams; fixed, because sums over a block's teams depend on it */
    LEAST_LANES = 4   /* fewer would use less than a sector of 32 bytes at a time */
};

static int64_t up(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* The smallest team within a warp that holds a row of `total` tiles, or the warp. */
static weft_rows_team small_team(int64_t total, int64_t tiles, int32_t block)
{
    weft_rows_team t = {1, 0, block};
    while (t.lanes < WARP && (t.lanes * tiles < total || (t.lanes < LEAST_LANES && t.lanes < total)))
        t.lanes *= 2, t.bits++;
    t.per_block = block / t.lanes;
    return t;
}

/* Blocks for `teams` teams. */
static int64_t grid_for(int64_t teams, int64_t per_block)
{
    return least(up(teams, per_block), WEFT_ROWS_MAX_GRID);
}

weft_rows_flat weft_rows_plan_flat(int64_t tokens, int64_t channels, int64_t width, int64_t tiles, int32_t sms)
{
    weft_rows_flat p;
    int64_t total = up(channels, width);
    p.block = FLAT_BLOCK;
    p.team = small_team(total, tiles, p.block);
    p.segments = up(total, p.team.lanes * tiles);
    /* Smaller blocks where large ones would leave multiprocessors without one. */
    int64_t teams = tokens * p.segments;
    while (p.block > 2 * WARP && up(teams, p.team.per_block) < 2 * (int64_t)sms)
        p.block /= 2, p.team.per_block /= 2;
    p.grid = grid_for(teams, p.team.per_block);
    return p;
}

weft_rows_sum weft_rows_plan_sum(int64_t tokens, int64_t channels, int64_t width, int64_t tiles, int32_t most_block)
{
    weft_rows_sum p;
    int64_t total = up(channels, width);
    if (total <= WARP * tiles) {
        p.block = TEAM_BLOCK;
        p.team = small_team(total, tiles, p.block);
        p.steps = 1;
    } else {
        /* As few passes as the largest block allows, then as few warps as these passes need. */
        p.steps = up(total, most_block * tiles);
        p.block = (int32_t)(up(up(total, p.steps * tiles), WARP) * WARP);
        p.team = (weft_rows_team){p.block, 0, 1};
    }
    p.grid = grid_for(tokens, p.team.per_block);
    return p;
}

/* A block walks over a chunk and holds one row at a time, so short rows need many blocks to keep enough bytes in flight:
 * two blocks for each of a large GPU's multiprocessors at 4096 channels, up to 1024 where rows are short. Long batches
 * and short ones get the same number: partial sums are written and read again, and must stay a small part of the
 * traffic. */
weft_rows_chunks weft_rows_plan_chunks(int64_t tokens, int64_t channels)
{
    int64_t most = ((int64_t)1 << 20) / channels;
    return weft_rows_plan_pieces(tokens, channels, most > 1024 ? 1024 : most < 256 ? 256 : most, 1);
}

weft_rows_chunks weft_rows_plan_pieces(int64_t tokens, int64_t channels, int64_t most, int64_t unit)
{
    weft_rows_chunks p = {0, 1};
    most = least(most, WEFT_ROWS_PARTIAL_FLOATS / channels);
    if (most < 1) most = 1;
    if (tokens == 0) return p;
    p.tokens = up(up(tokens, most), unit) * unit;
    p.chunks = up(tokens, p.tokens);
    return p;
}
