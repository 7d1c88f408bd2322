/* SPDX-License-Identifier: Apache-2.0
 *
 * Launch shapes of the row kernels: every channel of every token is somebody's, once; limits of the hardware; what
 * decides the order of a sum depends on the shape alone. Runs without a GPU. */
#include "cuda/common/rows_plan.h"
#include "support/suite.h"

static const int64_t channel_counts[] = {1,    2,    7,    8,     31,    32,    37,    64,   100,
                                         127,  512,  513,  1024,  1032,  2048,  2560,  4096, 5120,
                                         6656, 7168, 8192, 12288, 16384, 16392, 65536, 99991};
static const int64_t widths[] = {1, 2, 4, 8};
static const int64_t tile_counts[] = {1, 2, 4, 8};
static const int64_t token_counts[] = {1, 2, 3, 127, 128, 8192, 65537, 1000003, (int64_t)1 << 40};
static const int32_t sm_counts[] = {1, 7, 108, 132, 1000};

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))
#define FOR(var, list) for (int var = 0; var < COUNT(list); var++)

static void check_team(const weft_rows_team *t, int32_t block)
{
    assert_true(block >= 32 && block <= 1024 && block % 32 == 0);
    if (t->lanes > 32) {
        assert_int_equal(t->lanes, block);
        assert_int_equal(t->per_block, 1);
    } else {
        assert_int_equal(t->lanes, 1 << t->bits);
        assert_int_equal(t->per_block * t->lanes, block);
    }
}

/* Marks the channels of the tiles that a team's lanes hold from tile `from` on. */
static void mark(unsigned char *seen, int64_t channels, int64_t width, int64_t tiles, int64_t from, int32_t lanes)
{
    for (int64_t lane = 0; lane < lanes; lane++)
        for (int64_t j = 0; j < tiles; j++)
            for (int64_t k = 0; k < width; k++) {
                int64_t c = (from + j * lanes + lane) * width + k;
                if (c < channels) seen[c]++;
            }
}

static void expect_once(const unsigned char *seen, int64_t channels)
{
    for (int64_t c = 0; c < channels; c++) assert_int_equal(seen[c], 1);
}

static void flat_covers_once(void **state)
{
    (void)state;
    FOR(c, channel_counts) FOR(w, widths) FOR(k, tile_counts)
    {
        int64_t channels = channel_counts[c], width = widths[w], tiles = tile_counts[k];
        weft_rows_flat p = weft_rows_plan_flat(3, channels, width, tiles, 132);
        unsigned char *seen = calloc((size_t)channels, 1);
        assert_non_null(seen);
        for (int64_t s = 0; s < p.segments; s++)
            mark(seen, channels, width, tiles, s * p.team.lanes * tiles, p.team.lanes);
        expect_once(seen, channels);
        /* no segment is empty */
        assert_true((p.segments - 1) * p.team.lanes * tiles * width < channels);
        free(seen);
    }
}

static void flat_limits(void **state)
{
    (void)state;
    FOR(t, token_counts) FOR(c, channel_counts) FOR(w, widths) FOR(k, tile_counts) FOR(s, sm_counts)
    {
        int64_t tokens = token_counts[t], channels = channel_counts[c];
        weft_rows_flat p = weft_rows_plan_flat(tokens, channels, widths[w], tile_counts[k], sm_counts[s]);
        check_team(&p.team, p.block);
        assert_true(p.block <= 256 && p.team.lanes <= 32);
        assert_true(p.grid >= 1 && p.grid <= WEFT_ROWS_MAX_GRID);
        int64_t teams = tokens * p.segments;
        if (p.grid < WEFT_ROWS_MAX_GRID) assert_true(p.grid * p.team.per_block >= teams);
        assert_true((p.grid - 1) * p.team.per_block < teams); /* no block without work */
        /* the machine decides the block and the grid, not who holds which channels */
        weft_rows_flat q = weft_rows_plan_flat(tokens, channels, widths[w], tile_counts[k], 1);
        assert_int_equal(p.team.lanes, q.team.lanes);
        assert_true(p.segments == q.segments);
    }
}

/* 1 token of 4096 channels, 16-bit, 4 streams, is spread over several multiprocessors; 128 tokens over all. */
static void flat_spreads_few_tokens(void **state)
{
    (void)state;
    assert_true(weft_rows_plan_flat(1, 4096, 8, 2, 132).grid >= 4);
    assert_true(weft_rows_plan_flat(128, 4096, 8, 2, 132).grid >= 132);
    assert_true(weft_rows_plan_flat(128, 4096, 2, 8, 132).grid >= 132);
    assert_int_equal(weft_rows_plan_flat(32768, 4096, 8, 2, 132).block, 256);
}

static void sum_covers_once(void **state)
{
    (void)state;
    FOR(c, channel_counts) FOR(w, widths) FOR(k, tile_counts)
    {
        int64_t channels = channel_counts[c], width = widths[w], tiles = tile_counts[k];
        weft_rows_sum p = weft_rows_plan_sum(3, channels, width, tiles, 256);
        unsigned char *seen = calloc((size_t)channels, 1);
        assert_non_null(seen);
        for (int64_t s = 0; s < p.steps; s++)
            mark(seen, channels, width, tiles, s * p.team.lanes * tiles, p.team.lanes);
        expect_once(seen, channels);
        free(seen);
    }
}

static void sum_depends_on_the_row_alone(void **state)
{
    (void)state;
    static const int32_t most[] = {256, 512};
    FOR(t, token_counts) FOR(c, channel_counts) FOR(w, widths) FOR(k, tile_counts) FOR(m, most)
    {
        int64_t channels = channel_counts[c], tokens = token_counts[t];
        weft_rows_sum p = weft_rows_plan_sum(tokens, channels, widths[w], tile_counts[k], most[m]);
        weft_rows_sum one = weft_rows_plan_sum(1, channels, widths[w], tile_counts[k], most[m]);
        check_team(&p.team, p.block);
        assert_true(p.block <= most[m]);
        assert_memory_equal(&p.team, &one.team, sizeof p.team);
        assert_int_equal(p.block, one.block);
        assert_true(p.steps == one.steps);
        assert_true(p.grid >= 1 && p.grid <= WEFT_ROWS_MAX_GRID);
        if (p.grid < WEFT_ROWS_MAX_GRID) assert_true(p.grid * p.team.per_block >= tokens);
        assert_true((p.grid - 1) * p.team.per_block < tokens);
        /* a row that one pass can hold takes one pass: kernels that keep rows in registers rely on it */
        if (channels <= most[m] * tile_counts[k] * widths[w]) assert_true(p.steps == 1);
    }
}

static void small_rows_share_a_block(void **state)
{
    (void)state;
    assert_true(weft_rows_plan_sum(8192, 32, 8, 2, 256).team.per_block >= 16);
    assert_true(weft_rows_plan_sum(8192, 512, 8, 2, 256).team.per_block >= 4);
    assert_true(weft_rows_plan_flat(8192, 32, 8, 2, 132).team.per_block >= 16);
}

static void chunks_partition_the_tokens(void **state)
{
    (void)state;
    static const int64_t more_channels[] = {1, 37, 512, 4096, 16384, 1 << 22, (1 << 22) + 1, (int64_t)1 << 31};
    FOR(t, token_counts) FOR(c, more_channels)
    {
        int64_t tokens = token_counts[t], channels = more_channels[c];
        weft_rows_chunks p = weft_rows_plan_chunks(tokens, channels);
        assert_true(p.chunks >= 1 && p.tokens >= 1);
        assert_true(p.chunks * p.tokens >= tokens);
        assert_true((p.chunks - 1) * p.tokens < tokens);
        assert_true(p.chunks == 1 || p.chunks * channels <= WEFT_ROWS_PARTIAL_FLOATS);
        assert_true(p.chunks <= 1024);
        static const int64_t units[] = {1, 16, 256};
        FOR(u, units)
        {
            weft_rows_chunks q = weft_rows_plan_pieces(tokens, channels, 1188, units[u]);
            assert_true(q.tokens % units[u] == 0 && q.chunks * q.tokens >= tokens);
            assert_true((q.chunks - 1) * q.tokens < tokens && q.chunks <= 1188);
            assert_true(q.chunks == 1 || q.chunks * channels <= WEFT_ROWS_PARTIAL_FLOATS);
        }
    }
}

static void no_tokens(void **state)
{
    (void)state;
    assert_true(weft_rows_plan_flat(0, 4096, 8, 2, 132).grid == 0);
    assert_true(weft_rows_plan_sum(0, 4096, 8, 2, 256).grid == 0);
    weft_rows_chunks p = weft_rows_plan_chunks(0, 4096);
    assert_true(p.chunks == 0 && p.tokens == 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(flat_covers_once),
        cmocka_unit_test(flat_limits),
        cmocka_unit_test(flat_spreads_few_tokens),
        cmocka_unit_test(sum_covers_once),
        cmocka_unit_test(sum_depends_on_the_row_alone),
        cmocka_unit_test(small_rows_share_a_block),
        cmocka_unit_test(chunks_partition_the_tokens),
        cmocka_unit_test(no_tokens),
    };
    return suite_run("cuda_plan_rows", tests);
}
