/* SPDX-License-Identifier: Apache-2.0
 *
 * Optimisers: AdamW against its equations, Muon's steps towards orthogonality, cpu against ref, bad arguments. */
#include "support/suite.h"

#include <weft/optim.h>

#include "check/random.h"
#include "support/memory.h"

static void adamw_follows_its_equations(void **state)
{
    (void)state;
    enum { COUNT = 37 };
    double p[COUNT], m[COUNT] = {0}, v[COUNT] = {0}, g[COUNT], q[COUNT], first[COUNT] = {0}, second[COUNT] = {0};
    float pf[COUNT], mf[COUNT] = {0}, vf[COUNT] = {0}, gf[COUNT];
    rng r = {3};
    weft_exec ref = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_REF),
              cpu = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CPU);
    for (int i = 0; i < COUNT; i++) pf[i] = (float)(p[i] = q[i] = rng_normal(&r));
    for (int step = 1; step <= 20; step++) {
        for (int i = 0; i < COUNT; i++) gf[i] = (float)(g[i] = rng_normal(&r));
        weft_adamw_args a = {.struct_size = sizeof a,
                             .parameter = p,
                             .first = m,
                             .second = v,
                             .gradient = g,
                             .count = COUNT,
                             .step = step,
                             .rate = 0.01,
                             .beta1 = 0.9,
                             .beta2 = 0.95,
                             .eps = 1e-8,
                             .decay = 0.1,
                             .scale = 0.5};
        assert_int_equal(weft_adamw(&ref, &a), WEFT_OK);
        a.parameter = pf, a.first = mf, a.second = vf, a.gradient = gf;
        assert_int_equal(weft_adamw(&cpu, &a), WEFT_OK);
        for (int i = 0; i < COUNT; i++) {
            double h = 0.5 * g[i];
            first[i] = 0.9 * first[i] + 0.1 * h;
            second[i] = 0.95 * second[i] + 0.05 * h * h;
            q[i] -= 0.01 * 0.1 * q[i];
            q[i] -= 0.01 * (first[i] / (1 - pow(0.9, step))) / (sqrt(second[i] / (1 - pow(0.95, step))) + 1e-8);
        }
    }
    for (int i = 0; i < COUNT; i++) {
        assert_true(fabs(p[i] - q[i]) < 1e-12);
        assert_true(fabs((double)pf[i] - q[i]) < 1e-5); /* 20 steps, each with two roundings of a number below 4 */
    }
}

/* The update of a random matrix has singular values near 1. Where their squares are between 0.4 and 1.6, so is the diagonal of
 * the Gram matrix of its shorter side, and no other entry is larger than half of the difference. */
static void muon_orthogonalises(void **state)
{
    (void)state;
    static const int64_t shapes[][2] = {{8, 24}, {24, 8}, {16, 16}};
    for (int k = 0; k < 3; k++) {
        int64_t rows = shapes[k][0], columns = shapes[k][1], count = rows * columns;
        double *p = must_alloc((size_t)count * 8), *m = must_alloc((size_t)count * 8),
               *g = must_alloc((size_t)count * 8);
        float *pf = must_alloc((size_t)count * 4), *mf = must_alloc((size_t)count * 4),
              *gf = must_alloc((size_t)count * 4);
        rng r = {(uint64_t)k};
        size_t bytes;
        for (int64_t i = 0; i < count; i++) {
            p[i] = m[i] = 0, pf[i] = mf[i] = 0;
            gf[i] = (float)(g[i] = rng_normal(&r));
        }
        weft_muon_args a = {.struct_size = sizeof a,
                            .parameter = p,
                            .moment = m,
                            .gradient = g,
                            .rows = rows,
                            .columns = columns,
                            .rate = -1,
                            .momentum = 0.95,
                            .scale = 1};
        weft_exec exec = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_REF);
        assert_int_equal(weft_muon_workspace(&exec, &a, &bytes), WEFT_OK);
        exec.workspace = must_alloc(exec.workspace_bytes = bytes);
        assert_int_equal(weft_muon(&exec, &a), WEFT_OK);
        free(exec.workspace);
        exec.backend = WEFT_BACKEND_CPU;
        a.parameter = pf, a.moment = mf, a.gradient = gf;
        assert_int_equal(weft_muon_workspace(&exec, &a, &bytes), WEFT_OK);
        exec.workspace = must_alloc(exec.workspace_bytes = bytes);
        assert_int_equal(weft_muon(&exec, &a), WEFT_OK);
        exec.workspace_bytes--;
        assert_int_equal(weft_muon(&exec, &a), WEFT_ERR_WORKSPACE);
        free(exec.workspace);
        const double scale = rows > columns ? sqrt((double)rows / (double)columns) : 1;
        const bool wide = rows < columns;
        const int64_t shorter = wide ? rows : columns, longer = wide ? columns : rows;
        const int64_t across = wide ? columns : 1, along = wide ? 1 : columns;
        for (int64_t i = 0; i < shorter; i++)
            for (int64_t other = 0; other <= i; other++) {
                double dot = 0;
                for (int64_t j = 0; j < longer; j++)
                    dot += p[i * across + j * along] * p[other * across + j * along];
                dot /= scale * scale;
                assert_true(i == other ? dot > 0.4 && dot < 1.6 : fabs(dot) < 0.6);
            }
        for (int64_t i = 0; i < count; i++) assert_true(fabs((double)pf[i] - p[i]) < 1e-4);
        free(p), free(m), free(g), free(pf), free(mf), free(gf);
    }
}

static void sums(void **state)
{
    (void)state;
    weft_exec cpu = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CPU);
    float v[100];
    double sum;
    for (int i = 0; i < 100; i++) v[i] = (float)i;
    assert_int_equal(weft_sum_squares(&cpu, v, 100, &sum), WEFT_OK);
    assert_true(sum == 328350);
    assert_int_equal(weft_sum_squares(&cpu, NULL, 3, &sum), WEFT_ERR_ARGUMENT);
}

static void bad_arguments(void **state)
{
    (void)state;
    weft_exec cpu = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CPU);
    float x[4] = {0};
    const weft_adamw_args good = {.struct_size = sizeof good,
                                  .parameter = x,
                                  .first = x + 1,
                                  .second = x + 2,
                                  .gradient = x + 3,
                                  .count = 1,
                                  .step = 1,
                                  .beta1 = 0.9,
                                  .beta2 = 0.9,
                                  .eps = 1,
                                  .scale = 1};
    weft_adamw_args a;
    assert_int_equal(weft_adamw(&cpu, &good), WEFT_OK);
#define BAD(...)                                                                                                   \
    do {                                                                                                           \
        a = good;                                                                                                  \
        __VA_ARGS__;                                                                                               \
        assert_int_equal(weft_adamw(&cpu, &a), WEFT_ERR_ARGUMENT);                                                 \
    } while (0)
    BAD(a.struct_size = 0);
    BAD(a.gradient = NULL);
    BAD(a.count = -1);
    BAD(a.step = 0);
    BAD(a.beta1 = 1);
    BAD(a.eps = 0);
    BAD(a.rate = (double)NAN);
    BAD(a.eps = (double)INFINITY);
    BAD(a.decay = (double)INFINITY);
    BAD(a.scale = (double)NAN);
    BAD(a.count = ((int64_t)1 << 48) + 1);
    BAD(a.count = INT64_MAX);
#undef BAD
    weft_muon_args m = {.struct_size = sizeof m, .rows = 0, .columns = 2};
    size_t bytes;
    assert_int_equal(weft_muon_workspace(&cpu, &m, &bytes), WEFT_ERR_ARGUMENT);
}

/* Arrays that lie in each other, in the workspace, or off their elements. */
static void bad_arrays(void **state)
{
    (void)state;
    enum { ROWS = 3, COLUMNS = 4, COUNT = ROWS * COLUMNS };
    for (int f64 = 0; f64 < 2; f64++) {
        weft_exec exec = WEFT_STRUCT(weft_exec, .backend = f64 ? WEFT_BACKEND_REF : WEFT_BACKEND_CPU);
        const size_t value = f64 ? 8 : 4, bytes = COUNT * value;
        size_t need;
        weft_muon_args m = {.struct_size = sizeof m, .rows = ROWS, .columns = COLUMNS, .rate = 0.1, .scale = 1};
        assert_int_equal(weft_muon_workspace(&exec, &m, &need), WEFT_OK);
        /* five arrays of doubles' size beside each other, and the workspace */
        double factor = 1;
        char *all = must_alloc(5 * COUNT * 8), *work = must_alloc(need + 64);
        memset(all, 0, 5 * COUNT * 8);
        char *a[5];
        for (size_t i = 0; i < 5; i++) a[i] = all + i * COUNT * 8;
        exec.workspace = work, exec.workspace_bytes = need;
        const weft_adamw_args adam = {.struct_size = sizeof adam,
                                      .parameter = a[0],
                                      .first = a[1],
                                      .second = a[2],
                                      .gradient = a[3],
                                      .count = COUNT,
                                      .step = 1,
                                      .beta1 = 0.9,
                                      .beta2 = 0.9,
                                      .eps = 1,
                                      .scale = 1,
                                      .factor = &factor};
        assert_int_equal(weft_adamw(&exec, &adam), WEFT_OK);
        const size_t adam_fields[] = {offsetof(weft_adamw_args, parameter), offsetof(weft_adamw_args, first),
                                      offsetof(weft_adamw_args, second), offsetof(weft_adamw_args, gradient)};
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) {
                weft_adamw_args b = adam;
                char *at = i == j ? a[i] + 1 : a[j] + bytes - value;
                memcpy((char *)&b + adam_fields[i], &at, sizeof at);
                assert_int_equal(weft_adamw(&exec, &b), i == j ? WEFT_ERR_ARGUMENT : WEFT_ERR_OVERLAP);
            }
        weft_adamw_args inside = adam;
        inside.factor = (const double *)(void *)a[1];
        assert_int_equal(weft_adamw(&exec, &inside), WEFT_ERR_OVERLAP);
        m.parameter = a[0], m.moment = a[1], m.gradient = a[2], m.factor = &factor;
        assert_int_equal(weft_muon(&exec, &m), WEFT_OK);
        const size_t muon_fields[] = {offsetof(weft_muon_args, parameter), offsetof(weft_muon_args, moment),
                                      offsetof(weft_muon_args, gradient)};
        for (int i = 0; i < 3; i++) {
            weft_muon_args b = m;
            char *const places[] = {work, work + (need - 1) / 8 * 8, a[(i + 1) % 3], a[i] + 2};
            for (int k = 0; k < 4; k++) {
                memcpy((char *)&b + muon_fields[i], &places[k], sizeof places[k]);
                assert_int_equal(weft_muon(&exec, &b), k == 3 ? WEFT_ERR_ARGUMENT : WEFT_ERR_OVERLAP);
                assert_non_null(strstr(weft_last_error(), k < 2 ? "exec.workspace" : "muon"));
            }
        }
        double *sum = (double *)(void *)a[4];
        assert_int_equal(weft_sum_squares(&exec, a[0], COUNT, sum), WEFT_OK);
        assert_int_equal(weft_sum_squares(&exec, a[0] + 1, COUNT - 1, sum), WEFT_ERR_ARGUMENT);
        assert_int_equal(weft_sum_squares(&exec, a[4], COUNT, sum), WEFT_ERR_OVERLAP);
        assert_int_equal(weft_sum_squares(&exec, a[0], COUNT, (double *)(void *)(a[4] + 4)), WEFT_ERR_ARGUMENT);
        const weft_clip_args clip = {
            .struct_size = sizeof clip, .sums = sum, .count = 1, .norm = sum + 1, .factor = sum + 2};
        weft_clip_args c = clip;
        assert_int_equal(weft_clip(&exec, &c), WEFT_OK);
        c.factor = c.norm;
        assert_int_equal(weft_clip(&exec, &c), WEFT_ERR_OVERLAP);
        c = clip, c.norm = sum;
        assert_int_equal(weft_clip(&exec, &c), WEFT_ERR_OVERLAP);
        free(all);
        free(work);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(adamw_follows_its_equations),
        cmocka_unit_test(muon_orthogonalises),
        cmocka_unit_test(sums),
        cmocka_unit_test(bad_arguments),
        cmocka_unit_test(bad_arrays),
    };
    return suite_run("optim", tests);
}
