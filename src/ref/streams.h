/* SPDX-License-Identifier: Apache-2.0
 *
 * What happens to the streams of one token: aggregate [M5] and post [M6]. x, y and their gradients are [n][C]. */
#ifndef WEFT_REF_STREAMS_H
#define WEFT_REF_STREAMS_H

#include "core/philox.h"
#include "ref/common.h"

/* u[c] = sum_i pre[i] x[i,c] */
static inline void aggregate_forward(int64_t n, int64_t channels, const double *pre, const double *x, double *u)
{
    for (int64_t c = 0; c < channels; c++) {
        double sum = 0.0;
        for (int64_t i = 0; i < n; i++) sum += pre[i] * x[i * channels + c];
        u[c] = sum;
    }
}

/* d_x[i,c] += pre[i] d_u[c];  d_pre[i] = sum_c d_u[c] x[i,c] */
static inline void aggregate_backward(int64_t n, int64_t channels, const double *pre, const double *x,
                                      const double *d_u, double *d_x, double *d_pre)
{
    for (int64_t i = 0; i < n; i++) {
        d_pre[i] = 0.0;
        for (int64_t c = 0; c < channels; c++) {
            d_x[i * channels + c] += pre[i] * d_u[c];
            d_pre[i] += d_u[c] * x[i * channels + c];
        }
    }
}

/* D[o,c]: 0 or 1/(1-p) [D1] */
static inline double drop_factor(const weft_mask *mask, int64_t token, int64_t o, int64_t c)
{
    if (!mask->on) return 1.0;
    return weft_mask_keep(mask, token, o, c) ? mask->scale : 0.0;
}

/* Where W(i,o) lies in res. */
static inline int64_t mix_at(weft_apply apply, int64_t n, int64_t i, int64_t o)
{
    return apply == WEFT_APPLY_IN_OUT ? i * n + o : o * n + i;
}

/* What post needs besides the streams, of one token. */
typedef struct post_token {
    int64_t n, channels, token;
    weft_apply apply;
    const weft_mask *mask;
    const double *f, *bias, *post;
    const double *res; /* NULL: the identity */
} post_token;

/* y[o,c] = D[o,c] post[o] (f[c] + bias[c]) + sum_i W(i,o) x[i,c], or + x[o,c] */
static inline void post_forward(const post_token *p, const double *x, double *y)
{
    for (int64_t o = 0; o < p->n; o++) {
        for (int64_t c = 0; c < p->channels; c++) {
            double sum = drop_factor(p->mask, p->token, o, c) * p->post[o] * (p->f[c] + p->bias[c]);
            if (!p->res) sum += x[o * p->channels + c];
            for (int64_t i = 0; p->res && i < p->n; i++)
                sum += p->res[mix_at(p->apply, p->n, i, o)] * x[i * p->channels + c];
            y[o * p->channels + c] = sum;
        }
    }
}

/* d_f[c] = sum_o d_y D post;  d_post[o] = sum_c d_y D (f + bias);  d_x[i,c] = sum_o W(i,o) d_y[o,c];
 * dW(i,o) = sum_c x[i,c] d_y[o,c]. Without res d_x = d_y, and d_res is zero. */
static inline void post_backward(const post_token *p, const double *x, const double *d_y, double *d_x, double *d_f,
                                 double *d_post, double *d_res)
{
    int64_t n = p->n, channels = p->channels;
    clear(n * channels, d_x);
    clear(channels, d_f);
    clear(n, d_post);
    clear(n * n, d_res);
    for (int64_t o = 0; o < n; o++) {
        for (int64_t c = 0; c < channels; c++) {
            double d = d_y[o * channels + c], dropped = d * drop_factor(p->mask, p->token, o, c);
            d_f[c] += dropped * p->post[o];
            d_post[o] += dropped * (p->f[c] + p->bias[c]);
            if (!p->res) d_x[o * channels + c] = d;
            for (int64_t i = 0; p->res && i < n; i++) {
                d_x[i * channels + c] += p->res[mix_at(p->apply, n, i, o)] * d;
                d_res[mix_at(p->apply, n, i, o)] += x[i * channels + c] * d;
            }
        }
    }
}

#endif
