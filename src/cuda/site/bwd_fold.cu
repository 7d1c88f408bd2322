/* SPDX-License-Identifier: Apache-2.0
 *
 * Adds the partial sums of the fused backward of a site [M11] in one launch: d_post, d_res and d_pre_in over slices of the
 * channels; d_phi and d_norm_weight, d_bias and d_sub_weight, d_alpha and d_beta over ranges of tokens. The order of every sum
 * depends on the shape alone. */
#include "core/status.h"
#include "cuda/mhc/gates_bwd.cuh"
#include "cuda/mhc/mhc_project_finish.cuh"
#include "cuda/site/bwd.cuh"

enum { BLOCK = 128, COLUMNS = 4 /* of d_phi, for each thread */ };

struct fold_args {
    const float *sums; /* [slices][padded][count] */
    int64_t tokens, padded, channels;
    int32_t slices, in_out, first; /* first: index in post | res | pre_in of the first of a token's sums */
    view d_post, d_res, d_pre;
    boundary_bwd_plan plan;
    const float *dpsi;
    finish_args phi;
    const float *rows[2]; /* [pieces][BOUNDARY_SLICE] for each of to[]: d_bias, d_sub_weight, or NULL */
    view to[2];
    const float *gates,
        *late; /* [record rows + 3][slots]; [n + 1][padded] of d_beta of pre and d_alpha[0], or NULL */
    int64_t slots;
    view d_alpha, d_beta;
    /* Blocks for each of these, in this order; the remaining ones are for the gates. */
    int64_t sums_blocks, phi_blocks, row_blocks[2];
};

/* Warps that share the slices of a sum: with few tokens one warp per sum leaves most of the GPU idle. */
enum { PARTS = BLOCK / 32 };

/* A lane per four numbers of a token, from item 32 block on. */
template <int N, int COUNT>
static __device__ __forceinline__ void fold_slices(const fold_args &a, int64_t block, float4 (&room)[PARTS][32])
{
    constexpr int QUADS = COUNT / 4;
    const int part = (int)threadIdx.x >> 5, lane = (int)threadIdx.x & 31;
    const int64_t i = block * 32 + lane, apart = a.padded * QUADS, token = i / QUADS;
    const bool inside = token < a.tokens;
    const int first = a.slices * part / PARTS, last = a.slices * (part + 1) / PARTS;
    const float *const from = a.sums + (first * apart + i) * 4;
    /* Prefetches into the L2 while the last blocks of the previous kernel run. */
    if (inside && lane % 8 == 0)
        for (int s = 0; s < last - first; s++) prefetch_line(from + s * apart * 4);
    wait_for_previous();
    float total[4] = {};
    add_rows<8>(total, from, apart * 4, inside ? last - first : 0);
    room[part][lane] = make_float4(total[0], total[1], total[2], total[3]);
    __syncthreads();
    if (part || !inside) return;
#pragma unroll
    for (int q = 1; q < PARTS; q++) {
        const float4 v = room[q][lane];
        total[0] += v.x, total[1] += v.y, total[2] += v.z, total[3] += v.w;
    }
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const int e = a.first + (int)(i - token * QUADS) * 4 + q;
        if (e < N) {
            if (has(a.d_post)) put(a.d_post, token * a.d_post.stride[0] + e * a.d_post.stride[1], total[q]);
        } else if (e < N + N * N) {
            const int o = (e - N) / N, j = (e - N) % N, r = a.in_out ? j : o, c = a.in_out ? o : j;
            if (has(a.d_res))
                put(a.d_res, token * a.d_res.stride[0] + r * a.d_res.stride[1] + c * a.d_res.stride[2], total[q]);
        } else if (e < 2 * N + N * N && has(a.d_pre)) {
            put(a.d_pre, token * a.d_pre.stride[0] + (e - N - N * N) * a.d_pre.stride[1], total[q]);
        }
    }
}

/* As weft_boundary_bwd_sums. */
template <int N, site_kind KIND, bool SHIFTED> static constexpr int sums_of()
{
    return ((KIND == SITE_BOUNDARY ? N + N * N : 0) + (SHIFTED ? N : 0) + 3) / 4 * 4;
}

/* Blocks for a row. */
static __host__ __device__ __forceinline__ int64_t phi_across(const columns &k)
{
    return (k.count + BLOCK * COLUMNS - 1) / (BLOCK * COLUMNS);
}

template <int N, site_kind KIND> static __device__ __forceinline__ void fold_phi(const fold_args &a, int64_t block)
{
    const int64_t across = phi_across(a.phi.k), column = (block % across * BLOCK + threadIdx.x) * COLUMNS;
    if (column >= a.phi.k.count) return;
    uint32_t stream, channel;
    column_at(a.phi.k, (uint32_t)column, stream, channel);
    const int slice = (int)channel / BOUNDARY_SLICE;
    constexpr int ROW = N * BOUNDARY_SLICE, PIECE = boundary_record<N, KIND>::rows * ROW;
    const float *first = a.dpsi + boundary_first_piece(&a.plan, slice) * PIECE +
                         (a.phi.k.cn ? column % ROW : stream * BOUNDARY_SLICE + channel % BOUNDARY_SLICE);
    const finish_parts parts = {first, ROW, PIECE, boundary_pieces_of(&a.plan, slice)};
    wait_for_previous();
    if (a.phi.k.cn)
        finish_columns<COLUMNS, true>(a.phi, parts, column, (int32_t)(block / across));
    else
        finish_columns<COLUMNS, false>(a.phi, parts, column, (int32_t)(block / across));
}

/* A thread per channel. */
static __device__ __forceinline__ void fold_row(const boundary_bwd_plan &plan, const float *pieces, const view &to,
                                                int64_t channels, int64_t block)
{
    const int64_t c = block * BLOCK + threadIdx.x, slice = c / BOUNDARY_SLICE;
    if (c >= channels) return;
    const float *from = pieces + boundary_first_piece(&plan, slice) * BOUNDARY_SLICE + c % BOUNDARY_SLICE;
    const int count = boundary_pieces_of(&plan, slice);
    float s[1] = {};
    wait_for_previous();
    add_rows<8>(s, from, BOUNDARY_SLICE, count);
    put(to, c * to.stride[0], s[0]);
}

/* Sum of a column with one number per token: each thread's share, then the threads in a fixed tree. */
static __device__ __forceinline__ float fold_tokens(const float *column, int64_t tokens, float *room)
{
    const int64_t quads = tokens / 4;
    float s = 0.0f;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < quads; i += BLOCK) {
        const float4 v = __ldcg((const float4 *)column + i);
        s += (v.x + v.y) + (v.z + v.w);
    }
    if (threadIdx.x < tokens % 4) s += __ldcg(column + quads * 4 + threadIdx.x);
    s = warp_sum(s);
    if ((threadIdx.x & 31) == 0) room[threadIdx.x >> 5] = s;
    __syncthreads();
    return (room[0] + room[1]) + (room[2] + room[3]);
}

/* Each branch waits for the previous launches right before it reads their output. */
template <int N, site_kind KIND, bool SHIFTED>
static __global__ void __launch_bounds__(BLOCK, 9) fold_kernel(const __grid_constant__ fold_args a)
{
    __shared__ float4 room[PARTS][32];
    int64_t block = blockIdx.x;
    if (block < a.sums_blocks) {
        if constexpr (KIND != SITE_HEAD) fold_slices<N, sums_of<N, KIND, SHIFTED>()>(a, block, room);
        return;
    }
    block -= a.sums_blocks;
    if (block < a.phi_blocks) {
        fold_phi<N, KIND>(a, block);
        return;
    }
    block -= a.phi_blocks;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        if (block < a.row_blocks[e]) {
            fold_row(a.plan, a.rows[e], a.to[e], a.channels, block);
            return;
        }
        block -= a.row_blocks[e];
    }
    /* The scales are behind the rows of a record, of which there may be more than of phi. */
    const int k = (int)block, rows = a.phi.w.rows,
              column = k < rows ? k : k - rows + boundary_record<N, KIND>::rows;
    wait_for_previous();
    const float s = a.late && (k < N || k == rows)
                        ? fold_tokens(a.late + (k < N ? k : N) * a.padded, a.tokens, (float *)room)
                        : fold_column(a.gates + column * a.slots, a.slots, (float *)room);
    if (threadIdx.x == 0) put_sum(a.d_alpha, a.d_beta, rows, k, s);
}

template <int N, site_kind KIND> static weft_status run(const weft_call *call, const boundary_work *w)
{
    const weft_mhc_boundary_bwd_args *a = w->a;
    const weft_mhc_project_bwd_args project = {
        .phi = a->phi, .norm_weight = a->norm_weight, .d_phi = a->d_phi, .d_norm_weight = a->d_norm_weight};
    const columns k = columns_of(call, w->layout);
    constexpr bool post = KIND == SITE_BOUNDARY;
    const bool shifted = w->pre_sums;
    fold_args p = {.sums = w->sums,
                   .tokens = call->tokens,
                   .padded = w->plan.tiles * BOUNDARY_TILE,
                   .channels = call->channels,
                   .slices = w->plan.slices,
                   .in_out = a->numerics.apply == WEFT_APPLY_IN_OUT,
                   .first = post ? 0 : N + N * N,
                   .d_post = view_of(&a->d_post),
                   .d_res = view_of(&a->d_res),
                   .d_pre = view_of(&a->d_pre_in),
                   .plan = w->plan,
                   .dpsi = w->dpsi,
                   .phi = finish_args_of(call, &project, k),
                   .rows = {w->d_bias, w->d_weight},
                   .to = {view_of(&a->d_bias), view_of(&a->d_sub_weight)},
                   .gates = w->gates,
                   .late = w->late,
                   .slots = w->gate_slots,
                   .d_alpha = view_of(&a->d_alpha),
                   .d_beta = view_of(&a->d_beta)};
    const int64_t quads = call->tokens * weft_boundary_bwd_sums(N, post, shifted) / 4;
    if (w->sums) p.sums_blocks = (quads + 31) / 32;
    if (w->dpsi) p.phi_blocks = phi_across(k) * finish_rows(&p.phi);
    for (int e = 0; e < 2; e++)
        if (p.rows[e]) p.row_blocks[e] = (call->channels + BLOCK - 1) / BLOCK;
    const int64_t gates = call->rows + (KIND == SITE_HEAD ? 1 : call->scales);
    const int64_t blocks =
        p.sums_blocks + p.phi_blocks + p.row_blocks[0] + p.row_blocks[1] + (w->gate_slots ? gates : 0);
    if (blocks == 0) return WEFT_OK;
    /* a head, and a pre that is not shifted, have no sums over channels: any instance is correct */
    return launch(call, "partial sums",
                  shifted ? fold_kernel<N, KIND, KIND != SITE_HEAD> : fold_kernel<N, KIND, KIND == SITE_PRE>,
                  {.grid = (unsigned)blocks, .block = BLOCK, .order = OVERLAP}, p);
}

weft_status weft_cuda_boundary_bwd_fold(const weft_call *call, const boundary_work *w)
{
    return of_site(call, w, [&](auto n, auto kind) { return run<n.value, kind.value>(call, w); });
}
