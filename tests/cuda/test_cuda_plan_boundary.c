/* SPDX-License-Identifier: Apache-2.0
 *
 * Which backward of boundary the CUDA backend takes, and how the fused kernel is split into blocks: every token and channel
 * has a block, shared memory and partial sums stay within their limits, the GPU decides nothing. */
#include "cuda/site/bwd_plan.h"
#include "support/suite.h"

static const int64_t tokens[] = {1, 15, 16, 17, 33, 1000, 8192, 16384, 32768, 65537, 1000003, (int64_t)1 << 29};
static const int64_t channels[] = {8, 64, 128, 136, 1024, 2048, 2560, 4096, 5120, 7168, 12288, 16384, 100000};

#define EACH(name, array) for (size_t name = 0; name < sizeof(array) / sizeof *(array); name++)

static boundary_bwd_facts usual(void)
{
    return (boundary_bwd_facts){.tokens = 8192,
                                .streams = 4,
                                .channels = 4096,
                                .is_16_bit = true,
                                .rows_are_wide = true,
                                .gates_on_chip = true,
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
    f[BOUNDARY_BWD_DTYPE].is_16_bit = false;
    f[BOUNDARY_BWD_STREAMS].streams = 8;
    f[BOUNDARY_BWD_CHANNELS].channels = 4100;
    f[BOUNDARY_BWD_LAYOUT].rows_are_wide = false;
    f[BOUNDARY_BWD_GATES].gates_on_chip = false;
    f[BOUNDARY_BWD_SIZE].tokens = (int64_t)1 << 31;
    EACH(i, f)
    {
        assert_int_equal(weft_boundary_bwd_path(&f[i]), i);
        const char *text = weft_boundary_bwd_path_text((boundary_bwd_path)i);
        assert_memory_equal(text,
                            i == BOUNDARY_BWD_FUSED ? "fused: " : "unfused: ", i == BOUNDARY_BWD_FUSED ? 7 : 9);
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

/* Every tile of every slice has one block, which is done with a slice before it goes on; pieces have numbers of their own, those
 * of a slice follow each other. */
static void check_cover(const boundary_bwd_plan *p)
{
    const int64_t all = p->slices * p->tiles;
    unsigned char *seen = calloc((size_t)all, 1), *piece = calloc((size_t)boundary_pieces(p), 1);
    int32_t *of_slice = calloc((size_t)p->slices, sizeof *of_slice);
    assert_true(seen && piece && of_slice);
    for (int64_t b = 0; b < p->blocks; b++) {
        int64_t tiles = 0;
        for (int32_t s = boundary_first_slice(p, b); s <= boundary_last_slice(p, b); s++) {
            const boundary_piece at = boundary_piece_of(p, b, s);
            assert_true(s < p->slices && (at.count > 0 || s == boundary_first_slice(p, b)));
            if (at.count == 0) continue;
            assert_true(at.tile >= 0 && at.tile + at.count <= p->tiles);
            for (int32_t t = at.tile; t < at.tile + at.count; t++) assert_false(seen[s * p->tiles + t]++);
            assert_true(b + s < boundary_pieces(p));
            assert_false(piece[b + s]++);
            assert_true(b + s == boundary_first_piece(p, s) + of_slice[s]++);
            tiles += at.count;
        }
        assert_true(tiles <= p->steps);
    }
    for (int64_t i = 0; i < all; i++) assert_true(seen[i]);
    for (int32_t s = 0; s < p->slices; s++) assert_int_equal(of_slice[s], boundary_pieces_of(p, s));
    free(seen), free(piece), free(of_slice);
}

static void blocks_cover_everything(void **state)
{
    (void)state;
    EACH(t, tokens)
    EACH(c, channels)
    {
        const boundary_bwd_plan p = weft_boundary_bwd_plan(tokens[t], channels[c]);
        assert_true((int64_t)p.slices * BOUNDARY_SLICE >= channels[c]);
        assert_true((int64_t)(p.slices - 1) * BOUNDARY_SLICE < channels[c]);
        assert_true(p.tiles * BOUNDARY_TILE >= tokens[t] && (p.tiles - 1) * BOUNDARY_TILE < tokens[t]);
        assert_true(p.blocks >= 1 && p.blocks <= 132);
        if (p.slices * p.tiles < 4 << 20) check_cover(&p);
    }
    /* every remainder of tiles and blocks */
    for (int64_t t = 1; t <= 150; t++)
        for (int64_t c = 1; c <= 150; c += 7) {
            const boundary_bwd_plan p = weft_boundary_bwd_plan(t * BOUNDARY_TILE, c * BOUNDARY_SLICE);
            check_cover(&p);
        }
}

/* The shapes of public models leave few multiprocessors of a large GPU without a block. */
static void blocks_fill_the_machine(void **state)
{
    (void)state;
    static const int64_t usual_channels[] = {2048, 2560, 4096, 5120, 7168};
    EACH(c, usual_channels)
    {
        const boundary_bwd_plan p = weft_boundary_bwd_plan(8192, usual_channels[c]);
        assert_true(p.blocks > 128);
        assert_true((double)p.steps * 132 < 1.03 * (double)(p.slices * p.tiles));
    }
}

static void shared_memory_is_enough(void **state)
{
    (void)state;
    const boundary_bwd_ring four = weft_boundary_bwd_ring(4, SITE_BOUNDARY),
                            two = weft_boundary_bwd_ring(2, SITE_BOUNDARY);
    assert_int_equal(four.tile_bytes, 40 * 1024);
    assert_int_equal(four.record_bytes, BOUNDARY_TILE * 13 * 16);
    assert_int_equal(two.record_bytes, BOUNDARY_TILE * 5 * 16);
    /* without a post less of a record, in pieces of an odd number */
    assert_int_equal(weft_boundary_bwd_ring(4, SITE_PRE).record_bytes, BOUNDARY_TILE * 9 * 16);
    assert_int_equal(weft_boundary_bwd_ring(2, SITE_PRE).record_bytes, BOUNDARY_TILE * 5 * 16);
    assert_int_equal(weft_boundary_bwd_ring(4, SITE_HEAD).record_bytes, BOUNDARY_TILE * 5 * 16);
    assert_int_equal(weft_boundary_bwd_ring(2, SITE_HEAD).record_bytes, BOUNDARY_TILE * 5 * 16);
    assert_true(four.tile_bytes % 1024 == 0 && two.tile_bytes % 1024 == 0);
    assert_true(four.bytes <= 232448 - 4096 && two.bytes < four.bytes);
    assert_true(four.bytes >= (int64_t)BOUNDARY_STAGES * (four.tile_bytes + four.record_bytes));
    assert_int_equal(weft_boundary_bwd_sums(4, true, false), 20);
    assert_int_equal(weft_boundary_bwd_sums(4, true, true), 24);
    assert_int_equal(weft_boundary_bwd_sums(2, true, false), 8);
    assert_int_equal(weft_boundary_bwd_sums(2, true, true), 8);
    assert_int_equal(weft_boundary_bwd_sums(4, false, true), 4);
    assert_int_equal(weft_boundary_bwd_sums(2, false, true), 4);
    assert_int_equal(weft_boundary_bwd_sums(4, false, false), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_path_has_its_reason),
        cmocka_unit_test(blocks_cover_everything),
        cmocka_unit_test(blocks_fill_the_machine),
        cmocka_unit_test(shared_memory_is_enough),
    };
    return suite_run("cuda_plan_boundary", tests);
}
