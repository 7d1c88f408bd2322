/* SPDX-License-Identifier: Apache-2.0
 *
 * Without a residual mix: the bits of a mix that is the identity, and streams that do not know each other. */
#include "support/suite.h"

static const weft_dtype acts[] = {WEFT_F32, WEFT_BF16, WEFT_F16};

static bool has_res(const char *name)
{
    return strcmp(name, "res") == 0 || (strlen(name) > 4 && strcmp(name + strlen(name) - 4, ".res") == 0);
}

/* The same call with a res that is the identity. */
static problem *with_identity(const problem *p)
{
    spec s = p->spec;
    s.absent = " d_res ";
    problem *q = problem_make(&s);
    for (int i = 0; i < q->num_args; i++) {
        arg *to = &q->arg[i];
        const arg *from = problem_arg((problem *)(uintptr_t)p, to->name);
        const int64_t n = s.streams;
        if (!to->guard.block || (arg_is_output(to) && !arg_adds(to))) continue;
        if (has_res(to->name))
            for (int64_t k = 0; k < to->elements; k++) arg_set(to, k, k / n % n == k % n);
        else if (from && from->guard.block)
            for (int64_t k = 0; k < to->elements; k++) arg_set(to, k, arg_get(from, k));
    }
    problem_seal(q);
    return q;
}

static void compare_outputs(const problem *p, const problem *q, const char *what)
{
    char where[80];
    for (int i = 0; i < p->num_args; i++) {
        const arg *a = &p->arg[i], *b = problem_arg((problem *)(uintptr_t)q, a->name);
        if (!a->guard.block || !arg_is_output(a)) continue;
        for (int64_t k = 0; k < a->elements; k++)
            if (memcmp(arg_at(a, k), arg_at(b, k), weft_dtype_size(a->view->dtype)) != 0) {
                test_failed("%s on %s: %s%s: got %.9g, want %.9g as with the identity", problem_text(p), what,
                            a->name, arg_coordinate(a, k, where, sizeof where), arg_get(a, k), arg_get(b, k));
                break;
            }
    }
}

/* Merges; of a boundary forward alone, and there on the CPU: elsewhere another path may sum in another order. */
static void bits_of_the_identity(void **state)
{
    (void)state;
    static const char *const ops[] = {"mhc_post_fwd", "mhc_post_bwd", "mhc_replay_fwd", "mhc_boundary_fwd",
                                      "mhc_boundary_bwd"};
    static const int64_t streams[] = {4, 2, 8, 3, 12};
    weft_exec execs[GRID_EXECS];
    const int count = grid_execs(execs, 2);
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        for (int v = 0; v < 15; v++) {
            spec s = {.op = ops[i],
                      .tokens = 1 + v * 7 % 20,
                      .streams = streams[v % 5],
                      .channels = v % 2 ? 64 : 33,
                      .act = acts[v % 3],
                      .stream_layout = (layout)(v / 3 % LAYOUT_COUNT),
                      .add = v & 4,
                      .absent = " res d_res "};
            s.wide = v & 2 ? s.act : WEFT_F32;
            if (v % 4 == 3) s.dropout = (weft_dropout){.p = 0.25, .seed = 5, .site = 2, .shared = v & 1};
            for (int e = 0; e < count; e++) {
                if (execs[e].backend == WEFT_BACKEND_CUDA && i > 2) continue;
                problem *p = problem_make(&s), *q = with_identity(p);
                problem_must_run(p, execs[e]);
                problem_must_run(q, execs[e]);
                compare_outputs(p, q, exec_name(execs[e]));
                problem_free(p);
                problem_free(q);
            }
        }
    test_verdict();
}

/* What is not finite in one stream is in no other: forward from x to y, backward from d_y to d_x. */
static void streams_apart(void **state)
{
    (void)state;
    static const struct {
        const char *op, *in, *out;
    } ways[] = {{"mhc_post_fwd", "x", "y"},
                {"mhc_post_bwd", "d_y", "d_x"},
                {"mhc_replay_fwd", "x", "layers[2].y"},
                {"mhc_boundary_fwd", "x", "y"}};
    static const double poisons[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};
    weft_exec execs[GRID_EXECS];
    const int count = grid_execs(execs, 1);
    execs[count < GRID_EXECS ? count : GRID_EXECS - 1] = on_ref();
    for (size_t w = 0; w < sizeof ways / sizeof *ways; w++)
        for (int v = 0; v < 12; v++)
            for (int e = 0; e <= count && e < GRID_EXECS; e++) {
                spec s = {.op = ways[w].op, .tokens = 3, .streams = v % 4 == 3 ? 5 : 4, .channels = v & 1 ? 16 : 7};
                s.act = s.wide = acts[v % 3];
                s.independent = true;
                s.stream_layout = (layout)(v / 4);
                s.absent = " bias sub_weight v "; /* streams alone */
                problem *p = problem_make(&s);
                const int64_t n = s.streams, channels = s.channels, bad = v % n;
                arg *in = problem_arg(p, ways[w].in), *out = problem_arg(p, ways[w].out);
                for (int64_t c = 0; c < channels; c++) arg_set(in, (n + bad) * channels + c, poisons[v % 3]);
                problem_seal(p);
                problem_must_run(p, execs[e]);
                for (int64_t k = 0; k < out->elements; k++) {
                    const bool poisoned = k / channels == n + bad;
                    if (isfinite(arg_get(out, k)) != poisoned) continue;
                    test_failed("%s on %s: %s, element %lld: got %g", problem_text(p), exec_name(execs[e]),
                                out->name, (long long)k, arg_get(out, k));
                    break;
                }
                problem_free(p);
            }
    test_verdict();
}

/* Rows of a site alone do not tell its form: 8 are two streams with a mix, and four without. */
static void rows_of_two_forms(void **state)
{
    (void)state;
    float h[2 * 8], ms[2] = {1, 0.5f}, alpha[3] = {0.5f, 2, 0}, beta[8] = {0}, pre[2 * 4], post[2 * 4];
    for (int k = 0; k < 16; k++) h[k] = (float)k / 8 - 1;
    const weft_exec exec = on_cpu(WEFT_ISA_BEST, 1);
    for (int scales = 2; scales <= 3; scales++) {
        const int64_t n = scales == 2 ? 4 : 2;
        weft_mhc_coef_fwd_args a = {.struct_size = sizeof a,
                                    .h = weft_dense2(h, WEFT_F32, 2, 8),
                                    .ms = weft_dense1(ms, WEFT_F32, 2),
                                    .alpha = weft_dense1(alpha, WEFT_F32, scales),
                                    .beta = weft_dense1(beta, WEFT_F32, 8),
                                    .pre = weft_dense2(pre, WEFT_F32, 2, n),
                                    .post = weft_dense2(post, WEFT_F32, 2, n)};
        weft_mhc_preset_numerics(WEFT_PRESET_HY_V4, &a.numerics);
        run_plain("mhc_coef_fwd", exec, &a);
        for (int64_t t = 0; t < 2; t++)
            for (int64_t i = 0; i < n; i++) {
                const double inv = 1 / sqrt((double)ms[t] + 1e-5);
                const double want_pre = 1 / (1 + exp(-0.5 * (double)h[8 * t + i] * inv)) + 1e-6;
                const double want_post = 2 / (1 + exp(-2 * (double)h[8 * t + n + i] * inv)) + 1e-6;
                assert_true(fabs((double)pre[n * t + i] - want_pre) < 1e-6);
                assert_true(fabs((double)post[n * t + i] - want_post) < 2e-6);
            }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bits_of_the_identity),
        cmocka_unit_test(streams_apart),
        cmocka_unit_test(rows_of_two_forms),
    };
    return suite_run("independent", tests);
}
