/* SPDX-License-Identifier: Apache-2.0
 *
 * Expand-combine forward [M6]. Bytes per token, bf16: 4nC + 2C, each touched once; n = 4: reads 10C, writes 8C.
 *
 * A thread loads all streams of its channels, waits once, and writes them: 64 bytes of streams and the row's part are in
 * flight per thread, with no state from token to token, so the grid is as large as the problem. The coefficients of a
 * block's tokens go through shared memory while the loads of the streams are in flight. A thread has read its channels of
 * all streams before it writes the first, so y may lie over x. */
#include "core/status.h"
#include "cuda/mhc/mhc_post.cuh"

struct fwd_params {
    view x, f, bias, post, res, y;
    weft_dropout dropout;
    int64_t tokens, channels;
    int64_t first, groups; /* a launch begins at token `first` and takes `groups` groups of tokens */
    int32_t team, per_block, spans;
    int32_t in_out;
};

/* y of a tile. Rows are written one by one, so that only one is in registers beside x. */
template <class T, int N, stream_layout L, bool MIX>
static __device__ __forceinline__ void write_tile(T *row, int64_t stream, int64_t c,
                                                  const typename post_tile<T, N, L>::streams &x,
                                                  const typename post_tile<T, N, L>::row &f, const coefs<N> &k,
                                                  const post_extra<N, post_tile<T, N, L>::width> &extra)
{
    constexpr int W = post_tile<T, N, L>::width;
    float v[N][W], fb[W], y[L == LAYOUT_NC ? 1 : N][W];
    unpack_tile<T, N, L>(v, x);
    unpack_row<T, N, W>(fb, f, extra);
#pragma unroll
    for (int o = 0; o < N; o++) {
        float(&one)[W] = y[L == LAYOUT_NC ? 0 : o];
        post_output<N, W, MIX>(one, o, v, fb, k, extra);
        if constexpr (L == LAYOUT_NC) store<T, W>(row + o * stream + c, one);
    }
    if constexpr (L == LAYOUT_CN) store_streams<T, N, W, L>(row, stream, c, y);
}

/* Blocks that should fit a multiprocessor: bounds the registers. */
template <int N, stream_layout L, post_mode MODE> constexpr int resident()
{
    return post_asks(MODE) ? 1 : N == 8 ? 2 : MODE == BIASED ? 3 : 4;
}

template <class T, int N, stream_layout L, post_mode MODE>
static __global__ void __launch_bounds__(POST_BLOCK, resident<N, L, MODE>())
    fwd_streams(const __grid_constant__ fwd_params p)
{
    wait_for_previous();
    typedef post_tile<T, N, L> tile;
    constexpr bool MIX = post_mixes(MODE);
    constexpr int W = tile::width, K = tile::batch, M = N + N * N, USED = MIX ? M : N;
    static_assert(sizeof(coefs<N>) == M * sizeof(float), "the coefficients are filled as an array");
    extern __shared__ float4 room[];
    const int mine = p.per_block == 1 ? 0 : threadIdx.x / p.team, t = threadIdx.x - mine * p.team;
    const unsigned group = blockIdx.x / (unsigned)p.spans, span = blockIdx.x - group * (unsigned)p.spans;
    const int64_t first = p.first + (int64_t)group * p.per_block, token = first + mine;
    const int64_t end = mine < p.per_block && token < p.tokens ? p.channels : 0;
    const int64_t c0 = ((int64_t)span * K * p.team + t) * W, step = (int64_t)p.team * W;
    const T *x_row = (const T *)p.x.data + token * p.x.stride[0];
    const T *f_row = (const T *)p.f.data + token * p.f.stride[0];

    typename tile::streams x[K];
    typename tile::row f[K];
#pragma unroll
    for (int k = 0; k < K; k++)
        if (c0 + k * step < end) {
            load_tile<T, N, L>(x[k], x_row, p.x.stride[1], c0 + k * step);
            load_raw(f[k], f_row + c0 + k * step);
        }
    for (int e = threadIdx.x; e < USED * p.per_block; e += blockDim.x) {
        const int m = e / USED, k = e - m * USED;
        if (first + m < p.tokens) ((float *)room)[m * M + k] = coef_at(p.post, p.res, p.in_out, N, first + m, k);
    }
    post_extra<N, W> extra[K];
    weft_mask mask = {};
    if constexpr (post_asks(MODE)) mask = weft_mask_open(&p.dropout, p.channels);
#pragma unroll
    for (int k = 0; k < K; k++)
        if (c0 + k * step < end) load_extra<N, W, MODE>(extra[k], p.bias, mask, token, c0 + k * step);
    __syncthreads();

    const coefs<N> &coef = ((const coefs<N> *)room)[mine];
    T *y_row = (T *)p.y.data + token * p.y.stride[0];
#pragma unroll
    for (int k = 0; k < K; k++) {
        const int64_t c = c0 + k * step;
        if (c < end) write_tile<T, N, L, MIX>(y_row, p.y.stride[1], c, x[k], f[k], coef, extra[k]);
    }
}

/* Any n, any strides: a block takes `count` channels of a token through shared memory. */
template <class T>
static __global__ void __launch_bounds__(POST_BLOCK) fwd_any(const __grid_constant__ fwd_params p, int n, int count)
{
    wait_for_previous();
    extern __shared__ float4 room[];
    const bool mix = has(p.res);
    const int pitch = count + 1, M = n + n * n;
    float *const k = (float *)room, *const x = k + M, *const f = x + n * pitch;
    const unsigned group = blockIdx.x / (unsigned)p.spans, span = blockIdx.x - group * (unsigned)p.spans;
    const int64_t c0 = (int64_t)span * count;
    const weft_mask mask = weft_mask_open(&p.dropout, p.channels);

    for (int64_t token = group; token < p.tokens; token += p.groups) {
        for (int e = threadIdx.x; e < (mix ? M : n); e += blockDim.x)
            k[e] = coef_at(p.post, p.res, p.in_out, n, token, e);
        for (int e = threadIdx.x; e < n * count; e += blockDim.x) {
            const any_element at = any_split(e, n, count, any_along_channels(p.x));
            const int64_t i = token * p.x.stride[0] + at.i * p.x.stride[1] + (c0 + at.c) * p.x.stride[2];
            if (c0 + at.c < p.channels) x[at.i * pitch + at.c] = widen(((const T *)p.x.data)[i]);
        }
        for (int e = threadIdx.x; e < count && c0 + e < p.channels; e += blockDim.x) {
            f[e] = widen(((const T *)p.f.data)[token * p.f.stride[0] + (c0 + e) * p.f.stride[1]]);
            if (has(p.bias)) f[e] = f[e] + get(p.bias, (c0 + e) * p.bias.stride[0]);
        }
        __syncthreads();
        for (int e = threadIdx.x; e < n * count; e += blockDim.x) {
            const any_element at = any_split(e, n, count, any_along_channels(p.y));
            const int64_t c = c0 + at.c;
            if (c >= p.channels) continue;
            float y = k[at.i] * f[at.c];
            if (mask.on) y = y * any_factor(mask, token, at.i, c);
            y = mix ? any_post(k + n + at.i * n, x + at.c, pitch, n, y) : x[at.i * pitch + at.c] + y;
            ((T *)p.y.data)[token * p.y.stride[0] + at.i * p.y.stride[1] + c * p.y.stride[2]] = narrow<T>(y);
        }
        __syncthreads();
    }
}

/* ---- launches --------------------------------------------------------------------------------------------------------- */

static fwd_params params_of(const weft_call *call, const weft_mhc_post_fwd_args *a)
{
    fwd_params p = {};
    p.x = view_of(&a->x);
    p.f = view_of(&a->f);
    p.bias = view_of(&a->bias);
    p.post = view_of(&a->post);
    p.res = view_of(&a->res);
    p.y = view_of(&a->y);
    p.dropout = a->dropout;
    p.tokens = call->tokens;
    p.channels = call->channels;
    p.in_out = a->numerics.apply == WEFT_APPLY_IN_OUT;
    return p;
}

template <class T> static weft_status run_any(const weft_call *call, const void *args)
{
    fwd_params p = params_of(call, (const weft_mhc_post_fwd_args *)args);
    const int n = (int)call->streams;
    if (call->tokens == 0) return WEFT_OK;
    const post_any_plan plan = weft_post_plan_any(call->tokens, n, call->channels);
    p.spans = plan.spans;
    p.groups = plan.groups;
    launch_shape s = {dim3((unsigned)(plan.spans * plan.groups)), POST_BLOCK, 0, OVERLAP};
    s.shared = sizeof(float) * (size_t)(n + n * n + (n + 1) * (plan.count + 1));
    return launch(call, "post", fwd_any<T>, s, p, n, plan.count);
}

template <class T, int N, stream_layout L, post_mode MODE>
static weft_status run_mode(const weft_call *call, const weft_mhc_post_fwd_args *a)
{
    fwd_params p = params_of(call, a);
    const post_shape shape = post_shape_of<T, N, L>(call, sizeof(coefs<N>));
    const post_fwd_plan plan = weft_post_plan_fwd(&shape);
    p.team = plan.team;
    p.per_block = plan.per_block;
    p.spans = plan.spans;
    launch_shape s = {dim3((unsigned)(plan.spans * plan.groups)), (unsigned)plan.block, 0, OVERLAP};
    s.shared = (size_t)plan.shared;
    for (; p.first < p.tokens; p.first += plan.groups * plan.per_block)
        WEFT_TRY(launch(call, "post", fwd_streams<T, N, L, MODE>, s, p));
    return WEFT_OK;
}

template <class T, int N, stream_layout L>
static weft_status run_streams(const weft_call *call, const weft_mhc_post_fwd_args *a)
{
    const post_mode mode = post_mode_of(&a->bias, &a->dropout);
    if (!weft_has(&a->res)) {
        if constexpr (number<T>::dtype == WEFT_BF16) /* the usual case; others are not worth kernels of their own */
            if (mode == PLAIN) return run_mode<T, N, L, UNMIXED_PLAIN>(call, a);
        return run_mode<T, N, L, UNMIXED>(call, a);
    }
    switch (mode) {
    case PLAIN: return run_mode<T, N, L, PLAIN>(call, a);
    case BIASED: return run_mode<T, N, L, BIASED>(call, a);
    default: return run_mode<T, N, L, FULL>(call, a);
    }
}

template <class T, int N, stream_layout L> static bool fits(const weft_mhc_post_fwd_args *a)
{
    const int W = post_tile<T, N, L>::width;
    return streams_fit(&a->x, L, W) && streams_fit(&a->y, L, W) && row_fits(&a->f, W) && vector_fits(&a->bias, W);
}

template <class T, int N> static weft_status run(const weft_call *call, const void *args)
{
    const weft_mhc_post_fwd_args *a = (const weft_mhc_post_fwd_args *)args;
    if (call->tokens == 0) return WEFT_OK;
    if (fits<T, N, LAYOUT_NC>(a)) return run_streams<T, N, LAYOUT_NC>(call, a);
    if (fits<T, N, LAYOUT_CN>(a)) return run_streams<T, N, LAYOUT_CN>(call, a);
    return run_any<T>(call, args);
}

const weft_kernel weft_cuda_mhc_post_fwd[] = {POST_ROWS(bf16, run, run_any, NULL),
                                              POST_ROWS(f16, run, run_any, NULL),
                                              POST_ROWS(float, run, run_any, NULL),
                                              {}};
