/* SPDX-License-Identifier: Apache-2.0
 *
 * Learned head contraction [M9]: fused where the call allows it (site/fwd.cu; backward as boundary's, site/bwd.cu), otherwise a
 * chain of the unfused kernels: projection to n rows, gates, aggregate. */
#include "cuda/common/chain.h"
#include "cuda/mhc/head_gates.h"
#include "cuda/mhc/mhc_project.cuh"
#include "cuda/site/bwd.h"
#include "cuda/site/fused_or_unfused.h"

/* The projection of the head has n rows. */
static weft_call with_rows(const weft_call *call)
{
    weft_call c = *call;
    c.rows = call->streams;
    return c;
}

static weft_tensor take2(weft_arena *arena, int64_t tokens, int64_t width)
{
    return weft_dense2(weft_arena_take(arena, (size_t)(tokens * width) * 4), WEFT_F32, tokens, width);
}

/* ---- forward ------------------------------------------------------------------------------------------------------------ */

struct fwd_chain {
    weft_mhc_project_fwd_args project;
    weft_mhc_aggregate_fwd_args aggregate;
    void *room;
};

/* Returns the workspace that the chain needs. */
static size_t fwd_lay_out(fwd_chain *chain, const weft_call *call, const weft_mhc_head_fwd_args *a)
{
    const weft_call inner = with_rows(call);
    weft_arena arena = cuda_arena(call);
    fwd_chain &c = *new (chain) fwd_chain{};
    c.project.x = a->x, c.project.phi = a->phi, c.project.norm_weight = a->norm_weight;
    c.project.h = weft_has(&a->h) ? a->h : take2(&arena, call->tokens, call->streams);
    c.project.ms = a->ms;
    if (!weft_has(&a->ms))
        c.project.ms = weft_dense1(weft_arena_take(&arena, (size_t)call->tokens * 4), WEFT_F32, call->tokens);
    c.aggregate.x = a->x, c.aggregate.pre = take2(&arena, call->tokens, call->streams), c.aggregate.u = a->u;
    c.room = weft_arena_take(&arena, larger(chain_bytes(&inner, weft_cuda_mhc_project_fwd, &c.project),
                                            chain_bytes(call, weft_cuda_mhc_aggregate_fwd, &c.aggregate)));
    return weft_arena_bytes(&arena);
}

/* A pre whose coefficients are only those of the aggregate. */
static weft_mhc_pre_fwd_args as_pre(const weft_mhc_head_fwd_args *a)
{
    weft_mhc_pre_fwd_args p = {};
    p.numerics.rms_eps = a->rms_eps, p.numerics.rms_eps_kind = a->rms_eps_kind, p.numerics.pre_eps = a->pre_eps;
    p.x = a->x, p.phi = a->phi, p.norm_weight = a->norm_weight, p.alpha = a->alpha, p.beta = a->beta;
    p.h = a->h, p.ms = a->ms, p.u = a->u;
    return p;
}

struct fwd_plan {
    weft_mhc_pre_fwd_args pre;
    weft_site_plan site;
    fwd_chain chain; /* of the unfused path */
};

static weft_status fwd_fused(const weft_call *call, const void *, const weft_prepared *prepared)
{
    const fwd_plan *p = plan_of<fwd_plan>(prepared);
    return weft_cuda_site_fwd(call, &p->site, NULL, &p->pre);
}

static weft_status fwd_unfused(const weft_call *call, const void *args, const weft_prepared *prepared)
{
    const weft_mhc_head_fwd_args *a = (const weft_mhc_head_fwd_args *)args;
    const weft_call inner = with_rows(call);
    const fwd_chain *c = &plan_of<fwd_plan>(prepared)->chain;
    WEFT_TRY(chain_run(&inner, weft_cuda_mhc_project_fwd, &c->project, c->room));
    WEFT_TRY(weft_cuda_head_gates_fwd(call, a, &c->project.h, &c->project.ms, &c->aggregate.pre));
    return chain_run(call, weft_cuda_mhc_aggregate_fwd, &c->aggregate, c->room);
}

static void prepare_fwd(const weft_call *call, const void *args, weft_prepared *prepared)
{
    const weft_mhc_head_fwd_args *a = (const weft_mhc_head_fwd_args *)args;
    fwd_plan *p = (fwd_plan *)plan_room<fwd_plan>(prepared);
    new (&p->pre) weft_mhc_pre_fwd_args(as_pre(a));
    p->site = weft_cuda_site_fwd_plan(call, NULL, &p->pre);
    prepared->path = weft_cuda_site_path_text(p->site.path);
    prepared->run = p->site.path == WEFT_SITE_FUSED ? fwd_fused : fwd_unfused;
    prepared->workspace =
        fused_or_unfused_bytes(call, &p->site, &p->pre, [&] { return fwd_lay_out(&p->chain, call, a); });
}

/* ---- backward ------------------------------------------------------------------------------------------------------------ */

struct bwd_chain {
    weft_mhc_aggregate_bwd_args aggregate;
    weft_mhc_project_bwd_args project;
    weft_tensor gate;
    void *room;
};

/* Returns the workspace that the chain needs. */
static size_t bwd_lay_out(bwd_chain *chain, const weft_call *call, const weft_mhc_head_bwd_args *a)
{
    const weft_call inner = with_rows(call);
    weft_arena arena = cuda_arena(call);
    bwd_chain &c = *new (chain) bwd_chain{};
    c.gate = take2(&arena, call->tokens, call->streams);
    c.aggregate.x = a->x, c.aggregate.pre = c.gate, c.aggregate.d_u = a->d_u;
    c.aggregate.d_pre.to = take2(&arena, call->tokens, call->streams);
    c.project.x = a->x, c.project.phi = a->phi, c.project.norm_weight = a->norm_weight;
    c.project.d_h = take2(&arena, call->tokens, call->streams);
    c.project.d_ms = weft_dense1(weft_arena_take(&arena, (size_t)call->tokens * 4), WEFT_F32, call->tokens);
    c.project.d_x = a->d_x, c.project.d_phi = a->d_phi, c.project.d_norm_weight = a->d_norm_weight;
    size_t most = larger(weft_cuda_project_bwd_bytes(&inner, &c.project),
                         chain_bytes(call, weft_cuda_mhc_aggregate_bwd, &c.aggregate));
    c.room = weft_arena_take(&arena, larger(most, weft_cuda_head_gates_room(call, a)));
    return weft_arena_bytes(&arena);
}

/* A boundary without x and f, whose y is the streams. */
static weft_mhc_boundary_bwd_args as_boundary(const weft_mhc_head_bwd_args *a)
{
    weft_mhc_boundary_bwd_args b = {};
    b.numerics.rms_eps = a->rms_eps, b.numerics.rms_eps_kind = a->rms_eps_kind, b.numerics.pre_eps = a->pre_eps;
    b.y = a->x, b.phi = a->phi, b.norm_weight = a->norm_weight, b.alpha = a->alpha, b.beta = a->beta;
    b.h = a->h, b.ms = a->ms, b.d_u = a->d_u;
    b.d_x = a->d_x, b.d_phi = a->d_phi, b.d_norm_weight = a->d_norm_weight, b.d_alpha = a->d_alpha,
    b.d_beta = a->d_beta;
    return b;
}

/* The head as a boundary, where backward is fused. */
struct bwd_plan {
    weft_mhc_boundary_bwd_args boundary;
};

static weft_status bwd_fused(const weft_call *call, const void *, const weft_prepared *prepared)
{
    const weft_call inner = with_rows(call);
    return weft_cuda_boundary_bwd(&inner, &plan_of<bwd_plan>(prepared)->boundary);
}

static weft_status bwd_unfused(const weft_call *call, const void *args, const weft_prepared *prepared)
{
    const weft_mhc_head_bwd_args *a = (const weft_mhc_head_bwd_args *)args;
    const bwd_chain *c = plan_of<bwd_chain>(prepared);
    weft_exec exec = *call->exec;
    weft_call inner = with_rows(call);
    exec.workspace = c->room;
    inner.exec = &exec;
    /* d_gate needs x and d_u only; the gates themselves come with the next link. */
    WEFT_TRY(chain_run(call, weft_cuda_mhc_aggregate_bwd, &c->aggregate, c->room));
    WEFT_TRY(weft_cuda_head_gates_bwd(call, a, &c->aggregate.d_pre.to, &c->gate, &c->project.d_h, &c->project.d_ms,
                                      c->room));
    project_extra extra = {};
    extra.pre = c->gate, extra.du = a->d_u;
    return weft_cuda_project_bwd(&inner, &c->project, &extra);
}

static void prepare_bwd(const weft_call *call, const void *args, weft_prepared *prepared)
{
    const weft_mhc_head_bwd_args *a = (const weft_mhc_head_bwd_args *)args;
    const bwd_plan *p = new (plan_room<bwd_plan>(prepared)) bwd_plan{as_boundary(a)};
    const weft_call inner = with_rows(call);
    const boundary_bwd_path path = weft_cuda_boundary_bwd_path(&inner, &p->boundary);
    const bool fused = path == BOUNDARY_BWD_FUSED;
    prepared->path = weft_boundary_bwd_path_text(path);
    prepared->run = fused ? bwd_fused : bwd_unfused;
    prepared->workspace = fused ? weft_cuda_boundary_bwd_bytes(&inner, &p->boundary)
                                : bwd_lay_out((bwd_chain *)plan_room<bwd_chain>(prepared), call, a);
}

const weft_kernel weft_cuda_mhc_head_fwd[] = {{.prepare = prepare_fwd}, {}};
const weft_kernel weft_cuda_mhc_head_bwd[] = {{.prepare = prepare_bwd}, {}};
