/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/mhc_project_plan.h"

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

int32_t weft_cuda_project_row_tiles(int64_t rows)
{
    if (rows <= 8) return 1;
    if (rows <= 24) return 3;
    return rows <= 80 ? 10 : 0;
}

/* Candidates from large to small: a large tile reads phi less often, a split fills the machine. The cost is the number of
 * rounds the machine makes times the work of a block, plus what a split costs in partial sums. */
weft_project_fwd_plan weft_cuda_project_fwd_plan(int64_t tokens, int64_t columns, int32_t row_tiles, int32_t sms)
{
    static const int32_t tiles[] = {256, 128, 32}, splits[] = {1, 4, 16};
    const int64_t unit = (int64_t)PROJECT_GROUPS * PROJECT_UNIT, most_partial = (int64_t)16 << 20;
    weft_project_fwd_plan best = {.group_columns = ceil_div(columns, unit) * PROJECT_UNIT};
    double best_cost = 0;
    for (int i = 0; i < 3; i++)
        for (int k = 0; k < 3; k++) {
            /* At 80 rows a thread has no registers for two tiles of tokens. */
            if (tiles[i] == 256 && row_tiles > 3) continue;
            if (splits[k] > 1 && tokens > most_partial / (splits[k] * (row_tiles * 8 + 1) * 4)) continue;
            int64_t blocks = ceil_div(tokens, tiles[i]) * splits[k];
            /* A block moves its tokens and phi, in bytes a column; phi comes from L2, at about half the cost. Partial
             * sums: 2 x 4 bytes a row, token and split. A block takes a while to get going. */
            double work = (tiles[i] * 2.0 + row_tiles * 8 * 4 * 0.5) * (double)columns / splits[k] + 20000.0;
            double resident = tiles[i] == 32 ? 4.0 * sms : sms;
            double rounds = (double)ceil_div(blocks, (int64_t)resident) * (tiles[i] == 32 ? 4.0 : 1.0);
            if (tiles[i] == 32 && blocks < (int64_t)resident) rounds = 1.0 + 3.0 * (double)blocks / resident;
            double partial = splits[k] > 1 ? (double)tokens * splits[k] * row_tiles * 8 * 8 / sms + 60000.0 : 0;
            double cost = rounds * work + partial;
            if (best.blocks == 0 || cost < best_cost) {
                best_cost = cost;
                best.tile_tokens = tiles[i];
                best.splits = splits[k];
                best.blocks = blocks;
            }
        }
    return best;
}

/* Enough blocks to fill any GPU a few times, as few partial sums as that allows: each is a copy of phi. */
weft_project_bwd_plan weft_cuda_project_bwd_plan(int64_t tokens, int64_t columns, int64_t rows,
                                                 int32_t block_columns)
{
    const int64_t budget = (int64_t)24 << 20, stage = 32;
    int64_t across = ceil_div(columns, block_columns), most = budget / (rows * columns * 4), splits = 1;
    if (most < 1) most = 1;
    while (splits * 2 <= most && ceil_div(tokens, splits) > 2048) splits *= 2;
    while (splits * 2 <= most && across * splits < 256 && ceil_div(tokens, splits) > 256) splits *= 2;
    weft_project_bwd_plan p = {.block_columns = block_columns};
    p.split_tokens = ceil_div(ceil_div(tokens > 0 ? tokens : 1, splits), stage) * stage;
    p.splits = (int32_t)ceil_div(tokens > 0 ? tokens : 1, p.split_tokens);
    p.blocks = across * p.splits;
    return p;
}
