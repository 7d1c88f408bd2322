/* SPDX-License-Identifier: Apache-2.0
 *
 * RMSNorm of one row [N1]. */
#ifndef WEFT_REF_NORM_H
#define WEFT_REF_NORM_H

#include "ref/common.h"

/* r = 1/sqrt(mean_c u[c]^2 + eps) */
static inline double rmsnorm_inverse(int64_t channels, double eps, const double *u)
{
    double squares = 0.0;
    for (int64_t c = 0; c < channels; c++) squares += u[c] * u[c];
    return 1.0 / sqrt(squares / (double)channels + eps);
}

/* v[c] = u[c] r weight[c] */
static inline void rmsnorm_forward(int64_t channels, double eps, const double *u, const double *weight, double *v)
{
    double r = rmsnorm_inverse(channels, eps, u);
    for (int64_t c = 0; c < channels; c++) v[c] = u[c] * r * weight[c];
}

/* g = d_v weight;  d_u[c] += r (g[c] - u[c] r^2 mean_c(g u));  d_weight[c] += d_v[c] u[c] r, one token's part */
static inline void rmsnorm_backward(int64_t channels, double eps, const double *u, const double *weight,
                                    const double *d_v, double *d_u, double *d_weight)
{
    double r = rmsnorm_inverse(channels, eps, u), dot = 0.0;
    for (int64_t c = 0; c < channels; c++) dot += d_v[c] * weight[c] * u[c];
    dot /= (double)channels;
    for (int64_t c = 0; c < channels; c++) {
        d_u[c] += r * (d_v[c] * weight[c] - u[c] * r * r * dot);
        d_weight[c] += d_v[c] * u[c] * r;
    }
}

#endif
