/* SPDX-License-Identifier: Apache-2.0
 *
 * Post of one sub-layer and pre of the next in one call [M11]. */
#include "support/fused_site.h"
#include "support/suite.h"

static void reference_against_finite_differences(void **state)
{
    (void)state;
    fd_suite("mhc_boundary");
}

static void forward_against_the_chain(void **state)
{
    (void)state;
    grid_suite("mhc_boundary_fwd");
}

static void backward_against_the_chain(void **state)
{
    (void)state;
    grid_suite("mhc_boundary_bwd");
}

static void reference_against_its_chain(void **state)
{
    (void)state;
    grid_chain_on_ref("mhc_boundary_fwd");
}

static void forward_rounds_once(void **state)
{
    (void)state;
    grid_rounding("mhc_boundary_fwd");
}

static void backward_rounds_once(void **state)
{
    (void)state;
    grid_rounding("mhc_boundary_bwd");
}

/* ---- the fused backward on CUDA -------------------------------------------------------------------------- */

/* Without the norm of the sub-layer, in either form; with it; some without what may be missing. */
static const char *const absent[] = {" d_v bias pre_in ",
                                     " d_v bias ",
                                     " d_v y pre_in ",
                                     " d_v bias d_y y ",
                                     " d_v d_u ",
                                     " d_v d_u pre_in bias d_y ",
                                     " d_v bias pre_in y d_res ",
                                     " bias d_u ",
                                     " bias d_u pre_in y ",
                                     " pre_in ",
                                     " y d_y bias d_u ",
                                     " d_post d_x d_sub_weight ",
                                     " d_f d_phi d_res d_post ",
                                     " bias d_v pre_in res d_res "};
static const fused_site single = {"mhc_boundary_bwd", absent, sizeof absent / sizeof *absent, true};

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
        FUSED_SITE_FORWARD_TESTS("mhc_boundary_fwd"),
    };
    return suite_run("mhc_boundary", tests);
}
