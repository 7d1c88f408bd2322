/* SPDX-License-Identifier: Apache-2.0
 *
 * Data at the edges: NaN and infinity stay inside their token and never become numbers, tokens of zeros, denormals,
 * extreme logits, saturated gates, fp16 overflow. */
#include "support/suite.h"

static const weft_dtype acts[] = {WEFT_F32, WEFT_BF16, WEFT_F16};
static const double poisons[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};

/* ---- NaN and infinity ---------------------------------------------------------------------------------------- */

/* Where the reference says NaN or infinity, a number is wrong. */
static void expect_as_ref(const problem *got, const problem *ref, const char *what)
{
    char where[80];
    for (int i = 0; i < got->num_args; i++) {
        const arg *a = &got->arg[i];
        if (!a->guard.block || !arg_is_output(a)) continue;
        for (int64_t k = 0; k < a->elements; k++)
            if (!isfinite(arg_get(&ref->arg[i], k)) && isfinite(arg_get(a, k))) {
                test_failed("%s: %s: %s%s: got the number %g, want %g", problem_text(got), what, a->name,
                            arg_coordinate(a, k, where, sizeof where), arg_get(a, k), arg_get(&ref->arg[i], k));
                break;
            }
    }
}

static void expect_other_tokens(const problem *got, const problem *clean, int64_t token, const char *what)
{
    char where[80];
    for (int i = 0; i < got->num_args; i++) {
        const arg *a = &got->arg[i], *b = &clean->arg[i];
        if (!a->guard.block || !arg_is_output(a) || !arg_by_token(a)) continue;
        int64_t row = a->elements / got->spec.tokens;
        for (int64_t k = 0; k < a->elements; k++) {
            if (k / row == token) continue;
            if (memcmp(arg_at(a, k), arg_at(b, k), weft_dtype_size(a->view->dtype)) != 0) {
                test_failed("%s: %s: %s%s: got %.9g, want %.9g as without it", problem_text(got), what, a->name,
                            arg_coordinate(a, k, where, sizeof where), arg_get(a, k), arg_get(b, k));
                break;
            }
        }
    }
}

/* The fused backward computes y again from x and f, as it may: a y that contradicts them is no poison. There a call
 * without y shows that what comes into y from x and f goes on from it. */
static bool is_rebuilt(const problem *p, const arg *a, weft_exec exec)
{
    return strcmp(p->spec.op, "mhc_boundary_bwd") == 0 && strcmp(a->name, "y") == 0 && chain_sums_apart(p, exec);
}

static void poison_case(const spec *s, weft_exec exec, rng *r)
{
    problem *clean = problem_make(s), *bad = problem_make(s), *ref = problem_make(s);
    problem_must_run(clean, exec);
    for (int i = 0; i < clean->num_args; i++) {
        if (!clean->arg[i].guard.block || arg_is_output(&clean->arg[i]) || !arg_by_token(&clean->arg[i])) continue;
        if (arg_is_index(&clean->arg[i]) || is_rebuilt(clean, &clean->arg[i], exec)) continue;
        for (int v = 0; v < 3; v++) {
            char what[80];
            arg *a = &bad->arg[i];
            int64_t token = rng_below(r, s->tokens), row = a->elements / s->tokens;
            int64_t k = token * row + rng_below(r, row);
            double keep = arg_get(a, k);
            arg_set(a, k, poisons[v]);
            arg_set(&ref->arg[i], k, poisons[v]);
            problem_seal(bad);
            problem_seal(ref);
            problem_must_run(bad, exec);
            problem_must_run(ref, on_ref());
            snprintf(what, sizeof what, "%s in %s of token %d", v ? "infinity" : "NaN", a->name, (int)token);
            expect_other_tokens(bad, clean, token, what);
            expect_as_ref(bad, ref, what);
            problem_reset(bad);
            problem_reset(ref);
            arg_set(a, k, keep);
            arg_set(&ref->arg[i], k, keep);
        }
    }
    problem_free(clean);
    problem_free(bad);
    problem_free(ref);
}

static void poison_stays_in_its_token(void **state)
{
    (void)state;
    weft_exec execs[GRID_EXECS];
    int count = grid_execs(execs, 1);
    for (int32_t i = 0; i < weft_op_count(); i++) {
        rng r = {rng_name(7, weft_op_at(i)->name)};
        for (int v = 0; v < (test_quick() ? 2 : 8); v++) {
            spec s = {.op = weft_op_at(i)->name,
                      .tokens = v & 1 ? 21 : 37,
                      .streams = v % 4 == 3 ? 3 : 4,
                      .channels = v & 2   ? 33
                                  : v & 4 ? 64
                                          : 16,
                      .act = acts[v % 3],
                      .rows = 11};
            weft_mhc_preset_numerics((weft_mhc_preset)(v % WEFT_PRESET_COUNT), &s.numerics);
            s.stream_layout = (layout)(v / 4);
            s.wide = v & 1 ? s.act : WEFT_F32;
            for (int e = 0; e < count; e++)
                if (weft_op_has(weft_op_at(i), execs[e].backend)) poison_case(&s, execs[e], &r);
            if (strcmp(s.op, "mhc_boundary_bwd") != 0) continue;
            s.absent = " y ";
            for (int e = 0; e < count; e++) poison_case(&s, execs[e], &r);
        }
    }
    test_verdict();
}

/* A NaN in row j of phi belongs to column j of h and to nothing else. */
static void poisoned_phi_row(void **state)
{
    (void)state;
    weft_exec execs[GRID_EXECS];
    int count = grid_execs(execs, 1);
    for (int e = 0; e < count; e++)
        for (int v = 0; v < 12; v++) {
            spec s = {.op = "mhc_project_fwd",
                      .tokens = 19,
                      .streams = 4,
                      .channels = v % 3 == 1 ? 32 + 32 * (v / 3) : 20 + v,
                      .rows = 24,
                      .act = acts[v % 3],
                      .param = acts[v / 3 % 3],
                      .param_layout = (layout)(v & 1)};
            problem *clean = problem_make(&s), *bad = problem_make(&s);
            weft_exec exec = execs[e];
            int64_t row = v * 5 % 24, width = s.streams * s.channels;
            problem_must_run(clean, exec);
            arg_set(problem_arg(bad, "phi"), row * width + v * 3 % width, poisons[v % 3]);
            problem_seal(bad);
            problem_must_run(bad, exec);
            const arg *h = problem_arg(bad, "h"), *was = problem_arg(clean, "h");
            for (int64_t k = 0; k < h->elements; k++) {
                double got = arg_get(h, k), want = arg_get(was, k);
                if (k % 24 == row ? isfinite(got) : got != want)
                    test_failed("%s on %s: poison in row %d of phi: h[%d, %d] is %g", problem_text(bad),
                                exec_name(exec), (int)row, (int)(k / 24), (int)(k % 24), got);
            }
            for (int64_t t = 0; t < s.tokens; t++)
                if (arg_get(problem_arg(bad, "ms"), t) != arg_get(problem_arg(clean, "ms"), t))
                    test_failed("%s: poison in phi reached ms", problem_text(bad));
            problem_free(clean);
            problem_free(bad);
        }
    test_verdict();
}

/* ---- comparison with the reference on data that a test writes itself ----------------------------------------- */

static void compare_everywhere(problem *p)
{
    problem_seal(p);
    grid_compare_problem(p);
}

/* All that belongs to token 1 is zero: x, h, ms, gradients. */
static void token_of_zeros(void **state)
{
    (void)state;
    for (int32_t i = 0; i < weft_op_count(); i++)
        for (int preset = 0; preset < WEFT_PRESET_COUNT; preset++) {
            spec s = {
                .op = weft_op_at(i)->name, .tokens = 3, .streams = 4, .channels = 18, .act = acts[preset % 3]};
            weft_mhc_preset_numerics((weft_mhc_preset)preset, &s.numerics);
            problem *p = problem_make(&s);
            for (int k = 0; k < p->num_args; k++) {
                arg *a = &p->arg[k];
                if (!a->guard.block || arg_is_output(a) || !arg_by_token(a) || arg_is_index(a)) continue;
                int64_t row = a->elements / s.tokens;
                for (int64_t m = row; m < 2 * row; m++) arg_set(a, m, 0);
            }
            compare_everywhere(p);
            problem_must_run(p, on_cpu(WEFT_ISA_BEST, 1));
            for (int k = 0; k < p->num_args; k++)
                for (int64_t m = 0; p->arg[k].guard.block && arg_is_output(&p->arg[k]) && m < p->arg[k].elements;
                     m++)
                    if (!isfinite(arg_get(&p->arg[k], m)) &&
                        p->arg[k].info->dim[0] != WEFT_DIM_CACHE) { /* rows that nobody names are not written */
                        test_failed("%s: %s is not finite for a token of zeros", problem_text(p), p->arg[k].name);
                        break;
                    }
            problem_free(p);
        }
    test_verdict();
}

static void denormals(void **state)
{
    (void)state;
    for (int32_t i = 0; i < weft_op_count(); i++)
        for (int v = 0; v < 6; v++) {
            spec s = {.op = weft_op_at(i)->name, .tokens = 5, .streams = 4, .channels = 40, .act = acts[v % 3]};
            s.wide = v < 3 ? s.act : WEFT_F32;
            s.scale = s.act == WEFT_F16 ? 3e-7 : 3e-40;
            problem *p = problem_make(&s);
            compare_everywhere(p);
            problem_free(p);
        }
    test_verdict();
}

/* ---- Sinkhorn and gates -------------------------------------------------------------------------------------- */

static void fill_logits(arg *a, int pattern, double size, double limit, int64_t n, rng *r)
{
    for (int64_t k = 0; k < a->elements; k++) {
        int64_t row = k / n % n, col = k % n;
        double z = 0;
        switch (pattern) {
        case 0: z = rng_next(r) & 1 ? size : -size; break;               /* repeated maxima at both ends */
        case 1: z = size * rng_normal(r) / 2; break;                     /* spread */
        case 2: z = row == col ? size : -size; break;                    /* nearly a permutation */
        case 3: z = size; break;                                         /* all equal, far from zero */
        case 4: z = col == 0 ? size : 0; break;                          /* one column takes all */
        case 5: z = size + rng_normal(r); break;                         /* a common offset */
        default: z = rng_below(r, 3) == 0 ? size : rng_normal(r); break; /* some maxima repeated */
        }
        /* exp(z) of threshold leaves fp32 at 88 */
        arg_set(a, k, fmax(-limit, fmin(limit, z)));
    }
}

static void extreme_logits(void **state)
{
    (void)state;
    static const double sizes[] = {30, 80, 300, 1e4};
    static const int iterations[] = {1, 20, 100};
    static const char *const ops[] = {"mhc_sinkhorn_fwd", "mhc_sinkhorn_bwd"};
    rng r = {77};
    for (int o = 0; o < 2; o++)
        for (int rule = 0; rule < 5; rule++)
            for (int z = 0; z < 4; z++)
                for (int pattern = 0; pattern < 7; pattern++)
                    for (int it = 0; it < 3; it++) {
                        spec s = {.op = ops[o], .tokens = 17, .streams = pattern & 1 ? 4 : 3, .channels = 1};
                        double size = sizes[z];
                        s.numerics = (weft_mhc_numerics){.sinkhorn = (weft_sinkhorn)rule,
                                                         .sinkhorn_eps = 1e-6,
                                                         .sinkhorn_iters = iterations[it]};
                        /* differences beyond 87 underflow in the rules that exponentiate once, and what clamp and
                         * add would make of it by dividing by eps again and again is lost: only finiteness can be
                         * asked for */
                        bool fits = size <= 30 || rule == WEFT_SINKHORN_LOG || rule == WEFT_SINKHORN_SOFTMAX_EPS ||
                                    (pattern == 3 && rule != WEFT_SINKHORN_THRESHOLD);
                        if (rule == WEFT_SINKHORN_THRESHOLD && size > 80) continue;
                        problem *p = problem_make(&s);
                        fill_logits(problem_arg(p, "logits"), pattern, size,
                                    rule == WEFT_SINKHORN_THRESHOLD ? 80 : 1e30, s.streams, &r);
                        problem_seal(p);
                        if (fits) compare_everywhere(p);
                        problem_must_run(p, on_cpu(WEFT_ISA_BEST, 1));
                        for (int k = 0; k < p->num_args; k++)
                            for (int64_t m = 0; arg_is_output(&p->arg[k]) && m < p->arg[k].elements; m++)
                                if (!isfinite(arg_get(&p->arg[k], m))) {
                                    test_failed("%s: logits of %g, pattern %d: %s is not finite", problem_text(p),
                                                size, pattern, p->arg[k].name);
                                    break;
                                }
                        problem_free(p);
                    }
    test_verdict();
}

static void saturated_gates(void **state)
{
    (void)state;
    static const double sizes[] = {17, 50, 88, 104, 200, 1e4, 1e30};
    static const char *const ops[] = {"mhc_scale_fwd", "mhc_scale_bwd"};
    rng r = {78};
    for (int o = 0; o < 2; o++)
        for (int z = 0; z < 7; z++)
            for (int preset = 0; preset < WEFT_PRESET_COUNT; preset++) {
                spec s = {.op = ops[o], .tokens = 9, .streams = 4, .channels = 1};
                weft_mhc_preset_numerics((weft_mhc_preset)preset, &s.numerics);
                problem *p = problem_make(&s);
                arg *h = problem_arg(p, "h"), *alpha = problem_arg(p, "alpha");
                for (int64_t k = 0; k < h->elements; k++)
                    arg_set(h, k, rng_next(&r) & 1 ? sizes[z] : -sizes[z] * rng_uniform(&r));
                for (int64_t k = 0; k < 3; k++) arg_set(alpha, k, 1);
                for (int64_t k = 0; k < s.tokens; k++) arg_set(problem_arg(p, "ms"), k, 1);
                compare_everywhere(p);
                problem_free(p);
            }
    test_verdict();
}

/* ---- overflow ------------------------------------------------------------------------------------------------ */

/* Sums beyond 65504 become infinity in fp16, as the reference's do, and only those. */
static void f16_overflow(void **state)
{
    (void)state;
    static const char *const ops[] = {"mhc_aggregate_fwd", "mhc_aggregate_bwd", "mhc_post_fwd",   "mhc_post_bwd",
                                      "mhc_contract_fwd",  "mhc_contract_bwd",  "mhc_expand_bwd", "rmsnorm_bwd"};
    for (int o = 0; o < 8; o++)
        for (int v = 0; v < 4; v++) {
            spec s = {.op = ops[o],
                      .tokens = 7,
                      .streams = 4,
                      .channels = 30,
                      .act = WEFT_F16,
                      .wide = WEFT_F16,
                      .scale = v < 2 ? 18000 : 65000 / 3.5,
                      .contract = WEFT_CONTRACT_SUM};
            s.coef = v & 1 ? WEFT_F16 : WEFT_F32;
            problem *p = problem_make(&s);
            compare_everywhere(p);
            bool infinite = false, finite = false;
            for (int k = 0; k < p->num_args; k++)
                for (int64_t m = 0; arg_is_output(&p->arg[k]) && m < p->arg[k].elements; m++) {
                    double got = arg_get(&p->arg[k], m);
                    infinite = infinite || isinf(got);
                    finite = finite || isfinite(got);
                    if (isnan(got)) test_failed("%s: %s overflowed to NaN", problem_text(p), p->arg[k].name);
                }
            if (strstr(ops[o], "_fwd") && (!infinite || !finite))
                test_failed("%s: the case should reach infinity in part", problem_text(p));
            problem_free(p);
        }
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(poison_stays_in_its_token),
        cmocka_unit_test(poisoned_phi_row),
        cmocka_unit_test(token_of_zeros),
        cmocka_unit_test(denormals),
        cmocka_unit_test(extreme_logits),
        cmocka_unit_test(saturated_gates),
        cmocka_unit_test(f16_overflow),
    };
    return suite_run("extreme", tests);
}
