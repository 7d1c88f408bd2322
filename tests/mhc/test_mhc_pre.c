/* SPDX-License-Identifier: Apache-2.0
 *
 * Everything in front of a sub-layer in one call [M10]. */
#include <string.h>

#include "support/fused_site.h"
#include "support/suite.h"

static void reference_against_finite_differences(void **state)
{
    (void)state;
    fd_suite("mhc_pre");
}

static void forward_against_the_chain(void **state)
{
    (void)state;
    grid_suite("mhc_pre_fwd");
}

static void backward_against_the_chain(void **state)
{
    (void)state;
    grid_suite("mhc_pre_bwd");
}

static void reference_against_its_chain(void **state)
{
    (void)state;
    grid_chain_on_ref("mhc_pre_fwd");
}

static void forward_rounds_once(void **state)
{
    (void)state;
    grid_rounding("mhc_pre_fwd");
}

static void backward_rounds_once(void **state)
{
    (void)state;
    grid_rounding("mhc_pre_bwd");
}

/* ---- the fused backward on CUDA -------------------------------------------------------------------------- */

static const char *const absent[] = {" d_v pre_in ",
                                     " d_v ",
                                     " d_v d_u ",
                                     " d_v d_u pre_in ",
                                     " d_u ",
                                     " d_u pre_in ",
                                     " ",
                                     " pre_in ",
                                     " d_x d_sub_weight ",
                                     " d_phi d_alpha d_pre ",
                                     " d_v pre_in d_x d_norm_weight "};
static const fused_site single = {"mhc_pre_bwd", absent, sizeof absent / sizeof *absent, true};

/* ---- CUDA's forward of fp32 streams in one launch ---------------------------------------------------------------- */

static void expect_one_launch(const spec *s)
{
    problem *p = problem_make(s);
    const weft_exec exec = on_cuda(0);
    const char *path = NULL;
    if (weft_op_path(p->op, &exec, p->args, &path) != WEFT_OK) fail_msg("%s", weft_last_error());
    if (!strstr(path, "one launch") && !strstr(path, "this GPU")) test_failed("%s: %s", problem_text(p), path);
    problem_free(p);
}

/* Bits of the single operators (grid_compare) for whole and broken tiles of tokens, rows that end within a round of the block,
 * coefficients of any dtype, and everything that may be absent. */
static void one_launch_against_the_chain(void **state)
{
    (void)state;
    static const int64_t shapes[][3] = {{1, 4, 4},   {8, 4, 64},  {9, 4, 68},   {2, 4, 128}, {17, 4, 1028},
                                        {5, 2, 256}, {33, 2, 60}, {16, 4, 512}, {7, 2, 2052}};
    static const char *const gone[] = {" pre_in v sub_weight ",
                                       " pre_in v sub_weight norm_weight ",
                                       " pre_in v sub_weight h ms ",
                                       " v sub_weight ",
                                       " pre_in u ",
                                       " pre_in ",
                                       " pre_in v sub_weight pre post res ",
                                       " pre_in u v sub_weight "};
    static const weft_dtype coefs[] = {WEFT_F32, WEFT_BF16, WEFT_F16};
    enum { SHAPES = sizeof shapes / sizeof *shapes, GONE = sizeof gone / sizeof *gone };
    for (int k = 0; k < SHAPES * GONE; k++) {
        spec s = {.op = "mhc_pre_fwd",
                  .tokens = shapes[k % SHAPES][0],
                  .streams = shapes[k % SHAPES][1],
                  .channels = shapes[k % SHAPES][2],
                  .act = WEFT_F32,
                  .wide = WEFT_F32,
                  .coef = coefs[k % 3],
                  .absent = gone[k % GONE],
                  .pad = k % 5 == 4 ? 8 : 0,
                  .seed = (uint64_t)k};
        if ((test_quick() || !test_on_cuda()) && k % 5) continue;
        weft_mhc_preset_numerics((weft_mhc_preset)(k % WEFT_PRESET_COUNT), &s.numerics);
        if (test_on_cuda()) expect_one_launch(&s);
        grid_compare(&s);
    }
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reference_against_finite_differences),
        cmocka_unit_test(forward_against_the_chain),
        cmocka_unit_test(backward_against_the_chain),
        cmocka_unit_test(reference_against_its_chain),
        cmocka_unit_test(forward_rounds_once),
        cmocka_unit_test(backward_rounds_once),
        FUSED_SITE_TESTS(&single),
        FUSED_SITE_FORWARD_TESTS("mhc_pre_fwd"),
        cmocka_unit_test(one_launch_against_the_chain),
    };
    return suite_run("mhc_pre", tests);
}
