/* SPDX-License-Identifier: Apache-2.0
 *
 * What every operator is held to. WEFT_STEM is its name without the pass: tests/CMakeLists.txt builds this once for each operator of
 * src/core/ops.def that has no tests/<family>/test_<stem>.c with more than this. */
#include "support/suite.h"

#define FWD WEFT_STEM "_fwd"
#define BWD WEFT_STEM "_bwd"

static void reference_against_finite_differences(void **state)
{
    (void)state;
    fd_suite(WEFT_STEM);
}

static void forward_on_every_backend(void **state)
{
    (void)state;
    grid_suite(FWD);
}

static void backward_on_every_backend(void **state)
{
    (void)state;
    grid_suite(BWD);
}

static void forward_rounds_once(void **state)
{
    (void)state;
    grid_rounding(FWD);
}

static void backward_rounds_once(void **state)
{
    (void)state;
    grid_rounding(BWD);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reference_against_finite_differences),
        cmocka_unit_test(forward_on_every_backend),
        cmocka_unit_test(backward_on_every_backend),
        cmocka_unit_test(forward_rounds_once),
        cmocka_unit_test(backward_rounds_once),
    };
    return suite_run(WEFT_STEM, tests);
}
