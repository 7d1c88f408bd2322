/* SPDX-License-Identifier: Apache-2.0
 *
 * Gates [M2] and coefficients [M4] of one token. Values and gradients of the three groups lie one after the other, as
 * the rows of the projection do: pre | post | logits, and after Sinkhorn pre | post | res. The learned head [M9] has
 * rows of the first group only, and a site without a residual mix those of the first two. */
#ifndef WEFT_REF_COEF_H
#define WEFT_REF_COEF_H

#include "ref/sinkhorn.h"

typedef struct gates {
    int64_t n, rows, scales;
    double rms_eps;
    weft_eps_kind rms_eps_kind;
    double pre_eps, post_mult, post_eps;
    double alpha[3], beta[REF_MAX_GATES];
} gates;

/* Sums over the tokens. */
typedef struct gates_grad {
    double alpha[3], beta[REF_MAX_GATES];
} gates_grad;

static inline void gates_load(gates *p, const weft_mhc_numerics *q, int64_t n, const weft_tensor *alpha,
                              const weft_tensor *beta)
{
    p->n = n;
    p->scales = alpha->shape[0];
    p->rows = p->scales == 2 ? 2 * n : 2 * n + n * n;
    p->rms_eps = q->rms_eps;
    p->rms_eps_kind = q->rms_eps_kind;
    p->pre_eps = q->pre_eps;
    p->post_mult = q->post_mult;
    p->post_eps = q->post_eps;
    load_param(alpha, p->scales, 0.0, p->alpha);
    load_param(beta, p->rows, 0.0, p->beta);
}

static inline int gate_group(const gates *p, int64_t j)
{
    return j < p->n ? 0 : j < 2 * p->n ? 1 : 2;
}

static inline double inv_rms(const gates *p, double ms)
{
    return p->rms_eps_kind == WEFT_EPS_INSIDE ? 1.0 / sqrt(ms + p->rms_eps) : 1.0 / (sqrt(ms) + p->rms_eps);
}

/* d inv / d ms. A token of zeros is the edge of the domain: the derivative there counts as zero. */
static inline double inv_rms_slope(const gates *p, double ms)
{
    double inv = inv_rms(p, ms);
    if (p->rms_eps_kind == WEFT_EPS_INSIDE) return ms + p->rms_eps == 0.0 ? 0.0 : -0.5 * inv * inv * inv;
    return ms == 0.0 ? 0.0 : -inv * inv / (2.0 * sqrt(ms));
}

/* Only exponentials of negative numbers, so nothing overflows. */
static inline double sigmoid(double z)
{
    double e = exp(-fabs(z));
    return z >= 0.0 ? 1.0 / (1.0 + e) : e / (1.0 + e);
}

/* sigma (1 - sigma), without the cancellation of 1 - sigma */
static inline double sigmoid_slope(double z)
{
    return sigmoid(z) * sigmoid(-z);
}

/* z = alpha h inv + beta;  pre = sigmoid(z) + pre_eps;  post = post_mult sigmoid(z) + post_eps;  logits = z */
static inline void gates_forward(const gates *p, const double *h, double ms, double *out)
{
    double inv = inv_rms(p, ms);
    for (int64_t j = 0; j < p->rows; j++) {
        int group = gate_group(p, j);
        double z = p->alpha[group] * h[j] * inv + p->beta[j];
        out[j] = group == 0 ? sigmoid(z) + p->pre_eps : group == 1 ? p->post_mult * sigmoid(z) + p->post_eps : z;
    }
}

static inline void gates_backward(const gates *p, const double *h, double ms, const double *d_out, double *d_h,
                                  double *d_ms, gates_grad *grad)
{
    double inv = inv_rms(p, ms), d_inv = 0.0;
    for (int64_t j = 0; j < p->rows; j++) {
        int group = gate_group(p, j);
        double z = p->alpha[group] * h[j] * inv + p->beta[j];
        double dz = group == 0   ? d_out[j] * sigmoid_slope(z)
                    : group == 1 ? d_out[j] * p->post_mult * sigmoid_slope(z)
                                 : d_out[j];
        d_h[j] = p->alpha[group] * dz * inv;
        d_inv += p->alpha[group] * dz * h[j];
        grad->alpha[group] += dz * h[j] * inv;
        grad->beta[j] += dz;
    }
    *d_ms = d_inv * inv_rms_slope(p, ms);
}

static inline bool gates_mix(const gates *p)
{
    return p->rows > 2 * p->n;
}

/* Gates, then Sinkhorn of the logits. */
static inline void coef_forward(const gates *p, const weft_mhc_numerics *q, const double *h, double ms, double *out)
{
    gates_forward(p, h, ms, out);
    if (gates_mix(p)) sinkhorn_forward(q, p->n, out + 2 * p->n, out + 2 * p->n);
}

static inline void coef_backward(const gates *p, const weft_mhc_numerics *q, const double *h, double ms,
                                 const double *d_out, double *d_h, double *d_ms, gates_grad *grad, double *history)
{
    double out[REF_MAX_GATES], d_gates[REF_MAX_GATES];
    gates_forward(p, h, ms, out);
    for (int64_t j = 0; j < 2 * p->n; j++) d_gates[j] = d_out[j];
    if (gates_mix(p)) sinkhorn_backward(q, p->n, out + 2 * p->n, d_out + 2 * p->n, d_gates + 2 * p->n, history);
    gates_backward(p, h, ms, d_gates, d_h, d_ms, grad);
}

#endif
