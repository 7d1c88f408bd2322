/* SPDX-License-Identifier: Apache-2.0
 *
 * A whole layer of Gated DeltaNet between its projections, the operators in front of the rule and the rule together: chunks and
 * the CPU against the reference, gradients against finite differences. */
#include "support/suite.h"

enum {
    B = 2,
    S = 50,
    HK = 2,
    HV = 4,
    DK = 16,
    DV = 24,
    W = 4,
    C = 2 * HK * DK + HV * DV,
    P = C + HV * DV + 2 * HV
};

/* Everything of a layer between its projections, float32 on the CPU or float64 on the reference. */
typedef struct layer {
    weft_dtype dtype;
    weft_exec exec;
    weft_tensor proj, weight, a_log, dt_bias, query, key, value, gate, beta, g, o;
    weft_tensor d_o, d_query, d_key, d_value, d_beta, d_g, d_proj, d_weight, d_a_log, d_dt_bias;
} layer;

static weft_tensor make(const layer *l, const char *name, int ndim, const int64_t *shape, double size)
{
    int64_t count = 1;
    for (int i = 0; i < ndim; i++) count *= shape[i];
    void *data = malloc((size_t)count * weft_dtype_size(l->dtype));
    rng r = {rng_name(5, name)};
    for (int64_t k = 0; k < count; k++) /* the same numbers in both, so they are float32's */
        value_store((char *)data + (size_t)k * weft_dtype_size(l->dtype), l->dtype,
                    (double)(float)(size * rng_normal(&r)));
    return weft_dense(data, l->dtype, ndim, shape);
}

static layer layer_make(weft_exec exec)
{
    static const int64_t p[] = {B, S, P}, w[] = {C, W}, h[] = {HV}, q[] = {B, S, HK, DK}, v[] = {B, S, HV, DV};
    static const int64_t g[] = {B, S, HV};
    layer l = {.dtype = exec.backend == WEFT_BACKEND_REF ? WEFT_F64 : WEFT_F32, .exec = exec};
    l.proj = make(&l, "proj", 3, p, 1);
    l.weight = make(&l, "weight", 2, w, 0.5);
    l.a_log = make(&l, "a_log", 1, h, 0.5);
    l.dt_bias = make(&l, "dt_bias", 1, h, 1);
    l.query = make(&l, "", 4, q, 0), l.key = make(&l, "", 4, q, 0);
    l.value = make(&l, "", 4, v, 0), l.gate = make(&l, "", 4, v, 0), l.o = make(&l, "", 4, v, 0);
    l.beta = make(&l, "", 3, g, 0), l.g = make(&l, "", 3, g, 0);
    l.d_o = make(&l, "d_o", 4, v, 1);
    l.d_query = make(&l, "", 4, q, 0), l.d_key = make(&l, "", 4, q, 0), l.d_value = make(&l, "", 4, v, 0);
    l.d_beta = make(&l, "", 3, g, 0), l.d_g = make(&l, "", 3, g, 0);
    l.d_proj = make(&l, "", 3, p, 0), l.d_weight = make(&l, "", 2, w, 0);
    l.d_a_log = make(&l, "", 1, h, 0), l.d_dt_bias = make(&l, "", 1, h, 0);
    return l;
}

static void layer_free(layer *l)
{
    const weft_tensor *all[] = {&l->proj,     &l->weight,  &l->a_log,    &l->dt_bias, &l->query, &l->key,
                                &l->value,    &l->gate,    &l->beta,     &l->g,       &l->o,     &l->d_o,
                                &l->d_query,  &l->d_key,   &l->d_value,  &l->d_beta,  &l->d_g,   &l->d_proj,
                                &l->d_weight, &l->d_a_log, &l->d_dt_bias};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]->data);
}

static void layer_forward(const layer *l, int chunk)
{
    weft_gdn_sections s = weft_gdn_split(&l->proj, HK, DK, HV, DV);
    run_plain("gdn_pre_fwd", l->exec,
              WEFT_ARGS(weft_gdn_pre_fwd_args, .options = weft_gdn_defaults(), .q = s.q, .k = s.k, .v = s.v,
                        .z = s.z, .b = s.b, .a = s.a, .weight = l->weight, .a_log = l->a_log, .dt_bias = l->dt_bias,
                        .query = l->query, .key = l->key, .value = l->value, .gate = l->gate, .beta = l->beta,
                        .g = l->g));
    run_plain("gdn_rule_fwd", l->exec,
              WEFT_ARGS(weft_gdn_rule_fwd_args, .scale = 0.25, .chunk = chunk, .query = l->query, .key = l->key,
                        .value = l->value, .beta = l->beta, .g = l->g, .o = l->o));
}

static void layer_backward(const layer *l, int chunk)
{
    weft_gdn_sections s = weft_gdn_split(&l->proj, HK, DK, HV, DV), d = weft_gdn_split(&l->d_proj, HK, DK, HV, DV);
    run_plain("gdn_rule_bwd", l->exec,
              WEFT_ARGS(weft_gdn_rule_bwd_args, .scale = 0.25, .chunk = chunk, .query = l->query, .key = l->key,
                        .value = l->value, .beta = l->beta, .g = l->g, .d_o = l->d_o, .d_query = {l->d_query, 0},
                        .d_key = {l->d_key, 0}, .d_value = {l->d_value, 0}, .d_beta = {l->d_beta, 0},
                        .d_g = {l->d_g, 0}));
    run_plain("gdn_pre_bwd", l->exec,
              WEFT_ARGS(weft_gdn_pre_bwd_args, .options = weft_gdn_defaults(), .q = s.q, .k = s.k, .v = s.v,
                        .b = s.b, .a = s.a, .weight = l->weight, .a_log = l->a_log, .dt_bias = l->dt_bias,
                        .d_query = l->d_query, .d_key = l->d_key, .d_value = l->d_value, .d_beta = l->d_beta,
                        .d_g = l->d_g, .d_q = {d.q, 0}, .d_k = {d.k, 0}, .d_v = {d.v, 0}, .d_z = {d.z, 0},
                        .d_b = {d.b, 0}, .d_a = {d.a, 0}, .d_weight = {l->d_weight, 0}, .d_a_log = {l->d_a_log, 0},
                        .d_dt_bias = {l->d_dt_bias, 0}));
}

static double at(const weft_tensor *t, int64_t k)
{
    return value_load((const char *)t->data + (size_t)k * weft_dtype_size(t->dtype), t->dtype);
}

static void expect_close(const weft_tensor *got, const weft_tensor *want, double limit, const char *what)
{
    double error = 0, norm = 0;
    int64_t count = 1;
    for (int i = 0; i < got->ndim; i++) count *= got->shape[i];
    for (int64_t k = 0; k < count; k++) {
        error += (at(got, k) - at(want, k)) * (at(got, k) - at(want, k));
        norm += at(want, k) * at(want, k);
    }
    if (!(sqrt(error) <= limit * sqrt(norm)))
        test_failed("%s: relative norm of the difference %.3g, limit %.3g", what, sqrt(error / norm), limit);
}

static void expect_layer(const layer *got, const layer *want, double limit, const char *what)
{
    expect_close(&got->o, &want->o, limit, what);
    expect_close(&got->d_proj, &want->d_proj, limit, what);
    expect_close(&got->d_weight, &want->d_weight, limit, what);
    expect_close(&got->d_a_log, &want->d_a_log, limit, what);
    expect_close(&got->d_dt_bias, &want->d_dt_bias, limit, what);
}

static double loss(const layer *l)
{
    double sum = 0;
    layer_forward(l, 0);
    for (int64_t k = 0; k < (int64_t)B * S * HV * DV; k++) sum += at(&l->o, k) * at(&l->d_o, k);
    return sum;
}

static void a_layer_end_to_end(void **state)
{
    (void)state;
    weft_isa isas[4];
    int count = grid_isas(isas);
    layer exact = layer_make(on_ref()), chunked = layer_make(on_ref());
    layer_forward(&exact, 0);
    layer_backward(&exact, 0);
    layer_forward(&chunked, 16);
    layer_backward(&chunked, 16);
    expect_layer(&chunked, &exact, 1e-12, "in chunks");
    for (int i = 0; i < count; i++) {
        layer l = layer_make(on_cpu(isas[i], 2));
        layer_forward(&l, 0);
        layer_backward(&l, 0);
        expect_layer(&l, &exact, 3e-6, weft_isa_name(isas[i]));
        layer_free(&l);
    }
    /* gradients of the whole, along random directions of the projection and of the parameters */
    const weft_tensor *const inputs[] = {&exact.proj, &exact.weight, &exact.a_log, &exact.dt_bias};
    const weft_tensor *const grads[] = {&exact.d_proj, &exact.d_weight, &exact.d_a_log, &exact.d_dt_bias};
    for (int i = 0; i < 4; i++) {
        int64_t n = 1;
        for (int d = 0; d < inputs[i]->ndim; d++) n *= inputs[i]->shape[d];
        double *x = inputs[i]->data, *keep = malloc((size_t)n * sizeof *keep), dot = 0, norm = 0, value[4];
        static const double steps[4] = {-2, -1, 1, 2};
        double h = 1e-5;
        memcpy(keep, x, (size_t)n * sizeof *keep);
        for (int s = 0; s < 4; s++) {
            rng r = {(uint64_t)i + 9};
            for (int64_t k = 0; k < n; k++) {
                double direction = rng_next(&r) & 1 ? 1 : -1;
                x[k] = keep[k] + steps[s] * h * direction;
                if (s == 0) dot += direction * at(grads[i], k), norm += fabs(at(grads[i], k));
            }
            value[s] = loss(&exact);
        }
        memcpy(x, keep, (size_t)n * sizeof *keep);
        double slope = (8 * (value[2] - value[1]) - (value[3] - value[0])) / (12 * h);
        if (!(fabs(slope - dot) <= 1e-7 * norm))
            test_failed("input %d: gradient %.12g, finite difference %.12g", i, dot, slope);
        free(keep);
    }
    layer_free(&exact);
    layer_free(&chunked);
    test_verdict();
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(a_layer_end_to_end)};
    return suite_run("gdn_layer", tests);
}
