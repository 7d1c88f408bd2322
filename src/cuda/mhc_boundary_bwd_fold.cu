/* SPDX-License-Identifier: Apache-2.0
 *
 * What the launches of boundary's single-pass backward [M11] left in partial sums, in one launch: d_post, d_res and d_pre_in
 * over slices of the channels; d_phi and d_norm_weight, d_alpha and d_beta over ranges of tokens. Everything is added in an
 * order that depends on the shape only. */
#include "core/status.h"
#include "cuda/gates_bwd.cuh"
#include "cuda/mhc_boundary_bwd.cuh"
#include "cuda/mhc_project_finish.cuh"

enum { BLOCK = 128, COLUMNS = 4 /* of d_phi, for each thread */ };

struct fold_args {
    const float *sums; /* [slices][padded][count] */
    int64_t tokens, padded;
    int32_t slices, in_out, first; /* first: number that a token's sums begin with, of post | res | pre_in */
    view d_post, d_res, d_pre;
    finish_args phi;
    const float *gates, *late; /* [rows + 3][slots]; [n + 1][slots] of d_beta of pre and d_alpha[0], or NULL */
    int64_t slots;
    view d_alpha, d_beta;
    /* Blocks for each of these, in this order; the rest are for the gates. */
    int64_t sums_blocks, phi_blocks;
};

/* Slices of a sum, each added up by a warp of its own: few tokens leave most of the GPU without work otherwise. */
enum { PARTS = BLOCK / 32 };

/* A lane per four numbers of a token, from item 32 block on. */
template <int N, int COUNT>
static __device__ __forceinline__ void fold_slices(const fold_args &a, int64_t block, float4 (&room)[PARTS][32])
{
    constexpr int QUADS = COUNT / 4;
    const int part = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;
    const int64_t i = block * 32 + lane, apart = a.padded * QUADS, token = i / QUADS;
    const bool inside = token < a.tokens;
    const float4 *from = (const float4 *)a.sums + i;
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    auto add = [&](const float4 &v) {
        total.x = total.x + v.x, total.y = total.y + v.y, total.z = total.z + v.z, total.w = total.w + v.w;
    };
    const int last = inside ? a.slices * (part + 1) / PARTS : 0;
#pragma unroll 8
    for (int s = a.slices * part / PARTS; s < last; s++) add(from[s * apart]);
    room[part][lane] = total;
    __syncthreads();
    if (part || !inside) return;
#pragma unroll
    for (int q = 1; q < PARTS; q++) add(room[q][lane]);
    const float values[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const int e = a.first + (int)(i - token * QUADS) * 4 + q;
        if (e < N) {
            if (has(a.d_post)) put(a.d_post, token * a.d_post.stride[0] + e * a.d_post.stride[1], values[q]);
        } else if (e < N + N * N) {
            const int o = (e - N) / N, j = (e - N) % N, r = a.in_out ? j : o, c = a.in_out ? o : j;
            if (has(a.d_res))
                put(a.d_res, token * a.d_res.stride[0] + r * a.d_res.stride[1] + c * a.d_res.stride[2], values[q]);
        } else if (e < 2 * N + N * N && has(a.d_pre)) {
            put(a.d_pre, token * a.d_pre.stride[0] + (e - N - N * N) * a.d_pre.stride[1], values[q]);
        }
    }
}

/* Blocks for a row. */
static __host__ __device__ __forceinline__ int64_t phi_across(const columns &k)
{
    return (k.count + BLOCK * COLUMNS - 1) / (BLOCK * COLUMNS);
}

template <int N, int COUNT>
static __global__ void __launch_bounds__(BLOCK) fold_kernel(const __grid_constant__ fold_args a)
{
    __shared__ float4 room[PARTS][32];
    int64_t block = blockIdx.x;
    wait_for_previous();
    if (block < a.sums_blocks) {
        fold_slices<N, COUNT>(a, block, room);
        return;
    }
    block -= a.sums_blocks;
    if (block < a.phi_blocks) {
        const int64_t across = phi_across(a.phi.k), column = (block % across * BLOCK + threadIdx.x) * COLUMNS;
        if (column < a.phi.k.count) finish_columns<COLUMNS>(a.phi, column, (int32_t)(block / across));
        return;
    }
    constexpr int ROWS = 2 * N + N * N;
    const int k = (int)(block - a.phi_blocks);
    const float *column = a.gates + k * a.slots;
    if (a.late && (k < N || k == ROWS)) column = a.late + (k < N ? k : N) * a.slots;
    const float s = fold_column(column, a.slots, (float *)room);
    if (threadIdx.x == 0) put_sum(a.d_alpha, a.d_beta, ROWS, k, s);
}

template <int N> static weft_status run(const weft_call *call, const boundary_work *w)
{
    const weft_mhc_boundary_bwd_args *a = w->a;
    const weft_mhc_project_bwd_args project = {
        .phi = a->phi, .norm_weight = a->norm_weight, .d_phi = a->d_phi, .d_norm_weight = a->d_norm_weight};
    const columns k = columns_of(call, LAYOUT_NC);
    const bool shifted = weft_has(&a->d_pre_in.to);
    const bool post = weft_has(&a->x);
    constexpr int POST = (N + N * N + 3) / 4 * 4, BOTH = (2 * N + N * N + 3) / 4 * 4, PRE = (N + 3) / 4 * 4;
    fold_args p = {.sums = w->sums,
                   .tokens = call->tokens,
                   .padded = w->plan.tiles * BOUNDARY_TILE,
                   .slices = w->plan.slices,
                   .in_out = a->numerics.apply == WEFT_APPLY_IN_OUT,
                   .first = post ? 0 : N + N * N,
                   .d_post = view_of(&a->d_post),
                   .d_res = view_of(&a->d_res),
                   .d_pre = view_of(&a->d_pre_in),
                   .phi = finish_args_of(call, &project, w->dpsi, w->plan.splits, k),
                   .gates = w->gates,
                   .late = weft_has(&w->d_pre) ? w->gates + (call->rows + 3) * w->gate_slots : nullptr,
                   .slots = w->gate_slots,
                   .d_alpha = view_of(&a->d_alpha),
                   .d_beta = view_of(&a->d_beta)};
    const int64_t quads = call->tokens * weft_boundary_bwd_sums(N, post, shifted) / 4;
    if (w->sums) p.sums_blocks = (quads + 31) / 32;
    if (w->dpsi) p.phi_blocks = phi_across(k) * finish_rows(&p.phi);
    const int64_t blocks = p.sums_blocks + p.phi_blocks + (w->gates ? 2 * N + N * N + 3 : 0);
    if (blocks == 0) return WEFT_OK;
    return launch(call, "partial sums",
                  !post     ? fold_kernel<N, PRE>
                  : shifted ? fold_kernel<N, BOTH>
                            : fold_kernel<N, POST>,
                  {.grid = (unsigned)blocks, .block = BLOCK, .order = OVERLAP}, p);
}

weft_status weft_cuda_boundary_bwd_fold(const weft_call *call, const boundary_work *w)
{
    return call->streams == 2 ? run<2>(call, w) : run<4>(call, w);
}
