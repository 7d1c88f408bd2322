/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/mhc/mhc_project_plan.h"

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
weft_project_fwd_plan weft_cuda_project_fwd_plan(int64_t tokens, int64_t columns, int32_t row_tiles, bool large,
                                                 int32_t sms)
{
    static const int32_t tiles[] = {256, 192, 128, 32}, splits[] = {1, 4, 16, 64};
    const int64_t most_partial = (int64_t)16 << 20;
    weft_project_fwd_plan best = {0};
    double best_cost = 0;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 4; k++) {
            const bool packed = row_tiles <= 3 && (tiles[i] == 128 || tiles[i] == 192);
            /* not compiled */
            if (tiles[i] == 256 && !large) continue;
            if (tiles[i] == 192 && row_tiles != 3) continue;
            if (tiles[i] == 32 && row_tiles > 3) continue;
            if (splits[k] > 1 && tokens > most_partial / (splits[k] * (row_tiles * 8 + 1) * 4)) continue;
            if (splits[k] > 1 && splits[k] > ceil_div(columns, PROJECT_STAGE)) continue;
            const int64_t blocks = ceil_div(tokens, tiles[i]) * splits[k];
            /* Bytes that a block moves, phi at half the cost since it comes from L2, at a quarter where it need not be
             * split; many small blocks fit a multiprocessor, but they read phi over and over. Getting going, and the
             * sum over splits, cost as well; so does every further round of large tiles, which fills its rings anew, and
             * the launch that packs phi. */
            const int64_t at_once = tiles[i] == 32 ? 6 * (int64_t)sms : sms;
            const double rounds = (double)ceil_div(blocks, at_once);
            const double share =
                tiles[i] == 32 && blocks > sms ? (double)(blocks < at_once ? blocks : at_once) / sms : 1;
            const double phi = row_tiles * 8 * 4 * (packed ? 0.25 : 0.5);
            const double work = (tiles[i] * 2.0 + phi) * (double)columns / splits[k];
            const double again = tiles[i] == 32 ? 0 : (rounds - 1) * 110e3;
            const double sums = (double)(tokens * splits[k]) * (row_tiles * 8 + 1) * 8 / sms + 60e3;
            const double cost =
                rounds * (share * work + 40e3) + again + (splits[k] > 1 ? sums : 0) + (packed ? 66e3 : 0);
            if (best.blocks == 0 || cost < best_cost) {
                best_cost = cost;
                best.tile_tokens = tiles[i];
                best.splits = splits[k];
                best.blocks = blocks;
                best.packed = packed;
            }
        }
    return best;
}

/* Candidates by the number of partial sums, each a copy of phi. The result depends on that number, so it is chosen for a
 * nominal GPU and not for the actual one. */
weft_project_bwd_plan weft_cuda_project_bwd_plan(int64_t tokens, int64_t columns, int64_t rows,
                                                 int32_t block_columns)
{
    const int64_t budget = (int64_t)24 << 20, stage = 32, at_once = 264;
    const int64_t across = ceil_div(columns, block_columns), steps = ceil_div(tokens > 0 ? tokens : 1, stage);
    int64_t most = budget / (rows * columns * 4);
    weft_project_bwd_plan best = {0};
    double best_cost = 0;
    if (most > 64) most = 64;
    for (int64_t splits = 1; splits == 1 || splits <= most; splits++) {
        const int64_t per_split = ceil_div(steps, splits), used = ceil_div(steps, per_split);
        if (used != splits) continue;
        /* In units of a block's step of 32 tokens: about six to begin and end, and the partial sums, written and read,
         * against 2 x 2 bytes for a token and column; the launch that adds them takes as long as eight steps. */
        const double rounds = (double)ceil_div(across * used, at_once);
        const double partial = (double)used * (double)rows * 8 / (4.0 * (double)stage) * (double)across / at_once;
        const double cost = rounds * ((double)per_split + 6) + (used > 1 ? partial + 8 : 0);
        if (best.blocks == 0 || cost < best_cost) {
            best_cost = cost;
            best.splits = (int32_t)used;
            best.split_tokens = per_split * stage;
            best.blocks = across * used;
        }
    }
    best.block_columns = block_columns;
    return best;
}
