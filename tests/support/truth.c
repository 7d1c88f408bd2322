/* SPDX-License-Identifier: Apache-2.0
 *
 * Error bounds. u = 2^-24 is the unit roundoff of the fp32 arithmetic; inputs are exact (they are the rounded
 * values).
 *
 * Sums of products (project, aggregate, post, expand, contract, forward and backward): each path from an input to a
 * result goes through at most k roundings, so |error| <= k u sum|terms|. sum|terms| is what the reference returns
 * for the magnitudes of all inputs. k by kind of sum:
 *     over streams, element by element      n + 3               products, fused adds, dropout factor, bias
 *     over channels                         C/16 + 8 (10)       16 lanes, a tree of four levels, the products
 *     over streams and channels             n ceil(C/16) + 10   the same; with norm_weight one product more
 *     over tokens                           tokens + 6          one after the other
 *     over rows and tokens                  the sum of both
 * Adding to what is there is one rounding more, of the sum.
 *
 * The GPU's arithmetic differs in what struct arithmetic holds. */
#include "support/truth.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

static const double U = 0x1p-24;

static bool starts(const char *text, const char *with)
{
    return strncmp(text, with, strlen(with)) == 0;
}

static bool is(const problem *p, const char *op)
{
    return strcmp(p->op->name, op) == 0;
}

static bool is_sum_of_products(const char *op)
{
    return starts(op, "mhc_project") || starts(op, "mhc_aggregate") || starts(op, "mhc_post") ||
           starts(op, "mhc_expand") || starts(op, "mhc_contract");
}

bool truth_knows(const char *op)
{
    return is_sum_of_products(op) || starts(op, "mhc_scale") || starts(op, "mhc_sinkhorn") ||
           starts(op, "mhc_coef") || starts(op, "rmsnorm");
}

truth truth_make(const problem *p)
{
    truth t = {problem_twin(p, false), NULL};
    problem_must_run(t.exact, on_ref());
    if (is_sum_of_products(p->op->name)) {
        t.magnitude = problem_twin(p, true);
        problem_must_run(t.magnitude, on_ref());
    }
    return t;
}

void truth_free(truth *t)
{
    problem_free(t->exact);
    problem_free(t->magnitude);
    t->exact = t->magnitude = NULL;
}

/* ---- what backends do differently ---------------------------------------------------------------------------- */

typedef struct arithmetic {
    bool amx, tensor_cores;
    double tree;     /* additions at the end of a sum over channels */
    double sigmoid;  /* roundings of exp, sum and quotient */
    double root;     /* roundings of an inverse root and the two products with it */
    double sinkhorn; /* roundings of a normalisation beyond the n of its sum */
} arithmetic;

static arithmetic arithmetic_of(const problem *p, weft_exec exec)
{
    weft_isa isa = exec.isa == WEFT_ISA_BEST ? weft_cpu_isa() : exec.isa;
    arithmetic a = {.tree = 8, .sigmoid = 4, .root = 6, .sinkhorn = 3};
    if (exec.backend == WEFT_BACKEND_CUDA) {
        /* A warp's tree, then its warps one after the other. exp and log are good to 2 ulp, four roundings each. */
        a = (arithmetic){.tree = 24, .sigmoid = 8, .root = 8, .sinkhorn = 11};
        a.tensor_cores = p->spec.act != WEFT_F32;
    } else {
        /* Tiles of 32 channels. */
        a.amx = isa == WEFT_ISA_AMX && p->spec.act == WEFT_BF16 && p->spec.channels % 32 == 0;
    }
    return a;
}

/* ---- sums of products ---------------------------------------------------------------------------------------- */

static double roundings(const problem *p, const arithmetic *how, const char *name)
{
    double n = (double)p->spec.streams, tokens = (double)p->spec.tokens, rows = (double)p->spec.rows;
    double lanes = ceil((double)p->spec.channels / 16);
    /* A tensor core adds 16 products and the sum so far in one go and cuts each of the 17 off at 2^-23 of the largest,
     * once for each of up to three products of high and low parts: 17 * 2 * 3 / 16 units for each term. */
    if (starts(p->op->name, "mhc_project") && how->tensor_cores) {
        const double term = 17 * 2 * 3 / 16.0;
        if (strcmp(name, "h") == 0 || strcmp(name, "ms") == 0) return term * n * (lanes + 1) + 32;
        if (strcmp(name, "d_x") == 0) return term * (rows + 16) + 4;
        if (strcmp(name, "d_phi") == 0) return term * (tokens + 16) + 6;
        if (strcmp(name, "d_norm_weight") == 0) return term * (tokens + rows + 16) + 6;
    }
    if (starts(p->op->name, "mhc_project")) {
        if (strcmp(name, "h") == 0 || strcmp(name, "ms") == 0) return n * lanes + how->tree + 2;
        if (strcmp(name, "d_x") == 0) return rows + 4;
        if (strcmp(name, "d_phi") == 0) return tokens + 6;
        return tokens + rows + 6; /* d_norm_weight */
    }
    if (strcmp(name, "d_pre") == 0 || strcmp(name, "d_res") == 0) return lanes + how->tree;
    if (strcmp(name, "d_post") == 0) return lanes + how->tree + 2;
    if (strcmp(name, "d_bias") == 0) return tokens + n + 6;
    return n + 3;
}

/* What bf16 units leave out of a sum of products, in 2^-17 of the sum of |terms|. A factor that is taken apart into two
 * bf16 numbers loses half an ulp of the low one, which itself is half an ulp of the high one at most: 2^-17 of it. Where
 * both factors of a product are taken apart, the product of their low parts is left out: 2^-16, two of these units.
 * Forward psi is taken apart, on tensor cores in backward d_h and for d_x psi too. f16 streams are as well: exactly, but
 * with a low part. */
static double left_out(const problem *p, const arithmetic *how, const char *name)
{
    bool forward = is(p, "mhc_project_fwd") && strcmp(name, "h") == 0;
    if (how->amx) return forward ? 1 : 0;
    if (!how->tensor_cores || !(forward || is(p, "mhc_project_bwd"))) return 0;
    if (strcmp(name, "d_x") == 0) return 1 + 1 + 2;
    return p->spec.act == WEFT_F16 ? 1 + 2 : 1;
}

static void bound_products(const truth *t, const problem *p, int index, const arithmetic *how, double *bound)
{
    const arg *a = &p->arg[index], *m = &t->magnitude->arg[index];
    double k = roundings(p, how, a->name) * U + left_out(p, how, a->name) * 0x1p-17;
    double *mag = arg_values(m);
    for (int64_t i = 0; i < a->elements; i++) bound[i] = k * mag[i];
    free(mag);
}

/* ---- gates --------------------------------------------------------------------------------------------------- */

static double sigmoid(double z)
{
    return z >= 0 ? 1 / (1 + exp(-z)) : exp(z) / (1 + exp(z));
}

/* One token of scale or coef: z = alpha h inv + beta and how far fp32 may be from it. inv carries three roundings
 * (sum, root, quotient), the products two, the sum one: six of |alpha h inv|, and one of the result. */
typedef struct gate_token {
    int64_t n, rows;
    double inv, *z, *e, *t; /* e: error of z; t: |alpha h inv| */
} gate_token;

typedef struct gate_inputs {
    double *h, *ms, *alpha, *beta;
} gate_inputs;

static double *values_of(const problem *p, const char *name)
{
    const arg *a = problem_arg((problem *)(uintptr_t)p, name);
    return a && a->block ? arg_values(a) : NULL;
}

static gate_inputs gate_inputs_of(const problem *exact)
{
    return (gate_inputs){values_of(exact, "h"), values_of(exact, "ms"), values_of(exact, "alpha"),
                         values_of(exact, "beta")};
}

static void gate_inputs_free(gate_inputs *g)
{
    free(g->h), free(g->ms), free(g->alpha), free(g->beta);
}

static gate_token gate_open(const problem *p)
{
    int64_t n = p->spec.streams;
    gate_token g = {.n = n, .rows = 2 * n + n * n};
    g.z = calloc((size_t)(3 * g.rows), sizeof *g.z);
    if (!g.z) fail_msg("out of memory");
    g.e = g.z + g.rows;
    g.t = g.e + g.rows;
    return g;
}

static int gate_group(const gate_token *g, int64_t j)
{
    return j < g->n ? 0 : j < 2 * g->n ? 1 : 2;
}

static void gate_set(gate_token *g, const arithmetic *how, const weft_mhc_numerics *q, const gate_inputs *in,
                     int64_t token)
{
    double ms = in->ms[token];
    g->inv = q->rms_eps_kind == WEFT_EPS_INSIDE ? 1 / sqrt(ms + q->rms_eps) : 1 / (sqrt(ms) + q->rms_eps);
    for (int64_t j = 0; j < g->rows; j++) {
        double t = in->alpha[gate_group(g, j)] * in->h[token * g->rows + j] * g->inv;
        g->z[j] = t + in->beta[j];
        g->t[j] = fabs(t);
        g->e[j] = U * (how->root * fabs(t) + fabs(g->z[j])) + 0x1p-148;
    }
}

/* exp, sum, quotient, besides what the argument's error does. */
static double sigmoid_error(const arithmetic *how, double z, double e)
{
    double s = sigmoid(z), slope = s * sigmoid(-z);
    return slope * e + how->sigmoid * U * s;
}

/* ---- Sinkhorn ------------------------------------------------------------------------------------------------ */

/* Largest distance of a logit from its row's maximum (from zero for threshold, which does not shift). */
static double spread_of(const weft_mhc_numerics *q, int64_t n, const double *z)
{
    double spread = 0;
    for (int64_t a = 0; a < n; a++) {
        double max = z[a * n];
        for (int64_t b = 1; b < n; b++) max = fmax(max, z[a * n + b]);
        for (int64_t b = 0; b < n; b++)
            spread = fmax(spread, q->sinkhorn == WEFT_SINKHORN_THRESHOLD ? fabs(z[a * n + b]) : max - z[a * n + b]);
    }
    return spread;
}

/* Relative error of every entry. A normalisation of a line costs n+3 roundings (n+11), and passing an error on through
 * further normalisations does not increase it in the projective metric, so the steps add up. The shift costs u
 * times the distance from the row's maximum, once in the linear rules; the log rule pays it for every sum of
 * potentials that is still felt at the end. `e` is the error the logits come with. */
static double sinkhorn_relative(const arithmetic *how, const weft_mhc_numerics *q, int64_t n, double spread,
                                double e)
{
    double steps = 2.0 * q->sinkhorn_iters;
    double shift = q->sinkhorn == WEFT_SINKHORN_LOG ? 8 * spread : spread;
    return 2 * (U * (shift + steps * ((double)n + how->sinkhorn) + 8) + e);
}

/* Matrices of all tokens from float64 logits. */
static double *sinkhorn_of(const weft_mhc_numerics *q, int64_t tokens, int64_t n, double *z)
{
    double *out = calloc((size_t)(tokens * n * n) + 1, sizeof *out);
    if (!out) fail_msg("out of memory");
    run_plain("mhc_sinkhorn_fwd", on_ref(),
              WEFT_ARGS(weft_mhc_sinkhorn_fwd_args, .numerics = *q,
                        .logits = weft_dense3(z, WEFT_F64, tokens, n, n),
                        .res = weft_dense3(out, WEFT_F64, tokens, n, n)));
    return out;
}

/* Absolute error of the logits' gradient of one token. Every step of the way back subtracts from each entry its
 * share of the line's sum of d_res * res, so the terms are never larger than sum |d_res res|. What a step gets
 * wrong (n+4 roundings, on a matrix with the forward error) the steps before it average out: the last ones count
 * in full, all of them once. */
static double sinkhorn_bwd_error(const arithmetic *how, const weft_mhc_numerics *q, int64_t n, const double *z,
                                 const double *d_res, const double *res, double e)
{
    double sum = 0, steps = 2.0 * q->sinkhorn_iters, spread = spread_of(q, n, z);
    for (int64_t k = 0; k < n * n; k++) sum += fabs(d_res[k] * res[k]);
    double shift = q->sinkhorn == WEFT_SINKHORN_LOG ? 8 * spread : spread;
    return (U * ((double)n + 1 + how->sinkhorn + steps + 2 * shift) + 2 * e) * sum;
}

/* ---- scale, coef --------------------------------------------------------------------------------------------- */

static void bound_gates_fwd(const truth *t, const problem *p, const arithmetic *how, const char *name,
                            double *bound)
{
    const weft_mhc_numerics *q = &p->spec.numerics;
    gate_inputs in = gate_inputs_of(t->exact);
    gate_token g = gate_open(p);
    int64_t n = g.n;
    for (int64_t token = 0; token < p->spec.tokens; token++) {
        gate_set(&g, how, q, &in, token);
        if (strcmp(name, "pre") == 0)
            for (int64_t j = 0; j < n; j++)
                bound[token * n + j] = sigmoid_error(how, g.z[j], g.e[j]) + 2 * U * (sigmoid(g.z[j]) + q->pre_eps);
        if (strcmp(name, "post") == 0)
            for (int64_t j = 0; j < n; j++)
                bound[token * n + j] =
                    fabs(q->post_mult) * (sigmoid_error(how, g.z[n + j], g.e[n + j]) + 2 * U * sigmoid(g.z[n + j]));
        if (strcmp(name, "logits") == 0)
            for (int64_t k = 0; k < n * n; k++) bound[token * n * n + k] = g.e[2 * n + k];
        if (strcmp(name, "res") == 0) {
            double e = 0, spread = spread_of(q, n, g.z + 2 * n);
            for (int64_t k = 0; k < n * n; k++) e = fmax(e, g.e[2 * n + k]);
            double *res = sinkhorn_of(q, 1, n, g.z + 2 * n), relative = sinkhorn_relative(how, q, n, spread, e);
            for (int64_t k = 0; k < n * n; k++) bound[token * n * n + k] = relative * res[k] + 1e-36;
            free(res);
        }
    }
    free(g.z);
    gate_inputs_free(&in);
}

/* dz and its error for one token, from whatever upstream gradients there are. */
static void gates_dz(const problem *p, const arithmetic *how, const gate_token *g, int64_t token,
                     const double *d_pre, const double *d_post, const double *d_logits, const double *d_res,
                     double *dz, double *e)
{
    const weft_mhc_numerics *q = &p->spec.numerics;
    int64_t n = g->n;
    for (int64_t j = 0; j < 2 * n; j++) {
        const double *up = j < n ? d_pre : d_post;
        double d = up ? up[token * n + j % n] * (j < n ? 1 : q->post_mult) : 0;
        double slope = sigmoid(g->z[j]) * sigmoid(-g->z[j]);
        dz[j] = d * slope;
        /* |slope'| <= slope; two sigmoids and two products */
        e[j] = fabs(d) * slope * (g->e[j] + (2 * how->sigmoid + 2) * U);
    }
    for (int64_t k = 0; k < n * n; k++) {
        dz[2 * n + k] = d_logits ? d_logits[token * n * n + k] : 0;
        e[2 * n + k] = 0;
    }
    if (d_res) {
        double worst = 0, *z = (double *)malloc((size_t)(n * n) * sizeof *z);
        if (!z) fail_msg("out of memory");
        memcpy(z, g->z + 2 * n, (size_t)(n * n) * sizeof *z);
        for (int64_t k = 0; k < n * n; k++) worst = fmax(worst, g->e[2 * n + k]);
        double *res = sinkhorn_of(q, 1, n, z), *d = (double *)(uintptr_t)(d_res + token * n * n);
        run_plain("mhc_sinkhorn_bwd", on_ref(),
                  WEFT_ARGS(weft_mhc_sinkhorn_bwd_args, .numerics = *q, .logits = weft_dense3(z, WEFT_F64, 1, n, n),
                            .d_res = weft_dense3(d, WEFT_F64, 1, n, n),
                            .d_logits = {weft_dense3(dz + 2 * n, WEFT_F64, 1, n, n), 0}));
        double error = sinkhorn_bwd_error(how, q, n, z, d, res, worst);
        for (int64_t k = 0; k < n * n; k++) e[2 * n + k] = error;
        free(res);
        free(z);
    }
}

static void bound_gates_bwd(const truth *t, const problem *p, const arithmetic *how, const char *name,
                            double *bound)
{
    const weft_mhc_numerics *q = &p->spec.numerics;
    gate_inputs in = gate_inputs_of(t->exact);
    gate_token g = gate_open(p);
    int64_t rows = g.rows;
    double *d_pre = values_of(t->exact, "d_pre"), *d_post = values_of(t->exact, "d_post");
    double *d_logits = values_of(t->exact, "d_logits"), *d_res = values_of(t->exact, "d_res");
    double *dz = calloc((size_t)(2 * rows), sizeof *dz), *e = dz + rows, tokens = (double)p->spec.tokens;
    if (!dz) fail_msg("out of memory");
    for (int64_t token = 0; token < p->spec.tokens; token++) {
        gate_set(&g, how, q, &in, token);
        gates_dz(p, how, &g, token, d_pre, d_post, d_logits, d_res, dz, e);
        double sqrt_ms = sqrt(in.ms[token]), slope = 0;
        if (q->rms_eps_kind == WEFT_EPS_INSIDE)
            slope = g.inv * g.inv * g.inv / 2;
        else if (sqrt_ms > 0)
            slope = g.inv * g.inv / (2 * sqrt_ms);
        for (int64_t j = 0; j < rows; j++) {
            double alpha = fabs(in.alpha[gate_group(&g, j)]), h = fabs(in.h[token * rows + j]), d = fabs(dz[j]);
            if (strcmp(name, "d_h") == 0) bound[token * rows + j] = alpha * g.inv * (e[j] + how->root * U * d);
            /* three powers of inv at 3 roundings, the products, and a sum of `rows` terms */
            if (strcmp(name, "d_ms") == 0)
                bound[token] += alpha * h * slope * (e[j] + U * ((double)rows + 2 * how->root) * d);
            if (strcmp(name, "d_alpha") == 0)
                bound[gate_group(&g, j)] += h * g.inv * (e[j] + U * (tokens + (double)rows + how->root + 2) * d);
            if (strcmp(name, "d_beta") == 0) bound[j] += e[j] + U * (tokens + 4) * d;
        }
    }
    free(dz), free(d_pre), free(d_post), free(d_logits), free(d_res), free(g.z);
    gate_inputs_free(&in);
}

static void bound_sinkhorn(const truth *t, const problem *p, const arithmetic *how, const char *name, double *bound)
{
    const weft_mhc_numerics *q = &p->spec.numerics;
    int64_t n = p->spec.streams, size = n * n;
    double *z = values_of(t->exact, "logits"), *d_res = values_of(t->exact, "d_res");
    double *res = sinkhorn_of(q, p->spec.tokens, n, z);
    for (int64_t token = 0; token < p->spec.tokens; token++) {
        double relative = sinkhorn_relative(how, q, n, spread_of(q, n, z + token * size), 0), error = 0;
        if (d_res)
            error = sinkhorn_bwd_error(how, q, n, z + token * size, d_res + token * size, res + token * size, 0);
        for (int64_t k = 0; k < size; k++)
            bound[token * size + k] = (strcmp(name, "res") == 0 ? relative * res[token * size + k] : error) + 1e-36;
    }
    free(z), free(d_res), free(res);
}

/* ---- RMSNorm ------------------------------------------------------------------------------------------------- */

/* r has a relative error of half that of a sum over channels, plus sum with eps, root and quotient. */
static void bound_rmsnorm(const truth *t, const problem *p, const arithmetic *how, const char *name, double *bound)
{
    int64_t channels = p->spec.channels;
    double *u = values_of(t->exact, "u"), *w = values_of(t->exact, "weight"), *d_v = values_of(t->exact, "d_v");
    double k = ceil((double)channels / 16) + how->tree;
    for (int64_t token = 0; token < p->spec.tokens; token++) {
        const double *row = u + token * channels;
        double squares = 0, dot = 0;
        for (int64_t c = 0; c < channels; c++) squares += row[c] * row[c];
        double r = 1 / sqrt(squares / (double)channels + p->spec.sub_eps);
        if (d_v)
            for (int64_t c = 0; c < channels; c++) dot += fabs(d_v[token * channels + c] * (w ? w[c] : 1) * row[c]);
        dot /= (double)channels;
        for (int64_t c = 0; c < channels; c++) {
            double gain = fabs(w ? w[c] : 1), d = d_v ? fabs(d_v[token * channels + c]) : 0;
            if (strcmp(name, "v") == 0) bound[token * channels + c] = U * (k / 2 + 6) * fabs(row[c]) * r * gain;
            if (strcmp(name, "d_u") == 0)
                bound[token * channels + c] = U * (2.5 * k + 8) * r * (d * gain + fabs(row[c]) * r * r * dot);
            if (strcmp(name, "d_weight") == 0)
                bound[c] += U * (k / 2 + 6 + (double)p->spec.tokens) * d * fabs(row[c]) * r;
        }
    }
    free(u), free(w), free(d_v);
}

/* ---- the comparison ------------------------------------------------------------------------------------------ */

enum { MAX_RATIOS = 256 };
static struct ratio {
    char op[32], name[32];
    bool narrow; /* 16-bit outputs: their own rounding is most of the bound, so they are listed apart */
    bool cuda;   /* has bounds of its own */
    double worst;
} ratios[MAX_RATIOS];
static int num_ratios;

static void note_ratio(const problem *p, const arg *a, weft_exec exec, double ratio)
{
    bool narrow = weft_dtype_size(a->view->dtype) == 2, cuda = exec.backend == WEFT_BACKEND_CUDA;
    int i = 0;
    while (i < num_ratios && !(strcmp(ratios[i].op, p->op->name) == 0 && strcmp(ratios[i].name, a->name) == 0 &&
                               ratios[i].narrow == narrow && ratios[i].cuda == cuda))
        i++;
    if (i == MAX_RATIOS) return;
    if (i == num_ratios) {
        num_ratios++;
        snprintf(ratios[i].op, sizeof ratios[i].op, "%s", p->op->name);
        snprintf(ratios[i].name, sizeof ratios[i].name, "%.31s", a->name);
        ratios[i].narrow = narrow;
        ratios[i].cuda = cuda;
    }
    ratios[i].worst = fmax(ratios[i].worst, ratio);
}

void truth_print_ratios(void)
{
    if (num_ratios) fprintf(stderr, "largest error / bound, in the grids of this test:\n");
    for (int i = 0; i < num_ratios; i++)
        fprintf(stderr, "  %-18s %-14s %-6s %.3f%s\n", ratios[i].op, ratios[i].name,
                ratios[i].narrow ? "16 bit" : "f32", ratios[i].worst, ratios[i].cuda ? " on cuda" : "");
}

static void bounds_of(const truth *t, const problem *p, int index, const arithmetic *how, double *bound)
{
    const char *name = p->arg[index].name;
    if (t->magnitude)
        bound_products(t, p, index, how, bound);
    else if (is(p, "mhc_scale_fwd") || is(p, "mhc_coef_fwd"))
        bound_gates_fwd(t, p, how, name, bound);
    else if (is(p, "mhc_scale_bwd") || is(p, "mhc_coef_bwd"))
        bound_gates_bwd(t, p, how, name, bound);
    else if (starts(p->op->name, "mhc_sinkhorn"))
        bound_sinkhorn(t, p, how, name, bound);
    else
        bound_rmsnorm(t, p, how, name, bound);
}

static void compare_arg(const truth *t, const problem *p, int index, weft_exec exec)
{
    const arg *a = &p->arg[index];
    weft_dtype dtype = a->view->dtype;
    char where[80];
    double *want = arg_values(&t->exact->arg[index]), *got = arg_values(a), worst = 0;
    double *bound = calloc((size_t)a->elements + 1, sizeof *bound);
    if (!bound) fail_msg("out of memory");
    arithmetic how = arithmetic_of(p, exec);
    bounds_of(t, p, index, &how, bound);
    for (int64_t i = 0; i < a->elements; i++) {
        if (!isfinite(want[i])) {
            if (isfinite(got[i]))
                test_failed("%s on %s: %s%s: got %.9g, want %.9g", problem_text(p), exec_name(exec), a->name,
                            arg_coordinate(a, i, where, sizeof where), got[i], want[i]);
            continue;
        }
        double error =
            bound[i] + (arg_adds(a) ? U * fabs(want[i]) : 0) + 0x1p-140; /* and underflow along the way */
        double reach = fabs(want[i]) + error, err = fabs(got[i] - want[i]);
        double limit = error + value_unit(dtype) * reach + value_tiny(dtype);
        /* what lies beyond the largest number of the dtype becomes infinity */
        if (isinf(got[i]) && reach >= value_limit(dtype) && (got[i] > 0) == (want[i] > 0)) continue;
        if (err / limit > worst) worst = err / limit;
        if (!(err <= limit)) {
            test_failed("%s on %s: %s%s: got %.9g, want %.9g, error %.3g, bound %.3g", problem_text(p),
                        exec_name(exec), a->name, arg_coordinate(a, i, where, sizeof where), got[i], want[i], err,
                        limit);
            break;
        }
    }
    note_ratio(p, a, exec, worst);
    free(want), free(got), free(bound);
}

void truth_compare(const truth *t, const problem *p, weft_exec exec)
{
    for (int i = 0; i < p->num_args; i++)
        if (p->arg[i].block && arg_is_output(&p->arg[i])) compare_arg(t, p, i, exec);
}
