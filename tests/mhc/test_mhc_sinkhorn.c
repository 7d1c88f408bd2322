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
                for (int e = 0; e < count; e++) {
                    grid_compare_expectation(all, execs[e]);
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
                problem_free(one);
                problem_free(all);
            }
    test_verdict();
}

/* Rules that multiply exponentials. clamp and add: up to 80 below their row's maximum logits give what the reference says, columns
 * that have nothing else included, which eps brings back in a few iterations. threshold: from -40 to 40. */
static void linear_rules_to_the_edge_of_their_range(void **state)
{
    (void)state;
    static const char *const ops[] = {"mhc_sinkhorn_fwd", "mhc_sinkhorn_bwd"};
    static const weft_sinkhorn rules[] = {WEFT_SINKHORN_CLAMP, WEFT_SINKHORN_ADD, WEFT_SINKHORN_THRESHOLD};
    static const int64_t streams[] = {1, 2, 3, 4, 5, 8, 13, 32};
    static const int iterations[] = {1, 3, 20, 300};
    static const double spreads[] = {80, 41, 79.9, 60, 10};
    enum { TOKENS = 35 };
    weft_exec execs[GRID_EXECS];
    int count = grid_execs(execs, 1);
    rng r = {83};
    for (int k = 0; k < 3 * 2 * 8 * 4; k++) {
        const int it = k / 48;
        spec s = {.op = ops[k / 3 % 2], .tokens = TOKENS, .streams = streams[k / 6 % 8], .channels = 1};
        if (test_quick() && s.streams * iterations[it] > 500) continue;
        s.numerics = (weft_mhc_numerics){
            .sinkhorn = rules[k % 3], .sinkhorn_eps = it & 1 ? 1e-9 : 1e-6, .sinkhorn_iters = iterations[it]};
        problem *p = problem_make(&s);
        arg *logits = problem_arg(p, "logits");
        for (int64_t t = 0; t < TOKENS; t++)
            fill_spread(logits, t, s.streams, (int)(t % 5), spreads[t / 5 % 5], &r);
        for (int64_t i = 0; rules[k % 3] == WEFT_SINKHORN_THRESHOLD && i < logits->elements; i++)
            arg_set(logits, i, 40 * (double)(rng_below(&r, 3) - 1)); /* no sum is near eps */
        problem_seal(p);
        for (int e = 0; e < count; e++) grid_compare_expectation(p, execs[e]);
        problem_free(p);
    }
    test_verdict();
}

/* Beyond the range: rows of (0, -depth). In double, eps = 1e-6 brings the second column back within 20 iterations; in fp32 it begins as
 * zero from 104 on and stays zero. That is the same on all backends but the reference, and the first column is right. */
static void linear_rules_beyond_their_range(void **state)
{
    (void)state;
    static const double depths[] = {80, 105, 110, 200};
    weft_exec execs[GRID_EXECS + 1] = {on_ref()};
    int count = 1 + grid_execs(execs + 1, 1);
    for (int k = 0; k < 8; k++) {
        spec s = {.op = "mhc_sinkhorn_fwd", .tokens = 1, .streams = 2, .channels = 1};
        s.numerics = (weft_mhc_numerics){.sinkhorn = k & 1 ? WEFT_SINKHORN_ADD : WEFT_SINKHORN_CLAMP,
                                         .sinkhorn_eps = 1e-6,
                                         .sinkhorn_iters = 20};
        problem *p = problem_make(&s);
        for (int64_t i = 0; i < 4; i++) arg_set(problem_arg(p, "logits"), i, i & 1 ? -depths[k / 2] : 0);
        problem_seal(p);
        for (int e = 0; e < count; e++) {
            problem_must_run(p, execs[e]);
            for (int64_t i = 0; i < 4; i++) {
                const bool gone = i & 1 && k >= 2 && execs[e].backend != WEFT_BACKEND_REF;
                const double got = arg_get(problem_arg(p, "res"), i), want = gone ? 0 : 0.5;
                if (!(fabs(got - want) <= (gone ? 0 : 1e-5)))
                    test_failed("rule %d on %s, %g below: res[%d]: got %.9g, want %g", (int)s.numerics.sinkhorn,
                                exec_name(execs[e]), depths[k / 2], (int)i, got, want);
            }
        }
        problem_free(p);
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
        cmocka_unit_test(linear_rules_to_the_edge_of_their_range),
        cmocka_unit_test(linear_rules_beyond_their_range),
        cmocka_unit_test(columns_sum_to_one),
    };
    return suite_run("mhc_sinkhorn", tests);
}
