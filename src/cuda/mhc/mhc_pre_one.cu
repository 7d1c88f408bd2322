/* SPDX-License-Identifier: Apache-2.0
 *
 * Pre [M10] of fp32 streams as one launch: projection, coefficients and aggregate of eight tokens by a cluster of blocks. They
 * are the functions of the single operators, in the same order, so this has the bits of the chain; what it saves is launches,
 * which are most of what a few tokens cost the host.
 *
 * A block has eight rows of the projection. Its sums go to every block of the cluster; then each knows the coefficients of
 * the aggregate and takes its share of the channels, but for the last warp of the last block, which meanwhile makes and stores
 * all coefficients of the eight tokens. */
#include "cuda/common/cluster.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/mhc/gates_fwd.cuh"
#include "cuda/mhc/mhc_aggregate.cuh"
#include "cuda/mhc/mhc_pre.h"
#include "cuda/mhc/mhc_project_any.cuh"

enum { WARPS = ANY_THREADS / 32 };
static_assert((int)PRE_ONE_TOKENS == (int)ANY_TOKENS && (int)PRE_ONE_ROWS == (int)ANY_ROWS,
              "a cluster takes the tokens of a tile, a block its rows");

struct one_args {
    any_operands project;
    gates_fwd_params gates; /* h, ms: as requested by the caller */
    view pre_in, u;
    float mean;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

template <int N> struct one_room {
    static constexpr int rows = 2 * N + N * N;
    float sums[ANY_TOKENS][rows + 1]; /* h, ms */
    float pre[ANY_TOKENS][N];         /* of the aggregate */
    float param[rows + 3];
    float room[ANY_THREADS];
};

/* u of `mine` tokens: workers are warps, here and in the other blocks. */
template <int N>
static __device__ __forceinline__ void one_aggregate(const one_args &p, const one_room<N> &s, int64_t token0,
                                                     int mine, int worker, int workers)
{
    constexpr int W = tiles_of<float, N, LAYOUT_NC>::width, K = tiles_of<float, N, LAYOUT_NC>::count;
    const view &x = p.project.x;
    const uint32_t pieces = p.project.k.channels / W, all = mine * pieces, step = workers * 32;
    for (uint32_t first = worker * 32 + (threadIdx.x & 31); first < all; first += step * K) {
        raw_tile<float, N, W, LAYOUT_NC> r[K];
#pragma unroll
        for (int j = 0; j < K; j++) {
            const uint32_t at = first + j * step, token = at / pieces;
            if (at < all)
                load_tile(r[j], (const float *)x.data + (token0 + token) * x.stride[0], x.stride[1],
                          (int64_t)(at - token * pieces) * W);
        }
#pragma unroll
        for (int j = 0; j < K; j++) {
            const uint32_t at = first + j * step, token = at / pieces;
            float v[N][W], pre[N], u[W];
            if (at >= all) continue;
            unpack_tile(v, r[j]);
#pragma unroll
            for (int i = 0; i < N; i++) pre[i] = s.pre[token][i];
            aggregate(u, pre, v);
            store<float, W>(
                (float *)p.u.data + (token0 + token) * p.u.stride[0] + (int64_t)(at - token * pieces) * W, u);
        }
    }
}

template <int N> static __device__ __forceinline__ void pre_in_one(const one_args &p)
{
    __shared__ one_room<N> s;
    constexpr int R = one_room<N>::rows;
    const int warp = threadIdx.x >> 5, rank = (int)cluster_rank(), blocks = (int)cluster_blocks();
    const int64_t token0 = (int64_t)cluster_index() * ANY_TOKENS;
    const int mine = (int)(p.project.tokens - token0 < ANY_TOKENS ? p.project.tokens - token0 : ANY_TOKENS);
    const gates_fwd_params &g = p.gates;

    cluster_arrive(); /* this block is there */
    wait_for_previous();
    let_next_begin();
    stage_params(s.param, g.alpha, g.beta, R, 3);
    cluster_wait_for_all();
#pragma unroll 1
    for (int row0 = rank * ANY_ROWS; row0 < R; row0 += blocks * ANY_ROWS)
        any_sums<true>(p.project, token0, row0, s.room, [&](int64_t token, int row, float sum) {
            const float v = row < R ? sum : sum * p.mean;
            const uint32_t own = (uint32_t)__cvta_generic_to_shared(&s.sums[token - token0][row]);
            for (int b = 0; b < blocks; b++) cluster_store(cluster_address(own, (uint32_t)b), v);
            const view &to = row < R ? g.h.v : g.ms;
            if (has(to)) put(to, token * to.stride[0] + (row < R ? row * to.stride[1] : 0), v);
        });
    cluster_publish();
    cluster_wait_for_all();

    if ((int)threadIdx.x < mine * N) {
        const int m = threadIdx.x / N, i = threadIdx.x % N;
        if (has(p.pre_in)) {
            s.pre[m][i] = get(p.pre_in, at(p.pre_in, token0 + m, i));
        } else {
            const float inv = mm_inv_rms(s.sums[m][R], g.numbers.rms_eps, g.numbers.rms_eps_kind);
            s.pre[m][i] = as_stored(g.pre.v, gate_fwd(s.sums[m][i], inv, s.param[R], s.param[i], 0, g.numbers));
        }
    }
    __syncthreads();
    if (rank == blocks - 1 && warp == WARPS - 1) {
        const int m = threadIdx.x & 31;
        float h[R];
        if (m >= mine) return;
#pragma unroll
        for (int j = 0; j < R; j++) h[j] = s.sums[m][j];
        gates_fwd_token<N, true>(g, s.param, token0 + m, h, s.sums[m][R]);
    } else if (has(p.u)) {
        one_aggregate<N>(p, s, token0, mine, rank * WARPS + warp, blocks * WARPS - 1);
    }
}

#endif

template <int N>
static __global__ void __launch_bounds__(ANY_THREADS, N == 4 ? 2 : 1) one_kernel(const __grid_constant__ one_args p)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    pre_in_one<N>(p);
#endif
}

/* ---- host --------------------------------------------------------------------------------------------------------------- */

weft_pre_plan weft_cuda_pre_one_plan(const weft_call *call, const weft_mhc_pre_fwd_args *a, const weft_tensor *u)
{
    weft_pre_facts f = {.tokens = call->tokens,
                        .streams = call->streams,
                        .columns = call->streams * call->channels,
                        .rows = call->rows,
                        .f32 = call->dtype == WEFT_F32,
                        .unmixed = call->scales == 2};
    if (f.f32) {
        constexpr int W = stream_tile<float, 4, LAYOUT_NC>::width; /* of two streams as well */
        f.layout =
            any_in_pairs(&a->x, &a->phi, &a->norm_weight) && streams_fit(&a->x, LAYOUT_NC, W) && row_fits(u, W);
        f.capability = weft_cuda_code(call->exec->device);
    }
    return weft_cuda_pre_plan(&f);
}

weft_status weft_cuda_pre_one(const weft_call *call, const weft_pre_plan *plan, const weft_mhc_pre_fwd_args *a,
                              const weft_tensor *u)
{
    const columns k = columns_of(call, LAYOUT_NC);
    const one_args p = {.project = {view_of(&a->x),
                                    {view_of(&a->phi), view_of(&a->norm_weight), (int32_t)call->rows},
                                    k,
                                    call->tokens},
                        .gates = {.numbers = numbers_of(&a->numerics),
                                  .streams = (int32_t)call->streams,
                                  .tokens = call->tokens,
                                  .h = rows_of(&a->h),
                                  .ms = view_of(&a->ms),
                                  .alpha = view_of(&a->alpha),
                                  .beta = view_of(&a->beta),
                                  .pre = rows_of(&a->pre),
                                  .post = rows_of(&a->post),
                                  .third = rows_of(&a->res)},
                        .pre_in = view_of(&a->pre_in),
                        .u = view_of(u),
                        .mean = 1.0f / (float)k.count};
    const launch_shape shape = {.grid = dim3((unsigned)(plan->clusters * plan->cluster)),
                                .block = ANY_THREADS,
                                .order = OVERLAP,
                                .cluster = (unsigned)plan->cluster};
    return launch(call, "pre", call->streams == 2 ? one_kernel<2> : one_kernel<4>, shape, p);
}
