/* SPDX-License-Identifier: Apache-2.0
 *
 * boundary's fused backward [M11]: who runs when. pre's and the head's are the same
 * without a post, the head's also without the rows and gates of post and res.
 *
 *     records        gates and Sinkhorn, without what waits for the next launch                  site/bwd_gates.cu
 *     d_pre, r, k    sums over the whole token, where something waits for them, into records     site/bwd_sums.cu
 *     the rest       one pass,                                                                   site/bwd_pass.cu
 *                    and sums of partial sums                                                    site/bwd_fold.cu
 *
 * In the shifted form without a norm nothing has to be known of y, and the second is left out. The first is an ordinary
 * launch, so nothing of an earlier call is left; each of the others may begin while the one before it drains. */
#include "cuda/site/bwd.h"

#include "core/status.h"
#include "cuda/common/tma.cuh"
#include "cuda/mhc/mhc_coef_plan.h"
#include "cuda/site/bwd.cuh"

static site_kind kind_of(const weft_call *call, const weft_mhc_boundary_bwd_args *a)
{
    if (weft_has(&a->x)) return SITE_BOUNDARY;
    return call->rows == call->streams ? SITE_HEAD : SITE_PRE;
}

/* The layout of the streams; the others must share it. */
static stream_layout layout_of(const weft_mhc_boundary_bwd_args *a)
{
    const weft_tensor *streams = weft_has(&a->x) ? &a->x : &a->y;
    return streams->stride[1] == 1 ? LAYOUT_CN : LAYOUT_NC;
}

/* ---- path ------------------------------------------------------------------------------------------------------------------- */

boundary_bwd_path weft_cuda_boundary_bwd_path(const weft_call *call, const weft_mhc_boundary_bwd_args *a)
{
    /* Without a post the streams are y, which otherwise need not be there. */
    const weft_tensor *activations[] = {weft_has(&a->x) ? &a->x : &a->y, &a->f, &a->d_y, &a->d_u, &a->d_v},
                      *others[] = {&a->bias, &a->sub_weight};
    const stream_layout layout = layout_of(a);
    boundary_bwd_facts f = {
        .tokens = call->tokens,
        .streams = call->streams,
        .channels = call->channels,
        .is_16_bit = call->dtype == WEFT_BF16 || call->dtype == WEFT_F16,
        .rows_are_wide = true,
        .gates_on_chip =
            kind_of(call, a) == SITE_HEAD || call->scales == 2 ||
            weft_cuda_coef_plan_bwd(call->tokens, call->streams, &a->numerics, most_shared(call)).in_registers,
        .capability = weft_cuda_code(call->exec->device),
        .shared = (int64_t)most_shared(call)};
    for (const weft_tensor *t : activations) {
        f.is_16_bit = f.is_16_bit && (!weft_has(t) || t->dtype == call->dtype);
        f.rows_are_wide = f.rows_are_wide && (t->ndim == 3 ? streams_fit_tma(t, layout) : tma_fits(t));
    }
    for (const weft_tensor *t : others) f.rows_are_wide = f.rows_are_wide && tma_fits(t);
    return weft_boundary_bwd_path(&f);
}

/* ---- layout ----------------------------------------------------------------------------------------------------------------- */

static boundary_work lay_out(weft_arena *arena, const weft_call *call, const weft_mhc_boundary_bwd_args *a)
{
    const int64_t n = call->streams, columns = n * call->channels;
    const bool shifted = weft_has(&a->pre_in), normed = weft_has(&a->d_v), has_du = normed || weft_has(&a->d_u);
    auto floats = [&](int64_t count) { return (float *)weft_arena_take(arena, (size_t)count * 4); };
    boundary_work w = {};
    w.a = a, w.kind = kind_of(call, a);
    w.plan = weft_boundary_bwd_plan(call->tokens, call->channels);
    const int64_t padded = w.plan.tiles * BOUNDARY_TILE, pieces = boundary_pieces(&w.plan);
    w.layout = layout_of(a);
    w.stored = weft_has(&a->y) && streams_fit_tma(&a->y, w.layout);
    /* In (C,n) all streams of a channel are one access. */
    w.phi_is_psi = weft_project_phi_is_psi(&a->phi, &a->norm_weight, w.layout) &&
                   (w.layout == LAYOUT_NC || (a->phi.stride[0] % n == 0 && aligned_to(&a->phi, n)));
    w.late_pre = has_du && !shifted;
    w.waits = normed || w.late_pre;
    w.records = (uint4 *)weft_arena_take(
        arena, (size_t)(padded * weft_boundary_bwd_ring(n, w.kind).record_bytes / BOUNDARY_TILE));
    w.psi = floats(call->rows * columns);
    if (weft_has(&a->d_phi.to) || weft_has(&a->d_norm_weight.to))
        w.dpsi = floats(pieces * site_psi_rows(n, w.kind) * n * BOUNDARY_SLICE);
    const bool may_have_pre = weft_has(&a->d_pre_in.to) || w.kind != SITE_HEAD;
    if (weft_has(&a->d_post.to) || weft_has(&a->d_res.to) || weft_has(&a->d_pre_in.to))
        w.sums = floats(w.plan.slices * padded * weft_boundary_bwd_sums(n, weft_has(&a->x), may_have_pre));
    if (weft_has(&a->d_bias.to)) w.d_bias = floats(pieces * BOUNDARY_SLICE);
    if (weft_has(&a->d_sub_weight.to)) w.d_weight = floats(pieces * BOUNDARY_SLICE);
    if (weft_has(&a->d_alpha.to) || weft_has(&a->d_beta.to)) {
        int64_t chunks;
        weft_cuda_coef_cut(call->tokens, &chunks, &w.gate_slots);
        if (w.kind != SITE_HEAD) w.gates = floats((site_psi_rows(n, w.kind) + 3) * w.gate_slots);
        if (w.late_pre) w.late = floats((n + 1) * padded);
    }
    return w;
}

size_t weft_cuda_boundary_bwd_bytes(const weft_call *call, const weft_mhc_boundary_bwd_args *a)
{
    weft_arena arena = weft_arena_open(NULL);
    lay_out(&arena, call, a);
    return weft_arena_bytes(&arena);
}

/* ---- the call ----------------------------------------------------------------------------------------------------------------- */

weft_status weft_cuda_boundary_bwd(const weft_call *call, const weft_mhc_boundary_bwd_args *a)
{
    weft_arena arena = cuda_arena(call);
    boundary_work w = lay_out(&arena, call, a);
    w.full = weft_cuda_boundary_bwd_is_full(call, &w);
    w.pre_sums = weft_has(&a->d_pre_in.to) || (w.full && w.kind != SITE_HEAD);
    if (!w.phi_is_psi)
        WEFT_TRY(weft_cuda_project_spread(call, &a->phi, &a->norm_weight, columns_of(call, w.layout), w.psi));
    WEFT_TRY(weft_cuda_boundary_bwd_gates(call, &w));
    if (w.waits) WEFT_TRY(weft_cuda_boundary_bwd_sums(call, &w));
    WEFT_TRY(weft_cuda_boundary_bwd_pass(call, &w));
    return weft_cuda_boundary_bwd_fold(call, &w);
}
