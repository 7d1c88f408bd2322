/* SPDX-License-Identifier: Apache-2.0
 *
 * The operators inside `boundary` [M11], as arguments of their own. */
#ifndef WEFT_CORE_MHC_PARTS_H
#define WEFT_CORE_MHC_PARTS_H

#include "core/kernel.h"

static inline weft_mhc_post_fwd_args weft_boundary_post_fwd(const weft_mhc_boundary_fwd_args *a)
{
    weft_mhc_post_fwd_args p = {0};
    p.numerics = a->numerics;
    p.dropout = a->dropout;
    p.x = a->x;
    p.f = a->f;
    p.bias = a->bias;
    p.post = a->post;
    p.res = a->res;
    p.y = a->y;
    return p;
}

static inline weft_mhc_pre_fwd_args weft_boundary_pre_fwd(const weft_mhc_boundary_fwd_args *a)
{
    weft_mhc_pre_fwd_args p = {0};
    p.numerics = a->numerics;
    p.sub_eps = a->sub_eps;
    p.x = a->y;
    p.phi = a->phi;
    p.norm_weight = a->norm_weight;
    p.alpha = a->alpha;
    p.beta = a->beta;
    p.pre_in = a->pre_in;
    p.sub_weight = a->sub_weight;
    p.h = a->h;
    p.ms = a->ms;
    p.pre = a->pre_out;
    p.post = a->post_out;
    p.res = a->res_out;
    p.u = a->u;
    p.v = a->v;
    return p;
}

/* The post that rebuilds y in the backward, with y still to be set. */
static inline weft_mhc_post_fwd_args weft_boundary_rebuild(const weft_mhc_boundary_bwd_args *a)
{
    weft_mhc_post_fwd_args p = {0};
    p.numerics = a->numerics;
    p.dropout = a->dropout;
    p.x = a->x;
    p.f = a->f;
    p.bias = a->bias;
    p.post = a->post;
    p.res = a->res;
    return p;
}

/* d_x is still to be set: it is the gradient of y. */
static inline weft_mhc_pre_bwd_args weft_boundary_pre_bwd(const weft_mhc_boundary_bwd_args *a)
{
    weft_mhc_pre_bwd_args p = {0};
    p.numerics = a->numerics;
    p.sub_eps = a->sub_eps;
    p.x = a->y;
    p.phi = a->phi;
    p.norm_weight = a->norm_weight;
    p.pre_in = a->pre_in;
    p.sub_weight = a->sub_weight;
    p.alpha = a->alpha;
    p.beta = a->beta;
    p.h = a->h;
    p.ms = a->ms;
    p.d_u = a->d_u;
    p.d_v = a->d_v;
    p.d_pre = a->d_pre_out;
    p.d_post = a->d_post_out;
    p.d_res = a->d_res_out;
    p.d_phi = a->d_phi;
    p.d_norm_weight = a->d_norm_weight;
    p.d_alpha = a->d_alpha;
    p.d_beta = a->d_beta;
    p.d_pre_in = a->d_pre_in;
    p.d_sub_weight = a->d_sub_weight;
    return p;
}

/* The other way round: pre's backward as that of a boundary without x, f and their coefficients, whose y is the streams and
 * whose d_x is the gradient of y. */
static inline weft_mhc_boundary_bwd_args weft_pre_as_boundary(const weft_mhc_pre_bwd_args *a)
{
    weft_mhc_boundary_bwd_args b = {0};
    b.numerics = a->numerics;
    b.sub_eps = a->sub_eps;
    b.y = a->x;
    b.phi = a->phi;
    b.norm_weight = a->norm_weight;
    b.pre_in = a->pre_in;
    b.sub_weight = a->sub_weight;
    b.alpha = a->alpha;
    b.beta = a->beta;
    b.h = a->h;
    b.ms = a->ms;
    b.d_u = a->d_u;
    b.d_v = a->d_v;
    b.d_pre_out = a->d_pre;
    b.d_post_out = a->d_post;
    b.d_res_out = a->d_res;
    b.d_x = a->d_x;
    b.d_phi = a->d_phi;
    b.d_norm_weight = a->d_norm_weight;
    b.d_alpha = a->d_alpha;
    b.d_beta = a->d_beta;
    b.d_pre_in = a->d_pre_in;
    b.d_sub_weight = a->d_sub_weight;
    return b;
}

/* d_y is still to be set: the whole gradient of y. */
static inline weft_mhc_post_bwd_args weft_boundary_post_bwd(const weft_mhc_boundary_bwd_args *a)
{
    weft_mhc_post_bwd_args p = {0};
    p.numerics = a->numerics;
    p.dropout = a->dropout;
    p.x = a->x;
    p.f = a->f;
    p.bias = a->bias;
    p.post = a->post;
    p.res = a->res;
    p.d_x = a->d_x;
    p.d_f = a->d_f;
    p.d_bias = a->d_bias;
    p.d_post = a->d_post;
    p.d_res = a->d_res;
    return p;
}

static inline bool weft_boundary_wants_post(const weft_mhc_boundary_bwd_args *a)
{
    return weft_has(&a->d_x.to) || weft_has(&a->d_f.to) || weft_has(&a->d_bias.to) || weft_has(&a->d_post.to) ||
           weft_has(&a->d_res.to);
}

#endif
