/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared by the kernels of the fused backward of a site [M11]: a token's record and the workspace. */
#ifndef WEFT_CUDA_SITE_BWD_CUH
#define WEFT_CUDA_SITE_BWD_CUH

#include <type_traits>

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

/* Workspace and decisions of a call, shared by its launches. */
struct boundary_work {
    const weft_mhc_boundary_bwd_args *a;
    site_kind kind;
    boundary_bwd_plan plan;
    bool stored;              /* y is given and can be read in vectors */
    bool waits, late_pre;     /* something, the gradient of this site's pre depends on sums over the whole token */
    uint4 *records;           /* [tiles * 16] */
    float *psi;               /* [rows][n C], where phi has another layout */
    float *dpsi;              /* [pieces][rows][n][BOUNDARY_SLICE], where d_phi or d_norm_weight is requested */
    float *sums;              /* [slices][tiles * 16][sums of a token], where one of them is requested */
    float *d_bias, *d_weight; /* [pieces][BOUNDARY_SLICE], where they are requested */
    float
        *gates;  /* [rows + 3][gate_slots]: d_beta, d_alpha without the late part, where requested; not of a head */
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

/* Gates and Sinkhorn: records, and partial sums of d_alpha and d_beta, without the parts that depend on sums over the token. */
weft_status weft_cuda_boundary_bwd_gates(const weft_call *call, const boundary_work *w);
/* Sums over the whole token and the values that depend on them: the aggregate's part of d_pre, added to d_pre_out, and the norm's r
 * and k. Reads y and one gradient, 2nC + 2C bytes per token, or rebuilds y: 2nC + 4C. */
weft_status weft_cuda_boundary_bwd_sums(const weft_call *call, const boundary_work *w);
/* Everything after d_h except the sums of partial sums. */
weft_status weft_cuda_boundary_bwd_pass(const weft_call *call, const boundary_work *w);
/* Sums of the partial sums of the previous launches. */
weft_status weft_cuda_boundary_bwd_fold(const weft_call *call, const boundary_work *w);

#endif
