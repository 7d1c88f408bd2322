/* SPDX-License-Identifier: Apache-2.0
 *
 * A site of mHC in one launch: from arguments to the kernel of single_pass.cuh. */
#include "cuda/single_pass.cuh"

#include "cuda/single_pass.h"

/* ---- does it fit? ------------------------------------------------------------------------------------------------------- */

/* Streams in rows of channels that are read 16 bytes at a time. */
static bool streams_are_rows(const weft_tensor *t)
{
    return streams_fit(t, LAYOUT_NC, 8) && t->stride[1] >= t->shape[2];
}

static bool is_f32(const weft_tensor *t)
{
    return !weft_has(t) || t->dtype == WEFT_F32;
}

/* Lines of coefficients, the last dimension, that can be read in one go. */
static bool is_wide(const weft_tensor *t)
{
    const int last = t->ndim - 1;
    const int64_t n = t->shape[last];
    for (int i = 0; i < last; i++)
        if (t->stride[i] % n) return false;
    return t->dtype == WEFT_F32 && t->stride[last] == 1 && (uintptr_t)t->data % (uintptr_t)(n * 4) == 0;
}

static bool lies_well(const weft_mhc_post_fwd_args *post, const weft_mhc_pre_fwd_args *pre)
{
    if (post && !(streams_are_rows(&post->x) && row_fits(&post->f, 8) && vector_fits(&post->bias, 8) &&
                  (post->x.stride[0] == post->y.stride[0] || post->x.shape[0] == 1)))
        return false;
    /* Later links of the chain would read h and ms as they were stored. */
    return streams_are_rows(&pre->x) && row_fits(&pre->u, 8) && row_fits(&pre->v, 8) &&
           vector_fits(&pre->sub_weight, 8) && is_f32(&pre->h) && is_f32(&pre->ms);
}

static weft_site_device device_of(const weft_call *call)
{
    return {(size_t)call->device_shared, call->device_sms};
}

weft_site_plan weft_cuda_site_fwd_plan(const weft_call *call, const weft_mhc_post_fwd_args *post,
                                       const weft_mhc_pre_fwd_args *pre)
{
    return weft_cuda_site_plan(call->tokens, call->streams, call->channels, call->dtype, lies_well(post, pre),
                               device_of(call), call->sms);
}

struct site_memory {
    float *ring;
    uint32_t *counters;
};

static site_memory lay_out(weft_arena *arena, const weft_site_plan *plan)
{
    site_memory m = {};
    m.ring = (float *)weft_arena_take(arena, plan->ring_floats * 4);
    m.counters = (uint32_t *)weft_arena_take(arena, plan->counters * 4);
    return m;
}

size_t weft_cuda_site_fwd_bytes(const weft_call *call)
{
    const weft_site_plan plan = weft_cuda_site_plan(call->tokens, call->streams, call->channels, call->dtype, true,
                                                    device_of(call), call->sms);
    weft_arena arena = weft_arena_open(NULL);
    if (plan.path != WEFT_SITE_SINGLE_PASS) return 0;
    lay_out(&arena, &plan);
    return weft_arena_bytes(&arena);
}

/* ---- launch ------------------------------------------------------------------------------------------------------------- */

template <int N, bool HEAD, bool POST, post_mode MODE>
static weft_status run_mode(const weft_call *call, site_args p)
{
    typedef site_room<N, HEAD, POST> room;
    const int64_t bytes = sizeof(bf16), step = (int64_t)p.groups * SITE_TILE * bytes;
    p.x_step = step * p.x_token, p.f_step = step * p.f_token, p.f_ahead = room::stages * p.f_step;
    for (int i = 0; i < N; i++) {
        p.x_ahead[i] = room::stages * p.x_step + i * p.x_stream * bytes;
        p.y_at[i] = (const char *)p.y - (const char *)p.x + i * p.y_stream * bytes;
    }
    return launch(call, "site", site_kernel<N, HEAD, POST, MODE>,
                  {.grid = (unsigned)(p.groups * p.slices),
                   .block = SITE_WARPS * 32,
                   .shared = room::bytes,
                   .together = true},
                  p);
}

template <int N>
static weft_status run(const weft_call *call, const site_args &p, const weft_mhc_post_fwd_args *post)
{
    if (call->op == WEFT_OP_mhc_head_fwd) return run_mode<N, true, false, PLAIN>(call, p);
    if (!post) return run_mode<N, false, false, PLAIN>(call, p);
    switch (post_mode_of(&post->bias, &post->dropout)) {
    case PLAIN: return run_mode<N, false, true, PLAIN>(call, p);
    case BIASED: return run_mode<N, false, true, BIASED>(call, p);
    default: return run_mode<N, false, true, FULL>(call, p);
    }
}

weft_status weft_cuda_site_fwd(const weft_call *call, const weft_site_plan *plan,
                               const weft_mhc_post_fwd_args *post, const weft_mhc_pre_fwd_args *pre)
{
    weft_arena arena = cuda_arena(call);
    const site_memory memory = lay_out(&arena, plan);
    const weft_tensor *x = post ? &post->x : &pre->x;
    const bool head = call->op == WEFT_OP_mhc_head_fwd;
    site_args p = {
        .x = (const bf16 *)x->data,
        .x_token = x->stride[0],
        .x_stream = x->stride[1],
        .w = {view_of(&pre->phi), view_of(&pre->norm_weight), (int32_t)(head ? call->streams : call->rows)},
        .alpha = view_of(&pre->alpha),
        .beta = view_of(&pre->beta),
        .numbers = numbers_of(&pre->numerics),
        .pre_in = view_of(&pre->pre_in),
        .h = view_of(&pre->h),
        .ms = view_of(&pre->ms),
        .pre = view_of(&pre->pre),
        .post_out = view_of(&pre->post),
        .res_out = view_of(&pre->res),
        .u = weft_has(&pre->u) ? (bf16 *)pre->u.data : NULL,
        .v = weft_has(&pre->v) ? (bf16 *)pre->v.data : NULL,
        .u_token = pre->u.stride[0],
        .v_token = pre->v.stride[0],
        .sub_weight = view_of(&pre->sub_weight),
        .sub_eps = (float)pre->sub_eps,
        .tokens = call->tokens,
        .tiles = plan->tiles,
        .channels = (int32_t)call->channels,
        .slices = plan->slices,
        .groups = plan->groups,
        .mean = 1.0f / (float)(call->streams * call->channels),
        .ring = memory.ring,
        .counters = memory.counters};
    const weft_tensor *phi = &pre->phi;
    if (phi->dtype == WEFT_F32 && !weft_has(&pre->norm_weight) && phi->stride[2] == 1 && phi->stride[0] % 4 == 0 &&
        phi->stride[1] % 4 == 0 && (uintptr_t)phi->data % 16 == 0)
        p.psi = (const float *)phi->data, p.psi_row = phi->stride[0], p.psi_stream = phi->stride[1];
    if (post) {
        p.f = (const bf16 *)post->f.data, p.f_token = post->f.stride[0];
        p.bias = view_of(&post->bias), p.post = view_of(&post->post), p.res = view_of(&post->res);
        p.dropout = post->dropout;
        p.in_out = post->numerics.apply == WEFT_APPLY_IN_OUT;
        p.coef_wide = is_wide(&post->post) && is_wide(&post->res);
        p.y = (bf16 *)post->y.data, p.y_token = post->y.stride[0], p.y_stream = post->y.stride[1];
    }
    return call->streams == 2 ? run<2>(call, p, post) : run<4>(call, p, post);
}
