/* SPDX-License-Identifier: Apache-2.0
 *
 * Gates and Sinkhorn in the fused backward of a site [M11], with a record per token for the kernel of site/bwd_pass.cu.
 *
 * Of the upstream gradients only d_pre depends on sums over the streams. This kernel computes everything else and runs beside
 * site/bwd_sums.cu, which computes these sums and what d_pre changes; each writes words of its own in a record. Sums over
 * tokens are left as partial sums for site/bwd_fold.cu: no block waits for another. */
#include "core/status.h"
#include "cuda/mhc/gates_run.cuh"
#include "cuda/site/bwd.cuh"

enum { HEAD_THREADS = 128 };

/* Inputs of the floats of a record. */
struct record_floats {
    token_rows post, res, pre_in, h; /* pre_in; or h, ms, alpha and beta; or neither where pre is not needed */
    view ms, alpha, beta;
    gate_numbers numbers;
    int32_t in_out, own_pre;
};

template <int N, site_kind KIND>
static __device__ __forceinline__ void put_floats(uint4 *record, const record_floats &a, int64_t token)
{
    typedef boundary_record<N, KIND> R;
    constexpr int COUNT = R::floats, PRE = R::mix;
    float v[COUNT] = {};
    if constexpr (KIND == SITE_BOUNDARY) {
        float res[N * N];
        if (has(a.res.v)) {
            load_row<N * N, N>(res, a.res, token);
        } else { /* without a residual mix the identity */
#pragma unroll
            for (int e = 0; e < N * N; e++) res[e] = e % (N + 1) == 0 ? 1.0f : 0.0f;
        }
        if (has(a.post.v)) load_row<N>(v + N * N, a.post, token);
#pragma unroll
        for (int o = 0; o < N; o++)
#pragma unroll
            for (int i = 0; i < N; i++) v[o * N + i] = a.in_out ? res[i * N + o] : res[o * N + i];
    }
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
    for (int e = 0; e < COUNT; e += 4)
        *(float4 *)(record + R::floats_at + e / 4) = make_float4(v[e], v[e + 1], v[e + 2], v[e + 3]);
    if constexpr (R::used < R::pieces) record[R::used] = make_uint4(0, 0, 0, 0);
}

/* Stores the rows of a piece after the first N, which belong to pre. */
template <int N> static __device__ __forceinline__ void put_behind_pre(uint4 *to, const uint4 &piece)
{
    if constexpr (N == 2) ((uint32_t *)to)[1] = piece.y;
    ((uint2 *)to)[1] = make_uint2(piece.z, piece.w);
}

/* Writes records in place of d_h and d_ms; those of padding tokens are zeros. */
template <site_kind KIND> struct record_sink {
    static constexpr bool keeps_sums = true, unmixed = true;
    uint4 *records;
    record_floats floats;
    int64_t padded;
    float scale;    /* 2 / K */
    bool pre, rest; /* written here: the rows of pre; the floats beside 2 d_ms / K */

    template <int N> __device__ void begin(int64_t token) const
    {
        put_floats<N, KIND>(records + token * boundary_record<N, KIND>::pieces, floats, token);
    }

    template <int N>
    __device__ void put(int64_t token, const float (&d_h)[boundary_record<N, KIND>::rows], float d_ms) const
    {
        typedef boundary_record<N, KIND> R;
        uint4 *const record = records + token * R::pieces;
        auto row = [&](int j) { return j < R::rows ? d_h[j] : 0.0f; };
#pragma unroll
        for (int h = 0; h < R::row_tiles; h++) {
            uint4 hi, lo;
            split2(hi.x, lo.x, row(8 * h), row(8 * h + 1));
            split2(hi.y, lo.y, row(8 * h + 2), row(8 * h + 3));
            split2(hi.z, lo.z, row(8 * h + 4), row(8 * h + 5));
            split2(hi.w, lo.w, row(8 * h + 6), row(8 * h + 7));
            if (h > 0 || pre)
                record[h] = hi, record[R::row_tiles + h] = lo;
            else
                put_behind_pre<N>(record, hi), put_behind_pre<N>(record + R::row_tiles, lo);
        }
        float *const numbers = (float *)(record + R::rest_at);
        if (rest)
            *(float4 *)numbers = make_float4(scale * d_ms, 0.0f, 0.0f, 0.0f);
        else
            numbers[0] = scale * d_ms;
    }

    template <int N> __device__ void none(int64_t token) const
    {
        if (token >= padded) return;
#pragma unroll
        for (int e = 0; e < boundary_record<N, KIND>::pieces; e++)
            records[token * boundary_record<N, KIND>::pieces + e] = make_uint4(0, 0, 0, 0);
    }
};

template <int N, site_kind KIND>
static __global__ void __launch_bounds__(COEF_GROUPS *COEF_THREADS)
    gates_kernel(const __grid_constant__ gates_bwd_params p, const __grid_constant__ record_sink<KIND> sink)
{
    __shared__ float room[gates_bwd_room<N>::floats];
    let_next_begin();
    gates_bwd_slots<N, true>(p, sink, room);
}

/* A head has only the gates of pre, whose gradient depends on the sums: site/bwd_sums.cu computes it. */
template <int N>
static __global__ void __launch_bounds__(HEAD_THREADS)
    head_kernel(const __grid_constant__ record_sink<SITE_HEAD> sink, int64_t tokens)
{
    const int64_t token = (int64_t)blockIdx.x * HEAD_THREADS + threadIdx.x;
    const float nothing[N] = {};
    let_next_begin();
    if (token < tokens)
        sink.template begin<N>(token), sink.template put<N>(token, nothing, 0.0f);
    else
        sink.template none<N>(token);
}

/* ---- host --------------------------------------------------------------------------------------------------------------------- */

template <site_kind KIND> static record_sink<KIND> sink_of(const weft_call *call, const boundary_work *w)
{
    const weft_mhc_boundary_bwd_args *a = w->a;
    return {.records = w->records,
            .floats = {.post = rows_of(&a->post),
                       .res = rows_of(&a->res),
                       .pre_in = rows_of(&a->pre_in),
                       .h = rows_of(&a->h),
                       .ms = view_of(&a->ms),
                       .alpha = view_of(&a->alpha),
                       .beta = view_of(&a->beta),
                       .numbers = numbers_of(&a->numerics),
                       .in_out = a->numerics.apply == WEFT_APPLY_IN_OUT,
                       .own_pre = weft_has(&a->d_u) || weft_has(&a->d_v)},
            .padded = w->plan.tiles * BOUNDARY_TILE,
            .scale = 2.0f / (float)(call->streams * call->channels),
            .pre = !w->late_pre,
            .rest = !w->waits};
}

static weft_status run_head(const weft_call *call, const boundary_work *w)
{
    const record_sink<SITE_HEAD> sink = sink_of<SITE_HEAD>(call, w);
    const launch_shape shape = {dim3((unsigned)((sink.padded + HEAD_THREADS - 1) / HEAD_THREADS)), HEAD_THREADS};
    return launch(call, "gates of the head", call->streams == 2 ? head_kernel<2> : head_kernel<4>, shape, sink,
                  call->tokens);
}

template <site_kind KIND> static weft_status run(const weft_call *call, const boundary_work *w)
{
    const weft_mhc_boundary_bwd_args *a = w->a;
    const weft_tensor nothing = {}, &d_pre = w->late_pre ? nothing : a->d_pre_out;
    const weft_grad none = {};
    weft_cuda_coef_plan plan;
    gates_bwd_params p =
        gates_bwd_params_of<true>(call,
                                  {&a->numerics, &a->h, &a->ms, &a->alpha, &a->beta, &d_pre, &a->d_post_out,
                                   &a->d_res_out, &none, &none, &a->d_alpha, &a->d_beta},
                                  &plan);
    launch_shape shape = gates_bwd_shape(call, &plan, &p);
    shape.per_sm = w->waits ? 2 : 8; /* the sums kernel runs beside this one and needs the L1 */
    p.partial = w->gates;
    return launch(call, "gradient of the coefficients",
                  call->streams == 2 ? gates_kernel<2, KIND> : gates_kernel<4, KIND>, shape, p,
                  sink_of<KIND>(call, w));
}

weft_status weft_cuda_boundary_bwd_gates(const weft_call *call, const boundary_work *w)
{
    if (w->kind == SITE_HEAD) return run_head(call, w);
    return w->kind == SITE_PRE ? run<SITE_PRE>(call, w) : run<SITE_BOUNDARY>(call, w);
}
