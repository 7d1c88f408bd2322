/* SPDX-License-Identifier: Apache-2.0
 *
 * First-order error bounds of what is not a polynomial: gates, Sinkhorn, RMSNorm. Values come from the reference;
 * this file only says how far a result computed with unit roundoff u from inputs with given errors may be from
 * them. Elementary functions are taken to be good to a few ulp. */
#include <math.h>
#include <stddef.h>

#include "check/expect.h"
#include "check/shape.h"

/* ---- gates: z = alpha h inv + beta, s = sigmoid(z) ----------------------------------------------------------- */

_Static_assert(offsetof(weft_mhc_scale_fwd_args, numerics) == offsetof(weft_mhc_scale_bwd_args, numerics),
               "one accessor serves both");

typedef struct gates {
    const weft_mhc_numerics *numerics;
    int64_t n, rows;
    double u, root, sigmoid; /* of the scope */
    quantity h, ms, alpha, beta;
} gates;

static gates gates_of(const expect_call *call)
{
    int64_t n = call->scope->streams;
    return (gates){.numerics = &((const weft_mhc_scale_fwd_args *)call->args)->numerics,
                   .n = n,
                   .rows = shape_gates(n, call->scope->scales),
                   .u = call->scope->unit,
                   .root = call->scope->root,
                   .sigmoid = call->scope->sigmoid,
                   .h = expect_take(call, "h"),
                   .ms = expect_take(call, "ms"),
                   .alpha = expect_take(call, "alpha"),
                   .beta = expect_take(call, "beta")};
}

static int group_of(const gates *g, int64_t j)
{
    return j < g->n ? 0 : j < 2 * g->n ? 1 : 2;
}

/* Inverse root of a token and its derivative by ms; of the scope's roundings three are not the root's own. e_slope is
 * what ms hands on, d_ms counts the roundings. */
typedef struct root {
    double inv, e_inv, slope, e_slope;
} root;

static root root_at(const gates *g, int64_t t)
{
    double ms = g->ms.val[t], e_ms = error_of(g->ms, t), eps = g->numerics->rms_eps;
    root r;
    if (g->numerics->rms_eps_kind == WEFT_EPS_INSIDE) {
        r.inv = 1 / sqrt(ms + eps);
        r.slope = r.inv * r.inv * r.inv / 2;
    } else {
        r.inv = 1 / (sqrt(ms) + eps);
        r.slope = ms > 0 ? r.inv * r.inv / (2 * sqrt(ms)) : 0;
    }
    r.e_inv = r.slope * e_ms + (g->root - 3) * g->u * r.inv;
    r.e_slope = r.slope * (3 * r.slope * e_ms / r.inv + (ms > 0 ? e_ms / ms : 0));
    return r;
}

typedef struct gate {
    double e_z, s, e_s, slope, e_slope; /* slope = s (1 - s) */
} gate;

static gate gate_at(const gates *g, const root *r, int64_t t, int64_t j)
{
    double alpha = g->alpha.val[group_of(g, j)], beta = g->beta.val[j];
    double h = g->h.val[t * g->rows + j], e_h = error_of(g->h, t * g->rows + j);
    double scaled = alpha * h * r->inv, z = scaled + beta, tail = exp(-fabs(z));
    gate a;
    a.e_z = fabs(alpha) * (r->inv * e_h + fabs(h) * r->e_inv) + g->u * (3 * fabs(scaled) + fabs(z)) + 0x1p-148;
    a.s = z >= 0 ? 1 / (1 + tail) : tail / (1 + tail);
    a.slope = tail / ((1 + tail) * (1 + tail));
    a.e_s = a.slope * a.e_z + g->sigmoid * g->u * a.s;
    /* The slope's own derivative is no larger than the slope; two sigmoids and the products with them. */
    a.e_slope = a.slope * (a.e_z + (2 * g->sigmoid + 2) * g->u);
    return a;
}

void expect_scale_fwd(expect_call *call)
{
    gates g = gates_of(call);
    expect_values(call);
    quantity pre = expect_take(call, "pre"), post = expect_take(call, "post"), logits = expect_take(call, "logits");
    double mult = fabs(g.numerics->post_mult), eps = g.numerics->post_eps;
    for (int64_t t = 0; t < call->scope->tokens; t++) {
        root r = root_at(&g, t);
        for (int64_t j = 0; j < g.rows; j++) {
            gate a = gate_at(&g, &r, t, j);
            int group = group_of(&g, j);
            int64_t p = t * g.n + j, q = p - g.n, z = t * g.n * g.n + j - 2 * g.n;
            if (group == 0 && pre.val) pre.err[p] = a.e_s + g.u * fabs(pre.val[p]);
            if (group == 1 && post.val) /* the product, and the sum where there is one */
                post.err[q] = mult * a.e_s + g.u * (fabs(post.val[q] - eps) + (eps > 0 ? fabs(post.val[q]) : 0));
            if (group == 2 && logits.val) logits.err[z] = a.e_z;
        }
    }
}

/* d/dz of the j-th gate with its error, given the upstream gradients. */
static double gate_gradient(const gates *g, const gate *a, quantity d_pre, quantity d_post, quantity d_logits,
                            int64_t t, int64_t j, double *error)
{
    int group = group_of(g, j);
    quantity d = group == 0 ? d_pre : group == 1 ? d_post : d_logits;
    int64_t k = group == 2 ? t * g->n * g->n + j - 2 * g->n : t * g->n + j - group * g->n;
    double factor = group == 1 ? g->numerics->post_mult : 1;
    *error = 0;
    if (!d.val) return 0;
    if (group == 2) {
        *error = error_of(d, k);
        return d.val[k];
    }
    double value = factor * d.val[k] * a->slope;
    *error = fabs(factor) * (fabs(d.val[k]) * a->e_slope + error_of(d, k) * a->slope);
    return value;
}

void expect_scale_bwd(expect_call *call)
{
    gates g = gates_of(call);
    quantity d_pre = expect_take(call, "d_pre"), d_post = expect_take(call, "d_post");
    quantity d_logits = expect_take(call, "d_logits");
    expect_values(call);
    quantity d_h = expect_take(call, "d_h"), d_ms = expect_take(call, "d_ms");
    quantity d_alpha = expect_take(call, "d_alpha"), d_beta = expect_take(call, "d_beta");
    int64_t tokens = call->scope->tokens;
    /* Three powers of the inverse root, the products, and a sum over the row; a sum over the tokens. */
    double over_row = (double)g.rows + 2 * g.root, over_tokens = (double)tokens + 4;
    double over_all = over_tokens + (double)g.rows + 1;
    for (int64_t t = 0; t < tokens; t++) {
        root r = root_at(&g, t);
        double size = 0, error = 0; /* of sum_j alpha h dz */
        for (int64_t j = 0; j < g.rows; j++) {
            gate a = gate_at(&g, &r, t, j);
            int group = group_of(&g, j);
            double alpha = fabs(g.alpha.val[group]), h = fabs(g.h.val[t * g.rows + j]);
            double e_h = error_of(g.h, t * g.rows + j), e_dz;
            double dz = fabs(gate_gradient(&g, &a, d_pre, d_post, d_logits, t, j, &e_dz));
            if (d_h.val)
                d_h.err[t * g.rows + j] = alpha * (r.inv * e_dz + dz * r.e_inv) + 3 * g.u * alpha * dz * r.inv;
            if (d_alpha.val)
                d_alpha.err[group] +=
                    r.inv * (h * e_dz + dz * e_h) + dz * h * r.e_inv + over_all * g.u * dz * h * r.inv;
            if (d_beta.val) d_beta.err[j] += e_dz + over_tokens * g.u * dz;
            size += alpha * h * dz;
            error += alpha * (h * e_dz + e_h * dz);
        }
        if (d_ms.val) d_ms.err[t] = r.slope * (error + over_row * g.u * size) + r.e_slope * size;
    }
}

/* ---- Sinkhorn ---------------------------------------------------------------------------------------------------
 * In the projective metric each of the 2 iters half-steps is non-expansive, so errors add up and are not amplified. A
 * step costs a sum of n terms and the scope's roundings. The shift by a row's maximum costs u times the distance from
 * it, once in the linear rules; the log rule pays it for every sum of potentials that is still felt at the end. */

/* Entries below it are lost in float32 where the step before them loses its last bits. */
#define SMALLEST_ENTRY 1e-36

typedef struct matrix_scale {
    double steps, step, shift, e_z,
        sum; /* 2 iters, roundings of each, the shift's, max error of logits, sum |d_res res| */
} matrix_scale;

static matrix_scale scale_at(const expect_scope *s, const weft_mhc_numerics *numerics, int64_t t, quantity logits)
{
    int64_t n = s->streams;
    matrix_scale m = {.steps = 2.0 * numerics->sinkhorn_iters, .step = (double)n + s->normalize};
    int from_zero = numerics->sinkhorn == WEFT_SINKHORN_THRESHOLD; /* it does not shift */
    for (int64_t row = t * n * n; row < (t + 1) * n * n; row += n) {
        double max = logits.val[row];
        for (int64_t k = row; k < row + n; k++) max = fmax(max, logits.val[k]);
        for (int64_t k = row; k < row + n; k++) {
            m.shift = fmax(m.shift, from_zero ? fabs(logits.val[k]) : max - logits.val[k]);
            m.e_z = fmax(m.e_z, error_of(logits, k));
        }
    }
    if (numerics->sinkhorn == WEFT_SINKHORN_LOG) m.shift *= 8;
    return m;
}

/* Of every entry. */
static double sinkhorn_relative(const matrix_scale *m, double u)
{
    return 2 * (u * (m->shift + m->steps * m->step + 8) + m->e_z);
}

void expect_sinkhorn_fwd(expect_call *call)
{
    const weft_mhc_numerics *numerics = &((const weft_mhc_sinkhorn_fwd_args *)call->args)->numerics;
    quantity logits = expect_take(call, "logits");
    int64_t n = call->scope->streams;
    expect_values(call);
    quantity res = expect_take(call, "res");
    for (int64_t t = 0; t < call->scope->tokens; t++) {
        matrix_scale m = scale_at(call->scope, numerics, t, logits);
        double relative = sinkhorn_relative(&m, call->scope->unit);
        for (int64_t k = t * n * n; k < (t + 1) * n * n; k++)
            res.err[k] = relative * fabs(res.val[k]) + SMALLEST_ENTRY;
    }
}

/* The gradient walks the 2 iters half-steps back. Each subtracts from every entry its share of the line's sum of
 * d_res res, so the terms are never larger than sum |d_res res|. What a step gets wrong (n + 1 roundings and the scope's,
 * on a matrix with the forward error) the steps before it average out: the last ones count in full, all of them once.
 * Errors of the upstream gradient are passed on by each step once. */
void expect_sinkhorn_bwd(expect_call *call)
{
    const weft_mhc_numerics *numerics = &((const weft_mhc_sinkhorn_bwd_args *)call->args)->numerics;
    quantity logits = expect_take(call, "logits"), d_res = expect_take(call, "d_res");
    expect_scope *s = call->scope;
    int64_t n = s->streams;
    weft_mhc_sinkhorn_fwd_args forward_args = {.numerics = *numerics};
    expect_call *forward = expect_open(s, "mhc_sinkhorn_fwd", &forward_args);
    expect_give(forward, "logits", logits);
    expect_want(forward, "res");
    expect_values(forward);
    quantity res = expect_take(forward, "res");
    expect_values(call);
    quantity d_logits = expect_take(call, "d_logits");
    for (int64_t t = 0; t < s->tokens; t++) {
        matrix_scale m = scale_at(s, numerics, t, logits);
        double upstream = 0;
        for (int64_t k = t * n * n; k < (t + 1) * n * n; k++) {
            m.sum += fabs(d_res.val[k] * res.val[k]);
            upstream += error_of(d_res, k) * fabs(res.val[k]);
        }
        double relative = s->unit * (m.step + 1 + m.steps + 2 * m.shift) + 2 * m.e_z;
        for (int64_t k = t * n * n; k < (t + 1) * n * n; k++)
            d_logits.err[k] = relative * m.sum + (m.steps + 1) * upstream + SMALLEST_ENTRY;
    }
}

/* ---- RMSNorm: r = 1/sqrt(mean u^2 + eps), v = u r weight ----------------------------------------------------- */

typedef struct norm_row {
    double r, e_r;
} norm_row;

static double sum_roundings(const expect_scope *s)
{
    return ceil((double)s->channels / 16) + s->tree;
}

static norm_row norm_at(const expect_scope *s, double eps, quantity u, int64_t t)
{
    int64_t channels = s->channels;
    double square = 0, error = 0;
    for (int64_t k = t * channels; k < (t + 1) * channels; k++) {
        square += u.val[k] * u.val[k];
        error += fabs(u.val[k]) * error_of(u, k);
    }
    norm_row row = {.r = 1 / sqrt(square / (double)channels + eps)};
    /* d r = -r^3 mean(u du); the sum's own error counts half, through the root. */
    row.e_r = row.r * (row.r * row.r * error / (double)channels + s->unit * (sum_roundings(s) / 2 + 2));
    return row;
}

void expect_rmsnorm_fwd(expect_call *call)
{
    double eps = ((const weft_rmsnorm_fwd_args *)call->args)->eps, unit = call->scope->unit;
    quantity u = expect_take(call, "u"), weight = expect_take(call, "weight");
    int64_t channels = call->scope->channels;
    expect_values(call);
    quantity v = expect_take(call, "v");
    for (int64_t t = 0; t < call->scope->tokens; t++) {
        norm_row row = norm_at(call->scope, eps, u, t);
        for (int64_t c = 0; c < channels; c++) {
            int64_t k = t * channels + c;
            double w = weight.val ? fabs(weight.val[c]) : 1;
            v.err[k] = w * (row.r * error_of(u, k) + fabs(u.val[k]) * row.e_r) + 4 * unit * fabs(v.val[k]);
        }
    }
}

/* d_u = r g - u r^3 m with g = d_v weight, m = mean(g u): both terms with the errors of each factor. */
void expect_rmsnorm_bwd(expect_call *call)
{
    double eps = ((const weft_rmsnorm_bwd_args *)call->args)->eps, unit = call->scope->unit;
    quantity u = expect_take(call, "u"), weight = expect_take(call, "weight"), d_v = expect_take(call, "d_v");
    int64_t channels = call->scope->channels, tokens = call->scope->tokens;
    expect_values(call);
    quantity d_u = expect_take(call, "d_u"), d_weight = expect_take(call, "d_weight");
    for (int64_t t = 0; t < tokens; t++) {
        norm_row row = norm_at(call->scope, eps, u, t);
        double r = row.r, e_r = row.e_r, mean = 0, size = 0, e_mean = 0;
        for (int64_t c = 0; c < channels; c++) {
            int64_t k = t * channels + c;
            double w = weight.val ? weight.val[c] : 1, g = d_v.val[k] * w;
            mean += g * u.val[k] / (double)channels;
            size += fabs(g * u.val[k]) / (double)channels;
            e_mean += (fabs(g) * error_of(u, k) + fabs(u.val[k] * w) * error_of(d_v, k)) / (double)channels;
        }
        mean = fabs(mean);
        e_mean += sum_roundings(call->scope) * unit * size;
        for (int64_t c = 0; c < channels; c++) {
            int64_t k = t * channels + c;
            double w = weight.val ? fabs(weight.val[c]) : 1, value = fabs(u.val[k]), up = fabs(d_v.val[k]);
            double e_value = error_of(u, k), e_up = error_of(d_v, k), g = up * w, cube = r * r * r;
            if (d_u.val)
                d_u.err[k] = r * w * e_up + g * e_r + cube * (e_value * mean + value * e_mean) +
                             3 * value * r * r * e_r * mean + unit * (4 * r * g + 2 * value * cube * mean);
            if (d_weight.val)
                d_weight.err[c] += r * (value * e_up + up * e_value) + up * value * e_r +
                                   ((double)tokens + 4) * unit * up * value * r;
        }
    }
}
