/* SPDX-License-Identifier: Apache-2.0 */
#include "check/compare.h"

#include <math.h>

#include "check/element.h"

/* Larger is worse. Two elements without any error are told apart by their bounds: the larger one is shown. */
static int worse(const comparison *a, double error, double bound)
{
    int fails = !(error <= bound), failed = !(a->error <= a->bound);
    if (fails != failed) return fails;
    if (isnan(a->error)) return 0;
    if (isnan(error)) return 1;
    double ratio = error == 0 ? 0 : error / bound, worst = a->error == 0 ? 0 : a->error / a->bound;
    return ratio > worst || (ratio == worst && bound > a->bound);
}

/* What lies beyond the largest number of the dtype, as far as rounding may take the value, becomes infinity. The bound
 * holds one rounding of the store, which comes after that. */
static int overflows(weft_dtype dtype, double value, double want, double bound)
{
    double reach = (fabs(want) + bound) / (1 + element_unit(dtype));
    return isinf(value) && (value > 0) == (want > 0) && isinf(element_round(dtype, reach));
}

comparison compare(const weft_tensor *got, const double *want, const double *bound)
{
    comparison c = {.count = tensor_count(got), .index = -1};
    cursor at = cursor_open(got);
    for (int64_t i = 0; i < c.count; i++, cursor_step(&at)) {
        double value = value_load(cursor_data(&at, got->data), got->dtype);
        double error = fabs(value - want[i]), limit = bound[i];
        if (!isfinite(want[i])) {
            /* How a result leaves the numbers (NaN or an infinity) may depend on the order of operations. */
            error = isfinite(value) ? INFINITY : 0;
            limit = 0;
        } else if (overflows(got->dtype, value, want[i], bound[i])) {
            error = 0;
        }
        if (!(error <= limit)) c.failed++;
        if (c.index < 0 || worse(&c, error, limit)) {
            c.index = i;
            c.error = error;
            c.bound = limit;
            c.got = value;
            c.want = want[i];
        }
    }
    return c;
}

int compare_merge(comparison *all, const comparison *more)
{
    int take = more->index >= 0 && (all->index < 0 || all->count == 0 || worse(all, more->error, more->bound));
    int64_t count = all->count + more->count, failed = all->failed + more->failed;
    if (take) *all = *more;
    all->count = count;
    all->failed = failed;
    return take;
}
