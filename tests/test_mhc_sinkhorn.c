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

/* A matrix whose logits reach down to `spread` below their row's maximum, and no further. */
static void fill_spread(arg *logits, int64_t token, int64_t n, int pattern, double spread, rng *r)
{
    for (int64_t row = 0; row < n; row++)
        for (int64_t col = 0; col < n; col++) {
            double z = 0;
            switch (pattern) {
            case 0: z = rng_next(r) & 1 ? -spread : 0; break;
            case 1: z = col > row ? -spread : 0; break;  /* a triangle: converges to a permutation, slowly */
            case 2: z = col != row ? -spread : 0; break; /* nearly a permutation from the start */
            case 3: z = col > 0 ? -spread : 0; break;    /* one column takes all, the others have tiny sums */
            default: z = -spread * rng_uniform(r); break;
            }
            if (col == row && pattern != 1 && pattern != 3) z = 0;
            if (col == n - 1 && row == 0 && n > 1) z = -spread;
            arg_set(logits, (token * n + row) * n + col, z + 8 * (double)row);
        }
}

/* The log rule leaves its logarithms out where a token's logits are close enough (sk_near in core/mhc_math.h): on both
 * sides of the edge, and at the smallest numbers that may appear, results are what the reference says, and a token does
 * not notice which way its neighbours went. */
static void log_rule_near_and_far(void **state)
{
    (void)state;
    static const char *const ops[] = {"mhc_sinkhorn_fwd", "mhc_sinkhorn_bwd"};
    static const int64_t streams[] = {1, 2, 3, 4, 5, 8, 13, 32};
    static const int iterations[] = {1, 2, 20, 300};
    static const double spreads[] = {39.99, 60, 5, 40.01, 40, 20};
    enum { TOKENS = 30 };
    weft_exec execs[GRID_EXECS];
    int count = grid_execs(execs, 1);
    rng r = {79};
    for (int o = 0; o < 2; o++)
        for (int v = 0; v < 8; v++)
            for (int it = 0; it < 4; it++) {
                spec s = {.op = ops[o], .tokens = TOKENS, .streams = streams[v], .channels = 1};
                int64_t n = s.streams, size = n * n;
                if (test_quick() && n * iterations[it] > 500) continue;
                s.numerics = (weft_mhc_numerics){.sinkhorn = WEFT_SINKHORN_LOG, .sinkhorn_iters = iterations[it]};
                problem *all = problem_make(&s);
                s.tokens = 1;
                problem *one = problem_make(&s);
                for (int64_t t = 0; t < TOKENS; t++)
                    fill_spread(problem_arg(all, "logits"), t, n, (int)(t % 5), spreads[t % 6], &r);
                problem_seal(all);
                truth want = truth_make(all);
                for (int e = 0; e < count; e++) {
                    problem_must_run(all, execs[e]);
                    truth_compare(&want, all, execs[e]);
                    for (int64_t t = 0; t < TOKENS; t++) {
                        for (int i = 0; i < all->num_args; i++)
                            for (int64_t k = 0; !arg_is_output(&all->arg[i]) && k < size; k++)
                                arg_set(&one->arg[i], k, arg_get(&all->arg[i], t * size + k));
                        problem_seal(one);
                        problem_must_run(one, execs[e]);
                        for (int i = 0; i < all->num_args; i++)
                            if (arg_is_output(&all->arg[i]) &&
                                memcmp(arg_at(&one->arg[i], 0), arg_at(&all->arg[i], t * size),
                                       (size_t)size * sizeof(float)) != 0)
                                test_failed("%s on %s: token %d alone has other bits", problem_text(all),
                                            exec_name(execs[e]), (int)t);
                    }
                }
                truth_free(&want);
                problem_free(one);
                problem_free(all);
            }
    test_verdict();
}

/* What every rule promises: columns sum to one where eps is negligible, but for the n + 3 roundings of the last division and, in
 * the log rule, those of an exponent below 20. Rows nearly so after many iterations: 1e-4 after 50 of these logits. */
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
                    if (!(fabs(column - 1) <= ((double)n + 3 + 20) * 0x1p-24))
                        test_failed("rule %d, n %d: a column sums to %.9g", rule, (int)n, column);
                    if (!(fabs(row - 1) <= 1e-3))
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
        cmocka_unit_test(log_rule_near_and_far),
        cmocka_unit_test(columns_sum_to_one),
    };
    return suite_run("mhc_sinkhorn", tests);
}
