/* SPDX-License-Identifier: Apache-2.0
 *
 * d_phi and d_norm_weight from partial sums of dpsi over ranges of tokens [M1]: for every kernel that makes them. */
#ifndef WEFT_CUDA_MHC_PROJECT_FINISH_CUH
#define WEFT_CUDA_MHC_PROJECT_FINISH_CUH

#include "cuda/common/reduce.cuh"
#include "cuda/mhc/mhc_project.cuh"

struct finish_args {
    weights w;
    columns k;
    view d_phi, d_norm;
};

/* The partial sums of a column: of its row 0 the first, how far rows and partial sums are apart, how many there are. */
struct finish_parts {
    const float *first;
    int64_t row, part;
    int32_t count;
};

static inline finish_args finish_args_of(const weft_call *call, const weft_mhc_project_bwd_args *a, columns k)
{
    return {{view_of(&a->phi), view_of(&a->norm_weight), (int32_t)call->rows},
            k,
            view_of(&a->d_phi),
            view_of(&a->d_norm_weight)};
}

/* Every row stands for itself but where d_norm_weight is requested, a sum over them. */
static inline int32_t finish_rows(const finish_args *a)
{
    return has(a->d_norm) ? 1 : a->w.rows;
}

/* W columns and one of finish_rows. More than one: neighbours in one stream, or with CN in the order of the streams' rows; a multiple of W. */
template <int W, bool CN = false>
static __device__ __forceinline__ void finish_columns(const finish_args &a, const finish_parts &from,
                                                      int64_t column, int32_t row)
{
    const int first = has(a.d_norm) ? 0 : row, last = has(a.d_norm) ? a.w.rows : first + 1;
    const view &d_phi = a.d_phi, &d_norm = a.d_norm, &phi = a.w.phi, &weights = a.w.norm;
    uint32_t stream[W], channel[W];
    column_at(a.k, (uint32_t)column, stream[0], channel[0]);
#pragma unroll
    for (int e = 1; e < W; e++)
        if constexpr (CN)
            column_at(a.k, (uint32_t)column + e, stream[e], channel[e]);
        else
            stream[e] = stream[0], channel[e] = channel[0] + e;
    float norm[W] = {};
    for (int j = first; j < last; j++) {
        float dpsi[W] = {};
        add_rows<W == 1 ? 8 : 6 /* as the registers allow */>(dpsi, from.first + j * from.row, from.part,
                                                              from.count);
#pragma unroll
        for (int e = 0; e < W; e++) {
            const uint32_t s = stream[e], c = channel[e];
            const float weight = has(weights) ? get(weights, s * weights.stride[0] + c * weights.stride[1]) : 1.0f;
            if (has(d_phi))
                put(d_phi, j * d_phi.stride[0] + s * d_phi.stride[1] + c * d_phi.stride[2], dpsi[e] * weight);
            if (has(d_norm))
                norm[e] =
                    fmaf(dpsi[e], get(phi, j * phi.stride[0] + s * phi.stride[1] + c * phi.stride[2]), norm[e]);
        }
    }
#pragma unroll
    for (int e = 0; e < W; e++)
        if (has(d_norm)) put(d_norm, stream[e] * d_norm.stride[0] + channel[e] * d_norm.stride[1], norm[e]);
}

#endif
