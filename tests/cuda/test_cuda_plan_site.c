/* SPDX-License-Identifier: Apache-2.0
 *
 * Which forward a site takes on a GPU, and how its blocks are dealt out. No GPU is needed. */
#include "cuda/site/fwd_plan.h"
#include "support/suite.h"

/* What an H200 says: in clusters of sixteen only 112 of its 132 multiprocessors find a place. */
static weft_site_facts h200(int64_t tokens, int64_t streams, int64_t channels)
{
    return (weft_site_facts){.tokens = tokens,
                             .streams = streams,
                             .channels = channels,
                             .rows = 2 * streams + streams * streams,
                             .half = true,
                             .layout = true,
                             .capability = 90,
                             .shared = 227 * 1024,
                             .resident = {132, 66, 30, 15, 7},
                             .sms = 132};
}

static weft_site_plan plan(int64_t tokens, int64_t streams, int64_t channels)
{
    const weft_site_facts f = h200(tokens, streams, channels);
    return weft_cuda_site_plan(&f);
}

static void paths(void **state)
{
    (void)state;
    weft_site_facts f = h200(16, 4, 4096);
    assert_int_equal(plan(32768, 4, 4096).path, WEFT_SITE_FUSED);
    assert_int_equal(plan(1, 2, 8).path, WEFT_SITE_FUSED);
    assert_int_equal(plan(0, 4, 4096).path, WEFT_SITE_NO_TOKENS);
    assert_int_equal(plan(16, 8, 4096).path, WEFT_SITE_STREAMS);
    assert_int_equal(plan(16, 4, 4100).path, WEFT_SITE_CHANNELS);
    assert_int_equal(plan(16, 4, 7168).path, WEFT_SITE_FUSED);
    assert_int_equal(plan(16, 4, 7176).path, WEFT_SITE_TOO_WIDE);
    assert_int_equal(plan(16, 2, 14336).path, WEFT_SITE_FUSED);
    assert_int_equal(plan(16, 2, 14344).path, WEFT_SITE_TOO_WIDE);
    assert_int_equal(plan((int64_t)1 << 31, 4, 64).path, WEFT_SITE_SIZE);
    f.half = false;
    assert_int_equal(weft_cuda_site_plan(&f).path, WEFT_SITE_DTYPE);
    f = h200(16, 4, 4096), f.layout = false;
    assert_int_equal(weft_cuda_site_plan(&f).path, WEFT_SITE_LAYOUT);
    f = h200(16, 4, 4096), f.shared = 163 * 1024;
    assert_int_equal(weft_cuda_site_plan(&f).path, WEFT_SITE_FUSED);
    f.shared = 99 * 1024;
    assert_int_equal(weft_cuda_site_plan(&f).path, WEFT_SITE_SMALL_GPU);
    f = h200(16, 4, 4096), f.capability = 80;
    assert_int_equal(weft_cuda_site_plan(&f).path, WEFT_SITE_OTHER_GPU);
    f.capability = 100;
    assert_int_equal(weft_cuda_site_plan(&f).path, WEFT_SITE_OTHER_GPU);
    f = h200(16, 4, 4096), f.resident[4] = 0;
    assert_int_equal(weft_cuda_site_plan(&f).path, WEFT_SITE_OTHER_GPU);
    f.channels = 2048;
    assert_int_equal(weft_cuda_site_plan(&f).path, WEFT_SITE_FUSED);
    for (int path = 0; path < WEFT_SITE_PATHS; path++)
        assert_memory_equal(weft_cuda_site_path_text((weft_site_path)path),
                            path == WEFT_SITE_FUSED ? "fused: " : "unfused: ", path == WEFT_SITE_FUSED ? 7 : 9);
    assert_null(weft_cuda_site_path_text(WEFT_SITE_PATHS));
}

/* Neither the tokens nor the multiprocessors to use decide a path or a cluster, nor who makes the streams: all would
 * decide bits. */
static void nothing_decides_bits(void **state)
{
    (void)state;
    for (int64_t channels = 8; channels <= 8000; channels += 568) {
        const weft_site_plan want = plan(1, 4, channels);
        for (int64_t tokens = 1; tokens < 100000; tokens = tokens * 3 + 1)
            for (int32_t sms = 1; sms < 1000; sms = sms * 5 + 2)
                for (int post = 0; post < 2; post++) {
                    weft_site_facts f = h200(tokens, 4, channels);
                    f.sms = sms, f.post = post;
                    const weft_site_plan got = weft_cuda_site_plan(&f);
                    assert_int_equal(got.path, want.path);
                    assert_int_equal(got.cluster, want.cluster);
                    assert_int_equal(got.boxes, want.boxes);
                    assert_int_equal(got.mma_warps, want.mma_warps);
                }
    }
}

static void one_plan(const weft_site_facts *f)
{
    const weft_site_plan p = weft_cuda_site_plan(f);
    const weft_site_room *r = &p.room;
    const int64_t columns = (int64_t)p.cluster * p.boxes * SITE_BOX;
    assert_int_equal(p.path, WEFT_SITE_FUSED);
    assert_int_equal(1 << p.cluster_log, p.cluster);
    const bool wide = p.pairs == SITE_WIDE_PAIRS, apart = wide && f->post;
    assert_true(columns >= f->channels && (wide || p.pairs <= SITE_MANY_PAIRS));
    assert_int_equal(p.mma_warps, wide ? SITE_WIDE_MMA_WARPS : SITE_MMA_WARPS);
    assert_int_equal(p.pairs * p.mma_warps * 2 * 16, p.boxes * SITE_BOX * f->streams); /* all columns, each once */
    if (f->streams != 4) assert_false(wide);                                           /* there is no such kernel */
    assert_true(p.tiles * (int64_t)SITE_TILE >= f->tokens && (p.tiles - 1) * (int64_t)SITE_TILE < f->tokens);
    assert_true(p.clusters >= 1 && p.clusters <= p.tiles && p.clusters <= f->resident[p.cluster_log]);
    assert_true(p.stages >= 3); /* one comes, one is mixed, one waits for its coefficients */
    /* a slot is used again by a tile that the block could not have begun before (site/fwd.cuh) */
    assert_true((int64_t)p.slots * p.cluster >= (int64_t)p.stages * SITE_TILE);
    /* a token's squares, one for each box of all blocks, come to where its sums were */
    assert_true(p.boxes <= SITE_ROW);
    const int64_t stream = p.boxes * SITE_TILE * SITE_BOX * 2;
    assert_int_equal(r->stage, (f->streams + (f->post && !apart)) * stream);
    assert_int_equal(r->tiles - r->f, apart ? stream : 0);
    assert_true(r->f == 0 && r->tiles % 1024 == 0 && r->stage % 1024 == 0);
    assert_int_equal(r->psi, r->tiles + p.stages * r->stage);
    if (wide) assert_true(p.stages >= 5); /* what it is for */
    /* psi comes to where no tile is yet, and ends where the tiles end, or, all at once, where its operands will */
    const int32_t end = p.pairs <= SITE_ONCE_PAIRS ? r->coef : r->psi;
    if (p.pairs <= SITE_ONCE_PAIRS) assert_int_equal(p.psi_boxes, p.boxes); /* kernels count on it */
    assert_true(p.psi_boxes >= 1 && p.psi_boxes <= p.boxes && r->first_psi % 1024 == 0);
    assert_true(p.early >= 1 && r->tiles + p.early * r->stage <= r->first_psi);
    assert_true(r->first_psi + p.psi_boxes * 2 * f->rows * f->streams * 128 <= end);
    const int32_t at[] = {r->psi,     r->coef,  r->pre,    r->sums,     r->received,
                          r->inverse, r->aside, r->logits, r->barriers, r->bytes};
    for (size_t i = 1; i < sizeof at / sizeof *at; i++) assert_true(at[i] % 16 == 0 && at[i] >= at[i - 1]);
    assert_true(r->bytes <= f->shared);
    /* gain and bias of the block's channels, or no room for them */
    const int64_t weights = (f->post ? 2 : 1) * p.boxes * SITE_BOX * 4;
    if (r->weights)
        assert_true(r->weights % 16 == 0 && r->weights > r->barriers && r->weights + weights <= r->bytes);
    else
        assert_true(r->bytes + weights > f->shared);
}

static void plans_fit(void **state)
{
    (void)state;
    for (int64_t streams = 2; streams <= 4; streams += 2)
        for (int64_t channels = 8; channels <= 28672 / streams; channels += 8)
            for (int64_t tokens = 1; tokens < 100000; tokens = tokens * 7 + 1)
                for (int kind = 0; kind < 3; kind++) { /* head, pre, boundary */
                    weft_site_facts f = h200(tokens, streams, channels);
                    f.post = kind == 2;
                    if (kind == 0) f.rows = streams;
                    one_plan(&f);
                }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(paths),
        cmocka_unit_test(nothing_decides_bits),
        cmocka_unit_test(plans_fit),
    };
    return suite_run("cuda_plan_site", tests);
}
