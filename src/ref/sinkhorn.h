/* SPDX-License-Identifier: Apache-2.0
 *
 * Sinkhorn of one n x n matrix [M3], all five rules. Rows are lines of the last index. Backward recomputes the
 * iterations into `history`, which forward leaves out where it is NULL.
 *
 * Four rules work on the matrix itself: a start, then 2*iters normalisations of rows (even steps) and columns (odd
 * steps), y = m / D(s) with s the sum of m along the line. The fifth works on potentials in log space. */
#ifndef WEFT_REF_SINKHORN_H
#define WEFT_REF_SINKHORN_H

#include "ref/common.h"

/* One record per step: the matrix after it and the n sums it divided by. The potentials of the log rule need less. */
static inline int64_t sinkhorn_history(const weft_mhc_numerics *q, int64_t n)
{
    return 2 * (int64_t)q->sinkhorn_iters * (n * n + n);
}

/* Element k of a line: of row `line` in an even step, of column `line` in an odd one. */
static inline int64_t sinkhorn_at(int64_t n, int64_t step, int64_t line, int64_t k)
{
    return step % 2 == 0 ? line * n + k : k * n + line;
}

static inline double sinkhorn_row_max(int64_t n, const double *row)
{
    double max = row[0];
    for (int64_t b = 1; b < n; b++)
        if (row[b] > max) max = row[b];
    return max;
}

/* ---- the four linear rules -------------------------------------------------------------------------------------- */

/* D(s). The comparison of clamp keeps a NaN; threshold's factor 0 is a division by infinity. */
static inline double sinkhorn_divisor(const weft_mhc_numerics *q, double s)
{
    double eps = q->sinkhorn_eps;
    switch (q->sinkhorn) {
    case WEFT_SINKHORN_CLAMP: return eps > s ? eps : s;
    case WEFT_SINKHORN_THRESHOLD: return s > eps ? s : INFINITY;
    default: return s + eps;
    }
}

/* D'(s) */
static inline double sinkhorn_slope(const weft_mhc_numerics *q, double s)
{
    double eps = q->sinkhorn_eps;
    switch (q->sinkhorn) {
    case WEFT_SINKHORN_CLAMP: return eps > s ? 0.0 : 1.0;
    case WEFT_SINKHORN_THRESHOLD: return s > eps ? 1.0 : 0.0;
    default: return 1.0;
    }
}

/* A0 = exp(Z - rowmax); threshold: exp(Z); softmax_eps: the softmax of the rows, which is its step 0. */
static inline void sinkhorn_start(const weft_mhc_numerics *q, int64_t n, const double *z, double *a)
{
    for (int64_t row = 0; row < n; row++) {
        double shift = q->sinkhorn == WEFT_SINKHORN_THRESHOLD ? 0.0 : sinkhorn_row_max(n, z + row * n), sum = 0.0;
        for (int64_t b = 0; b < n; b++) {
            a[row * n + b] = exp(z[row * n + b] - shift);
            sum += a[row * n + b];
        }
        if (q->sinkhorn == WEFT_SINKHORN_SOFTMAX_EPS)
            for (int64_t b = 0; b < n; b++) a[row * n + b] /= sum;
    }
}

static inline void sinkhorn_linear_forward(const weft_mhc_numerics *q, int64_t n, const double *z, double *a,
                                           double *history)
{
    int64_t step = 0, record = n * n + n;
    sinkhorn_start(q, n, z, a);
    if (q->sinkhorn == WEFT_SINKHORN_SOFTMAX_EPS) {
        if (history) memcpy(history, a, (size_t)(n * n) * sizeof *a);
        for (int64_t k = 0; k < n * n; k++) a[k] += q->sinkhorn_eps;
        step = 1;
    }
    for (; step < 2 * (int64_t)q->sinkhorn_iters; step++) {
        for (int64_t line = 0; line < n; line++) {
            double s = 0.0;
            for (int64_t k = 0; k < n; k++) s += a[sinkhorn_at(n, step, line, k)];
            for (int64_t k = 0; k < n; k++) a[sinkhorn_at(n, step, line, k)] /= sinkhorn_divisor(q, s);
            if (history) history[step * record + n * n + line] = s;
        }
        if (history) memcpy(history + step * record, a, (size_t)(n * n) * sizeof *a);
    }
}

static inline void sinkhorn_linear_backward(const weft_mhc_numerics *q, int64_t n, const double *z,
                                            const double *d_a, double *d_z, double *history)
{
    double a[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS], d[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS];
    int64_t first = q->sinkhorn == WEFT_SINKHORN_SOFTMAX_EPS ? 1 : 0, record = n * n + n;
    sinkhorn_linear_forward(q, n, z, a, history);

    /* y = m / D(s):  dm = (dy - D'(s) sum(dy y)) / D(s) */
    memcpy(d, d_a, (size_t)(n * n) * sizeof *d);
    for (int64_t step = 2 * (int64_t)q->sinkhorn_iters - 1; step >= first; step--) {
        const double *y = history + step * record, *sums = y + n * n;
        for (int64_t line = 0; line < n; line++) {
            double slope = sinkhorn_slope(q, sums[line]), divisor = sinkhorn_divisor(q, sums[line]), dot = 0.0;
            for (int64_t k = 0; k < n; k++)
                dot += d[sinkhorn_at(n, step, line, k)] * y[sinkhorn_at(n, step, line, k)];
            for (int64_t k = 0; k < n; k++) {
                int64_t e = sinkhorn_at(n, step, line, k);
                d[e] = (d[e] - slope * dot) / divisor;
            }
        }
    }

    sinkhorn_start(q, n, z, a);
    for (int64_t row = 0; row < n; row++) {
        const double *zr = z + row * n, *ar = a + row * n, *dr = d + row * n;
        double dot = 0.0, max = sinkhorn_row_max(n, zr), equal = 0.0;
        for (int64_t b = 0; b < n; b++) {
            dot += dr[b] * ar[b];
            equal += zr[b] == max;
        }
        for (int64_t b = 0; b < n; b++) {
            double *to = d_z + row * n + b;
            *to = dr[b] * ar[b];
            if (q->sinkhorn == WEFT_SINKHORN_SOFTMAX_EPS)
                *to = ar[b] * (dr[b] - dot);
            else if (q->sinkhorn != WEFT_SINKHORN_THRESHOLD && zr[b] == max)
                *to -= dot / equal; /* the maximum was subtracted from the whole row */
        }
    }
}

/* ---- the log rule ----------------------------------------------------------------------------------------------- */

/* log sum_k exp(m[line, k] + p[k]) */
static inline double sinkhorn_lse(int64_t n, int64_t step, int64_t line, const double *m, const double *p)
{
    double max = -INFINITY, sum = 0.0;
    for (int64_t k = 0; k < n; k++) {
        double v = m[sinkhorn_at(n, step, line, k)] + p[k];
        if (v > max) max = v;
    }
    for (int64_t k = 0; k < n; k++) sum += exp(m[sinkhorn_at(n, step, line, k)] + p[k] - max);
    return log(sum) + max;
}

/* The result does not depend on a shift of a row, and rows that begin at zero lose the fewest digits. */
static inline void sinkhorn_log_shift(int64_t n, const double *z, double *shifted)
{
    for (int64_t row = 0; row < n; row++) {
        double max = sinkhorn_row_max(n, z + row * n);
        for (int64_t b = 0; b < n; b++) shifted[row * n + b] = z[row * n + b] - max;
    }
}

/* f_t[a] = -LSE_b(Z[a,b] + g_{t-1}[b]);  g_t[b] = -LSE_a(Z[a,b] + f_t[a]);  A = exp(f_T[a] + Z[a,b] + g_T[b])
 * history: pairs f_t, g_t for t = 0 .. iters. */
static inline void sinkhorn_log_forward(const weft_mhc_numerics *q, int64_t n, const double *z, double *a,
                                        double *history)
{
    double m[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS], f[WEFT_MAX_STREAMS] = {0.0}, g[WEFT_MAX_STREAMS] = {0.0};
    sinkhorn_log_shift(n, z, m);
    for (int64_t t = 0; t <= q->sinkhorn_iters; t++) {
        if (t > 0) {
            for (int64_t row = 0; row < n; row++) f[row] = -sinkhorn_lse(n, 0, row, m, g);
            for (int64_t col = 0; col < n; col++) g[col] = -sinkhorn_lse(n, 1, col, m, f);
        }
        if (!history) continue;
        memcpy(history + 2 * t * n, f, (size_t)n * sizeof *f);
        memcpy(history + (2 * t + 1) * n, g, (size_t)n * sizeof *g);
    }
    for (int64_t row = 0; row < n; row++)
        for (int64_t b = 0; b < n; b++) a[row * n + b] = exp(f[row] + m[row * n + b] + g[b]);
}

static inline void sinkhorn_log_backward(const weft_mhc_numerics *q, int64_t n, const double *z, const double *d_a,
                                         double *d_z, double *history)
{
    double m[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS], a[WEFT_MAX_STREAMS * WEFT_MAX_STREAMS];
    double d_f[WEFT_MAX_STREAMS] = {0.0}, d_g[WEFT_MAX_STREAMS] = {0.0};
    sinkhorn_log_shift(n, z, m);
    sinkhorn_log_forward(q, n, z, a, history);

    /* A sees Z, f_T and g_T alike. */
    for (int64_t row = 0; row < n; row++) {
        for (int64_t b = 0; b < n; b++) {
            double d = d_a[row * n + b] * a[row * n + b];
            d_z[row * n + b] = d;
            d_f[row] += d;
            d_g[b] += d;
        }
    }
    for (int64_t t = q->sinkhorn_iters; t >= 1; t--) {
        const double *f = history + 2 * t * n, *g = f + n, *g_before = g - 2 * n;
        for (int64_t row = 0; row < n; row++) {
            for (int64_t b = 0; b < n; b++) { /* through g_t */
                double d = -d_g[b] * exp(f[row] + m[row * n + b] + g[b]);
                d_z[row * n + b] += d;
                d_f[row] += d;
            }
        }
        for (int64_t b = 0; b < n; b++) d_g[b] = 0.0;
        for (int64_t row = 0; row < n; row++) {
            for (int64_t b = 0; b < n; b++) { /* through f_t */
                double d = -d_f[row] * exp(f[row] + m[row * n + b] + g_before[b]);
                d_z[row * n + b] += d;
                d_g[b] += d;
            }
            d_f[row] = 0.0;
        }
    }
}

/* ---- either ----------------------------------------------------------------------------------------------------- */

/* a may be z. */
static inline void sinkhorn_forward(const weft_mhc_numerics *q, int64_t n, const double *z, double *a)
{
    if (q->sinkhorn == WEFT_SINKHORN_LOG)
        sinkhorn_log_forward(q, n, z, a, NULL);
    else
        sinkhorn_linear_forward(q, n, z, a, NULL);
}

/* d_z may be d_a in the linear rules and in the log rule alike: d_a is read before d_z is written. */
static inline void sinkhorn_backward(const weft_mhc_numerics *q, int64_t n, const double *z, const double *d_a,
                                     double *d_z, double *history)
{
    if (q->sinkhorn == WEFT_SINKHORN_LOG)
        sinkhorn_log_backward(q, n, z, d_a, d_z, history);
    else
        sinkhorn_linear_backward(q, n, z, d_a, d_z, history);
}

#endif
