/* SPDX-License-Identifier: Apache-2.0
 *
 * Errors of the gated delta rule in chunks on tensor cores [G6], as errors of the tokens' recurrence [G5].
 *
 * Forward. In exact arithmetic the rows of a chunk solve (I + L) D = R, R_i = beta_i (v_i - gam_i k_i . S). What
 * is computed solves it up to a residual rho: then token i is a token of the recurrence with rho_i added to its
 * delta, whatever the size of M = (I + L)^-1, and further tokens carry that along as they carry every error.
 * With D = M R,
 *     rho = (error of R) + (I + L) (error of the product) + (error of L in the substitution) D,
 * the second with |M| |R| row by row, since M and R are factors of that product. The state behind a chunk has
 * the error of S <- gam S + K^T (w D) in addition.
 *
 * Backward is the same from the other side: dY solves (I + L)^T dY = dD, and a residual is an error of the
 * gradient of delta. Gradients are products of rows of one chunk; token after token they are the same function
 * of S, D, dY and T, so what is to be added to the carried errors is what factors lose that go into a product as
 * one bf16 number.
 *
 * Factors: hi + lo keeps all but `split` of a number, and `low` is what the product of two such lacks; one bf16
 * number is within `half`. A sum of n products on tensor cores has `tensor` (n + 16) units of the sum of their
 * magnitudes. An exponential of x has |x| + 4 units: x is rounded once, from a sum in double. */
#include <string.h>

#include "check/expect_rule.h"

/* A bf16 number keeps 8 bits: 2^-8 / (1 + 2^-8) at most, so that n 2^-8 covers the product of n such factors, n up to 3. */
static const double half = 0x1p-8;

enum { MOST = 64 };

typedef struct expect_chunk {
    int64_t t0, c;
    double G[MOST + 1], kn[MOST], qn[MOST]; /* G[i + 1] behind token i */
    double kk[MOST][MOST], qk[MOST][MOST], L[MOST][MOST], M[MOST][MOST];
    double e_beta[MOST], e_g[MOST];
    double *dY;             /* [c][dv] */
    double *x, *y, *z, *xx; /* [dk] */
} expect_chunk;

expect_chunk *expect_chunk_room(expect_scope *scope, rule *r)
{
    expect_chunk *k = expect_room(scope, sizeof *k);
    k->dY = expect_array(scope, MOST * r->dv);
    k->x = expect_array(scope, r->dk);
    k->y = expect_array(scope, r->dk);
    k->z = expect_array(scope, r->dk);
    k->xx = expect_array(scope, r->dk);
    r->e_beta = k->e_beta;
    r->e_g = k->e_g;
    return k;
}

static double dot(int64_t count, const double *x, const double *y)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += x[i] * y[i];
    return sum;
}

/* exp of g behind token j up to and with token i, j from -1 on; and the units of its error. */
static double decay(const expect_chunk *k, int64_t i, int64_t j)
{
    return exp(k->G[i + 1] - k->G[j + 1]);
}

static double decay_units(const expect_chunk *k, int64_t i, int64_t j)
{
    return fabs(k->G[i + 1] - k->G[j + 1]) + 8; /* and products with it */
}

/* Units of a sum of n products. */
static double sum_units(const rule *r, int64_t n)
{
    return r->tensor * (double)(n + 16);
}

static expect_chunk *chunk_at(const rule *r, int64_t t0)
{
    expect_chunk *k = r->room;
    k->t0 = t0;
    k->c = r->length - t0 < r->chunk ? r->length - t0 : r->chunk;
    for (int64_t i = 0; i < k->c; i++) {
        const double *key = r->k + (t0 + i) * r->qs, *q = r->q + (t0 + i) * r->qs;
        k->G[i + 1] = k->G[i] + r->g[(t0 + i) * r->bs];
        k->kn[i] = expect_rule_norm(r->dk, 1, key);
        k->qn[i] = expect_rule_norm(r->dk, 1, q);
        for (int64_t l = 0; l <= i; l++) {
            k->kk[i][l] = dot(r->dk, key, r->k + (t0 + l) * r->qs);
            k->qk[i][l] = dot(r->dk, q, r->k + (t0 + l) * r->qs);
            k->L[i][l] = l < i ? r->beta[(t0 + i) * r->bs] * k->kk[i][l] * decay(k, i, l) : 0;
        }
        for (int64_t j = 0; j <= i; j++) {
            double sum = i == j;
            for (int64_t l = j; l < i; l++) sum -= k->L[i][l] * k->M[l][j];
            k->M[i][j] = sum;
        }
    }
    return k;
}

/* Error of L_il in the solution: of k_i . k_l, decay and two products, and of a substitution in four partial
 * sums. */
static double error_of_system(const rule *r, const expect_chunk *k, int64_t i, int64_t l)
{
    double units = sum_units(r, r->dk) + decay_units(k, i, l) + 24;
    return r->u * units * fabs(r->beta[(k->t0 + i) * r->bs]) * k->kn[i] * k->kn[l] * decay(k, i, l);
}

/* ---- forward ------------------------------------------------------------------------------------------------- */

static void forward_column(const rule *r, const expect_chunk *k, const double *before, int64_t j)
{
    double R[MOST], error[MOST], sn = expect_rule_norm(r->dk, r->dv, before + j), lost = 0;
    int64_t last = k->c - 1;
    const double product = r->split + r->low + r->u * sum_units(r, MOST);
    for (int64_t i = 0; i < k->c; i++) {
        int64_t t = k->t0 + i, at = t * r->dv + j;
        double beta = r->beta[t * r->bs], gam = decay(k, i, -1), v = r->v[t * r->vs + j], w = 0, size = 0;
        for (int64_t d = 0; d < r->dk; d++) w += r->k[t * r->qs + d] * before[d * r->dv + j];
        R[i] = beta * (v - gam * w);
        for (int64_t l = 0; l <= i; l++) size += fabs(k->M[i][l] * R[l]);
        error[i] = product * size;
        double own = fabs(beta) * (gam * k->kn[i] * sn * (r->split + r->u * sum_units(r, r->dk)) +
                                   r->u * (decay_units(k, i, -1) * gam * fabs(w) + 2 * fabs(v)));
        own += (r->split + r->u) * fabs(R[i]) + error[i];
        double o = gam * k->qn[i] * sn * (half + r->u * (sum_units(r, r->dk) + decay_units(k, i, -1)));
        for (int64_t l = 0; l <= i; l++) {
            double delta = fabs(r->delta[(k->t0 + l) * r->dv + j]), x = decay(k, i, l);
            if (l < i) own += fabs(k->L[i][l]) * error[l] + error_of_system(r, k, i, l) * delta;
            o += fabs(k->qk[i][l]) * x * delta * (2 * half + r->u * (sum_units(r, MOST) + decay_units(k, i, l)));
            o += k->qn[i] * k->kn[l] * x * delta * r->u * sum_units(r, r->dk);
        }
        r->own[at] = own;
        r->e_o[at] = fabs(r->scale) * o;
        r->end[at] = 0;
        lost += decay(k, last, i) * k->kn[i] * fabs(r->delta[at]) *
                (r->split + r->u * (sum_units(r, MOST) + decay_units(k, last, i)));
    }
    r->end[(k->t0 + last) * r->dv + j] =
        lost + r->u * decay(k, last, -1) * sn * (sum_units(r, MOST) + decay_units(k, last, -1));
}

void expect_chunks_forward(const rule *r, const double *m0)
{
    for (int64_t t0 = 0; t0 < r->length; t0 += r->chunk) {
        const expect_chunk *k = chunk_at(r, t0);
        const double *before = t0 ? r->m + (t0 - 1) * r->dk * r->dv : m0;
        for (int64_t j = 0; j < r->dv; j++) forward_column(r, k, before, j);
    }
}

/* ---- backward ------------------------------------------------------------------------------------------------ */

/* Residuals of dY, and the error of the state's gradient in front of the chunk. Fills dY. */
static void backward_column(const rule *r, expect_chunk *k, const double *T, int64_t j)
{
    double dD[MOST], own[MOST], error[MOST], tn = expect_rule_norm(r->dk, r->dv, T + j);
    int64_t last = k->c - 1;
    const double product = r->split + r->low + r->u * sum_units(r, MOST);
    double lost = r->u * decay(k, last, -1) * tn * (2 * sum_units(r, MOST) + decay_units(k, last, -1));
    for (int64_t i = last; i >= 0; i--) {
        int64_t t = k->t0 + i;
        double w = decay(k, last, i), with_t = 0, e = 0, size = 0, d = 0;
        for (int64_t n = 0; n < r->dk; n++) with_t += r->k[t * r->qs + n] * T[n * r->dv + j];
        dD[i] = w * with_t;
        e = w * k->kn[i] * tn * (r->split + r->u * (sum_units(r, r->dk) + decay_units(k, last, i)));
        for (int64_t l = i; l < k->c; l++) {
            double x = decay(k, l, i), d_o = r->scale * r->d_o[(k->t0 + l) * r->vs + j];
            dD[i] += k->qk[l][i] * x * d_o;
            e += fabs(d_o) * x * fabs(k->qk[l][i]) * (half + r->u * (sum_units(r, MOST) + decay_units(k, l, i)));
            e += fabs(d_o) * x * k->qn[l] * k->kn[i] * r->u * sum_units(r, r->dk);
        }
        for (int64_t l = i; l < k->c; l++) d += k->M[l][i] * dD[l], size += fabs(k->M[l][i] * dD[l]);
        k->dY[i * r->dv + j] = d;
        error[i] = product * size;
        own[i] = e + (r->split + 2 * r->u) * fabs(dD[i]) + error[i];
        for (int64_t l = i + 1; l < k->c; l++)
            own[i] += fabs(k->L[l][i]) * error[l] + error_of_system(r, k, l, i) * fabs(k->dY[l * r->dv + j]);
        r->own[t * r->dv + j] = own[i];
        r->end[t * r->dv + j] = 0;
        lost += decay(k, i, -1) * (r->split + r->u * (2 * sum_units(r, MOST) + decay_units(k, i, -1))) *
                (fabs(r->scale * r->d_o[t * r->vs + j]) * k->qn[i] + fabs(r->beta[t * r->bs] * d) * k->kn[i]);
    }
    r->end[k->t0 * r->dv + j] = lost;
}

/* y_i = sum_j |S_ij| |x_j| */
static void magnitudes(const rule *r, const double *S, const double *x, double *y)
{
    for (int64_t i = 0; i < r->dk; i++) {
        y[i] = 0;
        for (int64_t j = 0; j < r->dv; j++) y[i] += fabs(S[i * r->dv + j] * x[j]);
    }
}

static double magnitude(int64_t count, const double *x, const double *y)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += fabs(x[i] * y[i]);
    return sum;
}

void expect_chunk_backward(const rule *r, const back *b, const double *m0, int64_t t0)
{
    expect_chunk *k = chunk_at(r, t0);
    int64_t c = k->c, last = c - 1, dk = r->dk, dv = r->dv;
    const double *S = t0 ? r->m + (t0 - 1) * dk * dv : m0, *T = b->d;
    const double fine = r->u * (sum_units(r, dv) + 2 * sum_units(r, MOST) + 40), scale = fabs(r->scale);
    double in_row[MOST] = {0}, at_start[MOST], at_end[MOST], pairs[MOST][MOST], all = 0, whole = 0;
    for (int64_t j = 0; j < dv; j++) backward_column(r, k, T, j);
    for (int64_t i = 0; i < dk; i++) whole += magnitude(dv, S + i * dv, T + i * dv);
    whole *= decay(k, last, -1);
    for (int64_t i = 0; i < c; i++) {
        int64_t t = t0 + i, at = b->q_at + t * r->qs;
        const double *d_o = r->d_o + t * r->vs, *dY = k->dY + i * dv, *delta = r->delta + t * dv;
        const double *key = r->k + t * r->qs, *q = r->q + t * r->qs, *v = r->v + t * r->vs;
        double beta = fabs(r->beta[t * r->bs]), gam = decay(k, i, -1), w = decay(k, last, i);
        double from = fine + r->u * decay_units(k, i, -1), to = fine + r->u * decay_units(k, last, i);
        double *of_o = k->x, *of_y = k->y, *of_t = k->z;
        magnitudes(r, S, d_o, of_o);
        magnitudes(r, S, dY, of_y);
        magnitudes(r, T, delta, of_t);
        for (int64_t d = 0; d < dk; d++) {
            expect_rule_gather(b->query, at + d, r->u, 0, scale * gam * of_o[d] * (half + from));
            expect_rule_gather(b->key, at + d, r->u, 0,
                               gam * beta * of_y[d] * (2 * half + from) + w * of_t[d] * (2 * half + to));
        }
        k->e_beta[i] = magnitude(dv, dY, v) * (half + fine) + gam * magnitude(dk, key, of_y) * (2 * half + from);
        at_start[i] = scale * gam * magnitude(dk, q, of_o) * (half + from) +
                      gam * beta * magnitude(dk, key, of_y) * (2 * half + from);
        at_end[i] = w * magnitude(dk, key, of_t) * (2 * half + to);
        in_row[i] = at_start[i] / half + at_end[i] / half;
        for (int64_t l = 0; l <= i; l++) {
            const double *other = r->delta + (t0 + l) * dv, *kl = r->k + (t0 + l) * r->qs;
            int64_t al = b->q_at + (t0 + l) * r->qs;
            double x = decay(k, i, l), own = fine + r->u * decay_units(k, i, l);
            double N = scale * x * magnitude(dv, d_o, other), I = l < i ? beta * x * magnitude(dv, dY, other) : 0;
            for (int64_t d = 0; d < dk; d++) {
                expect_rule_gather(b->query, at + d, r->u, 0, N * fabs(kl[d]) * (2 * half + own));
                expect_rule_gather(b->key, al + d, r->u, 0,
                                   N * fabs(q[d]) * (2 * half + own) + I * fabs(key[d]) * (3 * half + own));
                expect_rule_gather(b->key, at + d, r->u, 0, I * fabs(kl[d]) * (3 * half + own));
            }
            double size = N * fabs(k->qk[i][l]) + I * fabs(k->kk[i][l]);
            double fold = (N * k->qn[i] + I * k->kn[i]) * k->kn[l] * r->u * sum_units(r, dk);
            if (l < i)
                k->e_beta[i] +=
                    x * magnitude(dv, dY, other) *
                    (fabs(k->kk[i][l]) * (2 * half + own) + k->kn[i] * k->kn[l] * r->u * sum_units(r, dk));
            pairs[i][l] = l < i ? size * (2 * half + own) + fold : 0;
            all += l < i ? size : 0;
        }
        all += in_row[i];
    }
    /* of g at token t: what reaches from in front of t to t or behind it */
    for (int64_t t = 0; t < c; t++) {
        double e = whole * (2 * half + fine + r->u * decay_units(k, last, -1)) + 64 * r->u * (all + whole);
        for (int64_t i = 0; i < c; i++) {
            e += i >= t ? at_start[i] : at_end[i];
            for (int64_t l = 0; l < t && i >= t && l < i; l++) e += pairs[i][l];
        }
        k->e_g[t] = e;
    }
}
