/* SPDX-License-Identifier: Apache-2.0
 *
 * The small tensors of boundary's single-pass backward [M11]: gates and Sinkhorn backwards, and what the pass needs of them
 * as records, one for each token.
 *
 * Of all the upstream gradients only d_pre waits for sums over the streams. So `gates_kernel` does everything else first and
 * runs beside the kernel that makes these sums; `late_kernel` adds what d_pre changes, which is linear in it. Sums over
 * tokens stay in partial sums for mhc_boundary_bwd_fold.cu, and no block waits for another. */
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

/* Records instead of d_h and d_ms; those of tokens behind the last are zeros. */
struct record_sink {
    static constexpr bool keeps_sums = true;
    uint4 *records;
    record_floats floats;
    int64_t padded;
    float scale; /* 2 / K */

    template <int N> __device__ void begin(int64_t token) const
    {
        put_floats<N>(records + token * boundary_record<N>::pieces, floats, token);
    }

    template <int N> __device__ void put(int64_t token, const float (&d_h)[2 * N + N * N], float d_ms) const
    {
        typedef boundary_record<N> R;
        uint4 *const record = records + token * R::pieces;
#pragma unroll
        for (int h = 0; h < R::row_tiles; h++) {
            uint4 hi, lo;
            split2(hi.x, lo.x, d_h[8 * h], d_h[8 * h + 1]);
            split2(hi.y, lo.y, d_h[8 * h + 2], d_h[8 * h + 3]);
            split2(hi.z, lo.z, d_h[8 * h + 4], d_h[8 * h + 5]);
            split2(hi.w, lo.w, d_h[8 * h + 6], d_h[8 * h + 7]);
            record[h] = hi, record[R::row_tiles + h] = lo;
        }
        *(float4 *)(record + R::rest_at) = make_float4(scale * d_ms, 0.0f, 0.0f, 0.0f);
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

struct late_args {
    token_rows h, d_pre; /* d_pre: absent where only r and k are late */
    view ms, alpha, beta;
    gate_numbers numbers;
    uint4 *records;
    const float2 *norm;
    float scale;
    int64_t tokens, chunks, slots;
    float *partial; /* [N + 1][slots]: d_beta of pre, d_alpha[0]; or NULL */
};

template <int N>
static __device__ __forceinline__ void put_late(const late_args &a, int64_t token, const float (&h)[N], float ms,
                                                float (&dz)[N + 1])
{
    typedef boundary_record<N> R;
    uint4 *const record = a.records + token * R::pieces;
    float4 rest = *(const float4 *)(record + R::rest_at);
    if (has(a.d_pre.v)) {
        const float inv = mm_inv_rms(ms, a.numbers.rms_eps, a.numbers.rms_eps_kind), alpha = get(a.alpha, 0);
        float d_h[N], d_inv = 0.0f;
        load_row<N>(dz, a.d_pre, token);
#pragma unroll
        for (int i = 0; i < N; i++)
            d_h[i] =
                gate_bwd(h[i], inv, alpha, get(a.beta, i * a.beta.stride[0]), 0, a.numbers, dz[i], d_inv, dz[N]);
#pragma unroll
        for (int i = 0; i < N; i += 2)
            split2(((uint32_t *)record)[i / 2], ((uint32_t *)(record + R::row_tiles))[i / 2], d_h[i], d_h[i + 1]);
        rest.x = fmaf(a.scale, d_inv * mm_d_inv_rms(ms, inv, a.numbers.rms_eps, a.numbers.rms_eps_kind), rest.x);
    }
    if (a.norm) rest.y = a.norm[token].x, rest.z = a.norm[token].y;
    *(float4 *)(record + R::rest_at) = rest;
}

/* Slots of a block. The pass needs a multiprocessor to itself and is to begin before this kernel ends, so its blocks are few
 * and large. */
enum { LATE_SLOTS = 8, LATE_THREADS = LATE_SLOTS * COEF_THREADS };

/* A thread per token; chunks and slots are those of gates_kernel. */
template <int N>
static __global__ void __launch_bounds__(LATE_THREADS) late_kernel(const __grid_constant__ late_args a)
{
    __shared__ float room[LATE_SLOTS][COEF_THREADS / 32][N + 1];
    const int group = (int)threadIdx.x / COEF_THREADS, thread = (int)threadIdx.x % COEF_THREADS;
    const int64_t slot = (int64_t)blockIdx.x * LATE_SLOTS + group;
    float total = 0.0f;
    let_next_begin();
    /* As many rounds for every slot: some are behind the last chunk. */
    for (int64_t first = 0; first < a.chunks; first += a.slots) {
        const int64_t chunk = first + slot, token = chunk * COEF_THREADS + thread;
        const bool inside = slot < a.slots && token < a.tokens;
        float h[N], ms = 0.0f, dz[N + 1] = {};
        if (inside) load_row<N>(h, a.h, token), ms = get(a.ms, token * a.ms.stride[0]);
        wait_for_previous();
        if (inside) put_late<N>(a, token, h, ms, dz);
        if (!a.partial) continue;
        __syncthreads();
        sum_warp<N + 1>(dz, room[group][thread >> 5]);
        __syncthreads();
        if (thread <= N) total += room[group][0][thread] + room[group][1][thread];
    }
    if (a.partial && slot < a.slots && thread <= N) a.partial[thread * a.slots + slot] = total;
}

/* ---- host --------------------------------------------------------------------------------------------------------------------- */

static weft_tensor upstream_of_pre(const boundary_work *w)
{
    const weft_tensor none = {};
    return weft_has(&w->d_pre) ? none : w->a->d_pre_out;
}

weft_status weft_cuda_boundary_bwd_gates(const weft_call *call, const boundary_work *w)
{
    const weft_mhc_boundary_bwd_args *a = w->a;
    const weft_tensor d_pre = upstream_of_pre(w);
    const weft_grad none = {};
    weft_cuda_coef_plan plan;
    gates_bwd_params p =
        gates_bwd_params_of<true>(call,
                                  {&a->numerics, &a->h, &a->ms, &a->alpha, &a->beta, &d_pre, &a->d_post_out,
                                   &a->d_res_out, &none, &none, &a->d_alpha, &a->d_beta},
                                  &plan);
    launch_shape shape = gates_bwd_shape(call, &plan, &p);
    p.partial = w->gates;
    const record_sink sink = {.records = w->records,
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
                              .scale = 2.0f / (float)(call->streams * call->channels)};
    return launch(call, "gradient of the coefficients", call->streams == 2 ? gates_kernel<2> : gates_kernel<4>,
                  shape, p, sink);
}

weft_status weft_cuda_boundary_bwd_late(const weft_call *call, const boundary_work *w)
{
    const weft_mhc_boundary_bwd_args *a = w->a;
    int64_t chunks, slots;
    weft_cuda_coef_cut(call->tokens, &chunks, &slots);
    const late_args p = {.h = rows_of(&a->h),
                         .d_pre = rows_of(&w->d_pre),
                         .ms = view_of(&a->ms),
                         .alpha = view_of(&a->alpha),
                         .beta = view_of(&a->beta),
                         .numbers = numbers_of(&a->numerics),
                         .records = w->records,
                         .norm = w->norm,
                         .scale = 2.0f / (float)(call->streams * call->channels),
                         .tokens = call->tokens,
                         .chunks = chunks,
                         .slots = slots,
                         .partial = w->gates ? w->gates + (call->rows + 3) * slots : nullptr};
    return launch(call, "gradient of pre", call->streams == 2 ? late_kernel<2> : late_kernel<4>,
                  {.grid = grid_of((slots + LATE_SLOTS - 1) / LATE_SLOTS), .block = LATE_THREADS, .order = OVERLAP},
                  p);
}
