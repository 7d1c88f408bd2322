/* SPDX-License-Identifier: Apache-2.0
 *
 * The plan of the projection on the GPU: every column is in one leaf and every token in one range of tokens, partial sums
 * stay within their bounds, and what decides the order of a sum does not know the GPU. Runs without one. */
#include "cuda/mhc/mhc_project_plan.h"
#include "support/suite.h"

static const int64_t token_counts[] = {
    0,     1,     2,     31,     32,     33,      127,       128,          129,
    255,   256,   257,   997,    1024,   4096,    4097,      8191,         16384,
    32768, 32769, 65536, 131072, 999983, 1 << 20, 999999937, 999999999989, (int64_t)1 << 40};
/* Streams times channels. */
static const int64_t column_counts[] = {1,    8,     64,    72,    512,   1024,  4032,  4096,   4104,   8192,
                                        9992, 10240, 16384, 20480, 28672, 32768, 49152, 131072, 1 << 20};
static const int64_t row_counts[] = {1, 2, 4, 8, 9, 15, 24, 25, 48, 80, 81, 168, 1088, 4096};
static const int32_t tile_counts[] = {1, 3, 10};
static const int32_t sm_counts[] = {1, 7, 108, 132, 148, 1000, 4096};

enum { TILE_ROWS = 8 }; /* rows of phi in a tensor-core tile */

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))
#define FOR(var, list) for (int var = 0; var < COUNT(list); var++)

static int64_t up(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

/* ---- leaves ----------------------------------------------------------------------------------------------------------- */

/* From 0 to all stages, each leaf beginning where the one before ends; none longer than its share. */
static void leaves_cover_once(void **state)
{
    (void)state;
    for (int64_t stages = 0; stages <= 5000; stages++) {
        int64_t covered = 0;
        assert_true(weft_project_leaf(stages, 0) == 0);
        for (int64_t leaf = 0; leaf < PROJECT_LEAVES; leaf++) {
            const int64_t first = weft_project_leaf(stages, leaf), end = weft_project_leaf(stages, leaf + 1);
            assert_true(first == covered && end >= first);
            assert_true(end - first <= up(stages, PROJECT_LEAVES));
            assert_true(end - first >= stages / PROJECT_LEAVES); /* empty only where there are fewer stages */
            covered = end;
        }
        assert_true(covered == stages);
    }
}

/* ---- rows ------------------------------------------------------------------------------------------------------------- */

/* The fewest tiles of those that are compiled, and none where they do not suffice. */
static void row_tiles(void **state)
{
    (void)state;
    for (int64_t rows = 1; rows <= 4096; rows++) {
        const int32_t tiles = weft_cuda_project_row_tiles(rows);
        int32_t want = 0;
        for (int i = COUNT(tile_counts) - 1; i >= 0; i--)
            if (rows <= (int64_t)tile_counts[i] * TILE_ROWS) want = tile_counts[i];
        assert_int_equal(tiles, want);
    }
    assert_int_equal(weft_cuda_project_row_tiles(24), 3);  /* four streams: 2n + n*n */
    assert_int_equal(weft_cuda_project_row_tiles(4), 1);   /* their learned head */
    assert_int_equal(weft_cuda_project_row_tiles(80), 10); /* eight streams */
    assert_int_equal(weft_cuda_project_row_tiles(81), 0);
}

/* ---- forward ---------------------------------------------------------------------------------------------------------- */

static void check_fwd(int64_t tokens, int64_t columns, int32_t tiles, bool large, int32_t sms)
{
    const weft_project_fwd_plan p = weft_cuda_project_fwd_plan(tokens, columns, tiles, large, sms);
    const int64_t stages = up(columns, PROJECT_STAGE);
    assert_true(p.tile_tokens == 32 || p.tile_tokens == 128 || p.tile_tokens == 192 || p.tile_tokens == 256);
    assert_true(p.splits == 1 || p.splits == 4 || p.splits == 16 || p.splits == 64);
    assert_true(p.tile_tokens != 256 || large);
    assert_true(p.tile_tokens != 192 || tiles == 3);
    assert_true(p.packed == (tiles <= 3 && (p.tile_tokens == 128 || p.tile_tokens == 192)));
    assert_true(p.tile_tokens != 32 || tiles <= 3);
    assert_true(p.blocks == up(tokens, p.tile_tokens) * p.splits);
    int64_t leaves = PROJECT_LEAVES / p.splits; /* of a split, which hands on a whole subtree */
    assert_true(leaves * p.splits == PROJECT_LEAVES);
    while (leaves % PROJECT_FAN == 0) leaves /= PROJECT_FAN;
    assert_true(leaves == 1);
    if (p.splits == 1) return;
    assert_true(p.splits * tokens * (tiles * TILE_ROWS + 1) * 4 <= (int64_t)16 << 20);
    for (int64_t s = 0; s < p.splits; s++) { /* each has columns */
        const int64_t from = PROJECT_LEAVES / p.splits * s, to = PROJECT_LEAVES / p.splits * (s + 1);
        assert_true(weft_project_leaf(stages, from) < weft_project_leaf(stages, to));
    }
}

static void fwd_limits(void **state)
{
    (void)state;
    FOR(t, token_counts) FOR(c, column_counts) FOR(r, tile_counts) FOR(s, sm_counts)
    {
        check_fwd(token_counts[t], column_counts[c], tile_counts[r], false, sm_counts[s]);
        if (tile_counts[r] <= 3) check_fwd(token_counts[t], column_counts[c], tile_counts[r], true, sm_counts[s]);
    }
}

/* The most tokens whose partial sums fit, and one more, on a machine that would rather split. */
static void fwd_bound_of_partial_sums(void **state)
{
    (void)state;
    FOR(r, tile_counts)
    for (int32_t splits = 4; splits <= 64; splits *= 4) {
        const int64_t bytes = splits * (tile_counts[r] * TILE_ROWS + 1) * 4;
        const int64_t fit = ((int64_t)16 << 20) / bytes;
        for (int64_t tokens = fit - 1; tokens <= fit + 2; tokens++)
            check_fwd(tokens, 1 << 20, tile_counts[r], false, 4096);
        assert_true(weft_cuda_project_fwd_plan(fit / 2, 1 << 20, tile_counts[r], false, 4096).splits >= splits);
    }
}

/* A machine that is large enough is filled, and more of it never makes fewer blocks. */
static void fwd_fills_the_machine(void **state)
{
    (void)state;
    FOR(c, column_counts) FOR(r, tile_counts) for (int64_t tokens = 1; tokens <= 1024; tokens *= 4)
    {
        const int64_t columns = column_counts[c];
        const bool large = tile_counts[r] <= 3;
        if (columns < 4096) continue;
        const int64_t one = weft_cuda_project_fwd_plan(tokens, columns, tile_counts[r], large, 1).blocks;
        const int64_t many = weft_cuda_project_fwd_plan(tokens, columns, tile_counts[r], large, 132).blocks;
        assert_true(many >= one);
    }
    /* So few columns are read sooner than their partial sums. */
    assert_int_equal(weft_cuda_project_fwd_plan(1, 512, 3, true, 132).splits, 1);
    for (int64_t columns = 16384; columns <= 65536; columns += 4096) {
        /* One token is spread over many blocks, and so are the usual numbers of a decoding step. */
        assert_true(weft_cuda_project_fwd_plan(1, columns, 3, true, 132).blocks >= 16);
        assert_true(weft_cuda_project_fwd_plan(1, columns, 10, false, 132).blocks >= 16);
        assert_true(weft_cuda_project_fwd_plan(128, columns, 3, true, 132).blocks >= 64);
        /* A long batch has enough tokens: splitting columns would only cost partial sums. */
        const weft_project_fwd_plan p = weft_cuda_project_fwd_plan(32768, columns, 3, true, 132);
        assert_true(p.splits == 1 && p.tile_tokens == 256 && p.blocks == 128);
        assert_int_equal(weft_cuda_project_fwd_plan(32768, columns, 3, false, 132).splits, 1);
        assert_int_equal(weft_cuda_project_fwd_plan(1 << 20, columns, 3, true, 132).splits, 1);
    }
}

/* ---- backward --------------------------------------------------------------------------------------------------------- */

static void bwd_limits(void **state)
{
    (void)state;
    FOR(t, token_counts) FOR(c, column_counts) FOR(r, row_counts)
    {
        const int64_t tokens = token_counts[t], columns = column_counts[c], rows = row_counts[r];
        const int32_t wide = weft_cuda_project_row_tiles(rows) == 10 ? 128 : 256;
        const weft_project_bwd_plan p = weft_cuda_project_bwd_plan(tokens, columns, rows, wide);
        assert_int_equal(p.block_columns, wide);
        assert_true(p.splits >= 1 && p.split_tokens >= 32 && p.split_tokens % 32 == 0);
        assert_true(p.splits * p.split_tokens >= tokens);
        assert_true((p.splits - 1) * p.split_tokens < tokens || p.splits == 1); /* none is empty */
        assert_true(p.blocks == up(columns, wide) * p.splits);
        assert_true(p.splits == 1 || p.splits * rows * columns * 4 <= (int64_t)24 << 20);
        assert_true(p.splits <= 64);
    }
}

/* Few tokens are summed at once; many columns need no ranges of tokens, few columns do. */
static void bwd_choices(void **state)
{
    (void)state;
    for (int64_t tokens = 0; tokens <= 64; tokens++) {
        const weft_project_bwd_plan p = weft_cuda_project_bwd_plan(tokens, 16384, 24, 256);
        assert_true(p.splits == 1 && p.split_tokens == (tokens <= 32 ? 32 : 64) && p.blocks == 64);
    }
    for (int64_t columns = 4096; columns <= 65536; columns += 4096) {
        const weft_project_bwd_plan p = weft_cuda_project_bwd_plan(32768, columns, 24, 256);
        assert_true(p.blocks >= 132 && p.blocks % (columns / 256) == 0);
    }
    assert_int_equal(weft_cuda_project_bwd_plan(32768, 256 * 264, 24, 256).splits, 1);
    /* Copies of this phi are larger than all the room for partial sums. */
    assert_int_equal(weft_cuda_project_bwd_plan(32768, 16384, 4096, 256).splits, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(leaves_cover_once),
        cmocka_unit_test(row_tiles),
        cmocka_unit_test(fwd_limits),
        cmocka_unit_test(fwd_bound_of_partial_sums),
        cmocka_unit_test(fwd_fills_the_machine),
        cmocka_unit_test(bwd_limits),
        cmocka_unit_test(bwd_choices),
    };
    return suite_run("cuda_plan_project", tests);
}
