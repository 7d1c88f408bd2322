/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams to one row and back with the same factor for all: the two directions that expand [M7] and contract [M8] share.
 *     fan in   u[c] = s sum_i x[i,c], streams in order         fan out   x[i,c] = s u[c]
 * Bytes per token, 16-bit: 2nC + 2C either way. There are no sums over channels: teams take segments of rows. */
#ifndef WEFT_CUDA_FAN_CUH
#define WEFT_CUDA_FAN_CUH

#include "cuda/common/launch.cuh"
#include "cuda/common/rows.cuh"

struct fan_task {
    view x, u; /* one is read, the other written */
    float factor;
    int n;
    int64_t tokens, channels;
    weft_rows_team team;
    divider split; /* of a team's number into token and segment; element by element: into token and channel */
};

/* Where a thread's tiles begin. Channels are counted in 32 bits: n * C is at most 2^31, and n at least 2. */
template <int W, int K>
static __device__ __forceinline__ int fan_begin(const fan_task &a, int64_t team, int64_t *token)
{
    int64_t segment;
    *token = divide(team, a.split, &segment);
    return ((int)segment * K * a.team.lanes + place_of(a.team).lane) * W;
}

/* PLAIN: both tensors have dtype T, nothing is added to. */
template <class T, int N, stream_layout L, bool PLAIN>
static __global__ void __launch_bounds__(256, PLAIN &&L == LAYOUT_NC ? 4 : 3) fan_in_kernel(fan_task a)
{
    constexpr int W = tiles_of<T, N, L>::width, K = tiles_of<T, N, L>::count;
    const int step = a.team.lanes * W, channels = (int)a.channels;
    const int64_t teams = a.tokens * a.split.by, stride = (int64_t)gridDim.x * a.team.per_block;
    for (int64_t team = (int64_t)blockIdx.x * a.team.per_block + place_of(a.team).slot; team < teams;
         team += stride) {
        int64_t token;
        const int c = fan_begin<W, K>(a, team, &token);
        raw_tile<T, N, W, L> r[K];
        if constexpr (PLAIN)
#pragma unroll
            for (int j = 0; j < K; j++)
                if (c + j * step < channels)
                    load_tile(r[j], (const T *)a.x.data + token * a.x.stride[0], a.x.stride[1], c + j * step);
#pragma unroll
        for (int j = 0; j < K; j++) {
            float x[N][W], u[W];
            if (c + j * step >= channels) continue;
            if constexpr (PLAIN)
                unpack_tile(x, r[j]);
            else
                get_streams<T, N, W, L>(x, a.x, token, c + j * step);
#pragma unroll
            for (int k = 0; k < W; k++) {
                u[k] = x[0][k];
#pragma unroll
                for (int i = 1; i < N; i++) u[k] = u[k] + x[i][k];
                u[k] = u[k] * a.factor;
            }
            if constexpr (PLAIN)
                store<T, W>((T *)a.u.data + token * a.u.stride[0] + c + j * step, u);
            else
                put_wide<T, W>(a.u, token * a.u.stride[0] + c + j * step, u);
        }
    }
}

template <class T, int N, stream_layout L, bool PLAIN>
static __global__ void __launch_bounds__(256, PLAIN ? 4 : 2) fan_out_kernel(fan_task a)
{
    constexpr int W = tiles_of<T, N, L>::width, K = tiles_of<T, N, L>::count;
    const int step = a.team.lanes * W, channels = (int)a.channels;
    const int64_t teams = a.tokens * a.split.by, stride = (int64_t)gridDim.x * a.team.per_block;
    for (int64_t team = (int64_t)blockIdx.x * a.team.per_block + place_of(a.team).slot; team < teams;
         team += stride) {
        int64_t token;
        const int c = fan_begin<W, K>(a, team, &token);
        wide_words<T, W, PLAIN> r[K];
#pragma unroll
        for (int j = 0; j < K; j++)
            if (c + j * step < channels) load_wide(r[j], a.u, token * a.u.stride[0] + c + j * step);
#pragma unroll
        for (int j = 0; j < K; j++) {
            float x[N][W], u[W];
            if (c + j * step >= channels) continue;
            unpack_wide(u, r[j], a.u);
#pragma unroll
            for (int i = 0; i < N; i++)
#pragma unroll
                for (int k = 0; k < W; k++) x[i][k] = u[k] * a.factor;
            if constexpr (PLAIN)
                store_streams<T, N, W, L>((T *)a.x.data + token * a.x.stride[0], a.x.stride[1], c + j * step, x);
            else
                put_streams<T, N, W, L>(a.x, token, c + j * step, x);
        }
    }
}

/* Any number of streams, any strides: a thread per channel. */
template <class T, bool OUT> static __global__ void __launch_bounds__(256) fan_any_kernel(fan_task a)
{
    const int64_t all = a.tokens * a.channels, stride = (int64_t)gridDim.x * blockDim.x;
    for (int64_t item = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; item < all; item += stride) {
        int64_t c;
        const int64_t token = divide(item, a.split, &c);
        const int64_t x = token * a.x.stride[0] + c * a.x.stride[2], u = at(a.u, token, c);
        float row[1];
        if constexpr (OUT) {
            get_wide<T, 1>(row, a.u, u);
            for (int i = 0; i < a.n; i++) {
                float value[1] = {row[0] * a.factor};
                put_wide<T, 1>(a.x, x + i * a.x.stride[1], value);
            }
        } else {
            get_wide<T, 1>(row, a.x, x);
            for (int i = 1; i < a.n; i++) {
                float value[1];
                get_wide<T, 1>(value, a.x, x + i * a.x.stride[1]);
                row[0] = row[0] + value[0];
            }
            row[0] = row[0] * a.factor;
            put_wide<T, 1>(a.u, u, row);
        }
    }
}

/* ---- host --------------------------------------------------------------------------------------------------------- */

template <class T, bool OUT> static weft_status fan_any(const weft_call *call, fan_task task)
{
    const weft_rows_flat plan = weft_rows_plan_flat(call->tokens * call->channels, 1, 1, 1, call->sms);
    task.split = divider_of(call->channels);
    return launch(call, "fan", fan_any_kernel<T, OUT>, {dim3((unsigned)plan.grid), (unsigned)plan.block}, task);
}

/* MIXED: the operator takes f32 gradients beside T, and adds. */
template <class T, int N, stream_layout L, bool OUT, bool MIXED>
static weft_status fan_fast(const weft_call *call, fan_task task)
{
    using tiles = tiles_of<T, N, L>;
    constexpr weft_dtype act = number<T>::dtype;
    const weft_rows_flat plan =
        weft_rows_plan_flat(call->tokens, call->channels, tiles::width, tiles::count, call->sms);
    const launch_shape shape = {dim3((unsigned)plan.grid), (unsigned)plan.block};
    task.team = plan.team;
    task.split = divider_of(plan.segments);
    if constexpr (MIXED)
        if (task.x.dtype != act || task.u.dtype != act || task.x.add || task.u.add) {
            if constexpr (OUT)
                return launch(call, "fan out", fan_out_kernel<T, N, L, false>, shape, task);
            else
                return launch(call, "fan in", fan_in_kernel<T, N, L, false>, shape, task);
        }
    if constexpr (OUT)
        return launch(call, "fan out", fan_out_kernel<T, N, L, true>, shape, task);
    else
        return launch(call, "fan in", fan_in_kernel<T, N, L, true>, shape, task);
}

/* N = 0: any number of streams. The views' add says whether the written one is added to. */
template <class T, int N, bool OUT, bool MIXED>
static weft_status fan(const weft_call *call, const weft_tensor *x, int x_add, const weft_tensor *u, int u_add,
                       float factor)
{
    const fan_task task = {view_of(x, x_add), view_of(u, u_add), factor, (int)call->streams,
                           call->tokens,      call->channels,    {},     {}};
    if (call->tokens == 0) return WEFT_OK;
    if constexpr (N > 0) {
        constexpr int nc = stream_tile<T, N, LAYOUT_NC>::width, cn = stream_tile<T, N, LAYOUT_CN>::width;
        if (streams_fit(x, LAYOUT_NC, nc) && row_fits(u, nc))
            return fan_fast<T, N, LAYOUT_NC, OUT, MIXED>(call, task);
        if (streams_fit(x, LAYOUT_CN, cn) && row_fits(u, cn))
            return fan_fast<T, N, LAYOUT_CN, OUT, MIXED>(call, task);
    }
    return fan_any<T, OUT>(call, task);
}

#endif
