/* SPDX-License-Identifier: Apache-2.0
 *
 * Backward operators that end with a single pass over the streams on CUDA: problems that it takes, with all that may be
 * missing, against the chain; that it is taken; that nothing but the problem decides a bit of it. Forward operators that are one:
 * every kernel that the width of a token chooses. */
#ifndef WEFT_TESTS_SINGLE_PASS_H
#define WEFT_TESTS_SINGLE_PASS_H

#include "support/problem.h"

typedef struct single_pass {
    const char *op;
    const char *const *absent; /* names between spaces */
    int num_absent;            /* no multiple of 3, so that every shape meets all of them */
    bool has_matrix;           /* from Sinkhorn, whose history has to find room */
} single_pass;

/* Tests whose state is the single_pass. The first takes the grid once more where there is no GPU. */
void single_pass_against_the_chain(void **state);
void single_pass_is_taken(void **state);
void single_pass_is_reproducible(void **state);
/* The state is the name of a forward operator. */
void single_pass_of_any_width(void **state);

#define SINGLE_PASS_TESTS(of)                                                                                      \
    cmocka_unit_test_prestate(single_pass_against_the_chain, (void *)(of)),                                        \
        cmocka_unit_test_prestate(single_pass_is_taken, (void *)(of)),                                             \
        cmocka_unit_test_prestate(single_pass_is_reproducible, (void *)(of))

#endif
