/* SPDX-License-Identifier: Apache-2.0
 *
 * Everything in front of a sub-layer, for one token [M10]: projection, coefficients, aggregate, RMSNorm. mhc_pre runs
 * it on x, mhc_boundary on the y it has just formed. The value passed from one part to the next is rounded as if stored,
 * whether or not the caller wants it stored. */
#ifndef WEFT_REF_PRE_H
#define WEFT_REF_PRE_H

#include "ref/coef.h"
#include "ref/norm.h"
#include "ref/project.h"
#include "ref/streams.h"

typedef struct pre_site {
    int64_t n, channels, rows, width;
    weft_dtype act, full; /* of u and v; of h, ms and an unstored pre */
    gates p;
    double *psi, *sub_weight; /* [N][nC], [C] */
    double *u, *v;            /* [C] */
    /* Backward: one token's d_u and d_v, and sums over the tokens. */
    double *d_u, *d_v, *d_psi, *d_sub_weight, *history;
    gates_grad sums;
} pre_site;

static inline void pre_take_forward(pre_site *s, const weft_call *call, weft_arena *arena)
{
    s->n = call->streams;
    s->channels = call->channels;
    s->rows = call->rows;
    s->width = s->n * s->channels;
    s->act = call->dtype;
    s->full = full_type(call);
    s->psi = take(arena, s->rows * s->width);
    s->sub_weight = take(arena, s->channels);
    s->u = take(arena, s->channels);
    s->v = take(arena, s->channels);
}

static inline void pre_take_backward(pre_site *s, const weft_call *call, const weft_mhc_numerics *q,
                                     weft_arena *arena)
{
    pre_take_forward(s, call, arena);
    s->d_u = take(arena, s->channels);
    s->d_v = take(arena, s->channels);
    s->d_psi = take(arena, s->rows * s->width);
    s->d_sub_weight = take(arena, s->channels);
    s->history = take(arena, sinkhorn_history(q, s->n));
}

static inline void pre_load_forward(pre_site *s, const weft_mhc_pre_fwd_args *a)
{
    gates_load(&s->p, &a->numerics, s->n, &a->alpha, &a->beta);
    project_load(&a->phi, &a->norm_weight, s->rows, s->width, s->psi);
    load_param(&a->sub_weight, s->channels, 1.0, s->sub_weight);
}

static inline void pre_load_backward(pre_site *s, const weft_mhc_pre_bwd_args *a)
{
    gates_load(&s->p, &a->numerics, s->n, &a->alpha, &a->beta);
    project_load(&a->phi, &a->norm_weight, s->rows, s->width, s->psi);
    load_param(&a->sub_weight, s->channels, 1.0, s->sub_weight);
    clear(s->rows * s->width, s->d_psi);
    clear(s->channels, s->d_sub_weight);
    memset(&s->sums, 0, sizeof s->sums);
}

/* The coefficients of the aggregate: those of the previous site, or this site's own as stored in `dtype`. */
static inline void pre_mix(const pre_site *s, const weft_tensor *pre_in, int64_t token, const double *coef,
                           weft_dtype dtype, double *mix)
{
    if (weft_has(pre_in)) {
        load_token(pre_in, token, s->n, mix);
        return;
    }
    for (int64_t i = 0; i < s->n; i++) mix[i] = rounded(dtype, coef[i]);
}

/* x: the streams of the token; a->x is not looked at. */
static inline void pre_token_forward(pre_site *s, const weft_mhc_pre_fwd_args *a, int64_t token, const double *x)
{
    int64_t n = s->n;
    double h[REF_MAX_GATES], coef[REF_MAX_GATES], mix[WEFT_MAX_STREAMS], ms;

    project_forward(s->rows, s->width, x, s->psi, h, &ms);
    store_token(&a->h, token, s->rows, h);
    store_token(&a->ms, token, 1, &ms);
    round_all(s->full, s->rows, h);
    round_all(s->full, 1, &ms);

    coef_forward(&s->p, &a->numerics, h, ms, coef);
    store_token(&a->pre, token, n, coef);
    store_token(&a->post, token, n, coef + n);
    store_token(&a->res, token, n * n, coef + 2 * n);

    pre_mix(s, &a->pre_in, token, coef, weft_has(&a->pre) ? a->pre.dtype : s->full, mix);
    aggregate_forward(n, s->channels, mix, x, s->u);
    store_token(&a->u, token, s->channels, s->u);
    round_all(s->act, s->channels, s->u);

    rmsnorm_forward(s->channels, a->sub_eps, s->u, s->sub_weight, s->v);
    store_token(&a->v, token, s->channels, s->v);
}

/* Adds the site's part to d_x and to the sums; a->x and a->d_x are not looked at. */
static inline void pre_token_backward(pre_site *s, const weft_mhc_pre_bwd_args *a, int64_t token, const double *x,
                                      double *d_x)
{
    int64_t n = s->n;
    double h[REF_MAX_GATES], d_h[REF_MAX_GATES], coef[REF_MAX_GATES], d_coef[REF_MAX_GATES], ms, d_ms;
    double mix[WEFT_MAX_STREAMS], d_mix[WEFT_MAX_STREAMS];

    load_token(&a->h, token, s->rows, h);
    load_token(&a->ms, token, 1, &ms);
    coef_forward(&s->p, &a->numerics, h, ms, coef);
    pre_mix(s, &a->pre_in, token, coef, s->full, mix);

    /* d_u + the norm's part, unrounded */
    load_token(&a->d_u, token, s->channels, s->d_u);
    if (weft_has(&a->d_v)) {
        aggregate_forward(n, s->channels, mix, x, s->u);
        round_all(s->act, s->channels, s->u);
        load_token(&a->d_v, token, s->channels, s->d_v);
        rmsnorm_backward(s->channels, a->sub_eps, s->u, s->sub_weight, s->d_v, s->d_u, s->d_sub_weight);
    }
    aggregate_backward(n, s->channels, mix, x, s->d_u, d_x, d_mix);

    /* The aggregate's coefficients came from outside, or they are this site's own. */
    load_token(&a->d_pre, token, n, d_coef);
    load_token(&a->d_post, token, n, d_coef + n);
    load_token(&a->d_res, token, n * n, d_coef + 2 * n);
    if (weft_has(&a->pre_in))
        grad_token(&a->d_pre_in, token, n, d_mix);
    else
        for (int64_t i = 0; i < n; i++) d_coef[i] += d_mix[i];

    coef_backward(&s->p, &a->numerics, h, ms, d_coef, d_h, &d_ms, &s->sums, s->history);
    project_backward_x(s->rows, s->width, x, s->psi, d_h, d_ms, d_x);
    project_backward_psi(s->rows, s->width, x, d_h, s->d_psi);
}

static inline void pre_store_sums(const pre_site *s, const weft_mhc_pre_bwd_args *a)
{
    project_store(&a->phi, &a->norm_weight, s->rows, s->width, s->d_psi, &a->d_phi, &a->d_norm_weight);
    grad_param(&a->d_alpha, s->p.scales, s->sums.alpha);
    grad_param(&a->d_beta, s->rows, s->sums.beta);
    grad_param(&a->d_sub_weight, s->channels, s->d_sub_weight);
}

#endif
