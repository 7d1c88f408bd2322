/* SPDX-License-Identifier: Apache-2.0
 *
 * One comparison for everything: element by element against a bound of its own. */
#ifndef WEFT_CHECK_COMPARE_H
#define WEFT_CHECK_COMPARE_H

#include <math.h>

#include <weft/weft.h>

/* The element that comes closest to its bound, or exceeds it most. */
typedef struct comparison {
    int64_t count, failed, index;
    double error, bound, got, want;
} comparison;

/* Fails as !(error <= bound), so that NaN fails. Where the expectation is not finite the result must not be
 * either; where it is too large for the dtype, infinity is right. */
comparison compare(const weft_tensor *got, const double *want, const double *bound);

/* Keeps the worse of two comparisons and adds up their counts; 1 where `more` is the worse one. */
int compare_merge(comparison *all, const comparison *more);

/* The larger one of an error and the worst before it. What is no number stays the worst: fmax would forget it. */
static inline double value_worst(double worst, double error)
{
    return isnan(worst) || error <= worst ? worst : error;
}

#endif
