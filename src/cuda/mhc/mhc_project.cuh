/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels of the projection [M1] share: a token's streams as one row of K = n*C columns, in the order in which
 * they lie in memory, and psi = phi * norm_weight in that order. */
#ifndef WEFT_CUDA_MHC_PROJECT_CUH
#define WEFT_CUDA_MHC_PROJECT_CUH

#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/streams.cuh"
#include "cuda/mhc/mhc_project_plan.h"

/* Column k of a row is channel k % C of stream k / C, or in the (C,n) order channel k / n of stream k % n. */
struct columns {
    int64_t count;
    uint32_t streams, channels;
    bool cn;
};

static __device__ __forceinline__ void column_at(const columns &k, uint32_t column, uint32_t &stream,
                                                 uint32_t &channel)
{
    stream = k.cn ? column % k.streams : column / k.channels;
    channel = k.cn ? column / k.streams : column % k.channels;
}

/* phi [rows, n, C] and norm_weight [n, C], of any dtype and strides. */
struct weights {
    view phi, norm;
    int32_t rows;
};

static __device__ __forceinline__ float psi_at(const weights &w, uint32_t row, uint32_t stream, uint32_t channel)
{
    float v = get(w.phi, row * w.phi.stride[0] + stream * w.phi.stride[1] + channel * w.phi.stride[2]);
    if (has(w.norm)) v = v * get(w.norm, stream * w.norm.stride[0] + channel * w.norm.stride[1]);
    return v;
}

/* The order in which the streams of a token fill one gapless row, or LAYOUT_ANY. */
static inline stream_layout row_order(const weft_tensor *t)
{
    int64_t n = t->shape[1], channels = t->shape[2];
    if ((t->stride[2] == 1 || channels == 1) && (t->stride[1] == channels || n == 1)) return LAYOUT_NC;
    if ((t->stride[1] == 1 || n == 1) && (t->stride[2] == n || channels == 1)) return LAYOUT_CN;
    return LAYOUT_ANY;
}

/* Rows that tensor-core kernels can copy 16 bytes at a time. */
static inline bool rows_are_plain(const weft_tensor *t, stream_layout order)
{
    int64_t k = t->shape[1] * t->shape[2];
    return order != LAYOUT_ANY && row_order(t) == order && k % 8 == 0 &&
           (t->stride[0] % 8 == 0 || t->shape[0] == 1) && (uintptr_t)t->data % 16 == 0 && k < INT32_MAX / 80;
}

static inline columns columns_of(const weft_call *call, stream_layout order)
{
    return {call->streams * call->channels, (uint32_t)call->streams, (uint32_t)call->channels, order == LAYOUT_CN};
}

/* phi can stand for psi: fp32 rows in the order of x's columns, aligned to pairs. Otherwise it is laid out so. */
static inline bool weft_project_phi_is_psi(const weft_tensor *phi, const weft_tensor *norm, stream_layout order)
{
    return phi->dtype == WEFT_F32 && !weft_has(norm) && row_order(phi) == order &&
           (phi->stride[0] % 2 == 0 || phi->shape[0] == 1) && (uintptr_t)phi->data % 8 == 0 &&
           phi->stride[0] < INT32_MAX / phi->shape[0];
}
weft_status weft_cuda_project_spread(const weft_call *call, const weft_tensor *phi, const weft_tensor *norm_weight,
                                     columns k, float *psi);

/* Kernels for everything that the tensor cores do not take: f32, odd sizes, loose strides, many rows. */
weft_status weft_cuda_project_any_fwd(const weft_call *call, const weft_mhc_project_fwd_args *a);

/* Backward for the operators that aggregate too: d_x[i,c] = base[i,c] + pre[i] du[c] + the projection's part. */
struct project_extra {
    weft_tensor pre; /* [T, n] */
    weft_tensor du;  /* [T, C], activation type or f32; absent: zero */
    weft_tensor
        base; /* like d_x, where d_x is overwritten; absent: what is in d_x where it is added to, else zero */
};
size_t weft_cuda_project_bwd_bytes(const weft_call *call, const weft_mhc_project_bwd_args *a);
weft_status weft_cuda_project_bwd(const weft_call *call, const weft_mhc_project_bwd_args *a,
                                  const project_extra *extra);
/* The same for what the tensor cores do not take; partial: room for the plan's partial sums. */
weft_status weft_cuda_project_any_bwd(const weft_call *call, const weft_mhc_project_bwd_args *a,
                                      const project_extra *extra, float *partial,
                                      const weft_project_bwd_plan *plan);
/* d_phi and d_norm_weight from partial[splits][rows][columns]. */
weft_status weft_cuda_project_finish(const weft_call *call, const weft_mhc_project_bwd_args *a,
                                     const float *partial, int32_t splits, columns k);

#endif
