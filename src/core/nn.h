/* SPDX-License-Identifier: Apache-2.0
 *
 * What a transformer needs besides the operators of weft/mhc.h: matrix products, attention, SwiGLU, embedding, loss, and the
 * arithmetic of optimisers. One table per backend and instruction set; src/model/ is the only caller, so nothing here is
 * checked again. Arrays are dense and of the table's dtype. Sums run in an order fixed by the shape.
 *
 * A part that needs memory asks nn_room for it. In a query that only counts, and nothing runs, so the code that asks and
 * the code that uses is the same. */
#ifndef WEFT_CORE_NN_H
#define WEFT_CORE_NN_H

#include <weft/blas.h>

#include "core/kernel.h"
#include "core/status.h"

typedef struct weft_nn_table weft_nn_table;

/* How a part runs. */
typedef struct weft_nn {
    const weft_exec *exec; /* with the workspace to use */
    const weft_blas *blas; /* NULL: the backend's own loop */
    const weft_nn_table *table;
    bool query;
    size_t need; /* the largest workspace asked for */
} weft_nn;

/* c [m, n] = scale op(a) op(b) (+ c), row-major, op(a) [m, k], op(b) [k, n]. */
typedef struct weft_matmul {
    const void *a, *b;
    void *c;
    int64_t m, n, k, lda, ldb, ldc;
    int32_t a_transposed, b_transposed, add;
    double scale;
} weft_matmul;

/* Causal attention [T2]. qkv rows are q | k | v, each heads * head_dim wide; o has heads * head_dim. */
typedef struct weft_attention {
    int64_t sequences, length, heads, head_dim;
    void *qkv;         /* [T, 3C] after rotation */
    void *o;           /* [T, C] */
    void *lse;         /* [T, heads]: log of the softmax's divisor */
    const void *d_o;   /* backward */
    void *d_qkv;       /* backward: overwritten, before the rotation is undone */
    const void *table; /* [length, head_dim]: half a row of cosines, half of sines */
} weft_attention;

typedef struct weft_embed {
    const int32_t *tokens;
    int64_t count, channels;
    const void *weight; /* [vocab, C] */
    void *rows;         /* [T, C]; backward reads them */
    void *d_weight;     /* backward: added to */
} weft_embed;

typedef struct weft_swiglu {
    int64_t tokens, hidden;
    const void *gate_up; /* [T, 2F]: gate | up */
    void *act;           /* [T, F]: silu(gate) up; backward makes it again */
    const void *d_act;
    void *d_gate_up;
} weft_swiglu;

/* -log softmax(logits)[target] per row; with gradient, logits become its gradient times scale. Rows with target -1 give
 * zero. */
typedef struct weft_loss {
    int64_t tokens, vocab;
    void *logits;
    const int32_t *targets;
    void *losses; /* [T]; forward */
    double scale; /* gradient */
} weft_loss;

/* Gates of the unconstrained connection [T5]; h [T n, n+2], ms [T n], alpha [3], beta [2n + n^2]. */
typedef struct weft_hc_gates {
    int64_t tokens, streams;
    double eps;
    const void *h, *ms, *alpha, *beta;
    void *pre, *post, *res;             /* forward */
    const void *d_pre, *d_post, *d_res; /* backward */
    void *d_h, *d_ms;                   /* overwritten */
    void *d_alpha, *d_beta;             /* added to */
} weft_hc_gates;

/* An n x n map per token, times what is there: to[t] = W[t] to[t], or W[t] itself; W(o, i) = res[o, i] or res[i, o]. */
typedef struct weft_compose {
    int64_t tokens, streams;
    const void *res;
    void *to;
    int32_t in_out, first;
} weft_compose;

typedef struct weft_adam {
    void *parameter, *first, *second;
    const void *gradient;
    int64_t count;
    double rate, beta1, beta2, eps, decay, scale, correct1, correct2; /* correct: 1 / (1 - beta^step) */
} weft_adam;

struct weft_nn_table {
    weft_dtype dtype;
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
    /* rows [T, width] += bias, and bias += the sum of the rows. */
    weft_status (*bias_fwd)(weft_nn *nn, void *rows, const void *bias, int64_t tokens, int64_t width);
    weft_status (*bias_bwd)(weft_nn *nn, const void *rows, void *bias, int64_t tokens, int64_t width);
    weft_status (*compose)(weft_nn *nn, const weft_compose *a);
    /* Largest absolute row and column sum of each map: mean and largest over the tokens, rows first. For the host. */
    weft_status (*gains)(weft_nn *nn, const void *maps, int64_t tokens, int64_t streams, double gains[4]);
    weft_status (*fill)(weft_nn *nn, void *to, double value, int64_t count);
    /* to = a to + b from */
    weft_status (*blend)(weft_nn *nn, void *to, double a, const void *from, double b, int64_t count);
    weft_status (*adam)(weft_nn *nn, const weft_adam *a);
    /* These hand a number to the host, so they wait for the work before them. */
    weft_status (*sum)(weft_nn *nn, const void *values, int64_t count, int32_t squares, double *sum);
    /* Index of the first value that is not finite, or -1. */
    weft_status (*first_bad)(weft_nn *nn, const void *values, int64_t count, int64_t *index);
};

extern const weft_nn_table weft_ref_nn, weft_cpu_base_nn, weft_cpu_avx2_nn, weft_cpu_avx512_nn;

/* The table of exec's backend for this dtype. */
weft_status weft_nn_open(weft_nn *nn, const weft_exec *exec, weft_dtype dtype, const weft_blas *blas);

/* Workspace for a part: NULL in a query, after counting it. exec->workspace is as large as the query said. */
static inline void *weft_nn_room(weft_nn *nn, size_t bytes)
{
    size_t with_slack = bytes + WEFT_ARENA_ALIGN - 1;
    if (bytes && with_slack > nn->need) nn->need = with_slack;
    return nn->query ? NULL : weft_arena_open(nn->exec->workspace).base;
}

#endif
