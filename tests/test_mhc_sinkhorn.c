/* SPDX-License-Identifier: Apache-2.0
 *
 * Sinkhorn [M3]: five rules. */
#include "support/suite.h"

static void reference_against_finite_differences(void **state)
{
    (void)state;
    fd_suite("mhc_sinkhorn");
}

static void forward_against_the_reference(void **state)
{
    (void)state;
    grid_suite("mhc_sinkhorn_fwd");
}

static void backward_against_the_reference(void **state)
{
    (void)state;
    grid_suite("mhc_sinkhorn_bwd");
}

static void forward_rounds_once(void **state)
{
    (void)state;
    grid_rounding("mhc_sinkhorn_fwd");
}

static void backward_rounds_once(void **state)
{
    (void)state;
    grid_rounding("mhc_sinkhorn_bwd");
}

/* A row whose maximum is there twice: where a rule depends on the maximum (add, active clamp), the two share that
 * term evenly, which is what a central difference sees at the kink. */
static void repeated_row_maxima(void **state)
{
    (void)state;
    for (int rule = 0; rule < 5; rule++)
        for (int iters = 1; iters <= 3; iters += 2) {
            spec s = {.op = "mhc_sinkhorn_fwd", .tokens = 1, .streams = 3, .channels = 1, .act = WEFT_F64};
            s.numerics =
                (weft_mhc_numerics){.sinkhorn = (weft_sinkhorn)rule, .sinkhorn_eps = 0.05, .sinkhorn_iters = iters};
            problem *fwd = problem_make(&s);
            s.op = "mhc_sinkhorn_bwd";
            problem *bwd = problem_make(&s);
            arg *z = problem_arg(fwd, "logits"), *res = problem_arg(fwd, "res"), *up = problem_arg(bwd, "d_res");
            arg_set(z, 4, 1.5);
            arg_set(z, 5, 1.5); /* row 1 is [?, 1.5, 1.5] */
            arg_set(z, 3, -0.25);
            for (int64_t k = 0; k < 9; k++) arg_set(problem_arg(bwd, "logits"), k, arg_get(z, k));
            problem_seal(bwd);
            problem_must_run(bwd, on_ref());
            for (int64_t k = 3; k < 6; k++) {
                double keep = arg_get(z, k), at[2], h = 1e-5;
                for (int side = 0; side < 2; side++) {
                    arg_set(z, k, keep + (side ? h : -h));
                    problem_seal(fwd);
                    problem_must_run(fwd, on_ref());
                    at[side] = 0;
                    for (int64_t i = 0; i < 9; i++) at[side] += arg_get(res, i) * arg_get(up, i);
                }
                arg_set(z, k, keep);
                double fd = (at[1] - at[0]) / (2 * h), got = arg_get(problem_arg(bwd, "d_logits"), k);
                if (!(fabs(fd - got) <= 1e-6))
                    test_failed("rule %d, iters %d: d_logits[1, %d]: got %.9g, finite difference %.9g", rule, iters,
                                (int)(k - 3), got, fd);
            }
            problem_free(fwd);
            problem_free(bwd);
        }
    test_verdict();
}

/* What every rule promises: columns sum to one where eps is negligible, rows nearly so after many iterations. */
static void columns_sum_to_one(void **state)
{
    (void)state;
    for (int rule = 0; rule < 5; rule++)
        for (int64_t n = 1; n <= 8; n++) {
            spec s = {.op = "mhc_sinkhorn_fwd", .tokens = 7, .streams = n, .channels = 1};
            s.numerics =
                (weft_mhc_numerics){.sinkhorn = (weft_sinkhorn)rule, .sinkhorn_eps = 1e-9, .sinkhorn_iters = 50};
            problem *p = problem_make(&s);
            problem_must_run(p, on_cpu(WEFT_ISA_BEST, 1));
            const arg *res = problem_arg(p, "res");
            for (int64_t t = 0; t < s.tokens; t++)
                for (int64_t b = 0; b < n; b++) {
                    double column = 0, row = 0;
                    for (int64_t a = 0; a < n; a++) {
                        column += arg_get(res, (t * n + a) * n + b);
                        row += arg_get(res, (t * n + b) * n + a);
                    }
                    if (!(fabs(column - 1) <= 1e-5))
                        test_failed("rule %d, n %d: a column sums to %.9g", rule, (int)n, column);
                    if (!(fabs(row - 1) <= 0.05))
                        test_failed("rule %d, n %d: a row sums to %.9g", rule, (int)n, row);
                }
            problem_free(p);
        }
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reference_against_finite_differences),
        cmocka_unit_test(forward_against_the_reference),
        cmocka_unit_test(backward_against_the_reference),
        cmocka_unit_test(forward_rounds_once),
        cmocka_unit_test(backward_rounds_once),
        cmocka_unit_test(repeated_row_maxima),
        cmocka_unit_test(columns_sum_to_one),
    };
    return suite_run("mhc_sinkhorn", tests);
}
