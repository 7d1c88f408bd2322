/* SPDX-License-Identifier: Apache-2.0
 *
 * Learned head contraction [M9]. */
#include "support/fused_site.h"
#include "support/suite.h"

static void reference_against_finite_differences(void **state)
{
    (void)state;
    fd_suite("mhc_head");
}

static void forward_against_the_chain(void **state)
{
    (void)state;
    grid_suite("mhc_head_fwd");
}

static void backward_against_the_chain(void **state)
{
    (void)state;
    grid_suite("mhc_head_bwd");
}

static void reference_against_its_chain(void **state)
{
    (void)state;
    grid_chain_on_ref("mhc_head_fwd");
}

static void forward_rounds_once(void **state)
{
    (void)state;
    grid_rounding("mhc_head_fwd");
}

static void backward_rounds_once(void **state)
{
    (void)state;
    grid_rounding("mhc_head_bwd");
}

/* ---- the fused backward on CUDA -------------------------------------------------------------------------- */

static const char *const absent[] = {" ",
                                     " norm_weight ",
                                     " d_x ",
                                     " d_phi d_norm_weight ",
                                     " d_alpha d_beta ",
                                     " norm_weight d_alpha ",
                                     " d_norm_weight d_x d_beta "};
static const fused_site single = {"mhc_head_bwd", absent, sizeof absent / sizeof *absent, false};

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
        FUSED_SITE_FORWARD_TESTS("mhc_head_fwd"),
    };
    return suite_run("mhc_head", tests);
}
