/* SPDX-License-Identifier: Apache-2.0
 *
 * Aggregate n -> 1 [M5]. Bytes per token, bf16: forward 2nC + 2C; backward 4nC + 2C.
 * Forward has no sums over channels: teams take segments of rows. Backward: a team owns a token, for d_pre's sake. */
#include "cuda/common/launch.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/mhc/mhc_aggregate.cuh"

/* ---- forward ------------------------------------------------------------------------------------------------------ */

struct fwd_task {
    view x, pre, u;
    int64_t tokens, channels;
    int n;
    weft_rows_team team;
    divider split; /* of a team's number into token and segment; element by element: into token and channel */
};

/* u = sum_i pre[i] x[i], streams in order: replay computes the same bits. Channels are counted in 32 bits: n * C is at
 * most 2^31, and n at least 2. */
template <class T, int N, stream_layout L> static __global__ void __launch_bounds__(256, 4) fwd_kernel(fwd_task a)
{
    wait_for_previous();
    constexpr int W = tiles_of<T, N, L>::width, K = tiles_of<T, N, L>::count;
    const place p = place_of(a.team);
    const int step = a.team.lanes * W, channels = (int)a.channels;
    const int64_t teams = a.tokens * a.split.by, stride = (int64_t)gridDim.x * a.team.per_block;
    for (int64_t team = (int64_t)blockIdx.x * a.team.per_block + p.slot; team < teams; team += stride) {
        int64_t segment;
        const int64_t token = divide(team, a.split, &segment);
        const int c = (int)segment * (step * K) + p.lane * W;
        const T *x = (const T *)a.x.data + token * a.x.stride[0];
        T *u = (T *)a.u.data + token * a.u.stride[0];
        raw_tile<T, N, W, L> r[K];
        float pre[N];
#pragma unroll
        for (int j = 0; j < K; j++)
            if (c + j * step < channels) load_tile(r[j], x, a.x.stride[1], c + j * step);
        get_coefs(pre, a.pre, token);
#pragma unroll
        for (int j = 0; j < K; j++) {
            float v[N][W], sum[W];
            if (c + j * step >= channels) continue;
            unpack_tile(v, r[j]);
            aggregate(sum, pre, v);
            store<T, W>(u + c + j * step, sum);
        }
    }
}

/* Any number of streams, any strides: a thread per channel, four streams at a time. */
template <class T> static __global__ void __launch_bounds__(256) fwd_any_kernel(fwd_task a)
{
    wait_for_previous();
    const int64_t all = a.tokens * a.channels, stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t item = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; item < all; item += stride) {
        int64_t c;
        const int64_t token = divide(item, a.split, &c);
        const T *x = (const T *)a.x.data + token * a.x.stride[0] + c * a.x.stride[2];
        float sum = 0.0f;
        for (int first = 0; first < a.n; first += 4) {
            T v[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (first + i < a.n) v[i] = x[(first + i) * a.x.stride[1]];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (first + i >= a.n) continue;
                const float pre = get(a.pre, at(a.pre, token, first + i));
                sum = first + i == 0 ? pre * widen(v[i]) : fmaf(pre, widen(v[i]), sum);
            }
        }
        ((T *)a.u.data)[at(a.u, token, c)] = narrow<T>(sum);
    }
}

static fwd_task fwd_task_of(const weft_call *call, const weft_mhc_aggregate_fwd_args *a)
{
    return {
        view_of(&a->x), view_of(&a->pre), view_of(&a->u), call->tokens, call->channels, (int)call->streams, {}, {}};
}

template <class T> static weft_status fwd_any(const weft_call *call, const void *args)
{
    fwd_task task = fwd_task_of(call, (const weft_mhc_aggregate_fwd_args *)args);
    if (call->tokens == 0) return WEFT_OK;
    const weft_rows_flat plan = weft_rows_plan_flat(call->tokens * call->channels, 1, 1, 1, call->sms);
    task.split = divider_of(call->channels);
    return launch(call, "aggregate", fwd_any_kernel<T>,
                  {dim3((unsigned)plan.grid), (unsigned)plan.block, 0, OVERLAP}, task);
}

template <class T, int N, stream_layout L>
static weft_status fwd_fast(const weft_call *call, const weft_mhc_aggregate_fwd_args *a)
{
    using tiles = tiles_of<T, N, L>;
    fwd_task task = fwd_task_of(call, a);
    const weft_rows_flat plan =
        weft_rows_plan_flat(call->tokens, call->channels, tiles::width, tiles::count, call->sms);
    task.team = plan.team;
    task.split = divider_of(plan.segments);
    return launch(call, "aggregate", fwd_kernel<T, N, L>,
                  {dim3((unsigned)plan.grid), (unsigned)plan.block, 0, OVERLAP}, task);
}

template <class T, int N, stream_layout L> static bool fwd_fits(const weft_mhc_aggregate_fwd_args *a)
{
    constexpr int W = stream_tile<T, N, L>::width;
    return streams_fit(&a->x, L, W) && row_fits(&a->u, W);
}

template <class T, int N> static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_mhc_aggregate_fwd_args *a = (const weft_mhc_aggregate_fwd_args *)args;
    if (call->tokens == 0) return WEFT_OK;
    if (fwd_fits<T, N, LAYOUT_NC>(a)) return fwd_fast<T, N, LAYOUT_NC>(call, a);
    if (fwd_fits<T, N, LAYOUT_CN>(a)) return fwd_fast<T, N, LAYOUT_CN>(call, a);
    return fwd_any<T>(call, args);
}

/* ---- backward ----------------------------------------------------------------------------------------------------- */

enum { BWD_BLOCK = 256, ANY_STREAMS = 4 };

/* Blocks on a multiprocessor, and streams to write at a time where more than d_u is read for it: as many as the registers
 * allow. For other GPUs the compiler needs a few more for the same code. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
enum { BWD_RESIDENT = 2, PUT_STREAMS = 2 };
#else
enum { BWD_RESIDENT = 3, PUT_STREAMS = 4 };
#endif

struct bwd_task {
    view x, pre, d_u, d_x, d_pre;
    int64_t tokens, channels;
    int n;
    weft_rows_team team;
};

/* d_x of M streams, from first on. */
template <int M, int N, int W>
static __device__ __forceinline__ void scale_streams(float (&d_x)[M][W], const float (&pre)[N], int first,
                                                     const float (&d_u)[W])
{
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int k = 0; k < W; k++) d_x[i][k] = pre[first + i] * d_u[k];
}

/* d_x[i] = pre[i] d_u;  d_pre[i] = sum_c d_u[c] x[i,c]: a lane over its tiles, then over the team.
 * PLAIN: both are requested, all of them have dtype T, nothing is added to. */
template <class T, int N, stream_layout L, bool PLAIN>
static __global__ void __launch_bounds__(BWD_BLOCK, PLAIN &&N > 2 ? BWD_RESIDENT : 2) bwd_kernel(bwd_task a)
{
    constexpr int W = tiles_of<T, N, L>::width, K = tiles_of<T, N, L>::count;
    __shared__ float room[BWD_BLOCK / 32 * N];
    const place p = place_of(a.team);
    const int step = a.team.lanes * W;
    const int64_t stride = (int64_t)gridDim.x * a.team.per_block;
    const bool sums = PLAIN || has(a.d_pre), streams = PLAIN || has(a.d_x);
    for (int64_t base = (int64_t)blockIdx.x * a.team.per_block; base < a.tokens; base += stride) {
        const int64_t token = base + p.slot;
        const int end = token < a.tokens ? (int)a.channels : 0;
        const T *x = (const T *)a.x.data + token * a.x.stride[0];
        float sum[N], pre[N];
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] = 0.0f;
        for (int c = p.lane * W; c < end; c += step * K) {
            raw_tile<T, N, W, L> r[K];
            wide_words<T, W, PLAIN> g[K];
#pragma unroll
            for (int j = 0; j < K; j++) {
                const int cj = c + j * step;
                if (cj >= end) continue;
                load_wide(g[j], a.d_u, token * a.d_u.stride[0] + cj);
                if (sums) load_tile(r[j], x, a.x.stride[1], cj);
            }
            if (streams && c == p.lane * W) get_coefs(pre, a.pre, token);
#pragma unroll
            for (int j = 0; j < K; j++) {
                const int cj = c + j * step;
                float v[N][W], d[W];
                if (cj >= end) continue;
                unpack_wide(d, g[j], a.d_u);
                if (sums) {
                    unpack_tile(v, r[j]);
#pragma unroll
                    for (int i = 0; i < N; i++)
#pragma unroll
                        for (int k = 0; k < W; k++) sum[i] = fmaf(d[k], v[i][k], sum[i]);
                }
                if (!streams) continue;
                if constexpr (PLAIN) {
                    scale_streams(v, pre, 0, d);
                    store_streams<T, N, W, L>((T *)a.d_x.data + token * a.d_x.stride[0], a.d_x.stride[1], cj, v);
                } else {
                    /* Few streams at a time: with what is there and what is added, eight are more than the registers. */
                    constexpr int M = L == LAYOUT_CN || N <= PUT_STREAMS ? N : 2;
                    float w[M][W];
#pragma unroll
                    for (int first = 0; first < N; first += M) {
                        scale_streams(w, pre, first, d);
                        put_streams<T, M, W, L>(a.d_x, token, first * a.d_x.stride[1] + cj, w);
                    }
                }
            }
        }
        if (!sums) continue;
        team_sums<N>(sum, a.team, room);
        if (end) put_coefs<N>(a.d_pre, token, 0, N, sum, p.lane, a.team.lanes);
    }
}

/* Any number of streams, any strides: channel by channel, four streams at a time. */
template <class T> static __global__ void __launch_bounds__(BWD_BLOCK) bwd_any_kernel(bwd_task a)
{
    constexpr int M = ANY_STREAMS;
    __shared__ float room[BWD_BLOCK / 32 * M];
    const place p = place_of(a.team);
    const int64_t stride = (int64_t)gridDim.x * a.team.per_block;
    const bool sums = has(a.d_pre), streams = has(a.d_x);
    for (int64_t base = (int64_t)blockIdx.x * a.team.per_block; base < a.tokens; base += stride) {
        const int64_t token = base + p.slot, end = token < a.tokens ? a.channels : 0;
        for (int first = 0; first < a.n; first += M) {
            float sum[M], pre[M];
#pragma unroll
            for (int i = 0; i < M; i++) {
                sum[i] = pre[i] = 0.0f;
                if (end && streams && first + i < a.n) pre[i] = get(a.pre, at(a.pre, token, first + i));
            }
            const T *x = (const T *)a.x.data + token * a.x.stride[0] + first * a.x.stride[1];
            const int64_t d_x = token * a.d_x.stride[0] + first * a.d_x.stride[1];
            for (int64_t c = p.lane; c < end; c += a.team.lanes) {
                T v[M];
#pragma unroll
                for (int i = 0; i < M; i++)
                    if (sums && first + i < a.n) v[i] = x[i * a.x.stride[1] + c * a.x.stride[2]];
                const float d = get(a.d_u, at(a.d_u, token, c));
#pragma unroll
                for (int i = 0; i < M; i++) {
                    if (first + i >= a.n) continue;
                    if (sums) sum[i] = fmaf(d, widen(v[i]), sum[i]);
                    if (streams) put(a.d_x, d_x + i * a.d_x.stride[1] + c * a.d_x.stride[2], pre[i] * d);
                }
            }
            if (!sums) continue;
            team_sums<M>(sum, a.team, room);
            if (end) put_coefs<M>(a.d_pre, token, first, a.n, sum, p.lane, a.team.lanes);
        }
    }
}

static bwd_task bwd_task_of(const weft_call *call, const weft_mhc_aggregate_bwd_args *a)
{
    return {view_of(&a->x),   view_of(&a->pre),   view_of(&a->d_u),
            view_of(&a->d_x), view_of(&a->d_pre), call->tokens,
            call->channels,   (int)call->streams, {}};
}

static weft_status bwd_launch(const weft_call *call, void (*kernel)(bwd_task), bwd_task task, int width, int tiles)
{
    const weft_rows_sum plan = weft_rows_plan_sum(call->tokens, call->channels, width, tiles, BWD_BLOCK);
    task.team = plan.team;
    return launch(call, "aggregate", kernel, {dim3((unsigned)plan.grid), (unsigned)plan.block}, task);
}

template <class T> static weft_status bwd_any(const weft_call *call, const void *args)
{
    const bwd_task task = bwd_task_of(call, (const weft_mhc_aggregate_bwd_args *)args);
    if (call->tokens == 0 || !(has(task.d_x) || has(task.d_pre))) return WEFT_OK;
    return bwd_launch(call, bwd_any_kernel<T>, task, 1, 4);
}

/* What d_pre's sum reads decides its order, so that it does not depend on where d_x lies. */
template <class T, int N, stream_layout L> static bool bwd_fits(const weft_mhc_aggregate_bwd_args *a)
{
    constexpr int W = stream_tile<T, N, L>::width, unit = L == LAYOUT_NC ? W : N * W;
    return streams_fit(&a->x, L, W) && steady(&a->x, unit) && row_fits(&a->d_u, W) && steady(&a->d_u, W);
}

template <class T, int N, stream_layout L>
static weft_status bwd_fast(const weft_call *call, const weft_mhc_aggregate_bwd_args *a)
{
    using tiles = tiles_of<T, N, L>;
    constexpr weft_dtype act = number<T>::dtype;
    bwd_task task = bwd_task_of(call, a);
    const bool plain = task.d_u.dtype == act && task.d_x.dtype == act && !task.d_x.add && has(task.d_pre);
    if (!streams_fit(&a->d_x.to, L, tiles::width)) {
        weft_mhc_aggregate_bwd_args rest = *a;
        rest.d_pre = weft_grad{};
        const weft_status status = bwd_any<T>(call, &rest);
        if (status != WEFT_OK || !has(task.d_pre)) return status;
        task.d_x = view{};
        return bwd_launch(call, bwd_kernel<T, N, L, false>, task, tiles::width, tiles::count);
    }
    return bwd_launch(call, plain ? bwd_kernel<T, N, L, true> : bwd_kernel<T, N, L, false>, task, tiles::width,
                      tiles::count);
}

template <class T, int N> static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_mhc_aggregate_bwd_args *a = (const weft_mhc_aggregate_bwd_args *)args;
    if (call->tokens == 0 || !(weft_has(&a->d_x.to) || weft_has(&a->d_pre.to))) return WEFT_OK;
    if (bwd_fits<T, N, LAYOUT_NC>(a)) return bwd_fast<T, N, LAYOUT_NC>(call, a);
    if (bwd_fits<T, N, LAYOUT_CN>(a)) return bwd_fast<T, N, LAYOUT_CN>(call, a);
    return bwd_any<T>(call, args);
}

#define ROWS(pass, T)                                                                                              \
    {number<T>::dtype, 2, pass<T, 2>, NULL}, {number<T>::dtype, 4, pass<T, 4>, NULL},                              \
        {number<T>::dtype, 8, pass<T, 8>, NULL},                                                                   \
    {                                                                                                              \
        number<T>::dtype, 0, pass##_any<T>, NULL                                                                   \
    }

const weft_kernel weft_cuda_mhc_aggregate_fwd[] = {ROWS(fwd, bf16), ROWS(fwd, float), ROWS(fwd, f16), {}};
const weft_kernel weft_cuda_mhc_aggregate_bwd[] = {ROWS(bwd, bf16), ROWS(bwd, float), ROWS(bwd, f16), {}};
