/* SPDX-License-Identifier: Apache-2.0
 *
 * The mHC conventions. All describe one site: coefficients and aggregate from x, expand-combine of x with a
 * sub-layer's output f, and the gradients of both results together. They differ in layout, names, numerics and
 * precision. Every case goes three ways through the operators, and all must agree with the file. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <weft/mhc.h>

#include "check/element.h"
#include "golden/golden_file.h"

/* Names of the file's tensors; a gradient is called d_<name>. NULL: the file has no such tensor. */
typedef struct site_names {
    const char *phi, *alpha[3], *beta, *bias;
    const char *h, *ms, *mix, *pre, *post, *logits, *res;
} site_names;

typedef struct site {
    golden_file *file;
    const site_names *names;
    weft_mhc_numerics numerics;
    int64_t tokens, streams, channels, gates;
    weft_dtype act, full; /* x, f, u, y; and everything else */
    int swapped;          /* (C, n) in memory */
    golden_tolerance act_tolerance, full_tolerance, d_x_tolerance;
    weft_tensor x, phi, norm_weight, alpha, beta, f, bias, d_u, d_y;
    weft_tensor h, ms, pre, post, logits, res, u, y;
    weft_tensor d_x, d_phi, d_norm_weight, d_alpha, d_beta, d_f, d_bias;
    weft_tensor d_h, d_ms, d_pre, d_post, d_logits, d_res;
} site;

/* ---- tensors ------------------------------------------------------------------------------------------------- */

static weft_tensor streams_view(const site *s, void *data, weft_dtype dtype, int64_t rows)
{
    return s->swapped ? weft_dense3_swapped(data, dtype, rows, s->streams, s->channels)
                      : weft_dense3(data, dtype, rows, s->streams, s->channels);
}

static weft_tensor gain_view(const site *s, void *data)
{
    weft_tensor t = weft_dense2(data, s->full, s->streams, s->channels);
    if (s->swapped) {
        t.stride[0] = 1;
        t.stride[1] = s->streams;
    }
    return t;
}

static void load_inputs(site *s)
{
    golden_file *file = s->file;
    const site_names *names = s->names;
    int64_t T = s->tokens, n = s->streams, C = s->channels, N = s->gates;
    s->x = streams_view(s, golden_input(file, "x", T * n * C, s->act), s->act, T);
    s->phi = streams_view(s, golden_input(file, names->phi, N * n * C, s->full), s->full, N);
    if (golden_has(file, "norm_weight"))
        s->norm_weight = gain_view(s, golden_input(file, "norm_weight", n * C, s->full));
    s->alpha = weft_dense1(golden_memory(file, 3, s->full), s->full, 3);
    if (!names->alpha[1]) {
        s->alpha.data = golden_input(file, names->alpha[0], 3, s->full);
    } else {
        for (int g = 0; g < 3; g++) {
            const void *one = golden_input(file, names->alpha[g], 1, s->full);
            if (one) element_store(s->alpha.data, s->full, g, element_load(one, s->full, 0));
        }
    }
    s->beta = weft_dense1(golden_input(file, names->beta, N, s->full), s->full, N);
    s->f = weft_dense2(golden_input(file, "f", T * C, s->act), s->act, T, C);
    if (golden_has(file, names->bias))
        s->bias = weft_dense1(golden_input(file, names->bias, C, s->full), s->full, C);
    s->d_u = weft_dense2(golden_input(file, "d_aggregate", T * C, s->act), s->act, T, C);
    s->d_y = streams_view(s, golden_input(file, "d_combine", T * n * C, s->act), s->act, T);
}

/* Fresh memory for every way through the operators. */
static void make_outputs(site *s)
{
    golden_file *file = s->file;
    weft_dtype full = s->full, act = s->act;
    int64_t T = s->tokens, n = s->streams, C = s->channels, N = s->gates;
    s->h = weft_dense2(golden_memory(file, T * N, full), full, T, N);
    s->ms = weft_dense1(golden_memory(file, T, full), full, T);
    s->pre = weft_dense2(golden_memory(file, T * n, full), full, T, n);
    s->post = weft_dense2(golden_memory(file, T * n, full), full, T, n);
    s->logits = weft_dense3(golden_memory(file, T * n * n, full), full, T, n, n);
    s->res = weft_dense3(golden_memory(file, T * n * n, full), full, T, n, n);
    s->u = weft_dense2(golden_memory(file, T * C, act), act, T, C);
    s->y = streams_view(s, golden_memory(file, T * n * C, act), act, T);
    s->d_x = streams_view(s, golden_memory(file, T * n * C, full), full, T);
    s->d_phi = streams_view(s, golden_memory(file, N * n * C, full), full, N);
    if (s->norm_weight.data) s->d_norm_weight = gain_view(s, golden_memory(file, n * C, full));
    s->d_alpha = weft_dense1(golden_memory(file, 3, full), full, 3);
    s->d_beta = weft_dense1(golden_memory(file, N, full), full, N);
    s->d_f = weft_dense2(golden_memory(file, T * C, act), act, T, C);
    if (s->bias.data) s->d_bias = weft_dense1(golden_memory(file, C, full), full, C);
    s->d_h = weft_dense2(golden_memory(file, T * N, full), full, T, N);
    s->d_ms = weft_dense1(golden_memory(file, T, full), full, T);
    s->d_pre = weft_dense2(golden_memory(file, T * n, full), full, T, n);
    s->d_post = weft_dense2(golden_memory(file, T * n, full), full, T, n);
    s->d_logits = weft_dense3(golden_memory(file, T * n * n, full), full, T, n, n);
    s->d_res = weft_dense3(golden_memory(file, T * n * n, full), full, T, n, n);
}

/* ---- operators ----------------------------------------------------------------------------------------------- */

#define CALL(op, ...) golden_call(s->file, #op, WEFT_ARGS(weft_##op##_args, __VA_ARGS__))

typedef enum route { ROUTE_SINGLE, ROUTE_COEF, ROUTE_PRE, ROUTE_COUNT } route;

static void coefficients(site *s, route by)
{
    if (by == ROUTE_PRE) {
        CALL(mhc_pre_fwd, .numerics = s->numerics, .x = s->x, .phi = s->phi, .norm_weight = s->norm_weight,
             .alpha = s->alpha, .beta = s->beta, .h = s->h, .ms = s->ms, .pre = s->pre, .post = s->post,
             .res = s->res, .u = s->u);
        return;
    }
    CALL(mhc_project_fwd, .x = s->x, .phi = s->phi, .norm_weight = s->norm_weight, .h = s->h, .ms = s->ms);
    if (by == ROUTE_SINGLE) {
        CALL(mhc_scale_fwd, .numerics = s->numerics, .h = s->h, .ms = s->ms, .alpha = s->alpha, .beta = s->beta,
             .pre = s->pre, .post = s->post, .logits = s->logits);
        CALL(mhc_sinkhorn_fwd, .numerics = s->numerics, .logits = s->logits, .res = s->res);
    } else {
        CALL(mhc_coef_fwd, .numerics = s->numerics, .h = s->h, .ms = s->ms, .alpha = s->alpha, .beta = s->beta,
             .pre = s->pre, .post = s->post, .res = s->res);
    }
    CALL(mhc_aggregate_fwd, .x = s->x, .pre = s->pre, .u = s->u);
}

/* d_x already holds the part of the combine; the parts of aggregate and projection are added in full precision. */
static void coefficients_bwd(site *s, route by)
{
    weft_grad d_x = {s->d_x, 1}, d_alpha = {s->d_alpha, 0}, d_beta = {s->d_beta, 0};
    if (by == ROUTE_PRE) {
        CALL(mhc_pre_bwd, .numerics = s->numerics, .x = s->x, .phi = s->phi, .norm_weight = s->norm_weight,
             .alpha = s->alpha, .beta = s->beta, .h = s->h, .ms = s->ms, .d_u = s->d_u, .d_post = s->d_post,
             .d_res = s->d_res, .d_x = d_x, .d_phi = {s->d_phi, 0}, .d_norm_weight = {s->d_norm_weight, 0},
             .d_alpha = d_alpha, .d_beta = d_beta);
        return;
    }
    CALL(mhc_aggregate_bwd, .x = s->x, .pre = s->pre, .d_u = s->d_u, .d_x = d_x, .d_pre = {s->d_pre, 0});
    if (by == ROUTE_SINGLE) {
        CALL(mhc_sinkhorn_bwd, .numerics = s->numerics, .logits = s->logits, .d_res = s->d_res,
             .d_logits = {s->d_logits, 0});
        CALL(mhc_scale_bwd, .numerics = s->numerics, .h = s->h, .ms = s->ms, .alpha = s->alpha, .beta = s->beta,
             .d_pre = s->d_pre, .d_post = s->d_post, .d_logits = s->d_logits, .d_h = {s->d_h, 0},
             .d_ms = {s->d_ms, 0}, .d_alpha = d_alpha, .d_beta = d_beta);
    } else {
        CALL(mhc_coef_bwd, .numerics = s->numerics, .h = s->h, .ms = s->ms, .alpha = s->alpha, .beta = s->beta,
             .d_pre = s->d_pre, .d_post = s->d_post, .d_res = s->d_res, .d_h = {s->d_h, 0}, .d_ms = {s->d_ms, 0},
             .d_alpha = d_alpha, .d_beta = d_beta);
    }
    CALL(mhc_project_bwd, .x = s->x, .phi = s->phi, .norm_weight = s->norm_weight, .d_h = s->d_h, .d_ms = s->d_ms,
         .d_x = d_x, .d_phi = {s->d_phi, 0}, .d_norm_weight = {s->d_norm_weight, 0});
}

static void run_site(site *s, route by)
{
    make_outputs(s);
    coefficients(s, by);
    CALL(mhc_post_fwd, .numerics = s->numerics, .x = s->x, .f = s->f, .bias = s->bias, .post = s->post,
         .res = s->res, .y = s->y);
    CALL(mhc_post_bwd, .numerics = s->numerics, .x = s->x, .f = s->f, .bias = s->bias, .post = s->post,
         .res = s->res, .d_y = s->d_y, .d_x = {s->d_x, 0}, .d_f = {s->d_f, 0}, .d_bias = {s->d_bias, 0},
         .d_post = {s->d_post, 0}, .d_res = {s->d_res, 0});
    coefficients_bwd(s, by);
}

/* ---- comparison ---------------------------------------------------------------------------------------------- */

static void compare_gradient(site *s, const char *name, const weft_tensor *got, golden_tolerance tolerance)
{
    char full[100];
    snprintf(full, sizeof full, "d_%s", name);
    if (got->data) golden_compare(s->file, full, got, tolerance);
}

/* Some files hold the projection with the norm already applied: mix = h inv. */
static void compare_mix(site *s)
{
    double *mix = golden_memory(s->file, s->tokens * s->gates, WEFT_F64);
    for (int64_t t = 0; t < s->tokens; t++) {
        double ms = element_load(s->ms.data, s->full, t), eps = s->numerics.rms_eps;
        double inv = s->numerics.rms_eps_kind == WEFT_EPS_INSIDE ? 1 / sqrt(ms + eps) : 1 / (sqrt(ms) + eps);
        for (int64_t j = 0; j < s->gates; j++)
            mix[t * s->gates + j] = inv * element_load(s->h.data, s->full, t * s->gates + j);
    }
    weft_tensor got = weft_dense2(mix, WEFT_F64, s->tokens, s->gates);
    golden_compare(s->file, s->names->mix, &got, s->full_tolerance);
}

static void compare_site(site *s, route by)
{
    golden_file *file = s->file;
    const site_names *names = s->names;
    golden_tolerance full = s->full_tolerance, act = s->act_tolerance;
    if (names->h) golden_compare(file, names->h, &s->h, full);
    if (names->ms) golden_compare(file, names->ms, &s->ms, full);
    if (names->mix) compare_mix(s);
    golden_compare(file, names->pre, &s->pre, full);
    golden_compare(file, names->post, &s->post, full);
    if (names->logits && by == ROUTE_SINGLE) golden_compare(file, names->logits, &s->logits, full);
    golden_compare(file, names->res, &s->res, full);
    golden_compare(file, "aggregate", &s->u, act);
    golden_compare(file, "combine", &s->y, act);
    compare_gradient(s, "x", &s->d_x, s->d_x_tolerance);
    compare_gradient(s, "f", &s->d_f, act);
    compare_gradient(s, names->phi, &s->d_phi, full);
    compare_gradient(s, "norm_weight", &s->d_norm_weight, full);
    compare_gradient(s, names->beta, &s->d_beta, full);
    compare_gradient(s, names->bias, &s->d_bias, full);
    if (!names->alpha[1]) compare_gradient(s, names->alpha[0], &s->d_alpha, full);
    for (int g = 0; names->alpha[1] && g < 3; g++) {
        weft_tensor one = weft_dense1((char *)s->d_alpha.data + (size_t)g * weft_dtype_size(s->full), s->full, 1);
        compare_gradient(s, names->alpha[g], &one, full);
    }
}

static void check_site(site *s)
{
    golden_file *file = s->file;
    if (file->iters) s->numerics.sinkhorn_iters = file->iters;
    if (!file->problem[0] && (s->streams > WEFT_MAX_STREAMS || s->streams < 1))
        golden_fail(file, "%s: %lld streams, expected 1 to %d", file->prefix, (long long)s->streams,
                    WEFT_MAX_STREAMS);
    if (file->problem[0]) return;
    s->gates = 2 * s->streams + s->streams * s->streams;
    load_inputs(s);
    for (route by = 0; by < ROUTE_COUNT && !file->problem[0]; by++) {
        run_site(s, by);
        if (!file->problem[0]) compare_site(s, by);
    }
}

/* ---- conventions --------------------------------------------------------------------------------------------- */

/* x (s,b,C,n), everything float32 */
void golden_te(golden_file *file)
{
    static const site_names names = {.phi = "phi",
                                     .alpha = {"alpha"},
                                     .beta = "beta",
                                     .bias = "bias",
                                     .h = "H",
                                     .ms = "ms",
                                     .pre = "h_pre",
                                     .post = "h_post",
                                     .logits = "h_res_logits",
                                     .res = "h_res"};
    golden_tolerance all = {1e-5, 0};
    site s = {.file = file,
              .names = &names,
              .act = WEFT_F32,
              .full = WEFT_F32,
              .swapped = 1,
              .act_tolerance = all,
              .full_tolerance = all,
              .d_x_tolerance = all};
    weft_mhc_preset_numerics(WEFT_PRESET_TRANSFORMER_ENGINE, &s.numerics);
    s.tokens = golden_size(file, "x", 4, 0) * golden_size(file, "x", 4, 1);
    s.channels = golden_size(file, "x", 4, 2);
    s.streams = golden_size(file, "x", 4, 3);
    check_site(&s);
}

/* x (s,b,n*C), everything float64: the reference keeps that, other backends get the inputs rounded to float32 */
void golden_megatron(golden_file *file)
{
    static const site_names names = {.phi = "weight",
                                     .alpha = {"alpha_pre", "alpha_post", "alpha_res"},
                                     .beta = "bias",
                                     .bias = "f_bias",
                                     .pre = "h_pre",
                                     .post = "h_post",
                                     .res = "h_res"};
    int reference = file->exec->backend == WEFT_BACKEND_REF;
    golden_tolerance all = {reference ? 1e-10 : 2e-5, 0};
    weft_dtype dtype = reference ? WEFT_F64 : WEFT_F32;
    site s = {.file = file,
              .names = &names,
              .act = dtype,
              .full = dtype,
              .act_tolerance = all,
              .full_tolerance = all,
              .d_x_tolerance = all};
    weft_mhc_preset_numerics(WEFT_PRESET_MEGATRON_MAIN, &s.numerics);
    s.tokens = golden_size(file, "x", 3, 0) * golden_size(file, "x", 3, 1);
    s.streams = golden_size(file, "h_pre", 3, 2);
    int64_t width = golden_size(file, "x", 3, 2);
    if (s.streams > 0 && width % s.streams)
        golden_fail(file, "%s.x: not a multiple of the streams wide", file->prefix);
    s.channels = s.streams > 0 ? width / s.streams : 0;
    check_site(&s);
}

/* The learned head of the same streams. */
static void check_head(site *s)
{
    golden_file *file = s->file;
    int64_t T = s->tokens, n = s->streams, C = s->channels;
    weft_dtype full = s->full, act = s->act;
    weft_tensor phi = weft_dense3(golden_input(file, "head_fn", n * n * C, full), full, n, n, C);
    weft_tensor alpha = weft_dense1(golden_input(file, "head_scale", 1, full), full, 1);
    weft_tensor beta = weft_dense1(golden_input(file, "head_base", n, full), full, n);
    weft_tensor d_u = weft_dense2(golden_input(file, "d_head", T * C, act), act, T, C);
    weft_tensor u = weft_dense2(golden_memory(file, T * C, act), act, T, C);
    weft_tensor h = weft_dense2(golden_memory(file, T * n, full), full, T, n);
    weft_tensor ms = weft_dense1(golden_memory(file, T, full), full, T);
    weft_tensor d_x = weft_dense3(golden_memory(file, T * n * C, full), full, T, n, C);
    weft_tensor d_phi = weft_dense3(golden_memory(file, n * n * C, full), full, n, n, C);
    weft_tensor d_alpha = weft_dense1(golden_memory(file, 1, full), full, 1);
    weft_tensor d_beta = weft_dense1(golden_memory(file, n, full), full, n);
    CALL(mhc_head_fwd, .rms_eps = 1e-6, .pre_eps = 1e-6, .x = s->x, .phi = phi, .alpha = alpha, .beta = beta,
         .u = u, .h = h, .ms = ms);
    CALL(mhc_head_bwd, .rms_eps = 1e-6, .pre_eps = 1e-6, .x = s->x, .phi = phi, .alpha = alpha, .beta = beta,
         .h = h, .ms = ms, .d_u = d_u, .d_x = {d_x, 0}, .d_phi = {d_phi, 0}, .d_alpha = {d_alpha, 0},
         .d_beta = {d_beta, 0});
    golden_compare(file, "head", &u, s->act_tolerance);
    golden_compare(file, "d_x_head", &d_x, s->d_x_tolerance);
    golden_compare(file, "d_head_fn", &d_phi, s->full_tolerance);
    golden_compare(file, "d_head_scale", &d_alpha, s->full_tolerance);
    golden_compare(file, "d_head_base", &d_beta, s->full_tolerance);
}

/* x (a,b,n,C), bf16 activations, float32 the rest. The file's d_x is a sum of parts that were rounded to bf16. */
void golden_deepseek(golden_file *file)
{
    static const site_names names = {.phi = "fn",
                                     .alpha = {"scale"},
                                     .beta = "base",
                                     .bias = "bias",
                                     .mix = "mix",
                                     .pre = "pre",
                                     .post = "post",
                                     .res = "comb"};
    site s = {.file = file,
              .names = &names,
              .act = WEFT_BF16,
              .full = WEFT_F32,
              .act_tolerance = {1e-5, 1},
              .full_tolerance = {1e-4, 0},
              .d_x_tolerance = {1.0 / 128, 0}};
    weft_mhc_preset_numerics(WEFT_PRESET_DEEPSEEK_V4, &s.numerics);
    s.tokens = golden_size(file, "x", 4, 0) * golden_size(file, "x", 4, 1);
    s.streams = golden_size(file, "x", 4, 2);
    s.channels = golden_size(file, "x", 4, 3);
    check_site(&s);
    if (!file->problem[0] && golden_has(file, "head_fn")) check_head(&s);
}
