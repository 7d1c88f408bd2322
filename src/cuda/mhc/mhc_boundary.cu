/* SPDX-License-Identifier: Apache-2.0
 *
 * Post of one sub-layer and pre of the next [M11]. Forward is a single pass where the plan allows it (site/fwd.cuh), and
 * backward ends with one (site/bwd.cu); otherwise both are chains of launches. As a chain, backward keeps the whole
 * gradient of y in an fp32 stream tensor in the workspace, and y itself where the caller dropped it. */
#include "core/mhc_parts.h"
#include "cuda/common/chain.h"
#include "cuda/common/launch.cuh"
#include "cuda/mhc/mhc_pre.h"
#include "cuda/mhc/mhc_project.cuh"
#include "cuda/site/bwd.h"
#include "cuda/site/fused_or_chain.h"

/* ---- forward ------------------------------------------------------------------------------------------------------------ */

/* The links run one after the other and share. */
static size_t fwd_chain_bytes(const weft_call *call, const weft_mhc_post_fwd_args *post,
                              const weft_mhc_pre_fwd_args *pre)
{
    return larger(chain_bytes(call, weft_cuda_mhc_post_fwd, post), chain_bytes(call, weft_cuda_mhc_pre_fwd, pre));
}

static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_mhc_boundary_fwd_args *a = (const weft_mhc_boundary_fwd_args *)args;
    const weft_mhc_post_fwd_args post = weft_boundary_post_fwd(a);
    const weft_mhc_pre_fwd_args pre = weft_boundary_pre_fwd(a);
    const weft_site_plan site = weft_cuda_site_fwd_plan(call, &post, &pre);
    if (site.path == WEFT_SITE_SINGLE_PASS) return weft_cuda_site_fwd(call, &site, &post, &pre);
    WEFT_TRY(weft_check_room(call, fwd_chain_bytes(call, &post, &pre)));
    WEFT_TRY(chain_run(call, weft_cuda_mhc_post_fwd, &post, call->exec->workspace));
    return chain_run(call, weft_cuda_mhc_pre_fwd, &pre, call->exec->workspace);
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    const weft_mhc_boundary_fwd_args *a = (const weft_mhc_boundary_fwd_args *)args;
    const weft_mhc_post_fwd_args post = weft_boundary_post_fwd(a);
    const weft_mhc_pre_fwd_args pre = weft_boundary_pre_fwd(a);
    return single_or_chain_bytes(call, &post, &pre, [&] { return fwd_chain_bytes(call, &post, &pre); });
}

const char *weft_cuda_mhc_boundary_fwd_plan(const weft_call *call, const void *args)
{
    const weft_mhc_boundary_fwd_args *a = (const weft_mhc_boundary_fwd_args *)args;
    const weft_mhc_post_fwd_args post = weft_boundary_post_fwd(a);
    const weft_mhc_pre_fwd_args pre = weft_boundary_pre_fwd(a);
    return weft_cuda_site_reason(weft_cuda_site_fwd_plan(call, &post, &pre).path);
}

/* ---- backward, as a chain ------------------------------------------------------------------------------------------------ */

struct bwd_chain {
    weft_mhc_post_fwd_args rebuild; /* y absent: not needed */
    weft_mhc_pre_bwd_args pre;
    weft_mhc_post_bwd_args post;
    void *room;
};

static bwd_chain bwd_lay_out(weft_arena *arena, const weft_call *call, const weft_mhc_boundary_bwd_args *a)
{
    const int64_t tokens = call->tokens, n = call->streams, channels = call->channels, all = tokens * n * channels;
    /* The layout of x: what the kernels like for x they like for these. */
    const bool swapped = row_order(&a->x) == LAYOUT_CN;
    auto streams = [&](weft_dtype dtype) {
        void *data = weft_arena_take(arena, (size_t)all * weft_dtype_size(dtype));
        return swapped ? weft_dense3_swapped(data, dtype, tokens, n, channels)
                       : weft_dense3(data, dtype, tokens, n, channels);
    };
    bwd_chain c = {};
    c.pre = weft_boundary_pre_bwd(a);
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
    c.room = weft_arena_take(arena, larger(most, weft_cuda_pre_bwd_bytes(call, &c.pre)));
    return c;
}

static weft_status bwd_by_links(const weft_call *call, const weft_mhc_boundary_bwd_args *a)
{
    weft_arena arena = cuda_arena(call);
    const bwd_chain c = bwd_lay_out(&arena, call, a);
    weft_exec exec = *call->exec;
    weft_call link = *call;
    exec.workspace = c.room;
    link.exec = &exec;
    if (weft_has(&c.rebuild.y)) WEFT_TRY(chain_run(call, weft_cuda_mhc_post_fwd, &c.rebuild, c.room));
    WEFT_TRY(weft_cuda_pre_bwd(&link, &c.pre, weft_has(&c.pre.d_x.to) ? &a->d_y : NULL));
    if (!weft_has(&c.post.d_y)) return WEFT_OK;
    return chain_run(call, weft_cuda_mhc_post_bwd, &c.post, c.room);
}

static size_t bwd_links_bytes(const weft_call *call, const weft_mhc_boundary_bwd_args *a)
{
    weft_arena arena = weft_arena_open(NULL);
    bwd_lay_out(&arena, call, a);
    return weft_arena_bytes(&arena);
}

/* ---- backward -------------------------------------------------------------------------------------------------------------- */

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_mhc_boundary_bwd_args *a = (const weft_mhc_boundary_bwd_args *)args;
    return weft_cuda_boundary_bwd_path(call, a) == BOUNDARY_BWD_FUSED ? weft_cuda_boundary_bwd(call, a)
                                                                      : bwd_by_links(call, a);
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    const weft_mhc_boundary_bwd_args *a = (const weft_mhc_boundary_bwd_args *)args;
    return weft_cuda_boundary_bwd_path(call, a) == BOUNDARY_BWD_FUSED ? weft_cuda_boundary_bwd_bytes(call, a)
                                                                      : bwd_links_bytes(call, a);
}

const char *weft_cuda_mhc_boundary_bwd_plan(const weft_call *call, const void *args)
{
    const weft_mhc_boundary_bwd_args *a = (const weft_mhc_boundary_bwd_args *)args;
    return weft_boundary_bwd_path_text(weft_cuda_boundary_bwd_path(call, a));
}

const weft_kernel weft_cuda_mhc_boundary_fwd[] = {{WEFT_NONE, 0, fwd, fwd_workspace}, {}};
const weft_kernel weft_cuda_mhc_boundary_bwd[] = {{WEFT_NONE, 0, bwd, bwd_workspace}, {}};
