/* SPDX-License-Identifier: Apache-2.0
 *
 * Backward operators with a fused kernel on CUDA: problems that it takes, with all that may be
 * missing, against the chain; that it is taken; that nothing but the problem decides a bit of it. Forward operators that are one:
 * every kernel that the width of a token chooses. */
#ifndef WEFT_TESTS_FUSED_SITE_H
#define WEFT_TESTS_FUSED_SITE_H

#include "support/problem.h"

typedef struct fused_site {
    const char *op;
    const char *const *absent; /* names between spaces */
    int num_absent;            /* no multiple of 3, so that every shape meets all of them */
    bool has_matrix;           /* from Sinkhorn, whose history has to find room */
} fused_site;

/* Tests whose state is the fused_site. The first takes the grid once more where there is no GPU. */
void fused_site_against_chain(void **state);
void fused_site_is_taken(void **state);
void fused_site_is_reproducible(void **state);
/* The state is the name of a forward operator: every kernel against the chain; reproducible; what does not take it is told why. */
void fused_site_of_any_width(void **state);
void fused_site_forward_is_reproducible(void **state);
void fused_site_forward_is_not_taken(void **state);

#define FUSED_SITE_TESTS(of)                                                                                       \
    cmocka_unit_test_prestate(fused_site_against_chain, (void *)(of)),                                             \
        cmocka_unit_test_prestate(fused_site_is_taken, (void *)(of)),                                              \
        cmocka_unit_test_prestate(fused_site_is_reproducible, (void *)(of))

#define FUSED_SITE_FORWARD_TESTS(op)                                                                               \
    cmocka_unit_test_prestate(fused_site_of_any_width, (void *)(op)),                                              \
        cmocka_unit_test_prestate(fused_site_forward_is_reproducible, (void *)(op)),                               \
        cmocka_unit_test_prestate(fused_site_forward_is_not_taken, (void *)(op))

#endif
