/* SPDX-License-Identifier: Apache-2.0
 *
 * What the bounds of the gated delta rule share, token after token and in chunks. */
#ifndef WEFT_CHECK_EXPECT_RULE_H
#define WEFT_CHECK_EXPECT_RULE_H

#include "check/expect_gdn.h"

struct expect_chunk;

typedef struct rule {
    double u, scale, chain_k, chain_v;
    int64_t dk, dv, length;
    const double *q, *k, *v, *beta, *g, *d_o; /* rows of one sequence and head, each with its stride */
    int64_t qs, vs, bs;                       /* elements from one token to the next */
    /* [t][dk][dv], [t][dv]: decayed state, state, what is added to it, and bounds of the columns' errors */
    double *p, *m, *delta, *e_p, *e_m, *e_delta;
    /* In chunks on tensor cores; chunk 0: token after token. Per [t][dv]: errors that a token adds to delta (in
     * backward to the gradient of it), that the state has in addition behind the last token of a chunk (in
     * backward in front of the first), and of an output; per token of a chunk those of the gradients of beta and
     * g. */
    int64_t chunk;
    double split, low, tensor;
    double *own, *end, *e_o, *e_beta, *e_g;
    struct expect_chunk *room;
} rule;

/* Gradients of one sequence and head, and where they go; d_query and d_key gather the heads of a group. */
typedef struct back {
    quantity query, key, value, beta, g, state;
    int64_t q_at, v_at, b_at, state_at; /* of the first token */
    double *d, *e_d, *dd, *e_dd;        /* [dk][dv] and [dv]: gradient of the state by columns; of delta */
} back;

static inline double expect_rule_norm(int64_t count, int64_t stride, const double *x)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += x[i * stride] * x[i * stride];
    return sqrt(sum);
}

void expect_rule_gather(quantity q, int64_t at, double u, double v, double e);

/* Sets e_beta and e_g of r as well. */
struct expect_chunk *expect_chunk_room(expect_scope *scope, rule *r);
/* Fills own, end and e_o, from values that are there. */
void expect_chunks_forward(const rule *r, const double *m0);
/* The same for the gradients of the chunk that begins at t0, b->d being that of the state behind it: fills own,
 * end, e_beta and e_g, and adds to the errors of query and key what operands of products lose. */
void expect_chunk_backward(const rule *r, const back *b, const double *m0, int64_t t0);

#endif
