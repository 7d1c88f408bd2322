/* SPDX-License-Identifier: Apache-2.0
 *
 * Sinkhorn [M3], one matrix per thread. A thread reads its matrices before it writes, so both passes work in place. */
#include "cuda/common/launch.cuh"
#include "cuda/mhc/token_math.cuh"
#include "cuda/mhc/token_rows.cuh"

struct sinkhorn_params {
    gate_numbers numbers;
    int32_t streams;
    int64_t tokens;
    token_rows logits, d_res, to; /* to: res or d_logits */
    float *rooms;
    int64_t room;
};

template <int N> static __global__ void __launch_bounds__(COEF_THREADS) fwd_small(sinkhorn_params p)
{
    int64_t token = blockIdx.x * (int64_t)COEF_THREADS + threadIdx.x;
    for (; token < p.tokens; token += gridDim.x * (int64_t)COEF_THREADS) {
        float z[N * N];
        load_row<N * N, N>(z, p.logits, token);
        sinkhorn_fwd<N>(z, p.numbers);
        store_row<N * N, N>(p.to, token, z);
    }
}

template <int N> static __global__ void __launch_bounds__(COEF_THREADS) bwd_small(sinkhorn_params p)
{
    extern __shared__ float4 dynamic[]; /* the history */
    int64_t token = blockIdx.x * (int64_t)COEF_THREADS + threadIdx.x;
    for (; token < p.tokens; token += gridDim.x * (int64_t)COEF_THREADS) {
        float z[N * N], d[N * N];
        load_row<N * N, N>(z, p.logits, token);
        load_row<N * N, N>(d, p.d_res, token);
        sinkhorn_bwd<N>(z, d, (float *)dynamic, p.numbers);
        store_row<N * N, N>(p.to, token, d);
    }
}

/* Any number of streams, histories of any length: for correctness, not speed. */
static __global__ void __launch_bounds__(COEF_THREADS) fwd_any(sinkhorn_params p)
{
    const int n = p.streams;
    const int64_t thread = blockIdx.x * (int64_t)COEF_THREADS + threadIdx.x;
    float *z = p.rooms + thread * p.room;
    for (int64_t token = thread; token < p.tokens; token += gridDim.x * (int64_t)COEF_THREADS) {
#pragma unroll 1
        for (int k = 0; k < n * n; k++) z[k] = get(p.logits.v, matrix_at(p.logits.v, token, n, k));
        sinkhorn_fwd_any(z, n, p.numbers);
#pragma unroll 1
        for (int k = 0; k < n * n; k++) put(p.to.v, matrix_at(p.to.v, token, n, k), z[k]);
    }
}

static __global__ void __launch_bounds__(COEF_THREADS) bwd_any(sinkhorn_params p)
{
    const int n = p.streams;
    const int64_t thread = blockIdx.x * (int64_t)COEF_THREADS + threadIdx.x;
    float *z = p.rooms + thread * p.room, *d = z + n * n, *hist = d + n * n;
    for (int64_t token = thread; token < p.tokens; token += gridDim.x * (int64_t)COEF_THREADS) {
#pragma unroll 1
        for (int k = 0; k < n * n; k++) {
            z[k] = get(p.logits.v, matrix_at(p.logits.v, token, n, k));
            d[k] = get(p.d_res.v, matrix_at(p.d_res.v, token, n, k));
        }
        sinkhorn_bwd_any(z, d, hist, n, p.numbers);
#pragma unroll 1
        for (int k = 0; k < n * n; k++) put(p.to.v, matrix_at(p.to.v, token, n, k), d[k]);
    }
}

static weft_cuda_coef_plan fwd_plan(const weft_call *call, const weft_mhc_sinkhorn_fwd_args *a)
{
    return weft_cuda_coef_plan_fwd(call->tokens, call->streams, &a->numerics);
}

static weft_cuda_coef_plan bwd_plan(const weft_call *call, const weft_mhc_sinkhorn_bwd_args *a)
{
    return weft_cuda_coef_plan_bwd(call->tokens, call->streams, &a->numerics, most_shared(call));
}

static sinkhorn_params params_of(const weft_call *call, const weft_mhc_numerics *q, const weft_cuda_coef_plan *plan)
{
    weft_arena arena = cuda_arena(call);
    sinkhorn_params p = {};
    p.numbers = numbers_of(q);
    p.streams = (int32_t)call->streams;
    p.tokens = call->tokens;
    p.rooms = (float *)weft_arena_take(&arena, (size_t)weft_cuda_coef_rooms(plan) * sizeof(float));
    p.room = plan->room;
    return p;
}

static weft_status fwd(const weft_call *call, const void *args)
{
    const weft_mhc_sinkhorn_fwd_args *a = (const weft_mhc_sinkhorn_fwd_args *)args;
    const char *what = "sinkhorn";
    weft_cuda_coef_plan plan = fwd_plan(call, a);
    sinkhorn_params p = params_of(call, &a->numerics, &plan);
    if (call->tokens == 0) return WEFT_OK;
    p.logits = rows_of(&a->logits);
    p.to = rows_of(&a->res);
    launch_shape shape = {dim3(grid_of(plan.blocks)), COEF_THREADS};
    if (!plan.in_registers) return launch(call, what, fwd_any, shape, p);
    const kernel_of<sinkhorn_params> small[] = {fwd_small<2>, fwd_small<4>, fwd_small<8>};
    return launch(call, what, by_streams(small, p.streams), shape, p);
}

static weft_status bwd(const weft_call *call, const void *args)
{
    const weft_mhc_sinkhorn_bwd_args *a = (const weft_mhc_sinkhorn_bwd_args *)args;
    const char *what = "gradient of sinkhorn";
    weft_cuda_coef_plan plan = bwd_plan(call, a);
    sinkhorn_params p = params_of(call, &a->numerics, &plan);
    if (call->tokens == 0) return WEFT_OK;
    p.logits = rows_of(&a->logits);
    p.d_res = rows_of(&a->d_res);
    p.to = rows_of(&a->d_logits);
    launch_shape shape = {dim3(grid_of(plan.blocks)), COEF_THREADS, plan.shared};
    if (!plan.in_registers) return launch(call, what, bwd_any, shape, p);
    const kernel_of<sinkhorn_params> small[] = {bwd_small<2>, bwd_small<4>, bwd_small<8>};
    return launch(call, what, by_streams(small, p.streams), shape, p);
}

static size_t workspace_of(const weft_cuda_coef_plan *plan)
{
    weft_arena arena = weft_arena_open(NULL);
    weft_arena_take(&arena, (size_t)weft_cuda_coef_rooms(plan) * sizeof(float));
    return weft_arena_bytes(&arena);
}

static size_t fwd_workspace(const weft_call *call, const void *args)
{
    weft_cuda_coef_plan plan = fwd_plan(call, (const weft_mhc_sinkhorn_fwd_args *)args);
    return workspace_of(&plan);
}

static size_t bwd_workspace(const weft_call *call, const void *args)
{
    weft_cuda_coef_plan plan = bwd_plan(call, (const weft_mhc_sinkhorn_bwd_args *)args);
    return workspace_of(&plan);
}

const weft_kernel weft_cuda_mhc_sinkhorn_fwd[] = {{.run = fwd, .workspace = fwd_workspace}, {}};
const weft_kernel weft_cuda_mhc_sinkhorn_bwd[] = {{.run = bwd, .workspace = bwd_workspace}, {}};
