/* SPDX-License-Identifier: Apache-2.0
 *
 * Comparison with the reference. The reference runs in float64 on the very values of the call's inputs, so its
 * result carries no rounding worth counting, and a backend's result must lie within a bound that is derived from
 * the arithmetic: number of roundings times u = 2^-24 times the sum of |terms|, plus one rounding to the output's
 * dtype. The numbers of roundings and the bounds of what is not a sum of products are all in truth.c. */
#ifndef WEFT_TESTS_TRUTH_H
#define WEFT_TESTS_TRUTH_H

#include "support/problem.h"

typedef struct truth {
    problem *exact; /* the call in float64 */
    problem
        *magnitude; /* the same of |inputs|: sums of |terms|; NULL where the operator is not a sum of products */
} truth;

/* True where truth_compare knows bounds for the operator. Operators made of others have none: they are compared
 * bitwise with the chain of their parts (support/chain.h). */
bool truth_knows(const char *op);
truth truth_make(const problem *p);
void truth_free(truth *t);
/* Fails as !(err <= bound), so a NaN fails; where the reference is not finite the result must not be finite
 * either. */
void truth_compare(const truth *t, const problem *p, weft_exec exec);
/* The largest err/bound per operator and tensor seen by this process: near 1 is tight, far below 1 is a loose
 * bound. */
void truth_print_ratios(void);

#endif
