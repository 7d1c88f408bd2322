/* SPDX-License-Identifier: Apache-2.0
 *
 * RMSNorm of a row [N1]. */
#include "support/suite.h"

static void reference_against_finite_differences(void **state)
{
    (void)state;
    fd_suite("rmsnorm");
}

static void forward_against_the_reference(void **state)
{
    (void)state;
    grid_suite("rmsnorm_fwd");
}

static void backward_against_the_reference(void **state)
{
    (void)state;
    grid_suite("rmsnorm_bwd");
}

static void forward_rounds_once(void **state)
{
    (void)state;
    grid_rounding("rmsnorm_fwd");
}

static void backward_rounds_once(void **state)
{
    (void)state;
    grid_rounding("rmsnorm_bwd");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reference_against_finite_differences),
        cmocka_unit_test(forward_against_the_reference),
        cmocka_unit_test(backward_against_the_reference),
        cmocka_unit_test(forward_rounds_once),
        cmocka_unit_test(backward_rounds_once),
    };
    return suite_run("rmsnorm", tests);
}
