/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels of boundary's single-pass backward [M11] share: a token's record and the workspace. */
#ifndef WEFT_CUDA_MHC_BOUNDARY_BWD_CUH
#define WEFT_CUDA_MHC_BOUNDARY_BWD_CUH

#include <type_traits>

#include "cuda/mhc/mhc_post.cuh"
#include "cuda/mhc/mhc_project.cuh"
#include "cuda/site/bwd_plan.h"

/* A token's numbers beside its streams, in pieces of 16 bytes: the rows of d_h as bf16, hi then lo, with zeros behind the
 * last; behind a post w[o][i] and post, and pre as floats; 2 d_ms / K, the norm's r and k, and what is late of 2 d_ms / K. Gates
 * and sums write at the same time, each words of their own. An odd number of pieces, of which the last may be nothing, so that
 * eight records begin in eight banks. */
template <int N, site_kind KIND> struct boundary_record {
    static constexpr int rows = KIND == SITE_HEAD ? N : 2 * N + N * N, row_tiles = (rows + 7) / 8;
    static constexpr int mix = KIND == SITE_BOUNDARY ? N * N + N : 0, floats = (mix + N + 3) / 4 * 4;
    static constexpr int floats_at = 2 * row_tiles, rest_at = floats_at + floats / 4, used = rest_at + 1,
                         pieces = used | 1;
    static_assert(rows % 2 == 0 && row_tiles % 2 == 1, "as the products take them");
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
    static_assert(sizeof k == COUNT * 16, "as the records are written");
    float4 v[COUNT];
#pragma unroll
    for (int e = 0; e < COUNT; e++) v[e] = ((const float4 *)record)[R::floats_at + e];
    memcpy(&k, v, sizeof k);
}

/* What the launches of a call hand to each other. */
struct boundary_work {
    const weft_mhc_boundary_bwd_args *a;
    site_kind kind;
    boundary_bwd_plan plan;
    bool stored;              /* y is there and can be read in vectors */
    bool waits, late_pre;     /* something, the gradient of this site's pre waits for sums over the whole token */
    uint4 *records;           /* [tiles * 16] */
    float *psi;               /* [rows][n C], where phi is not like that itself */
    float *dpsi;              /* [pieces][rows][n][BOUNDARY_SLICE], where d_phi or d_norm_weight is wanted */
    float *sums;              /* [slices][tiles * 16][sums of a token], where one of them is wanted */
    float *d_bias, *d_weight; /* [pieces][BOUNDARY_SLICE], where they are wanted */
    float *gates; /* [rows + 3][gate_slots]: d_beta, d_alpha without what is late, where wanted; not of a head */
    float *late;  /* [n + 1][tiles * 16]: a token's part of d_beta of pre and d_alpha[0], where they are late */
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

/* Gates and Sinkhorn: records, and partial sums of d_alpha and d_beta, without what waits for sums over the token. */
weft_status weft_cuda_boundary_bwd_gates(const weft_call *call, const boundary_work *w);
/* What waits for sums over the whole token, and these: the aggregate's part of d_pre, added to d_pre_out, and the norm's r
 * and k. Reads y and one gradient, 2nC + 2C bytes a token, or rebuilds y: 2nC + 4C. */
weft_status weft_cuda_boundary_bwd_sums(const weft_call *call, const boundary_work *w);
/* Everything behind d_h, as far as it is no sum of partial sums. */
weft_status weft_cuda_boundary_bwd_pass(const weft_call *call, const boundary_work *w);
/* Partial sums of all launches before. */
weft_status weft_cuda_boundary_bwd_fold(const weft_call *call, const boundary_work *w);

#endif
