/* SPDX-License-Identifier: Apache-2.0
 *
 * The small tensors of boundary's single-pass backward [M11]: gates and Sinkhorn backwards, and what the pass needs of them
 * as records, one for each token.
 *
 * `gates_kernel` is launched while the sums over y are still on their way: of all that it reads only d_pre comes from
 * there, and by the time it is needed Sinkhorn's part is done. Sums over tokens stay in partial sums for
 * mhc_boundary_bwd_fold.cu, so no block waits for another. */
#include "core/status.h"
#include "cuda/gates_run.cuh"
#include "cuda/mhc_boundary_bwd.cuh"

/* What the floats of a record are made of. */
struct record_floats {
    token_rows post, res, pre_in, h; /* pre_in, or h and what follows, or neither where pre is not needed */
    view ms, alpha, beta;
    gate_numbers numbers;
    int32_t in_out, own_pre;
};

template <int N>
static __device__ __forceinline__ void put_floats(uint4 *record, const record_floats &a, int64_t token)
{
    typedef boundary_record<N> R;
    constexpr int COUNT = N * N + 2 * N, PRE = N * N + N;
    float res[N * N] = {}, v[COUNT] = {};
    if (has(a.res.v)) load_row<N * N, N>(res, a.res, token);
    if (has(a.post.v)) load_row<N>(v + N * N, a.post, token);
    if (has(a.pre_in.v)) {
        load_row<N>(v + PRE, a.pre_in, token);
    } else if (a.own_pre) {
        const float inv = mm_inv_rms(get(a.ms, token * a.ms.stride[0]), a.numbers.rms_eps, a.numbers.rms_eps_kind);
        const float alpha = get(a.alpha, 0);
        load_row<N>(v + PRE, a.h, token);
#pragma unroll
        for (int i = 0; i < N; i++)
            v[PRE + i] = gate_fwd(v[PRE + i], inv, alpha, get(a.beta, i * a.beta.stride[0]), 0, a.numbers);
    }
#pragma unroll
    for (int o = 0; o < N; o++)
#pragma unroll
        for (int i = 0; i < N; i++) v[o * N + i] = a.in_out ? res[i * N + o] : res[o * N + i];
#pragma unroll
    for (int e = 0; e < COUNT; e += 4)
        *(float4 *)(record + R::floats_at + e / 4) = make_float4(v[e], v[e + 1], v[e + 2], v[e + 3]);
}

/* The floats alone, for sums that need them: a thread per token. */
template <int N>
static __global__ void __launch_bounds__(COEF_THREADS)
    floats_kernel(uint4 *records, record_floats a, int64_t tokens)
{
    for (int64_t token = (int64_t)blockIdx.x * COEF_THREADS + threadIdx.x; token < tokens;
         token += (int64_t)gridDim.x * COEF_THREADS)
        put_floats<N>(records + token * boundary_record<N>::pieces, a, token);
}

/* Records instead of d_h and d_ms; those of tokens behind the last are zeros. */
struct record_sink {
    static constexpr bool d_pre_is_late = true;
    uint4 *records;
    record_floats floats;
    const float2 *norm;
    int64_t padded;
    float scale; /* 2 / K */
    bool whole;  /* the floats as well */

    template <int N> __device__ void begin(int64_t token) const
    {
        if (whole) put_floats<N>(records + token * boundary_record<N>::pieces, floats, token);
    }

    template <int N> __device__ void put(int64_t token, const float (&d_h)[2 * N + N * N], float d_ms) const
    {
        typedef boundary_record<N> R;
        uint4 *const record = records + token * R::pieces;
        const float2 rk = norm ? norm[token] : make_float2(0.0f, 0.0f);
#pragma unroll
        for (int h = 0; h < R::row_tiles; h++) {
            uint4 hi, lo;
            split2(hi.x, lo.x, d_h[8 * h], d_h[8 * h + 1]);
            split2(hi.y, lo.y, d_h[8 * h + 2], d_h[8 * h + 3]);
            split2(hi.z, lo.z, d_h[8 * h + 4], d_h[8 * h + 5]);
            split2(hi.w, lo.w, d_h[8 * h + 6], d_h[8 * h + 7]);
            record[h] = hi, record[R::row_tiles + h] = lo;
        }
        *(float4 *)(record + R::rest_at) = make_float4(scale * d_ms, rk.x, rk.y, 0.0f);
    }

    template <int N> __device__ void none(int64_t token) const
    {
        if (token >= padded) return;
#pragma unroll
        for (int e = 0; e < boundary_record<N>::pieces; e++)
            records[token * boundary_record<N>::pieces + e] = make_uint4(0, 0, 0, 0);
    }
};

template <int N>
static __global__ void __launch_bounds__(COEF_GROUPS *COEF_THREADS)
    gates_kernel(const __grid_constant__ gates_bwd_params p, const __grid_constant__ record_sink sink)
{
    __shared__ float room[gates_bwd_room<N>::floats];
    let_next_begin();
    gates_bwd_slots<N, true>(p, sink, room);
}

/* ---- host --------------------------------------------------------------------------------------------------------------------- */

static record_floats floats_of(const boundary_work *w)
{
    const weft_mhc_boundary_bwd_args *a = w->a;
    return {.post = rows_of(&a->post),
            .res = rows_of(&a->res),
            .pre_in = rows_of(&a->pre_in),
            .h = rows_of(&a->h),
            .ms = view_of(&a->ms),
            .alpha = view_of(&a->alpha),
            .beta = view_of(&a->beta),
            .numbers = numbers_of(&a->numerics),
            .in_out = a->numerics.apply == WEFT_APPLY_IN_OUT,
            .own_pre = weft_has(&a->d_u) || weft_has(&a->d_v)};
}

static gates_bwd_call gates_of(const boundary_work *w)
{
    static const weft_grad none = {};
    const weft_mhc_boundary_bwd_args *a = w->a;
    return {&a->numerics,   &a->h,         &a->ms,
            &a->alpha,      &a->beta,      weft_has(&w->d_pre) ? &w->d_pre : &a->d_pre_out,
            &a->d_post_out, &a->d_res_out, &none,
            &none,          &a->d_alpha,   &a->d_beta};
}

size_t weft_cuda_boundary_bwd_gates_bytes(const weft_call *call, const boundary_work *w)
{
    weft_call query = *call;
    query.query = true;
    return gates_bwd_workspace<true>(&query, gates_of(w));
}

weft_status weft_cuda_boundary_bwd_floats(const weft_call *call, const boundary_work *w)
{
    return launch(call, "coefficients", call->streams == 2 ? floats_kernel<2> : floats_kernel<4>,
                  {.grid = grid_of((call->tokens + COEF_THREADS - 1) / COEF_THREADS), .block = COEF_THREADS},
                  w->records, floats_of(w), call->tokens);
}

weft_status weft_cuda_boundary_bwd_gates(const weft_call *call, boundary_work *w)
{
    weft_cuda_coef_plan plan;
    weft_exec exec = *call->exec;
    weft_call link = *call;
    exec.workspace = w->room;
    link.exec = &exec;
    gates_bwd_params p = gates_bwd_params_of<true>(&link, gates_of(w), &plan);
    launch_shape shape = gates_bwd_shape(call, &plan, &p);
    const record_sink sink = {.records = w->records,
                              .floats = floats_of(w),
                              .norm = w->norm,
                              .padded = w->plan.tiles * BOUNDARY_TILE,
                              .scale = 2.0f / (float)(call->streams * call->channels),
                              .whole = !w->has_floats};
    shape.order = w->waits ? OVERLAP : AFTER;
    if (p.slots > 1 && (has(p.d_alpha) || has(p.d_beta))) w->gates = p.partial, w->gate_slots = p.slots;
    return launch(call, "gradient of the coefficients", call->streams == 2 ? gates_kernel<2> : gates_kernel<4>,
                  shape, p, sink);
}
