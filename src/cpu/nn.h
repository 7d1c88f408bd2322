/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of this backend's table of src/core/nn.h share. */
#ifndef WEFT_CPU_NN_H
#define WEFT_CPU_NN_H

#include "core/nn.h"
#include "cpu/common/math.h"
#include "cpu/common/tiles.h"

/* As much of a vector as is left of a row; `fill` beyond it. */
INLINE vf part_load(const float *p, int64_t left, float fill)
{
    if (left >= LANES) return vf_load(p);
    vf v = vf_set1(fill);
    if (left > 0) memcpy(&v, p, (size_t)left * sizeof *p);
    return v;
}

INLINE void part_store(float *p, vf v, int64_t left)
{
    if (left >= LANES)
        vf_store(p, v);
    else if (left > 0)
        memcpy(p, &v, (size_t)left * sizeof *p);
}

/* Runs body(context, item, thread) for every item. */
INLINE void nn_parallel(const weft_nn *nn, int64_t items, int64_t work, cpu_body *body, void *context)
{
    weft_call call = {.exec = nn->exec};
    cpu_parallel(&call, items, work, body, context);
}

INLINE int nn_threads(const weft_nn *nn)
{
    weft_call call = {.exec = nn->exec};
    return cpu_threads(&call);
}

INLINE int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* A product on one thread: the BLAS, or a loop that packs b into `pack`, nn_pack_floats of it. */
enum { PACK_DEPTH = 512, PACK_WIDTH = 2 * LANES };
INLINE int64_t nn_pack_floats(const weft_nn *nn)
{
    return nn->blas ? 0 : PACK_DEPTH * PACK_WIDTH;
}
void CPU(nn_product)(const weft_nn *nn, const weft_matmul *a, float *pack);

weft_status CPU(nn_matmul)(weft_nn *nn, const weft_matmul *a);
weft_status CPU(nn_rope_table)(weft_nn *nn, void *table, int64_t length, int64_t head_dim, double base);
weft_status CPU(nn_rope)(weft_nn *nn, const weft_attention *a, void *qkv, int32_t back);
weft_status CPU(nn_attention_fwd)(weft_nn *nn, const weft_attention *a);
weft_status CPU(nn_attention_bwd)(weft_nn *nn, const weft_attention *a);
weft_status CPU(nn_swiglu_fwd)(weft_nn *nn, const weft_swiglu *a);
weft_status CPU(nn_swiglu_bwd)(weft_nn *nn, const weft_swiglu *a);
weft_status CPU(nn_embed_fwd)(weft_nn *nn, const weft_embed *a);
weft_status CPU(nn_embed_bwd)(weft_nn *nn, const weft_embed *a);
weft_status CPU(nn_loss_fwd)(weft_nn *nn, const weft_loss *a);
weft_status CPU(nn_loss_bwd)(weft_nn *nn, const weft_loss *a);
weft_status CPU(nn_hc_gates_fwd)(weft_nn *nn, const weft_hc_gates *a);
weft_status CPU(nn_hc_gates_bwd)(weft_nn *nn, const weft_hc_gates *a);
weft_status CPU(nn_bias_fwd)(weft_nn *nn, void *rows, const void *bias, int64_t tokens, int64_t width);
weft_status CPU(nn_bias_bwd)(weft_nn *nn, const void *rows, void *bias, int64_t tokens, int64_t width);
weft_status CPU(nn_compose)(weft_nn *nn, const weft_compose *a);
weft_status CPU(nn_gains)(weft_nn *nn, const void *maps, int64_t tokens, int64_t streams, double gains[4]);
weft_status CPU(nn_fill)(weft_nn *nn, void *to, double value, int64_t count);
weft_status CPU(nn_copy)(weft_nn *nn, void *to, const void *from, int64_t count);
weft_status CPU(nn_blend)(weft_nn *nn, const weft_blend *a);
weft_status CPU(nn_adam)(weft_nn *nn, const weft_adam *a);
weft_status CPU(nn_sum)(weft_nn *nn, const void *values, int64_t count, int32_t squares, double *sum);
weft_status CPU(nn_first_bad)(weft_nn *nn, const void *values, weft_dtype dtype, int64_t count, int64_t *index);

#endif
