/* SPDX-License-Identifier: Apache-2.0
 *
 * Post of one sub-layer and pre of the next [M11]: fused where the call allows it (site/fwd.cu, site/bwd.cu), otherwise a chain
 * of the unfused kernels. As a chain, backward keeps the whole gradient of y in an fp32 stream tensor in the workspace, and y
 * itself where the caller dropped it. */
#include "core/mhc_parts.h"
#include "cuda/common/chain.h"
#include "cuda/common/launch.cuh"
#include "cuda/mhc/mhc_pre.h"
#include "cuda/mhc/mhc_project.cuh"
#include "cuda/site/bwd.h"
#include "cuda/site/fused_or_unfused.h"

/* ---- forward ------------------------------------------------------------------------------------------------------------ */

struct fwd_plan {
    weft_mhc_post_fwd_args post;
    weft_mhc_pre_fwd_args pre;
    weft_site_plan site;
};

static weft_status fwd_fused(const weft_call *call, const void *, const weft_prepared *prepared)
{
    const fwd_plan *p = plan_of<fwd_plan>(prepared);
    return weft_cuda_site_fwd(call, &p->site, &p->post, &p->pre);
}

static weft_status fwd_unfused(const weft_call *call, const void *, const weft_prepared *prepared)
{
    const fwd_plan *p = plan_of<fwd_plan>(prepared);
    WEFT_TRY(chain_run(call, weft_cuda_mhc_post_fwd, &p->post, call->exec->workspace));
    return chain_run(call, weft_cuda_mhc_pre_fwd, &p->pre, call->exec->workspace);
}

static void prepare_fwd(const weft_call *call, const void *args, weft_prepared *prepared)
{
    const weft_mhc_boundary_fwd_args *a = (const weft_mhc_boundary_fwd_args *)args;
    fwd_plan *p =
        new (plan_room<fwd_plan>(prepared)) fwd_plan{weft_boundary_post_fwd(a), weft_boundary_pre_fwd(a), {}};
    p->site = weft_cuda_site_fwd_plan(call, &p->post, &p->pre);
    prepared->path = weft_cuda_site_path_text(p->site.path);
    prepared->run = p->site.path == WEFT_SITE_FUSED ? fwd_fused : fwd_unfused;
    /* The links run one after the other and share. */
    prepared->workspace = fused_or_unfused_bytes(call, &p->site, &p->pre, [&] {
        return larger(chain_bytes(call, weft_cuda_mhc_post_fwd, &p->post),
                      chain_bytes(call, weft_cuda_mhc_pre_fwd, &p->pre));
    });
}

/* ---- backward ------------------------------------------------------------------------------------------------------------- */

struct bwd_chain {
    weft_mhc_post_fwd_args rebuild; /* y absent: not needed */
    weft_mhc_pre_bwd_args pre;
    weft_mhc_post_bwd_args post;
    void *room;
};

/* Returns the workspace that the chain needs. */
static size_t bwd_lay_out(bwd_chain *chain, const weft_call *call, const weft_mhc_boundary_bwd_args *a)
{
    weft_arena arena = cuda_arena(call);
    const int64_t tokens = call->tokens, n = call->streams, channels = call->channels, all = tokens * n * channels;
    /* The layout of x: what the kernels like for x they like for these. */
    const bool swapped = row_order(&a->x) == LAYOUT_CN;
    auto streams = [&](weft_dtype dtype) {
        void *data = weft_arena_take(&arena, (size_t)all * weft_dtype_size(dtype));
        return swapped ? weft_dense3_swapped(data, dtype, tokens, n, channels)
                       : weft_dense3(data, dtype, tokens, n, channels);
    };
    bwd_chain &c = *new (chain) bwd_chain{{}, weft_boundary_pre_bwd(a), {}, NULL};
    size_t most = 0;
    if (!weft_has(&a->y)) {
        c.rebuild = weft_boundary_rebuild(a);
        c.rebuild.y = c.pre.x = streams(call->dtype);
        most = chain_bytes(call, weft_cuda_mhc_post_fwd, &c.rebuild);
    }
    if (weft_boundary_wants_post(a)) {
        c.post = weft_boundary_post_bwd(a);
        c.post.d_y = c.pre.d_x.to = streams(WEFT_F32);
        most = larger(most, chain_bytes(call, weft_cuda_mhc_post_bwd, &c.post));
    }
    c.room = weft_arena_take(&arena, larger(most, weft_cuda_pre_bwd_unfused_bytes(call, &c.pre)));
    return weft_arena_bytes(&arena);
}

static weft_status bwd_fused(const weft_call *call, const void *args, const weft_prepared *)
{
    return weft_cuda_boundary_bwd(call, (const weft_mhc_boundary_bwd_args *)args);
}

static weft_status bwd_unfused(const weft_call *call, const void *args, const weft_prepared *prepared)
{
    const weft_mhc_boundary_bwd_args *a = (const weft_mhc_boundary_bwd_args *)args;
    const bwd_chain *c = plan_of<bwd_chain>(prepared);
    weft_exec exec = *call->exec;
    weft_call link = *call;
    exec.workspace = c->room;
    link.exec = &exec;
    if (weft_has(&c->rebuild.y)) WEFT_TRY(chain_run(call, weft_cuda_mhc_post_fwd, &c->rebuild, c->room));
    WEFT_TRY(weft_cuda_pre_bwd_unfused(&link, &c->pre, weft_has(&c->pre.d_x.to) ? &a->d_y : NULL));
    if (!weft_has(&c->post.d_y)) return WEFT_OK;
    return chain_run(call, weft_cuda_mhc_post_bwd, &c->post, c->room);
}

static void prepare_bwd(const weft_call *call, const void *args, weft_prepared *prepared)
{
    const weft_mhc_boundary_bwd_args *a = (const weft_mhc_boundary_bwd_args *)args;
    const boundary_bwd_path path = weft_cuda_boundary_bwd_path(call, a);
    const bool fused = path == BOUNDARY_BWD_FUSED;
    prepared->path = weft_boundary_bwd_path_text(path);
    prepared->run = fused ? bwd_fused : bwd_unfused;
    prepared->workspace = fused ? weft_cuda_boundary_bwd_bytes(call, a)
                                : bwd_lay_out((bwd_chain *)plan_room<bwd_chain>(prepared), call, a);
}

const weft_kernel weft_cuda_mhc_boundary_fwd[] = {{.prepare = prepare_fwd}, {}};
const weft_kernel weft_cuda_mhc_boundary_bwd[] = {{.prepare = prepare_bwd}, {}};
