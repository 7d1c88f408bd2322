/* SPDX-License-Identifier: Apache-2.0
 *
 * Multi-layer replay [M12]: a thread keeps its channels of all streams in registers from layer to layer, rounded as if
 * stored, with the arithmetic of the single operators (mhc_post.cuh). Bytes per token and layer, bf16: 2C for f, 2C for
 * u, 2nC for y where they are requested; the streams themselves are read once per launch.
 *
 * The layers of a launch travel as kernel parameters, because the caller's array lives on the host and only during the
 * call. v needs a sum over all channels, so it is left to the rmsnorm operator afterwards; where u is not requested, u goes
 * to v and is normalised in place. */
#include "core/status.h"
#include "core/struct_size.h"
#include "cuda/common/chain.h"
#include "cuda/mhc/mhc_post.cuh"

enum { LAYERS = 8 }; /* of a launch at most */

struct replay_layer {
    view pre, f, bias, post, res, u,
        y; /* res absent: the identity; u absent: pre is not looked at; f absent: the replay ends with u */
    weft_dropout dropout;
};

struct replay_params {
    view x;
    int64_t tokens, channels;
    int64_t first; /* token that the launch begins with */
    int32_t team, per_block, spans, in_out;
    int32_t layers;
    replay_layer layer[LAYERS];
};
static_assert(sizeof(replay_params) <= 4000, "kernel parameters are 4 KB at most");

template <int N> struct alignas(N == 2 ? 8 : 16) replay_coefs {
    float pre[N];
    coefs<N> post;
};

/* Element e of a layer's coefficients: pre, then as in post. What a layer does not use is zero. */
static __device__ __forceinline__ float layer_coef(const replay_params &p, const replay_layer &l, int n,
                                                   int64_t token, int e)
{
    if (e < n) return has(l.u) ? get(l.pre, token * l.pre.stride[0] + e * l.pre.stride[1]) : 0.0f;
    return has(l.f) && (e < 2 * n || has(l.res)) ? coef_at(l.post, l.res, p.in_out, n, token, e - n) : 0.0f;
}

/* x of a tile becomes y, a pair of channels at a time: whole tiles in fp32 would leave room for a third of the warps. */
template <class T, int N, stream_layout L, bool MIX>
static __device__ __forceinline__ void next_tile(typename post_tile<T, N, L>::streams &x,
                                                 const typename post_tile<T, N, L>::row &f, const coefs<N> &k,
                                                 const post_extra<N, post_tile<T, N, L>::width> &extra)
{
    typedef post_tile<T, N, L> tile;
    constexpr int W = tile::width, P = tile::pair;
#pragma unroll
    for (int k0 = 0; k0 < W; k0 += P) {
        post_extra<N, P> part = {extra.biased, extra.masked, extra.scale};
        float v[N][P], y[N][P], fb[P];
        unpack_pair<T, N, L, P>(v, x, k0);
#pragma unroll
        for (int q = 0; q < P; q++) {
            fb[q] = element<T>(f.word, k0 + q);
            if (extra.biased) fb[q] = fb[q] + extra.bias[k0 + q];
        }
#pragma unroll
        for (int o = 0; o < N; o++) {
            if (extra.masked) part.keep[o] = extra.keep[o] >> k0;
            post_output<N, P, MIX>(y[o], o, v, fb, k, part);
        }
        pack_pair<T, N, L, P>(x, y, k0);
    }
}

template <class T, int N, stream_layout L, post_mode MODE>
static __device__ __forceinline__ void
replay_post(typename post_tile<T, N, L>::streams &x, const typename post_tile<T, N, L>::row &f, const coefs<N> &k,
            const replay_layer &layer, const weft_mask &mask, int64_t token, int64_t c)
{
    post_extra<N, post_tile<T, N, L>::width> extra;
    load_extra<N, post_tile<T, N, L>::width, MODE>(extra, layer.bias, mask, token, c);
    if (has(layer.res))
        next_tile<T, N, L, true>(x, f, k, extra);
    else
        next_tile<T, N, L, false>(x, f, k, extra);
}

/* Blocks of a multiprocessor: a layer waits for f, so warps must hide its latency. */
template <class T, int N> static constexpr int replay_blocks()
{
    return sizeof(T) == 2 && N <= 4 ? 3 : 1;
}

template <class T, int N, stream_layout L>
static __global__ void __launch_bounds__(POST_BLOCK, replay_blocks<T, N>())
    replay_streams(const __grid_constant__ replay_params p)
{
    typedef post_tile<T, N, L> tile;
    constexpr int W = tile::width, K = tile::batch, M = 2 * N + N * N;
    static_assert(sizeof(replay_coefs<N>) == M * sizeof(float), "the coefficients are filled as an array");
    extern __shared__ float4 room[];
    const int mine = p.per_block == 1 ? 0 : threadIdx.x / p.team, t = threadIdx.x - mine * p.team;
    const unsigned group = blockIdx.x / (unsigned)p.spans, span = blockIdx.x - group * (unsigned)p.spans;
    const int64_t first = p.first + (int64_t)group * p.per_block, token = first + mine;
    const int64_t end = mine < p.per_block && token < p.tokens ? p.channels : 0;
    const int64_t c0 = ((int64_t)span * K * p.team + t) * W, step = (int64_t)p.team * W;

    typename tile::streams x[K];
    typename tile::row f[K];
#pragma unroll
    for (int b = 0; b < K; b++)
        if (c0 + b * step < end) {
            load_tile<T, N, L>(x[b], (const T *)p.x.data + token * p.x.stride[0], p.x.stride[1], c0 + b * step);
            if (has(p.layer[0].f))
                load_raw(f[b], (const T *)p.layer[0].f.data + token * p.layer[0].f.stride[0] + c0 + b * step);
        }
    for (int e = threadIdx.x; e < M * p.layers * p.per_block; e += blockDim.x) {
        const int m = e / (M * p.layers), rest = e - m * M * p.layers, l = rest / M;
        if (first + m < p.tokens) ((float *)room)[e] = layer_coef(p, p.layer[l], N, first + m, rest - l * M);
    }
    __syncthreads();

    const replay_coefs<N> *coef = (const replay_coefs<N> *)room + mine * p.layers;
    for (int l = 0; l < p.layers; l++, coef++) {
        const replay_layer &layer = p.layer[l];
#pragma unroll
        for (int b = 0; b < K; b++) {
            const int64_t c = c0 + b * step;
            if (!has(layer.u) || c >= end) continue;
            typename tile::row u;
            aggregate_forward<T, N, L>(u, x[b], coef->pre);
            store_raw((T *)layer.u.data + token * layer.u.stride[0] + c, u);
        }
        if (!has(layer.f)) break;
        const bool more = l + 1 < p.layers && has(p.layer[l + 1].f);
        const weft_mask mask = weft_mask_open(&layer.dropout, p.channels);
#pragma unroll
        for (int b = 0; b < K; b++) {
            const int64_t c = c0 + b * step;
            if (c >= end) continue;
            const typename tile::row now = f[b];
            if (more) {
                const view &ahead = p.layer[l + 1].f;
                load_raw(f[b], (const T *)ahead.data + token * ahead.stride[0] + c);
            }
            if (has(layer.bias) || mask.on)
                replay_post<T, N, L, FULL>(x[b], now, coef->post, layer, mask, token, c);
            else
                replay_post<T, N, L, PLAIN>(x[b], now, coef->post, layer, mask, token, c);
            if (has(layer.y))
                store_tile<T, N, L>((T *)layer.y.data + token * layer.y.stride[0], layer.y.stride[1], c, x[b]);
        }
    }
}

/* Any n, any strides: a block takes `count` channels of a token through all layers in shared memory. */
template <class T>
static __global__ void __launch_bounds__(POST_BLOCK)
    replay_any(const __grid_constant__ replay_params p, int n, int count)
{
    extern __shared__ float4 room[];
    const int pitch = count + 1, M = 2 * n + n * n, tid = threadIdx.x;
    float *const pre = (float *)room, *const post = pre + n, *const w = post + n, *const f = pre + M;
    float *x = f + pitch, *y = x + n * pitch;
    const unsigned group = blockIdx.x / (unsigned)p.spans, span = blockIdx.x - group * (unsigned)p.spans;
    const int64_t token = p.first + group, c0 = (int64_t)span * count;
    if (token >= p.tokens) return;
    const int here = (int)(p.channels - c0 < count ? p.channels - c0 : count);

    for (int e = tid; e < n * here; e += POST_BLOCK) {
        const any_element at = any_split(e, n, here, any_along_channels(p.x));
        const int64_t i = token * p.x.stride[0] + at.i * p.x.stride[1] + (c0 + at.c) * p.x.stride[2];
        x[at.i * pitch + at.c] = widen(((const T *)p.x.data)[i]);
    }
    for (int l = 0; l < p.layers; l++) {
        const replay_layer &layer = p.layer[l];
        const weft_mask mask = weft_mask_open(&layer.dropout, p.channels);
        for (int e = tid; e < M; e += POST_BLOCK) pre[e] = layer_coef(p, layer, n, token, e);
        for (int e = tid; has(layer.f) && e < here; e += POST_BLOCK) {
            f[e] = widen(((const T *)layer.f.data)[token * layer.f.stride[0] + (c0 + e) * layer.f.stride[1]]);
            if (has(layer.bias)) f[e] = f[e] + get(layer.bias, (c0 + e) * layer.bias.stride[0]);
        }
        __syncthreads();
        for (int e = tid; has(layer.u) && e < here; e += POST_BLOCK)
            ((T *)layer.u.data)[token * layer.u.stride[0] + (c0 + e) * layer.u.stride[1]] =
                narrow<T>(any_aggregate(pre, x + e, pitch, n));
        if (!has(layer.f)) return;
        for (int e = tid; e < n * here; e += POST_BLOCK) {
            const any_element at = any_split(e, n, here, any_along_channels(layer.y));
            const int64_t c = c0 + at.c;
            float v = post[at.i] * f[at.c];
            if (mask.on) v = v * any_factor(mask, token, at.i, c);
            const T out = narrow<T>(has(layer.res) ? any_post(w + at.i * n, x + at.c, pitch, n, v)
                                                   : x[at.i * pitch + at.c] + v);
            y[at.i * pitch + at.c] = widen(out);
            if (has(layer.y))
                ((T *)layer.y.data)[token * layer.y.stride[0] + at.i * layer.y.stride[1] + c * layer.y.stride[2]] =
                    out;
        }
        __syncthreads();
        float *const old = x;
        x = y;
        y = old;
    }
}

/* ---- launches ------------------------------------------------------------------------------------------------------- */

/* A layer of the caller's: in place, or completed. */
struct layer_at {
    weft_mhc_replay_layer room;
    const weft_mhc_replay_layer *layer;
    layer_at(const weft_mhc_replay_fwd_args *a, int32_t l) : layer(weft_replay_layer_at(a->layers, l, &room))
    {
    }
    layer_at(const layer_at &) = delete;
    const weft_mhc_replay_layer *operator->() const
    {
        return layer;
    }
    operator const weft_mhc_replay_layer *() const
    {
        return layer;
    }
};

/* Layers [from, end) go into one launch. It ends where y is requested, so that the next one can begin with that. */
static int32_t launch_end(const weft_mhc_replay_fwd_args *a, int32_t from)
{
    const int32_t most = from + LAYERS < a->num_layers ? from + LAYERS : a->num_layers;
    if (most == a->num_layers) return most;
    for (int32_t end = most; end > from; end--)
        if (weft_has(&layer_at(a, end - 1)->y)) return end;
    return most;
}

static const weft_tensor *u_of(const weft_mhc_replay_layer *l)
{
    return weft_has(&l->u) ? &l->u : &l->v;
}

static weft_rmsnorm_fwd_args norm_of(const weft_mhc_replay_layer *l)
{
    weft_rmsnorm_fwd_args norm = {};
    norm.struct_size = sizeof norm;
    norm.eps = l->sub_eps;
    norm.u = *u_of(l);
    norm.weight = l->sub_weight;
    norm.v = l->v;
    return norm;
}

struct replay_room {
    void *streams; /* of a layer between two launches, where y is not requested */
    void *norm;    /* rmsnorm's own workspace */
};

static weft_arena lay_out(const weft_call *call, const weft_mhc_replay_fwd_args *a, replay_room *r)
{
    weft_arena arena = cuda_arena(call);
    bool carry = false;
    size_t norm_bytes = 0;
    for (int32_t end = launch_end(a, 0); end < a->num_layers; end = launch_end(a, end))
        carry = carry || !weft_has(&layer_at(a, end - 1)->y);
    for (int32_t l = 0; l < a->num_layers; l++) {
        const layer_at layer(a, l);
        if (!weft_has(&layer->v)) continue;
        const weft_rmsnorm_fwd_args norm = norm_of(layer);
        const size_t bytes = chain_bytes(call, weft_cuda_rmsnorm_fwd, &norm);
        if (bytes > norm_bytes) norm_bytes = bytes;
    }
    const int64_t elements = call->tokens * call->streams * call->channels;
    r->streams = carry ? weft_arena_take(&arena, (size_t)elements * weft_dtype_size(call->dtype)) : NULL;
    r->norm = norm_bytes ? weft_arena_take(&arena, norm_bytes) : NULL;
    return arena;
}

static size_t workspace(const weft_call *call, const void *args)
{
    replay_room r;
    weft_arena arena = lay_out(call, (const weft_mhc_replay_fwd_args *)args, &r);
    return weft_arena_bytes(&arena);
}

static replay_layer layer_of(const weft_mhc_replay_layer *l)
{
    replay_layer r = {};
    r.pre = view_of(&l->pre);
    r.f = view_of(&l->f);
    r.bias = view_of(&l->bias);
    r.post = view_of(&l->post);
    r.res = view_of(&l->res);
    r.u = view_of(u_of(l));
    r.y = view_of(&l->y);
    r.dropout = l->dropout;
    return r;
}

/* Launch after launch; `streams` runs one, with the layers and x filled in. `swapped`: streams in the workspace are
 * (C, n). */
template <class Streams>
static weft_status run_layers(const weft_call *call, const weft_mhc_replay_fwd_args *a, bool swapped,
                              Streams streams)
{
    replay_room r;
    weft_tensor x = a->x, carried;
    if (call->tokens == 0) return WEFT_OK;
    lay_out(call, a, &r);
    carried = swapped ? weft_dense3_swapped(r.streams, call->dtype, call->tokens, call->streams, call->channels)
                      : weft_dense3(r.streams, call->dtype, call->tokens, call->streams, call->channels);
    for (int32_t from = 0, end; from < a->num_layers; from = end) {
        end = launch_end(a, from);
        replay_params p = {};
        p.x = view_of(&x);
        p.tokens = call->tokens;
        p.channels = call->channels;
        p.in_out = a->numerics.apply == WEFT_APPLY_IN_OUT;
        p.layers = end - from;
        for (int32_t l = from; l < end; l++) p.layer[l - from] = layer_of(layer_at(a, l));
        x = weft_has(&layer_at(a, end - 1)->y) ? layer_at(a, end - 1)->y : carried;
        if (end < a->num_layers) p.layer[end - from - 1].y = view_of(&x);
        WEFT_TRY(streams(&p));
        for (int32_t l = from; l < end; l++) {
            const layer_at layer(a, l);
            if (!weft_has(&layer->v)) continue;
            const weft_rmsnorm_fwd_args norm = norm_of(layer);
            WEFT_TRY(chain_run(call, weft_cuda_rmsnorm_fwd, &norm, r.norm));
        }
    }
    return WEFT_OK;
}

template <class T> static weft_status run_any(const weft_call *call, const void *args)
{
    const int n = (int)call->streams;
    const post_any_plan plan = weft_post_plan_any(call->tokens, n, call->channels);
    launch_shape s = {dim3((unsigned)(plan.spans * plan.groups)), POST_BLOCK};
    s.shared = sizeof(float) * (size_t)(2 * n + n * n + (2 * n + 1) * (plan.count + 1));
    return run_layers(call, (const weft_mhc_replay_fwd_args *)args, false, [&](replay_params *p) {
        p->spans = plan.spans;
        for (; p->first < p->tokens; p->first += plan.groups)
            WEFT_TRY(launch(call, "replay", replay_any<T>, s, *p, n, plan.count));
        return WEFT_OK;
    });
}

template <class T, int N, stream_layout L>
static weft_status run_streams(const weft_call *call, const weft_mhc_replay_fwd_args *a)
{
    const int most = a->num_layers < LAYERS ? a->num_layers : LAYERS;
    const post_shape shape = post_shape_of<T, N, L>(call, most * (int)sizeof(replay_coefs<N>));
    const post_fwd_plan plan = weft_post_plan_fwd(&shape);
    launch_shape s = {dim3((unsigned)(plan.spans * plan.groups)), (unsigned)plan.block};
    s.shared = (size_t)plan.shared;
    return run_layers(call, a, L == LAYOUT_CN, [&](replay_params *p) {
        p->team = plan.team;
        p->per_block = plan.per_block;
        p->spans = plan.spans;
        for (; p->first < p->tokens; p->first += plan.groups * plan.per_block)
            WEFT_TRY(launch(call, "replay", replay_streams<T, N, L>, s, *p));
        return WEFT_OK;
    });
}

template <class T, int N, stream_layout L> static bool fits(const weft_mhc_replay_fwd_args *a)
{
    const int W = post_tile<T, N, L>::width;
    bool fit = streams_fit(&a->x, L, W);
    for (int32_t l = 0; fit && l < a->num_layers; l++) {
        const layer_at layer(a, l);
        fit = row_fits(&layer->f, W) && row_fits(u_of(layer), W) && vector_fits(&layer->bias, W) &&
              streams_fit(&layer->y, L, W);
    }
    return fit;
}

template <class T, int N> static weft_status run(const weft_call *call, const void *args)
{
    const weft_mhc_replay_fwd_args *a = (const weft_mhc_replay_fwd_args *)args;
    if (fits<T, N, LAYOUT_NC>(a)) return run_streams<T, N, LAYOUT_NC>(call, a);
    if (fits<T, N, LAYOUT_CN>(a)) return run_streams<T, N, LAYOUT_CN>(call, a);
    return run_any<T>(call, args);
}

const weft_kernel weft_cuda_mhc_replay_fwd[] = {POST_ROWS(bf16, run, run_any, workspace),
                                                POST_ROWS(f16, run, run_any, workspace),
                                                POST_ROWS(float, run, run_any, workspace),
                                                {}};
