/* SPDX-License-Identifier: Apache-2.0
 *
 * The gated norm [G7]. First-order bounds along its equations, as those of RMSNorm (expect_gates.c), with the gate as a factor that
 * has an error of its own. */
#include "check/expect_gdn.h"

typedef struct norm {
    expect_call *call;
    double u, eps, chain; /* roundings of a sum over a row */
    weft_gdn_gate gate;
    int64_t rows, channels;
    const double *o, *z, *weight, *d_y;
} norm;

static norm norm_of(expect_call *call)
{
    const weft_gdn_norm_fwd_args *a = call->args; /* o, z, weight and scalars stand first in both structs */
    norm k = {.call = call, .u = call->scope->unit, .eps = a->eps, .gate = a->gate};
    k.channels = a->o.shape[3];
    k.rows = a->o.shape[0] * a->o.shape[1] * a->o.shape[2];
    /* in at least 16 partial sums; the reference takes one after the other */
    k.chain = k.u < 0x1p-40 ? (double)k.channels : ceil((double)k.channels / 16) + call->scope->tree;
    k.o = expect_values_of(call, "o");
    k.z = expect_values_of(call, "z");
    k.weight = expect_values_of(call, "weight");
    k.d_y = expect_values_of(call, "d_y");
    return k;
}

/* 1 / sqrt(mean o^2 + eps): the sum's own error counts half, through the root. */
static num inverse_at(const norm *k, int64_t row)
{
    const double *o = k->o + row * k->channels;
    double squares = 0;
    for (int64_t c = 0; c < k->channels; c++) squares += o[c] * o[c];
    double r = 1 / sqrt(squares / (double)k->channels + k->eps);
    return (num){r, r * k->u * (k->chain / 2 + 4)};
}

/* The exponential may be of a product that is rounded once. */
static num argument(const norm *k, int64_t i)
{
    return (num){k->z[i], k->u * fabs(k->z[i])};
}

static num gate_at(const norm *k, int64_t i)
{
    num z = argument(k, i);
    return k->gate == WEFT_GDN_GATE_SIGMOID ? num_sigmoid(k->u, z) : num_silu(k->u, z);
}

/* s (1 - s): its slope is no larger than itself; two sigmoids and a product. */
static num slope_at(const norm *k, int64_t i)
{
    num z = argument(k, i);
    if (k->gate == WEFT_GDN_GATE_SILU) return num_silu_slope(k->u, z);
    double slope = expect_sigmoid(z.v) * expect_sigmoid(-z.v);
    return (num){slope, slope * z.e + 12 * k->u * slope + EXPECT_FLUSHED};
}

static double weight_at(const norm *k, int64_t c)
{
    return k->weight ? k->weight[c] : 1;
}

/* o r and o r weight */
static num normed(const norm *k, num r, int64_t i)
{
    return num_mul(k->u, num_of(k->o[i]), r);
}

static num weighted(const norm *k, num x, int64_t c)
{
    return num_mul(k->weight ? k->u : 0, x, num_of(weight_at(k, c)));
}

void expect_gdn_norm_fwd(expect_call *call)
{
    norm k = norm_of(call);
    quantity y = expect_output(call, "y", k.rows * k.channels);
    for (int64_t row = 0; row < k.rows; row++) {
        num r = inverse_at(&k, row);
        for (int64_t c = 0; c < k.channels; c++) {
            int64_t i = row * k.channels + c;
            num_put(y, i, num_mul(k.u, weighted(&k, normed(&k, r, i), c), gate_at(&k, i)));
        }
    }
}

/* r (g - o r^2 m), m = mean(g o): a rounding of the difference and one of the product with r; six of the second term. */
static num input_gradient(const norm *k, num r, num g, num m, double o)
{
    double first = r.v * g.v, second = o * r.v * r.v * r.v * m.v, relative = r.e / r.v;
    return (num){first - second, r.v * g.e + fabs(o) * r.v * r.v * r.v * m.e + (relative + 2 * k->u) * fabs(first) +
                                     (3 * relative + 6 * k->u) * fabs(second)};
}

void expect_gdn_norm_bwd(expect_call *call)
{
    norm k = norm_of(call);
    quantity d_o = expect_output(call, "d_o", k.rows * k.channels);
    quantity d_z = expect_output(call, "d_z", k.rows * k.channels);
    quantity d_weight = expect_output(call, "d_weight", k.channels);
    for (int64_t row = 0; row < k.rows; row++) {
        num r = inverse_at(&k, row), m = {0, 0};
        double size = 0;
        for (int64_t c = 0; c < k.channels; c++) {
            int64_t i = row * k.channels + c;
            num d = num_of(k.d_y[i]), n = normed(&k, r, i), p = num_mul(k.u, d, gate_at(&k, i)),
                g = weighted(&k, p, c);
            num_put(d_z, i, num_mul(k.u, num_mul(k.u, d, weighted(&k, n, c)), slope_at(&k, i)));
            if (d_weight.val) {
                num term = num_mul(0, p, n);
                d_weight.val[c] += term.v;
                d_weight.err[c] += term.e + k.u * ((double)k.rows + 4) * fabs(term.v);
            }
            m.v += g.v * k.o[i];
            m.e += fabs(k.o[i]) * g.e;
            size += fabs(k.o[i]) * (fabs(g.v) + g.e);
        }
        m.v /= (double)k.channels;
        m.e = (m.e + k.u * (k.chain + 1) * size) / (double)k.channels;
        for (int64_t c = 0; c < k.channels; c++) {
            int64_t i = row * k.channels + c;
            num g = weighted(&k, num_mul(k.u, num_of(k.d_y[i]), gate_at(&k, i)), c);
            num_put(d_o, i, input_gradient(&k, r, g, m, k.o[i]));
        }
    }
}
