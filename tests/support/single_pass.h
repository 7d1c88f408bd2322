/* SPDX-License-Identifier: Apache-2.0
 *
 * Backward operators that end with a single pass over the streams on CUDA: problems that it takes, with all that may be
 * missing, against the chain; that it is taken; that nothing but the problem decides a bit of it. */
#ifndef WEFT_TESTS_SINGLE_PASS_H
#define WEFT_TESTS_SINGLE_PASS_H

#include "support/problem.h"

typedef struct single_pass {
    const char *op;
    const char *const *absent; /* names between spaces */
    int num_absent;            /* no multiple of 3, so that every shape meets all of them */
} single_pass;

/* Without a GPU the grid once more. */
void single_pass_compare(const single_pass *s);
void single_pass_taken(const single_pass *s);
void single_pass_reproducible(const single_pass *s);

#endif
