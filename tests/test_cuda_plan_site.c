/* SPDX-License-Identifier: Apache-2.0
 *
 * Which forward a site takes on a GPU, and how its blocks are dealt out. No GPU is needed. */
#include "cuda/single_pass_plan.h"
#include "support/suite.h"

static const weft_site_device h200 = {SITE_SHARED, 132};

static weft_site_plan plan(int64_t tokens, int64_t streams, int64_t channels)
{
    return weft_cuda_site_plan(tokens, streams, channels, WEFT_BF16, true, h200, 132);
}

static void paths(void **state)
{
    (void)state;
    assert_int_equal(plan(32768, 4, 4096).path, WEFT_SITE_SINGLE_PASS);
    assert_int_equal(plan(1, 2, 8).path, WEFT_SITE_SINGLE_PASS);
    assert_int_equal(plan(0, 4, 4096).path, WEFT_SITE_NO_TOKENS);
    assert_int_equal(plan(16, 8, 4096).path, WEFT_SITE_STREAMS);
    assert_int_equal(plan(16, 4, 4100).path, WEFT_SITE_CHANNELS);
    assert_int_equal(plan(16, 4, 132 * SITE_CHANNELS).path, WEFT_SITE_SINGLE_PASS);
    assert_int_equal(plan(16, 4, 132 * SITE_CHANNELS + 8).path, WEFT_SITE_TOO_WIDE);
    assert_int_equal(weft_cuda_site_plan(16, 4, 4096, WEFT_F32, true, h200, 132).path, WEFT_SITE_DTYPE);
    assert_int_equal(weft_cuda_site_plan(16, 4, 4096, WEFT_BF16, false, h200, 132).path, WEFT_SITE_LAYOUT);
    const weft_site_device small = {164 * 1024, 108};
    assert_int_equal(weft_cuda_site_plan(16, 4, 4096, WEFT_BF16, true, small, 108).path, WEFT_SITE_DEVICE);
    for (int path = 0; path < WEFT_SITE_PATHS; path++) assert_non_null(weft_cuda_site_reason((weft_site_path)path));
    assert_null(weft_cuda_site_reason(WEFT_SITE_PATHS));
}

/* Neither the tokens nor the multiprocessors to use decide a path or a slice: both would decide bits. */
static void nothing_decides_bits(void **state)
{
    (void)state;
    for (int64_t channels = 8; channels <= 20000; channels += 1288) {
        const weft_site_plan want = plan(1, 4, channels);
        for (int64_t tokens = 1; tokens < 100000; tokens = tokens * 3 + 1)
            for (int32_t sms = 1; sms < 1000; sms = sms * 5 + 2) {
                const weft_site_plan got = weft_cuda_site_plan(tokens, 4, channels, WEFT_BF16, true, h200, sms);
                assert_int_equal(got.path, want.path);
                assert_int_equal(got.slices, want.slices);
            }
    }
}

static void blocks_are_resident(void **state)
{
    (void)state;
    for (int64_t channels = 8; channels <= 33792; channels += 1144)
        for (int64_t tokens = 1; tokens < 100000; tokens = tokens * 3 + 1)
            for (int32_t sms = 1; sms < 1000; sms = sms * 5 + 2) {
                const weft_site_plan p = weft_cuda_site_plan(tokens, 4, channels, WEFT_BF16, true, h200, sms);
                assert_true(p.groups >= 1 && p.groups <= p.tiles && p.groups * p.slices <= h200.sms);
                assert_true((p.slices - 1) * (int64_t)SITE_CHANNELS < channels);
                assert_true(p.slices * (int64_t)SITE_CHANNELS >= channels);
                assert_true(p.tiles * SITE_TILE >= tokens && (p.tiles - 1) * SITE_TILE < tokens);
                assert_true(p.ring_floats * 4 + p.counters * 4 < (size_t)32 << 20);
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(paths),
        cmocka_unit_test(nothing_decides_bits),
        cmocka_unit_test(blocks_are_resident),
    };
    return suite_run("cuda_plan_site", tests);
}
