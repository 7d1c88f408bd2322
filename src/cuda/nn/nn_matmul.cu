/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products [T1] by cuBLASLt, or by a plain tiled kernel where it is not loaded or knows no algorithm; and the two
 * tables of src/core/nn.h. */
#include "cuda/nn/blas.h"
#include "cuda/nn/nn.cuh"

/* ---- without a library -------------------------------------------------------------------------------------------------- */

enum { TILE = 64, DEPTH = 16, PER_THREAD = 4, BLOCK = TILE / PER_THREAD * TILE / PER_THREAD };

/* Strides of op(a) [m, k] and op(b) [k, n]. */
struct product_task {
    const void *a, *b;
    void *c;
    int64_t m, n, k, a_row, a_column, b_row, b_column, ldc;
    float scale;
    bool add;
};

/* A block makes 64 x 64 elements of c, a thread 4 x 4 of them, 16 apart. The sum over k runs in order. */
template <class T, class C> static __global__ void __launch_bounds__(BLOCK) product_kernel(product_task p)
{
    __shared__ float left[DEPTH][TILE + 1], right[DEPTH][TILE + 1];
    const int row = threadIdx.x / 16, column = threadIdx.x % 16;
    const int64_t across = ceil_div(p.n, TILE), i0 = blockIdx.x / across * TILE, j0 = blockIdx.x % across * TILE;
    const T *a = (const T *)p.a, *b = (const T *)p.b;
    float sum[PER_THREAD][PER_THREAD] = {};
    for (int64_t k0 = 0; k0 < p.k; k0 += DEPTH) {
        for (int e = threadIdx.x; e < TILE * DEPTH; e += BLOCK) {
            const int i = e / DEPTH, k = e % DEPTH;
            const bool in_a = i0 + i < p.m && k0 + k < p.k, in_b = j0 + i < p.n && k0 + k < p.k;
            left[k][i] = in_a ? widen(a[(i0 + i) * p.a_row + (k0 + k) * p.a_column]) : 0.0f;
            right[k][i] = in_b ? widen(b[(k0 + k) * p.b_row + (j0 + i) * p.b_column]) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; k++)
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++)
#pragma unroll
                for (int j = 0; j < PER_THREAD; j++)
                    sum[i][j] = __fmaf_rn(left[k][row + 16 * i], right[k][column + 16 * j], sum[i][j]);
        __syncthreads();
    }
    for (int i = 0; i < PER_THREAD; i++)
        for (int j = 0; j < PER_THREAD; j++) {
            const int64_t y = i0 + row + 16 * i, x = j0 + column + 16 * j;
            if (y >= p.m || x >= p.n) continue;
            C *to = (C *)p.c + y * p.ldc + x;
            *to = narrow<C>(p.add ? __fmaf_rn(sum[i][j], p.scale, widen(*to)) : sum[i][j] * p.scale);
        }
}

static weft_status product(const weft_call *call, const weft_matmul *a, weft_dtype in, weft_dtype out)
{
    const product_task p = {.a = a->a,
                            .b = a->b,
                            .c = a->c,
                            .m = a->m,
                            .n = a->n,
                            .k = a->k,
                            .a_row = a->a_transposed ? 1 : a->lda,
                            .a_column = a->a_transposed ? a->lda : 1,
                            .b_row = a->b_transposed ? 1 : a->ldb,
                            .b_column = a->b_transposed ? a->ldb : 1,
                            .ldc = a->ldc,
                            .scale = (float)a->scale,
                            .add = a->add != 0};
    const launch_shape shape = {dim3((unsigned)(ceil_div(a->m, TILE) * ceil_div(a->n, TILE))), BLOCK};
    if (in == WEFT_F32) return launch(call, "product", product_kernel<float, float>, shape, p);
    if (out == WEFT_F32) return launch(call, "product", product_kernel<bf16, float>, shape, p);
    return launch(call, "product", product_kernel<bf16, bf16>, shape, p);
}

weft_status weft_cuda_nn_matmul(weft_nn *nn, const weft_matmul *a)
{
    enum { ALIGN = 256 }; /* as the library likes it */
    const uintptr_t begin = (uintptr_t)weft_nn_room(nn, WEFT_CUDA_BLAS_ROOM + ALIGN);
    void *room = (void *)((begin + ALIGN - 1) / ALIGN * ALIGN);
    NN_ENTER(nn);
    const weft_dtype in = nn->table->dtype, out = a->c_full ? WEFT_F32 : in;
    if (nn->blas && nn->blas->device) {
        const weft_status status = weft_cuda_blas_product(&at.call, nn->blas->device, a, in, out, room);
        if (status != WEFT_ERR_UNSUPPORTED) return status;
    }
    return product(&at.call, a, in, out);
}

/* ---- the tables ------------------------------------------------------------------------------------------------------------ */

#define NN_TABLE(type)                                                                                             \
    {                                                                                                              \
        .dtype = type, .narrow = weft_cuda_nn_narrow, .matmul = weft_cuda_nn_matmul,                               \
        .rope_table = weft_cuda_nn_rope_table, .rope = weft_cuda_nn_rope,                                          \
        .attention_fwd = weft_cuda_nn_attention_fwd, .attention_bwd = weft_cuda_nn_attention_bwd,                  \
        .swiglu_fwd = weft_cuda_nn_swiglu_fwd, .swiglu_bwd = weft_cuda_nn_swiglu_bwd,                              \
        .embed_fwd = weft_cuda_nn_embed_fwd, .embed_bwd = weft_cuda_nn_embed_bwd,                                  \
        .loss_fwd = weft_cuda_nn_loss_fwd, .loss_bwd = weft_cuda_nn_loss_bwd,                                      \
        .hc_gates_fwd = weft_cuda_nn_hc_gates_fwd, .hc_gates_bwd = weft_cuda_nn_hc_gates_bwd,                      \
        .bias_fwd = weft_cuda_nn_bias_fwd, .bias_bwd = weft_cuda_nn_bias_bwd, .add_fwd = weft_cuda_nn_add_fwd,     \
        .add_bwd = weft_cuda_nn_add_bwd, .compose = weft_cuda_nn_compose, .gains = weft_cuda_nn_gains,             \
        .copy = weft_cuda_nn_copy, .fill = weft_cuda_nn_fill, .blend = weft_cuda_nn_blend,                         \
        .unit = weft_cuda_nn_unit, .adam = weft_cuda_nn_adam, .sum = weft_cuda_nn_sum, .clip = weft_cuda_nn_clip,  \
        .first_bad = weft_cuda_nn_first_bad                                                                        \
    }

const weft_nn_table weft_cuda_f32_nn = NN_TABLE(WEFT_F32);
const weft_nn_table weft_cuda_bf16_nn = NN_TABLE(WEFT_BF16);
