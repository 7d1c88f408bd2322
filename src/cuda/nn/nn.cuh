/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of this backend's tables of src/core/nn.h share. A part serves both tables: it looks at the dtype of the
 * activations once, on the host. Every sum runs in an order that depends on the shape alone. */
#ifndef WEFT_CUDA_NN_CUH
#define WEFT_CUDA_NN_CUH

#include "core/nn.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/vec.cuh"

/* The device of a part, current as long as this lives. */
struct nn_scope {
    weft_call call = {};
    int previous = 0;
    weft_status status;

    explicit nn_scope(const weft_nn *nn)
    {
        call.op = WEFT_OP_COUNT;
        call.exec = nn->exec;
        status = weft_cuda_check_device(&call);
        if (status == WEFT_OK) status = weft_cuda_enter(&call, &previous);
    }
    ~nn_scope()
    {
        if (status == WEFT_OK) weft_cuda_leave(&call, previous);
    }
};

/* Begins a part: nothing more happens in a query. */
#define NN_ENTER(nn)                                                                                               \
    if ((nn)->query) return WEFT_OK;                                                                               \
    const nn_scope at((nn));                                                                                       \
    if (at.status != WEFT_OK) return at.status

/* One of two instances, by the dtype of the activations. */
#define NN_BY_DTYPE(nn, name) ((nn)->table->dtype == WEFT_BF16 ? name<bf16> : name<float>)

static __host__ __device__ inline int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* A number that the host waits for. */
static inline weft_status nn_read(const weft_call *call, void *to, const void *from, size_t bytes)
{
    CUDA_TRY(call, "copy", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_of(call)));
    CUDA_TRY(call, "copy", cudaStreamSynchronize(stream_of(call)));
    return WEFT_OK;
}

/* Whether rows of `width` elements from these addresses can be read 16 bytes at a time. */
template <class T> static inline bool rows_are_vectors(int64_t width, const void *a, const void *b, const void *c)
{
    return width % number<T>::per_vector == 0 && (uintptr_t)a % 16 == 0 && (uintptr_t)b % 16 == 0 &&
           (uintptr_t)c % 16 == 0;
}

extern "C" {

weft_status weft_cuda_nn_narrow(weft_nn *nn, void *to, const void *from, int64_t count);
weft_status weft_cuda_nn_matmul(weft_nn *nn, const weft_matmul *a);
weft_status weft_cuda_nn_rope_table(weft_nn *nn, void *table, int64_t length, int64_t head_dim, double base);
weft_status weft_cuda_nn_rope(weft_nn *nn, const weft_attention *a, void *qkv, int32_t back);
weft_status weft_cuda_nn_attention_fwd(weft_nn *nn, const weft_attention *a);
weft_status weft_cuda_nn_attention_bwd(weft_nn *nn, const weft_attention *a);
weft_status weft_cuda_nn_swiglu_fwd(weft_nn *nn, const weft_swiglu *a);
weft_status weft_cuda_nn_swiglu_bwd(weft_nn *nn, const weft_swiglu *a);
weft_status weft_cuda_nn_embed_fwd(weft_nn *nn, const weft_embed *a);
weft_status weft_cuda_nn_embed_bwd(weft_nn *nn, const weft_embed *a);
weft_status weft_cuda_nn_loss_fwd(weft_nn *nn, const weft_loss *a);
weft_status weft_cuda_nn_loss_bwd(weft_nn *nn, const weft_loss *a);
weft_status weft_cuda_nn_hc_gates_fwd(weft_nn *nn, const weft_hc_gates *a);
weft_status weft_cuda_nn_hc_gates_bwd(weft_nn *nn, const weft_hc_gates *a);
weft_status weft_cuda_nn_bias_fwd(weft_nn *nn, void *rows, const void *bias, int64_t tokens, int64_t width);
weft_status weft_cuda_nn_bias_bwd(weft_nn *nn, const void *rows, void *bias, int64_t tokens, int64_t width);
weft_status weft_cuda_nn_add_fwd(weft_nn *nn, const weft_add *a);
weft_status weft_cuda_nn_add_bwd(weft_nn *nn, const weft_add *a);
weft_status weft_cuda_nn_compose(weft_nn *nn, const weft_compose *a);
weft_status weft_cuda_nn_gains(weft_nn *nn, const void *maps, int64_t tokens, int64_t streams, double gains[4]);
weft_status weft_cuda_nn_copy(weft_nn *nn, void *to, const void *from, int64_t count);
weft_status weft_cuda_nn_fill(weft_nn *nn, void *to, double value, int64_t count);
weft_status weft_cuda_nn_blend(weft_nn *nn, const weft_blend *a);
weft_status weft_cuda_nn_unit(weft_nn *nn, void *to, const void *from, int64_t count);
weft_status weft_cuda_nn_adam(weft_nn *nn, const weft_adam *a);
weft_status weft_cuda_nn_sum(weft_nn *nn, const void *values, int64_t count, int32_t squares, double *sum);
weft_status weft_cuda_nn_clip(weft_nn *nn, const weft_clip_task *a);
weft_status weft_cuda_nn_first_bad(weft_nn *nn, const void *values, weft_dtype dtype, int64_t count,
                                   int64_t *index);

/* Attention of bf16 heads of 64 or 128 channels on tensor cores (nn_attention_mma.cu), where a block may have so many bytes of
 * shared memory; delta [T, heads] = sum of d_o o. */
size_t weft_cuda_attention_mma_shared(int64_t head_dim);
weft_status weft_cuda_attention_mma_fwd(const weft_call *call, const weft_attention *a);
weft_status weft_cuda_attention_mma_bwd(const weft_call *call, const weft_attention *a, const float *delta);
}

#endif
