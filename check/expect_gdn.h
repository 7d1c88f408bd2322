/* SPDX-License-Identifier: Apache-2.0
 *
 * What the evaluators of weft/gdn.h share: numbers with a bound on their error, and tensors by sequence and token. The
 * values are computed here from the equations, not by the reference, so that the reference is checked as well. */
#ifndef WEFT_CHECK_EXPECT_GDN_H
#define WEFT_CHECK_EXPECT_GDN_H

#include <math.h>

#include <weft/gdn.h>

#include "check/expect.h"

/* A value, and how far the backend may be from it. */
typedef struct num {
    double v, e;
} num;

static inline num num_of(double v)
{
    return (num){v, 0};
}

/* u: half an ulp of the backend's arithmetic. */
static inline num num_add(double u, num a, num b)
{
    double v = a.v + b.v, e = a.e + b.e;
    return (num){v, e + u * (fabs(v) + e)};
}

static inline num num_mul(double u, num a, num b)
{
    double v = a.v * b.v, e = fabs(a.v) * b.e + fabs(b.v) * a.e + a.e * b.e;
    return (num){v, e + u * (fabs(v) + e)};
}

/* Below exp(-88) a sigmoid of fp32 arithmetic is 0. */
#define EXPECT_FLUSHED 0x1p-126

static inline double expect_sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* exp at 2 units, sum and quotient; the slope is s (1 - s). */
static inline num num_sigmoid(double u, num x)
{
    double s = expect_sigmoid(x.v);
    return (num){s, s * expect_sigmoid(-x.v) * x.e + 0.1 * x.e * x.e + 5 * u * s + EXPECT_FLUSHED};
}

static inline double expect_silu_slope(double x)
{
    return expect_sigmoid(x) * (1 + x * expect_sigmoid(-x));
}

static inline num num_silu(double u, num x)
{
    double y = x.v * expect_sigmoid(x.v);
    return (num){y, fabs(expect_silu_slope(x.v)) * x.e + 0.3 * x.e * x.e + 6 * u * fabs(y) +
                        fabs(x.v) * EXPECT_FLUSHED};
}

/* |slope'| is at most 1/2. */
static inline num num_silu_slope(double u, num x)
{
    double size = expect_sigmoid(x.v) * (1 + fabs(x.v) * expect_sigmoid(-x.v));
    return (num){expect_silu_slope(x.v), 0.5 * x.e + 10 * u * size + (1 + fabs(x.v)) * EXPECT_FLUSHED};
}

/* Sequences as tokens counted through all of them. */
typedef struct expect_sequences {
    int64_t count, tokens, *start; /* [count + 1] */
} expect_sequences;

expect_sequences expect_sequences_of(expect_call *call, const weft_tensor *first, const char *cu_name);

/* The values of an argument, NULL where it is absent; its shape is that of the tensor. */
double *expect_values_of(const expect_call *call, const char *name);
/* Room for a requested output, of the given length; absent where it is not requested. */
quantity expect_output(expect_call *call, const char *name, int64_t length);

static inline void num_put(quantity q, int64_t i, num x)
{
    if (!q.val) return;
    q.val[i] = x.v;
    q.err[i] = x.e;
}

/* The key head of a head of query and key. */
static inline int64_t expect_key_head(weft_gdn_head_map map, int64_t h, int64_t heads, int64_t key_heads)
{
    return map == WEFT_GDN_TILED ? h % key_heads : h / (heads / key_heads);
}

/* Roundings of a sum of so many terms in at least 16 partial sums, or, on the reference, of one after the other. */
static inline double expect_chain(const expect_scope *s, int64_t terms)
{
    return s->unit < 0x1p-40 ? (double)terms + 2 : ceil((double)terms / 16) + 8;
}

#endif
