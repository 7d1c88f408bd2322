/* SPDX-License-Identifier: Apache-2.0
 *
 * When pre of fp32 streams is one launch on a GPU, and how that is cut. No GPU is needed. */
#include "cuda/mhc/mhc_pre_plan.h"
#include "support/suite.h"

static weft_pre_facts facts(int64_t tokens, int64_t streams, int64_t channels)
{
    return (weft_pre_facts){.tokens = tokens,
                            .streams = streams,
                            .columns = streams * channels,
                            .rows = 2 * streams + streams * streams,
                            .f32 = true,
                            .layout = true,
                            .capability = 90};
}

static weft_pre_path path(int64_t tokens, int64_t streams, int64_t channels)
{
    const weft_pre_facts f = facts(tokens, streams, channels);
    return weft_cuda_pre_plan(&f).path;
}

static void paths(void **state)
{
    (void)state;
    weft_pre_facts f = facts(2, 4, 64);
    assert_int_equal(weft_cuda_pre_plan(&f).path, WEFT_PRE_ONE_LAUNCH);
    f.f32 = false;
    assert_int_equal(weft_cuda_pre_plan(&f).path, WEFT_PRE_DTYPE);
    f = facts(2, 4, 64), f.unmixed = true;
    assert_int_equal(weft_cuda_pre_plan(&f).path, WEFT_PRE_UNMIXED);
    f = facts(2, 4, 64), f.layout = false;
    assert_int_equal(weft_cuda_pre_plan(&f).path, WEFT_PRE_LAYOUT);
    f = facts(2, 4, 64), f.capability = 80;
    assert_int_equal(weft_cuda_pre_plan(&f).path, WEFT_PRE_OTHER_GPU);
    f.capability = 100;
    assert_int_equal(weft_cuda_pre_plan(&f).path, WEFT_PRE_ONE_LAUNCH);
    assert_int_equal(path(0, 4, 64), WEFT_PRE_NO_TOKENS);
    assert_int_equal(path(2, 2, 64), WEFT_PRE_ONE_LAUNCH);
    assert_int_equal(path(2, 8, 64), WEFT_PRE_STREAMS);
    assert_int_equal(path(2, 3, 64), WEFT_PRE_STREAMS);
    for (int k = 0; k < WEFT_PRE_PATHS; k++)
        assert_memory_equal(weft_cuda_pre_path_text((weft_pre_path)k), "unfused: ", 9);
    assert_null(weft_cuda_pre_path_text(WEFT_PRE_PATHS));
}

/* One launch up to some number of tokens, and a chain from there on: the more tokens, the less a launch counts. */
static void few_tokens(void **state)
{
    (void)state;
    static const int64_t channels[] = {4, 64, 512, 1024, 4096, 7168, 16384, 1 << 20};
    for (size_t c = 0; c < sizeof channels / sizeof *channels; c++)
        for (int64_t streams = 2; streams <= 4; streams += 2) {
            bool chain = false;
            for (int64_t tokens = 1; tokens < (int64_t)1 << 40; tokens = tokens * 3 / 2 + 1) {
                const weft_pre_path p = path(tokens, streams, channels[c]);
                assert_true(p == WEFT_PRE_ONE_LAUNCH || p == WEFT_PRE_LONG);
                assert_false(chain && p == WEFT_PRE_ONE_LAUNCH);
                chain = p == WEFT_PRE_LONG;
            }
            assert_true(chain);
        }
}

/* Every token is in one cluster, and every row of the projection in one block of it. */
static void every_token_once(void **state)
{
    (void)state;
    for (int64_t streams = 2; streams <= 4; streams += 2)
        for (int64_t tokens = 1; path(tokens, streams, 64) == WEFT_PRE_ONE_LAUNCH; tokens++) {
            const weft_pre_facts f = facts(tokens, streams, 64);
            const weft_pre_plan p = weft_cuda_pre_plan(&f);
            assert_true((int64_t)p.clusters * PRE_ONE_TOKENS >= tokens);
            assert_true((int64_t)(p.clusters - 1) * PRE_ONE_TOKENS < tokens);
            assert_int_equal(p.cluster, streams == 4 ? 3 : 1);
            assert_true(p.cluster * PRE_ONE_ROWS >= f.rows || p.cluster == PRE_ONE_CLUSTER);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(paths),
        cmocka_unit_test(few_tokens),
        cmocka_unit_test(every_token_once),
    };
    return suite_run("cuda plan of pre", tests);
}
