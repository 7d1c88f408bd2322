/* SPDX-License-Identifier: Apache-2.0
 *
 * Everything in front of a sub-layer [M10]. Forward is a single pass where the plan allows it, backward takes the single pass
 * of boundary's backward where it can; else both are chains of launches: projection, coefficients, aggregate, norm. For a few
 * fp32 tokens the first three are one launch (mhc_pre_one.cu). What one link hands to the next and the caller does not ask for
 * lies in the workspace. */
#include "cuda/mhc/mhc_pre.h"

#include "core/mhc_parts.h"
#include "cuda/common/chain.h"
#include "cuda/mhc/convert.h"
#include "cuda/mhc/mhc_project.cuh"
#include "cuda/site/bwd.h"
#include "cuda/site/fused_or_chain.h"

/* ---- forward ------------------------------------------------------------------------------------------------------------ */

/* The links around the aggregate: u, and v from it. */
struct fwd_ends {
    weft_tensor u; /* absent: neither is wanted */
    weft_rmsnorm_fwd_args norm;
    bool wants_v;
};

static fwd_ends fwd_take_u(weft_arena *arena, const weft_call *call, const weft_mhc_pre_fwd_args *a)
{
    fwd_ends e = {.u = a->u, .norm = {}, .wants_v = weft_has(&a->v)};
    if (!e.wants_v) return e;
    if (!weft_has(&e.u))
        e.u = weft_dense2(
            weft_arena_take(arena, (size_t)(call->tokens * call->channels) * weft_dtype_size(call->dtype)),
            call->dtype, call->tokens, call->channels);
    e.norm.eps = a->sub_eps;
    e.norm.u = e.u, e.norm.weight = a->sub_weight, e.norm.v = a->v;
    return e;
}

struct fwd_chain {
    weft_mhc_project_fwd_args project;
    weft_mhc_coef_fwd_args coef;
    weft_mhc_aggregate_fwd_args aggregate;
    bool wants_coef;
    void *room;
};

static fwd_chain fwd_lay_out(weft_arena *arena, const weft_call *call, const weft_mhc_pre_fwd_args *a,
                             const fwd_ends *ends)
{
    const int64_t tokens = call->tokens;
    fwd_chain c = {};
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
    return c;
}

static weft_status fwd_by_links(const weft_call *call, weft_arena *arena, const weft_mhc_pre_fwd_args *a,
                                const fwd_ends *ends)
{
    const fwd_chain c = fwd_lay_out(arena, call, a, ends);
    WEFT_TRY(weft_check_room(call, weft_arena_bytes(arena)));
    WEFT_TRY(chain_run(call, weft_cuda_mhc_project_fwd, &c.project, c.room));
    if (c.wants_coef) WEFT_TRY(chain_run(call, weft_cuda_mhc_coef_fwd, &c.coef, c.room));
    if (weft_has(&ends->u)) WEFT_TRY(chain_run(call, weft_cuda_mhc_aggregate_fwd, &c.aggregate, c.room));
    if (!ends->wants_v) return WEFT_OK;
    return chain_run(call, weft_cuda_rmsnorm_fwd, &ends->norm, c.room);
}

static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_mhc_pre_fwd_args *a = (const weft_mhc_pre_fwd_args *)args;
    const weft_site_plan site = weft_cuda_site_fwd_plan(call, NULL, a);
    if (site.path == WEFT_SITE_SINGLE_PASS) return weft_cuda_site_fwd(call, &site, NULL, a);
    weft_arena arena = cuda_arena(call);
    const fwd_ends ends = fwd_take_u(&arena, call, a);
    const weft_pre_plan plan = weft_cuda_pre_one_plan(call, a, &ends.u);
    if (plan.path != WEFT_PRE_ONE_LAUNCH) return fwd_by_links(call, &arena, a, &ends);
    void *room =
        ends.wants_v ? weft_arena_take(&arena, chain_bytes(call, weft_cuda_rmsnorm_fwd, &ends.norm)) : NULL;
    WEFT_TRY(weft_check_room(call, weft_arena_bytes(&arena)));
    WEFT_TRY(weft_cuda_pre_one(call, &plan, a, &ends.u));
    return ends.wants_v ? chain_run(call, weft_cuda_rmsnorm_fwd, &ends.norm, room) : WEFT_OK;
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    const weft_mhc_pre_fwd_args *a = (const weft_mhc_pre_fwd_args *)args;
    return single_or_chain_bytes(call, NULL, a, [&] {
        weft_arena arena = cuda_arena(call);
        const fwd_ends ends = fwd_take_u(&arena, call, a);
        /* One launch takes less, but at other addresses it may not be one. */
        if (call->exact && weft_cuda_pre_one_plan(call, a, &ends.u).path == WEFT_PRE_ONE_LAUNCH)
            (void)weft_arena_take(&arena, ends.wants_v ? chain_bytes(call, weft_cuda_rmsnorm_fwd, &ends.norm) : 0);
        else
            fwd_lay_out(&arena, call, a, &ends);
        return weft_arena_bytes(&arena);
    });
}

const char *weft_cuda_mhc_pre_fwd_plan(const weft_call *call, const void *args)
{
    const weft_mhc_pre_fwd_args *a = (const weft_mhc_pre_fwd_args *)args;
    const weft_site_path site = weft_cuda_site_fwd_plan(call, NULL, a).path;
    if (site == WEFT_SITE_SINGLE_PASS) return weft_cuda_site_reason(site);
    weft_arena arena = cuda_arena(call);
    const fwd_ends ends = fwd_take_u(&arena, call, a);
    const weft_pre_path one = weft_cuda_pre_one_plan(call, a, &ends.u).path;
    return one == WEFT_PRE_DTYPE ? weft_cuda_site_reason(site) : weft_cuda_pre_reason(one);
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

static bwd_chain bwd_lay_out(weft_arena *arena, const weft_call *call, const weft_mhc_pre_bwd_args *a)
{
    const int64_t tokens = call->tokens, n = call->streams, channels = call->channels;
    const bool shifted = weft_has(&a->pre_in), has_v = weft_has(&a->d_v), has_du = has_v || weft_has(&a->d_u);
    bwd_chain c = {};
    weft_tensor pre = a->pre_in, du = a->d_u, d_pre = a->d_pre;
    if (has_du && !shifted) {
        pre = weft_dense2(weft_arena_take(arena, (size_t)(tokens * n) * 4), WEFT_F32, tokens, n);
        c.coef.numerics = a->numerics;
        c.coef.h = a->h, c.coef.ms = a->ms, c.coef.alpha = a->alpha, c.coef.beta = a->beta, c.coef.pre = pre;
    }
    if (has_v) {
        const weft_tensor u =
            weft_dense2(weft_arena_take(arena, (size_t)(tokens * channels) * weft_dtype_size(call->dtype)),
                        call->dtype, tokens, channels);
        du = weft_dense2(weft_arena_take(arena, (size_t)(tokens * channels) * 4), WEFT_F32, tokens, channels);
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
            d_pre = weft_dense2(weft_arena_take(arena, (size_t)(tokens * n) * 4), WEFT_F32, tokens, n);
            c.d_aggregate.d_pre.to = d_pre, c.d_aggregate.d_pre.add = weft_has(&a->d_pre);
        }
        c.extra.pre = pre, c.extra.du = du;
    }
    c.d_coef.numerics = a->numerics;
    c.d_coef.h = a->h, c.d_coef.ms = a->ms, c.d_coef.alpha = a->alpha, c.d_coef.beta = a->beta;
    c.d_coef.d_pre = d_pre, c.d_coef.d_post = a->d_post, c.d_coef.d_res = a->d_res;
    c.d_coef.d_h.to =
        weft_dense2(weft_arena_take(arena, (size_t)(tokens * call->rows) * 4), WEFT_F32, tokens, call->rows);
    c.d_coef.d_ms.to = weft_dense1(weft_arena_take(arena, (size_t)tokens * 4), WEFT_F32, tokens);
    c.d_coef.d_alpha = a->d_alpha, c.d_coef.d_beta = a->d_beta;
    c.d_project.x = a->x, c.d_project.phi = a->phi, c.d_project.norm_weight = a->norm_weight;
    c.d_project.d_h = c.d_coef.d_h.to, c.d_project.d_ms = c.d_coef.d_ms.to;
    c.d_project.d_x = a->d_x, c.d_project.d_phi = a->d_phi, c.d_project.d_norm_weight = a->d_norm_weight;

    size_t most = weft_cuda_project_bwd_bytes(call, &c.d_project);
    most = larger(most, chain_bytes(call, weft_cuda_mhc_coef_bwd, &c.d_coef));
    if (has_v) most = larger(most, chain_bytes(call, weft_cuda_rmsnorm_bwd, &c.norm));
    if (has_du) most = larger(most, chain_bytes(call, weft_cuda_mhc_aggregate_bwd, &c.d_aggregate));
    c.room = weft_arena_take(arena, most);
    return c;
}

weft_status weft_cuda_pre_bwd(const weft_call *call, const weft_mhc_pre_bwd_args *a, const weft_tensor *base)
{
    weft_arena arena = cuda_arena(call);
    bwd_chain c = bwd_lay_out(&arena, call, a);
    const weft_tensor none = {};
    if (weft_has(&c.coef.pre)) WEFT_TRY(chain_run(call, weft_cuda_mhc_coef_fwd, &c.coef, c.room));
    if (weft_has(&a->d_v)) {
        WEFT_TRY(chain_run(call, weft_cuda_mhc_aggregate_fwd, &c.aggregate, c.room));
        if (c.norm.d_u.add) WEFT_TRY(weft_cuda_convert(call, &a->d_u, &c.norm.d_u.to));
        WEFT_TRY(chain_run(call, weft_cuda_rmsnorm_bwd, &c.norm, c.room));
    }
    if (weft_has(&c.d_aggregate.d_u)) {
        const bool own = !weft_has(&a->pre_in);
        if (own && weft_has(&a->d_pre)) WEFT_TRY(weft_cuda_convert(call, &a->d_pre, &c.d_aggregate.d_pre.to));
        if (weft_has(&c.d_aggregate.d_pre.to))
            WEFT_TRY(chain_run(call, weft_cuda_mhc_aggregate_bwd, &c.d_aggregate, c.room));
    } else if (weft_has(&a->d_pre_in.to) && !a->d_pre_in.add) {
        WEFT_TRY(weft_cuda_convert(call, &none, &a->d_pre_in.to));
    }
    WEFT_TRY(chain_run(call, weft_cuda_mhc_coef_bwd, &c.d_coef, c.room));
    if (base) c.extra.base = *base;
    weft_exec exec = *call->exec;
    weft_call link = *call;
    exec.workspace = c.room;
    link.exec = &exec;
    return weft_cuda_project_bwd(&link, &c.d_project, &c.extra);
}

size_t weft_cuda_pre_bwd_bytes(const weft_call *call, const weft_mhc_pre_bwd_args *a)
{
    weft_call query = *call;
    query.query = true;
    weft_arena arena = cuda_arena(&query);
    bwd_lay_out(&arena, &query, a);
    return weft_arena_bytes(&arena);
}

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_mhc_pre_bwd_args *a = (const weft_mhc_pre_bwd_args *)args;
    const weft_mhc_boundary_bwd_args single = weft_pre_as_boundary(a);
    return weft_cuda_boundary_bwd_path(call, &single) == BOUNDARY_BWD_FUSED ? weft_cuda_boundary_bwd(call, &single)
                                                                            : weft_cuda_pre_bwd(call, a, NULL);
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    const weft_mhc_pre_bwd_args *a = (const weft_mhc_pre_bwd_args *)args;
    const weft_mhc_boundary_bwd_args single = weft_pre_as_boundary(a);
    return weft_cuda_boundary_bwd_path(call, &single) == BOUNDARY_BWD_FUSED
               ? weft_cuda_boundary_bwd_bytes(call, &single)
               : weft_cuda_pre_bwd_bytes(call, a);
}

const char *weft_cuda_mhc_pre_bwd_plan(const weft_call *call, const void *args)
{
    const weft_mhc_boundary_bwd_args single = weft_pre_as_boundary((const weft_mhc_pre_bwd_args *)args);
    return weft_boundary_bwd_path_text(weft_cuda_boundary_bwd_path(call, &single));
}

const weft_kernel weft_cuda_mhc_pre_fwd[] = {{WEFT_NONE, 0, fwd, fwd_workspace}, {}};
const weft_kernel weft_cuda_mhc_pre_bwd[] = {{WEFT_NONE, 0, bwd, bwd_workspace}, {}};
