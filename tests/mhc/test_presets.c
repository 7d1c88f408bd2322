/* SPDX-License-Identifier: Apache-2.0
 *
 * The presets against the published implementations' constants, written down here a second time. */
#include "support/suite.h"

static const struct {
    weft_mhc_preset preset;
    const char *name;
    weft_mhc_numerics want;
} table[] = {
    /* rms eps and kind, pre eps, post factor, Sinkhorn rule, eps and iterations, index convention, post eps */
    {WEFT_PRESET_TRANSFORMER_ENGINE,
     "transformer_engine",
     {1.1920928955078125e-7, WEFT_EPS_INSIDE, 0.0, 2.0, WEFT_SINKHORN_LOG, 0.0, 20, WEFT_APPLY_IN_OUT, 0, {0}}},
    {WEFT_PRESET_DEEPSEEK_V4,
     "deepseek_v4",
     {1e-6, WEFT_EPS_INSIDE, 1e-6, 2.0, WEFT_SINKHORN_SOFTMAX_EPS, 1e-6, 20, WEFT_APPLY_IN_OUT, 0, {0}}},
    {WEFT_PRESET_DEEPSEEK_V41,
     "deepseek_v41",
     {1e-20, WEFT_EPS_INSIDE, 1e-6, 2.0, WEFT_SINKHORN_SOFTMAX_EPS, 1e-6, 20, WEFT_APPLY_IN_OUT, 0, {0}}},
    {WEFT_PRESET_MEGATRON_MAIN,
     "megatron_main",
     {1e-6, WEFT_EPS_OUTSIDE, 0.0, 2.0, WEFT_SINKHORN_CLAMP, 1e-6, 20, WEFT_APPLY_OUT_IN, 0, {0}}},
    {WEFT_PRESET_MEGATRON_DEV,
     "megatron_dev",
     {1e-6, WEFT_EPS_OUTSIDE, 1e-6, 2.0, WEFT_SINKHORN_SOFTMAX_EPS, 1e-6, 20, WEFT_APPLY_IN_OUT, 0, {0}}},
    {WEFT_PRESET_MEGATRON_DSV4,
     "megatron_dsv4",
     {1e-6, WEFT_EPS_OUTSIDE, 0.0, 2.0, WEFT_SINKHORN_ADD, 1e-6, 20, WEFT_APPLY_OUT_IN, 0, {0}}},
    {WEFT_PRESET_LIGER,
     "liger",
     {1e-6, WEFT_EPS_INSIDE, 0.0, 2.0, WEFT_SINKHORN_SOFTMAX_EPS, 1e-6, 20, WEFT_APPLY_OUT_IN, 0, {0}}},
    {WEFT_PRESET_GLM5_NEXT,
     "glm5_next",
     {1e-5, WEFT_EPS_INSIDE, 1e-6, 2.0, WEFT_SINKHORN_SOFTMAX_EPS, 1e-6, 20, WEFT_APPLY_IN_OUT, 0, {0}}},
    {WEFT_PRESET_HY_V4,
     "hy_v4",
     {1e-5, WEFT_EPS_INSIDE, 1e-6, 2.0, WEFT_SINKHORN_SOFTMAX_EPS, 1e-6, 20, WEFT_APPLY_IN_OUT, 1e-6, {0}}},
};

static void values(void **state)
{
    (void)state;
    assert_int_equal(sizeof table / sizeof *table, WEFT_PRESET_COUNT);
    for (int i = 0; i < WEFT_PRESET_COUNT; i++) {
        weft_mhc_numerics got, want = table[i].want;
        memset(&got, 0xff, sizeof got);
        assert_int_equal(weft_mhc_preset_numerics(table[i].preset, &got), WEFT_OK);
        assert_string_equal(weft_last_error(), "");
        assert_true(got.rms_eps == want.rms_eps);
        assert_int_equal(got.rms_eps_kind, want.rms_eps_kind);
        assert_true(got.pre_eps == want.pre_eps);
        assert_true(got.post_mult == want.post_mult);
        assert_int_equal(got.sinkhorn, want.sinkhorn);
        assert_true(got.sinkhorn == WEFT_SINKHORN_LOG || got.sinkhorn_eps == want.sinkhorn_eps);
        assert_int_equal(got.sinkhorn_iters, want.sinkhorn_iters);
        assert_int_equal(got.apply, want.apply);
        assert_true(got.post_eps == want.post_eps);
    }
}

static void names(void **state)
{
    (void)state;
    for (int i = 0; i < WEFT_PRESET_COUNT; i++) {
        assert_string_equal(weft_mhc_preset_name(table[i].preset), table[i].name);
        assert_int_equal(weft_mhc_preset_find(table[i].name), table[i].preset);
    }
    assert_null(weft_mhc_preset_name(WEFT_PRESET_COUNT));
    assert_null(weft_mhc_preset_name((weft_mhc_preset)-1));
    assert_int_equal(weft_mhc_preset_find("no such preset"), WEFT_PRESET_COUNT);
    assert_int_equal(weft_mhc_preset_find(""), WEFT_PRESET_COUNT);
    assert_int_equal(weft_mhc_preset_find("liger "), WEFT_PRESET_COUNT);
    assert_int_equal(weft_mhc_preset_find(NULL), WEFT_PRESET_COUNT);
}

static void bad_input(void **state)
{
    (void)state;
    weft_mhc_numerics got;
    memset(&got, 0x5a, sizeof got);
    weft_mhc_numerics before = got;
    static const int bad[] = {-1, WEFT_PRESET_COUNT, 1000};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(weft_mhc_preset_numerics((weft_mhc_preset)bad[i], &got), WEFT_ERR_ARGUMENT);
        assert_non_null(strstr(weft_last_error(), "preset"));
        assert_memory_equal(&got, &before, sizeof got);
    }
    assert_int_equal(weft_mhc_preset_numerics(WEFT_PRESET_LIGER, NULL), WEFT_ERR_ARGUMENT);
    assert_non_null(strstr(weft_last_error(), "numerics"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(values), cmocka_unit_test(names),
                                       cmocka_unit_test(bad_input)};
    return suite_run("presets", tests);
}
