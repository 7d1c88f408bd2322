/* SPDX-License-Identifier: Apache-2.0
 *
 * RMSNorm of a row [N1]. Bytes per token, bf16: forward 4C; backward 6C.
 * A team owns a token and holds its row in registers between the sums and the elements; longer rows, and rows that
 * cannot be read in vectors, are read twice. Rows that are held have their squares summed in the order of rmsnorm.cuh. For
 * d_weight a block walks over a chunk of tokens in order and leaves a row of partial sums; a second kernel adds these. */
#include "cuda/common/fold.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/norm/rmsnorm.cuh"

enum { MOST_BLOCK = 512, FWD_THREADS = 640, FWD_ELEMENTS = 32, BWD_ELEMENTS = 16, BWD_MOST_ELEMENTS = 32 };

/* Boxes of a row that a team of `lanes` lanes with K pieces each has. */
template <int K> static __host__ __device__ constexpr int boxes_of(int lanes)
{
    return K * lanes / BOX_PIECES;
}

struct norm_task {
    view u, weight, v;  /* v: the result, or the gradient of it */
    view d_u, d_weight; /* backward */
    float *partial;     /* [chunks][channels], NULL where d_weight is not requested */
    int64_t tokens, channels, chunk;
    float eps;
    weft_rows_team team;
};

/* W neighbouring weights, 1 where there are none. */
template <int W> static __device__ __forceinline__ void get_weight(float (&w)[W], const view &from, int64_t c)
{
    if constexpr (W == 1) {
        w[0] = has(from) ? get(from, c * from.stride[0]) : 1.0f;
    } else if (has(from)) {
        get_param<W>(w, from, c);
    } else {
#pragma unroll
        for (int k = 0; k < W; k++) w[k] = 1.0f;
    }
}

/* ---- forward ------------------------------------------------------------------------------------------------------ */

/* All threads of a team; where that is the block, of the block. */
static __device__ __forceinline__ void team_sync(const weft_rows_team &team)
{
    if (team.lanes > 32)
        __syncthreads();
    else
        __syncwarp();
}

/* The sum of the squares of a row whose boxes' sums the team's lanes have left in shared memory; every lane gets it. All threads of
 * the block call it together, and the place of the sums may be used again at once. */
static __device__ __forceinline__ float row_squares(const float *boxes, int count, const place &p,
                                                    const weft_rows_team &team)
{
    const int lanes = team.lanes > 32 ? 32 : team.lanes;
    float sum = 0.0f;
    team_sync(team);
#pragma unroll 1
    for (int box = p.lane & (lanes - 1); box < count; box += 32) sum += boxes[box];
#pragma unroll 1
    for (int step = lanes >> 1; step > 0; step >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    team_sync(team);
    return sum;
}

/* v = u r weight, the row in registers. v may be u: a thread reads and writes the same elements. The bounds are not those of a
 * block: they leave room for the rows of 1280 threads, 640 of fp32, on a multiprocessor; without a bound the compiler takes
 * more registers, and too few rows are in flight. */
template <class T>
static __global__ void __launch_bounds__(FWD_THREADS, sizeof(T) == 2 ? 2 : 1) fwd_kernel(norm_task a)
{
    constexpr int W = number<T>::per_vector, K = FWD_ELEMENTS / W;
    extern __shared__ float room[];
    const place p = place_of(a.team);
    const int step = a.team.lanes * W, count = boxes_of<K>(a.team.lanes);
    float *const boxes = room + p.slot * count;
    const int64_t stride = (int64_t)gridDim.x * a.team.per_block;
    for (int64_t base = (int64_t)blockIdx.x * a.team.per_block; base < a.tokens; base += stride) {
        const int64_t token = base + p.slot;
        const int c = p.lane * W, end = token < a.tokens ? (int)a.channels : 0;
        const T *u = (const T *)a.u.data + token * a.u.stride[0];
        T *v = (T *)a.v.data + token * a.v.stride[0];
        raw<T, W> r[K];
        float x[W];
#pragma unroll
        for (int j = 0; j < K; j++)
            if (c + j * step < end) load_raw_shared(r[j], u + c + j * step);
#pragma unroll
        for (int j = 0; j < K; j++) {
            float squares = 0.0f;
            if (c + j * step < end) {
                unpack(x, r[j]);
                squares = piece_squares(x);
            }
            squares = box_sum(squares);
            if (p.lane % BOX_PIECES == 0) boxes[j * (a.team.lanes / BOX_PIECES) + p.lane / BOX_PIECES] = squares;
        }
        const float inverse = inverse_rms(row_squares(boxes, count, p, a.team), a.channels, a.eps);
#pragma unroll
        for (int j = 0; j < K; j++) {
            float w[W];
            if (c + j * step >= end) continue;
            get_weight<W>(w, a.weight, c + j * step);
            unpack(x, r[j]);
#pragma unroll
            for (int k = 0; k < W; k++) x[k] = x[k] * inverse * w[k];
            store<T, W>(v + c + j * step, x);
        }
    }
}

/* Rows of any length and, with W = 1, any strides. */
template <class T, int W> static __global__ void __launch_bounds__(MOST_BLOCK) fwd_long_kernel(norm_task a)
{
    __shared__ float room[MOST_BLOCK / 32];
    const place p = place_of(a.team);
    const int64_t step = a.team.lanes * W, stride = (int64_t)gridDim.x * a.team.per_block;
    for (int64_t base = (int64_t)blockIdx.x * a.team.per_block; base < a.tokens; base += stride) {
        const int64_t token = base + p.slot, end = token < a.tokens ? a.channels : 0;
        float x[W], w[W], squares[1] = {0.0f};
#pragma unroll 4
        for (int64_t c = p.lane * W; c < end; c += step) {
            load_shared<T, W>(x, (const T *)a.u.data + at(a.u, token, c));
#pragma unroll
            for (int k = 0; k < W; k++) squares[0] = fmaf(x[k], x[k], squares[0]);
        }
        team_sums<1>(squares, a.team, room);
        const float inverse = inverse_rms(squares[0], a.channels, a.eps);
        for (int64_t c = p.lane * W; c < end; c += step) {
            load_shared<T, W>(x, (const T *)a.u.data + at(a.u, token, c));
            get_weight<W>(w, a.weight, c);
#pragma unroll
            for (int k = 0; k < W; k++) x[k] = x[k] * inverse * w[k];
            store<T, W>((T *)a.v.data + at(a.v, token, c), x);
        }
    }
}

/* ---- backward ----------------------------------------------------------------------------------------------------- */

/* What a token's two sums say of its elements: d_u = r (g - k u), g = d_v weight. */
struct norm_sums {
    float inverse, k;
};

static __device__ __forceinline__ norm_sums norm_sums_of(const float (&sums)[2], const norm_task &a)
{
    const float inverse = inverse_rms(sums[0], a.channels, a.eps);
    return {inverse, sums[1] / (float)a.channels * inverse * inverse};
}

/* G is the dtype of d_v, E the elements a thread holds of a row. While the block works on a row, the load of the next one
 * is in flight: a block has a barrier per row, and there are only a few blocks on a multiprocessor. */
template <class T, class G, int E> static __global__ void __launch_bounds__(MOST_BLOCK) bwd_kernel(norm_task a)
{
    constexpr int W = number<T>::per_vector, K = E / W;
    constexpr bool AHEAD = E <= BWD_ELEMENTS;
    __shared__ float room[MOST_BLOCK / 32 * 2];
    extern __shared__ float rows[]; /* [teams][channels] where a block has several teams */
    const place p = place_of(a.team);
    const int step = a.team.lanes * W, c = p.lane * W, channels = (int)a.channels;
    const int64_t first = blockIdx.x * a.chunk, last = first + a.chunk < a.tokens ? first + a.chunk : a.tokens;
    raw<T, W> u[K], next_u[K];
    raw<G, W> g[K], next_g[K];
    float sum[K][W], weight[AHEAD ? K : 1][W]; /* of long rows, weights are read again each time */
    auto fetch = [&](raw<T, W>(&to_u)[K], raw<G, W>(&to_g)[K], int64_t token) {
#pragma unroll
        for (int j = 0; j < K; j++)
            if (token < last && c + j * step < channels) {
                load_raw(to_u[j], (const T *)a.u.data + token * a.u.stride[0] + c + j * step);
                load_raw(to_g[j], (const G *)a.v.data + token * a.v.stride[0] + c + j * step);
            }
    };

    if (AHEAD) fetch(u, g, first + p.slot);
#pragma unroll
    for (int j = 0; j < K; j++) {
#pragma unroll
        for (int k = 0; k < W; k++) sum[j][k] = 0.0f;
        if (AHEAD && c + j * step < channels) get_weight<W>(weight[AHEAD ? j : 0], a.weight, c + j * step);
    }
    for (int64_t base = first; base < last; base += a.team.per_block) {
        const int64_t token = base + p.slot;
        const int end = token < last ? channels : 0;
        float x[W], d[W], sums[2] = {0.0f, 0.0f};
        if (AHEAD)
            fetch(next_u, next_g, token + a.team.per_block);
        else
            fetch(u, g, token);
#pragma unroll
        for (int j = 0; j < K; j++) {
            if (c + j * step >= end) continue;
            float(&w)[W] = weight[AHEAD ? j : 0];
            if (!AHEAD) get_weight<W>(w, a.weight, c + j * step);
            unpack(x, u[j]);
            unpack(d, g[j]);
#pragma unroll
            for (int k = 0; k < W; k++) {
                sums[0] = fmaf(x[k], x[k], sums[0]);
                sums[1] = fmaf(d[k] * w[k], x[k], sums[1]);
            }
        }
        team_sums<2>(sums, a.team, room);
        const norm_sums s = norm_sums_of(sums, a);
#pragma unroll
        for (int j = 0; j < K; j++) {
            if (c + j * step >= end) continue;
            float(&w)[W] = weight[AHEAD ? j : 0];
            if (!AHEAD) get_weight<W>(w, a.weight, c + j * step);
            unpack(x, u[j]);
            unpack(d, g[j]);
#pragma unroll
            for (int k = 0; k < W; k++) {
                sum[j][k] = fmaf(d[k], x[k] * s.inverse, sum[j][k]);
                d[k] = fmaf(x[k], -s.k, d[k] * w[k]) * s.inverse;
            }
            if (has(a.d_u)) put_wide<T, W>(a.d_u, token * a.d_u.stride[0] + c + j * step, d);
        }
        if (AHEAD) {
#pragma unroll
            for (int j = 0; j < K; j++) u[j] = next_u[j], g[j] = next_g[j];
        }
    }
    if (!a.partial) return;
    float *partial = a.partial + blockIdx.x * a.channels;
    if (a.team.lanes > 32) {
#pragma unroll
        for (int j = 0; j < K; j++)
            if (c + j * step < channels) store<float, W>(partial + c + j * step, sum[j]);
        return;
    }
#pragma unroll
    for (int j = 0; j < K; j++)
        if (c + j * step < channels)
#pragma unroll
            for (int k = 0; k < W; k++) rows[p.slot * channels + c + j * step + k] = sum[j][k];
    __syncthreads();
    for (int k = threadIdx.x; k < channels; k += blockDim.x) {
        float total = rows[k];
        for (int i = 1; i < a.team.per_block; i++) total += rows[i * channels + k];
        partial[k] = total;
    }
}

/* Rows of any length and, with W = 1, any strides. One team to a block, for the partial sums are in memory. */
template <class T, int W> static __global__ void __launch_bounds__(MOST_BLOCK) bwd_long_kernel(norm_task a)
{
    __shared__ float room[MOST_BLOCK / 32 * 2];
    const weft_rows_team team = {(int32_t)blockDim.x, 5, 1};
    const int64_t step = (int64_t)blockDim.x * W, begin = (int64_t)threadIdx.x * W;
    const int64_t first = blockIdx.x * a.chunk, last = first + a.chunk < a.tokens ? first + a.chunk : a.tokens;
    float *partial = a.partial + blockIdx.x * a.channels;
    for (int64_t token = first; token < last; token++) {
        float x[W], d[W], w[W], sums[2] = {0.0f, 0.0f};
        for (int64_t c = begin; c < a.channels; c += step) {
            load_shared<T, W>(x, (const T *)a.u.data + at(a.u, token, c));
            get_wide<T, W>(d, a.v, at(a.v, token, c));
            get_weight<W>(w, a.weight, c);
#pragma unroll
            for (int k = 0; k < W; k++) {
                sums[0] = fmaf(x[k], x[k], sums[0]);
                sums[1] = fmaf(d[k] * w[k], x[k], sums[1]);
            }
        }
        team_sums<2>(sums, team, room);
        const norm_sums s = norm_sums_of(sums, a);
        for (int64_t c = begin; c < a.channels; c += step) {
            load_shared<T, W>(x, (const T *)a.u.data + at(a.u, token, c));
            get_wide<T, W>(d, a.v, at(a.v, token, c));
            get_weight<W>(w, a.weight, c);
#pragma unroll
            for (int k = 0; k < W; k++) {
                if (a.partial)
                    partial[c + k] = fmaf(d[k], x[k] * s.inverse, token == first ? 0.0f : partial[c + k]);
                d[k] = fmaf(x[k], -s.k, d[k] * w[k]) * s.inverse;
            }
            if (has(a.d_u)) put_wide<T, W>(a.d_u, at(a.d_u, token, c), d);
        }
    }
}

/* ---- operators ---------------------------------------------------------------------------------------------------- */

static bool inputs_fit(const weft_tensor *u, const weft_tensor *v, const weft_tensor *weight, int64_t width)
{
    return row_fits(u, width) && steady(u, width) && row_fits(v, width) && steady(v, width) &&
           vector_fits(weight, width);
}

template <class T> static weft_status fwd(const weft_call *call, const void *args)
{
    constexpr int W = number<T>::per_vector;
    const weft_rmsnorm_fwd_args *a = (const weft_rmsnorm_fwd_args *)args;
    const bool fits = inputs_fit(&a->u, &a->v, &a->weight, W);
    const bool holds = fits && call->channels <= MOST_BLOCK * FWD_ELEMENTS;
    const int width = fits ? W : 1;
    if (call->tokens == 0) return WEFT_OK;
    weft_rows_sum plan =
        weft_rows_plan_sum(call->tokens, call->channels, width, fits ? FWD_ELEMENTS / W : 4, MOST_BLOCK);
    /* A box is summed by eight lanes. That makes more teams than the grid is for, but kernels step by the grid that there is. */
    if (holds && plan.team.lanes < BOX_PIECES) plan.team = {BOX_PIECES, BOX_BITS, plan.block / BOX_PIECES};
    norm_task task = {};
    task.u = view_of(&a->u), task.weight = view_of(&a->weight), task.v = view_of(&a->v);
    task.tokens = call->tokens, task.channels = call->channels;
    task.eps = (float)a->eps;
    task.team = plan.team;
    if (holds) {
        const size_t boxes = (size_t)plan.team.per_block * boxes_of<FWD_ELEMENTS / W>(plan.team.lanes);
        return launch(call, "rmsnorm", fwd_kernel<T>,
                      {dim3((unsigned)plan.grid), (unsigned)plan.block, boxes * sizeof(float)}, task);
    }
    return launch(call, "rmsnorm", fits ? fwd_long_kernel<T, W> : fwd_long_kernel<T, 1>,
                  {dim3((unsigned)plan.grid), (unsigned)plan.block}, task);
}

static weft_arena lay_out(const weft_call *call, const weft_rmsnorm_bwd_args *a, norm_task *task,
                          weft_rows_chunks *chunks)
{
    weft_arena arena = cuda_arena(call);
    *task = norm_task{};
    *chunks = weft_rows_plan_chunks(call->tokens, call->channels);
    task->u = view_of(&a->u), task->weight = view_of(&a->weight), task->v = view_of(&a->d_v);
    task->d_u = view_of(&a->d_u), task->d_weight = view_of(&a->d_weight);
    task->tokens = call->tokens, task->channels = call->channels, task->chunk = chunks->tokens;
    task->eps = (float)a->eps;
    if (has(task->d_weight) && chunks->chunks > 0)
        task->partial = (float *)weft_arena_take(&arena, (size_t)(chunks->chunks * call->channels) * sizeof(float));
    return arena;
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    norm_task task;
    weft_rows_chunks chunks;
    const weft_arena arena = lay_out(call, (const weft_rmsnorm_bwd_args *)args, &task, &chunks);
    return weft_arena_bytes(&arena);
}

template <class T, int W> static weft_status bwd_long(const weft_call *call, norm_task task, int64_t chunks)
{
    const weft_rows_sum plan = weft_rows_plan_sum(call->tokens, call->channels, W, 4, MOST_BLOCK);
    const int block = plan.team.lanes > 32 ? plan.block : 32;
    return launch(call, "rmsnorm", bwd_long_kernel<T, W>, {dim3((unsigned)chunks), (unsigned)block}, task);
}

template <class T, class G, int E>
static weft_status bwd_held(const weft_call *call, norm_task task, int64_t chunks)
{
    constexpr int W = number<T>::per_vector;
    const weft_rows_sum plan = weft_rows_plan_sum(call->tokens, call->channels, W, E / W, MOST_BLOCK);
    const bool several = plan.team.lanes <= 32 && task.partial;
    const size_t shared = several ? (size_t)(plan.team.per_block * call->channels) * sizeof(float) : 0;
    task.team = plan.team;
    return launch(call, "rmsnorm", bwd_kernel<T, G, E>, {dim3((unsigned)chunks), (unsigned)plan.block, shared},
                  task);
}

template <class T> static weft_status bwd_rows(const weft_call *call, norm_task task, int64_t chunks, bool fits)
{
    const bool plain = task.v.dtype == number<T>::dtype;
    if (!fits) return bwd_long<T, 1>(call, task, chunks);
    if (call->channels <= MOST_BLOCK * BWD_ELEMENTS)
        return plain ? bwd_held<T, T, BWD_ELEMENTS>(call, task, chunks)
                     : bwd_held<T, float, BWD_ELEMENTS>(call, task, chunks);
    /* 32 elements of fp32 rows and of the sums that go with them are more than there are registers. */
    if constexpr (sizeof(T) == 2)
        if (plain && call->channels <= MOST_BLOCK * BWD_MOST_ELEMENTS)
            return bwd_held<T, T, BWD_MOST_ELEMENTS>(call, task, chunks);
    return bwd_long<T, number<T>::per_vector>(call, task, chunks);
}

template <class T> static weft_status bwd(const weft_call *call, const void *args)
{
    constexpr int W = number<T>::per_vector;
    const weft_rmsnorm_bwd_args *a = (const weft_rmsnorm_bwd_args *)args;
    const bool fits = inputs_fit(&a->u, &a->d_v, &a->weight, W);
    const bool d_u_fits = row_fits(&a->d_u.to, W) && steady(&a->d_u.to, W);
    weft_status status = WEFT_OK;
    norm_task task;
    weft_rows_chunks chunks;
    lay_out(call, a, &task, &chunks);
    if (fits && !d_u_fits && call->tokens > 0) {
        /* d_weight's order must not depend on where d_u lies: each takes its own way. */
        norm_task d_u = task;
        d_u.partial = NULL;
        status = bwd_rows<T>(call, d_u, chunks.chunks, false);
        task.d_u = view{};
    }
    if (status == WEFT_OK && call->tokens > 0 && (has(task.d_u) || task.partial))
        status = bwd_rows<T>(call, task, chunks.chunks, fits);
    if (status != WEFT_OK || !has(task.d_weight) || (call->tokens == 0 && task.d_weight.add)) return status;
    return fold(call, "rmsnorm d_weight", task.d_weight, task.partial, chunks.chunks);
}

const weft_kernel weft_cuda_rmsnorm_fwd[] = {
    {WEFT_BF16, 0, fwd<bf16>, NULL}, {WEFT_F32, 0, fwd<float>, NULL}, {WEFT_F16, 0, fwd<f16>, NULL}, {}};
const weft_kernel weft_cuda_rmsnorm_bwd[] = {{WEFT_BF16, 0, bwd<bf16>, bwd_workspace},
                                             {WEFT_F32, 0, bwd<float>, bwd_workspace},
                                             {WEFT_F16, 0, bwd<f16>, bwd_workspace},
                                             {}};
