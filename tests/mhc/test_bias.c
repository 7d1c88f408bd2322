/* SPDX-License-Identifier: Apache-2.0
 *
 * Rounding has no drift: over many elements the signed error of 16-bit results is zero within chance. A bound on
 * single errors cannot see truncation, or ties that always go up; a mean can, and a residual stream adds up what
 * drifts. */
#include "check/expect.h"
#include "support/suite.h"

typedef struct sum {
    double count, mean, square;
} sum;

static void note(sum *s, double e)
{
    s->count++;
    s->mean += e;
    s->square += e * e;
}

static bool drifts(const sum *s, double *mean, double *error)
{
    *mean = s->mean / s->count;
    *error = sqrt((s->square / s->count - *mean * *mean) / s->count);
    return !(fabs(*mean) <= 5 * *error);
}

/* Error in units of the last place, once as it is and once towards or away from zero. */
static void check(const problem *p, const arg *a, const arg *exact, weft_exec exec)
{
    sum plain = {0}, outward = {0};
    double mean, error, unit = 2 * element_unit(a->view->dtype);
    for (int64_t k = 0; k < a->elements; k++) {
        int exponent;
        double want = arg_get(exact, k);
        if (want == 0 || fabs(want) < 1e-4) continue; /* away from the denormals of f16 */
        frexp(want, &exponent);
        double e = (arg_get(a, k) - want) / ldexp(unit, exponent - 1);
        note(&plain, e);
        note(&outward, want > 0 ? e : -e);
    }
    if (plain.count < 2000) return;
    if (drifts(&plain, &mean, &error))
        test_failed("%s on %s: %s: the mean error is %.4f +- %.4f ulp", problem_text(p), exec_name(exec), a->name,
                    mean, error);
    if (drifts(&outward, &mean, &error))
        test_failed("%s on %s: %s: the mean error away from zero is %.4f +- %.4f ulp", problem_text(p),
                    exec_name(exec), a->name, mean, error);
}

static void rounding_has_no_drift(void **state)
{
    (void)state;
    weft_exec execs[GRID_EXECS];
    int count = grid_execs(execs, 2);
    for (int32_t i = 0; i < weft_op_count(); i++) {
        const char *op = weft_op_at(i)->name;
        if (!expect_is_single(op) || strncmp(op, "gdn", 3) == 0) continue;
        for (int v = 0; v < 2; v++) {
            weft_dtype narrow = v ? WEFT_F16 : WEFT_BF16;
            /* fp32 inputs beside the activations: products of two 16-bit numbers lie on a lattice with ties of its
             * own */
            spec s = {.op = op, .tokens = 400, .streams = 4, .channels = 64, .act = narrow};
            problem *p = problem_make(&s);
            for (int k = 0; k < p->num_args; k++) {
                arg *a = &p->arg[k];
                if (arg_is_output(a) && a->info->type != WEFT_TYPE_FULL) arg_rebind(a, narrow, false);
            }
            problem_seal(p);
            problem *exact = problem_twin(p);
            problem_must_run(exact, on_ref());
            for (int e = -1; e < count; e++) {
                weft_exec exec = e < 0 ? on_ref() : execs[e];
                problem_must_run(p, exec);
                for (int k = 0; k < p->num_args; k++)
                    if (arg_is_output(&p->arg[k]) && p->arg[k].view->dtype == narrow)
                        check(p, &p->arg[k], &exact->arg[k], exec);
            }
            problem_free(p);
            problem_free(exact);
        }
    }
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(rounding_has_no_drift)};
    return suite_run("bias", tests);
}
