/* SPDX-License-Identifier: Apache-2.0
 *
 * boundary's backward with a single pass over the streams at its end [M11]: who runs when.
 *
 *     pre            from h and ms, where the form is not the shifted one                        mhc_coef.cu
 *     d_pre, r, k    sums over the whole token, where something waits for them                   mhc_boundary_bwd_sums.cu
 *     d_h, d_ms      gates and Sinkhorn                                                          mhc_coef.cu
 *     the rest       one pass, and sums of its partial sums                                      mhc_boundary_bwd_pass.cu
 *
 * In the shifted form without a norm nothing has to be known of y, and the pass is all there is. */
#include "cuda/mhc_boundary_bwd.h"

#include "core/status.h"
#include "cuda/common/chain.h"
#include "cuda/mhc_boundary_bwd.cuh"

/* ---- path ------------------------------------------------------------------------------------------------------------------- */

/* Strides count even where there is one token: a token must not be summed in another way because it is alone. */
bool weft_cuda_boundary_is_wide(const weft_call *call, const weft_tensor *t)
{
    const int64_t most = (int64_t)1 << 38;
    if (!weft_has(t)) return true;
    for (int i = 0; i + 1 < t->ndim; i++)
        if (t->stride[i] <= 0 || t->stride[i] % 8 || t->stride[i] >= most) return false;
    return t->stride[t->ndim - 1] == 1 && (call->query || (uintptr_t)t->data % 16 == 0);
}

boundary_bwd_path weft_cuda_boundary_bwd_path(const weft_call *call, const weft_mhc_boundary_bwd_args *a)
{
    const weft_tensor *activations[] = {&a->x, &a->f, &a->d_y, &a->d_u, &a->d_v},
                      *others[] = {&a->bias, &a->sub_weight};
    boundary_bwd_facts f = {.tokens = call->tokens,
                            .streams = call->streams,
                            .channels = call->channels,
                            .bf16 = call->dtype == WEFT_BF16,
                            .rows_are_wide = true,
                            .capability = weft_cuda_boundary_bwd_code(),
                            .shared = (int64_t)most_shared(call)};
    for (const weft_tensor *t : activations) {
        f.bf16 = f.bf16 && (!weft_has(t) || t->dtype == WEFT_BF16);
        f.rows_are_wide = f.rows_are_wide && weft_cuda_boundary_is_wide(call, t);
    }
    for (const weft_tensor *t : others) f.rows_are_wide = f.rows_are_wide && weft_cuda_boundary_is_wide(call, t);
    return weft_boundary_bwd_path(&f);
}

/* ---- records ---------------------------------------------------------------------------------------------------------------- */

struct record_args {
    view d_h, d_ms, post, res, pre;
    const float2 *norm;
    float scale; /* 2 / K */
    int64_t tokens, padded;
    int32_t in_out;
};

/* Which pieces to write: the coefficients, what is known with d_h, or all. */
enum record_part { EARLY, LATE, WHOLE };

/* A thread per piece; tokens behind the last are zeros. */
template <int N, record_part PART>
static __global__ void __launch_bounds__(256) record_kernel(uint4 *to, record_args a)
{
    typedef boundary_record<N> R;
    constexpr int coefs = R::rest_at - R::floats_at;
    constexpr int count = PART == EARLY ? coefs : PART == LATE ? R::pieces - coefs : R::pieces;
    let_next_begin();
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < a.padded * count;
         i += (int64_t)gridDim.x * blockDim.x) {
        const int64_t token = i / count;
        const int j = (int)(i - token * count);
        const int piece = PART == EARLY ? R::floats_at + j : PART == WHOLE || j < R::floats_at ? j : R::rest_at;
        const int lo = piece >= R::row_tiles;
        uint32_t word[4] = {};
        if (token >= a.tokens) {
        } else if (piece < R::floats_at) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = (piece - lo * R::row_tiles) * 8 + 2 * e;
                const int64_t at = token * a.d_h.stride[0] + row * a.d_h.stride[1];
                uint32_t high, low;
                split2(high, low, get(a.d_h, at), get(a.d_h, at + a.d_h.stride[1]));
                word[e] = lo ? low : high;
            }
        } else if (piece == R::rest_at) {
            word[0] = __float_as_uint(a.scale * get(a.d_ms, token * a.d_ms.stride[0]));
            if (a.norm) word[1] = __float_as_uint(a.norm[token].x), word[2] = __float_as_uint(a.norm[token].y);
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int k = (piece - R::floats_at) * 4 + e;
                float v = 0.0f;
                if (k < N * N)
                    v = coef_at(a.post, a.res, a.in_out, N, token, N + k);
                else if (k < N * N + N)
                    v = coef_at(a.post, a.res, a.in_out, N, token, k - N * N);
                else if (has(a.pre))
                    v = get(a.pre, token * a.pre.stride[0] + (k - N * N - N) * a.pre.stride[1]);
                word[e] = __float_as_uint(v);
            }
        }
        to[token * R::pieces + piece] = make_uint4(word[0], word[1], word[2], word[3]);
    }
}

template <int N> static weft_status write_records(const weft_call *call, const boundary_work *w, record_part part)
{
    const record_args a = {.d_h = view_of(&w->d_h),
                           .d_ms = view_of(&w->d_ms),
                           .post = view_of(&w->a->post),
                           .res = view_of(&w->a->res),
                           .pre = view_of(&w->pre),
                           .norm = w->norm,
                           .scale = 2.0f / (float)(N * call->channels),
                           .tokens = call->tokens,
                           .padded = w->plan.tiles * BOUNDARY_TILE,
                           .in_out = w->a->numerics.apply == WEFT_APPLY_IN_OUT};
    const int64_t blocks = (a.padded * boundary_record<N>::pieces + 255) / 256;
    return launch(call, "records",
                  part == EARLY  ? record_kernel<N, EARLY>
                  : part == LATE ? record_kernel<N, LATE>
                                 : record_kernel<N, WHOLE>,
                  {.grid = grid_of(blocks), .block = 256}, w->records, a);
}

static weft_status records(const weft_call *call, const boundary_work *w, record_part part)
{
    return call->streams == 2 ? write_records<2>(call, w, part) : write_records<4>(call, w, part);
}

/* ---- layout ----------------------------------------------------------------------------------------------------------------- */

struct links {
    weft_mhc_coef_fwd_args coef; /* pre once more, in fp32 */
    weft_mhc_coef_bwd_args d_coef;
    weft_mhc_project_bwd_args project; /* where d_phi and d_norm_weight go */
};

static links lay_out(weft_arena *arena, const weft_call *call, const weft_mhc_boundary_bwd_args *a,
                     boundary_work *w)
{
    const int64_t tokens = call->tokens, n = call->streams, columns = n * call->channels;
    const bool shifted = weft_has(&a->pre_in), normed = weft_has(&a->d_v), has_du = normed || weft_has(&a->d_u);
    auto floats = [&](int64_t count) { return (float *)weft_arena_take(arena, (size_t)count * 4); };
    links c = {};
    *w = boundary_work{};
    w->a = a;
    w->plan = weft_boundary_bwd_plan(tokens, n, call->channels);
    const int64_t padded = w->plan.tiles * BOUNDARY_TILE;
    w->stored = weft_has(&a->y) && weft_cuda_boundary_is_wide(call, &a->y);
    if (has_du) w->pre = shifted ? a->pre_in : weft_dense2(floats(tokens * n), WEFT_F32, tokens, n);
    if (has_du && !shifted) w->d_pre = weft_dense2(floats(tokens * n), WEFT_F32, tokens, n);
    w->d_h = weft_dense2(floats(tokens * call->rows), WEFT_F32, tokens, call->rows);
    w->d_ms = weft_dense1(floats(tokens), WEFT_F32, tokens);
    w->records =
        (uint4 *)weft_arena_take(arena, (size_t)(padded * weft_boundary_bwd_ring(n).record_bytes / BOUNDARY_TILE));
    if (normed) w->norm = (float2 *)floats(tokens * 2);
    w->psi = floats(call->rows * columns);
    if (weft_has(&a->d_phi.to) || weft_has(&a->d_norm_weight.to))
        w->dpsi = floats(w->plan.splits * call->rows * columns);
    if (weft_has(&a->d_post.to) || weft_has(&a->d_res.to) || weft_has(&a->d_pre_in.to))
        w->sums = floats(w->plan.slices * padded * weft_boundary_bwd_sums(n, weft_has(&a->d_pre_in.to)));
    if (weft_has(&a->d_bias.to)) w->d_bias = floats(w->plan.splits * call->channels);
    if (weft_has(&a->d_sub_weight.to)) w->d_weight = floats(w->plan.splits * call->channels);

    c.coef.numerics = c.d_coef.numerics = a->numerics;
    c.coef.h = c.d_coef.h = a->h, c.coef.ms = c.d_coef.ms = a->ms;
    c.coef.alpha = c.d_coef.alpha = a->alpha, c.coef.beta = c.d_coef.beta = a->beta;
    if (!shifted) c.coef.pre = w->pre;
    c.d_coef.d_pre = weft_has(&w->d_pre) ? w->d_pre : a->d_pre_out;
    c.d_coef.d_post = a->d_post_out, c.d_coef.d_res = a->d_res_out;
    c.d_coef.d_h.to = w->d_h, c.d_coef.d_ms.to = w->d_ms;
    c.d_coef.d_alpha = a->d_alpha, c.d_coef.d_beta = a->d_beta;
    c.project.phi = a->phi, c.project.norm_weight = a->norm_weight;
    c.project.d_phi = a->d_phi, c.project.d_norm_weight = a->d_norm_weight;
    const size_t one = chain_bytes(call, weft_cuda_mhc_coef_fwd, &c.coef);
    const size_t other = chain_bytes(call, weft_cuda_mhc_coef_bwd, &c.d_coef);
    w->room = weft_arena_take(arena, one > other ? one : other);
    return c;
}

size_t weft_cuda_boundary_bwd_bytes(const weft_call *call, const weft_mhc_boundary_bwd_args *a)
{
    boundary_work w;
    weft_arena arena = weft_arena_open(NULL);
    lay_out(&arena, call, a, &w);
    return weft_arena_bytes(&arena);
}

/* ---- the call ----------------------------------------------------------------------------------------------------------------- */

weft_status weft_cuda_boundary_bwd(const weft_call *call, const weft_mhc_boundary_bwd_args *a)
{
    boundary_work w;
    weft_arena arena = cuda_arena(call);
    const links c = lay_out(&arena, call, a, &w);
    const columns k = columns_of(call, LAYOUT_NC);
    const bool waits = w.norm || weft_has(&w.d_pre), early = waits && (w.norm || !w.stored);
    if (weft_has(&c.coef.pre)) WEFT_TRY(chain_run(call, weft_cuda_mhc_coef_fwd, &c.coef, w.room));
    if (early) WEFT_TRY(records(call, &w, EARLY));
    if (waits) WEFT_TRY(weft_cuda_boundary_bwd_sums(call, &w));
    WEFT_TRY(chain_run(call, weft_cuda_mhc_coef_bwd, &c.d_coef, w.room));
    if (!weft_project_phi_is_psi(&a->phi, &a->norm_weight, LAYOUT_NC))
        WEFT_TRY(weft_cuda_project_spread(call, &a->phi, &a->norm_weight, k, w.psi));
    WEFT_TRY(records(call, &w, early ? LATE : WHOLE));
    WEFT_TRY(weft_cuda_boundary_bwd_pass(call, &w));
    if (w.dpsi) WEFT_TRY(weft_cuda_project_finish(call, &c.project, w.dpsi, w.plan.splits, k));
    if (w.d_bias) WEFT_TRY(weft_cuda_post_add_bias(call, &a->d_bias, w.d_bias, w.plan.splits));
    if (w.d_weight) WEFT_TRY(weft_cuda_post_add_bias(call, &a->d_sub_weight, w.d_weight, w.plan.splits));
    return WEFT_OK;
}
