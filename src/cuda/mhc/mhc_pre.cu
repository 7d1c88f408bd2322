/* SPDX-License-Identifier: Apache-2.0
 *
 * Everything in front of a sub-layer [M10]: fused where the call allows it (site/fwd.cu; backward as boundary's, site/bwd.cu),
 * otherwise a chain of the unfused kernels: projection, coefficients, aggregate, norm. For a few fp32 tokens the first three are
 * one launch (mhc_pre_one.cu). What one link hands to the next and the caller does not ask for lies in the workspace. */
#include "cuda/mhc/mhc_pre.h"

#include "core/mhc_parts.h"
#include "cuda/common/chain.h"
#include "cuda/mhc/convert.h"
#include "cuda/mhc/mhc_project.cuh"
#include "cuda/site/bwd.h"
#include "cuda/site/fused_or_unfused.h"

/* ---- forward ------------------------------------------------------------------------------------------------------------ */

/* The links around the aggregate: u, and v from it. */
struct fwd_ends {
    weft_tensor u; /* absent: neither is wanted */
    weft_rmsnorm_fwd_args norm;
    bool wants_v;
};

static void fwd_take_u(fwd_ends *ends, weft_arena *arena, const weft_call *call, const weft_mhc_pre_fwd_args *a)
{
    fwd_ends &e = *new (ends) fwd_ends{.u = a->u, .norm = {}, .wants_v = weft_has(&a->v)};
    if (!e.wants_v) return;
    if (!weft_has(&e.u))
        e.u = weft_dense2(
            weft_arena_take(arena, (size_t)(call->tokens * call->channels) * weft_dtype_size(call->dtype)),
            call->dtype, call->tokens, call->channels);
    e.norm.eps = a->sub_eps;
    e.norm.u = e.u, e.norm.weight = a->sub_weight, e.norm.v = a->v;
}

struct fwd_chain {
    weft_mhc_project_fwd_args project;
    weft_mhc_coef_fwd_args coef;
    weft_mhc_aggregate_fwd_args aggregate;
    bool wants_coef;
    void *room;
};

static void fwd_lay_out(fwd_chain *chain, weft_arena *arena, const weft_call *call, const weft_mhc_pre_fwd_args *a,
                        const fwd_ends *ends)
{
    const int64_t tokens = call->tokens;
    fwd_chain &c = *new (chain) fwd_chain{};
    weft_tensor h = a->h, ms = a->ms, pre = a->pre;
    if (!weft_has(&h))
        h = weft_dense2(weft_arena_take(arena, (size_t)(tokens * call->rows) * 4), WEFT_F32, tokens, call->rows);
    if (!weft_has(&ms)) ms = weft_dense1(weft_arena_take(arena, (size_t)tokens * 4), WEFT_F32, tokens);
    if (!weft_has(&pre) && weft_has(&ends->u) && !weft_has(&a->pre_in))
        pre = weft_dense2(weft_arena_take(arena, (size_t)(tokens * call->streams) * 4), WEFT_F32, tokens,
                          call->streams);
    c.project.x = a->x, c.project.phi = a->phi, c.project.norm_weight = a->norm_weight;
    c.project.h = h, c.project.ms = ms;
    c.coef.numerics = a->numerics;
    c.coef.h = h, c.coef.ms = ms, c.coef.alpha = a->alpha, c.coef.beta = a->beta;
    c.coef.pre = pre, c.coef.post = a->post, c.coef.res = a->res;
    c.wants_coef = weft_has(&pre) || weft_has(&a->post) || weft_has(&a->res);
    c.aggregate.x = a->x, c.aggregate.pre = weft_has(&a->pre_in) ? a->pre_in : pre, c.aggregate.u = ends->u;
    /* The links run one after the other and may share. */
    size_t most = chain_bytes(call, weft_cuda_mhc_project_fwd, &c.project);
    most = larger(most, chain_bytes(call, weft_cuda_mhc_coef_fwd, &c.coef));
    most = larger(most, chain_bytes(call, weft_cuda_mhc_aggregate_fwd, &c.aggregate));
    most = larger(most, chain_bytes(call, weft_cuda_rmsnorm_fwd, &ends->norm));
    c.room = weft_arena_take(arena, most);
}

struct fwd_plan {
    weft_site_plan site;
    fwd_ends ends;     /* of paths that are not fused */
    weft_pre_plan one; /* of one launch */
    void *room;        /* of the norm behind it */
    fwd_chain chain;
};

static weft_status fwd_fused(const weft_call *call, const void *args, const weft_prepared *prepared)
{
    const fwd_plan *p = plan_of<fwd_plan>(prepared);
    return weft_cuda_site_fwd(call, &p->site, NULL, (const weft_mhc_pre_fwd_args *)args);
}

static weft_status fwd_one_launch(const weft_call *call, const void *args, const weft_prepared *prepared)
{
    const fwd_plan *p = plan_of<fwd_plan>(prepared);
    WEFT_TRY(weft_cuda_pre_one(call, &p->one, (const weft_mhc_pre_fwd_args *)args, &p->ends.u));
    return p->ends.wants_v ? chain_run(call, weft_cuda_rmsnorm_fwd, &p->ends.norm, p->room) : WEFT_OK;
}

static weft_status fwd_unfused(const weft_call *call, const void *, const weft_prepared *prepared)
{
    const fwd_plan *p = plan_of<fwd_plan>(prepared);
    const fwd_chain *c = &p->chain;
    WEFT_TRY(chain_run(call, weft_cuda_mhc_project_fwd, &c->project, c->room));
    if (c->wants_coef) WEFT_TRY(chain_run(call, weft_cuda_mhc_coef_fwd, &c->coef, c->room));
    if (weft_has(&p->ends.u)) WEFT_TRY(chain_run(call, weft_cuda_mhc_aggregate_fwd, &c->aggregate, c->room));
    return p->ends.wants_v ? chain_run(call, weft_cuda_rmsnorm_fwd, &p->ends.norm, c->room) : WEFT_OK;
}

/* One launch or the chain; returns the workspace. */
static size_t prepare_unfused(const weft_call *call, const weft_mhc_pre_fwd_args *a, fwd_plan *p)
{
    weft_arena arena = cuda_arena(call);
    fwd_take_u(&p->ends, &arena, call, a);
    p->one = weft_cuda_pre_one_plan(call, a, &p->ends.u);
    /* One launch takes less, but at other addresses it may not be one. */
    if (p->one.path != WEFT_PRE_ONE_LAUNCH || call->any_address)
        fwd_lay_out(&p->chain, &arena, call, a, &p->ends);
    else if (p->ends.wants_v)
        p->room = weft_arena_take(&arena, chain_bytes(call, weft_cuda_rmsnorm_fwd, &p->ends.norm));
    return weft_arena_bytes(&arena);
}

static void prepare_fwd(const weft_call *call, const void *args, weft_prepared *prepared)
{
    const weft_mhc_pre_fwd_args *a = (const weft_mhc_pre_fwd_args *)args;
    fwd_plan *p = new (plan_room<fwd_plan>(prepared)) fwd_plan; /* what its path does not need stays as it is */
    p->site = weft_cuda_site_fwd_plan(call, NULL, a);
    prepared->workspace = fused_or_unfused_bytes(call, &p->site, a, [&] { return prepare_unfused(call, a, p); });
    if (p->site.path == WEFT_SITE_FUSED) {
        prepared->path = weft_cuda_site_path_text(p->site.path);
        prepared->run = fwd_fused;
        return;
    }
    prepared->path = p->one.path == WEFT_PRE_DTYPE ? weft_cuda_site_path_text(p->site.path)
                                                   : weft_cuda_pre_path_text(p->one.path);
    prepared->run = p->one.path == WEFT_PRE_ONE_LAUNCH ? fwd_one_launch : fwd_unfused;
}

/* ---- backward ------------------------------------------------------------------------------------------------------------ */

struct bwd_chain {
    weft_mhc_coef_fwd_args coef;           /* pre once more, in fp32 */
    weft_mhc_aggregate_fwd_args aggregate; /* u once more, where there is a norm */
    weft_rmsnorm_bwd_args norm;
    weft_mhc_aggregate_bwd_args d_aggregate;
    weft_mhc_coef_bwd_args d_coef;
    weft_mhc_project_bwd_args d_project;
    project_extra extra;
    void *room;
};

/* Returns the workspace that the chain needs. */
static size_t bwd_lay_out(bwd_chain *chain, const weft_call *call, const weft_mhc_pre_bwd_args *a)
{
    weft_arena arena = cuda_arena(call);
    const int64_t tokens = call->tokens, n = call->streams, channels = call->channels;
    const bool shifted = weft_has(&a->pre_in), has_v = weft_has(&a->d_v), has_du = has_v || weft_has(&a->d_u);
    bwd_chain &c = *new (chain) bwd_chain{};
    weft_tensor pre = a->pre_in, du = a->d_u, d_pre = a->d_pre;
    if (has_du && !shifted) {
        pre = weft_dense2(weft_arena_take(&arena, (size_t)(tokens * n) * 4), WEFT_F32, tokens, n);
        c.coef.numerics = a->numerics;
        c.coef.h = a->h, c.coef.ms = a->ms, c.coef.alpha = a->alpha, c.coef.beta = a->beta, c.coef.pre = pre;
    }
    if (has_v) {
        const weft_tensor u =
            weft_dense2(weft_arena_take(&arena, (size_t)(tokens * channels) * weft_dtype_size(call->dtype)),
                        call->dtype, tokens, channels);
        du = weft_dense2(weft_arena_take(&arena, (size_t)(tokens * channels) * 4), WEFT_F32, tokens, channels);
        c.aggregate.x = a->x, c.aggregate.pre = pre, c.aggregate.u = u;
        c.norm.eps = a->sub_eps;
        c.norm.u = u, c.norm.weight = a->sub_weight, c.norm.d_v = a->d_v;
        c.norm.d_u.to = du, c.norm.d_u.add = weft_has(&a->d_u);
        c.norm.d_weight = a->d_sub_weight;
    }
    if (has_du) {
        /* The aggregate's part of d_pre belongs to pre_in where there is one, else to the coefficients of this site. */
        c.d_aggregate.x = a->x, c.d_aggregate.pre = pre, c.d_aggregate.d_u = du;
        c.d_aggregate.d_pre = a->d_pre_in;
        if (!shifted) {
            d_pre = weft_dense2(weft_arena_take(&arena, (size_t)(tokens * n) * 4), WEFT_F32, tokens, n);
            c.d_aggregate.d_pre.to = d_pre, c.d_aggregate.d_pre.add = weft_has(&a->d_pre);
        }
        c.extra.pre = pre, c.extra.du = du;
    }
    c.d_coef.numerics = a->numerics;
    c.d_coef.h = a->h, c.d_coef.ms = a->ms, c.d_coef.alpha = a->alpha, c.d_coef.beta = a->beta;
    c.d_coef.d_pre = d_pre, c.d_coef.d_post = a->d_post, c.d_coef.d_res = a->d_res;
    c.d_coef.d_h.to =
        weft_dense2(weft_arena_take(&arena, (size_t)(tokens * call->rows) * 4), WEFT_F32, tokens, call->rows);
    c.d_coef.d_ms.to = weft_dense1(weft_arena_take(&arena, (size_t)tokens * 4), WEFT_F32, tokens);
    c.d_coef.d_alpha = a->d_alpha, c.d_coef.d_beta = a->d_beta;
    c.d_project.x = a->x, c.d_project.phi = a->phi, c.d_project.norm_weight = a->norm_weight;
    c.d_project.d_h = c.d_coef.d_h.to, c.d_project.d_ms = c.d_coef.d_ms.to;
    c.d_project.d_x = a->d_x, c.d_project.d_phi = a->d_phi, c.d_project.d_norm_weight = a->d_norm_weight;

    size_t most = weft_cuda_project_bwd_bytes(call, &c.d_project);
    most = larger(most, chain_bytes(call, weft_cuda_mhc_coef_bwd, &c.d_coef));
    if (has_v) most = larger(most, chain_bytes(call, weft_cuda_rmsnorm_bwd, &c.norm));
    if (has_du) most = larger(most, chain_bytes(call, weft_cuda_mhc_aggregate_bwd, &c.d_aggregate));
    c.room = weft_arena_take(&arena, most);
    return weft_arena_bytes(&arena);
}

/* base: as of weft_cuda_pre_bwd_unfused. */
static weft_status bwd_run(const weft_call *call, const weft_mhc_pre_bwd_args *a, const bwd_chain *c,
                           const weft_tensor *base)
{
    const weft_tensor none = {};
    if (weft_has(&c->coef.pre)) WEFT_TRY(chain_run(call, weft_cuda_mhc_coef_fwd, &c->coef, c->room));
    if (weft_has(&a->d_v)) {
        WEFT_TRY(chain_run(call, weft_cuda_mhc_aggregate_fwd, &c->aggregate, c->room));
        if (c->norm.d_u.add) WEFT_TRY(weft_cuda_convert(call, &a->d_u, &c->norm.d_u.to));
        WEFT_TRY(chain_run(call, weft_cuda_rmsnorm_bwd, &c->norm, c->room));
    }
    if (weft_has(&c->d_aggregate.d_u)) {
        const bool own = !weft_has(&a->pre_in);
        if (own && weft_has(&a->d_pre)) WEFT_TRY(weft_cuda_convert(call, &a->d_pre, &c->d_aggregate.d_pre.to));
        if (weft_has(&c->d_aggregate.d_pre.to))
            WEFT_TRY(chain_run(call, weft_cuda_mhc_aggregate_bwd, &c->d_aggregate, c->room));
    } else if (weft_has(&a->d_pre_in.to) && !a->d_pre_in.add) {
        WEFT_TRY(weft_cuda_convert(call, &none, &a->d_pre_in.to));
    }
    WEFT_TRY(chain_run(call, weft_cuda_mhc_coef_bwd, &c->d_coef, c->room));
    project_extra extra = c->extra;
    if (base) extra.base = *base;
    weft_exec exec = *call->exec;
    weft_call link = *call;
    exec.workspace = c->room;
    link.exec = &exec;
    return weft_cuda_project_bwd(&link, &c->d_project, &extra);
}

weft_status weft_cuda_pre_bwd_unfused(const weft_call *call, const weft_mhc_pre_bwd_args *a,
                                      const weft_tensor *base)
{
    bwd_chain chain;
    bwd_lay_out(&chain, call, a);
    return bwd_run(call, a, &chain, base);
}

size_t weft_cuda_pre_bwd_unfused_bytes(const weft_call *call, const weft_mhc_pre_bwd_args *a)
{
    weft_call query = *call;
    bwd_chain chain;
    query.query = true;
    return bwd_lay_out(&chain, &query, a);
}

/* pre as a boundary, where backward is fused. */
struct bwd_plan {
    weft_mhc_boundary_bwd_args boundary;
};

static weft_status bwd_fused(const weft_call *call, const void *, const weft_prepared *prepared)
{
    return weft_cuda_boundary_bwd(call, &plan_of<bwd_plan>(prepared)->boundary);
}

static weft_status bwd_unfused(const weft_call *call, const void *args, const weft_prepared *prepared)
{
    return bwd_run(call, (const weft_mhc_pre_bwd_args *)args, plan_of<bwd_chain>(prepared), NULL);
}

static void prepare_bwd(const weft_call *call, const void *args, weft_prepared *prepared)
{
    const weft_mhc_pre_bwd_args *a = (const weft_mhc_pre_bwd_args *)args;
    const bwd_plan *p = new (plan_room<bwd_plan>(prepared)) bwd_plan{weft_pre_as_boundary(a)};
    const boundary_bwd_path path = weft_cuda_boundary_bwd_path(call, &p->boundary);
    const bool fused = path == BOUNDARY_BWD_FUSED;
    prepared->path = weft_boundary_bwd_path_text(path);
    prepared->run = fused ? bwd_fused : bwd_unfused;
    prepared->workspace = fused ? weft_cuda_boundary_bwd_bytes(call, &p->boundary)
                                : bwd_lay_out((bwd_chain *)plan_room<bwd_chain>(prepared), call, a);
}

const weft_kernel weft_cuda_mhc_pre_fwd[] = {{.prepare = prepare_fwd}, {}};
const weft_kernel weft_cuda_mhc_pre_bwd[] = {{.prepare = prepare_bwd}, {}};
