/* SPDX-License-Identifier: Apache-2.0
 *
 * The model and the optimisers on a GPU: f32 and bf16 against the reference, the tensor-core attention at the edges of its
 * tiles, recompute and repetition bit for bit, gains and bad values, clipping that keeps an update from happening. */
#include "support/suite.h"

#include <weft/optim.h>

#include "check/device.h"
#include "check/random.h"
#include "support/device.h"
#include "support/gpt.h"
#include "support/memory.h"

/* Odd: no vectors, 10 channels a head. Wide: vectors, tensor cores, 64 channels a head, no whole number of tiles. */
static weft_model_config config_of(const gpt_variant *v, weft_dtype dtype, int wide)
{
    weft_model_config c = gpt_variant_config(v, dtype);
    c.context = 70, c.channels = 20;
    if (wide) {
        c.channels = 128, c.hidden = 96, c.vocab = 64;
        if (v->residual != WEFT_RESIDUAL_PLAIN) c.streams = 4;
    }
    return c;
}

/* cuBLASLt where it is; tests say so where it is not. */
static int open_blas(weft_blas *blas)
{
    weft_exec exec = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CUDA);
    if (weft_blas_open_for(&exec, NULL, blas) == WEFT_OK) return 1;
    fprintf(stderr, "  %s: the built-in kernel alone is tested\n", weft_last_error());
    return 0;
}

/* The largest, over the tensors, of |got - want| beyond `floor` of the whole gradient's norm, by the norm of want. */
static double worst_tensor(const gpt *got, const gpt *want, double floor, char name[64])
{
    int32_t tensors;
    double all = 0, worst = 0;
    for (int64_t i = 0; i < want->elements; i++) all += gpt_gradient(want, i) * gpt_gradient(want, i);
    weft_model_param_count(&want->config, &tensors, NULL);
    for (int32_t t = 0; t < tensors; t++) {
        weft_model_param p;
        double error = 0, norm = 0;
        weft_model_param_at(&want->config, t, &p);
        for (int64_t i = p.offset; i < p.offset + p.count; i++) {
            double w = gpt_gradient(want, i), d = gpt_gradient(got, i) - w;
            error += d * d, norm += w * w;
        }
        double beyond = sqrt(error) - floor * sqrt(all), ratio = beyond <= 0 ? 0 : beyond / sqrt(norm);
        if (isnan(worst) || ratio <= worst) continue; /* what is no number is the worst, and stays it */
        worst = ratio;
        snprintf(name, 64, "%s", p.name);
    }
    return worst;
}

/* ---- against the reference ------------------------------------------------------------------------------------------------- */

static void f32_follows_the_reference(void **state)
{
    (void)state;
    need_gpu();
    weft_blas blas;
    int has_blas = open_blas(&blas);
    for (int k = 0; k < GPT_VARIANTS; k++)
        for (int way = 0; way < 4; way++) {
            int wide = way & 1, with_blas = way >> 1;
            if (with_blas > has_blas) continue;
            weft_model_config c = config_of(&gpt_variants[k], WEFT_F32, wide), full = c;
            gpt g, wanted;
            char name[64] = "";
            full.dtype = WEFT_F64;
            gpt_open_on(&g, WEFT_BACKEND_CUDA, &c, 2, 70, 0.1);
            gpt_open(&wanted, &full, 2, 70, 0.1);
            g.blas = with_blas ? &blas : NULL;
            double got = gpt_step(&g), want = gpt_step(&wanted), worst = worst_tensor(&g, &wanted, 1e-6, name);
            fprintf(stderr, "  f32 %-34s %s %s: loss off by %.1e, gradients by %.1e (%s)\n", gpt_variants[k].name,
                    wide ? "wide" : "odd", with_blas ? "cublas" : "own", fabs(got - want), worst, name);
            if (!(fabs(got - want) < 1e-5))
                fail_msg("%s: loss %.9g, reference %.9g", gpt_variants[k].name, got, want);
            if (!(worst < 1e-4)) fail_msg("%s: %s: gradient differs by %.2e", gpt_variants[k].name, name, worst);
            gpt_close(&g);
            gpt_close(&wanted);
        }
    weft_blas_close(&blas);
}

/* A value passes through some 15 roundings of 2^-9 on its way through a site and back; that many in one direction are the
 * bound. Small gradients are made of large terms, so a rounding of the whole is allowed on top. */
static void bf16_follows_the_reference(void **state)
{
    (void)state;
    need_gpu();
    weft_blas blas;
    int has_blas = open_blas(&blas);
    const double u = 0x1p-9;
    for (int k = 0; k < GPT_VARIANTS; k++)
        for (int wide = 0; wide < 2; wide++) {
            weft_model_config c = config_of(&gpt_variants[k], WEFT_BF16, wide), full = c;
            gpt g, wanted;
            char name[64] = "";
            full.dtype = WEFT_F64;
            gpt_open_on(&g, WEFT_BACKEND_CUDA, &c, 2, 70, 0.1);
            gpt_open(&wanted, &full, 2, 70, 0.1);
            g.blas = has_blas ? &blas : NULL;
            double got = gpt_step(&g), want = gpt_step(&wanted), worst = worst_tensor(&g, &wanted, u, name);
            fprintf(stderr, "  bf16 %-34s %s: loss off by %.1e, gradients by %.1e (%s)\n", gpt_variants[k].name,
                    wide ? "wide" : "odd", fabs(got - want), worst, name);
            if (!(fabs(got - want) < 16 * u))
                fail_msg("%s: loss %.9g, reference %.9g", gpt_variants[k].name, got, want);
            if (!(worst < 15 * 2 * c.layers * u))
                fail_msg("%s: %s: gradient differs by %.2e", gpt_variants[k].name, name, worst);
            gpt_close(&g);
            gpt_close(&wanted);
        }
    weft_blas_close(&blas);
}

/* One layer, so that the attention's own error shows; lengths around tiles of 64 keys and blocks of 128 queries, heads of 64
 * and of 128 channels. */
static void attention_at_the_edges_of_tiles(void **state)
{
    (void)state;
    need_gpu();
    static const int64_t lengths[] = {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 193, 257};
    const double u = 0x1p-9;
    for (size_t k = 0; k < 2 * (sizeof lengths / sizeof *lengths); k++) {
        const size_t i = k / 2;
        weft_model_config c = config_of(&gpt_variants[0], WEFT_BF16, 1), full;
        gpt g, wanted;
        char name[64] = "";
        c.layers = 1, c.context = 300, c.hidden = 32, c.heads = k % 2 ? 1 : 2;
        full = c, full.dtype = WEFT_F64;
        gpt_open_on(&g, WEFT_BACKEND_CUDA, &c, 2, lengths[i], 0.1);
        gpt_open(&wanted, &full, 2, lengths[i], 0.1);
        double got = gpt_step(&g), want = gpt_step(&wanted), worst = worst_tensor(&g, &wanted, u, name);
        fprintf(stderr, "  length %3lld: loss off by %.1e, gradients by %.1e (%s)\n", (long long)lengths[i],
                fabs(got - want), worst, name);
        if (!(fabs(got - want) < 16 * u) || !(worst < 30 * u))
            fail_msg("length %lld: loss %.6g for %.6g; %s differs by %.2e", (long long)lengths[i], got, want, name,
                     worst);
        gpt_close(&g);
        gpt_close(&wanted);
    }
}

/* ---- a sequence as it grows -------------------------------------------------------------------------------------------------- */

static double logit_of(const char *host, int64_t i)
{
    float value;
    memcpy(&value, host + (size_t)i * sizeof value, sizeof value);
    return (double)value;
}

/* Logits of steps, one token at a time after a first piece, beside those of a forward over all. */
static void steps_follow_the_whole(void **state)
{
    (void)state;
    need_gpu();
    enum { LENGTH = 70, FIRST = 65 };
    for (int k = 0; k < GPT_VARIANTS; k++)
        for (int way = 0; way < 4; way++) {
            const int wide = way & 1, narrow = way >> 1;
            weft_model_config c = config_of(&gpt_variants[k], narrow ? WEFT_BF16 : WEFT_F32, wide);
            const size_t row = (size_t)c.vocab * sizeof(float);
            weft_model_state remembered;
            weft_model_bytes need;
            weft_model m;
            size_t bytes;
            gpt g;
            gpt_open_on(&g, WEFT_BACKEND_CUDA, &c, 1, LENGTH, 0.1);
            g.training = 0;
            gpt_loss(&g);
            char *want = must_alloc(LENGTH * row), *got = must_alloc(LENGTH * row);
            const char *wrong = device_get(want, weft_model_logits(&g.model).data, LENGTH * row);
            assert_null(wrong);
            assert_int_equal(weft_model_state_query(&g.exec, &c, LENGTH, &bytes), WEFT_OK);
            assert_int_equal(weft_model_query(&g.exec, &c, 1, FIRST, &need), WEFT_OK);
            char *memory = device_alloc(bytes), *room = device_alloc(need.total);
            assert_true(memory && room);
            assert_int_equal(weft_model_state_bind(&g.exec, &c, LENGTH, memory, bytes, &remembered), WEFT_OK);
            for (int64_t at = 0, piece = FIRST; at < LENGTH; at += piece, piece = 1) {
                assert_int_equal(weft_model_bind(&g.exec, &c, 1, piece, room, need.total, &m), WEFT_OK);
                weft_model_args args = {.struct_size = sizeof args,
                                        .parameters = g.device.parameters,
                                        .tokens = (const int32_t *)(const void *)g.device.tokens + at};
                if (weft_model_step(&g.exec, &m, &remembered, &args) != WEFT_OK) fail_msg("%s", weft_last_error());
                wrong = device_get(got + (size_t)at * row, weft_model_logits(&m).data, (size_t)piece * row);
                assert_null(wrong);
            }
            double worst = 0, largest = 0;
            for (int64_t i = 0; i < LENGTH * c.vocab; i++) {
                largest = fmax(largest, fabs(logit_of(want, i)));
                worst = value_worst(worst, fabs(logit_of(got, i) - logit_of(want, i)));
            }
            fprintf(stderr, "  %-34s %s %s: logits off by %.1e of %.1e\n", gpt_variants[k].name,
                    narrow ? "bf16" : "f32", wide ? "wide" : "odd", worst, largest);
            /* bf16: as many roundings as on the way through the sites, see above; half of them are backward's. */
            const double limit = narrow ? 15.0 * c.layers * 0x1p-9 * largest : 1e-5 * largest;
            if (!(worst <= limit)) fail_msg("%s: logits differ by %.2e", gpt_variants[k].name, worst);
            free(want), free(got);
            device_free(memory), device_free(room);
            gpt_close(&g);
        }
}

/* ---- bit for bit --------------------------------------------------------------------------------------------------------------- */

static void recompute_changes_no_bit(void **state)
{
    (void)state;
    need_gpu();
    weft_blas blas;
    int has_blas = open_blas(&blas);
    for (int k = WEFT_RESIDUAL_HC; k < WEFT_RESIDUAL_COUNT; k++)
        for (int way = 0; way < 4; way++) {
            gpt_variant v = {"",
                             (weft_residual)k,
                             k == WEFT_RESIDUAL_MHC_SINGLE_PASS ? WEFT_EXIT_MIX : WEFT_EXIT_MEAN,
                             1,
                             0.3,
                             0,
                             0,
                             (weft_mixer)(k % WEFT_MIXER_COUNT)}; /* mhc: hybrid, hc: gdn */
            weft_model_config c = config_of(&v, way & 1 ? WEFT_BF16 : WEFT_F32, way >> 1);
            gpt kept;
            c.layers = 5;
            gpt_open_on(&kept, WEFT_BACKEND_CUDA, &c, 2, 70, 0.1);
            kept.blas = has_blas ? &blas : NULL;
            double want = gpt_step(&kept);
            c.recompute = c.poison = 1;
            for (c.group = 0; c.group <= 5; c.group++) {
                gpt g;
                gpt_open_on(&g, WEFT_BACKEND_CUDA, &c, 2, 70, 0.1);
                g.blas = kept.blas;
                for (int twice = 0; twice < 2; twice++) {
                    double got = gpt_step(&g);
                    assert_memory_equal(&got, &want, sizeof got);
                    assert_memory_equal(g.gradients, kept.gradients, (size_t)g.elements * sizeof(float));
                }
                gpt_close(&g);
            }
            gpt_close(&kept);
        }
    weft_blas_close(&blas);
}

/* ---- what a forward has left ------------------------------------------------------------------------------------------------------ */

static void gains_and_bad_values(void **state)
{
    (void)state;
    need_gpu();
    for (int k = 0; k < WEFT_RESIDUAL_COUNT; k++)
        for (int narrow = 0; narrow < 2; narrow++) {
            weft_model_config c = gpt_config((weft_residual)k, narrow ? WEFT_BF16 : WEFT_F32), full = c;
            weft_model_gains got, want;
            gpt g, wanted;
            char name[64];
            weft_model_param p;
            full.dtype = WEFT_F64;
            gpt_open_on(&g, WEFT_BACKEND_CUDA, &c, 2, 8, 0.3);
            gpt_open(&wanted, &full, 2, 8, 0.3);
            gpt_loss(&g), gpt_loss(&wanted);
            assert_int_equal(weft_model_gain(&g.exec, &g.model, &got), WEFT_OK);
            assert_int_equal(weft_model_gain(&wanted.exec, &wanted.model, &want), WEFT_OK);
            double bound = narrow ? 0.05 : 1e-4;
            if (!(fabs(got.row_mean - want.row_mean) < bound * want.row_mean) ||
                !(fabs(got.row_max - want.row_max) < bound * want.row_max) ||
                !(fabs(got.column_mean - want.column_mean) < bound * want.column_mean) ||
                !(fabs(got.column_max - want.column_max) < bound * want.column_max))
                fail_msg("%s: gains %g %g %g %g, reference %g %g %g %g", weft_residual_name((weft_residual)k),
                         got.row_mean, got.row_max, got.column_mean, got.column_max, want.row_mean, want.row_max,
                         want.column_mean, want.column_max);
            assert_int_equal(weft_model_first_nonfinite(&g.exec, &g.model, name), WEFT_OK);
            assert_string_equal(name, "");
            assert_true(gpt_find(&c, "layers.1.mlp.down.weight", &p));
            gpt_set_parameter(&g, p.offset, (double)NAN);
            gpt_loss(&g);
            assert_int_equal(weft_model_first_nonfinite(&g.exec, &g.model, name), WEFT_OK);
            assert_string_equal(name, "layers.1.mlp.output");
            gpt_close(&g);
            gpt_close(&wanted);
        }
}

/* ---- optimisers ----------------------------------------------------------------------------------------------------------------------- */

enum { ROWS = 96, COLUMNS = 160, COUNT = ROWS * COLUMNS };

/* Arrays of a GPU with the numbers of the host's. */
static float *there(const float *values)
{
    float *p = device_alloc(COUNT * sizeof(float));
    assert_non_null(p);
    assert_null(device_put(p, values, COUNT * sizeof(float)));
    return p;
}

typedef struct state_of {
    double *p, *m, *v, *g; /* of the reference */
    float *dp, *dm, *dv, *dg;
    double *figures; /* two sums, norm, factor; on the GPU */
} state_of;

static state_of open_state(void)
{
    state_of s = {.p = must_alloc(COUNT * 8),
                  .m = must_alloc(COUNT * 8),
                  .v = must_alloc(COUNT * 8),
                  .g = must_alloc(COUNT * 8),
                  .figures = device_alloc(4 * sizeof(double))};
    float *f = must_alloc(COUNT * 4);
    rng r = {11};
    assert_non_null(s.figures);
    for (int i = 0; i < COUNT; i++) f[i] = (float)rng_normal(&r), s.p[i] = (double)f[i], s.m[i] = s.v[i] = 0;
    s.dp = there(f);
    for (int i = 0; i < COUNT; i++) f[i] = (float)rng_normal(&r), s.g[i] = (double)f[i];
    s.dg = there(f);
    memset(f, 0, COUNT * 4);
    s.dm = there(f), s.dv = there(f);
    free(f);
    return s;
}

static void close_state(state_of *s)
{
    void *const host[] = {s->p, s->m, s->v, s->g};
    void *const device[] = {s->dp, s->dm, s->dv, s->dg, s->figures};
    for (size_t i = 0; i < 4; i++) free(host[i]);
    for (size_t i = 0; i < 5; i++) device_free(device[i]);
}

static double worst_of(const float *device, const double *want)
{
    float *got = must_alloc(COUNT * 4);
    double worst = 0;
    assert_null(device_get(got, device, COUNT * 4));
    for (int i = 0; i < COUNT; i++) worst = value_worst(worst, fabs((double)got[i] - want[i]));
    free(got);
    return worst;
}

static void optimisers_follow_the_reference(void **state)
{
    (void)state;
    need_gpu();
    weft_blas blas;
    int has_blas = open_blas(&blas);
    state_of s = open_state();
    weft_exec ref = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_REF),
              cuda = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CUDA);
    double sums[4] = {0, 0}, figures[4], norm, factor;
    cuda.workspace = device_alloc(cuda.workspace_bytes = (size_t)64 << 20);
    assert_non_null(cuda.workspace);

    /* Norm and factor, on the device and on the host. */
    assert_int_equal(weft_sum_squares(&ref, s.g, COUNT, &sums[0]), WEFT_OK);
    assert_int_equal(weft_sum_squares(&ref, s.g, 1001, &sums[1]), WEFT_OK);
    assert_int_equal(weft_sum_squares(&cuda, s.dg, COUNT, s.figures), WEFT_OK);
    assert_int_equal(weft_sum_squares(&cuda, s.dg, 1001, s.figures + 1), WEFT_OK);
    weft_clip_args clip = {.struct_size = sizeof clip, .count = 2, .largest = 3};
    clip.sums = sums, clip.norm = &norm, clip.factor = &factor;
    assert_int_equal(weft_clip(&ref, &clip), WEFT_OK);
    clip.sums = s.figures, clip.norm = s.figures + 2, clip.factor = s.figures + 3;
    assert_int_equal(weft_clip(&cuda, &clip), WEFT_OK);
    assert_null(device_get(figures, s.figures, sizeof figures));
    assert_true(fabs(figures[0] - sums[0]) < 1e-12 * sums[0] && fabs(figures[1] - sums[1]) < 1e-12 * sums[1]);
    assert_true(fabs(figures[2] - norm) < 1e-12 * norm && fabs(figures[3] - factor) < 1e-12);
    assert_true(factor < 0.1);

    for (int step = 1; step <= 5; step++) {
        weft_adamw_args a = {.struct_size = sizeof a,
                             .parameter = s.p,
                             .first = s.m,
                             .second = s.v,
                             .gradient = s.g,
                             .count = COUNT,
                             .step = step,
                             .rate = 0.01,
                             .beta1 = 0.9,
                             .beta2 = 0.95,
                             .eps = 1e-8,
                             .decay = 0.1,
                             .scale = 2,
                             .factor = &factor};
        assert_int_equal(weft_adamw(&ref, &a), WEFT_OK);
        a.parameter = s.dp, a.first = s.dm, a.second = s.dv, a.gradient = s.dg, a.factor = s.figures + 3;
        assert_int_equal(weft_adamw(&cuda, &a), WEFT_OK);
    }
    assert_true(worst_of(s.dp, s.p) < 1e-5 && worst_of(s.dv, s.v) < 1e-6);

    for (int tall = 0; tall < 2; tall++)
        for (int with_blas = 0; with_blas <= has_blas; with_blas++) {
            weft_muon_args m = {.struct_size = sizeof m,
                                .parameter = s.p,
                                .moment = s.m,
                                .gradient = s.g,
                                .rows = tall ? COLUMNS : ROWS,
                                .columns = tall ? ROWS : COLUMNS,
                                .rate = 0.1,
                                .momentum = 0.95,
                                .decay = 0.1,
                                .scale = 2,
                                .factor = &factor};
            size_t bytes;
            assert_int_equal(weft_muon_workspace(&ref, &m, &bytes), WEFT_OK);
            ref.workspace = must_alloc(ref.workspace_bytes = bytes);
            assert_int_equal(weft_muon(&ref, &m), WEFT_OK);
            free(ref.workspace);
            m.parameter = s.dp, m.moment = s.dm, m.gradient = s.dg, m.factor = s.figures + 3;
            m.blas = with_blas ? &blas : NULL;
            if (weft_muon(&cuda, &m) != WEFT_OK) fail_msg("%s", weft_last_error());
            double worst = worst_of(s.dp, s.p);
            if (!(worst < 1e-4)) fail_msg("muon: off by %.2e", worst);
        }

    /* A loss that is not finite: nothing is updated, whatever the optimiser. */
    const double bad = (double)INFINITY;
    assert_null(device_put(s.figures + 1, &bad, sizeof bad));
    clip.count = 1, clip.others = s.figures + 1, clip.num_others = 1;
    assert_int_equal(weft_clip(&cuda, &clip), WEFT_OK);
    double before = worst_of(s.dp, s.p), moment = worst_of(s.dm, s.m);
    weft_adamw_args a = {.struct_size = sizeof a,
                         .parameter = s.dp,
                         .first = s.dm,
                         .second = s.dv,
                         .gradient = s.dg,
                         .count = COUNT,
                         .step = 9,
                         .rate = 1,
                         .beta1 = 0.9,
                         .beta2 = 0.95,
                         .eps = 1e-8,
                         .scale = 1,
                         .factor = s.figures + 3};
    weft_muon_args m = {.struct_size = sizeof m,
                        .parameter = s.dp,
                        .moment = s.dm,
                        .gradient = s.dg,
                        .rows = ROWS,
                        .columns = COLUMNS,
                        .rate = 1,
                        .momentum = 0.95,
                        .scale = 1,
                        .factor = s.figures + 3};
    assert_int_equal(weft_adamw(&cuda, &a), WEFT_OK);
    assert_int_equal(weft_muon(&cuda, &m), WEFT_OK);
    assert_true(worst_of(s.dp, s.p) == before && worst_of(s.dm, s.m) == moment);

    cuda.workspace_bytes = 16;
    assert_int_equal(weft_sum_squares(&cuda, s.dg, COUNT, s.figures), WEFT_ERR_WORKSPACE);
    device_free(cuda.workspace);
    close_state(&s);
    weft_blas_close(&blas);
}

/* ---- words ------------------------------------------------------------------------------------------------------------------------------ */

/* Needs no GPU: what a machine without one, or another backend, says. */
static void refusals(void **state)
{
    (void)state;
    weft_model_config c = gpt_config(WEFT_RESIDUAL_MHC, WEFT_BF16);
    weft_model_bytes bytes;
    weft_exec exec = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_CPU);
    assert_int_equal(weft_model_check(&c), WEFT_OK);
    assert_int_equal(weft_model_query(&exec, &c, 1, 4, &bytes), WEFT_ERR_UNSUPPORTED);
    assert_non_null(strstr(weft_last_error(), "bf16"));
    exec.backend = WEFT_BACKEND_CUDA;
    weft_status want = weft_backend_available(WEFT_BACKEND_CUDA) ? WEFT_OK : WEFT_ERR_UNSUPPORTED;
    assert_int_equal(weft_model_query(&exec, &c, 1, 4, &bytes), want);
    c.dtype = WEFT_F64;
    assert_int_equal(weft_model_query(&exec, &c, 1, 4, &bytes), WEFT_ERR_UNSUPPORTED);
    if (want != WEFT_OK) return;
    c.dtype = WEFT_F32, c.channels = 1024, c.heads = 2;
    assert_int_equal(weft_model_query(&exec, &c, 1, 4, &bytes), WEFT_ERR_UNSUPPORTED);
    assert_non_null(strstr(weft_last_error(), "heads"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refusals),
        cmocka_unit_test(optimisers_follow_the_reference),
        cmocka_unit_test(f32_follows_the_reference),
        cmocka_unit_test(bf16_follows_the_reference),
        cmocka_unit_test(attention_at_the_edges_of_tiles),
        cmocka_unit_test(steps_follow_the_whole),
        cmocka_unit_test(recompute_changes_no_bit),
        cmocka_unit_test(gains_and_bad_values),
    };
    return suite_run("cuda model", tests);
}
