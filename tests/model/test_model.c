/* SPDX-License-Identifier: Apache-2.0
 *
 * The model: gradients of all its parameters, kinds against each other, backends against each other, recompute, memory,
 * bad input. */
#include "support/suite.h"

#include "check/random.h"
#include "support/gpt.h"
#include "support/memory.h"

/* ---- gradients ---------------------------------------------------------------------------------------------------------- */

/* Every element of small tensors, a few of large ones, by central differences. */
static void gradients_are_exact(void **state)
{
    (void)state;
    for (int k = 0; k < GPT_VARIANTS; k++) {
        weft_model_config c = gpt_variant_config(&gpt_variants[k], WEFT_F64);
        gpt g;
        int32_t tensors;
        double worst = 0;
        gpt_open(&g, &c, 2, 5, 0.2);
        gpt_step(&g);
        weft_model_param_count(&c, &tensors, NULL);
        for (int32_t t = 0; t < tensors; t++) {
            weft_model_param p;
            weft_model_param_at(&c, t, &p);
            double largest = 1e-8;
            for (int64_t i = 0; i < p.count; i++) largest = fmax(largest, fabs(gpt_gradient(&g, p.offset + i)));
            for (int64_t i = 0; i<p.count; i += p.count> 24 ? p.count / 6 : 1) {
                const double step = 3e-6;
                double at = gpt_parameter(&g, p.offset + i), loss[2];
                for (int side = 0; side < 2; side++) {
                    gpt_set_parameter(&g, p.offset + i, at + (side ? step : -step));
                    loss[side] = gpt_loss(&g);
                }
                gpt_set_parameter(&g, p.offset + i, at);
                double want = (loss[1] - loss[0]) / (2 * step), got = gpt_gradient(&g, p.offset + i);
                double error = fabs(got - want) / largest;
                worst = value_worst(worst, error);
                if (!(error < 1e-5))
                    fail_msg("%s: %s[%lld]: gradient %.9g, finite differences %.9g", gpt_variants[k].name, p.name,
                             (long long)i, got, want);
            }
        }
        fprintf(stderr, "  %-34s worst relative error %.1e\n", gpt_variants[k].name, worst);
        gpt_close(&g);
    }
}

/* A gradient that is never computed would pass where its parameter has no influence; every tensor must have one. */
static void every_parameter_learns(void **state)
{
    (void)state;
    for (int k = 0; k < GPT_VARIANTS; k++) {
        weft_model_config c = gpt_variant_config(&gpt_variants[k], WEFT_F64);
        gpt g;
        int32_t tensors;
        gpt_open(&g, &c, 2, 5, 0.2);
        gpt_step(&g);
        weft_model_param_count(&c, &tensors, NULL);
        for (int32_t t = 0; t < tensors; t++) {
            weft_model_param p;
            double sum = 0;
            weft_model_param_at(&c, t, &p);
            for (int64_t i = 0; i < p.count; i++) sum += fabs(gpt_gradient(&g, p.offset + i));
            /* The last site of a shifted model predicts a mix for the exit, and a post and res for itself. */
            if (!(sum > 0)) fail_msg("%s: %s has no gradient", gpt_variants[k].name, p.name);
        }
        gpt_close(&g);
    }
}

/* Layers of two kinds: every tensor has a name and a place of its own, and the array ends with the last one. */
static void parameters_lie_side_by_side(void **state)
{
    (void)state;
    for (int k = 0; k < GPT_VARIANTS; k++)
        for (int stage = 0; stage < WEFT_STAGE_COUNT; stage++) {
            weft_model_config c = gpt_variant_config(&gpt_variants[k], WEFT_F32);
            int32_t tensors;
            int64_t total, end = 0;
            c.stage = (weft_stage)stage, c.layers = 9, c.group = 0;
            if (stage == WEFT_STAGE_MIDDLE || stage == WEFT_STAGE_LAST) c.first_layer = 6;
            assert_int_equal(weft_model_param_count(&c, &tensors, &total), WEFT_OK);
            for (int32_t t = 0; t < tensors; t++) {
                weft_model_param p, again;
                assert_int_equal(weft_model_param_at(&c, t, &p), WEFT_OK);
                assert_int_equal(p.offset, end);
                end = (p.offset + p.count + 15) / 16 * 16;
                assert_true(gpt_find(&c, p.name, &again) && again.offset == p.offset);
                /* layers 3, 7 and 11 of a hybrid attend */
                const bool attends = c.mixer == WEFT_MIXER_ATTENTION ||
                                     (c.mixer == WEFT_MIXER_HYBRID && (c.first_layer + p.layer) % 4 == 3);
                if (p.layer >= 0 && !strstr(p.name, ".mlp."))
                    assert_non_null(strstr(p.name, attends ? ".attention." : ".gdn."));
            }
            assert_int_equal(end, total);
        }
}

static void cpu_follows_the_reference(void **state)
{
    weft_blas blas;
    int has_blas = weft_blas_open(NULL, &blas) == WEFT_OK;
    (void)state;
    if (!has_blas) fprintf(stderr, "  %s: the built-in loop alone is tested\n", weft_last_error());
    for (int k = 0; k < GPT_VARIANTS; k++)
        for (int with_blas = 0; with_blas <= has_blas; with_blas++)
            for (weft_isa isa = WEFT_ISA_BASE; isa <= weft_cpu_isa(); isa = (weft_isa)(isa + 1)) {
                weft_model_config c = gpt_variant_config(&gpt_variants[k], WEFT_F32),
                                  wide = gpt_variant_config(&gpt_variants[k], WEFT_F64);
                gpt g, wanted;
                /* More tokens than a tile of queries, and sizes that are no multiple of a vector. */
                c.context = wide.context = 70;
                c.channels = wide.channels = 20;
                gpt_open(&g, &c, 2, 70, 0.1);
                gpt_open(&wanted, &wide, 2, 70, 0.1);
                g.exec.isa = isa;
                gpt_bind(&g);
                g.blas = with_blas ? &blas : NULL;
                double got = gpt_step(&g), want = gpt_step(&wanted), largest = 0, worst = 0;
                if (!(fabs(got - want) < 1e-5))
                    fail_msg("%s: loss %.9g, reference %.9g", gpt_variants[k].name, got, want);
                for (int64_t i = 0; i < g.elements; i++) largest = fmax(largest, fabs(gpt_gradient(&wanted, i)));
                for (int64_t i = 0; i < g.elements; i++)
                    worst = value_worst(worst, fabs(gpt_gradient(&g, i) - gpt_gradient(&wanted, i)) / largest);
                if (!(worst < 1e-4))
                    fail_msg("%s on %s: gradients differ by %.2e of the largest", gpt_variants[k].name,
                             weft_isa_name(isa), worst);
                gpt_close(&g);
                gpt_close(&wanted);
            }
    weft_blas_close(&blas);
}

static void threads_change_nothing(void **state)
{
    (void)state;
    weft_model_config c = gpt_variant_config(&gpt_variants[5], WEFT_F32);
    c.context = 96, c.channels = 64, c.hidden = 80;
    gpt one, two;
    gpt_open(&one, &c, 3, 96, 0.1);
    gpt_open(&two, &c, 3, 96, 0.1);
    one.exec.threads = 1;
    two.exec.threads = 3;
    gpt_bind(&one);
    gpt_bind(&two);
    double a = gpt_step(&one), b = gpt_step(&two);
    assert_memory_equal(&a, &b, sizeof a);
    assert_memory_equal(one.gradients, two.gradients, (size_t)one.elements * sizeof(float));
    gpt_close(&one);
    gpt_close(&two);
}

/* ---- kinds ----------------------------------------------------------------------------------------------------------------- */

static void begins_as_the_plain_residual(void **state)
{
    (void)state;
    weft_model_config plain = {.struct_size = sizeof plain};
    weft_model_defaults(WEFT_RESIDUAL_PLAIN, &plain);
    gpt base;
    gpt_open(&base, &plain, 2, 64, 0);
    double want = gpt_loss(&base);
    static const struct {
        weft_residual residual;
        weft_first_mix mix;
    } kinds[] = {{WEFT_RESIDUAL_HC, WEFT_FIRST_MIX_UNIFORM},
                 {WEFT_RESIDUAL_MHC, WEFT_FIRST_MIX_UNIFORM},
                 {WEFT_RESIDUAL_MHC, WEFT_FIRST_MIX_IDENTITY},
                 {WEFT_RESIDUAL_MHC_SINGLE_PASS, WEFT_FIRST_MIX_UNIFORM},
                 {WEFT_RESIDUAL_MHC_SINGLE_PASS, WEFT_FIRST_MIX_IDENTITY},
                 {WEFT_RESIDUAL_INDEPENDENT, WEFT_FIRST_MIX_IDENTITY}};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        weft_model_config c = {.struct_size = sizeof c};
        gpt g;
        weft_model_defaults(kinds[k].residual, &c);
        c.first_mix = kinds[k].mix;
        c.init_alpha = 0;
        gpt_open(&g, &c, 2, 64, 0);
        /* The same numbers under the same names: draws depend on the position of a tensor, so they are copied. */
        int32_t tensors;
        weft_model_param_count(&plain, &tensors, NULL);
        for (int32_t t = 0; t < tensors; t++) {
            weft_model_param from, to;
            weft_model_param_at(&plain, t, &from);
            assert_true(gpt_find(&c, from.name, &to));
            memcpy((float *)g.parameters + to.offset, (float *)base.parameters + from.offset,
                   (size_t)from.count * sizeof(float));
        }
        memcpy(g.tokens, base.tokens, 128 * sizeof *g.tokens);
        memcpy(g.targets, base.targets, 128 * sizeof *g.targets);
        double got = gpt_loss(&g);
        fprintf(stderr, "  %s, %s: %.9g, residual: %.9g\n", weft_residual_name(kinds[k].residual),
                weft_first_mix_name(kinds[k].mix), got, want);
        assert_true(fabs(got - want) < 1e-4);
        gpt_close(&g);
    }
    gpt_close(&base);
}

/* The coefficients of a site with alpha = 0. res is left alone where there is none. */
static void first_coefficients(const weft_model_config *c, const char *beta_name, double *pre, double *post,
                               double *res)
{
    enum { MOST = 80 };
    const bool mixed = c->residual != WEFT_RESIDUAL_INDEPENDENT;
    const int64_t n = c->streams, gates = mixed ? n * (n + 2) : 2 * n;
    double h[MOST] = {0}, ms = 1, alpha[3] = {0};
    weft_exec exec = on_ref();
    weft_model_param p;
    int64_t elements;
    assert_true(gates <= MOST && gpt_find(c, beta_name, &p));
    assert_int_equal(weft_model_param_count(c, NULL, &elements), WEFT_OK);
    double *parameters = must_alloc((size_t)elements * sizeof *parameters);
    assert_int_equal(weft_model_init(c, 1, parameters), WEFT_OK);
    assert_int_equal(
        weft_mhc_coef_fwd(
            &exec,
            WEFT_ARGS(weft_mhc_coef_fwd_args, .numerics = c->numerics, .h = weft_dense2(h, WEFT_F64, 1, gates),
                      .ms = weft_dense1(&ms, WEFT_F64, 1), .alpha = weft_dense1(alpha, WEFT_F64, mixed ? 3 : 2),
                      .beta = weft_dense1(parameters + p.offset, WEFT_F64, gates),
                      .pre = weft_dense2(pre, WEFT_F64, 1, n), .post = weft_dense2(post, WEFT_F64, 1, n),
                      .res = mixed ? weft_dense3(res, WEFT_F64, 1, n, n) : (weft_tensor){0})),
        WEFT_OK);
    free(parameters);
}

static void first_mixes(void **state)
{
    (void)state;
    static const struct {
        const char *beta;
        int site;
    } sites[] = {{"layers.3.attention.connection.beta", 6}, {"layers.4.mlp.connection.beta", 9}};
    for (int k = WEFT_RESIDUAL_MHC; k < WEFT_RESIDUAL_COUNT; k++)
        for (int n = 1; n <= 8; n *= 2)
            for (int s = 0; s < 2; s++)
                for (int mix = 0; mix < WEFT_FIRST_MIX_COUNT; mix++) {
                    weft_model_config c = gpt_config((weft_residual)k, WEFT_F64);
                    double pre[8], post[8], res[64], sum = 0;
                    const bool identity = mix == WEFT_FIRST_MIX_IDENTITY;
                    assert_int_equal(c.first_mix, WEFT_FIRST_MIX_IDENTITY); /* the default */
                    c.streams = n, c.stage = WEFT_STAGE_MIDDLE, c.first_layer = 3,
                    c.first_mix = (weft_first_mix)mix;
                    first_coefficients(&c, sites[s].beta, pre, post, res);
                    const int own = (sites[s].site + (k == WEFT_RESIDUAL_MHC_SINGLE_PASS)) % n;
                    const double eps = 1e-5; /* of gates and Sinkhorn: 1e-6 each */
                    for (int i = 0; i < n; i++) {
                        sum += pre[i];
                        double want = identity && n > 1 ? i == own ? 1 - (n - 1) / 16.0 / n : 1 / 16.0 / n : 0.5;
                        assert_true(fabs(pre[i] - want) < eps);
                        assert_true(fabs(post[i] - 1) < eps);
                        for (int j = 0; k != WEFT_RESIDUAL_INDEPENDENT && j < n; j++) {
                            double d = exp(4), at = (i == j ? d : 1) / (d + n - 1);
                            assert_true(fabs(res[i * n + j] - (identity ? at : 1.0 / n)) < eps);
                        }
                    }
                    assert_true(!identity || n == 1 || fabs(sum - 1) < eps);
                }
    assert_int_equal(weft_first_mix_find("identity"), WEFT_FIRST_MIX_IDENTITY);
    assert_int_equal(weft_first_mix_find("one"), WEFT_FIRST_MIX_COUNT);
    assert_string_equal(weft_first_mix_name(WEFT_FIRST_MIX_UNIFORM), "uniform");
    assert_null(weft_first_mix_name(WEFT_FIRST_MIX_COUNT));
}

static void gains_tell_the_kinds_apart(void **state)
{
    (void)state;
    for (int k = 0; k < WEFT_RESIDUAL_COUNT; k++) {
        weft_model_config c = gpt_config((weft_residual)k, WEFT_F64);
        weft_model_gains gains;
        gpt g;
        c.layers = 6;
        gpt_open(&g, &c, 2, 8, 0.3);
        gpt_loss(&g);
        assert_int_equal(weft_model_gain(&g.exec, &g.model, &gains), WEFT_OK);
        fprintf(stderr, "  %-16s row %.4f (largest %.4f), column %.4f (largest %.4f)\n",
                weft_residual_name((weft_residual)k), gains.row_mean, gains.row_max, gains.column_mean,
                gains.column_max);
        if (k == WEFT_RESIDUAL_PLAIN || k == WEFT_RESIDUAL_INDEPENDENT)
            assert_true(gains.row_max == 1 && gains.column_max == 1);
        if (k == WEFT_RESIDUAL_HC) assert_true(gains.row_max > 2);
        if (k >= WEFT_RESIDUAL_MHC) assert_true(gains.row_max < 1.1 && gains.column_max < 1.1);
        gpt_close(&g);
    }
}

/* The mixes that a model shows, multiplied from the first site to the last, have the gains that it tells. */
static void mixes_have_the_gains(void **state)
{
    (void)state;
    for (int k = WEFT_RESIDUAL_HC; k < WEFT_RESIDUAL_COUNT; k++) {
        weft_model_config c = gpt_config((weft_residual)k, WEFT_F64);
        weft_model_gains gains;
        gpt g;
        gpt_open(&g, &c, 2, 8, 0.3);
        gpt_loss(&g);
        assert_int_equal(weft_model_gain(&g.exec, &g.model, &gains), WEFT_OK);
        if (k == WEFT_RESIDUAL_INDEPENDENT) {
            assert_int_equal(weft_model_mix(&g.model, 0).dtype, WEFT_NONE);
            gpt_close(&g);
            continue;
        }
        const int n = (int)c.streams, transposed = k != WEFT_RESIDUAL_HC && c.numerics.apply == WEFT_APPLY_OUT_IN;
        double most = 0;
        for (int64_t t = 0; t < 16; t++) {
            double all[8][8] = {{0}}, next[8][8];
            assert_true(n <= 8);
            for (int i = 0; i < n; i++) all[i][i] = 1; /* [in, out] */
            for (int32_t site = 0; site < 2 * c.layers; site++) {
                weft_tensor mix = weft_model_mix(&g.model, site);
                assert_true(mix.dtype == WEFT_F64 && mix.ndim == 3 && mix.shape[0] == 16 && mix.shape[1] == n &&
                            mix.shape[2] == n);
                const double *w = (const double *)mix.data + t * n * n;
                for (int i = 0; i < n; i++)
                    for (int o = 0; o < n; o++) {
                        next[i][o] = 0;
                        for (int m = 0; m < n; m++)
                            next[i][o] += all[i][m] * (transposed ? w[o * n + m] : w[m * n + o]);
                    }
                memcpy(all, next, sizeof all);
            }
            for (int o = 0; o < n; o++) { /* what reaches a stream at the end */
                double sum = 0;
                for (int i = 0; i < n; i++) sum += fabs(all[i][o]);
                most = value_worst(most, sum);
            }
        }
        if (!(fabs(most - gains.row_max) <= 1e-12 * gains.row_max))
            fail_msg("%s: the mixes have a row gain of %.17g, the model tells %.17g",
                     weft_residual_name((weft_residual)k), most, gains.row_max);
        assert_int_equal(weft_model_mix(&g.model, -1).dtype, WEFT_NONE);
        assert_int_equal(weft_model_mix(&g.model, 2 * c.layers).dtype, WEFT_NONE);
        gpt_close(&g);
    }
    gpt plain;
    weft_model_config c = gpt_config(WEFT_RESIDUAL_PLAIN, WEFT_F64);
    gpt_open(&plain, &c, 2, 8, 0.3);
    assert_int_equal(weft_model_mix(&plain.model, 0).dtype, WEFT_NONE);
    assert_int_equal(weft_model_mix(NULL, 0).dtype, WEFT_NONE);
    gpt_close(&plain);
}

/* ---- stages of a pipeline -------------------------------------------------------------------------------------------------- */

/* Gives a stage the parameters that the whole has under its names, or compares the gradients. */
static void share(const gpt *all, gpt *part, bool gradients)
{
    int32_t tensors;
    weft_model_param_count(&part->config, &tensors, NULL);
    for (int32_t t = 0; t < tensors; t++) {
        weft_model_param to, from;
        weft_model_param_at(&part->config, t, &to);
        assert_true(gpt_find(&all->config, to.name, &from));
        size_t bytes = (size_t)from.count * sizeof(float);
        if (gradients)
            assert_memory_equal((float *)part->gradients + to.offset, (float *)all->gradients + from.offset, bytes);
        else
            memcpy((float *)part->parameters + to.offset, (float *)all->parameters + from.offset, bytes);
    }
}

static void stages_are_the_whole(void **state)
{
    (void)state;
    static const struct {
        weft_stage stage;
        int32_t first, layers;
    } cuts[] = {{WEFT_STAGE_FIRST, 0, 2}, {WEFT_STAGE_MIDDLE, 2, 1}, {WEFT_STAGE_LAST, 3, 2}};
    for (int kind = 0; kind < WEFT_RESIDUAL_COUNT * WEFT_MIXER_COUNT; kind++) {
        const int k = kind % WEFT_RESIDUAL_COUNT;
        weft_model_config c = gpt_config((weft_residual)k, WEFT_F32);
        gpt all, part[3];
        float *hop[2], *d_hop[2], *mix[2], *d_mix[2];
        const bool single = k == WEFT_RESIDUAL_MHC_SINGLE_PASS;
        double loss = 0;
        c.layers = 5, c.dropout = 0.2, c.bias = 1, c.mixer = (weft_mixer)(kind / WEFT_RESIDUAL_COUNT);
        c.recompute = k != WEFT_RESIDUAL_PLAIN;
        gpt_open(&all, &c, 2, 8, 0.1);
        double want = gpt_step(&all) * 16;
        size_t streams = (size_t)(16 * c.streams * c.channels) * sizeof(float);
        size_t mixes = (size_t)(16 * c.streams) * sizeof(float);
        for (int i = 0; i < 2; i++) hop[i] = must_alloc(streams), d_hop[i] = must_alloc(streams);
        for (int i = 0; i < 2; i++) mix[i] = must_alloc(mixes), d_mix[i] = must_alloc(mixes);
        weft_model_args args[3];
        for (int i = 0; i < 3; i++) {
            c.stage = cuts[i].stage, c.first_layer = cuts[i].first, c.layers = cuts[i].layers;
            gpt_open(&part[i], &c, 2, 8, 0);
            share(&all, &part[i], false);
            memset(part[i].gradients, 0, (size_t)part[i].elements * sizeof(float));
            args[i] = (weft_model_args){.struct_size = sizeof *args,
                                        .parameters = part[i].parameters,
                                        .gradients = part[i].gradients,
                                        .tokens = all.tokens,
                                        .targets = all.targets,
                                        .training = 1,
                                        .step = &all.step,
                                        .loss = &loss,
                                        .streams_in = i > 0 ? hop[i - 1] : NULL,
                                        .streams_out = i < 2 ? hop[i] : NULL,
                                        .d_streams_out = i < 2 ? d_hop[i] : NULL,
                                        .d_streams_in = i > 0 ? d_hop[i - 1] : NULL,
                                        .mix_in = single && i > 0 ? mix[i - 1] : NULL,
                                        .mix_out = single && i < 2 ? mix[i] : NULL,
                                        .d_mix_out = single && i < 2 ? d_mix[i] : NULL,
                                        .d_mix_in = single && i > 0 ? d_mix[i - 1] : NULL};
            if (weft_model_forward(&part[i].exec, &part[i].model, &args[i]) != WEFT_OK)
                fail_msg("%s", weft_last_error());
        }
        assert_memory_equal(&loss, &want, sizeof loss);
        for (int i = 2; i >= 0; i--) {
            if (weft_model_backward(&part[i].exec, &part[i].model, &args[i]) != WEFT_OK)
                fail_msg("%s", weft_last_error());
            share(&all, &part[i], true);
        }
        weft_model_args bad = args[1];
        bad.streams_in = NULL;
        assert_int_equal(weft_model_forward(&part[1].exec, &part[1].model, &bad), WEFT_ERR_ARGUMENT);
        bad = args[0], bad.streams_out = NULL;
        assert_int_equal(weft_model_forward(&part[0].exec, &part[0].model, &bad), WEFT_ERR_ARGUMENT);
        assert_int_equal(weft_model_logits(&part[0].model).dtype, WEFT_NONE);
        for (int i = 0; i < 2; i++) free(hop[i]), free(d_hop[i]), free(mix[i]), free(d_mix[i]);
        for (int i = 0; i < 3; i++) gpt_close(&part[i]);
        gpt_close(&all);
    }
}

/* A block between rows: its gradients against finite differences of <rows out, weights>. */
static void block_between_rows(void **state)
{
    (void)state;
    for (int k = 0; k < GPT_VARIANTS; k++) {
        weft_model_config c = gpt_variant_config(&gpt_variants[k], WEFT_F64);
        enum { ROWS = 10 };
        double in[ROWS * 12], out[ROWS * 12], up[ROWS * 12], d_in[ROWS * 12], worst = 0;
        rng random = {rng_name(1, gpt_variants[k].name)};
        gpt g;
        c.stage = WEFT_STAGE_BLOCK;
        gpt_open(&g, &c, 2, 5, 0.2);
        for (int i = 0; i < ROWS * 12; i++) in[i] = rng_normal(&random), up[i] = rng_normal(&random);
        memset(g.gradients, 0, (size_t)g.elements * sizeof(double));
        weft_model_args args = {.struct_size = sizeof args,
                                .parameters = g.parameters,
                                .gradients = g.gradients,
                                .training = 1,
                                .streams_in = in,
                                .streams_out = out,
                                .d_streams_out = up,
                                .d_streams_in = d_in};
        assert_int_equal(weft_model_forward(&g.exec, &g.model, &args), WEFT_OK);
        assert_int_equal(weft_model_backward(&g.exec, &g.model, &args), WEFT_OK);
        /* Every eleventh input, then some of the parameters. */
        for (int64_t i = 0; i < ROWS * 12 + g.elements; i += i < ROWS * 12 ? 11 : 97) {
            double *at = i < ROWS * 12 ? &in[i] : (double *)g.parameters + i - ROWS * 12, was = *at, sum[2] = {0};
            double got = i < ROWS * 12 ? d_in[i] : gpt_gradient(&g, i - ROWS * 12);
            for (int side = 0; side < 2; side++) {
                *at = was + (side ? 1e-5 : -1e-5);
                assert_int_equal(weft_model_forward(&g.exec, &g.model, &args), WEFT_OK);
                for (int j = 0; j < ROWS * 12; j++) sum[side] += out[j] * up[j];
            }
            *at = was;
            worst = value_worst(worst, fabs((sum[1] - sum[0]) / 2e-5 - got) / (1 + fabs(got)));
        }
        if (!(worst < 1e-5)) fail_msg("%s: worst error %.2e", gpt_variants[k].name, worst);
        gpt_close(&g);
    }
}

/* ---- joined sites ----------------------------------------------------------------------------------------------------------- */

/* How far two arrays of gradients are apart, tensor by tensor, by the largest gradient of the tensor. */
static double apart(const gpt *a, const gpt *b)
{
    int32_t tensors;
    double worst = 0;
    weft_model_param_count(&a->config, &tensors, NULL);
    for (int32_t t = 0; t < tensors; t++) {
        weft_model_param p;
        double largest = 0, error = 0;
        weft_model_param_at(&a->config, t, &p);
        for (int64_t i = p.offset; i < p.offset + p.count; i++) {
            largest = fmax(largest, fabs(gpt_gradient(a, i)));
            error = value_worst(error, fabs(gpt_gradient(a, i) - gpt_gradient(b, i)));
        }
        worst = value_worst(worst, error / largest);
    }
    return worst;
}

/* The reference adds the site's two parts to a gradient one by one where sites are joined, and their sum where they are not:
 * one rounding in 2^-53 of a stream's gradient per site. A gradient of a parameter is a sum over streams, channels and tokens of
 * such values, whose terms cancel down to no less than a hundredth here. */
static double joined_bound(const weft_model_config *c)
{
    return 100 * 2 * c->layers * 0x1p-53;
}

static void joined_is_site_by_site(void **state)
{
    (void)state;
    static const struct {
        weft_residual residual;
        weft_exit exit;
        int32_t streams, group; /* group: of recompute; -1: none */
        int64_t channels;       /* whole vectors, and not */
    } cases[] = {{WEFT_RESIDUAL_MHC, WEFT_EXIT_MEAN, 4, -1, 64},
                 {WEFT_RESIDUAL_MHC, WEFT_EXIT_MEAN, 3, 1, 36},
                 {WEFT_RESIDUAL_MHC, WEFT_EXIT_LEARNED, 2, 2, 32},
                 {WEFT_RESIDUAL_MHC, WEFT_EXIT_LEARNED, 4, -1, 20},
                 {WEFT_RESIDUAL_MHC_SINGLE_PASS, WEFT_EXIT_MIX, 4, -1, 64},
                 {WEFT_RESIDUAL_MHC_SINGLE_PASS, WEFT_EXIT_MIX, 3, 0, 36},
                 {WEFT_RESIDUAL_MHC_SINGLE_PASS, WEFT_EXIT_MIX, 4, 2, 32},
                 {WEFT_RESIDUAL_INDEPENDENT, WEFT_EXIT_MEAN, 4, -1, 64},
                 {WEFT_RESIDUAL_INDEPENDENT, WEFT_EXIT_LEARNED, 3, 1, 36}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++)
        for (int isa = WEFT_ISA_BASE - 1; isa <= (int)weft_cpu_isa(); isa++) { /* the first is the reference */
            const bool f64 = isa < WEFT_ISA_BASE;
            weft_model_config c = gpt_config(cases[k].residual, f64 ? WEFT_F64 : WEFT_F32);
            gpt one, each;
            c.layers = 3, c.dropout = 0.2, c.bias = 1;
            c.exit = cases[k].exit, c.streams = cases[k].streams, c.channels = cases[k].channels;
            c.recompute = c.poison = cases[k].group >= 0, c.group = c.recompute ? cases[k].group : 0;
            c.context = 40; /* more than a block of tokens */
            gpt_open(&one, &c, 2, 40, 0.1);
            c.separate = 1;
            gpt_open(&each, &c, 2, 40, 0.1);
            if (!f64) one.exec.isa = each.exec.isa = (weft_isa)isa, gpt_bind(&one), gpt_bind(&each);
            double got = gpt_step(&one), want = gpt_step(&each);
            assert_memory_equal(&got, &want, sizeof got);
            if (!f64)
                assert_memory_equal(one.gradients, each.gradients, (size_t)one.elements * sizeof(float));
            else if (!(apart(&each, &one) <= joined_bound(&c)))
                fail_msg("case %zu: gradients are %.2e apart, at most %.2e expected", k, apart(&each, &one),
                         joined_bound(&c));
            gpt_close(&one);
            gpt_close(&each);
        }
}

/* ---- recompute, memory ---------------------------------------------------------------------------------------------------------- */

static void recompute_changes_no_bit(void **state)
{
    (void)state;
    for (int k = WEFT_RESIDUAL_HC; k < WEFT_RESIDUAL_COUNT; k++)
        for (weft_dtype dtype = WEFT_F32; dtype <= WEFT_F64; dtype = (weft_dtype)(dtype + WEFT_F64 - WEFT_F32)) {
            weft_model_config c = gpt_config((weft_residual)k, dtype);
            size_t bytes = weft_dtype_size(dtype);
            gpt kept;
            c.mixer = (weft_mixer)((k + (dtype == WEFT_F64)) % WEFT_MIXER_COUNT);
            c.layers = 5, c.dropout = 0.3, c.bias = 1, c.channels = 36;
            gpt_open(&kept, &c, 2, 8, 0.1);
            double want = gpt_step(&kept);
            c.recompute = c.poison = 1;
            for (c.group = 0; c.group <= 5; c.group++) {
                gpt g;
                gpt_open(&g, &c, 2, 8, 0.1);
                for (int twice = 0; twice < 2; twice++) { /* the second time over memory that is poisoned already */
                    double got = gpt_step(&g);
                    assert_memory_equal(&got, &want, sizeof got);
                    assert_memory_equal(g.gradients, kept.gradients, (size_t)g.elements * bytes);
                }
                if (c.group >= 1 && c.group <= 3) assert_true(g.bytes.recompute.total < kept.bytes.recompute.total);
                assert_int_equal(g.bytes.recompute.keep_all, kept.bytes.recompute.total);
                gpt_close(&g);
            }
            gpt_close(&kept);
        }
}

/* gpt_open asks for exactly the query's bytes, with guards around them; one byte less is refused, and the last byte of
 * every part is reached. */
static void memory_is_what_the_query_says(void **state)
{
    (void)state;
    for (int k = 0; k < GPT_VARIANTS; k++) {
        weft_model_config c = gpt_variant_config(&gpt_variants[k], WEFT_F32);
        gpt g;
        weft_model m;
        gpt_open(&g, &c, 2, 8, 0.1);
        assert_int_equal(weft_model_bind(&g.exec, &c, 2, 8, g.memory, g.bytes.total - 1, &m), WEFT_ERR_WORKSPACE);
        gpt_step(&g);
        assert_int_equal(g.bytes.total,
                         g.bytes.recompute.total + g.bytes.kept + g.bytes.scratch + g.bytes.workspace);
        /* High-water mark: the last byte that is not the pattern any more. Workspace is at the end and ends in slack. */
        size_t end = g.bytes.total;
        while (end > 0 && (unsigned char)g.memory[end - 1] == guard_pattern[(GUARD + end - 1) & 1]) end--;
        assert_true(end > g.bytes.total - g.bytes.workspace);
        gpt_close(&g);
    }
}

/* ---- a sequence as it grows ------------------------------------------------------------------------------------------------ */

/* Logits of the steps of one sequence, cut into pieces of these lengths, over and over. */
static void run_steps(const gpt *g, const int64_t *pieces, int count, double *logits)
{
    const int64_t length = g->model.length, vocab = g->config.vocab;
    weft_model_state state;
    size_t bytes;
    if (weft_model_state_query(&g->exec, &g->config, length, &bytes) != WEFT_OK) fail_msg("%s", weft_last_error());
    char *block = must_alloc(bytes + 2 * GUARD), *memory = block + GUARD;
    guard_fill(block, bytes + 2 * GUARD); /* begins with what was there */
    assert_int_equal(weft_model_state_bind(&g->exec, &g->config, length, memory, bytes, &state), WEFT_OK);
    for (int64_t at = 0, k = 0; at < length; k++) {
        int64_t piece = pieces[k % count] < length - at ? pieces[k % count] : length - at;
        weft_model_bytes need;
        weft_model m;
        assert_int_equal(weft_model_query(&g->exec, &g->config, 1, piece, &need), WEFT_OK);
        char *room = must_alloc(need.total + GUARD);
        guard_fill(room, need.total + GUARD);
        assert_int_equal(weft_model_bind(&g->exec, &g->config, 1, piece, room, need.total, &m), WEFT_OK);
        weft_model_args args = {
            .struct_size = sizeof args, .blas = g->blas, .parameters = g->parameters, .tokens = g->tokens + at};
        if (weft_model_step(&g->exec, &m, &state, &args) != WEFT_OK) fail_msg("%s", weft_last_error());
        assert_int_equal(state.position, at + piece);
        const weft_tensor to = weft_model_logits(&m);
        for (int64_t i = 0; i < piece * vocab; i++)
            logits[at * vocab + i] =
                g->config.dtype == WEFT_F64 ? ((double *)to.data)[i] : (double)((float *)to.data)[i];
        for (size_t i = 0; i < GUARD; i++)
            assert_int_equal((unsigned char)room[need.total + i], guard_pattern[(need.total + i) & 1]);
        free(room);
        at += piece;
    }
    for (size_t i = 0; i < GUARD; i++) {
        assert_int_equal((unsigned char)block[i], guard_pattern[i & 1]);
        assert_int_equal((unsigned char)memory[bytes + i], guard_pattern[(GUARD + bytes + i) & 1]);
    }
    free(block);
}

/* Steps give the logits of the whole. The reference rounds to double on its way, some hundred times. */
static void steps_are_the_whole(void **state)
{
    (void)state;
    enum { LENGTH = 37 };
    static const int64_t cuts[][3] = {{1, 1, 1}, {5, 1, 9}, {LENGTH, 1, 1}, {2, 64, 1}};
    for (int k = 0; k < GPT_VARIANTS; k++)
        for (int wide = 0; wide < 2; wide++) {
            weft_model_config c = gpt_variant_config(&gpt_variants[k], wide ? WEFT_F64 : WEFT_F32);
            const double limit = wide ? 1e-12 : 1e-5;
            double got[LENGTH * 11], worst = 0;
            gpt g;
            c.context = LENGTH;
            gpt_open(&g, &c, 1, LENGTH, 0.1);
            g.training = 0;
            gpt_loss(&g);
            const weft_tensor want = weft_model_logits(&g.model);
            for (int cut = 0; cut < 4; cut++) {
                run_steps(&g, cuts[cut], 3, got);
                for (int i = 0; i < LENGTH * 11; i++) {
                    double w = wide ? ((double *)want.data)[i] : (double)((float *)want.data)[i];
                    worst = value_worst(worst, fabs(got[i] - w));
                }
            }
            if (!(worst < limit)) fail_msg("%s: logits differ by %.2e", gpt_variants[k].name, worst);
            gpt_close(&g);
        }
}

/* gdn layers remember as much of a long sequence as of a short one. */
static void a_state_is_of_constant_size(void **state)
{
    (void)state;
    weft_exec exec = on_cpu(0, 1);
    size_t bytes[2];
    for (int mixer = 0; mixer < WEFT_MIXER_COUNT; mixer++) {
        weft_model_config c = gpt_config(WEFT_RESIDUAL_MHC, WEFT_F32);
        c.layers = 4, c.mixer = (weft_mixer)mixer, c.context = 1 << 20;
        for (int i = 0; i < 2; i++)
            assert_int_equal(weft_model_state_query(&exec, &c, i ? 1 << 20 : 64, &bytes[i]), WEFT_OK);
        if (mixer == WEFT_MIXER_GDN) {
            /* heads 2 of 6, one of keys: 4 (24 channels of the convolution by 3, 2 matrices of 6 x 6), each from 64 bytes on */
            assert_int_equal(bytes[0], 4 * (320 + 320));
            assert_int_equal(bytes[0], bytes[1]);
        } else
            assert_true(bytes[1] > bytes[0]);
    }
}

/* Memory of a product and of attention grows with the threads: what was bound for fewer is not enough. */
static void more_threads_than_bound_are_refused(void **state)
{
    (void)state;
    weft_model_config c = gpt_config(WEFT_RESIDUAL_PLAIN, WEFT_F32);
    weft_model_state remembered;
    size_t bytes;
    gpt g;
    c.context = 256, c.channels = 64;
    gpt_open(&g, &c, 1, 4, 0);
    g.exec = on_cpu(0, 8);
    gpt_bind(&g);
    const weft_exec one = on_cpu(0, 1);
    weft_model_args args = {.struct_size = sizeof args, .parameters = g.parameters, .tokens = g.tokens};
    assert_int_equal(weft_model_state_query(&one, &c, 256, &bytes), WEFT_OK);
    char *memory = must_alloc(bytes);
    assert_int_equal(weft_model_state_bind(&one, &c, 256, memory, bytes, &remembered), WEFT_OK);
    assert_int_equal(weft_model_step(&g.exec, &g.model, &remembered, &args), WEFT_ERR_WORKSPACE);
    assert_non_null(strstr(weft_last_error(), "as many threads"));
    assert_int_equal(weft_model_step(&one, &g.model, &remembered, &args), WEFT_OK); /* fewer than the model's */
    const weft_exec more = on_cpu(0, 64);
    assert_int_equal(weft_model_forward(&more, &g.model, &args), WEFT_ERR_WORKSPACE);
    assert_non_null(strstr(weft_last_error(), "no more threads than the model was bound with"));
    free(memory);
    gpt_close(&g);
}

static void bad_steps(void **state)
{
    (void)state;
    weft_model_config c = gpt_config(WEFT_RESIDUAL_MHC, WEFT_F32);
    weft_model_state s, good;
    size_t bytes;
    gpt g;
    c.layers = 4, c.mixer = WEFT_MIXER_HYBRID;
    gpt_open(&g, &c, 1, 4, 0);
    weft_exec *exec = &g.exec;
    assert_int_equal(weft_model_state_query(exec, &c, 6, &bytes), WEFT_OK);
    char *memory = must_alloc(bytes + 64), *const odd = memory + 4;
    assert_int_equal(weft_model_state_bind(exec, &c, 6, memory, bytes, &good), WEFT_OK);
#define REFUSED(status, word, call)                                                                                \
    do {                                                                                                           \
        assert_int_equal(call, status);                                                                            \
        if (!strstr(weft_last_error(), word)) fail_msg("%s: %s", word, weft_last_error());                         \
    } while (0)
    REFUSED(WEFT_ERR_ARGUMENT, "capacity: expected 1 to the context of 8, got 9",
            weft_model_state_query(exec, &c, 9, &bytes));
    REFUSED(WEFT_ERR_ARGUMENT, "capacity", weft_model_state_query(exec, &c, 0, &bytes));
    REFUSED(WEFT_ERR_WORKSPACE, "memory", weft_model_state_bind(exec, &c, 6, memory, bytes - 1, &s));
    REFUSED(WEFT_ERR_WORKSPACE, "memory", weft_model_state_bind(exec, &c, 6, NULL, bytes, &s));
    REFUSED(WEFT_ERR_ARGUMENT, "memory", weft_model_state_bind(exec, &c, 6, odd, bytes, &s));
    weft_model_args args = {.struct_size = sizeof args, .parameters = g.parameters, .tokens = g.tokens}, bad;
    memset(memory, 7, bytes);
    static const struct {
        const char *word;
        size_t offset;
    } fields[] = {{"layers of 4, got 5", offsetof(weft_model_config, layers)},
                  {"heads of 2, got 3", offsetof(weft_model_config, heads)},
                  {"mixer of 2, got 3", offsetof(weft_model_config, mixer)},
                  {"conv_width of 4, got 1", offsetof(weft_model_config, conv_width)}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        int32_t field;
        s = good;
        memcpy(&field, (char *)&s.config + fields[i].offset, sizeof field);
        field++;
        memcpy((char *)&s.config + fields[i].offset, &field, sizeof field);
        REFUSED(WEFT_ERR_ARGUMENT, fields[i].word, weft_model_step(exec, &g.model, &s, &args));
    }
    s = good, s.position = 3;
    REFUSED(WEFT_ERR_ARGUMENT, "room for 4 more tokens, got a capacity of 6 with 3 in it",
            weft_model_step(exec, &g.model, &s, &args));
    s = good, s.position = -1;
    REFUSED(WEFT_ERR_STATE, "did not fail", weft_model_step(exec, &g.model, &s, &args));
    s = good;
    bad = args, bad.targets = g.targets;
    REFUSED(WEFT_ERR_ARGUMENT, "targets", weft_model_step(exec, &g.model, &s, &bad));
    bad = args, bad.training = 1;
    REFUSED(WEFT_ERR_ARGUMENT, "training", weft_model_step(exec, &g.model, &s, &bad));
    bad = args, bad.parameters = memory;
    REFUSED(WEFT_ERR_OVERLAP, "the state's memory", weft_model_step(exec, &g.model, &s, &bad));
    g.tokens[1] = 11;
    REFUSED(WEFT_ERR_ARGUMENT, "tokens[1]", weft_model_step(exec, &g.model, &s, &args));
    g.tokens[1] = 1;
    REFUSED(WEFT_ERR_ARGUMENT, "state", weft_model_step(exec, &g.model, NULL, &args));
    for (size_t i = 0; i < bytes; i++) assert_int_equal(memory[i], 7); /* nothing was written */
    assert_int_equal(s.position, 0);
    assert_int_equal(weft_model_step(exec, &g.model, &s, &args), WEFT_OK);
    assert_int_equal(weft_model_backward(exec, &g.model, &args), WEFT_ERR_ARGUMENT); /* no targets */
    bad = args, bad.targets = g.targets, bad.gradients = g.gradients;
    REFUSED(WEFT_ERR_STATE, "one without", weft_model_backward(exec, &g.model, &bad));
#undef REFUSED
    gpt_close(&g);

    gpt_open(&g, &c, 2, 4, 0);
    s = good, args.parameters = g.parameters, args.tokens = g.tokens;
    assert_int_equal(weft_model_step(&g.exec, &g.model, &s, &args), WEFT_ERR_ARGUMENT);
    assert_non_null(strstr(weft_last_error(), "bound with 1 sequence, got 2"));
    gpt_close(&g);
    free(memory);
}

/* ---- order and bad input --------------------------------------------------------------------------------------------------------- */

static void calls_out_of_order(void **state)
{
    (void)state;
    weft_model_config c = gpt_config(WEFT_RESIDUAL_MHC, WEFT_F32);
    gpt g;
    gpt_open(&g, &c, 1, 4, 0);
    weft_model_args args = {.struct_size = sizeof args,
                            .parameters = g.parameters,
                            .gradients = g.gradients,
                            .tokens = g.tokens,
                            .targets = g.targets};
    assert_int_equal(weft_model_backward(&g.exec, &g.model, &args), WEFT_ERR_STATE);
    args.targets = NULL;
    assert_int_equal(weft_model_forward(&g.exec, &g.model, &args), WEFT_OK);
    args.targets = g.targets;
    assert_int_equal(weft_model_backward(&g.exec, &g.model, &args), WEFT_ERR_STATE);
    assert_int_equal(weft_model_forward(&g.exec, &g.model, &args), WEFT_OK);
    memset(g.gradients, 0, (size_t)g.elements * sizeof(float));
    assert_int_equal(weft_model_backward(&g.exec, &g.model, &args), WEFT_OK);
    assert_int_equal(weft_model_backward(&g.exec, &g.model, &args), WEFT_ERR_STATE);
    g.tokens[2] = 11;
    assert_int_equal(weft_model_forward(&g.exec, &g.model, &args), WEFT_ERR_ARGUMENT);
    g.tokens[2] = 0, g.targets[1] = -2;
    assert_int_equal(weft_model_forward(&g.exec, &g.model, &args), WEFT_ERR_ARGUMENT);
    assert_non_null(strstr(weft_last_error(), "targets[1]"));
    g.targets[1] = 0, args.struct_size--;
    assert_int_equal(weft_model_forward(&g.exec, &g.model, &args), WEFT_ERR_ARGUMENT);
    gpt_close(&g);
}

static void bad_configurations(void **state)
{
    (void)state;
    weft_model_config good[WEFT_RESIDUAL_COUNT], c;
    for (int k = 0; k < WEFT_RESIDUAL_COUNT; k++) {
        good[k].struct_size = sizeof good[k];
        assert_int_equal(weft_model_defaults((weft_residual)k, &good[k]), WEFT_OK);
        assert_int_equal(weft_model_check(&good[k]), WEFT_OK);
    }
#define BAD(kind, word, ...)                                                                                       \
    do {                                                                                                           \
        c = good[kind];                                                                                            \
        __VA_ARGS__;                                                                                               \
        if (weft_model_check(&c) == WEFT_OK) fail_msg("accepted: %s", #__VA_ARGS__);                               \
        if (!strstr(weft_last_error(), word)) fail_msg("%s: %s", #__VA_ARGS__, weft_last_error());                 \
    } while (0)
    BAD(WEFT_RESIDUAL_MHC, "streams", c.streams = 0);
    BAD(WEFT_RESIDUAL_MHC, "streams", c.streams = 33);
    BAD(WEFT_RESIDUAL_PLAIN, "streams", c.streams = 4);
    BAD(WEFT_RESIDUAL_PLAIN, "recompute", c.recompute = 1);
    BAD(WEFT_RESIDUAL_MHC, "group", c.group = 2);
    BAD(WEFT_RESIDUAL_MHC, "group", c.recompute = 1, c.group = 5);
    BAD(WEFT_RESIDUAL_MHC, "group", c.recompute = 1, c.group = -1);
    BAD(WEFT_RESIDUAL_MHC, "poison", c.poison = 1);
    BAD(WEFT_RESIDUAL_MHC, "sinkhorn_iters", c.numerics.sinkhorn_iters = 0);
    BAD(WEFT_RESIDUAL_MHC, "init_alpha", c.init_alpha = -0.1);
    BAD(WEFT_RESIDUAL_MHC, "init_alpha", c.init_alpha = (double)NAN);
    BAD(WEFT_RESIDUAL_MHC, "channels", c.channels = 0);
    BAD(WEFT_RESIDUAL_MHC, "heads", c.heads = 3);
    BAD(WEFT_RESIDUAL_MHC, "heads", c.heads = 128);
    BAD(WEFT_RESIDUAL_MHC, "layers", c.layers = 0);
    BAD(WEFT_RESIDUAL_MHC, "dropout", c.dropout = 1);
    BAD(WEFT_RESIDUAL_MHC, "dropout", c.dropout = (double)NAN);
    BAD(WEFT_RESIDUAL_MHC, "exit", c.exit = WEFT_EXIT_MIX);
    BAD(WEFT_RESIDUAL_MHC_SINGLE_PASS, "exit", c.exit = WEFT_EXIT_MEAN);
    BAD(WEFT_RESIDUAL_INDEPENDENT, "exit", c.exit = WEFT_EXIT_MIX);
    BAD(WEFT_RESIDUAL_PLAIN, "exit", c.exit = WEFT_EXIT_LEARNED);
    BAD(WEFT_RESIDUAL_MHC, "dtype", c.dtype = WEFT_F16);
    BAD(WEFT_RESIDUAL_MHC, "struct_size", c.struct_size = 8);
    BAD(WEFT_RESIDUAL_MHC, "rope_base", c.rope_base = 0);
    BAD(WEFT_RESIDUAL_MHC, "first_layer", c.first_layer = 1);
    BAD(WEFT_RESIDUAL_MHC, "separate", c.separate = 2);
    BAD(WEFT_RESIDUAL_MHC, "first_mix", c.first_mix = WEFT_FIRST_MIX_COUNT);
    BAD(WEFT_RESIDUAL_HC, "first_mix: expected uniform with hc, got identity",
        c.first_mix = WEFT_FIRST_MIX_IDENTITY);
    BAD(WEFT_RESIDUAL_PLAIN, "first_mix", c.first_mix = WEFT_FIRST_MIX_IDENTITY);
    BAD(WEFT_RESIDUAL_MHC, "reserved", c.reserved = 1);
    BAD(WEFT_RESIDUAL_MHC, "mixer", c.mixer = WEFT_MIXER_COUNT);
    BAD(WEFT_RESIDUAL_MHC, "key_heads: expected 0 with the mixer attention, got 2", c.key_heads = 2);
    BAD(WEFT_RESIDUAL_MHC, "conv_width: expected 0 with the mixer attention, got 4", c.conv_width = 4);
    BAD(WEFT_RESIDUAL_MHC, "conv_width: expected 0 to 8", c.mixer = WEFT_MIXER_GDN, c.conv_width = 9);
    BAD(WEFT_RESIDUAL_MHC, "key_heads", c.mixer = WEFT_MIXER_GDN, c.key_heads = -1);
    BAD(WEFT_RESIDUAL_MHC, "key_heads: expected a divisor of the 4 heads", c.mixer = WEFT_MIXER_GDN,
        c.key_heads = 3);
    BAD(WEFT_RESIDUAL_MHC, "key_heads: expected a divisor of the 4 heads", c.mixer = WEFT_MIXER_GDN,
        c.key_heads = 8);
    BAD(WEFT_RESIDUAL_MHC, "heads: expected an even number", c.mixer = WEFT_MIXER_GDN, c.heads = 1);
    BAD(WEFT_RESIDUAL_MHC, "heads: expected heads of at most 1024 channels", c.mixer = WEFT_MIXER_GDN,
        c.channels = 8192);
    BAD(WEFT_RESIDUAL_MHC, "layers: expected at least 4", c.mixer = WEFT_MIXER_HYBRID, c.layers = 3);
    BAD(WEFT_RESIDUAL_PLAIN, "layers: expected at least 4", c.mixer = WEFT_MIXER_HYBRID, c.layers = 1,
        c.stage = WEFT_STAGE_BLOCK);
#undef BAD
    c = good[WEFT_RESIDUAL_MHC], c.mixer = WEFT_MIXER_HYBRID, c.layers = 1, c.stage = WEFT_STAGE_FIRST;
    assert_int_equal(weft_model_check(&c), WEFT_OK); /* a stage may be as short as any */
    c = good[WEFT_RESIDUAL_MHC], c.mixer = WEFT_MIXER_GDN, c.heads = c.key_heads = 1;
    assert_int_equal(weft_model_check(&c), WEFT_OK);
    assert_int_equal(weft_mixer_find("hybrid"), WEFT_MIXER_HYBRID);
    assert_int_equal(weft_mixer_find("rnn"), WEFT_MIXER_COUNT);
    assert_string_equal(weft_mixer_name(WEFT_MIXER_GDN), "gdn");
    assert_null(weft_mixer_name(WEFT_MIXER_COUNT));
    weft_model_bytes bytes;
    weft_exec exec = WEFT_STRUCT(weft_exec, .backend = WEFT_BACKEND_REF);
    assert_int_equal(weft_model_query(&exec, &good[0], 1, 4, &bytes), WEFT_ERR_UNSUPPORTED); /* f32 on ref */
    exec.backend = WEFT_BACKEND_CPU;
    assert_int_equal(weft_model_query(&exec, &good[0], 1, 129, &bytes), WEFT_ERR_ARGUMENT); /* past the context */
    assert_int_equal(weft_model_query(&exec, &good[0], 0, 4, &bytes), WEFT_ERR_ARGUMENT);
}

/* ---- arrays of a pass ------------------------------------------------------------------------------------------------------- */

/* Everything that a pass of one stage takes, each array with room around it. */
enum {
    PARAMETERS,
    GRADIENTS,
    TOKENS,
    TARGETS,
    STEP,
    LOSS,
    IN,
    OUT,
    D_OUT,
    D_IN,
    MIX_IN,
    MIX_OUT,
    D_MIX_OUT,
    D_MIX_IN,
    PARTS
};
static const char *const part_names[PARTS] = {
    "parameters",  "gradients",     "tokens",       "targets", "step",    "loss",      "streams_in",
    "streams_out", "d_streams_out", "d_streams_in", "mix_in",  "mix_out", "d_mix_out", "d_mix_in"};

typedef struct pass {
    weft_model_config config;
    weft_exec exec;
    weft_model model;
    weft_model_bytes bytes;
    char *memory, *part[PARTS];
    size_t size[PARTS], element[PARTS];
} pass;

static pass pass_open(weft_residual residual, weft_stage stage, weft_dtype dtype)
{
    enum { SEQUENCES = 1, LENGTH = 4 };
    pass p = {.config = gpt_config(residual, dtype), .exec = dtype == WEFT_F64 ? on_ref() : on_cpu(0, 1)};
    const size_t value = dtype == WEFT_F64 ? 8 : 4;
    int64_t elements;
    p.config.stage = stage, p.config.dropout = 0.1;
    if (weft_model_param_count(&p.config, NULL, &elements) != WEFT_OK ||
        weft_model_query(&p.exec, &p.config, SEQUENCES, LENGTH, &p.bytes) != WEFT_OK)
        fail_msg("%s", weft_last_error());
    const size_t
        hop = (size_t)(LENGTH * p.config.channels) * (stage == WEFT_STAGE_BLOCK ? 1 : (size_t)p.config.streams),
        mix = LENGTH * (size_t)p.config.streams,
        counts[PARTS] =
            {(size_t)elements, (size_t)elements, LENGTH, LENGTH, 1, 1, hop, hop, hop, hop, mix, mix, mix, mix},
        sizes[PARTS] = {value, value, 4, 4, 8, 8, value, value, value, value, value, value, value, value};
    p.memory = must_alloc(p.bytes.total);
    for (int i = 0; i < PARTS; i++) {
        p.element[i] = sizes[i], p.size[i] = counts[i] * sizes[i];
        p.part[i] = must_alloc(p.size[i] + 64);
        memset(p.part[i], 0, p.size[i] + 64);
    }
    assert_int_equal(weft_model_init(&p.config, 3, p.part[PARAMETERS] + value / 2), WEFT_ERR_ARGUMENT);
    assert_int_equal(weft_model_init(&p.config, 3, p.part[PARAMETERS]), WEFT_OK);
    assert_int_equal(weft_model_bind(&p.exec, &p.config, SEQUENCES, LENGTH, p.memory, p.bytes.total, &p.model),
                     WEFT_OK);
    return p;
}

static void pass_close(pass *p)
{
    for (int i = 0; i < PARTS; i++) free(p->part[i]);
    free(p->memory);
}

/* One pass with array `k` at `at`; a backward has its forward before it. */
static weft_status pass_run(pass *p, bool forward, int k, void *at)
{
    void *a[PARTS];
    for (int i = 0; i < PARTS; i++) a[i] = p->part[i];
    for (int way = 0; way < (forward ? 1 : 2); way++) {
        if (forward || way) a[k] = at;
        const weft_model_args args = {.struct_size = sizeof args,
                                      .parameters = a[PARAMETERS],
                                      .gradients = a[GRADIENTS],
                                      .tokens = a[TOKENS],
                                      .targets = a[TARGETS],
                                      .training = 1,
                                      .step = a[STEP],
                                      .loss = a[LOSS],
                                      .streams_in = a[IN],
                                      .streams_out = a[OUT],
                                      .d_streams_out = a[D_OUT],
                                      .d_streams_in = a[D_IN],
                                      .mix_in = a[MIX_IN],
                                      .mix_out = a[MIX_OUT],
                                      .d_mix_out = a[D_MIX_OUT],
                                      .d_mix_in = a[D_MIX_IN]};
        if (forward || way) return (forward ? weft_model_forward : weft_model_backward)(&p->exec, &p->model, &args);
        if (weft_model_forward(&p->exec, &p->model, &args) != WEFT_OK) fail_msg("%s", weft_last_error());
    }
    return WEFT_OK;
}

static void expect_pass(pass *p, bool forward, int k, void *at, weft_status want, const char *what)
{
    weft_status got = pass_run(p, forward, k, at);
    if (got != want || (want != WEFT_OK && !strstr(weft_last_error(), part_names[k])))
        test_failed("stage %d, %s: %s %s: \"%s\" (%s), want \"%s\"", (int)p->config.stage,
                    forward ? "forward" : "backward", part_names[k], what, weft_status_name(got), weft_last_error(),
                    weft_status_name(want));
}

static void arrays_of_a_pass(void **state)
{
    (void)state;
    for (int stage = 0; stage < WEFT_STAGE_COUNT; stage++)
        for (int kind = 0; kind < 3; kind++) { /* f32, f64, and with mixes that hop */
            const bool f64 = kind == 1, single = kind == 2;
            pass p = pass_open(single ? WEFT_RESIDUAL_MHC_SINGLE_PASS : WEFT_RESIDUAL_MHC, (weft_stage)stage,
                               f64 ? WEFT_F64 : WEFT_F32);
            const bool entry = stage == WEFT_STAGE_WHOLE || stage == WEFT_STAGE_FIRST,
                       exit = stage == WEFT_STAGE_WHOLE || stage == WEFT_STAGE_LAST;
            const bool in = single && (stage == WEFT_STAGE_MIDDLE || stage == WEFT_STAGE_LAST),
                       out = single && (stage == WEFT_STAGE_FIRST || stage == WEFT_STAGE_MIDDLE);
            const bool used[2][PARTS] = {{1, 1, entry, exit, 1, 0, 0, 0, !exit, !entry, 0, 0, out, in},
                                         {1, 0, entry, exit, 1, exit, !entry, !exit, 0, 0, in, out, 0, 0}};
            for (int forward = 0; forward < 2; forward++)
                for (int k = 0; k < PARTS; k++) {
                    char *own = p.part[k], *memory = p.memory;
                    const size_t half = p.element[k] / 2;
                    bool optional = k == STEP || k == LOSS || (k == TARGETS && forward);
                    if (!used[forward][k]) { /* not looked at */
                        expect_pass(&p, forward, k, (void *)1, WEFT_OK, "unused");
                        expect_pass(&p, forward, k, NULL, WEFT_OK, "unused");
                        continue;
                    }
                    expect_pass(&p, forward, k, own, WEFT_OK, "as it should be");
                    expect_pass(&p, forward, k, NULL, optional ? WEFT_OK : WEFT_ERR_ARGUMENT, "NULL");
                    expect_pass(&p, forward, k, own + 1, WEFT_ERR_ARGUMENT, "off by a byte");
                    expect_pass(&p, forward, k, own + half, WEFT_ERR_ARGUMENT, "off by half an element");
                    expect_pass(&p, forward, k, memory, WEFT_ERR_OVERLAP, "at the model's memory");
                    expect_pass(&p, forward, k, memory + (p.bytes.total - 8) / 8 * 8, WEFT_ERR_OVERLAP,
                                "at the end of the model's memory");
                    /* what is written against all the others */
                    for (int j = 0; j < PARTS; j++) {
                        bool written =
                            k == GRADIENTS || k == LOSS || k == OUT || k == D_IN || k == MIX_OUT || k == D_MIX_IN;
                        bool in_place = (k == OUT && j == IN) || (k == D_IN && j == D_OUT) ||
                                        (k == MIX_OUT && j == MIX_IN) || (k == D_MIX_IN && j == D_MIX_OUT);
                        if (j == k || !written || !used[forward][j]) continue;
                        expect_pass(&p, forward, k, p.part[j], in_place ? WEFT_OK : WEFT_ERR_OVERLAP,
                                    "over another");
                        char *inside = p.part[j] + (p.size[j] > 64 ? 16 : 0);
                        if (!in_place || p.size[j] > 64)
                            expect_pass(&p, forward, k, inside, WEFT_ERR_OVERLAP, "inside of another");
                    }
                }
            pass_close(&p);
        }
    test_verdict();
}

/* A hop in place gives the same bits as one between two arrays. */
static void hops_in_place(void **state)
{
    (void)state;
    static const weft_stage stages[] = {WEFT_STAGE_MIDDLE, WEFT_STAGE_BLOCK};
    for (int s = 0; s < 2; s++) {
        pass p = pass_open(WEFT_RESIDUAL_MHC, stages[s], WEFT_F32);
        const size_t bytes = p.size[IN];
        for (size_t i = 0; i < bytes / 4; i++)
            ((float *)(void *)p.part[IN])[i] = ((float *)(void *)p.part[D_OUT])[i] = (float)(i % 7) - 3;
        char *in = must_alloc(bytes), *out = must_alloc(bytes), *d_in = must_alloc(bytes);
        memcpy(in, p.part[IN], bytes);
        assert_int_equal(pass_run(&p, false, D_IN, p.part[D_IN]), WEFT_OK);
        memcpy(out, p.part[OUT], bytes);
        memcpy(d_in, p.part[D_IN], bytes);
        assert_int_equal(pass_run(&p, false, D_IN, p.part[D_OUT]), WEFT_OK);
        assert_memory_equal(p.part[D_OUT], d_in, bytes);
        assert_int_equal(pass_run(&p, true, OUT, p.part[IN]), WEFT_OK);
        assert_memory_equal(p.part[IN], out, bytes);
        assert_memory_not_equal(in, out, bytes);
        free(in), free(out), free(d_in);
        pass_close(&p);
    }
}

static void bad_values_are_named(void **state)
{
    (void)state;
    weft_model_config c = gpt_config(WEFT_RESIDUAL_MHC, WEFT_F32);
    gpt g;
    char name[64];
    gpt_open(&g, &c, 1, 4, 0);
    gpt_loss(&g);
    assert_int_equal(weft_model_first_nonfinite(&g.exec, &g.model, name), WEFT_OK);
    assert_string_equal(name, "");
    weft_model_param p;
    assert_true(gpt_find(&c, "layers.1.mlp.down.weight", &p));
    gpt_set_parameter(&g, p.offset, (double)NAN);
    gpt_loss(&g);
    assert_int_equal(weft_model_first_nonfinite(&g.exec, &g.model, name), WEFT_OK);
    assert_string_equal(name, "layers.1.mlp.output");
    gpt_close(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_are_exact),
        cmocka_unit_test(every_parameter_learns),
        cmocka_unit_test(cpu_follows_the_reference),
        cmocka_unit_test(threads_change_nothing),
        cmocka_unit_test(more_threads_than_bound_are_refused),
        cmocka_unit_test(begins_as_the_plain_residual),
        cmocka_unit_test(parameters_lie_side_by_side),
        cmocka_unit_test(first_mixes),
        cmocka_unit_test(gains_tell_the_kinds_apart),
        cmocka_unit_test(mixes_have_the_gains),
        cmocka_unit_test(stages_are_the_whole),
        cmocka_unit_test(block_between_rows),
        cmocka_unit_test(joined_is_site_by_site),
        cmocka_unit_test(recompute_changes_no_bit),
        cmocka_unit_test(memory_is_what_the_query_says),
        cmocka_unit_test(steps_are_the_whole),
        cmocka_unit_test(a_state_is_of_constant_size),
        cmocka_unit_test(bad_steps),
        cmocka_unit_test(calls_out_of_order),
        cmocka_unit_test(bad_configurations),
        cmocka_unit_test(bad_values_are_named),
        cmocka_unit_test(arrays_of_a_pass),
        cmocka_unit_test(hops_in_place),
    };
    return suite_run("model", tests);
}
