/* SPDX-License-Identifier: Apache-2.0
 *
 * Expand-combine backward [M6]. Bytes per token, bf16: 6nC + 4C, each touched once; n = 4: reads 18C, writes 10C.
 *
 * A team of threads owns a token, because d_post and d_res are sums over its channels: each thread keeps n + n*n sums in
 * registers over its channels, then the lanes of a warp and the warps of the team are added in order. What a team is
 * depends on streams, channels, dtype and layout only. A thread has read all streams of its channels before it writes
 * one, so d_x may lie over d_y.
 *
 * Without res, x is not looked at and d_post is the only sum over channels.
 *
 * d_bias is a sum over tokens: with it a team takes a chunk of tokens and sums the unrounded d_f in shared memory, then
 * a second kernel adds the chunks. */
#include "core/status.h"
#include "cuda/common/reduce.cuh"
#include "cuda/mhc/mhc_post.cuh"

struct bwd_params {
    view x, f, bias, post, res, d_y, d_x, d_f, d_post, d_res;
    weft_dropout dropout;
    int64_t tokens, channels;
    int64_t chunks, chunk_tokens; /* tokens are handed out in chunks: of one where d_bias is not requested */
    float *partial;               /* [chunks][channels] of d_bias, or NULL */
    int32_t rows_at,
        row_floats; /* in shared memory: where teams sum d_f, floats of each; 0: they do so in `partial` */
    int32_t team, per_block;
    int64_t steps;
    int32_t in_out;
};

/* ---- sums ------------------------------------------------------------------------------------------------------------- */

/* Sums v[FROM ..] over the lanes of a warp, the largest power of two at a time, into room[FROM ..]. */
template <int M, int FROM = 0> static __device__ __forceinline__ void warp_totals(const float (&v)[M], float *room)
{
    if constexpr (FROM < M) {
        constexpr int left = M - FROM, P = left >= 32 ? 32 : left >= 16 ? 16 : left >= 8 ? 8 : left >= 4 ? 4 : 2;
        static_assert(left % 2 == 0, "n is even, and so is n + n*n");
        const int lane = threadIdx.x & 31;
        float part[P];
#pragma unroll
        for (int k = 0; k < P; k++) part[k] = v[FROM + k];
        warp_sums<P>(part);
        if ((lane & (32 / P - 1)) == 0) room[FROM + owner_index<P>(lane)] = part[0];
        warp_totals<M, FROM + P>(v, room);
    }
}

/* Sum e of a token: d_post, then the gradient of W by rows of o. */
static __device__ __forceinline__ void put_sum(const bwd_params &p, int n, int64_t token, int e, float sum)
{
    if (e < n) {
        if (has(p.d_post)) put(p.d_post, token * p.d_post.stride[0] + e * p.d_post.stride[1], sum);
    } else if (has(p.d_res)) {
        const int o = (e - n) / n, i = (e - n) - o * n, a = p.in_out ? i : o, b = p.in_out ? o : i;
        put(p.d_res, token * p.d_res.stride[0] + a * p.d_res.stride[1] + b * p.d_res.stride[2], sum);
    }
}

/* ---- element-wise part -------------------------------------------------------------------------------------------------- */

/* P channels: sums, d_x and d_f. gm is the part of d_y that dropout let through. With sums of d_post alone there is no mix. */
template <int N, int P, int M = N + N *N>
static __device__ __forceinline__ void
backward_channels(float (&d_x)[N][P], float (&d_f)[P], float (&sum)[M], const float (&x)[N][P],
                  const float (&g)[N][P], const float (&gm)[N][P], const float (&fb)[P], const coefs<N> &k)
{
#pragma unroll
    for (int q = 0; q < P; q++) {
#pragma unroll
        for (int o = 0; o < N; o++) {
            sum[o] = fmaf(gm[o][q], fb[q], sum[o]);
            if constexpr (M > N) {
#pragma unroll
                for (int i = 0; i < N; i++) sum[N + o * N + i] = fmaf(x[i][q], g[o][q], sum[N + o * N + i]);
            }
        }
        d_f[q] = k.post[0] * gm[0][q];
#pragma unroll
        for (int o = 1; o < N; o++) d_f[q] = fmaf(k.post[o], gm[o][q], d_f[q]);
#pragma unroll
        for (int i = 0; i < N; i++) {
            if constexpr (M > N) {
                d_x[i][q] = k.w[0][i] * g[0][q];
#pragma unroll
                for (int o = 1; o < N; o++) d_x[i][q] = fmaf(k.w[o][i], g[o][q], d_x[i][q]);
            } else {
                d_x[i][q] = g[i][q];
            }
        }
    }
}

/* A chunk's sum of d_f over its tokens, in shared or global memory; each element has one thread. */
template <int V> static __device__ __forceinline__ void add_to_row(float *row, const float (&d_f)[V], bool first)
{
    constexpr int A = V * (int)sizeof(float) < 16 ? V * (int)sizeof(float) : 16;
    struct alignas(A) floats {
        float v[V];
    } sum;
    if (!first) sum = *(const floats *)row;
#pragma unroll
    for (int q = 0; q < V; q++) sum.v[q] = first ? d_f[q] : sum.v[q] + d_f[q];
    *(floats *)row = sum;
}

/* The usual case: everything in the activation type, nothing to add to, no dropout; MODE is PLAIN, BIASED or UNMIXED_PLAIN. g becomes
 * d_x and f becomes d_f, in the registers they came in. `row` is where the chunk sums d_f, or NULL. */
template <class T, int N, stream_layout L, post_mode MODE>
static __device__ __forceinline__ void
backward_tile(const typename post_tile<T, N, L>::streams &x, typename post_tile<T, N, L>::streams &g,
              typename post_tile<T, N, L>::row &f, const coefs<N> &k,
              float (&sum)[post_mixes(MODE) ? N + N * N : N], const view &bias, int64_t c, float *row, bool first)
{
    constexpr int W = post_tile<T, N, L>::width, P = post_tile<T, N, L>::pair;
#pragma unroll
    for (int k0 = 0; k0 < W; k0 += P) {
        float xs[N][P] = {}, gs[N][P], d_x[N][P], fb[P], d_f[P];
        if constexpr (post_mixes(MODE)) unpack_pair<T, N, L, P>(xs, x, k0);
        unpack_pair<T, N, L, P>(gs, g, k0);
#pragma unroll
        for (int q = 0; q < P; q++) fb[q] = element<T>(f.word, k0 + q);
        if constexpr (MODE == BIASED) {
            float b[P];
            get_param<P>(b, bias, c + k0);
#pragma unroll
            for (int q = 0; q < P; q++) fb[q] = fb[q] + b[q];
        }
        backward_channels<N, P>(d_x, d_f, sum, xs, gs, gs, fb, k);
        if (MODE == BIASED && row) add_to_row<P>(row + c + k0, d_f, first);
        pack_pair<T, N, L, P>(g, d_x, k0);
        pack_row<T, W, P>(f, d_f, k0);
    }
}

/* Everything else, V channels at a time from memory to memory. */
template <class T, int N, stream_layout L, int V, int M>
static __device__ __forceinline__ void backward_any_tile(const bwd_params &p, const weft_mask &mask, int64_t token,
                                                         int64_t c, const coefs<N> &k, float (&sum)[M], float *row,
                                                         bool first)
{
    float x[N][V], g[N][V], gm[N][V], d_x[N][V], fb[V] = {}, d_f[V];
    get_streams<T, N, V, L>(g, p.d_y, token, c);
    if (has(p.d_res)) {
        load_streams<T, N, V, L>(x, (const T *)p.x.data + token * p.x.stride[0], p.x.stride[1], c);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
#pragma unroll
            for (int q = 0; q < V; q++) x[i][q] = 0.0f;
    }
    if (has(p.d_post)) {
        load<T, V>(fb, (const T *)p.f.data + token * p.f.stride[0] + c);
        if (has(p.bias)) {
            float bias[V];
            get_param<V>(bias, p.bias, c);
#pragma unroll
            for (int q = 0; q < V; q++) fb[q] = fb[q] + bias[q];
        }
    }
    uint32_t keep[N] = {};
    if (mask.on) keep_tile<N, V>(keep, mask, token, c);
#pragma unroll
    for (int o = 0; o < N; o++)
#pragma unroll
        for (int q = 0; q < V; q++)
            gm[o][q] = mask.on ? g[o][q] * (keep[o] >> q & 1 ? (float)mask.scale : 0.0f) : g[o][q];
    backward_channels<N, V>(d_x, d_f, sum, x, g, gm, fb, k);
    if (row) add_to_row<V>(row + c, d_f, first);
    if (has(p.d_x)) put_streams<T, N, V, L>(p.d_x, token, c, d_x);
    if (has(p.d_f)) put_wide<T, V>(p.d_f, token * p.d_f.stride[0] + c, d_f);
}

/* ---- kernels ------------------------------------------------------------------------------------------------------------ */

/* Teams of one warp share a block but never wait for each other. */
static __device__ __forceinline__ void team_barrier(int team)
{
    if (team == 32)
        __syncwarp();
    else
        __syncthreads();
}

/* Modes that ask: whatever the call has. The others: see backward_tile. All sum in the same order. */
template <class T, int N, stream_layout L, post_mode MODE>
static __global__ void __launch_bounds__(POST_BLOCK, N == 8 ? 1 : 2)
    bwd_streams(const __grid_constant__ bwd_params p)
{
    typedef post_tile<T, N, L> tile;
    constexpr int W = tile::width, K = tile::batch, COEFS = N + N * N, M = post_mixes(MODE) ? COEFS : N,
                  V = W < (N == 8 ? 2 : 4) ? W : (N == 8 ? 2 : 4);
    extern __shared__ float4 room[];
    const int mine = p.per_block == 1 ? 0 : threadIdx.x / 32, t = threadIdx.x - mine * p.team;
    coefs<N> &k = ((coefs<N> *)room)[mine];
    float *const totals = (float *)room + p.per_block * COEFS, *const my_totals = totals + (threadIdx.x / 32) * M;
    float *const rows = (float *)room + p.rows_at + mine * p.row_floats;
    const int64_t step = (int64_t)p.team * W, c0 = (int64_t)t * W;
    weft_mask mask = {};
    if constexpr (post_asks(MODE)) mask = weft_mask_open(&p.dropout, p.channels);

    for (int64_t chunk = (int64_t)blockIdx.x * p.per_block + mine; chunk < p.chunks;
         chunk += (int64_t)gridDim.x * p.per_block) {
        const int64_t begin = chunk * p.chunk_tokens;
        const int64_t end = begin + p.chunk_tokens < p.tokens ? begin + p.chunk_tokens : p.tokens;
        float *row = NULL;
        if constexpr (MODE != PLAIN && MODE != UNMIXED_PLAIN)
            if (p.partial) row = p.row_floats ? rows : p.partial + chunk * p.channels;

        for (int64_t token = begin; token < end; token++) {
            float sum[M];
#pragma unroll
            for (int e = 0; e < M; e++) sum[e] = 0.0f;

            if constexpr (!post_asks(MODE)) {
                const T *x_row = (const T *)p.x.data + token * p.x.stride[0];
                const T *g_row = (const T *)p.d_y.data + token * p.d_y.stride[0];
                const T *f_row = (const T *)p.f.data + token * p.f.stride[0];
                T *d_x_row = (T *)p.d_x.data + token * p.d_x.stride[0];
                T *d_f_row = (T *)p.d_f.data + token * p.d_f.stride[0];
                typename tile::streams x[K], g[K];
                typename tile::row f[K];
                for (int64_t s = 0, c = c0; s < p.steps; s++, c += K * step) {
#pragma unroll
                    for (int b = 0; b < K; b++)
                        if (c + b * step < p.channels) {
                            load_tile<T, N, L>(g[b], g_row, p.d_y.stride[1], c + b * step);
                            if constexpr (post_mixes(MODE))
                                load_tile<T, N, L>(x[b], x_row, p.x.stride[1], c + b * step);
                            load_raw(f[b], f_row + c + b * step);
                        }
                    if (s == 0) { /* overlaps the loads of the first streams */
                        for (int e = t; e < M; e += p.team)
                            ((float *)&k)[e] = coef_at(p.post, p.res, p.in_out, N, token, e);
                        team_barrier(p.team);
                    }
#pragma unroll
                    for (int b = 0; b < K; b++)
                        if (c + b * step < p.channels) {
                            backward_tile<T, N, L, MODE>(x[b], g[b], f[b], k, sum, p.bias, c + b * step, row,
                                                         token == begin);
                            if (has(p.d_x)) store_tile<T, N, L>(d_x_row, p.d_x.stride[1], c + b * step, g[b]);
                            if (has(p.d_f)) store_raw(d_f_row + c + b * step, f[b]);
                        }
                }
            } else {
                for (int e = t; e < M; e += p.team)
                    ((float *)&k)[e] = coef_at(p.post, p.res, p.in_out, N, token, e);
                team_barrier(p.team);
                for (int64_t c = c0; c < p.channels; c += step)
#pragma unroll 1
                    for (int v = 0; v < W; v += V)
                        backward_any_tile<T, N, L, V, M>(p, mask, token, c + v, k, sum, row, token == begin);
            }

            warp_totals<M>(sum, my_totals);
            team_barrier(p.team);
            const float *first = totals + mine * M; /* of the team's first warp */
            for (int e = t; e < M; e += p.team) {
                float total = first[e];
                for (int w = 1; w < p.team / 32; w++) total += first[w * M + e];
                put_sum(p, N, token, e, total);
            }
        }
        if (MODE != PLAIN && MODE != UNMIXED_PLAIN && row && p.row_floats)
            for (int64_t c = c0; c < p.channels; c += step)
#pragma unroll
                for (int q = 0; q < W; q++) p.partial[chunk * p.channels + c + q] = row[c + q];
    }
}

/* Any n, any strides: the block that owns a token takes `count` channels at a time through shared memory. A sum belongs
 * to one thread, or to one in each of `slices` of the channels while threads are left for that. */
template <class T>
static __global__ void __launch_bounds__(POST_BLOCK, 3)
    bwd_any(const __grid_constant__ bwd_params p, int n, int count)
{
    constexpr int MOST = (WEFT_MAX_STREAMS * (WEFT_MAX_STREAMS + 1) + POST_BLOCK - 1) / POST_BLOCK;
    extern __shared__ float4 room[];
    const bool mix = has(p.res);
    const int pitch = count + 1, COEFS = n + n * n, M = mix ? COEFS : n, tid = threadIdx.x;
    float *const k = (float *)room, *const x = k + COEFS, *const g = x + n * pitch, *const gm = g + n * pitch;
    float *const f = gm + n * pitch;
    const weft_mask mask = weft_mask_open(&p.dropout, p.channels);
    int slices = 1;
    /* by the sums that there are with res, so that those of d_post have the same order without it */
    while (slices < 32 && 2 * slices * COEFS <= POST_BLOCK) slices *= 2;
    const int slice = slices == 1 ? 0 : tid / COEFS, mine = tid - slice * COEFS; /* first of my sums */

    for (int64_t chunk = blockIdx.x; chunk < p.chunks; chunk += gridDim.x) {
        const int64_t begin = chunk * p.chunk_tokens;
        const int64_t end = begin + p.chunk_tokens < p.tokens ? begin + p.chunk_tokens : p.tokens;
        for (int64_t token = begin; token < end; token++) {
            float sum[MOST];
#pragma unroll
            for (int j = 0; j < MOST; j++) sum[j] = 0.0f;
            for (int64_t c0 = 0; c0 < p.channels; c0 += count) {
                const int here = (int)(p.channels - c0 < count ? p.channels - c0 : count);
                __syncthreads(); /* all have done with what was here before */
                for (int e = tid; c0 == 0 && e < M; e += POST_BLOCK)
                    k[e] = coef_at(p.post, p.res, p.in_out, n, token, e);
                for (int e = tid; mix && e < n * here; e += POST_BLOCK) {
                    const any_element at = any_split(e, n, here, any_along_channels(p.x));
                    const int64_t c = c0 + at.c, where = token * p.x.stride[0] + at.i * p.x.stride[1];
                    x[at.i * pitch + at.c] = widen(((const T *)p.x.data)[where + c * p.x.stride[2]]);
                }
                for (int e = tid; e < n * here; e += POST_BLOCK) {
                    const any_element at = any_split(e, n, here, any_along_channels(p.d_y));
                    const int64_t c = c0 + at.c, where = token * p.d_y.stride[0] + at.i * p.d_y.stride[1];
                    const float v = get(p.d_y, where + c * p.d_y.stride[2]);
                    g[at.i * pitch + at.c] = v;
                    gm[at.i * pitch + at.c] = mask.on ? v * any_factor(mask, token, at.i, c) : v;
                }
                for (int e = tid; e < here; e += POST_BLOCK) {
                    f[e] = widen(((const T *)p.f.data)[token * p.f.stride[0] + (c0 + e) * p.f.stride[1]]);
                    if (has(p.bias)) f[e] = f[e] + get(p.bias, (c0 + e) * p.bias.stride[0]);
                }
                __syncthreads();
#pragma unroll
                for (int j = 0; j < MOST; j++) {
                    const int e = mine + j * POST_BLOCK;
                    if (slice >= slices || e >= M || (j > 0 && slices > 1)) continue;
                    const int o = e < n ? e : (e - n) / n, i = e < n ? 0 : (e - n) - o * n;
                    const float *a = e < n ? f : x + i * pitch, *b = e < n ? gm + o * pitch : g + o * pitch;
                    for (int c = slice; c < here; c += slices) sum[j] = fmaf(a[c], b[c], sum[j]);
                }
                for (int e = tid; has(p.d_x) && e < n * here; e += POST_BLOCK) {
                    const any_element at = any_split(e, n, here, any_along_channels(p.d_x));
                    float v = mix ? k[n + at.i] * g[at.c] : g[at.i * pitch + at.c];
                    for (int o = 1; mix && o < n; o++) v = fmaf(k[n + o * n + at.i], g[o * pitch + at.c], v);
                    put(p.d_x, token * p.d_x.stride[0] + at.i * p.d_x.stride[1] + (c0 + at.c) * p.d_x.stride[2], v);
                }
                for (int e = tid; e < here; e += POST_BLOCK) {
                    float v = k[0] * gm[e], *sum_row = p.partial + chunk * p.channels + c0 + e;
                    for (int o = 1; o < n; o++) v = fmaf(k[o], gm[o * pitch + e], v);
                    if (p.partial) *sum_row = token == begin ? v : *sum_row + v;
                    if (has(p.d_f)) put(p.d_f, token * p.d_f.stride[0] + (c0 + e) * p.d_f.stride[1], v);
                }
            }
            if (slices == 1) {
#pragma unroll
                for (int j = 0; j < MOST; j++)
                    if (mine + j * POST_BLOCK < M) put_sum(p, n, token, mine + j * POST_BLOCK, sum[j]);
                continue;
            }
            __syncthreads();
            if (slice < slices) x[tid] = sum[0]; /* slices * COEFS <= POST_BLOCK fit into x */
            __syncthreads();
            if (tid < M) {
                float total = x[tid];
                for (int s = 1; s < slices; s++) total += x[s * COEFS + tid];
                put_sum(p, n, token, tid, total);
            }
        }
    }
}

/* d_bias from the chunks: warp w takes chunks w, w + 32, ..., then the warps are added in order. Without chunks, zero. */
static __global__ void __launch_bounds__(1024)
    bias_sum(view d_bias, const float *partial, int64_t chunks, int64_t channels)
{
    __shared__ float room[32][33];
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    for (int64_t c0 = (int64_t)blockIdx.x * 32; c0 < channels; c0 += (int64_t)gridDim.x * 32) {
        const int64_t c = c0 + lane;
        float sum = 0.0f;
        if (c < channels)
            for (int64_t r = warp; r < chunks; r += 32) sum += partial[r * channels + c];
        room[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && c < channels) {
            float total = room[0][lane];
            for (int w = 1; w < 32 && w < chunks; w++) total += room[w][lane];
            put(d_bias, c * d_bias.stride[0], total);
        }
        __syncthreads();
    }
}

/* ---- launches ------------------------------------------------------------------------------------------------------------- */

/* The partial sums of d_bias, which are all the workspace there is. */
static weft_arena lay_out(const weft_call *call, const weft_mhc_post_bwd_args *a, bwd_params *p)
{
    weft_arena arena = cuda_arena(call);
    p->chunks = p->tokens = call->tokens;
    p->chunk_tokens = 1;
    if (!weft_has(&a->d_bias.to)) return arena;
    const post_chunks c = weft_post_plan_chunks(call->tokens, call->channels);
    p->chunks = c.count;
    p->chunk_tokens = c.tokens;
    p->partial = (float *)weft_arena_take(&arena, sizeof(float) * (size_t)(c.count * call->channels));
    return arena;
}

static size_t workspace(const weft_call *call, const void *args)
{
    bwd_params p = {};
    weft_arena arena = lay_out(call, (const weft_mhc_post_bwd_args *)args, &p);
    return weft_arena_bytes(&arena);
}

static bwd_params params_of(const weft_call *call, const weft_mhc_post_bwd_args *a)
{
    bwd_params p = {};
    lay_out(call, a, &p);
    p.x = view_of(&a->x);
    p.f = view_of(&a->f);
    p.bias = view_of(&a->bias);
    p.post = view_of(&a->post);
    p.res = view_of(&a->res);
    p.d_y = view_of(&a->d_y);
    p.d_x = view_of(&a->d_x);
    p.d_f = view_of(&a->d_f);
    p.d_post = view_of(&a->d_post);
    p.d_res = view_of(&a->d_res);
    p.dropout = a->dropout;
    p.channels = call->channels;
    p.in_out = a->numerics.apply == WEFT_APPLY_IN_OUT;
    return p;
}

/* d_bias from partial[chunks][channels], sums of d_f over some tokens each. */
static weft_status finish(const weft_call *call, const weft_mhc_post_bwd_args *a, const bwd_params *p)
{
    if (!weft_has(&a->d_bias.to) || (p->chunks == 0 && a->d_bias.add)) return WEFT_OK;
    launch_shape s = {dim3(grid_of((call->channels + 31) / 32)), 1024};
    return launch(call, "d_bias", bias_sum, s, view_of(&a->d_bias), (const float *)p->partial, p->chunks,
                  call->channels);
}

template <class T> static weft_status run_any(const weft_call *call, const void *args)
{
    const weft_mhc_post_bwd_args *a = (const weft_mhc_post_bwd_args *)args;
    bwd_params p = params_of(call, a);
    const int n = (int)call->streams, count = weft_post_plan_any(call->tokens, n, call->channels).count;
    if (call->tokens > 0) {
        launch_shape s = {dim3(grid_of(p.chunks)), POST_BLOCK};
        s.shared = sizeof(float) * (size_t)(n + n * n + (3 * n + 1) * (count + 1));
        WEFT_TRY(launch(call, "post", bwd_any<T>, s, p, n, count));
    }
    return finish(call, a, &p);
}

template <class T, int N, stream_layout L, post_mode MODE>
static weft_status run_mode(const weft_call *call, const weft_mhc_post_bwd_args *a)
{
    constexpr int M = N + N * N;
    bwd_params p = params_of(call, a);
    const post_shape shape = post_shape_of<T, N, L>(call, sizeof(coefs<N>));
    const post_bwd_plan plan = weft_post_plan_bwd(&shape);
    const int64_t row = (call->channels + 3) / 4 * 4;
    p.team = plan.team;
    p.per_block = plan.per_block;
    p.steps = plan.steps;
    p.rows_at = ((plan.per_block + plan.block / 32) * M + 3) / 4 * 4;
    if (p.partial && row * plan.per_block * (int64_t)sizeof(float) <= POST_SHARED_ROW) p.row_floats = (int32_t)row;
    if (call->tokens > 0) {
        launch_shape s = {dim3(grid_of((p.chunks + plan.per_block - 1) / plan.per_block)), (unsigned)plan.block};
        s.shared = sizeof(float) * (size_t)(p.rows_at + plan.per_block * p.row_floats);
        WEFT_TRY(launch(call, "post", bwd_streams<T, N, L, MODE>, s, p));
    }
    return finish(call, a, &p);
}

/* Whole steps from token to token, also where there is only one: a token must not be summed in another way because it
 * is alone. */
static bool whole(const weft_tensor *t, int64_t unit)
{
    return !weft_has(t) || t->stride[0] % unit == 0;
}

/* The inputs decide which kernel sums, so that its bits do not depend on where results go or which are requested. */
template <class T, int N, stream_layout L> static bool inputs_fit(const weft_mhc_post_bwd_args *a)
{
    const int W = post_tile<T, N, L>::width, unit = L == LAYOUT_NC ? W : N * W;
    return streams_fit(&a->x, L, W) && streams_fit(&a->d_y, L, W) && row_fits(&a->f, W) &&
           vector_fits(&a->bias, W) && whole(&a->x, unit) && whole(&a->d_y, unit) && whole(&a->f, W);
}

/* FULL unless everything is in the activation type; a gradient that is not requested is only a store less. Without res there are a
 * mode for the usual case in bf16 and one for everything else. */
static post_mode mode_of(const weft_call *call, const weft_mhc_post_bwd_args *a)
{
    const weft_grad *grads[] = {&a->d_x, &a->d_f};
    const bool mix = weft_has(&a->res);
    bool plain = a->d_y.dtype == call->dtype && weft_has(&a->d_post.to) && (!mix || weft_has(&a->d_res.to));
    for (const weft_grad *g : grads) plain = plain && !(weft_has(&g->to) && (g->add || g->to.dtype != call->dtype));
    const post_mode mode = plain ? post_mode_of(&a->bias, &a->dropout) : FULL;
    if (mix) return mode;
    return mode == PLAIN && call->dtype == WEFT_BF16 ? UNMIXED_PLAIN : UNMIXED;
}

template <class T, int N, stream_layout L>
static weft_status run_streams(const weft_call *call, const weft_mhc_post_bwd_args *a)
{
    const post_mode mode = mode_of(call, a);
    if constexpr (number<T>::dtype == WEFT_BF16)
        if (mode == UNMIXED_PLAIN) return run_mode<T, N, L, UNMIXED_PLAIN>(call, a);
    switch (mode) {
    case PLAIN: return run_mode<T, N, L, PLAIN>(call, a);
    case BIASED: return run_mode<T, N, L, BIASED>(call, a);
    case UNMIXED: return run_mode<T, N, L, UNMIXED>(call, a);
    default: return run_mode<T, N, L, FULL>(call, a);
    }
}

/* Gradients of the streams that cannot be written tile by tile are left to a launch of their own. */
template <class T, int N, stream_layout L>
static weft_status run_layout(const weft_call *call, const weft_mhc_post_bwd_args *a)
{
    const int W = post_tile<T, N, L>::width, unit = L == LAYOUT_NC ? W : N * W;
    weft_mhc_post_bwd_args first = *a, rest = *a;
    const weft_grad none = {};
    rest.d_bias = rest.d_post = rest.d_res = none;
    (streams_fit(&a->d_x.to, L, W) && whole(&a->d_x.to, unit) ? rest : first).d_x = none;
    (row_fits(&a->d_f.to, W) && whole(&a->d_f.to, W) ? rest : first).d_f = none;
    const bool summed = weft_has(&first.d_bias.to) || weft_has(&first.d_post.to) || weft_has(&first.d_res.to);
    if (summed || weft_has(&first.d_x.to) || weft_has(&first.d_f.to)) {
        const weft_status status = run_streams<T, N, L>(call, &first);
        if (status != WEFT_OK) return status;
    }
    return weft_has(&rest.d_x.to) || weft_has(&rest.d_f.to) ? run_any<T>(call, &rest) : WEFT_OK;
}

template <class T, int N> static weft_status run(const weft_call *call, const void *args)
{
    const weft_mhc_post_bwd_args *a = (const weft_mhc_post_bwd_args *)args;
    if (inputs_fit<T, N, LAYOUT_NC>(a)) return run_layout<T, N, LAYOUT_NC>(call, a);
    if (inputs_fit<T, N, LAYOUT_CN>(a)) return run_layout<T, N, LAYOUT_CN>(call, a);
    return run_any<T>(call, args);
}

const weft_kernel weft_cuda_mhc_post_bwd[] = {POST_ROWS(bf16, run, run_any, workspace),
                                              POST_ROWS(f16, run, run_any, workspace),
                                              POST_ROWS(float, run, run_any, workspace),
                                              {}};
