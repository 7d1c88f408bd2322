/* SPDX-License-Identifier: Apache-2.0
 *
 * Projection and mean square of one token [M1]. `width` is n*C; psi and its gradient are [rows][width]. */
#ifndef WEFT_REF_PROJECT_H
#define WEFT_REF_PROJECT_H

#include "ref/common.h"

/* psi[j,i,c] = phi[j,i,c] norm_weight[i,c] */
static inline void project_load(const weft_tensor *phi, const weft_tensor *norm_weight, int64_t rows, int64_t width,
                                double *psi)
{
    load_param(phi, rows * width, 0.0, psi);
    if (!weft_has(norm_weight)) return;
    for (int64_t j = 0; j < rows; j++)
        for (int64_t k = 0; k < width; k++)
            psi[j * width + k] *= load_at(norm_weight, offset_of(norm_weight, 0, k));
}

/* h[j] = sum_k x[k] psi[j,k];  ms = sum_k x[k]^2 / width */
static inline void project_forward(int64_t rows, int64_t width, const double *x, const double *psi, double *h,
                                   double *ms)
{
    double squares = 0.0;
    for (int64_t j = 0; j < rows; j++) {
        double sum = 0.0;
        for (int64_t k = 0; k < width; k++) sum += x[k] * psi[j * width + k];
        h[j] = sum;
    }
    for (int64_t k = 0; k < width; k++) squares += x[k] * x[k];
    *ms = squares / (double)width;
}

/* d_x[k] += sum_j d_h[j] psi[j,k] + (2 d_ms / width) x[k] */
static inline void project_backward_x(int64_t rows, int64_t width, const double *x, const double *psi,
                                      const double *d_h, double d_ms, double *d_x)
{
    for (int64_t j = 0; j < rows; j++)
        for (int64_t k = 0; k < width; k++) d_x[k] += d_h[j] * psi[j * width + k];
    for (int64_t k = 0; k < width; k++) d_x[k] += 2.0 * d_ms / (double)width * x[k];
}

/* d_psi[j,k] += d_h[j] x[k], one token's part */
static inline void project_backward_psi(int64_t rows, int64_t width, const double *x, const double *d_h,
                                        double *d_psi)
{
    for (int64_t j = 0; j < rows; j++)
        for (int64_t k = 0; k < width; k++) d_psi[j * width + k] += d_h[j] * x[k];
}

/* d_phi[j,k] = d_psi[j,k] norm_weight[k];  d_norm_weight[k] = sum_j d_psi[j,k] phi[j,k] */
static inline void project_store(const weft_tensor *phi, const weft_tensor *norm_weight, int64_t rows,
                                 int64_t width, const double *d_psi, const weft_grad *d_phi,
                                 const weft_grad *d_norm_weight)
{
    for (int64_t k = 0; k < width; k++) {
        double w = weft_has(norm_weight) ? load_at(norm_weight, offset_of(norm_weight, 0, k)) : 1.0;
        double d_w = 0.0;
        for (int64_t j = 0; j < rows; j++) {
            double d = d_psi[j * width + k];
            d_w += d * load_at(phi, offset_of(phi, 0, j * width + k));
            if (weft_has(&d_phi->to)) grad_at(d_phi, offset_of(&d_phi->to, 0, j * width + k), d * w);
        }
        if (weft_has(&d_norm_weight->to)) grad_at(d_norm_weight, offset_of(&d_norm_weight->to, 0, k), d_w);
    }
}

#endif
