/* SPDX-License-Identifier: Apache-2.0
 *
 * What a tests/test_<stem>.c includes. */
#ifndef WEFT_TESTS_SUITE_H
#define WEFT_TESTS_SUITE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "support/chain.h"
#include "support/fd.h"
#include "support/fields.h"
#include "support/grid.h"
#include "support/problem.h"

static inline int suite_end(void **state)
{
    (void)state;
    grid_print_ratios();
    return 0;
}

/* WEFT_TEST_FILTER=pattern runs only the tests whose name matches. */
static inline int suite_begin(void **state)
{
    (void)state;
    if (test_quick()) fprintf(stderr, "WEFT_TEST_QUICK is set: grids are thinned\n");
    return 0;
}

#define suite_run(name, tests)                                                                                     \
    (cmocka_set_test_filter(getenv("WEFT_TEST_FILTER")),                                                           \
     cmocka_run_group_tests_name(name, tests, suite_begin, suite_end))

/* main() of a program about the CUDA backend in a build without it. */
static inline void suite_no_cuda(void **state)
{
    (void)state;
    fprintf(stderr, "  skipped: this build has no CUDA backend\n");
    skip();
}

static inline int suite_without_cuda(const char *name)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(suite_no_cuda)};
    return suite_run(name, tests);
}

#endif
