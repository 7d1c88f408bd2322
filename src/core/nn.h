/* SPDX-License-Identifier: Apache-2.0
 *
 * What a transformer needs besides the operators of weft/mhc.h: matrix products, attention, SwiGLU, embedding, loss, and the
 * arithmetic of optimisers. One table per backend and instruction set; src/model/ is the only caller, so nothing here is
 * checked again. Arrays are dense. Activations have the table's dtype; what is marked "full" (parameters, their gradients,
 * coefficients, losses) is f64 beside f64 and f32 beside everything else. Sums run in an order fixed by the shape.
 *
 * A part that needs memory asks nn_room for it. In a query that only counts, and nothing runs, so the code that asks and
 * the code that uses is the same. */
#ifndef WEFT_CORE_NN_H
#define WEFT_CORE_NN_H

#include <weft/blas.h>

#include "core/kernel.h"
#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct weft_nn_table weft_nn_table;

/* How a part runs. */
typedef struct weft_nn {
    const weft_exec *exec; /* with the workspace to use */
    const weft_blas *blas; /* NULL: the backend's own loop */
    const weft_nn_table *table;
    bool query;
    size_t need; /* the largest workspace asked for */
} weft_nn;

/* The dtype of what is kept in full beside activations of this one. */
static inline weft_dtype weft_nn_full(weft_dtype dtype)
{
    return dtype == WEFT_F64 ? WEFT_F64 : WEFT_F32;
}

/* c [m, n] = scale op(a) op(b) (+ c), row-major, op(a) [m, k], op(b) [k, n]. */
typedef struct weft_matmul {
    const void *a, *b;
    void *c; /* full with c_full, which `add` needs */
    int32_t c_full;
    int64_t m, n, k, lda, ldb, ldc;
    int32_t a_transposed, b_transposed, add;
    double scale;
} weft_matmul;

/* Causal attention [T2]. qkv rows are q | k | v, each heads * head_dim wide; o has heads * head_dim. */
typedef struct weft_attention {
    int64_t sequences, length, heads, head_dim;
    void *qkv;         /* [T, 3C] after rotation */
    void *o;           /* [T, C] */
    void *lse;         /* [T, heads], full: log of the softmax's divisor */
    const void *d_o;   /* backward */
    void *d_qkv;       /* backward: overwritten, before the rotation is undone */
    const void *table; /* [length, head_dim], full: half a row of cosines, half of sines */
} weft_attention;

typedef struct weft_embed {
    const int32_t *tokens;
    int64_t count, channels, vocab;
    const void *weight; /* [vocab, C], full */
    void *rows;         /* [T, C]; backward reads them */
    void *d_weight;     /* backward, full: added to */
} weft_embed;

typedef struct weft_swiglu {
    int64_t tokens, hidden;
    const void *gate_up; /* [T, 2F]: gate | up */
    void *act;           /* [T, F]: silu(gate) up; backward makes it again */
    const void *d_act;
    void *d_gate_up;
} weft_swiglu;

/* -log softmax(logits)[target] per row, and its gradient times scale. Rows with target -1 give zero. */
typedef struct weft_loss {
    int64_t tokens, vocab;
    const void *logits; /* full */
    const int32_t *targets;
    void *losses;   /* [T], full; forward */
    void *d_logits; /* backward; may be the logits themselves where both have one dtype */
    double scale;   /* backward */
} weft_loss;

/* The merge of the plain residual: y = x + D (f + bias) [M6], and d_f = D d_y, d_bias += the sum of its rows. */
typedef struct weft_add {
    int64_t tokens, channels;
    weft_dropout dropout;
    int32_t biased;
    const void *x, *f, *bias; /* bias: full */
    void *y;
    const void *d_y; /* backward */
    void *d_f, *d_bias;
} weft_add;

/* Gates of the unconstrained connection [T5], all of it full; h [T n, n+2], ms [T n], alpha [3], beta [2n + n^2]. */
typedef struct weft_hc_gates {
    int64_t tokens, streams;
    double eps;
    const void *h, *ms, *alpha, *beta;
    void *pre, *post, *res;             /* forward */
    const void *d_pre, *d_post, *d_res; /* backward */
    void *d_h, *d_ms;                   /* overwritten */
    void *d_alpha, *d_beta;             /* added to */
} weft_hc_gates;

/* An n x n map per token, full, times what is there: to[t] = W[t] to[t], or W[t] itself; W(o, i) = res[o, i] or res[i, o]. */
typedef struct weft_compose {
    int64_t tokens, streams;
    const void *res;
    void *to;
    int32_t in_out, first;
} weft_compose;

/* Where a factor is given, it is in the backend's memory and read when the work is done; where it is not finite, nothing
 * is done. src/model resolves it for backends whose memory is the host's. */
typedef struct weft_adam {
    void *parameter, *first, *second; /* full, as all arrays of an optimiser */
    const void *gradient;
    int64_t count;
    double rate, beta1, beta2, eps, decay, scale, correct1, correct2; /* correct: 1 / (1 - beta^step) */
    const double *factor;                                             /* of scale */
} weft_adam;

/* to = a to + b from */
typedef struct weft_blend {
    void *to;
    const void *from;
    double a, b;
    int64_t count;
    const double *factor, *guard; /* of b; a factor that is only looked at */
} weft_blend;

/* norm = sqrt(sum of sums), factor = min(1, largest / norm), or NaN where the norm or one of `others` is not finite. */
typedef struct weft_clip_task {
    const double *sums, *others;
    int32_t count, num_others;
    double largest; /* 0: any */
    double *norm, *factor;
} weft_clip_task;

struct weft_nn_table {
    weft_dtype dtype;
    /* to = from, rounded; of no use where activations are full, and NULL on the host. */
    weft_status (*narrow)(weft_nn *nn, void *to, const void *from, int64_t count);
    weft_status (*matmul)(weft_nn *nn, const weft_matmul *a);
    weft_status (*rope_table)(weft_nn *nn, void *table, int64_t length, int64_t head_dim, double base);
    /* q and k of every row turned by their position, or back. */
    weft_status (*rope)(weft_nn *nn, const weft_attention *a, void *qkv, int32_t back);
    weft_status (*attention_fwd)(weft_nn *nn, const weft_attention *a);
    weft_status (*attention_bwd)(weft_nn *nn, const weft_attention *a);
    weft_status (*swiglu_fwd)(weft_nn *nn, const weft_swiglu *a);
    weft_status (*swiglu_bwd)(weft_nn *nn, const weft_swiglu *a);
    weft_status (*embed_fwd)(weft_nn *nn, const weft_embed *a);
    weft_status (*embed_bwd)(weft_nn *nn, const weft_embed *a);
    weft_status (*loss_fwd)(weft_nn *nn, const weft_loss *a);
    weft_status (*loss_bwd)(weft_nn *nn, const weft_loss *a);
    weft_status (*hc_gates_fwd)(weft_nn *nn, const weft_hc_gates *a);
    weft_status (*hc_gates_bwd)(weft_nn *nn, const weft_hc_gates *a);
    /* rows [T, width] += bias, and bias += the sum of the rows; bias is full. */
    weft_status (*bias_fwd)(weft_nn *nn, void *rows, const void *bias, int64_t tokens, int64_t width);
    weft_status (*bias_bwd)(weft_nn *nn, const void *rows, void *bias, int64_t tokens, int64_t width);
    /* NULL where mhc_post is as quick with one stream. */
    weft_status (*add_fwd)(weft_nn *nn, const weft_add *a);
    weft_status (*add_bwd)(weft_nn *nn, const weft_add *a);
    weft_status (*compose)(weft_nn *nn, const weft_compose *a);
    /* Largest absolute row and column sum of each map: mean and largest over the tokens, rows first. For the host: it waits
     * for the work before it, as first_bad does, and nothing else. */
    weft_status (*gains)(weft_nn *nn, const void *maps, int64_t tokens, int64_t streams, double gains[4]);
    weft_status (*copy)(weft_nn *nn, void *to, const void *from, int64_t count);
    /* A full array. */
    weft_status (*fill)(weft_nn *nn, void *to, double value, int64_t count);
    weft_status (*blend)(weft_nn *nn, const weft_blend *a);
    /* to = from / (its norm + 1e-7), and the clipping below: NULL where the host reaches the numbers by itself. */
    weft_status (*unit)(weft_nn *nn, void *to, const void *from, int64_t count);
    weft_status (*adam)(weft_nn *nn, const weft_adam *a);
    /* Of a full array, to the backend's memory. */
    weft_status (*sum)(weft_nn *nn, const void *values, int64_t count, int32_t squares, double *sum);
    weft_status (*clip)(weft_nn *nn, const weft_clip_task *a);
    /* Index of the first value that is not finite, or -1. For the host. */
    weft_status (*first_bad)(weft_nn *nn, const void *values, weft_dtype dtype, int64_t count, int64_t *index);
};

/* The table of exec's backend for this dtype; exec has the current layout and must outlive nn. */
weft_status weft_nn_open(weft_nn *nn, const weft_exec *exec, weft_dtype dtype, const weft_blas *blas);

/* Workspace for a part: NULL in a query, after counting it. exec->workspace is as large as the query said. */
static inline void *weft_nn_room(weft_nn *nn, size_t bytes)
{
    size_t with_slack = bytes + WEFT_ARENA_ALIGN - 1;
    if (bytes && with_slack > nn->need) nn->need = with_slack;
    return nn->query ? (void *)0 : weft_arena_open(nn->exec->workspace).base;
}

#ifdef __cplusplus
}
#endif
#endif
