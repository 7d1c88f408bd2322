/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared by the kernels of the fused backward of a site [M11]: a token's record and the workspace. */
#ifndef WEFT_CUDA_SITE_BWD_CUH
#define WEFT_CUDA_SITE_BWD_CUH

#include <type_traits>

#include "cuda/common/tma.cuh"
#include "cuda/mhc/mhc_post.cuh"
#include "cuda/mhc/mhc_project.cuh"
#include "cuda/site/bwd_plan.h"

/* The per-token values beside the streams, in pieces of 16 bytes: the rows of d_h as bf16, hi then lo, padded with zeros; with a post
 * w[o][i] and post as floats; pre as floats; 2 d_ms / K, the norm's r and k, and the part of 2 d_ms / K that depends on the sums. The
 * gates and sums kernels write concurrently, each words of its own. The number of pieces is odd, if need be by padding, so that
 * eight records begin in eight banks. */
template <int N, site_kind KIND> struct boundary_record {
    static constexpr int rows = KIND == SITE_HEAD ? N : 2 * N + N * N, row_tiles = (rows + 7) / 8;
    static constexpr int mix = KIND == SITE_BOUNDARY ? N * N + N : 0, floats = (mix + N + 3) / 4 * 4;
    static constexpr int floats_at = 2 * row_tiles, rest_at = floats_at + floats / 4, used = rest_at + 1,
                         pieces = used | 1;
    static_assert(rows % 2 == 0 && row_tiles % 2 == 1, "tiles of eight rows, as the products take them");
};

/* The floats of a record. */
template <int N, site_kind KIND> struct alignas(16) token_coefs {
    float pre[4], scale, r, k, late;
};

template <int N> struct alignas(16) token_coefs<N, SITE_BOUNDARY> {
    float w[N][N], post[N], pre[N], scale, r, k, late;
};

template <int N, site_kind KIND>
static __device__ __forceinline__ void get_record(token_coefs<N, KIND> &k, const char *record)
{
    typedef boundary_record<N, KIND> R;
    constexpr int COUNT = R::used - R::floats_at;
    static_assert(sizeof k == COUNT * 16, "the layout that the records are written in");
    float4 v[COUNT];
#pragma unroll
    for (int e = 0; e < COUNT; e++) v[e] = ((const float4 *)record)[R::floats_at + e];
    memcpy(&k, v, sizeof k);
}

/* `word` has W neighbouring channels of all streams of a token, in memory order: in the (n,C) layout a word is two channels of a
 * stream, in (C,n) two streams of a channel. v gets channels q and q + 1; q is even. */
template <class T, int N, int W, stream_layout L>
static __device__ __forceinline__ void get_pair(float (&v)[N][2], const uint32_t (&word)[N * W / 2], int q)
{
    if constexpr (L == LAYOUT_CN) {
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int i = 0; i < N; i += 2) widen2(v[i][e], v[i + 1][e], word[((q + e) * N + i) / 2], T());
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) widen2(v[i][0], v[i][1], word[(i * W + q) / 2], T());
    }
}

template <class T, int N, int W, stream_layout L>
static __device__ __forceinline__ void put_pair(uint32_t (&word)[N * W / 2], const float (&v)[N][2], int q)
{
    if constexpr (L == LAYOUT_CN) {
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int i = 0; i < N; i += 2) word[((q + e) * N + i) / 2] = narrow2(v[i][e], v[i + 1][e], T());
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) word[(i * W + q) / 2] = narrow2(v[i][0], v[i][1], T());
    }
}

/* Workspace and decisions of a call, shared by its launches. */
struct boundary_work {
    const weft_mhc_boundary_bwd_args *a;
    site_kind kind;
    stream_layout layout; /* of x, y, d_y and d_x */
    bool full; /* bias, dropout, d_u beside d_v, or gradients that TMA cannot store; set once addresses are known */
    bool pre_sums; /* sums of a token include d_pre_in, requested or not; the same */
    boundary_bwd_plan plan;
    bool stored;              /* y is given and can be read in vectors */
    bool waits, late_pre;     /* something, the gradient of this site's pre depends on sums over the whole token */
    uint4 *records;           /* [tiles * 16] */
    bool phi_is_psi;          /* phi can be read in place of psi */
    float *psi;               /* [rows][n C], columns in the order of the layout */
    float *dpsi;              /* [pieces][psi rows][n][BOUNDARY_SLICE], where d_phi or d_norm_weight is wanted */
    float *sums;              /* [slices][tiles * 16][sums of a token], where one of them is requested */
    float *d_bias, *d_weight; /* [pieces][BOUNDARY_SLICE], where they are requested */
    float
        *gates; /* [psi rows + 3][gate_slots]: d_beta, d_alpha without the late part, where wanted; not of a head */
    float *late; /* [n + 1][tiles * 16]: a token's part of d_beta of pre and d_alpha[0], where they are late */
    int64_t gate_slots;
};

/* run(n, kind) with both as constants. */
template <typename RUN> static weft_status of_site(const weft_call *call, const boundary_work *w, RUN run)
{
    auto of_kind = [&](auto n) {
        if (w->kind == SITE_HEAD) return run(n, std::integral_constant<site_kind, SITE_HEAD>());
        if (w->kind == SITE_PRE) return run(n, std::integral_constant<site_kind, SITE_PRE>());
        return run(n, std::integral_constant<site_kind, SITE_BOUNDARY>());
    };
    return call->streams == 2 ? of_kind(std::integral_constant<int, 2>())
                              : of_kind(std::integral_constant<int, 4>());
}

/* run(type, layout) with a number of the streams' type and their layout as a constant. */
template <typename RUN> static weft_status of_memory(const weft_call *call, const boundary_work *w, RUN run)
{
    auto of_layout = [&](auto type) {
        return w->layout == LAYOUT_CN ? run(type, std::integral_constant<stream_layout, LAYOUT_CN>())
                                      : run(type, std::integral_constant<stream_layout, LAYOUT_NC>());
    };
    return call->dtype == WEFT_F16 ? of_layout(f16()) : of_layout(bf16());
}

/* Rows of the streams that TMA can move: (n,C), or all streams of all channels without a gap. */
static inline bool streams_fit_tma(const weft_tensor *t, stream_layout layout)
{
    if (!weft_has(t) || layout == LAYOUT_NC) return tma_fits(t);
    const weft_tensor rows = {.data = t->data,
                              .dtype = t->dtype,
                              .ndim = 2,
                              .shape = {t->shape[0], t->shape[1] * t->shape[2]},
                              .stride = {t->stride[0], 1}};
    return t->stride[1] == 1 && t->stride[2] == t->shape[1] && tma_fits(&rows);
}

/* Gates and Sinkhorn: records, and partial sums of d_alpha and d_beta, without the parts that depend on sums over the token. */
weft_status weft_cuda_boundary_bwd_gates(const weft_call *call, const boundary_work *w);
/* Sums over the whole token and the values that depend on them: the aggregate's part of d_pre, added to d_pre_out, and the norm's r
 * and k. Reads y and one gradient, 2nC + 2C bytes per token, or rebuilds y: 2nC + 4C. */
weft_status weft_cuda_boundary_bwd_sums(const weft_call *call, const boundary_work *w);
/* Whether the pass takes the kernels that serve more than the plain ones. */
bool weft_cuda_boundary_bwd_is_full(const weft_call *call, const boundary_work *w);
/* Everything after d_h except the sums of partial sums. */
weft_status weft_cuda_boundary_bwd_pass(const weft_call *call, const boundary_work *w);
/* Sums of the partial sums of the previous launches. */
weft_status weft_cuda_boundary_bwd_fold(const weft_call *call, const boundary_work *w);

#endif
