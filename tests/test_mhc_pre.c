/* SPDX-License-Identifier: Apache-2.0
 *
 * Everything in front of a sub-layer in one call [M10]. */
#include "support/single_pass.h"
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

/* ---- the single pass of CUDA's backward -------------------------------------------------------------------------- */

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
static const single_pass single = {"mhc_pre_bwd", absent, sizeof absent / sizeof *absent};

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reference_against_finite_differences),
        cmocka_unit_test(forward_against_the_chain),
        cmocka_unit_test(backward_against_the_chain),
        cmocka_unit_test(reference_against_its_chain),
        cmocka_unit_test(forward_rounds_once),
        cmocka_unit_test(backward_rounds_once),
        SINGLE_PASS_TESTS(&single),
        cmocka_unit_test_prestate(single_pass_of_any_width, "mhc_pre_fwd"),
    };
    return suite_run("mhc_pre", tests);
}
