/* SPDX-License-Identifier: Apache-2.0
 *
 * Accuracy that users may count on, stated in ulps and norms rather than derived from the arithmetic; data at the edges;
 * the debugging option. A whole layer is in test_gdn_layer.c. */
#include "support/suite.h"

static const weft_dtype acts[] = {WEFT_F32, WEFT_BF16, WEFT_F16};

/* ---- ulps and norms -------------------------------------------------------------------------------------------------- */

typedef struct accuracy {
    int64_t count, beyond_one, beyond_two;
    double error, norm; /* squares */
} accuracy;

static double ulp_of(weft_dtype dtype, double x)
{
    int exponent = x == 0 ? -200 : ilogb(x), low = dtype == WEFT_F16 ? -14 : -126;
    return ldexp(2 * element_unit(dtype), exponent > low ? exponent : low);
}

/* Rows are the last dimension. Elements below 2^-20 of their row's largest count for the norm alone. */
static accuracy measure(const arg *got, const arg *exact)
{
    accuracy a = {0};
    int64_t dim = got->view->shape[got->view->ndim - 1];
    for (int64_t k = 0; k < got->elements; k += dim) {
        double largest = 0;
        for (int64_t d = 0; d < dim; d++) largest = fmax(largest, fabs(arg_get(exact, k + d)));
        for (int64_t d = 0; d < dim; d++) {
            double want = arg_get(exact, k + d), error = fabs(arg_get(got, k + d) - want);
            a.error += error * error;
            a.norm += want * want;
            if (fabs(want) < ldexp(largest, -20)) continue;
            a.count++;
            a.beyond_one += !(error <= ulp_of(got->view->dtype, want));
            a.beyond_two += !(error <= 2 * ulp_of(got->view->dtype, want));
        }
    }
    return a;
}

static void expect_norm(const problem *p, const arg *got, const arg *exact, double limit)
{
    accuracy a = measure(got, exact);
    if (!(sqrt(a.error) <= limit * sqrt(a.norm)))
        test_failed("%s: %s: relative norm of the error %.3g, limit %.3g", problem_text(p), got->name,
                    sqrt(a.error / a.norm), limit);
}

/* The shapes of models, a few tokens of each. */
static spec model(int v)
{
    static const int64_t heads[][2] = {{4, 8}, {2, 8}, {3, 9}, {6, 6}};
    static const int64_t dims[][2] = {{128, 128}, {64, 64}, {256, 512}, {32, 128}};
    spec s = {.tokens = 2, .steps = 70, .channels = 1};
    s.key_heads = heads[v % 4][0];
    s.streams = heads[v % 4][1];
    s.key_dim = dims[v / 4 % 4][0];
    s.value_dim = dims[v / 4 % 4][1];
    s.width = 1 + v % 4;
    s.packed = v & 1;
    return s;
}

static void outputs_within_ulps(void **state)
{
    (void)state;
    static const char *const names[] = {"query", "key", "value"};
    for (int v = 0; v < 16; v++)
        for (int half = 1; half < 3; half++) {
            spec s = model(v);
            if (test_quick() && v % 5) continue;
            s.op = "gdn_pre_fwd";
            s.act = acts[half];
            problem *p = problem_make(&s), *exact = problem_twin(p);
            problem_must_run(exact, on_ref());
            problem_must_run(p, on_cpu(WEFT_ISA_BEST, 2));
            for (int i = 0; i < 3; i++) {
                const arg *got = problem_arg(p, names[i]), *want = problem_arg(exact, names[i]);
                accuracy a = measure(got, want);
                if (a.beyond_two || !(1000 * a.beyond_one <= a.count))
                    test_failed("%s: %s: of %lld elements %lld are off by more than an ulp, %lld by more than two",
                                problem_text(p), names[i], (long long)a.count, (long long)a.beyond_one,
                                (long long)a.beyond_two);
                if (half == 1) expect_norm(p, got, want, 1.8e-3);
            }
            const arg *g = problem_arg(p, "g"), *beta = problem_arg(p, "beta");
            for (int64_t k = 0; k < g->elements; k++) {
                double wg = arg_get(problem_arg(exact, "g"), k), wb = arg_get(problem_arg(exact, "beta"), k);
                if (!(fabs(arg_get(g, k) - wg) <= 2e-6 * fabs(wg)))
                    test_failed("%s: g: got %.9g, want %.9g", problem_text(p), arg_get(g, k), wg);
                if (!(fabs(arg_get(beta, k) - wb) <= 1e-6 * fabs(wb)))
                    test_failed("%s: beta: got %.9g, want %.9g", problem_text(p), arg_get(beta, k), wb);
            }
            problem_free(p);
            problem_free(exact);
        }
    test_verdict();
}

static void gradients_within_norms(void **state)
{
    (void)state;
    static const char *const names[] = {"d_q", "d_k", "d_v", "d_b", "d_a"};
    for (int v = 0; v < 16; v++)
        for (int narrow = 0; narrow < 2; narrow++) {
            spec s = model(v);
            if (test_quick() && v % 5) continue;
            s.op = "gdn_pre_bwd";
            s.act = s.wide = narrow ? WEFT_BF16 : WEFT_F32;
            problem *p = problem_make(&s), *exact = problem_twin(p);
            problem_must_run(exact, on_ref());
            problem_must_run(p, on_cpu(WEFT_ISA_BEST, 2));
            for (int i = 0; i < 5; i++)
                expect_norm(p, problem_arg(p, names[i]), problem_arg(exact, names[i]), narrow ? 2.5e-3 : 5e-6);
            problem_free(p);
            problem_free(exact);
        }
    test_verdict();
}

/* With one tap d_x = weight du, so the reference's d_x shows the terms of the sums over tokens. */
static void parameter_gradients_by_their_terms(void **state)
{
    (void)state;
    for (int v = 0; v < 4; v++) {
        spec s = {.op = "gdn_pre_bwd", .tokens = v < 2 ? 3 : 900, .steps = v < 2 ? 400 : 1, .streams = 4};
        s.channels = 16;
        s.width = 1;
        s.absent = " state d_final_state ";
        s.act = v & 1 ? WEFT_BF16 : WEFT_F32;
        problem *p = problem_make(&s), *exact = problem_twin(p);
        problem_must_run(exact, on_ref());
        problem_must_run(p, on_cpu(WEFT_ISA_BEST, 2));
        const arg *x = problem_arg(exact, "v"), *d_x = problem_arg(exact, "d_v"), *w = problem_arg(exact, "weight");
        int64_t row = x->view->shape[2] * x->view->shape[3], first = 2 * 2 * 16, tokens = x->elements / row;
        for (int64_t c = 0; c < row; c++) {
            double terms = 0, sum = 0, weight = arg_get(w, first + c);
            for (int64_t t = 0; t < tokens; t++) {
                double du = arg_get(d_x, t * row + c) / weight;
                terms += fabs(du * arg_get(x, t * row + c));
                sum += fabs(du);
            }
            double error = fabs(arg_get(problem_arg(p, "d_weight"), first + c) -
                                arg_get(problem_arg(exact, "d_weight"), first + c));
            double bias = fabs(arg_get(problem_arg(p, "d_bias"), first + c) -
                               arg_get(problem_arg(exact, "d_bias"), first + c));
            if (!(error <= 0x1p-20 * terms))
                test_failed("%s: d_weight %.3g of %.3g", problem_text(p), error, terms);
            if (!(bias <= 0x1p-20 * sum)) test_failed("%s: d_bias %.3g of %.3g", problem_text(p), bias, sum);
        }
        const arg *d_a = problem_arg(exact, "d_a"), *a = problem_arg(exact, "a");
        for (int64_t h = 0; h < 4; h++) {
            double terms = 0, logs = 0;
            for (int64_t t = 0; t < tokens; t++) {
                double z = arg_get(a, t * 4 + h) + arg_get(problem_arg(exact, "dt_bias"), h);
                double d = fabs(arg_get(d_a, t * 4 + h));
                terms += d;
                logs += d * (fmax(z, 0) + log1p(exp(-fabs(z)))) * (1 + exp(-z));
            }
            double e1 = fabs(arg_get(problem_arg(p, "d_dt_bias"), h) - arg_get(problem_arg(exact, "d_dt_bias"), h));
            double e2 = fabs(arg_get(problem_arg(p, "d_a_log"), h) - arg_get(problem_arg(exact, "d_a_log"), h));
            if (!(e1 <= 0x1p-20 * terms)) test_failed("%s: d_dt_bias %.3g of %.3g", problem_text(p), e1, terms);
            if (!(e2 <= 0x1p-20 * logs)) test_failed("%s: d_a_log %.3g of %.3g", problem_text(p), e2, logs);
        }
        problem_free(p);
        problem_free(exact);
    }
    test_verdict();
}

/* ---- the whole space, and the debugging option -------------------------------------------------------------------------- */

static void sweep(const char *op, weft_gdn_rounding rounding, int count)
{
    static const int64_t repeat[] = {1, 2, 3, 4, 8}, key_dims[] = {32, 64, 128, 256},
                         value_dims[] = {32, 64, 128, 512};
    rng r = {rng_name((uint64_t)rounding, op)};
    for (int i = 0; i < count; i++) {
        spec s = {.op = op, .tokens = 1 + rng_below(&r, 3), .channels = 1, .steps = 1 + rng_below(&r, 40)};
        s.key_heads = 1 + rng_below(&r, 2);
        s.streams = s.key_heads * repeat[rng_below(&r, 5)];
        s.heads = rng_below(&r, 2) ? s.key_heads : s.streams;
        s.key_dim = key_dims[rng_below(&r, 4)];
        s.value_dim = value_dims[rng_below(&r, 4)];
        s.width = 1 + rng_below(&r, 4);
        s.packed = rng_below(&r, 2);
        s.absent = rng_below(&r, 2) ? " bias " : "";
        s.act = acts[rng_below(&r, 3)];
        s.wide = rng_below(&r, 2) ? s.act : WEFT_F32;
        s.param = acts[rng_below(&r, 3)];
        s.stream_layout = (layout)rng_below(&r, 2);
        s.pad = rng_below(&r, 2) ? 4 : 0; /* rows that are 8-byte aligned */
        s.misalign = (int)rng_below(&r, 2) * 4;
        s.seed = rng_next(&r);
        s.gdn = weft_gdn_defaults();
        s.gdn.activation = rng_below(&r, 4) ? WEFT_GDN_SILU : WEFT_GDN_LINEAR;
        s.gdn.l2norm = rng_below(&r, 4) != 0;
        s.gdn.rounding = rounding;
        grid_compare(&s);
    }
}

static void shapes_of_models(void **state)
{
    (void)state;
    sweep("gdn_pre_fwd", WEFT_GDN_THROUGH, test_quick() ? 4 : 40);
    sweep("gdn_pre_bwd", WEFT_GDN_THROUGH, test_quick() ? 4 : 40);
    test_verdict();
}

/* Rounded where the option says, and nowhere else: bounds contain a step of the activation type only where an error can
 * tip a rounding over. It does change results. */
static void parity(void **state)
{
    (void)state;
    sweep("gdn_pre_fwd", WEFT_GDN_PARITY, test_quick() ? 3 : 20);
    sweep("gdn_pre_bwd", WEFT_GDN_PARITY, test_quick() ? 3 : 20);
    spec s = {.op = "gdn_pre_fwd", .tokens = 1, .steps = 50, .streams = 2, .channels = 64, .act = WEFT_BF16};
    spec t = s;
    t.gdn = weft_gdn_defaults();
    t.gdn.rounding = WEFT_GDN_PARITY;
    problem *a = problem_make(&s), *b = problem_make(&t);
    int64_t differ = 0;
    problem_must_run(a, on_cpu(WEFT_ISA_BEST, 1));
    problem_must_run(b, on_cpu(WEFT_ISA_BEST, 1));
    const arg *x = problem_arg(a, "query"), *y = problem_arg(b, "query");
    for (int64_t k = 0; k < x->elements; k++) differ += arg_get(x, k) != arg_get(y, k);
    if (differ < x->elements / 10 || differ > x->elements / 2)
        test_failed("parity changes %lld of %lld elements", (long long)differ, (long long)x->elements);
    problem_free(a);
    problem_free(b);
    test_verdict();
}

/* ---- edges ------------------------------------------------------------------------------------------------------------------ */

/* Gates of every size beside parameters of every size. */
enum { LOGS = 8, INPUTS = 14 };
static const double gate_inputs[INPUTS] = {-1e30, -1e4, -200, -120, -88, -40, -17.5,
                                           -16.5, 0,    17,   40,   88,  200, 1e4};

static problem *edge_problem(const char *op, const double *logs)
{
    spec s = {.op = op, .tokens = 1, .steps = INPUTS, .streams = LOGS, .channels = 4};
    problem *p = problem_make(&s);
    arg *d_g = problem_arg(p, "d_g");
    for (int h = 0; h < LOGS; h++) {
        arg_set(problem_arg(p, "a_log"), h, logs[h]);
        arg_set(problem_arg(p, "dt_bias"), h, 0);
        for (int t = 0; t < INPUTS; t++) {
            arg_set(problem_arg(p, "a"), t * LOGS + h, gate_inputs[t]);
            arg_set(problem_arg(p, "b"), t * LOGS + h, gate_inputs[INPUTS - 1 - t]);
            if (d_g) arg_set(d_g, t * LOGS + h, 1e-3);
        }
    }
    problem_seal(p);
    return p;
}

/* Finite where the mathematics is, and never NaN. */
static void expect_finite_gates(problem *p, const double *logs)
{
    const arg *g = problem_arg(p, "g"), *d_a = problem_arg(p, "d_a");
    const arg *got = g && arg_is_output(g) ? g : d_a;
    for (int t = 0; t < INPUTS; t++)
        for (int h = 0; h < LOGS; h++) {
            double x = gate_inputs[t], f = got == g ? fmax(x, 0) + log1p(exp(-fabs(x))) : 1e-3 / (1 + exp(-x));
            double exact = x < -40 ? exp(logs[h] + x) * (got == g ? 1 : 1e-3) : exp(logs[h]) * f;
            double value = arg_get(got, t * LOGS + h);
            if (isnan(value) || (exact < 3e38 && !isfinite(value)))
                test_failed("%s: a_log %g, a %g: got %g, want %g", got->name, logs[h], x, value, -exact);
        }
}

static void gates_at_the_edges(void **state)
{
    (void)state;
    static const double within[LOGS] = {-(double)INFINITY, -200, -80, -3, 0, 5, 40, 75};
    static const double beyond[LOGS] = {-(double)INFINITY, 80, 88, 89, 95, 120, 150, 170};
    static const char *const ops[] = {"gdn_pre_fwd", "gdn_pre_bwd"};
    weft_exec execs[GRID_EXECS];
    int count = grid_execs(execs, 1);
    for (int o = 0; o < 2; o++) {
        problem *p = edge_problem(ops[o], within), *q = edge_problem(ops[o], beyond);
        grid_compare_expectation(p, on_ref());
        for (int e = 0; e < count; e++) {
            if (!weft_op_has(p->op, execs[e].backend)) continue;
            grid_compare_expectation(p, execs[e]);
            expect_finite_gates(p, within);
            problem_must_run(q, execs[e]);
            expect_finite_gates(q, beyond);
        }
        problem_free(p);
        problem_free(q);
    }
    test_verdict();
}

/* Rows of zeros, of tiny and of huge numbers: the norm neither divides by zero nor overflows into NaN. */
static void norms_at_the_edges(void **state)
{
    (void)state;
    static const double sizes[] = {0, 1e-20, 1e-5, 1e-3, 1, 1e10, 1e18, 3e19, 1e37};
    static const char *const ops[] = {"gdn_pre_fwd", "gdn_pre_bwd"};
    weft_exec execs[GRID_EXECS];
    int count = grid_execs(execs, 1);
    for (int o = 0; o < 2; o++)
        for (int k = 0; k < 9; k++)
            for (int e = 0; e < count; e++) {
                spec s = {.op = ops[o], .tokens = 2, .steps = 6, .streams = 2, .channels = 20, .width = 1};
                s.absent = " bias state ";
                problem *p = problem_make(&s);
                if (!weft_op_has(p->op, execs[e].backend)) {
                    problem_free(p);
                    continue;
                }
                for (int64_t i = 0; i < problem_arg(p, "q")->elements; i++) {
                    arg_set(problem_arg(p, "q"), i, sizes[k] * (i % 7 - 2));
                    arg_set(problem_arg(p, "k"), i, sizes[k] * (i % 5 - 2));
                }
                problem_seal(p);
                problem_must_run(p, execs[e]);
                for (int i = 0; i < p->num_args; i++)
                    for (int64_t m = 0; arg_is_output(&p->arg[i]) && m < p->arg[i].elements; m++)
                        if (isnan(arg_get(&p->arg[i], m))) {
                            test_failed("%s: rows of %g: %s is NaN", s.op, sizes[k], p->arg[i].name);
                            break;
                        }
                problem_free(p);
            }
    test_verdict();
}

/* silu and its derivative over all of their range, where one tap makes u of the input itself. The bounds are those of docs/reference/math.md
 * with one rounding of u, the one that the convolution leaves to the exponential; none where u is rounded before (parity). */
enum { SWEEP_STEPS = 256, SWEEP_DIM = 128 };

static double sweep_input(int64_t k)
{
    static const double far[] = {-3e38, -1e30, -1e4, -88.8, 88.8, 1e4, 1e30, 3e38};
    int64_t near = (int64_t)SWEEP_STEPS * SWEEP_DIM - 8;
    return (double)(float)(k < near ? 200.0 * (double)k / (double)near - 100.0 : far[k - near]);
}

static problem *sweep_problem(const char *op, weft_gdn_rounding rounding)
{
    spec s = {.op = op, .tokens = 1, .steps = SWEEP_STEPS, .streams = 1, .channels = 1, .key_heads = 1, .width = 4};
    s.key_dim = s.value_dim = SWEEP_DIM;
    s.absent = " bias d_bias state final_state d_state d_final_state ";
    s.gdn = weft_gdn_defaults();
    s.gdn.rounding = rounding;
    problem *p = problem_make(&s);
    arg *v = problem_arg(p, "v"), *weight = problem_arg(p, "weight"), *up = problem_arg(p, "d_value");
    for (int64_t k = 0; k < v->elements; k++) {
        arg_set(v, k, sweep_input(k));
        if (up) arg_set(up, k, 1);
    }
    for (int64_t c = 2 * SWEEP_DIM; c < 3 * SWEEP_DIM; c++)
        for (int j = 0; j < 4; j++) arg_set(weight, c * 4 + j, j == 3);
    problem_seal(p);
    return p;
}

static void expect_sweep(problem *p, weft_exec exec, bool parity)
{
    const double u = 0x1p-24, flushed = 0x1p-126;
    const arg *y = problem_arg(p, "value"), *slope = problem_arg(p, "d_v");
    const arg *got = y && arg_is_output(y) ? y : slope;
    for (int64_t k = 0; k < got->elements; k++) {
        double x = sweep_input(k), s = 1 / (1 + exp(-x)), c = 1 / (1 + exp(x)), exact = s * (1 + x * c);
        double bound = 10 * u * s * (1 + fabs(x) * c) + (1 + fabs(x)) * flushed;
        if (!parity) bound += 0.5 * fabs(x) * u;
        if (got == y) {
            bound = 6 * u * fabs(x * s) + fabs(exact) * fabs(x) * u + fabs(x) * flushed;
            exact = x * s;
        }
        if (!(fabs(arg_get(got, k) - exact) <= bound))
            test_failed("%s: %s of %.9g: got %.9g, want %.9g, bound %.3g", exec_name(exec), got->name, x,
                        arg_get(got, k), exact, bound);
    }
}

static void activations_of_every_size(void **state)
{
    (void)state;
    static const char *const ops[] = {"gdn_pre_fwd", "gdn_pre_bwd"};
    weft_exec execs[GRID_EXECS];
    int count = grid_execs(execs, 1);
    for (int o = 0; o < 4; o++) {
        problem *p = sweep_problem(ops[o & 1], o & 2 ? WEFT_GDN_PARITY : WEFT_GDN_THROUGH);
        for (int e = 0; e < count; e++) {
            if (!weft_op_has(p->op, execs[e].backend)) continue;
            problem_must_run(p, execs[e]);
            expect_sweep(p, execs[e], o & 2);
        }
        problem_free(p);
    }
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(outputs_within_ulps),
        cmocka_unit_test(gradients_within_norms),
        cmocka_unit_test(parameter_gradients_by_their_terms),
        cmocka_unit_test(shapes_of_models),
        cmocka_unit_test(parity),
        cmocka_unit_test(gates_at_the_edges),
        cmocka_unit_test(norms_at_the_edges),
        cmocka_unit_test(activations_of_every_size),
    };
    return suite_run("gdn_accept", tests);
}
