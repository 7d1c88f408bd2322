/* SPDX-License-Identifier: Apache-2.0
 *
 * Which backward of boundary the CUDA backend takes, and how its single pass is cut into blocks: every token and channel
 * has a block, shared memory and partial sums stay within their limits, the GPU decides nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "cuda/mhc_boundary_bwd_plan.h"

static const int64_t tokens[] = {1, 15, 16, 17, 33, 1000, 8192, 16384, 32768, 65537, 1000003, (int64_t)1 << 29};
static const int64_t channels[] = {8, 64, 128, 136, 1024, 2048, 2560, 4096, 5120, 7168, 12288, 16384, 100000};

#define EACH(name, array) for (size_t name = 0; name < sizeof(array) / sizeof *(array); name++)

static boundary_bwd_facts usual(void)
{
    return (boundary_bwd_facts){.tokens = 8192,
                                .streams = 4,
                                .channels = 4096,
                                .bf16 = true,
                                .rows_are_wide = true,
                                .capability = 90,
                                .shared = 232448 - 4096};
}

static void every_path_has_its_reason(void **state)
{
    (void)state;
    boundary_bwd_facts f[BOUNDARY_BWD_PATHS];
    EACH(i, f) f[i] = usual();
    f[BOUNDARY_BWD_NO_TOKENS].tokens = 0;
    f[BOUNDARY_BWD_OTHER_GPU].capability = 89;
    f[BOUNDARY_BWD_SMALL_GPU].shared = 101376;
    f[BOUNDARY_BWD_DTYPE].bf16 = false;
    f[BOUNDARY_BWD_STREAMS].streams = 8;
    f[BOUNDARY_BWD_CHANNELS].channels = 4100;
    f[BOUNDARY_BWD_LAYOUT].rows_are_wide = false;
    f[BOUNDARY_BWD_SIZE].tokens = (int64_t)1 << 31;
    EACH(i, f)
    {
        assert_int_equal(weft_boundary_bwd_path(&f[i]), i);
        assert_non_null(weft_boundary_bwd_path_text((boundary_bwd_path)i));
        assert_true(strlen(weft_boundary_bwd_path_text((boundary_bwd_path)i)) > 10);
    }
    assert_null(weft_boundary_bwd_path_text(BOUNDARY_BWD_PATHS));
    assert_null(weft_boundary_bwd_path_text((boundary_bwd_path)-1));
    boundary_bwd_facts two = usual(), newer = usual(), wide = usual();
    two.streams = 2;
    newer.capability = 100;
    wide.channels = (int64_t)1 << 28;
    assert_int_equal(weft_boundary_bwd_path(&two), BOUNDARY_BWD_FUSED);
    assert_int_equal(weft_boundary_bwd_path(&newer), BOUNDARY_BWD_OTHER_GPU);
    assert_int_equal(weft_boundary_bwd_path(&wide), BOUNDARY_BWD_SIZE);
}

static void blocks_cover_everything(void **state)
{
    (void)state;
    EACH(t, tokens)
    EACH(c, channels)
    for (int64_t n = 2; n <= 4; n += 2) {
        const boundary_bwd_plan p = weft_boundary_bwd_plan(tokens[t], n, channels[c]);
        assert_true((int64_t)p.slices * BOUNDARY_SLICE >= channels[c]);
        assert_true((int64_t)(p.slices - 1) * BOUNDARY_SLICE < channels[c]);
        assert_true(p.tiles * BOUNDARY_TILE >= tokens[t] && (p.tiles - 1) * BOUNDARY_TILE < tokens[t]);
        /* no range of tokens is empty */
        assert_true(p.splits * p.split_tiles >= p.tiles && (p.splits - 1) * p.split_tiles < p.tiles);
        assert_int_equal(p.blocks, (int64_t)p.slices * p.splits);
        /* partial sums of d_phi */
        assert_true(p.splits == 1 || p.splits * (2 * n + n * n) * n * channels[c] * 4 <= (int64_t)24 << 20);
    }
}

/* The shapes of public models leave few multiprocessors of a large GPU without a block, and none for long. */
static void blocks_fill_the_machine(void **state)
{
    (void)state;
    static const int64_t usual_channels[] = {2048, 2560, 4096, 5120, 7168};
    EACH(c, usual_channels)
    {
        const boundary_bwd_plan p = weft_boundary_bwd_plan(32768, 4, usual_channels[c]);
        const int64_t rounds = (p.blocks + 131) / 132;
        assert_true(p.blocks * 10 >= rounds * 132 * 9);
        assert_true(p.split_tiles >= 100);
    }
}

static void shared_memory_is_enough(void **state)
{
    (void)state;
    const boundary_bwd_ring four = weft_boundary_bwd_ring(4), two = weft_boundary_bwd_ring(2);
    assert_int_equal(four.tile_bytes, 40 * 1024);
    assert_int_equal(four.record_bytes, BOUNDARY_TILE * 13 * 16);
    assert_int_equal(two.record_bytes, BOUNDARY_TILE * 5 * 16);
    assert_true(four.tile_bytes % 1024 == 0 && two.tile_bytes % 1024 == 0);
    assert_true(four.bytes <= 232448 - 4096 && two.bytes < four.bytes);
    assert_true(four.bytes >= (int64_t)BOUNDARY_STAGES * (four.tile_bytes + four.record_bytes));
    assert_int_equal(weft_boundary_bwd_sums(4, false), 20);
    assert_int_equal(weft_boundary_bwd_sums(4, true), 24);
    assert_int_equal(weft_boundary_bwd_sums(2, false), 8);
    assert_int_equal(weft_boundary_bwd_sums(2, true), 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_path_has_its_reason),
        cmocka_unit_test(blocks_cover_everything),
        cmocka_unit_test(blocks_fill_the_machine),
        cmocka_unit_test(shared_memory_is_enough),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
