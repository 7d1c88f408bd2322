/* SPDX-License-Identifier: Apache-2.0
 *
 * Whole arrays: the arithmetic of optimisers [T6], norms, and the search for values that are not finite. */
#include <math.h>

#include "cpu/nn.h"

enum { SPAN = 1 << 14 }; /* elements per item, and per partial sum */

typedef struct blending {
    float *to;
    const float *from;
    float a, b;
    int64_t count;
} blending;

static void blend_span(void *context, int64_t item, int thread)
{
    const blending *b = context;
    (void)thread;
    for (int64_t i = item * SPAN; i < min64((item + 1) * SPAN, b->count); i += LANES) {
        int64_t left = b->count - i;
        /* NaN times nothing is nothing, and -0 keeps the sign of what is added to it. */
        vf old = b->a == 0 ? vf_set1(-0.0f) : part_load(b->to + i, left, 0) * b->a;
        part_store(b->to + i, b->from ? vf_fma(part_load(b->from + i, left, 0), vf_set1(b->b), old) : old + b->b,
                   left);
    }
}

weft_status CPU(nn_fill)(weft_nn *nn, void *to, double value, int64_t count)
{
    blending b = {.to = to, .b = (float)value, .count = count};
    if (!nn->query) nn_parallel(nn, ceil_div(count, SPAN), count, blend_span, &b);
    return WEFT_OK;
}

weft_status CPU(nn_blend)(weft_nn *nn, const weft_blend *a)
{
    blending s = {a->to, a->from, (float)a->a, (float)a->b, a->count};
    if (!nn->query) nn_parallel(nn, ceil_div(a->count, SPAN), a->count, blend_span, &s);
    return WEFT_OK;
}

weft_status CPU(nn_copy)(weft_nn *nn, void *to, const void *from, int64_t count)
{
    return CPU(nn_blend)(nn, &(weft_blend){.to = to, .from = from, .b = 1, .count = count});
}

static void adam_span(void *context, int64_t item, int thread)
{
    const weft_adam *a = context;
    float *p = a->parameter, *m = a->first, *v = a->second;
    float b1 = (float)a->beta1, b2 = (float)a->beta2, shrink = (float)(1 - a->rate * a->decay);
    float rate = (float)(a->rate * a->correct1), correct = (float)a->correct2;
    (void)thread;
    for (int64_t i = item * SPAN; i < min64((item + 1) * SPAN, a->count); i += LANES) {
        int64_t left = a->count - i;
        vf g = part_load((const float *)a->gradient + i, left, 0) * (float)a->scale;
        vf first = vf_fma(g, vf_set1((float)(1 - a->beta1)), part_load(m + i, left, 0) * b1);
        vf second = vf_fma(g * g, vf_set1((float)(1 - a->beta2)), part_load(v + i, left, 0) * b2);
        part_store(m + i, first, left);
        part_store(v + i, second, left);
        vf step = first * rate / (vf_sqrt(second * correct) + (float)a->eps);
        part_store(p + i, part_load(p + i, left, 0) * shrink - step, left);
    }
}

weft_status CPU(nn_adam)(weft_nn *nn, const weft_adam *a)
{
    weft_adam b = *a;
    if (!nn->query) nn_parallel(nn, ceil_div(a->count, SPAN), a->count, adam_span, &b);
    return WEFT_OK;
}

/* Sums run in double: a few million squares of small gradients would lose digits in float. */
weft_status CPU(nn_sum)(weft_nn *nn, const void *values, int64_t count, int32_t squares, double *sum)
{
    const float *v = values;
    double lanes[WIDE] = {0};
    if (nn->query) return WEFT_OK;
    int64_t i = 0;
    for (; i + WIDE <= count; i += WIDE)
        for (int l = 0; l < WIDE; l++) lanes[l] += squares ? (double)v[i + l] * (double)v[i + l] : (double)v[i + l];
    for (; i < count; i++) lanes[i % WIDE] += squares ? (double)v[i] * (double)v[i] : (double)v[i];
    *sum = 0;
    for (int l = 0; l < WIDE; l++) *sum += lanes[l];
    return WEFT_OK;
}

weft_status CPU(nn_first_bad)(weft_nn *nn, const void *values, weft_dtype dtype, int64_t count, int64_t *index)
{
    const float *v = values;
    (void)dtype; /* this table has one */
    *index = -1;
    if (nn->query) return WEFT_OK;
    for (int64_t i = 0; i < count && *index < 0; i++)
        if (!isfinite(v[i])) *index = i;
    return WEFT_OK;
}
